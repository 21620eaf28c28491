"""Acceptance statistics, counted from blocks, and the interval of a paired comparison. No torch: the simulator runs it.

Words: a *verify step* is a block with at least one drafted token. Position j (from 0) is *drafted* in a block with more
than j drafts, *reached* when moreover all earlier positions were accepted, *accepted* when `num_accepted` exceeds j.
Everything is counted before a stop or length cut, because a cut says nothing about the draft.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.types import Block, Completion, EngineStats


@dataclass(frozen=True, slots=True)
class AcceptanceStats:
    """Counts of accepted drafts. Add two of them with `+`; K is the longer of the two.

    Example, one block with 3 drafts, 2 of them accepted: `AcceptanceStats(1, 3, 2, (1, 1, 1), (1, 1, 1), (1, 1, 0))`.
    """

    verify_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_by_position: tuple[int, ...] = ()
    """[K]"""
    reached_by_position: tuple[int, ...] = ()
    """[K] position drafted and every earlier one accepted: the trials of the conditional acceptance."""
    accepted_by_position: tuple[int, ...] = ()
    """[K]"""

    @property
    def alpha(self) -> float | None:
        """Acceptance length: 1 + accepted / verify steps, tokens; None without a verify step."""
        return 1.0 + self.accepted / self.verify_steps if self.verify_steps else None

    @property
    def rate(self) -> float | None:
        """Accepted / drafted, a fraction; None when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def marginal(self) -> tuple[float, ...] | None:
        """[K] share of all verify steps that accepted position j, so that alpha = 1 + sum(marginal).

        The denominator is every verify step, also those that drafted fewer tokens. None without a verify step.
        """
        if not self.verify_steps:
            return None
        return tuple(count / self.verify_steps for count in self.accepted_by_position)

    @property
    def conditional(self) -> tuple[float | None, ...] | None:
        """[K] acceptance of position j among blocks that reached it; None where none did."""
        if not self.verify_steps:
            return None
        pairs = zip(self.accepted_by_position, self.reached_by_position, strict=True)
        return tuple(accepted / reached if reached else None for accepted, reached in pairs)

    def __add__(self, other: AcceptanceStats) -> AcceptanceStats:
        return AcceptanceStats(
            self.verify_steps + other.verify_steps,
            self.drafted + other.drafted,
            self.accepted + other.accepted,
            _add_padded(self.drafted_by_position, other.drafted_by_position),
            _add_padded(self.reached_by_position, other.reached_by_position),
            _add_padded(self.accepted_by_position, other.accepted_by_position),
        )


def acceptance_stats(blocks: Iterable[Block]) -> AcceptanceStats:
    """Count the acceptances of some blocks; blocks without a draft count for nothing.

    Raises ValueError for a block whose `num_accepted` does not fit its drafts or its tokens.
    """
    steps = drafted = accepted = 0
    drafted_at: list[int] = []
    reached_at: list[int] = []
    accepted_at: list[int] = []
    for block in blocks:
        num_drafts = _checked_num_drafts(block)
        if not num_drafts:
            continue
        steps += 1
        drafted += num_drafts
        accepted += block.num_accepted
        for counts in (drafted_at, reached_at, accepted_at):
            counts.extend([0] * (num_drafts - len(counts)))
        for position in range(num_drafts):
            drafted_at[position] += 1
            reached_at[position] += block.num_accepted >= position
            accepted_at[position] += block.num_accepted > position
    return AcceptanceStats(steps, drafted, accepted, tuple(drafted_at), tuple(reached_at), tuple(accepted_at))


def engine_stats(
    blocks: Iterable[Block], engine_steps: int, live_batch: Sequence[tuple[float, int]] = ()
) -> EngineStats:
    """The counters of one `generate` call from its blocks.

    `engine_steps` (forward passes) and `live_batch` ((seconds, requests) at each change) cannot be read off blocks and
    are passed through. `bonus + recovered` is `verify_steps`: each of them ends in exactly one such token.
    """
    blocks = list(blocks)
    acceptance = acceptance_stats(blocks)
    verified = [block for block in blocks if block.draft_token_ids]
    bonus = sum(block.num_accepted == len(block.draft_token_ids) for block in verified)
    return EngineStats(
        engine_steps=engine_steps,
        verify_steps=acceptance.verify_steps,
        drafted=acceptance.drafted,
        accepted=acceptance.accepted,
        bonus=bonus,
        recovered=len(verified) - bonus,
        plain=sum(len(block.token_ids) for block in blocks if not block.draft_token_ids),
        drafted_by_position=acceptance.drafted_by_position,
        accepted_by_position=acceptance.accepted_by_position,
        live_batch=tuple(live_batch),
    )


def mean_request_alpha(requests: Iterable[AcceptanceStats]) -> float | None:
    """Mean over requests of each one's own acceptance length; None when none of them had a verify step.

    Every request with a verify step weighs the same. The pooled figure, `alpha` of their sum, weighs it by its verify
    steps, so that long responses decide it: speed follows that one, and this one says how a typical request fares.
    """
    alphas = [request.alpha for request in requests if request.alpha is not None]
    return statistics.fmean(alphas) if alphas else None


