"""What a run trains on: the target, its optional LoRA, and the data. Every field is a YAML key."""

from dataclasses import dataclass, field

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
    device_map: str | None = None
    """Spread one copy of the target over the devices of this machine: auto, balanced,
    balanced_low_0 or sequential. One process.
    """
    reserve_gb: float = 0.0
    """device_map: memory of the first device that the target leaves free for the head and its
    training (10^9 bytes); ``recipes.train --plan`` says how much that needs.
    """
    parallel: str = "none"
    """none: each process holds the target; tensor: all processes hold one together, by
    transformers' own plan, and see the same sequences; shard: its layers are gathered when they run
    (FSDP), and each process sees its own sequences.
    """

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range."""
        if self.dtype not in DTYPES:
            raise ValueError(f"target.dtype {self.dtype!r} is unknown: choose one of {DTYPES}")
        choices: dict[str, tuple[str | None, ...]] = {
            "attn_implementation": ("sdpa", "eager"),
            "device": ("auto", "cpu"),
            "device_map": (None, "auto", "balanced", "balanced_low_0", "sequential"),
            "parallel": ("none", "tensor", "shard"),
        }
        for name, known in choices.items():
            value = getattr(self, name)
            if value not in known:
                raise ValueError(f"target.{name} must be one of {known}, got {value!r}")
        if self.reserve_gb < 0:
            raise ValueError(f"target.reserve_gb must be at least 0, got {self.reserve_gb}")
        if self.reserve_gb and self.device_map is None:
            raise ValueError("target.reserve_gb has no effect without target.device_map: drop it")
        if self.device_map is not None and (self.parallel != "none" or self.device != "auto"):
            raise ValueError(
                "target.device_map goes with target.parallel=none and target.device=auto: it "
                "places the target's layers itself"
            )


@dataclass
class LoraOptions:
    """Train a LoRA of the target together with the head (Medusa-2, arXiv:2401.10774 §2.2.2).

    The head is then lossless with respect to the merged target, which is written beside it. There
    is no dropout: the head must learn the law of the target that it will be decoded with.
    """

    rank: int = 0
    """0 leaves the target frozen."""
    alpha: float = 16.0
    """Scale of the update is alpha / rank."""
    modules: list[str] = field(default_factory=lambda: ["all-linear"])
    """Names of linear layers of the target ("q_proj"), or all-linear: all but the output matrix,
    which heads borrow.
    """
    lr: float = 1e-4
    """Peak learning rate of the LoRA; the head's is optim.lr, about four times as much in the
    paper.
    """
    target_loss: str = "kl"
    """What holds the target to its task: kl to the original target, or ce on the data's tokens,
    for answers that another model gave.
    """
    target_weight: float = 5.0
    """Weight of that loss beside the head's (the paper weighs the head by 0.2)."""
    start: float = 0.0
    """Part of training done before the LoRA starts to move; its own warm-up follows. The paper
    trains the heads alone first.
    """

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range, or one without effect."""
        if self.rank < 0:
            raise ValueError(f"lora.rank must be at least 0, got {self.rank}")
        if self.alpha <= 0 or self.lr <= 0:
            raise ValueError(
                f"lora.alpha and lora.lr must be positive, got {self.alpha} and {self.lr}"
            )
        if not 0 <= self.start < 1:
            raise ValueError(f"lora.start must be in [0, 1), got {self.start}")
        if self.target_weight < 0:
            raise ValueError(f"lora.target_weight must be at least 0, got {self.target_weight}")
        if self.target_loss not in ("kl", "ce"):
            raise ValueError(f"lora.target_loss must be kl or ce, got {self.target_loss!r}")
        if not self.modules or not all(self.modules):
            raise ValueError(f"lora.modules must name one or more layers, got {self.modules}")
        if not self.rank:
            for name, known in vars(LoraOptions(rank=1)).items():
                if name != "rank" and getattr(self, name) != known:
                    raise ValueError(f"lora.{name} has no effect without lora.rank: drop it")
        elif not self.target_weight and self.target_loss != "kl":
            raise ValueError("lora.target_loss has no effect with lora.target_weight=0: drop it")


@dataclass
class DataOptions:
    """Prompts, conversations or answers."""

    train: list[str]
    """JSONL, JSON or parquet files, patterns of them (data/*.parquet), folders, or hub ids with a
    config and split of their own where needed (owner/name:config:split, owner/name::split); with
    messages, prompt, text or answer_ids columns.
    """
    split: str = "train"
    """Split of hub data sets whose name gives none."""
    limit: int | None = None
    """Use only the first rows of each source."""
    streaming: bool = False
    """Read and tokenise rows as they are needed, not all before the start; needs run.steps."""
    shuffle_buffer: int = 0
    """Sequences among which a streamed run draws its next one, kept in its checkpoints; 0 keeps the
    order of the sources, of which one row comes in turn.
    """
    regenerate: bool = False
    """Have the target answer the prompts first (in process, or by answer_server; resumable);

    Existing answers are dropped.
    """
    answers: str | None = None
    """Where regenerated answers are kept; null is <run.out>/answers.jsonl."""
    answer_temperatures: list[float] = field(default_factory=lambda: [0.0])
    """Temperatures that prompts are dealt over, each named once; 0 is greedy."""
    answer_tokens: int = 256
    """Longest regenerated answer."""
    answer_batch: int = 16
    """Prompts answered together in process, or requests in flight at the server."""
    answer_server: str | None = None
    """Address of an OpenAI-compatible server of the target (http://host:port/v1); null answers in
    process. Its key is in the environment variable OPENAI_API_KEY, where it needs one.
    """
    answer_model: str | None = None
    """Name of the target at the server; null where it serves a single model."""
    chat_template: str | None = None
    """A .jinja file that replaces the tokenizer's template."""
    max_length: int = 1024
    """T, tokens per packed sequence."""
    pack: bool = True
    """Several rows in a sequence, which do not see each other."""
    buckets: list[int] = field(default_factory=list)
    """Lengths that sequences are padded to, the longest being max_length; empty pads all to
    max_length. The sequences of a step have lengths of one bucket. Of use where pack is false.
    """
    features: str | None = None
    """A feature store written by scripts.extract_features: the target is then not run."""
    skip_damaged: bool = False
    """Leave out (and name) what damaged shards of the feature store hold instead of refusing."""
    feature_memory_gb: float = 0.0
    """Keep the target's hidden states of the first epoch in this much memory for the later ones;

    0 computes anew.
    """
    skip_bad_rows: bool = False
    """Leave out rows whose mask cannot be established (counted) instead of refusing the run."""

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that is out of range, or one without effect."""
        if not self.train:
            raise ValueError("data.train is empty: name at least one dataset")
        for name in ("answer_tokens", "answer_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"data.{name} must be at least 1, got {getattr(self, name)}")
        temperatures = self.answer_temperatures
        repeated = len(set(temperatures)) < len(temperatures)
        if not temperatures or min(temperatures) < 0 or repeated:
            raise ValueError(
                "data.answer_temperatures must be one or more different numbers of at least 0, got "
                f"{temperatures}"
            )
        if self.feature_memory_gb < 0 or self.shuffle_buffer < 0:
            raise ValueError(
                "data.feature_memory_gb and data.shuffle_buffer must be at least 0, got "
                f"{self.feature_memory_gb} and {self.shuffle_buffer}"
            )
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"data.limit must be at least 1, got {self.limit}")
        if self.max_length < 4:
            raise ValueError(f"data.max_length must be at least 4, got {self.max_length}")
        if self.buckets and (
            sorted(set(self.buckets)) != self.buckets
            or self.buckets[0] < 4
            or self.buckets[-1] != self.max_length
        ):
            raise ValueError(
                "data.buckets must be rising lengths from 4 on that end with data.max_length "
                f"({self.max_length}), got {self.buckets}"
            )
        self._check_effects()

    def _check_effects(self) -> None:
        """Raise ValueError where an option would have no effect."""
        if self.answer_model is not None and self.answer_server is None:
            raise ValueError("data.answer_model has no effect without data.answer_server: drop it")
        if not self.regenerate:
            if self.answer_temperatures != [0.0]:
                raise ValueError(
                    "data.answer_temperatures has no effect without data.regenerate=true: drop it"
                )
            for name in ("answers", "answer_server"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"data.{name} has no effect without data.regenerate=true: drop it"
                        + (", or list it in data.train" if name == "answers" else "")
                    )
        if self.features is None and self.skip_damaged:
            raise ValueError("data.skip_damaged has no effect without data.features: drop it")
        if self.features is not None and self.feature_memory_gb:
            raise ValueError("data.feature_memory_gb has no effect with data.features: drop it")
        if self.shuffle_buffer and not self.streaming:
            raise ValueError(
                "data.shuffle_buffer has no effect without data.streaming: all sequences are "
                "shuffled; drop it"
            )
        if self.streaming:
            clashing = {
                "regenerate": self.regenerate,
                "features": self.features is not None,
                "feature_memory_gb": self.feature_memory_gb > 0,
                "buckets": bool(self.buckets),
            }
            if taken := [name for name, given in clashing.items() if given]:
                raise ValueError(
                    f"data.{taken[0]} needs all rows before the start, which data.streaming "
                    "does not have: drop one of them"
                )
