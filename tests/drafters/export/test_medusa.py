"""Medusa's two forms: what is written, what is read, what their engines compute with it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from drafters import TargetModel
from drafters.export import ExportError, dialect_of, golden_inputs, read_as, read_head, write_as
from drafters.export.dialects.medusa import OFFICIAL_MEDUSA
from drafters.export.dialects.medusa_vllm import VLLM_MEDUSA
from drafters.export.reading import check_folder
from tests.drafters.export.written import Written, assert_same, logits, make_head
from tests.tiny import tiny_target

VARIANTS: dict[str, dict[str, Any]] = {
    "one block": {"num_heads": 3},
    "two blocks": {"num_heads": 2, "num_layers": 2},
    "shared": {"num_heads": 2, "shared_lm_head": True},
}
REDUCED: dict[str, dict[str, Any]] = {
    "reduced": {"num_heads": 2, "draft_vocab_size": 40},
    "reduced, shared": {"num_heads": 2, "draft_vocab_size": 40, "shared_lm_head": True},
}
CASES = [
    *(("medusa", options) for options in VARIANTS.values()),
    *(("vllm-medusa", options) for options in {**VARIANTS, **REDUCED}.values()),
]
WEIGHTS = {"medusa": "medusa_lm_head.safetensors", "vllm-medusa": "model.safetensors"}
CONFIGS: dict[str, dict[str, Any]] = {
    "medusa": {
        "medusa_num_heads": 2,
        "medusa_num_layers": 2,
        "medusa_fc_bias": True,
        "base_model_name_or_path": "tiny",
        "version": "2",
        "hidden_size": 32,
        "vocab_size": 96,
        "torch_dtype": "float32",
    },
    "vllm-medusa": {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": 32,
        "vocab_size": 96,
        "truncated_vocab_size": 96,
        "num_heads": 2,
        "num_hidden_layers": 2,
        "medusa_fc_bias": True,
        "original_lm_head": False,
        "torch_dtype": "float32",
    },
}


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target(dtype=torch.float32)


def written(name: str, target: TargetModel, folder: Path, **options: Any) -> Written:
    write_as(name, make_head("medusa", target, **options), folder)
    return Written(folder, WEIGHTS[name])


# What is written ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_head_comes_back_the_same(
    name: str, options: dict[str, Any], target: TargetModel, tmp_path: Path
) -> None:
    head = make_head("medusa", target, **options)
    write_as(name, head, tmp_path / "head")
    assert_same(read_head(tmp_path / "head", target), head)
    Written(tmp_path / "head", WEIGHTS[name]).save(foreign=True)
    assert dialect_of(tmp_path / "head").name == name
    assert_same(read_head(tmp_path / "head", target), head)


def test_the_authors_names_and_keys(target: TargetModel, tmp_path: Path) -> None:
    found = written("medusa", target, tmp_path / "head", num_heads=2, num_layers=2)
    assert found.config == CONFIGS["medusa"]
    assert found.shapes == {
        "0.0.linear.weight": [32, 32],
        "0.0.linear.bias": [32],
        "0.1.linear.weight": [32, 32],
        "0.1.linear.bias": [32],
        "0.2.weight": [96, 32],
        "1.0.linear.weight": [32, 32],
        "1.0.linear.bias": [32],
        "1.1.linear.weight": [32, 32],
        "1.1.linear.bias": [32],
        "1.2.weight": [96, 32],
    }


def test_vllms_names_and_keys(target: TargetModel, tmp_path: Path) -> None:
    found = written("vllm-medusa", target, tmp_path / "head", num_heads=2, num_layers=2)
    assert found.config == CONFIGS["vllm-medusa"]
    assert found.shapes == {
        "blocks.0.layers.0.weight": [32, 32],
        "blocks.0.layers.0.bias": [32],
        "blocks.0.layers.1.weight": [32, 32],
        "blocks.0.layers.1.bias": [32],
        "blocks.1.layers.0.weight": [32, 32],
        "blocks.1.layers.0.bias": [32],
        "blocks.1.layers.1.weight": [32, 32],
        "blocks.1.layers.1.bias": [32],
        "lm_heads.0.weight": [96, 32],
        "lm_heads.1.weight": [96, 32],
    }


def test_vllm_has_one_matrix_and_a_map(target: TargetModel, tmp_path: Path) -> None:
    head = make_head("medusa", target, **REDUCED["reduced, shared"])
    export = write_as("vllm-medusa", head, tmp_path / "head")
    found = Written(tmp_path / "head")
    assert found.config["original_lm_head"] is True
    assert found.config["truncated_vocab_size"] == 40
    assert found.shapes["lm_head.weight"] == [40, 32] and "lm_heads.0.weight" not in found.shapes
    assert found.tensors["token_map"].tolist() == head.draft_vocab.tolist()
    assert export.served == ("vllm",)


def test_what_serves_it_is_said(target: TargetModel, tmp_path: Path) -> None:
    options = {"num_layers": 2, "shared_lm_head": True, "confidence_head": True}
    export = write_as("medusa", make_head("medusa", target, **options), tmp_path / "a")
    said = " ".join(export.notes)
    assert export.served == ("vllm", "tgi", "tensorrt-llm")
    for part in (
        "up to 0.32.0",
        "no tree",
        "copy of the target's",
        "ties the residual",
        "confiden",
    ):
        assert part in said
    assert export.left_out == ("confidence.proj.bias", "confidence.proj.weight")
    reduced = make_head("medusa", target, **REDUCED["reduced"])
    export = write_as("vllm-medusa", reduced, tmp_path / "b")
    assert export.served == () and "refuses" in export.notes[-1]


def test_a_draft_vocabulary_has_no_place_in_the_authors_form(
    target: TargetModel, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match=r"draft_vocab_size=40: .* write the vllm-medusa dialect"):
        written("medusa", target, tmp_path / "head", draft_vocab_size=40)


@pytest.mark.parametrize("name", ["medusa", "vllm-medusa"])
def test_a_biased_output_matrix_is_no_matrix(name: str, tmp_path: Path) -> None:
    target = tiny_target(dtype=torch.float32)
    target.lm_head.bias = nn.Parameter(torch.ones(96))
    with pytest.raises(ExportError, match="has a bias"):
        written(name, target, tmp_path / "head", shared_lm_head=True)
    head = make_head("medusa", target)
    write_as(name, head, tmp_path / "own")
    assert_same(read_head(tmp_path / "own", target), head)


def test_half_precision(target: TargetModel, tmp_path: Path) -> None:
    for name in WEIGHTS:
        head = make_head("medusa", target, shared_lm_head=True).bfloat16()
        write_as(name, head, tmp_path / name)
        again = read_as(name, tmp_path / name, target)
        assert again.config.shared_lm_head and torch.equal(logits(again), logits(head))


# What engines compute -----------------------------------------------------------------------------


def sequences(folder: Written, hidden: Tensor) -> Tensor:
    """Text Generation Inference, from the authors' names: (H,) -> (K, V)."""
    rows = []
    for i in range(folder.config["medusa_num_heads"]):
        x = hidden
        for j in range(folder.config["medusa_num_layers"]):
            weight, bias = (folder.tensors[f"{i}.{j}.linear.{kind}"] for kind in ("weight", "bias"))
            x = x + silu(weight @ x + bias)
        rows.append(folder.tensors[f"{i}.{folder.config['medusa_num_layers']}.weight"] @ x)
    return torch.stack(rows)


