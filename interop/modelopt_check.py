"""EAGLE-3 heads of Headway in the classes of NVIDIA's ModelOpt, and heads of its trainer here.

Our file is loaded into the module that ModelOpt trains, every tensor of it, and passes the list of
names that its exporter checks; a head that their trainer made in a few steps on the CPU, with
the RoPE keys that their exporter writes by default, must load here. The module that ModelOpt 0.47
trains norms the feature twice and has plain RoPE, which is not what TensorRT-LLM and vLLM serve and
Headway computes; so logits are compared with both made alike, and the detail says how far apart the
two are otherwise.

Legend: T rows of text, F captured layers, D hidden, Vd draft vocabulary.
"""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from drafters import Eagle3Drafter, TargetModel
from drafters.base import Drafter
from drafters.export import golden_inputs, read_as, read_head
from drafters.export.golden import KeepingAttention
from interop.exports import export_for
from interop.results import FAILED, LOADED, PASSED, READ, REFUSED, SKIPPED, Entry
from interop.setting import TORCH, Setting, answer, headway_versions, no_head

NAME = "ModelOpt"
DIALECTS = ("modelopt",)
REQUIREMENTS = (
    TORCH,
    "nvidia-modelopt==0.47.0",
    "transformers<5.15",
    "accelerate",
    "datasets",
    "peft",
    "requests",
)
SIDE = Path(__file__).with_name("modelopt_side.py")
TOLERANCE = 1e-4
"""Largest difference allowed, as a part of the largest logit."""
SECONDS = 900


def check(setting: Setting) -> Iterator[Entry]:
    """Both directions.

    Args:
        setting: the target, heads, environments and folders.

    Raises:
        CannotRun: there is no environment for them.
    """
    python = setting.python(NAME.lower(), *REQUIREMENTS)
    target = TargetModel.load(str(setting.target))
    heads = setting.of("eagle3")
    if not heads:
        yield Entry(NAME, "modelopt", LOADED, SKIPPED, no_head("eagle3"), headway_versions())
    for label, place in heads.items():
        folder = setting.folder(f"{NAME.lower()}/{label}")
        yield ours_in_theirs(label, read_head(place, target), folder, setting.target, python)
    yield theirs_in_ours(setting.folder(f"{NAME.lower()}/trained"), setting.target, target, python)


def ours_in_theirs(label: str, head: Drafter, folder: Path, target: Path, python: Path) -> Entry:
    """A trained head in their module.

    Args:
        label: of the head.
        head: of family EAGLE-3.
        folder: for its files.
        target: folder of the target.
        python: their interpreter.
    """
    export = export_for("tensorrt-llm", head, "modelopt", folder / "head")
    if isinstance(export, str):
        versions = headway_versions()
        return Entry(NAME, "modelopt", LOADED, REFUSED, export, versions, head=label)
    save_file(golden_inputs(head), folder / "rows")
    assert isinstance(head, Eagle3Drafter)
    try:
        found = _side(python, "load", folder / "head", target, folder / "rows")
        detail = f"{found['class']} takes every tensor; {_compared(head, folder / 'rows')}"
    except ValueError as error:
        return Entry(NAME, "modelopt", LOADED, FAILED, _line(error), headway_versions(), head=label)
    limit = "as it trains"
    return Entry(NAME, "modelopt", LOADED, PASSED, detail, _of(found), head=label, limit=limit)


def theirs_in_ours(folder: Path, place: Path, target: TargetModel, python: Path) -> Entry:
    """A head that their trainer made, here.

    Args:
        folder: for its files.
        place: folder of the target.
        target: itself.
        python: their interpreter.
    """
    try:
        found = _side(python, "train", place, folder)
        head = read_as("modelopt", folder / "head", target, torch.float32)
        assert isinstance(head, Eagle3Drafter)
        compared = _compared(head, folder / "rows")
    except ValueError as error:
        return Entry(NAME, "modelopt", READ, FAILED, _line(error), headway_versions())
    kind = (head.config.rope_extension or {}).get("rope_type", "plain")
    detail = f"{found['steps']} steps of their trainer, written with {kind} RoPE, loaded"
    return Entry(NAME, "modelopt", READ, PASSED, f"{detail}; {compared}", _of(found))


def _line(error: ValueError) -> str:
    return " ".join(str(error).split())


def _side(python: Path, *arguments: str | Path) -> dict[str, Any]:
    """What `modelopt_side` says in its last line.

    Raises:
        ValueError: it fails or takes too long.
    """
    return answer([str(python), str(SIDE), *map(str, arguments)], SECONDS)


def _of(found: dict[str, Any]) -> dict[str, str]:
    """Versions of both sides."""
    theirs = {f"their {name}": number for name, number in found["versions"].items()}
    return {"nvidia-modelopt": theirs.pop("their nvidia-modelopt"), **theirs, **headway_versions()}


def _compared(head: Eagle3Drafter, rows: Path) -> str:
    """How our logits differ from theirs, in words.

    Raises:
        ValueError: by more than rounding where both compute the same.
    """
    inputs = load_file(rows)
    theirs = inputs["theirs"].double()
    largest = theirs.abs().max()
    alike, served = (
        ((first_step(version, inputs).double() - theirs).abs().max() / largest).item()
        for version in (as_trained(head), head)
    )
    if not alike <= TOLERANCE:
        raise ValueError(f"logits differ by {alike:.2g} of the largest")
    return (
        f"logits of the first step differ by {alike:.1e} of the largest with their double norm, by "
        f"{served:.1e} as engines serve it"
    )


def as_trained(head: Eagle3Drafter) -> Eagle3Drafter:
    """A head as ModelOpt's module computes it: the feature normed twice, plain RoPE."""
    again = copy.deepcopy(head, {id(head.target): head.target})
    layer = again.midlayer
    twice = nn.Sequential(copy.deepcopy(layer.input_layernorm), layer.hidden_norm)
    layer.hidden_norm = twice  # type: ignore[assignment]
    layer.self_attn.rope_extension = None
    return again


@torch.no_grad()
def first_step(head: Eagle3Drafter, inputs: dict[str, Tensor]) -> Tensor:
    """(T, Vd) logits of the first step on all rows."""
    features = inputs["features"][None].to(next(head.parameters()))
    count, attend = features.shape[1], KeepingAttention()
    positions = torch.arange(count)[None]
    feature = head.begin(features, features, positions, attend)
    hidden, _ = head(feature, inputs["token_ids"][None, :count], positions, attend)
    return head.logits(hidden)[0]
