"""Modules that cannot be stitched, and damaged checkpoints: each is refused by its own name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from drafters import TargetModel, build_drafter
from drafters.export import ExportError, check_as, read_as, read_head, write_as
from tests.drafters.export.stitched import opened, read_config, saved, tuned
from tests.native_mtp import save_checkpoint
from tests.tiny import tiny_target

pytestmark = pytest.mark.usefixtures("quiet")


def test_modules_trained_from_scratch_are_served_by_nobody(tmp_path: Path) -> None:
    target = saved(tmp_path / "target", "glm4_moe")
    head = build_drafter("mtp", target)
    with pytest.raises(ExportError, match=r"No engine loads that.*Decode it with Headway"):
        write_as("mtp-deepseek", head, tmp_path / "out")
    with pytest.raises(ExportError, match="EAGLE-1 has neither norm"):
        write_as("mtp-qwen", build_drafter("mtp", tiny_target(torch.float32)), tmp_path / "out")
    export = write_as("native", head, tmp_path / "own")
    assert "no engine serves MTP modules that were trained from scratch" in export.notes[0]
    assert "mtp-deepseek" in write_as("native", tuned(target), tmp_path / "own").notes[0]


def test_other_heads_forms_and_places(tmp_path: Path) -> None:
    target = saved(tmp_path / "target", "glm4_moe")
    head = tuned(target)
    with pytest.raises(ExportError, match="this is a medusa head"):
        write_as("mtp-deepseek", build_drafter("medusa", target), tmp_path / "out")
    with pytest.raises(ExportError, match="use --to mtp-deepseek"):
        write_as("mtp-qwen", head, tmp_path / "out")
    with pytest.raises(ExportError, match="with_embeddings has no effect"):
        write_as("mtp-deepseek", head, tmp_path / "out", with_embeddings=True)
    with pytest.raises(ExportError, match="is not an export"):
        write_as("mtp-deepseek", head, tmp_path / "target")
    nn.Module.to(head, dtype=torch.float64)
    with pytest.raises(ExportError, match=r"do not load torch\.float64 heads"):
        write_as("mtp-deepseek", head, tmp_path / "out")
    unknown = saved(tmp_path / "mellum", "mellum")
    with pytest.raises(ExportError, match="another form: use --to mtp-qwen"):
        write_as("mtp-deepseek", tuned(unknown), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_quantised_target(tmp_path: Path) -> None:
    target = saved(tmp_path / "target", "deepseek_v3")
    head = tuned(target)
    config = read_config(tmp_path / "target") | {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "target" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ExportError, match="is quantised"):
        write_as("mtp-deepseek", head, tmp_path / "out")


def test_a_checkpoint_without_modules_is_no_head(tmp_path: Path) -> None:
    target = saved(tmp_path, "glm4_moe", 0)
    with pytest.raises(ExportError, match="no head of a known dialect"):
        read_head(tmp_path, target)
    with pytest.raises(ExportError, match="holds no MTP modules in the mtp-deepseek form"):
        read_as("mtp-deepseek", tmp_path, target)
    assert isinstance(AutoModelForCausalLM.from_pretrained(tmp_path), nn.Module)


# Damage -------------------------------------------------------------------------------------------


NAMES = {
    "mtp-deepseek": {
        "kind": "glm4_moe",
        "projection": "eh_proj.weight",
        "norm": "enorm.weight",
        "place": "model.layers.2.",
    },
    "mtp-qwen": {
        "kind": "qwen3_next",
        "projection": "fc.weight",
        "norm": "pre_fc_norm_embedding.weight",
        "place": "mtp.",
    },
}
"""Of each form a target, and what two of its tensors are called there."""


class Edit:
    """A stitched checkpoint, changed in place."""

    def __init__(self, folder: Path, form: str) -> None:
        self.folder, self.names = folder, NAMES[form]
        self.added = folder / "model-mtp.safetensors"
        self.tensors = load_file(self.added)

    def save(self) -> None:
        save_file(self.tensors, self.added)

    def json(self, name: str, change: Callable[[dict[str, Any]], object]) -> None:
        content = json.loads((self.folder / name).read_text())
        change(content)
        (self.folder / name).write_text(json.dumps(content))

    def name(self, end: str) -> str:
        """Of a tensor, by its word in ``NAMES`` or the end of its name."""
        end = self.names.get(end, end)
        return next(name for name in self.tensors if name.endswith(end))

    def index(self, change: Callable[[dict[str, str]], object]) -> None:
        self.json("model.safetensors.index.json", lambda content: change(content["weight_map"]))


def put(end: str, change: Callable[[Tensor], Tensor]) -> Callable[[Edit], None]:
    def edit(folder: Edit) -> None:
        name = folder.name(end)
        folder.tensors[name] = change(folder.tensors[name].clone()).contiguous()
        folder.save()

    return edit


def spoil(tensor: Tensor) -> Tensor:
    tensor.view(-1)[3] = torch.nan
    return tensor


def drop_shard(edit: Edit) -> None:
    (edit.folder / "model-00001-of-00002.safetensors").unlink()


def cut(edit: Edit) -> None:
    edit.added.write_bytes(edit.added.read_bytes()[:-64])


def cut_config(edit: Edit) -> None:
    (edit.folder / "config.json").write_text('{"model_type": ')


def unlisted(edit: Edit) -> None:
    edit.index(lambda places: places.pop(edit.name("norm")))


def twice(edit: Edit) -> None:
    path = edit.folder / "model-00001-of-00002.safetensors"
    name = edit.name("norm")
    save_file({**load_file(path), name: edit.tensors[name]}, path, metadata={"format": "pt"})


def stranger(edit: Edit) -> None:
    name = edit.names["place"] + "xnorm.weight"
    edit.tensors[name] = torch.ones(32)
    edit.index(lambda places: places.update({name: edit.added.name}))
    edit.save()


def renamed(edit: Edit) -> None:
    old, new = edit.name("norm"), edit.names["place"] + "ynorm.weight"
    edit.tensors[new] = edit.tensors.pop(old)
    edit.index(lambda places: (places.pop(old), places.update({new: edit.added.name})))
    edit.save()


Damage = Callable[[Edit], None]
DAMAGE: dict[str, tuple[Damage, str]] = {
    "not finite": (put("projection", spoil), "{projection} holds values that are not finite"),
    "never trained": (put("o_proj.weight", torch.zeros_like), "o_proj.weight is all zeros"),
    "transposed": (
        put("projection", lambda t: t.T),
        r"{projection} has shape \[64, 32\], the config asks for \[32, 64\] \(that is its tr",
    ),
    "swapped halves": (
        put("projection", lambda t: t.roll(32, dims=1)),
        "logits of this head differ",
    ),
    "random weights": (put("mlp.gate.weight", torch.randn_like), "logits of this head differ"),
    "missing shard": (drop_shard, "model-00001-of-00002.safetensors is missing"),
    "cut short": (cut, "cut short"),
    "half a config": (cut_config, "config.json: cannot read it"),
    "not in the index": (unlisted, "{norm}, which the index puts nowhere"),
    "in two files": (twice, "also holds .*{norm}, which the index puts elsewhere"),
    "unknown tensor": (stranger, "unknown tensor {place}xnorm.weight"),
    "renamed": (
        renamed,
        "unknown tensor {place}ynorm.weight; missing tensor {place}{norm}",
    ),
    "wrong count": (
        lambda edit: edit.json("config.json", lambda c: c.update(num_nextn_predict_layers=3)),
        "num_nextn_predict_layers is 3 and the file has 1 modules",
    ),
    "no count": (
        lambda edit: edit.json("config.json", lambda c: c.pop("num_nextn_predict_layers")),
        "none of num_nextn_predict_layers, .* says how many modules",
    ),
}
COPIES: dict[str, tuple[Damage, str]] = {
    "another embedding": (
        put("embed_tokens.weight", lambda t: t + 1),
        "embed_tokens.weight is not the target's",
    ),
    "another output matrix": (
        put("shared_head.head.weight", torch.zeros_like),
        "shared_head.head.weight is not the target's",
    ),
}
"""Of what the deepseek form has copies of."""
CASES = [(form, name) for form in NAMES for name in DAMAGE]
CASES += [("mtp-deepseek", name) for name in COPIES]


@pytest.fixture(scope="module")
def stitched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[TargetModel, Path]]:
    """Of each form a target and a whole folder."""
    found = {}
    for form, names in NAMES.items():
        folder = tmp_path_factory.mktemp(form)
        target = saved(folder / "target", names["kind"])
        write_as(form, tuned(target), folder / "out")
        check_as(form, folder / "out", target)
        found[form] = target, folder / "out"
    return found


@pytest.mark.parametrize(("form", "name"), CASES)
def test_damage_is_named(
    stitched: dict[str, tuple[TargetModel, Path]], tmp_path: Path, form: str, name: str
) -> None:
    target, whole = stitched[form]
    shutil.copytree(whole, tmp_path / "out")
    change, message = {**DAMAGE, **COPIES}[name]
    change(Edit(tmp_path / "out", form))
    with pytest.raises(ValueError, match=message.format(**NAMES[form])):
        check_as(form, tmp_path / "out", target)


def test_another_target(stitched: dict[str, tuple[TargetModel, Path]], tmp_path: Path) -> None:
    other = opened(save_checkpoint(tmp_path, "glm4_moe", seed=5, dtype=torch.float32))
    with pytest.raises(ValueError, match="wrong target: weights"):
        read_head(stitched["mtp-deepseek"][1], other)
