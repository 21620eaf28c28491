"""k anew for every engine step of a live vLLM.

vLLM 0.32 has a table of k by batch size (`Scheduler.dynamic_sd_lookup`, dynamic speculation), which its scheduler reads
once per step, before the drafter runs: `num_spec_tokens_to_schedule = dynamic_sd_lookup[number of requests]`. Anything
that can be indexed may stand there, so here a function answers. What it says is the k of the drafts that the *next*
step verifies. The k of the speculative configuration sizes buffers and stays the upper bound.
"""

from __future__ import annotations

from collections.abc import Callable


class StepLengths:
    """In place of the table: asks `choose` at every step and keeps what was asked for, for the record of the blocks."""

    def __init__(self, num_draft_tokens: int) -> None:
        """`num_draft_tokens` is the k that the engine was built for."""
        self.limit = num_draft_tokens
        """At most this many, whatever `choose` says."""
        self.choose: Callable[[int], int] | None = None
        """Running requests -> k; None: the limit."""
        self.may_draft: Callable[[], bool] | None = None
        """Asked before `choose`: while it says no, k is 0. None: always yes."""
        self._asked: list[int] = []

    def __getitem__(self, live: int) -> int:
        k = self.limit
        if k > 0 and self.may_draft is not None and not self.may_draft():
            k = 0
        if self.choose is not None and k > 0:
            k = min(k, self.choose(live))
        self._asked.append(k)
        return k

    @property
    def current(self) -> int:
        """What was asked for last: k of the drafts to be made in the step that runs now. 0 before the first step."""
        return self._asked[-1] if self._asked else 0

    def none_fit(self) -> None:
        """What was asked for last does not fit the length limit: nothing is drafted in the step that runs now."""
        self._asked[-1] = 0

    def start(self) -> None:
        """Forget what was asked for so far."""
        self._asked.clear()

    def asked(self) -> list[int]:
        """k of the drafts that each step since `start` verified. The first step has none: nothing stood before it."""
        return [0, *self._asked[:-1]]
