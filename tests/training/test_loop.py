"""The loop: gradients of the whole batch, exact resumption, and stops that lose nothing."""

import errno
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafters import build_drafter
from recipes.train import main
from tests.tiny import save_tiny_target, tiny_target
from training import checkpoint, signals
from training.checkpoint import CheckpointError, list_checkpoints
from training.config import (
    DataOptions,
    EvalOptions,
    OptimOptions,
    RunOptions,
    TargetOptions,
    TrainConfig,
)
from training.data.batches import PackedDataset
from training.data.chat import TokenizedRow
from training.features import run_target
from training.loop import Trainer, TrainingError
from training.objectives import ObjectiveOptions, build_objective
from training.options.drafter import (
    DFlashOptions,
    DrafterOptions,
    DSparkOptions,
    Eagle1Options,
    Eagle3Options,
    MedusaOptions,
    PEagleOptions,
)
from training.processes import make_accelerator

VOCAB, LENGTH = 96, 12
ROOT = Path(__file__).resolve().parents[2]


pytestmark = pytest.mark.usefixtures("fresh_accelerate")


def make_rows(count: int = 11) -> list[TokenizedRow]:
    """Rows with very unequal numbers of supervised tokens."""
    rows = []
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        length = int(torch.randint(6, LENGTH + 1, (1,), generator=generator))
        prompt = int(torch.randint(1, length, (1,), generator=generator))
        ids = torch.randint(3, VOCAB, (length,), generator=generator).tolist()
        rows.append(TokenizedRow(ids, [i >= prompt for i in range(length)]))
    return rows


def make_config(out: Path, drafter: DrafterOptions | None = None, **sections: Any) -> TrainConfig:
    run = {"steps": 8, "batch_size": 2, "save_every": 4, "log_every": 1} | sections.pop("run", {})
    return TrainConfig(
        target=TargetOptions(name="tiny"),
        drafter=drafter or MedusaOptions(num_heads=2),
        data=DataOptions(train=["rows"], max_length=LENGTH, pack=False),
        run=RunOptions(out=str(out), **run),
        optim=OptimOptions(**({"lr": 1e-2, "warmup": 0.25} | sections.pop("optim", {}))),
        loss=ObjectiveOptions(**sections.pop("loss", {})),
        **sections,
    )


def make_trainer(
    config: TrainConfig,
    rows: list[TokenizedRow] | None = None,
    evaluate: Callable[..., dict[str, float]] | None = None,
) -> Trainer:
    """Everything anew, as a new process would build it."""
    target = tiny_target(layers=3)
    options = config.drafter
    drafter = build_drafter(options.family, target, config.run.seed, **options.head_fields())
    data = PackedDataset(
        rows or make_rows(),
        config.data.max_length,
        config.run.batch_size,
        config.run.seed,
        packed=False,
    )
    drafter.double().set_draft_vocab(data.token_counts(VOCAB))
    objective = build_objective(drafter.train(), config.loss)
    return Trainer(config, make_accelerator(config.run, "cpu"), target, objective, data, evaluate)


