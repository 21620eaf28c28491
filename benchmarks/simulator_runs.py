"""The simulator against vLLM on this machine: single engine steps, and rollouts of real runs."""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.bars import MAX_ATTEMPTS, Bar, run
from paceline.drafts.profile import CalibrationPoint, model_seconds, read_profile

THREADS = "1"
ARMS = ("none", "eagle3", "adaptive")
"""Without speculation, at the k of the recipe, and with k chosen before every engine step from the same profile."""
RUNS = {
    "demo": ("--run.num_steps", "5", "--data.num_eval", "16"),
    "smollm2-chain-sum": ("--run.num_steps", "3"),
}
"""Overrides by recipe: tiny and SmolLM2."""
MAX_DRIFT = 0.2
"""How much longer the same rollouts may seem to take by one of two profiles than by the other."""


def reality_bars(recipe: str) -> Iterable[Bar]:
    """Profiles of a recipe, and with them its held-out steps and the rollouts of the arms.

    A machine that is shared with others changes its speed by tens of percent between quiet minutes. So a profile stands
    before each run and one behind it, and the run is replayed through both.
    """
    with tempfile.TemporaryDirectory() as scratch:
        profiles = [Path(scratch) / f"profile-{place}.json" for place in range(len(ARMS) + 1)]
        finished = calibrate(recipe, profiles[0])
        if finished != 0:
            yield Bar(f"reality_{recipe}", f"calibrate ended with {finished}", "a profile", "undecided")
            return
        yield from iteration_bars(recipe, profiles[0])
        for arm, before, after in zip(ARMS, profiles[:-1], profiles[1:], strict=True):
            yield rollout_bar(recipe, arm, before, after, Path(scratch))


def calibrate(recipe: str, profile: Path) -> int:
    """`paceline calibrate` up to k = 5, with one thread, again while it is refused. Returns its exit code."""
    words = ["calibrate", f"recipes/{recipe}.toml", "--out", str(profile), "--draft.num_draft_tokens", "5"]
    code = 0
    for _ in range(MAX_ATTEMPTS):
        code = run([sys.executable, "-m", "paceline.cli.main", *words, "--engine.threads", THREADS]).code
        if code == 0:
            break
    return code


def iteration_bars(recipe: str, path: Path) -> Iterable[Bar]:
    """Ratios c(k) = tau(n, k) / tau(n, 0) of a batch and a k that the fit has not seen, in processor time."""
    points = [point.model_copy(update={"seconds": point.cpu_seconds}) for point in read_profile(path).points]
    live, lengths = sorted({p.n for p in points}), sorted({p.k for p in points})
    errors = {f"n={n} k={k}": hold_out(points, n, k) for n in live[1:-1] for k in lengths[1:-1]}
    middle = f"n={live[len(live) // 2]} k={lengths[len(lengths) // 2]}"
    value = errors[middle]
    yield Bar(
        f"reality_{recipe}_cost_ratio_mape",
        round(value, 3),
        "<= 0.20 (aim 0.12), held-out n and k",
        value <= 0.20,
        {"held_out": middle, "others": {name: round(error, 3) for name, error in errors.items()}, "threads": THREADS},
    )


def hold_out(points: Sequence[CalibrationPoint], n: int, k: int) -> float:
    """Mean relative error of c on the points with that n or that k, predicted from all others."""
    from paceline.loop.calibrate import fit

    kept = [point for point in points if point.n != n and point.k != k]
    parameters = fit(kept, "wall")
    plain = {(p.n, p.context): p.seconds for p in points if p.k == 0}
    errors = []
    for point in points:
        if point in kept or point.k == 0:
            continue
        predicted = model_seconds(parameters, point.n, point.k, point.context)
        predicted /= model_seconds(parameters, point.n, 0, point.context)
        errors.append(abs(predicted / (point.seconds / plain[point.n, point.context]) - 1))
    return statistics.fmean(errors)


def rollout_bar(recipe: str, arm: str, before: Path, after: Path, root: Path) -> Bar:
    """A short run, replayed through the profiles measured `before` and `after` it; the latter is measured here.

    Undecided where the two predict seconds that differ by more than `MAX_DRIFT`.
    """
    goal, name = "within 20 % of the measured rollout seconds", f"reality_{recipe}_{arm}_rollout_error"
    draft = ["--draft.method", "none" if arm == "none" else "eagle3"]
    if arm == "adaptive":
        draft += ["--draft.choose_k", "adaptive", "--draft.profile", str(before)]
    trained = run(
        [
            *(sys.executable, "-m", "paceline.cli.main", "train", f"recipes/{recipe}.toml", *draft),
            *("--run.root", str(root), "--run.name", arm, "--engine.threads", THREADS, *RUNS[recipe]),
        ]
    )
    if trained.code != 0:
        return Bar(name, f"train ended with {trained.code}", goal, "undecided")
    finished = calibrate(recipe, after)
    if finished != 0:
        return Bar(name, f"calibrate ended with {finished}", goal, "undecided")
    reports: list[Mapping[str, Any]] = []
    for profile in (before, after):
        checked = run(
            [
                *(sys.executable, "-m", "paceline.cli.main", "simulate", "validate", str(root / arm)),
                *("--profile", str(profile), "--json"),
            ]
        )
        if checked.code != 0:
            return Bar(name, f"validate ended with {checked.code}", goal, "undecided")
        reports.append(json.loads(checked.output.strip().splitlines()[-1]))
    first, second = (1 + report["error"] for report in reports)
    error, drift = math.sqrt(first * second) - 1, second / first - 1
    is_steady = max(first / second, second / first) <= 1 + MAX_DRIFT
    return Bar(
        name,
        round(error, 3),
        goal,
        abs(error) <= 0.20 if is_steady else "undecided",
        {
            "error_by_profile_before_and_after": [round(report["error"], 3) for report in reports],
            "drift": round(drift, 3),
            "measured_s": [round(check["measured_s"], 3) for check in reports[0]["steps"]],
            "predicted_s": [[round(check["predicted_s"], 3) for check in report["steps"]] for report in reports],
            "predicted_steps_by_k": [check["predicted_steps_by_k"] for check in reports[0]["steps"]],
            "counted_steps_by_k": [check["counted_steps_by_k"] for check in reports[0]["steps"]],
            "threads": THREADS,
        },
    )
