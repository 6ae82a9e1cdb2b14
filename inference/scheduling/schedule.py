"""How much to speculate: the size with the most expected tokens per second, none included.

Pure: torch and the standard library. A round that drafts and verifies a tree takes seconds that a
cost table knows (`inference.scheduling.costs`) and emits tokens whose expectation follows from how
often drafts survive. Over many rounds tokens per second are the quotient of the two expectations. A
choice that is the same in every round maximises that quotient. One that is made anew within a
round, where part of the cost is spent and a confidence output says how good these drafts are,
maximises tokens - rate · seconds, with the rate that is earned otherwise: seconds saved here are
used for other rounds.

What may be looked at depends on the rule of acceptance; `may_look` is the one place that says it.

Letters: K depths, R ranks (children of a node, likeliest first), N tree nodes (root included), B
sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol

from inference.tree import DRAWN_KINDS, Proposal, TokenTree
from inference.verify import SAME_TOKENS

Table = Sequence[Sequence[float]]
"""(K, R): chance that the child of a rank is the accepted one, given that its parent is."""


class RoundCosts(Protocol):
    """Seconds of the parts of a round; `inference.scheduling.costs.CostTable` is one."""

    def verify(self, width: int, context: float, batch: float = 1) -> float:
        """Of the target's forward on so many rows per sequence."""
        ...

    def draft(self, name: str, depth: int, width: int = 1, batch: float = 1) -> float:
        """Of drafting trees of a depth with so many children per node."""
        ...

    def absorb(self, name: str, positions: int) -> float:
        """Of a proposer taking in so many committed positions more than a round has."""
        ...

    def rest(self, batch: float = 1) -> float:
        """Of everything else."""
        ...

    def widest(self, batch: float = 1) -> int:
        """The most rows that are known."""
        ...

    def widths(self, batch: float = 1) -> list[int]:
        """Sizes of trees that are worth trying."""
        ...

    def knows_plain(self) -> bool:
        """Whether what plain steps cost need not be found out by doing some."""
        ...


# What may be looked at ----------------------------------------------------------------------------


@dataclass(frozen=True)
class MayLook:
    """What a choice of size may depend on.

    Attributes:
        drafts: the drafted tokens of this round themselves, so that any may be dropped.
        others: what became of other sequences, and of earlier calls.
    """

    drafts: bool
    others: bool


def may_look(rule: str, proposal: Proposal, temperature: float) -> MayLook:
    """What the choice of how much to draft and verify may depend on.

    Drafts. The lemma of `inference.verify` asks that each draft came from the law it is judged by,
    given everything that was known when it was proposed. A drawn draft that is dropped because of
    its own value, or because of what was drawn behind it, did not: those that stay have another law
    than the one recorded. Keeping only drafts that look good makes an accepted token of law
    (0.7, 0.3) come out with (0.85, 0.15) (appendix A of arXiv:2607.05147). So with drawn drafts the
    choice looks backwards only: at earlier rounds, and at ancestors and what a confidence output
    says of them, before the next draft is drawn. A chosen draft (one-hot) has a law that is one at
    its token, whichever of them are chosen, and a coupled one is only compared with the token that
    the target draws with the same noise: any of them may be dropped for any reason.

    Others. Under `match` and `coupled`, and at temperature 0, what is emitted is a function of
    target and seed, whatever is drafted. Otherwise coins are tossed over the drafts. Coins are
    functions of seed and position: another sequence, or an earlier call, with the same seed may
    have tossed those that this sequence is going to toss, so that a choice which looks there knows
    something about them. Besides, what a sequence emits would depend on its neighbours.

    Args:
        rule: of acceptance.
        proposal: kind of the drafts.
        temperature: of the sampling.
    """
    same = rule in SAME_TOKENS or temperature == 0
    return MayLook(drafts=proposal not in DRAWN_KINDS, others=same)


def cut_tree(tree: TokenTree, size: int, depth: int) -> TokenTree:
    """The first nodes of a tree, in index order, down to a depth.

    Args:
        tree: drafted. Proposers that copy text add the best nodes first.
        size: nodes to keep at most, root included, at least 1.
        depth: of the deepest to keep.

    Raises:
        ValueError: a draft would be dropped that was drawn; see `may_look`.
    """
    depths = tree.depths.tolist()
    kept = [node for node in range(tree.num_nodes) if depths[node] <= depth][:size]
    if len(kept) == tree.num_nodes:
        return tree
    if tree.proposal in DRAWN_KINDS:
        raise ValueError(
            f"a {tree.proposal.name} tree holds drawn drafts, and dropping one because of what was "
            "drawn changes the output's law: decide before they are drawn, or use rule 'match' or "
            "'coupled'"
        )
    return _with_nodes(tree, kept)


