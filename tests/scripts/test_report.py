"""What a report says of a run: its numbers, what is missing, and that no text can break out."""

import base64
import hashlib
import json
import re
import struct
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from inference.measuring.run_records import RoundRecord, Trace, read_run
from scripts import report as script
from scripts import report_data, report_html, report_sections, report_svg, report_trace
from scripts.common import run
from tests.scripts.report_runs import made_run

EVIL = (
    "</script><script>window.pwned = 1</script>",
    '"><img src=x onerror="window.pwned = 1">',
    "<!--",
    "\u202etxt.exe",
    "'",
    "&lt;",
    " a",
)


class Page(HTMLParser):
    """Elements of a page by name, text of each section, and every attribute."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.scripts: list[str] = []
        self.sections: dict[str, str] = {}
        self.here: str | None = None
        self.script = False
        self.feed(text)

    def handle_starttag(self, name: str, attributes: Any) -> None:
        self.tags.append(name)
        self.attributes += attributes
        if name == "script":
            self.scripts.append("")
            self.script = True
        if name == "section":
            self.here = dict(attributes)["id"]
            self.sections[self.here] = ""

    def handle_endtag(self, name: str) -> None:
        if name == "section":
            self.here = None
        if name == "script":
            self.script = False

    def handle_data(self, data: str) -> None:
        if self.script:
            self.scripts[-1] += data
        elif self.here is not None:
            self.sections[self.here] += data + " "


def report(*runs: Path, out: Path, options: tuple[str, ...] = ("--no-plots",)) -> Page:
    script.main([*map(str, runs), "--out", str(out), *options])
    return Page((out / "report.html").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_run(tmp_path_factory.mktemp("runs") / "eagle3")


@pytest.fixture(scope="module")
def page(one: Path, tmp_path_factory: pytest.TempPathFactory) -> Page:
    return report(one, out=tmp_path_factory.mktemp("out"))


# --- numbers


def test_every_cell_is_in_the_summary_in_both_conventions(one: Path, page: Page) -> None:
    shown = page.sections["summary"].split()
    for cell in read_run(one).cells:
        for key in ("acceptance_length", "accepted_per_round", "acceptance_length_per_request"):
            assert f"{cell[key]:.2f}" in shown, key
        assert f"{cell['speedup']:.2f}" in shown
    assert "identical" in shown and "compared" in shown


def test_numbers_stand_under_their_names(one: Path) -> None:
    series = report_data.load([one]).series[0]
    row = dict(zip(report_sections.SUMMARY_HEAD, report_sections.summary_row(series), strict=True))
    assert row["near ties"] == 1 and row["rounds"] == series.cell["num_drafts"]
    assert row["drafts a round"] == "5.0" and row["speed-up"].endswith("×")
    with pytest.raises(AssertionError):
        report_html.table(("a", "b"), [["one cell"]], "too short")


def test_positions_categories_and_contexts_hold_their_numbers(one: Path, page: Page) -> None:
    for cell in read_run(one).cells:
        for kind in ("conditional", "survival"):
            for rate in cell["acceptance_by_position"][kind]:
                wanted = "–" if rate is None else f"{100 * rate:.0f} %"
                assert wanted in page.sections["positions"]
        for name, group in cell["by_category"].items():
            assert name in page.sections["categories"]
            assert f"{group['acceptance_length']:.2f}" in page.sections["categories"]
        for bucket in cell["by_context"]:
            both = f"{bucket['acceptance_length']:.2f}  ({bucket['num_drafts']})"
            assert both in page.sections["contexts"]


def test_the_other_sections_are_filled(page: Page) -> None:
    for name in ("prediction", "costs", "confidence", "training", "trace", "about"):
        assert "absent" not in page.sections[name]
    assert "sampler" in page.sections["prediction"]  # the warning's cause
    assert "✕ beyond" in page.sections["prediction"] and "✓ within" in page.sections["prediction"]
    assert "γ = 5" in page.sections["prediction"] and "measured" in page.sections["prediction"]
    assert "most used, best" in page.sections["costs"]
    assert "A CPU <model>" in page.sections["costs"]
    assert "calibration error" in page.sections["confidence"]
    assert "python -m scripts.evaluate --out RUN" in page.sections["about"]


def test_a_bare_run_says_what_would_give_the_rest(tmp_path: Path) -> None:
    bare = made_run(tmp_path / "bare", full=False, temperatures=(0.0,), sizes=(4,), traced=0)
    found = report(bare, out=tmp_path / "out").sections
    assert "--predict" in found["prediction"]
    assert "--size auto" in found["costs"]
    assert "confidence output" in found["confidence"]
    assert "metrics.jsonl" in found["training"]
    assert "--trace" in found["trace"]
    assert "svg" not in found["summary"]


def test_no_traces_leave_the_trees_out(one: Path, tmp_path: Path) -> None:
    found = report(one, out=tmp_path, options=("--no-plots", "--traces", "0"))
    assert len(found.scripts) == 1 and "--traces 0" in found.sections["trace"]


def test_runs_are_compared_setting_by_setting(tmp_path: Path) -> None:
    runs = [
        made_run(tmp_path / "x" / name, seed=n, requests=4, traced=1, alpha=0.5 + 0.1 * n)
        for n, name in enumerate(("medusa", "eagle3"))
    ]
    loaded = report_data.load(runs)
    assert [group.title for group in loaded.groups] == [
        "T = 0 · size 6", "T = 0 · size auto", "T = 1 · size 6", "T = 1 · size auto"
    ]  # fmt: skip
    assert [each.name for each in loaded.groups[0].series] == ["medusa", "eagle3"]
    found = report(*runs, out=tmp_path / "out")
    assert ("aria-label", "setting") in found.attributes
    assert found.tags.count("input") % 4 == 0 and found.tags.count("input") > 0


def test_many_runs_are_drawn_apart(tmp_path: Path) -> None:
    runs = [
        made_run(tmp_path / f"head{n}", seed=n, requests=2, traced=0, temperatures=(0.0,))
        for n in range(8)
    ]
    found = report(*runs, out=tmp_path / "out")
    assert ("class", "small") in found.attributes
    assert "head7" in found.sections["positions"]


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for folder in ("a/run", "b/run"):
        (tmp_path / folder).mkdir(parents=True)
    found = report_data.labels([tmp_path / "a/run", tmp_path / "b/run"])
    assert list(found) == ["a/run", "b/run"]


def test_settings_name_what_differs() -> None:
    cells = [{"temperature": t, "rule": "match", "size": s} for t, s in ((0.0, 1), (0.7, 16))]
    assert report_data.settings(cells) == ["T = 0 · no drafts", "T = 0.7 · size 16"]
    assert report_data.settings(cells[1:]) == ["T = 0.7 · match · size 16"]
    assert report_data.shared_settings(cells) == ["match"]
    assert report_data.shared_settings(cells[1:]) == []


# --- the trace


def record(path: list[int], parents: list[int], ended: bool = False) -> RoundRecord:
    nodes = len(parents)
    tokens = list(range(100, 100 + nodes))
    trace = Trace(tokens, [f" {t}" for t in tokens], parents, path, [None] + [0.5] * (nodes - 1),
                  [None] + [0.25] * (nodes - 1))  # fmt: skip
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    emitted = [tokens[node] for node in path] + ([] if ended else [7])
    return RoundRecord("c", "q", 0, 0, 10, nodes - 1, max(depths), nodes, len(path), emitted,
                       ended, trace)  # type: ignore[arg-type] # fmt: skip


@pytest.mark.parametrize(
    ("path", "parents", "ended", "expected"),
    [
        ([1, 2], [-1, 0, 1], False, ["accepted", "accepted", "bonus"]),
        ([1], [-1, 0, 1], False, ["accepted", "recovered"]),
        ([], [-1, 0], False, ["recovered"]),
        ([], [-1], False, ["bonus"]),  # nothing was drafted
        ([2], [-1, 0, 0, 1], False, ["accepted", "bonus"]),  # a leaf of a tree that is deeper
        ([1, 2], [-1, 0, 1], True, ["accepted", "accepted"]),
    ],
)
def test_kinds_of_tokens(path: list, parents: list, ended: bool, expected: list[str]) -> None:
    assert report_trace.kinds(record(path, parents, ended)) == expected


def test_trees_are_listed_depth_first_with_the_accepted_child_in_front() -> None:
    #      0 - 1 - 3
    #        - 2 - 4 - 5      accepted: 2, 4
    found = report_trace.tree_data(record([2, 4], [-1, 0, 0, 1, 2, 4]), "x")
    assert found["text"] == ["␣100", "␣102", "␣104", "␣105", "␣101", "␣103"]
    assert found["level"] == [0, 1, 2, 3, 1, 2]
    assert found["state"] == [2, 2, 2, 1, 1, 0]
    assert found["p"][0] is None and found["q"][1] == 0.25
    assert found["last"] == ["recovered", "x"] and found["round"] == 1


def test_rows_carry_the_whole_text(one: Path, page: Page) -> None:
    loaded = read_run(one)
    request = report_trace.chosen_requests(loaded, 0, 1)[0]
    html, trees = report_trace.request_rows(
        request, loaded.rounds_of(request), "r", "title", opened=True
    )
    text = re.findall(r'class="unseen">(\w+) </span>(.*?)</span>', html)
    assert [report_html.html.escape(report_html.visible(p)) for p in request.pieces] == [
        piece for _, piece in text
    ]
    assert len(trees) == len(loaded.rounds_of(request)) == html.count("<button")
    assert text[0][0] == "prefill" and {kind for kind, _ in text[1:]} <= set(report_trace.KINDS)


# --- nothing breaks out


def test_text_of_tokens_is_never_markup(tmp_path: Path) -> None:
    bad = made_run(tmp_path / "<i>run", words=EVIL, head="<b>head</b>", requests=4, traced=4)
    found = report(bad, out=tmp_path / "out")
    assert {"img", "b", "i", "iframe", "object", "link"} & set(found.tags) == set()
    assert [name for name, _ in found.attributes if name.startswith("on")] == []
    assert len(found.scripts) == 2
    trees = json.loads(found.scripts[0])
    texts = {text for tree in trees.values() for text in tree["text"]}
    assert EVIL[0] in texts and EVIL[1] in texts
    assert "⟨U+202E⟩txt.exe" in texts  # turns the line around
    assert "\u202e" not in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    card = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert "<b>" not in card and "<i>" not in card


def test_the_page_loads_nothing_and_runs_its_own_script_alone(page: Page) -> None:
    for name, value in page.attributes:
        assert name not in ("src", "srcset"), value
        assert name != "href" or value.startswith("#")
    policy = next(value for name, value in page.attributes if "default-src" in value)
    digest = hashlib.sha256(page.scripts[-1].encode()).digest()
    assert f"script-src 'sha256-{base64.b64encode(digest).decode()}'" in policy
    assert "default-src 'none'" in policy


@pytest.mark.parametrize(
    ("piece", "shown"),
    [
        ("", "∅"),
        (" word", " word"),
        ("  ", "␣␣"),
        ("\n\n", "↵↵"),
        ("a\tb", "a⇥b"),
        ("\u2066x\u2069", "⟨U+2066⟩x⟨U+2069⟩"),
        ("\x00", "⟨U+0000⟩"),
        ("\ufeff", "⟨U+FEFF⟩"),
        ("\u00a0", "⟨U+00A0⟩"),
        ("é中", "é中"),
    ],
)
def test_what_would_be_invisible_is_shown(piece: str, shown: str) -> None:
    assert report_html.visible(piece) == shown


def test_elements_escape_everything_but_html() -> None:
    made = report_html.tag("td", "<&", report_html.tag("b", '"'), None, class_='"x', hidden=True)
    assert made == '<td class="&quot;x" hidden>&lt;&amp;<b>&quot;</b></td>'


# --- drawing


def test_axes_have_round_ticks_around_the_values() -> None:
    made = report_svg.axis("x", [1.03, 3.46])
    assert made.low <= 1.03 and made.high >= 3.46
    assert [text for _, text in made.ticks] == ["1.0", "1.5", "2.0", "2.5", "3.0", "3.5"]
    assert made.place(made.low) == 0 and made.place(made.high) == 1 and made.place(99) == 1
    assert [text for _, text in report_svg.axis("n", [0, 152_000], low=0.0).ticks][-1] == "200k"
    assert report_svg.axis("flat", [2.0, 2.0]).high > 2.0


def test_a_line_goes_through_its_points() -> None:
    x, y = report_svg.axis("x", [], 0.0, 1.0), report_svg.axis("y", [], 0.0, 1.0)
    drawn = report_svg.line_chart([report_svg.Line("a", [(0, 0), (1, 1)])], x, y, "t")
    points = re.search(r'<polyline points="([^"]*)" class="line s0"', drawn)
    assert points is not None
    (x0, y0), (x1, y1) = (pair.split(",") for pair in points[1].split())
    assert float(x0) == report_svg.LEFT and float(x1) == report_svg.WIDTH - report_svg.RIGHT
    assert float(y0) == report_svg.HEIGHT - report_svg.BOTTOM and float(y1) == report_svg.TOP
    assert "a: 1.0, 1.000" in drawn


def test_rounds_count_for_the_width_that_ran(one: Path) -> None:
    series = report_data.load([one]).series
    assert report_data.widths_used(series[0], [4, 8, 16]) == {8: 1.0}
    assert report_data.widths_used(series[0], [2, 4]) == {4: 1.0}
    assert sum(report_data.widths_used(series[1], [1, 4, 8, 16]).values()) == pytest.approx(1)


# --- files


def test_the_table_for_a_model_card(one: Path, tmp_path: Path) -> None:
    report(one, out=tmp_path)
    lines = (tmp_path / "report.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert {line.count("|") for line in rows} == {9}
    assert len(rows) == 2 + len(read_run(one).cells)
    tau = read_run(one).cells[0]["acceptance_length"]
    assert rows[2].startswith("| eagle3 | T = 0 · size 6 | **") and f"**{tau:.2f}**" in rows[2]


def test_a_bar_in_a_name_does_not_split_a_row(tmp_path: Path) -> None:
    report(made_run(tmp_path / "a|b", requests=2, traced=0), out=tmp_path / "out")
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert "| a\\|b |" in text


@pytest.mark.slow
def test_pictures_are_written_and_named(
    one: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    report(one, out=tmp_path, options=())
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    names = {Path(path).name for path in found["pictures"]}
    assert names == {
        "acceptance_length.png", "acceptance_by_position.png", "acceptance_by_category.png",
        "acceptance_by_context.png", "reliability.png", "prediction.png", "costs.png",
        "training.png",
    }  # fmt: skip
    for path in found["pictures"]:
        data = Path(path).read_bytes()
        assert data.startswith(b"\x89PNG\r\n\x1a\n")
        assert struct.unpack(">II", data[16:24])[0] > 400
        assert f"]({Path(path).name})" in (tmp_path / "report.md").read_text(encoding="utf-8")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        {*names, "report.html", "report.md"}
    )


def test_without_matplotlib_it_says_what_to_do(
    one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"headway\[plots\]'.*--no-plots"):
        script.main([str(one), "--out", str(tmp_path)])
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("{}/nowhere", "--out", "{}/out"), "holds no result.json"),
        (("{}/a", "{}/a", "--out", "{}/out"), "a run is given twice"),
        (("{}/a", "--out", "{}/a/result.json"), "name a folder"),
        (("{}/a", "--out", "{}/out", "--traces", "-1"), "--traces must be at least 0"),
    ],
)
def test_errors_are_one_line(
    tmp_path: Path, args: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made_run(tmp_path / "a", requests=2, traced=0)
    with pytest.raises(SystemExit) as exit_info:
        run(lambda: script.main([arg.format(tmp_path) for arg in args]))
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
