"""EAGLE-1 heads (arXiv:2401.15077), which EAGLE-2 decodes with and HASS trains, in two forms.

``fc``, ``layers.0.*`` without an ``input_layernorm``, no norm at the end and no output matrix. The
authors and vLLM call the architecture ``LlamaForCausalLM``, SGLang calls it
``LlamaForCausalLMEagle``, and no folder is right for both: SGLang always builds the fusion with a
bias, random where the file has none, so its form has a bias of zeros, which the authors' loader
refuses; vLLM builds it without and drops a bias without a word. All of them draft from the target's
whole vocabulary with its own output matrix, so a draft vocabulary is left out.

Read too: the wrapper of older vLLM, ``{"model_type": "eagle", "model": {...}}``, with the target's
output matrix and possibly a ``token_map`` (absolute ids) in the file.

Read in source: vLLM 0.32.0, 0.33.0 and the wrapper's loader of earlier ones; SGLang 0.5.12, 0.5.23;
the authors' model.

Legend: H hidden, V target vocabulary, Vd draft vocabulary.
"""

from abc import abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from torch import Tensor

from drafters.base import Drafter
from drafters.export.borrowed import (
    TOKEN_MAP,
    cut_to_map,
    is_targets_output,
    map_problems,
    whole_vocabulary,
)
from drafters.export.dialect import (
    EMBEDDING,
    Dialect,
    KeySpec,
    Parts,
    TensorSpec,
    type_name,
    type_problems,
)
from drafters.export.fields import (
    FILE_KEYS,
    LAYER_FIELDS,
    PARSED_KEYS,
    TARGET_SIZES,
    complete_layers,
    layer_keys,
    llama_layer,
    logit_refusals,
    rope_keys,
    rope_problems,
    shape_refusals,
    special_tokens,
    target_refusals,
)
from drafters.target import TargetModel

FIRST = "layers.0.self_attn.q_proj.weight"
BIAS, OUTPUT = "fc.bias", "lm_head.weight"
AUTHORS, SGLANG = "LlamaForCausalLM", "LlamaForCausalLMEagle"
# Keys of other trainers that change what the head computes, where they are true.
FOREIGN_KEYS = ("mlp_bias", "add_para_norm", "use_input_layernorm_in_first_layer")
# And where they are false: norms that EAGLE-1 does without.
SKIPS = ("skip_prenorm", "skip_output_norm")
_OF_WRAPPER = ("model_type", "model", "architectures", "eagle_fc_bias")
_QKV = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
_ALIASES: tuple[list[str] | None, ...] = (  # of vLLM, and of targets with such biases
    None,
    [],
    ["EAGLEModel"],
    ["EagleLlamaForCausalLM"],
    ["Qwen2ForCausalLM"],
)


