"""Measure what an engine step costs: tau(n, k) for the recipe's own engine, policy, draft, machine and threads.

A step is timed, not a token: a step with drafts commits a random number of tokens. All of it happens in one live
engine, and k changes within every generate call, so that a slow minute of the machine falls on all k alike. k is held
for a few steps, and those in which it changes are left out.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import nnls

from paceline.config.run import Recipe
from paceline.drafts.profile import (
    CalibrationPoint,
    CalibrationProfile,
    Clock,
    PromptPoint,
    StepCosts,
    model_seconds,
    step_terms,
)
from paceline.engine.base import EngineStep, RolloutEngine
from paceline.errors import ConfigError, EngineError
from paceline.loop.length import run_setting
from paceline.loop.parts import Parts
from paceline.loop.seeds import request_seed
from paceline.types import Completion, Prompt, Request, Sampling

CALIBRATE_STEP = -5
"""Stands for the step in the seeds of what is sampled here."""
STEPS_PER_K = 4
"""Engine steps in a row with the same k; see `settled` for which of them count."""
MAX_TOKENS = 256
"""Longest response that is generated for a measurement."""
PROMPT_REPEATS = 3
"""Steps that read prompts, per number of prompts."""
MIN_REPEATS = 4
"""Steps of a cell below which its median says little."""
MAX_SPREAD = 0.25
"""Interquartile range over median of the steps of a cell, median over the cells, above which nothing is written. Steps
of one cell differ by a few per cent on a quiet machine."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """One measured engine step. Example: `StepTime(16, 3, 41.5, 0.0127, 0.0251)`."""

    n: int
    k: int
    context: float
    """Mean length of the sequences, tokens."""
    seconds: float
    cpu_seconds: float


def calibrate(
    recipe: Recipe,
    parts: Parts,
    *,
    budget_s: float = 90.0,
    clock: Clock = "wall",
    max_spread: float = MAX_SPREAD,
    on_round: Callable[[int, float], None] = lambda done, spent_s: None,
) -> CalibrationProfile:
    """Measure until the budget is used up, and fit. `on_round` hears the rounds done and the seconds they took.

    At least two rounds over all n are made, whatever the budget. Raises `ConfigError` for an engine without drafts or
    responses too short to measure, and `EngineError` when the machine is too busy for the figures to mean anything.
    """
    engine = parts.engine
    longest = engine.num_draft_tokens
    if longest == 0:
        raise ConfigError(
            f'draft.method is "{recipe.draft.method}" with num_draft_tokens 0: there is no k to choose. Set both.'
        )
    max_tokens = min(parts.sampling.max_tokens - longest, MAX_TOKENS)
    if max_tokens < STEPS_PER_K * (longest + 1):
        raise ConfigError(
            f"sampling.max_tokens -> is {parts.sampling.max_tokens}: responses end before every k up to {longest} had "
            f"its steps. Set it to {STEPS_PER_K * (longest + 1) + longest} or more, or lower draft.num_draft_tokens"
        )
    parts.publish()
    # A response that ends takes its sequence out of the batch; here all of them run to the same length.
    sampling = replace(parts.sampling, max_tokens=max_tokens, stop_token_ids=())
    prompts = parts.prompts.next(batch_sizes(recipe.engine.max_num_seqs)[-1])
    if parts.history is not None:
        # What is made up here has no history, and every sequence must pay for the drafts asked for.
        parts.history.fill = True
    try:
        times = _measure(engine, prompts, sampling, recipe, budget_s, on_round)
        prompt_steps = measure_prompts(parts, prompts, recipe)
    finally:
        if parts.history is not None:
            parts.history.fill = False
    points = grid_points(times, max_tokens / 2, clock)
    check_spread(points, max_spread, clock)
    parameters = fit(points, clock)
    setting = run_setting(recipe, parts)
    return CalibrationProfile(
        machine=dict(setting.machine),
        versions=dict(setting.versions),
        engine=dict(setting.engine),
        policy=dict(setting.policy),
        draft=dict(setting.draft),
        threads=setting.threads,
        clock=clock,
        points=tuple(points),
        prompts=tuple(prompt_steps),
        parameters=parameters,
        residuals=_errors([_model_error(parameters, point, clock) for point in points]),
        held_out=held_out(points, clock),
    )


def batch_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, ... and `max_num_seqs` itself."""
    return sorted({*(2**power for power in range(max_num_seqs.bit_length())), max_num_seqs})


def lengths_in_turn(longest: int, rng: random.Random) -> Iterator[int]:
    """k for step after step: all of 0..longest in a new order each time, each for `STEPS_PER_K` steps."""
    while True:
        for k in rng.sample(range(longest + 1), longest + 1):
            yield from [k] * STEPS_PER_K


