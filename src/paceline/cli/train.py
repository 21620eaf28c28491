"""`paceline train`."""

from __future__ import annotations

from rich.console import Console

from paceline.cli.doctor import notes
from paceline.cli.process import ensure_engine_environment
from paceline.config.load import load_recipe
from paceline.observe.metrics import JsonLines
from paceline.observe.progress import ConsoleProgress
from paceline.report.table import print_tables, runs


def train(recipe_path: str, overrides: list[str], resume: bool) -> int:
    """Run the recipe to its end and print its tables. Raises `PacelineError`."""
    recipe = load_recipe(recipe_path, overrides)
    ensure_engine_environment(recipe.engine)
    from paceline.loop import loop

    console = Console()
    for note in notes(recipe):
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    folder = loop.train(recipe, resume=resume, progress=ConsoleProgress(console))
    print_tables(runs({recipe.run.name: JsonLines(folder / "metrics.jsonl").records()}), console)
    console.print(f"Everything about this run is in {folder}", highlight=False)
    return 0
