"""The race of `scripts.benchmark`: which batches there are, and who decodes them in which order.

One worker computes at a time. Within a cell (a batch size and a context) the batches are gone
through once, and each is decoded by all before the next; who begins moves on by one each time, so
that what the machine does meanwhile hits all alike.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from drafters import TargetModel
from inference.measuring.evaluation import Prompt
from scripts.benchmark_contenders import Contender
from scripts.benchmark_protocol import (
    Answer,
    RefusalError,
    Seat,
    Worker,
    WorkerError,
    quiet_environment,
)
from scripts.common import fitting

ROOT = Path(__file__).resolve().parents[1]
FLASHSPEC = Path(__file__).with_name("benchmark_flashspec.py")
MIXED = "mixed"
"""Category of a batch of prompts of several."""


@dataclass(frozen=True)
class Batch:
    """Prompts that are decoded together.

    Attributes:
        prompts: of one length or of several.
        category: theirs, or `MIXED`.
    """

    prompts: list[Prompt]
    category: str

    @property
    def ids(self) -> list[list[int]]:
        """Their token ids."""
        return [prompt.ids for prompt in self.prompts]

    @property
    def name(self) -> str:
        """Their names."""
        return " ".join(prompt.id for prompt in self.prompts)


@dataclass(frozen=True)
class Cell:
    """One point of the grid.

    Attributes:
        batch_size: prompts decoded together.
        context: tokens of each prompt; None for the prompts as they are.
        batches: what is decoded.
        dropped: prompts that fill no batch.
    """

    batch_size: int
    context: int | None
    batches: list[Batch]
    dropped: int = 0

    @property
    def name(self) -> str:
        """For people."""
        context = "prompts as they are" if self.context is None else f"context {self.context}"
        return f"batch {self.batch_size}, {context}"


def build_cells(
    target: TargetModel,
    prompts: Sequence[Prompt],
    batch_sizes: Sequence[int],
    contexts: Sequence[int],
    new_tokens: int,
) -> list[Cell]:
    """The grid.

    Args:
        target: whose positions limit the texts.
        prompts: as they are.
        batch_sizes: prompts decoded together.
        contexts: tokens of a prompt; empty for the prompts as they are.
        new_tokens: decoded per prompt.

    Raises:
        ValueError: no room for a context, or too few prompts for a batch.
    """
    cells = []
    for context in contexts or (None,):
        if context is None:
            fit = fitting(target, prompts, new_tokens)
        elif not target.has_room(context, new_tokens):
            raise ValueError(
                f"--contexts {context}: with {new_tokens} new tokens beyond the target's "
                f"{target.max_length} positions"
            )
        else:
            fit = of_length(prompts, context)
        for size in batch_sizes:
            batches, dropped = make_batches(fit, size)
            cells.append(Cell(size, context, batches, dropped))
    return cells


def of_length(prompts: Sequence[Prompt], length: int) -> list[Prompt]:
    """The prompts with so many tokens each.

    A long one loses its beginning. A short one gets the text of the others before it, the nearest
    one last, and over again if all together are too short: its end, which asks for the answer,
    stays as it was.

    Args:
        prompts: at least one.
        length: tokens.
    """
    found = []
    for place, prompt in enumerate(prompts):
        ids, before = list(prompt.ids), place
        while len(ids) < length:
            before -= 1
            ids = prompts[before % len(prompts)].ids + ids
        found.append(Prompt(ids[-length:], prompt.category, prompt.id))
    return found


def make_batches(prompts: Sequence[Prompt], size: int) -> tuple[list[Batch], int]:
    """Batches of one category where it fills them, then of what is left over; all are full.

    Args:
        prompts: in the order of the file.
        size: of each batch.

    Returns:
        Batches, and how many prompts fill none.

    Raises:
        ValueError: there is no batch.
    """
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    batches: list[Batch] = []
    left: list[Prompt] = []
    for category, group in groups.items():
        full = len(group) // size * size
        batches += [Batch(group[at : at + size], category) for at in range(0, full, size)]
        left += group[full:]
    full = len(left) // size * size
    batches += [Batch(left[at : at + size], MIXED) for at in range(0, full, size)]
    if not batches:
        raise ValueError(f"--batch-sizes {size}: there are only {len(prompts)} prompts")
    return batches, len(left) - full


# Workers ----------------------------------------------------------------------------------------


@dataclass
class Field:
    """The workers of a run, and what became of them.

    Attributes:
        workers: that still run, by the contender's name.
        failed: what stopped the others.
        start_seconds: that each took to load.
        threads: that each computes with.
    """

    workers: dict[str, Worker | Seat] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    start_seconds: dict[str, float] = field(default_factory=dict)
    threads: dict[str, int | None] = field(default_factory=dict)

    def drop(self, name: str, error: Exception) -> None:
        """Note what stopped a worker, and end it."""
        self.workers.pop(name).close()
        self.fail(name, error)

    def fail(self, name: str, error: Exception) -> None:
        """Note what a worker could not do."""
        self.failed[name] = "; ".join(filter(None, (self.failed.get(name), str(error))))
        print(f"{name}: {error}", file=sys.stderr)


@contextmanager
def started(
    contenders: Sequence[Contender], args: argparse.Namespace, target: TargetModel
) -> Iterator[Field]:
    """All contenders' processes, loaded one after the other; they end with the context.

    Args:
        contenders: who takes part.
        args: the command line of `scripts.benchmark`.
        target: for its end-of-text tokens.
    """
    found = Field()
    with ExitStack() as stack:
        shared: dict[str | None, Together] = {}
        for contender in tqdm(contenders, desc="loading", disable=None, leave=False):
            worker = make_worker(contender, args, target, shared)
            stack.callback(worker.close)
            found.workers[contender.name] = worker
            try:
                found.start_seconds[contender.name] = worker.start(args.timeout)
                found.threads[contender.name] = worker.threads
            except WorkerError as error:
                found.drop(contender.name, error)
        print("threads: " + ", ".join(f"{name} {n}" for name, n in found.threads.items()))
        yield found


Together = tuple[Worker, set[str]]
"""A process that several of ours share, and who does."""


def make_worker(
    contender: Contender,
    args: argparse.Namespace,
    target: TargetModel,
    shared: dict[str | None, Together] | None = None,
) -> Worker | Seat:
    """The process of a contender, or its place in one.

    Args:
        contender: who takes part.
        args: the command line of `scripts.benchmark`.
        target: for its end-of-text tokens.
        shared: with `--together`, the processes so far, by engine.
    """
    model = {name: getattr(args, name) for name in ("target", "dtype", "device", "threads")}
    template = args.chat_template
    settings = {
        "name": contender.name,
        "contender": contender.to_dict(),
        "model": {**model, "chat_template": None if template is None else str(template)},
        "ends": sorted(target.eos_token_ids),
    }
    if contender.kind == "flashspec":
        return Worker(contender.name, [args.flashspec_python, str(FLASHSPEC)], settings)
    environment = quiet_environment()
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    command = [sys.executable, "-m", "scripts.benchmark_workers"]
    if args.together and contender.kind == "ours" and shared is not None:
        engine = contender.settings.get("engine")
        if engine not in shared:
            common = {"model": settings["model"], "together": engine}
            shared[engine] = (Worker(f"ours ({engine})", command, common, environment), set())
        worker, taken = shared[engine]
        return Seat(contender.name, worker, contender.to_dict(), taken)
    return Worker(contender.name, command, settings, environment)


@dataclass
class Heat:
    """What the contenders did with one cell.

    Attributes:
        cell: the batches.
        answers: one per batch, of each contender that did them all.
        warm_up_seconds: compilation and first call.
    """

    cell: Cell
    answers: dict[str, list[Answer]] = field(default_factory=dict)
    warm_up_seconds: dict[str, float] = field(default_factory=dict)


def race(found: Field, cell: Cell, args: argparse.Namespace) -> Heat:
    """Decode every batch of a cell by all contenders, in turns.

    Before, each warms up on the first batch backwards: it has the shapes of a batch, and a source
    that copies earlier answers learns nothing from it.

    Args:
        found: the workers; those that fail are dropped.
        cell: the batches.
        args: the command line of `scripts.benchmark`.
    """
    heat = Heat(cell)
    longest = max(len(ids) for batch in cell.batches for ids in batch.ids)
    backwards = [ids[::-1] for ids in cell.batches[0].ids]
    new = args.max_new_tokens
    for name in list(found.workers):
        worker = found.workers[name]
        with _caught(found, heat, name):
            heat.warm_up_seconds[name] = worker.warm_up(backwards, longest, new, args.timeout)
            heat.answers[name] = []
    names = list(heat.answers)
    for number, batch in enumerate(tqdm(cell.batches, desc=cell.name, disable=None)):
        start = number % max(len(names), 1)
        for name in [*names[start:], *names[:start]]:
            if name in heat.answers:
                with _caught(found, heat, name):
                    answer = found.workers[name].decode(batch.ids, new, args.timeout)
                    heat.answers[name].append(answer)
    return heat


@contextmanager
def _caught(found: Field, heat: Heat, name: str) -> Iterator[None]:
    """A contender that fails leaves the cell, and the race if its process is of no use any more."""
    try:
        yield
    except RefusalError as error:
        heat.answers.pop(name, None)
        found.fail(name, RuntimeError(f"{heat.cell.name}: {error}"))
    except WorkerError as error:
        heat.answers.pop(name, None)
        found.drop(name, error)


def plain_record(batch: Batch, answer: Answer) -> dict[str, Any]:
    """What one contender gave for one batch, so that any other figure can be computed."""
    ids = {"ids": [prompt.id for prompt in batch.prompts], "category": batch.category}
    return {**ids, **{name: value for name, value in vars(answer).items() if name != "tokens"}}
