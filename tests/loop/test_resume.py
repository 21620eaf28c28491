"""A run that was stopped, by whatever and wherever, goes on as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from unittest import mock

import pytest
import torch

from paceline.errors import CheckpointError
from paceline.loop import loop
from paceline.loop.loop import TrainingRun
from paceline.observe.progress import Silent
from paceline.testing.runs import tiny_parts as parts
from paceline.testing.runs import tiny_recipe as recipe
from paceline.testing.runs import without_seconds
from paceline.train.checkpoint import read_checkpoint

torch.set_num_threads(1)

DRAFTS = ["none", "ngram", "history", "eagle3"]


def made_for(root, draft):
    """A run with evaluations after every step; a short one with a draft that learns, which the reference engine drafts
    slowly with."""
    if draft == "eagle3":
        return recipe(root, draft, run={"num_steps": 4}, sampling={"max_tokens": 8}, algorithm={"prompts_per_step": 2})
    return recipe(root, draft, run={"eval_every": 1})


def run_all(made, resume=False):
    """What `train` does, on tiny parts."""
    with mock.patch.object(loop, "build_parts", lambda recipe, progress: parts(recipe)):
        return loop.train(made, resume=resume, progress=Silent())


def outcome(folder):
    """All that a run leaves and no clock decides, the final weights and moments included."""
    metrics = [without_seconds(json.loads(line)) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    evaluations = (folder / "evaluations.jsonl").read_text()
    newest = sorted((folder / "checkpoints").iterdir())[-1]
    files = {
        path.name: path.read_bytes() for path in newest.iterdir() if path.name not in ("state.json", "manifest.json")
    }
    state = json.loads((newest / "state.json").read_text())
    del state["metrics_bytes"]  # seconds have more or fewer digits
    return metrics, evaluations, newest.name, files, state


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """draft -> the outcome of an uninterrupted run."""
    return {draft: outcome(run_all(made_for(tmp_path_factory.mktemp(draft), draft))) for draft in DRAFTS}


def in_child(action):
    """Run `action` in a forked process and return its wait status. The child never comes back into pytest."""
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(
                1
            )  # A forked OpenMP runtime starts over from OMP_NUM_THREADS, and rounds differently.
            action()
            os._exit(0)
        except KeyboardInterrupt:
            os._exit(130)
        finally:
            os._exit(1)
    return child


def wait(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize(
    ("draft", "steps"),
    [
        *((draft, steps) for draft in ("none", "ngram") for steps in (1, 2, 3, 5)),
        *(("history", steps) for steps in (3, 5)),
        ("eagle3", 3),
    ],
)
def test_stopped_between_steps_and_resumed_equals_uninterrupted(tmp_path, straight, draft, steps):
    made = made_for(tmp_path, draft)
    with TrainingRun(made, parts=parts(made)) as run:
        for _ in range(steps):
            if run.evaluation_due:
                run.evaluate()
            run.run_step()
    # checkpoint_every is 2: an odd step is lost and done again.
    assert outcome(run_all(made, resume=True)) == straight[draft]


@pytest.mark.parametrize(
    ("draft", "nth"),
    [
        *(("ngram", nth) for nth in (1, 3, 6, 7, 9, 11, 12, 14, 15, 16, 17, 18, 23, 29, 33)),
        ("history", 12),  # a part of the first checkpoint
        ("eagle3", 11),  # draft.pt of the first checkpoint
    ],
)
def test_killed_at_any_write_and_resumed_equals_uninterrupted(tmp_path, straight, draft, nth):
    """Every fsync of a run is a kill point: recipe, metrics, evaluations, and each part of a checkpoint."""
    made = made_for(tmp_path, draft)

    def killed():
        calls = 0
        real = os.fsync

        def fsync(handle):
            nonlocal calls
            calls += 1
            if calls == nth:
                os.kill(os.getpid(), signal.SIGKILL)
            real(handle)

        with mock.patch.object(os, "fsync", fsync):
            run_all(made)

    assert wait(in_child(killed)) == -signal.SIGKILL
    assert outcome(run_all(made, resume=True)) == straight[draft]


def test_killed_at_random_times_again_and_again_equals_uninterrupted(tmp_path, straight):
    made = recipe(tmp_path, "ngram", run={"eval_every": 1})
    rng = random.Random(5)
    killed = 0
    for attempt in range(8):
        child = in_child(lambda attempt=attempt: run_all(made, resume=attempt > 0))
        time.sleep(rng.uniform(0.02, 0.6))
        os.kill(child, signal.SIGKILL)
        killed += wait(child) == -signal.SIGKILL
    assert killed > 0
    assert outcome(run_all(made, resume=True)) == straight["ngram"]


@pytest.mark.parametrize("nth", [1, 4, 6])
def test_ctrl_c_ends_the_step_writes_a_checkpoint_and_the_run_resumes(tmp_path, straight, nth):
    made = recipe(tmp_path, "ngram", run={"eval_every": 1})

    def interrupted():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        calls = 0
        real = torch.optim.AdamW.step

        def step(self, *args):
            nonlocal calls
            calls += 1
            if calls == nth:
                os.kill(os.getpid(), signal.SIGINT)
            return real(self, *args)

        with mock.patch.object(torch.optim.AdamW, "step", step):
            run_all(made)

    assert wait(in_child(interrupted)) == 130
    checkpoints = sorted(path.name for path in (made.run.folder / "checkpoints").iterdir())
    assert checkpoints[-1] == f"step-{nth:08d}"
    assert outcome(run_all(made, resume=True)) == straight["ngram"]


def test_a_second_ctrl_c_stops_at_once_and_the_run_resumes(tmp_path, straight):
    made = recipe(tmp_path, "ngram", run={"eval_every": 1})

    def interrupted():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        real = torch.optim.AdamW.step
        calls = 0

        def step(self, *args):
            nonlocal calls
            calls += 1
            if calls == 4:
                os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)
            return real(self, *args)

        with mock.patch.object(torch.optim.AdamW, "step", step):
            run_all(made)

    assert wait(in_child(interrupted)) == 130
    assert sorted(path.name for path in (made.run.folder / "checkpoints").iterdir())[-1] == "step-00000002"
    assert outcome(run_all(made, resume=True)) == straight["ngram"]


def test_resuming_a_finished_run_changes_nothing(tmp_path, straight):
    made = recipe(tmp_path, "ngram", run={"eval_every": 1})
    run_all(made)
    assert outcome(run_all(made, resume=True)) == straight["ngram"]


def test_a_finished_run_may_be_made_longer(tmp_path, straight):
    made = recipe(tmp_path, "ngram", run={"eval_every": 1, "num_steps": 4})
    run_all(made)
    longer = recipe(tmp_path, "ngram", run={"eval_every": 1, "num_steps": 6})
    metrics, _, *rest = outcome(run_all(longer, resume=True))
    expected_metrics, _, *expected = straight["ngram"]
    assert metrics == expected_metrics
    assert rest == expected


def test_resume_without_anything_to_resume_starts_from_the_beginning(tmp_path, straight):
    made = recipe(tmp_path, "ngram", run={"eval_every": 1})
    assert outcome(run_all(made, resume=True)) == straight["ngram"]


@pytest.mark.parametrize(
    ("draft", "name"),
    [
        *(("ngram", name) for name in ("policy.safetensors", "trainer.pt", "state.json", "manifest.json")),
        ("history", "history.json"),
        ("eagle3", "draft.safetensors"),
        ("eagle3", "draft.pt"),
    ],
)
def test_a_checkpoint_with_a_part_missing_is_not_resumed_from(tmp_path, draft, name):
    made = recipe(tmp_path, draft, run={"num_steps": 2}, sampling={"max_tokens": 6})
    folder = run_all(made)
    (folder / "checkpoints" / "step-00000002" / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        run_all(made, resume=True)
    # The remedy in the message works.
    shutil.rmtree(folder / "checkpoints" / "step-00000002")
    run_all(made, resume=True)


def test_old_checkpoints_are_removed_and_the_last_step_always_has_one(tmp_path):
    folder = run_all(recipe(tmp_path, run={"num_steps": 5, "checkpoint_every": 2, "keep_checkpoints": 2}))
    assert [p.name for p in sorted((folder / "checkpoints").iterdir())] == ["step-00000004", "step-00000005"]


def test_a_checkpoint_with_a_draft_and_a_recipe_without_one_do_not_mix(tmp_path):
    made = made_for(tmp_path, "eagle3")
    run_all(made)
    for draft in ("ngram", "eagle3"):
        other = parts(recipe(tmp_path, draft))
        stored = read_checkpoint(made.run.folder / "checkpoints" / "step-00000004")
        weights, state = (stored.draft, stored.draft_state) if draft == "ngram" else (None, None)
        with pytest.raises(CheckpointError, match=r"draft\.method"):
            other.restore_draft(weights, state, stored.versions)
