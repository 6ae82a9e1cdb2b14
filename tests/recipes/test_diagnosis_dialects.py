"""Heads in every dialect: good ones cleared, and each file with a fault that it makes possible.

Manifest and golden logits are taken away: only the file and the text speak.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafters import TargetModel
from drafters.export import DIALECTS, FORMATS, NATIVE, write_as
from drafters.export.dialects.sglang import IDS
from drafters.export.stitched.mtp_forms import STITCHED
from drafters.mtp_native import load_native_mtp
from recipes.diagnosis import Diagnosis, Evidence, load_head
from tests.native_mtp import load_checkpoint, save_checkpoint
from tests.recipes.diagnosing import (
    Workshop,
    diagnosed,
    evidence_of,
    faults,
    forgotten,
    noise,
    small_target,
    taught,
)

pytestmark = pytest.mark.slow

Config = dict[str, Any]
Tensors = dict[str, Tensor]
Damage = Callable[[Config, Tensors], None]
D = 32


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return small_target()


@pytest.fixture(scope="module")
def evidence(target: TargetModel) -> Evidence:
    return evidence_of(target)


@pytest.fixture(scope="module")
def workshop(target: TargetModel, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(target, tmp_path_factory.mktemp("heads"))


def damaged(source: Path, folder: Path, damage: Damage | None) -> Path:
    """A copy of an export with nothing of ours beside it."""
    shutil.copytree(source, folder)
    forgotten(folder)
    if damage is None:
        return folder
    path = next(path for path in folder.iterdir() if path.suffix in (".safetensors", ".pt"))
    pickled = path.suffix == ".pt"
    tensors = torch.load(path, weights_only=True) if pickled else load_file(path)  # noqa: TID251
    config = json.loads((folder / "config.json").read_text())
    damage(config, tensors)
    tensors = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    if pickled:
        torch.save(tensors, path)
    else:
        save_file(tensors, path)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# What a file can have wrong ---------------------------------------------------------------------


def keys(**fields: Any) -> Damage:
    return lambda config, tensors: config.update(fields)


def nested(place: str, **fields: Any) -> Damage:
    return lambda config, tensors: config[place].update(fields)


def lost(*names: str) -> Damage:
    """Keys of the config, wherever they are."""

    def damage(config: Config, tensors: Tensors) -> None:
        for found in (config, *(value for value in config.values() if isinstance(value, dict))):
            for name in names:
                found.pop(name, None)

    return damage


def altered(ends: str | tuple[str, ...], value: Callable[[Tensor], Tensor]) -> Damage:
    """Tensors whose names end so."""

    def damage(config: Config, tensors: Tensors) -> None:
        chosen = [name for name in tensors if name.endswith(ends)]
        assert chosen
        for name in chosen:
            tensors[name] = value(tensors[name])

    return damage


def gone(name: str) -> Damage:
    def damage(config: Config, tensors: Tensors) -> None:
        del tensors[name]

    return damage


def higher(*names: str) -> Damage:
    """Layer ids one higher, in every list of them."""

    def damage(config: Config, tensors: Tensors) -> None:
        for found in (config, *(value for value in config.values() if isinstance(value, dict))):
            for name in names:
                if name in found:
                    found[name] = [k + 1 for k in found[name]]

    return damage


def halves(tensor: Tensor) -> Tensor:
    """Of what reads two things of D each."""
    return tensor.roll(D, 1) if tensor.shape[1] == 2 * D else tensor


def turned(tensor: Tensor) -> Tensor:
    return tensor.T


def hidden_last(tensor: Tensor) -> Tensor:
    return tensor.roll(-D, 1)


def absolute(tensor: Tensor) -> Tensor:
    return tensor + torch.arange(len(tensor))


def both(*damages: Damage) -> Damage:
    def damage(config: Config, tensors: Tensors) -> None:
        for one in damages:
            one(config, tensors)

    return damage


IN_PLACE = keys(sample_from_anchor=False, dspark_bonus_anchor=True)
NO_NORM_BEFORE_FC = both(keys(norm_before_fc=False), nested("eagle_config", norm_before_fc=False))
QKV = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
FLASH_IDS, AUX_IDS = "target_layer_ids", "aux_hidden_state_layer_ids"
CAUSAL = both(keys(is_causal=False), nested("dflash_config", causal=False))
FIRST_BLOCKS = ("0.linear.weight", "0.res_connection.weight")
MASKS = dict.fromkeys(("mask_token_id", "pard_token", "ptd_token_id"), 20)

PLANTED: list[tuple[str, str, str, str, Damage]] = [
    # (dialect, head, fault, what is named, damage)
    ("native", "eagle3", "ids one high", "layer ids", higher("feature_layers")),
    ("sglang", "eagle3", "ids one high", "layer ids", higher(IDS)),
    ("sglang", "eagle3", "t2d alone", "vocabulary", gone("d2t")),
    ("vllm", "eagle3.1", "halves", "concat", altered(QKV, halves)),
    ("vllm", "eagle3.1", "the other residual", "norm", keys(norm_before_residual=False)),
    ("vllm", "eagle3.1", "a switch off", "norm", NO_NORM_BEFORE_FC),
    ("vllm", "own embedding", "noise to read", "embedding", altered("embed_tokens.weight", noise)),
    ("modelopt", "eagle3", "absolute d2t", "vocabulary", altered("d2t", absolute)),
    ("modelopt", "eagle3", "two lists", "layer ids", nested("eagle_config", **{IDS: [1, 3, 4]})),
    ("speculators-eagle3", "eagle3.1", "ids one high", "layer ids", higher(IDS)),
    ("speculators-eagle3", "eagle3.1", "nothing said", "norm", lost("norm_before_residual")),
    ("vllm-peagle", "peagle", "the mask's row", "mask token", keys(**MASKS)),
    ("vllm-peagle", "peagle", "no mask", "mask token", lost(*MASKS)),
    ("vllm-peagle", "peagle", "halves", "concat", altered(QKV, halves)),
    ("speculators-peagle", "peagle", "the mask's row", "mask token", keys(mask_token_id=20)),
    ("speculators-peagle", "peagle own", "the mask's row", "mask token", keys(mask_token_id=20)),
    ("dflash", "jetspec", "whole blocks", "causality", CAUSAL),
    ("dflash", "jetspec", "two words for it", "causality", keys(is_causal=False)),
    ("dflash", "dflash", "no mask", "mask token", lost("mask_token_id")),
    ("dflash", "dflash", "no base", "rope", lost("rope_theta")),
    ("dflash", "dflash", "ids one high", "layer ids", higher(FLASH_IDS, IDS)),
    ("dflash-vllm", "dflash cut", "absolute d2t", "vocabulary", altered("d2t", absolute)),
    ("speculators-dflash", "dflash", "ids one high", "layer ids", higher(AUX_IDS)),
    ("speculators-dflash", "jetspec", "whole", "causality", keys(sliding_window_non_causal=True)),
    ("dspark", "dspark", "in place", "anchor", IN_PLACE),
    ("dspark", "dspark", "another output", "fingerprint", altered("lm_head.weight", noise)),
    ("dspark-specforge", "dspark gated", "in place", "anchor", IN_PLACE),
    ("dspark-modelopt", "dspark", "in place", "anchor", IN_PLACE),
    ("speculators-dspark", "dspark", "in place", "anchor", keys(sample_from_anchor=False)),
    ("speculators-dspark", "dspark", "mask token", "mask token", keys(mask_token_id=20)),
    ("eagle1", "eagle1 plain", "halves", "concat", altered("fc.weight", halves)),
    ("eagle1", "eagle1", "a bias unsaid", "tensors", keys(bias=False)),
    ("eagle1-sglang", "eagle1 plain", "halves", "concat", altered("fc.weight", halves)),
    ("eagle1-sglang", "eagle1 plain", "no bias", "tensors", gone("fc.bias")),
    ("medusa", "medusa", "a block turned", "transposed", altered("0.0.linear.weight", turned)),
    ("vllm-medusa", "medusa", "no bias", "tensors", gone("blocks.1.layers.0.bias")),
    ("hydra", "hydra", "hidden last", "concat", altered(FIRST_BLOCKS, hidden_last)),
    ("hydra", "hydra++", "another kind", "tensors", keys(hydra_head_arch="mlp")),
    ("speculators-mtp", "mtp", "halves", "concat", altered("input_proj.weight", halves)),
]  # fmt: skip


def test_every_dialect_is_here() -> None:
    assert {dialect for dialect, *_ in PLANTED} == {NATIVE, *DIALECTS}
    assert {NATIVE, *DIALECTS, *STITCHED} == set(FORMATS)
    assert set(NATIVE_MTP) == set(STITCHED)


@pytest.mark.parametrize(("dialect", "name"), sorted({each[:2] for each in PLANTED}))
def test_a_good_file_is_cleared(
    dialect: str,
    name: str,
    workshop: Workshop,
    target: TargetModel,
    evidence: Evidence,
    tmp_path: Path,
) -> None:
    folder = damaged(workshop.exported(name, dialect), tmp_path / "head", None)
    found = diagnosed(folder, target, evidence)
    assert found.faults == [], lines(found)
    assert load_head(folder, target).dialect == ("headway" if dialect == NATIVE else dialect)


@pytest.mark.parametrize(("dialect", "name", "fault", "check", "damage"), PLANTED)
def test_the_planted_fault_is_named(
    dialect: str,
    name: str,
    fault: str,
    check: str,
    damage: Damage,
    workshop: Workshop,
    target: TargetModel,
    evidence: Evidence,
    tmp_path: Path,
) -> None:
    folder = damaged(workshop.exported(name, dialect), tmp_path / "head", damage)
    found = diagnosed(folder, target, evidence)
    assert faults(found) == {check}, lines(found)


def lines(diagnosis: Diagnosis) -> str:
    return "\n".join(finding.line() for finding in diagnosis.faults)


# Modules in their target's checkpoint -----------------------------------------------------------

NATIVE_MTP = {
    "mtp-deepseek": ("glm4_moe", "eh_proj.weight"),
    "mtp-qwen": ("qwen3_5_text", "mtp.fc.weight"),
}
"""A kind of target of each form, and the end of the projection's name there."""


