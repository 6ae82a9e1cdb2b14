"""Objectives: the loss of each family, as the module that accelerate prepares.

``forward`` holds the whole unroll, so data-parallel wrappers see every gradient. It returns the
loss *summed* over what ``count`` counts (the loop divides by the global count) and metrics as
``name_sum`` / ``name_count`` pairs.

A family says which rows draft which tokens (``drafts``); everything about vocabularies, losses,
weights and confidence is here, once, a chunk of rows at a time.

Legend: B batch, T sequence, m draft rows per depth, K depths, D hidden, V / Vd target / draft
vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from drafters import Drafter
from drafters.layers import Recomputed
from drafters.vocab import draft_index
from training import losses
from training.alignment import Labels, draft_rows, supervised_labels
from training.chunked import Metrics, chunked_sum, plain_sum
from training.data.batches import Batch
from training.features import TargetBatch
from training.objectives.options import ObjectiveOptions
from training.objectives.teacher import Laws, Teacher
from training.weighting import Survey, expected_length_slopes, reached, survival_weights


@dataclass(frozen=True)
class Drafts:
    """What is drafted in a batch, depth by depth.

    Attributes:
        hidden: K tensors (m, output_size), what the head's logits are made from.
        teacher: (m,) or (K, m) flat target rows whose logits predict the drafted tokens; one
            dimension where all depths draft the same tokens.
        tokens: of the same shape, the tokens the target emitted there.
        anchor: (K, m) which round of drafting each draft belongs to, from 0; drafts of one round
            have one number, whatever their depth.
        valid: (K, m) whether there is such a draft.
    """

    hidden: list[Tensor]
    teacher: Tensor
    tokens: Tensor
    anchor: Tensor
    valid: Tensor


class Objective(nn.Module, ABC):
    """Distillation of the target into a head, over all depths at once.

    Attributes:
        progress: part of training done, in [0, 1]; the loop sets it, the loss schedule reads it.
        arithmetic: dtype that matrix products are cast to (autocast); None casts nothing.
    """

    def __init__(self, drafter: Drafter, options: ObjectiveOptions) -> None:
        super().__init__()
        self.drafter = drafter
        self.options = options.resolved(drafter.family)
        self.depths = self._depths(options.steps)
        options.check_head(drafter, self.depths)
        assert self.options.decay is not None
        self.depth_weights = losses.head_weights(self.depths, self.options.decay)
        self.progress = 0.0
        self.arithmetic: torch.dtype | None = None

    @property
    def activation_checkpointing(self) -> bool:
        """Whether the insides of the head's layers are computed again in the backward pass, which
        keeps less memory and changes no value.
        """
        return any(module.recompute for module in self._layers())

    @activation_checkpointing.setter
    def activation_checkpointing(self, value: bool) -> None:
        if value and not self._layers():
            raise ValueError(
                "run.activation_checkpointing has no effect on a head of the target's own layers "
                "(drafter.init_from=native): drop it"
            )
        for module in self._layers():
            module.recompute = value

    def _layers(self) -> list[Recomputed]:
        return [module for module in self.drafter.modules() if isinstance(module, Recomputed)]

    def _depths(self, asked: int | None) -> int:
        """K; ``asked`` is ``options.steps`` before defaults."""
        assert self.drafter.num_drafts is not None
        return self.drafter.num_drafts

    @abstractmethod
    def drafts(self, data: TargetBatch) -> Drafts | None:
        """The draft rows of a batch; None where nothing is supervised."""

    @abstractmethod
    def forced(self, data: TargetBatch, roots: Tensor) -> list[Tensor]:
        """The training pass on given rounds of one document, for the parity check.

        Args:
            data: of one document, B = 1, padding-free.
            roots: (n,) columns a of the last committed tokens, at least 1; the drafts are those of
                tokens a+1, a+2, ... given the document's own tokens.

        Returns:
            K tensors (n, output_size); rows whose draft lies behind the document are arbitrary.
        """

    @abstractmethod
    def logits(self, hidden: Tensor, depth: int) -> Tensor:
        """(..., output_size) rows of one depth -> (..., Vd)."""

    def count(self, batch: Batch) -> Tensor:
        """What the loss of a batch is summed over: supervised tokens, unless a family draws its
        rounds.
        """
        return batch.supervised.sum()

    def head_parameters(self) -> list[Tensor]:
        """Trainable tensors read while the rows are turned into losses."""
        drafter = self.drafter
        modules = [m for m in (drafter.confidence, *drafter.output_modules()) if m is not None]
        return [parameter for module in modules for parameter in module.parameters()]

    def forward(self, data: TargetBatch | None) -> tuple[Tensor, Metrics]:
        """Summed loss and metric sums of one micro-batch; nothing is worth 0.

        The prepared module casts by itself, so that every engine computes in ``arithmetic``.
        """
        device = self.drafter.target.device
        cast = self.arithmetic is not None
        with torch.autocast(device.type, dtype=self.arithmetic, enabled=cast):
            return self._loss(data)

    def _loss(self, data: TargetBatch | None) -> tuple[Tensor, Metrics]:
        drafts = None if data is None else self.drafts(data)
        if data is None or drafts is None:  # all parameters stay in the graph
            every = [p for p in self.parameters() if p.requires_grad]
            return torch.stack([p.sum() for p in every]).sum() * 0, {}
        weights, slopes, offset, metrics = self._weigh(drafts, data)

        def chunk_loss(chunk: slice, pieces: list[Tensor]) -> Iterator[tuple[Tensor, Metrics]]:
            return self._chunk_loss(chunk, pieces, drafts, data, weights, slopes)

        if self.options.chunk:
            total, sums = chunked_sum(
                chunk_loss, drafts.hidden, self.head_parameters(), self.options.chunk
            )
        else:
            total, sums = plain_sum(chunk_loss, drafts.hidden)
        return total + offset, sums | metrics

    def _weigh(
        self, drafts: Drafts, data: TargetBatch
    ) -> tuple[Tensor, Tensor | None, Tensor | float, Metrics]:
        """Constants of the loss: weights (K, m) of the drafts and, where the expected length is a
        term, its slopes (K, m) and what is missing from Σ slope·overlap to its true value.
        """
        first = drafts.hidden[0]
        fixed = first.new_tensor(self.depth_weights, dtype=losses.wide_dtype(first))[:, None]
        weights = fixed * drafts.valid
        options, mix = self.options, self.mix()
        wants_length = mix.get("expected_length", 0.0) > 0
        if not (wants_length or options.on_policy or options.weighting == "dpace"):
            return weights, None, 0.0, {}
        survey = self._survey(drafts, data)
        metrics: Metrics = {}
        if options.on_policy:
            weights = weights * reached(survey)
        if options.weighting == "dpace":
            weights = weights * survival_weights(survey)
        if not wants_length:
            return weights, None, 0.0, metrics
        slopes, lengths = expected_length_slopes(survey)
        metrics["expected_length_sum"] = lengths.sum()
        metrics["expected_length_count"] = torch.tensor(len(lengths), device=lengths.device)
        losses_sum = len(lengths) - lengths.sum() / self.depths
        offset = mix["expected_length"] * (losses_sum - (slopes * survey.overlap).sum())
        return weights, slopes, offset, metrics

    @torch.no_grad()
    def _survey(self, drafts: Drafts, data: TargetBatch) -> Survey:
        """How good every draft is now: a forward pass over the rows, without gradients."""
        size = self.options.chunk or drafts.valid.shape[1]
        columns = []
        for chunk in torch.arange(drafts.valid.shape[1], device=drafts.valid.device).split(size):
            rows = []
            for depth, (teacher, _) in enumerate(self._teachers(drafts, data, chunk)):
                logits = self.logits(drafts.hidden[depth][chunk], depth)
                q = logits.softmax(-1, dtype=teacher.p.dtype)
                own = q.gather(-1, teacher.label.clamp_min(0)[:, None]).squeeze(-1)
                own = torch.where(teacher.label >= 0, own, 0.0)
                width = min(max(self.options.on_policy, 1), q.shape[-1])
                best = logits.topk(width).indices
                hit = (best == teacher.label[:, None]).any(-1)
                rows.append((losses.overlap(q, teacher.p), own, hit))
            columns.append([torch.stack(kind) for kind in zip(*rows, strict=True)])
        found = [torch.cat(parts, dim=1) for parts in zip(*columns, strict=True)]
        return Survey(found[0], found[1], found[2], drafts.anchor, drafts.valid)

    def mix(self) -> dict[str, float]:
        """The loss terms at the present point of training."""
        terms, final = self.options.terms or {}, self.options.final
        if final is None:
            return terms
        assert self.options.ramp is not None
        start, end = self.options.ramp
        past = self.progress - start
        done = 1.0 if self.progress >= end else past / (end - start) if past > 0 else 0.0
        names = [*terms, *(name for name in final if name not in terms)]
        mixed = {n: (1 - done) * terms.get(n, 0.0) + done * final.get(n, 0.0) for n in names}
        return {name: weight for name, weight in mixed.items() if weight > 0}

    def _chunk_loss(
        self,
        chunk: slice,
        pieces: list[Tensor],
        drafts: Drafts,
        data: TargetBatch,
        weights: Tensor,
        slopes: Tensor | None,
    ) -> Iterator[tuple[Tensor, Metrics]]:
        """Loss and metrics of a few rows, depth by depth: no depth's vocabulary-sized tensors are
        held while the next one's are made, but for the target's laws that depths share.

        Args:
            chunk: which.
            pieces: K tensors (c, output_size), their hidden rows.
            drafts, data: of the whole batch.
            weights: (K, m).
            slopes: (K, m), or None.
        """
        columns = torch.arange(drafts.valid.shape[1], device=drafts.valid.device)[chunk]
        teachers = self._teachers(drafts, data, columns, only_valid=True)
        for depth in range(self.depths):
            teacher, there = next(teachers)
            here = columns[there]
            slope = None if slopes is None else slopes[depth, here]
            mask, weight = drafts.valid[depth, here], weights[depth, here]
            found = self._depth_loss(depth, pieces[depth][there], teacher, mask, weight, slope)
            del teacher
            yield found
            del found

    def _depth_loss(
        self,
        depth: int,
        rows: Tensor,
        teacher: Teacher,
        mask: Tensor,
        weight: Tensor,
        slope: Tensor | None,
    ) -> tuple[Tensor, Metrics]:
        """Loss and metrics of rows (c, output_size) of one depth; the other tensors are (c,)."""
        logits = self.logits(rows, depth)
        value = self._terms(logits, rows, teacher, mask)
        total = (weight * value).sum()
        if slope is not None:
            alpha = losses.overlap(losses.log_softmax(logits).exp(), teacher.p)
            total = total + self.mix()["expected_length"] * (slope * alpha).sum()
        sums, agree = self._metrics(logits, teacher, mask, depth)
        sums[f"loss_{depth}_sum"] = value.detach().sum()
        if self.drafter.confidence is not None:
            config = self.drafter.config
            at, rule = config.confidence_at, config.confidence_rule
            label = losses.acceptance_labels(logits.detach(), teacher.tempered, agree, at)[rule]
            error = losses.confidence_bce(self.drafter.confidence(rows), label)
            weighted = torch.where(mask, error, 0.0).sum()
            share = self.depth_weights[depth] * (self.options.confidence_weight or 0.0)
            total = total + share * weighted
            sums[f"confidence_{depth}_sum"] = weighted.detach()
        return total, sums

    def _terms(self, logits: Tensor, rows: Tensor, teacher: Teacher, mask: Tensor) -> Tensor:
        """(c,) the weighted loss terms of each row, 0 where it does not count."""
        total = torch.zeros(len(rows), dtype=losses.wide_dtype(logits), device=rows.device)
        for name, weight in self.mix().items():
            if name == "expected_length":
                continue
            if name == "ce":
                value = losses.cross_entropy(logits, teacher.label.clamp_min(0))
                counts = mask & (teacher.label >= 0)
            elif name == "smooth_l1":
                value, counts = losses.feature_regression(rows, teacher.hidden), mask
            elif name == "kl":  # its constant part once, not for every depth
                cross = losses.cross_entropy_of_laws(logits, teacher.inside)
                value, counts = cross - teacher.entropy, mask & teacher.known
            else:
                value = losses.distillation(name, logits, teacher.p, self.options.top)
                counts = mask & teacher.known
            total = total + weight * torch.where(counts, value, 0.0)
        return total

    def _teachers(
        self, drafts: Drafts, data: TargetBatch, columns: Tensor, only_valid: bool = False
    ) -> Iterator[tuple[Teacher, Tensor | slice]]:
        """The target's laws for some columns, depth by depth. Each of its rows is projected once,
        however many depths draft the token behind it.

        Args:
            drafts, data: of the whole batch.
            columns: (c,) which.
            only_valid: where depths draft different tokens, leave out what is not valid.

        Yields:
            The laws, and the part of the columns that they are for.
        """
        index = self._draft_index()
        if drafts.teacher.ndim == 1:
            laws = self._laws(data, drafts.teacher[columns], index)
            teacher = laws.teacher(index[drafts.tokens[columns]])
            for _ in range(self.depths):
                yield teacher, slice(None)
            return
        parts: list[Tensor | slice] = [slice(None)] * self.depths
        if only_valid:
            parts = list(drafts.valid[:, columns])
        places = [drafts.teacher[depth, columns][part] for depth, part in enumerate(parts)]
        unique, inverse = torch.cat(places).unique(return_inverse=True)
        laws = self._laws(data, unique, index)
        rows = inverse.split([len(place) for place in places])
        for depth, part in enumerate(parts):
            yield laws.teacher(index[drafts.tokens[depth, columns][part]], rows[depth]), part

    def _draft_index(self) -> Tensor:
        """(V,) draft id of each target token, -1 outside the draft vocabulary."""
        vocab, size = self.drafter.draft_vocab, self.drafter.target.vocab_size
        if vocab is None:
            return torch.arange(size, device=self.drafter.target.device)
        return draft_index(vocab, size)

    @torch.no_grad()
    def _laws(self, data: TargetBatch, rows: Tensor, index: Tensor) -> Laws:
        """The target's laws in some of its flat rows (u,), in its own precision; ``index`` is that
        of :meth:`_draft_index`.
        """
        hidden = data.last_hidden.flatten(0, 1)[rows]
        target, vocab = self.drafter.target, self.drafter.draft_vocab
        with torch.autocast(hidden.device.type, enabled=False):  # the law is the target's own
            logits = target.project(hidden.to(target.dtype))  # (u, V)
        best, p = logits.argmax(-1), losses.target_law(logits, vocab)
        at = self.drafter.config.confidence_at
        tempered = p if at == 1 else losses.target_law(logits, vocab, at)
        return Laws(p, best, hidden, index[best] >= 0, tempered)

    @torch.no_grad()
    def _metrics(
        self, logits: Tensor, teacher: Teacher, mask: Tensor, depth: int
    ) -> tuple[Metrics, Tensor]:
        """Sums per depth, and (c,) whether the head's best token is the target's in each row."""
        q = logits.softmax(-1, dtype=teacher.p.dtype)
        agree = self.drafter.to_target_ids(logits.argmax(-1)) == teacher.best
        overlap = losses.overlap(q, teacher.p)
        count = mask.sum()
        return {
            f"accuracy_{depth}_sum": (agree & mask).sum(),
            f"accuracy_{depth}_count": count,
            f"overlap_{depth}_sum": torch.where(mask, overlap, 0.0).sum(),
            f"overlap_{depth}_count": count,
            f"loss_{depth}_count": count,
            f"confidence_{depth}_count": count,
        }, agree


class AlignedObjective(Objective):
    """Of heads that draft from every row of a document: depth i of row t drafts token t+2+i."""

    @abstractmethod
    def unroll(self, data: TargetBatch) -> list[Tensor]:
        """Rows of every depth, each (B, T, output_size): row t of depth i drafts token t+2+i."""

    def drafts(self, data: TargetBatch) -> Drafts | None:
        """One draft per depth and supervised token; all depths draft the same tokens."""
        batch = data.batch
        labels = supervised_labels(batch.input_ids, batch.document_ids, batch.supervised)
        if not labels.positions.numel():
            return None
        return self._align(self.unroll(data), labels, batch)

    def _align(self, hidden: list[Tensor], labels: Labels, batch: Batch) -> Drafts:
        aligned = [draft_rows(labels, batch.document_ids, depth) for depth in range(self.depths)]
        rows = [
            h.flatten(0, 1)[index] for h, (index, _) in zip(hidden, aligned, strict=True)
        ]  # K x (n, output_size)
        anchor = torch.stack([index for index, _ in aligned])
        valid = torch.stack([mask for _, mask in aligned])
        return Drafts(rows, labels.teacher_rows, labels.ids, anchor, valid)

    def forced(self, data: TargetBatch, roots: Tensor) -> list[Tensor]:
        """Rows a-1 of every depth."""
        return [hidden[0, roots - 1] for hidden in self.unroll(data)]
