"""Damaged and foreign exports, through the commands of a user: each is refused by its own name.

`scripts.export --check` reads an export as an engine would, `scripts.import_head` a folder of
somebody else's. What no format can show, because names and shapes are all as they should be, is
shown by the golden logits of an export, and by `scripts.diagnose` where there are none.
"""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from drafters import TargetModel, build_drafter
from drafters.export import write_as
from drafters.export.golden import GOLDEN
from drafters.export.tensors import INDEX
from scripts import diagnose, export, import_head
from scripts.common import run
from tests.recipes.diagnosing import LENGTH, PROMPT, small_target, trained, written
from tests.tiny import save_tiny_target

IDS = "eagle_aux_hidden_state_layer_ids"
RAN = "the code of the pickle ran"


class Folder:
    """An export of an EAGLE-3 head in SGLang's dialect, to be damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.weights = path / "model.safetensors"

    def config(self, **changes: Any) -> None:
        path = self.path / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    def ids(self, by: int) -> None:
        """Both lists of layer ids, consistently off."""
        found = json.loads((self.path / "config.json").read_text())
        nested = {**found["eagle_config"], IDS: [k + by for k in found["eagle_config"][IDS]]}
        self.config(**{IDS: [k + by for k in found[IDS]], "eagle_config": nested})

    def tensor(self, name: str, change: Callable[[Tensor], Tensor]) -> None:
        self.edit(lambda tensors: tensors.update({name: change(tensors[name].clone())}))

    def edit(self, change: Callable[[dict[str, Tensor]], object]) -> None:
        tensors = load_file(self.weights)
        change(tensors)
        save_file({name: t.contiguous().clone() for name, t in tensors.items()}, self.weights)

    def forget(self, *names: str) -> None:
        """Without the records that another trainer's folder does not have."""
        for name in (GOLDEN, "export.json", *names):
            (self.path / name).unlink()


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and a whole export whose every tensor is random."""
    folder = tmp_path_factory.mktemp("damaged")
    save_tiny_target(folder / "target", dtype=torch.float32)
    target = TargetModel.load(str(folder / "target"))
    options = {"feature_layers": [1, 3, 4], "draft_vocab_size": 40, "intermediate_size": 40}
    head = build_drafter("eagle3", target, **options)
    generator = torch.Generator().manual_seed(1)
    head.set_draft_vocab(torch.randint(100, (target.vocab_size,), generator=generator))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    write_as("sglang", head, folder / "whole", with_embeddings=True)
    return folder


@pytest.fixture
def damaged(places: Path, tmp_path: Path) -> Folder:
    shutil.copytree(places / "whole", tmp_path / "head")
    return Folder(tmp_path / "head")


def refused(
    capsys: pytest.CaptureFixture[str], main: Callable[[list[str]], None], *arguments: object
) -> str:
    """What a command says on stderr when it must fail: one line."""
    words = [str(argument) for argument in arguments]
    with pytest.raises(SystemExit) as left:
        run(lambda: main([*words, "--device", "cpu", "--dtype", "float32"]))
    assert left.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    return lines[0]


def imported(damaged: Folder, places: Path, target: str = "target") -> tuple[object, ...]:
    """The command line of an import."""
    return damaged.path, "--target", places / target, "--out", damaged.path.parent / "own"


def swap_halves(tensor: Tensor) -> Tensor:
    return tensor.roll(tensor.shape[1] // 2, 1)


def absolute(tensor: Tensor) -> Tensor:
    return tensor + torch.arange(len(tensor))


def not_a_number(tensor: Tensor) -> Tensor:
    tensor[3] = torch.nan
    return tensor


def swapped_inputs(folder: Folder) -> None:
    """[feature, embedding] in place of [embedding, feature]."""
    for part in "qkv":
        folder.tensor(f"midlayer.self_attn.{part}_proj.weight", swap_halves)


def cut(folder: Folder, name: str = "model.safetensors") -> None:
    whole = (folder.path / name).read_bytes()
    (folder.path / name).write_bytes(whole[: len(whole) // 2])


def shards(folder: Folder) -> None:
    """Two shards, of which one did not arrive."""
    tensors = load_file(folder.weights)
    folder.weights.unlink()
    names = sorted(tensors)
    files = {"model-00001-of-00002.safetensors": names[::2], "gone.safetensors": names[1::2]}
    first = next(iter(files))
    save_file({name: tensors[name] for name in files[first]}, folder.path / first)
    places = {name: file for file, held in files.items() for name in held}
    (folder.path / INDEX).write_text(json.dumps({"weight_map": places}))


def rename_layer(folder: Folder) -> None:
    """As trainers of another dialect call it; an engine that does not know it says nothing."""
    old, new = "midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"
    folder.edit(lambda tensors: tensors.update({new: tensors.pop(old)}))


Damage = Callable[[Folder], object]

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


# Folders of others ------------------------------------------------------------------------------


class Malicious:
    """What an attacker puts into a .bin."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.write_text, (Path(RAN), RAN))