def settled(asked: Sequence[int]) -> list[bool]:
    """Which steps of a call say what their k costs, from the k of the drafts that each verified.

    The first two steps read prompts. After a change the drafter reads what another k committed. And before one a step
    without drafts is no plain one: it prepares the drafts that follow, at the price of a step that speculates.
    """
    return [
        index >= 2 and k == asked[index - 1] and (k > 0 or asked[index + 1 : index + 2] == [0])
        for index, k in enumerate(asked)
    ]


def grid_points(times: Sequence[StepTime], middle: float, clock: Clock = "wall") -> list[CalibrationPoint]:
    """Medians by n, k and whether the sequences are in the first or the second half of their responses.

    `middle` is counted in response tokens beyond the shortest context of the same n. Where some k has fewer than
    `MIN_REPEATS` steps in a half, the halves of that n are one; an n that has too few even so is left out. Raises
    `EngineError` when nothing is left.
    """
    points: list[CalibrationPoint] = []
    longest = max((step.k for step in times), default=0)
    for n in sorted({step.n for step in times}):
        steps = [step for step in times if step.n == n]
        border = min(step.context for step in steps) + middle
        halves = [[s for s in steps if s.context < border], [s for s in steps if s.context >= border]]
        parts = halves if all(_enough(half, longest) for half in halves) else [steps]
        for part in parts:
            if _enough(part, longest):
                # One context for all k of a part: they differ by chance only, and are compared with each other.
                context = statistics.fmean(s.context for s in part)
                points += [_point(n, k, context, [s for s in part if s.k == k], clock) for k in range(longest + 1)]
    if not points:
        raise EngineError(
            f"{len(times)} engine steps were timed, too few for any batch size: raise --seconds or sampling.max_tokens."
        )
    return points


def check_spread(points: Sequence[CalibrationPoint], max_spread: float, clock: Clock) -> None:
    """Raises `EngineError` when the steps of the cells differ by more than they do on a quiet machine."""
    spread = statistics.median(point.spread for point in points)
    if spread > max_spread:
        other = ", or measure processor time with --clock cpu, which other processes disturb less"
        raise EngineError(
            f"The machine is too busy to measure: steps of the same kind differ by {spread:.0%} (interquartile range "
            f"over median; the limit is {max_spread:.0%}). Nothing was written. Stop what else is running"
            f"{other if clock == 'wall' else ''}."
        )


def fit(points: Sequence[CalibrationPoint], clock: Clock) -> dict[str, float]:
    """Seconds per unit of each term of `step_terms`: non-negative least squares of the relative errors."""
    rows = [step_terms(point.n, point.k, point.context) for point in points]
    matrix = np.array([list(row.values()) for row in rows]) / np.array([[_seconds(p, clock)] for p in points])
    solution, _ = nnls(matrix, np.ones(len(points)))
    return dict(zip(rows[0], solution.tolist(), strict=True))


