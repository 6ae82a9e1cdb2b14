"""`scripts.verify_lossless`: each verdict and exit code, and wrong decoders that it must catch."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import inference.generate as generate_module
import inference.verify as verify_module
from inference.tree import TokenTree
from inference.verify import Verdict, verify
from scripts import verify_lossless as script
from scripts.verify_lossless import main, overall
from tests.scripts.heads import save_models

FAST = ["--max-new-tokens", "8", "--seeds", "2", "--samples", "150", "--size", "6", "--limit", "2"]
FAST += ["--temperature", "0.8"]
DEPTH = {"eagle3": ["--depth", "2"], "medusa": []}


def make_command(folder: Path, family: str) -> list[str]:
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"text": t}) + "\n" for t in ("one", "two", "three")))
    return [*save_models(folder, family), "--prompts", str(prompts), *FAST, *DEPTH[family]]


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
    assert all(check["reason"] == "" for check in result["checks"])
    written = json.loads(out.read_text())
    assert {key: written[key] for key in result} == result
    assert {"command", "commit", "versions"} <= written.keys()


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


class DraftsNothing:
    """A proposer that a change of the verifier could not harm."""

    feature_layers = ()

    def start(self, *args: Any) -> None:
        pass

    def propose(self, states: Any, *args: Any) -> Any:
        return [
            None if state is None else TokenTree.chain(torch.tensor(state.tokens[-1:]))
            for state in states
        ]


def test_without_an_accepted_draft_nothing_is_proven(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "load_proposer", lambda args, target: DraftsNothing())
    assert main([*command, "--rule", "match"]) == 3
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    assert result["verdict"] == "inconclusive"
    assert [check["verdict"] for check in result["checks"]] == ["inconclusive"] * 2
    assert all("no draft token was ever accepted" in c["reason"] for c in result["checks"])
    assert out.count("no draft token was ever accepted") == 4  # for people, and in the JSON line
    assert result["greedy_identical"] is True, "the texts are equal all the same"


def test_a_difference_refutes_even_if_nothing_was_accepted() -> None:
    assert script.judge([{"near_tie": False}], 0)[0] == "not lossless"
    assert script.judge([{"near_tie": True}], 0)[0] == "inconclusive"
    assert script.judge([{"near_tie": True}], 1) == ("lossless", "")


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
