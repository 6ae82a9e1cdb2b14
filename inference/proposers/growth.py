"""Growing the tree of one sequence from draft logits, level by level.

Shared by every proposer with draft logits: trained heads, a separate draft model, the first layers
of the target. The rule decides how children are chosen (``inference.verify``):

* ``match``, and every rule at temperature 0: the most likely tokens, deterministically;
* ``coupled``: the top of log q + the noise the target itself will draw with at that position;
* ``rejection`` and ``block`` at a temperature: drawn from q without replacement, or one drawn
  beside the most likely ones (arXiv:2502.18779), and never dropped afterwards.

The options decide where children go: a tree grows towards its most likely paths, or fills a shape
that was fixed beforehand. How many are drawn at a node is known before the first of them is, in
both, so drawn trees stay lossless (arXiv:2402.12374).

Legend: F frontier nodes, C children, K depths of one pass, Vd draft vocabulary, V target
vocabulary.
"""

from dataclasses import replace

import torch
from torch import Tensor

from inference.proposers.base import RowState
from inference.proposers.laws import draft_law, node_scores, proposal_kind
from inference.proposers.options import TreeOptions
from inference.sampling import Stream, draw_top, gumbel, probabilities
from inference.shapes.static_tree import StaticTree
from inference.tree import (
    DRAWN_KINDS,
    Candidates,
    Proposal,
    TokenTree,
    append,
    best_frontier,
    expand,
    rerank,
)


def needed(acceptance: Tensor | None) -> Tensor:
    """The chances that ``min_survival`` asks for.

    Raises:
        ValueError: there are none.
    """
    if acceptance is None:
        raise ValueError(
            "min_survival (--min-confidence) needs a head with a confidence output: train one with "
            "confidence_head, or leave it out"
        )
    return acceptance


