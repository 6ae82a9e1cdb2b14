"""Trees out of trained heads: EAGLE-3's dynamic tree and Medusa's static one.

The rule decides how children are chosen (see ``inference.verify``):

* ``match``, and every rule at temperature 0: the most likely tokens, deterministically;
* ``coupled``: the top of log q + the noise the target itself will draw with at that position;
* ``rejection`` at a temperature: drawn from q without replacement, and never dropped afterwards.

Legend: F frontier nodes, R children per node, Vd draft vocabulary, V target vocabulary, K heads.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from drafters import Drafter, Eagle3Drafter, MedusaDrafter
from inference.proposers.base import Proposer, RowState
from inference.proposers.draft_cache import DraftCache
from inference.sampling import SamplingParams, Stream, draw_top, gumbel, gumbel_at, probabilities
from inference.timing import PhaseTimer
from inference.tree import (
    Candidates,
    Proposal,
    StaticTree,
    TokenTree,
    best_frontier,
    expand,
    optimal_static_tree,
    rerank,
    static_tree,
)
from inference.verify import RULES


def proposal_kind(rule: str, sampling: SamplingParams) -> Proposal:
    """How a head with logits proposes under ``rule``.

    Raises:
        ValueError: unknown rule.
    """
    if rule not in RULES:
        raise ValueError(f"rule must be one of {', '.join(RULES)}; got {rule!r}")
    if rule == "coupled":
        return Proposal.COUPLED
    if rule == "rejection" and sampling.temperature > 0:
        return Proposal.DENSE
    return Proposal.ONE_HOT


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
        sampling: temperature scales the draft law as it does the target's.
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
        return ((log_q.double() + noise) / sharpness).log_softmax(-1).float()
    return log_q


class Eagle3Proposer:
    """EAGLE-2's dynamic tree (arXiv:2406.16858) over EAGLE-3's draft steps.

    Each level runs the best ``top_k`` nodes of the level before, every one of them proposes
    ``top_k`` children, and at the end the best ``size`` of all are kept. A drawn token may not be
    dropped, so drawn trees (``rejection``) share ``size`` out beforehand: evenly over the levels,
    and within a level over its nodes.

    Args:
        drafter: attached head.
        size: nodes the target verifies per round, root included.
        depth: longest drafted path.
        top_k: nodes expanded per level and children per node; 1 drafts a chain.
        sharpness: see :func:`node_scores`.
    """

    def __init__(
        self,
        drafter: Eagle3Drafter,
        size: int = 32,
        depth: int = 5,
        top_k: int = 8,
        sharpness: float = 0.8,
    ) -> None:
        if size < 2 or depth < 1 or top_k < 1:
            raise ValueError(
                f"draft tree: size >= 2, depth >= 1 and top_k >= 1 are needed, got {size}, "
                f"{depth}, {top_k}"
            )
        self.drafter = drafter
        self.size, self.depth, self.top_k, self.sharpness = size, depth, top_k, sharpness
        self._caches: list[DraftCache] = []
        self._timer = PhaseTimer()

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The layers the head fuses."""
        return self.drafter.feature_layers

    def start(self, batch_size: int, timer: PhaseTimer) -> None:
        """One empty draft cache per sequence."""
        self._caches = [DraftCache() for _ in range(batch_size)]
        self._timer = timer

    def propose(
        self, states: Sequence[RowState | None], sampling: SamplingParams, rule: str
    ) -> list[TokenTree | None]:
        """Absorb newly committed features and grow a tree for each sequence."""
        kind = proposal_kind(rule, sampling)
        return [
            None if state is None else self._grow(cache, state, sampling, kind)
            for cache, state in zip(self._caches, states, strict=True)
        ]

    @torch.no_grad()
    def absorb(self, cache: DraftCache, state: RowState) -> tuple[Tensor, Tensor]:
        """Step 0 on the newly committed positions.

        Returns:
            Logits (1, Vd) of the next token and the next feature (1, D), both from the last
            position.
        """
        assert state.features is not None
        start, last = cache.length, len(state.tokens) - 1
        assert len(state.features) == last - start, "features must cover exactly the new positions"
        device = state.features.device
        tokens = torch.tensor([state.tokens[start + 1 :]], device=device)
        positions = torch.arange(start, last, device=device)[None]
        drafter = self.drafter
        with self._timer.phase("draft"):
            feature = drafter.fuse(state.features[None].to(drafter.fc.weight.dtype))
            hidden, following = drafter(feature, tokens, positions, cache.extend)
            return drafter.logits(hidden[0, -1:]), following[0, -1:]

    @torch.no_grad()
    def step(
        self, cache: DraftCache, feature: Tensor, tokens: Tensor, parents: Tensor, position: int
    ) -> tuple[Tensor, Tensor]:
        """One draft step on nodes of the same depth.

        Args:
            cache: of the sequence.
            feature: (F, D) next feature of each node's parent.
            tokens: (F,) absolute ids of the nodes.
            parents: (F,) tree row of each parent, -1 for the root.
            position: rotary position.

        Returns:
            Logits (F, Vd) of each node's children and the next features (F, D).
        """
        positions = torch.full((1, len(tokens)), position, device=tokens.device)
        with self._timer.phase("draft"):
            hidden, following = self.drafter(
                feature[None], tokens[None], positions, cache.tree_step(parents)
            )
            return self.drafter.logits(hidden[0]), following[0]

    def _grow(
        self, cache: DraftCache, state: RowState, sampling: SamplingParams, kind: Proposal
    ) -> TokenTree:
        logits, feature = self.absorb(cache, state)
        depth = min(self.depth, state.max_depth)
        root = len(state.tokens) - 1  # absolute position a
        tree = _GrowingTree(self, state.tokens[-1], root, sampling, kind, depth, logits.device)
        tree.add_children(torch.zeros(1, dtype=torch.int64, device=logits.device), logits)
        rows = torch.full(
            (1,), -1, device=logits.device
        )  # tree row of each candidate node; the root has none
        features = feature[:0]  # (tree rows, D)
        for level in range(1, depth):
            frontier = tree.frontier()
            if not len(frontier):
                break
            above = rows[tree.candidates.parents[frontier]]
            inputs = (
                torch.where((above >= 0)[:, None], features[above], feature)
                if len(features)
                else feature
            )
            inputs = inputs.expand(len(frontier), -1)
            logits, new = self.step(
                cache, inputs, tree.candidates.tokens[frontier], above, root - 1 + level
            )
            rows = torch.cat((rows, rows.new_full((len(tree.candidates.tokens) - len(rows),), -1)))
            rows[frontier] = torch.arange(
                len(features), len(features) + len(frontier), device=rows.device
            )
            features = torch.cat((features, new))
            tree.add_children(frontier, logits)
        return tree.finish()


