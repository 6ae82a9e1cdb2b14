"""What the configurations of all draft heads share; each family's own is in ``families.py``.

Legend: D hidden size, V target vocabulary, Vd draft vocabulary.

Layers of the target are named by their ``hidden_states`` index k = the residual stream *entering*
layer k (so 0 is the embedding and ``num_layers`` would be the output of the last layer, which
Hugging Face returns after the final norm and which therefore cannot be a feature).
"""

from typing import Any

from transformers import PreTrainedConfig

from drafters.rope import extension_problems

CONFIDENCE_RULES = ("overlap", "draft_mass", "agreement")


class DrafterConfig(PreTrainedConfig):
    """What every draft head records about itself and about the target it was trained on.

    Attributes:
        hidden_size: D, width of the draft network; equal to the target's.
        vocab_size: V, rows of the target's output matrix.
        draft_vocab_size: Vd, rows of the head's own output matrix; None means V.
        target_num_layers: decoder layers of the target.
        target_name: where the target came from (a hub id or folder name; informational).
        target_fingerprint: hashes of the target's shape, weights, tokenizer and chat template.
        reference: None, or, of a head whose target was trained along with it, which target it is
            lossless with respect to: {"base", "base_weights", "adapter"}, the name of the original,
            the hash of its weights and that of the adapter merged into it.
        confidence_head: whether the head carries a confidence output c_k.
        confidence_rule: acceptance label c_k is trained on, by the rule it will be served with:
            "overlap" is 1 - ½‖p-q‖₁ (sampled drafts), "draft_mass" is p of the draft's argmax
            (one-hot drafts at a temperature), "agreement" is 1 where both argmaxes are one token
            (temperature 0).
        confidence_at: temperature of both laws in that label; no effect on "agreement".
        draft_temperature: calibrated factor on the temperature of the head's law, for drawn drafts.
        confidence_temperatures, confidence_biases: calibration of the confidence output, one of
            each per draft position (see ``drafters.confidence``); None means uncalibrated.
        tree: the static draft tree to decode with, a list of rank paths such as
            [[0], [0, 0], [1]] (see ``scripts.fit_tree``); None lets the decoder grow its own.
    """

    model_type = "headway"

    hidden_size: int = 0
    vocab_size: int = 0
    draft_vocab_size: int | None = None
    target_num_layers: int = 0
    target_name: str | None = None
    target_fingerprint: dict[str, str] | None = None
    reference: dict[str, str] | None = None
    confidence_head: bool = False
    confidence_rule: str = "overlap"
    confidence_at: float = 1.0
    confidence_temperatures: list[float] | None = None
    confidence_biases: list[float] | None = None
    tree: list[list[int]] | None = None
    draft_temperature: float = 1.0
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        """Fill defaults that depend on other fields and check ranges.

        Raises:
            ValueError: a field is out of range; the message names it.
        """
        if self.draft_vocab_size is None:
            self.draft_vocab_size = self.vocab_size
        if self.target_num_layers:  # not the empty instance that transformers makes for defaults
            for name in ("hidden_size", "vocab_size", "draft_vocab_size"):
                if getattr(self, name) < 1:
                    raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(
                f"draft_vocab_size ({self.draft_vocab_size}) is larger than vocab_size "
                f"({self.vocab_size}): lower draft_vocab_size or leave it out to use the whole "
                "vocabulary"
            )
        if not self.draft_temperature > 0:
            raise ValueError(f"draft_temperature must be above 0, got {self.draft_temperature}")
        if self.confidence_rule not in CONFIDENCE_RULES:
            raise ValueError(
                f"confidence_rule {self.confidence_rule!r} is unknown: choose one of "
                f"{CONFIDENCE_RULES}"
            )
        if not self.confidence_at > 0:
            raise ValueError(f"confidence_at must be above 0, got {self.confidence_at}")
        if self.tree is not None and (not self.tree or not all(self.tree)):
            raise ValueError(f"tree: every path needs at least one rank, got {self.tree}")
        temperatures = self.confidence_temperatures
        if temperatures is not None and any(value <= 0 for value in temperatures):
            raise ValueError(f"confidence_temperatures must all be positive, got {temperatures}")
        biases = self.confidence_biases
        if biases is not None and len(biases) != len(temperatures or []):
            raise ValueError(
                "confidence_biases needs one for each of confidence_temperatures, got "
                f"{biases} and {temperatures}: calibrate the head again (scripts.calibrate)"
            )
        super().__post_init__(**kwargs)

    def own_fields(self) -> dict[str, Any]:
        """The fields declared in this file, without what transformers adds to every "
        "configuration."""
        classes = [cls for cls in type(self).__mro__ if issubclass(cls, DrafterConfig)]
        names = {name for cls in classes for name in cls.__annotations__}
        return {name: getattr(self, name) for name in sorted(names)}

    @property
    def reduced_vocab(self) -> bool:
        """Whether the head predicts over fewer tokens than the target."""
        return self.draft_vocab_size != self.vocab_size


