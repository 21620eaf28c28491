"""`paceline certify`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from paceline.cli.doctor import notes
from paceline.cli.process import ensure_engine_environment
from paceline.config.load import load_arms, load_recipe, parse_overrides
from paceline.config.run import Recipe
from paceline.errors import ConfigError
from paceline.observe.files import write_whole
from paceline.observe.provenance import machine, package_versions
from paceline.report.table import certificates, print_tables


def certify(
    recipe_path: str, overrides: list[str], arms: Sequence[str] | None, num_tokens: int, json_path: str | None
) -> int:
    """Sample `num_tokens` tokens in each arm and print whether they came from the policy.

    `arms` are values of `draft.method`; None is the recipe's own. Returns 0 when every arm passes, 1 when one fails or
    has no evidence. Raises `PacelineError`.
    """
    if num_tokens < 1:
        raise ConfigError(f"--tokens -> must be 1 or more | got {num_tokens}")
    if json_path is not None and not Path(json_path).parent.is_dir():
        raise ConfigError(f"--json -> the folder {Path(json_path).parent} does not exist: make it first")
    recipes = _recipes(recipe_path, overrides, arms)
    ensure_engine_environment(next(iter(recipes.values())).engine)
    figures = {arm: _run(arm, recipe, num_tokens) for arm, recipe in recipes.items()}
    summary = {
        "recipe": recipe_path,
        "machine": machine(),
        "versions": package_versions(),
        "tokens_asked": num_tokens,
        "arms": figures,
    }
    print_tables(certificates(summary))
    if json_path is not None:
        write_whole(Path(json_path), (json.dumps(summary, indent=2) + "\n").encode())
    return 0 if all(arm["verdict"] == "pass" for arm in figures.values()) else 1


class TokenProgress:
    """A live bar of sampled tokens when `console` is a terminal; one line per tenth of them when it is not."""

    def __init__(self, arm: str, num_tokens: int, console: Console) -> None:
        self._arm = arm
        self._num_tokens = num_tokens
        self._console = console
        self._said = -1
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(arm, total=num_tokens)
        self._bar.start()

    def status(self, text: str) -> None:
        self._console.print(f"{self._arm:>8} | {text}", markup=False, highlight=False, soft_wrap=True)

    def step(self, metrics: Mapping[str, object], num_steps: int) -> None:
        """No step is trained here."""

    def tokens(self, done: int) -> None:
        self._bar.update(self._task, completed=min(done, self._num_tokens))
        tenth = 10 * done // self._num_tokens
        if self._bar.disable and tenth > self._said:
            self._said = tenth
            self.status(f"{done:,} of {self._num_tokens:,} tokens")

    def close(self) -> None:
        self._bar.stop()


def _recipes(recipe_path: str, overrides: list[str], arms: Sequence[str] | None) -> dict[str, Recipe]:
    if arms is None:
        recipe = load_recipe(recipe_path, overrides)
        return {recipe.draft.method: recipe}
    if len(arms) > 1:
        return load_arms(recipe_path, overrides, arms)
    if ("draft", "method") in parse_overrides(overrides):
        raise ConfigError("--draft.method and --arms both name the draft: leave one of them out")
    return {arms[0]: load_recipe(recipe_path, [*overrides, "--draft.method", arms[0]])}


def _run(arm: str, recipe: Recipe, num_tokens: int) -> dict[str, Any]:
    from paceline.loop import certify as loop
    from paceline.loop.parts import build_parts

    progress = TokenProgress(arm, num_tokens, Console())
    try:
        for note in notes(recipe):
            progress.status(note)
        parts = build_parts(recipe, progress)
        try:
            progress.status("Sampling")
            return loop.certify(recipe, parts, num_tokens, progress.tokens).to_dict()
        finally:
            parts.close()
    finally:
        progress.close()