class _GrowingTree:
    """Candidates of one round and how they are chosen."""

    def __init__(
        self,
        options: Eagle3Proposer,
        token: int,
        root: int,
        sampling: SamplingParams,
        kind: Proposal,
        depth: int,
        device: torch.device,
    ) -> None:
        self.candidates = Candidates.root(token, device)
        self.options, self.drafter, self.sampling, self.kind = (
            options,
            options.drafter,
            sampling,
            kind,
        )
        self.root, self.depth = root, depth
        self.level_start, self.levels = 0, 0
        self.laws: dict[int, Tensor] = {}

    def frontier(self) -> Tensor:
        """Nodes of the newest level to expand: the best few by path probability."""
        width = self.options.top_k
        if self.kind is Proposal.DENSE:
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
        if self.kind is Proposal.DENSE:
            self._draw_children(frontier, logits)
        else:
            self._take_children(frontier, logits)
        self.levels += 1

    def _take_children(self, frontier: Tensor, logits: Tensor) -> None:
        """The best ``top_k`` by score; what is too much falls out at the end."""
        position = self.root + self.levels + 1
        scores = node_scores(
            logits,
            self.drafter.draft_vocab,
            self.sampling,
            self.kind,
            position,
            self.options.sharpness,
        )
        best = scores.topk(min(self.options.top_k, scores.shape[-1]))
        self.candidates = expand(
            self.candidates, frontier, self.drafter.to_target_ids(best.indices), best.values
        )

    def _draw_children(self, frontier: Tensor, logits: Tensor) -> None:
        """Draw without replacement from the warped draft law; each node has noise of its own.

        How many a node gets is known before its first is drawn: the level's share is spread evenly,
        and the best nodes take what does not divide.
        """
        laws = probabilities(logits, self.sampling)  # (F, Vd)
        even, rest = divmod(self.share(), len(frontier))
        for place, (node, law) in enumerate(zip(frontier.tolist(), laws, strict=True)):
            count = min(even + (place < rest), self.options.top_k)
            noise = gumbel(
                self.sampling.seed, (self.root << 20) + node, len(law), law.device, Stream.DRAFT
            )
            drawn = draw_top(law, noise, count)
            tokens = self.drafter.to_target_ids(drawn)[None]
            parent = torch.tensor([node], device=logits.device)
            self.candidates = expand(self.candidates, parent, tokens, law[drawn].log()[None])
            self.laws[node] = law

    def finish(self) -> TokenTree:
        """The tree to verify."""
        if self.kind is not Proposal.DENSE:
            return rerank(self.candidates, self.options.size - 1, self.kind)[0]
        vocab_size = self.drafter.config.vocab_size
        probs = torch.zeros(
            len(self.candidates.tokens), vocab_size, device=self.candidates.tokens.device
        )
        columns = self.drafter.draft_vocab
        for node, law in self.laws.items():
            if columns is None:
                probs[node] = law
            else:
                probs[node, columns] = law.to(probs.dtype)
        return TokenTree(self.candidates.tokens, self.candidates.parents, self.kind, probs)