class DecoderConfig(DrafterConfig):
    """A head with decoder layers of Llama's shape.

    Attributes:
        num_layers: decoder layers of the head.
        intermediate_size, num_attention_heads, num_key_value_heads, head_dim, rms_norm_eps,
        rope_theta,
        max_position_embeddings: shape of each layer, as in Llama.
        qk_norm: normalise queries and keys per head, as Qwen3 does.
        attention_bias: queries, keys and values have biases, as in Qwen2.
        rope_extension: what stretches the rotary embedding (``drafters.rope``), as heads of other
            trainers may have it; None is plain RoPE.
        sliding_window: W; a row sees keys less than W positions back, in every layer. None sees
            all.
    """

    num_layers: int = 1
    intermediate_size: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 0
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    max_position_embeddings: int = 2048
    qk_norm: bool = False
    attention_bias: bool = False
    rope_extension: dict[str, Any] | None = None
    sliding_window: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Check the shape of the layers.

        Raises:
            ValueError: a field is out of range; the message names it.
        """
        if self.target_num_layers and self.num_layers:
            for name in ("intermediate_size", "num_attention_heads", "head_dim"):
                if getattr(self, name) <= 0:
                    raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
            if not self.num_key_value_heads or self.num_attention_heads % self.num_key_value_heads:
                raise ValueError(
                    f"num_key_value_heads ({self.num_key_value_heads}) must divide "
                    f"num_attention_heads ({self.num_attention_heads})"
                )
            if self.head_dim % 2:
                raise ValueError(
                    f"head_dim must be even for rotary embeddings, got {self.head_dim}"
                )
        if self.num_layers < 0:
            raise ValueError(f"num_layers must be at least 0, got {self.num_layers}")
        if self.rope_extension is not None and (found := extension_problems(self.rope_extension)):
            raise ValueError(f"rope_extension: {'; '.join(found)}")
        if self.sliding_window is not None and self.sliding_window < 2:
            raise ValueError(f"sliding_window must be at least 2, got {self.sliding_window}")
        super().__post_init__(**kwargs)


def default_feature_layers(num_layers: int) -> list[int]:
    """EAGLE-3's choice [2, n//2, n-3] as ``hidden_states`` indices (arXiv:2503.01840), squeezed for
    tiny targets.

    Raises:
        ValueError: fewer than three layers to take features from.
    """
    if num_layers < 3:
        raise ValueError(f"EAGLE-3 fuses three layers but the target has only {num_layers}")
    chosen = [2, num_layers // 2, num_layers - 3]
    return chosen if chosen[0] < chosen[1] < chosen[2] else [0, num_layers // 2, num_layers - 1]


def spread_feature_layers(num_layers: int, count: int = 5) -> list[int]:
    """DFlash's choice (arXiv:2602.06036): the outputs of ``count`` layers spread over 1..n-3, as
    ``hidden_states`` indices (one more each); fewer in targets with fewer layers.

    Raises:
        ValueError: fewer than four layers to take features from.
    """
    if num_layers < 4:
        raise ValueError(f"feature_layers: four layers are needed, the target has {num_layers}")
    step = (num_layers - 4) / (count - 1)
    return sorted({round(1 + step * place) + 1 for place in range(count)})


def check_feature_layers(layers: list[int], num_layers: int) -> None:
    """Refuse layer ids that the target does not have or that are not a plain residual stream.

    Raises:
        ValueError: empty, repeated, unsorted or out-of-range ids.
    """
    if not layers or sorted(set(layers)) != list(layers):
        raise ValueError(f"feature_layers must be increasing and without repeats, got {layers}")
    if layers[0] < 0 or layers[-1] >= num_layers:
        raise ValueError(
            f"feature_layers {layers} must lie in 0..{num_layers - 1}: index k is the stream "
            f"entering layer k, and index {num_layers} is only available after the target's final "
            "norm"
        )
