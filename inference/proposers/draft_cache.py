"""Keys and values of a sequential head: committed rows, plus the rows of the tree being grown.

Committed rows hold true target features and are kept; tree rows hold the head's own features and
are dropped at the end of each round, so rejected drafts can never be attended to later.

Legend: H query heads, Hkv key/value heads, n new rows, S all rows, d head size.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from drafters.layers import Attend, repeat_heads

_BLOCK = 256


class DraftCache:
    """Draft KV of one sequence."""

    def __init__(self) -> None:
        self.length = 0
        """Committed rows."""
        self.tail = 0
        """Tree rows behind them."""
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._ancestors = torch.zeros(0, 0, dtype=torch.bool)

    def extend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of newly committed rows, causal over everything committed; drops the tree of
        the last round.

        Args:
            q: (1, H, n, d).
            k: (1, Hkv, n, d).
            v: (1, Hkv, n, d).

        Returns:
            (1, H, n, d).
        """
        self.tail = 0
        self._ancestors = torch.zeros(0, 0, dtype=torch.bool, device=k.device)
        rows, start = k.shape[2], self.length
        keys, values = self._store(k, v)
        self.length += rows
        causal = torch.ones(rows, start + rows, dtype=torch.bool, device=k.device).tril(start)
        return _attend(q, keys, values, causal)

    def tree_step(self, parents: Tensor) -> Attend:
        """Attention of one level of tree rows: each sees the committed rows, its ancestors and
        itself.

        Args:
            parents: (n,) tree row of each node's parent, -1 where the parent is the committed root.
        """

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            rows, before = k.shape[2], self.tail
            keys, values = self._store(k, v)
            seen = torch.zeros(rows, before + rows, dtype=torch.bool, device=k.device)
            inner = parents >= 0
            seen[inner, :before] = self._ancestors[parents[inner]]
            seen[:, before:].fill_diagonal_(True)
            grown = torch.zeros(before + rows, before + rows, dtype=torch.bool, device=k.device)
            grown[:before, :before] = self._ancestors
            grown[before:] = seen
            self._ancestors = grown
            self.tail += rows
            committed = torch.ones(rows, self.length, dtype=torch.bool, device=k.device)
            return _attend(q, keys, values, torch.cat((committed, seen), dim=1))

        return attend

    def _store(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write rows behind everything in use and return all of it, (1, Hkv, S, d)."""
        start = self.length + self.tail
        end = start + k.shape[2]
        if self._keys is None or self._values is None or end > self._keys.shape[2]:
            capacity = -(-end // _BLOCK) * _BLOCK + _BLOCK
            self._keys, self._values = (
                _grown(old, new, capacity) for old, new in ((self._keys, k), (self._values, v))
            )
        self._keys[:, :, start:end] = k
        self._values[:, :, start:end] = v
        return self._keys[:, :, :end], self._values[:, :, :end]


def _grown(old: Tensor | None, like: Tensor, capacity: int) -> Tensor:
    new = like.new_empty(like.shape[0], like.shape[1], capacity, like.shape[3])
    if old is not None:
        new[:, :, : old.shape[2]] = old
    return new


def _attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    groups = q.shape[1] // keys.shape[1]
    return F.scaled_dot_product_attention(
        q, repeat_heads(keys, groups), repeat_heads(values, groups), attn_mask=mask
    )
