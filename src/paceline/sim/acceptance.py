"""How many drafts are accepted: per position, and how much requests differ.

The conditional acceptance a_j is that of position j among blocks that reached it; g(k) = 1 + a_1 + a_1 a_2 + ... are
the expected tokens of a verify step (`spec.stats.expected_tokens` is the same law for one sequence of positions).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import brentq, least_squares
from scipy.special import expit, logit

from paceline.errors import ConfigError
from paceline.sim.figures import Assumption, Origin
from paceline.spec.stats import expected_tokens

_UNSTATED = Origin("assumed", "not stated")
_POSITIONS = 16


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Example: `Acceptance((0.8, 0.7, 0.7))`, three positions; `Acceptance.geometric(0.88, decay=0.99)`."""

    conditional: tuple[float, ...]
    """[K] fractions, position 1 first."""
    spread: float = 0.0
    """Standard deviation between requests of the shift that each request adds to every logit."""
    origin: Origin = field(default=_UNSTATED, compare=False)

    def __post_init__(self) -> None:
        if not all(0.0 <= value <= 1.0 for value in self.conditional):
            raise ConfigError(f"acceptance.conditional {self.conditional}: give fractions between 0 and 1.")
        if self.spread < 0:
            raise ConfigError(f"acceptance.spread is {self.spread}: a standard deviation is not negative.")

    @classmethod
    def geometric(
        cls,
        first: float,
        decay: float = 1.0,
        num_positions: int = _POSITIONS,
        spread: float = 0.0,
        origin: Origin = _UNSTATED,
    ) -> Acceptance:
        """a_j = first * decay ** (j - 1)."""
        return cls(tuple(first * decay**j for j in range(num_positions)), spread, origin)

    @classmethod
    def from_length(
        cls, alpha: float, k: int, decay: float = 1.0, spread: float = 0.0, origin: Origin = _UNSTATED
    ) -> Acceptance:
        """The geometric law over k positions whose acceptance length is `alpha` tokens.

        Raises ConfigError when no law has it: `alpha` lies between 1 and the value at first = 1 (k + 1 without decay).
        """
        most = expected_tokens([decay**j for j in range(k)])
        # A printed k + 1 may differ from the sum in the last digit.
        if not 1.0 <= alpha <= most + 1e-9:
            raise ConfigError(
                f"acceptance length {alpha} with k = {k}: it lies between 1 and {most:.3f}. "
                "Check which k it was measured at."
            )
        if alpha >= most:
            first = 1.0
        elif alpha == 1.0:
            first = 0.0
        else:
            first = brentq(lambda a: expected_tokens([a * decay**j for j in range(k)]) - alpha, 0.0, 1.0)
            assert isinstance(first, float)
        return cls.geometric(first, decay, k, spread, origin)

    @property
    def max_k(self) -> int:
        """Largest k whose acceptances are known."""
        return len(self.conditional)

    def tokens(self, k: int, shift: np.ndarray | float = 0.0) -> np.ndarray:
        """[N] expected tokens of one iteration of requests with `shift` [N]; exactly 1 at k = 0.

        Raises ConfigError for a k beyond the known positions.
        """
        if k > self.max_k:
            raise ConfigError(
                f"k = {k}, but acceptances of only {self.max_k} positions are known: measure more positions."
            )
        conditional = self.shifted(shift)[..., :k]
        return 1.0 + np.cumprod(conditional, axis=-1).sum(axis=-1)

    def shifted(self, shift: np.ndarray | float) -> np.ndarray:
        """[N, K] conditional acceptances of requests with `shift` [N] on the logit. 0 and 1 stay where they are."""
        shift = np.asarray(shift, dtype=float)
        conditional = np.asarray(self.conditional, dtype=float)
        if not np.any(shift):
            return np.broadcast_to(conditional, (*shift.shape, len(conditional)))
        with np.errstate(divide="ignore"):
            return expit(logit(conditional) + shift[..., None])

    def assumptions(self) -> list[Assumption]:
        """The positions and the spread."""
        conditional = tuple(round(value, 4) for value in self.conditional)
        return [
            Assumption("acceptance.conditional", conditional, self.origin.mark, self.origin.source),
            Assumption("acceptance.spread", self.spread, self.origin.mark, self.origin.source),
        ]


def fit_acceptance(lengths: Mapping[int, float]) -> Acceptance:
    """The geometric law with decay that meets acceptance lengths at several k, `{k: alpha}`, by least squares.

    With one k the decay is 1. Raises ConfigError without any.
    """
    if not lengths:
        raise ConfigError("fit_acceptance needs an acceptance length at one k at least.")
    if len(lengths) == 1:
        ((k, alpha),) = lengths.items()
        return Acceptance.from_length(alpha, k, origin=Origin("fitted", f"acceptance length at k = {k}, no decay"))

    def errors(parameters: np.ndarray) -> list[float]:
        first, decay = parameters
        return [expected_tokens([first * decay**j for j in range(k)]) / alpha - 1 for k, alpha in lengths.items()]

    first, decay = least_squares(errors, x0=[0.8, 0.98], bounds=([0.0, 0.5], [1.0, 1.0])).x
    source = f"acceptance lengths at k = {', '.join(map(str, sorted(lengths)))}"
    return Acceptance.geometric(float(first), float(decay), max(lengths), origin=Origin("fitted", source))
