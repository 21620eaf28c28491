"""What an engine step costs, as measured by `paceline calibrate`: the record, its file, and tau(n, k). No torch.

A step time belongs to one engine, policy, draft method, machine and number of threads. A profile says which, and a run
that differs in one of them refuses it: a choice of k from somebody else's costs is a guess.

Legend: N numbers of running sequences, K + 1 draft lengths from 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from paceline.errors import ConfigError

Clock = Literal["wall", "cpu"]
"""Wall clock, or processor time of the process."""


class CalibrationPoint(BaseModel):
    """One cell of the grid. Example: 16 sequences of about 40 tokens, 3 drafts each, 12.7 ms."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    n: int = Field(ge=1)
    """Running sequences."""
    k: int = Field(ge=0)
    """Draft tokens asked for."""
    context: float = Field(ge=0)
    """Mean length of the sequences, tokens."""
    seconds: float = Field(gt=0, allow_inf_nan=False)
    """Median wall clock of a whole engine step: drafting, verifying, sampling, scheduling."""
    cpu_seconds: float = Field(ge=0, allow_inf_nan=False)
    """Median processor time of the process in the same steps, all threads together."""
    repeats: int = Field(ge=1)
    """Steps behind the medians."""
    spread: float = Field(ge=0, allow_inf_nan=False)
    """Interquartile range over median (fraction), of the time that the profile's `clock` names."""


class PromptPoint(BaseModel):
    """A step that reads prompts and nothing else. Example: 16 prompts of 65 tokens, 1.4 s."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    n: int = Field(ge=1)
    """Prompts."""
    tokens: float = Field(gt=0)
    """Of a prompt, mean. None of them is in the engine's prefix cache before the step."""
    seconds: float = Field(gt=0, allow_inf_nan=False)
    """Median wall clock of the step, from the first request to the first token of each."""
    cpu_seconds: float = Field(ge=0, allow_inf_nan=False)
    """Median processor time of the process, all threads together."""
    repeats: int = Field(ge=1)
    """Steps behind the medians."""


