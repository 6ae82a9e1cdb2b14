"""DSpark's three forms: names, keys, what engines compute from them, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import embedding as rows_of

from drafters import TargetModel
from drafters.dspark import DSparkDrafter
from drafters.export import DIALECTS, read_as, read_head, write_as
from drafters.export.engines import engine_problems
from drafters.export.registry import dialect_of
from drafters.vocab import from_offsets
from tests.blocks import block_head
from tests.drafters.export.block_engine import Folder, engine_rows, example, own_logits
from tests.tiny import tiny_target

R = 8
SHAPE: dict[str, Any] = {"num_layers": 2, "block_size": 4, "mask_token_id": 7}
SHAPE |= {"feature_layers": [2, 3, 5], "markov_rank": R}
FORMS = ("dspark", "dspark-specforge", "dspark-modelopt")
VARIANTS: dict[str, dict[str, Any]] = {
    "vanilla": {"confidence_head": True},
    "gated": {"markov_type": "gated", "confidence_head": True},
    "gated with a bias": {"markov_type": "gated", "markov_bias": True},
    "rnn": {"markov_type": "rnn"},
    "rnn with a bias": {"markov_type": "rnn", "markov_bias": True, "confidence_head": True},
    "causal": {"causal": True},
    "sliding": {"sliding_window": 5, "confidence_head": True},
}
ELSEWHERE: dict[str, dict[str, Any]] = {  # what ModelOpt has no switch for
    "no markov head": {"markov_type": "none", "markov_rank": 256, "confidence_head": True},
    "in place": {"sample_from_anchor": False, "confidence_head": True},
    "confidence of the row": {"confidence_head": True, "confidence_with_markov": False},
}
REDUCED = {"draft_vocab_size": 40, "confidence_head": True}
CASES = [(form, name) for form in FORMS for name in VARIANTS]
CASES += [(form, name) for form in FORMS[:2] for name in ELSEWHERE]
CASES += [("dspark", "reduced")]


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target(dtype=torch.float32)


def make_head(target: TargetModel, **options: Any) -> DSparkDrafter:
    """A head whose every tensor, norms included, is random."""
    options = {**SHAPE, **options}
    return block_head(target, "dspark", noise=0.3, dtype=torch.float32, **options)


def variant(target: TargetModel, name: str) -> DSparkDrafter:
    return make_head(target, **{**VARIANTS, **ELSEWHERE, "reduced": REDUCED}[name])


def confidences(head: DSparkDrafter, tokens: Tensor, rows: Tensor) -> Tensor:
    """(K,) logits of the confidence output along a path."""
    assert head.confidence is not None
    state, found = head.begin_path(rows[:1]), []
    for row, token in zip(rows, tokens, strict=True):
        made, state = head.advance(row[None], token[None], state)
        found.append(head.confidence(made)[0])
    return torch.stack(found)


@torch.no_grad()
def engine_path(
    files: Folder, rows: Tensor, tokens: Tensor, output: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Logits (K, Vd) and confidences (K,) along a path, as SGLang's heads compute them.

    Args:
        files: the export, of any form.
        rows: (K, H) that draft.
        tokens: (K,) before each draft.
        output: (Vd, H).
    """
    flat = files.config["dflash_config"].get("shift_label", False)
    w = files.tensors
    markov, confident = (
        ("", "confidence_proj") if flat else ("markov_head.", "confidence_head.proj")
    )
    kind, rank = files.config["markov_head_type"], files.config["markov_rank"]
    state, logits, chances = torch.zeros(rank), [], []
    for row, token in zip(rows, tokens, strict=True):
        base, seen = output @ row, row
        if rank:
            latent = e = rows_of(token, w[f"{markov}markov_w1.weight"])
            if kind == "gated":
                pair = torch.cat((row, e))
                gate = w[f"{markov}gate_proj.weight"] @ pair + w[f"{markov}gate_proj.bias"]
                latent = gate.sigmoid() * e
            if kind == "rnn":
                joint = w[f"{markov}joint_proj.weight"] @ torch.cat((state, e, row))
                keep, new, out = (joint + w[f"{markov}joint_proj.bias"]).chunk(3)
                state = keep.sigmoid() * state + (1 - keep.sigmoid()) * new.tanh()
                latent = out.tanh()
            base = base + w[f"{markov}markov_w2.weight"] @ latent
            if files.config["confidence_head_with_markov"]:
                seen = torch.cat((row, e))
        logits.append(base)
        if files.config["enable_confidence_head"]:
            chances.append(w[f"{confident}.weight"] @ seen + w[f"{confident}.bias"])
    return torch.stack(logits), torch.cat(chances) if chances else None


@pytest.mark.parametrize(("form", "name"), CASES)
def test_a_head_comes_back_and_an_engine_computes_the_same(
    target: TargetModel, tmp_path: Path, form: str, name: str
) -> None:
    head = variant(target, name)
    export = write_as(form, head, tmp_path / "head")
    assert export.left_out == ()
    again = read_as(form, tmp_path / "head", target)
    assert again.state_dict().keys() == head.state_dict().keys()
    for key, tensor in head.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor), key
    assert again.config.own_fields() == head.config.own_fields()

    files, (features, tokens) = Folder(tmp_path / "head"), example(head)
    wanted = own_logits(head, features, tokens)
    assert torch.equal(own_logits(again, features, tokens), wanted)
    table = target.embedding.get_parameter("weight")
    rows = engine_rows(DIALECTS[form], tmp_path / "head", table, features, tokens[0])
    rows = rows if files.config["sample_from_anchor"] else rows[1:]
    output = files.tensors.get("lm_head.weight", target.lm_head.weight)
    found, chances = engine_path(files, rows, tokens, output)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert (chances is None) == (head.confidence is None)
    if chances is not None:
        own = confidences(head, tokens, rows)
        torch.testing.assert_close(chances, own, rtol=1e-4, atol=1e-4)