class MedusaProposer:
    """Medusa's static tree (arXiv:2401.10774): the shape is fixed, the tokens come from the heads.

    A node at depth d takes the rank of its place in the shape among head d-1's candidates. Under
    ``rejection`` at a temperature the candidates stay deterministic, which the rule verifies as
    one-hot proposals.

    Args:
        drafter: attached head.
        shape: tree shape; None takes the head's own, or a default of ``size`` nodes.
        size: nodes of the default shape, root included.
    """

    def __init__(
        self, drafter: MedusaDrafter, shape: StaticTree | None = None, size: int = 32
    ) -> None:
        self.drafter = drafter
        if shape is None and drafter.config.tree is not None:
            shape = static_tree([tuple(path) for path in drafter.config.tree])
        self.shape = shape or default_medusa_tree(drafter.config.num_heads, size)
        self._timer = PhaseTimer()

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """None: the last hidden state is enough."""
        return ()

    def start(self, batch_size: int, timer: PhaseTimer) -> None:
        """Medusa keeps nothing between rounds."""
        self._timer = timer

    def propose(
        self, states: Sequence[RowState | None], sampling: SamplingParams, rule: str
    ) -> list[TokenTree | None]:
        """Fill the shape for each sequence."""
        kind = proposal_kind(rule, sampling)
        kind = Proposal.ONE_HOT if kind is Proposal.DENSE else kind
        return [None if state is None else self._fill(state, sampling, kind) for state in states]

    @torch.no_grad()
    def _fill(self, state: RowState, sampling: SamplingParams, kind: Proposal) -> TokenTree:
        shape, drafter = self.shape, self.drafter
        keep = shape.depths <= state.max_depth  # nodes are in order of depth, so this is a prefix
        parents, depths, ranks = shape.parents[keep], shape.depths[keep], shape.ranks[keep]
        device = state.hidden.device
        tokens = torch.full((len(parents),), state.tokens[-1], dtype=torch.int64)
        heads = int(depths.max())
        with self._timer.phase("draft"):
            dtype = next(drafter.blocks.parameters()).dtype
            rows = drafter(state.hidden[-1:].to(dtype)) if heads else None  # (K, 1, D)
            logits = (
                [drafter.logits(rows[head], head) for head in range(heads)]
                if rows is not None
                else []
            )
        for head, row in enumerate(logits):
            position = len(state.tokens) + head
            scores = node_scores(row, drafter.draft_vocab, sampling, kind, position, 1.0)
            here = depths == head + 1
            best = scores[0].topk(min(int(ranks[here].max()) + 1, scores.shape[-1])).indices
            tokens[here] = drafter.to_target_ids(best).cpu()[ranks[here]]
        return TokenTree(tokens.to(device), parents.to(device), kind)


def default_medusa_tree(num_heads: int, size: int) -> StaticTree:
    """The optimal shape for a generic profile: the best token of head k is right 0.5·0.8^k of the
    time, rank r a (r+1)^1.5-th of that. Fit one to your head's measured accuracies for more.
    """
    ranks = min(max(size - 1, 1), 20)
    heads, rank = torch.arange(num_heads)[:, None], torch.arange(ranks)[None]
    return optimal_static_tree(0.5 * 0.8**heads / (rank + 1.0) ** 1.5, min(size - 1, 1000))


def build_proposer(drafter: Drafter, size: int = 32, depth: int = 5, top_k: int = 8) -> Proposer:
    """The proposer of a head's family.

    Args:
        drafter: attached head.
        size: nodes verified per round, root included.
        depth: longest drafted path (sequential heads; an independent head's depth is its number of
            heads).
        top_k: branching (sequential heads).

    Raises:
        ValueError: no proposer for this family.
    """
    if isinstance(drafter, Eagle3Drafter):
        return Eagle3Proposer(drafter, size, depth, top_k)
    if isinstance(drafter, MedusaDrafter):
        return MedusaProposer(drafter, size=size)
    raise ValueError(f"no proposer for a head of family {drafter.family!r}")
