"""Timing a plan runs what a step of the run would run."""

from pathlib import Path
from typing import Any

import pytest
import torch

from drafters import TargetModel
from recipes.timing import time_step
from tests.tiny import save_tiny_target
from training.config import parse_config


@pytest.mark.parametrize(
    ("flags", "said", "passes"),
    [
        ((), "the target's pass, the head", 4),
        (("--data.features", "stored"), "the head alone, on stored hidden states", 0),
        (("--lora.rank", "2", "--lora.start", "0.5"), "its target with a LoRA", 4),
    ],
)
def test_what_is_timed_is_what_a_step_runs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: tuple[str, ...],
    said: str,
    passes: int,
) -> None:
    folder = save_tiny_target(tmp_path / "target", torch.float32)
    head = ("--loss.steps", "1", "--drafter.draft_vocab_size", "50")
    config = parse_config(
        [
            *("--target.name", str(folder), "--data.train", "[nothing.jsonl]"),
            *("--run.out", "never", "--drafter.type", "eagle3", "--data.max_length", "64"),
            *(*head, *flags),
        ]
    )
    forward, adamw = TargetModel.forward, torch.optim.AdamW.step
    with_gradients: list[bool] = []
    stepped: list[None] = []

    def pass_counted(self: TargetModel, ids: torch.Tensor, *given: Any, **options: Any) -> Any:
        if ids.shape[1] == config.data.max_length:  # others check the target
            with_gradients.append(options.get("gradients", False))
        return forward(self, ids, *given, **options)

    def step_counted(*given: Any) -> Any:
        stepped.append(None)
        return adamw(*given)

    monkeypatch.setattr(TargetModel, "forward", pass_counted)
    monkeypatch.setattr(torch.optim.AdamW, "step", step_counted)
    one, step, what = time_step(config, None, 3, accumulates=False)
    assert one > 0 and step > 0 and said in what
    assert sum(x == bool(config.lora.rank) for x in with_gradients) == passes, "one warms up"
    assert len(stepped) == 2, "one warms up"
