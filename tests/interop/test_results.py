"""The table of what was found, and how checks that cannot run end up in it."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from interop import __main__ as interop
from interop.results import (
    FAILED,
    LOADED,
    PASSED,
    READ,
    SKIPPED,
    WRITTEN,
    Entry,
    load,
    markdown,
    merged,
    save,
)
from interop.setting import CannotRun, Setting, output

ENTRIES = [
    Entry("files", "sglang", WRITTEN, PASSED, "17 tensors", {"torch": "2.13"}),
    Entry("vLLM", "sglang", LOADED, PASSED, "3 rows equal", {"vllm": "0.33.0"}, "make interop"),
    Entry("other", "sglang", LOADED, SKIPPED, "needs a|b"),
    Entry("files", "vllm", READ, FAILED, "missing tensor"),
]


def test_the_table_says_what_ran_and_with_what() -> None:
    text = markdown(ENTRIES)
    assert text.splitlines()[:4] == [
        "| dialect | written | read | loaded by its code |",
        "| --- | --- | --- | --- |",
        "| sglang | yes |  | yes: vLLM |",
        "| vllm |  | **no** |  |",
    ]
    assert "3 rows equal (`make interop`) | vllm 0.33.0 |" in text
    assert "needs a\\|b" in text


def test_entries_survive_the_disk_and_replace_their_former_selves(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    assert load(path) == []
    save(ENTRIES, path)
    assert load(path) == ENTRIES
    again = Entry("files", "vllm", READ, PASSED, "an eagle3 head")
    assert merged(ENTRIES, [again]) == [*ENTRIES[:3], again]


@pytest.mark.parametrize(
    "wrong", [{"check": "guessed"}, {"status": "perhaps"}, {"detail": "two\nlines"}]
)
def test_an_entry_that_says_nothing_definite_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Entry(
            **{"name": "x", "dialect": "y", "check": READ, "status": PASSED, "detail": "z"} | wrong
        )


def test_a_check_that_cannot_run_is_skipped_and_one_that_breaks_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(setting: Setting) -> Iterator[Entry]:
        yield Entry("one", "sglang", READ, PASSED, "before it stopped")
        setting.head("eagle3")

    def broken(setting: Setting) -> Iterator[Entry]:
        raise RuntimeError("out of\nluck")
        yield

    modules = {}
    for name, check in (("absent", absent), ("broken", broken)):
        modules[name] = ModuleType(name)
        modules[name].NAME, modules[name].DIALECTS = name, ("sglang",)
        modules[name].check = check
    monkeypatch.setattr(interop, "CHECKS", modules)

    assert interop.main(["--target", "t", "--work", str(tmp_path)]) == 1
    assert [(e.name, e.status, e.detail) for e in load(tmp_path / "results.json")] == [
        ("one", PASSED, "before it stopped"),
        ("absent", SKIPPED, "no eagle3 head: name one with --head eagle3=<folder>"),
        ("broken", FAILED, "RuntimeError: out of luck"),
    ]
    assert "3 entries, 1 failed" in capsys.readouterr().out


def test_programs_that_fail_say_why(tmp_path: Path) -> None:
    assert output([sys.executable, "-c", "print(3)"]) == "3\n"
    with pytest.raises(CannotRun, match=r"ended with 1: .*no such thing"):
        output([sys.executable, "-c", "raise SystemExit('no such thing')"])
    with pytest.raises(CannotRun, match="missing-program"):
        output([str(tmp_path / "missing-program")])


def test_named_environments_are_used_as_they_are(tmp_path: Path) -> None:
    there = Setting(tmp_path, {}, tmp_path, {"vllm": Path("/usr/bin/python3")}, install=False)
    assert there.python("vllm", "vllm==1") == Path("/usr/bin/python3")
    with pytest.raises(CannotRun, match="--no-install"):
        there.python("speculators", "speculators==1")
