"""Objectives: the unrolled loss of each family, as the module that accelerate prepares.

``forward`` holds the whole unroll, so data-parallel wrappers see every gradient. It returns the
loss *summed* over supervised tokens (the loop divides by their global count) and metrics as
``name_sum`` / ``name_count`` pairs.

Legend: B batch, T sequence, n supervised labels, D hidden, K steps or heads, V / Vd target / draft
vocabulary.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafters import Drafter, Eagle3Drafter, MedusaDrafter
from drafters.layers import repeat_heads
from training import losses
from training.alignment import draft_rows, shifted_tokens, supervised_labels
from training.chunked import Metrics, chunked_sum, plain_sum
from training.features import TargetBatch
from training.masks import causal_mask


@dataclass(frozen=True)
class ObjectiveOptions:
    """What every objective shares.

    Attributes:
        loss: name in ``losses.DISTILLATION``.
        steps: K, training-time-test steps of a sequential head (ignored by independent heads, which
            have K heads).
        decay: weight of depth i is decay^i, scaled to sum 1.
        confidence_weight: weight of the confidence loss, where the head carries one.
        chunk: label rows whose vocabulary-sized tensors are alive at once; 0 takes all at once.
    """

    loss: str = "kl"
    steps: int = 3
    decay: float = 0.8
    confidence_weight: float = 0.1
    chunk: int = 256

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range."""
        if self.loss not in losses.DISTILLATION:
            raise ValueError(
                f"loss.name {self.loss!r} is unknown: choose one of {sorted(losses.DISTILLATION)}"
            )
        if (
            self.steps < 1
            or not 0 < self.decay <= 1
            or self.chunk < 0
            or self.confidence_weight < 0
        ):
            raise ValueError(
                "objective: steps >= 1, 0 < decay <= 1, chunk >= 0, confidence_weight >= 0, got "
                f"{self}"
            )


class Objective(nn.Module, ABC):
    """Distillation of the target into a head, over all depths at once."""

    def __init__(self, drafter: Drafter, options: ObjectiveOptions) -> None:
        super().__init__()
        self.drafter = drafter
        self.options = options
        if drafter.shape == "sequential":
            self.depths = options.steps
        else:
            self.depths = drafter.config.num_heads
        self.weights = losses.head_weights(self.depths, options.decay)

    @abstractmethod
    def unroll(self, data: TargetBatch) -> list[Tensor]:
        """Draft hidden states of every depth, each (B, T, D):

        Row t of depth i drafts token t+2+i.
        """

    @abstractmethod
    def logits(self, hidden: Tensor, depth: int) -> Tensor:
        """(..., D) hidden states of one depth -> (..., Vd)."""

    def head_parameters(self) -> list[Tensor]:
        """Trainable tensors read after :meth:`unroll`."""
        drafter = self.drafter
        modules = [m for m in (drafter.confidence, self._output_module()) if m is not None]
        return [parameter for module in modules for parameter in module.parameters()]

    @abstractmethod
    def _output_module(self) -> nn.Module | None:
        """Module holding the head's own output matrices."""

    def forward(self, data: TargetBatch) -> tuple[Tensor, Metrics]:
        """Summed loss and metric sums of one micro-batch."""
        batch = data.batch
        labels = supervised_labels(batch.input_ids, batch.document_ids, batch.supervised)
        hidden = self.unroll(data)
        if not labels.positions.numel():  # all parameters stay in the graph, for data parallelism
            every = [*hidden, *self.head_parameters()]
            return torch.stack([tensor.sum() for tensor in every]).sum() * 0, {}
        aligned = [draft_rows(labels, batch.document_ids, depth) for depth in range(self.depths)]
        rows = [
            h.flatten(0, 1)[index] for h, (index, _) in zip(hidden, aligned, strict=True)
        ]  # K x (n, D)
        valid = torch.stack([mask for _, mask in aligned])  # (K, n)
        teacher = data.last_hidden.flatten(0, 1)[labels.teacher_rows]  # (n, D)

        def chunk_loss(chunk: slice, pieces: list[Tensor]) -> tuple[Tensor, Metrics]:
            return self._chunk_loss(pieces, teacher[chunk], valid[:, chunk])

        if self.options.chunk:
            return chunked_sum(chunk_loss, rows, self.head_parameters(), self.options.chunk)
        return plain_sum(chunk_loss, rows)

    def _chunk_loss(
        self, hidden: list[Tensor], teacher: Tensor, valid: Tensor
    ) -> tuple[Tensor, Metrics]:
        """Loss and metrics of a few labels.

        Args:
            hidden: K tensors (m, D), the draft rows of each depth.
            teacher: (m, D) target hidden states that predict the labels.
            valid: (K, m) whether the depth has a draft row for the label.
        """
        with torch.autocast(teacher.device.type, enabled=False):  # the law is the target's own
            p, best = self._teacher_law(teacher)
        known = p.sum(-1) > 0
        if self.drafter.draft_vocab is not None:
            known = torch.isin(best, self.drafter.draft_vocab)
        soft = losses.renormalised(p) if self.drafter.draft_vocab is not None else p
        loss_fn = losses.DISTILLATION[self.options.loss]
        total = teacher.new_zeros((), dtype=soft.dtype)
        metrics: Metrics = {}
        for depth, (rows, mask) in enumerate(zip(hidden, valid, strict=True)):
            logits = self.logits(rows, depth)
            value = torch.where(mask & known, loss_fn(logits, soft), 0.0).sum()
            total = total + self.weights[depth] * value
            sums, label = self._metrics(logits, p, best, mask, depth)
            sums[f"loss_{depth}_sum"] = value.detach()
            if self.drafter.confidence is not None:
                error = losses.confidence_bce(self.drafter.confidence(rows), label)
                weighted = torch.where(mask, error, 0.0).sum()
                total = total + self.options.confidence_weight * self.weights[depth] * weighted
                sums[f"confidence_{depth}_sum"] = weighted.detach()
            metrics |= sums
        return total, metrics

    @torch.no_grad()
    def _teacher_law(self, teacher: Tensor) -> tuple[Tensor, Tensor]:
        """(m, D) -> exact p over the draft vocabulary (m, Vd), not renormalised, and its argmax
        over V (m,).
        """
        logits = self.drafter.target.project(teacher.to(self.drafter.target.dtype))  # (m, V)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        best = wide.argmax(-1)
        if self.drafter.draft_vocab is None:
            return wide.softmax(-1), best
        normaliser = wide.logsumexp(-1, keepdim=True)
        return (wide[:, self.drafter.draft_vocab] - normaliser).exp(), best

    @torch.no_grad()
    def _metrics(
        self, logits: Tensor, p: Tensor, best: Tensor, mask: Tensor, depth: int
    ) -> tuple[Metrics, Tensor]:
        """Sums per depth, and the confidence label 1 - ½‖p-q‖₁ of each row (m,)."""
        q = logits.softmax(-1, dtype=p.dtype)
        label = losses.overlap(q, p)
        agree = self.drafter.to_target_ids(logits.argmax(-1)) == best
        count = mask.sum()
        return {
            f"accuracy_{depth}_sum": (agree & mask).sum(),
            f"accuracy_{depth}_count": count,
            f"overlap_{depth}_sum": torch.where(mask, label, 0.0).sum(),
            f"overlap_{depth}_count": count,
            f"loss_{depth}_count": count,
            f"confidence_{depth}_count": count,
        }, label


