"""Drafts of a head along a text of the target, kept for every size that could be asked for.

One teacher-forced pass over the text gives the hidden states; at every position the head's own code
drafts from them (`inference.proposers`), as `inference.prediction.teacher` does. Which nodes of a
tree have children depends on the threshold of confidence below which drafting stops: the frontier
of every threshold is expanded, so that any may be asked for afterwards.

Letters: E expanded nodes, F nodes of a level, R ranks, K depths, m tokens that rounds emit.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from drafters import TargetModel
from inference.engine import EagerEngine
from inference.files import write_whole
from inference.prediction.drafts import RULE, Drafts, Grown, Marginals, Regrowth, drafts_from
from inference.prediction.text import Answer
from inference.proposers import HeadProposer, RowState, SequentialProposer, Session
from inference.proposers.block import DSparkProposer
from inference.proposers.context_cache import ContextCache
from inference.proposers.laws import draft_law, node_scores
from inference.proposers.sequential import StepOutput
from inference.sampling import SamplingParams
from inference.timing import PhaseTimer
from inference.tree import Proposal

FORMAT = 1
HIGHEST = 0.999
"""Threshold of confidence; `inference.scheduling.schedule.least_survival` gives none above it."""
GREEDY = SamplingParams()


@dataclass(frozen=True, eq=False)
class Recorded:
    """A text, and what heads draft along it.

    Attributes:
        answer: the text, decoded at temperature 0.
        drafts: by arm, for every position at which there is room for a draft.
    """

    answer: Answer
    drafts: Mapping[str, Sequence[Drafts]]

    def state(self, place: int, new: int = 1) -> RowState:
        """The sequence at the start of a round, without hidden states.

        Args:
            place: of the last committed token among the new ones.
            new: positions committed since the last round.
        """
        answer = self.answer
        tokens = [*answer.prompt, *answer.tokens[: place + 1]]
        room = answer.max_new_tokens - place - 2
        return RowState(tokens, len(answer.prompt), None, torch.zeros(new, 1), room, GREEDY)


@torch.no_grad()
def record(target: TargetModel, heads: Mapping[str, HeadProposer], answer: Answer) -> Recorded:
    """Draft at every position of a text.

    Args:
        target: the model.
        heads: by arm; their options say how deep and wide. They are left alone.
        answer: of the target, at temperature 0.
    """
    ids, start = [*answer.prompt, *answer.tokens], len(answer.prompt)
    places = range(min(len(answer.tokens) - 1, answer.max_new_tokens - 2))
    drafts: dict[str, list[Drafts]] = {name: [] for name in heads}
    for name, head in heads.items():
        out = target.forward(
            torch.tensor([ids[:-1]], device=target.device),
            feature_layers=head.feature_layers,
            logits_to_keep=1,
        )
        recorder, known = recorder_of(target, head), 0
        for place in places:
            root = start + place
            features = None if out.features is None else out.features[0, known:root]
            room = answer.max_new_tokens - place - 2
            hidden = out.last_hidden[0, known:root]
            state = RowState(ids[: root + 1], start, features, hidden, room, GREEDY)
            drafts[name].append(recorder.at(state))
            known = root
    return Recorded(answer, drafts)


class Recorder(Protocol):
    """Drafts along one text, position after position."""

    def at(self, state: RowState) -> Drafts:
        """What can be drafted there."""
        ...


def recorder_of(target: TargetModel, head: HeadProposer) -> Recorder:
    """The recorder of a head's kind, with draft caches of its own."""
    if isinstance(head, SequentialProposer):
        return StepRecorder(SequentialSteps(_own(target, head)), head)
    if isinstance(head, DSparkProposer) and head.drafter.markov_head is not None:
        return StepRecorder(MarkovSteps(head), head)
    return MarginalsRecorder(target, head)


def _own(target: TargetModel, head: SequentialProposer) -> SequentialProposer:
    """A proposer of the same head that has decoded nothing."""
    own = copy.copy(head)
    own.start(Session(EagerEngine(target), None, 1, PhaseTimer(target.device), RULE, [0]))
    return own


# Heads that draft step by step --------------------------------------------------------------------


class Steps(Protocol):
    """One draft step after the other, as the decoder's."""

    def begin(self, state: RowState) -> StepOutput:
        """Take in what was committed, and the root's children, F = 1."""
        ...

    def step(self, feature: Tensor, tokens: Tensor, parents: Tensor, depth: int) -> StepOutput:
        """Children of nodes of one depth.

        Args:
            feature: (F, ...) what the step of each node's parent left for it.
            tokens: (F,) absolute ids.
            parents: (F,) of all nodes that had a step in this round their parents' numbers; -1 is
                the root.
            depth: of the nodes, from 1.
        """
        ...


