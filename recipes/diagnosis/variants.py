"""Changes of a head that undo a fault, each on a copy of it.

A change takes a head, alters it in place, and returns whether there was anything to alter.

Legend: D hidden, V / Vd target / draft vocabulary, d head size.
"""

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from drafters import Drafter
from drafters.dspark import MarkovHead
from drafters.eagle import Eagle3Drafter
from drafters.eagle1 import Eagle1Drafter
from drafters.layers import Attention, GatedMLP, RMSNorm
from drafters.mtp import MtpDrafter, MtpModule
from drafters.vocab import to_offsets

Change = Callable[[Drafter], bool]


def copied(head: Drafter) -> Drafter:
    """A copy that shares the target."""
    again = copy.deepcopy(head, {id(head.target): head.target})
    again._gathered = None  # rows of the target's output matrix, which another map leaves behind
    return again


def changed(head: Drafter, change: Change) -> Drafter | None:
    """A changed copy that shares the target, or None where the change has nothing to alter."""
    again = copied(head)
    with torch.no_grad():
        return again if change(again) else None


def swap(one: Tensor, other: Tensor) -> None:
    """Each other's numbers, in place."""
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)


def normed_residual(head: Drafter) -> bool:
    """The other residual of EAGLE-3's first layer."""
    if not isinstance(head, Eagle3Drafter):
        return False
    layer = head.midlayer
    layer.norm_before_residual = not layer.norm_before_residual
    return True


# Joining ----------------------------------------------------------------------------------------


