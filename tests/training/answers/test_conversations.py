"""Scripts with gaps, and what fills them: every assistant turn in order, exact ids kept."""

from typing import Any

import pytest

from training.answers.conversations import (
    GAP,
    Conversation,
    plan_conversation,
    prompt_messages,
    script_of,
)
from training.data.messages import MaskError

SYSTEM = {"role": "system", "content": "be kind"}
ONE, TWO = {"role": "user", "content": "one"}, {"role": "user", "content": "two"}
OLD = {"role": "assistant", "content": "old"}
FUNCTION = {"name": "f", "arguments": {"a": 1}}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": FUNCTION}],
}
RESULT = {"role": "tool", "content": "4"}


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def planned(row: dict, temperatures: tuple = (0.0,), seed: int = 0) -> Conversation:
    return plan_conversation(row, temperatures, 16, seed, ["me"])


# --- scripts


@pytest.mark.parametrize(
    ("messages", "script"),
    [
        ([ONE], [ONE, GAP]),
        ([ONE, OLD], [ONE, GAP]),
        ([ONE, OLD, OLD], [ONE, GAP]),
        ([SYSTEM, ONE, OLD, TWO], [SYSTEM, ONE, GAP, TWO, GAP]),
        ([SYSTEM, ONE, OLD, OLD, TWO, OLD], [SYSTEM, ONE, GAP, TWO, GAP]),
        ([ONE, TWO], [ONE, TWO, GAP]),
        ([OLD, ONE, OLD], [OLD, ONE, GAP]),
        ([SYSTEM, OLD, ONE], [SYSTEM, OLD, ONE, GAP]),
        ([ONE, CALL, RESULT, OLD], [ONE, CALL, RESULT, GAP]),
        ([ONE, OLD, CALL, RESULT], [ONE, OLD, CALL, RESULT, GAP]),
        ([ONE, OLD, TWO, CALL, RESULT, OLD], [ONE, GAP, TWO, CALL, RESULT, GAP]),
        ([ONE, CALL], [ONE, GAP]),
    ],
)
def test_gaps_are_where_the_target_writes(messages: list, script: list) -> None:
    """A greeting before any user, and a turn whose tool call was answered, stay as they are."""
    found = script_of({"messages": messages})
    assert found == script
    assert all((one is GAP) == (want is GAP) for one, want in zip(found, script, strict=True))


def test_prompts_and_turns() -> None:
    assert script_of({"prompt": "one"}) == [ONE, GAP]
    assert script_of({"turns": ["one", "two"]}) == [ONE, GAP, TWO, GAP]
    assert script_of({"messages": [ONE], "turns": ["two"]}) == [ONE, GAP]
    assert prompt_messages({"turns": ["one", "two"]}) == [ONE]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "row has no prompt"),
        ({"turns": []}, "row has no prompt"),
        ({"prompt": "one", "images": ["x.png"]}, "column 'images'"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input_audio"),
        ({"turns": ["one", None]}, "message 1"),
    ],
    ids=str,
)
def test_rows_that_cannot_be_asked_are_refused(row: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        script_of(row)


# --- filling in


def test_turns_see_the_history_that_was_written() -> None:
    one = planned({"messages": [SYSTEM, ONE, OLD, TWO, OLD]})
    assert one.messages == [SYSTEM, ONE]
    one.add(said("new"), "stop")
    assert one.messages == [SYSTEM, ONE, said("new"), TWO] and not one.done
    one.add(said("newer"), "length")
    assert one.done
    record = one.record()
    assert record["messages"] == [SYSTEM, ONE, said("new"), TWO, said("newer")]
    assert record["written"] == [{"turn": 2, "finish": "stop"}, {"turn": 4, "finish": "length"}]
    assert not {"prompt_ids", "answer_ids", "token_rows"} & record.keys()


def test_ids_that_continue_are_one_row() -> None:
    one = planned({"turns": ["one", "two"]})
    one.add(said("a"), "stop", [1, 2], [3, 4])
    one.add(said("b"), "stop", [1, 2, 3, 4, 5, 6], [7])
    assert one.record()["token_rows"] == [{"ids": [1, 2, 3, 4, 5, 6, 7], "spans": [[2, 4], [6, 7]]}]


def test_ids_of_a_rewritten_history_are_a_row_each() -> None:
    one = planned({"turns": ["one", "two"]})
    one.add(said("a"), "stop", [1, 2], [3, 4])
    one.add(said("b"), "stop", [1, 2, 4, 5, 6], [7])
    assert one.record()["token_rows"] == [
        {"ids": [1, 2, 3, 4], "spans": [[2, 4]]},
        {"ids": [1, 2, 4, 5, 6, 7], "spans": [[5, 6]]},
    ]


def test_a_single_answer_keeps_its_plain_columns() -> None:
    one = planned({"prompt": "one", "answer_ids": [9], "written": [], "category": "c"})
    one.add(said("a"), "stop", [1, 2], [3, 4])
    record = one.record()
    assert (record["prompt_ids"], record["answer_ids"]) == ([1, 2], [3, 4])
    assert record["category"] == "c" and "token_rows" not in record
    assert record["written"] == [{"turn": 1, "finish": "stop", "tokens": 2}]


def test_ids_of_some_turns_are_not_kept() -> None:
    """A mask made of some turns would leave others out in silence."""
    one = planned({"turns": ["one", "two"]})
    one.add(said("a"), "stop", [1, 2], [3, 4])
    one.add(said("b"), "stop")
    assert not {"prompt_ids", "answer_ids", "token_rows"} & one.record().keys()


def test_a_conversation_ends_where_the_target_calls_a_tool() -> None:
    one = planned({"turns": ["one", "two"]})
    one.add(CALL, "stop")
    assert one.done and one.record()["messages"] == [ONE, CALL]


def test_stopping_leaves_what_is_answered() -> None:
    one = planned({"turns": ["one", "two"]})
    one.add(said("a"), "stop", [1], [2])
    one.stop()
    assert one.record()["messages"] == [ONE, said("a")]
    assert one.record()["answer_ids"] == [2]


# --- identity


def test_the_identity_of_older_files_is_kept() -> None:
    """Answers that were paid for are found again."""
    assert planned({"prompt": "one"}).key == "a51aaa98591ab299"
    assert planned({"messages": [ONE, OLD]}).key == planned({"prompt": "one"}).key


def test_old_answers_are_not_part_of_the_identity_and_tools_are() -> None:
    other = {"role": "assistant", "content": "another"}
    talk = [planned({"messages": [ONE, answer, TWO]}).key for answer in (OLD, other)]
    assert talk[0] == talk[1] != planned({"messages": [ONE, TWO]}).key
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert planned({"prompt": "one", "tools": tools}).key != planned({"prompt": "one"}).key


def test_temperatures_are_dealt_by_the_prompt() -> None:
    rows = [{"prompt": f"say {i}"} for i in range(300)]
    mix = (0.0, 0.5, 1.0)
    dealt = [planned(row, mix).temperature for row in rows]
    assert [planned(row, mix).temperature for row in reversed(rows)] == dealt[::-1]
    assert all(80 < dealt.count(t) < 120 for t in mix)


def test_consecutive_seeds_take_every_temperature() -> None:
    mix = (0.0, 0.5, 1.0)
    for row in ({"prompt": "x"}, {"prompt": "y"}):
        assert {planned(row, mix, seed).temperature for seed in (7, 8, 9)} == {*mix}


def test_media_are_refused_by_name() -> None:
    with pytest.raises(MaskError, match="'audio'"):
        script_of({"prompt": "one", "audio": {"path": "x.wav"}})
