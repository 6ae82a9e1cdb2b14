"""Growing the trees of a batch level by level, in fixed shapes.

The twin of `inference.proposers.growth`: the same nodes in the same order. A level has room for F
frontier nodes and R children of each, in every sequence; what does not exist there (a token of
probability zero, a node behind the end of the text) is kept with the score -inf and is padding in
the end.

Legend: B sequences, M candidates, F frontier nodes, R children of each, N tree nodes, Vd draft
vocabulary.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from inference.proposers.growth import needed
from inference.proposers.laws import OUTSIDE
from inference.proposers.options import TreeOptions
from inference.static.laws import Warpers, rows_of, scaled, warp
from inference.static.noise import gumbel_at
from inference.static.tree import DraftTree
from inference.static.words import follow
from inference.tree import DRAWN_KINDS, Proposal


@dataclass(frozen=True)
class DraftLaw:
    """How the children of a batch are scored.

    Attributes:
        kind: how they are chosen, one for the batch.
        warpers: of the draft law, the draft temperature included.
        seeds: (B,) int64 of the noise, as `seed_words` gives them.
        positions: (B,) int64 of the roots.
        sharpness: see `inference.proposers.laws.node_scores`.
        vocab: (Vd,) absolute ids of the draft logits' columns, or None for all.
    """

    kind: Proposal
    warpers: Warpers
    seeds: Tensor
    positions: Tensor
    sharpness: float = 0.8
    vocab: Tensor | None = None

    def ids(self, columns: Tensor) -> Tensor:
        """Absolute ids of draft columns, of any shape."""
        return columns if self.vocab is None else self.vocab[columns]


def top_children(law: DraftLaw, logits: Tensor, level: int, count: int) -> tuple[Tensor, Tensor]:
    """The best children of some nodes of one depth.

    They are found among the logits themselves; of their law only its sum is needed.

    Args:
        law: of the drafts, ONE_HOT or COUPLED.
        logits: (B, F, Vd) of the nodes.
        level: depth of the nodes.
        count: R, at most Vd.

    Returns:
        (B, F, R) columns, best first, and their log-scores, at most 0, in float32.
    """
    scores = scaled(logits.float(), law.warpers)
    if law.kind is Proposal.COUPLED and not law.warpers.greedy:
        scores = _coupled_scores(law, logits, scores, level)
    best = scores.topk(count)
    largest = best.values[..., :1]
    total = (scores - largest).exp().sum(-1, keepdim=True)
    return best.indices, (best.values - largest - total.log()).float()


def _coupled_scores(law: DraftLaw, logits: Tensor, scores: Tensor, level: int) -> Tensor:
    """(B, F, Vd) log q plus the target's own noise, in float64, over the sharpness."""
    index = torch.arange(logits.shape[-1], device=logits.device) if law.vocab is None else law.vocab
    noise = gumbel_at(law.seeds[:, None], law.positions[:, None] + level + 1, index)
    dropped = torch.isneginf(warp(logits, law.warpers))
    log_q = scores.log_softmax(-1).double()
    noisy = (log_q + noise[:, None] - OUTSIDE * dropped) / law.sharpness
    if isinstance(law.warpers.temperature, Tensor):
        return torch.where(rows_of(law.warpers.temperature, noisy) > 0, noisy, log_q)
    return noisy


# Candidates -------------------------------------------------------------------------------------


class Candidates(NamedTuple):
    """Every node drafted so far, in order of creation; node 0 is the root.

    Attributes:
        tokens: (B, M) int64.
        parents: (B, M) int64, -1 for the root.
        scores: (B, M) float32 log-probability of the path; -inf for what does not exist.
        survival: (B, M) float64 chance that the path to the node is accepted; None without a
            confidence output.
    """

    tokens: Tensor
    parents: Tensor
    scores: Tensor
    survival: Tensor | None = None

    @property
    def size(self) -> int:
        """M."""
        return self.tokens.shape[1]

    @classmethod
    def roots(cls, tokens: Tensor) -> "Candidates":
        """Start from the committed tokens (B,) alone."""
        tokens = tokens[:, None]
        scores = torch.zeros_like(tokens, dtype=torch.float32)
        return cls(tokens, torch.full_like(tokens, -1), scores)


