"""Admission over a batch: against every other assignment, and what it may look at, exactly."""

import itertools
import random
from collections.abc import Callable, Sequence

import pytest

from inference.scheduling.admission import Offer, Plan, assign, common_width, plan_of
from inference.scheduling.schedule import cut_tree
from inference.tree import TokenTree
from tests.inference.oracles import (
    EXACT,
    Laws,
    Prefix,
    WeightedTrees,
    by_depth,
    drawn_trees,
    emitted_law,
    random_laws,
    sequence_law,
    top_tree,
)
from tests.inference.scheduling.test_schedule import shortened

# The best assignment ------------------------------------------------------------------------------


def random_offers(source: random.Random, rows: int) -> list[list[Offer]]:
    """Something of everything, the plain step first."""
    return [
        [
            Offer(1.0, 1),
            *(
                Offer(1.0 + 3 * source.random(), source.randint(1, 6), source.random() / 2)
                for _ in range(source.randint(0, 4))
            ),
        ]
        for _ in range(rows)
    ]


def priced(
    offers: list[list[Offer]], chosen: Sequence[int], seconds: Callable[[int], float]
) -> Plan:
    return plan_of([own[n] for own, n in zip(offers, chosen, strict=True)], chosen, seconds)


def random_seconds(source: random.Random) -> Callable[[int], float]:
    """Of forwards of up to 6 rows; more of them may be cheaper, as they are on some CPUs."""
    price = [source.uniform(0.5, 3.0) for _ in range(7)]
    return price.__getitem__


@pytest.mark.parametrize("seed", range(6))
def test_it_is_the_best_of_all_assignments(seed: int) -> None:
    source = random.Random(seed)
    widths = set()
    for _ in range(60):
        offers, seconds = random_offers(source, source.randint(1, 4)), random_seconds(source)
        found = assign(offers, seconds)
        every = itertools.product(*(range(len(own)) for own in offers))
        best = max(priced(offers, chosen, seconds).rate for chosen in every)
        assert found.rate == pytest.approx(best, rel=1e-9)
        assert found == priced(offers, found.chosen, seconds)
        widths.add(max(own[n].size for own, n in zip(offers, found.chosen, strict=True)))
    assert widths == {1, 2, 3, 4, 5, 6}


def chains(chances: Sequence[float], drafting: float) -> list[Offer]:
    """Chains of 0, 1, ... drafts, each accepted with its chance if those before it are."""
    tokens = list(itertools.accumulate(itertools.accumulate(chances, lambda a, b: a * b)))
    return [Offer(1.0, 1)] + [
        Offer(1.0 + tokens[n], n + 2, drafting * (n + 1)) for n in range(len(chances))
    ]


def alone(offers: list[list[Offer]], seconds: Callable[[int], float]) -> list[int]:
    """What each sequence takes that holds the others to be like itself."""
    rows = len(offers)

    def rate(offer: Offer) -> float:
        return offer.tokens / (seconds(offer.size) + rows * offer.seconds)

    def best(own: list[Offer]) -> int:
        return max(range(len(own)), key=lambda n: rate(own[n]))

    return [best(own) for own in offers]


def sloping(slope: float) -> Callable[[int], float]:
    return lambda width: 1.0 + slope * (width - 1)


def test_it_never_costs_more_than_each_for_itself() -> None:
    source, better = random.Random(1), 0
    for _ in range(200):
        seconds = sloping(source.uniform(0.0, 0.5))
        offers = [chains([source.random()] * 5, source.uniform(0.0, 0.05)) for _ in range(4)]
        found = assign(offers, seconds)
        own = priced(offers, alone(offers, seconds), seconds)
        assert found.rate >= own.rate * (1.0 - 1e-12)
        better += found.rate > 1.01 * own.rate
    assert better > 50


def test_padding_is_priced() -> None:
    """One sequence alone is worth long drafts; beside seven that are not it is not."""
    good, bad = chains([0.9] * 5, 0.0), chains([0.0] * 5, 0.0)

    seconds = sloping(0.3)

    assert assign([good], seconds).chosen == (5,)
    assert assign([good] + [bad] * 7, seconds).chosen == (0,) * 8
    assert assign([good] * 6 + [bad] * 2, seconds).chosen[0] > 0


