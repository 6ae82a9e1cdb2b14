"""EAGLE-3 in SGLang's dialect: what is written, comes back, and what an engine computes with it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from drafters import FAMILIES, Eagle3Drafter, TargetModel, build_drafter
from drafters.export import (
    ExportError,
    check_as,
    check_golden,
    read_as,
    read_head,
    write_as,
    write_native,
)
from drafters.export.dialects.sglang import SGLANG
from drafters.layers import repeat_heads, rotate
from drafters.vocab import from_offsets
from tests.drafters.export.written import contents, eagle3, engine_parameters, logits
from tests.tiny import tiny_target

VARIANTS: dict[str, dict[str, Any]] = {
    "whole vocabulary": {},
    "reduced vocabulary": {"draft_vocab_size": 40},
    "EAGLE-3.1": {"draft_vocab_size": 40, "fc_norm": True, "norm_output": True},
    "normed fusion": {"draft_vocab_size": 40, "norm_before_fc": True},
}


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target(dtype=torch.float32)


@pytest.fixture(params=VARIANTS)
def head(request: pytest.FixtureRequest, target: TargetModel) -> Eagle3Drafter:
    return eagle3(target, **VARIANTS[request.param])


# Round trip ---------------------------------------------------------------------------------------


def test_a_head_comes_back_the_same(
    head: Eagle3Drafter, target: TargetModel, tmp_path: Path
) -> None:
    write_as("sglang", head, tmp_path / "head")
    again = read_as("sglang", tmp_path / "head", target)

    assert again.state_dict().keys() == head.state_dict().keys()
    for name, tensor in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert torch.equal(logits(again), logits(head))
    assert again.config.own_fields() == head.config.own_fields()
    assert check_golden(again, tmp_path / "head") == 0


def engine_logits(engine: dict[str, Tensor], config: dict[str, Any], embedding: Tensor) -> Tensor:
    """The golden chain as SGLang computes it: fused projections, the residual carried beside."""
    weights = engine
    layer = {k.removeprefix("model.layers.0."): v for k, v in weights.items()}
    heads, groups, size = (
        config["num_attention_heads"],
        config["num_attention_heads"] // config["num_key_value_heads"],
        config["head_dim"],
    )
    theta = config["rope_parameters"]["rope_theta"]
    widths = [heads * size, heads // groups * size, heads // groups * size]

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight.shape, weight, config["rms_norm_eps"])

    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(6, 3 * config["target_hidden_size"], generator=generator)
    tokens = torch.randint(config["vocab_size"], (8,), generator=generator)
    if config["fc_norm"]:
        parts = enumerate(hidden.chunk(3, dim=-1))
        hidden = torch.cat([norm(x, weights[f"model.fc_norm.{i}.weight"]) for i, x in parts], -1)
    if config["eagle_config"]["norm_before_fc"]:
        hidden = norm(hidden, weights["model.input_norm.weight"])
    hidden = hidden @ weights["model.fc.weight"].T
    keys, values, out = torch.zeros(0), torch.zeros(0), []
    for start, end in ((0, 6), (6, 7), (7, 8)):
        residual = hidden
        pair = norm(embedding[tokens[start:end]], layer["input_layernorm.weight"])
        pair = torch.cat([pair, norm(hidden, layer["hidden_norm.weight"])], dim=-1)
        qkv = (pair @ layer["self_attn.qkv_proj.weight"].T).split(widths, dim=-1)
        q, k, v = (x.view(1, end - start, -1, size).transpose(1, 2) for x in qkv)
        where = torch.arange(start, end)[None]
        q, k = rotate(q, where, theta), rotate(k, where, theta)
        keys = torch.cat([keys, k], dim=2) if start else k
        values = torch.cat([values, v], dim=2) if start else v
        scores = q @ repeat_heads(keys, groups).transpose(2, 3) / size**0.5
        hide = torch.arange(end)[None] > torch.arange(start, end)[:, None]
        mixed = scores.masked_fill(hide, -torch.inf).softmax(-1) @ repeat_heads(values, groups)
        mixed = mixed.transpose(1, 2).reshape(end - start, -1)
        residual = residual + mixed @ layer["self_attn.o_proj.weight"].T
        gate, up = (
            norm(residual, layer["post_attention_layernorm.weight"])
            @ layer["mlp.gate_up_proj.weight"].T
        ).chunk(2, dim=-1)
        residual = residual + (silu(gate) * up) @ layer["mlp.down_proj.weight"].T
        normed = norm(residual, weights["model.norm.weight"])
        out.append(normed[-1] @ weights["lm_head.weight"].T)
        hidden = (normed if config["norm_output"] else residual)[-1:]
    return torch.stack(out)


def test_an_engine_computes_the_same_logits(
    head: Eagle3Drafter, target: TargetModel, tmp_path: Path
) -> None:
    write_as("sglang", head, tmp_path / "head")
    tensors = check_as("sglang", tmp_path / "head", target)
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    engine = engine_parameters(SGLANG, config, tensors)
    found = engine_logits(engine, config, target.embedding.weight)

    torch.testing.assert_close(found, logits(head), rtol=1e-4, atol=1e-4)
    drafted = found.argmax(-1)
    if "d2t" in tensors:
        drafted = from_offsets(tensors["d2t"])[drafted]
    assert drafted.tolist() == head.to_target_ids(logits(head).argmax(-1)).tolist()


def test_the_file_holds_what_the_dialect_names(target: TargetModel, tmp_path: Path) -> None:
    head = eagle3(target, draft_vocab_size=40, fc_norm=True)
    export = write_as("sglang", head, tmp_path / "head", provenance={"commit": "abc"})
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    config = json.loads((tmp_path / "head" / "config.json").read_text())

    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == {
        "fc.weight": [32, 96],
        "fc_norm.0.weight": [32],
        "fc_norm.1.weight": [32],
        "fc_norm.2.weight": [32],
        "midlayer.self_attn.q_proj.weight": [32, 64],
        "midlayer.self_attn.k_proj.weight": [16, 64],
        "midlayer.self_attn.v_proj.weight": [16, 64],
        "midlayer.self_attn.o_proj.weight": [32, 32],
        "midlayer.mlp.gate_proj.weight": [48, 32],
        "midlayer.mlp.up_proj.weight": [48, 32],
        "midlayer.mlp.down_proj.weight": [32, 48],
        "midlayer.hidden_norm.weight": [32],
        "midlayer.input_layernorm.weight": [32],
        "midlayer.post_attention_layernorm.weight": [32],
        "norm.weight": [32],
        "lm_head.weight": [40, 32],
        "d2t": [40],
        "t2d": [96],
    }
    assert export.num_tensors == len(tensors)
    assert export.bytes == sum(map(len, contents(tmp_path / "head").values()))
    kept = (tensors["d2t"] + torch.arange(40)).tolist()
    assert kept == head.draft_vocab.tolist()
    assert tensors["t2d"].nonzero().flatten().tolist() == kept
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["draft_vocab_size"], config["vocab_size"]) == (40, 96)
    assert config["tie_word_embeddings"] is False
    assert config["max_position_embeddings"] == 512
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 4]
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
    manifest = json.loads((tmp_path / "head" / "export.json").read_text())
    assert manifest["provenance"] == {"commit": "abc"}


def test_the_confidence_head_is_left_out_and_named(target: TargetModel, tmp_path: Path) -> None:
    export = write_as("sglang", eagle3(target, confidence_head=True), tmp_path / "head")
    assert export.left_out == ("confidence.proj.bias", "confidence.proj.weight")
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    assert not any("confidence" in name for name in tensors)


@pytest.mark.parametrize(
    ("options", "served"),
    [
        ({}, ("sglang", "vllm", "llama.cpp")),
        ({"norm_output": True}, ("sglang", "vllm")),
        ({"norm_before_fc": True}, ("sglang", "vllm", "llama.cpp")),
    ],
)
def test_engines_are_named(
    target: TargetModel, tmp_path: Path, options: dict[str, Any], served: tuple[str, ...]
) -> None:
    export = write_as("sglang", eagle3(target, **options), tmp_path / "head")
    assert export.served == served
    assert bool(export.notes) == bool(options)


def test_capturing_the_embedding_is_noted(target: TargetModel, tmp_path: Path) -> None:
    export = write_as("sglang", eagle3(target, feature_layers=[0, 3, 5]), tmp_path / "head")
    assert "layer id -1" in export.notes[0]


def test_embeddings_on_request(target: TargetModel, tmp_path: Path) -> None:
    write_as("sglang", eagle3(target), tmp_path / "head", with_embeddings=True)
    path = tmp_path / "head" / "model.safetensors"
    tensors = load_file(path)
    assert torch.equal(tensors["embed_tokens.weight"], target.embedding.weight)
    read_as("sglang", tmp_path / "head", target)
    tensors["embed_tokens.weight"][0] += 1
    save_file(tensors, path)
    with pytest.raises(ExportError, match="not the embedding of 'tiny'"):
        read_as("sglang", tmp_path / "head", target)


def test_half_precision(target: TargetModel, tmp_path: Path) -> None:
    head = eagle3(target, draft_vocab_size=40).bfloat16()
    write_as("sglang", head, tmp_path / "head")
    again = read_as("sglang", tmp_path / "head", target)
    assert again.fc.weight.dtype == torch.bfloat16
    assert torch.equal(logits(again), logits(head))


# What the dialect cannot say --------------------------------------------------------------------


def test_medusa_is_refused(target: TargetModel, tmp_path: Path) -> None:
    head = build_drafter("medusa", target)
    with pytest.raises(ValueError, match=r"for eagle3 heads and this is a medusa head.*native"):
        write_as("sglang", head, tmp_path / "head")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {"eagle3"}))
def test_other_families_are_refused(target: TargetModel, tmp_path: Path, family: str) -> None:
    """P-EAGLE too, which is made of EAGLE-3's parts."""
    with pytest.raises(ExportError, match=rf"for eagle3 heads and this is a {family} head"):
        write_as("sglang", build_drafter(family, target), tmp_path / "head")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_layers": 2}, "num_layers=2: .* only num_layers=1; .*native"),
        ({"qk_norm": True}, "qk_norm=True: .* only qk_norm=False; .*native"),
        ({"sliding_window": 8}, "sliding_window=8: .* only sliding_window=None; .*native"),
    ],
)
def test_other_layers_are_refused(
    target: TargetModel, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    """SGLang's EAGLE-3 has one Llama layer; what it does not know it would leave out in silence."""
    head = eagle3(target, **options)
    with pytest.raises(ExportError, match=message):
        write_as("sglang", head, tmp_path / "head")
    write_native(head, tmp_path / "native")
    assert torch.equal(logits(read_head(tmp_path / "native", target)), logits(head))


def test_other_numbers_of_layers_are_refused(target: TargetModel, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="exactly 3 layers"):
        write_as("sglang", eagle3(target, feature_layers=[2, 4]), tmp_path / "head")


def test_double_precision_is_refused(target: TargetModel, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"do not load torch\.float64"):
        write_as("sglang", eagle3(target).double(), tmp_path / "head")


def test_a_scaled_embedding_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(dtype=torch.float32)
    head = eagle3(target)
    target.embedding.register_forward_hook(lambda module, inputs, output: output * 2)
    with pytest.raises(ExportError, match="scales its input embeddings"):
        write_as("sglang", head, tmp_path / "head")


def test_a_diverged_head_never_replaces_a_good_one(target: TargetModel, tmp_path: Path) -> None:
    write_as("sglang", eagle3(target), tmp_path / "head")
    before = contents(tmp_path / "head")
    bad = eagle3(target)
    torch.nn.init.constant_(bad.norm.weight, torch.inf)
    with pytest.raises(ExportError, match=r"norm.weight holds values that are not finite"):
        write_as("sglang", bad, tmp_path / "head")
    assert contents(tmp_path / "head") == before
