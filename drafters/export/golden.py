"""Golden logits: a few rows that travel with an export, to tell whether a loaded head is the same.

Inputs are random but fixed; the logits depend on every weight of the head and, for heads that read
it, on the target's embedding. A sequential head runs a prefix and then a short chain, or all its
steps on the prefix where each depth has weights of its own; a block head runs a prefix and one
block. So feeding features back and attending to earlier rows are covered too.

Legend: T prefix rows, S depths, F captured layers (1 for the last hidden state), D hidden, Vd draft
vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from drafters.base import Drafter, SequentialDrafter
from drafters.block import DFlashDrafter
from drafters.export.folder import ExportError, read_tensors, write_tensors
from drafters.layers import repeat_heads
from drafters.medusa import MedusaDrafter
from drafters.peagle import PEagleDrafter

GOLDEN = "golden.logits"  # of safetensors, but engines read every file with that ending
UNFELT = {
    "feature_layers": "the head was written with other feature layers than config.json now says: "
    "some programs count inputs of layers, others outputs",
    "draft_vocab": "the head was written with another vocabulary map: that in the file belongs to "
    "another head",
}
"""What golden logits do not depend on, and what is wrong where it differs."""
COUNTED = {"features": "captured layers", "token_ids": "drafts"}
"""What the shapes of the inputs depend on."""
PREFIX = 6  # T
STEPS = 3  # S, where the head itself has no number of drafts
TOLERANCE = 1e-4
HALF_TOLERANCE = 0.05  # of two machines, or where a target is in half precision and a file is not


def golden_inputs(drafter: Drafter) -> dict[str, Tensor]:
    """Fixed inputs of the head's shape: ``features`` (T, F·D), and ``token_ids`` (T + S - 1,)."""
    generator = torch.Generator().manual_seed(0)
    width = max(1, len(drafter.feature_layers)) * drafter.config.hidden_size
    features = torch.randn(PREFIX, width, generator=generator)
    count = PREFIX + _depths(drafter) - 1
    tokens = torch.randint(drafter.config.vocab_size, (count,), generator=generator)
    return {"features": features, "token_ids": tokens}


@torch.no_grad()
def golden_logits(drafter: Drafter, inputs: dict[str, Tensor]) -> Tensor:
    """What the head answers to :func:`golden_inputs`.

    Returns:
        (S, Vd) logits, one row per depth.

    Raises:
        ValueError: no rule for this family.
    """
    parameter = next(drafter.parameters())
    features, token_ids = inputs["features"].to(parameter), inputs["token_ids"].to(parameter.device)
    with _aligned(drafter):
        if isinstance(drafter, MedusaDrafter):
            rows = drafter(features[-1])
            return torch.stack([drafter.logits(row, head) for head, row in enumerate(rows)])
        if isinstance(drafter, PEagleDrafter):  # has EAGLE-3's class, not its steps
            return _peagle_block(drafter, features, token_ids)
        if isinstance(drafter, DFlashDrafter):
            return _dflash_block(drafter, features, token_ids)
        if isinstance(drafter, SequentialDrafter):
            return _chain(drafter, features, token_ids)
    raise ValueError(f"no golden logits for {drafter.family!r} heads yet: add a rule to this file")


def golden_difference(head: Drafter, again: Drafter) -> float:
    """How far the golden logits of two heads lie apart, for the tokens that both can propose.

    Args:
        head: as trained.
        again: read back from a dialect, some of which leave the draft vocabulary out.
    """
    inputs = golden_inputs(head)
    wanted, found = golden_logits(head, inputs), golden_logits(again, inputs)
    if head.draft_vocab is not None and again.draft_vocab is None:
        found = found[:, head.draft_vocab]
    return (found - wanted).abs().max().item()


def check_same_logits(head: Drafter, again: Drafter) -> None:
    """Golden logits of a head that was written and of the one read back, bit for bit.

    Raises:
        ExportError: they differ.
    """
    inputs = golden_inputs(head)
    if not torch.equal(golden_logits(head, inputs), golden_logits(again, inputs)):
        raise ExportError("the head read back gives other logits than the head written")


def write_golden(drafter: Drafter, folder: Path) -> None:
    """Write inputs, logits, and what these do not depend on, to ``folder/golden.logits``."""
    inputs = golden_inputs(drafter)
    tensors = {**inputs, **_unfelt(drafter), "logits": golden_logits(drafter, inputs)}
    write_tensors(tensors, folder / GOLDEN, {"family": drafter.family})


def check_golden(drafter: Drafter, folder: str | Path, tolerance: float | None = None) -> float:
    """Compare a loaded head with the logits that travel with its export.

    Args:
        drafter: the head, with its target attached.
        folder: the export.
        tolerance: largest difference allowed, as a part of the largest golden logit; None allows
            what another machine rounds differently, more where the head, its target or the file is
            in half precision.

    Returns:
        The difference found, as a part of the largest golden logit.

    Raises:
        ExportError: the file is unreadable or of another head, or the logits differ.
    """
    path = Path(folder) / GOLDEN
    golden = read_tensors(path)
    expected = golden_inputs(drafter)
    for name, value in expected.items():
        if name not in golden or golden[name].shape != value.shape:
            raise ExportError(
                f"{path}: {name} does not fit this head, which has another number of "
                f"{COUNTED[name]} than the one that was written"
            )
    for name, value in _unfelt(drafter).items():
        if not torch.equal(golden.get(name, value), value):
            raise ExportError(f"{path}: {UNFELT[name]}")
    found, wanted = golden_logits(drafter, golden).cpu().double(), golden["logits"].double()
    if found.shape != wanted.shape:
        raise ExportError(
            f"{path} holds logits of shape {list(wanted.shape)}, this head gives "
            f"{list(found.shape)}: it belongs to another head"
        )
    if tolerance is None:
        dtypes = {next(drafter.parameters()).dtype, drafter.target.dtype, golden["logits"].dtype}
        tolerance = HALF_TOLERANCE if dtypes & {torch.bfloat16, torch.float16} else TOLERANCE
    difference = ((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-12)).item()
    if not difference <= tolerance:
        raise ExportError(
            f"{path}: logits of this head differ by {difference:.2g} of the largest one (allowed: "
            f"{tolerance:g}): its weights, its target or its dtype are not those of the export"
        )
    return difference


