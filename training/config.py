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

from training.drafter_options import DrafterOptions
from training.objectives.options import ObjectiveOptions

DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass
class TargetOptions:
    """The frozen model that is drafted for."""

    name: str
    """Hub id or local folder."""
    dtype: str = "float32"
    """Dtype of the target's weights."""
    attn_implementation: str = "sdpa"
    """sdpa or eager."""
    device: str = "auto"
    """auto (the accelerator's choice) or cpu; the head trains on the same device."""

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range."""
        if self.dtype not in DTYPES:
            raise ValueError(f"target.dtype {self.dtype!r} is unknown: choose one of {DTYPES}")
        choices = {"attn_implementation": ("sdpa", "eager"), "device": ("auto", "cpu")}
        for name, known in choices.items():
            value = getattr(self, name)
            if value not in known:
                raise ValueError(f"target.{name} must be one of {known}, got {value!r}")


@dataclass
class DataOptions:
    """Prompts, conversations or answers."""

    train: list[str]
    """Hub ids, JSONL/parquet files or save_to_disk folders with messages, prompt, text or
    answer_ids columns.
    """
    split: str = "train"
    """Split of hub datasets."""
    limit: int | None = None
    """Use only the first rows of each source."""
    regenerate: bool = False
    """Have the target answer the prompts first (in process, resumable);

    Existing answers are dropped.
    """
    answers: str | None = None
    """Where regenerated answers are kept; null is <run.out>/answers.jsonl."""
    answer_temperature: float = 0.0
    """0 for greedy answers."""
    answer_tokens: int = 256
    """Longest regenerated answer."""
    answer_batch: int = 16
    """Prompts answered together."""
    chat_template: str | None = None
    """A .jinja file that replaces the tokenizer's template."""
    max_length: int = 1024
    """T, tokens per packed sequence."""
    pack: bool = True
    """Several rows in a sequence, which do not see each other."""
    feature_memory_gb: float = 0.0
    """Keep the target's hidden states of the first epoch in this much memory for the later ones;

    0 computes anew.
    """
    skip_bad_rows: bool = False
    """Leave out rows whose mask cannot be established (counted) instead of refusing the run."""

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range."""
        if not self.train:
            raise ValueError("data.train is empty: name at least one dataset")
        for name in ("answer_tokens", "answer_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"data.{name} must be at least 1, got {getattr(self, name)}")
        if self.answer_temperature < 0 or self.feature_memory_gb < 0:
            raise ValueError(
                "data.answer_temperature and data.feature_memory_gb must be at least 0, got "
                f"{self.answer_temperature} and {self.feature_memory_gb}"
            )
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"data.limit must be at least 1, got {self.limit}")
        if self.max_length < 4:
            raise ValueError(f"data.max_length must be at least 4, got {self.max_length}")
        if not self.regenerate and self.answers is not None:
            raise ValueError(
                "data.answers has no effect without data.regenerate=true: drop it, or list it in "
                "data.train"
            )


@dataclass
class OptimOptions:
    """AdamW, warm-up, decay."""

    lr: float = 6e-4
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's betas."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    schedule: str = "cosine"
    """cosine, linear or constant_with_warmup."""
    warmup: float = 0.04
    """Warm-up as a part of all steps."""
    clip: float = 1.0
    """Largest gradient norm; 0 does not clip."""

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range."""
        if self.lr <= 0 or not 0 <= self.warmup < 1 or self.clip < 0:
            raise ValueError(f"optim: lr > 0, 0 <= warmup < 1 and clip >= 0 are needed, got {self}")
        if self.schedule not in ("cosine", "linear", "constant_with_warmup"):
            raise ValueError(
                f"optim.schedule {self.schedule!r} is unknown: cosine, linear or "
                "constant_with_warmup"
            )


@dataclass
class EvalOptions:
    """Acceptance length by the real decoder, during training and at the end."""

    prompts: str | None = None
    """Held-out prompts (messages, prompt or turns); null evaluates nothing."""
    every: int = 0
    """Steps between evaluations; 0 is at the end only."""
    limit: int = 12
    """Prompts used, spread over the categories."""
    max_new_tokens: int = 64
    """Tokens decoded per prompt."""
    size: int = 32
    """Draft tree nodes, root included."""

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range."""
        for name, least in (("every", 0), ("limit", 1), ("max_new_tokens", 2), ("size", 2)):
            if getattr(self, name) < least:
                raise ValueError(
                    f"evaluate.{name} must be at least {least}, got {getattr(self, name)}"
                )


@dataclass
class RunOptions:
    """Length, saving, logging."""

    out: str
    """Output folder: checkpoints, metrics.jsonl, the resolved config and the trained head."""
    seed: int = 0
    """Seeds initialisation, data order and evaluation."""
    epochs: float = 1.0
    """Passes over the data; ignored where steps is given."""
    steps: int | None = None
    """Optimizer steps."""
    batch_size: int = 1
    """Sequences per optimizer step, over all processes."""
    micro_batch_size: int = 1
    """Sequences per forward pass and process; the rest is gradient accumulation."""
    mixed_precision: str = "no"
    """no, bf16 or fp16, for the head; the target has its own dtype."""
    log_every: int = 10
    """Steps between metrics."""
    save_every: int = 200
    """Steps between checkpoints; 0 saves at the end only."""
    keep: int = 2
    """Checkpoints kept."""
    resume: str = "auto"
    """auto continues the newest checkpoint in out, none refuses a folder that has one, or a
    checkpoint folder.
    """
    trackers: list[str] = field(default_factory=list)
    """accelerate trackers such as wandb or tensorboard; metrics.jsonl is always written."""
    project: str = "headway"
    """Tracker project."""
    threads: int | None = None
    """CPU threads; null leaves torch's choice."""
    parity: bool = True
    """Check training logits against decoding logits on the real target before step 1."""

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range."""
        for name in ("batch_size", "micro_batch_size", "log_every", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"run.{name} must be at least 1, got {getattr(self, name)}")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"run.steps must be at least 1, got {self.steps}")
        if self.epochs <= 0:
            raise ValueError(f"run.epochs must be positive, got {self.epochs}")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"run.threads must be at least 1, got {self.threads}")
        if self.mixed_precision not in ("no", "bf16", "fp16"):
            raise ValueError(
                f"run.mixed_precision must be no, bf16 or fp16, got {self.mixed_precision!r}"
            )
        if self.save_every < 0:
            raise ValueError(f"run.save_every must be at least 0, got {self.save_every}")


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

    def __post_init__(self) -> None:
        """Raise ValueError where options of different sections contradict each other."""
        self.loss.resolved(self.drafter.family)
        if self.loss.confidence_weight is not None and not self.drafter.confidence_head:
            raise ValueError(
                "loss.confidence_weight has no effect without drafter.confidence_head: drop it"
            )


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
