"""Rejection sampling over the trees of a batch (`inference.verify`, rule "rejection").

One step per depth, and in it one per child of a node. Coins and residuals are those of
`inference.rules.acceptance`; the token behind the last accepted one is drawn once, at the end.

Legend: B sequences, N nodes, D depth, V vocabulary, Vd draft vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from inference.sampling import Stream
from inference.static.laws import Warpers, draw, law
from inference.static.noise import uniform_at
from inference.static.tree import DraftTree, Walk, take


class _Node(NamedTuple):
    """Where the walk is.

    Attributes:
        owed: (B, V) law that the target still owes there.
        left: (B, V) what is left of the draft law; None where nothing is drawn.
        child: (B,) the accepted one, or 0.
        sound: (B,) whether all drawn children had a probability.
    """

    owed: Tensor
    left: Tensor | None
    child: Tensor
    sound: Tensor


def reject(
    tree: DraftTree,
    logits: Tensor,
    warpers: Warpers,
    seeds: Tensor,
    positions: Tensor,
    depth: int,
    children: int,
    draft_vocab: Tensor | None = None,
) -> Walk:
    """Accept or reject each child in turn; a leaf, or all rejected, draws from what is left.

    Args:
        tree: drafts, drawn or chosen.
        logits: (B, N, V) of the target.
        warpers: of its law.
        seeds: (B,) int64 of the noise.
        positions: (B,) int64 of the roots.
        depth: D.
        children: most children of a node.
        draft_vocab: (Vd,) ids of the columns of ``draft_probs``, or None.
    """
    node = count = torch.zeros_like(positions)
    going = torch.ones_like(node, dtype=torch.bool)
    final: Tensor | None = None
    path, sound = [node], []
    for step in range(depth + 1):
        probs = law(take(logits, node), warpers)
        state = _Node(probs, _draft_law(tree, node, probs, draft_vocab), node * 0, going | True)
        if step < depth:
            is_child = tree.parents == node[:, None]
            number = is_child.cumsum(1) - 1
            for rank in range(children):
                here = is_child & (number == rank)
                coin = uniform_at(seeds, Stream.ACCEPT, positions + 1 + step, node * 0 + rank)
                state = _try_child(tree, state, here, going, coin)
        sound.append(state.sound & (probs.amax(1) > 0))
        stops = going & (state.child == 0)
        final = probs if final is None else final
        final = torch.where(stops[:, None], state.owed, final)
        going = going & (state.child > 0)
        node = torch.where(going, state.child, node)
        count = count + going
        path.append(node)
    assert final is not None
    token, lawful = draw(final, seeds, positions + 1 + count, Stream.RESIDUAL)
    place = torch.arange(depth + 1, device=count.device)
    lawful = lawful[:, None] | (place != count[:, None])
    return Walk(torch.stack(path[:-1], 1), count, token, torch.stack(sound, 1) & lawful)


def _draft_law(
    tree: DraftTree, node: Tensor, probs: Tensor, draft_vocab: Tensor | None
) -> Tensor | None:
    """(B, V) the recorded law of each node's drawn children, over the target's vocabulary."""
    if tree.draft_probs is None:
        return None
    own = take(tree.draft_probs, node).to(probs.dtype)
    if draft_vocab is not None:
        return torch.zeros_like(probs).index_copy(1, draft_vocab, own)
    return torch.nn.functional.pad(own, (0, probs.shape[1] - own.shape[1]))


def _try_child(tree: DraftTree, state: _Node, here: Tensor, going: Tensor, coin: Tensor) -> _Node:
    """Accept or reject one child of every sequence that has one.

    Args:
        tree: the drafts.
        state: of the node.
        here: (B, N) the child; nothing where there is none.
        going: (B,) whether the walk has come to this node.
        coin: (B,) in (0, 1).
    """
    asked = here.any(1) & going & (state.child == 0)
    child = here.to(torch.uint8).argmax(1)
    token = take(tree.tokens, child)[:, None]
    proposed = torch.zeros_like(state.owed).scatter(1, token, 1.0)
    left, sound = state.left, state.sound
    if left is not None:
        drawn = asked if tree.drawn is None else take(tree.drawn, child)
        share = left / left.sum(1, keepdim=True)
        proposed = torch.where(drawn[:, None], share, proposed)
        left = torch.where((asked & drawn)[:, None], left.scatter(1, token, 0.0), left)
    mass = proposed.gather(1, token)[:, 0].double()
    sound = sound & (~asked | (mass > 0))
    ratio = state.owed.gather(1, token)[:, 0].double() / mass
    taken = asked & (coin < ratio.clamp_max(1.0))
    rest = (state.owed - proposed).clamp_min(0.0)
    total = rest.sum(1, keepdim=True)
    rest = torch.where(total > 0, rest / total, state.owed)
    owed = torch.where((asked & ~taken)[:, None], rest, state.owed)
    return _Node(owed, left, torch.where(taken, child, state.child), sound)
