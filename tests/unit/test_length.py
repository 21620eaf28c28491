"""The choice of k: the argmax it promises, what keeps it honest (probing, fading, buckets), and its costs."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.drafts.length import LengthChooser, alphas, bucket_of
from paceline.drafts.profile import StepCosts
from paceline.spec.stats import expected_tokens
from paceline.types import Block

PROPERTY = settings(max_examples=40, deadline=None, derandomize=True)
LIVE = [1, 2, 4, 8, 16, 32, 64]


def seconds(n: float, k: int) -> float:
    """A machine on which positions are nearly free for few sequences and dear for many."""
    return 0.004 + 0.0004 * k + 0.0001 * n * (k + 1)


def costs(longest: int = 4, step: Callable[[float, int], float] = seconds) -> StepCosts:
    return StepCosts(LIVE, [[step(n, k) for k in range(longest + 1)] for n in LIVE])


def blocks(live: int, k: int, acceptance: Sequence[float], count: int, rng: random.Random) -> list[Block]:
    """Blocks of verify steps with k drafts, each position accepted with its conditional probability."""
    found = []
    for _ in range(count):
        accepted = 0
        while accepted < k and rng.random() < acceptance[accepted]:
            accepted += 1
        found.append(Block((5,) * k, accepted, (5,) * (accepted + 1), live, num_asked=k))
    return found


def informed(acceptance: Sequence[float], live: Sequence[int] = LIVE, count: int = 4000, **options) -> LengthChooser:
    chooser = LengthChooser(costs(len(acceptance)), **options)
    rng = random.Random(1)
    chooser.observe([b for n in live for b in blocks(n, len(acceptance), acceptance, count, rng)])
    return chooser


# -- the argmax ------------------------------------------------------------------------------------------------------


@PROPERTY
@given(st.lists(st.floats(0, 1), max_size=6))
def test_expected_tokens_are_those_of_the_statistics(conditional):
    assert alphas(conditional).tolist() == pytest.approx(
        [expected_tokens(conditional, k) for k in range(len(conditional) + 1)]
    )


@pytest.mark.parametrize("acceptance", [(0.9, 0.85, 0.8, 0.8), (0.7, 0.5, 0.3, 0.2), (0.3, 0.2, 0.1, 0.1), (0.0,) * 4])
def test_the_chosen_k_commits_the_most_tokens_per_second(acceptance):
    chooser = informed(acceptance, margin=0.0)
    for live in LIVE:
        # Middle of its bucket: 3-4 is decided at 3.5 sequences or so.
        first = 2 ** bucket_of(live) // 2 + 1 if live > 1 else 1
        middle = (first * live) ** 0.5
        rates = [expected_tokens(acceptance, k) / seconds(middle, k) for k in range(5)]
        assert rates[chooser.usual(live)] > 0.99 * max(rates)


def test_drafts_get_shorter_as_the_batch_gets_larger_and_end_at_none():
    chooser = informed((0.5, 0.5, 0.4, 0.3))
    chosen = [chooser.usual(live) for live in LIVE]
    assert chosen == sorted(chosen, reverse=True) and chosen[0] >= 2 and chosen[-1] == 0


def test_a_gain_below_the_margin_changes_nothing():
    def flat(n, k):
        return 0.01 * (1 + 0.5 * k)

    def chooser(margin):
        chosen = LengthChooser(costs(1, flat), margin=margin, prior_acceptance=0.0)
        chosen.observe(blocks(8, 1, (0.52,), 20_000, random.Random(3)))
        return chosen.usual(8)

    assert chooser(margin=0.0) == 1
    assert chooser(margin=0.05) == 0


def test_a_bucket_is_a_power_of_two():
    assert [bucket_of(n) for n in (1, 2, 3, 4, 5, 8, 9, 16, 64, 65)] == [0, 1, 2, 2, 3, 3, 4, 4, 6, 7]


# -- what is not seen ------------------------------------------------------------------------------------------------


def drive(chooser: LengthChooser, acceptance: Sequence[float], live: int, calls: int, rng: random.Random) -> list[int]:
    """Generate calls of 30 steps with a constant batch; k of every step."""
    asked = []
    for _ in range(calls):
        found = []
        for _ in range(30):
            k = chooser.choose(live)
            asked.append(k)
            found += blocks(live, k, acceptance, live, rng)
        chooser.observe(found)
    return asked


@pytest.mark.parametrize(("probe_share", "found"), [(0.02, True), (0.0, False)])
def test_probing_finds_what_k_zero_hides(probe_share, found):
    """A draft that was useless becomes good. Without probing steps nobody would know."""
    rng = random.Random(5)
    chooser = LengthChooser(costs(), probe_share=probe_share)
    drive(chooser, (0.0,) * 4, live=16, calls=10, rng=rng)
    assert chooser.usual(16) == 0
    drive(chooser, (0.95,) * 4, live=16, calls=30, rng=rng)
    assert (chooser.usual(16) > 0) is found


def test_probing_costs_at_most_its_share_of_the_time():
    for live, share in itertools.product((1, 16, 64), (0.01, 0.05)):
        rng = random.Random(6)
        chooser = LengthChooser(costs(16), probe_share=share)
        drive(chooser, (0.0,) * 16, live, calls=5, rng=rng)
        asked = drive(chooser, (0.0,) * 16, live, calls=40, rng=rng)
        extra = sum(seconds(live, k) - seconds(live, 0) for k in asked)
        plain = sum(seconds(live, 0) for _ in asked)
        # One bucket's middle stands for all its sizes: its costs are off by at most the factor of a half bucket.
        assert 0 < extra <= 1.5 * share * plain
        assert sum(k > 0 for k in asked) <= share * len(asked) + 1


def test_old_evidence_fades():
    """A draft that was good and went bad is left within a few calls; with evidence that never fades it is not."""
    for half_life, left in ((8.0, True), (1e9, False)):
        rng = random.Random(7)
        chooser = LengthChooser(costs(), half_life=half_life)
        drive(chooser, (0.9,) * 4, live=32, calls=40, rng=rng)
        assert chooser.usual(32) > 0
        drive(chooser, (0.1,) * 4, live=32, calls=12, rng=rng)
        assert (chooser.usual(32) == 0) is left


def test_drafts_that_are_a_little_worse_than_none_are_left_at_once():
    """The margin keeps a k from jumping about; it never keeps drafts that cost more than they bring."""
    chooser = LengthChooser(StepCosts([16], [[0.100, 0.150]]), num_draft_tokens=1)

    def observe(accepted: int, of: int) -> int:
        chooser.observe([Block((5,), int(i < accepted), (5,) * (1 + (i < accepted)), 16, 1) for i in range(of)])
        return chooser.usual(16)

    assert observe(300, 500) == 1
    assert observe(2_400, 5_000) == 0  # 1.49 tokens in 1.5 times the seconds.
    assert observe(25_500, 50_000) == 0  # 1.509: better, but not by the margin.
    assert observe(180_000, 300_000) == 1


def test_the_tail_does_not_speak_for_the_full_batch():
    rng = random.Random(8)
    chooser = LengthChooser(costs())
    full, tail = blocks(64, 4, (0.2,) * 4, 2000, rng), blocks(1, 4, (0.95,) * 4, 6000, rng)
    chooser.observe([*full, *tail])
    assert chooser.usual(1) == 4 and chooser.usual(64) == 0
    pooled = LengthChooser(costs())
    pooled.observe([Block(b.draft_token_ids, b.num_accepted, b.token_ids, 64, b.num_asked) for b in [*full, *tail]])
    assert pooled.usual(64) > 0  # What one statistic for all would have done.


def test_a_batch_size_that_was_never_seen_leans_on_the_others():
    chooser = informed((0.0,) * 4, live=[64])
    assert chooser.usual(1) == 0
    assert informed((0.95,) * 4, live=[64]).usual(1) == 4


def test_rows_without_a_match_count_as_not_accepted():
    """Look-ups match a fifth of the rows and are always right there: a draft for all of them does not pay."""
    matched = [Block((5, 5), 2, (5, 5, 5), 32, num_asked=2)] * 200
    missed = [Block((), 0, (5,), 32, num_asked=2)] * 800
    chooser = LengthChooser(costs(2))
    chooser.observe([*matched, *missed])
    assert chooser.usual(32) == 0
    blind = LengthChooser(costs(2))
    blind.observe(matched)
    assert blind.usual(32) == 2


@pytest.mark.parametrize("seed", range(6))
def test_never_slower_than_no_speculation_beyond_the_probing_share(seed):
    """Random machines, and drafts whose acceptance drifts: the time per token of the whole history."""
    rng = random.Random(seed)
    per_position, per_pass = rng.choice((1e-5, 1e-4, 5e-4)), rng.choice((1e-4, 5e-4, 2e-3))

    def step(n, k):
        return 0.004 + per_pass * k + per_position * n * (k + 1)

    chooser = LengthChooser(costs(4, step))
    spent = plain = 0.0
    acceptance = rng.random()
    for _ in range(80):
        acceptance = min(0.95, max(0.0, acceptance + rng.uniform(-0.04, 0.04)))
        found = []
        for live in (32,) * 8 + (8,) * 8 + (1,) * 16:
            k = chooser.choose(live)
            made = blocks(live, k, (acceptance,) * 4, live, rng)
            spent += step(live, k)
            plain += step(live, 0) * sum(len(block.token_ids) for block in made) / live
            found += made
        chooser.observe(found)
    # The first call is made on an assumed acceptance: of 80 it is about one per cent of the time.
    assert spent < plain * (1 + chooser.probe_share + 0.02)


# -- state and account -----------------------------------------------------------------------------------------------


def test_a_run_that_goes_on_from_a_state_makes_the_same_choices():
    def history(chooser, seed):
        return drive(chooser, (0.6, 0.4, 0.3, 0.2), live=16, calls=6, rng=random.Random(seed))

    through = LengthChooser(costs())
    history(through, 1)
    resumed = LengthChooser(costs())
    resumed.load_state_dict(json.loads(json.dumps(through.state_dict())))
    fresh = LengthChooser(costs())
    assert resumed.explain() == through.explain() != fresh.explain()
    assert history(resumed, 2) == history(through, 2)


def test_a_state_of_another_profile_is_refused():
    state = LengthChooser(costs(4)).state_dict()
    with pytest.raises(ValueError, match=r"another draft\.profile"):
        LengthChooser(costs(3)).load_state_dict(state)


def test_the_account_says_what_was_chosen_and_what_it_gains():
    chooser = informed((0.8, 0.6))
    for choice in chooser.explain():
        assert choice.k == chooser.usual(choice.first) == chooser.usual(choice.last)
        assert choice.gain[0] == 1.0 and choice.gain[choice.k] > max(choice.gain) / 1.03
        assert choice.alpha == pytest.approx((1.0, 1.8, 1.8 + 0.48), abs=0.05)
        assert f"k = {choice.k}" in str(choice) and choice.trials == 4000
    assert json.loads(json.dumps([choice.to_dict() for choice in chooser.explain()]))[0]["first"] == 1


def test_k_beyond_what_was_measured_is_refused():
    with pytest.raises(ValueError, match="measured up to 4 only"):
        LengthChooser(costs(4), num_draft_tokens=5)
    with pytest.raises(ValueError, match="k = 0 to 4 only"):
        costs(4)(8, 5)


# -- tau(n, k) -------------------------------------------------------------------------------------------------------


def test_between_measured_batches_a_power_law_is_met_exactly():
    power = StepCosts([1, 8, 64], [[0.01 * n**0.5 * (1 + k) for k in range(3)] for n in (1, 8, 64)])
    for n in (1, 3, 8, 20, 64):
        for k in range(3):
            assert power(n, k) == pytest.approx(0.01 * n**0.5 * (1 + k))


@PROPERTY
@given(st.lists(st.lists(st.floats(1e-4, 1.0), min_size=4, max_size=4), min_size=3, max_size=3), st.integers(1, 200))
def test_noise_never_makes_more_work_cheaper(measured, live):
    table = StepCosts([1, 8, 64], measured)
    assert (np.diff(table.at(live)) >= -1e-12).all()
    assert (table.at(live + 1) >= table.at(live) - 1e-12).all()


def test_a_table_that_rises_is_kept_as_it_is():
    table = costs(3)
    for n, k in itertools.product(LIVE, range(4)):
        assert table(n, k) == pytest.approx(seconds(n, k))


def test_beyond_the_largest_batch_time_grows_in_proportion():
    table = costs(3)
    assert table(128, 2) == pytest.approx(2 * table(64, 2))