def expand(
    candidates: Candidates,
    frontier: Tensor,
    tokens: Tensor,
    log_probs: Tensor,
    survival: Tensor | None = None,
) -> Candidates:
    """Append R children to each frontier node, grouped by node.

    Args:
        candidates: the M nodes so far.
        frontier: (B, F) nodes to expand.
        tokens: (B, F, R) absolute ids.
        log_probs: (B, F, R) of each after its parent, at most 0; -inf for none.
        survival: (B, F) chance that a child of each node is accepted, and all before it.
    """
    scores = candidates.scores.gather(1, frontier)[..., None] + log_probs
    parents = frontier[..., None].expand_as(tokens)
    if survival is not None:
        assert candidates.survival is not None
        of_each = survival[..., None].expand_as(scores).flatten(1)
        survival = torch.cat([candidates.survival, of_each], dim=1)
    return Candidates(
        torch.cat([candidates.tokens, tokens.flatten(1)], dim=1),
        torch.cat([candidates.parents, parents.flatten(1)], dim=1),
        torch.cat([candidates.scores, scores.flatten(1)], dim=1),
        survival,
    )


def best_frontier(candidates: Candidates, start: int, width: int) -> Tensor:
    """The next nodes to expand: the best of those created since index ``start``.

    Returns:
        (B, F) nodes, best first, F the smaller of ``width`` and their number.
    """
    return candidates.scores[:, start:].topk(min(width, candidates.size - start)).indices + start


def rerank(candidates: Candidates, size: int) -> tuple[DraftTree, Tensor]:
    """Keep the best ``size`` - 1 candidates of each sequence and its root, in order of creation.

    Args:
        candidates: all M nodes.
        size: nodes of the trees, root included.

    Returns:
        Trees of N nodes, the smaller of ``size`` and M, padding at the end; and (B, N) the
        candidate that each node is, 0 for padding.
    """
    order = candidates.scores[:, 1:].argsort(dim=1, descending=True, stable=True) + 1
    return keep(candidates, order[:, : size - 1], size)


def keep(candidates: Candidates, chosen: Tensor, size: int) -> tuple[DraftTree, Tensor]:
    """The trees of some candidates.

    Args:
        candidates: all M nodes.
        chosen: (B, C) different ones but the root in any order, with the parents of all that
            exist; which are fewer than ``size``.
        size: most nodes of the trees, root included.

    Returns:
        As for `rerank`.
    """
    exists = candidates.scores.gather(1, chosen) > -torch.inf
    order = torch.where(exists, chosen, candidates.size).sort(dim=1).values[:, : size - 1]
    order = torch.cat([torch.zeros_like(order[:, :1]), order], dim=1)
    valid = order < candidates.size
    kept = torch.where(valid, order, 0)
    places = torch.arange(order.shape[1], device=order.device).expand_as(order)
    number = torch.zeros_like(candidates.tokens[:, :1]).expand(-1, candidates.size + 1)
    number = number.scatter(1, order, places)  # candidate -> node
    parents = follow(number, candidates.parents.gather(1, kept), -1)
    survival = None
    if candidates.survival is not None:
        survival = candidates.survival.gather(1, kept).float()
    tree = DraftTree(
        torch.where(valid, candidates.tokens.gather(1, kept), 0),
        torch.where(valid, parents, -1),
        valid,
        survival=survival,
    )
    return tree, kept


# Growth -----------------------------------------------------------------------------------------


class Grown(NamedTuple):
    """Trees of a batch that are being grown.

    Attributes:
        candidates: so far.
        frontier: (B, F) nodes that get children next; empty once the trees are as deep as they may
            be.
        places: (B, F) place of each one's parent in the frontier before.
        levels: that have been added.
        laws: of each level, where tokens are drawn: (B, F) the nodes that got children, M for those
            that got none, and (B, F, Vd) the laws of their drawn children.
        drawn: of each level, where tokens are drawn: (B, C) whether its candidates were.
    """

    candidates: Candidates
    frontier: Tensor
    places: Tensor
    levels: int
    laws: tuple[tuple[Tensor, Tensor], ...] = ()
    drawn: tuple[Tensor, ...] = ()


