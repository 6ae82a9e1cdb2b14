"""Heads of Headway in the classes of the PyPI package ``speculators``, and of its trainer here.

Each dialect is tried in both directions: our file is loaded by their own class
(``SpeculatorModel.from_pretrained``), whose forward pass must answer to the golden rows what our
head answers; and a head that their own trainer trained for a few steps on the CPU, with its default
switches, must load here and answer what their class answers. Both run in float32. Their trainer
saves in bfloat16, copies of the target's embedding and output matrix too; those are taken from the
target on both sides.

Legend: T rows of text, S drafts, F captured layers, D hidden, Vd draft vocabulary.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafters import TargetModel, build_drafter, load_drafter
from drafters.base import Drafter
from drafters.export import dialect_named, golden_inputs, golden_logits, read_as, write_as
from drafters.export.golden import KeepingAttention
from drafters.mtp import MtpDrafter
from interop.results import FAILED, LOADED, PASSED, READ, SKIPPED, Entry
from interop.setting import CannotRun, Setting, headway_versions, output

NAME = "speculators"
KINDS = ("eagle3", "peagle", "dflash", "dspark", "mtp")
DIALECTS = tuple(f"speculators-{kind}" for kind in KINDS)
REQUIREMENTS = ("speculators==0.9.0", "datasets")
SIDE = Path(__file__).with_name("speculators_side.py")
TOLERANCE = 1e-4
"""Largest difference allowed, as a part of the largest logit."""
SECONDS = 900

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "eagle3": [
        {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
        {"rope_extension": LLAMA3, "feature_layers": [1, 2, 4, 5]},
        {"fc_norm": True, "num_layers": 2, "qk_norm": True, "own_embedding": True},
    ],
    "peagle": [{"num_layers": 2, "num_drafts": 3, "qk_norm": True, "norm_before_residual": True}],
    "dflash": [
        {"num_layers": 2, "causal": True, "rope_extension": LLAMA3},
        {"num_layers": 2, "causal_layers": [1]},
    ],
    "dspark": [
        {"num_layers": 1, "markov_rank": 16, "markov_type": "gated", "markov_bias": True},
        {"num_layers": 1, "markov_rank": 16, "markov_type": "rnn", "markov_bias": True},
        {"num_layers": 1, "markov_rank": 16, "sample_from_anchor": False},
    ],
    "mtp": [{"qk_norm": True}],
}
"""Options of heads with random weights, tried beside the trained one: switches it does not have."""
REDUCED = 4096  # Vd of those heads


@dataclass
class Side:
    """Their side.

    Attributes:
        setting: of the checks.
        python: interpreter of their environment.
        versions: of both sides, as they say.
    """

    setting: Setting
    python: Path
    versions: dict[str, str] = field(default_factory=dict)

    def run(self, *arguments: str | Path) -> dict[str, Any]:
        """What `speculators_side` says in its last line.

        Raises:
            CannotRun: it fails or takes too long.
        """
        command = [str(self.python), str(SIDE), *map(str, arguments)]
        lines = output(command, timeout=SECONDS).strip().splitlines()
        found = json.loads(lines[-1])
        theirs = {f"their {name}": number for name, number in found.pop("versions").items()}
        speculators = theirs.pop("their speculators")
        self.versions = {"speculators": speculators, **theirs, **headway_versions()}
        return found


def check(setting: Setting) -> Iterator[Entry]:
    """Every dialect in both directions.

    Args:
        setting: the target, heads, environments and folders.

    Raises:
        CannotRun: there is no environment for them.
    """
    side = Side(setting, setting.python(NAME, *REQUIREMENTS))
    target = TargetModel.load(str(setting.target))
    for kind in KINDS:
        yield _entry(kind, LOADED, side, lambda kind=kind: ours_in_theirs(kind, side, target))
        yield _entry(kind, READ, side, lambda kind=kind: theirs_in_ours(kind, side, target))


def _entry(kind: str, what: str, side: Side, run: Any) -> Entry:
    """The entry of one check, whatever comes of it."""
    try:
        status, detail = PASSED, run()
    except CannotRun as error:
        status, detail = SKIPPED, str(error)
    except (AssertionError, ValueError) as error:
        status, detail = FAILED, str(error)
    detail = " ".join(detail.split()) or type(detail).__name__
    return Entry(NAME, f"speculators-{kind}", what, status, detail, side.versions)


def ours_in_theirs(kind: str, side: Side, target: TargetModel) -> str:
    """The trained head, and heads of random weights for every switch, in their class.

    Raises:
        CannotRun: their side fails.
        ValueError: logits differ.
    """
    ours: dict[Path, Tensor] = {}
    labels = []
    for number, (label, head) in enumerate(heads(kind, side.setting, target)):
        folder = side.setting.folder(NAME) / f"{kind}-{number}"
        write_as(f"speculators-{kind}", head, folder / "head")
        inputs = golden_inputs(head)
        save_file(inputs, folder / "rows")
        ours[folder] = repeated(head, inputs) if kind == "mtp" else golden_logits(head, inputs)
        labels.append(label)
    answer = side.run("load", side.setting.target, *ours)
    found = [compare(load_file(folder / "rows")["theirs"], ours[folder]) for folder in ours]
    figures = ", ".join(f"{label} {x:.1e}" for label, x in zip(labels, found, strict=True))
    return f"{answer['class']}: logits differ, of the largest, by: {figures}"


def theirs_in_ours(kind: str, side: Side, target: TargetModel) -> str:
    """A head that their trainer made, here.

    Raises:
        CannotRun: their side fails.
        ValueError: it does not load, or logits differ.
    """
    folder = side.setting.folder(NAME) / f"{kind}-trained"
    if kind == "mtp":
        write_start(folder, target)
    answer = side.run("train", side.setting.target, folder, kind)
    head = read_as(f"speculators-{kind}", folder / "head", target, torch.float32)
    rows = load_file(folder / "rows")
    theirs = rows.pop("theirs")
    ours = repeated(head, rows) if kind == "mtp" else golden_logits(head, rows)
    difference = compare(theirs, ours)
    return (
        f"{answer['steps']} steps of their trainer, loaded as a {head.family} head: logits differ "
        f"by {difference:.1e} of the largest"
    )


def heads(kind: str, setting: Setting, target: TargetModel) -> Iterator[tuple[str, Drafter]]:
    """A trained head where there is one that the dialect can hold, then random ones; with what
    they are.
    """
    try:
        trained = load_drafter(setting.head(kind), target)
        if not dialect_named(f"speculators-{kind}").refusals(trained):
            yield "a trained head", trained
    except CannotRun:
        pass
    for options in VARIANTS[kind]:
        reduced = {} if kind == "mtp" else {"draft_vocab_size": min(REDUCED, target.vocab_size)}
        named = [v if isinstance(v, str) else name for name, v in options.items()]
        label = f"one with {' and '.join(named)}"
        yield label, random_head(kind, target, **reduced, **options)


def random_head(kind: str, target: TargetModel, **options: Any) -> Drafter:
    """A head with something in every weight, norms included."""
    head = build_drafter(kind, target, **options)
    head.set_draft_vocab(torch.arange(target.vocab_size), start="random")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in head.parameters():
            size = 0.1 * weight.std().nan_to_num(1.0).clamp_min(0.1)
            weight.add_(size * torch.randn(weight.shape, generator=generator))
    return head.eval()


def write_start(folder: Path, target: TargetModel) -> None:
    """A config without weights, from which their trainer starts a head of its own."""
    write_as("speculators-mtp", build_drafter("mtp", target, qk_norm=True), folder / "export")
    start = folder / "config"
    start.mkdir(exist_ok=True)
    (start / "config.json").write_bytes((folder / "export" / "config.json").read_bytes())


@torch.no_grad()
def repeated(head: Drafter, inputs: dict[str, Tensor]) -> Tensor:
    """(S, Vd) logits of the last row where every step runs on all T rows, as their training does
    it; an engine, and Headway, step on from the last row alone.
    """
    assert isinstance(head, MtpDrafter)
    features, tokens = inputs["features"], inputs["token_ids"]
    count = len(features)
    positions, logits = torch.arange(count)[None], []
    feature = head.begin(None, features[None], positions, KeepingAttention())
    for step in range(len(tokens) - count + 1):
        rows = tokens[None, step : step + count]
        hidden, feature = head(feature, rows, positions, KeepingAttention(), 0)
        logits.append(head.logits(hidden[0, -1]))
    return torch.stack(logits)


def compare(theirs: Tensor, ours: Tensor) -> float:
    """The largest difference as a part of the largest logit.

    Raises:
        ValueError: it is above ``TOLERANCE``, or the shapes differ.
    """
    if theirs.shape != ours.shape:
        raise ValueError(f"their logits have shape {list(theirs.shape)}, ours {list(ours.shape)}")
    scale = ours.abs().max()
    difference = ((theirs - ours).abs().max() / scale).item()
    if not difference <= TOLERANCE:
        raise ValueError(
            f"logits differ by {difference:.1e} of the largest ({TOLERANCE:g} allowed)"
        )
    return difference
