"""scripts.fit_tree: a tree out of measured rates, written where every decoder finds it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters import TargetModel
from drafters.export import read_head
from inference.proposers import build_proposer
from inference.shapes.sequoia import expected_tokens
from inference.shapes.static_tree import static_tree
from scripts.fit_tree import main
from tests.scripts.heads import save_models

ROWS = [[5, 6, 7, 8], [11, 12, 13], [30] * 6, [40, 41, 42]]


def command(folder: Path, family: str, *more: str) -> list[str]:
    options = save_models(folder, family)
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_ids": row}) + "\n" for row in ROWS))
    options += ["--prompts", str(prompts), "--max-new-tokens", "24", "--ranks", "30"]
    return [*options, "--check", "1", *more]


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize("family", ["eagle3", "medusa"])
def test_the_head_remembers_its_tree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str
) -> None:
    options = command(tmp_path, family, "--size", "9")
    path = tmp_path / "head" / "config.json"
    before = json.loads(path.read_text())
    assert main(options) == 0
    assert json.loads(path.read_text()) == before
    assert main([*options, "--save"]) == 0
    found = last_line(capsys)
    after = json.loads(path.read_text())
    assert after.pop("tree") == found["tree"] and len(found["tree"]) == 8 == found["size"] - 1
    before.pop("tree", None)
    assert after == before
    shape = static_tree([tuple(ranks) for ranks in found["tree"]])
    table = torch.tensor(found["rates"])
    assert found["expected_tokens_per_round"] == pytest.approx(expected_tokens(shape, table))
    assert found["rounds"] > 20 and found["depth"] == shape.depth
    assert found["decoded_tokens_per_round"] >= 1 and found["grown_tokens_per_round"] >= 1
    target = TargetModel.load(str(tmp_path / "target"), torch.float64)
    proposer = build_proposer(read_head(str(tmp_path / "head"), target, target.dtype))
    assert proposer.options.shape is not None
    assert proposer.options.shape.paths() == shape.paths()
    assert main([*options, "--save", "--size", "3"]) == 0  # a head with a tree is fitted anew
    assert len(json.loads(path.read_text())["tree"]) == 2


@pytest.mark.parametrize(
    ("rule", "temperature"), [("match", "1"), ("coupled", "1"), ("rejection", "1.5")]
)
def test_rules_at_a_temperature(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rule: str, temperature: str
) -> None:
    more = ["--temperature", temperature, "--rule", rule, "--size", "6", "--positions", "25"]
    assert main(command(tmp_path, "eagle3", *more, "--depth", "2")) == 0
    found = last_line(capsys)
    assert found["rounds"] == 25 and found["size"] <= 6 and len(found["rates"]) == 2
    assert all(sum(row) <= 1 + 1e-9 for row in found["rates"])


def test_heads_that_draw_nothing_are_fitted_by_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A Medusa head has the same drafts under `match` and `rejection`, so the same tree."""
    found = []
    for rule in ("match", "rejection"):
        more = ["--temperature", "1.5", "--rule", rule, "--size", "6", "--positions", "25"]
        assert main(command(tmp_path / rule, "medusa", *more)) == 0
        found.append(last_line(capsys))
    for name in ("rates", "tree", "expected_tokens_per_round"):
        assert found[0][name] == found[1][name]


def test_costs_choose_the_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    costs = tmp_path / "costs.json"
    options = command(tmp_path, "eagle3", "--cost-table", str(costs), "--check", "0")
    draft = [0.0] * 5
    costs.write_text(json.dumps({"verify_seconds": {"2": 1.0, "12": 1.0}, "draft_seconds": draft}))
    assert main(options) == 0
    assert last_line(capsys)["size"] == 12
    steep = {"verify_seconds": {"2": 1.0, "12": 60.0}, "draft_seconds": draft}
    costs.write_text(json.dumps({"costs": steep, "size": 12}))  # as the last line has it
    assert main(options) == 0
    found = last_line(capsys)
    assert found["size"] == 2 and found["decoded_tokens_per_round"] is None
    assert found["seconds_per_token"] == pytest.approx(1 / found["expected_tokens_per_round"])


def test_costs_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--measure-cost", "--engine", "packed", "--threads", "1"]
    assert main(command(tmp_path, "medusa", *more)) == 0
    found = last_line(capsys)
    assert len(found["costs"]["draft_seconds"]) == 3
    assert len(set(found["costs"]["draft_seconds"])) == 1  # one pass
    assert found["size"] <= 64 and found["seconds_per_token"] > 0
    again = tmp_path / "costs.json"
    again.write_text(json.dumps(found))
    options = command(tmp_path / "again", "medusa", "--cost-table", str(again))
    assert main(options) == 0
    assert last_line(capsys)["tree"] == found["tree"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--depth", "4"], r"--depth must be in 1\.\.3"),
        (["--depth", "0"], r"--depth must be in 1\.\.3"),
        (["--rule", "rejection"], "no effect at temperature 0"),
        (["--cost-table", "/nowhere.json"], "nowhere"),
    ],
)
def test_refusals(tmp_path: Path, more: list[str], message: str) -> None:
    with pytest.raises((ValueError, OSError), match=message):
        main(command(tmp_path, "medusa", *more))


@pytest.mark.parametrize(
    "more",
    [["--size", "1"], ["--size", "4", "--measure-cost"], ["--ranks", "0"], ["--check", "-1"]],
)
def test_options_that_cannot_be(
    tmp_path: Path, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--target", "x", "--head", "y", "--prompts", "z", *more])
    assert more[0] in capsys.readouterr().err


def test_a_table_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    options = command(tmp_path, "medusa", "--cost-table", str(path))
    for text in ("[]", "{}", '{"verify_seconds": {"2": 0}, "draft_seconds": [1]}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="--cost-table"):
            main(options)


def test_nothing_to_save_into(tmp_path: Path) -> None:
    options = command(tmp_path, "medusa", "--save")
    (tmp_path / "head" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="--save"):
        main(options)
