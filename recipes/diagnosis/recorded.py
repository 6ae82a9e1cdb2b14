"""What was recorded with an export, against the head that is read now.

Golden logits travel with our exports (``drafters.export.golden``), beside the layers and the
vocabulary map that they do not depend on. Where they no longer fit, the reading of the head that
gives them again names the fault beyond doubt, however little the head knows.
"""

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from drafters import Drafter
from drafters.export.folder import ExportError, read_tensors
from drafters.export.golden import GOLDEN, HALF_TOLERANCE, check_golden
from recipes.diagnosis.evidence import View
from recipes.diagnosis.files import LoadedHead
from recipes.diagnosis.findings import FAULT, Finding, fault, unknown
from recipes.diagnosis.hypotheses import hypotheses
from recipes.diagnosis.hypothetical import reading
from recipes.diagnosis.variants import copied

TOLERANCE = 0.01
"""Difference, as a part of the largest logit, that a target in half precision may make."""
NEARER = 0.2
"""A reading gives the recorded logits again if it leaves at most this part of the difference."""


@dataclass
class Recorded:
    """A head compared with what was recorded with it.

    Attributes:
        head, view: with what the record contradicts undone.
        findings: what that was.
        fits: whether the head gives the recorded logits now; None where there are none, or where
            they are those of another target.
    """

    head: Drafter
    view: View
    findings: list[Finding] = field(default_factory=list)
    fits: bool | None = None


def compare_recorded(loaded: LoadedHead, found: list[Finding]) -> Recorded:
    """Find what was altered since the export.

    Args:
        loaded: the head.
        found: so far; another target has other logits.
    """
    compared = Recorded(loaded.head, View(loaded.layers))
    path = loaded.folder / GOLDEN
    if not path.is_file() or any(f.check == "fingerprint" and f.verdict == FAULT for f in found):
        return compared
    try:
        golden = read_tensors(path)
    except ExportError as error:
        compared.findings.append(unknown("tensors", f"no record to compare with: {error}"))
        return compared
    _compare_layers(compared, loaded, golden)
    tolerance = _tolerance(loaded)
    error = difference(compared.head, loaded)
    compared.fits = error <= tolerance
    if compared.fits:
        return compared
    best: tuple[float, Recorded] | None = None
    for hypothesis in hypotheses(compared.head, compared.view):
        if hypothesis.view is not None:
            continue
        other = reading(compared.head, compared.view, hypothesis)
        if other is None:
            continue
        left = difference(other[0], loaded)
        if left <= min(tolerance, NEARER * error) and (best is None or left < best[0]):
            message = f"{hypothesis.message}: so read, it gives the logits recorded at its export"
            named = fault(hypothesis.check, message, hypothesis.fix, difference=left)
            best = left, Recorded(*other, [*compared.findings, named], True)
    return compared if best is None else best[1]


def check_altered(compared: Recorded, loaded: LoadedHead, head: Drafter) -> list[Finding]:
    """What remains to be said of a head that does not give the recorded logits.

    Args:
        compared: from :func:`compare_recorded`.
        loaded: the head as it is.
        head: with everything undone that was found.
    """
    if compared.fits is not False or difference(head, loaded) <= _tolerance(loaded):
        return []
    return [
        fault(
            "tensors",
            "the head no longer gives the logits that were recorded with its export",
            "export again: tensors, or switches that change what is computed, were altered",
        )
    ]


def difference(head: Drafter, loaded: LoadedHead) -> float:
    """Of golden logits, as a part of the largest, in the dtype that they were recorded in; infinite
    where the shapes differ.
    """
    dtype = _half(loaded)
    if dtype is not None:
        head = copied(head)
        nn.Module.to(head, dtype=dtype)
    try:
        return check_golden(head, loaded.folder, tolerance=math.inf)
    except ExportError:
        return math.inf


def _compare_layers(compared: Recorded, loaded: LoadedHead, golden: dict[str, Tensor]) -> None:
    """The layers that the head was exported with."""
    kept = golden.get("feature_layers")
    layers = () if kept is None else tuple(kept.tolist())
    if not layers or layers == loaded.layers or len(layers) != len(loaded.layers):
        return
    if max(layers) >= loaded.head.target.num_layers:
        return
    misfit = any(f.check == "layer ids" and f.verdict == FAULT for f in loaded.findings)
    named = "" if misfit else f"{list(loaded.layers)} in the file, "
    compared.findings.append(
        fault(
            "layer ids",
            f"{named}{list(layers)} when it was exported",
            f"write {list(layers)} as hidden_states indices (SGLang's are one lower)",
        )
    )
    compared.head.config.feature_layers = list(layers)
    compared.view = replace(compared.view, layers=layers)


def _tolerance(loaded: LoadedHead) -> float:
    """Wide where the head itself was in half precision."""
    return TOLERANCE if _half(loaded) is None else HALF_TOLERANCE


def _half(loaded: LoadedHead) -> torch.dtype | None:
    """The half precision that the file is in."""
    kinds = {tensor.dtype for tensor in loaded.stored.values()}
    return next((kind for kind in (torch.bfloat16, torch.float16) if kind in kinds), None)
