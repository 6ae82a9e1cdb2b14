"""P-EAGLE for vLLM's native loader: the mask's row and feature, and what vLLM makes of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from drafters import TargetModel, build_drafter
from drafters.block import choose_mask_token
from drafters.export import (
    ExportError,
    check_as,
    dialect_of,
    read_as,
    read_head,
    write_as,
)
from drafters.export.dialects.peagle_vllm import VLLM_PEAGLE
from drafters.export.reading import check_folder
from drafters.peagle import PEagleDrafter
from tests.drafters.export.vllm_engine import VllmEngine, one_pass
from tests.drafters.export.written import Written, engine_parameters, logits, make_head
from tests.tiny import tiny_target

VARIANTS: dict[str, dict[str, Any]] = {
    "one layer": {"num_layers": 1},
    "reduced vocabulary": {"draft_vocab_size": 40, "num_layers": 2},
    "normed": {"norm_before_residual": True, "norm_before_fc": True, "num_layers": 2},
    "features normed": {"fc_norm": True, "num_layers": 1},
    "qwen3": {"qk_norm": True, "num_layers": 2},
    "mask named": {"mask_token_id": 7, "num_layers": 1},
    "own embedding": {"own_embedding": True, "mask_token_id": 9, "num_layers": 1},
}


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target(dtype=torch.float32)


def peagle(target: TargetModel, **options: Any) -> PEagleDrafter:
    options = {"feature_layers": [1, 3, 5], "num_drafts": 4, **options}
    head = make_head("peagle", target, **options)
    assert isinstance(head, PEagleDrafter)
    return head


@pytest.fixture
def folder(target: TargetModel, tmp_path: Path) -> Written:
    write_as("vllm-peagle", peagle(target, num_layers=1), tmp_path / "head")
    return Written(tmp_path / "head")


@pytest.mark.parametrize("name", VARIANTS)
def test_a_head_comes_back_the_same(target: TargetModel, tmp_path: Path, name: str) -> None:
    head = peagle(target, **VARIANTS[name])
    write_as("vllm-peagle", head, tmp_path / "head")
    (tmp_path / "head" / "export.json").unlink()
    assert dialect_of(tmp_path / "head") is VLLM_PEAGLE
    again = read_as("vllm-peagle", tmp_path / "head", target)
    assert again.state_dict().keys() == head.state_dict().keys()
    for key, tensor in head.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor), key
    assert torch.equal(logits(again), logits(head))
    mask = head.config.mask_token_id
    head.config.mask_token_id = choose_mask_token(target) if mask is None else mask
    kept = {"target_name", "target_fingerprint", "reference"}
    wanted = {k: v for k, v in head.config.own_fields().items() if k not in kept}
    assert {k: v for k, v in again.config.own_fields().items() if k not in kept} == wanted


@pytest.mark.parametrize("name", VARIANTS)
def test_vllm_computes_the_same_logits(target: TargetModel, tmp_path: Path, name: str) -> None:
    head = peagle(target, **VARIANTS[name])
    write_as("vllm-peagle", head, tmp_path / "head")
    config = Written(tmp_path / "head").config
    tensors = check_folder(tmp_path / "head", target, VLLM_PEAGLE)
    engine = VllmEngine(engine_parameters(VLLM_PEAGLE, config, tensors), config, torch.zeros(0))
    found = one_pass(engine, config["n_predict"])
    torch.testing.assert_close(found, logits(head), rtol=1e-4, atol=1e-4)


def test_what_is_written(target: TargetModel, tmp_path: Path) -> None:
    head = peagle(target, num_layers=2, draft_vocab_size=40)
    export = write_as("vllm-peagle", head, tmp_path / "head")
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    config = Written(tmp_path / "head").config
    mask = choose_mask_token(target)
    assert tensors["mask_hidden"].shape == (1, 1, 96)
    assert "mask_embedding" not in tensors
    table = tensors["embed_tokens.weight"]
    assert torch.equal(table[mask], head.mask_embedding)
    others = torch.arange(96) != mask
    assert torch.equal(table[others], target.embedding.weight[others])
    written = {key: config[key] for key in ("mask_token_id", "pard_token", "ptd_token_id")}
    assert written == dict.fromkeys(written, mask)
    assert (config["n_predict"], config["num_hidden_layers"]) == (4, 2)
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert export.served == ("vllm",)
    assert '"parallel_drafting": true' in export.notes[0] and "at most 4" in export.notes[0]
    assert f"row {mask}" in export.notes[1]


def test_another_trainer_s_file(target: TargetModel, folder: Written) -> None:
    """One key for the mask, the mask's feature flat, another name for the first layer."""
    wanted = logits(read_head(folder.path, target))
    for key in ("mask_token_id", "pard_token", "n_predict", "layer_types", "eagle_config"):
        del folder.config[key]
    folder.config["architectures"] = ["PEagleDraftModel"]
    folder.tensors["mask_hidden"] = folder.tensors["mask_hidden"].flatten()
    folder.tensors = {n.replace("layers.0.", "midlayer."): t for n, t in folder.tensors.items()}
    again = read_head(folder.save(foreign=True), target)
    assert again.num_drafts == 8  # the default of what is released
    again.config.num_drafts = 4
    assert torch.equal(logits(again), wanted)


def test_a_trained_embedding_is_kept(target: TargetModel, folder: Written) -> None:
    folder.tensors["embed_tokens.weight"][3] += 1
    again = read_head(folder.save(foreign=True), target)
    assert again.config.own_embedding
    assert torch.equal(again.embed_tokens.weight, folder.tensors["embed_tokens.weight"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pard_token": 3}, "the mask's row is not one: mask_token_id .* pard_token 3"),
        (dict.fromkeys(("mask_token_id", "pard_token", "ptd_token_id"), 96), "lie in 0..95"),
        ({"n_predict": 1}, "n_predict must be at least 2"),
    ],
)
def test_faults_are_named(
    target: TargetModel, folder: Written, changes: dict[str, Any], message: str
) -> None:
    folder.config |= changes
    with pytest.raises(ExportError, match=message):
        check_as("vllm-peagle", folder.save(), target)


@pytest.mark.parametrize("name", ["mask_hidden", "embed_tokens.weight"])
def test_what_the_mask_needs_is_not_optional(
    target: TargetModel, folder: Written, name: str
) -> None:
    del folder.tensors[name]
    with pytest.raises(ExportError, match=f"missing tensor {name}"):
        check_as("vllm-peagle", folder.save(), target)


def test_only_peagle_heads(target: TargetModel, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="for peagle heads and this is a eagle3 head"):
        write_as("vllm-peagle", build_drafter("eagle3", target), tmp_path / "head")
    with pytest.raises(ExportError, match="for eagle3 heads and this is a peagle head"):
        write_as("vllm", peagle(target), tmp_path / "head")
