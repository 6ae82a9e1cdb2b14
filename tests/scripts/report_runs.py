"""Run folders made up from a seed, in the format of `inference.measuring.run_records`, for tests of
reports.

Texts and trees are invented, everything counted is counted from them: tokens of a round, acceptance
by position, intervals. With `full=False` every optional part is missing.
"""

import random
from pathlib import Path
from typing import Any

from inference.measuring.compare import Difference, Reference
from inference.measuring.confidence import JudgedDrafts
from inference.measuring.evaluation_report import Prompt, Report, Request
from inference.measuring.run_records import RequestRecord, RoundRecord, Run, Trace, write_run

WORDS = (
    " the", " a", " of", " and", " draft", " head", " model", " target", " tokens", "\n", "\n\n",
    " is", " it", ",", ".", " verify", " step", "ing", "ed", " in", "  ", "\t", " 3", " =", " x",
    " return", "(", ")", ":", " faster", " than", " one", " row", "</script>", "<b>", " &amp;", "é",
)  # fmt: skip
CATEGORIES = ("writing", "coding", "math", "qa")


def made_run(
    folder: Path,
    *,
    seed: int = 0,
    head: str = "eagle3",
    temperatures: tuple[float, ...] = (0.0, 1.0),
    sizes: tuple[int | str, ...] = (6, "auto"),
    alpha: float = 0.72,
    requests: int = 8,
    traced: int = 3,
    full: bool = True,
    words: tuple[str, ...] = WORDS,
) -> Path:
    """Write a run; returns its folder."""
    dice = random.Random(seed)
    run = Run({"format": 1, "settings": {"prompts": "questions.jsonl", "max_new_tokens": 64}})
    cells = []
    for temperature in temperatures:
        for size in sizes:
            number = len(cells)
            maker = _Cell(dice, number, size, alpha - 0.12 * (temperature > 0), words)
            made = [maker.request(place, place < traced) for place in range(requests)]
            for request, rounds in made:
                run.requests.append(request)
                run.rounds.extend(rounds)
            cells.append(_numbers(made, temperature, size, full, alpha))
    run.result.update(
        target={
            "name": "targets/smollm2-135m",
            "fingerprint": {"config": "0123"},
            "dtype": "float32",
        },
        head={"name": f"outputs/{head}/head", "type": head, "parameters": 9_845_120},
        cells=cells,
        costs=_costs() if full else None,
        training=_training(dice, alpha) if full else None,
        versions={"torch": "2.13.0", "transformers": "5.24.0"},
        command="python -m scripts.evaluate --out RUN",
    )
    write_run(folder, run)
    return folder


class _Cell:
    """Rounds of one cell."""

    def __init__(self, dice, number, size, alpha, words):
        self.dice, self.number, self.size, self.alpha, self.words = dice, number, size, alpha, words

    def request(self, place: int, traced: bool) -> tuple[RequestRecord, list[RoundRecord]]:
        prompt = self.dice.choice((24, 60, 130, 300, 700))
        name = f"q{place + 1}"
        pieces = [self._word()]
        rounds: list[RoundRecord] = []
        wanted = self.dice.randint(40, 70)
        while len(pieces) < wanted:
            trace = self._tree(pieces[-1])
            ended = bool(trace.path) and len(pieces) + len(trace.path) >= wanted
            taken = [trace.pieces[node] for node in trace.path]
            new = taken + ([] if ended else [self._word()])
            rounds.append(
                RoundRecord(
                    self.number, name, 0, len(rounds), prompt + len(pieces), len(trace.tokens) - 1,
                    _deepest(trace), len(trace.tokens), len(trace.path),
                    [self._id(piece) for piece in new], ended, trace if traced else None,
                )
            )  # fmt: skip
            pieces += new
        tokens = [self._id(piece) for piece in pieces]
        return (
            RequestRecord(
                self.number, name, CATEGORIES[place % len(CATEGORIES)], 0, prompt, tokens, pieces,
                {"prefill": 0.02, "target": 0.5, "draft": 0.2, "total": 0.9},
                {"prefill": 0.02, "total": 1.4}, plain_tokens=len(tokens),
            ),
            rounds,
        )  # fmt: skip

    def _tree(self, last: str) -> Trace:
        parents = [-1]
        if isinstance(self.size, int):
            parents += range(self.size - 1)
        else:
            for node in range(self.dice.choice((3, 7, 12))):
                parents.append(self.dice.randint(max(0, node - 3), node))
        pieces = [last] + [self._word() for _ in parents[1:]]
        p, q, path, here = [None], [None], [], 0
        for node in range(1, len(parents)):
            p.append(round(self.dice.betavariate(2, 2), 6))
            q.append(round(self.dice.betavariate(2, 2), 6))
            if parents[node] == here and self.dice.random() < self.alpha:
                path.append(node)
                here = node
        return Trace([self._id(piece) for piece in pieces], pieces, parents, path, p, q)

    def _word(self) -> str:
        return self.dice.choice(self.words)

    def _id(self, piece: str) -> int:
        return self.words.index(piece)


def _deepest(trace: Trace) -> int:
    depths = [0]
    for parent in trace.parents[1:]:
        depths.append(depths[parent] + 1)
    return max(depths)


