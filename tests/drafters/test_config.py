"""Every refusal of a configuration names the field that is wrong."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from drafters import FAMILIES, Eagle3Config, MedusaConfig, build_drafter
from drafters.config import DrafterConfig, check_feature_layers, default_feature_layers
from drafters.families import (
    DFlashConfig,
    DSparkConfig,
    Eagle1Config,
    HydraConfig,
    MtpConfig,
    PEagleConfig,
)
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
        ({"confidence_at": 0.0}, "confidence_at"),
        ({"draft_temperature": 0.0}, "draft_temperature"),
        ({"tree": []}, "tree"),
        ({"tree": [[]]}, "tree"),
        ({"tree": [[0], []]}, "tree"),
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
        ({"num_layers": 0}, "num_layers must be at least 1"),
        ({"num_layers": -1}, "num_layers"),
        ({"sliding_window": 1}, "sliding_window must be at least 2"),
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
        ({"num_heads": 2, "tree": [[0], [0, 0, 0]]}, "tree"),
        ({"tree": [[]]}, "tree"),
    ],
)
def test_medusa_fields(options: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        MedusaConfig(**MEDUSA | options)


@pytest.mark.parametrize(
    ("config", "options", "named"),
    [
        (HydraConfig, {"num_heads": 0}, "num_heads"),
        (HydraConfig, {"mlp_layers": 0}, "mlp_layers"),
        (HydraConfig, {"num_layers": 2}, "num_layers: Hydra has 0 or 1"),
        (HydraConfig, {"num_heads": 2, "tree": [[0], [0, 0], [0, 0, 0]]}, "num_heads=2"),
        (HydraConfig, {"num_layers": 1, "head_dim": 7}, "head_dim must be even"),
        (Eagle1Config, {"intermediate_size": 0}, "intermediate_size"),
        (Eagle1Config, {"sliding_window": 0}, "sliding_window"),
        (MtpConfig, {"num_modules": 0}, "num_modules"),
        (MtpConfig, {"num_layers": 0}, "num_layers"),
        (MtpConfig, {"num_modules": 2, "tree": [[0, 0, 0]]}, "num_modules=2"),
        (PEagleConfig, {"num_drafts": 0}, "num_drafts"),
        (PEagleConfig, {"num_drafts": 2, "tree": [[0, 0, 0]]}, "num_drafts=2"),
        (PEagleConfig, {"norm_output": True}, "norm_output"),
        (PEagleConfig, {"feature_layers": [3, 2]}, "feature_layers"),
        (DFlashConfig, {}, r"mask_token_id must lie in 0\.\.95, got None"),
        (DFlashConfig, {"mask_token_id": 96}, "mask_token_id"),
        (DFlashConfig, {"mask_token_id": 3, "block_size": 1}, "block_size 1"),
        (DFlashConfig, {"mask_token_id": 3, "block_size": 3, "tree": [[0, 0, 0]]}, "num_drafts=2"),
        (DFlashConfig, {"mask_token_id": 3, "num_layers": 0}, "num_layers"),
        (DSparkConfig, {"mask_token_id": 3, "markov_type": "lstm"}, "markov_type 'lstm'"),
        (DSparkConfig, {"mask_token_id": 3, "markov_rank": 0}, "markov_rank"),
        (DSparkConfig, {"mask_token_id": 3, "block_size": 2, "tree": [[0, 0, 0]]}, "num_drafts=2"),
    ],
)
def test_fields_of_the_other_families(
    config: type[DrafterConfig], options: dict, named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        config(**EAGLE3 | options)


def test_trees_as_deep_as_the_head_are_accepted() -> None:
    """Negative control, for every family with a depth of its own; a recursive head has none."""
    mask = {"mask_token_id": 3}
    for config, options, deepest in (
        (HydraConfig, {"num_heads": 3}, 3),
        (MtpConfig, {"num_modules": 3}, 3),
        (MtpConfig, {}, 9),
        (PEagleConfig, {"num_drafts": 3}, 3),
        (DFlashConfig, mask | {"block_size": 4}, 3),
        (DSparkConfig, mask | {"block_size": 3}, 3),
        (Eagle1Config, {}, 9),
    ):
        tree = [[0] * depth for depth in range(1, deepest + 1)]
        assert config(**EAGLE3 | options | {"tree": tree}).tree == tree


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
    assert MedusaConfig(**MEDUSA, shared_lm_head=True, draft_vocab_size=40).reduced_vocab


@pytest.mark.parametrize(
    "config", [DrafterConfig, *(drafter.config_class for drafter in FAMILIES.values())]
)
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


OPTIONS: dict[str, dict[str, Any]] = {
    "medusa": {"num_heads": 2, "tree": [[0], [1], [0, 0]]},
    "hydra": {"num_heads": 2, "mlp_layers": 3, "num_layers": 1, "shared_lm_head": True},
    "eagle1": {"fc_bias": True, "num_layers": 2, "tree": [[0], [0, 0]]},
    "eagle3": {
        "fc_norm": True,
        "feature_layers": [1, 2],
        "draft_vocab_size": 40,
        "qk_norm": True,
        "sliding_window": 7,
        "num_layers": 2,
    },
    "mtp": {"num_modules": 2, "hidden_first": True, "norm_output": False},
    "peagle": {"num_drafts": 3, "feature_layers": [0, 4]},
    "dflash": {
        "block_size": 5,
        "mask_token_id": 90,
        "sliding_window": 9,
        "window_layers": [0, 2],
        "causal_layers": [2],
    },
    "dspark": {"markov_rank": 3, "markov_type": "rnn", "block_size": 4, "markov_bias": True},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_configuration_survives_a_file(tmp_path: Path, family: str) -> None:
    target = tiny_target()
    options: dict[str, Any] = {"confidence_head": True, "confidence_temperatures": [1.5, 0.5]}
    options |= OPTIONS[family]
    config = build_drafter(family, target, **options).config
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is type(config)
    fields = loaded.own_fields()
    assert fields == config.own_fields()
    assert {key: fields[key] for key in options} == options
    assert fields["target_fingerprint"] == target.fingerprint()
    assert (fields["hidden_size"], fields["vocab_size"], fields["target_num_layers"]) == (32, 96, 6)
