"""The cost of one engine as a calibration measured it: interpolation between measured points, and no guesses beyond.

A larger k than the largest measured one cannot be predicted from smaller ones (published 8B runs: times at k >= 5 come
out 16-44 % too low from k = 0 and 3), so it is refused; so is a larger batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.interpolate import RegularGridInterpolator

from paceline.errors import ConfigError
from paceline.sim.figures import Assumption


class MeasuredCost:
    """Implements `Cost` from a profile: `{"points": [{"n", "k", "context", "seconds", ..}, ..], "machine": .., ..}`.

    `n` live sequences, `k` drafts, `context` cached tokens per sequence, `seconds` of one engine iteration. The points
    must form a full grid. Between them the time is linear in each of the three; below the smallest n it stays at that
    n; in the context it continues linearly on either side, upwards never falling (with one it is constant).
    """

    def __init__(self, profile: Mapping[str, Any]) -> None:
        points = profile.get("points")
        if not points:
            raise ConfigError("the profile has no points: measure one with `paceline calibrate`.")
        self._source = _source(profile)
        axes = [np.unique([float(point[name]) for point in points]) for name in ("n", "k", "context")]
        self.max_live, self.max_k = int(axes[0][-1]), int(axes[1][-1])
        self.ks = tuple(int(k) for k in axes[1])
        """Measured k; a k between two of them is interpolated."""
        self._contexts = axes[2]
        self._smallest_n = float(axes[0][0])
        seconds = np.full([len(axis) for axis in axes], np.nan)
        for point in points:
            place = tuple(
                int(np.searchsorted(axis, point[name])) for axis, name in zip(axes, ("n", "k", "context"), strict=True)
            )
            if not point["seconds"] > 0:
                raise ConfigError(f"the profile has a point without positive seconds: {dict(point)}. Measure it again.")
            if not np.isnan(seconds[place]):
                raise ConfigError(
                    f"the profile has two points at n = {point['n']}, k = {point['k']}, context = {point['context']}."
                )
            seconds[place] = point["seconds"]
        if np.isnan(seconds).any():
            n, k, context = (axis[i] for axis, i in zip(axes, np.argwhere(np.isnan(seconds))[0], strict=True))
            raise ConfigError(
                f"the profile has a hole at n = {n:g}, k = {k:g}, context = {context:g}: calibrate every combination."
            )
        if len(axes[2]) > 1:
            # Noise may let the time fall with the context; it must not go on falling where nothing was measured.
            rise = np.maximum(seconds[..., -1] - seconds[..., -2], 0.0)
            seconds = np.concatenate([seconds, (seconds[..., -1] + rise)[..., None]], axis=2)
            axes[2] = np.append(axes[2], 2 * axes[2][-1] - axes[2][-2])
        # An axis with a single point needs a second one to interpolate; the values are the same there.
        for number, axis in enumerate(axes):
            if len(axis) == 1:
                axes[number] = np.array([axis[0], axis[0] + 1])
                seconds = np.repeat(seconds, 2, axis=number)
        self._grid = RegularGridInterpolator(axes, seconds, bounds_error=False, fill_value=None)

    def iteration_s(self, num_live: ArrayLike, cached_tokens: ArrayLike, k: ArrayLike) -> np.ndarray:
        """See `Cost.iteration_s`. Raises ConfigError above the largest measured n or k."""
        num_live, cached, k = np.broadcast_arrays(
            np.asarray(num_live, float), np.asarray(cached_tokens, float), np.asarray(k, float)
        )
        if k.max(initial=0) > self.max_k or k.min(initial=self.ks[0]) < self.ks[0]:
            raise ConfigError(
                f"k = {k.min():g} to {k.max():g}, but the profile was measured from {self.ks[0]} to {self.max_k}: the "
                "cost of another k cannot be extrapolated. Calibrate with it, or stay inside."
            )
        if num_live.max(initial=0) > self.max_live:
            raise ConfigError(
                f"{num_live.max():g} live sequences, but the profile was measured up to n = {self.max_live}: "
                "calibrate with a larger n, or set max_num_seqs (--max-num-seqs) no higher than that."
            )
        where = np.stack([np.maximum(num_live, self._smallest_n), k, cached / num_live], axis=-1)
        return self._grid(where).reshape(num_live.shape)

    def prefill_s(self, new_tokens: ArrayLike, attention_pairs: ArrayLike) -> np.ndarray:
        """Zero: a profile holds decode iterations only, and `assumptions` says so."""
        return np.zeros(np.broadcast(new_tokens, attention_pairs).shape)

    def assumptions(self) -> list[Assumption]:
        """What was measured, and what is not in it."""
        contexts = f"{self._contexts[0]:g} to {self._contexts[-1]:g} tokens, linear beyond"
        grid = {"k": self.ks, "n": f"up to {self.max_live}", "context": contexts}
        result = [
            Assumption("cost.iteration_s", grid, "measured", self._source),
            Assumption("cost.prefill_s", 0.0, "assumed", "a profile holds decode iterations only"),
        ]
        if len(self._contexts) == 1:
            result.append(Assumption("cost.context", "constant", "assumed", "one context was measured"))
        return result


def _source(profile: Mapping[str, Any]) -> str:
    """Machine, engine and threads of the profile in one line."""
    parts = [f"{name} {profile[name]}" for name in ("engine", "threads", "clock", "machine") if name in profile]
    return "calibration profile" + (": " + ", ".join(parts) if parts else "")