def vllm(folder: Written, hidden: Tensor) -> Tensor:
    """vLLM 0.32's loader and model, for both forms of files: (H,) -> (K, V)."""
    config = {**folder.config}
    for key in list(config):
        for word, ours in (("heads", "num_heads"), ("layers", "num_hidden_layers")):
            if "num" in key and word in key:
                config[ours] = config.pop(key)
    tensors = {}
    for name, tensor in folder.tensors.items():
        place = name.split(".")
        if not place[0].isdigit():
            tensors[name] = tensor
        elif place[2] == "linear":
            tensors[f"blocks.{place[0]}.layers.{place[1]}.{place[3]}"] = tensor
        else:
            tensors[f"lm_heads.{place[0]}.{place[2]}"] = tensor
    rows, whole = config.get("truncated_vocab_size") or config["vocab_size"], config["vocab_size"]
    out = []
    for i in range(config["num_heads"]):
        x = hidden
        for j in range(config["num_hidden_layers"]):
            change = tensors[f"blocks.{i}.layers.{j}.weight"] @ x
            if config.get("medusa_fc_bias", False):
                change = change + tensors[f"blocks.{i}.layers.{j}.bias"]
            x = x + silu(change)
        shared = config.get("original_lm_head", False)
        matrix = tensors["lm_head.weight" if shared else f"lm_heads.{i}.weight"]
        found = matrix @ x
        if rows < whole:
            found = torch.full((whole,), -torch.inf).index_copy(0, tensors["token_map"], found)
        out.append(found)
    return torch.stack(out)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_engines_compute_the_same_logits(
    name: str, options: dict[str, Any], target: TargetModel, tmp_path: Path
) -> None:
    head = make_head("medusa", target, **options)
    write_as(name, head, tmp_path / "head")
    folder, hidden = Written(tmp_path / "head", WEIGHTS[name]), golden_inputs(head)["features"][-1]
    wanted = head.to_target_logits(logits(head))
    torch.testing.assert_close(vllm(folder, hidden), wanted, rtol=1e-4, atol=1e-4)
    if name == "medusa":
        torch.testing.assert_close(sequences(folder, hidden), wanted, rtol=1e-4, atol=1e-4)


