"""Laws of steps and asynchronous runs: nothing overlaps at lag 0, and cycles bound the period at any lag."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from paceline.errors import ConfigError
from paceline.sim.acceptance import Acceptance
from paceline.sim.asynchronous import batches_needed, closed_form, simulate_async
from paceline.sim.cost import RooflineCost
from paceline.sim.efficiency import IDEAL
from paceline.sim.figures import Assumption, Origin
from paceline.sim.hardware import hardware
from paceline.sim.layout import Layout
from paceline.sim.lengths import ConstantLengths, LognormalLengths
from paceline.sim.models import model
from paceline.sim.rollout import Engines, simulate_rollout
from paceline.sim.step import from_generation_share, given, modelled, step_speedup, synchronous
from paceline.sim.tabled import tabled
from paceline.sim.workload import Requests, make_requests

GIVEN = Origin("assumed", "for a test")


@dataclass(frozen=True)
class PlainCost:
    """`step_s` per iteration plus `sequence_s` for each live sequence and verified position."""

    step_s: float = 0.01
    sequence_s: float = 0.0

    def iteration_s(self, num_live, cached_tokens, k):
        num_live, _, k = np.broadcast_arrays(num_live, cached_tokens, k)
        return self.step_s + self.sequence_s * num_live * (k + 1.0)

    def prefill_s(self, new_tokens, attention_pairs):
        return np.zeros(np.broadcast(new_tokens, attention_pairs).shape)

    def assumptions(self):
        return [Assumption("cost", "plain", "assumed", "for a test")]


def batches(count: int, size: int = 64, sigma: float = 0.7) -> list[Requests]:
    lengths = ConstantLengths(100) if sigma == 0 else LognormalLengths(100, sigma, 800)
    return [make_requests(size, lengths, seed=seed) for seed in range(count)]


def test_a_synchronous_step_is_the_sum_of_its_stages():
    stages = given(GIVEN, data=0.2, prepare=1.9, logprob=17.8, train=31.3)
    step = synchronous(stages, 100.0)
    assert step.step_s == pytest.approx(151.2)
    assert sum(step.seconds()[name] for name in ("data", "prepare", "generate", "logprob", "train")) == pytest.approx(
        step.step_s
    )


@pytest.mark.parametrize("updates", ["in_flight", "drained"])
def test_lag_0_is_the_synchronous_step(updates):
    stages = given(GIVEN, data=0.1, prepare=0.4, logprob=1.0, train=2.0)
    parts, cost, engines = batches(4), PlainCost(sequence_s=1e-3), Engines(4, 64)
    run = simulate_async(parts, cost, None, 0, engines, stages, lag=0, updates=updates)
    expected = [synchronous(stages, simulate_rollout(part, cost, None, 0, engines)).step_s for part in parts]
    np.testing.assert_allclose(np.diff(run.ready_s, prepend=0.0), expected)
    np.testing.assert_allclose(run.exposed_s, np.array(expected) - stages.total_s)
    assert (run.age == 0).all()


@pytest.mark.parametrize("lag", [1, 2, 3])
@pytest.mark.parametrize("train_s", [0.2, 1.0, 4.0])
def test_the_closed_form_is_the_period_of_the_event_simulation(lag, train_s):
    # Sequences that do not slow each other down: the assumption of the closed form.
    stages = given(GIVEN, prepare=0.05, train=train_s)
    cost, engines = PlainCost(), Engines(2, 10_000)
    run = simulate_async(batches(batches_needed(lag), sigma=0), cost, None, 0, engines, stages, lag=lag)
    period, exposed = closed_form(1.0, stages, lag)
    assert run.period_s == pytest.approx(period, rel=0.02)
    assert run.exposed_generate_s == pytest.approx(exposed, abs=0.02 * period)


@pytest.mark.parametrize("updates", ["in_flight", "drained"])
@pytest.mark.parametrize("lag", [0, 1, 2, 4])
@pytest.mark.parametrize("train_s", [0.0, 0.3])
def test_no_batch_is_older_than_the_lag_and_no_learner_step_comes_before_its_rollouts(train_s, lag, updates):
    stages = given(GIVEN, prepare=0.05, train=train_s)
    run = simulate_async(
        batches(batches_needed(lag)),
        PlainCost(sequence_s=5e-4),
        None,
        0,
        Engines(4, 32),
        stages,
        lag=lag,
        updates=updates,
    )
    assert ((run.age >= 0) & (run.age <= lag)).all()
    # The learner begins when the rollouts are there and the weights of the step before are sent, and no later.
    np.testing.assert_allclose(run.learned_s, run.begun_s + train_s)
    assert (run.first_s >= run.released_s - 1e-9).all()


@pytest.mark.parametrize("train_s", [0.0, 0.3])
@pytest.mark.parametrize("lag", [1, 3])
def test_rollouts_in_flight_are_those_of_releases_that_are_known_from_the_start(lag, train_s):
    # Without a transfer the engines never stop: one clock, and the releases found are all that the run depends on.
    stages = given(GIVEN, train=train_s)
    parts, cost, engines = batches(8), PlainCost(sequence_s=5e-4), Engines(3, 24)
    run = simulate_async(parts, cost, Acceptance((0.8, 0.7)), 2, engines, stages, lag=lag)
    requests = Requests.concatenate(
        [part.released(float(when)) for part, when in zip(parts, run.released_s, strict=True)]
    )
    again = simulate_rollout(requests, cost, Acceptance((0.8, 0.7)), 2, engines)
    np.testing.assert_allclose(run.done_s, again.finish_s.reshape(8, -1).max(axis=1), rtol=1e-9)
    np.testing.assert_allclose(run.first_s, again.admit_s.reshape(8, -1).min(axis=1), rtol=1e-9)
    # And they are the times at which the weights were ready.
    np.testing.assert_allclose(run.released_s[lag + 1 :], run.ready_s[: -lag - 1])
    assert (run.released_s[: lag + 1] == 0).all() and (np.diff(run.released_s) >= 0).all()


def test_groups_are_cut_so_that_every_engine_works_on_every_batch_in_flight_too():
    engines = Engines(8, 64)
    parts = [make_requests(32, ConstantLengths(100), group_size=16, seed=seed) for seed in range(8)]
    # Two groups a batch: uncut, a batch would keep two of the eight engines busy.
    cost = PlainCost(step_s=1e-6, sequence_s=1e-3)
    run = simulate_async(parts, cost, None, 0, engines, given(GIVEN, train=10.0), lag=1)
    alone = simulate_rollout(parts[0], cost, None, 0, engines)
    assert len(set(alone.engine)) == 8
    # Two batches begin together, and the others one by one while the learner is busy.
    np.testing.assert_allclose((run.done_s - run.first_s)[2:], alone.makespan_s, rtol=1e-6)


def test_a_transfer_stops_what_is_in_flight_for_as_long_as_it_takes():
    parts, cost, engines = batches(6), PlainCost(sequence_s=5e-4), Engines(2, 128)
    # A learner so slow that the engines wait for it: the transfers in between lengthen the period by themselves only.
    slow, slower = (
        simulate_async(parts, cost, None, 0, engines, given(GIVEN, prepare=prepare, train=50.0), lag=2)
        for prepare in (0.0, 0.5)
    )
    np.testing.assert_allclose(np.diff(slower.ready_s), np.diff(slow.ready_s) + 0.5)
    # Batches 1 and 2 are generated beside batch 0 and before any transfer; batch 3 begins when the first one has ended.
    np.testing.assert_allclose(slower.done_s[:3], slow.done_s[:3])
    assert slower.first_s[3] == pytest.approx(slower.ready_s[0])


def test_a_batch_takes_as_long_as_alone_and_the_transfers_that_it_is_stopped_by():
    # Sequences that do not slow each other down, and a learner that sends weights while they are decoded.
    parts, cost, engines, prepare_s = batches(9), PlainCost(), Engines(2, 10_000), 0.5
    run = simulate_async(parts, cost, None, 0, engines, given(GIVEN, prepare=prepare_s, train=0.1), lag=2)
    alone_s = [simulate_rollout(part, cost, None, 0, engines).makespan_s for part in parts]
    stops = [
        ((run.learned_s >= first) & (run.ready_s <= done)).sum()
        for first, done in zip(run.first_s, run.done_s, strict=True)
    ]
    assert sum(stops) >= 5
    # A request is admitted between two iterations: up to one of them later than its release.
    np.testing.assert_allclose(run.done_s - run.first_s, np.array(alone_s) + prepare_s * np.array(stops), atol=0.011)


def test_more_lag_never_makes_a_step_longer_while_sequences_do_not_slow_each_other():
    stages = given(GIVEN, prepare=0.05, train=0.5)
    periods = [
        simulate_async(batches(12), PlainCost(), None, 0, Engines(4, 10_000), stages, lag=lag).period_s
        for lag in (0, 1, 2)
    ]
    assert periods[0] > periods[1] >= periods[2] - 1e-9
    assert periods[2] >= stages.total_s - 1e-9


def test_draining_the_engines_costs_time_where_generation_is_the_bottleneck():
    stages = given(GIVEN, prepare=0.05, train=0.1)
    parts, cost, engines = batches(8), PlainCost(sequence_s=5e-4), Engines(4, 64)
    in_flight, drained = (
        simulate_async(parts, cost, None, 0, engines, stages, lag=1, updates=updates)
        for updates in ("in_flight", "drained")
    )
    assert in_flight.period_s < drained.period_s
    # Batches do not mix, and no transfer meets a live sequence.
    assert (drained.first_s[1:] >= drained.done_s[:-1] - 1e-9).all()
    for learned, ready in zip(drained.ready_s - stages.prepare_s, drained.ready_s, strict=True):
        assert ((drained.done_s <= learned + 1e-9) | (drained.first_s >= ready - 1e-9)).all()


def test_an_asynchronous_step_is_never_slower_with_more_accepted():
    stages = given(GIVEN, prepare=0.05, train=0.1)
    parts, cost, engines = batches(8), PlainCost(sequence_s=5e-4), Engines(4, 64)
    periods = [
        simulate_async(parts, cost, Acceptance.from_length(alpha, 3), 3, engines, stages, lag=1).period_s
        for alpha in (1.0, 2.0, 3.0, 4.0)
    ]
    assert periods == sorted(periods, reverse=True)


def test_the_learner_is_a_floor_and_free_generation_reaches_it():
    stages = given(GIVEN, prepare=0.5, logprob=10.0, train=20.0)
    run = simulate_async(batches(8), PlainCost(step_s=1e-5), None, 0, Engines(4, 64), stages, lag=1)
    assert run.period_s == pytest.approx(stages.total_s, rel=1e-3)
    assert run.exposed_generate_s == pytest.approx(0.0, abs=1e-2)
    # Every batch but the first is generated while the learner is one version behind it.
    assert run.mean_age == 1.0


def test_a_step_gains_what_amdahl_allows():
    stages = from_generation_share(100.0, 0.65, GIVEN)
    assert synchronous(stages, 100.0).generation_share == pytest.approx(0.65)
    assert synchronous(stages, 100.0).step_s / synchronous(stages, 100.0 / 2.72).step_s == pytest.approx(
        step_speedup(0.65, 2.72)
    )
    # Published: 2.72x of the rollout is 1.70x of the step.
    assert step_speedup(0.65, 2.72) == pytest.approx(1.70, abs=0.01)


def test_modelled_stages_follow_flop_bytes_and_gpus():
    requests = make_requests(64, ConstantLengths(1000), prompt_tokens=24)
    arguments = (model("qwen3-8b"), hardware("h100"), IDEAL)
    one = modelled(requests, *arguments, 8, weight_bytes=16e9, transport_bytes_per_s=8e9)
    two = modelled(requests, *arguments, 16, weight_bytes=16e9, transport_bytes_per_s=16e9)
    assert one.prepare_s == pytest.approx(2.0) and two.prepare_s == pytest.approx(1.0)
    assert one.train_s == pytest.approx(2 * two.train_s)
    # Three passes instead of one, at their own utilisations.
    assert one.train_s / one.logprob_s == pytest.approx(3 * IDEAL.mfu_logprob / IDEAL.mfu_train)
    # 2 FLOP per parameter and token, and some attention on top.
    dense = 64 * 1024 * 2 * model("qwen3-8b").active_parameters / (8 * 989e12 * IDEAL.mfu_logprob)
    assert dense < one.logprob_s < 1.2 * dense


def test_what_cannot_be_is_refused_with_a_remedy():
    stages = given(GIVEN)
    with pytest.raises(ConfigError, match="lag of -1"):
        simulate_async(batches(4), PlainCost(), None, 0, Engines(1, 8), stages, lag=-1)
    with pytest.raises(ConfigError, match="at least two batches"):
        simulate_async(batches(1), PlainCost(), None, 0, Engines(1, 8), stages, lag=1)
    with pytest.raises(ConfigError, match="generation share of 65"):
        from_generation_share(1.0, 65, GIVEN)
    with pytest.raises(ConfigError, match="0 GB/s never arrive"):
        modelled(
            batches(1)[0],
            model("qwen3-8b"),
            hardware("h100"),
            IDEAL,
            8,
            weight_bytes=16e9,
            transport_bytes_per_s=0.0,
        )
    with pytest.raises(ConfigError, match="stage train"):
        given(GIVEN, train=-1.0)


@pytest.mark.parametrize(("name", "layout"), [("qwen3-8b", Layout(2, 2)), ("qwen3-235b-a22b", Layout(32, 4, 32))])
def test_a_looked_up_cost_is_the_cost(name, layout):
    cost = RooflineCost(hardware("gb200"), model(name), layout)
    live, cached, k = np.array([[1], [7], [300]]), np.array([[50.0], [3e4], [2e6]]), np.array([0, 1, 5])
    np.testing.assert_allclose(
        tabled(cost, 300).iteration_s(live, cached, k), cost.iteration_s(live, cached, k), rtol=1e-9
    )
