"""Keys that engines have other defaults for are always in config.json, and none may be missing."""

import json
from pathlib import Path

import pytest
import torch

from drafters import TargetModel
from drafters.export import DIALECTS, dialect_named
from drafters.export.dialects.speculators import Speculators
from tests.drafters.export.every_dialect import (
    BLOCKS,
    EAGLE1,
    EAGLE3,
    MEDUSA,
    SPECULATORS,
    write_all,
)
from tests.tiny import tiny_target

ROPE = {"rope_theta", "rope_parameters", "rope_scaling", "max_position_embeddings"}
NORMS = {"fc_norm", "norm_output", "norm_before_fc"}
CAUSAL = {True: {"sliding_window_non_causal"}, False: {"is_causal"}}
ALWAYS: dict[str, set[str]] = {
    **{name: ROPE for name in set(DIALECTS) - MEDUSA},
    **{name: {*ROPE, "tie_word_embeddings"} for name in {*EAGLE1, "speculators-mtp"}},
    **{name: {*ROPE, *NORMS, "tie_word_embeddings", "layer_ids"} for name in EAGLE3},
    **{
        name: {*ROPE, *CAUSAL[name in SPECULATORS], "tie_word_embeddings", "layer_ids"}
        for name in BLOCKS
    },
}


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target(torch.float32)


@pytest.fixture(scope="module")
def wholes(target: TargetModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_all(target, tmp_path_factory.mktemp("wholes"))


@pytest.mark.parametrize("name", sorted(ALWAYS))
def test_what_engines_have_other_defaults_for_is_always_written(
    name: str, wholes: dict[str, Path]
) -> None:
    config = json.loads((wholes[name] / "config.json").read_text())
    said = {key for part in (config, *config.values()) if isinstance(part, dict) for key in part}
    missing = {word for word in ALWAYS[name] if not any(key.endswith(word) for key in said)}
    assert missing == set()


@pytest.mark.parametrize("name", DIALECTS)
def test_no_key_may_be_missing(name: str, wholes: dict[str, Path], target: TargetModel) -> None:
    """Nor any of a nested config."""
    dialect = dialect_named(name)
    config = json.loads((wholes[name] / "config.json").read_text())
    dialect.check_config(config, target)
    layers = dialect.layer_specs if isinstance(dialect, Speculators) else ()
    places = [(config, spec) for spec in dialect.keys]
    places += [(config["transformer_layer_config"], spec) for spec in layers]
    assert places
    for part, spec in places:
        if not spec.optional:
            value = part.pop(spec.name)
            with pytest.raises(ValueError, match=f"key {spec.name} is missing"):
                dialect.check_config(config, target)
            part[spec.name] = value
