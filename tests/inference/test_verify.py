"""The acceptance rules are lossless: exact enumeration, and equality with plain sampling.

`verify` itself is run with coins that take every branch and know its probability, over every tree
that the drafter could have drawn. The law of the emitted tokens, completed by the target, must
equal the target's law over sequences. Each wrong rule of the literature must fail the same test.
"""

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import inference.verify as verify_module
from inference.sampling import (
    SamplingParams,
    Stream,
    draw_top,
    gumbel,
    probabilities,
    sample,
)
from inference.tree import Proposal, TokenTree
from inference.verify import (
    RULES,
    Coins,
    KeyedCoins,
    Verdict,
    accept_probability,
    residual_law,
    verify,
)

Prefix = tuple[int, ...]
Laws = Callable[[Prefix], Tensor]  # drafted prefix below the root -> (V,)
WeightedTrees = list[tuple[float, TokenTree]]

EXACT = 1e-12


class ScriptedCoins:
    """Follow a script of choices, extend it with first choices, and track the probability."""

    def __init__(self, script: list[int]) -> None:
        self.script = script
        self.options: list[int] = []
        self.probability = 1.0

    def _choose(self, probabilities: list[float]) -> int:
        if len(self.options) == len(self.script):
            self.script.append(0)
        choice = self.script[len(self.options)]
        self.options.append(len(probabilities))
        self.probability *= probabilities[choice]
        return choice

    def accept(self, probability: float, position: int, rank: int) -> bool:
        return self._choose([probability, 1.0 - probability]) == 0

    def draw(self, probs: Tensor, position: int) -> int:
        return self._choose(probs.tolist())


def outcomes(walk: Callable[[Coins], Verdict]) -> Iterator[tuple[float, Verdict]]:
    """Every verdict of a walk with its probability."""
    script: list[int] = []
    while True:
        coins = ScriptedCoins(script)
        verdict = walk(coins)
        yield coins.probability, verdict
        while script and script[-1] + 1 == coins.options[len(script) - 1]:
            script.pop()
        if not script:
            return
        script[-1] += 1


def random_laws(seed: int, vocab: int, sharpness: float = 1.5, hole: bool = False) -> Laws:
    """An own law for every prefix, float64; with a hole, one token of each law is impossible."""

    def law(prefix: Prefix) -> Tensor:
        generator = torch.Generator().manual_seed(hash((seed, *prefix)) % 2**63)
        logits = torch.randn(vocab, generator=generator, dtype=torch.float64) * sharpness
        if hole:
            logits[int(torch.randint(vocab, (), generator=generator))] = -torch.inf
        return logits.softmax(-1)

    return law


def prefix_of(tree: TokenTree, node: int) -> Prefix:
    return tuple(tree.token(ancestor) for ancestor in tree.path(node)[1:])


def sequence_law(target: Laws, length: int, start: Prefix = ()) -> Tensor:
    """The target's law over the next `length` tokens, (V,) * length."""
    law = target(start)
    if length == 1:
        return law
    return torch.stack(
        [p * sequence_law(target, length - 1, (*start, x)) for x, p in enumerate(law)]
    )


def walk_of(tree: TokenTree, target: Laws, rule: str) -> Callable[[Coins], Verdict]:
    """The walk down one tree, at position 0, for any coins."""
    return lambda coins: verify(
        tree, lambda node: target(prefix_of(tree, node)), rule, seed=0, position=0, coins=coins
    )


def emitted_law(trees: WeightedTrees, target: Laws, rule: str, length: int) -> Tensor:
    """Law of the first `length` tokens: what one round emits, completed by the target."""
    law = torch.zeros_like(sequence_law(target, length))
    for weight, tree in trees:
        for probability, verdict in outcomes(walk_of(tree, target, rule)):
            tokens = (*(tree.token(node) for node in verdict.path), verdict.next_token)
            missing = length - len(tokens)
            rest = sequence_law(target, missing, tokens) if missing else 1.0
            law[tokens] += weight * probability * rest
    return law


def total_variation(trees: WeightedTrees, target: Laws, rule: str, length: int) -> float:
    """Distance of the emitted law from the target's; 0 is lossless."""
    assert sum(weight for weight, _ in trees) == pytest.approx(1.0, abs=1e-12)
    emitted = emitted_law(trees, target, rule, length)
    return 0.5 * float((emitted - sequence_law(target, length)).abs().sum())


# The trees that a drafter may draw --------------------------------------------------------------


