"""Files and texts that are odd: each gives a finding, or a `ValueError` that names the field."""

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from drafters import TargetModel, build_drafter
from drafters.export import DIALECTS, NATIVE, write_as, write_native
from drafters.export.golden import GOLDEN
from recipes.diagnosis import Diagnosis, Evidence, gather, load_head, variants
from recipes.diagnosis.findings import Finding
from tests.drafters.export.written import make_head
from tests.recipes.diagnosing import (
    BLOCK,
    PARALLEL,
    PROMPT,
    RECIPES,
    diagnosed,
    edited,
    evidence_of,
    faults,
    forgotten,
    small_target,
    trained,
    written,
)
from tests.recipes.test_diagnosis_dialects import PLANTED
from tests.tiny import tiny_tokenizer
from training.features import TargetBatch

pytestmark = pytest.mark.slow

Config = dict[str, Any]
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return small_target()


@pytest.fixture(scope="module")
def evidence(target: TargetModel) -> Evidence:
    return evidence_of(target, 6)


def said(found: Diagnosis, check: str) -> list[Finding]:
    return [finding for finding in found.findings if finding.check == check]


# Pairing ----------------------------------------------------------------------------------------


def tokens_behind(data: TargetBatch) -> TargetBatch:
    """Each row with the token after the one it should have."""
    data.batch.input_ids.copy_(data.batch.input_ids.roll(-1, 1))
    return data


def features_behind(data: TargetBatch) -> TargetBatch:
    assert data.features is not None
    return replace(data, features=data.features.roll(-1, 1))


def test_tokens_of_the_row_after_are_named(target: TargetModel, tmp_path: Path) -> None:
    trained(target, "eagle3", tokens_behind).save_pretrained(tmp_path / "head")
    assert faults(diagnosed(tmp_path / "head", target, evidence_of(target))) == {"pairing"}


def test_features_of_the_row_after_are_suspected_and_nothing_else(
    target: TargetModel, tmp_path: Path
) -> None:
    """A head that has learnt little leans on them as well: no fault, but no good head either."""
    trained(target, "eagle3", features_behind).save_pretrained(tmp_path / "head")
    found = diagnosed(tmp_path / "head", target, evidence_of(target))
    assert found.faults == []
    [told] = said(found, "pairing")
    assert told.verdict == "unknown"
    assert told.message.startswith("features are those of the row after? So read it drafts far")


def test_a_head_of_a_few_steps_is_not_blamed(target: TargetModel, tmp_path: Path) -> None:
    trained(target, "eagle1", steps=5).save_pretrained(tmp_path / "head")
    found = diagnosed(tmp_path / "head", target, evidence_of(target))
    assert found.faults == []
    assert [finding.verdict for finding in said(found, "pairing")] == ["unknown"]


def test_a_head_that_repeats_its_row_is_weak(target: TargetModel, tmp_path: Path) -> None:
    """Medusa's blocks start at zero; nothing is wrong with that but that it knows nothing."""
    build_drafter("medusa", target, num_heads=3, shared_lm_head=True).save_pretrained(
        tmp_path / "head"
    )
    found = diagnosed(tmp_path / "head", target, evidence_of(target))
    assert found.faults == []
    assert {finding.verdict for finding in said(found, "tensors")} == {"weak"}
    assert len(said(found, "tensors")) == 3


# What is recorded -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", RECIPES)
def test_a_head_in_half_precision_gives_its_own_logits(
    name: str, dtype: torch.dtype, target: TargetModel, tmp_path: Path
) -> None:
    """The evidence is of six texts and the head random: nothing but the record speaks."""
    family, options = RECIPES[name]
    head = make_head(family, target, **options)
    nn.Module.to(head, dtype=dtype)
    write_native(head, tmp_path / "head")
    found = diagnosed(tmp_path / "head", target, evidence_of(target, 2))
    assert faults(found) <= {"trained"}


def test_a_record_that_cannot_be_read(
    target: TargetModel, evidence: Evidence, tmp_path: Path
) -> None:
    write_native(make_head("eagle1", target), tmp_path / "head")
    (tmp_path / "head" / GOLDEN).write_bytes(b"no tensors")
    [told] = said(diagnosed(tmp_path / "head", target, evidence), "tensors")
    assert told.verdict == "unknown"
    assert "no record to compare with" in told.message


