"""Trees of drawn tokens, for the rule "rejection" at a temperature.

The twins are the drawing parts of `inference.proposers.growth`: the same draws, as noise is keyed
by the root's position and the number that the host would give a node. Nothing that was drawn is
dropped, so the budget is shared out beforehand: how many children a node gets is arithmetic on what
each sequence has so far.

Legend: B sequences, M candidates, F frontier nodes, C candidates of a level, R children of a node,
N tree nodes, Vd draft vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from inference.proposers.options import TreeOptions
from inference.sampling import Stream
from inference.static.growth import (
    Candidates,
    DraftLaw,
    Grown,
    Growth,
    best_frontier,
    expand,
    keep,
    level_widths,
    survival_of,
)
from inference.static.laws import first_argmax, law
from inference.static.noise import race
from inference.static.paths import ShapeGrowth
from inference.static.tree import DraftTree
from inference.tree import DRAWN_KINDS, Proposal

ROOT_SHIFT = 20
"""Bits of a node's number in the place that keys its noise, as on the host."""


class Children(NamedTuple):
    """Of the nodes of one level; what does not exist is behind what does.

    Attributes:
        columns: (B, F, R) of the draft vocabulary.
        scores: (B, F, R) float32 log-probabilities; -inf for none.
        drawn: (B, F, R) bool.
        laws: (B, F, Vd) that the drawn ones came from.
    """

    columns: Tensor
    scores: Tensor
    drawn: Tensor
    laws: Tensor


def draw_children(
    draft: DraftLaw, logits: Tensor, counts: Tensor, numbers: Tensor, branch: int
) -> Children:
    """Draw without replacement, or one token beside the likeliest.

    Args:
        draft: law of the drafts, DENSE or MIXED.
        logits: (B, F, Vd).
        counts: (B, F) children that each node gets, at most R.
        numbers: (B, F) of the nodes, as the host counts them.
        branch: R.
    """
    probs = law(logits, draft.warpers)
    places = (draft.positions[:, None] << ROOT_SHIFT) + numbers
    ranks = torch.arange(branch, device=logits.device)
    wanted = ranks < counts[..., None]
    if draft.kind is Proposal.DENSE:
        best = race(probs, draft.seeds[:, None], places, Stream.DRAFT).topk(branch)
        exists = wanted & (best.values > 0.0)
        columns, laws, drawn = best.indices, probs, exists
    else:
        columns, laws, exists, drawn = _one_drawn(draft, probs, places, wanted)
    scores = probs.gather(-1, columns).log().float().masked_fill(~exists, -torch.inf)
    return Children(columns, scores, drawn, laws)


