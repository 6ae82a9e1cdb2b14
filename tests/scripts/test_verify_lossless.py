"""`scripts.verify_lossless`: each verdict and exit code, and wrong decoders that it must catch."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import inference.verify as verify_module
from drafters import TargetModel
from inference.engine import EagerEngine, Engine
from inference.engines import build_engine
from inference.support import check_tree_support
from scripts import verify_lossless as script
from scripts.verify_lossless import main, shallow
from tests.inference import mutants
from tests.inference.proofs.test_token_check import DraftsNothing
from tests.scripts.heads import save_models

FAST = ["--max-new-tokens", "8", "--seeds", "2", "--samples", "120", "--limit", "3"]
FAST += ["--temperature", "0.8"]
TREE = {"eagle3": ["--size", "6", "--depth", "3"], "medusa": ["--size", "6"]}
CHAIN = {"eagle3": ["--size", "4", "--depth", "3", "--branch", "1"]}


def make_command(folder: Path, family: str) -> list[str]:
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"text": t}) + "\n" for t in ("one", "two is", "three")))
    return [*save_models(folder, family), "--prompts", str(prompts), *FAST]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return make_command(tmp_path_factory.mktemp("eagle3"), "eagle3")


@pytest.fixture(scope="module")
def command(bare: list[str]) -> list[str]:
    return [*bare, *TREE["eagle3"]]


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def names(result: dict[str, Any]) -> list[tuple[str, str]]:
    return [(check["check"], check["rule"]) for check in result["checks"]]


TOKEN_CHECKS = [(check, rule) for rule in ("match", "coupled") for check in ("greedy", "same seed")]


@pytest.mark.parametrize("engine", ["packed", "device"])
def test_the_verdict_is_about_an_engine(
    bare: list[str],
    engine: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Which really decodes; what it does not have is said not to be tested."""
    used = []

    def recorded(args: Any, target: TargetModel) -> Engine | None:
        used.append(build_engine(target, args.engine))
        return used[-1]

    monkeypatch.setattr(script, "open_engine", recorded)
    report = tmp_path / "lossless.md"
    options = ["--engine", engine, "--rule", "match", "--report", str(report), *CHAIN["eagle3"]]
    assert main([*bare, *options]) == 0
    assert used[0].warm_up_seconds > 0 or engine == "device"
    assert last_line(capsys)["engine"] == engine
    assert f"Decoded by engine `{engine}`" in report.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["packed", "device"])
def test_all_rules_that_an_engine_has(
    bare: list[str], engine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*bare, "--engine", engine, *CHAIN["eagle3"]]) == 0
    result = last_line(capsys)
    rules = {check["rule"] for check in result["checks"]}
    assert rules == {"match", "coupled", "rejection"} | ({"block"} if engine == "packed" else set())
    missing = "rule `block`, which engine device does not have" in result["not_tested"]
    assert missing == (engine == "device")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["eagle3", "medusa"])
