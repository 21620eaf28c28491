"""Projections: rollout, step and asynchronous run of a scenario, without speculation and with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.errors import ConfigError
from paceline.sim.asynchronous import AsyncRun, Updates, batches_needed, simulate_async
from paceline.sim.figures import Assumption
from paceline.sim.layout import DENSE_LAYOUTS, PUBLISHED_LAYOUTS
from paceline.sim.rollout import Rollout, check_capacity, simulate_rollout
from paceline.sim.scenario import Mode, Scenario, find_hardware, find_model
from paceline.sim.schedule import Schedule
from paceline.sim.step import Stages, StepTimes, modelled, synchronous


@dataclass(frozen=True, slots=True)
class RolloutPair:
    """The same requests without speculation and with it."""

    none: Rollout
    spec: Rollout

    @property
    def speedup(self) -> float:
        """Of the rollout: seconds without speculation / seconds with it."""
        return self.none.makespan_s / self.spec.makespan_s


@dataclass(frozen=True, slots=True)
class StepPair:
    """A synchronous step without speculation and with it."""

    rollout: RolloutPair
    none: StepTimes
    spec: StepTimes

    @property
    def speedup(self) -> float:
        """Of the step."""
        return self.none.step_s / self.spec.step_s


@dataclass(frozen=True, slots=True)
class AsyncPair:
    """An asynchronous run without speculation and with it."""

    none: AsyncRun
    spec: AsyncRun

    @property
    def speedup(self) -> float:
        """Of the step: ratio of the periods."""
        return self.none.period_s / self.spec.period_s


def baseline(scenario: Scenario, mode: Mode) -> Rollout:
    """The rollout without speculation."""
    return simulate_rollout(scenario.requests(), scenario.cost(mode), None, 0, scenario.engines_of(mode))


def speculative(scenario: Scenario, mode: Mode, schedule: Schedule | int | None = None) -> Rollout:
    """The rollout with the scenario's draft; `schedule` instead of its k."""
    draft = scenario.draft
    chosen = draft.k if schedule is None else schedule
    return simulate_rollout(
        scenario.requests(), scenario.cost(mode), draft.acceptance, chosen, scenario.engines_of(mode)
    )


def project_rollout(scenario: Scenario, mode: Mode) -> RolloutPair:
    """Both rollouts. Raises ConfigError for a scenario that cannot run."""
    return RolloutPair(baseline(scenario, mode), speculative(scenario, mode))


def default_stages(scenario: Scenario, mode: Mode, gpus: int, transport_bytes_per_s: float | None = None) -> Stages:
    """The other stages from FLOP and bytes, on `gpus` GPUs. Raises ConfigError for a measured engine."""
    if scenario.measured(mode):
        raise ConfigError(
            "a calibration profile holds costs of generation only: give the other stages with --stages or --run"
        )
    shape, machine = find_model(scenario.model), find_hardware(scenario.hardware)
    cost = scenario.roofline(scenario.efficiency)
    return modelled(
        scenario.requests(),
        shape,
        machine,
        scenario.efficiency,
        gpus,
        weight_bytes=shape.parameters * cost.precision.weight_bytes,
        transport_bytes_per_s=transport_bytes_per_s,
    )


def project_step(scenario: Scenario, mode: Mode, stages: Stages, spec_stages: Stages | None = None) -> StepPair:
    """Both synchronous steps; `spec_stages` where speculation changes the other stages too (an online draft)."""
    rollout = project_rollout(scenario, mode)
    return StepPair(
        rollout,
        synchronous(stages, rollout.none),
        synchronous(stages if spec_stages is None else spec_stages, rollout.spec),
    )


def project_async(
    scenario: Scenario,
    mode: Mode,
    stages: Stages,
    lag: int,
    updates: Updates = "in_flight",
    spec_stages: Stages | None = None,
    num_batches: int | None = None,
) -> AsyncPair:
    """Both runs. `scenario.gpus` generate; `stages` are those of the GPUs that train."""
    count = num_batches or batches_needed(lag)
    batches = [scenario.requests(seed=scenario.seed + index) for index in range(count)]
    cost, engines, draft = scenario.cost(mode), scenario.engines_of(mode), scenario.draft
    return AsyncPair(
        simulate_async(batches, cost, None, 0, engines, stages, lag=lag, updates=updates),
        simulate_async(
            batches, cost, draft.acceptance, draft.k, engines, spec_stages or stages, lag=lag, updates=updates
        ),
    )


def step_assumptions(scenario: Scenario, mode: Mode, stages: Stages) -> list[Assumption]:
    """What a step in this mode rests on."""
    return [*scenario.assumptions(mode), *stages.assumptions()]


def fastest_layout(scenario: Scenario) -> str:
    """The layout whose rollout without speculation is the fastest in the ideal mode, of a fixed list.

    It never looks at a speedup, which would find the layout that flatters speculation. Raises ConfigError when none
    fits.
    """
    seconds = {name: baseline(one, "ideal").makespan_s for name, one in _fitting(scenario)}
    return min(seconds, key=lambda name: seconds[name])


def smallest_layout(scenario: Scenario) -> str:
    """The first of the same list on which policy and requests fit. Raises ConfigError when none does."""
    return next(name for name, _ in _fitting(scenario))


def _fitting(scenario: Scenario) -> Iterator[tuple[str, Scenario]]:
    # Made here, not in the loop: what is wrong with them is wrong with no layout.
    requests = scenario.requests()
    found, reasons = False, []
    for layout in PUBLISHED_LAYOUTS if find_model(scenario.model).num_experts else DENSE_LAYOUTS:
        there = scenario.replace(layout=layout.name)
        try:
            check_capacity(requests, there.engines_of("ideal"), there.draft.k)
        except ConfigError as error:
            reasons.append(f"{layout.name}: {error}")
            continue
        found = True
        yield layout.name, there
    if not found:
        raise ConfigError(f"no layout fits. {' '.join(reasons)}")
