"""The configuration of a run: YAML plus dotted overrides. Unknown keys are errors; the resolved
file is saved.

    accelerate launch -m recipes.train --config recipes/smollm2-135m/eagle3.yaml --optim.lr 3e-4

Parsing is draccus over plain dataclasses: every field below is a YAML key and a ``--section.field``
flag.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

import draccus

from training.objectives.options import ObjectiveOptions
from training.options.data import DataOptions, LoraOptions, TargetOptions
from training.options.drafter import DrafterOptions
from training.options.run import EvalOptions, OptimOptions, RunOptions


@dataclass
class TrainConfig:
    """One training run."""

    target: TargetOptions
    drafter: DrafterOptions
    data: DataOptions
    run: RunOptions
    loss: ObjectiveOptions = field(default_factory=ObjectiveOptions)
    optim: OptimOptions = field(default_factory=OptimOptions)
    evaluate: EvalOptions = field(default_factory=EvalOptions)
    lora: LoraOptions = field(default_factory=LoraOptions)

    def __post_init__(self) -> None:
        """Raise ValueError where options of different sections contradict each other."""
        self.loss.resolved(self.drafter.family)
        if self.loss.confidence_weight is not None and not self.drafter.confidence_head:
            raise ValueError(
                "loss.confidence_weight has no effect without drafter.confidence_head: drop it"
            )
        if self.data.streaming and self.run.steps is None:
            raise ValueError("data.streaming needs run.steps: nobody has counted the rows")
        if self.target.parallel != "none" and self.data.regenerate and not self.data.answer_server:
            raise ValueError(
                f"target.parallel={self.target.parallel} does not go with data.regenerate in "
                "process, where each process answers prompts of its own: give data.answer_server, "
                "or answer first with scripts.generate_answers"
            )
        if self.run.mixed_precision == "fp16" and self.optim.name == "muon":
            raise ValueError("optim.name=muon does not go with run.mixed_precision=fp16: use bf16")
        if self.target.parallel == "shard" and self.data.feature_memory_gb:
            raise ValueError(
                "data.feature_memory_gb does not go with target.parallel=shard, where all "
                "processes must run the target together: use a feature store (data.features)"
            )
        if self.lora.rank:
            clashing = {
                "data.features": self.data.features is not None,
                "data.feature_memory_gb": self.data.feature_memory_gb > 0,
                "target.device_map": self.target.device_map is not None,
                "target.parallel": self.target.parallel != "none",
                "optim.ema": self.optim.ema > 0,
            }
            if taken := [name for name, given in clashing.items() if given]:
                raise ValueError(f"{taken[0]} does not go with lora.rank: the target changes")


def parse_config(argv: list[str] | None = None) -> TrainConfig:
    """Read ``--config file.yaml`` and dotted overrides.

    Args:
        argv: arguments without the program name; None takes ``sys.argv``.

    Raises:
        ValueError: unknown key, wrong type or value out of range; the message names the key.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    args = ["--config_path" + arg[len("--config") :] if _is_config(arg) else arg for arg in args]
    try:
        return draccus.parse(TrainConfig, args=args)
    except (draccus.utils.DecodingError, draccus.utils.ParsingError, OSError) as error:
        raise ValueError(f"config: {_innermost(error)}") from error
    except (AttributeError, TypeError) as error:  # draccus on a YAML file that is not a mapping
        raise ValueError("config: the file must be a YAML mapping of sections") from error


def save_config(config: TrainConfig, folder: Path) -> None:
    """Write the resolved configuration to ``folder/config.yaml``, which ``--config`` reads back."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(dump_config(config))


def dump_config(config: TrainConfig) -> str:
    """The resolved configuration as YAML."""
    return str(draccus.dump(config))


def _innermost(error: BaseException) -> BaseException:
    """Our own message: draccus wraps what ``__post_init__`` raises and drops its text."""
    found = error
    if "instantiate" not in str(error):
        return error
    while error.__cause__ is not None or error.__context__ is not None:
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
        if type(error) is ValueError:
            found = error
    return found


def _is_config(arg: str) -> bool:
    return arg == "--config" or arg.startswith("--config=")
