"""The same RL run with several draft methods over a few prompts that come back every epoch; all in turns.

Run by `benchmarks.never_slower` in a process of its own:

    python -m benchmarks.history_runs recipes/demo.toml --arms none,history --out FILE --data.num_train 16 ...

Speed is measured between the epochs and not in the runs' own steps: those sample different tokens, and an epoch has few
of them. As an epoch begins, an arm's engine and one without speculation get the arm's policy, and both take what the
epoch will ask for: its prompts, its batches, its groups, with seeds of their own. None of it enters the history, and a
prompt comes once in an epoch, so that the engine drafts from what it has to draft from in the epoch itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from paceline.cli.process import ensure_engine_environment
from paceline.config.load import load_arms
from paceline.config.run import Recipe


def measure(recipes: Mapping[str, Recipe], num_pairs: int) -> list[dict[str, Any]]:
    """Per epoch: arm -> pairs of seconds per token (baseline, arm), and what its own steps drafted and took.

    The first arm is the baseline, without speculation. `num_pairs` of each other arm with it, as every epoch begins. As
    many epochs as fit `run.num_steps`; the training prompts must fill whole steps.
    """
    from paceline.loop.compare import RolloutPlan, measure_rollouts
    from paceline.loop.loop import TrainingRun

    shared = next(iter(recipes.values()))
    group_size, prompts_per_step = shared.algorithm.group_size, shared.algorithm.prompts_per_step
    steps_per_epoch, in_flight = shared.data.num_train // prompts_per_step, prompts_per_step * group_size
    results = []
    with ExitStack() as stack:
        runs = {
            arm: stack.enter_context(TrainingRun(recipe, folder=shared.run.folder / arm))
            for arm, recipe in recipes.items()
        }
        baseline, *others = runs
        for epoch in range(shared.run.num_steps // steps_per_epoch):
            seconds: dict[str, dict[int, list[tuple[float, float]]]] = {arm: {in_flight: []} for arm in others}
            prompts = [prompt for prompt in _coming(runs[baseline]) for _ in range(group_size)]
            plan = RolloutPlan(prompts, runs[baseline].parts.sampling, shared.run.seed, (in_flight,), num_pairs)
            measure_rollouts(runs, plan, seconds, point=runs[baseline].step)
            lines: dict[str, list[dict[str, Any]]] = {arm: [] for arm in runs}
            for step in range(steps_per_epoch):
                turn = (epoch * steps_per_epoch + step) % len(runs)
                for arm in [*list(runs)[turn:], *list(runs)[:turn]]:
                    lines[arm].append(runs[arm].run_step())
            results.append(
                {
                    arm: {**_own_steps(lines[arm]), "pairs": seconds[arm][in_flight] if arm in seconds else []}
                    for arm in runs
                }
            )
            print(f"epoch {epoch + 1}: {_said(results[-1])}", file=sys.stderr, flush=True)
    return results


def _coming(run: Any) -> list[Any]:
    """The prompts of the epoch that begins now, in its order; the run has them still before it."""
    source = run.parts.prompts
    state = source.state_dict()
    prompts = source.next(state["num_prompts"])
    source.load_state_dict(state)
    return prompts


def _own_steps(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Acceptance of an arm's steps in one epoch, counts summed before anything is divided."""
    verify_steps = sum(line["verify_steps"] for line in lines)
    blocks = sum(count for line in lines for count in line["k_histogram"].values())
    tokens = sum(line["tokens"]["response"] for line in lines)
    return {
        "alpha": 1 + sum(line["tokens"]["accepted"] for line in lines) / verify_steps if verify_steps else None,
        # Share of the blocks for which something was found to draft.
        "drafted_share": verify_steps / blocks,
        # With what was still waited for of the rewards.
        "own_generate_s_per_token": sum(line["stage_s"]["generate"] for line in lines) / tokens,
        "lengths": [length for line in lines for length in line["lengths"]],
        "reward": statistics.fmean(line["reward"]["mean"] for line in lines),
        "alarms": [alarm for line in lines for alarm in line["alarms"]],
    }


def _said(epoch: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {
        arm: (part["alpha"], [round(none / seconds, 2) for none, seconds in part["pairs"]])
        for arm, part in epoch.items()
    }


def main() -> None:
    """The command line; figures go to --out as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe")
    parser.add_argument("--arms", type=lambda text: text.split(","), required=True, help="the baseline, none, first")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--out", type=Path, required=True)
    arguments, overrides = parser.parse_known_args()
    ensure_engine_environment(load_arms(arguments.recipe, overrides, arguments.arms)[arguments.arms[0]].engine)
    with tempfile.TemporaryDirectory() as scratch:
        recipes = load_arms(arguments.recipe, [*overrides, "--run.root", scratch], arguments.arms)
        figures = measure(recipes, arguments.pairs)
    arguments.out.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
