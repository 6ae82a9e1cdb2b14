"""The part of `scripts.calibrate` that is about a head's confidence output.

One pass of the head's training objective over answers of the target gives thousands of rounds of
drafting with exact labels: what the rule that the head is served with would do with a draft at each
position, given that the answer's own tokens were accepted before it. Under greedy decoding and
answers the product of the labels is whether the target would have accepted the whole chain; with
drawn drafts it is the chance of that along the answer.

Legend: T tokens of a row, n rounds, K depths, c rounds at once, Vd draft vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafters import Drafter, TargetModel
from inference.measuring.confidence import (
    Calibration,
    Threshold,
    auc,
    expected_calibration_error,
    fit_calibration,
    predicted_survival,
    survival_error,
    threshold_sweep,
)
from inference.proposers.laws import draft_law
from inference.sampling import SamplingParams, probabilities
from training.data.batches import collate
from training.data.chat import MaskError, TokenizedRow, encode_row
from training.data.sources import load_rows
from training.features import TargetBatch, run_target
from training.losses import overlap
from training.objectives import Objective, ObjectiveOptions, build_objective
from training.objectives.rounds import possible_roots

AT_ONCE = 128
"""Rounds whose vocabulary-sized tensors are alive at once, and blocks drafted at once."""
THRESHOLDS = tuple(step / 10 for step in range(10))
"""Of the sweep."""


@dataclass(frozen=True)
class Rounds:
    """Teacher-forced rounds of drafting.

    Attributes:
        logits: (n, K) of the confidence output.
        labels: (n, K) in [0, 1], the chance that the draft at each depth is accepted.
        valid: (n, K) whether the answer reaches that far.
    """

    logits: Tensor
    labels: Tensor
    valid: Tensor

    @classmethod
    def joined(cls, parts: Sequence["Rounds"]) -> "Rounds":
        """All rounds of several."""
        fields = ("logits", "labels", "valid")
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in fields))


@dataclass(frozen=True)
class ConfidenceReport:
    """A calibration, and what it does to rounds that it was not fitted on.

    Attributes:
        calibration: per depth.
        fitted_on, held_out: rounds.
        mean: per depth, the share of drafts accepted if those before them are. Like the next two it
            is taken over the rounds that get there: each counts as much as it survives so far.
        auc: per depth, of c_k; the same before and after.
        single: per depth, calibration error of c_k before and after.
        product: per depth, calibration error of the cumulative product before and after.
        sweep: what thresholds on the calibrated product keep.
    """

    calibration: Calibration
    fitted_on: int
    held_out: int
    mean: list[float]
    auc: list[float]
    single: tuple[list[float], list[float]]
    product: tuple[list[float], list[float]]
    sweep: list[Threshold]


def build_teacher(drafter: Drafter, depth: int) -> Objective:
    """The head's training objective, for passes without gradients.

    Args:
        drafter: attached.
        depth: steps of a recursive head; others have a depth of their own.
    """
    options = ObjectiveOptions(steps=depth if drafter.num_drafts is None else None)
    return build_objective(drafter, options).eval()


def load_answers(path: str, target: TargetModel, limit: int | None = None) -> list[TokenizedRow]:
    """Rows as training takes them, cut to what fits the target.

    Args:
        path: JSONL with `prompt_ids` and `answer_ids`, `messages` or `text` in each line.
        target: its tokenizer and length.
        limit: use the first so many.

    Raises:
        ValueError: nothing there, or a row without an exact mask; the message names it.
    """
    rows = []
    for number, row in enumerate(load_rows(path, limit=limit), start=1):
        try:
            encoded = encode_row(target.tokenizer, row)
        except MaskError as error:
            raise MaskError(f"--answers {path}, row {number}: {error}") from error
        rows.append(cut_row(encoded, target.max_length))
    return rows


def cut_row(row: TokenizedRow, length: int) -> TokenizedRow:
    """At most so many tokens of it."""
    return TokenizedRow(row.ids[:length], row.supervised[:length])


@torch.no_grad()
def forced_rounds(
    objective: Objective,
    row: TokenizedRow,
    draft_temperature: float,
    sampling: SamplingParams | None = None,
) -> Rounds:
    """Every round of drafting that decoding this answer could start with.

    Args:
        objective: of the head.
        row: an answer of the target.
        draft_temperature: factor on the temperature of drawn drafts, as served.
        sampling: temperature and warpers of both laws, as served; None is the temperature that the
            head was trained for. "agreement" has no laws.
    """
    drafter, target = objective.drafter, objective.drafter.target
    batch = collate([[row]], len(row.ids)).to(target.device)
    data = run_target(target, batch, drafter.feature_layers)
    roots = possible_roots(batch)[0].nonzero().squeeze(-1)
    sampling = sampling or SamplingParams(drafter.config.confidence_at)
    reach = roots[:, None] + torch.arange(1, objective.depths + 1, device=roots.device)
    inside = reach < len(row.ids)
    supervised = batch.supervised[0][reach.clamp_max(len(row.ids) - 1)]
    valid = (inside & supervised).cumprod(1).bool()
    # heads that draft from every row have one pass for all rounds, others a block for each
    size = AT_ONCE if drafter.shape == "block" else max(1, len(roots))
    parts: list[Rounds] = []
    for some, kept in zip(roots.split(size), valid.split(size), strict=True):
        hidden = torch.stack(objective.forced(data, some), 1)  # (c, K, output_size)
        for rows, places, right in zip(
            hidden.split(AT_ONCE), some.split(AT_ONCE), kept.split(AT_ONCE), strict=True
        ):
            parts.append(_judge(objective, data, rows, places, right, draft_temperature, sampling))
    if not parts:
        empty = torch.zeros(0, objective.depths)
        return Rounds(empty, empty, empty.bool())
    return Rounds.joined(parts)


def _judge(
    objective: Objective,
    data: TargetBatch,
    hidden: Tensor,
    roots: Tensor,
    valid: Tensor,
    draft_temperature: float,
    sampling: SamplingParams,
) -> Rounds:
    """Confidence and labels of some rounds.

    Args:
        objective: of the head.
        data: of the one document.
        hidden: (c, K, output_size).
        roots: (c,) columns a; the target's row a+k predicts the token of depth k.
        valid: (c, K).
        draft_temperature, sampling: see `forced_rounds`.
    """
    drafter, target = objective.drafter, objective.drafter.target
    assert drafter.confidence is not None
    depths, rule = objective.depths, drafter.config.confidence_rule
    ahead = torch.arange(depths, device=roots.device)
    columns = (roots[:, None] + ahead).clamp_max(data.last_hidden.shape[1] - 1)
    columns, place = columns.unique(return_inverse=True)
    theirs = target.project(data.last_hidden[0, columns].to(target.dtype))  # (rows, V)
    best, p = theirs.argmax(-1), probabilities(theirs, sampling)
    if drafter.draft_vocab is not None:
        p = p[:, drafter.draft_vocab]  # (rows, Vd), not renormalised
    logits, labels = [], []
    for depth in range(depths):
        rows, row = hidden[:, depth], place[:, depth]
        drafted = objective.logits(rows, depth)
        first = drafted.argmax(-1)
        if rule == "agreement":
            judged = (drafter.to_target_ids(first) == best[row]).to(p)
        elif rule == "draft_mass":
            judged = p[row, first]
        else:
            judged = overlap(probabilities(drafted, draft_law(sampling, draft_temperature)), p[row])
        logits.append(drafter.confidence(rows).cpu())
        labels.append(judged.cpu())
    return Rounds(torch.stack(logits, 1), torch.stack(labels, 1), valid.cpu())


def calibrate_confidence(parts: Sequence[Rounds]) -> ConfidenceReport:
    """Fit on every other conversation, and measure on the rest.

    Args:
        parts: the rounds of each conversation.

    Raises:
        ValueError: too few conversations, or none with a round of drafting in one of the halves.
    """
    halves = [list(parts[start::2]) for start in range(2)]
    if not all(sum(len(part.logits) for part in half) for half in halves):
        raise ValueError(
            "too few answers to calibrate a confidence output: it is fitted on every other answer "
            "and measured on the rest, so two are needed, of two tokens or more"
        )
    fitted, other = (Rounds.joined(half) for half in halves)
    found = fit_calibration(fitted.logits, fitted.labels, fitted.valid)
    given = (found.temperatures, found.biases)
    singles = [_single(other, depth, found) for depth in range(other.logits.shape[1])]
    predicted = predicted_survival(other.logits, *given)
    return ConfidenceReport(
        found,
        len(fitted.logits),
        len(other.logits),
        [single["mean"] for single in singles],
        [single["auc"] for single in singles],
        ([single["before"] for single in singles], [single["after"] for single in singles]),
        (
            survival_error(other.logits, other.labels, other.valid),
            survival_error(other.logits, other.labels, other.valid, *given),
        ),
        threshold_sweep(predicted, other.labels, other.valid, THRESHOLDS),
    )


def _single(rounds: Rounds, depth: int, found: Calibration) -> dict[str, float]:
    """Figures of the drafts at one depth, given that those before were accepted."""
    rows = rounds.valid[:, depth]
    logits, labels = rounds.logits[rows, depth].double(), rounds.labels[rows, depth].double()
    reached = rounds.labels[rows, :depth].double().prod(1)  # 1 at depth 0
    before, after = (
        expected_calibration_error(chances, labels, weights=reached)
        for chances in (logits.sigmoid(), found.apply(logits, depth))
    )
    total = float(reached.sum())
    mean = float((reached * labels).sum()) / total if total else math.nan
    return {"mean": mean, "auc": auc(logits, labels, reached), "before": before, "after": after}
