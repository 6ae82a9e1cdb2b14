"""The accelerate loop: one optimizer step after another, for every family.

Knows nothing of heads beyond ``Objective`` and nothing of decoding beyond the ``evaluate`` callable
handed in.
"""

import gc
import json
import logging
import math
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedType, InitProcessGroupKwargs, gather_object
from torch import Tensor
from tqdm.auto import tqdm
from transformers import get_scheduler

from drafters import Drafter, TargetModel
from training.checkpoint import find_checkpoint, load_checkpoint, read_state, save_checkpoint
from training.config import OptimOptions, RunOptions, TrainConfig
from training.data import Batch, PackedDataset
from training.features import OnlineFeatures
from training.objectives import Objective
from training.signals import Stop, stop_on_signal

logger = logging.getLogger(__name__)
Evaluate = Callable[[Drafter, int], dict[str, float]]


class TrainingError(ValueError):
    """Training cannot go on; the message says why and what to do."""


class Trainer:
    """One run over one objective.

    Args:
        config: the resolved configuration.
        accelerator: made by :func:`make_accelerator`.
        target: the frozen teacher, on this process's device.
        objective: the head's objective.
        dataset: packed sequences.
        evaluate: (head, step) -> metrics by the real decoder; None evaluates nothing.
        features: hidden states shared with other runs on the same dataset; None makes its own.
    """

    def __init__(
        self,
        config: TrainConfig,
        accelerator: Accelerator,
        target: TargetModel,
        objective: Objective,
        dataset: PackedDataset,
        evaluate: Evaluate | None = None,
        features: OnlineFeatures | None = None,
    ) -> None:
        self.config, self.run, self.out = config, config.run, Path(config.run.out)
        self.accelerator, self.dataset, self.evaluate = accelerator, dataset, evaluate
        self.drafter = objective.drafter
        layers = self.drafter.feature_layers
        shared = features or OnlineFeatures(target, layers, config.data.feature_memory_gb)
        self.features = shared.of(layers)
        self.total_steps = self.run.steps or max(
            1, math.ceil(self.run.epochs * dataset.steps_per_epoch)
        )
        self.optimizer = make_optimizer(objective, config.optim)
        warmup = math.ceil(config.optim.warmup * self.total_steps)
        self.scheduler = get_scheduler(
            config.optim.schedule, self.optimizer, warmup, self.total_steps
        )
        self.bare = objective
        self.objective, self.optimizer = accelerator.prepare(objective, self.optimizer)
        self.world, self._prepared = accelerator.num_processes, False
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self._stop, self.stopping = Stop(), False
        self.sums: dict[str, Tensor] = {}
        self.metrics_file = self.out / "metrics.jsonl"

    def release(self) -> None:
        """Free the data-parallel wrapper: it would wait for threads of an ended process group."""
        self.accelerator.wait_for_everyone()
        del self.objective, self.bare, self.optimizer
        self.accelerator.free_memory()
        gc.collect()

    def train(self) -> dict[str, float]:
        """Run to the last step, resuming where a checkpoint says.

        Returns:
            The last evaluation's metrics.

        Raises:
            TrainingError: the loss or gradient is not finite.
            CheckpointError: a checkpoint cannot be written or read.
            KeyboardInterrupt: stopped by a signal, after the current step was saved.
        """
        if not self._prepared:
            self.prepare()
        bar = tqdm(
            total=self.total_steps,
            initial=self.step,
            desc="train",
            unit="step",
            disable=None if self.accelerator.is_main_process else True,
        )
        with bar, stop_on_signal() as self._stop:
            while self.step < self.total_steps:
                loss = self._train_step()
                bar.update()
                bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
                last = self.step == self.total_steps
                if last or self.step % self.run.log_every == 0:
                    self._log()
                if last or self.stopping or _due(self.step, self.run.save_every):
                    self._save()
                if self.stopping and not last:
                    raise KeyboardInterrupt(
                        f"stopped at step {self.step}; the same command continues from there"
                    )
                if not last and _due(self.step, self.config.evaluate.every):
                    self._evaluate()
        return self._evaluate()

    def _train_step(self) -> float:
        """One optimizer step: micro-batches, global normalisation, clipping; returns the loss."""
        start = time.perf_counter()
        accelerator, device = self.accelerator, self.accelerator.device
        micro = self.run.micro_batch_size
        batches = [
            batch.to(device)
            for batch in self.dataset.micro_batches(
                self.step, accelerator.process_index, accelerator.num_processes, micro
            )
        ]
        self.bare.progress = self.step / self.total_steps
        local = torch.stack(
            [torch.stack((self.bare.count(b).to(device), b.supervised.sum())) for b in batches]
        ).sum(0)
        count, supervised = accelerator.reduce(local, reduction="sum").unbind()
        count = count.clamp_min(1)
        # Data parallelism averages gradients and accelerate divides by the accumulation: undo both,
        # so that the
        # gradient is that of (sum of losses) / (global count of what they are summed over).
        scale = accelerator.num_processes * len(batches) / count
        total = torch.zeros((), device=device)
        for batch in batches:
            with accelerator.accumulate(self.objective):
                loss = self._forward(batch) * scale
                accelerator.backward(loss)
                total += loss.detach().float() / (accelerator.num_processes * len(batches))
                if accelerator.sync_gradients:
                    self._optimizer_step()
        # Whether to stop is decided together, or some processes would wait for the others forever.
        shared = torch.stack((total, total.new_tensor(float(bool(self._stop)))))
        value, stops = accelerator.reduce(shared, reduction="sum").tolist()
        self.stopping = stops > 0
        if not math.isfinite(value):
            raise TrainingError(
                f"the loss of step {self.step + 1} is {value}: lower optim.lr, check "
                "target.dtype, or look at the rows of this step with scripts.inspect_mask. "
                "Checkpoints up to here are kept"
            )
        self.step += 1
        self.tokens += int(supervised)
        self.seconds += time.perf_counter() - start
        self._add({"loss_sum": total, "loss_count": torch.ones_like(total) / self.world})
        return value

    def _forward(self, batch: Batch) -> Tensor:
        data = self.features(batch)
        with self.accelerator.autocast():
            loss, metrics = self.objective(data)
        self._add(metrics)
        return loss

    def _optimizer_step(self) -> None:
        clip = self.config.optim.clip or math.inf
        norm = self.accelerator.clip_grad_norm_(self.objective.parameters(), clip)
        if self.accelerator.scaler is None and not torch.isfinite(norm):
            raise TrainingError(
                f"the gradient of step {self.step + 1} is not finite: lower optim.lr or use "
                "run.mixed_precision=no. Checkpoints up to here are kept"
            )
        self._add({"grad_norm_sum": norm.detach(), "grad_norm_count": torch.ones_like(norm)})
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def _add(self, metrics: dict[str, Tensor]) -> None:
        for name, value in metrics.items():
            value = (
                value.detach().double() if value.device.type == "cpu" else value.detach().float()
            )
            self.sums[name] = self.sums[name] + value if name in self.sums else value

    def _log(self) -> None:
        """Divide sums by counts once, over all processes, and write a line."""
        totals = self._totals()
        stems = [name.removesuffix("_sum") for name in totals if name.endswith("_sum")]
        means = {
            f"train/{stem}": totals[f"{stem}_sum"] / max(totals[f"{stem}_count"], 1)
            for stem in stems
        }
        self.sums = {}
        rate = {
            "train/lr": self.scheduler.get_last_lr()[0],
            "train/tokens": self.tokens,
            "train/seconds": self.seconds,
        }
        self._write({**means, **rate})

    def _totals(self) -> dict[str, float]:
        """Metric sums of the current window over all processes, some of which may have had nothing
        to draft and so know fewer names.
        """
        names = sorted(set(gather_object(list(self.sums))))
        if not names:
            return {}
        zero = self._number(0.0)
        stacked = torch.stack([self.sums.get(name, zero) for name in names])
        return dict(
            zip(names, self.accelerator.reduce(stacked, reduction="sum").tolist(), strict=True)
        )

    def _number(self, value: float) -> Tensor:
        """A metric sum."""
        device = self.accelerator.device
        wide = torch.float64 if device.type == "cpu" else torch.float32
        return torch.tensor(value, dtype=wide, device=device)

    def _write(self, values: dict[str, float]) -> None:
        if self.accelerator.is_main_process:
            with self.metrics_file.open("a") as file:
                file.write(json.dumps({"step": self.step, **values}) + "\n")
        if self.run.trackers:
            self.accelerator.log(values, step=self.step)

    def _evaluate(self) -> dict[str, float]:
        """Acceptance length by the decoder, on the main process; {} on the others."""
        results: dict[str, float] = {}
        if self.evaluate is not None and self.accelerator.is_main_process:
            self.drafter.eval()
            results = self.evaluate(self.drafter, self.step)
            self.drafter.train()
            self._write({f"eval/{name}": value for name, value in results.items()})
            logger.info(
                "step %d: %s", self.step, {name: round(value, 3) for name, value in results.items()}
            )
        self.accelerator.wait_for_everyone()
        return results

    def _save(self) -> None:
        window = self._totals()
        if self.accelerator.is_main_process:
            state = {
                "scheduler": {
                    k: v for k, v in self.scheduler.state_dict().items() if k != "lr_lambdas"
                },
                "scaler": self.accelerator.scaler.state_dict() if self.accelerator.scaler else None,
                "tokens": self.tokens,
                "seconds": self.seconds,
                "window": window,
                "identity": self._identity(),
            }
            save_checkpoint(self.out, self.step, self.drafter, self.optimizer, state, self.run.keep)
        self.accelerator.wait_for_everyone()

    def prepare(self) -> None:
        """Make the run folder ready, or restore the newest checkpoint; changes nothing if refused.

        Raises:
            TrainingError: the checkpoint belongs to a run with other settings.
            CheckpointError: it is damaged, or not allowed by ``run.resume``.
        """
        self._prepared = True
        main = self.accelerator.is_main_process
        checkpoint = find_checkpoint(self.out, self.run.resume)
        if checkpoint is None:
            self.out.mkdir(parents=True, exist_ok=True)
            if main:
                self.metrics_file.unlink(missing_ok=True)
            return
        recorded = read_state(checkpoint)["identity"]
        differing = {key: (recorded.get(key), value) for key, value in self._identity().items()}
        differing = {key: pair for key, pair in differing.items() if pair[0] != pair[1]}
        if differing:
            raise TrainingError(
                f"{checkpoint} was trained with other settings (checkpoint, now): {differing}. Use "
                "the same settings, or another run.out with drafter.init_from to start from it"
            )
        state = load_checkpoint(checkpoint, self.drafter, self.optimizer)
        self.scheduler.load_state_dict({**self.scheduler.state_dict(), **state["scheduler"]})
        if state["scaler"] is not None and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]
        self.sums = {  # the window is global, so one process carries it on
            name: self._number(value if main else 0.0) for name, value in state["window"].items()
        }
        if main:
            _keep_lines(self.metrics_file, self.step)
        logger.info("resuming %s at step %d", checkpoint, self.step)

    def _identity(self) -> dict[str, Any]:
        """What must not change between the parts of one run."""
        run, data = self.run, self.dataset
        return {
            **{
                f"drafter.{name}": _jsonable(value)
                for name, value in self.drafter.config.own_fields().items()
            },
            "run.steps": self.total_steps,
            "run.seed": run.seed,
            "run.batch_size": run.batch_size,
            "data.max_length": data.length,
            "sequences": len(data.groups),
            "supervised tokens": data.supervised_tokens,
            "token ids": data.digest,
            "target.dtype": self.config.target.dtype,
            "run.mixed_precision": run.mixed_precision,
            **{f"optim.{name}": _jsonable(v) for name, v in vars(self.config.optim).items()},
            **{f"loss.{name}": _jsonable(v) for name, v in vars(self.bare.options).items()},
        }


