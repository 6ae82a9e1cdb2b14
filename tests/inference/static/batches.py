"""Random batches of drafted trees with padding, beside the host's trees of the same sequences.

Letters: B sequences, N nodes, V vocabulary.
"""

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from inference.decoding import Keep, Text
from inference.processors import Sampler
from inference.sampling import SamplingParams, Stream, draw_top, gumbel, probabilities
from inference.static.accept import EOS, LENGTH, RUNNING, Acceptance, Ends, Noise
from inference.static.noise import seed_words
from inference.static.tree import DraftTree, to_host
from inference.stopping import Stop, Stopper
from inference.tree import Proposal, TokenTree
from inference.verify import Verdict


def random_parents(rng: random.Random, nodes: int, depth: int, children: int) -> list[int]:
    """One tree; fewer nodes than asked for where there is no room."""
    parents, depths, count = [-1], [0], [0]
    while len(parents) < nodes:
        free = [node for node in range(len(parents)) if depths[node] < depth]
        free = [node for node in free if count[node] < children]
        if not free:
            break
        parent = rng.choice(free)
        count[parent] += 1
        parents.append(parent)
        depths.append(depths[parent] + 1)
        count.append(0)
    return parents


def spread(rng: random.Random, parents: list[int], width: int) -> tuple[list[int], list[int]]:
    """Places of the nodes among padding, the root's first, and their parents at those places."""
    places = [0, *sorted(rng.sample(range(1, width), len(parents) - 1))]
    return places, [-1 if parent < 0 else places[parent] for parent in parents]


class Batch:
    """A batch of drafted trees, and the target's logits at their nodes.

    Tokens are the target's likeliest or anything; drawn ones come from random laws of their own.
    """

    def __init__(
        self,
        seed: int,
        *,
        batch: int = 4,
        width: int = 9,
        depth: int = 3,
        children: int = 3,
        vocab: int = 6,
        kind: Proposal = Proposal.ONE_HOT,
        sampling: SamplingParams | None = None,
        dtype: torch.dtype = torch.float32,
        ties: bool = False,
    ) -> None:
        self.rng = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.depth, self.children, self.kind, self.vocab = depth, children, kind, vocab
        self.sampling = sampling or SamplingParams()
        self.logits = self._normal(batch, width, vocab).to(dtype) * 2
        if ties:
            self.logits = self.logits.round()
        self.seeds = [self.rng.randrange(-(2**70), 2**70) for _ in range(batch)]
        self.positions = [self.rng.randrange(1, 1000) for _ in range(batch)]
        self.tokens = torch.zeros(batch, width, dtype=torch.int64)
        self.parents = torch.full((batch, width), -1)
        self.valid = torch.zeros(batch, width, dtype=torch.bool)
        self.laws = torch.zeros(batch, width, vocab, dtype=dtype)
        self.drawn = torch.zeros(batch, width, dtype=torch.bool)
        for row in range(batch):
            self._draft(row, width)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def _draft(self, row: int, width: int) -> None:
        nodes = self.rng.randint(1, width)
        parents = random_parents(self.rng, nodes, self.depth, self.children)
        places, above = spread(self.rng, parents, width)
        self.valid[row, places] = True
        self.parents[row, places] = torch.tensor(above)
        self.tokens[row, 0] = self.rng.randrange(self.vocab)
        for place in places:
            below = [child for child, parent in zip(places, above, strict=True) if parent == place]
            tokens, num_drawn = self._children(row, place, len(below))
            for child, token in zip(below, tokens, strict=True):
                self.tokens[row, child] = token
            self.drawn[row, below[:num_drawn]] = True

    def _children(self, row: int, node: int, count: int) -> tuple[list[int], int]:
        """Their tokens, and how many of them were drawn."""
        best = int(self.logits[row, node].argmax())
        others = self.rng.sample(range(self.vocab), self.vocab)
        likely = [best, *(token for token in others if token != best)]
        if self.kind in (Proposal.ONE_HOT, Proposal.COUPLED):
            found = likely if self.rng.random() < 0.6 else others
            return found[:count], 0
        # Laws near the target's, so that something is accepted.
        noisy = self.logits[row, node].double() + self._normal(self.vocab)
        law = probabilities(noisy, SamplingParams(1.0)).to(self.laws.dtype)
        self.laws[row, node] = law
        draws = count if self.kind is Proposal.DENSE else min(count, 1)
        noise = gumbel(self.rng.randrange(2**40), node, self.vocab, stream=Stream.DRAFT)
        drawn = draw_top(law, noise, draws).tolist()
        return drawn + [token for token in likely if token not in drawn][: count - draws], draws

    @property
    def tree(self) -> DraftTree:
        """As tensors."""
        kinds = {Proposal.DENSE: (self.laws, None), Proposal.MIXED: (self.laws, self.drawn)}
        return DraftTree(self.tokens, self.parents, self.valid, *kinds.get(self.kind, (None, None)))

    @property
    def noise(self) -> Noise:
        """What keys it."""
        return Noise(seed_words(self.seeds), torch.tensor(self.positions))

    def host(self, row: int) -> tuple[TokenTree, list[int]]:
        """The tree of one sequence, and the place that each of its nodes has here."""
        places = self.valid[row].nonzero().squeeze(1).tolist()
        return to_host(self.tree, row, self.kind, self.vocab), places

    def check(
        self, found: Acceptance, rule: str, eos: list[int], remaining: list[int]
    ) -> list[Verdict]:
        """Compare with what the host does, sequence by sequence."""
        verdicts = []
        for row, room in enumerate(remaining):
            tree, places = self.host(row)
            verdict, text, start = self.host_round(row, tree, rule, eos, room)
            path = [0, *(places[node] for node in verdict.path)]
            padded = path + path[-1:] * (self.depth + 1 - len(path))
            assert found.path[row].tolist() == padded, row
            assert found.accepted[row] == len(verdict.path)
            last = -1 if verdict.next_token is None else verdict.next_token
            assert found.next_token[row] == last
            ended = {None: RUNNING, "eos": EOS, "length": LENGTH}[text.reason]
            assert found.ended[row] == ended
            emitted = text.tokens[start:]
            assert found.emitted[row] == len(emitted)
            rest = [-1] * (self.depth + 1 - len(emitted))
            assert found.packed[row].tolist() == [len(verdict.path), ended, *emitted, *rest]
            verdicts.append(verdict)
        return verdicts

    def host_round(
        self, row: int, tree: TokenTree, rule: str, eos: list[int], room: int
    ) -> tuple[Verdict, Text, int]:
        """What the decoder does: the verdict, the text behind it, and where the text was before."""
        start = self.positions[row] + 1
        sampling = SamplingParams(
            self.sampling.temperature,
            self.sampling.top_k,
            self.sampling.top_p,
            self.seeds[row],
            min_p=self.sampling.min_p,
        )
        target: Any = SimpleNamespace(eos_token_ids=(), tokenizer=None, device="cpu")
        text = Text(
            [0] * start,
            start,
            start + room,
            Sampler(sampling, start, (), "cpu"),
            Stopper(Stop(token_ids=tuple(eos)), start, room, target),
            Keep(),
        )
        return text.verify(tree, self.logits[row, self.valid[row]], rule), text, start

    def ends(self, eos: list[int], remaining: list[int]) -> Ends:
        """As tensors."""
        return Ends(torch.tensor(eos, dtype=torch.int64), torch.tensor(remaining))


