"""A verify step commits what the policy alone would have sampled: exact laws, by enumeration, to 1e-12.

Each law stands beside planted faults that the same comparison must catch: a difference above 1e-3, against 1e-12.
"""

from __future__ import annotations

import itertools
import math
from functools import cache

import pytest
import torch

from paceline.spec.exact import (
    Proposal,
    chain_law,
    completed_law,
    generation_law,
    greedy_proposal,
    largest_difference,
    policy_law,
    sampled_proposals,
    step_law,
)
from paceline.spec.sampling import draw_uniforms, log_probs, sample, sample_with
from paceline.spec.verify import acceptance_probs, residual_probs, verify, verify_chain

VOCAB, DRAFTS = 4, 3
EXACT = 1e-12
CAUGHT = 1e-3


def conditional(seed: int, temperature: float = 1.0, zeroed: tuple[int, ...] = (), noise: float = 1.5):
    """A next-token distribution that differs for every context, always the same for the same one."""

    @cache
    def next_probs(context: tuple[int, ...]) -> torch.Tensor:
        code = seed
        for token in context:
            code = code * 31 + token + 1
        generator = torch.Generator().manual_seed(code)
        logits = noise * torch.randn(VOCAB, generator=generator, dtype=torch.float64)
        logits[list(zeroed)] = -torch.inf
        return log_probs(logits, temperature).exp()

    return next_probs


TARGET = conditional(1)
DRAFT = conditional(2)


def fixed_chain(*token_ids: int):
    return lambda context: [Proposal(1.0, token_ids, None)]


def cut_sampled(num_kept: int):
    """A sampled draft with -1 behind the first `num_kept` slots, whatever was drawn there."""

    def propose(context):
        padding = (-1,) * (DRAFTS - num_kept)
        for proposal in sampled_proposals(DRAFT, DRAFTS)(context):
            yield Proposal(proposal.probability, proposal.draft_token_ids[:num_kept] + padding, proposal.draft_probs)

    return propose


PROPOSERS = {
    "greedy": greedy_proposal(DRAFT, DRAFTS),
    "greedy draft equal to the policy": greedy_proposal(TARGET, DRAFTS),
    "sampled": sampled_proposals(DRAFT, DRAFTS),
    "sampled from the policy itself": sampled_proposals(TARGET, DRAFTS),
    "sampled from a stale, sharper draft": sampled_proposals(conditional(77, temperature=0.3), DRAFTS),
    "draft without mass where the policy has it": sampled_proposals(conditional(2, zeroed=(0, 3)), DRAFTS),
    "the same token drafted at every slot": fixed_chain(2, 2, 2),
    "no draft": fixed_chain(),
    "only placeholders": fixed_chain(-1, -1, -1),
    "placeholder first": fixed_chain(-1, 1, 2),
    "placeholder in the middle": fixed_chain(1, -1, 2),
    "placeholder last": fixed_chain(1, 3, -1),
    "sampled, cut to one": cut_sampled(1),
    "sampled, cut to two": cut_sampled(2),
}


@pytest.mark.parametrize("name", PROPOSERS)
def test_verify_step_reproduces_the_policys_joint_law(name):
    law = completed_law(TARGET, PROPOSERS[name], DRAFTS + 1)
    assert math.isclose(sum(law.values()), 1.0, abs_tol=EXACT)
    assert largest_difference(law, policy_law(TARGET, DRAFTS + 1)) < EXACT


@pytest.mark.parametrize("name", PROPOSERS)
def test_verify_step_is_exact_when_the_policy_masks_tokens(name):
    masked = conditional(5, zeroed=(1,))
    assert largest_difference(completed_law(masked, PROPOSERS[name], 4), policy_law(masked, 4)) < EXACT


@pytest.mark.parametrize(
    "proposer",
    [greedy_proposal(DRAFT, 2), sampled_proposals(DRAFT, 2), fixed_chain(1, -1)],
    ids=["greedy", "sampled", "placeholder"],
)
def test_generation_from_blocks_alone_reproduces_the_policys_joint_law(proposer):
    assert largest_difference(generation_law(TARGET, proposer, 4), policy_law(TARGET, 4)) < EXACT


