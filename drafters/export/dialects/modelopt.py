"""EAGLE-3 heads (arXiv:2503.01840) as NVIDIA's ModelOpt writes and TensorRT-LLM reads them.

vLLM's tensor names without ``t2d`` and ``embed_tokens``, and what the layer is made of in
``eagle_config``: there layer ids count outputs of layers, as SGLang's do. Read in ModelOpt 0.47.0
(its exporter and its list of allowed names) and in TensorRT-LLM's source (its EAGLE-3 model, of
which ``norm_before_fc`` and ``fc_norm`` are newer parts); neither was run.

Traps: ModelOpt writes ids only there, vLLM reads them only at the top level: both are written.
TensorRT-LLM captures [1, n//2-1, n-4] unless its own ``eagle3_layers_to_capture`` says otherwise.
Of further layers ModelOpt names the norm ``input_layernorm``, TensorRT-LLM ``hidden_norm``: heads
with more than one layer are refused, as are those of MLA layers and of parallel heads.

ModelOpt trains with plain RoPE and writes, unless told otherwise, YaRN of factor 32 over 2048
positions. The module that it trains (0.47) norms the feature twice, by ``input_layernorm`` and then
by ``hidden_norm``; TensorRT-LLM and vLLM norm it once. Heads are computed here as engines serve
them, in both.

Legend: H draft hidden, F captured layers.
"""

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from drafters.base import Drafter
from drafters.config import default_feature_layers
from drafters.export.dialect import EMBEDDING, KeySpec, TensorSpec
from drafters.export.dialects.eagle3_fields import FIRST, IDS, KEYS
from drafters.export.dialects.eagle3_vllm import VllmEagle3
from drafters.export.fields import MARKS, shape_refusals, target_refusals, to_outputs
from drafters.target import TargetModel

LAYER = {
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
}
"""Of ``eagle_config``: what an EAGLE-3 layer is made of, and no parallel heads."""
UNUSED = {"parallel_draft_heads_num_layers": 1}
"""Without a meaning where there are no parallel heads; ModelOpt writes it."""


class ModeloptEagle3(VllmEagle3):
    """EAGLE-3 for TensorRT-LLM; vLLM reads it too."""

    name = "modelopt"
    engines = ("tensorrt-llm", "vllm")
    embeddings = "never"
    keys = (*KEYS, KeySpec("model_type", str, "llama"), KeySpec("num_hidden_layers", int, 1))

    def refusals(self, head: Drafter) -> list[str]:
        """What TensorRT-LLM's model does not have."""
        found = shape_refusals(
            head,
            num_layers=1,
            qk_norm=False,
            sliding_window=None,
            norm_before_residual=False,
            own_embedding=False,
            rope_extension=head.config.rope_extension,
        )
        if len(head.feature_layers) < 2:
            found.append(
                f"feature_layers {list(head.feature_layers)}: TensorRT-LLM has no fusion for a "
                "single layer: use two or more"
            )
        return found + target_refusals(head)

    def served(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Both."""
        return self.engines

    def config(self, head: Drafter) -> dict[str, Any]:
        """What the layer is made of too."""
        config = super().config(head)
        after_norm = {"return_hidden_post_norm": head.config.norm_output}
        return {
            **config,
            "eagle_config": {**config["eagle_config"], **LAYER, **UNUSED, **after_norm},
        }

    def tensors(self, head: Drafter) -> dict[str, Tensor]:
        """ModelOpt's names have no ``t2d`` among them."""
        return {name: tensor for name, tensor in super().tensors(head).items() if name != MARKS}

    def notes(self, head: Drafter, config: Mapping[str, Any]) -> list[str]:
        """Where TensorRT-LLM is told which layers to capture."""
        notes = super().notes(head, config)
        if config[IDS] != default_feature_layers(head.target.num_layers):
            notes.append(
                "TensorRT-LLM captures its default layers unless its speculative_config says "
                f"eagle3_layers_to_capture: {to_outputs(config[IDS])}"
            )
        return notes

    def recognises(self, config: Mapping[str, Any], names: Collection[str]) -> bool:
        """``eagle_config`` says what the layer is made of."""
        nested = config.get("eagle_config") or {}
        return super().recognises(config, names) and any(name in nested for name in LAYER)

    def complete(self, config: dict[str, Any], target: TargetModel) -> dict[str, Any]:
        """TensorRT-LLM takes either key for feeding the normed output back."""
        config = super().complete(config, target)
        nested = config["eagle_config"]
        after_norm = config["norm_output"] or bool(nested.get("return_hidden_post_norm"))
        return {
            **config,
            "norm_output": after_norm,
            "eagle_config": {**LAYER, **nested, "return_hidden_post_norm": after_norm},
        }

    def config_problems(self, config: Mapping[str, Any]) -> list[str]:
        """Parts of the layer that EAGLE-3's has or has not."""
        nested = config["eagle_config"]
        problems = [
            f"eagle_config.{key} must be {value!r}, got {nested.get(key)!r}"
            for key, value in LAYER.items()
            if nested.get(key) != value
        ]
        if nested.get("eh_proj_before_attn"):
            problems.append("eagle_config.eh_proj_before_attn is not supported")
        if config["norm_before_residual"]:
            problems.append("norm_before_residual=True: TensorRT-LLM does not have it")
        if bool(nested.get("return_hidden_post_norm")) != config["norm_output"]:
            problems.append(
                f"norm_output is {config['norm_output']} but eagle_config.return_hidden_post_norm "
                f"is {nested.get('return_hidden_post_norm')}"
            )
        return problems + super().config_problems(config)

    def specs(self, config: Mapping[str, Any]) -> list[TensorSpec]:
        """Without the target's embedding."""
        return [spec for spec in super().specs(config) if spec.name != EMBEDDING]

    def hint(self, name: str, config: Mapping[str, Any]) -> str:
        """Of parallel heads and MLA layers too."""
        if name.startswith("parallel_draft_heads."):
            return ": parallel heads are not supported"
        if name.startswith(f"{FIRST}self_attn.") and ("_a_" in name or "_b_" in name):
            return ": MLA layers are not supported"
        return super().hint(name, config)


MODELOPT = ModeloptEagle3()
