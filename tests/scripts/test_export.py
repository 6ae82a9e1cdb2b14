"""The export script: exit codes, the JSON line, a head that decodes the same after the trip, the
model card, and the hub.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from drafters import TargetModel, build_drafter
from drafters.export import Export, check_golden, read_as, read_head
from drafters.export.golden import GOLDEN
from scripts import export as script
from scripts.common import run
from tests.fake_hub import FakeHub, hub
from tests.scripts.report_runs import made_run
from tests.tiny import save_tiny_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target and two heads for it."""
    folder = tmp_path_factory.mktemp("heads")
    save_tiny_target(folder / "target", dtype=torch.float32)
    target = TargetModel.load(str(folder / "target"))
    options = {"draft_vocab_size": 40, "feature_layers": [1, 3, 5], "confidence_head": True}
    eagle3 = build_drafter("eagle3", target, **options)
    eagle3.set_draft_vocab(torch.arange(96) % 7)
    eagle3.save_pretrained(folder / "eagle3")
    medusa = build_drafter("medusa", target)
    medusa.set_draft_vocab(torch.arange(96))
    medusa.save_pretrained(folder / "medusa")
    return folder


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with hub(tmp_path / "cache", monkeypatch) as found:
        yield found


def arguments(folder: Path, head: str | Path, *rest: object) -> list[str]:
    return [str(argument) for argument in (folder / head, "--target", folder / "target", *rest)]


