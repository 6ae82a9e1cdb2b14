"""Starting one head from another of a different shape.

A tensor of the new head takes the other's values where both have it: fewer layers, heads or slots
leave the rest out, and a matrix of another width is left alone. What belongs to something that has
a name goes by that name and not by its place: rows of output matrices by the token they stand for,
columns of the fusion, what P-EAGLE's mask rows have in place of features, and norms by the captured
layer. Tokens that the other head cannot propose keep their start; captured layers that it does not
read start without effect. So a small head starts from a large one, and a head for more slots from
one for few.
"""

import torch
from torch import Tensor, nn

from drafters.base import Drafter
from drafters.families import MtpConfig


@torch.no_grad()
def warm_start(drafter: Drafter, other: Drafter) -> list[str]:
    """Copy what fits.

    Args:
        drafter: new head, its draft vocabulary already chosen.
        other: trained head of the same family, for the same target.

    Returns:
        Names of the tensors that were filled, wholly or in part.

    Raises:
        ValueError: another family, layers of another kind, or nothing fits.
    """
    _check(drafter, other)
    theirs, copied = dict(other.named_parameters()), []
    rows, sources = _token_rows(drafter), _renamed(drafter, other)
    for name, place in drafter.named_parameters():
        source = theirs.get(sources.get(name, name))
        if source is None:
            continue
        if name in rows and source.shape[1:] == place.shape[1:]:
            _copy_tokens(drafter, other, place, source)
        elif name == "fc.weight" and drafter.feature_layers:
            _copy_columns(drafter, other, place, source)
        elif name == "mask_hidden":
            _copy_columns(drafter, other, place.flatten(0, 1), source.flatten(0, 1), missing=None)
        elif name == "input_norm.weight":
            _copy_columns(drafter, other, place[None], source[None], missing=None)
        elif source.shape == place.shape:
            place.copy_(source)
        else:
            continue
        copied.append(name)
    if not copied:
        raise ValueError("drafter.warm_from: no tensor of that head fits the new one")
    return copied


def _check(drafter: Drafter, other: Drafter) -> None:
    """Equal names must mean equal things.

    Raises:
        ValueError: they do not.
    """
    if drafter.family != other.family:
        raise ValueError(
            f"drafter.warm_from is a {other.family} head but drafter.type is {drafter.family}"
        )
    mine, theirs = drafter.config, other.config
    if isinstance(mine, MtpConfig) and mine.native_config != theirs.native_config:
        raise ValueError(
            "drafter.warm_from: layers that came with a target and new ones have nothing in "
            "common; go on training that head with drafter.init_from"
        )


def _token_rows(drafter: Drafter) -> set[str]:
    """Parameters with one row, or one number, per token of the draft vocabulary."""
    size = drafter.config.draft_vocab_size
    parts = [part for module in drafter.output_modules() if module for part in module.modules()]
    matrices = {
        id(place)
        for part in parts
        if isinstance(part, nn.Linear) and part.out_features == size
        for place in part.parameters()
    }
    return {name for name, place in drafter.named_parameters() if id(place) in matrices}


def _renamed(drafter: Drafter, other: Drafter) -> dict[str, str]:
    """Norms of captured layers: the name in the new head -> the name in the other."""
    mine, theirs = drafter.feature_layers, other.feature_layers
    return {
        f"fc_norm.{index}.weight": f"fc_norm.{theirs.index(layer) if layer in theirs else 'none'}"
        ".weight"
        for index, layer in enumerate(mine)
    }


def _copy_columns(
    drafter: Drafter, other: Drafter, place: Tensor, source: Tensor, missing: float | None = 0.0
) -> None:
    """What has D columns for each captured layer, (rows, F·D), by layer.

    Args:
        drafter, other: the new head and the trained one.
        place, source: their tensors; ``place`` is written to.
        missing: what stands for a layer that the other head does not read, zero in the fusion, so
            that it starts without effect; None keeps what is there.
    """
    size, theirs = drafter.config.hidden_size, other.feature_layers
    for index, layer in enumerate(drafter.feature_layers):
        columns = place[:, index * size : (index + 1) * size]
        if layer in theirs:
            first = theirs.index(layer) * size
            columns.copy_(source[:, first : first + size])
        elif missing is not None:
            columns.fill_(missing)


def _copy_tokens(drafter: Drafter, other: Drafter, place: Tensor, source: Tensor) -> None:
    """Rows of the tokens that both heads can propose."""
    mine, theirs = _vocabulary(drafter), _vocabulary(other)
    index = torch.full((drafter.config.vocab_size,), -1, device=mine.device)
    index[theirs.to(mine.device)] = torch.arange(len(theirs), device=mine.device)
    known = index[mine] >= 0
    place[known] = source[index[mine][known]].to(place)


def _vocabulary(drafter: Drafter) -> Tensor:
    """(Vd,) absolute ids of the head's output rows."""
    if drafter.draft_vocab is not None:
        return drafter.draft_vocab
    return torch.arange(drafter.config.vocab_size, device=drafter.device)
