"""Files of ``speculators`` that Headway did not write, and what is wrong with some."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING

from drafters import TargetModel
from drafters.export import ExportError, check_folder, dialect_named, read_head
from tests.drafters.export.speculators_heads import (
    BLOCK_IDS,
    EAGLE_IDS,
    LAYERS,
    VARIANTS,
    Edit,
    logits,
    make_head,
    written,
)
from tests.tiny import tiny_target


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target(dtype=torch.float32)


# Files of the package ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_a_nested_config_with_only_what_differs_from_defaults(
    name: str, target: TargetModel, tmp_path: Path
) -> None:
    """What is missing means the default of the nested config's class in transformers."""
    head = make_head(name, target)
    edit = Edit(written(head, tmp_path / "head"))
    defaults = CONFIG_MAPPING[edit.layers["model_type"]]().to_dict()
    edit.config[LAYERS] = {
        key: value
        for key, value in edit.layers.items()
        if key == "model_type" or defaults.get(key) != value
    }
    for key in ("target_hidden_size", "torch_dtype"):
        edit.config.pop(key, None)
    edit.save()
    assert {"hidden_act", "attention_bias"}.isdisjoint(edit.layers)
    assert torch.equal(logits(read_head(tmp_path / "head", target)), logits(head))


def test_a_dflash_head_that_drafts_from_the_anchor(target: TargetModel, tmp_path: Path) -> None:
    edit = Edit(written(make_head("dflash", target), tmp_path / "head"))
    edit.config["sample_from_anchor"] = True
    edit.save()
    head = read_head(tmp_path / "head", target)
    assert (head.family, head.config.markov_type, head.num_drafts) == ("dspark", "none", 4)


def test_copies_of_the_target_that_older_releases_save(target: TargetModel, tmp_path: Path) -> None:
    head = make_head("dflash", target)
    edit = Edit(written(head, tmp_path / "head"))
    edit.tensors["embed_tokens.weight"] = target.embedding.weight.clone()
    edit.tensors["lm_head.weight"] = target.lm_head.weight.clone()
    edit.save()
    assert torch.equal(logits(read_head(tmp_path / "head", target)), logits(head))


def test_an_embedding_may_be_missing_where_it_is_the_target_s(
    target: TargetModel, tmp_path: Path
) -> None:
    head = make_head("eagle3", target)
    edit = Edit(written(head, tmp_path / "head"))
    del edit.tensors["embed_tokens.weight"]
    edit.save()
    assert torch.equal(logits(read_head(tmp_path / "head", target)), logits(head))


# What is wrong with a file ----------------------------------------------------------------------


def drop(name: str) -> Callable[[Edit], object]:
    return lambda edit: edit.tensors.pop(name)


def add(name: str, amount: float = 1.0) -> Callable[[Edit], object]:
    return lambda edit: edit.tensors[name].add_(amount)


def put(name: str, tensor: Tensor) -> Callable[[Edit], object]:
    return lambda edit: edit.tensors.update({name: tensor})


def say(**changes: Any) -> Callable[[Edit], object]:
    return lambda edit: edit.config.update(changes)


def nest(**changes: Any) -> Callable[[Edit], object]:
    return lambda edit: edit.layers.update(changes)


