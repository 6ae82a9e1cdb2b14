"""From dialect to dialect, and into Headway: the same head, or a message that says why not."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafters import TargetModel, build_drafter
from drafters.export import golden_inputs, golden_logits, read_head, write_as
from scripts import convert, import_head
from scripts.common import run
from tests.fake_hub import TOKEN, FakeHub, hub
from tests.tiny import save_tiny_target

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and a head as SGLang, SpecForge and official EAGLE have it."""
    folder = tmp_path_factory.mktemp("heads")
    save_tiny_target(folder / "target", dtype=torch.float32)
    target = TargetModel.load(str(folder / "target"))
    head = build_drafter("eagle3", target, draft_vocab_size=40, feature_layers=[1, 3, 5])
    head.set_draft_vocab(torch.arange(96) % 7)
    write_as("sglang", head, folder / "sglang")
    official = folder / "official"
    official.mkdir()
    config = json.loads((folder / "sglang" / "config.json").read_text())
    kept = ("draft_vocab_size", "num_hidden_layers", "eagle_aux_hidden_state_layer_ids")
    shape = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    rest = ("vocab_size", "rms_norm_eps", "rope_theta", "max_position_embeddings", "model_type")
    foreign = {name: config[name] for name in (*kept, *shape, *rest)}
    foreign["architectures"] = ["LlamaForCausalLM"]
    (official / "config.json").write_text(json.dumps(foreign))
    tensors = load_file(folder / "sglang" / "model.safetensors")
    torch.save(tensors, official / "pytorch_model.bin")
    return folder


def arguments(folder: Path, head: object, *rest: object) -> list[str]:
    return [str(each) for each in (head, "--target", folder / "target", *rest)]


def last_json(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def fails(
    main: Callable[[list[str]], None], given: list[str], capsys: pytest.CaptureFixture[str]
) -> str:
    with pytest.raises(SystemExit) as caught:
        run(lambda: main(given))
    assert caught.value.code == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    return line


def logits(folder: Path, head: Path) -> torch.Tensor:
    found = read_head(head, TargetModel.load(str(folder / "target")))
    return golden_logits(found, golden_inputs(found))


@pytest.mark.parametrize("source", ["sglang", "official"])
def test_a_head_is_taken_over(
    folder: Path, tmp_path: Path, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import_head.main(arguments(folder, folder / source, "--out", tmp_path / "mine"))
    found = last_json(capsys)
    assert (found["format"], found["served"], found["logits_equal"]) == (
        "native",
        ["headway"],
        True,
    )
    assert torch.equal(logits(folder, tmp_path / "mine"), logits(folder, folder / "sglang"))
    assert "Not recorded" in (tmp_path / "mine" / "README.md").read_text()


def test_there_and_back(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import_head.main(arguments(folder, folder / "sglang", "--out", tmp_path / "mine"))
    back = ("--from", "native", "--to", "sglang", "--out", tmp_path / "back")
    convert.main(arguments(folder, tmp_path / "mine", *back))
    assert last_json(capsys)["logits_equal"] is True
    first, second = (
        load_file(path / "model.safetensors") for path in (folder / "sglang", tmp_path / "back")
    )
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    configs = [
        json.loads((path / "config.json").read_text())
        for path in (folder / "sglang", tmp_path / "back")
    ]
    assert configs[0] == configs[1]


def test_embeddings_on_request(folder: Path, tmp_path: Path) -> None:
    rest = ("--to", "sglang", "--out", tmp_path / "out", "--with-embeddings")
    convert.main(arguments(folder, folder / "sglang", *rest))
    assert "embed_tokens.weight" in load_file(tmp_path / "out" / "model.safetensors")


def test_a_damaged_head_is_not_carried_on(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "config.json").write_bytes((folder / "sglang" / "config.json").read_bytes())
    tensors = load_file(folder / "sglang" / "model.safetensors")
    tensors["layers.0.input_layernorm.weight"] = tensors.pop("midlayer.input_layernorm.weight")
    save_file(tensors, damaged / "model.safetensors", {"format": "pt"})
    for main, rest in ((import_head.main, ()), (convert.main, ("--to", "native"))):
        given = arguments(folder, damaged, "--from", "sglang", "--out", tmp_path / "out", *rest)
        error = fails(main, given, capsys)
        assert "unknown tensor layers.0.input_layernorm.weight" in error
        assert "missing tensor midlayer.input_layernorm.weight" in error
    assert not (tmp_path / "out").exists()


def test_the_wrong_format_and_no_head_at_all(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ("--out", tmp_path / "out")
    given = arguments(folder, folder / "sglang", "--from", "native", *out)
    assert "is not one of Headway's heads" in fails(import_head.main, given, capsys)
    given = arguments(folder, tmp_path / "nothing", *out)
    assert "nothing: no such folder, and no hub id" in fails(import_head.main, given, capsys)
    given = arguments(folder, folder / "target", *out)
    assert "no head of a known dialect" in fails(import_head.main, given, capsys)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["sglang", "official"])
def test_a_hub_id(folder: Path, tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub(tmp_path / "cache", monkeypatch) as fake:
        fake.add("them/eagle3", folder / form, tag="v1")
        import_head.main(arguments(folder, "them/eagle3@v1", "--out", tmp_path / "mine"))
    assert torch.equal(logits(folder, tmp_path / "mine"), logits(folder, folder / "sglang"))


def test_the_hub_that_the_environment_names(folder: Path, tmp_path: Path) -> None:
    """Nothing is patched: a process of its own, as a user has it."""
    fake = FakeHub()
    with fake.serving():
        fake.add("them/eagle3", folder / "sglang")
        surroundings = {
            **{"HF_ENDPOINT": fake.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": TOKEN},
            **{"HF_HUB_OFFLINE": "0", "PATH": "", "OMP_NUM_THREADS": "1"},
        }
        out = ("--to", "sglang", "--out", tmp_path / "out")
        push = ("--push-to-hub", "me/eagle3", "--base-model", "org/tiny")
        command = [sys.executable, "-m", "scripts.export"]
        done = subprocess.run(
            [*command, *arguments(folder, "them/eagle3", *out, *push)],
            cwd=ROOT,
            env=surroundings,
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["pushed"].startswith(fake.url)
    files = fake.repos["me/eagle3"].files
    assert files["model.safetensors"] == (tmp_path / "out" / "model.safetensors").read_bytes()
