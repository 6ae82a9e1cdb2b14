"""The objective's options, for all families, and each family's own defaults.

An option that has no effect on a family is refused; ``None`` takes the family's default.
"""

from dataclasses import dataclass, replace
from typing import Any

from drafters import Drafter
from drafters.families import HydraConfig, MtpConfig
from training import losses

ALL = ("medusa", "hydra", "eagle1", "eagle3", "mtp", "peagle", "dflash", "dspark")
SEQUENTIAL = ("hydra", "eagle1", "eagle3", "mtp")
RECURSIVE = ("eagle1", "eagle3", "mtp")
BLOCK = ("dflash", "dspark")

WEIGHTINGS = ("decay", "dpace")

DEFAULTS: dict[str, dict[str, Any]] = {
    "medusa": {"terms": {"kl": 1.0}, "decay": 0.8},
    "hydra": {"terms": {"kl": 1.0}, "decay": 1.0},
    "eagle1": {
        "terms": {"smooth_l1": 1.0, "kl": 0.1},
        "decay": 1.0,
        "steps": 1,
        "detach": False,
        "noise": 0.2,
    },
    "eagle3": {"terms": {"kl": 1.0}, "decay": 0.8, "steps": 3, "detach": False, "noise": 0.0},
    "mtp": {"terms": {"kl": 1.0}, "decay": 0.6, "steps": 3, "detach": False, "noise": 0.0},
    "peagle": {"terms": {"kl": 1.0}, "decay": 1.0, "cod_rate": 0.7, "cod_floor": 0.2},
    "dflash": {"terms": {"ce": 1.0}, "decay": 0.78, "anchors": 512},
    "dspark": {
        "terms": {"ce": 0.1, "l1": 0.9},
        "decay": 0.78,
        "anchors": 512,
        "confidence_weight": 1.0,
    },
}
"""What each paper trains with; exp(-1/4) = 0.78 is the block families' weight per position."""

ONLY: dict[str, tuple[str, ...]] = {
    "steps": RECURSIVE,
    "detach": RECURSIVE,
    "noise": RECURSIVE,
    "anchors": BLOCK,
    "cod_rate": ("peagle",),
    "cod_floor": ("peagle",),
}
"""Options of some families only."""

RAMP = (0.6, 0.8)
TOP = 10
REGRESSION = "smooth_l1"
REGRESSING = ("eagle1", "mtp", "hydra")
"""Families whose rows can be what the target's output matrix reads."""


