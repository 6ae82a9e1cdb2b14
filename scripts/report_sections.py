"""The measured sections of a report, from the summary to the training curves.

Each takes everything loaded and gives HTML, with one line in place of what was not recorded.
"""

from collections.abc import Sequence
from typing import Any

from scripts.report_data import Loaded, Series, bucket_name, bucket_names, ordered
from scripts.report_figures import absent, beside, figure_set, figures, forest
from scripts.report_html import Html, details, interval, joined, number, percent, table, tag
from scripts.report_svg import MANY, Axis, Backdrop, Dot, Line, axis, legend, line_chart, named_axis

TAU = "tokens per target forward"


# Summary ----------------------------------------------------------------------------------------

SUMMARY_HEAD = (
    "", "τ with bonus", "95 % interval", "τ without bonus", "per request, with",
    "per request, without", "speed-up", "output", "near ties", "tokens/s", "plain tokens/s",
    "conversations", "turns", "skipped", "rounds", "drafts a round",
)  # fmt: skip
FOLDED = 16
"""Tables of more rows are folded."""


def summary(loaded: Loaded) -> Html:
    """Every cell: a point with its interval, and all numbers below."""
    values = [each.cell["acceptance_length"] for each in loaded.series]
    ends = [end for each in loaded.series for end in each.cell["acceptance_length_interval"] or ()]
    scale = axis(f"{TAU}, bonus included", [v for v in [*values, *ends, 1.0] if v is not None])
    shown: list[tuple[str, Sequence[Dot], str]] = []
    for group in loaded.groups:
        if group.title and len(loaded.groups) > 1:
            shown.append((group.title, [], ""))
        for each in group.series:
            value = each.cell["acceptance_length"]
            if value is not None:
                dot = tau_dot(each, value, each.cell["acceptance_length_interval"])
                shown.append((each.name, [dot], number(value)))
    rows: list[list[Any]] = []
    heads = {}
    for group in loaded.groups:
        if group.title:
            heads[len(rows)] = group.title
        rows += [summary_row(each) for each in group.series]
    numbers = table(SUMMARY_HEAD, rows, "Every cell in numbers", heads)
    if len(rows) > FOLDED:
        numbers = details(f"All numbers of {len(rows)} cells", numbers)
    return joined([forest(shown, scale), numbers, differences(loaded)])


def tau_dot(series: Series, value: float, span: Sequence[float] | None) -> Dot:
    """An acceptance length in words."""
    text = f"{series.full_name}: {number(value)}"
    text += "" if span is None else f", 95 % {interval(span)}"
    return Dot(value, span, series.style, text)


def summary_row(series: Series) -> list[Any]:
    """The numbers of a cell in the order of `SUMMARY_HEAD`."""
    cell = series.cell
    return [
        series.name,
        tag("strong", number(cell["acceptance_length"])),
        interval(cell["acceptance_length_interval"]),
        number(cell["accepted_per_round"]),
        number(cell["acceptance_length_per_request"]),
        number(cell["accepted_per_request"]),
        number(cell["speedup"], 2, " ×"),
        tag("span", identity(cell), class_="output"),
        "–" if cell["identical"] is None else cell["near_ties"],
        number(cell["tokens_per_second"], 1),
        number(cell["plain_tokens_per_second"], 1),
        cell["num_conversations"],
        cell["num_prompts"],
        cell["num_skipped"],
        cell["num_drafts"],
        number(cell["draft_tokens_per_round"], 1),
    ]


def identity(cell: dict[str, Any]) -> str:
    """Whether the texts are those of decoding without drafts, in words."""
    if cell["identical"] is None:
        return "not compared"
    return (
        "✓ identical"
        if cell["identical"]
        else f"✕ {len(cell['differences']) - cell['near_ties']} differ"
    )


def near_ties(cell: dict[str, Any]) -> str:
    """How many texts differ by rounding alone; "" for none."""
    ties = cell["near_ties"]
    return f"{ties} near tie{'s' if ties > 1 else ''}" if ties else ""


def differences(loaded: Loaded) -> Html | None:
    """Every text that is not plain decoding's."""
    rows = [
        [
            each.full_name,
            found["id"],
            found["turn"] + 1,
            found["position"],
            found["expected"],
            found["found"],
            "–" if found["gap"] is None else f"{found['gap']:.1e}",
            "near tie" if found["near_tie"] else "✕ differs",
        ]
        for each in loaded.series
        for found in each.cell["differences"]
    ]  # fmt: skip
    if not rows:
        return None
    head = ("cell", "request", "turn", "new token", "expected", "found", "gap in logits", "verdict")
    return details(
        f"{len(rows)} texts differ from decoding without drafts",
        table(head, rows, "Where texts first differ from decoding without drafts"),
    )


