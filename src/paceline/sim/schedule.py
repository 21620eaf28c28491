"""How many drafts an engine asks for when n of its sequences are live."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.errors import ConfigError
from paceline.sim.acceptance import Acceptance
from paceline.sim.cost import Cost

Schedule = Callable[[int], int]
"""k for n live sequences of one engine. Any callable will do, such as the rule that the engine itself uses."""


@dataclass(frozen=True, slots=True)
class FixedSchedule:
    """The same k at every batch; 0 is no speculation."""

    k: int

    def __call__(self, num_live: int) -> int:
        return self.k


@dataclass(frozen=True, slots=True)
class TableSchedule:
    """k looked up by live sequences. Example: `TableSchedule((0, 5, 5, 3))` for at most three of them."""

    table: tuple[int, ...]
    """[S + 1]; entry 0 is never used."""

    def __call__(self, num_live: int) -> int:
        if num_live >= len(self.table):
            raise ConfigError(f"the k schedule ends at {len(self.table) - 1} live sequences, {num_live} are running.")
        return self.table[num_live]


def best_schedule(
    cost: Cost, acceptance: Acceptance, ks: Sequence[int], max_live: int, cached_per_live: float
) -> TableSchedule:
    """k*(n) = argmax over `ks` of tokens per second g(k) / tau(n, n * cached_per_live, k); the smaller k wins a tie.

    It looks at one iteration: what a k does to later batches is left out.
    """
    live = np.arange(1, max_live + 1)
    choices = sorted(set(ks))
    rates = np.stack(
        [
            float(acceptance.tokens(k)) / np.broadcast_to(cost.iteration_s(live, live * cached_per_live, k), live.shape)
            for k in choices
        ]
    )
    best = np.asarray(choices)[rates.argmax(axis=0)]
    return TableSchedule((0, *(int(k) for k in best)))


def schedule_table(schedule: Schedule | int, slots: int) -> np.ndarray:
    """[slots + 1] k by live sequences. Raises ConfigError for a negative k."""
    if isinstance(schedule, int):
        schedule = FixedSchedule(schedule)
    table = np.array([0, *(schedule(num_live) for num_live in range(1, slots + 1))], dtype=np.int64)
    if table.min() < 0:
        raise ConfigError("a k schedule gave a negative k: 0 is no speculation.")
    return table
