"""Train a draft head: config -> build -> parity -> train -> evaluate -> save.

    accelerate launch -m recipes.train --config recipes/smollm2-135m/eagle3.yaml --optim.lr 3e-4

The run folder then holds ``head/`` (the trained head), ``checkpoints/``, ``metrics.jsonl``,
``config.yaml`` and ``provenance.json``. Starting the same command again resumes it. The last line
printed is a JSON object.
"""

import json
import logging
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from accelerate import Accelerator, PartialState
from torch import nn

from drafters import TargetModel
from drafters.export import write_native
from drafters.placement import shard_target
from recipes import plan
from recipes.checks import check_before_training
from recipes.evaluating import make_evaluate
from recipes.heads import make_drafter
from recipes.memory import check_memory, launched
from recipes.rows import make_data
from training import locks
from training.config import TrainConfig, parse_config, save_config
from training.features import Features
from training.joint import JointObjective, UnreadBatches
from training.loop import Trainer
from training.merged import write_merged
from training.objectives import build_objective
from training.processes import make_accelerator
from training.provenance import provenance, write_provenance

logger = logging.getLogger("recipes.train")


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run one training.

    Args:
        argv: arguments, as on the command line.

    Returns:
        The summary that is also printed as the last line.

    Raises:
        ValueError: a user error in the configuration, the data or the files.
    """
    config = parse_config(argv)
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    accelerator = make_accelerator(
        config.run, config.target.device, config.target.parallel, bool(config.lora.rank)
    )
    show_progress(accelerator.is_main_process)
    with claim(Path(config.run.out), accelerator.is_main_process):
        return train(config, accelerator)


def train(
    config: TrainConfig,
    accelerator: Accelerator,
    target: TargetModel | None = None,
    features: Features | None = None,
) -> dict[str, Any]:
    """The steps of one run; see :func:`main`.

    Args:
        config: resolved.
        accelerator: of this process.
        target: loaded already; None loads it.
        features: hidden states shared with other runs on the same data.
    """
    out, run = Path(config.run.out), config.run
    if target is None:
        warn_of_memory(config, accelerator)
        target = load_target(config, accelerator)
    rank, world = accelerator.process_index, accelerator.num_processes
    evaluate = make_evaluate(config, target, rank, world)
    dataset, stored = make_data(config, target, accelerator)
    drafter = make_drafter(config, target, dataset)
    objective = build_objective(drafter, config.loss)
    nn.Module.to(objective, accelerator.device)
    if config.target.parallel == "shard":
        shard_target(target, accelerator.device)
    parameters = drafter.num_parameters_trained()
    logger.info("head: %s, %.1fM trainable parameters", drafter.family, parameters / 1e6)
    if run.parity:
        check_before_training(target, objective, dataset)
    if config.lora.rank:
        objective = JointObjective(
            objective, target, config.lora, run.seed, run.activation_checkpointing
        )
        features = UnreadBatches()
    trainer = Trainer(config, accelerator, target, objective, dataset, evaluate, features or stored)
    trainer.prepare()
    if accelerator.is_main_process:
        save_config(config, out)
        write_provenance(out)
    if run.trackers:
        main_process = accelerator.is_main_process
        more = tracker_options(out, run.trackers, trainer.step > 0) if main_process else {}
        accelerator.init_trackers(run.project, config=_flat(config), init_kwargs=more)
    results = trainer.train()
    summary = {
        "method": drafter.family,
        "steps": trainer.step,
        "training_tokens": trainer.tokens,
        **results,
        **trainer.history.summary(),
        "parameters": parameters,
        "seconds": round(trainer.seconds, 1),
        "head": str(out / "head"),
    }
    head = trainer.final_head()
    if accelerator.is_main_process:
        if isinstance(objective, JointObjective):
            write_merged(objective, out, provenance())
        write_native(head, out / "head", provenance())
    trainer.release()
    accelerator.end_training()
    return summary


def tracker_options(out: Path, trackers: list[str], resumed: bool) -> dict[str, Any]:
    """Arguments of accelerate's trackers by name: wandb goes on with the run that it had.

    Args:
        out: run folder, which keeps the run's name for wandb.
        trackers: in use.
        resumed: the run goes on from a checkpoint.
    """
    if "wandb" not in trackers:
        return {}
    file = out / "tracker_id"
    if not (resumed and file.exists()):
        file.write_text(secrets.token_hex(4))
    return {"wandb": {"id": file.read_text(), "resume": "allow", "name": out.name}}


def show_progress(main_process: bool) -> None:
    """Our own messages, without the libraries' progress bars."""
    logging.basicConfig(
        level=logging.INFO if main_process else logging.WARNING, format="%(message)s"
    )
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()


@contextmanager
def claim(out: Path, main_process: bool) -> Iterator[None]:
    """Keep other runs out of the run folder while the body runs.

    Raises:
        ValueError: another run is writing there.
    """
    if not main_process:
        yield
        return
    out.mkdir(parents=True, exist_ok=True)
    with (out / ".lock").open("w") as lock:
        if not locks.lock(lock):
            raise ValueError(
                f"run.out: another run is writing to {out}; wait for its end or name another folder"
            )
        yield


def warn_of_memory(config: TrainConfig, accelerator: Accelerator) -> None:
    """Predict the peak before anything is loaded.

    Raises:
        DoesNotFit: this device can never hold the run, and ``run.memory_check`` is refuse.
    """
    on_cpu = config.target.device == "cpu"
    device = torch.device("cpu") if on_cpu else accelerator.device
    warning = check_memory(config, device, accelerator.num_processes, launched()[1])
    if warning is not None:
        logger.warning("memory: %s", warning)


def load_target(config: TrainConfig, accelerator: Accelerator) -> TargetModel:
    """The frozen target on this process's device, with the configured chat template.

    Raises:
        ValueError: it cannot be loaded, or the template file cannot be read.
    """
    options = config.target
    device = accelerator.device if options.device == "auto" else torch.device(options.device)
    target = TargetModel.load(
        options.name,
        getattr(torch, options.dtype),
        device,
        options.attn_implementation,
        options.device_map,
        options.parallel,
        options.reserve_gb,
    )
    if config.data.chat_template is not None:
        path = Path(config.data.chat_template)
        if not path.is_file():
            raise ValueError(f"data.chat_template: {path} is not a file")
        target.tokenizer.chat_template = path.read_text()
    return target


def _flat(config: TrainConfig) -> dict[str, Any]:
    """Dotted keys for trackers."""
    sections = ("target", "drafter", "data", "loss", "optim", "evaluate", "lora", "run")
    return {
        f"{name}.{key}": str(value)
        for name in sections
        for key, value in vars(getattr(config, name)).items()
    }


def run() -> None:
    """Command line: one line for a user's error, no traceback."""
    if "--plan" in sys.argv[1:]:
        plan.run(sys.argv[1:])
        return
    try:
        summary = main()
        if PartialState().is_main_process:
            print(json.dumps(summary))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt as stop:
        print(f"stopped. {stop}", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    run()
