"""Checkpoints: what goes in comes out, and nothing that was saved is ever lost."""

import errno
import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.modeling_utils
from accelerate import Accelerator
from safetensors import SafetensorError

from drafters import Drafter, build_drafter, load_drafter
from tests.tiny import tiny_target
from training import checkpoint
from training.checkpoint import (
    CheckpointError,
    check_files,
    find_checkpoint,
    list_checkpoints,
    load_checkpoint,
    read_state,
    save_checkpoint,
    step_of,
)
from training.engines import Engine
from training.objectives import ObjectiveOptions, build_objective

STATE = {"tokens": 123, "scheduler": {"last_epoch": 3}, "identity": {"run.seed": 1}}


def make_head(seed: int = 0, family: str = "medusa", **options: Any) -> Drafter:
    options = options or ({"num_heads": 2} if family == "medusa" else {"draft_vocab_size": 40})
    drafter = build_drafter(family, tiny_target(layers=3), seed, **options)
    drafter.set_draft_vocab(torch.arange(96) * 7 % 96)
    return drafter


def make_engine(drafter: Drafter, lr: float = 1e-2) -> Engine:
    """One process, AdamW."""
    objective = build_objective(drafter, ObjectiveOptions())
    return Engine(
        Accelerator(cpu=True),
        objective,
        lambda bare: [torch.optim.AdamW(bare.parameters(), lr=lr, betas=(0.9, 0.95))],
        clip=0.0,
    )


def train(engine: Engine, steps: range) -> None:
    """Steps on a made-up loss that needs nothing but the parameters."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        loss = sum(
            (p * torch.randn(p.shape, generator=generator)).sum()
            for p in engine.parameters.values()
        )
        engine.backward(loss, last=True)
        engine.step()


def save_all(out: Path, step: int, engine: Engine, keep: int = 9, **more: Any) -> Path:
    state = STATE | more.pop("state", {})
    return save_checkpoint(
        out, step, engine.bare.drafter, engine.optimizer_state(), state, keep, **more
    )


def save(out: Path, step: int, keep: int = 9, **state: Any) -> Path:
    engine = make_engine(make_head())
    train(engine, range(step))
    return save_all(out, step, engine, keep, state=state)


def load(folder: Path, engine: Engine) -> dict[str, Any]:
    check_files(folder)
    found = load_checkpoint(folder)
    engine.load_weights(found.raw)
    engine.load_optimizer_state(found.optimizer)
    return found.state


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


# --- round trip


@pytest.mark.parametrize("family", ["eagle3", "medusa"])
def test_round_trip_continues_bit_for_bit(tmp_path: Path, family: str) -> None:
    """Weights, AdamW's moments and step counts: the next steps are the same."""
    straight = make_engine(make_head(family=family))
    train(straight, range(3))
    folder = save_all(tmp_path, 3, straight, keep=1)
    resumed = make_engine(make_head(seed=7, family=family))
    first = next(iter(straight.parameters))
    assert not torch.equal(resumed.parameters[first], straight.parameters[first])
    state = load(folder, resumed)
    assert {key: state[key] for key in STATE} == STATE
    assert state["step"] == 3
    for engine in (straight, resumed):
        train(engine, range(3, 6))
    for name, value in straight.parameters.items():
        assert torch.equal(value, resumed.parameters[name]), name
    one, other = straight.optimizer_state(), resumed.optimizer_state()
    assert one.keys() == other.keys() == straight.parameters.keys()
    for name, values in one.items():
        assert values.keys() == {"step", "exp_avg", "exp_avg_sq"}
        for key, value in values.items():
            assert torch.equal(value, other[name][key]), (name, key)


def test_without_the_optimizer_s_state_it_would_not(tmp_path: Path) -> None:
    """Negative control of the test above."""
    straight, resumed = make_engine(make_head()), make_engine(make_head())
    train(straight, range(3))
    resumed.load_weights(load_checkpoint(save_all(tmp_path, 3, straight)).raw)
    for engine in (straight, resumed):
        train(engine, range(3, 6))
    first = next(iter(straight.parameters))
    assert not torch.equal(straight.parameters[first], resumed.parameters[first])


def test_weights_beside_an_average(tmp_path: Path) -> None:
    """``head/`` is what would be exported, and training goes on from its own weights."""
    engine = make_engine(make_head())
    train(engine, range(2))
    raw = {name: value + 1 for name, value in engine.weights().items()}
    found = load_checkpoint(save_all(tmp_path, 2, engine, weights=raw))
    for name, value in engine.parameters.items():
        assert torch.equal(found.weights[name], value)
        assert torch.equal(found.raw[name], value + 1)


def test_files_of_a_checkpoint(tmp_path: Path) -> None:
    """safetensors and JSON only; the head inside is an ordinary one."""
    folder = save(tmp_path, 2)
    assert folder == tmp_path / "checkpoints" / "step-000002"
    assert set(snapshot(folder)) == {
        "head/config.json",
        "head/model.safetensors",
        "optimizer.safetensors",
        "trainer_state.json",
    }
    head = load_drafter(folder / "head", tiny_target(layers=3))
    engine = make_engine(make_head())
    train(engine, range(2))
    assert torch.equal(next(head.parameters()), next(engine.bare.drafter.parameters()))


# --- rotation and choice


