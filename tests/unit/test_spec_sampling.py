"""Logits -> probabilities: invariants over random logits, the filters against a reading of their definition."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from paceline.errors import ConfigError, EngineError
from paceline.spec.sampling import (
    LogitsError,
    draw_uniforms,
    log_probs,
    policy_log_probs,
    policy_probs,
    sample,
    sample_with,
)
from paceline.types import Sampling

PROPERTY = settings(max_examples=80, deadline=None, derandomize=True)
VOCAB = 7
distinct_logits = st.lists(st.integers(-40, 40), min_size=VOCAB, max_size=VOCAB, unique=True).map(
    lambda values: torch.tensor(values, dtype=torch.float64) / 8
)
tied_logits = st.lists(st.integers(-3, 3), min_size=VOCAB, max_size=VOCAB).map(
    lambda values: torch.tensor(values, dtype=torch.float64)
)
filters = {
    "top_k": st.integers(0, VOCAB + 2),
    "top_p": st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    "min_p": st.sampled_from([0.0, 0.1, 0.5, 1.0]),
}
random_samplings = st.builds(Sampling, temperature=st.sampled_from([0.3, 1.0, 2.0]), **filters)
samplings = st.builds(Sampling, temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]), **filters)


def kept(logits, **parameters):
    return log_probs(logits, **parameters) > -torch.inf


@PROPERTY
@given(st.one_of(distinct_logits, tied_logits), samplings)
def test_probabilities_sum_to_one_and_keep_the_order_of_the_logits(logits, sampling):
    probs = policy_probs(logits, sampling)
    assert abs(float(probs.sum()) - 1.0) < 1e-12
    assert probs[logits.argmax()] > 0
    for low in range(VOCAB):
        for high in range(VOCAB):
            if logits[low] < logits[high]:
                assert probs[low] <= probs[high]


@PROPERTY
@given(st.one_of(distinct_logits, tied_logits), random_samplings)
def test_kept_tokens_keep_their_ratios(logits, sampling):
    log_p = policy_log_probs(logits, sampling)
    inside = log_p > -torch.inf
    shift = (log_p - logits / sampling.temperature)[inside]
    assert float(shift.max() - shift.min()) < 1e-12


@PROPERTY
@given(st.one_of(distinct_logits, tied_logits))
def test_kept_sets_are_nested(logits):
    for name, values in {
        "top_k": [1, 2, 3, 5, VOCAB],
        "top_p": [0.05, 0.3, 0.5, 0.9, 0.99, 1.0],
        "min_p": [1.0, 0.5, 0.1, 0.01, 0.0],
    }.items():
        sets = [kept(logits, **{name: value}) for value in values]
        assert all(bool((small <= large).all()) for small, large in itertools.pairwise(sets))
        assert bool(sets[-1].all())


@PROPERTY
@given(st.one_of(distinct_logits, tied_logits), random_samplings, st.permutations(range(VOCAB)))
def test_renaming_the_tokens_renames_the_probabilities(logits, sampling, order):
    order = torch.tensor(order)
    torch.testing.assert_close(
        policy_probs(logits[order], sampling), policy_probs(logits, sampling)[order], rtol=0, atol=1e-12
    )


@PROPERTY
@given(distinct_logits, st.sampled_from([0.13, 0.37, 0.61, 0.89]))
def test_top_p_keeps_the_smallest_set_whose_mass_reaches_it(logits, top_p):
    probs = logits.softmax(-1)
    chosen = kept(logits, top_p=top_p)
    mass = float(probs[chosen].sum())
    assert mass >= top_p
    assert mass - float(probs[chosen].min()) < top_p


def vllm_torch_filters(logits, top_k, top_p, min_p):
    """Transcribed from vLLM 0.32: `MinPLogitsProcessor.apply`, then `apply_top_k_top_p_pytorch`. [N, V]."""
    if min_p:
        probs = logits.softmax(-1)
        logits = logits.masked_fill(probs < probs.amax(-1, keepdim=True) * min_p, -torch.inf)
    ascending, index = logits.sort(dim=-1, descending=False)
    kth = ascending.gather(1, torch.full((len(logits), 1), logits.shape[1] - (top_k or logits.shape[1])))
    ascending = ascending.masked_fill(ascending < kth, -torch.inf)
    if top_p < 1:
        mask = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
        mask[:, -1] = False
        ascending = ascending.masked_fill(mask, -torch.inf)
    return torch.empty_like(logits).scatter_(1, index, ascending).log_softmax(-1)


@pytest.mark.parametrize("min_p", [0.0, 0.05])
@pytest.mark.parametrize("top_p", [0.3, 0.9, 1.0])
@pytest.mark.parametrize("top_k", [0, 1, 20])
def test_filters_are_those_of_vllm_but_for_ties_at_the_edge_of_top_p(top_k, top_p, min_p):
    logits = 2 * torch.randn(50, 200, generator=torch.Generator().manual_seed(0))
    assert torch.equal(
        log_probs(logits, 0.8, top_k, top_p, min_p), vllm_torch_filters(logits / 0.8, top_k, top_p, min_p)
    )
    tied = logits.round()
    ours = log_probs(tied, 0.8, top_k, top_p, min_p) > -torch.inf
    theirs = vllm_torch_filters(tied / 0.8, top_k, top_p, min_p) > -torch.inf
    edge = torch.where(theirs, tied, torch.inf).amin(1, keepdim=True)
    assert torch.equal(ours, tied >= edge) and bool((theirs <= ours).all())
    if top_p == 1.0:
        assert torch.equal(ours, theirs)


def test_min_p_comes_before_top_p():
    logits = torch.tensor([0.5, 0.2, 0.16, 0.14], dtype=torch.float64).log()
    # After min-p the first two hold 5/7 and 2/7, so that the first alone reaches 0.7; before, it held only 0.5.
    assert kept(logits, top_p=0.7, min_p=0.4).tolist() == [True, False, False, False]
    assert kept(logits, top_p=0.7).tolist() == [True, True, False, False]


def test_the_most_likely_token_stays_however_small_top_p():
    logits = torch.tensor([0.0, 3.0, 1.0])
    assert kept(logits, top_p=1e-9).tolist() == [False, True, False]


def test_ties_at_the_edge_of_a_filter():
    logits = torch.tensor([1.0, 1.0, 1.0, 0.0])
    assert kept(logits, top_k=2).tolist() == [True, True, True, False]
    assert kept(logits, top_p=0.5).tolist() == [True, True, True, False]


def test_temperature_zero_is_one_hot_on_the_lowest_most_likely_id():
    logits = torch.tensor([[0.0, 2.0, 2.0], [5.0, -torch.inf, 1.0]])
    expected = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    assert torch.equal(log_probs(logits, 0.0, top_k=2, top_p=0.5, min_p=0.5).exp(), expected)


def test_temperature_per_row_gives_each_row_its_own():
    logits = torch.randn(4, 3, VOCAB, generator=torch.Generator().manual_seed(1))
    temperatures = torch.tensor([0.0, 0.5, 1.0, 1.7])
    together = log_probs(logits, temperatures.unsqueeze(1), top_p=0.9)
    for row, temperature in enumerate(temperatures.tolist()):
        torch.testing.assert_close(together[row], log_probs(logits[row], temperature, top_p=0.9))


def test_half_precision_is_computed_in_float32_and_logits_are_left_alone():
    logits = torch.randn(5, 100, generator=torch.Generator().manual_seed(2)).bfloat16()
    before = logits.clone()
    result = log_probs(logits, 0.7, top_k=10, top_p=0.9, min_p=0.01)
    assert result.dtype == torch.float32 and torch.equal(logits, before)
    assert torch.equal(result, log_probs(logits.float(), 0.7, 10, 0.9, 0.01))


def test_gradient_reaches_kept_logits_only():
    logits = torch.randn(3, VOCAB, requires_grad=True, generator=torch.Generator().manual_seed(3))
    result = log_probs(logits, 0.7, top_k=3)
    result.gather(1, logits.argmax(1, keepdim=True)).sum().backward()
    assert bool(logits.grad.isfinite().all())
    assert torch.equal(logits.grad != 0, result > -torch.inf)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.0), Sampling(top_k=2, top_p=0.5, min_p=0.1)])
@pytest.mark.parametrize("row", [[0.0, torch.nan, 1.0], [0.0, torch.inf, 1.0], [-torch.inf] * 3])
def test_a_row_that_is_no_distribution_is_named(row, sampling):
    logits = torch.zeros(2, 4, 3)
    logits[1, 2] = torch.tensor(row)
    with pytest.raises(LogitsError, match=r"row \(1, 2\)") as caught:
        policy_log_probs(logits, sampling)
    assert isinstance(caught.value, EngineError) and isinstance(caught.value, ValueError)
    with pytest.raises(LogitsError, match="row 2 "):
        policy_log_probs(logits[1], sampling)


@pytest.mark.parametrize(
    "parameters",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": torch.tensor([1.0, -1.0])},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": 1.1},
    ],
)
def test_parameters_out_of_range_are_refused(parameters):
    with pytest.raises(ConfigError, match=next(iter(parameters))):
        log_probs(torch.zeros(2, 3), **parameters)


def test_tokens_without_mass_are_never_drawn():
    probs = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]]).expand(4, -1)
    edge = 1.0 - 2.0**-53
    assert sample_with(probs, torch.tensor([0.0, 0.29, 0.31, edge], dtype=torch.float64)).tolist() == [1, 1, 3, 3]
    for scale in (1e-30, 1 / 3, 0.7, 3.0, 1e30):
        for uniform in (edge, 1.0):
            assert int(sample_with(probs[:1].double() * scale, torch.tensor([uniform], dtype=torch.float64))) == 3


def test_a_row_without_mass_is_refused():
    with pytest.raises(ValueError, match="row 1"):
        sample_with(torch.tensor([[1.0, 0.0], [0.0, 0.0]]), torch.zeros(2))


def test_drawn_tokens_have_the_given_probabilities():
    """Chi-square at a false-alarm rate of 1e-6; a token of half its mass must be caught."""
    probs = torch.tensor([0.05, 0.15, 0.3, 0.5], dtype=torch.float64)
    draws = sample(probs.expand(20_000, -1), torch.Generator().manual_seed(4))
    counts = torch.bincount(draws, minlength=4)
    assert chisquare(counts, probs * len(draws)).pvalue > 1e-6
    wrong = torch.tensor([0.025, 0.175, 0.3, 0.5], dtype=torch.float64)
    assert chisquare(counts, wrong * len(draws)).pvalue < 1e-6


def test_a_rows_noise_does_not_depend_on_its_batch():
    def generators(*seeds):
        return [torch.Generator().manual_seed(seed) for seed in seeds]

    together = draw_uniforms(generators(1, 2, 3), 3, 4)
    assert together.dtype == torch.float64
    assert torch.equal(together[1:2], draw_uniforms(generators(2), 1, 4))
    with pytest.raises(ValueError, match="2 generators for 3 rows"):
        draw_uniforms(generators(1, 2), 3, 4)


def test_the_global_generator_is_never_touched():
    before = torch.get_rng_state()
    sample(torch.ones(3, 4), torch.Generator().manual_seed(0))
    assert torch.equal(before, torch.get_rng_state())