def lines(out: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without the clock."""
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "train/seconds"} for line in found]


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in trainer.drafter.state_dict().items()}


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, action: Callable[[], None]) -> None:
    """Do something once in the middle of optimizer step ``step``, counted from 1."""
    forward, waiting = Trainer._forward, [action]

    def disturbed(self: Trainer, batch: Any) -> Tensor:
        if self.step == step - 1 and waiting:
            waiting.pop()()
        return forward(self, batch)

    monkeypatch.setattr(Trainer, "_forward", disturbed)


class Crash(Exception):
    """Stands for anything that ends a process."""


def crash() -> None:
    raise Crash


# --- gradients


def captured_gradients(monkeypatch: pytest.MonkeyPatch, trainer: Trainer) -> dict[str, Tensor]:
    """Gradients as the first optimizer step finds them."""
    found: dict[str, Tensor] = {}

    def capture() -> Tensor:
        assert not found, "one optimizer step, however many micro-batches"
        found.update((n, p.grad.clone()) for n, p in trainer.drafter.named_parameters())
        return torch.ones(())

    monkeypatch.setattr(trainer.engine, "gradient_norm", capture)
    monkeypatch.setattr(trainer.engine, "step", trainer.engine.discard)
    trainer._train_step()
    return found


def whole_batch(trainer: Trainer) -> tuple[dict[str, Tensor], float]:
    """Gradient and value of (sum of losses) / (supervised tokens), all sequences at once."""
    (batch,) = trainer.dataset.micro_batches(0, 0, 1, trainer.run.batch_size)
    data = run_target(trainer.drafter.target, batch, trainer.drafter.feature_layers)
    loss, _ = trainer.engine.module(data)
    loss = loss / batch.supervised.sum()
    trainer.engine.module.zero_grad()
    loss.backward()
    found = {n: p.grad.clone() for n, p in trainer.drafter.named_parameters()}
    trainer.engine.module.zero_grad()
    return found, loss.item()


@pytest.mark.parametrize("family", [MedusaOptions(num_heads=2), Eagle3Options()])
@pytest.mark.parametrize("micro", [4, 2, 1])
def test_gradient_is_that_of_the_whole_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: DrafterOptions, micro: int
) -> None:
    """Whatever the accumulation (1, 2, 4), and however unequal the micro-batches."""
    config = make_config(tmp_path, family, run={"batch_size": 4, "micro_batch_size": micro})
    trainer = make_trainer(config)
    wanted, _ = whole_batch(trainer)
    found = captured_gradients(monkeypatch, trainer)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        scale = gradient.abs().max()
        assert scale > 0, name
        assert (found[name] - gradient).abs().max() < 1e-6 * scale, name


def test_mean_of_micro_batch_means_is_another_gradient(tmp_path: Path) -> None:
    """Negative control: the rows are unequal enough for the usual mistake to show."""
    trainer = make_trainer(make_config(tmp_path, run={"batch_size": 4}))
    wanted, _ = whole_batch(trainer)
    for batch in trainer.dataset.micro_batches(0, 0, 1, 1):
        loss, _ = trainer.engine.module(run_target(trainer.drafter.target, batch, ()))
        (loss / batch.supervised.sum() / 4).backward()
    name, parameter = next(trainer.drafter.named_parameters())
    assert (parameter.grad - wanted[name]).abs().max() > 1e-2 * wanted[name].abs().max()


@pytest.mark.parametrize("micro", [4, 1])
def test_reported_loss_is_per_supervised_token(tmp_path: Path, micro: int) -> None:
    trainer = make_trainer(make_config(tmp_path, run={"batch_size": 4, "micro_batch_size": micro}))
    _, wanted = whole_batch(trainer)
    assert trainer._train_step() == pytest.approx(wanted, rel=1e-5)


def test_step_without_supervised_tokens_is_harmless(tmp_path: Path) -> None:
    """A sequence whose only label has no draft row: no division by zero, no NaN."""
    row = TokenizedRow([5, 6, 7, 8], [True, False, False, False])
    trainer = make_trainer(make_config(tmp_path, run={"steps": 1, "batch_size": 1}), [row])
    trainer.train()
    assert all(value.isfinite().all() for value in weights(trainer).values())


def test_the_gradient_is_clipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    norms = {}
    for clip in (0.0, 1e-3):
        out = tmp_path / str(clip)
        trainer = make_trainer(make_config(out, optim={"clip": clip}))
        (stepper,) = trainer.engine._steppers
        step = stepper.step

        def record(*args: Any, clip: float = clip, trainer: Trainer = trainer, step=step) -> Any:
            grads = [p.grad for p in trainer.drafter.parameters()]
            norms.setdefault(clip, torch.cat([g.flatten() for g in grads]).norm().item())
            return step(*args)

        monkeypatch.setattr(stepper, "step", record)
        trainer._train_step()
    assert norms[1e-3] == pytest.approx(1e-3, rel=1e-3)
    assert norms[0.0] > 1e-2


def test_learning_rate_warms_up_and_decays(tmp_path: Path) -> None:
    make_trainer(make_config(tmp_path)).train()
    rates = [line["train/lr"] for line in lines(tmp_path)]  # the rate of the *next* step
    assert len(rates) == 8
    assert rates[0] == pytest.approx(5e-3)
    assert rates[1] == pytest.approx(1e-2)
    assert rates[1:] == sorted(rates[1:], reverse=True)
    assert rates[-1] == pytest.approx(0, abs=1e-8)


@pytest.mark.parametrize("family", [MedusaOptions(num_heads=2), Eagle3Options()])
def test_training_lowers_the_loss_and_leaves_the_target_alone(
    tmp_path: Path, family: DrafterOptions
) -> None:
    trainer = make_trainer(make_config(tmp_path, family, run={"steps": 40, "save_every": 0}))
    target = trainer.drafter.target
    before = [p.clone() for p in target.model.parameters()]
    trainer.train()
    losses = [line["train/loss"] for line in lines(tmp_path)]
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    assert all(torch.equal(a, b) for a, b in zip(before, target.model.parameters(), strict=True))


def test_metrics_file(tmp_path: Path) -> None:
    make_trainer(make_config(tmp_path, run={"log_every": 3})).train()
    found = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in found] == [3, 6, 8]
    for line in found:
        assert all(math.isfinite(value) for value in line.values())
        assert 0 <= line["train/accuracy_0"] <= 1
        assert 0 <= line["train/overlap_1"] <= 1
        assert line["train/grad_norm"] > 0
    assert found[0]["train/tokens"] < found[1]["train/tokens"] < found[2]["train/tokens"]


ONE_IS_SILENT = """
import sys
from pathlib import Path
from tests.training.test_loop import make_config, make_trainer
from training.data.chat import TokenizedRow
from training.options.drafter import DFlashOptions

rows = [TokenizedRow(list(range(5, 15)), [False] * 3 + [True] * 7)]
rows.append(TokenizedRow([5, 6, 7, 8], [True, False, False, False]))  # nothing can be drafted
head = DFlashOptions(block_size=3, num_layers=1, feature_layers=[0, 1], mask_token_id=95)
run = {"steps": 3, "save_every": 2, "log_every": 2}
trainer = make_trainer(make_config(Path(sys.argv[1]), head, run=run), rows)
trainer.train()
trainer.release()
"""


def test_a_process_without_drafts_trains_along(tmp_path: Path) -> None:
    """Two processes, one sequence each per step; the lines are those of one with both."""
    script = tmp_path / "script.py"
    script.write_text(ONE_IS_SILENT)
    two = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for name, launcher in (("one", []), ("two", two)):
        found = subprocess.run(
            [sys.executable, *launcher, str(script), str(tmp_path / name)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert found.returncode == 0, found.stderr[-4000:]
    one, two_lines = lines(tmp_path / "one"), lines(tmp_path / "two")
    assert [line["step"] for line in two_lines] == [2, 3]
    for alone, together in zip(one, two_lines, strict=True):
        assert alone.keys() == together.keys()
        for key in ("train/loss", "train/accuracy_0", "train/overlap_1", "train/loss_1"):
            assert together[key] == pytest.approx(alone[key], rel=1e-5), key


SKIPS = """
import sys
from dataclasses import replace
from pathlib import Path
import torch
from tests.training.test_loop import make_config, make_trainer
from training.options.drafter import Eagle3Options

run = {"steps": 5, "batch_size": 2, "save_every": 1, "on_nonfinite": "skip"}
trainer = make_trainer(make_config(Path(sys.argv[1]), Eagle3Options(), run=run))
bad, forward = trainer.dataset.step_indices(2)[1], trainer.features

def poisoned(batch):
    data = forward(batch)
    nan = torch.where(batch.index == bad, torch.nan, 0.0)[:, None, None]
    return replace(data, last_hidden=data.last_hidden + nan)

trainer.features = poisoned
trainer.train()
assert trainer.nonfinite.skipped == 1, trainer.nonfinite.skipped
trainer.release()
"""


@pytest.mark.slow
def test_a_skipped_step_under_fsdp_can_be_saved(tmp_path: Path) -> None:
    """Weights gathered for the backward pass that never came must not be taken for the parts."""
    script = tmp_path / "script.py"
    script.write_text(SKIPS)
    two = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for name, launcher, fsdp in (("one", [], "false"), ("two", two, "true")):
        found = subprocess.run(
            [sys.executable, *launcher, str(script), str(tmp_path / name)],
            cwd=ROOT,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(ROOT),
                "ACCELERATE_USE_FSDP": fsdp,
            },
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert found.returncode == 0, found.stderr[-4000:]
    one, other = lines(tmp_path / "one"), lines(tmp_path / "two")
    assert [line["step"] for line in other] == [1, 2, 3, 4, 5]
    losses = [[line.get("train/loss", -1.0) for line in found] for found in (one, other)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert losses[1].index(-1.0) == 2, "the third step is left out"


# --- resuming


@pytest.mark.parametrize(
    ("family", "run"),
    [
        (MedusaOptions(num_heads=2), {}),
        (Eagle3Options(draft_vocab_size=40), {}),
        (MedusaOptions(num_heads=2), {"batch_size": 4}),
        (Eagle3Options(), {"batch_size": 4, "micro_batch_size": 2}),
    ],
    ids=["medusa", "eagle3 reduced", "accumulation of 4", "accumulation of 2"],
)
@pytest.mark.parametrize("died_in", [6, 8])
def test_resumed_run_is_bit_identical(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: DrafterOptions, run: dict, died_in: int
) -> None:
    straight = make_trainer(make_config(tmp_path / "straight", family, run=run))
    straight.train()
    config = make_config(tmp_path / "resumed", family, run=run)
    with monkeypatch.context() as patch:
        at_step(patch, died_in, crash)
        with pytest.raises(Crash):
            make_trainer(config).train()
    assert [path.name for path in list_checkpoints(tmp_path / "resumed")] == ["step-000004"]
    resumed = make_trainer(config)
    resumed.train()
    assert lines(tmp_path / "resumed") == lines(tmp_path / "straight")
    assert len(lines(tmp_path / "straight")) == 8
    wanted = weights(straight)
    for name, value in weights(resumed).items():
        assert torch.equal(value, wanted[name]), name


BLOCK: dict[str, Any] = {"mask_token_id": 95, "feature_layers": [0, 1], "num_layers": 1}
DRAWING: dict[str, tuple[DrafterOptions, dict[str, Any]]] = {
    "eagle1": (Eagle1Options(), {"noise": 0.3}),
    "peagle": (PEagleOptions(num_drafts=3), {"cod_rate": 0.6}),
    "dflash": (DFlashOptions(block_size=4, **BLOCK), {"anchors": 2}),
    "dflash dpace": (
        DFlashOptions(block_size=4, **BLOCK),
        {"anchors": 2, "weighting": "dpace"},
    ),
    "dspark": (
        DSparkOptions(block_size=3, markov_rank=4, markov_type="rnn", **BLOCK),
        {"anchors": 2, "on_policy": 40},
    ),
}
"""Families whose loss depends on numbers drawn afresh for every use of a sequence."""


@pytest.mark.parametrize("name", DRAWING)
def test_what_is_drawn_and_scheduled_goes_on_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Noise, anchors, dropped depths and the ramp between two losses: all of the step alone."""
    family, drawn = DRAWING[name]
    loss: dict[str, Any] = {"final": {"tv": 1.0}, "ramp": (0.2, 0.9), **drawn}
    run = {"steps": 6, "save_every": 3, "batch_size": 4, "micro_batch_size": 2}
    straight = make_trainer(make_config(tmp_path / "straight", family, run=run, loss=loss))
    straight.train()
    config = make_config(tmp_path / "resumed", family, run=run, loss=loss)
    with monkeypatch.context() as patch:
        at_step(patch, 5, crash)
        with pytest.raises(Crash):
            make_trainer(config).train()
    assert [path.name for path in list_checkpoints(tmp_path / "resumed")] == ["step-000003"]
    resumed = make_trainer(config)
    resumed.train()
    assert lines(tmp_path / "resumed") == lines(tmp_path / "straight")
    wanted = weights(straight)
    for key, value in weights(resumed).items():
        assert torch.equal(value, wanted[key]), key


@pytest.mark.parametrize("name", ["eagle1", "peagle", "dflash", "dspark"])
def test_a_draw_that_does_not_go_on_would_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Negative control of the test above: with other draws in one step, the losses differ."""
    family, drawn = DRAWING[name]
    found = []
    for later in (0, 1):
        config = make_config(tmp_path / str(later), family, run={"steps": 1}, loss=drawn)
        trainer = make_trainer(config)
        forward = trainer._forward
        again = {} if not later else {"draw": 1000}
        monkeypatch.setattr(
            trainer,
            "_forward",
            lambda b, f=forward, more=again: f(
                replace(b, draw=b.draw + more["draw"]) if more else b
            ),
        )
        found.append(trainer._train_step())
    assert found[0] != found[1]


def test_other_data_order_is_another_loss_sequence(tmp_path: Path) -> None:
    """Negative control of the test above: the losses depend on everything that is restored."""
    make_trainer(make_config(tmp_path / "a")).train()
    make_trainer(make_config(tmp_path / "b", run={"seed": 1})).train()
    one, other = lines(tmp_path / "a"), lines(tmp_path / "b")
    assert [line["train/loss"] for line in one] != [line["train/loss"] for line in other]


def test_remembered_features_resume_bit_identically(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of the target's hidden states is empty after a restart; values must not care."""
    results = []
    for name in ("straight", "resumed"):
        config = make_config(tmp_path / name, Eagle3Options(), run={"batch_size": 4})
        config = replace(config, data=replace(config.data, feature_memory_gb=1.0))
        if name == "resumed":
            with monkeypatch.context() as patch:
                at_step(patch, 6, crash)
                with pytest.raises(Crash):
                    make_trainer(config).train()
        make_trainer(config).train()
        results.append(lines(tmp_path / name))
    assert results[0] == results[1]


def test_log_windows_survive_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that averages steps before and after the checkpoint holds both."""
    run = {"log_every": 3, "save_every": 4}
    make_trainer(make_config(tmp_path / "straight", run=run)).train()
    config = make_config(tmp_path / "resumed", run=run)
    with monkeypatch.context() as patch:
        at_step(patch, 6, crash)
        with pytest.raises(Crash):
            make_trainer(config).train()
    make_trainer(config).train()
    assert lines(tmp_path / "resumed") == lines(tmp_path / "straight")


def test_finished_run_is_left_alone(tmp_path: Path) -> None:
    make_trainer(make_config(tmp_path)).train()
    before = (tmp_path / "metrics.jsonl").read_bytes()
    again = make_trainer(make_config(tmp_path))
    again.train()
    assert again.step == 8
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_metric_lines_past_the_checkpoint_are_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path)
    with monkeypatch.context() as patch:
        at_step(patch, 7, crash)
        with pytest.raises(Crash):
            make_trainer(config).train()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "train/lo')  # a kill in the middle of a line
    make_trainer(config).train()
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, 9))


CHANGES: dict[str, dict[str, Any]] = {
    "optim.lr": {"optim": {"lr": 2e-2}},
    "optim.betas": {"optim": {"betas": (0.8, 0.9)}},
    "optim.weight_decay": {"optim": {"weight_decay": 0.1}},
    "optim.schedule": {"optim": {"schedule": "linear"}},
    "optim.warmup": {"optim": {"warmup": 0.5}},
    "optim.clip": {"optim": {"clip": 0.5}},
    "run.seed": {"run": {"seed": 5}},
    "run.batch_size": {"run": {"batch_size": 4}},
    "run.steps": {"run": {"steps": 12}},
    "loss.terms": {"loss": {"terms": {"tv": 1.0}}},
    "loss.final": {"loss": {"final": {"tv": 1.0}}},
    "loss.ramp": {"loss": {"final": {"kl": 1.0}, "ramp": (0.1, 0.2)}},
    "loss.on_policy": {"loss": {"on_policy": 2}},
    "loss.decay": {"loss": {"decay": 0.5}},
    "drafter.num_heads": {"drafter": MedusaOptions(num_heads=3)},
    "drafter.confidence_head": {"drafter": MedusaOptions(num_heads=2, confidence_head=False)},
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_settings_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """They would be ignored, or make a run that no configuration describes."""
    with monkeypatch.context() as patch:
        at_step(patch, 6, crash)
        with pytest.raises(Crash):
            make_trainer(make_config(tmp_path)).train()
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match=name):
        make_trainer(make_config(tmp_path, **CHANGES[name])).train()
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    make_trainer(make_config(tmp_path)).train()  # the old settings still go on


def test_changed_data_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        at_step(patch, 6, crash)
        with pytest.raises(Crash):
            make_trainer(make_config(tmp_path)).train()
    with pytest.raises(ValueError, match="sequences"):
        make_trainer(make_config(tmp_path), make_rows(12)).train()


def test_another_micro_batch_size_may_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It changes rounding only."""
    run = {"batch_size": 4, "micro_batch_size": 1}
    make_trainer(make_config(tmp_path / "straight", run=run)).train()
    with monkeypatch.context() as patch:
        at_step(patch, 6, crash)
        with pytest.raises(Crash):
            make_trainer(make_config(tmp_path / "resumed", run=run)).train()
    make_trainer(make_config(tmp_path / "resumed", run=run | {"micro_batch_size": 4})).train()
    pairs = zip(lines(tmp_path / "straight"), lines(tmp_path / "resumed"), strict=True)
    for one, other in pairs:
        assert one["train/loss"] == pytest.approx(other["train/loss"], rel=1e-4)


KILLED = """
import os, signal, sys
from training import checkpoint, loop
from recipes.train import main

place, step = sys.argv[1], int(sys.argv[2])
def die(*args):
    os.kill(os.getpid(), signal.SIGKILL)
if place == "step":
    forward = loop.Trainer._forward
    loop.Trainer._forward = lambda self, b: die() if self.step == step - 1 else forward(self, b)
else:
    sync = checkpoint._sync
    checkpoint._sync = lambda path: die() if f"{step:06d}" in str(path) else sync(path)
main(sys.argv[3:])
"""


def kill_arguments(folder: Path, **more: object) -> list[str]:
    """A small run on a target and rows in ``folder``."""
    target = save_tiny_target(folder / "target", dtype=torch.float32, layers=3)
    data = folder / "rows.jsonl"
    with data.open("w") as file:
        for row in make_rows():
            cut = row.supervised.index(True)
            file.write(
                json.dumps({"prompt_ids": row.ids[:cut], "answer_ids": row.ids[cut:]}) + "\n"
            )
    options = {
        "target.name": target,
        "drafter.type": "eagle3",
        "drafter.draft_vocab_size": 40,
        "data.train": f"[{data}]",
        "data.max_length": LENGTH,
        "run.steps": 9,
        "run.save_every": 3,
        "run.log_every": 1,
        "run.batch_size": 2,
        "run.parity": "false",
        **more,
    }
    return [f"--{name}={value}" for name, value in options.items()]


@pytest.mark.parametrize(("place", "step", "left"), [("step", 7, 6), ("save", 6, 3)])
def test_kill_9_and_resume(tmp_path: Path, place: str, step: int, left: int) -> None:
    """SIGKILL in the middle of a step and of a checkpoint; the loss sequence is bit-identical."""
    args = kill_arguments(tmp_path)
    main([*args, f"--run.out={tmp_path / 'straight'}"])
    resumed = [*args, f"--run.out={tmp_path / 'resumed'}"]
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, place, str(step), *resumed],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert list_checkpoints(tmp_path / "resumed")[-1].name == f"step-{left:06d}"
    main(resumed)
    assert lines(tmp_path / "resumed") == lines(tmp_path / "straight")
    assert [line["step"] for line in lines(tmp_path / "straight")] == list(range(1, 10))
    for name in ("head/model.safetensors", "checkpoints/step-000009/optimizer.safetensors"):
        straight = (tmp_path / "straight" / name).read_bytes()
        assert (tmp_path / "resumed" / name).read_bytes() == straight


