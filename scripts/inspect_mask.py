"""Show what a head would learn from: supervised tokens, packed sequences, attention masks.

    python -m scripts.inspect_mask --target targets/smollm2-135m --data answers.jsonl --limit 3
    python -m scripts.inspect_mask --recipe recipes/smollm2-135m/eagle3.yaml --sequence 7 --mask

Supervised text is coloured and the rest dim; where the output is no terminal, or NO_COLOR is set,
supervised text stands in [[ ]]. Only the target's tokenizer is loaded. A row whose mask cannot be
established is shown with the reason. --row shows one row of the data, --document the one that a
run's messages give this number, --sequence a sequence as the run packs, pads and (streaming) draws
it. --mask draws which rows see which in a training pass over the sequence. With --recipe the data
and all options are that run's; with data.regenerate they are its answers so far, so numbers are
those of the run once it has answered all prompts. The last line is one JSON object.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from drafters.hub import split_revision
from scripts.common import add_options, check_chat_template, parser_for, print_json, run
from scripts.inspect_options import Inspection, inspection
from scripts.mask_drawing import FAMILY_RULES, View, draw_mask
from training.data.batches import PackedDataset
from training.data.chat import TokenizedRow, encode_rows_of
from training.data.encoding import encode_all
from training.data.messages import MaskError
from training.data.packing import size_of
from training.data.sources import Interleaved, RowStream, parse_source
from training.data.streaming import StreamedDataset

SUPERVISED, DIM, BOLD, RESET = "\x1b[1;32m", "\x1b[2m", "\x1b[1m", "\x1b[0m"
MOST_COLUMNS = 64


def main(argv: list[str] | None = None) -> None:
    """Print the rows or the sequence, print the counts."""
    args = parse_args(argv)
    settings = inspection(args)
    tokenizer = load_tokenizer(settings.target, settings.chat_template)
    coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    print(legend(coloured))
    if args.sequence is None:
        record = show_rows(args, settings, tokenizer, coloured)
    else:
        record = show_sequence(args, settings, tokenizer, coloured)
    print()
    print_json(record)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """The data, and what of it to show."""
    parser = parser_for(__doc__)
    add_options(parser, "--target", target=None)
    parser.add_argument("--recipe", type=Path, metavar="FILE", help="a run's config: target, data")
    parser.add_argument(
        "--data",
        "--prompts",
        dest="data",
        nargs="+",
        metavar="NAME",
        help="files, patterns, folders or hub ids (owner/name:config:split)",
    )
    parser.add_argument("--split", help="of a hub data set (default: train)")
    parser.add_argument("--limit", type=int, default=3, metavar="N", help="rows (default: 3)")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--row", type=int, metavar="N", help="show data row N (from 0) alone")
    shown.add_argument(
        "--document", type=int, metavar="N", help="show the row that a run calls data row N"
    )
    shown.add_argument("--sequence", type=int, metavar="N", help="show sequence N (from 0)")
    parser.add_argument("--max-length", type=int, metavar="T", help="of sequences (default: 1024)")
    parser.add_argument(
        "--mask",
        nargs="?",
        const="",
        choices=("", *FAMILY_RULES),
        metavar="FAMILY",
        help=f"draw the attention of a training pass: {', '.join(FAMILY_RULES)} (default: the "
        "recipe's)",
    )
    parser.add_argument(
        "--columns", default="0:32", metavar="A:B", help="columns drawn (default: %(default)s)"
    )
    parser.add_argument("--depth", type=int, default=3, metavar="K", help="draft steps drawn (3)")
    add_options(parser, "--chat-template")
    return parser.parse_args(argv)


def load_tokenizer(name: str, chat_template: Path | None) -> PreTrainedTokenizerBase:
    """The target's tokenizer, with another chat template where one is given.

    Raises:
        ValueError: it cannot be loaded.
        OSError: the template cannot be read.
    """
    try:
        place, revision = split_revision(name)
        tokenizer = AutoTokenizer.from_pretrained(place, revision=revision or "main")
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, ...
        raise ValueError(f"target {name!r}: cannot load its tokenizer: {error}") from error
    if chat_template is not None:
        tokenizer.chat_template = chat_template.read_text(encoding="utf-8")
    return tokenizer


# Rows -------------------------------------------------------------------------------------------


def show_rows(
    args: argparse.Namespace,
    settings: Inspection,
    tokenizer: PreTrainedTokenizerBase,
    coloured: bool,
) -> dict[str, Any]:
    """Print the chosen rows; returns their counts.

    Raises:
        ValueError: there is no such row, or the chat template is missing.
    """
    rows: Iterator[tuple[int, dict[str, Any]]] = enumerate(read_rows(settings))
    if args.row is not None:
        rows = islice(rows, args.row, args.row + 1)
    elif args.document is None:
        rows = islice(rows, args.limit)
    seen = tokens = supervised = documents = 0
    refused = []
    for number, row in rows:
        if row.get("messages") and row.get("answer_ids") is None:
            check_chat_template(tokenizer)
        try:
            encoded = encode_rows_of(tokenizer, row)
        except MaskError as error:
            if args.document is None:
                seen += 1
                print(f"\n{title(f'row {number}: refused: {error}', coloured)}")
                refused.append({"row": number, "reason": str(error)})
            continue
        first, documents = documents, documents + len(encoded)
        if args.document is not None:
            if documents <= args.document:
                continue
            encoded = [encoded[args.document - first]]
        seen += 1
        for part, one in enumerate(encoded):
            name = f"row {number}" + (f", part {part}" if len(encoded) > 1 else "")
            print(f"\n{title(f'{name}: {counted(one)}', coloured)}")
            print(render(tokenizer, one, coloured))
            tokens, supervised = tokens + len(one.ids), supervised + sum(one.supervised)
        if args.document is not None:
            break
    if not seen:
        raise ValueError(f"data: {settings.sources} end before that row")
    return {"rows": seen, "tokens": tokens, "supervised": supervised, "refused": refused}


def read_rows(settings: Inspection) -> Iterator[dict[str, Any]]:
    """Data rows in the order in which the run reads them, no more than are asked for.

    Raises:
        ValueError: a source cannot be read, or all are empty.
    """
    sources = [parse_source(name, settings.split) for name in settings.sources]
    if settings.streaming:
        rows = Interleaved(sources, settings.limit)
        while True:
            row = rows.next()[1]
            if rows.epoch:
                return
            yield row
    count = 0
    for source in sources:
        for row in iter(RowStream(source, settings.limit).next, None):
            count += 1
            yield row
    if not count:
        raise ValueError(f"data: {settings.sources} are empty")


# Sequences --------------------------------------------------------------------------------------


def show_sequence(
    args: argparse.Namespace,
    settings: Inspection,
    tokenizer: PreTrainedTokenizerBase,
    coloured: bool,
) -> dict[str, Any]:
    """Print a sequence document by document, and its mask; returns its counts."""
    group, length = read_sequence(settings, tokenizer, args.sequence)
    used = size_of(group)
    supervised = sum(sum(row.supervised) for row in group)
    print(
        f"\n{title(f'sequence {args.sequence}', coloured)}: {len(group)} documents, {used} tokens, "
        f"{supervised} supervised, padded to {length}"
    )
    start, documents = 0, []
    for number, row in enumerate(group):
        size = len(row.ids)
        place = f"columns {start} to {start + size - 1}, positions 0 to {size - 1}"
        heading = f"document {number} (data row {row.number}): {place}; {counted(row)}"
        print(f"\n{title(heading, coloured)}\n{render(tokenizer, row, coloured)}")
        documents.append({"row": row.number, "start": start, "tokens": size})
        start += size
    if used < length:
        print(f"\n{title(f'padding: columns {used} to {length - 1}', coloured)}")
    if args.mask is not None:
        family, columns = args.mask or settings.family, column_range(args.columns, length)
        assert family is not None, "checked with the options"
        print(f"\n{title(f'{family}: # is seen by the row', coloured)}")
        view = view_of(group, length, columns, tokenizer)
        print(draw_mask(family, view, args.depth, settings.window))
    return {
        "sequence": args.sequence,
        "length": length,
        "tokens": used,
        "supervised": supervised,
        "documents": documents,
    }


def read_sequence(
    settings: Inspection, tokenizer: PreTrainedTokenizerBase, number: int
) -> tuple[list[TokenizedRow], int]:
    """Documents of a sequence, and the length it is padded to.

    Raises:
        ValueError: there is no such sequence, or a row without a mask stops the run.
    """
    encode = partial(encode_rows_of, tokenizer)
    common: dict[str, Any] = {
        "length": settings.max_length,
        "batch_size": settings.batch_size,
        "seed": settings.seed,
        "packed": settings.packed,
    }
    if settings.streaming:
        stream = StreamedDataset(
            settings.sources,
            encode,
            shuffle_buffer=settings.shuffle_buffer,
            split=settings.split,
            limit=settings.limit,
            skip_bad=settings.skip_bad,
            **common,
        )
        return stream.sequence(number), settings.max_length
    rows = encode_all(read_rows(settings), encode, settings.skip_bad)
    dataset = PackedDataset(rows, buckets=settings.buckets, **common)
    if number >= len(dataset.groups):
        raise ValueError(
            f"--sequence {number}: the data make {len(dataset.groups)} sequences, the last being "
            f"{len(dataset.groups) - 1}"
        )
    return dataset.groups[number], dataset.padded[number]


def column_range(text: str, length: int) -> range:
    """A:B as columns of a sequence.

    Raises:
        ValueError: not such a range, outside the sequence, or too many to draw.
    """
    first, _, end = text.partition(":")
    try:
        columns = range(int(first), min(int(end), length))
    except ValueError as error:
        raise ValueError(f"--columns {text}: give them as A:B") from error
    if not 0 <= columns.start < columns.stop or len(columns) > MOST_COLUMNS:
        raise ValueError(
            f"--columns {text}: name 1 to {MOST_COLUMNS} columns of 0:{length} to draw them"
        )
    return columns


def view_of(
    group: Sequence[TokenizedRow],
    length: int,
    columns: range,
    tokenizer: PreTrainedTokenizerBase,
) -> View:
    """Some columns of a sequence, as they are drawn."""
    documents, supervised, tokens = [-1] * length, [False] * length, ["padding"] * length
    start = 0
    for number, row in enumerate(group):
        for place, (token, flag) in enumerate(zip(row.ids, row.supervised, strict=True), start):
            documents[place], supervised[place] = number, flag
            if place in columns:
                tokens[place] = tokenizer.decode([token])
        start += len(row.ids)
    part = slice(columns.start, columns.stop)
    return View(
        torch.tensor(documents[part]),
        torch.tensor(supervised[part]),
        tokens[part],
        columns.start,
    )


# Text -------------------------------------------------------------------------------------------


def counted(row: TokenizedRow) -> str:
    """Its size, in words."""
    size, marked = len(row.ids), sum(row.supervised)
    return f"{size} tokens, {marked} supervised ({marked / size:.1%})"


def render(tokenizer: PreTrainedTokenizerBase, row: TokenizedRow, coloured: bool) -> str:
    """The text of a row, supervised spans marked."""
    return "".join(mark(text, flag, coloured) for text, flag in spans(tokenizer, row))


def spans(tokenizer: PreTrainedTokenizerBase, row: TokenizedRow) -> Iterator[tuple[str, bool]]:
    """Text of each run of tokens that are all supervised, or all not.

    A run is decoded together with what stands before it, because tokenizers treat the beginning of
    a text specially; where that changes the earlier text, as in the middle of a character, it is
    decoded alone.
    """
    done, before = 0, ""
    for flag, run_of in groupby(row.supervised):
        end = done + len(list(run_of))
        text = tokenizer.decode(row.ids[:end], skip_special_tokens=False)
        whole = text.startswith(before)
        yield (text[len(before) :] if whole else tokenizer.decode(row.ids[done:end])), flag
        done, before = end, text


def mark(text: str, supervised: bool, coloured: bool) -> str:
    """One span, without control characters that would act on the terminal."""
    shown = "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text)
    if coloured:
        return f"{SUPERVISED if supervised else DIM}{shown}{RESET}"
    return f"[[{shown}]]" if supervised else shown


def title(text: str, coloured: bool) -> str:
    """A heading."""
    return f"{BOLD}{text}{RESET}" if coloured else text


def legend(coloured: bool) -> str:
    """How to read what follows."""
    return f"legend: {mark('supervised', True, coloured)} {mark('not supervised', False, coloured)}"


if __name__ == "__main__":
    run(main)
