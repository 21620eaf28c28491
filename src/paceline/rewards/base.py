"""The protocols of rewards."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from paceline.types import Prompt


class Score(Protocol):
    """One task's scorer: a function that runs in a worker. It may be slow, hang or raise; the pool sees to that."""

    def __call__(self, text: str, answer: str) -> float:
        """The reward (0-1) of a response's text, given the task's answer. A response without an answer is worth 0."""
        ...


class Reward(Protocol):
    """What the loop asks for rewards."""

    def submit(self, text: str, prompt: Prompt) -> Future[float | None]:
        """Begin to score one response; the result is None when scoring failed, never 0 for that reason."""
        ...

    def score(self, responses: Sequence[tuple[str, Prompt]]) -> list[float | None]:
        """Score (text, prompt) pairs and wait for all of them, in order."""
        ...

    def close(self) -> None:
        """End the workers."""
        ...
