"""What the dialects of the ``speculators`` package have in common (its classes, release 0.9.0).

A folder with ``config.json`` and ``model.safetensors``. The config of the decoder layers is nested
in ``transformer_layer_config``; ``speculators_config`` says what is drafted, how many tokens, and
for which verifier. Layer ids are ``hidden_states`` indices.

Traps: what the nested config leaves out means the default of its class in transformers
(``model_type`` "llama" or "qwen3"; without one, Qwen3). A config without ``layer_types`` has full
attention in all layers, but the package's trainer gives every layer a window of 2048 unless told
otherwise. The trainer saves in bfloat16. The verifier is loaded by the name in the config, whatever
else is at hand.

Legend: H hidden (the package wants the target's), F captured layers.
"""

from abc import abstractmethod
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor
from transformers import CONFIG_MAPPING

from drafters.base import Drafter
from drafters.export.dialect import (
    DTYPES,
    Dialect,
    KeySpec,
    TensorSpec,
    key_problems,
    size_problems,
    type_name,
)
from drafters.export.fields import (
    LAYER_FIELDS,
    LAYER_KEYS,
    TARGET_SIZES,
    complete_layers,
    layer_keys,
    llama_layer,
    public_name,
    rope_extension,
    rope_keys,
    rope_problems,
    shape_refusals,
    special_tokens,
    target_refusals,
    vocab_hint,
    vocab_problems,
)
from drafters.export.folder import ExportError
from drafters.target import TargetModel

VERSION = "0.9.0"
LAYERS = "transformer_layer_config"
SLIDING, FULL = "sliding_attention", "full_attention"

KEYS = (
    KeySpec("architectures", list),
    KeySpec("speculators_model_type", str),
    KeySpec("speculators_version", str),
    KeySpec("speculators_config", dict),
    KeySpec(LAYERS, dict),
    KeySpec("dtype", str),
    KeySpec("tie_word_embeddings", bool, False),
)
LAYER_SPECS = (
    KeySpec("model_type", str),
    *LAYER_KEYS,
    KeySpec("num_hidden_layers", int, positive=True),
    KeySpec("mlp_bias", bool, False, optional=True),
    KeySpec("sliding_window", (int, type(None))),
    KeySpec("layer_types", list),
)


