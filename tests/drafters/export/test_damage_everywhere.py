"""The same damage in the folders of every dialect: each is refused, and what is wrong is named.

What a dialect has no place for cannot be damaged in it; ``WITHOUT`` says which. What contradicts
nothing in a file, such as layer ids that are off by one everywhere, is told by the golden logits.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafters import TargetModel
from drafters.export import DIALECTS, dialect_named, read_as
from drafters.export.dialect import TensorSpec
from scripts.export import check
from tests.drafters.export.every_dialect import (
    BLOCKS,
    EAGLE1,
    EAGLE3,
    MEDUSA,
    SPECULATORS,
    WHOLE,
    write_all,
)
from tests.drafters.export.written import Written
from tests.tiny import tiny_target


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target(torch.float32)


@pytest.fixture(scope="module")
def wholes(target: TargetModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_all(target, tmp_path_factory.mktemp("wholes"))


class Damaged:
    """A copy of a folder of a dialect."""

    def __init__(self, name: str, folder: Path) -> None:
        dialect = dialect_named(name)
        self.folder = folder
        self.written = Written(folder, dialect.weights)
        self.file = folder / dialect.weights
        self.specs = [
            spec for spec in dialect.specs(self.written.config) if spec.name in self.tensors
        ]

    @property
    def tensors(self) -> dict[str, Tensor]:
        return self.written.tensors

    @property
    def config(self) -> dict[str, Any]:
        return self.written.config

    def matrix(self, wanted: Callable[[TensorSpec], bool] = lambda spec: True) -> str:
        """The name of a matrix that is the head's own."""
        return next(
            spec.name
            for spec in self.specs
            if len(spec.shape) == 2
            and spec.kind == "float"
            and "embed" not in spec.name
            and wanted(spec)
        )

    def put(self, name: str, change: Callable[[Tensor], Tensor]) -> str:
        """Change a tensor; its name as a pattern."""
        self.tensors[name] = change(self.tensors[name].clone())
        self.written.save()
        return re.escape(name)

    def having(self, key: str) -> Iterator[dict[str, Any]]:
        """The config and those within it, as far as they have a key."""
        parts = [self.config, *(part for part in self.config.values() if isinstance(part, dict))]
        found = [part for part in parts if key in part]
        assert found, key
        yield from found

    def say(self, key: str, value: Any) -> None:
        """Put a value wherever the config has the key."""
        for part in self.having(key):
            part[key] = value
        self.written.save()

    @property
    def map(self) -> str:
        """The name of the vocabulary map."""
        return "token_map" if "token_map" in self.tensors else "d2t"


# Tensors ------------------------------------------------------------------------------------------


def renamed(folder: Damaged) -> str:
    name = folder.matrix(lambda spec: not spec.optional)
    folder.tensors[f"{name}_1"] = folder.tensors.pop(name)
    folder.written.save()
    return rf"unknown tensor {re.escape(name)}_1.*missing tensor {re.escape(name)}"


def turned(folder: Damaged) -> str:
    name = folder.matrix(lambda spec: spec.shape[0] != spec.shape[1])
    return rf"{folder.put(name, lambda t: t.T)} has shape .* \(that is its transpose\)"


def diverged(folder: Damaged) -> str:
    return rf"{folder.put(folder.matrix(), spoilt)} holds values that are not finite"


def spoilt(tensor: Tensor) -> Tensor:
    tensor[0, 0] = torch.inf
    return tensor


def untrained(folder: Damaged) -> str:
    name = folder.matrix(lambda spec: not spec.zero)
    return rf"{folder.put(name, torch.zeros_like)} is all zeros: it was never trained"


def random(folder: Damaged) -> str:
    folder.put(folder.matrix(lambda spec: not spec.zero), torch.randn_like)
    return "logits of this head differ"


def random_output(folder: Damaged) -> str:
    """The output matrix, of its own or a copy of the target's."""
    outputs = re.compile(r"(hydra_)?lm_heads?\..*weight|\d+\.\d+\.weight")
    folder.put(next(filter(outputs.fullmatch, folder.tensors)), torch.randn_like)
    return "logits of this head differ|is not the output matrix of"


