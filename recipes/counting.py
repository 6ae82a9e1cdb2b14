"""What the data of a run holds: counted where it is on this machine, or why not."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from drafters.hub import split_revision
from training.answers.conversations import prompt_messages
from training.config import TrainConfig
from training.data.batches import PackedDataset
from training.data.chat import encode_prompt
from training.data.encoding import encode_all, encode_checked
from training.data.sources import load_rows

SAMPLE = 500
"""Prompts whose length is looked at where the answers are yet to come."""


@dataclass(frozen=True)
class DataFacts:
    """What one epoch holds.

    Attributes:
        rows, sequences, supervised, tokens: counts; None where they are not known.
        exact: counted after masking; otherwise the most there can be.
        note: why something is not known.
        dataset: the sequences, where they were made.
    """

    rows: int | None = None
    sequences: int | None = None
    supervised: int | None = None
    tokens: int | None = None
    exact: bool = False
    note: str = ""
    dataset: PackedDataset | None = None


def read_data(config: TrainConfig, model_config: PreTrainedConfig) -> DataFacts:
    """Count the data, as far as it is on this machine.

    Raises:
        ValueError: a source cannot be read, or a row cannot be masked.
    """
    data = config.data
    if data.streaming:
        return DataFacts(note="streamed rows are not counted before they are read")
    if absent := [name for name in data.train if not _is_local(name)]:
        return DataFacts(note=f"data.train {absent[0]!r} is not a local file or folder: not read")
    tokenizer = _tokenizer(config)
    if tokenizer is None:
        return DataFacts(note=f"no tokenizer of {config.target.name!r} can be read: not counted")
    rows = [row for name in data.train for row in load_rows(name, data.split, data.limit)]
    if data.regenerate:
        return _before_answers(config, tokenizer, rows)
    vocab = model_config.get_text_config().vocab_size
    encoded = encode_all(
        rows, lambda row: encode_checked(tokenizer, vocab, row), data.skip_bad_rows
    )
    run = config.run
    dataset = PackedDataset(
        encoded, data.max_length, run.batch_size, run.seed, data.pack, data.buckets
    )
    tokens = sum(len(row.ids) for group in dataset.groups for row in group)
    return DataFacts(
        len(encoded),
        len(dataset.groups),
        dataset.supervised_tokens,
        tokens,
        exact=True,
        dataset=dataset,
    )


def _before_answers(
    config: TrainConfig, tokenizer: PreTrainedTokenizerBase, rows: list[dict[str, Any]]
) -> DataFacts:
    """The most there can be, before the target has answered."""
    data = config.data
    sample = rows[:: max(1, len(rows) // SAMPLE)]
    lengths = [len(encode_prompt(tokenizer, prompt_messages(row))) for row in sample]
    longest = [min(length + data.answer_tokens, data.max_length) for length in lengths]
    tokens = round(sum(longest) / len(longest) * len(rows))
    sequences = math.ceil(tokens / data.max_length) if data.pack else len(rows)
    note = f"answers are yet to come: as if each had data.answer_tokens={data.answer_tokens}"
    return DataFacts(len(rows), sequences, len(rows) * data.answer_tokens, tokens, note=note)


def _is_local(name: str) -> bool:
    return Path(name).exists() or any(letter in name for letter in "*?[")


def _tokenizer(config: TrainConfig) -> PreTrainedTokenizerBase | None:
    try:
        place, revision = split_revision(config.target.name)
        tokenizer = AutoTokenizer.from_pretrained(place, revision=revision or "main")
    except Exception:  # a folder of config.json alone, no network, ...
        return None
    if config.data.chat_template is not None:
        tokenizer.chat_template = Path(config.data.chat_template).read_text()
    return tokenizer


def total_steps(config: TrainConfig, facts: DataFacts) -> int | None:
    """Optimizer steps of the run, where they are known."""
    if config.run.steps is not None:
        return config.run.steps
    if facts.sequences is None:
        return None
    per_epoch = max(1, facts.sequences // config.run.batch_size)
    return max(1, math.ceil(config.run.epochs * per_epoch))
