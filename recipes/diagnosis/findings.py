"""What a diagnosis is made of."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

OK, WEAK, FAULT, UNKNOWN = "ok", "weak", "FAULT", "unknown"

CHECKS: dict[str, str] = {
    "fingerprint": "the target is the one that the head was trained on",
    "template": "the chat template is the one that the head was trained with",
    "config": "config.json says all that a strict reader asks for",
    "tensors": "nothing is missing, left over, zero or still random",
    "transposed": "no matrix is stored the other way round",
    "dtype": "all numbers are finite, and none sits at the limit of its dtype",
    "vocabulary": "the draft vocabulary maps to the right tokens, and covers the text",
    "embedding": "the embedding is the one of training",
    "layer ids": "features come from the layers, and in the order, of training",
    "concat": "embedding and feature are joined in the order of training",
    "order": "heads stand in the order of training",
    "norm": "norms are where they were in training, once each",
    "heads": "rows of queries and keys are in Llama's rotary order",
    "rope": "rotary base and longest position are the target's",
    "window": "windows of attention are those of training",
    "mask token": "empty slots of a block hold the token of training",
    "block size": "blocks are as long as in training",
    "causality": "rows of a block see those rows of it that they saw in training",
    "anchor": "the row of a block that drafts first is the one of training",
    "pairing": "features, tokens and labels stand in the same row as in training",
    "parity": "the training pass and the decode pass give the same logits",
    "mask": "the head learned the target's answers, not the prompts alone",
    "trained": "the head drafts better than one and the same law everywhere",
    "sampler": "the sampling is what the head was calibrated for",
}
"""The checks in the order of the output, and what each one says where it finds nothing."""


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        check: a key of ``CHECKS``.
        verdict: "ok", "FAULT", "weak" (nothing is wrong that could be seen, but the head knows
            little), or "unknown" (nothing recorded, or too little text to tell).
        message: what was found.
        fix: what to do about a fault; empty otherwise.
        numbers: the figures behind it.
    """

    check: str
    verdict: str
    message: str
    fix: str = ""
    numbers: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.check in CHECKS and self.verdict in (OK, WEAK, FAULT, UNKNOWN)
        assert bool(self.fix) == (self.verdict == FAULT), self

    def line(self) -> str:
        """For people."""
        text = f"{self.verdict:<8} {self.check:<12} {self.message}"
        if self.numbers:
            text += f" ({', '.join(f'{name} {_short(v)}' for name, v in self.numbers.items())})"
        return f"{text}\n{'':<22}fix: {self.fix}" if self.fix else text

    def to_dict(self) -> dict[str, Any]:
        """For machines."""
        return asdict(self)


def fault(check: str, message: str, fix: str, **numbers: float) -> Finding:
    """Something is wrong, and here is what to do."""
    return Finding(check, FAULT, message, fix, numbers)


def fine(check: str, message: str = "", **numbers: float) -> Finding:
    """Nothing found; without a message, what ``CHECKS`` says."""
    return Finding(check, OK, message or CHECKS[check], "", numbers)


def weak(check: str, message: str, **numbers: float) -> Finding:
    """Nothing found, in a head that knows little."""
    return Finding(check, WEAK, message, "", numbers)


def unknown(check: str, message: str, **numbers: float) -> Finding:
    """It cannot be told."""
    return Finding(check, UNKNOWN, message, "", numbers)


def in_order(findings: list[Finding]) -> list[Finding]:
    """By check; within a check faults first, and no "ok" beside a fault."""
    rank = {FAULT: 0, UNKNOWN: 1, WEAK: 2, OK: 3}
    order = list(CHECKS)
    faulty = {found.check for found in findings if found.verdict == FAULT}
    kept = [found for found in findings if found.verdict == FAULT or found.check not in faulty]
    return sorted(kept, key=lambda found: (order.index(found.check), rank[found.verdict]))


def _short(value: float) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


# Tensors that do not fit a file, or the head that it is read into --------------------------------


def missing(names: Sequence[str]) -> Finding:
    """Tensors that a file should have."""
    fix = "export again; a loader that does not complain leaves them random"
    return fault("tensors", f"missing: {_some(names)}", fix, missing=len(names))


def unplaced(names: Sequence[str]) -> Finding:
    """Tensors that a head has no place for."""
    return fault(
        "tensors",
        f"no place for: {_some(names)}",
        "the config describes another head than the tensors: check its switches "
        "(biases, norms, confidence_head, number of layers and heads)",
        extra=len(names),
    )


def turned(names: Sequence[str]) -> Finding:
    """Matrices that are stored the other way round."""
    message = f"stored as its transpose: {', '.join(names)}"
    return fault("transposed", message, "store them turned")


def misshapen(shapes: Sequence[str]) -> Finding:
    """Tensors of another shape, each in words."""
    return fault("tensors", f"of another shape: {', '.join(shapes[:4])}", "export again")


def _some(names: Sequence[str]) -> str:
    return f"{', '.join(names[:4])}{' ...' * (len(names) > 4)}"
