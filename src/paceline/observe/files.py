"""Files of a run folder: written whole or not at all, and a full disk is said in one paragraph."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Generator
from pathlib import Path

from paceline.errors import CheckpointError


@contextlib.contextmanager
def explained(path: Path) -> Generator[None, None, None]:
    """Turns an `OSError` of writing `path` into a `CheckpointError` that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise CheckpointError(
                f"No space left while writing {path} ({error.strerror}). What was complete before is untouched. Free "
                "some space, or set run.root to another disk, then start again with --resume."
            ) from error
        raise CheckpointError(
            f"Cannot write {path}: {error.strerror or error}. Check the permissions of the folder, or set run.root to "
            "another one."
        ) from error


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` (a rename, a new file) survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_synced(path: Path, content: bytes) -> None:
    """Write and fsync. Raises `OSError`."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write_whole(path: Path, content: bytes) -> None:
    """Replace `path` by `content` so that a reader, or a crash at any point, sees the old file or the new one.

    Raises `CheckpointError`.
    """
    beside = path.with_name(f".{path.name}.new")
    with explained(path):
        try:
            write_synced(beside, content)
            beside.replace(path)
            sync_folder(path.parent)
        finally:
            beside.unlink(missing_ok=True)
