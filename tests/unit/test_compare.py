"""Arms are compared on equal terms: same weights, same prompts and seeds, turns in alternating order."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import pytest

from paceline.engine.base import Rollouts
from paceline.errors import ConfigError
from paceline.loop.compare import (
    RolloutPlan,
    arm_summary,
    choose_in_flight,
    repeat_prompts,
    reward_agreement,
    run_arms,
    speedups,
    step_speedup,
    summarize,
)
from paceline.observe.stages import STAGES
from paceline.types import Completion, EngineStats, Prompt, Request, Sampling, Versions

if TYPE_CHECKING:
    import torch

PROMPTS = [Prompt(id=f"held-out-{i}", token_ids=(1, 2, 3)) for i in range(8)]
STATS = EngineStats(1, 0, 0, 0, 0, 0, 1, (), (), ())


class ClockedEngine:
    """Answers with `tokens` tokens per request and claims `seconds_per_token`; remembers what it was asked."""

    num_draft_tokens = 0

    def __init__(self, name: str, log: list[tuple], seconds_per_token: float) -> None:
        self.name, self.log, self.seconds_per_token = name, log, seconds_per_token
        self.versions = Versions(0)
        self.policy: object = None

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Rollouts:
        self.log.append(("generate", self.name, self.policy, tuple(requests)))
        completions = tuple(
            Completion(r.prompt.id, r.sample, (5,) * (1 + i % 3), "stop", (), self.versions, r.seed)
            for i, r in enumerate(requests)
        )
        tokens = sum(len(completion.token_ids) for completion in completions)
        return Rollouts(completions, STATS, tokens * self.seconds_per_token)

    def publish(self, policy: Mapping[str, torch.Tensor], versions: Versions) -> None:
        self.policy, self.versions = policy, versions

    def publish_draft(self, draft: Mapping[str, torch.Tensor], versions: Versions) -> None:
        raise AssertionError("a comparison publishes no draft of its own")

    def forget_versions(self) -> None: ...

    def close(self) -> None: ...


class CountingRun:
    """A run whose policy is its name and step."""

    def __init__(self, name: str, log: list[tuple], seconds_per_token: float) -> None:
        self.name, self.log, self.step = name, log, 0
        self.engine = ClockedEngine(name, log, seconds_per_token)
        self.evaluations: list[int] = []

    @property
    def evaluation_due(self) -> bool:
        return self.step in (0, 4) and self.step not in self.evaluations

    def evaluate(self) -> float:
        self.evaluations.append(self.step)
        return 0.5

    def run_step(self) -> dict:
        self.step += 1
        self.log.append(("step", self.name, self.step))
        return {}

    def policy_state(self) -> dict:
        return {"weights of": f"{self.name} after {self.step}"}

    def publish(self) -> None:
        self.engine.publish(self.policy_state(), Versions(self.step))


@pytest.fixture
def comparison():
    log: list[tuple] = []
    runs = {"none": CountingRun("none", log, 0.03), "eagle3": CountingRun("eagle3", log, 0.02)}
    plan = RolloutPlan(PROMPTS, Sampling(), seed=3, in_flight=(4, 8), num_pairs=3)
    seconds = run_arms(runs, plan, num_steps=4)
    return runs, log, seconds


def test_arms_take_turns_and_swap_who_goes_first(comparison):
    steps = [entry[1:] for entry in comparison[1] if entry[0] == "step"]
    assert steps == [
        ("none", 1), ("eagle3", 1), ("eagle3", 2), ("none", 2),
        ("none", 3), ("eagle3", 3), ("eagle3", 4), ("none", 4),
    ]  # fmt: skip


def test_every_arm_is_evaluated_before_the_first_step_and_after_the_last(comparison):
    assert {name: run.evaluations for name, run in comparison[0].items()} == {"none": [0, 4], "eagle3": [0, 4]}


def test_rollouts_are_measured_at_start_middle_and_end_with_one_policy_in_both_engines(comparison):
    by_policy: dict[str, set[str]] = {}
    for kind, name, *rest in comparison[1]:
        if kind == "generate":
            by_policy.setdefault(rest[0]["weights of"], set()).add(name)
    assert by_policy == {f"eagle3 after {step}": {"none", "eagle3"} for step in (0, 2, 4)}


def test_both_engines_answer_the_same_requests_and_each_measurement_has_new_seeds(comparison):
    asked: dict[str, list] = {"none": [], "eagle3": []}
    for kind, name, *rest in comparison[1]:
        if kind == "generate":
            asked[name].append((rest[0]["weights of"], rest[1]))
    assert sorted(map(repr, asked["none"])) == sorted(map(repr, asked["eagle3"]))
    seeds = [frozenset(r.seed for r in requests) for _, requests in asked["none"] if len(requests) == 8]
    assert len(seeds) == 9
    assert not frozenset.intersection(*seeds)
    assert len(frozenset.union(*seeds)) == 9 * 8


def test_who_is_measured_first_swaps_from_pair_to_pair(comparison):
    # 8 requests at once happen in measurements only: one call per engine and pair.
    order = [name for kind, name, *rest in comparison[1] if kind == "generate" and len(rest[1]) == 8]
    pairs = list(zip(order[::2], order[1::2], strict=True))
    assert pairs == [("none", "eagle3"), ("eagle3", "none"), ("none", "eagle3")] * 3


def test_no_wave_is_larger_than_asked_for_and_all_prompts_take_part(comparison):
    measured = [rest[1] for kind, name, *rest in comparison[1] if kind == "generate" and name == "none"]
    assert {len(requests) for requests in measured} == {4, 8}
    assert {r.prompt.id for requests in measured for r in requests} == {prompt.id for prompt in PROMPTS}


def test_the_measured_speedup_is_the_ratio_of_the_engines_seconds_per_token(comparison):
    arms = {name: {"stage_s": dict.fromkeys((*STAGES, "step"), 1.0)} for name in ("none", "eagle3")}
    result = speedups(arms, comparison[2], live_batch=8)["eagle3"]
    for part in ("rollout", "rollout_8"):
        assert result[part]["median"] == pytest.approx(1.5)
        assert result[part]["pairs"] == 9
    assert (result["rollout"]["in_flight"], result["step"]["in_flight"]) == (4, 8)


def test_a_prompt_that_is_asked_twice_is_two_samples_with_different_noise():
    log: list[tuple] = []
    runs = {name: CountingRun(name, log, 0.1) for name in ("none", "eagle3")}
    plan = RolloutPlan(repeat_prompts(PROMPTS[:2], 6), Sampling(), seed=0, in_flight=(6,), num_pairs=2)
    run_arms(runs, plan, num_steps=1)
    for kind, _, *rest in log:
        if kind == "generate":
            assert len({r.seed for r in rest[1]}) == 6
            assert len({(r.prompt.id, r.sample) for r in rest[1]}) == 6


def test_step_speedup_changes_the_generate_stage_alone():
    stages = {"data": 0.0, "prepare": 1.0, "generate": 6.0, "logprob": 1.0, "train": 2.0}
    rollout = {"median": 2.0, "low": 1.0, "high": None, "pairs": 9, "in_flight": 16}
    step = step_speedup(stages, stages, rollout)
    assert step["median"] == pytest.approx(10 / 7)
    assert step["low"] == pytest.approx(1.0)
    assert step["high"] is None
    slower = {**stages, "prepare": 4.0}
    assert step_speedup(stages, slower, rollout)["median"] == pytest.approx(1.0)


def line(step: int, generate: float, accepted: int, verify_steps: int, unaccounted: float = 0.0) -> dict:
    stages = {"data": 0.1, "prepare": 0.2, "generate": generate, "logprob": 0.3, "train": 0.4}
    return {
        "step": step,
        "stage_s": {**stages, "step": sum(stages.values()) + unaccounted},
        "tokens": {"response": 100, "accepted": accepted},
        "verify_steps": verify_steps,
        "certificate": {"z": 0.1 * step, "tokens": 100 * step},
        "reward": {"mean": 0.4},
        "alarms": [],
    }


def test_acceptance_length_is_pooled_over_steps_and_absent_without_drafts():
    # A mean of per-step values would be 2.0.
    assert arm_summary([line(1, 1.0, 10, 10), line(2, 1.0, 0, 10), line(3, 1.0, 60, 30)])["acceptance_length"] == 2.4
    assert arm_summary([line(1, 1.0, 0, 0)])["acceptance_length"] is None


def test_stage_values_are_medians_and_the_worst_step_shows_what_stages_leave_out():
    summary = arm_summary([line(1, 9.0, 0, 0), line(2, 1.0, 0, 0, unaccounted=2.0), line(3, 2.0, 0, 0)])
    assert summary["stage_s"]["generate"] == 2.0
    assert summary["stages_over_step"] == pytest.approx(2.0 / 4.0)


def test_the_summary_takes_the_certificate_of_the_whole_run_and_rewards_before_and_after():
    records = {"none": [line(1, 2.0, 0, 0), line(2, 2.0, 0, 0)], "eagle3": [line(1, 1.0, 5, 5), line(2, 1.0, 5, 5)]}
    evaluations = {
        arm: [{"reward": {"mean": before, "std": 0.5, "n": 100}}, {"reward": {"mean": after, "std": 0.5, "n": 100}}]
        for arm, before, after in (("none", 0.4, 0.6), ("eagle3", 0.41, 0.63))
    }
    summary = summarize(records, evaluations, {"eagle3": {16: [(2.0, 1.0)] * 3}}, live_batch=16)
    assert summary["arms"]["eagle3"]["certificate"] == {"z": 0.2, "tokens": 200}
    assert summary["arms"]["none"]["reward"] == {"before": 0.4, "after": 0.6, "std": 0.5, "n": 100}
    assert summary["speedup"]["eagle3"]["rollout"]["median"] == pytest.approx(2.0)
    agreement = summary["reward_agreement"]["eagle3"]
    assert agreement["difference"] == pytest.approx(0.03)
    assert agreement["standard_error"] == pytest.approx(0.5 * math.sqrt(2) / 10)
    assert agreement["within_noise"] is True


def test_rewards_further_apart_than_two_standard_errors_do_not_agree():
    side = {"after": 0.5, "std": 0.5, "n": 100}
    assert reward_agreement(side, {**side, "after": 0.63})["within_noise"] is True
    assert reward_agreement(side, {**side, "after": 0.65})["within_noise"] is False


def test_more_in_flight_than_the_engine_takes_is_refused():
    assert choose_in_flight(None, 64) == (16, 64)
    assert choose_in_flight(None, 32) == (16,)
    assert choose_in_flight(None, 8) == (8,)
    assert choose_in_flight([4, 8], 8) == (4, 8)
    for asked in ([16, 65], [0], []):
        with pytest.raises(ConfigError, match=r"--in-flight .*engine\.max_num_seqs"):
            choose_in_flight(asked, 64)
