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
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from drafters import Eagle3Drafter, TargetModel, load_drafter
from drafters.export import golden_inputs, read_as, write_as
from drafters.export.golden import KeepingAttention
from interop.results import FAILED, LOADED, PASSED, READ, SKIPPED, Entry
from interop.setting import CannotRun, Setting, headway_versions, output

NAME = "ModelOpt"
DIALECTS = ("modelopt",)
REQUIREMENTS = ("nvidia-modelopt==0.47.0", "transformers<5.15", "accelerate", "datasets", "peft")
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
    for what, run in ((LOADED, ours_in_theirs), (READ, theirs_in_ours)):
        yield _entry(what, run, setting, python, target)


def _entry(
    what: str,
    run: Callable[[Setting, Path, TargetModel], tuple[str, dict[str, str]]],
    setting: Setting,
    python: Path,
    target: TargetModel,
) -> Entry:
    """The entry of one check, whatever comes of it."""
    versions: dict[str, str] = {}
    try:
        detail, versions = run(setting, python, target)
        status = PASSED
    except CannotRun as error:
        status, detail = SKIPPED, str(error)
    except ValueError as error:
        status, detail = FAILED, str(error)
    return Entry(NAME, "modelopt", what, status, " ".join(detail.split()), versions)


def ours_in_theirs(
    setting: Setting, python: Path, target: TargetModel
) -> tuple[str, dict[str, str]]:
    """The trained head in their module.

    Raises:
        CannotRun: their side fails.
        ValueError: logits differ.
    """
    head = load_drafter(setting.head("eagle3"), target)
    folder = setting.folder(NAME.lower())
    write_as("modelopt", head, folder / "head")
    save_file(golden_inputs(head), folder / "rows")
    found = _side(python, "load", folder / "head", setting.target, folder / "rows")
    assert isinstance(head, Eagle3Drafter)
    return f"{found['class']} takes every tensor; {_compared(head, folder / 'rows')}", _of(found)


def theirs_in_ours(
    setting: Setting, python: Path, target: TargetModel
) -> tuple[str, dict[str, str]]:
    """A head that their trainer made, here.

    Raises:
        CannotRun: their side fails.
        ValueError: it does not load, or logits differ.
    """
    folder = setting.folder(NAME.lower()) / "trained"
    found = _side(python, "train", setting.target, folder)
    head = read_as("modelopt", folder / "head", target, torch.float32)
    assert isinstance(head, Eagle3Drafter)
    kind = (head.config.rope_extension or {}).get("rope_type", "plain")
    detail = f"{found['steps']} steps of their trainer, written with {kind} RoPE, loaded"
    return f"{detail}; {_compared(head, folder / 'rows')}", _of(found)


def _side(python: Path, *arguments: str | Path) -> dict[str, Any]:
    """What `modelopt_side` says in its last line.

    Raises:
        CannotRun: it fails or takes too long.
    """
    command = [str(python), str(SIDE), *map(str, arguments)]
    answer: dict[str, Any] = json.loads(output(command, timeout=SECONDS).strip().splitlines()[-1])
    return answer


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