# No reads by the host ---------------------------------------------------------------------------


WITHOUT_VALUES = ["fake", pytest.param("traced", marks=pytest.mark.slow)]
"""How `assert_static` looks: at tensors without values, or at what `torch.compile` makes of it."""


def assert_static(how: str, function: Callable[..., Any], *args: Any) -> None:
    """The function must do without values and give shapes that do not depend on them.

    Args:
        how: one of `WITHOUT_VALUES`.
        function: of tensors and of containers of them.
        args: for it.
    """
    expected = function(*args)
    if how == "traced":
        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, backend="eager", dynamic=False)
        assert_same(compiled(*args), expected)
        return
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:  # constants may be real
        fake = torch.utils._pytree.tree_map(
            lambda value: mode.from_tensor(value) if isinstance(value, Tensor) else value, args
        )
        assert_same_shapes(function(*fake), expected)


def assert_same(found: Any, expected: Any) -> None:
    """Equal tensors in the same places."""
    pairs = zip(
        torch.utils._pytree.tree_leaves(found),
        torch.utils._pytree.tree_leaves(expected),
        strict=True,
    )
    for one, other in pairs:
        if isinstance(one, Tensor):
            assert torch.equal(one, other)


def assert_same_shapes(found: Any, expected: Any) -> None:
    """Tensors of the same shapes and types."""
    pairs = zip(
        torch.utils._pytree.tree_leaves(found),
        torch.utils._pytree.tree_leaves(expected),
        strict=True,
    )
    for one, other in pairs:
        if isinstance(one, Tensor):
            assert one.shape == other.shape and one.dtype == other.dtype
