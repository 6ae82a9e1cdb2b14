"""What whole rounds of every size cost on engine "device", measured and kept beside the head.

A round on the device is one graph, so it is timed as a whole, as the host waits for it; there is no
sum of parts to be predicted. A plain step costs its own round and its share of the one pass in
which the head takes in what waits behind plain steps.

Letters: B sequences, P committed tokens, R rows that a drafter takes in.
"""

from __future__ import annotations

import json
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import torch

from inference.files import write_whole
from inference.proposers.heads import HeadProposer
from inference.proposers.laws import proposal_kind
from inference.sampling import SamplingParams
from inference.scheduling.auto import key_of
from inference.scheduling.controller import ControllerSettings
from inference.scheduling.costs import MachineKey, check_writable, current_table
from inference.scheduling.priors import Memory
from inference.scheduling.survival import Prior
from inference.static.decoding import DeviceEngine
from inference.static.draft_base import Committed
from inference.static.rounds import EAGER_ROUNDS, Kind, Rounds
from inference.static.sizes import ARM, PLAIN, FastestSizes, Form, SizedProposer, sizes_of
from inference.tree import Proposal

FORMAT = 1
CONTEXTS = (128, 1024)
BUDGET = 10.0
"""Seconds that repeats may take."""
REPEATS = 3
"""Of every point at least."""
MOST_REPEATS = 25
ROOM = 64
"""Tokens that measured texts have room for."""


@dataclass(frozen=True)
class RoundTable:
    """Seconds of whole rounds; an `inference.scheduling.schedule.RoundCosts` whose parts are not
    known.

    Attributes:
        key: where they were measured.
        points: (form, P, B) -> seconds, all forms at all contexts and batches, `PLAIN` among them.

    Raises:
        ValueError: points that are none.
    """

    key: MachineKey
    points: Mapping[tuple[Form, int, int], float]

    def __post_init__(self) -> None:
        """Refuse tables with holes."""
        whole = {
            (form, context, batch)
            for form in self.forms | {PLAIN}
            for _, context, _ in self.points
            for _, _, batch in self.points
        }
        if not self.points or self.points.keys() != whole:
            raise ValueError("rounds: every form, and the plain step, at every context and batch")
        if min(self.points.values()) <= 0:
            raise ValueError("rounds: seconds must be above 0")

    @cached_property
    def forms(self) -> frozenset[Form]:
        """All that were measured."""
        return frozenset(form for form, _, _ in self.points)

    def of(self, forms: Collection[Form]) -> RoundTable:
        """These forms alone, and the plain step.

        Args:
            forms: that were measured.
        """
        kept = {PLAIN, *forms}
        points = {point: value for point, value in self.points.items() if point[0] in kept}
        return RoundTable(self.key, points)

    def seconds(self, form: Form, context: float, batch: float) -> float:
        """Of a whole round.

        Args:
            form: that was measured.
            context: P, the mean of the batch; between and beyond the measured ones on a line.
            batch: B, likewise.
        """
        found: dict[int, dict[int, float]] = {}
        for (name, where, count), value in self.points.items():
            if name == form:
                found.setdefault(count, {})[where] = value
        return on_a_line({count: on_a_line(by, context) for count, by in found.items()}, batch)

    def verify(self, width: int, context: float, batch: float = 1) -> float:
        """Of a plain step, whatever the width: what drafts add is known of whole rounds only."""
        return self.seconds(PLAIN, context, batch)

    def draft(self, name: str, depth: int, width: int = 1, batch: float = 1) -> float:
        """None: it is in the round."""
        return 0.0

    def absorb(self, name: str, positions: int) -> float:
        """None: it is in the plain steps."""
        return 0.0

    def rest(self, batch: float = 1) -> float:
        """None: it is in the round."""
        return 0.0

    def widest(self, batch: float = 1) -> int:
        """Nodes of the largest tree."""
        return max(size for _, _, size in self.forms)

    def widths(self, batch: float = 1) -> list[int]:
        """Of all forms."""
        return sorted({size for _, _, size in self.forms})

    def knows_plain(self) -> bool:
        """They were measured."""
        return True

    def lines(self) -> list[str]:
        """A table to print: milliseconds by form and context, for each batch."""
        places = sorted({(batch, context) for _, context, batch in self.points})
        shown = [f"rounds on {self.key.device}, {self.key.dtype}, {self.key.engine}; ms by B, P: "]
        shown[0] += ", ".join(f"{batch}, {context}" for batch, context in places)
        for form in sorted(self.forms):
            name = "plain step" if form == PLAIN else f"depth {form[0]}, {form[2]} nodes"
            cells = [f"{1000 * self.points[form, p, b]:9.3f}" for b, p in places]
            shown.append(f"  {name:<20}{''.join(cells)}")
        return shown

    # On disk ------------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write it; a reader sees the old table or the new one."""
        points = [[*form, p, b, value] for (form, p, b), value in sorted(self.points.items())]
        record = {"format": FORMAT, "key": asdict(self.key), "rounds": points}
        write_whole(path, [json.dumps(record) + "\n"])

    @classmethod
    def load(cls, path: Path) -> RoundTable:
        """Read one.

        Raises:
            ValueError: no such table, or one of another version of this file.
        """
        try:
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if found["format"] != FORMAT:
                raise ValueError(f"format {found['format']} is not {FORMAT}")
            points = {
                ((int(d), int(k), int(n)), int(p), int(b)): float(value)
                for d, k, n, p, b, value in found["rounds"]
            }
            return cls(MachineKey(**found["key"]), points)
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"rounds: {path} holds no table of rounds ({error})") from error


