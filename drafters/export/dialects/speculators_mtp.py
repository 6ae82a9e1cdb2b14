"""Multi-token prediction modules as ``speculators`` 0.9.0 has them.

One module ``mtp_layers.0``: ``token_layernorm`` and ``hidden_layernorm`` of the embedding and the
feature, ``input_proj`` of both (the embedding first), a decoder layer, ``final_layernorm``, whose
output is fed back. Embedding and output matrix are the target's and never saved; there is no draft
vocabulary. The nested config is the target's: of its layers the module has one.

The package trains modules that came with a Qwen target (``speculators stitch-mtp`` puts them back)
and has no other way to be served. A head from scratch fits where its layer is Qwen3's, which its
class builds too; no engine serves it. Modules that came with a target are written by the dialects
that stitch them back.

Its trainer hands the module the hidden state that it stores for EAGLE-3, which is the one before
the target's final norm (its EAGLE-3 norms it afterwards); engines hand over the one behind the
norm, and so does Headway. The file does not say which it was trained with.

Legend: H hidden, V vocabulary.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from drafters.base import Drafter
from drafters.export.dialect import KeySpec, Parts, TensorSpec
from drafters.export.dialects.speculators import (
    FULL,
    KEYS,
    LAYERS,
    SLIDING,
    Speculators,
    layer_options,
)
from drafters.export.fields import llama_layer, logit_refusals
from drafters.target import TargetModel

PREFIX, OURS = "mtp_layers.0.", "mtp.0."
RENAMED = {
    "enorm.": "token_layernorm.",
    "hnorm.": "hidden_layernorm.",
    "eh_proj.": "input_proj.",
    "norm.": "final_layernorm.",
    "layers.0.": "",
}
"""Ours to theirs, behind the prefixes."""


class SpeculatorsMtp(Speculators):
    """One MTP module with a Qwen3 layer."""

    name = "speculators-mtp"
    families = ("mtp",)
    kind = "mtp"
    known_as = ("MTPDraftModel",)
    unnamed = "qwen2"
    engines = ()
    keys = (*KEYS, KeySpec("num_nextn_predict_layers", int, 1))

    def refusals(self, head: Drafter) -> list[str]:
        """Modules that came with the target, too."""
        if head.config.native_config is not None:
            return [
                "its modules came with the target: write them back into the target's checkpoint "
                "(a mtp dialect does), from which speculators converts them"
            ]
        return super().refusals(head) + logit_refusals(head)

    def only(self, head: Drafter) -> dict[str, Any]:
        """One module with one Qwen3 layer, fed back behind its norm."""
        return {
            "num_modules": 1,
            "num_layers": 1,
            "qk_norm": True,
            "hidden_first": False,
            "norm_output": True,
            "sliding_window": None,
            "draft_vocab_size": head.config.vocab_size,
        }

    def own_keys(self, head: Drafter) -> dict[str, Any]:
        """The number of modules."""
        return {"num_nextn_predict_layers": 1}

    def layer_config(self, head: Drafter) -> dict[str, Any]:
        """With as many layers as the target: the package captures the stream behind the last."""
        count = head.target.num_layers
        shape = {"num_hidden_layers": count, "layer_types": [FULL] * count}
        return {**super().layer_config(head), **shape}

    def tensors(self, head: Drafter) -> dict[str, Tensor]:
        """Under their names."""
        left_out = self.left_out(head)
        return {
            PREFIX + _swapped(name.removeprefix(OURS), RENAMED): tensor
            for name, tensor in head.state_dict().items()
            if name not in left_out
        }

    def notes(self, head: Drafter, config: Mapping[str, Any]) -> list[str]:
        """That nothing serves it."""
        return [
            *super().notes(head, config),
            "no engine serves an MTP head that was trained from scratch: the file can be read, and "
            "trained on, by speculators alone",
        ]

    def own_problems(self, config: Mapping[str, Any]) -> list[str]:
        """A window, which the package's mask leaves out."""
        if SLIDING in config[LAYERS]["layer_types"]:
            return [f"{LAYERS}: layer_types: {SLIDING} is not supported for MTP"]
        return []

    def nested_problems(self, layers: Mapping[str, Any]) -> list[str]:
        """Layers of Qwen3-Next and Qwen3.5 are read from the target's own files."""
        kind = str(layers.get("model_type"))
        if kind.startswith(("qwen3_next", "qwen3_5")):
            return [
                f"model_type {kind!r}: modules that came with a target are read from its "
                "checkpoint (speculators stitch-mtp puts them back into it)"
            ]
        return super().nested_problems(layers)

    def specs(self, config: Mapping[str, Any]) -> list[TensorSpec]:
        """Of the module."""
        layers = config[LAYERS]
        hidden = layers["hidden_size"]
        norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
        return [
            TensorSpec(f"{PREFIX}input_proj.weight", (hidden, 2 * hidden)),
            *(TensorSpec(f"{PREFIX}{name}.weight", (hidden,)) for name in norms),
            *llama_layer(PREFIX.removesuffix("."), layers, qk_norm=True),
        ]

    def parts(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: TargetModel
    ) -> Parts:
        """An MTP head applied to its own output."""
        theirs = {new: old for old, new in RENAMED.items() if new}
        named = {name: _swapped(name.removeprefix(PREFIX), theirs) for name in tensors}
        inside = set(theirs.values())
        state = {
            OURS + (new if new.startswith(tuple(inside)) else f"layers.0.{new}"): tensors[name]
            for name, new in named.items()
        }
        options = {**layer_options(config), "num_layers": 1, "num_modules": 1}
        return Parts("mtp", {**options, "hidden_first": False, "norm_output": True}, state)


def _swapped(name: str, names: Mapping[str, str]) -> str:
    """A name with its beginning replaced, if it is one of ``names``."""
    for old, new in names.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


MTP = SpeculatorsMtp()
