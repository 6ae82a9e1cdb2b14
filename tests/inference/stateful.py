"""Processors that keep state, and what decoding with them must give."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from drafters import TargetModel
from inference.generate import Generation, plain_generate, speculative_generate
from inference.proposers import Proposer, TreeOptions
from inference.sampling import Processor, SamplingParams
from inference.stopping import Stop
from tests.grammar import EOS, MARKER, GrammarMatcher
from tests.oracle import NoisyOracle
from tests.tiny import tiny_target

NEW = 40
PROMPTS = [[5, 6, 7, MARKER], [11] * 10 + [MARKER], [40, MARKER]]
NO_END = Stop(token_ids=())
CHAINS = TreeOptions(5, 4, 1)


class Budget:
    """A thinking budget: forces a token so many after the length of the first call."""

    def __init__(self) -> None:
        self.start: int | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.start is None:
            self.start = input_ids.shape[1]
        if input_ids.shape[1] - self.start == 8:
            scores = torch.full_like(scores, -torch.inf)
            scores[:, 42] = 0.0
        return scores


class Trigger:
    """Rules half of the tokens out, from the first time on that one of some comes last."""

    def __init__(self, tokens: Sequence[int] = range(4, 96, 12)) -> None:
        self.tokens, self.on = tokens, False

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.on |= int(input_ids[0, -1]) in self.tokens
        if self.on:
            scores[:, ::2] = -torch.inf
        return scores


class Recorder:
    """Notes the texts it is asked about, for itself and for all copies together."""

    everywhere: ClassVar[list[list[int]]] = []

    def __init__(self) -> None:
        self.texts: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.texts.append(input_ids[0].tolist())
        self.everywhere.append(self.texts[-1])
        return scores


STATEFUL: dict[str, Callable[[], Processor]] = {
    "budget": Budget,
    "trigger": Trigger,
    "grammar": GrammarMatcher,
}


def near(seed: int = 0) -> TargetModel:
    """Near enough to the target that drafts are accepted, and far enough that some are not."""
    model = tiny_target()
    noise = torch.Generator().manual_seed(seed)
    weight = model.model.lm_head.weight
    with torch.no_grad():
        weight += 0.5 * weight.std() * torch.randn(weight.shape, generator=noise).double()
    return model


def stop_of(name: str) -> Stop:
    return Stop(token_ids=(EOS,)) if name == "grammar" else NO_END


@functools.cache
def plain(target: TargetModel, name: str, temperature: float = 0.0) -> list[list[int]]:
    """Every row alone, with an object of its own."""
    return [
        plain_generate(
            target,
            [prompt],
            max_new_tokens=NEW,
            sampling=SamplingParams(temperature, seed=1, processors=(STATEFUL[name](),)),
            stop=stop_of(name),
        ).sequences[0]
        for prompt in PROMPTS
    ]


def truth(target: TargetModel, name: str, wrong: bool = True) -> NoisyOracle:
    """Drafts what plain decoding says at temperature 0."""
    rows = zip(PROMPTS, plain(target, name), strict=True)
    return NoisyOracle([[*prompt, *new] for prompt, new in rows], wrong=wrong)


def decode(
    target: TargetModel, proposer: Proposer, name: str, sampling: Any, **options: Any
) -> Generation:
    return speculative_generate(
        target,
        proposer,
        PROMPTS,
        max_new_tokens=NEW,
        sampling=sampling,
        stop=stop_of(name),
        **options,
    )
