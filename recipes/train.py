"""Train a draft head: config -> build -> parity -> train -> evaluate -> save.

    accelerate launch -m recipes.train --config recipes/smollm2-135m/eagle3.yaml --optim.lr 3e-4

The run folder then holds ``head/`` (the trained head), ``checkpoints/``, ``metrics.jsonl``,
``config.yaml`` and ``provenance.json``. Starting the same command again resumes it. The last line
printed is a JSON object.
"""

import fcntl
import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast_object_list

from drafters import Drafter, TargetModel
from drafters.export import write_native
from inference.evaluation import Prompt, measure
from inference.proposers import TreeOptions, build_proposer
from recipes.heads import make_drafter
from recipes.parity import check_parity
from training.answers import (
    AnswerOptions,
    generate_answers,
    prompt_messages,
    select_answers,
)
from training.chat import MaskError, TokenizedRow, encode_prompt, encode_row
from training.config import TrainConfig, parse_config, save_config
from training.data import PackedDataset, collate, load_rows
from training.features import OnlineFeatures, check_packing
from training.loop import Trainer, make_accelerator
from training.objectives import Objective, build_objective
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
    accelerator = make_accelerator(config.run, config.target.device)
    show_progress(accelerator.is_main_process)
    with claim(Path(config.run.out), accelerator.is_main_process):
        return train(config, accelerator)


def train(
    config: TrainConfig,
    accelerator: Accelerator,
    target: TargetModel | None = None,
    features: OnlineFeatures | None = None,
) -> dict[str, Any]:
    """The steps of one run; see :func:`main`.

    Args:
        config: resolved.
        accelerator: of this process.
        target: loaded already; None loads it.
        features: hidden states shared with other runs on the same data.
    """
    out = Path(config.run.out)
    target = target or load_target(config, accelerator)
    evaluate = make_evaluate(config, target)
    rows = encode_rows(config, target, load_answers(config, target, accelerator))
    data, run = config.data, config.run
    dataset = PackedDataset(rows, data.max_length, run.batch_size, run.seed, data.pack)
    logger.info(
        "data: %d rows, %d sequences of %d, %d supervised tokens per epoch",
        len(rows),
        len(dataset.groups),
        data.max_length,
        dataset.supervised_tokens,
    )
    if dataset.num_unusable:
        logger.warning(
            "data: %d rows have nothing supervised within data.max_length", dataset.num_unusable
        )
    drafter = make_drafter(config, target, dataset)
    objective = build_objective(drafter, config.loss)
    logger.info(
        "head: %s, %.1fM trainable parameters",
        drafter.family,
        drafter.num_parameters_trained() / 1e6,
    )
    trainer = Trainer(config, accelerator, target, objective, dataset, evaluate, features)
    trainer.prepare()
    if run.parity:
        check_before_training(target, objective, dataset)
    if accelerator.is_main_process:
        save_config(config, out)
        write_provenance(out)
    if run.trackers:
        accelerator.init_trackers(run.project, config=_flat(config))
    results = trainer.train()
    summary = {
        "method": drafter.family,
        "steps": trainer.step,
        "training_tokens": trainer.tokens,
        **results,
    }
    if accelerator.is_main_process:
        write_native(drafter, out / "head", provenance())
    summary |= {
        "parameters": drafter.num_parameters_trained(),
        "seconds": round(trainer.seconds, 1),
    }
    summary |= {"head": str(out / "head")}
    trainer.release()
    accelerator.end_training()
    return summary