# What is written --------------------------------------------------------------------------------

BLOCK = {
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
NETWORK = {"fc.weight": [32, 96], "hidden_norm.weight": [32], "norm.weight": [32]}
NETWORK |= {f"layers.{i}.{name}": shape for i in range(2) for name, shape in BLOCK.items()}
HEADS: dict[str, dict[str, list[int]]] = {
    "dspark": {
        "markov_head.markov_w1.weight": [96, R],
        "markov_head.markov_w2.weight": [96, R],
        "markov_head.gate_proj.weight": [R, 32 + R],
        "markov_head.gate_proj.bias": [R],
        "confidence_head.proj.weight": [1, 32 + R],
        "confidence_head.proj.bias": [1],
        "embed_tokens.weight": [96, 32],
        "lm_head.weight": [96, 32],
    },
    "dspark-specforge": {
        "markov_head.markov_w1.weight": [96, R],
        "markov_head.markov_w2.weight": [96, R],
        "markov_head.gate_proj.weight": [R, 32 + R],
        "markov_head.gate_proj.bias": [R],
        "confidence_head.proj.weight": [1, 32 + R],
        "confidence_head.proj.bias": [1],
    },
    "dspark-modelopt": {
        "markov_w1.weight": [96, R],
        "markov_w2.weight": [96, R],
        "gate_proj.weight": [R, 32 + R],
        "gate_proj.bias": [R],
        "confidence_proj.weight": [1, 32 + R],
        "confidence_proj.bias": [1],
    },
}
ARCHITECTURES = {
    "dspark": "Qwen3DSparkModel",
    "dspark-specforge": "DSparkDraftModel",
    "dspark-modelopt": "DFlashDraftModel",
}
NESTED: dict[str, dict[str, Any]] = {
    "dspark": {},
    "dspark-specforge": {
        "projector_type": "dspark",
        "attention_mode": "gqa",
        "markov_rank": R,
        "markov_head_type": "gated",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    },
    "dspark-modelopt": {
        "projector_type": "dspark",
        "shift_label": True,
        "use_confidence_head": True,
        "markov_rank": R,
        "markov_head_type": "gated",
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_the_file_holds_what_the_form_names(target: TargetModel, tmp_path: Path, form: str) -> None:
    write_as(form, variant(target, "gated"), tmp_path / "head")
    files = Folder(tmp_path / "head")
    shapes = {name: list(tensor.shape) for name, tensor in files.tensors.items()}
    assert shapes == NETWORK | HEADS[form]
    bias = "gate_proj.bias" if form == "dspark-modelopt" else "markov_head.gate_proj.bias"
    assert not files.tensors[bias].any(), "SGLang would leave a random one"


@pytest.mark.parametrize("form", FORMS)
def test_every_key_is_written(target: TargetModel, tmp_path: Path, form: str) -> None:
    write_as(form, variant(target, "gated"), tmp_path / "head")
    config = Folder(tmp_path / "head").config
    assert config == {
        "architectures": [ARCHITECTURES[form]],
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
        "layer_types": ["full_attention"] * 2,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 2,
        "is_causal": False,
        "eagle_aux_hidden_state_layer_ids": [2, 3, 5],
        "target_layer_ids": [1, 2, 4],
        "mask_token_id": 7,
        "num_anchors": 512,
        "markov_rank": R,
        "markov_head_type": "gated",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "sample_from_anchor": True,
        "dspark_bonus_anchor": False,
        "dflash_config": {
            "mask_token_id": 7,
            "target_layer_ids": [1, 2, 4],
            "block_size": 4,
            "causal": False,
            "use_swa": False,
            **NESTED[form],
        },
    }


def test_a_reduced_vocabulary_brings_its_rows(target: TargetModel, tmp_path: Path) -> None:
    head = variant(target, "reduced")
    write_as("dspark", head, tmp_path / "head")
    files = Folder(tmp_path / "head")
    assert files.config["draft_vocab_size"] == 40
    assert list(files.tensors["markov_head.markov_w1.weight"].shape) == [96, R]
    assert list(files.tensors["markov_head.markov_w2.weight"].shape) == [40, R]
    kept = head.draft_vocab
    assert kept is not None
    assert from_offsets(files.tensors["d2t"]).tolist() == kept.tolist()
    assert torch.equal(files.tensors["lm_head.weight"], target.lm_head.weight[kept])
    assert files.tensors["t2d"].nonzero().flatten().tolist() == kept.tolist()


@pytest.mark.parametrize(("form", "name"), CASES)
def test_a_folder_is_told_without_a_manifest(
    target: TargetModel, tmp_path: Path, form: str, name: str
) -> None:
    head = variant(target, name)
    write_as(form, head, tmp_path / "head")
    Folder(tmp_path / "head").save()
    assert dialect_of(tmp_path / "head").name == form
    again, inputs = read_head(tmp_path / "head", target), example(head)
    assert torch.equal(own_logits(again, *inputs), own_logits(head, *inputs))


@pytest.mark.parametrize(("form", "name"), CASES)
def test_engines_that_are_named_compute_it(
    target: TargetModel, tmp_path: Path, form: str, name: str
) -> None:
    """As their loaders, in the newest version that was read, understand the folder."""
    export = write_as(form, variant(target, name), tmp_path / "head")
    head = read_as(form, tmp_path / "head", target)
    problems = {loader.engine: p for loader, p in engine_problems(tmp_path / "head", head).items()}
    assert set(problems) == ({"sglang", "vllm"} if form != "dspark-modelopt" else set())
    for engine, found in problems.items():
        assert bool(found) == (engine not in export.served), (engine, found)
