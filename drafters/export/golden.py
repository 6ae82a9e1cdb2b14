"""Golden logits: a few rows that travel with an export, to tell whether a loaded head is the same.

Inputs are random but fixed; the logits depend on every weight of the head and, for heads that read
it, on the target's embedding. A sequential head runs a prefix and a short chain after it, so that
feeding features back and attending to earlier rows are covered too.

Legend: T prefix rows, S draft steps, F captured layers, K heads, D hidden, Vd draft vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from drafters.base import Drafter
from drafters.eagle import Eagle3Drafter
from drafters.export.folder import ExportError, read_tensors, write_tensors
from drafters.layers import repeat_heads
from drafters.medusa import MedusaDrafter

GOLDEN = "golden.safetensors"
PREFIX = 6  # T
STEPS = 3  # S
TOLERANCE = 1e-4


def golden_inputs(drafter: Drafter) -> dict[str, Tensor]:
    """Fixed inputs of the head's shape: ``features`` (T, F·D), and ``token_ids`` (T + S - 1,)."""
    generator = torch.Generator().manual_seed(0)
    width = max(1, len(drafter.feature_layers)) * drafter.config.hidden_size
    features = torch.randn(PREFIX, width, generator=generator)
    tokens = torch.randint(drafter.config.vocab_size, (PREFIX + STEPS - 1,), generator=generator)
    return {"features": features, "token_ids": tokens}


@torch.no_grad()
def golden_logits(drafter: Drafter, inputs: dict[str, Tensor]) -> Tensor:
    """What the head answers to :func:`golden_inputs`.

    Returns:
        (S, Vd) logits of the first draft steps of a sequential head, (K, Vd) of an independent one.

    Raises:
        ValueError: no rule for this family.
    """
    parameter = next(drafter.parameters())
    features, token_ids = inputs["features"].to(parameter), inputs["token_ids"].to(parameter.device)
    with _aligned(drafter):
        if isinstance(drafter, Eagle3Drafter):
            return _eagle3_chain(drafter, features, token_ids)
        if isinstance(drafter, MedusaDrafter):
            rows = drafter(features[-1])
            return torch.stack([drafter.logits(row, head) for head, row in enumerate(rows)])
    raise ValueError(f"no golden logits for {drafter.family!r} heads yet: add a rule to this file")


def write_golden(drafter: Drafter, folder: Path) -> None:
    """Write inputs and logits to ``folder/golden.safetensors``."""
    inputs = golden_inputs(drafter)
    tensors = {**inputs, "logits": golden_logits(drafter, inputs)}
    write_tensors(tensors, folder / GOLDEN, {"family": drafter.family})


def check_golden(drafter: Drafter, folder: str | Path, tolerance: float = TOLERANCE) -> float:
    """Compare a loaded head with the logits that travel with its export.

    Args:
        drafter: the head, with its target attached.
        folder: the export.
        tolerance: largest difference allowed, as a part of the largest golden logit. Another
            machine rounds differently; a head loaded in half precision needs about 0.05.

    Returns:
        The difference found, as a part of the largest golden logit.

    Raises:
        ExportError: the file is unreadable or of another head, or the logits differ.
    """
    path = Path(folder) / GOLDEN
    golden = read_tensors(path)
    expected = golden_inputs(drafter)
    for name, value in expected.items():
        if name not in golden or golden[name].shape != value.shape:
            raise ExportError(f"{path}: {name} does not fit this head; it belongs to another one")
    found, wanted = golden_logits(drafter, golden).cpu().double(), golden["logits"].double()
    if found.shape != wanted.shape:
        raise ExportError(
            f"{path} holds logits of shape {list(wanted.shape)}, this head gives "
            f"{list(found.shape)}: it belongs to another head"
        )
    difference = ((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-12)).item()
    if not difference <= tolerance:
        raise ExportError(
            f"{path}: logits of this head differ by {difference:.2g} of the largest one (allowed: "
            f"{tolerance:g}): its weights, its target or its dtype are not those of the export"
        )
    return difference


def _eagle3_chain(drafter: Eagle3Drafter, features: Tensor, token_ids: Tensor) -> Tensor:
    """(T, F·D) prefix and (T + S - 1,) tokens -> (S, Vd) logits of the last row and the chain."""
    attend = _ChainAttention()
    feature = drafter.fuse(features[None])  # (1, T, D)
    positions = torch.arange(PREFIX + STEPS - 1, device=token_ids.device)[None]
    rows = slice(0, PREFIX)
    logits = []
    for step in range(STEPS):
        hidden, following = drafter(feature, token_ids[None, rows], positions[:, rows], attend)
        logits.append(drafter.logits(hidden[0, -1]))
        feature = following[:, -1:]
        rows = slice(PREFIX + step, PREFIX + step + 1)
    return torch.stack(logits)


@contextmanager
def _aligned(drafter: Drafter) -> Iterator[None]:
    """Compute with copies of the tensors.

    Those that live in a mapped file are not aligned, BLAS rounds differently then, and equal heads
    would not give equal logits.
    """
    tensors = [*drafter.parameters(), *drafter.buffers()]
    mapped = [tensor.data for tensor in tensors]
    for tensor in tensors:
        tensor.data = tensor.data.clone()
    try:
        yield
    finally:
        for tensor, data in zip(tensors, mapped, strict=True):
            tensor.data = data


class _ChainAttention:
    """Causal attention over all rows seen so far, the keys kept between calls."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.keys.append(k)
        self.values.append(v)
        groups = q.shape[1] // k.shape[1]
        keys = repeat_heads(torch.cat(self.keys, dim=2), groups)
        values = repeat_heads(torch.cat(self.values, dim=2), groups)
        rows, columns = q.shape[2], keys.shape[2]
        visible = torch.ones(rows, columns, dtype=torch.bool, device=q.device).tril(columns - rows)
        return torch.nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=visible)
