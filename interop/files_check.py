"""Every dialect with every trained head that it can hold: written, read, checked, simulated.

Nothing of another program runs here: reading compares logits with the head's own, and the loaders
of SGLang and vLLM are simulated as they stand in the source of the versions named. A round trip
without the draft vocabulary, which changes what is drafted, is marked so; an engine that the
dialect names and the export does not is refused.
"""

from collections.abc import Iterator
from pathlib import Path

import torch

from drafters import TargetModel
from drafters.base import Drafter
from drafters.export import (
    DIALECTS as BY_NAME,
)
from drafters.export import (
    Export,
    ExportError,
    check_folder,
    golden_inputs,
    golden_logits,
    read_as,
    read_head,
    write_as,
)
from drafters.export.engines import Loader, engine_problems
from drafters.export.writing import refusals
from interop.exports import not_served
from interop.results import (
    FAILED,
    HEADWAY,
    PASSED,
    READ,
    REFUSED,
    ROUND_TRIP,
    SIMULATED,
    SKIPPED,
    STRICT,
    WRITTEN,
    Entry,
)
from interop.setting import Setting, headway_versions, no_head

NAME = HEADWAY
ROUNDING = 1e-5
DIALECTS = tuple(BY_NAME)


def check(setting: Setting) -> Iterator[Entry]:
    """Entries of every dialect."""
    target = TargetModel.load(str(setting.target), torch.float32, "cpu")
    heads = {label: read_head(folder, target) for label, folder in setting.heads.items()}
    for name, dialect in BY_NAME.items():
        fitting = {label: h for label, h in heads.items() if h.family in dialect.families}
        if not fitting:
            detail = no_head(*dialect.families)
            yield Entry(NAME, name, WRITTEN, SKIPPED, detail, headway_versions())
        for label, head in fitting.items():
            if found := refusals(head, dialect):
                detail = "; ".join(found)
                yield Entry(NAME, name, WRITTEN, REFUSED, detail, headway_versions(), head=label)
            else:
                yield from _one(label, name, head, setting.folder(f"exports/{name}") / label)


def _one(label: str, name: str, head: Drafter, folder: Path) -> Iterator[Entry]:
    """One head in one dialect."""

    def entry(check: str, status: str, detail: str, limit: str = "") -> Entry:
        return Entry(NAME, name, check, status, detail, headway_versions(), head=label, limit=limit)

    try:
        export = write_as(name, head, folder)
        yield entry(WRITTEN, PASSED, f"{export.num_tensors} tensors")
        again = read_as(name, folder, head.target)
        yield entry(READ, PASSED, f"a {again.family} head")
        yield entry(ROUND_TRIP, *_round_trip(name, head, again))
        check_folder(folder, head.target, BY_NAME[name])
        yield entry(STRICT, PASSED, "names, shapes, values, config")
    except ExportError as error:
        yield entry(STRICT, FAILED, " ".join(str(error).split()))
        return
    yield from _simulated(label, export, engine_problems(folder, again))


def _simulated(label: str, export: Export, found: dict[Loader, list[str]]) -> Iterator[Entry]:
    """Of each engine the newest version decides, older ones are told."""
    declared = BY_NAME[export.format].engines
    for engine in dict.fromkeys(loader.engine for loader in found if loader.engine in declared):
        mine = [(loader, problems) for loader, problems in found.items() if loader.engine == engine]
        newest, problems = mine[-1]
        said = "; ".join(problems) or f"{newest.model} uses all of it, and as the head does"
        for older, lacking in mine[:-1]:
            if lacking:
                said += f" (not {older.versions[0]}: {'; '.join(lacking)})"
        status = FAILED if problems else PASSED
        if engine not in export.served:
            status, said = REFUSED, not_served(export)
        versions = {engine: ", ".join(newest.versions)}
        yield Entry(engine, export.format, SIMULATED, status, said, versions, head=label)


def _round_trip(name: str, head: Drafter, again: Drafter) -> tuple[str, str, str]:
    """All tensors and logits, bit for bit: status, detail, and what the file left out."""
    before, after = head.state_dict(), again.state_dict()
    left_out = set(BY_NAME[name].left_out(head))
    differing = [
        key
        for key in {*before, *after} - left_out
        if key not in before or key not in after or not torch.equal(before[key], after[key])
    ]
    inputs = golden_inputs(head)
    wanted, found = golden_logits(head, inputs), golden_logits(again, inputs)
    reduced = head.draft_vocab is not None and again.draft_vocab is None
    if reduced:  # the file drafts from the whole vocabulary, with the same matrix in other order
        found = found[:, head.draft_vocab]
    difference = ((found - wanted).abs().max() / wanted.abs().max()).item()
    if differing or difference > (ROUNDING if reduced else 0):
        said = f"differing: {', '.join(sorted(differing)) or f'logits, by {difference:.2g}'}"
        return FAILED, said, ""
    said = f"{len(after)} tensors and the golden logits are equal"
    if reduced:
        said = (
            f"{len(after)} tensors are equal; it drafts from the whole vocabulary, with the same "
            f"logits at the tokens of the draft vocabulary (within {ROUNDING:g})"
        )
    if left_out:
        said += f"; left out: {', '.join(sorted(left_out))}"
    return PASSED, said, "without draft vocabulary" if reduced else ""
