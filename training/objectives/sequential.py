"""Objectives of heads that draft step by step: Hydra, EAGLE-1/3, MTP.

Legend: B batch, T sequence, H query heads, Hkv key/value heads, d head size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from drafters.base import SequentialDrafter
from training.alignment import shifted_tokens
from training.data.batches import Batch
from training.draws import uniform_rows
from training.features import TargetBatch
from training.objectives.base import AlignedObjective
from training.objectives.spans import Spans, attend_text, attend_text_and, causal_spans


class StepAttention:
    """Attention of EAGLE-3's training-time test (arXiv:2503.01840), one call per step and layer.

    The first call of a layer is causal within each document. In its i-th further call, row t
    attends to the first call's keys of rows <= t of its document and to the keys of row t of the
    calls since. The scores are those on the text, a piece of the rows at a time, plus i diagonals,
    never (T·steps)²; ``masks.unrolled_mask`` is the definition. HASS's attention over true and
    predicted features (arXiv:2408.15766) is the same one, counted from the row that drafts. A layer
    that is called once, such as each of MTP's separate modules, is plainly causal.

    Args:
        document_ids: (B, T).
        windows: sliding window of each layer, or None; a row of step i stands i positions further
            on than its index.
    """

    def __init__(self, document_ids: Tensor, windows: Sequence[int | None]) -> None:
        self._causal = causal_spans(document_ids)
        self._windows = list(windows)
        self._keys: list[list[Tensor]] = [[] for _ in windows]
        self._values: list[list[Tensor]] = [[] for _ in windows]
        self._known: dict[tuple[int | None, int], Spans] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(B, H, T, d) queries, (B, Hkv, T, d) keys and values of this step -> (B, H, T, d)."""
        keys, values = self._keys[layer], self._values[layer]
        keys.append(k)
        values.append(v)
        spans = self._spans(layer, len(keys) - 1)
        if len(keys) == 1:
            return attend_text(q, k, v, spans)
        grouped = q.unflatten(1, (k.shape[1], -1))  # (B, Hkv, H/Hkv, T, d)
        own = [(grouped * key[:, :, None]).sum(-1) for key in keys[1:]]
        near = torch.stack(own, dim=-1).flatten(1, 2) * q.shape[-1] ** -0.5  # (B, H, T, i)
        out, weights = attend_text_and(q, keys[0], values[0], near, spans)
        shares = weights.to(v.dtype).unflatten(1, (k.shape[1], -1)).unsqueeze(-2)
        added = [shares[..., i] * value[:, :, None] for i, value in enumerate(values[1:])]
        return out + torch.stack(added).sum(0).flatten(1, 2)

    def _spans(self, layer: int, step: int) -> Spans:
        """Which first-call keys the rows of a step see."""
        window = self._windows[layer]
        place = (window, 0 if window is None else step)
        if place not in self._known:
            position = self._causal.last - 1 + step
            self._known[place] = self._causal.within(position, window)
        return self._known[place]


class UnrolledObjective(AlignedObjective):
    """Teacher-forced steps (arXiv:2503.01840's training-time test; arXiv:2408.15766; 2509.18362).

    Step i feeds token t+1+i and the previous step's own feature, at rotary position t+i. What the
    authors of EAGLE-1 trained is one step.
    """

    drafter: SequentialDrafter

    def _depths(self, asked: int | None) -> int:
        own, steps = self.drafter.num_drafts, self.options.steps
        if own is not None:
            if asked is not None:
                raise ValueError(
                    f"loss.steps={asked} has no effect: this head has {own} steps of its own"
                )
            return own
        assert steps is not None
        shortest = min((w for w in self.drafter.windows if w is not None), default=steps)
        if steps > shortest:
            raise ValueError(
                f"loss.steps={steps} reaches beyond drafter.sliding_window={shortest}: lower it"
            )
        return steps

    def unroll(self, data: TargetBatch) -> list[Tensor]:
        """K steps, each (B, T, output_size)."""
        batch, drafter = data.batch, self.drafter
        attend = StepAttention(batch.document_ids, drafter.windows)
        features, hidden = self._noised(data)
        feature = drafter.begin(features, hidden, batch.position_ids, attend)
        outputs = []
        for step in range(self.depths):
            tokens = shifted_tokens(batch.input_ids, 1 + step)
            output, feature = drafter(feature, tokens, batch.position_ids + step, attend, step)
            if self.options.detach:
                feature = feature.detach()
            outputs.append(output)
        return outputs

    def _noised(self, data: TargetBatch) -> tuple[Tensor | None, Tensor]:
        """Features and last hidden states in the head's dtype, noised while training."""
        dtype = next(self.drafter.parameters()).dtype
        features = None if data.features is None else data.features.to(dtype)
        hidden = data.last_hidden.to(dtype)
        if not (self.training and self.options.noise):
            return features, hidden
        scale = self.options.noise * 512 / document_lengths(data.batch)[..., None]  # (B, T, 1)
        if features is not None:
            noise = uniform_rows(data.batch.draw, features.shape[1:], features)
            return features + noise * scale.to(dtype), hidden
        return features, hidden + uniform_rows(
            data.batch.draw, hidden.shape[1:], hidden
        ) * scale.to(dtype)

    def logits(self, hidden: Tensor, depth: int) -> Tensor:
        """(..., output_size) -> (..., Vd)."""
        return self.drafter.logits(hidden, depth)


def document_lengths(batch: Batch) -> Tensor:
    """(B, T) how many tokens the document of each row has in this sequence."""
    number = batch.document_ids + 1  # 0 is padding
    counts = number.new_zeros(len(number), number.shape[1] + 1)
    return counts.scatter_add(1, number, torch.ones_like(number)).gather(1, number)
