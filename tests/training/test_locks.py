"""One run at a time, where the file system can tell."""

import errno
import logging
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from recipes.train import claim as claim_run
from training import locks
from training.answers.file import AnswerFile
from training.store.writer import claim as claim_store

PLACES: dict[str, Any] = {
    "run": lambda folder: claim_run(folder, True),
    "store": claim_store,
    "answers": lambda folder: AnswerFile(folder / "answers.jsonl"),
}


def enter(place: str, folder: Path) -> AbstractContextManager[Any]:
    return PLACES[place](folder)


def refusing(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def flock(file: Any, operation: int) -> None:
        raise OSError(code, "no")

    monkeypatch.setattr(locks.fcntl, "flock", flock)


def test_a_file_is_taken_until_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with path.open("w") as one, path.open("w") as two:
        assert locks.lock(one)
        assert not locks.lock(two)
        one.close()
        assert locks.lock(two)


@pytest.mark.parametrize("place", PLACES)
def test_a_second_run_is_refused(tmp_path: Path, place: str) -> None:
    with (
        enter(place, tmp_path),
        pytest.raises(ValueError, match=r"another (run|extraction) is writing"),
        enter(place, tmp_path),
    ):
        pass
    with enter(place, tmp_path):
        pass


@pytest.mark.parametrize("code", ["ENOSYS", "ENOLCK", "EOPNOTSUPP"])
@pytest.mark.parametrize("place", PLACES)
def test_without_locks_a_run_goes_on_and_says_so_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    place: str,
    code: str,
) -> None:
    refusing(monkeypatch, getattr(errno, code))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            with enter(place, tmp_path):
                pass
    assert caplog.text.count("has no locks") == 1 and str(tmp_path) in caplog.text


@pytest.mark.parametrize("place", PLACES)
def test_another_fault_is_not_taken_for_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    refusing(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match="no") as raised, enter(place, tmp_path):
        pass
    assert raised.value.errno == errno.EIO