def test_sampled_policy_is_always_accepted_whole():
    law = step_law(TARGET, PROPOSERS["sampled from the policy itself"])
    assert all(len(tokens) == DRAFTS + 1 for tokens in law)


def test_a_greedy_policy_commits_its_own_greedy_chain():
    greedy = conditional(1, temperature=0.0)
    for proposer in PROPOSERS.values():
        assert largest_difference(completed_law(greedy, proposer, 4), policy_law(greedy, 4)) < EXACT


# ---- planted faults


def faulty_chain(*, residual=residual_probs, accept=acceptance_probs, rows=lambda target_probs: target_probs):
    """`chain_law` with one of its parts replaced."""

    def law_of(target_probs, draft_token_ids, draft_probs):
        target_probs = rows(target_probs)
        law, reached, committed = {}, 1.0, ()
        for slot, token in enumerate(draft_token_ids):
            draft_row = None if draft_probs is None else draft_probs[slot]
            accepted = float(accept(target_probs[slot], draft_row, torch.tensor(token)))
            for recovered, p in enumerate(residual(target_probs[slot], draft_row, torch.tensor(token)).tolist()):
                key = (*committed, recovered)
                law[key] = law.get(key, 0.0) + reached * (1 - accepted) * p
            reached, committed = reached * accepted, (*committed, token)
        for bonus, p in enumerate(target_probs[len(draft_token_ids)].tolist()):
            law[(*committed, bonus)] = law.get((*committed, bonus), 0.0) + reached * p
        return law

    return law_of


def swap_rows(first: int, second: int):
    def rows(target_probs):
        order = list(range(len(target_probs)))
        order[first], order[second] = order[second], order[first]
        return target_probs[order]

    return rows


def replace_row(row: int, source: int):
    def rows(target_probs):
        target_probs = target_probs.clone()
        target_probs[row] = target_probs[source]
        return target_probs

    return rows


def other_temperature(row: int, temperature: float):
    def rows(target_probs):
        target_probs = target_probs.clone()
        target_probs[row] = log_probs(target_probs[row].log(), temperature).exp()
        return target_probs

    return rows


def drop_unlikely(context):
    """Looks at the probability of the sampled draft token before deciding to verify it."""
    for proposal in sampled_proposals(DRAFT, DRAFTS)(context):
        tokens = list(proposal.draft_token_ids)
        if proposal.draft_probs[0, tokens[0]] < 0.3:
            tokens = [-1] * DRAFTS
        yield Proposal(proposal.probability, tuple(tokens), proposal.draft_probs)


def argmax_told_as_sampled(context):
    (proposal,) = greedy_proposal(DRAFT, DRAFTS)(context)
    tokens = proposal.draft_token_ids
    yield Proposal(1.0, tokens, torch.stack([DRAFT(context + tokens[:slot]) for slot in range(DRAFTS)]))


WARM_DRAFT = conditional(2, temperature=0.5)
FAULTS = {
    "recovered from the policy instead of the residual": (
        "sampled",
        {"residual": lambda target, draft, token: target},
    ),
    "greedy draft recovered from the policy": ("greedy", {"residual": lambda target, draft, token: target}),
    "residual not renormalised by clipping: |p - q|": (
        "sampled",
        {"residual": lambda target, draft, token: (target - draft).abs() / (target - draft).abs().sum()},
    ),
    "bonus from the row before": ("greedy draft equal to the policy", {"rows": replace_row(DRAFTS, DRAFTS - 1)}),
    "rows off by one": ("sampled", {"rows": lambda target_probs: target_probs.roll(1, 0)}),
    "two rows exchanged": ("greedy", {"rows": swap_rows(0, 1)}),
    "temperature of another row": ("sampled", {"rows": other_temperature(1, 0.5)}),
    "accepts everything": ("sampled", {"accept": lambda target, draft, token: torch.tensor(1.0)}),
    "accepts with p whatever q was": ("sampled", {"accept": lambda target, draft, token: target[token]}),
    "placeholder looked up": (
        "placeholder in the middle",
        {"accept": lambda target, draft, token: target[token], "residual": lambda target, draft, token: target},
    ),
}


