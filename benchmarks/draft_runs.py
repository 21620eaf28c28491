"""RL runs of the draft lifecycle, each in a process of its own: closing one vLLM engine ends all of its process.

Run by `benchmarks.draft_lifecycle`:

    python -m benchmarks.draft_runs start recipes/demo.toml --seed 0 --out FILE --draft.data generic ...
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from paceline.cli.process import ensure_engine_environment
from paceline.config.load import load_recipe
from paceline.config.run import Recipe

ONLINE = ("off", "always")
LAST_STEPS = 3
"""Acceptance at the start and at the end of a run is taken over this many steps."""


def start(recipe_path: str, overrides: Sequence[str], seed: int, num_pairs: int, in_flight: int) -> dict[str, Any]:
    """One run: acceptance length at its start, at its end and per step, and the rollout speedup of where it ended.

    The speedup is that of the last policy on the held-out prompts, against an engine without speculation that holds the
    same weights; the two take turns.
    """
    from paceline.loop.compare import RolloutPlan, measure_rollouts, repeat_prompts
    from paceline.spec.stats import paired_ratio

    plain = [word for pair in _pairs(overrides) if not pair[0].startswith("--draft.") for word in pair]
    with (
        _run(recipe_path, [*plain, "--draft.method", "none"], seed) as baseline,
        _run(recipe_path, overrides, seed) as run,
    ):
        lines = []
        while not run.finished:
            lines.append(run.run_step())
            _say(f"seed {seed} {' '.join(overrides[-4:])}", lines[-1])
        prompts = repeat_prompts(baseline.parts.held_out, in_flight)
        plan = RolloutPlan(prompts, baseline.parts.sampling, seed, (in_flight,), num_pairs)
        seconds = {"draft": {in_flight: []}}
        measure_rollouts({"none": baseline, "draft": run}, plan, seconds, point=run.step)
        ratio = paired_ratio(seconds["draft"][in_flight])
    return {
        "alpha_first": _alpha(lines[:LAST_STEPS]),
        "alpha_last": _alpha(lines[-LAST_STEPS:]),
        "alpha_by_step": [line["acceptance"]["alpha"] for line in lines],
        "predicted_by_step": [line["draft"]["predicted_alpha"] for line in lines],
        "rollout": {"median": ratio.median, "low": ratio.low, "high": ratio.high, "pairs": ratio.pairs},
        "alarms": [alarm for line in lines for alarm in line["alarms"]],
    }


def curves(recipe_path: str, overrides: Sequence[str], seed: int) -> dict[str, Any]:
    """`off` and `always` -> what each step measured, of two runs from the same head."""
    results: dict[str, Any] = {}
    with ExitStack() as stack:
        for online in ONLINE:
            run = stack.enter_context(_run(recipe_path, [*overrides, "--draft.online", online], seed))
            lines = []
            while not run.finished:
                lines.append(run.run_step())
                _say(online, lines[-1])
            results[online] = {
                "alpha": [line["acceptance"]["alpha"] for line in lines],
                "predicted_alpha": [line["draft"]["predicted_alpha"] for line in lines],
                "reward": [line["reward"]["mean"] for line in lines],
                "mean_length": [statistics.fmean(line["lengths"]) for line in lines],
                "certificate_z": lines[-1]["certificate"]["z"],
                "alarms": [alarm for line in lines for alarm in line["alarms"]],
            }
    return results


def costs(recipe_path: str, overrides: Sequence[str], seed: int) -> dict[str, Any]:
    """Seconds of each step of a run that trains its draft in every step, and of the draft's own part of them."""
    lines, draft_s = [], []
    with _run(recipe_path, [*overrides, "--draft.online", "always"], seed) as run:
        clock = _timed(run.parts.draft)
        while not run.finished:
            before = clock[0]
            lines.append(run.run_step())
            draft_s.append(clock[0] - before)
            _say("costs", lines[-1])
    return {
        "stage_s": [dict(line["stage_s"]) for line in lines],
        "response_tokens": [line["tokens"]["response"] for line in lines],
        "draft_s": draft_s,
    }


@contextmanager
def _run(recipe_path: str, words: Sequence[str], seed: int) -> Iterator[Any]:
    from paceline.loop.loop import TrainingRun

    with tempfile.TemporaryDirectory() as scratch:
        recipe = load_recipe(recipe_path, [*words, "--run.root", scratch, "--run.seed", str(seed)])
        with TrainingRun(recipe) as run:
            yield run


def _alpha(lines: Sequence[Mapping[str, Any]]) -> float | None:
    verify_steps = sum(line["verify_steps"] for line in lines)
    return 1 + sum(line["tokens"]["accepted"] for line in lines) / verify_steps if verify_steps else None


def _timed(draft: Any) -> list[float]:
    """[seconds] that the draft's own work has taken so far: choosing, judging and learning."""
    spent = [0.0]

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*arguments)
            finally:
                spent[0] += time.perf_counter() - began

        return call

    for name in ("probe", "predict", "lesson", "learn"):
        setattr(draft, name, timed(getattr(draft, name)))
    return spent


def _pairs(words: Sequence[str]) -> list[tuple[str, str]]:
    return list(zip(words[::2], words[1::2], strict=True))


def _say(name: str, line: Mapping[str, Any]) -> None:
    alpha, predicted = line["acceptance"]["alpha"], line["draft"]["predicted_alpha"]
    print(f"{name}: step {line['step']}, alpha {alpha}, predicted {predicted}", file=sys.stderr, flush=True)


def main() -> None:
    """The command line; figures go to --out as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("start", "curves", "costs"))
    parser.add_argument("recipe")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--in-flight", type=int, default=16)
    arguments, overrides = parser.parse_known_args()
    recipe: Recipe = load_recipe(arguments.recipe, overrides)
    ensure_engine_environment(recipe.engine)
    match arguments.what:
        case "start":
            figures = start(arguments.recipe, overrides, arguments.seed, arguments.pairs, arguments.in_flight)
        case "curves":
            figures = curves(arguments.recipe, overrides, arguments.seed)
        case _:
            figures = costs(arguments.recipe, overrides, arguments.seed)
    arguments.out.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
