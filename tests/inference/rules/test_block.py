"""Block verification is lossless and accepts the most; traversal, its tree form, is the reference.

The enumeration over warpers, reduced vocabularies and ends of the text is in `test_verify`.
"""

import pytest
import torch
from torch import Tensor

import inference.rules.block as block_module
from inference.rules.acceptance import KeyedCoins, Verdict
from inference.sampling import Stream, draw, gumbel
from inference.tree import Proposal, TokenTree
from inference.verify import verify
from tests.inference.oracles import (
    EXACT,
    Laws,
    Plan,
    Prefix,
    WeightedTrees,
    by_depth,
    chi_square,
    decode,
    drafted_trees,
    drawn_trees,
    expected_accepted,
    greedy_draft,
    random_laws,
    top_tree,
    total_variation,
    verdict_law,
)

# Exact enumeration ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vocab", "length", "hole"),
    [(5, 1, False), (5, 2, False), (3, 3, False), (2, 5, False), (5, 2, True), (3, 3, True)],
)
def test_block_is_lossless(vocab: int, length: int, hole: bool) -> None:
    target, draft = random_laws(1, vocab, hole=hole), random_laws(2, vocab, hole=hole)
    trees = drawn_trees(draft, by_depth(*[1] * length))
    assert total_variation(trees, target, "block", length + 1) < EXACT


def test_block_is_lossless_when_the_laws_are_equal() -> None:
    target = random_laws(3, 3)
    trees = drawn_trees(target, by_depth(1, 1, 1))
    assert total_variation(trees, target, "block", 4) < EXACT
    assert expected_accepted(trees, target, "block") == pytest.approx(3.0, abs=EXACT)


def test_block_is_lossless_when_growth_depends_on_earlier_draws() -> None:
    target, draft = random_laws(4, 3), random_laws(5, 3)
    trees = drawn_trees(draft, lambda prefix: int(len(prefix) < 3 and prefix[-1:] != (0,)))
    assert len({tree.num_nodes for _, tree in trees}) == 3
    assert total_variation(trees, target, "block", 4) < EXACT


def test_block_accepts_as_much_as_it_should() -> None:
    """p = (1/3, 2/3), q = (2/3, 1/3), two drafts: 11/9 accepted (arXiv:2403.10444)."""
    p, q = torch.tensor([1, 2]).double() / 3, torch.tensor([2, 1]).double() / 3
    trees = drawn_trees(lambda _: q, by_depth(1, 1))
    accepted = expected_accepted(trees, lambda _: p, "block")
    assert accepted == pytest.approx(11 / 9, abs=EXACT)
    assert total_variation(trees, lambda _: p, "block", 3) < EXACT


@pytest.mark.parametrize("seed", range(10))
def test_block_accepts_at_least_as_much_as_rejection(seed: int) -> None:
    target, draft = random_laws(10 + seed, 3), random_laws(30 + seed, 3)
    trees = drawn_trees(draft, by_depth(1, 1, 1))
    block, rejection = (expected_accepted(trees, target, rule) for rule in ("block", "rejection"))
    assert block > rejection + 1e-3


def test_block_is_match_on_chosen_chains() -> None:
    """Not only the emitted law: every verdict has the same probability under both rules."""
    for seed in range(5):
        target = random_laws(50 + seed, 4)
        tree = top_tree(random_laws(60 + seed, 4), 1, 1, 1)
        match, block = (verdict_law(tree, target, rule) for rule in ("match", "block"))
        assert match == pytest.approx(block, abs=EXACT)


# Negative controls --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("residual_law", lambda owed, draft: owed),  # emit from p
        ("residual_law", lambda owed, draft: (owed / owed.sum() - draft).clamp(min=0.0)),  # no h
        ("_stop_probability", lambda weight, law, draft: weight),
        (
            "_stop_probability",  # as `rejection` would carry no surplus: S without h
            lambda h, law, draft: h if draft is None else float((law - draft).clamp(min=0.0).sum()),
        ),
        ("accept_probability", lambda owed, draft, x: float(owed[x] / draft[x])),  # not capped at 1
    ],
)
def test_control_wrong_formula(name: str, wrong: object, monkeypatch: pytest.MonkeyPatch) -> None:
    target = random_laws(72, 4)
    trees = drawn_trees(random_laws(73, 4), by_depth(1, 1))
    assert total_variation(trees, target, "block", 3) < EXACT
    monkeypatch.setattr(block_module, name, wrong)
    assert total_variation(trees, target, "block", 3) > 0.01


def test_control_draw_then_drop() -> None:
    """Chains cut where the last drafted token looks bad."""
    target, draft = random_laws(72, 3), random_laws(73, 3)
    trees = drawn_trees(draft, by_depth(1, 1))

    def dropped(tree: TokenTree) -> TokenTree:
        if tree.token(2) != 0:
            return tree
        assert tree.draft_probs is not None
        return TokenTree.chain(tree.tokens[:2], Proposal.DENSE, tree.draft_probs[:1])

    wrong = [(weight, dropped(tree)) for weight, tree in trees]
    assert total_variation(wrong, target, "block", 3) > 0.01


