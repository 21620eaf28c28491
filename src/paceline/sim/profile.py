"""The cost of an engine from the file that `paceline calibrate` wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from paceline.errors import ConfigError
from paceline.sim.cost import Array
from paceline.sim.figures import Assumption
from paceline.sim.measured import MeasuredCost


class ProfileCost(MeasuredCost):
    """Measured iterations, and prompts at what their own steps took. Implements `Cost`.

    A prompt is read in a step that it shares with running sequences. It is charged what a step of prompts alone took
    beyond one of as many sequences without drafts, between the measured numbers of tokens in proportion. A profile of
    an older version timed no prompts: they are charged as positions of a verify step, each of which is sampled from,
    too, which prompts are not.
    """

    def __init__(self, profile: Mapping[str, Any]) -> None:
        """Raises ConfigError for a profile without points, or with holes in its n x k grid."""
        super().__init__({**profile, "points": regular_grid(profile)})
        parameters = profile.get("parameters") or {}
        self._position_s = float(parameters.get("position", 0.0))
        self._attended_s = float(parameters.get("attended", 0.0))
        self._prompts = [(0.0, 0.0)]
        """(tokens, seconds beyond a step without prompts), rising."""
        for point in sorted(profile.get("prompts") or [], key=lambda point: point["n"] * point["tokens"]):
            n, tokens = float(point["n"]), float(point["n"] * point["tokens"])
            live = min(n, self.max_live)
            plain_s = float(self.iteration_s(live, tokens * live / n, 0))
            self._prompts.append((tokens, max(_clocked(profile, point) - plain_s, self._prompts[-1][1])))

    def prefill_s(self, new_tokens: ArrayLike, attention_pairs: ArrayLike) -> Array:
        """See `Cost.prefill_s`."""
        new_tokens, pairs = np.broadcast_arrays(np.asarray(new_tokens, float), np.asarray(attention_pairs, float))
        if len(self._prompts) == 1:
            return np.where(new_tokens > 0, self._position_s * new_tokens + self._attended_s * pairs, 0.0)
        tokens, seconds = zip(*self._prompts, strict=True)
        return np.interp(new_tokens, tokens, seconds) * np.maximum(new_tokens / tokens[-1], 1.0)

    def assumptions(self) -> list[Assumption]:
        """What was measured, and what a prompt is charged."""
        lines = [line for line in super().assumptions() if line.name != "cost.prefill_s"]
        if len(self._prompts) > 1:
            value = {f"{tokens:g} tokens": seconds for tokens, seconds in self._prompts[1:]}
            return [*lines, Assumption("cost.prefill_s", value, "measured", "steps of prompts less steps without")]
        seconds = {"position": self._position_s, "attended": self._attended_s}
        return [*lines, Assumption("cost.prefill_s", seconds, "fitted", "terms of the profile: no prompt was timed")]


def load_profile(path: Path) -> dict[str, Any]:
    """The file's content. Raises ConfigError when it is no JSON object with points."""
    try:
        profile = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read as a profile ({error}): write one with `paceline calibrate`"
        ) from error
    if not isinstance(profile, dict) or not profile.get("points"):
        raise ConfigError(f"{path} holds no points: write a profile with `paceline calibrate`")
    return profile


def regular_grid(profile: Mapping[str, Any]) -> list[dict[str, float]]:
    """The points, each n and k at the same contexts: the smallest and the largest that were measured anywhere.

    A calibration finds its contexts as sequences grow, so they differ from one n to the next. In between the seconds
    are linear; where a batch was not measured at so short or long a context they stay as they are at its nearest one.
    The clock of the profile decides which seconds count.
    """
    try:
        cells: dict[tuple[float, float], list[tuple[float, float]]] = {}
        for point in profile["points"]:
            cell = cells.setdefault((point["n"], point["k"]), [])
            cell.append((float(point["context"]), _clocked(profile, point)))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the profile has a damaged point ({error!r}): write it again with `paceline calibrate`"
        ) from error
    contexts = sorted(context for cell in cells.values() for context, _ in cell)
    ends = sorted({contexts[0], contexts[-1]})
    return [
        {"n": n, "k": k, "context": end, "seconds": _at(sorted(cell), end)}
        for (n, k), cell in cells.items()
        for end in ends
    ]


def _clocked(profile: Mapping[str, Any], point: Mapping[str, Any]) -> float:
    """Seconds of a point by the clock of the profile."""
    return float(point["cpu_seconds"] if profile.get("clock") == "cpu" else point["seconds"])


def _at(measured: Sequence[tuple[float, float]], context: float) -> float:
    contexts, seconds = zip(*measured, strict=True)
    return float(np.interp(context, contexts, seconds))
