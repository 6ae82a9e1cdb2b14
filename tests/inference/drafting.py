"""What the tests of proposers that draft with a causal LM share."""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from drafters import TargetModel
from inference.generate import Generation, plain_generate, speculative_generate
from inference.proposers import Proposer, Resume, RowState, Session
from inference.sampling import SamplingParams, probabilities, sample
from inference.stopping import Stop
from inference.tree import TokenTree

PROMPTS = [[5, 6, 7, 8, 9], [11, 12, 13], [20] * 11]
LENGTHS = [17, 11, 22]
NO_END = Stop(token_ids=())
GREEDY = SamplingParams()
SAMPLED = SamplingParams(0.8, seed=3)
WARPED = SamplingParams(0.9, 12, 0.8, 3)


def decode(target: TargetModel, proposer: Proposer, **options: Any) -> Generation:
    """The batch of all prompts, each to a length of its own."""
    defaults: dict[str, Any] = {"max_new_tokens": LENGTHS, "stop": NO_END}
    return speculative_generate(target, proposer, PROMPTS, **(defaults | options))


def decode_alone(target: TargetModel, proposer: Proposer, row: int, **options: Any) -> list[int]:
    """One of the prompts."""
    defaults: dict[str, Any] = {"max_new_tokens": LENGTHS[row], "stop": NO_END}
    found = speculative_generate(target, proposer, [PROMPTS[row]], **(defaults | options))
    return found.sequences[0]


@functools.cache
def plain(target: TargetModel, sampling: SamplingParams) -> list[list[int]]:
    """What the batch must give under rules that promise plain decoding's own tokens."""
    return plain_generate(
        target, PROMPTS, max_new_tokens=LENGTHS, sampling=sampling, stop=NO_END
    ).sequences


def assert_allowed(target: TargetModel, row: int, new: list[int], sampling: SamplingParams) -> None:
    """Every token has a probability under the warped law of the target."""
    logits = target.forward(torch.tensor([PROMPTS[row] + new])).logits[0, len(PROMPTS[row]) - 1 :]
    laws = probabilities(logits[:-1], sampling)
    assert bool((laws[torch.arange(len(new)), torch.tensor(new)] > 0).all())


@dataclass
class Drafted:
    """One tree and the text that it hangs from."""

    row: int
    tokens: list[int]
    sampling: SamplingParams
    max_depth: int
    tree: TokenTree


class Recording(Proposer):
    """Passes everything on to another proposer and keeps its trees."""

    def __init__(self, inner: Proposer) -> None:
        self.inner = inner
        self.drafted: list[Drafted] = []

    @property
    def chains(self) -> bool:
        return self.inner.chains

    def start(self, session: Session) -> None:
        self.drafted = []
        self.inner.start(session)

    def propose(self, states: Sequence[RowState | None]) -> list[TokenTree | None]:
        trees = self.inner.propose(states)
        for row, (state, tree) in enumerate(zip(states, trees, strict=True)):
            assert (state is None) == (tree is None)
            if state is not None and tree is not None:
                tokens = list(state.tokens)
                self.drafted.append(Drafted(row, tokens, state.sampling, state.max_depth, tree))
        return trees

    def finish(self, row: int, tokens: list[int]) -> None:
        self.inner.finish(row, tokens)

    def resume(self) -> Resume | None:
        return self.inner.resume()


def assert_laws_are_fresh(
    drafted: Sequence[Drafted], logits: Callable[[list[int]], Tensor], at_least: int = 30
) -> None:
    """The recorded law at every expanded node is what drafting from scratch gives there.

    Args:
        drafted: DENSE trees.
        logits: (V,) behind a text, computed anew.
        at_least: nodes that must be compared.
    """
    compared = 0
    for one in drafted:
        assert one.tree.draft_probs is not None
        for node in range(one.tree.num_nodes):
            if not one.tree.children(node):
                continue
            path = [one.tree.token(above) for above in one.tree.path(node)[1:]]
            expected = probabilities(logits(one.tokens + path), one.sampling)
            torch.testing.assert_close(one.tree.draft_probs[node], expected, atol=1e-5, rtol=0)
            compared += 1
    assert compared >= at_least


def p_value_of_rejection(
    target: TargetModel, proposer: Proposer, sampling: SamplingParams, samples: int
) -> float:
    """Chi-square test of the second and third new token, in one batch of many seeds.

    Seeds are taken such that the first, which is not drafted, is always the same.
    """
    prompt = PROMPTS[0]

    def laws(texts: Sequence[list[int]]) -> Tensor:
        return probabilities(target.forward(torch.tensor(texts)).logits[:, -1], sampling)

    [law] = laws([prompt])
    first = int(law.argmax())
    seeds = itertools.count(sampling.seed)
    fitting = (seed for seed in seeds if sample(law, seed, len(prompt)) == first)
    found = speculative_generate(
        target,
        proposer,
        [prompt] * samples,
        max_new_tokens=4,
        sampling=[replace(sampling, seed=seed) for seed in itertools.islice(fitting, samples)],
        rule="rejection",
        stop=NO_END,
    )
    assert 0.1 < found.stats.num_accepted_tokens / found.stats.num_draft_tokens < 0.9
    following = laws([[*prompt, first, second] for second in range(target.vocab_size)])
    expected = samples * (laws([[*prompt, first]])[0][:, None] * following).flatten()
    observed = torch.zeros_like(expected)
    for new in found.sequences:
        assert new[0] == first
        observed[new[1] * target.vocab_size + new[2]] += 1
    large = expected >= 5
    means = torch.cat([expected[large], expected[~large].sum()[None]])
    counts = torch.cat([observed[large], observed[~large].sum()[None]])
    statistic = ((counts - means) ** 2 / means).sum()
    assert len(means) > 5
    return float(torch.special.gammaincc(torch.tensor((len(means) - 1) / 2), statistic / 2))


@contextmanager
def counted_rows(target: TargetModel) -> Iterator[list[int]]:
    """Rows that each layer's attention runs meanwhile, all sequences together."""
    layers: list[nn.Module] = list(target.model.model.layers)
    counts = [0] * len(layers)

    def count(index: int) -> Callable:
        def hook(module: nn.Module, args: tuple, kwargs: dict, out: object) -> None:
            counts[index] += kwargs["hidden_states"].shape[:2].numel()

        return hook

    hooks = [
        layer.self_attn.register_forward_hook(count(index), with_kwargs=True)
        for index, layer in enumerate(layers)
    ]
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()


def noisy_copy(target: TargetModel, make: Callable[[], TargetModel], noise: float) -> TargetModel:
    """A model that often, but not always, agrees with the target.

    Args:
        target: the model.
        make: builds it once more.
        noise: relative to the size of each weight.
    """
    copy = make()
    generator = torch.Generator().manual_seed(1)
    for weight in copy.model.parameters():
        noisy = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
        weight.data += noise * weight.std() * noisy
    return copy
