"""Advantages: what each sample of a group is worth beside the others. Plain Python, so that it is the same everywhere.

G samples of one prompt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, assert_never

Baseline = Literal["group_std", "leave_one_out", "mean"]


def group_advantages(rewards: Sequence[float | None], baseline: Baseline) -> list[float]:
    """[G] advantage of each sample of one group.

    - `group_std`: (r - mean) / std over the group, std with divisor n (GRPO, arXiv:2402.03300). No epsilon: the
      quotient is at most sqrt(n - 1) in magnitude for every reward pattern, and a constant group is 0 by definition.
    - `leave_one_out`: r - mean of the other samples (RLOO, arXiv:2402.14740).
    - `mean`: r - mean (without the division, arXiv:2503.20783).

    A reward of None means that scoring failed: that sample takes no part in the baseline and gets advantage 0, so that
    a broken scorer neither punishes nor praises. A group with fewer than two scored samples has no baseline: all 0.
    Raises `ValueError` for a reward that is not finite.
    """
    scored = [r for r in rewards if r is not None]
    if not all(math.isfinite(r) for r in scored):
        raise ValueError(f"a reward is not finite: {list(rewards)}")
    # Comparing the extremes, not a standard deviation with a threshold: the mean of equal floats need not equal them.
    if len(scored) < 2 or max(scored) == min(scored):
        return [0.0] * len(rewards)
    total = math.fsum(scored)
    mean = total / len(scored)
    match baseline:
        case "group_std":
            # Scaled by the largest deviation first: squares of tiny deviations would underflow to 0.
            largest = max(abs(r - mean) for r in scored)
            std = math.sqrt(math.fsum(((r - mean) / largest) ** 2 for r in scored) / len(scored))
            return [0.0 if r is None else (r - mean) / largest / std for r in rewards]
        case "leave_one_out":
            return [0.0 if r is None else r - (total - r) / (len(scored) - 1) for r in rewards]
        case "mean":
            return [0.0 if r is None else r - mean for r in rewards]
        case _:
            assert_never(baseline)
