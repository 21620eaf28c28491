"""Every planted fault is caught by a test with a false-alarm rate of 1e-6 or by exact comparison; no right path is.

The table fault x test is printed by `python -m benchmarks.planted_faults`.
"""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch
from scipy.stats import chi2

from paceline.spec.exact import (
    Proposal,
    generation_law,
    largest_difference,
    policy_law,
    sampled_proposals,
    step_law,
)
from paceline.spec.sampling import draw_uniforms, log_probs, sample
from paceline.spec.verify import verify
from paceline.testing.faults import (
    EXACT_LIMIT,
    FAULTS,
    NUM_DRAFT_TOKENS,
    P_LIMIT,
    RIGHT,
    VISIBLE,
    detect,
    keeps_boundaries,
    smooth_world,
    take_step,
    verify_with,
)

LEAVES_NO_TRACE = {"noise 0 accepts a token without mass", "noise 0 draws a token without mass"}
"""Their noise has probability 2**-53: no law and no rollout can show them."""


findings_of = cache(detect)


@pytest.mark.parametrize("name", RIGHT)
def test_no_test_flags_a_right_path(name):
    findings = findings_of(RIGHT[name])
    assert findings.exact < EXACT_LIMIT
    assert findings.caught_by() == []


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(name):
    findings = findings_of(FAULTS[name])
    if name in LEAVES_NO_TRACE:
        assert findings.exact < EXACT_LIMIT
        assert findings.caught_by() == ["boundary"]
    else:
        assert {"exact", "chi_square"} <= set(findings.caught_by())


@pytest.mark.parametrize(
    ("name", "locator"),
    [
        ("residual missing", "recovered"),
        ("residual missing, greedy drafts", "recovered"),
        ("q raw, proposal tempered", "acceptance"),
        ("draft vocabulary not renormalised", "acceptance"),
        ("request seed used for proposal and acceptance", "acceptance"),
        ("recovery reuses the noise of the proposal", "recovered"),
    ],
)
def test_a_locator_names_the_part_where_the_fault_sits(name, locator):
    findings = findings_of(FAULTS[name])
    assert locator in findings.caught_by()


@pytest.mark.parametrize("name", ["sampled drafts", "greedy drafts cut where the draft is unsure"])
def test_the_verifier_that_faults_are_planted_in_equals_the_real_one(name):
    world, generator = smooth_world(), torch.Generator().manual_seed(0)
    uniforms = draw_uniforms(generator, 5000, 2 * NUM_DRAFT_TOKENS + 1)
    last = torch.randint(world.stop, (5000,), generator=generator)
    step = take_step(RIGHT[name], world, last, uniforms)
    rows = world.target_VV[step.contexts_BK1]
    for draft_probs in (None, world.draft_VV[step.contexts_BK1[:, :-1]]):
        noise = uniforms[:, NUM_DRAFT_TOKENS:]
        right = verify(rows, step.drafts_BK, draft_probs, uniforms_BK1=noise)
        ours = verify_with(rows, step.drafts_BK, draft_probs, uniforms_BK1=noise)
        assert torch.equal(right.tokens_BK1, ours.tokens_BK1)
        assert torch.equal(right.num_accepted_B, ours.num_accepted_B)


def test_noise_at_the_edge_of_its_range_is_judged_right_by_the_real_verifier_alone():
    assert keeps_boundaries(verify)
    assert keeps_boundaries(verify_with)
    assert not keeps_boundaries(partial(verify_with, accepts=torch.le))
    assert not keeps_boundaries(partial(verify_with, accepts=lambda noise, p: noise + 2.0**-52 < p))


