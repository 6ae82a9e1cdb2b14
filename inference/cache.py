"""A key-value cache that takes a tree of draft tokens and keeps one path of it.

Layout: one key and one value buffer per layer, (B, H, capacity, d), allocated at the first forward
and grown in blocks. Sequence b owns columns 0 .. lengths[b]-1. A forward appends N rows to every
sequence *directly behind its own tokens*: row i of sequence b goes to column lengths[b] + i, so
the tails of a ragged batch start at different columns, attention covers max(lengths) + N of them
and `tree_attention_mask` says who sees what. Then either

* `commit(paths)` moves the rows of the accepted path to the front of that tail, through a small
  temporary, and lengthens the sequence; the rest is left behind to be overwritten, or
* `revert()` forgets the append; the lengths never changed, so there is nothing to undo.

A prompt is a chain: append it, commit all of its rows.

Letters: B batch, H key-value heads, N rows appended, d head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin, get_layer_types_and_kwargs

BLOCK = 256
"""Columns by which a buffer grows."""


class TreeLayer(CacheLayerMixin):
    """Keys and values of one layer."""

    def __init__(self, lengths: list[int], capacity: int) -> None:
        """Allocate nothing yet; the first forward tells the shapes.

        Args:
            lengths: committed tokens per sequence; one list shared by all layers of a cache.
            capacity: columns to allocate at first.
        """
        super().__init__()
        self.lengths = lengths
        self.capacity = capacity
        self.pending = 0  # rows appended and neither committed nor reverted

    @property
    def batch_size(self) -> int:
        """B."""
        return len(self.lengths)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the buffers for states of this shape, dtype and device.

        They are zeroed because masked columns still enter a product: 0 times NaN is NaN.
        """
        if len(key_states) != self.batch_size:
            raise ValueError(
                f"this cache is for batch_size={self.batch_size}, but the model ran "
                f"{len(key_states)} sequences"
            )
        self.keys = _zeros(key_states, self.capacity)
        self.values = _zeros(value_states, self.capacity)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append N rows behind each sequence.

        Args:
            key_states: (B, H, N, d).
            value_states: (B, H, N, d).
            args: ignored.
            kwargs: ignored.

        Returns:
            All columns that are in use, (B, H, max(lengths) + N, d), as views of the buffers.
        """
        if self.pending:
            raise RuntimeError(
                f"{self.pending} rows are still pending in this cache; call commit() or revert() "
                "before the next forward"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        num_rows = key_states.shape[2]
        columns = max(self.lengths) + num_rows
        self._reserve(columns)
        for row, length in enumerate(self.lengths):
            self.keys[row, :, length : length + num_rows] = key_states[row]
            self.values[row, :, length : length + num_rows] = value_states[row]
        self.pending = num_rows
        return self.keys[:, :, :columns], self.values[:, :, :columns]

    def _reserve(self, columns: int) -> None:
        """Grow the buffers to at least this many columns, in whole blocks."""
        assert self.keys is not None and self.values is not None
        if columns <= self.capacity:
            return
        missing = -(-(columns - self.capacity) // BLOCK) * BLOCK
        self.keys = torch.cat([self.keys, _zeros(self.keys, missing)], dim=2)
        self.values = torch.cat([self.values, _zeros(self.values, missing)], dim=2)
        self.capacity += missing

    def move(self, sequences: Tensor, sources: Tensor, targets: Tensor) -> None:
        """Copy single columns within sequences; all (M,). Sources are read before any write."""
        for buffer in (self.keys, self.values):
            assert buffer is not None
            buffer[sequences, :, targets] = buffer[sequences, :, sources]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns that `update` will return for N = query_length, and the offset of the first."""
        return max(self.lengths) + query_length, 0

    def get_seq_length(self) -> int:
        """Committed tokens of the longest sequence."""
        return max(self.lengths)

    def get_max_length(self) -> int:
        """No maximum: the buffers grow."""
        return -1


class TreeCache(Cache):
    """Cache of a whole model, with reversion. Pass it as `cache=` to the target's forward.

    Attributes:
        lengths: committed tokens of each sequence; read-only outside of this class.
    """

    layers: list[TreeLayer]  # type: ignore[assignment]

    def __init__(
        self, config: PreTrainedConfig, batch_size: int = 1, capacity: int = BLOCK
    ) -> None:
        """Prepare one layer of cache per layer of the model.

        Args:
            config: of the model; every layer must use full attention.
            batch_size: B.
            capacity: columns to allocate at first; room for the prompt, the new tokens and one
                tree avoids growth.
        """
        if batch_size < 1 or capacity < 1:
            raise ValueError(
                f"batch_size and capacity must be at least 1; got {batch_size} and {capacity}"
            )
        layer_types, _ = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
        for index, layer_type in enumerate(layer_types):
            if layer_type != "full_attention":
                raise ValueError(
                    f"layer {index} of {config.model_type!r} is {layer_type!r}: draft tokens "
                    "cannot be rolled back there; only 'full_attention' layers are supported"
                )
        self.lengths = [0] * batch_size
        super().__init__(layers=[TreeLayer(self.lengths, capacity) for _ in layer_types])

    def columns(self, num_rows: int) -> int:
        """Columns that attention covers when `num_rows` rows are appended to each sequence."""
        return max(self.lengths) + num_rows

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep one path of the pending rows of each sequence.

        Args:
            paths: per sequence the appended rows to keep, in order and **root included**:
                `[0, *verdict.path]` after a round, `range(T)` after a prompt of T tokens (padding
                rows behind it are dropped), `[]` for a sequence that has ended.
        """
        pending = {layer.pending for layer in self.layers}
        if len(pending) != 1 or 0 in pending:
            raise RuntimeError(
                "commit() needs one pending append in every layer: run the model with this cache "
                f"first (pending rows per layer: {sorted(pending)})"
            )
        if len(paths) != len(self.lengths):
            raise ValueError(f"commit: {len(paths)} paths for {len(self.lengths)} sequences")
        if any(not 0 <= node < min(pending) for path in paths for node in path):
            raise ValueError(f"commit: a path leaves the {min(pending)} appended rows")
        self._move_to_front(paths)
        for row, path in enumerate(paths):
            self.lengths[row] += len(path)
        self.revert()

    def _move_to_front(self, paths: Sequence[Sequence[int]]) -> None:
        """Make the accepted rows contiguous: one gather and one copy per buffer.

        Rows already in place are left alone, so a chain, and with it a prompt, moves nothing.
        """
        moves = [
            (row, length + node, length + place)
            for row, (length, path) in enumerate(zip(self.lengths, paths, strict=True))
            for place, node in enumerate(path)
            if node != place
        ]
        if not moves:
            return
        index = torch.tensor(moves).T
        for layer in self.layers:
            assert layer.keys is not None
            index = index.to(layer.keys.device)  # copies only where layers change device
            layer.move(*index)

    def revert(self) -> None:
        """Forget the pending append, if there is one."""
        for layer in self.layers:
            layer.pending = 0


def _zeros(states: Tensor, columns: int) -> Tensor:
    """Zeros like `states` (B, H, *, d), with this many columns."""
    batch_size, num_heads, _, head_dim = states.shape
    return states.new_zeros(batch_size, num_heads, columns, head_dim)
