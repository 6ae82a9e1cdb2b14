"""Several processes answer together: each prompt once, whoever fails or is killed, and when.

Processes are threads here, with a target each; tests/recipes/test_distributed.py has real ones.
"""

import json
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drafters import TargetModel
from recipes import rows as recipe_rows
from recipes.rows import load_answers
from tests.tiny import tiny_target
from training.answers import file as answer_file
from training.answers import shares as answer_shares
from training.answers.file import Answered, AnswerFile, AnswerOptions, plan, share_path, shares_of
from training.answers.local import generate_answers, made_by_of
from training.answers.shares import answer_share, answer_together, failure_mark, share_of
from training.config import parse_config

ROWS = [{"prompt": f"{'long ' * (i % 5)}{i}?", "number": i} for i in range(11)]
OPTIONS = AnswerOptions(max_new_tokens=6, batch_size=2)


@pytest.fixture(scope="module")
def targets() -> list[TargetModel]:
    return [tiny_target(layers=2) for _ in range(3)]


@pytest.fixture(scope="module")
def alone(targets: list[TargetModel], tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """What one process answers."""
    out = tmp_path_factory.mktemp("alone") / "out.jsonl"
    generate_answers(targets[0], ROWS, out, OPTIONS, progress=False)
    return by_number(out)


def by_number(out: Path) -> dict[int, Any]:
    """Answers by row; each prompt is there once."""
    found = [json.loads(line) for line in out.read_text().splitlines()]
    answers = {row["number"]: row["answer_ids"] for row in found}
    assert len(answers) == len(found)
    return answers


def share(targets: list[TargetModel], out: Path, rank: int, world: int, count: int | None) -> None:
    """Write what a process has written when it is killed after ``count`` answers."""
    made_by = made_by_of(targets[rank])
    mine = share_of(plan(ROWS, OPTIONS, made_by), rank, world)[:count]
    path, mark = share_path(out, rank, world), failure_mark(out)
    done = answer_share(targets[rank], mine, path, mark, OPTIONS, made_by)
    assert done.failure is None and done.answered.written == len(mine)


def together(
    monkeypatch: pytest.MonkeyPatch, targets: list[TargetModel], out: Path, world: int = 2
) -> list[Any]:
    """What ``answer_together`` gave, or raised, in each of these processes."""
    barrier, said = threading.Barrier(world), [None] * world

    def exchange(rank: int, own: Any) -> list[Any]:
        said[rank] = own
        barrier.wait(20)
        everyone = list(said)
        barrier.wait(20)
        return everyone

    def on_main(accelerator: Any, work: Callable[[], Any]) -> Any:
        result: tuple[Any, Exception | None] = (None, None)
        if accelerator.is_main_process:
            try:
                result = (work(), None)
            except (ValueError, OSError) as error:
                result = (None, error)
        made, failure = exchange(accelerator.process_index, result)[0]
        if failure is not None:
            raise failure
        return made

    def gather(own: list[Any]) -> list[Any]:
        return exchange(int(threading.current_thread().name.split("_")[-1]), own[0])

    def process(rank: int) -> Any:
        threading.current_thread().name = f"rank_{rank}"
        one = SimpleNamespace(process_index=rank, num_processes=world, is_main_process=rank == 0)
        try:
            return answer_together(targets[rank], ROWS, out, OPTIONS, one, progress=False)
        except Exception as error:
            return error

    monkeypatch.setattr(answer_shares, "on_main", on_main)
    monkeypatch.setattr(answer_shares, "gather_object", gather)
    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(process, range(world)))


def test_shares_are_a_part_each_of_the_same_mix(targets: list[TargetModel]) -> None:
    planned = plan(ROWS, OPTIONS, [])
    shares = [share_of(planned, rank, 3) for rank in range(3)]
    assert sorted(one.key for part in shares for one in part) == sorted(one.key for one in planned)
    assert [len(part) for part in shares] == [4, 4, 3]
    again = share_of(planned[::-1], 1, 3)
    assert [one.key for one in again] == [one.key for one in shares[1]]
    sizes = [sum(len(one.row["prompt"]) for one in part) / len(part) for part in shares]
    assert max(sizes) - min(sizes) < 4


