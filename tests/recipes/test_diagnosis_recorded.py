"""What was recorded with an export names a fault in a head that knows nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafters import TargetModel
from drafters.export import write_native
from drafters.export.golden import GOLDEN
from recipes.diagnosis import Diagnosis, Evidence
from tests.drafters.export.written import make_head
from tests.recipes.diagnosing import (
    BLOCK,
    PARALLEL,
    diagnosed,
    edited,
    evidence_of,
    field,
    small_target,
)

pytestmark = pytest.mark.slow

D = 32


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return small_target()


@pytest.fixture(scope="module")
def evidence(target: TargetModel) -> Evidence:
    return evidence_of(target, 6)


def halves(tensors: dict[str, Tensor]) -> None:
    tensors["fc.weight"] = tensors["fc.weight"].roll(D, 1)


def rolled(tensors: dict[str, Tensor]) -> None:
    tensors["draft_vocab"] = tensors["draft_vocab"].roll(1)


STRETCHED = {"rope_type": "linear", "factor": 8.0}
EAGLE3 = {"draft_vocab_size": 32, "feature_layers": [1, 3, 4]}
SPARK = {**BLOCK, "markov_rank": 8}
PLANTED: list[tuple[str, str, dict[str, Any], str, Any, Any]] = [
    # (fault, family, options, what is named, config, tensors)
    ("layer ids", "eagle3", EAGLE3, "layer ids", field(feature_layers=[2, 4, 5]), None),
    ("a stretch", "eagle3", EAGLE3, "rope", field(rope_extension=STRETCHED), None),
    ("another base", "mtp", {}, "rope", field(rope_theta=100.0), None),
    ("a residual", "eagle3", EAGLE3, "norm", field(norm_before_residual=True), None),
    ("fed back", "eagle3", EAGLE3, "norm", field(norm_output=True), None),
    ("a map one row off", "eagle3", EAGLE3, "vocabulary", None, rolled),
    ("halves", "eagle1", {}, "concat", None, halves),
    ("causal", "dflash", BLOCK, "causality", field(causal=True), None),
    ("mask token", "dflash", BLOCK, "mask token", field(mask_token_id=20), None),
    ("block size", "dflash", BLOCK, "block size", field(block_size=5), None),
    ("in place", "dspark", SPARK, "anchor", field(sample_from_anchor=False), None),
    ("layer ids", "peagle", PARALLEL, "layer ids", field(feature_layers=[0, 2, 3]), None),
]


@pytest.mark.parametrize(("fault", "family", "options", "check", "config", "tensors"), PLANTED)
def test_the_planted_fault_is_named(
    fault: str,
    family: str,
    options: dict[str, Any],
    check: str,
    config: Any,
    tensors: Any,
    target: TargetModel,
    evidence: Evidence,
    tmp_path: Path,
) -> None:
    whole = tmp_path / "whole"
    write_native(make_head(family, target, **options), whole)
    assert said(diagnosed(whole, target, evidence)) <= {"trained"}
    broken = edited(whole, tmp_path / "broken", config, tensors)
    (broken / GOLDEN).write_bytes((whole / GOLDEN).read_bytes())
    assert said(diagnosed(broken, target, evidence)) - {"trained"} == {check}


def test_without_the_record_nothing_is_known(
    target: TargetModel, evidence: Evidence, tmp_path: Path
) -> None:
    """The other side of the test above: such a head's text says nothing."""
    write_native(make_head("dflash", target, **BLOCK), tmp_path / "whole")
    broken = edited(tmp_path / "whole", tmp_path / "broken", field(causal=True))
    assert said(diagnosed(broken, target, evidence)) == {"trained"}


def test_golden_logits_of_another_target_prove_nothing(target: TargetModel, tmp_path: Path) -> None:
    write_native(make_head("eagle1", target), tmp_path / "whole")
    other = small_target(seed=1)
    found = said(diagnosed(tmp_path / "whole", other, evidence_of(other, 6)))
    assert "fingerprint" in found
    assert "tensors" not in found


def said(diagnosis: Diagnosis) -> set[str]:
    return {finding.check for finding in diagnosis.faults}


def test_a_weight_that_no_reading_explains(
    target: TargetModel, evidence: Evidence, tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    write_native(make_head("eagle1", target), whole)
    generator = torch.Generator().manual_seed(0)

    def stirred(tensors: dict[str, Tensor]) -> None:
        tensors["fc.weight"] += torch.randn(tensors["fc.weight"].shape, generator=generator)

    broken = edited(whole, tmp_path / "broken", None, stirred)
    (broken / GOLDEN).write_bytes((whole / GOLDEN).read_bytes())
    found = diagnosed(broken, target, evidence)
    assert [f.message for f in found.faults if f.check == "tensors"] == [
        "the head no longer gives the logits that were recorded with its export"
    ]


@pytest.mark.parametrize(("layers", "side"), [([3, 4, 5], "above"), ([1, 2, 3], "below")])
def test_layers_beside_the_usual_ones_are_mentioned(
    layers: list[int], side: str, target: TargetModel, evidence: Evidence, tmp_path: Path
) -> None:
    """An untrained head cannot tell them apart; with a record there is nothing to tell."""
    options = {"draft_vocab_size": 32, "feature_layers": layers}
    write_native(make_head("eagle3", target, **options), tmp_path / "whole")
    bare = edited(tmp_path / "whole", tmp_path / "bare")
    for folder, mentioned in ((bare, True), (tmp_path / "whole", False)):
        found = diagnosed(folder, target, evidence).findings
        [told] = [finding for finding in found if finding.check == "layer ids"]
        assert (told.verdict == "unknown") == mentioned
        assert (f"is one {side} the usual [2, 3, 4]" in told.message) == mentioned