# Noise of its own for every round -----------------------------------------------------------------


class CountedCoins:
    """Keyed coins that refuse to be used twice in one text."""

    def __init__(self, seed: int, stream: Stream) -> None:
        self.coins = KeyedCoins(seed, stream)
        self.used: set[tuple[int, ...]] = set()

    def _use(self, *key: int) -> None:
        assert key not in self.used, f"the coin of {key} is used twice"
        self.used.add(key)

    def accept(self, probability: float, position: int, index: int) -> bool:
        self._use(position, index)
        return self.coins.accept(probability, position, index)

    def draw(self, probs: Tensor, position: int) -> int:
        self._use(position)
        return self.coins.draw(probs, position)


def drafting(draft: Laws, seed: int, own: bool, length: int = 3):
    """Chains drawn with noise of the round's own, or with that of the absolute position."""

    def propose(base: Prefix, position: int) -> TokenTree:
        tokens, laws = [0], []
        for depth in range(length):
            laws.append(draft((*base, *tokens[1:])))
            place = ((position + 1) << 8) + depth if own else position + 1 + depth
            tokens.append(draw(laws[-1], gumbel(seed, place, len(laws[-1]), stream=Stream.DRAFT)))
        return TokenTree.chain(torch.tensor(tokens), Proposal.DENSE, torch.stack(laws))

    return propose


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_no_coin_is_used_twice_in_a_text(rule: str) -> None:
    target, draft = random_laws(80, 3), random_laws(81, 3)
    for seed in range(5):
        coins = CountedCoins(seed, Stream.RESIDUAL)
        propose = drafting(draft, seed, own=True)
        assert decode(target, seed, 40, rule, propose, coins)[1] < 40


class CoinsByPosition(KeyedCoins):
    """The mistake: `block` with one coin per absolute position."""

    def accept(self, probability: float, position: int, index: int) -> bool:
        return super().accept(probability, position + index, 0)


SURPLUS = ([0.5, 0.5], [0.9, 0.1], 2)
"""Target, draft, drafts per round: where reused coins show most."""
SWAPPED = ([0.3, 0.7], [0.7, 0.3], 4)
"""Where reused drafts show most."""


def block_chi_square(
    case: tuple[list[float], list[float], int], own_coins: bool = True, own_drafts: bool = True
) -> float:
    """Of four emitted tokens, 16 cells, all draws from keyed noise, over several rounds."""
    target, draft = (torch.tensor(law, dtype=torch.float64) for law in case[:2])

    def text(seed: int) -> Prefix:
        coins = (KeyedCoins if own_coins else CoinsByPosition)(seed, Stream.RESIDUAL)
        propose = drafting(lambda _: draft, seed, own_drafts, case[2])
        return decode(lambda _: target, seed, 4, "block", propose, coins)[0]

    return chi_square(map(text, range(500)), lambda _: target, 4)


LIMIT = 37.7
"""15 degrees of freedom, 0.1 %."""


@pytest.mark.parametrize("case", [SURPLUS, SWAPPED])
def test_keyed_block_has_the_targets_law(case: tuple[list[float], list[float], int]) -> None:
    assert block_chi_square(case) < LIMIT


def test_control_rounds_must_not_share_noise() -> None:
    """Drafts behind the accepted ones had a say; noise keyed by position alone returns."""
    assert block_chi_square(SURPLUS, own_coins=False) > LIMIT
    assert block_chi_square(SWAPPED, own_drafts=False) > LIMIT


# The contract with callers ------------------------------------------------------------------------


def test_trees_with_branches_are_refused() -> None:
    tree = TokenTree(torch.tensor([0, 1, 2]), torch.tensor([-1, 0, 0]), Proposal.ONE_HOT)
    with pytest.raises(ValueError, match="branch 1"):
        verify(tree, lambda _: torch.full((3,), 1 / 3), "block", 0, 0)


def run_block(tokens: list[int], law: Tensor) -> tuple[Verdict, list[object]]:
    calls: list[object] = []

    def laws(node: int) -> Tensor:
        calls.append(node)
        return law

    def asked(text: list[int]) -> bool:
        calls.append(text)
        return text[-1] == 1

    chain = TokenTree.chain(torch.tensor([0, *tokens]))
    return verify(chain, laws, "block", 0, 0, ended=asked), calls


def test_the_law_is_asked_ahead_in_order_and_the_end_afterwards() -> None:
    verdict, calls = run_block([2, 2], torch.tensor([0.0, 0.0, 1.0]))
    assert verdict == Verdict([1, 2], 2)
    assert calls == [0, 1, 2, [2], [2, 2]]


def test_the_law_is_not_asked_behind_what_the_target_excludes() -> None:
    verdict, calls = run_block([2, 0, 2], torch.tensor([0.0, 0.0, 1.0]))
    assert verdict == Verdict([1], 2)
    assert calls == [0, 1, [2]]


