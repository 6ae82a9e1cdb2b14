"""Who takes part in `scripts.benchmark`, by what is written on its command line.

A contender is KIND[:SOURCE][:SETTING...]; a setting is NAME=VALUE, or a word for a common one:

  plain                     transformers' `generate`, eager, dynamic cache
  plain-compiled            transformers' forward, compiled, on a static cache
  prompt-lookup:length=10   `generate(prompt_lookup_num_tokens=10)`; match=2 is its longest n-gram
  assisted:first=8          `generate(assistant_model=...)`: the target's first 8 layers as a model,
                            or model=NAME; length=5 fixes chains of 5 whatever their confidence
  early-exit:first=8        `generate(assistant_early_exit=8)`; length=5 as above
  ours                      this project without drafts
  ours:HEAD                 a trained head; also ngram, suffix, draft-model, layer-skip
  ours:as-prompt-lookup     the drafts that transformers' decoder of that name makes with the same
                            settings; also as-assisted, as-early-exit
  flashspec:ngram           the package flashspec in an environment of its own (--flashspec-python);
                            or flashspec:first=8, flashspec:model=NAME; length=5

Settings of ours are the drafting options of `scripts.evaluate` by their names, as in
`ours:HEAD:depth=4:with-ngram`, and `engine=NAME`. Words: a number or `auto` is the size, `chain`
is branch=1, `grown` and `static` are the tree.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

LENGTH, MATCH = 10, 2
"""Of prompt lookup: transformers has no default for the one and this for the other."""

THEIRS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "plain-compiled": (),
    "prompt-lookup": ("length", "match"),
    "assisted": ("first", "model", "length"),
    "early-exit": ("first", "length"),
    "flashspec": ("first", "model", "length"),
}
"""Kinds that are not ours, and the settings they take."""

AS = {f"as-{kind}": kind for kind in ("prompt-lookup", "assisted", "early-exit")}
"""Sources of ours that draft as one of theirs."""

OWN = (
    "size",
    "depth",
    "branch",
    "tree",
    "draft-model",
    "exit-layer",
    "draft-layers",
    "min-confidence",
    "with-ngram",
    "costs",
    "no-clock",
)
"""Drafting options that have an effect on greedy text."""

FLAGS = ("with-ngram", "no-clock")
"""Of these, those that take no value."""
COUNTS = ("first", "length", "match")
UNTRAINED = ("ngram", "suffix", "draft-model", "layer-skip")


@dataclass(frozen=True)
class Contender:
    """One that takes part.

    Attributes:
        name: as it was written.
        kind: "ours", or a key of `THEIRS`.
        source: of drafts; None for none, or where the kind says it.
        settings: by name.
    """

    name: str
    kind: str
    source: str | None = None
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def drafts(self) -> bool:
        """Whether it has drafts of a size that can be chosen."""
        return self.kind == "ours" and self.source is not None and self.source not in AS

    def counterpart(self, others: "Sequence[Contender]") -> "Contender | None":
        """Theirs with the same drafts, if it takes part too."""
        wanted = AS.get(self.source or "")
        own = {name: value for name, value in self.settings.items() if name != "engine"}
        return next((o for o in others if o.kind == wanted and o.settings == own), None)

    def to_dict(self) -> dict[str, Any]:
        """For the worker's first line."""
        return {"kind": self.kind, "source": self.source, "settings": self.settings}


def parse_contender(text: str) -> Contender:
    """A contender from how it is written.

    Args:
        text: KIND[:SOURCE][:SETTING...].

    Raises:
        ValueError: it has no meaning; the message says which part.
    """
    kind, *parts = text.split(":")
    if kind != "ours" and kind not in THEIRS:
        raise ValueError(f"--contenders {text}: {kind!r} is none of ours, {', '.join(THEIRS)}")
    source = None
    if kind in ("ours", "flashspec") and parts and "=" not in parts[0]:
        source = parts.pop(0)
    if kind == "flashspec" and source not in (None, "ngram"):
        raise ValueError(f"--contenders {text}: flashspec drafts from ngram, first=E or model=NAME")
    if kind == "ours" and source in ("", "plain"):
        source = None
    settings: dict[str, str] = {}
    for part in parts:
        name, value = _setting(kind, part)
        if name in settings:
            raise ValueError(f"--contenders {text}: {name} is set twice")
        settings[name] = value
    found = Contender(text, kind, source, settings)
    _check(found)
    return found


