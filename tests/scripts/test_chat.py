"""`scripts.chat`: whole characters from split tokens, the trace, and what the keys do."""

import itertools
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import scripts.chat as chat_module
from drafters import TargetModel
from inference.counts import RoundCounts
from inference.generate import plain_generate
from inference.proposers import TreeOptions, build_proposer
from inference.sampling import SamplingParams
from scripts.chat import COLOURS, RESET, Chat, Printer, TokenText, converse, main, use_colour
from tests.scripts.heads import save_models, tiny_head
from tests.tiny import tiny_target
from training.data.chat import encode_prompt


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, as the fallback of every byte-level tokenizer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({char: n for n, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Words with the space before them, which decoding drops at the start of a text."""
    backend = Tokenizer(
        models.WordLevel({"▁hello": 0, "▁big": 1, "▁world": 2, "<unk>": 3}, "<unk>")
    )
    backend.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


# Text from tokens


@pytest.mark.parametrize("text", ["plain", "naïve café", "日本 ok", "🙂🙃!", "e\u0301 \ufffd."])
def test_characters_are_given_out_whole(text: str) -> None:
    tokenizer = byte_tokenizer()
    stream = TokenText(tokenizer)
    pieces = [stream.add(token) for token in tokenizer(text)["input_ids"]]
    assert "".join(pieces) + stream.flush() == text
    if "\ufffd" not in text:
        assert [piece for piece in pieces if piece] == list(text)
        assert stream.flush() == ""


def test_a_text_that_ends_inside_a_character_still_ends() -> None:
    tokenizer = byte_tokenizer()
    stream = TokenText(tokenizer)
    ids = tokenizer("a🙂")["input_ids"][:-1]
    assert [stream.add(token) for token in ids] == ["a", "", "", ""]
    assert stream.flush() == "\ufffd"


def test_broken_bytes_do_not_hold_back_what_follows() -> None:
    tokenizer = byte_tokenizer()
    stream = TokenText(tokenizer)
    broken = tokenizer("é")["input_ids"][:1] + tokenizer("ab")["input_ids"]
    assert [stream.add(token) for token in broken] == ["", "\ufffda", "b"]


def test_spaces_between_tokens_are_kept() -> None:
    stream = TokenText(word_tokenizer())
    assert [stream.add(token) for token in (0, 1, 2)] == ["hello", " big", " world"]


# The trace


def one_round(
    accepted: list[int], next_token: int | None, all_accepted: bool, drafted: int = 3
) -> RoundCounts:
    emitted = accepted + ([] if next_token is None else [next_token])
    return RoundCounts(0, 9, drafted, drafted, len(accepted), emitted, all_accepted)


def trace(colour: bool, *rounds: RoundCounts, lines: bool = True) -> list[str]:
    """What is printed, by a clock that shows 0 at the prefill's token and a second per round."""
    written: list[str] = []
    ticks = itertools.count()
    text = TokenText(tiny_target().tokenizer)
    printer = Printer(text, lines, colour, written.append, clock=lambda: float(next(ticks)))
    printer.tokens(0, [10])  # the prefill's
    for done in rounds:
        printer.tokens(0, done.emitted)
        printer.round(done)
    printer.finish()
    return "".join(written).splitlines()


ROUNDS = (
    one_round([11], 20, False),
    one_round([11, 12, 13], 21, True),
    one_round([], 22, False),
    one_round([], 3, True, drafted=0),
)


def test_trace_has_one_line_per_forward_with_marks() -> None:
    """Tokens are letters: 10 is f, the root that the prefill gave."""
    text = tiny_target().tokenizer.decode(list(range(24)))
    letters = dict(enumerate(text.removeprefix("<unk><|im_start|><|im_end|>"), start=3))
    assert [line.split(maxsplit=4) for line in trace(False, *ROUNDS)] == [
        ["prefill", f".{letters[10]}"],
        ["1", "1/3", "2.00", "2.0", f"+{letters[11]} !{letters[20]}"],
        ["2", "3/3", "3.00", "3.0", f"+{letters[11]} +{letters[12]} +{letters[13]} *{letters[21]}"],
        ["3", "0/3", "2.33", "2.3", f"!{letters[22]}"],
        [
            "4",
            "0/0",
            "2.00",
            "2.0",
            "!\\n",
        ],  # nothing drafted, no bonus; token 3 is a line break, made visible
    ]


def test_running_text_shows_the_speed_in_the_title_of_a_terminal_alone() -> None:
    written = "".join(trace(True, *ROUNDS[:2], lines=False))
    titles = re.findall(r"\x1b\]2;(.*?)\x07", written)
    assert titles == ["length 2.00, 2.0 tokens/s", "length 3.00, 3.0 tokens/s", ""]
    assert "\x1b" not in "".join(trace(False, *ROUNDS[:2], lines=False))


def test_trace_colours() -> None:
    lines = trace(True, *ROUNDS)
    kinds = {name: code for name, code in COLOURS.items()}
    assert len(set(kinds.values())) == 4
    assert lines[1].count(kinds["accepted"]) == 1 and lines[1].count(kinds["recovered"]) == 1
    assert lines[2].count(kinds["accepted"]) == 3 and lines[2].count(kinds["bonus"]) == 1
    assert kinds["bonus"] not in lines[1] + lines[3] + lines[4]
    assert all(line.count(RESET) == line.count("\x1b[") - line.count(RESET) for line in lines)


def test_a_text_that_ends_with_an_accepted_draft_has_no_token_of_the_target() -> None:
    assert trace(False, one_round([11, 12], None, False))[-1].split()[-2][0] == "+"


@pytest.mark.parametrize(
    ("terminal", "no_color", "colour"),
    [(True, None, True), (True, "1", False), (True, "", True), (False, None, False)],
)
def test_colours_only_where_they_are_wanted(
    terminal: bool, no_color: str | None, colour: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color is not None:
        monkeypatch.setenv("NO_COLOR", no_color)
    assert use_colour() is colour


# Conversations


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return tiny_target()


def make_chat(target: TargetModel, written: list[str], trace: bool = False) -> Chat:
    proposer = build_proposer(tiny_head(target), TreeOptions(8, 3, 3))
    return Chat(target, proposer, SamplingParams(), "match", 16, trace, False, written.append)


def plain_answer(target: TargetModel, messages: list[dict[str, str]]) -> str:
    ids = encode_prompt(target.tokenizer, messages)
    tokens = plain_generate(target, [ids], max_new_tokens=16).sequences[0]
    return target.tokenizer.decode(tokens, skip_special_tokens=True)


def test_the_streamed_answer_is_that_of_plain_decoding(target: TargetModel) -> None:
    written: list[str] = []
    chat = make_chat(target, written)
    assert chat.answer("hello")
    first = plain_answer(target, [{"role": "user", "content": "hello"}])
    assert "".join(written).startswith(first + "\n[")
    assert "acceptance length" in written[-1] and "tokens/s" in written[-1]
    assert chat.messages[-1] == {"role": "assistant", "content": first}
    assert len(written) > 4, "it came in one piece"
    written.clear()
    chat.answer("and then?")  # the second answer sees the first
    asked = [*chat.messages[:2], {"role": "user", "content": "and then?"}]
    assert "".join(written).startswith(plain_answer(target, asked) + "\n[")


@pytest.mark.parametrize("trace", [False, True])
def test_the_first_token_is_shown_before_anything_is_drafted(
    target: TargetModel, trace: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    chat = make_chat(target, written, trace)
    shown_before: list[str] = []
    draft = chat.proposer.propose

    def propose(*args: Any) -> Any:
        shown_before.append("".join(written))
        return draft(*args)

    monkeypatch.setattr(chat.proposer, "propose", propose)
    assert chat.answer("hello")
    whole = plain_answer(target, [{"role": "user", "content": "hello"}])
    first = shown_before[0].splitlines()[-1].split()
    assert first == (["prefill", f".{whole[0]}"] if trace else [whole[0]])
    if not trace:  # and every later token in the round that gives it
        assert all(whole.startswith(text) for text in shown_before)
        assert len(set(shown_before)) == len(shown_before)


def test_an_answer_of_one_token_is_shown(target: TargetModel) -> None:
    """The prefill's token belongs to no round."""
    written: list[str] = []
    chat = make_chat(target, written)
    chat.max_new_tokens = 1
    assert chat.answer("hello") and len(written[0]) == 1
    assert "acceptance" not in written[-1]


def interrupt_after(rounds: int) -> Callable[..., Any]:
    """A decoder at which Ctrl-C arrives after some rounds."""
    decode = chat_module.speculative_generate

    def interrupted(*args: Any, on_counts: Callable[[RoundCounts], None], **kwargs: Any) -> Any:
        seen = 0

        def count(done: RoundCounts) -> None:
            nonlocal seen
            on_counts(done)
            seen += 1
            if seen == rounds:
                raise KeyboardInterrupt

        return decode(*args, on_counts=count, **kwargs)

    return interrupted


def test_ctrl_c_stops_the_answer_and_keeps_the_conversation(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    chat = make_chat(target, written)
    with monkeypatch.context() as patch:
        patch.setattr(chat_module, "speculative_generate", interrupt_after(3))
        assert not chat.answer("hello")
    whole = plain_answer(target, [{"role": "user", "content": "hello"}])
    partial = chat.messages[-1]["content"]
    assert partial and whole.startswith(partial) and len(partial) < len(whole)
    assert written[-1].startswith("[stopped; ")
    assert chat.answer("go on")


def test_ctrl_c_between_answers_does_not_end_the_program(
    target: TargetModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may come while the prompt is encoded, or while the summary is written."""

    def interrupted(*args: Any) -> list[int]:
        raise KeyboardInterrupt

    chat = make_chat(target, [])
    with monkeypatch.context() as patch:
        patch.setattr(chat_module, "encode_prompt", interrupted)
        patch.setattr("builtins.input", keys("hello", "hi", "/exit"))
        converse(chat)
    assert capsys.readouterr().out.count("[stopped]") == 2
    assert chat.messages == [] and chat.answer("hello")


def test_running_text_cannot_command_the_terminal() -> None:
    tokenizer, written = byte_tokenizer(), []
    printer = Printer(TokenText(tokenizer), False, False, written.append)
    text = "a\x1b[2J\x07b\n\tc 👩\u200d🚀"
    printer.tokens(0, tokenizer(text)["input_ids"])
    printer.finish()
    assert "".join(written) == "a\\x1b[2J\\x07b\n\tc 👩\u200d🚀\n" and printer.answer == text


def test_a_conversation_that_does_not_fit_says_what_to_do(target: TargetModel) -> None:
    chat = make_chat(target, [])
    with pytest.raises(ValueError, match="/new"):
        chat.answer("x" * 600)
    assert chat.messages == [] and chat.answer("short")


def keys(*typed: str | type[BaseException]) -> Callable[[str], str]:
    waiting: Iterator[str | type[BaseException]] = iter(typed)

    def read(prompt: str) -> str:
        key = next(waiting)
        if isinstance(key, str):
            return key
        raise key

    return read


@pytest.mark.parametrize("end", ["/exit", EOFError])
def test_the_loop(
    target: TargetModel,
    end: str | type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    chat = make_chat(target, [])
    typed = ("  ", "hello", KeyboardInterrupt, "x" * 600, "again", "/new", "hi", end, "never")
    monkeypatch.setattr("builtins.input", keys(*typed))
    converse(chat)
    assert [m["content"] for m in chat.messages if m["role"] == "user"] == ["hi"]
    captured = capsys.readouterr()
    assert "Ctrl-D" in captured.out and captured.err.startswith("error: the conversation has")


def test_one_shot_from_the_command_line(
    tmp_path: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [*save_models(tmp_path), "--max-new-tokens", "12", "--size", "8", "--prompt", "hello"]
    assert main([*command, "--trace"]) == 0
    lines = capsys.readouterr().out.splitlines()
    lines = lines[[line.startswith("forward") for line in lines].index(True) :]  # libraries talk
    assert lines[0].startswith("forward") and lines[1].startswith("prefill")
    forwards = [line for line in lines if line.split()[0].isdigit()]
    assert f"over {len(forwards)} forwards" in lines[-1] and "\x1b" not in "".join(lines)
    monkeypatch.setattr(chat_module, "speculative_generate", interrupt_after(2))
    assert main(command) == 130


def test_a_base_model_is_given_a_template(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*save_models(tmp_path), "--max-new-tokens", "4", "--prompt", "hello"]
    template = tmp_path / "chat.jinja"
    (tmp_path / "target" / "chat_template.jinja").rename(template)
    with pytest.raises(ValueError, match="--chat-template FILE"):
        main(command)
    assert main([*command, "--chat-template", str(template)]) == 0
    assert "4 tokens" in capsys.readouterr().out