class SequentialSteps:
    """EAGLE-1/3, Hydra, MTP."""

    def __init__(self, proposer: SequentialProposer) -> None:
        self.proposer = proposer

    def begin(self, state: RowState) -> StepOutput:
        """Step 0."""
        return self.proposer.absorb(0, state)

    def step(self, feature: Tensor, tokens: Tensor, parents: Tensor, depth: int) -> StepOutput:
        """The next one."""
        return self.proposer.step(0, feature, tokens, parents, depth)


class MarkovSteps:
    """DSpark: one block, and its Markov head along the paths."""

    def __init__(self, proposer: DSparkProposer) -> None:
        self.proposer, self.drafter = proposer, proposer.drafter
        self._cache = ContextCache(proposer.drafter.windows)
        self._rows: Tensor

    def begin(self, state: RowState) -> StepOutput:
        """The block."""
        self._rows = self.proposer.run(self._cache, state)  # (K, D)
        root = torch.tensor(state.tokens[-1:], device=self._rows.device)
        return self._next(self.drafter.begin_path(self._rows[:1]), root, 0)

    def step(self, feature: Tensor, tokens: Tensor, parents: Tensor, depth: int) -> StepOutput:
        """One more place along some paths."""
        return self._next(feature, tokens, depth)

    def _next(self, states: Tensor, tokens: Tensor, depth: int) -> StepOutput:
        hidden = self._rows[depth].expand(len(tokens), -1)
        rows, states = self.drafter.advance(hidden, tokens, states)
        logits = self.drafter.logits(rows, depth)
        return StepOutput(logits, self.drafter.acceptance(rows, depth), states)


@dataclass
class _Expanded:
    """Nodes that had a step so far in a round; see `Grown`."""

    nodes: list[int] = field(default_factory=list)
    tokens: list[Tensor] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)
    chances: list[float] | None = field(default_factory=list)

    def add(self, nodes: Sequence[int], found: StepOutput, head: HeadProposer) -> None:
        """Their likeliest children.

        Args:
            nodes: (F,) places.
            found: their step.
            head: whose it is.
        """
        scores, ids = likeliest(found.logits, head)
        self.nodes += nodes
        self.tokens.append(ids)
        self.scores.append(scores)
        if found.acceptance is None:
            self.chances = None
        elif self.chances is not None:
            self.chances += found.acceptance.tolist()

    def kept(self) -> Grown:
        """So far."""
        return Grown(self.nodes, torch.cat(self.tokens), torch.cat(self.scores), self.chances)


def likeliest(logits: Tensor, head: HeadProposer) -> tuple[Tensor, Tensor]:
    """Log-probabilities (F, R) and absolute ids (F, R) of a head's likeliest tokens, on the host.

    Args:
        logits: (F, Vd).
        head: with the number of children that a node has at most.
    """
    options, vocab = head.options, head.drafter.draft_vocab
    law = draft_law(GREEDY, options.draft_temperature or 1.0)
    scores = node_scores(logits, vocab, law, Proposal.ONE_HOT, 0, options.sharpness)
    best = scores.topk(min(options.top_k, scores.shape[-1]))
    ids = best.indices if vocab is None else vocab[best.indices]
    return best.values.cpu(), ids.cpu()


