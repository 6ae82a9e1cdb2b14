"""Draft vocabularies: which target tokens a head with a reduced output matrix can propose.

Pure functions. Inside the project a draft vocabulary is a sorted list of *absolute* target ids,
``draft_vocab`` (Vd,): draft id i stands for target id ``draft_vocab[i]``. Offsets (EAGLE-3's
``d2t``) exist only in export files.

Legend: V target vocabulary, Vd draft vocabulary.
"""

import math

import torch
from torch import Tensor


def count_tokens(ids: Tensor, vocab_size: int) -> Tensor:
    """How often each target token occurs.

    Args:
        ids: any shape, int64.
        vocab_size: V.

    Returns:
        (V,) int64 counts.
    """
    return torch.bincount(ids.reshape(-1), minlength=vocab_size)


def choose_draft_vocab(counts: Tensor, size: int, always: tuple[int, ...] = ()) -> Tensor:
    """The ``size`` most frequent tokens; ties and unseen tokens are taken in id order.

    Args:
        counts: (V,) occurrences of each token in the answers the head will be trained on.
        size: Vd.
        always: ids that must be in (the end-of-sequence tokens).

    Returns:
        (Vd,) int64, sorted absolute target ids.

    Raises:
        ValueError: ``size`` does not fit the vocabulary or the forced ids.
    """
    if not len(always) <= size <= counts.numel():
        raise ValueError(
            f"draft_vocab_size must lie in {len(always)}..{counts.numel()}, got {size}"
        )
    ranked = counts.clone()
    ranked[list(always)] = torch.iinfo(torch.int64).max
    return ranked.argsort(descending=True, stable=True)[:size].sort().values


def size_for_coverage(counts: Tensor, coverage: float, always: tuple[int, ...] = ()) -> int:
    """The smallest draft vocabulary whose tokens make up a part of all occurrences.

    Args:
        counts: (V,) occurrences of each token in the answers the head will be trained on.
        coverage: part of them, in (0, 1].
        always: ids that must be in (the end-of-sequence tokens).

    Returns:
        Vd; tokens that never occur are not needed.

    Raises:
        ValueError: there is nothing to count, or ``coverage`` is out of range.
    """
    if not 0 < coverage <= 1:
        raise ValueError(f"draft_vocab_coverage must lie in (0, 1], got {coverage}")
    total = int(counts.sum())
    if not total:
        raise ValueError("draft_vocab_coverage: no answer token to count")
    needed = math.ceil(coverage * total * (1 - 1e-12))  # 0.1 * 30 is a little more than 3
    forced = sorted(set(always))
    covered = int(counts[forced].sum())
    if covered >= needed:
        return max(len(forced), 1)
    rest = counts.clone()
    rest[forced] = 0
    cumulated = covered + rest.sort(descending=True).values.cumsum(0)  # with 1, 2, ... more
    return len(forced) + 1 + int(torch.searchsorted(cumulated, needed))


def draft_index(draft_vocab: Tensor, vocab_size: int) -> Tensor:
    """The inverse map.

    Args:
        draft_vocab: (Vd,) absolute target ids.
        vocab_size: V.

    Returns:
        (V,) int64: the draft id of each target token, or -1 where the head cannot propose it.
    """
    index = torch.full((vocab_size,), -1, dtype=torch.int64, device=draft_vocab.device)
    index[draft_vocab] = torch.arange(draft_vocab.numel(), device=draft_vocab.device)
    return index


def to_offsets(draft_vocab: Tensor) -> Tensor:
    """EAGLE-3's ``d2t``:

    Target id minus draft id, (Vd,) int64 (the only place offsets are made).
    """
    return draft_vocab - torch.arange(draft_vocab.numel(), device=draft_vocab.device)


def from_offsets(offsets: Tensor) -> Tensor:
    """Inverse of :func:`to_offsets`: (Vd,) absolute target ids."""
    return offsets + torch.arange(offsets.numel(), device=offsets.device)


def scatter_to_target(values: Tensor, draft_vocab: Tensor, vocab_size: int, fill: float) -> Tensor:
    """Place draft-vocabulary values at their target ids.

    Args:
        values: (..., Vd).
        draft_vocab: (Vd,) absolute target ids.
        vocab_size: V.
        fill: value of every target id outside the draft vocabulary (0 for probabilities, -inf for
            logits).

    Returns:
        (..., V).
    """
    full = values.new_full((*values.shape[:-1], vocab_size), fill)
    full[..., draft_vocab] = values
    return full
