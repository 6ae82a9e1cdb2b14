"""The accelerate loop: one optimizer step after another, for every family and every engine.

Knows nothing of heads beyond ``Objective`` and nothing of decoding beyond the ``evaluate`` callable
handed in.
"""

import gc
import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor
from tqdm.auto import tqdm

from drafters import Drafter, TargetModel
from training.checkpoint import (
    HEAD,
    check_files,
    checkpoint_of,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from training.config import TrainConfig
from training.data.batches import Batch, Dataset
from training.engines import make_engine
from training.features import Features, OnlineFeatures
from training.history import History
from training.identity import check_identity, identity
from training.nonfinite import NonFinite
from training.objectives import Objective
from training.optim import MovingAverage, Rates, make_optimizers
from training.processes import data_share, on_main
from training.records import Records
from training.signals import Stop, stop_on_signal

logger = logging.getLogger(__name__)
Evaluate = Callable[[Drafter, int], dict[str, float]]
"""(head, step) -> metrics by the real decoder; called on every process, the same result on all."""
STOPPED = "stopped at step {}; the same command continues from there"
ARITHMETIC = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class TrainingError(ValueError):
    """Training cannot go on; the message says why and what to do."""


class Trainer:
    """One run over one objective.

    Args:
        config: the resolved configuration.
        accelerator: made by :func:`~training.processes.make_accelerator`.
        target: the frozen teacher.
        objective: the head's objective.
        dataset: sequences in a deterministic order.
        evaluate: see :data:`Evaluate`; None evaluates nothing.
        features: where hidden states come from; None runs the target.
    """

    def __init__(
        self,
        config: TrainConfig,
        accelerator: Accelerator,
        target: TargetModel,
        objective: Objective,
        dataset: Dataset,
        evaluate: Evaluate | None = None,
        features: Features | None = None,
    ) -> None:
        self.config, self.run, self.out = config, config.run, Path(config.run.out)
        self.accelerator, self.dataset, self.evaluate = accelerator, dataset, evaluate
        layers = objective.drafter.feature_layers
        self.source = features or OnlineFeatures(target, layers, config.data.feature_memory_gb)
        self.features = self.source.of(layers)
        self.total_steps = self.run.steps or max(
            1, math.ceil(self.run.epochs * dataset.steps_per_epoch)
        )
        self.drafter, self.bare = objective.drafter, objective
        objective.arithmetic = ARITHMETIC[self.run.mixed_precision]
        objective.activation_checkpointing = self.run.activation_checkpointing
        self.identity = identity(config, objective, dataset, self.total_steps)
        self.engine = make_engine(
            accelerator,
            objective,
            lambda bare: make_optimizers(bare, config.optim),
            config.optim.clip,
            self.run.micro_batch_size,
        )
        self.nonfinite = NonFinite(self.run.on_nonfinite, self.engine)
        self.rates = Rates(self.engine.optimizers, config.optim, self.total_steps)
        self.average = self._make_average()
        self.rank, self.world = data_share(accelerator, config.target.parallel)
        self.copies = accelerator.num_processes // self.world
        self.records = Records(accelerator, self.out / "metrics.jsonl", bool(self.run.trackers))
        self.history = History(config.evaluate)
        self.step, self.tokens, self.seconds, self._prepared = 0, 0, 0.0, False
        self._stop, self.stopping = Stop(), False
        self._evaluated: tuple[int, dict[str, float]] = (-1, {})

    def _make_average(self) -> MovingAverage | None:
        decay = self.config.optim.ema
        if decay and not self.engine.has_parts:
            raise ValueError(
                "optim.ema does not go with ZeRO-3, which hands weights out only during a step: "
                "use ZeRO-2 or FSDP2"
            )
        return MovingAverage(self.engine.parameters, decay) if decay else None

    def release(self) -> None:
        """Free the data-parallel wrapper: it would wait for threads of an ended process group."""
        self.accelerator.wait_for_everyone()
        self.engine.release()
        del self.bare, self.drafter, self.average, self.rates
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
                if self.step and self._evaluation_due():  # one that a kill cut short comes first
                    self._evaluate()
                    self._stop_here()
                if self.history.enough:
                    logger.info(
                        "stopped at step %d: the acceptance length has not grown for %d "
                        "evaluations; step %d was best",
                        self.step,
                        self.config.evaluate.patience,
                        self.history.best_step,
                    )
                    break
                self._advance(bar)
        return self._evaluate()

    def _advance(self, bar: tqdm) -> None:
        """One step, and what is due behind it."""
        loss = self._train_step()
        bar.update()
        bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
        last = self.step == self.total_steps
        if last or self.step % self.run.log_every == 0:
            self._log()
        if last or self.stopping or _due(self.step, self.run.save_every):
            self._save()
        if self.stopping and not last:
            raise KeyboardInterrupt(STOPPED.format(self.step))

    def _stop_here(self) -> None:
        """Save and stop if that was asked for meanwhile.

        Raises:
            KeyboardInterrupt: it was.
        """
        asked = torch.tensor(float(bool(self._stop)), device=self.accelerator.device)
        if self.accelerator.reduce(asked, reduction="sum").item():
            if not self._is_saved():
                self._save()
            raise KeyboardInterrupt(STOPPED.format(self.step))

    def _is_saved(self) -> bool:
        """Whether the present step has a checkpoint, as the main process sees it."""
        path = checkpoint_of(self.out, self.step)
        return bool(on_main(self.accelerator, path.exists))

    def _train_step(self) -> float:
        """One optimizer step: micro-batches, global normalisation, clipping; returns the loss."""
        start = time.perf_counter()
        batches = self._batches()
        self.bare.progress = self.step / self.total_steps
        scale, supervised = self._scale(batches)
        total, finite = torch.zeros((), device=self.accelerator.device), True
        for number, batch in enumerate(batches, start=1):
            last = number == len(batches)
            with self.engine.accumulate(last):
                loss = self._forward(batch) * scale
                total += loss.detach().float() / self.accelerator.num_processes
                if last:
                    value = self._agree(total)
                    finite = math.isfinite(value)
                if finite:
                    self.engine.backward(loss, last)
        norm = self.engine.gradient_norm() if finite else total
        usable = finite and (self.nonfinite.scaled or bool(torch.isfinite(norm)))
        wrong = "gradient of step {} is not finite" if finite else f"loss of step {{}} is {value}"
        if self.nonfinite.scaled and self.nonfinite.overflow(bool(torch.isfinite(norm))):
            usable = False  # no scale helps
        self._close_step(usable, norm, wrong.format(self.step + 1), batches)
        self.step += 1
        self.rates.go_to(self.step)
        self.tokens += supervised
        self.seconds += time.perf_counter() - start
        if usable:
            share = torch.ones_like(total) / self.accelerator.num_processes
            self.records.add({"loss_sum": total, "loss_count": share})
        return value

    def _batches(self) -> list[Batch]:
        """This process's micro-batches of the present step; those of the next may be fetched."""
        found = [
            batch.to(self.accelerator.device)
            for batch in self.dataset.micro_batches(
                self.step, self.rank, self.world, self.run.micro_batch_size
            )
        ]
        if self.step + 1 < self.total_steps:
            self.source.ahead(self.dataset.step_indices(self.step + 1)[self.rank :: self.world])
        return found

    def _scale(self, batches: Sequence[Batch]) -> tuple[Tensor, int]:
        """What losses are multiplied with, and the step's supervised tokens.

        Engines average gradients over processes: undone here, so that the gradient is that of (sum
        of losses) / (global count of what they are summed over).
        """
        device = self.accelerator.device
        local = torch.stack(
            [torch.stack((self.bare.count(b).to(device), b.supervised.sum())) for b in batches]
        ).sum(0)
        count, supervised = self.accelerator.reduce(local, reduction="sum").unbind()
        scale = self.accelerator.num_processes / count.clamp_min(1)
        return scale, int(supervised) // self.copies

    def _agree(self, total: Tensor) -> float:
        """The loss of the whole step, and whether to stop, which is decided together: or some
        processes would wait for the others forever.
        """
        shared = torch.stack((total, total.new_tensor(float(bool(self._stop)))))
        value, stops = self.accelerator.reduce(shared, reduction="sum").tolist()
        self.stopping = stops > 0
        return value

    def _close_step(self, usable: bool, norm: Tensor, wrong: str, batches: list[Batch]) -> None:
        """Change the weights, or deal with a step that must not change them.

        Raises:
            TrainingError: it is not usable, and the run is not to skip such steps.
        """
        if usable:
            self.engine.step()
            if self.average is not None:
                self.average.update()
            self.records.add({"grad_norm_sum": norm.detach(), "grad_norm_count": norm.new_ones(())})
            self.nonfinite.fine()
            return
        rows = self.nonfinite.find_rows(batches, self._row_loss, self.dataset, self.accelerator)
        cause = f"the {wrong}; {self.nonfinite.name_rows(rows)}"
        if not self.nonfinite.may_skip():
            raise TrainingError(
                f"{cause}. Lower optim.lr, check target.dtype, look at these rows with "
                "scripts.inspect_mask, or leave such steps out with run.on_nonfinite=skip. "
                "Checkpoints up to here are kept"
            )
        logger.warning("skipped: %s", cause)
        self.engine.discard()

    def _forward(self, batch: Batch) -> Tensor:
        loss, metrics = self.engine.module(self.features(batch))
        self.records.add(metrics)
        return loss

    @torch.no_grad()
    def _row_loss(self, batch: Batch) -> Tensor:
        return self.engine.module(self.features(batch))[0]

    def _log(self) -> None:
        """A line of means, on every process's behalf."""
        means = {f"train/{name}": value for name, value in self.records.take_means().items()}
        rate = {
            "train/lr": self.rates.now,
            "train/tokens": self.tokens,
            "train/seconds": self.seconds,
        }
        if self.nonfinite.skipped:
            rate["train/skipped_steps"] = self.nonfinite.skipped
        self.records.write(self.step, {**means, **rate})

    def _evaluation_due(self) -> bool:
        due = self.evaluate is not None and _due(self.step, self.config.evaluate.every)
        return due and self.step not in self.history.lengths

    def _evaluate(self) -> dict[str, float]:
        """Metrics of the real decoder; the checkpoint of the best acceptance length is kept."""
        if self.evaluate is None:
            return {}
        if self._evaluated[0] == self.step:
            return self._evaluated[1]
        head = self.served()
        head.eval()
        found = self.evaluate(head, self.step)
        self.drafter.train()
        results: dict[str, float] = on_main(self.accelerator, lambda: found)  # the same on all
        self._evaluated = (self.step, results)
        if self.step not in self.history.lengths:
            self.records.write(self.step, {f"eval/{name}": v for name, v in results.items()})
        self.history.add(self.step, results["acceptance_length"])
        logger.info("step %d: %s", self.step, {name: round(v, 3) for name, v in results.items()})
        best = self.config.evaluate.every and self.step == self.history.best_step
        if best and not self._is_saved():
            self._save()
        return results

    def served(self) -> Drafter:
        """The head as it would be exported now; all processes call this together."""
        return self.engine.served(self._average_weights())

    def _average_weights(self) -> dict[str, Tensor] | None:
        if self.average is None:
            return None
        return {name: self.engine.whole(value) for name, value in self.average.values.items()}

    def final_head(self) -> Drafter:
        """The head to export: the last one, or with ``evaluate.patience`` the best one, which the
        weights are set back to.
        """
        best = self.history.best_step
        if self.config.evaluate.patience and best is not None and best != self.step:
            found = load_checkpoint(checkpoint_of(self.out, best))
            self._load({**found.raw, **found.weights})
            self.average = None
        return self.served()

    def _load(self, weights: dict[str, Tensor]) -> None:
        device = self.accelerator.device
        self.engine.load_weights({name: value.to(device) for name, value in weights.items()})

    def _save(self) -> None:
        window = self.records.totals()
        head, optimizer = self.served(), self.engine.optimizer_state()
        head_only = all(name.startswith(HEAD) for name in self.engine.parameters)
        weights = None if head_only and self.average is None else self.engine.weights()
        if self.accelerator.is_main_process:
            scaler = self.accelerator.scaler
            state = {
                "scaler": scaler.state_dict() if scaler else None,
                "tokens": self.tokens,
                "seconds": self.seconds,
                "skipped": self.nonfinite.skipped,
                "window": window,
                "data": self.dataset.state(),
                "identity": self.identity,
            }
            best, keep = self.history.best_step, self.run.keep
            protected = [] if best is None else [best]
            save_checkpoint(self.out, self.step, head, optimizer, state, keep, weights, protected)
        self.accelerator.wait_for_everyone()

    def prepare(self) -> None:
        """Make the run folder ready, or restore the newest checkpoint; changes nothing if refused.

        Raises:
            ValueError: the checkpoint belongs to a run with other settings.
            CheckpointError: it is damaged, or not allowed by ``run.resume``.
        """
        self._prepared = True
        checkpoint = on_main(self.accelerator, self._choose)
        if checkpoint is None:
            self.out.mkdir(parents=True, exist_ok=True)
            if self.accelerator.is_main_process:
                self.records.file.unlink(missing_ok=True)
            return
        self._restore(checkpoint)
        logger.info("resuming %s at step %d", checkpoint, self.step)

    def _choose(self) -> Path | None:
        checkpoint = find_checkpoint(self.out, self.run.resume)
        if checkpoint is not None:
            check_files(checkpoint)
        return checkpoint

    def _restore(self, checkpoint: Path) -> None:
        found = load_checkpoint(checkpoint)
        state = found.state
        check_identity(state["identity"], self.identity, checkpoint)
        self._load(found.raw)
        self.engine.load_optimizer_state(found.optimizer)
        if self.average is not None:
            parts = self.engine.parameters
            self.average.load(
                {n: self.engine.part(found.weights[n], parts[n]) for n in self.average.values}
            )
        scaler = self.accelerator.scaler
        if state["scaler"] is not None and scaler is not None:
            scaler.load_state_dict(state["scaler"])
        self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]
        self.nonfinite.skipped = state["skipped"]
        self.rates.go_to(self.step)
        self.dataset.restore(state["data"])
        self.records.restore(state["window"])
        if self.accelerator.is_main_process:
            self.records.cut(self.step)
        self.history.read(on_main(self.accelerator, self.records.lines))


def _due(step: int, every: int) -> bool:
    """Whether something done every so many steps is due; 0 is never."""
    return bool(every) and step % every == 0
