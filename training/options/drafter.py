"""The ``drafter`` section of a run: ``type`` names the family, the other keys are its own.

Every key but the first few is a field of the family's config in ``drafters.families``; null takes
that config's default.
"""

from dataclasses import dataclass, fields
from typing import Any

import draccus

STARTS = ("target", "random")
NOT_IN_CONFIG = ("init_from", "warm_from", "start", "draft_vocab_coverage")


@dataclass
class DrafterOptions(draccus.ChoiceRegistry):
    """What every family has."""

    init_from: str | None = None
    """Go on training this head (a folder or hub id, of any dialect that ``export`` reads), whose
    own config then holds; ``native`` takes the MTP modules that the target came with.
    """
    warm_from: str | None = None
    """Start a new head of another shape from what fits of this one: fewer layers, heads or slots,
    another draft vocabulary.
    """
    start: str = "target"
    """target: layers, norms and output matrices start from the target's own where shapes fit;
    random: only what must (the output matrices).
    """
    draft_vocab_size: int | None = None
    """Rows of the head's own output matrix (or of the borrowed one), the most frequent answer
    tokens; null keeps the whole vocabulary.
    """
    draft_vocab_coverage: float | None = None
    """Choose that size instead so that this part of the answer tokens is covered, such as 0.98."""
    confidence_head: bool = True
    """Carry a confidence output c_k."""
    confidence_rule: str | None = None
    """Its label, by the rule it will be served with: overlap (drawn drafts), draft_mass (one-hot
    drafts at a temperature) or agreement (temperature 0).
    """
    confidence_at: float | None = None
    """Temperature of both laws in that label; not with agreement, which has none."""

    def __post_init__(self) -> None:
        """Raise ValueError where options are out of range or contradict each other."""
        if self.start not in STARTS:
            raise ValueError(f"drafter.start must be one of {STARTS}, got {self.start!r}")
        if self.init_from is not None and self.warm_from is not None:
            raise ValueError("drafter.init_from and drafter.warm_from exclude each other: drop one")
        coverage = self.draft_vocab_coverage
        if coverage is not None and not 0 < coverage <= 1:
            raise ValueError(f"drafter.draft_vocab_coverage must lie in (0, 1], got {coverage}")
        if coverage is not None and self.draft_vocab_size is not None:
            raise ValueError(
                "drafter.draft_vocab_coverage chooses the size itself: drop draft_vocab_size"
            )
        if not self.confidence_head and (self.confidence_rule or self.confidence_at):
            raise ValueError(
                "drafter.confidence_rule and confidence_at have no effect without confidence_head"
            )
        if self.confidence_rule == "agreement" and self.confidence_at is not None:
            raise ValueError(
                "drafter.confidence_at has no effect with confidence_rule=agreement: drop it"
            )

    def head_fields(self) -> dict[str, Any]:
        """Keyword arguments for ``drafters.build_drafter``."""
        named = {f.name: getattr(self, f.name) for f in fields(self)}
        return {
            name: value
            for name, value in named.items()
            if name not in NOT_IN_CONFIG and value is not None
        }

    @property
    def family(self) -> str:
        """The family's name, as in ``drafters.FAMILIES``."""
        return self.get_choice_name(type(self))


@dataclass
class DecoderOptions(DrafterOptions):
    """Heads with decoder layers; their widths are the target's own."""

    num_layers: int | None = None
    """Decoder layers of the head."""
    qk_norm: bool | None = None
    """Normalise queries and keys per head, as Qwen3 does."""
    sliding_window: int | None = None
    """W: rows see keys less than W positions back; null sees all."""
    intermediate_size: int | None = None
    """Width of the feed-forward layers; null is the target's."""


@DrafterOptions.register_subclass("medusa")
@dataclass
class MedusaOptions(DrafterOptions):
    """Medusa (arXiv:2401.10774)."""

    num_heads: int = 4
    """K."""
    num_layers: int = 1
    """Residual blocks per head."""
    shared_lm_head: bool = False
    """Use the target's frozen output matrix for all heads (large vocabularies)."""


