"""The benchmark of training: its tables, its options, and a run on a tiny target."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from scripts import benchmark_training as bench
from scripts import speculators_race, speculators_step
from tests.tiny import save_tiny_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"), torch.float32, layers=3)


def test_a_tiny_run(folder: Path, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    argv = ["--target", str(folder), "--families", "eagle3", "medusa", "--lengths", "16", "24"]
    argv += ["--steps", "2", "--draft-vocab", "40", "--chunk", "4", "--out", str(out)]
    assert bench.main(argv) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    record = json.loads(lines[-1])
    assert json.loads(out.read_text())["results"] == record["results"]
    assert [line.split("|")[1].strip() for line in lines[2:-1]] == ["eagle3"] * 4 + ["medusa"] * 4
    for found in record["results"]:
        assert sum(found["phases"].values()) == pytest.approx(1, abs=0.3)
        assert found["floor_share"] > 0
        assert found["supervised_tokens"] == round(0.7 * found["length"])
        assert found["tokens_per_second"] > 0
        assert found["peak_bytes"] > found["vocabulary_bytes"] > 0
        assert (found["phases"]["target"] > 0) == (found["mode"] == "online")
    flops = {(f["family"], f["mode"], f["length"]): f["flops"] for f in record["results"]}
    assert flops["eagle3", "online", 16] > flops["eagle3", "store", 16]
    assert flops["eagle3", "store", 24] > flops["eagle3", "store", 16]
    assert record["speculators"] == []


@pytest.mark.parametrize(
    "argv", [["--lengths", "0"], ["--steps", "0"], ["--supervised", "0"], ["--batch", "0"]]
)
def test_options_out_of_range_are_refused(argv: list[str]) -> None:
    with pytest.raises(SystemExit):
        bench.parse_args(["--target", "x", *argv])


def race_result(**changes: Any) -> dict[str, Any]:
    found = {"length": 512, "trained_output": True, "attention": "sdpa"}
    speeds = {"ours_tokens_per_second": 30.0, "theirs_tokens_per_second": 20.0, "ratio": 1.5}
    return {**found, **speeds, **changes}


def test_race_table() -> None:
    assert list(bench.race_table([])) == []
    lines = list(bench.race_table([race_result(), race_result(trained_output=False)]))
    assert lines[3] == "| 512 | trained | sdpa | 30.0 | 20.0 | 1.50 |"
    assert lines[4].startswith("| 512 | frozen |")
    failed = {"length": 512, "trained_output": True, "attention": "eager", "error": "no kernel"}
    assert list(bench.race_table([failed]))[-1] == "| 512 | trained | eager | | no kernel | |"


FAKE = """
import json, sys
print("a word on the way")
print(json.dumps({"ready": True, "trained": 7}), flush=True)
for number, _ in enumerate(sys.stdin):
    print(json.dumps({"seconds": 1e9, "losses": [1.0, 2.0, 3.0]}), flush=True)
"""


def work_and_args(folder: Path, *more: str) -> tuple[bench.Work, Any]:
    argv = ["--target", str(folder), "--lengths", "12", "--draft-vocab", "40", "--steps", "2"]
    args = bench.parse_args([*argv, "--speculators-python", sys.executable, *more])
    target = bench.load_target(args)
    for parameter in target.model.parameters():
        parameter.requires_grad_(False)
    return bench.make_work(target, "eagle3", 12, args), args


@pytest.mark.parametrize("trained", [True, False])
def test_the_race_takes_turns(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: bool
) -> None:
    fake = tmp_path / "step.py"
    fake.write_text(FAKE)
    monkeypatch.setattr(speculators_race, "STEP", fake)
    work, args = work_and_args(folder)
    found = speculators_race.race(work, args, trained_output=trained, attention="sdpa")
    head = work.objective.drafter
    assert found["ratio"] > 1e6
    assert (found["theirs_trained"], found["theirs_losses"]) == (7, [1.0, 2.0, 3.0])
    every = sum(p.numel() for p in head.parameters())
    assert found["ours_trained"] == every - (0 if trained else head.lm_head.weight.numel())
    assert head.lm_head.weight.requires_grad, "as it was"


def test_what_stops_the_other_side_is_said(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "step.py"
    fake.write_text("raise RuntimeError('no kernel for it')")
    monkeypatch.setattr(speculators_race, "STEP", fake)
    work, args = work_and_args(folder)
    found = speculators_race.race(work, args, trained_output=True, attention="sdpa")
    assert found["error"] == "RuntimeError: no kernel for it"
    assert "ratio" not in found


def test_the_other_side_gets_the_same_rows(folder: Path, tmp_path: Path) -> None:
    """Their pairing of one document: (token t+1, features of t, hidden state of t+1)."""
    work, args = work_and_args(folder, "--batch", "2")
    data = work.features(work.batch())
    speculators_race.write_inputs(tmp_path, work, data, args, True, "sdpa")
    tensors = load_file(tmp_path / "tensors.safetensors")
    batch = speculators_step.batch_of(tensors)
    ids, features = work.batch().input_ids, data.features
    assert features is not None
    assert batch["input_ids"][0].tolist() == [*ids[0, 1:].tolist(), *ids[1, 1:].tolist()]
    assert torch.equal(batch["hidden_states"][0, :11], features[0, :-1])
    assert torch.equal(batch["hidden_states"][0, 11:], features[1, :-1])
    normed = batch["verifier_last_hidden_states"][0] * work.target.block()["norm.weight"]
    torch.testing.assert_close(normed[:11], data.last_hidden[0, 1:])
    assert batch["document_ids"][0].unique().numel() == 2
    # The row of token t+1 drafts token t+2; of 12 tokens the last 8 are supervised.
    assert batch["loss_mask"][0, :11].tolist() == [False] * 2 + [True] * 8 + [False]
    settings = json.loads((tmp_path / "settings.json").read_text())
    assert settings["layer"]["num_hidden_layers"] == 1
    assert {f"head.{name}" for name in ("fc.weight", "layers.0.hidden_norm.weight")} <= set(tensors)
