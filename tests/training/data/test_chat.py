"""Supervised masks: exact, or the row is refused."""

import json

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from tests.tiny import CHARACTERS, CHATML, END, SPECIALS, START, UNK, tiny_tokenizer
from training.data.chat import (
    MaskError,
    TokenizedRow,
    encode_messages,
    encode_prompt,
    encode_row,
    encode_rows_of,
    require_chat_template,
)
from training.data.messages import check_messages, clean_messages, clean_tools, to_server

CHATML_MARKED = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED_EVERYTHING = (
    "{% generation %}{% for message in messages %}{{ message['content'] }}{% endfor %}"
    "{% endgeneration %}"
)
MARKED_NOTHING = (
    "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    "{% generation %}{% endgeneration %}"
)
FORGETS_THOUGHTS = (
    "{% for message in messages %}"
    "{% set content = message['content'] if loop.last else message['content'].split('=')[-1] %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + content + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PROMPT_DIFFERS = CHATML.replace("assistant\n' }}{% endif %}", "assistant\nthink' }}{% endif %}")
REFUSES_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role here') }}"
    "{% endif %}"
)

TALK = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "one plus one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "and one more"},
    {"role": "assistant", "content": "three, I think"},
]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


def spans(tokenizer: PreTrainedTokenizerFast, row: TokenizedRow) -> list[str]:
    """Text of every run of supervised tokens."""
    found, current = [], []
    for token, supervised in [*zip(row.ids, row.supervised, strict=True), (0, False)]:
        if supervised:
            current.append(token)
        elif current:
            found.append(tokenizer.decode(current))
            current = []
    return found


def rendered(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, str]]) -> list[int]:
    return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)


# --- exact masks


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED], ids=["rendering", "markers"])
def test_exactly_the_assistant_turns_are_supervised(
    tokenizer: PreTrainedTokenizerFast, template: str
) -> None:
    tokenizer.chat_template = template
    row = encode_row(tokenizer, {"messages": TALK})
    assert row.ids == rendered(tokenizer, TALK)
    assert spans(tokenizer, row) == ["two<|im_end|>", "three, I think<|im_end|>"]