def make_accelerator(run: RunOptions, device: str = "auto") -> Accelerator:
    """The accelerator of a run, and a check that its process group is one this loop trains
    correctly on.

    Raises:
        ValueError: batch sizes do not divide, or the distributed type is not supported yet.
    """
    available = {str(tracker) for tracker in get_available_trackers()}
    if unknown := sorted(set(run.trackers) - available):
        raise ValueError(
            f"run.trackers: {unknown[0]!r} is not installed or not known to accelerate; here are "
            f"{sorted(available) or 'none'}"
        )
    patience = InitProcessGroupKwargs(timeout=timedelta(days=1))  # others wait for evaluations
    accelerator = Accelerator(
        mixed_precision=run.mixed_precision,
        log_with=run.trackers or None,
        project_dir=run.out,
        cpu=device == "cpu",
        kwargs_handlers=[patience],
    )
    world = accelerator.num_processes
    if run.batch_size % (world * run.micro_batch_size):
        raise ValueError(
            f"run.batch_size ({run.batch_size}) must be a multiple of processes ({world}) x "
            f"run.micro_batch_size ({run.micro_batch_size})"
        )
    if accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.FSDP):
        raise ValueError(
            f"{accelerator.distributed_type.value} is not supported yet: launch without it (one "
            "process or plain data parallelism)"
        )
    accelerator.gradient_accumulation_steps = run.batch_size // (world * run.micro_batch_size)
    return accelerator


def make_optimizer(objective: Objective, optim: OptimOptions) -> torch.optim.Optimizer:
    """AdamW over the head's trainable parameters."""
    trained = [parameter for parameter in objective.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(
        trained, lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay
    )


def _due(step: int, every: int) -> bool:
    """Whether something done every so many steps is due; 0 is never."""
    return bool(every) and step % every == 0


def _jsonable(value: Any) -> Any:
    """A value as JSON reads it back."""
    return json.loads(json.dumps(value))


def _keep_lines(path: Path, step: int) -> None:
    """Drop metric lines past ``step``, which a resumed run writes again, and a line cut short by a
    kill.
    """
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except ValueError:
            continue
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(kept))
    os.replace(temporary, path)
