"""The HTML file of a report: head, navigation, sections, where the numbers come from.

It loads nothing: the style sheet, the script and the data are inside, and a content security policy
forbids everything else, so that not even a mistake in escaping could run the text of a token.
"""

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts import report_sections, report_theory, report_trace
from scripts.report_data import Loaded, shared_settings
from scripts.report_figures import absent
from scripts.report_html import Html, details, joined, table, tag

STYLE = Path(__file__).with_name("report.css")
SCRIPT = Path(__file__).with_name("report.js")


def page(loaded: Loaded, traces: int) -> str:
    """The whole file.

    Args:
        loaded: the runs.
        traces: texts per cell whose trace is shown.
    """
    trace, trees = traced(loaded, traces)
    sections = [
        ("summary", "Summary", "Summary", report_sections.summary(loaded)),
        ("positions", "Positions", "Acceptance by position", report_sections.positions(loaded)),
        ("categories", "Categories", "By category", report_sections.categories(loaded)),
        ("contexts", "Context", "By context length", report_sections.contexts(loaded)),
        (
            "prediction",
            "Prediction",
            "Prediction beside measurement",
            report_theory.prediction(loaded),
        ),
        ("costs", "Costs", "What verifying costs", report_theory.costs(loaded)),
        (
            "confidence",
            "Confidence",
            "Reliability of the confidence output",
            report_sections.confidence(loaded),
        ),
        ("training", "Training", "Training", report_sections.training(loaded)),
        ("trace", "Trace", "Decode trace", trace),
        ("about", "Definitions", "Definitions and settings", about(loaded)),
    ]
    links = [tag("li", tag("a", short, href=f"#{name}")) for name, short, _, _ in sections]
    body = [
        tag("a", "Skip to the numbers", href="#summary", class_="skip"),
        header(loaded),
        tag("nav", tag("ul", *links), aria_label="sections"),
        tag("main", *(section(name, title, body) for name, _, title, body in sections)),
        trees,
        tag("script", Html(SCRIPT.read_text(encoding="utf-8"))),
    ]
    return "<!doctype html>\n" + tag("html", head(loaded), tag("body", *body), lang="en") + "\n"


def head(loaded: Loaded) -> Html:
    """Title, policy and style sheet."""
    script = SCRIPT.read_text(encoding="utf-8").encode()
    digest = base64.b64encode(hashlib.sha256(script).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"Headway: {', '.join(loaded.runs)}"),
        tag("style", Html(STYLE.read_text(encoding="utf-8"))),
    )


def header(loaded: Loaded) -> Html:
    """Whose numbers these are."""
    first = next(iter(loaded.runs.values()))
    targets = dict.fromkeys(run.result["target"]["name"] for run in loaded.runs.values())
    title = (
        next(iter(loaded.runs)) if len(loaded.runs) == 1 else f"{len(loaded.runs)} runs compared"
    )
    facts = [("target", ", ".join(Path(name).name for name in targets))]
    if len(loaded.runs) == 1:
        own = first.result["head"]
        facts.append(
            ("head", "none" if own is None else f"{own['type']}, {size(own['parameters'])}")
        )
    shared = shared_settings([each.cell for each in loaded.series])
    if shared:
        facts.append(("all cells", " · ".join(shared)))
    facts.append(("dtype", first.result["target"]["dtype"]))
    facts.append(("cells", str(len(loaded.series))))
    prompts = {each.cell["num_prompts"] for each in loaded.series}
    facts.append(("texts per cell", "–".join(str(n) for n in sorted({min(prompts), max(prompts)}))))
    listed = [tag("div", tag("dt", name), tag("dd", value)) for name, value in facts]
    return tag(
        "header",
        tag("p", "Headway evaluation", class_="kicker"),
        tag("h1", title),
        tag("dl", *listed),
        lead(loaded),
    )


def size(parameters: int) -> str:
    """A number of parameters."""
    for unit, one in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if parameters >= one:
            return f"{parameters / one:.1f}{unit}"
    return str(parameters)


