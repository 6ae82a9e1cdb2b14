"""The plain implementation against attention along every path, one row at a time in float64."""

import pytest
import torch

from inference.kernels.reference import cache_mask, masked_attention, tree_mask
from tests.inference.kernels.trees import KINDS, Case, along_paths, words_of

CASES = {
    **{kind: Case(kinds=(kind,), num_rows=6) for kind in KINDS},
    "one row": Case(num_rows=1, kinds=("chain",)),
    "no prefix": Case(lengths=(0,)),
    "padding": Case(num_rows=6, padding=3, seed=1),
    "ragged": Case(lengths=(0, 9, 4), kinds=KINDS),
    "pending": Case(num_pending=3, num_rows=5, lengths=(2, 7)),
    "two words": Case(num_pending=30, num_rows=70, lengths=(3,), kinds=("chain",), heads=(1, 1)),
    "two full words": Case(num_rows=128, lengths=(1,), heads=(1, 1), dims=(4, 4)),
    "one head": Case(heads=(3, 1)),
    "no groups": Case(heads=(3, 3)),
    "other values": Case(dims=(8, 24)),
    "window": Case(window=4, num_rows=9, lengths=(6, 2), kinds=("chain", "random")),
    "window within the prefix": Case(window=5, num_rows=3, lengths=(30,)),
    "window that hides one token": Case(window=8, num_rows=4, kinds=("chain",)),
    "window that hides none": Case(window=9, num_rows=4, kinds=("chain",)),
    "window of one": Case(window=1, num_rows=4),
    "softcap": Case(softcap=1.5),
    "sinks": Case(sinks=True),
    "all": Case((3, 8), 7, 2, KINDS, 2, window=5, softcap=2.0, sinks=True),
}


@pytest.mark.parametrize("name", CASES)
def test_a_row_attends_to_its_path(name: str) -> None:
    case = CASES[name]
    expected = along_paths(case)
    torch.testing.assert_close(
        masked_attention(*case.tensors()).double(), expected, atol=2e-6, rtol=1e-5
    )


def test_bits_are_read_from_the_lowest() -> None:
    words = torch.tensor([[[0b101, -(2**63)]]])
    seen = tree_mask(words, 128)[0, 0].nonzero().flatten()
    assert seen.tolist() == [0, 2, 127]


def test_the_tree_lies_behind_its_own_sequence() -> None:
    words = words_of([-1, 0, 0], num_pending=1).expand(2, 2, 1)
    options = Case(num_pending=1).tensors()[-1]
    mask = cache_mask(torch.tensor([0, 2]), words, 6, options).int().tolist()
    assert mask[0] == [[1, 1, 0, 0, 0, 0], [1, 0, 1, 0, 0, 0]]
    assert mask[1] == [[1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 1, 0]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    case = Case(dtype=dtype)
    out = masked_attention(*case.tensors())
    assert out.dtype == dtype
    torch.testing.assert_close(out, along_paths(case).to(dtype))
