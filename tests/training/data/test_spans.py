"""What rows see of the text as two numbers, and attention a few rows at a time, against masks over
all pairs.
"""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from training import masks
from training.masks import build_mask, causal, sequence_rows, windowed
from training.objectives import StepAttention, spans
from training.objectives.block_attention import BlockAttention, DraftAttention, RolloutAttention
from training.objectives.spans import (
    Spans,
    attend_text,
    attend_text_and,
    causal_spans,
    document_starts,
)

DOCUMENTS = torch.tensor([[0] * 9 + [1] * 5, [0] * 4 + [1] * 8 + [-1] * 2])
ROOTS = torch.tensor([[2, 3, 8, 11], [1, 2, 9, -1]])
LENGTH = 14


def as_mask(seen: Spans) -> Tensor:
    column = torch.arange(LENGTH)
    return (column >= seen.first[..., None]) & (column < seen.last[..., None])


def test_where_documents_start() -> None:
    assert document_starts(DOCUMENTS).tolist() == [
        [0] * 9 + [9] * 5,
        [0] * 4 + [4] * 8 + [12, 13],
    ]


@pytest.mark.parametrize("window", [None, 1, 3, 20])
def test_text_rows_see_what_the_mask_says(window: int | None) -> None:
    rows = sequence_rows(DOCUMENTS)
    seen = causal_spans(DOCUMENTS).within(rows.position, window)
    assert torch.equal(as_mask(seen), build_mask(rows, rows, windowed(causal, window)))


@pytest.mark.parametrize("window", [None, 3, 6])
@pytest.mark.parametrize("kind", ["block", "rollouts"])
def test_draft_rows_see_what_the_rule_says(kind: str, window: int | None) -> None:
    attention: DraftAttention = (
        BlockAttention(DOCUMENTS, ROOTS, 3, [masks.block], [window])
        if kind == "block"
        else RolloutAttention(DOCUMENTS, ROOTS, [4, 3, 1], [window])
    )
    rule = windowed(masks.block if kind == "block" else masks.parallel, window)
    wanted = build_mask(attention._drafts, attention._text, rule)
    assert wanted.any()
    assert torch.equal(as_mask(attention._seen(0)[1]), wanted)


@pytest.mark.parametrize("size", [1, 4, 14])
def test_pieces_hold_all_that_their_rows_see(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(spans, "ROWS", size)
    seen = causal_spans(DOCUMENTS)
    covered = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    for rows, columns in seen.pieces:
        covered[rows, columns] = True
        assert as_mask(seen)[:, rows, columns.start].any(), "no column too many in front"
        assert as_mask(seen)[:, rows, columns.stop - 1].any(), "nor behind"
    assert not (as_mask(seen).any(0) & ~covered).any()


def test_rows_that_see_no_text_leave_the_pieces_as_they_are() -> None:
    nothing = Spans(torch.zeros(1, 3, dtype=torch.long), torch.zeros(1, 3, dtype=torch.long))
    assert nothing.pieces == [(slice(0, 3), slice(0, 0))]
    q, near = torch.randn(1, 4, 3, 2), torch.zeros(1, 4, 3, 1)
    text = torch.randn(1, 2, 5, 2)
    out, weights = attend_text_and(q, text, text, near, nothing)
    assert out.abs().max() == 0
    assert weights.tolist() == torch.ones_like(weights).tolist()


@pytest.mark.parametrize("size", [1, 3, 14])
@pytest.mark.parametrize("near", [0, 2])
def test_pieces_change_no_value_and_no_gradient(
    monkeypatch: pytest.MonkeyPatch, size: int, near: int
) -> None:
    monkeypatch.setattr(spans, "ROWS", size)
    g = torch.Generator().manual_seed(0)
    q, k, v, own = (
        torch.randn(2, heads, LENGTH, last, generator=g, dtype=torch.float64).requires_grad_()
        for heads, last in ((4, 6), (2, 6), (2, 6), (4, near))
    )
    seen = causal_spans(DOCUMENTS)
    rows = sequence_rows(DOCUMENTS)
    mask = build_mask(rows, rows, causal)[:, None]
    keys, values = (x.repeat_interleave(2, 1) for x in (k, v))
    if near:
        out, weights = attend_text_and(q, k, v, own, seen)
        far = (q @ keys.transpose(-1, -2) / 6**0.5).masked_fill(~mask, -torch.inf)
        both = torch.cat((far, own), dim=-1).softmax(-1)
        found = torch.cat((out, weights), dim=-1)
        wanted = torch.cat((both[..., :LENGTH] @ values, both[..., LENGTH:]), dim=-1)
        sources = [q, k, v, own]
    else:
        found = attend_text(q, k, v, seen)
        wanted = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        sources = [q, k, v]
    weight = torch.randn(found.shape, generator=g, dtype=torch.float64)
    results = [[x, *torch.autograd.grad((x * weight).sum(), sources)] for x in (found, wanted)]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=0)


@pytest.mark.parametrize("window", [None, 4])
def test_steps_in_pieces_are_those_at_once(
    monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    g = torch.Generator().manual_seed(0)
    calls = [
        [torch.randn(2, n, LENGTH, 4, generator=g, dtype=torch.float64) for n in (4, 2, 2)]
        for _ in range(3)
    ]
    found = []
    for size in (100, 5):
        monkeypatch.setattr(spans, "ROWS", size)
        attend = StepAttention(DOCUMENTS, [window])
        inputs = [[x.clone().requires_grad_() for x in call] for call in calls]
        outs = [attend(0, *call) for call in inputs]
        total = sum(((i + 1) * out.square().sum() for i, out in enumerate(outs)), torch.zeros(()))
        sources = [x for call in inputs for x in call]
        found.append([*outs, *torch.autograd.grad(total, sources)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=0)
