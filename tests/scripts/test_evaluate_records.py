"""Every number of a result is computed again, from records.jsonl alone and by other means."""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from inference.measuring.intervals import figure, ratio
from inference.measuring.run_records import RECORDS
from scripts.conventions import main as conventions_main
from scripts.evaluate import main
from tests.scripts.heads import save_models

QUESTIONS = [
    {
        "question_id": n,
        "category": ("talk", "code")[n % 2],
        "turns": ["hello " * (12 * n + 1), "why?"],
    }
    for n in range(4)
]
NOT_IN_RECORDS = {"confidence_auc", "confidence_error"}
"""Need what the confidence output said of every draft, of which records keep nothing."""
SETTINGS = {
    "temperature", "rule", "size", "name", "options", "prediction", "reliability", "by_category",
    "simulated", "batch_size", "num_skipped",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("records")
    prompts = path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    command = [*save_models(path), "--prompts", str(prompts), "--out", str(path / "run")]
    grid = "--max-new-tokens 9 --temperature 0 1 --rule match rejection --size 6 --batch-size 2"
    assert main([*command, *grid.split()]) == 0
    return path / "run"


@pytest.fixture(scope="module")
def cells(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "result.json").read_text())["cells"]


@pytest.fixture(scope="module")
def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / RECORDS).read_text().splitlines()]