# From one form to the other -----------------------------------------------------------------------


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_both_forms_hold_the_same_head(
    options: dict[str, Any], target: TargetModel, tmp_path: Path
) -> None:
    head = make_head("medusa", target, **options)
    write_as("medusa", head, tmp_path / "a")
    write_as("vllm-medusa", read_head(tmp_path / "a", target), tmp_path / "b")
    write_as("medusa", read_head(tmp_path / "b", target), tmp_path / "c")
    for name in ("a", "b", "c"):
        assert_same(read_head(tmp_path / name, target), head)
    first, last = (Written(tmp_path / name, WEIGHTS["medusa"]) for name in ("a", "c"))
    assert first.config == last.config
    assert all(torch.equal(last.tensors[name], t) for name, t in first.tensors.items())


def test_copies_of_the_targets_matrix_are_one(target: TargetModel, tmp_path: Path) -> None:
    found = written("medusa", target, tmp_path / "a", num_heads=2, shared_lm_head=True)
    matrix = target.lm_head.weight
    assert all(torch.equal(found.tensors[f"{i}.1.weight"], matrix) for i in range(2))
    write_as("vllm-medusa", read_head(tmp_path / "a", target), tmp_path / "b")
    assert torch.equal(Written(tmp_path / "b").tensors["lm_head.weight"], matrix)
    found.tensors["1.1.weight"][0, 0] += 1  # one of them was trained
    assert not read_head(found.save(foreign=True), target).config.shared_lm_head


def test_one_trained_matrix_for_all_heads(target: TargetModel, tmp_path: Path) -> None:
    """vLLM can store it; here, and in the authors' form, every head then has its own copy."""
    found = written("vllm-medusa", target, tmp_path / "a", num_heads=2, shared_lm_head=True)
    found.tensors["lm_head.weight"] += 0.1
    head = read_head(found.save(foreign=True), target)
    assert not head.config.shared_lm_head
    assert torch.equal(head.lm_heads[0].weight, head.lm_heads[1].weight)
    write_as("medusa", head, tmp_path / "b")
    assert torch.equal(logits(read_head(tmp_path / "b", target)), logits(head))
    hidden = golden_inputs(head)["features"][-1]
    torch.testing.assert_close(vllm(found, hidden), logits(head), rtol=1e-4, atol=1e-4)


