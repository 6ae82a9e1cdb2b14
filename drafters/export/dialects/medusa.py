"""Medusa heads (arXiv:2401.10774) as their authors have them; vLLM's own form is in
``drafters.export.dialects.medusa_vllm``.

``medusa_lm_head.safetensors`` (older: ``.pt``) with the names of a list of sequences,
``{head}.{layer}.linear.*`` and ``{head}.{L}.weight``. The config has neither ``model_type`` nor
``architectures``, and must not: Text Generation Inference takes a config with architectures for
another kind of head. That server and TensorRT-LLM read it; so does vLLM up to 0.32.0, which drops
the biases of the residual blocks unless the config says ``medusa_fc_bias``.

No form of Medusa says that a head borrows the target's output matrix. Such a head is written with
copies of it, and copies are recognised when read.

Read in source: vLLM 0.32.0 (0.33.0 has no Medusa any more), the loaders of Text Generation
Inference and TensorRT-LLM, and the authors' model, which ties the residual blocks of a head where
there are several and reads ``medusa_lm_head.pt`` alone.

Legend: H hidden, V target vocabulary, Vd draft vocabulary, K heads, L residual blocks per head.
"""

import logging
import re
from abc import abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from drafters.base import Drafter
from drafters.export.borrowed import TOKEN_MAP, copy_refusals, is_targets_output, output_rows
from drafters.export.dialect import (
    Dialect,
    KeySpec,
    Parts,
    TensorSpec,
    type_name,
    type_problems,
)
from drafters.export.fields import public_name
from drafters.medusa import MedusaDrafter
from drafters.target import TargetModel

logger = logging.getLogger(__name__)

_PREFIXES = ("medusa_heads.", "medusa_head.")
_SPELLINGS = (("medusa_num_heads", "num_heads"), ("medusa_num_layers", "num_hidden_layers"))


def bare(name: str) -> str:
    """A tensor's name without the prefix that some trainers save."""
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


