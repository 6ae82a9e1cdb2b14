"""EAGLE-3 heads (arXiv:2503.01840) as vLLM's own loader reads them (its releases 0.32 and 0.33).

A folder with ``config.json`` and ``model.safetensors``, tensors named ``layers.0.*``. It has places
for what SGLang's dialect has none for: further layers, any number of captured layers, norms of
queries and keys (the layers are then Qwen3's), sliding windows, ``norm_before_residual``,
``norm_before_fc`` and an embedding of the head's own.

Traps: vLLM reads layer ids at the top level (``hidden_states`` indices) and takes [2, n//2, n-3]
where they are missing; the nested list, which SGLang counts one lower, only tells it how many there
are. A missing tensor stays as it was allocated, without a word, and a missing switch is off.
``d2t`` is refused where the draft vocabulary is the target's. ``lm_head`` and ``embed_tokens`` are
the target's where the file has none.

Legend: H draft hidden, F captured layers, L layers, V / Vd target / draft vocabulary.
"""

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from torch import Tensor

from drafters.base import Drafter
from drafters.config import default_feature_layers
from drafters.export.dialect import (
    EMBEDDING,
    Dialect,
    KeySpec,
    Parts,
    TensorSpec,
    type_name,
    type_problems,
)
from drafters.export.dialects.eagle3_fields import (
    ALIASES,
    ARCHITECTURES,
    FIRST,
    FLAGS,
    KEYS,
    OWN_FIRST,
    PARSED_KEYS,
    head_options,
    head_state,
    is_own,
    nested_id_problems,
    numbered_layers,
)
from drafters.export.dialects.sglang import IDS, NUM_FEATURES
from drafters.export.dialects.speculators import FULL, SLIDING, captured_problems, window_problems
from drafters.export.fields import (
    OFFSETS,
    complete_layers,
    from_outputs,
    layer_keys,
    rope_keys,
    rope_problems,
    shape_refusals,
    size_problems,
    special_tokens,
    target_refusals,
    to_outputs,
    vocab_hint,
    vocab_problems,
    vocab_specs,
    vocab_tensors,
    without_identity,
)
from drafters.target import TargetModel


