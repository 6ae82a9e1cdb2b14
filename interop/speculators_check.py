"""Heads of Headway in the classes of the PyPI package ``speculators``, and of its trainer here.

Each dialect is tried in both directions: our file is loaded by their own class
(``SpeculatorModel.from_pretrained``), whose forward pass must answer to the golden rows what our
head answers; and a head that their own trainer trained for a few steps on the CPU, with its default
switches, must load here and answer what their class answers. Both run in float32. Their trainer
saves in bfloat16, copies of the target's embedding and output matrix too; those are taken from the
target on both sides.

Legend: T rows of text, S drafts, F captured layers, D hidden, Vd draft vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafters import TargetModel, build_drafter
from drafters.base import Drafter
from drafters.export import golden_inputs, golden_logits, read_as, read_head, write_as
from drafters.export.golden import KeepingAttention
from drafters.mtp import MtpDrafter
from interop.exports import export_for
from interop.results import FAILED, LOADED, PASSED, READ, REFUSED, Entry
from interop.setting import TORCH, Setting, answer, headway_versions

NAME = "speculators"
KINDS = ("eagle3", "peagle", "dflash", "dspark", "mtp")
DIALECTS = tuple(f"speculators-{kind}" for kind in KINDS)
REQUIREMENTS = (
    TORCH,
    "transformers==5.19.0",
    "aiohttp",
    "datasets<=5.1",
    "httpx",
    "loguru",
    "openai",
    "protobuf",
    "psutil",
    "pydantic-settings",
    "typer",
)
BARE = ("speculators==0.9.0", "hs-connectors==0.9.0")
"""The first also asks for torchvision and torchaudio, which it does not import, but which ask for
builds of torch with CUDA.
"""
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
RANDOM = "random"  # their label


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
            ValueError: it fails or takes too long.
        """
        command = [str(self.python), str(SIDE), *map(str, arguments)]
        found = answer(command, SECONDS)
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
    side = Side(setting, setting.python(NAME, *REQUIREMENTS, bare=BARE))
    target = TargetModel.load(str(setting.target))
    for kind in KINDS:
        try:
            yield from ours_in_theirs(kind, side, target)
        except (AssertionError, ValueError) as error:
            yield _entry(kind, LOADED, FAILED, str(error), side)
        try:
            yield _entry(kind, READ, PASSED, theirs_in_ours(kind, side, target), side)
        except (AssertionError, ValueError) as error:
            yield _entry(kind, READ, FAILED, str(error), side)


def _entry(kind: str, what: str, status: str, detail: str, side: Side, head: str = "") -> Entry:
    """What came of one check."""
    detail = " ".join(detail.split()) or status
    versions = side.versions or headway_versions()
    return Entry(NAME, f"speculators-{kind}", what, status, detail, versions, head=head)


def ours_in_theirs(kind: str, side: Side, target: TargetModel) -> Iterator[Entry]:
    """Trained heads, and heads of random weights for every switch, in their class.

    Raises:
        ValueError: their side fails.
    """
    ours: dict[str, dict[Path, Tensor]] = {}
    for label, name, head in heads(kind, side.setting, target):
        folder = side.setting.folder(f"{NAME}/{kind}-{label}/{name}")
        export = export_for("", head, f"speculators-{kind}", folder / "head")
        if isinstance(export, str):
            yield _entry(kind, LOADED, REFUSED, export, side, label)
            continue
        inputs = golden_inputs(head)
        save_file(inputs, folder / "rows")
        logits = repeated(head, inputs) if kind == "mtp" else golden_logits(head, inputs)
        ours.setdefault(label, {})[folder] = logits
    folders = [folder for found in ours.values() for folder in found]
    answered = side.run("load", side.setting.target, *folders)
    for label, found in ours.items():
        try:
            differences = [
                f"{folder.name} {compare(load_file(folder / 'rows')['theirs'], logits):.1e}"
                for folder, logits in found.items()
            ]
        except ValueError as error:
            yield _entry(kind, LOADED, FAILED, str(error), side, label)
            continue
        said = f"{answered['class']}: logits differ, of the largest, by: {', '.join(differences)}"
        yield _entry(kind, LOADED, PASSED, said, side, label)


def theirs_in_ours(kind: str, side: Side, target: TargetModel) -> str:
    """A head that their trainer made, here.

    Raises:
        ValueError: their side fails, it does not load, or logits differ.
    """
    folder = side.setting.folder(NAME) / f"{kind}-trained"
    if kind == "mtp":
        write_start(folder, target)
    answered = side.run("train", side.setting.target, folder, kind)
    head = read_as(f"speculators-{kind}", folder / "head", target, torch.float32)
    rows = load_file(folder / "rows")
    theirs = rows.pop("theirs")
    ours = repeated(head, rows) if kind == "mtp" else golden_logits(head, rows)
    difference = compare(theirs, ours)
    return (
        f"{answered['steps']} steps of their trainer, loaded as a {head.family} head: logits "
        f"differ by {difference:.1e} of the largest"
    )


def heads(kind: str, setting: Setting, target: TargetModel) -> Iterator[tuple[str, str, Drafter]]:
    """Trained heads, then random ones: label, what they are, and the head."""
    for label, folder in setting.of(kind).items():
        yield label, "trained", read_head(folder, target)
    for options in VARIANTS[kind]:
        reduced = {} if kind == "mtp" else {"draft_vocab_size": min(REDUCED, target.vocab_size)}
        named = [v if isinstance(v, str) else name for name, v in options.items()]
        yield RANDOM, " and ".join(named), random_head(kind, target, **reduced, **options)


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