def _unfelt(drafter: Drafter) -> dict[str, Tensor]:
    """Values of ``UNFELT``, as far as the head has them."""
    found = {"feature_layers": torch.tensor(drafter.feature_layers, dtype=torch.int64)}
    if drafter.draft_vocab is not None:
        found["draft_vocab"] = drafter.draft_vocab.cpu()
    return found


def _depths(drafter: Drafter) -> int:
    """S."""
    return drafter.num_drafts or STEPS


def _chain(drafter: SequentialDrafter, features: Tensor, token_ids: Tensor) -> Tensor:
    """(T, F·D) prefix and (T + S - 1,) tokens -> (S, Vd) logits of the last row of every step.

    Where depths have weights of their own every step runs on T rows, or else the first one does and
    the others follow it row by row.
    """
    attend = KeepingAttention()
    positions = torch.arange(len(token_ids), device=token_ids.device)[None]
    prefix = features[None]  # (1, T, F·D)
    captured = prefix if drafter.feature_layers else None
    feature = drafter.begin(captured, prefix, positions[:, :PREFIX], attend)
    logits = []
    for step in range(_depths(drafter)):
        single = step > 0 and drafter.num_drafts is None
        rows = slice(step + PREFIX - 1 if single else step, step + PREFIX)
        inputs = feature[:, -1:] if single else feature
        tokens, places = token_ids[None, rows], positions[:, rows]
        hidden, feature = drafter(inputs, tokens, places, attend, step)
        logits.append(drafter.logits(hidden[0, -1], step))
    return torch.stack(logits)


def _dflash_block(drafter: DFlashDrafter, features: Tensor, token_ids: Tensor) -> Tensor:
    """(T, F·D) context and (T + S - 1,) tokens, of which T - 1 is the root -> (S, Vd) logits."""
    attend = KeepingAttention(drafter.causal)
    root = token_ids[None, PREFIX - 1]
    block = drafter.blocks(root)  # (1, g)
    positions = torch.arange(PREFIX + block.shape[-1], device=root.device)[None]
    drafter.inject(drafter.context(features[None]), positions[:, :PREFIX], attend.store)
    drafting = drafter.drafting(drafter(block, positions[:, PREFIX:], attend))[0]  # (S, D)
    state, logits = drafter.begin_path(drafting[:1]), []
    for depth in range(_depths(drafter)):
        before = token_ids[PREFIX - 1 + depth][None]
        rows, state = drafter.advance(drafting[depth : depth + 1], before, state)
        logits.append(drafter.logits(rows[0], depth))
    return torch.stack(logits)


def _peagle_block(drafter: PEagleDrafter, features: Tensor, token_ids: Tensor) -> Tensor:
    """(T, F·D) prefix and its (T,) tokens, then S - 1 mask rows -> (S, Vd) logits."""
    attend, depths = KeepingAttention(), _depths(drafter)
    positions = torch.arange(len(token_ids), device=token_ids.device)[None]
    text = drafter.text_rows(features[None], token_ids[None, :PREFIX])
    hidden = drafter.run(text, positions[:, :PREFIX], attend)[0, -1:]
    if depths > 1:
        masks = drafter.mask_rows(1, depths - 1)
        hidden = torch.cat((hidden, drafter.run(masks, positions[:, PREFIX:], attend)[0]))
    return drafter.logits(hidden)


@contextmanager
def _aligned(drafter: Drafter) -> Iterator[None]:
    """Compute with copies of the tensors.

    Those that live in a mapped file are not aligned, BLAS rounds differently then, and equal heads
    would not give equal logits.
    """
    tensors = [*drafter.parameters(), *drafter.buffers()]
    mapped = [tensor.data for tensor in tensors]
    for tensor in tensors:
        tensor.data = tensor.data.clone()
    try:
        yield
    finally:
        for tensor, data in zip(tensors, mapped, strict=True):
            tensor.data = data


class KeepingAttention:
    """Attention of new rows to all rows seen so far, the keys of each layer kept between calls.

    Args:
        causal: of each layer, whether new rows see only earlier ones among themselves; None: all.
    """

    def __init__(self, causal: list[bool] | None = None) -> None:
        self.causal = causal
        self._seen: dict[int, tuple[Tensor, Tensor]] = {}

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Keep keys (1, Hkv, T, d) and values behind those of the layer."""
        old = self._seen.get(layer)
        if old is not None:
            k, v = torch.cat((old[0], k), dim=2), torch.cat((old[1], v), dim=2)
        self._seen[layer] = k, v

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(1, H, T, d) queries, (1, Hkv, T, d) keys and values -> (1, H, T, d)."""
        self.store(layer, k, v)
        groups = q.shape[1] // k.shape[1]
        keys, values = (repeat_heads(x, groups) for x in self._seen[layer])
        rows, columns = q.shape[2], keys.shape[2]
        visible = torch.ones(rows, columns, dtype=torch.bool, device=q.device)
        if self.causal is None or self.causal[layer]:
            visible = visible.tril(columns - rows)
        return torch.nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=visible)
