"""EAGLE-3 for vLLM's native loader: what is written, and what vLLM computes with it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from drafters import TargetModel
from drafters.export import ExportError, dialect_of, read_as, read_head, write_as
from drafters.export.dialects.eagle3_vllm import VLLM
from drafters.export.reading import check_folder
from drafters.vocab import from_offsets
from inference.proposers.context_cache import ContextCache
from tests.drafters.export.vllm_engine import IDS, VllmEngine, chain, golden_texts
from tests.drafters.export.written import Written, eagle3, engine_parameters, logits
from tests.tiny import tiny_target

YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 16}
VARIANTS: dict[str, dict[str, Any]] = {
    "whole vocabulary": {},
    "reduced vocabulary": {"draft_vocab_size": 40},
    "normed residual": {"norm_before_residual": True, "draft_vocab_size": 40},
    "normed fusion": {"norm_before_fc": True, "norm_before_residual": True, "norm_output": True},
    "EAGLE-3.1": {"fc_norm": True, "norm_output": True},
    "two layers": {"num_layers": 2, "norm_before_residual": True},
    "five features": {"feature_layers": [0, 1, 2, 4, 5], "norm_before_fc": True},
    "one feature": {"feature_layers": [4]},
    "qwen3": {"qk_norm": True, "num_layers": 2},
    "window": {"sliding_window": 4, "num_layers": 2},
    "qwen3 with a window": {"sliding_window": 3, "qk_norm": True},
    "own embedding": {"own_embedding": True, "draft_vocab_size": 40},
    "yarn": {"rope_extension": YARN},
}


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target(dtype=torch.float32)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_head_comes_back_the_same(target: TargetModel, tmp_path: Path, name: str) -> None:
    head = eagle3(target, **VARIANTS[name])
    write_as("vllm", head, tmp_path / "head")
    (tmp_path / "head" / "export.json").unlink()
    assert dialect_of(tmp_path / "head") is VLLM
    again = read_as("vllm", tmp_path / "head", target)
    assert again.state_dict().keys() == head.state_dict().keys()
    for key, tensor in head.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor), key
    assert torch.equal(logits(again), logits(head))
    kept = {"target_name", "target_fingerprint", "reference"}
    wanted = {k: v for k, v in head.config.own_fields().items() if k not in kept}
    assert {k: v for k, v in again.config.own_fields().items() if k not in kept} == wanted


def loaded(folder: Path, target: TargetModel) -> VllmEngine:
    config, tensors = Written(folder).config, check_folder(folder, target, VLLM)
    parameters = engine_parameters(VLLM, config, tensors)
    if "d2t" in tensors:
        parameters["draft_id_to_target_id"] = tensors["d2t"]
    return VllmEngine(parameters, config, target.embedding.get_parameter("weight").detach())


@pytest.mark.parametrize("name", [n for n, o in VARIANTS.items() if "sliding_window" not in o])
def test_vllm_computes_the_same_logits(target: TargetModel, tmp_path: Path, name: str) -> None:
    head = eagle3(target, **VARIANTS[name])
    write_as("vllm", head, tmp_path / "head")
    engine = loaded(tmp_path / "head", target)
    found = chain(engine)
    torch.testing.assert_close(found, logits(head), rtol=1e-4, atol=1e-4)
    drafted = logits(head).argmax(-1)
    assert engine.targets(found.argmax(-1)) == head.to_target_ids(drafted).tolist()
    assert engine.config[IDS] == list(head.feature_layers)


@pytest.mark.parametrize("name", [n for n, o in VARIANTS.items() if "sliding_window" in o])
def test_vllm_has_the_same_window(target: TargetModel, tmp_path: Path, name: str) -> None:
    head = eagle3(target, **VARIANTS[name])
    write_as("vllm", head, tmp_path / "head")
    engine = loaded(tmp_path / "head", target)
    features, tokens = golden_texts(engine.config, 1)
    found, _ = engine.forward(tokens, engine.combine(features))
    attend, positions = (
        ContextCache(head.windows).rows(6, [True] * head.num_layers),
        torch.arange(6)[None],
    )
    with torch.no_grad():
        feature = head.begin(features[None], features[None], positions, attend)
        wanted, _ = head(feature, tokens[None], positions, attend)
    torch.testing.assert_close(found, wanted[0], rtol=1e-4, atol=1e-4)
    engine.seen, engine.length = {}, 0
    engine.config["layer_types"] = ["full_attention"] * head.config.num_layers
    other, _ = engine.forward(tokens, engine.combine(features))
    assert (other - wanted[0]).abs().max() > 1e-2


def test_what_is_written(target: TargetModel, tmp_path: Path) -> None:
    head = eagle3(
        target,
        num_layers=2,
        qk_norm=True,
        draft_vocab_size=40,
        norm_before_fc=True,
        norm_before_residual=True,
        sliding_window=16,
    )
    write_as("vllm", head, tmp_path / "head")
    tensors, config = (
        load_file(tmp_path / "head" / "model.safetensors"),
        Written(tmp_path / "head").config,
    )
    layers = {
        f"layers.{index}.{name}.weight": shape
        for index, wide in ((0, 64), (1, 32))
        for name, shape in {
            "self_attn.q_proj": [32, wide],
            "self_attn.k_proj": [16, wide],
            "self_attn.v_proj": [16, wide],
            "self_attn.o_proj": [32, 32],
            "self_attn.q_norm": [8],
            "self_attn.k_norm": [8],
            "mlp.gate_proj": [48, 32],
            "mlp.up_proj": [48, 32],
            "mlp.down_proj": [32, 48],
            "input_layernorm": [32],
            "post_attention_layernorm": [32],
        }.items()
    }
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == layers | {
        "fc.weight": [32, 96],
        "input_norm.weight": [96],
        "layers.0.hidden_norm.weight": [32],
        "norm.weight": [32],
        "lm_head.weight": [40, 32],
        "d2t": [40],
        "t2d": [96],
    }
    assert from_offsets(tensors["d2t"]).tolist() == head.draft_vocab.tolist()
    assert config == {
        "architectures": ["Eagle3Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 32,
        "target_hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_hidden_layers": 2,
        "rms_norm_eps": 1e-6,
        "vocab_size": 96,
        "draft_vocab_size": 40,
        "fc_norm": False,
        "norm_output": False,
        "norm_before_fc": True,
        "norm_before_residual": True,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "layer_types": ["sliding_attention", "sliding_attention"],
        "sliding_window": 16,
        "use_sliding_window": True,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
        "num_aux_hidden_states": 3,
        IDS: [1, 3, 5],
        "eagle_config": {IDS: [0, 2, 4], "use_aux_hidden_state": True, "norm_before_fc": True},
    }


@pytest.mark.parametrize(
    ("options", "engines", "words"),
    [
        ({}, ("vllm", "llama.cpp"), []),
        (
            {"norm_before_residual": True, "norm_before_fc": True},
            ("vllm", "llama.cpp"),
            ["norm_before_fc, norm_before_residual: read in vLLM 0.32 and 0.33"],
        ),
        ({"norm_output": True}, ("vllm",), ["norm_output: read in vLLM"]),
        ({"feature_layers": [0, 5]}, ("vllm",), ["layer 0", "num_aux_hidden_states: read"]),
        ({"num_layers": 2}, ("vllm",), []),
        ({"rope_extension": YARN}, ("vllm",), []),
        ({"qk_norm": True}, ("vllm",), ["Eagle3Qwen3ForCausalLM"]),
        ({"confidence_head": True}, ("vllm", "llama.cpp"), ["confidence output is left out"]),
    ],
)
def test_engines_and_notes(
    target: TargetModel,
    tmp_path: Path,
    options: dict[str, Any],
    engines: tuple[str, ...],
    words: list[str],
) -> None:
    export = write_as("vllm", eagle3(target, **options), tmp_path / "head")
    assert export.served == engines
    assert len(export.notes) == len(words)
    assert all(any(word in note for note in export.notes) for word in words)


def test_half_precision_and_embeddings(target: TargetModel, tmp_path: Path) -> None:
    head = eagle3(target, draft_vocab_size=40).bfloat16()
    write_as("vllm", head, tmp_path / "head", with_embeddings=True)
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    assert torch.equal(tensors["embed_tokens.weight"], target.embedding.weight.bfloat16())
    again = read_as("vllm", tmp_path / "head", target)
    assert not again.config.own_embedding and again.fc.weight.dtype == torch.bfloat16
    assert torch.equal(logits(again), logits(head))


def test_an_embedding_of_its_own_is_not_overwritten(target: TargetModel, tmp_path: Path) -> None:
    head = eagle3(target, own_embedding=True)
    write_as("vllm", head, tmp_path / "head", with_embeddings=True)
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    assert torch.equal(tensors["embed_tokens.weight"], head.embed_tokens.weight)


@pytest.mark.parametrize(
    "options", [{}, {"draft_vocab_size": 40}, {"fc_norm": True}, {"norm_before_fc": True}]
)
def test_to_sglang_and_back(target: TargetModel, tmp_path: Path, options: dict[str, Any]) -> None:
    head = eagle3(target, **options)
    write_as("sglang", head, tmp_path / "sglang")
    write_as("vllm", read_head(tmp_path / "sglang", target), tmp_path / "vllm")
    write_as("sglang", read_head(tmp_path / "vllm", target), tmp_path / "again")
    for name in ("config.json", "model.safetensors"):
        one, other = (tmp_path / place / name for place in ("sglang", "again"))
        assert one.read_bytes() == other.read_bytes(), name


@pytest.mark.parametrize("option", ["norm_before_residual", "own_embedding"])
def test_sglang_has_no_place_for_it(target: TargetModel, tmp_path: Path, option: str) -> None:
    with pytest.raises(ExportError, match=f"{option}=True"):
        write_as("sglang", eagle3(target, **{option: True}), tmp_path / "head")


@pytest.mark.parametrize("name", ["sglang", "modelopt"])
def test_stretched_rope_in_other_dialects(target: TargetModel, tmp_path: Path, name: str) -> None:
    head = eagle3(target, rope_extension=YARN)
    export = write_as(name, head, tmp_path / "head")
    assert "llama.cpp" not in export.served
    folder = Written(tmp_path / "head")
    del folder.config["rope_parameters"]
    again = read_as(name, folder.save(foreign=True), target)
    assert again.config.rope_extension == YARN
    assert torch.equal(logits(again), logits(head))


def test_biases_are_refused(target: TargetModel, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="attention_bias=True"):
        write_as("vllm", eagle3(target, attention_bias=True), tmp_path / "head")
