"""Scoring in processes with a wall limit.

A limit by signal works in the main thread alone, and one by thread does not stop the work, so a scorer that hangs
must run in a process that can be killed (huggingface/Math-Verify#65, volcengine/verl#5635).

    submit -> jobs (queue) -> one thread per worker -> worker process -> Future
                              over time: kill, count, start another
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType

from paceline.config.run import Rewards
from paceline.errors import ConfigError
from paceline.rewards.worker import READY
from paceline.types import Prompt

START_TIMEOUT_S = 120.0
"""A worker imports its libraries first. That takes a while on a busy machine, and no score's limit includes it."""

Job = tuple[str, str, Future[float | None]]


class RewardPool:
    """`config.num_workers` processes that score `task`; always that many, whatever the responses do to them.

    Example: `with RewardPool("chain_sum", Rewards()) as pool: rewards = pool.score([("Answer:3", prompt)])`.
    May be used from any thread.
    """

    def __init__(self, task: str, config: Rewards) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._failures = 0
        self._last_failure = ""
        self._threads = [
            threading.Thread(target=self._serve, args=(task, config.timeout_s), name=f"reward-{i}", daemon=True)
            for i in range(config.num_workers)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def failures(self) -> int:
        """Responses that could not be scored: over time, over memory, or the scorer raised."""
        return self._failures

    @property
    def last_failure(self) -> str:
        """Why the last of them failed; empty when none did."""
        return self._last_failure

    def submit(self, text: str, prompt: Prompt) -> Future[float | None]:
        """Begin to score one response; the result is None when scoring failed.

        The result raises `ConfigError` when no worker can be started.
        """
        future: Future[float | None] = Future()
        self._jobs.put((text, prompt.answer, future))
        return future

    def score(self, responses: Sequence[tuple[str, Prompt]]) -> list[float | None]:
        """Score (text, prompt) pairs, in order. Raises as the results of `submit` do."""
        return [future.result() for future in [self.submit(text, prompt) for text, prompt in responses]]

    def close(self) -> None:
        """Finish what was submitted and end the workers."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _serve(self, task: str, timeout_s: float) -> None:
        worker = _Worker(task, timeout_s)
        try:
            while (job := self._jobs.get()) is not None:
                text, answer, future = job
                try:
                    reward, failure = worker.score(text, answer)
                except ConfigError as error:
                    future.set_exception(error)
                    continue
                if reward is None:
                    with self._lock:
                        self._failures += 1
                        self._last_failure = failure
                future.set_result(reward)
        finally:
            worker.kill()


class _Worker:
    """One process; started again after it was killed or died."""

    def __init__(self, task: str, timeout_s: float) -> None:
        self._task = task
        self._timeout_s = timeout_s
        self._process = self._start()
        self._ready = False

    def score(self, text: str, answer: str) -> tuple[float | None, str]:
        """The reward, or None and why. Raises `ConfigError` when the process does not come up."""
        if not self._ready:
            if self._reply(START_TIMEOUT_S) != READY:
                self._restart()
                raise ConfigError(
                    f"the reward worker of data.task {self._task} does not start. "
                    f"`{sys.executable} -m paceline.rewards.worker {self._task} 5` shows why"
                )
            self._ready = True
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):
            # A worker that died in between is found by its missing reply.
            stdin.write(json.dumps([text, answer]).encode() + b"\n")
            stdin.flush()
        reply = self._reply(self._timeout_s)
        if isinstance(reply, float):
            return reply, ""
        if isinstance(reply, dict):
            return None, str(reply["error"])
        self._restart()
        return None, f"no score within {self._timeout_s} s: the worker was over time, over memory, or crashed"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def _restart(self) -> None:
        self.kill()
        self._process = self._start()
        self._ready = False

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        # The engine's preloaded OpenMP runtime is of no use here.
        environment.pop("LD_PRELOAD", None)
        source = str(Path(__file__).parents[2])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
        return subprocess.Popen(
            [sys.executable, "-m", "paceline.rewards.worker", self._task, str(self._timeout_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            bufsize=0,
            # Ctrl-C in the terminal is for the run, which then ends its workers.
            start_new_session=True,
        )

    def _reply(self, timeout_s: float) -> object:
        """The next line as JSON; None when it does not come in time or the process ended."""
        stdout = self._process.stdout
        assert stdout is not None
        deadline = time.monotonic() + timeout_s
        line = b""
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return None
                data = os.read(stdout.fileno(), 65536)
                if not data:
                    return None
                line += data
        return json.loads(line)