class MedusaForm(Dialect):
    """What both forms share.

    Attributes:
        block: a tensor of a residual block: head, layer, weight or bias.
        heads_key, layers_key: of config.json.
    """

    families = ("medusa",)
    target_sizes: ClassVar[Mapping[str, str]] = {
        "hidden_size": "hidden_size",
        "vocab_size": "vocab_size",
    }
    unknown_to_transformers = True
    block: ClassVar[re.Pattern[str]]
    heads_key: ClassVar[str]
    layers_key: ClassVar[str]

    def tensors(self, head: Drafter) -> dict[str, Tensor]:
        """Blocks as they are; the output matrices, or copies of the target's where it is shared."""
        assert isinstance(head, MedusaDrafter)
        state = head.state_dict()
        found = {
            self.block_name(i, j, kind): state[f"blocks.{i}.{j}.linear.{kind}"]
            for i in range(head.config.num_heads)
            for j in range(head.config.num_layers)
            for kind in ("weight", "bias")
        }
        return found | self.outputs(head)

    @abstractmethod
    def block_name(self, head: int, layer: int, kind: str) -> str:
        """Of a tensor of a residual block."""

    @abstractmethod
    def outputs(self, head: MedusaDrafter) -> dict[str, Tensor]:
        """Output matrices by their names."""

    def block_specs(self, config: Mapping[str, Any], bias: bool) -> list[TensorSpec]:
        """Of all residual blocks; an untrained one is zero."""
        hidden, found = config["hidden_size"], []
        for i in range(config[self.heads_key]):
            for j in range(config[self.layers_key]):
                name = f"blocks.{i}.layers.{j}"
                weight = self.block_name(i, j, "weight")
                found.append(
                    TensorSpec(weight, (hidden, hidden), parameter=f"{name}.weight", zero=True)
                )
                if bias:
                    found.append(
                        TensorSpec(
                            self.block_name(i, j, "bias"), (hidden,), parameter=f"{name}.bias"
                        )
                    )
        return found

    def complete(self, config: dict[str, Any], target: TargetModel) -> dict[str, Any]:
        """Sizes are the target's."""
        defaults = {
            self.layers_key: 1,
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
            "torch_dtype": config.get("dtype") or "float32",
        }
        return {**config, **{k: v for k, v in defaults.items() if config.get(k) is None}}

    def adapted(self, config: dict[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """The number of heads that the file has (published configs name fewer), under the
        dialect's own key.
        """
        found = dict(config)
        for ours, names in zip((self.heads_key, self.layers_key), _SPELLINGS, strict=True):
            for theirs in set(names) - {ours}:
                found.setdefault(ours, found.pop(theirs, None))
        places = [match.groups() for name in tensors if (match := self.block.fullmatch(name))]
        if not places:
            return found
        heads, layers = (1 + max(int(place[axis]) for place in places) for axis in (0, 1))
        named = found[self.heads_key] or heads
        if named < heads:
            logger.warning(
                "config.json names %d heads, the file has %d: all are read", named, heads
            )
        return {
            **found,
            self.heads_key: max(named, heads),
            self.layers_key: found[self.layers_key] or layers,
        }

    def renamed(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Without the prefix that some trainers save."""
        return {bare(name): tensor for name, tensor in tensors.items()}

    def config_problems(self, config: Mapping[str, Any]) -> list[str]:
        """An unknown type, and keys that change what the head computes."""
        problems = []
        problems += type_problems(config)
        if config.get("logit_scale", 1.0) != 1.0:
            problems.append(f"logit_scale={config['logit_scale']} is not supported")
        return problems

    def head_parts(
        self,
        config: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        outputs: list[Tensor],
        target: TargetModel,
    ) -> Parts:
        """A Medusa head.

        Args:
            config, tensors: that passed all checks.
            outputs: the heads' matrices, K of (Vd, H); none where they borrow the target's.
            target: of the head.
        """
        kept = tensors.get(TOKEN_MAP)
        shared = not outputs or is_targets_output(outputs, target, kept)
        options = {
            "num_heads": config[self.heads_key],
            "num_layers": config[self.layers_key],
            "shared_lm_head": shared,
            "draft_vocab_size": config["vocab_size"] if kept is None else len(kept),
        }
        state = {}
        for name, tensor in tensors.items():
            if match := self.block.fullmatch(name):
                state[f"blocks.{match[1]}.{match[2]}.linear.{match[3]}"] = tensor
        for name in [name for name in state if name.endswith("weight")]:
            bias = name.removesuffix("weight") + "bias"
            state.setdefault(bias, torch.zeros(config["hidden_size"], dtype=state[name].dtype))
        order = None if kept is None else kept.argsort()
        if kept is not None:
            state["draft_vocab"] = kept[order]
        if not shared:
            for i, matrix in enumerate(outputs):
                state[f"lm_heads.{i}.weight"] = matrix if order is None else matrix[order]
        return Parts("medusa", options, state)

    def notes(self, head: Drafter, config: Mapping[str, Any]) -> list[str]:
        """What serving does not do with it."""
        notes = [
            "vLLM serves Medusa up to 0.32.0 and has removed it in 0.33.0; it drafts the likeliest "
            f"token of each head, no tree, and no more than the {head.config.num_heads} tokens "
            "that there are heads for (num_speculative_tokens)",
            "SGLang and llama.cpp have no Medusa",
        ]
        if head.confidence is not None:
            notes.append("the confidence output is left out: these engines draft to a fixed length")
        return notes


class OfficialMedusa(MedusaForm):
    """The authors' form."""

    name = "medusa"
    engines = ("vllm", "tgi", "tensorrt-llm")
    weights = "medusa_lm_head.safetensors"
    block = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
    heads_key, layers_key = "medusa_num_heads", "medusa_num_layers"
    keys = (
        KeySpec("medusa_num_heads", int, positive=True),
        KeySpec("medusa_num_layers", int, positive=True),
        KeySpec("medusa_fc_bias", bool, True),
        KeySpec("base_model_name_or_path", str),
        KeySpec("version", str),
        KeySpec("hidden_size", int, positive=True),
        KeySpec("vocab_size", int, positive=True),
        KeySpec("torch_dtype", str),
    )

    def refusals(self, head: Drafter) -> list[str]:
        """A draft vocabulary, for which this form has no map."""
        found = copy_refusals(head) if head.config.shared_lm_head else []
        if head.draft_vocab is not None:
            found.append(
                f"draft_vocab_size={head.config.draft_vocab_size}: this form has no map of a draft "
                "vocabulary: write the vllm-medusa dialect, or train with the whole vocabulary"
            )
        return found

    def config(self, head: Drafter) -> dict[str, Any]:
        """The authors' keys, and those without which vLLM guesses sizes and drops biases."""
        config = head.config
        return {
            "medusa_num_heads": config.num_heads,
            "medusa_num_layers": config.num_layers,
            "medusa_fc_bias": True,
            "base_model_name_or_path": public_name(head),
            "version": "2",
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "torch_dtype": type_name(next(head.parameters()).dtype),
        }

    def block_name(self, head: int, layer: int, kind: str) -> str:
        """``{head}.{layer}.linear.weight``."""
        return f"{head}.{layer}.linear.{kind}"

    def outputs(self, head: MedusaDrafter) -> dict[str, Tensor]:
        """K matrices, each the last of its sequence."""
        last, heads, state = head.config.num_layers, head.config.num_heads, head.state_dict()
        if head.config.shared_lm_head:
            return {f"{i}.{last}.weight": output_rows(head).clone() for i in range(heads)}
        return {f"{i}.{last}.weight": state[f"lm_heads.{i}.weight"] for i in range(heads)}

    def notes(self, head: Drafter, config: Mapping[str, Any]) -> list[str]:
        """Of the programs that read this form."""
        notes = super().notes(head, config)
        if head.config.shared_lm_head:
            notes.append(
                "each of the heads has a copy of the target's output matrix in the file: the form "
                "cannot say that they share it"
            )
        if head.config.num_layers > 1:
            notes.append(
                "the authors' own code ties the residual blocks of a head to one another and would "
                "load the last block of each everywhere; the engines named here keep them apart"
            )
        return notes

    def recognises(self, config: Mapping[str, Any], names: Collection[str]) -> bool:
        """A list of sequences of residual blocks."""
        return any(self.block.fullmatch(bare(name)) for name in names)

    def complete(self, config: dict[str, Any], target: TargetModel) -> dict[str, Any]:
        """Older files name the base model and the counts alone."""
        found = {"base_model_name_or_path": target.name, "version": "1", "medusa_fc_bias": True}
        return super().complete({**found, **config}, target)

    def config_problems(self, config: Mapping[str, Any]) -> list[str]:
        """Keys that make a server take the folder for something else."""
        problems = super().config_problems(config)
        if "architectures" in config:
            problems.append(
                "architectures must not be there: Text Generation Inference then looks for another "
                "kind of head"
            )
        return problems

    def adapted(self, config: dict[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Without the architecture that some trainers copy from the base model."""
        found = super().adapted(config, tensors)
        found.pop("architectures", None)
        return found

    def specs(self, config: Mapping[str, Any]) -> list[TensorSpec]:
        """Residual blocks and output matrices; Text Generation Inference reads files without the
        latter, too, as heads that share the target's.
        """
        last, shape = config[self.layers_key], (config["vocab_size"], config["hidden_size"])
        return self.block_specs(config, bias=True) + [
            TensorSpec(f"{i}.{last}.weight", shape, optional=True, parameter=f"lm_heads.{i}.weight")
            for i in range(config[self.heads_key])
        ]

    def tensor_problems(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> list[str]:
        """Output matrices are there for all heads or for none."""
        names = [f"{i}.{config[self.layers_key]}.weight" for i in range(config[self.heads_key])]
        missing = [name for name in names if name not in tensors]
        if missing and len(missing) < len(names):
            return [f"missing tensor {missing[0]}: the other heads have an output matrix"]
        return []

    def parts(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: TargetModel
    ) -> Parts:
        """A Medusa head."""
        names = [f"{i}.{config[self.layers_key]}.weight" for i in range(config[self.heads_key])]
        return self.head_parts(
            config, tensors, [tensors[name] for name in names if name in tensors], target
        )


OFFICIAL_MEDUSA = OfficialMedusa()
