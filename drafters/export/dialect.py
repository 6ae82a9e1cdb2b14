"""What a dialect is: the form in which some program stores draft heads, declared in full.

A dialect is one object. It names every tensor with its shape and every key of config.json, turns a
head into both and both into a head, and says what it has no place for. Writing
(``drafters.export.writing``), reading and checking (``drafters.export.reading``) are the same for
all of them. Engines skip a tensor whose name they do not know and leave a parameter that no tensor
names at its random initial value, without a word; the only symptom is an acceptance length near 1.
So whatever a dialect does not declare is refused, in both directions.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from drafters.base import Drafter
from drafters.export.borrowed import is_copy
from drafters.export.folder import ExportError
from drafters.target import TargetModel

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EMBEDDING = "embed_tokens.weight"


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a file.

    Attributes:
        name: in the file.
        shape: as the config asks for.
        kind: "float", "int64" or "bool".
        optional: whether a file may leave it out.
        parameter: the engine's parameter that it fills, where that has another name; several
            tensors may fill one, stacked in order.
        zero: whether a matrix of zeros may be what training left (a residual block that was
            started at zero, a confidence output).
    """

    name: str
    shape: tuple[int, ...]
    kind: str = "float"
    optional: bool = False
    parameter: str | None = None
    zero: bool = False


@dataclass(frozen=True)
class KeySpec:
    """One key of config.json.

    Attributes:
        name: of the key.
        kind: its type or types.
        only: its only value, where the dialect knows just one.
        positive: whether a number must be above 0.
        optional: whether a config may leave it out.
    """

    name: str
    kind: type | tuple[type, ...]
    only: Any = None
    positive: bool = False
    optional: bool = False


@dataclass(frozen=True)
class Parts:
    """A head in Headway's words.

    Attributes:
        family: a key of ``drafters.FAMILIES``.
        options: fields of the family's configuration; those about the target are filled in.
        state: the state dict, complete.
    """

    family: str
    options: dict[str, Any]
    state: dict[str, Tensor] = field(default_factory=dict)