def propose(**changes: Any) -> Callable[[Edit], object]:
    return lambda edit: edit.config["speculators_config"].update(changes)


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 8.0}
EAGLE, PEAGLE, DFLASH, DSPARK = (
    "eagle3 as their trainer has it",
    "peagle",
    "dflash reduced",
    "dspark",
)
VIOLATIONS: dict[str, tuple[str, Callable[[Edit], object], str]] = {
    "missing tensor": (
        EAGLE,
        drop("layers.0.hidden_norm.weight"),
        "missing tensor layers.0.hidden",
    ),
    "missing norm": (EAGLE, drop("input_norm.weight"), "missing tensor input_norm.weight"),
    "other prefix": (
        EAGLE,
        put("midlayer.hidden_norm.weight", torch.ones(32)),
        "unknown tensor mid",
    ),
    "transposed": (
        EAGLE,
        lambda edit: edit.tensors.update({"fc.weight": edit.tensors["fc.weight"].T.contiguous()}),
        "fc.weight.*that is its transpose",
    ),
    "map missing": (EAGLE, drop("d2t"), "missing tensor d2t: draft_vocab_size is below"),
    "absolute ids": (EAGLE, lambda e: e.tensors["d2t"].add_(torch.arange(40)), "must hold offsets"),
    "other marks": (EAGLE, lambda e: put("t2d", e.tensors["t2d"].roll(1))(e), "t2d does not mark"),
    "other embedding": (EAGLE, add("embed_tokens.weight"), "not the embedding of 'tiny'"),
    "other row": (PEAGLE, add("embed_tokens.weight"), "not the embedding of 'tiny'"),
    "mask missing": (PEAGLE, drop("mask_hidden"), "missing tensor mask_hidden"),
    "mask's row missing": (PEAGLE, drop("embed_tokens.weight"), "missing tensor embed_tokens"),
    "mask outside": (PEAGLE, say(mask_token_id=96), "mask_token_id 96 must lie in 0..95"),
    "one draft": (
        PEAGLE,
        propose(proposal_methods=[{"proposal_type": "greedy", "speculative_tokens": 1}]),
        "speculative_tokens must be at least 2",
    ),
    "trained output": (DFLASH, add("lm_head.weight"), "lm_head.weight is not the output matrix"),
    "no block": (DFLASH, say(block_size=1), "block_size 1 leaves no row"),
    "unknown Markov head": (DSPARK, say(markov_head_type="lstm"), "'lstm' is unknown"),
    "confidence of nothing": (DSPARK, say(markov_rank=0), "needs a markov_rank above 0"),
    "confidence missing": (
        DSPARK,
        drop("confidence_head.proj.bias"),
        "missing tensor confidence_head.proj.bias",
    ),
    "rnn in place": ("dspark rnn", say(sample_from_anchor=False), "sample_from_anchor=False"),
    "residual unsaid": (
        EAGLE,
        lambda e: e.config.pop("norm_before_residual"),
        "before_residual is mi",
    ),
    "two norms": (EAGLE, say(fc_norm=True), "exclude each other"),
    "layers as outputs": (EAGLE, say(**{EAGLE_IDS: [-1, 2, 4]}), "must lie in 0..5"),
    "the last layer": (DFLASH, say(**{BLOCK_IDS: [2, 4, 6]}), "must lie in 0..5"),
    "unsorted layers": (EAGLE, say(**{EAGLE_IDS: [3, 1, 5]}), "must be increasing"),
    "more draft tokens": (EAGLE, say(draft_vocab_size=97), "larger than vocab_size"),
    "narrow target": (EAGLE, say(target_hidden_size=64), "target_hidden_size 64 must be"),
    "other architecture": (EAGLE, say(architectures=["Other"]), "architectures must be"),
    "other algorithm": (EAGLE, propose(algorithm="eagle"), "algorithm must be 'eagle3'"),
    "no verifier": (EAGLE, propose(verifier={}), "verifier must have name_or_path"),
    "no method": (EAGLE, propose(proposal_methods=[]), "must be one of proposal_methods"),
    "tied": (EAGLE, say(tie_word_embeddings=True), "tie_word_embeddings must be False"),
    "other dtype": (EAGLE, say(dtype="float64"), "dtype float64 is not one of"),
    "other rope": (EAGLE, nest(rope_parameters=DYNAMIC), "'dynamic' RoPE"),
    "biases": (EAGLE, nest(attention_bias=True), "attention_bias must be False"),
    "activation": (EAGLE, nest(hidden_act="gelu"), "hidden_act must be 'silu'"),
    "other layers": (EAGLE, nest(model_type="gemma"), "model_type 'gemma' is not supported"),
    "unknown layers": (EAGLE, nest(model_type="nonsense"), "transformers has no model_type"),
    "other attention": (EAGLE, nest(layer_types=["chunked_attention"]), "chunked_attention is not"),
    "too many kinds": (EAGLE, nest(layer_types=["full_attention"] * 2), "refuses|has 2 entries"),
    "another vocabulary": (EAGLE, nest(vocab_size=97), "vocab_size is 97 but the target has 96"),
    "no Qwen3 layer": ("mtp", nest(model_type="llama"), "only qwen3"),
    "native module": ("mtp", nest(model_type="qwen3_5_text"), "modules that came with a target"),
    "two modules": ("mtp", say(num_nextn_predict_layers=2), "num_nextn_predict_layers must be 1"),
    "swapped name": (
        "mtp",
        lambda e: put(
            "mtp_layers.0.norm.weight", e.tensors.pop("mtp_layers.0.final_layernorm.weight")
        )(e),
        "unknown tensor mtp_layers.0.norm.weight.*missing tensor mtp_layers.0.final_layernorm",
    ),
}


@pytest.mark.parametrize("case", VIOLATIONS)
def test_what_is_wrong_is_named(case: str, target: TargetModel, tmp_path: Path) -> None:
    name, change, message = VIOLATIONS[case]
    edit = Edit(written(make_head(name, target), tmp_path / "head"))
    change(edit)
    edit.save()
    with pytest.raises(ValueError, match=message):
        read_head(tmp_path / "head", target)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda edit: edit.layers.pop("layer_types"), "key layer_types is missing"),
        (lambda edit: edit.layers.pop("rope_parameters"), "key rope_parameters is missing"),
        (nest(max_position_embeddings=64), "max_position_embeddings is 64 but the target has 512"),
        (lambda edit: edit.config.pop("embed_requires_grad"), "embed_requires_grad is missing"),
    ],
)
def test_the_strict_check_completes_nothing(
    change: Callable[[Edit], object], message: str, target: TargetModel, tmp_path: Path
) -> None:
    edit = Edit(written(make_head(EAGLE, target), tmp_path / "head"))
    dialect = dialect_named("speculators-eagle3")
    check_folder(tmp_path / "head", target, dialect)
    change(edit)
    edit.save()
    with pytest.raises(ExportError, match=message):
        check_folder(tmp_path / "head", target, dialect)
