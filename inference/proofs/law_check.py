"""Does sampled speculative output follow the target's law? Statistical tests on any model.

Rules that draw with numbers of their own (`rejection`, `block`) cannot be compared token by token
with plain sampling. Here one prompt is continued many times with different seeds. Seeds are taken
such that the first new token, which the prefill draws, is always the same; what the rounds of
speculation then emit has a law that the target tells exactly. The next `COUNTED` tokens are counted
in cells chosen from that law alone, and tested by chi-square and by total variation
(`inference.proofs.law_statistics`, which also says how far off a law must be to be found).

Letters: N tree nodes, V target vocabulary.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from tqdm.auto import tqdm

from drafters import TargetModel
from inference.counts import RoundCounts
from inference.engine import Engine
from inference.generate import speculative_generate
from inference.measuring.evaluation import Prompt
from inference.processors import Sampler
from inference.proofs.law_statistics import CountTests, compare_counts
from inference.proofs.verdicts import INCONCLUSIVE, LOSSLESS, NOT_LOSSLESS
from inference.proposers.base import Proposer, Resume, RowState, Session
from inference.sampling import SamplingParams, sample
from inference.stopping import Stop
from inference.tree import Proposal, TokenTree

REFUTED, DOUBTFUL = 1e-4, 1e-2
"""A p-value below the first refutes, one between the two decides nothing."""
MIN_EXPECTED = 5.0
"""Expected count of every cell of the test; rarer ones are pooled."""
MIN_ROUNDS = 10
"""Rounds that must accept, and reject, all first drafts: both halves of the rule need a trial."""
COUNTED = 3
"""Tokens that are counted: the three after the prefill's, so that drafts of depth 3 count."""
NEW_TOKENS = COUNTED + 2
"""Tokens per continuation: the prefill's, those counted, and one so that drafts get as deep."""

Prefix = tuple[int, ...]
"""Tokens behind the first new one."""
Law = Callable[[Prefix], Tensor]
"""What follows a prefix, (V,)."""


@dataclass(frozen=True)
class LawReport:
    """Outcome of `check_law`.

    Attributes:
        rule: of acceptance.
        verdict: "lossless", "not lossless" or "inconclusive".
        reason: why it is not "lossless"; empty otherwise.
        prompt: id of the prompt that was continued.
        samples: continuations counted.
        cells: of the tests.
        tests: statistics, p-values and power; None if there was nothing to test.
        p_value: of both tests together; None without them.
        accepting: rounds that accepted a draft.
        rejecting: rounds that had drafts and accepted none.
        rejected_at: rounds that rejected all drafts of depth 1, 2, ..., `COUNTED`.
    """

    rule: str
    verdict: str
    reason: str
    prompt: str
    samples: int
    cells: int
    tests: CountTests | None
    p_value: float | None
    accepting: int
    rejecting: int
    rejected_at: tuple[int, ...]


@dataclass
class _Counts:
    """What the continuations showed."""

    texts: Counter[Prefix] = field(default_factory=Counter)
    accepting: int = 0
    rejected_at: Counter[int] = field(default_factory=Counter)

    def add_round(self, done: RoundCounts) -> None:
        self.accepting += done.accepted > 0
        if not done.all_accepted:
            self.rejected_at[done.accepted + 1] += 1


def check_law(
    target: TargetModel,
    proposer: Proposer,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    samples: int,
    rule: str = "rejection",
    batch_size: int = 16,
    progress: bool = False,
    engine: Engine | None = None,
) -> LawReport:
    """Continue the prompt whose law is the easiest to test, and test it.

    Args:
        target: the model.
        proposer: where drafts come from.
        prompts: to choose from.
        sampling: at a temperature; its seed is the first to be tried. Processors that keep state
            cannot be used: laws are asked for in no order.
        samples: continuations.
        rule: of acceptance.
        batch_size: continuations that are decoded together.
        progress: show a progress bar on a terminal.
        engine: that decodes; None is "eager". The law itself is always the target's own forward's.
    """
    prompt, first = _choose(target, prompts, sampling, samples)
    counts = _Counts()
    seeds = itertools.islice(_seeds(target, prompt.ids, first, sampling), samples)
    with tqdm(total=samples, desc=f"law, {rule}", disable=None if progress else True) as bar:
        while chunk := list(itertools.islice(seeds, batch_size)):
            result = speculative_generate(
                target,
                proposer,
                [prompt.ids] * len(chunk),
                max_new_tokens=NEW_TOKENS,
                sampling=[replace(sampling, seed=seed) for seed in chunk],
                rule=rule,
                stop=Stop(token_ids=()),
                on_counts=counts.add_round,
                engine=engine,
            )
            for start, *following in result.sequences:
                if start == first:  # rounding may change the first draw, once in a million
                    counts.texts[tuple(following[:COUNTED])] += 1
            bar.update(len(chunk))
    prefix, number = [*prompt.ids, first], counts.texts.total()
    expected = expected_cells(target, prefix, sampling, number, COUNTED, len(prompt.ids))
    return _judge(prompt, rule, counts, expected)


def expected_cells(
    target: TargetModel,
    prefix: Sequence[int],
    sampling: SamplingParams,
    samples: int,
    depth: int = 2,
    prompt_length: int | None = None,
) -> dict[Prefix, float]:
    """`law_cells` of what follows a text.

    Args:
        target: the model.
        prefix: the text.
        sampling: its processors and warpers.
        samples: continuations.
        depth: tokens that are counted.
        prompt_length: how much of the text was given; None: all.
    """
    given = len(prefix) if prompt_length is None else prompt_length
    law = functools.partial(_law, target, given, sampling, tuple(prefix))
    return law_cells(law, samples, depth)


