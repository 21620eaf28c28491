"""Fitting efficiencies to seconds: least squares on logarithms, with priors at the defaults.

Fit seconds of single iterations where there are any. A fit to whole rollouts is confounded: spread of acceptance and
lengths can stand in for overhead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from paceline.errors import ConfigError
from paceline.sim.cost import Cost
from paceline.sim.efficiency import Efficiency
from paceline.sim.figures import Origin


@dataclass(frozen=True, slots=True)
class Free:
    """One parameter to fit. Example: `Free("host_s", prior=0.0, sigma=5e-3, low=0.0, high=0.05)`."""

    name: str
    """Field of `Efficiency`."""
    prior: float
    """Where it is pulled to when the data do not say."""
    sigma: float
    """How far it may lie from there, in its own unit: one standard deviation."""
    low: float
    high: float

    def __post_init__(self) -> None:
        if not (self.low <= self.prior <= self.high and self.low < self.high and self.sigma > 0):
            raise ConfigError(f"{self}: it needs low <= prior <= high, low < high and a positive sigma.")


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """What came out."""

    efficiency: Efficiency
    """With every fitted parameter marked so."""
    parameters: Mapping[str, float]
    standard_errors: Mapping[str, float]
    """From curvature at the optimum, priors included; infinite where neither data nor prior say anything."""
    correlation: np.ndarray
    """[P, P]"""
    at_bounds: tuple[str, ...]
    """Parameters that ended on a bound: not identified, only the prediction is."""
    residuals: np.ndarray
    """[M] log predicted / observed."""

    @property
    def rms(self) -> float:
        """Root mean square of the residuals, about a relative error."""
        return float(np.sqrt(np.mean(self.residuals**2)))


def fit_efficiency(
    predict: Callable[[Efficiency], np.ndarray],
    observed_s: np.ndarray,
    start: Efficiency,
    free: Sequence[Free],
    *,
    noise: float = 0.05,
    source: str = "seconds",
) -> Fit:
    """Fit `free` so that `predict` meets `observed_s` [M] seconds; all else stays as in `start`.

    `noise` is the relative error of an observation, which weighs data against priors. `source` says what the data are.
    """
    observed = np.log(np.asarray(observed_s, dtype=float))
    prior, sigma, low, high = (
        np.array([getattr(item, key) for item in free]) for key in ("prior", "sigma", "low", "high")
    )
    origin = Origin("fitted", f"{len(observed)} {source}")

    def efficiency(scaled: np.ndarray) -> Efficiency:
        values = {item.name: float(value) for item, value in zip(free, scaled * sigma, strict=True)}
        return start.replace(origin, **values)

    def errors(scaled: np.ndarray) -> np.ndarray:
        log_ratio = np.log(predict(efficiency(scaled))) - observed
        return np.concatenate([log_ratio / noise, scaled - prior / sigma])

    # A start on a bound would have no room to take a difference.
    inside = np.clip(prior, low + 1e-3 * (high - low), high - 1e-3 * (high - low))
    # Three digits of a parameter are more than seconds can tell; a rollout is too dear for eight.
    result = least_squares(
        errors, inside / sigma, bounds=(low / sigma, high / sigma), diff_step=1e-4, xtol=1e-4, ftol=1e-6
    )
    values = result.x * sigma
    covariance = np.linalg.inv(result.jac.T @ result.jac) * np.outer(sigma, sigma)
    deviation = np.sqrt(np.diag(covariance))
    names = [item.name for item in free]
    near = 1e-4 * (high - low)
    return Fit(
        efficiency=efficiency(result.x),
        parameters=dict(zip(names, values.tolist(), strict=True)),
        standard_errors=dict(zip(names, deviation.tolist(), strict=True)),
        correlation=covariance / np.outer(deviation, deviation),
        at_bounds=tuple(
            name for name, hit in zip(names, (values < low + near) | (values > high - near), strict=True) if hit
        ),
        residuals=result.fun[: len(observed)] * noise,
    )


def fit_iterations(
    points: Sequence[Mapping[str, Any]],
    cost: Callable[[Efficiency], Cost],
    start: Efficiency,
    free: Sequence[Free],
    *,
    noise: float = 0.05,
) -> Fit:
    """Fit to single iterations, the points of a calibration profile: `{"n", "k", "context", "seconds"}` each."""
    live, k, context, seconds = (
        np.array([float(point[name]) for point in points]) for name in ("n", "k", "context", "seconds")
    )
    return fit_efficiency(
        lambda efficiency: cost(efficiency).iteration_s(live, live * context, k),
        seconds,
        start,
        free,
        noise=noise,
        source="measured iterations",
    )
