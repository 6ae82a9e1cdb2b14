"""Trees grown in fixed shapes are the host's, node for node.

Letters: B sequences, F frontier nodes, N nodes, V vocabulary, Vd draft vocabulary.
"""

import functools
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from inference.proposers import RowState, TreeOptions
from inference.proposers.growth import new_tree
from inference.proposers.laws import draft_law, proposal_kind
from inference.proposers.marginals import grow_marginals
from inference.sampling import SamplingParams
from inference.shapes.static_tree import static_tree
from inference.static.drawn import DrawnGrowth, DrawnShapeGrowth
from inference.static.growth import DraftLaw, DynamicGrowth, Grown, Growth
from inference.static.laws import Warpers, warpers_of
from inference.static.noise import seed_words
from inference.static.paths import PathsGrowth, ShapeGrowth
from inference.static.tree import DraftTree, to_host
from inference.tree import DRAWN_KINDS, Proposal, TokenTree
from tests.inference.static.batches import WITHOUT_VALUES, assert_static

Prefix = tuple[int, ...]
CPU = torch.device("cpu")
VOCAB, COLUMNS = 13, torch.tensor([11, 2, 5, 0, 7, 12, 3, 9, 1])
SHAPE = static_tree([(0,), (2,), (0, 1), (2, 0), (2, 3), (2, 3, 0), (2, 3, 0, 1)])
CHAIN = static_tree([(0,), (0, 0), (0, 0, 0)])
GREEDY, HOT = SamplingParams(), SamplingParams(0.9)
NARROW = SamplingParams(1.0, 3, 0.9)


class Drafts:
    """Draft logits and chances of B sequences, by sequence and prefix, or by depth alone."""

    def __init__(
        self,
        seed: int,
        columns: int = 9,
        dtype: torch.dtype = torch.float32,
        ties: bool = False,
        marginal: bool = False,
        holes: bool = False,
    ) -> None:
        self.seed, self.columns, self.dtype, self.ties = seed, columns, dtype, ties
        self.marginal, self.holes = marginal, holes

    @functools.cache  # noqa: B019
    def logits(self, row: int, prefix: Prefix) -> Tensor:
        """(Vd,)"""
        generator = self._generator(row, prefix)
        values = torch.randn(self.columns, generator=generator) * 2
        if self.holes:
            order = torch.randperm(self.columns, generator=generator)
            values[order[: self.columns - 2]] = -torch.inf
        return (values.round() if self.ties else values).to(self.dtype)

    def chance(self, row: int, prefix: Prefix) -> float:
        """In (0, 1)."""
        return float(torch.rand(1, generator=self._generator(row, (99, *prefix))))

    def _generator(self, row: int, prefix: Prefix) -> torch.Generator:
        key = len(prefix) if self.marginal else prefix
        return torch.Generator().manual_seed(hash((self.seed, row, key)) % 2**63)


def prefix_at(tokens: list[int], parents: list[int], node: int) -> Prefix:
    found: list[int] = []
    while node > 0:
        found.append(tokens[node])
        node = parents[node]
    return tuple(found[::-1])


