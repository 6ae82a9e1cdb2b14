"""Copies of users' processors, which may keep state: one for each text that is gone through.

Whether a processor keeps state cannot be found out by trying, as state may be set by a token that
comes late. So all are taken to, and wherever one object would follow two texts it is copied first.
"""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from inference.sampling import Processor, SamplingParams

_FOR_ROWS = (
    "several sequences are given the same one; give each its own SamplingParams with an object of "
    "its own"
)


def apart(samplings: Sequence[SamplingParams]) -> list[SamplingParams]:
    """The same, with a copy for each sequence of every processor that several are given.

    A processor that only one sequence is given stays itself.

    Raises:
        ValueError: one that several are given and that cannot be copied.
    """
    rows = Counter(
        key for params in samplings for key in {_identity(one) for one in params.processors}
    )
    found = []
    for params in samplings:
        shared = [one for one in params.processors if rows[_identity(one)] > 1]
        if shared:
            copies = dict(zip(map(id, shared), copied(shared, _FOR_ROWS), strict=True))
            own = tuple(copies.get(id(one), one) for one in params.processors)
            params = replace(params, processors=own)
        found.append(params)
    return found


def copied(
    processors: Sequence[Processor], purpose: str, memo: dict[int, Any] | None = None
) -> tuple[Processor, ...]:
    """Deep copies that have nothing in common with the originals, only with each other.

    `copy.deepcopy` makes them, so a class may say how with `__deepcopy__`. It knows nothing of what
    lies outside of an object: globals, class attributes and files must not hold state. A function
    without variables of its own is its own copy.

    Args:
        processors: of one sequence.
        purpose: why they are copied, and what to do where they cannot be, for the message.
        memo: of `copy.deepcopy`, to go on with copies that belong together.

    Raises:
        ValueError: one is or holds a function with variables of its own, which a copy would share,
            or a network, which is too large to copy, or it does not let itself be copied.
    """
    memo = {} if memo is None else memo
    copies = []
    for processor in processors:
        reason = _held_in_common(processor)
        if reason is None:
            try:
                copies.append(copy.deepcopy(processor, memo))
                continue
            except Exception as error:  # every library has its own
                reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"processors: {name_of(processor)} cannot be copied ({reason}): {purpose}")
    return tuple(copies)


def _held_in_common(processor: Processor) -> str | None:
    """What `copy.deepcopy` would hand on instead of copying it, or had better not copy."""
    waiting: list[Any] = [processor]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, nn.Module):
            return f"{type(one).__name__} is a network"
        if _remembers(one):
            return f"{one!r} may have variables of its own"
        if isinstance(one, MethodType):
            waiting.append(one.__self__)
        elif not isinstance(one, _LEAVES) and getattr(type(one), "__deepcopy__", None) is None:
            waiting += gc.get_referents(one)
    return None


_CONSTANTS = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_LEAVES = (*_CONSTANTS, type, ModuleType, FunctionType, BuiltinMethodType)
"""What cannot hold anything that changes, if `_remembers` does not say so."""


def _remembers(one: Any) -> bool:
    """Whether it may hold state, and `copy.deepcopy` hands it on as it is."""
    if isinstance(one, FunctionType):
        defaults = [*(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values()]
        own = one.__closure__ or vars(one)
        return bool(own) or not all(isinstance(default, _CONSTANTS) for default in defaults)
    if isinstance(one, BuiltinMethodType):  # functions of modules, and methods like `[].append`
        return not isinstance(one.__self__, ModuleType | type | None)
    if isinstance(one, functools._lru_cache_wrapper):
        return not isinstance(one.__wrapped__, FunctionType) or _remembers(one.__wrapped__)
    return isinstance(one, weakref.ReferenceType)


def _identity(processor: Processor) -> int:
    """Equal for methods of the same object, each of which is an object of its own."""
    return id(processor.__self__ if isinstance(processor, MethodType) else processor)


def name_of(processor: Processor) -> str:
    """Its class; for a function or a method, its own name."""
    if isinstance(processor, FunctionType | MethodType):
        return processor.__qualname__
    return type(processor).__name__