class Growth:
    """Candidates of one round of one sequence, and how they are chosen.

    Deterministic candidates may be dropped at any time. Of drawn ones none is: the budget ``size``
    is shared out beforehand, evenly over the levels, and within a level over its nodes.

    Args:
        options: of the tree.
        state: the sequence.
        rule: of acceptance.
        device: of the draft logits.
        vocab_size: V.
        draft_vocab: (Vd,) absolute ids of the draft logits' columns, or None for all.
    """

    def __init__(
        self,
        options: TreeOptions,
        state: RowState,
        rule: str,
        device: torch.device,
        vocab_size: int,
        draft_vocab: Tensor | None = None,
    ) -> None:
        self.candidates = Candidates.root(state.tokens[-1], device)
        self.options, self.vocab_size, self.draft_vocab = options, vocab_size, draft_vocab
        self.kind = proposal_kind(rule, state.sampling, options.draws or "all")
        self.law = draft_law(state.sampling, options.draft_temperature or 1.0)
        self.root, self.depth = len(state.tokens) - 1, min(options.longest, state.max_depth)
        self.level_start, self.levels = 0, 0
        self.laws: dict[int, Tensor] = {}
        self.drawn: list[int] = []
        self.survival: dict[int, float] = {}

    @property
    def draws(self) -> bool:
        """Whether there are drawn candidates, which must not be dropped."""
        return self.kind in DRAWN_KINDS

    def frontier(self) -> Tensor:
        """Nodes of the newest level to expand: the best few by path probability; none where the
        tree is as deep as it may be.
        """
        if self.levels >= self.depth:
            return self.candidates.parents[:0]
        width = self.options.top_k
        if self.draws:
            width = min(width, -(-self.share() // 2))  # two children each, where there are many
        return best_frontier(self.candidates, self.level_start, width)

    def share(self) -> int:
        """Tokens to draw in the next level: an even part of what is left of ``size``."""
        left = self.options.size - len(self.candidates.tokens)
        return -(-left // (self.depth - self.levels))

    def add_children(
        self, frontier: Tensor, logits: Tensor, acceptance: Tensor | None = None
    ) -> None:
        """Children of each frontier node that is worth it.

        Args:
            frontier: (F,) candidates.
            logits: (F, Vd) of their children.
            acceptance: (F,) calibrated chance that a draft made from each is accepted, for
                ``min_survival`` and ``TokenTree.survival``; None without a confidence output.
        """
        if not self.depth:
            return
        self.level_start = len(self.candidates.tokens)
        kept = self._worth_children(frontier, acceptance)
        frontier, logits = frontier[kept], logits[kept]
        if len(frontier):
            if self.draws:
                self._draw_children(frontier, logits)
            else:
                self._take_children(frontier, logits)
        self.levels += 1

    def finish(self) -> tuple[TokenTree, list[int]]:
        """The tree to verify: what was drawn, or the best ``size`` nodes of all.

        Returns:
            The tree, and the candidate that each of its nodes is.
        """
        if not self.draws:
            tree, chosen = rerank(self.candidates, self.options.size - 1, self.kind)
            kept = chosen.tolist()
        else:
            tree, kept = self._drawn_tree(), list(range(len(self.candidates.tokens)))
        return self._with_survival(tree, kept), kept

    def _with_survival(self, tree: TokenTree, kept: list[int]) -> TokenTree:
        """The tree with what the confidence output says about each node, where there is one.

        Args:
            tree: to verify.
            kept: the candidate that each of its nodes is.
        """
        if not self.survival:
            return tree
        parents = self.candidates.parents.tolist()
        chances = [self.survival.get(parents[node], 1.0) for node in kept]  # the root has none
        return replace(tree, survival=torch.tensor(chances))

    def _drawn_tree(self) -> TokenTree:
        """All candidates, in order of creation, with the laws they were drawn from."""
        tokens, parents = self.candidates.tokens, self.candidates.parents
        dtype = next((law.dtype for law in self.laws.values()), torch.float32)
        probs = torch.zeros(len(tokens), self.vocab_size, dtype=dtype, device=tokens.device)
        columns = slice(None) if self.draft_vocab is None else self.draft_vocab
        for node, law in self.laws.items():
            probs[node, columns] = law
        drawn = None
        if self.kind is Proposal.MIXED:
            drawn = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
            drawn[self.drawn] = True
        return TokenTree(tokens, parents, self.kind, probs, drawn)

    def _worth_children(self, frontier: Tensor, acceptance: Tensor | None) -> Tensor | slice:
        """Which frontier nodes may have children. Their own drafts, not yet made, have no say."""
        least = self.options.min_survival
        if acceptance is None and least == 0.0:
            return slice(None)
        nodes, above = frontier.tolist(), self.candidates.parents[frontier].tolist()
        chances = needed(acceptance).tolist()
        for node, parent, chance in zip(nodes, above, chances, strict=True):
            self.survival[node] = self.survival.get(parent, 1.0) * chance
        if least == 0.0:
            return slice(None)
        kept = [place for place, node in enumerate(nodes) if self.survival[node] >= least]
        return torch.tensor(kept, dtype=torch.int64, device=frontier.device)

    def scores(self, logits: Tensor, level: int) -> Tensor:
        """(F, Vd) logits of nodes at depth ``level`` -> log-scores of their children."""
        return node_scores(
            logits,
            self.draft_vocab,
            self.law,
            self.kind,
            self.root + level + 1,
            self.options.sharpness,
        )

    def ids(self, columns: Tensor) -> Tensor:
        """Absolute ids of draft columns, of any shape."""
        return columns if self.draft_vocab is None else self.draft_vocab[columns]

    def _take_children(self, frontier: Tensor, logits: Tensor) -> None:
        """The best ``top_k`` by score; what is too much falls out at the end."""
        scores = self.scores(logits, self.levels)
        best = scores.topk(min(self.options.top_k, scores.shape[-1]))
        self.candidates = expand(self.candidates, frontier, self.ids(best.indices), best.values)

    def _counts(self, frontier: Tensor) -> list[int]:
        """How many children to draw at each node, known before the first is drawn: the level's
        share is spread evenly, and the best nodes take what does not divide.
        """
        even, rest = divmod(self.share(), len(frontier))
        return [min(even + (place < rest), self.options.top_k) for place in range(len(frontier))]

    def _draw_children(self, frontier: Tensor, logits: Tensor) -> None:
        """Draw from the warped draft law; each node has noise of its own."""
        laws, counts = probabilities(logits, self.law), self._counts(frontier)  # (F, Vd)
        for node, law, count in zip(frontier.tolist(), laws, counts, strict=True):
            if count == 0:
                continue
            chosen, drawn_from = self._choose(node, law, count)
            first = len(self.candidates.tokens)
            parent = torch.tensor([node], device=logits.device)
            self.candidates = expand(
                self.candidates, parent, self.ids(chosen)[None], law[chosen].log()[None]
            )
            self.laws[node] = drawn_from
            if self.kind is Proposal.MIXED and float(drawn_from.sum()) > 0.0:
                self.drawn.append(first)

    def _choose(self, node: int, law: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Columns (C <= count,) of a node's children, drawn ones first, and the law they had.

        Args:
            node: candidate index.
            law: (Vd,) its draft law.
            count: children to choose.
        """
        seed, place = self.law.seed, (self.root << 20) + node
        noise = gumbel(seed, place, len(law), law.device, Stream.DRAFT)
        if self.kind is Proposal.DENSE:
            return draw_top(law, noise, count), law
        best = law.topk(min(count - 1, len(law)))
        sure = best.indices[best.values > 0.0]  # S; may hold all of the law's support
        rest = law.clone()
        rest[sure] = 0.0
        if not float(rest.sum()) > 0.0:
            return sure, rest
        rest = rest / rest.sum()
        return torch.cat([draw_top(rest, noise, 1), sure]), rest


class StaticGrowth(Growth):
    """Candidates that fill a shape.

    A child that the shape gives rank r is the rank-r token of its node's scores. Drawn children
    have no rank: a node draws as many as the shape gives it, and each takes the place, and so the
    subtree, of the next best rank; where one is drawn beside the likeliest, the drawn one has the
    first place. Where a law has too few tokens the last places stay empty.

    Args:
        options: with a shape.
        state: the sequence.
        rule: of acceptance.
        device: of the draft logits.
        vocab_size: V.
        draft_vocab: (Vd,) absolute ids of the draft logits' columns, or None for all.
    """

    def __init__(
        self,
        options: TreeOptions,
        state: RowState,
        rule: str,
        device: torch.device,
        vocab_size: int,
        draft_vocab: Tensor | None = None,
    ) -> None:
        assert options.shape is not None
        super().__init__(options, state, rule, device, vocab_size, draft_vocab)
        self.shape: StaticTree = options.shape
        self.depth = min(self.shape.depth, state.max_depth)
        self.ranks = self.shape.ranks.tolist()
        self.places = [0]  # the shape's node that each candidate is

    def frontier(self) -> Tensor:
        """Nodes of the newest level that have children in the shape; none where the tree is as deep
        as it may be.
        """
        nodes = range(self.level_start, len(self.places) if self.levels < self.depth else 0)
        inner = [node for node in nodes if self.shape.children[self.places[node]]]
        device = self.candidates.tokens.device
        return torch.tensor(inner, dtype=torch.int64, device=device)

    def finish(self) -> tuple[TokenTree, list[int]]:
        """The tree to verify: all candidates."""
        tokens, parents = self.candidates.tokens, self.candidates.parents
        if self.draws:
            tree = self._drawn_tree()
        else:
            log_q = self.candidates.log_q(self.kind)
            tree = TokenTree(tokens, parents, self.kind, log_q=log_q)
        kept = list(range(len(tokens)))
        return self._with_survival(tree, kept), kept

    def _counts(self, frontier: Tensor) -> list[int]:
        return [len(self.shape.children[self.places[node]]) for node in frontier.tolist()]

    def _draw_children(self, frontier: Tensor, logits: Tensor) -> None:
        super()._draw_children(frontier, logits)
        free = {node: iter(self.shape.children[self.places[node]]) for node in frontier.tolist()}
        for parent in self.candidates.parents[self.level_start :].tolist():
            self.places.append(next(free[parent]))

    def _take_children(self, frontier: Tensor, logits: Tensor) -> None:
        """The candidates of the shape's ranks."""
        scores = self.scores(logits, self.levels)
        most = scores.shape[-1]
        found: list[tuple[int, int, int, int]] = []  # row, rank, parent, place
        for row, node in enumerate(frontier.tolist()):
            for child in self.shape.children[self.places[node]]:
                if self.ranks[child] < most:
                    found.append((row, self.ranks[child], node, child))
        wanted = torch.tensor(found, dtype=torch.int64).reshape(-1, 4)
        rows, ranks, parents, places = wanted.to(scores.device).unbind(1)
        best = scores.topk(int(wanted[:, 1].max()) + 1 if found else 0)
        values = best.values[rows, ranks]
        kept = values > -torch.inf
        self.candidates = append(
            self.candidates,
            parents[kept],
            self.ids(best.indices[rows, ranks])[kept],
            values[kept],
        )
        self.places += places[kept].tolist()


def new_tree(
    options: TreeOptions,
    state: RowState,
    rule: str,
    device: torch.device,
    vocab_size: int,
    draft_vocab: Tensor | None = None,
) -> Growth:
    """The growth that the options ask for.

    Args:
        options: of the tree; with a shape this is filled.
        state: the sequence.
        rule: of acceptance.
        device: of the draft logits.
        vocab_size: V.
        draft_vocab: (Vd,) absolute ids of the draft logits' columns, or None for all.
    """
    kind = Growth if options.shape is None else StaticGrowth
    return kind(options, state, rule, device, vocab_size, draft_vocab)
