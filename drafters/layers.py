"""The decoder layer, norms and rotary embeddings shared by all heads that attend.

A layer never sees a cache or a mask. It rotates its queries and keys and hands them to ``attend``,
a callable of its caller: training passes an attention over whole documents, the decoder passes one
that reads a draft KV cache. That seam is what lets both passes share every weight and every line of
this file.

Legend: B batch, T rows, D hidden, I intermediate, H query heads, Hkv key/value heads, d head size.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from drafters.config import DecoderConfig
from drafters.rope import rotate

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q (B, H, T, d), k (B, Hkv, T, d), v (B, Hkv, T, dv)) -> (B, H, T, dv).

Scores are scaled by d^-0.5. Keys of other rows, each layer's own, are the callee's memory; so are
masks and sliding windows.
"""


class Recomputed(nn.Module):
    """A module whose insides can be computed again in the backward pass instead of being kept.

    Attributes:
        recompute: do so.
    """

    recompute = False

    def inside(self, part: Callable[..., Any], *inputs: Tensor) -> Any:
        """Run a part of ``forward`` that has no side effect and draws no random numbers."""
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(part, *inputs, use_reentrant=False, preserve_rng_state=False)
        return part(*inputs)


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


def repeat_heads(x: Tensor, groups: int) -> Tensor:
    """Grouped-query keys or values (B, Hkv, T, d) -> (B, Hkv·groups, T, d)."""
    return x.repeat_interleave(groups, dim=1)


class Attention(nn.Module):
    """Grouped-query attention whose input may be wider than its output (EAGLE-3 feeds it 2·D).

    Args:
        config: shape of the head; ``qk_norm`` normalises queries and keys per head before the
            rotation, as Qwen3 does; ``attention_bias`` adds biases to both and to values, as Qwen2.
        layer: index handed to ``attend``.
        input_size: width of the input; None is D.
    """

    def __init__(self, config: DecoderConfig, layer: int, input_size: int | None = None) -> None:
        super().__init__()
        size, d, bias = input_size or config.hidden_size, config.head_dim, config.attention_bias
        self.q_proj = nn.Linear(size, config.num_attention_heads * d, bias=bias)
        self.k_proj = nn.Linear(size, config.num_key_value_heads * d, bias=bias)
        self.v_proj = nn.Linear(size, config.num_key_value_heads * d, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * d, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(d, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(d, config.rms_norm_eps) if config.qk_norm else None
        self.layer, self.head_dim, self.theta = layer, d, config.rope_theta
        self.rope_extension = config.rope_extension

    def forward(self, x: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        """(B, T, input_size) -> (B, T, D).

        Args:
            x: (B, T, input_size).
            position_ids: (B, T).
            attend: see :data:`Attend`.
        """
        return self.output(attend(self.layer, *self.project(x, position_ids)))

    def project(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, input_size) -> rotated queries (B, H, T, d), keys and values (B, Hkv, T, d)."""
        q = self._heads(self.q_proj(x), self.q_norm)
        return self._turned(q, position_ids), *self.keys_values(x, position_ids)

    def output(self, out: Tensor) -> Tensor:
        """What ``attend`` gave, (B, H, T, d) -> (B, T, D)."""
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def keys_values(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T, input_size) -> rotated keys and values, both (B, Hkv, T, d)."""
        k = self._heads(self.k_proj(x), self.k_norm)
        return self._turned(k, position_ids), self._heads(self.v_proj(x), None)

    def _turned(self, x: Tensor, position_ids: Tensor) -> Tensor:
        return rotate(x, position_ids, self.theta, self.rope_extension)

    def _heads(self, x: Tensor, norm: nn.Module | None) -> Tensor:
        """(B, T, heads·d) -> (B, heads, T, d)."""
        split = x.unflatten(-1, (-1, self.head_dim))
        return (split if norm is None else norm(split)).transpose(1, 2)


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


class DecoderLayer(Recomputed):
    """A pre-norm Llama layer (arXiv:2302.13971), with Qwen3's query and key norms if asked for.

    Args:
        config: shape of the head.
        layer: index handed to ``attend``.
    """

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = GatedMLP(size, config.intermediate_size)

    def forward(self, hidden: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        """(B, T, D) residual stream -> (B, T, D)."""
        out = attend(self.self_attn.layer, *self.inside(self._project, hidden, position_ids))
        return self.inside(self._finish, hidden, out)

    def _project(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.self_attn.project(self.input_layernorm(hidden), position_ids)

    def _finish(self, hidden: Tensor, out: Tensor) -> Tensor:
        hidden = hidden + self.self_attn.output(out)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


@torch.no_grad()
def copy_layer(layer: nn.Module, weights: dict[str, Tensor]) -> bool:
    """Start a layer from another one's weights, where every shape fits; all or nothing.

    Args:
        layer: to fill.
        weights: by their names in a Llama layer, as ``TargetModel.block`` gives them. Parameters of
            ``layer`` without one keep their values.

    Returns:
        Whether it was filled.
    """
    shared = {name: place for name, place in layer.named_parameters() if name in weights}
    if not shared or any(weights[name].shape != place.shape for name, place in shared.items()):
        return False
    for name, place in shared.items():
        place.copy_(weights[name])
    return True


@torch.no_grad()
def rms_scale(norm: nn.Module) -> Tensor | None:
    """What a root-mean-square norm multiplies by (Gemma stores one less); None for other norms."""
    parameters = dict(norm.named_parameters())
    if set(parameters) != {"weight"}:
        return None
    weight = parameters["weight"]
    ones = torch.ones_like(weight)  # mapped to the scale, whatever is stored
    signs = ones.clone()
    signs[::2] = -1.0
    scale = norm(ones)
    return scale if torch.allclose(norm(signs), signs * scale, rtol=1e-2) else None
