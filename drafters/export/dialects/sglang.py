"""EAGLE-3 heads (arXiv:2503.01840) as SGLang, SpecForge, official EAGLE and llama.cpp have them.

A folder with ``config.json`` and ``model.safetensors``, tensors named ``midlayer.*``. Layer ids are
written twice: at the top level as ``hidden_states`` indices (vLLM, llama.cpp), nested in
``eagle_config`` one lower (SGLang counts outputs of layers). ``norm_before_fc`` is asked for there
first, then at the top level (SGLang 0.5.23, vLLM); llama.cpp reads the top level.

Traps: SGLang has no ``norm_before_residual``; 0.5.12 has no ``norm_before_fc`` either and leaves
the norm out without a word. Where ``draft_vocab_size`` is null SGLang puts the target's output
matrix in the place of one in the file, vLLM takes the file's: refused unless they are the same.

Legend: H draft hidden, Ht target hidden, F captured layers.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from drafters.base import Drafter
from drafters.export.borrowed import is_copy
from drafters.export.dialect import EMBEDDING, KeySpec, Parts, TensorSpec, type_name
from drafters.export.dialects.eagle3_fields import (
    COMMON_KEYS,
    COMMON_PARSED,
    FIRST,
    IDS,
    NUM_FEATURES,
    OUTPUT,
    OWN_FIRST,
    SWITCHES,
    Eagle3Form,
    common_problems,
    completed_eagle_config,
    eagle_config,
    head_options,
    head_state,
    numbered_layers,
)
from drafters.export.fields import (
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

ARCHITECTURE = "LlamaForCausalLMEagle3"
IMPLIED = {
    "num_aux_hidden_states": NUM_FEATURES,
    "norm_before_residual": False,
    "sliding_window": None,
}
"""Keys of the other EAGLE-3 dialects that this one needs not say."""
# Keys of other trainers that change what the head computes; no head of this dialect has them.
FOREIGN_KEYS = ("norm_before_residual", "bias", "mlp_bias", "qkv_bias")
BORROWS = "load_lm_head_from_target"
"""SGLang's name of what it does where ``draft_vocab_size`` is null."""


