"""How long responses are: a trace of a real run, a lognormal with a cap, or a constant. Tokens."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from paceline.errors import ConfigError
from paceline.sim.figures import Assumption, Origin


class Lengths(Protocol):
    """A distribution of token counts."""

    def sample(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """[count] integers, each at least 1."""
        ...

    def assumptions(self) -> list[Assumption]:
        """What it is and where it comes from."""
        ...


@dataclass(frozen=True, slots=True)
class LognormalLengths:
    """Lognormal, rounded and cut at `cap`. Example: `LognormalLengths(mean=8000, sigma=0.8, cap=32768)`."""

    mean: float
    """Mean before the cut, tokens."""
    sigma: float
    """Standard deviation of the logarithm."""
    cap: int
    """Response length limit, tokens."""
    origin: Origin = field(default=Origin("assumed", "a family, not a trace"), compare=False)

    def __post_init__(self) -> None:
        if not (self.mean > 0 and self.sigma >= 0 and self.cap >= 1):
            raise ConfigError(f"{self}: mean and cap are positive, sigma is not negative.")

    def sample(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """See `Lengths.sample`."""
        values = rng.lognormal(math.log(self.mean) - self.sigma**2 / 2, self.sigma, count)
        return np.clip(np.rint(values), 1, self.cap).astype(np.int64)

    def assumptions(self) -> list[Assumption]:
        """One line."""
        value = f"lognormal, mean {self.mean:g}, sigma {self.sigma:g}, cap {self.cap}"
        return [Assumption("lengths", value, self.origin.mark, self.origin.source)]


@dataclass(frozen=True, slots=True)
class EmpiricalLengths:
    """The lengths of a run, drawn without replacement while they last: a whole trace is replayed whole."""

    values: tuple[int, ...]
    origin: Origin = field(default=Origin("measured", "trace"), compare=False)

    def __post_init__(self) -> None:
        if not self.values or min(self.values) < 1:
            raise ConfigError("a trace of lengths needs at least one, and each is at least 1 token.")

    def sample(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """See `Lengths.sample`."""
        values = np.asarray(self.values, dtype=np.int64)
        whole, rest = divmod(count, len(values))
        drawn = [rng.permutation(values) for _ in range(whole)]
        return np.concatenate([*drawn, rng.choice(values, rest, replace=False)])

    def assumptions(self) -> list[Assumption]:
        """One line."""
        value = f"trace of {len(self.values)}, mean {np.mean(self.values):.0f}, largest {max(self.values)}"
        return [Assumption("lengths", value, self.origin.mark, self.origin.source)]


@dataclass(frozen=True, slots=True)
class ConstantLengths:
    """All the same."""

    value: int
    origin: Origin = field(default=Origin("assumed", "a constant"), compare=False)

    def __post_init__(self) -> None:
        if self.value < 1:
            raise ConfigError(f"a constant length of {self.value} tokens: give at least 1.")

    def sample(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """See `Lengths.sample`."""
        return np.full(count, self.value, dtype=np.int64)

    def assumptions(self) -> list[Assumption]:
        """One line."""
        return [Assumption("lengths", self.value, self.origin.mark, self.origin.source)]


def load_lengths(path: Path) -> EmpiricalLengths:
    """Lengths from JSON lines: `{"length": 812}` each, or rows with `"lengths": [..]` such as a run's metrics.jsonl.

    Raises ConfigError for a file without any, and names the line that cannot be read.
    """
    values: list[int] = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            found = [row["length"]] if "length" in row else row.get("lengths") or []
            values.extend(int(value) for value in found)
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigError(
                f'{path}, line {number}: expected {{"length": N}} or {{"lengths": [N, ..]}}, one JSON object a line.'
            ) from error
    if not values:
        raise ConfigError(
            f'{path} has no lengths: give {{"length": N}} or {{"lengths": [N, ..]}}, one JSON object a line.'
        )
    return EmpiricalLengths(tuple(values), Origin("measured", str(path.name)))
