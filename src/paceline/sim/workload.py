"""The requests of one rollout: everything that is drawn at random is drawn here, once, from a seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline.errors import ConfigError
from paceline.sim.acceptance import Acceptance
from paceline.sim.figures import Assumption
from paceline.sim.lengths import Lengths


@dataclass(frozen=True, slots=True, eq=False)
class Requests:
    """N requests. Comparing two arms means giving both the same one."""

    lengths: np.ndarray
    """[N] response tokens, at least 1."""
    prompts: np.ndarray
    """[N] prompt tokens."""
    groups: np.ndarray
    """[N] requests with the same number have the same prompt; members of a group are neighbours."""
    shifts: np.ndarray
    """[N] added to the logit of every acceptance."""
    release_s: np.ndarray
    """[N] earliest start."""
    notes: tuple[Assumption, ...] = ()

    def __len__(self) -> int:
        return len(self.lengths)

    def released(self, release_s: float) -> Requests:
        """The same requests, none of which may start before `release_s`."""
        return replace(self, release_s=np.full(len(self), float(release_s)))

    @staticmethod
    def concatenate(parts: Sequence[Requests]) -> Requests:
        """Several batches as one; their groups stay apart."""
        groups, first = [], 0
        for part in parts:
            _, local = np.unique(part.groups, return_inverse=True)
            groups.append(local + first)
            first += int(local.max(initial=-1)) + 1
        return Requests(
            np.concatenate([part.lengths for part in parts]),
            np.concatenate([part.prompts for part in parts]),
            np.concatenate(groups),
            np.concatenate([part.shifts for part in parts]),
            np.concatenate([part.release_s for part in parts]),
            tuple(dict.fromkeys(note for part in parts for note in part.notes)),
        )

    def assumptions(self) -> list[Assumption]:
        """How they were made."""
        return list(self.notes)


def make_requests(
    num_requests: int,
    lengths: Lengths,
    *,
    group_size: int = 1,
    prompt_tokens: int | Lengths = 0,
    acceptance: Acceptance | None = None,
    seed: int = 0,
) -> Requests:
    """Draw requests. A group of `group_size` shares one prompt; of `acceptance` only the spread is used.

    Lengths are drawn independently, also within a group. Raises ConfigError when groups would be incomplete.
    """
    if num_requests < 1 or group_size < 1 or num_requests % group_size:
        raise ConfigError(
            f"{num_requests} requests in groups of {group_size}: choose a positive multiple of the group size."
        )
    # Streams of their own: a longer trace or another spread does not change the other draws.
    length_rng, prompt_rng, shift_rng = (np.random.default_rng(part) for part in np.random.SeedSequence(seed).spawn(3))
    num_groups = num_requests // group_size
    if isinstance(prompt_tokens, int):
        if prompt_tokens < 0:
            raise ConfigError(f"prompts of {prompt_tokens} tokens: give 0 (prompts cost nothing) or more.")
        prompts = np.full(num_groups, prompt_tokens, dtype=np.int64)
        note = Assumption("prompt_tokens", prompt_tokens, "assumed", "a constant")
    else:
        prompts = prompt_tokens.sample(num_groups, prompt_rng)
        note = replace(prompt_tokens.assumptions()[0], name="prompt_tokens")
    spread = acceptance.spread if acceptance else 0.0
    return Requests(
        lengths.sample(num_requests, length_rng),
        np.repeat(prompts, group_size),
        np.repeat(np.arange(num_groups), group_size),
        spread * shift_rng.standard_normal(num_requests) if spread else np.zeros(num_requests),
        np.zeros(num_requests),
        (
            Assumption("requests", num_requests, "assumed", f"groups of {group_size}, seed {seed}"),
            *lengths.assumptions(),
            note,
        ),
    )
