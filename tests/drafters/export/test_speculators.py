"""The dialects of ``speculators``: what is written, and that it comes back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from drafters import TargetModel
from drafters.export import ExportError, dialect_named, dialect_of, read_head, write_as
from tests.drafters.export.speculators_heads import (
    BLOCK_IDS,
    EAGLE_IDS,
    LAYERS,
    VARIANTS,
    logits,
    make_head,
    written,
)
from tests.tiny import tiny_target


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target(dtype=torch.float32)


# Round trip -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_a_head_comes_back_the_same(name: str, target: TargetModel, tmp_path: Path) -> None:
    head = make_head(name, target)
    folder = written(head, tmp_path / "head")
    assert dialect_of(folder).name == f"speculators-{head.family}"
    again = read_head(folder, target)

    assert again.family == head.family
    assert again.state_dict().keys() == head.state_dict().keys()
    for key, tensor in head.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor), key
    assert torch.equal(logits(again), logits(head))
    kept, found = head.config.own_fields(), again.config.own_fields()
    differing = {key for key in kept if kept[key] != found[key]}
    assert differing <= {"target_name", "target_fingerprint"}  # those are in the manifest


def test_half_precision(target: TargetModel, tmp_path: Path) -> None:
    head = make_head("peagle", target).bfloat16()
    again = read_head(written(head, tmp_path / "head"), target, torch.bfloat16)
    assert torch.equal(logits(again), logits(head))


def test_a_place_for_the_mask_is_found_and_kept(target: TargetModel, tmp_path: Path) -> None:
    head = make_head("peagle", target, mask_token_id=None)
    again = read_head(written(head, tmp_path / "head"), target)
    assert again.config.mask_token_id == 95  # the last token that text does not contain
    assert torch.equal(logits(again), logits(head))


# What is written --------------------------------------------------------------------------------

NAMES: dict[str, dict[str, list[int]]] = {
    "eagle3 as their trainer has it": {
        "fc.weight": [32, 96],
        "input_norm.weight": [96],
        "layers.0.self_attn.q_proj.weight": [32, 64],
        "layers.0.self_attn.k_proj.weight": [16, 64],
        "layers.0.self_attn.v_proj.weight": [16, 64],
        "layers.0.self_attn.o_proj.weight": [32, 32],
        "layers.0.mlp.gate_proj.weight": [48, 32],
        "layers.0.mlp.up_proj.weight": [48, 32],
        "layers.0.mlp.down_proj.weight": [32, 48],
        "layers.0.hidden_norm.weight": [32],
        "layers.0.input_layernorm.weight": [32],
        "layers.0.post_attention_layernorm.weight": [32],
        "norm.weight": [32],
        "lm_head.weight": [40, 32],
        "embed_tokens.weight": [96, 32],
        "d2t": [40],
        "t2d": [96],
    },
    "dspark gated": {
        "fc.weight": [32, 64],
        "hidden_norm.weight": [32],
        "layers.0.self_attn.q_proj.weight": [32, 32],
        "layers.0.self_attn.k_proj.weight": [16, 32],
        "layers.0.self_attn.v_proj.weight": [16, 32],
        "layers.0.self_attn.o_proj.weight": [32, 32],
        "layers.0.self_attn.q_norm.weight": [8],
        "layers.0.self_attn.k_norm.weight": [8],
        "layers.0.mlp.gate_proj.weight": [48, 32],
        "layers.0.mlp.up_proj.weight": [48, 32],
        "layers.0.mlp.down_proj.weight": [32, 48],
        "layers.0.input_layernorm.weight": [32],
        "layers.0.post_attention_layernorm.weight": [32],
        "norm.weight": [32],
        "lm_head.weight": [40, 32],
        "markov_head.markov_w1.weight": [96, 8],
        "markov_head.markov_w2.weight": [40, 8],
        "markov_head.gate_proj.weight": [8, 40],
        "markov_head.gate_proj.bias": [8],
        "d2t": [40],
        "t2d": [96],
    },
    "mtp": {
        "mtp_layers.0.input_proj.weight": [32, 64],
        "mtp_layers.0.token_layernorm.weight": [32],
        "mtp_layers.0.hidden_layernorm.weight": [32],
        "mtp_layers.0.final_layernorm.weight": [32],
        "mtp_layers.0.self_attn.q_proj.weight": [32, 32],
        "mtp_layers.0.self_attn.k_proj.weight": [16, 32],
        "mtp_layers.0.self_attn.v_proj.weight": [16, 32],
        "mtp_layers.0.self_attn.o_proj.weight": [32, 32],
        "mtp_layers.0.self_attn.q_norm.weight": [8],
        "mtp_layers.0.self_attn.k_norm.weight": [8],
        "mtp_layers.0.mlp.gate_proj.weight": [48, 32],
        "mtp_layers.0.mlp.up_proj.weight": [48, 32],
        "mtp_layers.0.mlp.down_proj.weight": [32, 48],
        "mtp_layers.0.input_layernorm.weight": [32],
        "mtp_layers.0.post_attention_layernorm.weight": [32],
    },
}


@pytest.mark.parametrize("name", NAMES)
def test_the_file_holds_what_their_class_has(
    name: str, target: TargetModel, tmp_path: Path
) -> None:
    changes = {"feature_layers": [2, 4]} if name == "dspark gated" else {}
    folder = written(make_head(name, target, **changes), tmp_path / "head")
    tensors = load_file(folder / "model.safetensors")
    assert {key: list(tensor.shape) for key, tensor in tensors.items()} == NAMES[name]


def test_what_else_other_kinds_hold(target: TargetModel, tmp_path: Path) -> None:
    head = make_head("peagle", target)
    tensors = load_file(written(head, tmp_path / "peagle") / "model.safetensors")
    assert list(tensors["mask_hidden"].shape) == [1, 1, 96]
    assert torch.equal(tensors["embed_tokens.weight"][90], head.state_dict()["mask_embedding"])
    assert torch.equal(tensors["embed_tokens.weight"][:90], target.embedding.weight[:90])
    assert "layers.1.input_layernorm.weight" in tensors and "d2t" not in tensors

    whole = load_file(
        written(make_head("dflash", target), tmp_path / "whole") / "model.safetensors"
    )
    assert not {"lm_head.weight", "embed_tokens.weight", "d2t", "t2d"} & set(whole)
    reduced = make_head("dflash reduced", target)
    tensors = load_file(written(reduced, tmp_path / "reduced") / "model.safetensors")
    kept = reduced.state_dict()["draft_vocab"]
    assert torch.equal(tensors["lm_head.weight"], target.lm_head.weight[kept])

    tensors = load_file(written(make_head("dspark", target), tmp_path / "ds") / "model.safetensors")
    assert list(tensors["confidence_head.proj.weight"].shape) == [1, 40]
    assert list(tensors["confidence_head.proj.bias"].shape) == [1]


def test_every_key_of_the_config(target: TargetModel, tmp_path: Path) -> None:
    head = make_head("eagle3 as their trainer has it", target, feature_layers=[1, 3, 5])
    config = json.loads((written(head, tmp_path / "head") / "config.json").read_text())
    assert config == {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": 3,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]},
        },
        LAYERS: {
            "model_type": "llama",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "rms_norm_eps": 1e-6,
            "num_hidden_layers": 1,
            "vocab_size": 96,
            "max_position_embeddings": 512,
            "rope_theta": 10000.0,
            "rope_scaling": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            "sliding_window": 5,
            "use_sliding_window": True,
            "layer_types": ["sliding_attention"],
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": None,
            "num_aux_hidden_states": 3,
        },
        "draft_vocab_size": 40,
        "target_hidden_size": 32,
        "norm_before_residual": True,
        "norm_before_fc": True,
        "fc_norm": False,
        "norm_output": True,
        "embed_requires_grad": False,
        EAGLE_IDS: [1, 3, 5],
        "tie_word_embeddings": False,
        "dtype": "float32",
        "torch_dtype": "float32",
    }


OWN_KEYS: dict[str, dict[str, Any]] = {
    "peagle own embedding": {
        "speculators_model_type": "peagle",
        "architectures": ["PEagleDraftModel"],
        "mask_token_id": 90,
        "embed_requires_grad": True,
        "norm_output": False,
    },
    "dflash": {
        "speculators_model_type": "dflash",
        "architectures": ["DFlashDraftModel"],
        "block_size": 4,
        "sample_from_anchor": False,
        "sliding_window_non_causal": True,
        "draft_vocab_size": 96,
        BLOCK_IDS: [2, 3, 4],
    },
    "dflash causal": {"sliding_window_non_causal": False},
    "dspark rnn": {
        "speculators_model_type": "dspark",
        "architectures": ["DSparkDraftModel"],
        "block_size": 7,
        "sample_from_anchor": True,
        "markov_rank": 8,
        "markov_head_type": "rnn",
        "enable_confidence_head": False,
        "confidence_head_with_markov": True,
    },
    "dspark none": {
        "markov_rank": 0,
        "enable_confidence_head": True,
        "confidence_head_with_markov": False,
    },
    "mtp": {
        "speculators_model_type": "mtp",
        "architectures": ["MTPDraftModel"],
        "num_nextn_predict_layers": 1,
    },
}


@pytest.mark.parametrize("name", OWN_KEYS)
def test_keys_of_the_other_kinds(name: str, target: TargetModel, tmp_path: Path) -> None:
    folder = written(make_head(name, target), tmp_path / "head")
    config = json.loads((folder / "config.json").read_text())
    assert {key: config[key] for key in OWN_KEYS[name]} == OWN_KEYS[name]
    tokens = config["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    drafts = {"peagle own embedding": 3, "dspark rnn": 7, "dspark none": 7}
    assert tokens == drafts.get(name, 3)


def test_causal_blocks_are_layers_with_a_window(target: TargetModel, tmp_path: Path) -> None:
    def layers(name: str) -> dict[str, Any]:
        folder = written(make_head(name, target), tmp_path / name)
        return json.loads((folder / "config.json").read_text())[LAYERS]

    causal, mixed, plain = layers("dflash causal"), layers("dflash mixed"), layers("dflash")
    assert causal["layer_types"] == ["sliding_attention"] * 2
    assert causal["sliding_window"] == target.max_length  # hides nothing
    assert mixed["layer_types"] == ["sliding_attention", "full_attention", "sliding_attention"]
    assert mixed["sliding_window"] == 9
    assert plain["layer_types"] == ["full_attention"] * 2
    assert plain["use_sliding_window"] is False and plain["sliding_window"] is None


def test_the_target_is_named_by_its_hub_id_or_its_folder(
    target: TargetModel, tmp_path: Path
) -> None:
    head = make_head("mtp", target)
    dialect = dialect_named("speculators-mtp")

    def named() -> str:
        return dialect.config(head)["speculators_config"]["verifier"]["name_or_path"]

    assert named() == "tiny"
    try:
        head.target.name = str(tmp_path)
        assert named() == str(tmp_path.resolve())
        head.config.target_name = "someone/tiny"
        assert named() == "someone/tiny"
    finally:
        head.target.name = "tiny"


def test_what_engines_do_not_do_is_said(target: TargetModel, tmp_path: Path) -> None:
    def notes(name: str, **changes: Any) -> str:
        head = make_head(name, target, **changes)
        return " / ".join(write_as(f"speculators-{head.family}", head, tmp_path / "head").notes)

    assert "no engine serves an MTP head" in notes("mtp")
    assert "vLLM loads no rnn Markov head" in notes("dspark rnn")
    assert "calibration" in notes("dspark")
    assert "blocks are causal" in notes("dflash causal")
    assert "norm_output" in notes("eagle3 as their trainer has it")
    assert "confidence output is left out" in notes("eagle3", confidence_head=True)
    assert "'tiny'" in notes("dflash")


def test_engines(target: TargetModel, tmp_path: Path) -> None:
    def served(name: str) -> tuple[str, ...]:
        head = make_head(name, target)
        return write_as(f"speculators-{head.family}", head, tmp_path / "head").served

    assert (served("eagle3"), served("dspark")) == (("vllm",), ("vllm",))
    assert (served("dflash causal"), served("peagle")) == (("vllm",), ("vllm",))
    assert (served("dflash mixed"), served("dspark rnn"), served("mtp")) == ((), (), ())


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no norms of queries": ("dflash", {"qk_norm": False}, "qk_norm=False.*only qk_norm=True"),
    "two windows": (
        "dflash",
        {"sliding_window": 9, "window_layers": [0], "causal_layers": [1]},
        "one window for all of them",
    ),
    "Llama layers": ("mtp", {"qk_norm": False}, "qk_norm=False"),
    "several modules": ("mtp", {"num_modules": 2}, "num_modules=2"),
    "feature first": ("mtp", {"hidden_first": True}, "hidden_first=True"),
    "draft vocabulary": ("mtp", {"draft_vocab_size": 40}, "draft_vocab_size=40"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_heads_that_have_no_place(case: str, target: TargetModel, tmp_path: Path) -> None:
    name, options, message = REFUSED[case]
    head = make_head(name, target, **options)
    with pytest.raises(ExportError, match=message):
        write_as(f"speculators-{head.family}", head, tmp_path / "head")
