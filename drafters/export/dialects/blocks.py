"""What forms of DFlash and DSpark heads have in common: Qwen3's layers, one block of mask tokens,
and the target's features injected into every layer.

Nothing of the target is in a file unless its dialect says so. Engines disagree about where they
look for the layers to capture, the block, the mask token and whether a block is causal, so each of
these is written at the top level and in ``dflash_config``, and the two are refused where they
contradict each other. Target layers are written three times: ``target_layer_ids`` (outputs of
layers) twice, and ``eagle_aux_hidden_state_layer_ids``, one higher, which older vLLM reads alone.

Where ``is_causal`` and ``dflash_config.causal`` are null, engines take full layers for
bidirectional and sliding ones for causal; only heads that mix both kinds are written so.

Legend: H hidden, F captured layers, V target vocabulary, Vd draft vocabulary.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from drafters.base import Drafter
from drafters.block import DFlashDrafter
from drafters.export.borrowed import is_targets_output
from drafters.export.dialect import EMBEDDING, Dialect, TensorSpec, type_name, type_problems
from drafters.export.dialects.block_config import (
    AUXILIARY,
    BLOCK_KEYS,
    FULL,
    IDS,
    NESTED,
    OUTPUT,
    PARSED,
    SLIDING,
    attention_problems,
    complete_block,
    drafted,
    foreign_problems,
    id_problems,
    with_vocab,
)
from drafters.export.fields import (
    TARGET_SIZES,
    layer_keys,
    llama_layer,
    logit_refusals,
    rope_keys,
    rope_problems,
    shape_refusals,
    special_tokens,
    target_refusals,
    to_outputs,
    vocab_hint,
    vocab_problems,
    vocab_specs,
)
from drafters.target import TargetModel
from drafters.vocab import from_offsets


class BlockDialect(Dialect):
    """A form of DFlash's network.

    Attributes:
        architecture: as ``architectures`` has it.
    """

    architecture: ClassVar[str]
    target_sizes: ClassVar[Mapping[str, str]] = {**TARGET_SIZES, "num_target_layers": "num_layers"}
    parsed_keys = PARSED
    keys = BLOCK_KEYS

    # Writing ------------------------------------------------------------------------------------

    def refusals(self, head: Drafter) -> list[str]:
        """Other layers than Qwen3's, windows inside a block, targets that are more than two
        matrices to a draft head.
        """
        assert isinstance(head, DFlashDrafter)
        config = head.config
        found = shape_refusals(head, qk_norm=True) + target_refusals(head) + logit_refusals(head)
        if config.sliding_window is not None and config.sliding_window < config.block_size:
            found.append(
                f"sliding_window={config.sliding_window} is less than block_size="
                f"{config.block_size}: engines disagree about windows inside a block; train with a "
                "wider one"
            )
        sliding = [window is not None for window in head.windows]
        if len(set(head.causal)) > 1 and head.causal != sliding:
            found.append(
                f"causal_layers={config.causal_layers}: engines know blocks that are causal in all "
                "layers, in none, or in just those with a sliding window"
            )
        return found

    def config(self, head: Drafter) -> dict[str, Any]:
        """The longest position and the special tokens are the target's."""
        assert isinstance(head, DFlashDrafter)
        config, ids = head.config, to_outputs(list(head.feature_layers))
        sliding = [window is not None for window in head.windows]
        causal = None if len(set(head.causal)) > 1 else head.causal[0]
        nested = {
            "mask_token_id": config.mask_token_id,
            IDS: ids,
            "block_size": config.block_size,
            "causal": causal,
            "use_swa": all(sliding),
        }
        if any(sliding):
            nested["swa_window_size"] = config.sliding_window
        return {
            "architectures": [self.architecture],
            "model_type": "qwen3",
            **layer_keys(head),
            "num_hidden_layers": config.num_layers,
            "num_target_layers": config.target_num_layers,
            "vocab_size": config.vocab_size,
            **({"draft_vocab_size": config.draft_vocab_size} if config.reduced_vocab else {}),
            "block_size": config.block_size,
            **rope_keys(head),
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            "torch_dtype": type_name(next(head.parameters()).dtype),
            **special_tokens(head.target),
            "layer_types": [SLIDING if slides else FULL for slides in sliding],
            "use_sliding_window": any(sliding),
            "sliding_window": config.sliding_window if any(sliding) else None,
            "max_window_layers": config.num_layers,
            "is_causal": causal,
            AUXILIARY: list(head.feature_layers),
            NESTED: nested,
        }

    def served(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """llama.cpp knows one causality for all layers, SGLang no id for the embedding."""
        without = {"llama.cpp"} if config["is_causal"] is None else set()
        if config[NESTED][IDS][0] < 0:
            without.add("sglang")
        return tuple(engine for engine in self.engines if engine not in without)

    def notes(self, head: Drafter, config: Mapping[str, Any]) -> list[str]:
        """How to ask engines for what the head was trained to do."""
        assert isinstance(head, DFlashDrafter)
        count = head.num_drafts
        option = f"num-draft-tokens {count + 1}"
        if head.family == "dspark":
            option = f"dspark-block-size {count}"
        notes = [
            f"ask for {count} drafts (vLLM num_speculative_tokens={count}, llama.cpp "
            f"--spec-draft-n-max {count}, SGLang --speculative-{option}): a "
            "shorter block has fewer mask rows, and a block that is not causal then drafts "
            "something else",
            "these engines draft chains: no trees",
        ]
        if config["is_causal"] or config["use_sliding_window"]:
            notes.append(
                "SGLang 0.5.12 and the authors' own dflash_generate know neither causal blocks nor "
                "windows, and compute something else without a word; SGLang 0.5.23 knows both"
            )
        if len(set(config["layer_types"])) > 1:
            notes.append("vLLM needs its V2 model runner where some layers have windows, some none")
        if config[NESTED][IDS][0] < 0:
            notes.append(
                "feature layer 0 (the embedding) is layer id -1 here, which SGLang refuses: train "
                "on later layers for it"
            )
        return notes

    # Reading ------------------------------------------------------------------------------------

    def renamed(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Without the prefix of files that were saved around a model."""
        return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}

    def complete(self, config: dict[str, Any], target: TargetModel) -> dict[str, Any]:
        """What trainers leave to engines."""
        return complete_block(config, target)

    def config_problems(self, config: Mapping[str, Any]) -> list[str]:
        """Architecture, what Headway does not have, layer ids, windows, RoPE, sizes."""
        problems = foreign_problems(config) + rope_problems(config)
        if config["architectures"] != [self.architecture]:
            problems.append(
                f"architectures must be {[self.architecture]}, got {config['architectures']}"
            )
        problems += id_problems(config) + attention_problems(config)
        mask = config[NESTED].get("mask_token_id")
        if not isinstance(mask, int) or not 0 <= mask < config["vocab_size"]:
            problems.append(
                f"{NESTED}.mask_token_id must lie in 0..{config['vocab_size'] - 1} (the token "
                f"whose embedding its trainer gave to empty slots), got {mask}"
            )
        if config[NESTED].get("block_size", config["block_size"]) != config["block_size"]:
            problems.append(
                f"block_size is {config['block_size']} but {NESTED} says "
                f"{config[NESTED]['block_size']}"
            )
        if config.get("draft_vocab_size", 0) > config["vocab_size"]:
            problems.append("draft_vocab_size is larger than vocab_size")
        problems += type_problems(config)
        return problems

    def specs(self, config: Mapping[str, Any]) -> list[TensorSpec]:
        """Of the network, and the vocabulary map; matrices of the target are optional."""
        hidden, count = config["hidden_size"], len(config[NESTED][IDS])
        found = [TensorSpec("fc.weight", (hidden, count * hidden))]
        found += [TensorSpec(f"{name}.weight", (hidden,)) for name in ("hidden_norm", "norm")]
        for index in range(config["num_hidden_layers"]):
            prefix = f"layers.{index}"
            found += llama_layer(prefix, config, qk_norm=True, engine=prefix)
        return [
            *found,
            TensorSpec(EMBEDDING, (config["vocab_size"], hidden), optional=True),
            TensorSpec(OUTPUT, (drafted(config), hidden), optional=True),
            *vocab_specs(with_vocab(config), marks_optional=True),
        ]

    def tensor_problems(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> list[str]:
        """The vocabulary map."""
        return vocab_problems(config, tensors)

    def borrowed_problems(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: TargetModel
    ) -> list[str]:
        """The output matrix, too, must be the target's."""
        problems = super().borrowed_problems(config, tensors, target)
        kept = from_offsets(tensors["d2t"]) if "d2t" in tensors else None
        if OUTPUT in tensors and not is_targets_output([tensors[OUTPUT]], target, kept):
            problems.append(
                f"{OUTPUT} is not the output matrix of {target.name!r}: the head has its own, or "
                "belongs to another target"
            )
        return problems

    def hint(self, name: str, config: Mapping[str, Any]) -> str:
        """Of the vocabulary map."""
        return vocab_hint(name, with_vocab(config))
