"""Any k that is fixed before the draft tokens are drawn keeps the policy's law; a k that looks at them does not.

Exact laws by enumeration over a small vocabulary: equality to 1e-12, and a planted violation differs by more than 1e-3.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from paceline.spec.exact import (
    Law,
    Proposal,
    completed_law,
    greedy_proposal,
    largest_difference,
    policy_law,
    sampled_proposals,
    step_law,
)

VOCAB, LONGEST, LENGTH = 3, 2, 4
EXACT, CAUGHT = 1e-12, 1e-3


def conditional(seed: int):
    @cache
    def next_probs(context: tuple[int, ...]) -> torch.Tensor:
        code = seed
        for token in context:
            code = code * 31 + token + 1
        generator = torch.Generator().manual_seed(code)
        return (1.5 * torch.randn(VOCAB, generator=generator, dtype=torch.float64)).softmax(-1)

    return next_probs


TARGET, DRAFT = conditional(1), conditional(2)


def law_of(next_k, length: int = LENGTH, context: tuple[int, ...] = (), k: int = LONGEST) -> Law:
    """The law of generation when k follows from the step before: `next_k(k, accepted, context)` gives k: mass."""
    law: Law = {}
    for tokens, mass in step_law(TARGET, sampled_proposals(DRAFT, k), context).items():
        if len(tokens) >= length:
            law[tokens[:length]] = law.get(tokens[:length], 0.0) + mass
            continue
        # A step commits its accepted tokens and one more.
        for following, share in next_k(k, len(tokens) - 1, context + tokens).items():
            for rest, p in law_of(next_k, length - len(tokens), context + tokens, following).items():
                law[tokens + rest] = law.get(tokens + rest, 0.0) + mass * share * p
    return law


def cut_unlikely_drafts(draft, threshold: float):
    """The planted violation: a drafted token below the threshold, and all behind it, are dropped."""

    def propose(context):
        for proposal in sampled_proposals(draft, LONGEST)(context):
            likely = [
                float(row[token]) >= threshold
                for row, token in zip(proposal.draft_probs, proposal.draft_token_ids, strict=True)
            ]
            kept = (*likely, False).index(False)
            yield Proposal(proposal.probability, proposal.draft_token_ids[:kept], proposal.draft_probs[:kept])

    return propose


@pytest.mark.parametrize(
    "next_k",
    [
        pytest.param(lambda k, accepted, text: {0: 0.3, 1: 0.2, 2: 0.5}, id="at random"),
        pytest.param(lambda k, accepted, text: {min(LONGEST, accepted + 1): 1.0}, id="from past acceptances"),
        pytest.param(lambda k, accepted, text: {0 if accepted < k else LONGEST: 1.0}, id="off after a rejection"),
        pytest.param(lambda k, accepted, text: {sum(text) % (LONGEST + 1): 1.0}, id="from committed tokens"),
        pytest.param(lambda k, accepted, text: {LONGEST if len(text) > 1 else 0: 1.0}, id="from the length"),
    ],
)
def test_a_k_that_is_fixed_before_the_draft_is_drawn_keeps_the_law(next_k):
    assert largest_difference(law_of(next_k), policy_law(TARGET, LENGTH)) < EXACT


def test_a_k_that_looks_at_a_sampled_draft_token_breaks_the_law():
    violated = completed_law(TARGET, cut_unlikely_drafts(DRAFT, 0.3), LENGTH)
    assert largest_difference(violated, policy_law(TARGET, LENGTH)) > CAUGHT
    # The same cut with nothing to cut is no violation: it is the look at the token that breaks the law.
    assert (
        largest_difference(completed_law(TARGET, cut_unlikely_drafts(DRAFT, 0.0), LENGTH), policy_law(TARGET, LENGTH))
        < EXACT
    )


def test_a_deterministic_draft_may_be_cut_by_its_own_probability():
    def cut(context):
        (proposal,) = greedy_proposal(DRAFT, LONGEST)(context)
        tokens = proposal.draft_token_ids
        kept = next((i for i in range(LONGEST) if float(DRAFT(context + tokens[:i])[tokens[i]]) < 0.6), LONGEST)
        yield Proposal(1.0, tokens[:kept], None)

    assert any(len(next(iter(cut((token,)))).draft_token_ids) < LONGEST for token in range(VOCAB))
    assert largest_difference(completed_law(TARGET, cut, LENGTH), policy_law(TARGET, LENGTH)) < EXACT
