"""What a run trains on: rows, answers, sequences, hidden states."""

import logging
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object

from drafters import TargetModel
from training.answers.client import ServerOptions
from training.answers.file import AnswerOptions, select_answers
from training.answers.local import answer_rows
from training.answers.shares import answer_together
from training.config import TrainConfig
from training.data.batches import Dataset, PackedDataset
from training.data.chat import TokenizedRow
from training.data.encoding import Encode, encode_all, encode_checked
from training.data.sources import load_rows
from training.data.streaming import StreamedDataset
from training.features import Features
from training.processes import on_main
from training.store import FeatureStore, StoredFeatures

logger = logging.getLogger("recipes.train")


def make_data(
    config: TrainConfig, target: TargetModel, accelerator: Accelerator
) -> tuple[Dataset, Features | None]:
    """The sequences of a run, answered first where that is asked for, and their hidden states
    where they are stored.

    Raises:
        ValueError: a source cannot be read or has nothing to train on, or the store does not hold
            it.
        MaskError: naming a row whose mask cannot be established.
    """
    data, run = config.data, config.run
    encode = encode_for(target)
    if data.streaming:
        return _streamed(config, encode), None
    rows = encode_all(load_answers(config, target, accelerator), encode, data.skip_bad_rows)
    store = None
    if data.features is not None:
        store = FeatureStore(Path(data.features), target, data.max_length, data.skip_damaged)
        rows = store.present(rows)
        store.check(target, rows[0].ids)
    dataset = PackedDataset(
        rows, data.max_length, run.batch_size, run.seed, data.pack, data.buckets
    )
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
    return dataset, None if store is None else StoredFeatures(store, dataset)


def _streamed(config: TrainConfig, encode: Encode) -> StreamedDataset:
    data, run = config.data, config.run
    return StreamedDataset(
        data.train,
        encode,
        data.max_length,
        run.batch_size,
        run.seed,
        data.pack,
        data.shuffle_buffer,
        data.split,
        data.limit,
        data.skip_bad_rows,
    )


def encode_for(target: TargetModel) -> Encode:
    """How a data row becomes token ids for this target."""

    def encode(row: dict[str, Any]) -> list[TokenizedRow]:
        return encode_checked(target.tokenizer, target.vocab_size, row)

    return encode


def load_answers(
    config: TrainConfig, target: TargetModel, accelerator: Accelerator
) -> list[dict[str, Any]]:
    """The rows to train on.

    With ``data.regenerate`` the prompts are answered first: in process by all processes, each a
    share of them, or by a server, which the main process alone asks.

    Raises:
        ValueError: in every process, where a source cannot be read or answering failed in any.
    """
    data = config.data
    rows = [row for source in data.train for row in load_rows(source, data.split, data.limit)]
    if not data.regenerate:
        return rows
    path = Path(data.answers or Path(config.run.out) / "answers.jsonl")
    options = AnswerOptions(
        max_new_tokens=data.answer_tokens,
        temperatures=tuple(data.answer_temperatures),
        batch_size=data.answer_batch,
        max_prompt_tokens=max(1, data.max_length - 1),
        seed=config.run.seed,
    )
    if data.answer_server is not None:
        server = ServerOptions(data.answer_server, data.answer_model)
        answered = on_main(accelerator, lambda: answer_rows(target, rows, path, options, server))
    elif accelerator.num_processes > 1:
        answered = answer_together(target, rows, path, options, accelerator)
    else:
        answered = answer_rows(target, rows, path, options)
    found = select_answers(rows, path, options, answered.made_by)
    if len(set(gather_object([len(found)]))) > 1:
        raise ValueError(
            f"answers: the processes see different contents of {path}; start the same command "
            "again, or name a file on a disk that they share by data.answers"
        )
    return found
