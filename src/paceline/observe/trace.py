"""`trace.json`: spans of a run in the Chrome trace format (chrome://tracing, ui.perfetto.dev)."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Generator
from pathlib import Path

from paceline.observe.files import explained, write_whole

_END = b"\n]\n"


class Trace:
    """Complete events ("ph": "X"), one per line of a JSON array, appended as they end.

    The file is valid JSON after every event, so that a run that was killed leaves a trace that opens. Times are
    microseconds of wall clock since the epoch: a resumed run continues on the same axis, and steps that were done twice
    show twice, because they took the time twice.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        content = path.read_bytes() if path.exists() else b""
        if not content.endswith(_END):
            # New, or a crash in the middle of an event: keep the lines that are whole.
            events = [line.rstrip(b",") for line in content.splitlines() if _is_event(line)]
            write_whole(path, b"[" + b",".join(b"\n" + event for event in events) + _END)

    @contextlib.contextmanager
    def span(self, name: str, **arguments: float | int | str) -> Generator[None, None, None]:
        """Record the time of the block; `arguments` show when the span is clicked."""
        start_s = time.time()
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, start_s, time.perf_counter() - start, **arguments)

    def add(self, name: str, start_s: float, seconds: float, **arguments: float | int | str) -> None:
        """Append one event that began at `start_s` (seconds since the epoch)."""
        event = {
            "name": name,
            "ph": "X",
            "ts": round(start_s * 1e6),
            "dur": round(seconds * 1e6),
            "pid": 0,
            "tid": 0,
            "args": arguments,
        }
        with explained(self.path), self.path.open("r+b") as file:
            file.seek(-len(_END), os.SEEK_END)
            position = file.tell()
            separator = b"\n" if position == 1 else b",\n"
            try:
                file.write(separator + json.dumps(event).encode() + _END)
                file.flush()
            except OSError:
                file.seek(position)
                raise


def _is_event(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line.rstrip(b",")), dict)
    except ValueError:
        return False
