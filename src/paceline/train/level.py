"""Has a draft lost acceptance, or does its measurement only scatter? No torch.

Every step predicts an acceptance length from a few rollouts, with a standard error. From these come a running *level*
with a confidence bound on either side, and the *best* lower bound that there has been. A draft has lost acceptance when
the upper bound of its level lies below the best lower one: by more than the noise of both explains.

While the true level stays where it is, that needs a bound that is wrong, the newest upper one or the best lower one; in
one step each is wrong with probability `WRONG_BOUND_RATE`. A best one that is too high would stay, and so would one
that the policy no longer allows (it has become less predictable): every training forgets a part of it.

`tests/unit/test_level.py` holds it to that on planted noise, predictions from 8 rollouts that scatter by 3 %: a draft
that loses nothing trains in at most 4 % of 200 steps, and a loss of 5 % is found after 5 steps (median of 20 runs; at
most 15).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from scipy.special import stdtrit

WRONG_BOUND_RATE = 0.02
"""Chance that one bound of one step lies on the wrong side of the true level."""
NEWEST_WEIGHT = 0.25
"""Of the newest prediction in the level. The first ones are averaged, until each weighs as little."""
NEWEST_NOISE_WEIGHT = 0.1
"""Of the newest standard error in the pooled one: that of a few rollouts is itself known badly."""
FORGOTTEN = 0.02
"""Fraction of the distance between best and level that a training forgets."""


@dataclass(slots=True)
class AcceptanceLevel:
    """The level of one draft during a run.

    Example::

        level.add(alpha=2.4, standard_error=0.1, num_rollouts=8)
        if level.is_below_best:
            train()
            level.trained()
    """

    mean: float = math.nan
    """Acceptance length."""
    best: float = -math.inf
    """The highest lower bound of the level, less what was forgotten. -inf before the noise is known at all."""
    num_steps: int = 0
    scatter: float = 0.0
    """Variance of `mean` as a fraction of that of one prediction."""
    freedom: float = 0.0
    """Degrees of freedom of the pooled variance."""
    squares: float = 0.0
    """`freedom` times the pooled variance of one prediction."""

    def add(self, alpha: float, standard_error: float, num_rollouts: int) -> None:
        """Take a prediction in. One of fewer than two rollouts says nothing about its noise and is passed over."""
        if num_rollouts < 2 or not (math.isfinite(alpha) and math.isfinite(standard_error)):
            return
        self.num_steps += 1
        weight = max(NEWEST_WEIGHT, 1.0 / self.num_steps)
        self.mean = alpha if self.num_steps == 1 else self.mean + weight * (alpha - self.mean)
        self.scatter = (1.0 - weight) ** 2 * self.scatter + weight**2
        self.freedom = (1.0 - NEWEST_NOISE_WEIGHT) * self.freedom + (num_rollouts - 1)
        self.squares = (1.0 - NEWEST_NOISE_WEIGHT) * self.squares + (num_rollouts - 1) * standard_error**2
        self.best = max(self.best, self.mean - self.margin)

    @property
    def margin(self) -> float:
        """From the level to either bound: Student's quantile times the standard error of the level."""
        quantile = float(stdtrit(self.freedom, 1.0 - WRONG_BOUND_RATE))
        return quantile * math.sqrt(self.scatter * self.squares / self.freedom)

    @property
    def is_below_best(self) -> bool:
        """False before the first prediction."""
        return self.num_steps > 0 and self.mean + self.margin < self.best

    def trained(self) -> None:
        """The draft has learned in this step."""
        self.best -= FORGOTTEN * max(0.0, self.best - self.mean)

    def state_dict(self) -> dict[str, float | int]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        for name in asdict(self):
            setattr(self, name, state[name])
