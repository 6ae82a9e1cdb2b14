"""Exports in SGLang's own draft models: what its loader fills, what it reads in config.json, what
its target model captures for a head, and what its forward computes.

Runs SGLang's Python files on a CPU, in an environment made for it: 0.5.23, without the CUDA kernels
that it asks for and without most of its server. Models, loaders, linear layers, norms, rotary
embedding, attention (its ``torch_native`` backend) and logits are SGLang's; `sgl_kernel`, and
torchvision where the environment has none, are stand-ins that nothing calls. The environment takes
2.5 GB where pip finds a CPU build of torch, several more where it takes one for CUDA;
``--python sglang=<interpreter>`` names one that is there already.

Trained heads are tried, and heads of random weights for every switch that a dialect holds.

Legend: S drafts, V target vocabulary, F captured layers, D hidden.
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
from drafters.block import DFlashDrafter
from drafters.dspark import DSparkDrafter
from drafters.export import Export, ExportError, read_as, read_head
from drafters.export.engines import Loader, engine_tensors, loaders_for
from drafters.export.engines.loader import load
from drafters.export.folder import CONFIG, read_json
from drafters.export.golden import GOLDEN, KeepingAttention
from drafters.layers import repeat_heads
from interop.exports import export_for
from interop.results import FAILED, LOADED, PASSED, REFUSED, SKIPPED, Entry
from interop.setting import CannotRun, Setting, headway_versions, output
from interop.speculators_check import LLAMA3, RANDOM, random_head

NAME = "SGLang"
ENVIRONMENT = "sglang"
VERSION = "0.5.23"
NEEDED = (
    "torch==2.13.0",
    "transformers==5.19.0",
    "openai==2.8.0",
    "sentencepiece==0.2.1",
    *("aiohttp", "dill", "einops", "fastapi", "gguf", "ipython", "loguru", "msgspec", "orjson"),
    *("partial_json_parser", "pillow", "psutil", "pybase64", "pyzmq", "requests", "setproctitle"),
    *("triton", "uvicorn"),
)
"""What importing its draft models, its loader and its workers needs, of what it asks for."""
BARE = ("sglang==0.5.23", "apache-tvm-ffi==0.1.11", "compressed-tensors==0.18.0")
WORKER = Path(__file__).with_name("sglang_worker.py")
SECONDS = 1800
TOLERANCE = 1e-5
"""Largest difference allowed, as a part of the largest number."""
CHAIN = 3
"""Drafts of heads that have no number of their own."""

FORMS = (
    ("eagle3", "sglang", "EAGLE3"),
    ("eagle1", "eagle1-sglang", "EAGLE"),
    ("dflash", "dflash", "DFLASH"),
    ("dspark", "dspark", "DSPARK"),
    ("dspark", "dspark-specforge", "DSPARK"),
)
"""(family, dialect, SGLang's algorithm)."""
DIALECTS = tuple(dialect for _, dialect, _ in FORMS)

REDUCED = 4096  # tokens of a draft vocabulary, if the target has as many
SMALL_MARKOV = {"num_layers": 2, "markov_rank": 16}
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "eagle3": {
        "norms": {"norm_before_fc": True, "norm_output": True, "draft_vocab_size": REDUCED},
        "norm of each": {"fc_norm": True, "rope_extension": LLAMA3},
        "embedding": {"feature_layers": [0, 2, 5]},
    },
    "eagle1": {"two layers and a bias": {"num_layers": 2, "fc_bias": True}},
    "dflash": {
        "causal": {"num_layers": 2, "causal": True},
        "other layers": {"num_layers": 1, "feature_layers": [1, 4]},
        "windows": {"num_layers": 2, "sliding_window": 8, "window_layers": [0], "causal": True},
    },
    "dspark": {
        "vanilla": SMALL_MARKOV,
        "gated": {**SMALL_MARKOV, "markov_type": "gated", "markov_bias": True},
        "rnn": {**SMALL_MARKOV, "markov_type": "rnn", "markov_bias": True},
        "in place": {**SMALL_MARKOV, "sample_from_anchor": False},
    },
}
"""Options of heads with random weights, by what is tried with them."""


@dataclass(frozen=True)
class Job:
    """One export to load and compute.

    Attributes:
        label: of the head.
        name: of the variant; empty for a trained head.
        head: that is exported.
        algorithm: SGLang's.
        export: what was written.
    """

    label: str
    name: str
    head: Drafter
    algorithm: str
    export: Export

    @property
    def place(self) -> tuple[str, str]:
        """Dialect and label, of which there is one entry."""
        return self.export.format, self.label

    def asked(self) -> dict[str, Any]:
        """As the worker reads it."""
        return {
            "name": str(self.export.folder),
            "algorithm": self.algorithm,
            "export": str(self.export.folder.resolve()),
            "drafts": self.head.num_drafts or CHAIN,
            "result": str(self.result.resolve()),
        }

    @property
    def result(self) -> Path:
        """Where the worker puts what it found."""
        return self.export.folder.with_suffix(".safetensors")


