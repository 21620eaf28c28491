"""A modelled cost, computed once for every batch and looked up from then on."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from paceline.sim.cost import Cost, RooflineCost
from paceline.sim.figures import Assumption

Array = np.ndarray

_FAR = 1e6
"""Cached tokens at which the slope is taken; any number does, because the cost is linear in them."""


@dataclass(frozen=True, slots=True)
class TabledCost:
    """`RooflineCost` for up to `max_live` sequences. Implements `Cost`; equal to what it was made from.

    Requests that are released one after another make an engine stop at every release, where the roofline would be
    computed for one batch at a time. Its iteration is linear in the cached tokens, so two of them give all.
    """

    cost: RooflineCost
    max_live: int
    _lines: dict[int, tuple[Array, Array]] = field(default_factory=dict, repr=False, compare=False)
    """k -> ([max_live + 1] seconds without cached tokens, [max_live + 1] seconds per cached token)."""

    def iteration_s(self, num_live: ArrayLike, cached_tokens: ArrayLike, k: ArrayLike) -> Array:
        """See `Cost.iteration_s`."""
        num_live, cached, k = np.broadcast_arrays(num_live, cached_tokens, k)
        seconds = np.empty(num_live.shape)
        for choice in np.unique(k).tolist():
            at = k == choice
            start, slope = self._line(int(choice))
            live = num_live[at].astype(np.int64)
            seconds[at] = start[live] + slope[live] * cached[at]
        return seconds

    def prefill_s(self, new_tokens: ArrayLike, attention_pairs: ArrayLike) -> Array:
        """See `Cost.prefill_s`."""
        return self.cost.prefill_s(new_tokens, attention_pairs)

    def assumptions(self) -> list[Assumption]:
        """See `Cost.assumptions`."""
        return self.cost.assumptions()

    def _line(self, k: int) -> tuple[Array, Array]:
        if k not in self._lines:
            live = np.arange(1, self.max_live + 1)
            start = self.cost.iteration_s(live, np.zeros(self.max_live), np.full(self.max_live, k))
            far = self.cost.iteration_s(live, np.full(self.max_live, _FAR), np.full(self.max_live, k))
            # No iteration is asked for without a live sequence; the first entry keeps places and batches equal.
            self._lines[k] = (np.append(0.0, start), np.append(0.0, (far - start) / _FAR))
        return self._lines[k]


def tabled(cost: Cost, max_live: int) -> Cost:
    """The looked-up form where there is one, else the cost itself."""
    return TabledCost(cost, max_live) if isinstance(cost, RooflineCost) else cost
