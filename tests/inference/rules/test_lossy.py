"""Typical acceptance does what Medusa says, and is lossy above temperature 0."""

import pytest
import torch
from torch import Tensor

from inference.rules.acceptance import KeyedCoins, Verdict
from inference.rules.lossy import LOSSY_RULES, LossyWarning, lossy_typical
from inference.sampling import SamplingParams, Stream, probabilities, sample
from inference.tree import Proposal, TokenTree
from inference.verify import ALL_RULES, RULES, verify
from tests.inference.oracles import (
    Prefix,
    prefix_of,
    random_laws,
    random_logits,
    top_tree,
    total_variation,
    warped,
)


def run(tree: TokenTree, laws: dict[Prefix, list[float]], **options: float) -> tuple[Verdict, list]:
    asked = []

    def law(node: int) -> Tensor:
        asked.append(node)
        return torch.tensor(laws[prefix_of(tree, node)], dtype=torch.float64)

    verdict = lossy_typical(tree, law, KeyedCoins(0, Stream.TARGET), 10, **options)
    return verdict, asked


def test_it_is_marked_as_lossy() -> None:
    assert not LOSSY_RULES.keys() & RULES.keys()
    assert ALL_RULES.keys() == LOSSY_RULES.keys() | RULES.keys()
    assert all("lossy" in rule for rule in LOSSY_RULES)
    assert issubclass(LossyWarning, UserWarning)


def test_the_threshold_is_medusas() -> None:
    """p(x) > min(0.09, 0.3 exp(-H)), strictly."""
    flat = [1 / 64] * 64  # H = log 64: 0.3 / 64 < 1/64, everything is typical
    tree = TokenTree.chain(torch.tensor([0, 63]))
    assert run(tree, {(): flat, (63,): flat})[0].path == [1]
    sharp = [0.9, 0.08, 0.02]  # exp(-H) is 0.69: the threshold is 0.09
    for token, path in ((0, [1]), (1, []), (2, [])):
        tree = TokenTree.chain(torch.tensor([0, token]))
        assert run(tree, {(): sharp, (token,): sharp})[0].path == path
    tree = TokenTree.chain(torch.tensor([0, 1]))
    assert run(tree, {(): sharp, (1,): sharp}, epsilon=0.07)[0].path == [1]
    half = [0.5, 0.5]
    for alpha, path in ((0.99, [1]), (1.01, [])):  # exp(-H) = p(x) = 1/2
        assert run(tree, {(): half, (1,): half}, epsilon=1.0, alpha=alpha)[0].path == path
    exact = [0.5, 0.25, 0.25]
    assert run(tree, {(): exact, (1,): exact}, epsilon=0.25, alpha=9.0)[0].path == []


#      0
#    1   2
#   3   4 5
TREE = TokenTree(
    torch.tensor([9, 0, 1, 0, 0, 1]), torch.tensor([-1, 0, 0, 1, 2, 2]), Proposal.ONE_HOT
)


def test_the_longest_path_wins_and_the_likelier_of_two() -> None:
    laws = {
        (): [0.7, 0.3],
        (0,): [0.01, 0.99],  # node 3 is not typical
        (1,): [0.4, 0.6],
        (1, 0): [0.5, 0.5],
        (1, 1): [0.0, 1.0],
    }
    verdict, asked = run(TREE, laws)
    assert verdict == Verdict([2, 5], 1)
    assert asked == [0, 1, 2, 4, 5]  # accepted nodes only, each once
    laws[0,] = [0.9, 0.1]  # 0.7 * 0.9 is likelier than 0.3 * 0.6
    laws[0, 0] = [1.0, 0.0]
    assert run(TREE, laws)[0] == Verdict([1, 3], 0)


def test_the_next_token_is_the_targets_keyed_draw() -> None:
    law = torch.tensor([0.3, 0.3, 0.4])
    tree = TokenTree.chain(torch.tensor([0, 1]))
    for seed in range(10):
        verdict = verify(tree, lambda _: law, "lossy_typical", seed, 5)
        assert verdict == Verdict([1], sample(law, seed, 7))


def test_the_path_is_cut_at_the_end_of_the_text() -> None:
    law = torch.tensor([0.3, 0.3, 0.4])
    tree = TokenTree.chain(torch.tensor([0, 1, 2, 1, 2]))
    calls: list[list[int]] = []

    def ended(text: list[int]) -> bool:
        calls.append(text)
        return text[-1] == 2

    assert verify(tree, lambda _: law, "lossy_typical", 0, 0, ended=ended) == Verdict([1, 2], None)
    assert calls == [[1], [1, 2]]


@pytest.mark.parametrize("seed", range(5))
def test_at_temperature_zero_it_is_greedy_decoding(seed: int) -> None:
    target = warped(random_logits(seed, 4), SamplingParams(0.0))
    tree = top_tree(random_laws(seed + 20, 4), 2, 2, 2)
    assert total_variation([(1.0, tree)], target, "lossy_typical", 4) == 0.0
    law = {node: target(prefix_of(tree, node)) for node in range(tree.num_nodes)}
    assert verify(tree, law.__getitem__, "lossy_typical", 0, 3) == verify(
        tree, law.__getitem__, "match", 0, 3
    )


def test_above_temperature_zero_it_is_lossy() -> None:
    """The reason for its name: likely drafts become certain."""
    target = warped(random_logits(1, 4), SamplingParams(1.0))
    tree = top_tree(target, 1, 1)
    assert total_variation([(1.0, tree)], target, "lossy_typical", 3) > 0.1
    assert total_variation([(1.0, tree)], target, "match", 3) < 1e-12


def test_impossible_tokens_count_nothing_in_the_entropy() -> None:
    law = probabilities(torch.tensor([0.0, 0.0, -torch.inf]), SamplingParams(1.0))
    # exp(-H) is 1/2, so the threshold 0.45 lies below p(x) = 1/2
    for token, path in ((1, [1]), (2, [])):
        tree = TokenTree.chain(torch.tensor([0, token]))
        coins = KeyedCoins(0, Stream.TARGET)
        assert lossy_typical(tree, lambda _: law, coins, 0, epsilon=0.6, alpha=0.9).path == path
