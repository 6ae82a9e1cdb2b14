"""Our EAGLE-3 step and that of the PyPI package `speculators`, in turns on the same tensors."""

import argparse
import json
import statistics
import subprocess
import tempfile
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from drafters.eagle import Eagle3Drafter
from scripts.training_cost import seconds_of
from training.features import TargetBatch

if TYPE_CHECKING:
    from scripts.benchmark_training import Work

STEP = Path(__file__).with_name("speculators_step.py")
LAYER_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
)


def race(
    work: "Work", args: argparse.Namespace, trained_output: bool, attention: str
) -> dict[str, Any]:
    """Both sides in turns, without the target's forward pass, which neither has in its step.

    Args:
        work: ours, of an EAGLE-3 head.
        args: of the benchmark.
        trained_output: whether the output matrix is trained, on both sides.
        attention: theirs.

    Returns:
        Speeds and their ratio, losses per depth of the first step, or "error": what stops theirs.
    """
    head = work.objective.drafter
    assert isinstance(head, Eagle3Drafter)
    head.lm_head.weight.requires_grad_(trained_output)
    record = {"length": work.length, "trained_output": trained_output, "attention": attention}
    data = work.features(work.batch())
    with tempfile.TemporaryDirectory() as folder:
        write_inputs(Path(folder), work, data, args, trained_output, attention)
        errors = open(Path(folder) / "errors.txt", "w+")  # noqa: SIM115
        process = subprocess.Popen(
            [args.speculators_python, str(STEP), folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        try:
            record |= _turns(process, work, data, args)
        except EOFError:
            errors.seek(0)
            lines = [line.strip() for line in errors.read().splitlines() if line.strip()]
            record["error"] = lines[-1] if lines else "it ended without a word"
        finally:
            process.kill()
            process.communicate()
            errors.close()
            head.lm_head.weight.requires_grad_(True)
            work.__post_init__()
    return record


def _turns(
    process: subprocess.Popen, work: "Work", data: TargetBatch, args: argparse.Namespace
) -> dict[str, Any]:
    """Steps of theirs and ours, one after the other.

    Raises:
        EOFError: theirs ended.
    """
    work.__post_init__()
    work.trained = [p for p in work.objective.parameters() if p.requires_grad]
    assert process.stdin is not None and process.stdout is not None
    trained = _answer(process.stdout)["trained"]
    with torch.no_grad():
        _, metrics = work.objective(data)
    depths = range(work.objective.depths)
    losses = [float(metrics[f"loss_{i}_sum"] / metrics[f"loss_{i}_count"]) for i in depths]
    ours, theirs, their_losses = [], [], []
    for _ in range(max(args.warmup, 1) + args.steps):
        process.stdin.write("step\n")
        process.stdin.flush()
        answer = _answer(process.stdout)
        theirs.append(answer["seconds"])
        their_losses.append(answer["losses"])
        step = partial(work.step, data, work.phases())
        ours.append(seconds_of(step, work.device, work.clock))
    ours, theirs = ours[-args.steps :], theirs[-args.steps :]
    tokens = int(data.batch.supervised.sum())
    return {
        "ours_tokens_per_second": tokens / statistics.median(ours),
        "theirs_tokens_per_second": tokens / statistics.median(theirs),
        "ratio": statistics.median(t / o for t, o in zip(theirs, ours, strict=True)),
        "ours_trained": sum(p.numel() for p in work.trained),
        "theirs_trained": trained,
        "ours_losses": losses,
        "theirs_losses": their_losses[0],
    }


def _answer(stream: IO[str]) -> dict[str, Any]:
    """The next line of JSON; what else is printed is passed over.

    Raises:
        EOFError: there is none.
    """
    for line in stream:
        if line.startswith("{"):
            return json.loads(line)
    raise EOFError


def write_inputs(
    folder: Path,
    work: "Work",
    data: TargetBatch,
    args: argparse.Namespace,
    trained_output: bool,
    attention: str,
) -> None:
    """The tensors and settings that `speculators_step` reads.

    Its last hidden states are those before the target's final norm, so ours are divided by what the
    norm multiplies by: the norm then gives them back.
    """
    head, batch = work.objective.drafter, data.batch
    assert isinstance(head, Eagle3Drafter) and data.features is not None
    scale = work.target.block()["norm.weight"]
    columns = torch.arange(len(batch.input_ids), device=work.device)[:, None]
    vocab = head.draft_vocab
    tensors = {
        "input_ids": batch.input_ids,
        "position_ids": batch.position_ids,
        "document_ids": batch.document_ids + columns * work.length,
        "features": data.features.float(),
        "last_hidden": (data.last_hidden / scale).float(),
        "drafted": torch.cat((batch.supervised[:, 1:], batch.supervised[:, :1] & False), dim=1),
    }
    flat = {name: x.flatten(0, 1).cpu().contiguous() for name, x in tensors.items()}
    flat["draft_vocab"] = torch.arange(work.target.vocab_size) if vocab is None else vocab.cpu()
    flat |= {f"head.{their_name(name)}": x.cpu() for name, x in weights(head).items()}
    save_file(flat, folder / "tensors.safetensors")
    config = work.target.config
    layer = {name: getattr(head.config, name) for name in LAYER_FIELDS}
    layer |= {"num_hidden_layers": head.config.num_layers, "tie_word_embeddings": False}
    layer["max_position_embeddings"] = config.max_position_embeddings
    layer["rope_parameters"] = {"rope_type": "default", "rope_theta": head.config.rope_theta}
    settings = {
        "target": str(Path(args.target).resolve()) if Path(args.target).exists() else args.target,
        "layer": layer,
        "steps": work.objective.depths,
        "decay": work.objective.options.decay,
        "feature_layers": list(head.feature_layers),
        "attention": attention,
        "loss": "fused" if work.device.type == "cuda" else "eager",
        "trained_output": trained_output,
        "lr": work.optimizer.defaults["lr"],
        "dtype": args.dtype,
        "device": str(work.device),
        "threads": torch.get_num_threads(),
        "clock": args.clock,
    }
    (folder / "settings.json").write_text(json.dumps(settings))


def weights(head: Eagle3Drafter) -> dict[str, Tensor]:
    """The head's parameters, on their own."""
    return {name: x.detach().contiguous() for name, x in head.named_parameters()}


def their_name(name: str) -> str:
    """A parameter's name in their model, whose first layer is like the others."""
    return name.replace("midlayer.", "layers.0.")
