"""`paceline certify` through the whole command, and what training does when the certificate alarms."""

from __future__ import annotations

import json
from dataclasses import replace
from unittest import mock

import pytest
import torch

from paceline.cli.main import main
from paceline.config.load import load_recipe
from paceline.drafts.ngram import NgramDrafter
from paceline.engine import reference
from paceline.engine.reference import ReferenceEngine
from paceline.errors import LosslessError
from paceline.loop import certify
from paceline.loop.loop import TrainingRun
from paceline.loop.parts import build_parts
from paceline.models.tiny import make_tokenizer
from paceline.observe.progress import Silent
from paceline.spec import verify as verify_module
from paceline.testing.models import random_policy
from paceline.testing.runs import tiny_parts, tiny_recipe, without_seconds

torch.set_num_threads(1)

Z_LIMIT = 4.9
"""Two-sided tail of 1e-6 of a standard normal."""
RECIPE = """
[policy]
kind = "folder"
path = "{policy}"
[data]
max_terms = 3
num_train = 64
num_eval = 4
max_prompt_tokens = 256
[sampling]
max_tokens = 24
[engine]
kind = "reference"
[draft]
method = "ngram"
min_ngram = 1
[algorithm]
group_size = 4
prompts_per_step = 16
"""


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory):
    root = tmp_path_factory.mktemp("certify")
    tokenizer = make_tokenizer()
    random_policy(root / "policy", num_layers=2, hidden_size=32, vocab_size=len(tokenizer), max_positions=512)
    tokenizer.save_pretrained(root / "policy")
    (root / "recipe.toml").write_text(RECIPE.format(policy=root / "policy"))
    return str(root / "recipe.toml")


def run(recipe_file, tmp_path, *words, tokens=3000):
    """(exit code, arms of the JSON file)."""
    figures = tmp_path / "figures.json"
    code = main(["certify", recipe_file, "--tokens", str(tokens), "--json", str(figures), *words])
    return code, json.loads(figures.read_text())["arms"]


# -- a right sampler passes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [(), ("--sampling.temperature", "0.6", "--sampling.top_p", "0.9")], ids=str)
def test_all_arms_of_a_right_engine_pass_with_exit_code_0(recipe_file, tmp_path, capsys, words):
    code, arms = run(recipe_file, tmp_path, "--arms", "none,ngram", *words)
    assert code == 0
    assert {arm: figures["verdict"] for arm, figures in arms.items()} == {"none": "pass", "ngram": "pass"}
    for arm, figures in arms.items():
        report = figures["certificate"]
        assert report["tokens"] >= 3000 and abs(report["z"]) < Z_LIMIT
        assert 0 < report["smallest_visible_nats"] < 1
        assert report["lag1_z"] is not None and report["cross_z"] is not None
        assert (figures["recovered"]["tokens"] > 0) == (arm == "ngram") == bool(report["acceptance_by_slot"])
    printed = capsys.readouterr().out
    assert "smallest bias seen at 4 sigma" in printed and "z under the residual law" in printed


def test_without_arms_the_draft_of_the_recipe_is_certified(recipe_file, tmp_path):
    assert set(run(recipe_file, tmp_path, tokens=200)[1]) == {"ngram"}
    assert set(run(recipe_file, tmp_path, "--draft.method", "none", tokens=200)[1]) == {"none"}
    assert set(run(recipe_file, tmp_path, "--arms", "none", tokens=200)[1]) == {"none"}


def test_the_same_command_gives_the_same_figures_and_no_request_shares_its_seed(recipe_file, tmp_path):
    seen = []
    real = ReferenceEngine.generate

    def recording(self, requests, sampling):
        seen.extend(requests)
        return real(self, requests, sampling)

    with mock.patch.object(ReferenceEngine, "generate", recording):
        # More samples than prompts: every prompt comes twice and more.
        _, first = run(recipe_file, tmp_path, "--data.num_train", "8", tokens=1600)
    assert len({request.seed for request in seen}) == len(seen) > 8 * 4
    _, again = run(recipe_file, tmp_path, "--data.num_train", "8", tokens=1600)
    for figures in (first["ngram"], again["ngram"]):
        del figures["seconds"]
    assert first == again


