"""The certificate is silent when tokens come from the policy and loud when they do not.

Bounds on random quantities are set so that a right implementation fails with probability at most 1e-6 per test. Seeds
are fixed, so a passing test stays one.
"""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import binom, kstest

from paceline.spec.certificate import (
    ALARM_LOG_M,
    ALTERNATIVE_SHARES,
    LAMBDAS,
    Certificate,
    alarm,
    score_acceptance,
    score_tokens,
)
from paceline.spec.sampling import draw_uniforms, log_probs, policy_probs, sample, sample_with
from paceline.spec.verify import verify
from paceline.types import Sampling

VOCAB = 24
PLAIN = Sampling()
P_LIMIT = 1e-6
Z_LIMIT = 4.9
"""Two-sided tail of 1e-6 of a standard normal."""


def table(seed: int, coarse: bool = False) -> torch.Tensor:
    """[V, V] logits of the next token given the last one: a policy in which every token changes what follows."""
    logits = 2.0 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))
    return logits.round() if coarse else logits


def decode(logits_VV, sampling, num_sequences, length, generator):
    """Autoregressive tokens. Returns (logits [R, T, V], token_ids [R, T])."""
    last = torch.randint(VOCAB, (num_sequences,), generator=generator)
    probs_VV = policy_probs(logits_VV, sampling)
    contexts, tokens = [], []
    for _ in range(length):
        contexts.append(last)
        last = sample(probs_VV[last], generator)
        tokens.append(last)
    return logits_VV[torch.stack(contexts, 1)], torch.stack(tokens, 1)


def scored(logits_RTV, tokens_RT, sampling, generator, **options):
    uniforms = draw_uniforms(generator, tokens_RT.numel(), 1).squeeze(1)
    return score_tokens(logits_RTV.flatten(0, 1), tokens_RT.flatten(), sampling, uniforms, **options)


def certified(logits_RTV, tokens_RT, sampling, generator, **ids):
    certificate = Certificate()
    certificate.add(scored(logits_RTV, tokens_RT, sampling, generator), **ids)
    return certificate.report()


def log_martingales(scores, num_sequences):
    """[R, T] log M after each token of each sequence, every sequence a run of its own."""
    lambdas = torch.tensor(LAMBDAS, dtype=torch.float64)
    gains = lambdas * scores.surprisal_N.unsqueeze(1) - scores.log_mgf_NL
    return gains.reshape(num_sequences, -1, len(LAMBDAS)).cumsum(1).logsumexp(-1) - math.log(len(LAMBDAS))


# ---- the null


