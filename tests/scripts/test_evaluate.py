"""`scripts.evaluate` from the command line to the JSON line, with its exit codes."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import inference.decoding as decoding_module
from inference.measuring.conventions import acceptance_length, accepted_per_round, rounds_of_cell
from inference.measuring.run_records import read_run
from inference.verify import Verdict, verify
from scripts.evaluate import main
from scripts.evaluate_run import training_history
from tests.scripts.heads import save_models

PROMPTS = [
    {"prompt": "hello there", "category": "chat", "id": "greeting"},
    {"question_id": 7, "category": "maths", "turns": ["1+1=?", "2+2=?"]},
    {"prompt": "how are you", "category": "chat"},
]


@pytest.fixture(scope="module", params=["eagle3", "medusa"])
def command(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp(request.param)
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    options = save_models(folder, request.param)
    return [*options, "--prompts", str(prompts), "--max-new-tokens", "12", "--size", "8"]


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_figures_tables_and_json(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command) == 0
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    shared = {
        "acceptance_length",
        "accepted_per_round",
        "acceptance_by_position",
        "greedy_identical",
        "tokens_per_second",
        "speedup",
        "other_share",
    }
    assert shared <= set(result)
    assert result["greedy_identical"] is True and result["near_ties"] == 0
    assert set(result["by_category"]) == {"chat", "maths"}
    assert result["acceptance_length"] >= 1 and result["speedup"] > 0
    assert result["settings"]["rule"] == "match" and result["settings"]["threads"] >= 1
    table = {line.split()[0]: line for line in out.splitlines()[:-1] if line.strip()}
    assert {"category", "chat", "maths", "all", "survival", "conditional", "decoding"} <= set(table)
    assert f"{result['acceptance_length']:.2f}" in table["all"]
    assert "output: identical" in table["output:"]


def test_transformers_generate_as_reference(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--reference", "generate"]) == 0
    assert last_line(capsys)["greedy_identical"] is True
    with pytest.raises(ValueError, match="temperature 0"):
        main([*command, "--reference", "generate", "--temperature", "1"])


def test_no_plain(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--no-plain"]) == 0
    result = last_line(capsys)
    assert result["greedy_identical"] is None and result["speedup"] is None


@pytest.mark.parametrize("reference", ["plain", "generate"])
def test_no_plain_and_a_reference_exclude_each_other(
    command: list[str], reference: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for options in (["--no-plain", "--reference", reference], ["--reference", reference, "--no-p"]):
        with pytest.raises(SystemExit) as ended:
            main([*command, *options])
        assert ended.value.code == 2 and "not allowed with" in capsys.readouterr().err


def test_a_base_model_is_given_a_template(
    tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The head was trained with one; without it nothing tells how to ask."""
    base = tmp_path / "base"
    shutil.copytree(command[command.index("--target") + 1], base)
    template = tmp_path / "chat.jinja"
    (base / "chat_template.jinja").rename(template)
    ask = [*command, "--target", str(base), "--limit", "1"]
    with pytest.raises(ValueError, match="--chat-template FILE"):
        main(ask)
    assert main([*ask, "--chat-template", str(template)]) == 0
    settings = last_line(capsys)["settings"]
    assert settings["chat_template"] == str(template) and settings["reference"] == "plain"


@pytest.mark.parametrize("options", ["--rule coupled --temperature 1", "--batch-size 2 --size 5"])
def test_other_ways_of_decoding(
    command: list[str], options: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, *options.split()]) == 0
    assert last_line(capsys)["identical"] is True


def test_a_changed_output_fails(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*args: Any, **kwargs: Any) -> Verdict:
        verdict = verify(*args, **kwargs)
        return Verdict(verdict.path, (verdict.next_token + 1) % 96)

    monkeypatch.setattr(decoding_module, "verify", wrong)
    assert main(command) == 1
    out = capsys.readouterr().out
    assert "NOT identical" in out and "FAILURE: prompt greeting" in out
    result = json.loads(out.splitlines()[-1])
    assert result["greedy_identical"] is False and len(result["differences"]) == 4


