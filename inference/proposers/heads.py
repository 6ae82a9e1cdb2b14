"""What all proposers out of trained heads share.

Legend: Vd draft vocabulary, K depths.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from drafters import Drafter
from inference.proposers.base import Proposer, RowState, Session
from inference.proposers.options import DEPTH, TreeOptions
from inference.shapes.static_tree import StaticTree, optimal_static_tree, static_tree
from inference.timing import PhaseTimer
from inference.tree import TokenTree


class HeadProposer(Proposer):
    """Trees out of a trained head, one sequence after the other.

    Args:
        drafter: attached head.
        options: of the tree; what they leave open (shape, draft temperature) is the head's own.
    """

    def __init__(self, drafter: Drafter, options: TreeOptions | None = None) -> None:
        self.drafter = drafter
        self.options = own_options(options or TreeOptions(), drafter)
        self._rule, self._timer = "match", PhaseTimer()

    @property
    def default_draws(self) -> str:
        """``TreeOptions.draws`` where it is open: "all", as drafts know the path they continue."""
        return "all"

    @property
    def draws(self) -> str:
        """What ``TreeOptions.draws`` comes to with this head."""
        return self.options.draws or self.default_draws

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The layers the head reads."""
        return self.drafter.feature_layers

    @property
    def chains(self) -> bool:
        """Whether no node has a second child."""
        return self.options.chains

    def start(self, session: Session) -> None:
        """Forget the last call's sequences, and have the engine make the head ready, which it does
        once, whether the head drafts by itself or as one of several.
        """
        session.engine.prepare(self.drafter)
        self._rule, self._timer = session.rule, session.timer
        self.reset(session.batch_size)

    @abstractmethod
    def reset(self, batch_size: int) -> None:
        """Empty draft caches for so many sequences."""

    def propose(self, states: Sequence[RowState | None]) -> list[TokenTree | None]:
        """Absorb newly committed features and grow a tree for each sequence."""
        with torch.no_grad():
            return [
                None if state is None else self.grow(row, state) for row, state in enumerate(states)
            ]

    @abstractmethod
    def grow(self, row: int, state: RowState) -> TokenTree:
        """The tree of one sequence."""

    @abstractmethod
    def forced(self, state: RowState, tokens: list[int]) -> list[Tensor]:
        """Draft logits of one round along a known continuation, by the path that ``grow`` takes.

        Args:
            state: of sequence 0.
            tokens: that follow ``state.tokens``.

        Returns:
            Logits (Vd,) of depth 0, 1, ...: at most K, and at most one more than ``tokens``.
        """


def own_options(options: TreeOptions, drafter: Drafter) -> TreeOptions:
    """The options, with what they leave open taken from the head: its calibrated draft temperature,
    its static tree (unless chains are asked for) and its K. A head of K drafts is not asked for
    more.

    Raises:
        ValueError: a tree with more ranks than the head's vocabulary or deeper than the head.
    """
    config = drafter.config
    if options.draft_temperature is None:
        options = replace(options, draft_temperature=config.draft_temperature)
    own_shape = options.shape is None and not options.grown and options.top_k > 1
    if own_shape and config.tree is not None:
        options = replace(options, shape=static_tree([tuple(path) for path in config.tree]))
    columns, depth = config.draft_vocab_size, drafter.num_drafts
    if options.shape is not None:
        if int(options.shape.ranks.max()) >= columns:
            raise ValueError(
                f"the tree asks for candidate {int(options.shape.ranks.max())} of a head that "
                f"ranks only {columns} tokens (draft_vocab_size): give a narrower tree"
            )
        if depth is not None and int(options.shape.depths.max()) > depth:
            raise ValueError(
                f"the tree is {int(options.shape.depths.max())} deep but the head drafts {depth} "
                "tokens: give a tree no deeper"
            )
    longest = options.depth or depth or DEPTH
    if depth is not None:
        longest = min(longest, depth)
    if options.shape is None:  # a path of more tokens than the tree has would be drafted in vain
        longest = min(longest, options.size - 1)
    return replace(options, depth=longest)


def default_tree(num_drafts: int, size: int, columns: int = 20) -> StaticTree:
    """The optimal shape for a generic profile: the best token at depth k is right 0.5·0.8^k of the
    time, rank r a (r+1)^1.5-th of that. ``scripts.fit_tree`` fits one to a head's own accuracies.

    Args:
        num_drafts: K.
        size: nodes, root included; fewer where the head cannot make as many.
        columns: tokens that a head ranks; at most 20 are used.
    """
    ranks = min(max(size - 1, 1), columns, 20)
    heads, rank = torch.arange(num_drafts)[:, None], torch.arange(ranks)[None]
    most = sum(ranks**depth for depth in range(1, num_drafts + 1))
    return optimal_static_tree(0.5 * 0.8**heads / (rank + 1.0) ** 1.5, min(size - 1, most))


def chain_shape(num_drafts: int) -> StaticTree:
    """The best token of every depth, one below the other."""
    return static_tree([(0,) * depth for depth in range(1, num_drafts + 1)])
