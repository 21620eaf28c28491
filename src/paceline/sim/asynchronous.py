"""Generation beside training: own GPUs for each, and rollouts that may be some policy versions old.

Batch b is trained in step b, with weights that then become version b + 1. With lag L its rollouts may begin with
version b - L: at the end of step b - 1 - L. Lag 0 is the synchronous step on two sets of GPUs.

    generate   |--- batch 0 ---|--- batch 1 ---|--- batch 2 ---|          L = 1
    learn                      |-- step 0 --|s |-- step 1 --|s |-- step 2 --|s
    version    0                              1                2               s: weights sent (`prepare`)

*In flight*: engines stop for the transfer of new weights and go on with what they were decoding; requests of several
batches share an engine. *Drained*: a transfer waits until the engines are idle, so batches never mix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from paceline.errors import ConfigError
from paceline.sim.acceptance import Acceptance
from paceline.sim.cost import Cost
from paceline.sim.rollout import Engines, Simulation, simulate_rollout
from paceline.sim.schedule import Schedule
from paceline.sim.step import Stages
from paceline.sim.workload import Requests

Updates = Literal["in_flight", "drained"]
_ROUND = 1e-6
"""Of a mean step: moments that differ by less are the same one."""

Array = np.ndarray


@dataclass(frozen=True, slots=True)
class AsyncRun:
    """Some steps of an asynchronous run. B batches; times in seconds from the start of the first rollout."""

    lag: int
    learn_s: float
    sync_s: float
    released_s: Array
    """[B] when the rollouts of a batch were allowed to begin."""
    done_s: Array
    """[B] when its slowest rollout ended."""
    learned_s: Array
    """[B] when its step of the learner ended."""
    ready_s: Array
    """[B] when the weights that it gave had reached the engines."""
    first_s: Array
    """[B] when its first rollout was admitted."""
    live: tuple[Array, Array]
    """(seconds [J], live sequences of all engines [J]): a step function."""

    @property
    def begun_s(self) -> Array:
        """[B] when its step of the learner began."""
        return np.maximum(self.done_s, np.concatenate([[0.0], self.ready_s[:-1]]))

    @property
    def exposed_s(self) -> Array:
        """[B] how long the learner waited for the rollouts of the batch."""
        return self.begun_s - np.concatenate([[0.0], self.ready_s[:-1]])

    @property
    def period_s(self) -> float:
        """Mean step, when the start has been forgotten."""
        return float(np.mean(np.diff(self.ready_s)[self._settled]))

    @property
    def exposed_generate_s(self) -> float:
        """Mean wait for rollouts per step, over the same steps."""
        return float(np.mean(self.exposed_s[1:][self._settled]))

    @property
    def age(self) -> Array:
        """[B] policy versions between the weights that a batch began with and those that it updates, up to the lag."""
        # What began with a version began when it was ready.
        slack_s = _ROUND * float(np.diff(self.ready_s).mean())
        versions = np.searchsorted(self.ready_s, self.first_s + slack_s, side="right")
        return np.arange(len(self.ready_s)) - versions

    @property
    def mean_age(self) -> float:
        """Mean age of a batch, over the same steps."""
        return float(np.mean(self.age[1:][self._settled]))

    @property
    def _settled(self) -> slice:
        """Whole cycles of lag + 1 batches, as those may end together, from the later half; without the last ones, which
        have the engines to themselves."""
        cycle, end = self.lag + 1, len(self.ready_s) - 1 - self.lag
        count = max(end // 2 // cycle, 1) * cycle
        return slice(max(end - count, 0), max(end, 1))


def simulate_async(
    batches: Sequence[Requests],
    cost: Cost,
    acceptance: Acceptance | None,
    schedule: Schedule | int,
    engines: Engines,
    stages: Stages,
    *,
    lag: int,
    updates: Updates = "in_flight",
) -> AsyncRun:
    """The batches one after another, `engines` generating and a learner taking `stages` per step.

    Raises ConfigError for a negative lag or fewer than two batches.
    """
    if lag < 0:
        raise ConfigError(f"a lag of {lag}: give 0 (synchronous) or more policy versions")
    if len(batches) < 2:
        raise ConfigError("an asynchronous run needs at least two batches to have a period")
    learn_s, sync_s = stages.learn_s, stages.prepare_s
    if updates == "drained" or lag == 0:
        return _drained(batches, cost, acceptance, schedule, engines, learn_s, sync_s, lag)
    return _in_flight(batches, cost, acceptance, schedule, engines, learn_s, sync_s, lag)


def closed_form(generate_s: float, stages: Stages, lag: int) -> tuple[float, float]:
    """(period, exposed generation) of an in-flight run in seconds: the longer of two cycles, and so a bound from below.

    The learner alone; a batch that is generated, stopped by `lag` transfers, and learned, spread over the lag + 1
    under way. That these slow each other down on the same engines is left out.
    """
    cycle_s = generate_s + lag * stages.prepare_s + stages.total_s
    period = max(stages.total_s, cycle_s / (lag + 1))
    return period, period - stages.total_s


def _drained(
    batches: Sequence[Requests],
    cost: Cost,
    acceptance: Acceptance | None,
    schedule: Schedule | int,
    engines: Engines,
    learn_s: float,
    sync_s: float,
    lag: int,
) -> AsyncRun:
    count = len(batches)
    released, done, learned, ready = (np.zeros(count) for _ in range(4))
    curves: list[tuple[Array, Array]] = []
    idle = 0.0  # When the engines have finished everything that they were allowed to begin.
    begun = 0
    for step in range(count):
        # Version `step` is on the engines since ready[step - 1]: batches up to step + lag may run, one after another.
        since = ready[step - 1] if step else 0.0
        while begun < min(step + lag + 1, count):
            rollout = simulate_rollout(batches[begun], cost, acceptance, schedule, engines)
            released[begun] = since
            start = max(since, idle)
            done[begun] = idle = start + rollout.makespan_s
            time_s, live = rollout.active()
            curves.append((time_s + start, live))
            begun += 1
        learned[step] = max(done[step], since) + learn_s
        ready[step] = max(learned[step], idle) + sync_s
    first = np.array([curve[0][0] for curve in curves])
    live = (np.concatenate([curve[0] for curve in curves]), np.concatenate([curve[1] for curve in curves]))
    return AsyncRun(lag, learn_s, sync_s, released, done, learned, ready, first, live)


def _in_flight(
    batches: Sequence[Requests],
    cost: Cost,
    acceptance: Acceptance | None,
    schedule: Schedule | int,
    engines: Engines,
    learn_s: float,
    sync_s: float,
    lag: int,
) -> AsyncRun:
    """One batch after another: what a batch meets until its end has been released by then, because batch b + lag + 1
    waits for the weights that b gives. An engine that is through with batch b stops until that release is known.

    The engines stand still during a transfer, and so does the clock of the simulation: `stops_s` are its readings.
    """
    count = len(batches)
    ends = np.cumsum([len(batch) for batch in batches])
    starts = ends - np.array([len(batch) for batch in batches])
    requests = [batch.released(0.0 if number <= lag else np.inf) for number, batch in enumerate(batches)]
    joined = Requests.concatenate(requests)
    simulation = Simulation(joined, cost, acceptance, schedule, engines, batch=len(batches[0]))
    finish_s, stops_s = np.zeros(count), np.zeros(count)
    for number in range(count):
        simulation.run(ends[number])
        finish_s[number] = simulation.finish_s[starts[number] : ends[number]].max()
        stops_s[number] = max(finish_s[number], stops_s[number - 1] if number else 0.0) + learn_s
        released = number + lag + 1
        if released < count:
            simulation.release(starts[released], ends[released], stops_s[number])
    rollout = simulation.result()

    def wall_s(running_s: Array) -> Array:
        """What ends at a stop ends before it."""
        return running_s + sync_s * np.searchsorted(stops_s, running_s)

    learned = stops_s + sync_s * np.arange(count)
    ready = learned + sync_s
    released_s = np.concatenate([np.zeros(min(lag + 1, count)), ready[: max(count - lag - 1, 0)]])
    # What begins at a stop begins after it.
    admit_s = rollout.admit_s + sync_s * np.searchsorted(stops_s - 1e-9, rollout.admit_s, side="right")
    first = np.minimum.reduceat(admit_s, starts)
    time_s, live = rollout.active()
    curve = (wall_s(time_s), live)
    return AsyncRun(lag, learn_s, sync_s, released_s, wall_s(finish_s), learned, ready, first, curve)


def batches_needed(lag: int) -> int:
    """Batches after which the period of a run is settled: four cycles of those that may be under way together."""
    return 4 * (lag + 1)
