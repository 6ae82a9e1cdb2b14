"""The trees of a batch as tensors of one width: padding nodes are marked, not left out.

Legend: B sequences, N nodes (root included), D depth, Vd draft vocabulary, V target vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from inference.tree import Proposal, TokenTree


class DraftTree(NamedTuple):
    """What a round drafts, as `inference.tree.TokenTree` for each sequence.

    Node 0 is the root, parents come before their children, children of one node hold different
    tokens, and a node's children were proposed in the order of their numbers. Padding may lie
    anywhere behind the root; it has parent -1 and token 0.

    Attributes:
        tokens: (B, N) int64 absolute ids.
        parents: (B, N) int64, -1 for roots and padding.
        valid: (B, N) bool, false for padding.
        draft_probs: (B, N, Vd) only where tokens were drawn: row i is the law that the drawn
            children of node i came from, over the draft vocabulary.
        drawn: (B, N) bool, only where some were drawn and some chosen; None beside ``draft_probs``
            means that all were drawn.
        survival: (B, N) as in `TokenTree`; None without a confidence output.
    """

    tokens: Tensor
    parents: Tensor
    valid: Tensor
    draft_probs: Tensor | None = None
    drawn: Tensor | None = None
    survival: Tensor | None = None


class Walk(NamedTuple):
    """How far the target went down the trees, wherever a text ends.

    Attributes:
        path: (B, D + 1) accepted nodes, the root first; behind the last it is repeated.
        accepted: (B,) how many draft tokens are.
        next_token: (B,) the token behind the last of them.
        sound: (B, D + 1) whether a token could be found by the laws of each node on the path.
    """

    path: Tensor
    accepted: Tensor
    next_token: Tensor
    sound: Tensor


def take(rows: Tensor, places: Tensor) -> Tensor:
    """Rows (B, n, ...) at places (B,) -> (B, ...), or at places (B, m) -> (B, m, ...)."""
    sequences = torch.arange(len(rows), device=rows.device)
    return rows[sequences.reshape(-1, *[1] * (places.dim() - 1)), places]


def to_host(
    tree: DraftTree,
    row: int,
    proposal: Proposal,
    vocab_size: int,
    draft_vocab: Tensor | None = None,
) -> TokenTree:
    """The tree of one sequence without its padding; reads from the device.

    Args:
        tree: of the batch.
        row: sequence.
        proposal: how its children were chosen.
        vocab_size: V.
        draft_vocab: (Vd,) absolute ids of the columns of ``draft_probs``, or None for all.
    """
    kept = tree.valid[row].nonzero().squeeze(1)
    number = tree.valid[row].long().cumsum(0) - 1
    parents = tree.parents[row, kept]
    parents = torch.where(parents < 0, parents, number[parents.clamp_min(0)])
    probs = drawn = None
    if tree.draft_probs is not None:
        laws = tree.draft_probs[row, kept]
        probs = laws.new_zeros(len(kept), vocab_size)
        probs[:, slice(laws.shape[1]) if draft_vocab is None else draft_vocab] = laws
        drawn = None if tree.drawn is None else tree.drawn[row, kept]
    survival = None if tree.survival is None else tree.survival[row, kept]
    return TokenTree(tree.tokens[row, kept], parents, proposal, probs, drawn, survival)
