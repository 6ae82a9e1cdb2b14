"""What ``speculators`` makes of a checkpoint with stitched modules; runs in its environment.

    python stitch_side.py OURS TARGET ROWS OUT

Its converter takes the modules out of OURS and its class answers to ROWS (``input_ids``,
``hidden``; ``theirs`` is added); then its ``stitch-mtp`` writes them into a copy of TARGET, at OUT.
The converter of 0.9.0 also writes a copy of the output matrix, which its ``stitch-mtp`` refuses as
a tensor that the target does not have; it is taken out between the two.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators.cli.stitch import stitch
from speculators.convert.mtp.converter import MTPConverter
from speculators.models.mtp import MTPDraftModel

COPY = "verifier_lm_head.weight"


@torch.no_grad()
def main() -> None:
    """Convert, answer, stitch; one line of JSON."""
    ours, target, rows, out = map(Path, sys.argv[1:])
    head = out.with_name("converted")
    MTPConverter().convert(ours, head, base_model=str(ours), validate=True)
    model = MTPDraftModel.from_pretrained(head).float().eval()
    given = load_file(rows)
    logits, *_ = model(input_ids=given["input_ids"], hidden_states=given["hidden"])
    save_file({**given, "theirs": logits[0][0].contiguous()}, rows)
    tensors = load_file(head / "model.safetensors")
    copied = tensors.pop(COPY, None) is not None
    save_file(tensors, head / "model.safetensors")
    stitch(head, target, out)
    names = ("speculators", "torch", "transformers")
    print()
    print(json.dumps({"copied": copied, "versions": {name: version(name) for name in names}}))


if __name__ == "__main__":
    main()
