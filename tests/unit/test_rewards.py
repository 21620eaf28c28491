"""Laws of the rewards: what counts as the answer, and that no response can stop or empty the pool."""

from __future__ import annotations

import threading

import pytest

from paceline.config.run import Rewards
from paceline.errors import ConfigError
from paceline.rewards import chain_sum, gsm_symbolic
from paceline.rewards.answers import as_number, final_answer
from paceline.rewards.pool import RewardPool
from paceline.types import Prompt

TOWER = r"\boxed{5^{5^{5^{5^5}}}-4}"
"""math-verify evaluates it for ever when its own time limit is off."""


def prompt(answer: str) -> Prompt:
    return Prompt(id="p", token_ids=(1,), answer=answer)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{33}", "33"),
        (r"first \boxed{12}, no: \boxed{33}.", "33"),
        (r"\boxed{\text{E}}", "E"),
        (r"\boxed{\textbf{(C)}}", "(C)"),
        (r"\boxed{\mathrm{33}}", "33"),
        (r"\boxed{\frac{66}{2}}", r"\frac{66}{2}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{33 \text{ apples}}", "33"),
        (r"\boxed{x = 33}", "33"),
        (r"\boxed{3x}", "3x"),
        (r"\boxed{\boxed{33}}", "33"),
        (r"\boxed{1{,}204}", "1204"),
        (r"\boxed{1\,204}", "1204"),
        (r"\boxed{\$33}", "33"),
        (r"\boxed{-5}", "-5"),
        ("\\boxed{\N{MINUS SIGN}5}", "-5"),
        (r"\boxed{33} and then cut: \boxed{4", "33"),
        (r"\boxed{12}. Answer: 33", "33"),
        (r"Answer: 12, so \boxed{33}", "33"),
        ("16 + 2 = 18. The answer is 18 apples.", "18"),
        ("A: 4 + 4 = 8\nB: 5\nFinal answer: B", "B"),
        ("Final answer: (B)", "B"),
        ("The answer is $33$.", "33"),
        ("**Answer:** 33", "33"),
        ("**Answer: 33**", "33"),
        ("Answer: 16*2 + 1 = 33", "33"),
        (r"Answer: $\frac{66}{2}$", r"\frac{66}{2}"),
        ("52 + 119 + 18 = 189\n#### 189", "189"),
        ("so he pays $1,204.50.", "1,204.50"),
        ("at -3 degrees", "-3"),
        ("there are 4 and then 33", "33"),
        ("no number here", None),
        ("", None),
    ],
)
def test_the_final_answer_is_the_last_balanced_box_or_answer_line(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "value"), [("1,204.50", 1204.5), ("-5", -5), (".5", 0.5), ("33.0", 33), ("+7", 7), ("3.3e1", 33)]
)
def test_numbers_are_read_whatever_their_form(text: str, value: float) -> None:
    number = as_number(text)
    assert number is not None and float(number) == value


@pytest.mark.parametrize("text", ["", "-", "5-4", "x=33", r"\frac{1}{2}", "1.2.3", "12 apples"])
def test_what_is_no_number_is_not_read_as_one(text: str) -> None:
    assert as_number(text) is None


def test_a_sum_is_worth_one_when_right_and_nothing_without_an_answer() -> None:
    score = chain_sum.make_score()
    assert score("5-4=1;Answer:1", "1") == 1.0
    assert score("Answer:01.0", "1") == 1.0
    assert score("Answer:7", "1") == 0.0
    assert score("5-4=1;", "1") == 1.0
    assert score("1+2=3;Answer:", "3") == 0.0
    assert score("5-", "1") == 0.0
    assert score("", "1") == 0.0


def test_the_sums_scorer_is_the_one_of_the_task() -> None:
    import reasoning_gym

    task = reasoning_gym.create_dataset("chain_sum", seed=1, size=8)
    score = chain_sum.make_score()
    for entry in task:
        for given in ("1", "-7", entry["answer"], "+" + entry["answer"].lstrip("-"), entry["answer"] + "0"):
            assert score(f"Answer:{given}", entry["answer"]) == task.score_answer(given, entry)


def test_a_word_problem_is_scored_by_value_and_sign() -> None:
    score = gsm_symbolic.make_score()
    assert score(r"\boxed{33}", "33") == 1.0
    assert score(r"\boxed{33.0}", "33") == 1.0
    assert score(r"\boxed{\frac{66}{2}}", "33") == 1.0
    assert score(r"\boxed{\frac{67}{2}}", "33") == 0.0
    assert score(r"\boxed{-33}", "33") == gsm_symbolic.WRONG_NUMBER
    assert score("no idea", "33") == 0.0


def test_what_hangs_fails_within_the_limit_and_the_pool_stays_full() -> None:
    outcome: list[tuple[list[float | None], int]] = []

    def from_a_thread() -> None:
        # Limits by signal would raise here: only the main thread may set one.
        with RewardPool("gsm_symbolic", Rewards(num_workers=2, timeout_s=1.0)) as pool:
            pool.score([(r"\boxed{33}", prompt("33"))] * 2)
            futures = [pool.submit(TOWER, prompt("33")) for _ in range(20)]
            futures.append(pool.submit(r"\boxed{\frac{66}{2}}", prompt("33")))
            outcome.append(([future.result() for future in futures], pool.failures))

    thread = threading.Thread(target=from_a_thread)
    thread.start()
    thread.join(timeout=300)
    rewards, failures = outcome[0]
    assert rewards == [None] * 20 + [1.0]
    assert failures == 20


def test_rewards_come_back_in_the_order_of_the_responses() -> None:
    with RewardPool("chain_sum", Rewards(num_workers=2, timeout_s=20.0)) as pool:
        rewards = pool.score([(f"Answer:{given}", prompt("3")) for given in (3, 4, 3, 3, 5)])
    assert rewards == [1.0, 0.0, 1.0, 1.0, 0.0]


def test_a_scorer_that_raises_is_a_failure_and_not_a_zero() -> None:
    with RewardPool("gsm_symbolic", Rewards(timeout_s=20.0)) as pool:
        assert pool.score([(r"\boxed{33}", prompt("not a number")), (r"\boxed{33}", prompt("33"))]) == [None, 1.0]
        assert pool.failures == 1
        assert "InvalidOperation" in pool.last_failure


def test_a_worker_that_cannot_start_is_reported_and_not_waited_for() -> None:
    with RewardPool("no_such_task", Rewards()) as pool, pytest.raises(ConfigError, match="no_such_task"):
        pool.score([("Answer:3", prompt("3"))])
