"""Configurations of the draft heads: one dataclass per family, all validation in ``__post_init__``.

Legend: D hidden size, V target vocabulary, Vd draft vocabulary, K heads.

Layers of the target are named by their ``hidden_states`` index k = the residual stream *entering*
layer k (so 0 is the embedding and ``num_layers`` would be the output of the last layer, which
Hugging Face returns after the final norm and which therefore cannot be a feature).
"""

from typing import Any

from transformers import PreTrainedConfig


class DrafterConfig(PreTrainedConfig):
    """What every draft head records about itself and about the target it was trained on.

    Attributes:
        hidden_size: D, width of the draft network; equal to the target's.
        vocab_size: V, rows of the target's output matrix.
        draft_vocab_size: Vd, rows of the head's own output matrix; None means V.
        target_num_layers: decoder layers of the target.
        target_name: where the target came from (a hub id or folder name; informational).
        target_fingerprint: hashes of the target's shape, weights, tokenizer and chat template.
        confidence_head: whether the head carries a confidence output c_k.
        confidence_rule: acceptance label c_k is trained on; "overlap" is 1 - ½‖p-q‖₁.
        draft_temperature: calibrated factor on the temperature of the head's law, for drawn drafts.
        confidence_temperatures: one calibration temperature per draft position (see
            ``drafters.confidence``); None means uncalibrated.
    """

    model_type = "headway"

    hidden_size: int = 0
    vocab_size: int = 0
    draft_vocab_size: int | None = None
    target_num_layers: int = 0
    target_name: str | None = None
    target_fingerprint: dict[str, str] | None = None
    confidence_head: bool = False
    confidence_rule: str = "overlap"
    confidence_temperatures: list[float] | None = None
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
        if self.confidence_rule != "overlap":
            raise ValueError(
                f"confidence_rule {self.confidence_rule!r} is unknown: the one rule offered is "
                "'overlap'"
            )
        temperatures = self.confidence_temperatures
        if temperatures is not None and any(value <= 0 for value in temperatures):
            raise ValueError(f"confidence_temperatures must all be positive, got {temperatures}")
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


class Eagle3Config(DrafterConfig):
    """EAGLE-3 (arXiv:2503.01840) and its 3.1 variants.

    Attributes:
        feature_layers: target layers whose entering residual stream is fused, e.g. [2, n//2, n-3].
        intermediate_size, num_attention_heads, num_key_value_heads, head_dim, rms_norm_eps,
        rope_theta,
        max_position_embeddings: shape of the one decoder block, as in Llama.
        fc_norm: normalise each captured feature before the fusion (EAGLE-3.1).
        norm_output: feed the *normed* output back as the next step's feature (EAGLE-3.1); False is
            EAGLE-3.
    """

    model_type = "headway-eagle3"

    feature_layers: list[int] | None = None
    intermediate_size: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 0
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    max_position_embeddings: int = 2048
    fc_norm: bool = False
    norm_output: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        """Check the layer ids and the shape of the block.

        Raises:
            ValueError: a field is out of range; the message names it.
        """
        layers = self.target_num_layers
        if self.feature_layers is None and layers:
            self.feature_layers = default_feature_layers(layers)
        if layers:
            check_feature_layers(self.feature_layers or [], layers)
            for name in (
                "hidden_size",
                "vocab_size",
                "intermediate_size",
                "num_attention_heads",
                "head_dim",
            ):
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
        super().__post_init__(**kwargs)


class MedusaConfig(DrafterConfig):
    """Medusa (arXiv:2401.10774).

    Attributes:
        num_heads: K; head i (from 0) predicts the token i+2 places after its input position.
        num_layers: L residual blocks per head, each its own module.
        shared_lm_head: use the target's frozen output matrix for every head instead of K trainable
            copies; the way to go for large vocabularies, where each copy costs V·D parameters.
        tree: the static draft tree, a list of rank paths such as [[0], [0, 0], [1]]; None lets the
            decoder take its default.
    """

    model_type = "headway-medusa"

    num_heads: int = 4
    num_layers: int = 1
    shared_lm_head: bool = False
    tree: list[list[int]] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Check counts and that the options go together.

        Raises:
            ValueError: a field is out of range; the message names it.
        """
        for name in ("num_heads", "num_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.shared_lm_head and self.draft_vocab_size not in (None, self.vocab_size):
            raise ValueError(
                "shared_lm_head uses the target's whole output matrix, so draft_vocab_size has no "
                "effect: drop one"
            )
        if self.tree is not None and any(
            not 1 <= len(path) <= self.num_heads for path in self.tree
        ):
            raise ValueError(
                f"tree: every path must have 1 to num_heads={self.num_heads} ranks, got {self.tree}"
            )
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
