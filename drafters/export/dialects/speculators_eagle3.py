"""EAGLE-3 (arXiv:2503.01840) and P-EAGLE (arXiv:2602.01469) heads as ``speculators`` has them.

All layers are named ``layers.{i}.*``; the first one has the wide projections. Read in the package's
classes (0.9.0): ``norm_before_residual``, ``norm_before_fc`` (``input_norm``), ``fc_norm`` and
``norm_output`` are what the switches of the same names are here, any number of captured layers and
of decoder layers is allowed, and "qwen3" layers norm queries and keys. The trainer's own defaults
for EAGLE-3 are the first two, ``norm_output`` and a window. P-EAGLE trains the embedding too
(``embed_requires_grad``); the row of ``mask_token_id`` is what mask rows hold, ``mask_hidden``
their features.

``norm_before_residual`` is never left to a default: the package's class takes false for a missing
one, vLLM true.

Legend: H hidden, V target vocabulary, Vd draft vocabulary, F captured layers.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from drafters.base import Drafter
from drafters.config import default_feature_layers
from drafters.export.dialect import EMBEDDING, KeySpec, Parts, TensorSpec, embedding_problems
from drafters.export.dialects.speculators import (
    FULL,
    KEYS,
    LAYERS,
    SLIDING,
    Speculators,
    captured_problems,
    decoder_layers,
    layer_id_problems,
    layer_options,
)
from drafters.export.fields import (
    MARKS,
    OFFSETS,
    llama_layer,
    mask_place,
    masked_embedding,
    vocab_specs,
    vocab_state,
    vocab_tensors,
)
from drafters.peagle import PEagleDrafter
from drafters.target import TargetModel

IDS = "eagle_aux_hidden_state_layer_ids"
SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
FIRST, OURS = "layers.0.", "midlayer."


class SpeculatorsEagle3(Speculators):
    """EAGLE-3, also with the variants that only this package trains."""

    name = "speculators-eagle3"
    families = ("eagle3",)
    kind = "eagle3"
    known_as = ("Eagle3DraftModel", "Eagle3Speculator")
    layer_classes = ("qwen3", "llama")
    embeddings = "always"
    keys: ClassVar[tuple[KeySpec, ...]] = (
        *KEYS,
        *(KeySpec(name, bool) for name in SWITCHES),
        KeySpec("draft_vocab_size", int, positive=True),
        KeySpec("target_hidden_size", int, positive=True),
        KeySpec("embed_requires_grad", bool),
        KeySpec(IDS, list),
    )

    def own_keys(self, head: Drafter) -> dict[str, Any]:
        """Switches, layers and the vocabulary."""
        config = head.config
        return {
            "draft_vocab_size": config.draft_vocab_size,
            "target_hidden_size": head.target.hidden_size,
            **{name: getattr(config, name) for name in SWITCHES},
            "embed_requires_grad": config.own_embedding,
            IDS: list(head.feature_layers),
        }

    def layer_config(self, head: Drafter) -> dict[str, Any]:
        """With the number of captured layers: vLLM takes three for Llama's without it."""
        return {**super().layer_config(head), "num_aux_hidden_states": len(head.feature_layers)}

    def tensors(self, head: Drafter) -> dict[str, Tensor]:
        """The first layer gets a number; the embedding is always there."""
        dropped = {*self.left_out(head), "draft_vocab", "mask_embedding"}
        own = {
            name.replace(OURS, FIRST): tensor
            for name, tensor in head.state_dict().items()
            if name not in dropped
        }
        return own | {EMBEDDING: self.embedding(head)} | vocab_tensors(head)

    def embedding(self, head: Drafter) -> Tensor:
        """(V, H), in the head's dtype."""
        own = head.state_dict().get(EMBEDDING)
        weight = head.target.embedding.get_parameter("weight") if own is None else own
        return weight.to(next(head.parameters()).dtype)

    def notes(self, head: Drafter, config: Mapping[str, Any]) -> list[str]:
        """Variants that not every engine computes."""
        notes = super().notes(head, config)
        if config["norm_output"] or config["fc_norm"] or config["norm_before_fc"]:
            notes.append(
                "norm_output, fc_norm and norm_before_fc are read by vLLM 0.33: an older one may "
                "ignore the keys and draft badly"
            )
        if len(config[IDS]) != 3 or config[LAYERS]["num_hidden_layers"] > 1:
            notes.append(
                "other heads than one layer over three captured ones: check that your engine's "
                "version builds them"
            )
        return notes

    def complete(self, config: dict[str, Any], target: TargetModel) -> dict[str, Any]:
        """``norm_before_residual`` alone stays missing where it is: programs differ in it."""
        config = super().complete(config, target)
        layers = config.get(LAYERS) or {}
        defaults: dict[str, Any] = {
            "norm_before_fc": False,
            "fc_norm": False,
            "norm_output": False,
            "embed_requires_grad": False,
            "draft_vocab_size": 32000,
            "target_hidden_size": layers.get("hidden_size"),
        }
        if config.get(IDS) is None:
            defaults[IDS] = default_feature_layers(target.num_layers)
        return config | {k: v for k, v in defaults.items() if config.get(k) is None}

    def own_problems(self, config: Mapping[str, Any]) -> list[str]:
        """Layer ids, norms that exclude each other, sizes."""
        layers = config[LAYERS]
        problems = layer_id_problems(config[IDS], IDS)
        if config["norm_before_fc"] and config["fc_norm"]:
            problems.append("norm_before_fc and fc_norm exclude each other")
        if config["draft_vocab_size"] > layers["vocab_size"]:
            problems.append("draft_vocab_size is larger than vocab_size")
        if config["target_hidden_size"] != layers["hidden_size"]:
            problems.append(
                f"target_hidden_size {config['target_hidden_size']} must be hidden_size "
                f"{layers['hidden_size']}: the package's classes know no other"
            )
        if set(layers["layer_types"]) == {SLIDING, FULL}:
            problems.append(f"layer_types: layers of both {SLIDING} and {FULL} are not supported")
        return problems

    def target_problems(self, config: Mapping[str, Any], target: TargetModel) -> list[str]:
        """The captured layers too."""
        if layer_id_problems(config[IDS], IDS):
            return []
        return captured_problems(config[IDS], IDS, target) + super().target_problems(config, target)

    def specs(self, config: Mapping[str, Any]) -> list[TensorSpec]:
        """Of all layers, the norms that are switched on, and the vocabulary map."""
        layers, count = config[LAYERS], len(config[IDS])
        hidden, size = layers["hidden_size"], config["draft_vocab_size"]
        qk_norm = layers["model_type"] == "qwen3"
        found = [TensorSpec("fc.weight", (hidden, count * hidden))]
        if config["norm_before_fc"]:
            found.append(TensorSpec("input_norm.weight", (count * hidden,)))
        if config["fc_norm"]:
            found += [TensorSpec(f"fc_norm.{i}.weight", (hidden,)) for i in range(count)]
        first = FIRST.removesuffix(".")
        return [
            *found,
            *llama_layer(first, layers, input_size=2 * hidden, qk_norm=qk_norm),
            TensorSpec(f"{FIRST}hidden_norm.weight", (hidden,)),
            *decoder_layers(config, first=1),
            TensorSpec("norm.weight", (hidden,)),
            TensorSpec("lm_head.weight", (size, hidden)),
            TensorSpec(
                EMBEDDING,
                (layers["vocab_size"], hidden),
                optional=not config["embed_requires_grad"],
            ),
            *vocab_specs(self.flat(config)),
        ]

    def borrowed_problems(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: TargetModel
    ) -> list[str]:
        """An embedding that was not trained must be the target's."""
        if config["embed_requires_grad"]:
            return []
        return embedding_problems(tensors.get(EMBEDDING), target)

    def parts(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: TargetModel
    ) -> Parts:
        """An EAGLE-3 head; one that trained the embedding keeps it."""
        own = config["embed_requires_grad"]
        dropped = {OFFSETS, MARKS} | (set() if own else {EMBEDDING})
        state = {
            OURS + name.removeprefix(FIRST) if name.startswith(FIRST) else name: tensor
            for name, tensor in tensors.items()
            if name not in dropped
        }
        options = {
            **layer_options(config),
            **{name: config[name] for name in SWITCHES},
            "sliding_window": config[LAYERS]["sliding_window"],
            "feature_layers": list(config[IDS]),
            "own_embedding": own,
        }
        return Parts("eagle3", options, state | vocab_state(tensors))


