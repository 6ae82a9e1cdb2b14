"""Keys and values of all layers in one tensor, for forwards whose shapes do not change.

The rows of a tree go directly behind the committed ones of their sequence, and a commit moves the
accepted path to the front of them, as in `inference.cache.TreeCache`, its twin for models whose
layers differ in shape. Here that is one gather for all layers, layers with a sliding window keep
the whole text (attention narrows what they see), and the model itself never sees the cache: it is
written and read by `inference.static.attention`.

Letters: L layers, B batch, H key-value heads, N rows, S columns, M moved rows, R rows of a path, d
head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from drafters import TargetModel
from inference.cache import BLOCK, layer_windows


@dataclass(frozen=True)
class KvShape:
    """What the keys and values of a model look like.

    Attributes:
        num_layers: L.
        num_heads: H.
        head_dim: d, of keys and of values.
        windows: per layer, how far back a row sees, itself included; None for all.
        dtype: of both.
        device: of both.
    """

    num_layers: int
    num_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    dtype: torch.dtype
    device: torch.device


def kv_shape(target: TargetModel) -> KvShape:
    """What the keys and values of a target look like, found by a forward of one token.

    Raises:
        ValueError: they differ from layer to layer, or there are none.
    """
    windows = tuple(layer_windows(target.model.config))
    cache = DynamicCache(config=target.model.config)
    target.forward(torch.zeros(1, 1, dtype=torch.int64, device=target.device), cache=cache)
    shapes = set()
    for layer in cache.layers:
        if not isinstance(layer, DynamicLayer):
            raise _cannot(target, "a layer keeps something else than keys and values")
        keys, values = layer.keys, layer.values
        if keys is None or values is None or keys.shape != values.shape:
            raise _cannot(target, "a layer's keys and values are not of one shape")
        shapes.add((keys.shape[1], keys.shape[3], keys.dtype, keys.device))
    if len(shapes) != 1 or len(cache.layers) != len(windows):
        raise _cannot(target, "its layers' keys differ in shape or device")
    heads, size, dtype, device = shapes.pop()
    return KvShape(len(windows), heads, size, windows, dtype, device)


def _cannot(target: TargetModel, why: str) -> ValueError:
    return ValueError(
        f"target {target.name!r} ({target.model.config.model_type!r}) has no place in a cache of "
        f"one tensor: {why}. Decode it with engine='eager'"
    )


class StaticCache:
    """Cache of a whole model, with reversion.

    Args:
        shape: of the model's keys and values.
        batch_size: B.
        capacity: columns to allocate; more are made where they run out, which changes the address
            of the cache.

    Attributes:
        kv: (L, 2, B, H, S, d). Zeroed once, as masked columns still enter a product.
        lengths: committed tokens of each sequence.
        pending: rows appended to each sequence and neither committed nor reverted; of the layers
            that run next, where some have been run ahead (`arrange`).
    """

    def __init__(self, shape: KvShape, batch_size: int, capacity: int) -> None:
        if batch_size < 1 or capacity < 1:
            raise ValueError(
                f"batch_size and capacity must be at least 1; got {batch_size} and {capacity}"
            )
        self.shape = shape
        self.kv = self._zeros(batch_size, capacity)
        self.lengths = [0] * batch_size
        self.pending = 0

    def _zeros(self, batch_size: int, columns: int) -> Tensor:
        shape = self.shape
        return torch.zeros(
            shape.num_layers,
            2,
            batch_size,
            shape.num_heads,
            columns,
            shape.head_dim,
            dtype=shape.dtype,
            device=shape.device,
        )

    @property
    def capacity(self) -> int:
        """S."""
        return self.kv.shape[4]

    def columns(self, num_rows: int) -> int:
        """C: columns in use once `num_rows` more rows are appended."""
        return max(self.lengths) + self.pending + num_rows

    def reserve(self, columns: int) -> None:
        """Have at least so many columns; grown in blocks."""
        missing = columns - self.capacity
        if missing > 0:
            more = self._zeros(len(self.lengths), -(-missing // BLOCK) * BLOCK)
            self.kv = torch.cat((self.kv, more), dim=4)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep one path of the pending rows of each sequence.

        Args:
            paths: per sequence the pending rows to keep, **root included**, as for
                `TreeCache.commit`.
        """
        assert self.pending, "commit() needs a pending append"
        if len(paths) != len(self.lengths):
            raise ValueError(f"commit: {len(paths)} paths for {len(self.lengths)} sequences")
        if any(not 0 <= node < self.pending for path in paths for node in path):
            raise ValueError(f"commit: a path leaves the {self.pending} appended rows")
        self._move_to_front(paths, self.shape.num_layers)
        for row, path in enumerate(paths):
            self.lengths[row] += len(path)
        self.pending = 0

    def arrange(self, rows: Sequence[Sequence[int]], below: int) -> None:
        """Put some pending rows of the layers below one in front, where the layers from it on will
        run the same rows next, after `revert`.

        Args:
            rows: per sequence the pending rows that become rows 0, 1, ...
            below: the layer.
        """
        self._move_to_front(rows, below)

    def _move_to_front(self, paths: Sequence[Sequence[int]], below: int) -> None:
        """Make chosen pending rows of the layers below one contiguous: one gather, one copy."""
        moves = [
            (row, self.lengths[row] + node, self.lengths[row] + place)
            for row, path in enumerate(paths)
            for place, node in enumerate(path)
            if node != place
        ]
        if moves:
            rows, sources, targets = torch.tensor(moves).T.to(self.kv.device)
            self.kv[:below, :, rows, :, targets] = self.kv[:below, :, rows, :, sources]

    def revert(self, first_layer: int = 0) -> None:
        """Forget the pending rows of this layer and the layers above it, which run next."""
        self.pending = 0

    def select(self, rows: Sequence[int]) -> None:
        """Keep only some sequences, in this order.

        Args:
            rows: indices into the batch, at least one.
        """
        if not rows or not all(0 <= row < len(self.lengths) for row in rows):
            raise ValueError(f"select: rows {list(rows)} of a batch of {len(self.lengths)}")
        if list(rows) == list(range(len(self.lengths))):
            return
        self.kv = self.kv[:, :, torch.tensor(rows, device=self.kv.device)]
        self.lengths[:] = [self.lengths[row] for row in rows]

    def restart(self) -> None:
        """Forget all text; the buffer stays where it is."""
        self.lengths[:] = [0] * len(self.lengths)
        self.pending = 0

    def release(self) -> None:
        """Free the buffer; the cache cannot be used any more."""
        self.kv = self.kv.new_empty(0)


def move_paths(kv: Tensor, lengths: Tensor, path: Tensor) -> None:
    """Move the rows of a path to the front of the tree's, in all layers at once.

    Args:
        kv: (L, 2, B, H, S, d), changed in place.
        lengths: (B,) column of each root.
        path: (B, R) nodes, the root first; what is moved for repeated ones has no meaning.
    """
    shape = (*kv.shape[:4], path.shape[1], kv.shape[5])
    sources = (lengths[:, None] + path)[None, None, :, None, :, None]
    places = torch.arange(path.shape[1], device=path.device)
    targets = (lengths[:, None] + places)[None, None, :, None, :, None]
    kv.scatter_(4, targets.expand(shape), kv.gather(4, sources.expand(shape)))


class _PassingLayer(CacheLayerMixin):
    """Hands keys and values on: attention stores them."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to allocate."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """(B, H, N, d) keys and values of the new rows, as they came."""
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Of the new rows alone; no mask is made of it."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Nothing is kept here."""
        return 0

    def get_max_length(self) -> int:
        """No maximum."""
        return -1


class PassingCache(Cache):
    """What a model is given as its cache, while a `StaticCache` is behind its attention.

    Args:
        num_layers: L.
    """

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[_PassingLayer() for _ in range(num_layers)])
