"""Trees out of trained heads: EAGLE-3's dynamic tree and Medusa's static one.

Legend: F frontier nodes, Vd draft vocabulary, V target vocabulary, K heads, D hidden.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from drafters import Drafter, Eagle3Drafter, MedusaDrafter
from inference.append import PREFILL_ROWS
from inference.proposers.base import Proposer, RowState, Session
from inference.proposers.draft_cache import DraftCache
from inference.proposers.growth import Growth, TreeOptions, draft_law, node_scores, proposal_kind
from inference.static_tree import StaticTree, optimal_static_tree, static_tree
from inference.timing import PhaseTimer
from inference.tree import Proposal, TokenTree


class Eagle3Proposer(Proposer):
    """EAGLE-2's dynamic tree (arXiv:2406.16858) over EAGLE-3's draft steps.

    Each level runs the best ``top_k`` nodes of the level before, every one of them proposes
    ``top_k`` children, and at the end the best ``size`` of all are kept; see ``growth.Growth`` for
    drawn trees.

    Args:
        drafter: attached head.
        options: of the tree.
    """

    def __init__(self, drafter: Eagle3Drafter, options: TreeOptions | None = None) -> None:
        self.drafter = drafter
        self.options = with_own_temperature(options or TreeOptions(), drafter)
        self._caches: dict[int, DraftCache] = {}
        self._rule, self._timer = "match", PhaseTimer()

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The layers the head fuses."""
        return self.drafter.feature_layers

    @property
    def chains(self) -> bool:
        """Whether no node has a second child."""
        return self.options.top_k == 1

    def start(self, session: Session) -> None:
        """One empty draft cache per sequence."""
        self._caches = {row: DraftCache() for row in range(session.batch_size)}
        self._rule, self._timer = session.rule, session.timer

    def finish(self, row: int, tokens: list[int]) -> None:
        """Free the draft cache of the sequence."""
        del self._caches[row]

    def propose(self, states: Sequence[RowState | None]) -> list[TokenTree | None]:
        """Absorb newly committed features and grow a tree for each sequence."""
        return [
            None if state is None else self._grow(self._caches[row], state)
            for row, state in enumerate(states)
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
            for first in range(0, last - start, PREFILL_ROWS):  # bounds the memory of masks
                part = slice(first, first + PREFILL_ROWS)
                feature = drafter.fuse(state.features[None, part].to(drafter.fc.weight.dtype))
                hidden, following = drafter(
                    feature, tokens[:, part], positions[:, part], cache.extend
                )
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

    def _grow(self, cache: DraftCache, state: RowState) -> TokenTree:
        logits, feature = self.absorb(cache, state)
        drafter, device = self.drafter, logits.device
        vocab_size = drafter.config.vocab_size
        tree = Growth(self.options, state, self._rule, device, vocab_size, drafter.draft_vocab)
        tree.add_children(torch.zeros(1, dtype=torch.int64, device=device), logits)
        root = len(state.tokens) - 1  # absolute position a
        rows = torch.full((1,), -1, device=device)  # draft row of each candidate; the root has none
        features = feature[:0]  # (draft rows, D)
        for level in range(1, tree.depth):
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
                len(features), len(features) + len(frontier), device=device
            )
            features = torch.cat((features, new))
            tree.add_children(frontier, logits)
        return tree.finish()[0]


