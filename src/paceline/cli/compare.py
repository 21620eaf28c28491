"""`paceline compare`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from paceline.cli.doctor import notes
from paceline.cli.process import ensure_engine_environment
from paceline.config.load import ADAPTIVE, kinds, load_arms
from paceline.config.run import Recipe
from paceline.errors import ConfigError
from paceline.loop.compare import RolloutPlan, choose_in_flight, repeat_prompts, run_arms, summarize
from paceline.observe.files import write_whole
from paceline.observe.metrics import JsonLines
from paceline.observe.progress import step_line
from paceline.observe.provenance import machine, package_versions
from paceline.report.table import comparison, print_tables


def compare(
    recipe_path: str,
    overrides: list[str],
    arms: Sequence[str],
    fresh: bool,
    num_pairs: int,
    in_flight: Sequence[int] | None,
) -> int:
    """Run all arms below `run.root / run.name`, write summary.json there and print it. Raises `PacelineError`."""
    # The baseline comes first: everything else is said relative to it.
    arms = sorted(arms, key=lambda arm: arm != "none")
    recipes = load_arms(recipe_path, overrides, arms, may_choose=True)
    shared = next(iter(recipes.values()))
    if num_pairs < 2:
        raise ConfigError(f"--pairs -> must be 2 or more | got {num_pairs}: one pair has no interval")
    sizes = choose_in_flight(in_flight, shared.engine.max_num_seqs)
    folder = shared.run.folder
    earlier = _earlier(folder)
    if earlier and not fresh:
        raise ConfigError(
            f"{folder} holds an earlier comparison: choose another run.name, or remove it first with --fresh"
        )
    ensure_engine_environment(shared.engine)
    _remove(earlier)
    summary = _run(recipes, sizes, num_pairs)
    summary = {"recipe": recipe_path, "machine": machine(), "versions": package_versions(), **summary}
    write_whole(folder / "summary.json", (json.dumps(summary, indent=2) + "\n").encode())
    print_tables(comparison(summary))
    Console().print(f"The same in numbers: {folder / 'summary.json'}", highlight=False)
    return 0


class ArmProgress:
    """The lines of one arm, with its name; no live display, because several arms share the terminal."""

    def __init__(self, arm: str) -> None:
        self._arm = arm
        self._console = Console()

    def status(self, text: str) -> None:
        self._console.print(f"{self._arm:>8} | {text}", markup=False, highlight=False, soft_wrap=True)

    def step(self, metrics: Mapping[str, object], num_steps: int) -> None:
        self.status(step_line(metrics, num_steps))

    def close(self) -> None:
        pass


def _run(recipes: Mapping[str, Recipe], sizes: tuple[int, ...], num_pairs: int) -> dict[str, Any]:
    from paceline.loop.loop import TrainingRun

    first = next(iter(recipes.values()))
    folders = {arm: first.run.folder / arm for arm in recipes}
    with ExitStack() as stack:
        for arm, recipe in recipes.items():
            for note in notes(recipe):
                ArmProgress(arm).status(note)
        runs = {
            arm: stack.enter_context(TrainingRun(recipe, folder=folders[arm], progress=ArmProgress(arm)))
            for arm, recipe in recipes.items()
        }
        parts = next(iter(runs.values())).parts
        prompts = repeat_prompts(parts.held_out, max(sizes))
        plan = RolloutPlan(prompts, parts.sampling, first.run.seed, sizes, num_pairs)
        seconds = run_arms(runs, plan, first.run.num_steps)
    algorithm = first.algorithm
    return summarize(
        {arm: JsonLines(folder / "metrics.jsonl").records() for arm, folder in folders.items()},
        {arm: JsonLines(folder / "evaluations.jsonl").records() for arm, folder in folders.items()},
        seconds,
        live_batch=min(algorithm.prompts_per_step * algorithm.group_size, first.engine.max_num_seqs),
    )


def _earlier(folder: Path) -> list[Path]:
    """What an earlier comparison left in `folder`: the arms' run folders and the summary; nothing else is touched."""
    return [path for name in (*kinds("draft"), ADAPTIVE, "summary.json") if (path := folder / name).exists()]


def _remove(paths: Sequence[Path]) -> None:
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
