"""EAGLE-3 for ModelOpt and TensorRT-LLM: names on ModelOpt's list, switches where each looks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from drafters import TargetModel
from drafters.export import ExportError, check_as, dialect_of, read_as, read_head, write_as
from drafters.export.dialects.modelopt import MODELOPT
from drafters.export.reading import check_folder
from tests.drafters.export.vllm_engine import IDS, VllmEngine, chain
from tests.drafters.export.written import Written, eagle3, engine_parameters, logits
from tests.tiny import tiny_target

ALLOWED = {
    *(f"layers.0.self_attn.{name}_proj" for name in "qkvo"),
    *(f"layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")),
    *(f"layers.0.{name}" for name in ("hidden_norm", "input_layernorm")),
    *("layers.0.post_attention_layernorm", "norm", "fc", "d2t", "lm_head"),
}
"""Of ModelOpt 0.47's exporter, without their last part."""
VARIANTS: dict[str, dict[str, Any]] = {
    "whole vocabulary": {},
    "reduced vocabulary": {"draft_vocab_size": 40},
    "normed output": {"norm_output": True, "draft_vocab_size": 40},
    "normed fusion": {"norm_before_fc": True},
    "normed features": {"fc_norm": True, "feature_layers": [1, 2, 4, 5]},
}


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target(dtype=torch.float32)


@pytest.fixture
def folder(target: TargetModel, tmp_path: Path) -> Written:
    write_as("modelopt", eagle3(target, draft_vocab_size=40), tmp_path / "head")
    return Written(tmp_path / "head")


@pytest.mark.parametrize("name", VARIANTS)
def test_a_head_comes_back_and_engines_compute_the_same(
    target: TargetModel, tmp_path: Path, name: str
) -> None:
    head = eagle3(target, **VARIANTS[name])
    write_as("modelopt", head, tmp_path / "head")
    (tmp_path / "head" / "export.json").unlink()
    assert dialect_of(tmp_path / "head") is MODELOPT
    again = read_as("modelopt", tmp_path / "head", target)
    assert again.state_dict().keys() == head.state_dict().keys()
    for key, tensor in head.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor), key
    kept = {"target_name", "target_fingerprint", "reference"}
    wanted = {k: v for k, v in head.config.own_fields().items() if k not in kept}
    assert {k: v for k, v in again.config.own_fields().items() if k not in kept} == wanted

    config = Written(tmp_path / "head").config
    tensors = check_folder(tmp_path / "head", target, MODELOPT)
    parameters = engine_parameters(MODELOPT, config, tensors)
    engine = VllmEngine(parameters, config, target.embedding.get_parameter("weight").detach())
    torch.testing.assert_close(chain(engine), logits(head), rtol=1e-4, atol=1e-4)


def test_what_is_written(target: TargetModel, folder: Written) -> None:
    tensors = load_file(folder.path / "model.safetensors")
    assert {name.removesuffix(".weight") for name in tensors} == ALLOWED
    assert list(tensors["fc.weight"].shape) == [32, 96]
    assert list(tensors["layers.0.self_attn.q_proj.weight"].shape) == [32, 64]
    assert (tensors["d2t"].dtype, len(tensors["d2t"])) == (torch.int64, 40)
    assert folder.config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert folder.config[IDS] == [1, 3, 5]
    assert folder.config["eagle_config"] == {
        IDS: [0, 2, 4],
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
        "parallel_draft_heads_num_layers": 1,
        "norm_before_fc": False,
        "return_hidden_post_norm": False,
    }


def test_engines_and_notes(target: TargetModel, tmp_path: Path) -> None:
    export = write_as("modelopt", eagle3(target), tmp_path / "head")
    assert export.served == ("tensorrt-llm", "vllm")
    assert "eagle3_layers_to_capture: [0, 2, 4]" in export.notes[0]
    default = write_as("modelopt", eagle3(target, feature_layers=[0, 3, 5]), tmp_path / "other")
    assert not any("eagle3_layers_to_capture" in note for note in default.notes)


@pytest.mark.parametrize(
    "options",
    [
        {"num_layers": 2},
        {"qk_norm": True},
        {"sliding_window": 8},
        {"norm_before_residual": True},
        {"own_embedding": True},
        {"feature_layers": [4]},
    ],
)
def test_what_tensorrt_llm_does_not_have_is_refused(
    target: TargetModel, tmp_path: Path, options: dict[str, Any]
) -> None:
    with pytest.raises(ExportError, match=next(iter(options))):
        write_as("modelopt", eagle3(target, **options), tmp_path / "head")


def test_a_config_as_modelopt_writes_it(target: TargetModel, folder: Written) -> None:
    """Layer ids only nested, RoPE in its spelling, no switches."""
    wanted = logits(read_head(folder.path, target))
    ours = (IDS, "num_aux_hidden_states", "target_hidden_size", "layer_types", "sliding_window")
    switches = ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual")
    for key in (*ours, *switches, "rope_parameters"):
        del folder.config[key]
    for key in ("norm_before_fc", "return_hidden_post_norm"):
        del folder.config["eagle_config"][key]
    folder.config |= {
        "rope_scaling": {"rope_type": "default", "rope_theta": 10000.0},
        "attention_dropout": 0.0,
        "initializer_range": 0.01,
        "use_cache": True,
        "pretraining_tp": None,
    }
    again = read_head(folder.save(foreign=True), target)
    assert dialect_of(folder.path) is MODELOPT
    assert torch.equal(logits(again), wanted)


def test_the_normed_output_by_its_nested_name(target: TargetModel, tmp_path: Path) -> None:
    head = eagle3(target, norm_output=True)
    write_as("modelopt", head, tmp_path / "head")
    folder = Written(tmp_path / "head")
    del folder.config["norm_output"]
    again = read_head(folder.save(foreign=True), target)
    assert again.config.norm_output and torch.equal(logits(again), logits(head))


@pytest.mark.parametrize(
    ("nested", "message"),
    [
        ({"parallel_draft_step": 4}, "eagle_config.parallel_draft_step must be 1, got 4"),
        ({"use_last_layernorm": False}, "eagle_config.use_last_layernorm must be True"),
        ({"eh_proj_before_attn": True}, "eh_proj_before_attn is not supported"),
        ({"return_hidden_post_norm": True}, "norm_output is False but .*post_norm is True"),
        ({IDS: [1, 3, 5]}, "layer ids disagree"),
    ],
)
def test_faults_of_the_nested_config(
    target: TargetModel, folder: Written, nested: dict[str, Any], message: str
) -> None:
    folder.config["eagle_config"] |= nested
    with pytest.raises(ExportError, match=message):
        check_as("modelopt", folder.save(), target)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("parallel_draft_heads.0.medusa_layers.0.linear.weight", "parallel heads"),
        ("layers.0.self_attn.kv_a_proj_with_mqa.weight", "MLA layers"),
        ("embed_tokens.weight", "unknown tensor embed_tokens.weight"),
        ("layers.0.self_attn.q_proj.weight_scale", "unknown tensor .*weight_scale"),
    ],
)
def test_foreign_tensors_are_named(
    target: TargetModel, folder: Written, name: str, message: str
) -> None:
    folder.tensors[name] = torch.ones(2, 2)
    with pytest.raises(ExportError, match=message):
        check_as("modelopt", folder.save(), target)
