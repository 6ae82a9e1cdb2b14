"""Changes of a head's settings, rather than of its weights: blocks, windows, RoPE, what is joined
with what, in which order its heads stand.

A change takes a head, alters it in place, and returns whether there was anything to alter.

Legend: D hidden, r rank, K heads.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from drafters import Drafter
from drafters.block import DFlashDrafter
from drafters.config import DecoderConfig
from drafters.dspark import DSparkDrafter, MarkovHead
from drafters.eagle import Eagle3Drafter
from drafters.hydra import HydraDrafter, NarrowingBlock
from drafters.layers import Attention, RMSNorm
from drafters.medusa import MedusaDrafter
from drafters.peagle import PEagleDrafter
from recipes.diagnosis.variants import Change, Skipped, swap

# Blocks -----------------------------------------------------------------------------------------


class _Anchored(DFlashDrafter):
    """DFlash whose first row drafts, too."""

    @property
    def first_slot(self) -> int:
        """The root's own row."""
        return 0


def with_causality(causal: bool, layers: list[int] | None = None) -> Change:
    """Rows of a block see only earlier ones of it in all layers, in none, or in some."""

    def change(head: Drafter) -> bool:
        if not isinstance(head, DFlashDrafter):
            return False
        before = head.causal
        head.config.causal, head.config.causal_layers = causal, layers
        return head.causal != before

    return change


def with_block_size(size: int) -> Change:
    """Another number of rows in a block; without effect where they all see only earlier ones."""

    def change(head: Drafter) -> bool:
        if not isinstance(head, DFlashDrafter) or all(head.causal):
            return False
        before, head.config.block_size = head.config.block_size, size
        return head.num_drafts >= 1 and size != before

    return change


def other_anchor(head: Drafter) -> bool:
    """The root's row drafts where it did not, and the other way round."""
    if isinstance(head, DSparkDrafter):
        head.config.sample_from_anchor = not head.config.sample_from_anchor
        return head.config.markov_type != "rnn" and head.num_drafts >= 1
    if type(head) is not DFlashDrafter:
        return False
    head.__class__ = _Anchored
    return True


def with_mask_token(token: int) -> Change:
    """Another token in the empty slots of a block, or of the mask's row in an own embedding."""

    def change(head: Drafter) -> bool:
        head.config.mask_token_id = token
        return True

    return change


def without_markov(head: Drafter) -> bool:
    """DSpark without its sequential part."""
    if not isinstance(head, DSparkDrafter) or head.markov_head is None:
        return False
    head.markov_head, head.config.markov_type = None, "none"
    return True


def swapped_markov(head: Drafter) -> bool:
    """The two matrices of DSpark's Markov head in each other's place, where both fit there."""
    markov = head.markov_head if isinstance(head, DSparkDrafter) else None
    if not isinstance(markov, MarkovHead):
        return False
    first, second = markov.markov_w1.weight, markov.markov_w2.weight
    if first.shape != second.shape:
        return False
    swap(first, second)
    return True


# Attention --------------------------------------------------------------------------------------


def with_theta(theta: float) -> Change:
    """Another rotary base."""

    def change(head: Drafter) -> bool:
        found = [module for module in head.modules() if isinstance(module, Attention)]
        for attention in found:
            attention.theta = theta
        return bool(found)

    return change


def with_extension(extension: dict[str, Any] | None) -> Change:
    """Another extension of RoPE, or none."""

    def change(head: Drafter) -> bool:
        found = [module for module in head.modules() if isinstance(module, Attention)]
        for attention in found:
            attention.rope_extension = extension
        return bool(found)

    return change


def without_window(head: Drafter) -> bool:
    """Attention over everything."""
    if not isinstance(head.config, DecoderConfig) or head.config.sliding_window is None:
        return False
    head.config.sliding_window = None
    return True


# Embeddings, joining, order -----------------------------------------------------------------------


def target_embedding(head: Drafter) -> bool:
    """The target's embedding in place of the head's own; the mask's row stays."""
    if not isinstance(head, Eagle3Drafter) or head.embed_tokens is None:
        return False
    weight, own = head.embed_tokens.weight, None
    if isinstance(head, PEagleDrafter):
        own = head.mask_row().clone()
    weight.copy_(head.target.embed(torch.arange(len(weight), device=head.target.device)))
    if own is not None:
        weight[head.config.mask_token_id] = own
    return True


def hidden_last(head: Drafter) -> bool:
    """Hydra's blocks with the hidden state behind the embeddings."""
    return _permuted(head, lambda parts: [*parts[1:], parts[0]])


def tokens_reversed(head: Drafter) -> bool:
    """Hydra's blocks with the latest token first."""
    return _permuted(head, lambda parts: [parts[0], *reversed(parts[1:])])


def _permuted(head: Drafter, order: Any) -> bool:
    """Columns of Hydra's first blocks, D at a time, in another order: ``order`` takes the numbers
    of what is joined in the order in which the file has it.
    """
    blocks = [module for module in head.modules() if isinstance(module, NarrowingBlock)]
    for block in blocks:
        for matrix in (block.skip.weight, block.linear.weight):
            parts = list(matrix.split(head.config.hidden_size, dim=1))
            places = order(list(range(len(parts))))  # places[i]: what stands i-th in the file
            back = [parts[places.index(number)] for number in range(len(parts))]
            matrix.copy_(torch.cat(back, dim=1))
    return bool(blocks)


def swapped_skips(head: Drafter) -> bool:
    """Hydra's skip and its linear map in each other's place."""
    blocks = [module for module in head.modules() if isinstance(module, NarrowingBlock)]
    for block in blocks:
        swap(block.skip.weight, block.linear.weight)
        swap(block.skip.bias, block.linear.bias)
    return bool(blocks)


def other_prefix_norm(head: Drafter) -> bool:
    """Hydra++ without the norm behind its prefix layer, or with one of scale one."""
    if not isinstance(head, HydraDrafter) or head.prefix is None:
        return False
    if head.prefix_norm is None:
        head.prefix_norm = RMSNorm(head.config.hidden_size, head.config.rms_norm_eps)
    else:
        head.prefix_norm = Skipped(head.prefix_norm)
    return True


def heads_in_order(order: Sequence[int]) -> Change:
    """Medusa's heads in another order."""

    def change(head: Drafter) -> bool:
        if not isinstance(head, MedusaDrafter):
            return False
        head.blocks = nn.ModuleList(head.blocks[place] for place in order)
        if head.lm_heads is not None:
            head.lm_heads = nn.ModuleList(head.lm_heads[place] for place in order)
        return list(order) != list(range(len(order)))

    return change
