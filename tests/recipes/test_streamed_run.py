"""A run on streamed data, end to end on a tiny target: it trains, resumes exactly, and says what is
wrong with its data.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import yaml
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file

from recipes.train import main
from tests.tiny import save_tiny_target


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """accelerate keeps its state in singletons; the user's cache of datasets stays untouched."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(
        tmp_path_factory.mktemp("models") / "tiny", dtype=torch.float32, layers=3
    )


def talk(number: int) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": f"question {number}"},
            {"role": "assistant", "content": "so " * (number % 7) + f"answer {number}."},
        ]
    }


@pytest.fixture
def recipe(tmp_path: Path, target: Path) -> Path:
    """Two sources, of which the shorter one ends within the run."""
    lines = "".join(json.dumps(talk(number)) + "\n" for number in range(150))
    (tmp_path / "talks.jsonl").write_text(lines)
    more = datasets.Dataset.from_list([talk(1000 + number) for number in range(40)])
    more.to_parquet(tmp_path / "more.parquet", batch_size=7)
    config = {
        "target": {"name": str(target)},
        "drafter": {"type": "medusa", "num_heads": 2, "draft_vocab_size": 60},
        "data": {
            "train": [str(tmp_path / "talks.jsonl"), str(tmp_path / "*.parquet")],
            "max_length": 160,
            "streaming": True,
            "shuffle_buffer": 5,
        },
        "run": {
            "out": str(tmp_path / "out"),
            "steps": 8,
            "batch_size": 4,
            "micro_batch_size": 2,
            "log_every": 1,
            "save_every": 3,
            "keep": 9,
        },
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def trained(recipe: Path, *rest: object) -> dict[str, Any]:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    return main(["--config", str(recipe), *map(str, rest)])


def metrics(out: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "train/seconds"} for line in lines]


def test_a_streamed_run_resumes_as_if_it_had_never_stopped(recipe: Path, tmp_path: Path) -> None:
    """From a checkpoint in the middle, bit for bit: sequences half packed and the shuffle buffer
    are in it.
    """
    out, again = tmp_path / "out", tmp_path / "again"
    summary = trained(recipe)
    assert summary["steps"] == 8 and summary["training_tokens"] > 1000
    shutil.copytree(out, again)
    shutil.rmtree(again / "head")
    checkpoints = sorted((again / "checkpoints").iterdir())
    assert len(checkpoints) == 3
    for later in checkpoints[1:]:
        shutil.rmtree(later)
    state = json.loads((checkpoints[0] / "trainer_state.json").read_text())
    assert state["data"]["step"] == 3
    assert len(state["data"]["buffer"]["documents"]) == 4

    resumed = trained(recipe, "--run.out", again)
    assert metrics(again) == metrics(out)
    assert resumed["training_tokens"] == summary["training_tokens"]
    heads = [load_file(folder / "head" / "model.safetensors") for folder in (out, again)]
    assert all(torch.equal(value, heads[1][name]) for name, value in heads[0].items())

    with pytest.raises(ValueError, match=r"data\.shuffle_buffer.*\(5, 6\)"):
        trained(recipe, "--run.out", again, "--data.shuffle_buffer", 6)
    with (tmp_path / "talks.jsonl").open("r+") as file:  # other rows under the same name
        file.write(json.dumps(talk(7)))
    with pytest.raises(ValueError, match="token ids"):
        trained(recipe, "--run.out", again)


def test_a_row_without_a_mask_stops_the_run_by_name_or_is_left_out(
    recipe: Path, tmp_path: Path
) -> None:
    (tmp_path / "bad.jsonl").write_text(
        json.dumps(talk(1)) + "\n" + json.dumps({"prompt": "no answer"}) + "\n"
    )
    source = f"--data.train=[{tmp_path / 'bad.jsonl'}]"
    with pytest.raises(ValueError, match=r"data row 1 of .*bad\.jsonl: .*skip_bad_rows=true"):
        trained(recipe, source)
    found = trained(recipe, source, "--data.skip_bad_rows=true", "--run.steps=2")
    assert found["steps"] == 2
