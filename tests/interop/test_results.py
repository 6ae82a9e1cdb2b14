"""The table of what was found, and how checks that cannot run end up in it."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from interop import __main__ as interop
from interop.results import (
    FAILED,
    HEADWAY,
    LEGEND,
    LOADED,
    PASSED,
    READ,
    REFUSED,
    ROUND_TRIP,
    SKIPPED,
    WRITTEN,
    Entry,
    load,
    markdown,
    merged,
    save,
)
from interop.setting import CannotRun, Setting

ENTRIES = [
    Entry(HEADWAY, "sglang", WRITTEN, PASSED, "17 tensors", {"torch": "2.13"}, head="eagle3"),
    Entry("vLLM", "sglang", LOADED, PASSED, "3 rows equal", {"vllm": "0.33.0"}, "make interop"),
    Entry("other", "sglang", LOADED, SKIPPED, "needs a|b"),
    Entry(HEADWAY, "vllm", READ, FAILED, "missing tensor"),
]


def table(*entries: Entry) -> list[str]:
    """The rows of the table of dialects."""
    lines = markdown(entries).splitlines()
    return lines[: lines.index("")]


def test_the_table_says_what_ran_and_with_what() -> None:
    text = markdown(ENTRIES)
    assert table(*ENTRIES) == [
        "| dialect | written | read | loaded by its code |",
        "| --- | --- | --- | --- |",
        "| sglang | yes |  | yes: vLLM; not run: other |",
        "| vllm |  | **no** |  |",
    ]
    assert LEGEND in text
    assert "3 rows equal (`make interop`) | vllm 0.33.0 |" in text
    assert "| sglang | Headway | eagle3 | written | yes | 17 tensors |" in text
    assert "needs a\\|b" in text


def test_an_answer_is_no_gap_and_a_cell_says_what_a_pass_leaves_out() -> None:
    """Refused beside not run; a round trip without the draft vocabulary; heads that fare alike are
    not named, those that differ are.
    """
    full, part = {"head": "d-full"}, {"head": "d"}
    refused = Entry(HEADWAY, "a", WRITTEN, REFUSED, "its vocabulary", **part)
    written = Entry(HEADWAY, "a", WRITTEN, PASSED, "9 tensors", **full)
    absent = Entry(HEADWAY, "b", WRITTEN, SKIPPED, "no head")
    cut = Entry(HEADWAY, "c", ROUND_TRIP, PASSED, "7", limit="without draft vocabulary", **part)
    whole = Entry(HEADWAY, "c", ROUND_TRIP, PASSED, "7", **full)
    assert table(refused, absent)[2:] == ["| a | refused |", "| b | not run |"]
    assert table(written, refused)[2] == "| a | yes: d-full; refused: d |"
    assert table(cut)[2] == "| c | yes, without draft vocabulary |"
    assert table(cut, whole)[2] == "| c | yes: d-full; yes, without draft vocabulary: d |"

    def loaded(head: str, status: str, name: str = "vLLM") -> Entry:
        return Entry(name, "a", LOADED, status, "said", head=head)

    alike = table(loaded("d", PASSED), loaded("d-full", PASSED))
    assert alike[2] == "| a | yes: vLLM |"
    rows = table(
        loaded("d", REFUSED), loaded("e", PASSED), loaded("f", PASSED), loaded("d", PASSED, "x")
    )
    assert rows[2] == "| a | yes: vLLM (e, f), x; refused: vLLM (d) |"
    theirs = Entry("speculators", "a", READ, FAILED, "logits differ")
    assert table(Entry(HEADWAY, "a", READ, PASSED, "a head"), theirs)[2] == (
        "| a | **no**: speculators; yes |"
    )


def test_entries_survive_the_disk_and_replace_their_former_selves(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    assert load(path) == []
    save(ENTRIES, path)
    assert load(path) == ENTRIES
    again = Entry(HEADWAY, "vllm", READ, PASSED, "an eagle3 head")
    assert merged(ENTRIES, [again]) == [*ENTRIES[:3], again]


def test_skipped_entries_give_way_to_what_is_known() -> None:
    """With whichever head, and whichever of the two came first."""
    gap = Entry("vLLM", "sglang", LOADED, SKIPPED, "no environment")
    other = Entry("vLLM", "vllm", LOADED, SKIPPED, "no environment")
    mine = [Entry("vLLM", "sglang", LOADED, PASSED, "equal", head=label) for label in "ab"]
    assert merged([gap, other], mine) == [other, *mine]
    assert merged(mine, [gap, other]) == [*mine, other]
    refused = Entry("vLLM", "sglang", LOADED, REFUSED, "its vocabulary", head="a")
    assert merged([gap], [refused]) == [refused]


@pytest.mark.parametrize(
    "wrong",
    [
        {"check": "guessed"},
        {"status": "perhaps"},
        {"detail": "two\nlines"},
        {"status": REFUSED, "limit": "without much"},
    ],
)
def test_an_entry_that_says_nothing_definite_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=list(wrong)[-1]):
        Entry(
            **{"name": "x", "dialect": "y", "check": READ, "status": PASSED, "detail": "z"} | wrong
        )


def test_a_check_that_cannot_run_is_skipped_and_one_that_breaks_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(setting: Setting) -> Iterator[Entry]:
        yield Entry("one", "sglang", READ, PASSED, "before it stopped")
        raise CannotRun("no environment")

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
        ("absent", SKIPPED, "no environment"),
        ("broken", FAILED, "RuntimeError: out of luck"),
    ]
    assert "3 entries, 1 failed" in capsys.readouterr().out
