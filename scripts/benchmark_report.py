"""What `scripts.benchmark` reports of a cell: whose texts are plain decoding's, speeds, tables."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from drafters import TargetModel
from inference.measuring.compare import explain_difference
from inference.sampling import SamplingParams
from inference.scheduling.costs import CostTable
from scripts.benchmark_contenders import Contender
from scripts.benchmark_prediction import add_measured_speedups, prediction, print_predictions
from scripts.benchmark_protocol import Answer
from scripts.benchmark_race import Batch, Heat
from scripts.benchmark_statistics import PARTS, Measured, ratio, summarise
from scripts.common import decimal

PLAIN = ("plain", "ours", "plain-compiled")
"""Kinds whose texts the others are compared with, the first that there is."""


@dataclass
class Verdict:
    """One contender's texts beside those of plain decoding.

    Attributes:
        identical: texts that are equal.
        near_ties: texts that differ by rounding.
        differences: the first place of each text that differs.
    """

    identical: int = 0
    near_ties: int = 0
    differences: list[dict[str, Any]] = field(default_factory=list)

    @property
    def lossless(self) -> bool:
        """Whether rounding explains everything."""
        return self.near_ties == len(self.differences)


def reference_name(contenders: Sequence[Contender], heat: Heat, baseline: str) -> str | None:
    """Whose texts the others are compared with; None if nobody finished.

    Args:
        contenders: all.
        heat: who finished.
        baseline: taken where none decodes plainly, and the first of all without it.
    """
    plain = [
        one.name
        for kind in PLAIN
        for one in contenders
        if one.kind == kind and one.source is None and one.name in heat.answers
    ]
    others = [name for name in (baseline, *heat.answers) if name in heat.answers]
    return next(iter([*plain, *others]), None)


def judge(
    target: TargetModel,
    batches: Sequence[Batch],
    expected: Sequence[Answer],
    found: Sequence[Answer],
    tolerance: float,
) -> Verdict:
    """Compare texts.

    Args:
        target: says how far two tokens are from each other where texts part.
        batches: what was decoded.
        expected: plain decoding's.
        found: to judge.
        tolerance: gap in logits that rounding explains.
    """
    verdict = Verdict()
    for batch, theirs, ours in zip(batches, expected, found, strict=True):
        for prompt, right, text in zip(batch.prompts, theirs.tokens, ours.tokens, strict=True):
            where = explain_difference(target, prompt.ids, right, text, SamplingParams())
            if where is None:
                verdict.identical += 1
                continue
            near = where.gap is not None and where.gap < tolerance
            verdict.near_ties += near
            verdict.differences.append({"id": prompt.id, **asdict(where), "near_tie": near})
    return verdict


def measured(batches: Sequence[Batch], answers: Sequence[Answer]) -> list[Measured]:
    """Figures of each batch."""
    return [
        Measured(
            category=batch.category,
            tokens=sum(map(len, answer.tokens)),
            first=answer.first,
            seconds=answer.seconds,
            prefill=answer.prefill,
            parts=answer.parts,
            rounds=None if answer.rounds is None else sum(done[0] for done in answer.rounds),
            emitted=sum(done[3] for done in answer.rounds or ()),
        )
        for batch, answer in zip(batches, answers, strict=True)
    ]


def cell_record(
    target: TargetModel,
    contenders: Sequence[Contender],
    heat: Heat,
    baseline: str,
    tolerance: float,
    costs: CostTable | None,
    threads: Mapping[str, int | None] | None = None,
) -> dict[str, Any]:
    """All figures of a cell, as plain values.

    Args:
        target: the judge of texts.
        contenders: all.
        heat: what they did.
        baseline: name of the one that ratios are taken to.
        tolerance: gap in logits that rounding explains.
        costs: predicts speeds; None leaves that to what `--size auto` expects and has kept.
        threads: that contenders compute with, by name.
    """
    cell = heat.cell
    reference = reference_name(contenders, heat, baseline)
    verdicts = {
        name: judge(target, cell.batches, heat.answers[reference], answers, tolerance)
        for name, answers in heat.answers.items()
        if reference is not None
    }
    figures = {
        name: measured(cell.batches, answers)
        for name, answers in heat.answers.items()
        if verdicts[name].lossless
    }
    records = [
        {
            "name": one.name,
            "warm_up_seconds": heat.warm_up_seconds[one.name],
            **asdict(verdicts[one.name]),
            "excluded": not verdicts[one.name].lossless,
            **_figures(one, contenders, figures, baseline),
            **prediction(one, heat, costs, (threads or {}).get(one.name)),
        }
        for one in contenders
        if one.name in heat.answers
    ]
    add_measured_speedups(records, list(contenders))
    return {
        "batch_size": cell.batch_size,
        "context": cell.context,
        "batches": len(cell.batches),
        "dropped_prompts": cell.dropped,
        "baseline": baseline,
        "reference": reference,
        "contenders": records,
    }


def _figures(
    one: Contender,
    contenders: Sequence[Contender],
    figures: dict[str, list[Measured]],
    baseline: str,
) -> dict[str, Any]:
    """Speeds and ratios, overall and by category; nothing for one that is excluded."""
    own, other = figures.get(one.name), figures.get(baseline)
    if own is None:
        return {}
    partner = one.counterpart(contenders)
    theirs = None if partner is None else figures.get(partner.name)
    places: dict[str, list[int]] = {}
    for place, each in enumerate(own):
        places.setdefault(each.category, []).append(place)
    by_category = {
        category: summarise([own[p] for p in at], None if other is None else [other[p] for p in at])
        for category, at in places.items()
    }
    record = {**summarise(own, other), "by_category": by_category}
    if theirs is not None:
        assert partner is not None
        equal = ratio([each.whole_speed for each in own], [each.whole_speed for each in theirs])
        record["counterpart"] = {"name": partner.name, "whole_ratio": equal and equal.median}
    return record


# Tables -----------------------------------------------------------------------------------------


def print_cell(record: dict[str, Any]) -> None:
    """The tables of one cell."""
    context = record["context"] or "as the prompts are"
    head = f"\nbatch {record['batch_size']}, context {context}: {record['batches']} batches"
    print(f"{head}; ratios to {record['baseline']}, median and 95 % interval")
    wide = max([len("contender"), *(len(one["name"]) for one in record["contenders"])])
    columns = ("tok/s", "whole", "τ", "ratio", "interval", "whole", "possible", "reached")
    print(f"{'contender':<{wide}}" + _cells(columns) + f"{'texts':>14}")
    for one in record["contenders"]:
        count = one["identical"] + len(one["differences"])
        texts = f"{one['identical']}/{count} equal"
        if one["near_ties"]:
            texts = f"{one['identical']}+{one['near_ties']}/{count}"
        if one["excluded"]:
            print(f"{one['name']:<{wide}}  EXCLUDED: {_difference(one)}")
            continue
        print(f"{one['name']:<{wide}}" + _cells(_row(one)) + f"{texts:>14}")
    _print_equal(record, wide)
    _print_splits(record, wide)
    print_predictions(record["contenders"], wide)
    _print_categories(record, wide)


def _row(one: dict[str, Any]) -> list[str]:
    found, whole = one.get("ratio"), one.get("whole_ratio")
    interval = None if found is None else found["interval"]
    return [
        decimal(one["tokens_per_second"], 1),
        decimal(one["whole_tokens_per_second"], 1),
        decimal(one["acceptance_length"]),
        decimal(found and found["median"]),
        "-" if interval is None else f"{interval[0]:.2f}-{interval[1]:.2f}",
        decimal(whole and whole["median"]),
        decimal(one.get("possible_ratio")),
        decimal(one.get("reached")),
    ]


def _difference(one: dict[str, Any]) -> str:
    """The first text that differs by more than rounding."""
    first = next(where for where in one["differences"] if not where["near_tie"])
    count = len(one["differences"]) - one["near_ties"]
    gap = "no gap" if first["gap"] is None else f"gap {first['gap']:.2e}"
    what = f"{first['expected']} -> {first['found']}, {gap}"
    return f"{count} texts differ; prompt {first['id']}, new token {first['position']}: {what}"


def _print_equal(record: dict[str, Any], wide: int) -> None:
    """Ours beside transformers' decoder with the same drafts."""
    for one in record["contenders"]:
        if equal := one.get("counterpart"):
            times = decimal(equal["whole_ratio"])
            print(f"{one['name']:<{wide}}  {times} x {equal['name']}, whole calls, equal settings")


def _print_splits(record: dict[str, Any], wide: int) -> None:
    """Where the time of a step goes."""
    told = [one for one in record["contenders"] if one.get("split")]
    if not told:
        return
    names = [name for name in PARTS if any(name in one["split"] for one in told)]
    print(f"\n{'share of decoding':<{wide}}" + _cells(names))
    for one in told:
        cells = [f"{one['split'].get(name, 0):.1%}" for name in names]
        print(f"{one['name']:<{wide}}" + _cells(cells))


def _print_categories(record: dict[str, Any], wide: int) -> None:
    """Ratios of decoding by category."""
    told = [one for one in record["contenders"] if one.get("ratio")]
    names = list(dict.fromkeys(name for one in told for name in one["by_category"]))
    if len(names) < 2:
        return
    print(f"\n{'ratio by category':<{wide}}" + _cells(name[:11] for name in names))
    for one in told:
        found = [one["by_category"][name].get("ratio") for name in names]
        print(f"{one['name']:<{wide}}" + _cells(decimal(x and x["median"]) for x in found))


def _cells(texts: Any) -> str:
    return "".join(f"{text:>12}" for text in texts)
