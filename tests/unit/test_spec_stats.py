"""Acceptance statistics against hand-worked blocks; the identities between them; the paired interval."""

from __future__ import annotations

import math
import random
import statistics
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from paceline.spec.stats import (
    AcceptanceStats,
    acceptance_stats,
    engine_stats,
    expected_tokens,
    paired_ratio,
    t_quantile,
)
from paceline.types import Block, Completion, Versions

PROPERTY = settings(max_examples=80, deadline=None, derandomize=True)


def block(num_drafts: int, num_accepted: int) -> Block:
    return Block(tuple(range(num_drafts)), num_accepted, tuple(range(num_accepted + 1)))


blocks_strategy = st.lists(
    st.integers(0, 5).flatmap(lambda drafts: st.builds(block, st.just(drafts), st.integers(0, drafts))), max_size=30
)

HAND_WORKED = [block(3, 2), block(3, 0), block(1, 1), block(0, 0), block(2, 2), block(0, 0)]


def test_counts_of_hand_worked_blocks():
    stats = acceptance_stats(HAND_WORKED)
    assert stats == AcceptanceStats(4, 9, 5, (4, 3, 2), (4, 2, 1), (3, 2, 0))
    assert stats.alpha == 1 + 5 / 4
    assert stats.rate == 5 / 9
    assert stats.marginal == (3 / 4, 2 / 4, 0.0)
    # Position 1 was reached twice, though three blocks drafted it: one of them was rejected before.
    assert stats.conditional == (3 / 4, 2 / 2, 0 / 1)


def test_engine_counters_of_hand_worked_blocks():
    stats = engine_stats(HAND_WORKED, engine_steps=3, live_batch=[(0.0, 2), (1.5, 1)])
    assert (stats.engine_steps, stats.verify_steps, stats.drafted, stats.accepted) == (3, 4, 9, 5)
    assert (stats.bonus, stats.recovered, stats.plain) == (2, 2, 2)
    assert stats.drafted_by_position == (4, 3, 2) and stats.accepted_by_position == (3, 2, 0)
    assert stats.live_batch == ((0.0, 2), (1.5, 1))


@PROPERTY
@given(blocks_strategy)
def test_acceptance_length_is_one_plus_the_sum_of_marginals(blocks):
    stats = acceptance_stats(blocks)
    if stats.alpha is None:
        assert not any(b.draft_token_ids for b in blocks)
        return
    assert math.isclose(stats.alpha, 1 + sum(stats.marginal))
    assert math.isclose(stats.rate, sum(stats.accepted_by_position) / sum(stats.drafted_by_position))


@PROPERTY
@given(blocks_strategy)
def test_committed_tokens_are_accepted_bonus_recovered_and_plain_ones(blocks):
    stats = engine_stats(blocks, engine_steps=1)
    assert stats.accepted + stats.bonus + stats.recovered + stats.plain == sum(len(b.token_ids) for b in blocks)
    assert stats.bonus + stats.recovered == stats.verify_steps


@PROPERTY
@given(blocks_strategy, blocks_strategy)
def test_statistics_add(left, right):
    assert acceptance_stats(left) + acceptance_stats(right) == acceptance_stats(left + right)


@PROPERTY
@given(st.lists(st.integers(0, 4), min_size=1, max_size=30))
def test_conditionals_give_the_acceptance_length_when_every_block_drafts_the_same(accepted):
    stats = acceptance_stats([block(4, count) for count in accepted])
    known = [c for c in stats.conditional if c is not None]
    assert math.isclose(expected_tokens(known), stats.alpha)


def test_expected_tokens_of_equal_conditionals_is_the_closed_form():
    assert math.isclose(expected_tokens([0.8] * 4), (1 - 0.8**5) / (1 - 0.8))
    assert expected_tokens([0.8] * 4, 0) == 1.0
    assert math.isclose(expected_tokens([0.5, 0.4, 0.9], 2), 1.7)
    with pytest.raises(ValueError, match="only 2 positions"):
        expected_tokens([0.5, 0.5], 3)


