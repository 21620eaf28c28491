"""Never slower: chosen k against none and every fixed k, the tail of a rollout, what k = 0 costs, and history drafts.

A measurement that ends with an error holds "undecided", with its last line. All but `history_*` share one calibration
when they are run by one command.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.bars import Bar, main, run
from benchmarks.speed_runs import ten_to_ninety
from paceline.config.load import load_recipe
from paceline.spec.stats import PairedRatio, paired_ratio

MARGIN = 0.97
"""Not inferior: at least this many times as fast."""
CLOSE = ("none", "adaptive", "k0", "none_again")
"""Arms that are compared with each other, measured one after another: a slow minute falls on all of them."""
STEP_ARMS = ("none", "k0", "none_again")

Pairs = Sequence[tuple[float, float]]
"""Seconds per token of neighbouring measurements: (baseline, arm)."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What one call of `benchmarks.speed_runs` measures."""

    sizes: str
    """Requests that start together x calls of them, so that few requests still make a measurable time."""
    arms: tuple[str, ...]
    seconds: float
    """Budget of the measurement; every arm is measured six times even so."""
    max_tokens: int | None = None
    """Where responses are cut; None: as the recipe says."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A policy with its draft, and what of it is measured."""

    recipe: str
    overrides: tuple[str, ...]
    cells: Plan
    tail: Plan
    steps: Plan
    tail_goal: float
    """Times as fast as no speculation."""
    history: tuple[str, ...]
    """Overrides of the run with few prompts: whole epochs of whole steps."""
    history_arms: tuple[str, ...]
    cold_start: bool = False
    """The policy is fine-tuned on worked answers to the training prompts first."""


WORKLOADS: Mapping[str, Workload] = {
    "tiny": Workload(
        "demo",
        ("--draft.num_draft_tokens", "7", "--draft.depth", "7"),
        Plan("1x4,2x2,4,8,16,32", (*CLOSE, "k1", "k2", "k3", "k5", "k7"), seconds=270),
        Plan("16x2,64x2", ("none", "adaptive", "k0", "k1", "k2", "k3", "k5", "k7"), seconds=150),
        Plan("1x4,2x2,4,8,16,32", STEP_ARMS, seconds=100),
        tail_goal=1.8,
        history=(
            "--data.num_train", "12", "--algorithm.prompts_per_step", "4", "--run.num_steps", "12",
            "--run.checkpoint_every", "12", "--engine.max_num_seqs", "32", "--engine.kv_cache_gib", "0.5",
        ),
        history_arms=("none", "ngram", "eagle3", "history"),
    ),
    "smollm2": Workload(
        "smollm2-chain-sum",
        (
            "--draft.num_draft_tokens", "3", "--draft.depth", "4", "--draft.num_answers", "256", "--draft.epochs", "4",
            # At temperature 1 most answers to these sums have 10 to 60 tokens, and some go on and on: a real tail.
            "--sampling.temperature", "1.0", "--sampling.max_tokens", "192", "--engine.max_num_seqs", "32",
        ),
        Plan("1x2,2,4,8,16,32", (*CLOSE, "k1", "k2", "k3"), seconds=480, max_tokens=24),
        Plan("16,32", ("none", "adaptive", "k1", "k2"), seconds=420),
        Plan("1x2,2,4,8,16,32", STEP_ARMS, seconds=150, max_tokens=24),
        tail_goal=1.15,
        history=(
            "--data.num_train", "8", "--algorithm.prompts_per_step", "4", "--run.num_steps", "6",
            "--run.checkpoint_every", "6", "--draft.num_draft_tokens", "3",
        ),
        history_arms=("none", "ngram", "history"),
    ),
    "smollm2_cold_start": Workload(
        "smollm2-chain-sum",
        (
            "--data.max_terms", "12", "--data.num_train", "320", "--data.num_eval", "64",
            "--draft.num_draft_tokens", "7", "--draft.depth", "5", "--draft.num_answers", "256", "--draft.epochs", "4",
            # Sums are written with few tokens.
            "--draft.vocab_size", "512",
            "--sampling.temperature", "1.0", "--sampling.max_tokens", "128", "--engine.max_num_seqs", "64",
        ),
        Plan("1x2,2,4,8,16,32", (*CLOSE, "k1", "k2", "k3", "k5", "k7"), seconds=480, max_tokens=24),
        Plan("16,64", ("none", "adaptive", "k1", "k2", "k3", "k5", "k7"), seconds=420),
        Plan("1x2,2,4,8,16,32", STEP_ARMS, seconds=150, max_tokens=24),
        tail_goal=1.15,
        history=(
            # Other sums than those of the cold start.
            "--data.max_terms", "12", "--data.seed", "18", "--data.num_train", "8", "--algorithm.prompts_per_step", "4",
            "--run.num_steps", "6", "--run.checkpoint_every", "6", "--sampling.temperature", "1.0",
            "--sampling.max_tokens", "128", "--draft.num_draft_tokens", "3",
        ),
        history_arms=("none", "ngram", "history"),
        cold_start=True,
    ),
}  # fmt: skip


