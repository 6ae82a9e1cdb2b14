"""A head and a LoRA of its target, trained together: Medusa-2 (arXiv:2401.10774 §2.2.2), for every
family.

The head's loss reaches the LoRA through the hidden states that the head reads. What the head is
taught is always the law of the adapted target, without gradient: the target is moved to be easier
to read, not to say what the head expects. The target's own loss holds it to its task.

Legend: B batch, T sequence, D hidden, V vocabulary, n supervised tokens.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from drafters import TargetModel
from training import losses
from training.adapter import TargetAdapter
from training.alignment import Labels, supervised_labels
from training.chunked import Metrics, chunked_sum, plain_sum
from training.data.batches import Batch
from training.features import TargetBatch, run_target
from training.objectives import Drafts, Objective
from training.options.data import LoraOptions

logger = logging.getLogger(__name__)
IN_TRAINING = "not merged yet"
"""Stands for the hash of the weights in checkpoints, so that their heads fit no target: the LoRA
they go with is in the checkpoint.
"""


class JointObjective(Objective):
    """The objective of a head together with that of its target.

    A drop-in for the head's own, but for what it is called with: a batch that nothing is known
    about (:class:`UnreadBatches`), for the target runs inside ``forward``, with gradients. Its
    trained parameters are ``drafter.*`` and ``adapter.*``.

    Args:
        inner: the head's objective; it is taken over.
        target: the head's target, which gets the LoRA.
        options: rank above 0.
        seed: of the LoRA's start.
        recompute: keep only what enters the target's layers, and run them again in the backward
            pass.

    Raises:
        ValueError: this target cannot have this LoRA.
    """

    def __init__(
        self,
        inner: Objective,
        target: TargetModel,
        options: LoraOptions,
        seed: int = 0,
        recompute: bool = False,
    ) -> None:
        nn.Module.__init__(self)
        self.drafter = inner.drafter  # first, so that parameters have the names of a frozen run
        self.options, self.depths = inner.options, inner.depths
        self.lora, self.arithmetic = options, None
        self._recompute = recompute
        self.base = {"base": inner.drafter.config.target_name or target.name}
        self.base["base_weights"] = target.fingerprint().get("weights", "")
        self.lora_adapter = TargetAdapter(target, options, seed)
        named = self.lora_adapter.parameters()
        self.adapter = nn.ParameterDict({n.replace(".", "/"): p for n, p in named.items()})
        self.inner = inner
        size = sum(value.numel() for value in self.adapter.values())
        logger.info("lora: %.1fM trainable parameters of the target", size / 1e6)
        config = self.drafter.config
        config.reference = {**self.base, "adapter": IN_TRAINING}
        config.target_fingerprint = {**(config.target_fingerprint or {}), "weights": IN_TRAINING}

    @property
    def progress(self) -> float:
        """Part of training done, in [0, 1]."""
        return self.inner.progress

    @progress.setter
    def progress(self, value: float) -> None:
        self.inner.progress = value

    def drafts(self, data: TargetBatch) -> Drafts | None:
        """Those of the head's objective."""
        return self.inner.drafts(data)

    def forced(self, data: TargetBatch, roots: Tensor) -> list[Tensor]:
        """That of the head's objective."""
        return self.inner.forced(data, roots)

    def logits(self, hidden: Tensor, depth: int) -> Tensor:
        """Those of the head's objective."""
        return self.inner.logits(hidden, depth)

    def count(self, batch: Batch) -> Tensor:
        """That of the head's objective."""
        return self.inner.count(batch)

    def _loss(self, data: TargetBatch | None) -> tuple[Tensor, Metrics]:
        loss, metrics = self._both(data)
        # Data parallelism waits for every parameter, also those above the last layer that is read.
        every = torch.stack([value.sum() for value in self.adapter.values()]).sum()
        return loss + 0 * every.to(loss.dtype), metrics

    def _both(self, data: TargetBatch | None) -> tuple[Tensor, Metrics]:
        if data is None:
            return self.inner._loss(None)
        batch, layers = data.batch, self.drafter.feature_layers
        if self.progress < self.lora.start:  # B is still 0: the original target
            with torch.autocast(batch.input_ids.device.type, enabled=False):
                known = run_target(self.drafter.target, batch, layers)
            return self.inner._loss(known)
        original = self._original(batch)
        adapted = self._run(batch, layers)
        loss, metrics = self.inner._loss(adapted)
        own, sums = self._own_loss(batch, adapted.last_hidden, original)
        return loss + self.lora.target_weight * own, metrics | sums

    def _run(self, batch: Batch, layers: Sequence[int]) -> TargetBatch:
        """What the adapted target says, with gradients; in its own precision."""
        target = self.drafter.target
        recomputed = checkpointed(target.decoder_layers()) if self._recompute else nullcontext()
        with recomputed, torch.autocast(target.device.type, enabled=False):
            out = target.forward(
                batch.input_ids,
                position_ids=batch.position_ids,
                feature_layers=layers,
                logits_to_keep=1,
                gradients=True,
            )
        return TargetBatch(batch, out.features, out.last_hidden)

    def _original(self, batch: Batch) -> Tensor | None:
        """(B, T, D) last hidden states of the target without its LoRA; None if not needed."""
        if self.lora.target_loss != "kl" or not self.lora.target_weight:
            return None
        with (
            self.lora_adapter.disabled(),
            torch.autocast(batch.input_ids.device.type, enabled=False),
        ):
            return run_target(self.drafter.target, batch, ()).last_hidden

    def _own_loss(
        self, batch: Batch, hidden: Tensor, original: Tensor | None
    ) -> tuple[Tensor, Metrics]:
        """The target's own loss: its mean over the supervised tokens of each sequence, times what
        the head's loss of that sequence is summed over. So it adds up like the head's, however
        sequences are dealt over processes.

        Args:
            batch: tokens, documents, supervision.
            hidden: (B, T, D) of the adapted target.
            original: the same of the original one, or None for cross entropy.
        """
        labels = supervised_labels(batch.input_ids, batch.document_ids, batch.supervised)
        rows = labels.teacher_rows
        if not self.lora.target_weight or not rows.numel():
            return hidden.new_zeros((), dtype=losses.wide_dtype(hidden)), {}
        weights = self._row_weights(batch, labels, losses.wide_dtype(hidden))
        before = None if original is None else original.flatten(0, 1)[rows]

        def loss(chunk: slice, pieces: list[Tensor]) -> Iterator[tuple[Tensor, Metrics]]:
            with torch.autocast(hidden.device.type, enabled=False):
                q = losses.log_softmax(self.drafter.target.project(pieces[0]))  # (c, V)
                if before is None:
                    value = F.nll_loss(q, labels.ids[chunk], reduction="none")
                else:
                    with torch.no_grad():
                        p = losses.log_softmax(self.drafter.target.project(before[chunk]))
                    value = (p.exp() * (p - q)).sum(-1)  # exactly 0 while nothing has moved
            count = torch.tensor(len(value), device=value.device)
            sums = {"target_loss_sum": value.detach().sum(), "target_loss_count": count}
            yield (weights[chunk] * value).sum(), sums

        inputs = [hidden.flatten(0, 1)[rows]]
        if not self.options.chunk:
            return plain_sum(loss, inputs)
        return chunked_sum(loss, inputs, [], self.options.chunk)

    def _row_weights(self, batch: Batch, labels: Labels, dtype: torch.dtype) -> Tensor:
        """(n,) what the head's loss of a sequence counts, per supervised token of that sequence."""
        sequence = labels.positions // batch.input_ids.shape[1]
        tokens = sequence.bincount(minlength=len(batch.input_ids)).clamp_min(1)
        counts = torch.stack([self.count(batch.row(row)) for row in range(len(tokens))])
        return (counts.to(tokens.device, dtype) / tokens)[sequence]


