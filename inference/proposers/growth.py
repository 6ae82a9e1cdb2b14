"""Growing the tree of one sequence from draft logits, level by level.

Shared by every proposer that drafts step by step: trained sequential heads, a separate draft model,
the first layers of the target. The rule decides how children are chosen (``inference.verify``):

* ``match``, and every rule at temperature 0: the most likely tokens, deterministically;
* ``coupled``: the top of log q + the noise the target itself will draw with at that position;
* ``rejection`` and ``block`` at a temperature: drawn from q without replacement, or one drawn
  beside the most likely ones (arXiv:2502.18779), and never dropped afterwards.

Legend: F frontier nodes, R children per node, Vd draft vocabulary, V target vocabulary.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from inference.proposers.base import RowState
from inference.sampling import (
    SamplingParams,
    Stream,
    draw_top,
    gumbel,
    gumbel_at,
    probabilities,
    warp,
)
from inference.tree import Candidates, Proposal, TokenTree, best_frontier, expand, rerank
from inference.verify import ALL_RULES

DRAWS = ("all", "one")

OUTSIDE = 5.0
"""Nats that a coupled draft loses where the warpers of its own law drop it. The target's warpers
may keep it, so it is not ruled out. On synthetic laws this costs nothing with wide nuclei and has
nearly all of what ruling out gains with narrow ones."""


@dataclass(frozen=True)
class TreeOptions:
    """What a drafted tree looks like.

    Attributes:
        size: nodes the target verifies per round, root included.
        depth: longest drafted path.
        top_k: nodes expanded per level and children per node; 1 drafts a chain.
        sharpness: see :func:`node_scores`.
        draft_temperature: factor on the temperature of the draft law; None takes the head's own
            calibrated one, 1 where there is none.
        draws: under ``rejection`` at a temperature, "all" children of a node are drawn, or "one"
            is, beside its most likely ones.
    """

    size: int = 32
    depth: int = 5
    top_k: int = 8
    sharpness: float = 0.8
    draft_temperature: float | None = None
    draws: str = "all"

    def __post_init__(self) -> None:
        """Refuse what cannot be grown."""
        if self.size < 2 or self.depth < 1 or self.top_k < 1:
            raise ValueError(
                f"draft tree: size >= 2, depth >= 1 and top_k >= 1 are needed, got {self.size}, "
                f"{self.depth}, {self.top_k}"
            )
        if not self.sharpness > 0.0:
            raise ValueError(f"draft tree: sharpness must be above 0, got {self.sharpness}")
        if self.draft_temperature is not None and not self.draft_temperature > 0.0:
            raise ValueError(
                f"draft tree: draft_temperature must be above 0, got {self.draft_temperature}"
            )
        if self.draws not in DRAWS:
            raise ValueError(
                f"draft tree: draws must be one of {', '.join(DRAWS)}; got {self.draws!r}"
            )


def proposal_kind(rule: str, sampling: SamplingParams, draws: str = "all") -> Proposal:
    """How a drafter with logits proposes under ``rule``.

    Raises:
        ValueError: unknown rule.
    """
    if rule not in ALL_RULES:
        raise ValueError(f"rule must be one of {', '.join(ALL_RULES)}; got {rule!r}")
    if rule == "coupled":
        return Proposal.COUPLED
    if rule in ("rejection", "block") and sampling.temperature > 0:
        return Proposal.DENSE if draws == "all" else Proposal.MIXED
    return Proposal.ONE_HOT


def draft_law(sampling: SamplingParams, draft_temperature: float) -> SamplingParams:
    """The warpers of a draft law: the target's, at a temperature of its own.

    Args:
        sampling: of the sequence.
        draft_temperature: factor on its temperature.
    """
    return replace(sampling, temperature=sampling.temperature * draft_temperature)


def node_scores(
    logits: Tensor,
    draft_vocab: Tensor | None,
    sampling: SamplingParams,
    kind: Proposal,
    position: int,
    sharpness: float,
) -> Tensor:
    """Log-score of every draft token as a child, for deterministic and coupled proposals.

    Args:
        logits: (F, Vd) of nodes at one depth.
        draft_vocab: (Vd,) absolute ids, or None for the whole vocabulary.
        sampling: its temperature scales the draft law, its warpers say what the target is likely to
            drop, its seed is that of the noise.
        kind: ONE_HOT scores by log q; COUPLED by how likely log q + noise is to be the target's
            argmax too.
        position: absolute position the children would take.
        sharpness: s of softmax((log q + g) / s); models the error of the head's log-ratios.

    Returns:
        (F, Vd) log-scores, at most 0.
    """
    scaled = logits.float() / (sampling.temperature or 1.0)
    log_q = scaled.log_softmax(-1)
    if kind is Proposal.COUPLED and sampling.temperature > 0:
        ids = (
            draft_vocab
            if draft_vocab is not None
            else torch.arange(logits.shape[-1], device=logits.device)
        )
        noise = gumbel_at(sampling.seed, position, ids)  # (Vd,), the target's own
        dropped = torch.isneginf(warp(logits, sampling))
        scores = log_q.double() + noise - OUTSIDE * dropped
        return (scores / sharpness).log_softmax(-1).float()
    return log_q


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
        self.kind = proposal_kind(rule, state.sampling, options.draws)
        self.law = draft_law(state.sampling, options.draft_temperature or 1.0)
        self.root, self.depth = len(state.tokens) - 1, min(options.depth, state.max_depth)
        self.level_start, self.levels = 0, 0
        self.laws: dict[int, Tensor] = {}
        self.drawn: list[int] = []

    @property
    def draws(self) -> bool:
        """Whether there are drawn candidates, which must not be dropped."""
        return self.kind in (Proposal.DENSE, Proposal.MIXED)

    def frontier(self) -> Tensor:
        """Nodes of the newest level to expand: the best few by path probability."""
        width = self.options.top_k
        if self.draws:
            width = min(width, -(-self.share() // 2))  # two children each, where there are many
        return best_frontier(self.candidates, self.level_start, width)

    def share(self) -> int:
        """Tokens to draw in the next level: an even part of what is left of ``size``."""
        left = self.options.size - len(self.candidates.tokens)
        return -(-left // (self.depth - self.levels))

    def add_children(self, frontier: Tensor, logits: Tensor) -> None:
        """Children of each frontier node from its logits (F, Vd)."""
        if not self.depth:
            return
        self.level_start = len(self.candidates.tokens)
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
            tree, kept = rerank(self.candidates, self.options.size - 1, self.kind)
            return tree, kept.tolist()
        return self._drawn_tree(), list(range(len(self.candidates.tokens)))

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

    def _ids(self, columns: Tensor) -> Tensor:
        """Absolute ids of draft columns, of any shape."""
        return columns if self.draft_vocab is None else self.draft_vocab[columns]

    def _take_children(self, frontier: Tensor, logits: Tensor) -> None:
        """The best ``top_k`` by score; what is too much falls out at the end."""
        position = self.root + self.levels + 1
        scores = node_scores(
            logits, self.draft_vocab, self.law, self.kind, position, self.options.sharpness
        )
        best = scores.topk(min(self.options.top_k, scores.shape[-1]))
        self.candidates = expand(self.candidates, frontier, self._ids(best.indices), best.values)

    def _draw_children(self, frontier: Tensor, logits: Tensor) -> None:
        """Draw from the warped draft law; each node has noise of its own.

        How many a node gets is known before its first is drawn: the level's share is spread evenly,
        and the best nodes take what does not divide.
        """
        laws = probabilities(logits, self.law)  # (F, Vd)
        even, rest = divmod(self.share(), len(frontier))
        for place, (node, law) in enumerate(zip(frontier.tolist(), laws, strict=True)):
            count = min(even + (place < rest), self.options.top_k)
            if count == 0:
                continue
            chosen, drawn_from = self._choose(node, law, count)
            first = len(self.candidates.tokens)
            parent = torch.tensor([node], device=logits.device)
            self.candidates = expand(
                self.candidates, parent, self._ids(chosen)[None], law[chosen].log()[None]
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
