"""Checkpoints: what goes in comes out, and nothing that was saved is ever lost."""

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.modeling_utils
from safetensors import SafetensorError

from drafters import Drafter, build_drafter, load_drafter
from tests.tiny import tiny_target
from training import checkpoint
from training.checkpoint import (
    CheckpointError,
    find_checkpoint,
    list_checkpoints,
    load_checkpoint,
    read_state,
    save_checkpoint,
)

STATE = {"tokens": 123, "scheduler": {"last_epoch": 3}, "identity": {"run.seed": 1}}


def make_head(seed: int = 0, family: str = "medusa", **options: Any) -> Drafter:
    options = options or ({"num_heads": 2} if family == "medusa" else {"draft_vocab_size": 40})
    drafter = build_drafter(family, tiny_target(layers=3), seed, **options)
    drafter.set_draft_vocab(torch.arange(96) * 7 % 96)
    return drafter


def make_optimizer(drafter: Drafter, lr: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.AdamW(drafter.parameters(), lr=lr, betas=(0.9, 0.95))


def train(drafter: Drafter, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Steps on a made-up loss that needs nothing but the parameters."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        loss = sum(
            (p * torch.randn(p.shape, generator=generator)).sum() for p in drafter.parameters()
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def save(out: Path, step: int, keep: int = 9, **state: Any) -> Path:
    drafter = make_head()
    optimizer = make_optimizer(drafter)
    train(drafter, optimizer, range(step))
    return save_checkpoint(out, step, drafter, optimizer, STATE | state, keep)


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


# --- round trip


@pytest.mark.parametrize("family", ["eagle3", "medusa"])
def test_round_trip_continues_bit_for_bit(tmp_path: Path, family: str) -> None:
    """Weights, draft vocabulary, AdamW's moments and step counts: the next steps are the same."""
    straight = make_head(family=family)
    optimizer = make_optimizer(straight)
    train(straight, optimizer, range(3))
    folder = save_checkpoint(tmp_path, 3, straight, optimizer, STATE, keep=1)
    resumed = make_head(seed=7, family=family)
    resumed_optimizer = make_optimizer(resumed, lr=0.5)
    assert not torch.equal(next(resumed.parameters()), next(straight.parameters()))
    state = load_checkpoint(folder, resumed, resumed_optimizer)
    assert {key: state[key] for key in STATE} == STATE
    assert state["step"] == 3
    train(straight, optimizer, range(3, 6))
    train(resumed, resumed_optimizer, range(3, 6))
    for (name, one), (_, other) in zip(
        straight.state_dict().items(), resumed.state_dict().items(), strict=True
    ):
        assert torch.equal(one, other), name
    one, other = optimizer.state_dict(), resumed_optimizer.state_dict()
    assert json.dumps(one["param_groups"]) == json.dumps(other["param_groups"])
    for index, values in one["state"].items():
        for name, value in values.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other["state"][index][name]))


def test_without_the_optimizer_s_state_it_would_not(tmp_path: Path) -> None:
    """Negative control of the test above."""
    straight = make_head()
    optimizer = make_optimizer(straight)
    train(straight, optimizer, range(3))
    resumed = make_head()
    resumed.load_state_dict(straight.state_dict())
    fresh = make_optimizer(resumed)
    train(straight, optimizer, range(3, 6))
    train(resumed, fresh, range(3, 6))
    assert not torch.equal(next(straight.parameters()), next(resumed.parameters()))


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
    drafter = make_head()
    train(drafter, make_optimizer(drafter), range(2))
    assert torch.equal(next(head.parameters()), next(drafter.parameters()))


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
    assert find_checkpoint(tmp_path, str(first)) == first
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


@pytest.mark.parametrize(
    "name", ["optimizer.safetensors", "head/model.safetensors", "trainer_state.json"]
)
@pytest.mark.parametrize("damage", [cut, Path.unlink])
def test_damaged_checkpoint_is_named(
    tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    folder = save(tmp_path, 1)
    damage(folder / name)
    drafter = make_head()
    with pytest.raises(CheckpointError, match=r"step-000001 is damaged .* delete it"):
        load_checkpoint(folder, drafter, make_optimizer(drafter))


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
    drafter = make_head(**other)
    with pytest.raises(CheckpointError, match="different head"):
        load_checkpoint(folder, drafter, make_optimizer(drafter))


def test_read_state(tmp_path: Path) -> None:
    folder = save(tmp_path, 4, tokens=77)
    state = read_state(folder)
    assert (state["step"], state["tokens"]) == (4, 77)
    assert json.loads((folder / "trainer_state.json").read_text()) == state
