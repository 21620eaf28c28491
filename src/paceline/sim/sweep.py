"""Many scenarios: a grid over some inputs, and what each input is worth.

A rollout without speculation is simulated once for all points that share it, so a heat map over k and alpha costs one
rollout per cell.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.errors import ConfigError
from paceline.sim.acceptance import Acceptance
from paceline.sim.asynchronous import Updates
from paceline.sim.efficiency import Efficiency
from paceline.sim.figures import Origin
from paceline.sim.lengths import LognormalLengths
from paceline.sim.project import baseline, project_async, speculative
from paceline.sim.scenario import Draft, Mode, Scenario
from paceline.sim.step import Stages, step_speedup, synchronous

AXES = ("k", "alpha", "gpus", "rollouts", "mean_length", "sigma", "max_num_seqs", "lag", "model", "hardware", "layout")
"""Inputs that a grid can go over."""

_OFF = {"k", "alpha"}
"""Axes that a rollout without speculation does not depend on."""


_OF_MODELLED = {"gpus", "model", "hardware", "layout"}
"""Axes that a measured engine does not depend on."""


@dataclass(frozen=True, slots=True)
class Point:
    """One point of a grid; times are None where it cannot exist (alpha above k + 1)."""

    at: Mapping[str, object]
    """Axis -> value."""
    none_s: float | None = None
    """Rollout without speculation."""
    spec_s: float | None = None
    rollout_speedup: float | None = None
    step_speedup: float | None = None
    """None without the other stages."""


def sweep(
    scenario: Scenario,
    mode: Mode,
    axes: Mapping[str, Sequence[object]],
    *,
    stages: Stages | None = None,
    generation_share: float | None = None,
    updates: Updates = "in_flight",
) -> list[Point]:
    """All combinations, the last axis running fastest.

    The step comes from `stages`, or from a `generation_share` (fraction of a step without speculation). With an axis
    `lag`, a rollout is the generation of one batch in a run whose learner takes `stages`, no time by default: what the
    engines can deliver. Raises ConfigError for an unknown axis.
    """
    unknown = sorted(set(axes) - set(AXES))
    if unknown:
        raise ConfigError(f"a sweep cannot go over {', '.join(unknown)}: it knows {', '.join(AXES)}")
    fixed = _OF_MODELLED & set(axes)
    if fixed and scenario.measured(mode):
        raise ConfigError(f"--over {min(fixed)} has no effect on the engine of --profile. Leave one of the two out")
    plain: dict[tuple[object, ...], float] = {}
    points = []
    for values in itertools.product(*axes.values()):
        at = dict(zip(axes, values, strict=True))
        there = at_point(scenario, at)
        if there is None:
            points.append(Point(at))
            continue
        key = tuple(value for name, value in at.items() if name not in _OFF)
        if "lag" in at:
            pair = project_async(there, mode, stages or Stages(), int(str(at["lag"])), updates)
            none_s, spec_s = pair.none.period_s, pair.spec.period_s
            points.append(Point(at, none_s, spec_s, none_s / spec_s, none_s / spec_s if stages else None))
            continue
        if key not in plain:
            plain[key] = baseline(there, mode).makespan_s
        none_s, spec_s = plain[key], speculative(there, mode).makespan_s
        points.append(Point(at, none_s, spec_s, none_s / spec_s, _step(none_s, spec_s, stages, generation_share)))
    return points


def at_point(scenario: Scenario, at: Mapping[str, object]) -> Scenario | None:
    """The scenario of a point; None when alpha cannot be reached with k."""
    changes: dict[str, object] = {name: at[name] for name in ("model", "hardware", "layout") if name in at}
    changes |= {name: int(str(at[name])) for name in ("gpus", "rollouts", "max_num_seqs") if name in at}
    if "mean_length" in at or "sigma" in at:
        changes["lengths"] = _lengths(scenario, at)
    if "k" in at or "alpha" in at:
        draft = _draft(scenario.draft, at)
        if draft is None:
            return None
        changes["draft"] = draft
    return scenario.replace(**changes)


def _draft(draft: Draft, at: Mapping[str, object]) -> Draft | None:
    if draft.method == "none":
        raise ConfigError("a grid over k or alpha needs a draft: --draft METHOD@K:ALPHA, for example eagle3@3:3.0")
    k = int(str(at.get("k", draft.k)))
    if "alpha" not in at:
        return replace(draft, k=k)
    alpha = float(str(at["alpha"]))
    if not 1.0 <= alpha <= k + 1:
        return None
    spread = 0.0 if draft.acceptance is None else draft.acceptance.spread
    origin = Origin("assumed", "a point of the grid")
    return replace(draft, k=k, acceptance=Acceptance.from_length(alpha, k, spread=spread, origin=origin))


def _lengths(scenario: Scenario, at: Mapping[str, object]) -> LognormalLengths:
    if not isinstance(scenario.lengths, LognormalLengths):
        raise ConfigError("mean_length and sigma belong to a lognormal: leave the trace of lengths out to go over them")
    mean = float(str(at.get("mean_length", scenario.lengths.mean)))
    return replace(scenario.lengths, mean=mean, sigma=float(str(at.get("sigma", scenario.lengths.sigma))))


def _step(none_s: float, spec_s: float, stages: Stages | None, share: float | None) -> float | None:
    if stages is not None:
        return synchronous(stages, none_s).step_s / synchronous(stages, spec_s).step_s
    return None if share is None else step_speedup(share, none_s / spec_s)


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """What one input does to the rollout speedup. Example: `Sensitivity("host_draft_s", 1.9, 1.6)`."""

    name: str
    low: float
    """Speedup with the input lowered."""
    high: float
    """Speedup with the input raised."""

    @property
    def swing(self) -> float:
        return abs(self.high - self.low)


def sensitivities(scenario: Scenario, mode: Mode, change: float = 0.2) -> list[Sensitivity]:
    """Rollout speedup with every input lowered and raised by `change` (fraction), the largest swing first.

    Accepted drafts per verify step (alpha - 1) stand for the acceptance, kept below k. Shares of a peak stop at 1.
    Inputs that are zero are left out: a fraction of nothing is nothing.
    """
    found = []
    for name, varied in _inputs(scenario, mode).items():
        low, high = (_speedup(varied(factor), mode) for factor in (1.0 - change, 1.0 + change))
        found.append(Sensitivity(name, low, high))
    return sorted(found, key=lambda one: -one.swing)


def _speedup(scenario: Scenario, mode: Mode) -> float:
    return baseline(scenario, mode).makespan_s / speculative(scenario, mode).makespan_s


def _inputs(scenario: Scenario, mode: Mode) -> dict[str, Callable[[float], Scenario]]:
    """Name -> the scenario with that input multiplied by a factor."""
    inputs: dict[str, Callable[[float], Scenario]] = {}
    draft = scenario.draft
    if draft.acceptance is not None:
        alpha = float(draft.acceptance.tokens(draft.k))

        def accepted(factor: float) -> Scenario:
            target = min(1.0 + (alpha - 1.0) * factor, draft.k + 1.0)
            changed = _draft(draft, {"alpha": target})
            assert changed is not None
            return scenario.replace(draft=changed)

        inputs["accepted per step"] = accepted
    group = scenario.group_size
    inputs["rollouts"] = lambda factor: scenario.replace(
        rollouts=max(round(scenario.rollouts * factor / group), 1) * group
    )
    lengths = scenario.lengths
    if isinstance(lengths, LognormalLengths):
        inputs["mean length"] = lambda factor: scenario.replace(lengths=replace(lengths, mean=lengths.mean * factor))
        if lengths.sigma > 0:
            inputs["spread of lengths"] = lambda factor: scenario.replace(
                lengths=replace(lengths, sigma=lengths.sigma * factor)
            )
    if mode == "calibrated" and not scenario.measured(mode):
        for name in ("bandwidth_share", "flops_share", "op_s", "host_s", "host_draft_s", "host_spec_s", "kv_reread"):
            if getattr(scenario.efficiency, name) > 0:
                inputs[name] = _efficiency_input(scenario, name)
    return inputs


def _efficiency_input(scenario: Scenario, name: str) -> Callable[[float], Scenario]:
    def varied(factor: float) -> Scenario:
        efficiency: Efficiency = scenario.efficiency
        value = getattr(efficiency, name) * factor
        value = min(value, 1.0) if name.endswith("_share") else value
        return scenario.replace(efficiency=efficiency.replace(Origin("assumed", "varied"), **{name: value}))

    return varied
