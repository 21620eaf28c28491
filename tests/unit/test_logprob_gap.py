"""The engine's log-probs against the trainer's: what is compared, and what the two figures mean."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.train.logprobs import logprob_gap


def test_equal_logprobs_have_no_gap():
    gap = logprob_gap([(-0.5, -1.0), (-2.0,)], [torch.tensor([-0.5, -1.0]), torch.tensor([-2.0])])
    assert gap is not None
    assert (gap.tokens, gap.mean_abs, gap.max_abs, gap.k3_kl) == (3, 0.0, 0.0, 0.0)


def test_the_gap_of_a_known_shift():
    shift = 0.1
    gap = logprob_gap([(-1.0, -1.0)], [torch.tensor([-1.0 + shift, -1.0], dtype=torch.float64)])
    assert gap is not None
    assert gap.mean_abs == pytest.approx(shift / 2)
    assert gap.max_abs == pytest.approx(shift)
    assert gap.k3_kl == pytest.approx((math.exp(shift) - 1 - shift) / 2)


def test_k3_estimates_the_divergence_of_the_trainer_from_the_engine():
    """Tokens drawn from the engine's law: the mean of k3 is KL(engine || trainer), within five standard errors."""
    generator = torch.Generator().manual_seed(3)
    engine, trainer = (torch.randn(12, generator=generator).double().log_softmax(0) for _ in range(2))
    tokens = torch.multinomial(engine.exp(), 200_000, replacement=True, generator=generator)
    gap = logprob_gap([tuple(engine[tokens].tolist())], [trainer[tokens]])
    log_ratio = trainer - engine
    k3 = torch.expm1(log_ratio) - log_ratio
    divergence = (engine.exp() * (engine - trainer)).sum()
    variance = (engine.exp() * k3**2).sum() - divergence**2
    assert gap is not None
    assert abs(gap.k3_kl - divergence) < 5 * math.sqrt(variance / len(tokens))


def test_only_what_the_engine_reported_is_compared():
    assert logprob_gap([None, None], [torch.tensor([-1.0]), torch.tensor([-2.0])]) is None
    gap = logprob_gap([None, (-2.0,)], [torch.tensor([-1.0]), torch.tensor([-2.5])])
    assert gap is not None
    assert gap.tokens == 1 and gap.mean_abs == 0.5


def test_a_token_outside_the_trainers_kept_set_is_left_out():
    gap = logprob_gap([(-1.0, -3.0)], [torch.tensor([-1.0, -math.inf])])
    assert gap is not None
    assert gap.tokens == 1 and gap.max_abs == 0.0
