"""DSpark files of other trainers, what engines do with ours, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters import TargetModel
from drafters.export import DIALECTS, ExportError, check_folder, read_head, write_as
from drafters.export.registry import dialect_of
from tests.drafters.export.block_engine import Folder, example, own_logits
from tests.drafters.export.test_dflash import LAYERS
from tests.drafters.export.test_dspark import (
    ARCHITECTURES,
    ELSEWHERE,
    FORMS,
    HEADS,
    R,
    make_head,
    variant,
)
from tests.tiny import tiny_target

FLAT_KEYS = {
    "target_layer_ids": [1, 2, 4],
    "mask_token_id": 7,
    "num_anchors": 512,
    "markov_rank": R,
    "markov_head_type": "gated",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
FOREIGN: dict[str, dict[str, Any]] = {
    "dspark": FLAT_KEYS,
    "dspark-specforge": {
        "dflash_config": {
            "target_layer_ids": [1, 2, 4],
            "mask_token_id": 7,
            "projector_type": "dspark",
            "markov_rank": R,
            "markov_head_type": "gated",
            "confidence_head_alpha": 1.0,
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }
    },
    "dspark-modelopt": {
        "dflash_config": {
            "target_layer_ids": [1, 2, 4],
            "mask_token_id": 7,
            "projector_type": "dspark",
            "shift_label": True,
            "markov_rank": R,
            "markov_head_type": "gated",
            "use_confidence_head": True,
        }
    },
}
"""What each trainer writes beyond the layers, and nothing else."""


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target(dtype=torch.float32)


def foreign(target: TargetModel, folder: Path, form: str) -> Folder:
    """A file as its trainer writes it."""
    write_as(form, variant(target, "gated"), folder)
    files = Folder(folder)
    files.config = {key: files.config[key] for key in LAYERS} | {
        "architectures": [ARCHITECTURES[form]],
        "model_type": "qwen3",
        "block_size": 4,
        "num_target_layers": 6,
        "layer_types": ["full_attention"] * 2,
        "dtype": "float32",
        **FOREIGN[form],
    }
    files.save()
    return files


@pytest.mark.parametrize("form", FORMS)
def test_a_trainer_s_own_config_is_enough(target: TargetModel, tmp_path: Path, form: str) -> None:
    foreign(target, tmp_path / "head", form)
    head = variant(target, "gated")
    assert dialect_of(tmp_path / "head").name == form
    again, inputs = read_head(tmp_path / "head", target), example(head)
    assert again.confidence is not None
    for name, tensor in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert torch.equal(own_logits(again, *inputs), own_logits(head, *inputs))
    with pytest.raises(ExportError, match=r"key .* is missing"):
        check_folder(tmp_path / "head", target, DIALECTS[form])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("names", ["dspark", "dspark-modelopt"])
def test_flat_and_nested_names_are_read_in_every_form(
    target: TargetModel, tmp_path: Path, form: str, names: str
) -> None:
    files = foreign(target, tmp_path / "head", form)
    own, other = (list(HEADS[key]) for key in (form, names))
    for old, new in zip(own[:6], other[:6], strict=True):
        files.tensors[new] = files.tensors.pop(old)
    del files.tensors[other[3]]  # the bias of zeros
    files.save()
    head = variant(target, "gated")
    again, inputs = read_head(tmp_path / "head", target), example(head)
    assert torch.equal(own_logits(again, *inputs), own_logits(head, *inputs))


def test_a_bias_of_another_trainer_is_kept(target: TargetModel, tmp_path: Path) -> None:
    files = foreign(target, tmp_path / "head", "dspark-specforge")
    files.tensors["markov_head.gate_proj.bias"] += 1.5
    files.save()
    head = read_head(tmp_path / "head", target)
    assert head.config.markov_bias
    assert set(head.state_dict()["markov_head.gate_proj.bias"].tolist()) == {1.5}


def test_a_confidence_output_of_another_precision_is_read(
    target: TargetModel, tmp_path: Path
) -> None:
    files = foreign(target, tmp_path / "head", "dspark")
    wide = [name for name in files.tensors if name.startswith("confidence_head")]
    files.tensors = {
        name: tensor if name in wide else tensor.bfloat16()
        for name, tensor in files.tensors.items()
    }
    files.config["dtype"] = "bfloat16"
    files.save()
    assert read_head(tmp_path / "head", target, torch.bfloat16).dtype == torch.bfloat16


def test_deepspec_s_dflash_is_a_dspark_without_markov(target: TargetModel, tmp_path: Path) -> None:
    write_as("dspark", make_head(target, markov_type="none"), tmp_path / "head")
    files = Folder(tmp_path / "head")
    for name in ("markov_head_type", "confidence_head_with_markov", "sample_from_anchor"):
        del files.config[name]  # DeepSpec writes none of them then
    files.save()
    head = read_head(tmp_path / "head", target)
    assert (head.family, head.config.markov_type) == ("dspark", "none")


def test_a_bonus_anchor_is_drafting_in_place(target: TargetModel, tmp_path: Path) -> None:
    files = foreign(target, tmp_path / "head", "dspark")
    files.config["dspark_bonus_anchor"] = True
    files.save()
    head = read_head(tmp_path / "head", target)
    assert (head.config.sample_from_anchor, head.num_drafts) == (False, 3)


# What engines do --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "options", "served"),
    [
        ("dspark", {}, ("sglang", "vllm", "llama.cpp")),
        ("dspark", {"draft_vocab_size": 40}, ("vllm", "llama.cpp")),
        ("dspark", {"markov_type": "gated"}, ("sglang",)),
        ("dspark", {"markov_type": "none"}, ()),
        ("dspark", ELSEWHERE["confidence of the row"], ("sglang", "vllm")),
        ("dspark-specforge", {}, ("sglang", "vllm", "llama.cpp")),
        ("dspark-specforge", {"markov_type": "rnn"}, ("sglang",)),
        ("dspark-modelopt", {}, ("tensorrt-llm",)),
    ],
)
def test_engines_are_named(
    target: TargetModel,
    tmp_path: Path,
    form: str,
    options: dict[str, Any],
    served: tuple[str, ...],
) -> None:
    assert write_as(form, make_head(target, **options), tmp_path / "head").served == served


@pytest.mark.parametrize(
    ("options", "note"),
    [
        ({"markov_type": "none"}, "without a Markov head no engine loads it"),
        ({"markov_type": "rnn"}, "a rnn Markov head: vLLM and llama.cpp run vanilla ones only"),
        ({"confidence_head": True}, "the confidence output is in the file"),
        (
            {"confidence_head": True, "confidence_temperatures": [1.5]},
            "calibration has no place in the file",
        ),
        ({"sample_from_anchor": False}, "one position early"),
        ({}, "ask for 4 drafts"),
        ({"causal": True}, "SGLang 0.5.12 and the authors' own dflash_generate"),
        ({"num_layers": 3, "sliding_window": 8, "window_layers": [1]}, "V2 model runner"),
    ],
)
def test_what_engines_do_not_do_is_said(
    target: TargetModel, tmp_path: Path, options: dict[str, Any], note: str
) -> None:
    export = write_as("dspark", make_head(target, **options), tmp_path / "head")
    assert any(note in found for found in export.notes), export.notes


# What is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "options", "message"),
    [
        (
            "dspark-specforge",
            {"draft_vocab_size": 40},
            r"draft_vocab_size=40: .* write it as dspark",
        ),
        (
            "dspark-modelopt",
            {"draft_vocab_size": 40},
            r"draft_vocab_size=40: .* write it as dspark",
        ),
        ("dspark-modelopt", {"markov_type": "none"}, "markov_type=none"),
        ("dspark-modelopt", {"sample_from_anchor": False}, "sample_from_anchor=False"),
        ("dspark-modelopt", ELSEWHERE["confidence of the row"], "confidence_with_markov=False"),
        ("dspark", {"qk_norm": False}, "qk_norm=False"),
        ("dflash", {}, "the dflash dialect is for dflash heads and this is a dspark head"),
    ],
)
def test_what_a_form_cannot_hold_is_refused(
    target: TargetModel, tmp_path: Path, form: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ExportError, match=message):
        write_as(form, make_head(target, **options), tmp_path / "head")


def top(**changes: Any) -> Callable[[Folder], object]:
    return lambda files: files.config.update(changes)


def drop(name: str) -> Callable[[Folder], object]:
    return lambda files: files.tensors.pop(name)


def absolute_ids(files: Folder) -> None:
    files.tensors["d2t"] += torch.arange(40)


def flatten(files: Folder) -> None:
    files.tensors["markov_w1.weight"] = files.tensors.pop("markov_head.markov_w1.weight")


VIOLATIONS: dict[str, tuple[Callable[[Folder], object], str]] = {
    "missing tensor": (
        drop("markov_head.markov_w2.weight"),
        "missing tensor markov_head.markov_w2",
    ),
    "missing bias": (drop("markov_head.gate_proj.bias"), r"missing tensor .*gate_proj.bias"),
    "missing confidence": (drop("confidence_head.proj.weight"), r"missing tensor confidence_head"),
    "a flat name": (flatten, r"unknown tensor markov_w1.weight"),
    "missing d2t": (drop("d2t"), r"missing tensor d2t: draft_vocab_size is below vocab_size"),
    "absolute ids": (absolute_ids, "d2t leads out of the target's vocabulary"),
    "another kind": (top(markov_head_type="lstm"), "markov_head_type='lstm' is not supported"),
    "another rank": (top(markov_rank=4), r"markov_w1.weight has shape \[96, 8\]"),
    "ids in two ways": (top(target_layer_ids=[2, 3, 5]), r"target_layer_ids is \[2, 3, 5\] but"),
    "masks in two ways": (top(mask_token_id=8), "mask_token_id is 8 but dflash_config says 7"),
    "confidence of nothing": (
        top(markov_rank=0),
        "confidence_head_with_markov needs markov_rank above 0",
    ),
    "a state from nowhere": (
        top(markov_head_type="rnn", sample_from_anchor=False),
        "sample_from_anchor must be true with markov_head_type rnn",
    ),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_every_violation_is_named(target: TargetModel, tmp_path: Path, name: str) -> None:
    change, message = VIOLATIONS[name]
    head = make_head(target, markov_type="gated", confidence_head=True, draft_vocab_size=40)
    write_as("dspark", head, tmp_path / "head")
    files = Folder(tmp_path / "head")
    change(files)
    files.save()
    with pytest.raises(ExportError, match=message):
        check_folder(tmp_path / "head", target, DIALECTS["dspark"])


def test_another_s_output_matrix_is_refused(target: TargetModel, tmp_path: Path) -> None:
    write_as("dspark", make_head(target, draft_vocab_size=40), tmp_path / "head")
    files = Folder(tmp_path / "head")
    files.tensors["lm_head.weight"] = files.tensors["lm_head.weight"].flip(0)
    files.save()
    with pytest.raises(ExportError, match=r"lm_head.weight is not the output matrix of 'tiny'"):
        read_head(tmp_path / "head", target)
