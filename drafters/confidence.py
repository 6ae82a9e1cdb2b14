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
    """One linear unit on the rows that the head's logits are made from (for DSpark the hidden state
    and the Markov embedding of the token before).

    Its input is detached: the loss of this output trains ``proj`` and nothing else, neither the
    head nor DSpark's W1. This is this project's choice, so that a confidence output never changes
    the drafts.

    Args:
        size: width of those rows.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(size, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        """(..., size) -> (...) logits of being accepted."""
        return self.proj(hidden.detach()).squeeze(-1)


def calibrated(
    logit: Tensor,
    position: int,
    temperatures: Sequence[float] | None,
    biases: Sequence[float] | None = None,
) -> Tensor:
    """Probability of acceptance from a confidence logit: sigmoid(logit / temperature + bias).

    Args:
        logit: any shape.
        position: draft position k from 0; positions past the last fitted one use the last
            temperature and bias.
        temperatures: one positive temperature per position, or None for uncalibrated.
        biases: one per position, or None for 0.

    Returns:
        Same shape, in [0, 1]; float64 stays, all else is float32.
    """
    scaled = logit if logit.dtype == torch.float64 else logit.float()
    if temperatures:
        scaled = scaled / temperatures[min(position, len(temperatures) - 1)]
    if biases:
        scaled = scaled + biases[min(position, len(biases) - 1)]
    return scaled.sigmoid()


def survival(confidences: Tensor) -> Tensor:
    """(..., K) per-position confidences -> (..., K) probability that at least k+1 drafts are
    accepted.
    """
    return torch.cumprod(confidences, dim=-1)
