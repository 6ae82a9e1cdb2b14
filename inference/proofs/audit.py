"""Whether a text is the target's own, judged by one teacher-forced forward in the target's dtype.

In bfloat16 two correct runs differ: a forward over one row and one over many round differently. So
a text cannot be asked to equal another one. It can be asked that every token of it is what the
target chooses after the text before it, or short of that by no more than rounding: by a few units
in the last place (ulp) of the target's dtype at the size of the logits concerned.

How many is a matter of the target: its layers round, too, and may make a few units of it at the
logits. An audit of a text of plain decoding tells; what is worse than that wants an explanation.

Letters: V target vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafters import TargetModel
from inference.measuring.doubt import gap_below_best
from inference.processors import Sampler, fresh
from inference.sampling import SamplingParams, sample, warp


@dataclass(frozen=True)
class Miss:
    """An emitted token that the audit would not have chosen.

    Attributes:
        position: index among the new tokens.
        token: emitted.
        chosen: by the audit: the argmax, or the keyed draw.
        gap: by how much the logits must change for `token` to win: how far it is below the best
            one, noise included if sampled, or how far an edge of the warpers must move to let it
            in. Infinite where no rounding can do it.
        ulp: the gap in units in the last place of the target's dtype, at the larger of the two
            tokens' logits.
    """

    position: int
    token: int
    chosen: int
    gap: float
    ulp: float


@dataclass(frozen=True)
class Audit:
    """What `audit_text` found.

    Attributes:
        tokens: how many were judged.
        dtype: of the target.
        misses: the tokens that are not the audit's own choice.
    """

    tokens: int
    dtype: torch.dtype
    misses: tuple[Miss, ...]

    @property
    def exact(self) -> int:
        """How many tokens are the audit's own choice."""
        return self.tokens - len(self.misses)

    @property
    def worst_gap(self) -> float:
        """The largest gap in logits; 0 without a miss."""
        return max((miss.gap for miss in self.misses), default=0.0)

    @property
    def worst_ulp(self) -> float:
        """The largest gap in units in the last place; 0 without a miss."""
        return max((miss.ulp for miss in self.misses), default=0.0)

    def passed(self, max_ulp: float = 2.0) -> bool:
        """Whether every token is the target's choice, or within `max_ulp` of it."""
        return self.worst_ulp <= max_ulp


def audit_text(
    target: TargetModel,
    prompt: Sequence[int],
    text: Sequence[int],
    sampling: SamplingParams,
    stop_after: int | None = None,
    eos_token_ids: Collection[int] | None = None,
) -> Audit:
    """Judge each new token by the target's own choice after what came before it.

    Args:
        target: run once, in its own dtype, on prompt and text.
        prompt: token ids.
        text: new tokens, decoded greedily or with a rule that draws the target's keyed noise
            (`match`, `coupled`). The other rules draw differently and cannot be audited if the
            temperature is above 0.
        sampling: they were decoded with. Processors that keep state must be as they were before.
        stop_after: judge this many tokens only; None judges all.
        eos_token_ids: what ends texts, which some processors ask; None takes the target's.

    Raises:
        ValueError: an empty prompt, or nothing to judge.
    """
    text = list(text if stop_after is None else text[:stop_after])
    if not len(prompt) or not text:
        raise ValueError("audit: prompt and text need at least one token each")
    ids = torch.tensor([[*prompt, *text[:-1]]], device=target.device)
    logits = target.forward(ids, logits_to_keep=len(text)).logits[0]
    ends = target.eos_token_ids if eos_token_ids is None else eos_token_ids
    sampler = Sampler(fresh(sampling), len(prompt), ends, target.device)
    misses = []
    for place, token in enumerate(text):
        position = len(prompt) + place
        processed = sampler.processed(logits[place], [*prompt, *text[:place]])
        law = sampler.law(warp(processed, sampling))
        chosen = sample(law, sampling.seed, position)
        if token == chosen:
            continue
        unit = ulp(max(abs(float(logits[place, one])) for one in (token, chosen)), target.dtype)
        gap = _gap(processed.double(), token, position, sampling, unit)
        misses.append(Miss(place, token, chosen, gap, gap / unit))
    return Audit(len(text), target.dtype, tuple(misses))


def ulp(value: float, dtype: torch.dtype) -> float:
    """The distance of neighbouring numbers of a dtype at the size of `value`."""
    info = torch.finfo(dtype)
    _, exponent = math.frexp(max(abs(value), info.smallest_normal))
    return info.eps * 2.0 ** (exponent - 1)


def _gap(
    processed: Tensor, token: int, position: int, sampling: SamplingParams, unit: float
) -> float:
    """See `Miss.gap`; found by bisection where noise and edges are concerned.

    Args:
        processed: (V,) float64 logits after the processors.
        token: emitted.
        position: its absolute position.
        sampling: warpers and seed.
        unit: where the search starts.
    """
    if not float(processed[token]) > -math.inf:
        return math.inf
    if sampling.temperature == 0:
        return float(processed.max() - processed[token])

    def explained(change: float) -> bool:
        tolerance = change / sampling.temperature
        gap = gap_below_best(processed, [token], position, sampling, tolerance)
        return gap is not None and gap <= tolerance

    if explained(0.0):
        return 0.0
    low, high = 0.0, unit
    for _ in range(60):
        if explained(high):
            break
        low, high = high, 2 * high
    else:
        return math.inf
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (low, middle) if explained(middle) else (middle, high)
    return high
