"""DFlash (arXiv:2602.06036) and DSpark (arXiv:2607.05147) heads as ``speculators`` 0.9.0 has them.

Read in the package's classes: layers are Qwen3's (queries and keys are always normed). Layers of
full attention are bidirectional in the block, whatever the config says; layers with a window are
causal there unless ``sliding_window_non_causal``. So a head whose blocks are causal (JetSpec,
arXiv:2606.18394) is written with a window as long as the longest text, which hides nothing. The
package counts a window from the first row of the block, engines and Headway from each row, which
differ by at most the length of the block.

vLLM (0.33) takes ``sliding_window_non_causal`` of all layers, those of full attention too: heads
whose layers differ are served wrongly there.

``sample_from_anchor`` is DSpark's shifted prediction: the anchor's row drafts too. The embedding is
never saved and ``lm_head`` only for a reduced vocabulary; both are frozen copies of the target's.

Legend: H hidden, V target vocabulary, Vd draft vocabulary, F captured layers, r rank.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from drafters.base import Drafter
from drafters.block import DFlashDrafter
from drafters.config import default_feature_layers
from drafters.export.borrowed import is_copy
from drafters.export.dialect import EMBEDDING, KeySpec, Parts, TensorSpec, embedding_problems
from drafters.export.dialects.speculators import (
    FULL,
    KEYS,
    LAYERS,
    SLIDING,
    Speculators,
    captured_problems,
    decoder_layers,
    layer_id_problems,
    layer_options,
)
from drafters.export.fields import (
    MARKS,
    OFFSETS,
    logit_refusals,
    vocab_specs,
    vocab_state,
    vocab_tensors,
)
from drafters.target import TargetModel
from drafters.vocab import from_offsets

IDS = "aux_hidden_state_layer_ids"
OUTPUT = "lm_head.weight"
CONFIDENCE, OURS = "confidence_head.", "confidence."


class SpeculatorsDFlash(Speculators):
    """DFlash."""

    name = "speculators-dflash"
    families = ("dflash",)
    kind = "dflash"
    known_as = ("DFlashDraftModel", "DFlashSpeculator")
    keys: ClassVar[tuple[KeySpec, ...]] = (
        *KEYS,
        KeySpec("draft_vocab_size", int, positive=True),
        KeySpec("target_hidden_size", int, positive=True),
        KeySpec("block_size", int, positive=True),
        KeySpec("mask_token_id", int),
        KeySpec("sliding_window_non_causal", bool),
        KeySpec("sample_from_anchor", bool),
        KeySpec(IDS, list),
    )

    def only(self, head: Drafter) -> dict[str, Any]:
        """Queries and keys are normed."""
        return {"qk_norm": True}

    def refusals(self, head: Drafter) -> list[str]:
        """Windows that differ in more than being there, too."""
        found = super().refusals(head) + logit_refusals(head)
        if len(_windows(head)) > 1:
            found.append(
                "layers with a window: this form has one window for all of them, and all are "
                f"causal in the block or none is; the head has {sorted(_windows(head))}"
            )
        return found

    def own_keys(self, head: Drafter) -> dict[str, Any]:
        """The block, the mask, layers and the vocabulary."""
        config = head.config
        causal = any(causal for _, causal in _windows(head))
        return {
            "draft_vocab_size": config.draft_vocab_size,
            "target_hidden_size": head.target.hidden_size,
            "block_size": config.block_size,
            "mask_token_id": config.mask_token_id,
            "sliding_window_non_causal": not causal,
            "sample_from_anchor": False,
            IDS: list(head.feature_layers),
        }

    def windows(self, head: Drafter) -> list[int | None]:
        """A causal layer without a window has one as long as the longest text."""
        assert isinstance(head, DFlashDrafter)
        longest = head.target.max_length
        pairs = zip(head.windows, head.causal, strict=True)
        return [window or (longest if causal else None) for window, causal in pairs]

    def tensors(self, head: Drafter) -> dict[str, Tensor]:
        """Its own names, with the output rows of a reduced vocabulary."""
        state = head.state_dict()
        dropped = {*self.left_out(head), "draft_vocab"}
        own = {name: tensor for name, tensor in state.items() if name not in dropped}
        if head.draft_vocab is not None:
            own[OUTPUT] = head.head_rows().to(next(head.parameters()).dtype)
        return own | vocab_tensors(head)

    def notes(self, head: Drafter, config: Mapping[str, Any]) -> list[str]:
        """How causal blocks are said."""
        notes = super().notes(head, config)
        if not config["sliding_window_non_causal"]:
            notes.append(
                "blocks are causal in layers with a window, which is how this form says it; vLLM "
                "0.33 then takes those of all layers as causal"
            )
        return notes

    def served(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """vLLM has blocks that are causal in all layers or in none."""
        mixed = set(config[LAYERS]["layer_types"]) == {SLIDING, FULL}
        return () if mixed and not config["sliding_window_non_causal"] else self.engines

    def complete(self, config: dict[str, Any], target: TargetModel) -> dict[str, Any]:
        """Defaults of the package's class."""
        config = super().complete(config, target)
        layers = config.get(LAYERS) or {}
        defaults: dict[str, Any] = {
            "draft_vocab_size": 32000,
            "target_hidden_size": layers.get("hidden_size"),
            "block_size": 8,
            "sliding_window_non_causal": False,
            "sample_from_anchor": self.kind == "dspark",
        }
        if config.get(IDS) is None:
            defaults[IDS] = default_feature_layers(target.num_layers)
        return config | {k: v for k, v in defaults.items() if config.get(k) is None}

    def own_problems(self, config: Mapping[str, Any]) -> list[str]:
        """Layer ids, sizes, the mask, and the number of drafts."""
        layers = config[LAYERS]
        problems = layer_id_problems(config[IDS], IDS)
        if config["draft_vocab_size"] > layers["vocab_size"]:
            problems.append("draft_vocab_size is larger than vocab_size")
        if config["target_hidden_size"] != layers["hidden_size"]:
            problems.append(
                f"target_hidden_size {config['target_hidden_size']} must be hidden_size "
                f"{layers['hidden_size']}: the package's classes know no other"
            )
        if not 0 <= config["mask_token_id"] < layers["vocab_size"]:
            problems.append(f"mask_token_id must lie in 0..{layers['vocab_size'] - 1}")
        if config["block_size"] < 2 and not config["sample_from_anchor"]:
            problems.append("block_size 1 leaves no row that drafts")
        return problems

    def target_problems(self, config: Mapping[str, Any], target: TargetModel) -> list[str]:
        """The captured layers too."""
        if layer_id_problems(config[IDS], IDS):
            return []
        return captured_problems(config[IDS], IDS, target) + super().target_problems(config, target)

    def specs(self, config: Mapping[str, Any]) -> list[TensorSpec]:
        """Of all layers, and copies of the target's that older releases save too."""
        layers, size = config[LAYERS], config["draft_vocab_size"]
        hidden, whole = layers["hidden_size"], layers["vocab_size"]
        return [
            TensorSpec("fc.weight", (hidden, len(config[IDS]) * hidden)),
            TensorSpec("hidden_norm.weight", (hidden,)),
            *decoder_layers(config),
            TensorSpec("norm.weight", (hidden,)),
            TensorSpec(OUTPUT, (size, hidden), optional=size == whole),
            TensorSpec(EMBEDDING, (whole, hidden), optional=True),
            *vocab_specs(self.flat(config)),
        ]

    def borrowed_problems(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: TargetModel
    ) -> list[str]:
        """Output rows must be the target's too: the package freezes them."""
        problems = embedding_problems(tensors.get(EMBEDDING), target)
        if OUTPUT not in tensors:
            return problems
        rows = target.lm_head.weight.detach().cpu()
        if OFFSETS in tensors:
            rows = rows[from_offsets(tensors[OFFSETS])]
        if not is_copy(tensors[OUTPUT], rows):
            problems.append(
                f"{OUTPUT} is not the output matrix of {target.name!r} at the draft vocabulary: it "
                "was trained, or belongs to another target"
            )
        return problems

    def parts(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: TargetModel
    ) -> Parts:
        """A DFlash head, or where the anchor drafts too, DSpark without its Markov head."""
        options = {
            **layer_options(config),
            **_window_options(config),
            "feature_layers": list(config[IDS]),
            "block_size": config["block_size"],
            "mask_token_id": config["mask_token_id"],
        }
        dropped = (EMBEDDING, OUTPUT, OFFSETS, MARKS)
        state = {name: tensor for name, tensor in tensors.items() if name not in dropped}
        state |= vocab_state(tensors)
        if not config["sample_from_anchor"]:
            return Parts("dflash", options, state)
        return Parts("dspark", {**options, "markov_type": "none"}, state)


