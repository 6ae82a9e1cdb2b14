"""DFlash heads (arXiv:2602.06036) as z-lab released them and SGLang, vLLM and llama.cpp load them;
causal ones are JetSpec's (arXiv:2606.18394).

Facts from z-lab/dflash (``dflash/model.py``), SGLang (``models/dflash.py``,
``speculative/dflash_utils.py``), vLLM (``qwen3_dflash.py``) and llama.cpp's converter. The file has
no embedding and no output matrix: engines use the target's, whole. None of a head's weights depends
on its draft vocabulary, so one with fewer tokens is written without it: the same network, which may
then draft any token. vLLM alone can keep a draft vocabulary, given the target's rows for it and
``d2t``: the form ``dflash-vllm``. ``draft_vocab_size`` is written only there; in other files it
makes llama.cpp's Llama converter take a head of one layer for EAGLE-3.

Legend: H hidden, Vd draft vocabulary.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from drafters.base import Drafter
from drafters.export.borrowed import output_rows, whole_vocabulary
from drafters.export.dialect import Parts, TensorSpec
from drafters.export.dialects.block_config import (
    NESTED,
    OUTPUT,
    block_options,
    block_state,
)
from drafters.export.dialects.blocks import BlockDialect
from drafters.export.fields import OFFSETS, vocab_tensors
from drafters.target import TargetModel

ANCHORED = ("sample_from_anchor", "shift_label", "query_zero_predicts_next")
DSPARK = ("Qwen3DSparkModel", "DSparkDraftModel")


class DFlashForm(BlockDialect):
    """Without a draft vocabulary."""

    name = "dflash"
    families = ("dflash",)
    engines: ClassVar[tuple[str, ...]] = ("sglang", "vllm", "llama.cpp")
    architecture = "DFlashDraftModel"

    def servable(self, head: Drafter) -> Drafter:
        """With the whole vocabulary."""
        return whole_vocabulary(head)

    def left_out(self, head: Drafter) -> tuple[str, ...]:
        """The draft vocabulary, too."""
        vocab = () if head.draft_vocab is None else ("draft_vocab",)
        return (*super().left_out(head), *vocab)

    def tensors(self, head: Drafter) -> dict[str, Tensor]:
        """The head's own names are those of this dialect."""
        dropped = {*self.left_out(head), "draft_vocab"}
        return {name: t for name, t in head.state_dict().items() if name not in dropped}

    def notes(self, head: Drafter, config: Mapping[str, Any]) -> list[str]:
        """Also of the draft vocabulary and the confidence output."""
        notes = super().notes(head, config)
        if head.draft_vocab is not None and "draft_vocab_size" not in config:
            notes.append(
                f"its draft vocabulary of {len(head.draft_vocab)} tokens is not in the file: these "
                "engines draft with the target's whole output matrix, tokens that were not trained "
                "among them (dflash-vllm keeps it, for vLLM)"
            )
        if head.confidence is not None:
            notes.append("the confidence output is left out: these engines draft to a fixed length")
        return notes

    def recognises(self, config: Mapping[str, Any], names: Collection[str]) -> bool:
        """A block head without a Markov head; DFlash 2 and Domino too, to say why they cannot be
        read.
        """
        return is_dflash(config, names) and OFFSETS not in names

    def config_problems(self, config: Mapping[str, Any]) -> list[str]:
        """Also blocks whose first row drafts, which are DSpark's."""
        problems = super().config_problems(config)
        for name in ANCHORED:
            if config.get(name) or config[NESTED].get(name):
                problems.append(
                    f"{name} is true: its first row drafts, too, which is DSpark without a Markov "
                    "head (architectures Qwen3DSparkModel, markov_rank 0)"
                )
        return problems

    def parts(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: TargetModel
    ) -> Parts:
        """A DFlash head."""
        return Parts("dflash", block_options(config), block_state(tensors))


class DFlashVllm(DFlashForm):
    """With a draft vocabulary, which only vLLM has a place for."""

    name = "dflash-vllm"
    engines = ("vllm",)

    def refusals(self, head: Drafter) -> list[str]:
        """Heads with the whole vocabulary."""
        found = super().refusals(head)
        if head.draft_vocab is None:
            found.append("it has no draft vocabulary: dflash is the form for all engines")
        return found

    def servable(self, head: Drafter) -> Drafter:
        """As it is."""
        return head

    def left_out(self, head: Drafter) -> tuple[str, ...]:
        """The confidence output."""
        return tuple(sorted(name for name in head.state_dict() if name.startswith("confidence.")))

    def tensors(self, head: Drafter) -> dict[str, Tensor]:
        """And the target's rows, and where they belong."""
        return super().tensors(head) | {OUTPUT: output_rows(head)} | vocab_tensors(head)

    def recognises(self, config: Mapping[str, Any], names: Collection[str]) -> bool:
        """A vocabulary map is there."""
        return is_dflash(config, names) and OFFSETS in names

    def specs(self, config: Mapping[str, Any]) -> list[TensorSpec]:
        """The output matrix must be there: vLLM cannot take rows of the target's."""
        found = super().specs(config)
        return [replace(spec, optional=False) if spec.name == OUTPUT else spec for spec in found]


def is_dflash(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether a folder is of a block head without DSpark's additions."""
    bare = {name.removeprefix("model.") for name in names}
    nested = config.get(NESTED) or {}
    return (
        {"fc.weight", "hidden_norm.weight", "norm.weight"} <= bare
        and not any("markov" in name for name in bare)
        and (config.get("architectures") or [""])[0] not in DSPARK
        and nested.get("projector_type") != "dspark"
        and "speculators_model_type" not in config
    )


DFLASH, DFLASH_VLLM = DFlashForm(), DFlashVllm()