def test_without_drafts_there_is_no_acceptance():
    stats = acceptance_stats([block(0, 0)] * 3)
    assert stats == AcceptanceStats()
    assert stats.alpha is None and stats.rate is None and stats.marginal is None and stats.conditional is None


def test_a_stop_inside_a_block_does_not_lower_the_acceptance():
    cut = Completion("p", 0, (0, 1), "stop", (block(3, 3),), Versions(0), 0)
    assert acceptance_stats(cut.blocks).alpha == 4.0


@pytest.mark.parametrize("broken", [Block((1, 2), 3, (1, 2, 3, 4)), Block((1, 2), 1, (1,)), Block((), 1, (1, 2))])
def test_blocks_that_cannot_be_are_refused(broken):
    with pytest.raises(ValueError, match=r"block|verify step"):
        acceptance_stats([broken])


def test_statistics_import_without_torch_and_numpy():
    code = "import sys, paceline.spec.stats; assert not {'torch', 'numpy', 'scipy'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(filter(None, sys.path))})


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 7, 10, 30, 101])
@pytest.mark.parametrize("probability", [0.5, 0.9, 0.975, 0.9995])
def test_t_quantile_is_that_of_scipy(probability, degrees):
    assert math.isclose(t_quantile(probability, degrees), scipy_stats.t.ppf(probability, degrees), abs_tol=1e-9)


def test_paired_ratio_of_exact_pairs_has_no_width():
    ratio = paired_ratio([(2.0, 1.0), (4.0, 2.0), (1.0, 0.5)])
    assert (ratio.median, ratio.low, ratio.high, ratio.pairs) == pytest.approx((2.0, 2.0, 2.0, 3))


def test_paired_ratio_cancels_what_a_pair_shares_and_is_symmetric():
    rng = random.Random(1)
    pairs = [(1.5 * slow * rng.lognormvariate(0, 0.02), slow) for slow in (rng.uniform(1, 10) for _ in range(12))]
    ratio, inverse = paired_ratio(pairs), paired_ratio([(b, a) for a, b in pairs])
    assert ratio.low < 1.5 < ratio.high and ratio.high / ratio.low < 1.06
    assert inverse.median == pytest.approx(1 / ratio.median)
    assert paired_ratio(pairs) == ratio


def test_paired_interval_covers_an_a_a_comparison_as_often_as_it_says():
    """At least 95 % of 200 intervals, up to chance: below 173 has probability under 1e-6."""
    rng = random.Random(2)
    covered = 0
    for _ in range(200):
        ratio = paired_ratio([(rng.lognormvariate(0, 0.15), rng.lognormvariate(0, 0.15)) for _ in range(6)])
        covered += ratio.low <= 1.0 <= ratio.high
    assert covered >= 173


def test_paired_interval_is_never_narrower_than_students():
    rng = random.Random(3)
    pairs = [(rng.lognormvariate(0.3, 0.2), 1.0) for _ in range(7)]
    logs = [math.log(a / b) for a, b in pairs]
    half = scipy_stats.t.ppf(0.975, 6) * statistics.stdev(logs) / math.sqrt(7)
    ratio = paired_ratio(pairs)
    assert math.log(ratio.low) <= math.log(ratio.median) - half + 1e-9
    assert math.log(ratio.high) >= math.log(ratio.median) + half - 1e-9


def test_one_pair_has_no_interval_and_broken_seconds_are_refused():
    single = paired_ratio([(3.0, 2.0)])
    assert (single.median, single.low, single.high, single.pairs) == (pytest.approx(1.5), None, None, 1)
    for pairs in ([], [(1.0, 0.0)], [(float("nan"), 1.0)], [(1.0, -1.0)]):
        with pytest.raises(ValueError, match="paired_ratio"):
            paired_ratio(pairs)
