"""Laws of the event engine: it equals a token-by-token run, conserves tokens, and does not care about names."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest

from paceline.errors import ConfigError
from paceline.sim.acceptance import Acceptance
from paceline.sim.cost import FP8, RooflineCost
from paceline.sim.figures import Assumption
from paceline.sim.hardware import hardware
from paceline.sim.layout import Layout
from paceline.sim.lengths import ConstantLengths, LognormalLengths
from paceline.sim.models import model
from paceline.sim.rollout import Engines, Rollout, deal, simulate_rollout, speedup
from paceline.sim.schedule import FixedSchedule, TableSchedule, best_schedule
from paceline.sim.token_by_token import token_by_token
from paceline.sim.workload import Requests, make_requests


@dataclass(frozen=True)
class LinearCost:
    """Seconds that can be followed by hand; verifying k drafts costs k / 10 of a step more."""

    step: float = 1.0
    per_position: float = 0.01
    per_cached: float = 1e-4
    per_new: float = 1e-3
    per_pair: float = 1e-7

    def iteration_s(self, num_live, cached_tokens, k):
        positions = num_live * (k + 1.0)
        return self.step * (1 + k / 10) + self.per_position * positions + self.per_cached * cached_tokens

    def prefill_s(self, new_tokens, attention_pairs):
        return self.per_new * new_tokens + self.per_pair * attention_pairs

    def assumptions(self):
        return [Assumption("cost", "linear", "assumed", "test")]


ACCEPTANCE = Acceptance.geometric(0.75, 0.97, 7)
LENGTHS = LognormalLengths(120, 0.7, 600)


def requests_of(count: int, seed: int = 0, **options) -> Requests:
    return make_requests(count, LENGTHS, seed=seed, **options)


TIGHT = 900.0
"""KV tokens: the longest request fits, a full batch does not."""

CASES = {
    "slots for all": (Engines(4, 16), {}),
    "requests wait for slots": (Engines(4, 3), {}),
    "prompts and groups": (Engines(4, 6), {"group_size": 4, "prompt_tokens": 90}),
    "prompts stored per request": (Engines(4, 6, prefix_sharing=False), {"group_size": 4, "prompt_tokens": 90}),
    "KV cache too small": (Engines(4, 16, TIGHT), {"group_size": 4, "prompt_tokens": 90}),
    "KV cache too small, prompts per request": (Engines(4, 16, TIGHT, False), {"group_size": 4, "prompt_tokens": 90}),
    "one engine, uneven groups": (Engines(3, 5, TIGHT), {"group_size": 8, "prompt_tokens": 40}),
}


@pytest.mark.parametrize("case", CASES)
def test_without_speculation_it_equals_the_token_by_token_run_exactly(case):
    engines, options = CASES[case]
    requests = requests_of(48, **options)
    fast = simulate_rollout(requests, LinearCost(), None, 0, engines)
    slow = token_by_token(requests, LinearCost(), None, 0, engines)
    np.testing.assert_allclose(fast.finish_s, slow.finish_s, rtol=1e-12)
    np.testing.assert_allclose(fast.admit_s, slow.admit_s, rtol=1e-12)
    assert fast.tokens == slow.tokens == requests.lengths.sum()
    assert fast.preemptions == slow.preemptions
    assert (fast.preemptions > 0) == case.startswith("KV") or "uneven" in case


def test_with_certain_acceptance_it_equals_the_token_by_token_run_exactly():
    requests = requests_of(48)
    everything = Acceptance((1.0,) * 4)
    for k in (1, 4):
        fast = simulate_rollout(requests, LinearCost(), everything, k, Engines(4, 5))
        slow = token_by_token(requests, LinearCost(), everything, k, Engines(4, 5))
        np.testing.assert_allclose(fast.finish_s, slow.finish_s, rtol=1e-12)


def test_releases_are_met_at_the_iteration_at_which_a_token_by_token_run_meets_them():
    requests = requests_of(48, group_size=4, prompt_tokens=30)
    requests = replace(requests, release_s=np.repeat([0.0, 55.5, 140.25, 2000.0], 12))
    for engines in (Engines(4, 16), Engines(4, 4), Engines(4, 16, TIGHT)):
        fast = simulate_rollout(requests, LinearCost(), None, 0, engines)
        slow = token_by_token(requests, LinearCost(), None, 0, engines)
        np.testing.assert_allclose(fast.finish_s, slow.finish_s, rtol=1e-12)
        assert (fast.admit_s >= requests.release_s).all()


@pytest.mark.parametrize(("k", "slots"), [(1, 8), (3, 32), (7, 8), (7, 32)])
def test_speculation_is_within_two_per_cent_of_drawn_acceptances(k, slots):
    requests = make_requests(256, LognormalLengths(400, 0.6, 1600), seed=3)
    engines = Engines(8, slots)
    fast = simulate_rollout(requests, LinearCost(), ACCEPTANCE, k, engines)
    slow = [token_by_token(requests, LinearCost(), ACCEPTANCE, k, engines, seed) for seed in range(2)]
    makespans = [run.makespan_s for run in slow]
    assert fast.makespan_s == pytest.approx(np.mean(makespans), rel=0.02)
    ends = [[run.finish_s[fast.engine == row].max() for row in range(8)] for run in slow]
    assert fast.engine_finish_s.mean() == pytest.approx(np.mean(ends), rel=0.01)


def test_speculation_under_a_small_kv_cache_is_within_three_per_cent_of_drawn_acceptances():
    requests = requests_of(96, group_size=4, prompt_tokens=90)
    engines = Engines(2, 24, 1500.0)
    fast = simulate_rollout(requests, LinearCost(), ACCEPTANCE, 3, engines)
    slow = [token_by_token(requests, LinearCost(), ACCEPTANCE, 3, engines, seed).makespan_s for seed in range(3)]
    assert fast.preemptions > 0
    assert fast.makespan_s == pytest.approx(np.mean(slow), rel=0.03)


def test_no_drafts_is_a_speedup_of_exactly_one():
    ratio, baseline, speculative = speedup(requests_of(40), LinearCost(), ACCEPTANCE, 0, Engines(3, 7))
    assert ratio == 1.0
    assert np.array_equal(baseline.finish_s, speculative.finish_s)


def test_a_cost_of_alpha_per_step_buys_exactly_nothing():
    """If verifying costs as many steps as it commits tokens, speculation changes no finish time."""

    @dataclass(frozen=True)
    class Proportional(LinearCost):
        def iteration_s(self, num_live, cached_tokens, k):
            return np.where(np.asarray(k) > 0, 4.0, 1.0) * np.ones_like(num_live, dtype=float)

    requests = make_requests(12, ConstantLengths(400))
    ratio, _, _ = speedup(requests, Proportional(), Acceptance((1.0,) * 3), 3, Engines(2, 6))
    assert ratio == pytest.approx(1.0, rel=1e-12)


def test_speedup_rises_with_acceptance():
    requests = requests_of(64)
    ratios = [
        speedup(requests, LinearCost(), Acceptance.geometric(first, num_positions=5), 5, Engines(4, 16))[0]
        for first in np.linspace(0.0, 1.0, 9)
    ]
    assert all(later > earlier for earlier, later in itertools.pairwise(ratios))
    assert ratios[0] < 1.0 < ratios[-1]


def test_speedup_falls_with_the_batch_and_crosses_one():
    """A verified position costs as much as it does in a busy engine, so a large batch makes drafts a loss."""
    cost = LinearCost(per_position=0.05)
    ratios = []
    for batch in (1, 4, 16, 64, 256):
        requests = make_requests(batch, ConstantLengths(300))
        ratios.append(speedup(requests, cost, ACCEPTANCE, 5, Engines(1, batch))[0])
    assert all(later < earlier for earlier, later in itertools.pairwise(ratios))
    assert ratios[0] > 1.5
    assert ratios[-1] < 1.0


def test_tokens_are_conserved_also_under_preemption():
    for engines, options in CASES.values():
        requests = requests_of(48, **options)
        for k in (0, 3, 7):
            result = simulate_rollout(requests, LinearCost(), ACCEPTANCE, k, engines)
            assert result.tokens == pytest.approx(requests.lengths.sum(), rel=1e-12)
            assert (result.finish_s > result.admit_s).all()


def test_a_large_enough_kv_cache_is_the_same_as_none():
    requests = requests_of(48, group_size=4, prompt_tokens=90)
    free = simulate_rollout(requests, LinearCost(), ACCEPTANCE, 3, Engines(4, 16))
    # What the busiest engine would hold were all its sequences at their ends at once, each prompt stored once.
    queues = deal(requests, Engines(4, 16))
    enough = max(float(requests.lengths[queue].sum()) + 90 * len(queue) / 4 + 4 * len(queue) for queue in queues)
    wide = simulate_rollout(requests, LinearCost(), ACCEPTANCE, 3, Engines(4, 16, enough))
    assert wide.preemptions == free.preemptions == 0
    assert np.array_equal(wide.finish_s, free.finish_s)


def test_a_smaller_kv_cache_gives_the_same_tokens_later():
    requests = requests_of(48, group_size=4, prompt_tokens=90)
    results = [
        simulate_rollout(requests, LinearCost(), ACCEPTANCE, 3, Engines(4, 16, tokens))
        for tokens in (np.inf, 1800, 1200, 900)
    ]
    makespans = [result.makespan_s for result in results]
    assert makespans == sorted(makespans) and makespans[0] < makespans[-1]
    assert results[-1].preemptions > results[0].preemptions == 0
    assert len({round(result.tokens, 6) for result in results}) == 1
    # What a preempted sequence had generated is computed again, not generated again.
    assert results[-1].recomputed_tokens > 0
    assert results[-1].prefill_s.sum() > results[0].prefill_s.sum()


def test_the_kv_cache_is_never_overfull():
    requests = requests_of(48, group_size=4, prompt_tokens=90)
    engines = Engines(4, 16, TIGHT)

    @dataclass(frozen=True)
    class Watching(LinearCost):
        def iteration_s(self, num_live, cached_tokens, k):
            seen.append(np.max(cached_tokens))
            return super().iteration_s(num_live, cached_tokens, k)

    seen: list[float] = []
    simulate_rollout(requests, Watching(), None, 0, replace(engines, prefix_sharing=False))
    # Each live sequence keeps one slot free for the token of the iteration.
    assert TIGHT * 0.8 < max(seen) < TIGHT


def test_a_request_that_can_never_fit_is_refused_with_a_remedy():
    requests = make_requests(4, ConstantLengths(500), prompt_tokens=100)
    with pytest.raises(ConfigError, match=r"needs 601 tokens .* holds 600.*Use more GPUs"):
        simulate_rollout(requests, LinearCost(), None, 0, Engines(1, 4, 600))
    simulate_rollout(requests, LinearCost(), None, 0, Engines(1, 4, 601))


def test_relabelling_requests_changes_nothing():
    requests = requests_of(48)
    engines = Engines(4, 12)
    result = simulate_rollout(requests, LinearCost(), ACCEPTANCE, 3, engines)
    rng = np.random.default_rng(1)
    order = np.arange(48)
    for queue in deal(requests, engines):
        order[queue] = rng.permutation(queue)
    shuffled = Requests(
        requests.lengths[order],
        requests.prompts[order],
        requests.groups,
        requests.shifts[order],
        requests.release_s[order],
    )
    other = simulate_rollout(shuffled, LinearCost(), ACCEPTANCE, 3, engines)
    np.testing.assert_allclose(other.finish_s, result.finish_s[order], rtol=1e-12)


def test_relabelling_engines_changes_nothing():
    requests = requests_of(48, group_size=4, prompt_tokens=50)
    engines = Engines(4, 6, TIGHT)
    result = simulate_rollout(requests, LinearCost(), ACCEPTANCE, 3, engines)
    # Groups are dealt in turn: rotating them by one group moves every queue to the next engine.
    order = np.roll(np.arange(48), 4)
    moved = Requests(
        requests.lengths[order],
        requests.prompts[order],
        np.roll(requests.groups, 4),
        requests.shifts[order],
        requests.release_s[order],
    )
    # The last group becomes the first of its engine's queue, so compare the engines whose queues kept their order.
    other = simulate_rollout(moved, LinearCost(), ACCEPTANCE, 3, engines)
    kept = other.engine != 0
    np.testing.assert_allclose(other.finish_s[kept], result.finish_s[order][kept], rtol=1e-12)


def test_engines_do_not_touch_one_another():
    requests = requests_of(48, group_size=4, prompt_tokens=50)
    together = simulate_rollout(requests, LinearCost(), ACCEPTANCE, 3, Engines(4, 5, TIGHT))
    for queue in deal(requests, Engines(4, 5, TIGHT)):
        alone = Requests(
            *(getattr(requests, name)[queue] for name in ("lengths", "prompts", "groups", "shifts", "release_s"))
        )
        result = simulate_rollout(alone, LinearCost(), ACCEPTANCE, 3, Engines(1, 5, TIGHT))
        np.testing.assert_allclose(result.finish_s, together.finish_s[queue], rtol=1e-12)


def test_a_shared_prompt_is_computed_once_and_stored_once():
    """Four samples of one 200-token prompt, 10 tokens each, on one engine."""
    requests = make_requests(4, ConstantLengths(10), group_size=4, prompt_tokens=200)
    cost = LinearCost(step=0.0, per_position=0.0, per_cached=0.0, per_pair=0.0)
    shared = simulate_rollout(requests, cost, None, 0, Engines(1, 4))
    apart = simulate_rollout(requests, cost, None, 0, Engines(1, 4, prefix_sharing=False))
    assert shared.makespan_s == pytest.approx(0.2)
    assert apart.makespan_s == pytest.approx(0.8)
    # The last iteration finds 200 + 4 x 9 tokens and adds 4; four prompts of their own would not fit.
    assert simulate_rollout(requests, cost, None, 0, Engines(1, 4, 240)).preemptions == 0
    assert simulate_rollout(requests, cost, None, 0, Engines(1, 4, 239)).preemptions > 0
    waiting = simulate_rollout(requests, LinearCost(), None, 0, Engines(1, 4, 245, prefix_sharing=False))
    assert waiting.active()[1].max() == 1


def test_groups_stay_together_and_no_engine_idles():
    requests = requests_of(64, group_size=16)
    for queue in deal(requests, Engines(4, 16)):
        assert len(queue) == 16 and len(set(requests.groups[queue])) == 1
    assert {len(queue) for queue in deal(requests, Engines(16, 16))} == {4}
    assert sorted(np.concatenate(deal(requests, Engines(5, 16)))) == list(range(64))


def test_two_engines_of_one_place_finish_when_worked_out_by_hand():
    """Two engines, one slot each, 1 s a step: 3 + 2 tokens on the first engine, 4 on the second."""
    requests = replace(make_requests(3, ConstantLengths(1)), lengths=np.array([3, 4, 2]))
    cost = LinearCost(per_position=0.0, per_cached=0.0)
    result = simulate_rollout(requests, cost, None, 0, Engines(2, 1))
    assert result.finish_s.tolist() == [3.0, 4.0, 5.0]
    assert result.admit_s.tolist() == [0.0, 0.0, 3.0]
    assert result.engine_finish_s.tolist() == [5.0, 4.0]
    times, live = result.active()
    assert times.tolist() == [0.0, 3.0, 4.0, 5.0] and live.tolist() == [2.0, 2.0, 1.0, 0.0]
    assert result.iterations_by_k() == {0: 9.0}
    assert result.mean_tokens_per_iteration == 1.0


def test_the_schedule_is_asked_with_the_live_batch_of_each_engine():
    # Not a multiple of the engines: their batches differ at every moment.
    requests = requests_of(30)
    schedule = TableSchedule((0, 5, 5, 3, 3, 0, 0, 0, 0))
    result = simulate_rollout(requests, LinearCost(), ACCEPTANCE, schedule, Engines(4, 8))
    segments = result.segments
    assert np.array_equal(segments.k, np.array([schedule(int(n)) for n in segments.live]))
    assert set(result.iterations_by_k()) == {0, 3, 5}


def test_the_best_schedule_is_never_slower_than_the_best_fixed_k_on_its_own_terms():
    cost = LinearCost(per_position=0.2)
    schedule = best_schedule(cost, ACCEPTANCE, range(8), 64, cached_per_live=100)
    live = np.arange(1, 65)
    chosen = np.array([float(ACCEPTANCE.tokens(schedule(n)) / cost.iteration_s(n, n * 100, schedule(n))) for n in live])
    for k in range(8):
        assert (chosen >= float(ACCEPTANCE.tokens(k)) / cost.iteration_s(live, live * 100, k) - 1e-12).all()
    assert schedule(1) > schedule(8) > schedule(64) == 0
    requests = requests_of(64)
    mixed = simulate_rollout(requests, cost, ACCEPTANCE, schedule, Engines(1, 64))
    fixed = [
        simulate_rollout(requests, cost, ACCEPTANCE, FixedSchedule(k), Engines(1, 64)).makespan_s for k in range(8)
    ]
    assert mixed.makespan_s < min(fixed)


def test_a_spread_of_acceptance_between_requests_delays_the_last():
    even = Acceptance.geometric(0.75, num_positions=5)
    uneven = replace(even, spread=0.8)
    engines = Engines(4, 16)
    requests = make_requests(64, ConstantLengths(500), acceptance=uneven)
    assert requests.shifts.std() == pytest.approx(0.8, rel=0.3)
    ratio_even = speedup(replace(requests, shifts=np.zeros(64)), LinearCost(), even, 5, engines)[0]
    ratio_uneven = speedup(requests, LinearCost(), uneven, 5, engines)[0]
    assert ratio_uneven < 0.9 * ratio_even


def test_the_same_seed_gives_the_same_rollout_and_another_seed_another():
    def run(seed: int) -> Rollout:
        return simulate_rollout(requests_of(40, seed), LinearCost(), ACCEPTANCE, 3, Engines(4, 4))

    assert np.array_equal(run(5).finish_s, run(5).finish_s)
    assert run(5).makespan_s != run(6).makespan_s


def test_no_acceptance_for_a_k_is_refused():
    with pytest.raises(ConfigError, match="no acceptance"):
        simulate_rollout(requests_of(8), LinearCost(), None, 2, Engines(1, 8))
    with pytest.raises(ConfigError, match="k = 8, but acceptances of only 7"):
        simulate_rollout(requests_of(8), LinearCost(), ACCEPTANCE, 8, Engines(1, 8))


def test_batches_put_together_run_as_they_would_with_their_own_release_times():
    early, late = requests_of(16, 1, group_size=4), requests_of(16, 2, group_size=4).released(5000.0)
    together = Requests.concatenate([early, late])
    assert np.array_equal(together.groups, np.repeat(np.arange(8), 4))
    both = simulate_rollout(together, LinearCost(), ACCEPTANCE, 3, Engines(2, 8))
    first = simulate_rollout(early, LinearCost(), ACCEPTANCE, 3, Engines(2, 8))
    second = simulate_rollout(late.released(0.0), LinearCost(), ACCEPTANCE, 3, Engines(2, 8))
    np.testing.assert_allclose(both.finish_s[:16], first.finish_s, rtol=1e-12)
    np.testing.assert_allclose(both.finish_s[16:], 5000.0 + second.finish_s, rtol=1e-9)


def test_the_roofline_is_linear_in_the_cache_so_the_event_engine_is_exact_for_it():
    cost = RooflineCost(hardware("gb200"), model("qwen3-8b"), Layout(1, 1), FP8)
    requests = make_requests(12, LognormalLengths(60, 0.5, 200), prompt_tokens=700)
    fast = simulate_rollout(requests, cost, None, 0, Engines(2, 4))
    slow = token_by_token(requests, cost, None, 0, Engines(2, 4))
    np.testing.assert_allclose(fast.finish_s, slow.finish_s, rtol=1e-12)
