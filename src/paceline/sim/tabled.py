"""A modelled cost, computed once for every batch and k and looked up from then on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from paceline.sim.cost import Cost, RooflineCost
from paceline.sim.figures import Assumption

Array = np.ndarray

_FAR = 1e6
"""Cached tokens per sequence at which the slope is taken; any number does, because the cost is linear in them."""


@dataclass(frozen=True, slots=True, eq=False)
class TabledCost:
    """The two coefficients of every batch and k. Implements `Cost`; equal to what it was made from."""

    cost: RooflineCost
    base_s: Array
    """[k, n] seconds without a cached token; NaN where nothing was computed."""
    per_token_s: Array
    """[k, n] seconds for each cached token."""

    def iteration_s(self, num_live: ArrayLike, cached_tokens: ArrayLike, k: ArrayLike) -> Array:
        """See `Cost.iteration_s`; integers only."""
        at = np.asarray(k), np.asarray(num_live)
        return self.base_s[at] + self.per_token_s[at] * np.asarray(cached_tokens)

    def prefill_s(self, new_tokens: ArrayLike, attention_pairs: ArrayLike) -> Array:
        """See `Cost.prefill_s`."""
        return self.cost.prefill_s(new_tokens, attention_pairs)

    def assumptions(self) -> list[Assumption]:
        """See `Cost.assumptions`."""
        return self.cost.assumptions()


def tabled(cost: Cost, max_live: int, ks: Sequence[int] = range(17)) -> Cost:
    """The looked-up form of a roofline for up to `max_live` sequences and the given k; any other cost as it is."""
    if not isinstance(cost, RooflineCost):
        return cost
    live = np.arange(1, max_live + 1)
    base_s = np.full((max(ks) + 1, max_live + 1), np.nan)
    per_token_s = base_s.copy()
    for k in ks:
        base_s[k, 1:] = cost.iteration_s(live, 0.0 * live, k)
        per_token_s[k, 1:] = (cost.iteration_s(live, _FAR * live, k) - base_s[k, 1:]) / (_FAR * live)
    return TabledCost(cost, base_s, per_token_s)
