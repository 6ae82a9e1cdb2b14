"""Run the Triton kernels on the CPU, in Triton's interpreter, on small cases.

    TRITON_INTERPRET=1 python -m tests.inference.kernels.interpreted

Prints the largest error of each case against the plain implementation, and the columns per split of
some batches, as JSON. A process of its own, because the variable has to be set before the kernels
are defined and changes what they are.

bfloat16 is not among the cases: the interpreter multiplies its bit patterns as integers.
"""

import json
import os
import sys

import torch

from inference.kernels.reference import masked_attention
from tests.inference.kernels.trees import KINDS, Case

CASES = {
    "one row": Case(lengths=(20,), num_rows=1, heads=(2, 1)),
    "no prefix": Case(lengths=(0,), num_rows=5, heads=(2, 1)),
    "splits": Case(lengths=(300,), num_rows=3, heads=(2, 1)),
    "ragged": Case(lengths=(0, 131, 64), num_rows=5, kinds=KINDS, heads=(2, 1)),
    "one long, two short": Case(lengths=(900, 9, 140), num_rows=2, heads=(2, 1)),
    "heads": Case(lengths=(30,), num_rows=4, heads=(6, 2), padding=2),
    "tiles of rows": Case(lengths=(70,), num_rows=12, heads=(2, 1)),
    "pending": Case(lengths=(9,), num_rows=3, num_pending=4, heads=(2, 1)),
    "two words": Case(lengths=(33,), num_rows=4, num_pending=62, heads=(2, 1), kinds=("chain",)),
    "padded dimensions": Case(lengths=(70,), heads=(2, 1), dims=(24, 40)),
    "window": Case(lengths=(200, 3), num_rows=7, window=5, heads=(2, 1), kinds=("star", "chain")),
    "window over splits": Case(lengths=(290,), num_rows=4, window=200, heads=(2, 1)),
    "softcap": Case(lengths=(70,), softcap=2.0, heads=(2, 1)),
    "sinks": Case(lengths=(70,), sinks=True, heads=(2, 2)),
    "all": Case(
        (150, 20), 4, 3, KINDS, 1, (4, 2), (16, 16), window=140, softcap=2.0, sinks=True
    ),
    "float16": Case(lengths=(150, 0), num_rows=4, heads=(4, 1), dtype=torch.float16),
    "float16, all": Case(
        (70,), 4, 3, KINDS, 1, (4, 2), (8, 8), 50, 2.0, True, dtype=torch.float16
    ),
}  # fmt: skip

BATCHES = {
    "one": ((1000,), 8, 8),
    "equal": ((1024, 1024, 1024), 2, 4),
    "almost equal": ((1024, 1030, 1000), 2, 4),
    "one long": ((4096, 128, 128, 128), 2, 4),
    "short": ((40, 0), 4, 8),
}
"""Lengths, splits of a sequence on average, and at most."""


def main() -> None:
    """Run every case."""
    assert os.environ.get("TRITON_INTERPRET") == "1"
    from inference.kernels import triton_attention
    from tests.inference.kernels.split_sizes import split_sizes

    torch.set_num_threads(1)
    triton_attention.MERGED_AT_ONCE = 2  # so that a few splits take several steps to merge
    errors = {}
    for name, case in CASES.items():
        arguments = case.tensors()
        _, keys, values, lengths, words, _ = arguments
        if num_bits := (case.num_pending + case.num_rows) % 64:
            words[:, :, -1] |= -(1 << num_bits)  # bits behind the tree, which say nothing
        for b, length in enumerate(lengths.tolist()):  # reading behind the tree would show
            behind = length + case.num_pending + case.num_rows
            keys[b, :, behind:], values[b, :, behind:] = 1e3, 1e3
        difference = triton_attention.triton_attention(*arguments) - masked_attention(*arguments)
        errors[name] = difference.float().abs().max().item()
    sizes = {name: split_sizes(*batch) for name, batch in BATCHES.items()}
    sys.stdout.write(json.dumps({"errors": errors, "sizes": sizes}))


if __name__ == "__main__":
    main()
