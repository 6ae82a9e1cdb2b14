"""What produced a result: versions, commit, command line. Written into every output folder."""

import json
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "transformers", "accelerate", "datasets", "safetensors")


def provenance() -> dict[str, Any]:
    """Versions, git commit (with a mark if the tree was changed) and command line of this "
    "process."""
    return {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "commit": _commit(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in _PACKAGES},
    }


def write_provenance(folder: Path) -> None:
    """Write ``provenance.json`` into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "provenance.json").write_text(json.dumps(provenance(), indent=1) + "\n")


def _commit() -> str | None:
    root = Path(__file__).resolve().parent
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return described.stdout.strip()
