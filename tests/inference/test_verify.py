"""The acceptance rules are lossless: exact enumeration, and equality with plain sampling.

See `tests.inference.oracles` for how. Each wrong rule of the literature must fail the same test.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import inference.verify as verify_module
from inference.rules.acceptance import KeyedCoins, Verdict, accept_probability, residual_law
from inference.sampling import SamplingParams, Stream, draw_top, gumbel, probabilities, sample
from inference.tree import Proposal, TokenTree
from inference.verify import ALL_RULES, RULES, verify
from tests.inference.oracles import (
    EXACT,
    Ends,
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
    prefix_of,
    random_laws,
    random_logits,
    sequence_law,
    top_tree,
    total_variation,
    verdict_law,
    warped,
)

# Exact enumeration ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vocab", "widths", "hole"),
    [
        (5, (1,), False),
        (5, (1, 1), False),
        (3, (1, 1, 1), False),
        (5, (2,), False),
        (4, (3,), False),
        (3, (3,), False),  # the whole vocabulary: the last child is certain
        (3, (2, 1), False),
        (3, (2, 2), False),
        (5, (1, 1), True),
        (4, (3,), True),  # all that the draft can draw, and perhaps not what the target can
        (3, (2, 2), True),
    ],
)
def test_rejection_is_lossless(vocab: int, widths: tuple[int, ...], hole: bool) -> None:
    """Chains, and trees of children drawn without replacement; a hole is a truncated law."""
    target, draft = random_laws(1, vocab, hole=hole), random_laws(2, vocab, hole=hole)
    trees = drawn_trees(draft, by_depth(*widths))
    assert total_variation(trees, target, "rejection", len(widths) + 1) < EXACT


def test_rejection_is_lossless_when_growth_depends_on_earlier_draws() -> None:
    """Whether to propose a child may depend on what was drawn before it."""
    target, draft = random_laws(3, 3), random_laws(4, 3)

    def widths(prefix: Prefix) -> int:
        return (2, *(1 + (token == 0) for token in prefix))[-1] if len(prefix) < 2 else 0

    trees = drawn_trees(draft, widths)
    assert len({tree.num_nodes for _, tree in trees}) > 1
    assert total_variation(trees, target, "rejection", 3) < EXACT


def test_rejection_is_lossless_when_the_laws_are_equal() -> None:
    """Rejections have probability zero up to rounding; they must not leave the target's law."""
    target = random_laws(5, 4)
    for widths in ((1, 1), (2,)):
        trees = drawn_trees(target, by_depth(*widths))
        assert total_variation(trees, target, "rejection", len(widths) + 1) < EXACT


@pytest.mark.parametrize("rule", ["match", "coupled", "rejection"])
@pytest.mark.parametrize(("vocab", "widths"), [(5, (1, 1)), (5, (3,)), (4, (2, 2)), (3, (3, 1, 2))])
def test_one_hot_trees_are_lossless(rule: str, vocab: int, widths: tuple[int, ...]) -> None:
    target, draft = random_laws(6, vocab, hole=True), random_laws(7, vocab)
    trees = [(1.0, top_tree(draft, *widths))]
    assert total_variation(trees, target, rule, len(widths) + 1) < EXACT


@pytest.mark.parametrize("rule", list(RULES))
def test_a_tree_without_drafts_emits_the_targets_law(rule: str) -> None:
    root = TokenTree.chain(torch.tensor([0]))
    assert total_variation([(1.0, root)], random_laws(8, 5), rule, 1) < EXACT


def test_match_is_the_telescoped_rejection_of_one_hot_children() -> None:
    """Not only the emitted law: every verdict has the same probability under both rules."""
    target = random_laws(9, 4)
    tree = top_tree(random_laws(10, 4), 2, 2)
    match, rejection = (verdict_law(tree, target, rule) for rule in ("match", "rejection"))
    assert match == pytest.approx(rejection, abs=EXACT)