class SpeculatorsDSpark(SpeculatorsDFlash):
    """DSpark: the same with a Markov head and a confidence output."""

    name = "speculators-dspark"
    families = ("dspark",)
    kind = "dspark"
    known_as = ("DSparkDraftModel", "DSparkSpeculator")
    keys = (
        *SpeculatorsDFlash.keys,
        KeySpec("markov_rank", int),
        KeySpec("markov_head_type", str),
        KeySpec("enable_confidence_head", bool),
        KeySpec("confidence_head_with_markov", bool),
    )

    def served(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """vLLM has the vanilla Markov head alone, and always one."""
        known = config["markov_head_type"] == "vanilla" and config["markov_rank"] > 0
        return super().served(config) if known else ()

    def own_keys(self, head: Drafter) -> dict[str, Any]:
        """The Markov head and the confidence output too; rank 0 is none."""
        config = head.config
        kind = config.markov_type
        return {
            **super().own_keys(head),
            "sample_from_anchor": config.sample_from_anchor,
            "markov_rank": 0 if kind == "none" else config.markov_rank,
            "markov_head_type": "vanilla" if kind == "none" else kind,
            "enable_confidence_head": config.confidence_head,
            "confidence_head_with_markov": kind != "none" and config.confidence_with_markov,
        }

    def left_out(self, head: Drafter) -> tuple[str, ...]:
        """Nothing."""
        return ()

    def tensors(self, head: Drafter) -> dict[str, Tensor]:
        """Biases that the head does not have are written as zeros."""
        found = {
            CONFIDENCE + name.removeprefix(OURS) if name.startswith(OURS) else name: tensor
            for name, tensor in super().tensors(head).items()
        }
        for weight in ("markov_head.gate_proj.weight", "markov_head.joint_proj.weight"):
            if weight in found:
                rows = found[weight]
                found.setdefault(weight.replace("weight", "bias"), rows.new_zeros(len(rows)))
        return found

    def notes(self, head: Drafter, config: Mapping[str, Any]) -> list[str]:
        """What becomes of confidence and of the Markov head."""
        notes = super().notes(head, config)
        if config["markov_head_type"] != "vanilla":
            notes.append(f"vLLM loads no {config['markov_head_type']} Markov head")
        if config["markov_rank"] == 0:
            notes.append("vLLM loads no DSpark head without a Markov head")
        if config["enable_confidence_head"]:
            notes.append(
                "the confidence output is in the file, not the rule it was trained for nor its "
                "calibration: speculators' own predicts the overlap"
            )
        return notes

    def complete(self, config: dict[str, Any], target: TargetModel) -> dict[str, Any]:
        """Defaults of the package's class."""
        defaults = {
            "markov_rank": 256,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }
        return {**defaults, **super().complete(config, target)}

    def own_problems(self, config: Mapping[str, Any]) -> list[str]:
        """Kinds of Markov heads, and what excludes each other."""
        problems, kind = super().own_problems(config), config["markov_head_type"]
        markov = config["markov_rank"] > 0
        if kind not in ("vanilla", "gated", "rnn"):
            problems.append(f"markov_head_type {kind!r} is unknown")
        both = config["confidence_head_with_markov"]
        if config["enable_confidence_head"] and both and not markov:
            problems.append("confidence_head_with_markov needs a markov_rank above 0")
        if markov and kind == "rnn" and not config["sample_from_anchor"]:
            problems.append(
                "sample_from_anchor=False with an rnn Markov head, whose state starts at the "
                "anchor's row, is not supported"
            )
        return problems

    def specs(self, config: Mapping[str, Any]) -> list[TensorSpec]:
        """With the Markov head and the confidence output."""
        hidden, rank = config[LAYERS]["hidden_size"], config["markov_rank"]
        size, whole = config["draft_vocab_size"], config[LAYERS]["vocab_size"]
        found, kind = super().specs(config), config["markov_head_type"]
        if rank:
            found += [
                TensorSpec("markov_head.markov_w1.weight", (whole, rank)),
                TensorSpec("markov_head.markov_w2.weight", (size, rank), zero=True),
            ]
            if kind == "gated":
                found += _linear("markov_head.gate_proj", rank, hidden + rank)
            if kind == "rnn":
                found += _linear("markov_head.joint_proj", 3 * rank, 2 * rank + hidden)
        if config["enable_confidence_head"]:
            both = config["confidence_head_with_markov"]
            found += _linear(CONFIDENCE + "proj", 1, hidden + (rank if both else 0), zero=True)
        return found

    def parts(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: TargetModel
    ) -> Parts:
        """A DSpark head, or a DFlash head where nothing of DSpark is there."""
        found = super().parts(config, tensors, target)
        confident, rank = config["enable_confidence_head"], config["markov_rank"]
        options = {**found.options, "confidence_head": confident, "confidence_rule": "overlap"}
        state = {
            OURS + name.removeprefix(CONFIDENCE) if name.startswith(CONFIDENCE) else name: tensor
            for name, tensor in found.state.items()
        }
        if not rank and not config["sample_from_anchor"]:
            return Parts("dflash", options, state)
        biases = [name for name in state if name in ("markov_head.gate_proj.bias", _JOINT_BIAS)]
        biased = any(state[name].any() for name in biases)
        if not biased:
            state = {name: tensor for name, tensor in state.items() if name not in biases}
        options |= {
            "markov_type": config["markov_head_type"] if rank else "none",
            "markov_bias": biased,
            "sample_from_anchor": config["sample_from_anchor"],
            "confidence_with_markov": not (confident and rank)
            or config["confidence_head_with_markov"],
        }
        if rank:
            options["markov_rank"] = rank
        return Parts("dspark", options, state)


_JOINT_BIAS = "markov_head.joint_proj.bias"


def _linear(name: str, rows: int, columns: int, zero: bool = False) -> list[TensorSpec]:
    weight = TensorSpec(f"{name}.weight", (rows, columns), zero=zero)
    return [weight, TensorSpec(f"{name}.bias", (rows,))]


def _windows(head: Drafter) -> set[tuple[int, bool]]:
    """(window, causal) of the layers that this form gives a window."""
    assert isinstance(head, DFlashDrafter)
    longest = head.target.max_length
    return {
        (window or longest, causal)
        for window, causal in zip(head.windows, head.causal, strict=True)
        if window or causal
    }


def _window_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """``sliding_window``, ``causal`` and which layers they are of; a window as long as the longest
    text is none.
    """
    layers = config[LAYERS]
    kinds = layers["layer_types"]
    chosen = [index for index, kind in enumerate(kinds) if kind == SLIDING]
    some = chosen if 0 < len(chosen) < len(kinds) else None
    options: dict[str, Any] = {}
    if chosen and layers["sliding_window"] < layers["max_position_embeddings"]:
        options |= {"sliding_window": layers["sliding_window"], "window_layers": some}
    if chosen and not config["sliding_window_non_causal"]:
        options |= {"causal": some is None, "causal_layers": some}
    return options


DFLASH, DSPARK = SpeculatorsDFlash(), SpeculatorsDSpark()
