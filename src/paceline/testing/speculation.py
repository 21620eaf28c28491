"""What every engine's account of a `generate` call must satisfy, whatever it samples."""

from __future__ import annotations

from paceline.engine.base import Rollouts
from paceline.loop.speculation import speculation_metrics


def broken_laws(rollouts: Rollouts) -> list[str]:
    """The conservation laws that `speculation_metrics` of one call, or of several put together, does not keep.

    For an engine that fills `steps` and `engine_s`.
    """
    metrics, stats, seconds = speculation_metrics(rollouts), rollouts.stats, rollouts.engine_s
    per_request, series = metrics["acceptance"]["per_request"], metrics["batch_by_step"]
    blocks = [block for completion in rollouts.completions for block in completion.blocks]
    accepted, verify_steps = sum(per_request["accepted"]), sum(per_request["verify_steps"])
    laws = {
        "origins sum to the tokens of the responses": sum(metrics["emitted"].values())
        == sum(len(completion.token_ids) for completion in rollouts.completions),
        "requests sum to the counters of the engine": (verify_steps, accepted) == (stats.verify_steps, stats.accepted),
        "pooled is 1 + accepted / verify steps": per_request["pooled"]
        == (1 + accepted / verify_steps if verify_steps else None),
        "the live batch sums to the blocks of all requests": sum(steps * live for steps, live, _ in series)
        == len(blocks)
        == sum(metrics["k_histogram"].values()),
        "every engine step is in the series, once": sum(steps for steps, _, _ in series)
        == sum(metrics["k_chosen"].values())
        == stats.engine_steps,
        "nobody drafts more than was chosen": max(len(block.draft_token_ids) for block in blocks)
        <= max(k for _, _, k in series),
        "draft, verify and sample take time, and no more than the call": seconds is not None
        and min(seconds.verify, seconds.sample) > 0
        and (seconds.draft > 0 or stats.drafted == 0)
        and seconds.draft + seconds.verify + seconds.sample <= rollouts.seconds,
    }
    return [law for law, holds in laws.items() if not holds]
