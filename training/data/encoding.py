"""Data rows to tokenised ones, and what happens to a row that cannot be masked."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from training.data.chat import TokenizedRow, encode_rows_of
from training.data.messages import MaskError

logger = logging.getLogger(__name__)
Encode = Callable[[dict[str, Any]], list[TokenizedRow]]
"""A data row to its tokens and masks, more than one where the chat template rewrites history;
raises MaskError where they cannot be told."""


def encode_checked(
    tokenizer: PreTrainedTokenizerBase, vocab_size: int, row: dict[str, Any]
) -> list[TokenizedRow]:
    """Tokenise one data row for a target of ``vocab_size`` tokens.

    Raises:
        MaskError: its mask cannot be established, or its ids are another tokenizer's.
    """
    encoded = encode_rows_of(tokenizer, row)
    highest = max(max(one.ids) for one in encoded)
    if highest >= vocab_size:
        raise MaskError(
            f"token {highest} is outside the target's vocabulary of {vocab_size}: these "
            "ids are another tokenizer's"
        )
    return encoded


def refusal(name: str, error: MaskError) -> MaskError:
    """The error of a run that a row stops."""
    return MaskError(
        f"data {name}: {error}. Mend it, or leave such rows out with data.skip_bad_rows=true"
    )


def encode_all(
    rows: Iterable[dict[str, Any]], encode: Encode, skip_bad: bool = False
) -> list[TokenizedRow]:
    """Tokenise rows, numbered in order.

    Args:
        rows: of the data set.
        encode: of one row.
        skip_bad: leave out rows whose mask cannot be established, and say how many.

    Raises:
        MaskError: naming the row that refuses the run.
        ValueError: no row is left.
    """
    encoded: list[TokenizedRow] = []
    seen = refused = 0
    for row in rows:
        seen += 1
        try:
            found = encode(row)
        except MaskError as error:
            if not skip_bad:
                raise refusal(f"row {seen - 1}", error) from error
            refused += 1
        else:
            encoded += [replace(one, number=len(encoded) + i) for i, one in enumerate(found)]
    if not encoded:
        raise ValueError("data: no usable row is left")
    if refused:
        logger.warning(
            "data: left out %d of %d rows whose mask cannot be established", refused, seen
        )
    return encoded
