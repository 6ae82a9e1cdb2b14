"""What the checks work with: a target, trained heads, and environments of other programs."""

import subprocess
import sys
import venv
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

LAST_LINES = 3  # of what a failed program wrote


class CannotRun(Exception):
    """A check cannot run here; the text says what stopped it, in one line."""


@dataclass(frozen=True)
class Setting:
    """Where things are.

    Attributes:
        target: folder of the target model.
        heads: trained head of each family, in Headway's own format.
        work: folder for exports, environments and downloads.
        pythons: interpreters by name of environment, instead of environments of our own.
        install: whether environments that are missing are made.
    """

    target: Path
    heads: Mapping[str, Path]
    work: Path
    pythons: Mapping[str, Path] = field(default_factory=dict)
    install: bool = True

    def head(self, family: str) -> Path:
        """The trained head of a family.

        Raises:
            CannotRun: there is none.
        """
        if family not in self.heads:
            raise CannotRun(f"no {family} head: name one with --head {family}=<folder>")
        return self.heads[family]

    def folder(self, name: str) -> Path:
        """A folder of our own for files; it is made if missing."""
        path = self.work / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def python(self, name: str, *requirements: str) -> Path:
        """The interpreter of an environment, which is made if missing.

        Args:
            name: of the environment.
            *requirements: what pip installs into it.

        Raises:
            CannotRun: it is missing and may not be made, or pip fails.
        """
        if name in self.pythons:
            return self.pythons[name]
        folder = self.work / "environments" / name
        python, done = folder / "bin" / "python", folder / ".requirements"
        if done.is_file() and done.read_text(encoding="utf-8").split() == list(requirements):
            return python
        if not self.install:
            raise CannotRun(f"environment {name!r} is missing and --no-install was given")
        venv.create(folder, clear=True, with_pip=True)
        output([str(python), "-m", "pip", "install", "--quiet", *requirements])
        done.write_text("\n".join(requirements) + "\n", encoding="utf-8")
        return python


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


def headway_versions() -> dict[str, str]:
    """Of what our side of a check runs on."""
    return {name: version(name) for name in ("torch", "transformers")} | {
        "Python": sys.version.split()[0]
    }