class UnreadBatches:
    """The features of a joint run: none, for the target runs inside the objective."""

    def of(self, layers: Sequence[int]) -> Callable[[Batch], TargetBatch]:
        """A function that makes a batch ready for :class:`JointObjective`."""
        return lambda batch: TargetBatch(batch, None, torch.empty(0))

    def ahead(self, sequences: Sequence[int]) -> None:
        """Nothing is prepared."""


@contextmanager
def checkpointed(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, layers keep their inputs only and are run again in the backward pass. Their
    ``forward`` is replaced and put back; unlike transformers' own switch, which works in training
    mode only, nothing starts to drop out.
    """
    before = {layer: layer.__dict__.get("forward") for layer in layers}
    try:
        for layer in before:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        yield
    finally:
        for layer, own in before.items():
            if own is None:
                del layer.__dict__["forward"]
            else:
                layer.forward = own


def adapter_groups(objective: Objective) -> list[dict[str, Any]]:
    """The LoRA as a parameter group of its own: its peak rate, no weight decay, and where in the
    training it starts. None where the target is frozen.
    """
    if not isinstance(objective, JointObjective):
        return []
    lora = objective.lora
    parameters = list(objective.adapter.values())
    return [{"params": parameters, "lr": lora.lr, "weight_decay": 0.0, "start": lora.start}]


def late_rate(
    rate: Callable[[int], float], start: float, warmup: int, total: int
) -> Callable[[int], float]:
    """A learning-rate schedule that is 0 before ``start``; a warm-up of its own follows.

    Args:
        rate: optimizer steps done -> factor on the peak rate, of what trains from the beginning.
        start: part of training.
        warmup: steps.
        total: steps of the run.
    """
    if not start:
        return rate

    def late(step: int) -> float:
        done = step - start * total
        return 0.0 if done < 0 else rate(step) * min(1.0, (done + 1) / (warmup + 1))

    return late