class Rounds:
    """One round of B sequences, on the host and in fixed shapes."""

    def __init__(
        self,
        options: TreeOptions,
        sampling: SamplingParams,
        rule: str,
        drafts: Drafts,
        depths: list[int],
        vocab: Tensor | None = None,
        chances: bool = False,
    ) -> None:
        self.options, self.rule, self.drafts, self.depths = options, rule, drafts, depths
        rng = random.Random(drafts.seed)
        self.vocab, self.chances = vocab, chances
        self.positions = [rng.randrange(1, 500) for _ in depths]
        self.params = [
            SamplingParams(
                sampling.temperature, sampling.top_k, sampling.top_p, rng.randrange(2**66)
            )
            for _ in depths
        ]
        self.kind = proposal_kind(rule, sampling, options.draws or "all")
        law = draft_law(sampling, options.draft_temperature or 1.0)
        self.law = DraftLaw(
            self.kind,
            warpers_of([law]),
            seed_words(params.seed for params in self.params),
            torch.tensor(self.positions),
            options.sharpness,
            vocab,
        )
        self.roots = torch.tensor([rng.randrange(VOCAB) for _ in depths])

    def growth(self) -> Growth:
        """In fixed shapes."""
        longest, columns = torch.tensor(self.depths), self.drafts.columns
        if self.options.shape is not None:
            if self.kind in DRAWN_KINDS:
                return DrawnShapeGrowth(self.options, self.law, longest, columns)
            return ShapeGrowth(self.options, self.law, longest)
        if self.kind in DRAWN_KINDS:
            return DrawnGrowth(self.options, self.law, longest, columns)
        kind = PathsGrowth if self.drafts.marginal else DynamicGrowth
        return kind(self.options, self.law, longest, columns)

    def run(self) -> DraftTree:
        """Level by level, as drafters do."""
        growth = self.growth()
        grown = growth.start(self.roots)
        before: list[list[Prefix]] = [[()] for _ in self.depths]
        for level, width in enumerate(growth.widths):
            prefixes = before
            if level:
                tokens, places = growth.frontier(grown)
                prefixes = self._prefixes(grown, before, tokens, places)
            assert all(len(of_each) == width for of_each in prefixes)
            grown = growth.add(grown, *self._logits(prefixes))
            before = prefixes
        return growth.finish(grown)

    def _prefixes(
        self, grown: Grown, before: list[list[Prefix]], tokens: Tensor, places: Tensor
    ) -> list[list[Prefix]]:
        """Of the frontier, by what the growth tells a drafter."""
        found = [
            [(*before[row][place], token) for token, place in zip(*pairs, strict=True)]
            for row, pairs in enumerate(zip(tokens.tolist(), places.tolist(), strict=True))
        ]
        candidates = grown.candidates
        for row, nodes in enumerate(grown.frontier.tolist()):
            of_row = candidates.tokens[row].tolist(), candidates.parents[row].tolist()
            assert found[row] == [prefix_at(*of_row, node) for node in nodes]
        return found

    def _logits(self, prefixes: list[list[Prefix]]) -> tuple[Tensor, Tensor | None]:
        if self.drafts.marginal:
            prefixes = [of_row[:1] for of_row in prefixes]
        logits = [
            torch.stack([self.drafts.logits(row, prefix) for prefix in of_row])
            for row, of_row in enumerate(prefixes)
        ]
        if not self.chances:
            return torch.stack(logits), None
        chances = [
            [self.drafts.chance(row, prefix) for prefix in of_row]
            for row, of_row in enumerate(prefixes)
        ]
        return torch.stack(logits), torch.tensor(chances)

    def host(self, row: int) -> TokenTree:
        """One sequence by the host."""
        text = [0] * self.positions[row] + [int(self.roots[row])]
        state = RowState(text, 1, None, torch.zeros(0, 1), self.depths[row], self.params[row])
        drafts = self.drafts
        if drafts.marginal:
            levels = [(0,) * level for level in range(self.options.longest)]
            rows = torch.stack([drafts.logits(row, level) for level in levels])
            chances = [drafts.chance(row, level) for level in levels]
            given = torch.tensor(chances) if self.chances else None
            return grow_marginals(self.options, state, self.rule, rows, given, VOCAB, self.vocab)
        tree = new_tree(self.options, state, self.rule, CPU, VOCAB, self.vocab)
        frontier = torch.zeros(1, dtype=torch.int64)
        while len(frontier):
            of_all = tree.candidates.tokens.tolist(), tree.candidates.parents.tolist()
            prefixes = [prefix_at(*of_all, node) for node in frontier.tolist()]
            logits = torch.stack([drafts.logits(row, prefix) for prefix in prefixes])
            chances = [drafts.chance(row, prefix) for prefix in prefixes]
            tree.add_children(frontier, logits, torch.tensor(chances) if self.chances else None)
            frontier = tree.frontier() if tree.levels < tree.depth else frontier[:0]
        return tree.finish()[0]

    def check(self) -> int:
        """Compare all of it; how many nodes there are."""
        found, nodes = self.run(), 0
        padding = ~found.valid
        assert (found.tokens[padding] == 0).all() and (found.parents[padding] == -1).all()
        for row in range(len(self.depths)):
            tree = to_host(found, row, self.kind, VOCAB, self.vocab)
            assert_equal(tree, self.host(row))
            nodes += tree.num_nodes
        return nodes


def assert_equal(found: TokenTree, expected: TokenTree) -> None:
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert found.parents.tolist() == expected.parents.tolist()
    if expected.draft_probs is not None:
        assert found.draft_probs is not None
        assert torch.equal(found.draft_probs, expected.draft_probs)
    if expected.drawn is not None:
        assert found.drawn is not None and torch.equal(found.drawn, expected.drawn)
    assert found.proposal is expected.proposal
    if expected.survival is not None:
        assert found.survival is not None
        torch.testing.assert_close(found.survival[1:], expected.survival[1:])


