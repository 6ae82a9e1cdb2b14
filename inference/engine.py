"""What runs the target: appended rows in, hidden states and logits out.

Every decoding loop is written against this interface. `EagerEngine` runs any model as transformers
wrote it and is the slow twin of the engines in `inference.static`, whose output must be the same.

Letters: B sequences, F new rows of each (padded to the most), m rows pending, D hidden.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from drafters import Drafter, TargetModel, TargetOutput
from inference.append import append_rows
from inference.cache import TreeCache


class Engine(ABC):
    """Runs a target over caches of its own.

    Attributes:
        target: the model.
        name: as on the command line.
    """

    name: str

    def __init__(self, target: TargetModel) -> None:
        self.target = target

    @abstractmethod
    def new_cache(self, batch_size: int, capacity: int) -> Any:
        """An empty cache: `lengths`, `pending` rows, `capacity`, `commit`, `arrange`, `revert`,
        `select`, `release`.
        """

    @abstractmethod
    def append(
        self,
        cache: Any,
        tokens: Sequence[Tensor],
        depths: Sequence[Tensor],
        seen: Sequence[Tensor],
        *,
        feature_layers: Sequence[int] = (),
        logits_to_keep: int | Tensor = 0,
        run_layers: Collection[int] | None = None,
        entering: Tensor | None = None,
    ) -> TargetOutput:
        """What `append_rows` does, by this engine.

        Args:
            cache: of this engine.
            tokens: B lists of F_b token ids; as in `append_rows`, as are the following.
            depths: B lists (m + F_b,).
            seen: B matrices (F_b, m + F_b).
            feature_layers: indices of ``hidden_states``.
            logits_to_keep: of the F padded rows.
            run_layers: None runs all.
            entering: (B, F, D).

        Returns:
            Of the F padded rows.
        """

    @contextmanager
    def probing(self) -> Iterator[None]:
        """Forwards meanwhile are trials: nothing is prepared for more of their kind."""
        yield

    @property
    def widths(self) -> tuple[int, ...] | None:
        """Rows of a tree that are really run, where they are filled up; None if any are."""
        return None

    @property
    def pages(self) -> str:
        """What memory the weights lie in, for keys of cost tables; "" for what the system gives."""
        return ""

    @property
    def captured_seconds(self) -> float:
        """Spent so far in capturing forwards, by this engine and those beside it."""
        return 0.0

    def tune(self) -> None:
        """Measure anew what depends on the number of threads."""
        return None

    def prepare(self, drafter: Drafter) -> None:
        """Make ready what a head drafts with; it drafts without, too.

        Args:
            drafter: attached head.
        """
        return None

    @abstractmethod
    def beside(self, model: TargetModel) -> Engine:
        """What runs a draft model: an engine like this one, made once and closed with it.

        Args:
            model: that drafts for the target; the target itself shares the target's engine.
        """

    def close(self) -> None:
        """Leave the target as it was before the engine."""
        return None


class EagerEngine(Engine):
    """Operation by operation, as transformers wrote the model."""

    name = "eager"

    def new_cache(self, batch_size: int, capacity: int) -> TreeCache:
        """Buffers per layer, for layers of any shapes."""
        return TreeCache(self.target.model.config, batch_size, capacity)

    def append(
        self,
        cache: Any,
        tokens: Sequence[Tensor],
        depths: Sequence[Tensor],
        seen: Sequence[Tensor],
        **options: Any,
    ) -> TargetOutput:
        """By `append_rows`."""
        return append_rows(self.target, cache, tokens, depths, seen, **options)

    def beside(self, model: TargetModel) -> EagerEngine:
        """Nothing is kept of it."""
        return self if model is self.target else EagerEngine(model)
