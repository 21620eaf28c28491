"""Runs that draft with a model of their own: frozen, recorded, resumed, and found out when it is good for nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from paceline.config.run import Recipe, TinyPolicy
from paceline.drafts.draft_model import DraftModelDrafter
from paceline.engine.publish import weights_digest
from paceline.engine.reference import ReferenceEngine
from paceline.errors import ModelError
from paceline.loop.loop import DRAFTS_WITHOUT_ACCEPTANCE, TrainingRun, train
from paceline.models.folder import load_policy, resolve_policy
from paceline.models.weights import policy_tensors
from paceline.testing.models import against, random_policy
from paceline.testing.runs import without_seconds

torch.set_num_threads(1)

POLICY = {"kind": "tiny", "num_layers": 4, "hidden_size": 32, "train_steps": 20}


@pytest.fixture(scope="module", autouse=True)
def cache_folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("PACELINE_CACHE", str(folder))
        yield folder


def make(root, engine="reference", num_steps=4, **draft) -> Recipe:
    shape = {} if "path" in draft else {"num_layers": 1, "hidden_size": 32}
    return Recipe.model_validate(
        {
            "run": {"root": str(root), "num_steps": num_steps, "checkpoint_every": 2},
            "policy": POLICY,
            "data": {"num_train": 12, "num_eval": 6, "max_terms": 3},
            "engine": {"kind": engine},
            "algorithm": {"group_size": 4, "prompts_per_step": 2},
            "sampling": {"max_tokens": 16},
            "train": {"lr": 3e-3},
            "draft": {"method": "draft_model", "num_draft_tokens": 2, **shape, **draft},
        }
    )


def draft_of(run: TrainingRun) -> dict[str, torch.Tensor]:
    assert isinstance(run.engine, ReferenceEngine) and isinstance(run.engine.drafter, DraftModelDrafter)
    return {name: tensor.clone() for name, tensor in policy_tensors(run.engine.drafter.model).items()}


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_on_vllm_drafts_with_a_smaller_tiny_and_the_draft_has_version_0_in_every_step(tmp_path):
    recipe = make(tmp_path, "vllm", num_steps=2)
    with TrainingRun(recipe) as run:
        metrics = [run.run_step() for _ in range(2)]
        digests, versions = dict(run.parts.digests), run.engine.versions
    assert [line["versions"] for line in metrics] == [{"policy": 0, "draft": 0}, {"policy": 1, "draft": 0}]
    assert all(line["tokens"]["accepted"] > 0 and line["alarms"] == [] for line in metrics)
    assert metrics[-1]["certificate"]["tokens"] == sum(line["tokens"]["response"] for line in metrics)
    small = resolve_policy(TinyPolicy(num_layers=1, hidden_size=32, train_steps=20)).path
    assert versions.draft == 0
    assert digests["draft"] == weights_digest(policy_tensors(load_policy(small))) != digests["policy"]


def test_the_policy_learns_and_the_draft_model_stays_bit_for_bit_what_it_was(tmp_path):
    with TrainingRun(make(tmp_path)) as run:
        before, policy = draft_of(run), run.policy_state()
        for _ in range(2):
            run.run_step()
        run.publish()
        after, learned = draft_of(run), run.policy_state()
        assert run.draft_state() is None
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert any(not torch.equal(tensor, learned[name]) for name, tensor in policy.items())


def test_a_stopped_run_resumes_to_the_same_metrics(tmp_path):
    straight = train(make(tmp_path / "straight"))
    stopped = make(tmp_path / "stopped")
    with TrainingRun(stopped) as run:
        run.evaluate()
        for _ in range(3):
            run.run_step()
    resumed = train(stopped, resume=True)
    expected, found = ([without_seconds(line) for line in lines(folder)] for folder in (straight, resumed))
    assert found == expected and [line["versions"]["draft"] for line in found] == [0, 0, 0, 0]


def test_a_draft_model_of_which_nothing_is_accepted_raises_the_alarm_and_changes_no_law(tmp_path):
    """It drafts what the policy says least."""
    policy_folder = resolve_policy(TinyPolicy.model_validate(POLICY)).path
    shutil.copytree(policy_folder, tmp_path / "draft")
    against(load_policy(policy_folder)).save_pretrained(tmp_path / "draft")
    recipe = make(tmp_path, path=str(tmp_path / "draft"))
    # Sharp, so that what is least likely never comes.
    sampling = recipe.sampling.model_copy(update={"temperature": 0.1})
    with TrainingRun(recipe.model_copy(update={"sampling": sampling})) as run:
        metrics = [run.run_step() for _ in range(4)]
    drafted = sum(line["tokens"]["drafted"] for line in metrics)
    assert drafted > DRAFTS_WITHOUT_ACCEPTANCE and sum(line["tokens"]["accepted"] for line in metrics) == 0
    assert any("acceptance: none of the last" in alarm for alarm in metrics[-1]["alarms"])
    assert not any("certificate" in alarm for line in metrics for alarm in line["alarms"])


def test_k_of_0_reads_no_draft_model(tmp_path, cache_folder):
    before = set(cache_folder.iterdir())
    with TrainingRun(make(tmp_path, num_draft_tokens=0, num_layers=3)) as run:
        assert run.engine.num_draft_tokens == 0 and run.parts.draft_version == -1
    assert {path for path in set(cache_folder.iterdir()) - before if not path.name.startswith(".")} == set()


def test_a_draft_model_that_does_not_fit_is_refused_before_a_run_folder_exists(tmp_path):
    random_policy(tmp_path / "draft", num_layers=2, hidden_size=32, vocab_size=24)
    with pytest.raises(ModelError, match=r"draft\.path is .* has no tokenizer"):
        TrainingRun(make(tmp_path, path=str(tmp_path / "draft")))
    assert not (tmp_path / "run").exists()
