"""What heads borrow from their target, in files that have a place of their own for it.

Legend: H hidden, V target vocabulary, Vd draft vocabulary.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from drafters.base import Drafter
from drafters.target import TargetModel

TOKEN_MAP = "token_map"
"""vLLM's name of a draft vocabulary: (Vd,) absolute ids."""


def whole_vocabulary(head: Drafter) -> Drafter:
    """A head that borrows the target's output matrix, without its draft vocabulary: none of its
    weights depends on one.

    Args:
        head: with its target attached.
    """
    if head.draft_vocab is None:
        return head
    assert not any(head.output_modules()), "its output matrix has the draft vocabulary's rows"
    fields = {**head.config.own_fields(), "draft_vocab_size": head.config.vocab_size}
    whole = type(head)(type(head.config)(**fields))
    state = {name: tensor for name, tensor in head.state_dict().items() if name != "draft_vocab"}
    parameter = next(head.parameters())
    nn.Module.to(whole, parameter.device, parameter.dtype)
    whole.load_state_dict(state)
    return whole.attach(head.target, allow_other_target=True).eval()


def copy_refusals(head: Drafter) -> list[str]:
    """Why a copy of the target's output matrix in a file does not stand for it: a scale of the
    logits is put into the copy, a bias has no place.
    """
    if head.target.lm_head.bias is None:
        return []
    return [
        f"the output matrix of target {head.target.name!r} has a bias, which this dialect has no "
        "place for: train the head with shared_lm_head=False"
    ]


def output_rows(head: Drafter) -> Tensor:
    """The rows of the target's output matrix that a head borrows, (Vd, H), in the head's dtype."""
    return head.head_rows().to(next(head.parameters()).dtype)


def differing_rows(found: Tensor, own: Tensor) -> Tensor:
    """(V,) rows of a file's matrix that are no copies of the target's.

    A copy is one in the coarser dtype of both: files round what the target keeps, and a target may
    be loaded in half precision beside a file in full.

    Args:
        found: (V, H) of the file.
        own: (V, H) the target's.
    """
    own = own.detach().to(found.device)
    return ((own.to(found.dtype) != found) & (found.to(own.dtype) != own)).any(dim=-1)


def is_copy(found: Tensor, own: Tensor) -> bool:
    """Whether a file's matrix is a copy of the target's, as :func:`differing_rows` compares."""
    return found.shape == own.shape and not bool(differing_rows(found, own).any())


def is_targets_output(
    matrices: Iterable[Tensor], target: TargetModel, kept: Tensor | None = None
) -> bool:
    """Whether all matrices are copies of the target's output matrix.

    Args:
        matrices: each (Vd, H).
        target: to compare with.
        kept: (Vd,) ids of the draft vocabulary; None for the whole.
    """
    weight = target.lm_head.weight
    if weight.is_meta or target.lm_head.bias is not None:
        return False
    rows = weight if kept is None else weight[kept.to(weight.device)]
    rows = rows * target.logit_scale
    return all(is_copy(matrix, rows) for matrix in matrices)


def cut_to_map(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a file whose whole output matrices (V, H) beside a ``token_map`` are cut to its
    rows, as vLLM cuts them.
    """
    kept = tensors.get(TOKEN_MAP)
    if kept is None or kept.min() < 0:
        return dict(tensors)
    rows = max(len(kept), int(kept.max()))
    return {
        name: tensor[kept] if name.startswith("lm_head") and len(tensor) > rows else tensor
        for name, tensor in tensors.items()
    }


def map_problems(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[str]:
    """What is wrong with a ``token_map``.

    Args:
        config: with ``vocab_size``.
        tensors: of the file.
    """
    kept = tensors.get(TOKEN_MAP)
    if kept is None:
        return []
    if kept.min() < 0 or kept.max() >= config["vocab_size"]:
        return ["token_map leads out of the target's vocabulary: it must hold its token ids"]
    if kept.unique().numel() != kept.numel():
        return ["token_map names a token twice: it must hold absolute ids, no offsets"]
    return []
