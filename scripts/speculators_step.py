"""The EAGLE-3 training step of the PyPI package `speculators`, for `scripts.benchmark_training`.

Runs in that package's own environment, by path and without this project: reads tensors and settings
from a folder, says {"ready": ...}, and then takes one optimizer step per line of standard input,
answering with its seconds and its loss, until the input ends.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


def main() -> None:
    """Answer the lines on standard input."""
    folder = Path(sys.argv[1])
    settings = json.loads((folder / "settings.json").read_text())
    torch.set_num_threads(settings["threads"])
    tensors = load_file(folder / "tensors.safetensors")
    clock = {"wall": time.perf_counter, "cpu": time.process_time}[settings["clock"]]
    model = build_model(settings, tensors)
    step = make_step(model, settings, batch_of(tensors))
    say({"ready": True, "trained": sum(p.numel() for p in model.parameters() if p.requires_grad)})
    for _ in sys.stdin:
        start = clock()
        losses = step()
        say({"seconds": clock() - start, "losses": losses})


def say(record: dict[str, Any]) -> None:
    """One line of JSON."""
    print(json.dumps(record), flush=True)


def build_model(settings: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Any:
    """Their draft model with the weights of ours."""
    from speculators.models.eagle3.core import Eagle3DraftModel
    from transformers import LlamaConfig

    ids, size = tensors["draft_vocab"], settings["layer"]["vocab_size"]
    reduced = len(ids) < size
    kept = torch.zeros(size, dtype=torch.bool)
    kept[ids] = True
    model = Eagle3DraftModel.from_training_args(
        LlamaConfig(**settings["layer"]),
        t2d=kept if reduced else None,
        d2t=ids - torch.arange(len(ids)) if reduced else None,
        draft_vocab_size=len(ids),
        norm_before_residual=False,
        ttt_steps=settings["steps"],
        verifier_name_or_path=settings["target"],
        target_layer_ids=settings["feature_layers"],
        draft_attn_impl=settings["attention"],
    )
    own = {name[5:]: x for name, x in tensors.items() if name.startswith("head.")}
    model.load_state_dict(own, strict=False)
    model.lm_head.weight.requires_grad_(settings["trained_output"])
    return model.train()


def batch_of(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One packed row with their pairing: (token t+1, features of t, hidden state of t+1), document
    by document.
    """
    documents = tensors["document_ids"]
    later = torch.zeros(len(documents), dtype=torch.bool)
    later[1:] = documents[1:] == documents[:-1]
    earlier = torch.zeros_like(later)
    earlier[:-1] = later[1:]
    return {
        "hidden_states": tensors["features"][earlier][None],
        "input_ids": tensors["input_ids"][later][None],
        "document_ids": documents[later][None],
        "loss_mask": tensors["drafted"][later][None],
        "position_ids": tensors["position_ids"][later][None],
        "verifier_last_hidden_states": tensors["last_hidden"][later][None],
    }


def make_step(model: Any, settings: dict[str, Any], batch: dict[str, torch.Tensor]) -> Any:
    """Forward, backward, clipping and AdamW as their trainer does them."""
    from speculators.train.optimizers import build_optimizers
    from speculators.train.trainer import TrainerConfig

    arguments, _ = model.get_trainer_kwargs(
        ttt_steps=settings["steps"],
        ttt_step_loss_decay=settings["decay"],
        loss_fn="kl_div",
        loss_implementation=settings["loss"],
    )
    device = torch.device(settings["device"])
    model.to(device)
    batch = {name: x.to(device) for name, x in batch.items()}
    optimizers = build_optimizers(
        model, TrainerConfig(lr=settings["lr"], num_epochs=1, save_path="unused")
    )
    narrow = settings["dtype"] == "bfloat16"

    def step() -> list[float]:
        with torch.autocast(device.type, torch.bfloat16, enabled=narrow):
            _, loss, metrics = model(**batch, **arguments)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        return [float(metrics[f"loss_{i}_sum"]) for i in range(settings["steps"])]

    return step


if __name__ == "__main__":
    main()
