"""EAGLE-1's two forms: what is written, what is read, what their engines compute with it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from drafters import Eagle1Drafter, TargetModel
from drafters.export import (
    ExportError,
    dialect_of,
    golden_difference,
    golden_inputs,
    read_as,
    read_head,
    write_as,
)
from drafters.export.dialects.eagle1 import EAGLE1
from drafters.export.dialects.eagle1_sglang import SGLANG_EAGLE1
from drafters.export.dialects.sglang import engine_parameters
from drafters.export.reading import check_folder
from drafters.layers import repeat_heads, rotate
from tests.drafters.export.written import Written, assert_same, logits, make_head
from tests.tiny import tiny_target

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two layers": {"num_layers": 2},
    "biased": {"fc_bias": True},
}
QWEN2 = {"attention_bias": True, "num_layers": 2}
FORMS = {"eagle1": EAGLE1, "eagle1-sglang": SGLANG_EAGLE1}
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


def eagle(target: TargetModel, **options: Any) -> Eagle1Drafter:
    head = make_head("eagle1", target, **options)
    assert isinstance(head, Eagle1Drafter)
    return head


def written(name: str, target: TargetModel, folder: Path, **options: Any) -> Written:
    write_as(name, eagle(target, **options), folder)
    return Written(folder)


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
    assert golden_difference(head, again) < 1e-4
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


# Heads of other trainers --------------------------------------------------------------------------

PUBLISHED = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": 96,
    "torch_dtype": "float16",
}


def published(target: TargetModel, folder: Path, **options: Any) -> tuple[Eagle1Drafter, Written]:
    """A head and its folder as another trainer might have left it."""
    head = eagle(target, max_position_embeddings=2048, **options)
    write_as("eagle1", head, folder)
    found = Written(folder)
    found.config = dict(PUBLISHED)
    return head, found


@pytest.mark.parametrize("bias", [None, True])
def test_the_authors_file(bias: bool | None, target: TargetModel, tmp_path: Path) -> None:
    """A pickle with rotary tables in it; without the key ``bias`` the file tells."""
    head, folder = published(target, tmp_path / "head", fc_bias=True)
    folder.tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    folder.config |= {} if bias is None else {"bias": bias}
    folder.save("pytorch_model.bin", foreign=True)
    assert_same(read_head(tmp_path / "head", target), head)


def test_no_bias_and_no_key(target: TargetModel, tmp_path: Path) -> None:
    head, folder = published(target, tmp_path / "head")
    assert_same(read_head(folder.save(foreign=True), target), head)


@pytest.mark.parametrize("bias", [False, True])
def test_the_wrapper_of_older_vllm(bias: bool, target: TargetModel, tmp_path: Path) -> None:
    head, folder = published(target, tmp_path / "head", fc_bias=bias)
    folder.tensors["lm_head.weight"] = target.lm_head.weight.detach().clone()
    inner = {**PUBLISHED, "eagle_fc_bias": bias} if bias else PUBLISHED
    folder.config = {"model_type": "eagle", "model": inner}
    assert_same(read_head(folder.save(foreign=True), target), head)
    folder.tensors["lm_head.weight"][3] += 1
    folder.save()
    with pytest.raises(ExportError, match=r"lm_head.weight is not the output matrix of 'tiny'"):
        read_head(tmp_path / "head", target)


@pytest.mark.parametrize("cut", [False, True])
def test_the_wrapper_with_a_map(cut: bool, target: TargetModel, tmp_path: Path) -> None:
    head = eagle(target, draft_vocab_size=40, max_position_embeddings=2048)
    write_as("eagle1", head, tmp_path / "head")
    folder, matrix = Written(tmp_path / "head"), target.lm_head.weight.detach()
    folder.tensors["token_map"] = head.draft_vocab.flip(0)
    folder.tensors["lm_head.weight"] = matrix[head.draft_vocab.flip(0)] if cut else matrix
    folder.config = {
        "architectures": ["EAGLEModel"],
        "model_type": "eagle",
        "model": PUBLISHED,
        "truncated_vocab_size": 40,
    }
    assert_same(read_head(folder.save(foreign=True), target), head)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qkv_bias": True}, r"missing tensor layers\.0\.self_attn\.q_proj\.bias"),
        ({"mlp_bias": True}, "mlp_bias=True is not supported"),
        ({"attention_bias": True}, "attention_bias must be False"),
        ({"add_para_norm": True}, "add_para_norm=True is not supported"),
        ({"skip_prenorm": False}, "skip_prenorm=False is not supported"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear' RoPE"),
        ({"vocab_size": 97}, "vocab_size is 97 but the target has 96"),
        ({"architectures": ["MixtralForCausalLM"]}, "architectures must be"),
    ],
)
def test_a_head_of_another_kind_is_refused(
    changes: dict[str, Any], message: str, target: TargetModel, tmp_path: Path
) -> None:
    _, folder = published(target, tmp_path / "head")
    folder.config |= changes
    with pytest.raises(ExportError, match=message):
        read_head(folder.save(foreign=True), target)


def test_biases_of_the_attention(target: TargetModel, tmp_path: Path) -> None:
    """Of heads for Qwen2."""
    head = eagle(target, max_position_embeddings=2048, **QWEN2)
    write_as("eagle1", head, tmp_path / "head")
    folder = Written(tmp_path / "head")
    assert folder.config["qkv_bias"] is True and folder.config["attention_bias"] is False
    assert folder.shapes["layers.1.self_attn.k_proj.bias"] == [16]
    folder.config = {**PUBLISHED, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    folder.config["num_hidden_layers"] = 2
    assert_same(read_head(folder.save(foreign=True), target), head)
    with pytest.raises(ExportError, match="attention_bias=True: loaders of this dialect know only"):
        write_as("eagle1-sglang", head, tmp_path / "other")


def test_a_bias_of_the_output_of_the_attention_is_refused(
    target: TargetModel, tmp_path: Path
) -> None:
    _, folder = published(target, tmp_path / "head")
    folder.tensors["layers.0.self_attn.o_proj.bias"] = torch.ones(32)
    with pytest.raises(ExportError, match=r"unknown tensor layers\.0\.self_attn\.o_proj\.bias"):
        read_head(folder.save(foreign=True), target)


# What an engine would not tell --------------------------------------------------------------------

Change = Callable[[Written], object]


def put(name: str, tensor: Tensor) -> Change:
    return lambda folder: folder.tensors.update({name: tensor})


def drop(name: str) -> Change:
    return lambda folder: folder.tensors.pop(name)


def configure(**changes: Any) -> Change:
    return lambda folder: folder.config.update(changes)


VIOLATIONS: dict[str, tuple[str, Change, str]] = {
    "missing": ("eagle1", drop("fc.weight"), "missing tensor fc.weight"),
    "a bias": (
        "eagle1",
        put("fc.bias", torch.ones(32)),
        "unknown tensor fc.bias .*config.json says bias false",
    ),
    "no bias": (
        "eagle1-sglang",
        drop("fc.bias"),
        "missing tensor fc.bias: SGLang would leave it at random values",
    ),
    "bias of the attention": ("eagle1-sglang", configure(bias=True), "bias must be false: SGLang"),
    "a norm": (
        "eagle1",
        put("layers.0.input_layernorm.weight", torch.ones(32)),
        "unknown tensor layers.0.input_layernorm.weight .*no norm before its first",
    ),
    "an output matrix": (
        "eagle1",
        put("lm_head.weight", torch.ones(96, 32)),
        "unknown tensor lm_head.weight",
    ),
    "turned": ("eagle1", put("fc.weight", torch.ones(64, 32)), "fc.weight .* its transpose"),
    "never trained": ("eagle1", put("fc.weight", torch.zeros(32, 64)), "fc.weight is all zeros"),
    "tied": ("eagle1", configure(tie_word_embeddings=True), "tie_word_embeddings must be False"),
    "short": (
        "eagle1",
        configure(max_position_embeddings=64),
        "max_position_embeddings is 64 but the target has 512",
    ),
    "rope": ("eagle1", configure(rope_theta=5.0), "rope_theta is 5.0 but rope_parameters says"),
    "for vLLM": (
        "eagle1",
        configure(architectures=["LlamaForCausalLMEagle"]),
        "architectures must be",
    ),
    "for SGLang": (
        "eagle1-sglang",
        configure(architectures=["LlamaForCausalLM"]),
        "architectures must be",
    ),
    "another type": ("eagle1", configure(torch_dtype="float64"), "torch_dtype float64 is not one"),
}


@pytest.mark.parametrize("violation", VIOLATIONS)
def test_violations_are_named(violation: str, target: TargetModel, tmp_path: Path) -> None:
    name, change, message = VIOLATIONS[violation]
    folder = written(name, target, tmp_path / "head")
    check_folder(folder.path, target, FORMS[name])
    change(folder)
    folder.save()
    with pytest.raises(ExportError, match=message):
        check_folder(folder.path, target, FORMS[name])


@pytest.mark.parametrize("name", FORMS)
def test_every_key_is_required(name: str, target: TargetModel, tmp_path: Path) -> None:
    config = written(name, target, tmp_path / "head").config
    for key in [spec.name for spec in FORMS[name].keys]:
        with pytest.raises(ExportError, match=f"key {key} is missing"):
            FORMS[name].check_config({k: v for k, v in config.items() if k != key})
