"""Heads for the dialects of ``speculators``: every switch, random in every tensor."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafters import TargetModel, build_drafter
from drafters.base import Drafter
from drafters.export import golden_inputs, golden_logits, write_as
from drafters.export.folder import MANIFEST
from drafters.export.golden import GOLDEN

LAYERS = "transformer_layer_config"
EAGLE_IDS, BLOCK_IDS = "eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle3": ("eagle3", {"feature_layers": [1, 3, 5]}),
    "eagle3 as their trainer has it": (
        "eagle3",
        {
            "draft_vocab_size": 40,
            "norm_before_residual": True,
            "norm_before_fc": True,
            "norm_output": True,
            "sliding_window": 5,
        },
    ),
    "eagle3 qwen3 layers": (
        "eagle3",
        {
            "num_layers": 2,
            "qk_norm": True,
            "fc_norm": True,
            "feature_layers": [1, 2, 3, 5],
            "rope_extension": {"rope_type": "linear", "factor": 4.0},
        },
    ),
    "eagle3 own embedding": ("eagle3", {"own_embedding": True, "draft_vocab_size": 40}),
    "peagle": ("peagle", {"num_drafts": 4, "num_layers": 2, "mask_token_id": 90}),
    "peagle own embedding": (
        "peagle",
        {
            "num_drafts": 3,
            "num_layers": 1,
            "mask_token_id": 90,
            "own_embedding": True,
            "qk_norm": True,
            "draft_vocab_size": 40,
            "norm_before_residual": True,
            "norm_before_fc": True,
            "sliding_window": 6,
        },
    ),
    "dflash": ("dflash", {"num_layers": 2, "block_size": 4}),
    "dflash reduced": ("dflash", {"num_layers": 1, "block_size": 4, "draft_vocab_size": 40}),
    "dflash causal": ("dflash", {"num_layers": 2, "block_size": 4, "causal": True}),
    "dflash window": (
        "dflash",
        {"num_layers": 2, "block_size": 4, "sliding_window": 9, "causal": True},
    ),
    "dflash mixed": (
        "dflash",
        {
            "num_layers": 3,
            "block_size": 4,
            "sliding_window": 9,
            "window_layers": [0, 2],
            "causal_layers": [0, 2],
        },
    ),
    "dspark": ("dspark", {"num_layers": 1, "markov_rank": 8, "confidence_head": True}),
    "dspark gated": (
        "dspark",
        {"num_layers": 1, "markov_rank": 8, "markov_type": "gated", "draft_vocab_size": 40},
    ),
    "dspark rnn": (
        "dspark",
        {"num_layers": 1, "markov_rank": 8, "markov_type": "rnn", "markov_bias": True},
    ),
    "dspark in place": (
        "dspark",
        {
            "num_layers": 1,
            "markov_rank": 8,
            "sample_from_anchor": False,
            "confidence_head": True,
            "confidence_with_markov": False,
        },
    ),
    "dspark none": ("dspark", {"num_layers": 1, "markov_type": "none", "confidence_head": True}),
    "mtp": ("mtp", {"qk_norm": True}),
}
"""Every option that changes what is written, by a name for the test's id."""


def make_head(name: str, target: TargetModel, **changes: Any) -> Drafter:
    """A head whose every tensor, norms included, is random.

    Args:
        name: key of ``VARIANTS``.
        target: to attach.
        **changes: to its options.
    """
    family, options = VARIANTS[name]
    head = build_drafter(family, target, **{**options, **changes})
    generator = torch.Generator().manual_seed(1)
    head.set_draft_vocab(torch.randint(100, (target.vocab_size,), generator=generator))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return head.eval()


def written(head: Drafter, folder: Path) -> Path:
    """An export of a head as a folder that another program could have left: no manifest, no golden
    rows.
    """
    write_as(f"speculators-{head.family}", head, folder)
    for name in (MANIFEST, GOLDEN):
        (folder / name).unlink()
    return folder


def logits(head: Drafter) -> Tensor:
    return golden_logits(head, golden_inputs(head))


class Edit:
    """Change a folder in place."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors = load_file(folder / "model.safetensors")
        self.config = json.loads((folder / "config.json").read_text())

    @property
    def layers(self) -> dict[str, Any]:
        return self.config[LAYERS]

    def save(self) -> None:
        save_file(self.tensors, self.folder / "model.safetensors")
        (self.folder / "config.json").write_text(json.dumps(self.config))