def cells(policy: str) -> Iterable[Bar]:
    """Batch sizes 1 to 32, n requests that start together."""
    figures = _speeds(policy, WORKLOADS[policy].cells)
    if isinstance(figures, str):
        yield Bar(f"cells_{policy}", figures, "runs", "undecided")
        return
    by_size = {int(size): part["per_token"] for size, part in figures["sizes"].items()}
    again = {size: _ratio(part, "none_again") for size, part in by_size.items()}
    yield Bar(
        f"a_a_{policy}",
        round(_geometric_mean(again), 3),
        "about 1: an engine without speculation against itself",
        all(ratio.low is not None and ratio.low <= 1 <= (ratio.high or 0) for ratio in again.values()) or "undecided",
        _spread(again),
    )
    yield _not_inferior(
        f"adaptive_over_none_{policy}",
        {size: _pairs(part, "none", "adaptive") for size, part in by_size.items()},
        {"adaptive_k": {size: part["adaptive_k"] for size, part in figures["sizes"].items()}},
    )
    best = {size: _best_fixed(part) for size, part in by_size.items()}
    yield _not_inferior(
        f"adaptive_over_best_fixed_{policy}",
        {size: pairs for size, (pairs, _) in best.items()},
        {"best_fixed": {size: arms for size, (_, arms) in best.items()}},
    )
    yield _not_inferior(f"k0_over_none_{policy}", {size: _pairs(part, "none", "k0") for size, part in by_size.items()})
    table = {size: {arm: _ratio(part, arm) for arm in [*_fixed(part), "adaptive"]} for size, part in by_size.items()}
    fastest = {size: max(_fixed(row), key=lambda arm: row[arm].median) for size, row in table.items()}
    shortest, *inside, longest = _fixed(next(iter(by_size.values())))
    yield Bar(
        f"speedup_by_k_{policy}",
        {size: {arm: round(ratio.median, 2) for arm, ratio in row.items()} for size, row in table.items()},
        f"an interior best k (neither {shortest} nor {longest}) at some batch size",
        any(arm in inside for arm in fastest.values()),
        {
            "intervals": {
                size: {arm: [_round(ratio.low), _round(ratio.high)] for arm, ratio in row.items()}
                for size, row in table.items()
            },
            "choices": figures["choices"],
        },
    )


def steps(policy: str) -> Iterable[Bar]:
    """What an engine step without drafts costs where drafts are possible: medians, with half of the batch or more.

    What a call takes depends on how many tokens it happens to sample; a step does not, and a median passes bursts over.
    """
    figures = _speeds(policy, WORKLOADS[policy].steps)
    if isinstance(figures, str):
        yield Bar(f"k0_step_{policy}", figures, "runs", "undecided")
        return
    by_size = {int(size): part["step_s"] for size, part in figures["sizes"].items()}
    if any(None in seconds for part in by_size.values() for seconds in part.values()):
        yield Bar(f"k0_step_{policy}", "a call whose responses all ended at once", "runs", "undecided")
        return
    yield _not_inferior(
        f"a_a_step_{policy}", {size: _pairs(part, "none", "none_again") for size, part in by_size.items()}
    )
    yield _not_inferior(
        f"k0_step_over_none_step_{policy}",
        {size: _pairs(part, "none", "k0") for size, part in by_size.items()},
        {"ms_none": {size: round(1e3 * statistics.median(part["none"]), 2) for size, part in by_size.items()}},
    )


def tail(policy: str) -> Iterable[Bar]:
    """Rollouts as in RL: samples that start together and end one by one."""
    goal = WORKLOADS[policy].tail_goal
    figures = _speeds(policy, WORKLOADS[policy].tail)
    if isinstance(figures, str):
        yield Bar(f"tail_{policy}", figures, "runs", "undecided")
        return
    for size, part in figures["sizes"].items():
        seconds = part["per_token"]
        yield _tail_bar(
            f"tail_{policy}_{size}",
            _ratio(seconds, "adaptive"),
            goal,
            part["length_10_90"],
            {
                "speedup_by_arm": {arm: round(_ratio(seconds, arm).median, 2) for arm in _fixed(seconds)},
                "adaptive_k": part["adaptive_k"],
                "choices": figures["choices"],
            },
        )
        pairs, arms = _best_fixed(seconds)
        yield _not_inferior(f"tail_{policy}_{size}_over_best_fixed", {int(size): pairs}, {"best_fixed": arms})


