"""Where models keep their native multi-token prediction modules, in the two forms that are known.

DeepSeek-V3 and GLM-4-MoE keep module k behind the last of n layers: ``model.layers.{n+k}.`` with
``enorm``, ``hnorm``, ``eh_proj``, ``shared_head.norm``, copies of the target's ``embed_tokens`` and
``shared_head.head``, and the layer's own names. Qwen3-Next and 3.5 have one module beside the
layers: ``mtp.pre_fc_norm_embedding``, ``mtp.pre_fc_norm_hidden``, ``mtp.fc``, ``mtp.norm`` and
``mtp.layers.0.*``. The projection reads the embedding first in both.

What engines make of them was read in vLLM's ``config/speculative.py``, ``deepseek_mtp.py`` and
``qwen3_next_mtp.py`` and in SGLang's ``deepseek_nextn.py``: the number of modules is
``num_nextn_predict_layers``, of Qwen3.5 ``mtp_num_hidden_layers``; SGLang runs one module; vLLM
hands on DeepSeek's stream before the norm, SGLang (and both for Qwen) after it.

Legend: n layers of the target, K modules, E experts, I their inner size, D hidden.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from drafters.base import Drafter
from drafters.export.dialect import DTYPES, type_name
from drafters.export.stitched.checkpoint import Checkpoint
from drafters.export.writing import common_notes
from drafters.mtp import MtpDrafter

NEXTN, QWEN35 = "num_nextn_predict_layers", "mtp_num_hidden_layers"
COUNTS = (NEXTN, QWEN35, "num_mtp_layers")
"""Keys that say how many modules there are."""

BORROWED = ("embed_tokens.weight", "shared_head.head.weight")
"""Copies of the target's own, in every module of the DeepSeek form."""

_LAYER = re.compile(r"^(?P<prefix>.*\b)layers\.(?P<index>\d+)\.")
_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True)
class Form:
    """Where a family of models keeps its modules.

    Attributes:
        name: as ``--to`` takes it.
        behind: module k is layer n + k; otherwise the only one is under ``mtp.``.
        served: engines by the ``model_type`` of models that they have code for.
        names: ours to theirs, below a module.
    """

    name: str
    behind: bool
    served: dict[str, tuple[str, ...]]
    names: dict[str, str]


