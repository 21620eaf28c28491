"""How many experts a batch touches, and how unevenly. E experts, each token goes to `top` of them, G ranks.

A verify step multiplies the tokens of a small batch, so it reads more experts than a decode step does: this is what
speculation costs on a mixture of experts.
"""

from __future__ import annotations

import math

import numpy as np

_MOST_POPULAR = 0.98
"""No expert is chosen by more than this share of the tokens."""


def expert_shares(num_experts: int, top: int, skew: float) -> np.ndarray:
    """[E] probability that one token chooses each expert, proportional to rank ** -skew; they sum to `top` or less."""
    weights = np.arange(1, num_experts + 1, dtype=float) ** -skew
    shares = top * weights / weights.sum()
    # With as many choices as experts every token chooses each of them.
    return np.ones(num_experts) if top == num_experts else np.minimum(shares, _MOST_POPULAR)


def hit_probability(tokens: np.ndarray, num_experts: int, top: int, skew: float) -> np.ndarray:
    """Mean over experts of the probability that some of `tokens` tokens chooses it: 1 - (1 - share) ** tokens."""
    shares = expert_shares(num_experts, top, skew)
    missed = np.power(1.0 - shares, np.asarray(tokens, dtype=float)[..., None])
    return 1.0 - missed.mean(axis=-1)


def experts_read(tokens: np.ndarray, num_experts: int, top: int, skew: float, ranks: int) -> np.ndarray:
    """Experts whose weights the busiest of `ranks` ranks reads.

    The mean E/G pe plus what the largest of G about normal counts lies above it; never more than the rank holds or than
    there are choices.
    """
    tokens = np.asarray(tokens, dtype=float)
    hit = hit_probability(tokens, num_experts, top, skew)
    mean = num_experts / ranks * hit
    extra = math.sqrt(2 * math.log(ranks)) * np.sqrt(mean * (1 - hit))
    return np.minimum(np.minimum(num_experts / ranks, tokens * top), mean + extra)


def busiest_tokens(tokens: np.ndarray, top: int, ranks: int) -> np.ndarray:
    """Token-expert pairs on the busiest rank: mean plus sqrt(2 ln G) standard deviations of a Poisson count."""
    mean = np.asarray(tokens, dtype=float) * top / ranks
    return mean + math.sqrt(2 * math.log(ranks)) * np.sqrt(mean)
