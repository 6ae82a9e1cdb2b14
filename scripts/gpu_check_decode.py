"""The sections of `scripts.gpu_check` about decoding: the parts of a round, and what they cost.

`decode` takes one batch and context apart, with graphs and without; `costs` is a table over batch,
context and tree size. Both run a random Llama of 8B and a random EAGLE-3 head.

Letters: B batch, P committed tokens, N tree nodes.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from drafters import Drafter
from inference.static.cache import StaticCache
from inference.static.decoding import DeviceEngine
from scripts.gpu_check_models import (
    filled_cache,
    forward_of,
    models,
    parts_of,
    restarted,
    rounds_of,
    tree_of,
    use_graphs,
)
from scripts.gpu_check_timing import copy_bandwidth, milliseconds, wall_milliseconds

Row = dict[str, Any]
CONTEXT, DRY_CONTEXT = 2048, 12
NODES = 16
KINDS = {"chain of 5": (6, 5, 1), "tree of 16": (NODES, 5, 4)}
"""Size, depth and branching of drafts with five draft steps."""
BATCHES, CONTEXTS, SIZES = (1, 16, 4, 8, 2), (1024, 2048, 4096, 8192), (8, 16, 32, 64)
DRY_BATCHES, DRY_CONTEXTS, DRY_SIZES = (1, 2), (12,), (4, 8)
LENGTHS = (2.0, 3.0, 4.0)
"""Tokens per round for which is told where speculation stops paying."""


@torch.inference_mode()
def decode(dry_run: bool) -> Iterator[Row]:
    """Plain step, verification and whole rounds at batch 1, with graphs and without."""
    engine, head = models(dry_run)
    context = DRY_CONTEXT if dry_run else CONTEXT
    yield from least_rows(engine, head, context)
    for graphs in (True, False):
        use_graphs(engine, graphs)
        yield from decode_rows(engine, head, context, graphs)


def least_rows(engine: DeviceEngine, head: Drafter, context: int) -> Iterator[Row]:
    """The least that they can cost, as what is read has to be read: at copying's bandwidth."""
    target, shape = engine.target, engine.shape
    bandwidth = 1e3 * copy_bandwidth(shape.device)  # bytes per millisecond
    # Of the embedding one row is read.
    weights = bytes_of(target.model) - target.model.get_input_embeddings().weight.nbytes
    cached = 2 * shape.num_layers * context * shape.num_heads * shape.head_dim
    plain = weights + cached * shape.dtype.itemsize
    depth = max(depth for _, depth, _ in KINDS.values())
    whole = plain + depth * bytes_of(head)
    yield {"what": "plain step, least by bytes", "ms": plain / bandwidth, "plain steps": 1.0}
    yield {"what": "whole round, least by bytes", "ms": whole / bandwidth,
           "plain steps": whole / plain}  # fmt: skip


def bytes_of(module: nn.Module) -> int:
    """Of its parameters; borrowed ones are not a head's own."""
    return sum(parameter.nbytes for parameter in module.parameters())


def decode_rows(engine: DeviceEngine, head: Drafter, context: int, graphs: bool) -> Iterator[Row]:
    """Rows of one mode; the first is the plain step that all are compared with."""
    device, layers = engine.shape.device, head.feature_layers
    cache = filled_cache(engine, 1, context)

    def row(what: str, ms: float, plain: float) -> Row:
        mode = "yes" if graphs else "no"
        return {"what": what, "ms": ms, "plain steps": ms / plain, "graphs": mode}

    step, verify = forward_of(engine, cache, 1, ()), forward_of(engine, cache, NODES, layers)
    plain, ms = milliseconds([step.replay, verify.replay], device)
    yield row("plain step", plain, plain)
    yield row(f"verify {NODES} nodes", ms, plain)
    yield row(f"verify {NODES} nodes, host's part included", appended(engine, cache, layers), plain)
    for kind, (size, depth, top_k) in KINDS.items():
        rounds = rounds_of(engine, head, [tree_of(size, depth, top_k)], (1, context), graphs)
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
        yield row(f"{kind}: whole round, host's part included", ms, plain)


def appended(engine: DeviceEngine, cache: StaticCache, layers: tuple[int, ...]) -> float:
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
    assert engine.graphs is not None
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
            tree = tree_of(size, 5, 4 if size <= NODES else 8)
            rounds = rounds_of(engine, head, [tree], (batch, max(contexts)))
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
        engine.graphs.clear()
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
