"""Keeping two runs from writing to one place."""

import errno
import fcntl
import logging
from functools import cache
from pathlib import Path
from typing import TextIO

logger = logging.getLogger(__name__)

NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""What file systems without locks say: Lustre without ``-o flock``, NFS without lockd."""


def lock(file: TextIO) -> bool:
    """Take an open file for this process until it is closed.

    Where the file system has no locks, a warning says so once and the file counts as taken.

    Args:
        file: opened to be written.

    Returns:
        False where another process has it.

    Raises:
        OSError: it cannot be locked for any other reason.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        _warn(Path(file.name).absolute().parent)
    return True


@cache
def _warn(folder: Path) -> None:
    logger.warning(
        "the file system of %s has no locks: nothing keeps another run from writing there at the "
        "same time, so start no second one",
        folder,
    )