class SglangEagle3(Eagle3Form):
    """The most widely deployed form of EAGLE-3."""

    name = "sglang"
    parsed_keys = COMMON_PARSED
    engines = ("sglang", "vllm", "llama.cpp")
    keys = (
        *COMMON_KEYS,
        KeySpec("architectures", list, [ARCHITECTURE]),
        KeySpec("model_type", str, "llama"),
        KeySpec("num_hidden_layers", int, 1),
    )

    def refusals(self, head: Drafter) -> list[str]:
        """Other layers than one of Llama's, other numbers of features than three."""
        found = shape_refusals(
            head,
            num_layers=1,
            qk_norm=False,
            sliding_window=None,
            norm_before_residual=False,
            own_embedding=False,
            rope_extension=head.config.rope_extension,
        )
        if len(head.feature_layers) != NUM_FEATURES:
            found.append(
                f"feature_layers {list(head.feature_layers)}: engines of this dialect fuse exactly "
                f"{NUM_FEATURES} layers"
            )
        return found + target_refusals(head)

    def served(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """llama.cpp has no place for EAGLE-3.1's norms, and stretched RoPE was not read there."""
        newer = config["fc_norm"] or config["norm_output"] or config["rope_scaling"]
        return ("sglang", "vllm") if newer else self.engines

    def config(self, head: Drafter) -> dict[str, Any]:
        """The longest position and the special tokens are the target's."""
        config = head.config
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "llama",
            **layer_keys(head),
            "num_hidden_layers": 1,
            "target_hidden_size": head.target.hidden_size,
            "vocab_size": config.vocab_size,
            "draft_vocab_size": config.draft_vocab_size,
            **{name: getattr(config, name) for name in SWITCHES},
            **rope_keys(head),
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "torch_dtype": type_name(next(head.parameters()).dtype),
            **special_tokens(head.target),
            **eagle_config(head),
        }

    def tensors(self, head: Drafter) -> dict[str, Tensor]:
        """The head's own names are those of this dialect."""
        dropped = {*self.left_out(head), "draft_vocab"}
        own = {name: t for name, t in head.state_dict().items() if name not in dropped}
        return own | vocab_tensors(head)

    def notes(self, head: Drafter, config: Mapping[str, Any]) -> list[str]:
        """Layers and switches that not every version of an engine knows."""
        notes = []
        if config[IDS][0] == 0:
            notes.append(
                "feature layer 0 (the embedding) is SGLang's layer id -1, which several of its "
                "models cannot capture: check the acceptance length when serving"
            )
        if config["fc_norm"] or config["norm_output"]:
            notes.append(
                "fc_norm and norm_output are EAGLE-3.1: engines older than them ignore the keys"
            )
        if config["norm_before_fc"]:
            notes.append(
                "norm_before_fc: read in SGLang 0.5.23 and vLLM 0.32; SGLang 0.5.12 leaves the "
                "norm out without a word"
            )
        if head.confidence is not None:
            notes.append("the confidence output is left out: these engines draft to a fixed length")
        return notes

    def recognises(self, config: Mapping[str, Any], names: Collection[str]) -> bool:
        """The first layer is called ``midlayer``, and its residual is SGLang's. Files without
        tensors that engines do without (``t2d``, a borrowed output matrix) are read as vLLM's.
        """
        if config.get("norm_before_residual") or "mask_hidden" in names:
            return False
        borrows = config.get("draft_vocab_size") is None and OUTPUT not in names
        if borrows or ("d2t" in names and "t2d" not in names):
            return False
        return f"{OWN_FIRST}hidden_norm.weight" in names

    def complete(self, config: dict[str, Any], target: TargetModel) -> dict[str, Any]:
        """What SpecForge and official EAGLE leave out."""
        config = complete_layers(config)
        defaults = {
            "num_hidden_layers": 1,
            "draft_vocab_size": config.get("vocab_size"),
            "target_hidden_size": config.get("hidden_size"),
            "torch_dtype": config.get("dtype", "float32"),
            "fc_norm": bool(config.get("use_aux_norm", False)),
            "norm_output": False,
            "tie_word_embeddings": False,
        }
        config |= {key: value for key, value in defaults.items() if config.get(key) is None}
        if config.get("architectures") == ["LlamaForCausalLM"]:  # official EAGLE's
            config["architectures"] = [ARCHITECTURE]
        return {**config, **completed_eagle_config(config, target)}

    def adapted(self, config: dict[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Marked where SGLang would replace the file's output matrix."""
        whole = "draft_vocab_size" in config and config["draft_vocab_size"] is None
        return {**config, BORROWS: True} if whole and OUTPUT in tensors else config

    def renamed(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """SpecForge saves a map of the whole vocabulary, too."""
        return without_identity(tensors)

    def config_problems(self, config: Mapping[str, Any]) -> list[str]:
        """Layer ids, RoPE, sizes, and keys that the dialect does not have."""
        problems = [
            f"{key}={config[key]!r} is not supported" for key in FOREIGN_KEYS if config.get(key)
        ]
        if len(config[IDS]) != NUM_FEATURES:
            problems.append(f"{IDS} must be {NUM_FEATURES} layer ids, got {config[IDS]}")
        return problems + common_problems(config)

    def specs(self, config: Mapping[str, Any]) -> list[TensorSpec]:
        """Of one layer, the norms that the switches ask for, and the vocabulary map."""
        hidden, table = config["hidden_size"], (config["vocab_size"], config["hidden_size"])
        network = (
            replace(spec, name=spec.name.replace(FIRST, OWN_FIRST))
            for spec in numbered_layers({**config, **IMPLIED})
        )
        return [
            *network,
            TensorSpec(OUTPUT, (config["draft_vocab_size"], hidden)),
            TensorSpec(EMBEDDING, table, optional=True, parameter=f"model.{EMBEDDING}"),
            *vocab_specs(config),
        ]

    def borrowed_problems(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: TargetModel
    ) -> list[str]:
        """The embedding, and an output matrix that SGLang would replace."""
        found = super().borrowed_problems(config, tensors, target)
        if config.get(BORROWS) and not is_copy(tensors[OUTPUT], target.lm_head.weight):
            found.append(
                f"draft_vocab_size is null beside {OUTPUT}, which is not the output matrix of "
                f"{target.name!r}: SGLang would draft with the target's, vLLM with the file's; "
                f"write draft_vocab_size {config['vocab_size']} if the head has its own, or take "
                f"{OUTPUT} out"
            )
        return found

    def parts(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: TargetModel
    ) -> Parts:
        """An EAGLE-3 head."""
        return Parts("eagle3", head_options({**config, **IMPLIED}), head_state(tensors, target))


SGLANG = SglangEagle3()
