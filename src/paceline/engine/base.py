"""The protocol that every rollout engine satisfies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from paceline.types import Completion, EngineStats, Request, Sampling, Versions

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Rollouts:
    """What one `generate` call returned. `completions[i]` answers `requests[i]`."""

    completions: tuple[Completion, ...]
    stats: EngineStats
    seconds: float
    """Wall clock of the call."""


def check_draft_limit(limit: int, num_draft_tokens: int) -> None:
    """Raises ValueError for a limit that an engine built for `num_draft_tokens` cannot take."""
    if not 0 <= limit <= num_draft_tokens:
        raise ValueError(f"limit_drafts({limit}): this engine was built for 0 to {num_draft_tokens} draft tokens.")


class RolloutEngine(Protocol):
    """Generates with the published policy. `num_draft_tokens` is 0 for an engine without speculation."""

    num_draft_tokens: int
    versions: Versions

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Rollouts:
        """Sample one completion per request from exactly the policy's distribution.

        Deterministic in (weights, requests, sampling): each request carries its own seed.
        Raises `EngineError` when the engine's answer cannot be right.
        """
        ...

    def publish(self, policy: Mapping[str, torch.Tensor], versions: Versions) -> None:
        """Load `policy` (Hugging Face names, all of them) into the live engine and check every tensor it will use.

        Raises `PublishError` that names the first missing, extra or differing tensor. Prefix caches are reset.
        """
        ...

    def publish_draft(self, draft: Mapping[str, torch.Tensor], versions: Versions) -> None:
        """The same for the draft's weights (names as exported by `models.eagle3.export_state`)."""
        ...

    def limit_drafts(self, num_draft_tokens: int) -> None:
        """From the next `generate` on draft at most this many tokens, 0 to `self.num_draft_tokens`; 0 is none at all.

        The law of what is sampled stays the same. Raises ValueError for a number out of range.
        """
        ...

    def close(self) -> None:
        """Give back memory. The engine cannot be used afterwards."""
        ...
