"""The multi-token prediction modules that come with a target, as a head.

DeepSeek-V3 and GLM-4-MoE keep them behind the last layer (``model.layers.{n+k}.enorm``, ...),
Qwen3-Next and 3.5 under ``mtp.`` (``mtp.fc``, ``mtp.pre_fc_norm_hidden``, ...). transformers' own
``MtpModel`` knows which tensor is which, builds the layers and fuses their experts; it serves as
the reader here, and ``drafters.native_layer`` runs what it read.

Of its models those are refused that draft layers cannot be (see there), modules that share one
output norm, and rotary embeddings that change with the length. Models whose config does not tell
what the modules' layers are (MiMo's, for one) are refused too, rather than guessed.

Legend: B batch, T rows, D hidden, Hkv key/value heads, K modules.
"""

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import MtpModel
from transformers.utils import ContextManagers, cached_file

from drafters.families import MtpConfig
from drafters.layers import repeat_heads
from drafters.loading import layer_shape
from drafters.mtp import MtpDrafter
from drafters.native_layer import attention_windows
from drafters.target import TargetModel

FULL_ATTENTION_MTP = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Models with several kinds of layers whose config does not say that those of MTP have full
attention (as the serving engines build them)."""

_BEHIND = re.compile(
    r"^(?:model\.|model\.language_model\.|language_model\.model\.)?layers\.(\d+)\."
)
SCALES = ("_scale_inv", "_scale")
"""Ends of the names that go with quantised tensors."""

_APART = re.compile(r"^(?:model\.)?mtp\.(?:layers\.(\d+)\.)?")


def load_native_mtp(
    target: TargetModel,
    folder: str | Path | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **options: Any,
) -> MtpDrafter:
    """The modules that came with ``target``, as a head that decodes, trains and saves like any.

    One module is applied to its own output for as many steps as a tree is deep, though it was
    trained for one: training it with several steps is worth about half again as many accepted
    tokens on DeepSeek-V3. Only the tensors of the modules are read.

    Args:
        target: loaded from files that hold MTP modules.
        folder: where those files are, a folder or hub id; None takes the target's own.
        dtype: of the head.
        seed: initialisation seed of what does not come with the target.
        **options: fields of :class:`~drafters.families.MtpConfig` that are not the modules' own,
            such as ``draft_vocab_size`` or ``confidence_head``.

    Raises:
        ValueError: the files hold no MTP modules or not all of their tensors, or the modules have
            something that draft layers cannot do; the message names it.
    """
    place = str(folder or target.model.config.name_or_path)
    config, patterns = _completed(target, place)
    native = _read(target, place, config, patterns, dtype)
    layer, norm = native.layers[0].mtp_block, native.layers[0].enorm
    own = {
        "num_modules": len(native.layers),
        "hidden_first": bool(getattr(config, "mtp_hidden_states_first", False)),
        "sliding_window": attention_windows(native.config)[0],
        "native_config": {
            "model_type": native.config.model_type,
            "layer": type(layer).__name__,
            "norm": type(norm).__name__,
            "config": _recordable(native.config),
        },
    }
    if taken := sorted(set(own) & set(options)):
        raise ValueError(f"drafter.{taken[0]} is the native module's own: leave it out")
    shape = {**target.shape_fields(), **layer_shape(target)}
    with torch.random.fork_rng(devices=[]):  # a confidence head is new
        torch.manual_seed(seed)
        drafter = MtpDrafter(MtpConfig(**{**shape, **own, **options}))
    nn.Module.to(drafter, device=target.device, dtype=dtype)
    drafter.mtp.load_state_dict(dict(_renamed(native.state_dict())))
    drafter.attach(target).eval()
    _try_seam(drafter)
    return drafter


def _tensor_names(place: str) -> list[str]:
    """What the safetensors files of a folder or hub id hold; no tensor is read.

    Raises:
        ValueError: there are none.
    """
    try:
        index = cached_file(place, "model.safetensors.index.json")
        assert index is not None
        return list(json.loads(Path(index).read_text())["weight_map"])
    except OSError:
        pass  # one file has no index
    try:
        single = cached_file(place, "model.safetensors")
    except OSError as error:
        raise ValueError(
            f"native MTP: {place!r} holds no model.safetensors; give the folder or hub id that the "
            "target's weights come from"
        ) from error
    assert single is not None
    with safe_open(single, framework="pt") as file:
        return list(file.keys())


def _is_module(name: str, depth: int) -> bool:
    """Whether a tensor belongs to modules behind or beside ``depth`` layers."""
    behind = _BEHIND.match(name)
    return _APART.match(name) is not None or (behind is not None and int(behind[1]) >= depth)


def _completed(target: TargetModel, place: str) -> tuple[PreTrainedConfig, list[str]]:
    """The target's config with what ``get_mtp_config`` wants to know, and patterns of the modules'
    tensor names.

    Raises:
        ValueError: no such tensors, or a kind of module that draft layers cannot be.
    """
    config, depth = copy.deepcopy(target.config), target.num_layers
    names = _tensor_names(place)
    behind = {int(m[1]) - depth for name in names if (m := _BEHIND.match(name))}
    behind = {index for index in behind if index >= 0}
    apart = {int(m[1] or 0) for name in names if (m := _APART.match(name))}
    if not behind | apart:
        raise ValueError(
            f"native MTP: {place!r} holds no MTP modules (no tensors named layers.{depth}.* or "
            "mtp.*): train a head from scratch, with drafter.init_from off"
        )
    scaled = [name for name in names if name.endswith(SCALES) and _is_module(name, depth)]
    if scaled:
        raise ValueError(
            f"native MTP: the modules of {place!r} are quantised ({scaled[0]}): give a folder of "
            "unquantised ones"
        )
    count = max(behind | apart) + 1
    config.num_mtp_layers = count
    if config.model_type in FULL_ATTENTION_MTP:
        config.mtp_layer_types = ["full_attention"] * count
    if config.model_type == "qwen3_next":  # layers with and without experts, by number
        config.mlp_only_layers, config.decoder_sparse_step = [], 1
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *rope.values()):  # some models have one set per kind of layer
        if isinstance(part, dict) and part.get("rope_type") in ("dynamic", "longrope"):
            raise ValueError(
                f"native MTP: a rotary embedding that changes with the length ({part['rope_type']})"
            )
    patterns = [rf"\blayers\.{depth + index}\." for index in range(count)] if behind else []
    return config, [*patterns, r"^(model\.)?mtp\."]


def empty_native_mtp(target: TargetModel, folder: str | Path) -> dict[str, Tensor]:
    """Names below ``mtp.`` and shapes of the modules' tensors; nothing is read or computed.

    Args:
        target: as for :func:`load_native_mtp`.
        folder: of the files.

    Returns:
        Tensors without values, on the meta device.

    Raises:
        ValueError: as there, as far as it can be told without reading.
    """
    place = str(folder)
    config, patterns = _completed(target, place)
    stand_in = _stand_in(target, place, config, patterns, torch.float32)
    try:
        with ContextManagers(MtpModel.get_init_context(torch.float32, False, False, None)):
            native = MtpModel(stand_in, config.num_mtp_layers)
    except (ValueError, TypeError) as error:
        raise ValueError(f"native MTP of {place!r}: {error}") from error
    return dict(_renamed(native.state_dict()))


def _read(
    target: TargetModel,
    place: str,
    config: PreTrainedConfig,
    patterns: list[str],
    dtype: torch.dtype,
) -> MtpModel:
    """transformers' own model of the modules, loaded from ``place``.

    Raises:
        ValueError: tensors are missing, or the layers are of a kind that is refused.
    """
    stand_in = _stand_in(target, place, config, patterns, dtype)
    try:
        attention_windows(config.get_mtp_config())
        native = MtpModel.from_pretrained(stand_in, device_map={"": target.device})
    except (RuntimeError, ValueError, TypeError, SafetensorError) as error:
        raise ValueError(f"native MTP of {place!r}: {error}") from error
    if not native.use_post_norm:
        raise ValueError(
            "native MTP: modules that share one output norm (chain_hidden_post_norm) are not known"
        )
    return native


def _stand_in(
    target: TargetModel,
    place: str,
    config: PreTrainedConfig,
    patterns: list[str],
    dtype: torch.dtype,
) -> PreTrainedModel:
    """The target as transformers wants to see it; shares every module and weight with it."""
    config.name_or_path, config.dtype = place, dtype
    model: PreTrainedModel = copy.copy(target.model)
    model.config = config
    model._keys_to_ignore_on_load_unexpected = patterns
    return model


NOT_RECORDED = (
    "architectures",
    "dtype",
    "transformers_version",
    "model_type",
    "_name_or_path",
    "id2label",
    "label2id",
    "problem_type",
)


def _recordable(config: PreTrainedConfig) -> dict[str, Any]:
    """A config as the plain values that its file gives back, without where its weights came from
    and what belongs to classifiers.
    """
    kept = {name: value for name, value in config.to_dict().items() if name not in NOT_RECORDED}
    found: dict[str, Any] = json.loads(json.dumps(kept))
    return found


def _renamed(state: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a :class:`MtpModel` by our names below ``mtp.``."""
    for name, tensor in state.items():
        if name.startswith("layers."):
            name = name.removeprefix("layers.").replace(".mtp_block.", ".layers.0.block.")
            yield name.replace(".post_norm.", ".norm."), tensor


@torch.no_grad()
def _try_seam(drafter: MtpDrafter) -> None:
    """Run every module on a few rows.

    Raises:
        ValueError: a layer has something that ``attend`` cannot say, or does not call it once.
    """
    called: list[int] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        called.append(layer)
        groups = q.shape[1] // k.shape[1]
        return nn.functional.scaled_dot_product_attention(
            q, repeat_heads(k, groups), repeat_heads(v, groups), is_causal=True
        )

    ids = torch.arange(4, device=drafter.target.device)[None]
    feature = drafter.target.forward(ids).last_hidden
    feature = drafter.begin(None, feature, ids, attend)
    for depth in range(drafter.config.num_modules):
        feature = drafter(feature, ids, ids, attend, depth)[1]
    if called != list(range(drafter.num_layers)):
        raise ValueError("native MTP: its layers do not call attention once each")
