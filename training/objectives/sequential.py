"""Objectives of heads that draft step by step: Hydra, EAGLE-1/3, MTP.

Legend: B batch, T sequence, H query heads, Hkv key/value heads, d head size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from drafters.base import SequentialDrafter
from drafters.layers import repeat_heads
from training.alignment import shifted_tokens
from training.data import Batch
from training.draws import uniform_rows
from training.features import TargetBatch
from training.masks import causal_mask, in_window, sequence_rows
from training.objectives.base import AlignedObjective


class StepAttention:
    """Attention of EAGLE-3's training-time test (arXiv:2503.01840), one call per step and layer.

    The first call of a layer is causal within each document. In its i-th further call, row t
    attends to the first call's keys of rows <= t of its document and to the keys of row t of the
    calls since. The scores are T x T plus i diagonals, never (T·steps)²; ``masks.unrolled_mask`` is
    the definition. HASS's attention over true and predicted features (arXiv:2408.15766) is the
    same one, counted from the row that drafts. A layer that is called once, such as each of MTP's
    separate modules, is plainly causal.

    Args:
        document_ids: (B, T).
        windows: sliding window of each layer, or None; a row of step i stands i positions further
            on than its index.
    """

    def __init__(self, document_ids: Tensor, windows: Sequence[int | None]) -> None:
        self._rows = sequence_rows(document_ids)
        self._causal = causal_mask(document_ids)
        self._windows = list(windows)
        self._keys: list[list[Tensor]] = [[] for _ in windows]
        self._values: list[list[Tensor]] = [[] for _ in windows]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(B, H, T, d) queries, (B, Hkv, T, d) keys and values of this step -> (B, H, T, d)."""
        groups = q.shape[1] // k.shape[1]
        keys, values = self._keys[layer], self._values[layer]
        keys.append(repeat_heads(k, groups))
        values.append(repeat_heads(v, groups))
        steps = len(keys) - 1
        mask = self._mask(layer, steps)
        if not steps:
            return F.scaled_dot_product_attention(q, keys[0], values[0], attn_mask=mask)
        scale = q.shape[-1] ** -0.5
        context = (q @ keys[0].transpose(-1, -2)) * scale  # (B, H, T, T)
        context = context.masked_fill(~mask, float("-inf"))
        own = torch.stack([(q * key).sum(-1) for key in keys[1:]], dim=-1) * scale  # (B, H, T, i)
        wide = torch.promote_types(q.dtype, torch.float32)
        weights = (
            torch.cat((context, own.to(context.dtype)), dim=-1).softmax(-1, dtype=wide).to(v.dtype)
        )
        length = keys[0].shape[2]
        out = weights[..., :length] @ values[0]
        for step, value in enumerate(values[1:]):
            out = out + weights[..., length + step, None] * value
        return out

    def _mask(self, layer: int, steps: int) -> Tensor:
        """(B, 1, T, T) which first-call keys the rows of the present call see."""
        window = self._windows[layer]
        if window is None:
            return self._causal[:, None]
        return (self._causal & in_window(self._rows, self._rows, window, ahead=steps))[:, None]


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
    same = batch.document_ids[:, :, None] == batch.document_ids[:, None, :]
    return same.sum(-1)