class Speculators(Dialect):
    """Base of its dialects, one for each kind of head.

    Attributes:
        kind: ``speculators_model_type``.
        known_as: its architecture: the name of its class, which the package saves, and the one in
            its config's defaults.
        layer_classes: values of the nested ``model_type``.
        unnamed: what a nested config without one means.
        layer_specs: keys of the nested config.
    """

    kind: ClassVar[str]
    known_as: ClassVar[tuple[str, ...]]
    layer_classes: ClassVar[tuple[str, ...]] = ("qwen3",)
    unnamed: ClassVar[str] = "qwen3"
    layer_specs: ClassVar[tuple[KeySpec, ...]] = LAYER_SPECS
    engines: ClassVar[tuple[str, ...]] = ("vllm",)
    unknown_to_transformers = True

    # Writing ------------------------------------------------------------------------------------

    @abstractmethod
    def own_keys(self, head: Drafter) -> dict[str, Any]:
        """Keys of config.json that other kinds do not have."""

    def windows(self, head: Drafter) -> list[int | None]:
        """Sliding window of each layer; None sees everything."""
        return [head.config.sliding_window] * head.config.num_layers

    def only(self, head: Drafter) -> dict[str, Any]:
        """Fields of a head's configuration to the one value that has a place."""
        return {}

    def refusals(self, head: Drafter) -> list[str]:
        """Other layers, and scaled embeddings."""
        only = {"rope_extension": head.config.rope_extension, **self.only(head)}  # any of them
        return target_refusals(head) + shape_refusals(head, **only)

    def config(self, head: Drafter) -> dict[str, Any]:
        """Names the target as the head records it."""
        dtype = type_name(next(head.parameters()).dtype)
        return {
            "architectures": [self.known_as[0]],
            "speculators_model_type": self.kind,
            "speculators_version": VERSION,
            "speculators_config": proposal(head, self.kind),
            LAYERS: self.layer_config(head),
            **self.own_keys(head),
            "tie_word_embeddings": False,
            "dtype": dtype,
            "torch_dtype": dtype,
        }

    def layer_config(self, head: Drafter) -> dict[str, Any]:
        """The nested config, nothing left to defaults."""
        windows = self.windows(head)
        window = next((width for width in windows if width is not None), None)
        return {
            "model_type": "qwen3" if head.config.qk_norm else "llama",
            **layer_keys(head),
            "num_hidden_layers": head.config.num_layers,
            "vocab_size": head.config.vocab_size,
            **rope_keys(head),
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            "sliding_window": window,
            "use_sliding_window": window is not None,
            "layer_types": [FULL if width is None else SLIDING for width in windows],
            **special_tokens(head.target),
        }

    def notes(self, head: Drafter, config: Mapping[str, Any]) -> list[str]:
        """Where the verifier is looked for, and what is left out."""
        name = config["speculators_config"]["verifier"]["name_or_path"]
        notes = [
            f"speculators and vLLM load the target by the name in config.json, {name!r}; for "
            "others speculators_config.verifier.name_or_path must be its hub id"
        ]
        if self.left_out(head):
            notes.append("the confidence output is left out: this form has no place for it")
        return notes

    # Reading ------------------------------------------------------------------------------------

    def recognises(self, config: Mapping[str, Any], names: Collection[str]) -> bool:
        """The package writes the kind of head."""
        return config.get("speculators_model_type") == self.kind

    def complete(self, config: dict[str, Any], target: TargetModel) -> dict[str, Any]:
        """Defaults of the package's config classes and of those of transformers."""
        layers = config.get(LAYERS)
        if not isinstance(layers, dict):
            return config
        layers = complete_layers(with_defaults(layers, self.unnamed))
        if not layers.get("layer_types"):
            layers["layer_types"] = [FULL] * (layers.get("num_hidden_layers") or 0)
        if set(layers["layer_types"]) == {FULL}:
            layers["sliding_window"] = None
        dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
        defaults = {"tie_word_embeddings": False, "speculators_version": "unknown", "dtype": dtype}
        return {**defaults, **config, LAYERS: layers, "dtype": dtype}

    def config_problems(self, config: Mapping[str, Any]) -> list[str]:
        """The nested config, what is drafted for whom, and the kind's own keys."""
        problems = []
        if config["speculators_model_type"] != self.kind:
            problems.append(
                f"speculators_model_type must be {self.kind!r}, "
                f"got {config['speculators_model_type']!r}"
            )
        if config["architectures"] not in [[name] for name in self.known_as]:
            known = " or ".join(self.known_as)
            problems.append(f"architectures must be {known}, got {config['architectures']}")
        problems += proposal_problems(config["speculators_config"], self.kind)
        if config["dtype"] not in map(type_name, DTYPES):
            known = ", ".join(map(type_name, DTYPES))
            problems.append(f"dtype {config['dtype']} is not one of {known}")
        nested = self.nested_problems(config[LAYERS])
        problems += [f"{LAYERS}: {problem}" for problem in nested]
        return problems if nested else problems + self.own_problems(config)

    def nested_problems(self, layers: Mapping[str, Any]) -> list[str]:
        """What is wrong with the nested config."""
        problems = [p for spec in self.layer_specs for p in key_problems(spec, layers)]
        if problems:
            return problems
        if layers["model_type"] not in self.layer_classes:
            known = " or ".join(self.layer_classes)
            problems.append(f"model_type {layers['model_type']!r} is not supported, only {known}")
        return problems + rope_problems(layers, extended=True) + window_problems(layers)

    def own_problems(self, config: Mapping[str, Any]) -> list[str]:
        """What is wrong with the kind's own keys, the nested config being right."""
        return []

    def target_problems(self, config: Mapping[str, Any], target: TargetModel) -> list[str]:
        """Sizes and the longest position."""
        layers = config[LAYERS]
        if self.nested_problems(layers):
            return []  # reported already
        return size_problems(layers, target, TARGET_SIZES)

    def flat(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The nested config with ``draft_vocab_size`` beside it."""
        layers = config[LAYERS]
        return {**layers, "draft_vocab_size": config.get("draft_vocab_size", layers["vocab_size"])}

    def tensor_problems(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> list[str]:
        """The vocabulary map."""
        return vocab_problems(self.flat(config), tensors)

    def hint(self, name: str, config: Mapping[str, Any]) -> str:
        """Of the vocabulary map."""
        return vocab_hint(name, self.flat(config))


def layer_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a head's configuration, of a checked file: the shape of its layers."""
    layers = config[LAYERS]
    names = (*LAYER_FIELDS, "vocab_size", "max_position_embeddings", "rope_theta")
    return {
        **{name: layers[name] for name in names},
        "num_layers": layers["num_hidden_layers"],
        "rope_extension": rope_extension(layers),
        "draft_vocab_size": config.get("draft_vocab_size", layers["vocab_size"]),
        "qk_norm": layers["model_type"] == "qwen3",
    }


def decoder_layers(config: Mapping[str, Any], first: int = 0) -> list[TensorSpec]:
    """Tensors of the layers from ``first`` on."""
    layers = config[LAYERS]
    qk_norm = layers["model_type"] == "qwen3"
    return [
        spec
        for index in range(first, layers["num_hidden_layers"])
        for spec in llama_layer(f"layers.{index}", layers, qk_norm=qk_norm)
    ]


def with_defaults(layers: dict[str, Any], unnamed: str) -> dict[str, Any]:
    """A nested config with the defaults of its class in transformers.

    Args:
        layers: of a file.
        unnamed: the class of a config that names none.

    Raises:
        ExportError: transformers does not know its class or refuses its values.
    """
    kind = layers.get("model_type") or unnamed
    if kind not in CONFIG_MAPPING:
        raise ExportError(f"{LAYERS}: transformers has no model_type {kind!r}")
    try:
        defaults = CONFIG_MAPPING[kind](**layers).to_dict()
    except Exception as error:  # transformers' validators raise several kinds
        raise ExportError(f"{LAYERS}: transformers refuses it: {error}") from error
    given = {key: value for key, value in layers.items() if value is not None}
    return {**defaults, **given, "model_type": kind}


def proposal(head: Drafter, kind: str) -> dict[str, Any]:
    """``speculators_config`` of a head."""
    target = head.target
    found = target.model.config.architectures or [type(target.model).__name__]
    greedy = {
        "proposal_type": "greedy",
        "speculative_tokens": head.num_drafts or 3,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "algorithm": kind,
        "proposal_methods": [greedy],
        "default_proposal_method": "greedy",
        "verifier": {
            "name_or_path": verifier_name(head),
            "architectures": list(found),
        },
    }


def verifier_name(head: Drafter) -> str:
    """The target's hub id, or its folder: programs load it by this name."""
    recorded, folder = public_name(head), Path(head.target.name)
    return str(folder.resolve()) if "/" not in recorded and folder.is_dir() else recorded


def proposal_problems(found: Mapping[str, Any], kind: str) -> list[str]:
    """What the package's own classes would refuse in ``speculators_config``."""
    problems = []
    if found.get("algorithm") != kind:
        problems.append(f"algorithm must be {kind!r}, got {found.get('algorithm')!r}")
    methods = found.get("proposal_methods") or [{}]
    if found.get("default_proposal_method") not in [m.get("proposal_type", "") for m in methods]:
        problems.append("default_proposal_method must be one of proposal_methods")
    tokens = methods[0].get("speculative_tokens")
    if type(tokens) is not int or tokens < 1:
        problems.append(f"speculative_tokens must be an int of at least 1, got {tokens!r}")
    verifier = found.get("verifier")
    if not isinstance(verifier, dict) or not {"name_or_path", "architectures"} <= set(verifier):
        problems.append("verifier must have name_or_path and architectures")
    return [f"speculators_config: {problem}" for problem in problems]


def window_problems(layers: Mapping[str, Any]) -> list[str]:
    """Kinds of attention that no head has."""
    kinds, window = layers["layer_types"], layers["sliding_window"]
    if len(kinds) != layers["num_hidden_layers"]:
        return [f"layer_types has {len(kinds)} entries for {layers['num_hidden_layers']} layers"]
    if other := sorted(set(kinds) - {SLIDING, FULL}):
        return [f"layer_types: {other[0]} is not supported, only {SLIDING} and {FULL}"]
    if SLIDING in kinds and (window is None or window < 2):
        return [f"sliding_window must be at least 2 where layers have {SLIDING}, got {window}"]
    return []


def layer_id_problems(ids: Any, name: str) -> list[str]:
    """Where captured layers are no list that Headway can read.

    Args:
        ids: value of the key.
        name: of the key.
    """
    if not isinstance(ids, list) or not ids or not all(type(k) is int for k in ids):
        return [f"{name} must be a list of layer ids, got {ids!r}"]
    if sorted(set(ids)) != ids:
        return [f"{name} must be increasing (columns of fc.weight follow it), got {ids}"]
    return []


def captured_problems(ids: list[int], name: str, target: TargetModel) -> list[str]:
    """Layers that the target does not have, or has only behind its final norm.

    Args:
        ids: increasing.
        name: of the key.
        target: to be captured.
    """
    if ids[0] >= 0 and ids[-1] < target.num_layers:
        return []
    return [
        f"{name} {ids} must lie in 0..{target.num_layers - 1}: k is the stream that enters layer k"
    ]
