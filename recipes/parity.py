"""Do training and decoding compute the same thing? Checked on the real target before the first
optimizer step.

The training pass sees a whole document at once, teacher-forced. The decoding pass goes through the
KV cache with reversion, in rounds that append a tree with a wrong branch and commit one path, and
through the head's own draft cache step by step. On the same prefix both must give the same draft
logits; every off-by-one, stale cache or wrong rotary position shows here, before any compute is
spent (arXiv:2503.01840's heads are known to suffer from all three).

Legend: T tokens of the document, K depths, n rows, Vd draft vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from drafters import TargetModel
from inference.append import append_rows
from inference.cache import TreeCache
from inference.proposers import HeadProposer, RowState, build_proposer
from inference.sampling import SamplingParams
from inference.tree import ancestor_mask
from training.data.batches import collate
from training.data.chat import TokenizedRow
from training.features import TargetBatch, run_target
from training.objectives import Objective

TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-3, torch.bfloat16: 2e-2, torch.float16: 1e-2}
"""Largest logit difference relative to the largest logit, by dtype of the target."""
FEATURE_TOLERANCE = {**TOLERANCE, torch.bfloat16: 8e-2, torch.float16: 2e-2}
"""Difference of the target's hidden states relative to their size, both as root mean squares."""


class ParityError(ValueError):
    """Training-pass and decode-pass logits differ."""


@dataclass(frozen=True)
class ParityReport:
    """Outcome of the check.

    Attributes:
        error: largest difference of draft logits, relative to the largest logit, both passes having
            the same hidden states.
        feature_error: difference of the hidden states that the two passes of the target gave.
        tolerance: what was allowed of ``error``.
        positions: draft positions compared, over all depths.
    """

    error: float
    feature_error: float
    tolerance: float
    positions: int


@torch.no_grad()
def check_parity(
    target: TargetModel,
    objective: Objective,
    row: TokenizedRow,
    max_tokens: int = 96,
    proposer: HeadProposer | None = None,
) -> ParityReport:
    """Compare both passes on one document.

    First the hidden states of the target's own two passes; then, from the same hidden states, the
    head's logits. So the rounding of a 16-bit target does not hide what the head does.

    Args:
        target: the teacher.
        objective: the head's objective, not yet prepared.
        row: a document; its first ``max_tokens`` tokens are used.
        max_tokens: limit.
        proposer: the decoding side; None builds the family's own.

    Raises:
        ParityError: either above tolerance.
        ValueError: the document is too short to compare anything.
    """
    ids = row.ids[:max_tokens]
    if len(ids) < objective.depths + 6:
        raise ValueError(f"parity: the document has only {len(ids)} tokens; a longer row is needed")
    was_training = objective.training
    objective.eval()
    proposer = proposer or build_proposer(objective.drafter)
    batch = collate([[TokenizedRow(ids, [True] * len(ids))]], len(ids)).to(target.device)
    data = run_target(target, batch, objective.drafter.feature_layers)
    states = list(decode_rounds(target, ids, proposer.feature_layers))
    feature_error = _compare_features(data, states)
    decoded = list(_decode_logits(proposer, data, states, ids, objective.depths))
    roots = torch.tensor([root for root, _ in decoded], device=target.device)
    hidden = objective.forced(data, roots)  # K x (n, output_size)
    training = [objective.logits(rows, depth).double() for depth, rows in enumerate(hidden)]
    objective.train(was_training)
    differences, largest = [torch.zeros(())], 1e-9
    for place, (_, rows) in enumerate(decoded):
        for depth, logits in enumerate(rows):
            expected = training[depth][place]
            differences.append((expected - logits.double()).abs().max().cpu())
            largest = max(largest, expected.abs().max().item())
    tolerance = TOLERANCE[target.dtype]
    worst = torch.stack([value.double() for value in differences]).max().item()  # NaN stays NaN
    report = ParityReport(worst / largest, feature_error, tolerance, len(differences) - 1)
    if not feature_error <= FEATURE_TOLERANCE[target.dtype]:
        raise ParityError(
            f"training and decoding disagree: the target's hidden states differ by "
            f"{feature_error:.3g} (allowed {FEATURE_TOLERANCE[target.dtype]}) between a whole pass "
            "and decoding with its cache; its attention implementation or its cache is at fault"
        )
    if not report.error <= tolerance:
        raise ParityError(
            f"training and decoding disagree: draft logits differ by {report.error:.3g} of the "
            f"largest logit (allowed {tolerance}). Heads trained like this would have a useless "
            "acceptance length; the pairing, the masks or the draft caches are at fault"
        )
    return report


def _compare_features(data: TargetBatch, states: list[RowState]) -> float:
    """Root mean square of what the hidden states differ by, relative to theirs; the worst of the
    captured layers together and the last hidden state.
    """
    rows = slice(0, len(states[-1].tokens) - 1)
    pairs = [(data.last_hidden[0, rows], torch.cat([state.hidden for state in states]))]
    captured = [state.features for state in states if state.features is not None]
    if captured:
        assert data.features is not None
        pairs.append((data.features[0, rows], torch.cat(captured)))
    errors = [(one.double() - other.double()).norm() / one.double().norm() for one, other in pairs]
    return torch.stack(errors).max().item()  # NaN stays NaN


def _decode_logits(
    proposer: HeadProposer,
    data: TargetBatch,
    states: list[RowState],
    ids: list[int],
    depths: int,
) -> Iterator[tuple[int, list[Tensor]]]:
    """(position a of the root, draft logits (Vd,) by depth) at every round of a real decode of
    ``ids``, as far as the document goes, on the hidden states of the training pass.
    """
    proposer.reset(1)
    start = 0
    for state in states:
        root = len(state.tokens) - 1
        features = None if data.features is None else data.features[0, start:root]
        same = replace(state, features=features, hidden=data.last_hidden[0, start:root])
        following = ids[root + 1 : root + depths]
        yield root, proposer.forced(same, following)[: len(ids) - root - 1]
        start = root


def decode_rounds(
    target: TargetModel, ids: list[int], layers: tuple[int, ...]
) -> Iterator[RowState]:
    """Decode a known text in rounds: each appends the next true tokens plus a wrong branch, and
    commits the truth.

    Yields:
        The state at the start of each round, as a proposer would get it.
    """
    cache = TreeCache(target.model.config, 1, len(ids) + 8)
    position, size = 0, max(3, len(ids) // 3)
    while position + size < len(ids):
        true = ids[position : position + size]
        wrong = (true[-1] + 1) % target.vocab_size
        first = position == 0
        nodes = (
            true if first else [true[0], wrong, *true[1:]]
        )  # the wrong branch hangs off the first token
        parents = list(range(-1, len(true) - 1)) if first else [-1, 0, 0, *range(2, len(true))]
        tree = torch.tensor(parents[: len(nodes)])
        mask = ancestor_mask(tree)
        out = append_rows(
            target,
            cache,
            [torch.tensor(nodes)],
            [mask.sum(1) - 1],
            [mask],
            feature_layers=layers,
        )
        kept = list(range(len(nodes))) if first else [0, *range(2, len(nodes))]
        cache.commit([kept])
        position += size
        features = None if out.features is None else out.features[0, kept]
        yield RowState(
            ids[: position + 1],
            0,
            features,
            out.last_hidden[0, kept],
            len(ids),
            SamplingParams(),
        )
        size = 1 + position % 3
