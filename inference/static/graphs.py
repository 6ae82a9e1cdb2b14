"""Forwards of the target as CUDA graphs, one for each width that trees are padded to.

Launching the kernels of a forward one by one takes longer than a GPU needs for a few rows. A graph
launches them all at once, but always reads the same memory and has the same shapes. So ids,
positions and ancestor words are copied into buffers that stay where they are, rows are filled up to
the next of `BUCKETS`, and attention works by words and lengths (`inference.static.attention`).

Nothing here but `CudaCapture` needs CUDA: with `called_each_time` in its place the same path runs
anywhere, function call by function call.

Letters: B sequences, N rows after padding, m rows pending, W words.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from drafters import TargetOutput
from inference.static.attention import TreeRows
from inference.static.cache import StaticCache
from inference.static.inputs import row_depths, row_inputs, row_words
from inference.static.words import MOST_ROWS, word_count

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Rows that forwards are filled up to."""
WARM_UPS = 2
"""Eager runs before a capture: kernels are compiled and workspaces made in them."""
KEPT = 16
"""Graphs kept, the latest used; each has its own memory for what it returns, padding included."""
ALIGNED = 16
"""Parts of the input buffer start at multiples of so many numbers, as kernels like addresses."""

T = TypeVar("T")
Run = Callable[[Tensor, Tensor, TreeRows, Sequence[int]], TargetOutput]
"""(ids (B, N), positions (B, N), rows, feature layers) -> the forward."""


class Capture(Protocol):
    """Turns a function of buffers into one that does the same again, whatever is in them then.

    What it returns may be memory that the next call writes to.
    """

    def __call__(self, function: Callable[[], T]) -> Callable[[], T]:
        """Run or record the function."""
        ...


def called_each_time(function: Callable[[], T]) -> Callable[[], T]:
    """The capture of a machine without graphs: none."""
    return function


class CudaCapture:
    """Captures functions in CUDA graphs, which share one pool of memory.

    So what a replay returned is to be read, or copied, before another graph of the pool runs.

    Args:
        device: of everything that the functions touch.
        what: the subject of the message, should a function not be one that can be captured.
        instead: what its reader is to do.
        warm_ups: eager runs of each function beforehand; it has to bear repetition.
    """

    def __init__(self, device: torch.device, what: str, instead: str, warm_ups: int = 0) -> None:
        self._device, self._what, self._instead = device, what, instead
        self._warm_ups = warm_ups
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], T]) -> Callable[[], T]:
        """The replay of what the function does; nothing of the function itself is kept.

        Raises:
            ValueError: it waits for the device, as a host that reads a tensor does.
        """
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                for _ in range(self._warm_ups):
                    function()
            current.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                    out = function()
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                # The context of a capture that fails leaves its own stream behind.
                torch.cuda.set_stream(current)
                reason = str(error).partition("\n")[0]
                raise ValueError(
                    f"{self._what} cannot be captured in a CUDA graph ({reason}): {self._instead}"
                ) from error

        def replay() -> T:
            graph.replay()
            return out

        return replay


@dataclass(frozen=True)
class Form:
    """What is built into a captured forward.

    Attributes:
        rows: N.
        pending: m.
        feature_layers: that it captures.
        shape: of the cache, B among it.
        address: of the cache.
    """

    rows: int
    pending: int
    feature_layers: tuple[int, ...]
    shape: tuple[int, ...]
    address: int

    @classmethod
    def of(cls, cache: StaticCache, width: int, feature_layers: Sequence[int]) -> Form:
        """The form for so many new rows; there is room for them in the cache."""
        rows = min(padded(width), MOST_ROWS - cache.pending)
        kv = cache.kv
        return cls(rows, cache.pending, tuple(feature_layers), tuple(kv.shape), kv.data_ptr())

    @property
    def batch(self) -> int:
        """B."""
        return self.shape[2]


def padded(rows: int) -> int:
    """The bucket of so many rows."""
    return next(bucket for bucket in BUCKETS if bucket >= rows)


