"""`scripts.verify_lossless`: each verdict and exit code, and wrong decoders that it must catch."""

import json
from pathlib import Path
from typing import Any

import pytest

import inference.generate as generate_module
import inference.verify as verify_module
from inference.verify import Verdict, verify
from scripts.verify_lossless import main, overall
from tests.scripts.heads import save_models

FAST = ["--max-new-tokens", "8", "--seeds", "2", "--samples", "150", "--size", "6", "--depth", "2"]
FAST += ["--limit", "2", "--temperature", "0.8"]


def make_command(folder: Path, family: str) -> list[str]:
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"text": t}) + "\n" for t in ("one", "two", "three")))
    return [*save_models(folder, family), "--prompts", str(prompts), *FAST]


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return make_command(tmp_path_factory.mktemp("eagle3"), "eagle3")


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["eagle3", "medusa"])
def test_our_decoder_is_lossless(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "result.json"
    assert main([*make_command(tmp_path, family), "--out", str(out)]) == 0
    result = last_line(capsys)
    assert result["verdict"] == "lossless" and result["greedy_identical"] is True
    assert [(check["check"], check["rule"]) for check in result["checks"]] == [
        ("greedy", "match"),
        ("greedy", "coupled"),
        ("greedy", "rejection"),
        ("same seed", "match"),
        ("same seed", "coupled"),
        ("law", "rejection"),
    ]
    assert all(check["num_accepted_tokens"] > 0 for check in result["checks"][:5])
    assert [check["texts"] for check in result["checks"][:5]] == [2, 2, 2, 4, 4]
    assert result["checks"][5]["samples"] == 150 and result["checks"][5]["p_value"] > 0.01
    assert json.loads(out.read_text()) == result


def test_the_negative_control_is_found_out(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--negative-control"]) == 1
    result = last_line(capsys)
    assert result["verdict"] == "not lossless" and result["negative_control"] is True
    assert [check["check"] for check in result["checks"]] == ["law"]


@pytest.mark.parametrize("rule", ["match", "coupled"])
def test_a_wrecked_verifier_is_not_lossless(
    command: list[str],
    rule: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wrong(*args: Any, **kwargs: Any) -> Verdict:
        verdict = verify(*args, **kwargs)
        return Verdict(verdict.path, (verdict.next_token + 1) % 96)

    monkeypatch.setattr(generate_module, "verify", wrong)
    assert main([*command, "--rule", rule]) == 1
    result = last_line(capsys)
    assert result["verdict"] == "not lossless" and result["greedy_identical"] is False
    assert [check["verdict"] for check in result["checks"]] == ["not lossless"] * 2
    assert all(check["differences"] for check in result["checks"])


def test_a_forgotten_residual_is_not_lossless(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy decoding cannot show it; the law does."""
    monkeypatch.setattr(verify_module, "residual_law", lambda residual, proposed: residual)
    code = main([*command, "--rule", "rejection", "--samples", "300"])
    result = last_line(capsys)
    assert [check["verdict"] for check in result["checks"]] == ["lossless", "not lossless"]
    assert code == 1 and result["greedy_identical"] is True


def test_too_few_samples_are_inconclusive(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--rule", "rejection", "--samples", "4"]) == 3
    result = last_line(capsys)
    assert result["verdict"] == "inconclusive"
    assert result["checks"][-1]["reason"]


def test_temperature_zero_is_refused(command: list[str]) -> None:
    with pytest.raises(ValueError, match="--temperature"):
        main([*command, "--temperature", "0"])


@pytest.mark.parametrize(
    ("verdicts", "verdict"),
    [
        (["lossless", "lossless"], "lossless"),
        (["lossless", "inconclusive"], "inconclusive"),
        (["inconclusive", "not lossless"], "not lossless"),
    ],
)
def test_the_worst_verdict_counts(verdicts: list[str], verdict: str) -> None:
    assert overall(verdicts) == verdict
