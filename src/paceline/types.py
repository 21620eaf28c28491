"""The records that pass between parts. Plain, frozen, no torch.

Shapes: T response tokens of one completion, K draft tokens asked for in one block (`num_draft_tokens`).
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Versions:
    """Which weights produced these tokens. Example: `Versions(policy=7, draft=6)`; `draft` is -1 without a draft."""

    policy: int
    draft: int = -1


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. Always sent to the engine in full, so that no default of a checkpoint can leak in.

    The policy's distribution is the one after temperature, then min-p, then top-k, then top-p: the order of vLLM 0.32.
    Example: `Sampling(temperature=1.0, max_tokens=64, stop_token_ids=(2,))`.
    """

    temperature: float = 1.0
    """0 means greedy: p is one-hot on the most likely token."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose mass reaches top_p (fraction, 0 < top_p <= 1)."""
    min_p: float = 0.0
    """Keep tokens with probability of at least min_p times that of the most likely one (fraction, 0-1)."""
    max_tokens: int = 64
    """Response length limit, the stop token included."""
    stop_token_ids: tuple[int, ...] = ()
    """A response ends with the first of these; it is part of the response."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One task instance. Example: `Prompt(id="train-17", token_ids=(3, 9, 1), answer="18", text="6+9+3=")`."""

    id: str
    token_ids: tuple[int, ...]
    answer: str = ""
    """What the reward compares with; its meaning belongs to the task."""
    text: str = ""
    metadata: dict[str, object] = field(default_factory=dict, hash=False, compare=False)


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to be sampled. `key` = (step, prompt, sample, attempt) and the run seed give `seed`."""

    prompt: Prompt
    sample: int
    """Index of the sample in its group, from 0."""
    seed: int


@dataclass(frozen=True, slots=True)
class Block:
    """What one engine step committed to one request: a verify step, or a plain decode step when nothing was drafted.

    Known before the draw: `num_draft_tokens` and so the slot of every token. Drawn: everything else.
    Example, k = 3, two drafts accepted, the third rejected and recovered as 8:
    `Block(draft_token_ids=(5, 6, 7), num_accepted=2, token_ids=(5, 6, 8), live_batch=16)`.
    """

    draft_token_ids: tuple[int, ...]
    """[K] ids that stood at slots 0..K-1, also the rejected ones. Empty: no draft in this step."""
    num_accepted: int
    """Accepted draft tokens, 0..K, counted before a stop or length cut."""
    token_ids: tuple[int, ...]
    """[num_accepted + 1] committed tokens before any cut: accepted ones, then one recovered or bonus token."""
    live_batch: int = 0
    """Requests that decoded in this engine step."""
    num_asked: int = field(default=0, compare=False)
    """Draft tokens asked for; a look-up may have found fewer. 0 also where it is not known."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled response.

    Example: `Completion(prompt_id="train-17", sample=0, token_ids=(5, 6, 2), finish_reason="stop", ...)`.
    The tokens of `blocks`, concatenated and cut to `len(token_ids)`, are `token_ids`.
    """

    prompt_id: str
    sample: int
    token_ids: tuple[int, ...]
    """[T] response tokens, the stop token included."""
    finish_reason: str
    """`stop` or `length`."""
    blocks: tuple[Block, ...]
    versions: Versions
    seed: int
    logprobs: tuple[float, ...] | None = None
    """[T] engine's log p of each token, p after temperature and filters; None when not asked for."""

    def slots(self) -> list[int]:
        """[T] slot of each response token in its block: 0..K-1 draft slots, K the bonus slot; -1 in a plain step.

        A slot is known before the token is drawn, so the certificate may be split by it; whether the token was accepted
        or recovered is not.
        """
        slots: list[int] = []
        for block in self.blocks:
            if block.draft_token_ids:
                slots.extend(range(len(block.token_ids)))
            else:
                slots.extend([-1] * len(block.token_ids))
        return slots[: len(self.token_ids)]


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """All samples of one prompt with their rewards. `rewards[i] is None`: scoring failed (counted, never 0)."""

    prompt: Prompt
    completions: tuple[Completion, ...]
    rewards: tuple[float | None, ...]
    """[G] one per completion."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters of one `generate` call, summed over its blocks."""

    engine_steps: int
    """Forward passes of the policy that committed tokens."""
    verify_steps: int
    """Blocks (request x engine step) that had at least one draft token."""
    drafted: int
    accepted: int
    bonus: int
    recovered: int
    plain: int
    """Tokens committed in blocks without a draft."""
    drafted_by_position: tuple[int, ...]
    """[K] blocks that drafted position j."""
    accepted_by_position: tuple[int, ...]
    """[K] blocks that accepted position j."""
    live_batch: tuple[tuple[float, int], ...]
    """(seconds since the call began, requests in flight) at each change."""