def first_chain(tree: TokenTree, depth: int) -> TokenTree:
    """The path of first children down to a depth, of a tree without drawn drafts.

    Args:
        tree: drafted.
        depth: at least 1.
    """
    nodes = tree.first_path()[: depth + 1]
    assert tree.proposal not in DRAWN_KINDS or len(nodes) == tree.num_nodes, "see cut_tree"
    return tree if len(nodes) == tree.num_nodes else _with_nodes(tree, nodes)


def _with_nodes(tree: TokenTree, kept: list[int]) -> TokenTree:
    """Some nodes of a tree, in order, each with its parent."""
    parents = tree.parents.tolist()
    place = {node: new for new, node in enumerate(kept)}
    above = [place[parents[node]] if parents[node] >= 0 else -1 for node in kept]
    index = tree.parents.new_tensor(kept)
    survival = None if tree.survival is None else tree.survival[index.to(tree.survival.device)]
    return TokenTree(
        tree.tokens[index], tree.parents.new_tensor(above), tree.proposal, survival=survival
    )


# Expected tokens ----------------------------------------------------------------------------------


def chain_tokens(conditional: Iterable[float]) -> list[float]:
    """Expected tokens per round of chains of 0, 1, ..., K drafts, the target's own included.

    Args:
        conditional: per depth the chance that a draft is accepted if those before it are.
    """
    survival = accumulate(conditional, lambda above, chance: above * chance, initial=1.0)
    return list(accumulate(survival))