class CalibrationProfile(BaseModel):
    """The content of a profile file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    machine: dict[str, Any]
    """Processor, cores, memory and system, as in `versions.json`."""
    versions: dict[str, str | None]
    """Package -> installed version."""
    engine: dict[str, Any]
    """`kind`, `dtype` and what else decides the speed of a step."""
    policy: dict[str, Any]
    """Its shape. Weights do not change what a step costs, and they move during training."""
    draft: dict[str, Any]
    """`method` and its shape."""
    threads: int = Field(ge=1)
    """Threads of the engine."""
    clock: Clock
    """Which of the two times the model below was fitted to, and k is chosen by."""
    points: tuple[CalibrationPoint, ...] = Field(min_length=1)
    prompts: tuple[PromptPoint, ...] = ()
    """Steps that read prompts. Empty in a profile of an older version; the choice of k does not look at them."""
    parameters: dict[str, float]
    """Fitted: term of `step_terms` -> seconds per unit of it."""
    residuals: dict[str, float]
    """Fitted: relative errors of the model on the points it was fitted to (`median`, `max`; fractions)."""
    held_out: dict[str, Any]
    """Relative errors on points that were left out of the fit: one n, one k."""

    @model_validator(mode="after")
    def _grid(self) -> CalibrationProfile:
        lengths = {n: sorted({p.k for p in self.points if p.n == n}) for n in sorted({p.n for p in self.points})}
        longest = max(p.k for p in self.points)
        for n, found in lengths.items():
            if found != list(range(longest + 1)):
                raise ValueError(f"points: n = {n} was measured at k = {found}; every n needs all of 0 to {longest}")
        return self

    @property
    def max_draft_tokens(self) -> int:
        """The largest k that was measured."""
        return max(point.k for point in self.points)

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")


def read_profile(path: Path) -> CalibrationProfile:
    """Read a profile. Raises `ConfigError` that names the file and the field."""
    try:
        return CalibrationProfile.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"draft.profile -> there is no {path}: make it with `paceline calibrate RECIPE`") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"draft.profile -> {path} cannot be read: {error}. Name a file that `paceline calibrate RECIPE` wrote"
        ) from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        message = first["msg"].removeprefix("Value error, ")
        raise ConfigError(
            f"draft.profile -> {path}: {where}: {message}. Measure it again with `paceline calibrate RECIPE`"
        ) from error


@dataclass(frozen=True, slots=True)
class Setting:
    """What a step time depends on, of a run that wants to use a profile."""

    machine: Mapping[str, Any]
    versions: Mapping[str, str | None]
    engine: Mapping[str, Any]
    policy: Mapping[str, Any]
    draft: Mapping[str, Any]
    threads: int


def step_terms(n: float, k: float, context: float) -> dict[str, float]:
    """What the seconds of a step are made of, each counted in its own unit; `parameters` holds seconds per unit.

    Overhead of a step; of drafting at all (verifying needs more bookkeeping); one pass of the draft per drafted token;
    the k + 1 positions of every sequence; and what those positions attend to.
    """
    positions = n * (k + 1)
    return {
        "step": 1.0,
        "drafting": float(k > 0),
        "draft_pass": float(k),
        "position": float(positions),
        "attended": positions * context,
    }


def model_seconds(parameters: Mapping[str, float], n: float, k: float, context: float) -> float:
    """Seconds of an engine step by the fitted model."""
    return sum(parameters[term] * count for term, count in step_terms(n, k, context).items())


SAME_MACHINE = ("processor", "cores")
"""What of `machine` has to agree. Memory and kernel release change without changing the speed."""


def check_setting(profile: CalibrationProfile, setting: Setting, path: Path) -> list[str]:
    """Notes on versions that differ from those the profile was measured with.

    Raises `ConfigError` when machine, threads, engine, policy or draft differ, with every difference.
    """
    differences = [
        *_differences("machine", profile.machine, setting.machine, SAME_MACHINE),
        *_differences("engine", profile.engine, setting.engine),
        *_differences("policy", profile.policy, setting.policy),
        *_differences("draft", profile.draft, setting.draft),
    ]
    if profile.threads != setting.threads:
        differences.append(f"threads: {profile.threads} there, {setting.threads} here")
    if differences:
        raise ConfigError(
            f"draft.profile -> {path} was measured with something else: {'; '.join(differences)}. "
            "Measure again with `paceline calibrate RECIPE`, or correct the recipe"
        )
    return [f"{path}: {note}" for note in _differences("versions", profile.versions, setting.versions)]


class StepCosts:
    """tau(n, k), seconds of an engine step with n running sequences and k drafts, from measured points.

    In n it is linear on log-log axes and goes on in proportion to n beyond the largest measured; noise that would make
    a step with more sequences or more drafts cheaper is smoothed away. k is never extrapolated.
    """

    def __init__(self, live: Sequence[int], seconds: Sequence[Sequence[float]]) -> None:
        """`live` [N] ascending, `seconds` [N][K + 1] for k = 0..K. Raises ValueError for anything else."""
        seconds_NK1 = np.asarray(seconds, dtype=float)
        if seconds_NK1.ndim != 2 or seconds_NK1.shape[0] != len(live) or seconds_NK1.shape[1] < 1:
            raise ValueError(f"StepCosts: {len(live)} batch sizes and seconds of shape {seconds_NK1.shape}.")
        if list(live) != sorted(set(live)) or live[0] < 1 or not (np.isfinite(seconds_NK1) & (seconds_NK1 > 0)).all():
            raise ValueError("StepCosts needs ascending batch sizes from 1 and positive, finite seconds.")
        self.live = tuple(live)
        self.num_draft_tokens = seconds_NK1.shape[1] - 1
        """The largest k."""
        self._log_live_N = np.log(self.live)
        self._log_seconds_NK1 = np.log(_rising(_rising(seconds_NK1, axis=1), axis=0))

    @classmethod
    def from_profile(cls, profile: CalibrationProfile, context: float | None = None) -> StepCosts:
        """At sequences of `context` tokens, between the measured ones; None: their mean."""
        return cls.from_points(profile.points, profile.clock, context)

    @classmethod
    def from_points(
        cls, points: Sequence[CalibrationPoint], clock: Clock = "wall", context: float | None = None
    ) -> StepCosts:
        """The same from points, of which every n has every k."""
        cells: dict[int, dict[int, list[tuple[float, float]]]] = {}
        for point in points:
            seconds = point.seconds if clock == "wall" else point.cpu_seconds
            cells.setdefault(point.n, {}).setdefault(point.k, []).append((point.context, seconds))
        live = sorted(cells)
        return cls(live, [[_at(sorted(cells[n][k]), context) for k in sorted(cells[n])] for n in live])

    def at(self, live: float) -> np.ndarray:
        """[K + 1] seconds for k = 0..K at `live` running sequences."""
        log_live = np.log(live)
        columns = [np.interp(log_live, self._log_live_N, column) for column in self._log_seconds_NK1.T]
        return np.exp(columns) * max(1.0, live / self.live[-1])

    def __call__(self, live: float, num_draft_tokens: int) -> float:
        """tau(n, k), seconds. Raises ValueError for a k that was not measured."""
        if not 0 <= num_draft_tokens <= self.num_draft_tokens:
            raise ValueError(f"tau({live}, {num_draft_tokens}): measured for k = 0 to {self.num_draft_tokens} only.")
        return float(self.at(live)[num_draft_tokens])


def _rising(values: np.ndarray, axis: int) -> np.ndarray:
    """The mean of the running maximum and of the running minimum from behind: both rise, and so does it."""
    maximum = np.maximum.accumulate(values, axis)
    minimum = np.flip(np.minimum.accumulate(np.flip(values, axis), axis), axis)
    return (maximum + minimum) / 2


def _at(contexts: Sequence[tuple[float, float]], context: float | None) -> float:
    lengths, seconds = zip(*contexts, strict=True)
    return float(np.mean(seconds) if context is None else np.interp(context, lengths, seconds))


def _differences(
    name: str, there: Mapping[str, object], here: Mapping[str, object], keys: Sequence[str] | None = None
) -> list[str]:
    compared = sorted({*there, *here}) if keys is None else keys
    return [
        f"{name}.{key}: {there.get(key)} there, {here.get(key)} here"
        for key in compared
        if there.get(key) != here.get(key)
    ]