def test_the_oldest_are_dropped(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10):
        save(tmp_path, step, keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000003", "step-000010"]
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == ["step-000003", "step-000010"]


def test_newest_by_number_even_past_six_digits(tmp_path: Path) -> None:
    """A run of more than a million steps must not resume from step 999 999."""
    for name in ("step-999999", "step-1000000"):
        folder = tmp_path / "checkpoints" / name
        folder.mkdir(parents=True)
        (folder / "trainer_state.json").write_text("{}")
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step-999999", "step-1000000"]


def test_find_checkpoint(tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path, "auto") is None
    assert find_checkpoint(tmp_path, "none") is None
    first, second = save(tmp_path, 1), save(tmp_path, 2)
    assert find_checkpoint(tmp_path, "auto") == second
    with pytest.raises(CheckpointError, match=r"holds step-000002, which a run from step 1"):
        find_checkpoint(tmp_path, str(first))
    assert find_checkpoint(tmp_path, str(second)) == second
    assert find_checkpoint(tmp_path / "elsewhere", str(first)) == first
    with pytest.raises(CheckpointError, match=r"run\.resume=none .* step-000002"):
        find_checkpoint(tmp_path, "none")
    with pytest.raises(CheckpointError, match=r"run\.resume: .* \(no trainer_state\.json"):
        find_checkpoint(tmp_path, str(tmp_path))


def test_half_written_folders_are_not_checkpoints(tmp_path: Path) -> None:
    kept = save(tmp_path, 1)
    (tmp_path / "checkpoints" / ".writing-step-000002" / "head").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-000003").mkdir()
    assert list_checkpoints(tmp_path) == [kept]
    assert find_checkpoint(tmp_path, "auto") == kept


def test_saving_over_what_a_kill_left_behind(tmp_path: Path) -> None:
    left = tmp_path / "checkpoints" / ".writing-step-000002"
    (left / "head").mkdir(parents=True)
    (left / "junk").write_text("half a file")
    folder = save(tmp_path, 2)
    assert "junk" not in snapshot(folder)
    assert not left.exists()


def test_protected_checkpoints_outlive_the_rotation(tmp_path: Path) -> None:
    engine = make_engine(make_head())
    for step in range(1, 7):
        save_all(tmp_path, step, engine, keep=2, protected=[2])
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [2, 5, 6]


# --- full disk


def no_space(*args: object, **kwargs: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def no_space_in_rust(*args: object, **kwargs: object) -> None:
    raise SafetensorError("Error while serializing: I/O error: No space left on device")


@pytest.mark.parametrize("failure", [no_space, no_space_in_rust])
@pytest.mark.parametrize("place", ["optimizer", "head", "json", "sync", "rename"])
def test_full_disk_keeps_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, failure: Callable[..., None]
) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    before = snapshot(tmp_path)
    with monkeypatch.context() as patch:
        if place == "optimizer":
            patch.setattr(checkpoint, "save_file", failure)
        elif place == "head":
            patch.setattr(transformers.modeling_utils, "safe_save_file", failure)
        elif place == "json":
            patch.setattr(Path, "write_text", failure)
        elif place == "sync":
            patch.setattr(checkpoint, "_sync", failure)
        else:
            patch.setattr(checkpoint.os, "replace", failure)
        with pytest.raises(CheckpointError, match="No space left") as caught:
            save(tmp_path, 3, keep=1)
    assert "free disk space" in str(caught.value)
    assert "step-000003" in str(caught.value)
    assert snapshot(tmp_path) == before
    assert not list((tmp_path / "checkpoints").glob(".writing*"))
    assert save(tmp_path, 3, keep=1).exists()  # and with room again it goes on


def test_unwritable_place_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    with pytest.raises(CheckpointError, match="cannot write checkpoint"):
        save(tmp_path, 1)


# --- damage


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def flip(path: Path) -> None:
    """One bit of the last number, which no format would notice."""
    content = bytearray(path.read_bytes())
    content[-2 if path.suffix == ".safetensors" else 0] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    "name", ["optimizer.safetensors", "head/model.safetensors", "trainer_state.json"]
)
@pytest.mark.parametrize("damage", [cut, flip, Path.unlink])
def test_damaged_checkpoint_is_named(
    tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    folder = save(tmp_path, 1)
    damage(folder / name)
    with pytest.raises(CheckpointError, match=r"step-000001 is damaged .* delete it"):
        check_files(folder)


def test_a_checkpoint_without_digests_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    state = read_state(folder)
    del state["files"]
    (folder / "trainer_state.json").write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match=r"earlier version .* drafter\.init_from"):
        check_files(folder)


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    """The operating system refuses to make a file as large as the optimizer's."""
    kept = save(tmp_path, 1)
    before = snapshot(tmp_path)
    limit = (kept / "optimizer.safetensors").stat().st_size // 2
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(CheckpointError, match=r"cannot write checkpoint .* untouched"):
            save(tmp_path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert snapshot(tmp_path) == before
    assert save(tmp_path, 2).exists()


@pytest.mark.parametrize(
    "other",
    [
        {"family": "eagle3"},
        {"num_heads": 3},
        {"num_heads": 2, "num_layers": 2},
        {"num_heads": 2, "confidence_head": True},
        {"num_heads": 2, "draft_vocab_size": 50},
    ],
    ids=["family", "heads", "layers", "confidence", "draft vocabulary"],
)
def test_checkpoint_of_another_head_is_refused(tmp_path: Path, other: dict) -> None:
    folder = save(tmp_path, 1)
    with pytest.raises(ValueError, match="different head"):
        load(folder, make_engine(make_head(**other)))


def test_read_state(tmp_path: Path) -> None:
    folder = save(tmp_path, 4, tokens=77)
    state = read_state(folder)
    assert (state["step"], state["tokens"]) == (4, 77)
    assert json.loads((folder / "trainer_state.json").read_text()) == state
