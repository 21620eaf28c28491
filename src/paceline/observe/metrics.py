"""`metrics.jsonl`: one JSON object per step, on disk before the next step starts."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from paceline.errors import CheckpointError
from paceline.observe.files import explained


class JsonLines:
    """An append-only file of JSON objects. Its length in bytes goes into the checkpoint; resuming cuts it back."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def size_bytes(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def append(self, record: Mapping[str, object]) -> None:
        """Write one line and wait until it is on disk.

        Floats are written so that they read back bit-equal; NaN and infinities are no JSON and raise `ValueError`.
        Raises `CheckpointError` on a full disk; the line is then taken back, so that no half of it stays.
        """
        line = json.dumps(record, allow_nan=False) + "\n"
        before = self.size_bytes
        with explained(self.path):
            try:
                with self.path.open("ab") as file:
                    file.write(line.encode())
                    file.flush()
                    os.fsync(file.fileno())
            except OSError:
                if self.path.exists():
                    os.truncate(self.path, before)
                raise

    def cut(self, size_bytes: int) -> None:
        """Forget everything after the first `size_bytes`. Raises `CheckpointError` when there is less than that."""
        if self.size_bytes < size_bytes:
            raise CheckpointError(
                f"{self.path} has {self.size_bytes} bytes but the checkpoint was written after {size_bytes}: it was "
                "shortened or replaced. Put it back, or start a new run under another run.name."
            )
        if self.path.exists():
            with explained(self.path):
                os.truncate(self.path, size_bytes)

    def records(self) -> list[dict[str, object]]:
        """All complete lines, in order. A last line without its end (a crash while writing) is not one."""
        if not self.path.exists():
            return []
        complete = self.path.read_bytes().rpartition(b"\n")[0]
        return [json.loads(line) for line in complete.splitlines()]