def test_mask_token_by_token(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    row = encode_messages(tokenizer, messages)
    tokens = tokenizer.convert_ids_to_tokens(row.ids)
    header = [START, *"assistant", "\n"]
    assert tokens == [START, *"user", "\n", "h", "i", END, "\n", *header, "y", "o", END, "\n"]
    assert row.supervised == [False] * (len(tokens) - 4) + [True, True, True, False]


def test_the_prompt_ends_where_supervision_begins(tokenizer: PreTrainedTokenizerFast) -> None:
    """What training masks out is what decoding starts from."""
    for turn in (2, 4):
        row = encode_messages(tokenizer, TALK[: turn + 1])
        prompt = encode_prompt(tokenizer, TALK[:turn])
        assert row.ids[: len(prompt)] == prompt
        last = max(i for i, flag in enumerate(row.supervised) if not flag and i < len(row.ids) - 1)
        assert last == len(prompt) - 1


def test_a_turn_equal_to_another_is_supervised_only_for_the_assistant(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    messages = [{"role": "user", "content": "same"}, {"role": "assistant", "content": "same"}]
    row = encode_messages(tokenizer, messages)
    assert spans(tokenizer, row) == ["same<|im_end|>"]
    assert row.supervised.index(True) > len(row.ids) // 2


def test_an_empty_answer_supervises_its_end(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [{"role": "user", "content": "say nothing"}, {"role": "assistant", "content": ""}]
    assert spans(tokenizer, encode_messages(tokenizer, messages)) == [END]


def test_answer_ids_are_taken_as_they_are(tokenizer: PreTrainedTokenizerFast) -> None:
    row = encode_row(tokenizer, {"prompt_ids": [5, 6, 7], "answer_ids": [8, 2], "messages": TALK})
    assert row == TokenizedRow([5, 6, 7, 8, 2], [False, False, False, True, True])


def test_answer_ids_need_no_chat_template(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = None
    assert encode_row(tokenizer, {"prompt_ids": [5], "answer_ids": [8]}).supervised == [False, True]


def test_text_supervises_all_but_the_first_token(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = None
    row = encode_row(tokenizer, {"text": "abc"})
    assert row == TokenizedRow(tokenizer("abc")["input_ids"], [False, True, True])


# --- refusals


def test_template_that_rewrites_history_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = FORGETS_THOUGHTS
    talk = [dict(message) for message in TALK[1:]]
    talk[1]["content"] = "thinking=two"
    with pytest.raises(MaskError, match="rewrites history"):
        encode_messages(tokenizer, talk)
    # the same template is exact where nothing is rewritten
    assert spans(tokenizer, encode_messages(tokenizer, talk[:2])) == ["thinking=two<|im_end|>"]
    assert len(spans(tokenizer, encode_messages(tokenizer, TALK[1:]))) == 2


def test_generation_prompt_that_is_not_the_header_is_refused(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    tokenizer.chat_template = PROMPT_DIFFERS
    assert tokenizer.chat_template != CHATML
    with pytest.raises(MaskError, match="turn 2"):
        encode_messages(tokenizer, TALK[:3])


def test_tokens_merged_across_the_header_are_refused() -> None:
    """A tokenizer that joins the header's newline with the answer's first letter."""
    tokens = [*SPECIALS, *CHARACTERS, "\nt"]
    backend = Tokenizer(
        BPE({token: i for i, token in enumerate(tokens)}, [("\n", "t")], unk_token=UNK)
    )
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token=UNK,
        bos_token=START,
        eos_token=END,
        chat_template=CHATML,
        clean_up_tokenization_spaces=False,
    )
    question = {"role": "user", "content": "one plus one"}
    with pytest.raises(MaskError, match="merges tokens"):
        encode_messages(tokenizer, [question, {"role": "assistant", "content": "two"}])
    answer = {"role": "assistant", "content": "it is two"}
    assert spans(tokenizer, encode_messages(tokenizer, [question, answer])) == ["it is two" + END]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": TALK[:2]},
        {"messages": [{"role": "user", "content": "hello"}]},
        {"prompt_ids": [5, 6], "answer_ids": []},
    ],
    ids=["last turn is the user's", "no assistant", "empty answer"],
)
def test_all_zero_mask_is_refused(tokenizer: PreTrainedTokenizerFast, row: dict) -> None:
    with pytest.raises(MaskError, match="no token of this row is supervised"):
        encode_row(tokenizer, row)


def test_all_zero_mask_from_markers_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = MARKED_NOTHING
    with pytest.raises(MaskError, match="no token of this row is supervised"):
        encode_row(tokenizer, {"messages": TALK})


def test_all_one_mask_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(MaskError, match="every token of this row is supervised"):
        encode_row(tokenizer, {"prompt_ids": [], "answer_ids": [5, 6]})
    tokenizer.chat_template = MARKED_EVERYTHING
    with pytest.raises(MaskError, match="every token of this row is supervised"):
        encode_row(tokenizer, {"messages": TALK})


def test_missing_chat_template_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    assert require_chat_template(tokenizer) == CHATML
    tokenizer.chat_template = None
    for encode in (encode_prompt, encode_messages):
        with pytest.raises(ValueError, match="no chat template"):
            encode(tokenizer, TALK)
    with pytest.raises(ValueError, match=r"data\.chat_template"):
        encode_row(tokenizer, {"messages": TALK})


@pytest.mark.parametrize("text", ["", "a"])
def test_text_without_a_prediction_is_refused(
    tokenizer: PreTrainedTokenizerFast, text: str
) -> None:
    with pytest.raises(MaskError, match="too short"):
        encode_row(tokenizer, {"text": text})


def test_row_without_any_known_column_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(MaskError, match=r"answer_ids: \['conversation'\]"):
        encode_row(tokenizer, {"conversation": "hello"})


def test_prompt_only_row_is_refused_with_its_cure(tokenizer: PreTrainedTokenizerFast) -> None:
    """There is nothing to learn from a prompt alone, and `prompt` is not what it lacks."""
    with pytest.raises(MaskError, match="regenerate"):
        encode_row(tokenizer, {"prompt": "hello"})


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "human", "content": "hi"}],
        [{"role": "user", "content": None}],
        [{"role": "user"}],
        [{"content": "hi"}],
        [{"role": "user", "content": [{"type": "image"}]}],
    ],
    ids=["empty", "role", "none", "no content", "no role", "parts"],
)
def test_malformed_messages_are_refused(messages: list) -> None:
    with pytest.raises(MaskError, match=r"messages is empty|message 0"):
        check_messages(messages)


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED], ids=["rendering", "markers"])
def test_refusal_of_the_template_itself_is_a_mask_error(
    tokenizer: PreTrainedTokenizerFast, template: str
) -> None:
    tokenizer.chat_template = REFUSES_SYSTEM + template
    with pytest.raises(MaskError, match="no system role here"):
        encode_row(tokenizer, {"messages": TALK})
    assert any(encode_row(tokenizer, {"messages": TALK[1:3]}).supervised)


