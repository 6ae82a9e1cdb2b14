"""Exports in vLLM's own draft models: what its loader fills, and what its forward computes.

Runs in an environment in which vLLM can be imported. vLLM's wheels bring several GB of CUDA along,
so none is made here: name one with ``--python vllm=<interpreter>``. The compiled parts need not
load: Python code of the models, linear layers, norms, rotary embedding and loaders are vLLM's;
attention is torch's. vLLM 0.33.0 has no Medusa; for that ``--python vllm-medusa=`` names one of
0.32.0.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from drafters import TargetModel
from drafters.base import Drafter
from drafters.export import ExportError, read_as, read_head, write_as
from drafters.export.engines import Loader, engine_tensors, loaders_for
from drafters.export.engines.loader import load
from drafters.export.folder import read_json
from drafters.export.golden import GOLDEN
from drafters.vocab import from_offsets
from interop.results import FAILED, LOADED, PASSED, SKIPPED, Entry
from interop.setting import CannotRun, Setting, headway_versions, output

NAME = "vLLM"
ENVIRONMENT, MEDUSA_ENVIRONMENT = "vllm", "vllm-medusa"
WORKER = Path(__file__).with_name("vllm_worker.py")
SECONDS = 1800
TOLERANCE = 1e-4
CHAIN = 3

FORMS = (
    ("eagle3", "sglang", "eagle3"),
    ("eagle3", "vllm", "eagle3"),
    ("eagle3", "speculators-eagle3", "eagle3"),
    ("peagle", "vllm-peagle", "peagle"),
    ("peagle", "speculators-peagle", "peagle"),
    ("eagle1", "eagle1", "eagle"),
    ("dflash", "dflash", "dflash"),
    ("dflash", "speculators-dflash", "dflash"),
    ("dspark", "dspark", "dspark"),
    ("dspark", "dspark-specforge", "dspark"),
    ("dspark", "speculators-dspark", "dspark"),
    ("medusa", "medusa", "medusa"),
    ("medusa", "vllm-medusa", "medusa"),
)
"""(family, dialect, vLLM's method)."""
NO_FORWARD = ("dflash", "dspark")
"""Methods whose pass over the context needs compiled kernels."""
DIALECTS = tuple(dialect for _, dialect, _ in FORMS)


def check(setting: Setting) -> Iterator[Entry]:
    """Entries of every form that a head was given for.

    Raises:
        CannotRun: no environment was named.
    """
    if not {ENVIRONMENT, MEDUSA_ENVIRONMENT} & set(setting.pythons):
        raise CannotRun(
            "vLLM's wheel brings several GB of CUDA: name an environment that has it with "
            f"--python {ENVIRONMENT}=<interpreter>"
        )
    target = TargetModel.load(str(setting.target), torch.float32, "cpu")
    heads = {f: read_head(setting.head(f), target) for f, _, _ in FORMS if f in setting.heads}
    for name in (ENVIRONMENT, MEDUSA_ENVIRONMENT):
        forms = [
            form
            for form in FORMS
            if form[0] in heads and (form[2] == "medusa") == (name == MEDUSA_ENVIRONMENT)
        ]
        if not forms:
            continue
        if name in setting.pythons:
            yield from _in(setting, name, forms, heads)
        for _, dialect, _ in forms if name not in setting.pythons else ():
            said = f"no environment: --python {name}=<interpreter>"
            yield Entry(NAME, dialect, LOADED, SKIPPED, said, headway_versions())


def _in(
    setting: Setting,
    environment: str,
    forms: Sequence[tuple[str, str, str]],
    heads: dict[str, Drafter],
) -> Iterator[Entry]:
    """All forms in one environment."""
    work = setting.folder(environment)
    jobs: list[dict[str, Any]] = []
    for family, dialect, method in forms:
        head = heads[family]
        try:
            export = write_as(dialect, head, work / dialect)
        except ExportError as reason:
            detail = " ".join(str(reason).split())
            yield Entry(NAME, dialect, LOADED, SKIPPED, detail, headway_versions())
            continue
        if "vllm" not in export.served:
            detail = "vLLM cannot serve this head in this form, as its export says"
            yield Entry(NAME, dialect, LOADED, SKIPPED, detail, headway_versions())
            continue
        job: dict[str, Any] = {"name": dialect, "family": family, "method": method}
        job |= {"export": str(export.folder.resolve())}
        job |= {"drafts": str(head.num_drafts or CHAIN), "forward": method not in NO_FORWARD}
        jobs.append({**job, "result": str((work / f"{dialect}.safetensors").resolve())})
    asked = {"target": str(setting.target.resolve()), "jobs": jobs}
    if not jobs:
        return
    (work / "jobs.json").write_text(json.dumps(asked), encoding="utf-8")
    python = str(setting.pythons[environment])
    lines = output([python, str(WORKER), str(work / "jobs.json")], timeout=SECONDS).splitlines()
    said = {row["name"]: row for row in (json.loads(x) for x in lines if x.startswith("{"))}
    for job in jobs:
        dialect, head = job["name"], heads[job["family"]]
        row = said.get(dialect, {"error": "its process ended before this one"})
        if "error" in row:
            yield Entry(NAME, dialect, LOADED, FAILED, row["error"], row.get("versions", {}))
            continue
        problems = compared(Path(job["export"]), dialect, head, Path(job["result"]))
        detail = "; ".join(problems) or _passed(row["model"], Path(job["export"]), job["forward"])
        status = FAILED if problems else PASSED
        yield Entry(NAME, dialect, LOADED, status, detail, row["versions"])


def _passed(model: str, export: Path, forward: bool) -> str:
    if not forward:
        return (
            f"{model} holds every tensor where the simulation puts it; its pass over the context "
            "needs compiled kernels and was not run"
        )
    rows = len(load_file(export / GOLDEN)["logits"])
    return f"{model}: every tensor in its place, {rows} rows of logits equal within {TOLERANCE:g}"


def compared(export: Path, dialect: str, head: Drafter, result: Path) -> list[str]:
    """Where vLLM holds or computes something else than it should.

    Args:
        export: the folder.
        dialect: of it.
        head: that was exported.
        result: what the worker saved.
    """
    found = load_file(result)
    try:
        read = read_as(dialect, export, head.target)
    except ExportError as error:
        return [str(error)]
    written = read_json(export / "config.json")
    loader = [x for x in loaders_for(written, read.family) if x.engine == "vllm"][-1]
    problems = _parameters(loader, written, engine_tensors(export), read, found)
    if "logits" in found:
        problems += _logits(found["logits"], export, read)
    return problems


def _parameters(
    loader: Loader,
    written: dict[str, Any],
    tensors: dict[str, Tensor],
    head: Drafter,
    found: dict[str, Tensor],
) -> list[str]:
    """The simulation must say of every parameter what vLLM holds in it; rows may be padded."""
    expected = load(loader, loader.flat(written), tensors, head.target)
    problems = list(expected.problems)
    for name, tensor in expected.parameters.items():
        held = found.get(name)
        if name == "mask_hidden":  # a buffer, which the logits depend on
            continue
        if held is None or not torch.equal(held[: len(tensor)].to(tensor.dtype), tensor):
            problems.append(f"{name} does not hold what the file has for it")
    return problems


def _logits(found: Tensor, export: Path, head: Drafter) -> list[str]:
    """Logits of target tokens, of which a smaller vocabulary has a part."""
    wanted = load_file(export / GOLDEN)["logits"]
    if "d2t" in (tensors := engine_tensors(export)):
        found = found[:, from_offsets(tensors["d2t"])]
    found = found[:, : wanted.shape[1]]
    difference = ((found - wanted).abs().max() / wanted.abs().max()).item()
    if difference <= TOLERANCE:
        return []
    return [f"logits differ by {difference:.2g} of the largest"]