def test_processes_answer_what_one_does(
    monkeypatch: pytest.MonkeyPatch, targets: list[TargetModel], alone: Any, tmp_path: Path
) -> None:
    out = tmp_path / "deep" / "out.jsonl"
    counts = together(monkeypatch, targets, out, world=3)
    assert [one.written for one in counts] == [11, 11, 11]
    assert by_number(out) == alone
    assert [path.name for path in out.parent.iterdir()] == ["out.jsonl"]
    before = out.read_bytes()
    assert [one.written for one in together(monkeypatch, targets, out)] == [0, 0]
    assert out.read_bytes() == before


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_stopped_run_goes_on_with_any_number_of_processes(
    monkeypatch: pytest.MonkeyPatch,
    targets: list[TargetModel],
    alone: Any,
    tmp_path: Path,
    world: int,
) -> None:
    """Some in the file, some in shares of three processes, one line of them cut."""
    out = tmp_path / "out.jsonl"
    generate_answers(targets[0], ROWS[:2], out, OPTIONS, progress=False)
    before = by_number(out)
    share(targets, out, 0, 3, 2)
    share(targets, out, 2, 3, 3)
    path = share_path(out, 2, 3)
    path.write_bytes(path.read_bytes()[:-20])
    had = (
        before
        | by_number(share_path(out, 0, 3))
        | {row["number"]: row for row in map(json.loads, path.read_text().splitlines()[:-1])}
    )
    if world == 1:
        counts = [generate_answers(targets[0], ROWS, out, OPTIONS, progress=False)]
    else:
        counts = together(monkeypatch, targets, out, world)
    assert {one.written for one in counts} == {11 - len(had)}
    assert by_number(out) == alone
    assert not shares_of(out)


