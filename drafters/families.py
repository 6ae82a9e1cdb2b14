"""The configuration of each family: one dataclass each, all validation in ``__post_init__``.

Legend: D hidden size, V target vocabulary, Vd draft vocabulary, K heads or drafts per pass.
"""

from typing import Any

from drafters.config import (
    DecoderConfig,
    DrafterConfig,
    check_feature_layers,
    default_feature_layers,
    spread_feature_layers,
)


class MedusaConfig(DrafterConfig):
    """Medusa (arXiv:2401.10774).

    Attributes:
        num_heads: K; head i (from 0) predicts the token i+2 places after its input position.
        num_layers: L residual blocks per head, each its own module.
        shared_lm_head: use the target's frozen output matrix for every head instead of K trainable
            copies; the way to go for large vocabularies, where each copy costs V·D parameters.
    """

    model_type = "headway-medusa"

    num_heads: int = 4
    num_layers: int = 1
    shared_lm_head: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        """Check counts and that the options go together.

        Raises:
            ValueError: a field is out of range; the message names it.
        """
        _at_least_one(self, "num_heads", "num_layers")
        _check_depth(self.tree, self.num_heads, "num_heads")
        super().__post_init__(**kwargs)


class HydraConfig(DecoderConfig):
    """Hydra and Hydra++ (arXiv:2402.05109).

    Attributes:
        num_heads: K; head i (from 0) reads the hidden state of t and the embeddings of tokens
            t+1..t+1+i, and predicts token t+2+i.
        mlp_layers: residual blocks per head; the first narrows (i+2)·D to D.
        shared_lm_head: use the target's frozen output matrix for every head.
        num_layers: 1 puts Hydra++'s prefix layer over the hidden states first; 0 is plain Hydra.
    """

    model_type = "headway-hydra"

    num_heads: int = 4
    mlp_layers: int = 1
    shared_lm_head: bool = False
    num_layers: int = 0

    def __post_init__(self, **kwargs: Any) -> None:
        """Check counts and that the options go together.

        Raises:
            ValueError: a field is out of range; the message names it.
        """
        _at_least_one(self, "num_heads", "mlp_layers")
        if self.num_layers not in (0, 1):
            raise ValueError(f"num_layers: Hydra has 0 or 1 prefix layer, got {self.num_layers}")
        if not self.num_layers and (self.qk_norm or self.sliding_window is not None):
            raise ValueError(
                "qk_norm and sliding_window belong to the prefix layer: drop them, or set "
                "num_layers=1"
            )
        _check_depth(self.tree, self.num_heads, "num_heads")
        super().__post_init__(**kwargs)


class Eagle1Config(DecoderConfig):
    """EAGLE-1 (arXiv:2401.15077); with a dynamic tree it is EAGLE-2 (arXiv:2406.16858), trained
    with several steps HASS (arXiv:2408.15766).

    Attributes:
        fc_bias: a bias on the fusion of embedding and feature, as the authors' files have; engines
            differ in whether they read it.
    """

    model_type = "headway-eagle1"

    fc_bias: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        """Check counts.

        Raises:
            ValueError: a field is out of range; the message names it.
        """
        _at_least_one(self, "num_layers")
        super().__post_init__(**kwargs)


class Eagle3Config(DecoderConfig):
    """EAGLE-3 (arXiv:2503.01840) and its 3.1 variants.

    Attributes:
        feature_layers: target layers whose entering residual stream is fused, e.g. [2, n//2, n-3];
            any number of them.
        fc_norm: normalise each captured feature before the fusion (EAGLE-3.1).
        norm_output: feed the *normed* output back as the next step's feature (EAGLE-3.1); False is
            EAGLE-3.
        num_layers: the first layer reads embedding and feature, further ones are plain.
    """

    model_type = "headway-eagle3"

    feature_layers: list[int] | None = None
    fc_norm: bool = False
    norm_output: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        """Check the layer ids.

        Raises:
            ValueError: a field is out of range; the message names it.
        """
        if self.target_num_layers:
            _at_least_one(self, "num_layers")
            if self.feature_layers is None:
                self.feature_layers = default_feature_layers(self.target_num_layers)
            check_feature_layers(self.feature_layers, self.target_num_layers)
        super().__post_init__(**kwargs)