def _tail_bar(
    name: str, ratio: PairedRatio, goal: float, length_10_90: Sequence[int], context: Mapping[str, object]
) -> Bar:
    low, high = length_10_90
    return Bar(
        name,
        round(ratio.median, 3),
        f">= {goal}x no speculation, lengths spread by 4x or more",
        ratio.median >= goal if high >= 4 * low else "undecided",
        {
            "low": _round(ratio.low),
            "high": _round(ratio.high),
            "pairs": ratio.pairs,
            "length_10_90": [low, high],
            **context,
        },
    )


def history(policy: str) -> Iterable[Bar]:
    """A run over few prompts that come back in every epoch: `history` against the other methods, epoch by epoch."""
    workload = WORKLOADS[policy]
    arms = ["--arms", ",".join(workload.history_arms)]
    epochs = _figures("history_runs", workload.recipe, [*arms, *workload.history, *_policy_of(workload)])
    if isinstance(epochs, str):
        yield Bar(f"history_{policy}", epochs, "runs", "undecided")
        return
    ratios = [{arm: paired_ratio(part["pairs"]) for arm, part in epoch.items() if part["pairs"]} for epoch in epochs]
    yield _not_inferior(
        f"history_{policy}_first_epoch",
        {1: epochs[0]["history"]["pairs"]},
        {"drafted_share": epochs[0]["history"]["drafted_share"]},
    )
    # The samples of a step start together, too, and end one by one; from the second epoch on there is a history.
    later = [part["history"] for part in epochs[1:]]
    yield _tail_bar(
        f"tail_{policy}_history",
        paired_ratio([pair for part in later for pair in part["pairs"]]),
        workload.tail_goal,
        ten_to_ninety([length for part in later for length in part["lengths"]]),
        {},
    )
    last = ratios[-1]["history"]
    yield Bar(
        f"history_{policy}_by_epoch",
        {
            arm: {
                "acceptance_length": [_round(epoch[arm]["alpha"]) for epoch in epochs],
                "speedup": [round(epoch[arm].median, 2) for epoch in ratios],
            }
            for arm in ratios[0]
        },
        "in the last epoch history is faster than none (lower end above 1)",
        _above_one(last),
        {
            arm: {
                "intervals": [[_round(epoch[arm].low), _round(epoch[arm].high)] for epoch in ratios],
                "pairs": ratios[0][arm].pairs,
                "ms_per_token": [_milliseconds(epoch[arm]["pairs"], 1) for epoch in epochs],
                "ms_per_token_of_none_beside_it": [_milliseconds(epoch[arm]["pairs"], 0) for epoch in epochs],
                "drafted_share": [round(epoch[arm]["drafted_share"], 3) for epoch in epochs],
                # Of the steps of the runs themselves, which sample different tokens; waiting for rewards included.
                "speedup_of_own_generate_stages": [
                    round(epoch["none"]["own_generate_s_per_token"] / epoch[arm]["own_generate_s_per_token"], 2)
                    for epoch in epochs
                ],
                "alarms": [alarm for epoch in epochs for alarm in epoch[arm]["alarms"]],
            }
            for arm in ratios[0]
        },
    )


def _speeds(policy: str, plan: Plan) -> Any:
    workload = WORKLOADS[policy]
    words = ["--sizes", plan.sizes, "--arms", ",".join(plan.arms), "--seconds", str(plan.seconds)]
    if plan.max_tokens is not None:
        words += ["--max-tokens", str(plan.max_tokens)]
    profile = Path(_scratch().name) / f"{policy}.json"
    words += ["--profile", str(profile), *workload.overrides, *_policy_of(workload)]
    return _figures("speed_runs", workload.recipe, words)


def _policy_of(workload: Workload) -> list[str]:
    """Overrides that name the policy where the recipe does not."""
    if not workload.cold_start:
        return []
    # Imports torch, which the other measurements here do without.
    from benchmarks.cold_start import cold_started

    folder = cold_started(load_recipe(Path(f"recipes/{workload.recipe}.toml"), workload.overrides))
    return ["--policy.kind", "folder", "--policy.path", str(folder)]


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    """Calibrations of this command, removed when it ends."""
    return tempfile.TemporaryDirectory()


