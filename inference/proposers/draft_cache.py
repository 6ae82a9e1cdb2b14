"""Keys and values of a sequential head: committed rows, plus the rows of the tree being grown.

Committed rows hold true target features and are kept; tree rows hold the head's own features and
are dropped at the start of the next round, so rejected drafts can never be attended to later. Each
layer of the head has rows of its own; all layers hold the same tree rows.

Legend: H query heads, Hkv key/value heads, n new rows, S all rows, d head size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from drafters.layers import Attend, repeat_heads

_BLOCK = 256


class DraftCache:
    """Draft KV of one sequence.

    A committed row's position is its number. With a window W a row sees keys less than W positions
    back.

    Args:
        windows: sliding window of each layer, or None.
    """

    def __init__(self, windows: Sequence[int | None] = (None,)) -> None:
        self._layers = [LayerCache(window) for window in windows]
        self._ancestors = torch.zeros(0, 0, dtype=torch.bool)
        self._depths = torch.zeros(0, dtype=torch.int64)

    @property
    def length(self) -> int:
        """Committed rows of the last layer: those that have gone through the whole head."""
        return self._layers[-1].length if self._layers else 0

    def begin_round(self) -> None:
        """Drop the tree of the last round."""
        for layer in self._layers:
            layer.tail = 0
        self._ancestors = torch.zeros(0, 0, dtype=torch.bool)
        self._depths = torch.zeros(0, dtype=torch.int64)

    def extend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of newly committed rows, causal over everything committed.

        Args:
            layer: of the head.
            q: (1, H, n, d).
            k: (1, Hkv, n, d).
            v: (1, Hkv, n, dv).

        Returns:
            (1, H, n, dv).
        """
        own = self._layers[layer]
        assert not own.tail, "begin_round drops the tree before more is committed"
        rows, start = k.shape[2], own.length
        keys, values = own.store(k, v)
        own.length += rows
        places = torch.arange(start + rows, device=k.device)
        mask = places <= places[start:, None]
        return attend_rows(q, keys, values, own.windowed(mask, places[start:], places))

    def tree_step(self, parents: Tensor, position: int) -> Attend:
        """Attention of one level of tree rows: each sees the committed rows, its ancestors and
        itself.

        Args:
            parents: (n,) tree row of each node's parent, -1 where the parent is the committed root.
            position: of all rows of the level.
        """
        device, rows, before = parents.device, len(parents), len(self._depths)
        ancestors, depths = self._ancestors.to(device), self._depths.to(device)
        seen = torch.zeros(rows, before + rows, dtype=torch.bool, device=device)
        inner = parents >= 0
        seen[inner, :before] = ancestors[parents[inner]]
        seen[:, before:].fill_diagonal_(True)
        grown = torch.zeros(before + rows, before + rows, dtype=torch.bool, device=device)
        grown[:before, :before] = ancestors
        grown[before:] = seen
        self._ancestors = grown
        self._depths = torch.cat((depths, torch.full((rows,), position, device=device)))

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            own = self._layers[layer]
            assert own.tail == before, "every layer runs on every level of the tree"
            keys, values = own.store(k, v)
            own.tail += rows
            committed = torch.ones(rows, own.length, dtype=torch.bool, device=k.device)
            mask = torch.cat((committed, seen), dim=1)
            places = torch.cat((torch.arange(own.length, device=k.device), self._depths))
            return attend_rows(q, keys, values, own.windowed(mask, self._depths[before:], places))

        return attend


class LayerCache:
    """Rows of one layer, in room that is made in blocks.

    Args:
        window: sliding window, or None. Rows out of its reach are masked, not freed.
    """

    def __init__(self, window: int | None) -> None:
        self.window = window
        self.length = 0
        """Committed rows."""
        self.tail = 0
        """Tree rows behind them."""
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def windowed(self, mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """(n, S) mask without the keys out of reach, from positions (n,) and (S,)."""
        if self.window is None:
            return mask
        return mask & (query[:, None] - key[None] < self.window)

    def store(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write rows behind everything in use and return all of it, (1, Hkv, S, d).

        They stay only if ``length`` or ``tail`` is raised before the next call.
        """
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


def attend_rows(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Attention of q (1, H, n, d) over keys and values (1, Hkv, S, d) by a bool mask (n, S)."""
    groups = q.shape[1] // keys.shape[1]
    return F.scaled_dot_product_attention(
        q, repeat_heads(keys, groups), repeat_heads(values, groups), attn_mask=mask
    )
