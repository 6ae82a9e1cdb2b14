"""EAGLE-1 heads (arXiv:2401.15077) as SGLang has them: see ``drafters.export.dialects.eagle1``."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from drafters.base import Drafter
from drafters.export.dialect import KeySpec, Parts
from drafters.export.dialects.eagle1 import BIAS, SGLANG, Eagle1Form
from drafters.target import TargetModel


class SglangEagle1(Eagle1Form):
    """As SGLang has them: always with a bias of the fusion, of zeros where the head has none."""

    name = "eagle1-sglang"
    engines = ("sglang",)
    embeddings = "optional"
    architecture = SGLANG
    keys = (*Eagle1Form.keys, KeySpec("architectures", list, [SGLANG]))

    def tensors(self, head: Drafter) -> dict[str, Tensor]:
        """With a bias."""
        found = super().tensors(head)
        found.setdefault(BIAS, torch.zeros_like(found["fc.weight"][:, 0]))
        return found

    def notes(self, head: Drafter, config: Mapping[str, Any]) -> list[str]:
        """How SGLang can keep a draft vocabulary."""
        notes = super().notes(head, config)
        if head.draft_vocab is not None:
            notes.append(
                "SGLang can keep it: torch.save the list of its token ids and pass the file as "
                "--speculative-token-map"
            )
        return notes

    def has_bias(self, config: Mapping[str, Any]) -> bool:
        """Always."""
        return True

    def bias_hint(self, config: Mapping[str, Any]) -> str:
        """SGLang always builds one."""
        return ": SGLang would leave it at random values; zeros stand for none"

    def adapted(self, config: dict[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """``bias`` is another one's here."""
        return super().adapted({**config, "bias": config.get("bias", False)}, tensors)

    def parts(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: TargetModel
    ) -> Parts:
        """A bias of zeros is none."""
        if not tensors[BIAS].any():
            tensors = {name: tensor for name, tensor in tensors.items() if name != BIAS}
        return super().parts(config, tensors, target)

    def config_problems(self, config: Mapping[str, Any]) -> list[str]:
        """Of the attention."""
        problems = super().config_problems(config)
        if config["bias"]:
            problems.append("bias must be false: SGLang would give it to the attention")
        if config["qkv_bias"]:
            problems.append("qkv_bias must be false: SGLang builds the attention without")
        return problems


SGLANG_EAGLE1 = SglangEagle1()