def swapped_halves(head: Drafter) -> bool:
    """Embedding and feature in the other order."""
    if isinstance(head, MtpDrafter):
        for module in head.mtp:
            assert isinstance(module, MtpModule)
            module.hidden_first = not module.hidden_first
        return True
    matrices = []
    if isinstance(head, Eagle3Drafter):
        matrices = [head.midlayer.self_attn.get_submodule(f"{name}_proj") for name in "qkv"]
    elif isinstance(head, Eagle1Drafter):
        matrices = [head.fc]
    for matrix in matrices:
        weight = matrix.get_parameter("weight")
        weight.copy_(weight.roll(weight.shape[1] // 2, 1))
    return bool(matrices)


def swapped_input_norms(head: Drafter) -> bool:
    """The norms of embedding and feature in each other's place."""
    pairs: list[tuple[nn.Module, nn.Module]] = []
    if isinstance(head, Eagle3Drafter):
        pairs = [(head.midlayer.input_layernorm, head.midlayer.hidden_norm)]
    elif isinstance(head, MtpDrafter):
        pairs = [
            (module.get_submodule("enorm"), module.get_submodule("hnorm")) for module in head.mtp
        ]
    for one, other in pairs:
        swap(one.get_parameter("weight"), other.get_parameter("weight"))
    return bool(pairs)


def swapped_gates(head: Drafter) -> bool:
    """gate_proj and up_proj in each other's place."""
    found = [module for module in head.modules() if isinstance(module, GatedMLP)]
    for mlp in found:
        mlp.gate_proj, mlp.up_proj = mlp.up_proj, mlp.gate_proj
    return bool(found)


# Norms ------------------------------------------------------------------------------------------


class _Twice(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.weight = norm, norm.get_parameter("weight")

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.norm(x))


class Skipped(nn.Module):
    """Keeps the scale, as heads take their dtype from it."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight = norm.get_parameter("weight")

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) as they are."""
        return x


def final_norm_twice(head: Drafter) -> bool:
    """The output is normed once more."""
    return _replace(_final_norms(head), _Twice)


def no_final_norm(head: Drafter) -> bool:
    """The output goes unnormed into the output matrix."""
    return _replace(_final_norms(head), Skipped)


def target_final_norm(head: Drafter) -> bool:
    """The target's scale in the final norm."""
    scale = head.target.block().get("norm.weight")
    norms = [getattr(parent, name) for parent, name in _final_norms(head)]
    for norm in norms:
        if scale is None or not isinstance(norm, RMSNorm):
            return False
        norm.weight.copy_(scale)
    return bool(norms)


def no_feature_norm(head: Drafter) -> bool:
    """The feature goes unnormed into the first layer."""
    return _replace(_feature_norms(head), Skipped)


def toggled_norm_output(head: Drafter) -> bool:
    """Feed the other one of normed and un-normed output back."""
    if "norm_output" not in head.config.own_fields() or head.family == "peagle":
        return False  # P-EAGLE feeds nothing back
    head.config.norm_output = not head.config.norm_output
    return True


def shifted_scales(by: float) -> Change:
    """Norms that store one less (Gemma's way) or one more than their scale."""

    def change(head: Drafter) -> bool:
        norms = [module for module in head.modules() if isinstance(module, RMSNorm)]
        for norm in norms:
            norm.weight.add_(by)
        return bool(norms)

    return change


def no_fc_norm(head: Drafter) -> bool:
    """Captured layers go unnormed into the fusion, or, where they did, normed with scale one."""
    if not isinstance(head, Eagle3Drafter):
        return False
    size, count = head.config.hidden_size, len(head.feature_layers)
    if head.input_norm is not None:
        head.input_norm = None
    elif head.fc_norm is None:
        head.fc_norm = nn.ModuleList(RMSNorm(size, head.config.rms_norm_eps) for _ in range(count))
    else:
        head.fc_norm = None
    return True


def _final_norms(head: Drafter) -> list[tuple[nn.Module, str]]:
    if isinstance(head, MtpDrafter):
        return [(module, "norm") for module in head.mtp]
    return [(head, "norm")] if "norm" in dict(head.named_children()) else []


def _feature_norms(head: Drafter) -> list[tuple[nn.Module, str]]:
    if isinstance(head, MtpDrafter):
        return [(module, "hnorm") for module in head.mtp]
    if isinstance(head, Eagle3Drafter):
        return [(head.midlayer, "hidden_norm")]
    return [(head, "hidden_norm")] if "hidden_norm" in dict(head.named_children()) else []


def _replace(places: list[tuple[nn.Module, str]], make: Callable[[nn.Module], nn.Module]) -> bool:
    for parent, name in places:
        setattr(parent, name, make(parent.get_submodule(name)))
    return bool(places)


# Matrices ---------------------------------------------------------------------------------------


def square_names(head: Drafter) -> Iterator[str]:
    """Kinds of square matrices, without layer numbers: "o_proj", "linear", ..."""
    seen = set()
    for name, parameter in head.named_parameters():
        kind = name.rsplit(".", 2)[-2] if name.count(".") else name
        if parameter.ndim == 2 and parameter.shape[0] == parameter.shape[1] and kind not in seen:
            seen.add(kind)
            yield kind


def transposed(kind: str) -> Change:
    """All square matrices of a kind the other way round."""

    def change(head: Drafter) -> bool:
        found = [
            parameter
            for name, parameter in head.named_parameters()
            if name.endswith(f"{kind}.weight") and parameter.shape[0] == parameter.shape[-1]
        ]
        for parameter in found:
            parameter.copy_(parameter.T.clone())
        return bool(found)

    return change


def reordered_rotary(to_halves: bool) -> Change:
    """Rows of queries and keys from interleaved pairs to halves (Llama's order), or back."""

    def change(head: Drafter) -> bool:
        found = [module for module in head.modules() if isinstance(module, Attention)]
        for attention in found:
            for matrix in (attention.q_proj, attention.k_proj):
                rows = matrix.weight.unflatten(0, (-1, attention.head_dim))
                order = torch.arange(attention.head_dim, device=rows.device)
                order = (
                    order.view(-1, 2).T.flatten() if to_halves else order.view(2, -1).T.flatten()
                )
                matrix.weight.copy_(rows[:, order].flatten(0, 1))
        return bool(found)

    return change


def target_output_rows(head: Drafter) -> bool:
    """The target's rows in place of the head's own output matrix."""
    weights = output_matrices(head)
    vocab = head.draft_vocab
    if vocab is not None and vocab.unique().numel() < vocab.numel():
        return False
    for weight in weights:
        weight.copy_(head.head_rows().to(weight))
    return bool(weights)


def output_matrices(head: Drafter) -> list[Tensor]:
    """The head's own matrices of the shape (Vd, D); DSpark's low-rank bias is none."""
    shape = (head.config.draft_vocab_size, head.config.hidden_size)
    modules = [module for module in head.output_modules() if isinstance(module, nn.Module)]
    modules = [module for module in modules if not isinstance(module, MarkovHead)]
    return [w for module in modules for w in module.parameters() if tuple(w.shape) == shape]


def unscaled_drafts(head: Drafter) -> bool:
    """Draft laws at temperature 1."""
    before, head.config.draft_temperature = head.config.draft_temperature, 1.0
    return before != 1.0


# Vocabulary -------------------------------------------------------------------------------------


def with_vocab(ids: Tensor) -> Change:
    """Another map from draft ids to tokens (Vd,); not where it is no map, or the same one."""

    def change(head: Drafter) -> bool:
        vocab = head.draft_vocab
        if vocab is None or torch.equal(vocab, ids):
            return False
        if ids.min() < 0 or ids.max() >= head.config.vocab_size:
            return False
        if ids.unique().numel() < ids.numel():  # a token drafted twice would count twice
            return False
        vocab.copy_(ids)
        return True

    return change


def other_maps(vocab: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Ways to misread or misplace a map (Vd,), undone; with what went wrong in words."""
    steps = torch.arange(len(vocab), device=vocab.device)
    yield "the map holds offsets and is read as token ids", vocab + steps
    yield "offsets were added to ids that are absolute already", to_offsets(vocab)
    yield "the map is out of order", vocab.sort().values
    yield "the map is that of another vocabulary: its first tokens are drafted", steps
    yield "the map is one row off", vocab.roll(1)
    yield "the map is one row off", vocab.roll(-1)
