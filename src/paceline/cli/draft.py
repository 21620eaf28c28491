"""`paceline draft train` and `paceline draft eval`."""

from __future__ import annotations

import json
import sys

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from paceline.cli.doctor import notes
from paceline.cli.process import ensure_engine_environment
from paceline.config.load import load_recipe
from paceline.config.run import DraftModelDraft, Eagle3Draft, HistoryDraft, NgramDraft, NoDraft, Recipe
from paceline.errors import ConfigError
from paceline.observe.progress import ConsoleProgress
from paceline.observe.provenance import machine, package_versions
from paceline.report.table import print_tables


def train_draft(recipe_path: str, overrides: list[str]) -> int:
    """Train the recipe's draft, or find it in the cache, and print figures and folder. Raises `PacelineError`."""
    recipe = load_recipe(recipe_path, overrides)
    if not isinstance(recipe.draft, Eagle3Draft):
        raise ConfigError(
            f'draft.method is "{recipe.draft.method}", which has nothing that this command trains: set '
            'draft.method = "eagle3"'
        )
    if recipe.draft.num_draft_tokens == 0:
        raise ConfigError("draft.num_draft_tokens is 0: speculation is off and nothing is trained; set it to 1 or more")
    if recipe.draft.path is not None:
        raise ConfigError(
            f"draft.path names a head that is trained already, {recipe.draft.path}: leave it out, or train on from it "
            "with draft.start"
        )
    from paceline.data.prompts import load_prompts, prompt_style
    from paceline.loop.draft_start import prepare_draft, read_report
    from paceline.loop.parts import make_sampling
    from paceline.models.cache import cache_root
    from paceline.models.folder import load_policy, load_tokenizer, resolve_policy

    console = Console()
    for note in notes(recipe):
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    progress = ConsoleProgress(console)
    try:
        progress.status("Preparing the policy (minutes when it has to be trained first)")
        policy = resolve_policy(recipe.policy, cache_root())
        tokenizer = load_tokenizer(policy.path)
        prompts = load_prompts(recipe.data, tokenizer, prompt_style(recipe.policy, tokenizer))
        sampling = make_sampling(recipe.sampling, load_policy(policy.path), tokenizer)
        folder = prepare_draft(recipe, policy, prompts.train, sampling, cache_root(), progress)
    finally:
        progress.close()
    if folder is None:
        raise AssertionError("a draft with weights has a folder")
    report = read_report(folder)
    for sentence in () if report is None else report.sentences():
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)
    console.print(f"The draft is in {folder}; draft.path takes it", markup=False, highlight=False, soft_wrap=True)
    return 0


def eval_draft(recipe_path: str, overrides: list[str], num_answers: int, as_json: bool) -> int:
    """Print what the recipe's draft is worth on held-out prompts, predicted and measured. Raises `PacelineError`."""
    if num_answers < 1:
        raise ConfigError(f"--answers -> must be 1 or more | got {num_answers}")
    recipe = load_recipe(recipe_path, overrides)
    if isinstance(recipe.draft, DraftModelDraft):
        raise ConfigError(
            'draft.method is "draft_model", for which nothing is predicted: `paceline train` and `paceline certify` '
            "report its measured acceptance length"
        )
    if isinstance(recipe.draft, NoDraft | NgramDraft | HistoryDraft):
        raise ConfigError(
            f'draft.method is "{recipe.draft.method}", which has no weights that could predict anything: set '
            'draft.method = "eagle3"'
        )
    if recipe.draft.num_draft_tokens == 0:
        raise ConfigError("draft.num_draft_tokens is 0: speculation is off; set it to 1 or more")
    ensure_engine_environment(recipe.engine)
    # What a person reads goes to stderr when the figures go to stdout.
    console = Console(stderr=as_json)
    figures = _evaluate(recipe, num_answers, console)
    if as_json:
        summary = {"recipe": recipe_path, "machine": machine(), "versions": package_versions(), **figures}
        sys.stdout.write(json.dumps(summary, indent=2) + "\n")
    else:
        print_tables(tables(figures), console)
    return 0


def tables(figures: dict[str, object]) -> Group:
    """Predicted against measured, per position, and the sentences that say what to make of it."""
    predicted, measured = figures["predicted"], figures["measured"]
    if not isinstance(predicted, dict) or not isinstance(measured, dict):
        raise TypeError("the figures hold no rates")
    table = Table(
        title=f"{figures['method']}, k = {figures['num_draft_tokens']}, held-out prompts", title_justify="left"
    )
    for column in ("", "predicted", "measured"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row(
        "acceptance length", *(_with_error(rates["alpha"], rates["alpha_se"]) for rates in (predicted, measured))
    )
    table.add_row("its limit", _with_error(figures["limit"], None), "")
    for name, title in (("conditional", "accepted, if reached"), ("marginal", "accepted, of all")):
        table.add_section()
        for position in range(len(predicted[name])):
            cells = (
                _with_error(rates[name][position], rates[f"{name}_se"][position]) for rates in (predicted, measured)
            )
            table.add_row(f"position {position + 1} {title}", *cells)
    table.add_section()
    table.add_row("verify steps", *(f"{rates['verify_steps']:,}" for rates in (predicted, measured)))
    verdict = {True: "within 5 %", False: "NOT within 5 %", None: "nothing was drafted"}[_verdict(figures["agrees"])]
    return Group(
        table,
        Text(
            f"predicted / measured: {_with_error(figures['ratio'], figures['ratio_se'])} ({verdict}); "
            f"{figures['answers']} answers, {figures['tokens']} tokens, {_percent(figures['coverage'])} of them in the "
            "draft vocabulary. +- is one standard error over groups of prompts. The limit: if every draft were the "
            "policy's own most likely token"
        ),
    )


def _evaluate(recipe: Recipe, num_answers: int, console: Console) -> dict[str, object]:
    from paceline.loop.draft_eval import evaluate_draft
    from paceline.loop.parts import build_parts

    progress = ConsoleProgress(console)
    try:
        for note in notes(recipe):
            progress.status(note)
        parts = build_parts(recipe, progress)
        try:
            return evaluate_draft(recipe, parts, num_answers, progress.status).to_dict()
        finally:
            parts.close()
    finally:
        progress.close()


def _verdict(agrees: object) -> bool | None:
    return agrees if isinstance(agrees, bool) else None


def _percent(share: object) -> str:
    return f"{share:.1%}" if isinstance(share, float) else "-"


def _with_error(figure: object, error: object) -> str:
    if not isinstance(figure, float):
        return "-"
    return f"{figure:.3f} +- {error:.3f}" if isinstance(error, float) else f"{figure:.3f}"