@dataclass(frozen=True)
class ObjectiveOptions:
    """How a head is trained.

    Attributes:
        terms: loss names of ``training.losses`` and their weights, summed.
        final: the terms at the end of training, for a schedule (KL first, LK last); None keeps
            ``terms``.
        ramp: the parts of training between which ``terms`` turn into ``final``, linearly; only with
            ``final``, by default 0.6 and 0.8.
        decay: weight of depth i is decay^i, scaled to sum 1.
        weighting: "decay", or "dpace" in its place: weights from the head's own survival
            (arXiv:2605.18810).
        on_policy: count a draft only where each earlier token of its path was among the head's own
            best so many; 0 counts all. With 1, a step counts only where the tokens it was fed are
            the head's own greedy drafts, i.e. the states that decoding reaches; off those states
            there is no law of the target to learn from, because decoding has stopped there.
        top: K of "top_k", by default 10; only with that term.
        confidence_weight: weight of the confidence loss, where the head carries one.
        chunk: draft rows per depth whose vocabulary-sized tensors are alive at once; 0 takes all.
        steps: unrolled steps of a recursive head.
        detach: no gradient from a step into the one before (HASS).
        noise: width of the uniform noise on input features, times 512 over the document's length
            (EAGLE-1).
        anchors: blocks drawn per sequence.
        cod_rate, cod_floor: depth d keeps max(rate^d, floor) of the anchors (P-EAGLE).
    """

    terms: dict[str, float] | None = None
    final: dict[str, float] | None = None
    ramp: tuple[float, float] | None = None
    decay: float | None = None
    weighting: str = "decay"
    on_policy: int = 0
    top: int | None = None
    confidence_weight: float | None = None
    chunk: int = 256
    steps: int | None = None
    detach: bool | None = None
    noise: float | None = None
    anchors: int | None = None
    cod_rate: float | None = None
    cod_floor: float | None = None

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range."""
        for name in ("terms", "final"):
            mix = getattr(self, name)
            if mix is not None:
                _check_mix(name, mix)
        if self.ramp is not None and not 0 <= self.ramp[0] <= self.ramp[1] <= 1:
            raise ValueError(f"loss.ramp must be two parts of training in order, got {self.ramp}")
        if self.weighting not in WEIGHTINGS:
            raise ValueError(
                f"loss.weighting {self.weighting!r} is unknown: choose one of {WEIGHTINGS}"
            )
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"loss.{name} must be at least {least}, got {value}")
        for name in ("decay", "cod_rate", "cod_floor"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise ValueError(f"loss.{name} must lie in (0, 1], got {value}")

    def resolved(self, family: str) -> "ObjectiveOptions":
        """The same with the family's defaults filled in.

        Raises:
            ValueError: an option that has no effect on this family.
        """
        for name, families in ONLY.items():
            if getattr(self, name) is not None and family not in families:
                raise ValueError(
                    f"loss.{name} has no effect on {family}, only on {', '.join(families)}: drop it"
                )
        defaults = {"confidence_weight": 0.1, **DEFAULTS[family]}
        if self.weighting == "dpace":
            if self.decay is not None:
                raise ValueError("loss.decay has no effect with loss.weighting=dpace: drop one")
            defaults["decay"] = 1.0
        if self.final is not None:
            defaults["ramp"] = RAMP
        filled = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        found = replace(self, **filled)
        if "top_k" in found.names and self.top is None:
            found = replace(found, top=TOP)
        self._check_mixes(found.names, family)
        if found.steps is not None:
            self._check_depths(found.steps)
        return found

    @property
    def names(self) -> set[str]:
        """Terms with a weight, at the start of training or at its end."""
        mixes = (self.terms or {}, self.final or {})
        return {name for mix in mixes for name, weight in mix.items() if weight > 0}

    def check_head(self, drafter: Drafter, depths: int) -> None:
        """Refuse what has no effect on one head, or no meaning.

        Args:
            drafter: the head.
            depths: K, its drafts in training.

        Raises:
            ValueError: there is such an option; the message names it.
        """
        self._check_depths(depths)
        config = drafter.config
        if self.confidence_weight is not None and drafter.confidence is None:
            raise ValueError(
                "loss.confidence_weight has no effect without a confidence output, which this head "
                "lacks: drop it"
            )
        if REGRESSION in self.names:
            cure = None
            if isinstance(config, MtpConfig) and not config.norm_output:
                cure = "drafter.norm_output"
            elif isinstance(config, HydraConfig) and not config.shared_lm_head:
                cure = "drafter.shared_lm_head"
            if cure is not None:
                raise ValueError(
                    "loss.terms: smooth_l1 regresses what the target's output matrix reads, which "
                    f"this head's rows are only with {cure}=true: set that, or drop the term"
                )

    def _check_mixes(self, used: set[str], family: str) -> None:
        """Options that belong to terms, and terms that belong to families.

        Raises:
            ValueError: one without the other.
        """
        if self.ramp is not None and self.final is None:
            raise ValueError(
                "loss.ramp has no effect without loss.final, the terms at its end: drop it"
            )
        if self.top is not None and "top_k" not in used:
            raise ValueError(
                "loss.top has no effect without a top_k term in loss.terms or loss.final: drop it"
            )
        if used == {"expected_length"} and (self.on_policy or self.weighting == "dpace"):
            raise ValueError(
                "loss.on_policy and loss.weighting have no effect on the expected_length term "
                "alone, which weighs its drafts itself: drop them"
            )
        if REGRESSION in used and family not in REGRESSING:
            raise ValueError(
                "loss.terms: smooth_l1 regresses what the target's output matrix reads, for "
                "eagle1, mtp with drafter.norm_output and hydra with drafter.shared_lm_head; "
                f"{family} has no features in the target's own space"
            )

    def _check_depths(self, depths: int) -> None:
        """Weights of depths need more than one of them.

        Raises:
            ValueError: there is one, and an option that weighs it.
        """
        asked = {
            "decay": self.decay is not None,
            "on_policy": self.on_policy > 0,
            "weighting": self.weighting == "dpace",
        }
        for name, given in asked.items():
            if depths == 1 and given:
                raise ValueError(
                    f"loss.{name}={getattr(self, name)} has no effect on a single draft "
                    "(loss.steps, heads or block size): drop it, or train more"
                )


_LEAST = {
    "on_policy": 0,
    "top": 1,
    "confidence_weight": 0,
    "chunk": 0,
    "steps": 1,
    "noise": 0,
    "anchors": 1,
}


def _check_mix(name: str, mix: dict[str, float]) -> None:
    if not mix or not any(mix.values()):
        raise ValueError(f"loss.{name} needs at least one term with a weight, got {mix}")
    for term, weight in mix.items():
        if term not in losses.TERMS:
            raise ValueError(
                f"loss.{name}: {term!r} is unknown: choose from {sorted(losses.TERMS)}"
            )
        if not weight >= 0:
            raise ValueError(f"loss.{name}.{term} must be at least 0, got {weight}")
