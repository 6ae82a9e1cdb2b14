"""A head's file in Headway's words, read as far as it goes.

A strict reader (``drafters.export``) refuses what does not fit. Here nothing is refused that can
still be measured: what is odd becomes a finding, and the head is built as far as the file goes.
What names and keys mean is the dialects' own knowledge, and is asked of them.

Legend: D hidden, F captured layers.
"""

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

import torch
from torch import Tensor

from drafters import Drafter, TargetModel
from drafters.config import DrafterConfig
from drafters.export.borrowed import is_copy
from drafters.export.dialect import EMBEDDING, Dialect
from drafters.export.folder import CONFIG, MANIFEST, read_json
from drafters.export.registry import dialect_of
from drafters.export.stitched.checkpoint import dtype_of, open_checkpoint
from drafters.export.stitched.mtp_forms import Form, own_names
from drafters.export.stitched.stitching import form_of
from drafters.export.tensors import as_engines_cast, folder_tensors
from drafters.loading import FAMILIES, layer_shape
from drafters.mtp_native import load_native_mtp
from recipes.diagnosis.findings import Finding, fault, fine, unknown
from recipes.diagnosis.repairs import Repairs

HEADWAY = "headway"
_OWN = {cls.config_class.model_type: name for name, cls in FAMILIES.items()}
ODD = (KeyError, TypeError, AttributeError, IndexError, RuntimeError)
"""What an odd value in a config may end in."""
_MODULE = re.compile(r"\beh_proj\.|\bmtp\.")
"""Names that only prediction modules have."""
_IGNORED = ("verifier_lm_head.weight", "verifier_norm.weight")
"""Copies of the target's that trainers save and nobody reads."""

_SWITCHES: tuple[tuple[str, str, str], ...] = (
    ("fc_norm", r"fc_norm\.\d+\.weight", "norm"),
    ("norm_before_fc", r"input_norm\.weight", "norm"),
    ("prefix_norm", r"prefix_norm\.weight", "norm"),
    ("qk_norm", r".*\.q_norm\.weight", "norm"),
    ("own_embedding", r"embed_tokens\.weight", "embedding"),
    ("attention_bias", r".*\.q_proj\.bias", "tensors"),
    ("fc_bias", r"fc\.bias", "tensors"),
    ("lm_head_bias", r"lm_heads\.\d+\.bias", "tensors"),
    ("confidence_head", r"confidence\.proj\.weight", "tensors"),
    ("markov_bias", r"markov_head\.(gate|joint)_proj\.bias", "tensors"),
)
"""Switches of our own configurations, the tensors of a head that has them on, and the check that a
contradiction belongs to."""

_ABOUT: tuple[tuple[str, str], ...] = (
    ("original_max_position_embeddings", "rope"),
    ("max_position_embeddings", ""),  # compared with the target's elsewhere
    ("d2t", ""),  # repaired, and reported there
    ("layer_ids", "layer ids"),
    ("layer ids", "layer ids"),
    ("mask", "mask token"),
    ("causal", "causality"),
    ("block_size", "block size"),
    ("sample_from_anchor", "anchor"),
    ("first row drafts", "anchor"),
    ("rope", "rope"),
    ("RoPE", "rope"),
    ("layer_types", "window"),
    ("window", "window"),
    ("norm", "norm"),
    ("draft_vocab_size", "vocabulary"),
)
"""Words in what a strict reader says about a config, and the check that it belongs to; a problem
with none of them is remarked upon and no fault."""


@dataclass
class Translated:
    """A head file in Headway's words.

    Attributes:
        dialect: whose file it is.
        family: of the head.
        options: fields of the family's configuration.
        state: tensors by Headway's names.
        layers: the feature layers as the file names them, valid or not.
        stored: tensors by the file's names, as stored.
        findings: what is odd already.
        ready: the head itself, where its modules came with a target.
    """

    dialect: str
    family: str
    options: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    layers: tuple[int, ...] = ()
    stored: dict[str, Tensor] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    ready: Drafter | None = None


def translate(folder: Path, config: Mapping[str, Any], target: TargetModel) -> Translated:
    """Read a folder of any dialect.

    Args:
        folder: of the head.
        config: its config.json.
        target: it is to be used with.

    Raises:
        ValueError: it is of no dialect, or a head that Headway cannot compute.
    """
    if config.get("model_type") in _OWN:
        return _native(config, folder_tensors(folder), target)
    form = form_of(folder)
    if form is not None:
        checkpoint = open_checkpoint(folder)
        names = own_names(checkpoint, form)
        if any(_MODULE.search(name) for name in names):  # not a layer that the config leaves out
            return _stitched(folder, form, checkpoint.read(names), target)
    return _foreign(folder, dict(config), target)


