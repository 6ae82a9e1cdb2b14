"""Parameters and readings that the draft models of several engines share.

Legend: H draft hidden, Ht target hidden, V target vocabulary, Vd draft vocabulary, F captured
layers.
"""

from collections.abc import Sequence
from typing import Any

from drafters.export.dialect import TensorSpec
from drafters.export.engines.loader import Config, Reading
from drafters.export.fields import llama_layer, rope_theta
from drafters.target import TargetModel

FULL, SLIDING = "full_attention", "sliding_attention"


def common(config: Config) -> Reading:
    """Of every decoder."""
    return {
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
        "rope_theta": rope_theta(config),
        "num_layers": config["num_hidden_layers"],
    }


def eagle3_parameters(
    config: Config, features: int, qk_norm: bool = False, hidden_norms: bool = False
) -> list[TensorSpec]:
    """Of an EAGLE-3 model without its output matrix.

    Args:
        config: as the engine reads it.
        features: F, as the engine counts them.
        qk_norm: whether queries and keys are normalised per head.
        hidden_norms: whether layers after the first use a ``hidden_norm``.
    """
    hidden = config["hidden_size"]
    read = config.get("target_hidden_size") or hidden
    found = [TensorSpec("model.fc.weight", (hidden, features * read))]
    if norm_before_fc(config):
        found.append(TensorSpec("model.input_norm.weight", (features * read,)))
    if config.get("fc_norm"):
        found += [TensorSpec(f"model.fc_norm.{i}.weight", (read,)) for i in range(features)]
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        wide = None if layer else 2 * hidden
        found += llama_layer(name, config, wide, qk_norm=qk_norm, engine=name)
        unused = layer > 0 and not hidden_norms
        found.append(TensorSpec(f"{name}.hidden_norm.weight", (hidden,), optional=unused))
    found.append(TensorSpec("model.norm.weight", (hidden,)))
    return [*found, embedding(config, hidden == read)]


def embedding(config: Config, optional: bool) -> TensorSpec:
    """The input embedding, a copy of the target's in most files that have it.

    Args:
        config: as the engine reads it.
        optional: whether a file may leave it out.
    """
    shape = (config["vocab_size"], config["hidden_size"])
    return TensorSpec("model.embed_tokens.weight", shape, optional=optional)


def block_parameters(config: Config, features: int, prefix: str, wide: int) -> list[TensorSpec]:
    """Of a DFlash backbone: Qwen3's layers, the fusion of the context, norms.

    Args:
        config: as the engine reads it.
        features: F.
        prefix: of the engine's names.
        wide: Ht.
    """
    hidden = config["hidden_size"]
    found = [
        TensorSpec(f"{prefix}fc.weight", (hidden, features * wide)),
        TensorSpec(f"{prefix}hidden_norm.weight", (hidden,)),
        TensorSpec(f"{prefix}norm.weight", (hidden,)),
    ]
    for layer in range(config["num_hidden_layers"]):
        name = f"{prefix}layers.{layer}"
        found += llama_layer(name, config, qk_norm=True, engine=name)
    return found


def norm_before_fc(config: Config) -> bool:
    """Whether all features are normed as one: nested before top level."""
    return bool(nested(config, "eagle_config").get("norm_before_fc", config.get("norm_before_fc")))


def nested(config: Config, name: str) -> dict[str, Any]:
    """A nest of a config; empty if it has none."""
    return config.get(name) or {}


def first(*values: Any) -> Any:
    """The first that is not None."""
    return next((value for value in values if value is not None), None)


def hidden_states_ids(outputs: Sequence[int] | None) -> tuple[int, ...] | None:
    """Layers by their outputs -> ``hidden_states`` indices."""
    return tuple(k + 1 for k in outputs) if outputs else None


def default_layers(target: TargetModel) -> tuple[int, ...]:
    """What engines capture for EAGLE-3 where a config says nothing."""
    return 2, target.num_layers // 2, target.num_layers - 3


def windows(sizes: Sequence[int | None], target: TargetModel) -> tuple[int | None, ...]:
    """Sliding windows of layers; one as long as the longest text is none.

    Args:
        sizes: of each layer.
        target: that is served.
    """
    return tuple(None if size is None or size >= target.max_length else size for size in sizes)


def layer_types(config: Config) -> list[str] | None:
    """Attention of each layer; None if the config does not say."""
    return config.get("layer_types") or None
