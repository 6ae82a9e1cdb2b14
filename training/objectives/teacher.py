"""What the target says about drafted tokens, as the losses read it.

Legend: m drafts, u rows of the target, D hidden, Vd draft vocabulary.
"""

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from training import losses


@dataclass(frozen=True)
class Teacher:
    """The target's law for a few drafted tokens.

    Attributes:
        p: (m, Vd) exact, not renormalised: what it gives to tokens the head can propose.
        best: (m,) its argmax, an absolute id.
        label: (m,) draft id of the token it emitted, -1 outside the draft vocabulary.
        hidden: (m, D) its last hidden state.
        known: (m,) whether its argmax is in the draft vocabulary.
        tempered: (m, Vd) as ``p``, at the temperature of the confidence label.
    """

    p: Tensor
    best: Tensor
    label: Tensor
    hidden: Tensor
    known: Tensor
    tempered: Tensor

    @cached_property
    def inside(self) -> Tensor:
        """(m, Vd) ``p`` scaled to sum 1; made once where depths share a teacher."""
        return losses.renormalised(self.p)

    @cached_property
    def entropy(self) -> Tensor:
        """(m,) that of ``inside``."""
        return losses.entropy(self.inside)


@dataclass(frozen=True)
class Laws:
    """What the target says in some of its rows, whatever they are used for.

    Attributes:
        p, best, hidden, known, tempered: as in :class:`Teacher`, (u, ...).
    """

    p: Tensor
    best: Tensor
    hidden: Tensor
    known: Tensor
    tempered: Tensor

    def teacher(self, label: Tensor, rows: Tensor | None = None) -> Teacher:
        """The laws of some drafts.

        Args:
            label: (m,) draft ids of the tokens the target emitted.
            rows: (m,) which of the u laws each draft has; None if they are one for one.
        """
        if rows is None:
            return Teacher(self.p, self.best, label, self.hidden, self.known, self.tempered)
        p = self.p[rows]
        tempered = p if self.tempered is self.p else self.tempered[rows]
        return Teacher(p, self.best[rows], label, self.hidden[rows], self.known[rows], tempered)
