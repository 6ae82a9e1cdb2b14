"""Multi-token prediction modules (arXiv:2412.19437), from scratch or out of a target's checkpoint.

Row t of module k holds the pair (feature of module k-1 at t, embedding of token t+1+k) and predicts
token t+2+k. The feature of module 0 is the target's last hidden state *after* its final norm: that
is what transformers, vLLM and SGLang hand over, whatever the formula of the paper reads like. The
projection's input has the embedding first, as all released weights but a few have it
(``hidden_first`` for those), which is again not the order of the paper's formula.

With one module the step is applied to its own output (FastMTP, arXiv:2509.18362), all steps over
one set of keys and values; with K > 1 there is one module per depth with keys of its own. The
feature handed on is the output after the module's own norm (transformers, Qwen, FastMTP), or with
``norm_output`` off the stream before it (vLLM's DeepSeek). Logits are those of the target's own
output matrix.

Tensor names: ``mtp.{k}.`` followed by ``enorm``, ``hnorm`` (norms of embedding and feature),
``eh_proj``, ``layers.{i}.*`` and ``norm``; the layers have the names of a Llama layer, or for
modules that came with a target (``drafters.mtp_native``) those of that target's layers.

Legend: B batch, T rows, D hidden, K modules, L layers per module.
"""

from typing import Self

import torch
from torch import Tensor, nn

from drafters.base import SequentialDrafter
from drafters.families import MtpConfig
from drafters.layers import Attend, DecoderLayer, RMSNorm
from drafters.native_layer import NativeLayer, NativeParts
from drafters.target import TargetModel


class MtpModule(nn.Module):
    """One module: two norms, the projection 2D -> D, decoder layers, the output norm.

    Args:
        config: of the head.
        first_layer: index that its first layer hands to ``attend``.
        native: makers of the target's own layers and norms; None makes Llama's.
    """

    def __init__(self, config: MtpConfig, first_layer: int, native: NativeParts | None) -> None:
        super().__init__()
        size = config.hidden_size
        self.hidden_first = config.hidden_first
        self.enorm, self.hnorm, self.norm = (
            RMSNorm(size, config.rms_norm_eps) if native is None else native.norm()
            for _ in range(3)
        )
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        indices = range(first_layer, first_layer + config.num_layers)
        self.layers = nn.ModuleList(
            DecoderLayer(config, index) if native is None else native.layer(index)
            for index in indices
        )

    def forward(
        self, embeds: Tensor, feature: Tensor, position_ids: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """(B, T, D) embeddings and (B, T, D) features -> (B, T, D) normed output and (B, T, D)
        stream before the norm.
        """
        pair = [self.enorm(embeds), self.hnorm(feature)]
        if self.hidden_first:
            pair.reverse()
        stream = self.eh_proj(torch.cat(pair, dim=-1))
        for layer in self.layers:
            stream = layer(stream, position_ids, attend)
        return self.norm(stream), stream


class MtpDrafter(SequentialDrafter):
    """MTP: ``forward`` is one module's step."""

    config_class = MtpConfig
    family = "mtp"

    def __init__(self, config: MtpConfig) -> None:
        super().__init__(config)
        native = None if config.native_config is None else NativeParts(config.native_config)
        self.mtp = nn.ModuleList(
            MtpModule(config, index * config.num_layers, native)
            for index in range(config.num_modules)
        )
        self.post_init()

    @property
    def num_layers(self) -> int:
        """K·L: every layer of every module has keys of its own."""
        return self.config.num_modules * self.config.num_layers

    @property
    def num_drafts(self) -> int | None:
        """K separate modules draft K tokens; a module applied recursively has no limit."""
        return self.config.num_modules if self.config.num_modules > 1 else None

    def module(self, depth: int) -> MtpModule:
        """The module that runs step ``depth``."""
        found = self.mtp[depth if self.config.num_modules > 1 else 0]
        assert isinstance(found, MtpModule)
        return found

    def attach(self, target: TargetModel, allow_other_target: bool = False) -> Self:
        """As for every head; layers that came with the target borrow its rotary embedding too."""
        super().attach(target, allow_other_target)
        for module in self.modules():
            if isinstance(module, NativeLayer):
                module.bind(target)
        return self

    def begin(
        self, features: Tensor | None, hidden: Tensor, position_ids: Tensor, attend: Attend
    ) -> Tensor:
        """The target's last hidden states (B, T, D), after its final norm."""
        return hidden.to(self.module(0).eh_proj.weight.dtype)

    def forward(
        self,
        feature: Tensor,
        token_ids: Tensor,
        position_ids: Tensor,
        attend: Attend,
        depth: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """One draft step, by module ``depth`` where there are several; ``hidden`` is normed."""
        embeds = self.target.embed(token_ids).to(feature.dtype)
        hidden, stream = self.module(depth)(embeds, feature, position_ids, attend)
        return hidden, hidden if self.config.norm_output else stream

    def logits(self, hidden: Tensor, depth: int = 0) -> Tensor:
        """Normed hidden states (..., D) -> logits (..., Vd) through the target's output matrix."""
        return self.borrowed_logits(hidden)

    @torch.no_grad()
    def initialise_from_target(self) -> None:
        """Start as modules that repeat the hidden state they are given, stirred by the new token,
        as EAGLE-1 does; trained modules of the target stay as they are.

        The projection hands the feature half on and adds a random image of the embedding, half as
        large; the layers add nothing yet; the norm is flat, of the size of the target's final one,
        because the hidden state has been through that already. So an untrained module says what the
        target says about the token before. The target's last layers in place of silent ones, which
        expect a stream before the final norm, train slower: on SmolLM2-135M, one run each, .15 of
        first drafts agreed after 70 steps of 1,024 tokens, against .27 from this start at twice the
        learning rate.
        """
        if self.config.native_config is not None:
            return
        size, final = self.config.hidden_size, self.target.block().get("norm.weight")
        flat = 1.0 if final is None else final.float().pow(2).mean().sqrt().item()
        for depth in range(self.config.num_modules):
            module = self.module(depth)
            weight = module.eh_proj.weight
            hidden, embedding = weight[:, size:], weight[:, :size]
            if self.config.hidden_first:
                hidden, embedding = embedding, hidden
            hidden.copy_(torch.eye(size))
            embedding.mul_(0.5**0.5)  # of 2·D inputs, D are embeddings: their image has size 1/√2
            for layer in module.layers:
                assert isinstance(layer, DecoderLayer)
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
            module.norm.get_parameter("weight").fill_(flat)
