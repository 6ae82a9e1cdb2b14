"""DSpark (arXiv:2607.05147): DFlash's network and a small sequential head on top.

Prediction is shifted: the block holds [x_a, MASK, ..., MASK] and row k (from 0) drafts x_{a+1+k},
so g rows give g drafts (heads trained elsewhere may draft in place, as DFlash does: g-1 drafts).
The Markov head then adds to the logits U_k of row k a bias that depends on the token before, x =
x_{a+k}, through a matrix of low rank r:

    vanilla   U_k + W2 e                              e = W1[x]
    gated     U_k + W2 (sigmoid(Wg [h_k; e]) * e)
    rnn       U_k + W2 tanh(Wo z)                     z = [s; e; h_k]
              s' = u * s + (1 - u) * tanh(Wc z)       u = sigmoid(Wg z), s = 0 at the root

W1 has a row for every token of the target, W2 one for every token of the draft vocabulary. W2
starts at zero, so that the untrained head is a shifted DFlash. What logits and confidence are made
from is one row per draft: [h_k; e], and for the rnn [h_k; e; tanh(Wo z)]; the confidence head reads
[h_k; e] of each.

Legend: D hidden, r rank, V / Vd target / draft vocabulary, n rows.
"""

import torch
from torch import Tensor, nn
from transformers import initialization as init

from drafters.block import DFlashDrafter
from drafters.confidence import ConfidenceHead
from drafters.families import DSparkConfig
from drafters.medusa import ZeroLinear


class MarkovHead(nn.Module):
    """The sequential part; see the top of the file."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        size, rank = config.hidden_size, config.markov_rank
        self.size, self.rank = size, rank
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = ZeroLinear(rank, config.draft_vocab_size or 0, bias=False)
        kind, bias = config.markov_type, config.markov_bias
        self.gate_proj = nn.Linear(size + rank, rank, bias=bias) if kind == "gated" else None
        self.joint_proj = nn.Linear(2 * rank + size, 3 * rank, bias=bias) if kind == "rnn" else None

    def advance(self, hidden: Tensor, previous: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """(n, D) rows, (n,) tokens before them and the paths' states -> (rows, next states)."""
        embedded = self.markov_w1(previous).to(hidden.dtype)
        if self.joint_proj is None:
            return torch.cat((hidden, embedded), dim=-1), state
        joint = self.joint_proj(torch.cat((state, embedded, hidden), dim=-1))
        gate, candidate, output = joint.chunk(3, dim=-1)
        keep = gate.sigmoid()
        following = keep * state + (1 - keep) * candidate.tanh()
        return torch.cat((hidden, embedded, output.tanh()), dim=-1), following

    def bias(self, rows: Tensor) -> Tensor:
        """Rows (..., output_size) -> (..., Vd)."""
        last = rows[..., -self.rank :]
        if self.gate_proj is not None:
            last = self.gate_proj(rows).sigmoid() * last
        return self.markov_w2(last)


class PairConfidence(ConfidenceHead):
    """A confidence head on the first ``size`` numbers of a row, [h_k; e]."""

    def forward(self, hidden: Tensor) -> Tensor:
        """(..., output_size) -> (...) logits of being accepted."""
        return super().forward(hidden[..., : self.proj.in_features])


class DSparkDrafter(DFlashDrafter):
    """DSpark: every row of a block drafts, and drafts know the token before them."""

    config_class = DSparkConfig
    family = "dspark"

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        self.markov_head = None if config.markov_type == "none" else MarkovHead(config)
        if config.confidence_head and self.markov_head is not None:
            embedding = config.markov_rank if config.confidence_with_markov else 0
            self.confidence = PairConfidence(config.hidden_size + embedding)
        self.post_init()

    @property
    def output_size(self) -> int:
        """Width of [h_k; e] or, for the rnn, [h_k; e; tanh(Wo z)]."""
        config = self.config
        parts = {"none": 0, "vanilla": 1, "gated": 1, "rnn": 2}[config.markov_type]
        return config.hidden_size + parts * config.markov_rank

    @property
    def first_slot(self) -> int:
        """The root's own row drafts, unless the head was trained to draft in place."""
        return 0 if self.config.sample_from_anchor else 1

    def begin_path(self, rows: Tensor) -> Tensor:
        """States (n, r) of zeros for the rnn, of no size for the others."""
        recurrent = self.config.markov_type == "rnn"
        return rows.new_zeros(len(rows), self.config.markov_rank if recurrent else 0)

    def advance(self, hidden: Tensor, previous: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Rows (n, output_size) and next states, through the Markov head."""
        if self.markov_head is None:
            return hidden, state
        return self.markov_head.advance(hidden, previous, state)

    def logits(self, hidden: Tensor, depth: int = 0) -> Tensor:
        """Rows (..., output_size) -> draft logits (..., Vd): the target's matrix and the bias."""
        base = self.borrowed_logits(hidden[..., : self.config.hidden_size])
        return base if self.markov_head is None else base + self.markov_head.bias(hidden)

    def output_modules(self) -> list[nn.Module | None]:
        """The matrices that the bias is made with."""
        head = self.markov_head
        return [] if head is None else [head.markov_w2, head.gate_proj]

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, ZeroLinear):
            init.zeros_(module.weight)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=module.embedding_dim**-0.5)
        else:
            super()._init_weights(module)
