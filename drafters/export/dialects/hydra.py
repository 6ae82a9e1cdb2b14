"""Hydra heads (arXiv:2402.05109) as their authors have them; no serving engine loads Hydra.

``hydra_lm_head.pt``, a pickled state dict, is all their code reads. Its heads are grounded, that
is, they read the tokens drafted before them. ``mlp`` is plain Hydra, ``prefix-mlp`` is Hydra++: a
decoder layer of the target's own shape and a norm come first, and every block has a dropout before
it, which moves the numbers of the blocks. The output matrices have biases, always; a head without
one is written with zeros. All blocks of a head after the first are one module there, so that files
hold equal copies of it and blocks that differ cannot be written. Files may also hold the target's
embedding twice, as ``input_embed_fn`` and, unused, in the prefix layer.

Read in source: the authors' models and their loader. Their files were not: what published ones are
named follows from the modules that write them.

Legend: H hidden, V target vocabulary, K heads, L residual blocks per head.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from drafters.base import Drafter
from drafters.export.borrowed import copy_refusals, is_targets_output, output_rows
from drafters.export.dialect import (
    EMBEDDING,
    Dialect,
    KeySpec,
    Parts,
    TensorSpec,
    type_name,
    type_problems,
)
from drafters.export.fields import (
    DECODER_KEYS,
    LAYER_FIELDS,
    TARGET_SIZES,
    complete_layers,
    layer_keys,
    llama_layer,
    public_name,
    rope_keys,
    rope_problems,
    shape_refusals,
    target_refusals,
)
from drafters.hydra import HydraDrafter
from drafters.loading import layer_shape
from drafters.target import TargetModel

PLAIN, PREFIXED = "mlp", "prefix-mlp"
PREFIX = "prefix_embeding_layer"  # as the authors spell it
LAYER = f"{PREFIX}.layers.0"
NORM = f"{PREFIX}.norm.weight"
_EMBEDDINGS = {"input_embed_fn.weight": EMBEDDING, f"{PREFIX}.embed_tokens.weight": None}
_HEAD = re.compile(r"hydra_mlp\.0\.[01]\.linear\.weight")


class Hydra(Dialect):
    """Plain Hydra and Hydra++."""

    name = "hydra"
    families = ("hydra",)
    engines = ("hydra",)
    weights = "hydra_lm_head.pt"
    embeddings = "never"
    target_sizes = TARGET_SIZES
    unknown_to_transformers = True
    keys = (
        KeySpec("hydra_num_heads", int, positive=True),
        KeySpec("hydra_num_layers", int, positive=True),
        KeySpec("hydra_head_arch", str),
        KeySpec("grounded_heads", bool, True),
        KeySpec("hidden_state_offset", int),
        KeySpec("base_model_name_or_path", str),
        *DECODER_KEYS,
        KeySpec("torch_dtype", str),
    )

    def refusals(self, head: Drafter) -> list[str]:
        """What the authors' code does not build."""
        config = head.config
        found = target_refusals(head)
        found += copy_refusals(head) if config.shared_lm_head else []
        if head.draft_vocab is not None:
            found.append(
                f"draft_vocab_size={config.draft_vocab_size}: this form has no map of a draft "
                "vocabulary: train with the whole vocabulary"
            )
        state = head.state_dict()
        if any(
            not torch.equal(*pair) for pair in _tied(config.num_heads, config.mlp_layers, state)
        ):
            found.append(
                f"mlp_layers={config.mlp_layers}: the authors' code has one module for all blocks "
                "of a head after the first, and these differ: train with mlp_layers of 1 or 2"
            )
        if config.num_layers:
            found += shape_refusals(head, qk_norm=False, sliding_window=None)
            if not config.prefix_norm:
                found.append(
                    "prefix_norm=False: the authors' prefix layer ends in a norm: train with "
                    "prefix_norm=True"
                )
            shape = layer_shape(head.target)
            found += [
                f"{name}={getattr(config, name)}: the authors' prefix layer has the target's, "
                f"{shape[name]}"
                for name in (*LAYER_FIELDS[1:], "rope_theta")
                if getattr(config, name) != shape[name]
            ]
        return found

    def config(self, head: Drafter) -> dict[str, Any]:
        """The authors' keys, and the shape of the prefix layer, which they take from the target."""
        config = head.config
        return {
            "hydra_num_heads": config.num_heads,
            "hydra_num_layers": config.mlp_layers,
            "hydra_head_arch": PREFIXED if config.num_layers else PLAIN,
            "grounded_heads": True,
            "hidden_state_offset": 0,
            "base_model_name_or_path": public_name(head),
            "vocab_size": config.vocab_size,
            **layer_keys(head),
            **rope_keys(head),
            "torch_dtype": type_name(next(head.parameters()).dtype),
        }

    def tensors(self, head: Drafter) -> dict[str, Tensor]:
        """The authors' names; zeros for biases that the head does not have."""
        assert isinstance(head, HydraDrafter)
        state = head.state_dict()
        if head.config.shared_lm_head:
            rows = output_rows(head)
            state |= {f"lm_heads.{i}.weight": rows.clone() for i in range(head.config.num_heads)}
        found = {}
        for theirs, ours in _names(head.config.num_heads, head.config.mlp_layers, self._arch(head)):
            if ours in state:
                found[theirs] = state[ours]
            else:
                assert theirs.endswith("bias"), ours
                found[theirs] = torch.zeros_like(state[ours[:-4] + "weight"][:, 0])
        return found

    def notes(self, head: Drafter, config: Mapping[str, Any]) -> list[str]:
        """That nothing serves it."""
        notes = [
            "no serving engine loads Hydra: this folder is for the authors' own code; Headway "
            "decodes it with scripts.evaluate and scripts.chat"
        ]
        if head.confidence is not None:
            notes.append("the confidence output is left out: the authors draft a fixed tree")
        if head.config.shared_lm_head:
            notes.append(
                "each of the heads has a copy of the target's output matrix in the file: the form "
                "cannot say that they share it"
            )
        return notes

    def recognises(self, config: Mapping[str, Any], names: Collection[str]) -> bool:
        """The first block of the first head."""
        return any(_HEAD.fullmatch(name) for name in names)

    def complete(self, config: dict[str, Any], target: TargetModel) -> dict[str, Any]:
        """Shapes are the target's; counts are those of the authors' configuration class."""
        shape = {"hidden_size": target.hidden_size, **layer_shape(target)}
        defaults = {
            "hydra_num_heads": 4,
            "hydra_num_layers": 1,
            "hydra_head_arch": PLAIN,
            "grounded_heads": False,
            "hidden_state_offset": 0,
            "base_model_name_or_path": target.name,
            "vocab_size": target.vocab_size,
            **shape,
            "torch_dtype": config.get("dtype") or "float32",
        }
        return complete_layers(
            {**config, **{k: v for k, v in defaults.items() if config.get(k) is None}}
        )

    def renamed(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The target's embedding by its own name; the prefix layer's own, untrained embedding left
        out.
        """
        found = {}
        for name, tensor in tensors.items():
            bare = name.removeprefix("hydra_head.")
            renamed = _EMBEDDINGS.get(bare, bare)
            if renamed is not None:
                found[renamed] = tensor
        return found

    def config_problems(self, config: Mapping[str, Any]) -> list[str]:
        """Other kinds of heads that the authors' code knows, and RoPE."""
        problems = []
        if config["hydra_head_arch"] not in (PLAIN, PREFIXED):
            problems.append(
                f"hydra_head_arch={config['hydra_head_arch']!r} is not supported: only {PLAIN!r} "
                f"and {PREFIXED!r} are"
            )
        if config["hidden_state_offset"] != 0:
            problems.append(
                f"hidden_state_offset={config['hidden_state_offset']} is not supported: heads read "
                "the last hidden state"
            )
        problems += type_problems(config)
        return problems + rope_problems(config)

    def specs(self, config: Mapping[str, Any]) -> list[TensorSpec]:
        """Blocks, output matrices with biases, the prefix layer with its norm."""
        hidden, whole = config["hidden_size"], config["vocab_size"]
        counts = config["hydra_num_heads"], config["hydra_num_layers"], config["hydra_head_arch"]
        found = []
        if config["hydra_head_arch"] == PREFIXED:
            found += [*llama_layer(LAYER, config), TensorSpec(NORM, (hidden,))]
        for theirs, ours in _names(*counts):
            if ours.startswith("prefix"):
                continue
            kind, head, *place = ours.split(".")
            wide = hidden * (int(head) + 2) if place[0] == "0" and kind == "blocks" else hidden
            rows = whole if kind == "lm_heads" else hidden
            shape = (rows,) if ours.endswith("bias") else (rows, wide)
            found.append(TensorSpec(theirs, shape, zero=".linear." in theirs))
        return [*found, TensorSpec(EMBEDDING, (whole, hidden), optional=True)]

    def parts(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: TargetModel
    ) -> Parts:
        """A Hydra head; output matrices that are the target's are borrowed, zero biases none."""
        heads, layers = config["hydra_num_heads"], config["hydra_num_layers"]
        prefixed = config["hydra_head_arch"] == PREFIXED
        names = dict(_names(heads, layers, config["hydra_head_arch"]))
        state = {names[name]: tensor for name, tensor in tensors.items() if name in names}
        weights, biases = (
            [state[f"lm_heads.{i}.{kind}"] for i in range(heads)] for kind in ("weight", "bias")
        )
        biased = any(bias.any() for bias in biases)
        shared = not biased and is_targets_output(weights, target)
        for name in [name for name in state if name.startswith("lm_heads.")]:
            if shared or (name.endswith("bias") and not biased):
                del state[name]
        copied = (*LAYER_FIELDS, "vocab_size", "rope_theta", "max_position_embeddings")
        options = {name: config[name] for name in copied} | {
            "num_heads": heads,
            "mlp_layers": layers,
            "num_layers": int(prefixed),
            "prefix_norm": prefixed,
            "shared_lm_head": shared,
            "lm_head_bias": biased,
        }
        return Parts("hydra", options, state)

    def _arch(self, head: Drafter) -> str:
        return PREFIXED if head.config.num_layers else PLAIN


def _names(heads: int, layers: int, arch: str) -> Iterator[tuple[str, str]]:
    """The authors' name of each tensor, and ours."""
    prefixed = arch == PREFIXED
    for i in range(heads):
        for j in range(layers):
            theirs = f"hydra_mlp.{i}.{2 * j + 1 if prefixed else j}"
            for kind in ("weight", "bias"):
                yield f"{theirs}.linear.{kind}", f"blocks.{i}.{j}.linear.{kind}"
                if j == 0:
                    yield f"{theirs}.res_connection.{kind}", f"blocks.{i}.{j}.skip.{kind}"
        output = f"hydra_lm_head.{i}.1" if prefixed else f"hydra_lm_head.{i}"
        for kind in ("weight", "bias"):
            yield f"{output}.{kind}", f"lm_heads.{i}.{kind}"
    if prefixed:
        parts = ("q_proj", "k_proj", "v_proj", "o_proj")
        names = [f"self_attn.{part}.weight" for part in parts]
        names += [f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
        names += ["input_layernorm.weight", "post_attention_layernorm.weight"]
        for name in names:
            yield f"{LAYER}.{name}", f"prefix.{name}"
        yield NORM, "prefix_norm.weight"


def _tied(heads: int, layers: int, state: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Tensors that are one in the authors' code."""
    for i in range(heads):
        for j in range(2, layers):
            for kind in ("weight", "bias"):
                yield (
                    state[f"blocks.{i}.1.linear.{kind}"],
                    state[f"blocks.{i}.{j}.linear.{kind}"],
                )


HYDRA = Hydra()
