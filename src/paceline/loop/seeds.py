"""Every random stream of a run, derived from the run's one seed."""

from __future__ import annotations

import hashlib

EVALUATION_STEP = -1
"""Stands for the step in the seeds of an evaluation: all evaluations of a run draw with the same noise."""


def request_seed(run_seed: int, step: int, prompt_id: str, sample: int, attempt: int) -> int:
    """Seed of one completion, 0 <= seed < 2**31.

    A hash and not a sum: neighbouring steps, samples and attempts share nothing, so that no two of them draw with the
    same noise (identical completions within a group teach nothing), and a retried sample never repeats the noise of the
    lost one. 31 bits are what engines accept; among n seeds about n**2 / 2**32 pairs coincide, a few for a run of
    10**5 completions, and then under different prompts or weights.
    """
    return _hash("request", run_seed, step, prompt_id, sample, attempt)


def rank_noise_seed(run_seed: int, step: int) -> int:
    """Seed of the noise that breaks ties of the certificate's ranks; independent of everything that was sampled."""
    return _hash("rank", run_seed, step)


def draft_seed(run_seed: int) -> int:
    """Seed of the choice of what the draft learns from during RL."""
    return _hash("draft", run_seed)


def _hash(*parts: str | int) -> int:
    # repr separates the parts: ("a", 11) and ("a1", 1) differ.
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % 2**31
