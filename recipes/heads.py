"""The head that a run trains: new, warm, imported, or the target's own."""

import logging
from typing import Any

import torch

from drafters import Drafter, TargetModel, build_drafter
from drafters.config import DrafterConfig
from drafters.export import read_head
from drafters.mtp_native import load_native_mtp
from drafters.vocab import size_for_coverage
from drafters.warm import warm_start
from training.config import TrainConfig
from training.data.batches import Dataset
from training.options.drafter import NOT_IN_CONFIG, DrafterOptions

logger = logging.getLogger(__name__)
NATIVE = "native"
FITTED = ("confidence_temperatures", "confidence_biases", "draft_temperature", "tree")
"""Fields of a head's config that are fitted to its trained weights."""


def make_drafter(config: TrainConfig, target: TargetModel, dataset: Dataset) -> Drafter:
    """A new head with its draft vocabulary, or the one named by ``drafter.init_from``.

    Raises:
        ValueError: options that do not go together, or a head that does not fit.
    """
    options = config.drafter
    if options.init_from is not None and options.init_from != NATIVE:
        return _continued(options, target).train()
    counts = torch.zeros(target.vocab_size, dtype=torch.int64)
    fields = options.head_fields()
    if options.draft_vocab_coverage is not None:
        counts = dataset.token_counts(target.vocab_size)
        always = target.eos_token_ids
        fields["draft_vocab_size"] = size_for_coverage(counts, options.draft_vocab_coverage, always)
        logger.info(
            "draft vocabulary: %d tokens cover %.1f %% of the answers",
            fields["draft_vocab_size"],
            100 * options.draft_vocab_coverage,
        )
    if options.init_from == NATIVE:
        drafter: Drafter = _native(options, target, config.run.seed, fields)
    else:
        drafter = build_drafter(options.family, target, config.run.seed, **fields)
    _check_start(options, drafter)
    if drafter.draft_vocab is not None and options.draft_vocab_coverage is None:
        counts = dataset.token_counts(target.vocab_size)
    drafter.set_draft_vocab(counts, start=options.start)
    if options.warm_from is not None:
        copied = warm_start(drafter, read_head(options.warm_from, target, torch.float32))
        logger.info("head: %d tensors start from %s", len(copied), options.warm_from)
    return drafter.train()


def _check_start(options: DrafterOptions, drafter: Drafter) -> None:
    """Refuse ``start`` where a head has no layers to start from the target's.

    Raises:
        ValueError: it would have no effect.
    """
    if options.start == "target":
        return
    if options.init_from == NATIVE:
        cause = "the modules of drafter.init_from=native are trained"
    elif drafter.family == "medusa" or (drafter.family == "hydra" and not drafter.num_layers):
        cause = f"this {drafter.family} head has no layer like the target's"
    else:
        return
    raise ValueError(f"drafter.start={options.start} has no effect: {cause}. Drop it")


def _continued(options: DrafterOptions, target: TargetModel) -> Drafter:
    """The head of ``drafter.init_from``.

    Raises:
        ValueError: another family, or options that its own config contradicts.
    """
    assert options.init_from is not None
    drafter = read_head(options.init_from, target, torch.float32)
    if drafter.family != options.family:
        raise ValueError(
            f"drafter.init_from is a {drafter.family} head but drafter.type is {options.family}"
        )
    defaults = vars(type(options)(init_from=options.init_from))
    for name, default in defaults.items():
        asked = getattr(options, name)
        if asked == default:
            continue
        if name in NOT_IN_CONFIG:
            raise ValueError(
                f"drafter.{name}={asked} has no effect on a head that is read by drafter.init_from:"
                " drop it, or train a new head"
            )
        own = getattr(drafter.config, name)
        if asked != own:
            raise ValueError(
                f"drafter.{name}={asked} has no effect: the head of drafter.init_from has "
                f"{own}. Drop it, or train a new head"
            )
    if options.confidence_head and not drafter.config.confidence_head:
        logger.warning(
            "drafter.confidence_head: the head of drafter.init_from has no confidence output and "
            "gets none; a new head with drafter.warm_from can have one"
        )
    _forget_fits(drafter)
    return drafter


def _forget_fits(drafter: Drafter) -> None:
    """Drop what was fitted to the weights that are about to change: calibration and tree."""
    config, fresh = drafter.config, DrafterConfig()
    stale = [name for name in FITTED if getattr(config, name) != getattr(fresh, name)]
    for name in stale:
        setattr(config, name, getattr(fresh, name))
    if stale:
        logger.info(
            "head: %s of drafter.init_from no longer hold once it is trained and are dropped; fit "
            "them again afterwards (scripts.calibrate, scripts.fit_tree)",
            ", ".join(stale),
        )


def _native(
    options: DrafterOptions, target: TargetModel, seed: int, fields: dict[str, Any]
) -> Drafter:
    """The modules that the target came with.

    Raises:
        ValueError: not of family mtp, or options that are the modules' own.
    """
    if options.family != "mtp":
        raise ValueError("drafter.init_from=native needs drafter.type mtp")
    default = type(options)().head_fields()
    given = {
        name: value
        for name, value in fields.items()
        if default.get(name) != value and name != "confidence_head"
    }
    for name in ("num_layers", "intermediate_size", "qk_norm"):
        if name in given:
            raise ValueError(f"drafter.{name} is the native module's own: leave it out")
    return load_native_mtp(target, seed=seed, confidence_head=options.confidence_head, **given)