def _one_drawn(
    draft: DraftLaw, probs: Tensor, places: Tensor, wanted: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One token drawn from what the likeliest leave, and these behind it (arXiv:2502.18779).

    Args:
        draft: law of the drafts.
        probs: (B, F, Vd).
        places: (B, F) that key the noise.
        wanted: (B, F, R) which of a node's places are to be filled.

    Returns:
        Columns (B, F, R), laws (B, F, Vd) of the drawn ones, which places exist, which were drawn.
    """
    best = probs.topk(wanted.shape[-1] - 1)
    sure = wanted[..., 1:] & (best.values > 0.0)
    rest = probs.scatter(-1, best.indices, torch.where(sure, 0.0, best.values))
    mass = rest.sum(-1, keepdim=True)
    some = mass > 0.0
    rest = torch.where(some, rest / mass, rest)
    drawn = first_argmax(race(rest, draft.seeds[:, None], places, Stream.DRAFT))[1][..., None]
    exists = torch.cat([some & wanted[..., :1], sure], dim=-1)
    columns = torch.cat([drawn, best.indices], dim=-1)
    # Without a drawn one the others move up.
    order = (~exists).to(torch.uint8).argsort(dim=-1, stable=True)
    first = torch.arange(wanted.shape[-1], device=rest.device) == 0
    return columns.gather(-1, order), rest, exists.gather(-1, order), exists[..., :1] & first


def numbers_of(candidates: Candidates) -> Tensor:
    """(B, M) how many candidates that exist are before each: its number on the host."""
    return (candidates.scores > -torch.inf).cumsum(1) - 1


def recorded(grown: Grown, kept: Tensor, kind: Proposal) -> tuple[Tensor, Tensor | None]:
    """What verification needs to know of drawn candidates.

    Args:
        grown: whole trees.
        kept: (B, N) the candidate of each node.
        kind: DENSE or MIXED.

    Returns:
        ``draft_probs`` (B, N, Vd), and ``drawn`` (B, N) or None.
    """
    nodes = torch.cat([nodes for nodes, _ in grown.laws], dim=1)  # (B, n)
    laws = torch.cat([laws for _, laws in grown.laws], dim=1)
    laws = torch.cat([laws, torch.zeros_like(laws[:, :1])], dim=1)
    rows = torch.arange(nodes.shape[1], device=nodes.device).expand_as(nodes)
    size = grown.candidates.size
    row = torch.full_like(kept[:, :1], nodes.shape[1]).expand(-1, size + 1)
    row = row.scatter(1, nodes.clamp_max(size), rows)[:, :size].gather(1, kept)
    probs = laws.gather(1, row[..., None].expand(-1, -1, laws.shape[-1]))
    if kind is Proposal.DENSE:
        return probs, None
    drawn = torch.cat([torch.zeros_like(kept[:, :1], dtype=torch.bool), *grown.drawn], dim=1)
    return probs, drawn.gather(1, kept)


NOBODY = 1 << 40
"""Stands in `Grown.laws` for a node that got no children; more than any candidate."""


class DrawnGrowth(Growth):
    """Drawn trees that grow towards their most likely paths.

    What is left of ``size`` is spread evenly over the levels, and a level's share over its best
    nodes, two children each where there are many nodes. With one child per node this is a chain.

    Args:
        options: of the trees; without a shape.
        law: of the drafts, DENSE or MIXED.
        max_depth: (B,) longest paths, or None.
        columns: Vd.
    """

    def __init__(
        self, options: TreeOptions, law: DraftLaw, max_depth: Tensor | None, columns: int
    ) -> None:
        assert options.shape is None and law.kind in DRAWN_KINDS
        super().__init__(options, law, max_depth)
        self.branch = most_children(law.kind, options.top_k, columns)
        most = min(options.top_k, max(options.size // 2, 1))
        self.widths = level_widths(options.longest, most, self.branch)

    def add(self, grown: Grown, logits: Tensor, acceptance: Tensor | None = None) -> Grown:
        """Children of as many frontier nodes as the level's share asks for."""
        candidates, survival = survival_of(grown, acceptance)
        numbers = numbers_of(candidates)
        share = self._share(grown.levels, numbers[:, -1] + 1)
        exists = candidates.scores.gather(1, grown.frontier) > -torch.inf
        # Two children each, where there are many nodes.
        asked = torch.arange(exists.shape[1], device=exists.device) < (share + 1)[:, None] // 2
        alive = exists & asked
        if self.options.min_survival > 0.0:
            alive = alive & ~self._in_vain(survival)
        counts = self._counts(alive, share)
        logits = logits.expand(-1, exists.shape[1], -1)
        found = draw_children(
            self.law, logits, counts, numbers.gather(1, grown.frontier), self.branch
        )
        start = candidates.size
        candidates = expand(
            candidates, grown.frontier, self.law.ids(found.columns), found.scores, survival
        )
        levels = grown.levels + 1
        width = self.widths[levels] if levels < len(self.widths) else 0
        frontier = best_frontier(candidates, start, width)
        nodes = torch.where(counts > 0, grown.frontier, NOBODY)
        return Grown(
            candidates,
            frontier,
            (frontier - start) // self.branch,
            levels,
            (*grown.laws, (nodes, found.laws)),
            (*grown.drawn, found.drawn.flatten(1)),
        )

    def _share(self, levels: int, made: Tensor) -> Tensor:
        """(B,) tokens to draw in the next level: an even part of what is left; none at the end."""
        left = self.options.size - made
        depth = torch.full_like(made, len(self.widths))
        if self.max_depth is not None:
            depth = torch.minimum(depth, self.max_depth)
        more = depth - levels
        return torch.where(more > 0, -(-left // more.clamp_min(1)), 0)

    def _counts(self, alive: Tensor, share: Tensor) -> Tensor:
        """(B, F) children of each node: an even part, the best nodes take what does not divide."""
        nodes = alive.sum(1).clamp_min(1)
        place = alive.cumsum(1) - 1
        counts = (share // nodes)[:, None] + (place < (share % nodes)[:, None])
        return torch.where(alive, counts.clamp_max(self.options.top_k), 0)

    def finish(self, grown: Grown) -> DraftTree:
        """All candidates, in order of creation, with the laws they were drawn from."""
        every = torch.arange(1, grown.candidates.size, device=grown.frontier.device)
        every = every.expand(len(grown.frontier), -1)
        tree, kept = keep(grown.candidates, every, self.options.size)
        probs, drawn = recorded(grown, kept, self.law.kind)
        return _marked(tree, probs, drawn)


class DrawnShapeGrowth(ShapeGrowth):
    """Drawn trees of one shape: a node draws as many children as the shape gives it, each of which
    takes the place of the next best rank.

    Args:
        options: with a shape.
        law: of the drafts, DENSE or MIXED.
        max_depth: (B,) longest paths, or None.
        columns: Vd.
    """

    def __init__(
        self, options: TreeOptions, law: DraftLaw, max_depth: Tensor | None, columns: int
    ) -> None:
        assert law.kind in DRAWN_KINDS
        super().__init__(options, law, max_depth)
        device = law.positions.device
        self._counts: list[Tensor] = []
        self._slots: list[Tensor] = []
        self._branches: list[int] = []
        for level, width in zip(self.levels, self.widths, strict=True):
            rows = level.rows.tolist()
            counts = [rows.count(row) for row in range(width)]
            slots = [place for count in counts for place in range(count)]
            self._counts.append(torch.tensor(counts, device=device))
            self._slots.append(torch.tensor(slots, device=device))
            self._branches.append(most_children(law.kind, max(counts), columns))

    def add(self, grown: Grown, logits: Tensor, acceptance: Tensor | None = None) -> Grown:
        """As many children as the shape gives each node, as far as the law has them."""
        at, rows = grown.levels, self.levels[grown.levels].rows
        candidates, survival = survival_of(grown, acceptance)
        alive = candidates.scores.gather(1, grown.frontier) > -torch.inf
        if self.max_depth is not None:
            alive = alive & (self.max_depth > at)[:, None]
        if self.options.min_survival > 0.0:
            alive = alive & ~self._in_vain(survival)
        counts = torch.where(alive, self._counts[at], 0)
        numbers = numbers_of(candidates).gather(1, grown.frontier)
        logits = logits.expand(-1, alive.shape[1], -1)
        found = draw_children(self.law, logits, counts, numbers, self._branches[at])
        # A law may have fewer tokens than a node has places.
        slots = self._slots[at].clamp_max(self._branches[at] - 1)
        there = self._slots[at] < self._branches[at]
        scores = torch.where(there, found.scores[:, rows, slots], -torch.inf)
        tokens = self.law.ids(found.columns[:, rows, slots])
        nodes = torch.where(counts > 0, grown.frontier, NOBODY)
        return self._append(
            grown._replace(
                candidates=candidates,
                laws=(*grown.laws, (nodes, found.laws)),
                drawn=(*grown.drawn, found.drawn[:, rows, slots] & there),
            ),
            tokens,
            scores,
            survival,
        )

    def finish(self, grown: Grown) -> DraftTree:
        """All candidates, each in its place, with the laws they were drawn from."""
        tree = super().finish(grown)
        every = torch.arange(grown.candidates.size, device=tree.tokens.device)
        probs, drawn = recorded(grown, every.expand_as(tree.tokens), self.law.kind)
        return _marked(tree, probs, drawn)


def most_children(kind: Proposal, wanted: int, columns: int) -> int:
    """R, the places that a node needs for so many children of so many columns."""
    return min(wanted, columns + (kind is Proposal.MIXED))


def _marked(tree: DraftTree, probs: Tensor, drawn: Tensor | None) -> DraftTree:
    """The tree with what was recorded, where there are nodes."""
    probs = torch.where(tree.valid[..., None], probs, 0.0)
    return tree._replace(draft_probs=probs, drawn=None if drawn is None else drawn & tree.valid)