# Our own ----------------------------------------------------------------------------------------


def _native(
    config: Mapping[str, Any], tensors: dict[str, Tensor], target: TargetModel
) -> Translated:
    found = Translated(HEADWAY, _OWN[config["model_type"]], state=dict(tensors), stored=tensors)
    config_class = FAMILIES[found.family].config_class
    known = config_class().own_fields()
    found.options = {name: value for name, value in config.items() if name in known}
    _check_types(found.options, config_class)
    _repair_map(found, target)
    found.layers = tuple(found.options.pop("feature_layers", None) or ())
    for name, pattern, check in _SWITCHES:
        said = found.options.get(name, known.get(name))
        has = any(re.fullmatch(pattern, tensor) for tensor in tensors)
        if name not in known or bool(said) == has or not _may_differ(name, found):
            continue
        found.options[name] = has
        what = "has its tensors" if has else "lacks its tensors"
        found.findings.append(
            fault(
                check,
                f"{name} is {str(bool(said)).lower()} in config.json, and the file {what}",
                f'set "{name}": {str(has).lower()}, or export again',
            )
        )
    return found


def _check_types(options: Mapping[str, Any], config_class: type) -> None:
    """Refuse values of another type than the field has.

    Raises:
        ValueError: naming the field.
    """
    hints: dict[str, Any] = {}
    for cls in config_class.__mro__:
        if issubclass(cls, DrafterConfig):
            hints |= inspect.get_annotations(cls, eval_str=True)
    for name, value in options.items():
        if not _is_of(value, hints[name]):
            kind = getattr(hints[name], "__name__", hints[name])
            raise ValueError(f"{CONFIG}: {name} must be {kind}, got {value!r}: correct the file")


def _is_of(value: Any, hint: Any) -> bool:
    """Whether a value of a JSON file is of a field's type."""
    if isinstance(hint, UnionType):
        return any(_is_of(value, one) for one in get_args(hint))
    kind = get_origin(hint) or hint
    if kind is Any:
        return True
    if kind is NoneType:
        return value is None
    if isinstance(value, bool):
        return kind is bool
    if kind is list:
        return isinstance(value, list) and all(_is_of(one, get_args(hint)[0]) for one in value)
    return isinstance(value, (int, float) if kind is float else kind)


def _repair_map(found: Translated, target: TargetModel) -> None:
    """A vocabulary map that leads out of the target's vocabulary, read otherwise."""
    ids, size = found.state.get("draft_vocab"), target.vocab_size
    if ids is None or (int(ids.min()) >= 0 and int(ids.max()) < size):
        return
    steps = torch.arange(len(ids))
    readings = {"less the number of the row": ids - steps, "as the first tokens": steps}
    how, found.state["draft_vocab"] = next(
        (how, read)
        for how, read in readings.items()
        if read.min() >= 0 and read.max() < size and read.unique().numel() == read.numel()
    )
    message = f"draft_vocab leads out of the target's vocabulary of {size}: read {how}"
    found.findings.append(
        fault("vocabulary", message, "store absolute token ids, as in the trained checkpoint")
    )


def _may_differ(name: str, found: Translated) -> bool:
    """Whether a switch can be told by the tensors: not that of modules that came with a target."""
    return found.options.get("native_config") is None or name == "confidence_head"


# Modules in their target's checkpoint -----------------------------------------------------------


def _stitched(
    folder: Path, form: Form, stored: dict[str, Tensor], target: TargetModel
) -> Translated:
    recorded = read_json(folder / MANIFEST) if (folder / MANIFEST).is_file() else {}
    options = {"norm_output": recorded["norm_output"]} if "norm_output" in recorded else {}
    head = load_native_mtp(target, folder, dtype_of(stored), **options)
    return Translated(form.name, "mtp", stored=stored, ready=head)


# Other programs' --------------------------------------------------------------------------------


