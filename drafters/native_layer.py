"""A decoder layer of a transformers model, run through ``attend``.

The layer is the target's own class, whatever it does (latent attention, experts, gates, partial
rotary). It only gets another attention function, one that hands queries, keys and values to the
caller's ``attend``. Refused by name is what that seam cannot say: soft-capped scores, attention
sinks, linear attention, layers of different windows.

Legend: B batch, T rows, D hidden, H query heads, Hkv key/value heads, d head size.
"""

import copy
import sys
from typing import Any

from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    PreTrainedConfig,
)

from drafters.layers import Attend
from drafters.target import TargetModel

SEAM = "headway_attend"
"""Name of the attention function in transformers' registry."""


def _hand_over(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """An attention function as transformers calls it: (B, H, T, d), (B, Hkv, T, d), (B, Hkv, T, dv)
    -> (B, T, H, dv), by the ``attend`` that :class:`NativeLayer` was given. Dropout is left out.
    """
    for name, meaning in (("softcap", "soft-capped scores"), ("s_aux", "attention sinks")):
        if options.get(name) is not None:
            raise ValueError(
                f"native MTP: {type(module).__name__} has {meaning}, which draft layers cannot do"
            )
    layer: NativeLayer = options["headway_layer"]
    if options.get("sliding_window") not in (None, layer.window):
        raise ValueError(
            f"native MTP: {type(module).__name__} has a window of {options['sliding_window']}, its "
            f"config one of {layer.window}"
        )
    size = query.shape[-1]
    if scaling is not None and scaling != size**-0.5:
        query = query * (scaling * size**0.5)
    out = options["headway_attend"](layer.index, query, key, value)
    return out.transpose(1, 2), None


AttentionInterface.register(SEAM, _hand_over)


class NativeLayer(nn.Module):
    """A decoder layer of the target's own class, with the interface of our own layers.

    Args:
        layer_class: a transformers decoder layer.
        config: that it is built from.
        index: handed to ``attend``; the layers of ``config`` are counted the same way.
    """

    def __init__(self, layer_class: type[nn.Module], config: PreTrainedConfig, index: int) -> None:
        super().__init__()
        self.block = layer_class(config, index)
        self.index, self.window = index, attention_windows(config)[index]
        self._config = config
        self._target: TargetModel | None = None

    def bind(self, target: TargetModel) -> None:
        """Take rotary embeddings from ``target``, and run experts the way it does."""
        self._target = target
        self._config._experts_implementation = target.config._experts_implementation

    def forward(self, hidden: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        """(B, T, D) residual stream -> (B, T, D)."""
        assert self._target is not None, "attach the head first"
        rotary = self._target.model.get_decoder().rotary_emb
        nested = self._config.nested_rope_parameter_keys(self._config.rope_parameters)
        kind = {"layer_type": self._config.layer_types[self.index]} if nested else {}
        return self.block(
            hidden,
            attention_mask=None,
            position_ids=position_ids,
            position_embeddings=rotary(hidden, position_ids=position_ids, **kind),
            cache=None,
            headway_attend=attend,
            headway_layer=self,
        )


class NativeParts:
    """What modules of one kind of target are made of.

    Args:
        recorded: ``MtpConfig.native_config``: the ``model_type``, the names of the ``layer`` and
            ``norm`` classes beside that model in transformers, the layers' ``config``.

    Raises:
        ValueError: transformers has no such model or classes.
    """

    def __init__(self, recorded: dict[str, Any]) -> None:
        kind = recorded["model_type"]
        if kind not in CONFIG_MAPPING:
            raise ValueError(
                f"native_config: transformers has no model_type {kind!r}; a newer release may"
            )
        self._config = CONFIG_MAPPING[kind](**copy.deepcopy(recorded["config"]))
        self._config._attn_implementation = SEAM
        beside = vars(sys.modules[MODEL_FOR_CAUSAL_LM_MAPPING[type(self._config)].__module__])
        self._layer, self._norm = (
            self._class(beside, recorded[part], kind) for part in ("layer", "norm")
        )

    @staticmethod
    def _class(beside: dict[str, Any], name: str, kind: str) -> type[nn.Module]:
        found = beside.get(name)
        if not (isinstance(found, type) and issubclass(found, nn.Module)):
            raise ValueError(
                f"native_config: {name} is not in transformers' {kind}; the head was saved with "
                "another release"
            )
        return found

    def layer(self, index: int) -> NativeLayer:
        """The decoder layer of module ``index``."""
        return NativeLayer(self._layer, self._config, index)

    def norm(self) -> nn.Module:
        """A norm of D, with the target's own epsilon."""
        return self._norm(self._config.hidden_size, eps=self._config.rms_norm_eps)


def attention_windows(config: PreTrainedConfig) -> list[int | None]:
    """Sliding window of each module's layer.

    Raises:
        ValueError: a kind of attention that draft layers cannot do, or different windows.
    """
    count = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * count
    if other := sorted(set(kinds) - {"full_attention", "sliding_attention"}):
        raise ValueError(f"native MTP: draft layers cannot have {other[0]}")
    if len(set(kinds)) > 1:
        raise ValueError(f"native MTP: modules of different attention, {kinds}")
    return [config.sliding_window if kind == "sliding_attention" else None for kind in kinds]
