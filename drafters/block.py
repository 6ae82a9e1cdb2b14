"""DFlash (arXiv:2602.06036): all drafts of a round from one pass over a block of mask tokens.

The block holds [x_a, MASK, ..., MASK] at positions a..a+B-1, and row j of it drafts x_{a+j}, in
place; row 0, whose token is known, drafts nothing. What the target says about the text before a
comes in as keys and values: its captured layers are fused to one vector per position, and every
layer of the head projects those with its own k_proj and v_proj and puts them before the keys and
values of the block ("KV injection"). Queries come from the block alone, so a round costs one pass
over B rows, and only the context's keys and values are kept. Inside a block attention is
bidirectional; JetSpec's (arXiv:2606.18394) is causal. Embedding and output matrix are the target's.
Tensor names are those of the released heads that the serving engines load.

All rows of a block are the same function of its root and the context, whatever is drafted before
them: a pass always takes the whole block, as fewer mask rows would change what the others see.

Legend: B batch, S context rows, Q block rows, A blocks, g rows per block, D hidden, F captured
layers, K drafts, Vd draft vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from drafters.base import Drafter
from drafters.families import DFlashConfig
from drafters.layers import Attend, DecoderLayer, RMSNorm, copy_layer
from drafters.target import TargetModel

Store = Callable[[int, Tensor, Tensor], None]
"""(layer, rotated keys (B, Hkv, S, d), values (B, Hkv, S, d)): what the context adds to a layer."""


class DFlashDrafter(Drafter):
    """A block head: ``forward`` maps a block to one row per slot."""

    config_class = DFlashConfig
    family = "dflash"
    shape = "block"

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(size, eps)
        self.fc = nn.Linear(len(config.feature_layers or ()) * size, size, bias=False)
        self.hidden_norm = RMSNorm(size, eps)
        self.post_init()

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The fused target layers."""
        return tuple(self.config.feature_layers)

    @property
    def num_drafts(self) -> int:
        """K."""
        return self.config.num_drafts

    @property
    def first_slot(self) -> int:
        """The row of a block that drafts x_{a+1}."""
        return 1

    @property
    def windows(self) -> list[int | None]:
        """Sliding window of each layer; None sees everything."""
        layers = range(self.config.num_layers)
        chosen = self.config.window_layers
        return [
            self.config.sliding_window if chosen is None or layer in chosen else None
            for layer in layers
        ]

    @property
    def causal(self) -> list[bool]:
        """Of each layer, whether rows of a block see only earlier ones of it."""
        chosen = self.config.causal_layers or []
        return [self.config.causal or layer in chosen for layer in range(self.config.num_layers)]

    def context(self, features: Tensor) -> Tensor:
        """Captured layers (B, S, F·D) -> context (B, S, D)."""
        return self.hidden_norm(self.fc(features.to(self.fc.weight.dtype)))

    def inject(self, context: Tensor, position_ids: Tensor, store: Store) -> None:
        """Hand the context's keys and values to every layer.

        Args:
            context: (B, S, D), from :meth:`context`.
            position_ids: (B, S) of the text's own rows.
            store: the caller's memory.
        """
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            store(index, *layer.self_attn.keys_values(context, position_ids))

    def blocks(self, roots: Tensor) -> Tensor:
        """Token ids (...) of x_a -> (..., g) input tokens of their blocks."""
        config = self.config
        empty = roots.new_full((*roots.shape, config.block_size - 1), config.mask_token_id)
        return torch.cat((roots[..., None], empty), dim=-1)

    def forward(self, token_ids: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        """One pass.

        Args:
            token_ids: (B, Q), of :meth:`blocks`.
            position_ids: (B, Q), those of x_a and the places behind it.
            attend: over the context that was injected and each row's own block.

        Returns:
            (B, Q, D), normed.
        """
        hidden = self.target.embed(token_ids).to(self.norm.weight.dtype)
        for layer in self.layers:
            hidden = layer(hidden, position_ids, attend)
        return self.norm(hidden)

    def drafting(self, rows: Tensor) -> Tensor:
        """Block rows (..., g, D) -> the K that draft, (..., K, D)."""
        return rows[..., self.first_slot : self.first_slot + self.num_drafts, :]

    def begin_path(self, rows: Tensor) -> Tensor:
        """The state of paths that end in their root.

        Args:
            rows: (n, D), for dtype and device.

        Returns:
            (n, state size); a head without a sequential part has none.
        """
        return rows.new_zeros(len(rows), 0)

    def advance(self, hidden: Tensor, previous: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """One draft further along some paths.

        Args:
            hidden: (n, D) the pass's rows of the depth to draft.
            previous: (n,) absolute ids of the token before that draft, x_a at depth 0.
            state: (n, state size) of each path so far.

        Returns:
            ``(rows (n, output_size), next state)``; the rows are for :meth:`logits` and the
            confidence head.
        """
        return hidden, state

    def logits(self, hidden: Tensor, depth: int = 0) -> Tensor:
        """Rows (..., output_size) -> draft logits (..., Vd), through the target's output matrix."""
        return self.borrowed_logits(hidden)

    @torch.no_grad()
    def initialise_from_target(self) -> None:
        """Start from the target instead of from noise.

        Where the target's last layers have the shape of the draft layers, those start as them (the
        norms of queries and keys stay at one where the target has none), and the context as its
        last captured layer under the norm that the first copied layer puts before its attention.
        The final norm starts as the target's, five times smaller: a block of mask tokens has
        nothing to say yet, and its law should be nearly uniform rather than confidently wrong (the
        first loss on SmolLM2-135M is 9.5 instead of 17.6).
        """
        count, size = self.config.num_layers, self.config.hidden_size
        if count > self.target.num_layers:
            return
        copied = [
            copy_layer(layer, self.target.block(index - count))
            for index, layer in enumerate(self.layers)
        ]
        if not all(copied):
            return
        block = self.target.block(-count)
        self.norm.weight.copy_(0.2 * block["norm.weight"])
        self.hidden_norm.weight.copy_(block["input_layernorm.weight"])
        self.fc.weight.mul_(0.1)
        self.fc.weight[:, -size:] += torch.eye(
            size, dtype=self.fc.weight.dtype, device=self.fc.weight.device
        )


def choose_mask_token(target: TargetModel) -> int:
    """A token that text does not contain, for the empty slots of a block.

    In this order: the tokenizer's own mask token; the first row of the embedding behind the
    tokenizer's last token, as released heads for Qwen3 have it; the last special token with no part
    in ending, padding or formatting a conversation; the last token that its own text is not encoded
    as.

    Raises:
        ValueError: there is none.
    """
    tokenizer: Any = target.tokenizer
    if tokenizer.mask_token_id is not None:
        return int(tokenizer.mask_token_id)
    names = {number: name for name, number in tokenizer.get_vocab().items()}
    if max(names) + 1 < target.vocab_size:
        return max(names) + 1
    used = {tokenizer.unk_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id}
    used |= {tokenizer.pad_token_id, *target.eos_token_ids}
    template = str(tokenizer.chat_template)
    free = [number for number in sorted(names, reverse=True) if number not in used]
    special = {n for n, token in tokenizer.added_tokens_decoder.items() if token.special}
    for number in free:
        if number in special and names[number] not in template:
            return number
    for number in free:
        text = tokenizer.decode([number])
        whole = "\ufffd" not in text  # parts of a character do occur in text
        if whole and number not in special and number not in _encoded(tokenizer, text):
            return number
    raise ValueError(
        f"drafter.mask_token_id: every token of target {target.name!r} may occur in text; name one "
        "that does not in yours"
    )


def _encoded(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)
