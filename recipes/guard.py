"""The packages of this project have common names; make sure that it is ours that are imported."""

import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def refuse_foreign_packages() -> None:
    """Exit with the cause and the fix if another distribution owns one of our modules."""
    for name in ("drafters", "training", "inference"):
        spec = find_spec(name)
        if spec is None or spec.origin is None or Path(spec.origin).resolve().parents[1] != ROOT:
            found = "nothing" if spec is None else spec.origin
            sys.exit(
                f"error: the module `{name}` should come from {ROOT} but {found} would be imported."
                f" Another distribution owns the name: pip uninstall {name}, and start from the "
                "root of the checkout"
            )
