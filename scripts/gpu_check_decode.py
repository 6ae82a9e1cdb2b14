"""The sections of `scripts.gpu_check` about decoding: the parts of a round, and what they cost.

`decode` takes one batch and context apart, with graphs and without; `costs` is a table over batch,
context and tree size. Both run a random Llama of 8B and a random EAGLE-3 head.

Letters: B batch, P committed tokens, N tree nodes.
"""

from collections.abc import Iterator
from typing import Any

import torch

from drafters import Drafter
from inference.static.engine import StaticEngine
from inference.static.graphs import WARM_UPS, Graphs
from scripts.gpu_check_models import (
    LLAMA_8B,
    TINY,
    Work,
    capture_for,
    filled_cache,
    forward_of,
    milliseconds,
    parts_of,
    random_head,
    random_target,
    restarted,
    rounds_of,
    wall_milliseconds,
)

Row = dict[str, Any]
CONTEXT, DRY_CONTEXT = 2048, 12
NODES = 16
VERIFY_ASKED, ROUND_ASKED = 1.15, 1.35
"""Most that a forward of `NODES` rows, and a whole round, may cost in plain steps."""
KINDS = {"chain of 5": (6, 5, 1), "tree of 16": (NODES, 5, 4)}
"""Size, depth and branching of drafts with five draft steps."""
BATCHES, CONTEXTS, SIZES = (1, 16, 4, 8, 2), (1024, 2048, 4096, 8192), (8, 16, 32, 64)
DRY_BATCHES, DRY_CONTEXTS, DRY_SIZES = (1, 2), (12,), (4, 8)
LENGTHS = (2.0, 3.0, 4.0)
"""Tokens per round for which is told where speculation stops paying."""


def models(dry_run: bool) -> tuple[StaticEngine, Drafter]:
    """The engine on a random target, and the head."""
    device = torch.device("cpu" if dry_run else "cuda", None if dry_run else 0)
    dtype = torch.float32 if dry_run else torch.bfloat16
    target = random_target(TINY if dry_run else LLAMA_8B, dtype, device)
    return StaticEngine(target, pack=False), random_head(target)


def use_graphs(engine: StaticEngine, graphs: bool) -> None:
    """Have the engine's forwards captured, or not."""
    engine.graphs = Graphs(engine.run, capture_for(engine.shape.device, graphs, WARM_UPS))


@torch.inference_mode()
def decode(dry_run: bool) -> Iterator[Row]:
    """Plain step, verification and whole rounds at batch 1, with graphs and without."""
    engine, head = models(dry_run)
    context = DRY_CONTEXT if dry_run else CONTEXT
    for graphs in (True, False):
        use_graphs(engine, graphs)
        yield from decode_rows(engine, head, context, graphs)


def decode_rows(engine: StaticEngine, head: Drafter, context: int, graphs: bool) -> Iterator[Row]:
    """Rows of one mode; the first is the plain step that all are compared with."""
    device, layers = engine.shape.device, head.feature_layers
    cache = filled_cache(engine, 1, context)
    mode = "yes" if graphs else "no"

    def row(what: str, ms: float, plain: float, asked: float | None = None) -> Row:
        found: Row = {"graphs": mode, "what": what, "ms": ms, "plain steps": ms / plain}
        if graphs and asked is not None:
            found["asked"] = asked
            found["met"] = ms / plain <= asked if device.type == "cuda" else None
        return found

    step, verify = forward_of(engine, cache, 1, ()), forward_of(engine, cache, NODES, layers)
    [plain] = milliseconds([step.replay], device)
    yield row("plain step", plain, plain)
    [ms] = milliseconds([verify.replay], device)
    yield row(f"verify {NODES} nodes", ms, plain, VERIFY_ASKED)
    yield row(f"verify {NODES} nodes, host's part included", appended(engine, cache, layers), plain)
    for kind, (size, depth, top_k) in KINDS.items():
        work = Work(1, context, size, depth, top_k)
        rounds = rounds_of(engine, cache, head, work, graphs)
        for name, ms in zip(
            ("draft", "verify", "accept, commit"),
            milliseconds(parts_of(rounds, graphs), device),
            strict=True,
        ):
            yield row(f"{kind}: {name}", ms, plain)
        restarted(rounds, context)
        for _ in range(3):  # what comes before its capture, and that
            rounds.run()
        ms = wall_milliseconds(rounds.run, device)
        yield row(f"{kind}: whole round, host's part included", ms, plain, ROUND_ASKED)


def appended(engine: StaticEngine, cache: Any, layers: tuple[int, ...]) -> float:
    """Milliseconds of the engine's `append`: masks to words, copies, forward, outputs copied."""
    chain = torch.arange(NODES)
    seen = torch.ones(NODES, NODES, dtype=torch.bool).tril()

    def call() -> None:
        engine.append(cache, [chain], [chain], [seen], feature_layers=layers)
        cache.revert()

    return wall_milliseconds(call, engine.shape.device)


@torch.inference_mode()
def costs(dry_run: bool) -> Iterator[Row]:
    """Verification in plain steps over batch, context and tree size, and where drafts stop paying.

    `pays above` is a whole round in plain steps: with fewer tokens per round and text, plain
    decoding is faster.
    """
    engine, head = models(dry_run)
    use_graphs(engine, True)
    device, layers = engine.shape.device, head.feature_layers
    contexts = DRY_CONTEXTS if dry_run else CONTEXTS
    found: list[Row] = []
    for batch in DRY_BATCHES if dry_run else BATCHES:
        cache = filled_cache(engine, batch, max(contexts))
        plain = {}
        for context in contexts:
            cache.lengths[:] = [context] * batch
            [plain[context]] = milliseconds([forward_of(engine, cache, 1, ()).replay], device)
        for size in DRY_SIZES if dry_run else SIZES:
            work = Work(batch, contexts[0], size, 5, 4 if size <= NODES else 8)
            rounds = rounds_of(engine, cache, head, work, True)
            for _ in range(3):
                rounds.run()
            for context in contexts:
                cache.lengths[:] = [context] * batch
                [ms] = milliseconds([forward_of(engine, cache, size, layers).replay], device)
                restarted(rounds, context)
                whole = wall_milliseconds(rounds.run, device)
                row = {"B": batch, "P": context, "N": size, "plain ms": plain[context]}
                row |= {"verify ms": ms, "verify / plain": ms / plain[context]}
                row |= {"round ms": whole, "pays above": whole / plain[context]}
                found.append(row)
                yield row
        engine.graphs.clear()  # type: ignore[union-attr]
        del cache, rounds
    yield from stops_paying(found)


def stops_paying(rows: list[Row]) -> Iterator[Row]:
    """For each context, the largest batch in which some tree gains by so many tokens per round.

    Args:
        rows: of `costs`.
    """
    for length in LENGTHS:
        for context in sorted({row["P"] for row in rows}):
            good = [row for row in rows if row["P"] == context and row["pays above"] < length]
            largest = max((row["B"] for row in good), default=0)
            yield {
                "P": context,
                "tokens per round": length,
                "pays up to batch": largest,
                "with N up to": max((row["N"] for row in good if row["B"] == largest), default=0),
            }
