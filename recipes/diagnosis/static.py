"""What the file alone says, and what it says about the target: nothing is run.

Legend: D hidden, V / Vd target / draft vocabulary.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from drafters import Drafter, TargetModel
from drafters.config import DecoderConfig
from drafters.hydra import HydraDrafter
from drafters.loading import layer_shape
from drafters.medusa import MedusaDrafter
from inference.measuring.confidence import fitting_label
from inference.proposers.laws import proposal_kind
from inference.sampling import SamplingParams
from recipes.diagnosis.files import LoadedHead
from recipes.diagnosis.findings import Finding, fault, fine, unknown, weak
from recipes.diagnosis.settings import target_extension

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SATURATED = 4
"""Values at the limit of a dtype that are no accident."""
SPECTRUM = 1.06
"""Largest singular value, relative to that of random numbers, below which a matrix is random."""
_TRAIN_ANEW = "train the head on this target, or use the target it was trained on"


@dataclass(frozen=True)
class Serving:
    """How the head is to be used, where that is known.

    Attributes:
        temperature: of the target's law; None leaves the sampler unchecked.
        rule: acceptance rule, which says what a confidence means.
    """

    temperature: float | None = None
    rule: str = "match"


def check_target(loaded: LoadedHead, target: TargetModel) -> list[Finding]:
    """Fingerprint and chat template, as recorded."""
    recorded, now = loaded.recorded, target.fingerprint()
    common = [name for name in recorded if name in now]
    differing = [n for n in common if recorded[n] != now[n] and n != "chat_template"]
    found = []
    if differing:
        found.append(
            fault(
                "fingerprint",
                f"{', '.join(differing)} of the target differ from the recorded",
                _TRAIN_ANEW,
            )
        )
    elif [name for name in common if name != "chat_template"]:
        found.append(fine("fingerprint"))
    elif not any(finding.check == "fingerprint" for finding in loaded.findings):
        found.append(unknown("fingerprint", "the file records no target"))
    if "chat_template" not in common:
        found.append(unknown("template", "the file, or the target, records no chat template"))
    elif recorded["chat_template"] != now["chat_template"]:
        found.append(
            fault(
                "template",
                "the target's chat template is not the one of training",
                "serve with the template of training (--chat-template), or train with this one",
            )
        )
    else:
        found.append(fine("template"))
    return found


def check_tensors(loaded: LoadedHead) -> list[Finding]:
    """Numbers that are not finite, at the limit of their dtype, zero, or still random."""
    found = [
        finding for name, t in loaded.stored.items() for finding in _numbers(name, t, loaded.head)
    ]
    return found + list(_random(loaded.head))


def _numbers(name: str, tensor: Tensor, head: Drafter) -> Iterator[Finding]:
    if tensor.dtype not in FLOATS:
        if tensor.ndim > 1:
            kind = str(tensor.dtype).removeprefix("torch.")
            message = f"{name} is stored as {kind}: quantised heads are read without their scales"
            yield fault("dtype", message, "export in bfloat16 or float32")
        return
    bad = int((~tensor.isfinite()).sum())
    if bad:
        yield fault(
            "dtype",
            f"{name} is not finite: training diverged, or a cast overflowed",
            "take an earlier checkpoint, or export in bfloat16 or float32",
            values=bad,
        )
        return
    limits = (torch.finfo(tensor.dtype).max, torch.finfo(torch.float16).max)
    for limit in {limit for limit in limits}:
        count = int((tensor.abs().double() == limit).sum())
        if count >= SATURATED:
            yield fault(
                "dtype",
                f"{name} is clipped at {limit:.4g}",
                "export in bfloat16 or float32",
                values=count,
            )
            break
    if tensor.numel() <= 1 or tensor.any() or name.endswith("bias") or "confidence" in name:
        return
    if isinstance(head, MedusaDrafter | HydraDrafter) and len(tensor) == head.config.hidden_size:
        yield weak("tensors", f"{name} is all zeros, where residual blocks start")
    else:
        yield fault(
            "tensors",
            f"{name} is all zeros: it was never trained or not exported",
            "export again from the trained checkpoint",
        )


def _random(head: Drafter) -> Iterator[Finding]:
    """Output matrices and fusions whose numbers are independent of each other."""
    for name, weight in head.named_parameters():
        output = name.startswith("lm_head")
        critical = output or name.startswith("fc.") or "eh_proj" in name
        if not critical or weight.ndim != 2 or min(weight.shape) < 16 or not weight.any():
            continue
        ratio = spectrum(weight)
        if ratio >= SPECTRUM or not _normal(weight):
            continue
        if output and spectrum(head.target.lm_head.weight) < SPECTRUM:
            continue  # the target's own is no better
        yield fault(
            "tensors",
            f"{name} looks like untouched random numbers",
            "export again from the trained checkpoint",
            spectrum=ratio,
        )


@torch.no_grad()
def spectrum(weight: Tensor) -> float:
    """Largest singular value (n, m), relative to the one independent numbers of this variance
    have, σ(√n + √m) (the edge of the Marchenko-Pastur law).
    """
    wide = weight.detach().float()
    vector = torch.ones(wide.shape[1], device=wide.device) / math.sqrt(wide.shape[1])
    for _ in range(60):
        vector = torch.nn.functional.normalize(wide.T @ (wide @ vector), dim=0)
    rows, columns = wide.shape
    edge = wide.std().item() * (math.sqrt(rows) + math.sqrt(columns))
    return (wide @ vector).norm().item() / max(edge, 1e-30)


def _normal(weight: Tensor) -> bool:
    """Fourth moments of a normal or a uniform law, which trained matrices do not keep."""
    sample = weight.detach().flatten()[:200_000].double()
    scaled = (sample - sample.mean()) / sample.std()
    kurtosis = scaled.pow(4).mean().item()
    return abs(kurtosis - 3.0) < 0.15 or abs(kurtosis - 1.8) < 0.1


def check_rope(loaded: LoadedHead, target: TargetModel, longest: int) -> list[Finding]:
    """Base and longest position against the target's; ``longest`` text in tokens.

    Whether another base or a stretch does harm is for the evidence; here it is a remark.
    """
    config = loaded.head.config
    if not isinstance(config, DecoderConfig) or not loaded.head.config.own_fields().get(
        "num_layers"
    ):
        return [fine("rope", "the head has no positions")]
    found, theirs = [], layer_shape(target)["rope_theta"]
    limit, allowed = config.max_position_embeddings, target.max_length
    if limit < allowed:
        found.append(
            fault(
                "rope",
                f"max_position_embeddings is {limit}, the target's {allowed}: engines clamp the "
                "context to the smaller one",
                f"set max_position_embeddings to {allowed}",
                longest_text=longest,
            )
        )
    if config.rope_theta != theirs:
        found.append(
            unknown("rope", f"rope_theta is {config.rope_theta:g}, the target's {theirs:g}")
        )
    if config.rope_extension not in (None, target_extension(target)):
        found.append(
            unknown("rope", f"RoPE is stretched, the target's is not so: {config.rope_extension}")
        )
    return found or [fine("rope")]


def check_sampler(loaded: LoadedHead, serving: Serving) -> list[Finding]:
    """Calibration of the confidence against the way the head is to be used."""
    config = loaded.head.config
    if serving.temperature is None:
        return [unknown("sampler", "give --temperature (and --rule) to check it")]
    if loaded.head.confidence is None:
        return [fine("sampler", "no confidence to be calibrated; any sampling will do")]
    kind = proposal_kind(serving.rule, SamplingParams(serving.temperature))
    wanted, _ = fitting_label(serving.rule, kind, serving.temperature)
    wrong = []
    if config.confidence_rule != wanted:
        wrong.append(f"confidence_rule is {config.confidence_rule}, this sampling needs {wanted}")
    elif serving.temperature and config.confidence_at != serving.temperature:
        wrong.append(
            f"confidence_at is {config.confidence_at:g}, the temperature {serving.temperature:g}"
        )
    if not wrong:
        return [fine("sampler")]
    return [
        fault(
            "sampler",
            "; ".join(wrong),
            "train or calibrate the confidence for this sampling (drafter.confidence_rule, "
            "scripts.calibrate), or do not use it",
        )
    ]