def some_depths(rng: random.Random, longest: int) -> list[int]:
    return [rng.choice([0, 1, 2, longest, 9]) for _ in range(3)]


RULES = [
    ("match", GREEDY),
    ("match", HOT),
    ("coupled", GREEDY),
    ("coupled", HOT),
    ("coupled", NARROW),
    ("rejection", GREEDY),
]
DRAWING = [(draws, sampling) for draws in ("all", "one") for sampling in (HOT, NARROW)]


@settings(deadline=None, max_examples=30)
@given(
    st.integers(0, 10**6),
    st.sampled_from(RULES),
    st.integers(2, 24),
    st.integers(1, 4),
    st.integers(1, 5),
)
def test_dynamic_trees(
    seed: int, rule: tuple[str, SamplingParams], size: int, depth: int, top_k: int
) -> None:
    rng = random.Random(seed)
    options = TreeOptions(size=size, depth=depth, top_k=top_k, draft_temperature=rng.choice([1, 2]))
    vocab = rng.choice([None, COLUMNS])
    ties = rule[1] is not NARROW and rng.random() < 0.3  # of those at its edge, any may be dropped
    drafts = Drafts(seed, VOCAB if vocab is None else len(COLUMNS), ties=ties)
    Rounds(options, rule[1], rule[0], drafts, some_depths(rng, depth), vocab).check()


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10**6), st.sampled_from(RULES), st.booleans())
def test_shapes(seed: int, rule: tuple[str, SamplingParams], marginal: bool) -> None:
    rng = random.Random(seed)
    options = TreeOptions(shape=rng.choice([SHAPE, CHAIN]))
    drafts = Drafts(seed, len(COLUMNS), marginal=marginal)
    depths = some_depths(rng, options.longest)
    Rounds(options, rule[1], rule[0], drafts, depths, COLUMNS).check()


@settings(deadline=None, max_examples=20)
@given(
    st.integers(0, 10**6),
    st.sampled_from(RULES),
    st.integers(2, 24),
    st.integers(1, 4),
    st.integers(1, 6),
)
def test_best_paths(
    seed: int, rule: tuple[str, SamplingParams], size: int, depth: int, top_k: int
) -> None:
    rng = random.Random(seed)
    options = TreeOptions(size=size, depth=depth, top_k=top_k)
    drafts = Drafts(seed, len(COLUMNS), marginal=True)
    Rounds(options, rule[1], rule[0], drafts, some_depths(rng, depth), COLUMNS).check()


@settings(deadline=None, max_examples=30)
@given(
    st.integers(0, 10**6),
    st.sampled_from(DRAWING),
    st.integers(2, 24),
    st.integers(1, 4),
    st.integers(1, 5),
)
def test_drawn_trees(
    seed: int, drawing: tuple[str, SamplingParams], size: int, depth: int, top_k: int
) -> None:
    rng = random.Random(seed)
    options = TreeOptions(size=size, depth=depth, top_k=top_k, draws=drawing[0])
    vocab = rng.choice([None, COLUMNS])
    columns = VOCAB if vocab is None else len(COLUMNS)
    dtype = rng.choice([torch.float32, torch.float64])
    drafts = Drafts(seed, columns, dtype, marginal=rng.random() < 0.3)
    Rounds(options, drawing[1], "rejection", drafts, some_depths(rng, depth), vocab).check()


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10**6), st.sampled_from(DRAWING), st.booleans(), st.integers(2, 9))
def test_drawn_shapes(
    seed: int, drawing: tuple[str, SamplingParams], marginal: bool, columns: int
) -> None:
    rng = random.Random(seed)
    wide = static_tree([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (1, 2), (1, 2, 0)])
    options = TreeOptions(shape=rng.choice([wide, CHAIN, SHAPE]), draws=drawing[0])
    drafts = Drafts(seed, columns, marginal=marginal)
    depths = some_depths(rng, options.longest)
    Rounds(options, drawing[1], "rejection", drafts, depths, COLUMNS[:columns]).check()


@pytest.mark.parametrize("kind", ["dynamic", "shape", "paths", "drawn", "drawn shape"])
def test_many_rounds(kind: str) -> None:
    """Every tree has the nodes it may have."""
    shape = SHAPE if "shape" in kind else None
    options = TreeOptions(size=12, depth=4, top_k=3, shape=shape)
    sampling, rule = (HOT, "rejection") if "drawn" in kind else (HOT, "coupled")
    nodes = 0
    for seed in range(12):
        drafts = Drafts(seed, VOCAB, marginal=kind == "paths")
        nodes += Rounds(options, sampling, rule, drafts, [9, 9, 9, 9]).check()
    assert nodes == 12 * 4 * (8 if shape else 12)


