"""A key-value cache that takes a tree of draft tokens and keeps one path of it.

Layout: one key and one value buffer per layer, (B, H, capacity, d), allocated at the first forward
and grown in blocks. Sequence b has `lengths[b]` committed tokens. A forward appends N rows to
every sequence *directly behind its own tokens*, so the tails of a ragged batch start at different
columns; `inference.attention.tree_masks` says who sees what. Further forwards may append further
rows behind them (a tree grown level by level). Then either

* `commit(paths)` moves the rows of the accepted path to the front of that tail, through a small
  temporary, and lengthens the sequence; the rest is left behind to be overwritten, or
* `revert()` forgets what was appended; the lengths never changed, so there is nothing to undo.

A prompt is a chain: append it, commit all of its rows. Accepted rows are copied, never recomputed.

A layer with a sliding window keeps only what the window can still see: token j of sequence b is
in column j - offsets[b], and every `BLOCK` tokens the front is cut off. Its memory does not grow
with the text. A layer with full attention has offsets of zero.

Letters: B batch, H key-value heads, N rows appended, M rows moved, d head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin, get_layer_types_and_kwargs

BLOCK = 256
"""Columns by which a buffer grows, and by which the front of a windowed one is cut off."""

_RECURRENT = "it folds the whole text into one state, out of which a rejected token cannot be taken"
_REFUSED = {
    "linear_attention": _RECURRENT,
    "conv": _RECURRENT,
    "hybrid": _RECURRENT,
    "hybrid_sliding": _RECURRENT,
    "dummy": "it has no keys and values of its own",
    "chunked_attention": "chunks of attention are not implemented here",
}
"""Why draft tokens cannot be verified in a layer of this type; others are unknown here."""
_REFUSED_MODELS = {
    "gpt_neo": "its local attention is a window over columns of the cache, not over positions",
    "doge": "it chooses what to attend to among the columns of the cache, whatever they hold",
}
"""Models whose configs say full attention, which short texts do not contradict."""


class TreeLayer(CacheLayerMixin):
    """Keys and values of one layer.

    Attributes:
        lengths: committed tokens per sequence; one list shared by all layers of a cache.
        offsets: per sequence, the token in column 0.
        window: how many tokens back a row sees, itself included; None: all.
        capacity: columns allocated (at first: to allocate).
        pending: rows appended to each sequence and neither committed nor reverted.
    """

    def __init__(self, lengths: list[int], capacity: int, window: int | None = None) -> None:
        super().__init__()
        self.lengths = lengths
        self.offsets = [0] * len(lengths)
        self.window = window
        self.capacity = capacity if window is None else min(capacity, window + 2 * BLOCK)
        self.pending = 0
        self.is_sliding = window is not None

    @property
    def batch_size(self) -> int:
        """B."""
        return len(self.lengths)

    @property
    def starts(self) -> list[int]:
        """Per sequence, the column behind its committed tokens."""
        return [n - offset for n, offset in zip(self.lengths, self.offsets, strict=True)]

    def columns(self, num_rows: int) -> int:
        """Columns that attention covers when `num_rows` more rows are appended."""
        return max(self.starts) + self.pending + num_rows

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
        """Append N rows behind each sequence and what is already pending there.

        Args:
            key_states: (B, H, N, d).
            value_states: (B, H, N, d).
            args: ignored.
            kwargs: ignored.

        Returns:
            All columns that are in use, (B, H, columns(N), d), as views of the buffers.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        num_rows = key_states.shape[2]
        columns = self.columns(num_rows)
        self._reserve(columns)
        assert self.keys is not None and self.values is not None
        for row, start in enumerate(self.starts):
            tail = slice(start + self.pending, start + self.pending + num_rows)
            self.keys[row, :, tail] = key_states[row]
            self.values[row, :, tail] = value_states[row]
        self.pending += num_rows
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

    def trim(self) -> None:
        """Cut off what no window will see again, once it is a block; give back spare columns."""
        if self.window is None:
            return
        first = [max(0, length - self.window + 1) for length in self.lengths]
        if max(f - offset for f, offset in zip(first, self.offsets, strict=True)) < BLOCK:
            return
        self.capacity = min(self.capacity, self.window + 2 * BLOCK)
        self.keys, self.values = self._kept(self.keys, first), self._kept(self.values, first)
        self.offsets = first

    def _kept(self, buffer: Tensor | None, first: Sequence[int]) -> Tensor:
        """A new buffer that starts with token first[b] of each sequence."""
        assert buffer is not None
        kept = _zeros(buffer, self.capacity)
        for row, (length, offset) in enumerate(zip(self.lengths, self.offsets, strict=True)):
            some = buffer[row, :, first[row] - offset : length - offset]
            kept[row, :, : some.shape[1]] = some
        return kept

    def select(self, rows: Sequence[int]) -> None:
        """Keep these sequences only, in this order."""
        self.offsets = [self.offsets[row] for row in rows]
        if self.keys is not None and self.values is not None:
            index = torch.tensor(rows, device=self.keys.device)
            self.keys, self.values = self.keys[index], self.values[index]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns that `update` will return for N = query_length, and the token in the first.

        transformers asks when it was given no mask and makes a causal one, the same for all.
        """
        if len(set(self.lengths)) > 1:
            raise RuntimeError(
                f"sequences of unequal length {self.lengths} need the mask of "
                "inference.attention.tree_masks"
            )
        return self.columns(query_length), max(self.offsets)

    def get_seq_length(self) -> int:
        """Committed and pending tokens of the longest sequence."""
        return max(self.lengths) + self.pending

    def get_max_length(self) -> int:
        """No maximum: the buffers grow."""
        return -1


class TreeCache(Cache):
    """Cache of a whole model, with reversion. Pass it as `cache=` to the target's forward.

    Attributes:
        lengths: committed tokens of each sequence; read-only outside of this class.
        layer_types: attention kind of each layer, as transformers names them.
    """

    layers: list[TreeLayer]  # type: ignore[assignment]

    def __init__(
        self, config: PreTrainedConfig, batch_size: int = 1, capacity: int = BLOCK
    ) -> None:
        """Prepare one layer of cache per layer of the model.

        Args:
            config: of the model; every layer must have full or sliding-window attention.
            batch_size: B.
            capacity: columns to allocate at first; room for the prompt, the new tokens and one
                tree avoids growth.

        Raises:
            ValueError: a layer keeps its past in a form that a tree cannot be taken out of; the
                message names the layer and its type.
        """
        if batch_size < 1 or capacity < 1:
            raise ValueError(
                f"batch_size and capacity must be at least 1; got {batch_size} and {capacity}"
            )
        windows = layer_windows(config)
        self.lengths = [0] * batch_size
        self.layer_types = ["sliding_attention" if w else "full_attention" for w in windows]
        super().__init__(layers=[TreeLayer(self.lengths, capacity, w) for w in windows])

    @property
    def pending(self) -> int:
        """Rows appended to the first layer and neither committed nor reverted."""
        return self.layers[0].pending

    @property
    def capacity(self) -> int:
        """Columns allocated in the layer that has most."""
        return max(layer.capacity for layer in self.layers)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep one path of the pending rows of each sequence.

        Args:
            paths: per sequence the pending rows to keep, numbered in the order of appending, in
                order and **root included**: `[0, *verdict.path]` after a round, `range(T)` after
                a prompt of T tokens (padding rows behind it are dropped), `[]` for a sequence
                that has ended.
        """
        pending = {layer.pending for layer in self.layers}
        if len(pending) != 1 or 0 in pending:
            raise RuntimeError(
                "commit() needs a pending append, the same in every layer: run the whole model "
                f"with this cache first (pending rows per layer: {sorted(pending)})"
            )
        if len(paths) != len(self.lengths):
            raise ValueError(f"commit: {len(paths)} paths for {len(self.lengths)} sequences")
        if any(not 0 <= node < min(pending) for path in paths for node in path):
            raise ValueError(f"commit: a path leaves the {min(pending)} appended rows")
        self._move_to_front(paths, self.layers)
        for row, path in enumerate(paths):
            self.lengths[row] += len(path)
        self.revert()
        for layer in self.layers:
            layer.trim()

    def arrange(self, rows: Sequence[Sequence[int]], below: int) -> None:
        """Keep some pending rows of the layers below one, in a new order; forget the others.

        Args:
            rows: per sequence the pending rows to keep, which become rows 0, 1, ...; what stands
                behind those of a sequence with fewer than another has no meaning.
            below: the layer; those below it have the same rows pending.
        """
        self._move_to_front(rows, self.layers[:below])
        for layer in self.layers[:below]:
            layer.pending = max(map(len, rows))

    def _move_to_front(self, paths: Sequence[Sequence[int]], layers: Sequence[TreeLayer]) -> None:
        """Make chosen pending rows contiguous: one gather and one copy per buffer.

        Rows already in place are left alone, so a chain, and with it a prompt, moves nothing.
        """
        moves = [
            (row, node, place)
            for row, path in enumerate(paths)
            for place, node in enumerate(path)
            if node != place
        ]
        if not moves:
            return
        indices: dict[tuple[torch.device, int | None], Tensor] = {}
        for layer in layers:
            assert layer.keys is not None
            kind = (layer.keys.device, layer.window)
            if kind not in indices:  # one copy to the device for all layers alike
                starts = layer.starts
                columns = [(row, starts[row] + n, starts[row] + place) for row, n, place in moves]
                indices[kind] = torch.tensor(columns).T.to(layer.keys.device)
            layer.move(*indices[kind])

    def revert(self, first_layer: int = 0) -> None:
        """Forget the pending rows of this layer and the layers above it."""
        for layer in self.layers[first_layer:]:
            layer.pending = 0

    def release(self) -> None:
        """Free the buffers; the cache cannot be used any more."""
        self.layers.clear()

    def select(self, rows: Sequence[int]) -> None:
        """Keep only some sequences, pending rows included; the others leave the batch.

        Args:
            rows: indices into the batch, at least one; the new batch is in this order.

        Raises:
            ValueError: no row, or one that is not in the batch.
        """
        if not rows or not all(0 <= row < len(self.lengths) for row in rows):
            raise ValueError(f"select: rows {list(rows)} of a batch of {len(self.lengths)}")
        if list(rows) == list(range(len(self.lengths))):
            return
        for layer in self.layers:
            layer.select(rows)
        self.lengths[:] = [self.lengths[row] for row in rows]


