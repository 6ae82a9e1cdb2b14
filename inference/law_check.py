"""Does sampled speculative output follow the target's law? A statistical test on any model.

Rules that draw with numbers of their own (`rejection`) cannot be compared token by token with plain
sampling. Here one prompt is continued many times with different seeds. Seeds are taken such that
the first new token, which the prefill draws, is always the same; what the rounds of speculation
then emit has a law that the target tells exactly. The pairs of second and third new token are
counted in cells chosen from that law alone, and tested by chi-square.

Letters: N tree nodes, V target vocabulary.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from tqdm.auto import tqdm

from drafters import TargetModel
from inference.evaluation import Prompt
from inference.generate import Round, speculative_generate
from inference.proposers.base import Proposer, RowState
from inference.sampling import SamplingParams, probabilities, sample
from inference.timing import PhaseTimer
from inference.tree import Proposal, TokenTree

LOSSLESS, NOT_LOSSLESS, INCONCLUSIVE = "lossless", "not lossless", "inconclusive"

REFUTED, DOUBTFUL = 1e-4, 1e-2
"""A p-value below the first refutes, one between the two decides nothing."""
MIN_EXPECTED = 5.0
"""Expected count of every cell of the test; rarer ones are pooled."""
MIN_ROUNDS = 10
"""Rounds that must accept, and reject, all first drafts: both halves of the rule need a trial."""
NEW_TOKENS = 4
"""Tokens per continuation: the prefill's, the two tested, and one so that drafts reach depth 2."""

Cell = tuple[int, ...]
"""(second, third) new token; (second,) for its other third tokens; () for anything else."""


@dataclass(frozen=True)
class LawReport:
    """Outcome of `check_law`.

    Attributes:
        verdict: "lossless", "not lossless" or "inconclusive".
        reason: why it is not "lossless"; empty otherwise.
        prompt: id of the prompt that was continued.
        samples: continuations counted.
        cells: of the test.
        chi_square: the statistic; None without a test.
        p_value: its tail probability; None without a test.
        accepting: rounds that accepted a draft.
        rejecting: rounds that had drafts and accepted none.
    """

    verdict: str
    reason: str
    prompt: str
    samples: int
    cells: int
    chi_square: float | None
    p_value: float | None
    accepting: int
    rejecting: int


@dataclass
class _Counts:
    """What the continuations showed."""

    pairs: Counter[tuple[int, int]] = field(default_factory=Counter)
    accepting: int = 0
    rejecting: int = 0

    def add_round(self, done: Round) -> None:
        self.accepting += bool(done.accepted)
        self.rejecting += not done.accepted and done.tree.num_draft_tokens > 0


def check_law(
    target: TargetModel,
    proposer: Proposer,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    samples: int,
    rule: str = "rejection",
    progress: bool = False,
) -> LawReport:
    """Continue the prompt whose law is the easiest to test, and test it.

    Args:
        target: the model.
        proposer: where drafts come from.
        prompts: to choose from.
        sampling: at a temperature; its seed is the first to be tried.
        samples: continuations.
        rule: of acceptance.
        progress: show a progress bar on a terminal.
    """
    prompt, first = _choose(target, prompts, sampling, samples)
    prefix = [*prompt.ids, first]
    counts = _Counts()
    seeds = itertools.islice(_seeds(target, prompt.ids, first, sampling), samples)
    for seed in tqdm(seeds, total=samples, desc="law", disable=None if progress else True):
        result = speculative_generate(
            target,
            proposer,
            [prompt.ids],
            max_new_tokens=NEW_TOKENS,
            sampling=replace(sampling, seed=seed),
            rule=rule,
            eos_token_ids=(),
            on_round=counts.add_round,
        )
        start, second, third = result.sequences[0][:3]
        if start == first:  # rounding may make the first draw another one, once in a million
            counts.pairs[second, third] += 1
    expected = expected_cells(target, prefix, sampling, counts.pairs.total())
    return _judge(prompt, counts, expected)


def expected_cells(
    target: TargetModel, prefix: list[int], sampling: SamplingParams, samples: int
) -> dict[Cell, float]:
    """Expected counts of the two tokens after `prefix`; each at least `MIN_EXPECTED`, if possible.

    The cells depend on the target's law and not on what was observed.
    """
    second = _law(target, prefix, sampling).double() * samples  # (V,)
    cells: dict[Cell, float] = {}
    for token in (second >= MIN_EXPECTED).nonzero().flatten().tolist():
        rest = float(second[token])
        if rest >= 2 * MIN_EXPECTED:  # it can be told apart by the third token
            third = _law(target, [*prefix, token], sampling).double() * rest
            for other in (third >= MIN_EXPECTED).nonzero().flatten().tolist():
                cells[token, other] = float(third[other])
                rest -= float(third[other])
        if rest >= MIN_EXPECTED:
            cells[token,] = rest
    cells[()] = max(0.0, samples - sum(cells.values()))
    while len(cells) > 1 and cells[()] < MIN_EXPECTED:
        # A cell (second, third) falls back to (second,) while there is one, so that goes first.
        smallest = min(
            (c for c in cells if c and (len(c) == 1 or c[:1] not in cells)), key=cells.__getitem__
        )
        cells[()] += cells.pop(smallest)
    return cells


