"""The reward of reasoning-gym's `chain_sum`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.rewards.answers import final_answer
from paceline.rewards.base import Score


def make_score() -> Score:
    """Score the final answer by the task's own scorer: 1 for the number, whatever its form. Without an answer mark the
    last number counts: small chat models rarely write one.

    As that scorer does, a longer number that contains the right one gets the share of its digits that are right.
    """
    decimal_reward = _decimal_reward()

    def score(text: str, answer: str) -> float:
        return float(decimal_reward(final_answer(text), answer))

    return score


def _decimal_reward() -> Callable[[str | None, str], Any]:
    """`reasoning_gym.utils.compute_decimal_reward`, without the package: importing that takes seconds per worker."""
    package = importlib.util.find_spec("reasoning_gym")
    assert package is not None and package.origin is not None, "reasoning-gym is a dependency"
    spec = importlib.util.spec_from_file_location("_reasoning_gym_utils", Path(package.origin).with_name("utils.py"))
    assert spec is not None and spec.loader is not None
    utils = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(utils)
    return utils.compute_decimal_reward
