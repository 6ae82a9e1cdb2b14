"""A data set that is read while it is trained on: tokenised, packed and shuffled as rows arrive.

Memory is bounded by the open sequences of the packer and the shuffle buffer. Every process reads
the same stream and trains on its share of each global batch, so that the batches do not depend on
how many there are.

Legend: B sequences per optimizer step, T sequence length.
"""

import hashlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from training.data.batches import Batch, count_supervised, draw_numbers, share_of
from training.data.chat import TokenizedRow
from training.data.encoding import Encode, refusal
from training.data.messages import MaskError
from training.data.packing import Packer, cut, pack, pack_state, unpack_state
from training.data.sources import Interleaved, Source, parse_source
from training.draws import generator

logger = logging.getLogger(__name__)
HEAD_ROWS = 256
"""Rows that stand for the data set where it is checked before training."""
COUNTED_ROWS = 20_000
"""Rows whose supervised tokens decide the draft vocabulary."""
_SHUFFLE = 7
"""The purpose of shuffling among what is drawn (``training.draws``)."""


class StreamedDataset:
    """Sequences of one or more sources in the order in which they are read.

    Rows of several sources come in turn; when all have ended, they start again. Packing, shuffling
    and the mask are those of data in memory: with the same rows, the sequences are those of
    ``training.data.packing.pack``. Steps are meant to be read in order. Any other is read too, but
    from the beginning: :meth:`state` and :meth:`restore` only save that time.

    Args:
        sources: names as ``training.data.sources.parse_source`` takes them.
        encode: a data row to its tokens and masks.
        length: T.
        batch_size: B, over all processes.
        seed: of the shuffling.
        packed: False puts each row in a sequence of its own.
        shuffle_buffer: sequences among which the next one is drawn; 0 keeps the order.
        split: of hub data sets.
        limit: use only the first rows of each source.
        skip_bad: leave out rows whose mask cannot be established instead of refusing the run.

    Raises:
        ValueError: a source cannot be read.
    """

    def __init__(
        self,
        sources: Sequence[str],
        encode: Encode,
        length: int,
        batch_size: int,
        seed: int = 0,
        packed: bool = True,
        shuffle_buffer: int = 0,
        split: str = "train",
        limit: int | None = None,
        skip_bad: bool = False,
    ) -> None:
        self._sources: list[Source] = [parse_source(name, split) for name in sources]
        self._limit, self._encode, self._skip_bad = limit, encode, skip_bad
        self.length, self.batch_size, self.seed = length, batch_size, seed
        self.packed, self.shuffle_buffer = packed, shuffle_buffer
        self._first: list[TokenizedRow] | None = None
        self._restart()

    def _restart(self) -> None:
        """Before the first row."""
        self._rows = Interleaved(self._sources, self._limit)
        self._packer = Packer(self.length, self.packed)
        self._buffer: list[list[TokenizedRow]] = []
        self._numbered = self.num_refused = self.num_unusable = 0
        self._next = 0  # the step that is read next
        self._current: list[list[TokenizedRow]] = []  # the sequences of the step before it

    @property
    def steps_per_epoch(self) -> int:
        """Not known.

        Raises:
            ValueError: always.
        """
        raise ValueError("data.streaming needs run.steps: nobody has counted the rows")

    # --- steps

    def step_indices(self, step: int) -> list[int]:
        """Numbers of the sequences of a step, counted as they are drawn."""
        return list(range(step * self.batch_size, (step + 1) * self.batch_size))

    def micro_batches(self, step: int, rank: int, world: int, micro_size: int) -> Iterator[Batch]:
        """This process's share of step ``step``, ``micro_size`` sequences at a time.

        Raises:
            MaskError: a row cannot be masked and is not to be left out.
            ValueError: a source cannot be read, or has no usable row.
        """
        groups = self._read_step(step)[rank::world]
        index = self.step_indices(step)[rank::world]
        draws = draw_numbers(self.seed, step, self.batch_size)[rank::world]
        return share_of(groups, self.length, index, draws, micro_size)

    def sequence(self, index: int) -> list[TokenizedRow]:
        """The documents of a sequence; reads up to its step."""
        step, place = divmod(index, self.batch_size)
        return self._read_step(step)[place]

    def rows_of(self, index: int) -> list[int]:
        """Numbers, in the stream, of the documents in a sequence of the last step that was read;
        [] for others, which are no longer held.
        """
        step, place = divmod(index, self.batch_size)
        held = step == self._next - 1 and bool(self._current)
        return [row.number for row in self._current[place]] if held else []

    def _read_step(self, step: int) -> list[list[TokenizedRow]]:
        """The B sequences of a step."""
        if step == self._next - 1 and self._current:
            return self._current
        if step < self._next:
            self._restart()
        while self._next <= step:
            first = self._next * self.batch_size
            self._current = [self._draw(first + place) for place in range(self.batch_size)]
            self._next += 1
        return self._current

    def _draw(self, number: int) -> list[TokenizedRow]:
        """Sequence ``number`` of the run."""
        while len(self._buffer) < max(1, self.shuffle_buffer):
            self._buffer += self._read_row()
        if not self.shuffle_buffer:
            return self._buffer.pop(0)
        drawn = generator(draw_numbers(self.seed, number, 1)[0], _SHUFFLE)
        place = int(torch.randint(len(self._buffer), (), generator=drawn))
        self._buffer[place], self._buffer[-1] = self._buffer[-1], self._buffer[place]
        return self._buffer.pop()

    def _read_row(self) -> list[list[TokenizedRow]]:
        """Read one row; returns the sequences that it completes."""
        name, row = self._rows.next()
        if self._rows.epoch and self._numbered == self.num_unusable:
            raise ValueError(
                "data: no row has a mask and a supervised token within data.max_length: nothing to "
                "train on"
            )
        encoded = self._encode_row(name, row)
        if not encoded:
            self.num_refused += 1
            _warn_rarely(self.num_refused, "whose mask cannot be established", name)
        groups: list[list[TokenizedRow]] = []
        for one in encoded:
            self._numbered += 1
            fitting = cut(one, self.length)
            if fitting is None:
                self.num_unusable += 1
                what = "with nothing supervised within data.max_length"
                _warn_rarely(self.num_unusable, what, name)
                continue
            groups += self._packer.add(replace(fitting, number=self._numbered - 1))
        return groups

    def _encode_row(self, name: str, row: dict[str, Any]) -> list[TokenizedRow]:
        """[] for a row that is left out."""
        try:
            return self._encode(row)
        except MaskError as error:
            if not self._skip_bad:
                raise refusal(name, error) from error
            return []

    # --- the beginning of the stream, read apart from the training position

    def _beginning(self, count: int) -> Iterator[TokenizedRow]:
        """What the first ``count`` rows hold, of one epoch at most."""
        rows = Interleaved(self._sources, self._limit)
        for _ in range(count):
            name, row = rows.next()
            if rows.epoch:
                return
            yield from self._encode_row(name, row)

    def head(self, count: int) -> list[list[TokenizedRow]]:
        """Up to ``count`` sequences packed from the first ``HEAD_ROWS`` rows.

        Raises:
            ValueError: none of these rows is usable.
        """
        return pack(self._first_rows(), self.length, self.packed)[:count]

    def token_counts(self, vocab_size: int, rows: int = COUNTED_ROWS) -> Tensor:
        """(V,) occurrences of each token among the supervised ones of the first ``rows`` rows."""
        return count_supervised(self._beginning(rows), vocab_size)

    def _first_rows(self) -> list[TokenizedRow]:
        if self._first is None:
            self._first = list(self._beginning(HEAD_ROWS))
        return self._first

    # --- resuming

    def identity(self) -> dict[str, Any]:
        """What a resumed run must find again: the options, and the first rows' tokens."""
        digest = hashlib.sha256()
        for row in self._first_rows():
            digest.update(str(row.ids).encode() + bytes(row.supervised))
        return {
            "data.streaming": True,
            "data.train": [source.name for source in self._sources],
            "data.split": [source.split for source in self._sources],
            "data.limit": self._limit,
            "data.max_length": self.length,
            "data.pack": self.packed,
            "data.shuffle_buffer": self.shuffle_buffer,
            "data.skip_bad_rows": self._skip_bad,
            "token ids": digest.hexdigest()[:16],
        }

    def state(self) -> dict[str, Any]:
        """The position behind the last step that was read, with the sequences held, as JSON."""
        return {
            "step": self._next,
            "rows": self._rows.state(),
            "numbered": self._numbered,
            "refused": self.num_refused,
            "unusable": self.num_unusable,
            "open": self._packer.state(),
            "buffer": pack_state(self._buffer),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state` returned.

        Raises:
            ValueError: a source cannot be read.
        """
        self._restart()
        self._rows.restore(state["rows"])
        self._packer.restore(state["open"])
        self._buffer = unpack_state(state["buffer"])
        self._numbered, self._next = state["numbered"], state["step"]
        self.num_refused, self.num_unusable = state["refused"], state["unusable"]


def _warn_rarely(count: int, what: str, name: str) -> None:
    """Say how many rows were left out, at 1, 10, 100, ..."""
    if str(count).rstrip("0") == "1":
        logger.warning("data: left out %d rows %s, the last being %s", count, what, name)
