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
    """Measured iterations, and prompts at the fitted cost of a position. Implements `Cost`.

    A calibration times steps in which every sequence has tokens; the prompt's own step is not among them. Its positions
    are charged as those of a verify step, on top of the step that they share with the running sequences.
    """

    def __init__(self, profile: Mapping[str, Any]) -> None:
        """Raises ConfigError for a profile without points, or with holes in its n x k grid."""
        super().__init__({**profile, "points": regular_grid(profile)})
        parameters = profile.get("parameters") or {}
        self._position_s = float(parameters.get("position", 0.0))
        self._attended_s = float(parameters.get("attended", 0.0))

    def prefill_s(self, new_tokens: ArrayLike, attention_pairs: ArrayLike) -> Array:
        """See `Cost.prefill_s`."""
        new_tokens, pairs = np.broadcast_arrays(np.asarray(new_tokens, float), np.asarray(attention_pairs, float))
        return np.where(new_tokens > 0, self._position_s * new_tokens + self._attended_s * pairs, 0.0)

    def assumptions(self) -> list[Assumption]:
        """What was measured, and what a prompt is charged."""
        lines = [line for line in super().assumptions() if line.name != "cost.prefill_s"]
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
            seconds = point["cpu_seconds"] if profile.get("clock") == "cpu" else point["seconds"]
            cells.setdefault((point["n"], point["k"]), []).append((float(point["context"]), float(seconds)))
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


def _at(measured: Sequence[tuple[float, float]], context: float) -> float:
    contexts, seconds = zip(*measured, strict=True)
    return float(np.interp(context, contexts, seconds))