def _foreign(folder: Path, config: dict[str, Any], target: TargetModel) -> Translated:
    dialect, stored = dialect_of(folder), folder_tensors(folder)
    found = Translated(dialect.name, dialect.families[0], stored=stored)
    kept = {n: t for n, t in as_engines_cast(stored).items() if not n.endswith(_IGNORED)}
    tensors = dialect.renamed(kept)
    _check_rope(dialect, config, target, found)
    completed = dialect.complete(dialect.adapted(config, tensors), target)
    repairs = Repairs(dialect, completed, tensors, target)
    try:
        repairs.run(config)
    except ODD as error:
        _refuse_keys(dialect, completed, error)
        raise
    found.findings += repairs.findings + _biases(dialect, repairs.tensors)
    found.findings += _missing_keys(dialect, completed)
    found.findings += _config_findings(dialect, repairs.config)
    found.findings += _borrowed(dialect, repairs, tensors.get(EMBEDDING), target)
    parts = dialect.parts(repairs.config, repairs.tensors, target)
    found.family, found.options, found.state = parts.family, dict(parts.options), dict(parts.state)
    found.layers = tuple(found.options.pop("feature_layers", None) or ())
    if found.layers and not _names_layers(config):
        found.findings.append(
            unknown("layer ids", f"none in the file: {list(found.layers)} are taken, as engines do")
        )
    return found


def _check_rope(
    dialect: Dialect, config: dict[str, Any], target: TargetModel, found: Translated
) -> None:
    """The target's base of RoPE where a block head's file has none, which its reader refuses."""
    nested = config.get("rope_parameters") or config.get("rope_scaling") or {}
    layers = config.get("transformer_layer_config")
    blocks = {"dflash", "dspark"} & set(dialect.families) and layers is None
    if not blocks or config.get("rope_theta") or nested.get("rope_theta"):
        return
    config["rope_theta"] = theirs = layer_shape(target)["rope_theta"]
    found.findings.append(
        fault(
            "rope",
            "config.json names no rope_theta: engines take 10000 or 1000000 then",
            f"write the one of training (the target's is {theirs:g})",
        )
    )


def _refuse_keys(dialect: Dialect, config: Mapping[str, Any], error: Exception) -> None:
    """Say which keys a head cannot be built without.

    Raises:
        ValueError: keys are missing or of another type.
    """
    if problems := dialect.key_problems(config):
        told = "; ".join(problems)
        raise ValueError(f"{CONFIG}: {told}: the head cannot be built without") from error


def _missing_keys(dialect: Dialect, config: Mapping[str, Any]) -> list[Finding]:
    problems = dialect.key_problems(config)
    if not problems:
        return []
    return [unknown("config", f"a strict reader refuses it: {'; '.join(problems[:3])}")]


def _config_findings(dialect: Dialect, config: Mapping[str, Any]) -> list[Finding]:
    """What a strict reader says about a config with all keys, under the check that it belongs
    to.
    """
    if dialect.key_problems(config):
        return []
    found = []
    for problem in dialect.config_problems(config):
        check = next((check for word, check in _ABOUT if word in problem), "config")
        if "supported" in problem:
            message = f"measured without what Headway does not compute: {problem}"
            found.append(unknown(check or "config", message))
        elif check == "config":
            found.append(unknown("config", f"a strict reader refuses it: {problem}"))
        elif check:
            fix = "make config.json agree with itself, and with what the head was trained with"
            found.append(fault(check, f"config.json: {problem}", fix))
    return found


def _borrowed(
    dialect: Dialect, repairs: Repairs, table: Tensor | None, target: TargetModel
) -> list[Finding]:
    """Copies of the target's in the file, against the target; ``table``: the file's embedding."""
    if problems := dialect.borrowed_problems(repairs.config, repairs.tensors, target):
        fix = "train the head on this target, or use the target it was trained on"
        return [fault("fingerprint", problem, fix) for problem in problems]
    own = target.embedding.get_parameter("weight").detach()
    if table is None or not is_copy(table, own):
        return []
    return [fine("fingerprint", "the embedding in the file is this target's")]


def _biases(dialect: Dialect, tensors: Mapping[str, Tensor]) -> list[Finding]:
    """Medusa's blocks have biases, which one engine drops unless the config says otherwise."""
    if "medusa" not in dialect.families or any(name.endswith("bias") for name in tensors):
        return []
    message = "missing: no residual block has a bias, and Medusa's are trained with them"
    return [fault("tensors", message, 'export again, with "medusa_fc_bias": true')]


def _names_layers(config: Mapping[str, Any]) -> bool:
    """Whether a config names captured layers, anywhere."""
    return any(
        value is not None
        if name.endswith("layer_ids")
        else isinstance(value, Mapping) and _names_layers(value)
        for name, value in config.items()
    )