def layer_windows(config: PreTrainedConfig) -> list[int | None]:
    """The window of each layer; None is full attention.

    Raises:
        ValueError: a layer has something else.
    """
    config = config.get_text_config(decoder=True)
    if reason := _REFUSED_MODELS.get(config.model_type):
        raise ValueError(f"{config.model_type!r} cannot verify trees of draft tokens: {reason}")
    layer_types, options = get_layer_types_and_kwargs(config)
    for index, layer_type in enumerate(layer_types):
        if layer_type not in ("full_attention", "sliding_attention"):
            reason = _REFUSED.get(layer_type, "it is not known here")
            raise ValueError(
                f"layer {index} of {config.model_type!r} is {layer_type!r}: draft tokens cannot be "
                f"rolled back there ({reason}); only full and sliding-window attention can verify "
                "trees"
            )
    if len(layer_types) != len(options):
        raise ValueError(
            f"{config.model_type!r}: layer_types names {len(layer_types)} layers, but "
            f"num_hidden_layers is {len(options)}; make them agree in the config"
        )
    windows = [
        option["sliding_window"] if layer_type == "sliding_attention" else None
        for layer_type, option in zip(layer_types, options, strict=True)
    ]
    if len(sizes := {window for window in windows if window is not None}) > 1:
        raise ValueError(
            f"{config.model_type!r} has sliding windows of several sizes {sorted(sizes)}: its "
            "layers take one mask for all of them, so a tree cannot be verified"
        )
    return windows


def _zeros(states: Tensor, columns: int) -> Tensor:
    """Zeros like `states` (B, H, *, d), with this many columns."""
    batch_size, num_heads, _, head_dim = states.shape
    return states.new_zeros(batch_size, num_heads, columns, head_dim)
