"""What the simulated engines are asked to do: acceptance, lengths, requests."""

from __future__ import annotations

import json

import numpy as np
import pytest

from paceline.errors import ConfigError
from paceline.sim.acceptance import Acceptance, fit_acceptance
from paceline.sim.lengths import ConstantLengths, EmpiricalLengths, LognormalLengths, load_lengths
from paceline.sim.published import published
from paceline.sim.workload import make_requests
from paceline.spec.stats import expected_tokens


def test_tokens_of_an_iteration_are_the_law_that_the_engines_report():
    acceptance = Acceptance((0.9, 0.7, 0.0, 0.5))
    for k in range(5):
        assert float(acceptance.tokens(k)) == pytest.approx(expected_tokens(acceptance.conditional, k), rel=1e-12)
    assert acceptance.tokens(0) == 1.0


def test_tokens_equal_the_mean_of_drawn_verify_steps():
    """400,000 drawn verify steps; the bound is six standard errors, false alarm below 1e-8."""
    acceptance = Acceptance.geometric(0.8, 0.95, 5)
    rng = np.random.default_rng(0)
    accepted = np.cumprod(rng.random((400_000, 5)) < acceptance.conditional, axis=1).sum(axis=1) + 1
    error = 6 * accepted.std() / np.sqrt(len(accepted))
    assert abs(accepted.mean() - acceptance.tokens(5)) < error
    assert abs(accepted.mean() - Acceptance.geometric(0.8, 0.93, 5).tokens(5)) > error


def test_an_acceptance_length_is_met_and_an_impossible_one_refused():
    for k, alpha, decay in ((3, 2.77, 1.0), (5, 4.0, 0.98), (7, 1.0, 1.0), (7, 8.0, 1.0)):
        assert float(Acceptance.from_length(alpha, k, decay).tokens(k)) == pytest.approx(alpha, rel=1e-9)
    with pytest.raises(ConfigError, match=r"3\.5 with k = 2.*between 1 and 3"):
        Acceptance.from_length(3.5, 2)
    with pytest.raises(ConfigError, match="between 1"):
        Acceptance.from_length(0.9, 2)


def test_one_law_meets_the_published_acceptance_lengths_at_three_k():
    """Within 1 %; a law without decay, taken from k = 3 alone, is too high at k = 7."""
    for run in ("rl_zero", "rl_think"):
        lengths = {row["k"]: row[run]["tau"] for row in published()["table4_length"]["rows"]}
        fitted = fit_acceptance(lengths)
        for k, alpha in lengths.items():
            assert float(fitted.tokens(k)) == pytest.approx(alpha, rel=0.01)
        alone = Acceptance.from_length(lengths[3], 3)
        assert Acceptance.geometric(alone.conditional[0]).tokens(7) > 1.03 * lengths[7]
        assert fitted.origin.mark == "fitted"


def test_requests_differ_on_the_logit_and_certainty_stays_certain():
    acceptance = Acceptance((0.0, 0.5, 1.0))
    np.testing.assert_allclose(acceptance.shifted(np.array([0.0, 1.0])), [[0, 0.5, 1], [0, 1 / (1 + np.exp(-1)), 1]])
    shifts = np.linspace(-2, 2, 9)
    assert (np.diff(Acceptance.geometric(0.7).tokens(5, shifts)) > 0).all()


def test_fractions_outside_their_range_are_refused():
    with pytest.raises(ConfigError, match="between 0 and 1"):
        Acceptance((0.5, 1.2))
    with pytest.raises(ConfigError, match="spread"):
        Acceptance((0.5,), spread=-1.0)


def test_lognormal_lengths_have_their_mean_and_their_cap():
    """100,000 draws; six standard errors, false alarm below 1e-8."""
    lengths = LognormalLengths(800, 0.6, 10**9).sample(100_000, np.random.default_rng(0))
    assert abs(lengths.mean() - 800) < 6 * lengths.std() / np.sqrt(len(lengths))
    capped = LognormalLengths(800, 1.5, 1000).sample(10_000, np.random.default_rng(0))
    assert capped.max() == 1000 and capped.min() >= 1 and (capped == 1000).mean() > 0.05


def test_a_trace_is_replayed_whole():
    trace = EmpiricalLengths((5, 5, 7, 900))
    drawn = trace.sample(10, np.random.default_rng(0))
    assert sorted(drawn[:8]) == [5, 5, 5, 5, 7, 7, 900, 900]
    assert np.array_equal(np.sort(trace.sample(4, np.random.default_rng(1))), [5, 5, 7, 900])
    # A part of it without repeating any.
    assert len(set(EmpiricalLengths(tuple(range(1, 41))).sample(30, np.random.default_rng(2)))) == 30


def test_lengths_are_read_from_a_trace_or_from_the_metrics_of_a_run(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "\n".join(json.dumps(row) for row in ({"length": 3}, {"step": 1, "lengths": [4, 5]}, {"step": 2})) + "\n\n"
    )
    lengths = load_lengths(path)
    assert lengths.values == (3, 4, 5)
    assert lengths.assumptions()[0].mark == "measured"
    path.write_text('{"length": 3}\n{"length": "long"}\n')
    with pytest.raises(ConfigError, match="line 2"):
        load_lengths(path)
    path.write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match="no lengths"):
        load_lengths(path)


def test_requests_depend_on_the_seed_alone_and_groups_share_prompts():
    options = {"group_size": 4, "prompt_tokens": LognormalLengths(50, 0.5, 200)}
    one, same, other = (make_requests(40, LognormalLengths(100, 1.0, 900), seed=seed, **options) for seed in (1, 1, 2))
    assert np.array_equal(one.lengths, same.lengths) and not np.array_equal(one.lengths, other.lengths)
    assert all(len(set(one.prompts[one.groups == group])) == 1 for group in range(10))
    assert len(set(one.prompts)) > 1
    # Another stream for every quantity: a spread of acceptance moves no length.
    spread = make_requests(40, LognormalLengths(100, 1.0, 900), seed=1, acceptance=Acceptance((0.5,), 0.3), **options)
    assert np.array_equal(one.lengths, spread.lengths) and spread.shifts.any()
    short = make_requests(40, ConstantLengths(5), seed=1, acceptance=Acceptance((0.5,), 0.3))
    assert np.array_equal(short.shifts, spread.shifts)
    for size in (16, 0):
        with pytest.raises(ConfigError, match=f"groups of {size}: choose a positive multiple"):
            make_requests(40, ConstantLengths(5), group_size=size)
    with pytest.raises(ConfigError, match="prompts of -5 tokens"):
        make_requests(40, ConstantLengths(5), prompt_tokens=-5)