class MedusaProposer(Proposer):
    """Medusa's static tree (arXiv:2401.10774): the shape is fixed, the tokens come from the heads.

    A node at depth d takes the rank of its place in the shape among head d-1's candidates. Under
    ``rejection`` and ``block`` the candidates stay deterministic, which those rules verify as
    one-hot proposals. With the shape of a chain this is blockwise parallel decoding
    (arXiv:1811.03115).

    Args:
        drafter: attached head.
        shape: tree shape; None takes the head's own, or a default of ``size`` nodes.
        size: nodes of the default shape, root included.
        draft_temperature: factor on the temperature of ``coupled`` drafts; None takes the head's
            own.
    """

    def __init__(
        self,
        drafter: MedusaDrafter,
        shape: StaticTree | None = None,
        size: int = 32,
        draft_temperature: float | None = None,
    ) -> None:
        self.drafter = drafter
        if shape is None and drafter.config.tree is not None:
            shape = static_tree([tuple(path) for path in drafter.config.tree])
        columns = drafter.config.draft_vocab_size or drafter.config.vocab_size
        self.shape = shape or default_medusa_tree(drafter.config.num_heads, size, columns)
        self.draft_temperature = draft_temperature or drafter.config.draft_temperature
        if int(self.shape.ranks.max()) >= columns:
            raise ValueError(
                f"the tree asks for candidate {int(self.shape.ranks.max())} of a head that ranks "
                f"only {columns} tokens (draft_vocab_size): give a narrower tree or a smaller size"
            )
        self._rule, self._timer = "match", PhaseTimer()

    @property
    def chains(self) -> bool:
        """Whether no node has a second child."""
        return len(self.shape.parents) == int(self.shape.depths.max()) + 1

    def start(self, session: Session) -> None:
        """Medusa keeps nothing between rounds."""
        self._rule, self._timer = session.rule, session.timer

    def propose(self, states: Sequence[RowState | None]) -> list[TokenTree | None]:
        """Fill the shape for each sequence."""
        return [None if state is None else self._fill(state) for state in states]

    @torch.no_grad()
    def _fill(self, state: RowState) -> TokenTree:
        kind = proposal_kind(self._rule, state.sampling)
        kind = Proposal.ONE_HOT if kind is Proposal.DENSE else kind
        law = draft_law(state.sampling, self.draft_temperature)
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
            scores = node_scores(row, drafter.draft_vocab, law, kind, position, 1.0)
            here = depths == head + 1
            best = scores[0].topk(int(ranks[here].max()) + 1).indices
            tokens[here] = drafter.to_target_ids(best).cpu()[ranks[here]]
        return TokenTree(tokens.to(device), parents.to(device), kind)


def with_own_temperature(options: TreeOptions, drafter: Drafter) -> TreeOptions:
    """The options, with the head's calibrated draft temperature where none is given."""
    if options.draft_temperature is not None:
        return options
    return replace(options, draft_temperature=drafter.config.draft_temperature)


def default_medusa_tree(num_heads: int, size: int, columns: int = 20) -> StaticTree:
    """The optimal shape for a generic profile: the best token of head k is right 0.5·0.8^k of the
    time, rank r a (r+1)^1.5-th of that. Fit one to your head's measured accuracies for more.

    Args:
        num_heads: K.
        size: nodes, root included; fewer where the heads cannot make as many.
        columns: tokens that a head ranks; at most 20 are used.
    """
    ranks = min(max(size - 1, 1), columns, 20)
    heads, rank = torch.arange(num_heads)[:, None], torch.arange(ranks)[None]
    most = sum(ranks**depth for depth in range(1, num_heads + 1))
    return optimal_static_tree(0.5 * 0.8**heads / (rank + 1.0) ** 1.5, min(size - 1, most))


def chain_shape(num_heads: int) -> StaticTree:
    """The best token of every head, one below the other."""
    return static_tree([(0,) * depth for depth in range(1, num_heads + 1)])


def build_proposer(drafter: Drafter, options: TreeOptions | None = None) -> Proposer:
    """The proposer of a head's family.

    Args:
        drafter: attached head.
        options: of the tree. An independent head's depth is its number of heads; of the others it
            uses ``size`` and ``draft_temperature``, and drafts a chain if ``top_k`` is 1.

    Raises:
        ValueError: no proposer for this family.
    """
    options = options or TreeOptions()
    if isinstance(drafter, Eagle3Drafter):
        return Eagle3Proposer(drafter, options)
    if isinstance(drafter, MedusaDrafter):
        shape = chain_shape(drafter.config.num_heads) if options.top_k == 1 else None
        return MedusaProposer(drafter, shape, options.size, options.draft_temperature)
    raise ValueError(f"no proposer for a head of family {drafter.family!r}")
