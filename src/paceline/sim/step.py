"""A whole optimisation step: data, prepare, generate, logprob, train; one after the other.

Only `generate` is simulated. The other stages are given (published, or medians of a run), follow from a share of the
step, or are modelled from FLOP and utilisation; which of these stands in `Stages.origins`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from paceline.errors import ConfigError
from paceline.sim.efficiency import Efficiency
from paceline.sim.figures import Assumption, Mark, Origin
from paceline.sim.hardware import Hardware
from paceline.sim.models import ModelShape
from paceline.sim.rollout import Rollout
from paceline.sim.workload import Requests

OTHER_STAGES = ("data", "prepare", "logprob", "train")


@dataclass(frozen=True, slots=True)
class Stages:
    """Seconds of everything in a step but generating. Example: `given(Origin("published", "..."), train=31.3)`."""

    data_s: float = 0.0
    prepare_s: float = 0.0
    """Weights to the engines, caches reset."""
    logprob_s: float = 0.0
    train_s: float = 0.0
    origins: Mapping[str, Origin] = field(default_factory=dict, repr=False, compare=False)
    """Stage -> where its seconds come from; a stage without one takes no time by assumption."""

    def __post_init__(self) -> None:
        for name, seconds in self.seconds().items():
            if not (np.isfinite(seconds) and seconds >= 0):
                raise ConfigError(f"stage {name} takes {seconds} s: give a number that is not negative")

    def seconds(self) -> dict[str, float]:
        """Stage -> seconds."""
        return {"data": self.data_s, "prepare": self.prepare_s, "logprob": self.logprob_s, "train": self.train_s}

    @property
    def learn_s(self) -> float:
        """What the learner does between two syncs: data, logprob and train."""
        return self.data_s + self.logprob_s + self.train_s

    @property
    def total_s(self) -> float:
        return self.learn_s + self.prepare_s

    def scaled(self, factor: float, what: str) -> Stages:
        """Logprob and train take `factor` times as long; data and prepare stay."""
        origin = {name: Origin("assumed", what) for name in ("logprob", "train")}
        return Stages(
            self.data_s, self.prepare_s, self.logprob_s * factor, self.train_s * factor, {**self.origins, **origin}
        )

    def assumptions(self) -> list[Assumption]:
        """One line per stage."""
        nothing = Origin("assumed", "takes no time")
        lines = []
        for name, seconds in self.seconds().items():
            origin = self.origins.get(name, nothing)
            lines.append(Assumption(f"stage.{name}_s", round(seconds, 4), origin.mark, origin.source))
        return lines


def given(
    origin: Origin, *, data: float = 0.0, prepare: float = 0.0, logprob: float = 0.0, train: float = 0.0
) -> Stages:
    """Stages in seconds that somebody measured, published or assumed."""
    return Stages(data, prepare, logprob, train, dict.fromkeys(OTHER_STAGES, origin))


def from_generation_share(generate_s: float, share: float, origin: Origin) -> Stages:
    """What is left of a step whose generation takes `generate_s`, a `share` (fraction) of it; told apart no further."""
    if not 0 < share <= 1:
        raise ConfigError(f"a generation share of {share}: give a fraction of the step, above 0 and at most 1")
    rest = generate_s * (1.0 - share) / share
    return Stages(train_s=rest, origins=dict.fromkeys(OTHER_STAGES, origin))


def modelled(
    requests: Requests,
    model: ModelShape,
    hardware: Hardware,
    efficiency: Efficiency,
    gpus: int,
    *,
    weight_bytes: float,
    transport_bytes_per_s: float | None = None,
) -> Stages:
    """Logprob and train from FLOP over peak times utilisation, prepare from bytes over the transport's rate.

    A pass over a sequence of s tokens takes s (2 P + 2 L H s) FLOP (P active parameters, L layers, H = heads x head
    size: causal attention); training takes three. `weight_bytes` is the size of the policy as it is published;
    `transport_bytes_per_s` the rate at which one copy reaches all engines (default: the hardware's network).
    """
    tokens = np.asarray(requests.lengths, float) + np.asarray(requests.prompts, float)
    attention = 2.0 * model.num_layers * model.num_heads * model.head_size
    flop = float(np.sum(tokens * (2.0 * model.active_parameters + attention * tokens)))
    peak = gpus * hardware.bf16_flops
    rate = hardware.network_bytes_per_s if transport_bytes_per_s is None else transport_bytes_per_s
    if not rate > 0:
        raise ConfigError(f"weights that travel at {rate / 1e9:g} GB/s never arrive: give a rate above 0")
    marks = {name: efficiency.origins[name] for name in ("mfu_train", "mfu_logprob")}
    transport = "network rate of the hardware" if transport_bytes_per_s is None else f"{rate / 1e9:g} GB/s as given"
    return Stages(
        prepare_s=efficiency.prepare_s + weight_bytes / rate,
        logprob_s=flop / (peak * efficiency.mfu_logprob),
        train_s=3.0 * flop / (peak * efficiency.mfu_train),
        origins={
            "data": Origin("assumed", "takes no time"),
            "prepare": Origin("assumed", f"{weight_bytes / 1e9:.1f} GB of weights, {transport}"),
            "logprob": Origin(marks["mfu_logprob"].mark, f"FLOP, utilisation {efficiency.mfu_logprob:g}"),
            "train": Origin(marks["mfu_train"].mark, f"FLOP, utilisation {efficiency.mfu_train:g}"),
        },
    )


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One step without overlap. Example: `synchronous(stages, rollout.makespan_s).step_s`."""

    stages: Stages
    generate_s: float
    """From the first request to the end of the slowest one."""

    @property
    def step_s(self) -> float:
        """The sum of the five stages."""
        return self.stages.total_s + self.generate_s

    @property
    def generation_share(self) -> float:
        """Of the step, a fraction."""
        return self.generate_s / self.step_s

    def seconds(self) -> dict[str, float]:
        """`stage_s` of metrics.jsonl: the five stages, the step, and what generation the learner waits for (all)."""
        own = self.stages.seconds()
        return {
            "data": own["data"],
            "prepare": own["prepare"],
            "generate": self.generate_s,
            "logprob": own["logprob"],
            "train": own["train"],
            "step": self.step_s,
            "exposed_generate": self.generate_s,
        }

    def marks(self, generate: Mark) -> dict[str, Mark]:
        """Stage -> mark; `generate` is that of the simulated rollout. The step has the weakest of all."""
        nothing = Origin("assumed", "takes no time")
        marks: dict[str, Mark] = {name: self.stages.origins.get(name, nothing).mark for name in OTHER_STAGES}
        marks["generate"] = marks["exposed_generate"] = generate
        order: tuple[Mark, ...] = ("assumed", "fitted", "published", "measured")
        marks["step"] = next(mark for mark in order if mark in marks.values())
        return marks


def synchronous(stages: Stages, rollout: Rollout | float) -> StepTimes:
    """A step of which every stage waits for the one before: policy lag 0."""
    return StepTimes(stages, rollout if isinstance(rollout, float) else rollout.makespan_s)


def step_speedup(generation_share: float, rollout_speedup: float) -> float:
    """Amdahl's rule: only the share that is generation gets faster."""
    return 1.0 / (generation_share / rollout_speedup + 1.0 - generation_share)
