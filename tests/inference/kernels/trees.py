"""Random trees behind random caches, and attention along their paths in float64.

A tree is a list of parents: -1 for a root, and `PADDING` for a row that sees no tree row but
itself. Letters as in `inference.kernels.reference`.
"""

from dataclasses import dataclass, field
from random import Random

import torch
from torch import Tensor

from inference.kernels.reference import AttentionOptions

PADDING = -2
KINDS = ("chain", "star", "random", "forest")


def parents_of(kind: str, size: int, padding: int = 0, seed: int = 0) -> list[int]:
    """A tree of `size` rows, the last `padding` of which are padding."""
    draw = Random(seed)
    parents = [-1]
    for node in range(1, size):
        if kind == "chain":
            parents.append(node - 1)
        elif kind == "star":
            parents.append(0)
        else:
            parents.append(draw.randrange(-1 if kind == "forest" else 0, node))
    return parents[: size - padding] + [PADDING] * padding


def path_to(parents: list[int], node: int) -> list[int]:
    """The rows from the root to this one, itself included."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def words_of(parents: list[int], num_pending: int) -> Tensor:
    """(N, W) long."""
    num_words = -(-len(parents) // 64)
    rows = []
    for node in range(num_pending, len(parents)):
        bits = sum(1 << j for j in path_to(parents, node))
        words = [(bits >> (64 * w)) & (2**64 - 1) for w in range(num_words)]
        rows.append([word - 2**64 if word >= 2**63 else word for word in words])
    return torch.tensor(rows, dtype=torch.int64)


@dataclass
class Case:
    """One call, described by what it is drawn from. `lengths` is P per sequence."""

    lengths: tuple[int, ...] = (5,)
    num_rows: int = 4
    num_pending: int = 0
    kinds: tuple[str, ...] = ("random",)
    padding: int = 0
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (16, 16)
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    spare: int = 3
    dtype: torch.dtype = torch.float32
    seed: int = 0
    parents: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        size = self.num_pending + self.num_rows
        padding = min(self.padding, self.num_rows - 1)
        self.parents = [
            parents_of(self.kinds[b % len(self.kinds)], size, padding, self.seed + b)
            for b in range(len(self.lengths))
        ]

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, AttentionOptions]:
        """What the implementations take; q and the cache are views, as in a model."""
        g = torch.Generator().manual_seed(self.seed)
        (heads, kv_heads), (dim, dim_v) = self.heads, self.dims
        batch, size = len(self.lengths), self.num_pending + self.num_rows
        columns = max(self.lengths) + size + self.spare
        q = torch.randn(batch, self.num_rows, heads, dim, generator=g).transpose(1, 2)
        keys = torch.randn(2, batch, kv_heads, columns, dim, generator=g)[1]
        values = torch.randn(batch, columns, kv_heads, dim_v, generator=g).transpose(1, 2)
        depths = torch.tensor([[max(0, len(path_to(p, j)) - 1) for j in range(size)]
                               for p in self.parents])  # fmt: skip
        options = AttentionOptions(
            scale=dim**-0.5,
            num_pending=self.num_pending,
            depths=None if self.window is None else depths,
            window=self.window,
            softcap=self.softcap,
            sinks=torch.randn(heads, generator=g) if self.sinks else None,
        )
        words = torch.stack([words_of(p, self.num_pending) for p in self.parents])
        q, keys, values = (t.to(self.dtype) for t in (q, keys, values))
        return q, keys, values, torch.tensor(self.lengths), words, options


def along_paths(case: Case) -> Tensor:
    """(B, Hq, N, dv) float64: every row attends to the tokens in front of it, one by one."""
    q, keys, values, _, _, options = case.tensors()
    q, keys, values = q.double(), keys.double(), values.double()
    group = q.shape[1] // keys.shape[1]
    out = torch.empty(*q.shape[:3], values.shape[3], dtype=torch.float64)
    for b, prefix in enumerate(case.lengths):
        for i in range(case.num_rows):
            path = path_to(case.parents[b], case.num_pending + i) or [case.num_pending + i]
            text = [*range(prefix), *(prefix + j for j in path)]  # columns, in order of position
            if options.window is not None:
                text = text[-options.window :]
            for h in range(q.shape[1]):
                scores = keys[b, h // group, text] @ q[b, h, i] * options.scale
                if options.softcap is not None:
                    scores = options.softcap * (scores / options.softcap).tanh()
                weights = scores.exp()
                total = weights.sum()
                if options.sinks is not None:
                    total = total + options.sinks[h].double().exp()
                out[b, h, i] = (weights / total) @ values[b, h // group, text]
    return out
