"""The published projections and measurements of arXiv:2604.26779, and what this simulator says for the same points.

Two regimes, and no set of efficiencies meets both. The published 235B projection behaves like a roofline without
software overhead: `figure3_grid` and `figure4_points` run in the ideal mode with no parameter fitted to them, but the
model was refined with these values in sight (16 bits for draft and head, gathered experts, FP8 blocks). The published
8B measurements do not: `fit_eight_b` needs host time per iteration and per draft forward, and a step in cost between
k = 3 and k = 5, and says so by fitting them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np

from paceline.errors import ConfigError
from paceline.sim.acceptance import Acceptance
from paceline.sim.cost import BF16, FP8, Eagle3Drafter, Precision, RooflineCost
from paceline.sim.efficiency import IDEAL, Efficiency
from paceline.sim.figures import Assumption, Origin
from paceline.sim.fit import Fit, Free, fit_efficiency
from paceline.sim.hardware import hardware
from paceline.sim.layout import DENSE_LAYOUTS, PUBLISHED_LAYOUTS, Layout, num_engines
from paceline.sim.lengths import LognormalLengths
from paceline.sim.models import ModelShape, model
from paceline.sim.rollout import Engines, simulate_rollout
from paceline.sim.workload import Requests, make_requests

BATCH_LENGTHS = LognormalLengths(
    8000, 0.8, 32768, Origin("assumed", "the published projection does not state its length distribution")
)
"""Response lengths for the 235B and 8B projections."""

_PAPER = "arXiv:2604.26779"


@functools.cache
def published() -> Mapping[str, Any]:
    """The numbers of the paper; `origin` says which are printed, read from a figure, or computed from printed ones."""
    return json.loads(files("paceline.sim").joinpath("data/published.json").read_text())


@dataclass(frozen=True, slots=True)
class Point:
    """One published speedup of the rollout beside the projected one."""

    model: str
    gpus: int
    layout: str
    k: int
    alpha: float
    rollout: float
    published: float
    step: float | None = None
    """Speedup of the step: Amdahl's rule with the published generation share."""
    published_step: float | None = None

    @property
    def error(self) -> float:
        """Projected / published - 1."""
        return self.rollout / self.published - 1


@dataclass(frozen=True, slots=True)
class Projection:
    """Points that share their assumptions."""

    points: tuple[Point, ...]
    baseline_s: Mapping[str, float]
    """Autoregressive seconds of every layout that was tried: the fastest was taken."""
    assumptions: tuple[Assumption, ...]

    @property
    def largest_error(self) -> float:
        """Largest |projected / published - 1|."""
        return max(abs(point.error) for point in self.points)


