"""The kernels on a GPU: the interpreter's cases, and bfloat16, which it cannot compute."""

from dataclasses import replace

import pytest
import torch

from inference.kernels import kernel_refusal, tree_attention
from inference.kernels.reference import masked_attention
from tests.inference.kernels.interpreted import CASES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_kernels_agree_with_the_plain_implementation(name: str, dtype: torch.dtype) -> None:
    *tensors, options = replace(CASES[name], dtype=dtype).tensors()
    tensors = [tensor.cuda() for tensor in tensors]
    moved = {
        key: value.cuda() if isinstance(value, torch.Tensor) else value
        for key, value in vars(options).items()
    }
    assert kernel_refusal(*tensors[:3]) is None
    out = tree_attention(*tensors, **moved)
    expected = masked_attention(*tensors, replace(options, **moved))
    tolerance = 1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