def test_a_sampler_that_cannot_be_judged_is_no_pass(recipe_file, tmp_path, capsys):
    """As good as greedy: every token is certain, so none of them could have shown a fault."""
    code, arms = run(recipe_file, tmp_path, "--sampling.temperature", "1e-6", tokens=500)
    assert code == 1
    assert arms["ngram"]["verdict"] == "no evidence" and arms["ngram"]["findings"] == []
    assert "no evidence" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tokens", "0"], "--tokens -> must be 1 or more"),
        (["--json", "nowhere/figures.json"], "the folder nowhere does not exist"),
        (["--arms", "none", "--draft.method", "ngram"], "both name the draft"),
        (["--arms", "none,egale3"], "did you mean eagle3?"),
        (["--token", "5"], "did you mean --tokens?"),
        (["--policy.path", "nowhere"], "policy.path"),
    ],
)
def test_what_cannot_work_is_one_paragraph_and_exit_code_2(recipe_file, capsys, words, message):
    assert main(["certify", recipe_file, *words]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.strip().splitlines()) == 1


# -- planted faults ----------------------------------------------------------------------------------------------------


def another_temperature(patch):
    real = ReferenceEngine.generate
    patch.setattr(
        ReferenceEngine, "generate", lambda self, asked, sampling: real(self, asked, replace(sampling, temperature=0.7))
    )


def recovered_from_the_policy(patch):
    """The residual is missing: what follows a rejection is drawn from p itself."""
    patch.setattr(verify_module, "residual_probs", lambda target, draft, tokens: target)


def slot_1_accepted_too_often(patch):
    def generous(target_probs, draft_probs, draft_tokens):
        accept = real(target_probs, draft_probs, draft_tokens)
        if accept.ndim == 2 and accept.shape[1] > 1:
            accept[:, 1] = accept[:, 1].sqrt()
        return accept

    real = verify_module.acceptance_probs
    patch.setattr(verify_module, "acceptance_probs", generous)


def bonus_of_another_sequence(patch):
    def shifted(target_probs_BKV, draft_tokens_BK, draft_probs_BKV=None, **noise):
        wrong = target_probs_BKV.clone()
        wrong[:, -1] = target_probs_BKV[:, -1].roll(1, dims=0)
        return real(wrong, draft_tokens_BK, draft_probs_BKV, **noise)

    real = reference.verify
    patch.setattr(reference, "verify", shifted)


def bonus_of_the_row_before(patch):
    def shifted(target_probs_BKV, draft_tokens_BK, draft_probs_BKV=None, **noise):
        wrong = target_probs_BKV.clone()
        counts = (draft_tokens_BK >= 0).long().cumprod(1).sum(1)
        rows = torch.arange(len(wrong))[counts > 0]
        wrong[rows, counts[rows]] = target_probs_BKV[rows, counts[rows] - 1]
        return real(wrong, draft_tokens_BK, draft_probs_BKV, **noise)

    real = reference.verify
    patch.setattr(reference, "verify", shifted)


def one_seed_for_all(patch):
    real = ReferenceEngine.generate
    patch.setattr(
        ReferenceEngine,
        "generate",
        lambda self, asked, sampling: real(self, [replace(request, seed=5) for request in asked], sampling),
    )


