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
from dataclasses import dataclass

import torch
from torch import Tensor

from drafters import Eagle3Drafter, MedusaDrafter, TargetModel
from inference.append import append_rows
from inference.cache import TreeCache
from inference.proposers import RowState
from inference.proposers.draft_cache import DraftCache
from inference.proposers.heads import Eagle3Proposer
from inference.sampling import SamplingParams
from inference.tree import ancestor_mask
from training.chat import TokenizedRow
from training.data import collate
from training.features import run_target
from training.objectives import Objective

TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-3, torch.bfloat16: 8e-2, torch.float16: 2e-2}
"""Largest logit difference relative to the largest logit, by dtype of the target."""


class ParityError(ValueError):
    """Training-pass and decode-pass logits differ."""


@dataclass(frozen=True)
class ParityReport:
    """Outcome of the check.

    Attributes:
        error: largest difference of draft logits, relative to the largest logit.
        tolerance: what was allowed.
        positions: draft positions compared, over all depths.
    """

    error: float
    tolerance: float
    positions: int


@torch.no_grad()
def check_parity(
    target: TargetModel, objective: Objective, row: TokenizedRow, max_tokens: int = 96
) -> ParityReport:
    """Compare both passes on one document.

    Args:
        target: the teacher.
        objective: the head's objective, not yet prepared.
        row: a document; its first ``max_tokens`` tokens are used.
        max_tokens: limit.

    Raises:
        ParityError: above tolerance.
        ValueError: the document is too short to compare anything.
    """
    ids = row.ids[:max_tokens]
    if len(ids) < objective.depths + 6:
        raise ValueError(f"parity: the document has only {len(ids)} tokens; a longer row is needed")
    objective.eval()
    batch = collate([[TokenizedRow(ids, [True] * len(ids))]], len(ids)).to(target.device)
    data = run_target(target, batch, objective.drafter.feature_layers)
    hidden = objective.unroll(data)
    training = [
        objective.logits(h[0], depth).double() for depth, h in enumerate(hidden)
    ]  # K x (T, Vd)
    differences, largest = [torch.zeros(())], 1e-9
    for anchor, decoded in _decode_logits(target, objective, ids):
        for depth, logits in enumerate(decoded):
            expected = training[depth][anchor - 1]
            differences.append((expected - logits.double()).abs().max().cpu())
            largest = max(largest, expected.abs().max().item())
    objective.train()
    tolerance = TOLERANCE[target.dtype]
    worst = torch.stack([value.double() for value in differences]).max().item()  # NaN stays NaN
    report = ParityReport(worst / largest, tolerance, len(differences) - 1)
    if not report.error <= tolerance:
        raise ParityError(
            f"training and decoding disagree: draft logits differ by {report.error:.3g} of the "
            f"largest logit (allowed {tolerance}). Heads trained like this would have a useless "
            "acceptance length; the pairing, the masks, the caches or the target's attention "
            "implementation are at fault"
        )
    return report


def _decode_logits(
    target: TargetModel, objective: Objective, ids: list[int]
) -> Iterator[tuple[int, list[Tensor]]]:
    """(position a of the root, K draft logits (Vd,)) at every round of a real decode of ``ids``."""
    drafter = objective.drafter
    cache = DraftCache()
    for state in decode_rounds(target, ids, drafter.feature_layers):
        anchor = len(state.tokens) - 1
        if isinstance(drafter, MedusaDrafter):
            rows = drafter(state.hidden[-1:].to(next(drafter.blocks.parameters()).dtype))
            yield anchor, [drafter.logits(rows[head], head)[0] for head in range(objective.depths)]
        else:
            assert isinstance(drafter, Eagle3Drafter)
            yield (
                anchor,
                _chain_logits(Eagle3Proposer(drafter), cache, state, ids, objective.depths),
            )


def _chain_logits(
    proposer: Eagle3Proposer, cache: DraftCache, state: RowState, ids: list[int], depths: int
) -> list[Tensor]:
    """Draft steps along the true continuation of ``state``, as far as the document goes."""
    anchor = len(state.tokens) - 1
    logits, feature = proposer.absorb(cache, state)
    found = [logits[0]]
    for depth in range(1, min(depths, len(ids) - anchor)):
        token = torch.tensor([ids[anchor + depth]], device=logits.device)
        above = torch.tensor(
            [depth - 2], device=logits.device
        )  # tree row of the parent, -1 at depth 1
        logits, feature = proposer.step(cache, feature, token, above, anchor - 1 + depth)
        found.append(logits[0])
    return found


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
