"""`paceline calibrate`."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console, Group
from rich.table import Table

from paceline.cli.doctor import notes
from paceline.cli.process import ensure_engine_environment
from paceline.config.load import load_recipe
from paceline.config.run import NoDraft, Recipe
from paceline.drafts.profile import CalibrationProfile, StepCosts
from paceline.errors import ConfigError
from paceline.observe.progress import ConsoleProgress
from paceline.report.table import print_tables

CLOCKS = ("wall", "cpu")


def calibrate(
    recipe_path: str, overrides: list[str], *, out: str | None, seconds: float, clock: str, as_json: bool
) -> int:
    """Measure the engine steps of a recipe, write the profile and print its table.

    `seconds` bounds the measurement itself, which comes after the engine has started. Raises `PacelineError`; nothing
    is written then.
    """
    recipe = load_recipe(recipe_path, overrides)
    if isinstance(recipe.draft, NoDraft) or recipe.draft.num_draft_tokens == 0:
        raise ConfigError(
            f"draft.method is {recipe.draft.method!r}, and no drafts are made: there is no k to choose. Set "
            "--draft.method eagle3 and --draft.num_draft_tokens to the largest k to consider"
        )
    if seconds <= 0:
        raise ConfigError(f"--seconds -> must be more than 0 | got {seconds:g}")
    if clock not in CLOCKS:
        raise ConfigError(f"--clock -> must be one of {', '.join(CLOCKS)} | got {clock!r}")
    path = recipe.run.root / f"{recipe.run.name}-calibration.json" if out is None else Path(out)
    if out is not None and not path.parent.is_dir():
        raise ConfigError(f"--out -> the folder {path.parent} does not exist: make it first")
    ensure_engine_environment(recipe.engine)
    # What a person reads goes to stderr when the profile itself goes to stdout.
    console = Console(stderr=as_json)
    profile = _measure(recipe, seconds, clock, console)
    path.parent.mkdir(parents=True, exist_ok=True)
    profile.write(path)
    if as_json:
        sys.stdout.write(profile.model_dump_json(indent=1) + "\n")
    else:
        print_tables(tables(profile), console)
    console.print(
        f"Written to {path}. Use it with --draft.choose_k adaptive --draft.profile {path}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    return 0


def tables(profile: CalibrationProfile) -> Group:
    """Step times, and the acceptance length from which on each k pays."""
    costs = StepCosts.from_profile(profile)
    lengths = range(profile.max_draft_tokens + 1)
    time = "wall clock" if profile.clock == "wall" else "processor time"
    steps = Table(
        f"ms per engine step, {time}", *(f"k = {k}" for k in lengths), "spread", "steps", title_justify="left"
    )
    pays = Table("k pays above this alpha", *(f"k = {k}" for k in lengths if k > 0), title_justify="left")
    for n in costs.live:
        seconds = costs.at(n)
        here = [point for point in profile.points if point.n == n]
        spread, repeats = max(point.spread for point in here), min(point.repeats for point in here)
        steps.add_row(f"{n} running", *(f"{1e3 * s:.1f}" for s in seconds), f"{spread:.0%}", str(repeats))
        # alpha(k) / tau(k) > 1 / tau(0)
        pays.add_row(f"{n} running", *(f"{s / seconds[0]:.2f}" for s in seconds[1:]))
    return Group(steps, pays)


def _measure(recipe: Recipe, seconds: float, clock: str, console: Console) -> CalibrationProfile:
    from paceline.loop import calibrate as loop
    from paceline.loop.parts import build_parts

    progress = ConsoleProgress(console)
    try:
        for note in notes(recipe):
            progress.status(note)
        parts = build_parts(recipe, progress)
        try:
            progress.status(f"Timing engine steps, about {seconds:.0f} s")
            return loop.calibrate(
                recipe,
                parts,
                budget_s=seconds,
                clock="wall" if clock == "wall" else "cpu",
                on_round=lambda done, spent_s: progress.status(f"Round {done} done after {spent_s:.0f} s"),
            )
        finally:
            parts.close()
    finally:
        progress.close()