@pytest.mark.parametrize(
    ("plant", "words", "place"),
    [
        (another_temperature, (), "all tokens: alarm"),
        (recovered_from_the_policy, (), "recovered tokens: alarm"),
        (slot_1_accepted_too_often, (), "acceptance at slot 1: z +"),
        (bonus_of_another_sequence, ("--draft.num_draft_tokens", "1"), "all tokens at slot 1 (bonus): z +"),
        (
            bonus_of_the_row_before,
            ("--draft.num_draft_tokens", "1"),
            "all tokens at slot 1 (bonus): drawn from the row of logits before their own",
        ),
        (one_seed_for_all, (), "tokens of different samples of a prompt are correlated"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_planted_fault_is_exit_code_1_within_5000_tokens_and_its_place_is_named(
    recipe_file, tmp_path, monkeypatch, plant, words, place
):
    plant(monkeypatch)
    code, arms = run(recipe_file, tmp_path, *words, tokens=3400)
    found = arms["ngram"]["findings"]
    assert arms["ngram"]["certificate"]["tokens"] < 5000
    assert code == 1 and arms["ngram"]["verdict"] == "fail"
    assert any(finding.startswith(place) for finding in found), found
    if plant is slot_1_accepted_too_often:
        assert not any(finding.startswith(("acceptance at slot 0", "recovered")) for finding in found), found
    if plant is recovered_from_the_policy:
        assert not any(finding.startswith("acceptance") for finding in found), found


def test_a_fault_of_the_drafts_leaves_the_arm_without_them_a_pass(recipe_file, tmp_path, monkeypatch):
    recovered_from_the_policy(monkeypatch)
    code, arms = run(recipe_file, tmp_path, "--arms", "none,ngram", tokens=3000)
    assert code == 1
    assert {arm: figures["verdict"] for arm, figures in arms.items()} == {"none": "pass", "ngram": "fail"}


# -- the real engine ---------------------------------------------------------------------------------------------------


def test_a_live_vllm_engine_passes_and_drafts_no_more_than_it_may(recipe_file):
    words = ["--engine.kind", "vllm", "--engine.max_num_seqs", "16", "--engine.kv_cache_gib", "0.25"]
    made = load_recipe(recipe_file, [*words, "--data.num_train", "16", "--algorithm.prompts_per_step", "8"])
    parts = build_parts(made, Silent())
    try:
        for limit in (3, 0, 1, 3):
            parts.engine.limit_drafts(limit)
            judged = certify.certify(made, parts, 1000)
            assert judged.verdict == "pass", judged.findings
            by_slot = judged.certificate.by_slot
            within = sum(figures.tokens for slot, figures in by_slot.items() if slot <= (limit or -1))
            assert judged.certificate.tokens == within
            assert limit == 0 or by_slot[limit].tokens > 0
        with pytest.raises(ValueError, match="0 to 3 draft tokens"):
            parts.engine.limit_drafts(4)
    finally:
        parts.close()


# -- in training -------------------------------------------------------------------------------------------------------


class ColdWithDrafts(ReferenceEngine):
    """A fault of speculation: with drafts it samples at another temperature, without them as asked."""

    def generate(self, requests, sampling):
        return super().generate(requests, replace(sampling, temperature=0.5) if self._draft_limit else sampling)


class AlwaysCold(ReferenceEngine):
    """A fault that speculation has no part in."""

    def generate(self, requests, sampling):
        return super().generate(requests, replace(sampling, temperature=0.5))


def training(tmp_path, engine=ReferenceEngine, resume=False, steps=15, **certificate):
    made = tiny_recipe(
        tmp_path,
        run={"num_steps": steps, "checkpoint_every": 5},
        train={"lr": 0.0},
        algorithm={"group_size": 4, "prompts_per_step": 4},
        certificate=certificate,
    )
    policy = tiny_parts(made).trainer.model
    parts = tiny_parts(made, engine=engine(policy, NgramDrafter(1, 4), num_draft_tokens=3, max_num_seqs=16))
    return TrainingRun(made, parts=parts, resume=resume)


def to_the_end(run):
    with run:
        lines = []
        while not run.finished:
            lines.append(without_seconds(run.run_step()))
    return lines


def test_an_alarm_falls_back_to_no_speculation_and_the_run_goes_on_without_one(tmp_path):
    lines = to_the_end(training(tmp_path, ColdWithDrafts, on_alarm="fall_back"))
    assert len(lines) == 15
    alarmed = [line["step"] for line in lines if line["alarms"]]
    assert len(alarmed) == 1 and alarmed[0] < 8
    assert "speculation is off" in lines[alarmed[0] - 1]["alarms"][-1]
    for line in lines:
        assert (set(line["k_histogram"]) == {"0"}) == (line["step"] > alarmed[0])
    # The tokens since then are judged by themselves.
    after = sum(sum(line["lengths"]) for line in lines if line["step"] > alarmed[0])
    assert lines[-1]["certificate"]["tokens"] == after
    assert abs(lines[-1]["certificate"]["z"]) < Z_LIMIT


def test_a_fault_that_stays_without_speculation_stops_the_run(tmp_path):
    with pytest.raises(LosslessError, match="without drafts"):
        to_the_end(training(tmp_path, AlwaysCold, on_alarm="fall_back"))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [bool(json.loads(line)["alarms"]) for line in lines].count(True) == 2


class ColderWithDrafts(ReferenceEngine):
    """The engine's arithmetic differs from the trainer's, and speculation adds a fault of its own."""

    def generate(self, requests, sampling):
        return super().generate(requests, replace(sampling, temperature=0.4 if self._draft_limit else 0.75))


class ColdAfterwards(ColdWithDrafts):
    """Right in the small calls of the control, cold in the large ones of a run that has fallen back."""

    def generate(self, requests, sampling):
        return super().generate(requests, replace(sampling, temperature=0.5) if len(requests) > 8 else sampling)


def test_after_a_fall_back_the_rest_of_the_run_is_compared_with_the_control_of_before(tmp_path):
    lines = to_the_end(training(tmp_path, ColderWithDrafts, on_alarm="fall_back", control_share=0.5))
    alarmed = [line["step"] for line in lines if line["alarms"]]
    assert len(alarmed) == 1 and alarmed[0] < 8
    control = lines[alarmed[0] - 1]["certificate"]["control"]
    assert all(line["certificate"]["control"] == control for line in lines[alarmed[0] :])
    # By itself the rest would be an alarm.
    assert lines[-1]["certificate"]["log_m"] > 20 and lines[-1]["certificate"]["excess_nats"] < -0.05


def test_a_fault_that_comes_up_after_a_fall_back_stops_a_run_with_a_control_too(tmp_path):
    with pytest.raises(LosslessError, match="without drafts"):
        to_the_end(training(tmp_path, ColdAfterwards, on_alarm="fall_back", control_share=0.5, steps=30))


def test_a_run_that_fell_back_is_resumed_as_one(tmp_path):
    straight = to_the_end(training(tmp_path / "a", ColdWithDrafts, on_alarm="fall_back"))
    fell_back = next(line["step"] for line in straight if line["alarms"])
    with training(tmp_path / "b", ColdWithDrafts, on_alarm="fall_back") as run:
        for _ in range(fell_back + 7):
            run.run_step()
    to_the_end(training(tmp_path / "b", ColdWithDrafts, resume=True, on_alarm="fall_back"))
    resumed = [json.loads(line) for line in (tmp_path / "b/run/metrics.jsonl").read_text().splitlines()]
    assert list(map(without_seconds, resumed)) == straight


def test_the_control_is_sampled_without_drafts_and_covers_what_the_certificate_does_not(tmp_path):
    lines = to_the_end(training(tmp_path, steps=6, control_share=0.25))
    total = 0
    for line in lines:
        certificate = line["certificate"]
        total += sum(line["lengths"])
        assert certificate["tokens"] + certificate["control"]["tokens"] == total
        assert set(certificate["control"]["by_slot"]) == {"-1"}
        assert {"0", "1"} <= set(certificate["by_slot"])
        # One group of four.
        assert line["k_histogram"]["0"] >= sum(line["lengths"][12:])
    assert sum(sum(line["lengths"][12:]) for line in lines) == lines[-1]["certificate"]["control"]["tokens"]


def test_what_the_engine_does_without_drafts_too_is_no_fault_of_speculation(tmp_path):
    lines = to_the_end(training(tmp_path / "both", AlwaysCold, on_alarm="stop", control_share=0.5))
    assert lines[-1]["certificate"]["control"]["z"] < -Z_LIMIT
    assert not any(line["alarms"] for line in lines)
    with pytest.raises(LosslessError):
        to_the_end(training(tmp_path / "drafts", ColdWithDrafts, on_alarm="stop", control_share=0.5))


def test_a_control_alters_no_token_and_resumes_with_its_sums(tmp_path):
    straight = to_the_end(training(tmp_path / "a", steps=8, control_share=0.25))
    with training(tmp_path / "b", steps=8, control_share=0.25) as run:
        for _ in range(7):
            run.run_step()
    to_the_end(training(tmp_path / "b", resume=True, steps=8, control_share=0.25))
    resumed = [json.loads(line) for line in (tmp_path / "b/run/metrics.jsonl").read_text().splitlines()]
    assert list(map(without_seconds, resumed)) == straight
    plain = to_the_end(training(tmp_path / "c", steps=8))
    assert [line["lengths"][:12] for line in plain] == [line["lengths"][:12] for line in straight]
