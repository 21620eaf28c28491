"""`paceline draft train`."""

from __future__ import annotations

from rich.console import Console

from paceline.cli.doctor import notes
from paceline.config.load import load_recipe
from paceline.config.run import Eagle3Draft
from paceline.errors import ConfigError
from paceline.observe.progress import ConsoleProgress


def train_draft(recipe_path: str, overrides: list[str]) -> int:
    """Train the recipe's draft, or find it in the cache, and print its folder. Raises `PacelineError`."""
    recipe = load_recipe(recipe_path, overrides)
    if not isinstance(recipe.draft, Eagle3Draft):
        raise ConfigError(f'draft.method is "{recipe.draft.method}", which has no weights: set draft.method = "eagle3"')
    if recipe.draft.num_draft_tokens == 0:
        raise ConfigError("draft.num_draft_tokens is 0: speculation is off and nothing is trained; set it to 1 or more")
    if recipe.draft.path is not None:
        raise ConfigError(f"draft.path names a head that is trained already, {recipe.draft.path}: leave it out")
    from paceline.loop.parts import prepare_draft
    from paceline.models.cache import cache_root
    from paceline.models.folder import resolve_policy

    console = Console()
    for note in notes(recipe):
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    progress = ConsoleProgress(console)
    try:
        progress.status("Preparing the policy (minutes when it has to be trained first)")
        folder = prepare_draft(recipe, resolve_policy(recipe.policy, cache_root()), cache_root(), progress)
    finally:
        progress.close()
    console.print(f"The draft is in {folder}; draft.path takes it", markup=False, highlight=False, soft_wrap=True)
    return 0