def test_layers_that_do_not_fit_are_not_told_to_be_in_the_file(
    target: TargetModel, evidence: Evidence, tmp_path: Path
) -> None:
    write_native(make_head("eagle3", target, feature_layers=[1, 3, 4]), tmp_path / "whole")
    other = edited(
        tmp_path / "whole", tmp_path / "other", lambda c: c.update(feature_layers=[2, 3, 7])
    )
    (other / GOLDEN).write_bytes((tmp_path / "whole" / GOLDEN).read_bytes())
    told = [f.message for f in said(diagnosed(other, target, evidence), "layer ids")]
    assert [message.split(":")[0] for message in told] == [
        "[2, 3, 7] do not fit",
        "[1, 3, 4] when it was exported",
    ]


# Tensors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_tensors_are_a_fault(
    dtype: torch.dtype, target: TargetModel, evidence: Evidence, tmp_path: Path
) -> None:
    make_head("eagle1", target).save_pretrained(tmp_path / "head")
    other = edited(
        tmp_path / "head",
        tmp_path / "other",
        None,
        lambda tensors: tensors.update({"fc.weight": tensors["fc.weight"].to(dtype)}),
    )
    [told] = said(diagnosed(other, target, evidence), "dtype")
    assert told.verdict == "FAULT"
    assert "fc.weight is stored as" in told.message


def test_a_map_beyond_the_vocabulary_is_read_back(
    target: TargetModel, evidence: Evidence, tmp_path: Path
) -> None:
    head = build_drafter("eagle3", target, draft_vocab_size=32, feature_layers=[1, 3, 4])
    head.set_draft_vocab(torch.arange(40))
    head.save_pretrained(tmp_path / "head")
    other = edited(
        tmp_path / "head",
        tmp_path / "other",
        None,
        lambda tensors: tensors["draft_vocab"].add_(torch.arange(32)),
    )
    told = said(diagnosed(other, target, evidence), "vocabulary")
    assert told[0].message == (
        "draft_vocab leads out of the target's vocabulary of 40: read less the number of the row"
    )
    back = load_head(other, target).head.draft_vocab
    assert back is not None
    assert torch.equal(back, load_file(tmp_path / "head" / "model.safetensors")["draft_vocab"])


def test_copies_of_the_target_are_told_from_others(target: TargetModel, tmp_path: Path) -> None:
    """An embedding of the head's own says nothing about the target; a copy does."""
    own = make_head("eagle3", target, own_embedding=True, draft_vocab_size=None)
    plain = make_head("eagle3", target, draft_vocab_size=32)
    for name, head, copied in (("own", own, False), ("plain", plain, True)):
        write_as("vllm", head, tmp_path / name, with_embeddings=copied)
        forgotten(tmp_path / name)
        told = [f.message for f in load_head(tmp_path / name, target).findings]
        assert ("the embedding in the file is this target's" in told) == copied


# Configs ----------------------------------------------------------------------------------------


def broken_config(source: Path, folder: Path, change: Callable[[Config], Any]) -> Path:
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("family", "options"), [("dflash", BLOCK), ("dspark", BLOCK), ("peagle", PARALLEL)]
)
def test_a_mask_token_that_is_none_of_the_targets(
    family: str, options: Config, target: TargetModel, tmp_path: Path
) -> None:
    make_head(family, target, **options).save_pretrained(tmp_path / "head")
    other = broken_config(
        tmp_path / "head", tmp_path / "other", lambda c: c.update(mask_token_id=40)
    )
    told = [f for f in load_head(other, target).findings if f.check == "mask token"]
    assert [finding.message for finding in told] == [
        "config.json names 40, which is no token of the target"
    ]


def test_layers_are_not_taken_for_prediction_modules(target: TargetModel, tmp_path: Path) -> None:
    """Tensors of a layer that the config does not count."""
    write_as("vllm-peagle", make_head("peagle", target, **PARALLEL), tmp_path / "head")
    forgotten(tmp_path / "head")
    other = broken_config(
        tmp_path / "head", tmp_path / "other", lambda c: c.update(num_hidden_layers=1)
    )
    loaded = load_head(other, target)
    assert loaded.dialect == "vllm-peagle"
    assert "tensors" in {finding.check for finding in loaded.findings}


