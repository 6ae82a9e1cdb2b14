"""Steps whose loss or gradient is not finite: which rows did it, and whether to go on."""

from collections.abc import Callable, Sequence

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from training.data.batches import Batch, Dataset
from training.engines import Engine

MAX_IN_A_ROW = 10
"""More skipped steps in a row than this are not an accident."""
MAX_OVERFLOWS = 40
"""fp16 halves its scale at each overflow; after so many in a row the scale is not at fault."""


class NonFinite:
    """The policy of a run.

    Args:
        policy: "stop" or "skip".
        engine: of the run.

    Attributes:
        skipped: steps left out so far.
        scaled: fp16 scaling overflows as a matter of course and leaves such steps out itself.
    """

    def __init__(self, policy: str, engine: Engine) -> None:
        self.policy = policy
        self.scaled = engine.accelerator.scaler is not None
        self.skipped, self._in_a_row, self._overflows = 0, 0, 0

    def fine(self) -> None:
        """A step was usable."""
        self._in_a_row = 0

    def overflow(self, finite: bool) -> bool:
        """Whether fp16 cannot go on; call with whether the step's gradient was finite."""
        self._overflows = 0 if finite else self._overflows + 1
        return self._overflows > MAX_OVERFLOWS

    def may_skip(self) -> bool:
        """Whether to leave the present step out; counts it if so."""
        if self.policy == "stop" or self._in_a_row >= MAX_IN_A_ROW:
            return False
        self.skipped += 1
        self._in_a_row += 1
        return True

    def find_rows(
        self,
        batches: Sequence[Batch],
        loss: Callable[[Batch], Tensor],
        dataset: Dataset,
        accelerator: Accelerator,
    ) -> list[int]:
        """Data rows of the sequences whose own loss is not finite, over all processes, which call
        this together.

        Args:
            batches: this process's.
            loss: of one sequence; called for each, in step on all processes.
            dataset: which rows are in a sequence.
            accelerator: of this process.
        """
        guilty: list[int] = []
        for batch in batches:
            for row in range(len(batch.input_ids)):
                alone = batch.row(row)
                if not torch.isfinite(loss(alone)):
                    guilty.extend(dataset.rows_of(int(alone.index)))
        return sorted(set(gather_object(guilty)) if accelerator.num_processes > 1 else set(guilty))

    @staticmethod
    def name_rows(rows: Sequence[int]) -> str:
        """For a message."""
        if not rows:
            return (
                "no sequence alone has such a loss: the weights or the learning rate are at fault"
            )
        more = f" and {len(rows) - 20} more" if len(rows) > 20 else ""
        return f"it comes from data rows {', '.join(map(str, rows[:20]))}{more}"
