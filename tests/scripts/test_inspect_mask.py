"""The view of what is supervised: exactly the answers, in colour or in brackets, and why not; and
of sequences and masks as a run has them.
"""

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


# --- one row, wherever it is


def shown(capsys: pytest.CaptureFixture[str]) -> tuple[str, dict]:
    out = capsys.readouterr().out
    return out, json.loads(out.splitlines()[-1])


def test_one_row(
    tokenizer_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"text": "abc"}, {"messages": HELLO[:1]}, {"text": "xyz"}]
    inspect(tokenizer_folder, tmp_path, rows, "--row", 2)
    out, record = shown(capsys)
    assert "row 2: 3 tokens, 2 supervised" in out and "abc" not in out
    assert record == {"rows": 1, "tokens": 3, "supervised": 2, "refused": []}
    with pytest.raises(ValueError, match="end before that row"):
        inspect(tokenizer_folder, tmp_path, rows, "--row", 3)


def test_the_row_that_a_run_calls_so(
    tokenizer_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run counts the rows that it can use."""
    rows = [{"text": "abc"}, {"messages": HELLO[:1]}, {"text": "xyz"}]
    inspect(tokenizer_folder, tmp_path, rows, "--document", 1)
    out, record = shown(capsys)
    assert "row 2: 3 tokens" in out
    assert (record["rows"], record["tokens"]) == (1, 3)
    with pytest.raises(ValueError, match="end before that row"):
        inspect(tokenizer_folder, tmp_path, rows, "--document", 2)


def test_several_sources(
    tokenizer_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "second"}) + "\n")
    inspect(tokenizer_folder, tmp_path, [{"text": "first"}], tmp_path / "b.jsonl", "--row", 1)
    assert "s[[econd]]" in shown(capsys)[0]


def test_a_row_that_makes_several_is_shown_in_parts(
    tokenizer_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = {"ids": [10, 11, 12], "spans": [[1, 3]]}
    rows = [{"token_rows": [one, one]}, {"text": "abc"}]
    inspect(tokenizer_folder, tmp_path, rows)
    out, record = shown(capsys)
    assert "row 0, part 0: 3 tokens" in out and "row 0, part 1: 3 tokens" in out
    assert record["rows"] == 2 and record["tokens"] == 9
    inspect(tokenizer_folder, tmp_path, rows, "--document", 1)
    assert shown(capsys)[1]["tokens"] == 3


# --- sequences and masks

TEXTS = [{"text": text} for text in ("abcdef", "ghijklmn", "op", "qrs", "tuvwxyz")]


def test_a_packed_sequence(
    tokenizer_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """First fit into 12: rows 0, 2 and 3, then row 1, then row 4."""
    inspect(tokenizer_folder, tmp_path, TEXTS, "--sequence", 0, "--max-length", 12)
    out, record = shown(capsys)
    assert record == {
        "sequence": 0,
        "length": 12,
        "tokens": 11,
        "supervised": 8,
        "documents": [
            {"row": 0, "start": 0, "tokens": 6},
            {"row": 2, "start": 6, "tokens": 2},
            {"row": 3, "start": 8, "tokens": 3},
        ],
    }
    assert "sequence 0: 3 documents, 11 tokens, 8 supervised, padded to 12" in out
    assert "document 1 (data row 2): columns 6 to 7, positions 0 to 1; 2 tokens" in out
    assert "a[[bcdef]]" in out and "q[[rs]]" in out and "g[[hijklmn]]" not in out
    assert "padding: columns 11 to 11" in out
    with pytest.raises(ValueError, match="make 3 sequences, the last being 2"):
        inspect(tokenizer_folder, tmp_path, TEXTS, "--sequence", 3, "--max-length", 12)


def test_its_attention(
    tokenizer_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rest = ("--sequence", 0, "--max-length", 12, "--mask", "hydra", "--columns", "4:99")
    inspect(tokenizer_folder, tmp_path, TEXTS, *rest)
    out, _ = shown(capsys)
    drawn = [line.strip() for line in out.split("seen by the row")[1].split("\n\n")[0].split("\n")]
    assert drawn[1:] == [
        "document  0011222-",
        "e 4  #.......",
        "f 5  ##......",
        "o 6  ..#.....",
        "p 7  ..##....",
        "q 8  ....#...",
        "r 9  ....##..",
        "s 10  ....###.",
        "padding 11  .......#",
    ]


def recipe(tmp_path: Path, folder: Path, extra: str = "", data: str = "", run: str = "") -> Path:
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(one) + "\n" for one in TEXTS))
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"target: {{name: {folder}}}\n"
        f"drafter: {{type: eagle3{extra}}}\n"
        f"data: {{train: ['{tmp_path}/texts.jsonl'], max_length: 12{data}}}\n"
        f"run: {{out: {tmp_path}/out{run}}}\n"
    )
    return path


def test_a_recipe_s_sequence(
    tokenizer_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its buckets, its head's mask and window."""
    path = recipe(tmp_path, tokenizer_folder, ", sliding_window: 2", ", buckets: [8, 12]")
    script.main(["--recipe", str(path), "--sequence", "1", "--mask", "--depth", "2"])
    out, record = shown(capsys)
    assert (record["length"], record["tokens"]) == (8, 8)
    assert "eagle3: # is seen by the row" in out
    assert "i 2  .##.....  ........\n" in out
    assert "step 1 2  ..#.....  ..#.....\n" in out


def test_a_streamed_recipe_s_sequence(
    tokenizer_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beyond the end of the data, which start again."""
    path = recipe(
        tmp_path,
        tokenizer_folder,
        "",
        ", streaming: true, pack: false",
        ", steps: 9, batch_size: 2",
    )
    script.main(["--recipe", str(path), "--sequence", "6"])
    out, record = shown(capsys)
    assert record["documents"] == [{"row": 6, "start": 0, "tokens": 8}]
    assert "g[[hijklmn]]" in out
    script.main(["--recipe", str(path), "--row", "4"])
    assert "t[[uvwxyz]]" in shown(capsys)[0]


def test_a_recipe_whose_answers_are_not_there_yet(
    tokenizer_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recipe(tmp_path, tokenizer_folder, "", ", regenerate: true")
    with pytest.raises(ValueError, match="answers\\.jsonl is not there yet"):
        script.main(["--recipe", str(path)])
    (tmp_path / "out").mkdir()
    answer = {"prompt_ids": [5, 6], "answer_ids": [7]}
    (tmp_path / "out" / "answers.jsonl").write_text(json.dumps(answer) + "\n")
    script.main(["--recipe", str(path)])
    assert shown(capsys)[1]["tokens"] == 3


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        (("--row", -1), "--row must be at least 0"),
        (("--mask", "eagle3"), "--mask has no effect without --sequence"),
        (("--max-length", 8), "--max-length has no effect without --sequence"),
        (("--sequence", 0, "--max-length", 3), "--max-length must be at least 4"),
        (("--sequence", 0, "--mask"), "--mask needs a family here"),
        (("--sequence", 0, "--mask", "eagle3", "--columns", "7"), "give them as A:B"),
        (("--sequence", 0, "--mask", "eagle3", "--columns", "9:9"), "name 1 to 64 columns"),
        (("--sequence", 0, "--mask", "eagle3", "--columns", "0:65"), "name 1 to 64 columns"),
    ],
)
def test_options_that_do_not_go_together(
    tokenizer_folder: Path, tmp_path: Path, rest: tuple[object, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        inspect(tokenizer_folder, tmp_path, TEXTS, *rest)


def test_target_and_data_or_a_recipe_are_needed(tokenizer_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--target is needed, or --recipe"):
        script.main(["--data", "x.jsonl"])
    with pytest.raises(ValueError, match="--data is needed, or --recipe"):
        script.main(["--target", str(tokenizer_folder)])
    path = recipe(tmp_path, tokenizer_folder, "", ", buckets: [8, 12]")
    with pytest.raises(ValueError, match=r"contradicts the recipe's data\.buckets"):
        script.main(["--recipe", str(path), "--sequence", "0", "--max-length", "9"])