def test_the_written_run_holds_every_round(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "runs" / "one"
    assert main([*command, "--out", str(out), "--trace", "2"]) == 0
    run, line = read_run(out), last_line(capsys)
    (cell,) = run.cells
    assert {key: line[key] for key in cell} == cell
    assert (
        cell["name"] == "T=0 match size 8" and cell["options"]["depth"] == line["settings"]["depth"]
    )
    assert "torch" in run.result["versions"] and run.result["target"]["dtype"] == "float64"
    assert run.result["head"]["parameters"] > 0
    rounds = rounds_of_cell(run)
    assert len(rounds) == line["num_drafts"]
    assert acceptance_length(rounds) == pytest.approx(line["acceptance_length"])
    assert accepted_per_round(rounds) == pytest.approx(line["accepted_per_round"])
    assert [(each.id, each.turn) for each in run.requests] == [
        ("greeting", 0),
        ("3", 0),
        ("7", 0),
        ("7", 1),
    ]
    assert "".join(run.requests[0].pieces) != "" and run.requests[0].plain_seconds is not None
    traced = {(each.id, each.turn) for each in rounds if each.trace is not None}
    assert traced == {("greeting", 0), ("3", 0)}


@pytest.mark.parametrize("name", ["result.json", "taken", "taken/run/one"])
def test_a_run_is_a_folder(command: list[str], tmp_path: Path, name: str) -> None:
    """What cannot be written is refused before anything is measured."""
    (tmp_path / "taken").write_text("")
    with pytest.raises(ValueError, match=r"--out .* folder"):
        main([*command, "--out", str(tmp_path / name), "--target", "nowhere"])


def test_a_full_disk_does_not_cost_the_result(
    command: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError):
        main([*command, "--limit", "1", "--out", str(tmp_path / "run")])
    assert last_line(capsys)["greedy_identical"] is True
    assert list((tmp_path / "run").iterdir()) == []


def test_turns(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The second turn is asked with the first answer in the history."""
    assert main(command) == 0
    every = last_line(capsys)
    assert (every["num_prompts"], every["num_conversations"]) == (4, 3)
    assert every["by_category"]["maths"]["num_prompts"] == 2
    assert main([*command, "--turns", "first"]) == 0
    first = last_line(capsys)
    assert (first["num_prompts"], first["num_conversations"]) == (3, 3)
    assert (
        first["by_category"]["chat"]["num_emitted"] == every["by_category"]["chat"]["num_emitted"]
    )


def test_training_history_is_read_beside_the_head(tmp_path: Path) -> None:
    assert training_history(tmp_path / "head") is None
    lines = [
        {"step": 10, "train/loss": 3.0, "train/tokens": 700, "train/lr": 0.1},
        {"step": 10, "eval/acceptance_length": 1.2, "eval/accepted_per_round": 0.2},
        {"step": 20, "train/loss": 2.0, "train/tokens": 1400},
        {"note": "no step"},
        {"step": 30, "train/loss": None},
    ]
    path = tmp_path / "metrics.jsonl"
    text = "".join(json.dumps(line) + "\n" for line in lines)
    path.write_text(text + '{"step": 40, "train/lo')  # a training that is still running
    assert training_history(tmp_path / "head") == [
        {
            "step": 10,
            "loss": 3.0,
            "tokens": 700,
            "acceptance_length": 1.2,
            "accepted_per_round": 0.2,
        },
        {"step": 20, "loss": 2.0, "tokens": 1400},
        {"step": 30, "loss": None},
    ]


def test_predictions_stand_beside_what_was_measured(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*command, "--predict", "--no-plain"])
    capsys.readouterr()
    assert main([*command, "--predict"]) == 0
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    found = result["prediction"]
    assert found["tau"]["value"] == pytest.approx(result["acceptance_length"])
    assert found["comparison"]["within"] is True and found["comparison"]["rounds_agree"] == 1.0
    assert "predicted" in out and "measured" in out


def test_a_damaged_head_is_named(command: list[str], tmp_path: Path) -> None:
    head = Path(command[command.index("--head") + 1])
    for file in head.iterdir():
        data = file.read_bytes()
        cut = len(data) // 2 if file.suffix == ".safetensors" else len(data)
        (tmp_path / file.name).write_bytes(data[:cut])
    with pytest.raises(ValueError, match="damaged or cut short"):
        main([*command, "--head", str(tmp_path)])


@pytest.mark.parametrize("tokens", ["1", "2"])
def test_texts_of_one_round_and_of_none(
    command: list[str], tokens: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The token of the prefill belongs to no round, so the first has nothing to say."""
    options = ["--limit", "1", "--predict", "--out", str(tmp_path / "run")]
    assert main([*command, "--max-new-tokens", tokens, *options]) == 0
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    assert result["num_drafts"] == int(tokens) - 1 and "nan" not in out
    assert result["acceptance_length"] == (None if tokens == "1" else 1.0)
    assert result["acceptance_length_interval"] is None and result["speedup_interval"] is None
    assert (result["tokens_per_second"] is None) == (tokens == "1")
    assert ("raise --max-new-tokens" in out) == (tokens == "1")
    assert read_run(tmp_path / "run").cells[0]["num_prompts"] == 1
