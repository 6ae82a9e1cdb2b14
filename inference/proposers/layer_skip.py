"""Drafts from some of the target's own layers: self-speculation by layer skipping.

The first E layers (LayerSkip, arXiv:2404.16710), or any subset (Draft & Verify, arXiv:2309.08168;
SWIFT, arXiv:2410.06916), with the target's own final norm and output matrix. No second model, no
training, and no second cache: keys and values of layers below E are the target's own. They are
computed while drafting, once per node, and verification goes on at layer E.

E is the first layer that is skipped. A subset may hold layers above E; what those computed belongs
to a shortened model and is taken back before verification.

Legend: B sequences still running, N nodes of the largest tree, M rows run, D hidden, L layers.
"""

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from drafters import TargetModel
from inference.proposers.base import Proposer, Resume, RowState, Session
from inference.proposers.growth import Growth
from inference.proposers.levels import Branches, expand_nodes, run_nodes
from inference.proposers.options import TreeOptions
from inference.tree import TokenTree


class LayerSkipProposer(Proposer):
    """Grows trees with a part of the target, all sequences together, one partial forward per level.

    Give either ``exit_layer`` or ``layers``.

    Args:
        exit_layer: E, between 1 and L-1: draft with layers 0..E-1.
        layers: indices of the layers to draft with, in order.
        width: nodes expanded per level and children per node; 1 drafts chains.
        depth: longest drafted path.
        size: nodes the target verifies per round, root included; None is ``1 + width * depth``.
        draft_temperature: as in `TreeOptions`, as is the next.
        draws: under ``rejection``.

    Raises:
        ValueError: naming the argument.
    """

    def __init__(
        self,
        exit_layer: int | None = None,
        layers: Sequence[int] | None = None,
        width: int = 1,
        depth: int = 3,
        size: int | None = None,
        draft_temperature: float | None = None,
        draws: str = "all",
    ) -> None:
        if (exit_layer is None) == (layers is None):
            raise ValueError("layer skip: give either exit_layer or layers")
        if exit_layer is not None and exit_layer < 1:
            raise ValueError(f"layer skip: exit_layer must be at least 1, got {exit_layer}")
        run = list(range(exit_layer)) if exit_layer is not None else list(layers or ())
        if not run or run[0] < 0 or sorted(set(run)) != run:
            raise ValueError(
                f"layer skip: layers must be different indices from 0, in order; got {run}"
            )
        self.layers = tuple(run)
        self.first_skipped = next(i for i, layer in enumerate([*run, -1]) if i != layer)
        self.options = TreeOptions(
            size=1 + width * depth if size is None else size,
            depth=depth,
            top_k=width,
            draft_temperature=draft_temperature,
            draws=draws,
        )
        self._splits: weakref.WeakSet[TargetModel] = weakref.WeakSet()
        self._session: Session | None = None
        self._resume: Resume | None = None

    @property
    def chains(self) -> bool:
        """Whether no node has a second child."""
        return self.options.top_k == 1

    def start(self, session: Session) -> None:
        """Check that the target can be cut here.

        Raises:
            ValueError: the target has not these layers, or they cannot be run apart.
        """
        target = session.target
        if self.layers[-1] >= target.num_layers or len(self.layers) == target.num_layers:
            raise ValueError(
                f"layer skip: layers {list(self.layers)} of a target of {target.num_layers} "
                f"layers; some of 0..{target.num_layers - 1} are needed, and at least one must be "
                f"skipped (exit_layer between 1 and {target.num_layers - 1})"
            )
        if target not in self._splits:
            check_split(target, self.first_skipped)
            self._splits.add(target)
        self._session, self._resume = session, None

    def finish(self, row: int, tokens: list[int]) -> None:
        """Let go of the target's cache with the last sequence."""
        if self._session is not None and not self._session.live:
            self._session = self._resume = None

    def resume(self) -> Resume | None:
        """Layers below the first skipped one have run on all nodes; None if that is layer 0."""
        return self._resume

    @torch.no_grad()
    def propose(self, states: Sequence[RowState | None]) -> list[TokenTree | None]:
        """Grow, run the leaves through the shared layers, leave the cache to verification."""
        session = self._session
        assert session is not None, "propose() before start()"
        trees = []
        for row in session.live:
            state = states[row]
            assert state is not None, "a sequence that has ended is still in the target's cache"
            device, vocab_size = session.target.device, session.target.vocab_size
            trees.append(Branches(Growth(self.options, state, session.rule, device, vocab_size)))
        entering = self._grow(session, trees)
        finished = [tree.growth.finish() for tree in trees]
        if self.first_skipped:
            kept = [nodes for _, nodes in finished]
            entering += self._run_leaves(session, trees, kept)
            rows = [[tree.rows[n] for n in nodes] for tree, nodes in zip(trees, kept, strict=True)]
            session.cache.arrange(rows, below=self.first_skipped)
            self._resume = Resume(self.first_skipped, gather_rows(torch.cat(entering, dim=1), rows))
        session.cache.revert(first_layer=self.first_skipped)
        found: list[TokenTree | None] = [None] * len(states)
        for row, (tree, _) in zip(session.live, finished, strict=True):
            found[row] = tree
        return found

    def _grow(self, session: Session, trees: Sequence[Branches]) -> list[Tensor]:
        """Level by level from the roots, which are nodes like others: their logits are not known.

        Returns:
            Per level (B, F, D), what enters the first layer that is skipped.
        """
        entering = []
        nodes = [torch.zeros(1, dtype=torch.int64) for _ in trees]
        while any(map(len, nodes)):
            with session.timer.phase("draft"):
                out = run_nodes(
                    session.engine,
                    session.cache,
                    trees,
                    nodes,
                    run_layers=self.layers,
                    feature_layers=(self.first_skipped,),
                )
            assert out.features is not None
            entering.append(out.features)
            expand_nodes(trees, nodes, out.logits)
            nodes = [tree.frontier() for tree in trees]
        return entering

    def _run_leaves(
        self, session: Session, trees: Sequence[Branches], kept: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        """Run the nodes to verify that were not expanded through the shared layers.

        Returns:
            (B, F, D) entering the first layer that is skipped; nothing if there are none.
        """
        leaves = [tree.not_run(nodes) for tree, nodes in zip(trees, kept, strict=True)]
        if not any(map(len, leaves)):
            return []
        with session.timer.phase("draft"):
            out = run_nodes(
                session.engine,
                session.cache,
                trees,
                leaves,
                run_layers=range(self.first_skipped),
                feature_layers=(self.first_skipped,),
                logits_to_keep=1,  # nobody asks for them
            )
        assert out.features is not None
        return [out.features]


def gather_rows(hidden: Tensor, rows: Sequence[Sequence[int]]) -> Tensor:
    """Chosen rows of every sequence, padded with zeros.

    Args:
        hidden: (B, M, D).
        rows: B lists of up to N indices below M.

    Returns:
        (B, N, D).
    """
    out = hidden.new_zeros(len(rows), max(map(len, rows)), hidden.shape[-1])
    for sequence, some in enumerate(rows):
        out[sequence, : len(some)] = hidden[sequence, torch.tensor(some, device=hidden.device)]
    return out


def check_split(target: TargetModel, first: int) -> None:
    """Layers below one and then the rest must compute what the whole target does.

    They do not where layers exchange more than the residual stream.

    Args:
        target: the model.
        first: the first layer of the second part; 0 has nothing to check.

    Raises:
        ValueError: naming the target.
    """
    if first == 0:
        return
    ids = torch.arange(1, 5, device=target.device)[None] % target.vocab_size
    whole = target.forward(ids).logits
    lower = target.forward(ids, run_layers=range(first), feature_layers=(first,))
    upper = target.forward(
        ids, run_layers=range(first, target.num_layers), entering=lower.features
    ).logits
    error, scale = (whole - upper).abs().max().item(), whole.abs().max().item()
    if not error <= 1e-3 * max(scale, 1.0):
        raise ValueError(
            f"layer skip: target {target.name!r} ({target.model.config.model_type!r}) cannot be "
            f"split at layer {first}: its logits change by {error:.3g}, so later layers need more "
            "of the earlier ones than their output; use another proposer"
        )
