"""What must not change between the parts of one run."""

import hashlib
import json
from pathlib import Path
from typing import Any

from training.config import TrainConfig
from training.data.batches import Dataset
from training.objectives import Objective


def identity(
    config: TrainConfig, objective: Objective, dataset: Dataset, total_steps: int
) -> dict[str, Any]:
    """Everything that a resumed run must find again: head, data, arithmetic, optimizer, loss.

    Left out on purpose: the number of processes, the engine, the micro-batch size, where to save
    and how often to evaluate.
    """
    run, drafter = config.run, objective.drafter
    sections = {"optim": config.optim, "loss": objective.options, "lora": config.lora}
    found = {
        **{f"drafter.{name}": value for name, value in drafter.config.own_fields().items()},
        "draft vocabulary": _vocab_digest(objective),
        "run.steps": total_steps,
        "run.seed": run.seed,
        "run.batch_size": run.batch_size,
        "run.mixed_precision": run.mixed_precision,
        "run.on_nonfinite": run.on_nonfinite,
        "target.dtype": config.target.dtype,
        "data.features given": config.data.features is not None,
        **dataset.identity(),
        **{f"{n}.{key}": v for n, section in sections.items() for key, v in vars(section).items()},
    }
    return json.loads(json.dumps(found))


def _vocab_digest(objective: Objective) -> str | None:
    """Hash of the draft vocabulary, in order; None where all of the target's is drafted."""
    vocab = objective.drafter.draft_vocab
    if vocab is None:
        return None
    return hashlib.sha256(str(vocab.tolist()).encode()).hexdigest()[:16]


def check_identity(recorded: dict[str, Any], now: dict[str, Any], checkpoint: Path) -> None:
    """Refuse to continue a run with other settings.

    Raises:
        ValueError: naming what differs.
    """
    names = sorted({*recorded, *now})
    pairs = {name: (recorded.get(name), now.get(name)) for name in names}
    if differing := {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}:
        raise ValueError(
            f"{checkpoint} was trained with other settings (checkpoint, now): {differing}. Use "
            "the same settings, or another run.out with drafter.init_from to start from it"
        )
