"""The protocol that every rollout engine satisfies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from paceline.types import Completion, EngineStats, Request, Sampling, Versions

if TYPE_CHECKING:
    from paceline.engine.publish import PublishReport, Weights


@dataclass(frozen=True, slots=True)
class EngineStep:
    """What one engine step took: from the end of the step before to its own. Example: `EngineStep(0.012, 0.02, 16, 3)`.

    Drafting the tokens, verifying them and sampling are in it; in the first step of a request its prompt is, too.
    """

    seconds: float
    """Wall clock."""
    cpu_seconds: float
    """Processor time of this process, all threads together."""
    live: int
    """Requests that committed tokens."""
    num_asked: int
    """Draft tokens asked for per request; a look-up may have found fewer."""


@dataclass(frozen=True, slots=True)
class EngineSeconds:
    """Seconds of `generate` calls by what they were spent on. Example: `EngineSeconds(0.2, 0.9, 0.3)`.

    What is left of a call is scheduling and bookkeeping. Read off the host's clock and never waiting for a device: on a
    CPU that is the work itself. A GPU works behind the host, and the wait falls to whichever part reads a result first,
    so that there the parts say where the host waited and not what the work cost.
    """

    draft: float
    """Proposing tokens, by a drafter or a look-up."""
    verify: float
    """The policy's passes, from their inputs to their logits; those that read prompts and those without drafts, too."""
    sample: float
    """From logits to committed tokens: filters, acceptances, recovered, bonus and plain tokens."""

    def __add__(self, other: EngineSeconds) -> EngineSeconds:
        return EngineSeconds(self.draft + other.draft, self.verify + other.verify, self.sample + other.sample)


@dataclass(frozen=True, slots=True)
class Rollouts:
    """What one `generate` call returned. `completions[i]` answers `requests[i]`."""

    completions: tuple[Completion, ...]
    stats: EngineStats
    seconds: float
    """Wall clock of the call."""
    steps: tuple[EngineStep, ...] = ()
    """Every engine step of the call, in order."""
    engine_s: EngineSeconds | None = None
    """None from an engine that does not say."""


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

    def publish(self, policy: Weights, versions: Versions) -> PublishReport:
        """Load `policy` (Hugging Face names, all of them) into the live engine and check every tensor it will use.

        At once, or as a stream of chunks, split in any way; whether all came is looked at once, after the last chunk.
        Versions only rise; one that comes back must bring the tensors it had. Prefix caches are reset.

        Raises `PublishError` that names the first tensor that is missing, unknown, came twice, is of a wrong shape or
        dtype, belongs to an older version, or differs in the engine from what was published. The engine is as it was
        when the tensors came at once and did not fit; a publish that failed later leaves it unusable (`generate` raises
        `EngineError`) until a complete one succeeds.
        """
        ...

    def publish_draft(self, draft: Weights, versions: Versions) -> PublishReport:
        """The same for the draft's weights (names as exported by `models.eagle3.export_state`)."""
        ...

    def forget_versions(self) -> None:
        """What is published next belongs to another run: its versions count anew."""
        ...

    def limit_drafts(self, num_draft_tokens: int) -> None:
        """From the next `generate` on draft at most this many tokens, 0 to `self.num_draft_tokens`; 0 is none at all.

        The law of what is sampled stays the same. Raises ValueError for a number out of range.
        """
        ...

    def choose_drafts(self, choose: Callable[[int], int] | None) -> None:
        """From the next `generate` on ask `choose` before every engine step how many tokens to draft.

        It gets the number of running requests and returns k; `limit_drafts` stays the upper bound. It is asked before
        the draft tokens exist and cannot look at them, so the law of what is sampled stays the same. None: always as
        many as the limit allows.
        """
        ...

    def close(self) -> None:
        """Give back memory. The engine cannot be used afterwards."""
        ...
