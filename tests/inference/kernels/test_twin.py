"""The fast torch implementations against the plain one, over random trees and caches."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from inference.kernels.reference import masked_attention
from inference.kernels.twin import joint_attention, merge, split_attention
from tests.inference.kernels.test_reference import CASES
from tests.inference.kernels.trees import KINDS, Case

TWINS = [joint_attention, split_attention]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_rows = draw(st.sampled_from([1, 2, 5, 16, 64]) | st.integers(1, 128))
    kv_heads, dim = draw(st.integers(1, 2)), draw(st.sampled_from([4, 16]))
    return Case(
        lengths=tuple(draw(st.lists(st.integers(0, 40), min_size=1, max_size=3))),
        num_rows=num_rows,
        num_pending=draw(st.integers(0, min(128 - num_rows, 9))),
        kinds=tuple(draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=2))),
        padding=draw(st.integers(0, 3)),
        heads=(kv_heads * draw(st.integers(1, 3)), kv_heads),
        dims=(dim, draw(st.sampled_from([dim, 8]))),
        window=draw(st.none() | st.integers(1, 8) | st.integers(1, 60)),
        softcap=draw(st.none() | st.floats(0.5, 30)),
        sinks=draw(st.booleans()),
        spare=draw(st.integers(0, 5)),
        seed=draw(st.integers(0, 2**16)),
    )


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("name", CASES)
def test_twins_attend_to_paths(twin: Callable[..., Tensor], name: str) -> None:
    arguments = CASES[name].tensors()
    expected = masked_attention(*arguments)
    torch.testing.assert_close(twin(*arguments), expected, atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize("twin", TWINS)
@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_twins_agree_with_the_plain_implementation(twin: Callable[..., Tensor], case: Case) -> None:
    arguments = case.tensors()
    torch.testing.assert_close(twin(*arguments), masked_attention(*arguments), atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_twins_in_half_precision(twin: Callable[..., Tensor], dtype: torch.dtype) -> None:
    arguments = Case(lengths=(40, 17), num_rows=9, sinks=True, dtype=dtype).tensors()
    out = twin(*arguments)
    assert out.dtype == dtype
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(out, masked_attention(*arguments), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("attention", [masked_attention, *TWINS])
@pytest.mark.parametrize("window", [None, 6])
def test_columns_behind_the_tree_do_not_matter(
    attention: Callable[..., Tensor], window: int | None
) -> None:
    case = Case(lengths=(4, 11), num_rows=5, window=window)
    q, keys, values, lengths, words, options = case.tensors()
    expected = attention(q, keys, values, lengths, words, options)
    for b, length in enumerate(case.lengths):
        keys[b, :, length + case.num_rows :] = 1e4
        values[b, :, length + case.num_rows :] = -1e4
    torch.testing.assert_close(
        attention(q, keys, values, lengths, words, options), expected, atol=1e-6, rtol=1e-6
    )


@pytest.mark.parametrize("attention", TWINS)
def test_sequences_do_not_know_each_other(attention: Callable[..., Tensor]) -> None:
    q, keys, values, lengths, words, options = Case(
        lengths=(4, 30, 0), num_rows=5, num_pending=2, window=7, kinds=KINDS
    ).tensors()
    together = attention(q, keys, values, lengths, words, options)
    for b in range(3):
        one = slice(b, b + 1)
        alone = replace(options, depths=options.depths[one])
        torch.testing.assert_close(
            attention(q[one], keys[one], values[one], lengths[one], words[one], alone),
            together[one], atol=1e-6, rtol=1e-6,
        )  # fmt: skip


def test_parts_without_columns_weigh_nothing() -> None:
    some, nothing = torch.randn(1, 1, 2, 3), torch.zeros(1, 1, 2, 3)
    lse = torch.tensor([[[0.5, -40.0]]])
    merged = merge([(some, lse), (nothing, torch.full((1, 1, 2), -torch.inf))])
    torch.testing.assert_close(merged, some)
