"""Supervised masks: exact, or the row is refused."""

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from tests.tiny import CHARACTERS, CHATML, END, SPECIALS, START, UNK, tiny_tokenizer
from training.chat import (
    MaskError,
    TokenizedRow,
    check_messages,
    encode_messages,
    encode_prompt,
    encode_row,
    require_chat_template,
)

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
