"""The section of `scripts.gpu_check` about engine device with several sizes, and `--size auto`.

A random Llama of 8B and a random EAGLE-3 head again, whose weights make the text known: each token
is followed by the next number. So drafts of any quality can be put in the place of the head's own,
on the device and within the captured round: at every position one rank among siblings is right, 0
with probability `accept`, else 1 with the same probability, and so on. All else (drafting,
verification, acceptance, commit, what the host reads and decides) is what it always is, and so is
its time.

Letters: B batch, P committed tokens, N tree nodes, D depth.
"""

import math
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from drafters import Drafter, TargetModel
from inference.proposers import build_proposer
from inference.scheduling.survival import Outcome
from inference.static.decoding import DeviceEngine
from inference.static.draft_base import Committed, StaticDrafter
from inference.static.rounds import EAGER_ROUNDS, Kind, Rounds
from inference.static.size_costs import RoundTable, fastest_proposer, measured_rounds
from inference.static.sizes import PLAIN, Chooser, Form, sizes_of
from inference.static.tree import DraftTree
from inference.static.words import follow, tree_words
from scripts.gpu_check_models import (
    SPARE,
    filled_cache,
    forward_of,
    models,
    restarted,
    rounds_of,
    use_graphs,
)
from scripts.gpu_check_timing import host_waits, milliseconds, seconds_of

Row = dict[str, Any]
FORMS = [(3, 1, 4), (4, 2, 8), (5, 4, 16), (5, 8, 32)]
"""Depth, children of a node and nodes of the sizes; the plain step is one more."""
NEVER = 2**20
"""A rank that no child has."""


@dataclass(frozen=True)
class Effort:
    """How much is run.

    Attributes:
        texts: B and P that rounds are measured at; the first is that of all else.
        seconds: for repeats of each measured table.
        accept: qualities of drafts.
        learning: rounds that auto has to learn in, for each.
        counted: rounds of auto that are counted, for each.
        blocks: of each order of rounds, of which the median is taken.
    """

    texts: list[tuple[int, int]]
    seconds: float
    accept: tuple[float, ...]
    learning: int
    counted: int
    blocks: int


FULL = Effort([(1, 2048), (4, 2048), (1, 8192)], 2.0, (0.0, 0.2, 0.4, 0.6, 0.8, 0.95), 40, 60, 9)
DRY = Effort([(1, 12), (2, 12)], 0.0, (0.6,), 2, 4, 2)
CHANGE = "mixed over ordered, less 1"
IN_A_ROW = 4
"""Rounds of one kind in a row; more plain steps would have the head absorb in between."""


# A text that is known -----------------------------------------------------------------------------


def make_predictable(target: TargetModel) -> None:
    """Have every token followed by the next number, by a wide margin, at an unchanged cost.

    Layers add next to nothing to the residual stream, and the output matrix is the embedding, one
    row on: of vectors of one length the largest product is with the vector itself.
    """
    for name, parameter in target.model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.mul_(1e-3)
    embedding = target.model.get_input_embeddings().weight
    rows = torch.randn_like(embedding)
    rows *= rows.shape[1] ** 0.5 / rows.norm(dim=1, keepdim=True)
    embedding.copy_(rows)
    target.lm_head.weight.copy_(rows.roll(1, 0))


class SimulatedDraft(StaticDrafter):
    """A head's drafter whose trees get other tokens in the end.

    Args:
        real: that drafts.
        positions: (B,) of the roots; a buffer.
        right: (S,) the rank that is right at each position; a buffer.
        vocab_size: of the target.
    """

    def __init__(
        self, real: StaticDrafter, positions: Tensor, right: Tensor, vocab_size: int
    ) -> None:
        super().__init__(real.drafter, real.growth, real.batch, real.capacity, real.new_rows)
        self.caches = real.caches
        self._real, self._positions = real, positions
        self._right, self._vocab_size = right, vocab_size

    def absorb_text(self, new: Committed, before: int) -> None:
        """The real one's."""
        self._real.absorb_text(new, before)

    def absorb_rows(self, new: Committed) -> None:
        """The real one's."""
        self._real.absorb_rows(new)

    def draft(self, new: Committed) -> DraftTree:
        """The real one's trees, retold."""
        tree, levels = self._real.draft(new), len(self.growth.widths)
        _, depths = tree_words(tree.parents, levels)
        tokens = retold(tree, depths, self._right[self._positions[:, None] + depths], levels)
        return tree._replace(tokens=tokens % self._vocab_size)


