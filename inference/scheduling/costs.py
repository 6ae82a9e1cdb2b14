"""What a round costs on this machine: tables of measured seconds, on disk beside the head.

A round drafts, verifies and does the rest: building trees, accepting, committing, everything on the
host. Drafting is known by proposer, depth and width, verifying by the rows per sequence, the
context and the batch. Between measured points seconds are interpolated linearly, beyond the last
one they go on as they went between the last two; at the points they are the measured ones. With one
batch measured, another costs the same. Rows that are run in buckets cost what their bucket costs.

Letters: N rows per sequence (nodes of the tree, root included), B sequences, P committed tokens.
"""

from __future__ import annotations

import json
import os
import platform
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from inference.files import write_whole

FORMAT = 2
FILE = "costs.json"
"""Its name in the folder of a head."""


@dataclass(frozen=True)
class MachineKey:
    """What costs are costs of; a table of another key is measured anew.

    Attributes:
        cpu: model name.
        threads: that torch computes with.
        device: where the target runs, "cpu" or the name of the card.
        torch: version.
        dtype: of the target.
        target: hashes of `TargetModel.fingerprint`, or any other name of it.
        engine: what runs the rounds, such as "eager" or "compiled".
        drafters: hash of what drafts; "" for none.
        pages: of the target's weights: "huge", or "" for what the system gives unasked.
    """

    cpu: str
    threads: int
    device: str
    torch: str
    dtype: str
    target: str
    engine: str
    drafters: str = ""
    pages: str = ""

    def differences(self, other: MachineKey) -> list[str]:
        """One line for each field that differs."""
        return [
            f"{one.name}: {getattr(self, one.name)} here, {getattr(other, one.name)} in the table"
            for one in fields(self)
            if getattr(self, one.name) != getattr(other, one.name)
        ]


class _Keyed(Protocol):
    @property
    def key(self) -> MachineKey: ...


T = TypeVar("T", bound=_Keyed)


def machine_key(
    device: torch.device,
    dtype: torch.dtype,
    fingerprint: Mapping[str, str],
    engine: str,
    drafters: str = "",
    pages: str = "",
) -> MachineKey:
    """The key of this process.

    Args:
        device: of the target.
        dtype: of the target.
        fingerprint: `TargetModel.fingerprint()`.
        engine: what runs the rounds.
        drafters: hash of what drafts.
        pages: `Engine.pages`.
    """
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return MachineKey(
        cpu=_cpu_model(),
        threads=torch.get_num_threads(),
        device=card,
        torch=torch.__version__,
        dtype=str(dtype).removeprefix("torch."),
        target=" ".join(f"{name}:{value}" for name, value in sorted(fingerprint.items())),
        engine=engine,
        drafters=drafters,
        pages=pages,
    )


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


