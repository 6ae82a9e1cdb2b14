"""Prediction beside decode, for the cells of an evaluation: what `--predict` calls and prints."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from drafters import TargetModel
from inference.measuring.evaluation import Report, Request, request_seed
from inference.prediction.alarms import Decoded, compare
from inference.prediction.predict import Answer, Prediction, predict
from inference.proposers import HeadProposer, Proposer
from inference.sampling import SamplingParams
from inference.scheduling.auto import AutoProposer
from inference.scheduling.costs import CostTable
from inference.scheduling.schedule import RoundCosts
from inference.verify import RULES
from scripts.common import decimal
from scripts.evaluate_grid import GridCell

ARM = "head"
"""The head's name in the cost tables of `--size auto`."""
SIZES = (4, 8, 16, 32, 64)
"""Smaller grown trees that are tried where costs are known."""


def add_predictions(
    target: TargetModel,
    grid: Sequence[GridCell],
    reports: Sequence[Report],
    cells: Sequence[dict[str, Any]],
) -> None:
    """Fill in "prediction" of every cell that has one, and say why the others have none.

    Args:
        target: the model.
        grid: the cells.
        reports: what they measured.
        cells: their results, which are changed.
    """
    autos = [one.cell.proposer for one in grid if isinstance(one.cell.proposer, AutoProposer)]
    costs = next((auto.costs for auto in autos if knows(auto.costs, ARM)), None)
    for one, report, cell in zip(grid, reports, cells, strict=True):
        proposer, rule = one.cell.proposer, one.cell.rule
        answers, decoded = texts_of(report.requests, one.cell.sampling, one.args.max_new_tokens)
        why = why_not(proposer, rule, answers)
        if why is not None:
            print(f"note: {cell['name']}: no prediction: {why}")
            continue
        assert isinstance(proposer, HeadProposer)
        found = predict_texts(
            target, proposer, answers, decoded, rule, identical=report.identical, costs=costs
        )
        cell["prediction"] = found.to_dict()


def predict_texts(
    target: TargetModel,
    proposer: HeadProposer,
    answers: Sequence[Answer],
    decoded: Sequence[Decoded],
    rule: str,
    *,
    identical: bool | None = None,
    costs: RoundCosts | None = None,
    arm: str = ARM,
) -> Prediction:
    """Predict what was decoded, and compare.

    Args:
        target: the model.
        proposer: that decoded.
        answers: plain texts.
        decoded: the same requests with drafts; none for a prediction alone.
        rule: of acceptance.
        identical: whether the output is plain decoding's; None if unknown.
        costs: of rounds, for tokens per second.
        arm: the head's name in them.
    """
    options = proposer.options
    grown = costs is not None and options.shape is None and not proposer.chains
    sizes = [size for size in SIZES if grown and size < options.size]
    found = predict(
        target, proposer, answers, rule, costs=costs, arm=arm, sizes=sizes, progress=True
    )
    if decoded:
        compare(found, decoded, identical)
    return found


def why_not(proposer: Proposer, rule: str, answers: Sequence[Answer]) -> str | None:
    """Why a cell has no prediction; None if it has one.

    Args:
        proposer: that decodes.
        rule: of acceptance.
        answers: plain texts.
    """
    if not isinstance(proposer, HeadProposer):
        return f"heads are predicted, not {type(proposer).__name__}"
    if rule not in RULES:
        return f"rule {rule!r} changes the output"
    if not any(len(answer.tokens) > 1 for answer in answers):
        return "no plain text has a second token, where rounds begin: raise --max-new-tokens"
    if rule == "block" and proposer.options.min_survival:
        return "under rule 'block' drafts cut by confidence are not predicted"
    return None


def texts_of(
    requests: Sequence[Request], sampling: SamplingParams, max_new_tokens: int
) -> tuple[list[Answer], list[Decoded]]:
    """The plain texts to predict from, and the decoded ones to compare with.

    Args:
        requests: measured, with references. Those of one id are turns of one conversation.
        sampling: of all of them; each has a seed of its own.
        max_new_tokens: per text.
    """
    answers, decoded = [], []
    for number, request in enumerate(requests):
        prompt = request.prompt
        name = prompt.id or f"request {number}"
        decoded.append(Decoded(name, request.tokens, request.emitted, prompt.turn))
        if request.reference is not None:
            own = replace(sampling, seed=request_seed(sampling.seed, prompt))
            tokens, ids = request.reference.tokens, list(prompt.ids)
            answers.append(
                Answer(ids, tokens, max_new_tokens, own, name, prompt.category, prompt.turn)
            )
    return answers, decoded


def knows(table: CostTable, arm: str) -> bool:
    """Whether a cost table has the head's drafting."""
    return any(name == arm for name, _, _, _ in table.draft_points)