class Eagle1Form(Dialect):
    """What both forms share.

    Attributes:
        architecture: as config.json has it.
    """

    parsed_keys = (*PARSED_KEYS, "bias")
    target_sizes = TARGET_SIZES
    families = ("eagle1",)
    architecture: ClassVar[str]
    keys = (
        *FILE_KEYS,
        KeySpec("model_type", str, "llama"),
        KeySpec("num_hidden_layers", int, positive=True),
        KeySpec("qkv_bias", bool),
        KeySpec("bias", bool),
    )

    def refusals(self, head: Drafter) -> list[str]:
        """Other layers than Llama's, but for Qwen2's biases."""
        only = {"qk_norm": False, "sliding_window": None, "attention_bias": self.qkv_bias(head)}
        return shape_refusals(head, **only) + target_refusals(head) + logit_refusals(head)

    def servable(self, head: Drafter) -> Drafter:
        """Over the whole vocabulary."""
        return whole_vocabulary(head)

    def left_out(self, head: Drafter) -> tuple[str, ...]:
        """The confidence output and the draft vocabulary."""
        reduced = () if head.draft_vocab is None else ("draft_vocab",)
        return (*super().left_out(head), *reduced)

    def config(self, head: Drafter) -> dict[str, Any]:
        """The longest position and the special tokens are the target's."""
        return {
            "architectures": [self.architecture],
            "model_type": "llama",
            **layer_keys(head),
            "num_hidden_layers": head.config.num_layers,
            "vocab_size": head.config.vocab_size,
            **rope_keys(head),
            "hidden_act": "silu",
            "attention_bias": False,
            "qkv_bias": self.qkv_bias(head),
            "bias": self.biased(head),
            "tie_word_embeddings": False,
            "torch_dtype": type_name(next(head.parameters()).dtype),
            **special_tokens(head.target),
        }

    def qkv_bias(self, head: Drafter) -> bool:
        """``qkv_bias`` of config.json: to the authors and to vLLM biases of queries, keys and
        values, and only of those; SGLang has no such key.
        """
        return False

    def biased(self, head: Drafter) -> bool:
        """``bias`` of config.json, which the authors read as that of the fusion, vLLM and SGLang
        as that of the attention.
        """
        return False

    def tensors(self, head: Drafter) -> dict[str, Tensor]:
        """The head's own names are those of this dialect."""
        dropped = self.left_out(head)
        return {name: t for name, t in head.state_dict().items() if name not in dropped}

    def notes(self, head: Drafter, config: Mapping[str, Any]) -> list[str]:
        """What engines leave out."""
        notes = []
        if head.confidence is not None:
            notes.append("the confidence output is left out: these engines draft to a fixed length")
        if head.draft_vocab is not None:
            notes.append(
                f"the draft vocabulary of {head.config.draft_vocab_size} tokens is left out: "
                "engines draft EAGLE-1 from the target's whole vocabulary; acceptance will differ "
                "from what was measured with it"
            )
        return notes

    def recognises(self, config: Mapping[str, Any], names: Collection[str]) -> bool:
        """A fusion and a layer that has no norm before its attention."""
        bare = {name.removeprefix("model.") for name in names}
        others = {"layers.0.hidden_norm.weight", "hidden_norm.weight"}  # of EAGLE-3, of DFlash
        return {"fc.weight", FIRST} <= bare and not others & bare and self.claims(config)

    def claims(self, config: Mapping[str, Any]) -> bool:
        """Whether the config of an EAGLE-1 head is of this form."""
        return (config.get("architectures") == [SGLANG]) == (self.architecture == SGLANG)

    def adapted(self, config: dict[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Unwrapped, and with a bias if there is one."""
        if config.get("model_type") == "eagle":
            outer = {key: value for key, value in config.items() if key not in _OF_WRAPPER}
            config = {**outer, **(config.get("model") or {})} | {"bias": BIAS in tensors}
        biases = {"bias": BIAS in tensors, "qkv_bias": f"{FIRST[:-6]}bias" in tensors}
        found = {**biases, **config}
        if found.get("model_type") == "qwen2":  # its layer is Llama's with such biases
            found["model_type"] = "llama"
        if OUTPUT in tensors or TOKEN_MAP in tensors:
            rows = len(tensors[TOKEN_MAP]) if TOKEN_MAP in tensors else found.get("vocab_size")
            found["truncated_vocab_size"] = rows
        if found.get("architectures") in _ALIASES:
            found["architectures"] = [AUTHORS]
        return found

    def complete(self, config: dict[str, Any], target: TargetModel) -> dict[str, Any]:
        """What the authors and SGLang's users leave out."""
        config = complete_layers(config)
        defaults = {
            "model_type": "llama",
            "architectures": [self.architecture],
            "num_hidden_layers": 1,
            "max_position_embeddings": 2048,
            "torch_dtype": config.get("dtype") or "float32",
            "tie_word_embeddings": False,
        }
        return {**config, **{k: v for k, v in defaults.items() if config.get(k) is None}}

    def renamed(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Bare names."""
        return cut_to_map({name.removeprefix("model."): t for name, t in tensors.items()})

    def config_problems(self, config: Mapping[str, Any]) -> list[str]:
        """RoPE, sizes, and keys that the dialect does not have."""
        problems = [
            f"{key}={config[key]!r} is not supported" for key in FOREIGN_KEYS if config.get(key)
        ]
        problems += [f"{key}=False is not supported" for key in SKIPS if config.get(key) is False]
        problems += rope_problems(config)
        problems += type_problems(config)
        return problems

    @abstractmethod
    def has_bias(self, config: Mapping[str, Any]) -> bool:
        """Whether a file has a bias of the fusion."""

    def specs(self, config: Mapping[str, Any]) -> list[TensorSpec]:
        """Fusion, layers, copies of what is the target's, and the wrapper's map."""
        hidden, whole = config["hidden_size"], config["vocab_size"]
        rows = config.get("truncated_vocab_size") or whole
        found = [TensorSpec("fc.weight", (hidden, 2 * hidden), parameter="model.fc.weight")]
        if self.has_bias(config):
            found.append(TensorSpec(BIAS, (hidden,), parameter=f"model.{BIAS}"))
        for layer in range(config["num_hidden_layers"]):
            prefix = f"layers.{layer}"
            engine = f"model.layers.{layer}"
            weights = llama_layer(prefix, config, input_norm=layer > 0, engine=engine)
            found += weights
            if config["qkv_bias"]:
                found += [_bias(spec) for spec in weights if spec.name.endswith(_QKV)]
        found.append(
            TensorSpec(EMBEDDING, (whole, hidden), optional=True, parameter=f"model.{EMBEDDING}")
        )
        if config.get("truncated_vocab_size") is not None:  # of a wrapper
            found.append(TensorSpec(OUTPUT, (rows, hidden), optional=True))
            found += [TensorSpec(TOKEN_MAP, (rows,), "int64")] if rows < whole else []
        return found

    @abstractmethod
    def bias_hint(self, config: Mapping[str, Any]) -> str:
        """Why it must be there or must not."""

    def hint(self, name: str, config: Mapping[str, Any]) -> str:
        """Why a bias or a norm is unknown or missing."""
        if name == BIAS:
            return self.bias_hint(config)
        if name in ("layers.0.input_layernorm.weight", "norm.weight"):
            return ": EAGLE-1 has no norm before its first attention and none at its end"
        return ""

    def tensor_problems(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> list[str]:
        """The wrapper's map."""
        return map_problems(config, tensors)

    def borrowed_problems(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: TargetModel
    ) -> list[str]:
        """Embedding and output matrix must be the target's."""
        found = super().borrowed_problems(config, tensors, target)
        if OUTPUT in tensors and not is_targets_output(
            [tensors[OUTPUT]], target, tensors.get(TOKEN_MAP)
        ):
            found.append(
                f"{OUTPUT} is not the output matrix of {target.name!r}: EAGLE-1 heads have none of "
                "their own, or this one belongs to another target"
            )
        return found

    def parts(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: TargetModel
    ) -> Parts:
        """An EAGLE-1 head."""
        copied = (*LAYER_FIELDS, "vocab_size", "rope_theta", "max_position_embeddings")
        options = {name: config[name] for name in copied}
        options["num_layers"] = config["num_hidden_layers"]
        options |= {"fc_bias": BIAS in tensors, "attention_bias": config["qkv_bias"]}
        not_weights = (EMBEDDING, OUTPUT, TOKEN_MAP)
        state = {name: tensor for name, tensor in tensors.items() if name not in not_weights}
        if TOKEN_MAP in tensors:
            state["draft_vocab"] = tensors[TOKEN_MAP].sort().values
            options["draft_vocab_size"] = len(tensors[TOKEN_MAP])
        return Parts("eagle1", options, state)


class Eagle1(Eagle1Form):
    """As the authors and vLLM have them, with a copy of the target's embedding, without which the
    authors' loader fails.
    """

    name = "eagle1"
    engines = ("vllm", "eagle")
    embeddings = "always"
    architecture = AUTHORS
    keys = (*Eagle1Form.keys, KeySpec("architectures", list, [AUTHORS]))

    def served(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Of heads with a bias the authors' code alone."""
        return ("eagle",) if config["bias"] else self.engines

    def biased(self, head: Drafter) -> bool:
        """As the head is."""
        return head.config.fc_bias

    def qkv_bias(self, head: Drafter) -> bool:
        """As the head is."""
        return head.config.attention_bias

    def tensors(self, head: Drafter) -> dict[str, Tensor]:
        """With the embedding."""
        embedding = head.target.embedding.get_parameter("weight")
        return super().tensors(head) | {EMBEDDING: embedding.to(next(head.parameters()).dtype)}

    def notes(self, head: Drafter, config: Mapping[str, Any]) -> list[str]:
        """What engines make of a bias, and of a width that the authors' code does not know."""
        notes = super().notes(head, config)
        if config["bias"]:
            notes.append(
                "the fusion has a bias, which vLLM leaves out without a word: train with "
                "fc_bias=False to serve it there"
            )
        if config["head_dim"] * config["num_attention_heads"] != config["hidden_size"]:
            notes.append("the authors' code knows no head_dim but hidden_size / heads: use vLLM")
        notes.append("vLLM drafts EAGLE-1 as a chain; SGLang needs the eagle1-sglang dialect")
        return notes

    def has_bias(self, config: Mapping[str, Any]) -> bool:
        """As the config says."""
        return config["bias"]

    def bias_hint(self, config: Mapping[str, Any]) -> str:
        """The config decides."""
        return f": config.json says bias {str(config['bias']).lower()}"


def _bias(spec: TensorSpec) -> TensorSpec:
    """Of a projection, beside its weight."""
    parameter = spec.parameter and spec.parameter.removesuffix("weight") + "bias"
    return TensorSpec(
        spec.name.removesuffix("weight") + "bias", spec.shape[:1], parameter=parameter
    )


EAGLE1 = Eagle1()