@dataclass(frozen=True)
class CostTable:
    """Seconds of the parts of a round.

    Attributes:
        key: where they were measured.
        verify_points: (N, P, B) -> seconds of the target's forward. For each B the same widths N at
            every context P, and no cheaper behind a longer context.
        draft_points: (proposer, depth, width, B) -> seconds of drafting trees of that depth with
            that many children per node. The same at all depths for heads that draft in one pass.
        rest_points: B -> seconds of everything else.
        buckets: widths that are really run: N rows cost what the next of them costs. Empty if any
            width is run as it is.
        absorb_points: (proposer, n) -> seconds of taking in n committed positions more than a round
            has, as one does that was idle, or at the start of a text.

    Raises:
        ValueError: points that are none.
    """

    key: MachineKey
    verify_points: Mapping[tuple[int, int, int], float]
    draft_points: Mapping[tuple[str, int, int, int], float] = field(default_factory=dict)
    rest_points: Mapping[int, float] = field(default_factory=lambda: {1: 0.0})
    buckets: tuple[int, ...] = ()
    absorb_points: Mapping[tuple[str, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse tables with holes."""
        if not self.verify_points or not self.rest_points:
            raise ValueError("costs: verify_points and rest_points need a point each: measure one")
        if min(self.verify_points.values()) <= 0 or min(self.draft_points.values(), default=0) < 0:
            raise ValueError("costs: seconds must be above 0")
        for batch, contexts in self._verify.items():
            if len({tuple(widths) for widths in contexts.values()}) > 1:
                raise ValueError(
                    f"costs: verify_points of batch {batch} lack some widths at some contexts: "
                    "measure every width at every context"
                )
            for width in next(iter(contexts.values())):
                seconds = [contexts[context][width] for context in contexts]
                if seconds != sorted(seconds):
                    raise ValueError(
                        f"costs: verify_points of batch {batch}, width {width} fall with the "
                        "context: smooth them (calibrate_costs does) or measure again"
                    )
        missing = [width for width in self.buckets if width > self.widest(min(self._verify))]
        if missing:
            raise ValueError(f"costs: buckets {missing} were not measured: measure them")

    def verify(self, width: int, context: float, batch: float = 1) -> float:
        """Seconds of a target forward.

        Args:
            width: N.
            context: P, the mean of the batch.
            batch: B.

        Raises:
            ValueError: wider than was measured.
        """
        run = self.executed(width)
        if not 1 <= run <= self.widest(batch):
            raise ValueError(
                f"costs: {width} rows per sequence at batch {batch:g} were not measured (up to "
                f"{self.widest(batch)}): calibrate with wider trees"
            )

        def at_batch(measured: int) -> float:
            contexts = self._verify[measured]
            return _between(contexts, context, lambda where: _between(contexts[where], run))

        return _between(self._verify, batch, at_batch)

    def draft(self, name: str, depth: int, width: int = 1, batch: float = 1) -> float:
        """Seconds of drafting; none for no draft.

        Args:
            name: of the proposer.
            depth: of the tree.
            width: children per node.
            batch: B.

        Raises:
            ValueError: a proposer that was not measured.
        """
        if depth == 0:
            return 0.0
        batches = self._draft.get(name)
        if batches is None:
            known = ", ".join(sorted(self._draft)) or "none"
            raise ValueError(f"costs: drafting by {name!r} was not measured (known: {known})")

        def at_batch(measured: int) -> float:
            widths = batches[measured]
            return _between(widths, width, lambda where: _between(widths[where], depth))

        return _between(batches, batch, at_batch)

    def absorb(self, name: str, positions: int) -> float:
        """Seconds of taking in so many committed positions more than a round has.

        Args:
            name: of the proposer.
            positions: of one sequence.
        """
        points = self._absorb.get(name)
        return 0.0 if points is None else _between(points, positions)

    def rest(self, batch: float = 1) -> float:
        """Seconds of everything else in a round of B sequences."""
        return _between(dict(sorted(self.rest_points.items())), batch)

    def executed(self, width: int) -> int:
        """The rows that are really run for N: the next bucket, or N."""
        place = bisect_left(self.buckets, width)
        return self.buckets[place] if place < len(self.buckets) else width

    def widest(self, batch: float = 1) -> int:
        """The largest N that was measured at this batch."""
        near = [size for size in self._verify if size >= batch][:1] or [max(self._verify)]
        below = [size for size in self._verify if size <= batch][-1:]
        return min(max(next(iter(self._verify[size].values()))) for size in {*near, *below})

    def widths(self, batch: float = 1) -> list[int]:
        """Measured N up to `widest`, which are the tree sizes worth trying; buckets where run."""
        known = self.buckets or sorted({width for width, _, _ in self.verify_points})
        return [width for width in known if width <= self.widest(batch)]

    def knows_plain(self) -> bool:
        """They were measured."""
        return True

    def lines(self) -> list[str]:
        """A table to print: milliseconds by context and width, for each batch."""
        found = [f"costs on {self.key.cpu}, {self.key.device}, {self.key.threads} threads, "]
        found[0] += f"{self.key.dtype}, {self.key.engine}; ms"
        for batch, contexts in self._verify.items():
            widths = list(next(iter(contexts.values())))
            found.append(f"batch {batch:<4} rows: " + "".join(f"{width:>9}" for width in widths))
            for context, row in contexts.items():
                cells = "".join(f"{1000 * seconds:9.2f}" for seconds in row.values())
                found.append(f"  context {context:>6}: {cells}")
        for name, batches in self._draft.items():
            for batch, by_width in batches.items():
                for width, depths in by_width.items():
                    cells = " ".join(f"{d}:{1000 * seconds:.2f}" for d, seconds in depths.items())
                    found.append(f"draft {name}, batch {batch}, width {width}, by depth: {cells}")
        rest = " ".join(f"{b}:{1000 * s:.2f}" for b, s in sorted(self.rest_points.items()))
        for (name, positions), seconds in sorted(self.absorb_points.items()):
            found.append(f"absorb {name}, {positions} positions: {1000 * seconds:.2f}")
        return [*found, f"rest of a round, by batch: {rest}"]

    # On disk ------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """As it is saved."""
        return {
            "format": FORMAT,
            "key": asdict(self.key),
            "verify": [[*point, seconds] for point, seconds in sorted(self.verify_points.items())],
            "draft": [[*point, seconds] for point, seconds in sorted(self.draft_points.items())],
            "rest": sorted(self.rest_points.items()),
            "buckets": list(self.buckets),
            "absorb": [[*point, seconds] for point, seconds in sorted(self.absorb_points.items())],
        }

    def save(self, path: Path) -> None:
        """Write it; a reader sees the old table or the new one, never a part of one.

        Args:
            path: of the file, or of the head's folder.
        """
        path = costs_path(path)
        try:
            write_whole(path, [json.dumps(self.to_dict()) + "\n"])
        except OSError as error:
            raise ValueError(
                f"costs: {path} cannot be written ({error.strerror}): give another path"
            ) from error

    @classmethod
    def load(cls, path: Path) -> CostTable:
        """Read one.

        Args:
            path: of the file, or of the head's folder.

        Raises:
            ValueError: no cost table, or one of another version of this file.
        """
        path = costs_path(path)
        try:
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if found["format"] != FORMAT:
                raise ValueError(f"format {found['format']} is not {FORMAT}")
            return cls(
                MachineKey(**found["key"]),
                {(int(n), int(p), int(b)): float(s) for n, p, b, s in found["verify"]},
                {(str(a), int(d), int(n), int(b)): float(s) for a, d, n, b, s in found["draft"]},
                {int(batch): float(seconds) for batch, seconds in found["rest"]},
                tuple(int(width) for width in found["buckets"]),
                {(str(a), int(n)): float(s) for a, n, s in found.get("absorb", [])},
            )
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"costs: {path} holds no cost table ({error}): calibrate") from error

    # Looking up ---------------------------------------------------------------------------------

    @cached_property
    def _verify(self) -> dict[int, dict[int, dict[int, float]]]:
        """By B, P and N, each in order."""
        found: dict[int, dict[int, dict[int, float]]] = {}
        for (width, context, batch), seconds in sorted(
            self.verify_points.items(), key=lambda item: item[0][::-1]
        ):
            found.setdefault(batch, {}).setdefault(context, {})[width] = seconds
        return found

    @cached_property
    def _absorb(self) -> dict[str, dict[int, float]]:
        """By proposer and positions, in order; none take no time."""
        found: dict[str, dict[int, float]] = {}
        for (name, positions), seconds in sorted(self.absorb_points.items()):
            found.setdefault(name, {0: 0.0})[positions] = seconds
        return found

    @cached_property
    def _draft(self) -> dict[str, dict[int, dict[int, dict[int, float]]]]:
        """By proposer, B, width and depth, each in order."""
        found: dict[str, dict[int, dict[int, dict[int, float]]]] = {}
        for (name, depth, width, batch), seconds in sorted(
            self.draft_points.items(), key=lambda item: (item[0][0], *item[0][:0:-1])
        ):
            by_width = found.setdefault(name, {}).setdefault(batch, {})
            by_width.setdefault(width, {})[depth] = seconds
        return found


def costs_path(path: Path) -> Path:
    """The file in a head's folder, or the path itself if it is none."""
    return path / FILE if path.is_dir() else path


def current_costs(path: Path, key: MachineKey) -> tuple[CostTable | None, list[str]]:
    """The table on disk, if it is of this machine; otherwise why there is none.

    Args:
        path: of the file, or of the head's folder.
        key: of this process.
    """
    return current_table(costs_path(path), key, CostTable.load)


def current_table(
    path: Path, key: MachineKey, load: Callable[[Path], T]
) -> tuple[T | None, list[str]]:
    """The same for tables of any kind; ``load`` raises ValueError where there is none."""
    if not path.exists():
        return None, [f"no {path}"]
    try:
        found = load(path)
    except ValueError as error:
        return None, [str(error)]
    return (found, []) if found.key == key else (None, key.differences(found.key))


def check_writable(path: Path) -> None:
    """Refuse a place where a table cannot be saved, before it is measured.

    Raises:
        ValueError: the folder is read-only or missing.
    """
    folder = costs_path(path).parent
    if not os.access(folder, os.W_OK):
        raise ValueError(f"costs: {folder} cannot be written to: give another path for the table")


def _between(points: Mapping[int, Any], x: float, value: Any = None) -> float:
    """Linear interpolation, exact at the points.

    Args:
        points: in order of their keys. Before the first the value is the first's; behind the last
            it goes on as between the last two, but never falls.
        x: where.
        value: of a key; the mapping's own values if None.
    """
    keys: Sequence[int] = list(points)
    look = points.__getitem__ if value is None else value
    place = bisect_left(keys, x)
    if place < len(keys) and keys[place] == x:
        return float(look(keys[place]))
    if place == 0 or len(keys) == 1:
        return float(look(keys[0]))
    beyond = place == len(keys)
    low, high = (keys[-2], keys[-1]) if beyond else (keys[place - 1], keys[place])
    before, after = float(look(low)), float(look(high))
    slope = (after - before) / (high - low)
    return after + max(slope, 0.0) * (x - high) if beyond else before + slope * (x - low)
