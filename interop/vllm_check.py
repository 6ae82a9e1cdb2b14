"""Exports in vLLM's own draft models: what its loader fills, and what its forward computes.

Runs vLLM's Python files on a CPU, in environments made for it: 0.33.0, and 0.32.0, the last version
with Medusa. What vLLM asks for brings several GB of CUDA and compiled kernels along, which nothing
here needs; so its wheel is installed without that, beside those packages that importing its draft
models needs. Models, linear layers, norms, rotary embedding and loaders are vLLM's; attention is
torch's. Each environment downloads vLLM's wheel (330 MB), torch and about 80 MB more, and takes 2
GB on disk. Where pip's index has CUDA builds of torch, PIP_EXTRA_INDEX_URL can name one of CPU
builds. ``--python vllm=<interpreter>`` (``vllm-medusa=`` for 0.32.0) names an environment that is
there already; with --no-install, what is missing is skipped.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from drafters import TargetModel
from drafters.base import Drafter
from drafters.export import Export, ExportError, read_as, read_head
from drafters.export.engines import Loader, engine_tensors, loaders_for
from drafters.export.engines.loader import load
from drafters.export.folder import read_json
from drafters.export.golden import GOLDEN
from drafters.vocab import from_offsets
from interop.exports import export_for
from interop.results import FAILED, LOADED, PASSED, REFUSED, SKIPPED, Entry
from interop.setting import TORCH, CannotRun, Setting, headway_versions, no_head, output

NAME = "vLLM"
IMPORTED = (
    TORCH,
    "aiohttp",
    "apache-tvm-ffi",
    "cachetools",
    "cbor2",
    "cloudpickle",
    "einops",
    "fastapi<0.137",
    "llguidance>=1.7,<1.8",
    "msgspec",
    "openai",
    "oss-harmony",
    "partial-json-parser",
    "pillow",
    "prometheus_client",
    "psutil",
    "py-cpuinfo",
    "pybase64",
    "pyzmq",
    "requests",
    "uvloop",
)
"""What importing its draft models needs, with vLLM's own bounds."""
BARE = ("xgrammar==0.2.8",)
"""Needed too, and asks for Triton, which is not."""
ENVIRONMENTS = {
    "vllm": (("transformers==5.20.0", *IMPORTED), ("vllm==0.33.0", *BARE)),
    "vllm-medusa": (("transformers==5.19.0", *IMPORTED), ("vllm==0.32.0", *BARE)),
}
"""Requirements by name of environment: installed with what they ask for, and without."""
WORKER = Path(__file__).with_name("vllm_worker.py")
SECONDS = 1800
TOLERANCE = 1e-4
CHAIN = 3

