"""What a run says about itself: metric sums over processes, ``metrics.jsonl``, trackers."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor


class Records:
    """Sums and counts since the last line, and the lines.

    Metrics travel as ``name_sum`` and ``name_count`` and are divided once, over all processes.

    Args:
        accelerator: of this process.
        file: metrics.jsonl.
        trackers: whether accelerate's trackers are on.
    """

    def __init__(self, accelerator: Accelerator, file: Path, trackers: bool) -> None:
        self.accelerator, self.file, self.trackers = accelerator, file, trackers
        self.sums: dict[str, Tensor] = {}

    def add(self, metrics: Mapping[str, Tensor]) -> None:
        """Add this process's sums."""
        for name, value in metrics.items():
            value = (
                value.detach().double() if value.device.type == "cpu" else value.detach().float()
            )
            self.sums[name] = self.sums[name] + value if name in self.sums else value

    def totals(self) -> dict[str, float]:
        """Sums over all processes, some of which may have had nothing to draft and so know fewer
        names.
        """
        names = sorted(set(gather_object(list(self.sums))))
        if not names:
            return {}
        zero = self._number(0.0)
        stacked = torch.stack([self.sums.get(name, zero) for name in names])
        return dict(
            zip(names, self.accelerator.reduce(stacked, reduction="sum").tolist(), strict=True)
        )

    def take_means(self) -> dict[str, float]:
        """Every metric's mean over all processes since the last call."""
        totals = self.totals()
        self.sums = {}
        stems = [name.removesuffix("_sum") for name in totals if name.endswith("_sum")]
        return {stem: totals[f"{stem}_sum"] / max(totals[f"{stem}_count"], 1) for stem in stems}

    def restore(self, totals: Mapping[str, float]) -> None:
        """Go on from sums over all processes; one of them carries them."""
        main = self.accelerator.is_main_process
        self.sums = {name: self._number(v if main else 0.0) for name, v in totals.items()}

    def _number(self, value: float) -> Tensor:
        """A metric sum."""
        device = self.accelerator.device
        wide = torch.float64 if device.type == "cpu" else torch.float32
        return torch.tensor(value, dtype=wide, device=device)

    def write(self, step: int, values: Mapping[str, object]) -> None:
        """A line of the main process, and the trackers' (numbers alone)."""
        values = {k: None if _broken(v) else v for k, v in values.items()}
        if self.accelerator.is_main_process:
            with self.file.open("a") as file:
                file.write(json.dumps({"step": step, **values}) + "\n")
        if self.trackers:
            numbers = {k: v for k, v in values.items() if isinstance(v, (int, float))}
            self.accelerator.log(numbers, step=step)

    def lines(self) -> list[dict]:
        """All finished lines."""
        return read_lines(self.file)

    def cut(self, step: int) -> None:
        """Drop lines past ``step``, which a resumed run writes again, and a line cut short by a
        kill.
        """
        if not self.file.exists():
            return
        kept = [json.dumps(line) + "\n" for line in self.lines() if line["step"] <= step]
        temporary = self.file.with_suffix(".tmp")
        temporary.write_text("".join(kept))
        os.replace(temporary, self.file)


def _broken(value: object) -> bool:
    """NaN and infinity, which JSON does not have."""
    return isinstance(value, float) and not math.isfinite(value)


def read_lines(file: Path) -> list[dict]:
    """The lines of a metrics.jsonl; a last one cut short by a kill is left out."""
    found = []
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found
