"""EAGLE-3 for vLLM's native loader: other trainers' heads are read, faulty ones refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from drafters import TargetModel
from drafters.export import ExportError, check_as, dialect_of, read_as, read_head, write_as
from drafters.export.dialects.eagle3_vllm import VLLM
from tests.drafters.export.vllm_engine import IDS
from tests.drafters.export.written import Written, eagle3, logits
from tests.tiny import tiny_target


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target(dtype=torch.float32)


@pytest.fixture
def folder(target: TargetModel, tmp_path: Path) -> Written:
    write_as("vllm", eagle3(target, draft_vocab_size=40), tmp_path / "head")
    return Written(tmp_path / "head")


# Heads of other trainers --------------------------------------------------------------------------

MINIMAL = (
    "architectures",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_theta",
    "max_position_embeddings",
    "vocab_size",
    "draft_vocab_size",
    "model_type",
    IDS,
)


@pytest.mark.parametrize(
    "architecture", ["Eagle3LlamaForCausalLM", "LlamaForCausalLM", "LlamaForCausalLMEagle3"]
)
def test_a_minimal_config(target: TargetModel, folder: Written, architecture: str) -> None:
    wanted = logits(read_head(folder.path, target))
    folder.config = {key: folder.config[key] for key in MINIMAL}
    folder.config["architectures"] = [architecture]
    again = read_head(folder.save(foreign=True), target)
    assert dialect_of(folder.path) is VLLM
    assert torch.equal(logits(again), wanted)


def test_other_names_of_the_same_tensors(target: TargetModel, folder: Written) -> None:
    wanted = logits(read_head(folder.path, target))
    names = {"d2t": "draft_id_to_target_id", "lm_head.weight": "lm_head.weight"}
    folder.tensors = {
        names.get(name, f"model.{name.replace('layers.0.', 'midlayer.')}"): tensor
        for name, tensor in folder.tensors.items()
        if name != "t2d"
    }
    assert torch.equal(logits(read_as("vllm", folder.save(foreign=True), target)), wanted)


def test_a_normed_residual_with_sglang_s_names_is_vllm_s(
    target: TargetModel, tmp_path: Path
) -> None:
    head = eagle3(target, norm_before_residual=True)
    write_as("vllm", head, tmp_path / "head")
    folder = Written(tmp_path / "head")
    folder.tensors = {n.replace("layers.0.", "midlayer."): t for n, t in folder.tensors.items()}
    again = read_head(folder.save(foreign=True), target)
    assert again.config.norm_before_residual
    assert torch.equal(logits(again), logits(head))


def test_an_output_matrix_that_is_missing_is_the_target_s(
    target: TargetModel, tmp_path: Path
) -> None:
    head = eagle3(target)
    with torch.no_grad():
        head.lm_head.weight.copy_(target.lm_head.weight)
    write_as("vllm", head, tmp_path / "head")
    folder = Written(tmp_path / "head")
    del folder.tensors["lm_head.weight"]
    assert torch.equal(logits(read_head(folder.save(), target)), logits(head))


def test_nested_layer_ids_alone_are_outputs(target: TargetModel, folder: Written) -> None:
    del folder.config[IDS]
    assert read_head(folder.save(foreign=True), target).feature_layers == (1, 3, 5)
    folder.config["eagle_config"] = {}
    assert read_head(_saved(folder), target).feature_layers == (0, 3, 5)  # vLLM's, squeezed


def _saved(folder: Written) -> Path:
    (folder.path / "config.json").write_text(json.dumps(folder.config))
    return folder.path


# What an engine would not tell --------------------------------------------------------------------


def nest(**changes: Any) -> Callable[[Written], object]:
    return lambda folder: folder.config["eagle_config"].update(changes)


def put(**changes: Any) -> Callable[[Written], object]:
    return lambda folder: folder.config.update(changes)


def drop(name: str) -> Callable[[Written], object]:
    return lambda folder: folder.tensors.pop(name)


def turn(name: str) -> Callable[[Written], object]:
    return lambda folder: folder.tensors.update({name: folder.tensors[name].T})


FAULTS: dict[str, tuple[Callable[[Written], object], str]] = {
    "missing tensor": (drop("layers.0.hidden_norm.weight"), "missing tensor layers.0.hidden_norm"),
    "missing map": (drop("d2t"), "missing tensor d2t: draft_vocab_size is below vocab_size"),
    "transposed": (turn("fc.weight"), r"fc.weight has shape \[96, 32\].* its transpose"),
    "layer ids": (put(**{IDS: [0, 2, 4]}), "layer ids disagree: .* one higher"),
    "no layer ids": (put(**{IDS: []}), "must be a list of layer ids"),
    "unsorted": (put(**{IDS: [5, 3, 1]}), "must be increasing"),
    "number of layers": (put(num_aux_hidden_states=4), "num_aux_hidden_states is 4 for 3 layers"),
    "no features": (nest(use_aux_hidden_state=False), "use_aux_hidden_state must be true"),
    "switch twice": (nest(norm_before_fc=True), "norm_before_fc is False but eagle_config"),
    "switch without tensor": (
        lambda f: (put(norm_before_fc=True)(f), nest(norm_before_fc=True)(f)),
        "missing tensor input_norm.weight",
    ),
    "two norms": (
        lambda f: (put(norm_before_fc=True, fc_norm=True)(f), nest(norm_before_fc=True)(f)),
        "fc_norm and norm_before_fc are both set",
    ),
    "architecture": (
        put(architectures=["LlamaForCausalLMEagle"]),
        "architectures .* not supported",
    ),
    "class": (put(model_type="qwen3"), "architectures .* model_type 'qwen3'"),
    "bias": (put(attention_bias=True), "attention_bias must be False"),
    "mlp bias": (put(mlp_bias=True), "mlp_bias must be False"),
    "tied": (put(tie_word_embeddings=True), "tie_word_embeddings must be False"),
    "rope": (
        put(rope_parameters={"rope_type": "yarn", "rope_theta": 10000.0}),
        "rope_parameters: yarn RoPE needs a positive factor",
    ),
    "rope in one spelling": (
        put(rope_scaling={"rope_type": "linear", "factor": 2.0}),
        "rope_scaling .* and rope_parameters .* disagree",
    ),
    "rope of another kind": (
        put(rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
        "rope_scaling: 'dynamic' RoPE is not supported",
    ),
    "width": (put(target_hidden_size=64), "hidden_size 32 is not target_hidden_size 64"),
    "windows": (put(layer_types=["chunked_attention"]), "chunked_attention is not supported"),
    "window": (put(layer_types=["sliding_attention"]), "sliding_window must be at least 2"),
    "quantized": (put(quantization_config={"quant_method": "fp8"}), "quantized heads"),
    "positions": (put(max_position_embeddings=64), "max_position_embeddings is 64"),
    "vocabulary": (put(vocab_size=97), "vocab_size is 97 but the target has 96"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_named(target: TargetModel, folder: Written, name: str) -> None:
    change, message = FAULTS[name]
    change(folder)
    with pytest.raises(ExportError, match=message):
        check_as("vllm", folder.save(), target)
