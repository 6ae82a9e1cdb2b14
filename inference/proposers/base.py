"""What every proposer is given and gives back.

State of a round: committed tokens x_0..x_a. x_a was just emitted and has no target hidden state
yet; target hidden states exist for positions < a. A proposer works from that state and nothing
else.

Legend: F·D captured features, D hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from inference.sampling import SamplingParams
from inference.timing import PhaseTimer
from inference.tree import TokenTree


@dataclass
class RowState:
    """One sequence at the start of a round.

    Attributes:
        tokens: committed tokens x_0..x_a.
        features: (n, F·D) captured layers of the n positions a-n..a-1 committed since the last
            call; None if the proposer asked for no layers.
        hidden: (n, D) last hidden states of the same positions.
        max_depth: drafting deeper than this is wasted, the sequence ends there.
    """

    tokens: list[int]
    features: Tensor | None
    hidden: Tensor
    max_depth: int


class Proposer(Protocol):
    """Grows a tree for every unfinished sequence of a batch."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """``hidden_states`` indices of the target that ``RowState.features`` must hold."""
        ...

    def start(self, batch_size: int, timer: PhaseTimer) -> None:
        """Forget everything and prepare for ``batch_size`` sequences;

        Network time is charged to "draft".
        """
        ...

    def propose(
        self, states: Sequence[RowState | None], sampling: SamplingParams, rule: str
    ) -> list[TokenTree | None]:
        """One tree for each sequence; None stands for a sequence that has ended."""
        ...
