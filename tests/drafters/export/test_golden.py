"""Native heads of every family, and the golden logits that tell whether a head is the same."""

from pathlib import Path
from typing import Any

import pytest
import torch

from drafters import FAMILIES, Drafter, TargetModel, build_drafter
from drafters.export import (
    ExportError,
    check_golden,
    read_head,
    read_native,
    write_as,
    write_native,
)
from tests.drafters.export.written import eagle3, logits
from tests.tiny import tiny_target


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target(dtype=torch.float32)


def test_the_format_is_told_from_the_folder(target: TargetModel, tmp_path: Path) -> None:
    head = eagle3(target)
    for dialect in ("sglang", "native"):
        write_as(dialect, head, tmp_path / dialect)
        again = read_head(tmp_path / dialect, target)
        assert torch.equal(logits(again), logits(head))
        assert read_head(tmp_path / dialect, target, torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("config", [None, "{", "[]", "{}"])
def test_what_is_no_head_is_refused(
    target: TargetModel, tmp_path: Path, config: str | None
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(ValueError, match=r"head .*no readable config|no tensors in it"):
        read_head(tmp_path, target)


def random_head(target: TargetModel, family: str, **options: Any) -> Drafter:
    """Any head, nowhere at its initial values."""
    head = build_drafter(family, target, seed=3, **options)
    head.set_draft_vocab(torch.arange(target.vocab_size))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return head


@pytest.mark.parametrize("family", FAMILIES)
def test_native_heads_of_every_family(target: TargetModel, tmp_path: Path, family: str) -> None:
    head = random_head(target, family, confidence_head=True)
    export = write_native(head, tmp_path / "head")
    again = read_native(tmp_path / "head", target)
    assert (export.served, export.left_out) == (("headway",), ())
    assert export.num_tensors == len(head.state_dict())
    assert again.family == family
    assert torch.equal(logits(again), logits(head))
    assert check_golden(again, tmp_path / "head") == 0


EVERY_TENSOR: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle3": ("eagle3", {}),
    "reduced vocabulary": ("eagle3", {"draft_vocab_size": 40}),
    "EAGLE-3.1": ("eagle3", {"draft_vocab_size": 40, "fc_norm": True, "norm_output": True}),
    "two layers": ("eagle3", {"num_layers": 2, "qk_norm": True}),
    "medusa": ("medusa", {"num_heads": 5, "num_layers": 2}),
    "eagle1": ("eagle1", {"fc_bias": True, "num_layers": 2}),
    "hydra": ("hydra", {"num_heads": 5, "mlp_layers": 2, "num_layers": 1}),
    "mtp": ("mtp", {}),
    "mtp modules": ("mtp", {"num_modules": 3, "num_layers": 2}),
    "peagle": ("peagle", {"num_layers": 2, "num_drafts": 4}),
    "dflash": ("dflash", {"num_layers": 2}),
    "causal dflash": ("dflash", {"num_layers": 2, "causal": True}),
    "dspark": ("dspark", {"markov_rank": 8, "draft_vocab_size": 40}),
    "dspark gated": ("dspark", {"markov_rank": 8, "markov_type": "gated"}),
    "dspark rnn": ("dspark", {"markov_rank": 8, "markov_type": "rnn"}),
}


@pytest.mark.parametrize("name", EVERY_TENSOR)
def test_golden_logits_feel_every_tensor(target: TargetModel, name: str) -> None:
    family, options = EVERY_TENSOR[name]
    head = random_head(target, family, **options)
    expected = logits(head)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in head.named_parameters():
        saved = parameter.detach().clone()
        with torch.no_grad():  # a factor would be lost on queries and keys that are normalised
            parameter.add_(torch.randn(parameter.shape, generator=generator))
        assert not torch.allclose(logits(head), expected, rtol=1e-3), name
        with torch.no_grad():
            parameter.copy_(saved)
    assert torch.equal(logits(head), expected)


def test_golden_logits_tell_another_head(target: TargetModel, tmp_path: Path) -> None:
    head = eagle3(target)
    write_as("sglang", head, tmp_path / "head")
    assert check_golden(eagle3(target), tmp_path / "head") == 0
    with pytest.raises(ExportError, match="does not fit this head"):
        check_golden(build_drafter("medusa", target), tmp_path / "head")
    with pytest.raises(ExportError, match=r"logits of shape \[3, 96\], this head gives \[3, 40\]"):
        check_golden(eagle3(target, draft_vocab_size=40), tmp_path / "head")
    with torch.no_grad():
        head.midlayer.self_attn.k_proj.weight.mul_(1.01)
    with pytest.raises(ExportError, match="logits of this head differ"):
        check_golden(head, tmp_path / "head")
    assert check_golden(head, tmp_path / "head", tolerance=1) > 1e-4