FORMS = (
    ("eagle3", "sglang", "eagle3"),
    ("eagle3", "vllm", "eagle3"),
    ("eagle3", "modelopt", "eagle3"),
    ("eagle3", "speculators-eagle3", "eagle3"),
    ("peagle", "vllm-peagle", "peagle"),
    ("peagle", "speculators-peagle", "peagle"),
    ("eagle1", "eagle1", "eagle"),
    ("dflash", "dflash", "dflash"),
    ("dflash", "dflash-vllm", "dflash"),
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


@dataclass(frozen=True)
class Job:
    """One export to load and compute.

    Attributes:
        label: of the head.
        head: that is exported.
        method: vLLM's.
        export: what was written.
    """

    label: str
    head: Drafter
    method: str
    export: Export

    @property
    def forward(self) -> bool:
        """Whether it can be computed without compiled kernels."""
        return self.method not in NO_FORWARD

    @property
    def name(self) -> str:
        """Of the job and its files."""
        return f"{self.export.format}-{self.label}"

    def asked(self, folder: Path) -> dict[str, Any]:
        """As the worker reads it, the result to be written below a folder."""
        return {
            "name": self.name,
            "method": self.method,
            "export": str(self.export.folder.resolve()),
            "drafts": str(self.head.num_drafts or CHAIN),
            "forward": self.forward,
            "result": str((folder / f"{self.name}.safetensors").resolve()),
        }

    def entry(self, status: str, detail: str, versions: dict[str, str], limit: str = "") -> Entry:
        """What came of it."""
        dialect = self.export.format
        return Entry(NAME, dialect, LOADED, status, detail, versions, head=self.label, limit=limit)


def check(setting: Setting) -> Iterator[Entry]:
    """Entries of every form, with every head that fits."""
    target = TargetModel.load(str(setting.target), torch.float32, "cpu")
    heads = {label: read_head(folder, target) for label, folder in setting.heads.items()}
    jobs: dict[str, list[Job]] = {name: [] for name in ENVIRONMENTS}
    for family, dialect, method in FORMS:
        environment = "vllm-medusa" if method == "medusa" else "vllm"
        fitting = {label: head for label, head in heads.items() if head.family == family}
        if not fitting:
            yield Entry(NAME, dialect, LOADED, SKIPPED, no_head(family), headway_versions())
        for label, head in fitting.items():
            folder = setting.folder(environment) / f"{dialect}-{label}"
            said = export_for("vllm", head, dialect, folder)
            if isinstance(said, str):
                versions = headway_versions()
                yield Entry(NAME, dialect, LOADED, REFUSED, said, versions, head=label)
            else:
                jobs[environment].append(Job(label, head, method, said))
    for environment, mine in jobs.items():
        if mine:
            yield from _in(setting, environment, mine)


def _in(setting: Setting, environment: str, jobs: Sequence[Job]) -> Iterator[Entry]:
    """All jobs in one environment."""
    work = setting.folder(environment)
    asked = {
        "target": str(setting.target.resolve()),
        "jobs": [job.asked(work) for job in jobs],
    }
    (work / "jobs.json").write_text(json.dumps(asked), encoding="utf-8")
    needed, bare = ENVIRONMENTS[environment]
    try:
        python = str(setting.python(environment, *needed, bare=bare))
        lines = output([python, str(WORKER), str(work / "jobs.json")], timeout=SECONDS).splitlines()
    except CannotRun as reason:
        for job in jobs:
            yield job.entry(SKIPPED, str(reason), headway_versions())
        return
    said = {row["name"]: row for row in (json.loads(x) for x in lines if x.startswith("{"))}
    for job in jobs:
        row = said.get(job.name, {"error": "its process ended before this one"})
        versions = row.get("versions", {})
        if "error" in row:
            yield job.entry(FAILED, row["error"], versions)
            continue
        problems, difference = compared(job, work / f"{job.name}.safetensors")
        if problems:
            yield job.entry(FAILED, "; ".join(problems), versions)
        elif difference is None:
            detail = (
                f"{row['model']} holds every tensor where the simulation puts it; its pass over "
                "the context needs compiled kernels and was not run"
            )
            yield job.entry(PASSED, detail, versions, "tensors only")
        else:
            detail = (
                f"{row['model']}: every tensor in its place, logits differ by {difference:.1e} of "
                "the largest"
            )
            yield job.entry(PASSED, detail, versions)


def compared(job: Job, result: Path) -> tuple[list[str], float | None]:
    """Where vLLM holds or computes something else than it should, and by how much logits differ.

    Args:
        job: that was done.
        result: what the worker saved.
    """
    found, export = load_file(result), job.export.folder
    try:
        read = read_as(job.export.format, export, job.head.target)
    except ExportError as error:
        return [str(error)], None
    written = read_json(export / "config.json")
    loader = [x for x in loaders_for(written, read.family) if x.engine == "vllm"][-1]
    problems = _parameters(loader, written, engine_tensors(export), read, found)
    if not job.forward:
        return problems, None
    difference = _difference(found["logits"], export)
    if not difference <= TOLERANCE:
        problems.append(f"logits differ by {difference:.2g} of the largest")
    return problems, difference


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


def _difference(found: Tensor, export: Path) -> float:
    """Of logits of target tokens, of which a smaller vocabulary has a part, from the golden ones,
    as a part of the largest.
    """
    wanted = load_file(export / GOLDEN)["logits"]
    if "d2t" in (tensors := engine_tensors(export)):
        found = found[:, from_offsets(tensors["d2t"])]
    found = found[:, : wanted.shape[1]]
    return ((found - wanted).abs().max() / wanted.abs().max()).item()
