"""What the kernel refuses, what a call refuses, and which implementation it reaches."""

import pytest
import torch
from torch import Tensor

from inference import kernels
from inference.kernels import kernel_refusal, tree_attention
from inference.kernels.reference import masked_attention
from tests.inference.kernels.trees import Case


def meta(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def refusal(dim: int = 64, dim_v: int = 64, dtype: torch.dtype = torch.float16) -> str | None:
    return kernel_refusal(
        meta(1, 4, 3, dim, dtype=dtype), meta(1, 2, 9, dim, dtype=dtype),
        meta(1, 2, 9, dim_v, dtype=dtype),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float64}, "dtype torch.float64"),
        ({"dim": 512}, "keys have head dimension 512: the kernel takes up to 256"),
        ({"dim_v": 512}, "values have head dimension 512"),
        ({"dim": 256, "dtype": torch.float32}, "up to 128 in torch.float32"),
        ({}, "the device is 'meta', not 'cuda'"),
        ({"dim": 256, "dtype": torch.bfloat16}, "the device is 'meta'"),
    ],
)
def test_the_kernel_says_what_it_does_not_serve(
    change: dict, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "has_triton", lambda: True)
    assert reason in (refusal(**change) or "")


def test_triton_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "has_triton", lambda: False)
    assert refusal() == "triton is not installed"


def test_mixed_dtypes_and_strange_strides_are_not_served() -> None:
    q, cache = meta(1, 4, 3, 64), meta(1, 2, 9, 64)
    assert "a cache of torch.float32" in (kernel_refusal(q, cache.float(), cache) or "")
    turned = meta(1, 2, 64, 9).transpose(2, 3)
    assert kernel_refusal(q, turned, cache) == "keys are not contiguous in the head dimension"


@pytest.mark.parametrize("window", [None, 4])
def test_a_call_on_the_cpu(window: int | None) -> None:
    q, keys, values, lengths, words, o = Case(
        lengths=(7, 3), num_pending=2, window=window, softcap=3.0, sinks=True
    ).tensors()
    out = tree_attention(
        q, keys, values, lengths, words, scale=o.scale, num_pending=2, depths=o.depths,
        window=window, softcap=3.0, sinks=o.sinks,
    )  # fmt: skip
    expected = masked_attention(q, keys, values, lengths, words, o)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)


def test_other_devices_take_the_plain_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "masked_attention", lambda *arguments: "plain")
    q, keys, values = meta(2, 4, 3, 64), meta(2, 2, 9, 64), meta(2, 2, 9, 32)
    lengths, words = meta(2, dtype=torch.int64), meta(2, 3, 1, dtype=torch.int64)
    assert tree_attention(q, keys, values, lengths, words, scale=0.1) == "plain"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 5, 4, 16)}, "key-value heads divide query heads"),
        ({"q": torch.zeros(2, 4, 4, 8)}, "do not fit q of shape"),
        ({"values": torch.zeros(2, 2, 8, 16)}, "values (2, 2, 8, 16) do not fit keys"),
        ({"lengths": torch.zeros(1, dtype=torch.long)}, "lengths must have shape (2,)"),
        ({"words": torch.zeros(2, 3, 1, dtype=torch.long)}, "words must have shape (2, 4, 1 or 2)"),
        ({"words": torch.zeros(2, 4, 3, dtype=torch.long)}, "words must have shape"),
        ({"num_pending": 61}, "65 tree rows need 2 words per row, not 1"),
        ({"window": 8}, "depths and window come together"),
        ({"depths": torch.zeros(2, 4)}, "depths and window come together"),
        ({"window": 8, "depths": torch.zeros(2, 3)}, "depths must have shape (2, 4)"),
        ({"sinks": torch.zeros(2)}, "sinks must have shape (4,)"),
    ],
)
def test_what_does_not_fit_is_named(change: dict, message: str) -> None:
    q, keys, values, lengths, words, _ = Case(lengths=(3, 3)).tensors()
    arguments = {"q": q, "keys": keys, "values": values, "lengths": lengths, "words": words}
    with pytest.raises(ValueError) as error:
        tree_attention(**{**arguments, "scale": 1.0, **change})
    assert message in str(error.value)
