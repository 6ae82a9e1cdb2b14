"""The view of what is supervised: exactly the answers, in colour or in brackets, and why not."""

import json
import re
from pathlib import Path

import pytest

from scripts import inspect_mask as script
from scripts.common import run
from tests.tiny import tiny_tokenizer

HELLO = [
    {"role": "user", "content": "Say hi."},
    {"role": "assistant", "content": "hi there"},
    {"role": "user", "content": "again"},
    {"role": "assistant", "content": "hi"},
]
SHOWN = (
    "<|im_start|>user\nSay hi.<|im_end|>\n<|im_start|>assistant\n[[hi there<|im_end|>]]\n"
    "<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n[[hi<|im_end|>]]\n"
)
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer alone: the weights of the target are not needed."""
    folder = tmp_path_factory.mktemp("target")
    tiny_tokenizer().save_pretrained(folder)
    return folder


def inspect(
    folder: Path,
    tmp_path: Path,
    rows: list[dict],
    *rest: object,
    option: str = "--data",
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    script.main([str(a) for a in ["--target", folder, option, data, *rest]])


def test_the_answers_stand_in_brackets(
    tokenizer_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inspect(tokenizer_folder, tmp_path, [{"messages": HELLO}])
    out = capsys.readouterr().out
    size, marked = (
        len(tiny_tokenizer().encode(SHOWN.replace("[[", "").replace("]]", ""))),
        8 + 2 + 2,
    )
    assert out.startswith("legend: [[supervised]] not supervised\n")
    assert SHOWN in out
    assert f"row 0: {size} tokens, {marked} supervised ({marked / size:.1%})" in out
    assert json.loads(out.splitlines()[-1]) == {
        "rows": 1,
        "tokens": size,
        "supervised": marked,
        "refused": [],
    }
    assert "\x1b" not in out


def test_colours_on_a_terminal_unless_refused(
    tokenizer_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    inspect(tokenizer_folder, tmp_path, [{"messages": HELLO}])
    coloured = capsys.readouterr().out
    assert f"{script.SUPERVISED}hi there<|im_end|>{script.RESET}" in coloured
    assert f"{script.DIM}<|im_start|>user\nSay hi." in coloured
    assert "[[" not in coloured.rsplit("\n", 2)[0]
    plain = SHOWN.replace("[[", "").replace("]]", "")
    assert plain in ESCAPE.sub("", coloured)

    monkeypatch.setenv("NO_COLOR", "1")
    inspect(tokenizer_folder, tmp_path, [{"messages": HELLO}])
    assert SHOWN in capsys.readouterr().out


def test_refused_rows_are_named_and_the_others_shown(
    tokenizer_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"messages": HELLO[:1]}, {"messages": HELLO}, {"prompt": "no answer yet"}]
    inspect(tokenizer_folder, tmp_path, rows)
    out = capsys.readouterr().out
    record = json.loads(out.splitlines()[-1])
    assert record["rows"] == 3
    assert [refusal["row"] for refusal in record["refused"]] == [0, 2]
    assert "no token of this row is supervised" in record["refused"][0]["reason"]
    assert "row 0: refused: no token of this row is supervised" in out
    assert record["supervised"] == 12
    assert SHOWN in out


def test_exact_ids_and_plain_text(
    tokenizer_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    encode = tiny_tokenizer().encode
    rows = [{"prompt_ids": encode("ask "), "answer_ids": encode("told<|im_end|>")}, {"text": "abc"}]
    inspect(tokenizer_folder, tmp_path, rows, option="--prompts")
    out = capsys.readouterr().out
    assert "ask [[told<|im_end|>]]" in out
    assert "a[[bc]]" in out


def test_limit(tokenizer_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inspect(tokenizer_folder, tmp_path, [{"text": "abc"}] * 5, "--limit", 2)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rows"] == 2


def test_another_chat_template(
    tokenizer_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = tmp_path / "plain.jinja"
    template.write_text(
        "{% for m in messages %}{% if m['role'] == 'assistant' %}"
        "{% generation %}{{ m['content'] }}{% endgeneration %}"
        "{% else %}{{ m['content'] }}{% endif %}+{% endfor %}"
    )
    rows = [{"messages": HELLO}]
    inspect(tokenizer_folder, tmp_path, rows, "--chat-template", template)
    assert "Say hi.+[[hi there]]+again+[[hi]]+" in capsys.readouterr().out


def test_control_characters_do_not_reach_the_terminal() -> None:
    assert script.mark("a\x1b[31mb\n\tc", True, coloured=False) == "[[a\\x1b[31mb\n\tc]]"


def test_a_character_cut_by_the_mask_is_not_lost() -> None:
    """Three bytes of one character, of which the last is supervised: shown as the tokenizer can."""
    tokens = "€".encode()

    class Bytes:
        def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
            return bytes(ids).decode(errors="replace")

    row = script.TokenizedRow([97, *tokens, 98], [False, False, False, True, True])
    found = list(script.spans(Bytes(), row))
    assert [flag for _, flag in found] == [False, True]
    assert found[0][0].startswith("a")
    assert found[1][0].endswith("b")


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        (("--limit", 0), "--limit must be at least 1"),
        (("--chat-template", "nowhere.jinja"), "nowhere.jinja"),
        (("--target", "no/such/target"), "cannot load its tokenizer"),
    ],
)
def test_errors_are_one_line(
    tokenizer_folder: Path,
    tmp_path: Path,
    rest: tuple[object, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        run(lambda: inspect(tokenizer_folder, tmp_path, [{"text": "abc"}], *rest))
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_a_base_model_is_given_a_template(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows that need none are shown without."""
    tokenizer, template = tiny_tokenizer(), tmp_path / "chat.jinja"
    template.write_text(str(tokenizer.chat_template))
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match="--chat-template FILE"):
        inspect(tmp_path / "base", tmp_path, [{"messages": HELLO}])
    inspect(tmp_path / "base", tmp_path, [{"messages": HELLO}], "--chat-template", template)
    inspect(tmp_path / "base", tmp_path, [{"text": "abc"}])
    assert SHOWN in capsys.readouterr().out