class VllmEagle3(Dialect):
    """EAGLE-3 for vLLM's native loader."""

    name = "vllm"
    parsed_keys = PARSED_KEYS
    families: ClassVar[tuple[str, ...]] = ("eagle3",)
    engines: ClassVar[tuple[str, ...]] = ("vllm", "llama.cpp")
    embeddings = "optional"
    keys: ClassVar[tuple[KeySpec, ...]] = KEYS

    # Writing ------------------------------------------------------------------------------------

    def refusals(self, head: Drafter) -> list[str]:
        """Biases of queries, keys and values (vLLM then has one of the output too)."""
        own = {"rope_extension": head.config.rope_extension}  # any of them
        return shape_refusals(head, **own) + target_refusals(head)

    def served(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """llama.cpp has one plain layer and three features."""
        plain = (
            config["num_hidden_layers"] == 1
            and config["num_aux_hidden_states"] == NUM_FEATURES
            and config["model_type"] == "llama"
            and config["sliding_window"] is None
            and config["rope_scaling"] is None
            and not config["fc_norm"]
            and not config["norm_output"]
        )
        return self.engines if plain else ("vllm",)

    def config(self, head: Drafter) -> dict[str, Any]:
        """The longest position and the special tokens are the target's."""
        config, layers = head.config, list(head.feature_layers)
        kind, window = "qwen3" if config.qk_norm else "llama", config.sliding_window
        return {
            "architectures": [ARCHITECTURES[kind]],
            "model_type": kind,
            **layer_keys(head),
            "num_hidden_layers": config.num_layers,
            "target_hidden_size": head.target.hidden_size,
            "vocab_size": config.vocab_size,
            "draft_vocab_size": config.draft_vocab_size,
            **{name: getattr(config, name) for name in FLAGS},
            **rope_keys(head),
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "layer_types": [FULL if window is None else SLIDING] * config.num_layers,
            "sliding_window": window,
            "use_sliding_window": window is not None,
            "torch_dtype": type_name(next(head.parameters()).dtype),
            **special_tokens(head.target),
            "num_aux_hidden_states": len(layers),
            IDS: layers,
            "eagle_config": {
                IDS: to_outputs(layers),
                "use_aux_hidden_state": True,
                "norm_before_fc": config.norm_before_fc,
            },
        }

    def tensors(self, head: Drafter) -> dict[str, Tensor]:
        """Under the head's own names but for the first layer."""
        dropped = {*self.left_out(head), "draft_vocab"}
        own = {
            name.replace(OWN_FIRST, FIRST): tensor
            for name, tensor in head.state_dict().items()
            if name not in dropped
        }
        return own | vocab_tensors(head)

    def notes(self, head: Drafter, config: Mapping[str, Any]) -> list[str]:
        """What not every version of an engine knows."""
        notes = []
        if config[IDS][0] == 0:
            notes.append(
                "feature layer 0 (the embedding): check the acceptance length when serving, not "
                "every model of an engine captures it"
            )
        newer = [name for name in FLAGS if config[name]]
        if config["num_aux_hidden_states"] != NUM_FEATURES:
            newer.append("num_aux_hidden_states")
        if config["model_type"] == "qwen3":
            newer.append("Eagle3Qwen3ForCausalLM")
        if newer:
            notes.append(
                f"{', '.join(newer)}: read in vLLM 0.32 and 0.33; older ones may leave it out "
                "without a word"
            )
        if head.confidence is not None:
            notes.append("the confidence output is left out: these engines draft to a fixed length")
        return notes

    # Reading ------------------------------------------------------------------------------------

    def recognises(self, config: Mapping[str, Any], names: Collection[str]) -> bool:
        """The first layer has a norm for features, and nothing is another dialect's."""
        found = {name.removeprefix("model.").replace(OWN_FIRST, FIRST) for name in names}
        ours = f"{FIRST}hidden_norm.weight" in found and "speculators_model_type" not in config
        return ours and ("mask_hidden" in found) == (self.families == ("peagle",))

    def complete(self, config: dict[str, Any], target: TargetModel) -> dict[str, Any]:
        """What vLLM takes where keys are missing; layer ids that are only nested are SGLang's."""
        architecture = (config.get("architectures") or [""])[0]
        kind = ALIASES.get(architecture, config.get("model_type") or "llama")
        config = complete_layers(config)
        layers = config.get("num_hidden_layers") or 1
        kinds = config.get("layer_types") or [FULL] * layers
        nested = dict(config.get("eagle_config") or {})
        inner = nested.get(IDS)
        ids = config.get(IDS) or (from_outputs(inner) if inner else None)
        ids = ids or default_feature_layers(target.num_layers)
        before_fc = nested.get("norm_before_fc", config.get("norm_before_fc"))
        defaults = {
            "num_hidden_layers": layers,
            "draft_vocab_size": config.get("vocab_size"),
            "target_hidden_size": config.get("hidden_size"),
            "torch_dtype": config.get("dtype") or "float32",
            "tie_word_embeddings": False,
            "mlp_bias": False,
            "num_aux_hidden_states": len(inner or ids),
            **dict.fromkeys(FLAGS, False),
        }
        config |= {key: value for key, value in defaults.items() if config.get(key) is None}
        if architecture in ALIASES:
            config |= {"architectures": [ARCHITECTURES[kind]], "model_type": kind}
        return {
            **config,
            "layer_types": kinds,
            "sliding_window": config.get("sliding_window") if SLIDING in kinds else None,
            "norm_before_fc": bool(before_fc),
            IDS: ids,
            "eagle_config": {
                "use_aux_hidden_state": True,
                **nested,
                IDS: inner or to_outputs(ids),
                "norm_before_fc": bool(before_fc),
            },
        }

    def renamed(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Names that vLLM maps to the same parameters, or that trainers put a prefix to."""
        places = {"draft_id_to_target_id": OFFSETS}
        found = {}
        for name, tensor in tensors.items():
            short = name.removeprefix("model.").replace(OWN_FIRST, FIRST)
            found[places.get(short, short)] = tensor
        return without_identity(found)

    def config_problems(self, config: Mapping[str, Any]) -> list[str]:
        """Which class it is, layer ids, RoPE, windows, sizes."""
        wanted = [ARCHITECTURES.get(config["model_type"])]
        problems = []
        if config["architectures"] != wanted:
            classes = ", ".join(f"{value} ({key})" for key, value in ARCHITECTURES.items())
            problems.append(
                f"architectures {config['architectures']} with model_type "
                f"{config['model_type']!r} is not supported: one of {classes}"
            )
        problems += nested_id_problems(config) + window_problems(config)
        problems += rope_problems(config, extended=True)
        if len(set(config["layer_types"])) > 1:
            problems.append("layer_types: layers with and without a window are not supported")
        if config["fc_norm"] and config["norm_before_fc"]:
            problems.append("fc_norm and norm_before_fc are both set: choose one")
        if config["hidden_size"] != config["target_hidden_size"]:
            problems.append(
                f"hidden_size {config['hidden_size']} is not target_hidden_size "
                f"{config['target_hidden_size']}: such heads are not supported"
            )
        if config.get("quantization_config"):
            problems.append("quantization_config: quantized heads are not supported")
        if config["draft_vocab_size"] > config["vocab_size"]:
            problems.append("draft_vocab_size is larger than vocab_size")
        problems += type_problems(config)
        return problems

    def target_problems(self, config: Mapping[str, Any], target: TargetModel) -> list[str]:
        """Sizes, captured layers and the longest position."""
        sizes = size_problems(config, target, "target_hidden_size")
        return captured_problems(config[IDS], IDS, target) + sizes

    def specs(self, config: Mapping[str, Any]) -> list[TensorSpec]:
        """Of L layers, the norms that the switches ask for, and the vocabulary map."""
        whole = config["draft_vocab_size"] == config["vocab_size"]
        shape = (config["draft_vocab_size"], config["hidden_size"])
        return [
            *numbered_layers(config),
            TensorSpec("lm_head.weight", shape, optional=whole),
            self.embedding_spec(config),
            *vocab_specs(config, marks_optional=True),
        ]

    def embedding_spec(self, config: Mapping[str, Any]) -> TensorSpec:
        """(V, H), the target's where it is missing."""
        shape = (config["vocab_size"], config["hidden_size"])
        return TensorSpec(EMBEDDING, shape, optional=True, parameter=f"model.{EMBEDDING}")

    def tensor_problems(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> list[str]:
        """The vocabulary map."""
        return vocab_problems(config, tensors)

    def borrowed_problems(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: TargetModel
    ) -> list[str]:
        """None: an embedding that is not the target's is the head's own."""
        return []

    def hint(self, name: str, config: Mapping[str, Any]) -> str:
        """Of the vocabulary map."""
        return vocab_hint(name, config)

    def parts(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: TargetModel
    ) -> Parts:
        """An EAGLE-3 head."""
        state = head_state(tensors, target)
        own = EMBEDDING in tensors and is_own(tensors[EMBEDDING], target)
        if own:
            state[EMBEDDING] = tensors[EMBEDDING]
        return Parts("eagle3", {**head_options(config), "own_embedding": own}, state)


VLLM = VllmEagle3()
