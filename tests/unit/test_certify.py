"""What is sampled is judged rightly: locators are their definitions, and under the null every p-value is uniform."""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import torch
from scipy.stats import kstest

from paceline.config.run import Algorithm, Train
from paceline.drafts.ngram import NgramDrafter
from paceline.engine.reference import ReferenceEngine
from paceline.loop.certify import P_LIMIT, Z_LIMIT, findings
from paceline.loop.scoring import DraftVerdict, draft_verdicts, score_rollouts
from paceline.spec.certificate import AcceptanceSlotReport, Certificate, SlotReport
from paceline.spec.sampling import policy_probs
from paceline.testing.runs import STOP_TOKEN, tiny_policy
from paceline.train.logprobs import Sample
from paceline.train.policy import PolicyTrainer
from paceline.types import Block, Completion, Prompt, Request, Sampling, Versions

torch.set_num_threads(1)

SAMPLING = Sampling(temperature=1.0, max_tokens=24, stop_token_ids=(STOP_TOKEN,))


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
    values = {"z": [], "ks": [], "lag1": [], "cross": []}
    noise = generator(2)
    for first in range(0, len(samples), per_run):
        chosen = slice(first, first + per_run)
        report = score_rollouts(trainer, samples[chosen], completions[chosen], 4, noise).certificate.report()
        for name, z in (("z", report.z), ("lag1", report.lag1_z), ("cross", report.cross_z)):
            values[name].append(math.erfc(abs(z) / math.sqrt(2)))
        values["ks"].append(report.ks_p)
    return values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_over_200_autoregressive_runs_every_p_value_is_uniform(dtype):
    """False-alarm rate: four Kolmogorov-Smirnov tests at 1e-6 / 4 each."""
    trainer, samples, completions = sample_with(tiny_policy(dtype=torch.float32), 800, dtype=dtype)
    for name, values in p_values(trainer, samples, completions, per_run=4).items():
        assert len(values) == 200
        assert kstest(values, "uniform").pvalue > P_LIMIT / 4, name


def test_over_200_runs_a_slightly_colder_sampler_is_far_from_uniform():
    asked = dataclasses.replace(SAMPLING, stop_token_ids=())
    colder = dataclasses.replace(asked, temperature=0.8)
    trainer, samples, completions = sample_with(tiny_policy(dtype=torch.float32), 800, asked, really=colder)
    assert kstest(p_values(trainer, samples, completions, per_run=4)["z"], "uniform").pvalue < P_LIMIT


def clean_report():
    trainer, samples, completions = sample_with(tiny_policy(dtype=torch.float32), 64, drafter=NgramDrafter(1, 3))
    scores = score_rollouts(trainer, samples, completions, 4, generator(), locate=True)
    return scores.certificate.report(), scores.recovered.report()


def test_every_figure_beyond_its_limit_is_found_and_the_place_is_named():
    report, recovered = clean_report()
    assert list(findings(report, recovered, 0.01, 3)) == []
    far = Z_LIMIT + 0.1
    for changes, words in (
        ({"z": far}, "all tokens: z +5.0"),
        ({"ks_p": 9e-7}, "all tokens: the ranks are not uniform"),
        ({"lag1_z": -far}, "neighbouring tokens of a sequence are correlated: z -5.0"),
        ({"cross_z": far}, "tokens of different samples of a prompt are correlated"),
        ({"by_slot": {1: SlotReport(-far, -0.2, 900)}}, "all tokens at slot 1: z -5.0"),
        ({"by_slot": {3: SlotReport(far, 0.2, 900)}}, "all tokens at slot 3 (bonus): z +5.0"),
        ({"by_slot": {-1: SlotReport(far, 0.2, 900)}}, "all tokens at steps without a draft"),
        ({"acceptance_by_slot": {2: AcceptanceSlotReport(far, 0.031, 9)}}, "acceptance at slot 2: z +5.0, accepted"),
        ({"outside_kept": 500}, "all tokens: alarm"),
        ({"log_m": 20.0, "excess_nats": 0.3, "excess_half_width": 0.1}, "all tokens: alarm, log M 20.0, excess +0.3"),
    ):
        found = list(findings(dataclasses.replace(report, **changes), recovered, 0.01, 3))
        assert len(found) == 1 and found[0].startswith(words), (changes, found)
    (found,) = findings(report, dataclasses.replace(recovered, z=far), 0.01, 3)
    assert found == "recovered tokens: z +5.0"


def test_just_below_every_limit_nothing_is_found():
    report, recovered = clean_report()
    near = Z_LIMIT - 0.01
    report = dataclasses.replace(
        report,
        z=near,
        ks_p=1.1e-6,
        lag1_z=-near,
        cross_z=near,
        by_slot={0: SlotReport(near, 0.0, 9), 1: SlotReport(None, None, 0)},
        acceptance_by_slot={0: AcceptanceSlotReport(-near, 0.0, 9)},
    )
    assert list(findings(report, recovered, 0.01, 3)) == []
    assert list(findings(Certificate().report(), Certificate().report(), 0.01, 0)) == []


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
