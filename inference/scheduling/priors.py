"""What was learnt of drafts, from run to run: counts of acceptance on disk, beside the cost table.

What is learnt in a run is written at its end and read at the next one's start; nothing is read or
written in between, so a run depends on the file that it found and on its seeds. Counts are of one
target, one law of acceptance (rule and temperature), and of each arm by itself: another head finds
nothing, and what is known of copied text stays.

Where a sequence may look only at itself (`inference.scheduling.schedule.may_look`), as its coins
are tossed over the drafts, a run may read what a calibration counted and writes nothing: coins are
functions of seed and position, so an earlier run with the same seed has tossed those of this one. A
calibration counts along texts of seeds that are its own.

Letters: K depths, R ranks.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference.files import write_whole
from inference.scheduling.schedule import may_look
from inference.scheduling.survival import Prior
from inference.tree import Proposal

FORMAT = 1
STEP = 0.25
"""Temperatures that round to the same multiple of it are taken to be alike."""

Counts = tuple[Sequence[Sequence[float]], Sequence[Sequence[float]]]
"""(K, R) accepted and (K, R) tried."""


@dataclass(frozen=True)
class Law:
    """How drafts are accepted.

    Attributes:
        rule: of acceptance.
        temperature: of the sampling.
    """

    rule: str
    temperature: float

    @property
    def name(self) -> str:
        """Of the laws under which acceptance is alike: "greedy", "match-t1", "rejection-t0.75"."""
        if self.temperature == 0:
            return "greedy"
        return f"{self.rule}-t{max(round(self.temperature / STEP), 1) * STEP:g}"

    @property
    def teaches(self) -> bool:
        """Whether a run may leave what it learnt to the next one."""
        return may_look(self.rule, Proposal.ONE_HOT, self.temperature).others


@dataclass(frozen=True)
class Memory:
    """A file of counts.

    Attributes:
        path: of the file.
        target: hashes of `TargetModel.fingerprint`, or any other name of it.
        law: of acceptance.
        arms: by name, a hash of what drafts.
    """

    path: Path
    target: str
    law: Law
    arms: Mapping[str, str]

    @classmethod
    def beside(
        cls, path: Path, target: Mapping[str, str], law: Law, arms: Mapping[str, str]
    ) -> Memory:
        """The one of a law.

        Args:
            path: folder, or a file in it, such as the cost table.
            target: `TargetModel.fingerprint()`.
            law: of acceptance.
            arms: by name, a hash of what drafts.
        """
        folder = path if path.is_dir() else path.parent
        name = " ".join(f"{part}:{value}" for part, value in sorted(target.items()))
        return cls(folder / f"survival-{law.name}.json", name, law, arms)

    def read(self, say: Callable[[str], None]) -> dict[str, Prior]:
        """What is known of each arm; nothing of those that nothing is known of.

        Args:
            say: called with a line if there is a file that is of no use.
        """
        if not self.path.exists():
            return {}
        try:
            return {
                name: Prior.counted(arm["accepted"], arm["tried"])
                for name, arm in self._arms().items()
                if name in self.arms and arm["of"] == self.arms[name]
            }
        except ValueError as error:
            say(f"{self.path} is left aside, drafts are learnt anew: {error}")
            return {}

    def write(self, counts: Mapping[str, Counts], say: Callable[[str], None]) -> None:
        """Replace the counts of some arms; a reader sees the old file or the new one. Of depths and
        ranks that a run could not draft the old ones stay.

        Args:
            counts: by arm.
            say: called with a line if the file cannot be written; what was decoded is not lost.
        """
        try:
            found = self._arms() if self.path.exists() else {}
        except ValueError:
            found = {}
        for name, (accepted, tried) in counts.items():
            if name in found and found[name]["of"] == self.arms[name]:
                accepted = _beyond(accepted, found[name]["accepted"])
                tried = _beyond(tried, found[name]["tried"])
            found[name] = {
                "of": self.arms[name],
                "accepted": [[round(value, 4) for value in row] for row in accepted],
                "tried": [[round(value, 4) for value in row] for row in tried],
            }
        record = {"format": FORMAT, "target": self.target, "law": self.law.name, "arms": found}
        try:
            write_whole(self.path, [json.dumps(record) + "\n"])
        except OSError as error:
            say(f"{self.path} cannot be written ({error.strerror}): what was learnt is not kept")

    def _arms(self) -> dict[str, Any]:
        """The arms in the file.

        Raises:
            ValueError: it is damaged, or of something else.
        """
        try:
            found: dict[str, Any] = json.loads(self.path.read_text(encoding="utf-8"))
            if found["format"] != FORMAT:
                raise ValueError(f"format {found['format']} is not {FORMAT}")
            for name, here in (("target", self.target), ("law", self.law.name)):
                if found[name] != here:
                    raise ValueError(f"its {name} is {found[name]}, here it is {here}")
            for arm in found["arms"].values():
                _check(arm["accepted"], arm["tried"], arm["of"])
        except (OSError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no counts of acceptance ({error!r})") from error
        return dict(found["arms"])


def _beyond(new: Sequence[Sequence[float]], old: Sequence[Sequence[float]]) -> list[list[float]]:
    """New counts, and old ones of depths and ranks that they do not have."""
    rows = itertools.zip_longest(new, old, fillvalue=())
    return [[*ours, *theirs[len(ours) :]] for ours, theirs in rows]


def _check(accepted: Any, tried: Any, of: Any) -> None:
    """Refuse what cannot have been counted.

    Raises:
        ValueError: counts of different shapes, or more hits than trials.
    """
    if not isinstance(of, str) or [len(row) for row in accepted] != [len(row) for row in tried]:
        raise ValueError("counts of different shapes")
    for hits, rounds in zip(accepted, tried, strict=True):
        if not all(0.0 <= hit <= count < math.inf for hit, count in zip(hits, rounds, strict=True)):
            raise ValueError("more drafts accepted than tried")
