"""The certificate's book-keeping: chunks, merging, checkpoints, the kept set, evidence, the alarm's rule."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch

from paceline.spec.certificate import (
    ALARM_LOG_M,
    LAMBDAS,
    MIN_VARIANCE,
    SLOT_STAKES,
    AcceptanceScores,
    Certificate,
    CertificateReport,
    alarm,
    score_acceptance,
    score_tokens,
)
from paceline.spec.sampling import LogitsError, draw_uniforms, policy_probs, sample
from paceline.types import Sampling

FILTERED = Sampling(temperature=0.8, top_k=8, top_p=0.9)


def make(num_tokens=300, vocab=20, seed=0, sampling=FILTERED, dtype=torch.float32, scale=2.0):
    generator = torch.Generator().manual_seed(seed)
    logits = (scale * torch.randn(num_tokens, vocab, generator=generator)).to(dtype)
    token_ids = sample(policy_probs(logits, sampling), generator)
    return logits, token_ids, draw_uniforms(generator, num_tokens, 1).squeeze(1)


def assert_reports_agree(left: CertificateReport, right: CertificateReport) -> None:
    for field in dataclasses.fields(CertificateReport):
        a, b = getattr(left, field.name), getattr(right, field.name)
        if isinstance(a, dict):
            assert a.keys() == b.keys()
            for key in a:
                assert dataclasses.astuple(a[key]) == pytest.approx(dataclasses.astuple(b[key]), rel=1e-9)
        elif a is None or b is None:
            assert a is b, field.name
        else:
            assert a == pytest.approx(b, rel=1e-9, abs=1e-12), field.name


@pytest.mark.parametrize("sampling", [Sampling(), FILTERED, Sampling(top_p=0.5, min_p=0.1)])
def test_scores_are_their_definitions(sampling):
    logits, token_ids, uniforms = make(50, sampling=sampling, dtype=torch.float64)
    scores = score_tokens(logits, token_ids, sampling, uniforms)
    probs = policy_probs(logits, sampling)
    for row, token in enumerate(token_ids.tolist()):
        p = probs[row][probs[row] > 0]
        assert math.isclose(scores.surprisal_N[row], -probs[row, token].log(), rel_tol=1e-12)
        entropy = -(p * p.log()).sum()
        assert math.isclose(scores.entropy_N[row], entropy, rel_tol=1e-12, abs_tol=1e-30)
        assert math.isclose(scores.variance_N[row], (p * (p.log() + entropy) ** 2).sum(), rel_tol=1e-9, abs_tol=1e-30)
        for column, size in enumerate(LAMBDAS):
            assert math.isclose(
                scores.log_mgf_NL[row, column], (p ** (1 - size)).sum().log(), rel_tol=1e-9, abs_tol=1e-15
            )
        above = probs[row][probs[row] > probs[row, token]].sum()
        tied = probs[row][probs[row] == probs[row, token]].sum()
        assert math.isclose(scores.rank_N[row], above + uniforms[row] * tied, abs_tol=1e-12)
        earlier = probs[row, :token].sum()
        assert math.isclose(scores.id_rank_N[row], earlier + uniforms[row] * probs[row, token], abs_tol=1e-12)
    assert scores.alternative_N.count_nonzero() == 0
    in_order = score_tokens(logits, token_ids, sampling, uniforms, in_order=True)
    rows = torch.arange(1, 50)
    ratio = (probs[rows - 1, token_ids[1:]] / probs[rows, token_ids[1:]]).log()
    torch.testing.assert_close(in_order.alternative_N, torch.nn.functional.pad(ratio, (1, 0)), rtol=1e-9, atol=1e-12)


def test_float32_bets_have_no_bias_that_a_long_run_could_add_up():
    """Rounding leaves a random error per token, but no mean: as the sums are divided by the mass that float32 leaves,
    which at this vocabulary is off by 9e-7 the same way in every row."""
    logits, token_ids, uniforms = make(60, vocab=50_000, sampling=Sampling(), scale=3.0)
    lambdas = torch.tensor(LAMBDAS, dtype=torch.float64)
    single, double = (score_tokens(values, token_ids, Sampling(), uniforms) for values in (logits, logits.double()))
    error = lambdas * (single.surprisal_N - double.surprisal_N).unsqueeze(1) - (single.log_mgf_NL - double.log_mgf_NL)
    assert float(error.mean(0).abs().max()) < 3e-7
    drift = (single.surprisal_N - single.entropy_N) - (double.surprisal_N - double.entropy_N)
    assert float(drift.mean().abs()) < 1e-6


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("chunk_elements", [1, 20, 70, 10_000])
def test_chunks_do_not_change_the_scores(chunk_elements, in_order):
    logits, token_ids, uniforms = make(50)
    whole = score_tokens(logits, token_ids, FILTERED, uniforms, in_order=in_order)
    parts = score_tokens(logits, token_ids, FILTERED, uniforms, in_order=in_order, chunk_elements=chunk_elements)
    for field in dataclasses.fields(whole):
        torch.testing.assert_close(getattr(parts, field.name), getattr(whole, field.name), rtol=1e-6, atol=1e-6)


def test_scores_of_no_tokens_are_empty():
    scores = score_tokens(torch.zeros(0, 5), torch.zeros(0, dtype=torch.long), FILTERED, torch.zeros(0))
    assert scores.log_mgf_NL.shape == (0, len(LAMBDAS)) and scores.inside_N.dtype == torch.bool
    certificate = Certificate()
    certificate.add(scores, torch.zeros(0), sequence_ids_N=torch.zeros(0), group_ids_N=torch.zeros(0))
    report = certificate.report()
    assert report.tokens == 0 and not report.evidence and report.excess_nats is None and report.log_m == 0.0
    assert not alarm(report)


def test_a_row_of_nan_is_refused():
    logits, token_ids, uniforms = make(5)
    logits[3, 1] = torch.nan
    with pytest.raises(LogitsError, match="row 3"):
        score_tokens(logits, token_ids, FILTERED, uniforms)


def filled(seed, num_tokens=300):
    certificate = Certificate()
    scores = score_tokens(*make(num_tokens, seed=seed)[:2], FILTERED, make(num_tokens, seed=seed)[2])
    index = torch.arange(num_tokens)
    certificate.add(scores, index % 4 - 1, sequence_ids_N=index // 10, group_ids_N=index // 50)
    coins = torch.rand(num_tokens, generator=torch.Generator().manual_seed(seed)) < 0.5
    certificate.add_acceptance(score_acceptance(torch.full((num_tokens,), 0.5), coins), index % 3)
    return certificate, scores


def test_merging_is_adding_together():
    (left, left_scores), (right, right_scores) = filled(1), filled(2, 200)
    together = Certificate()
    for scores, seed in ((left_scores, 1), (right_scores, 2)):
        index = torch.arange(len(scores.surprisal_N))
        together.add(scores, index % 4 - 1, sequence_ids_N=index // 10, group_ids_N=index // 50)
        coins = torch.rand(len(index), generator=torch.Generator().manual_seed(seed)) < 0.5
        together.add_acceptance(score_acceptance(torch.full((len(index),), 0.5), coins), index % 3)
    left.merge(right)
    assert_reports_agree(left.report(), together.report())
    assert left.report().tokens == 500


def test_state_survives_a_checkpoint_bit_for_bit():
    certificate, _ = filled(3)
    restored = Certificate()
    restored.load_state_dict(json.loads(json.dumps(certificate.state_dict())))
    assert restored.report() == certificate.report()
    other, _ = filled(4)
    certificate.merge(other)
    restored.merge(other)
    assert restored.state_dict() == certificate.state_dict()


def test_state_of_other_bets_is_refused():
    state = Certificate().state_dict()
    for name in ("lambdas", "alternative_shares", "rank_bins"):
        with pytest.raises(ValueError, match="another version"):
            Certificate().load_state_dict({**state, name: [0.5]})
        with pytest.raises(ValueError, match="another version"):
            Certificate().load_state_dict({key: value for key, value in state.items() if key != name})


def test_report_is_json_ready_and_looking_changes_nothing():
    certificate, _ = filled(5)
    before = certificate.state_dict()
    record = json.loads(json.dumps(certificate.report().to_dict(), allow_nan=False))
    assert record["by_slot"].keys() == {"-1", "0", "1", "2"}
    assert {"z", "excess_nats", "tokens", "log_m", "ks_p"} <= record["by_slot"]["0"].keys()
    assert certificate.state_dict() == before


def test_a_token_outside_the_kept_set_is_counted_apart_and_poisons_nothing():
    sampling = Sampling(top_k=8)
    logits, token_ids, uniforms = make(300, sampling=sampling)
    moved = token_ids.clone()
    moved[::100] = logits[::100].argmin(1)
    scores = score_tokens(logits, moved, sampling, uniforms)
    certificate, clean = Certificate(), Certificate()
    certificate.add(scores, torch.zeros(300))
    inside = torch.ones(300, dtype=torch.bool)
    inside[::100] = False
    clean.add(
        score_tokens(logits[inside], token_ids[inside], sampling, uniforms[inside]),
        torch.zeros(297),
    )
    report = certificate.report()
    assert (report.outside_kept, report.tokens, report.outside_share) == (3, 297, 0.01)
    assert report.by_slot[0].outside_kept == 3
    slots = {0: dataclasses.replace(report.by_slot[0], outside_kept=0)}
    assert_reports_agree(dataclasses.replace(report, outside_kept=0, outside_share=0.0, by_slot=slots), clean.report())
    assert not alarm(report, max_outside_share=0.01)
    assert alarm(report, max_outside_share=0.0)


def test_neighbours_across_sequences_and_outside_tokens_are_no_pairs():
    logits, token_ids, uniforms = make(6, sampling=Sampling(top_k=8))
    token_ids[4] = logits[4].argmin()
    certificate = Certificate()
    scores = score_tokens(logits, token_ids, Sampling(top_k=8), uniforms)
    certificate.add(scores, sequence_ids_N=torch.tensor([7, 7, 3, 3, 3, 3]), group_ids_N=torch.zeros(6))
    standard = (scores.rank_N - 0.5) * math.sqrt(12)
    report = certificate.report()
    assert report.lag1_correlation == pytest.approx(float(standard[0] * standard[1] + standard[2] * standard[3]) / 2)
    # Positions 0 and 1 exist in both sequences, 2 and 3 only in the longer one.
    assert report.cross_correlation == pytest.approx(float(standard[0] * standard[2] + standard[1] * standard[3]) / 2)


def test_group_ids_without_sequence_ids_are_refused():
    _, scores = filled(6)
    with pytest.raises(ValueError, match="sequence_ids_N"):
        Certificate().add(scores, group_ids_N=torch.zeros(300))


@pytest.mark.parametrize("kind", ["greedy", "very sharp"])
def test_tokens_that_could_show_nothing_are_no_evidence(kind):
    logits, _, uniforms = make(500)
    sampling = Sampling(temperature=0.0) if kind == "greedy" else Sampling(temperature=0.001)
    certificate = Certificate()
    certificate.add(score_tokens(logits, logits.argmax(1), sampling, uniforms), torch.zeros(500))
    report = certificate.report()
    assert report.tokens == 500 and not report.evidence
    assert report.z is None and report.smallest_visible_nats is None and report.by_slot[0].z is None
    assert not alarm(report)


def test_a_greedy_policy_still_notices_another_token():
    logits, _, uniforms = make(500)
    certificate = Certificate()
    certificate.add(score_tokens(logits, logits.argmin(1), Sampling(temperature=0.0), uniforms))
    assert certificate.report().outside_kept == 500 and alarm(certificate.report())


def test_smallest_visible_bias_is_four_standard_deviations_of_the_mean():
    certificate, scores = filled(7)
    expected = 4 * math.sqrt(float(scores.variance_N.sum())) / 300
    assert certificate.report().smallest_visible_nats == pytest.approx(expected)
    assert float(scores.variance_N.sum()) > MIN_VARIANCE


def test_the_interval_uses_the_larger_of_predicted_and_observed_spread():
    logits, _, uniforms = make(300)
    for token_ids, wider in ((logits.argmin(1), "observed"), (logits.argmax(1), "predicted")):
        scores = score_tokens(logits, token_ids, Sampling(), uniforms)
        certificate = Certificate()
        certificate.add(scores)
        spreads = {
            "predicted": float(scores.variance_N.sum()),
            "observed": float((scores.surprisal_N - scores.entropy_N).square().sum()),
        }
        assert max(spreads, key=spreads.get) == wider
        assert certificate.report().excess_half_width == pytest.approx(1.96 * math.sqrt(spreads[wider]) / 300)


def test_recovered_tokens_are_judged_without_the_rejected_id():
    logits = torch.tensor([[2.0, 1.0, 0.0], [50.0, -60.0, -70.0]], dtype=torch.float64)
    scores = score_tokens(
        logits, torch.tensor([1, 0]), Sampling(), torch.full((2,), 0.5), excluded_ids_N=torch.tensor([0, 0])
    )
    left = torch.tensor([1.0, 0.0], dtype=torch.float64).log_softmax(0)
    assert scores.surprisal_N[0] == pytest.approx(-float(left[0]))
    assert scores.entropy_N[0] == pytest.approx(-float((left.exp() * left).sum()))
    # The excluded id itself cannot be recovered.
    assert scores.inside_N.tolist() == [True, False]
    # Its rank by id is 0.5 * 0.73, below the draft's probability 0.67: not with the noise that rejected the draft.
    assert scores.alternative_N[0] == -math.inf and scores.id_rank_N[0] < logits[0].softmax(0)[0]
    high = score_tokens(
        logits[:1], torch.tensor([2]), Sampling(), torch.full((1,), 0.5), excluded_ids_N=torch.tensor([0])
    )
    assert high.alternative_N[0] == pytest.approx(-math.log1p(-float(logits[0].softmax(0)[0])))
    certain = score_tokens(
        logits[:1], torch.tensor([1]), Sampling(top_k=1), torch.zeros(1), excluded_ids_N=torch.tensor([0])
    )
    assert certain.inside_N.tolist() == [False] and float(certain.log_mgf_NL.abs().sum()) == 0.0


def test_acceptance_scores_are_a_coin_of_the_acceptance_probability():
    scores = score_acceptance(torch.tensor([0.2, 0.6]), torch.tensor([True, False]), torch.tensor([0.4, 0.3]))
    assert isinstance(scores, AcceptanceScores)
    assert scores.deviation_N.tolist() == pytest.approx([0.5, -1.0])
    assert scores.variance_N.tolist() == pytest.approx([0.25, 0.0])
    deterministic = score_acceptance(torch.tensor([0.2]), torch.tensor([True]))
    assert deterministic.deviation_N.tolist() == pytest.approx([0.8])


def test_bets_on_verdicts_never_gain_on_average():
    """A coin of any probability, at any stake: the mean of M after one verdict is at most 1."""
    for b in (0.0, 1e-3, 0.1, 0.5, 0.9, 1.0):
        mean = 0.0
        for accepted, p in ((True, b), (False, 1.0 - b)):
            certificate = Certificate()
            certificate.add_acceptance(score_acceptance(torch.tensor([b]), torch.tensor([accepted])), torch.zeros(1))
            mean += p * math.exp(certificate.report().acceptance_by_slot[0].log_m)
        assert 0.5 < mean <= 1.0 + 1e-9


def test_verdicts_that_are_off_raise_the_bets_and_right_ones_do_not():
    generator = torch.Generator().manual_seed(1)
    probs = torch.rand(3000, generator=generator, dtype=torch.float64)
    noise = torch.rand(3000, generator=generator, dtype=torch.float64)
    certificate = Certificate()
    certificate.add_acceptance(score_acceptance(probs, noise < probs), torch.zeros(3000))
    certificate.add_acceptance(score_acceptance(probs, noise < probs.sqrt()), torch.ones(3000))
    right, generous = certificate.report().acceptance_by_slot.values()
    assert right.log_m < ALARM_LOG_M < generous.log_m and right.z < 4.9 < generous.z


def test_m_stakes_half_on_all_tokens_and_half_on_the_slots():
    def log_mean_exp(values):
        return float(torch.tensor(values, dtype=torch.float64).logsumexp(0)) - math.log(len(values))

    certificate, _ = filled(8)
    report = certificate.report()
    alone = Certificate()
    alone.add(score_tokens(*make(300, seed=8)[:2], FILTERED, make(300, seed=8)[2]), torch.zeros(300))
    everything = alone.report().by_slot[0].log_m
    slots = log_mean_exp([*(slot.log_m for slot in report.by_slot.values()), *[0.0] * (SLOT_STAKES - 4)])
    assert report.log_m == pytest.approx(log_mean_exp([everything, slots]))


def test_a_fault_of_one_slot_raises_the_alarm_that_all_tokens_together_do_not():
    """One token in forty stands in slot 2 and is drawn at three times the temperature; the others are right."""
    logits, token_ids, uniforms = make(6000, sampling=Sampling(), scale=1.0)
    slots = torch.arange(6000) % 40 // 39 * 2
    wrong = sample(policy_probs(logits, Sampling(temperature=3.0)), torch.Generator().manual_seed(1))
    scores = score_tokens(logits, torch.where(slots == 2, wrong, token_ids), Sampling(), uniforms)
    split, pooled = Certificate(), Certificate()
    split.add(scores, slots)
    pooled.add(scores)
    assert alarm(split.report(), delta=0.02) and not alarm(pooled.report(), delta=0.02)
    assert split.report().by_slot[2].log_m > ALARM_LOG_M > split.report().by_slot[0].log_m


def report_with(log_m, excess, half_width, **changes):
    return dataclasses.replace(
        Certificate().report(), tokens=10_000, log_m=log_m, excess_nats=excess, excess_half_width=half_width, **changes
    )


def test_alarm_needs_m_and_an_interval_beyond_the_margin():
    certain = ALARM_LOG_M + 1
    assert alarm(report_with(certain, 0.05, 0.01))
    assert alarm(report_with(certain, -0.05, 0.01))
    assert not alarm(report_with(ALARM_LOG_M - 1, 0.05, 0.01))
    assert not alarm(report_with(certain, 0.005, 0.001))
    assert not alarm(report_with(certain, 0.05, 0.045))
    assert alarm(report_with(certain, 0.05, 0.045), delta=0.0)


def test_alarm_with_a_live_control_judges_the_difference():
    speculative = report_with(ALARM_LOG_M + 1, 0.05, 0.003)
    assert not alarm(speculative, control=report_with(2.0, 0.048, 0.003))
    assert alarm(speculative, control=report_with(2.0, 0.001, 0.003))


def test_alarm_on_tokens_outside_the_kept_set_waits_for_more_than_chance():
    assert not alarm(report_with(0.0, 0.0, 0.01, outside_kept=1, outside_share=1e-4))
    assert not alarm(report_with(0.0, 0.0, 0.01, outside_kept=60, outside_share=6e-3))
    assert alarm(report_with(0.0, 0.0, 0.01, outside_kept=150, outside_share=15e-3))
