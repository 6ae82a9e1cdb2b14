"""The rarer truncations of a law, done by transformers' own classes.

Letters: V target vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.generation import LogitsProcessor, MinPLogitsWarper, TypicalLogitsWarper


def keep_min_p(logits: Tensor, min_p: float) -> Tensor:
    """Logits (..., V) with all at -inf whose probability is below `min_p` times the largest
    (arXiv:2407.01082).
    """
    return _warp(MinPLogitsWarper(min_p), logits)


def keep_typical(logits: Tensor, mass: float) -> Tensor:
    """Logits (..., V) with all but the most typical tokens at -inf (arXiv:2202.00666).

    Typical is a token whose surprise is close to the entropy of the law; kept are the most typical
    ones until their mass reaches `mass`.
    """
    return _warp(TypicalLogitsWarper(mass), logits)


def _warp(warper: LogitsProcessor, logits: Tensor) -> Tensor:
    """Apply a warper, which knows (B, V) only and does not look at the text."""
    no_text = torch.empty(1, 0, dtype=torch.long, device=logits.device)
    return warper(no_text, logits.reshape(-1, logits.shape[-1])).reshape(logits.shape)