@pytest.mark.slow
def test_ten_kills_at_random_moments(tmp_path: Path) -> None:
    """Whatever was being computed or written: the losses are those of a run left alone."""
    more = {"run.steps": 60, "run.save_every": 2, "optim.ema": 0.9}
    args = kill_arguments(tmp_path, **more)
    main([*args, f"--run.out={tmp_path / 'straight'}"])
    killed = subprocess.run(
        [sys.executable, "-m", "tests.training.kill_worker", "1", "10", str(tmp_path / "k"), *args],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert killed.returncode == 0, killed.stderr[-4000:]
    steps = json.loads(killed.stdout.splitlines()[-1])
    assert len(steps) == 10 and steps[-1] < 60, "every kill met a run that was under way"
    assert lines(tmp_path / "k") == lines(tmp_path / "straight")
    assert [line["step"] for line in lines(tmp_path / "k")] == list(range(1, 61))
    one, other = (tmp_path / name / "head/model.safetensors" for name in ("k", "straight"))
    assert one.read_bytes() == other.read_bytes()


# --- stops


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_the_step_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    make_trainer(make_config(tmp_path / "straight")).train()
    config = make_config(tmp_path / "resumed", run={"save_every": 0})
    handler = signal.getsignal(number)
    with monkeypatch.context() as patch:
        at_step(patch, 3, lambda: os.kill(os.getpid(), number))
        with pytest.raises(KeyboardInterrupt, match="stopped at step 3"):
            make_trainer(config).train()
    assert signal.getsignal(number) is handler
    assert [p.name for p in list_checkpoints(tmp_path / "resumed")] == ["step-000003"]
    make_trainer(config).train()
    assert lines(tmp_path / "resumed") == lines(tmp_path / "straight")


def test_a_second_signal_stops_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def twice() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(signals, "ONE_PRESS", -1.0)
    handler = signal.getsignal(signal.SIGINT)
    at_step(monkeypatch, 6, twice)
    with pytest.raises(KeyboardInterrupt):
        make_trainer(make_config(tmp_path)).train()
    assert signal.getsignal(signal.SIGINT) is handler
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000004"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_same_signal_from_several_senders_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """A terminal, torchrun and Slurm each hand it to every process; the step is saved still."""

    def thrice() -> None:
        for _ in range(3):
            os.kill(os.getpid(), number)

    at_step(monkeypatch, 3, thrice)
    with pytest.raises(KeyboardInterrupt, match="stopped at step 3"):
        make_trainer(make_config(tmp_path, run={"save_every": 0})).train()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000003"]


def test_signal_in_the_last_step_finishes_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_step(monkeypatch, 8, lambda: os.kill(os.getpid(), signal.SIGINT))
    make_trainer(make_config(tmp_path)).train()
    assert list_checkpoints(tmp_path)[-1].name == "step-000008"


def poison_gradient(monkeypatch: pytest.MonkeyPatch, trainer: Trainer, step: int) -> None:
    """The loss of one step stays as it is, its gradient does not."""
    forward, weight = trainer._forward, next(trainer.drafter.parameters())

    def poisoned(batch: Any) -> Tensor:
        return forward(batch) + ((weight.sum() * 0).sqrt() if trainer.step == step - 1 else 0)

    monkeypatch.setattr(trainer, "_forward", poisoned)


def test_gradient_that_is_not_finite_stops_before_the_weights_are_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(make_config(tmp_path))
    poison_gradient(monkeypatch, trainer, step=6)
    with pytest.raises(TrainingError, match=r"gradient of step 6 is not finite.*optim\.lr"):
        trainer.train()
    assert all(value.isfinite().all() for value in weights(trainer).values())
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000004"]
    make_trainer(make_config(tmp_path)).train()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_loss_that_is_not_finite_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    """Also where the gradient is, so that clipping does not notice."""
    trainer = make_trainer(make_config(tmp_path))
    forward = trainer._forward
    monkeypatch.setattr(
        trainer, "_forward", lambda b: forward(b) + (value if trainer.step == 5 else 0)
    )
    with pytest.raises(TrainingError, match=rf"loss of step 6 is {value}.*Checkpoints"):
        trainer.train()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000004"]


def test_a_poisoned_target_stops(tmp_path: Path) -> None:
    trainer = make_trainer(make_config(tmp_path, Eagle3Options()))
    with torch.no_grad():
        trainer.drafter.target.model.model.layers[1].mlp.down_proj.weight.fill_(torch.nan)
    with pytest.raises(TrainingError, match=r"not finite|is nan"):
        trainer.train()


# --- evaluation


def test_evaluation_is_called_and_recorded(tmp_path: Path) -> None:
    seen = []

    def evaluate(drafter: Any, step: int) -> dict[str, float]:
        assert not drafter.training
        seen.append(step)
        return {"acceptance_length": 1.0 + step}

    config = make_config(tmp_path)
    config.evaluate.every = 3
    trainer = make_trainer(config, evaluate=evaluate)
    assert trainer.train() == {"acceptance_length": 9.0}
    assert trainer.drafter.training
    assert seen == [3, 6, 8]
    found = [line for line in lines(tmp_path) if "eval/acceptance_length" in line]
    assert [(line["step"], line["eval/acceptance_length"]) for line in found] == [
        (3, 4.0),
        (6, 7.0),
        (8, 9.0),
    ]


def test_a_failing_evaluation_loses_no_step(tmp_path: Path) -> None:
    def evaluate(drafter: Any, step: int) -> dict[str, float]:
        raise ValueError("no memory for the decoder")

    with pytest.raises(ValueError, match="no memory"):
        make_trainer(make_config(tmp_path, run={"save_every": 0}), evaluate=evaluate).train()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000008"]


def test_batch_size_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    run = RunOptions(out=str(tmp_path), batch_size=4, micro_batch_size=3)
    with pytest.raises(ValueError, match=r"run\.batch_size \(4\) must be a multiple"):
        make_accelerator(run, "cpu")


# --- steps that are left out


def test_a_bad_row_is_named_and_its_step_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Four sequences a step, one of which poisons the loss: the step is left out, the row named."""
    run = {"batch_size": 4, "micro_batch_size": 2, "on_nonfinite": "skip", "steps": 4}
    trainer = make_trainer(make_config(tmp_path, run=run))
    bad = trainer.dataset.step_indices(1)[2]
    forward = trainer.features

    def poisoned(batch: Any) -> Any:
        data = forward(batch)
        nan = torch.where(batch.index == bad, torch.nan, 0.0)[:, None, None]
        return replace(data, last_hidden=data.last_hidden + nan)

    monkeypatch.setattr(trainer, "features", poisoned)
    trainer.train()
    (row,) = trainer.dataset.rows_of(bad)
    steps_with_it = [s for s in range(4) if bad in trainer.dataset.step_indices(s)]
    assert trainer.nonfinite.skipped == len(steps_with_it)
    assert f"skipped: the loss of step 2 is nan; it comes from data rows {row}" in caplog.text
    assert all(value.isfinite().all() for value in weights(trainer).values())
    found = lines(tmp_path)
    assert [line["step"] for line in found] == [1, 2, 3, 4]
    assert "train/loss" not in found[1] and found[-1]["train/skipped_steps"] >= 1


def test_a_bad_row_stops_the_run_by_its_number(tmp_path: Path) -> None:
    trainer = make_trainer(make_config(tmp_path))
    bad = trainer.dataset.step_indices(2)[1]
    forward = trainer.features

    def poisoned(batch: Any) -> Any:
        data = forward(batch)
        nan = torch.where(batch.index == bad, torch.nan, 0.0)[:, None, None]
        return replace(data, last_hidden=data.last_hidden + nan)

    trainer.features = poisoned
    (row,) = trainer.dataset.rows_of(bad)
    with pytest.raises(TrainingError, match=rf"loss of step 3 is nan.*data rows {row}\. "):
        trainer.train()


def test_a_skipped_gradient_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and optimizer go on as if the step had not been, but for the learning rate."""
    run = {"batch_size": 4, "micro_batch_size": 2, "on_nonfinite": "skip"}
    trainer = make_trainer(make_config(tmp_path, run=run))
    trainer._train_step()
    before = weights(trainer)
    with monkeypatch.context() as patch:
        poison_gradient(patch, trainer, step=2)
        trainer._train_step()
    for name, value in weights(trainer).items():
        assert torch.equal(value, before[name]), name
    assert all(p.grad is None for p in trainer.drafter.parameters())
    assert trainer.step == 2 and trainer.nonfinite.skipped == 1
    trainer._train_step()
    assert trainer.nonfinite.skipped == 1


def test_bad_steps_without_end_stop(tmp_path: Path) -> None:
    run = {"on_nonfinite": "skip", "steps": 30}
    trainer = make_trainer(make_config(tmp_path, run=run))
    with torch.no_grad():
        trainer.drafter.target.model.model.layers[1].mlp.down_proj.weight.fill_(torch.nan)
    with pytest.raises(TrainingError, match="step 11"):
        trainer.train()
    assert trainer.nonfinite.skipped == 10


def test_fp16_that_no_scale_helps_stops(tmp_path: Path) -> None:
    """The scaler leaves overflowing steps out by itself; it must not do so for ever."""
    trainer = make_trainer(make_config(tmp_path, run={"steps": 100}))
    trainer.nonfinite.scaled = True
    with torch.no_grad():
        trainer.drafter.target.model.model.layers[1].mlp.down_proj.weight.fill_(torch.nan)
    trainer._agree = lambda total: 1.0  # what is not finite is the gradient alone
    with pytest.raises(TrainingError, match="gradient of step 41 is not finite"):
        trainer.train()


# --- moving average, patience


def test_the_average_is_what_is_evaluated_saved_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    optim = {"ema": 0.7}
    straight = make_trainer(make_config(tmp_path / "straight", optim=optim))
    name = next(iter(straight.engine.parameters))
    by_hand = straight.engine.parameters[name].detach().clone()
    for _ in range(3):
        straight._train_step()
        by_hand = 0.7 * by_hand + 0.3 * straight.engine.parameters[name].detach()
    head = straight.served()
    found = dict(head.named_parameters())[name.removeprefix("drafter.")]
    assert torch.allclose(found, by_hand, atol=1e-12)
    assert not torch.allclose(found, straight.engine.parameters[name], atol=1e-6)

    straight = make_trainer(make_config(tmp_path / "straight", optim=optim))
    straight.train()
    config = make_config(tmp_path / "resumed", optim=optim)
    with monkeypatch.context() as patch:
        at_step(patch, 6, crash)
        with pytest.raises(Crash):
            make_trainer(config).train()
    resumed = make_trainer(config)
    resumed.train()
    assert lines(tmp_path / "resumed") == lines(tmp_path / "straight")
    one, other = straight.served().state_dict(), resumed.served().state_dict()
    assert all(torch.equal(value, other[key]) for key, value in one.items())


def curve(*lengths: float) -> Callable[[Any, int], dict[str, float]]:
    """An evaluation that knows its results beforehand, by step from 1."""
    return lambda head, step: {"acceptance_length": lengths[step - 1]}


def test_patience_stops_and_exports_the_best(tmp_path: Path) -> None:
    config = make_config(tmp_path, run={"save_every": 0, "keep": 1})
    config.evaluate = EvalOptions(prompts="p", every=1, patience=3, min_gain=0.05)
    lengths = (1.0, 1.5, 1.4, 1.54, 1.3, 9.0, 9.0, 9.0)  # 1.54 is not better enough
    trainer = make_trainer(config, evaluate=curve(*lengths))
    kept: dict[int, dict[str, Tensor]] = {}
    evaluate = trainer.evaluate
    trainer.evaluate = lambda head, step: (
        kept.update({step: weights(trainer)}) or evaluate(head, step)
    )
    assert trainer.train() == {"acceptance_length": 1.3}
    assert trainer.step == 5, "1.4, 1.54 and 1.3 are three in a row"
    assert trainer.history.best_step == 4
    head = trainer.final_head().state_dict()
    for name, value in kept[4].items():
        assert torch.equal(head[name], value), name
    assert not torch.equal(kept[4][name], kept[5][name])


def test_the_best_checkpoint_outlives_the_rotation(tmp_path: Path) -> None:
    config = make_config(tmp_path, run={"save_every": 1, "keep": 2})
    config.evaluate = EvalOptions(prompts="p", every=1)
    make_trainer(config, evaluate=curve(1.0, 1.2, 1.6, 1.5, 1.4, 1.3, 1.2, 1.1)).train()
    names = [path.name for path in list_checkpoints(tmp_path)]
    assert names == ["step-000003", "step-000007", "step-000008"]


def test_patience_survives_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(tmp_path, run={"save_every": 2})
    config.evaluate = EvalOptions(prompts="p", every=1, patience=4)
    lengths = (1.0, 1.5, 1.4, 1.3, 1.2, 1.1, 9.0, 9.0)
    with monkeypatch.context() as patch:
        at_step(patch, 5, crash)
        with pytest.raises(Crash):
            make_trainer(config, evaluate=curve(*lengths)).train()
    trainer = make_trainer(config, evaluate=curve(*lengths))
    trainer.train()
    assert trainer.step == 6 and trainer.history.best_step == 2


def test_an_evaluation_that_a_kill_cut_short_is_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path)
    config.evaluate = EvalOptions(prompts="p", every=4)

    def dies(head: Any, step: int) -> dict[str, float]:
        raise Crash

    with pytest.raises(Crash):
        make_trainer(config, evaluate=dies).train()
    seen: list[int] = []
    make_trainer(
        config, evaluate=lambda head, step: seen.append(step) or {"acceptance_length": 1.0}
    ).train()
    assert seen == [4, 8]


def test_a_signal_during_an_evaluation_stops_behind_it(tmp_path: Path) -> None:
    config = make_config(tmp_path, run={"save_every": 0})
    config.evaluate = EvalOptions(prompts="p", every=3)

    def evaluate(head: Any, step: int) -> dict[str, float]:
        os.kill(os.getpid(), signal.SIGTERM)
        return {"acceptance_length": 1.0}

    with pytest.raises(KeyboardInterrupt, match="stopped at step 3"):
        make_trainer(config, evaluate=evaluate).train()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000003"]


# --- full disks


def test_a_read_only_folder_at_save_time_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save of step 8 cannot be written: step 4 is still there, and the run goes on from it
    once there is room.
    """
    make_trainer(make_config(tmp_path / "straight")).train()
    config = make_config(tmp_path / "full")
    sync = checkpoint._sync

    def full(path: Path) -> None:
        if "step-000008" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(path)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_sync", full)
        with pytest.raises(
            CheckpointError, match=r"No space left.*Earlier checkpoints are untouched"
        ):
            make_trainer(config).train()
    assert [p.name for p in (tmp_path / "full" / "checkpoints").iterdir()] == ["step-000004"]
    make_trainer(config).train()
    assert lines(tmp_path / "full") == lines(tmp_path / "straight")
