"""EAGLE-1's two forms: heads of other trainers are read, faulty ones refused by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafters import Eagle1Drafter, TargetModel
from drafters.export import ExportError, read_head, write_as
from drafters.export.reading import check_folder
from tests.drafters.export.eagle1_heads import FORMS, QWEN2, eagle, written
from tests.drafters.export.written import Written, assert_same
from tests.tiny import tiny_target


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target(dtype=torch.float32)


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
