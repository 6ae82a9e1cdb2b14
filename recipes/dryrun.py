"""One micro-batch of a run over tensors without data: what it takes in memory and operations.

The target is built from its ``config.json``, the head from its options, and the training code runs
on them as it is (``recipes.shadow``). A micro-batch is taken to be full and wholly supervised, the
worst that data can be.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from drafters import Drafter, TargetModel
from drafters.config import DrafterConfig
from drafters.export import head_config
from drafters.families import DFlashConfig
from drafters.hub import split_revision
from drafters.loading import FAMILIES, build_config
from drafters.placement import layer_list
from recipes.heads import NATIVE
from recipes.shadow import COPIES, Shadow
from training.chunked import Sample, sampled
from training.config import TrainConfig
from training.data.batches import Batch
from training.features import TargetBatch, run_target
from training.joint import JointObjective, UnreadBatches
from training.loop import ARITHMETIC
from training.objectives import Objective, build_objective
from training.optim import inner_matrices

TARGET, HEAD = "target: weights", "head: weights"
HIDDEN, PASS = "target: its pass and hidden states", "head: activations"
CHUNKS = 2
"""Chunks of the loss that a dry run evaluates: the others take the same memory."""


class UnpredictableError(ValueError):
    """This model or head cannot be run without data; with data it may well run."""


class PlannedTarget(TargetModel):
    """A target whose weights have no data."""

    def _check_projection(self) -> None:
        """There is nothing to compare."""

    def fingerprint(self) -> dict[str, str]:
        """None: there are no weights to tell it by."""
        return {}


@dataclass(frozen=True)
class StepTrace:
    """One micro-batch, as it would run.

    Attributes:
        target_parameters, layer_parameters, largest_layer: of the target; of all its decoder
            layers; of the largest of them.
        borrowed: parameters of the embedding and the output matrix, which the head borrows.
        trained: parameters of the head, and of a LoRA of the target.
        target_bytes, head_bytes: of their weights.
        inner_bytes: of the head's matrices that Muon would train.
        lora_bytes: of the target's LoRA, which is a part of ``head_bytes`` and ``trained``.
        at_peak: bytes alive at the worst moment beyond those weights, by kind.
        hidden_bytes: what the target hands over, for one micro-batch.
        target_flops, head_flops: floating-point operations of the target's pass, and of forward and
            backward of the head.
        feature_width: numbers per token of the captured layers and the last hidden state.
        hidden_size: D.
    """

    target_parameters: int
    layer_parameters: int
    largest_layer: int
    borrowed: int
    trained: int
    target_bytes: int
    head_bytes: int
    inner_bytes: int
    lora_bytes: int
    at_peak: dict[str, int]
    hidden_bytes: int
    target_flops: int
    head_flops: int
    feature_width: int
    hidden_size: int


def read_model_config(name: str) -> PreTrainedConfig:
    """The target's ``config.json``, from a folder or the hub; no weights are needed.

    Raises:
        ValueError: there is none.
    """
    try:
        place, revision = split_revision(name)
        config = AutoConfig.from_pretrained(place, revision=revision or "main")
    except Exception as error:  # OSError, ValueError, KeyError, HTTP errors
        raise ValueError(f"target.name: no config.json of {name!r} can be read: {error}") from error
    config.__dict__.pop("quantization_config", None)  # counted in target.dtype
    return config


def planned_target(config: TrainConfig, model_config: PreTrainedConfig) -> PlannedTarget:
    """The target without data; inside a :class:`Shadow`."""
    return PlannedTarget(_model(config, model_config), None, config.target.name)


def target_bytes(config: TrainConfig, model_config: PreTrainedConfig) -> int:
    """Of the target's weights, in ``target.dtype``.

    Raises:
        ValueError: options that do not fit the target.
        UnpredictableError: see there.
    """
    with _explained(), torch.device("meta"):
        return sum(p.nbytes for p in _model(config, model_config).parameters())


def _model(config: TrainConfig, model_config: PreTrainedConfig) -> PreTrainedModel:
    options = config.target
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(
            model_config,
            dtype=getattr(torch, options.dtype),
            attn_implementation=options.attn_implementation,
        )
    model.tie_weights()
    return model


def continued(config: TrainConfig, model_config: PreTrainedConfig) -> DrafterConfig | None:
    """The configuration of the head that ``drafter.init_from`` names; outside of a :class:`Shadow`,
    for its file is looked at.

    Args:
        config: resolved.
        model_config: of the target.

    Returns:
        None for a new head.

    Raises:
        ValueError: no head there.
    """
    if config.drafter.init_from in (None, NATIVE):
        return None
    with torch.device("meta"):
        target = planned_target(config, model_config)
    return head_config(config.drafter.init_from, target)


def planned_head(
    config: TrainConfig,
    target: TargetModel,
    draft_vocab_size: int | None = None,
    shape: DrafterConfig | None = None,
) -> Drafter:
    """The head that the options describe; one that is continued has the shape of its config.

    Args:
        config: resolved.
        target: to attach to.
        draft_vocab_size: what ``drafter.draft_vocab_coverage`` chose, where it is known.
        shape: what :func:`continued` found, where it was asked.

    Raises:
        ValueError: options that do not fit the target.
    """
    options = config.drafter
    if options.init_from == NATIVE:
        raise ValueError(
            "drafter.init_from=native: the modules are read from the target's files, so a plan "
            "cannot be made without them"
        )
    if options.init_from is not None:
        shape = shape or head_config(options.init_from, target)
        shape.target_fingerprint = None
        return FAMILIES[options.family](shape).attach(target)
    family, fields = FAMILIES[options.family], options.head_fields()
    if draft_vocab_size is not None:
        fields["draft_vocab_size"] = draft_vocab_size
    if issubclass(family.config_class, DFlashConfig):
        fields.setdefault("mask_token_id", 0)  # any: it has no size
    return family(build_config(family.config_class, target, **fields)).attach(target)


def trace_step(
    config: TrainConfig,
    model_config: PreTrainedConfig,
    draft_vocab_size: int | None = None,
    accumulates: bool = True,
) -> StepTrace:
    """Run one micro-batch without data.

    Args:
        config: resolved.
        model_config: of the target.
        draft_vocab_size: see :func:`planned_head`.
        accumulates: a step has several micro-batches, so gradients wait for the others.

    Raises:
        ValueError: options that do not fit the target.
        UnpredictableError: see there.
    """
    with _explained():
        shape = continued(config, model_config)
    with _explained(), Shadow() as shadow:
        with shadow.counting(TARGET):
            target = planned_target(config, model_config)
        with shadow.counting(HEAD):
            drafter = planned_head(config, target, draft_vocab_size, shape)
            counts = torch.zeros(target.vocab_size, dtype=torch.int64)
            drafter.set_draft_vocab(counts, start="random")
        return measure_step(shadow, config, target, drafter, accumulates)


@contextmanager
def _explained() -> Iterator[None]:
    """What fails without data, and is no user's error, is said in one line.

    Raises:
        UnpredictableError: something failed.
    """
    try:
        yield
    except ValueError:
        raise
    except Exception as error:  # whatever third-party code raises on tensors without data
        cause = (str(error).splitlines() or [""])[0]
        raise UnpredictableError(
            f"memory could not be predicted: {type(error).__name__}: {cause}"
        ) from error


@contextmanager
def nothing_moves() -> Iterator[None]:
    """Inside, modules stay where they are: peft moves a new LoRA to its layer's device, where it is
    already, and torch cannot do that to parameters without data.
    """
    move = nn.Module.to
    nn.Module.to = lambda module, *args, **kwargs: module  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.to = move  # type: ignore[method-assign]


def prepared_objective(config: TrainConfig, target: TargetModel, drafter: Drafter) -> Objective:
    """The objective as a run prepares it, in training mode."""
    run = config.run
    objective = build_objective(drafter, config.loss).train()
    objective.activation_checkpointing = run.activation_checkpointing
    if config.lora.rank:
        objective = JointObjective(
            objective, target, config.lora, run.seed, run.activation_checkpointing
        )
        objective.progress = 1.0  # past lora.start, where most is kept and done
    objective.arithmetic = ARITHMETIC[run.mixed_precision]
    return objective


def measure_step(
    shadow: Shadow,
    config: TrainConfig,
    target: TargetModel,
    drafter: Drafter,
    accumulates: bool,
) -> StepTrace:
    """One micro-batch under a counter, with or without data."""
    with nothing_moves():
        objective = prepared_objective(config, target, drafter)
    weights = [p for p in objective.parameters() if p.requires_grad]
    shadow.vocabularies = {target.vocab_size, drafter.config.draft_vocab_size}
    shadow.weights = {tuple(p.shape) for p in weights if p.ndim > 1}
    with shadow.counting(COPIES):
        if accumulates:
            for weight in weights:
                weight.grad = torch.zeros_like(weight)
    held = {kind: size for kind, size in shadow.alive.items() if kind != COPIES}
    shadow.restart()
    start = shadow.flops
    batch = full_batch(config.run.micro_batch_size, config.data.max_length)
    with shadow.counting(HIDDEN):
        data = step_input(config, target, drafter, batch)
    hidden = sum(x.nbytes for x in (data.features, data.last_hidden) if x is not None)
    between = shadow.flops
    sample = Sample(CHUNKS, lambda: shadow.flops)
    with shadow.counting(PASS), sampled(sample):
        loss, metrics = objective(data)
        del metrics
        loss.backward()
    dynamic = {kind: size - held.get(kind, 0) for kind, size in shadow.at_peak.items()}
    return StepTrace(
        **_sizes(target, objective, weights),
        at_peak={kind: size for kind, size in dynamic.items() if size},
        hidden_bytes=hidden,
        target_flops=between - start,
        head_flops=shadow.flops - between + sample.skipped,
        feature_width=(len(drafter.feature_layers) + 1) * target.hidden_size,
        hidden_size=target.hidden_size,
    )


def _sizes(target: TargetModel, objective: Objective, weights: Sequence[Tensor]) -> dict[str, Any]:
    trained, model = {id(p) for p in weights}, target.model
    frozen = [p for p in model.parameters() if id(p) not in trained]  # without a LoRA
    layers = [
        sum(p.numel() for p in layer.parameters() if id(p) not in trained)
        for layer in layer_list(model)
    ]
    shared = {id(x): x for x in (target.lm_head.weight, *target.embedding.parameters())}
    try:
        inner = sum(p.nbytes for p in inner_matrices(objective))
    except ValueError:  # there is none
        inner = 0
    return {
        "target_parameters": sum(p.numel() for p in frozen),
        "layer_parameters": sum(layers),
        "largest_layer": max(layers),
        "borrowed": sum(p.numel() for p in shared.values()),
        "trained": sum(p.numel() for p in weights),
        "target_bytes": sum(p.nbytes for p in frozen),
        "head_bytes": sum(p.nbytes for p in weights),
        "inner_bytes": inner,
        "lora_bytes": sum(p.nbytes for p in model.parameters() if id(p) in trained),
    }


def step_input(
    config: TrainConfig, target: TargetModel, drafter: Drafter, batch: Batch
) -> TargetBatch:
    """What the objective is called with: what the target says, zeros of the shape that a feature
    store gives back, or the batch alone where the target runs inside the loss.
    """
    layers = drafter.feature_layers
    if config.lora.rank:  # the target runs inside the loss
        return UnreadBatches().of(layers)(batch)
    if config.data.features is None:
        return run_target(target, batch, layers)
    rows, width = batch.input_ids.shape, target.hidden_size
    kind: dict[str, Any] = {"dtype": target.dtype, "device": batch.input_ids.device}
    features = torch.zeros(*rows, len(layers) * width, **kind) if layers else None
    return TargetBatch(batch, features, torch.zeros(*rows, width, **kind))


def full_batch(rows: int, length: int) -> Batch:
    """Sequences of one document each, all of it supervised."""
    ids = torch.zeros(rows, length, dtype=torch.int64)
    supervised = torch.ones(rows, length, dtype=torch.bool)
    positions = torch.arange(length).repeat(rows, 1)
    numbers = torch.arange(rows)
    return Batch(ids, positions, torch.zeros_like(ids), supervised, numbers, numbers)