class StepRecorder:
    """Expands, level by level, all nodes that any tree of the head would expand.

    Args:
        steps: of the head.
        head: whose options say how deep and wide trees may be.
    """

    def __init__(self, steps: Steps, head: HeadProposer) -> None:
        self.steps, self.head = steps, head

    def at(self, state: RowState) -> Grown:
        """What can be drafted there."""
        found, expanded = self.steps.begin(state), _Expanded()
        expanded.add([-1], found, self.head)
        widths = sorted({1, self.head.options.top_k})
        growths = [Regrowth(expanded.kept(), self._options(width), state) for width in widths]
        branches = [Branch(growth, torch.zeros(1, dtype=torch.int64)) for growth in growths]
        first = 0  # number of the first node of the newest level
        for depth in range(1, growths[0].depth):
            kept = expanded.kept()
            branches = [below for branch in branches for below in branch.grown(kept)]
            ranks, tokens = kept.tokens.shape[1], kept.tokens.flatten()
            wanted = sorted({place for branch in branches for place in branch.places})
            if not wanted:
                break
            parents = torch.tensor([place // ranks for place in wanted])
            device = found.feature.device
            level = (parents - first).to(device)
            first = len(kept.nodes)
            found = self.steps.step(
                found.feature[level], tokens[wanted].to(device), (parents - 1).to(device), depth
            )
            expanded.add(wanted, found, self.head)
        return expanded.kept()

    def _options(self, width: int) -> Any:
        return replace(
            self.head.options, top_k=width, size=2, shape=None, grown=True, min_survival=0.0
        )


@dataclass
class Branch:
    """Trees that have grown alike so far: those of thresholds in (low, high].

    Attributes:
        growth: with one of these thresholds.
        frontier: (F,) its candidates that are expanded next.
        low, high: ends.
    """

    growth: Regrowth
    frontier: Tensor
    low: float = -1.0
    high: float = HIGHEST

    @property
    def places(self) -> list[int]:
        """Of the frontier."""
        return self.growth.places(self.frontier)

    def grown(self, kept: Grown) -> Iterator[Branch]:
        """With the children of the frontier, those that some threshold leaves without apart.

        Args:
            kept: all nodes expanded so far, the frontier among them.
        """
        chances = self._survival(kept)
        ends = {self.high, *(chance for chance in chances if self.low < chance < self.high)}
        low = self.low
        for end in sorted(ends):
            if chances and max(chances) < end:
                return
            growth = copy.copy(self.growth)
            growth.kept, growth.survival = kept, dict(self.growth.survival)
            if chances:
                growth.options = replace(growth.options, min_survival=max(end, 0.0))
            growth.add_kept(self.frontier)
            yield Branch(growth, growth.frontier(), low, end)
            low = end

    def _survival(self, kept: Grown) -> list[float]:
        """Chances that drafts behind each node of the frontier are accepted with all before them;
        empty without a confidence output.
        """
        if kept.chances is None:
            return []
        above = self.growth.candidates.parents[self.frontier].tolist()
        return [
            self.growth.survival.get(parent, 1.0) * kept.chances[kept.rows[place]]
            for parent, place in zip(above, self.places, strict=True)
        ]


# Heads that draft in one pass ---------------------------------------------------------------------


class MarginalsRecorder:
    """Keeps the rows of a pass.

    Args:
        target: the model.
        head: of rows that do not know each other's tokens.
    """

    def __init__(self, target: TargetModel, head: HeadProposer) -> None:
        session = Session(EagerEngine(target), None, 1, PhaseTimer(target.device), RULE, [0])
        depth = head.options.longest
        self.head, self.forced, self.chain = head, copy.copy(head), copy.copy(head)
        self.chain.options = replace(
            head.options, top_k=1, size=depth + 1, shape=None, grown=True, min_survival=0.0
        )
        for own in (self.forced, self.chain):
            own.start(session)  # gives it caches of its own

    def at(self, state: RowState) -> Marginals:
        """What can be drafted there."""
        depth = self.head.options.longest
        logits = torch.stack(self.forced.forced(state, [0] * (depth - 1))[:depth])
        scores, tokens = likeliest(logits, self.head)
        survival = None
        if self.head.drafter.confidence is not None:
            deep = self.chain.grow(0, replace(state, max_depth=depth)).survival
            assert deep is not None, "a head with a confidence output"
            survival = deep.tolist()[1:]
        return Marginals(tokens, scores, survival)


# On disk ------------------------------------------------------------------------------------------


def write_records(path: Path, of: Mapping[str, Any], records: Sequence[Recorded]) -> None:
    """One line that says what they are records of, and one for each text.

    Args:
        path: of the file.
        of: whatever must be the same where they are read.
        records: to keep.
    """
    write_whole(path, (json.dumps(row) + "\n" for row in _rows(of, records)))


def _rows(of: Mapping[str, Any], records: Sequence[Recorded]) -> Iterator[dict[str, Any]]:
    yield {"format": FORMAT, "of": dict(of)}
    for one in records:
        answer = one.answer
        yield {
            "id": answer.id,
            "category": answer.category,
            "prompt": answer.prompt,
            "tokens": answer.tokens,
            "max_new_tokens": answer.max_new_tokens,
            "drafts": {name: [at.to_dict() for at in own] for name, own in one.drafts.items()},
        }


def read_records(path: Path, of: Mapping[str, Any]) -> list[Recorded]:
    """What `write_records` wrote.

    Args:
        path: of the file.
        of: what they must be records of.

    Raises:
        ValueError: no records, or of something else; the message says what differs.
    """
    try:
        head, *rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        if head["format"] != FORMAT:
            raise ValueError(f"format {head['format']} is not {FORMAT}")
        for name, here in of.items():
            if head["of"].get(name) != here:
                raise ValueError(f"its {name} is {head['of'].get(name)}, here it is {here}")
        return [_recorded(row) for row in rows]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"records: {path} cannot be replayed ({error}): record again") from error


def _recorded(row: Mapping[str, Any]) -> Recorded:
    answer = Answer(
        row["prompt"], row["tokens"], row["max_new_tokens"], GREEDY, row["id"], row["category"]
    )
    own = {name: [drafts_from(at) for at in drafts] for name, drafts in row["drafts"].items()}
    return Recorded(answer, own)
