"""A target and a head whose laws are tables, and what decoding with them must give, exactly.

The target is a real Llama whose layer adds nothing: the law of the next token depends on the last
one alone, p(y|x). So does the head's, q(y|x). A round that starts behind token x accepts its drafts
with probabilities that are products of small matrices, and the rounds of a text of fixed length are
a finite Markov chain: everything that is counted has an expectation that can be summed up.

Letters: V vocabulary, g drafts of a chain, d depth from 1, r tokens that a text still gets.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from drafters import TargetModel
from inference.proposers import TreeOptions
from inference.proposers.base import Proposer, RowState, Session
from inference.proposers.growth import new_tree
from inference.tree import TokenTree

VOCAB = 8


def random_table(seed: int, sharpness: float = 1.5, vocab: int = VOCAB) -> Tensor:
    """(V, V) float64, each row a law."""
    generator = torch.Generator().manual_seed(seed)
    return (sharpness * torch.randn(vocab, vocab, generator=generator).double()).softmax(-1)


def near(table: Tensor, seed: int, noise: float = 0.7) -> Tensor:
    """(V, V) laws of a head that has learnt a table, somewhat."""
    generator = torch.Generator().manual_seed(seed)
    return (table.log() + noise * torch.randn(table.shape, generator=generator).double()).softmax(
        -1
    )


def bigram_target(table: Tensor, longest: int = 512) -> TargetModel:
    """A causal LM in float64 whose next token has the law of the last one's row."""
    vocab = len(table)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=vocab,
        intermediate_size=vocab,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=longest,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).double()
    layer = model.model.layers[0]
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(vocab))
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        scale = 1 / math.sqrt(1 / vocab + config.rms_norm_eps)
        model.lm_head.weight.copy_(table.log().T / scale)
    return TargetModel(model, name="bigram")


class BigramProposer(Proposer):
    """Grows trees from q(y|x), with the code that grows the trees of heads."""

    def __init__(self, table: Tensor, options: TreeOptions) -> None:
        self.logits, self.options = table.log(), options

    @property
    def chains(self) -> bool:
        return self.options.chains

    def start(self, session: Session) -> None:
        self.rule = session.rule

    def propose(self, states: Sequence[RowState | None]) -> list[TokenTree | None]:
        return [None if state is None else self.grow(state) for state in states]

    def grow(self, state: RowState) -> TokenTree:
        vocab = len(self.logits)
        tree = new_tree(self.options, state, self.rule, torch.device("cpu"), vocab, None)
        frontier = torch.zeros(1, dtype=torch.int64)
        for _ in range(tree.depth):
            tree.add_children(frontier, self.logits[tree.candidates.tokens[frontier]])
            frontier = tree.frontier()
        return tree.finish()[0]


# What a draft is worth ----------------------------------------------------------------------------


def chosen(p: Tensor, q: Tensor, width: int = 1) -> Tensor:
    """(V, V) chance that y follows x and is among the likeliest drafts: rule `match`."""
    best = torch.zeros_like(q).scatter_(1, q.topk(width).indices, 1.0)
    return p * best


def drawn(p: Tensor, q: Tensor) -> Tensor:
    """(V, V) chance that y is drawn from q(y|x) and accepted: rule `rejection`."""
    return torch.minimum(p, q)


def coupled(p: Tensor, q: Tensor) -> Tensor:
    """(V, V) chance that log p and log q have their maximum at y under the same Gumbel noise."""
    ratios = torch.maximum(p[:, None] / p[:, :, None], q[:, None] / q[:, :, None])
    return 1 / ratios.sum(-1)


def greedy(p: Tensor) -> Tensor:
    """(V, V) the law at temperature 0."""
    return torch.zeros_like(p).scatter_(1, p.argmax(-1, keepdim=True), 1.0)


# What decoding must give --------------------------------------------------------------------------


@dataclass
class Expected:
    """Expectations over texts of a fixed number of new tokens.

    Attributes:
        rounds: per text.
        emitted: tokens of the rounds, the prefill's left out: not random.
        accepted: by depth, rounds that accepted so far.
        reached: by depth, rounds with a draft there that accepted all before it.
        proposed: by depth, rounds with a draft there.
        draft_tokens: per text.
        starts: by tokens left, rounds that start there.
        gains: by tokens left, tokens that rounds which start there give.
        per_request: E[emitted / rounds].
    """

    rounds: float
    emitted: int
    accepted: list[float]
    reached: list[float]
    proposed: list[float]
    draft_tokens: float
    starts: list[float]
    gains: list[float]
    per_request: float


def expected(
    p: Tensor, accept: Sequence[Tensor], widths: Sequence[int], last: int, new: int
) -> Expected:
    """Sum up the Markov chain of rounds.

    Args:
        p: (V, V) law that texts follow.
        accept: by depth (V, V), the chance that y behind x is drafted and accepted.
        widths: by depth, draft tokens.
        last: token that the prompt ends with.
        new: tokens per text, the prefill's included.
    """
    deepest, vocab = len(accept), len(p)
    counts = torch.zeros(new, new, vocab, dtype=p.dtype)  # tokens left, rounds so far, last token
    counts[new - 1, 0] = p[last]
    found = Expected(
        rounds=0.0,
        emitted=new - 1,
        accepted=[0.0] * deepest,
        reached=[0.0] * deepest,
        proposed=[0.0] * deepest,
        draft_tokens=0.0,
        starts=[0.0] * new,
        gains=[0.0] * new,
        per_request=0.0,
    )
    for left in range(new - 1, 0, -1):
        here, depth = counts[left], min(deepest, left - 1)
        weight = here.sum(0)
        starts = float(weight.sum())
        found.rounds += starts
        found.starts[left] = found.gains[left] = starts
        alive = here
        for d in range(depth):
            found.proposed[d] += starts
            found.draft_tokens += starts * widths[d]
            found.reached[d] += float(alive.sum())
            ends = alive @ (p - accept[d])
            counts[left - d - 1, 1:] += ends[:-1]
            alive = alive @ accept[d]
            found.accepted[d] += float(alive.sum())
            found.gains[left] += float(alive.sum())
        counts[left - depth - 1, 1:] += (alive @ p)[:-1]
    law = counts[0].sum(-1)
    found.per_request = sum(float(law[m]) * (new - 1) / m for m in range(1, new))
    return found