def emitted_by_origin(completions: Iterable[Completion]) -> dict[str, int]:
    """How many tokens of the responses were an `accepted` draft, `recovered`, a `bonus`, or `plain` (no draft stood).

    What a stop or the length limit cut off is not among them: together they are the tokens of the responses.
    """
    counts = dict.fromkeys(("accepted", "recovered", "bonus", "plain"), 0)
    for completion in completions:
        left = len(completion.token_ids)
        for block in completion.blocks:
            num_drafts, num_emitted = len(block.draft_token_ids), min(left, len(block.token_ids))
            left -= num_emitted
            num_accepted = min(num_emitted, block.num_accepted)
            counts["accepted"] += num_accepted
            last = "plain" if num_drafts == 0 else "bonus" if block.num_accepted == num_drafts else "recovered"
            counts[last] += num_emitted - num_accepted
    return counts


def expected_tokens(conditional: Sequence[float], num_draft_tokens: int | None = None) -> float:
    """Expected tokens of a verify step, 1 + c0 + c0 c1 + ..., from conditional acceptances (fractions).

    With all positions equal to c it is (1 - c ** (k + 1)) / (1 - c), equation 1 of arXiv:2211.17192. Raises ValueError
    when `num_draft_tokens` asks for a position whose acceptance is not known.
    """
    num_draft_tokens = len(conditional) if num_draft_tokens is None else num_draft_tokens
    if num_draft_tokens > len(conditional):
        raise ValueError(f"{num_draft_tokens} draft tokens, but acceptances of only {len(conditional)} positions.")
    tokens = reached = 1.0
    for acceptance in conditional[:num_draft_tokens]:
        reached *= acceptance
        tokens += reached
    return tokens


@dataclass(frozen=True, slots=True)
class PairedRatio:
    """How many times smaller b is than a, from pairs measured in turns. Example: `PairedRatio(1.8, 1.6, 2.0, 12)`."""

    median: float
    """Median of a / b."""
    low: float | None
    """Lower end of the interval of the median; None with fewer than two pairs."""
    high: float | None
    pairs: int


def paired_ratio(pairs: Sequence[tuple[float, float]], confidence: float = 0.95, seed: int = 0) -> PairedRatio:
    """Median of a / b with an interval. `pairs` are (a, b) seconds of neighbouring measurements: baseline first.

    Ratios within a pair cancel what both share (a slow minute of the machine), and logs make a / b and b / a symmetric.
    The interval is the wider, on either side, of Student's t on the log-ratios (which leans on them being about normal)
    and a percentile bootstrap of the median (which is too narrow for few pairs).

    Raises ValueError without pairs or for seconds that are not positive and finite.
    """
    if not pairs:
        raise ValueError("paired_ratio needs at least one pair of seconds.")
    if not all(math.isfinite(value) and value > 0 for pair in pairs for value in pair):
        raise ValueError("paired_ratio needs positive, finite seconds.")
    logs = [math.log(a / b) for a, b in pairs]
    middle = statistics.median(logs)
    if len(logs) < 2:
        return PairedRatio(math.exp(middle), None, None, len(logs))
    half = t_quantile(0.5 + confidence / 2, len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    rng = random.Random(seed)
    medians = sorted(statistics.median(rng.choices(logs, k=len(logs))) for _ in range(2000))
    tail = (1.0 - confidence) / 2
    low = min(middle - half, medians[int(tail * (len(medians) - 1))])
    high = max(middle + half, medians[math.ceil((1.0 - tail) * (len(medians) - 1))])
    return PairedRatio(math.exp(middle), math.exp(low), math.exp(high), len(logs))


def t_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's t with an integer number of degrees of freedom, for 0.5 <= probability < 1."""
    if not 0.5 <= probability < 1.0 or degrees < 1:
        raise ValueError(f"t_quantile({probability}, {degrees}): probability in [0.5, 1), degrees at least 1.")
    high = 1.0
    while _t_cdf(high, degrees) < probability:
        high *= 2.0
    low = 0.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_cdf(middle, degrees) < probability else (low, middle)
    return (low + high) / 2


def _t_cdf(t: float, degrees: int) -> float:
    """For t >= 0. Finite sums for integer degrees: Abramowitz and Stegun 26.7.3 and 26.7.4."""
    theta = math.atan(t / math.sqrt(degrees))
    sine, cosine = math.sin(theta), math.cos(theta)
    odd = degrees % 2 == 1
    total, term = 0.0, cosine if odd else 1.0
    for step in range(1 if odd else 0, degrees - 1, 2):
        total += term
        term *= cosine**2 * (step + 1) / (step + 2)
    central = 2 / math.pi * (theta + sine * total) if odd else sine * total
    return 0.5 + central / 2


def _checked_num_drafts(block: Block) -> int:
    num_drafts = len(block.draft_token_ids)
    if not 0 <= block.num_accepted <= num_drafts:
        raise ValueError(f"a block accepted {block.num_accepted} of {num_drafts} drafts: {block}")
    if num_drafts and len(block.token_ids) != block.num_accepted + 1:
        raise ValueError(f"a verify step commits num_accepted + 1 tokens before any cut, this one does not: {block}")
    return num_drafts


def _add_padded(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    size = max(len(left), len(right))
    left, right = (counts + (0,) * (size - len(counts)) for counts in (left, right))
    return tuple(a + b for a, b in zip(left, right, strict=True))