@pytest.mark.parametrize("name", ["sampled", "greedy", "sampled, cut to two"])
def test_the_fault_harness_without_a_fault_is_exact(name):
    law = completed_law(TARGET, PROPOSERS[name], DRAFTS + 1, chain=faulty_chain())
    assert largest_difference(law, policy_law(TARGET, DRAFTS + 1)) < EXACT


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_in_the_verifier_is_caught(name):
    proposer, parts = FAULTS[name]
    law = completed_law(TARGET, PROPOSERS[proposer], DRAFTS + 1, chain=faulty_chain(**parts))
    assert largest_difference(law, policy_law(TARGET, DRAFTS + 1)) > CAUGHT


@pytest.mark.parametrize(
    "proposer",
    [
        pytest.param(sampled_proposals(WARM_DRAFT, DRAFTS, stated=DRAFT), id="raw q with a tempered proposal"),
        pytest.param(sampled_proposals(DRAFT, DRAFTS, stated=conditional(3)), id="q of another draft version"),
        pytest.param(argmax_told_as_sampled, id="argmax proposal with the soft q"),
        pytest.param(drop_unlikely, id="unlikely sampled drafts dropped"),
    ],
)
def test_planted_fault_in_what_the_draft_states_is_caught(proposer):
    law = completed_law(TARGET, proposer, DRAFTS + 1)
    assert largest_difference(law, policy_law(TARGET, DRAFTS + 1)) > CAUGHT


# ---- the sampler itself, integrated exactly over its noise

# With probabilities in sixths every threshold of a right sampler (p, p/q, the CDF of the residual) is a multiple of
# 1/60, the least common multiple of 1..6. The midpoints of the 60-cells then integrate it exactly, whatever its code.
CELLS = 60


def sixths(*counts: int) -> torch.Tensor:
    return torch.tensor(counts, dtype=torch.float64) / 6


ROWS = torch.stack([sixths(1, 2, 3), sixths(0, 5, 1), sixths(4, 1, 1)])
DRAFT_ROWS = torch.stack([sixths(3, 2, 1), sixths(2, 2, 2)])


def grid() -> torch.Tensor:
    """[CELLS ** 3, 3] all combinations of the midpoints of the three uniforms of a step with two drafts."""
    midpoints = (torch.arange(CELLS, dtype=torch.float64) + 0.5) / CELLS
    return torch.cartesian_prod(midpoints, midpoints, midpoints)