def drawn_trees(draft: Laws, widths: Callable[[Prefix], int]) -> WeightedTrees:
    """Every tree of tokens drawn without replacement, `widths(prefix)` children per node."""
    results: WeightedTrees = []

    def grow(weight: float, prefixes: list[Prefix], parents: list[int], node: int) -> None:
        if node == len(prefixes):
            tokens = torch.tensor([prefix[-1] if prefix else 0 for prefix in prefixes])
            laws = torch.stack([draft(prefix) for prefix in prefixes])
            tree = TokenTree(tokens, torch.tensor(parents), Proposal.DENSE, laws)
            results.append((weight, tree))
            return
        law, width = draft(prefixes[node]), widths(prefixes[node])
        for tokens in itertools.permutations(range(len(law)), width):
            probability, left = 1.0, 1.0
            for token in tokens:
                probability *= float(law[token]) / left
                left -= float(law[token])
            if probability > 0:
                children = [(*prefixes[node], token) for token in tokens]
                grow(weight * probability, prefixes + children, parents + [node] * width, node + 1)

    grow(1.0, [()], [-1], 0)
    return results


def by_depth(*widths: int) -> Callable[[Prefix], int]:
    return lambda prefix: widths[len(prefix)] if len(prefix) < len(widths) else 0


def top_tree(draft: Laws, *widths: int) -> TokenTree:
    """The deterministic tree of the most likely draft tokens."""
    prefixes: list[Prefix] = [()]
    parents = [-1]
    for node in itertools.count():
        if node == len(prefixes):
            break
        width = by_depth(*widths)(prefixes[node])
        for token in draft(prefixes[node]).topk(width).indices.tolist():
            prefixes.append((*prefixes[node], token))
            parents.append(node)
    tokens = torch.tensor([prefix[-1] if prefix else 0 for prefix in prefixes])
    return TokenTree(tokens, torch.tensor(parents), Proposal.ONE_HOT)


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


@pytest.mark.parametrize("rule", ["match", "rejection"])
@pytest.mark.parametrize(("vocab", "widths"), [(5, (1, 1)), (5, (3,)), (4, (2, 2)), (3, (3, 1, 2))])
def test_one_hot_trees_are_lossless(rule: str, vocab: int, widths: tuple[int, ...]) -> None:
    target, draft = random_laws(6, vocab, hole=True), random_laws(7, vocab)
    trees = [(1.0, top_tree(draft, *widths))]
    assert total_variation(trees, target, rule, len(widths) + 1) < EXACT


def test_a_tree_without_drafts_emits_the_targets_law() -> None:
    root = TokenTree.chain(torch.tensor([0]))
    for rule in ("match", "rejection"):
        assert total_variation([(1.0, root)], random_laws(8, 5), rule, 1) < EXACT


def test_match_is_the_telescoped_rejection_of_one_hot_children() -> None:
    """Not only the emitted law: every verdict has the same probability under both rules."""
    target = random_laws(9, 4)
    tree = top_tree(random_laws(10, 4), 2, 2)
    verdicts: dict[str, dict[tuple[Prefix, int], float]] = {}
    for rule in ("match", "rejection"):
        table = verdicts.setdefault(rule, {})
        for probability, verdict in outcomes(walk_of(tree, target, rule)):
            if probability > 0:
                key = (tuple(verdict.path), verdict.next_token)
                table[key] = table.get(key, 0.0) + probability
    assert verdicts["match"].keys() == verdicts["rejection"].keys()
    for key, probability in verdicts["match"].items():
        assert verdicts["rejection"][key] == pytest.approx(probability, abs=EXACT)


def test_rejection_accepts_as_much_as_it_should() -> None:
    """p = (1/3, 2/3), q = (2/3, 1/3), two drafts: 10/9 accepted (arXiv:2403.10444)."""
    p, q = torch.tensor([1, 2]).double() / 3, torch.tensor([2, 1]).double() / 3
    expected = 0.0
    for weight, tree in drawn_trees(lambda _: q, by_depth(1, 1)):
        for probability, verdict in outcomes(walk_of(tree, lambda _: p, "rejection")):
            expected += weight * probability * len(verdict.path)
    assert expected == pytest.approx(10 / 9, abs=EXACT)


# Negative controls: each known mistake is seen ----------------------------------------------------


def test_control_deterministic_children_verified_as_if_drawn() -> None:
    """The most common mistake: top-k children with q = softmax of the drafter."""
    target, draft = random_laws(11, 4), random_laws(12, 4)
    tree = top_tree(draft, 2)
    laws = torch.stack([draft(prefix_of(tree, node)) for node in range(tree.num_nodes)])
    wrong = TokenTree(tree.tokens, tree.parents, Proposal.DENSE, laws)
    assert total_variation([(1.0, wrong)], target, "rejection", 2) > 0.01
    assert total_variation([(1.0, tree)], target, "rejection", 2) < EXACT


