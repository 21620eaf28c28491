"""Runs built from their recipes alone: embedded policy, reasoning-gym prompts, reward workers, trained draft."""

from __future__ import annotations

import json
import subprocess

import pytest
import torch

from paceline.config.run import Recipe
from paceline.drafts.eagle3 import Eagle3Drafter
from paceline.engine.reference import ReferenceEngine
from paceline.errors import DataError, ModelError
from paceline.loop.loop import TrainingRun, train
from paceline.loop.parts import build_parts
from paceline.observe.progress import Silent
from paceline.testing.runs import without_seconds

torch.set_num_threads(1)

EAGLE3 = {"method": "eagle3", "aux_layers": [1, 2, 3], "num_answers": 40, "epochs": 3, "depth": 2}


@pytest.fixture(scope="module", autouse=True)
def cache_folder(tmp_path_factory):
    """One cache for all tests here; none of them needs the user's."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("PACELINE_CACHE", str(folder))
        yield folder


def make(root, draft, **sections):
    tables = {
        "run": {"root": str(root), "num_steps": 4, "checkpoint_every": 2},
        "policy": {"kind": "tiny", "num_layers": 4, "hidden_size": 32, "train_steps": 40},
        "data": {"num_train": 12, "num_eval": 6, "max_terms": 3},
        "engine": {"kind": "reference"},
        "algorithm": {"group_size": 4, "prompts_per_step": 2},
        "sampling": {"max_tokens": 16},
        "draft": draft,
    }
    return Recipe.model_validate({**tables, **{name: {**tables.get(name, {}), **s} for name, s in sections.items()}})


def outcome(folder):
    metrics = [without_seconds(json.loads(line)) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return metrics, (folder / "evaluations.jsonl").read_text()


@pytest.mark.parametrize(
    "draft", [{"method": "none"}, {"method": "ngram", "min_ngram": 1}, EAGLE3], ids=lambda d: d["method"]
)
def test_a_recipe_runs_to_its_end_and_a_stopped_one_resumes_to_the_same_metrics(tmp_path, draft):
    straight = train(make(tmp_path / "straight", draft))
    stopped = make(tmp_path / "stopped", draft)
    with TrainingRun(stopped) as run:
        run.evaluate()
        for _ in range(3):
            run.run_step()
    assert outcome(train(stopped, resume=True)) == outcome(straight)
    metrics, evaluations = outcome(straight)
    assert len(metrics) == 4
    assert [json.loads(line)["step"] for line in evaluations.splitlines()] == [0, 4]
    assert all(line["reward"]["failed"] == 0 for line in metrics)
    assert (metrics[0]["tokens"]["drafted"] > 0) == (draft["method"] != "none")
    # A head that learns has a new version after every step; a look-up has none.
    versions = [0, 1, 2, 3] if draft["method"] == "eagle3" else [-1] * 4
    assert [line["versions"]["draft"] for line in metrics] == versions
    assert {path.name for path in straight.iterdir()} == {
        "config.toml", "versions.json", "metrics.jsonl", "evaluations.jsonl", "trace.json", "checkpoints",
    }  # fmt: skip


def test_the_draft_is_trained_once_and_found_again_by_content(tmp_path, cache_folder):
    statuses: list[str] = []

    class Heard(Silent):
        def status(self, text):
            statuses.append(text)

    first = build_parts(make(tmp_path, {**EAGLE3, "seed": 3}), Heard())
    again = build_parts(make(tmp_path, {**EAGLE3, "seed": 3, "num_draft_tokens": 2}, run={"seed": 5}), Heard())
    other = build_parts(make(tmp_path, {**EAGLE3, "seed": 4}), Heard())
    for parts in (first, again, other):
        parts.close()
    assert sum(status.startswith("Sampling 40 answers") for status in statuses) == 2
    assert first.draft is not None and again.draft is not None and other.draft is not None
    weights, same_weights, other_weights = (parts.draft.weights() for parts in (first, again, other))
    assert weights is not None and same_weights is not None and other_weights is not None
    assert all(torch.equal(tensor, same_weights[name]) for name, tensor in weights.items())
    assert any(not torch.equal(tensor, other_weights[name]) for name, tensor in weights.items())


def test_a_resumed_run_uses_the_draft_of_its_checkpoint_and_not_the_one_in_the_cache(
    tmp_path, monkeypatch, cache_folder
):
    recipe = make(tmp_path, {**EAGLE3, "vocab_size": 18})
    with TrainingRun(recipe) as run:
        run.run_step()
        run.save()
        saved = run.draft_state()
    # The cache is lost and what is trained anew comes out different.
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "other"))
    monkeypatch.setattr("paceline.loop.draft_start.ANSWERS_STEP", -99)
    with TrainingRun(recipe, resume=True) as resumed:
        assert isinstance(resumed.engine, ReferenceEngine)
        assert isinstance(resumed.engine.drafter, Eagle3Drafter)
        used = resumed.engine.drafter.head.export_state()
    assert saved is not None
    assert used.keys() == saved.keys()
    assert "d2t" in saved
    assert all(torch.equal(tensor, saved[name]) for name, tensor in used.items())


def test_k_of_zero_switches_speculation_off_without_training_a_draft(tmp_path, cache_folder):
    before = {path.name for path in cache_folder.iterdir()}
    parts = build_parts(make(tmp_path, {**EAGLE3, "seed": 77, "num_draft_tokens": 0}), Silent())
    parts.close()
    assert parts.draft is None
    assert parts.engine.num_draft_tokens == 0
    assert {path.name for path in cache_folder.iterdir() if "eagle3" in path.name} <= before


@pytest.mark.parametrize(
    ("sections", "error", "message"),
    [
        ({"policy": {"kind": "folder", "path": "no/such/folder"}}, ModelError, "policy.path is no/such/folder"),
        ({"data": {"max_prompt_tokens": 2}}, DataError, "data.max_prompt_tokens is 2"),
        ({"sampling": {"max_tokens": 300}}, DataError, "sampling.max_tokens is 300"),
        ({"draft": {"method": "eagle3", "path": "no/head"}}, ModelError, "no/head has no config.json"),
        ({"draft": {"method": "eagle3"}}, ModelError, "draft.aux_layers"),
    ],
)
def test_what_cannot_work_is_said_before_a_run_folder_exists(tmp_path, sections, error, message):
    tables = make(tmp_path, {"method": "none"}).model_dump(mode="json", exclude_none=True)
    for name, section in sections.items():
        tables[name] = section if {"kind", "method"} & section.keys() else {**tables[name], **section}
    with pytest.raises(error, match=message) as raised:
        TrainingRun(Recipe.model_validate(tables))
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()


def test_a_run_whose_recipe_asks_for_the_impossible_leaves_no_worker_behind(tmp_path):
    def workers():
        listed = subprocess.run(["ps", "-eo", "args"], check=True, capture_output=True, text=True).stdout
        return sum("paceline.rewards.worker chain_sum 4.25" in line for line in listed.splitlines())

    recipe = make(tmp_path, {"method": "eagle3", "path": "no/head"}, rewards={"timeout_s": 4.25})
    with pytest.raises(ModelError):
        TrainingRun(recipe)
    assert workers() == 0
