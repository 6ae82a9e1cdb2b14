"""Hydra in its authors' form: what is written, what is read, what their code computes with it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from drafters import HydraDrafter, TargetModel
from drafters.export import ExportError, dialect_of, golden_inputs, read_head, write_as
from drafters.export.dialects.hydra import HYDRA
from drafters.export.reading import check_folder
from drafters.layers import repeat_heads, rotate
from tests.drafters.export.written import Written, assert_same, logits, make_head
from tests.tiny import tiny_target

WEIGHTS = "hydra_lm_head.pt"
PREFIX = "prefix_embeding_layer"
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"num_heads": 3},
    "two blocks": {"num_heads": 2, "mlp_layers": 2},
    "biased": {"num_heads": 2, "lm_head_bias": True},
    "shared": {"num_heads": 2, "shared_lm_head": True},
    "plus": {
        "num_heads": 2,
        "mlp_layers": 2,
        "num_layers": 1,
        "prefix_norm": True,
        "lm_head_bias": True,
    },
    "plus shared": {"num_layers": 1, "prefix_norm": True, "shared_lm_head": True},
}


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target(dtype=torch.float32)


def hydra(target: TargetModel, **options: Any) -> HydraDrafter:
    head = make_head("hydra", target, **options)
    assert isinstance(head, HydraDrafter)
    return head


def written(target: TargetModel, folder: Path, **options: Any) -> Written:
    write_as("hydra", hydra(target, **options), folder)
    return Written(folder, WEIGHTS)


# What is written ----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_a_head_comes_back_the_same(
    options: dict[str, Any], target: TargetModel, tmp_path: Path
) -> None:
    head = hydra(target, **options)
    write_as("hydra", head, tmp_path / "head")
    assert_same(read_head(tmp_path / "head", target), head)
    Written(tmp_path / "head", WEIGHTS).save(foreign=True)
    assert dialect_of(tmp_path / "head").name == "hydra"
    assert_same(read_head(tmp_path / "head", target), head)


def test_names_of_plain_heads(target: TargetModel, tmp_path: Path) -> None:
    found = written(target, tmp_path / "head", num_heads=2, mlp_layers=2)
    assert found.shapes == {
        "hydra_mlp.0.0.linear.weight": [32, 64],
        "hydra_mlp.0.0.linear.bias": [32],
        "hydra_mlp.0.0.res_connection.weight": [32, 64],
        "hydra_mlp.0.0.res_connection.bias": [32],
        "hydra_mlp.0.1.linear.weight": [32, 32],
        "hydra_mlp.0.1.linear.bias": [32],
        "hydra_lm_head.0.weight": [96, 32],
        "hydra_lm_head.0.bias": [96],
        "hydra_mlp.1.0.linear.weight": [32, 96],
        "hydra_mlp.1.0.linear.bias": [32],
        "hydra_mlp.1.0.res_connection.weight": [32, 96],
        "hydra_mlp.1.0.res_connection.bias": [32],
        "hydra_mlp.1.1.linear.weight": [32, 32],
        "hydra_mlp.1.1.linear.bias": [32],
        "hydra_lm_head.1.weight": [96, 32],
        "hydra_lm_head.1.bias": [96],
    }
    assert not found.tensors["hydra_lm_head.1.bias"].any()  # else their code makes one up


def test_names_with_a_prefix_layer(target: TargetModel, tmp_path: Path) -> None:
    """Dropouts count as blocks."""
    options = {"num_heads": 1, "mlp_layers": 2, "num_layers": 1, "prefix_norm": True}
    found = written(target, tmp_path / "head", **options)
    assert found.shapes == {
        "hydra_mlp.0.1.linear.weight": [32, 64],
        "hydra_mlp.0.1.linear.bias": [32],
        "hydra_mlp.0.1.res_connection.weight": [32, 64],
        "hydra_mlp.0.1.res_connection.bias": [32],
        "hydra_mlp.0.3.linear.weight": [32, 32],
        "hydra_mlp.0.3.linear.bias": [32],
        "hydra_lm_head.0.1.weight": [96, 32],
        "hydra_lm_head.0.1.bias": [96],
        f"{PREFIX}.layers.0.self_attn.q_proj.weight": [32, 32],
        f"{PREFIX}.layers.0.self_attn.k_proj.weight": [16, 32],
        f"{PREFIX}.layers.0.self_attn.v_proj.weight": [16, 32],
        f"{PREFIX}.layers.0.self_attn.o_proj.weight": [32, 32],
        f"{PREFIX}.layers.0.mlp.gate_proj.weight": [48, 32],
        f"{PREFIX}.layers.0.mlp.up_proj.weight": [48, 32],
        f"{PREFIX}.layers.0.mlp.down_proj.weight": [32, 48],
        f"{PREFIX}.layers.0.input_layernorm.weight": [32],
        f"{PREFIX}.layers.0.post_attention_layernorm.weight": [32],
        f"{PREFIX}.norm.weight": [32],
    }
    assert found.config == {
        "hydra_num_heads": 1,
        "hydra_num_layers": 2,
        "hydra_head_arch": "prefix-mlp",
        "grounded_heads": True,
        "hidden_state_offset": 0,
        "base_model_name_or_path": "tiny",
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "torch_dtype": "float32",
    }


def test_that_nothing_serves_it_is_said(target: TargetModel, tmp_path: Path) -> None:
    head = hydra(target, shared_lm_head=True, confidence_head=True)
    export = write_as("hydra", head, tmp_path / "head")
    said = " ".join(export.notes)
    for part in ("no serving engine loads Hydra", "copy of the target's", "confidence output"):
        assert part in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_vocab_size": 40}, "draft_vocab_size=40: .* train with the whole vocabulary"),
        ({"mlp_layers": 3}, "mlp_layers=3: .* one module for all blocks"),
        ({"num_layers": 1}, "prefix_norm=False: .* train with prefix_norm=True"),
        ({"num_layers": 1, "prefix_norm": True, "qk_norm": True}, "qk_norm=True"),
        (
            {"num_layers": 1, "prefix_norm": True, "intermediate_size": 40},
            "intermediate_size=40: the authors' prefix layer has the target's, 48",
        ),
    ],
)
def test_what_their_code_does_not_build_is_refused(
    options: dict[str, Any], message: str, target: TargetModel, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match=message):
        written(target, tmp_path / "head", **options)


def test_blocks_that_are_equal_can_be_written(target: TargetModel, tmp_path: Path) -> None:
    """As in heads that were trained by the authors' code."""
    head = hydra(target, num_heads=2, mlp_layers=4)
    for block in head.blocks:
        for other in block[2:]:
            other.load_state_dict(block[1].state_dict())
    write_as("hydra", head, tmp_path / "head")
    assert_same(read_head(tmp_path / "head", target), head)