def chi_square(observed: Counter[Cell], expected: dict[Cell, float]) -> tuple[float, float]:
    """Pearson's statistic and its tail probability.

    Args:
        observed: counts, of cells in `expected` only.
        expected: at least two cells.
    """
    statistic = sum((observed[cell] - mean) ** 2 / mean for cell, mean in expected.items())
    half = torch.tensor([(len(expected) - 1) / 2, statistic / 2], dtype=torch.float64)
    return statistic, float(torch.special.gammaincc(half[0], half[1]))


def _judge(prompt: Prompt, counts: _Counts, expected: dict[Cell, float]) -> LawReport:
    observed: Counter[Cell] = Counter()
    for (second, third), number in counts.pairs.items():
        cell = next(c for c in ((second, third), (second,), ()) if c in expected)
        observed[cell] += number
    statistic, p_value = chi_square(observed, expected) if len(expected) > 1 else (None, None)
    verdict, reason = INCONCLUSIVE, ""
    if p_value is None:
        reason = (
            "no two outcomes are likely enough to be counted: take more samples, other prompts or "
            "another temperature"
        )
    elif p_value < REFUTED:
        verdict, reason = NOT_LOSSLESS, "the output does not follow the target's law"
    elif p_value < DOUBTFUL:
        reason = "a suspicious p-value: repeat with another seed and more samples"
    elif min(counts.accepting, counts.rejecting) < MIN_ROUNDS:
        reason = (
            f"{counts.accepting} rounds accepted drafts and {counts.rejecting} rejected them all; "
            f"each must happen {MIN_ROUNDS} times: take more samples"
        )
    else:
        verdict = LOSSLESS
    return LawReport(
        verdict,
        reason,
        prompt.id,
        counts.pairs.total(),
        len(expected),
        statistic,
        p_value,
        counts.accepting,
        counts.rejecting,
    )


def _choose(
    target: TargetModel, prompts: Sequence[Prompt], sampling: SamplingParams, samples: int
) -> tuple[Prompt, int]:
    """The prompt, with its likeliest first token, after which the most tokens can be counted."""
    best: tuple[int, Prompt, int] | None = None
    for prompt in prompts:
        first = int(_law(target, prompt.ids, sampling).argmax())
        law = _law(target, [*prompt.ids, first], sampling)
        testable = int((law * samples >= MIN_EXPECTED).sum())
        if best is None or testable > best[0]:
            best = testable, prompt, first
    if best is None:
        raise ValueError("prompts: at least one is needed")
    return best[1], best[2]


def _seeds(
    target: TargetModel, prompt: list[int], first: int, sampling: SamplingParams
) -> Iterator[int]:
    """Seeds under which `first` is the first new token; noise elsewhere is independent of it."""
    law = _law(target, prompt, sampling)
    for seed in itertools.count(sampling.seed):
        if sample(law, seed, len(prompt)) == first:
            yield seed


def _law(target: TargetModel, text: list[int], sampling: SamplingParams) -> Tensor:
    """(V,) what follows a text."""
    ids = torch.tensor([text], device=target.device)
    return probabilities(target.forward(ids, logits_to_keep=1).logits[0, -1], sampling)


class WrongLaw:
    """Negative control: a proposer that records far too small a probability for what it drafted.

    The rule then accepts nearly every draft, and the output follows the head instead of the target.

    Args:
        proposer: where the drafts come from.
        vocab_size: V.
    """

    def __init__(self, proposer: Proposer, vocab_size: int) -> None:
        self.proposer, self.vocab_size = proposer, vocab_size

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Those of the proposer."""
        return self.proposer.feature_layers

    def start(self, batch_size: int, timer: PhaseTimer) -> None:
        """Start the proposer."""
        self.proposer.start(batch_size, timer)

    def propose(
        self, states: Sequence[RowState | None], sampling: SamplingParams, rule: str
    ) -> list[TokenTree | None]:
        """The proposer's trees with the wrong law."""
        trees = self.proposer.propose(states, sampling, rule)
        return [None if tree is None else self._spoil(tree) for tree in trees]

    def _spoil(self, tree: TokenTree) -> TokenTree:
        law = torch.ones(tree.num_nodes, self.vocab_size, device=tree.tokens.device)
        law[tree.parents[1:], tree.tokens[1:]] = 1e-9
        return TokenTree(tree.tokens, tree.parents, Proposal.DENSE, law)
