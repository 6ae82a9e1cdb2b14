"""What decoding will give, from one teacher-forced pass over texts of the target.

The texts are those of plain decoding at the same temperature. `inference.prediction.teacher` says
what a round at each position would accept, `inference.prediction.rounds` where rounds start. Where
the decoder must emit these very texts (temperature 0, rules `match` and `coupled`) the prediction
is a replay, round by round, and what differs is rounding or a fault. Where it draws texts of its
own, both are samples of the same law, and the intervals tell how far apart they may be.

    from inference.prediction.predict import Answer, predict
    prediction = predict(target, proposer, [Answer(prompt_ids, new_ids, 64, sampling)], "match")
    prediction.tau.value, prediction.to_dict()

Letters: K depths, m tokens that the rounds of a text emit, n requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from tqdm.auto import tqdm

from drafters import TargetModel
from inference.measuring.intervals import Estimate, ratio
from inference.prediction.choice import Best, best_sizes
from inference.prediction.formulas import Point, curves, expected_tokens, path_tokens
from inference.prediction.rounds import Walk, conditional_acceptance, pooled, walk
from inference.prediction.teacher import deepest, kind_of, look_at
from inference.prediction.text import MEASURES, Answer, Look
from inference.proposers import HeadProposer
from inference.scheduling.schedule import RoundCosts
from inference.verify import SAME_TOKENS

__all__ = ["Answer", "Prediction", "Setting", "predict"]


@dataclass(frozen=True)
class Setting:
    """What is predicted.

    Attributes:
        head: family.
        rule: of acceptance.
        temperature: of the sampling.
        proposal: how children are proposed ("one_hot", "dense", "coupled", "mixed").
        drafts: "chain", "static" or "grown".
        size: nodes of a tree, root included, at most.
        depth: longest path.
        branch: children of a node, at most.
        one_pass: the head drafts all depths in one pass.
    """

    head: str
    rule: str
    temperature: float
    proposal: str
    drafts: str
    size: int
    depth: int
    branch: int
    one_pass: bool

    @property
    def exact(self) -> bool:
        """Whether the decoder must go through the very rounds that are replayed."""
        return self.temperature == 0 or self.rule in SAME_TOKENS


@dataclass(frozen=True)
class Step:
    """One of the numbers between the textbook formula and the prediction."""

    name: str
    value: float
    text: str


@dataclass
class Prediction:
    """What decoding with this head will give.

    Attributes:
        setting: what is predicted.
        looks: one per text with more than one new token.
        costs: of rounds; None if unknown.
        arm: the head's name in ``costs``.
        comparison: with a decode, see `inference.prediction.alarms.compare`; None before one.
    """

    setting: Setting
    looks: list[Look]
    costs: RoundCosts | None = None
    arm: str = "head"
    comparison: dict[str, Any] | None = None

    @cached_property
    def walks(self) -> list[Walk]:
        """The rounds of each text."""
        return [walk(look.survival, look.depths) for look in self.looks]

    @cached_property
    def requests(self) -> dict[str, list[int]]:
        """Texts by request: turns of one conversation belong together."""
        found: dict[str, list[int]] = {}
        for place, look in enumerate(self.looks):
            found.setdefault(look.answer.id or f"text {place}", []).append(place)
        return found

    def pair(self, category: str | None = None) -> tuple[list[float], list[float]]:
        """Tokens and expected rounds of each request, of one category or all."""
        chosen = [
            places
            for places in self.requests.values()
            if category in (None, self.looks[places[0]].answer.category)
        ]
        tokens = [float(sum(self.walks[place].tokens for place in places)) for places in chosen]
        return tokens, [sum(self.walks[place].rounds for place in places) for places in chosen]

    @cached_property
    def tau(self) -> Estimate:
        """Tokens per target forward, bonus included, pooled over all rounds."""
        return ratio(*self.pair())

    @property
    def visits(self) -> list[list[float]]:
        """By text and position, how often rounds start there."""
        return [one.visits for one in self.walks]

    def measure(self, name: str, depth: int) -> tuple[Estimate, int]:
        """A mean over all positions at a depth from 1, and how many there were.

        Args:
            name: of `MEASURES`, or "acceptance" for that of the real drafts, over positions whose
                path above the depth was accepted.
            depth: from 1.
        """
        sums, counts = [], []
        for places in self.requests.values():
            looks = [self.looks[place] for place in places]
            if name == "acceptance":
                pairs = [conditional_acceptance(look.survival, look.depths) for look in looks]
                at = [(one, two) for one, two in pairs if len(two) >= depth]
                sums.append(sum(one[depth - 1] for one, _ in at))
                counts.append(sum(two[depth - 1] for _, two in at))
            else:
                rows = [row for look in looks for row in look.measures[name] if len(row) >= depth]
                sums.append(sum(row[depth - 1] for row in rows))
                counts.append(float(len(rows)))
        return ratio(sums, counts), round(sum(counts))

    @cached_property
    def conditional(self) -> list[float]:
        """By depth, c1, c2, ...: the acceptance of the real drafts at any position, their path
        accepted so far.
        """
        return self._rates(None)

    def _rates(self, weights: list[list[float]] | None) -> list[float]:
        accepted, reached = [0.0] * self.setting.depth, [0.0] * self.setting.depth
        for place, look in enumerate(self.looks):
            own = None if weights is None else weights[place]
            for depth, (one, two) in enumerate(
                zip(*conditional_acceptance(look.survival, look.depths, own), strict=True)
            ):
                accepted[depth] += one
                reached[depth] += two
        return [one / two if two else 0.0 for one, two in zip(accepted, reached, strict=True)]

    @property
    def alpha(self) -> float:
        """Mean acceptance of first drafts, over all positions."""
        return min(max(self.conditional[0], 0.0), 1.0)

    def steps(self) -> list[Step]:
        """From the formula of arXiv:2211.17192 to the prediction, one assumption less at a time."""
        depth = self.setting.depth
        found = [
            Step(
                "alpha formula",
                expected_tokens(self.alpha, depth),
                f"every draft accepted like a first one, alpha {self.alpha:.3f}",
            )
        ]
        if self.setting.drafts == "chain":
            alone = [
                [row[place] for look in self.looks for row in look.alone if len(row) > place]
                for place in range(depth)
            ]
            means = [sum(values) / len(values) if values else 0.0 for values in alone]
            text = "each depth as it is on average, given the text before it"
            found.append(Step("depths", path_tokens(means), text))
        return [
            *found,
            Step("paths", path_tokens(self.conditional), "given that the path was accepted"),
            Step(
                "round starts",
                path_tokens(self._rates(self.visits)),
                "at the positions where rounds start",
            ),
            Step(
                "text ends", self.tau.value, "rounds cut by the end of their text: the prediction"
            ),
        ]

    @cached_property
    def best(self) -> Best:
        """Other sizes, and the fastest one by the costs."""
        return best_sizes(
            self.looks,
            self.setting.depth,
            self.setting.branch,
            self.costs,
            self.arm,
            self.context,
            drawn=self.setting.proposal in ("dense", "mixed"),
        )

    @property
    def context(self) -> float:
        """Mean committed tokens at the positions looked at."""
        pairs = [(len(look.answer.prompt), len(look.survival)) for look in self.looks]
        positions = sum(m for _, m in pairs)
        return sum(m * (prompt + m / 2) for prompt, m in pairs) / positions

    @property
    def point(self) -> Point:
        """Where the head is among the curves."""
        measured = None if self.comparison is None else self.comparison["tau"]["value"]
        one_pass, depth = self.setting.one_pass, self.setting.depth
        cost = None
        if self.costs is not None:
            cost = self.costs.draft(self.arm, depth) / self.costs.verify(1, self.context)
            cost = cost if one_pass else cost / depth
        return Point(self.alpha, depth, self.tau.value, measured, cost, one_pass)

    # As plain values -----------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, the "prediction" of a cell of an evaluation run.

        An interval is {"value", "low", "high"}, 95 %, over requests; the ends are None below two.

        Returns:
            "format": 1. "configuration": the setting, and "rows" verified per round on average.
            "exact": see `Setting.exact`. "requests", "positions", "tokens": how many.
            "tau": interval of the predicted tokens per target forward, bonus included.
            "accepted_per_round": without it.
            "steps": {"name", "value", "text"} from the formula to "tau".
            "by_depth": {"depth"; intervals with "count": "overlap" 1 - 1/2 |p - q|, "p_of_draft" p
            of the draft's argmax, "agreement" of both argmaxes, all at any position given the text
            before it, and "acceptance" of the real drafts at any position, path accepted;
            "conditional" and "survival" as rounds meet them}.
            "law_temperature": of overlap and p_of_draft, 1 where the cell's is 0.
            "emitted_histogram": expected rounds by emitted tokens, from 0.
            "text": {"argmax_share", "surprise" mean -log p, "entropy" its expectation, "z"}.
            "by_category": {name: {"requests", "tau"}}.
            "per_request": {"id", "category", "turn", "emitted", "rounds"}.
            "curves": see `prediction.formulas.curves`, and "point".
            "best": see `prediction.choice.Best.to_dict`.
            "comparison": see `prediction.alarms.compare`; None before there is a decode.
        """
        positions = sum(one.tokens for one in self.walks)
        rounds, rows = (
            sum(one.rounds for one in self.walks),
            [v for k in self.looks for v in k.rows],
        )
        weights = [value for one in self.walks for value in one.visits]
        verified = sum(w * row for w, row in zip(weights, rows, strict=True)) / rounds
        greedy = self.setting.temperature == 0
        return {
            "format": 1,
            "configuration": {**asdict(self.setting), "rows": verified},
            "exact": self.setting.exact,
            "requests": len(self.requests),
            "positions": positions,
            "tokens": positions,
            "tau": self.tau.to_dict(),
            "accepted_per_round": sum(pooled(self.walks, "accepted")) / rounds,
            "steps": [vars(step) for step in self.steps()],
            "by_depth": self._by_depth(rounds),
            "law_temperature": 1.0 if greedy else self.setting.temperature,
            "emitted_histogram": pooled(self.walks, "emitted"),
            "text": self.text(),
            "by_category": self._by_category(),
            "per_request": [
                {
                    "id": look.answer.id,
                    "category": look.answer.category,
                    "turn": look.answer.turn,
                    "emitted": one.tokens,
                    "rounds": one.rounds,
                }
                for look, one in zip(self.looks, self.walks, strict=True)
            ],
            "curves": {
                **curves(max(self.setting.depth, 8), self.setting.one_pass),
                "point": self.point.to_dict(),
            },
            "best": self.best.to_dict(),
            "comparison": self.comparison,
        }

    def _by_depth(self, rounds: float) -> list[dict[str, Any]]:
        accepted, reached = pooled(self.walks, "accepted"), pooled(self.walks, "reached")
        found = []
        for depth in range(1, self.setting.depth + 1):
            one = accepted[depth - 1] if depth <= len(accepted) else 0.0
            two = reached[depth - 1] if depth <= len(reached) else 0.0
            row: dict[str, Any] = {"depth": depth}
            for name in (*MEASURES, "acceptance"):
                estimate, count = self.measure(name, depth)
                row[name] = {**estimate.to_dict(), "count": count}
            found.append(
                {**row, "conditional": one / two if two else None, "survival": one / rounds}
            )
        return found

    def text(self) -> dict[str, float | None]:
        """Whether the texts are the target's: at a temperature, -log p of their tokens is what is
        expected of draws from the law, and "z" says how many standard errors it is off.
        """
        m = sum(one.tokens for one in self.walks)
        off = sum(look.surprise - look.entropy for look in self.looks)
        spread = sum(look.variance for look in self.looks) ** 0.5
        sampled = self.setting.temperature > 0 and spread > 0
        return {
            "argmax_share": sum(look.best for look in self.looks) / m,
            "surprise": sum(look.surprise for look in self.looks) / m,
            "entropy": sum(look.entropy for look in self.looks) / m,
            "z": off / spread if sampled else None,
        }

    def _by_category(self) -> dict[str, dict[str, Any]]:
        found = {}
        for category in dict.fromkeys(look.answer.category for look in self.looks):
            tokens, rounds = self.pair(category)
            found[category] = {"requests": len(tokens), "tau": ratio(tokens, rounds).to_dict()}
        return found