# --- conversations whose history the template rewrites, cut turns, tools

# As thinking models' templates: a thought ("thinking=") stands in the last turn, not in history.
THINKING = [
    {"role": "user", "content": "one plus one"},
    {"role": "assistant", "content": "thinking=two"},
    {"role": "user", "content": "and one more"},
    {"role": "assistant", "content": "so=three"},
]
FORGETS_MARKED = FORGETS_THOUGHTS.replace(
    "content + '<|im_end|>' + '\n' }}",
    "'' }}{% if message['role'] == 'assistant' %}{% generation %}{{ content + '<|im_end|>' }}"
    "{% endgeneration %}{% else %}{{ content + '<|im_end|>' }}{% endif %}{{ '\n' }}",
)
WITH_TOOLS = (
    "{% for tool in tools or [] %}{{ 'tool ' + tool.function.name + '\n' }}{% endfor %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message.reasoning_content %}{{ 'hm ' + message.reasoning_content + '. ' }}{% endif %}"
    "{{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ call.function.name + ' ' + call.function.arguments.a|string }}{% endfor %}"
    "{{ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize("template", [FORGETS_THOUGHTS, FORGETS_MARKED], ids=["render", "markers"])
def test_rewritten_history_makes_a_row_per_turn(
    tokenizer: PreTrainedTokenizerFast, template: str
) -> None:
    """Each as the target saw it: its own thought is there, the earlier one is not."""
    tokenizer.chat_template = template
    rows = encode_rows_of(tokenizer, {"messages": THINKING})
    assert [spans(tokenizer, row) for row in rows] == [["thinking=two" + END], ["so=three" + END]]
    for row, turn in zip(rows, (1, 3), strict=True):
        assert row.ids == rendered(tokenizer, THINKING[: turn + 1])
        assert row.ids[: row.supervised.index(True)] == encode_prompt(tokenizer, THINKING[:turn])
    assert "thinking" not in tokenizer.decode(rows[1].ids)
    with pytest.raises(MaskError, match=r"rewrites history.* 2 rows"):
        encode_row(tokenizer, {"messages": THINKING})


@pytest.mark.parametrize("template", [FORGETS_THOUGHTS, FORGETS_MARKED, CHATML], ids=str)
def test_a_history_that_stays_is_one_row(tokenizer: PreTrainedTokenizerFast, template: str) -> None:
    tokenizer.chat_template = template
    (row,) = encode_rows_of(tokenizer, {"messages": TALK})
    assert spans(tokenizer, row) == ["two<|im_end|>", "three, I think<|im_end|>"]
    assert row == encode_row(tokenizer, {"messages": TALK})


def test_a_prompt_that_is_no_prefix_is_refused_in_every_turn(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    """One row per turn is no way out where not even a turn alone is exact."""
    tokenizer.chat_template = FORGETS_THOUGHTS.replace(
        "assistant\n' }}{% endif %}", "assistant\nzz' }}{% endif %}"
    )
    with pytest.raises(MaskError, match="turn 1"):
        encode_rows_of(tokenizer, {"messages": THINKING})


def test_only_what_the_target_wrote_is_supervised(tokenizer: PreTrainedTokenizerFast) -> None:
    for template in (CHATML, CHATML_MARKED):
        tokenizer.chat_template = template
        written = [{"turn": 4, "finish": "stop"}]
        (row,) = encode_rows_of(tokenizer, {"messages": TALK, "written": written})
        assert spans(tokenizer, row) == ["three, I think<|im_end|>"]
        assert row.ids == rendered(tokenizer, TALK)


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED], ids=["rendering", "markers"])
def test_the_end_of_a_cut_turn_is_not_supervised(
    tokenizer: PreTrainedTokenizerFast, template: str
) -> None:
    """Also within a conversation: the end is there as context, but the target did not write it."""
    tokenizer.chat_template = template
    written = [{"turn": 2, "finish": "length"}, {"turn": 4, "finish": "stop"}]
    (row,) = encode_rows_of(tokenizer, {"messages": TALK, "written": written})
    assert row.ids == rendered(tokenizer, TALK)
    assert spans(tokenizer, row) == ["two", "three, I think<|im_end|>"]
    written = [{"turn": 2, "finish": "stop"}, {"turn": 4, "finish": "length"}]
    (row,) = encode_rows_of(tokenizer, {"messages": TALK, "written": written})
    assert spans(tokenizer, row) == ["two<|im_end|>", "three, I think"]


