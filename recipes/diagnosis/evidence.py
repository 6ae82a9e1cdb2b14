"""How well a head agrees with its target on text of the target, read one way or another.

The target writes some text, and one pass over it keeps everything a head might have been meant to
read: every layer, the last hidden state before and after the final norm, and the target's law at
every place. A :class:`View` then says what is handed to the head, and a pass of the training
objective gives its drafts of every place at once.

Agreement is the overlap 1 - ½‖p - q‖₁, which is the chance that a drawn draft is accepted
(arXiv:2211.17192). It is bounded and measured in each place, so two readings of one head are
compared place by place.

Legend: T tokens of a document, D hidden, L layers of the target, F captured layers, V / Vd target /
draft vocabulary, n places, K depths.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from drafters import Drafter, TargetModel
from training.data.batches import collate
from training.data.chat import TokenizedRow
from training.features import TargetBatch
from training.objectives import Objective, ObjectiveOptions, build_objective
from training.objectives.options import RECURSIVE

STEPS = 2
"""Depths that a recursive head is measured at."""
LEAST_GAIN, LEAST_Z, LEAST_SHARE = 0.03, 5.0, 0.07
"""A reading beats another by so much overlap, so many standard errors, and such a part of it."""
SUBTLE_GAIN, SUBTLE_Z = 0.008, 3.5
"""The same for faults that cost little: neighbouring layers of a deep target are much alike."""
FIRST, HOPELESS_Z = 3, 4.0
"""One part in so many of the text is looked at first. A reading whose gain there lies so many
standard errors below what it needs is not looked at further."""


@dataclass(frozen=True)
class Document:
    """Text of the target: ``ids``, of which the first ``prompt`` are the user's."""

    ids: list[int]
    prompt: int


@dataclass(frozen=True)
class View:
    """What a head is handed, and which place its drafts are compared with.

    Attributes:
        layers: ``hidden_states`` indices of the features, in the order they are joined.
        feature_shift: row t gets the features and the last hidden state of t + this.
        token_shift: row t gets the token that follows, shifted by this.
        label_shift: drafts are compared with the law this much later.
        normed: the last hidden state is the one after the target's final norm.
    """

    layers: tuple[int, ...] = ()
    feature_shift: int = 0
    token_shift: int = 0
    label_shift: int = 0
    normed: bool = True


@dataclass(frozen=True)
class Seen:
    """What one pass of the target keeps of a document.

    Attributes:
        document: the text.
        layers: (L, T, D) the stream entering each layer.
        last: (T, D) after the final norm.
        stream: (T, D) before it.
        law: (T, V) the target's law of the token behind each place, at temperature 1.
    """

    document: Document
    layers: Tensor
    last: Tensor
    stream: Tensor
    law: Tensor


@dataclass(frozen=True)
class Score:
    """Agreement place by place, at one depth or over several; NaN where a draft lies behind its
    document.

    Attributes:
        overlap: (n,) in [0, 1].
        agree: (n,) whether the head's best token is the target's.
        surprise: (n,) cross-entropy -Σ p log q over the draft vocabulary, in nats.
    """

    overlap: Tensor
    agree: Tensor
    surprise: Tensor

    @property
    def mean(self) -> float:
        """Mean overlap."""
        return _mean_and_error(self.overlap)[0]

    @property
    def error(self) -> float:
        """Standard error of the mean."""
        return _mean_and_error(self.overlap)[1]

    @property
    def places(self) -> int:
        """How many were measured."""
        return int(self.overlap.isfinite().sum())


