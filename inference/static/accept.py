"""What a round emits, for a whole batch, without a look by the host.

The twin of `inference.verify` and of the end of a text in `inference.decoding.Text`. Greedy texts
need no walk: the largest logit of every node says at once which nodes are accepted if their parents
are, and pointer doubling joins these links to paths. Otherwise the walk takes as many steps as a
tree can be deep, in all sequences, whether they still go on or not.

What cannot be raised here is reported in `Acceptance.ended`.

Legend: B sequences, N nodes, D depth, V vocabulary, E end tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from inference.static.laws import Warpers, draw, first_argmax, is_law, law
from inference.static.reject import reject
from inference.static.tree import DraftTree, Walk, take
from inference.static.words import follow, passes

RUNNING, EOS, LENGTH, BROKEN = range(4)
"""How a text stands after a round: it goes on; it ended with an end token; it is as long as it may
be; or it has no next token, as the target's logits hold NaN or nothing but -inf, or a draft was not
drawn from the law that was recorded for it. `check_ended` raises for the last."""

STATIC_RULES = ("match", "coupled", "rejection")
"""Rules that are offered here."""


class Noise(NamedTuple):
    """What keys the noise of a round.

    Attributes:
        seeds: (B,) int64, as `inference.static.noise.seed_words` gives them.
        positions: (B,) int64 absolute positions of the roots.
    """

    seeds: Tensor
    positions: Tensor


class Ends(NamedTuple):
    """What ends a text here; stop strings and criteria are the host's.

    Attributes:
        tokens: (E,) int64 ids that end a text and stay in it; may be empty.
        remaining: (B,) int64 tokens that each text has room for. A sequence without room has ended:
            it emits nothing.
    """

    tokens: Tensor
    remaining: Tensor


class Acceptance(NamedTuple):
    """What a round emits.

    Attributes:
        path: (B, D + 1) accepted nodes, the root first; behind the last it is repeated.
        accepted: (B,) how many draft tokens are, those behind the end of the text not counted.
        next_token: (B,) the recovered or bonus token; -1 if the text ended before it.
        emitted: (B,) tokens that the text grows by.
        ended: (B,) one of RUNNING, EOS, LENGTH, BROKEN.
        packed: (B, D + 3) all that the host needs in one copy: `accepted`, `ended`, and the emitted
            tokens with -1 behind them.
    """

    path: Tensor
    accepted: Tensor
    next_token: Tensor
    emitted: Tensor
    ended: Tensor
    packed: Tensor


def check_ended(ended: int) -> None:
    """Raise what the device could not.

    Raises:
        ValueError: the round found no token to emit.
    """
    if ended == BROKEN:
        raise ValueError(
            "no next token: the target's logits are all -inf or some are NaN, or a draft has "
            "probability zero in the law recorded for it; check the model's logits, and decode "
            "without static shapes to see where"
        )


def accept(
    tree: DraftTree,
    logits: Tensor,
    warpers: Warpers,
    noise: Noise,
    ends: Ends,
    *,
    rule: str,
    depth: int,
    children: int,
    draft_vocab: Tensor | None = None,
) -> Acceptance:
    """Decide what a round emits.

    Args:
        tree: the drafts.
        logits: (B, N, V) of the target at every node; what padding has does not matter.
        warpers: of the target's law.
        noise: seeds and positions.
        ends: of the texts.
        rule: one of `STATIC_RULES`; "match" and "coupled" are the same walk.
        depth: D, at least that of the deepest node.
        children: at least as many as any node has; matters to "rejection" only.
        draft_vocab: (Vd,) absolute ids of the columns of ``draft_probs``, or None for the first Vd.

    Raises:
        ValueError: another rule, or drawn drafts under a rule that does not know them.
    """
    if rule not in STATIC_RULES:
        raise ValueError(
            f"rule must be one of {', '.join(STATIC_RULES)} with static shapes; got {rule!r}"
        )
    if tree.draft_probs is not None and rule != "rejection":
        raise ValueError(f"rule {rule!r} does not fit drawn drafts; use 'rejection'")
    if warpers.greedy and tree.draft_probs is None:
        walk = _greedy(tree, logits, depth)
    elif rule == "rejection":
        walk = reject(tree, logits, warpers, *noise, depth, children, draft_vocab)
    else:
        walk = _match(tree, logits, warpers, noise, depth)
    return _emit(tree, walk, ends)


def _greedy(tree: DraftTree, logits: Tensor, depth: int) -> Walk:
    """Follow the largest logit of every node."""
    largest, best = first_argmax(logits)  # (B, N)
    matches = tree.tokens == follow(best, tree.parents, -1)  # -1 at padding, too
    root = torch.arange(tree.tokens.shape[1], device=best.device) == 0
    accepted = matches | root
    depths = (tree.parents >= 0).to(torch.int64)
    pointers = tree.parents
    for _ in range(passes(depth)):
        accepted = accepted & follow(accepted, pointers, True)
        depths = depths + follow(depths, pointers, 0)
        pointers = follow(pointers, pointers, -1)
    # Siblings hold different tokens, so there is one accepted node at most of every depth.
    nodes = torch.arange(accepted.shape[1], device=best.device).expand_as(depths)
    beside = torch.where(accepted, depths, depth + 1)  # the last column is thrown away
    path = best.new_zeros(len(best), depth + 2).scatter(1, beside, nodes)[:, : depth + 1]
    count = accepted.sum(1) - 1
    last = path.gather(1, count[:, None])
    path = torch.where(torch.arange(depth + 1, device=best.device) <= count[:, None], path, last)
    return Walk(path, count, best.gather(1, last)[:, 0], is_law(largest.gather(1, path)))


def _match(tree: DraftTree, logits: Tensor, warpers: Warpers, noise: Noise, depth: int) -> Walk:
    """Draw from the target and follow the child that matches."""
    node = torch.zeros_like(noise.positions)
    going = torch.ones_like(node, dtype=torch.bool)
    count, final = node, node
    path, sound = [node], []
    for step in range(depth + 1):
        token, lawful = draw(
            law(take(logits, node), warpers), noise.seeds, noise.positions + 1 + step
        )
        fits = (tree.parents == node[:, None]) & (tree.tokens == token[:, None])
        final = torch.where(going, token, final)
        sound.append(lawful)
        going = going & fits.any(1)
        node = torch.where(going, fits.to(torch.uint8).argmax(1), node)
        count = count + going
        path.append(node)
    return Walk(torch.stack(path[:-1], 1), count, final, torch.stack(sound, 1))


def _emit(tree: DraftTree, walk: Walk, ends: Ends) -> Acceptance:
    """Cut what is behind the end of the text, and pack."""
    path, count = walk.path, walk.accepted[:, None]
    most = path.shape[1]
    place = torch.arange(most, device=path.device).expand_as(path)
    drafted = tree.tokens.gather(1, torch.cat([path[:, 1:], path[:, -1:]], dim=1))
    tokens = torch.where(place < count, drafted, walk.next_token[:, None])  # up to place `count`
    stops = (tokens[..., None] == ends.tokens).any(-1)
    there = place <= count
    first_stop = torch.where(stops & there, place, most).amin(1)
    room = ends.remaining.clamp_min(0)
    emitted = torch.minimum(torch.minimum(first_stop, walk.accepted) + 1, room)
    ended = torch.where(emitted >= room, LENGTH, RUNNING)
    ended = torch.where(first_stop < emitted, EOS, ended)
    inside = place < emitted[:, None]
    ended = torch.where((inside & ~walk.sound).any(1), BROKEN, ended)
    kept = torch.minimum(walk.accepted, emitted)
    path = torch.where(place <= kept[:, None], path, path.gather(1, kept[:, None]))
    packed = torch.cat(
        [kept[:, None], ended[:, None], torch.where(inside, tokens, -1)],
        dim=1,
    )
    next_token = torch.where(emitted > walk.accepted, walk.next_token, -1)
    return Acceptance(path, kept, next_token, emitted, ended, packed)
