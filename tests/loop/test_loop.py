"""Whole runs through the reference engine: what a step does, records and refuses."""

from __future__ import annotations

import itertools
import json
import math
import time
from dataclasses import replace

import pytest
import torch

from paceline.drafts.base import Proposal
from paceline.drafts.ngram import NgramDrafter
from paceline.engine.publish import PublishReport, weights_digest
from paceline.engine.reference import ReferenceEngine
from paceline.errors import CheckpointError, ConfigError, EngineError, LosslessError
from paceline.loop.loop import TrainingRun
from paceline.loop.seeds import request_seed
from paceline.loop.speculation import speculation_metrics
from paceline.observe.stages import STAGES
from paceline.testing.runs import ShareOfGoodTokens, without_seconds
from paceline.testing.runs import tiny_parts as parts
from paceline.testing.runs import tiny_recipe as recipe
from paceline.testing.speculation import broken_laws
from paceline.train.checkpoint import list_checkpoints
from paceline.types import Request

torch.set_num_threads(1)

KEYS = {
    "step": None,
    "versions": {"policy", "draft"},
    "digests": {"policy", "draft"},
    "stage_s": {*STAGES, "step", "exposed_generate"},
    "tokens": {"prompt", "response", "drafted", "accepted", "bonus", "recovered"},
    "emitted": {"accepted", "recovered", "bonus", "plain"},
    "verify_steps": None,
    "engine_steps": None,
    "engine_s": {"draft", "verify", "sample", "other"},
    "acceptance": {"alpha", "marginal", "conditional", "per_request"},
    "k_histogram": None,
    "k_chosen": None,
    "choice_of_k": None,
    "live_batch": None,
    "batch_by_step": None,
    "lengths": None,
    "reward": {"mean", "std", "n", "failed"},
    "certificate": {"z", "excess_nats", "ks_p", "log_m", "tokens", "by_slot"},
    "policy": {"loss", "grad_norm", "clipped_fraction", "skipped_tokens"},
    "engine_logprobs": {"tokens", "mean_abs", "max_abs", "k3_kl"},
    "draft": {
        "loss",
        "grad_norm",
        "updates",
        "skipped_updates",
        "predicted_alpha",
        "param_delta_norm",
        "lag",
        "check",
    },
    "alarms": None,
}


def start(tmp_path, draft="ngram", part_options=None, **options):
    made = recipe(tmp_path, draft, **options)
    return TrainingRun(made, parts=parts(made, **(part_options or {})))


def policy_of(made):
    return parts(made).trainer.model


def to_the_end(run):
    while not run.finished:
        run.run_step()


