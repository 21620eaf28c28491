"""What is sampled is judged rightly: locators are their definitions, and under the null every p-value is uniform."""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import torch
from scipy.stats import binom, kstest

from paceline.config.run import Algorithm, Train
from paceline.drafts.ngram import NgramDrafter
from paceline.engine.reference import ReferenceEngine
from paceline.errors import EngineError
from paceline.loop.certify import findings, findings_of_stops
from paceline.loop.scoring import DraftVerdict, check_ends, draft_verdicts, score_rollouts, stops_passed
from paceline.spec.certificate import AcceptanceSlotReport, Certificate, SlotReport
from paceline.spec.sampling import policy_probs
from paceline.testing.runs import STOP_TOKEN, tiny_policy
from paceline.train.logprobs import Sample
from paceline.train.policy import PolicyTrainer
from paceline.types import Block, Completion, Prompt, Request, Sampling, Versions

torch.set_num_threads(1)

SAMPLING = Sampling(temperature=1.0, max_tokens=24, stop_token_ids=(STOP_TOKEN,))
P_LIMIT = 1e-6


def sample_with(policy, count, sampling=SAMPLING, really=None, dtype=torch.float32, drafter=None, group_size=4):
    """Completions at `really` (default: as asked), and a trainer that believes in `sampling`."""
    engine = ReferenceEngine(copy.deepcopy(policy).to(dtype), drafter, num_draft_tokens=3, max_num_seqs=256)
    requests = [
        Request(
            Prompt(f"p{i // group_size}", (2 + i // group_size % 9, 3 + i // group_size % 7)), i % group_size, 7 + i
        )
        for i in range(count)
    ]
    completions = engine.generate(requests, really or sampling).completions
    samples = [Sample(r.prompt.token_ids, c.token_ids) for r, c in zip(requests, completions, strict=True)]
    name = "bfloat16" if dtype == torch.bfloat16 else "float32"
    trainer = PolicyTrainer(policy, Train(dtype=name, micro_batch_tokens=2048), Algorithm(), sampling)
    return trainer, samples, completions


def generator(seed=1):
    return torch.Generator().manual_seed(seed)


def completion(token_ids, blocks):
    return Completion("p", 0, tuple(token_ids), "stop", tuple(blocks), Versions(0), 0)


def test_a_draft_is_tested_when_all_before_it_were_accepted_and_it_stands_within_the_response():
    blocks = [
        Block((5, 6, 7), 1, (5, 8)),  # 5 accepted, 6 rejected, 7 never looked at
        Block((), 0, (4,)),  # nothing drafted
        Block((-1, -1), 0, (3,)),  # placeholders are no drafts
        Block((2, 1, 9), 3, (2, 1, 9, 9)),  # 1 is the stop token: what stands behind it is cut
    ]
    assert draft_verdicts(completion((5, 8, 4, 3, 2, 1), blocks)) == [
        DraftVerdict(0, 0, 5, True),
        DraftVerdict(1, 1, 6, False),
        DraftVerdict(4, 0, 2, True),
        DraftVerdict(5, 1, 1, True),
    ]


@pytest.mark.parametrize("sampling", [SAMPLING, dataclasses.replace(SAMPLING, temperature=0.7, top_p=0.9)])
def test_the_locators_are_their_definitions(sampling):
    """Against a loop over verdicts that runs the policy once per prefix."""
    policy = tiny_policy(dtype=torch.float64)
    trainer, samples, completions = sample_with(
        policy, 24, sampling, dtype=torch.float64, drafter=NgramDrafter(1, 3), group_size=4
    )
    scores = score_rollouts(trainer, samples, completions, 4, generator(), locate=True)
    deviation, surprisal, tested, rejected = {}, 0.0, {}, 0
    for sample, answer in zip(samples, completions, strict=True):
        for verdict in draft_verdicts(answer):
            ids = [*sample.prompt_ids, *answer.token_ids[: verdict.position]]
            with torch.no_grad():
                probs = policy_probs(policy(torch.tensor([ids])).logits[0, -1], sampling)
            expected = float(probs[verdict.token_id])
            deviation[verdict.slot] = deviation.get(verdict.slot, 0.0) + verdict.accepted - expected
            tested[verdict.slot] = tested.get(verdict.slot, 0) + 1
            if not verdict.accepted:
                probs[verdict.token_id] = 0.0
                residual = probs[probs > 0] / probs.sum()
                token = probs[answer.token_ids[verdict.position]] / probs.sum()
                surprisal += float(-token.log() + (residual * residual.log()).sum())
                rejected += 1
    report, recovered = scores.certificate.report(), scores.recovered.report()
    assert set(report.acceptance_by_slot) == {0, 1, 2}
    for slot, figures in report.acceptance_by_slot.items():
        assert figures.drafts == tested[slot]
        assert figures.excess == pytest.approx(deviation[slot] / tested[slot], abs=1e-9)
    assert recovered.tokens == rejected and recovered.outside_kept == 0
    assert recovered.excess_nats == pytest.approx(surprisal / rejected, abs=1e-9)


def test_looking_for_the_place_changes_nothing_about_the_scores_of_the_tokens():
    trainer, samples, completions = sample_with(tiny_policy(dtype=torch.float32), 8, drafter=NgramDrafter(1, 3))
    plain = score_rollouts(trainer, samples, completions, 4, generator())
    located = score_rollouts(trainer, samples, completions, 4, generator(), locate=True)
    assert all(torch.equal(a, b) for a, b in zip(plain.logprobs, located.logprobs, strict=True))
    assert plain.certificate.report().z == located.certificate.report().z
    assert plain.recovered.report().tokens == 0 and plain.certificate.report().acceptance_by_slot == {}


def p_values(trainer, samples, completions, per_run):
    """Two-sided p of every figure of every run of `per_run` completions."""
    values = {"z": [], "ks": [], "ks ids": [], "lag1": [], "cross": []}
    noise = generator(2)
    for first in range(0, len(samples), per_run):
        chosen = slice(first, first + per_run)
        report = score_rollouts(trainer, samples[chosen], completions[chosen], 4, noise).certificate.report()
        for name, z in (("z", report.z), ("lag1", report.lag1_z), ("cross", report.cross_z)):
            values[name].append(math.erfc(abs(z) / math.sqrt(2)))
        values["ks"].append(report.ks_p)
        values["ks ids"].append(report.ks_ids_p)
    return values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_over_200_autoregressive_runs_every_p_value_is_uniform(dtype):
    """False-alarm rate: five Kolmogorov-Smirnov tests at 1e-6 / 5 each."""
    trainer, samples, completions = sample_with(tiny_policy(dtype=torch.float32), 800, dtype=dtype)
    for name, values in p_values(trainer, samples, completions, per_run=4).items():
        assert len(values) == 200
        assert kstest(values, "uniform").pvalue > P_LIMIT / 5, name


def test_over_200_runs_with_drafts_the_figures_of_every_slot_keep_their_rates():
    """Ranks of a slot, and of its recovered tokens, are uniform. A bet reaches 20 in at most a twentieth of the runs;
    the verdict is a pass in all of them. False-alarm rate: 1e-6 over all assertions together."""
    trainer, samples, completions = sample_with(tiny_policy(dtype=torch.float32), 1600, drafter=NgramDrafter(1, 3))
    noise, uniform, bets = generator(2), {}, {}
    for first in range(0, len(samples), 8):
        chosen = slice(first, first + 8)
        scores = score_rollouts(trainer, samples[chosen], completions[chosen], 4, noise, locate=True)
        report, recovered = scores.certificate.report(), scores.recovered.report()
        assert list(findings(report, recovered, 0.0, 3)) == []
        for where, part in (("all", report), ("recovered", recovered)):
            for slot, figures in part.by_slot.items():
                bets.setdefault((where, slot), []).append(figures.log_m)
                bets.setdefault((where, slot, "row before"), []).append(figures.alternative_log_m)
                if figures.tokens >= 10:
                    uniform.setdefault((where, slot), []).append(figures.ks_p)
                    uniform.setdefault((where, slot, "ids"), []).append(figures.ks_ids_p)
        for slot, drafts in report.acceptance_by_slot.items():
            bets.setdefault(("acceptance", slot), []).append(drafts.log_m)
        bets.setdefault("M", []).append(report.log_m)
    limit = P_LIMIT / (len(uniform) + len(bets))
    assert len(bets) > 15 and len(uniform) > 8
    for place, values in uniform.items():
        if len(values) > 100:
            assert kstest(values, "uniform").pvalue > limit, place
    for place, values in bets.items():
        crossed = sum(value >= math.log(20) for value in values)
        assert crossed <= binom.isf(limit, len(values), 1 / 20), place


def test_over_200_runs_a_slightly_colder_sampler_is_far_from_uniform():
    asked = dataclasses.replace(SAMPLING, stop_token_ids=())
    colder = dataclasses.replace(asked, temperature=0.8)
    trainer, samples, completions = sample_with(tiny_policy(dtype=torch.float32), 800, asked, really=colder)
    assert kstest(p_values(trainer, samples, completions, per_run=4)["z"], "uniform").pvalue < P_LIMIT


def clean_report():
    trainer, samples, completions = sample_with(tiny_policy(dtype=torch.float32), 64, drafter=NgramDrafter(1, 3))
    scores = score_rollouts(trainer, samples, completions, 4, generator(), locate=True)
    return scores.certificate.report(), scores.recovered.report()


CLEAN_SLOT = SlotReport(0.0, 0.0, 0.1, 900, 0.0, 0.0, 0.5, 0.5, 0)
CLEAN_DRAFTS = AcceptanceSlotReport(0.0, 0.0, 900, 0.0)


def slot_with(**changes):
    return dataclasses.replace(CLEAN_SLOT, **changes)


def test_every_figure_beyond_its_limit_is_found_and_the_place_is_named():
    """Some fifty figures share 1e-6: each is read at about 2e-8, which is 5.7 sigma, or a bet of e**18."""
    report, recovered = clean_report()
    assert list(findings(report, recovered, 0.01, 3)) == []
    drafts = report.acceptance_by_slot
    for changes, words in (
        ({"log_m": 19.0, "z": 6.6}, "all tokens: z +6.6, log M 19.0"),
        ({"ks_p": 9e-9}, "all tokens: the ranks are not uniform"),
        ({"ks_ids_p": 9e-9}, "all tokens: the noise is not uniform"),
        ({"lag1_z": -5.8}, "neighbouring tokens of a sequence are correlated (noise is used again): z -5.8"),
        ({"cross_z": 5.8}, "tokens of different samples of a prompt are correlated"),
        ({"by_slot": {1: slot_with(log_m=19.0, z=-6.6)}}, "all tokens at slot 1: z -6.6, log M 19.0"),
        ({"by_slot": {3: slot_with(log_m=19.0)}}, "all tokens at slot 3 (bonus): z +0.0"),
        ({"by_slot": {-1: slot_with(ks_p=9e-9)}}, "all tokens at steps without a draft: the ranks are not"),
        ({"by_slot": {3: slot_with(ks_ids_p=9e-9)}}, "all tokens at slot 3 (bonus): the noise is not uniform"),
        ({"by_slot": {3: slot_with(alternative_log_m=19.0)}}, "all tokens at slot 3 (bonus): drawn from the row of"),
        ({"by_slot": {0: slot_with(outside_kept=50)}}, "all tokens at slot 0: 50 of 950 impossible"),
        (
            {"acceptance_by_slot": {**drafts, 2: AcceptanceSlotReport(6.5, 0.031, 9, 19.0)}},
            "acceptance at slot 2: z +6.5, accepted - expected +3.10 %, log M 19.0",
        ),
        ({"outside_kept": 500}, "all tokens: alarm"),
    ):
        found = list(findings(dataclasses.replace(report, **changes), recovered, 0.01, 3))
        assert len(found) == 1 and found[0].startswith(words), (changes, found)
    (found,) = findings(report, dataclasses.replace(recovered, z=6.6, log_m=19.0), 0.01, 3)
    assert found == "recovered tokens: z +6.6, log M 19.0"
    far = dataclasses.replace(report, log_m=20.0, excess_nats=0.3, excess_half_width=0.1, z=6.6)
    alarmed, figure = findings(far, recovered, 0.01, 3)
    assert alarmed.startswith("all tokens: alarm, log M 20.0, excess +0.3") and figure.startswith("all tokens: z")


def test_just_below_every_limit_nothing_is_found_and_no_z_of_tokens_is_a_figure():
    report, recovered = clean_report()
    report = dataclasses.replace(
        report,
        z=9.0,
        log_m=16.0,
        ks_p=1.1e-7,
        ks_ids_p=1.1e-7,
        lag1_z=-5.2,
        cross_z=5.2,
        by_slot={
            0: slot_with(z=9.0, log_m=16.0, alternative_log_m=16.0, ks_p=1e-7, ks_ids_p=1e-7, outside_kept=12),
            1: slot_with(z=None, excess_nats=None, excess_half_width=None, tokens=0, ks_p=None, ks_ids_p=None),
            2: slot_with(log_m=-4.0, alternative_log_m=-1e5),  # a bet that lost all it had
        },
        acceptance_by_slot={0: AcceptanceSlotReport(-5.2, 0.0, 9, 16.0)},
    )
    assert list(findings(report, recovered, 0.01, 3)) == []
    assert list(findings(Certificate().report(), Certificate().report(), 0.01, 0)) == []


def test_a_response_that_goes_on_behind_a_stop_token_is_named_by_the_slot_of_the_token():
    def cut_late(*blocks, cut=None):
        tokens = [token for block in blocks for token in block.token_ids]
        return completion(tokens[:cut], blocks)

    at_slot_1 = Block((5, STOP_TOKEN, 7), 3, (5, STOP_TOKEN, 7, 8))
    plain = Block((), 0, (STOP_TOKEN,))
    answers = [
        cut_late(at_slot_1, cut=2),  # right: ends with it
        cut_late(at_slot_1),
        cut_late(at_slot_1, at_slot_1),  # counted once, by the first
        cut_late(plain, plain),
        cut_late(Block((5,), 0, (6,))),
    ]
    passed = stops_passed(answers, SAMPLING)
    assert passed == {1: 2, -1: 1}
    assert list(findings_of_stops(passed, 5, 3)) == [
        "stop token not cut at steps without a draft: 1 of 5 responses go on behind it",
        "stop token not cut at slot 1: 2 of 5 responses go on behind it",
    ]
    assert not stops_passed(answers, dataclasses.replace(SAMPLING, stop_token_ids=()))
    check_ends(answers[:1], SAMPLING)
    with pytest.raises(EngineError, match=r"3 of 5 responses go on behind a stop token.*slots \[-1, 1\]"):
        check_ends(answers, SAMPLING)


def test_a_limit_on_drafts_holds_until_it_is_lifted_and_leaves_the_rest_of_the_engine_as_it_was():
    engine = ReferenceEngine(tiny_policy(dtype=torch.float32), NgramDrafter(1, 3), num_draft_tokens=3)
    requests = [Request(Prompt(f"p{i}", (2 + i, 3, 2 + i)), 0, i) for i in range(6)]

    def most_drafted():
        completions = engine.generate(requests, SAMPLING).completions
        most = max(len(block.draft_token_ids) for answer in completions for block in answer.blocks)
        return most, [answer.token_ids for answer in completions]

    full, tokens = most_drafted()
    assert full == 3
    for limit in (2, 0):
        engine.limit_drafts(limit)
        assert most_drafted()[0] == limit
    engine.limit_drafts(3)
    assert most_drafted() == (3, tokens)
    for wrong in (-1, 4):
        with pytest.raises(ValueError, match="0 to 3 draft tokens"):
            engine.limit_drafts(wrong)
