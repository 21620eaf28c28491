"""The same recipe in several arms: they take turns step by step, so that a slow minute of the machine hits all of them.

Two things are measured apart. Each arm's own RL run gives its stages, acceptance length, certificate and reward. The
rollout speedup comes from extra rollouts at the start, the middle and the end of training, with one policy (that of the
speculative arm) published to both engines, on the same prompts and seeds: the arms' own runs drift apart, and with them
the length of what they generate.

The runs come in open, and this module imports none of them: `paceline report` reads a summary without loading torch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

from paceline.engine.base import RolloutEngine
from paceline.errors import ConfigError
from paceline.loop.seeds import request_seed
from paceline.loop.speculation import speculation_summary
from paceline.observe.stages import STAGES
from paceline.spec.stats import PairedRatio, paired_ratio
from paceline.types import Prompt, Request, Sampling, Versions

if TYPE_CHECKING:
    import torch

SPEED_STEP = -2
"""Stands for the step in the seeds of the rollout measurements."""
DEFAULT_IN_FLIGHT = (16, 64)

Record = Mapping[str, Any]
"""A line of metrics.jsonl, or a part of summary.json."""


class ArmRun(Protocol):
    """What a comparison needs of a `TrainingRun`."""

    step: int

    @property
    def engine(self) -> RolloutEngine: ...

    @property
    def evaluation_due(self) -> bool: ...

    def evaluate(self) -> float: ...

    def run_step(self) -> Record: ...

    def policy_state(self) -> Mapping[str, torch.Tensor]: ...

    def publish(self) -> None: ...


@dataclass(frozen=True)
class RolloutPlan:
    """How rollout speed is measured."""

    prompts: Sequence[Prompt]
    """One request each; all of them make one measurement."""
    sampling: Sampling
    seed: int
    in_flight: tuple[int, ...] = DEFAULT_IN_FLIGHT
    """The requests go to the engine in waves of this many."""
    num_pairs: int = 3
    """Measurements per arm at each of the three points."""


Seconds = dict[str, dict[int, list[tuple[float, float]]]]
"""Arm -> in flight -> pairs of seconds per generated token: (baseline, arm)."""


def run_arms(runs: Mapping[str, ArmRun], plan: RolloutPlan, num_steps: int) -> Seconds:
    """Train all arms to the end, in turns, and measure their rollouts on the way. The first arm is the baseline."""
    seconds: Seconds = {arm: {size: [] for size in plan.in_flight} for arm in list(runs)[1:]}
    measured = {0, num_steps // 2, num_steps}
    for step in range(num_steps + 1):
        # A B, then B A: what an arm leaves in the caches of the machine falls to each of them alike.
        turns = list(runs.values()) if step % 2 == 0 else list(runs.values())[::-1]
        for run in turns:
            if run.evaluation_due:
                run.evaluate()
        if step in measured:
            measure_rollouts(runs, plan, seconds, point=step)
        if step < num_steps:
            for run in turns:
                run.run_step()
    return seconds


def measure_rollouts(runs: Mapping[str, ArmRun], plan: RolloutPlan, seconds: Seconds, point: int) -> None:
    """Add the pairs of one point of training to `seconds`.

    The baseline's engine is left with the policy of the last arm: a run publishes its own before it generates.
    """
    baseline, *others = runs
    for arm in others:
        policy = runs[arm].policy_state()
        engines = {name: runs[name].engine for name in (baseline, arm)}
        # The arm's engine as its next step would have it, with the newest draft; the baseline with the same policy.
        runs[arm].publish()
        draft = engines[baseline].versions.draft
        engines[baseline].forget_versions()
        engines[baseline].publish(policy, Versions(policy=runs[arm].step, draft=draft))
        for engine in engines.values():
            # The first call after a publish pays for what it reset, and the first of all for what is made lazily.
            engine.generate(_requests(plan, point, pair=-1)[: plan.in_flight[0]], plan.sampling)
        for pair in range(plan.num_pairs):
            requests = _requests(plan, point, pair)
            for size in plan.in_flight:
                order = (baseline, arm) if pair % 2 == 0 else (arm, baseline)
                per_token = {name: _seconds_per_token(engines[name], requests, plan.sampling, size) for name in order}
                seconds[arm][size].append((per_token[baseline], per_token[arm]))
        engines[baseline].forget_versions()


def choose_in_flight(asked: Sequence[int] | None, max_num_seqs: int) -> tuple[int, ...]:
    """Sizes of the waves. Raises `ConfigError` for one that the engine would split."""
    if asked is None:
        return tuple(size for size in DEFAULT_IN_FLIGHT if size <= max_num_seqs) or (max_num_seqs,)
    if not asked or min(asked) < 1 or max(asked) > max_num_seqs:
        raise ConfigError(
            f"--in-flight asks for {', '.join(map(str, asked))} samples at once, and engine.max_num_seqs is "
            f"{max_num_seqs}: choose numbers from 1 to {max_num_seqs}, or raise engine.max_num_seqs"
        )
    return tuple(asked)


def repeat_prompts(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """`count` prompts, from the start again when there are fewer."""
    return [prompts[index % len(prompts)] for index in range(count)]


def summarize(
    records: Mapping[str, Sequence[Record]],
    evaluations: Mapping[str, Sequence[Record]],
    seconds: Seconds,
    live_batch: int,
) -> dict[str, Any]:
    """`arms`, `speedup` and `reward_agreement` of summary.json, from what the arms wrote and what was measured.

    `records` and `evaluations` are the lines of each arm's metrics.jsonl and evaluations.jsonl; the first arm is the
    baseline. `live_batch` is the samples that the runs have in flight.
    """
    arms: dict[str, dict[str, Any]] = {}
    for arm, lines in records.items():
        before, after = evaluations[arm][0]["reward"], evaluations[arm][-1]["reward"]
        reward = {"before": before["mean"], "after": after["mean"], "std": after["std"], "n": after["n"]}
        # The certificate of the last step is that of the whole run.
        arms[arm] = {**arm_summary(lines), "certificate": lines[-1]["certificate"], "reward": reward}
    baseline, *others = arms
    return {
        "baseline": baseline,
        "arms": arms,
        "speedup": speedups(arms, seconds, live_batch),
        "reward_agreement": {arm: reward_agreement(arms[baseline]["reward"], arms[arm]["reward"]) for arm in others},
    }


def arm_summary(records: Sequence[Record]) -> dict[str, Any]:
    """Medians and totals of one arm's metrics.jsonl: `stage_s`, `acceptance_length` (pooled), `speculation`, ..."""
    stages = {name: statistics.median(record["stage_s"][name] for record in records) for name in (*STAGES, "step")}
    verify_steps = sum(record["verify_steps"] for record in records)
    accepted = sum(record["tokens"]["accepted"] for record in records)
    shares = [sum(record["stage_s"][name] for name in STAGES) / record["stage_s"]["step"] for record in records]
    return {
        "steps": len(records),
        "stage_s": stages,
        # The share furthest from 1: what the five stages leave out of a step, or count twice.
        "stages_over_step": max(shares, key=lambda share: abs(share - 1)),
        "acceptance_length": 1 + accepted / verify_steps if verify_steps else None,
        "speculation": speculation_summary(records),
        "tokens": sum(record["tokens"]["response"] for record in records),
        "alarms": sum(len(record["alarms"]) for record in records),
    }