def test_our_decoder_is_lossless(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, report = tmp_path / "result.json", tmp_path / "pages" / "lossless.md"
    options = [*TREE[family], "--out", str(out), "--report", str(report)]
    assert main([*make_command(tmp_path, family), *options]) == 0
    result = last_line(capsys)
    assert result["verdict"] == "lossless" and result["greedy_identical"] is True
    assert names(result) == [*TOKEN_CHECKS, ("greedy", "rejection"), ("law", "rejection")]
    assert "rule `block`, as it verifies chains" in result["not_tested"][0]
    tokens = result["checks"][:5]
    assert all(check["num_accepted_tokens"] > 0 for check in tokens)
    assert [(c["texts"], c["batched"]) for c in tokens] == [(3, 3), (6, 6), (3, 3), (6, 6), (3, 3)]
    assert all(check["exact"] == check["tokens"] > 0 for check in tokens)
    assert result["checks"][5]["samples"] == 120 and result["checks"][5]["p_value"] > 0.01
    assert all(check["reason"] == "" for check in result["checks"])
    written = json.loads(out.read_text())
    assert {key: written[key] for key in result} == result
    assert {"command", "commit", "versions"} <= written.keys()
    page = report.read_text()
    assert page.startswith("# Verdict: lossless\n") and "| head |" in page and "| torch |" in page
    assert all(remark in page for remark in result["not_tested"])


def test_chains_are_verified_by_block_too(
    bare: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """With penalties that look at the text so far."""
    options = ["--repetition-penalty", "1.3", "--frequency-penalty", "0.5", "--seeds", "1"]
    code = main([*bare, *CHAIN["eagle3"], *options])
    result = last_line(capsys)
    assert names(result)[-4:] == [
        *((check, "rejection") for check in ("greedy", "law")),
        *((check, "block") for check in ("greedy", "law")),
    ]
    assert not any(check["verdict"] == "not lossless" for check in result["checks"])
    assert code in (0, 3) and "block" not in str(result["not_tested"][:1])


def test_drafts_that_need_no_training(bare: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    head = bare.index("--head")
    rest = [*bare[:head], *bare[head + 2 :]]
    for kind in (["layer-skip", "--exit-layer", "4"], ["ngram"], ["suffix"]):
        code = main([*rest, "--proposer", *kind, "--rule", "match", "--seeds", "1"])
        result = last_line(capsys)
        assert code in (0, 3) and result["greedy_identical"] is True


def test_block_on_trees_is_an_error_if_asked_for(command: list[str]) -> None:
    with pytest.raises(ValueError, match="verifies chains"):
        main([*command, "--rule", "block"])


def test_the_negative_control_is_found_out(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    assert main([*command, "--negative-control", "--report", str(page)]) == 1
    result = last_line(capsys)
    assert result["verdict"] == "not lossless" and result["negative_control"] is True
    assert names(result) == [("law", "rejection")] and result["greedy_identical"] is None
    assert page.read_text().startswith("# Verdict: not lossless")
    with pytest.raises(ValueError, match="no effect with --rule match"):
        main([*command, "--negative-control", "--rule", "match"])


def test_bfloat16_gets_a_verdict(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--dtype", "bfloat16", "--rule", "coupled", "--max-new-tokens", "16"]
    assert main([*command, *options]) == 0
    assert all(c["tokens"] > 0 for c in last_line(capsys)["checks"])


# Wrong decoders ---------------------------------------------------------------------------------

PLANTED = [
    (mutants.position_off_by_one, "match"),
    (mutants.padding_seen, "coupled"),
    (mutants.first_rows_committed, "rejection"),
]
"""More of them in `tests.inference.proofs.test_token_check`."""


@pytest.mark.parametrize(
    ("plant", "rule"), PLANTED, ids=[f"{plant.__name__} {rule}" for plant, rule in PLANTED]
)
def test_planted_bugs_are_not_lossless(
    command: list[str],
    plant: Callable[[pytest.MonkeyPatch], None],
    rule: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The target is checked before the bug is planted, lest it be refused."""
    load = script.load_target

    def checked(*args: Any) -> Any:
        target = load(*args)
        check_tree_support(EagerEngine(target))
        plant(monkeypatch)
        return target

    monkeypatch.setattr(script, "load_target", checked)
    options = ["--rule", rule, "--max-new-tokens", "16", "--samples", "20"]
    options += ["--seeds", "1"]
    assert main([*command, *options]) == 1
    assert last_line(capsys)["verdict"] == "not lossless"


def test_a_forgotten_residual_is_not_lossless(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy decoding cannot show it; the law does."""
    monkeypatch.setattr(verify_module, "residual_law", lambda residual, proposed: residual)
    code = main([*command, "--rule", "rejection", "--samples", "300"])
    result = last_line(capsys)
    assert [check["verdict"] for check in result["checks"]] == ["lossless", "not lossless"]
    assert code == 1 and result["greedy_identical"] is True


# Doubt ------------------------------------------------------------------------------------------


def test_too_few_samples_are_inconclusive(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--rule", "rejection", "--samples", "4"]) == 3
    result = last_line(capsys)
    assert result["verdict"] == "inconclusive"
    assert result["checks"][-1]["reason"]


def test_without_an_accepted_draft_nothing_is_proven(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "load_proposer", lambda *args: DraftsNothing())
    assert main([*command, "--rule", "match"]) == 3
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    assert result["verdict"] == "inconclusive"
    assert [check["verdict"] for check in result["checks"]] == ["inconclusive"] * 2
    assert out.count("no draft token was ever accepted") == 4  # for people, and in the JSON line
    assert result["greedy_identical"] is True, "the texts are equal all the same"


def test_depths_that_were_hardly_tried_are_remarked() -> None:
    check = {"check": "law", "rule": "block", "rejected_at": (50, 9, 0)}
    assert shallow([check, {"check": "greedy"}]) == [
        "rule `block` in law at depth 2: 9 rounds rejected drafts there",
        "rule `block` in law at depth 3: 0 rounds rejected drafts there",
    ]


def test_temperature_zero_is_refused(command: list[str]) -> None:
    with pytest.raises(ValueError, match="--temperature"):
        main([*command, "--temperature", "0"])


def test_prompts_that_do_not_fit_are_counted(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "long.jsonl"
    prompts.write_text("".join(json.dumps({"text": t}) + "\n" for t in ("one", "x" * 600)))
    main([*command, "--prompts", str(prompts), "--rule", "match", "--seeds", "1"])
    remarks = last_line(capsys)["not_tested"]
    assert "1 prompts, which are too long for the target" in remarks
    assert "batches, as there is one prompt only" in remarks
