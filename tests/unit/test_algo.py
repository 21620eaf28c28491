"""Advantages and the clipped loss: exact values, bounds, additivity."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.algo.advantage import group_advantages
from paceline.algo.loss import clipped_policy_loss

BASELINES = ("group_std", "leave_one_out", "mean")


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("size", range(2, 9))
def test_advantages_of_every_binary_pattern_are_bounded_ordered_and_zero_when_constant(baseline, size):
    for pattern in itertools.product([0.0, 1.0], repeat=size):
        advantages = group_advantages(pattern, baseline)
        assert all(math.isfinite(a) and abs(a) <= math.sqrt(size) for a in advantages)
        if len(set(pattern)) == 1:
            assert advantages == [0.0] * size
        else:
            good = {a for a, r in zip(advantages, pattern, strict=True) if r == 1}
            bad = {a for a, r in zip(advantages, pattern, strict=True) if r == 0}
            assert min(good) > 0 > max(bad)


def test_advantages_have_their_hand_worked_values():
    rewards = [1.0, 0.0, 0.0, 0.0]
    assert group_advantages(rewards, "mean") == [0.75, -0.25, -0.25, -0.25]
    assert group_advantages(rewards, "leave_one_out") == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3], abs=1e-15)
    std = math.sqrt(3) / 4
    expected = [0.75 / std, -0.25 / std, -0.25 / std, -0.25 / std]
    assert group_advantages(rewards, "group_std") == pytest.approx(expected, abs=1e-14)


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("rewards", [[0.1] * 3, [1 / 3] * 7, [1.0], [], [None, None], [0.7, None]])
def test_a_group_without_a_contrast_has_no_advantage(baseline, rewards):
    # The mean of three times 0.1 is not 0.1 in floating point: a threshold on the deviation would let that through.
    assert group_advantages(rewards, baseline) == [0.0] * len(rewards)


@pytest.mark.parametrize("baseline", BASELINES)
def test_a_failed_reward_leaves_the_others_as_if_it_had_not_been_sampled(baseline):
    with_failure = group_advantages([1.0, None, 0.0, 0.5], baseline)
    assert with_failure[1] == 0.0
    assert [with_failure[0], *with_failure[2:]] == group_advantages([1.0, 0.0, 0.5], baseline)


@given(st.lists(st.floats(-1e100, 1e100, allow_subnormal=True), min_size=2, max_size=8))
def test_std_normalised_advantages_never_exceed_the_square_root_of_the_group(rewards):
    advantages = group_advantages(rewards, "group_std")
    assert all(abs(a) <= math.sqrt(len(rewards) - 1) * (1 + 1e-9) for a in advantages)


def test_a_reward_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="not finite"):
        group_advantages([1.0, math.nan], "mean")


def _loss(logprobs, old, advantages, num_tokens, low=0.2, high=0.3):
    parts = [torch.tensor(values, dtype=torch.float64) for values in (logprobs, old, advantages)]
    return clipped_policy_loss(*parts, clip_low=low, clip_high=high, num_tokens=num_tokens)


def test_clipped_loss_has_its_hand_worked_values():
    ratios = [1.0, 1.5, 1.5, 0.5, 0.5]
    advantages = [2.0, 1.0, -1.0, 1.0, -1.0]
    # Clipped where the ratio has already moved in the direction that the advantage asks for, and only there.
    terms = [2.0, 1.3, -1.5, 0.5, -0.8]
    result = _loss([math.log(r) for r in ratios], [0.0] * 5, advantages, num_tokens=10)
    assert float(result.loss) == pytest.approx(-sum(terms) / 10, abs=1e-14)
    assert result.num_clipped == 2


def test_the_gradient_on_policy_is_the_advantage_and_behind_the_clip_it_is_zero():
    logprobs = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.0, -3.0, -0.5], dtype=torch.float64)
    advantages = torch.tensor([0.7, 1.0, -2.0], dtype=torch.float64)
    clipped_policy_loss(logprobs, old, advantages, clip_low=0.2, clip_high=0.2, num_tokens=3).loss.backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([-0.7 / 3, 0.0, 2.0 / 3], dtype=torch.float64))


@given(st.integers(1, 11), st.integers(0, 10_000))
def test_losses_of_micro_batches_add_up_to_the_loss_of_the_batch(cut, seed):
    generator = torch.Generator().manual_seed(seed)
    logprobs, old, advantages = (torch.randn(12, generator=generator, dtype=torch.float64).tolist() for _ in range(3))
    whole = _loss(logprobs, old, advantages, 12)
    parts = [_loss(logprobs[s], old[s], advantages[s], 12) for s in (slice(0, cut), slice(cut, 12))]
    assert float(sum(part.loss for part in parts)) == pytest.approx(float(whole.loss), abs=1e-12)
    assert sum(part.num_clipped for part in parts) == whole.num_clipped
