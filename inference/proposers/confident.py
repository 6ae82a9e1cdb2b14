"""How far drafts go within a round, where a confidence output says how good they are.

Before a draft is made: drafting stops where no further draft can pay, whatever follows. After
chains are made that are not drawn: they are cut to the length that pays
(`inference.scheduling.schedule`), and in a batch that shares a forward to one width for all
(`inference.scheduling.admission`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from inference.scheduling.admission import common_width
from inference.scheduling.schedule import Choice, RoundCosts, cut_chain, cut_tree, least_survival
from inference.tree import DRAWN_KINDS, TokenTree


class Cuts:
    """Stops and cuts the drafts of heads whose confidence output is trusted.

    Args:
        costs: of this machine.
        arms: names of the heads.
    """

    def __init__(self, costs: RoundCosts, arms: Collection[str]) -> None:
        self.costs, self.arms = costs, frozenset(arms)

    def least(
        self, choice: Choice, rate: float, context: float, batch: int, floor: int = 1
    ) -> float:
        """The survival below which drafting stops: a `TreeOptions.min_survival`.

        Args:
            choice: of the sequence; of all that are cut, as it does not know of them.
            rate: tokens per second of one sequence that are earned otherwise.
            context: committed tokens.
            batch: sequences in a round.
            floor: rows that the round has in any case.
        """
        if choice.arm not in self.arms:
            return 0.0
        seconds = [  # of rounds of 0, 1, ... drafts of a chain, without what all rounds take
            self.costs.draft(choice.arm, drafts, choice.top_k, batch)
            + self.costs.verify(max(drafts + 1, floor), context, batch)
            for drafts in range(choice.depth + 1)
        ]
        return least_survival(rate, seconds)

    def alone(
        self, name: str | None, tree: TokenTree, rate: float, context: float, batch: int
    ) -> TokenTree:
        """The tree of a sequence that decides for itself.

        Args:
            name: of the arm that drafted it.
            tree: drafted.
            rate: tokens per second of one sequence that are earned otherwise.
            context: committed tokens.
            batch: sequences in a round.
        """
        survival = self._survival(name, tree)
        if survival is None:
            return tree
        drafts = cut_chain(survival, rate, lambda rows: self.costs.verify(rows, context, batch))
        return cut_tree(tree, drafts + 1, drafts)

    def together(
        self,
        names: Mapping[int, str | None],
        trees: Mapping[int, TokenTree],
        rate: float,
        context: float,
        batch: int,
        floor: int = 1,
    ) -> dict[int, TokenTree]:
        """The trees of sequences that share a forward.

        Args:
            names: of the arms that drafted them, by sequence.
            trees: drafted, by sequence.
            rate: tokens per second of the whole batch that are earned otherwise.
            context: committed tokens, the mean.
            batch: sequences in a round.
            floor: rows that sequences have which decide for themselves.
        """
        survival = {row: self._survival(names[row], tree) for row, tree in trees.items()}
        chains = [chances for chances in survival.values() if chances is not None]
        if not chains:
            return dict(trees)
        fixed = [tree.num_nodes for row, tree in trees.items() if survival[row] is None]
        width = common_width(
            chains,
            rate,
            lambda rows: self.costs.verify(rows, context, batch),
            max([floor, *fixed]),
        )
        return {
            row: tree if survival[row] is None else cut_tree(tree, width, width - 1)
            for row, tree in trees.items()
        }

    def _survival(self, name: str | None, tree: TokenTree) -> list[float] | None:
        """Of the drafts of a chain that may be cut; None if it may not."""
        if name not in self.arms or tree.survival is None or not tree.is_chain:
            return None
        if tree.proposal in DRAWN_KINDS:  # `may_look`: its tokens have no say any more
            return None
        return [float(chance) for chance in tree.survival.tolist()[1:]]
