"""The side of `interop.modelopt_check` that runs in the environment of NVIDIA's ModelOpt.

    modelopt_side.py load HEAD TARGET ROWS     their module takes HEAD's tensors and answers to ROWS
    modelopt_side.py train TARGET FOLDER       their trainer makes FOLDER/head and FOLDER/rows

Run by path, without Headway. ROWS is a safetensors file with ``features`` (T, F·H) and
``token_ids`` (T or more), to which ``theirs`` (T, Vd) is added: what their own forward answers
to a draft's first step, in float32. The last line of standard output is JSON.

Legend: T rows of text, F captured layers, H hidden, Vd draft vocabulary.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import modelopt.torch.speculative as mtsp
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

STEPS, LENGTH, VOCAB, RATE = 3, 32, 2048, 1e-2
SHAPE = (
    "draft_vocab_size",
    "head_dim",
    "hidden_act",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_theta",
)
"""Keys of a head's config that their module is built from."""


def main() -> None:
    """Do what the command line says."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    what, *rest = sys.argv[1:]
    places = [Path(place) for place in rest]
    found = load(*places) if what == "load" else train(*places)
    packages = ("nvidia-modelopt", "torch", "transformers")
    print(json.dumps({**found, "versions": {name: version(name) for name in packages}}))


def converted(target: Path, config: dict[str, Any]) -> Any:
    """A target with an EAGLE-3 head of their class beside it, the head of a config's shape."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    rope = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    layer_ids = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids", [])
    shape = {key: config[key] for key in SHAPE if key in config}
    layers = {"eagle_aux_hidden_state_layer_ids": layer_ids, "has_lm_head": True}
    options = {
        "eagle_architecture_config": {**shape, **layers, "rope_scaling": rope},
        "eagle_ttt_steps": 2,
        "eagle_use_torch_compile": False,
    }
    mtsp.convert(model, [("eagle", options)])
    return model


def load(head: Path, target: Path, rows: Path) -> dict[str, Any]:
    """Their module with our tensors, every one of them, and their exporter's own check of names."""
    config = json.loads((head / "config.json").read_text(encoding="utf-8"))
    model = converted(target, config)
    model.eagle_module.load_state_dict(load_file(head / "model.safetensors"), strict=True)
    model.get_exporter()._extract_state_dict(model.state_dict())
    inputs = load_file(rows)
    inputs.pop("theirs", None)
    save_file({**inputs, "theirs": answer(model, inputs)}, rows)
    return {"class": type(model.eagle_module).__name__}


def train(target: Path, folder: Path) -> dict[str, Any]:
    """A few steps of their trainer's forward pass, and their export."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    rope = config.get("rope_parameters") or {}
    theta = config.get("rope_theta") or rope.get("rope_theta", 10000.0)
    size = min(VOCAB, config["vocab_size"])
    model = converted(
        target, {**config, "rope_theta": theta, "draft_vocab_size": size, "num_hidden_layers": 1}
    )
    if size < config["vocab_size"]:
        every = config["vocab_size"] // size
        model.eagle_module.d2t.copy_(torch.arange(size) * every - torch.arange(size))
    optimizer = torch.optim.AdamW(model.eagle_module.parameters(), lr=RATE)
    model.train()
    for _ in range(STEPS):
        ids = torch.randint(size, (2, LENGTH))
        loss = model(input_ids=ids, labels=ids, attention_mask=torch.ones_like(ids)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    model.get_exporter().export(folder / "head", torch.float32)
    width = model.eagle_module.fc.in_features
    inputs = {"features": torch.randn(6, width), "token_ids": torch.randint(size, (6,))}
    save_file({**inputs, "theirs": answer(model, inputs)}, folder / "rows")
    exported = json.loads((folder / "head" / "config.json").read_text(encoding="utf-8"))
    return {"steps": STEPS, "rope_scaling": exported.get("rope_scaling")}


@torch.no_grad()
def answer(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """(T, Vd) logits of the first step on all rows."""
    module, features = model.eagle_module, inputs["features"][None]
    count = features.shape[1]
    positions = torch.arange(count)[None]
    embeds = model.get_input_embeddings()(inputs["token_ids"][None, :count])
    mask = torch.full((count, count), torch.finfo(torch.float32).min).triu(1)[None, None]
    module._maybe_init_rope(device=features.device)
    normed, _, _ = module(module.fc(features), embeds, mask, positions)
    return module.lm_head(normed)[0].contiguous()


if __name__ == "__main__":
    main()
