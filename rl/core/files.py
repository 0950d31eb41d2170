"""Files that survive a crash whole: replaced at once, and known to be on the disk. It knows no format."""

import os
from pathlib import Path


def replace_atomically(path: Path, text: str) -> None:
    """Write a file so that a reader, also after a crash, sees the old content or the new one.

    Raises:
        OSError: it cannot be written; the old content stands, and nothing is left beside it.
    """
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def make_durable(path: Path) -> None:
    """Return when a file, or the list of names in a folder, is on the disk.

    Raises:
        OSError: it is not.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
