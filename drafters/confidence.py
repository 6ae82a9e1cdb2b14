"""The confidence head c_k: how likely draft token k is to be accepted, given that all before it
were.

Trained on the acceptance label of the rule the head will be served with; for drafts sampled from q
that is the total-variation overlap 1 - ½‖p-q‖₁ (arXiv:2211.17192, Cor. 3.6; arXiv:2607.05147).
Calibration divides the logit of position k by a temperature fitted on held-out data (sequential
temperature scaling), stored in the head's config.

Legend: D hidden, K draft positions.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class ConfidenceHead(nn.Module):
    """One linear unit on the draft hidden state, which it reads without sending gradients into "
    "it."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(hidden_size, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        """(..., D) draft hidden states -> (...) logits of being accepted."""
        return self.proj(hidden.detach()).squeeze(-1)


def calibrated(logit: Tensor, position: int, temperatures: Sequence[float] | None) -> Tensor:
    """Probability of acceptance from a confidence logit.

    Args:
        logit: any shape.
        position: draft position k from 0; positions past the last fitted one use the last
            temperature.
        temperatures: one positive temperature per position, or None for uncalibrated.

    Returns:
        Same shape, in [0, 1].
    """
    if not temperatures:
        return logit.float().sigmoid()
    return (logit.float() / temperatures[min(position, len(temperatures) - 1)]).sigmoid()


def survival(confidences: Tensor) -> Tensor:
    """(..., K) per-position confidences -> (..., K) probability that at least k+1 drafts are
    accepted.
    """
    return torch.cumprod(confidences, dim=-1)
