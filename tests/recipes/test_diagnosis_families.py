"""Heads of every family, broken in the ways that the family makes possible; and good ones cleared.

As in ``test_diagnosis`` the heads are trained for seconds. Nothing is recorded beside them: only
the file and the text speak.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafters import TargetModel
from recipes.diagnosis import Evidence
from tests.recipes.diagnosing import (
    RECIPES,
    Workshop,
    diagnosed,
    edited,
    evidence_of,
    faults,
    field,
    noise,
    small_target,
)

pytestmark = pytest.mark.slow

Config = dict[str, Any]
Tensors = dict[str, Tensor]
D = 32


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return small_target()


@pytest.fixture(scope="module")
def evidence(target: TargetModel) -> Evidence:
    return evidence_of(target)


@pytest.fixture(scope="module")
def workshop(target: TargetModel, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(target, tmp_path_factory.mktemp("heads"))


@pytest.mark.parametrize("name", RECIPES)
def test_a_good_head_is_cleared(
    name: str, workshop: Workshop, target: TargetModel, evidence: Evidence
) -> None:
    found = diagnosed(workshop.head(name), target, evidence)
    assert found.faults == [], "\n".join(finding.line() for finding in found.faults)
    assert found.overlap[0] > found.constant + 0.15


def replaced(
    names: str | tuple[str, ...], value: Callable[[Tensor], Tensor]
) -> Callable[[Tensors], None]:
    """Every tensor whose name ends so."""

    def change(tensors: Tensors) -> None:
        chosen = [name for name in tensors if name.endswith(names)]
        assert chosen
        for name in chosen:
            tensors[name] = value(tensors[name])

    return change


def swapped(one: str, other: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if one in name]:
            partner = name.replace(one, other)
            tensors[name], tensors[partner] = tensors[partner], tensors[name]

    return change


def parts_moved(order: Callable[[list[Tensor]], list[Tensor]]) -> Callable[[Tensors], None]:
    """The inputs of Hydra's blocks joined in another order."""

    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if ".0.skip.w" in name or ".0.linear.w" in name]:
            tensors[name] = torch.cat(order(list(tensors[name].split(D, dim=1))), dim=1)

    return change


def one_late(tensors: Tensors) -> None:
    """Medusa's heads, each under the number of the next."""
    renamed = {}
    for name, tensor in tensors.items():
        kind, head, rest = name.split(".", 2)
        renamed[f"{kind}.{(int(head) + 1) % 3}.{rest}"] = tensor
    tensors.update(renamed)


def without(name: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        del tensors[name]

    return change


HIDDEN_LAST = parts_moved(lambda parts: [*parts[1:], parts[0]])
LATEST_FIRST = parts_moved(lambda parts: [parts[0], *reversed(parts[1:])])
PREFIX_NORM = "prefix_norm.weight"
QKV = tuple(f"midlayer.self_attn.{name}_proj.weight" for name in "qkv")
UP_ONE = field(feature_layers=[2, 4, 5])
PLANTED: list[tuple[str, str, str, Any, Any]] = [
    # (fault, head, what is named, config, tensors)
    ("heads one late", "medusa", "order", None, one_late),
    ("hidden state last", "hydra", "concat", None, HIDDEN_LAST),
    ("latest token first", "hydra", "concat", None, LATEST_FIRST),
    ("skip for linear", "hydra", "tensors", None, swapped(".skip.", ".linear.")),
    ("a switch lost, biases kept", "hydra", "tensors", field(lm_head_bias=False), None),
    ("prefix norm off", "hydra++", "norm", field(prefix_norm=False), None),
    ("prefix norm lost", "hydra++", "norm", field(prefix_norm=False), without(PREFIX_NORM)),
    ("a switch lost, bias kept", "eagle1", "tensors", field(fc_bias=False), None),
    ("a switch lost, biases kept", "eagle1", "tensors", field(attention_bias=False), None),
    ("the other residual", "eagle3.1", "norm", field(norm_before_residual=False), None),
    ("norm before fusion off", "eagle3.1", "norm", field(norm_before_fc=False), None),
    ("a window", "eagle3", "window", field(sliding_window=2), None),
    ("noise to read", "own embedding", "embedding", None, replaced("embed_tokens.weight", noise)),
    ("layer ids", "peagle", "layer ids", UP_ONE, None),
    ("halves", "peagle", "concat", None, replaced(QKV, lambda t: t.roll(D, 1))),
    ("mask's row", "peagle own", "mask token", field(mask_token_id=20), None),
    ("layer ids", "dflash", "layer ids", UP_ONE, None),
    ("mask token", "dflash", "mask token", field(mask_token_id=20), None),
    ("whole blocks", "jetspec", "causality", field(causal=False), None),
    ("in place", "dspark", "anchor", field(sample_from_anchor=False), None),
    ("Markov matrices", "dspark", "tensors", None, swapped("markov_w1", "markov_w2")),
    ("Markov noise", "dspark", "tensors", None, replaced("w2.weight", lambda t: 4 * noise(t))),
    ("layer ids", "dspark", "layer ids", UP_ONE, None),
    ("mask token", "dspark gated", "mask token", field(mask_token_id=20), None),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "name", "check", "config", "tensors"), PLANTED)
def test_the_planted_fault_is_named(
    fault: str,
    name: str,
    check: str,
    config: Any,
    tensors: Any,
    workshop: Workshop,
    target: TargetModel,
    evidence: Evidence,
    tmp_path: Path,
) -> None:
    folder = edited(workshop.head(name), tmp_path / "broken", config, tensors)
    found = diagnosed(folder, target, evidence)
    assert faults(found) == {check}, "\n".join(finding.line() for finding in found.faults)
    assert found.fixed >= found.overlap[0]