def held_out(points: Sequence[CalibrationPoint], clock: Clock) -> dict[str, Any]:
    """One n and one k in the middle of the grid, predicted from the others: by the model, and n by the table as well.

    Empty for a grid without a middle.
    """
    live, lengths = sorted({point.n for point in points}), sorted({point.k for point in points})
    if len(live) < 3 or len(lengths) < 3:
        return {}
    n, k = live[len(live) // 2], lengths[len(lengths) // 2]
    kept = [point for point in points if point.n != n and point.k != k]
    parameters = fit(kept, clock)
    costs = StepCosts.from_points([point for point in points if point.n != n], clock)
    measured = StepCosts.from_points([point for point in points if point.n == n], clock)
    return {
        "n": n,
        "k": k,
        "model": _errors([_model_error(parameters, point, clock) for point in points if point not in kept]),
        "table": _errors([abs(costs(n, length) / measured(n, length) - 1) for length in lengths]),
    }


def measure_prompts(parts: Parts, prompts: Sequence[Prompt], recipe: Recipe) -> list[PromptPoint]:
    """The step that reads one prompt, and the one that reads all of them: responses of one token.

    A publish stands before each, as in a run: it empties the prefix cache. Nothing is drafted behind the step, but a
    draft that reads the policy's states reads the prompts, too; an engine without speculation is that much faster.
    """
    engine, sampling = parts.engine, replace(parts.sampling, max_tokens=1, stop_token_ids=())
    points = []
    engine.choose_drafts(lambda live: 0)
    try:
        for n in sorted({1, len(prompts)}):
            steps: list[EngineStep] = []
            for attempt in range(PROMPT_REPEATS):
                parts.publish()
                steps += engine.generate(_requests(prompts[:n], recipe, attempt), sampling).steps
            points.append(
                PromptPoint(
                    n=n,
                    tokens=statistics.fmean(len(prompt.token_ids) for prompt in prompts[:n]),
                    seconds=statistics.median(step.seconds for step in steps),
                    cpu_seconds=statistics.median(step.cpu_seconds for step in steps),
                    repeats=len(steps),
                )
            )
    finally:
        engine.choose_drafts(None)
    return points


def _measure(
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    recipe: Recipe,
    budget_s: float,
    on_round: Callable[[int, float], None],
) -> list[StepTime]:
    """Rounds over all n, up and down in turn, until another one would not fit the budget."""
    rng = random.Random(recipe.run.seed)
    sizes = batch_sizes(recipe.engine.max_num_seqs)
    # Short responses may not see all k in one call: the next call of the same n goes on where it ended.
    lengths = {n: lengths_in_turn(engine.num_draft_tokens, rng) for n in sizes}
    times: list[StepTime] = []
    began = time.perf_counter()
    rounds = 0
    try:
        # The first call pays for what is made lazily; it is not counted.
        _generate(engine, prompts[:2], sampling, recipe, -1, lengths_in_turn(engine.num_draft_tokens, rng))
        while True:
            for n in sizes if rounds % 2 == 0 else sizes[::-1]:
                times += _generate(engine, prompts[:n], sampling, recipe, rounds, lengths[n])
            rounds += 1
            spent = time.perf_counter() - began
            on_round(rounds, spent)
            if rounds >= 2 and spent * (rounds + 1) / rounds > budget_s:
                return times
    finally:
        engine.choose_drafts(None)


def _generate(
    engine: RolloutEngine,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    recipe: Recipe,
    attempt: int,
    lengths: Iterator[int],
) -> list[StepTime]:
    """The steps of one call in which all sequences ran, and whose k was that of the step before."""
    engine.choose_drafts(lambda live: next(lengths))
    requests = _requests(prompts, recipe, attempt)
    rollouts = engine.generate(requests, sampling)
    committed = [_tokens_before(completion) for completion in rollouts.completions]
    prompt_tokens = statistics.fmean(len(prompt.token_ids) for prompt in prompts)
    found = []
    counts = settled([step.num_asked for step in rollouts.steps])
    for index, step in enumerate(rollouts.steps):
        if step.live != len(requests):
            break
        if counts[index]:
            context = prompt_tokens + statistics.fmean(tokens[index] for tokens in committed)
            found.append(StepTime(len(requests), step.num_asked, context, step.seconds, step.cpu_seconds))
    return found


def _requests(prompts: Sequence[Prompt], recipe: Recipe, attempt: int) -> list[Request]:
    return [
        Request(prompt, index, request_seed(recipe.run.seed, CALIBRATE_STEP, prompt.id, index, attempt))
        for index, prompt in enumerate(prompts)
    ]


def _enough(steps: Sequence[StepTime], longest: int) -> bool:
    counts = Counter(step.k for step in steps)
    return min(counts[k] for k in range(longest + 1)) >= MIN_REPEATS


def _tokens_before(completion: Completion) -> list[int]:
    """Response tokens before each of its blocks."""
    before = [0]
    for block in completion.blocks:
        before.append(before[-1] + len(block.token_ids))
    return before


def _point(n: int, k: int, context: float, steps: Sequence[StepTime], clock: Clock) -> CalibrationPoint:
    judged = [step.seconds if clock == "wall" else step.cpu_seconds for step in steps]
    quarter, median, three_quarters = np.quantile(judged, [0.25, 0.5, 0.75]).tolist()
    return CalibrationPoint(
        n=n,
        k=k,
        context=round(context, 1),
        seconds=statistics.median(step.seconds for step in steps),
        cpu_seconds=statistics.median(step.cpu_seconds for step in steps),
        repeats=len(steps),
        spread=(three_quarters - quarter) / median,
    )


def _seconds(point: CalibrationPoint, clock: Clock) -> float:
    return point.seconds if clock == "wall" else point.cpu_seconds


def _model_error(parameters: dict[str, float], point: CalibrationPoint, clock: Clock) -> float:
    return abs(model_seconds(parameters, point.n, point.k, point.context) / _seconds(point, clock) - 1)


def _errors(errors: Sequence[float]) -> dict[str, float]:
    """Relative errors (fractions) in two figures."""
    return {"median": statistics.median(errors), "max": max(errors)}
