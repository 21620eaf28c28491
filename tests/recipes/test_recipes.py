"""Every shipped recipe loads, and in every arm that its policy can be compared in."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline.config.load import kinds, load_arms, load_recipe

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_loads_and_names_its_run_after_its_file(path):
    assert load_recipe(path).run.name == path.stem


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_loads_in_every_arm(path):
    policy = load_recipe(path).policy
    # A policy without such a layer, or without a smaller one of its kind, has none of these drafts.
    possible = {"mtp": getattr(policy, "num_mtp_layers", 0) > 0, "draft_model": policy.kind == "tiny"}
    arms = [kind for kind in kinds("draft") if possible.get(kind, True)]
    assert [recipe.draft.method for recipe in load_arms(path, [], arms).values()] == arms


def test_the_recipes_that_the_readme_names_are_shipped():
    lines = (ROOT / "README.md").read_text().splitlines()
    named = {name for line in lines if "recipes/" in line for name in re.findall(r"([\w-]+)\.toml", line)}
    assert len(named) > 3
    assert named <= {path.stem for path in RECIPES}