def _figures(module: str, recipe: str, words: Sequence[str]) -> Any:
    """What `benchmarks.MODULE` wrote; a text that says what ended it when it failed."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        command = [sys.executable, "-m", f"benchmarks.{module}", f"recipes/{recipe}.toml", "--out", str(out)]
        finished = run([*command, *words])
        if finished.code == 0:
            return json.loads(out.read_text())
    lines = finished.output.strip().splitlines()
    return f"exit code {finished.code}: {lines[-1] if lines else 'nothing said'}"


def _fixed(part: Mapping[str, Any]) -> list[str]:
    """Arms with a fixed k."""
    return [arm for arm in part if arm.startswith("k")]


def _best_fixed(seconds: Mapping[str, Sequence[float]]) -> tuple[Pairs, list[str]]:
    """Pairs (best fixed k, adaptive), and which k that was for the even and for the odd repeats.

    What is best in one half of the repeats is compared in the other one: the best of noisy figures is better by chance
    where it was chosen. Without speculation k is 0, and that is a candidate where `k0` is no arm.
    """
    candidates = _fixed(seconds) if "k0" in seconds else ["none", *_fixed(seconds)]
    repeats = len(seconds["adaptive"])
    arms = [min(candidates, key=lambda arm: statistics.median(seconds[arm][1 - half :: 2])) for half in (0, 1)]
    return [(seconds[arms[i % 2]][i], seconds["adaptive"][i]) for i in range(repeats)], arms


def _pairs(seconds: Mapping[str, Sequence[float]], baseline: str, arm: str) -> Pairs:
    return list(zip(seconds[baseline], seconds[arm], strict=True))


def _ratio(seconds: Mapping[str, Sequence[float]], arm: str) -> PairedRatio:
    """Times as fast as no speculation."""
    return paired_ratio(_pairs(seconds, "none", arm))


def _geometric_mean(ratios: Mapping[int, PairedRatio]) -> float:
    return math.exp(statistics.fmean(math.log(ratio.median) for ratio in ratios.values()))


def _not_inferior(name: str, cells: Mapping[int, Pairs], context: Mapping[str, object] | None = None) -> Bar:
    """Holds: the geometric mean over the cells reaches the margin and no cell is significantly below it.

    Undecided: the mean does not, and noise may be why; or the only cell has the margin within its interval.
    """
    ratios = {size: paired_ratio(pairs) for size, pairs in cells.items()}
    below = [size for size, ratio in ratios.items() if ratio.high is not None and ratio.high < MARGIN]
    undecided = [size for size, ratio in ratios.items() if ratio.low is None or ratio.low < MARGIN <= (ratio.high or 0)]
    # Measurement by measurement over all cells: its interval is that of the mean.
    means = [
        math.exp(statistics.fmean(math.log(none / seconds) for none, seconds in row))
        for row in zip(*cells.values(), strict=True)
    ]
    interval = paired_ratio([(mean, 1.0) for mean in means])
    mean = _geometric_mean(ratios)
    holds: bool | Literal["undecided"] = mean >= MARGIN and not below
    if len(ratios) == 1:
        holds = "undecided" if undecided else holds
    elif not below and mean < MARGIN <= (interval.high or 0):
        holds = "undecided"
    return Bar(
        name,
        round(mean, 3),
        f"geometric mean >= {MARGIN}, no cell significantly below it",
        holds,
        {
            "low": _round(interval.low),
            "high": _round(interval.high),
            **_spread(ratios),
            "below": below,
            "undecided": undecided,
            **(context or {}),
        },
    )


def _above_one(ratio: PairedRatio) -> bool | Literal["undecided"]:
    if ratio.low is None or ratio.high is None or ratio.low <= 1 <= ratio.high:
        return "undecided"
    return ratio.low > 1


def _spread(ratios: Mapping[int, PairedRatio]) -> dict[str, Any]:
    return {
        "by_size": {
            size: [_round(ratio.low), round(ratio.median, 3), _round(ratio.high)] for size, ratio in ratios.items()
        },
        "pairs": next(iter(ratios.values())).pairs,
    }


def _milliseconds(pairs: Sequence[Sequence[float]], place: int) -> float:
    return round(1e3 * statistics.median(pair[place] for pair in pairs), 3)


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


MEASUREMENTS = {
    **{f"cells_{policy}": lambda policy=policy: cells(policy) for policy in WORKLOADS},
    **{f"tail_{policy}": lambda policy=policy: tail(policy) for policy in WORKLOADS},
    **{f"steps_{policy}": lambda policy=policy: steps(policy) for policy in WORKLOADS},
    **{f"history_{policy}": lambda policy=policy: history(policy) for policy in WORKLOADS},
}

if __name__ == "__main__":
    main(MEASUREMENTS)