def lead(loaded: Loaded) -> Html:
    """The best cell in large figures."""
    having = [each for each in loaded.series if each.cell["acceptance_length"] is not None]
    if not having:
        return absent("No round was decoded.")
    longest = max(having, key=lambda each: each.cell["acceptance_length"])
    cell = longest.cell
    tiles = [
        ("tokens per target forward", report_sections.number(cell["acceptance_length"]),
         f"bonus included; 95 % {report_sections.interval(cell['acceptance_length_interval'])}"),
        ("accepted drafts per forward", report_sections.number(cell["accepted_per_round"]),
         "the other convention, without the bonus token"),
        ("speed-up", report_sections.number(cell["speedup"], 2, "×"),
         "over plain decoding in the same run"),
        ("output", report_sections.identity(cell),
         ", ".join(filter(None, (report_sections.near_ties(cell), "against plain decoding")))),
    ]  # fmt: skip
    name = longest.full_name if len(loaded.runs) > 1 else longest.setting
    title = "The only cell" if len(loaded.series) == 1 else "The cell with the longest acceptance"
    parts = [
        tag("div", tag("dt", label), tag("dd", value), tag("dd", note, class_="note"))
        for label, value, note in tiles
    ]
    return joined([tag("p", f"{title}: ", tag("strong", name)), tag("dl", *parts, class_="tiles")])


def section(name: str, title: str, body: Html) -> Html:
    """One section with its heading."""
    heading = tag("h2", title, id=f"{name}-title")
    return tag("section", heading, body, id=name, aria_labelledby=f"{name}-title")


def traced(loaded: Loaded, limit: int) -> tuple[Html, Html | None]:
    """The decode traces, and the block of their trees."""
    blocks: list[Html] = []
    trees: dict[str, Any] = {}
    for place, each in enumerate(loaded.series):
        for number, request in enumerate(
            report_trace.chosen_requests(each.source, each.number, limit)
        ):
            title = each.full_name if len(loaded.runs) > 1 else each.setting
            block, found = report_trace.request_rows(
                request, each.source.rounds_of(request), f"r{place}-{number}", title, not blocks
            )
            blocks.append(block)
            trees |= found
    if not blocks:
        how = "--traces 0 leaves it out" if limit == 0 else "scripts.evaluate --trace 4 records it"
        return absent(f"No decode trace: {how}."), None
    return report_trace.trace_section(blocks), report_trace.script_data(trees)


# Where the numbers come from --------------------------------------------------------------------

DEFINITIONS = (
    (
        "τ with bonus",
        "tokens emitted by the rounds / rounds, pooled over all texts. The token of the prefill "
        "belongs to no round; the last round counts only tokens that reached the text.",
    ),
    (
        "τ without bonus",
        "draft tokens accepted / rounds: τ with bonus less one, but for rounds in which the text "
        "ended.",
    ),
    (
        "per request",
        "the same of each text alone, then the mean over texts: short texts weigh more.",
    ),
    (
        "95 % interval",
        "whole conversations are drawn again and again, each with all its rounds; the middle 95 % "
        "of the figures. With less than about twenty texts it is too narrow.",
    ),
    (
        "conditional",
        "at a position: accepted / rounds that had a draft there and had accepted all before it.",
    ),
    (
        "survival",
        "at a position: rounds that accepted it and all before it / all rounds. The sum over "
        "positions is τ without bonus.",
    ),
    (
        "speed-up",
        "tokens per second of decoding after the prefill, over those of plain decoding of the same "
        "prompts in the same run.",
    ),
    (
        "identical",
        "every text equals decoding without drafts, but for near ties: places where rounding "
        "decides between two tokens.",
    ),
)


def about(loaded: Loaded) -> Html:
    """Definitions, and what each run was asked for and ran on."""
    words = [tag("div", tag("dt", word), tag("dd", text)) for word, text in DEFINITIONS]
    parts = [tag("dl", *words, class_="words")]
    for label, run in loaded.runs.items():
        rows = _flat({key: run.result[key] for key in run.result if key not in LARGE})
        body = table(("key", "value"), rows, f"Settings and provenance of {label}")
        parts.append(details(f"Settings and provenance: {label}", body))
    return joined(parts)


LARGE = ("cells", "costs", "training")
"""Parts of a result that have sections of their own."""


def _flat(record: dict[str, Any], before: str = "") -> Sequence[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in record.items():
        if isinstance(value, dict):
            rows += _flat(value, f"{before}{key}.")
        else:
            rows.append((f"{before}{key}", "–" if value is None else str(value)))
    return rows
