"""EAGLE-3 in SGLang's dialect: heads of other trainers are read, what engines overlook is named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafters import TargetModel
from drafters.export import ExportError, check_as, read_as, write_as
from drafters.export.fields import from_outputs
from tests.drafters.export.written import contents, eagle3, logits
from tests.tiny import tiny_target

IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target(dtype=torch.float32)


# Heads of other trainers ------------------------------------------------------------------------


def test_a_foreign_config_with_only_the_nested_layer_ids(
    target: TargetModel, tmp_path: Path
) -> None:
    head = eagle3(target, draft_vocab_size=40)
    write_as("sglang", head, tmp_path / "head")
    edit = Edit(tmp_path / "head")
    for key in ("eagle_aux_hidden_state_layer_ids", "rope_parameters", "fc_norm", "norm_output"):
        del edit.config[key]
    edit.config |= {"rope_theta": 10000, "max_position_embeddings": 2048}
    edit.save()
    (tmp_path / "head" / "export.json").unlink()

    again = read_as("sglang", tmp_path / "head", target)
    assert again.feature_layers == (1, 3, 5)
    assert torch.equal(logits(again), logits(head))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_before_residual": True}, "norm_before_residual=True is not supported"),
        (
            {"rope_parameters": None, "rope_scaling": {"rope_type": "dynamic", "factor": 8.0}},
            "'dynamic' RoPE",
        ),
        ({"vocab_size": 97}, "vocab_size is 97 but the target has 96"),
    ],
)
def test_a_foreign_head_of_another_kind_is_refused(
    target: TargetModel, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    write_as("sglang", eagle3(target), tmp_path / "head")
    edit = Edit(tmp_path / "head")
    edit.config |= changes
    edit.save()
    with pytest.raises(ExportError, match=message):
        read_as("sglang", tmp_path / "head", target)


@pytest.mark.parametrize("place", ["eagle_config", "top level"])
def test_the_norm_before_the_fusion_is_asked_for_in_either_place(
    target: TargetModel, tmp_path: Path, place: str
) -> None:
    head = eagle3(target, norm_before_fc=True)
    write_as("sglang", head, tmp_path / "head")
    edit = Edit(tmp_path / "head")
    del (edit.config if place == "eagle_config" else edit.config["eagle_config"])["norm_before_fc"]
    edit.save()
    again = read_as("sglang", tmp_path / "head", target)
    assert torch.equal(logits(again), logits(head))
    edit.config["eagle_config"]["norm_before_fc"] = False
    edit.save()
    with pytest.raises(ExportError, match=r"unknown tensor input_norm\.weight"):
        read_as("sglang", tmp_path / "head", target)


def test_an_output_matrix_beside_no_draft_vocabulary(target: TargetModel, tmp_path: Path) -> None:
    """SGLang puts the target's in its place, vLLM does not: read where they are the same."""
    head = eagle3(target)
    write_as("sglang", head, tmp_path / "head")
    edit = Edit(tmp_path / "head")
    edit.config["draft_vocab_size"] = None
    edit.save()
    with pytest.raises(ExportError, match="draft_vocab_size must be int, got None"):
        check_as("sglang", tmp_path / "head", target)
    with pytest.raises(ExportError, match=r"null beside lm_head\.weight, .* draft_vocab_size 96"):
        read_as("sglang", tmp_path / "head", target)
    edit.tensors["lm_head.weight"] = target.lm_head.weight.detach().clone()
    edit.save()
    (tmp_path / "head" / "golden.logits").unlink()
    again = read_as("sglang", tmp_path / "head", target)
    assert torch.equal(again.lm_head.weight, target.lm_head.weight)
    del edit.config["draft_vocab_size"]  # missing, SGLang does not start; others take the file's
    edit.tensors["lm_head.weight"] = head.lm_head.weight.detach().clone()
    edit.save()
    assert torch.equal(logits(read_as("sglang", tmp_path / "head", target)), logits(head))


def test_another_target_is_refused(target: TargetModel, tmp_path: Path) -> None:
    write_as("sglang", eagle3(target), tmp_path / "head")
    with pytest.raises(ValueError, match=r"wrong target: weights"):
        read_as("sglang", tmp_path / "head", tiny_target(dtype=torch.float32, seed=1))


