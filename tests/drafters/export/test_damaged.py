"""Damaged exports through `scripts.export --check`: each is refused by its own name.

It reads an export as an engine would. What no format can show, because names and shapes are all as
they should be, is shown by the golden logits that travel with an export.
"""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from scripts import export
from tests.drafters.export.damaging import (
    IDS,
    Damage,
    Folder,
    copy_of,
    refused,
    save_whole,
    swapped_inputs,
)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_whole(tmp_path_factory.mktemp("damaged"))


@pytest.fixture
def damaged(places: Path, tmp_path: Path) -> Folder:
    return copy_of(places, tmp_path / "head")


def absolute(tensor: Tensor) -> Tensor:
    return tensor + torch.arange(len(tensor))


def not_a_number(tensor: Tensor) -> Tensor:
    tensor[3] = torch.nan
    return tensor


def cut(folder: Folder, name: str = "model.safetensors") -> None:
    whole = (folder.path / name).read_bytes()
    (folder.path / name).write_bytes(whole[: len(whole) // 2])


def rename_layer(folder: Folder) -> None:
    """As trainers of another dialect call it; an engine that does not know it says nothing."""
    old, new = "midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"
    folder.edit(lambda tensors: tensors.update({new: tensors.pop(old)}))


CHECKED: dict[str, tuple[Damage, str]] = {
    "a renamed tensor": (
        rename_layer,
        "unknown tensor layers.0.hidden_norm.weight (an engine ignores it silently)",
    ),
    "a transposed matrix": (
        lambda f: f.tensor("midlayer.mlp.up_proj.weight", lambda t: t.T),
        "has shape [32, 40], the config asks for [40, 32] (that is its transpose)",
    ),
    "a square matrix, transposed": (
        lambda f: f.tensor("midlayer.self_attn.o_proj.weight", lambda t: t.T),
        "logits of this head differ",
    ),
    "absolute ids in the vocabulary map": (
        lambda f: f.tensor("d2t", absolute),
        "d2t leads out of the target's vocabulary: it must hold offsets",
    ),
    "a vocabulary map that is not one to one": (
        lambda f: f.tensor("d2t", lambda t: torch.cat((t[:1], t[:1] - 1, t[2:]))),
        "d2t sends two draft ids to one target id",
    ),
    "marks of other tokens": (
        lambda f: f.tensor("t2d", lambda t: t.roll(1)),
        "t2d does not mark the tokens that d2t leads to",
    ),
    "a vocabulary map of other tokens": (
        lambda f: f.edit(other_tokens),
        "written with another vocabulary map",
    ),
    "no vocabulary map": (
        lambda f: f.edit(lambda tensors: tensors.pop("d2t")),
        "missing tensor d2t: draft_vocab_size is below vocab_size",
    ),
    "layer ids of the other convention, in one place": (
        lambda f: f.config(**{IDS: [0, 2, 3]}),
        "layer ids disagree: eagle_config has [0, 2, 3] (SGLang: output of layer)",
    ),
    "layer ids of the other convention, everywhere": (
        lambda f: f.ids(1),
        "written with other feature layers than config.json now says",
    ),
    "no layer ids at the top level": (
        lambda f: drop_key(f, IDS),
        f"key {IDS} is missing",
    ),
    "halves of the layer's input swapped": (swapped_inputs, "logits of this head differ"),
    "a random output matrix": (
        lambda f: f.tensor("lm_head.weight", torch.randn_like),
        "logits of this head differ",
    ),
    "another rotary base": (
        lambda f: f.config(rope_theta=5e5, rope_parameters={"rope_theta": 5e5}),
        "logits of this head differ",
    ),
    "clamped positions": (
        lambda f: f.config(max_position_embeddings=64),
        "max_position_embeddings is 64 but the target has 512",
    ),
    "scaled positions": (
        lambda f: f.config(rope_scaling={"rope_type": "dynamic", "factor": 4.0}),
        "rope_scaling",
    ),
    "tied embeddings": (
        lambda f: f.config(tie_word_embeddings=True),
        "tie_word_embeddings must be False",
    ),
    "a half-written file": (cut, "missing, damaged or cut short"),
    "a half-written config": (lambda f: cut(f, "config.json"), "config.json: cannot read it"),
    "an empty file": (lambda f: f.weights.write_bytes(b""), "missing, damaged or cut short"),
    "a diverged training": (
        lambda f: f.tensor("norm.weight", not_a_number),
        "norm.weight holds values that are not finite: training diverged",
    ),
    "a matrix that was never trained": (
        lambda f: f.tensor("midlayer.mlp.down_proj.weight", torch.zeros_like),
        "midlayer.mlp.down_proj.weight is all zeros: it was never trained",
    ),
    "a tensor in another dtype": (
        lambda f: f.tensor("fc.weight", lambda t: t.half()),
        "fc.weight is float16, expected float32",
    ),
    "an embedding of its own": (
        lambda f: f.tensor("embed_tokens.weight", lambda t: t + 1),
        "embed_tokens.weight is not the embedding of",
    ),
    "two captured layers": (
        lambda f: f.tensor("fc.weight", lambda t: t[:, :64]),
        "fc.weight has shape [32, 64], the config asks for [32, 96]",
    ),
    "one captured layer too few in the config": (
        lambda f: f.config(**{IDS: [1, 3]}),
        f"{IDS} must be 3 layer ids",
    ),
    "features that are not used": (
        lambda f: f.config(eagle_config={IDS: [0, 2, 3], "use_aux_hidden_state": False}),
        "eagle_config.use_aux_hidden_state must be true",
    ),
    "golden logits of another head": (
        lambda f: f.edit(lambda t: t.update({"fc.weight": t["fc.weight"] * 1.01})),
        "its weights, its target or its dtype are not those of the export",
    ),
}


def other_tokens(tensors: dict[str, Tensor]) -> None:
    """A map that contradicts nothing, made from other counts: a resumed run's, say."""
    generator = torch.Generator().manual_seed(7)
    kept = torch.randperm(96, generator=generator)[:40].sort().values
    tensors["d2t"] = kept - torch.arange(40)
    tensors["t2d"] = torch.zeros(96, dtype=torch.bool).index_fill(0, kept, True)


def drop_key(folder: Folder, name: str) -> None:
    path = folder.path / "config.json"
    content = json.loads(path.read_text())
    del content[name]
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("name", CHECKED)
def test_an_export_is_checked(
    damaged: Folder, places: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    damage, message = CHECKED[name]
    damage(damaged)
    said = refused(capsys, export.main, damaged.path, "--check", "--target", places / "target")
    assert message in said


def test_a_whole_one_passes(
    damaged: Folder, places: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export.main([str(damaged.path), "--check", "--target", str(places / "target")])
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (record["format"], record["golden"]) == ("sglang", 0.0)
