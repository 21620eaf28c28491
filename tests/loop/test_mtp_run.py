"""Runs of a policy that drafts with its own layer: one publish, one checkpoint, and a trunk that does not notice."""

from __future__ import annotations

import json

import pytest
import torch

from paceline.config.run import Recipe
from paceline.drafts.mtp import MtpDrafter
from paceline.engine.reference import ReferenceEngine
from paceline.loop.loop import TrainingRun, train
from paceline.models.mimo import split_state
from paceline.models.weights import policy_tensors
from paceline.testing.runs import without_seconds
from paceline.train.checkpoint import read_checkpoint

torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def cache_folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def make(root, **draft) -> Recipe:
    return Recipe.model_validate(
        {
            "run": {"root": str(root), "num_steps": 4, "checkpoint_every": 2},
            "policy": {"kind": "tiny", "num_layers": 4, "hidden_size": 32, "train_steps": 20, "num_mtp_layers": 1},
            "data": {"num_train": 12, "num_eval": 6, "max_terms": 3},
            "engine": {"kind": "reference"},
            "algorithm": {"group_size": 4, "prompts_per_step": 2},
            "sampling": {"max_tokens": 16},
            "draft": {"method": "mtp", "num_draft_tokens": 2, **draft},
        }
    )


def engine_layer(run: TrainingRun) -> dict[str, torch.Tensor]:
    assert isinstance(run.engine, ReferenceEngine) and isinstance(run.engine.drafter, MtpDrafter)
    return split_state(policy_tensors(run.engine.model))[1]


def same(left, right) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_a_stopped_run_resumes_to_the_same_metrics_with_the_layer_that_it_had_learned(tmp_path):
    straight = train(make(tmp_path / "straight"))
    stopped = make(tmp_path / "stopped")
    with TrainingRun(stopped) as run:
        run.evaluate()
        start = split_state(run.policy_state())[1]
        for _ in range(3):
            run.run_step()
    resumed = train(stopped, resume=True)
    lines = [
        [without_seconds(json.loads(line)) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (straight, resumed)
    ]
    assert lines[0] == lines[1]
    assert [line["versions"]["draft"] for line in lines[0]] == [0, 1, 2, 3]
    assert all(line["draft"]["updates"] > 0 and line["tokens"]["accepted"] > 0 for line in lines[0])
    checkpoint = read_checkpoint(sorted((straight / "checkpoints").iterdir())[-1])
    assert checkpoint.draft is None and checkpoint.versions.draft == 4
    learned = split_state(checkpoint.policy)[1]
    assert not any(torch.equal(start[name], learned[name]) for name in learned)


def test_the_policys_update_is_bit_equal_whether_or_not_its_layer_learns(tmp_path):
    """The first step of both runs has the same rollouts; later ones have other drafts, and so other noise."""
    after = {}
    for online in ("off", "always"):
        with TrainingRun(make(tmp_path / online, online=online)) as run:
            before = run.policy_state()
            assert same(split_state(before)[1], engine_layer(run))
            metrics = run.run_step()
            after[online] = split_state(run.policy_state())
            assert not same(split_state(before)[0], after[online][0])
            assert same(split_state(before)[1], after[online][1]) == (online == "off")
            assert metrics["draft"]["updates"] == 0 if online == "off" else metrics["draft"]["updates"] > 0
            # What the engine drafts with next is what was learned.
            run.parts.publish()
            assert same(after[online][1], engine_layer(run))
            assert run.engine.versions.draft == (0 if online == "off" else 1)
    assert same(after["off"][0], after["always"][0])