class SpeculatorsPEagle(SpeculatorsEagle3):
    """P-EAGLE."""

    name = "speculators-peagle"
    families = ("peagle",)
    kind = "peagle"
    known_as = ("PEagleDraftModel", "PEagleSpeculator")
    keys = (*SpeculatorsEagle3.keys, KeySpec("mask_token_id", int))

    def served(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """vLLM does not read ``fc_norm`` of this kind."""
        return () if config["fc_norm"] else self.engines

    def own_keys(self, head: Drafter) -> dict[str, Any]:
        """The mask's row of the embedding too."""
        assert isinstance(head, PEagleDrafter)
        return {**super().own_keys(head), "mask_token_id": mask_place(head)}

    def embedding(self, head: Drafter) -> Tensor:
        """(V, H), with the mask's row in it."""
        assert isinstance(head, PEagleDrafter)
        return masked_embedding(head)

    def complete(self, config: dict[str, Any], target: TargetModel) -> dict[str, Any]:
        """The package trains the embedding of this kind unless told otherwise."""
        trained = config.get("embed_requires_grad")
        return super().complete(
            {**config, "embed_requires_grad": True if trained is None else trained}, target
        )

    def own_problems(self, config: Mapping[str, Any]) -> list[str]:
        """The mask and the number of drafts too."""
        problems, size = super().own_problems(config), config[LAYERS]["vocab_size"]
        if not 0 <= config["mask_token_id"] < size:
            problems.append(f"mask_token_id {config['mask_token_id']} must lie in 0..{size - 1}")
        if num_drafts(config) < 2:
            problems.append("speculators_config: speculative_tokens must be at least 2")
        return problems

    def specs(self, config: Mapping[str, Any]) -> list[TensorSpec]:
        """With the mask's feature; the embedding cannot be left out, as it holds the mask's row."""
        width = len(config[IDS]) * config[LAYERS]["hidden_size"]
        shared = [spec for spec in super().specs(config) if spec.name != EMBEDDING]
        table = (config[LAYERS]["vocab_size"], config[LAYERS]["hidden_size"])
        return [*shared, TensorSpec(EMBEDDING, table), TensorSpec("mask_hidden", (1, 1, width))]

    def borrowed_problems(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: TargetModel
    ) -> list[str]:
        """The mask's row is the head's own in any case."""
        if config["embed_requires_grad"]:
            return []
        row = torch.tensor([config["mask_token_id"]])
        theirs = target.embedding.get_parameter("weight").cpu()[row]
        found = tensors[EMBEDDING].index_copy(0, row, theirs.to(tensors[EMBEDDING]))
        return embedding_problems(found, target)

    def parts(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: TargetModel
    ) -> Parts:
        """A P-EAGLE head; what is fed back is no question, as nothing is."""
        found = super().parts(config, tensors, target)
        options = {**found.options, "norm_output": False, "num_drafts": num_drafts(config)}
        options["mask_token_id"] = config["mask_token_id"]
        state = dict(found.state)
        if not config["embed_requires_grad"]:
            state["mask_embedding"] = tensors[EMBEDDING][config["mask_token_id"]].clone()
        return Parts("peagle", options, state)


def num_drafts(config: Mapping[str, Any]) -> int:
    """Tokens per pass, K."""
    tokens: int = config["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    return tokens


EAGLE3, PEAGLE = SpeculatorsEagle3(), SpeculatorsPEagle()