def _setting(kind: str, part: str) -> tuple[str, str]:
    """Name and value of one part."""
    name, equals, value = part.partition("=")
    if equals:
        return name, value
    if kind == "ours" and (part.isdigit() or part == "auto"):
        return "size", part
    if kind == "ours" and part == "chain":
        return "branch", "1"
    if kind == "ours" and part in ("grown", "static"):
        return "tree", part
    return part, ""


def _allowed(found: Contender) -> tuple[str, ...]:
    """Names of the settings that it may have."""
    if found.kind != "ours":
        return THEIRS[found.kind]
    if found.source is None:
        return ("engine",)
    drafting = THEIRS[AS[found.source]] if found.source in AS else OWN
    return (*drafting, "engine")


def _check(found: Contender) -> None:
    """Settings that are known, have a value where they need one, and an effect."""
    allowed = _allowed(found)
    for name, value in found.settings.items():
        if name not in allowed:
            raise ValueError(
                f"--contenders {found.name}: {name!r} is no setting of it; it takes "
                f"{', '.join(allowed) or 'none'}"
            )
        if (value == "") != (name in FLAGS):
            what = "takes no value" if name in FLAGS else "needs a value: NAME=VALUE"
            raise ValueError(f"--contenders {found.name}: {name} {what}")
        if name in COUNTS and not (value.isdigit() and int(value)):
            raise ValueError(f"--contenders {found.name}: {name} is a whole number from 1")
    needs = AS.get(found.source or "", found.kind)
    given = sorted({"first", "model"} & found.settings.keys())
    model = needs == "assisted" or (needs == "flashspec" and found.source is None)
    if model and len(given) != 1:
        raise ValueError(f"--contenders {found.name}: first=E or model=NAME is needed, one of them")
    if needs == "flashspec" and found.source == "ngram" and given:
        raise ValueError(f"--contenders {found.name}: {given[0]} has no effect with ngram")
    if needs == "early-exit" and given != ["first"]:
        raise ValueError(f"--contenders {found.name}: first=E is needed")


def parse_contenders(texts: Sequence[str], sizes: Sequence[str] = ()) -> list[Contender]:
    """All that take part.

    Args:
        texts: one for each.
        sizes: each of ours that has drafts and no size takes part once with each of these.

    Raises:
        ValueError: one has no meaning, two are the same, or `sizes` has no effect.
    """
    found, used = [], False
    for text in texts:
        one = parse_contender(text)
        if sizes and one.drafts and "size" not in one.settings and one.source != "layer-skip":
            used = True
            found += [parse_contender(f"{text}:{size}") for size in sizes]
        else:
            found.append(one)
    if sizes and not used:
        raise ValueError("--sizes has no effect: no contender of ours has drafts without a size")
    names = [one.name for one in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"--contenders {twice[0]} is given twice")
    return found


def with_engine(contenders: Sequence[Contender], engine: str | None) -> list[Contender]:
    """Ours with the engine that holds for all that name none.

    Args:
        contenders: all.
        engine: value of `--engine`.

    Raises:
        ValueError: it has no effect.
    """
    if engine is None:
        return list(contenders)
    if not any(one.kind == "ours" and "engine" not in one.settings for one in contenders):
        raise ValueError("--engine has no effect: every contender of ours names its own, or none")
    return [
        replace(one, settings={"engine": engine, **one.settings}) if one.kind == "ours" else one
        for one in contenders
    ]


def drafting_arguments(found: Contender) -> list[str]:
    """The command line of `scripts.drafting` for one of ours with drafts."""
    assert found.drafts and found.source is not None
    words = ["--proposer" if found.source in UNTRAINED else "--head", found.source]
    for name, value in found.settings.items():
        if name != "engine":
            words += [f"--{name}"] if value == "" else [f"--{name}", value]
    return words