@dataclass
class Inputs:
    """All that a forward reads besides weights and cache: views of one buffer, copied at once.

    Attributes:
        flat: the buffer, int64 like all of its parts.
        ids: (B, N).
        positions: (B, N).
        columns: (B, N) of the cache that the rows go to.
        words: (B, N, W).
        depths: (B, m + N).
        lengths: (B,) committed tokens.
    """

    flat: Tensor
    ids: Tensor
    positions: Tensor
    columns: Tensor
    words: Tensor
    depths: Tensor
    lengths: Tensor

    @classmethod
    @torch.inference_mode(False)  # buffers outlive the call that makes them
    def empty(cls, form: Form, device: torch.device | str = "cpu") -> Inputs:
        """Zeros."""
        batch, rows, total = form.batch, form.rows, form.pending + form.rows
        shapes: list[tuple[int, ...]] = [(batch, rows)] * 3
        shapes += [(batch, rows, word_count(total)), (batch, total), (batch,)]
        sizes = [-(-prod(shape) // ALIGNED) * ALIGNED for shape in shapes]
        flat = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        starts = accumulate(sizes, initial=0)
        views = (
            flat[start : start + prod(shape)].view(shape)
            for start, shape in zip(starts, shapes, strict=False)
        )
        return cls(flat, *views)

    def fill(
        self,
        cache: StaticCache,
        tokens: Sequence[Tensor],
        depths: Sequence[Tensor],
        seen: Sequence[Tensor],
    ) -> None:
        """Describe new rows of the cache; arguments as for `inference.engine.Engine.append`."""
        width, pending = self.ids.shape[1], cache.pending
        ids, positions = row_inputs(cache.lengths, tokens, depths, width)
        self.ids.copy_(ids)
        self.positions.copy_(positions)
        self.lengths.copy_(torch.tensor(cache.lengths))
        self.columns.copy_(self.lengths[:, None] + torch.arange(pending, pending + width))
        self.words.copy_(row_words(seen, width, pending))
        self.depths.copy_(row_depths(depths, pending + width))


class Replayed:
    """A forward of one form over one cache, to be run again and again.

    The cache is not kept alive by it.

    Args:
        form: of the forward and of the cache.
        cache: that rows are written to.
        run: the forward.
        capture: makes it repeatable; called at once, with what ``inputs`` says.
        inputs: of the first forward, on the host.

    Attributes:
        replay: runs what was loaded last; returns memory that the next run writes to, padding
            included.
    """

    def __init__(
        self, form: Form, cache: StaticCache, run: Run, capture: Capture, inputs: Inputs
    ) -> None:
        own = Inputs.empty(form, cache.kv.device)
        rows = TreeRows(
            cache.kv,
            own.columns,
            cache.shape.windows,
            lengths=own.lengths,
            words=own.words,
            depths=own.depths,
            pending=form.pending,
        )
        self._inputs = own
        self.load(inputs)
        self.replay = capture(lambda: run(own.ids, own.positions, rows, form.feature_layers))

    def load(self, inputs: Inputs) -> None:
        """Have the next run read these inputs, of the same form and on the host."""
        self._inputs.flat.copy_(inputs.flat)


class Graphs:
    """Forwards by their form, made at first use.

    Args:
        run: a forward, described by tensors alone.
        capture: makes it repeatable.
        kept: the most forms kept.

    Attributes:
        seconds: spent in making them.
    """

    def __init__(self, run: Run, capture: Capture, kept: int = KEPT) -> None:
        self._run, self._capture, self._kept = run, capture, kept
        self._forms: OrderedDict[Form, Replayed] = OrderedDict()
        self.seconds = 0.0

    def __len__(self) -> int:
        """Forms there are."""
        return len(self._forms)

    def serves(self, cache: StaticCache, width: int) -> bool:
        """Whether so many new rows fit into words, with those pending."""
        return cache.pending + width <= MOST_ROWS

    def clear(self) -> None:
        """Forget all forms."""
        self._forms.clear()

    def eager(self) -> Graphs:
        """The same without captures, for forwards that are not to be repeated."""
        return Graphs(self._run, called_each_time)

    def append(
        self,
        cache: StaticCache,
        tokens: Sequence[Tensor],
        depths: Sequence[Tensor],
        seen: Sequence[Tensor],
        feature_layers: Sequence[int],
    ) -> TargetOutput:
        """Run new rows, which are pending afterwards; see `inference.engine.Engine.append`."""
        width = max(map(len, tokens))
        found = self.loaded(cache, tokens, depths, seen, feature_layers)
        out = found.replay()
        cache.pending += width
        features = None if out.features is None else out.features[:, :width].clone()
        return TargetOutput(
            out.logits[:, :width].clone(), features, out.last_hidden[:, :width].clone()
        )

    def loaded(
        self,
        cache: StaticCache,
        tokens: Sequence[Tensor],
        depths: Sequence[Tensor],
        seen: Sequence[Tensor],
        feature_layers: Sequence[int],
    ) -> Replayed:
        """The forward of new rows, made if there is none, its inputs in place.

        Args:
            cache: grown where it has no room.
            tokens: as for `append`, as are the following.
            depths: B lists.
            seen: B matrices.
            feature_layers: that it captures.
        """
        width = max(map(len, tokens))
        cache.reserve(cache.columns(min(padded(width), MOST_ROWS - cache.pending)))
        form = Form.of(cache, width, feature_layers)
        inputs = Inputs.empty(form)
        inputs.fill(cache, tokens, depths, seen)
        found = self._forms.get(form)
        if found is None:
            return self._made(form, cache, inputs)
        self._forms.move_to_end(form)
        found.load(inputs)
        return found

    def _made(self, form: Form, cache: StaticCache, inputs: Inputs) -> Replayed:
        start = time.perf_counter()
        found = self._forms[form] = Replayed(form, cache, self._run, self._capture, inputs)
        if cache.kv.device.type == "cuda":
            torch.cuda.synchronize(cache.kv.device)
        self.seconds += time.perf_counter() - start
        while len(self._forms) > self._kept:  # nothing runs now, so none of them does
            self._forms.popitem(last=False)
        return found
