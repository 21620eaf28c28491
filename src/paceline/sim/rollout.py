"""One rollout, event by event: engines run from one completion to the next in closed form.

N requests, R engines, S slots per engine. Between two events (a completion, an admission, a full KV cache, a release)
an engine's live batch n is constant and its cached tokens grow by the same amount every iteration, so m iterations take
m * tau(n, C at their middle, k): exact for a tau that is linear in C, as `RooflineCost` is. All engines advance in the
same numpy call, each on its own clock.

Acceptance enters by its expectation: a request commits g(k) tokens per iteration, and finishes after ceil(length / g)
of them. `token_by_token.py` draws every acceptance and is the slow twin that this is tested against.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from paceline.errors import ConfigError
from paceline.sim.acceptance import Acceptance
from paceline.sim.cost import Cost
from paceline.sim.figures import Assumption
from paceline.sim.schedule import Schedule, schedule_table
from paceline.sim.tabled import tabled
from paceline.sim.workload import Requests

_ROUND = 1e-9
"""Iterations are counted with this tolerance, so that 3.0000000001 of them are three."""


@dataclass(frozen=True, slots=True)
class Engines:
    """What the requests run on. Example: `Engines(num_engines=128, slots=32)`."""

    num_engines: int
    slots: int
    """Sequences decoded together on one engine; more wait."""
    kv_capacity_tokens: float = np.inf
    """Per engine. When it is full the sequence admitted last is preempted; it recomputes its tokens later."""
    prefix_sharing: bool = True
    """Members of a group on one engine store their prompt once and compute it once.

    So does vLLM, also for members that are admitted in the same step, but in whole blocks (16 tokens on a GPU, 128 on a
    CPU), and never the last token, nor the last such block under EAGLE-3 or MTP: a shorter prompt is not shared."""

    def __post_init__(self) -> None:
        if self.num_engines < 1 or self.slots < 1 or self.kv_capacity_tokens <= 0:
            raise ConfigError(f"{self}: engines, slots and KV capacity must be positive.")

    def assumptions(self) -> list[Assumption]:
        """One line each."""
        return [
            Assumption("engines", self.num_engines, "assumed", "that share the responses"),
            Assumption("max_num_seqs", self.slots, "assumed", "sequences in flight per engine"),
            Assumption(
                "kv_capacity_tokens", self.kv_capacity_tokens, "assumed", "of an engine, beside weights and draft"
            ),
            Assumption(
                "prefix_sharing", self.prefix_sharing, "assumed", "whether a group's prompt is read once per engine"
            ),
        ]


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """[M] stretches of constant batch on one engine, in the order in which they were simulated."""

    start_s: np.ndarray
    end_s: np.ndarray
    engine: np.ndarray
    live: np.ndarray
    k: np.ndarray
    iterations: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """What happened. Times are seconds since the start of the rollout."""

    finish_s: np.ndarray
    """[N]"""
    admit_s: np.ndarray
    """[N] first admission."""
    engine: np.ndarray
    """[N] which engine served the request."""
    engine_finish_s: np.ndarray
    """[R] last completion; 0 for an engine without requests."""
    prefill_s: np.ndarray
    """[R] seconds spent on prompts and on recomputing preempted sequences."""
    tokens: float
    """Response tokens counted segment by segment; their overshoot in the last iteration of a request is cut."""
    preemptions: int
    recomputed_tokens: float
    segments: Segments

    @property
    def makespan_s(self) -> float:
        """When the last request finishes."""
        return float(self.finish_s.max())

    @property
    def iterations(self) -> float:
        """Engine iterations, all engines together."""
        return float(self.segments.iterations.sum())

    @property
    def mean_tokens_per_iteration(self) -> float:
        """Tokens that one live sequence commits in one iteration, averaged over both."""
        return self.tokens / float((self.segments.iterations * self.segments.live).sum())

    def iterations_by_k(self) -> dict[int, float]:
        """Engine iterations at each k."""
        ks = np.unique(self.segments.k)
        return {int(k): float(self.segments.iterations[self.segments.k == k].sum()) for k in ks}

    def active(self) -> tuple[np.ndarray, np.ndarray]:
        """Live sequences of all engines against time: ([J] seconds, [J] live from then on)."""
        segments = self.segments
        times = np.concatenate([segments.start_s, segments.end_s])
        changes = np.concatenate([segments.live, -segments.live])
        moments, index = np.unique(times, return_inverse=True)
        return moments, np.cumsum(np.bincount(index, weights=changes, minlength=len(moments)))


def simulate_rollout(
    requests: Requests, cost: Cost, acceptance: Acceptance | None, schedule: Schedule | int, engines: Engines
) -> Rollout:
    """Run all requests to their end. Deterministic: everything random is in `requests`.

    Requests are dealt to the engines in turn, in the order of their release, by groups where prefixes are shared.
    `acceptance` may be None where the schedule never drafts. Raises ConfigError for a k without acceptances, for a
    request that can never fit into the KV cache, and what the cost raises.
    """
    simulation = Simulation(requests, cost, acceptance, schedule, engines)
    simulation.run(len(requests))
    return simulation.result()


def speedup(
    requests: Requests, cost: Cost, acceptance: Acceptance, schedule: Schedule | int, engines: Engines
) -> tuple[float, Rollout, Rollout]:
    """Seconds without speculation / seconds with it, on the same requests; and both rollouts, baseline first."""
    baseline = simulate_rollout(requests, cost, None, 0, engines)
    speculative = simulate_rollout(requests, cost, acceptance, schedule, engines)
    return baseline.makespan_s / speculative.makespan_s, baseline, speculative


def check_capacity(requests: Requests, engines: Engines, max_k: int) -> None:
    """Raises ConfigError when a request would not fit into an empty engine: it could never finish."""
    largest = float((requests.prompts + requests.lengths).max()) + max_k + 1
    if largest > engines.kv_capacity_tokens:
        raise ConfigError(
            f"the longest request needs {largest:.0f} tokens of KV cache, an engine holds "
            f"{engines.kv_capacity_tokens:.0f}. Use more GPUs per engine, fewer bytes per element, or a lower response "
            "length limit."
        )


def deal(requests: Requests, engines: Engines, batch: int | None = None) -> list[np.ndarray]:
    """[R] arrays of request numbers in the order in which each engine meets them.

    In turn, by release. With shared prefixes a whole group goes to one engine, unless that would leave engines idle
    that `batch` requests (default: all) could keep busy: then groups are cut into equal parts.
    """
    order = np.argsort(requests.release_s, kind="stable")
    chunk = np.arange(len(order))
    if engines.prefix_sharing:
        groups = requests.groups[order]
        starts = np.flatnonzero(np.r_[True, groups[1:] != groups[:-1]])
        sizes = np.diff(np.r_[starts, len(order)])
        pieces = np.ceil(sizes / max((batch or len(order)) // engines.num_engines, 1))
        part = np.repeat(np.ceil(sizes / pieces).astype(int), sizes)
        within = chunk - np.repeat(starts, sizes)
        chunk = np.cumsum(within % part == 0) - 1
    engine = chunk % engines.num_engines
    counts = np.bincount(engine, minlength=engines.num_engines)
    return np.split(order[np.argsort(engine, kind="stable")], np.cumsum(counts)[:-1])


def _tokens_per_iteration(
    requests: Requests, acceptance: Acceptance | None, table: np.ndarray
) -> Mapping[int, np.ndarray]:
    """{k: [N + 1] expected tokens per iteration}; the last entry, 0, belongs to empty slots."""
    gains = {}
    for k in np.unique(table[1:]).tolist():
        if k and acceptance is None:
            raise ConfigError(f"the schedule drafts k = {k} tokens, but no acceptance is given.")
        tokens = acceptance.tokens(k, requests.shifts) if k and acceptance else np.ones(len(requests))
        gains[k] = np.append(np.broadcast_to(tokens, len(requests)), 0.0)
    return gains


class Simulation:
    """`simulate_rollout` in parts, for releases that depend on what has finished. See there for what is raised.

    Request number N stands for an empty slot, and for the end of a queue.
    """

    def __init__(
        self,
        requests: Requests,
        cost: Cost,
        acceptance: Acceptance | None,
        schedule: Schedule | int,
        engines: Engines,
        batch: int | None = None,
    ) -> None:
        """`batch`: see `deal`."""
        table = schedule_table(schedule, engines.slots)
        gains = _tokens_per_iteration(requests, acceptance, table)
        check_capacity(requests, engines, int(table.max()))
        count, rows = len(requests), engines.num_engines
        self.cost, self.table = tabled(cost, engines.slots, sorted(gains)), table
        self.capacity = engines.kv_capacity_tokens
        self.empty = count
        self.lookahead = int(table.max()) + 1
        """KV slots that one iteration may write per sequence: k drafts and one token."""
        self.limited = float(self._most_kv_tokens(requests, engines)) > engines.kv_capacity_tokens
        """Whether the KV cache can ever be full."""
        self.gain_of_k = np.zeros((self.lookahead, count + 1))
        for k, tokens in gains.items():
            self.gain_of_k[k] = tokens
        self.lengths = np.append(requests.lengths, 0).astype(float)
        self.prompts = np.append(requests.prompts, 0).astype(float)
        self.whole = self.prompts + self.lengths
        self.release_s = np.append(requests.release_s, np.inf)
        self.remaining = self.lengths.copy()

        queues = deal(requests, engines, batch)
        self.queued = np.array([len(queue) for queue in queues])
        self.queue = np.full((rows, int(self.queued.max()) + 1), self.empty)
        self.position = np.zeros(count + 1, dtype=np.int64)
        """Place in the queue of its engine: the order of admission, which preemption reverses."""
        self.engine = np.zeros(count, dtype=np.int64)
        for row, queue in enumerate(queues):
            self.queue[row, : len(queue)] = queue
            self.position[queue] = np.arange(len(queue))
            self.engine[queue] = row
        self.head = np.zeros(rows, dtype=np.int64)
        self.slots = np.full((rows, min(engines.slots, int(self.queued.max()))), self.empty)
        self.clock = np.zeros(rows)

        # A prefix is one prompt on one engine. It is stored while `members` of its requests are live.
        prefix = np.arange(count)
        if engines.prefix_sharing:
            _, group = np.unique(requests.groups, return_inverse=True)
            _, prefix = np.unique(group * rows + self.engine, return_inverse=True)
        self.prefix = np.append(prefix, -1)
        num_prefixes = int(prefix.max()) + 1
        self.members = np.zeros(num_prefixes + 1, dtype=np.int64)
        self.prefix_tokens = np.zeros(num_prefixes + 1)
        self.prefix_tokens[self.prefix[:-1]] = requests.prompts
        self.prefix_engine = np.zeros(num_prefixes + 1, dtype=np.int64)
        self.prefix_engine[self.prefix[:-1]] = self.engine
        self.prefix_kv = np.zeros(rows)
        """[R] KV tokens of stored prefixes."""

        self.finish_s = np.full(count + 1, np.inf)
        """Infinite until a request has finished."""
        self.awaited = 0
        """`run` stops an engine whose requests below this number have finished."""
        self.left = np.zeros(rows, dtype=np.int64)
        """[R] how many of them have not."""
        self.admit_s = np.full(count + 1, np.nan)
        self.prefill_s = np.zeros(rows)
        self.tokens = 0.0
        self.preemptions = 0
        self.recomputed_tokens = 0.0
        self.record: list[tuple[np.ndarray, ...]] = []

    def _most_kv_tokens(self, requests: Requests, engines: Engines) -> int:
        """What an engine would use with its slots full of the longest request."""
        longest = int((requests.prompts + requests.lengths).max()) + self.lookahead
        return min(engines.slots, len(requests)) * longest

    def release(self, first: int, last: int, release_s: float) -> None:
        """Requests `first` to `last`, released at infinity so far, may start at `release_s` on the engines' clocks.

        In the order of their numbers, and not before a moment to which `run` has brought an engine.
        """
        self.release_s[first:last] = release_s

    def run(self, awaited: int) -> None:
        """Run every engine until those of its requests whose number is below `awaited` have finished, and no further.

        So far an engine cannot have met a request that is released when all of them have finished, or later.
        """
        self.awaited = awaited
        unfinished = np.flatnonzero(np.isinf(self.finish_s[:awaited]))
        self.left = np.bincount(self.engine[unfinished], minlength=len(self.left))
        while self.left.any():
            if (self.head < self.queued).any():
                self._wait_for_release()
                self._admit()
            if self.limited:
                self._preempt()
            rows = np.flatnonzero((self.left > 0) & (self._live() > 0))
            if not rows.size:
                raise AssertionError(f"requests below {awaited} wait for a release that nobody gave")
            self._advance(rows)

    def result(self) -> Rollout:
        """All requests having finished."""
        fields = [np.concatenate(column) for column in zip(*self.record, strict=True)]
        finish_s = self.finish_s[:-1]
        engine_finish_s = np.zeros(len(self.clock))
        np.maximum.at(engine_finish_s, self.engine, finish_s)
        return Rollout(
            finish_s=finish_s,
            admit_s=self.admit_s[:-1],
            engine=self.engine,
            engine_finish_s=engine_finish_s,
            prefill_s=self.prefill_s,
            tokens=self.tokens,
            preemptions=self.preemptions,
            recomputed_tokens=self.recomputed_tokens,
            segments=Segments(*fields),
        )

    def _live(self) -> np.ndarray:
        """[R] sequences in slots."""
        return (self.slots != self.empty).sum(axis=1)

    def _kv_tokens(self) -> np.ndarray:
        """[R] KV tokens in use: what each sequence has generated, and every stored prefix once."""
        return (self.lengths - self.remaining)[self.slots].sum(axis=1) + self.prefix_kv

    def _next_release(self) -> np.ndarray:
        """[R] when the head of the queue may start; infinite where the queue is empty."""
        return self.release_s[self.queue[np.arange(len(self.head)), self.head]]

    def _wait_for_release(self) -> None:
        """An engine without work jumps to the release of its next request."""
        release = self._next_release()
        idle = (self._live() == 0) & np.isfinite(release)
        self.clock[idle] = np.maximum(self.clock, release)[idle]

    def _admit(self) -> None:
        """Move released queue heads into free slots, first come first served, while their KV tokens fit."""
        live = self._live()
        free = self.slots.shape[1] - live
        width = int(np.minimum(free, self.queued - self.head).max())
        if width <= 0:
            return
        column = np.arange(width)
        place = np.minimum(self.head[:, None] + column, self.queue.shape[1] - 1)
        ids = np.take_along_axis(self.queue, place, axis=1)
        can = (column < free[:, None]) & (self.release_s[ids] <= self.clock[:, None])
        prefix = self.prefix[ids]
        first = np.ones_like(can)
        first[:, 1:] = prefix[:, 1:] != prefix[:, :-1]
        pays = first & (self.members[prefix] == 0)
        generated = (self.lengths - self.remaining)[ids]
        new = generated + np.where(pays, self.prompts[ids], 0.0)
        if self.limited:
            wanted = self._kv_tokens()[:, None] + np.cumsum(new, axis=1)
            wanted += (live[:, None] + column + 1) * self.lookahead
            can &= wanted <= self.capacity
        can = np.logical_and.accumulate(can, axis=1)
        count = can.sum(axis=1)
        if not count.any():
            return

        vacant = self.slots == self.empty
        rank = np.cumsum(vacant, axis=1) - 1
        taken = vacant & (rank < count[:, None])
        row, _ = np.nonzero(taken)
        admitted = self.queue[row, self.head[row] + rank[taken]]
        self.slots[taken] = admitted
        self.head += count
        self.admit_s[admitted] = np.fmin(self.admit_s[admitted], self.clock[row])
        self._count_members(admitted, 1)

        self.recomputed_tokens += float(new[can & (generated > 0)].sum())
        new = np.where(can, new, 0.0)
        if new.any():
            past = np.where(pays, 0.0, self.prompts[ids])
            seconds = self.cost.prefill_s(new.sum(axis=1), (new * (past + new / 2)).sum(axis=1))
            self.clock += seconds
            self.prefill_s += seconds

    def _count_members(self, ids: np.ndarray, change: int) -> None:
        """A prefix takes KV tokens from its first live member to its last."""
        if not self.prompts.any():
            return
        prefixes = np.unique(self.prefix[ids])
        before = self.members[prefixes] > 0
        np.add.at(self.members, self.prefix[ids], change)
        turned = prefixes[before != (self.members[prefixes] > 0)]
        np.add.at(self.prefix_kv, self.prefix_engine[turned], change * self.prefix_tokens[turned])

    def _preempt(self) -> None:
        """Where the next iteration would not fit, the sequence admitted last goes back to the head of its queue.

        It is not admitted again before something finishes: that would need the room which was missing.
        """
        while True:
            full = np.flatnonzero(self._kv_tokens() + self._live() * self.lookahead > self.capacity)
            if not full.size:
                return
            slots = self.slots[full]
            latest = np.where(slots != self.empty, self.position[slots], -1).argmax(axis=1)
            victims = slots[np.arange(len(full)), latest]
            self.slots[full, latest] = self.empty
            self.head[full] -= 1
            self.queue[full, self.head[full]] = victims
            self.position[victims] = self.head[full]
            self._count_members(victims, -1)
            self.preemptions += len(full)

    def _advance(self, rows: np.ndarray) -> None:
        """Run engines `rows` to their next event."""
        slots = self.slots[rows]
        busy = slots != self.empty
        live = busy.sum(axis=1)
        k = self.table[live]
        gain = self.gain_of_k[k[:, None], slots]
        remaining = self.remaining[slots]
        need = np.full(slots.shape, np.inf)
        np.divide(remaining, gain, out=need, where=busy)
        need = np.maximum(np.ceil(need - _ROUND), 1.0)
        steps = need.min(axis=1)
        growth = gain.sum(axis=1)
        if self.limited:
            room = self.capacity - self._kv_tokens()[rows] - live * self.lookahead
            steps = np.minimum(steps, np.floor(room / growth + _ROUND) + 1)
        context = self.whole[slots].sum(axis=1) - remaining.sum(axis=1)
        seconds = self._mean_s(live, context, growth, steps, k)
        until = self._next_release()[rows] - self.clock[rows]
        waiting = (live < self.slots.shape[1]) & (until > 0) & np.isfinite(until)
        if waiting.any():
            arrival = self._steps_until(until, live, context, growth, steps, seconds, k)
            steps = np.where(waiting, np.minimum(steps, arrival), steps)
            seconds = self._mean_s(live, context, growth, steps, k)

        start = self.clock[rows]
        end = start + steps * seconds
        self.clock[rows] = end
        finished = busy & (need <= steps[:, None])
        made = np.where(finished, remaining, steps[:, None] * gain)
        self.tokens += float(made.sum())
        self.remaining[slots] = remaining - made
        row, _ = np.nonzero(finished)
        done = slots[finished]
        self.finish_s[done] = end[row]
        self.slots[rows] = np.where(finished, self.empty, slots)
        if done.size:
            self._count_members(done, -1)
            np.subtract.at(self.left, rows[row], done < self.awaited)
        self.record.append((start, end, rows, live, k, steps))

    def _mean_s(
        self, live: np.ndarray, context: np.ndarray, growth: np.ndarray, steps: np.ndarray, k: np.ndarray
    ) -> np.ndarray:
        """Mean seconds of `steps` iterations, the first of which finds `context` tokens cached."""
        return self.cost.iteration_s(live, context + (steps - 1) / 2 * growth, k)

    def _steps_until(
        self,
        until_s: np.ndarray,
        live: np.ndarray,
        context: np.ndarray,
        growth: np.ndarray,
        steps: np.ndarray,
        mean_s: np.ndarray,
        k: np.ndarray,
    ) -> np.ndarray:
        """Iterations after which `until_s` seconds have passed: the smallest j with j a + b j (j - 1) / 2 >= until."""
        first = self.cost.iteration_s(live, context, k)
        slope = np.where(steps > 1, 2 * (mean_s - first) / np.maximum(steps - 1, 1), 0.0)
        linear = first - slope / 2
        until_s = np.where(np.isfinite(until_s) & (until_s > 0), until_s, 0.0)
        exact = 2 * until_s / (linear + np.sqrt(np.maximum(linear**2 + 2 * slope * until_s, 0.0)))
        return np.maximum(np.ceil(exact - _ROUND), 1.0)