def swapped(folder: Damaged) -> str:
    """[feature; embedding] for [embedding; feature], or captured layers in another order."""
    fused = [
        spec.name
        for spec in folder.specs
        if len(spec.shape) == 2 and spec.shape[1] in (64, 96) and "down_proj" not in spec.name
    ]
    attention = [name for name in fused if "self_attn" in name]
    for name in attention or fused[:1]:
        folder.put(name, lambda tensor: tensor.roll(32, dims=1))
    return "logits of this head differ"


# The vocabulary map -------------------------------------------------------------------------------


def ids_for_offsets(folder: Damaged) -> str:
    """Or offsets for ids, in the one form that has ids."""
    steps = torch.arange(40)
    folder.put(
        folder.map, lambda found: found - steps if folder.map == "token_map" else found + steps
    )
    return (
        "d2t leads out of the target's vocabulary: it must hold offsets|it must hold absolute ids"
    )


def no_map(folder: Damaged) -> str:
    name = folder.map
    del folder.tensors[name]
    folder.written.save()
    return rf"missing tensor {name}: (draft|truncated)_vocab_size is below vocab_size"


def map_of_others(folder: Damaged) -> str:
    """It contradicts nothing: another run's counts, say."""
    kept = torch.randperm(96, generator=torch.Generator().manual_seed(7))[:40].sort().values
    folder.tensors[folder.map] = kept if folder.map == "token_map" else kept - torch.arange(40)
    if "t2d" in folder.tensors:
        folder.tensors["t2d"] = torch.zeros(96, dtype=torch.bool).index_fill(0, kept, True)
    folder.written.save()
    return "written with another vocabulary map|is not the output matrix of"


# config.json --------------------------------------------------------------------------------------


def shift_ids(folder: Damaged, parts: list[dict[str, Any]]) -> None:
    for part in parts:
        for key in [key for key in part if key.endswith("layer_ids")]:
            part[key] = [k + 1 for k in part[key]]
    folder.written.save()


def layers_in_one_place(folder: Damaged) -> str:
    """The other convention."""
    shift_ids(folder, [part for part in folder.config.values() if isinstance(part, dict)])
    return "layer ids disagree|target_layer_ids is .* but dflash_config says"


def layers_everywhere(folder: Damaged) -> str:
    parts = [part for part in folder.config.values() if isinstance(part, dict)]
    shift_ids(folder, [folder.config, *parts])
    return "written with other feature layers than config.json now says"


def clamped(folder: Damaged) -> str:
    folder.say("max_position_embeddings", 64)
    return "max_position_embeddings is 64 but the target has 512"


def another_base_in_one_place(folder: Damaged) -> str:
    next(part for part in folder.having("rope_scaling"))["rope_theta"] = 5e5
    folder.written.save()
    return "rope_theta is 500000.0 but rope_parameters says 10000.0"


def another_base(folder: Damaged) -> str:
    for part in folder.having("rope_scaling"):
        part["rope_theta"] = part["rope_parameters"]["rope_theta"] = 5e5
    folder.written.save()
    return "logits of this head differ"


def stretched(folder: Damaged) -> str:
    folder.say("rope_scaling", {"rope_type": "dynamic", "factor": 4.0})
    return "rope_scaling.*'dynamic' RoPE"


def tied(folder: Damaged) -> str:
    folder.say("tie_word_embeddings", True)
    return "tie_word_embeddings must be False"


def other_causality_in_one_place(folder: Damaged) -> str:
    folder.config["is_causal"] = not folder.config["is_causal"]
    folder.written.save()
    return "is_causal is True but dflash_config.causal False"


def other_causality(folder: Damaged) -> str:
    if "sliding_window_non_causal" in folder.config:
        folder.say("sliding_window_non_causal", True)
    else:
        folder.say("is_causal", True)
        folder.say("causal", True)
    return "logits of this head differ"


def norm_without_tensors(folder: Damaged) -> str:
    folder.say("fc_norm", True)
    return r"missing tensor fc_norm\.0\.weight"


def other_residual(folder: Damaged) -> str:
    folder.config["norm_before_residual"] = True
    folder.written.save()
    return "logits of this head differ|norm_before_residual=True"


