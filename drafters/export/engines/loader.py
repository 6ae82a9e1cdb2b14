"""What an engine's loader does with a head's folder, declared; and the strict check made of it.

A loader is read in the engine's source (its ``source`` says where) and written down as data: the
names it gives to tensors, the parameters it has for them, what it does with a name it does not
know and with a parameter that nothing fills, and what it understands of config.json. Engines skip
or keep silently; here everything that the engine would not use, and everything that it would use
differently from the head's own code, is a problem.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from drafters.export.dialect import TensorSpec
from drafters.export.fields import LAYER_FIELDS
from drafters.target import TargetModel

Config = Mapping[str, Any]
Reading = dict[str, Any]
"""What an engine understands of a config, by the words of ``drafters.export.engines.meaning``."""

IGNORED, REFUSED = "ignored", "refused"
LAYER_KEYS = (*LAYER_FIELDS[:-1], "num_hidden_layers", "vocab_size")


@dataclass(frozen=True)
class Loader:
    """One model class of one engine, in the versions in which it loads the same.

    Attributes:
        engine: a name in ``Dialect.engines``.
        versions: that were read, oldest first.
        model: class of the engine.
        source: the file it was read in.
        families: of heads that it is for.
        architectures: names in config.json that lead to it; "" where it needs none.
        parameters: its parameters, under the names that it looks them up by, before fusing; the
            fused parameter is ``TensorSpec.parameter``. Arguments: the config, the target.
        reads: what it understands of a config. Arguments as above.
        refuses: why it cannot start with a config at all. Arguments as above.
        renamed: parts of names and what takes their place, in order.
        rewritten: what else becomes of a name, afterwards.
        plain: names with one of these in them are looked up as they are; all others get ``prefix``.
        prefix: put in front of names.
        as_they_are: whether a name is first looked up as it is, the prefix being a second try, and
            looked up without the prefix if it has one.
        skipped: parts of names of tensors that it leaves out on purpose.
        dropped: endings of names that it drops without a word where it has no such parameter.
        unknown: what becomes of other names it does not know, ``IGNORED`` or ``REFUSED``.
        borrowed: parameters that the target's take the place of, where the file has none.
        flat: a config as the engine rewrites it before it reads it.
        needs: keys without which no model can be built.
    """

    engine: str
    versions: tuple[str, ...]
    model: str
    source: str
    families: tuple[str, ...]
    architectures: tuple[str, ...]
    parameters: Callable[[Config, TargetModel], list[TensorSpec]]
    reads: Callable[[Config, TargetModel], Reading]
    refuses: Callable[[Config, TargetModel], list[str]]
    renamed: tuple[tuple[str, str], ...] = ()
    rewritten: Callable[[str], str] = str
    plain: tuple[str, ...] = ()
    prefix: str = "model."
    as_they_are: bool = False
    skipped: tuple[str, ...] = ("t2d",)
    dropped: tuple[str, ...] = ()
    unknown: str = IGNORED
    borrowed: tuple[str, ...] = ("model.embed_tokens.weight",)
    flat: Callable[[Config], Config] = dict
    needs: tuple[str, ...] = LAYER_KEYS

    def __str__(self) -> str:
        return f"{self.engine} {', '.join(self.versions)} ({self.model})"

    def stops(self, config: Config, target: TargetModel) -> list[str]:
        """Why the engine cannot start with a config, as it reads it; nothing if it can."""
        missing = [f"{key} is missing at the top level" for key in self.needs if key not in config]
        return missing or self.refuses(config, target)

    def lookup(self, name: str, known: Mapping[str, TensorSpec]) -> str | None:
        """The parameter that a tensor is looked up by; None if the engine skips it.

        Args:
            name: in the file.
            known: parameters by name.
        """
        if any(part in name for part in self.skipped):
            return None
        for old, new in self.renamed:
            name = name.replace(old, new)
        name = self.rewritten(name)
        if self.as_they_are and name in known:
            return name
        if self.as_they_are and name.removeprefix(self.prefix) in known:
            return name.removeprefix(self.prefix)
        return name if any(part in name for part in self.plain) else self.prefix + name


@dataclass
class Loaded:
    """What a loader made of a file.

    Attributes:
        parameters: filled ones, fused, as the engine holds them.
        problems: what the engine would not have used, or used wrongly; nothing if all is well.
    """

    parameters: dict[str, Tensor] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def load(
    loader: Loader, config: Config, tensors: Mapping[str, Tensor], target: TargetModel
) -> Loaded:
    """Do with a file what the engine does.

    Args:
        loader: of the engine.
        config: of the folder.
        tensors: of all files that the engine reads.
        target: that is served with the head.
    """
    loaded = Loaded(problems=loader.stops(config, target))
    if loaded.problems:
        return loaded
    known = {spec.name: spec for spec in loader.parameters(config, target)}
    parts: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        looked_up = loader.lookup(name, known)
        if looked_up is None:
            continue
        if looked_up not in known:
            loaded.problems += _not_known(loader, name, looked_up, tensor)
        elif looked_up in parts:
            loaded.problems.append(f"{looked_up} is filled twice, the second time by {name}")
        elif tuple(tensor.shape) != known[looked_up].shape:
            loaded.problems.append(
                f"{name} has shape {list(tensor.shape)}, the engine's {looked_up} has "
                f"{list(known[looked_up].shape)}"
            )
        else:
            parts[looked_up] = tensor
    loaded.problems += [
        f"{name} is filled by no tensor of the file and stays as it was initialised"
        for name, spec in known.items()
        if name not in parts and not spec.optional and name not in loader.borrowed
    ]
    loaded.parameters = _fused(known, parts)
    return loaded


def differences(loader: Loader, config: Config, needed: Reading, target: TargetModel) -> list[str]:
    """Where an engine understands something else than the head computes.

    Args:
        loader: of the engine.
        config: of the folder.
        needed: by :func:`drafters.export.engines.meaning.meaning`.
        target: that is served with the head.
    """
    read = loader.reads(config, target)
    return [
        f"{name}: the engine takes {read[name]!r} from config.json, the head needs {value!r}"
        for name, value in needed.items()
        if name in read and read[name] != value
    ]


def _not_known(loader: Loader, name: str, looked_up: str, tensor: Tensor) -> list[str]:
    """What is wrong with a tensor that the engine has no parameter for."""
    if any(name.endswith(ending) for ending in loader.dropped):
        # Zeros are what the engine computes with where it has no such parameter.
        return [f"{name} is dropped without a word"] if tensor.any() else []
    if loader.unknown == REFUSED:
        return [f"{name} is refused: the engine has no parameter {looked_up}"]
    return [f"{name} is ignored without a word: the engine has no parameter {looked_up}"]


def _fused(known: Mapping[str, TensorSpec], parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Stacked in the order in which the engine declares them, where it has all of a stack."""
    stacks: dict[str, list[str]] = {}
    for name, spec in known.items():
        stacks.setdefault(spec.parameter or name, []).append(name)
    return {
        parameter: torch.cat([parts[name] for name in names])
        for parameter, names in stacks.items()
        if all(name in parts for name in names)
    }