def test_the_round_is_cut_at_the_first_end() -> None:
    tree = TokenTree.chain(torch.tensor([0, 2, 1, 0, 1]))
    laws = [torch.eye(3)[token] for token in (2, 1, 0, 1, 2)]
    calls: list[list[int]] = []

    def ended(text: list[int]) -> bool:
        calls.append(text)
        return text[-1] == 1

    verdict = verify(tree, laws.__getitem__, "block", 0, 0, ended=ended)
    assert verdict == Verdict([1, 2], None)
    assert calls == [[2], [2, 1]]


def test_temperature_zero_follows_the_argmax() -> None:
    laws = torch.eye(4)[[2, 3, 1]]
    for drafts, verdict in (
        ([2, 3], Verdict([1, 2], 1)),
        ([2, 0], Verdict([1], 3)),
        ([0, 3], Verdict([], 2)),
    ):
        tokens = torch.tensor([0, *drafts])
        for tree in (
            TokenTree.chain(tokens),
            TokenTree.chain(tokens, Proposal.DENSE, torch.full((2, 4), 0.25)),
        ):
            for seed in range(20):
                assert verify(tree, laws.__getitem__, "block", seed, 7) == verdict


def test_a_draft_of_probability_zero_is_refused() -> None:
    tree = TokenTree.chain(torch.tensor([0, 1]), Proposal.DENSE, torch.tensor([[1.0, 0.0, 0.0]]))
    with pytest.raises(ValueError, match="really drawn from"):
        verify(tree, lambda _: torch.full((3,), 1 / 3), "block", 0, 0)


# Traversal, the reference -------------------------------------------------------------------------


def tree_families(draft: Laws) -> dict[str, WeightedTrees]:
    def lookup(prefix: Prefix) -> Plan:
        return Plan(draft(prefix), *((1, (1,)), (1, (0, 2)), (0, ()))[len(prefix)])

    return {
        "drawn chain": drawn_trees(draft, by_depth(1, 1)),
        "drawn": drawn_trees(draft, by_depth(2, 2)),
        "drawn, uneven": drawn_trees(
            draft, lambda prefix: (2, int(prefix == (0,)), 0)[len(prefix)]
        ),
        "chosen": [(1.0, top_tree(draft, 2, 2))],
        "greedy": drafted_trees(greedy_draft(draft, 2, 2), Proposal.MIXED),
        "lookup": drafted_trees(lookup, Proposal.MIXED),
    }


@pytest.mark.parametrize("hole", [False, True])
@pytest.mark.parametrize("family", list(tree_families(random_laws(0, 3))))
def test_traversal_is_lossless(family: str, hole: bool) -> None:
    target, draft = random_laws(90, 3, hole=hole), random_laws(91, 3, hole=hole)
    assert total_variation(tree_families(draft)[family], target, "traversal", 3) < EXACT


@pytest.mark.parametrize("seed", range(3))
def test_block_is_traversal_on_chains(seed: int) -> None:
    """Every verdict has the same probability on every chain, of any kind of proposals."""
    target, draft = random_laws(92 + seed, 3, hole=True), random_laws(95 + seed, 3)

    def alternating(prefix: Prefix) -> Plan:
        return Plan(draft(prefix), *((1, ()), (0, (2,)), (1, ()), (0, ()))[len(prefix)])

    chains = [
        *drawn_trees(draft, by_depth(1, 1, 1)),
        *drafted_trees(alternating, Proposal.MIXED),
        (1.0, top_tree(draft, 1, 1, 1)),
    ]
    for _, tree in chains:
        block, traversal = (verdict_law(tree, target, rule) for rule in ("block", "traversal"))
        assert block == pytest.approx(traversal, abs=EXACT)


@pytest.mark.parametrize("seed", range(5))
def test_traversal_is_match_on_chosen_trees(seed: int) -> None:
    target = random_laws(100 + seed, 4)
    tree = top_tree(random_laws(110 + seed, 4), 2, 2)
    match, traversal = (verdict_law(tree, target, rule) for rule in ("match", "traversal"))
    assert match == pytest.approx(traversal, abs=EXACT)


@pytest.mark.parametrize(
    ("widths", "seed"),
    [*(((1, 1), seed) for seed in range(3)), ((2, 1), 3), ((2, 1), 4), ((2, 2), 5)],
)
def test_traversal_accepts_at_least_as_much_as_rejection(
    widths: tuple[int, ...], seed: int
) -> None:
    target, draft = random_laws(120 + seed, 3), random_laws(130 + seed, 3)
    trees = drawn_trees(draft, by_depth(*widths))
    accepted = {rule: expected_accepted(trees, target, rule) for rule in ("traversal", "rejection")}
    assert accepted["traversal"] >= accepted["rejection"] - EXACT


def test_control_traversal_with_a_wrong_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = random_laws(90, 3), random_laws(91, 3)
    monkeypatch.setattr(
        "tests.inference.oracles.accept_probability", lambda owed, draft, x: float(owed[x])
    )
    assert total_variation(tree_families(draft)["greedy"], target, "traversal", 3) > 0.01
