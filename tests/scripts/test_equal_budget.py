"""The comparison on a tiny target: equal budgets, resumed where it was, clear about mistakes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from drafters import TargetModel, build_drafter
from inference.proposers import TreeOptions, build_proposer
from scripts import equal_budget
from scripts.common import run
from tests.tiny import save_tiny_target, tiny_target
from training.config import parse_config

WORDS = ["one plus one", "tell me a joke", "who are you", "name three colors", "why", "say hi"]
METHODS: dict[str, dict[str, Any]] = {
    "eagle": {"type": "eagle3", "draft_vocab_size": 60},
    "block": {"type": "dflash", "block_size": 4, "draft_vocab_size": 60},
}


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A target, answers, prompts and two recipes."""
    save_tiny_target(tmp_path / "target", torch.float32)
    talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "I think so, yes."}]
    write_jsonl(tmp_path / "answers.jsonl", [{"messages": talk}] * 30)
    write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": text} for text in WORDS[:2]])
    for name, drafter in METHODS.items():
        config = {
            "target": {"name": "another"},
            "drafter": drafter,
            "data": {"train": ["other.jsonl"], "max_length": 96},
            "loss": {"anchors": 4} if drafter["type"] == "dflash" else {"steps": 2},
            "run": {"out": "outputs/other", "steps": 300, "save_every": 0},
        }
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


def arguments(
    folder: Path, *rest: object, names: tuple[str, ...] = ("eagle", "block")
) -> list[str]:
    paths = {
        "target": "target",
        "answers": "answers.jsonl",
        "prompts": "prompts.jsonl",
        "out": "out",
    }
    given = [text for key, value in paths.items() for text in (f"--{key}", str(folder / value))]
    recipes = [str(folder / f"{name}.yaml") for name in names]
    options = ["--max-new-tokens", 8, "--size", 6, "--depth", 3, "--threads", 1, "--device", "cpu"]
    return [str(word) for word in [*given, *options, "--recipe", *recipes, *rest]]


