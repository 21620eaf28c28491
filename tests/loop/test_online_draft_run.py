"""Whole runs with a draft that learns: publishing, versions, metrics, alarms, and what it is worth."""

from __future__ import annotations

import copy
import json
import math
import statistics

import pytest
import torch

from paceline.drafts.eagle3 import Eagle3Drafter
from paceline.engine.publish import PublishReport, weights_digest
from paceline.engine.reference import ReferenceEngine
from paceline.errors import EngineError
from paceline.loop.loop import FROZEN_PROBE_EVERY, TrainingRun
from paceline.testing.runs import tiny_head, tiny_policy, without_seconds
from paceline.testing.runs import tiny_parts as parts
from paceline.testing.runs import tiny_recipe as recipe
from paceline.train.checkpoint import read_checkpoint
from paceline.train.draft import Answer, train_eagle3
from paceline.train.online import OnlineDraft
from paceline.types import Prompt, Request, Sampling, Versions

torch.set_num_threads(1)


def start(tmp_path, part_options=None, **sections):
    made = recipe(tmp_path, "eagle3", **sections)
    return TrainingRun(made, parts=parts(made, **(part_options or {})))


def lines(run):
    return [json.loads(line) for line in (run.recipe.run.folder / "metrics.jsonl").read_text().splitlines()]


def head_of(engine):
    assert isinstance(engine.drafter, Eagle3Drafter)
    return engine.drafter.head.export_state()


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(tensor, b[name]) for name, tensor in a.items())


def test_a_trained_draft_changes_in_memory_in_the_checkpoint_and_in_the_engine(tmp_path):
    with start(tmp_path) as run:
        states = [run.draft_state()]
        for number in (1, 2, 3):
            line = run.run_step()
            states.append(run.draft_state())
            assert not same(states[-1], states[-2])
            change = sum((states[-1][name] - states[-2][name]).square().sum().item() for name in states[-1])
            assert line["draft"]["param_delta_norm"] == pytest.approx(math.sqrt(change), rel=1e-4)
            assert line["draft"]["updates"] > 0
            # What drafted in this step is what was trained before it, bit for bit.
            assert line["versions"] == {"policy": number - 1, "draft": number - 1}
            assert same(head_of(run.engine), states[-2])
        stored = read_checkpoint(run.save())
        assert stored.draft is not None and same(stored.draft, states[-1])
        assert stored.versions == Versions(policy=3, draft=3)
        run.evaluate()
        assert same(head_of(run.engine), states[-1])


def test_the_draft_learns_before_the_policy_moves_away_from_the_weights_that_sampled(tmp_path, monkeypatch):
    real, seen = OnlineDraft.learn, []

    def learn(self, lesson, policy_version):
        engine = {name: tensor.clone() for name, tensor in run.engine.model.named_parameters()}
        seen.append(same(engine, run.parts.trainer.weights()))
        assert len(lesson._features) == len(lesson.answers), "the loss ran over all of them"
        return real(self, lesson, policy_version)

    monkeypatch.setattr(OnlineDraft, "learn", learn)
    with start(tmp_path) as run:
        before = run.policy_state()
        for _ in range(2):
            run.run_step()
        assert not same(run.policy_state(), before)
    assert seen == [True, True]


def test_a_frozen_draft_stays_as_it_is_and_is_judged_now_and_then(tmp_path):
    with start(tmp_path, draft={"online": "off"}) as run:
        before = run.draft_state()
        recorded = [run.run_step() for _ in range(FROZEN_PROBE_EVERY + 1)]
        assert same(run.draft_state(), before) and same(head_of(run.engine), before)
    last = recorded[-1]
    assert last["versions"] == {"policy": FROZEN_PROBE_EVERY, "draft": 0}
    assert last["draft"]["updates"] == 0 and last["draft"]["param_delta_norm"] == 0.0
    assert last["draft"]["lag"] == FROZEN_PROBE_EVERY
    judged = [line["draft"]["predicted_alpha"] is not None for line in recorded]
    assert judged == [True, *[False] * (FROZEN_PROBE_EVERY - 1), True]
    first, *between, newest = [line["draft"]["check"] for line in recorded]
    assert first["blocks"] > 0 and newest["blocks"] > 0
    assert all(check == first for check in between) and newest != first
    assert all(line["alarms"] == [] for line in recorded)
    # Not one publish of it, and a digest all the same.
    assert {line["digests"]["draft"] for line in recorded} == {weights_digest(before)}


def test_a_frozen_draft_that_was_damaged_in_the_engine_raises_the_alarm_at_the_next_probe(tmp_path):
    with start(tmp_path, draft={"online": "off"}) as run:
        run.run_step()
        run.engine.drafter.load({name: torch.zeros_like(tensor) for name, tensor in run.draft_state().items()})
        alarms = [run.run_step()["alarms"] for _ in range(FROZEN_PROBE_EVERY)]
    assert alarms[:-1] == [[]] * (FROZEN_PROBE_EVERY - 1)
    assert [text.partition(":")[0] for text in alarms[-1]] == ["draft"]


