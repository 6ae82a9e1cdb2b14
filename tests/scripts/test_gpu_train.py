"""The one-run script for a GPU: pieces of a target, what it starts, and how it stops.

Its Python programs are replaced by a shell script that records how it was called and writes the
files that the next step looks for.
"""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STUB = r"""#!/usr/bin/env bash
set -eu
if [[ "$1" == -c ]]; then exit 1; fi
echo "$*" >> "$CALLS"
module="$2"; shift 2
out=; recipe=; part=
while [[ $# -gt 0 ]]; do
  case "$1" in
    --out) out="$2" ;;
    --recipe) recipe="$(basename "$2" .yaml)" ;;
    --part) part="$2" ;;
  esac
  shift
done
[[ "$recipe" != broken ]] || { echo "error: a broken recipe" >&2; exit 2; }
case "$module $part" in
  "scripts.generate_answers ") echo '{"answer_ids": [1]}' > "$out" ;;
  "scripts.equal_budget train") mkdir -p "$out/$recipe/head" ;;
  "scripts.equal_budget evaluate") printf '| method |\n{"methods": []}\n' ;;
  "scripts.shard_heads ") mkdir -p "$out" ;;
esac
"""


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, str]:
    """The environment of a run whose target is a folder of two small files."""
    target = tmp_path / "target with a space"
    target.mkdir()
    (target / "config.json").write_text("{}")
    (target / "model.safetensors").write_bytes(os.urandom(2_500_000))
    for name in ("prompts.jsonl", "dev.jsonl"):
        (tmp_path / name).write_text('{"prompt": "?"}\n')
    stub = tmp_path / "python"
    stub.write_text(STUB)
    stub.chmod(0o755)
    return {
        "PATH": os.environ["PATH"],
        "PYTHON": str(stub),
        "CALLS": str(tmp_path / "calls"),
        "TARGET": str(target),
        "PROMPTS": str(tmp_path / "prompts.jsonl"),
        "DEV": str(tmp_path / "dev.jsonl"),
        "OUT": str(tmp_path / "out"),
        "RECIPES": "somewhere/one.yaml somewhere/two.yaml",
    }


def script(settings: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", "scripts/gpu_train.sh", *words]
    return subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True)


def packed(settings: dict[str, str], tmp_path: Path) -> dict[str, str]:
    done = script(settings, "pack", settings["TARGET"], str(tmp_path / "pieces"), "1")
    assert done.returncode == 0, done.stderr
    rest = {name: value for name, value in settings.items() if name != "TARGET"}
    return {**rest, "PIECES": str(tmp_path / "pieces")}


def calls(settings: dict[str, str]) -> list[str]:
    path = Path(settings["CALLS"])
    return path.read_text().splitlines() if path.exists() else []


def test_every_step_is_run_at_its_scale(settings: dict[str, str]) -> None:
    done = script({**settings, "SCALE": "0.01", "JOBS": "2"})
    assert done.returncode == 0, done.stderr
    assert "| method |" in done.stdout
    found = calls(settings)
    answers = [line for line in found if "scripts.generate_answers" in line]
    assert len(answers) == 2
    assert all("--min-tokens 25000 " in line for line in answers)  # 50,000 between two
    assert {line.split("--seed ")[1].split()[0] for line in answers} == {"0", "1000"}
    trained = [line for line in found if "--part train" in line]
    assert len(trained) == 2
    assert all("--seconds 1 " in line and "--dtype bfloat16" in line for line in trained)
    measured = [line for line in found if "--part evaluate" in line]
    assert len(measured) == 3, "each alone, then all from what was measured"
    assert all("bfloat16" not in line for line in measured)
    assert "one/head" in found[-1] and "two/head" in found[-1] and "--shard-mb 15" in found[-1]
    assert len((Path(settings["OUT"]) / "answers.jsonl").read_text().splitlines()) == 2


def test_the_same_command_answers_once(settings: dict[str, str]) -> None:
    assert script({**settings, "BRING": "two"}).returncode == 0
    first = calls(settings)
    assert "two/head" in first[-1] and "one/head" not in first[-1]
    assert script(settings).returncode == 0
    assert not any("generate_answers" in line for line in calls(settings)[len(first) :])


def test_pieces_are_joined_checked_and_unpacked(settings: dict[str, str], tmp_path: Path) -> None:
    cut = packed(settings, tmp_path)
    pieces = sorted((tmp_path / "pieces").glob("target.tar.gz.[0-9]*"))
    assert len(pieces) == 3
    assert all(piece.stat().st_size <= 1_000_000 for piece in pieces)
    done = script(cut)
    assert done.returncode == 0, done.stderr
    for name in ("config.json", "model.safetensors"):
        unpacked = Path(settings["OUT"]) / "target" / name
        assert unpacked.read_bytes() == (Path(settings["TARGET"]) / name).read_bytes()
    assert f"--target {settings['OUT']}/target " in calls(settings)[0]


@pytest.mark.parametrize("damage", ["missing", "changed"])
def test_damaged_pieces_are_refused(settings: dict[str, str], tmp_path: Path, damage: str) -> None:
    cut = packed(settings, tmp_path)
    piece = tmp_path / "pieces" / "target.tar.gz.001"
    if damage == "missing":
        piece.unlink()
    else:
        content = bytearray(piece.read_bytes())
        content[5000] ^= 1
        piece.write_bytes(content)
    done = script(cut)
    assert done.returncode == 2
    assert "one is missing or damaged" in done.stderr
    assert not calls(settings)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"TARGET": ""}, "set TARGET (a folder) or PIECES"),
        ({"PIECES": "somewhere"}, "TARGET and PIECES exclude each other"),
        ({"PROMPTS": "/nowhere.jsonl"}, "/nowhere.jsonl is not a file"),
        ({"PROMPTS": ""}, "PROMPTS: JSONL of prompts to answer"),
        ({"TARGET": "/nowhere"}, "/nowhere holds no config.json"),
        ({"RECIPES": "a/one.yaml a/broken.yaml"}, "error: a broken recipe"),
        ({"BRING": "three"}, "BRING names none of the recipes"),
    ],
)
def test_mistakes_are_named(settings: dict[str, str], change: dict[str, str], message: str) -> None:
    done = script({**settings, **change})
    assert done.returncode != 0
    assert message in done.stderr


def test_arguments_are_refused(settings: dict[str, str]) -> None:
    assert "unknown argument fast" in script(settings, "fast").stderr
