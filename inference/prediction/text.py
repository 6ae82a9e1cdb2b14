"""A text of the target, its laws along it, and what one pass over it finds.

Letters: m tokens that rounds emit, V target vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from drafters import TargetModel
from inference.processors import Sampler, fresh
from inference.sampling import SamplingParams, lowest_argmax

MEASURES = ("overlap", "p_of_draft", "agreement")
"""What is measured at every position and depth, given the text before it."""


@dataclass(frozen=True)
class Answer:
    """A text of the target.

    Attributes:
        prompt: token ids given.
        tokens: new tokens, drawn with ``sampling`` and no drafts.
        max_new_tokens: that they were decoded with.
        sampling: seed included.
        id: of the request; turns of one conversation share it.
        category: of the request.
        turn: of the conversation.
    """

    prompt: list[int]
    tokens: list[int]
    max_new_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    id: str = ""
    category: str = "all"
    turn: int = 0


@dataclass
class Look:
    """What one text says. Lists by position have m entries.

    Attributes:
        answer: the text.
        survival: by position S_1, S_2, ... of the real drafts.
        depths: by position, of the deepest draft; a mean where trees are drawn.
        rows: by position, nodes of the tree, root included; a mean likewise.
        chains: by position, S of the chain of first children.
        alone: by position and depth, the chance of a first child given the text before it, whether
            a round would get there or not.
        ranks: by position and depth, the text's token's place among a node's children, None if it
            cannot be one; empty where drafts are drawn.
        grown: other sizes of tree -> their survival, by position.
        measures: by name the values, by position and depth.
        surprise: sum over new tokens of -log p.
        entropy: sum of its expectations.
        variance: sum of its variances.
        best: new tokens that are the law's argmax.
    """

    answer: Answer
    survival: list[list[float]] = field(default_factory=list)
    depths: list[float] = field(default_factory=list)
    rows: list[float] = field(default_factory=list)
    chains: list[list[float]] = field(default_factory=list)
    alone: list[list[float]] = field(default_factory=list)
    ranks: list[list[int | None]] = field(default_factory=list)
    grown: dict[int, list[list[float]]] = field(default_factory=dict)
    measures: dict[str, list[list[float]]] = field(
        default_factory=lambda: {name: [] for name in MEASURES}
    )
    surprise: float = 0.0
    entropy: float = 0.0
    variance: float = 0.0
    best: int = 0

    @property
    def room(self) -> list[int]:
        """By position, how deep drafts may go: to the end of the text, and not beyond the token
        before the last that the length allows.
        """
        m, most = len(self.survival), self.answer.max_new_tokens - 2
        return [min(m - place, most - place) for place in range(m)]


class TextLaws:
    """The target's laws along a text, asked for in its order, as stateful processors need.

    Args:
        answer: the text.
        logits: (m, V) behind the tokens of it that rounds start at.
        target: for its end-of-sequence tokens.
    """

    def __init__(self, answer: Answer, logits: Tensor, target: TargetModel) -> None:
        self._logits, self._text = logits, [*answer.prompt, *answer.tokens]
        self.start = len(answer.prompt)
        params, ends = fresh(answer.sampling), target.eos_token_ids
        self._sampler = Sampler(params, self.start, ends, logits.device)
        self._greedy = params.temperature == 0
        self._known: list[tuple[Tensor, Tensor, int] | None] = []

    def _at(self, place: int) -> tuple[Tensor, Tensor, int]:
        while len(self._known) <= place:
            row = len(self._known)
            text = self._text[: self.start + row + 1]
            scores = self._sampler.scores(self._logits[row], text)
            law = self._sampler.law(scores).double()
            soft = scores.double().softmax(-1) if self._greedy else law
            self._known.append((law, soft, int(lowest_argmax(scores))))
        found = self._known[place]
        assert found is not None, "the laws of earlier positions are gone"
        return found

    def law(self, place: int) -> Tensor:
        """(V,) that the token behind new token number ``place`` is drawn from."""
        return self._at(place)[0]

    def soft(self, place: int) -> Tensor:
        """(V,) the same, at temperature 1 instead of 0."""
        return self._at(place)[1]

    def best(self, place: int) -> int:
        """The likeliest token behind new token number ``place``."""
        return self._at(place)[2]

    def forget(self, place: int) -> None:
        """Free what belongs to a position."""
        self._known[place] = None