def is_finite(value):
    if isinstance(value, dict):
        return all(map(is_finite, value.values()))
    if isinstance(value, list):
        return all(map(is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def lines(run):
    return [json.loads(line) for line in (run.recipe.run.folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("draft", ["none", "ngram", "eagle3"])
def test_every_step_writes_one_complete_line_that_fits_what_was_sampled(tmp_path, draft):
    with start(tmp_path, draft) as run:
        returned = []
        while not run.finished:
            returned.append(run.run_step())
    assert lines(run) == returned
    assert [line["step"] for line in returned] == [1, 2, 3, 4, 5, 6]
    total = 0
    for line in returned:
        assert line.keys() == KEYS.keys()
        for key, inner in KEYS.items():
            assert inner is None or inner <= line[key].keys()
        assert is_finite(line)
        draft_version = line["step"] - 1 if draft == "eagle3" else -1
        assert line["versions"] == {"policy": line["step"] - 1, "draft": draft_version}
        assert len(line["lengths"]) == line["reward"]["n"] == 12
        assert line["tokens"]["response"] == sum(line["lengths"])
        # The engine samples from the distribution that the trainer means: the same log-probs up to rounding.
        assert line["engine_logprobs"]["tokens"] == sum(line["lengths"])
        assert line["engine_logprobs"]["max_abs"] < 1e-4
        total += sum(line["lengths"])
        # Over every sampled token: nothing was dropped before the certificate.
        assert line["certificate"]["tokens"] + line["certificate"]["outside_kept"] == total
        assert sum(slot["tokens"] for slot in line["certificate"]["by_slot"].values()) == total
        blocks = sum(line["k_histogram"].values())
        assert blocks == line["verify_steps"] + line["k_histogram"].get("0", 0)
        assert line["tokens"]["bonus"] + line["tokens"]["recovered"] == line["verify_steps"]
        assert sum(line["emitted"].values()) == line["tokens"]["response"]
        assert sum(line["engine_s"].values()) <= line["stage_s"]["generate"]
        if draft == "none":
            assert line["acceptance"]["alpha"] is None and line["acceptance"]["marginal"] == []
            assert line["emitted"]["plain"] == line["tokens"]["response"]
            assert set(line["certificate"]["by_slot"]) == {"-1"}
        else:
            accepted = line["tokens"]["accepted"]
            assert line["acceptance"]["alpha"] == 1 + accepted / line["verify_steps"]
            assert line["acceptance"]["alpha"] == pytest.approx(1 + sum(line["acceptance"]["marginal"]))


def test_the_stages_add_up_to_the_step(tmp_path):
    with start(tmp_path) as run:
        for _ in range(3):
            began = time.perf_counter()
            seconds = run.run_step()["stage_s"]
            assert sum(seconds[stage] for stage in STAGES) == pytest.approx(seconds["step"], rel=1e-9)
            assert all(seconds[stage] > 0 for stage in STAGES)
            assert seconds["step"] <= time.perf_counter() - began
            assert seconds["exposed_generate"] == seconds["generate"]


@pytest.mark.parametrize("draft", ["none", "ngram", "eagle3"])
def test_the_account_of_every_call_keeps_the_conservation_laws(tmp_path, draft):
    """12 requests for 5 places, one group of them sampled without drafts in a call of its own."""
    shares = {"engine": {"max_num_seqs": 5}, "certificate": {"control_share": 0.3}}
    with start(tmp_path, draft, **(shares if draft != "none" else {"engine": {"max_num_seqs": 5}})) as run:
        for step in range(2):
            run.publish()
            account = run._generate(run._requests(run.parts.prompts.next(3), step))
            assert broken_laws(account) == []
            assert len({live for _, live, _ in speculation_metrics(account)["batch_by_step"]}) > 1
    assert {step.num_asked for step in account.steps} == ({0} if draft == "none" else {0, 3})


def test_the_digests_are_those_of_the_weights_that_sampled(tmp_path):
    with start(tmp_path, "eagle3") as run:
        digests = []
        for _ in range(3):
            policy, draft = weights_digest(run.policy_state()), weights_digest(run.draft_state())
            assert run.run_step()["digests"] == {"policy": policy, "draft": draft}
            digests += [policy, draft]
    assert len(set(digests)) == 6
    with start(tmp_path / "none", "none") as run:
        assert run.run_step()["digests"]["draft"] is None


@pytest.mark.parametrize("draft", ["none", "ngram"])
def test_training_raises_the_reward_on_held_out_prompts(tmp_path, draft):
    with start(tmp_path, draft, run={"num_steps": 25}) as run:
        before = run.evaluate()
        to_the_end(run)
        after = run.evaluate()
    assert after > before + 0.2
    assert abs(lines(run)[-1]["certificate"]["z"]) < 4
    assert all(line["alarms"] == [] for line in lines(run))


def test_an_evaluation_repeats_and_leaves_no_trace_in_training(tmp_path):
    with start(tmp_path / "a") as plain, start(tmp_path / "b") as evaluated:
        for _ in range(3):
            plain.run_step()
            first = evaluated.evaluate()
            assert evaluated.evaluate() == first
            evaluated.run_step()
    assert list(map(without_seconds, lines(plain))) == list(map(without_seconds, lines(evaluated)))
    records = [json.loads(line) for line in (tmp_path / "b/run/evaluations.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [0, 0, 1, 1, 2, 2]
    assert records[0]["reward"]["n"] == 24


def test_a_run_repeats_bit_for_bit_and_another_seed_gives_another(tmp_path):
    outcomes = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        with start(tmp_path / name, run={"seed": seed}) as run:
            for _ in range(2):
                run.run_step()
            outcomes.append((list(map(without_seconds, lines(run))), run.policy_state()))
    (a, a_state), (b, b_state), (c, _) = outcomes
    assert a == b
    assert all(torch.equal(tensor, b_state[name]) for name, tensor in a_state.items())
    assert a != c


class Overruled(ReferenceEngine):
    """An engine with a fault: it samples with another temperature than it was asked for."""

    temperature = 0.5

    def generate(self, requests, sampling):
        return super().generate(requests, replace(sampling, temperature=self.temperature))


def faulty(made):
    return parts(made, engine=Overruled(policy_of(made), NgramDrafter(1, 4), num_draft_tokens=3))


def test_a_fault_of_the_sampler_stops_the_run_with_metrics_and_checkpoint_on_disk(tmp_path):
    made = recipe(tmp_path, run={"num_steps": 40, "checkpoint_every": 40}, train={"lr": 0.0})
    with TrainingRun(made, parts=faulty(made)) as run, pytest.raises(LosslessError, match="certificate"):
        to_the_end(run)
    last = lines(run)[-1]
    assert last["step"] == run.step < 40
    assert last["alarms"][0].startswith("certificate")
    assert last["certificate"]["excess_nats"] < -0.01
    assert [path.name for path in list_checkpoints(made.run.folder / "checkpoints")] == [f"step-{run.step:08d}"]


def test_a_fault_is_only_said_when_the_recipe_asks_for_a_warning(tmp_path):
    made = recipe(tmp_path, run={"num_steps": 15}, train={"lr": 0.0}, certificate={"on_alarm": "warn"})
    with TrainingRun(made, parts=faulty(made)) as run:
        to_the_end(run)
    assert lines(run)[-1]["alarms"]


def test_without_a_fault_the_same_number_of_tokens_raises_no_alarm(tmp_path):
    with start(tmp_path, run={"num_steps": 40, "checkpoint_every": 40}, train={"lr": 0.0}) as run:
        to_the_end(run)
    assert all(line["alarms"] == [] for line in lines(run))


def test_an_engine_that_keeps_old_weights_is_found_by_the_versions_of_its_completions(tmp_path):
    class Stale(ReferenceEngine):
        def publish(self, policy, versions):
            return PublishReport(versions, 0, 0, {}, "", 0.0)

    made = recipe(tmp_path)
    with TrainingRun(made, parts=parts(made, engine=Stale(policy_of(made)))) as run:
        run.run_step()
        with pytest.raises(EngineError, match="lag 1"):
            run.run_step()


class DeadDraft(NgramDrafter):
    """Drafts what the policy gives almost no mass."""

    def __init__(self, policy):
        super().__init__(1, 4)
        self.policy = policy

    def propose(self, token_ids, num_draft_tokens, hidden, generators):
        drafts = []
        for ids, k in zip(token_ids, num_draft_tokens, strict=True):
            worst = int(self.policy(torch.tensor([list(ids)])).logits[0, -1].argmin())
            drafts.append([worst] * k)
        return Proposal(drafts, None)


def test_a_draft_of_which_nothing_is_accepted_is_an_alarm_although_the_text_is_right(tmp_path):
    made = recipe(tmp_path, train={"lr": 0.0}, sampling={"temperature": 0.2})
    with TrainingRun(made, parts=parts(made, drafter=DeadDraft(policy_of(made)))) as run:
        metrics = run.run_step()
        drafted = metrics["tokens"]["drafted"]
        while drafted < 200:
            assert metrics["alarms"] == []
            metrics = run.run_step()
            drafted += metrics["tokens"]["drafted"]
    assert metrics["tokens"]["accepted"] == 0
    assert [alarm.partition(":")[0] for alarm in metrics["alarms"]] == ["acceptance"]


def test_failed_rewards_are_counted_and_never_read_as_zero(tmp_path):
    with start(tmp_path, part_options={"unscorable_length": 12}) as run:
        line = run.run_step()
    failed = sum(length == 12 for length in line["lengths"])
    assert 0 < failed < 12
    assert line["reward"]["failed"] == failed
    assert line["reward"]["n"] == 12
    assert line["reward"]["mean"] is not None


def test_when_all_rewards_fail_nothing_is_learned_and_nothing_breaks(tmp_path):
    made = recipe(tmp_path, sampling={"max_tokens": 1})
    with TrainingRun(made, parts=parts(made, unscorable_length=1)) as run:
        before = run.policy_state()
        line = run.run_step()
        assert run.evaluate() != run.evaluate()  # NaN
        assert all(torch.equal(tensor, before[name]) for name, tensor in run.policy_state().items())
    assert line["reward"] == {"mean": None, "std": None, "n": 12, "failed": 12}


def test_samples_of_a_group_and_of_neighbouring_steps_draw_with_different_noise():
    grid = [
        (step, f"train-{prompt}", sample, attempt)
        for step, prompt, sample, attempt in itertools.product(range(40), range(16), range(8), range(2))
    ]
    seeds = [request_seed(3, *key) for key in grid]
    assert seeds == [request_seed(3, *key) for key in grid]
    assert all(0 <= seed < 2**31 for seed in seeds)
    # 10,240 hashes of 31 bits: 0.02 coincidences are expected.
    assert len(set(seeds)) == len(seeds)
    assert not set(seeds) & {request_seed(4, *key) for key in grid}
    # No structure: neighbours differ in about half of their bits.
    flips = [(a ^ b).bit_count() for a, b in itertools.pairwise(seeds)]
    assert 15.3 < sum(flips) / len(flips) < 15.7


def test_no_two_requests_of_a_run_share_a_seed(tmp_path):
    made = recipe(tmp_path)
    seen: list[Request] = []

    class Recording(ReferenceEngine):
        def generate(self, requests, sampling):
            seen.extend(requests)
            return super().generate(requests, sampling)

    with TrainingRun(made, parts=parts(made, engine=Recording(policy_of(made)))) as run:
        run.evaluate()
        for _ in range(3):
            run.run_step()
    # The third step takes the last prompt of one epoch and the first ones of the next: a prompt may be in it twice.
    assert len({request.seed for request in seen}) == len(seen) == 24 + 36
    assert {request.sample for request in seen} == set(range(4))


def test_an_existing_run_is_neither_overwritten_nor_mixed(tmp_path):
    with start(tmp_path) as run:
        run.run_step()
    before = {path: path.read_bytes() for path in run.recipe.run.folder.iterdir() if path.is_file()}
    with pytest.raises(ConfigError, match=r"run\.name.*--resume"):
        start(tmp_path)
    other = recipe(tmp_path, train={"lr": 1e-2}, sampling={"max_tokens": 12, "top_k": 3})
    with pytest.raises(ConfigError, match=r"sampling\.top_k.*train\.lr"):
        TrainingRun(other, resume=True, parts=parts(other))
    assert {path: path.read_bytes() for path in run.recipe.run.folder.iterdir() if path.is_file()} == before


def test_parts_are_not_built_for_a_folder_that_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        # Without `parts` the policy of this recipe would be loaded, and it does not exist.
        TrainingRun(recipe(tmp_path, policy={"kind": "folder", "path": str(tmp_path / "none")}))


def test_checkpoints_without_their_recipe_are_not_resumed(tmp_path):
    with start(tmp_path) as run:
        run.run_step()
        run.save()
    (run.recipe.run.folder / "config.toml").unlink()
    with pytest.raises(CheckpointError, match=r"config\.toml is missing"):
        TrainingRun(run.recipe, resume=True, parts=parts(run.recipe))


def test_random_numbers_of_plug_ins_that_use_the_global_generator_go_on_too(tmp_path):
    with torch.random.fork_rng(devices=[]):
        with start(tmp_path) as run:
            run.run_step()
            run.save()
        expected = torch.rand(3)
        torch.manual_seed(0)
        with TrainingRun(run.recipe, resume=True, parts=parts(run.recipe)):
            assert torch.equal(torch.rand(3), expected)


def test_a_run_that_could_not_start_gives_its_parts_back(tmp_path):
    with start(tmp_path) as run:
        run.run_step()
        run.save()
    (run.recipe.run.folder / "metrics.jsonl").write_text("")
    made = parts(run.recipe)
    rewards = made.rewards = ShareOfGoodTokens()
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl has 0 bytes"):
        TrainingRun(run.recipe, resume=True, parts=made)
    assert rewards.closed
