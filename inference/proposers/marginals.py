"""Trees out of heads whose rows of one pass do not know each other's tokens.

Legend: K depths of one pass, Vd draft vocabulary, V target vocabulary.
"""

from dataclasses import replace

import torch
from torch import Tensor

from inference.proposers.base import RowState
from inference.proposers.growth import Growth, needed, new_tree
from inference.proposers.options import TreeOptions
from inference.shapes.static_tree import best_first
from inference.tree import Proposal, TokenTree


def grow_marginals(
    options: TreeOptions,
    state: RowState,
    rule: str,
    rows: Tensor,
    acceptance: Tensor | None,
    vocab_size: int,
    draft_vocab: Tensor | None = None,
) -> TokenTree:
    """A tree out of laws that do not depend on the path, all from one pass.

    Without a shape it holds the best paths of all (DDTree, arXiv:2604.12989), over the ``top_k``
    best tokens of each depth. Nothing is drawn unless ``draws`` asks for it: tokens drawn at
    different depths do not fit together, the likeliest ones more often do. Drawn ones are verified
    against the laws that they came from all the same.

    Args:
        options: of the tree.
        state: the sequence.
        rule: of acceptance.
        rows: (K, Vd) draft logits; a tree is at most this deep.
        acceptance: (K,) calibrated chance that the draft of each depth is accepted if those before
            it are, or None without a confidence head.
        vocab_size: V.
        draft_vocab: (Vd,) absolute ids of the columns, or None for all.
    """
    options = replace(options, draws=options.draws or "none")
    state = replace(state, max_depth=min(state.max_depth, len(rows)))
    tree = new_tree(options, state, rule, rows.device, vocab_size, draft_vocab)
    if options.shape is None and not tree.draws:
        return _best_paths(tree, state, rows, acceptance)
    frontier = torch.zeros(1, dtype=torch.int64, device=rows.device)
    for level in range(tree.depth):
        chances = None if acceptance is None else acceptance[level].expand(len(frontier))
        tree.add_children(frontier, rows[level].expand(len(frontier), -1), chances)
        frontier = tree.frontier()
    return tree.finish()[0]


def _best_paths(
    tree: Growth, state: RowState, rows: Tensor, acceptance: Tensor | None
) -> TokenTree:
    """The tree of the best paths over K laws; no candidates are made."""
    options, depth = tree.options, tree.depth
    survival = None if acceptance is None else acceptance.cpu().cumprod(0)  # (K,)
    if options.min_survival > 0.0:
        depth = min(depth, int((needed(survival) >= options.min_survival).cumprod(0).sum()))
    root = torch.tensor(state.tokens[-1:], device=rows.device)
    if depth == 0:
        return TokenTree.chain(root, tree.kind)
    scores = torch.stack([tree.scores(rows[level : level + 1], level)[0] for level in range(depth)])
    best = scores.topk(min(options.top_k, scores.shape[-1]))
    shape = best_first(best.values, options.size - 1)
    depths, ranks = shape.depths[1:].to(rows.device), shape.ranks[1:].to(rows.device)
    tokens = tree.ids(best.indices[depths - 1, ranks])
    tokens, parents = torch.cat([root, tokens]), shape.parents.to(rows.device)
    log_q = None
    if tree.kind is Proposal.ONE_HOT:
        log_q = torch.cat([best.values.new_zeros(1), best.values[depths - 1, ranks]])
    if survival is not None:
        survival = torch.cat([torch.ones(1).to(survival), survival])[shape.depths]
    return TokenTree(tokens, parents, tree.kind, survival=survival, log_q=log_q)