def test_rejection_accepts_as_much_as_it_should() -> None:
    """p = (1/3, 2/3), q = (2/3, 1/3), two drafts: 10/9 accepted (arXiv:2403.10444)."""
    p, q = torch.tensor([1, 2]).double() / 3, torch.tensor([2, 1]).double() / 3
    trees = drawn_trees(lambda _: q, by_depth(1, 1))
    accepted = expected_accepted(trees, lambda _: p, "rejection")
    assert accepted == pytest.approx(10 / 9, abs=EXACT)


# Drawn and chosen children together -------------------------------------------------------------


def with_lookup(draft: Laws, draws: int, *chosen: Prefix) -> Callable[[Prefix], Plan]:
    """Drawn children of a head, then what a lookup found, unless it was drawn already."""

    def plan(prefix: Prefix) -> Plan:
        if len(prefix) == len(chosen):
            return Plan(draft(prefix))
        return Plan(draft(prefix), draws, chosen[len(prefix)])

    return plan


MIXED_PLANS = {
    "greedy": lambda q: greedy_draft(q, 2, 2),
    "greedy wide": lambda q: greedy_draft(q, 3, 1),
    "greedy all": lambda q: greedy_draft(q, 4),
    "lookup": lambda q: with_lookup(q, 1, (0,), (2,)),
    "lookup wide": lambda q: with_lookup(q, 2, (1, 3)),
    "lookup only": lambda q: with_lookup(q, 0, (1, 0), (3,)),
    "by level": lambda q: (
        lambda prefix: Plan(q(prefix), *((2, ()), (0, (2, 1)), (0, ()))[len(prefix)])
    ),
}


@pytest.mark.parametrize("hole", [False, True])
@pytest.mark.parametrize("plan", list(MIXED_PLANS))
def test_drawn_and_chosen_children_together_are_lossless(plan: str, hole: bool) -> None:
    target, draft = random_laws(100, 4, hole=hole), random_laws(101, 4, hole=hole)
    trees = drafted_trees(MIXED_PLANS[plan](draft), Proposal.MIXED)
    length = 1 + max(int(tree.depths.max()) for _, tree in trees)
    assert total_variation(trees, target, "rejection", length) < EXACT


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_the_greedy_draft_accepts_as_much_as_its_optimum(width: int, seed: int) -> None:
    """p(S) + sum over the rest of min(p, q_rest), which optimal transport cannot beat."""
    p, q = random_laws(102 + seed, 5)(()), random_laws(112 + seed, 5)(())
    plan = greedy_draft(lambda _: q, width)
    trees = drafted_trees(plan, Proposal.MIXED)
    accepted = expected_accepted(trees, lambda _: p, "rejection")
    sure = list(plan(()).chosen)
    rest = q.clone()
    rest[sure] = 0.0
    rest /= rest.sum()
    formula = float(p[sure].sum() + torch.minimum(p, rest).sum())
    assert accepted == pytest.approx(formula, abs=EXACT)
    # min over sets H of p(H) + 1 - P(all children in H) (arXiv:2502.18779)
    bound = 1.0
    for inside in itertools.product([False, True], repeat=5):
        within = torch.tensor(inside)
        all_in = float(rest[within].sum()) if all(inside[token] for token in sure) else 0.0
        bound = min(bound, float(p[within].sum()) + 1.0 - all_in)
    assert accepted == pytest.approx(bound, abs=EXACT)


# Warpers, reduced vocabularies and the end of the text ------------------------------------------

SAMPLINGS = {
    "temperature": SamplingParams(0.6),
    "top-k": SamplingParams(1.0, top_k=2),
    "top-p": SamplingParams(1.3, top_p=0.8),
    "all": SamplingParams(0.7, top_k=3, top_p=0.7),
    "greedy": SamplingParams(0.0),
}
DRAFT_VOCAB = [1, 2, 4]