# Positions --------------------------------------------------------------------------------------


def positions(loaded: Loaded) -> Html:
    """Survival and conditional acceptance by position in the draft."""

    def draw(series: Sequence[Series]) -> Html | None:
        found = {kind: [rate_line(each, kind) for each in series] for kind in KINDS}
        deepest = max(len(each.cell["acceptance_by_position"]["survival"]) for each in series)
        if not deepest:
            return None
        places = [str(n) for n in range(1, deepest + 1)]
        x, y = named_axis("position in the draft", places), axis("share accepted", [], 0.0, 1.0)
        charts = [line_chart(lines, x, y, KINDS[kind]) for kind, lines in found.items()]
        rows = []
        for kind in KINDS:
            for each in series:
                rates = each.cell["acceptance_by_position"]
                pairs = zip(rates[kind], rates[f"{kind}_interval"], strict=True)
                cells = [tag("span", percent(v), title=f"95 % {interval(s)}") for v, s in pairs]
                rows.append([each.name, kind, *cells, *[""] * (deepest - len(cells))])
        numbers = table(("", "", *places), rows, "Acceptance by position")
        return figure_set(series, charts, numbers)

    drawn = figures(loaded, "positions", draw)
    return drawn or absent("No round had a draft, so no position was accepted or refused.")


KINDS = {
    "conditional": "Conditional on the positions before",
    "survival": "Survival, of all rounds",
}


def rate_line(series: Series, kind: str) -> Line:
    """Acceptance by position; positions that nobody reached are left out."""
    rates = series.cell["acceptance_by_position"]
    known = [
        (place, value, span)
        for place, (value, span) in enumerate(
            zip(rates[kind], rates[f"{kind}_interval"], strict=True)
        )
        if value is not None
    ]
    points = [(place, value) for place, value, _ in known]
    return Line(series.name, points, series.style, [span for _, _, span in known])


# Categories -------------------------------------------------------------------------------------


def categories(loaded: Loaded) -> Html:
    """Acceptance length by category of prompts."""

    def draw(series: Sequence[Series]) -> Html | None:
        names = ordered([list(each.cell["by_category"]) for each in series])
        found = {
            name: [(each, each.cell["by_category"].get(name)) for each in series] for name in names
        }
        found = {
            name: [(s, c) for s, c in row if c and c["acceptance_length"] is not None]
            for name, row in found.items()
        }
        found = {name: row for name, row in found.items() if row}
        if len(found) < 2:
            return None
        order = sorted(found, key=lambda name: -found[name][0][1]["acceptance_length"])
        values = [
            end
            for row in found.values()
            for _, cell in row
            for end in (cell["acceptance_length"], *(cell["acceptance_length_interval"] or ()))
        ]
        scale = axis(f"{TAU}, bonus included", [1.0, *values])
        rows = [
            (name, [tau_dot(each, cell["acceptance_length"], cell["acceptance_length_interval"])
                    for each, cell in found[name]],
             number(found[name][0][1]["acceptance_length"]) if len(series) == 1 else "")
            for name in order
        ]  # fmt: skip
        drawing = forest(rows, scale) if len(series) <= MANY else Html("")
        numbers = shaded(series, order, found, scale)
        body = [legend([(each.name, each.style) for each in series]), drawing]
        return joined([*body, numbers if len(series) > MANY else details("Numbers", numbers)])

    drawn = figures(loaded, "categories", draw)
    return drawn or absent(
        "One category of prompts only: rows with a field category (question_id, category, turns) "
        "give this section."
    )


def shaded(
    series: Sequence[Series],
    names: Sequence[str],
    found: dict[str, list[tuple[Series, dict[str, Any]]]],
    scale: Axis,
) -> Html:
    """Acceptance length by category and series, with the number's share of the scale behind it."""
    rows = []
    for name in names:
        by_series = {each.name: cell for each, cell in found[name]}
        row: list[Any] = [name]
        for each in series:
            cell = by_series.get(each.name)
            if cell is None:
                row.append("–")
                continue
            value = cell["acceptance_length"]
            share = f"--share: {100 * scale.place(value):.0f}%"
            span = interval(cell["acceptance_length_interval"])
            row.append(tag("span", number(value), class_="shade", style=share, title=span))
        rows.append(row)
    head = ("category", *(each.name for each in series))
    return table(head, rows, "Acceptance length by category, bonus included")


# Contexts ---------------------------------------------------------------------------------------


