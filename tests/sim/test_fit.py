"""Fitting efficiencies: planted parameters come back, and what cannot be known is said."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from paceline.errors import ConfigError
from paceline.sim.cost import BF16, RooflineCost
from paceline.sim.efficiency import IDEAL, Efficiency
from paceline.sim.figures import Origin
from paceline.sim.fit import Free, fit_efficiency, fit_iterations
from paceline.sim.hardware import hardware
from paceline.sim.layout import Layout
from paceline.sim.models import model

TRUE = {"host_s": 1.5e-3, "host_draft_s": 0.8e-3, "bandwidth_share": 0.65}
FREE = (
    Free("host_s", 0.0, 5e-3, 0.0, 0.05),
    Free("host_draft_s", 0.0, 5e-3, 0.0, 0.05),
    Free("bandwidth_share", 0.8, 0.2, 0.3, 1.0),
)


def cost_of(efficiency: Efficiency) -> RooflineCost:
    return RooflineCost(hardware("h200"), model("qwen3-8b"), Layout(1, 1), BF16, efficiency=efficiency)


def points_of(noise: float = 0.0, ns=(1, 8, 64), ks=(0, 1, 3, 5)) -> list[dict]:
    rng = np.random.default_rng(0)
    truth = cost_of(IDEAL.replace(Origin("assumed", "planted"), **TRUE))
    return [
        {
            "n": n,
            "k": k,
            "context": context,
            "seconds": float(truth.iteration_s(n, n * context, k)) * float(np.exp(noise * rng.standard_normal())),
        }
        for n, k, context in itertools.product(ns, ks, (1000, 8000))
    ]


def test_planted_parameters_come_back_from_single_iterations():
    fit = fit_iterations(points_of(), cost_of, IDEAL, FREE, noise=1e-3)
    for name, value in TRUE.items():
        assert fit.parameters[name] == pytest.approx(value, rel=0.01)
    assert fit.rms < 1e-3 and not fit.at_bounds
    marks = {item.name: item.mark for item in fit.efficiency.assumptions()}
    assert marks["efficiency.host_s"] == "fitted" and marks["efficiency.op_s"] == "published"


def test_noisy_points_give_errors_that_cover_the_planted_values():
    """Six standard errors each: false alarm below 1e-8; a value 30 % off is seen."""
    fit = fit_iterations(points_of(noise=0.01), cost_of, IDEAL, FREE, noise=0.01)
    for name, value in TRUE.items():
        assert abs(fit.parameters[name] - value) < 6 * fit.standard_errors[name]
        assert abs(fit.parameters[name] - 1.3 * value) > 6 * fit.standard_errors[name]
    np.testing.assert_allclose(np.diag(fit.correlation), 1.0)


def test_what_the_points_do_not_say_stays_at_the_prior():
    """Without drafts nothing is known about the host time of the draft."""
    fit = fit_iterations(points_of(ks=(0,)), cost_of, IDEAL, FREE, noise=1e-3)
    assert fit.parameters["host_s"] == pytest.approx(TRUE["host_s"], rel=0.02)
    assert fit.parameters["host_draft_s"] == pytest.approx(0.0, abs=1e-4)
    assert fit.standard_errors["host_draft_s"] == pytest.approx(5e-3, rel=0.05)


def test_a_parameter_that_ends_on_its_bound_is_named():
    fit = fit_iterations(points_of(), cost_of, IDEAL, (Free("host_s", 0.0, 5e-3, 0.0, 1e-3), *FREE[1:]), noise=1e-3)
    assert fit.at_bounds == ("host_s",)


def test_a_prior_outside_its_bounds_is_refused():
    with pytest.raises(ConfigError, match="low <= prior <= high"):
        Free("host_s", 1.0, 1.0, 0.0, 0.5)


def test_residuals_are_log_ratios_of_predicted_to_observed():
    fit = fit_efficiency(
        lambda e: np.array([1.0, 1.0]) * (1 + e.host_s), np.array([1.0, 1.21]), IDEAL, FREE[:1], noise=0.01
    )
    assert fit.residuals[0] - fit.residuals[1] == pytest.approx(np.log(1.21))
    assert fit.rms == pytest.approx(np.sqrt(np.mean(fit.residuals**2)))
