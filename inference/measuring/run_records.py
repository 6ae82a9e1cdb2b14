"""The folder that an evaluation leaves behind, and reading it back.

`result.json` holds what was asked for, what was measured and where; each of its cells is one
(temperature, rule, size). `records.jsonl` holds one line per decoded turn and one per round, so
that any other number can be computed from them (`inference.measuring.conventions`). Reading is
strict: a key too many, one too few, or counts that contradict each other are errors that name the
line.

Pure: the standard library.

Letters: N tree nodes, root included.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from inference.files import write_whole

FORMAT = 1
RESULT, RECORDS = "result.json", "records.jsonl"
RESULT_KEYS = ("format", "settings", "target", "head", "cells", "costs", "training")
"""Keys that every result has; provenance comes beside them."""
CELL_KEYS = (
    *("temperature", "rule", "size", "name", "prediction", "reliability", "by_category"),
    "speedup",
)
"""Keys that every cell has, beside the other numbers of
`inference.measuring.evaluation.Report.to_dict`. If "speedup" is None, the recorded seconds are not
of like decoding and are not to be compared."""


@dataclass(frozen=True)
class Trace:
    """The tree of one round, node by node; node 0 is the last committed token.

    Attributes:
        tokens: N ids.
        pieces: N texts of them.
        parents: N, -1 for the root, else below the node's own index.
        path: the nodes that were accepted, from the root down, without it.
        p: N, the target's probability of the node's token after its parent, under the law that
            acceptance used; None for the root, and where the target was not asked.
        q: N, the draft's probability of it; None for the root, and where nobody stated one.
    """

    tokens: list[int]
    pieces: list[str]
    parents: list[int]
    path: list[int]
    p: list[float | None]
    q: list[float | None]

    def __post_init__(self) -> None:
        lengths = {len(getattr(self, each.name)) for each in fields(self) if each.name != "path"}
        if len(lengths) != 1 or not self.tokens or self.parents[0] != -1:
            raise ValueError("trace: all lists but path have one entry per node, the root first")
        above = 0
        for node in self.path:
            if not 0 < node < len(self.tokens) or self.parents[node] != above:
                raise ValueError(f"trace: path {self.path} does not go down the tree")
            above = node

    def children(self, node: int) -> list[int]:
        """Children of a node, in the order they were proposed in."""
        return [child for child, parent in enumerate(self.parents) if parent == node]


@dataclass(frozen=True)
class RequestRecord:
    """One decoded turn.

    Attributes:
        cell: index in the result's cells.
        id: of the prompt.
        category: of the prompt.
        turn: 0 for the first.
        prompt_tokens: before it, the history included.
        tokens: new ones; the first comes from the prefill and belongs to no round.
        pieces: text of each.
        seconds: "prefill", "target", "draft", "total" (of the decoding after the prefill), ...; in
            a batch, an equal share of it.
        plain_seconds: "prefill" and "total" of decoding without drafts; None if that was not done.
        difference: from plain decoding, where the same tokens were promised: "position",
            "expected", "found", "gap", "near_tie"; None without one.
        plain_tokens: new tokens of plain decoding; None if that was not done.
    """

    cell: int
    id: str
    category: str
    turn: int
    prompt_tokens: int
    tokens: list[int]
    pieces: list[str]
    seconds: dict[str, float]
    plain_seconds: dict[str, float] | None = None
    difference: dict[str, Any] | None = None
    plain_tokens: int | None = None

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.pieces):
            raise ValueError(f"{len(self.tokens)} tokens, but {len(self.pieces)} pieces")


@dataclass(frozen=True)
class RoundRecord:
    """One target forward of one turn.

    Attributes:
        cell, id, turn: of its request.
        round: 0 for the first.
        context: tokens committed before it, prompt included.
        draft_tokens: proposed.
        depth: of the deepest of them; 0 without drafts.
        width: rows that the target verified, which is draft_tokens + 1.
        accepted: draft tokens that were accepted and reached the text.
        emitted: tokens that the round added: the accepted ones, and the target's own unless
            `ended`.
        ended: the text ended with an accepted token, so the target added none.
        trace: the tree; None for requests that are not traced.
    """

    cell: int
    id: str
    turn: int
    round: int
    context: int
    draft_tokens: int
    depth: int
    width: int
    accepted: int
    emitted: list[int]
    ended: bool
    trace: Trace | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.accepted <= self.depth <= self.draft_tokens == self.width - 1:
            raise ValueError(
                f"accepted {self.accepted} <= depth {self.depth} <= draft_tokens "
                f"{self.draft_tokens} = width {self.width} - 1 does not hold"
            )
        if len(self.emitted) != self.accepted + (not self.ended):
            raise ValueError(
                f"{len(self.emitted)} tokens emitted, of which {self.accepted} accepted"
                + (" and none of the target's" if self.ended else " and one of the target's")
            )
        if self.trace is not None:
            taken = [self.trace.tokens[node] for node in self.trace.path]
            if len(self.trace.tokens) != self.width or taken != self.emitted[: self.accepted]:
                raise ValueError("the trace does not fit width, or accepted and emitted")


@dataclass(frozen=True)
class Run:
    """An evaluation.

    Attributes:
        result: all of `result.json`.
        requests: decoded turns, in the order of decoding.
        rounds: of all requests.
    """

    result: dict[str, Any]
    requests: list[RequestRecord] = field(default_factory=list)
    rounds: list[RoundRecord] = field(default_factory=list)

    @property
    def cells(self) -> list[dict[str, Any]]:
        """Settings and numbers, one per (temperature, rule, size)."""
        return self.result["cells"]

    def requests_of(self, cell: int) -> list[RequestRecord]:
        """The decoded turns of one cell."""
        return [request for request in self.requests if request.cell == cell]

    def rounds_of(self, request: RequestRecord) -> list[RoundRecord]:
        """The rounds of one turn, in order."""
        return self._index.get((request.cell, request.id, request.turn), [])

    @cached_property
    def _index(self) -> dict[tuple[int, str, int], list[RoundRecord]]:
        found: dict[tuple[int, str, int], list[RoundRecord]] = {}
        for each in self.rounds:
            found.setdefault((each.cell, each.id, each.turn), []).append(each)
        return found


def write_run(folder: Path, run: Run) -> None:
    """Write the folder; other files in it stay, those of an earlier run are replaced.

    Each file is whole or not there, and `result.json` comes last: a folder with one is complete.

    Raises:
        ValueError: keys are missing, counts contradict each other, or a number is not finite.
        OSError: there is no room, or `folder` is a file.
    """
    _check(run, str(folder))
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; a run is a folder: name another")
    result = _json(run.result, indent=1) + "\n"  # what cannot be written leaves an old run alone
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RESULT).unlink(missing_ok=True)
    lines = [{"kind": "request", **asdict(each)} for each in run.requests]
    lines += [{"kind": "round", **asdict(each)} for each in run.rounds]
    write_whole(folder / RECORDS, (_json(line) + "\n" for line in lines))
    write_whole(folder / RESULT, [result])


def read_run(folder: Path) -> Run:
    """Read a folder back.

    Raises:
        ValueError: it is no run, or not one of this format; the message says where.
    """
    path = folder / RESULT
    if not path.is_file():
        raise ValueError(
            f"{folder} holds no {RESULT}: it is no finished run of scripts.evaluate --out"
        )
    result = _parse(path.read_text(encoding="utf-8"), str(path))
    if result.get("format") != FORMAT:
        raise ValueError(f"{path}: format {result.get('format')!r}, this version reads {FORMAT}")
    requests: list[RequestRecord] = []
    rounds: list[RoundRecord] = []
    records = folder / RECORDS
    if not records.is_file():
        raise ValueError(f"{folder} holds no {RECORDS}: evaluate again with --out {folder}")
    with records.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            record = _record(_parse(line, f"{records}, line {number}"), f"{records}, line {number}")
            if isinstance(record, RequestRecord):
                requests.append(record)
            else:
                rounds.append(record)
    run = Run(result, requests, rounds)
    _check(run, str(folder))
    return run


def _record(row: dict[str, Any], where: str) -> RequestRecord | RoundRecord:
    kind = row.pop("kind", None)
    try:
        if kind == "request":
            return RequestRecord(**_exactly(RequestRecord, row))
        if kind == "round":
            values = _exactly(RoundRecord, row)
            if values["trace"] is not None:
                values["trace"] = Trace(**_exactly(Trace, values["trace"]))
            return RoundRecord(**values)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from error
    raise ValueError(f"{where}: kind must be request or round, got {kind!r}")


def _exactly(kind: type, row: dict[str, Any]) -> dict[str, Any]:
    wanted = {each.name for each in fields(kind)}
    if wanted != row.keys():
        missing, unknown = sorted(wanted - row.keys()), sorted(row.keys() - wanted)
        raise ValueError(f"{kind.__name__}: missing keys {missing}, unknown keys {unknown}")
    return row


def _check(run: Run, where: str) -> None:
    """Keys, and that every round belongs to a request whose tokens it emitted."""
    if missing := [key for key in RESULT_KEYS if key not in run.result]:
        raise ValueError(f"{where}: {RESULT} lacks {', '.join(missing)}")
    for number, cell in enumerate(run.cells):
        if missing := [key for key in CELL_KEYS if key not in cell]:
            raise ValueError(f"{where}: cell {number} of {RESULT} lacks {', '.join(missing)}")
    known = {(each.cell, each.id, each.turn) for each in run.requests}
    if len(known) != len(run.requests):
        raise ValueError(f"{where}: two requests of one cell have the same id and turn")
    for each in run.rounds:
        if (each.cell, each.id, each.turn) not in known:
            raise ValueError(f"{where}: round {each.round} of {each.id!r} belongs to no request")
    for request in run.requests:
        if not 0 <= request.cell < len(run.cells):
            raise ValueError(f"{where}: request {request.id!r} is of cell {request.cell}: no such")
        rounds = run.rounds_of(request)
        if [each.round for each in rounds] != list(range(len(rounds))):
            raise ValueError(f"{where}: rounds of {request.id!r} are missing or out of order")
        emitted: list[int] = []
        for each in rounds:
            if each.context != request.prompt_tokens + 1 + len(emitted):
                raise ValueError(
                    f"{where}: round {each.round} of {request.id!r} has context {each.context}, "
                    f"but {request.prompt_tokens} + 1 + {len(emitted)} tokens came before it"
                )
            emitted += each.emitted
        if emitted != request.tokens[1:]:
            raise ValueError(f"{where}: the rounds of {request.id!r} did not emit its tokens")


def _json(value: dict[str, Any], indent: int | None = None) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False, indent=indent)


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text, parse_constant=_not_finite)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{where}: not a JSON object")
    return value


def _not_finite(name: str) -> float:
    raise ValueError(f"{name} is no number")
