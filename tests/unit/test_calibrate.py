"""Calibration: what is counted, what is fitted, what is refused; measured on the reference engine."""

from __future__ import annotations

import itertools
import json
import math
import random

import pytest

from paceline.cli.main import main
from paceline.config.load import load_recipe
from paceline.drafts.length import LengthChooser
from paceline.drafts.profile import (
    CalibrationPoint,
    StepCosts,
    check_setting,
    model_seconds,
    read_profile,
    step_terms,
)
from paceline.errors import ConfigError, EngineError
from paceline.loop import calibrate
from paceline.loop.length import build_chooser, run_setting
from paceline.observe.progress import Silent
from paceline.testing.runs import tiny_parts, tiny_recipe

PARAMETERS = {"step": 4e-3, "drafting": 1e-3, "draft_pass": 8e-4, "position": 1e-4, "attended": 2e-7}


def point(n: int, k: int, context: float, seconds: float | None = None) -> CalibrationPoint:
    made = model_seconds(PARAMETERS, n, k, context) if seconds is None else seconds
    return CalibrationPoint(n=n, k=k, context=context, seconds=made, cpu_seconds=2 * made, repeats=9, spread=0.05)


GRID = [point(n, k, context) for n, k, context in itertools.product((1, 4, 16, 64), range(4), (20.0, 80.0))]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A real calibration of the reference engine, the least there is: two rounds. Returns recipe, parts, profile."""
    root = tmp_path_factory.mktemp("calibrate")
    recipe = tiny_recipe(root, sampling={"max_tokens": 60}, engine={"kind": "reference", "max_num_seqs": 4})
    parts = tiny_parts(recipe)
    profile = calibrate.calibrate(recipe, parts, budget_s=0.0, max_spread=math.inf)
    yield recipe, parts, profile
    parts.close()


class Watched:
    """An engine whose `generate` also tells what it returned."""

    def __init__(self, engine, tell):
        self._engine, self._tell = engine, tell

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def generate(self, requests, sampling):
        rollouts = self._engine.generate(requests, sampling)
        self._tell(rollouts)
        return rollouts


# -- measuring -------------------------------------------------------------------------------------------------------


def test_every_batch_size_is_measured_at_every_k_with_enough_steps(measured):
    recipe, _, profile = measured
    assert {p.n for p in profile.points} <= {1, 2, 4} and {p.k for p in profile.points} == {0, 1, 2, 3}
    assert all(p.repeats >= calibrate.MIN_REPEATS and p.seconds > 0 and p.cpu_seconds > 0 for p in profile.points)
    contexts = sorted({p.context for p in profile.points})
    assert 3 < contexts[0] < contexts[-1] < 3 + recipe.sampling.max_tokens
    assert profile.threads >= 1 and profile.draft == {"method": "ngram", "parameters": 0}


def test_after_a_calibration_the_engine_drafts_as_it_was_built_to(measured):
    _, parts, _ = measured
    rollouts = parts.engine.generate([calibrate.Request(prompt, 0, 5) for prompt in parts.held_out[:4]], parts.sampling)
    assert {step.num_asked for step in rollouts.steps} == {3}


def test_the_steps_of_prompts_are_measured_apart(measured):
    _, parts, profile = measured
    assert [(p.n, p.repeats) for p in profile.prompts] == [(n, calibrate.PROMPT_REPEATS) for n in (1, 4)]
    assert all(p.seconds > 0 for p in profile.prompts)
    # One step for each, in which nothing is drafted and every prompt gives its first token.
    prompts = parts.prompts.next(4)
    calls = []
    watched = calibrate.replace(parts, engine=Watched(parts.engine, lambda rollouts: calls.append(rollouts.steps)))
    calibrate.measure_prompts(watched, prompts, measured[0])
    assert [[(step.live, step.num_asked) for step in steps] for steps in calls] == [[(1, 0)]] * 3 + [[(4, 0)]] * 3


def test_only_steps_with_the_whole_batch_and_a_settled_k_are_counted(measured):
    """The first step of each k still has the drafter read the verification of another k; of k = 0 the last one, too."""
    recipe, parts, _ = measured
    engine = parts.engine
    asked = []
    watched = Watched(engine, lambda rollouts: asked.append(rollouts.steps))
    sampling = calibrate.replace(parts.sampling, stop_token_ids=(), max_tokens=50)
    lengths = calibrate.lengths_in_turn(3, random.Random(0))
    times = calibrate._generate(watched, parts.prompts.next(4), sampling, recipe, 0, lengths)
    engine.choose_drafts(None)
    (steps,) = asked
    whole = list(itertools.takewhile(lambda step: step.live == 4, steps))
    # The steps come in fours of one k. The first two do not count: prompts are read in the first.
    places = [index % 4 for index in range(len(whole))]
    counted = [
        step.seconds
        for index, (step, place) in enumerate(zip(whole, places, strict=True))
        if place > 0 and index != 1 and (step.num_asked > 0 or place < 3)
    ]
    assert [t.seconds for t in times] == counted and {t.k for t in times} == {0, 1, 2, 3}
    assert len(times) > len(steps) / 3
    assert [t.context for t in times] == sorted(t.context for t in times)


def test_a_step_without_drafts_counts_only_where_none_follow_it():
    assert calibrate.settled([0, 0, 0, 0, 2, 2, 2, 0, 0, 0, 3]) == [
        *(False, False, True, False),  # Prompts are read in the first two; drafts follow on the fourth.
        *(False, True, True),
        *(False, True, False),
        False,
    ]
    assert calibrate.settled([0, 0, 0]) == [False, False, False]  # What follows on the last step is not known.


def test_k_comes_in_turns_that_give_every_k_the_same_share():
    lengths = calibrate.lengths_in_turn(3, random.Random(2))
    for _ in range(5):
        turn = [next(lengths) for _ in range(4 * calibrate.STEPS_PER_K)]
        runs = [(k, len(list(group))) for k, group in itertools.groupby(turn)]
        assert sorted(k for k, _ in runs) == [0, 1, 2, 3] and {length for _, length in runs} == {calibrate.STEPS_PER_K}


def test_batch_sizes_end_with_the_engines_own():
    assert calibrate.batch_sizes(48) == [1, 2, 4, 8, 16, 32, 48]
    assert calibrate.batch_sizes(64) == [1, 2, 4, 8, 16, 32, 64]
    assert calibrate.batch_sizes(1) == [1]


def times(n: int, k: int, context: float, count: int, seconds: float = 0.01) -> list[calibrate.StepTime]:
    return [calibrate.StepTime(n, k, context, seconds, 2 * seconds)] * count


def test_halves_are_points_of_their_own_where_each_has_enough_steps():
    enough, few = calibrate.MIN_REPEATS, calibrate.MIN_REPEATS - 1
    first, second = [*times(4, 0, 10, enough), *times(4, 1, 12, enough)], times(4, 0, 60, enough)
    both = calibrate.grid_points([*first, *second, *times(4, 1, 62, enough)], 30)
    assert {(p.k, p.context) for p in both} == {(0, 11.0), (1, 11.0), (0, 61.0), (1, 61.0)}
    merged = calibrate.grid_points([*first, *second, *times(4, 1, 62, few)], 30)
    assert [(p.k, p.repeats) for p in merged] == [(0, 2 * enough), (1, enough + few)]
    # A batch size with too few steps at some k is left out whole, and the others stay.
    assert {p.n for p in calibrate.grid_points([*first, *times(8, 0, 10, 2 * enough), *times(8, 1, 10, few)], 30)} == {
        4
    }
    with pytest.raises(EngineError, match="too few for any batch size"):
        calibrate.grid_points(times(4, 0, 10, few), 30)


def test_a_busy_machine_is_refused_and_a_quiet_one_is_not():
    rng = random.Random(3)
    for noise, refused in ((0.05, False), (0.8, True)):
        steps = [
            calibrate.StepTime(4, k, 10.0, 0.01 * (1 + noise * rng.random()), 0.01) for k in range(3) for _ in range(60)
        ]
        points = calibrate.grid_points(steps, 30)
        if refused:
            with pytest.raises(EngineError, match="too busy to measure"):
                calibrate.check_spread(points, calibrate.MAX_SPREAD, "wall")
            # Processor time did not vary: with that clock there is something to go by.
            calibrate.check_spread(calibrate.grid_points(steps, 30, "cpu"), calibrate.MAX_SPREAD, "cpu")
        else:
            calibrate.check_spread(points, calibrate.MAX_SPREAD, "wall")


def test_responses_too_short_to_measure_are_refused(tmp_path):
    recipe = tiny_recipe(tmp_path, sampling={"max_tokens": 12})
    parts = tiny_parts(recipe)
    with pytest.raises(ConfigError, match=r"sampling\.max_tokens -> is 12"):
        calibrate.calibrate(recipe, parts, budget_s=0.0)


# -- fitting ---------------------------------------------------------------------------------------------------------


def test_the_fit_finds_the_terms_that_made_the_times():
    assert calibrate.fit(GRID, "wall") == pytest.approx(PARAMETERS)
    assert calibrate.fit(GRID, "cpu") == pytest.approx({term: 2 * value for term, value in PARAMETERS.items()})
    assert set(PARAMETERS) == set(step_terms(1, 0, 0))


def test_held_out_errors_are_those_of_points_that_were_not_fitted():
    judged = calibrate.held_out(GRID, "wall")
    assert judged["n"] == 16 and judged["k"] == 2
    assert judged["model"]["max"] < 1e-6
    # One odd cell at the left-out n is seen there, and does not bend the fit it is judged by.
    odd = [point(p.n, p.k, p.context, 2 * p.seconds) if (p.n, p.k) == (16, 1) else p for p in GRID]
    assert calibrate.held_out(odd, "wall")["model"]["max"] == pytest.approx(0.5)
    assert calibrate.held_out(GRID[:4], "wall") == {}


# -- the profile -----------------------------------------------------------------------------------------------------


def test_a_profile_survives_its_file(measured, tmp_path):
    _, _, profile = measured
    profile.write(tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == profile


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda raw: raw["points"][1].update(seconds=-1), r"points\.1\.seconds"),
        (lambda raw: raw["points"][0].pop("k"), r"points\.0\.k"),
        (lambda raw: raw.update(clock="sun"), "clock"),
        (lambda raw: raw.pop("threads"), "threads"),
        (lambda raw: raw.update(colour="red"), "colour"),
        (lambda raw: raw["points"].pop(0), r"points: n = \d was measured at k = \[1, 2, 3\]"),
    ],
)
def test_a_broken_profile_is_refused_by_the_name_of_its_field(measured, tmp_path, change, named):
    _, _, profile = measured
    lone = profile.model_copy(update={"points": tuple(p for p in profile.points if p.n == profile.points[0].n)[:4]})
    raw = json.loads(lone.model_dump_json())
    change(raw)
    (tmp_path / "broken.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=named):
        read_profile(tmp_path / "broken.json")


def test_a_profile_that_is_not_there_is_said(tmp_path):
    with pytest.raises(ConfigError, match="paceline calibrate"):
        read_profile(tmp_path / "nowhere.json")


def test_a_profile_of_something_else_is_refused_with_every_difference(measured, tmp_path):
    recipe, parts, profile = measured
    setting = run_setting(recipe, parts)
    path = tmp_path / "profile.json"
    assert check_setting(profile, setting, path) == []
    others = {
        "threads": {"threads": profile.threads + 1},
        "machine.processor": {"machine": {**profile.machine, "processor": "abacus"}},
        "engine.dtype": {"engine": {**profile.engine, "dtype": "bfloat16"}},
        "policy.hidden_size": {"policy": {**profile.policy, "hidden_size": 7}},
        "draft.method": {"draft": {**profile.draft, "method": "eagle3"}},
    }
    for named, update in others.items():
        with pytest.raises(ConfigError, match=named):
            check_setting(profile.model_copy(update=update), setting, path)
    several = {key: value for update in others.values() for key, value in update.items()}
    with pytest.raises(ConfigError) as error:
        check_setting(profile.model_copy(update=several), setting, path)
    assert all(named in str(error.value) for named in others)
    # Memory and package versions move without changing the speed much: the first is ignored, the second said.
    older = profile.model_copy(
        update={"machine": {**profile.machine, "memory_bytes": 1}, "versions": {**profile.versions, "torch": "1.0"}}
    )
    assert [note for note in check_setting(older, setting, path) if "versions.torch: 1.0 there" in note]


# -- the run ---------------------------------------------------------------------------------------------------------


def adaptive(recipe, path, **draft):
    table = recipe.draft.model_dump() | {"choose_k": "adaptive", "profile": str(path), **draft}
    return type(recipe).model_validate({**recipe.model_dump(), "draft": table})


def test_an_adaptive_run_asks_its_chooser_before_every_step(measured, tmp_path):
    recipe, parts, profile = measured
    # Drafting costs nothing for one or two sequences, and far too much for three and four.
    flat = [p.model_copy(update={"seconds": 0.01 * (1 + p.k * (p.n > 2))}) for p in profile.points]
    profile.model_copy(update={"points": tuple(flat)}).write(tmp_path / "profile.json")
    chooser = build_chooser(adaptive(recipe, tmp_path / "profile.json", probe_share=0.0), parts, Silent())
    assert isinstance(chooser, LengthChooser)
    try:
        asked = [calibrate.Request(prompt, 0, seed) for seed, prompt in enumerate(parts.held_out[:4])]
        rollouts = parts.engine.generate(asked, parts.sampling)
    finally:
        parts.engine.choose_drafts(None)
    by_batch = {live: {s.num_asked for s in rollouts.steps if s.live == live} for live in (4, 3, 2, 1)}
    assert {4: {0}, 1: {3}}.items() <= {live: ks for live, ks in by_batch.items() if ks}.items()
    blocks = [block for completion in rollouts.completions for block in completion.blocks]
    assert all(block.num_asked == 0 and not block.draft_token_ids for block in blocks if block.live_batch > 2)
    assert any(block.draft_token_ids for block in blocks if block.live_batch <= 2)


def test_a_fixed_run_has_no_chooser(measured):
    recipe, parts, _ = measured
    assert build_chooser(recipe, parts, Silent()) is None


def test_a_k_beyond_the_profile_is_refused(measured, tmp_path):
    recipe, parts, profile = measured
    profile.write(tmp_path / "profile.json")
    with pytest.raises(ConfigError, match=r"draft\.num_draft_tokens -> is 5"):
        build_chooser(adaptive(recipe, tmp_path / "profile.json", num_draft_tokens=5), parts, Silent())


def test_costs_of_a_profile_are_its_medians_between_its_contexts():
    at_50 = StepCosts.from_points(GRID, context=50.0)
    assert at_50(16, 2) == pytest.approx(model_seconds(PARAMETERS, 16, 2, 50.0))
    assert StepCosts.from_points(GRID)(16, 2) == pytest.approx(at_50(16, 2))
    by_cpu = StepCosts.from_points(GRID, "cpu", context=50.0)
    assert by_cpu(16, 2) == pytest.approx(2 * at_50(16, 2))


# -- the recipe and the command --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ('method = "ngram"\nchoose_k = "adaptive"', "needs draft.profile"),
        ('method = "ngram"\nprofile = "p.json"', 'profile without effect while choose_k = "fixed"'),
        ('method = "ngram"\nprobe_share = 0.05', "probe_share without effect"),
    ],
)
def test_a_choice_of_k_that_cannot_take_effect_is_refused(tmp_path, table, message):
    path = tmp_path / "recipe.toml"
    path.write_text(f"[draft]\n{table}\n")
    with pytest.raises(ConfigError, match=message):
        load_recipe(path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--draft.method", "none"], "there is no k to choose"),
        (["--draft.num_draft_tokens", "0"], "there is no k to choose"),
        (["--seconds", "0"], "--seconds -> must be more than 0"),
        (["--clock", "sun"], "--clock -> must be one of wall, cpu"),
        (["--out", "nowhere/p.json"], "--out -> the folder nowhere does not exist"),
        (["--second", "3"], "--second is not an option; did you mean --seconds"),
    ],
)
def test_the_command_refuses_what_it_cannot_measure(tmp_path, capsys, words, message):
    path = tmp_path / "recipe.toml"
    path.write_text('[draft]\nmethod = "ngram"\n')
    assert main(["calibrate", str(path), *words]) == 2
    assert message in capsys.readouterr().err
