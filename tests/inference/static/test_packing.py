"""Packed linear layers compute what the plain ones do, and leave no trace."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from inference.engines import build_engine
from inference.generate import plain_generate, speculative_generate
from inference.huge_pages import page_bytes
from inference.proposers import Proposer, TreeOptions, build_proposer
from inference.proposers.adaptive import AdaptiveProposer
from inference.proposers.compose import ComposedProposer
from inference.proposers.ngram import NgramProposer
from inference.scheduling.controller import controllers
from inference.scheduling.costs import CostTable
from inference.static.packing import PackedLinears, cannot_pack
from tests.blocks import block_head
from tests.inference.scheduling.costs import KEY
from tests.inference.test_huge_pages import plenty
from tests.tiny import tiny_target

needs_kernels = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN"
)
HEADS = [
    ("eagle3", {"draft_vocab_size": 40}),
    ("peagle", {"draft_vocab_size": 40}),
    ("medusa", {"draft_vocab_size": 40, "shared_lm_head": True}),
    ("mtp", {}),
]


@needs_kernels
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 5, 17])
def test_one_layout_serves_any_number_of_rows(bias: bool, rows: int) -> None:
    torch.manual_seed(rows)
    layer = nn.Linear(48, 80, bias=bias)
    x = torch.randn(2, rows, 48)
    with torch.no_grad():
        expected = layer(x)
        packed = PackedLinears([nn.Sequential(layer)])
        assert len(packed) == 1
        torch.testing.assert_close(layer(x), expected)
        packed.close()
        assert torch.equal(layer(x), expected)
    assert "forward" not in vars(layer)


@needs_kernels
def test_nothing_is_packed_twice() -> None:
    layer = nn.Linear(4, 4)
    packed = PackedLinears([layer, nn.Sequential(layer)])
    assert len(packed) == 1
    with pytest.raises(ValueError, match="packed already"):
        PackedLinears([layer])
    packed.close()


def test_why_not() -> None:
    assert "float64" in str(cannot_pack(torch.zeros(1, dtype=torch.float64)))
    assert "meta" in str(cannot_pack(torch.zeros(1, device="meta")))


@needs_kernels
@pytest.mark.parametrize(("family", "options"), HEADS)
def test_heads_draft_the_same_from_packed_layers(family: str, options: dict[str, object]) -> None:
    target = tiny_target(torch.float32)
    head = block_head(target, family, dtype=torch.float32, **options)
    proposer = build_proposer(head, TreeOptions(size=6, depth=3, top_k=2))
    prompts, new = [[5, 6, 7, 8], [9, 3]], 12
    expected = speculative_generate(target, proposer, prompts, max_new_tokens=new)
    engine = build_engine(target, "packed")
    found = speculative_generate(target, proposer, prompts, max_new_tokens=new, engine=engine)
    engine.close()
    assert found.sequences == expected.sequences
    assert found.stats == expected.stats
    assert "borrowed_logits" not in vars(head)
    assert plain_generate(target, prompts, max_new_tokens=new).sequences == expected.sequences


@needs_kernels
def test_packed_weights_lie_in_huge_pages() -> None:
    layers = [nn.Linear(1024, 1024) for _ in range(6)]  # 24 MB, no layer a whole number of pages
    x = torch.randn(3, 1024)
    with torch.no_grad():
        expected = [layer(x) for layer in layers]
        packed = PackedLinears(layers)
        assert packed.huge_share > 0.5 or not page_bytes() or not plenty()
        for layer, value in zip(layers, expected, strict=True):
            torch.testing.assert_close(layer(x), value)
        packed.close()


def test_cost_tables_know_the_pages() -> None:
    target = tiny_target(torch.float32)
    engine = build_engine(target, "packed")
    assert engine.pages == ""  # too small to be worth one
    assert engine._packed is not None
    engine._packed.huge_share = 0.95
    assert engine.pages == "huge"
    engine.close()
    assert engine.pages == build_engine(target).pages == ""


def costs_of_rows() -> CostTable:
    """Drafting is worth it from the start."""
    points = {(width, 0, 1): 1.0 + 0.01 * width for width in (1, 16)}
    return CostTable(KEY, points, {("head", 1, 1, 1): 0.01, ("head", 3, 1, 1): 0.03})


PROPOSERS: dict[str, Callable[[Proposer], Proposer]] = {
    "alone": lambda head: head,
    "composed": lambda head: ComposedProposer(head, NgramProposer(4, 3, 1), size=6),
    "adaptive": lambda head: AdaptiveProposer({"head": head}, controllers(costs_of_rows())),
}


@needs_kernels
@pytest.mark.parametrize("among", PROPOSERS)
def test_heads_are_packed_wherever_they_draft(among: str) -> None:
    target = tiny_target(torch.float32)
    head = block_head(target, "eagle3", dtype=torch.float32)
    proposer = PROPOSERS[among](build_proposer(head, TreeOptions(size=4, depth=3, top_k=1)))
    engine = build_engine(target, "packed")
    speculative_generate(target, proposer, [[1, 2, 3]], max_new_tokens=4, engine=engine)
    layers = [layer for layer in head.modules() if type(layer) is nn.Linear]
    assert layers and all("forward" in vars(layer) for layer in layers)
    engine.close()
    assert not any("forward" in vars(layer) for layer in layers)
