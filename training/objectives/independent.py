"""The objective of Medusa."""

from torch import Tensor

from drafters.medusa import MedusaDrafter
from training.features import TargetBatch
from training.objectives.base import AlignedObjective


class MedusaObjective(AlignedObjective):
    """Medusa-1: the target stays frozen, head i predicts token t+2+i (arXiv:2401.10774)."""

    drafter: MedusaDrafter

    def unroll(self, data: TargetBatch) -> list[Tensor]:
        """K heads on the target's last hidden state."""
        return list(self.drafter(data.last_hidden.to(next(self.drafter.blocks.parameters()).dtype)))

    def logits(self, hidden: Tensor, depth: int) -> Tensor:
        """(..., D) -> (..., Vd) through head ``depth``'s own output matrix, or the target's."""
        return self.drafter.logits(hidden, depth)
