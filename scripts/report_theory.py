"""The sections of a report that explain the measured numbers: costs, and prediction.

Letters: N rows verified, P committed tokens, B sequences, alpha chance that a draft token is
accepted, gamma draft tokens a round, c cost of a draft in target steps (arXiv:2211.17192).
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from inference.prediction.formulas import expected_tokens
from scripts.report_data import Loaded, Series, interval_of, verify_costs, widths_used
from scripts.report_figures import absent, figure_set, figures, forest
from scripts.report_html import Html, details, interval, joined, number, percent, table, tag
from scripts.report_svg import Axis, Backdrop, Dot, Line, axis, legend, line_chart

GAMMAS = (1, 2, 3, 5, 10)
"""Curves that are drawn, of those there are; beside the heads' own."""


# Costs ------------------------------------------------------------------------------------------


def costs(loaded: Loaded) -> Html:
    """Seconds of verifying by rows and context, with the size that each cell ran."""
    bodies: list[Html | None] = []
    for label, run in loaded.runs.items():
        if run.result["costs"]:
            mine = [each for each in loaded.series if each.run == label]
            heading = tag("h3", label) if len(loaded.runs) > 1 else None
            bodies += [heading, cost_table(run.result["costs"], mine)]
    if not bodies:
        return absent("No cost table: a run with --size auto measures and records one.")
    return joined(bodies)


def cost_table(found: dict[str, Any], series: Sequence[Series]) -> Html:
    """One run's costs: a chart over N, and a table with the N that each cell chose."""
    by_place = verify_costs(found)
    every = sorted({rows for seconds in by_place.values() for rows in seconds})
    used = {each: widths_used(each, every) for each in series}
    most = {max(shares, key=lambda n: shares[n]) for shares in used.values() if shares}
    chosen = {rows for each in series if (rows := chosen_rows(each)) is not None}
    lines = [
        Line(f"batch {batch}, context {context}",
             [(rows, 1000 * value) for rows, value in by_place[batch, context].items()], place)
        for place, (batch, context) in enumerate(_spread(list(by_place)))
    ]  # fmt: skip
    marks = {rows: _both(rows in most, rows in chosen) for rows in sorted(most | chosen)}
    verticals = [(float(rows), text) for rows, text in marks.items()]
    top = [value for line in lines for _, value in line.points]
    x, y = axis("rows verified N", every, low=0.0), axis("milliseconds", top, low=0.0)
    chart = line_chart(lines, x, y, "A target forward", Backdrop(verticals=verticals))
    head = [
        joined([n, tag("span", f" ▲ {marks[n]}", class_="chosen") if n in marks else None])
        for n in every
    ]
    body: list[list[Any]] = []
    for (batch, context), seconds in by_place.items():
        cells = [f"{1000 * seconds[n]:.1f}" if n in seconds else "–" for n in every]
        shown = [tag("mark", c) if n in most else c for n, c in zip(every, cells, strict=True)]
        body.append([f"batch {batch}, context {context}, ms", *shown])
    groups = {len(body): "Share of rounds that verified so many rows"}
    for each, shares in used.items():
        body.append([each.setting, *(percent(shares.get(n)) if n in shares else "" for n in every)])
    key = found["key"]
    machine = f"{key['cpu']} ({key['device']}, threads: {key['threads']})"
    return joined(
        [
            tag("p", f"A forward of the target on {machine}, {key['dtype']}, {key['engine']}."),
            legend([(line.label, line.style) for line in lines]),
            tag("div", chart, class_="charts"),
            table(("rows N", *head), body, "Milliseconds of verifying N rows", groups),
            drafting_costs(found),
        ]
    )


def _both(used: bool, best: bool) -> str:
    return ", ".join(text for text, there in (("most used", used), ("best", best)) if there)


def chosen_rows(series: Series) -> int | None:
    """N of the best drafts by prediction and costs; None where nothing was chosen."""
    prediction = series.cell["prediction"]
    choice = prediction and prediction["best"]["choice"]
    return choice["size"] if choice else None


def drafting_costs(found: dict[str, Any]) -> Html:
    """Seconds of drafting and of the rest of a round."""
    rows = [
        [f"draft, {name}", depth, width, batch, f"{1000 * seconds:.2f}"]
        for name, depth, width, batch, seconds in found["draft"]
    ]
    rows += [["rest of a round", "", "", b, f"{1000 * s:.2f}"] for b, s in found["rest"]]
    head = ("part", "depth", "width", "batch", "milliseconds")
    return details("Drafting and the rest of a round", table(head, rows, "Other parts of a round"))


