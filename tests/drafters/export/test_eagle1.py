"""EAGLE-1's two forms: what is written, and what their engines compute with it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from drafters import TargetModel
from drafters.export import (
    ExportError,
    dialect_of,
    golden_difference,
    golden_inputs,
    read_as,
    read_head,
    write_as,
)
from drafters.export.reading import check_folder
from drafters.layers import repeat_heads, rotate
from tests.drafters.export.eagle1_heads import FORMS, eagle, written
from tests.drafters.export.written import Written, assert_same, engine_parameters, logits
from tests.tiny import tiny_target

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two layers": {"num_layers": 2},
    "biased": {"fc_bias": True},
}
ARCHITECTURES = {"eagle1": "LlamaForCausalLM", "eagle1-sglang": "LlamaForCausalLMEagle"}
LAYER = {
    "layers.0.self_attn.q_proj.weight": [32, 32],
    "layers.0.self_attn.k_proj.weight": [16, 32],
    "layers.0.self_attn.v_proj.weight": [16, 32],
    "layers.0.self_attn.o_proj.weight": [32, 32],
    "layers.0.mlp.gate_proj.weight": [48, 32],
    "layers.0.mlp.up_proj.weight": [48, 32],
    "layers.0.mlp.down_proj.weight": [32, 48],
    "layers.0.post_attention_layernorm.weight": [32],
}


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target(dtype=torch.float32)


# What is written ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_a_head_comes_back_the_same(
    name: str, options: dict[str, Any], target: TargetModel, tmp_path: Path
) -> None:
    head = eagle(target, **options)
    write_as(name, head, tmp_path / "head")
    assert_same(read_head(tmp_path / "head", target), head)
    Written(tmp_path / "head").save(foreign=True)
    assert dialect_of(tmp_path / "head").name == name
    assert_same(read_head(tmp_path / "head", target), head)


@pytest.mark.parametrize("name", FORMS)
def test_names_and_keys(name: str, target: TargetModel, tmp_path: Path) -> None:
    found = written(name, target, tmp_path / "head", num_layers=2)
    second = {key.replace("layers.0", "layers.1"): shape for key, shape in LAYER.items()}
    second["layers.1.input_layernorm.weight"] = [32]
    of_form = {"eagle1": {"embed_tokens.weight": [96, 32]}, "eagle1-sglang": {"fc.bias": [32]}}
    assert found.shapes == {"fc.weight": [32, 64], **LAYER, **second, **of_form[name]}
    assert found.config == {
        "architectures": [ARCHITECTURES[name]],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "num_hidden_layers": 2,
        "vocab_size": 96,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "hidden_act": "silu",
        "attention_bias": False,
        "qkv_bias": False,
        "bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    }


def test_no_bias_is_zeros_for_sglang_and_absent_for_the_others(
    target: TargetModel, tmp_path: Path
) -> None:
    for options, bias in (({}, False), ({"fc_bias": True}, True)):
        ours = written("eagle1", target, tmp_path / f"a{bias}", **options)
        theirs = written("eagle1-sglang", target, tmp_path / f"b{bias}", **options)
        assert ours.config["bias"] == bias == ("fc.bias" in ours.tensors)
        assert theirs.config["bias"] is False  # SGLang would give it to the attention
        assert theirs.tensors["fc.bias"].any() == bias


def test_what_serves_it_is_said(target: TargetModel, tmp_path: Path) -> None:
    export = write_as("eagle1", eagle(target, fc_bias=True, confidence_head=True), tmp_path / "a")
    assert export.served == ("eagle",)
    said = " ".join(export.notes)
    assert "vLLM leaves out without a word" in said and "confidence output is left out" in said
    assert write_as("eagle1", eagle(target), tmp_path / "b").served == ("vllm", "eagle")
    assert write_as("eagle1-sglang", eagle(target), tmp_path / "c").served == ("sglang",)
    wide = eagle(target, head_dim=16)
    assert "no head_dim but" in " ".join(write_as("eagle1", wide, tmp_path / "d").notes)


@pytest.mark.parametrize("name", FORMS)
def test_a_draft_vocabulary_is_left_out(name: str, target: TargetModel, tmp_path: Path) -> None:
    """No engine has a place for it; the weights do not depend on it."""
    head = eagle(target, draft_vocab_size=40, confidence_head=True)
    export = write_as(name, head, tmp_path / "head")
    again = read_head(tmp_path / "head", target)
    assert export.left_out[-1] == "draft_vocab" and "40 tokens" in " ".join(export.notes)
    assert ("--speculative-token-map" in " ".join(export.notes)) == (name == "eagle1-sglang")
    assert again.draft_vocab is None and logits(again).shape[-1] == 96
    assert golden_difference(head, again) == export.difference < 1e-4
    assert torch.equal(again.fc.weight, head.fc.weight)


def test_embeddings(target: TargetModel, tmp_path: Path) -> None:
    head = eagle(target)
    write_as("eagle1-sglang", head, tmp_path / "a", with_embeddings=True)
    assert torch.equal(
        Written(tmp_path / "a").tensors["embed_tokens.weight"], target.embedding.weight
    )
    with pytest.raises(ExportError, match="eagle1 files always hold"):
        write_as("eagle1", head, tmp_path / "b", with_embeddings=True)
    found = Written(tmp_path / "a")
    found.tensors["embed_tokens.weight"][0] += 1
    with pytest.raises(ExportError, match="not the embedding of 'tiny'"):
        read_head(found.save(foreign=True), target)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"qk_norm": True}, "qk_norm=True"), ({"sliding_window": 8}, "sliding_window=8")],
)
def test_other_layers_are_refused(
    target: TargetModel, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    for name in FORMS:
        with pytest.raises(ExportError, match=message):
            written(name, target, tmp_path / "head", **options)


def test_half_precision(target: TargetModel, tmp_path: Path) -> None:
    for name in FORMS:
        head = eagle(target).bfloat16()
        write_as(name, head, tmp_path / name)
        assert torch.equal(logits(read_as(name, tmp_path / name, target)), logits(head))


# What engines compute -----------------------------------------------------------------------------


def engine_logits(
    engine: dict[str, Tensor], config: dict[str, Any], target: TargetModel, biased: bool
) -> Tensor:
    """The golden chain of one layer as SGLang (which adds a bias) and vLLM compute it."""
    layer = {k.removeprefix("model.layers.0."): v for k, v in engine.items()}
    heads, kv, size = (
        config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    theta = config["rope_parameters"]["rope_theta"]
    inputs = golden_inputs(eagle(target))
    hidden, tokens = inputs["features"], inputs["token_ids"]
    keys, values, out = torch.zeros(0), torch.zeros(0), []
    for start, end in ((0, 6), (6, 7), (7, 8)):
        embeds = target.embedding.weight[tokens[start:end]]
        x = torch.cat((embeds, hidden), dim=-1) @ engine["model.fc.weight"].T
        x = x + engine["model.fc.bias"] if biased else x
        qkv = x @ layer["self_attn.qkv_proj.weight"].T  # no norm before
        qkv = qkv + layer.get("self_attn.qkv_proj.bias", torch.zeros(1))
        parts = qkv.split([heads * size, kv * size, kv * size], dim=-1)
        q, k, v = (part.view(1, end - start, -1, size).transpose(1, 2) for part in parts)
        where = torch.arange(start, end)[None]
        q, k = rotate(q, where, theta), rotate(k, where, theta)
        keys = torch.cat([keys, k], dim=2) if start else k
        values = torch.cat([values, v], dim=2) if start else v
        scores = q @ repeat_heads(keys, heads // kv).transpose(2, 3) / size**0.5
        hide = torch.arange(end)[None] > torch.arange(start, end)[:, None]
        mixed = scores.masked_fill(hide, -torch.inf).softmax(-1) @ repeat_heads(values, heads // kv)
        x = x + mixed.transpose(1, 2).reshape(end - start, -1) @ layer["self_attn.o_proj.weight"].T
        scale = layer["post_attention_layernorm.weight"]
        normed = rms_norm(x, scale.shape, scale, config["rms_norm_eps"])
        gate, up = (normed @ layer["mlp.gate_up_proj.weight"].T).chunk(2, dim=-1)
        x = x + (silu(gate) * up) @ layer["mlp.down_proj.weight"].T
        out.append(target.lm_head.weight @ x[-1])
        hidden = x[-1:]
    return torch.stack(out)


@pytest.mark.parametrize(
    ("name", "options", "biased"),
    [
        ("eagle1", {}, False),
        ("eagle1", {"attention_bias": True}, False),
        ("eagle1-sglang", {}, True),
        ("eagle1-sglang", {"fc_bias": True}, True),
    ],
)
def test_an_engine_computes_the_same_logits(
    name: str, options: dict[str, Any], biased: bool, target: TargetModel, tmp_path: Path
) -> None:
    head = eagle(target, **options)
    write_as(name, head, tmp_path / "head")
    tensors = check_folder(tmp_path / "head", target, FORMS[name])
    config = Written(tmp_path / "head").config
    engine = engine_parameters(FORMS[name], config, tensors)
    found = engine_logits(engine, config, target, biased)
    torch.testing.assert_close(found, logits(head), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_both_forms_hold_the_same_head(
    options: dict[str, Any], target: TargetModel, tmp_path: Path
) -> None:
    head = eagle(target, **options)
    write_as("eagle1", head, tmp_path / "a")
    write_as("eagle1-sglang", read_head(tmp_path / "a", target), tmp_path / "b")
    write_as("eagle1", read_head(tmp_path / "b", target), tmp_path / "c")
    for name in ("a", "b", "c"):
        assert_same(read_head(tmp_path / name, target), head)