@dataclass(frozen=True)
class Checkpoint:
    """A target's folder with a trained module in it."""

    target: TargetModel
    evidence: Evidence
    folder: Path
    projection: str

    def damaged(self, folder: Path, value: Callable[[Tensor], Tensor]) -> Path:
        """A copy with another projection, and nothing of ours beside it."""
        shutil.copytree(self.folder, folder)
        forgotten(folder)
        path = folder / "model-mtp.safetensors"
        tensors = load_file(path)
        name = next(name for name in tensors if name.endswith(self.projection))
        tensors[name] = value(tensors[name]).contiguous()
        save_file(tensors, path)
        return folder


@pytest.fixture(scope="module", params=sorted(STITCHED))
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    folder = tmp_path_factory.mktemp("stitched")
    kind, projection = NATIVE_MTP[request.param]
    save_checkpoint(folder / "target", kind, dtype=torch.float32)
    sharpen(folder / "target")
    target = load_checkpoint(folder / "target", torch.float32)
    head = load_native_mtp(target)
    with torch.no_grad():  # as a module that came with a target, it is not all noise
        weight = head.module(0).eh_proj.weight
        weight[:, D:] = torch.eye(D)
        weight[:, :D] *= 0.5
    write_as(request.param, taught(head), folder / "whole")
    return Checkpoint(target, evidence_of(target), folder / "whole", projection)


def sharpen(folder: Path) -> None:
    """Laws that a module can learn to tell apart."""
    scales = {"lm_head.weight": 2.0, "shared_head.head.weight": 2.0, "embed_tokens.weight": 4.0}
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        for name in tensors:
            for end, scale in scales.items():
                if name.endswith(end):
                    tensors[name] = tensors[name] * scale
        save_file(tensors, path, {"format": "pt"})


def test_modules_in_their_target_are_cleared(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = checkpoint.damaged(tmp_path / "head", lambda tensor: tensor)
    found = diagnosed(folder, checkpoint.target, checkpoint.evidence)
    assert found.faults == [], lines(found)
    assert load_head(folder, checkpoint.target).dialect in STITCHED


def test_halves_of_a_module_swapped(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = checkpoint.damaged(tmp_path / "head", halves)
    found = diagnosed(folder, checkpoint.target, checkpoint.evidence)
    assert faults(found) == {"concat"}, lines(found)