def test_every_bet_is_fair_to_rounding():
    """Summed over the vocabulary, not sampled: E[s - H] = 0, E[(s - H)^2] = V, E[exp(lambda s - log mgf)] = 1."""
    logits = 3.0 * torch.randn(VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for sampling in (PLAIN, Sampling(temperature=0.6), Sampling(top_k=5), Sampling(top_p=0.7, min_p=0.05)):
        probs = policy_probs(logits, sampling)
        scores = score_tokens(
            logits.expand(VOCAB, -1), torch.arange(VOCAB), sampling, torch.full((VOCAB,), 0.5, dtype=torch.float64)
        )
        assert torch.equal(scores.inside_N, probs > 0)
        deviation = scores.surprisal_N - scores.entropy_N
        assert abs(float((probs * deviation).sum())) < 1e-12
        assert abs(float((probs * (deviation.square() - scores.variance_N)).sum())) < 1e-12
        lambdas = torch.tensor(LAMBDAS, dtype=torch.float64)
        bets = (lambdas * scores.surprisal_N.unsqueeze(1) - scores.log_mgf_NL).exp()
        assert float(((probs.unsqueeze(1) * bets).sum(0) - 1.0).abs().max()) < 1e-12


def test_a_bet_on_the_row_before_never_gains_on_average():
    """Summed over the vocabulary: a share of w times the row's mass outside the kept set is lost, the rest is fair."""
    before, own = 2.0 * torch.randn(2, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    uniforms = torch.full((2,), 0.5, dtype=torch.float64)
    for sampling in (PLAIN, Sampling(temperature=0.6), Sampling(top_k=5), Sampling(top_p=0.7)):
        probs_before, probs = policy_probs(before, sampling), policy_probs(own, sampling)
        for share in ALTERNATIVE_SHARES:
            mean = 0.0
            for token in probs.nonzero().flatten().tolist():
                scores = score_tokens(
                    torch.stack([before, own]), torch.tensor([0, token]), sampling, uniforms, in_order=True
                )
                mean += float(probs[token]) * (1.0 - share + share * math.exp(scores.alternative_N[1]))
            assert mean == pytest.approx(1.0 - share * float(probs_before[probs == 0].sum()), abs=1e-12)


def test_the_rank_by_id_is_the_noise_of_a_sampler_that_inverts_the_cdf():
    generator = torch.Generator().manual_seed(16)
    logits = table(1)[torch.randint(VOCAB, (500,), generator=generator)]
    noise = draw_uniforms(generator, 500, 1).squeeze(1)
    tokens = sample_with(policy_probs(logits, PLAIN), noise)
    scores = scored(logits.unsqueeze(0), tokens.unsqueeze(0), PLAIN, generator)
    mass = (-scores.surprisal_N).exp()
    assert bool(((scores.id_rank_N - noise).abs() <= mass + 1e-6).all())


@pytest.mark.parametrize(
    "sampling", [PLAIN, Sampling(temperature=0.7), Sampling(top_k=6, top_p=0.9)], ids=["plain", "cold", "filtered"]
)
def test_z_is_standard_normal_and_u_uniform_over_autoregressive_runs(sampling):
    generator = torch.Generator().manual_seed(1)
    num_runs, length = 400, 250
    scores = scored(*decode(table(1), sampling, num_runs, length, generator), sampling, generator)
    deviation = (scores.surprisal_N - scores.entropy_N).reshape(num_runs, length).sum(1)
    z = deviation / scores.variance_N.reshape(num_runs, length).sum(1).sqrt()
    assert kstest(z.numpy(), "norm").pvalue > P_LIMIT
    assert kstest(scores.rank_N.numpy(), "uniform").pvalue > P_LIMIT
    certificate = Certificate()
    certificate.add(scores)
    report = certificate.report()
    assert abs(report.z) < Z_LIMIT and report.ks_p > P_LIMIT and report.outside_kept == 0
    assert not alarm(report, delta=0.0)


def test_u_is_uniform_under_massive_ties():
    generator = torch.Generator().manual_seed(2)
    coarse = table(5, coarse=True)
    logits, tokens = decode(coarse, PLAIN, 400, 100, generator)
    assert max(len(row.unique()) for row in coarse) < VOCAB // 2
    assert kstest(scored(logits, tokens, PLAIN, generator).rank_N.numpy(), "uniform").pvalue > P_LIMIT
    # Without the randomisation the ranks of ties pile up: the same data at U = 0 is far from uniform.
    frozen = score_tokens(logits.flatten(0, 1), tokens.flatten(), PLAIN, torch.zeros(tokens.numel()))
    assert kstest(frozen.rank_N.numpy(), "uniform").pvalue < P_LIMIT


def test_m_exceeds_a_level_no_oftener_than_its_inverse_however_often_one_looks():
    """Ville: P(M ever >= 20) <= 1/20, over 1,000 runs looked at after every token."""
    generator = torch.Generator().manual_seed(3)
    num_runs = 1000
    scores = scored(*decode(table(2), PLAIN, num_runs, 200, generator), PLAIN, generator)
    log_m = log_martingales(scores, num_runs)
    crossed = int((log_m.max(1).values >= math.log(20)).sum())
    assert crossed < binom.isf(P_LIMIT, num_runs, 1 / 20)
    # Markov on the mean of M at a short horizon, where it still has a small variance.
    early = log_m[:, 4].exp()
    assert float(early.mean() - 1.0) < 5.0 * float(early.std()) / math.sqrt(num_runs)


# ---- planted faults


@pytest.mark.parametrize("temperature", [0.5, 0.8, 1.3])
def test_another_temperature_fires_within_a_few_thousand_tokens(temperature):
    generator = torch.Generator().manual_seed(4)
    logits, tokens = decode(table(1), Sampling(temperature=temperature), 1, 3000, generator)
    scores = scored(logits, tokens, PLAIN, generator)
    fired = (log_martingales(scores, 1)[0] >= ALARM_LOG_M).nonzero()
    assert len(fired) and int(fired[0]) < (400 if temperature == 0.5 else 2500)
    certificate = Certificate()
    certificate.add(scores)
    report = certificate.report()
    assert alarm(report) and (report.excess_nats > 0) == (temperature > 1) and report.ks_p < P_LIMIT


def test_the_temperature_of_another_row_fires():
    """Half of the batch asked for 0.6, half for 1.2, and the engine exchanged them."""
    generator = torch.Generator().manual_seed(5)
    asked = [Sampling(temperature=0.6), Sampling(temperature=1.2)]
    for name, used in (("right", asked), ("exchanged", asked[::-1])):
        certificate = Certificate()
        for wanted, really in zip(asked, used, strict=True):
            certificate.add(scored(*decode(table(1), really, 4, 400, generator), wanted, generator))
        assert alarm(certificate.report()) == (name == "exchanged")


def test_logits_of_the_row_before_fire():
    generator = torch.Generator().manual_seed(6)
    logits, tokens = decode(table(1), PLAIN, 4, 500, generator)
    assert alarm(certified(logits.roll(1, 1), tokens, PLAIN, generator))


def test_a_fault_that_keeps_the_mean_surprisal_shows_in_the_ranks():
    """Tokens of probability near e^-H only: s - H is about 0 on average, u is far from uniform."""
    generator = torch.Generator().manual_seed(7)
    logits = table(1)[torch.randint(VOCAB, (4000,), generator=generator)]
    log_p = log_probs(logits)
    entropy = -(log_p.exp() * log_p).sum(1, keepdim=True)
    tokens = (log_p + entropy).abs().argmin(1)
    report = certified(logits.unsqueeze(0), tokens.unsqueeze(0), PLAIN, generator)
    assert not alarm(report) and abs(report.z) < Z_LIMIT and report.ks_p < P_LIMIT


def test_an_engine_that_ignores_top_p_is_caught_by_the_kept_set():
    generator = torch.Generator().manual_seed(8)
    asked = Sampling(top_p=0.9)
    report = certified(*decode(table(1), PLAIN, 4, 500, generator), asked, generator)
    assert report.outside_kept > 0 and math.isfinite(report.excess_nats) and alarm(report)
    # Without that count nothing shows: inside the kept set the tokens do follow the renormalised policy.
    assert report.log_m < ALARM_LOG_M and abs(report.z) < Z_LIMIT


def test_filters_missing_in_the_trainer_fire():
    generator = torch.Generator().manual_seed(9)
    report = certified(*decode(table(1), Sampling(top_k=6), 4, 500, generator), PLAIN, generator)
    assert alarm(report) and report.outside_kept == 0


# ---- shared noise


def test_noise_shared_between_samples_shows_in_the_cross_correlation_and_nowhere_else():
    logits, length, group = table(1), 40, 2
    sequences = 200
    reports = {}
    for name in ("own", "shared"):
        certificate = Certificate()
        generator = torch.Generator().manual_seed(10)
        for prompt in range(sequences // group):
            seeds = [prompt * group + sample_ if name == "own" else prompt for sample_ in range(group)]
            rows = []
            for seed in seeds:
                rows.append(decode(logits, PLAIN, 1, length, torch.Generator().manual_seed(1000 + seed)))
            sequence_ids = torch.arange(group).repeat_interleave(length)
            certificate.add(
                scored(torch.cat([row[0] for row in rows]), torch.cat([row[1] for row in rows]), PLAIN, generator),
                sequence_ids_N=sequence_ids,
                group_ids_N=torch.full((group * length,), prompt),
            )
        reports[name] = certificate.report()
    assert abs(reports["own"].cross_z) < Z_LIMIT and abs(reports["own"].lag1_z) < Z_LIMIT
    assert reports["shared"].cross_z > 20 and reports["shared"].cross_correlation > 0.5
    assert reports["shared"].log_m < ALARM_LOG_M


def test_noise_reused_along_a_sequence_shows_in_the_lag_correlation():
    generator = torch.Generator().manual_seed(11)
    length = 4000
    for reused in (False, True):
        uniforms = torch.rand(length, generator=generator, dtype=torch.float64)
        if reused:
            uniforms[1::2] = uniforms[::2]
        logits = table(1)[torch.randint(VOCAB, (length,), generator=generator)]
        # Inverse CDF over tokens in falling order of probability: then the noise is the rank itself.
        probs, order = log_probs(logits).exp().sort(descending=True)
        picked = (probs.double().cumsum(1) <= uniforms.unsqueeze(1)).sum(1).clamp(max=VOCAB - 1)
        tokens = order.gather(1, picked.unsqueeze(1)).squeeze(1)
        report = certified(
            logits.unsqueeze(0), tokens.unsqueeze(0), PLAIN, generator, sequence_ids_N=torch.zeros(length)
        )
        assert (report.lag1_z > Z_LIMIT) == reused
        assert abs(report.z) < Z_LIMIT and report.log_m < ALARM_LOG_M


# ---- speculation: what one may split by


def speculate(num_sequences, num_steps, num_slots, generator, faulty=False):
    """Greedy drafts from a perturbed table, verified by `verify`; returns flat records of all committed tokens."""
    policy, draft_VV = table(1), table(1) + 0.7 * table(99)
    probs_VV = policy_probs(policy, PLAIN)
    last = torch.randint(VOCAB, (num_sequences,), generator=generator)
    slots = torch.arange(num_slots + 1).expand(num_sequences, -1)
    parts = {name: [] for name in ("contexts", "tokens", "slots", "is_accepted", "drafted")}
    for _ in range(num_steps):
        # The lengths of the drafts differ between sequences and are fixed before the draw.
        num_drafts = torch.randint(1, num_slots + 1, (num_sequences, 1), generator=generator)
        contexts = [last]
        for _ in range(num_slots):
            contexts.append(draft_VV[contexts[-1]].argmax(1))
        contexts = torch.stack(contexts, 1)
        drafts = torch.where(slots[:, :num_slots] < num_drafts, contexts[:, 1:], -1)
        rows = probs_VV[contexts]
        if faulty:
            rows = rows.clone()
            rows[:, 1] = log_probs(policy[contexts[:, 1]], 0.5).exp()
        result = verify(rows, drafts, generators=generator)
        committed = result.tokens_BK1 >= 0
        drafts_padded = torch.nn.functional.pad(drafts, (0, 1), value=-1)
        parts["contexts"].append(contexts[committed])
        parts["tokens"].append(result.tokens_BK1[committed])
        parts["slots"].append(slots[committed])
        parts["is_accepted"].append((slots < result.num_accepted_B.unsqueeze(1))[committed])
        parts["drafted"].append(drafts_padded[committed])
        last = result.tokens_BK1.gather(1, result.num_accepted_B.unsqueeze(1)).squeeze(1)
    return policy, {name: torch.cat(values) for name, values in parts.items()}


def test_split_by_slot_is_silent_under_right_speculation_and_split_by_acceptance_is_not():
    generator = torch.Generator().manual_seed(12)
    policy, tokens = speculate(500, 40, 3, generator)
    logits = policy[tokens["contexts"]]
    scores = scored(logits.unsqueeze(0), tokens["tokens"].unsqueeze(0), PLAIN, generator)
    by_slot, by_outcome = Certificate(), Certificate()
    by_slot.add(scores, tokens["slots"])
    by_outcome.add(scores, tokens["is_accepted"].long())
    report = by_slot.report()
    assert not alarm(report, delta=0.0) and report.ks_p > P_LIMIT
    assert set(report.by_slot) == {0, 1, 2, 3}
    assert all(abs(slot.z) < Z_LIMIT for slot in report.by_slot.values())
    assert sum(slot.tokens for slot in report.by_slot.values()) == report.tokens
    recovered_or_bonus, accepted = (by_outcome.report().by_slot[outcome] for outcome in (0, 1))
    assert accepted.z < -20 and recovered_or_bonus.z > 20


def test_locators_are_silent_under_right_speculation():
    generator = torch.Generator().manual_seed(13)
    policy, tokens = speculate(500, 40, 3, generator)
    tested = tokens["drafted"] >= 0
    drafted, accepted, slots = (tokens[name][tested] for name in ("drafted", "is_accepted", "slots"))
    logits = policy[tokens["contexts"][tested]]
    accept_probs = policy_probs(logits, PLAIN).gather(1, drafted.unsqueeze(1)).squeeze(1)
    certificate = Certificate()
    certificate.add_acceptance(score_acceptance(accept_probs, accepted), slots)
    acceptance = certificate.report().acceptance_by_slot
    assert set(acceptance) == {0, 1, 2}
    assert all(abs(slot.z) < Z_LIMIT for slot in acceptance.values())

    recovered = ~accepted
    ids = tokens["tokens"][tested][recovered]
    scores = scored(
        logits[recovered].unsqueeze(0), ids.unsqueeze(0), PLAIN, generator, excluded_ids_N=drafted[recovered]
    )
    residual = Certificate()
    residual.add(scores, slots[recovered])
    report = residual.report()
    assert report.outside_kept == 0 and not alarm(report, delta=0.0) and report.ks_p > P_LIMIT
    assert all(abs(slot.z) < Z_LIMIT for slot in report.by_slot.values())


def test_a_wrong_temperature_at_one_slot_is_located_there():
    generator = torch.Generator().manual_seed(14)
    policy, tokens = speculate(500, 20, 3, generator, faulty=True)
    scores = scored(policy[tokens["contexts"]].unsqueeze(0), tokens["tokens"].unsqueeze(0), PLAIN, generator)
    certificate = Certificate()
    certificate.add(scores, tokens["slots"])
    tested = tokens["drafted"] >= 0
    accept_probs = policy_probs(policy[tokens["contexts"]], PLAIN).gather(1, tokens["drafted"].clamp_min(0)[:, None])
    certificate.add_acceptance(
        score_acceptance(accept_probs.squeeze(1)[tested], tokens["is_accepted"][tested]), tokens["slots"][tested]
    )
    report = certificate.report()
    assert alarm(report)
    assert report.by_slot[1].z < -20 and report.acceptance_by_slot[1].z > Z_LIMIT
    for slot in (0, 2):
        assert abs(report.by_slot[slot].z) < Z_LIMIT and abs(report.acceptance_by_slot[slot].z) < Z_LIMIT


def test_acceptance_locator_holds_for_sampled_drafts_and_catches_raw_draft_probs():
    generator = torch.Generator().manual_seed(15)
    rows = 20_000
    target, draft = log_probs(table(1)[0]).exp(), log_probs(table(2)[0], 0.7).exp()
    drafted = sample(draft.expand(rows, -1), generator)
    for told, right in ((draft, True), (log_probs(table(2)[0]).exp(), False)):
        result = verify(
            target.expand(rows, 2, -1), drafted.unsqueeze(1), told.expand(rows, 1, -1), generators=generator
        )
        certificate = Certificate()
        scores = score_acceptance(target[drafted], result.num_accepted_B == 1, draft[drafted])
        certificate.add_acceptance(scores, torch.zeros(rows))
        assert (abs(certificate.report().acceptance_by_slot[0].z) < Z_LIMIT) == right