# Heads of other trainers --------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "medusa_head.", "medusa_heads."])
def test_a_published_head(
    prefix: str, target: TargetModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A pickle, with a config that says little, and names fewer heads than the file has."""
    head = make_head("medusa", target, num_heads=5)
    write_as("medusa", head, tmp_path / "head")
    folder = Written(tmp_path / "head", WEIGHTS["medusa"])
    folder.tensors = {prefix + name: tensor for name, tensor in folder.tensors.items()}
    folder.config = {
        "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
        "medusa_num_heads": 2,
        "medusa_num_layers": 1,
        "transformers_version": "4.31.0",
    }
    folder.save("medusa_lm_head.pt", foreign=True)
    assert_same(read_head(tmp_path / "head", target), head)
    assert "names 2 heads, the file has 5" in caplog.text


def test_a_head_without_matrices_borrows_the_targets(target: TargetModel, tmp_path: Path) -> None:
    """Text Generation Inference's second kind."""
    head = make_head("medusa", target, num_heads=2, shared_lm_head=True)
    write_as("medusa", head, tmp_path / "head")
    folder = Written(tmp_path / "head", WEIGHTS["medusa"])
    folder.tensors = {name: t for name, t in folder.tensors.items() if "linear" in name}
    assert_same(read_head(folder.save(foreign=True), target), head)


def test_a_foreign_vllm_head(target: TargetModel, tmp_path: Path) -> None:
    """No biases, whole matrices beside a map in another order, and the official spelling."""
    head = make_head("medusa", target, num_heads=2, draft_vocab_size=40)
    for block in head.blocks:
        nn.init.zeros_(block[0].linear.bias)
    write_as("vllm-medusa", head, tmp_path / "head")
    folder = Written(tmp_path / "head")
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    kept = head.draft_vocab[order]
    folder.tensors["token_map"] = kept
    for i in range(2):
        whole = torch.randn(96, 32)
        whole[kept] = folder.tensors[f"lm_heads.{i}.weight"][order]
        folder.tensors[f"lm_heads.{i}.weight"] = whole
        del folder.tensors[f"blocks.{i}.layers.0.bias"]
    folder.config = {"model_type": "medusa", "medusa_num_heads": 2}
    assert_same(read_head(folder.save(foreign=True), target), head)


# What an engine would not tell --------------------------------------------------------------------

Change = Callable[[Written], object]


def put(name: str, tensor: Tensor) -> Change:
    return lambda folder: folder.tensors.update({name: tensor})


def drop(*names: str) -> Change:
    return lambda folder: [folder.tensors.pop(name) for name in names]


def configure(**changes: Any) -> Change:
    return lambda folder: folder.config.update(changes)


OFFICIAL_VIOLATIONS: dict[str, tuple[Change, str]] = {
    "missing": (drop("0.0.linear.bias"), "missing tensor 0.0.linear.bias"),
    "one matrix missing": (drop("1.1.weight"), "missing tensor 1.1.weight: the other heads"),
    "unknown": (put("1.1.bias", torch.ones(96)), "unknown tensor 1.1.bias"),
    "a head too many": (configure(medusa_num_heads=1), "unknown tensor 1.0.linear.weight"),
    "mis-shaped": (put("0.1.weight", torch.ones(32, 96)), "0.1.weight .* its transpose"),
    "not finite": (put("0.0.linear.bias", torch.full((32,), torch.nan)), "not finite"),
    "never trained": (put("0.1.weight", torch.zeros(96, 32)), "0.1.weight is all zeros"),
    "architectures": (configure(architectures=["LlamaForCausalLM"]), "architectures must not be"),
    "no biases": (configure(medusa_fc_bias=False), "medusa_fc_bias must be True"),
    "another vocabulary": (configure(vocab_size=97), "vocab_size is 97 but the target has 96"),
    "scaled logits": (configure(logit_scale=2.0), "logit_scale=2.0 is not supported"),
    "another type": (configure(torch_dtype="float64"), "torch_dtype float64 is not one of"),
}
VLLM_VIOLATIONS: dict[str, tuple[Change, str]] = {
    "missing": (drop("blocks.1.layers.0.weight"), "missing tensor blocks.1.layers.0.weight"),
    "map missing": (drop("token_map"), "missing tensor token_map: truncated_vocab_size is below"),
    "no map needed": (
        configure(truncated_vocab_size=96),
        "unknown tensor token_map .*: truncated_vocab_size is equal",
    ),
    "biases without a key": (
        configure(medusa_fc_bias=False),
        "unknown tensor blocks.0.layers.0.bias .*: medusa_fc_bias is false",
    ),
    "shared without a matrix": (
        configure(original_lm_head=True),
        "unknown tensor lm_heads.0.weight .*missing tensor lm_head.weight",
    ),
    "offsets": (
        lambda folder: folder.tensors["token_map"].sub_(torch.arange(40)),
        "token_map names a token twice",
    ),
    "out of range": (
        lambda folder: folder.tensors["token_map"].add_(60),
        "token_map leads out of the target's vocabulary",
    ),
    "clobbered": (configure(num_attention_heads=4), "num_attention_heads must not be there"),
    "too large": (configure(truncated_vocab_size=97), "truncated_vocab_size is larger"),
    "another architecture": (configure(architectures=["M"]), "architectures must be"),
}


@pytest.mark.parametrize("violation", OFFICIAL_VIOLATIONS)
def test_violations_of_the_authors_form_are_named(
    violation: str, target: TargetModel, tmp_path: Path
) -> None:
    folder = written("medusa", target, tmp_path / "head", num_heads=2)
    check_folder(folder.path, target, OFFICIAL_MEDUSA)
    change, message = OFFICIAL_VIOLATIONS[violation]
    change(folder)
    folder.save()
    with pytest.raises(ExportError, match=message):
        check_folder(folder.path, target, OFFICIAL_MEDUSA)


@pytest.mark.parametrize("violation", VLLM_VIOLATIONS)
def test_violations_of_vllms_form_are_named(
    violation: str, target: TargetModel, tmp_path: Path
) -> None:
    folder = written("vllm-medusa", target, tmp_path / "head", **REDUCED["reduced"])
    check_folder(folder.path, target, VLLM_MEDUSA)
    change, message = VLLM_VIOLATIONS[violation]
    change(folder)
    folder.save()
    with pytest.raises(ExportError, match=message):
        check_folder(folder.path, target, VLLM_MEDUSA)
