"""The section of `scripts.gpu_check` about a real small target.

Letters: B batch.
"""

from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

from drafters import Drafter, TargetModel
from inference.engine import Engine
from inference.engines import build_engine
from inference.generate import Generation, plain_generate, speculative_generate
from inference.proposers import Proposer, TreeOptions, build_proposer
from inference.proposers.ngram import NgramProposer
from inference.scheduling.survival import Outcome
from inference.static.engine import StaticEngine
from inference.static.sizes import Chooser, SizedProposer
from inference.stopping import Stop
from scripts.gpu_check_models import SMOL, TINY, random_head, random_target
from scripts.gpu_check_timing import device_of

Row = dict[str, Any]
TEXTS = (
    "The capital of France is Paris, the capital of Italy is",
    "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n",
    "Once upon a time there was a king who had three daughters.",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,",
)
NEW, DRY_NEW = 128, 5
SIZES = [(3, 1, 4), (4, 2, 8), (5, 4, 16)]
"""Depth, children of a node and nodes."""


def target_rows(dry_run: bool, target: Path | None) -> Iterator[Row]:
    """Greedy texts of every engine beside plain decoding's; a random one where none is given.

    In float32, as the same token is to be the largest in two ways to compute; tokens per second
    are therefore not those of bfloat16.

    Args:
        dry_run: a tiny target on the CPU.
        target: folder of a small target, or None.
    """
    device = device_of(dry_run)
    if target is None:
        shape = TINY if dry_run else SMOL
        model = random_target(shape, torch.float32, device, 0.3 if dry_run else 0.1)
        prompts = [[(7 * k + row) % 90 for k in range(9 + row)] for row in range(len(TEXTS))]
    else:
        model = TargetModel.load(str(target), torch.float32, device)
        prompts = [model.tokenizer.encode(text) for text in TEXTS]
    head, new = random_head(model), DRY_NEW if dry_run else NEW
    plain = plain_generate(model, prompts, max_new_tokens=new, stop=Stop(token_ids=()))
    yield speed_row("plain, one by one", plain, plain, None)
    for name in ("device", "packed"):
        for batch in (len(prompts), 1):
            engine = build_engine(model, name)
            for drafts, proposer in proposers(name, head).items():
                found = decoded(model, prompts[:batch], new, engine, proposer)
                yield {**speed_row(f"{name}, {drafts}", found, plain, engine), "B": batch}
            engine.close()


class InTurn(Chooser):
    """Every size in turn, plain steps among them.

    Args:
        count: of sizes.
    """

    def __init__(self, count: int) -> None:
        self._kinds = cycle([None, *range(count)])

    def start(self, rule: str, temperature: float, batch: int) -> None:
        """Nothing to do."""

    def choose(self, context: float, batch: int, room: int) -> int | None:
        """The next one."""
        return next(self._kinds)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Nothing to learn."""


def proposers(engine: str, head: Drafter) -> dict[str, Proposer | None]:
    """What an engine decodes with; None drafts nothing."""
    drafts = build_proposer(head, TreeOptions(size=16, depth=5, top_k=4))
    if engine == "device":
        sized = SizedProposer(build_proposer(head), SIZES, InTurn(len(SIZES)))
        return {"random head": drafts, "random head, sizes in turn": sized}
    return {"no drafts": None, "n-grams": NgramProposer(16, 8, 2), "random head": drafts}


def decoded(
    target: TargetModel,
    prompts: list[list[int]],
    new: int,
    engine: Engine,
    proposer: Proposer | None,
) -> Generation:
    """The second of two runs: graphs are captured and kernels compiled in the first."""
    for _ in range(2):
        if proposer is None:
            found = plain_generate(
                target, prompts, max_new_tokens=new, stop=Stop(token_ids=()), engine=engine
            )
        else:
            found = speculative_generate(
                target, proposer, prompts, max_new_tokens=new, stop=Stop(token_ids=()),
                engine=engine,
            )  # fmt: skip
    return found


def speed_row(what: str, found: Generation, plain: Generation, engine: Engine | None) -> Row:
    """Speed, and whether the texts are plain decoding's."""
    tokens = sum(map(len, found.sequences))
    row: Row = {"engine": what, "tokens/s": tokens / found.seconds["total"]}
    row["tokens per forward"] = tokens / max(found.num_forwards, 1)
    row["first difference"] = first_difference(found.sequences, plain.sequences)
    row["ok"] = row["first difference"] is None
    if isinstance(engine, StaticEngine):
        row["warm-up s"] = engine.warm_up_seconds
    return row


def first_difference(texts: list[list[int]], others: list[list[int]]) -> str | None:
    """Which text differs first, and at which token; as many as there are of both."""
    for row, (text, other) in enumerate(zip(texts, others, strict=False)):
        if text != other:
            place = next((k for k, (a, b) in enumerate(zip(text, other, strict=False)) if a != b),
                         min(len(text), len(other)))  # fmt: skip
            return f"text {row}, token {place}"
    return None