def test_rows_that_are_paid_are_used_where_drafting_is_worth_it() -> None:
    """A poor sequence drafts beside good ones what it would not draft for itself."""
    good, poor = chains([0.95] * 3, 0.0), chains([0.4] * 3, 0.0)

    seconds = sloping(0.41)

    assert assign([poor], seconds).chosen == (0,)
    assert assign([good, good, poor], seconds).chosen == (3, 3, 3)
    dear = chains([0.4] * 3, 0.5)
    assert assign([good, good, dear], seconds).chosen == (3, 3, 0)


def test_of_equal_assignments_the_narrowest_is_taken() -> None:
    assert assign([chains([0.0] * 3, 0.0)] * 2, lambda width: 1.0).chosen == (0, 0)


def test_chains_of_a_batch_are_cut_to_one_width() -> None:
    source = random.Random(2)
    found = set()
    for _ in range(100):
        survival = [
            sorted((source.random() for _ in range(source.randint(0, 4))), reverse=True)
            for _ in range(3)
        ]
        price, rate = random_seconds(source), source.uniform(0.2, 2.0)
        least = source.randint(1, 2)
        width = common_width(survival, rate, price, least)
        most = max(least, 1 + max(map(len, survival)))
        values = {
            rows: sum(sum(chain[: rows - 1]) for chain in survival) - rate * price(rows)
            for rows in range(least, most + 1)
        }
        assert values[width] == pytest.approx(max(values.values()))
        found.add(width)
    assert found >= {1, 2, 3, 4}
    assert common_width([[0.5, 0.5]], 1.0, lambda rows: 1.0, 4) == 4


# What may be looked at ----------------------------------------------------------------------------
#
# Two sequences with laws of their own. How much of each is verified is decided for both at once.
# The law of both texts must be the product of their targets' laws.

TARGETS = random_laws(5, 3), random_laws(6, 3)
DRAFTS = random_laws(10, 3), random_laws(11, 3)

Admission = Callable[[TokenTree, TokenTree], tuple[int, int]]
"""Both drafted chains -> how many drafts of each are verified."""
Pairs = list[tuple[float, TokenTree, TokenTree]]


def apart() -> Pairs:
    """Both chains of two drafts, drawn with noise of their own."""
    one, other = (drawn_trees(draft, by_depth(1, 1)) for draft in DRAFTS)
    return [(v * w, tree, beside) for (v, tree), (w, beside) in itertools.product(one, other)]


def alike() -> Pairs:
    """The same law drawn from with the same noise: one seed, at the same place of two texts."""
    return [(weight, tree, tree) for weight, tree in drawn_trees(DRAFTS[0], by_depth(1, 1))]


def first_drafts(tree: TokenTree, drafts: int) -> TokenTree:
    """A chain without its last drafts, drawn or not."""
    if tree.draft_probs is None:
        return cut_tree(tree, drafts + 1, drafts)
    return shortened(tree, drafts)


def distance(
    pairs: Pairs, admission: Admission, rule: str, targets: tuple[Laws, Laws] = TARGETS
) -> float:
    """Total variation of the law of both texts from the product of the targets' laws."""
    found: dict[tuple[Prefix, Prefix], float] = {}
    known: dict[tuple, dict[Prefix, float]] = {}

    def law_of(row: int, tree: TokenTree, drafts: int) -> dict[Prefix, float]:
        key = (row, tuple(tree.tokens.tolist()), drafts)
        if key not in known:
            cut: WeightedTrees = [(1.0, first_drafts(tree, drafts))]
            known[key] = emitted_law(cut, targets[row], rule, 3)
        return known[key]

    for weight, *trees in pairs:
        counts = admission(*trees)
        laws = [law_of(row, tree, counts[row]) for row, tree in enumerate(trees)]
        for (text, chance), (beside, other) in itertools.product(*(law.items() for law in laws)):
            both = text, beside
            found[both] = found.get(both, 0.0) + weight * chance * other
    expected = [sequence_law(target, 3) for target in targets]
    every = {
        (one, other): expected[0][one] * expected[1][other]
        for one, other in itertools.product(*expected)
    }
    assert sum(found.values()) == pytest.approx(1.0)
    return 0.5 * sum(
        abs(found.get(both, 0.0) - every.get(both, 0.0)) for both in found.keys() | every.keys()
    )


