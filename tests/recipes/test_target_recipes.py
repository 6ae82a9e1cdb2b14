"""The recipes for large targets: sized for their cards, by the prediction, without any weights.

``targets/`` holds what the targets' own config.json say.
"""

import re
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from recipes.dryrun import StepTrace, read_model_config, trace_step
from recipes.memory import MemoryPlan, plan_memory, spill
from recipes.plan import parse_plan, shares
from training.config import TrainConfig

ROOT = Path(__file__).resolve().parents[2]
TARGETS = Path(__file__).parent / "targets"
SIZES = re.compile(r"^#   (24 GB|80 GB|8x80 GB): *(.*)$", re.MULTILINE)
FOLDERS = ("qwen3-0.6b", "qwen3-8b", "llama-3.1-8b", "gpt-oss-20b", "gemma-3")
RECIPES = sorted(path for name in FOLDERS for path in (ROOT / "recipes" / name).glob("*.yaml"))
CASES = [(path, size) for path in RECIPES for size in ("24 GB", "80 GB", "8x80 GB")]
FAST = {("qwen3-0.6b", "eagle3", "24 GB"), ("gemma-3", "27b-eagle3", "24 GB")}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each target, of its config.json alone."""
    root = tmp_path_factory.mktemp("targets")
    for path in TARGETS.glob("*.json"):
        (root / path.stem).mkdir()
        (root / path.stem / "config.json").write_text(path.read_text())
    return root


def target_of(recipe: Path) -> str:
    folder = recipe.parent.name
    return f"{folder}-{recipe.stem.split('-')[0]}" if folder == "gemma-3" else folder


@cache
def traced(path: Path, folder: Path, flags: tuple[str, ...]) -> tuple[TrainConfig, StepTrace, int]:
    arguments = ["--config", str(path), "--target.name", str(folder), *flags]
    options, config = parse_plan(["--plan", *arguments])
    trace = trace_step(config, read_model_config(str(folder)))
    return config, trace, shares(options, config)


def planned(path: Path, folder: Path, size: str, *more: str) -> MemoryPlan:
    """The prediction for one of the sizes in a recipe's head."""
    flags = dict(SIZES.findall(path.read_text()))[size].split()
    cards = 8 if size.startswith("8x") else 1
    if any(flag in ("tensor", "shard") for flag in flags):  # those need the number
        flags += ["--processes", str(cards)]
    config, trace, _ = traced(path, folder, (*flags, *more))
    plan = plan_memory(config, trace, cards)
    spread = config.target.device_map is not None
    return spill(plan, trace, card(size), config.target.reserve_gb) if spread else plan


def card(size: str) -> int:
    return int(re.findall(r"(\d+) GB", size)[0]) * 10**9


def case(path: Path, size: str) -> object:
    fast = (path.parent.name, path.stem, size) in FAST
    name = f"{path.parent.name}/{path.stem} on {size}"
    return pytest.param(path, size, id=name, marks=() if fast else pytest.mark.slow)


@pytest.mark.parametrize(("path", "size"), [case(*one) for one in CASES])
def test_a_recipe_fits_its_cards(path: Path, size: str, folders: Path) -> None:
    plan = planned(path, folders / target_of(path), size)
    assert 0.02 * card(size) < plan.total <= card(size), plan.parts


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_recipe_names_its_sizes_and_keeps_its_batch(path: Path, folders: Path) -> None:
    found = dict(SIZES.findall(path.read_text()))
    assert list(found) == ["24 GB", "80 GB", "8x80 GB"]
    tokens = set()
    for size, flags in found.items():
        cards = ["--processes", "8"] if size.startswith("8x") else []
        folder = folders / target_of(path)
        arguments = ["--config", str(path), "--target.name", str(folder), *flags.split()]
        _, config = parse_plan(["--plan", *arguments, *cards])
        tokens.add(config.run.batch_size * config.data.max_length)
    assert len(tokens) == 1  # a step trains on as much, whatever the card
    assert config.run.out.removeprefix("outputs/").split("/")[0] == target_of(path)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_recipe_that_has_its_prompts_answered_names_the_faster_way(path: Path) -> None:
    text = path.read_text()
    hint = "\n# Answers come faster from a server: --data.answer_server http://localhost:8000/v1\n"
    assert "regenerate: true" in text and hint in text


@pytest.mark.parametrize(
    ("name", "billions", "text_billions"),
    [
        ("qwen3-0.6b", 0.596, 0.596),
        ("qwen3-8b", 8.191, 8.191),
        ("llama-3.1-8b", 8.030, 8.030),
        ("gpt-oss-20b", 20.915, 20.915),
        ("gemma-3-4b", 4.300, 3.880),
        ("gemma-3-27b", 27.432, 27.009),
    ],
)
def test_targets_have_the_size_that_they_are_known_for(
    name: str, billions: float, text_billions: float, folders: Path
) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(read_model_config(str(folders / name)))
    text = getattr(model.model, "language_model", model)
    for module, known in ((model, billions), (text, text_billions)):
        count = sum(parameter.numel() for parameter in module.parameters())
        assert count / 1e9 == pytest.approx(known, abs=0.001)


def test_eight_billion_in_float32_do_not_fit_on_24_gb(folders: Path) -> None:
    path = ROOT / "recipes" / "qwen3-8b" / "eagle3.yaml"
    short = ("--data.max_length", "64", "--loss.steps", "1", "--loss.decay", "null")
    plan = planned(path, folders / "qwen3-8b", "24 GB", *short)
    assert plan.total < card("24 GB")
    wide = planned(path, folders / "qwen3-8b", "24 GB", *short, "--target.dtype", "float32")
    assert wide.host > 2 * plan.host, "twice the layers wait in main memory"
    alone = planned(path, folders / "qwen3-8b", "80 GB", *short, "--target.dtype", "float32")
    assert alone.total > card("24 GB") and alone.largest.startswith("target")
