"""Which packages `scripts.gpu_check` lacks, by the versions that pyproject.toml asks for."""

import tomllib
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
HOW = "bring it as a wheel: WHEELS=folder"


@cache
def requirements() -> dict[str, Requirement]:
    """What the project depends on, the kernels' extra included, by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["kernels"]]
    return {found.name: found for found in map(Requirement, lines)}


def lacking(names: Sequence[str]) -> list[str]:
    """What is missing or of another version, each with what is asked for.

    Args:
        names: of packages that pyproject.toml lists.
    """
    found = []
    for name in names:
        asked = requirements()[name]
        if asked.marker is not None and not asked.marker.evaluate():
            continue
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            found.append(f"{name}{asked.specifier} is not installed ({HOW})")
            continue
        if not asked.specifier.contains(version, prereleases=True):
            found.append(f"{name}{asked.specifier} is needed, {version} is installed ({HOW})")
    return found
