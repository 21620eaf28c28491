"""A real run, replayed: its lengths and acceptances through a measured cost, predicted against measured seconds.

What is compared is the `generate` stage of each step. It holds more than decoding (the prompts, the wait for the last
rewards), and the first step of a run pays for what is made lazily, so it is shown and left out of the summary.
"""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import ConfigError
from paceline.observe.metrics import JsonLines
from paceline.sim.acceptance import Acceptance
from paceline.sim.cost import Cost
from paceline.sim.figures import Origin
from paceline.sim.lengths import EmpiricalLengths
from paceline.sim.rollout import Engines, Rollout, simulate_rollout
from paceline.sim.step import Stages
from paceline.sim.workload import Requests


@dataclass(frozen=True, slots=True)
class RunStep:
    """What a replay needs of one line of metrics.jsonl."""

    step: int
    lengths: tuple[int, ...]
    """[N] response tokens, in the order of the requests."""
    prompt_tokens: float
    """Mean."""
    conditional: tuple[float, ...]
    """[k] acceptance of each position among blocks that reached it; empty without drafts."""
    k_histogram: Mapping[int, int]
    """Draft tokens -> blocks that had so many."""
    stage_s: Mapping[str, float]
    engine_steps: int
    """Forward passes of the policy."""

    @property
    def k(self) -> int:
        """The usual number of drafts: the median over blocks that had any; 0 without."""
        drafted = [k for k, blocks in self.k_histogram.items() for _ in range(blocks) if k > 0]
        return int(statistics.median_high(drafted)) if drafted else 0

    @property
    def drafted_share(self) -> float:
        """Blocks with drafts over all that could have had some: the first of each response follows the prompt."""
        blocks = sum(self.k_histogram.values()) - len(self.lengths)
        return min(1.0, sum(n for k, n in self.k_histogram.items() if k > 0) / blocks) if blocks > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Run:
    """A run folder, read."""

    path: Path
    steps: tuple[RunStep, ...]
    config: Mapping[str, Any]
    """The resolved recipe."""

    @property
    def max_num_seqs(self) -> int:
        return int(self.config["engine"]["max_num_seqs"])

    @property
    def threads(self) -> int | None:
        """Of the engine; None when it has no such setting."""
        threads = self.config["engine"].get("threads")
        return None if threads is None else int(threads)

    @property
    def method(self) -> str:
        return str(self.config["draft"]["method"])

    @property
    def group_size(self) -> int:
        return int(self.config["algorithm"]["group_size"])

    @property
    def settled(self) -> tuple[RunStep, ...]:
        """Without the first step, when there are more."""
        return self.steps[1:] or self.steps

    def lengths(self) -> EmpiricalLengths:
        """All of them."""
        values = tuple(length for step in self.steps for length in step.lengths)
        return EmpiricalLengths(values, Origin("measured", f"lengths of {self.path.name}"))

    def acceptance(self) -> Acceptance | None:
        """Mean over the steps, position by position; None without drafts."""
        return _acceptance([step for step in self.settled if step.conditional], f"acceptances of {self.path.name}")

    def stages(self) -> Stages:
        """Medians of the stages other than `generate`."""
        medians = {
            name: statistics.median(step.stage_s[name] for step in self.settled)
            for name in ("data", "prepare", "logprob", "train")
        }
        origin = Origin("measured", f"median of {len(self.settled)} steps of {self.path.name}")
        return Stages(
            medians["data"], medians["prepare"], medians["logprob"], medians["train"], dict.fromkeys(medians, origin)
        )


def read_run(folder: Path) -> Run:
    """Read `metrics.jsonl` and `config.toml` of a run folder. Raises `ConfigError` that names what is missing."""
    metrics, config = folder / "metrics.jsonl", folder / "config.toml"
    for path in (metrics, config):
        if not path.is_file():
            raise ConfigError(f"{folder} is not a run folder: it has no {path.name}. Name what `paceline train` wrote")
    records = JsonLines(metrics).records()
    if not records:
        raise ConfigError(f"{metrics} has no finished step yet: wait for the first one")
    try:
        steps = tuple(_step(record) for record in records)
        return Run(folder, steps, tomllib.loads(config.read_text()))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{folder} cannot be replayed: {error!r} in its metrics.jsonl or config.toml") from error


