"""DFlash's and DSpark's forward as engines compute it, from their fused parameters and the config.

Written after what SGLang's and vLLM's models do (projections fused, the residual carried beside,
the context's keys and values made from slices of the fused matrix), not after Headway's.

Legend: S context rows, g rows of a block, H hidden, F captured layers, K drafts, Vd draft
vocabulary.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from drafters import Drafter
from drafters.block import DFlashDrafter
from drafters.export.dialect import Dialect
from drafters.export.folder import MANIFEST
from drafters.export.golden import GOLDEN
from drafters.layers import repeat_heads, rotate
from inference.proposers.context_cache import ContextCache
from tests.drafters.export.written import engine_parameters

CONTEXT = 9  # S: more than the windows of the tests


class Folder:
    """An export that can be changed in place."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors = load_file(folder / "model.safetensors")
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())

    def save(self) -> None:
        """Write what was changed; the folder is no longer known as ours."""
        save_file(self.tensors, self.folder / "model.safetensors")
        (self.folder / "config.json").write_text(json.dumps(self.config))
        for name in (MANIFEST, GOLDEN):
            (self.folder / name).unlink(missing_ok=True)


def example(head: DFlashDrafter) -> tuple[Tensor, Tensor]:
    """Features (S, F·H) and the tokens of a path, root first, (K,)."""
    generator = torch.Generator().manual_seed(5)
    width = len(head.feature_layers) * head.config.hidden_size
    features = torch.randn(CONTEXT, width, generator=generator)
    return features, torch.randint(96, (head.num_drafts,), generator=generator)


@torch.no_grad()
def own_logits(head: Drafter, features: Tensor, tokens: Tensor) -> Tensor:
    """(K, Vd) along a path, by Headway's decoder."""
    assert isinstance(head, DFlashDrafter)
    cache = ContextCache(head.windows)
    head.inject(head.context(features[None]), torch.arange(len(features))[None], cache.append)
    block = head.blocks(tokens[:1])
    places = len(features) + torch.arange(block.shape[1])[None]
    rows = head.drafting(head(block, places, cache.rows(0, head.causal))[0])
    state, found = head.begin_path(rows[:1]), []
    for depth, token in enumerate(tokens):
        made, state = head.advance(rows[depth : depth + 1], token[None], state)
        found.append(head.logits(made[0], depth))
    return torch.stack(found)


@torch.no_grad()
def engine_rows(
    dialect: Dialect, folder: Path, embedding: Tensor, features: Tensor, root: Tensor
) -> Tensor:
    """(g, H) normed rows of a block."""
    files = Folder(folder)
    config, nested = files.config, files.config["dflash_config"]
    weights = engine_parameters(dialect, config, files.tensors)
    size, eps = config["head_dim"], config["rms_norm_eps"]
    heads, keys = config["num_attention_heads"], config["num_key_value_heads"]
    widths, theta = (
        [heads * size, keys * size, keys * size],
        config["rope_parameters"]["rope_theta"],
    )

    def norm(x: Tensor, name: str) -> Tensor:
        weight = weights[f"{name}.weight"]
        return rms_norm(x, weight.shape, weight, eps)

    def split(x: Tensor) -> Tensor:
        return x.view(1, len(x), -1, size).transpose(1, 2)

    context = norm(features @ weights["fc.weight"].T, "hidden_norm")
    masks = torch.full((nested["block_size"] - 1,), nested["mask_token_id"])
    hidden = embedding[torch.cat((root[None], masks))]
    before = torch.arange(len(context))
    places = len(context) + torch.arange(len(hidden))
    residual = torch.zeros_like(hidden)
    for index, kind in enumerate(config["layer_types"]):
        layer, sliding = f"layers.{index}", kind == "sliding_attention" or nested["use_swa"]
        residual = residual + hidden
        fused = weights[f"{layer}.self_attn.qkv_proj.weight"]
        q, k, v = (norm(residual, f"{layer}.input_layernorm") @ fused.T).split(widths, dim=-1)
        old_k, old_v = (context @ fused[widths[0] :].T).split(widths[1:], dim=-1)
        q, k, old_k = (split(x) for x in (q, k, old_k))
        q = rotate(norm(q, f"{layer}.self_attn.q_norm"), places[None], theta)
        k = rotate(norm(k, f"{layer}.self_attn.k_norm"), places[None], theta)
        old_k = rotate(norm(old_k, f"{layer}.self_attn.k_norm"), before[None], theta)
        k, v = torch.cat((old_k, k), dim=2), torch.cat((split(old_v), split(v)), dim=2)
        k, v = repeat_heads(k, heads // keys), repeat_heads(v, heads // keys)
        distance = places[:, None] - torch.cat((before, places))[None]
        hide = torch.zeros_like(distance, dtype=torch.bool)
        if sliding:
            hide |= distance >= nested["swa_window_size"]
        if sliding if config["is_causal"] is None else config["is_causal"]:
            hide |= distance < 0
        scores = (q @ k.transpose(2, 3) / size**0.5).masked_fill(hide, -torch.inf)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)[0]
        residual = residual + mixed @ weights[f"{layer}.self_attn.o_proj.weight"].T
        both = norm(residual, f"{layer}.post_attention_layernorm")
        gate, up = (both @ weights[f"{layer}.mlp.gate_up_proj.weight"].T).chunk(2, dim=-1)
        hidden = (silu(gate) * up) @ weights[f"{layer}.mlp.down_proj.weight"].T
    return norm(residual + hidden, "norm")