def tree_tokens(table: Table, size: int) -> list[list[float]]:
    """Expected tokens per round of the best trees.

    A node is worth the product of the rates along its path, so the best tree of n nodes holds the n
    best products: as `inference.shapes.static_tree.optimal_static_tree`, for all sizes at once.

    Args:
        table: (K, R).
        size: most nodes, root included.

    Returns:
        K lists, of trees down to depth 1, 2, ..., each with the tokens of 1, 2, ..., ``size``
        nodes. Where there are fewer nodes more of them do not help.
    """
    level, pool, most = [1.0], [1.0], size - 1
    found = []
    for rates in table:
        order = sorted((rate for rate in rates if rate > 0.0), reverse=True)
        level = [  # where both are in order, the n-th is not above n · (rank + 1) - 1 others
            value * rate
            for rank, rate in enumerate(order, start=1)
            for value in level[: most // rank]
        ]
        level.sort(reverse=True)
        del level[most:]
        pool = sorted(pool + level, reverse=True)[:size]
        sums = list(accumulate(pool))
        found.append(sums + sums[-1:] * (size - len(sums)))
    return found


# Choices ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arm:
    """One place where drafts come from, and what it may be asked for.

    Attributes:
        name: as in the cost table.
        depth: longest path.
        top_k: children per node; 1 drafts chains only.
        size: most nodes, root included.
        copies: drafts are copied text: they cost nothing, and a round's are there before anything
            is chosen.
        together: it drafts for all sequences of a batch in one pass, at the cost of the longest.
    """

    name: str
    depth: int
    top_k: int = 1
    size: int = 0
    copies: bool = False
    together: bool = False

    def __post_init__(self) -> None:
        """Fill in the size of a chain."""
        if self.depth < 1 or self.top_k < 1:
            raise ValueError(f"arm {self.name}: depth >= 1 and top_k >= 1 are needed")
        if not self.size:
            object.__setattr__(self, "size", self.depth + 1)


class Choice(NamedTuple):
    """What one round does. There are some dozens to choose from in every round, so a plain tuple.

    Attributes:
        arm: name of where drafts come from; None for a plain step.
        depth: longest path.
        top_k: children per node.
        size: nodes to verify, root included.
        tokens: expected per sequence, the target's own included.
        seconds: expected.
    """

    arm: str | None
    depth: int
    top_k: int
    size: int
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Expected tokens per second of one sequence."""
        return self.tokens / self.seconds

    @property
    def same(self) -> tuple[str | None, int, int, int]:
        """What is done, whatever comes of it."""
        return self[:4]


def plain_step(costs: RoundCosts, context: float, batch: float = 1) -> Choice:
    """One token, no drafts."""
    return Choice(None, 0, 1, 1, 1.0, costs.verify(1, context, batch) + costs.rest(batch))


def menu(
    arm: Arm,
    table: Table,
    costs: RoundCosts,
    context: float,
    batch: float = 1,
    depth: int | None = None,
    size: int | None = None,
) -> list[Choice]:
    """All that an arm can do: chains of every length, trees of every size and depth.

    Args:
        arm: where drafts come from.
        table: (K, R) its rates, at least as deep as the arm.
        costs: of this machine.
        context: committed tokens.
        batch: B.
        depth: deepest that makes sense in this round; None if all do.
        size: most nodes in this round.
    """
    deepest = arm.depth if depth is None else min(arm.depth, depth)
    most = min(arm.size if size is None else min(arm.size, size), costs.widest(batch))
    fixed = costs.rest(batch)

    def drafting(deep: int, top_k: int) -> float:
        return 0.0 if arm.copies else costs.draft(arm.name, deep, top_k, batch)

    chains = chain_tokens(row[0] for row in table[:deepest])
    found = []
    for deep in range(1, min(deepest, most - 1) + 1):
        seconds = drafting(deep, 1) + costs.verify(deep + 1, context, batch) + fixed
        found.append(Choice(arm.name, deep, 1, deep + 1, chains[deep], seconds))
    if arm.top_k == 1 or most < 3 or deepest < 1:
        return found
    rates = [row[: arm.top_k] for row in table[:deepest]]
    trees = tree_tokens(rates, most)
    sizes = sorted({nodes for nodes in costs.widths(batch) if nodes <= most} | {most})
    verifying = [costs.verify(nodes, context, batch) for nodes in sizes]
    for deep in range(1, deepest + 1):
        spent, tokens = drafting(deep, arm.top_k), trees[deep - 1]
        found += [
            Choice(arm.name, deep, arm.top_k, nodes, tokens[nodes - 1], spent + seconds + fixed)
            for nodes, seconds in zip(sizes, verifying, strict=True)
            if nodes > deep + 1
        ]
    return found


def best_choice(
    choices: Sequence[Choice], held: Choice | None = None, margin: float = 0.0
) -> Choice:
    """The choice with the highest rate.

    Of equal ones the one with fewer nodes is taken, then the shallower one, then the first.

    Args:
        choices: at least one.
        held: what was done so far. It is kept, if it is still possible, as long as no other is
            better by more than the margin: estimates jitter, and predictions are worth more of
            something that stays.
        margin: relative.
    """
    best = min(choices, key=lambda choice: (-choice.rate, choice.size, choice.depth))
    if held is not None and held.same != best.same:
        for choice in choices:
            if choice.same == held.same and best.rate <= choice.rate * (1.0 + margin):
                return choice
    return best


# Within a round: a confidence output says how good these drafts are -------------------------------


def cut_chain(survival: Sequence[float], rate: float, seconds: Callable[[int], float]) -> int:
    """How many drafts of a chain to verify, if any may be dropped (`may_look`).

    Args:
        survival: per draft the chance that it and all before it are accepted.
        rate: tokens per second that are earned otherwise.
        seconds: of verifying so many rows, the root's included.

    Returns:
        The number with the most tokens - rate · seconds; the fewest of equally good ones.
    """
    gains = accumulate(survival, initial=0.0)
    values = [gain - rate * seconds(drafts + 1) for drafts, gain in enumerate(gains)]
    return values.index(max(values))


def least_survival(rate: float, seconds: Sequence[float]) -> float:
    """The survival below which no further draft can pay, whatever follows: stop drafting there.

    It looks backwards only, as the survival of a draft is known before that draft is drawn. With a
    further draft of survival a, up to m more of them have at most a·m, so that they pay only if
    a·m > rate · (the seconds they cost), for some m.

    Args:
        rate: tokens per second that are earned otherwise.
        seconds: of rounds of 0, 1, ..., K drafts.

    Returns:
        The least of these over all depths and m, in [0, 1): a threshold for
        `TreeOptions.min_survival`.
    """
    slopes = [
        (after - before) / (more - drafts)
        for drafts, before in enumerate(seconds)
        for more, after in enumerate(seconds)
        if more > drafts
    ]
    return min(max(rate * min(slopes, default=0.0), 0.0), 0.999)
