"""What to choose: method and k by live batch, k for a whole rollout, GPUs for generation and for training.

A verify step with k drafts costs c(k) = tau(n, k) / tau(n, 0) plain decode steps and commits alpha(k) tokens, so it
pays where alpha(k) > c(k): c(k) is the break-even acceptance length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq

from paceline.errors import ConfigError
from paceline.sim.acceptance import Acceptance
from paceline.sim.asynchronous import Updates
from paceline.sim.cost import Cost
from paceline.sim.project import baseline, project_async, speculative
from paceline.sim.rollout import simulate_rollout
from paceline.sim.scenario import Draft, Mode, Scenario, parse_layout
from paceline.sim.schedule import TableSchedule, best_schedule
from paceline.sim.step import Stages

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LENGTHS = (1, 2, 3, 4, 5, 6, 7)
"""Draft lengths that are tried."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One k at one batch. Example: `Cell("eagle3", 16, 3, cost_ratio=1.4, alpha=2.9)`."""

    method: str
    live: int
    """Sequences that one engine decodes together."""
    k: int
    cost_ratio: float
    """c(k): seconds of a verify step over those of a plain step at the same batch. The break-even acceptance length."""
    alpha: float
    """Tokens that a verify step is expected to commit."""

    @property
    def gain(self) -> float:
        """Speed relative to no speculation at this batch."""
        return self.alpha / self.cost_ratio


def cells(
    cost: Cost,
    method: str,
    acceptance: Acceptance,
    live: Sequence[int] = BATCHES,
    ks: Sequence[int] = LENGTHS,
    *,
    context: float,
) -> list[Cell]:
    """Every k at every batch, sequences holding `context` tokens each."""
    batch = np.asarray(live)
    plain_s = cost.iteration_s(batch, batch * context, np.zeros_like(batch))
    table = []
    for k in ks:
        ratio = cost.iteration_s(batch, batch * context, np.full_like(batch, k)) / plain_s
        alpha = float(acceptance.tokens(k))
        table += [Cell(method, int(n), k, float(c), alpha) for n, c in zip(batch, ratio, strict=True)]
    return table


def best_by_batch(table: Sequence[Cell]) -> dict[int, Cell | None]:
    """Batch -> the fastest cell; None where no speculation is as fast."""
    best: dict[int, Cell | None] = {cell.live: None for cell in table}
    for cell in sorted(table, key=lambda cell: cell.k):
        rival = best[cell.live]
        if cell.gain > 1.0 and (rival is None or cell.gain > rival.gain):
            best[cell.live] = cell
    return best


@dataclass(frozen=True, slots=True)
class LengthChoice:
    """A k for the whole rollout, or k by live batch."""

    k: int | None
    """None: by live batch."""
    rollout_s: float
    speedup: float
    """Of the rollout, over no speculation."""


def rollouts_by_k(scenario: Scenario, mode: Mode, ks: Sequence[int]) -> list[LengthChoice]:
    """The rollout with each fixed k, 0 first, and with the best k at every batch last."""
    acceptance = _acceptance(scenario)
    plain_s = baseline(scenario, mode).makespan_s
    choices = [LengthChoice(0, plain_s, 1.0)]
    for k in ks:
        seconds = speculative(scenario, mode, k).makespan_s
        choices.append(LengthChoice(k, seconds, plain_s / seconds))
    schedule = schedule_of(scenario, mode, acceptance, ks)
    seconds = speculative(scenario, mode, schedule).makespan_s
    return [*choices, LengthChoice(None, seconds, plain_s / seconds)]


def schedule_of(scenario: Scenario, mode: Mode, acceptance: Acceptance, ks: Sequence[int]) -> TableSchedule:
    """The best k at every batch up to the engine's limit, sequences being half grown."""
    requests, engines = scenario.requests(), scenario.engines_of(mode)
    context = float(np.mean(requests.lengths)) / 2 + float(np.mean(requests.prompts))
    slots = min(engines.slots, len(requests))
    table = best_schedule(scenario.cost(mode), acceptance, [0, *ks], slots, context).table
    return TableSchedule(tuple(table) + (table[-1],) * (engines.slots - slots))


def break_even(scenario: Scenario, mode: Mode, k: int) -> float | None:
    """Acceptance length at which the whole rollout is as fast as without speculation; None when k + 1 is too little.

    Found by bisection: a rollout is the faster the more is accepted.
    """
    requests, cost, engines = scenario.requests(), scenario.cost(mode), scenario.engines_of(mode)
    plain_s = simulate_rollout(requests, cost, None, 0, engines).makespan_s

    def excess(alpha: float) -> float:
        acceptance = Acceptance.from_length(alpha, k)
        return simulate_rollout(requests, cost, acceptance, k, engines).makespan_s - plain_s

    if excess(k + 1.0) > 0:
        return None
    if excess(1.0) <= 0:
        return 1.0
    root = brentq(excess, 1.0, k + 1.0, xtol=1e-3)
    assert isinstance(root, float)
    return root


@dataclass(frozen=True, slots=True)
class Split:
    """GPUs of an asynchronous run."""

    generation_gpus: int
    training_gpus: int
    none_s: float
    """Step without speculation."""
    spec_s: float
    """Step with it."""
    exposed_generate_s: float
    """Of the step with speculation."""


def splits(
    scenario: Scenario,
    mode: Mode,
    total_gpus: int,
    stages: Stages,
    stages_gpus: int,
    lag: int,
    updates: Updates = "in_flight",
    limit: int = 8,
) -> list[Split]:
    """Steps of at most `limit` ways to divide `total_gpus`, few generation GPUs first.

    `stages` are those of `stages_gpus` training GPUs; logprob and train go with one over their number (assumed).
    """
    if stages_gpus < 1:
        raise ConfigError(f"stages of {stages_gpus} training GPUs: give 1 or more (--training-gpus)")
    unit = parse_layout(scenario.layout).engine_gpus
    whole = total_gpus // unit
    if whole < 2:
        raise ConfigError(
            f"{total_gpus} GPUs are too few to divide: an engine takes {unit}, and training needs some too"
        )
    numbers = sorted({round(part) for part in np.linspace(1, whole - 1, min(limit, whole - 1))})
    found = []
    for number in numbers:
        training = total_gpus - number * unit
        scaled = stages.scaled(stages_gpus / training, f"{stages_gpus} GPUs scaled to {training}, perfectly")
        pair = project_async(scenario.replace(gpus=number * unit), mode, scaled, lag, updates)
        found.append(
            Split(number * unit, training, pair.none.period_s, pair.spec.period_s, pair.spec.exposed_generate_s)
        )
    return found


def compare(scenario: Scenario, mode: Mode, drafts: Sequence[Draft]) -> Mapping[str, LengthChoice]:
    """Draft -> its rollout, on the same requests; `none` comes first."""
    plain_s = baseline(scenario, mode).makespan_s
    choices = {"none": LengthChoice(0, plain_s, 1.0)}
    for draft in drafts:
        if draft.method != "none":
            seconds = speculative(scenario.replace(draft=draft), mode).makespan_s
            choices[draft.name] = LengthChoice(draft.k, seconds, plain_s / seconds)
    return choices


def _acceptance(scenario: Scenario) -> Acceptance:
    if scenario.draft.acceptance is None:
        raise ConfigError("to choose k the acceptance of a draft is needed: --draft eagle3@3:3.32")
    return scenario.draft.acceptance