# Printing ---------------------------------------------------------------------------------------


def print_prediction(cell: dict[str, Any]) -> None:
    """Prediction and decode of a cell side by side, and warnings."""
    found = cell["prediction"]
    measured = cell.get("acceptance_by_position")
    print("\n" + "\n".join(prediction_lines(found, measured)), flush=True)


def prediction_lines(
    record: dict[str, Any], measured: dict[str, list[float | None]] | None = None
) -> list[str]:
    """The table.

    Args:
        record: `Prediction.to_dict()`.
        measured: "conditional" and "survival" by position, of the decode; None if unknown.
    """
    shape, compared = record["configuration"], record["comparison"]
    lines = [
        f"prediction: {shape['head']}, {shape['drafts']} of {shape['size']} nodes, depth "
        f"{shape['depth']}, rule {shape['rule']}, temperature {shape['temperature']:g}, "
        f"{shape['proposal']} drafts; {record['requests']} requests, {record['positions']} "
        "positions",
        f"  {'tokens per round, predicted':<30}{_interval(record['tau'])}",
    ]
    if compared is not None:
        ends = compared["alarm"]
        drawn = compared["rounds_agree"] is None and ends["low"] is not None
        beyond = f"; 99 %: [{ends['low']:+.3f}, {ends['high']:+.3f}]" if drawn else ""
        beyond += "" if compared["within"] else "  BEYOND ITS INTERVAL"
        lines += [
            f"  {'tokens per round, measured':<30}{_interval(compared['tau'])}",
            f"  {'measured - predicted':<30}{_interval(compared['gap'], '+')}{beyond}",
        ]
        if compared["rounds_agree"] is not None:
            lines.append(
                f"  {'rounds as predicted':<30}{compared['rounds_agree']:.1%}; texts that differ: "
                f"{compared['texts_differ']}"
            )
    lines += _depth_lines(record, measured)
    lines.append("  from the formula to the prediction, tokens per round:")
    lines += [f"    {step['value']:6.3f}  {step['text']}" for step in record["steps"]]
    lines += [_text_line(record["text"]), *_best_lines(record["best"])]
    for warning in [] if compared is None else compared["warnings"]:
        lines.append(f"WARNING, {warning['cause']}: {warning['message']}")
    return lines


def _depth_lines(
    record: dict[str, Any], measured: dict[str, list[float | None]] | None
) -> list[str]:
    rows = record["by_depth"]
    columns: dict[str, list[float | None]] = {
        label: [row[name]["value"] for row in rows]
        for name, label in (
            ("overlap", "overlap 1 - |p-q|/2"),
            ("p_of_draft", "p of likeliest draft"),
            ("agreement", "argmax agreement"),
            ("acceptance", "accepted, any position"),
        )
    }
    for name in ("conditional", "survival"):
        columns[f"{name}, predicted"] = [row[name] for row in rows]
        if measured is not None:
            rates = measured[name]
            columns[f"{name}, measured"] = [*rates, *[None] * (len(rows) - len(rates))]
    lines = [f"  {'depth':<26}" + "".join(f"{row['depth']:>8}" for row in rows)]
    return lines + [
        f"  {label:<26}" + "".join(f"{decimal(value, 3):>8}" for value in values)
        for label, values in columns.items()
    ]


def _text_line(text: dict[str, Any]) -> str:
    line = f"  texts: {text['argmax_share']:.1%} of tokens are the target's likeliest"
    if text["z"] is None:
        return line
    line += f"; -log p {text['surprise']:.2f}, expected {text['entropy']:.2f}"
    return line + f" ({text['z']:+.1f} standard errors)"


def _best_lines(best: dict[str, Any]) -> list[str]:
    ways = [
        f"{way['drafts']} {way['depth'] if way['drafts'] == 'chain' else way['size']}: "
        f"{way['tau']:.2f}" + _speed(way["tokens_per_second"])
        for way in [*best["chains"], *best["trees"]]
    ]
    lines = ["  predicted by size (static trees are fitted to these texts): " + ", ".join(ways)]
    way = best["choice"]
    if way is not None:
        lines.append(
            f"  fastest by the costs: {way['drafts']}, {way['size']} nodes, depth {way['depth']}"
            f"{_speed(way['tokens_per_second'])}; plain{_speed(best['plain_tokens_per_second'])}"
        )
    return lines


def _speed(value: float | None) -> str:
    return "" if value is None else f" ({value:.1f} tokens/s)"


def _interval(value: dict[str, float | None], sign: str = "") -> str:
    if value["value"] is None or value["low"] is None:
        return decimal(value["value"], 3)
    return f"{value['value']:{sign}.3f}  [{value['low']:{sign}.3f}, {value['high']:{sign}.3f}]"
