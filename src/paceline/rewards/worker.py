"""The process that scores: `python -m paceline.rewards.worker TASK TIMEOUT_S`.

Reads lines of JSON `[text, answer]` and answers each with the reward, or with `{"error": ...}`; ends with its input.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from typing import TextIO

from paceline.rewards.base import Score

READY = "ready"
MEMORY_BYTES = 4 * 2**30
"""Address space of a worker: an expression that wants more is a failure, not the end of the machine's memory."""


def make_score(task: str) -> Score:
    """The scorer of a task of `data.task`. Raises `ValueError` for another name."""
    match task:
        case "chain_sum":
            from paceline.rewards import chain_sum

            return chain_sum.make_score()
        case "gsm_symbolic":
            from paceline.rewards import gsm_symbolic

            return gsm_symbolic.make_score()
        case _:
            raise ValueError(f"no reward for task {task}")


def serve(task: str, timeout_s: float) -> None:
    """Score until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    # What a library prints must not look like a reply.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    score = make_score(task)
    # The pool kills a worker that is over time. If the pool itself was killed, this ends the worker, in any C loop.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    _send(replies, READY)
    for line in sys.stdin:
        text, answer = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, timeout_s + 5)
        try:
            _send(replies, score(text, answer))
        except Exception as error:  # noqa: BLE001 - whatever a scorer raises is a counted failure, reported by the pool
            _send(replies, {"error": f"{type(error).__name__}: {error}"})
        signal.setitimer(signal.ITIMER_REAL, 0)


def _send(replies: TextIO, message: object) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


if __name__ == "__main__":
    serve(sys.argv[1], float(sys.argv[2]))