def test_a_resumed_run_with_a_frozen_draft_equals_an_uninterrupted_one(tmp_path):
    outcomes = []
    for name, stops in (("a", (6,)), ("b", (3, 6))):
        for place, stop in enumerate(stops):
            made = recipe(tmp_path / name, "eagle3", draft={"online": "off"}, sampling={"max_tokens": 8})
            with TrainingRun(made, parts=parts(made), resume=place > 0) as run:
                while run.step < stop:
                    run.run_step()
                run.save()
        outcomes.append(list(map(without_seconds, lines(run))))
    assert outcomes[0] == outcomes[1]


def test_an_engine_that_keeps_its_old_draft_is_found_by_the_versions_of_its_completions(tmp_path):
    class Stale(ReferenceEngine):
        def publish_draft(self, draft, versions):
            return PublishReport(versions, 0, 0, {}, "", 0.0)

    made = recipe(tmp_path, "eagle3")
    policy = tiny_policy(dtype=torch.float32)
    drafter = Eagle3Drafter(tiny_head(policy, made.draft), policy)
    engine = Stale(policy, drafter, num_draft_tokens=3, versions=Versions(0, 0))
    with TrainingRun(made, parts=parts(made, engine=engine)) as run:
        run.run_step()
        with pytest.raises(EngineError, match=r"draft version 0.*version 1"):
            run.run_step()


def test_a_draft_that_was_damaged_in_the_engine_raises_an_alarm_and_changes_no_text(tmp_path):
    class Damaged(ReferenceEngine):
        def publish_draft(self, draft, versions):
            zeros = {name: torch.zeros_like(tensor) for name, tensor in draft.items()}
            return super().publish_draft(zeros, versions)

    made = recipe(tmp_path, "eagle3")
    policy = tiny_policy(dtype=torch.float32)
    drafter = Eagle3Drafter(tiny_head(policy, made.draft), policy)
    engine = Damaged(policy, drafter, num_draft_tokens=3, versions=Versions(0, 0))
    with TrainingRun(made, parts=parts(made, engine=engine)) as run:
        assert run.run_step()["alarms"] == []
        alarms = run.run_step()["alarms"]
    assert [text.partition(":")[0] for text in alarms] == ["draft"]


def test_a_draft_loss_that_is_not_finite_is_an_alarm_and_the_policy_goes_on_as_without_it(tmp_path):
    with start(tmp_path / "a", draft={"online": "off"}) as frozen, start(tmp_path / "b") as broken:
        broken.parts.draft.head.fc.weight.data[0, 0] = math.nan
        frozen.run_step()
        line = broken.run_step()
        assert same(frozen.policy_state(), broken.policy_state())
    assert any("not finite" in text for text in line["alarms"])
    assert line["draft"]["loss"] is None and line["draft"]["skipped_updates"] > 0


def test_the_predicted_acceptance_is_the_one_that_the_engine_measures(tmp_path):
    # A moving policy and a moving draft. z of the first slots: false alarm 6e-7 at 5.
    with start(tmp_path, run={"num_steps": 6, "checkpoint_every": 6}, sampling={"max_tokens": 48}) as run:
        recorded = [run.run_step() for _ in range(6)]
    checks = [line["draft"]["check"] for line in recorded]
    assert sum(check["blocks"] for check in checks) > 500 and all(check["agreement"] > 0.99 for check in checks)
    assert abs(sum(check["z"] for check in checks)) / len(checks) ** 0.5 < 5
    predicted = sum(line["draft"]["predicted_alpha"] for line in recorded) / len(recorded)
    measured = sum(line["acceptance"]["alpha"] for line in recorded) / len(recorded)
    # Of 8 and of 12 rollouts, and a limit cuts the last drafts of a rollout short.
    assert predicted == pytest.approx(measured, rel=0.1)
    assert all(line["alarms"] == [] for line in recorded)


def test_a_draft_that_learns_beside_a_moving_policy_is_accepted_more_often_than_a_frozen_one(tmp_path):
    made = recipe(tmp_path, "eagle3", draft={"depth": 3, "epochs": 8, "lr": 5e-3})
    policy, sampling = tiny_policy(dtype=torch.float32), Sampling(max_tokens=12, stop_token_ids=(1,))
    requests = [Request(Prompt(f"p{i}", (2 + i % 9, 3 + i % 5, 4 + i % 7)), 0, seed=i) for i in range(150)]
    rollouts = ReferenceEngine(copy.deepcopy(policy)).generate(requests, sampling)
    answers = [
        Answer((*request.prompt.token_ids, *completion.token_ids), 3)
        for request, completion in zip(requests, rollouts.completions, strict=True)
    ]
    head, _ = train_eagle3(policy, answers, made.draft, sampling)
    alphas = {}
    for online in ("off", "always"):
        draft = {"online": online, **({"online_lr": 3e-3} if online == "always" else {})}
        with start(tmp_path / online, run={"num_steps": 14, "checkpoint_every": 14}, draft=draft) as run:
            run.parts.draft.load_weights(head.export_state())
            run.engine.publish_draft(head.export_state(), Versions(0, 0))
            alphas[online] = [run.run_step()["acceptance"]["alpha"] for _ in range(14)]
    # The same first step; then the policy moves to other answers than the head was trained on.
    assert alphas["off"][0] == alphas["always"][0]
    assert statistics.fmean(alphas["always"][-5:]) > statistics.fmean(alphas["off"][-5:]) + 0.2, alphas
