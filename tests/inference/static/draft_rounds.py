"""Rounds of static drafters beside their host twins, on random texts and random hidden states.

Drafters look at tokens and at what a target said about them, not at the target itself, so texts
need no model: any numbers will do, and any part of a text may be "accepted" in a round.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drafters import Drafter
from inference.cache import TreeCache
from inference.engine import EagerEngine
from inference.proposers import HeadProposer, RowState, Session, TreeOptions, build_proposer
from inference.proposers import block as block_module
from inference.proposers import medusa as medusa_module
from inference.proposers.growth import Growth as HostGrowth
from inference.proposers.laws import draft_law, proposal_kind
from inference.sampling import SamplingParams
from inference.static.draft_base import Committed, StaticDrafter
from inference.static.draft_build import build_static_drafter
from inference.static.growth import DraftLaw, Growth
from inference.static.laws import warpers_of
from inference.static.noise import seed_words
from inference.static.tree import DraftTree
from inference.timing import PhaseTimer
from inference.tree import TokenTree

Paths = list[tuple[int, ...]]
GREEDY = SamplingParams()
LENGTH = 80


@dataclass
class Texts:
    """Random texts of B sequences: tokens (B, T), hidden states and features of every position."""

    tokens: Tensor
    hidden: Tensor
    features: Tensor | None

    @classmethod
    def random(cls, head: Drafter, batch: int, seed: int = 0) -> "Texts":
        generator = torch.Generator().manual_seed(seed)
        dtype, size = next(head.parameters()).dtype, head.config.hidden_size

        def normal(width: int) -> Tensor:
            return torch.randn(batch, LENGTH, width, generator=generator, dtype=dtype)

        tokens = torch.randint(3, head.config.vocab_size, (batch, LENGTH), generator=generator)
        width = len(head.feature_layers) * size
        return cls(tokens, normal(size), normal(width) if width else None)

    def state(self, row: int, start: int, end: int, sampling: SamplingParams) -> RowState:
        """Of the host: positions start .. end-1 are new, x_end is the last token."""
        features = None if self.features is None else self.features[row, start:end]
        tokens = self.tokens[row, : end + 1].tolist()
        return RowState(tokens, 1, features, self.hidden[row, start:end], 99, sampling)

    def committed(self, starts: list[int], ends: list[int], rows: int) -> Committed:
        """Of the static drafter: the same, with rows from elsewhere as padding."""
        counts = torch.tensor(ends) - torch.tensor(starts)
        places = torch.tensor(starts)[:, None] + torch.arange(rows)
        there = torch.arange(rows) < counts[:, None]
        places = torch.where(there, places, 7 * places % (LENGTH - 1))
        batch = torch.arange(len(starts))[:, None]
        features = None if self.features is None else self.features[batch, places]
        return Committed(
            self.tokens[batch, places + 1], counts, self.hidden[batch, places], features
        )

    def prefilled(self, static: StaticDrafter, prompts: list[int]) -> Committed:
        """What the drafter's prefill makes of the first positions, padded with the next ones."""
        longest = max(prompts)
        return static.prefill(
            None if self.features is None else self.features[:, :longest],
            self.hidden[:, :longest],
            self.tokens[:, 1 : longest + 1],
            torch.tensor(prompts),
        )


def host_proposer(
    head: Drafter, options: TreeOptions, batch: int, rule: str = "match"
) -> HeadProposer:
    """Started for so many sequences."""
    proposer = build_proposer(head, options)
    cache = TreeCache(head.target.model.config)
    proposer.start(
        Session(EagerEngine(head.target), cache, batch, PhaseTimer(), rule, list(range(batch)))
    )
    return proposer


def static_drafter(
    head: Drafter,
    options: TreeOptions,
    batch: int,
    rule: str = "match",
    sampling: SamplingParams = GREEDY,
    **more: Any,
) -> StaticDrafter:
    """For the same."""
    proposer = build_proposer(head, options)
    warpers = warpers_of([draft_law(sampling, proposer.options.draft_temperature or 1.0)] * batch)
    seeds, positions = seed_words([sampling.seed] * batch), torch.zeros(batch, dtype=torch.int64)
    kind = proposal_kind(rule, sampling, proposer.draws)
    law = DraftLaw(kind, warpers, seeds, positions, options.sharpness, head.draft_vocab)
    return build_static_drafter(head, options, law, LENGTH, **more)