BOTH = ("vllm", "sglang")
DEEPSEEK = Form(
    "mtp-deepseek",
    behind=True,
    served={"deepseek_v3": BOTH, "deepseek_v32": BOTH, "glm4_moe": BOTH},
    names={"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "norm": "shared_head.norm"},
)
QWEN = Form(
    "mtp-qwen",
    behind=False,
    served={"qwen3_next": BOTH, "qwen3_5_text": BOTH, "qwen3_5_moe_text": BOTH},
    names={
        "enorm": "pre_fc_norm_embedding",
        "hnorm": "pre_fc_norm_hidden",
        "eh_proj": "fc",
        "norm": "norm",
    },
)
STITCHED: dict[str, Form] = {form.name: form for form in (DEEPSEEK, QWEN)}
"""By name."""


def own_names(checkpoint: Checkpoint, form: Form) -> list[str]:
    """Names of a checkpoint's tensors that belong to its modules."""
    if not form.behind:
        return [name for name in checkpoint.places if re.match(r"(?:model\.)?mtp\.", name)]
    depth = checkpoint.text_config.get("num_hidden_layers")
    if not isinstance(depth, int):
        return []
    found = ((name, _LAYER.match(name)) for name in checkpoint.places)
    return [name for name, match in found if match and int(match["index"]) >= depth]


def module_tensors(
    state: Mapping[str, Tensor], depth: int, checkpoint: Checkpoint, form: Form
) -> dict[str, Tensor]:
    """A head's tensors as the form has them, with experts stored as the target stores its own.

    Args:
        state: tensors by the head's names below ``mtp.``; shapes alone will do.
        depth: n.
        checkpoint: of the target.
        form: of its modules.
    """
    split = any(_EXPERT.search(name) for name in checkpoint.places)
    prefixes = _prefixes(
        checkpoint, depth, 1 + max(int(name.split(".")[0]) for name in state), form
    )
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        module, _, rest = name.partition(".")
        place = prefixes[int(module)]
        kind, _, parameter = rest.partition(".")
        if kind != "layers":
            found[f"{place}{form.names[kind]}.{parameter}"] = tensor
            continue
        below = "" if form.behind else "layers.0."
        inner = rest.removeprefix("layers.0.block.")
        for part, values in _experts(inner, tensor) if split else [(inner, tensor)]:
            found[f"{place}{below}{part}"] = values
    if form.behind:
        found |= _borrowed(checkpoint, prefixes)
    return found


def _prefixes(checkpoint: Checkpoint, depth: int, modules: int, form: Form) -> list[str]:
    """What the names of each module begin with."""
    if not form.behind:
        old = own_names(checkpoint, form)
        return ["model.mtp." if old and old[0].startswith("model.") else "mtp."]
    last = next(
        match["prefix"]
        for name in checkpoint.places
        if (match := _LAYER.match(name)) and int(match["index"]) == depth - 1
    )
    return [f"{last}layers.{depth + index}." for index in range(modules)]


def _experts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Fused experts (E, 2I, D) and (E, D, I) one by one, anything else as it is."""
    place, _, kind = name.partition(".experts.")
    if kind == "gate_up_proj":
        for expert, both in enumerate(tensor):
            for part, weight in zip(("gate", "up"), both.chunk(2), strict=True):
                yield f"{place}.experts.{expert}.{part}_proj.weight", weight
    elif kind == "down_proj":
        for expert, weight in enumerate(tensor):
            yield f"{place}.experts.{expert}.down_proj.weight", weight
    else:
        yield name, tensor


def _borrowed(checkpoint: Checkpoint, prefixes: list[str]) -> dict[str, Tensor]:
    """Copies of the target's embedding and output matrix for each module; releases have them."""
    own = {name for name in checkpoint.places if not name.startswith(tuple(prefixes))}
    embedding = next(name for name in sorted(own, key=len) if name.endswith("embed_tokens.weight"))
    output = next(
        (name for name in sorted(own, key=len) if name.endswith("lm_head.weight")), embedding
    )
    read = checkpoint.read({embedding, output})
    found: dict[str, Tensor] = {}
    for prefix in prefixes:
        found[f"{prefix}embed_tokens.weight"] = read[embedding].clone()
        found[f"{prefix}shared_head.head.weight"] = read[output].clone()
    return found


def refusals(head: Drafter, form: Form) -> list[str]:
    """Why a head cannot be stitched into its target, each with what to do instead.

    Args:
        head: with its target attached.
        form: asked for.
    """
    if not isinstance(head, MtpDrafter):
        return [f"{form.name} is for MTP modules and this is a {head.family} head"]
    kind = head.target.config.model_type
    if head.config.native_config is None:
        return [
            "this MTP head was trained from scratch, on layers of Llama's shape with an RMSNorm "
            "before each half of the projection. No engine loads that: their MTP code builds the "
            f"target's own layers (and knows none for {kind!r} unless its releases have modules), "
            "and EAGLE-1 has neither norm, so it is not the same function. Decode it with Headway; "
            "for an engine train modules that came with the target (drafter.init_from=native), or "
            "an EAGLE head"
        ]
    found = []
    other = next((one for one in STITCHED.values() if kind in one.served and one != form), None)
    if other is not None:
        found.append(f"{kind!r} keeps its modules in the other form: use --to {other.name}")
    if not form.behind and head.config.num_modules > 1:
        found.append(
            f"{head.config.num_modules} modules: this form has one projection and one set of norms"
        )
    if (dtype := next(head.parameters()).dtype) not in DTYPES:
        found.append(f"engines do not load {dtype} heads: use .float() first")
    return found


def serving_notes(head: MtpDrafter, form: Form, checkpoint: Checkpoint) -> list[str]:
    """What the user should know before serving."""
    kind, modules = head.target.config.model_type, head.config.num_modules
    notes = []
    if kind not in form.served:
        notes.append(f"no engine is known to have MTP code for {kind!r}: check before serving")
    if form.behind:
        wanted, other = ("SGLang", "vLLM") if head.config.norm_output else ("vLLM", "SGLang")
        notes.append(
            "after the first draft this head is handed "
            f"{'its normed output' if head.config.norm_output else 'the stream before its norm'}, "
            f"as {wanted} does; {other} hands on the other, so later drafts there are not those "
            "that were trained"
        )
    if modules > 1:
        notes.append(
            f"{modules} modules: SGLang runs one; vLLM wants num_speculative_tokens to be a "
            f"multiple of {modules}"
        )
    if head.draft_vocab is not None:
        notes.append(
            "its reduced vocabulary is not in the file: engines draft over the whole one, of which "
            "it was taught only a part"
        )
    if head.confidence is not None:
        notes.append("the confidence output is left out: engines draft to a fixed length")
    stored, own = checkpoint.text_config.get("dtype"), type_name(next(head.parameters()).dtype)
    stored = stored or checkpoint.text_config.get("torch_dtype") or own
    if stored != own:
        notes.append(f"modules are written in {own}; engines load them in the target's {stored}")
    return [*notes, *common_notes(head)]


def served(head: MtpDrafter, form: Form) -> tuple[str, ...]:
    """Engines that load this very head."""
    engines = form.served.get(head.target.config.model_type, ())
    return tuple(name for name in engines if name != "sglang" or head.config.num_modules == 1)