def test_half_precision(target: TargetModel, tmp_path: Path) -> None:
    head = hydra(target, shared_lm_head=True).bfloat16()
    write_as("hydra", head, tmp_path / "head")
    again = read_head(tmp_path / "head", target, torch.bfloat16)
    assert again.config.shared_lm_head and torch.equal(logits(again), logits(head))


# What the authors' code computes ------------------------------------------------------------------


class Authors:
    """Their two kinds of heads, over the golden rows.

    Args:
        folder: as written.
        target: whose embedding they read.
    """

    def __init__(self, folder: Written, target: TargetModel) -> None:
        self.tensors, self.config, self.target = folder.tensors, folder.config, target
        self.step = 2 if folder.config["hydra_head_arch"] == "prefix-mlp" else 1

    def affine(self, name: str, x: Tensor) -> Tensor:
        return linear(x, self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"])

    def norm(self, name: str, x: Tensor) -> Tensor:
        weight = self.tensors[f"{name}.weight"]
        return rms_norm(x, weight.shape, weight, self.config["rms_norm_eps"])

    def prefix(self, hidden: Tensor) -> Tensor:
        """A Llama model of one layer, its norm included: (T, H) -> (T, H)."""
        if self.step == 1:
            return hidden
        layer, size = f"{PREFIX}.layers.0", self.config["head_dim"]

        def project(name: str, x: Tensor) -> Tensor:
            return x @ self.tensors[f"{layer}.{name}.weight"].T

        x = self.norm(f"{layer}.input_layernorm", hidden)
        parts = (project(f"self_attn.{name}_proj", x) for name in "qkv")
        q, k, v = (part.view(1, len(x), -1, size).transpose(1, 2) for part in parts)
        places = torch.arange(len(x))[None]
        q, k = (rotate(part, places, self.config["rope_theta"]) for part in (q, k))
        k, v = (repeat_heads(part, q.shape[1] // k.shape[1]) for part in (k, v))
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = hidden + project("self_attn.o_proj", mixed.transpose(1, 2).flatten(2)[0])
        x = self.norm(f"{layer}.post_attention_layernorm", hidden)
        x = silu(project("mlp.gate_proj", x)) * project("mlp.up_proj", x)
        return self.norm(f"{PREFIX}.norm", hidden + project("mlp.down_proj", x))

    def logits(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """(T, H) and (T + K - 1,) -> (K, V) of the last row."""
        row, out = self.prefix(hidden)[-1], []
        for head in range(self.config["hydra_num_heads"]):
            row = torch.cat((row, self.target.embedding.weight[tokens[len(hidden) - 1 + head]]))
            name = f"hydra_mlp.{head}.{self.step - 1}"
            x = self.affine(f"{name}.res_connection", row)
            x = x + silu(self.affine(f"{name}.linear", row))
            for place in range(1, self.config["hydra_num_layers"]):
                name = f"hydra_mlp.{head}.{self.step * place + self.step - 1}"
                x = x + silu(self.affine(f"{name}.linear", x))
            output = f"hydra_lm_head.{head}" + (".1" if self.step == 2 else "")
            out.append(self.affine(output, x))
        return torch.stack(out)


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_their_code_computes_the_same_logits(
    options: dict[str, Any], target: TargetModel, tmp_path: Path
) -> None:
    head = hydra(target, **options)
    write_as("hydra", head, tmp_path / "head")
    inputs = golden_inputs(head)
    theirs = Authors(Written(tmp_path / "head", WEIGHTS), target)
    found = theirs.logits(inputs["features"], inputs["token_ids"])
    torch.testing.assert_close(found, logits(head), rtol=1e-4, atol=1e-4)


# Heads of other trainers --------------------------------------------------------------------------


def test_a_published_head(target: TargetModel, tmp_path: Path) -> None:
    """With what else their modules put into the file, and a config that says little."""
    head = hydra(target, num_heads=2, num_layers=1, prefix_norm=True, lm_head_bias=True)
    write_as("hydra", head, tmp_path / "head")
    folder = Written(tmp_path / "head", WEIGHTS)
    folder.tensors["input_embed_fn.weight"] = target.embedding.weight.detach().clone()
    folder.tensors[f"{PREFIX}.embed_tokens.weight"] = torch.randn(96, 32)
    folder.tensors[f"{PREFIX}.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    folder.config = {
        "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
        "grounded_heads": True,
        "hidden_state_offset": 0,
        "hydra_head_arch": "prefix-mlp",
        "hydra_num_heads": 2,
        "hydra_num_layers": 1,
    }
    assert_same(read_head(folder.save(foreign=True), target), head)
    folder.tensors["input_embed_fn.weight"][0] += 1
    folder.save()
    with pytest.raises(ExportError, match="not the embedding of 'tiny'"):
        read_head(tmp_path / "head", target)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hydra_head_arch": "eagle-attn"}, "hydra_head_arch='eagle-attn' is not supported"),
        ({"grounded_heads": False}, "grounded_heads must be True"),
        ({"hidden_state_offset": 1}, "hidden_state_offset=1 is not supported"),
        ({"hydra_head_arch": "prefix-mlp"}, "missing tensor prefix_embeding_layer"),
    ],
)
def test_a_head_of_another_kind_is_refused(
    changes: dict[str, Any], message: str, target: TargetModel, tmp_path: Path
) -> None:
    folder = written(target, tmp_path / "head")
    folder.config |= changes
    with pytest.raises(ExportError, match=message):
        read_head(folder.save(foreign=True), target)


class Runs:
    """Pickled, this runs code when it is opened."""

    def __reduce__(self) -> tuple[Callable, tuple]:
        return nn.Identity, ()


def test_a_pickle_with_code_is_refused(target: TargetModel, tmp_path: Path) -> None:
    folder = written(target, tmp_path / "head")
    torch.save({**folder.tensors, "more": Runs()}, folder.path / WEIGHTS)
    with pytest.raises(ExportError, match=r"hydra_lm_head.pt: refused: .* may run code"):
        check_folder(folder.path, target, HYDRA)
    with pytest.raises(ExportError, match="may run code"):
        read_head(folder.path, target)


# What would not be told ---------------------------------------------------------------------------

Change = Callable[[Written], object]


def put(name: str, tensor: Tensor) -> Change:
    return lambda folder: folder.tensors.update({name: tensor})


VIOLATIONS: dict[str, tuple[Change, str]] = {
    "missing": (
        lambda folder: folder.tensors.pop("hydra_lm_head.1.bias"),
        "missing tensor hydra_lm_head.1.bias",
    ),
    "unknown": (put("hydra_mlp.0.9.linear.bias", torch.ones(32)), "unknown tensor hydra_mlp.0.9"),
    "of another head": (
        put("hydra_mlp.1.0.linear.weight", torch.ones(32, 64)),
        r"hydra_mlp.1.0.linear.weight has shape \[32, 64\], the config asks for \[32, 96\]",
    ),
    "never trained": (
        put("hydra_lm_head.0.weight", torch.zeros(96, 32)),
        "hydra_lm_head.0.weight is all zeros",
    ),
    "not finite": (put("hydra_lm_head.0.bias", torch.full((96,), torch.inf)), "not finite"),
    "too many heads": (lambda folder: folder.config.update(hydra_num_heads=3), "missing tensor"),
    "another vocabulary": (
        lambda folder: folder.config.update(vocab_size=97),
        "vocab_size is 97 but the target has 96",
    ),
}


@pytest.mark.parametrize("violation", VIOLATIONS)
def test_violations_are_named(violation: str, target: TargetModel, tmp_path: Path) -> None:
    folder = written(target, tmp_path / "head", num_heads=2)
    check_folder(folder.path, target, HYDRA)
    change, message = VIOLATIONS[violation]
    change(folder)
    folder.save()
    with pytest.raises(ExportError, match=message):
        check_folder(folder.path, target, HYDRA)
