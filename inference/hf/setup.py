"""What `speculative` decodes with: the target and the proposer behind `drafter=`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import GenerationMixin

from drafters import Drafter, TargetModel
from drafters.export import read_head
from inference.engine import Engine
from inference.engines import ENGINES, build_engine
from inference.proposers import Proposer, TreeOptions, build_proposer

_ATTRIBUTE = "_speculative"


class _Built:
    """What was built for one model. It lives on the model, and so goes when the model goes.

    Attributes:
        target: the model as the decoder sees it.
        tokenizer: of the target.
        heads: that were read, by folder or name and what the model was like.
        engine: used last; None for "eager".
    """

    def __init__(self) -> None:
        self.target: TargetModel | None = None
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self.heads: dict[Any, Drafter] = {}
        self.engine: Engine | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Built:
        """A copy of the model begins anew."""
        return _Built()

    def __reduce__(self) -> tuple[type[_Built], tuple[()]]:
        """So does a pickled one."""
        return _Built, ()


def resolve(
    model: PreTrainedModel,
    drafter: Any,
    tree: TreeOptions | None,
    tokenizer: PreTrainedTokenizerBase | None,
) -> tuple[TargetModel, Proposer]:
    """The target and the proposer.

    Args:
        model: given to `generate`.
        drafter: a head, its folder or hub name, or a proposer.
        tree: of a head.
        tokenizer: of the model; None if no-one needs it.

    Raises:
        ValueError: naming `drafter=` or `tree=`.
    """
    if tree is not None and not isinstance(tree, TreeOptions):
        raise ValueError(f"tree= must be TreeOptions or None, got {type(tree).__name__}")
    if isinstance(drafter, Proposer):
        if tree is not None:
            raise ValueError(
                f"tree= has no effect beside drafter={type(drafter).__name__}(...), which was "
                "built with options of its own: leave it out"
            )
        return _target(model, tokenizer), drafter
    if isinstance(drafter, str | Path):
        head = _read(drafter, _target(model, tokenizer))
    elif isinstance(drafter, Drafter):
        head = _attached(drafter, model, tokenizer)
    else:
        raise ValueError(
            "drafter= must be a trained head, its folder or hub name, or a Proposer of "
            f"inference.proposers; got {drafter!r}"
        )
    if head.device != head.target.device:
        raise ValueError(
            f"drafter= is on {head.device} but the model on {head.target.device}: move one of them"
        )
    return head.target, build_proposer(head, tree)


def engine_of(target: TargetModel, engine: str | Engine) -> Engine | None:
    """The engine of a name, which stays with the model until another one is asked for.

    Args:
        target: of `resolve`.
        engine: name, or an engine that the caller keeps.

    Returns:
        None for "eager".

    Raises:
        ValueError: naming `engine=`.
    """
    if isinstance(engine, Engine):
        if engine.target.model is not target.model:
            raise ValueError("engine= runs another model: build one for this one")
        if engine.target is not target:
            raise ValueError(
                "engine= was built for another TargetModel of this model: build it for "
                "drafter.target, or give its name"
            )
        return engine
    if engine not in ENGINES:
        raise ValueError(
            f"engine= must be one of {', '.join(ENGINES)}, or an Engine; got {engine!r}"
        )
    built = _built(target.model)
    kept = built.engine
    if kept is not None and (kept.name != engine or kept.target is not target):
        kept.close()
        built.engine = None
    if built.engine is None and engine != "eager":
        built.engine = build_engine(target, engine)
    return built.engine


def _target(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> TargetModel:
    """The target of a model, built once; the model's parameters stay as trainable as they are."""
    built = _built(model)
    if built.target is None or (tokenizer is not None and tokenizer is not built.tokenizer):
        trainable = [(one, one.requires_grad) for one in model.parameters()]
        built.target = TargetModel(model, tokenizer, model.name_or_path or "")
        built.tokenizer = tokenizer
        for parameter, flag in trainable:
            parameter.requires_grad_(flag)
    return built.target


def _built(model: PreTrainedModel) -> _Built:
    return vars(model).setdefault(_ATTRIBUTE, _Built())


def _read(name: str | Path, target: TargetModel) -> Drafter:
    """The head in a folder or on the hub, read again only when the folder has changed."""
    files = sorted(Path(name).glob("*")) if Path(name).is_dir() else []
    state = [file.stat().st_mtime_ns for file in files]
    key = (str(name), tuple(state), target.device, target.dtype)
    heads = _built(target.model).heads
    if key not in heads:
        try:
            heads[key] = read_head(name, target, target.dtype)
        except ValueError as error:
            raise ValueError(f"drafter={str(name)!r}: {error}") from error
    return heads[key]


def _attached(
    head: Drafter, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> Drafter:
    """The head, attached to a target of this model."""
    try:
        target = head.target
    except ValueError:  # not attached
        try:
            return head.attach(_target(model, tokenizer))
        except ValueError as error:
            raise ValueError(f"drafter=: {error}") from error
    if target.model is not model:
        raise ValueError(
            f"drafter= is attached to another model ({target.name or type(target.model).__name__}):"
            " call drafter.attach with this one, or call generate on that one"
        )
    return head


def deliver_everything_to(method: Callable[..., Any]) -> None:
    """Make `generate` hand streamer, tokenizer and assistant to a `custom_generate` function.

    transformers 5.24 drops them: a streamer would be given the prompt, and then neither tokens nor
    an end for which a consumer in another thread waits; stop strings would miss the tokenizer.
    Nothing changes for any other function or way of decoding.

    Args:
        method: the function, also as a `functools.partial` of it.
    """
    original = GenerationMixin._extract_generation_mode_kwargs
    signature = inspect.signature(original)

    @functools.wraps(original)
    def extract(*args: Any, **kwargs: Any) -> dict[str, Any]:
        given = signature.bind(*args, **kwargs).arguments
        custom = given["custom_generate"]
        while isinstance(custom, functools.partial):
            custom = custom.func
        if custom is not method:
            return original(*args, **kwargs)
        names = ("streamer", "assistant_model", "synced_gpus")
        dropped = {name: given[name] for name in names}
        dropped |= {
            name: given["kwargs"].get(name) for name in ("tokenizer", "assistant_tokenizer")
        }
        dropped = {name: value for name, value in dropped.items() if value is not None}
        return dropped | original(*args, **kwargs)

    GenerationMixin._extract_generation_mode_kwargs = extract  # type: ignore[method-assign]