def paths_of(tokens: list[int], parents: list[int], valid: list[bool]) -> Paths:
    """The token path of every node that is there, sorted."""
    paths: list[tuple[int, ...]] = []
    for token, parent, there in zip(tokens, parents, valid, strict=True):
        assert not there or parent < len(paths), "parents come before their children"
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return sorted(path for path, there in zip(paths, valid, strict=True) if there)


def host_paths(tree: TokenTree) -> Paths:
    return paths_of(tree.tokens.tolist(), tree.parents.tolist(), [True] * tree.num_nodes)


def static_paths(tree: DraftTree) -> list[Paths]:
    rows = zip(tree.tokens.tolist(), tree.parents.tolist(), tree.valid.tolist(), strict=True)
    return [paths_of(*row) for row in rows]


class StaticLogits:
    """Keeps the logits that a growth is given, level by level (B, F, Vd)."""

    def __init__(self, growth: Growth, monkeypatch: Any) -> None:
        self.levels: list[Tensor] = []
        add = growth.add

        def adding(grown: Any, logits: Tensor, chances: Any = None) -> Any:
            self.levels.append(logits)
            return add(grown, logits, chances)

        monkeypatch.setattr(growth, "add", adding)

    def taken(self) -> list[Tensor]:
        found, self.levels = self.levels, []
        return found


class HostLogits:
    """Keeps the logits (F, Vd) that a host tree is grown from, level by level."""

    def __init__(self, monkeypatch: Any) -> None:
        self.levels: list[Tensor] = []
        add_children = HostGrowth.add_children

        def adding(tree: Any, frontier: Tensor, logits: Tensor, chances: Any = None) -> None:
            self.levels.append(logits)
            add_children(tree, frontier, logits, chances)

        monkeypatch.setattr(HostGrowth, "add_children", adding)
        for module in (block_module, medusa_module):
            monkeypatch.setattr(module, "grow_marginals", self._marginals(module.grow_marginals))

    def _marginals(self, inner: Any) -> Any:
        def growing(options: Any, state: Any, rule: Any, rows: Tensor, *rest: Any) -> TokenTree:
            tree = inner(options, state, rule, rows, *rest)
            self.levels = [row[None] for row in rows]
            return tree

        return growing

    def taken(self) -> list[Tensor]:
        found, self.levels = self.levels, []
        return found


def check_rounds(
    head: Drafter,
    options: TreeOptions,
    prompts: list[int],
    monkeypatch: Any,
    *,
    rule: str = "match",
    sampling: SamplingParams = GREEDY,
    rounds: int = 5,
    atol: float = 1e-12,
) -> int:
    """Both draft the same in every round, after random parts of random texts.

    Returns:
        Nodes that were compared.
    """
    batch, compared = len(prompts), 0
    static = static_drafter(head, options, batch, rule, sampling)
    proposer = host_proposer(head, options, batch, rule)
    ours, host = StaticLogits(static.growth, monkeypatch), HostLogits(monkeypatch)
    texts, generator = Texts.random(head, batch), torch.Generator().manual_seed(1)
    starts, ends = [0] * batch, list(prompts)
    new = texts.prefilled(static, prompts)
    for _ in range(rounds):
        static.growth.law.positions.copy_(torch.tensor(ends))
        trees, levels = static_paths(static.draft(new)), ours.taken()
        for row, found in enumerate(trees):
            expected = proposer.grow(row, texts.state(row, starts[row], ends[row], sampling))
            assert found == host_paths(expected)
            compared += len(found)
            for mine, logits in zip(levels, host.taken(), strict=False):
                rows = mine[row, : len(logits)]
                torch.testing.assert_close(rows, logits, atol=atol, rtol=atol)
        starts = list(ends)
        steps = torch.randint(1, static.new_rows + 1, (batch,), generator=generator)
        ends = [end + int(step) for end, step in zip(ends, steps, strict=True)]
        new = texts.committed(starts, ends, static.new_rows)
    return compared
