"""scripts.benchmark: equal settings, equal texts, and a difference is a failure."""

import json
from pathlib import Path

import pytest

import scripts.benchmark as script
from scripts.benchmark import PAIRS, main
from tests.tiny import save_tiny_target


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("bench")
    target = save_tiny_target(folder / "target")
    prompts = folder / "prompts.jsonl"
    rows = [{"prompt_ids": ids} for ids in ([5, 6, 7, 5, 6], [11, 12, 13, 11], [20] * 9)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--target", str(target), "--prompts", str(prompts), "--dtype", "float64"]
    return [*options, "--max-new-tokens", "16", "--draft-first", "3", "--draft-length", "4"]


def result(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_every_pair_gives_equal_texts(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--out", str(tmp_path / "result.json")]) == 0
    found = result(capsys)["results"]
    assert [pair["pair"] for pair in found] == list(PAIRS)
    for pair in found:
        assert (pair["prompts"], pair["identical"], pair["failures"]) == (3, 3, [])
        assert pair["ratio"] > 0 and pair["ours_tokens_per_second"] > 0
    assert json.loads((tmp_path / "result.json").read_text())["results"] == found


def test_settings_are_equal_on_both_sides(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both verify the same drafts: the target runs as often on one side as on the other."""
    rounds: dict[str, int] = {}
    build = script.build_pairs

    def counting(target, args):  # type: ignore[no-untyped-def]
        def counted(name, decode):  # type: ignore[no-untyped-def]
            def run(ids):  # type: ignore[no-untyped-def]
                calls = []
                hook = target.model.lm_head.register_forward_hook(lambda *_: calls.append(1))
                try:
                    return decode(ids)
                finally:
                    hook.remove()
                    rounds[name] = rounds.get(name, 0) + len(calls)

            return run

        return [
            script.Pair(
                pair.name,
                counted(f"theirs {pair.name}", pair.theirs),
                counted(f"ours {pair.name}", pair.ours),
            )
            for pair in build(target, args)
        ]

    monkeypatch.setattr("inference.generate.check_tree_support", lambda target: None)
    monkeypatch.setattr(script, "build_pairs", counting)
    assert main([*command, "--pairs", "prompt-lookup", "draft-model"]) == 0
    for name in ("prompt-lookup", "draft-model"):
        more = rounds[f"ours {name}"] - rounds[f"theirs {name}"]
        assert 0 <= more <= 4, "theirs verifies its first drafts with the prompt, in 4 texts"


def test_a_different_text_is_a_failure(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = script.plain_generate

    def wrong(*args, **options):  # type: ignore[no-untyped-def]
        made = plain(*args, **options)
        made.sequences[0][3] = (made.sequences[0][3] + 1) % 96
        return made

    monkeypatch.setattr(script, "plain_generate", wrong)
    assert main([*command, "--pairs", "plain"]) == 1
    [pair] = result(capsys)["results"]
    assert pair["identical"] == 0 and len(pair["failures"]) == 3


def test_a_pair_that_fails_does_not_cost_the_others(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*args: object, **options: object) -> None:
        raise RuntimeError("not today")

    monkeypatch.setattr(script, "plain_generate", broken)
    assert main([*command, "--pairs", "plain", "prompt-lookup"]) == 1
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["failed"] == {"plain": "RuntimeError: not today"}
    assert [pair["pair"] for pair in found["results"]] == ["prompt-lookup"]


def test_a_draft_of_all_layers_is_refused(command: list[str]) -> None:
    with pytest.raises(ValueError, match="--draft-first must be below the target's 6 layers"):
        main([*command, "--draft-first", "6"])
