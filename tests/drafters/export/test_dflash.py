"""DFlash's file: names, keys, what engines compute from it, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from drafters import TargetModel
from drafters.block import DFlashDrafter
from drafters.export import ExportError, check_folder, read_as, read_head, write_as
from drafters.export.dialects.dflash import DFLASH, DFLASH_VLLM
from drafters.export.engines import engine_problems
from drafters.export.registry import dialect_of
from drafters.vocab import from_offsets
from tests.blocks import block_head
from tests.drafters.export.block_engine import Folder, engine_rows, example, own_logits
from tests.tiny import tiny_target

SHAPE: dict[str, Any] = {
    "num_layers": 2,
    "block_size": 4,
    "mask_token_id": 7,
    "feature_layers": [2, 3, 5],
}
LAYERS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "vocab_size",
    "num_hidden_layers",
    "rope_theta",
)
VARIANTS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "jetspec": {"causal": True},
    "sliding": {"sliding_window": 5},
    "causal sliding": {"sliding_window": 5, "causal": True},
    "windows in some layers": {"num_layers": 3, "sliding_window": 5, "window_layers": [0, 2]},
    "causal where sliding": {
        "num_layers": 3,
        "sliding_window": 5,
        "window_layers": [0, 2],
        "causal_layers": [0, 2],
    },
    "the embedding as a feature": {"feature_layers": [0, 4]},
}


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target(dtype=torch.float32)


def make_head(target: TargetModel, **options: Any) -> DFlashDrafter:
    """A head whose every tensor, norms included, is random."""
    options = {**SHAPE, **options}
    return block_head(target, "dflash", noise=0.3, dtype=torch.float32, **options)


def written(head: DFlashDrafter, folder: Path, form: str = "dflash") -> Folder:
    write_as(form, head, folder)
    return Folder(folder)


# What is written --------------------------------------------------------------------------------


def test_the_file_holds_what_the_dialect_names(target: TargetModel, tmp_path: Path) -> None:
    found = written(make_head(target), tmp_path / "head")
    layer = {
        "self_attn.q_proj.weight": [32, 32],
        "self_attn.k_proj.weight": [16, 32],
        "self_attn.v_proj.weight": [16, 32],
        "self_attn.o_proj.weight": [32, 32],
        "self_attn.q_norm.weight": [8],
        "self_attn.k_norm.weight": [8],
        "mlp.gate_proj.weight": [48, 32],
        "mlp.up_proj.weight": [48, 32],
        "mlp.down_proj.weight": [32, 48],
        "input_layernorm.weight": [32],
        "post_attention_layernorm.weight": [32],
    }
    assert {name: list(tensor.shape) for name, tensor in found.tensors.items()} == {
        "fc.weight": [32, 96],
        "hidden_norm.weight": [32],
        "norm.weight": [32],
        **{f"layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()},
    }


def test_every_key_is_written(target: TargetModel, tmp_path: Path) -> None:
    assert written(make_head(target), tmp_path / "head").config == {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "num_hidden_layers": 2,
        "num_target_layers": 6,
        "vocab_size": 96,
        "block_size": 4,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
        "layer_types": ["full_attention", "full_attention"],
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 2,
        "is_causal": False,
        "eagle_aux_hidden_state_layer_ids": [2, 3, 5],
        "dflash_config": {
            "mask_token_id": 7,
            "target_layer_ids": [1, 2, 4],
            "block_size": 4,
            "causal": False,
            "use_swa": False,
        },
    }


@pytest.mark.parametrize(
    ("name", "top", "nested"),
    [
        ("jetspec", {"is_causal": True}, {"causal": True}),
        (
            "sliding",
            {
                "layer_types": ["sliding_attention"] * 2,
                "sliding_window": 5,
                "use_sliding_window": True,
            },
            {"use_swa": True, "swa_window_size": 5, "causal": False},
        ),
        (
            "causal where sliding",
            {
                "is_causal": None,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                "sliding_window": 5,
            },
            {"use_swa": False, "swa_window_size": 5, "causal": None},
        ),
    ],
)
def test_attention_is_written_in_every_spelling(
    target: TargetModel, tmp_path: Path, name: str, top: dict[str, Any], nested: dict[str, Any]
) -> None:
    config = written(make_head(target, **VARIANTS[name]), tmp_path / "head").config
    assert {key: config[key] for key in top} == top
    assert {key: config["dflash_config"][key] for key in nested} == nested


@pytest.mark.parametrize("name", VARIANTS)
def test_a_head_comes_back_the_same(target: TargetModel, tmp_path: Path, name: str) -> None:
    head = make_head(target, **VARIANTS[name])
    written(head, tmp_path / "head")
    again = read_as("dflash", tmp_path / "head", target)

    assert again.state_dict().keys() == head.state_dict().keys()
    for key, tensor in head.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor), key
    assert again.config.own_fields() == head.config.own_fields()
    inputs = example(head)
    assert torch.equal(own_logits(again, *inputs), own_logits(head, *inputs))


@pytest.mark.parametrize("name", VARIANTS)
def test_an_engine_computes_the_same_logits(target: TargetModel, tmp_path: Path, name: str) -> None:
    head = make_head(target, **VARIANTS[name])
    written(head, tmp_path / "head")
    features, tokens = example(head)
    embedding = target.embedding.get_parameter("weight")
    rows = engine_rows(DFLASH, tmp_path / "head", embedding, features, tokens[0])
    found = rows[1:] @ target.lm_head.weight.T
    torch.testing.assert_close(found, own_logits(head, features, tokens), rtol=1e-4, atol=1e-4)


def test_windows_and_causality_are_felt(target: TargetModel) -> None:
    """The comparison above would notice each of them."""
    three = [options for options in VARIANTS.values() if options.get("num_layers") == 3]
    heads = [make_head(target, **options) for options in ({"num_layers": 3}, *three)]
    found = [own_logits(head, *example(head)) for head in heads]
    for place, one in enumerate(found):
        assert not any(torch.allclose(one, two, atol=1e-3) for two in found[:place])


# Vocabularies -----------------------------------------------------------------------------------


def test_a_draft_vocabulary_is_left_out(target: TargetModel, tmp_path: Path) -> None:
    """The network is the same without it: the logits of its tokens are."""
    head = make_head(target, draft_vocab_size=40, confidence_head=True)
    export = write_as("dflash", head, tmp_path / "head")
    again = read_as("dflash", tmp_path / "head", target)
    assert export.left_out == ("confidence.proj.bias", "confidence.proj.weight", "draft_vocab")
    assert export.served == ("sglang", "vllm", "llama.cpp")
    assert any("its draft vocabulary of 40 tokens" in note for note in export.notes)
    assert any("confidence output is left out" in note for note in export.notes)
    assert "draft_vocab_size" not in Folder(tmp_path / "head").config
    inputs = example(head)
    wanted, found = own_logits(head, *inputs), own_logits(again, *inputs)
    assert found.shape[-1] == 96
    torch.testing.assert_close(found[:, head.draft_vocab], wanted, rtol=1e-5, atol=1e-5)


def test_vllm_keeps_a_draft_vocabulary(target: TargetModel, tmp_path: Path) -> None:
    head = make_head(target, draft_vocab_size=40)
    export = write_as("dflash-vllm", head, tmp_path / "head")
    files = Folder(tmp_path / "head")
    assert (export.served, export.left_out) == (("vllm",), ())
    assert files.config["draft_vocab_size"] == 40
    kept = head.draft_vocab
    assert kept is not None
    rows = target.lm_head.weight[kept]
    assert torch.equal(files.tensors["lm_head.weight"], rows)
    assert from_offsets(files.tensors["d2t"]).tolist() == kept.tolist()

    again = read_as("dflash-vllm", tmp_path / "head", target)
    assert again.config.own_fields() == head.config.own_fields()
    features, tokens = example(head)
    embedding = target.embedding.get_parameter("weight")
    hidden = engine_rows(DFLASH_VLLM, tmp_path / "head", embedding, features, tokens[0])[1:]
    wanted = own_logits(head, features, tokens)
    assert torch.equal(own_logits(again, features, tokens), wanted)
    torch.testing.assert_close(
        hidden @ files.tensors["lm_head.weight"].T, wanted, rtol=1e-4, atol=1e-4
    )


def test_vllm_s_form_is_for_draft_vocabularies(target: TargetModel, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="no draft vocabulary: dflash is the form"):
        write_as("dflash-vllm", make_head(target), tmp_path / "head")
    assert not (tmp_path / "head").exists()


# Files of other trainers ------------------------------------------------------------------------


def test_z_lab_s_config_is_enough(target: TargetModel, tmp_path: Path) -> None:
    """What the released files have, and nothing else."""
    head = make_head(target)
    files = written(head, tmp_path / "head")
    files.config = {key: files.config[key] for key in LAYERS} | {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "block_size": 4,
        "num_target_layers": 6,
        "rope_scaling": None,
        "sliding_window": None,
        "use_sliding_window": False,
        "dtype": "float32",
        "dflash_config": {"mask_token_id": 7, "target_layer_ids": [1, 2, 4]},
    }
    files.save()
    assert dialect_of(tmp_path / "head") is DFLASH
    again = read_head(tmp_path / "head", target)
    inputs = example(head)
    assert torch.equal(own_logits(again, *inputs), own_logits(head, *inputs))
    with pytest.raises(ExportError, match="key max_position_embeddings is missing"):
        check_folder(tmp_path / "head", target, DFLASH)


def test_layers_that_a_file_does_not_name_are_the_engines(
    target: TargetModel, tmp_path: Path
) -> None:
    head = make_head(target, feature_layers=[2, 4])  # ids 1 and 3: one for each layer of the head
    files = written(head, tmp_path / "head")
    del files.config["eagle_aux_hidden_state_layer_ids"]
    files.config["dflash_config"] = {"mask_token_id": 7}
    files.save()
    assert read_head(tmp_path / "head", target).feature_layers == (2, 4)


@pytest.mark.parametrize(
    ("kinds", "causal"),
    [("full_attention", False), ("sliding_attention", True)],
)
def test_causality_that_a_file_does_not_name_goes_by_the_layers(
    target: TargetModel, tmp_path: Path, kinds: str, causal: bool
) -> None:
    head = make_head(target, sliding_window=9, causal=True)
    files = written(head, tmp_path / "head")
    del files.config["is_causal"], files.config["dflash_config"]["causal"]
    files.config["layer_types"] = [kinds] * 2
    files.config["dflash_config"]["use_swa"] = False
    files.save()
    assert read_head(tmp_path / "head", target).config.causal is causal


def test_a_copy_of_the_target_s_matrix_is_taken_for_what_it_is(
    target: TargetModel, tmp_path: Path
) -> None:
    files = written(make_head(target), tmp_path / "head")
    files.tensors = {f"model.{name}": tensor for name, tensor in files.tensors.items()}
    files.tensors["lm_head.weight"] = target.lm_head.weight.clone()
    files.save()
    read_head(tmp_path / "head", target)
    files.tensors["lm_head.weight"][0, 0] += 1
    files.save()
    with pytest.raises(ExportError, match=r"lm_head.weight is not the output matrix of 'tiny'"):
        read_head(tmp_path / "head", target)


def test_sglang_has_no_id_for_the_embedding(target: TargetModel, tmp_path: Path) -> None:
    export = write_as("dflash", make_head(target, feature_layers=[0, 4]), tmp_path / "head")
    assert export.served == ("vllm", "llama.cpp")
    assert any("layer id -1 here, which SGLang refuses" in note for note in export.notes)


@pytest.mark.parametrize("name", VARIANTS)
def test_engines_that_are_named_compute_it(target: TargetModel, tmp_path: Path, name: str) -> None:
    """As their loaders, in the newest version that was read, understand the folder."""
    export = write_as("dflash", make_head(target, **VARIANTS[name]), tmp_path / "head")
    head = read_as("dflash", tmp_path / "head", target)
    problems = {loader.engine: p for loader, p in engine_problems(tmp_path / "head", head).items()}
    assert set(problems) == {"sglang", "vllm"}
    for engine, found in problems.items():
        assert bool(found) == (engine not in export.served), (engine, found)