def show_progress(main_process: bool) -> None:
    """Our own messages, without the libraries' progress bars."""
    logging.basicConfig(
        level=logging.INFO if main_process else logging.WARNING, format="%(message)s"
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
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
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(
                f"run.out: another run is writing to {out}; wait for its end or name another folder"
            ) from error
        yield


def load_target(config: TrainConfig, accelerator: Accelerator) -> TargetModel:
    """The frozen target on this process's device, with the configured chat template.

    Raises:
        ValueError: it cannot be loaded, or the template file cannot be read.
    """
    options = config.target
    device = accelerator.device if options.device == "auto" else torch.device(options.device)
    target = TargetModel.load(
        options.name, getattr(torch, options.dtype), device, options.attn_implementation
    )
    if config.data.chat_template is not None:
        path = Path(config.data.chat_template)
        if not path.is_file():
            raise ValueError(f"data.chat_template: {path} is not a file")
        target.tokenizer.chat_template = path.read_text()
    return target


def load_answers(
    config: TrainConfig, target: TargetModel, accelerator: Accelerator
) -> list[dict[str, Any]]:
    """The rows to train on;

    With ``data.regenerate`` the target answers the prompts first (main process).
    """
    data = config.data
    rows = [row for source in data.train for row in load_rows(source, data.split, data.limit)]
    if not data.regenerate:
        return rows
    path = Path(data.answers or Path(config.run.out) / "answers.jsonl")
    options = AnswerOptions(
        max_new_tokens=data.answer_tokens,
        temperature=data.answer_temperatures[0],
        batch_size=data.answer_batch,
        max_prompt_tokens=max(1, data.max_length - 1),
        seed=config.run.seed,
    )
    failure: list[str | None] = [None]
    if accelerator.is_main_process:
        try:
            generate_answers(target, rows, path, options)
        except (ValueError, OSError) as error:
            failure = [str(error)]
    broadcast_object_list(failure)
    if failure[0] is not None:
        raise ValueError(failure[0])
    return select_answers(target, rows, path, options)


def encode_rows(
    config: TrainConfig, target: TargetModel, rows: list[dict[str, Any]]
) -> list[TokenizedRow]:
    """Token ids and supervised masks; a row that cannot be masked refuses the run unless told
    otherwise.

    Raises:
        MaskError: naming the row.
    """
    encoded, refused = [], 0
    for number, row in enumerate(rows):
        try:
            one = encode_row(target.tokenizer, row)
            if max(one.ids) >= target.vocab_size:
                raise MaskError(
                    f"token {max(one.ids)} is outside the target's vocabulary of "
                    f"{target.vocab_size}: these ids are another tokenizer's"
                )
            encoded.append(one)
        except MaskError as error:
            if not config.data.skip_bad_rows:
                raise MaskError(
                    f"data row {number}: {error}. Mend it, or leave such rows out with "
                    "data.skip_bad_rows=true"
                ) from error
            refused += 1
    if refused:
        logger.warning(
            "data: left out %d of %d rows whose mask cannot be established", refused, len(rows)
        )
    if not encoded:
        raise ValueError("data: no usable row is left")
    return encoded


def check_before_training(
    target: TargetModel, objective: Objective, dataset: PackedDataset
) -> None:
    """Packing must not leak, and both passes must agree.

    Raises:
        ValueError: either fails.
    """
    fullest = max(dataset.groups[:32], key=len)  # leaks need more than one document to show
    batch = collate([fullest], dataset.length).to(target.device)
    tolerance = 1e-1 if target.dtype in (torch.bfloat16, torch.float16) else 1e-2
    check_packing(target, batch, objective.drafter.feature_layers, tolerance)
    row = max((row for group in dataset.groups[:32] for row in group), key=lambda row: len(row.ids))
    report = check_parity(target, objective, row)
    logger.info(
        "parity: training and decoding logits agree to %.1e (allowed %.0e) at %d positions, the "
        "target's hidden states to %.1e",
        report.error,
        report.tolerance,
        report.positions,
        report.feature_error,
    )


def make_evaluate(
    config: TrainConfig, target: TargetModel
) -> Callable[[Drafter, int], dict[str, float]] | None:
    """Acceptance length by the real decoder, greedy, on held-out prompts; None without prompts."""
    options = config.evaluate
    if options.prompts is None:
        return None
    rows = load_rows(options.prompts)
    rows = rows[:: max(1, len(rows) // options.limit)][: options.limit]
    prompts = [Prompt(encode_prompt(target.tokenizer, prompt_messages(row))) for row in rows]

    def evaluate(drafter: Drafter, step: int) -> dict[str, float]:
        proposer = build_proposer(drafter, TreeOptions(size=options.size))
        report = measure(
            target, proposer, prompts, max_new_tokens=options.max_new_tokens, compare=None
        )
        found = report.summary()
        names = (
            "acceptance_length",
            "accepted_per_round",
            "confidence_auc",
            "confidence_error",
        )
        return {name: found[name] for name in names if found[name] is not None}

    return evaluate


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