def law_of_verify(drafts, draft_probs, uniforms_BK1):
    rows = len(uniforms_BK1)
    result = verify(
        ROWS.expand(rows, -1, -1),
        torch.tensor(drafts).expand(rows, -1),
        None if draft_probs is None else draft_probs.expand(rows, -1, -1),
        uniforms_BK1=uniforms_BK1,
    )
    assert torch.equal((result.tokens_BK1 >= 0).sum(1), result.num_accepted_B + 1)
    law = {}
    codes, counts = (result.tokens_BK1 + 1).matmul(torch.tensor([16, 4, 1])).unique(return_counts=True)
    for code, count in zip(codes.tolist(), counts.tolist(), strict=True):
        tokens = tuple(code // base % 4 - 1 for base in (16, 4, 1))
        law[tuple(token for token in tokens if token >= 0)] = count / rows
    return law


@pytest.mark.parametrize("draft_probs", [None, DRAFT_ROWS], ids=["deterministic", "sampled"])
@pytest.mark.parametrize("drafts", [(2, 1), (0, 0), (2, 0), (1, -1), (-1, 1), (-1, -1)])
def test_batched_verify_has_exactly_the_enumerated_law(drafts, draft_probs):
    law = law_of_verify(drafts, draft_probs, grid())
    assert largest_difference(law, chain_law(ROWS, drafts, draft_probs)) < EXACT


def test_noise_of_the_recovered_token_must_not_be_that_of_the_acceptance():
    uniforms = grid()
    uniforms[:, 2] = uniforms[:, 0]
    law = law_of_verify((0, 1), None, uniforms)
    assert largest_difference(law, chain_law(ROWS, (0, 1), None)) > CAUGHT


@pytest.mark.parametrize("shared", [False, True], ids=["own noise", "noise of the proposal"])
def test_noise_of_the_recovered_token_must_not_be_that_of_the_proposal(shared):
    midpoints = (torch.arange(CELLS, dtype=torch.float64) + 0.5) / CELLS
    proposal_u, accept_u, final_u = torch.cartesian_prod(midpoints, midpoints, midpoints).unbind(1)
    target, draft = sixths(1, 3, 2), sixths(4, 1, 1)
    drafted = sample_with(draft.expand(len(proposal_u), -1), proposal_u)
    result = verify(
        target.expand(len(proposal_u), 2, -1),
        drafted.unsqueeze(1),
        draft.expand(len(proposal_u), 1, -1),
        uniforms_BK1=torch.stack([accept_u, proposal_u if shared else final_u], 1),
    )
    first = torch.bincount(result.tokens_BK1[:, 0], minlength=3).double() / len(proposal_u)
    difference = float((first - target).abs().max())
    assert difference > CAUGHT if shared else difference < EXACT


def test_plain_and_batched_verify_commit_the_same_tokens():
    generator = torch.Generator().manual_seed(0)
    num_rows, num_slots, vocab = 300, 4, 9
    shape = (num_rows, num_slots + 1, vocab)
    target = log_probs(2 * torch.randn(shape, generator=generator), top_k=4).exp()
    draft = log_probs(2 * torch.randn(shape, generator=generator)[:, :-1]).exp()
    drafts = torch.randint(-1, vocab, (num_rows, num_slots), generator=generator)
    uniforms = draw_uniforms(generator, num_rows, num_slots + 1)
    for draft_probs in (None, draft):
        result = verify(target, drafts, draft_probs, uniforms_BK1=uniforms)
        for row in range(num_rows):
            block = verify_chain(
                target[row],
                drafts[row].tolist(),
                None if draft_probs is None else draft_probs[row],
                uniforms[row],
            )
            assert block.num_accepted == result.num_accepted_B[row]
            assert list(block.token_ids) == [token for token in result.tokens_BK1[row].tolist() if token >= 0]


@pytest.mark.parametrize("stated_temperature", [0.5, 1.0], ids=["right q", "raw q"])
def test_drawn_tokens_follow_the_policy(stated_temperature):
    """Chi-square over (first, second) token of 100,000 steps; a right sampler fails with probability 1e-6."""
    from scipy.stats import chi2

    generators = [torch.Generator().manual_seed(seed) for seed in (11, 12)]
    rows = 100_000
    target = conditional(1)
    contexts = [()] + [(token,) for token in range(VOCAB)]
    targets = {context: target(context) for context in contexts}
    draft = conditional(2, temperature=0.5)(())
    # At 2.0 the tempered draft is told as it was before its temperature of 0.5.
    told = log_probs(draft.log(), temperature=1.0 if stated_temperature == 0.5 else 2.0).exp()
    drafted = sample(draft.expand(rows, -1), generators[0])
    after = torch.stack([targets[(token,)] for token in range(VOCAB)])[drafted]
    target_probs = torch.stack([targets[()].expand(rows, -1), after], 1)
    result = verify(target_probs, drafted.unsqueeze(1), told.expand(rows, 1, -1), generators=generators[1])
    first, second = result.tokens_BK1.unbind(1)
    missing = second < 0
    completion = torch.stack([targets[(token,)] for token in range(VOCAB)])[first]
    second = torch.where(missing, sample(completion, generators[1]), second)
    observed = torch.bincount(first * VOCAB + second, minlength=VOCAB**2)
    law = policy_law(target, 2)
    expected = torch.tensor([law[key] * rows for key in itertools.product(range(VOCAB), repeat=2)])
    statistic = float(((observed - expected) ** 2 / expected).sum())
    limit = chi2.isf(1e-6, VOCAB**2 - 1)
    assert statistic < limit if stated_temperature == 0.5 else statistic > limit