class StepAttention:
    """Attention of EAGLE-3's training-time test (arXiv:2503.01840), one call per step.

    Step i, row t, attends to the step-0 keys of rows <= t of its document and to the keys of row t
    of steps 1..i. The scores are T x T plus i diagonals, never (T·steps)²; ``masks.unrolled_mask``
    is the definition.

    Args:
        document_ids: (B, T).
    """

    def __init__(self, document_ids: Tensor) -> None:
        self.mask = causal_mask(document_ids)[:, None]  # (B, 1, T, T)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(B, H, T, d) queries, (B, Hkv, T, d) keys and values of this step -> (B, H, T, d)."""
        groups = q.shape[1] // k.shape[1]
        self.keys.append(repeat_heads(k, groups))
        self.values.append(repeat_heads(v, groups))
        if len(self.keys) == 1:
            return F.scaled_dot_product_attention(
                q, self.keys[0], self.values[0], attn_mask=self.mask
            )
        scale = q.shape[-1] ** -0.5
        context = (q @ self.keys[0].transpose(-1, -2)) * scale  # (B, H, T, T)
        context = context.masked_fill(~self.mask, float("-inf"))
        own = (
            torch.stack([(q * key).sum(-1) for key in self.keys[1:]], dim=-1) * scale
        )  # (B, H, T, i)
        wide = torch.promote_types(q.dtype, torch.float32)
        weights = (
            torch.cat((context, own.to(context.dtype)), dim=-1).softmax(-1, dtype=wide).to(v.dtype)
        )
        length = self.keys[0].shape[2]
        out = weights[..., :length] @ self.values[0]
        for step, value in enumerate(self.values[1:]):
            out = out + weights[..., length + step, None] * value
        return out


class Eagle3Objective(Objective):
    """EAGLE-3's training-time test with teacher-forced tokens (arXiv:2503.01840)."""

    drafter: Eagle3Drafter

    def unroll(self, data: TargetBatch) -> list[Tensor]:
        """K steps:

        Step i feeds token t+1+i and the previous step's own feature, at rotary position t+i.
        """
        assert data.features is not None
        batch = data.batch
        attend = StepAttention(batch.document_ids)
        feature = self.drafter.fuse(data.features.to(self.drafter.fc.weight.dtype))
        outputs = []
        for step in range(self.depths):
            tokens = shifted_tokens(batch.input_ids, 1 + step)
            hidden, feature = self.drafter(feature, tokens, batch.position_ids + step, attend)
            outputs.append(hidden)
        return outputs

    def logits(self, hidden: Tensor, depth: int) -> Tensor:
        """(..., D) -> (..., Vd); one output matrix for all steps."""
        return self.drafter.logits(hidden)

    def _output_module(self) -> nn.Module:
        return self.drafter.lm_head


class MedusaObjective(Objective):
    """Medusa-1: the target stays frozen, head i predicts token t+2+i (arXiv:2401.10774)."""

    drafter: MedusaDrafter

    def unroll(self, data: TargetBatch) -> list[Tensor]:
        """K heads on the target's last hidden state."""
        return list(self.drafter(data.last_hidden.to(next(self.drafter.blocks.parameters()).dtype)))

    def logits(self, hidden: Tensor, depth: int) -> Tensor:
        """(..., D) -> (..., Vd) through head ``depth``'s own output matrix, or the target's."""
        return self.drafter.logits(hidden, depth)

    def _output_module(self) -> nn.Module | None:
        return self.drafter.lm_heads


OBJECTIVES: dict[str, type[Objective]] = {"eagle3": Eagle3Objective, "medusa": MedusaObjective}


def build_objective(drafter: Drafter, options: ObjectiveOptions) -> Objective:
    """The objective of a head's family."""
    return OBJECTIVES[drafter.family](drafter, options)
