"""The attention mask of a training pass as text: a line for each query row, a column for each key.

    rows   #  the query sees the key      .  it does not
    keys   the text first, then the rows of each later draft step, or of each block

Legend: T columns of the sequence that are shown, K draft steps or rows per block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from training.masks import (
    CONTEXT,
    Rows,
    Rule,
    block,
    block_rows,
    build_mask,
    causal,
    causal_block,
    join,
    parallel,
    rollout_rows,
    sequence_rows,
    training_time_test,
    windowed,
)

FAMILY_RULES: dict[str, Rule | None] = {
    "medusa": None,
    "hydra": causal,
    "eagle1": training_time_test,
    "eagle3": training_time_test,
    "mtp": training_time_test,
    "peagle": parallel,
    "dflash": block,
    "jetspec": causal_block,
    "dspark": block,
}
"""What the rows of each family see; Medusa's read one hidden state and attend to nothing."""


@dataclass(frozen=True)
class View:
    """What is drawn.

    Attributes:
        documents: (T,) document of each column, -1 for padding.
        supervised: (T,) bool.
        tokens: T texts.
        first: number of the first column in the sequence.
    """

    documents: Tensor
    supervised: Tensor
    tokens: Sequence[str]
    first: int = 0


def draw_mask(family: str, view: View, depth: int = 3, window: int | None = None) -> str:
    """The mask of one family's pass.

    Args:
        family: key of ``FAMILY_RULES``.
        view: the columns.
        depth: K.
        window: sliding window of the head's layers; None sees all.

    Returns:
        Lines, the last without a newline.
    """
    rule = FAMILY_RULES[family]
    if rule is None:
        return f"{family} has no attention: every draft reads one hidden state of the target"
    text = sequence_rows(view.documents[None])
    drafts = _draft_rows(rule, view, depth)
    only_drafts = rule in (block, causal_block)  # the text is keys alone: features of the target
    if only_drafts and not drafts:
        return "no supervised token here can be drafted: show other columns"
    queries = drafts if only_drafts else [text, *drafts]
    mask = _allowed(join(*queries), join(text, *drafts), rule, window)
    sizes = [part.position.shape[1] for part in (text, *drafts)]
    names = [name for part in queries for name in _names(part, view)]
    width = max(len(name) for name in names)
    documents = "".join("-" if n < 0 else str(n % 10) for n in view.documents.tolist())
    lines = [f"{'document':>{width}}  {documents}"]
    for name, row in zip(names, mask.tolist(), strict=True):
        cells = "".join("#" if seen else "." for seen in row)
        ends = list(accumulate(sizes))
        groups = [cells[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        lines.append(f"{name:>{width}}  {'  '.join(groups)}")
    return "\n".join(lines)


def _allowed(query: Rows, key: Rows, rule: Rule, window: int | None) -> Tensor:
    """(Q, S) bool; rows of the training-time test stand as many positions further on as their step,
    which a window counts from.
    """
    if rule is not training_time_test or window is None:
        return build_mask(query, key, windowed(rule, window))[0]
    near = (query.position + query.step).T - (key.position + key.step) < window
    return build_mask(query, key, rule)[0] & near


def _draft_rows(rule: Rule, view: View, depth: int) -> list[Rows]:
    """Rows behind those of the text, kind by kind."""
    documents = view.documents[None]
    if rule is causal:
        return []
    if rule is training_time_test:
        return [sequence_rows(documents, step) for step in range(1, depth)]
    roots = first_roots(view)[None]
    if rule is parallel:
        steps = torch.arange(1, depth).repeat(roots.shape[1])
        anchors = roots.repeat_interleave(depth - 1, dim=1)
        return [rollout_rows(documents, anchors, steps)] if anchors.numel() else []
    return [block_rows(documents, root[None, None], depth) for root in roots[0]]


def first_roots(view: View) -> Tensor:
    """(A,) the first column of each document, from its second token on, behind which a supervised
    token comes.
    """
    found = []
    documents, supervised = view.documents.tolist(), view.supervised.tolist()
    done = set()
    for column in range(1, len(documents) - 1):
        here = documents[column]
        inside = documents[column - 1] == here == documents[column + 1]
        if here >= 0 and here not in done and inside and supervised[column + 1]:
            done.add(here)
            found.append(column)
    return torch.tensor(found, dtype=torch.int64)


def _names(rows: Rows, view: View) -> list[str]:
    """What each query row is."""
    names = []
    attributes = (rows.position, rows.step, rows.anchor, rows.block)
    for position, step, anchor, number in zip(*(x[0].tolist() for x in attributes), strict=True):
        column, root = position + view.first, anchor + view.first
        if number != CONTEXT:
            names.append(f"root {root} row {position - anchor}")
        elif anchor != position:
            names.append(f"rollout {root} depth {step}")
        elif step:
            names.append(f"step {step} {column}")
        else:
            names.append(f"{_short(view.tokens[position])} {column}")
    return names


def _short(text: str) -> str:
    """A token in at most eight printable characters."""
    shown = "".join(c if c.isprintable() and not c.isspace() else "_" for c in text)
    return shown if len(shown) <= 8 else shown[:7] + "~"