def _numbers(made, temperature: float, size: int | str, full: bool, alpha: float):
    greedy = temperature == 0
    requests = []
    for place, (record, rounds) in enumerate(made):
        tie = greedy and place == 2
        requests.append(
            Request(
                Prompt([0] * record.prompt_tokens, record.category, record.id),
                record.tokens,
                rounds,
                _judged(rounds) if full else JudgedDrafts(),
                record.seconds,
                Reference(record.tokens, 0.02, 1.4),
                Difference(17, 4, 9, 2.1e-6) if tie else None,
            )
        )
    report = Report(greedy, greedy, 1, [], requests)
    whole = report.to_dict()
    return {
        "temperature": temperature,
        "rule": "match",
        "size": size,
        "name": f"T={temperature:g} match size {size}",
        **whole,
        "options": {},
        "prediction": _prediction(whole, temperature, size, alpha) if full else None,
        "reliability": report.reliability(),
    }


def _judged(rounds: list[RoundRecord]) -> JudgedDrafts:
    """Predictions by depth alone, somewhat too sure of themselves."""
    judged = JudgedDrafts()
    for each in rounds:
        for depth in range(1, each.depth + 1):
            judged.predicted.append(0.88**depth)
            judged.survived.append(depth <= each.accepted)
            judged.chances.append(0.88)
            judged.accepted.append(depth <= each.accepted)
    return judged


def _costs() -> dict[str, Any]:
    key = {
        "cpu": "A CPU <model>", "threads": 1, "device": "cpu", "torch": "2.13.0",
        "dtype": "float32", "target": "config:0123", "engine": "eager", "drafters": "",
    }  # fmt: skip
    verify = [
        [rows, context, 1, 0.04 + 0.0016 * rows + 2e-6 * context * rows**0.5]
        for rows in (1, 2, 4, 6, 8, 12, 16, 24, 32)
        for context in (64, 512, 2048)
    ]
    draft = [["head", depth, 1, 1, 0.004 * depth] for depth in (1, 2, 4, 8)]
    return {"format": 1, "key": key, "verify": verify, "draft": draft, "rest": [[1, 0.002]],
            "buckets": []}  # fmt: skip


def _training(dice: random.Random, alpha: float) -> list[dict[str, Any]]:
    return [
        {
            "step": 50 * n,
            "tokens": 5000 * n,
            "loss": 2.1 + 4.0 * 0.8**n + 0.05 * dice.random(),
            "acceptance_length": None if n % 2 else 1 + 3 * alpha * (1 - 0.85**n),
        }
        for n in range(1, 31)
    ]


def _length(alpha: float, gamma: int) -> float:
    return sum(alpha**n for n in range(gamma + 1))


def _span(value: float, half: float = 0.06) -> dict[str, float]:
    return {"value": value, "low": value - half, "high": value + half}


def _prediction(whole: dict[str, Any], temperature: float, size: int | str, alpha: float):
    depth = size - 1 if isinstance(size, int) else 6
    rates = [max(alpha - 0.02 * n, 0.1) for n in range(depth)]
    measured = whole["acceptance_length"]
    tau = measured + 0.05
    alphas = [round(0.3 + 0.05 * n, 2) for n in range(14)]
    costs = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5]

    def speed(a: float, g: int, c: float) -> float:
        return _length(a, g) / (g * c + 1)

    def best(a: float, c: float) -> int:
        return max(range(16), key=lambda g: speed(a, g, c))

    chains = [{"drafts": "chain", "size": g + 1, "depth": g, "tau": _length(alpha, g),
               "tokens_per_second": 20 * speed(alpha, g, 0.1)}
              for g in range(1, 11)]  # fmt: skip
    trees = [{"drafts": "grown", "size": n, "depth": 6, "tau": 1 + 2.6 * (1 - 0.9**n),
              "tokens_per_second": 20 * (1 + 2.6 * (1 - 0.9**n)) / (1 + 0.04 * n)}
             for n in (4, 8, 12, 16, 24)]  # fmt: skip
    warning = {"cause": "sampler", "message": "The run drew with top-p 0.9, the pass without it."}
    return {
        "format": 1,
        "exact": temperature == 0,
        "tau": _span(tau),
        "accepted_per_round": tau - 1,
        "steps": [
            {"name": "alpha formula", "value": tau - 0.3, "text": "one alpha for all positions"},
            {"name": "overlaps", "value": tau - 0.1, "text": "each position its own"},
            {"name": "text ends", "value": tau, "text": "texts end within rounds"},
        ],
        "by_depth": [
            {
                "depth": n + 1,
                **{key: {**_span(rate, 0.02), "count": 200}
                   for key in ("overlap", "p_of_draft", "agreement", "acceptance")},
                "conditional": rate,
                "survival": alpha ** (n + 1),
            }
            for n, rate in enumerate(rates)
        ],
        "curves": {
            "alphas": alphas,
            "gammas": list(range(16)),
            "tokens": [[_length(a, g) for g in range(16)] for a in alphas],
            "costs": costs,
            "best_gamma": [[best(a, c) for c in costs] for a in alphas],
            "best_speedup": [[speed(a, best(a, c), c) for c in costs] for a in alphas],
            "point": {"alpha": alpha, "gamma": depth, "predicted": tau, "measured": measured,
                      "equivalent_alpha": alpha - 0.02, "cost": 0.1,
                      "best_gamma": best(alpha, 0.1), "speedup": speed(alpha, depth, 0.1)},
        },
        "best": {
            "chains": chains,
            "trees": trees,
            "plain_tokens_per_second": 20.0,
            "choice": chains[4],
        },
        "comparison": {
            "tau": _span(measured),
            "gap": _span(measured - tau, 0.04),
            "within": temperature == 0,
            "rounds_agree": None,
            "texts_differ": 0,
            "warnings": [] if temperature == 0 else [warning],
        },
    }  # fmt: skip