def trees_for(rule: str, draft: Laws) -> dict[str, WeightedTrees]:
    """Trees of every kind that a rule takes, of depth 2."""
    chosen = {
        "one-hot chain": [(1.0, top_tree(draft, 1, 1))],
        "one-hot tree": [(1.0, top_tree(draft, 2, 2))],
    }
    if rule in ("match", "coupled"):
        return chosen
    alternating = with_lookup(draft, 1, (), ())
    chains = {
        "one-hot chain": chosen["one-hot chain"],
        "drawn chain": drawn_trees(draft, by_depth(1, 1)),
        "drawn, chosen": drafted_trees(
            lambda prefix: (
                alternating(prefix) if not prefix else with_lookup(draft, 0, (), (2,))(prefix)
            ),
            Proposal.MIXED,
        ),
        "chosen, drawn": drafted_trees(
            lambda prefix: (
                with_lookup(draft, 0, (1,), ())(prefix) if not prefix else alternating(prefix)
            ),
            Proposal.MIXED,
        ),
    }
    if rule == "block":
        return chains
    return {
        **chosen,
        **chains,
        "drawn tree": drawn_trees(draft, lambda prefix: (2, 1, 0)[len(prefix)]),
        "mixed tree": drafted_trees(with_lookup(draft, 1, (1,), (2,)), Proposal.MIXED),
    }


def check_all_trees(
    rule: str, target: Laws, draft: Laws, length: int = 3, ends: Ends | None = None
) -> None:
    for name, trees in trees_for(rule, draft).items():
        assert total_variation(trees, target, rule, length, ends) < EXACT, name


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("drafted", ["same", "plain"])
@pytest.mark.parametrize("sampling", list(SAMPLINGS))
def test_rules_are_lossless_with_warpers(sampling: str, drafted: str, rule: str) -> None:
    """Warpers on the target's law, and on the draft's or not: q may have mass where p has none."""
    logits = random_logits(121, 4)
    params = SAMPLINGS[sampling]
    target = warped(random_logits(120, 4), params)
    draft = warped(logits, params if drafted == "same" else SamplingParams(1.0))
    check_all_trees(rule, target, draft)


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("sampling", ["temperature", "all"])
def test_rules_are_lossless_with_a_reduced_draft_vocabulary(sampling: str, rule: str) -> None:
    params = SAMPLINGS[sampling]
    target = warped(random_logits(122, 5), SamplingParams(1.0))
    draft = warped(random_logits(123, len(DRAFT_VOCAB)), params, DRAFT_VOCAB, 5)
    assert set(draft(()).nonzero().flatten().tolist()) <= set(DRAFT_VOCAB)
    check_all_trees(rule, target, draft)


ENDS: dict[str, Ends] = {
    "token": lambda text: text[-1] == 2,
    "tokens": lambda text: text[-1] in (1, 2),
    "string": lambda text: text[-2:] == (2, 1),
    "length": lambda text: len(text) == 2,
}


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("ends", list(ENDS))
def test_rules_are_lossless_up_to_the_end_of_the_text(ends: str, rule: str) -> None:
    check_all_trees(rule, random_laws(124, 4), random_laws(125, 4), ends=ENDS[ends])


# Coupled trees: the children know what the target will draw -------------------------------------


@dataclass
class TableCoins:
    """The target's draws, fixed beforehand for every text."""

    table: dict[Prefix, int]
    text: Prefix = ()

    def accept(self, probability: float, position: int, index: int) -> bool:
        raise AssertionError("nothing is rejected")

    def draw(self, probs: Tensor, position: int) -> int:
        assert position == 1 + len(self.text)
        return self.table[self.text]


