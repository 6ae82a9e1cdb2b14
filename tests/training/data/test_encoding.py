"""Rows of a data set to numbered training rows; one without a mask stops the run or is counted."""

import logging
from functools import partial

import pytest

from tests.tiny import tiny_tokenizer
from training.data.encoding import encode_all, encode_checked
from training.data.messages import MaskError

TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
ROWS = [{"text": "abc"}, {"messages": TALK[:1]}, {"messages": TALK}, {"prompt": "no answer"}]


def encode(row: dict, vocab: int = 96):
    return encode_checked(tiny_tokenizer(), vocab, row)


def test_a_row_without_a_mask_is_named() -> None:
    with pytest.raises(MaskError, match=r"^data row 1: no token.*data\.skip_bad_rows=true$"):
        encode_all(ROWS, encode)


def test_or_left_out_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = encode_all(ROWS, encode, skip_bad=True)
    assert [one.number for one in found] == [0, 1]
    assert found[1].ids == encode(ROWS[2])[0].ids
    assert "left out 2 of 4 rows" in caplog.text


def test_a_row_may_be_several() -> None:
    found = encode_all([{"text": "abc"}], lambda row: encode(row) * 3)
    assert [one.number for one in found] == [0, 1, 2]


def test_nothing_usable_is_refused() -> None:
    for rows in ([], ROWS[1:2]):
        with pytest.raises(ValueError, match="no usable row is left"):
            encode_all(rows, encode, skip_bad=True)


def test_another_tokenizer_s_ids_are_refused() -> None:
    row = {"prompt_ids": [1, 2], "answer_ids": [95]}
    (one,) = encode(row)
    assert one.ids == [1, 2, 95]
    with pytest.raises(MaskError, match="token 95 is outside the target's vocabulary of 95"):
        encode_all([row], partial(encode, vocab=95))