class Dialect(ABC):
    """One way of storing heads. Subclasses hold no state; one object of each is registered in
    ``drafters.export.registry``.

    Attributes:
        name: as ``--to`` takes it.
        families: that it can hold.
        engines: programs that load it.
        keys: of config.json.
        weights: the file of tensors that is written; reading also takes what
            ``drafters.export.tensors`` knows.
        embeddings: whether files hold a copy of the target's embedding: "never", "optional" (left
            out unless asked for) or "always".
        target_sizes: of config.json, the keys that must have a value of the target's, each with the
            attribute of ``TargetModel`` that has it.
        parsed_keys: of config.json, that transformers must keep when it parses one; with any the
            base of RoPE must stay, too.
        unknown_to_transformers: whether ``AutoConfig`` need not know the config's model_type.
    """

    name: ClassVar[str]
    families: ClassVar[tuple[str, ...]]
    engines: ClassVar[tuple[str, ...]]
    keys: ClassVar[tuple[KeySpec, ...]] = ()
    weights: ClassVar[str] = "model.safetensors"
    embeddings: ClassVar[str] = "never"
    target_sizes: ClassVar[Mapping[str, str]] = {}
    parsed_keys: ClassVar[tuple[str, ...]] = ()
    unknown_to_transformers: ClassVar[bool] = False

    # Writing ------------------------------------------------------------------------------------

    @abstractmethod
    def refusals(self, head: Drafter) -> list[str]:
        """Why a head of one of the families cannot be written, each with what to do instead.

        Args:
            head: with its target attached.
        """

    def servable(self, head: Drafter) -> Drafter:
        """The head as the engines compute it; another one only where all of them leave out a part
        of it, such as a draft vocabulary.
        """
        return head

    @abstractmethod
    def config(self, head: Drafter) -> dict[str, Any]:
        """config.json of a head that is not refused."""

    @abstractmethod
    def tensors(self, head: Drafter) -> dict[str, Tensor]:
        """The file's tensors by name, without a copy of the target's embedding unless the dialect
        always has one.
        """

    def left_out(self, head: Drafter) -> tuple[str, ...]:
        """Names of the head's tensors that the dialect has no place for: confidence outputs, unless
        it says otherwise.
        """
        return tuple(sorted(name for name in head.state_dict() if name.startswith("confidence.")))

    def served(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Engines that load this very head."""
        return self.engines

    def notes(self, head: Drafter, config: Mapping[str, Any]) -> list[str]:
        """What the user should know before serving: what engines do not do with this head."""
        return []

    # Reading ------------------------------------------------------------------------------------

    @abstractmethod
    def recognises(self, config: Mapping[str, Any], names: Collection[str]) -> bool:
        """Whether a folder is of this dialect.

        Args:
            config: of the folder.
            names: of its tensors.
        """

    @abstractmethod
    def specs(self, config: Mapping[str, Any]) -> list[TensorSpec]:
        """All tensors that a file with this (checked) config has."""

    @abstractmethod
    def parts(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: TargetModel
    ) -> Parts:
        """The head of a checked file.

        Args:
            config, tensors: that passed all checks.
            target: of the head.

        Raises:
            ExportError: a head that Headway cannot compute.
        """

    def complete(self, config: dict[str, Any], target: TargetModel) -> dict[str, Any]:
        """A foreign config with the keys that its trainer left to the engines' defaults."""
        return config

    def adapted(self, config: dict[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """A foreign config, not completed yet, with what its tensors (renamed) say more reliably:
        published Medusa heads, for one, have configs that name fewer heads than there are.
        """
        return config

    def renamed(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Foreign tensors under the names of ``specs``; unknown ones as they are."""
        return tensors

    def config_problems(self, config: Mapping[str, Any]) -> list[str]:
        """What is wrong with a config whose keys all have the right types."""
        return []

    def tensor_problems(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> list[str]:
        """What is wrong with tensors that all have the right shapes, such as a vocabulary map."""
        return []

    def target_problems(self, config: Mapping[str, Any], target: TargetModel) -> list[str]:
        """Where a config does not fit the target it is to be served with."""
        return size_problems(config, target, self.target_sizes)

    def borrowed_problems(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: TargetModel
    ) -> list[str]:
        """Tensors of a checked file that must be the target's own, which Headway's heads borrow,
        and are not: its embedding, where the dialect says nothing else.
        """
        return embedding_problems(tensors.get(EMBEDDING), target)

    def parsed_problems(
        self, config: Mapping[str, Any], parsed: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Keys that transformers, which engines read configs with, changes, and to what.

        Args:
            config: as written.
            parsed: ``AutoConfig.from_pretrained(...).to_dict()``.
        """
        if not self.parsed_keys:
            return {}
        changed = {k: parsed.get(k) for k in self.parsed_keys if parsed.get(k) != config[k]}
        theta = (parsed.get("rope_parameters") or {}).get("rope_theta")
        return changed if theta == config["rope_theta"] else {**changed, "rope_theta": theta}

    # Checking -----------------------------------------------------------------------------------

    def key_problems(self, config: Mapping[str, Any]) -> list[str]:
        """Keys that are missing, of another type or of another value than the dialect knows."""
        return [problem for spec in self.keys for problem in key_problems(spec, config)]

    def check_config(self, config: Mapping[str, Any], target: TargetModel | None = None) -> None:
        """Required keys, values that the dialect fixes, and keys that must agree with each other.

        Args:
            config: of a folder.
            target: it is to be served with, to compare sizes; None compares none.

        Raises:
            ExportError: naming everything that is wrong.
        """
        problems = self.key_problems(config)
        if not problems:  # the rest reads keys that are known to be there now
            problems += self.config_problems(config)
            if target is not None:
                problems += self.target_problems(config, target)
        if problems:
            raise ExportError("config.json: " + "; ".join(problems))

    def check_tensors(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Names, shapes, types and values of tensors.

        Args:
            config: that passed ``check_config``.
            tensors: of the file.

        Raises:
            ExportError: naming every unknown, missing, mis-shaped, never-trained or non-finite
                tensor, and vocabulary maps that do not fit.
        """
        expected = {spec.name: spec for spec in self.specs(config)}
        problems = [
            f"unknown tensor {name} (an engine ignores it silently){self.hint(name, config)}"
            for name in sorted(set(tensors) - set(expected))
        ]
        dtype = _file_dtype(tensors, expected)
        for name, spec in expected.items():
            if name in tensors:
                problems += tensor_problems(spec, tensors[name], dtype)
            elif not spec.optional:
                problems.append(f"missing tensor {name}{self.hint(name, config)}")
        if not problems:
            problems += self.tensor_problems(config, tensors)
        if problems:
            raise ExportError(f"{self.weights}: " + "; ".join(problems))

    def hint(self, name: str, config: Mapping[str, Any]) -> str:
        """Why a tensor is unknown or missing, where the config says so; else nothing."""
        return ""


def key_problems(spec: KeySpec, config: Mapping[str, Any]) -> list[str]:
    """What is wrong with one key of a config."""
    if spec.name not in config:
        return [] if spec.optional else [f"key {spec.name} is missing"]
    value = config[spec.name]
    kinds = spec.kind if isinstance(spec.kind, tuple) else (spec.kind,)
    if float in kinds:
        kinds = (*kinds, int)  # JSON writes 10000.0 either way
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        return [f"{spec.name} must be {' or '.join(k.__name__ for k in kinds)}, got {value!r}"]
    if spec.only is not None and value != spec.only:
        return [f"{spec.name} must be {spec.only!r}, got {value!r}"]
    if spec.positive and isinstance(value, int | float) and value <= 0:
        return [f"{spec.name} must be positive, got {value}"]
    return []


def size_problems(
    config: Mapping[str, Any], target: TargetModel, sizes: Mapping[str, str]
) -> list[str]:
    """Keys that have another value than the target.

    Args:
        config: of a folder, or the part of it that has the keys.
        target: it is to be served with.
        sizes: keys, each with the attribute of ``TargetModel`` that it must equal.
    """
    return [
        f"{key} is {config[key]} but the target has {value}"
        for key, name in sizes.items()
        if config[key] != (value := getattr(target, name))
    ]


def tensor_problems(spec: TensorSpec, tensor: Tensor, dtype: torch.dtype | None) -> list[str]:
    """What is wrong with one tensor.

    Args:
        spec: what it should be.
        tensor: of the file.
        dtype: of the file's floating-point tensors; None if any will do.
    """
    if tuple(tensor.shape) != spec.shape:
        turned = " (that is its transpose)" if tensor.shape[::-1] == spec.shape else ""
        return [
            f"{spec.name} has shape {list(tensor.shape)}, the config asks for {list(spec.shape)}"
            f"{turned}"
        ]
    if spec.kind != "float":
        wanted = {"int64": torch.int64, "bool": torch.bool}[spec.kind]
        return [] if tensor.dtype == wanted else [_wrong_type(spec.name, tensor, wanted)]
    if tensor.dtype not in DTYPES:
        return [f"{spec.name} is {type_name(tensor.dtype)}, engines load {_names(DTYPES)}"]
    if dtype is not None and tensor.dtype != dtype:
        return [_wrong_type(spec.name, tensor, dtype)]
    if not tensor.isfinite().all():
        return [f"{spec.name} holds values that are not finite: training diverged"]
    if tensor.dim() == 2 and not spec.zero and not tensor.any():
        return [f"{spec.name} is all zeros: it was never trained"]
    return []


def embedding_problems(found: Tensor | None, target: TargetModel) -> list[str]:
    """Where a file's embedding (V, D) is there and is not the target's."""
    if found is None:
        return []
    if is_copy(found, target.embedding.get_parameter("weight")):
        return []
    return [
        f"{EMBEDDING} is not the embedding of {target.name!r}: the head has its own, or belongs to "
        "another target"
    ]


def type_name(dtype: torch.dtype) -> str:
    """As in config files: "float32"."""
    return str(dtype).removeprefix("torch.")


def type_problems(config: Mapping[str, Any]) -> list[str]:
    """What is wrong with the type that a config's ``torch_dtype`` names."""
    known = [type_name(dtype) for dtype in DTYPES]
    if config["torch_dtype"] in known:
        return []
    return [f"torch_dtype {config['torch_dtype']} is not one of {', '.join(known)}"]


def _file_dtype(
    tensors: Mapping[str, Tensor], expected: Mapping[str, TensorSpec]
) -> torch.dtype | None:
    """Of most floating-point tensors of a file."""
    found = [
        tensors[name].dtype
        for name, spec in expected.items()
        if name in tensors and spec.kind == "float"
    ]
    return max(found, key=found.count) if found else None


def _wrong_type(name: str, tensor: Tensor, wanted: torch.dtype) -> str:
    return f"{name} is {type_name(tensor.dtype)}, expected {type_name(wanted)}"


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(map(type_name, dtypes))
