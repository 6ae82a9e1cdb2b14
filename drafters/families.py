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
        lm_head_bias: a bias on each head's own output matrix, as the authors' files have.
        num_layers: 1 puts Hydra++'s prefix layer over the hidden states first; 0 is plain Hydra.
        prefix_norm: norm what the prefix layer gives, as the authors do.
    """

    model_type = "headway-hydra"

    num_heads: int = 4
    mlp_layers: int = 1
    shared_lm_head: bool = False
    lm_head_bias: bool = False
    num_layers: int = 0
    prefix_norm: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        """Check counts and that the options go together.

        Raises:
            ValueError: a field is out of range; the message names it.
        """
        _at_least_one(self, "num_heads", "mlp_layers")
        if self.num_layers not in (0, 1):
            raise ValueError(f"num_layers: Hydra has 0 or 1 prefix layer, got {self.num_layers}")
        of_prefix = self.qk_norm or self.attention_bias or self.sliding_window is not None
        if not self.num_layers and of_prefix:
            raise ValueError(
                "qk_norm, attention_bias and sliding_window belong to the prefix layer: drop them, "
                "or set num_layers=1"
            )
        if self.prefix_norm and not self.num_layers:
            raise ValueError("prefix_norm belongs to the prefix layer: drop it, or num_layers=1")
        if self.lm_head_bias and self.shared_lm_head:
            raise ValueError("lm_head_bias has no effect with shared_lm_head: drop one")
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
        norm_before_fc: normalise all captured features together, as one vector, before the fusion.
        norm_before_residual: the residual stream of the first layer starts from the normed
            feature; False, from the plain one, is EAGLE-3.
        norm_output: feed the *normed* output back as the next step's feature (EAGLE-3.1); False is
            EAGLE-3.
        num_layers: the first layer reads embedding and feature, further ones are plain.
        own_embedding: the head has an embedding of its own, trained with it, in place of the
            target's.
    """

    model_type = "headway-eagle3"

    feature_layers: list[int] | None = None
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    own_embedding: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        """Check the layer ids, and that only one norm stands before the fusion.

        Raises:
            ValueError: a field is out of range; the message names it.
        """
        if self.fc_norm and self.norm_before_fc:
            raise ValueError(
                "fc_norm and norm_before_fc are two ways to norm what is fused: choose one"
            )
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
        mask_token_id: the token whose row in an embedding holds that of the mask rows, where the
            head has its own or a file needs one; None lets a writer choose.
    """

    model_type = "headway-peagle"

    num_drafts: int = 8
    num_layers: int = 4
    mask_token_id: int | None = None

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
        token = self.mask_token_id
        if self.own_embedding and token is None:
            raise ValueError("own_embedding needs mask_token_id, the mask's row of the embedding")
        if self.target_num_layers and token is not None and not 0 <= token < self.vocab_size:
            raise ValueError(f"mask_token_id must lie in 0..{self.vocab_size - 1}, got {token}")
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
        window_layers: layers that have the sliding window; None: all have it.
        causal_layers: layers in which rows see only earlier ones of their block, of heads trained
            elsewhere whose layers differ in that; None: all do what ``causal`` says.
        mask_token_id: the token whose embedding the empty slots hold; None lets the builder choose
            one that text does not contain.
    """

    model_type = "headway-dflash"

    feature_layers: list[int] | None = None
    block_size: int = 8
    causal: bool = False
    window_layers: list[int] | None = None
    causal_layers: list[int] | None = None
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
        for name in ("window_layers", "causal_layers"):
            _check_draft_layers(self, name)
        if self.window_layers is not None and self.sliding_window is None:
            raise ValueError("window_layers has no effect without sliding_window: drop it")
        if self.causal_layers is not None and self.causal:
            raise ValueError("causal_layers has no effect where causal makes all of them so")
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
        markov_bias: the projection that gates or carries the state has a bias, as in heads of other
            trainers.
        sample_from_anchor: the root's own row drafts x_{a+1}, row k x_{a+1+k}. False: rows draft in
            place as DFlash's do, and the root's none.
        confidence_with_markov: the confidence output reads the embedding of the token before, too.
    """

    model_type = "headway-dspark"

    block_size: int = 7
    markov_rank: int = 256
    markov_type: str = "vanilla"
    markov_bias: bool = False
    sample_from_anchor: bool = True
    confidence_with_markov: bool = True

    @property
    def num_drafts(self) -> int:
        """Tokens per pass."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    def __post_init__(self, **kwargs: Any) -> None:
        """Check the Markov head.

        Raises:
            ValueError: a field is out of range; the message names it.
        """
        if self.markov_type not in MARKOV_TYPES:
            raise ValueError(
                f"markov_type {self.markov_type!r} is unknown: choose one of {MARKOV_TYPES}"
            )
        if self.markov_bias and self.markov_type not in ("gated", "rnn"):
            raise ValueError(f"markov_bias: a {self.markov_type} Markov head has no projection")
        if self.markov_type == "rnn" and not self.sample_from_anchor:
            raise ValueError(
                "sample_from_anchor=False: the state of an rnn Markov head starts at the root's row"
            )
        _at_least_one(self, "markov_rank")
        super().__post_init__(**kwargs)


def _at_least_one(config: DrafterConfig, *names: str) -> None:
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(config, name)}")


def _check_draft_layers(config: DFlashConfig, name: str) -> None:
    layers = getattr(config, name)
    if layers is not None and not set(layers) <= set(range(config.num_layers)):
        raise ValueError(f"{name} must be layers of the head, 0..{config.num_layers - 1}: {layers}")


def _check_depth(tree: list[list[int]] | None, depth: int, name: str) -> None:
    if tree is not None and any(len(path) > depth for path in tree):
        raise ValueError(f"tree: every path must have 1 to {name}={depth} ranks, got {tree}")
