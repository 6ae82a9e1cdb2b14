"""fp8 keeps what it can; sizes are predicted; checksums see every bit."""

import pytest
import torch
from torch import Tensor

from training.store.encoding import (
    BLOCK,
    DTYPES,
    FP8,
    LAST,
    SCALES,
    checksum,
    decode,
    encode,
    from_fp8,
    row_tensors,
    to_fp8,
)


def outliers(size: int = 200) -> Tensor:
    """(50, size) rows with two channels a thousand times as large as the others."""
    values = torch.randn(50, size, generator=torch.Generator().manual_seed(0))
    values[:, 3] *= 1000
    values[7, 100] = 25_000.0
    return values


@pytest.mark.parametrize("size", [BLOCK, 200, 31])
def test_fp8_is_within_its_rounding(size: int) -> None:
    """Half a unit of three bits, 1/16, or of the smallest value below its normal range."""
    values = outliers(size) if size > 100 else outliers()[:, :size]
    kept, scales = to_fp8(values)
    assert kept.shape == values.shape and scales.shape == (50, -(-size // BLOCK))
    back = from_fp8(kept, scales)
    step = scales.float().repeat_interleave(BLOCK, -1)[:, :size] * 2**-9
    assert ((back - values).abs() <= torch.maximum(values.abs() / 16, step / 2) + 1e-6).all()
    error = (back - values)[:, 4:].norm() / values[:, 4:].norm()
    assert error < 0.03


def test_scales_of_blocks_keep_small_values_beside_outliers() -> None:
    values = outliers()
    plain = values.clamp(-448, 448).to(FP8).float()
    assert (plain - values).norm() / values.norm() > 0.5
    back = from_fp8(*to_fp8(values))
    assert (back - values).norm() / values.norm() < 0.02


def test_extreme_blocks() -> None:
    """Zeros stay zeros, the largest value is never lost, the smallest ones are not NaN."""
    values = torch.zeros(3, BLOCK)
    values[1, 5] = 3e38
    values[2] = 1e-30
    back = from_fp8(*to_fp8(values))
    assert (back[0] == 0).all()
    assert back[1, 5] == pytest.approx(3e38, rel=0.07)
    assert back[2] == pytest.approx(values[2], rel=0.07)


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", "float64"])
def test_other_dtypes_keep_their_own_values(name: str) -> None:
    values = torch.randn(4, 32, dtype=torch.float64).to(DTYPES[name])
    assert torch.equal(decode("layer_2", encode("layer_2", values, name), values.dtype), values)


def test_fp8_leaves_the_last_hidden_state_alone() -> None:
    values = torch.randn(4, BLOCK).bfloat16()
    kept = encode(LAST, values, "fp8")
    assert torch.equal(decode(LAST, kept, torch.bfloat16), values)
    assert set(encode("layer_2", values, "fp8")) == {"layer_2", "layer_2" + SCALES}


def test_what_cannot_be_kept_is_refused() -> None:
    values = torch.ones(2, BLOCK)
    values[1, 1] = float("nan")
    with pytest.raises(ValueError, match="layer_2: hidden states of the target are not finite"):
        encode("layer_2", values, "fp8")
    with pytest.raises(ValueError, match="do not fit into float16: store them as bfloat16"):
        encode("layer_2", 1e5 * torch.ones(2, 4), "float16")


def test_row_tensors_are_what_encoding_gives() -> None:
    for dtype in DTYPES:
        tensors = row_tensors([2], 200, dtype)
        for part in ("layer_2", LAST):
            for name, tensor in encode(part, outliers(), dtype).items():
                assert tensors[name] == (tensor.dtype, tensor.shape[1])


def test_checksums_see_values_and_scales() -> None:
    kept = encode("layer_2", outliers(), "fp8")
    whole = checksum("layer_2", kept)
    for name in kept:
        changed = {key: value.clone() for key, value in kept.items()}
        changed[name].view(torch.uint8)[3, 1] ^= 1
        assert checksum("layer_2", changed) != whole
