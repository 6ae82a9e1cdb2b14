"""DSpark heads (arXiv:2607.05147) in three forms: DeepSpec's, SpecForge's and ModelOpt's.
(Speculators' form has a file of its own.)

    dspark            Qwen3DSparkModel, keys at the top level, with copies of the target's embedding
                      and output matrix: DeepSpec, vLLM, SGLang, llama.cpp
    dspark-specforge  DSparkDraftModel, keys in dflash_config, nothing of the target: SpecForge,
                      SGLang, vLLM, llama.cpp
    dspark-modelopt   DFlashDraftModel with projector_type dspark, flat tensor names: TensorRT-LLM

Facts from DeepSpec (``modeling/dspark``), SpecForge (``modeling/draft/dspark*.py``), ModelOpt
(``modeling_dspark.py``), SGLang (``models/dspark.py``, ``dspark_config.py``), vLLM
(``qwen3_dspark.py``) and llama.cpp's converter; whether TensorRT-LLM runs gated and rnn heads could
not be read. Keys are written at the top level in all forms, and nested where the form nests them,
as engines look in either place. What differs between engines:

- vLLM and llama.cpp know vanilla Markov heads only, and none of the engines a head without one.
- vLLM and llama.cpp take a reduced draft vocabulary (``d2t``, the target's rows for it), SGLang and
  TensorRT-LLM none: their W2 has a row for every token.
- The projection of gated and rnn heads has a bias in all trainers but this one, and SGLang leaves
  one that is not in the file at its random start: zeros are written for it.
- vLLM calls the opposite of ``sample_from_anchor`` ``dspark_bonus_anchor`` in some versions.
- vLLM takes ``DSparkDraftModel`` of ``model_type`` qwen3 for its own since 0.33, for DeepSeek-V4's
  before; nested ``sample_from_anchor`` makes its DFlash class refuse, so that stays at the top.

Legend: H hidden, r rank, V target vocabulary, Vd draft vocabulary.
"""

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from torch import Tensor

from drafters.base import Drafter
from drafters.dspark import DSparkDrafter
from drafters.export.borrowed import output_rows
from drafters.export.dialect import EMBEDDING, KeySpec, Parts, TensorSpec
from drafters.export.dialects.block_config import (
    BLOCK_KEYS,
    IDS,
    NESTED,
    OUTPUT,
    block_options,
    block_state,
    drafted,
)
from drafters.export.dialects.blocks import BlockDialect
from drafters.export.fields import vocab_tensors
from drafters.families import MARKOV_TYPES
from drafters.target import TargetModel

W1, W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
PROJECTIONS = {"gated": "markov_head.gate_proj", "rnn": "markov_head.joint_proj"}
CONFIDENCE = "confidence_head.proj"
FLAT = {"markov_head.": "", "confidence_head.proj": "confidence_proj"}
ANCHORS = 512  # drawn per sequence in DeepSpec's training; its model asks for the number
_HEAD_KEYS = (
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "sample_from_anchor",
)