def test_control_draw_then_drop() -> None:
    """Dropping a draft token because of its value, after it was drawn."""
    target, draft = random_laws(13, 3), random_laws(14, 3)
    root = TokenTree.chain(torch.tensor([0]))
    trees = drawn_trees(draft, by_depth(1))
    dropped = [(weight, root if tree.token(1) == 0 else tree) for weight, tree in trees]
    assert total_variation(dropped, target, "rejection", 2) > 0.01
    assert total_variation(trees, target, "rejection", 2) < EXACT


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("residual_law", lambda residual, proposed: residual),  # emit from p after a rejection
        ("accept_probability", lambda r, q, token: float(r[token])),  # forget to divide by q
        ("accept_probability", lambda r, q, token: float(min(r[token], q[token]))),
    ],
)
def test_control_wrong_formula(
    name: str, wrong: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = random_laws(15, 4)
    trees = drawn_trees(random_laws(16, 4), by_depth(1))
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


# Equality with plain sampling -------------------------------------------------------------------


def plain(target: Laws, seed: int, length: int) -> Prefix:
    tokens: Prefix = ()
    for position in range(length):
        tokens += (sample(target(tokens), seed, position),)
    return tokens


def decode(
    target: Laws, seed: int, length: int, rule: str, propose: Callable[[Prefix, int], TokenTree]
) -> tuple[Prefix, int]:
    """Tokens, and the number of rounds they took. The root of round 0 sits at position -1."""
    tokens: Prefix = ()
    rounds = 0
    while len(tokens) < length:
        base = tokens
        tree = propose(base, len(base) - 1)

        def law(node: int, base: Prefix = base, tree: TokenTree = tree) -> Tensor:
            return target(base + prefix_of(tree, node))

        verdict = verify(tree, law, rule, seed, len(base) - 1)
        tokens += (*(tree.token(node) for node in verdict.path), verdict.next_token)
        rounds += 1
    return tokens[:length], rounds


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


@pytest.mark.parametrize("rule", list(RULES))
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
    proposal = next(iter(RULES[rule] - {Proposal.DENSE}))
    tree = TokenTree(tokens, parents, proposal)
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
    """Pearson's statistic of two emitted tokens, 9 cells, all draws from keyed noise."""
    target, draft = random_laws(80, 3), random_laws(81, 3)
    counts = torch.zeros(3, 3)
    num_texts = 1000
    for seed in range(num_texts):

        def propose(base: Prefix, position: int, seed: int = seed) -> TokenTree:
            first = draft(base)
            token = sample(first, seed, position + 1, draft_stream)
            second = draft((*base, token))
            tokens = torch.tensor([0, token, sample(second, seed, position + 2, draft_stream)])
            return TokenTree.chain(tokens, Proposal.DENSE, torch.stack([first, second]))

        counts[decode(target, seed, 2, "rejection", propose)[0]] += 1
    expected = num_texts * sequence_law(target, 2)
    return float(((counts - expected) ** 2 / expected).sum())


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
        ("match", Proposal.DENSE, "use 'rejection'"),
        ("coupled", Proposal.ONE_HOT, "use 'match' or 'rejection'"),
        ("coupled", Proposal.DENSE, "use 'rejection'"),
        ("rejection", Proposal.COUPLED, "use 'coupled'"),
        ("typical", Proposal.ONE_HOT, "one of match, coupled, rejection"),
    ],
)
def test_unfit_rules_are_refused(rule: str, proposal: Proposal, fix: str) -> None:
    laws = torch.full((1, 3), 1 / 3) if proposal is Proposal.DENSE else None
    tree = TokenTree.chain(torch.tensor([0, 1]), proposal, laws)
    with pytest.raises(ValueError, match=fix):
        verify(tree, lambda _: torch.full((3,), 1 / 3), rule, 0, 0)


@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_only_visited_nodes_are_evaluated(rule: str) -> None:
    """Law 2 everywhere: node 2 and its child 5 are accepted, the branch below node 1 is not."""
    tokens, parents = torch.tensor([0, 1, 2, 2, 2, 2]), torch.tensor([-1, 0, 0, 1, 3, 2])
    visited: list[int] = []

    def law(node: int) -> Tensor:
        visited.append(node)
        return torch.tensor([0.0, 0.0, 1.0])

    verdict = verify(TokenTree(tokens, parents, Proposal.ONE_HOT), law, rule, 0, 0)
    assert verdict == Verdict([2, 5], 2)
    assert visited == [0, 2, 5]


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


def test_inputs_are_not_changed() -> None:
    target, draft = random_laws(90, 4)(()), random_laws(91, 4)(())
    tree = TokenTree(
        torch.tensor([0, 1, 2]), torch.tensor([-1, 0, 0]), Proposal.DENSE, draft.repeat(3, 1)
    )
    kept = target.clone()
    for seed in range(20):
        verify(tree, lambda _: target, "rejection", seed, 0)
    assert torch.equal(target, kept)
    assert tree.draft_probs is not None
    assert torch.equal(tree.draft_probs, draft.repeat(3, 1))