def other_mask(folder: Damaged) -> str:
    """Another token's row for the slots that draft in parallel."""
    for key in ("mask_token_id", "pard_token", "ptd_token_id"):
        if key in folder.config or key in folder.config.get("dflash_config", {}):
            folder.say(key, 91)
    return "logits of this head differ|is not the embedding of"


def other_block(folder: Damaged) -> str:
    folder.say("block_size", 5)
    return "another number of drafts than the one that was written"


def half_a_config(folder: Damaged) -> str:
    return half(folder.folder / "config.json")


def half_a_record(folder: Damaged) -> str:
    return half(folder.folder / "export.json")


def half(path: Path) -> str:
    path.write_text(path.read_text()[:100])
    return rf"{re.escape(path.name)}: cannot read it"


def cut(folder: Damaged) -> str:
    return cut_short(folder.file)


def cut_golden(folder: Damaged) -> str:
    return cut_short(folder.folder / "golden.logits")


def cut_short(path: Path) -> str:
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    return rf"{re.escape(path.name)}.*damaged or cut short"


WITHOUT: dict[Callable[[Damaged], str], set[str]] = {
    renamed: set(),
    turned: set(),
    diverged: set(),
    untrained: set(),
    random: set(),
    random_output: {"dflash", "dspark-specforge", "dspark-modelopt", "speculators-mtp", *EAGLE1},
    swapped: MEDUSA,
    ids_for_offsets: WHOLE,
    no_map: WHOLE,
    map_of_others: WHOLE,
    layers_in_one_place: {*set(DIALECTS) - EAGLE3 - BLOCKS, *SPECULATORS},
    layers_everywhere: set(DIALECTS) - EAGLE3 - BLOCKS,
    clamped: MEDUSA,
    another_base_in_one_place: MEDUSA,
    another_base: MEDUSA,
    stretched: MEDUSA,
    tied: {*MEDUSA, "hydra"},
    other_causality_in_one_place: {*set(DIALECTS) - BLOCKS, *SPECULATORS},
    other_causality: set(DIALECTS) - BLOCKS,
    norm_without_tensors: set(DIALECTS) - EAGLE3,
    other_residual: set(DIALECTS) - EAGLE3,
    other_mask: set(DIALECTS) - BLOCKS - {"vllm-peagle", "speculators-peagle"},
    other_block: set(DIALECTS) - BLOCKS,
    half_a_config: set(),
    half_a_record: set(),
    cut: set(),
    cut_golden: set(),
}
"""Each damage, and the dialects that have no place for it."""
CASES = [
    (name, damage)
    for damage, without in WITHOUT.items()
    for name in DIALECTS
    if name not in without
]


@pytest.mark.parametrize("name", DIALECTS)
def test_a_whole_folder_passes(
    name: str, wholes: dict[str, Path], target: TargetModel, capsys: pytest.CaptureFixture[str]
) -> None:
    check(wholes[name], None, target)
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (record["format"], record["golden"]) == (name, 0.0)


@pytest.mark.parametrize(("name", "damage"), CASES)
def test_damage_is_named_in_every_dialect(
    name: str,
    damage: Callable[[Damaged], str],
    wholes: dict[str, Path],
    target: TargetModel,
    tmp_path: Path,
) -> None:
    shutil.copytree(wholes[name], tmp_path / "head")
    message = damage(Damaged(name, tmp_path / "head"))
    with pytest.raises(ValueError, match=message):
        check(tmp_path / "head", None, target)


# Code ---------------------------------------------------------------------------------------------


class Code:
    """What an attacker puts into a pickle."""

    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("ran",)


@pytest.mark.parametrize("name", DIALECTS)
def test_a_pickle_with_code_is_not_opened(
    name: str,
    wholes: dict[str, Path],
    target: TargetModel,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(wholes[name], tmp_path / "head")
    (tmp_path / "head" / dialect_named(name).weights).unlink()
    torch.save({"fc.weight": Code()}, tmp_path / "head" / "pytorch_model.bin")
    with pytest.raises(ValueError, match="holds more than tensors and may run code when opened"):
        read_as(name, tmp_path / "head", target)
    assert capsys.readouterr().out == ""
