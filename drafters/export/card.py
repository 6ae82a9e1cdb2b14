"""The README.md of a head's folder, which is its model card on the hub.

It says which target the head is for and what "lossless" means there, and, as far as it is told,
how well its drafts are accepted, what it was trained on, the commands that were run, and how each
engine serves it. Nothing is claimed that nobody handed over.

A folder that is a whole target with modules in it has the target's own card, which stays as its
authors wrote it: what is said of the modules is in a second file, HEADWAY.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from huggingface_hub import ModelCardData

from drafters.base import Drafter
from drafters.export.serving import serving_line
from drafters.hub import is_hub_id, split_revision

CARD, BESIDE = "README.md", "HEADWAY.md"
HEADWAY = "headway"


@dataclass(frozen=True)
class CardFacts:
    """What a card says beyond the head itself.

    Attributes:
        base_model: hub id of the target; None takes the target's name where that is one.
        place: hub id or folder under which the head will be found.
        results: Markdown, the acceptance that was measured, with its heading.
        training: Markdown, what the head was trained on and how, with its heading.
    """

    base_model: str | None = None
    place: str | None = None
    results: str | None = None
    training: str | None = None


@dataclass(frozen=True)
class CardForm:
    """The format of a folder.

    Attributes:
        name: of the dialect.
        engines: that load the folder.
        config: its config.json.
        notes: what the user should know before serving.
        left_out: tensors of the head that the folder does not have.
        inside: whether the folder is the whole target with the head among its tensors.
    """

    name: str = "native"
    engines: Sequence[str] = (HEADWAY,)
    config: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    left_out: Sequence[str] = ()
    inside: bool = False

    @property
    def card(self) -> str:
        """The file that is written."""
        return BESIDE if self.inside else CARD


def base_model_of(drafter: Drafter) -> str | None:
    """The hub id of a head's target, of a merged one that of the original, without a revision; None
    where the record is of a folder.
    """
    reference = drafter.config.reference
    name = reference["base"] if reference else drafter.config.target_name
    base, _ = split_revision(name or "")
    return base if is_hub_id(base) else None


def write_card(
    drafter: Drafter, folder: Path, name: str, form: CardForm, facts: CardFacts | None = None
) -> None:
    """Write the card of a head into its folder.

    Args:
        drafter: the head.
        folder: it is written to.
        name: under which the folder will be found, unless the facts say where.
        form: of the folder.
        facts: what else the card says.
    """
    facts = facts or CardFacts()
    base = facts.base_model or base_model_of(drafter)
    parts = [
        None if form.inside else _front_matter(drafter, form, base),
        _opening(drafter, form),
        facts.results,
        _serving(drafter, form, base, facts.place or name),
        facts.training,
    ]
    text = "\n\n".join(part.strip("\n") for part in parts if part)
    (folder / form.card).write_text(text + "\n", encoding="utf-8")


def _front_matter(drafter: Drafter, form: CardForm, base: str | None) -> str:
    tags = ["speculative-decoding", "draft-head", drafter.family, form.name, HEADWAY]
    data = ModelCardData(base_model=base, pipeline_tag="text-generation", tags=tags)
    return f"---\n{data.to_yaml().strip()}\n---"


def _opening(drafter: Drafter, form: CardForm) -> str:
    config = drafter.config
    prints = config.target_fingerprint or {}
    what = (
        f"This folder is a whole copy of {config.target_name} with the head among its tensors, "
        f"written by Headway in the {form.name} format. All else in it is as the target's authors "
        f"left it, their {CARD} too."
        if form.inside
        else f"A draft head for speculative decoding, written by Headway in the {form.name} "
        "format. It is no model by itself: it drafts tokens that its target verifies."
    )
    lines = [
        f"# {drafter.family} draft head for {config.target_name}",
        "",
        what,
        "",
        f"- target: {config.target_name}, weights {prints.get('weights', 'not recorded')}",
        f"- parameters: {_parameters(drafter, form):,}",
    ]
    if drafter.draft_vocab is not None:
        lines.append(f"- draft vocabulary: {len(drafter.draft_vocab):,} of {config.vocab_size:,}")
    reference = config.reference
    if not reference:
        lines += ["", "Decoding with it is lossless with respect to this target."]
        return "\n".join(lines)
    lines += [
        f"- original target: {reference['base']}, weights {reference['base_weights']}",
        f"- adapter merged into it: {reference['adapter']}",
        "",
        "The target was trained together with this head. Decoding with it is lossless with respect "
        f"to this merged target, not to {reference['base']}: the merged target's own answers may "
        "differ from the original's, and its quality is to be measured anew.",
    ]
    return "\n".join(lines)


def _parameters(drafter: Drafter, form: CardForm) -> int:
    """Of the folder."""
    sizes = {name: parameter.numel() for name, parameter in drafter.named_parameters()}
    return sum(size for name, size in sizes.items() if name not in form.left_out)


def _serving(drafter: Drafter, form: CardForm, base: str | None, place: str) -> str:
    """A block per engine, and what none of them does; Headway, which reads every format, last."""
    target, fetch = _target_to_serve(drafter, form, base, place)
    lines = ["## Serving", ""]
    if fetch is not None:
        lines += ["The target at the revision that the head was trained on:", ""]
        lines += ["```bash", fetch, "```", ""]
    for engine in form.engines:
        if engine == HEADWAY:
            continue
        line = serving_line(engine, drafter, form.config, target, place)
        if line is None:
            lines += [f"{engine}: the folder has its format; its documentation says how.", ""]
        else:
            lines += [f"{engine}:", "", "```bash", line, "```", ""]
    measure = f"python -m scripts.evaluate --target {target} --head {place} --prompts FILE.jsonl"
    lines += ["Headway, which measures it on your own prompts:", "", "```bash", measure, "```"]
    if form.notes:
        lines += ["", "To know before serving:", "", *(f"- {note}" for note in form.notes)]
    return "\n".join(lines)


def _target_to_serve(
    drafter: Drafter, form: CardForm, base: str | None, place: str
) -> tuple[str, str | None]:
    """What engines load as the target, and the command that fetches it where a name alone does not.

    A target that was trained along is not on the hub: it is the folder that training wrote.
    """
    name, revision = split_revision(drafter.config.target_name or "")
    if form.inside:
        return place, None
    if drafter.config.reference:
        return "path/to/target", None
    if revision is None or base not in (name, None):
        return base or name or "TARGET", None
    folder = f"path/to/{PurePath(name).name}"
    return folder, f"hf download {name} --revision {revision} --local-dir {folder}"
