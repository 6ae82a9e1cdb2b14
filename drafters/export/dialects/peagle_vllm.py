"""P-EAGLE heads (arXiv:2602.01469) as vLLM's own loader reads them (its releases 0.32 and 0.33).

EAGLE-3's file with two things more. ``mask_hidden`` (1, 1, F·Ht) is what the rows without a feature
hold in its place, through the same fusion. The embedding of those rows is a row of
``embed_tokens.weight``, which therefore is always in the file: the target's, with the mask's in the
row that ``pard_token`` and ``ptd_token_id`` name (newer versions ask ``mask_token_id`` first; all
three are written). ``n_predict`` is K: what vLLM takes for ``num_speculative_tokens`` where the
command line does not say; files of other trainers need not have it.

Traps: without ``"parallel_drafting": true`` on the command line vLLM skips ``mask_hidden`` with a
warning and drafts step by step, which the head was not trained for. No other engine that was read
has P-EAGLE.

Legend: H draft hidden, Ht target hidden, F captured layers, V target vocabulary, K drafts.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from drafters.base import Drafter
from drafters.export.dialect import EMBEDDING, KeySpec, Parts, TensorSpec
from drafters.export.dialects.eagle3_fields import KEYS, head_options, head_state, is_own
from drafters.export.dialects.eagle3_vllm import VllmEagle3
from drafters.export.fields import mask_place, masked_embedding
from drafters.families import PEagleConfig
from drafters.peagle import PEagleDrafter
from drafters.target import TargetModel

MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
"""In the order in which vLLM asks for them."""


class VllmPEagle(VllmEagle3):
    """P-EAGLE for vLLM's native loader."""

    name = "vllm-peagle"
    families = ("peagle",)
    engines = ("vllm",)
    embeddings = "always"
    keys = (
        *KEYS,
        *(KeySpec(name, int) for name in MASK_KEYS),
        KeySpec("n_predict", int, positive=True),
    )

    def served(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """vLLM alone."""
        return self.engines

    def config(self, head: Drafter) -> dict[str, Any]:
        """The mask's row and K too."""
        assert isinstance(head, PEagleDrafter)
        mask = dict.fromkeys(MASK_KEYS, mask_place(head))
        return {**super().config(head), **mask, "n_predict": head.num_drafts}

    def tensors(self, head: Drafter) -> dict[str, Tensor]:
        """The mask's embedding becomes a row."""
        assert isinstance(head, PEagleDrafter)
        found = super().tensors(head)
        found.pop("mask_embedding", None)
        return found | {EMBEDDING: masked_embedding(head)}

    def notes(self, head: Drafter, config: Mapping[str, Any]) -> list[str]:
        """How vLLM must be told."""
        drafts, mask = config["n_predict"], config["mask_token_id"]
        return [
            'vLLM drafts in one pass only with "parallel_drafting": true in --speculative-config, '
            f"and this head at most {drafts} tokens (num_speculative_tokens)",
            f"row {mask} of embed_tokens.weight is the mask's, not the target's: text must not "
            "hold that token",
            *super().notes(head, config),
        ]

    def complete(self, config: dict[str, Any], target: TargetModel) -> dict[str, Any]:
        """The key of the mask that vLLM finds first stands for those that are missing."""
        config = super().complete(config, target)
        found = [config[name] for name in MASK_KEYS if config.get(name) is not None]
        missing = {name: found[0] for name in MASK_KEYS if found and config.get(name) is None}
        drafts = config.get("n_predict") or PEagleConfig.num_drafts
        return {**config, **missing, "n_predict": drafts}

    def renamed(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """vLLM takes ``mask_hidden`` in any shape."""
        found = super().renamed(tensors)
        if "mask_hidden" in found:
            found["mask_hidden"] = found["mask_hidden"].reshape(1, 1, -1)
        return found

    def config_problems(self, config: Mapping[str, Any]) -> list[str]:
        """The mask and K too."""
        problems, size = super().config_problems(config), config["vocab_size"]
        mask = config["mask_token_id"]
        if {config[name] for name in MASK_KEYS} != {mask}:
            values = ", ".join(f"{name} {config[name]}" for name in MASK_KEYS)
            problems.append(f"the mask's row is not one: {values}")
        if not 0 <= mask < size:
            problems.append(f"mask_token_id {mask} must lie in 0..{size - 1}")
        if config["n_predict"] < 2:
            problems.append(f"n_predict must be at least 2, got {config['n_predict']}")
        return problems

    def specs(self, config: Mapping[str, Any]) -> list[TensorSpec]:
        """The mask's feature too."""
        width = config["num_aux_hidden_states"] * config["target_hidden_size"]
        return [*super().specs(config), TensorSpec("mask_hidden", (1, 1, width))]

    def embedding_spec(self, config: Mapping[str, Any]) -> TensorSpec:
        """(V, H), never missing: it holds the mask's row."""
        shape = (config["vocab_size"], config["hidden_size"])
        return TensorSpec(EMBEDDING, shape, parameter=f"model.{EMBEDDING}")

    def parts(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: TargetModel
    ) -> Parts:
        """A P-EAGLE head, with an embedding of its own where other rows than the mask's differ."""
        table, mask = tensors[EMBEDDING], config["mask_token_id"]
        own, state = is_own(table, target, mask), head_state(tensors, target)
        if own:
            state[EMBEDDING] = table
        else:
            state["mask_embedding"] = table[mask].clone()
        options = {
            **head_options(config),
            "norm_output": False,  # nothing is fed back
            "num_drafts": config["n_predict"],
            "mask_token_id": mask,
            "own_embedding": own,
        }
        return Parts("peagle", options, state)


VLLM_PEAGLE = VllmPEagle()