class DSparkForm(BlockDialect):
    """What the forms share.

    Attributes:
        flat: tensors of the Markov head have no prefix.
    """

    families = ("dspark",)
    flat: ClassVar[bool] = False
    keys = (
        *BLOCK_KEYS,
        KeySpec(IDS, list),
        KeySpec("mask_token_id", int),
        KeySpec("markov_rank", int),
        KeySpec("markov_head_type", str),
        KeySpec("enable_confidence_head", bool),
        KeySpec("confidence_head_with_markov", bool),
        KeySpec("sample_from_anchor", bool),
    )

    # Writing ------------------------------------------------------------------------------------

    def left_out(self, head: Drafter) -> tuple[str, ...]:
        """Nothing."""
        return ()

    def config(self, head: Drafter) -> dict[str, Any]:
        """The network's, and the heads on top of it."""
        assert isinstance(head, DSparkDrafter)
        shared, config = super().config(head), head.config
        nested, markov = shared[NESTED], head.markov_head is not None
        return {
            **shared,
            IDS: nested[IDS],
            "mask_token_id": config.mask_token_id,
            "num_anchors": ANCHORS,
            "markov_rank": config.markov_rank if markov else 0,
            "markov_head_type": config.markov_type if markov else "vanilla",
            "enable_confidence_head": head.confidence is not None,
            "confidence_head_with_markov": markov and config.confidence_with_markov,
            "sample_from_anchor": config.sample_from_anchor,
            "dspark_bonus_anchor": not config.sample_from_anchor,
        }

    def tensors(self, head: Drafter) -> dict[str, Tensor]:
        """The head's own; zeros for a bias that it has not."""
        found = {}
        for name, tensor in head.state_dict().items():
            if name != "draft_vocab":
                found[name.replace("confidence.proj", CONFIDENCE)] = tensor
        add_biases(found)
        return {self._file_name(name): tensor for name, tensor in found.items()}

    def served(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """As far as engines know the Markov head; see the top of the file."""
        without: set[str] = set()
        if not config["markov_rank"]:
            return ()
        if config["markov_head_type"] != "vanilla":
            without |= {"vllm", "llama.cpp"}
        if drafted(config) != config["vocab_size"]:
            without |= {"sglang"}
        if config["enable_confidence_head"] and not config["confidence_head_with_markov"]:
            without |= {"llama.cpp"}
        return tuple(engine for engine in super().served(config) if engine not in without)

    def notes(self, head: Drafter, config: Mapping[str, Any]) -> list[str]:
        """Also of the heads on top."""
        notes = super().notes(head, config)
        if not config["markov_rank"]:
            notes.append(
                "without a Markov head no engine loads it (SGLang and vLLM ask for markov_rank "
                "above 0), only DeepSpec itself"
            )
        elif config["markov_head_type"] != "vanilla":
            notes.append(
                f"a {config['markov_head_type']} Markov head: vLLM and llama.cpp run vanilla ones "
                "only"
            )
        if head.confidence is not None:
            notes.append(
                "the confidence output is in the file; SGLang and vLLM schedule with it where that "
                "is switched on, llama.cpp cuts drafts at --spec-draft-p-min, all by its plain "
                "sigmoid"
            )
        if head.config.confidence_temperatures is not None:
            notes.append("the confidence output's calibration has no place in the file")
        if not config["sample_from_anchor"]:
            notes.append(
                "it drafts in place (sample_from_anchor false): older SGLang and vLLM read every "
                "draft one position early; check the acceptance length"
            )
        return notes

    # Reading ------------------------------------------------------------------------------------

    def complete(self, config: dict[str, Any], target: TargetModel) -> dict[str, Any]:
        """Keys from wherever a trainer has put them, to the top level."""
        config = dict(config)
        nested = {**(config.get("dspark_config") or {}), **(config.get(NESTED) or {})}
        given = {"enable_confidence_head": nested.get("use_confidence_head"), **nested}
        for name in _HEAD_KEYS:
            if config.get(name) is None:
                found = given.get(name)
                config[name] = config.get(f"dspark_{name}") if found is None else found
        defaults = {
            "markov_head_type": "vanilla",
            "enable_confidence_head": False,
            "confidence_head_with_markov": config["markov_rank"] != 0,
            "sample_from_anchor": not config.get("dspark_bonus_anchor")
            and nested.get("shift_label") is not False,
        }
        config |= {key: value for key, value in defaults.items() if config[key] is None}
        config = super().complete(config, target)
        copied = {name: config[NESTED].get(name) for name in (IDS, "mask_token_id")}
        return config | {key: value for key, value in copied.items() if config.get(key) is None}

    def renamed(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Flat or nested names as this form has them, zeros for a bias that is not there."""
        found = {nested_name(name): t for name, t in super().renamed(tensors).items()}
        add_biases(found)
        return {self._file_name(name): tensor for name, tensor in found.items()}

    def config_problems(self, config: Mapping[str, Any]) -> list[str]:
        """Also of the Markov head."""
        problems = super().config_problems(config)
        kind, nested = config["markov_head_type"], config[NESTED]
        if config["markov_rank"] < 0:
            problems.append(f"markov_rank must be at least 0, got {config['markov_rank']}")
        if kind not in MARKOV_TYPES[:3]:
            problems.append(
                f"markov_head_type={kind!r} is not supported: {', '.join(MARKOV_TYPES[:3])} are"
            )
        if kind == "rnn" and not config["sample_from_anchor"]:
            problems.append("sample_from_anchor must be true with markov_head_type rnn")
        if config["confidence_head_with_markov"] and not config["markov_rank"]:
            problems.append("confidence_head_with_markov needs markov_rank above 0")
        for name in (*_HEAD_KEYS, "mask_token_id"):
            if nested.get(name, config[name]) != config[name]:
                problems.append(f"{name} is {config[name]} but {NESTED} says {nested[name]}")
        return problems

    def specs(self, config: Mapping[str, Any]) -> list[TensorSpec]:
        """Also of the heads on top; engines load all of them under their own names."""
        hidden, rank = config["hidden_size"], config["markov_rank"]
        kind = config["markov_head_type"]
        shapes: dict[str, tuple[int, ...]] = {}
        if rank:
            shapes |= {W1: (config["vocab_size"], rank), W2: (drafted(config), rank)}
            wide = {"gated": (rank, hidden + rank), "rnn": (3 * rank, hidden + 2 * rank)}
            if kind in wide:
                name = PROJECTIONS[kind]
                shapes |= {f"{name}.weight": wide[kind], f"{name}.bias": wide[kind][:1]}
        found = [TensorSpec(self._file_name(name), shape) for name, shape in shapes.items()]
        if config["enable_confidence_head"]:
            width = hidden + (rank if config["confidence_head_with_markov"] else 0)
            name = self._file_name(CONFIDENCE)
            found.append(TensorSpec(f"{name}.weight", (1, width), zero=True))
            found.append(TensorSpec(f"{name}.bias", (1,)))
        return super().specs(config) + found

    def parts(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: TargetModel
    ) -> Parts:
        """A DSpark head; a bias of zeros is none."""
        state = {
            nested_name(name).replace(CONFIDENCE, "confidence.proj"): tensor
            for name, tensor in block_state(tensors).items()
        }
        kind = config["markov_head_type"] if config["markov_rank"] else "none"
        bias = f"{PROJECTIONS.get(kind)}.bias"
        if bias in state and not state[bias].any():
            del state[bias]
        options = block_options(config) | {
            "markov_type": kind,
            "markov_bias": bias in state,
            "sample_from_anchor": config["sample_from_anchor"],
            "confidence_head": config["enable_confidence_head"],
        }
        if config["markov_rank"]:
            options["markov_rank"] = config["markov_rank"]
            if config["enable_confidence_head"]:
                options["confidence_with_markov"] = config["confidence_head_with_markov"]
        return Parts("dspark", options, state)

    def _file_name(self, name: str) -> str:
        for nested, flat in FLAT.items() if self.flat else ():
            if name.startswith(nested):
                return flat + name.removeprefix(nested)
        return name


class DeepSpec(DSparkForm):
    """DeepSpec's own form, which vLLM reads as it is."""

    name = "dspark"
    engines = ("sglang", "vllm", "llama.cpp")
    architecture = "Qwen3DSparkModel"
    embeddings = "always"

    def tensors(self, head: Drafter) -> dict[str, Tensor]:
        """And copies of the target's matrices, which DeepSpec's own loader needs."""
        embedding = head.target.embedding.get_parameter("weight")
        copies = {
            EMBEDDING: embedding.to(next(head.parameters()).dtype),
            OUTPUT: output_rows(head),
        }
        return super().tensors(head) | copies | vocab_tensors(head)

    def notes(self, head: Drafter, config: Mapping[str, Any]) -> list[str]:
        """Also of the copies."""
        return [
            *super().notes(head, config),
            "it holds copies of the target's embedding and output matrix, which only DeepSpec "
            "itself needs",
        ]

    def recognises(self, config: Mapping[str, Any], names: Collection[str]) -> bool:
        """By its architecture, or a Markov head in a folder that names none."""
        named = config.get("architectures") or []
        markov = any("markov_w1" in name for name in names)
        return is_block(config, names) and (named == [self.architecture] or (not named and markov))


class SpecForge(DSparkForm):
    """SpecForge's form."""

    name = "dspark-specforge"
    engines = ("sglang", "vllm", "llama.cpp")
    architecture = "DSparkDraftModel"

    def refusals(self, head: Drafter) -> list[str]:
        """A reduced draft vocabulary."""
        return super().refusals(head) + whole_refusals(head)

    def config(self, head: Drafter) -> dict[str, Any]:
        """With the heads' keys nested, too."""
        config = super().config(head)
        heads = {name: config[name] for name in _HEAD_KEYS if name != "sample_from_anchor"}
        config[NESTED] |= {"projector_type": "dspark", "attention_mode": "gqa", **heads}
        return config

    def notes(self, head: Drafter, config: Mapping[str, Any]) -> list[str]:
        """Also of the name."""
        return [
            *super().notes(head, config),
            "vLLM before 0.33 takes this architecture for DeepSeek-V4's: write dspark for it",
        ]

    def recognises(self, config: Mapping[str, Any], names: Collection[str]) -> bool:
        """By its architecture."""
        return is_block(config, names) and config.get("architectures") == [self.architecture]


class ModelOpt(DSparkForm):
    """ModelOpt's form."""

    name = "dspark-modelopt"
    engines = ("tensorrt-llm",)
    architecture = "DFlashDraftModel"
    flat = True

    def refusals(self, head: Drafter) -> list[str]:
        """What its module has no switch for."""
        assert isinstance(head, DSparkDrafter)
        found = super().refusals(head) + whole_refusals(head)
        if head.markov_head is None:
            found.append("markov_type=none: ModelOpt's form always has a Markov head; write dspark")
        for name in ("sample_from_anchor", "confidence_with_markov"):
            if not getattr(head.config, name):
                found.append(f"{name}=False: ModelOpt's form has no other; write dspark")
        return found

    def config(self, head: Drafter) -> dict[str, Any]:
        """With the heads' keys nested, too, under ModelOpt's names."""
        config = super().config(head)
        heads = {name: config[name] for name in ("markov_rank", "markov_head_type")}
        config[NESTED] |= {
            "projector_type": "dspark",
            "shift_label": True,
            "use_confidence_head": config["enable_confidence_head"],
            **heads,
        }
        return config

    def recognises(self, config: Mapping[str, Any], names: Collection[str]) -> bool:
        """DFlash's architecture, said to be DSpark."""
        nested = config.get(NESTED) or {}
        return is_block(config, names) and (
            config.get("architectures") == [self.architecture]
            and (nested.get("projector_type") == "dspark" or "markov_w1.weight" in names)
        )


def whole_refusals(head: Drafter) -> list[str]:
    """Why a head with a reduced draft vocabulary cannot be written in a form without ``d2t``."""
    if head.draft_vocab is None:
        return []
    return [
        f"draft_vocab_size={len(head.draft_vocab)}: this form has a row of W2 for every token; "
        "write it as dspark, for vLLM and llama.cpp, or train it with the whole vocabulary"
    ]


def is_block(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether a folder is of a block head that speculators did not write."""
    bare = {name.removeprefix("model.") for name in names}
    here = {"fc.weight", "hidden_norm.weight", "norm.weight"} <= bare
    return here and "speculators_model_type" not in config


def add_biases(tensors: dict[str, Tensor]) -> None:
    """Zeros where a projection has no bias."""
    for name in PROJECTIONS.values():
        weight = tensors.get(f"{name}.weight")
        if weight is not None:
            tensors.setdefault(f"{name}.bias", weight.new_zeros(len(weight)))


def nested_name(name: str) -> str:
    """A flat name of ModelOpt's as DeepSpec has it; other names as they are."""
    if name.startswith(("markov_w1.", "markov_w2.", "gate_proj.", "joint_proj.")):
        return f"markov_head.{name}"
    if name.startswith("confidence_proj."):
        return name.replace("confidence_proj", CONFIDENCE)
    return name


DSPARK_FORMS = (DeepSpec(), SpecForge(), ModelOpt())