def _spread(places: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """At most five, the ends included."""
    if len(places) <= 5:
        return list(places)
    return [places[round(n * (len(places) - 1) / 4)] for n in range(5)]


# Prediction -------------------------------------------------------------------------------------


def prediction(loaded: Loaded) -> Html:
    """What one teacher-forced pass predicts beside what was decoded."""

    def draw(series: Sequence[Series]) -> Html | None:
        having = [each for each in series if each.cell["prediction"]]
        if not having:
            return None
        return joined(
            [
                warnings(having),
                compared(having),
                figure_set(having, [by_depth(having), curves(having), best_gamma(having)],
                           depth_numbers(having)),
                steps(having),
                best(having),
            ]
        )  # fmt: skip

    drawn = figures(loaded, "prediction", draw)
    return drawn or absent(
        "No prediction was recorded: python -m scripts.evaluate --predict gives this section, for "
        "trained heads."
    )


def warnings(series: Sequence[Series]) -> Html | None:
    """Gaps between prediction and measurement, with their likely causes."""
    items = [
        tag("li", tag("strong", f"{each.name}: {found['cause']}. "), found["message"])
        for each in series
        for found in (each.cell["prediction"]["comparison"] or {}).get("warnings", ())
    ]
    if not items:
        return None
    return tag("div", tag("p", "⚠ Prediction and measurement disagree"), tag("ul", *items),
               class_="warning", role="note")  # fmt: skip


def compared(series: Sequence[Series]) -> Html:
    """Both acceptance lengths with their intervals, and the gap."""
    rows, numbers, ends = [], [], [1.0]
    for each in series:
        found = each.cell["prediction"]
        tau, span = found["tau"]["value"], interval_of(found["tau"])
        measured, own = each.cell["acceptance_length"], each.cell["acceptance_length_interval"]
        points = [Dot(tau, span, each.style, f"{each.name}, predicted: {number(tau)}", hollow=True)]
        ends += [tau, *(span or ())]
        if measured is not None:
            text = f"{each.name}, measured: {number(measured)}"
            points.append(Dot(measured, own, each.style, text))
            ends += [measured, *(own or ())]
        rows.append((each.name, points, f"{number(tau)} / {number(measured)}"))
        against = found["comparison"]
        gap = None if against is None else against["gap"]
        numbers.append(
            [each.name, number(tau), interval(span), number(measured), interval(own),
             "–" if gap is None else f"{gap['value']:+.3f}", interval(interval_of(gap), 3),
             "not compared" if against is None else "✓ within" if against["within"] else "✕ beyond"]
        )  # fmt: skip
    head = ("", "predicted τ", "95 %", "measured τ", "95 %", "gap", "95 %",
            "verdict (99 %)")  # fmt: skip
    scale = axis("tokens per target forward: outline predicted, filled measured", ends)
    return joined([forest(rows, scale), table(head, numbers, "Prediction beside measurement")])


def by_depth(series: Sequence[Series]) -> Html:
    """Conditional acceptance of each position, predicted and measured."""
    lines = []
    for each in series:
        measured = each.cell["acceptance_by_position"]["conditional"]
        predicted = [row["conditional"] for row in each.cell["prediction"]["by_depth"]]
        points = [
            (one, other)
            for one, other in zip(predicted, measured, strict=False)
            if one is not None and other is not None
        ]
        lines.append(Line(each.name, points, each.style, joined=False))
    x = axis("predicted", [], 0.0, 1.0)
    y = axis("measured", [], 0.0, 1.0)
    title = "Conditional acceptance, a mark per position"
    return line_chart(lines, x, y, title, Backdrop(diagonal=True))


def curves(series: Sequence[Series]) -> Html:
    """E[tokens] over alpha, a curve for each gamma, with the heads' points on it."""
    own = {each.cell["prediction"]["curves"]["point"]["gamma"] for each in series}
    alphas = [n / 50 for n in range(51)]
    grey = [
        Line(f"γ = {gamma}", [(alpha, expected_tokens(alpha, gamma)) for alpha in alphas])
        for gamma in sorted({*GAMMAS, *own})
    ]
    points = [(each, each.cell["prediction"]["curves"]["point"]) for each in series]
    lines = [
        Line(f"{each.name}, predicted", [(point["alpha"], point["predicted"])], each.style,
             joined=False, hollow=True)
        for each, point in points
    ]  # fmt: skip
    lines += [  # the smaller marks, so that both are seen where they agree
        Line(f"{each.name}, measured", [(point["alpha"], each.cell["acceptance_length"])],
             each.style, joined=False)
        for each, point in points
        if each.cell["acceptance_length"] is not None
    ]  # fmt: skip
    reach = [line.points[0][1] for line in lines]
    top = max(4, math.ceil(max(reach) + 0.2))
    grey = [below(line, top) for line in grey]
    x, y = axis("α", [], 0.0, 1.0), axis("expected tokens a round", [], 1.0, float(top))
    return line_chart(lines, x, y, "E[tokens] over α (arXiv:2211.17192)", Backdrop(grey))


def below(line: Line, top: float) -> Line:
    """A rising curve up to where it reaches the top."""
    kept = [line.points[0]]
    for before, after in pairwise(line.points):
        if after[1] > top:
            share = (top - before[1]) / (after[1] - before[1])
            kept.append((before[0] + share * (after[0] - before[0]), top))
            break
        kept.append(after)
    return Line(line.label, kept)


def best_gamma(series: Sequence[Series]) -> Html:
    """The best gamma over c, a curve for each alpha, with the heads' points on it."""
    table_ = series[0].cell["prediction"]["curves"]
    grey = [
        Line(f"α = {alpha:g}", list(zip(table_["costs"], row, strict=True)))
        for alpha, row in zip(table_["alphas"], table_["best_gamma"], strict=True)
    ]
    lines = [
        Line(f"{each.name}, α = {point['alpha']:.2f}", [(point["cost"], point["best_gamma"])],
             each.style, joined=False)
        for each in series
        if (point := each.cell["prediction"]["curves"]["point"])["best_gamma"] is not None
        and point["cost"] is not None
    ]  # fmt: skip
    low, high = table_["costs"][0], table_["costs"][-1]
    ticks = [(c, f"{c:g}") for c in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0) if low <= c <= high]
    most = [max(point[1] for point in line.points) for line in [*grey, *lines]]
    x = Axis("cost c of a draft, in target steps", low, high, ticks, logarithmic=low > 0)
    y = axis("best γ", most, low=0.0)
    return line_chart(lines, x, y, "Best number of drafts over their cost", Backdrop(grey))


