"""Never slower: the chosen k against no speculation and every fixed k, the tail of a rollout, and what k = 0 costs."""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from benchmarks.bars import Bar, main, run
from paceline.spec.stats import PairedRatio, paired_ratio

SIZES = (1, 2, 4, 8, 16, 32)
MARGIN = 0.97
"""Not inferior: at least this many times as fast."""
POLICIES: Mapping[str, tuple[str, ...]] = {
    "tiny": ("demo", "--draft.num_draft_tokens", "7", "--draft.depth", "7"),
    "smollm2": (
        "smollm2-chain-sum", "--draft.num_draft_tokens", "7", "--draft.depth", "4", "--draft.num_answers", "256",
        "--draft.epochs", "4", "--sampling.temperature", "1.0", "--engine.max_num_seqs", "64",
        "--sampling.max_tokens", "48",
    ),
}  # fmt: skip
TAIL_GOALS: Mapping[str, float] = {"tiny": 1.8, "smollm2": 1.15}


def cells(policy: str) -> Iterable[Bar]:
    """Batch sizes 1 to 32, n requests that start together."""
    figures = _figures(policy, SIZES, waves=1, repeats=10)
    if figures is None:
        yield Bar(f"cells_{policy}", None, "runs", False)
        return
    by_size = {int(size): part["per_token"] for size, part in figures["sizes"].items()}
    again = {size: _ratio(part["none"], part["none_again"]) for size, part in by_size.items()}
    yield Bar(
        f"a_a_{policy}",
        round(_geometric_mean(again), 3),
        "about 1: an engine without speculation against itself",
        all(ratio.low is not None and ratio.low <= 1 <= (ratio.high or 0) for ratio in again.values()) or "undecided",
        _spread(again),
    )
    yield _not_inferior(
        f"adaptive_over_none_{policy}", {size: _ratio(part["none"], part["adaptive"]) for size, part in by_size.items()}
    )
    best = {size: min(_fixed(part), key=lambda arm: statistics.median(part[arm])) for size, part in by_size.items()}
    ratios = {size: _ratio(part[best[size]], part["adaptive"]) for size, part in by_size.items()}
    yield _not_inferior(f"adaptive_over_best_fixed_{policy}", ratios, {"best_fixed": best})
    yield _not_inferior(
        f"k0_over_none_{policy}", {size: _ratio(part["none"], part["k0"]) for size, part in by_size.items()}
    )
    table = {
        size: {arm: _ratio(part["none"], part[arm]) for arm in [*_fixed(part), "adaptive"]}
        for size, part in by_size.items()
    }
    fastest = {size: max(_fixed(row), key=lambda arm: row[arm].median) for size, row in table.items()}
    yield Bar(
        f"speedup_by_k_{policy}",
        {size: {arm: round(ratio.median, 2) for arm, ratio in row.items()} for size, row in table.items()},
        "an interior best k (neither 0 nor 7) at some batch size",
        any(arm not in ("k0", "k7") for arm in fastest.values()),
        {
            "intervals": {
                size: {arm: [_round(ratio.low), _round(ratio.high)] for arm, ratio in row.items()}
                for size, row in table.items()
            },
            "mean_k_adaptive": {size: part["mean_k"]["adaptive"] for size, part in figures["sizes"].items()},
            "choices": figures["choices"],
        },
    )


def tail(policy: str) -> Iterable[Bar]:
    """Rollouts as in RL: 16 and 64 samples that start together and end one by one."""
    figures = _figures(policy, (16, 64), waves=2, repeats=9)
    if figures is None:
        yield Bar(f"tail_{policy}", None, "runs", False)
        return
    for size, part in figures["sizes"].items():
        seconds = part["per_token"]
        ratio = _ratio(seconds["none"], seconds["adaptive"])
        best = min(_fixed(seconds), key=lambda arm: statistics.median(seconds[arm]))
        low, high = part["length_10_90"]
        yield Bar(
            f"tail_{policy}_{size}",
            round(ratio.median, 3),
            f">= {TAIL_GOALS[policy]}x no speculation, lengths spread by 4x or more",
            ratio.median >= TAIL_GOALS[policy] and high >= 4 * low,
            {
                "low": _round(ratio.low),
                "high": _round(ratio.high),
                "pairs": ratio.pairs,
                "length_10_90": [low, high],
                "speedup_by_arm": {
                    arm: round(_ratio(seconds["none"], seconds[arm]).median, 2) for arm in [*_fixed(seconds)]
                },
                "choices": figures["choices"],
            },
        )
        yield _not_inferior(
            f"tail_{policy}_{size}_over_best_fixed",
            {int(size): _ratio(seconds[best], seconds["adaptive"])},
            {"best_fixed": best},
        )


def _figures(policy: str, sizes: Sequence[int], waves: int, repeats: int) -> Any:
    recipe, *overrides = POLICIES[policy]
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "figures.json"
        command = [sys.executable, "-m", "benchmarks.speed_runs", f"recipes/{recipe}.toml"]
        numbers = ["--sizes", ",".join(map(str, sizes)), "--waves", str(waves), "--repeats", str(repeats)]
        finished = run([*command, *numbers, "--out", str(out), *overrides])
        return json.loads(out.read_text()) if finished.code == 0 else None


def _fixed(part: Mapping[str, Any]) -> list[str]:
    return [arm for arm in part if arm.startswith("k")]


def _ratio(baseline: Sequence[float], arm: Sequence[float]) -> PairedRatio:
    return paired_ratio(list(zip(baseline, arm, strict=True)))


def _geometric_mean(ratios: Mapping[int, PairedRatio]) -> float:
    return math.exp(statistics.fmean(math.log(ratio.median) for ratio in ratios.values()))


def _not_inferior(name: str, ratios: Mapping[int, PairedRatio], context: Mapping[str, object] | None = None) -> Bar:
    """Holds: the geometric mean over the cells reaches the margin and no cell is significantly below it."""
    below = [size for size, ratio in ratios.items() if ratio.high is not None and ratio.high < MARGIN]
    undecided = [size for size, ratio in ratios.items() if ratio.low is None or ratio.low < MARGIN <= (ratio.high or 0)]
    mean = _geometric_mean(ratios)
    holds: bool | Literal["undecided"] = mean >= MARGIN and not below
    if len(ratios) == 1 and undecided:
        holds = "undecided"
    return Bar(
        name,
        round(mean, 3),
        f"geometric mean >= {MARGIN}, no cell significantly below it",
        holds,
        {**_spread(ratios), "below": below, "undecided": undecided, **(context or {})},
    )


def _spread(ratios: Mapping[int, PairedRatio]) -> dict[str, Any]:
    return {
        "by_size": {
            size: [_round(ratio.low), round(ratio.median, 3), _round(ratio.high)] for size, ratio in ratios.items()
        },
        "pairs": next(iter(ratios.values())).pairs,
    }


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


MEASUREMENTS = {
    **{f"cells_{policy}": lambda policy=policy: cells(policy) for policy in POLICIES},
    **{f"tail_{policy}": lambda policy=policy: tail(policy) for policy in POLICIES},
}

if __name__ == "__main__":
    main(MEASUREMENTS)
