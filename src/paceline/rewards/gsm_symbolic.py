"""The reward of reasoning-gym's `gsm_symbolic`."""

from __future__ import annotations

from decimal import Decimal

from paceline.rewards.answers import as_number, final_answer
from paceline.rewards.base import Score

WRONG_NUMBER = 0.01
"""The task's own scorer gives this to any number that is not the right one."""


def make_score() -> Score:
    """Compare the final answer with the task's: as numbers, or by math-verify when it is an expression.

    The values are those of the task's own scorer, which is not called: it reads the first number of an answer instead
    of the last, and drops its minus sign.
    """
    from math_verify import parse, verify

    def score(text: str, answer: str) -> float:
        found = final_answer(text)
        if found is None:
            return 0.0
        number = as_number(found)
        if number is not None:
            return 1.0 if number == Decimal(answer) else WRONG_NUMBER
        # Its own time limits need SIGALRM and the main thread; the pool's limit ends the process instead.
        gold = parse(f"${answer}$", parsing_timeout=0)
        target = parse(f"\\boxed{{{found}}}", parsing_timeout=0)
        return 1.0 if verify(gold, target, timeout_seconds=0) else 0.0

    return score