def depth_numbers(series: Sequence[Series]) -> Html:
    """Overlap, chance of the draft's argmax, agreement and acceptance by position."""
    rows = []
    for each in series:
        measured = each.cell["acceptance_by_position"]["conditional"]
        for place, row in enumerate(each.cell["prediction"]["by_depth"]):
            rows.append(
                [each.name, row["depth"],
                 *(number(row[key]["value"], 3)
                   for key in ("overlap", "p_of_draft", "agreement", "acceptance")),
                 number(row["conditional"], 3),
                 number(measured[place] if place < len(measured) else None, 3)]
            )  # fmt: skip
    head = ("", "position", "overlap 1 − ½‖p−q‖₁", "p of the draft", "argmax agreement",
            "acceptance by the rule", "predicted conditional", "measured")  # fmt: skip
    return table(head, rows, "Teacher-forced quantities by position")


def steps(series: Sequence[Series]) -> Html:
    """From the formula to the prediction, one correction after the other."""
    rows = [
        [each.name, step["name"], number(step["value"]), step["text"]]
        for each in series
        for step in each.cell["prediction"]["steps"]
    ]
    head = ("", "step", "tokens a round", "what it adds")
    body = table(head, rows, "From the textbook formula to the prediction")
    return details("From the textbook formula to the prediction", body)


def best(series: Sequence[Series]) -> Html:
    """Acceptance length, and speed where costs are known, by the size of the drafts."""
    charts = []
    found = [(each, each.cell["prediction"]["best"]) for each in series]
    for kind, title in (("chains", "Chains"), ("trees", "Trees")):
        for wanted, unit in (("tau", "tokens a round"), ("tokens_per_second", "tokens/s")):
            lines = [
                Line(each.name, points, each.style)
                for each, table_ in found
                if (points := sizes_of(table_[kind], wanted))
            ]
            if lines:
                x = axis("draft tokens", [x for line in lines for x, _ in line.points], low=0.0)
                y = axis(unit, [y for line in lines for _, y in line.points])
                charts.append(line_chart(lines, x, y, f"{title}: predicted {unit}"))
    chosen = [
        tag("li", f"{each.name}: {_choice(table_['choice'])}") for each, table_ in found
        if table_["choice"]
    ]  # fmt: skip
    heading = tag("h3", "Which size to draft")
    listed = tag("ul", *chosen) if chosen else None
    return joined([heading, listed, tag("div", *charts, class_="charts pairs")])


def sizes_of(ways: Sequence[dict[str, Any]], wanted: str) -> list[tuple[float, float]]:
    """Draft tokens, and a predicted figure where there is one."""
    return [(way["size"] - 1, way[wanted]) for way in ways if way[wanted] is not None]


def _choice(choice: dict[str, Any]) -> str:
    if choice["drafts"] == "none":
        return "no drafts: plain decoding is fastest here"
    speed = number(choice["tokens_per_second"], 1)
    drafts = choice["size"] - 1
    kind = "chain" if choice["drafts"] == "chain" else f"{choice['drafts']} tree"
    return f"best by prediction and costs is a {kind} of {drafts} draft tokens, {speed} tokens/s"