def check(setting: Setting) -> Iterator[Entry]:
    """Entries of every form, with every head that fits."""
    target = TargetModel.load(str(setting.target), torch.float32, "cpu")
    trained = {label: read_head(folder, target) for label, folder in setting.heads.items()}
    jobs: list[Job] = []
    for family, dialect, algorithm in FORMS:
        for label, name, head in heads(family, trained, target):
            folder = setting.folder(f"{ENVIRONMENT}/{dialect}-{label}") / (name or "head")
            said = export_for("sglang", head, dialect, folder)
            if isinstance(said, str):
                who, versions = f"{label} {name}".strip(), headway_versions()
                yield Entry(NAME, dialect, LOADED, REFUSED, said, versions, head=who)
            else:
                jobs.append(Job(label, name, head, algorithm, said))
    yield from _tried(setting, jobs)


def heads(
    family: str, trained: dict[str, Drafter], target: TargetModel
) -> Iterator[tuple[str, str, Drafter]]:
    """Trained heads of a family, then random ones; with their labels and what is tried."""
    for label, head in trained.items():
        if head.family == family:
            yield label, "", head
    for name, options in VARIANTS[family].items():
        if "draft_vocab_size" in options:
            options = {**options, "draft_vocab_size": min(REDUCED, target.vocab_size // 2)}
        head = random_head(family, target, **options)
        if isinstance(head, DSparkDrafter) and head.markov_head is not None:
            with torch.no_grad():  # it starts at zero, and the bias must be felt
                head.markov_head.markov_w2.weight.mul_(100)
        yield RANDOM, name, head


def _tried(setting: Setting, jobs: Sequence[Job]) -> Iterator[Entry]:
    """All jobs, in one process; an entry for each dialect and label."""
    work = setting.folder(ENVIRONMENT)
    asked = {"target": str(setting.target.resolve()), "jobs": [job.asked() for job in jobs]}
    (work / "jobs.json").write_text(json.dumps(asked), encoding="utf-8")
    try:
        python = str(setting.python(ENVIRONMENT, *NEEDED, bare=BARE))
        lines = output([python, str(WORKER), str(work / "jobs.json")], timeout=SECONDS).splitlines()
    except CannotRun as reason:
        for dialect, label in dict.fromkeys(job.place for job in jobs):
            said, versions = str(reason), headway_versions()
            yield Entry(NAME, dialect, LOADED, SKIPPED, said, versions, head=label)
        return
    rows = {row["name"]: row for row in (json.loads(x) for x in lines if x.startswith("{"))}
    lost = {"error": "its process ended before this one"}
    for place in dict.fromkeys(job.place for job in jobs):
        mine = [(job, rows.get(job.asked()["name"], lost)) for job in jobs if job.place == place]
        yield _entry(mine)


def _entry(found: Sequence[tuple[Job, dict[str, Any]]]) -> Entry:
    """Of the jobs of one dialect and label, with what the worker said of each."""
    problems, passed, versions = [], [], headway_versions()
    replaced = {name for _, row in found for name in row.get("replaced", ())}
    for job, row in found:
        named = f"{job.name}: " if job.name else ""
        theirs = row.get("versions", {})
        versions |= {name if name == "sglang" else f"their {name}": x for name, x in theirs.items()}
        if "error" in row:
            problems.append(named + row["error"])
            continue
        wrong, said = compared(job, row)
        problems += [named + problem for problem in wrong]
        passed.append(named + said)
    dialect, label = found[0][0].place
    if problems:
        return Entry(NAME, dialect, LOADED, FAILED, "; ".join(problems), versions, head=label)
    said = "; ".join(passed) + f"; stood in for, not called: {', '.join(sorted(replaced))}"
    return Entry(NAME, dialect, LOADED, PASSED, said, versions, head=label)


def compared(job: Job, row: dict[str, Any]) -> tuple[list[str], str]:
    """Where SGLang holds, reads, captures or computes something else than it should, and a line of
    what was found if it does not.

    Args:
        job: that was done.
        row: what the worker said of it.
    """
    found, export, target = load_file(job.result), job.export.folder, job.head.target
    try:
        read = read_as(job.export.format, export, target)
    except ExportError as error:
        return [str(error)], ""
    written = read_json(export / CONFIG)
    loader = [x for x in loaders_for(written, read.family) if VERSION in x.versions][-1]
    problems = _parameters(loader, written, engine_tensors(export), target, found)
    problems += _readings(loader.reads(loader.flat(written), target), row["reads"])
    golden = load_file(export / GOLDEN)
    logits = difference(found["logits"], _wanted(read, golden))
    features = difference(found["captured"], _captured(read, golden["token_ids"]))
    for name, size in (("logits", logits), ("what the target captures", features)):
        if not size <= TOLERANCE:
            problems.append(f"{name} differ by {size:.1e} of the largest ({TOLERANCE:g} allowed)")
    unasked = row["rows_unasked"]
    rows = row["reads"].get("block_size")
    alone = f", blocks of {unasked} rows unless it is told {rows}" if unasked != rows else ""
    return problems, (
        f"{row['model']}: {len(found) - 2} tensors and {len(row['reads'])} readings as simulated, "
        f"features {features:.1e}, logits {logits:.1e} of the largest{alone}"
    )


def _parameters(
    loader: Loader,
    written: dict[str, Any],
    tensors: dict[str, Tensor],
    target: TargetModel,
    found: dict[str, Tensor],
) -> list[str]:
    """The simulation must say of every parameter what SGLang holds in it, and of every other one
    that nothing fills it.
    """
    expected = load(loader, loader.flat(written), tensors, target)
    problems = list(expected.problems)
    for name, tensor in expected.parameters.items():
        held = found.get(name)
        if name == "hot_token_id":  # offsets in the file, ids in the engine
            tensor = tensor + torch.arange(len(tensor))
        if held is None or not torch.equal(held[: len(tensor)].to(tensor.dtype), tensor):
            problems.append(f"{name} does not hold what the file has for it")
    for name in found.keys() - expected.parameters.keys() - {"logits", "captured"}:
        if not found[name].isnan().all():
            problems.append(f"{name} is filled, which the simulation does not say")
    return problems


def _readings(simulated: dict[str, Any], read: dict[str, Any]) -> list[str]:
    """Where SGLang's objects have something else than the simulation reads for them."""
    simulated = json.loads(json.dumps(simulated))  # tuples are lists in what the worker says
    return [
        f"{name}: SGLang has {value!r}, the simulation {simulated[name]!r}"
        for name, value in read.items()
        if name in simulated and simulated[name] != value
    ]


class WindowedAttention(KeepingAttention):
    """Attention of golden logits, which do without windows, with those of a head's layers.

    Args:
        head: it is for.
    """

    def __init__(self, head: DFlashDrafter) -> None:
        super().__init__(head.causal)
        self.windows = head.windows

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(1, H, T, d) queries, (1, Hkv, T, d) keys and values -> (1, H, T, d)."""
        window = self.windows[layer]
        if window is None:
            return super().__call__(layer, q, k, v)
        self.store(layer, k, v)
        keys, values = (repeat_heads(x, q.shape[1] // k.shape[1]) for x in self._seen[layer])
        rows, columns = q.shape[2], keys.shape[2]
        distance = torch.arange(columns - rows, columns)[:, None] - torch.arange(columns)
        visible = distance < window
        if self.causal is None or self.causal[layer]:
            visible &= distance >= 0
        return torch.nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=visible)


@torch.no_grad()
def _wanted(head: Drafter, golden: dict[str, Tensor]) -> Tensor:
    """(S, V) golden logits; those of a DFlash head with windows as it decodes."""
    if type(head) is not DFlashDrafter or not any(head.windows):
        return golden["logits"]
    features, prefix = golden["features"][None], len(golden["features"])
    attend = WindowedAttention(head)
    asked = head.blocks(golden["token_ids"][None, prefix - 1])
    positions = torch.arange(prefix + asked.shape[-1])[None]
    head.inject(head.context(features), positions[:, :prefix], attend.store)
    return head.logits(head.drafting(head(asked, positions[:, prefix:], attend))[0])


@torch.no_grad()
def _captured(head: Drafter, tokens: Tensor) -> Tensor:
    """(n, F·D) what the head reads of its target for (n,) tokens."""
    found = head.target.forward(tokens[None], feature_layers=head.feature_layers)
    return found.last_hidden[0] if found.features is None else found.features[0]


def difference(found: Tensor, wanted: Tensor) -> float:
    """The largest one, as a part of the largest number; infinite where shapes differ."""
    if found.shape != wanted.shape:
        return float("inf")
    return ((found - wanted).abs().max() / wanted.abs().max()).item()
