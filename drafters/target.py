"""TargetModel: any Hugging Face causal LM, unmodified, as the trainers and the decoder see it.

Knows a transformers model's internals: where its embedding and output matrix are, how hidden states
are captured, how the output matrix becomes logits. (Only the modules that came with a target need
to know more: ``mtp_native`` and ``native_layer``.)

Legend: B batch, T rows, D hidden, F captured layers, V target vocabulary.
"""

import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from drafters.fingerprint import fingerprint
from drafters.hub import target_place
from drafters.layers import rms_scale
from drafters.partial import only_layers
from drafters.placement import DeviceMap, gathered, layer_list, load_pretrained, whole


@dataclass
class TargetOutput:
    """One forward pass of the target.

    Attributes:
        logits: (B, kept, V), the target's own, in its dtype.
        features: (B, T, F·D) captured layers concatenated in order, or None if none were asked for.
        last_hidden: (B, T, D) after the final norm: what the output matrix sees.
    """

    logits: Tensor
    features: Tensor | None
    last_hidden: Tensor


class TargetModel:
    """A frozen causal LM and its tokenizer.

    Deliberately not an ``nn.Module``: a drafter that keeps a reference to it must neither save nor
        train nor move it.

    Args:
        model: a transformers causal LM; put into eval mode, gradients off.
        tokenizer: its tokenizer, where text is needed.
        name: where it came from, recorded with the heads trained on it.

    Raises:
        ValueError: the model has no embedding or output matrix, or its logits are not a known
            function of them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        name: str = "",
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self._tokenizer = tokenizer
        self.name = name
        self.config = model.config.get_text_config()
        self.embedding: nn.Module = model.get_input_embeddings()
        head = model.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            raise ValueError(f"target {self._label} has no linear output matrix to borrow")
        self.lm_head: nn.Linear = head
        self._remembered: str | None = None
        self._check_projection()

    @classmethod
    def load(
        cls,
        name: str,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        attn_implementation: str | None = None,
        device_map: DeviceMap | None = None,
        parallel: str = "none",
        reserve_gb: float = 0.0,
    ) -> "TargetModel":
        """Load a target and its tokenizer from a hub id or a local folder.

        Args:
            name: hub id, also at a revision (``user/name@revision``), or folder.
            dtype: dtype of the weights.
            device: where to put them, if nothing else says so.
            attn_implementation: "sdpa" or "eager"; kernels without arbitrary masks cannot verify
                trees. None: "sdpa" where the model has it (Gemma 2 and gpt-oss do not).
            device_map: spread it over the devices of this machine ("auto", "balanced",
                "balanced_low_0", "sequential", or a device for each module); one process.
            reserve_gb: memory of the first device that ``device_map`` leaves free.
            parallel: "tensor": all processes hold one copy together and run every forward together.
                "shard": it stays on the CPU until :func:`~drafters.placement.shard_target`.

        Raises:
            ValueError: the target cannot be found, loaded or placed so; the message says what to
                check.
        """
        model, tokenizer = load_pretrained(
            target_place(name),
            dtype,
            torch.device(device),
            attn_implementation,
            device_map,
            parallel,
            reserve_gb,
        )
        target = cls(model, tokenizer, name)
        if parallel == "tensor":
            target.remember_fingerprint()
        return target

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer.

        Raises:
            ValueError: the target was built without one.
        """
        if self._tokenizer is None:
            raise ValueError(
                "this target was built without a tokenizer: pass tokenizer= to TargetModel"
            )
        return self._tokenizer

    @property
    def hidden_size(self) -> int:
        """D."""
        return self.lm_head.in_features

    @property
    def vocab_size(self) -> int:
        """V: rows of the output matrix (may exceed the tokenizer's length)."""
        return self.lm_head.out_features

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return self.config.num_hidden_layers

    @property
    def layer_types(self) -> list[str]:
        """Attention kind of each layer, as transformers names them ("full_attention",
        "sliding_attention", ...).
        """
        types = getattr(self.config, "layer_types", None)
        if types:
            return list(types)
        window = (
            getattr(self.config, "sliding_window", None)
            if getattr(self.config, "use_sliding_window", True)
            else 0
        )
        return ["sliding_attention" if window else "full_attention"] * self.num_layers

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self.lm_head.weight.dtype

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer, from the generation config."""
        eos = self.model.generation_config.eos_token_id if self.model.generation_config else None
        if eos is None:
            eos = self.config.eos_token_id
        if eos is None:
            return ()
        return (eos,) if isinstance(eos, int) else tuple(eos)

    @property
    def max_length(self) -> int:
        """Longest sequence the positions of the target allow; without a stated limit, none."""
        return getattr(self.config, "max_position_embeddings", None) or sys.maxsize

    @property
    def rotary_switch(self) -> int | None:
        """Length behind which a forward has other frequencies everywhere ("longrope"), or None."""
        rope = getattr(self.config, "rope_parameters", None) or {}
        longrope = rope.get("rope_type") == "longrope"
        return rope["original_max_position_embeddings"] if longrope else None

    def length_limit(self, shortest_prompt: int) -> int:
        """Longest text in a batch with so short a prompt; none may cross `rotary_switch`."""
        switch = self.rotary_switch
        if switch is None or shortest_prompt > switch:
            return self.max_length
        return min(self.max_length, switch)

    def has_room(self, prompt_length: int, new_tokens: int) -> bool:
        """Whether a prompt of so many tokens can be continued by so many, decoded by itself."""
        return prompt_length + new_tokens <= self.length_limit(prompt_length)

    def embed(self, ids: Tensor) -> Tensor:
        """(...) token ids -> (..., D) input embeddings, including any scale the model applies."""
        embeds = self.embedding(ids)
        if scale := getattr(self.config, "embedding_multiplier", None):  # Granite, outside of it
            embeds = embeds * scale
        return embeds

    @property
    def logit_scale(self) -> float:
        """Factor between the output matrix and the logits: Granite divides, Cohere multiplies."""
        scaling = getattr(self.config, "logits_scaling", None) or 1.0
        return (getattr(self.config, "logit_scale", None) or 1.0) / scaling

    def project(self, hidden: Tensor) -> Tensor:
        """Post-norm hidden states to logits, exactly as the model does it.

        Args:
            hidden: (..., D).

        Returns:
            (..., V).
        """
        return self.scaled(self.lm_head(hidden))

    def project_rows(self, hidden: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
        """Logits of some tokens only.

        Args:
            hidden: (..., D).
            rows: (n, D) the output matrix at ``ids``, in the dtype of ``hidden``.
            ids: (n,) token ids.
        """
        bias = None if self.lm_head.bias is None else self.lm_head.bias[ids].to(hidden.dtype)
        return self.scaled(nn.functional.linear(hidden, rows, bias))

    def scaled(self, logits: Tensor) -> Tensor:
        """(..., n) products with rows of the output matrix -> the model's logits."""
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if cap := getattr(self.config, "final_logit_softcapping", None):  # Gemma 2
            logits = cap * torch.tanh(logits / cap)
        return logits

    def forward(
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor | dict[str, Tensor] | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        feature_layers: Sequence[int] = (),
        logits_to_keep: int | Tensor = 0,
        run_layers: Collection[int] | None = None,
        entering: Tensor | None = None,
        gradients: bool = False,
        handed: Mapping[str, Any] | None = None,
    ) -> TargetOutput:
        """Run the target, or some of its layers.

        Without the layers above E, the logits are those of an early exit there. What a first pass
        over layers 0..E-1 captured with ``feature_layers=(E,)`` lets a second one over E.. enter
        where it left: together they compute what one whole forward does, bit for bit.

        Args:
            input_ids: (B, T).
            attention_mask: None, (B, S) ones for real tokens, a ready (B, 1, T, S) mask, or a dict
                of those by layer type.
            position_ids: (B, T); with no mask and no cache, a restart at 0 begins a new packed
                document.
            cache: a transformers cache to read and extend.
            feature_layers: ``hidden_states`` indices to capture.
            logits_to_keep: logits of the last n rows, or of the given rows; 0 keeps all.
            run_layers: decoder layers to run, None for all. The others hand their input on and
                append nothing to the cache.
            entering: (B, T, D) residual stream to put in place of what enters the first of them.
            gradients: keep the graph, for a target that is trained too.
            handed: keyword arguments that the model hands to its attention layers.

        Raises:
            ValueError: ``run_layers`` names no layer or one that is not there, or the target's
                layers are not in one list.
        """
        layers = [*feature_layers, self.num_layers]
        run = range(self.num_layers) if run_layers is None else run_layers
        keep_graph = gradients and torch.is_grad_enabled()
        with self.only(run_layers, entering), torch.set_grad_enabled(keep_graph):
            out = self.model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                cache=cache,
                use_cache=cache is not None,
                output_hidden_states=layers,
                logits_to_keep=logits_to_keep,
                **(handed or {}),
            )
        states = list(out.hidden_states)
        if entering is not None:
            states[min(run)] = entering
        features = (
            torch.cat([states[k] for k in feature_layers], dim=-1) if feature_layers else None
        )
        return TargetOutput(out.logits, features, states[self.num_layers])

    def only(
        self, run_layers: Collection[int] | None, entering: Tensor | None
    ) -> AbstractContextManager[None]:
        """Inside, forwards run some of the layers; arguments as in `forward`, which does it too."""
        if run_layers is None and entering is None:
            return nullcontext()
        run = range(self.num_layers) if run_layers is None else run_layers
        return only_layers(list(self.decoder_layers()), run, entering, self._layer_outputs)

    def decoder_layers(self) -> nn.ModuleList:
        """The decoder layers, in order.

        Raises:
            ValueError: they are not in one list.
        """
        return layer_list(self.model)

    @cached_property
    def _layer_outputs(self) -> int:
        """How many things a decoder layer returns as a tuple; 0: its hidden states, bare."""
        found: list[int] = []
        hook = self.decoder_layers()[0].register_forward_hook(
            lambda layer, args, out: found.append(len(out) if isinstance(out, tuple) else 0)
        )
        try:
            self.model(torch.zeros(1, 1, dtype=torch.long, device=self.device), use_cache=False)
        finally:
            hook.remove()
        return found[0]

    @property
    def _label(self) -> str:
        return self.name or type(self.model).__name__

    def fingerprint(self) -> dict[str, str]:
        """Hashes that identify this target whatever dtype it was loaded in."""
        return fingerprint(self.model, self._tokenizer, self._remembered)

    def remember_fingerprint(self) -> None:
        """Hash the weights now, for good: later they are in slices, which no process can hash
        alone.
        """
        self._remembered = self.fingerprint().get("weights")

    def shape_fields(self) -> dict[str, Any]:
        """The fields of a :class:`~drafters.config.DrafterConfig` that describe this target."""
        return {
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "target_num_layers": self.num_layers,
            "target_name": Path(self.name).name if Path(self.name).exists() else self.name,
            "target_fingerprint": self.fingerprint(),
        }

    def block(self, index: int = -1) -> dict[str, Tensor]:
        """Weights of a decoder layer and the final norm, where the target is laid out as Llama is.

        Args:
            index: of the layer; negative ones count from the end.

        Returns:
            Tensors by their names in a Llama layer ("self_attn.q_proj.weight",
            "mlp.up_proj.weight", ...) plus "norm.weight", and "self_attn.q_norm.weight" and
            "self_attn.k_norm.weight" where it has them; norms as the scale they apply (Gemma
            stores one less). Empty for other layouts.
        """
        modules = dict(self.model.get_decoder().named_modules())
        layer = f"layers.{range(self.num_layers)[index]}"
        prefix = layer + "."
        linear = [f"self_attn.{name}_proj" for name in "qkvo"]
        linear += [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
        norms = {"norm": "norm"}
        norms |= {name: prefix + name for name in ("input_layernorm", "post_attention_layernorm")}
        if not {prefix + name for name in linear} | set(norms.values()) <= set(modules):
            return {}
        children = {name for name, _ in modules[layer].named_children()}
        if children != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}:
            return {}  # further norms, as in Gemma 2, put the same names in other places
        for name in ("q_norm", "k_norm"):
            if prefix + "self_attn." + name in modules:
                norms["self_attn." + name] = prefix + "self_attn." + name
        with gathered(modules[layer]):
            found = {f"{name}.weight": whole(modules[prefix + name].weight) for name in linear}
            scales = {f"{name}.weight": rms_scale(modules[place]) for name, place in norms.items()}
        known = {name: scale for name, scale in scales.items() if scale is not None}
        return {**found, **known} if len(known) == len(scales) else {}

    def _check_projection(self) -> None:
        """Captured hidden state through :meth:`project` must give the model's own logits."""
        ids = torch.arange(1, 5, device=self.device)[None] % self.vocab_size
        out = self.forward(ids)
        error = (self.project(out.last_hidden) - out.logits).abs().max().item()
        scale = out.logits.abs().max().item()
        if not error <= 1e-3 * max(scale, 1.0):
            raise ValueError(
                f"target {self._label}: logits are not a known "
                f"function of the last hidden state (difference {error:.3g}); this architecture "
                "needs its own rule in TargetModel.project"
            )
