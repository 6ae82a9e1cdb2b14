"""Where rows come from: the hub, JSON and parquet files, ``save_to_disk`` folders; whole or
streamed.
"""

import glob
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets

KINDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
"""Readers of ``datasets`` by ending."""


@dataclass(frozen=True)
class Source:
    """What a name in ``data.train`` stands for.

    Attributes:
        name: as given.
        kind: json, parquet, disk (a ``save_to_disk`` folder) or hub (a hub id, or a folder laid
            out like one).
        files: of json and parquet, sorted.
        path: hub id or folder.
        config: of a hub data set, or None.
        split: of a hub data set or a saved one with several.
    """

    name: str
    kind: str
    files: tuple[str, ...] = ()
    path: str = ""
    config: str | None = None
    split: str = "train"


def parse_source(name: str, split: str = "train") -> Source:
    """Tell files, patterns, folders and hub ids apart.

    Args:
        name: a file; a pattern with ``*``; a folder written by ``save_to_disk``; or a hub id, with
            a config and a split of its own where they are needed: ``owner/name``,
            ``owner/name:config``, ``owner/name:config:split`` or ``owner/name::split``. A folder of
            JSON or parquet files is read like a hub repository: files named after a split are that
            split, and all are train where none is.
        split: where the name gives none.

    Raises:
        ValueError: no such file, a pattern without files, or files of several kinds.
    """
    if Path(name).is_file():
        return _of_files(name, [Path(name)])
    if any(letter in name.partition(":")[0] for letter in "*?["):  # a split may have brackets
        return _of_files(name, sorted(Path(p) for p in glob.glob(name, recursive=True)))
    if Path(name).suffix in KINDS:
        raise ValueError(f"data: cannot read {name!r}: there is no such file")
    path, config = name, ""
    if not Path(name).is_dir():
        path, _, rest = name.partition(":")
        config, _, own = rest.partition(":")
        split = own or split
    saved = any((Path(path) / mark).exists() for mark in ("state.json", "dataset_dict.json"))
    return Source(name, "disk" if saved else "hub", (), path, config or None, split)


def _of_files(name: str, files: Sequence[Path]) -> Source:
    """Files of one kind; the empty ones are left out.

    Raises:
        ValueError: there are none, or they are of several kinds.
    """
    if not files:
        raise ValueError(f"data: cannot read {name!r}: no file has such a name")
    kinds = {KINDS.get(path.suffix) for path in files}
    if len(kinds) > 1 or None in kinds:
        raise ValueError(
            f"data: cannot read {name!r}: files must all end in .parquet, or all in .jsonl or "
            f".json, and it has {sorted({path.suffix for path in files})}"
        )
    filled = [path for path in files if not _is_blank(path)]
    if not filled:
        raise ValueError(f"data: {name!r} is empty")
    return Source(name, str(kinds.pop()), tuple(str(path) for path in filled))


def _is_blank(path: Path) -> bool:
    return path.stat().st_size < 8 and path.read_bytes().strip() in (b"", b"[]")


def load_rows(source: str, split: str = "train", limit: int | None = None) -> list[dict[str, Any]]:
    """Rows of a source that fits into memory.

    Args:
        source: see :func:`parse_source`.
        split: of a hub data set or a saved one with several.
        limit: keep the first ``limit`` rows.

    Raises:
        ValueError: the source cannot be read or is empty.
    """
    found = parse_source(source, split)
    with _reading(source):
        loaded = _load(found, streaming=False)
        if limit is not None:
            loaded = loaded.select(range(min(limit, len(loaded))))
    if not len(loaded):
        raise ValueError(f"data: {source!r} is empty")
    return [_without_nulls(row) for row in loaded]


def _load(source: Source, streaming: bool) -> Any:
    """A ``Dataset``, or an ``IterableDataset`` that reads as it goes."""
    if source.kind == "disk":
        loaded = datasets.load_from_disk(source.path)
        if isinstance(loaded, datasets.DatasetDict):
            if source.split not in loaded:
                raise ValueError(f"it has the splits {sorted(loaded)}, not {source.split!r}")
            loaded = loaded[source.split]
        return loaded.to_iterable_dataset() if streaming else loaded
    if source.kind == "hub":
        return datasets.load_dataset(
            source.path, source.config, split=source.split, streaming=streaming
        )
    files = list(source.files)
    return datasets.load_dataset(source.kind, data_files=files, split="train", streaming=streaming)


