"""What a run shows about speculation: its part of a line of metrics.jsonl, and all lines of a run in one summary.

`docs/metrics.md` says what every key means. No torch: `paceline report` reads a run without loading it.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from paceline.engine.base import EngineStep, Rollouts
from paceline.spec.stats import AcceptanceStats, acceptance_stats, emitted_by_origin, mean_request_alpha

ENGINE_PARTS = ("draft", "verify", "sample", "other")
"""What a `generate` call is spent on; `other` is scheduling and bookkeeping."""


def speculation_metrics(rollouts: Rollouts) -> dict[str, Any]:
    """The keys of one step's line that tell how its tokens came about."""
    stats = rollouts.stats
    requests = [acceptance_stats(completion.blocks) for completion in rollouts.completions]
    acceptance = sum(requests, AcceptanceStats())
    drafted = Counter(len(block.draft_token_ids) for completion in rollouts.completions for block in completion.blocks)
    return {
        "emitted": emitted_by_origin(rollouts.completions),
        "verify_steps": stats.verify_steps,
        "engine_steps": stats.engine_steps,
        "engine_s": _engine_seconds(rollouts),
        "acceptance": {
            "alpha": acceptance.alpha,
            "marginal": list(acceptance.marginal or ()),
            "conditional": list(acceptance.conditional or ()),
            "per_request": {
                "pooled": acceptance.alpha,
                "mean": mean_request_alpha(requests),
                "verify_steps": [request.verify_steps for request in requests],
                "accepted": [request.accepted for request in requests],
            },
        },
        "k_histogram": _by_number(drafted),
        "k_chosen": _by_number(Counter(step.num_asked for step in rollouts.steps)),
        "live_batch": [list(change) for change in stats.live_batch],
        "batch_by_step": batch_by_step(rollouts.steps),
    }


def batch_by_step(steps: Sequence[EngineStep]) -> list[list[int]]:
    """[engine steps in a row, requests that committed tokens in each, k that was chosen for them], in order."""
    runs = groupby(steps, key=lambda step: (step.live, step.num_asked))
    return [[len(list(run)), live, num_asked] for (live, num_asked), run in runs]


def speculation_summary(records: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The lines of one run's metrics.jsonl together; None for those that an older version wrote.

    Counts are summed over the run before anything is divided; seconds are medians over its steps.
    """
    if any("emitted" not in record for record in records):
        return None
    requests = [
        AcceptanceStats(verify_steps, accepted=accepted)
        for record in records
        for verify_steps, accepted in zip(
            record["acceptance"]["per_request"]["verify_steps"],
            record["acceptance"]["per_request"]["accepted"],
            strict=True,
        )
    ]
    emitted, chosen, at_position = Counter[str](), Counter[int](), Counter[int]()
    verify_steps = 0
    for record in records:
        emitted.update(record["emitted"])
        chosen.update({int(k): steps for k, steps in record["k_chosen"].items()})
        verify_steps += record["verify_steps"]
        for position, share in enumerate(record["acceptance"]["marginal"]):
            at_position[position] += round(share * record["verify_steps"])
    num_emitted, num_steps = emitted.total(), chosen.total()
    blocks = sum(steps * live for record in records for steps, live, _ in record["batch_by_step"])
    return {
        "per_request": {"pooled": sum(requests, AcceptanceStats()).alpha, "mean": mean_request_alpha(requests)},
        "marginal": [at_position[position] / verify_steps for position in sorted(at_position)],
        "emitted": {origin: count / num_emitted if num_emitted else None for origin, count in emitted.items()},
        "mean_live_batch": blocks / num_steps if num_steps else None,
        "k_chosen": {str(k): chosen[k] / num_steps for k in sorted(chosen)},
        "engine_s": {
            part: _median([(record["engine_s"] or {}).get(part) for record in records]) for part in ENGINE_PARTS
        },
    }


def _engine_seconds(rollouts: Rollouts) -> dict[str, float] | None:
    """By `ENGINE_PARTS`, together the time of the calls; None from an engine that does not say."""
    if rollouts.engine_s is None:
        return None
    parts = asdict(rollouts.engine_s)
    return {**parts, "other": rollouts.seconds - sum(parts.values())}


def _by_number(counts: Mapping[int, int]) -> dict[str, int]:
    return {str(number): counts[number] for number in sorted(counts)}


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
