"""Training with a k that is chosen before every step: same law of the run, whatever stops it."""

from __future__ import annotations

import json

import pytest
import torch

from paceline.drafts.length import LengthChooser
from paceline.drafts.profile import CalibrationPoint, CalibrationProfile
from paceline.loop.length import run_setting
from paceline.loop.loop import TrainingRun
from paceline.testing.runs import tiny_parts, tiny_recipe, without_seconds
from paceline.types import Block

torch.set_num_threads(1)

LIVE = (1, 4, 16)
STEPS = {"num_steps": 4, "eval_every": 1}


def seconds(n: int, k: int) -> float:
    """Drafts are nearly free for few sequences and double the step for many."""
    return 0.004 * (1 + 0.04 * n * k)


def made(root):
    """An adaptive recipe with a profile of costs that were not measured but fit what it runs on."""
    fixed = tiny_recipe(root, run=STEPS)
    setting = run_setting(fixed, tiny_parts(fixed))
    points = [
        CalibrationPoint(n=n, k=k, context=8, seconds=seconds(n, k), cpu_seconds=seconds(n, k), repeats=9, spread=0.0)
        for n in LIVE
        for k in range(4)
    ]
    profile = CalibrationProfile(
        machine=dict(setting.machine),
        versions=dict(setting.versions),
        engine=dict(setting.engine),
        policy=dict(setting.policy),
        draft=dict(setting.draft),
        threads=setting.threads,
        clock="wall",
        points=tuple(points),
        parameters={},
        residuals={},
        held_out={},
    )
    profile.write(root / "profile.json")
    draft = {"choose_k": "adaptive", "profile": str(root / "profile.json"), "probe_share": 0.2}
    return tiny_recipe(root, run=STEPS, draft=draft)


def finish(recipe, resume=False, steps=STEPS["num_steps"]):
    """Steps and evaluations as `train` takes them. Returns the lines of metrics.jsonl."""
    with TrainingRun(recipe, parts=tiny_parts(recipe), resume=resume) as run:
        while run.step < steps:
            if run.evaluation_due:
                run.evaluate()
            run.run_step()
        run.save()
    return [
        without_seconds(json.loads(line)) for line in (recipe.run.folder / "metrics.jsonl").read_text().splitlines()
    ]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return finish(made(tmp_path_factory.mktemp("straight")))


def test_the_log_says_what_was_chosen_and_why_and_k_follows_the_batch(straight):
    for line in straight:
        assert [choice["first"] for choice in line["choice_of_k"]] == [1, 2, 3, 5, 9]
        assert set(line["choice_of_k"][0]) == {"first", "last", "k", "best", "alpha", "seconds", "gain", "trials"}
    assert {"0", "3"} <= set(straight[-1]["k_histogram"])
    last = straight[-1]["choice_of_k"]
    assert last[-1]["k"] < last[0]["k"]


def test_an_adaptive_run_that_was_stopped_and_resumed_equals_an_uninterrupted_one(tmp_path, straight):
    recipe = made(tmp_path)
    finish(recipe, steps=2)
    assert finish(recipe, resume=True) == straight


def test_a_resumed_run_that_forgot_its_acceptances_is_noticed(tmp_path, straight, monkeypatch):
    """The planted fault: the state of the choice of k is not restored."""
    recipe = made(tmp_path)
    finish(recipe, steps=2)
    monkeypatch.setattr(LengthChooser, "load_state_dict", lambda self, state: None)
    assert finish(recipe, resume=True) != straight


def test_an_evaluation_moves_nothing(tmp_path):
    recipe = made(tmp_path)
    with TrainingRun(recipe, parts=tiny_parts(recipe)) as run:
        run.run_step()
        before = run._chooser.state_dict()
        run.evaluate()
        assert run._chooser.state_dict() == before
        # And the run goes on with the chooser that counts.
        run._chooser.observe([Block((5, 5, 5), 0, (5,), 16, num_asked=3)] * 500)
        run.run_step()
        assert run._chooser.state_dict()["probe_credit"] != before["probe_credit"]
