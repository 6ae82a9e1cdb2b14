"""Reading a head's folder as far as it can be read, and saying what does not fit.

Legend: D hidden, V target vocabulary, F captured layers.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drafters import Drafter, TargetModel
from drafters.config import default_feature_layers, spread_feature_layers
from drafters.export.folder import CONFIG, MANIFEST, read_json
from drafters.families import DFlashConfig, Eagle3Config
from drafters.loading import FAMILIES, build_config
from recipes.diagnosis.findings import Finding, fault, misshapen, missing, turned, unplaced
from recipes.diagnosis.reading import ODD, Translated, translate
from recipes.diagnosis.repairs import likely_mask

_RECORDED = ("target_name", "target_fingerprint", "reference")


@dataclass
class LoadedHead:
    """A head as far as its file goes.

    Attributes:
        folder: of the file.
        dialect: whose file it is.
        head: in float32, with the target attached, whether or not it is the right one.
        layers: the feature layers as the file names them, as far as the target has them.
        stored: tensors of the file by its own names, as stored.
        recorded: the target's fingerprint in the file, empty where there is none.
        findings: what did not fit.
    """

    folder: Path
    dialect: str
    head: Drafter
    layers: tuple[int, ...]
    stored: dict[str, Tensor]
    recorded: dict[str, str]
    findings: list[Finding] = field(default_factory=list)


class WrongShape(ValueError):
    """The head is of another target altogether; nothing can be measured."""


def load_head(folder: str | Path, target: TargetModel) -> LoadedHead:
    """Read a head of any known dialect.

    Args:
        folder: with config.json and its tensors.
        target: to attach.

    Raises:
        WrongShape: hidden size, layers or vocabulary are not the target's.
        ValueError: no head can be made of it.
    """
    folder = Path(folder)
    config = read_json(folder / CONFIG)
    _check_shape(config, target)
    try:
        found, head, layers = _read(folder, config, target)
    except ODD as error:
        raise ValueError(
            f"{folder}: {CONFIG} describes no head that can be built "
            f"({type(error).__name__}: {error}): a key is missing or has an odd value"
        ) from error
    recorded = config.get("target_fingerprint") or _manifest(folder).get("target_fingerprint") or {}
    if not isinstance(recorded, dict):
        raise ValueError(
            f"{folder}: target_fingerprint must be an object, got {recorded!r}: remove it"
        )
    return LoadedHead(folder, found.dialect, head, layers, found.stored, recorded, found.findings)


def _read(
    folder: Path, config: dict[str, Any], target: TargetModel
) -> tuple[Translated, Drafter, tuple[int, ...]]:
    """The file in Headway's words, the head, and its layers."""
    found = translate(folder, config, target)
    layers = _usable_layers(found, target)
    if found.ready is not None:
        return found, nn.Module.to(found.ready, dtype=torch.float32), layers
    head = _build(found, layers, target)
    _fill(head, found)
    return found, head, layers


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    return read_json(path) if path.exists() else {}


def _check_shape(config: dict[str, Any], target: TargetModel) -> None:
    """Sizes in the file that only another target can have; Medusa's configs are copied about, and
    their vocabulary is no word of the head's own.
    """
    wanted = {
        "hidden_size": target.hidden_size,
        "target_hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "target_num_layers": target.num_layers,
        "num_target_layers": target.num_layers,
    }
    nested = config.get("transformer_layer_config") or config.get("text_config") or {}
    inner = {**nested, **config} if isinstance(nested, dict) else config
    medusa = any(name.startswith("medusa") for name in config)
    for name, theirs in wanted.items():
        if inner.get(name) not in (None, theirs) and not (medusa and name == "vocab_size"):
            raise WrongShape(
                f"{name} is {inner[name]} in the head's config and {theirs} in {target.name!r}"
            )


def _usable_layers(found: Translated, target: TargetModel) -> tuple[int, ...]:
    """The layers the file names, or the defaults where the target has no such layers."""
    if not issubclass(FAMILIES[found.family].config_class, Eagle3Config | DFlashConfig):
        return ()
    fc, layers = found.state.get("fc.weight"), found.layers
    count = max(fc.shape) // target.hidden_size if fc is not None else len(layers) or 3
    if len(layers) == count and all(0 <= layer < target.num_layers for layer in layers):
        return layers
    if found.family in ("dflash", "dspark") or count != 3:
        default = (spread_feature_layers(target.num_layers) * count)[:count]
    else:
        default = default_feature_layers(target.num_layers)
    if not layers:
        return tuple(default)
    found.findings.append(
        fault(
            "layer ids",
            f"{list(layers)} do not fit: fc reads {count} layers of 0..{target.num_layers - 1}",
            "write the hidden_states indices of the layers captured in training "
            "(SGLang's ids are one lower)",
        )
    )
    return tuple(default)


def _build(found: Translated, layers: tuple[int, ...], target: TargetModel) -> Drafter:
    drafter_class = FAMILIES[found.family]
    options = dict(found.options)
    if layers:  # any ascending list of this length makes the right shapes; a View says which
        options["feature_layers"] = list(range(len(layers)))
    mask = options.get("mask_token_id")
    masked = "mask_token_id" in options or found.family in ("dflash", "dspark")
    if masked and (mask is None or not 0 <= mask < target.vocab_size):
        options["mask_token_id"] = likely_mask(target)
        named = "none" if mask is None else f"{mask}, which is no token of the target"
        fix = "write mask_token_id as it was in training"
        found.findings.append(fault("mask token", f"{CONFIG} names {named}", fix))
    for name in _RECORDED:
        options.pop(name, None)
    head = drafter_class(build_config(drafter_class.config_class, target, **options))
    if layers:
        head.config.feature_layers = list(layers)
    nn.Module.to(head, target.device, torch.float32)
    with _quiet():
        return head.attach(target, allow_other_target=True).eval()


@torch.no_grad()
def _fill(head: Drafter, found: Translated) -> None:
    """Put the file's tensors into the head."""
    places = head.state_dict()
    absent = sorted(set(places) - set(found.state))
    extra = sorted(set(found.state) - set(places))
    if absent:
        found.findings.append(missing(absent))
    if extra:
        found.findings.append(unplaced(extra))
    turned_over, wrong = [], []
    for name, place in places.items():
        stored = found.state.get(name)
        if stored is None:
            continue
        if stored.shape == place.shape:
            place.copy_(stored)
        elif stored.T.shape == place.shape:
            place.copy_(stored.T)
            turned_over.append(name)
        else:
            wrong.append(f"{name} {list(stored.shape)} for {list(place.shape)}")
    if turned_over:
        found.findings.append(turned(turned_over))
    if wrong:
        found.findings.append(misshapen(wrong))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warning about another target, which is a finding here."""
    log = logging.getLogger("drafters.base")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before
