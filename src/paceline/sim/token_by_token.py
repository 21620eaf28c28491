"""The slow twin of `rollout.py`: one iteration at a time, every acceptance drawn. To be checked by eye.

Without speculation nothing is drawn and the two agree exactly. With it they differ by what drawing adds: noise, and the
last request to finish being the unlucky one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from paceline.sim.acceptance import Acceptance
from paceline.sim.cost import Cost
from paceline.sim.rollout import Engines, check_capacity, deal
from paceline.sim.schedule import Schedule, schedule_table
from paceline.sim.workload import Requests


@dataclass(frozen=True, slots=True, eq=False)
class DrawnRollout:
    """What happened in one draw. Seconds since the start."""

    finish_s: np.ndarray
    """[N]"""
    admit_s: np.ndarray
    """[N] first admission."""
    tokens: int
    preemptions: int

    @property
    def makespan_s(self) -> float:
        """When the last request finishes."""
        return float(self.finish_s.max())


def token_by_token(
    requests: Requests,
    cost: Cost,
    acceptance: Acceptance | None,
    schedule: Schedule | int,
    engines: Engines,
    seed: int = 0,
) -> DrawnRollout:
    """Run all requests as `simulate_rollout` does, by drawing."""
    table = schedule_table(schedule, engines.slots)
    check_capacity(requests, engines, int(table.max()))
    rng = np.random.default_rng(seed)
    finish_s, admit_s = np.zeros(len(requests)), np.full(len(requests), np.inf)
    tokens = preemptions = 0
    for queue in deal(requests, engines):
        engine = _Engine(requests, cost, acceptance, table, engines, rng)
        engine.run(deque(queue.tolist()), admit_s, finish_s)
        tokens += engine.tokens
        preemptions += engine.preemptions
    return DrawnRollout(finish_s, admit_s, tokens, preemptions)


class _Engine:
    """One engine: who waits, who is live, and the clock."""

    def __init__(
        self,
        requests: Requests,
        cost: Cost,
        acceptance: Acceptance | None,
        table: np.ndarray,
        engines: Engines,
        rng: np.random.Generator,
    ) -> None:
        self.requests, self.cost, self.table, self.engines, self.rng = requests, cost, table, engines, rng
        self.conditional = acceptance.shifted(requests.shifts) if acceptance else np.zeros((len(requests), 0))
        self.lookahead = int(table.max()) + 1
        self.live: list[int] = []
        self.generated = dict.fromkeys(range(len(requests)), 0)
        self.clock = 0.0
        self.tokens = 0
        self.preemptions = 0

    def run(self, waiting: deque[int], admit_s: np.ndarray, finish_s: np.ndarray) -> None:
        while waiting or self.live:
            if not self.live:
                self.clock = max(self.clock, float(self.requests.release_s[waiting[0]]))
            self._admit(waiting, admit_s)
            while self._kv_tokens() + len(self.live) * self.lookahead > self.engines.kv_capacity_tokens:
                waiting.appendleft(self.live.pop())
                self.preemptions += 1
            self._iterate()
            for request in [i for i in self.live if self.generated[i] == self.requests.lengths[i]]:
                finish_s[request] = self.clock
                self.live.remove(request)

    def _admit(self, waiting: deque[int], admit_s: np.ndarray) -> None:
        new_tokens = pairs = 0.0
        moment = self.clock
        while waiting and len(self.live) < self.engines.slots and self.requests.release_s[waiting[0]] <= moment:
            request = waiting[0]
            prompt = int(self.requests.prompts[request])
            stored = self.engines.prefix_sharing and any(self._same_prompt(request, other) for other in self.live)
            new = self.generated[request] + (0 if stored else prompt)
            if self._kv_tokens() + new + (len(self.live) + 1) * self.lookahead > self.engines.kv_capacity_tokens:
                break
            self.live.append(waiting.popleft())
            admit_s[request] = min(admit_s[request], moment)
            new_tokens += new
            pairs += new * ((prompt if stored else 0) + new / 2)
        if new_tokens:
            self.clock += float(self.cost.prefill_s(np.float64(new_tokens), np.float64(pairs)))

    def _iterate(self) -> None:
        num_live = len(self.live)
        context = sum(int(self.requests.prompts[i]) + self.generated[i] for i in self.live)
        k = int(self.table[num_live])
        self.clock += float(self.cost.iteration_s(np.float64(num_live), np.float64(context), np.int64(k)))
        for request in self.live:
            rejected = np.flatnonzero(self.rng.random(k) >= self.conditional[request, :k])
            committed = int(rejected[0]) + 1 if rejected.size else k + 1
            committed = min(committed, int(self.requests.lengths[request]) - self.generated[request])
            self.generated[request] += committed
            self.tokens += committed

    def _same_prompt(self, left: int, right: int) -> bool:
        return self.requests.groups[left] == self.requests.groups[right]

    def _kv_tokens(self) -> int:
        """What each live sequence has generated, and each prompt once where prefixes are shared."""
        generated = sum(self.generated[i] for i in self.live)
        if not self.engines.prefix_sharing:
            return generated + sum(int(self.requests.prompts[i]) for i in self.live)
        prompts = {int(self.requests.groups[i]): int(self.requests.prompts[i]) for i in self.live}
        return generated + sum(prompts.values())
