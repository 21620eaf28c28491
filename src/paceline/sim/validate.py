"""A real run, replayed: its lengths and acceptances through a measured cost, predicted against measured seconds.

What is compared is the `generate` stage of each step. It holds more than decoding (the prompts, the wait for the last
rewards), and the first step of a run pays for what is made lazily, so it is shown and left out of the summary.
"""

from __future__ import annotations

import statistics
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.drafts.length import LengthChooser
from paceline.drafts.profile import StepCosts
from paceline.errors import ConfigError
from paceline.observe.metrics import JsonLines
from paceline.sim.acceptance import Acceptance
from paceline.sim.cost import Cost
from paceline.sim.figures import Origin
from paceline.sim.lengths import EmpiricalLengths
from paceline.sim.rollout import Engines, Rollout, simulate_rollout
from paceline.sim.schedule import Schedule
from paceline.sim.step import Stages
from paceline.sim.workload import Requests
from paceline.types import Block


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
    batch_by_step: tuple[tuple[int, int, int], ...] = ()
    """(engine steps in a row, sequences in each, k asked for), in order; empty in lines that an older version wrote."""

    @property
    def steps_by_k(self) -> dict[int, int]:
        """k that was asked for -> engine steps."""
        counts: dict[int, int] = {}
        for steps, _, k in self.batch_by_step:
            counts[k] = counts.get(k, 0) + steps
        return counts

    @property
    def k(self) -> int:
        """The usual number of drafts: the median over blocks that had any; 0 without."""
        drafted = [k for k, blocks in self.k_histogram.items() for _ in range(blocks) if k > 0]
        return int(statistics.median_high(drafted)) if drafted else 0

    @property
    def drafted_share(self) -> float:
        """Blocks with drafts over all for which some were asked: the first of each response follows the prompt."""
        without = len(self.lengths)
        if self.batch_by_step:
            # The sequences of the first step are both in it and in the steps that asked for no drafts.
            without += sum(steps * live for steps, live, k in self.batch_by_step if k == 0) - self.batch_by_step[0][1]
        blocks = sum(self.k_histogram.values()) - without
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
    def adaptive(self) -> bool:
        """Whether k was chosen before every engine step."""
        return self.config["draft"].get("choose_k") == "adaptive"

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
        batch_by_step=tuple((int(steps), int(live), int(k)) for steps, live, k in record.get("batch_by_step", ())),
    )


def _acceptance(steps: Sequence[RunStep], source: str) -> Acceptance | None:
    if not steps:
        return None
    width = max(len(step.conditional) for step in steps)
    rows = [_every_block(step) for step in steps]
    columns = [[row[j] for row in rows if j < len(row)] for j in range(width)]
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
    predicted_by_k: Mapping[int, float]
    """k -> engine steps."""
    counted_by_k: Mapping[int, int]
    """The same; empty where the run does not say."""

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


def replay(run: Run, cost: Cost, costs: StepCosts | None = None) -> Validation:
    """Predict every step of `run`; of an adaptive one k as well, by the rule of the run (`drafts.length`) on `costs`.

    The rule sees the acceptances of the run and the batches of the prediction. Steps in which it probes a longer k are
    evidence for it, and are charged as if they had not probed: by the rule's own limit that is a small share of the
    time. Raises `ConfigError` where the cost was not measured at the run's k or batch.
    """
    chooser = _chooser(run, costs) if run.adaptive else None
    checks = []
    for step in run.steps:
        if chooser is None:
            acceptance = Acceptance(_every_block(step), origin=Origin("measured", "the step")) if step.k else None
            rollout = replay_step(step, cost, run.max_num_seqs, step.k, acceptance)
        else:
            acceptance = _acceptance_up_to(chooser.num_draft_tokens, step, run)
            schedule: Schedule | int = chooser.usual if acceptance else 0
            rollout = replay_step(step, cost, run.max_num_seqs, schedule, acceptance)
            if acceptance:
                chooser.observe(_expected_blocks(rollout, acceptance, chooser))
        checks.append(
            Check(
                step.step,
                rollout.makespan_s,
                step.stage_s["generate"],
                rollout.iterations,
                step.engine_steps,
                rollout.iterations_by_k(),
                step.steps_by_k,
            )
        )
    return Validation(tuple(checks), first_counts=len(checks) == 1)


def replay_step(
    step: RunStep, cost: Cost, max_num_seqs: int, schedule: Schedule | int, acceptance: Acceptance | None
) -> Rollout:
    """The rollouts of one step on one engine.

    The step that takes in a prompt samples one token, whatever k is: a response of T tokens takes 1 + (T - 1) / g steps
    of g tokens each, as many as one of T - 1 + g tokens that is drafted from the start. Each prompt is read in full:
    on a CPU vLLM shares one between samples in whole blocks of 128 tokens only (see `Engines.prefix_sharing`).
    """
    engines = Engines(1, max_num_seqs, prefix_sharing=False)
    count = len(step.lengths)
    first_k = schedule if isinstance(schedule, int) else schedule(min(count, max_num_seqs))
    gain = float(acceptance.tokens(first_k)) if acceptance else 1.0
    requests = Requests(
        np.asarray(step.lengths) - 1 + gain,
        np.full(count, round(step.prompt_tokens)),
        np.arange(count),
        np.zeros(count),
        np.zeros(count),
    )
    return simulate_rollout(requests, cost, acceptance, schedule, engines)


def _chooser(run: Run, costs: StepCosts | None) -> LengthChooser:
    if costs is None:
        raise ConfigError(f"{run.path} chose k before every engine step: to replay it, its profile is needed")
    draft = run.config["draft"]
    try:
        return LengthChooser(
            costs, num_draft_tokens=int(draft["num_draft_tokens"]), probe_share=float(draft["probe_share"])
        )
    except ValueError as error:
        raise ConfigError(f"--profile -> does not reach the k of {run.path}: {error}") from error


def _acceptance_up_to(k: int, step: RunStep, run: Run) -> Acceptance | None:
    """Of the step, or of the run where the step had no drafts; None where the run had none.

    A position that was never drafted is taken to be like the one before it, as the rule takes it.
    """
    whole = run.acceptance()
    measured = () if whole is None else whole.conditional
    conditional: tuple[float, ...] = _every_block(step) if step.conditional else measured
    if not conditional:
        return None
    conditional += (conditional[-1],) * (k - len(conditional))
    return Acceptance(conditional, origin=Origin("measured", "the step"))


def _expected_blocks(rollout: Rollout, acceptance: Acceptance, chooser: LengthChooser) -> list[Block]:
    """What the rule would see of such a rollout: so many blocks of each batch, k and number of accepted drafts."""
    rows: Counter[tuple[int, int]] = Counter()
    segments = rollout.segments
    for live, iterations in zip(segments.live.tolist(), segments.iterations.tolist(), strict=True):
        for _ in range(round(iterations)):
            rows[live, chooser.choose(live)] += live
    blocks: list[Block] = []
    for (live, k), count in rows.items():
        at_least = np.round(count * np.cumprod([1.0, *acceptance.conditional[:k]]))
        for accepted, number in enumerate(at_least - np.append(at_least[1:], 0.0)):
            blocks += [Block((0,) * k, accepted, (0,) * (accepted + 1), live, k)] * int(number)
    return blocks


def _every_block(step: RunStep) -> tuple[float, ...]:
    """[k] conditional acceptances among all blocks: one in which a look-up found nothing accepts nothing."""
    return (step.conditional[0] * step.drafted_share, *step.conditional[1:])


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
