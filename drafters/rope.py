"""Rotary position embeddings (arXiv:2104.09864) and what stretches them to longer contexts.

Heads of other trainers may come with one of these: linear interpolation (arXiv:2306.15595), YaRN
(arXiv:2309.00071), or Llama 3.1's own rule. Keys have the names of transformers' configs.

Legend: B batch, H heads, T rows, d head size.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Extension = Mapping[str, Any]
ORIGINAL = "original_max_position_embeddings"
NEEDED: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL),
    "yarn": ("factor", ORIGINAL),
}
"""Keys of each kind, by ``rope_type``."""
OPTIONAL: dict[str, tuple[str, ...]] = {
    "linear": (),
    "llama3": (),
    "yarn": (
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
}


def extension_problems(extension: Extension) -> list[str]:
    """What is missing in an extension, or not known of it."""
    kind = extension.get("rope_type")
    if kind not in NEEDED:
        return [f"{kind!r} RoPE is not supported, only {', '.join(NEEDED)} and plain RoPE"]
    known = {"rope_type", *NEEDED[kind], *OPTIONAL[kind]}
    problems = [f"{kind} RoPE has no {key}" for key in sorted(set(extension) - known)]
    for key in NEEDED[kind]:
        value = extension.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            problems.append(f"{kind} RoPE needs a positive {key}, got {value!r}")
    return problems


def rotate(
    x: Tensor, position_ids: Tensor, theta: float, extension: Extension | None = None
) -> Tensor:
    """Rotary position embedding in the half-split layout of Llama.

    Args:
        x: (B, H, T, d).
        position_ids: (B, T) absolute positions.
        theta: base frequency.
        extension: of the frequencies; None is plain RoPE.

    Returns:
        (B, H, T, d), angles computed in float32 or better.
    """
    size = x.shape[-1]
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    exponent = torch.arange(0, size, 2, device=x.device, dtype=wide) / size
    frequency = theta**-exponent
    if extension is not None:
        frequency = extended(frequency, theta, extension)
    angle = position_ids[:, None, :, None].to(wide) * frequency  # (B, 1, T, d/2)
    scale = attention_factor(extension)
    cos, sin = (angle.cos() * scale).to(x.dtype), (angle.sin() * scale).to(x.dtype)
    first, second = x[..., : size // 2], x[..., size // 2 :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def extended(frequency: Tensor, theta: float, extension: Extension) -> Tensor:
    """Frequencies (d/2,) of plain RoPE -> those of an extension."""
    kind, factor = extension["rope_type"], float(extension["factor"])
    if kind == "linear":
        return frequency / factor
    if kind == "llama3":
        return _llama3(frequency, extension)
    return _yarn(frequency, theta, extension)


def attention_factor(extension: Extension | None) -> float:
    """What YaRN multiplies queries and keys by; 1 for all others."""
    if extension is None or extension["rope_type"] != "yarn":
        return 1.0
    given = extension.get("attention_factor")
    if given is not None:
        return float(given)
    factor = float(extension["factor"])
    first, second = extension.get("mscale"), extension.get("mscale_all_dim")
    if first and second:
        return _magnitude(factor, first) / _magnitude(factor, second)
    return _magnitude(factor, 1.0)


def _magnitude(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _llama3(frequency: Tensor, extension: Extension) -> Tensor:
    """Long waves are stretched, short ones stay, those between are blended."""
    factor, low, high = (
        float(extension[key]) for key in ("factor", "low_freq_factor", "high_freq_factor")
    )
    turns = extension[ORIGINAL] * frequency / (2 * math.pi)  # within the original context
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequency * (kept + (1 - kept) / factor)


def _yarn(frequency: Tensor, theta: float, extension: Extension) -> Tensor:
    """The same by the place of the frequency, between two numbers of turns."""
    half = frequency.shape[-1]

    def place(turns: float) -> float:
        return half * math.log(extension[ORIGINAL] / (turns * 2 * math.pi)) / math.log(theta)

    first = place(extension.get("beta_fast") or 32.0)
    last = place(extension.get("beta_slow") or 1.0)
    if extension.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)
    width = last - first or 0.001
    places = torch.arange(half, device=frequency.device, dtype=frequency.dtype)
    stretched = ((places - first) / width).clamp(0, 1)
    return frequency * (1 - stretched + stretched / float(extension["factor"]))