def with_code(folder: Folder) -> None:
    folder.weights.unlink()
    torch.save({"fc.weight": Malicious()}, folder.path / "pytorch_model.bin")


def a_whole_model(folder: Folder) -> None:
    """A small draft model, not a head."""
    shutil.rmtree(folder.path)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder.path)


def nothing(folder: Folder) -> None:
    folder.weights.unlink()
    folder.forget()


FOREIGN: dict[str, tuple[Damage, str]] = {
    "a pickle that holds code": (with_code, "holds more than tensors and may run code when opened"),
    "a missing shard": (shards, "gone.safetensors: cannot read it, it is missing"),
    "a whole model": (a_whole_model, "no head of a known dialect"),
    "no tensors": (nothing, "no tensors in it"),
    "another target's vocabulary": (
        lambda f: f.config(vocab_size=97),
        "wrong target",
    ),
    "another target's hidden size": (
        lambda f: f.config(target_hidden_size=64),
        "wrong target",
    ),
    "a pickle cut short": (
        lambda f: (f.weights.unlink(), (f.path / "pytorch_model.bin").write_bytes(b"PK\3\4")),
        "damaged or cut short",
    ),
    "something else in the pickle": (
        lambda f: (f.weights.unlink(), torch.save([1, 2], f.path / "pytorch_model.bin")),
        "not a state dict",
    ),
}


def test_the_pickle_is_a_dangerous_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pickle.loads(pickle.dumps(Malicious()))
    assert Path(RAN).read_text() == RAN


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_folder_is_not_taken_over(
    damaged: Folder,
    places: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    monkeypatch.chdir(damaged.path.parent)
    damage, message = FOREIGN[name]
    damage(damaged)
    assert message in refused(capsys, import_head.main, *imported(damaged, places))
    assert not Path(RAN).exists()
    assert not (damaged.path.parent / "own").exists()


def test_another_target_of_the_same_shape(
    damaged: Folder, places: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Told by the fingerprint in the export's record; without it, only by the golden logits."""
    save_tiny_target(places / "other", dtype=torch.float32, seed=4)
    said = refused(capsys, import_head.main, *imported(damaged, places, "other"))
    assert "embed_tokens.weight is not the embedding of" in said
    damaged.edit(lambda tensors: tensors.pop("embed_tokens.weight"))
    said = refused(capsys, import_head.main, *imported(damaged, places, "other"))
    assert "wrong target: weights" in said
    (damaged.path / "export.json").unlink()
    said = refused(capsys, import_head.main, *imported(damaged, places, "other"))
    assert "its target or its dtype are not those of the export" in said


# Without golden logits --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a head that was really trained for it, in a few seconds, and prompts."""
    folder = tmp_path_factory.mktemp("learnt")
    target = small_target()
    target.model.save_pretrained(folder / "target")
    target.tokenizer.save_pretrained(folder / "target")
    target = TargetModel.load(str(folder / "target"))
    head = trained(target, "eagle3", draft_vocab_size=32, feature_layers=[1, 3, 4])
    write_as("sglang", head, folder / "whole")
    prompts = written(target, 14, 9)[:, :PROMPT].tolist()
    rows = [json.dumps({"id": str(row), "prompt_ids": ids}) for row, ids in enumerate(prompts)]
    (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    return folder


UNSEEN: dict[str, tuple[Damage, str]] = {
    "as it is": (lambda f: None, ""),
    "halves of the layer's input swapped": (swapped_inputs, "concat"),
    "a random output matrix": (
        lambda f: f.tensor("lm_head.weight", lambda t: t.std() * torch.randn_like(t)),
        "tensors",
    ),
    "layer ids of the other convention, everywhere": (lambda f: f.ids(1), "layer ids"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", UNSEEN)
def test_what_only_text_can_show_is_diagnosed(
    learnt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """The strict check finds nothing wrong in these files, the diagnosis names the fault."""
    shutil.copytree(learnt / "whole", tmp_path / "head")
    damaged = Folder(tmp_path / "head")
    damage, fault = UNSEEN[name]
    damage(damaged)
    damaged.forget()
    target = ["--target", str(learnt / "target"), "--device", "cpu"]
    export.main([str(damaged.path), "--check", *target])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["golden"] is None
    text = ["--prompts", str(learnt / "prompts.jsonl"), "--limit", "14"]
    length = ["--max-new-tokens", str(LENGTH - PROMPT)]
    code = diagnose.main([str(damaged.path), *target, *text, *length, "--threads", "1"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["faults"] == ([fault] if fault else [])
    assert code == (1 if fault else 0)
