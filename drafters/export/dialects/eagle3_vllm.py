"""EAGLE-3 heads (arXiv:2503.01840) as vLLM's own loader reads them (its releases 0.32 and 0.33).

A folder with ``config.json`` and ``model.safetensors``, tensors named ``layers.0.*``. It has places
for what SGLang's dialect has none for: further layers, any number of captured layers, norms of
queries and keys (the layers are then Qwen3's), sliding windows, ``norm_before_residual`` and an
embedding of the head's own.

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
from drafters.export.dialect import (
    EMBEDDING,
    KeySpec,
    Parts,
    TensorSpec,
    type_name,
)
from drafters.export.dialects.eagle3_fields import (
    ALIASES,
    ARCHITECTURES,
    FIRST,
    FLAGS,
    IDS,
    KEYS,
    NUM_FEATURES,
    OUTPUT,
    OWN_FIRST,
    PARSED,
    Eagle3Form,
    common_problems,
    completed_eagle_config,
    eagle_config,
    head_options,
    head_state,
    is_own,
    numbered_layers,
)
from drafters.export.dialects.speculators import FULL, SLIDING, window_problems
from drafters.export.fields import (
    OFFSETS,
    complete_layers,
    layer_keys,
    rope_keys,
    shape_refusals,
    special_tokens,
    target_refusals,
    vocab_specs,
    vocab_tensors,
    without_identity,
)
from drafters.target import TargetModel


class VllmEagle3(Eagle3Form):
    """EAGLE-3 for vLLM's native loader."""

    name = "vllm"
    parsed_keys = PARSED
    engines: ClassVar[tuple[str, ...]] = ("vllm", "llama.cpp")
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
        config = head.config
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
            "num_aux_hidden_states": len(head.feature_layers),
            **eagle_config(head),
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
        captured = completed_eagle_config(config, target)
        defaults = {
            "num_hidden_layers": layers,
            "draft_vocab_size": config.get("vocab_size"),
            "target_hidden_size": config.get("hidden_size"),
            "torch_dtype": config.get("dtype") or "float32",
            "tie_word_embeddings": False,
            "mlp_bias": False,
            "num_aux_hidden_states": len(captured["eagle_config"][IDS]),
            **dict.fromkeys(FLAGS, False),
        }
        config |= {key: value for key, value in defaults.items() if config.get(key) is None}
        if architecture in ALIASES:
            config |= {"architectures": [ARCHITECTURES[kind]], "model_type": kind}
        return {
            **config,
            "layer_types": kinds,
            "sliding_window": config.get("sliding_window") if SLIDING in kinds else None,
            **captured,
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
        problems += common_problems(config) + window_problems(config)
        if len(config[IDS]) != config["num_aux_hidden_states"]:
            problems.append(
                f"num_aux_hidden_states is {config['num_aux_hidden_states']} for "
                f"{len(config[IDS])} layers"
            )
        if len(set(config["layer_types"])) > 1:
            problems.append("layer_types: layers with and without a window are not supported")
        if config.get("quantization_config"):
            problems.append("quantization_config: quantized heads are not supported")
        return problems

    def specs(self, config: Mapping[str, Any]) -> list[TensorSpec]:
        """Of L layers, the norms that the switches ask for, and the vocabulary map."""
        whole = config["draft_vocab_size"] == config["vocab_size"]
        shape = (config["draft_vocab_size"], config["hidden_size"])
        return [
            *numbered_layers(config),
            TensorSpec(OUTPUT, shape, optional=whole),
            self.embedding_spec(config),
            *vocab_specs(config, marks_optional=True),
        ]

    def embedding_spec(self, config: Mapping[str, Any]) -> TensorSpec:
        """(V, H), the target's where it is missing."""
        shape = (config["vocab_size"], config["hidden_size"])
        return TensorSpec(EMBEDDING, shape, optional=True, parameter=f"model.{EMBEDDING}")

    def borrowed_problems(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: TargetModel
    ) -> list[str]:
        """None: an embedding that is not the target's is the head's own."""
        return []

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
