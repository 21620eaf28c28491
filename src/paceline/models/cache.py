"""Folders that are built once: atomic, checked on every use, rebuilt when damaged.

- `<root>/tiny-3f2a.../` is complete or absent; its `checksums.json` has the sha256 of every other file.
- `<root>/.tiny-3f2a...-x1y2/` is being built, and renamed when complete.
- `<root>/.tiny-3f2a....lock` is held while building, so that a second process waits instead of building too.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from paceline.errors import ModelError

Progress = Callable[[str, float], None]
"""Called with what is being done and the fraction of it that is done (0-1)."""

CHECKSUMS = "checksums.json"


def no_progress(what: str, done: float) -> None:
    """The `Progress` that shows nothing."""


def cache_root(root: Path | None = None) -> Path:
    """Where embedded models are kept: `root`, else the environment variable PACELINE_CACHE, else ~/.cache/paceline."""
    if root is not None:
        return root
    named = os.environ.get("PACELINE_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "paceline"


def file_checksums(folder: Path) -> dict[str, str]:
    """sha256 of every file of `folder` (hidden ones and the list of checksums left out), by relative path."""
    checksums: dict[str, str] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name != CHECKSUMS and not any(part.startswith(".") for part in Path(name).parts):
            with path.open("rb") as file:
                checksums[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return checksums


def digest_of(value: object) -> str:
    """sha256 of a JSON value, as 64 hexadecimal digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def intact(folder: Path) -> bool:
    """Whether every file of a built folder is the one that was written, none missing and none more."""
    try:
        return json.loads((folder / CHECKSUMS).read_text()) == file_checksums(folder)
    except (OSError, ValueError):
        return False


def build_once(root: Path, name: str, build: Callable[[Path], None]) -> Path:
    """The folder `root/name`, made by `build(temporary folder)` when it is absent or damaged.

    Raises `ModelError` when the cache cannot be written (full disk, no permission); nothing half-written stays.
    """
    folder = root / name
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f".{name}.lock"):
            if intact(folder):
                return folder
            temporary = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=root))
            try:
                build(temporary)
                (temporary / CHECKSUMS).write_text(json.dumps(file_checksums(temporary), indent=1))
                shutil.rmtree(folder, ignore_errors=True)
                temporary.rename(folder)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise ModelError(
            f"the cache folder {root} cannot be written ({error}). Make room there, or set PACELINE_CACHE to a folder "
            "with 2 GB of free space"
        ) from error
    return folder


@contextmanager
def _locked(path: Path) -> Generator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