@contextmanager
def _reading(source: str) -> Iterator[None]:
    """Errors of datasets, pyarrow and fsspec inside the block become ours, naming the source."""
    try:
        yield
    except IndexError as error:  # what datasets raises on a saved data set without shards
        raise ValueError(f"data: {source!r} is empty") from error
    except Exception as error:
        if "corresponds to no data" in str(error):
            raise ValueError(f"data: {source!r} is empty") from error
        raise ValueError(f"data: cannot read {source!r}: {error}") from error


def _without_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """Columns that other rows have are none of this one."""
    return {key: value for key, value in row.items() if value is not None}


class RowStream:
    """Rows of one source as they are read, from a position that can be kept.

    Args:
        source: parsed.
        limit: end behind this many rows.
    """

    def __init__(self, source: Source, limit: int | None = None) -> None:
        self.source, self.limit = source, limit
        self.rows = 0
        self._close: Callable[[], object] | None = None
        self._open()

    def next(self) -> dict[str, Any] | None:
        """The next row; None at the end, and from then on.

        Raises:
            ValueError: it cannot be read.
        """
        if self.limit is not None and self.rows >= self.limit:
            return None
        with _reading(self.source.name):
            row = next(self._rows, None)
        if row is None:
            return None
        self.rows += 1
        return _without_nulls(row)

    def rewind(self) -> None:
        """Back to the first row."""
        self.rows = 0
        self._open()

    def state(self) -> dict[str, Any]:
        """The position as JSON: the rows read, and where ``datasets`` finds the next."""
        return {"rows": self.rows, "at": self._data.state_dict() if self.rows else None}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on behind what :meth:`state` had read."""
        self.rows = state["rows"]
        self._open(state["at"])

    def _open(self, at: dict[str, Any] | None = None) -> None:
        if self._close is not None:
            self._close()
        with _reading(self.source.name):
            self._data = _load(self.source, streaming=True)
            if at is not None:
                self._data.load_state_dict(at)
            self._rows = iter(self._data)
        # Also closes files before the interpreter is taken down, of which pyarrow complains.
        self._close = weakref.finalize(self, self._rows.close)


class Interleaved:
    """Rows of several sources, one of each in turn.

    A source that ends drops out until all have, so that an epoch is every row of every source
    once; then all start again.

    Args:
        sources: parsed.
        limit: use only the first rows of each.
    """

    def __init__(self, sources: Sequence[Source], limit: int | None = None) -> None:
        self._streams = [RowStream(source, limit) for source in sources]
        self._ended = [False] * len(sources)
        self._turn = 0
        self.epoch = 0

    def next(self) -> tuple[str, dict[str, Any]]:
        """The next row with its name.

        Raises:
            ValueError: a source cannot be read, or all are empty.
        """
        while True:
            if all(self._ended):
                self._restart()
            turn, self._turn = self._turn, (self._turn + 1) % len(self._streams)
            if self._ended[turn]:
                continue
            stream = self._streams[turn]
            row = stream.next()
            if row is not None:
                return f"row {stream.rows - 1} of {stream.source.name}", row
            self._ended[turn] = True

    def _restart(self) -> None:
        if not any(stream.rows for stream in self._streams):
            names = [stream.source.name for stream in self._streams]
            raise ValueError(f"data: {names} are empty")
        for stream in self._streams:
            stream.rewind()
        self._ended = [False] * len(self._streams)
        self._turn, self.epoch = 0, self.epoch + 1

    def state(self) -> dict[str, Any]:
        """The position as JSON."""
        return {
            "epoch": self.epoch,
            "turn": self._turn,
            "sources": [stream.state() for stream in self._streams],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on behind what :meth:`state` had read."""
        self.epoch, self._turn = state["epoch"], state["turn"]
        self._ended = [False] * len(self._streams)  # the ended ones say so again
        for stream, position in zip(self._streams, state["sources"], strict=True):
            stream.restore(position)
