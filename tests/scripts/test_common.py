"""How scripts end, what they read as prompts, and what they write."""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import pytest

from drafters import TargetModel
from inference.sampling import SamplingParams
from scripts.common import (
    OPTIONS,
    SAMPLING_OPTIONS,
    add_options,
    encode_prompts,
    load_prompts,
    load_target,
    parser_for,
    print_json,
    run,
    sampling_params,
    write_json_atomic,
)
from tests.scripts.heads import save_models
from tests.tiny import tiny_target


def write_lines(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# Ending


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ValueError("--x must be\n  positive"), 2, "error: --x must be positive\n"),
        (FileNotFoundError(2, "No such file", "a.jsonl"), 2, "'a.jsonl'\n"),
        (OSError(28, "No space left on device"), 2, "error: [Errno 28] No space left on device\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_a_users_error_is_one_line(
    error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def main() -> int:
        raise error

    with pytest.raises(SystemExit) as ended:
        run(main)
    assert ended.value.code == code
    captured = capsys.readouterr()
    assert captured.err.endswith(line) and captured.out == ""
    assert len(captured.err.strip().splitlines()) == 1


@pytest.mark.parametrize(("returned", "code"), [(None, None), (0, 0), (3, 3)])
def test_mains_result_is_the_exit_code(returned: int | None, code: int | None) -> None:
    with pytest.raises(SystemExit) as ended:
        run(lambda: returned)
    assert ended.value.code == code


def test_a_fault_of_ours_keeps_its_traceback() -> None:
    def main() -> int:
        raise AssertionError("broken")

    with pytest.raises(AssertionError):
        run(main)


def test_the_json_line_is_one_line_of_valid_json(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": None, "b": [1.5], "c": "ü\n"})
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line) == {"a": None, "b": [1.5], "c": "ü\n"}
    with pytest.raises(ValueError):
        print_json({"a": float("nan")})


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deep" / "result.json"
    write_json_atomic(path, {"run": 1})
    assert json.loads(path.read_text()) == {"run": 1}

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_json_atomic(path, {"run": 2})
    assert json.loads(path.read_text()) == {"run": 1}
    assert os.listdir(path.parent) == ["result.json"]


# Options


def test_options_have_the_agreed_names() -> None:
    names = (
        "target head prompts limit max-new-tokens temperature top-k top-p min-p rule batch-size "
        "seed dtype threads chat-template out"
    )
    assert {f"--{name}" for name in names.split()} <= set(OPTIONS)


def test_defaults_can_be_changed_and_make_an_option_optional() -> None:
    parser = parser_for("doc")
    add_options(parser, "--target", "--max-new-tokens", "--limit", target="x", max_new_tokens=9)
    args = parser.parse_args([])
    assert vars(args) == {"target": "x", "max_new_tokens": 9, "limit": None}
    required = parser_for("doc")
    add_options(required, "--target")
    with pytest.raises(SystemExit) as ended:
        required.parse_args([])
    assert ended.value.code == 2


def test_sampling_options_are_validated() -> None:
    parser = parser_for("doc")
    add_options(parser, *SAMPLING_OPTIONS)
    args = parser.parse_args(["--temperature=0.5", "--top-k=3", "--top-p=0.9", "--seed=7"])
    assert sampling_params(args) == SamplingParams(0.5, 3, 0.9, 7)
    args = parser.parse_args(["--min-p=0.1", "--typical-p=0.9", "--repetition-penalty=1.2"])
    assert sampling_params(args) == SamplingParams(min_p=0.1, typical_p=0.9, repetition_penalty=1.2)
    with pytest.raises(ValueError, match="temperature"):
        sampling_params(parser.parse_args(["--temperature", "-1"]))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return save_models(tmp_path_factory.mktemp("models"))


def model_args(options: list[str], *more: str) -> argparse.Namespace:
    parser = parser_for("doc")
    add_options(parser, "--target", "--dtype", "--device", "--threads")
    return parser.parse_known_args([*options, *more])[0]


def test_another_chat_template_is_used(models: list[str], tmp_path: Path) -> None:
    args = model_args(models)
    template = tmp_path / "other.jinja"
    template.write_text("{% for m in messages %}{{ m['content'] }}!{% endfor %}")
    target = load_target(args, template)
    row = {"id": "1", "category": "a", "messages": [{"role": "user", "content": "hi"}]}
    [prompt] = encode_prompts(target, [row])
    assert target.tokenizer.decode(prompt.ids) == "hi!"
    with pytest.raises(OSError, match=r"nowhere\.jinja"):
        load_target(args, tmp_path / "nowhere.jinja")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--threads", "0"], "--threads"),
        (["--device", "toaster"], "--device toaster"),
        (["--target", "/nowhere"], "/nowhere"),
    ],
)
def test_what_cannot_be_loaded_is_named(models: list[str], more: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_target(model_args(models, *more))


# Prompts


def test_every_form_of_prompt_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    user = [{"role": "user", "content": "hi"}]
    path = write_lines(
        tmp_path / "prompts.jsonl",
        {"messages": [*user, {"role": "assistant", "content": "old answer"}], "category": "chat"},
        {"prompt": "hi", "id": 17},
        {"question_id": 81, "category": "writing", "turns": ["hi", "and then?"]},
        {"prompt_ids": [3, 4], "messages": user},
        {"text": "once upon"},
    )
    assert load_prompts(path) == [
        {"id": "1", "category": "chat", "messages": user},
        {"id": "17", "category": "all", "messages": user},
        {"id": "81", "category": "writing", "messages": user},
        {"id": "4", "category": "all", "ids": [3, 4]},
        {"id": "5", "category": "all", "text": "once upon"},
    ]
    assert capsys.readouterr().err == "prompts: 1 have several turns; only the first is used\n"


def test_names_stay_on_one_line_and_text_is_text(tmp_path: Path) -> None:
    """Names go into tables and files; half a surrogate pair goes nowhere."""
    path = write_lines(
        tmp_path / "prompts.jsonl",
        {"prompt": "a", "id": "\x1b[31m|\n<b>", "category": " two\u2028lines\t\ud800 "},
        {"prompt": "b", "id": "\n", "category": "\x00"},
    )
    with pytest.raises(ValueError, match=r"row 1: .*surrogates"):
        load_prompts(path)
    path = path.replace("prompts", "names")
    write_lines(
        Path(path),
        {"prompt": "a", "id": "\x1b[31m|\n<b>", "category": " two\u2028lines\t"},
        {"prompt": "b", "id": "\n", "category": "\x00"},
    )
    names = [(row["id"], row["category"]) for row in load_prompts(path)]
    assert names == [("[31m| <b>", "two lines"), ("2", "all")]
    text = tmp_path / "lines.txt"
    text.write_text("one\u2028still one\n\ntwo\x0cstill two\r\n", encoding="utf-8")
    lines = [row["line"] for row in load_prompts(str(text))]
    assert lines == ["one\u2028still one", "two\x0cstill two"]


def test_all_turns_are_kept_if_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The columns of SPEED-Bench; messages stay what they are."""
    speed_bench = {
        "question_id": "q1",
        "category": "coding",
        "sub_category": "",
        "turns": ["hi", "and then?", "why?"],
        "source": "s",
        "src_id": "1",
        "difficulty": "",
        "multiturn": True,
    }
    talk = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "old answer"},
        {"role": "user", "content": "more"},
    ]
    path = write_lines(
        tmp_path / "prompts.jsonl", speed_bench, {"turns": ["one"]}, {"messages": talk}
    )
    first, second, third = load_prompts(path, turns="all")
    assert (first["id"], first["later"]) == ("q1", ["and then?", "why?"])
    assert first["messages"] == talk[:1]
    assert "later" not in second and (third["messages"], "later" in third) == (talk, False)
    assert capsys.readouterr().err == ""
    path = write_lines(tmp_path / "empty.jsonl", {"turns": ["hi", ""]})
    with pytest.raises(ValueError, match=r"row 1: turns must be texts.*prepare_data"):
        load_prompts(path, turns="all")


def test_a_conversation_goes_on_with_the_answer() -> None:
    target = tiny_target()
    row = {
        "id": "1",
        "category": "a",
        "messages": [{"role": "user", "content": "hi"}],
        "later": ["why?"],
    }
    (prompt,) = encode_prompts(target, [row])
    assert prompt.turn == 0 and prompt.follow is not None
    end = target.tokenizer.convert_tokens_to_ids("<|im_end|>")
    answer = [*target.tokenizer("so")["input_ids"], end]
    later = prompt.follow(answer)
    assert (later.id, later.turn, later.follow) == ("1", 1, None)
    assert target.tokenizer.decode(later.ids) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nso<|im_end|>\n"
        "<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_lines_of_a_text_file_are_prompts(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("hi\n\nwhy?\n")
    rows = load_prompts(str(path))
    assert [(row["id"], row["line"]) for row in rows] == [("1", "hi"), ("2", "why?")]
    target = tiny_target()
    chat = encode_prompts(target, rows)[0].ids
    assert target.tokenizer.decode(chat).startswith("<|im_start|>user\nhi<|im_end|>")
    target.tokenizer.chat_template = None
    assert target.tokenizer.decode(encode_prompts(target, rows)[0].ids) == "hi"


def test_no_two_prompts_have_one_id(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "id": 2}, {"prompt": "b"}, {"prompt": "c", "id": 2}]
    path = write_lines(tmp_path / "prompts.jsonl", *rows)
    assert [row["id"] for row in load_prompts(path)] == ["2", "2#2", "2#3"]


def test_other_files_are_read_as_data_sets(tmp_path: Path) -> None:
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps([{"prompt": "a", "category": "x"}, {"prompt": "b"}]))
    assert [row["category"] for row in load_prompts(str(path))] == ["x", "all"]


def test_a_limit_takes_every_category_in_turn(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}", "category": "big"} for n in range(20)]
    rows += [{"prompt": "20", "category": "small"}, {"prompt": "21", "category": "tiny"}]
    rows += [{"prompt": "22", "category": "small"}]
    path = write_lines(tmp_path / "prompts.jsonl", *rows)

    def chosen(limit: int | None) -> list[int]:
        return [int(row["messages"][0]["content"]) for row in load_prompts(path, limit)]

    assert chosen(3) == [0, 20, 21]
    assert chosen(6) == [0, 1, 2, 20, 21, 22]
    assert chosen(None) == chosen(99) == list(range(23))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("\n\n", "empty"),
        ('{"prompt": "a"}\n{"prompt": ', "line 2: not JSON"),
        ("[1]\n", "line 1: not a JSON object"),
        ('{"prompt": "a"}\n{"question": "b"}\n', "row 2: .*needs messages, prompt or turns"),
        ('{"messages": [{"role": "user"}]}\n', "row 1: messages need text"),
        ('{"messages": ["hi"]}\n', "row 1"),
        ('{"prompt": 5}\n', "row 1: messages need text"),
        ('{"prompt_ids": "abc"}\n', "row 1"),
    ],
)
def test_what_is_no_prompt_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_prompts(str(path))


def test_a_missing_file_and_a_bad_limit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"nothing\.jsonl"):
        load_prompts(str(tmp_path / "nothing.jsonl"))
    path = write_lines(tmp_path / "prompts.jsonl", {"prompt": "a"})
    with pytest.raises(ValueError, match="--limit"):
        load_prompts(path, 0)


def test_prompts_are_encoded_by_the_template() -> None:
    target: TargetModel = tiny_target()
    rows: list[dict[str, Any]] = [
        {"id": "1", "category": "a", "messages": [{"role": "user", "content": "hi"}]},
        {"id": "2", "category": "b", "ids": [5, 6]},
        {"id": "3", "category": "b", "text": "hi"},
    ]
    chat, ids, text = encode_prompts(target, rows)
    decoded = target.tokenizer.decode(chat.ids)
    assert decoded == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert (ids.ids, ids.category, ids.id) == ([5, 6], "b", "2")
    assert target.tokenizer.decode(text.ids) == "hi"
    with pytest.raises(ValueError, match="another target"):
        encode_prompts(target, [{"id": "4", "category": "b", "ids": [5, 96]}])


def test_a_base_model_without_template_is_told_so() -> None:
    target = tiny_target()
    target.tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"no chat template.*--chat-template FILE"):
        encode_prompts(
            target, [{"id": "1", "category": "a", "messages": [{"role": "user", "content": "hi"}]}]
        )
