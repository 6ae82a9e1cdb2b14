"""What a run trains on: rows, answers, sequences, hidden states."""

import logging
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from drafters import TargetModel
from training.answer_file import AnswerOptions, select_answers
from training.answers import answer_rows
from training.chat import TokenizedRow
from training.config import TrainConfig
from training.data import Dataset, PackedDataset
from training.encoding import Encode, encode_all, encode_checked
from training.features import Features
from training.server_client import ServerOptions
from training.sources import load_rows
from training.store import FeatureStore, StoredFeatures
from training.streaming import StreamedDataset

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
        temperatures=tuple(data.answer_temperatures),
        batch_size=data.answer_batch,
        max_prompt_tokens=max(1, data.max_length - 1),
        seed=config.run.seed,
    )
    server = None
    if data.answer_server is not None:
        server = ServerOptions(data.answer_server, data.answer_model)
    result: list[Any] = [None, []]  # a failure, or what made the answers
    if accelerator.is_main_process:
        try:
            result[1] = answer_rows(target, rows, path, options, server).made_by
        except (ValueError, OSError) as error:
            result[0] = str(error)
    broadcast_object_list(result)
    if result[0] is not None:
        raise ValueError(result[0])
    return select_answers(rows, path, options, result[1])