def on_a_line(points: Mapping[int, float], x: float) -> float:
    """Linear interpolation, exact at the points; before the first the first, and behind the last as
    between the last two, but never less than there.
    """
    keys = sorted(points)
    place = bisect_left(keys, x)
    if place == 0 or len(keys) == 1:
        return points[keys[0]]
    low, high = keys[place - 1 : place + 1] if place < len(keys) else keys[-2:]
    slope = (points[high] - points[low]) / (high - low)
    if place == len(keys):
        return points[high] + max(slope, 0.0) * (x - high)
    return points[low] + slope * (x - low)


# Measuring ----------------------------------------------------------------------------------------


def measured_rounds(
    engine: DeviceEngine,
    head: HeadProposer,
    forms: Sequence[Form],
    path: Path | None = None,
    *,
    rule: str = "match",
    sampling: SamplingParams | None = None,
    contexts: Sequence[int] = CONTEXTS,
    batches: Sequence[int] = (1,),
    budget_seconds: float = BUDGET,
    say: Callable[[str], None] = lambda line: None,
) -> RoundTable:
    """The table of an engine: from disk where it is of this machine, measured otherwise.

    Args:
        engine: that will decode.
        head: the head's proposer.
        forms: the sizes to measure.
        path: of the file; None keeps none.
        rule: of acceptance.
        sampling: whose warpers take their time; None is greedy.
        contexts: P to measure at.
        batches: B.
        budget_seconds: for repeats.
        say: called with lines about what is done.

    Raises:
        ValueError: the table cannot be saved there.
    """
    params = sampling or SamplingParams()
    name = f"{engine.name} {rule} {_law_name(params, proposal_kind(rule, params, head.draws))}"
    key = key_of(engine, name, {ARM: head})
    wanted = {(form, p, b) for form in [PLAIN, *forms] for p in contexts for b in batches}
    if path is not None:
        found, reasons = current_table(path, key, RoundTable.load)
        if found is not None and wanted <= found.points.keys():
            return found.of(forms)
        for reason in reasons or ["the table does not cover what may be drafted"]:
            say(f"rounds are measured anew: {reason}")
        check_writable(path)
    start = time.perf_counter()
    points: dict[tuple[Form, int, int], float] = {}
    for batch in batches:
        share = budget_seconds / len(batches)
        found_here = _measured(engine, head, forms, [params] * batch, rule, contexts, share)
        points |= {(form, p, batch): value for (form, p), value in found_here.items()}
    table = RoundTable(key, points)
    if path is not None:
        table.save(path)
    say(f"rounds measured in {time.perf_counter() - start:.0f} s")
    for line in table.lines():
        say(line)
    return table


