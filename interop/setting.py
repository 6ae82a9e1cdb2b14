"""What the checks work with: a target, trained heads, and environments of other programs."""

import json
import re
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from drafters.export import DIALECTS, NATIVE, format_of
from drafters.hub import head_folder
from drafters.loading import FAMILIES, saved_config

TORCH = "torch==2.13.0"
"""Of every environment, so that pip fetches it once."""

MODULES = "mtp"  # the family of modules in a target's own checkpoint
LAST_LINES = 3  # of what a failed program wrote


class CannotRun(Exception):
    """A check cannot run here; the text says what stopped it, in one line."""


@dataclass(frozen=True)
class Setting:
    """Where things are.

    Attributes:
        target: folder of the target model.
        heads: trained heads by label, folders or hub ids; a family may have several.
        work: folder for exports, environments and downloads.
        pythons: interpreters by name of environment, instead of environments of our own.
        install: whether environments that are missing are made.
    """

    target: Path
    heads: Mapping[str, Path]
    work: Path
    pythons: Mapping[str, Path] = field(default_factory=dict)
    install: bool = True

    def of(self, *families: str) -> dict[str, Path]:
        """The heads of some families, by label."""
        return {
            label: folder for label, folder in self.heads.items() if family_of(folder) in families
        }

    def folder(self, name: str) -> Path:
        """A folder of our own for files; it is made if missing."""
        path = self.work / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def python(self, name: str, *requirements: str, bare: Sequence[str] = ()) -> Path:
        """The interpreter of an environment, which is made if missing.

        Args:
            name: of the environment.
            *requirements: what pip installs into it.
            bare: what it installs afterwards, without what that asks for.

        Raises:
            CannotRun: it is missing and may not be made, or pip fails.
        """
        if name in self.pythons:
            return self.pythons[name]
        folder = self.work / "environments" / name
        python, done = folder / "bin" / "python", folder / ".requirements"
        asked = [*requirements, *bare]
        if done.is_file() and done.read_text(encoding="utf-8").splitlines() == asked:
            return python
        if not self.install:
            raise CannotRun(f"environment {name!r} is missing and --no-install was given")
        venv.create(folder, clear=True, with_pip=True)
        pip = [str(python), "-m", "pip", "install", "--quiet"]
        output([*pip, *requirements])
        if bare:
            output([*pip, "--no-deps", *bare])
        done.write_text("\n".join(asked) + "\n", encoding="utf-8")
        return python


def family_of(folder: Path) -> str:
    """The family of a head, ours or another trainer's, told from its config and tensor names.

    Args:
        folder: of the head, or its hub id.

    Raises:
        ValueError: not found, or no head of a known form.
    """
    place = head_folder(folder)
    form = format_of(place)
    if form == NATIVE:
        kind = type(saved_config(place))  # families extend one another
        return next(name for name, each in FAMILIES.items() if each.config_class is kind)
    return DIALECTS[form].families[0] if form in DIALECTS else MODULES


def labelled(texts: Sequence[str]) -> dict[str, Path]:
    """Heads by label, of the --head options: LABEL=DIR, or DIR alone for its family as the label.

    Raises:
        ValueError: no head there, a label of another family or none for a folder, one twice.
    """
    heads: dict[str, Path] = {}
    for text in texts:
        label, separator, path = text.partition("=")
        folder = Path(path if separator else text)
        family = family_of(folder)
        label = label if separator else family
        if not re.fullmatch(r"[\w.+-]+", label):
            raise ValueError(f"--head {text}: a label has letters, digits and .+-_ alone")
        if label in FAMILIES and label != family:
            raise ValueError(f"--head {text}: that is a {family} head: give it another label")
        if label in heads:
            raise ValueError(f"--head {text}: {label} is there already: give it a label of its own")
        heads[label] = folder
    return heads


def no_head(*families: str) -> str:
    """Why a check that needs a head of one of some families cannot run."""
    return f"no {' or '.join(families)} head: name one with --head {families[0]}=<folder>"


def output(command: list[str], folder: Path | None = None, timeout: float | None = None) -> str:
    """What a program writes to its standard output.

    Args:
        command: program and arguments.
        folder: it runs in.
        timeout: in seconds.

    Raises:
        CannotRun: it is missing, fails, or takes longer.
    """
    try:
        done = subprocess.run(
            command, cwd=folder, timeout=timeout, capture_output=True, text=True, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotRun(f"{Path(command[0]).name}: {error}".replace("\n", " ")) from error
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        last = " / ".join(lines[-LAST_LINES:])
        raise CannotRun(f"{Path(command[0]).name} ended with {done.returncode}: {last}")
    return done.stdout


def answer(command: list[str], timeout: float) -> dict[str, Any]:
    """What another program's side of a check says in its last line, as JSON.

    Args:
        command: program and arguments.
        timeout: in seconds.

    Raises:
        ValueError: it fails or takes longer: it was there, so something is wrong.
    """
    try:
        lines = output(command, timeout=timeout).strip().splitlines()
    except CannotRun as reason:
        raise ValueError(f"their side failed: {reason}") from reason
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def headway_versions() -> dict[str, str]:
    """Of what our side of a check runs on."""
    return {name: version(name) for name in ("torch", "transformers")} | {
        "Python": sys.version.split()[0]
    }
