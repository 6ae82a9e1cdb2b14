"""Files for ``speculators``, run by a copy of its forward passes that knows none of our heads."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from drafters import TargetModel
from drafters.export import golden_inputs, golden_logits, write_as
from tests.drafters.export.speculators_engine import Network, block, chain, parallel
from tests.drafters.export.speculators_heads import VARIANTS, make_head
from tests.tiny import tiny_target

FORWARD = {"eagle3": chain, "peagle": parallel, "dflash": block, "dspark": block}


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target(dtype=torch.float32)


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "mtp"])
def test_their_forward_pass_gives_our_logits(
    name: str, target: TargetModel, tmp_path: Path
) -> None:
    head = make_head(name, target)
    write_as(f"speculators-{head.family}", head, tmp_path / "head")
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    inputs, ours = golden_inputs(head), golden_logits(head, golden_inputs(head))
    network = Network(config, tensors, target.embedding.weight, target.lm_head.weight)
    with torch.no_grad():
        theirs = FORWARD[head.family](network, inputs["features"], inputs["token_ids"], len(ours))
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)
    assert theirs.argmax(-1).tolist() == ours.argmax(-1).tolist()
