"""Untrained heads of the block families, with something in every weight."""

from typing import Any

import torch

from drafters import TargetModel, build_drafter
from training.objectives import ObjectiveOptions, build_objective

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dflash": ("dflash", {}),
    "dflash two layers": ("dflash", {"num_layers": 2, "block_size": 5, "qk_norm": False}),
    "dflash sliding": ("dflash", {"sliding_window": 4}),
    "dflash reduced": ("dflash", {"draft_vocab_size": 40}),
    "jetspec": ("dflash", {"causal": True}),
    "jetspec sliding": ("dflash", {"causal": True, "sliding_window": 3, "num_layers": 2}),
    "dflash mixed layers": (
        "dflash",
        {"num_layers": 3, "sliding_window": 3, "window_layers": [0, 2], "causal_layers": [0, 1]},
    ),
    "dspark vanilla": ("dspark", {"markov_rank": 8, "confidence_head": True}),
    "dspark gated": ("dspark", {"markov_rank": 8, "markov_type": "gated"}),
    "dspark rnn": ("dspark", {"markov_rank": 8, "markov_type": "rnn", "confidence_head": True}),
    "dspark biased": (
        "dspark",
        {
            "markov_rank": 8,
            "markov_type": "gated",
            "markov_bias": True,
            "sample_from_anchor": False,
            "confidence_head": True,
            "confidence_with_markov": False,
        },
    ),
    "dspark biased rnn": ("dspark", {"markov_rank": 8, "markov_type": "rnn", "markov_bias": True}),
    "dspark none": ("dspark", {"markov_type": "none", "block_size": 4}),
    "dspark reduced": (
        "dspark",
        {"markov_rank": 8, "markov_type": "rnn", "draft_vocab_size": 40, "sliding_window": 5},
    ),
    "peagle": ("peagle", {"num_drafts": 4}),
    "peagle two layers": ("peagle", {"num_layers": 2, "fc_norm": True, "draft_vocab_size": 40}),
    "peagle sliding": ("peagle", {"num_drafts": 5, "sliding_window": 5, "qk_norm": True}),
    "peagle norms": (
        "peagle",
        {"num_drafts": 4, "norm_before_residual": True, "norm_before_fc": True},
    ),
    "peagle own embedding": (
        "peagle",
        {"num_drafts": 4, "num_layers": 1, "own_embedding": True, "mask_token_id": 90},
    ),
}
"""Every option that changes what is computed, by a name for the test's id."""


def block_head(
    target: TargetModel,
    family: str,
    noise: float = 0.1,
    dtype: torch.dtype = torch.float64,
    from_target: bool = True,
    **options: Any,
) -> Any:
    """A head whose zeros and ones have been disturbed, so that nothing cancels.

    Args:
        target: to attach.
        family: its name.
        noise: standard deviation of what is added to every weight.
        dtype: of the head.
        from_target: start from the target's weights.
        **options: of its config.
    """
    head = build_drafter(family, target, seed=3, **options).to(dtype=dtype)
    if from_target:
        head.set_draft_vocab(torch.arange(target.vocab_size))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in head.parameters():
            weight.add_(noise * torch.randn(weight.shape, generator=generator, dtype=dtype))
    return head.eval()


def block_objective(head: Any, **options: Any) -> Any:
    """The objective of the head's family."""
    return build_objective(head, ObjectiveOptions(**options))