@pytest.mark.slow
def test_equal_budgets_measured_and_resumed(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two methods; the second part finds what the first one did."""
    budget = 2.5e-6
    command = arguments(folder, "--petaflops", budget)
    equal_budget.main([*command, "--part", "train"])
    shown = capsys.readouterr().out
    plans = {}
    for name in METHODS:
        plans[name] = json.loads((folder / "out" / f"{name}.plan.json").read_text())
        metrics = (folder / "out" / name / "metrics.jsonl").read_text().splitlines()
        assert json.loads(metrics[-1])["step"] == plans[name]["steps"]
        spent = plans[name]["steps"] * plans[name]["teraflops_per_step"] * 1e12
        assert 0.5 * budget * 1e15 < spent <= budget * 1e15
        assert f"--run.steps {plans[name]['steps']}" in shown
    assert plans["eagle"]["steps"] != plans["block"]["steps"]

    monkeypatch.setattr(
        equal_budget.subprocess, "run", lambda *args, **kwargs: pytest.fail("trained")
    )
    equal_budget.main(command)
    lines = capsys.readouterr().out.splitlines()
    record = json.loads(lines[-1])
    assert (record["budget"], record["prompts"]) == ({"petaflops": budget}, 2)
    assert [method["method"] for method in record["methods"]] == ["eagle", "block"]
    for method in record["methods"]:
        assert method["tree_greedy"]["greedy_identical"]
        assert set(equal_budget.SETTINGS) <= set(method)
        assert all(method[name]["acceptance_length"] >= 1 for name in equal_budget.SETTINGS)
        assert f"| {method['method']} | {method['parameters'] / 1e6:.1f}M |" in "\n".join(lines)

    monkeypatch.setattr(equal_budget, "measure", lambda *args, **kwargs: pytest.fail("measured"))
    equal_budget.main([*command, "--part", "evaluate"])
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert again["methods"] == record["methods"]
    with pytest.raises(pytest.fail.Exception, match="measured"):  # other settings: not the same
        equal_budget.main([*command, "--part", "evaluate", "--max-new-tokens", "9"])
    with pytest.raises(ValueError, match="was made for a budget of"):
        equal_budget.main([*arguments(folder, "--petaflops", 1.0), "--part", "train"])


def test_seconds_time_real_steps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clock readings a step: a second for each."""
    ticks = iter(range(1000))
    monkeypatch.setattr(equal_budget.time, "perf_counter", lambda: float(next(ticks)))
    target = TargetModel.load(str(folder / "target"))
    args = equal_budget.parse_args(arguments(folder, "--seconds", 7.5))
    out = folder / "out" / "eagle"
    argv = equal_budget.command(folder / "eagle.yaml", out, args)[3:]
    plan = equal_budget.make_plan(argv, target, args)
    assert plan == {"seconds_per_step": 1.0, "steps": 7, "budget": {"seconds": 7.5}}
    target.model.to(torch.float64)
    with pytest.raises(ValueError, match="--dtype float32"):
        equal_budget.step_seconds(parse_config(argv), target)


def test_settings_reach_the_training(folder: Path) -> None:
    args = equal_budget.parse_args(
        arguments(folder, "--seconds", 1, "--set", "run.batch_size=4", "data.max_length=48")
    )
    command = equal_budget.command(folder / "block.yaml", folder / "out", args)
    config = parse_config(command[3:])
    assert (config.run.batch_size, config.data.max_length) == (4, 48)
    assert (config.target.name, config.run.out) == (str(folder / "target"), str(folder / "out"))
    assert config.data.train == [str(folder / "answers.jsonl")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "a training budget is needed: --petaflops or --seconds"),
        (("--petaflops", 1, "--seconds", 1), "not allowed with"),
        (("--petaflops", 0), "a budget above 0"),
        (("--seconds", -1), "a budget above 0"),
        (("--petaflops", 1, "--depth", 0), "--depth of at least 1"),
        (("--petaflops", 1, "--set", "batch_size"), "expected section.key=value"),
        (("--petaflops", 1, "--set", "run.steps=3"), "the comparison sets this itself"),
    ],
)
def test_wrong_command_lines(
    folder: Path, capsys: pytest.CaptureFixture[str], words: tuple[object, ...], message: str
) -> None:
    with pytest.raises(SystemExit):
        equal_budget.main(arguments(folder, *words))
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("family", "options", "most"),
    [("eagle3", {}, 5), ("dflash", {"block_size": 9}, 8), ("medusa", {"num_heads": 3}, 3)],
)
def test_chains_are_as_long_as_the_head_drafts(
    family: str, options: dict[str, Any], most: int
) -> None:
    """Also where the head has a tree of its own."""
    head = build_drafter(family, tiny_target(), tree=[[0], [1]], **options)
    for depth, longest in ((None, most), (2, 2)):
        chain = build_proposer(head, equal_budget.tree_options(head, 6, depth, chain=True))
        assert chain.chains and chain.options.longest == longest
        assert chain.options.size == longest + 1 or chain.options.shape is not None
        assert equal_budget.tree_options(head, 6, depth, chain=False) == TreeOptions(6, depth)


def test_recipes_of_one_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        equal_budget.main(arguments(folder, "--petaflops", 1, names=("eagle", "eagle")))
    assert "same file name" in capsys.readouterr().err


def test_a_head_that_is_not_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        run(lambda: equal_budget.main(arguments(folder, "--part", "evaluate")))
    assert stop.value.code == 2
    assert capsys.readouterr().err.endswith(
        "error: eagle is not trained yet: run this with --part train first\n"
    )


def test_a_failed_training(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failed:
        returncode = 2

    monkeypatch.setattr(equal_budget.subprocess, "run", lambda *args, **kwargs: Failed())
    monkeypatch.setattr(equal_budget, "step_flops", lambda *args: 1e9)
    with pytest.raises(ValueError, match=r"training of .*eagle.yaml ended with code 2"):
        equal_budget.main(arguments(folder, "--petaflops", 1e-6, "--part", "train"))