@pytest.mark.parametrize(
    "change",
    [
        ("message['content'] + ", "message['content'] + '!' + "),
        ("<|im_end|>' + '\n'", "' + '\n'"),
    ],
    ids=["text before the end", "no end token"],
)
def test_a_cut_turn_is_refused_where_its_end_is_not_known(
    tokenizer: PreTrainedTokenizerFast, change: tuple[str, str]
) -> None:
    tokenizer.chat_template = CHATML.replace(*change)
    assert tokenizer.chat_template != CHATML
    cut = [{"turn": 1, "finish": "length"}]
    row = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}
    assert encode_rows_of(tokenizer, row)
    with pytest.raises(MaskError, match="turn 1 was cut short"):
        encode_rows_of(tokenizer, row | {"written": cut})


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ([{"turn": 1, "finish": "stop"}], "message 1, which is no assistant"),
        ([{"turn": 9, "finish": "stop"}], "message 9"),
        ([{"turn": 2, "finish": "tired"}], "ends by 'tired'"),
        ([], "no token of this row is supervised"),
    ],
    ids=str,
)
def test_a_wrong_list_of_written_turns_is_refused(
    tokenizer: PreTrainedTokenizerFast, written: list, message: str
) -> None:
    with pytest.raises(MaskError, match=message):
        encode_rows_of(tokenizer, {"messages": TALK, "written": written})


def test_token_rows_are_taken_as_they_are(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = None
    given = [{"ids": [5, 6, 7, 8], "spans": [[1, 2], [3, 4]]}, {"ids": [5, 9], "spans": [[1, 2]]}]
    assert encode_rows_of(tokenizer, {"token_rows": given, "messages": TALK}) == [
        TokenizedRow([5, 6, 7, 8], [False, True, False, True]),
        TokenizedRow([5, 9], [False, True]),
    ]
    for spans_ in ([[1, 5]], [[3, 2]], [[-1, 2]]):
        with pytest.raises(MaskError, match="outside the 4 tokens"):
            encode_rows_of(tokenizer, {"token_rows": [{"ids": [5, 6, 7, 8], "spans": spans_}]})


def test_tools_calls_and_thoughts_reach_the_template(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = WITH_TOOLS
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 7}'}}
    talk = [
        {"role": "user", "content": "hi", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "so"},
        {"role": "tool", "content": "9"},
        {"role": "assistant", "content": "nine"},
    ]
    tools = [{"type": "function", "function": {"name": "add", "description": None}}]
    wanted = ["hm so. add 7<|im_end|>", "nine<|im_end|>"]
    for given in (tools, json.dumps(tools)):
        (row,) = encode_rows_of(tokenizer, {"messages": talk, "tools": given})
        assert tokenizer.decode(row.ids).startswith("tool add\n<|im_start|>user\nhi<|im_end|>")
        assert spans(tokenizer, row) == wanted
    assert talk[1]["tool_calls"][0]["function"]["arguments"] == '{"a": 7}', "left as it was"
    prompt = encode_prompt(tokenizer, talk[:1], clean_tools(tools))
    assert row.ids[: len(prompt)] == prompt


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": TALK, "images": ["a.png"]}, "'images'"),
        ({"messages": TALK, "audio": {"path": "a"}}, "'audio'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
        ({"messages": TALK, "tools": "{"}, "'tools' is not JSON"),
        ({"messages": TALK, "tools": ["add"]}, "'tools' must be a list"),
    ],
    ids=str,
)
def test_what_is_not_text_is_refused_by_name(
    tokenizer: PreTrainedTokenizerFast, row: dict, message: str
) -> None:
    with pytest.raises(MaskError, match=message):
        encode_rows_of(tokenizer, row)


def test_arguments_that_are_not_json_are_refused() -> None:
    call = {"function": {"name": "f", "arguments": "{"}}
    with pytest.raises(MaskError, match="message 0 calls a tool"):
        clean_messages([{"role": "assistant", "tool_calls": [call]}])


def test_servers_get_arguments_as_text() -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": {"a": 1}}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    (sent,) = to_server([message])
    assert sent["tool_calls"] == [{"id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}}]
    assert clean_messages([sent]) == [message]