# What an engine would not tell ------------------------------------------------------------------


class Edit:
    """Change an export in place, to see whether the checks notice."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors = load_file(folder / "model.safetensors")
        self.config = json.loads((folder / "config.json").read_text())

    def save(self) -> None:
        save_file(self.tensors, self.folder / "model.safetensors")
        (self.folder / "config.json").write_text(json.dumps(self.config))


def drop(name: str) -> Callable[[Edit], object]:
    return lambda edit: edit.tensors.pop(name)


def put(name: str, tensor: Tensor) -> Callable[[Edit], object]:
    return lambda edit: edit.tensors.update({name: tensor})


def configure(**changes: Any) -> Callable[[Edit], object]:
    return lambda edit: edit.config.update(changes)


def rename(old: str, new: str) -> Callable[[Edit], object]:
    return lambda edit: edit.tensors.update({new: edit.tensors.pop(old)})


def poison(edit: Edit) -> None:
    edit.tensors["norm.weight"][3] = torch.nan


def absolute_ids(edit: Edit) -> None:
    edit.tensors["d2t"] += torch.arange(40)


def repeated_target(edit: Edit) -> None:
    edit.tensors["d2t"][1] = edit.tensors["d2t"][0] - 1


def wrong_t2d(edit: Edit) -> None:
    edit.tensors["t2d"] = edit.tensors["t2d"].roll(1)


def disagree(edit: Edit) -> None:
    edit.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [1, 3, 5]


def unsorted(config: dict[str, Any]) -> None:
    config[IDS] = config[IDS][::-1]
    config["eagle_config"][IDS] = config["eagle_config"][IDS][::-1]


def shifted(config: dict[str, Any], by: int) -> None:
    config[IDS] = [k + by for k in config[IDS]]
    config["eagle_config"][IDS] = [k + by for k in config["eagle_config"][IDS]]


VIOLATIONS: dict[str, tuple[Callable[[Edit], object], str]] = {
    "missing tensor": (drop("midlayer.mlp.up_proj.weight"), "missing tensor midlayer.mlp.up_proj"),
    "missing norm": (drop("fc_norm.1.weight"), "missing tensor fc_norm.1.weight"),
    "unknown tensor": (put("fc.bias", torch.ones(32)), "unknown tensor fc.bias"),
    "unmapped name": (
        rename("midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"),
        "unknown tensor layers.0.hidden_norm.weight.*missing tensor midlayer.hidden_norm.weight",
    ),
    "wrong shape": (
        put("midlayer.self_attn.q_proj.weight", torch.ones(32, 32)),
        r"q_proj.weight has shape \[32, 32\], the config asks for \[32, 64\]",
    ),
    "wrong dtype": (put("norm.weight", torch.ones(32).half()), "norm.weight is float16, expected"),
    "not finite": (poison, "norm.weight holds values that are not finite"),
    "never trained": (
        put("midlayer.self_attn.o_proj.weight", torch.zeros(32, 32)),
        "o_proj.weight is all zeros",
    ),
    "d2t missing": (drop("d2t"), "missing tensor d2t: draft_vocab_size is below vocab_size"),
    "t2d missing": (drop("t2d"), "missing tensor t2d"),
    "d2t of a whole vocabulary": (
        lambda edit: (
            put("lm_head.weight", torch.ones(96, 32))(edit),
            configure(draft_vocab_size=96)(edit),
        ),
        "unknown tensor d2t.*equal to vocab_size",
    ),
    "absolute ids in d2t": (absolute_ids, "d2t leads out of the target's vocabulary"),
    "two draft ids for one": (repeated_target, "two draft ids to one"),
    "t2d of other tokens": (wrong_t2d, "t2d does not mark"),
    "tied": (configure(tie_word_embeddings=True), "tie_word_embeddings must be False"),
    "layer ids disagree": (disagree, "layer ids disagree"),
    "top-level layer ids missing": (
        lambda edit: edit.config.pop("eagle_aux_hidden_state_layer_ids"),
        "key eagle_aux_hidden_state_layer_ids is missing",
    ),
    "layer ids that are not sorted": (
        lambda edit: unsorted(edit.config),
        "must be increasing",
    ),
    "no layer ids": (configure(**{IDS: []}), "must be a list of layer ids"),
    "layer ids that are none": (configure(**{IDS: ["1", "3", "5"]}), "must be a list of layer ids"),
    "layer ids behind the last": (
        lambda edit: shifted(edit.config, 3),
        r"\[4, 6, 8\] must lie in 0\.\.5",
    ),
    "the norm before the fusion, in one place": (
        lambda edit: edit.config["eagle_config"].update(norm_before_fc=True),
        "norm_before_fc is False but eagle_config",
    ),
    "two kinds of norms before the fusion": (
        lambda edit: (
            configure(norm_before_fc=True)(edit),
            edit.config["eagle_config"].update(norm_before_fc=True),
        ),
        "fc_norm and norm_before_fc are both set",
    ),
    "another width": (configure(hidden_size=64), "hidden_size 64 is not target_hidden_size 32"),
    "two layers": (configure(eagle_aux_hidden_state_layer_ids=[1, 3]), "must be 3 layer ids"),
    "features not used": (
        lambda edit: edit.config["eagle_config"].update(use_aux_hidden_state=False),
        "use_aux_hidden_state must be true",
    ),
    "short context": (
        configure(max_position_embeddings=64),
        "max_position_embeddings is 64 but the target has 512",
    ),
    "another vocabulary": (configure(vocab_size=97), "vocab_size is 97 but the target has 96"),
    "no number": (configure(hidden_size="32"), "hidden_size must be int"),
    "a truth value": (configure(hidden_size=True), "hidden_size must be int"),
    "not positive": (configure(head_dim=0), "head_dim must be positive"),
    "rope disagrees": (configure(rope_theta=5.0), "rope_theta is 5.0 but rope_parameters says"),
    "other rope": (configure(rope_scaling={"rope_type": "yarn"}), "yarn RoPE needs a positive"),
    "other engine dtype": (configure(torch_dtype="float64"), "torch_dtype float64 is not one of"),
    "more draft tokens": (configure(draft_vocab_size=97), "larger than vocab_size"),
    "another activation": (configure(hidden_act="gelu"), "hidden_act must be 'silu'"),
}


@pytest.fixture(scope="module")
def exported(target: TargetModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("export") / "head"
    write_as("sglang", eagle3(target, draft_vocab_size=40, fc_norm=True), folder)
    return contents(folder)


@pytest.mark.parametrize("name", VIOLATIONS)
def test_violations_are_named(
    name: str, exported: dict[str, bytes], target: TargetModel, tmp_path: Path
) -> None:
    for file, content in exported.items():
        (tmp_path / file).write_bytes(content)
    check_as("sglang", tmp_path, target)
    violate, message = VIOLATIONS[name]
    edit = Edit(tmp_path)
    violate(edit)
    edit.save()
    with pytest.raises(ExportError, match=message):
        check_as("sglang", tmp_path, target)


def test_a_truncated_file_is_named(target: TargetModel, tmp_path: Path) -> None:
    write_as("sglang", eagle3(target), tmp_path / "head")
    path = tmp_path / "head" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    for read in (
        lambda: check_as("sglang", tmp_path / "head", target),
        lambda: read_as("sglang", path.parent, target),
    ):
        with pytest.raises(ExportError, match=r"model.safetensors: .*cut short"):
            read()


@pytest.mark.parametrize(("content", "message"), [("{", "cannot read"), ("[]", "JSON object")])
def test_a_damaged_config_is_named(
    target: TargetModel, tmp_path: Path, content: str, message: str
) -> None:
    write_as("sglang", eagle3(target), tmp_path / "head")
    (tmp_path / "head" / "config.json").write_text(content)
    with pytest.raises(ExportError, match=message):
        read_as("sglang", tmp_path / "head", target)


def test_layer_ids_shift_by_one() -> None:
    assert from_outputs([1, 14, 26]) == [2, 15, 27]
