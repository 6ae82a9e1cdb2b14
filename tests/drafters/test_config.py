"""Every refusal of a configuration names the field that is wrong."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from drafters import Eagle3Config, MedusaConfig, build_drafter
from drafters.config import DrafterConfig, check_feature_layers, default_feature_layers
from tests.tiny import tiny_target

EAGLE3: dict[str, Any] = {
    "hidden_size": 32,
    "vocab_size": 96,
    "target_num_layers": 12,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
MEDUSA: dict[str, Any] = {"hidden_size": 32, "vocab_size": 96, "target_num_layers": 12}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"draft_vocab_size": 97}, r"draft_vocab_size \(97\)"),
        ({"draft_vocab_size": 0}, "draft_vocab_size"),
        ({"draft_vocab_size": -3}, "draft_vocab_size"),
        ({"confidence_rule": "argmax"}, "confidence_rule 'argmax'"),
        ({"confidence_temperatures": [1.0, 0.0]}, "confidence_temperatures"),
        ({"confidence_temperatures": [-1.0]}, "confidence_temperatures"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"vocab_size": 0}, "vocab_size"),
    ],
)
@pytest.mark.parametrize("family", ["eagle3", "medusa"])
def test_common_fields(family: str, options: dict, named: str) -> None:
    base, config = (EAGLE3, Eagle3Config) if family == "eagle3" else (MEDUSA, MedusaConfig)
    with pytest.raises(ValueError, match=named):
        config(**base | options)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"intermediate_size": 0}, "intermediate_size"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"head_dim": 0}, "head_dim"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads \(3\) must divide"),
        ({"feature_layers": []}, "feature_layers"),
        ({"feature_layers": [3, 3, 5]}, "feature_layers"),
        ({"feature_layers": [5, 3, 1]}, "feature_layers"),
        ({"feature_layers": [-1, 3, 5]}, "feature_layers"),
        ({"feature_layers": [2, 6, 12]}, r"feature_layers .*0\.\.11"),
    ],
)
def test_eagle3_fields(options: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Eagle3Config(**EAGLE3 | options)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_heads": 0}, "num_heads"),
        ({"num_layers": 0}, "num_layers"),
        ({"shared_lm_head": True, "draft_vocab_size": 40}, "shared_lm_head"),
        ({"num_heads": 2, "tree": [[0], [0, 0, 0]]}, "tree"),
        ({"tree": [[]]}, "tree"),
    ],
)
def test_medusa_fields(options: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        MedusaConfig(**MEDUSA | options)


def test_good_configurations_are_accepted() -> None:
    """Negative control: the bases used above are refused by nothing."""
    config = Eagle3Config(**EAGLE3)
    assert config.feature_layers == [2, 6, 9]
    assert (config.draft_vocab_size, config.reduced_vocab) == (96, False)
    assert Eagle3Config(**EAGLE3 | {"draft_vocab_size": 40}).reduced_vocab
    assert Eagle3Config(**EAGLE3 | {"feature_layers": [0, 11]}).feature_layers == [0, 11]
    config = MedusaConfig(**MEDUSA, shared_lm_head=True, num_heads=2, tree=[[0], [0, 1]])
    assert (config.num_heads, config.num_layers, config.reduced_vocab) == (2, 1, False)
    MedusaConfig(**MEDUSA, shared_lm_head=True, draft_vocab_size=96)


@pytest.mark.parametrize("config", [Eagle3Config, MedusaConfig, DrafterConfig])
def test_empty_configuration_exists(config: type[DrafterConfig]) -> None:
    """transformers builds one to compare against when it saves."""
    assert config().hidden_size == 0


@pytest.mark.parametrize(
    ("layers", "chosen"),
    [
        (32, [2, 16, 29]),
        (30, [2, 15, 27]),
        (12, [2, 6, 9]),
        (8, [2, 4, 5]),
        (7, [2, 3, 4]),
        (6, [0, 3, 5]),
        (4, [0, 2, 3]),
        (3, [0, 1, 2]),
    ],
)
def test_default_feature_layers(layers: int, chosen: list[int]) -> None:
    """EAGLE-3's [2, n//2, n-3] where that is three layers, spread out where it is not."""
    assert default_feature_layers(layers) == chosen
    check_feature_layers(chosen, layers)


def test_target_with_too_few_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="only 2"):
        default_feature_layers(2)
    with pytest.raises(ValueError, match="only 2"):
        build_drafter("eagle3", tiny_target(layers=2))


@pytest.mark.parametrize("family", ["eagle3", "medusa"])
def test_configuration_survives_a_file(tmp_path: Path, family: str) -> None:
    target = tiny_target()
    options: dict[str, Any] = {"confidence_head": True, "confidence_temperatures": [1.5, 0.5]}
    if family == "eagle3":
        options |= {"fc_norm": True, "feature_layers": [1, 2], "draft_vocab_size": 40}
    else:
        options |= {"num_heads": 2, "tree": [[0], [1], [0, 0]]}
    config = build_drafter(family, target, **options).config
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is type(config)
    fields = loaded.own_fields()
    assert fields == config.own_fields()
    assert {key: fields[key] for key in options} == options
    assert fields["target_fingerprint"] == target.fingerprint()
    assert (fields["hidden_size"], fields["vocab_size"], fields["target_num_layers"]) == (32, 96, 6)