@pytest.mark.parametrize("options", [TreeOptions(6, 3, 3), TreeOptions(shape=SHAPE)])
@pytest.mark.parametrize("marginal", [False, True])
@pytest.mark.parametrize("rule", ["match", "rejection"])
@pytest.mark.parametrize("least", [0.0, 0.3])
def test_nodes_that_are_not_worth_it(
    options: TreeOptions, marginal: bool, rule: str, least: float
) -> None:
    """Confidence decides who gets children, and goes along in the tree."""
    for seed in range(4):
        given = TreeOptions(
            options.size, 3, options.top_k, shape=options.shape, min_survival=least, draws="all"
        )
        drafts = Drafts(seed, VOCAB, marginal=marginal)
        Rounds(given, HOT, rule, drafts, [9, 9, 2], chances=True).check()


@pytest.mark.parametrize("kind", ["dynamic", "shape", "paths"])
def test_tokens_that_cannot_be(kind: str) -> None:
    """Laws of a few tokens leave padding, of which nothing grows."""
    shape = SHAPE if kind == "shape" else None
    options = TreeOptions(size=16, depth=3, top_k=4, shape=shape)
    sizes = set()
    for seed in range(6):
        drafts = Drafts(seed, VOCAB, marginal=kind == "paths", holes=True)
        rounds = Rounds(options, GREEDY, "match", drafts, [9, 9])
        rounds.check()
        sizes |= set(rounds.run().valid.sum(1).tolist())
    assert max(sizes) < 16


@pytest.mark.slow
def test_a_large_vocabulary() -> None:
    for rule, sampling in (("match", HOT), ("coupled", NARROW)):
        drafts = Drafts(3, 50_257, torch.bfloat16, ties=False)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tests.inference.static.test_growth.VOCAB", 50_257)
            Rounds(TreeOptions(12, 3, 4), sampling, rule, drafts, [9, 9]).check()


def test_sequences_of_different_temperature() -> None:
    """Each has the tree that it has alone."""
    options, own = TreeOptions(10, 3, 3), [0.0, 0.7, 1.3]
    for seed in range(4):
        drafts = Drafts(seed, VOCAB)
        rounds = Rounds(options, HOT, "coupled", drafts, [9, 9, 9])
        temperatures = torch.tensor(own, dtype=torch.float64)
        rounds.law = DraftLaw(
            Proposal.COUPLED, Warpers(temperatures), rounds.law.seeds, rounds.law.positions
        )
        rounds.params = [
            SamplingParams(temperature, seed=params.seed)
            for temperature, params in zip(own, rounds.params, strict=True)
        ]
        rounds.check()


@pytest.mark.parametrize("how", WITHOUT_VALUES)
@pytest.mark.parametrize("kind", ["dynamic", "shape", "paths", "drawn", "one", "drawn shape"])
def test_nothing_is_read_by_the_host(how: str, kind: str) -> None:
    """A whole draft loop, with logits that are made of the frontier's tokens."""
    shape = SHAPE if "shape" in kind else None
    draws = "one" if kind == "one" else None
    options = TreeOptions(size=9, depth=3, top_k=3, shape=shape, draws=draws)
    rule = "coupled" if kind in ("dynamic", "shape", "paths") else "rejection"
    drafts = Drafts(1, VOCAB, marginal=kind == "paths")
    rounds = Rounds(options, HOT, rule, drafts, [9, 2, 1])
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1))
    growth = rounds.growth()

    def draft(roots: Tensor, table: Tensor, seeds: Tensor, places: Tensor, most: Tensor) -> Any:
        law = DraftLaw(rounds.kind, rounds.law.warpers, seeds, places)
        growth.law, growth.max_depth = law, most
        grown = growth.start(roots)
        for _ in growth.widths:
            tokens, _ = growth.frontier(grown)
            if kind == "paths":
                tokens = tokens[:, :1] * 0 + 1
            grown = growth.add(grown, table[tokens])
        return growth.finish(grown)

    most = torch.tensor([9, 2, 1])
    law = rounds.law
    assert_static(how, draft, rounds.roots, table, law.seeds, law.positions, most)