def retold(tree: DraftTree, depths: Tensor, right: Tensor, levels: int) -> Tensor:
    """(B, N) tokens: a child whose rank is right follows its parent by one, another one by more.

    Args:
        tree: whose tokens are replaced, but for the root's.
        depths: (B, N).
        right: (B, N) the rank that is right at each node's position.
        levels: D.
    """
    number = torch.arange(tree.tokens.shape[1], device=depths.device)
    before = number[:, None] > number  # (N, N): of a node, those before it
    rank = ((tree.parents[:, :, None] == tree.parents[:, None]) & before).sum(-1)
    step = torch.where(rank == right, 1, 2 + rank).masked_fill(depths == 0, 0)
    ahead = step
    for _ in range(levels - 1):
        ahead = step + follow(ahead, tree.parents, 0)
    return torch.where(tree.valid, tree.tokens[:, :1] + ahead, 0)


def right_ranks(accept: float, count: int) -> Tensor:
    """(count,) the rank that is right at each position: geometric, the same in every call."""
    chances = torch.rand(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    if accept in (0.0, 1.0):
        return torch.full((count,), 0 if accept else NEVER)
    skipped = torch.log1p(-chances) / torch.log1p(torch.tensor(-accept, dtype=torch.float64))
    return skipped.floor().long()


def simulated_rounds(
    engine: DeviceEngine, head: Drafter, texts: tuple[int, int]
) -> tuple[Rounds, Tensor]:
    """Rounds of all sizes, every kind captured, and the ranks that are right, to be written to."""
    right = right_ranks(0.0, texts[1] + 2 * SPARE).to(engine.shape.device)
    rounds = rounds_of(engine, head, sizes_of(build_proposer(head), FORMS), texts)
    rounds.drafters = [
        SimulatedDraft(real, rounds.state.lengths, right, engine.target.vocab_size)
        for real in rounds.drafters
    ]
    for kind in (None, *range(len(FORMS))):
        for _ in range(EAGER_ROUNDS + 1):
            rounds.run(kind)
    for _ in range(EAGER_ROUNDS + 1):
        rounds.absorb()
    return rounds, right


# Rows ---------------------------------------------------------------------------------------------


@torch.inference_mode()
def sizes(dry_run: bool) -> Iterator[Row]:
    """What rounds of every size cost, what a change of the size costs, and what auto makes of
    it.
    """
    effort = DRY if dry_run else FULL
    engine, head = models(dry_run)
    make_predictable(engine.target)
    proposer, first = build_proposer(head), effort.texts[0]
    tables = []
    for batch, context in effort.texts:
        how = {"contexts": [context], "batches": [batch], "budget_seconds": effort.seconds}
        tables.append(measured_rounds(engine, proposer, FORMS, **how))
        yield from table_rows(tables[-1], batch, context)
    yield bare_row(engine, first, tables[0].points[PLAIN, first[1], first[0]])
    before = engine.warm_up_seconds
    rounds, right = simulated_rounds(engine, head, first)
    yield {"what": "capturing every size, s", "is": engine.warm_up_seconds - before}
    yield from waits(rounds)
    yield from changes(rounds, first[1], effort.blocks)
    for accept in effort.accept:
        right.copy_(right_ranks(accept, len(right)))
        auto = fastest_proposer(proposer, tables[0])  # it has learnt nothing yet
        assert auto.sizes == sizes_of(proposer, FORMS), "kinds are in another order"
        yield speeds(rounds, auto.chooser, accept, first, effort)


def table_rows(table: RoundTable, batch: int, context: int) -> Iterator[Row]:
    """Whole rounds of every size, in plain steps."""
    plain = table.points[PLAIN, context, batch]
    for form in (PLAIN, *FORMS):
        seconds = table.points[form, context, batch]
        yield {"what": name_of(form), "B": batch, "P": context, "ms": seconds * 1e3,
               "plain steps": seconds / plain}  # fmt: skip


def name_of(form: Form) -> str:
    """Of a size."""
    return "plain step" if form == PLAIN else f"{form[2]} nodes, depth {form[0]}"


def bare_row(engine: DeviceEngine, texts: tuple[int, int], plain: float) -> Row:
    """The forward of one token alone, beside the engine's plain step of so many seconds."""
    use_graphs(engine, True)
    forward = forward_of(engine, filled_cache(engine, *texts), 1, ())
    [ms] = milliseconds([forward.replay], engine.shape.device)
    return {"what": "captured forward of one token, bare", "B": texts[0], "P": texts[1],
            "ms": ms, "plain steps": ms / (plain * 1e3)}  # fmt: skip


def kinds_of(rounds: Rounds) -> list[Kind]:
    """The plain step, and every size."""
    return [None, *range(len(rounds.drafters))]


def kind_name(kind: Kind) -> str:
    """As in the table of sizes."""
    return name_of(PLAIN if kind is None else FORMS[kind])


def waits(rounds: Rounds) -> Iterator[Row]:
    """How often the host waits for the device in a round of each kind."""
    for kind in kinds_of(rounds):
        found = host_waits(lambda kind=kind: rounds.run(kind), rounds.engine.shape.device)
        yield {"what": f"waits of the host: {kind_name(kind)}", "is": found}


def changes(rounds: Rounds, context: int, blocks: int) -> Iterator[Row]:
    """The same rounds ordered by size and mixed: what a change of the size costs."""
    device, kinds = rounds.engine.shape.device, kinds_of(rounds)
    orders = {
        "ordered by size": [kind for kind in kinds for _ in range(IN_A_ROW)],
        "mixed": kinds * IN_A_ROW,
    }
    found: dict[str, list[float]] = {name: [] for name in orders}
    for _ in range(blocks):
        for name, order in orders.items():
            restarted(rounds, context)
            seconds = seconds_of(lambda order=order: run_all(rounds, order), device)
            found[name].append(seconds / len(order))
    medians = {name: statistics.median(values) for name, values in found.items()}
    for name, value in medians.items():
        low, _, high = statistics.quantiles(found[name], n=4)
        yield {"what": f"rounds {name}", "ms": value * 1e3, "quartiles apart": (high - low) / value}
    yield {"what": CHANGE, "is": medians["mixed"] / medians["ordered by size"] - 1}


def run_all(rounds: Rounds, order: Sequence[Kind]) -> None:
    """These rounds."""
    for kind in order:
        rounds.run(kind)


class Always(Chooser):
    """One size.

    Args:
        kind: of all rounds.
    """

    def __init__(self, kind: Kind) -> None:
        self._kind = kind

    def start(self, rule: str, temperature: float, batch: int) -> None:
        """Nothing to do."""

    def choose(self, context: float, batch: int, room: int) -> Kind:
        """Whatever has been."""
        return self._kind

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Nothing to learn."""


@dataclass
class Counted:
    """What became of some rounds.

    Attributes:
        seconds: of all.
        deciding: of them, in which the chooser chose and learnt.
        tokens: emitted by each sequence, on average.
        kinds: how often each was chosen.
    """

    seconds: float = 0.0
    deciding: float = 0.0
    tokens: float = 0.0
    kinds: Counter[Kind] = field(default_factory=Counter)

    @property
    def speed(self) -> float:
        """Tokens per second of a sequence."""
        return self.tokens / self.seconds


def speeds(
    rounds: Rounds, auto: Chooser, accept: float, texts: tuple[int, int], effort: Effort
) -> Row:
    """Tokens per second of auto, and of every fixed size on the same stretch of the text."""
    batch, context = texts
    restarted(rounds, context)
    auto.start("match", 0.0, batch)
    learnt = counted(rounds, auto, texts, count=effort.learning)
    stretch = batch, context + round(learnt.tokens)
    found = counted(rounds, auto, stretch, count=effort.counted)
    fixed = {}
    for kind in kinds_of(rounds):
        restarted(rounds, stretch[1])
        fixed[kind] = counted(rounds, Always(kind), stretch, tokens=found.tokens).speed
    best = max(fixed, key=lambda kind: fixed[kind])
    return {
        "what": f"accept {accept:g}", "auto, tokens/s": found.speed,
        "chosen most": kind_name(found.kinds.most_common(1)[0][0]), "best fixed": kind_name(best),
        "its tokens/s": fixed[best], "auto over it": found.speed / fixed[best],
        "auto over plain": found.speed / fixed[None],
        "deciding, µs": found.deciding / sum(found.kinds.values()) * 1e6,
    }  # fmt: skip


def counted(
    rounds: Rounds,
    chooser: Chooser,
    texts: tuple[int, int],
    *,
    count: float = math.inf,
    tokens: float = math.inf,
) -> Counted:
    """Run rounds as `inference.static.decoding.device_generate` does.

    Args:
        rounds: at the place where texts are.
        chooser: of each kind.
        texts: B and P.
        count: of rounds to stop at.
        tokens: of each sequence to stop at.
    """
    (batch, context), found, start = texts, Counted(), time.perf_counter()
    while found.tokens < tokens and sum(found.kinds.values()) < count:
        asked = time.perf_counter()
        kind = chooser.choose(context + found.tokens, batch, SPARE)
        found.deciding += time.perf_counter() - asked
        reports = rounds.run(kind)
        found.kinds[kind] += 1
        found.tokens += sum(len(report.tokens) for report in reports) / batch
        asked = time.perf_counter()
        chooser.observe([report.outcome for report in reports])
        found.deciding += time.perf_counter() - asked
    found.seconds = time.perf_counter() - start
    return found