def test_what_cannot_be_computed_is_no_fault(target: TargetModel, tmp_path: Path) -> None:
    write_as("eagle1", make_head("eagle1", target), tmp_path / "head")
    forgotten(tmp_path / "head")
    scaling = {"rope_type": "llama3", "factor": 8.0}
    other = broken_config(
        tmp_path / "head", tmp_path / "other", lambda c: c.update(rope_scaling=scaling)
    )
    told = [finding for finding in load_head(other, target).findings if finding.check == "rope"]
    assert told
    assert {finding.verdict for finding in told} == {"unknown"}
    assert all("what Headway does not compute" in finding.message for finding in told)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("head_dim", None),
        ("intermediate_size", "48"),
        ("block_size", None),
        ("num_layers", 2.5),
        ("rope_extension", "x"),
        ("feature_layers", 3),
        ("causal", 1),
        ("target_fingerprint", "abc"),
    ],
)
def test_values_of_another_type_are_refused_by_name(
    name: str, value: Any, target: TargetModel, tmp_path: Path
) -> None:
    make_head("dflash", target, **BLOCK).save_pretrained(tmp_path / "head")
    other = broken_config(tmp_path / "head", tmp_path / "other", lambda c: c.update({name: value}))
    with pytest.raises(ValueError, match=f"{name} must be"):
        load_head(other, target)


HEADS = {dialect: head for dialect, head, *_ in PLANTED}
"""A head that each dialect can hold."""


@pytest.mark.parametrize("dialect", [NATIVE, *DIALECTS])
def test_a_key_that_is_lost_or_odd_never_ends_in_a_traceback(
    dialect: str, target: TargetModel, tmp_path: Path
) -> None:
    """Each key of the file in turn: lost, null, a word, a negative number."""
    family, options = RECIPES[HEADS[dialect]]
    head = make_head(family, target, **options)
    source = tmp_path / "head"
    if dialect == NATIVE:
        head.save_pretrained(source)
    else:
        write_as(dialect, head, source)
    forgotten(source)
    config = json.loads((source / "config.json").read_text())
    for place, key in places(config):
        for value in (LOST, None, "odd", -1):
            changed = copy.deepcopy(config)
            inner = changed if place is None else changed[place]
            if value is LOST:
                del inner[key]
            else:
                inner[key] = value
            (source / "config.json").write_text(json.dumps(changed))
            try:
                load_head(source, target)
            except ValueError as error:
                assert str(error), (place, key, value)
            except Exception as error:
                raise AssertionError(f"{place}.{key} = {value!r}") from error


LOST = object()


def places(config: Config) -> list[tuple[str | None, str]]:
    """Keys at the top, and in every object below."""
    found: list[tuple[str | None, str]] = [(None, key) for key in config]
    for name, value in config.items():
        if isinstance(value, dict):
            found += [(name, key) for key in value]
    return found


# Texts and targets ------------------------------------------------------------------------------


def test_answers_shorter_than_a_block(target: TargetModel, tmp_path: Path) -> None:
    make_head("dflash", target, **{**BLOCK, "block_size": 16}).save_pretrained(tmp_path / "head")
    ids = written(target, 6, 9).tolist()
    short = gather(target, [row[:PROMPT] for row in ids], [row[PROMPT : PROMPT + 6] for row in ids])
    found = diagnosed(tmp_path / "head", target, short)
    assert 0 < len(found.overlap) < 15
    assert all(0 <= overlap <= 1 for overlap in found.overlap)
    json.dumps([finding.to_dict() for finding in found.findings], allow_nan=False)


@pytest.mark.parametrize(
    ("family", "layers", "options"), [("dflash", 3, {**BLOCK}), ("eagle3", 2, {})]
)
def test_heads_of_tiny_targets_keep_their_layers(
    family: str, layers: int, options: Config, tmp_path: Path
) -> None:
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    tiny = TargetModel(LlamaForCausalLM(config), tiny_tokenizer(40), "tiny")
    own = list(range(layers))[-2:]
    make_head(family, tiny, **{**options, "feature_layers": own}).save_pretrained(tmp_path / "head")
    loaded = load_head(tmp_path / "head", tiny)
    assert loaded.layers == tuple(own)
    assert loaded.findings == []


def test_changed_map_reads_other_rows(target: TargetModel, tmp_path: Path) -> None:
    """A copy of a copy, as the search makes when it goes on from a fault."""
    head = make_head("dflash", target, **BLOCK, draft_vocab_size=32)
    rows = torch.randn(3, 32)
    first = torch.arange(32)
    for step in (first, first + 8, first.flip(0)):
        changed = variants.changed(head, variants.with_vocab(step))
        assert changed is not None
        head = changed
        wanted = rows @ target.lm_head.weight[step].T
        assert torch.allclose(head.logits(rows, 0), wanted, atol=1e-5)
