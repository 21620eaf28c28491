"""A cost made of measured points: what it gives back, what it interpolates, and what it refuses."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from paceline.errors import ConfigError
from paceline.sim.acceptance import Acceptance
from paceline.sim.lengths import ConstantLengths
from paceline.sim.measured import MeasuredCost
from paceline.sim.rollout import Engines, simulate_rollout, speedup
from paceline.sim.workload import make_requests


def truth(n, k, context):
    return 0.01 + 0.002 * n * (k + 1) + 1e-6 * n * context + (0.05 if k > 3 else 0.0)


def profile_of(ns=(1, 4, 16), ks=(0, 1, 3, 5), contexts=(100, 1000), seconds=truth) -> dict:
    points = [
        {"n": n, "k": k, "context": context, "seconds": seconds(n, k, context), "repeats": 5, "spread": 0.02}
        for n, k, context in itertools.product(ns, ks, contexts)
    ]
    return {"machine": "test machine", "engine": "reference", "threads": 1, "clock": "wall", "points": points}


def test_measured_points_come_back_as_they_were():
    profile = profile_of()
    cost = MeasuredCost(profile)
    n, k, context, seconds = (
        np.array([float(point[key]) for point in profile["points"]]) for key in ("n", "k", "context", "seconds")
    )
    np.testing.assert_allclose(cost.iteration_s(n, n * context, k), seconds, rtol=1e-12)


def test_between_points_it_is_linear_and_beyond_the_contexts_too():
    cost = MeasuredCost(profile_of())
    assert float(cost.iteration_s(10, 10 * 400, 3)) == pytest.approx(
        # Linear in n at a fixed context per sequence.
        truth(4, 3, 400) / 2 + truth(16, 3, 400) / 2,
        rel=1e-12,
    )
    assert float(cost.iteration_s(4, 4 * 5000, 1)) == pytest.approx(truth(4, 1, 5000), rel=1e-12)
    assert float(cost.iteration_s(4, 0, 1)) == pytest.approx(truth(4, 1, 0), rel=1e-12)
    assert float(cost.iteration_s(4, 400, 2)) == pytest.approx((truth(4, 1, 100) + truth(4, 3, 100)) / 2, rel=1e-12)


def test_noise_that_lets_the_time_fall_with_the_context_does_not_go_on_beyond_it():
    cost = MeasuredCost(profile_of(seconds=lambda n, k, context: truth(n, k, 0) * (1 - 1e-4 * context)))
    assert float(cost.iteration_s(4, 4 * 1000, 1)) == pytest.approx(0.9 * truth(4, 1, 0))
    assert float(cost.iteration_s(4, 4 * 50_000, 1)) == pytest.approx(0.9 * truth(4, 1, 0))


def test_below_the_smallest_batch_the_time_stays():
    cost = MeasuredCost(profile_of(ns=(4, 16)))
    assert float(cost.iteration_s(1, 100, 0)) == pytest.approx(truth(4, 0, 100))


@pytest.mark.parametrize(("n", "k", "match"), [(4, 6, "cannot be extrapolated"), (17, 3, "measured up to n = 16")])
def test_a_larger_k_or_batch_than_measured_is_refused(n, k, match):
    cost = MeasuredCost(profile_of())
    with pytest.raises(ConfigError, match=match):
        cost.iteration_s(np.array([1, n]), np.array([100, n * 100]), np.array([0, k]))
    requests = make_requests(n, ConstantLengths(50))
    with pytest.raises(ConfigError, match=match):
        simulate_rollout(requests, cost, Acceptance((0.5,) * 8), k, Engines(1, n))


def test_an_unmeasured_decode_step_is_refused():
    with pytest.raises(ConfigError, match="measured from 1 to 5"):
        MeasuredCost(profile_of(ks=(1, 5))).iteration_s(4, 400, 0)


def test_a_hole_in_the_grid_is_named():
    profile = profile_of()
    profile["points"] = [
        point for point in profile["points"] if (point["n"], point["k"], point["context"]) != (4, 3, 1000)
    ]
    with pytest.raises(ConfigError, match="hole at n = 4, k = 3, context = 1000"):
        MeasuredCost(profile)
    profile["points"] += [profile["points"][0]]
    with pytest.raises(ConfigError, match="two points"):
        MeasuredCost(profile)


def test_one_context_is_a_constant_and_stated_as_an_assumption():
    cost = MeasuredCost(profile_of(contexts=(256,)))
    assert float(cost.iteration_s(4, 4 * 8000, 3)) == pytest.approx(truth(4, 3, 256))
    marks = {item.name: item.mark for item in cost.assumptions()}
    assert marks == {"cost.iteration_s": "measured", "cost.prefill_s": "assumed", "cost.context": "assumed"}
    assert "test machine" in cost.assumptions()[0].source
    assert len(MeasuredCost(profile_of()).assumptions()) == 2


def test_a_profile_drives_the_engine_as_the_law_it_was_measured_from_does():
    """Linear in n within a cell of the grid and in the context: a dense grid reproduces the law's rollout."""
    cost = MeasuredCost(profile_of(ns=tuple(range(1, 9))))

    class Law:
        def iteration_s(self, num_live, cached_tokens, k):
            extra = np.where(np.asarray(k) > 3, 0.05, 0.0)
            return 0.01 + 0.002 * num_live * (k + 1.0) + 1e-6 * cached_tokens + extra

        def prefill_s(self, new_tokens, attention_pairs):
            return np.zeros_like(new_tokens)

        def assumptions(self):
            return []

    requests = make_requests(16, ConstantLengths(300), prompt_tokens=50)
    acceptance = Acceptance.geometric(0.8, num_positions=5)
    for k in (0, 3, 5):
        ratio, _, found = speedup(requests, cost, acceptance, k, Engines(2, 8))
        expected_ratio, _, expected = speedup(requests, Law(), acceptance, k, Engines(2, 8))
        np.testing.assert_allclose(found.finish_s, expected.finish_s, rtol=1e-9)
        assert ratio == pytest.approx(expected_ratio, rel=1e-9)
    assert speedup(requests, cost, acceptance, 0, Engines(2, 8))[0] == 1.0
