"""Medusa heads (arXiv:2401.10774) in the form that vLLM up to 0.32.0 has; 0.33.0 has removed it.

``blocks.*`` and ``lm_heads.*``, or one ``lm_head`` for all heads (``original_lm_head``), and a
draft vocabulary, ``token_map`` of absolute ids. Read in the source of vLLM 0.32.0: its
configuration class takes any key that contains "num" and "heads" for ``num_heads``, and separate
output matrices are built for the whole vocabulary even with a map, so that only a shared one can
be cut.

Legend: H hidden, V target vocabulary, Vd draft vocabulary, K heads.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from drafters.base import Drafter
from drafters.export.borrowed import (
    TOKEN_MAP,
    copy_refusals,
    cut_to_map,
    map_problems,
    output_rows,
)
from drafters.export.dialect import KeySpec, Parts, TensorSpec, type_name
from drafters.export.dialects.medusa import MedusaForm, bare
from drafters.medusa import MedusaDrafter
from drafters.target import TargetModel

SHARED = "lm_head.weight"


class VllmMedusa(MedusaForm):
    """The form that vLLM's loader names its parameters by."""

    name = "vllm-medusa"
    engines = ("vllm",)
    block = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
    heads_key, layers_key = "num_heads", "num_hidden_layers"
    keys = (
        KeySpec("model_type", str, "medusa"),
        KeySpec("architectures", list, ["MedusaModel"]),
        KeySpec("hidden_size", int, positive=True),
        KeySpec("vocab_size", int, positive=True),
        KeySpec("truncated_vocab_size", int, positive=True),
        KeySpec("num_heads", int, positive=True),
        KeySpec("num_hidden_layers", int, positive=True),
        KeySpec("medusa_fc_bias", bool),
        KeySpec("original_lm_head", bool),
        KeySpec("torch_dtype", str),
    )

    def refusals(self, head: Drafter) -> list[str]:
        """An output matrix that is more than a matrix."""
        return copy_refusals(head) if head.config.shared_lm_head else []

    def served(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Not own matrices with a draft vocabulary: vLLM builds those for the whole one."""
        whole = config["truncated_vocab_size"] == config["vocab_size"]
        return self.engines if whole or config["original_lm_head"] else ()

    def config(self, head: Drafter) -> dict[str, Any]:
        """All keys of its configuration class: its defaults are those of one published model."""
        config = head.config
        return {
            "model_type": "medusa",
            "architectures": ["MedusaModel"],
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "truncated_vocab_size": config.draft_vocab_size,
            "num_heads": config.num_heads,
            "num_hidden_layers": config.num_layers,
            "medusa_fc_bias": True,
            "original_lm_head": config.shared_lm_head,
            "torch_dtype": type_name(next(head.parameters()).dtype),
        }

    def block_name(self, head: int, layer: int, kind: str) -> str:
        """``blocks.{head}.layers.{layer}.weight``."""
        return f"blocks.{head}.layers.{layer}.{kind}"

    def outputs(self, head: MedusaDrafter) -> dict[str, Tensor]:
        """One matrix for all heads or one each, and the ids of their rows."""
        state = head.state_dict()
        found = {name: state[name] for name in state if name.startswith("lm_heads.")}
        if head.config.shared_lm_head:
            found = {SHARED: output_rows(head)}
        return found if head.draft_vocab is None else {**found, TOKEN_MAP: head.draft_vocab}

    def notes(self, head: Drafter, config: Mapping[str, Any]) -> list[str]:
        """Of vLLM."""
        notes = super().notes(head, config)
        if not self.served(config):
            notes.append(
                "vLLM 0.32.0 builds separate output matrices for the whole vocabulary and refuses "
                "these of a draft vocabulary: train with shared_lm_head or the whole vocabulary"
            )
        return notes

    def recognises(self, config: Mapping[str, Any], names: Collection[str]) -> bool:
        """Blocks with layers."""
        return any(self.block.fullmatch(bare(name)) for name in names)

    def renamed(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Whole output matrices beside a map are cut to its rows, as vLLM does."""
        return cut_to_map(super().renamed(tensors))

    def adapted(self, config: dict[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Biases, one matrix for all, and a map are there if the file has them."""
        found = super().adapted(config, tensors)
        biased = any(name.startswith("blocks.") and name.endswith(".bias") for name in tensors)
        found.setdefault("medusa_fc_bias", biased)
        found.setdefault("original_lm_head", SHARED in tensors)
        if found.get("truncated_vocab_size") is None and TOKEN_MAP in tensors:
            found["truncated_vocab_size"] = len(tensors[TOKEN_MAP])
        return found

    def complete(self, config: dict[str, Any], target: TargetModel) -> dict[str, Any]:
        """What its configuration class would fill in, with the target's sizes."""
        found = {"model_type": "medusa", "architectures": ["MedusaModel"]}
        completed = super().complete({**found, **config}, target)
        if completed.get("truncated_vocab_size") is None:
            completed["truncated_vocab_size"] = completed["vocab_size"]
        return completed

    def config_problems(self, config: Mapping[str, Any]) -> list[str]:
        """Keys that vLLM takes for others: any that contain "num" and "heads" or "layers"."""
        problems = super().config_problems(config)
        for word, ours in (("heads", self.heads_key), ("layers", self.layers_key)):
            problems += [
                f"{key} must not be there: vLLM would take it for {ours}"
                for key in config
                if key != ours and "num" in key and word in key
            ]
        if config["truncated_vocab_size"] > config["vocab_size"]:
            problems.append("truncated_vocab_size is larger than vocab_size")
        return problems

    def specs(self, config: Mapping[str, Any]) -> list[TensorSpec]:
        """Residual blocks, output matrices, and the map of a draft vocabulary."""
        rows = config["truncated_vocab_size"]
        heads = range(config[self.heads_key])
        names = [SHARED] if config["original_lm_head"] else [f"lm_heads.{i}.weight" for i in heads]
        found = self.block_specs(config, bias=config["medusa_fc_bias"])
        found += [TensorSpec(name, (rows, config["hidden_size"])) for name in names]
        if rows < config["vocab_size"]:
            found.append(TensorSpec(TOKEN_MAP, (rows,), "int64"))
        return found

    def tensor_problems(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> list[str]:
        """The map."""
        return map_problems(config, tensors)

    def hint(self, name: str, config: Mapping[str, Any]) -> str:
        """Why a bias, a matrix or the map is unknown or missing."""
        if name.endswith(".bias"):
            return f": medusa_fc_bias is {str(config['medusa_fc_bias']).lower()}"
        if name.startswith("lm_head"):
            return f": original_lm_head is {str(config['original_lm_head']).lower()}"
        if name == TOKEN_MAP:
            below = config["truncated_vocab_size"] < config["vocab_size"]
            return f": truncated_vocab_size is {'below' if below else 'equal to'} vocab_size"
        return ""

    def parts(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: TargetModel
    ) -> Parts:
        """A Medusa head; one matrix for all that is not the target's is copied to each head."""
        heads = range(config[self.heads_key])
        if config["original_lm_head"]:
            outputs = [tensors[SHARED].clone() for _ in heads]
        else:
            outputs = [tensors[f"lm_heads.{i}.weight"] for i in heads]
        return self.head_parts(config, tensors, outputs, target)


VLLM_MEDUSA = VllmMedusa()
