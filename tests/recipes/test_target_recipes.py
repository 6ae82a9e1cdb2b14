"""The recipes for large targets: sized for their cards, by the prediction, without any weights.

``targets/`` holds what the targets' own config.json say.
"""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils.quantization_config import Mxfp4Config

from drafters import TargetModel
from recipes.dryrun import StepTrace, read_model_config, trace_step
from recipes.memory import MemoryPlan, plan_memory, spill
from recipes.plan import parse_plan, shares
from tests.zoo import zoo_target
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
    assert wide.host >= 2 * plan.host > 0, "twice the layers wait in main memory"
    alone = planned(path, folders / "qwen3-8b", "80 GB", *short, "--target.dtype", "float32")
    assert alone.total > card("24 GB") and alone.largest.startswith("target")


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """A tiny gpt-oss whose experts are in MXFP4, as they are released."""
    target = zoo_target("gpt_oss", torch.bfloat16, intermediate_size=32)
    target.model.save_pretrained(tmp_path)
    target.tokenizer.save_pretrained(tmp_path)
    file, settings = tmp_path / "model.safetensors", tmp_path / "config.json"
    weights = load_file(file)
    for name in [name for name in weights if name.endswith("experts.down_proj")]:
        for key in (name, name.replace("down_proj", "gate_up_proj")):
            experts, wide, out = weights.pop(key).shape
            blocks = torch.full((experts, out, wide // 32, 16), 0x42, dtype=torch.uint8)
            weights[f"{key}_blocks"] = blocks  # 1 and 2 in turn: the lower four bits come first
            weights[f"{key}_scales"] = torch.full(blocks.shape[:3], 127 - 2, dtype=torch.uint8)
    save_file(weights, file, {"format": "pt"})
    config = json.loads(settings.read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    settings.write_text(json.dumps(config))
    return tmp_path


def test_mxfp4_weights_become_ordinary_ones(
    packed: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    target = TargetModel.load(str(packed), torch.bfloat16)
    experts = target.model.get_submodule("model.layers.0.mlp.experts")
    assert experts.get_parameter("down_proj")[0, :4, 0].tolist() == [0.25, 0.5, 0.25, 0.5]
    assert {parameter.dtype for parameter in target.model.parameters()} == {torch.bfloat16}
    copied = tmp_path_factory.mktemp("copied")
    target.model.save_pretrained(copied)
    target.tokenizer.save_pretrained(copied)
    assert "quantization_config" not in json.loads((copied / "config.json").read_text())
    again = TargetModel.load(str(copied), torch.bfloat16)
    assert again.fingerprint()["weights"] == target.fingerprint()["weights"]


@pytest.mark.parametrize("method", ["mxfp4", "fp8", None])
def test_nothing_installed_decides_what_mxfp4_becomes(
    packed: Path, monkeypatch: pytest.MonkeyPatch, method: str | None
) -> None:
    """Only for a checkpoint that is packed so: for another one the argument would be an error."""
    settings = packed / "config.json"
    config = json.loads(settings.read_text())
    config["quantization_config"]["quant_method"] = method
    if method is None:
        del config["quantization_config"]
    settings.write_text(json.dumps(config))
    given: list[dict[str, Any]] = []

    def stop(name: str, **options: Any) -> None:
        given.append(options)
        raise OSError("far enough")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", stop)
    with pytest.raises(ValueError, match="far enough"):
        TargetModel.load(str(packed), torch.bfloat16)
    (options,) = given
    if method == "mxfp4":
        assert isinstance(options["quantization_config"], Mxfp4Config)
        assert options["quantization_config"].dequantize
    else:
        assert "quantization_config" not in options
