"""The decoder block, norms and rotary embeddings shared by the sequential heads.

The block never sees a cache or a mask. It rotates its queries and keys and hands them to
``attend``, a callable of its caller: training passes the training-time-test attention, the decoder
passes one that reads a draft KV cache. That seam is what lets both passes share every weight and
every line of this file.

Legend: B batch, T rows, D hidden, H query heads, Hkv key/value heads, d head size.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q (B, H, T, d), k (B, Hkv, T, d), v (B, Hkv, T, d)) -> (B, H, T, d);

Keys of other rows are the callee's memory.
"""


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned scale, computed in float32 as Llama does."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(..., size) -> (..., size), in the input's dtype."""
        wide = x if x.dtype == torch.float64 else x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


def rotate(x: Tensor, position_ids: Tensor, theta: float) -> Tensor:
    """Rotary position embedding in the half-split layout of Llama (arXiv:2104.09864).

    Args:
        x: (B, H, T, d).
        position_ids: (B, T) absolute positions.
        theta: base frequency.

    Returns:
        (B, H, T, d), angles computed in float32 or better.
    """
    size = x.shape[-1]
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    exponent = torch.arange(0, size, 2, device=x.device, dtype=wide) / size
    angle = position_ids[:, None, :, None].to(wide) * theta**-exponent  # (B, 1, T, d/2)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x[..., : size // 2], x[..., size // 2 :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def repeat_heads(x: Tensor, groups: int) -> Tensor:
    """Grouped-query keys or values (B, Hkv, T, d) -> (B, Hkv·groups, T, d)."""
    return x.repeat_interleave(groups, dim=1)


class Attention(nn.Module):
    """Grouped-query attention whose input may be wider than its output (EAGLE-3 feeds it 2·D)."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        theta: float,
    ) -> None:
        super().__init__()
        self.q_proj = nn.Linear(input_size, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(input_size, num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(input_size, num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)
        self.head_dim = head_dim
        self.theta = theta

    def forward(self, x: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        """(B, T, input_size) -> (B, T, D).

        Args:
            x: (B, T, input_size).
            position_ids: (B, T).
            attend: see :data:`Attend`.
        """
        batch, rows, _ = x.shape
        q, k, v = (
            projection(x).view(batch, rows, -1, self.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = attend(rotate(q, position_ids, self.theta), rotate(k, position_ids, self.theta), v)
        return self.o_proj(out.transpose(1, 2).reshape(batch, rows, -1))


class GatedMLP(nn.Module):
    """SwiGLU feed-forward (arXiv:2002.05202), D -> I -> D."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