def engines_for(cost: RooflineCost, gpus: int, num_requests: int) -> Engines:
    """Engines of `cost.layout` on `gpus` GPUs with a slot for every request and the KV cache that the memory leaves."""
    engines = num_engines(cost.layout, gpus)
    return Engines(engines, -(-num_requests // engines), cost.kv_capacity_tokens())


def layout_seconds(
    requests: Requests,
    shape: ModelShape,
    gpus: int,
    layouts: Sequence[Layout],
    *,
    gpu: str = "gb200",
    precision: Precision = FP8,
    efficiency: Efficiency = IDEAL,
) -> dict[Layout, float]:
    """Autoregressive seconds of each layout that divides the GPUs and holds model and requests, fastest first.

    This is the rule by which a layout is chosen: it never looks at a speedup. Raises ConfigError when none is left.
    """
    seconds = {}
    for layout in layouts:
        try:
            cost = RooflineCost(hardware(gpu), shape, layout, precision, Eagle3Drafter(), efficiency)
            engines = engines_for(cost, gpus, len(requests))
            seconds[layout] = simulate_rollout(requests, cost, None, 0, engines).makespan_s
        except ConfigError:
            continue
    if not seconds:
        raise ConfigError(
            f"no layout of {', '.join(layout.name for layout in layouts)} fits {shape.name} on {gpus} GPUs."
        )
    return dict(sorted(seconds.items(), key=lambda item: item[1]))


def project(
    shape: ModelShape,
    gpus: int,
    cells: Sequence[tuple[int, float]],
    *,
    layouts: Sequence[Layout],
    requests: Requests,
    efficiency: Efficiency = IDEAL,
) -> tuple[dict[tuple[int, float], float], dict[Layout, float], RooflineCost]:
    """Rollout speedups of (k, alpha) cells on the fastest layout; the seconds of all layouts; the cost used."""
    seconds = layout_seconds(requests, shape, gpus, layouts, efficiency=efficiency)
    layout = next(iter(seconds))
    cost = RooflineCost(hardware("gb200"), shape, layout, FP8, Eagle3Drafter(), efficiency)
    engines = engines_for(cost, gpus, len(requests))
    speedups = {}
    for k, alpha in cells:
        acceptance = Acceptance.from_length(alpha, k)
        speedups[k, alpha] = seconds[layout] / simulate_rollout(requests, cost, acceptance, k, engines).makespan_s
    return speedups, seconds, cost


def figure3_grid(seed: int = 0, efficiency: Efficiency = IDEAL) -> Projection:
    """Figure 3: Qwen3-235B-A22B, 512 GB200, FP8, 4,096 rollouts, synchronous; 22 cells of k and alpha."""
    rows = published()["figure3"]
    conditions = published()["figure3_conditions"]
    shape = model("qwen3-235b-a22b")
    requests = make_requests(conditions["rollout_batch"], BATCH_LENGTHS, seed=seed)
    speedups, seconds, cost = project(
        shape,
        conditions["gpus"],
        [(row["k"], row["alpha"]) for row in rows],
        layouts=PUBLISHED_LAYOUTS,
        requests=requests,
        efficiency=efficiency,
    )
    share = published()["derived"]["generation_share"]["figure3"]
    points = tuple(
        Point(
            shape.name,
            conditions["gpus"],
            cost.layout.name,
            row["k"],
            row["alpha"],
            rollout=speedups[row["k"], row["alpha"]],
            published=row["rollout"],
            step=1 / (share / speedups[row["k"], row["alpha"]] + 1 - share),
            published_step=row["e2e"],
        )
        for row in rows
    )
    stated = Assumption("generation_share", share, "published", f"{_PAPER}, from Figure 3: the step is not predicted")
    return Projection(points, _named(seconds), (*_stated(cost, requests, seconds, PUBLISHED_LAYOUTS), stated))


def figure4_points(
    model_name: str, gpus: Sequence[int] = (32, 128, 512, 2048), seed: int = 0, efficiency: Efficiency = IDEAL
) -> tuple[Projection, ...]:
    """Figure 4 at lag 0, k = 5, alpha = 4: one projection per GPU count, for "Qwen3-235B-A22B" or "Qwen3-8B".

    The published values are read from the figure (+-0.02).
    """
    shape = model(model_name.lower())
    layouts = PUBLISHED_LAYOUTS if shape.num_experts else DENSE_LAYOUTS
    requests = make_requests(published()["figure4_conditions"]["rollout_batch"], BATCH_LENGTHS, seed=seed)
    result = []
    for row in published()["figure4"]:
        if row["model"] != model_name or row["lag"] != 0 or row["gpus"] not in gpus:
            continue
        cell = (row["k"], float(row["alpha"]))
        speedups, seconds, cost = project(
            shape, row["gpus"], [cell], layouts=layouts, requests=requests, efficiency=efficiency
        )
        point = Point(
            shape.name, row["gpus"], cost.layout.name, *cell, rollout=speedups[cell], published=row["rollout"]
        )
        result.append(Projection((point,), _named(seconds), _stated(cost, requests, seconds, layouts)))
    return tuple(result)


@dataclass(frozen=True, slots=True)
class EightB:
    """One of the published 8B runs, with the workload that is assumed for it: the paper states none."""

    name: str
    lengths: LognormalLengths


_WORKLOAD = Origin("assumed", "the paper states no batch, lengths, cap or layout for its 8B runs")
EIGHT_B = (
    EightB("rl_zero", LognormalLengths(2500, 1.0, 16384, _WORKLOAD)),
    EightB("rl_think", LognormalLengths(9000, 0.6, 16384, _WORKLOAD)),
)
EIGHT_B_KS = (0, 3, 5, 7)
_ROLLOUTS = 1024
_BATCHES = 4
_GPUS = 32

EIGHT_B_STRUCTURE = IDEAL.replace(Origin("assumed", "chosen among structures on the same eight points"), tile_rows=16)
"""A verify step reads the KV cache again for every 16 query rows: the cost step between k = 3 and k = 5."""

EIGHT_B_FREE = (
    Free("host_s", prior=0.0, sigma=5e-3, low=0.0, high=0.05),
    Free("host_draft_s", prior=0.0, sigma=5e-3, low=0.0, high=0.05),
    Free("kv_reread", prior=0.0, sigma=10.0, low=0.0, high=50.0),
)


def eight_b_measured_s(run: str, k: int) -> float:
    """Published generation seconds per step; those of k = 5 and 7 follow from the printed ratios."""
    tables = published()
    if k == 0:
        return tables["table1"][run]["ar"]["generation"]
    if k == 3:
        return tables["table1"][run]["spec"]["generation"]
    (row,) = (row for row in tables["table4_length"]["rows"] if row["k"] == k)
    return tables["table1"][run]["ar"]["generation"] / row[run]["gen_speedup"]


def eight_b_acceptance(run: str, k: int) -> Acceptance:
    """With the published acceptance length at that k."""
    (row,) = (row for row in published()["table4_length"]["rows"] if row["k"] == k)
    return Acceptance.from_length(row[run]["tau"], k, origin=Origin("published", f"{_PAPER}, Table 4, k = {k}"))


def eight_b_seconds(efficiency: Efficiency, points: Sequence[tuple[str, int]], *, seed: int = 0) -> np.ndarray:
    """[M] projected generation seconds of (run, k) points: Qwen3-8B in bf16, one GB200 per engine, 32 engines.

    The published seconds are means over hundreds of steps, and the longest response of one batch is a matter of luck:
    four batches run side by side on engines of their own, and their makespans are averaged.
    """
    cost = RooflineCost(hardware("gb200"), model("qwen3-8b"), Layout(1, 1), BF16, Eagle3Drafter(), efficiency)
    slots = _ROLLOUTS // _GPUS
    engines = Engines(_GPUS * _BATCHES, slots, cost.kv_capacity_tokens())
    result = []
    for run, k in points:
        acceptance = eight_b_acceptance(run, k) if k else None
        rollout = simulate_rollout(_eight_b_requests(run, seed), cost, acceptance, k, engines)
        result.append(rollout.engine_finish_s.reshape(_BATCHES, _GPUS).max(axis=1).mean())
    return np.array(result)


def fit_eight_b(
    points: Sequence[tuple[str, int]] | None = None,
    start: Efficiency = EIGHT_B_STRUCTURE,
    free: Sequence[Free] = EIGHT_B_FREE,
) -> Fit:
    """Fit host time per iteration, per draft forward and the KV re-read to (run, k) points; all eight if None."""
    points = _eight_b_points() if points is None else points
    observed = np.array([eight_b_measured_s(run, k) for run, k in points])
    return fit_efficiency(
        lambda efficiency: eight_b_seconds(efficiency, points),
        observed,
        start,
        free,
        source=f"published seconds of the 8B runs of {_PAPER}",
    )


@dataclass(frozen=True, slots=True)
class HoldOut:
    """A fit to some points and its errors on the others."""

    held_out: str
    fit_rms: float
    errors: Mapping[tuple[str, int], float]
    """{(run, k): predicted / published - 1} of the points that were not fitted."""

    @property
    def largest_error(self) -> float:
        """Largest |error|."""
        return max(abs(error) for error in self.errors.values())


def hold_out_eight_b(held_out: str) -> HoldOut:
    """Leave out "rl_zero", "rl_think", "k=5", "k=7" or "k>=5", fit the rest, predict what was left out."""
    choices = {
        "rl_zero": lambda run, k: run == "rl_zero",
        "rl_think": lambda run, k: run == "rl_think",
        "k=5": lambda run, k: k == 5,
        "k=7": lambda run, k: k == 7,
        "k>=5": lambda run, k: k >= 5,
    }
    if held_out not in choices:
        raise ConfigError(f"hold out {held_out!r}: choose one of {', '.join(choices)}.")
    left_out = [point for point in _eight_b_points() if choices[held_out](*point)]
    fit = fit_eight_b([point for point in _eight_b_points() if point not in left_out])
    predicted = eight_b_seconds(fit.efficiency, left_out)
    errors = {
        point: float(seconds / eight_b_measured_s(*point) - 1)
        for point, seconds in zip(left_out, predicted, strict=True)
    }
    return HoldOut(held_out, fit.rms, errors)


def _eight_b_points() -> list[tuple[str, int]]:
    return [(run.name, k) for run in EIGHT_B for k in EIGHT_B_KS]


@functools.cache
def _eight_b_requests(run: str, seed: int) -> Requests:
    (found,) = (item for item in EIGHT_B if item.name == run)
    return make_requests(_ROLLOUTS * _BATCHES, found.lengths, seed=seed)


def _named(seconds: Mapping[Layout, float]) -> dict[str, float]:
    return {layout.name: value for layout, value in seconds.items()}


def _stated(
    cost: RooflineCost, requests: Requests, seconds: Mapping[Layout, float], layouts: Sequence[Layout]
) -> tuple[Assumption, ...]:
    refused = [layout.name for layout in layouts if layout not in seconds]
    return (
        *cost.assumptions(),
        Assumption("layout.rule", "fastest autoregressive rollout", "assumed", "fixed before any comparison"),
        Assumption("layout.refused", refused, "published", "does not divide, does not fit, or vLLM 0.32 refuses it"),
        *requests.assumptions(),
    )
