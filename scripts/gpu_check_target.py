"""The sections of `scripts.gpu_check` about a real small target and about training.

Letters: B batch, T tokens of a sequence.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from drafters import FAMILIES, Drafter, TargetModel
from inference.engine import Engine
from inference.engines import build_engine
from inference.generate import Generation, plain_generate, speculative_generate
from inference.proposers import Proposer, TreeOptions, build_proposer
from inference.proposers.ngram import NgramProposer
from inference.static.engine import StaticEngine
from inference.stopping import Stop
from scripts import benchmark_training
from scripts.gpu_check_models import SMOL, TINY, random_head, random_target
from scripts.training_cost import seconds_of

Row = dict[str, Any]
TEXTS = (
    "The capital of France is Paris, the capital of Italy is",
    "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n",
    "Once upon a time there was a king who had three daughters.",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,",
)
NEW, DRY_NEW = 128, 5


def target_rows(dry_run: bool, folder: Path | None) -> Iterator[Row]:
    """Greedy texts of every engine beside plain decoding's; a random one where none is given.

    In float32, as the same token is to be the largest in two ways to compute; tokens per second
    are therefore not those of bfloat16.
    """
    device = torch.device("cpu" if dry_run else "cuda", None if dry_run else 0)
    if folder is None:
        shape = TINY if dry_run else SMOL
        target = random_target(shape, torch.float32, device, 0.3 if dry_run else 0.1)
        prompts = [[(7 * k + row) % 90 for k in range(9 + row)] for row in range(len(TEXTS))]
    else:
        target = TargetModel.load(str(folder), torch.float32, device)
        prompts = [target.tokenizer.encode(text) for text in TEXTS]
    head, new = random_head(target), DRY_NEW if dry_run else NEW
    plain = plain_generate(target, prompts, max_new_tokens=new, stop=Stop(token_ids=()))
    yield speed_row("plain, one by one", plain, plain, None)
    for name in ("packed", "device"):
        for batch in (len(prompts), 1):
            engine = build_engine(target, name)
            for drafts, proposer in proposers(name, head).items():
                found = decoded(target, prompts[:batch], new, engine, proposer)
                yield {**speed_row(f"{name}, {drafts}", found, plain, engine), "B": batch}
            engine.close()


def proposers(engine: str, head: Drafter) -> dict[str, Proposer | None]:
    """What an engine decodes with; None drafts nothing."""
    options = TreeOptions(size=16, depth=5, top_k=4)
    drafted: dict[str, Proposer | None] = {"random head": build_proposer(head, options)}
    if engine == "device":
        return drafted
    return {"no drafts": None, "n-grams": NgramProposer(16, 8, 2), **drafted}


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


def training(dry_run: bool) -> Iterator[Row]:
    """Seconds of an optimizer step of every family, target's forward included."""
    device = torch.device("cpu" if dry_run else "cuda", None if dry_run else 0)
    dtype = "float32" if dry_run else "bfloat16"
    target = random_target(TINY if dry_run else SMOL, getattr(torch, dtype), device)
    length, batch = ("16", "1") if dry_run else ("1024", "4")
    options = ["--target", "random", "--dtype", dtype, "--lengths", length, "--batch", batch]
    args = benchmark_training.parse_args(options)
    for family in FAMILIES:
        work = benchmark_training.make_work(target, family, int(length), args)
        times = [
            seconds_of(lambda work=work: work.step(None, work.phases()), device, work.clock)
            for _ in range(2 if dry_run else 5)
        ]
        best = min(times[1:])
        tokens = int(work.batch().supervised.sum())
        yield {
            "family": family, "B": int(batch), "T": int(length), "step ms": best * 1e3,
            "supervised tokens/s": tokens / best, "first step s": times[0],
        }  # fmt: skip
