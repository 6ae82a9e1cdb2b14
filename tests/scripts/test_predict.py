"""The command line on tiny models, and the table that it prints."""

import json
from pathlib import Path

import pytest

from scripts import predict
from scripts.evaluate_prediction import prediction_lines
from tests.scripts.heads import save_models


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def prompts(tmp_path: Path) -> list[str]:
    path = tmp_path / "prompts.jsonl"
    rows = [{"id": name, "prompt": f"tell me of {name}"} for name in ("rain", "snow", "wind")]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return ["--prompts", str(path), "--max-new-tokens", "10"]


def test_prediction_and_decode_side_by_side(
    models: list[str], prompts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.json"
    options = ["--temperatures", "0", "1", "--chain", "3", "--tree", "6", "--branch", "2"]
    assert predict.main([*models, *prompts, *options, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    record = json.loads(printed.splitlines()[-1])
    assert record == json.loads(out.read_text())
    cells = [(c["configuration"], c) for c in record["cells"]]
    assert [(s["rule"], s["drafts"], s["temperature"]) for s, _ in cells] == [
        ("match", "chain", 0.0),
        ("match", "grown", 0.0),
        ("match", "chain", 1.0),
        ("match", "grown", 1.0),
        ("rejection", "chain", 1.0),
        ("rejection", "grown", 1.0),
    ]
    for _, cell in cells[:4]:
        assert cell["comparison"]["rounds_agree"] == 1.0
        assert cell["comparison"]["gap"]["value"] == 0.0
    assert printed.count("tokens per round, predicted") == 6 and "WARNING" not in printed


def test_prediction_alone(
    models: list[str], prompts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--temperatures", "0", "--tree", "0", "--chain", "2", "--no-decode"]
    assert predict.main([*models, *prompts, *options]) == 0
    [cell] = json.loads(capsys.readouterr().out.splitlines()[-1])["cells"]
    assert cell["comparison"] is None
    lines = prediction_lines(cell, {"conditional": [0.5, None], "survival": [0.5, 0.1]})
    assert any(line.startswith("  conditional, measured") for line in lines)
    assert not any("measured - predicted" in line for line in lines)


def test_warnings_are_printed_and_end_in_an_error(
    models: list[str],
    prompts: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    decode = predict.decode

    def worse(*args: object) -> predict.Decoded:
        found = decode(*args)  # type: ignore[arg-type]
        return predict.Decoded(found.id, found.tokens, [1] * 3 + [len(found.tokens) - 4])

    monkeypatch.setattr(predict, "decode", worse)
    options = ["--temperatures", "0", "--tree", "0", "--chain", "2"]
    assert predict.main([*models, *prompts, *options]) == 1
    printed = capsys.readouterr().out
    assert "BEYOND ITS INTERVAL" in printed and "WARNING, parity" in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tree", "1"], "--chain and --tree"),
        (["--chain", "0", "--tree", "0"], "--chain and --tree"),
        (["--branch", "1"], "--branch must be at least 2"),
    ],
)
def test_options_without_effect_are_refused(
    models: list[str],
    prompts: list[str],
    options: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        predict.main([*models, *prompts, *options])
    assert message in capsys.readouterr().err