def law_cells(law: Law, samples: int, depth: int) -> dict[Prefix, float]:
    """Expected counts of texts; each at least `MIN_EXPECTED`, if possible.

    A cell is a prefix. It holds the texts that begin so and with none of the longer prefixes among
    the cells; the empty prefix holds the rest. The cells depend on the target's law and
    not on what was observed.

    Args:
        law: of the target.
        samples: texts.
        depth: tokens of the longest prefix.
    """
    cells: dict[Prefix, float] = {}

    def split(prefix: Prefix, mean: float) -> float:
        """Make cells of what begins with `prefix`; returns the mean of what fits into none."""
        left = mean
        if len(prefix) < depth and mean >= 2 * MIN_EXPECTED:  # it can be told apart
            means = law(prefix).double() * mean
            for token in (means >= MIN_EXPECTED).nonzero().flatten().tolist():
                inside = float(means[token])
                left -= inside - split((*prefix, token), inside)
        if prefix and left >= MIN_EXPECTED:
            cells[prefix] = left
            return 0.0
        return left

    cells[()] = max(0.0, split((), float(samples)))
    while len(cells) > 1 and cells[()] < MIN_EXPECTED:
        # Only what is in no other cell's prefix falls back to the empty one.
        outermost = (
            cell
            for cell in cells
            if cell and not any(cell[:n] in cells for n in range(1, len(cell)))
        )
        smallest = min(outermost, key=cells.__getitem__)
        cells[()] += cells.pop(smallest)
    return cells


def in_cells(texts: Counter[Prefix], cells: dict[Prefix, float]) -> list[int]:
    """How many texts each cell holds: a text is counted in its longest prefix among them."""
    observed: Counter[Prefix] = Counter()
    for text, number in texts.items():
        longest = next(text[:n] for n in range(len(text), -1, -1) if text[:n] in cells)
        observed[longest] += number
    return [observed[cell] for cell in cells]


def _judge(prompt: Prompt, rule: str, counts: _Counts, expected: dict[Prefix, float]) -> LawReport:
    tests = None
    if len(expected) > 1:
        tests = compare_counts(in_cells(counts.texts, expected), list(expected.values()), REFUTED)
    rejected = tuple(counts.rejected_at[depth] for depth in range(1, COUNTED + 1))
    verdict, reason = INCONCLUSIVE, ""
    if tests is None:
        reason = (
            "no two outcomes are likely enough to be counted: take more samples, other prompts or "
            "another temperature"
        )
    elif tests.p_value < REFUTED:
        verdict, reason = NOT_LOSSLESS, "the output does not follow the target's law"
    elif tests.p_value < DOUBTFUL:
        reason = "a suspicious p-value: repeat with another seed and more samples"
    elif min(counts.accepting, rejected[0]) < MIN_ROUNDS:
        reason = (
            f"{counts.accepting} rounds accepted drafts and {rejected[0]} rejected them all; "
            f"each must happen {MIN_ROUNDS} times: take more samples"
        )
    else:
        verdict = LOSSLESS
    return LawReport(
        rule,
        verdict,
        reason,
        prompt.id,
        counts.texts.total(),
        len(expected),
        tests,
        None if tests is None else tests.p_value,
        counts.accepting,
        rejected[0],
        rejected,
    )


def _choose(
    target: TargetModel, prompts: Sequence[Prompt], sampling: SamplingParams, samples: int
) -> tuple[Prompt, int]:
    """The prompt, with its likeliest first token, after which the most tokens can be counted."""
    best: tuple[int, Prompt, int] | None = None
    for prompt in prompts:
        given = tuple(prompt.ids)
        first = int(_law(target, len(given), sampling, given, ()).argmax())
        law = _law(target, len(given), sampling, (*given, first), ())
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
    law = _law(target, len(prompt), sampling, tuple(prompt), ())
    for seed in itertools.count(sampling.seed):
        if sample(law, seed, len(prompt)) == first:
            yield seed


def _law(
    target: TargetModel,
    prompt_length: int,
    sampling: SamplingParams,
    before: Prefix,
    prefix: Prefix,
) -> Tensor:
    """(V,) what follows `before` and `prefix`, the first tokens of which are the prompt's."""
    text = [*before, *prefix]
    ids = torch.tensor([text], device=target.device)
    logits = target.forward(ids, logits_to_keep=1).logits[0, -1]
    sampler = Sampler(sampling, prompt_length, (), target.device)
    return sampler.law(sampler.scores(logits, text))


class WrongLaw(Proposer):
    """Negative control: a proposer that records far too small a probability for what it drafted.

    The rule then accepts nearly every draft, and the output follows the drafts instead of the
    target.

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

    @property
    def chains(self) -> bool:
        """As the proposer's."""
        return self.proposer.chains

    def start(self, session: Session) -> None:
        """Start the proposer."""
        self.proposer.start(session)

    def propose(self, states: Sequence[RowState | None]) -> list[TokenTree | None]:
        """The proposer's trees with the wrong law."""
        trees = self.proposer.propose(states)
        return [None if tree is None else self._spoil(tree) for tree in trees]

    def finish(self, row: int, tokens: list[int]) -> None:
        """Finish the proposer's sequence."""
        self.proposer.finish(row, tokens)

    def resume(self) -> Resume | None:
        """What the proposer has run already."""
        return self.proposer.resume()

    def _spoil(self, tree: TokenTree) -> TokenTree:
        law = torch.ones(tree.num_nodes, self.vocab_size, device=tree.tokens.device)
        law[tree.parents[1:], tree.tokens[1:]] = 1e-9
        return TokenTree(tree.tokens, tree.parents, Proposal.DENSE, law)