def _step(record: Mapping[str, Any]) -> RunStep:
    lengths = tuple(int(length) for length in record["lengths"])
    if not lengths:
        raise ValueError(f"step {record['step']} has no lengths")
    return RunStep(
        step=int(record["step"]),
        lengths=lengths,
        prompt_tokens=record["tokens"]["prompt"] / len(lengths),
        # A position that no block reached is accepted as rarely as can be.
        conditional=tuple(float(value or 0.0) for value in record["acceptance"]["conditional"]),
        k_histogram={int(k): int(blocks) for k, blocks in record["k_histogram"].items()},
        stage_s=dict(record["stage_s"]),
        engine_steps=int(record["engine_steps"]),
    )


def _acceptance(steps: Sequence[RunStep], source: str) -> Acceptance | None:
    if not steps:
        return None
    width = max(len(step.conditional) for step in steps)
    columns = [[step.conditional[j] for step in steps if j < len(step.conditional)] for j in range(width)]
    return Acceptance(tuple(statistics.fmean(column) for column in columns), origin=Origin("measured", source))


@dataclass(frozen=True, slots=True)
class Check:
    """One step, predicted and measured."""

    step: int
    predicted_s: float
    """Projected from measured inputs."""
    measured_s: float
    predicted_steps: float
    """Engine steps: what is wrong in them is wrong in lengths and acceptances, not in the cost."""
    counted_steps: int

    @property
    def error(self) -> float:
        """Relative: predicted / measured - 1."""
        return self.predicted_s / self.measured_s - 1.0


@dataclass(frozen=True, slots=True)
class Validation:
    """All steps of a run."""

    checks: tuple[Check, ...]
    first_counts: bool
    """Whether the first step enters the summary: only where it is the only one."""

    @property
    def error(self) -> float:
        """Of the summed seconds: predicted / measured - 1."""
        checks = self.checks if self.first_counts else self.checks[1:]
        return sum(check.predicted_s for check in checks) / sum(check.measured_s for check in checks) - 1.0


def replay(run: Run, cost: Cost) -> Validation:
    """Predict every step of `run`. Raises `ConfigError` where the cost was not measured at the run's k or batch."""

    def check(step: RunStep) -> Check:
        rollout = replay_step(step, cost, run.max_num_seqs)
        return Check(step.step, rollout.makespan_s, step.stage_s["generate"], rollout.iterations, step.engine_steps)

    checks = tuple(check(step) for step in run.steps)
    return Validation(checks, first_counts=len(checks) == 1)


def replay_step(step: RunStep, cost: Cost, max_num_seqs: int) -> Rollout:
    """The rollouts of one step on one engine.

    The step that takes in a prompt samples one token, whatever k is: a response of T tokens takes 1 + (T - 1) / g steps
    of g tokens each, as many as one of T - 1 + g tokens that is drafted from the start.
    """
    engines = Engines(1, max_num_seqs, prefix_sharing=False)
    count = len(step.lengths)
    acceptance = Acceptance(_every_block(step), origin=Origin("measured", "the step")) if step.k else None
    gain = float(acceptance.tokens(step.k)) if acceptance else 1.0
    requests = Requests(
        np.asarray(step.lengths) - 1 + gain,
        np.full(count, round(step.prompt_tokens)),
        np.arange(count),
        np.zeros(count),
        np.zeros(count),
    )
    return simulate_rollout(requests, cost, acceptance, step.k, engines)


def _every_block(step: RunStep) -> tuple[float, ...]:
    """[k] conditional acceptances among all blocks: one in which a look-up found nothing accepts nothing."""
    conditional = step.conditional[: step.k]
    return (conditional[0] * step.drafted_share, *conditional[1:])


def check_profile(run: Run, profile: Mapping[str, Any], path: Path) -> None:
    """Raises `ConfigError` when the profile was measured with other threads or another way of drafting than the run."""
    differing = []
    threads = profile.get("threads")
    if None not in (threads, run.threads) and threads != run.threads:
        differing.append(f"threads: {threads} there, {run.threads} in the run")
    method = (profile.get("draft") or {}).get("method")
    if method is not None and run.method not in ("none", method):
        differing.append(f"draft.method: {method} there, {run.method} in the run")
    if differing:
        raise ConfigError(
            f"--profile -> {path} does not belong to {run.path}: {'; '.join(differing)}. "
            "Calibrate with the recipe of the run"
        )
