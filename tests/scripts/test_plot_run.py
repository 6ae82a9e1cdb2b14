"""What is drawn of a run: its numbers are right, its file is a picture, its errors are one line."""

import json
import math
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts import plot_run as script
from scripts.common import run

LINES = [
    {
        "step": 10, "train/loss": 5.0, "train/loss_0": 4.0, "train/loss_1": 6.0,
        "train/accuracy_0": 0.2, "train/accuracy_1": 0.1, "train/grad_norm": 3.0,
        "train/lr": 1e-3, "train/tokens": 1000, "train/seconds": 4.0,
    },
    {"step": 10, "eval/acceptance_length": 1.5, "eval/acceptance_0": 0.3, "eval/acceptance_1": 0.2},
    {
        "step": 20, "train/loss": 3.0, "train/loss_0": 2.5, "train/loss_1": 3.5,
        "train/accuracy_0": 0.4, "train/accuracy_1": 0.3, "train/grad_norm": math.inf,
        "train/lr": 5e-4, "train/tokens": 4000, "train/seconds": 6.0, "train/rows": [3, 4],
    },
    {"step": 20, "eval/acceptance_length": 2.5},
]  # fmt: skip


def written(folder: Path, lines: list[dict[str, Any]] = LINES, rest: str = "") -> Path:
    folder.mkdir(parents=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + rest)
    return folder


def plot(*args: object, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    script.main([str(arg) for arg in args])
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert data.endswith(b"IEND\xaeB`\x82")
    return struct.unpack(">II", data[16:24])


# --- numbers


def test_series_are_the_finite_numbers_by_step() -> None:
    found = script.series(LINES)
    assert found["train/loss"] == [(10, 5.0), (20, 3.0)]
    assert found["train/grad_norm"] == [(10, 3.0)]
    assert found["eval/acceptance_length"] == [(10, 1.5), (20, 2.5)]
    assert "train/rows" not in found and "step" not in found


def test_throughput_is_of_the_steps_since_the_line_before() -> None:
    """1000 tokens in 4 seconds, then 3000 in 2."""
    assert script.series(LINES)["tokens_per_second"] == [(10, 250.0), (20, 1500.0)]
    standing = [LINES[0], {**LINES[0], "step": 11}]
    assert script.series(standing)["tokens_per_second"] == [(10, 250.0)]


def test_every_panel_gets_its_series() -> None:
    runs = {"a": script.series(LINES), "b": script.series(LINES[:1])}
    shown = {
        panel.name: [
            (line.run, line.position, line.decoded, [value for _, value in line.points])
            for lines in script.panel_lines(panel, runs).values()
            for line in lines
        ]
        for panel in script.PANELS
    }
    one, two = ("a", None, False), ("b", None, False)
    assert shown == {
        "loss": [(*one, [5.0, 3.0]), (*two, [5.0])],
        "loss_by_position": [
            ("a", 0, False, [4.0, 2.5]), ("a", 1, False, [6.0, 3.5]),
            ("b", 0, False, [4.0]), ("b", 1, False, [6.0]),
        ],
        "acceptance_by_position": [
            ("a", 0, False, [0.2, 0.4]), ("a", 1, False, [0.1, 0.3]),
            ("a", 0, True, [0.3]), ("a", 1, True, [0.2]),
            ("b", 0, False, [0.2]), ("b", 1, False, [0.1]),
        ],
        "acceptance_length": [("a", None, True, [1.5, 2.5])],
        "throughput": [(*one, [250.0, 1500.0]), (*two, [250.0])],
        "learning_rate": [(*one, [1e-3, 5e-4]), (*two, [1e-3])],
        "gradient_norm": [(*one, [3.0]), (*two, [3.0])],
    }  # fmt: skip


def test_runs_have_the_shortest_names_that_differ(tmp_path: Path) -> None:
    a, b = written(tmp_path / "x" / "eagle3"), written(tmp_path / "y" / "eagle3")
    assert list(script.labels([a])) == ["eagle3"]
    assert list(script.labels([a, b / "metrics.jsonl"])) == ["x/eagle3", "y/eagle3"]
    other = a / "old.jsonl"
    other.write_text("")
    assert list(script.labels([a, other])) == ["eagle3", "eagle3/old.jsonl"]


# --- pictures


def test_one_picture_of_all_panels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "runs.png"
    found = plot(written(tmp_path / "a"), written(tmp_path / "b"), "--out", out, capsys=capsys)
    assert found == {
        "files": [str(out)],
        "panels": [panel.name for panel in script.PANELS],
        "last_step": {"a": 20, "b": 20},
    }
    width, height = png_size(out)
    assert width > 1200 and height > 900
    assert list(out.parent.iterdir()) == [out]


def test_a_picture_of_each_panel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Panels without numbers are left out."""
    a = written(tmp_path / "a", [LINES[0]])
    found = plot(a, "--out", tmp_path / "out", capsys=capsys)
    assert "acceptance_length" not in found["panels"]
    assert sorted(path.stem for path in (tmp_path / "out").iterdir()) == sorted(found["panels"])
    assert all(png_size(Path(path))[0] > 400 for path in found["files"])


def test_the_axes_hold_the_lines() -> None:
    from matplotlib.figure import Figure

    runs = {"a": script.series(LINES), "b": script.series(LINES)}
    panel = script.PANELS[2]
    axes = Figure().add_subplot()
    script.draw_panel(axes, panel, script.panel_lines(panel, runs))
    drawn = [(line.get_color(), line.get_ydata().tolist()) for line in axes.get_lines()]
    per_run = [[0.2, 0.4], [0.1, 0.3], [0.3], [0.2]]
    assert drawn == [(f"C{number}", values) for number in range(2) for values in per_run]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b"]
    alone = Figure().add_subplot()
    script.draw_panel(alone, panel, script.panel_lines(panel, {"a": runs["a"]}))
    assert [text.get_text() for text in alone.get_legend().get_texts()] == [
        "position 1", "position 2", "position 1 (decoder)", "position 2 (decoder)"
    ]  # fmt: skip
    assert {line.get_color() for line in alone.get_lines()} == {"C0", "C1"}


# --- a run that is going on, and errors


def test_a_last_line_that_is_cut_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    going = written(tmp_path / "a", LINES[:2], rest=json.dumps(LINES[2])[:40])
    assert plot(going, "--out", tmp_path / "a.png", capsys=capsys)["last_step"] == {"a": 10}
    png_size(tmp_path / "a.png")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("{}/nowhere", "--out", "{}/a.png"), "a run folder holds metrics.jsonl"),
        (("{}/empty", "--out", "{}/a.png"), "holds no metrics yet"),
        (("{}/a", "{}/a/metrics.jsonl", "--out", "{}/a.png"), "a run is given twice"),
        (("{}/a", "--out", "{}/a.jpg"), "name a .png file or a folder"),
    ],
)
def test_errors_are_one_line(
    tmp_path: Path, args: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path / "a")
    written(tmp_path / "empty", [])
    with pytest.raises(SystemExit) as exit_info:
        run(lambda: script.main([arg.format(tmp_path) for arg in args]))
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_without_matplotlib_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"pip install 'headway\[plots\]'"):
        script.main([str(written(tmp_path / "a")), "--out", str(tmp_path / "a.png")])
    assert not (tmp_path / "a.png").exists()
