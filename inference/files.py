"""Text files that are whole or not there.

Pure: the standard library.
"""

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path


def write_whole(path: Path, parts: Iterable[str]) -> None:
    """Write a text file; a reader sees the old one or the new one, never a part of one.

    Args:
        path: of the file; its folder exists.
        parts: of the text, one after the other.

    Raises:
        OSError: it cannot be written; what was there is untouched.
    """
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