def speedups(arms: Mapping[str, Record], seconds: Seconds, live_batch: int) -> dict[str, Any]:
    """`speedup` of summary.json from the arms' stages (first arm: baseline) and the measured pairs.

    `rollout` is that of the first wave size, `rollout_N` those of the others. `step` replaces the baseline's generate
    stage by itself over the rollout speedup at the size nearest to `live_batch`, the samples the runs have in flight;
    the arm's other stages are its own.
    """
    baseline = next(iter(arms))
    result: dict[str, Any] = {}
    for arm, by_size in seconds.items():
        ratios = {size: paired_ratio(pairs) for size, pairs in by_size.items()}
        first, *others = ratios
        nearest = min(ratios, key=lambda size: abs(size - live_batch))
        result[arm] = {
            "rollout": _ratio(ratios[first], first),
            **{f"rollout_{size}": _ratio(ratios[size], size) for size in others},
            "step": step_speedup(arms[baseline]["stage_s"], arms[arm]["stage_s"], _ratio(ratios[nearest], nearest)),
        }
    return result


def step_speedup(baseline_s: Record, arm_s: Record, rollout: Record) -> dict[str, Any]:
    """Step time of the baseline over that of the arm, generation at equal tokens. Example: twice as fast rollouts of
    6 s beside 4 s of other stages make a step of 10 s one of 7 s, 1.43x."""

    def others(stages: Record) -> float:
        return sum(stages[name] for name in STAGES if name != "generate")

    def combined(ratio: float | None) -> float | None:
        if ratio is None:
            return None
        return (others(baseline_s) + baseline_s["generate"]) / (others(arm_s) + baseline_s["generate"] / ratio)

    ends = {name: combined(rollout[name]) for name in ("median", "low", "high")}
    return {**ends, "pairs": rollout["pairs"], "in_flight": rollout["in_flight"]}


def reward_agreement(baseline: Record, arm: Record) -> dict[str, Any]:
    """Do two arms end alike? Rewards `{"after", "std", "n"}` of the same held-out prompts, n samples each.

    `within_noise`: the difference is smaller than twice its standard error, prompts taken as independent.
    """
    difference = arm["after"] - baseline["after"]
    standard_error = math.sqrt(sum(side["std"] ** 2 / side["n"] for side in (baseline, arm)))
    return {
        "difference": difference,
        "standard_error": standard_error,
        "within_noise": abs(difference) <= 2 * standard_error,
    }


def _requests(plan: RolloutPlan, point: int, pair: int) -> list[Request]:
    """The same for every arm. A prompt that occurs twice is two samples of it."""
    counts: dict[str, int] = {}
    requests = []
    for prompt in plan.prompts:
        sample = counts[prompt.id] = counts.get(prompt.id, -1) + 1
        seed = request_seed(plan.seed + point, SPEED_STEP, prompt.id, sample, pair)
        requests.append(Request(prompt=prompt, sample=sample, seed=seed))
    return requests


def _seconds_per_token(engine: RolloutEngine, requests: list[Request], sampling: Sampling, in_flight: int) -> float:
    seconds = 0.0
    tokens = 0
    for start in range(0, len(requests), in_flight):
        rollouts = engine.generate(requests[start : start + in_flight], sampling)
        seconds += rollouts.seconds
        tokens += sum(len(completion.token_ids) for completion in rollouts.completions)
    return seconds / tokens


def _ratio(ratio: PairedRatio, in_flight: int) -> dict[str, Any]:
    return {**asdict(ratio), "in_flight": in_flight}
