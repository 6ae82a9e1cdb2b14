"""Hypotheses about a head's settings: what config.json says, or what a trainer takes for granted.

Order matters as in ``recipes.diagnosis.hypotheses``.

Legend: K heads.
"""

from collections.abc import Iterator
from typing import Any

from drafters import Drafter, TargetModel
from drafters.block import DFlashDrafter
from drafters.config import DecoderConfig
from drafters.loading import layer_shape
from drafters.medusa import MedusaDrafter
from drafters.peagle import PEagleDrafter
from drafters.rope import extension_problems
from recipes.diagnosis import switches
from recipes.diagnosis.hypothetical import Hypothesis
from recipes.diagnosis.repairs import likely_mask

THETAS = (1e4, 1e5, 5e5, 1e6)
"""Rotary bases of released models."""
BLOCK_SIZES = (4, 5, 7, 8, 10, 16)
"""Lengths of blocks that trainers take."""
MASK_TOKENS = 16
"""Special tokens tried."""


def settings(head: Drafter) -> Iterator[Hypothesis]:
    """All that apply to a head, in order."""
    yield from _mask_tokens(head)
    yield from _blocks(head)
    yield from _rope(head)
    yield from _joining(head)
    yield Hypothesis(
        "window",
        "attention had no window in training",
        "set sliding_window to null",
        change=switches.without_window,
    )
    yield Hypothesis(
        "embedding",
        "the embedding in the file is not the trained one: the target's in its place drafts better",
        "export embed_tokens from the trained checkpoint, or set own_embedding to false",
        change=switches.target_embedding,
    )
    yield from _order(head)


def _blocks(head: Drafter) -> Iterator[Hypothesis]:
    if not isinstance(head, DFlashDrafter):
        return
    yield from _causality(head)
    anchored = head.first_slot == 0
    yield Hypothesis(
        "anchor",
        "the root's own row drafted in training (shifted prediction, as DSpark's)"
        if not anchored
        else "rows drafted in place in training, the root's none (as DFlash's do)",
        f"set sample_from_anchor to {str(not anchored).lower()}"
        + ("" if head.family == "dspark" else " (a DSpark head with markov_rank 0)"),
        change=switches.other_anchor,
        alone=True,
    )
    size = head.config.block_size
    for other in dict.fromkeys((*BLOCK_SIZES, size + 1, size - 1)):
        yield Hypothesis(
            "block size",
            f"block_size is {size}, in training it was near {other}",
            f"set block_size to {other}",
            change=switches.with_block_size(other),
        )
    yield Hypothesis(
        "tensors",
        "markov_w1 and markov_w2 are in each other's place",
        "swap them",
        change=switches.swapped_markov,
    )
    yield Hypothesis(
        "tensors",
        "without its Markov head it drafts better: that is not the trained one",
        "export markov_head from the trained checkpoint",
        change=switches.without_markov,
    )


def _causality(head: DFlashDrafter) -> Iterator[Hypothesis]:
    """Blocks causal in all layers, in none, or where the window is."""
    sliding = [layer for layer, window in enumerate(head.windows) if window is not None]
    ways: list[tuple[str, str, bool, list[int] | None]] = [
        ("saw the whole block", "is_causal (causal) to false", False, None),
        ("saw only earlier rows of their block", "is_causal (causal) to true", True, None),
    ]
    if 0 < len(sliding) < len(head.windows):
        what = "saw only earlier rows of their block in layers with a window"
        ways.append((what, "is_causal to null", False, sliding))
    for what, how, causal, layers in ways:
        yield Hypothesis(
            "causality",
            f"in training rows {what}",
            f"set {how}",
            change=switches.with_causality(causal, layers),
            subtle=True,
        )


def _mask_tokens(head: Drafter) -> Iterator[Hypothesis]:
    own = isinstance(head, PEagleDrafter) and head.embed_tokens is not None
    if not own and not isinstance(head, DFlashDrafter):
        return
    target, stored = head.target, head.config.mask_token_id
    candidates = sorted(target.tokenizer.all_special_ids)[:MASK_TOKENS]
    for token in dict.fromkeys((likely_mask(target), *candidates)):
        if token != stored and 0 <= token < target.vocab_size:
            yield Hypothesis(
                "mask token",
                f"mask_token_id is {stored}, in training it was {token}",
                f"set mask_token_id to {token}",
                change=switches.with_mask_token(token),
                depth=int(own),
                subtle=True,
            )


def _rope(head: Drafter) -> Iterator[Hypothesis]:
    config = head.config
    if not isinstance(config, DecoderConfig) or not config.num_layers:
        return
    theirs = layer_shape(head.target)["rope_theta"]
    for theta in dict.fromkeys((theirs, *THETAS)):
        if theta != config.rope_theta:
            yield Hypothesis(
                "rope",
                f"rope_theta is {config.rope_theta:g}, in training it was near {theta:g}",
                f"set rope_theta to {theta:g} (the target's is {theirs:g})",
                change=switches.with_theta(theta),
                subtle=theta == theirs,
            )
    stretched = target_extension(head.target)
    ways = {"plain": None} | ({"stretched as the target's": stretched} if stretched else {})
    for what, extension in ways.items():
        if extension != config.rope_extension:
            yield Hypothesis(
                "rope",
                f"RoPE was {what} in training",
                f"set rope_extension (rope_scaling) to {extension or 'null'}",
                change=switches.with_extension(extension),
                subtle=True,
            )


def target_extension(target: TargetModel) -> dict[str, Any] | None:
    """What stretches the target's own RoPE, where heads can have it."""
    rope = getattr(target.config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    extension = {key: value for key, value in rope.items() if key not in ("rope_theta", "type")}
    return None if extension_problems(extension) else extension


def _joining(head: Drafter) -> Iterator[Hypothesis]:
    """Of Hydra."""
    yield Hypothesis(
        "concat",
        "hidden state and embeddings are joined in the other order than in training",
        "put the columns of the hidden state first, in the first block of every head",
        change=switches.hidden_last,
    )
    yield Hypothesis(
        "concat",
        "embeddings are joined latest first in training",
        "put the columns of earlier tokens first, in the first block of every head",
        change=switches.tokens_reversed,
        depth=1,
    )
    yield Hypothesis(
        "tensors",
        "skip (res_connection) and linear are in each other's place",
        "swap them",
        change=switches.swapped_skips,
    )
    yield Hypothesis(
        "norm",
        "the prefix layer's output was normed in training and is not, or the other way round",
        "set prefix_norm as in training and export its tensor",
        change=switches.other_prefix_norm,
    )


def _order(head: Drafter) -> Iterator[Hypothesis]:
    """Of Medusa's heads."""
    if not isinstance(head, MedusaDrafter):
        return
    places = list(range(head.config.num_heads))
    orders = (
        ("the heads are one place too late", [*places[1:], places[0]]),
        ("the heads are one place too early", [places[-1], *places[:-1]]),
        ("the heads are in reverse", places[::-1]),
    )
    seen: list[list[int]] = [places]
    for message, order in orders:
        if order not in seen:
            seen.append(order)
            yield Hypothesis(
                "order",
                message,
                "number them by the token they draft, the next one first",
                change=switches.heads_in_order(order),
                everywhere=True,
            )
