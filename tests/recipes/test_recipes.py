"""Every recipe in the repository parses, and its options are those of its family."""

from pathlib import Path

import pytest
import yaml

from drafters import FAMILIES, TargetModel, build_drafter
from tests.tiny import tiny_target
from training.config import parse_config
from training.objectives import build_objective

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted(
    path
    for path in (ROOT / "recipes").rglob("*.yaml")
    if "launch" not in path.relative_to(ROOT).parts
)


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target()


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(ROOT / "recipes")))
def test_a_recipe_parses_and_builds(path: Path, target: TargetModel) -> None:
    config = parse_config(["--config", str(path)])
    assert config.run.out.startswith("outputs/")
    assert not [source for source in config.data.train if Path(source).is_absolute()]
    if config.data.regenerate and config.data.train[0].endswith(".jsonl"):  # not of the hub
        assert (ROOT / config.data.train[0]).is_file()
    if config.evaluate.prompts is not None:
        assert (ROOT / config.evaluate.prompts).is_file()
    fields = config.drafter.head_fields()
    if fields.get("draft_vocab_size") is not None:
        fields["draft_vocab_size"] = 40
    for name in ("feature_layers", "mask_token_id"):  # of the real target
        fields.pop(name, None)
    head = build_drafter(config.drafter.family, target, **fields)
    assert build_objective(head, config.loss).depths >= 1


def test_every_family_has_a_recipe_of_its_own_and_one_for_the_comparison() -> None:
    folder = ROOT / "recipes" / "smollm2-135m"
    for place in (folder, folder / "compare"):
        parsed = [yaml.safe_load(path.read_text()) for path in place.glob("*.yaml")]
        assert {config["drafter"]["type"] for config in parsed} == set(FAMILIES)


def test_recipes_name_their_own_output_folder() -> None:
    folder = ROOT / "recipes" / "smollm2-135m"
    outs = [yaml.safe_load(path.read_text())["run"]["out"] for path in folder.rglob("*.yaml")]
    assert len(set(outs)) == len(outs)


def test_native_modules_are_recipe_of_their_own() -> None:
    config = parse_config(["--config", str(ROOT / "recipes" / "native-mtp.yaml")])
    assert (config.drafter.family, config.drafter.init_from) == ("mtp", "native")
    assert config.loss.steps in (3, 4)
    assert config.loss.final == {"lk_hybrid": 1.0}