def _law_name(params: SamplingParams, kind: Proposal) -> str:
    """What of the target's law and of the drafts takes time."""
    if params.temperature == 0:
        return "greedy"
    kept = {"top_k": params.top_k, "top_p": params.top_p, "min_p": params.min_p}
    warpers = [name for name, value in kept.items() if value is not None]
    return " ".join(["sampled", *warpers, kind.name.lower()])


@torch.inference_mode()
def _measured(
    engine: DeviceEngine,
    head: HeadProposer,
    forms: Sequence[Form],
    params: Sequence[SamplingParams],
    rule: str,
    contexts: Sequence[int],
    budget_seconds: float,
) -> dict[tuple[Form, int], float]:
    """Medians of (form, P) -> seconds, with batches like ``params``."""
    sizes = sizes_of(head, forms)
    rounds = engine.rounds_for(head, sizes, params, rule, 1, max(contexts) + ROOM)
    kinds: list[Kind] = [None, *range(len(forms))]
    names: list[Form] = [PLAIN, *forms]

    def absorbing() -> float:
        return timed(engine, rounds.absorb)

    def of(kind: Kind) -> Callable[[], float]:
        return lambda: timed(engine, lambda: rounds.run(kind))

    runs: dict[Form | None, Callable[[], float]] = dict(zip(names, map(of, kinds), strict=True))
    runs[None] = absorbing
    tasks = [(name, context) for context in contexts for name in runs]
    for name in runs:
        for _ in range(EAGER_ROUNDS + 1):  # until it is captured
            behind(rounds, contexts[0])
            runs[name]()
    found: dict[tuple[Form | None, int], list[float]] = {task: [] for task in tasks}
    end = time.perf_counter() + budget_seconds
    for repeat in range(MOST_REPEATS):
        for name, context in tasks if repeat % 2 else reversed(tasks):
            behind(rounds, context)
            found[name, context].append(runs[name]())
        if repeat + 1 >= REPEATS and time.perf_counter() > end:
            break
    engine.forget(rounds)
    medians = {task: median(values) for task, values in found.items()}
    for context in contexts:  # one pass for all that may wait but one
        medians[PLAIN, context] += medians.pop((None, context)) / (rounds.waiting_rows - 1)
    return {(form, p): value for (form, p), value in medians.items() if form is not None}


def timed(engine: DeviceEngine, run: Callable[[], Any]) -> float:
    """Seconds until the device has done it."""
    device = engine.shape.device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def behind(rounds: Rounds, context: int) -> None:
    """Put rounds behind texts of P tokens, of which it does not matter what they hold."""
    drafter, target = rounds.drafter, rounds.engine.target
    batch, rows, device = drafter.batch, drafter.new_rows, rounds.state.lengths.device
    wide = len(drafter.feature_layers) * target.hidden_size
    like: dict[str, Any] = {"dtype": target.dtype, "device": device}
    new = Committed(
        torch.ones(batch, rows, dtype=torch.int64, device=device),
        torch.ones(batch, dtype=torch.int64, device=device),
        torch.ones(batch, rows, target.hidden_size, **like),
        torch.ones(batch, rows, wide, **like) if wide else None,
    )
    rounds.state.ends.fill_(-1)  # nothing ends them
    drafter.pretend(context - 1)
    rounds.begin(new, [context] * batch, [ROOM] * batch)


def fastest_proposer(
    head: HeadProposer,
    table: RoundTable,
    prior: Prior | None = None,
    settings: ControllerSettings | None = None,
    memory: Memory | None = None,
) -> SizedProposer:
    """Lets the table and the acceptance so far decide how much to draft: `size auto` of the device.

    Args:
        head: the head's proposer.
        table: of the engine that will decode; its forms are the sizes.
        prior: rates of acceptance that were measured before, or None.
        settings: how it learns.
        memory: where what is learnt is kept from run to run; None keeps nothing.
    """
    forms = sorted(table.forms - {PLAIN}, key=lambda form: (form[2], form))
    chooser = FastestSizes(forms, table, table.seconds, prior, settings, memory)
    return SizedProposer(head, forms, chooser)