@pytest.mark.parametrize("moment", ["merge", "fsync", "replace", "unlink"])
def test_a_kill_during_the_merge_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
    targets: list[TargetModel],
    alone: Any,
    tmp_path: Path,
    moment: str,
) -> None:
    out = tmp_path / "out.jsonl"
    generate_answers(targets[0], ROWS[:3], out, OPTIONS, progress=False)
    for rank in range(2):
        share(targets, out, rank, 2, None)

    def killed(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if moment == "merge":
            patch.setattr(answer_file.shutil, "copyfileobj", killed)
        elif moment == "unlink":
            patch.setattr(Path, "unlink", killed)
        else:
            patch.setattr(os, moment, killed)
        with pytest.raises(KeyboardInterrupt), AnswerFile(out):
            pass
    kept = [json.loads(line)["number"] for line in out.read_text().splitlines()]
    assert kept == [0, 1, 2] or sorted(kept) == list(range(11)), "whole before, or whole after"
    assert len(shares_of(out)) == 2
    assert generate_answers(targets[0], ROWS, out, OPTIONS, progress=False).written == 0
    assert by_number(out) == alone and not shares_of(out)


def test_a_full_disk_during_the_merge_keeps_all(
    monkeypatch: pytest.MonkeyPatch, targets: list[TargetModel], tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    share(targets, out, 0, 1, None)

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with (
            pytest.raises(ValueError, match=r"0-of-1.*No space left.*all of them are kept"),
            AnswerFile(out),
        ):
            pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.0-of-1.jsonl", "out.jsonl"]
    with AnswerFile(out) as file:
        assert len(file.done) == 11


def test_the_merged_file_is_still_claimed_and_written_to(
    targets: list[TargetModel], alone: Any, tmp_path: Path
) -> None:
    """Merging exchanges the file under the one who has it open."""
    out = tmp_path / "out.jsonl"
    share(targets, out, 1, 2, 4)
    with AnswerFile(out) as file:
        assert len(file.done) == 4
        with pytest.raises(ValueError, match="another run is writing to"), AnswerFile(out):
            pass
    assert generate_answers(targets[0], ROWS, out, OPTIONS, progress=False).written == 7
    assert by_number(out) == alone


def test_a_file_exchanged_before_it_was_claimed_is_not_written_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Opened, then merged by another run that ends, then claimed: it has lost its name."""
    out, lock = tmp_path / "out.jsonl", answer_file.locks.lock

    def late(file: Any) -> bool:
        other = tmp_path / "merged"
        other.write_text("")
        os.replace(other, out)
        return lock(file)

    monkeypatch.setattr(answer_file.locks, "lock", late)
    with pytest.raises(ValueError, match="another run is writing to"), AnswerFile(out):
        pass


def test_a_share_that_is_being_written_is_not_merged(
    targets: list[TargetModel], tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    share(targets, out, 0, 2, 2)
    path = share_path(out, 0, 2)
    with (
        AnswerFile(path),
        pytest.raises(ValueError, match=r"another run is writing to .*0-of-2"),
        AnswerFile(out),
    ):
        pass
    assert len(by_number(path)) == 2


def test_files_of_other_names_are_no_shares(tmp_path: Path) -> None:
    for name in ("out.0-of-2.jsonl", "out.10-of-16.jsonl", "out.jsonl", "other.0-of-2.jsonl"):
        (tmp_path / name).touch()
    (tmp_path / "out.1-of-2.jsonl").mkdir()
    found = [path.name for path in shares_of(tmp_path / "out.jsonl")]
    assert found == ["out.0-of-2.jsonl", "out.10-of-16.jsonl"]


def test_a_failure_of_any_process_stops_all_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, targets: list[TargetModel], alone: Any, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    failed = threading.Event()

    def broken(*args: Any, **options: Any) -> Any:
        failed.set()
        raise RuntimeError("CUDA out of memory")

    def waiting(*args: Any, **options: Any) -> Any:
        assert failed.wait(20)
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline and not failure_mark(out).exists():
            time.sleep(0.001)
        return targets[0].model.__class__.generate(targets[0].model, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(targets[1].model, "generate", broken)
        patch.setattr(targets[0].model, "generate", waiting)
        errors = together(patch, targets, out)
    for error in errors:
        assert isinstance(error, ValueError)
        assert "process 1 of 2: RuntimeError: CUDA out of memory. 2 answers were" in str(error)
    assert not failure_mark(out).exists()
    assert [one.written for one in together(monkeypatch, targets, out)] == [9, 9]
    assert by_number(out) == alone


def test_a_row_without_a_prompt_stops_all_before_anything_is_answered(
    monkeypatch: pytest.MonkeyPatch, targets: list[TargetModel], tmp_path: Path
) -> None:
    monkeypatch.setitem(globals(), "ROWS", [*ROWS, {"text": "no prompt"}])
    errors = together(monkeypatch, targets, tmp_path / "out.jsonl")
    assert all(isinstance(error, ValueError) and "row 11" in str(error) for error in errors)
    assert not list(tmp_path.iterdir())


def test_processes_that_see_different_files_do_not_train(
    monkeypatch: pytest.MonkeyPatch, targets: list[TargetModel], tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    names = [
        f"--data.train=[{prompts}]",
        f"--run.out={tmp_path}",
        "--drafter.type=eagle3",
        "--target.name=x",
    ]
    config = parse_config([*names, "--data.regenerate=true", "--data.answer_tokens=4"])
    accelerator: Any = SimpleNamespace(num_processes=1)
    assert len(load_answers(config, targets[0], accelerator)) == 11
    monkeypatch.setattr(recipe_rows, "gather_object", lambda own: [*own, 10])
    with pytest.raises(ValueError, match="the processes see different contents"):
        load_answers(config, targets[0], accelerator)


def test_what_processes_did_is_summed() -> None:
    total = Answered([], 1, 2, [{"id": "a"}], ["too long"])
    total.add(Answered([], 3, 4, [{"id": "b"}], []))
    assert total == Answered([], 4, 6, [{"id": "a"}, {"id": "b"}], ["too long"])