def chances(tree: TokenTree) -> list[float]:
    """What a confidence output says; of the second draft it depends on the first."""
    return [0.5, 0.5 * (0.9 if tree.token(1) == 0 else 0.1)]


def by_both(seconds: Sequence[float], backward: bool) -> Admission:
    """Algorithm 1 of arXiv:2607.05147 over two sequences, for a forward whose cost is by rows.

    Drafts are admitted by survival, the likeliest first, as long as tokens per second rise; looking
    ahead instead, up to the best of all numbers.

    Args:
        seconds: of 2, 3, ... rows in all.
        backward: stop at the first draft that does not pay.
    """

    def admission(one: TokenTree, other: TokenTree) -> tuple[int, int]:
        drafts = [(chance, row) for row, t in enumerate((one, other)) for chance in chances(t)]
        drafts.sort(key=lambda draft: (-draft[0], draft[1]))
        tokens, admitted, best = 2.0, 0, 2.0 / seconds[0]
        for count, (chance, _) in enumerate(drafts, start=1):
            tokens += chance
            if tokens / seconds[count] > best:
                admitted, best = count, tokens / seconds[count]
            elif backward:
                break
        rows = [row for _, row in drafts[:admitted]]
        return rows.count(0), rows.count(1)

    return admission


RISING = [1.0, 1.15, 1.3, 1.45, 1.6]
STAIRS = [1.0, 1.35, 1.62, 1.64, 1.65]


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("seconds", [RISING, STAIRS], ids=["rising", "stairs"])
def test_drawn_drafts_of_a_batch_are_admitted_looking_backwards(
    rule: str, seconds: list[float]
) -> None:
    """With noise of their own sequences may look at each other, and none at what comes after."""
    assert distance(apart(), by_both(seconds, True), rule) < EXACT
    ahead = distance(apart(), by_both(seconds, False), rule)
    assert (ahead > 0.01) == (seconds is STAIRS)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_sequences_with_the_same_noise_must_not_look_at_each_other(rule: str) -> None:
    """Where the other sequence's draft was drawn with this one's noise, it tells this one's. So
    `may_look` has sequences under these rules look at themselves only, whatever their seeds.
    """

    def if_the_others_is_likely(one: TokenTree, other: TokenTree) -> tuple[int, int]:
        return (2 if other.token(1) == 0 else 0), 2

    targets = TARGETS[0], TARGETS[0]
    own = [(weight, shortened(tree, 2)) for weight, tree in drawn_trees(DRAFTS[0], by_depth(1, 1))]
    apart = [(v * w, one, other) for (v, one), (w, other) in itertools.product(own, own)]
    assert distance(apart, if_the_others_is_likely, rule, targets) < EXACT
    one_text = [
        (weight, shortened(tree, if_the_others_is_likely(tree, beside)[0]))
        for weight, tree, beside in alike()
    ]
    emitted, expected = emitted_law(one_text, TARGETS[0], rule, 3), sequence_law(TARGETS[0], 3)
    off = 0.5 * sum(abs(emitted.get(text, 0.0) - expected[text]) for text in expected)
    assert off > 0.05


@pytest.mark.parametrize("rule", ["match", "rejection", "block"])
def test_chosen_drafts_of_a_batch_may_be_admitted_for_any_reason(rule: str) -> None:
    one, other = (top_tree(draft, 1, 1) for draft in DRAFTS)
    for counts in itertools.product(range(3), repeat=2):
        assert distance([(1.0, one, other)], lambda *_, c=counts: c, rule) < EXACT