class Evidence:
    """Text of one target, and what it says about it."""

    def __init__(self, target: TargetModel, documents: Sequence[Document]) -> None:
        if not documents:
            raise ValueError("no text to measure on: give more or longer --prompts")
        self.target = target
        self.seen = [_look(target, document) for document in documents]
        self.law = torch.cat([seen.law for seen in self.seen])
        parts = self.law.split([len(seen.law) for seen in self.seen])
        self.seen = [replace(seen, law=part) for seen, part in zip(self.seen, parts, strict=True)]
        first = min(len(seen.document.ids) for seen in self.seen)
        table = torch.tensor([seen.document.ids[:first] for seen in self.seen])
        same = (table == table[:1]).all(0).long()
        self.shared = int(same.cumprod(0).sum()) if len(self.seen) > 1 else 0

    def beginning(self) -> "Evidence":
        """The first few documents, for a first look."""
        few = copy.copy(self)
        few.seen = self.seen[: -(-len(self.seen) // FIRST)]
        few.law = self.law[: sum(len(seen.law) for seen in few.seen)]
        return few

    def roots(self, seen: Seen, part: str) -> Tensor:
        """(n,) columns of the last committed token: of the answer, or of the prompt behind what
        all prompts begin with.
        """
        start, end = seen.document.prompt, len(seen.document.ids) - 1
        if part == "prompt":
            start, end = max(2, self.shared + 1), seen.document.prompt - 1
        return torch.arange(max(start, 2), max(end, max(start, 2)), device=seen.law.device)

    def constant(self, part: str = "answer") -> float:
        """Overlap of the best single law, the same one in every place: the mean of the target's."""
        laws = torch.cat([seen.law[self.roots(seen, part)] for seen in self.seen])
        return torch.minimum(laws, laws.mean(0)).sum(-1).double().mean().item()

    @torch.no_grad()
    def measure(
        self, head: Drafter, view: View, part: str = "answer", depths: int | None = None
    ) -> list[Score]:
        """Agreement of the head by depth.

        Args:
            head: with its target attached.
            view: how it is read.
            part: "answer" or "prompt", the places that are drafted.
            depths: the first so many; None takes all.

        Returns:
            As many depths as the texts are long enough for.
        """
        objective = training_pass(head)
        roots, ends = self._places(part)
        if not len(roots):
            return []
        hidden = objective.forced(_packed(self.seen, view), roots)
        scores = []
        for depth, rows in enumerate(hidden[:depths]):
            place = roots + depth + view.label_shift
            there = (place >= 0) & (place < ends)
            if there.sum() < 2:  # all texts end before
                break
            found = _compare(objective, rows[there], self.law[place[there]], depth)
            scores.append(_spread(found, there))
        return scores

    @torch.no_grad()
    def knowledge(self, head: Drafter, view: View) -> tuple[float, float]:
        """What a head's first drafts know of their own places: mean difference between the overlap
        with the law of the same place and that with the law of another, and its standard errors.
        """
        objective = training_pass(head)
        roots, _ = self._places("answer")
        rows = objective.forced(_packed(self.seen, view), roots)[0]
        law = self.law[roots]
        there = _compare(objective, rows, law, 0)
        elsewhere = _compare(objective, rows, law.roll(len(law) // 2, 0), 0)
        return gain(there, elsewhere)

    def _places(self, part: str) -> tuple[Tensor, Tensor]:
        """Of all roots (n,) in the packed sequence, and behind the document of each (n,)."""
        roots, ends, start = [], [], 0
        for seen in self.seen:
            own, end = self.roots(seen, part), start + len(seen.document.ids)
            roots.append(start + own)
            ends.append(own.new_full(own.shape, end))
            start = end
        return torch.cat(roots), torch.cat(ends)


def gather(
    target: TargetModel, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> Evidence:
    """Evidence on prompts and the target's own answers to them; too short ones are left out."""
    documents = [
        Document([*prompt, *answer], len(prompt))
        for prompt, answer in zip(prompts, answers, strict=True)
        if len(prompt) >= 2 and len(answer) >= 4
    ]
    return Evidence(target, documents)


def pooled(scores: Sequence[Score]) -> Score:
    """Several depths as one: the mean of each place."""
    parts = [
        torch.stack([getattr(score, name) for score in scores]).nanmean(0)
        for name in ("overlap", "agree", "surprise")
    ]
    return Score(*parts)


def gain(better: Score, base: Score) -> tuple[float, float]:
    """Mean difference of overlap, and how many standard errors that is."""
    return _paired(better.overlap - base.overlap)


def wins(better: Score, base: Score, subtle: bool = False) -> bool:
    """Whether one reading beats another by a wide margin. If ``subtle``, a sure one is enough, and
    the surprise may be what makes it sure: it also counts what is unlikely under both laws.
    """
    mean, z = gain(better, base)
    if subtle:
        sure = max(z, _paired(base.surprise - better.surprise)[1])
        return mean >= SUBTLE_GAIN and sure >= SUBTLE_Z
    return mean >= max(LEAST_GAIN, LEAST_SHARE * base.mean) and z >= LEAST_Z


def hopeless(better: Score, base: Score, subtle: bool = False) -> bool:
    """Whether a part of the text shows that a reading cannot win."""
    mean, error = _mean_and_error(better.overlap - base.overlap)
    return mean + HOPELESS_Z * error < (SUBTLE_GAIN if subtle else LEAST_GAIN)


def _paired(difference: Tensor) -> tuple[float, float]:
    mean, error = _mean_and_error(difference)
    return mean, mean / max(error, 1e-9)


def _mean_and_error(values: Tensor) -> tuple[float, float]:
    wide = values[values.isfinite()].double()
    return wide.mean().item(), wide.std().item() / math.sqrt(len(wide))


@torch.no_grad()
def _look(target: TargetModel, document: Document) -> Seen:
    kept: list[Tensor] = []

    def keep(layer: nn.Module, args: object, out: Tensor | tuple) -> None:
        kept.append(out[0] if isinstance(out, tuple) else out)

    hook = target.decoder_layers()[-1].register_forward_hook(keep)
    try:
        ids = torch.tensor([document.ids], device=target.device)
        out = target.forward(ids, feature_layers=range(target.num_layers))
    finally:
        hook.remove()
    assert out.features is not None
    layers = out.features[0].float().unflatten(-1, (target.num_layers, -1)).transpose(0, 1)
    law = out.logits[0].float().softmax(-1)
    return Seen(document, layers, out.last_hidden[0].float(), kept[-1][0].float(), law)


def _packed(documents: Sequence[Seen], view: View) -> TargetBatch:
    """All documents in one sequence, as the view hands them to a head; each is shifted alone."""
    rows = [TokenizedRow(seen.document.ids, [True] * len(seen.document.ids)) for seen in documents]
    batch = collate([rows], sum(len(row.ids) for row in rows)).to(documents[0].law.device)
    if view.token_shift:
        lengths = [len(row.ids) for row in rows]
        parts = [part.roll(-view.token_shift) for part in batch.input_ids[0].split(lengths)]
        batch.input_ids.copy_(torch.cat(parts)[None])
    last, features = [], []
    for seen in documents:
        hidden = seen.last if view.normed else seen.stream
        last.append(hidden.roll(-view.feature_shift, 0))
        if view.layers:
            joined = torch.cat([seen.layers[layer] for layer in view.layers], dim=-1)
            features.append(joined.roll(-view.feature_shift, 0))
    return TargetBatch(
        batch, torch.cat(features)[None] if features else None, torch.cat(last)[None]
    )


def training_pass(head: Drafter) -> Objective:
    """The training pass of a head, in float32 and without noise."""
    recursive = head.family in RECURSIVE and head.num_drafts is None
    options = ObjectiveOptions(steps=STEPS) if recursive else ObjectiveOptions()
    objective = build_objective(head, options)
    objective.eval()
    return objective


def _compare(objective: Objective, rows: Tensor, law: Tensor, depth: int) -> Score:
    """Drafts from rows (n, output_size) against the target's laws (n, V)."""
    head = objective.drafter
    logits = objective.logits(rows, depth).float() / head.config.draft_temperature
    vocab, log_q = head.draft_vocab, logits.log_softmax(-1)
    p = law if vocab is None else law[:, vocab]
    agree = head.to_target_ids(logits.argmax(-1)) == law.argmax(-1)
    surprise = -(p * log_q).sum(-1)
    return Score(torch.minimum(p, log_q.exp()).sum(-1), agree.float(), surprise)


def _spread(score: Score, there: Tensor) -> Score:
    """Values of the places that are ``there`` (n,), and NaN for the others."""
    parts = [
        value.new_full(there.shape, math.nan).masked_scatter(there, value)
        for value in (score.overlap, score.agree, score.surprise)
    ]
    return Score(*parts)