@DrafterOptions.register_subclass("hydra")
@dataclass
class HydraOptions(DecoderOptions):
    """Hydra (arXiv:2402.05109); num_layers 1 is Hydra++."""

    num_heads: int = 4
    """K."""
    mlp_layers: int = 1
    """Residual blocks per head."""
    shared_lm_head: bool = False
    """Use the target's frozen output matrix for all heads (large vocabularies)."""
    lm_head_bias: bool = False
    """A bias on each head's own output matrix."""
    prefix_norm: bool = False
    """Norm what the prefix layer gives, as the authors' code does."""

    def __post_init__(self) -> None:
        """Raise ValueError where options are out of range or contradict each other."""
        super().__post_init__()
        if self.intermediate_size is not None and not self.num_layers and self.init_from is None:
            raise ValueError(
                "drafter.intermediate_size belongs to Hydra++'s prefix layer: drop it, or set "
                "drafter.num_layers=1"
            )


@DrafterOptions.register_subclass("eagle1")
@dataclass
class Eagle1Options(DecoderOptions):
    """EAGLE-1 (arXiv:2401.15077). Decoded with a dynamic tree it is EAGLE-2; with loss.steps 3,
    loss.detach true and a top_k term it is HASS (arXiv:2408.15766).
    """

    fc_bias: bool = False
    """A bias on the fusion of embedding and feature."""


@dataclass
class FusedOptions(DecoderOptions):
    """Heads that read captured layers of the target."""

    feature_layers: list[int] | None = None
    """hidden_states indices to fuse; null is [2, n//2, n-3]."""


@dataclass
class NormedFusionOptions(FusedOptions):
    """Norms around the fusion: of EAGLE-3 and P-EAGLE."""

    fc_norm: bool = False
    """Normalise each feature before the fusion (EAGLE-3.1)."""
    norm_before_fc: bool = False
    """Normalise all features together before the fusion."""
    norm_before_residual: bool = False
    """Start the residual stream from the normed feature, as speculators can."""


@DrafterOptions.register_subclass("eagle3")
@dataclass
class Eagle3Options(NormedFusionOptions):
    """EAGLE-3 (arXiv:2503.01840)."""

    norm_output: bool = False
    """Feed the normed output back (EAGLE-3.1)."""


@DrafterOptions.register_subclass("mtp")
@dataclass
class MtpOptions(DecoderOptions):
    """Multi-token prediction (arXiv:2412.19437), decoded by this project's own decoder only."""

    num_modules: int = 1
    """1 applies one module recursively (arXiv:2509.18362); K > 1 are separate modules, one per
    depth.
    """
    norm_output: bool = True
    """Feed the normed output back."""


@DrafterOptions.register_subclass("peagle")
@dataclass
class PEagleOptions(NormedFusionOptions):
    """P-EAGLE (arXiv:2602.01469)."""

    num_drafts: int = 8
    """K, tokens per pass."""


@DrafterOptions.register_subclass("dflash")
@dataclass
class DFlashOptions(FusedOptions):
    """DFlash (arXiv:2602.06036)."""

    block_size: int = 8
    """B; a pass drafts B-1 tokens."""
    causal: bool = False
    """Rows of a block see only earlier ones of it (JetSpec, arXiv:2606.18394)."""
    mask_token_id: int | None = None
    """Token whose embedding the empty slots hold; null chooses one that text does not contain."""


@DrafterOptions.register_subclass("dspark")
@dataclass
class DSparkOptions(DFlashOptions):
    """DSpark (arXiv:2607.05147)."""

    block_size: int = 7
    """Rows per pass, all of which draft."""
    markov_rank: int | None = None
    """Rank of the bias that a token puts on its successor; null is 256."""
    markov_type: str = "vanilla"
    """vanilla, gated, rnn or none."""

    def __post_init__(self) -> None:
        """Raise ValueError where options are out of range or contradict each other."""
        super().__post_init__()
        if self.markov_rank is not None and self.markov_type == "none":
            raise ValueError("drafter.markov_rank has no effect with markov_type=none: drop it")
