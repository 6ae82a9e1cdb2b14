"""A target in half precision beside a file in full: the head is taken for the same."""

from pathlib import Path
from typing import Any

import pytest
import torch

from drafters import TargetModel
from drafters.export import check_as, check_golden, read_as, read_head, write_as
from drafters.export.borrowed import is_copy
from drafters.export.folder import ExportError
from drafters.export.golden import GOLDEN
from tests.drafters.export.written import Written, make_head
from tests.tiny import tiny_target

BLOCK = {"num_layers": 2, "mask_token_id": 90}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("eagle3", "sglang", {"draft_vocab_size": 40}),
    ("eagle3", "speculators-eagle3", {}),
    ("peagle", "vllm-peagle", {"num_layers": 1}),
    ("eagle1", "eagle1", {}),
    ("medusa", "medusa", {"shared_lm_head": True}),
    ("dflash", "dflash", BLOCK),
    ("dflash", "speculators-dflash", {**BLOCK, "draft_vocab_size": 40}),
    ("dspark", "dspark", BLOCK),
]


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target(torch.float32)


@pytest.fixture(scope="module")
def rounded() -> TargetModel:
    return tiny_target(torch.bfloat16)


@pytest.mark.parametrize(("family", "dialect", "options"), CASES)
def test_a_file_in_full_beside_a_target_in_half_precision(
    family: str,
    dialect: str,
    options: dict[str, Any],
    target: TargetModel,
    rounded: TargetModel,
    tmp_path: Path,
) -> None:
    head = make_head(family, target, **options)
    write_as(dialect, head, tmp_path / "head")
    again = read_as(dialect, tmp_path / "head", rounded)
    assert again.state_dict().keys() == head.state_dict().keys()
    assert all(torch.equal(again.state_dict()[k], v) for k, v in head.state_dict().items())
    assert next(read_head(tmp_path / "head", rounded, rounded.dtype).parameters()).dtype == (
        torch.bfloat16
    )


def test_mixed_types_are_read_as_engines_cast_them(target: TargetModel, tmp_path: Path) -> None:
    head = make_head("eagle3", target, draft_vocab_size=40).bfloat16()
    folder = Written(write_as("sglang", head, tmp_path / "head").folder)
    (folder.path / GOLDEN).unlink()
    folder.tensors["norm.weight"] = folder.tensors["norm.weight"].float()
    folder.tensors["d2t"] = folder.tensors["d2t"].int()
    folder.tensors["t2d"] = folder.tensors["t2d"].long()
    folder.tensors["midlayer.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    folder.save()
    again = read_head(folder.path, target)
    found = read_as("sglang", folder.path, target).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in head.state_dict().items())
    assert next(again.parameters()).dtype == torch.float32  # as asked for
    with pytest.raises(ExportError, match=r"norm.weight is float32, expected bfloat16"):
        check_as("sglang", folder.path, target)


def test_a_random_matrix_is_told_in_half_precision(rounded: TargetModel, tmp_path: Path) -> None:
    head = make_head("eagle3", rounded).to(torch.bfloat16)
    write_as("sglang", head, tmp_path / "head")
    folder = Written(tmp_path / "head")
    folder.tensors["lm_head.weight"] = torch.randn_like(folder.tensors["lm_head.weight"])
    with pytest.raises(ExportError, match="logits of this head differ"):
        read_as("sglang", folder.save(), rounded)


def test_full_precision_stays_strict(target: TargetModel, tmp_path: Path) -> None:
    head = make_head("eagle3", target)
    write_as("sglang", head, tmp_path / "head")
    with torch.no_grad():
        head.lm_head.weight *= 1.01
    assert (tmp_path / "head" / GOLDEN).is_file()
    with pytest.raises(ExportError, match=r"allowed: 0\.0001"):
        check_golden(head, tmp_path / "head")


def test_a_copy_is_one_in_the_coarser_dtype() -> None:
    own = torch.randn(8, 4)
    assert is_copy(own.bfloat16(), own) and is_copy(own, own.bfloat16())
    other = own.clone()
    other[3] += 1e-4
    assert not is_copy(other, own)
    assert not is_copy(own[:7], own)
