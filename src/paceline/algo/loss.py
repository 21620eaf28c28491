"""The clipped policy-gradient objective, token by token.

N response tokens of a micro-batch, in any layout: the sum has no notion of sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The loss of one micro-batch, already divided by the token count of the whole batch, so that parts add up."""

    loss: torch.Tensor
    """Scalar, with gradient."""
    num_clipped: int
    """Tokens at which the clipped term was the smaller one: their gradient is 0."""


def clipped_policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    num_tokens: int,
) -> PolicyLoss:
    """-(1/N_total) sum_t min(ratio_t A_t, clip(ratio_t, 1 - clip_low, 1 + clip_high) A_t).

    `logprobs` [N] of the policy being updated, `old_logprobs` [N] of the policy that sampled, `advantages` [N]; all
    under the sampling distribution. `num_tokens` is the number of response tokens of the *whole* batch: every token of
    the batch weighs the same, whatever the length of its response and the split into micro-batches. PPO's clip
    (arXiv:1707.06347) with the two bounds of DAPO (arXiv:2503.14476); its token-level mean too.
    """
    ratio = torch.exp(logprobs - old_logprobs)
    unclipped = ratio * advantages
    clipped = torch.clamp(ratio, 1 - clip_low, 1 + clip_high) * advantages
    loss = -torch.minimum(unclipped, clipped).sum() / num_tokens
    return PolicyLoss(loss, int((clipped < unclipped).sum()))
