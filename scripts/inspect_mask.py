"""Show what a head would learn from: the supervised tokens of the first rows of a data set.

    python -m scripts.inspect_mask --target targets/smollm2-135m --data answers.jsonl --limit 3

Supervised text is coloured and the rest dim; where the output is no terminal, or NO_COLOR is set,
supervised text stands in [[ ]]. Only the target's tokenizer is loaded. A row whose mask cannot be
established is shown with the reason. The last line is one JSON object.
"""

import os
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from scripts.common import add_options, check_chat_template, parser_for, print_json, run
from training.chat import MaskError, TokenizedRow, encode_row
from training.data import load_rows

SUPERVISED, DIM, BOLD, RESET = "\x1b[1;32m", "\x1b[2m", "\x1b[1m", "\x1b[0m"


def main(argv: list[str] | None = None) -> None:
    """Print the rows, print the counts."""
    parser = parser_for(__doc__)
    add_options(parser, "--target")
    parser.add_argument(
        "--data", "--prompts", dest="data", required=True, metavar="NAME", help="file or hub id"
    )
    parser.add_argument("--split", default="train", help="of a hub data set (default: train)")
    parser.add_argument("--limit", type=int, default=3, metavar="N", help="rows (default: 3)")
    add_options(parser, "--chat-template")
    args = parser.parse_args(argv)
    if args.limit < 1:
        raise ValueError(f"--limit must be at least 1, got {args.limit}")
    tokenizer = load_tokenizer(args.target, args.chat_template)
    rows = load_rows(args.data, args.split, args.limit)
    if any(row.get("messages") and row.get("answer_ids") is None for row in rows):
        check_chat_template(tokenizer)
    coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    print(legend(coloured))
    tokens = supervised = 0
    refused = []
    for number, row in enumerate(rows):
        try:
            encoded = encode_row(tokenizer, row)
        except MaskError as error:
            print(f"\n{title(f'row {number}: refused: {error}', coloured)}")
            refused.append({"row": number, "reason": str(error)})
            continue
        size, marked = len(encoded.ids), sum(encoded.supervised)
        counts = f"row {number}: {size} tokens, {marked} supervised ({marked / size:.1%})"
        print(f"\n{title(counts, coloured)}\n{render(tokenizer, encoded, coloured)}")
        tokens, supervised = tokens + size, supervised + marked
    record = {"rows": len(rows), "tokens": tokens, "supervised": supervised, "refused": refused}
    print()
    print_json(record)


def load_tokenizer(name: str, chat_template: Path | None) -> PreTrainedTokenizerBase:
    """The target's tokenizer, with another chat template where one is given.

    Raises:
        ValueError: it cannot be loaded.
        OSError: the template cannot be read.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, ...
        raise ValueError(f"target {name!r}: cannot load its tokenizer: {error}") from error
    if chat_template is not None:
        tokenizer.chat_template = chat_template.read_text(encoding="utf-8")
    return tokenizer


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
