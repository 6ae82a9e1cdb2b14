"""How a run goes: optimizer, evaluation, length, saving. Every field is a YAML key."""

from dataclasses import dataclass, field

SCHEDULES = ("cosine", "linear", "constant_with_warmup", "wsd")


@dataclass
class OptimOptions:
    """Optimizer, warm-up, decay."""

    name: str = "adamw"
    """adamw, or muon: orthogonalised momentum (arXiv:2502.16982) for the matrices inside the head,
    AdamW for its embeddings, output matrices, norms and biases.
    """
    lr: float = 6e-4
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's betas."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    schedule: str = "cosine"
    """cosine, linear, constant_with_warmup or wsd (warm-up, stable, decay)."""
    warmup: float = 0.04
    """Warm-up as a part of all steps."""
    decay: float = 0.2
    """wsd: part of all steps in which the rate falls, at the end."""
    min_lr: float = 0.0
    """cosine and wsd: the rate at the end, as a part of lr."""
    clip: float = 1.0
    """Largest gradient norm; 0 does not clip."""
    ema: float = 0.0
    """Decay per step of a moving average of the weights, which is then what is evaluated and
    exported; 0 keeps none.
    """

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range, or one without effect."""
        if self.name not in ("adamw", "muon"):
            raise ValueError(f"optim.name must be adamw or muon, got {self.name!r}")
        if self.lr <= 0 or not 0 <= self.warmup < 1 or self.clip < 0:
            raise ValueError(f"optim: lr > 0, 0 <= warmup < 1 and clip >= 0 are needed, got {self}")
        if self.schedule not in SCHEDULES:
            raise ValueError(
                f"optim.schedule {self.schedule!r} is unknown: choose one of {SCHEDULES}"
            )
        if not 0 <= self.min_lr < 1 or not 0 <= self.ema < 1:
            raise ValueError(
                f"optim.min_lr and optim.ema must be in [0, 1), got {self.min_lr} and {self.ema}"
            )
        if self.min_lr and self.schedule not in ("cosine", "wsd"):
            raise ValueError(f"optim.min_lr has no effect with schedule {self.schedule}: drop it")
        if self.schedule == "wsd":
            if not 0 < self.decay <= 1 - self.warmup:
                raise ValueError(
                    "optim.decay must be positive and fit behind optim.warmup, got "
                    f"{self.decay} and {self.warmup}"
                )
        elif self.decay != type(self).decay:
            raise ValueError(f"optim.decay has no effect with schedule {self.schedule}: drop it")


@dataclass
class EvalOptions:
    """Acceptance length by the real decoder, during training and at the end."""

    prompts: str | None = None
    """Held-out prompts (messages, prompt or turns); null evaluates nothing."""
    every: int = 0
    """Steps between evaluations; 0 is at the end only."""
    limit: int = 12
    """Prompts used, spread over the categories and shared out over the processes."""
    max_new_tokens: int = 64
    """Tokens decoded per prompt."""
    size: int = 32
    """Draft tree nodes, root included."""
    temperature: float = 0.0
    """0 is greedy."""
    patience: int = 0
    """Stop after so many evaluations in a row without a better acceptance length; 0 never does."""
    min_gain: float = 0.0
    """patience: what counts as better."""

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range, or one without effect."""
        for name, least in (
            ("every", 0),
            ("limit", 1),
            ("max_new_tokens", 2),
            ("size", 2),
            ("temperature", 0),
            ("patience", 0),
            ("min_gain", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(
                    f"evaluate.{name} must be at least {least}, got {getattr(self, name)}"
                )
        if self.patience and not (self.prompts and self.every):
            raise ValueError("evaluate.patience needs evaluate.prompts and evaluate.every")
        if self.min_gain and not self.patience:
            raise ValueError("evaluate.min_gain has no effect without evaluate.patience: drop it")


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
    """no, bf16 or fp16, for the head's arithmetic; its weights stay float32 and the target has its
    own dtype.
    """
    activation_checkpointing: bool = False
    """Compute the insides of the head's layers again in the backward pass, keep less memory."""
    on_nonfinite: str = "stop"
    """A step whose loss or gradient is not finite: stop, or skip it (counted and named)."""
    log_every: int = 10
    """Steps between metrics."""
    save_every: int = 200
    """Steps between checkpoints; 0 saves at the end only."""
    keep: int = 2
    """Newest checkpoints kept; the one with the best acceptance length is kept beside them."""
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
    memory_check: str = "refuse"
    """A run that is predicted to need more than its device's memory: refuse it before its target is
    loaded, warn and go on, or off: predict nothing.
    """

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range."""
        if self.memory_check == "False":  # what YAML reads in an unquoted off
            self.memory_check = "off"
        if self.mixed_precision == "False":  # and in an unquoted no
            self.mixed_precision = "no"
        for name in ("batch_size", "micro_batch_size", "log_every", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"run.{name} must be at least 1, got {getattr(self, name)}")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"run.steps must be at least 1, got {self.steps}")
        if self.epochs <= 0:
            raise ValueError(f"run.epochs must be positive, got {self.epochs}")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"run.threads must be at least 1, got {self.threads}")
        choices = {
            "mixed_precision": ("no", "bf16", "fp16"),
            "on_nonfinite": ("stop", "skip"),
            "memory_check": ("refuse", "warn", "off"),
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(f"run.{name} must be one of {known}, got {getattr(self, name)!r}")
        if self.save_every < 0:
            raise ValueError(f"run.save_every must be at least 0, got {self.save_every}")
