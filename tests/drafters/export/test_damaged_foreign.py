"""Damaged and foreign folders of others: each is refused by its own name, no code of theirs is run.

`scripts.import_head` reads a folder of somebody else's. What no format can show is shown by golden
logits, and by `scripts.diagnose` where there are none.
"""

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from drafters import TargetModel
from drafters.export import write_as
from drafters.export.tensors import INDEX
from scripts import diagnose, export, import_head
from tests.drafters.export.damaging import (
    Damage,
    Folder,
    copy_of,
    refused,
    save_whole,
    swapped_inputs,
)
from tests.recipes.diagnosing import LENGTH, PROMPT, small_target, trained, written
from tests.tiny import save_tiny_target

RAN = "the code of the pickle ran"


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_whole(tmp_path_factory.mktemp("damaged"))


@pytest.fixture
def damaged(places: Path, tmp_path: Path) -> Folder:
    return copy_of(places, tmp_path / "head")


def imported(damaged: Folder, places: Path, target: str = "target") -> tuple[object, ...]:
    """The command line of an import."""
    return damaged.path, "--target", places / target, "--out", damaged.path.parent / "own"


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
        lambda f: f.config(hidden_size=64, target_hidden_size=64),
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
