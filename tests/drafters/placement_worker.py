"""What a placed target says, and the processes of `test_placement` that hold targets together.

    torchrun --nproc-per-node 2 -m tests.drafters.placement_worker <out> <folder>:<parallel> ...

Each process writes `<folder name>-<parallel>-<rank>.safetensors` and `.json` for each target.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from safetensors.torch import save_file
from torch import Tensor

from drafters import Drafter, TargetModel, build_drafter
from drafters.placement import PlacementError, held_bytes, shard_target
from inference.generate import speculative_generate
from inference.proposers import build_proposer

LAYERS = (1, 2, 4)
PROMPTS = [[7, 8, 9, 10, 11], [40, 41, 42]]


def make_head(target: TargetModel) -> Drafter:
    """A head that starts as a copy of target layers."""
    drafter = build_drafter(
        "eagle3", target, seed=3, feature_layers=LAYERS, draft_vocab_size=40, num_layers=2
    )
    drafter.set_draft_vocab(torch.arange(target.vocab_size))
    return drafter.eval()


@torch.no_grad()
def observe(target: TargetModel, drafter: Drafter) -> dict[str, Tensor]:
    """Hidden states, logits, an early exit, and what the head computes from what it borrows."""
    ids = torch.arange(3, 27).view(2, 12)
    restarting = torch.arange(12) % 7  # two packed documents in a row
    out = target.forward(
        ids, position_ids=restarting.expand(2, 12), feature_layers=LAYERS, logits_to_keep=3
    )
    kept = target.forward(ids, logits_to_keep=torch.tensor([0, 5]), run_layers=range(2))
    assert out.features is not None
    weights = {f"head.{name}": value.clone() for name, value in drafter.state_dict().items()}
    weights |= {f"block.{name}": value for name, value in target.block(1).items()}
    return {
        "features": out.features,
        "last_hidden": out.last_hidden,
        "logits": out.logits,
        "early_exit": kept.logits,
        "embeddings": target.embed(ids).clone(),
        "projection": target.project(out.last_hidden),
        "borrowed": drafter.borrowed_logits(out.last_hidden),
        **weights,
    }


def describe(target: TargetModel, drafter: Drafter) -> dict[str, Any]:
    """Fingerprint, bytes of layers in this process, and what is decoded with the head."""
    found = speculative_generate(target, build_proposer(drafter), PROMPTS, max_new_tokens=12)
    return {
        "fingerprint": target.fingerprint(),
        "tied": target.lm_head.weight is target.embedding.get_parameter("weight"),
        "layer_bytes": held_bytes(target.decoder_layers()),
        "generated": found.sequences,
    }


def main() -> None:
    state = PartialState(cpu=True)
    torch.set_num_threads(1)
    out = Path(sys.argv[1])
    for case in sys.argv[2:]:
        folder, parallel = case.split(":")
        stem = f"{Path(folder).name}-{parallel}-{state.process_index}"
        try:
            target = TargetModel.load(folder, torch.float32, parallel=parallel)
        except PlacementError as error:
            (out / f"{stem}.refused").write_text(str(error))
            continue
        drafter = make_head(target)
        if parallel == "shard":
            shard_target(target, torch.device("cpu"))
        save_file(observe(target, drafter), out / f"{stem}.safetensors")
        (out / f"{stem}.json").write_text(json.dumps(describe(target, drafter)))
    state.destroy_process_group()


if __name__ == "__main__":
    main()
