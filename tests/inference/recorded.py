"""A small run, written by hand."""

from typing import Any

from inference.measuring.run_records import RequestRecord, RoundRecord, Run, Trace

CELL = {
    "temperature": 0.0,
    "rule": "match",
    "size": 4,
    "name": "T=0 match size 4",
    "prediction": None,
    "reliability": None,
    "speedup": 2.0,
    "by_category": {},
}
RESULT: dict[str, Any] = {
    "format": 1,
    "settings": {},
    "target": {"name": "t", "fingerprint": {}, "dtype": "float32"},
    "head": None,
    "cells": [CELL],
    "costs": None,
    "training": None,
}


def chain(id: str, turn: int, number: int, context: int, depth: int, emitted: list[int],
          ended: bool = False) -> RoundRecord:  # fmt: skip
    accepted = len(emitted) - (not ended)
    return RoundRecord(
        0, id, turn, number, context, depth, depth, depth + 1, accepted, emitted, ended
    )


def request(id: str, turn: int, tokens: list[int], seconds: float, plain: float) -> RequestRecord:
    return RequestRecord(
        cell=0,
        id=id,
        category="a",
        turn=turn,
        prompt_tokens=10,
        tokens=tokens,
        pieces=[f"<{token}>" for token in tokens],
        seconds={"prefill": 1.0, "total": seconds},
        plain_seconds={"prefill": 1.0, "total": plain},
        plain_tokens=len(tokens),
    )


def small_run() -> Run:
    """Chains of 3: a conversation of two turns, and a text of one.

    a, turn 0: prefill 1; rounds 3 + 1 | 0 + 1 | 2 and the end      (accepted + the target's token)
    a, turn 1: prefill 1; rounds 1 + 1 | 0 + 1 without a draft
    b        : prefill 1; rounds 3 + 1
    """
    requests = [
        request("a", 0, [1, 2, 3, 4, 5, 6, 7, 8], 3.0, 7.0),
        request("a", 1, [9, 2, 3, 4], 2.0, 3.0),
        request("b", 0, [1, 2, 3, 4, 5], 1.0, 4.0),
    ]
    rounds = [
        chain("a", 0, 0, 11, 3, [2, 3, 4, 5]),
        chain("a", 0, 1, 15, 3, [6]),
        chain("a", 0, 2, 16, 3, [7, 8], ended=True),
        chain("a", 1, 0, 11, 3, [2, 3]),
        chain("a", 1, 1, 13, 0, [4]),
        chain("b", 0, 0, 11, 3, [2, 3, 4, 5]),
    ]
    return Run(dict(RESULT), requests, rounds)


def traced() -> RoundRecord:
    """A tree: the root's second child and its only child are accepted."""
    trace = Trace(
        tokens=[1, 5, 2, 6, 3],
        pieces=["a", "b", "c", "d", "e"],
        parents=[-1, 0, 0, 1, 2],
        path=[2, 4],
        p=[None, 0.0, 1.0, None, 1.0],
        q=[None, 0.5, 0.25, 0.5, 0.5],
    )
    return RoundRecord(0, "a", 0, 0, 11, 4, 2, 5, 2, [2, 3, 4], False, trace)
