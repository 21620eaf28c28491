"""Where the time of a `generate` call goes: drafting, verifying, sampling."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Literal

from paceline.engine.base import EngineSeconds

Part = Literal["draft", "verify", "sample"]


class EngineClock:
    """Adds up the parts of a call. They never lie inside one another, so no second is counted twice.

    Two readings of the clock for each part of an engine step. What they mean on a GPU: see `EngineSeconds`.

    Example::

        with clock.part("draft"):
            proposal = drafter.propose(...)
    """

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Forget the call before."""
        self._seconds: dict[Part, float] = {"draft": 0.0, "verify": 0.0, "sample": 0.0}

    @contextmanager
    def part(self, part: Part) -> Generator[None, None, None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[part] += time.perf_counter() - began

    def timed(self, part: Part, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, with the time of every call of it added to `part`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.part(part):
                return function(*args, **kwargs)

        return call

    @property
    def seconds(self) -> EngineSeconds:
        """Since `start`."""
        return EngineSeconds(**self._seconds)