@pytest.mark.parametrize("shared", [False, True], ids=["seeds of their own", "one seed for both"])
def test_per_request_seeds_must_not_be_used_for_proposal_and_verification_both(shared):
    """Real generators, one per request. Chi-square over the first token, false alarms 1e-6."""
    num_rows, vocab = 20_000, 6
    target, draft = (
        log_probs(1.5 * torch.randn(vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).exp()
        for seed in (1, 2)
    )
    drafting = [torch.Generator().manual_seed(seed) for seed in range(num_rows)]
    verifying = [torch.Generator().manual_seed(seed + (0 if shared else num_rows)) for seed in range(num_rows)]
    drafted = sample(draft.expand(num_rows, -1), drafting)
    result = verify(
        target.expand(num_rows, 2, -1), drafted.unsqueeze(1), draft.expand(num_rows, 1, -1), generators=verifying
    )
    observed = torch.bincount(result.tokens_BK1[:, 0], minlength=vocab)
    p_value = chi2.sf(float(((observed - target * num_rows) ** 2 / (target * num_rows)).sum()), vocab - 1)
    assert p_value < P_LIMIT if shared else p_value > P_LIMIT


def test_an_alarm_needs_more_than_the_deviation_that_it_calls_visible():
    """Between a right path and the mildest fault lie nine orders of magnitude: the limits decide nothing."""
    traced = [findings_of(path).exact for name, path in FAULTS.items() if name not in LEAVES_NO_TRACE]
    assert min(traced) > VISIBLE > 1e8 * max(findings_of(path).exact for path in RIGHT.values())


# ---- what k may depend on

VOCAB, MOST_DRAFTS, LENGTH = 3, 2, 4


def conditional(seed: int):
    def next_probs(context):
        code = seed
        for token in context:
            code = code * 31 + token + 1
        generator = torch.Generator().manual_seed(code)
        return log_probs(1.5 * torch.randn(VOCAB, generator=generator, dtype=torch.float64)).exp()

    return next_probs


TARGET, DRAFT = conditional(1), conditional(2)


def deviation(law):
    return largest_difference(law, policy_law(TARGET, LENGTH))


def test_k_drawn_at_random_in_each_step_keeps_the_law():
    def propose(context):
        for k, share in ((0, 0.2), (1, 0.5), (2, 0.3)):
            for proposal in sampled_proposals(DRAFT, k)(context):
                yield Proposal(share * proposal.probability, proposal.draft_token_ids, proposal.draft_probs)

    assert deviation(generation_law(TARGET, propose, LENGTH)) < EXACT_LIMIT


def adaptive_law(next_k, length, context=(), k=1):
    """`generation_law` where k of the next step is `next_k(k, accepted drafts of this step)`."""
    law = {}
    for tokens, mass in step_law(TARGET, sampled_proposals(DRAFT, k), context).items():
        if len(tokens) >= length:
            law[tokens[:length]] = law.get(tokens[:length], 0.0) + mass
            continue
        later = adaptive_law(next_k, length - len(tokens), context + tokens, next_k(k, len(tokens) - 1))
        for rest, p in later.items():
            law[tokens + rest] = law.get(tokens + rest, 0.0) + mass * p
    return law


@pytest.mark.parametrize(
    "next_k",
    [
        pytest.param(lambda k, accepted: min(k + 1, MOST_DRAFTS) if accepted == k else max(k - 1, 0), id="up and down"),
        pytest.param(lambda k, accepted: accepted, id="as many as were accepted"),
        pytest.param(lambda k, accepted: MOST_DRAFTS - accepted, id="the fewer the more"),
    ],
)
def test_k_chosen_from_past_acceptances_keeps_the_law(next_k):
    assert deviation(adaptive_law(next_k, LENGTH)) < EXACT_LIMIT


@pytest.mark.parametrize("looks_at", ["probability", "value"])
def test_k_chosen_from_the_sampled_draft_token_itself_breaks_the_law(looks_at):
    def propose(context):
        for proposal in sampled_proposals(DRAFT, MOST_DRAFTS)(context):
            tokens, probs = proposal.draft_token_ids, proposal.draft_probs
            unwanted = probs[0, tokens[0]] < 0.4 if looks_at == "probability" else tokens[0] == 0
            yield Proposal(proposal.probability, () if unwanted else tokens, None if unwanted else probs)

    assert deviation(generation_law(TARGET, propose, LENGTH)) > VISIBLE


def test_k_chosen_from_the_whole_distribution_of_the_draft_keeps_the_law():
    """The draft's distribution at the first slot is fixed before a token is drawn from it: its entropy may decide."""

    def propose(context):
        k = MOST_DRAFTS if DRAFT(context).max() > 0.6 else 1
        return sampled_proposals(DRAFT, k)(context)

    assert deviation(generation_law(TARGET, propose, LENGTH)) < EXACT_LIMIT
