"""Recipes: what is written is checked at once, and every message names the key and the nearest match."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config.load import load_arms, load_recipe, parse_overrides, section_fields
from paceline.config.run import Eagle3Draft, NgramDraft, NoDraft, Recipe, ReferenceEngine, TinyPolicy, VllmEngine
from paceline.errors import ConfigError
from paceline.observe.provenance import write_config

SECTIONS = list(Recipe.model_fields)


@pytest.fixture
def recipe_file(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "recipe.toml"
        path.write_text(text)
        return path

    return write


def test_an_empty_recipe_is_the_defaults(recipe_file):
    assert load_recipe(recipe_file("")) == Recipe()


@pytest.mark.parametrize("section", SECTIONS)
def test_a_typo_in_any_section_is_an_error_that_names_the_nearest_key(section, recipe_file):
    default = Recipe.model_fields[section].default
    key: str = max(list(type(default).model_fields), key=len)
    typo = key[:-2] + key[-1] + key[-2]
    with pytest.raises(ConfigError, match=rf"{section}\.{typo} -> no such key; did you mean {key}\?"):
        load_recipe(recipe_file(f"[{section}]\n{typo} = 1\n"))
    with pytest.raises(ConfigError, match=rf"command line: {section}\.{typo} -> no such key; did you mean {key}\?"):
        load_recipe(recipe_file(""), [f"--{section}.{typo}", "1"])


def test_a_mistyped_section_is_an_error_that_names_the_nearest_section(recipe_file):
    with pytest.raises(ConfigError, match=r"algorithn -> no such section; did you mean algorithm\?"):
        load_recipe(recipe_file("[algorithn]\ngroup_size = 4\n"))


def test_a_key_in_the_wrong_section_is_told_its_home(recipe_file):
    with pytest.raises(ConfigError, match=r"run\.group_size -> no such key; group_size belongs to \[algorithm\]"):
        load_recipe(recipe_file("[run]\ngroup_size = 4\n"))
    with pytest.raises(ConfigError, match="max_ngram belongs to \\[draft\\] with method = 'ngram'"):
        load_recipe(recipe_file("[draft]\nmethod = 'eagle3'\nmax_ngram = 4\n"))


def test_all_errors_of_a_recipe_are_reported_at_once(recipe_file):
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe_file("[run]\nnum_steps = 0\nseed = 'x'\n[draft]\ndpeth = 3\n"))
    message = str(caught.value)
    assert "run.num_steps -> should be greater than or equal to 1 | got 0" in message
    assert "run.seed -> should be a valid integer" in message
    assert "draft.dpeth" in message


def test_a_check_across_fields_names_its_keys_and_no_pydantic_internals(recipe_file):
    with pytest.raises(ConfigError, match=r"sampling\.temperature is 0: .*Set sampling\.temperature = 1\.0") as caught:
        load_recipe(recipe_file(""), ["--sampling.temperature", "0"])
    assert "Value error" not in str(caught.value)
    assert "pydantic" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--run.num_steps"], r"--run\.num_steps has no value"),
        (["--num_steps", "3"], r"--num_steps is not an option; did you mean --run\.num_steps\?"),
        (["three"], "'three' on the command line belongs to no option"),
        (["--draft.aux_layers", "[1, 2"], r"--draft\.aux_layers -> not a list"),
        (["--draft.method", "egale3"], r"command line: draft\.method -> must be one of .*did you mean eagle3\?"),
        (["--rnu.num_steps", "3"], r"command line: rnu -> no such section; did you mean run\?"),
    ],
)
def test_a_bad_override_says_what_to_write(words, message, recipe_file):
    with pytest.raises(ConfigError, match=message):
        load_recipe(recipe_file(""), words)


def test_broken_missing_and_unreadable_files_are_config_errors(recipe_file, tmp_path):
    with pytest.raises(ConfigError, match=r"is not valid TOML: .*line 2"):
        load_recipe(recipe_file("[run]\nname = \n"))
    with pytest.raises(ConfigError, match=r"no recipe at .*: .* holds recipe\.toml"):
        load_recipe(tmp_path / "recip.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_recipe(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"[run]\nname = '\xe9'\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_recipe(tmp_path / "latin.toml")


def test_the_command_line_wins_over_the_file_and_its_last_word_over_its_first(recipe_file):
    path = recipe_file("[run]\nnum_steps = 5\nseed = 1\n")
    recipe = load_recipe(path, ["--run.num_steps", "6", "--run.num_steps=7"])
    assert (recipe.run.num_steps, recipe.run.seed) == (7, 1)


def test_a_section_without_its_kind_has_the_kind_of_the_default(recipe_file):
    assert load_recipe(recipe_file("[draft]\ndepth = 6\n")).draft == Eagle3Draft(depth=6)
    assert load_recipe(recipe_file(""), ["--policy.num_layers", "6"]).policy == TinyPolicy(num_layers=6)


def test_switching_a_kind_keeps_what_the_new_kind_has_and_drops_the_rest(recipe_file):
    path = recipe_file("[draft]\nmethod = 'eagle3'\nnum_draft_tokens = 5\ndepth = 6\n[engine]\nmax_num_seqs = 8\n")
    recipe = load_recipe(path, ["--draft.method", "ngram", "--draft.max_ngram", "3", "--engine.kind", "reference"])
    assert recipe.draft == NgramDraft(num_draft_tokens=5, max_ngram=3)
    assert recipe.engine == ReferenceEngine(max_num_seqs=8)


def test_an_override_that_the_chosen_kind_does_not_have_is_an_error(recipe_file):
    with pytest.raises(ConfigError, match=r"command line: draft\.depth -> no such key; depth belongs to"):
        load_recipe(recipe_file(""), ["--draft.method", "ngram", "--draft.depth", "4"])


def test_arms_differ_in_the_draft_alone(recipe_file):
    path = recipe_file("[draft]\nmethod = 'eagle3'\nnum_draft_tokens = 2\ndepth = 6\n")
    arms = load_arms(path, ["--run.num_steps", "4", "--draft.epochs", "3"], ["none", "eagle3", "ngram"])
    assert arms["none"].draft == NoDraft()
    assert arms["eagle3"].draft == Eagle3Draft(num_draft_tokens=2, depth=6, epochs=3)
    assert arms["ngram"].draft == NgramDraft(num_draft_tokens=2)
    for recipe in arms.values():
        assert recipe.model_copy(update={"draft": NoDraft()}) == arms["none"]


@pytest.mark.parametrize(
    ("words", "arms", "message"),
    [
        ([], ["none"], "needs two different arms"),
        ([], ["none", "none"], "needs two different arms"),
        ([], ["none", "eagle"], r"draft\.method -> must be one of .*did you mean eagle3\?"),
        (["--draft.method", "ngram"], ["none", "eagle3"], "name them with --arms"),
        (["--draft.max_ngram", "3"], ["none", "eagle3"], r"draft\.max_ngram -> no such key"),
    ],
)
def test_arms_that_cannot_be_compared_are_refused(words, arms, message, recipe_file):
    with pytest.raises(ConfigError, match=message):
        load_arms(recipe_file(""), words, arms)


def test_the_adaptive_arm_is_the_recipes_method_and_the_choice_of_k_is_its_alone(recipe_file):
    path = recipe_file("[draft]\nmethod = 'ngram'\nchoose_k = 'adaptive'\nprofile = 'a.json'\nmax_ngram = 5\n")
    words = ["--draft.profile", "b.json", "--draft.num_draft_tokens", "7"]
    arms = load_arms(path, words, ["none", "ngram", "adaptive"], may_choose=True)
    assert arms["none"].draft == NoDraft()
    assert arms["ngram"].draft == NgramDraft(num_draft_tokens=7, max_ngram=5)
    chosen = NgramDraft(num_draft_tokens=7, max_ngram=5, choose_k="adaptive", profile=Path("b.json"))
    assert arms["adaptive"].draft == chosen
    for recipe in arms.values():
        assert recipe.model_copy(update={"draft": NoDraft()}) == arms["none"]


def test_an_adaptive_arm_needs_a_profile_and_a_command_that_can_choose(recipe_file):
    with pytest.raises(ConfigError, match=r"draft\.profile: make one with `paceline calibrate"):
        load_arms(recipe_file(""), [], ["none", "adaptive"], may_choose=True)
    with pytest.raises(ConfigError, match=r"draft\.method -> must be one of"):
        load_arms(recipe_file(""), [], ["none", "adaptive"])


def test_the_resolved_recipe_of_a_run_folder_reads_back_equal(recipe_file, tmp_path):
    words = ["--draft.aux_layers", "[1, 2, 3]", "--draft.path", "head", "--train.lr", "3e-5", "--engine.threads", "1"]
    recipe = load_recipe(recipe_file(""), words)
    write_config(tmp_path, recipe)
    assert recipe.draft == Eagle3Draft(aux_layers=(1, 2, 3), path=Path("head"))
    assert recipe.engine == VllmEngine(threads=1)
    assert load_recipe(tmp_path / "config.toml") == recipe


@given(st.dictionaries(st.sampled_from(["run.seed", "run.num_steps", "data.seed"]), st.integers(1, 2**30), min_size=1))
def test_both_spellings_of_an_override_mean_the_same(values):
    apart = [word for key, value in values.items() for word in (f"--{key}", str(value))]
    joined = [f"--{key}={value}" for key, value in values.items()]
    assert parse_overrides(apart) == parse_overrides(joined)


def test_every_key_of_every_kind_has_a_help_text():
    silent = [
        f"{section}.{key} of {kind or 'it'}"
        for section in SECTIONS
        for key, fields in section_fields(section).items()
        # What chooses the kind is explained once for all kinds.
        for kind, field in (fields[:1] if key in ("kind", "method") else fields)
        if not field.description
    ]
    assert silent == []


@pytest.mark.parametrize(
    "draft",
    [
        'path = "a"\nstart = "b"',
        'path = "a"\ndata = "generic"',
        'generic_path = "a.jsonl"',
        'online = "off"\nonline_every = 2',
        "online_every = 5\nonline_max_lag = 3",
        'choose_k = "fixed"\nprofile = "p.json"',
        'choose_k = "adaptive"',
        'method = "ngram"\nmin_ngram = 5\nmax_ngram = 4',
    ],
)
def test_a_draft_setting_that_cannot_take_effect_is_refused(draft, recipe_file):
    with pytest.raises(ConfigError, match=r"draft -> .*(no effect|without effect|give one of|needs|[Rr]aise)"):
        load_recipe(recipe_file(f"[draft]\n{draft}\n"))


def test_a_control_without_a_group_to_spare_is_refused(recipe_file):
    with pytest.raises(ConfigError, match=r"certificate\.control_share is 0\.1 and algorithm\.prompts_per_step is 1"):
        load_recipe(recipe_file("[certificate]\ncontrol_share = 0.1\n[algorithm]\nprompts_per_step = 1\n"))


@pytest.mark.parametrize("key", ["min_terms", "max_terms", "num_digits"])
def test_a_key_of_sums_is_refused_with_word_problems_unless_it_has_its_default(key, recipe_file):
    task = ["--data.task", "gsm_symbolic"]
    default = getattr(Recipe.model_fields["data"].default, key)
    assert load_recipe(recipe_file(""), [*task, f"--data.{key}", str(default)]).data.task == "gsm_symbolic"
    load_recipe(recipe_file(f"[data]\n{key} = 3\n"))
    with pytest.raises(ConfigError, match=rf'data -> {key} without effect with task = "gsm_symbolic".*Leave out {key}'):
        load_recipe(recipe_file(f"[data]\n{key} = 3\n"), task)


@pytest.mark.parametrize("draft", ['method = "none"', "num_draft_tokens = 0"])
def test_a_control_is_refused_where_nothing_is_drafted_anyway(draft, recipe_file):
    control = "[certificate]\ncontrol_share = 0.1\n"
    load_recipe(recipe_file(control))
    load_recipe(recipe_file(f"[draft]\n{draft}\n"))
    with pytest.raises(ConfigError, match=r"certificate\.control_share is 0\.1 without effect: nothing is drafted"):
        load_recipe(recipe_file(f"{control}[draft]\n{draft}\n"))


def test_a_control_is_of_the_arms_that_draft(recipe_file):
    arms = load_arms(recipe_file("[certificate]\ncontrol_share = 0.1\n"), [], ["none", "ngram"])
    assert {arm: recipe.certificate.control_share for arm, recipe in arms.items()} == {"none": 0.0, "ngram": 0.1}
    given = load_arms(recipe_file(""), ["--certificate.control_share", "0.2"], ["none", "ngram"])
    assert {arm: recipe.certificate.control_share for arm, recipe in given.items()} == {"none": 0.0, "ngram": 0.2}
