"""The five stages of a step on the wall clock."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator
from typing import Literal, get_args

from paceline.observe.trace import Trace

Stage = Literal["data", "prepare", "generate", "logprob", "train"]
STAGES: tuple[Stage, ...] = get_args(Stage)


class StageClock:
    """Times one step, without a gap: what passes between two stages belongs to the second of them.

    Stages may be entered more than once; they never nest, so no second is counted twice.

    Example::

        with clock.stage("data"):
            prompts = source.next(8)
        seconds = clock.seconds()
    """

    def __init__(self, trace: Trace, step: int, now: Callable[[], float] = time.perf_counter) -> None:
        self._trace = trace
        self._step = step
        self._now = now
        self._start = self._end = now()
        self._seconds: dict[Stage, float] = dict.fromkeys(STAGES, 0.0)
        self._running: Stage | None = None

    @contextlib.contextmanager
    def stage(self, name: Stage) -> Generator[None, None, None]:
        if self._running is not None:
            raise AssertionError(f"stage {name!r} inside stage {self._running!r}: its time would count twice")
        self._running = name
        start = self._end
        try:
            with self._trace.span(name, step=self._step):
                yield
        finally:
            self._end = self._now()
            self._seconds[name] += self._end - start
            self._running = None

    def seconds(self) -> dict[str, float]:
        """`stage_s` of metrics.jsonl: each stage, and `step` from the start of the clock to the end of the last one.

        `exposed_generate` is the part of generation that training waited for: all of it in a synchronous run.
        """
        return {**self._seconds, "step": self._end - self._start, "exposed_generate": self._seconds["generate"]}