class Recount:
    """The numbers of some turns, from lines of records."""

    def __init__(self, lines: list[dict[str, Any]], cell: int, category: str | None) -> None:
        here = [line for line in lines if line["cell"] == cell]
        self.turns = [
            line
            for line in here
            if line["kind"] == "request" and category in (None, line["category"])
        ]
        keys = {(turn["id"], turn["turn"]) for turn in self.turns}
        self.rounds = [
            line for line in here if line["kind"] == "round" and (line["id"], line["turn"]) in keys
        ]
        self.questions = list(dict.fromkeys(turn["id"] for turn in self.turns))

    def of(self, question: str, turn: int | None = None) -> list[dict[str, Any]]:
        return [r for r in self.rounds if r["id"] == question and turn in (None, r["turn"])]

    def numbers(self) -> dict[str, Any]:
        rounds, turns = self.rounds, self.turns
        count, drafts = len(rounds), sum(r["draft_tokens"] for r in rounds)
        accepted, emitted = (
            sum(r["accepted"] for r in rounds),
            sum(len(r["emitted"]) for r in rounds),
        )
        deepest = range(1, max(r["depth"] for r in rounds) + 1)
        differences = [
            {"id": turn["id"], "turn": turn["turn"], **turn["difference"]}
            for turn in turns
            if turn["difference"]
        ]
        return {
            "acceptance_length": emitted / count,
            "accepted_per_round": accepted / count,
            "acceptance_rate": accepted / drafts,
            "num_drafts": count,
            "num_draft_tokens": drafts,
            "num_accepted_tokens": accepted,
            "num_emitted": emitted,
            "proposed_by_depth": [sum(r["depth"] >= k for r in rounds) for k in deepest],
            "accepted_histogram": [
                sum(r["accepted"] == n for r in rounds)
                for n in range(max(r["accepted"] for r in rounds) + 1)
            ],
            "acceptance_by_position": self.positions(deepest),
            "draft_tokens_per_round": drafts / count,
            "verify_width": fmean(r["width"] for r in rounds),
            "by_context": self.contexts(),
            "num_prompts": len(turns),
            "num_conversations": len(self.questions),
            "confidence_drafts": 0,
            "near_ties": sum(one["near_tie"] for one in differences),
            "differences": differences,
            **self.lengths(),
            **self.speeds(),
        }

    def pooled(self, top: Any, bottom: Any) -> tuple[float | None, list[float] | None]:
        above = [float(sum(map(top, self.of(name)))) for name in self.questions]
        below = [float(sum(map(bottom, self.of(name)))) for name in self.questions]
        return (sum(above) / sum(below) if any(below) else None), ratio(above, below).interval

    def positions(self, deepest: Sequence[int]) -> dict[str, Any]:
        survival = [self.pooled(lambda r, k=k: r["accepted"] >= k, lambda r: 1) for k in deepest]
        conditional = [
            self.pooled(
                lambda r, k=k: r["accepted"] >= k,
                lambda r, k=k: r["depth"] >= k and r["accepted"] >= k - 1,
            )
            for k in deepest
        ]
        return {
            "survival": [value for value, _ in survival],
            "survival_interval": [ends for _, ends in survival],
            "conditional": [value for value, _ in conditional],
            "conditional_interval": [ends for _, ends in conditional],
        }

    def contexts(self) -> list[dict[str, Any]]:
        found = []
        for start, end in ((0, 128), (128, 256), (256, 512)):
            here = [r for r in self.rounds if start <= r["context"] < end]
            if here:
                deepest = range(1, max(r["depth"] for r in here) + 1)
                found.append(
                    {
                        "from": start,
                        "to": end,
                        "num_drafts": len(here),
                        "acceptance_length": fmean(len(r["emitted"]) for r in here),
                        "accepted_per_round": fmean(r["accepted"] for r in here),
                        "survival": [fmean(r["accepted"] >= k for r in here) for k in deepest],
                    }
                )
        return found

    def lengths(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, count in (
            ("acceptance_length", lambda r: len(r["emitted"])),
            ("accepted", lambda r: r["accepted"]),
        ):
            pooled = name if name == "acceptance_length" else "accepted_per_round"
            found[f"{pooled}_interval"] = self.pooled(count, lambda r: 1)[1]
            means: dict[str, list[float]] = {}
            for turn in self.turns:
                if rounds := self.of(turn["id"], turn["turn"]):
                    means.setdefault(turn["id"], []).append(fmean(map(count, rounds)))
            sums, numbers = (
                [sum(m) for m in means.values()],
                [float(len(m)) for m in means.values()],
            )
            found[f"{name}_per_request"] = sum(sums) / sum(numbers)
            found[f"{name}_per_request_interval"] = ratio(sums, numbers).interval
        return found

    def speeds(self) -> dict[str, Any]:
        def total(value: Any) -> list[float]:
            return [sum(value(t) for t in self.turns if t["id"] == name) for name in self.questions]

        names = ("prefill", "target", "draft", "round", "total")
        seconds = {name: sum(t["seconds"].get(name, 0.0) for t in self.turns) for name in names}
        seconds["other"] = (
            seconds["total"] - seconds["target"] - seconds["draft"] - seconds["round"]
        )
        behind, plainly = (lambda t: len(t["tokens"]) - 1), (lambda t: t["plain_tokens"] - 1)
        columns = [
            total(behind),
            total(lambda t: t["seconds"]["total"]),
            total(plainly),
            total(lambda t: t["plain_seconds"]["total"]),
        ]
        tokens, time, plain, plain_time = map(sum, columns)
        plain_prefill = sum(t["plain_seconds"]["prefill"] for t in self.turns)
        turns = len(self.turns)
        whole = (tokens + turns) / (time + seconds["prefill"])
        plain_whole = (plain + turns) / (plain_time + plain_prefill)
        return {
            "tokens_per_second": tokens / time,
            "plain_tokens_per_second": plain / plain_time,
            "speedup": tokens / time / (plain / plain_time),
            "speedup_interval": figure(
                columns, lambda s: (s[:, 0] / s[:, 1]) / (s[:, 2] / s[:, 3])
            ).interval,
            "speedup_with_prefill": whole / plain_whole,
            "seconds": seconds,
            "other_share": seconds["other"] / seconds["total"],
        }


def same(found: Any, expected: Any, where: str) -> None:
    """Equal but for rounding, all the way down."""
    if isinstance(expected, dict):
        assert isinstance(found, dict) and found.keys() == expected.keys(), where
        for key in expected:
            same(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list):
        assert isinstance(found, list) and len(found) == len(expected), where
        for place, pair in enumerate(zip(found, expected, strict=True)):
            same(*pair, f"{where}[{place}]")
    else:
        close = None if expected is None else pytest.approx(expected, rel=1e-9, abs=1e-12)
        assert found == close, where


@pytest.mark.parametrize("cell", range(3))
def test_every_number_follows_from_the_records(
    cells: list[dict[str, Any]], lines: list[dict[str, Any]], cell: int
) -> None:
    assert len(cells) == 3
    recounted = Recount(lines, cell, None).numbers()
    own = {"identical", "greedy_identical"}
    assert cells[cell].keys() == recounted.keys() | SETTINGS | NOT_IN_RECORDS | own
    same({key: cells[cell][key] for key in recounted}, recounted, "all")
    promised = cells[cell]["rule"] == "match" or cells[cell]["temperature"] == 0
    assert cells[cell]["identical"] == (not recounted["differences"] if promised else None)
    for category, found in cells[cell]["by_category"].items():
        recounted = Recount(lines, cell, category).numbers()
        del recounted["near_ties"], recounted["differences"]
        assert found.keys() == recounted.keys() | NOT_IN_RECORDS
        same({key: found[key] for key in recounted}, recounted, category)


def test_there_is_something_to_count(cells: list[dict[str, Any]]) -> None:
    """Turns, several contexts, accepted drafts, texts of other lengths than plain ones."""
    for cell in cells:
        assert (cell["num_prompts"], cell["num_conversations"]) == (8, 4)
        assert len(cell["by_context"]) > 1 and cell["num_accepted_tokens"] > 0
        assert cell["speedup_interval"] is not None


def test_the_numbers_of_others(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    conventions_main([str(folder)])
    out = capsys.readouterr().out
    found = json.loads(out.splitlines()[-1])["cells"]
    result = json.loads((folder / "result.json").read_text())["cells"]
    for one, cell in zip(found, result, strict=True):
        assert one["name"] == cell["name"]
        assert one["acceptance_length"] == pytest.approx(cell["acceptance_length"])
        assert one["speed_bench_average_al"] == pytest.approx(cell["acceptance_length_per_request"])
        assert one["eagle_n_alpha"] is None  # trees
    assert "- eagle_n_alpha: n-alpha is defined on chains" in out
    value = found[0]["sglang_accept_length"]
    assert f"sglang_accept_length                {value:.3f}" in out