def predict(
    target: TargetModel,
    proposer: HeadProposer,
    answers: Sequence[Answer],
    rule: str,
    *,
    costs: RoundCosts | None = None,
    arm: str = "head",
    sizes: Sequence[int] = (),
    progress: bool = False,
) -> Prediction:
    """Predict the decode of a cell.

    Args:
        target: the model.
        proposer: as it will decode; it is left alone.
        answers: texts of plain decoding at this cell's temperature, with its seeds.
        rule: of acceptance.
        costs: of rounds, for the choice of a size and tokens per second.
        arm: the head's name in them.
        sizes: further sizes of grown trees to try; drawn ones from one draw per position.
        progress: show a progress bar on a terminal.

    Raises:
        ValueError: nothing to look at, sizes of trees that are not grown, or a rule for which
            nothing is predicted.
    """
    options = proposer.options
    grown = options.shape is None
    if sizes and (not grown or min(sizes) < 2):
        raise ValueError("sizes: only grown trees have sizes to try, of at least 2 nodes")
    if not any(len(answer.tokens) > 1 for answer in answers):
        raise ValueError("answers: no text has a second new token: decode more of them")
    kind = kind_of(proposer, rule, answers[0].sampling)
    setting = Setting(
        proposer.drafter.family,
        rule,
        answers[0].sampling.temperature,
        kind.value,
        "chain" if proposer.chains else "grown" if grown else "static",
        options.size if options.shape is None else options.shape.num_nodes,
        deepest(proposer),
        options.top_k if options.shape is None else max(map(len, options.shape.children)),
        proposer.drafter.shape != "sequential",
    )
    shown = tqdm(answers, unit="text", desc="predict", disable=None if progress else True)
    looks = [
        look_at(target, proposer, answer, rule, sizes) for answer in shown if len(answer.tokens) > 1
    ]
    return Prediction(setting, looks, costs, arm)