def contexts(loaded: Loaded) -> Html:
    """Acceptance length by the length of the text before the round."""

    def draw(series: Sequence[Series]) -> Html | None:
        names = bucket_names(series)
        if not names:
            return None
        x = named_axis("committed tokens before the round", names)
        lines = [
            Line(each.name, [(names.index(bucket_name(b)), b["acceptance_length"])
                             for b in each.cell["by_context"]], each.style)
            for each in series
        ]  # fmt: skip
        values = [value for line in lines for _, value in line.points]
        y = axis("tokens a round", [1.0, *values])
        chart = line_chart(lines, x, y, "Acceptance length by context, bonus included")
        rows = []
        for each in series:
            by_name = {bucket_name(bucket): bucket for bucket in each.cell["by_context"]}
            rows.append([each.name, *(in_bucket(by_name.get(name)) for name in names)])
        numbers = table(("", *names), rows, "Tokens a round by committed tokens (rounds)")
        return beside(series, chart, numbers)

    drawn = figures(loaded, "contexts", draw)
    return drawn or absent("No round was decoded.")


def in_bucket(bucket: dict[str, Any] | None) -> Html:
    """A mean with its number of rounds."""
    if bucket is None:
        return tag("span", "–")
    rounds = tag("span", f" ({bucket['num_drafts']})", class_="soft")
    return tag("span", number(bucket["acceptance_length"]), rounds)


# Confidence -------------------------------------------------------------------------------------


def confidence(loaded: Loaded) -> Html:
    """Predicted survival of drafts against what happened."""

    def draw(series: Sequence[Series]) -> Html | None:
        having = [each for each in series if each.cell["reliability"]]
        if not having:
            return None
        x, y = axis("predicted survival", [], 0.0, 1.0), axis("share that survived", [], 0.0, 1.0)
        lines = [
            Line(each.name, [(bin_["predicted"], bin_["observed"])
                             for bin_ in each.cell["reliability"] if bin_["count"]], each.style)
            for each in having
        ]  # fmt: skip
        chart = line_chart(
            lines, x, y, "Reliability: on the diagonal is right", Backdrop(diagonal=True)
        )
        rows = [
            [each.name, number(bin_["predicted"], 3), number(bin_["observed"], 3), bin_["count"]]
            for each in having
            for bin_ in each.cell["reliability"]
        ]
        numbers = table(("", "predicted", "survived", "drafts"), rows, "Reliability by bin")
        quality = table(
            ("", "AUC", "calibration error", "drafts"),
            [
                [each.name, number(each.cell["confidence_auc"], 3),
                 percent(each.cell["confidence_error"], 1), each.cell["confidence_drafts"]]
                for each in having
            ],
            "Quality of the confidence output",
        )  # fmt: skip
        return joined([beside(having, chart, quality), details("Numbers", numbers)])

    drawn = figures(loaded, "confidence", draw)
    return drawn or absent(
        "No confidence predictions were recorded: a head with a confidence output gives this "
        "section (drafter.confidence in its recipe, or python -m scripts.calibrate_confidence)."
    )


# Training ---------------------------------------------------------------------------------------


def training(loaded: Loaded) -> Html:
    """Acceptance length and loss over the tokens trained on."""
    having = {
        label: (place, run.result["training"])
        for place, (label, run) in enumerate(loaded.runs.items())
        if run.result["training"]
    }
    if not having:
        return absent(
            "No training history: evaluate a head that still lies in its run's folder, beside "
            "metrics.jsonl."
        )
    every = [row for _, rows in having.values() for row in rows]
    tokens = all(row.get("tokens") is not None for row in every)
    key, name = ("tokens", "supervised tokens") if tokens else ("step", "optimizer step")
    charts = []
    for wanted, title, unit in (
        ("acceptance_length", "Acceptance length while training, by the decoder", "tokens a round"),
        ("loss", "Training loss", "loss"),
    ):
        lines = [
            Line(label, points, place, marks=wanted == "acceptance_length" and len(points) < 40)
            for label, (place, rows) in having.items()
            if (points := [(r[key], r[wanted]) for r in rows if r.get(wanted) is not None])
        ]
        if lines:
            x = axis(name, [x for line in lines for x, _ in line.points], low=0.0)
            y = axis(unit, [y for line in lines for _, y in line.points])
            charts.append(line_chart(lines, x, y, title))
    columns = ordered([list(row) for row in every])
    rows = [
        [label, *(shown(row.get(column)) for column in columns)]
        for label, (_, found) in having.items()
        for row in found
    ]
    return joined(
        [
            legend([(label, place) for label, (place, _) in having.items()]),
            tag("div", *charts, class_="charts"),
            details("Numbers", table(("run", *columns), rows, "Training history")),
        ]
    )


def shown(value: Any) -> str:
    """Any plain value of a table."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return "–" if value is None else str(value)
