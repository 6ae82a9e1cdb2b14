"""report.md: the table of a report for a model card."""

from collections.abc import Sequence
from pathlib import Path

from scripts.report_data import Loaded, Series
from scripts.report_html import interval, number, visible
from scripts.report_sections import identity

HEAD = (
    "run", "setting", "τ with bonus (95 %)", "τ without bonus", "τ per request", "tokens/s",
    "speed-up", "output",
)  # fmt: skip
NOTE = (
    "τ with bonus: tokens emitted per target forward, pooled over all rounds; the token of the "
    "prefill belongs to no round. τ without bonus: draft tokens accepted per target forward. Per "
    "request: mean over texts, bonus included. Speed-up: tokens per second of decoding over those "
    "of plain decoding of the same prompts in the same run."
)


def markdown(loaded: Loaded, pictures: Sequence[Path]) -> str:
    """The file's text.

    Args:
        loaded: the runs.
        pictures: PNG files beside it.
    """
    rows = [_row(each) for each in loaded.series]
    lines = ["## Acceptance and speed", "", *_facts(loaded), "", _line(HEAD)]
    lines.append("|" + "---|" * 2 + "---:|" * (len(HEAD) - 3) + "---|")
    lines += [_line(row) for row in rows]
    lines += ["", NOTE, ""]
    lines += [f"![{path.stem.replace('_', ' ')}]({path.name})" for path in pictures]
    return "\n".join(lines).rstrip() + "\n"


def _facts(loaded: Loaded) -> list[str]:
    lines = []
    for label, run in loaded.runs.items():
        target, head = run.result["target"], run.result["head"]
        drafts = "no head" if head is None else f"{head['type']}, {head['parameters']:,} parameters"
        name = Path(target["name"]).name
        lines.append(f"- {_text(label)}: {_text(drafts)}; target {_text(name)}, {target['dtype']}")
    return lines


def _row(series: Series) -> list[str]:
    cell = series.cell
    span = cell["acceptance_length_interval"]
    tau = number(cell["acceptance_length"])
    return [
        series.run,
        series.setting,
        f"**{tau}**" + (f" ({interval(span)})" if span else ""),
        number(cell["accepted_per_round"]),
        number(cell["acceptance_length_per_request"]),
        number(cell["tokens_per_second"], 1),
        number(cell["speedup"], 2, " ×"),
        identity(cell),
    ]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(_text(cell) for cell in cells) + " |"


def _text(text: str) -> str:
    """Names can hold anything; in a table neither a bar nor a line end nor HTML may stay."""
    shown = visible(text).replace("\\", "\\\\").replace("|", "\\|")
    return shown.replace("&", "&amp;").replace("<", "&lt;").replace("[", "\\[")