class MtpConfig(DecoderConfig):
    """Multi-token prediction modules (arXiv:2412.19437).

    Attributes:
        num_modules: 1 applies one module recursively (FastMTP, arXiv:2509.18362); K > 1 are
            separate modules, one per depth, each with keys and values of its own.
        num_layers: decoder layers per module (1 everywhere in released models).
        hidden_first: order of the projection's input; released weights have the embedding first.
        norm_output: feed the normed output back (Qwen, FastMTP) or the stream before the norm.
        native_config: what modules that came with a target are made of
            (``drafters.native_layer``); the other fields then describe them. None builds Llama
            layers.
    """

    model_type = "headway-mtp"

    num_modules: int = 1
    hidden_first: bool = False
    norm_output: bool = True
    native_config: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Check counts, and that nothing is asked of a native layer.

        Raises:
            ValueError: a field is out of range or has no effect; the message names it.
        """
        _at_least_one(self, "num_modules", "num_layers")
        if self.native_config is not None and (self.num_layers != 1 or self.qk_norm):
            raise ValueError(
                "num_layers and qk_norm have no effect on modules that came with a target: leave "
                "them out"
            )
        if self.num_modules > 1:
            _check_depth(self.tree, self.num_modules, "num_modules")
        super().__post_init__(**kwargs)


class PEagleConfig(Eagle3Config):
    """P-EAGLE (arXiv:2602.01469): EAGLE-3 that drafts K tokens in one pass.

    Attributes:
        num_drafts: K, tokens per pass: one from the last committed row, K-1 from mask rows.
        num_layers: as in EAGLE-3; the released heads have four.
    """

    model_type = "headway-peagle"

    num_drafts: int = 8
    num_layers: int = 4

    def __post_init__(self, **kwargs: Any) -> None:
        """Check counts.

        Raises:
            ValueError: a field is out of range; the message names it.
        """
        if self.num_drafts < 2:
            raise ValueError(
                f"num_drafts must be at least 2 (one draft per pass is EAGLE-3), got "
                f"{self.num_drafts}"
            )
        _check_depth(self.tree, self.num_drafts, "num_drafts")
        if self.norm_output:
            raise ValueError("norm_output has no effect: P-EAGLE feeds nothing back")
        super().__post_init__(**kwargs)


class DFlashConfig(DecoderConfig):
    """DFlash (arXiv:2602.06036): one pass over a block of mask tokens, which attends to the
    target's features of everything committed.

    Attributes:
        feature_layers: captured target layers, as ``hidden_states`` indices; None spreads five
            evenly.
        num_layers: the released heads have five.
        block_size: B; rows per pass, of which B-1 draft.
        causal: rows of a block see only earlier ones of it (JetSpec, arXiv:2606.18394).
        mask_token_id: the token whose embedding the empty slots hold; None lets the builder choose
            one that text does not contain.
    """

    model_type = "headway-dflash"

    feature_layers: list[int] | None = None
    block_size: int = 8
    causal: bool = False
    mask_token_id: int | None = None
    num_layers: int = 5
    qk_norm: bool = True

    @property
    def num_drafts(self) -> int:
        """Tokens per pass."""
        return self.block_size - 1

    def __post_init__(self, **kwargs: Any) -> None:
        """Check the layer ids and the block.

        Raises:
            ValueError: a field is out of range; the message names it.
        """
        if self.target_num_layers:
            _at_least_one(self, "num_layers")
            if self.feature_layers is None:
                self.feature_layers = spread_feature_layers(self.target_num_layers)
            check_feature_layers(self.feature_layers, self.target_num_layers)
            token = self.mask_token_id
            if token is None or not 0 <= token < self.vocab_size:
                raise ValueError(f"mask_token_id must lie in 0..{self.vocab_size - 1}, got {token}")
        if self.num_drafts < 1:
            raise ValueError(f"block_size {self.block_size} leaves no row that drafts")
        _check_depth(self.tree, self.num_drafts, "num_drafts")
        super().__post_init__(**kwargs)


MARKOV_TYPES = ("vanilla", "gated", "rnn", "none")


class DSparkConfig(DFlashConfig):
    """DSpark (arXiv:2607.05147): DFlash's network with shifted prediction and a small sequential
    head on top.

    Attributes:
        block_size: rows per pass, all of which draft.
        markov_rank: r of the bias W1[x_{k-1}] W2 added to row k's logits.
        markov_type: "vanilla", "gated" or "rnn"; "none" leaves it out.
    """

    model_type = "headway-dspark"

    block_size: int = 7
    markov_rank: int = 256
    markov_type: str = "vanilla"

    @property
    def num_drafts(self) -> int:
        """Tokens per pass."""
        return self.block_size

    def __post_init__(self, **kwargs: Any) -> None:
        """Check the Markov head.

        Raises:
            ValueError: a field is out of range; the message names it.
        """
        if self.markov_type not in MARKOV_TYPES:
            raise ValueError(
                f"markov_type {self.markov_type!r} is unknown: choose one of {MARKOV_TYPES}"
            )
        _at_least_one(self, "markov_rank")
        super().__post_init__(**kwargs)


def _at_least_one(config: DrafterConfig, *names: str) -> None:
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(config, name)}")


def _check_depth(tree: list[list[int]] | None, depth: int, name: str) -> None:
    if tree is not None and any(len(path) > depth for path in tree):
        raise ValueError(f"tree: every path must have 1 to {name}={depth} ranks, got {tree}")
