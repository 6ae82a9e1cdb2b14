"""Details of published files that change nothing of the head, and are read."""

from pathlib import Path
from typing import Any

import pytest
import torch

from drafters import Drafter, TargetModel
from drafters.export import read_head, write_as
from tests.drafters.export.written import Written, assert_same, make_head
from tests.tiny import tiny_target


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target(torch.float32)


def written(
    family: str, dialect: str, target: TargetModel, path: Path, **options: Any
) -> tuple[Drafter, Written]:
    head = make_head(family, target, **options)
    return head, Written(write_as(dialect, head, path).folder)


@pytest.mark.parametrize("dialect", ["sglang", "vllm"])
def test_a_map_of_the_whole_vocabulary(dialect: str, target: TargetModel, tmp_path: Path) -> None:
    head, files = written("eagle3", dialect, target, tmp_path / "head")
    files.tensors["d2t"] = torch.zeros(96, dtype=torch.int64)
    files.tensors["t2d"] = torch.ones(96, dtype=torch.bool)
    assert_same(read_head(files.save(foreign=True), target), head)
    files.tensors["d2t"][:2] = torch.tensor([1, -1])  # a map all the same
    files.save()
    with pytest.raises(ValueError, match="unknown tensor d2t"):
        read_head(files.path, target)


def test_tensors_that_engines_do_without(target: TargetModel, tmp_path: Path) -> None:
    layers = {"feature_layers": [1, 3, 4]}
    head, files = written("eagle3", "sglang", target, tmp_path / "a", draft_vocab_size=40, **layers)
    del files.tensors["t2d"]
    del files.config["eagle_aux_hidden_state_layer_ids"]  # SGLang's list is nested
    assert_same(read_head(files.save(foreign=True), target), head)
    head, files = written("eagle3", "sglang", target, tmp_path / "b", **layers)
    del files.tensors["lm_head.weight"]
    files.config["draft_vocab_size"] = None
    head.lm_head.load_state_dict(target.lm_head.state_dict())
    assert_same(read_head(files.save(foreign=True), target), head)


def test_the_old_name_of_the_kind_of_rope(target: TargetModel, tmp_path: Path) -> None:
    _, files = written("eagle3", "sglang", target, tmp_path / "head")
    files.config["rope_scaling"] = {"type": "linear", "factor": 2.0}
    del files.config["rope_parameters"]
    head = read_head(files.save(foreign=True), target)
    assert head.config.rope_extension == {"rope_type": "linear", "factor": 2.0}


def test_a_config_copied_from_a_target_that_ties_its_matrices(
    target: TargetModel, tmp_path: Path
) -> None:
    for family, dialect in (("dflash", "dflash"), ("dspark", "dspark")):
        options = {"num_layers": 2, "mask_token_id": 90}
        head, files = written(family, dialect, target, tmp_path / family, **options)
        files.config["tie_word_embeddings"] = True
        assert_same(read_head(files.save(foreign=True), target), head)
