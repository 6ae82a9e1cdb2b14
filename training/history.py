"""Acceptance lengths over a run: which step was best, and whether to stop."""

from collections.abc import Iterable, Mapping
from typing import Any

from training.options.run import EvalOptions


class History:
    """Acceptance length by evaluated step.

    Args:
        options: ``patience`` evaluations in a row that are not better by more than ``min_gain`` end
            the run.
    """

    def __init__(self, options: EvalOptions) -> None:
        self.options = options
        self.lengths: dict[int, float] = {}

    def add(self, step: int, acceptance_length: float) -> None:
        """An evaluation."""
        self.lengths[step] = acceptance_length

    def read(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Take the evaluations that a metrics.jsonl holds."""
        self.lengths = {
            line["step"]: line["eval/acceptance_length"]
            for line in lines
            if "eval/acceptance_length" in line
        }

    @property
    def best_step(self) -> int | None:
        """The first step of the greatest acceptance length; None before any evaluation."""
        return max(self.lengths, key=self.lengths.__getitem__, default=None)

    @property
    def enough(self) -> bool:
        """Whether patience is at its end."""
        if not self.options.patience:
            return False
        best, waited = -float("inf"), 0
        for _, length in sorted(self.lengths.items()):
            if length > best + self.options.min_gain:
                best, waited = length, 0
            else:
                waited += 1
        return waited >= self.options.patience

    def summary(self) -> dict[str, float]:
        """For the last line of a run that was evaluated on the way."""
        if not self.options.every or self.best_step is None:
            return {}
        return {
            "best_step": self.best_step,
            "best_acceptance_length": self.lengths[self.best_step],
        }