def test_coupled_trees_may_depend_on_the_draws_in_any_way() -> None:
    """All tables of draws over two tokens, depth 2, and trees that hit, miss, or do both."""
    target = random_laws(126, 2)
    texts = [text for depth in range(3) for text in itertools.product(range(2), repeat=depth)]
    emitted = dict.fromkeys(sequence_law(target, 3), 0.0)
    for draws in itertools.product(range(2), repeat=len(texts)):
        table = dict(zip(texts, draws, strict=True))
        weight = 1.0
        for text, token in table.items():
            weight *= float(target(text)[token])
        first = table[()] if table[0,] else 1 - table[()]
        tree = TokenTree.chain(torch.tensor([0, first, table[first,]]), Proposal.COUPLED)
        coins = TableCoins(table)

        def law(node: int, tree: TokenTree = tree, coins: TableCoins = coins) -> Tensor:
            coins.text = prefix_of(tree, node)
            return target(coins.text)

        verdict = verify(tree, law, "coupled", 0, 0, coins)
        assert verdict.next_token is not None
        text = (*(tree.token(node) for node in verdict.path), verdict.next_token)
        while len(text) < 3:  # later rounds meet the same noise
            text += (table[text],)
        emitted[text] += weight
    assert emitted == pytest.approx(sequence_law(target, 3), abs=EXACT)


# Negative controls: each known mistake is seen ----------------------------------------------------


def test_control_deterministic_children_verified_as_if_drawn() -> None:
    """The most common mistake: top-k children with q = softmax of the drafter."""
    target, draft = random_laws(11, 4), random_laws(12, 4)
    tree = top_tree(draft, 2)
    laws = torch.stack([draft(prefix_of(tree, node)) for node in range(tree.num_nodes)])
    wrong = TokenTree(tree.tokens, tree.parents, Proposal.DENSE, laws)
    assert total_variation([(1.0, wrong)], target, "rejection", 2) > 0.01
    assert total_variation([(1.0, tree)], target, "rejection", 2) < EXACT


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_control_draw_then_drop(rule: str) -> None:
    """Dropping a draft token because of its value, after it was drawn."""
    target, draft = random_laws(13, 3), random_laws(14, 3)
    root = TokenTree.chain(torch.tensor([0]))
    trees = drawn_trees(draft, by_depth(1))
    dropped = [(weight, root if tree.token(1) == 0 else tree) for weight, tree in trees]
    assert total_variation(dropped, target, rule, 2) > 0.01
    assert total_variation(trees, target, rule, 2) < EXACT


def test_control_a_drawn_token_gives_way_to_a_chosen_one() -> None:
    """Of two equal children the drawn one must stay: to keep the chosen one is to draw and drop."""
    target, draft = random_laws(127, 3), random_laws(128, 3)
    trees = drafted_trees(with_lookup(draft, 1, (0,)), Proposal.MIXED)
    chosen = TokenTree(
        torch.tensor([0, 0]),
        torch.tensor([-1, 0]),
        Proposal.MIXED,
        draft(()).repeat(2, 1),
        torch.tensor([False, False]),
    )
    wrong = [(weight, chosen if tree.token(1) == 0 else tree) for weight, tree in trees]
    assert total_variation(wrong, target, "rejection", 2) > 0.01
    assert total_variation(trees, target, "rejection", 2) < EXACT


