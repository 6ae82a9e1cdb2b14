"""What may be wrong with a head, as ways to read it that would undo the fault.

Each family gets the hypotheses that mean something for it. Order matters: of two that explain a
head about equally well the first is named.

Legend: D hidden, V / Vd target / draft vocabulary, F captured layers.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from drafters import Drafter
from drafters.config import default_feature_layers, spread_feature_layers
from recipes.diagnosis import variants
from recipes.diagnosis.evidence import View
from recipes.diagnosis.hypothetical import Hypothesis
from recipes.diagnosis.settings import settings
from recipes.diagnosis.variants import Change

_NORM_CHANGES: tuple[tuple[str, str, Change], ...] = (
    (
        "the output was not normed in training",
        "drop the final norm, or train with it",
        variants.no_final_norm,
    ),
    (
        "the output was normed twice in training",
        "norm it once in training",
        variants.final_norm_twice,
    ),
    (
        "norm.weight is not the trained one: the target's in its place drafts better",
        "export norm.weight from the trained checkpoint",
        variants.target_final_norm,
    ),
    (
        "the feature was not normed in training",
        "train with hidden_norm, which engines apply",
        variants.no_feature_norm,
    ),
    (
        "captured layers were normed before the fusion in training, or are and were not",
        "set fc_norm as in training and export its tensors",
        variants.no_fc_norm,
    ),
    (
        "the first layer's residual was the other one of normed and plain feature in training",
        "set norm_before_residual as in training",
        variants.normed_residual,
    ),
    ("norms are stored as scale - 1", "add one to every norm", variants.shifted_scales(1.0)),
    (
        "norms are stored as scale + 1",
        "subtract one from every norm",
        variants.shifted_scales(-1.0),
    ),
)
"""What may have been otherwise with norms, and what to do then."""


def hypotheses(head: Drafter, view: View) -> Iterator[Hypothesis]:
    """All that apply to a head, in order."""
    yield Hypothesis(
        "sampler",
        f"draft_temperature {head.config.draft_temperature:g} makes the draft laws worse",
        "set draft_temperature to 1, or fit it (scripts.calibrate)",
        change=variants.unscaled_drafts,
    )
    yield from _vocabulary(head)
    yield from _layers(head, view)
    yield from _joining(head)
    yield from _matrices(head)
    yield from _norms(head, view)
    yield from settings(head)
    yield from _pairing(head, view)
    yield Hypothesis(
        "tensors",
        "the output matrix is not the trained one: the target's rows in its place draft better",
        "export again from the trained checkpoint",
        change=variants.target_output_rows,
        leaks=True,
    )


def _vocabulary(head: Drafter) -> Iterator[Hypothesis]:
    if head.draft_vocab is None:
        return
    fix = (
        "store absolute ids in draft_vocab, and d2t = draft_vocab - arange in the EAGLE-3 dialects"
    )
    for message, ids in variants.other_maps(head.draft_vocab):
        yield Hypothesis("vocabulary", message, fix, change=variants.with_vocab(ids))
    matched = _nearest_rows(head)
    if matched is not None:
        yield Hypothesis(
            "vocabulary",
            "rows of the output matrix stand for other tokens than the map says",
            "take d2t and the output matrix from the same checkpoint",
            change=variants.with_vocab(matched),
        )


def _nearest_rows(head: Drafter) -> Tensor | None:
    """(Vd,) the target's row that each row of the output matrix resembles most, where that is a
    map; trained rows stay near the ones they started from.
    """
    weights, vocab = variants.output_matrices(head), head.draft_vocab
    if not weights or vocab is None:
        return None
    own = torch.nn.functional.normalize(weights[0].detach().float(), dim=-1)
    theirs = torch.nn.functional.normalize(head.target.lm_head.weight.float(), dim=-1)
    some = torch.linspace(0, len(own) - 1, min(len(own), 256)).long()
    first = (own[some] @ theirs.T).argmax(-1)  # all of them only where these do not fit
    if (first == vocab[some]).double().mean() > 0.5 or first.unique().numel() < 0.8 * len(some):
        return None
    nearest = torch.cat([(part @ theirs.T).argmax(-1) for part in own.split(1024)])
    return nearest if nearest.unique().numel() > 0.8 * nearest.numel() else None


def _layers(head: Drafter, view: View) -> Iterator[Hypothesis]:
    layers, last = view.layers, head.target.num_layers - 1
    if not layers:
        return
    seen = {layers}

    def one(message: str, other: tuple[int, ...], subtle: bool = False) -> Iterator[Hypothesis]:
        if other in seen or len(other) != len(layers) or not all(0 <= k <= last for k in other):
            return
        seen.add(other)
        fix = f"write {list(other)} as hidden_states indices (SGLang's are one lower)"
        yield Hypothesis(
            "layer ids",
            f"{list(layers)}: {message}",
            fix,
            replace(view, layers=other),
            subtle=subtle,
        )

    yield from one("each is one too high", tuple(k - 1 for k in layers), True)
    yield from one("each is one too low", tuple(k + 1 for k in layers), True)
    if len(layers) == 3:
        yield from one("not the default ones", tuple(default_feature_layers(last + 1)), True)
    if last >= 3:
        yield from one(
            "not the default ones",
            tuple(spread_feature_layers(last + 1, len(layers) if len(layers) > 1 else 5)),
        )
    orders = permutations(layers) if len(layers) <= 3 else [tuple(reversed(layers))]
    for order in orders:
        yield from one("joined in another order in training", order)
    for place, layer in enumerate(layers):
        for other in (layer - 2, layer - 1, layer + 1, layer + 2):
            moved = (*layers[:place], other, *layers[place + 1 :])
            yield from one(f"layer {layer} was {other} in training", moved)
    yield from one("each is two too high", tuple(k - 2 for k in layers))
    yield from one("each is two too low", tuple(k + 2 for k in layers))


def _joining(head: Drafter) -> Iterator[Hypothesis]:
    yield Hypothesis(
        "concat",
        "embedding and feature are joined in the other order than in training",
        "swap the two halves of the columns of q, k and v (EAGLE-3), fc (EAGLE-1) or eh_proj (MTP)",
        change=variants.swapped_halves,
    )
    yield Hypothesis(
        "norm",
        "the norms of embedding and feature are in each other's place",
        "swap input_layernorm and hidden_norm (enorm and hnorm in MTP)",
        change=variants.swapped_input_norms,
    )


def _matrices(head: Drafter) -> Iterator[Hypothesis]:
    for kind in variants.square_names(head):
        yield Hypothesis(
            "transposed",
            f"{kind} is stored as its transpose",
            f"transpose {kind}.weight: rows are outputs, as in torch.nn.Linear",
            change=variants.transposed(kind),
            subtle=True,
        )
    for to_halves in (True, False):
        order = "interleaved pairs" if to_halves else "halves, twice converted"
        yield Hypothesis(
            "heads",
            f"rows of q_proj and k_proj are in the order of {order}",
            "permute the rows within each head to Llama's rotary halves",
            change=variants.reordered_rotary(to_halves),
            subtle=to_halves,
        )
    yield Hypothesis(
        "tensors",
        "gate_proj and up_proj are in each other's place",
        "swap them",
        change=variants.swapped_gates,
        subtle=True,
    )


def _norms(head: Drafter, view: View) -> Iterator[Hypothesis]:
    for message, fix, change in _NORM_CHANGES:
        subtle = change is variants.normed_residual
        yield Hypothesis("norm", message, fix, change=change, subtle=subtle)
    yield Hypothesis(
        "norm",
        "the other one of normed and plain output was fed back in training",
        "flip norm_output",
        change=variants.toggled_norm_output,
        depth=1,
    )
    if not view.layers:
        which = "before" if view.normed else "after"
        yield Hypothesis(
            "norm",
            f"the last hidden state was the one {which} the target's final norm in training",
            "capture what the output matrix reads (after the final norm) and train on that",
            replace(view, normed=not view.normed),
        )


def _pairing(head: Drafter, view: View) -> Iterator[Hypothesis]:
    if view.feature_shift or view.token_shift or view.label_shift:
        return

    def one(message: str, leaks: bool, telling: bool = False, **shifts: Any) -> Hypothesis:
        fix = (
            "row t holds (feature of t, embedding of t+1) and is trained on token t+2: train again"
        )
        return Hypothesis(
            "pairing",
            message,
            fix,
            replace(view, **shifts),
            leaks=leaks,
            telling=telling,
            everywhere=head.shape == "independent",
        )

    yield one("features are those of the row before", False, feature_shift=-1)
    yield one("features are those of the row after", True, feature_shift=1)
    if head.shape != "independent":
        yield one("tokens are those of the row before", False, token_shift=-1)
        yield one("tokens are those of the row after", True, True, token_shift=1)
    yield one("drafts are trained on the token before", True, True, label_shift=-1)
    yield one("drafts are trained on the token after", False, label_shift=1)
