"""Every dialect with every trained head that it can hold: written, read, checked, simulated.

Nothing of another program runs here: reading compares logits with the head's own, and the loaders
of SGLang and vLLM are simulated as they stand in the source of the versions named.
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
from interop.results import (
    FAILED,
    PASSED,
    READ,
    ROUND_TRIP,
    SIMULATED,
    SKIPPED,
    STRICT,
    WRITTEN,
    Entry,
)
from interop.setting import Setting, headway_versions

NAME = "files"
ROUNDING = 1e-5
DIALECTS = tuple(BY_NAME)


def check(setting: Setting) -> Iterator[Entry]:
    """Entries of every dialect."""
    target = TargetModel.load(str(setting.target), torch.float32, "cpu")
    heads = {name: read_head(folder, target) for name, folder in setting.heads.items()}
    for name, dialect in BY_NAME.items():
        fitting = {label: h for label, h in heads.items() if h.family in dialect.families}
        refused = {label: refusals(head, dialect) for label, head in fitting.items()}
        held = [label for label in fitting if not refused[label]]
        if not held:
            said = "; ".join(found[0] for found in refused.values())
            families = " or ".join(dialect.families)
            detail = said or f"no trained {families} head was given"
            yield Entry(NAME, name, WRITTEN, SKIPPED, detail, headway_versions())
        for label in held:
            folder = setting.folder(f"exports/{name}") / label
            yield from _one(label, name, fitting[label], folder)


def _one(label: str, name: str, head: Drafter, folder: Path) -> Iterator[Entry]:
    """One head in one dialect."""
    versions = headway_versions()
    try:
        export = write_as(name, head, folder)
        yield Entry(label, name, WRITTEN, PASSED, f"{export.num_tensors} tensors", versions)
        again = read_as(name, folder, head.target)
        yield Entry(label, name, READ, PASSED, f"a {again.family} head", versions)
        yield _round_trip(label, name, head, again)
        check_folder(folder, head.target, BY_NAME[name])
        yield Entry(label, name, STRICT, PASSED, "names, shapes, values, config", versions)
    except ExportError as error:
        yield Entry(label, name, STRICT, FAILED, " ".join(str(error).split()), versions)
        return
    found = engine_problems(folder, again)
    for engine in export.served:
        if any(loader.engine == engine for loader in found):
            yield _simulated(label, name, engine, found)


def _simulated(label: str, name: str, engine: str, found: dict[Loader, list[str]]) -> Entry:
    """One engine: its newest version decides, older ones are told."""
    mine = [(loader, problems) for loader, problems in found.items() if loader.engine == engine]
    newest, problems = mine[-1]
    said = "; ".join(problems) or f"{newest.model} uses all of it, and as the head does"
    for older, lacking in mine[:-1]:
        if lacking:
            said += f" (not {older.versions[0]}: {'; '.join(lacking)})"
    versions = {engine: ", ".join(newest.versions)}
    status = FAILED if problems else PASSED
    return Entry(f"{label} in {engine}", name, SIMULATED, status, said, versions)


def _round_trip(label: str, name: str, head: Drafter, again: Drafter) -> Entry:
    """All tensors and logits, bit for bit."""
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
        return Entry(label, name, ROUND_TRIP, FAILED, said, headway_versions())
    said = f"{len(after)} tensors and the golden logits are equal"
    if reduced:
        said = (
            f"{len(after)} tensors are equal; it drafts from the whole vocabulary, with the same "
            f"logits at the tokens of the draft vocabulary (within {ROUNDING:g})"
        )
    if left_out:
        said += f"; left out: {', '.join(sorted(left_out))}"
    return Entry(label, name, ROUND_TRIP, PASSED, said, headway_versions())