def test_control_the_greedy_draft_with_the_law_of_all_tokens() -> None:
    """The drawn child was drawn from what the chosen ones left, and that law must be recorded."""
    target, draft = random_laws(129, 4), random_laws(130, 4)
    trees = drafted_trees(greedy_draft(draft, 2), Proposal.MIXED)
    wrong = [
        (w, TokenTree(t.tokens, t.parents, t.proposal, draft(()).repeat(3, 1), t.drawn))
        for w, t in trees
    ]
    assert total_variation(wrong, target, "rejection", 2) > 0.01
    assert total_variation(trees, target, "rejection", 2) < EXACT


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("residual_law", lambda residual, proposed: residual),  # emit from p after a rejection
        ("residual_law", lambda r, q: (r - q).clamp(min=0.0)),  # not renormalised
        ("accept_probability", lambda r, q, token: float(r[token])),  # forget to divide by q
        ("accept_probability", lambda r, q, token: float(min(r[token], q[token]))),
    ],
)
def test_control_wrong_formula(
    name: str, wrong: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = random_laws(15, 4)
    trees = drawn_trees(random_laws(16, 4), by_depth(2))
    assert total_variation(trees, target, "rejection", 2) < EXACT
    monkeypatch.setattr(verify_module, name, wrong)
    assert total_variation(trees, target, "rejection", 2) > 0.01


def test_control_second_child_drawn_with_replacement_law() -> None:
    """Children come in order: swapping two drawn siblings claims the wrong conditional law."""
    target, draft = random_laws(17, 4), random_laws(18, 4)
    trees = drawn_trees(draft, by_depth(2))
    swapped = [
        (w, TokenTree(t.tokens[[0, 2, 1]], t.parents, t.proposal, t.draft_probs)) for w, t in trees
    ]
    assert total_variation(trees, target, "rejection", 2) < EXACT
    assert total_variation(swapped, target, "rejection", 2) > 0.005


@pytest.mark.parametrize("rule", list(RULES))
def test_control_the_end_of_the_text_is_seen(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that runs past the end emits another law."""
    target, draft = random_laws(131, 3), random_laws(132, 3)
    ends = ENDS["token"]
    proposal = Proposal.ONE_HOT if Proposal.DENSE not in RULES[rule] else Proposal.DENSE
    if proposal is Proposal.DENSE:
        trees = drawn_trees(draft, by_depth(1, 1))
    else:
        trees = [(1.0, TokenTree.chain(torch.tensor([0, 2, 1])))]
    assert total_variation(trees, target, rule, 3, ends) < EXACT

    def deaf(*args: object, ended: object, **options: object) -> Verdict:
        return verify(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("tests.inference.oracles.verify", deaf)
    with pytest.raises(AssertionError, match="the end"):
        total_variation(trees, target, rule, 3, ends)


# Equality with plain sampling -------------------------------------------------------------------


def plain(target: Laws, seed: int, length: int) -> Prefix:
    tokens: Prefix = ()
    for position in range(length):
        tokens += (sample(target(tokens), seed, position),)
    return tokens


def noisy(target: Laws, seed: int) -> Laws:
    """A drafter that is near the target."""
    error = random_laws(seed, 12, sharpness=0.7)

    def law(prefix: Prefix) -> Tensor:
        q = target(prefix) * error(prefix)
        return q / q.sum()

    return law


def coupled_tree(draft: Laws, seed: int, base: Prefix, position: int, *widths: int) -> TokenTree:
    """Children: the top of log q plus the target's own noise at their position."""

    def perturbed(prefix: Prefix) -> Tensor:
        law = draft(base + prefix)
        noise = gumbel(seed, position + 1 + len(prefix), len(law))
        order = torch.zeros_like(law)
        top = draw_top(law, noise, max(widths))
        order[top] = torch.arange(len(top), 0, -1).double()
        return order

    tree = top_tree(perturbed, *widths)
    return TokenTree(tree.tokens, tree.parents, Proposal.COUPLED)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("widths", [(1, 1, 1), (3, 2), (2, 2, 1)])
def test_coupled_equals_plain_sampling(seed: int, widths: tuple[int, ...]) -> None:
    target = random_laws(20 + seed, 12)
    draft = noisy(target, 30)
    tokens, rounds = decode(
        target,
        seed,
        24,
        "coupled",
        lambda base, position: coupled_tree(draft, seed, base, position, *widths),
    )
    assert tokens == plain(target, seed, 24)
    assert rounds < 18  # and the shared noise makes drafts match


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("widths", [(1, 1, 1), (3, 2), (12,)])
def test_match_equals_plain_sampling(seed: int, widths: tuple[int, ...]) -> None:
    target = random_laws(40 + seed, 12)
    draft = noisy(target, 50)
    tokens, rounds = decode(
        target,
        seed,
        24,
        "match",
        lambda base, _: top_tree(lambda prefix: draft(base + prefix), *widths),
    )
    assert tokens == plain(target, seed, 24)
    assert rounds < 24


def test_control_other_seed_gives_another_text() -> None:
    target = random_laws(60, 12)
    assert plain(target, 0, 24) != plain(target, 1, 24)


@pytest.mark.parametrize("rule", [rule for rule in ALL_RULES if rule != "block"])
def test_temperature_zero_follows_the_argmax(rule: str) -> None:
    def target(prefix: Prefix) -> Tensor:
        return probabilities(random_laws(70, 6)(prefix).log(), SamplingParams(temperature=0.0))

    greedy: Prefix = ()
    for _ in range(4):
        greedy += (int(target(greedy).argmax()),)
    wrong = (greedy[2] + 1) % 6
    tokens = torch.tensor([0, wrong, greedy[0], greedy[1], wrong])
    if wrong == greedy[0]:
        tokens[1] = (wrong + 1) % 6
    parents = torch.tensor([-1, 0, 0, 2, 3])
    tree = TokenTree(tokens, parents, Proposal.ONE_HOT)
    for seed in range(5):
        verdict = verify(tree, lambda node: target(prefix_of(tree, node)), rule, seed, 9)
        assert verdict == Verdict(path=[2, 3], next_token=greedy[2])


def test_temperature_zero_accepts_drawn_drafts_that_are_the_argmax() -> None:
    target = torch.tensor([0.0, 1.0, 0.0])
    draft = torch.tensor([[0.2, 0.5, 0.3]])
    for token, accepted in ((1, [1]), (0, []), (2, [])):
        tree = TokenTree.chain(torch.tensor([0, token]), Proposal.DENSE, draft)
        for seed in range(20):
            verdict = verify(tree, lambda _: target, "rejection", seed, 0)
            assert verdict == Verdict(accepted, 1)


# Keyed coins ------------------------------------------------------------------------------------


def rejection_chi_square(draft_stream: Stream) -> float:
    """Of two emitted tokens, 9 cells, all draws from keyed noise."""
    target, draft = random_laws(80, 3), random_laws(81, 3)

    def text(seed: int) -> Prefix:
        def propose(base: Prefix, position: int) -> TokenTree:
            first = draft(base)
            token = sample(first, seed, position + 1, draft_stream)
            second = draft((*base, token))
            tokens = torch.tensor([0, token, sample(second, seed, position + 2, draft_stream)])
            return TokenTree.chain(tokens, Proposal.DENSE, torch.stack([first, second]))

        return decode(target, seed, 2, "rejection", propose)[0]

    return chi_square(map(text, range(1000)), target, 2)


def test_keyed_rejection_has_the_targets_law() -> None:
    assert rejection_chi_square(Stream.DRAFT) < 26.1  # 8 degrees of freedom, 0.1 %


@pytest.mark.parametrize("stream", [Stream.ACCEPT, Stream.RESIDUAL])
def test_control_drafts_must_not_share_the_verifiers_noise(stream: Stream) -> None:
    assert rejection_chi_square(stream) > 26.1


def test_keyed_coins_accept_with_their_probability() -> None:
    coins = KeyedCoins(0, Stream.RESIDUAL)
    accepted = [coins.accept(0.3, position, rank) for position in range(500) for rank in range(2)]
    assert sum(accepted) == pytest.approx(300, abs=50)  # 3.4 standard deviations
    assert accepted[::2] != accepted[1::2]  # siblings have coins of their own
    assert all(coins.accept(1.0, position, 0) for position in range(50))
    assert not any(coins.accept(0.0, position, 0) for position in range(50))


# The contract with callers ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "proposal", "fix"),
    [
        ("match", Proposal.COUPLED, "use 'coupled'"),
        ("match", Proposal.DENSE, "use 'rejection' or 'block'"),
        ("match", Proposal.MIXED, "use 'rejection' or 'block'"),
        ("coupled", Proposal.DENSE, "use 'rejection' or 'block'"),
        ("rejection", Proposal.COUPLED, "use 'coupled'"),
        ("block", Proposal.COUPLED, "use 'coupled'"),
        ("lossy_typical", Proposal.DENSE, "use 'rejection' or 'block'"),
        ("typical", Proposal.ONE_HOT, "one of match, coupled, rejection, block, lossy_typical"),
    ],
)
def test_unfit_rules_are_refused(rule: str, proposal: Proposal, fix: str) -> None:
    laws = torch.full((1, 3), 1 / 3) if proposal in (Proposal.DENSE, Proposal.MIXED) else None
    drawn = torch.tensor([False, True]) if proposal is Proposal.MIXED else None
    tree = TokenTree.chain(torch.tensor([0, 1]), proposal, laws, drawn)
    with pytest.raises(ValueError, match=fix):
        verify(tree, lambda _: torch.full((3,), 1 / 3), rule, 0, 0)


@pytest.mark.parametrize("rule", ["match", "coupled", "rejection"])
@pytest.mark.parametrize("ends", [False, True])
def test_the_law_is_asked_as_plain_decoding_asks_it(rule: str, ends: bool) -> None:
    """Once per emitted token and in its order, whatever else was drafted: nodes 2, 5, 7 of 8.

    The end is asked about after each accepted token, and before the law behind it.
    """
    tokens = torch.tensor([0, 1, 2, 2, 2, 2, 0, 2])
    parents = torch.tensor([-1, 0, 0, 1, 3, 2, 5, 5])
    tree = TokenTree(tokens, parents, Proposal.ONE_HOT)
    calls: list[object] = []

    def law(node: int) -> Tensor:
        calls.append(node)
        return torch.tensor([0.0, 0.0, 1.0])

    def ended(text: list[int]) -> bool:
        calls.append(text)
        return ends and len(text) == 2

    verdict = verify(tree, law, rule, 0, 0, ended=ended)
    if ends:
        assert verdict == Verdict([2, 5], None)
        assert calls == [0, [2], 2, [2, 2]]
    else:
        assert verdict == Verdict([2, 5, 7], 2)
        assert calls == [0, [2], 2, [2, 2], 5, [2, 2, 2], 7]


@pytest.mark.parametrize("rule", ["match", "coupled", "rejection"])
def test_on_every_tree_the_law_is_asked_along_the_path(rule: str) -> None:
    target, draft = random_laws(133, 3), random_laws(134, 3)
    for seed, (_, tree) in enumerate(itertools.chain(*trees_for(rule, draft).values())):
        asked: list[int] = []

        def law(node: int, tree: TokenTree = tree, asked: list[int] = asked) -> Tensor:
            asked.append(node)
            return target(prefix_of(tree, node))

        verdict = verify(tree, law, rule, seed, 0)
        assert asked == [0, *verdict.path]


def test_a_draft_of_probability_zero_is_refused() -> None:
    tree = TokenTree.chain(torch.tensor([0, 1]), Proposal.DENSE, torch.tensor([[1.0, 0.0, 0.0]]))
    with pytest.raises(ValueError, match="really drawn from"):
        verify(tree, lambda _: torch.full((3,), 1 / 3), "rejection", 0, 0)


def test_residual_and_acceptance_by_hand() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.7, 0.1])
    assert torch.allclose(residual_law(p, q), torch.tensor([0.75, 0.0, 0.25]))
    assert torch.equal(residual_law(p, p), p)
    assert accept_probability(p, q, 0) == 1.0
    assert accept_probability(p, q, 1) == pytest.approx(3 / 7)


@pytest.mark.parametrize(("rule", "parents"), [("rejection", [-1, 0, 0]), ("block", [-1, 0, 1])])
def test_inputs_are_not_changed(rule: str, parents: list[int]) -> None:
    target, draft = random_laws(90, 4)(()), random_laws(91, 4)(()).clone()
    tree = TokenTree(
        torch.tensor([0, 1, 2]), torch.tensor(parents), Proposal.DENSE, draft.repeat(3, 1)
    )
    kept = target.clone()
    for seed in range(20):
        verify(tree, lambda _: target, rule, seed, 0)
    assert torch.equal(target, kept)
    assert tree.draft_probs is not None
    assert torch.equal(tree.draft_probs, draft.repeat(3, 1))