def last_json(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def fails(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 2) -> str:
    """The one line on stderr of a run that must fail."""
    with pytest.raises(SystemExit) as exit_info:
        run(lambda: script.main(arguments))
    assert exit_info.value.code == code
    lines = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert len(lines) == 1
    return lines[0]


# --- writing


def test_sglang(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.main(arguments(folder, "eagle3", "--to", "sglang", "--out", tmp_path / "out"))

    found = last_json(capsys)
    assert found.pop("notes")  # the confidence output is not served
    assert found == {
        "format": "sglang",
        "served": ["sglang", "vllm", "llama.cpp"],
        "path": str(tmp_path / "out"),
        "num_tensors": 15,
        "bytes": sum(path.stat().st_size for path in (tmp_path / "out").iterdir()),
        "logits_equal": True,
        "left_out": ["confidence.proj.bias", "confidence.proj.weight"],
        "pushed": None,
    }
    target = TargetModel.load(str(folder / "target"))
    assert check_golden(read_as("sglang", tmp_path / "out", target), tmp_path / "out") == 0
    manifest = json.loads((tmp_path / "out" / "export.json").read_text())
    assert {"command", "commit", "versions"} <= manifest["provenance"].keys()


@pytest.mark.parametrize("head", ["eagle3", "medusa"])
def test_native(
    folder: Path, tmp_path: Path, head: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):  # the second replaces the first
        script.main(arguments(folder, head, "--to", "native", "--out", tmp_path / "out"))
    record = last_json(capsys)
    assert (record["served"], record["logits_equal"]) == (["headway"], True)
    target = TargetModel.load(str(folder / "target"))
    assert read_head(tmp_path / "out", target).family == head


def test_an_export_can_be_exported_again(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.main(arguments(folder, "eagle3", "--to", "sglang", "--out", tmp_path / "first"))
    again = ("--to", "native", "--out", tmp_path / "second")
    script.main(arguments(folder, tmp_path / "first", *again))
    assert last_json(capsys)["logits_equal"] is True
    first, second = (load_file(tmp_path / name / GOLDEN) for name in ("first", "second"))
    assert torch.equal(first["logits"], second["logits"])


def test_the_summary_says_what_is_left_out(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.main(arguments(folder, "eagle3", "--to", "sglang", "--out", tmp_path / "out"))
    shown = capsys.readouterr().out
    assert "no place for it: confidence.proj.bias, confidence.proj.weight" in shown
    assert "15 tensors" in shown
    assert f"how to serve it: {tmp_path / 'out' / 'README.md'}" in shown


def test_medusa_to_sglang_names_what_is_supported(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rest = ("--to", "sglang", "--out", tmp_path / "out")
    error = fails(arguments(folder, "medusa", *rest), capsys)
    assert "for eagle3 heads" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        (("--to", "native", "--out", "OUT", "--with-embeddings"), "with_embeddings has no effect"),
        (("--to", "sglang"), "--to DIALECT and --out DIR are needed"),
        (("--out", "OUT"), "--to DIALECT and --out DIR are needed"),
        (("--check", "--out", "OUT"), "--check writes nothing"),
        (("--check", "--push-to-hub", "me/head"), "--check writes nothing"),
        (("--to", "sglang", "--out", "OUT", "--private"), "--private has no effect"),
        (("--to", "sglang", "--out", "OUT", "--base-model", "no"), "--base-model no: that is no"),
        (("--to", "sglang", "--out", "OUT", "--runs", "NONE"), "no finished run"),
    ],
)
def test_what_makes_no_sense_is_refused(
    folder: Path,
    tmp_path: Path,
    rest: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    places = {"OUT": tmp_path / "out", "NONE": tmp_path / "none"}
    given = [places.get(word, word) for word in rest]
    assert message in fails(arguments(folder, "eagle3", *given), capsys)
    assert not (tmp_path / "out").exists()


def test_a_truncated_head_is_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / "eagle3" / name).read_bytes())
    os.truncate(tmp_path / "model.safetensors", 3000)
    rest = ("--to", "sglang", "--out", tmp_path / "out")
    assert "damaged or cut short" in fails(arguments(folder, tmp_path, *rest), capsys)


def test_the_trained_head_is_never_overwritten(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted((path.name, path.stat().st_mtime_ns) for path in (folder / "eagle3").iterdir())
    rest = ("--to", "sglang", "--out", folder / "eagle3")
    assert "is the head itself" in fails(arguments(folder, "eagle3", *rest), capsys)
    after = sorted((path.name, path.stat().st_mtime_ns) for path in (folder / "eagle3").iterdir())
    assert after == before


# --- checking


def test_an_export_is_not_replaced_by_what_is_made_of_it(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    script.main(arguments(folder, "eagle3", "--to", "sglang", "--out", out))
    said = fails(arguments(folder, out, "--to", "vllm", "--out", out), capsys)
    assert "is the head itself" in said
    assert json.loads((out / "export.json").read_text())["format"] == "sglang"


def test_check(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.main(arguments(folder, "eagle3", "--to", "sglang", "--out", tmp_path / "out"))
    before = sorted((path.name, path.stat().st_mtime_ns) for path in (tmp_path / "out").iterdir())
    for named in ((), ("--to", "sglang")):
        script.main(arguments(folder, tmp_path / "out", "--check", *named))
        found = last_json(capsys)
        engines = found.pop("engines")
        assert found == {"format": "sglang", "tensors": 15, "golden": 0.0}
        assert {name.split()[0] for name in engines} == {"sglang", "vllm"}
        assert not any(engines.values())
    (tmp_path / "out" / GOLDEN).unlink()
    script.main(arguments(folder, tmp_path / "out", "--check"))
    assert last_json(capsys)["golden"] is None
    after = sorted((path.name, path.stat().st_mtime_ns) for path in (tmp_path / "out").iterdir())
    assert [each for each in before if each[0] != GOLDEN] == after


def test_check_asks_the_loaders_of_engines(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    script.main(arguments(folder, "eagle3", "--to", "sglang", "--out", out))
    save_file({"strange": torch.ones(2)}, out / "other.safetensors")  # engines read that, too
    said = fails(arguments(folder, out, "--check"), capsys)
    assert "vllm 0.33.0: strange is refused" in said
    assert "sglang 0.5.23: strange is ignored" in said


def test_check_names_what_is_wrong(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    script.main(arguments(folder, "eagle3", "--to", "sglang", "--out", out))
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    assert "tie_word_embeddings" in fails(arguments(folder, out, "--check"), capsys)
    assert "native head" in fails(arguments(folder, "eagle3", "--check"), capsys)


# --- the card


def trained(folder: Path, run: Path) -> Path:
    """The EAGLE-3 head in the folder of a run that trained it."""
    target = TargetModel.load(str(folder / "target"))
    read_head(folder / "eagle3", target).save_pretrained(run / "head")
    command = ["train.py", "--config", "recipes/some.yaml", "--run.out", "out"]
    record = {"command": command, "commit": "0123abcd", "versions": {"torch": "2.13.0"}}
    (run / "provenance.json").write_text(json.dumps(record))
    (run / "config.yaml").write_text(
        "data:\n  train: [org/answers, /home/me/answers.jsonl]\n  split: train\n"
        "  max_length: 1024\n  regenerate: true\ndrafter:\n  type: eagle3\n"
    )
    lines = [{"step": step, "train/tokens": 100 * step} for step in (10, 20)]
    lines.append({"step": 20, "eval/acceptance_length": 1.5})
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run / "head"


def evaluated(
    folder: Path, head: Path, run: Path, change: Callable[[dict[str, Any]], None] | None = None
) -> Path:
    """An evaluation of it."""
    made_run(run, head="eagle3", temperatures=(0.0,), sizes=(6,))
    result = json.loads((run / "result.json").read_text())
    target = TargetModel.load(str(folder / "target"))
    result["target"]["fingerprint"] = target.fingerprint()
    result["head"]["parameters"] = read_head(head, target).num_parameters_trained()
    result |= {"command": ["evaluate.py", "--prompts", "my questions.jsonl"], "commit": "feed"}
    if change is not None:
        change(result)
    (run / "result.json").write_text(json.dumps(result))
    return run


def test_the_card_has_acceptance_commands_and_training(folder: Path, tmp_path: Path) -> None:
    head = trained(folder, tmp_path / "run")
    run = evaluated(folder, head, tmp_path / "evaluation")
    rest = ("--out", tmp_path / "out", "--runs", run, "--base-model", "org/tiny")
    script.main(arguments(folder, head, "--to", "sglang", *rest))
    text = (tmp_path / "out" / "README.md").read_text()
    assert text.startswith("---\nbase_model: org/tiny\n")
    cell = json.loads((run / "result.json").read_text())["cells"][0]
    assert f"| **{cell['acceptance_length']:.2f}**" in text
    assert "python -m scripts.evaluate --prompts 'my questions.jsonl'\n# Headway feed, " in text
    assert f"--speculative-draft-model-path {tmp_path / 'out'}" in text
    assert "- data: org/answers, `answers.jsonl`, split train" in text
    assert "- answers: written by the target itself" in text
    assert "- trained for 20 steps, 2,000 tokens" in text
    assert "python -m recipes.train --config recipes/some.yaml --run.out out" in text
    assert "# Headway 0123abcd, torch 2.13.0" in text and "  type: eagle3\n" in text


def test_what_is_known_of_the_training_travels_on(folder: Path, tmp_path: Path) -> None:
    """From export to export, and away from the run's folder."""
    head = trained(folder, tmp_path / "run")
    script.main(arguments(folder, head, "--to", "sglang", "--out", tmp_path / "one"))
    script.main(arguments(folder, tmp_path / "one", "--to", "native", "--out", tmp_path / "two"))
    one, two = ((tmp_path / name / "README.md").read_text() for name in ("one", "two"))
    assert one.partition("## Training")[2] == two.partition("## Training")[2] != ""


def test_nothing_recorded_is_said(folder: Path, tmp_path: Path) -> None:
    script.main(arguments(folder, "medusa", "--to", "native", "--out", tmp_path / "out"))
    text = (tmp_path / "out" / "README.md").read_text()
    assert "Not recorded: the head came here without its run's folder." in text
    assert "Acceptance" not in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda result: result["head"].update(type="medusa"), "with a head of type medusa"),
        (lambda result: result["head"].update(parameters=7), "a head of 7 parameters"),
        (lambda result: result.update(head=None), "evaluated with no head"),
        (lambda result: result["target"]["fingerprint"].update(weights="ff"), "with weights ff"),
    ],
)
def test_figures_of_something_else_are_refused(
    folder: Path,
    tmp_path: Path,
    change: Callable[[dict[str, Any]], None],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = evaluated(folder, folder / "eagle3", tmp_path / "evaluation", change)
    rest = ("--to", "sglang", "--out", tmp_path / "out", "--runs", run)
    error = fails(arguments(folder, "eagle3", *rest), capsys)
    assert "--runs evaluation: " in error and message in error
    assert not (tmp_path / "out").exists()


def test_a_run_of_the_export_itself_counts(folder: Path, tmp_path: Path) -> None:
    """It was evaluated without the confidence output, which the dialect has no place for."""
    confidence = sum(
        tensor.numel()
        for name, tensor in load_file(folder / "eagle3" / "model.safetensors").items()
        if name.startswith("confidence.")
    )
    run = evaluated(
        folder,
        folder / "eagle3",
        tmp_path / "evaluation",
        lambda result: result["head"].update(parameters=result["head"]["parameters"] - confidence),
    )
    rest = ("--to", "sglang", "--out", tmp_path / "out", "--runs", run)
    script.main(arguments(folder, "eagle3", *rest))


# --- the hub

PUSH = ("--to", "sglang", "--base-model", "org/tiny", "--push-to-hub", "me/tiny-eagle3")


def test_push(
    folder: Path, tmp_path: Path, fake: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    script.main(arguments(folder, "eagle3", *PUSH, "--out", out, "--private"))
    repo = fake.repos["me/tiny-eagle3"]
    assert last_json(capsys)["pushed"].endswith(repo.commits[-1][0])
    assert repo.private and len(repo.commits) == 2
    assert repo.files == {".gitattributes": b""} | {p.name: p.read_bytes() for p in out.iterdir()}
    text = repo.files["README.md"].decode()
    assert "--speculative-draft-model-path me/tiny-eagle3 " in text and str(out) not in text


def test_what_was_pushed_is_read_from_there(
    folder: Path, tmp_path: Path, fake: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    """A foreign dialect by its hub id, as a head and in a check."""
    script.main(arguments(folder, "eagle3", *PUSH, "--out", tmp_path / "out"))
    fake.repos["me/tiny-eagle3"].tags["v1"] = fake.repos["me/tiny-eagle3"].commits[-1][0]
    target = TargetModel.load(str(folder / "target"))
    wanted = read_head(tmp_path / "out", target).state_dict()
    for name in ("me/tiny-eagle3", "me/tiny-eagle3@v1"):
        found = read_head(name, target).state_dict()
        assert all(torch.equal(found[key], value) for key, value in wanted.items())
        script.main([name, "--target", str(folder / "target"), "--check"])
        assert last_json(capsys)["format"] == "sglang"


def test_nothing_is_pushed_before_the_checks_pass(
    folder: Path,
    tmp_path: Path,
    fake: FakeHub,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    push = (*PUSH, "--out", tmp_path / "out")
    assert "for eagle3 heads" in fails(arguments(folder, "medusa", *push), capsys)
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in ("config.json", "model.safetensors"):
        (broken / name).write_bytes((folder / "eagle3" / name).read_bytes())
    os.truncate(broken / "model.safetensors", 3000)
    assert "damaged" in fails(arguments(folder, broken, *push), capsys)
    monkeypatch.setattr(script, "golden_difference", lambda *_: 0.25)
    assert "nothing was pushed: logits" in fails(arguments(folder, "eagle3", *push), capsys)
    assert not fake.writes and not fake.repos


def test_rounding_of_a_dropped_vocabulary_does_not_stop_a_push(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = script.parse_args(["H", "--target", "T", *PUSH, "--out", "O"])
    monkeypatch.setattr(script, "push_folder", lambda *_: "pushed")
    whole = Export(tmp_path, "dflash", ("vllm",), 1, 1)
    reduced = Export(tmp_path, "dflash", ("vllm",), 1, 1, ("draft_vocab",))
    assert script.push(args, reduced, 2e-7) == "pushed"
    for export, difference in ((reduced, 0.25), (reduced, float("nan")), (whole, 2e-7)):
        with pytest.raises(ValueError, match="nothing was pushed"):
            script.push(args, export, difference)


def test_a_target_that_nobody_finds_is_asked_for(
    folder: Path, tmp_path: Path, fake: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    push = ("--to", "sglang", "--push-to-hub", "me/head", "--out", tmp_path / "out")
    error = fails(arguments(folder, "eagle3", *push), capsys)
    assert "recorded as 'target'" in error and "--base-model user/name" in error
    assert not fake.writes and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("said", "recorded", "loaded", "base"),
    [
        ("org/said", "org/recorded", "org/loaded", "org/said"),
        (None, "org/recorded", "org/loaded", "org/recorded"),
        (None, "smol", "org/loaded", "org/loaded"),
        (None, "smol", "some/folder", None),  # of this machine
    ],
)
def test_the_base_model(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    said: str | None,
    recorded: str,
    loaded: str,
    base: str | None,
) -> None:
    (tmp_path / "some" / "folder").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    head = AutoModel.from_pretrained(folder / "medusa")
    head.config.target_name = recorded
    args = argparse.Namespace(base_model=said, target=loaded, push_to_hub=None)
    assert script.base_model(args, head) == base


def test_no_token(
    folder: Path,
    tmp_path: Path,
    fake: FakeHub,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Said before anything is loaded or written."""
    monkeypatch.delenv("HF_TOKEN")
    error = fails(["none", "--target", "none", *PUSH, "--out", str(tmp_path / "out")], capsys)
    assert "no token of the hub here: set HF_TOKEN" in error
    assert not fake.asked and not (tmp_path / "out").exists()