class Growth(ABC):
    """How the trees of a batch grow, level by level, out of draft logits that the caller makes.

    All shapes are known beforehand, so levels are a loop over numbers that are the same in every
    round. What changes from round to round are the values of tensors: the roots, and those of the
    law and of ``max_depth``, which may be buffers that are written in place.

    Args:
        options: of the trees.
        law: of the drafts.
        max_depth: (B,) int64 longest path that the rest of each text has room for, or None.

    Attributes:
        widths: F of each level that gets children, 1 for the root's; as many as a tree is deep.
    """

    widths: list[int]

    def __init__(self, options: TreeOptions, law: DraftLaw, max_depth: Tensor | None) -> None:
        self.options, self.law, self.max_depth = options, law, max_depth

    def start(self, roots: Tensor) -> Grown:
        """Trees of the roots (B,) alone."""
        candidates = Candidates.roots(roots)
        frontier = torch.zeros_like(candidates.tokens)
        return Grown(candidates, frontier, frontier, 0)

    @abstractmethod
    def add(self, grown: Grown, logits: Tensor, acceptance: Tensor | None = None) -> Grown:
        """Children of the frontier.

        Args:
            grown: the trees so far.
            logits: (B, F, Vd) of the children, or (B, 1, Vd) if those of all nodes are the same.
            acceptance: (B, F) or (B, 1) calibrated chance that a draft made from each is accepted;
                None without a confidence output.
        """

    def frontier(self, grown: Grown) -> tuple[Tensor, Tensor]:
        """(B, F) tokens of the nodes that get children next, and (B, F) the place of each one's
        parent in the frontier before. Nodes that do not exist have tokens all the same.
        """
        return grown.candidates.tokens.gather(1, grown.frontier), grown.places

    @abstractmethod
    def finish(self, grown: Grown) -> DraftTree:
        """The trees to verify."""

    def _limited(self, grown: Grown, scores: Tensor, survival: Tensor | None) -> Tensor:
        """Scores with -inf behind the end of the text and where children are not worth it.

        Args:
            grown: the trees so far.
            scores: (B, F or 1, R) of children.
            survival: (B, F or 1) chance that a child of each node is accepted.
        """
        if self.max_depth is not None:
            ended = self.max_depth <= grown.levels
            scores = scores.masked_fill(ended[:, None, None], -torch.inf)
        if self.options.min_survival > 0.0:
            scores = torch.where(self._in_vain(survival)[..., None], -torch.inf, scores)
        return scores

    def _in_vain(self, survival: Tensor | None) -> Tensor:
        """(B, F) chances that a child of each node is accepted -> whether they are too small."""
        return needed(survival) < self.options.min_survival


def survival_of(grown: Grown, acceptance: Tensor | None) -> tuple[Candidates, Tensor | None]:
    """Chances that children of the frontier are accepted, and all drafts on the way to them.

    Args:
        grown: the trees so far.
        acceptance: (B, F or 1) that a child of each node is, or None.

    Returns:
        The candidates, of which the root has its chance, and (B, F) or None.
    """
    candidates = grown.candidates
    if acceptance is None:
        return candidates, None
    if candidates.survival is None:
        assert grown.levels == 0, "all levels come with chances or none"
        candidates = candidates._replace(survival=torch.ones_like(candidates.scores).double())
    assert candidates.survival is not None
    return candidates, candidates.survival.gather(1, grown.frontier) * acceptance.double()


class DynamicGrowth(Growth):
    """Trees that grow towards their most likely paths (EAGLE-2, arXiv:2406.16858): every level
    expands the best nodes of the one before, and in the end the best of all are kept.

    Args:
        options: of the trees; without a shape.
        law: of the drafts, ONE_HOT or COUPLED.
        max_depth: (B,) longest paths, or None.
        columns: Vd.
    """

    def __init__(
        self, options: TreeOptions, law: DraftLaw, max_depth: Tensor | None, columns: int
    ) -> None:
        assert options.shape is None and law.kind not in DRAWN_KINDS
        super().__init__(options, law, max_depth)
        self.branch = min(options.top_k, columns)
        self.widths = level_widths(options.longest, self.most_expanded(options), self.branch)

    @staticmethod
    def most_expanded(options: TreeOptions) -> int:
        """Nodes of a level that get children, at most."""
        return options.top_k

    def add(self, grown: Grown, logits: Tensor, acceptance: Tensor | None = None) -> Grown:
        """The best R children of each frontier node; what is too much falls out at the end."""
        columns, scores = top_children(self.law, logits, grown.levels, self.branch)
        candidates, survival = survival_of(grown, acceptance)
        scores = self._limited(grown, scores, survival)
        shape = (*grown.frontier.shape, self.branch)
        tokens, start = self.law.ids(columns).expand(shape), candidates.size
        candidates = expand(candidates, grown.frontier, tokens, scores.expand(shape), survival)
        levels = grown.levels + 1
        width = self.widths[levels] if levels < len(self.widths) else 0
        frontier = best_frontier(candidates, start, width)
        return Grown(candidates, frontier, (frontier - start) // self.branch, levels)

    def finish(self, grown: Grown) -> DraftTree:
        """The best ``size`` nodes of all, see `rerank`."""
        return rerank(grown.candidates, self.options.size)[0]


def level_widths(depth: int, most: int, branch: int) -> list[int]:
    """F of each level of a tree that expands at most so many nodes of a level.

    Args:
        depth: levels.
        most: nodes.
        branch: R.
    """
    widths = [1]
    while len(widths) < depth:
        widths.append(min(most, widths[-1] * branch))
    return widths
