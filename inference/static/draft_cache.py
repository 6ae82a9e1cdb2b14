"""Draft KV of a whole batch in buffers that never move: the static twin of ``DraftCache`` and
``ContextCache``.

Sequence b has ``lengths[b]`` committed rows, at columns 0 .. lengths[b]-1; what a round makes goes
behind them. Rows are written where they belong and stay there if ``advance`` counts them, so
nothing is ever copied. Lengths live on the device, so everything here but the prompt can be
captured in a CUDA graph. A round that commits fewer rows than there is room for has padding: it
lies behind what is counted, is seen by padding alone and written over by what comes next.

Legend: B sequences, H query heads, Hkv key/value heads, n new rows, m rows of this round before
them, S columns, W words, d head size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from drafters.layers import Attend, repeat_heads
from inference.kernels import tree_attention
from inference.static.words import WORD, word_count


class StaticDraftCache:
    """Keys and values of some layers for B sequences.

    Buffers are made when a layer first stores something, which is in the prompt: only then is the
    size of its heads known. They stay where they are until the batch changes.

    Args:
        windows: sliding window of each layer, or None.
        batch: B.
        columns: S; the longest text and the widest round behind it must fit.
        device: of the lengths.

    Attributes:
        lengths: (B,) int64, committed rows of each sequence; changed in place.
    """

    def __init__(
        self, windows: Sequence[int | None], batch: int, columns: int, device: torch.device
    ) -> None:
        self.windows, self.columns = list(windows), columns
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self._keys: list[Tensor | None] = [None] * len(self.windows)
        self._values: list[Tensor | None] = [None] * len(self.windows)

    def reset(self) -> None:
        """Forget all text; buffers stay where they are."""
        self.lengths.zero_()

    def select(self, rows: Tensor) -> None:
        """Keep these sequences only, in this order; makes new buffers.

        Args:
            rows: places in the batch.
        """
        self.lengths = self.lengths[rows]
        for buffers in (self._keys, self._values):
            buffers[:] = [None if buffer is None else buffer[rows] for buffer in buffers]

    def advance(self, counts: Tensor) -> None:
        """Count the first counts[b] (B,) rows behind the committed ones as committed."""
        self.lengths.add_(counts)

    def positions(self, count: int) -> Tensor:
        """(B, n) numbers of the next rows of each sequence."""
        places = torch.arange(count, device=self.lengths.device)
        return self.lengths[:, None] + places

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write rows behind what is committed.

        Args:
            layer: of the head.
            k: (B, Hkv, n, d).
            v: (B, Hkv, n, dv).
        """
        write_rows(*self._buffers(layer, k, v), k, v, self.lengths, 0)

    def _buffers(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's keys and values (B, Hkv, S, ...), made if there are none."""
        return self._room(self._keys, layer, k), self._room(self._values, layer, v)

    def _room(self, buffers: list[Tensor | None], layer: int, like: Tensor) -> Tensor:
        found = buffers[layer]
        if found is None:
            batch, heads, _, size = like.shape
            found = like.new_zeros(batch, heads, self.columns, size)
            buffers[layer] = found
        return found

    def rows(self, words: Tensor, depths: Tensor, pending: int = 0) -> Attend:
        """Attention of n rows behind what is committed and m rows before them in this round.

        Args:
            words: (B, n, W) which of the m + n rows each of them sees.
            depths: (B, m + n) positions of all those rows, counted from the committed length.
            pending: m.
        """

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            window = self.windows[layer]
            return torch.ops.headway.draft_attention(
                *self._buffers(layer, k, v),
                q,
                k,
                v,
                self.lengths,
                words,
                None if window is None else depths,
                window,
                pending,
            )

        return attend

    def text(self, longest: int) -> Attend:
        """Attention of any number of rows of text, causal; for prompts.

        Args:
            longest: committed rows of the longest sequence.
        """

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._buffers(layer, k, v)
            self.store(layer, k, v)
            end, groups = longest + k.shape[2], q.shape[1] // k.shape[1]
            own = self.positions(k.shape[2])[:, None, :, None]
            distance = own - torch.arange(end, device=q.device)  # (B, 1, n, end)
            mask = distance >= 0
            window = self.windows[layer]
            if window is not None:
                mask &= distance < window
            return F.scaled_dot_product_attention(
                q,
                repeat_heads(keys[:, :, :end], groups),
                repeat_heads(values[:, :, :end], groups),
                attn_mask=mask,
            )

        return attend


def write_rows(
    keys: Tensor, values: Tensor, k: Tensor, v: Tensor, lengths: Tensor, pending: int
) -> None:
    """Write rows of a layer behind ``lengths`` (B,) columns and m further ones, in place.

    Args:
        keys: (B, Hkv, S, d).
        values: (B, Hkv, S, dv).
        k: (B, Hkv, n, d).
        v: (B, Hkv, n, dv).
        lengths: (B,).
        pending: m.
    """
    places = torch.arange(pending, pending + k.shape[2], device=k.device)
    columns = (lengths[:, None] + places)[:, None, :, None]
    keys.scatter_(2, columns.expand_as(k), k)
    values.scatter_(2, columns.expand_as(v), v)


def draft_attention(
    keys: Tensor,
    values: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    words: Tensor,
    depths: Tensor | None,
    window: int | None,
    pending: int,
) -> Tensor:
    """Write rows and attend; one operator to torch's compiler, which does not look inside.

    On a CPU it may read lengths, which costs nothing there.

    Args:
        keys: (B, Hkv, S, d), written to.
        values: (B, Hkv, S, dv), written to.
        q: (B, H, n, d).
        k: (B, Hkv, n, d).
        v: (B, Hkv, n, dv).
        lengths: (B,) committed rows.
        words: (B, n, W) which of the m + n rows behind them each sees.
        depths: (B, m + n), with a window.
        window: None sees everything.
        pending: m.

    Returns:
        (B, H, n, dv).
    """
    write_rows(keys, values, k, v, lengths, pending)
    out = tree_attention(
        q,
        keys,
        values,
        lengths,
        words,
        scale=q.shape[-1] ** -0.5,
        num_pending=pending,
        depths=depths,
        window=window,
    )
    return out.contiguous()  # as the compiler is told; Triton's is a view


def _shape_only(keys: Tensor, values: Tensor, q: Tensor, *rest: Any) -> Tensor:
    return q.new_empty(*q.shape[:3], values.shape[3])


_library = torch.library.Library("headway", "FRAGMENT")
_library.define(
    "draft_attention(Tensor(a!) keys, Tensor(b!) values, Tensor q, Tensor k, Tensor v, "
    "Tensor lengths, Tensor words, Tensor? depths, int? window, int pending) -> Tensor"
)
_library.impl("draft_attention", draft_attention, "CompositeExplicitAutograd")
torch.library.register_fake("headway::draft_attention", _shape_only, lib=_library)


def first_bits(counts: Tensor, words: int) -> Tensor:
    """(...) counts -> (..., W) words in which the bits of the first rows are set."""
    places = torch.arange(words, device=counts.device) * WORD
    inside = (counts[..., None] - places).clamp(0, WORD)
    return torch.where(inside == WORD, -1, (torch.ones_like(inside) << inside % WORD) - 1)


def chain_words(count: int, device: torch.device) -> Tensor:
    """(1, n, W) words of rows of which each sees those before it and itself."""
    return first_bits(torch.arange(1, count + 1, device=device), word_count(count))[None]
