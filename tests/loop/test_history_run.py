"""A run whose drafts are its own earlier responses."""

from __future__ import annotations

import json

import pytest
import torch

from paceline.errors import CheckpointError
from paceline.loop.calibrate import calibrate
from paceline.loop.loop import TrainingRun
from paceline.testing.runs import tiny_parts, tiny_recipe

torch.set_num_threads(1)


def test_a_run_keeps_what_its_steps_sampled_within_the_window_and_nothing_else(tmp_path):
    made = tiny_recipe(tmp_path, "history", draft={"window_steps": 2}, run={"num_steps": 3})
    parts = tiny_parts(made)
    sampled = []
    generate = parts.engine.generate

    def generate_and_note(requests, sampling):
        rollouts = generate(requests, sampling)
        sampled.append([list(completion.token_ids) for completion in rollouts.completions])
        return rollouts

    parts.engine.generate = generate_and_note
    with TrainingRun(made, parts=parts) as run:
        run.evaluate()
        metrics = [run.run_step() for _ in range(3)]
        run.evaluate()
    _, _, second, third, _ = sampled
    kept = [(step, tokens) for _, step, tokens in parts.history.state_dict()["texts"]]
    assert kept == [*((2, tokens) for tokens in second), *((3, tokens) for tokens in third)]
    assert all(line["tokens"]["drafted"] > 0 for line in metrics)
    stored = json.loads((made.run.folder / "checkpoints" / "step-00000003" / "history.json").read_text())
    assert [tokens for _, _, tokens in stored["texts"]] == second + third


def test_prompts_that_come_back_are_drafted_for_from_the_epoch_before(tmp_path):
    """With the policy held still, groups of two have almost nobody to draft from but themselves an epoch ago."""
    keys = {"train": {"lr": 0.0}, "algorithm": {"group_size": 2, "prompts_per_step": 7}, "run": {"num_steps": 2}}
    made = tiny_recipe(tmp_path, "history", **keys)
    with TrainingRun(made, parts=tiny_parts(made)) as run:
        first, second = run.run_step(), run.run_step()
    assert second["tokens"]["drafted"] > 3 * first["tokens"]["drafted"]
    assert second["tokens"]["accepted"] > first["tokens"]["accepted"]


def test_a_checkpoint_with_a_history_and_a_recipe_without_one_do_not_mix(tmp_path):
    with_history, without = tiny_parts(tiny_recipe(tmp_path, "history")), tiny_parts(tiny_recipe(tmp_path, "ngram"))
    with pytest.raises(CheckpointError, match=r"draft\.method"):
        without.restore_history(with_history.history.state_dict())
    with pytest.raises(CheckpointError, match=r"draft\.method"):
        with_history.restore_history(None)


def test_a_calibration_measures_steps_in_which_every_sequence_pays_for_all_drafts(tmp_path):
    made = tiny_recipe(tmp_path, "history", engine={"max_num_seqs": 2}, sampling={"max_tokens": 30})
    parts = tiny_parts(made)
    counts = set()
    generate = parts.engine.generate

    def generate_and_count(requests, sampling):
        rollouts = generate(requests, sampling)
        counts.update((block.num_asked, len(block.draft_token_ids)) for c in rollouts.completions for block in c.blocks)
        return rollouts

    parts.engine.generate = generate_and_count
    profile = calibrate(made, parts, budget_s=0.5, max_spread=100.0)
    assert {point.k for point in profile.points} == {0, 1, 2, 3}
    assert counts == {(k, k) for k in range(4)}
    assert not parts.history.fill
