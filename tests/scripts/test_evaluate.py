"""`scripts.evaluate` from the command line to the JSON line, with its exit codes."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import inference.decoding as decoding_module
from inference.verify import Verdict, verify
from scripts.evaluate import main
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
    assert result["greedy_identical"] is False and len(result["differences"]) == 3


def test_the_written_file_holds_every_round(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results" / "result.json"
    assert main([*command, "--out", str(out)]) == 0
    written, line = json.loads(out.read_text()), last_line(capsys)
    assert {key: written[key] for key in line} == line
    assert "torch" in written["versions"]
    rounds = [n for request in written["requests"] for n in request["emitted_per_round"]]
    assert len(rounds) == line["num_drafts"] and sum(rounds) == line["num_emitted"]
    assert [request["id"] for request in written["requests"]] == ["greeting", "3", "7"]


def test_a_file_that_cannot_be_written_does_not_cost_the_result(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(OSError):
        main([*command, "--limit", "1", "--out", str(tmp_path)])
    assert last_line(capsys)["greedy_identical"] is True


def test_a_damaged_head_is_named(command: list[str], tmp_path: Path) -> None:
    head = Path(command[command.index("--head") + 1])
    for file in head.iterdir():
        data = file.read_bytes()
        cut = len(data) // 2 if file.suffix == ".safetensors" else len(data)
        (tmp_path / file.name).write_bytes(data[:cut])
    with pytest.raises(ValueError, match="damaged or cut short"):
        main([*command, "--head", str(tmp_path)])
