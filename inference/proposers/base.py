"""What every proposer is given and gives back.

State of a round: committed tokens x_0..x_a. x_a was just emitted and has no target hidden state
yet; target hidden states exist for positions < a. A proposer works from that state and nothing
else; only self-speculation (``inference.proposers.layer_skip``) reaches for the target's cache.

Legend: B sequences still running, N tree nodes, F·D captured features, D hidden.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from drafters import TargetModel
from inference.engine import Engine
from inference.sampling import SamplingParams
from inference.timing import PhaseTimer
from inference.tree import TokenTree


@dataclass
class RowState:
    """One sequence at the start of a round.

    Attributes:
        tokens: committed tokens x_0..x_a.
        prompt_length: how many of them were given.
        features: (n, F·D) captured layers of the n positions a-n..a-1 committed since the last
            call; None if the proposer asked for no layers.
        hidden: (n, D) last hidden states of the same positions.
        max_depth: drafting deeper than this is wasted, the sequence ends there.
        sampling: of this sequence; drafts follow its temperature and warpers.
    """

    tokens: list[int]
    prompt_length: int
    features: Tensor | None
    hidden: Tensor
    max_depth: int
    sampling: SamplingParams


@dataclass
class Session:
    """One decoding call.

    Attributes:
        engine: runs the target.
        cache: of the engine. Sequences that have ended leave it.
        batch_size: sequences at the start.
        timer: network time of drafting is charged to its phase "draft".
        rule: of acceptance.
        live: the sequence behind each row of the cache.
    """

    engine: Engine
    cache: Any
    batch_size: int
    timer: PhaseTimer
    rule: str
    live: list[int] = field(default_factory=list)

    @property
    def target(self) -> TargetModel:
        """The model whose output it is."""
        return self.engine.target


@dataclass(frozen=True)
class Resume:
    """Work that drafting already did for the verifying forward.

    Attributes:
        first_layer: layers below it have run on every node of the trees, and the target's cache
            holds their keys and values as pending rows, in node order.
        entering: (B, N, D) residual stream entering that layer.
    """

    first_layer: int
    entering: Tensor


class Proposer(ABC):
    """Grows a tree for every running sequence of a batch."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """``hidden_states`` indices of the target that ``RowState.features`` must hold."""
        return ()

    @property
    def chains(self) -> bool:
        """Whether its trees never branch; rule ``block`` takes nothing else."""
        return False

    @abstractmethod
    def start(self, session: Session) -> None:
        """Prepare for the sequences of one decoding call; forget those of the last."""

    @abstractmethod
    def propose(self, states: Sequence[RowState | None]) -> list[TokenTree | None]:
        """One tree for each sequence; None stands for a sequence that has ended."""

    def finish(self, row: int, tokens: list[int]) -> None:
        """A sequence has ended: what is kept for it can go.

        Args:
            row: the sequence.
            tokens: its whole text.
        """
        return None

    def resume(self) -> Resume | None:
        """What the verifying forward of the trees just proposed need not do again."""
        return None
