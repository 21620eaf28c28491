"""The parts of a verify step: edges of acceptance and residual, placeholders, refused input, records."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.spec.verify import acceptance_probs, residual_probs, to_blocks, verify, verify_chain
from paceline.types import Block

PROPERTY = settings(max_examples=80, deadline=None, derandomize=True)
VOCAB = 5
weights = st.lists(st.integers(0, 6), min_size=VOCAB, max_size=VOCAB).filter(any)
distributions = weights.map(lambda counts: torch.tensor(counts, dtype=torch.float64) / sum(counts))


@PROPERTY
@given(distributions, distributions)
def test_acceptance_and_residual_make_up_the_target(target, draft):
    """The identity behind losslessness: draft x accept + P(reject) x residual = target, at every token."""
    tokens = torch.arange(VOCAB)
    accept = acceptance_probs(target.expand(VOCAB, -1), draft.expand(VOCAB, -1), tokens)
    residual = residual_probs(target, draft, torch.tensor(0))
    assert bool(((accept >= 0) & (accept <= 1)).all())
    assert abs(float(residual.sum()) - 1.0) < 1e-12
    rejected = float((draft * (1 - accept)).sum())
    torch.testing.assert_close(draft * accept + rejected * residual, target, rtol=0, atol=1e-12)


@PROPERTY
@given(distributions, st.integers(0, VOCAB - 1))
def test_a_deterministic_draft_is_a_one_hot_one(target, token):
    one_hot = torch.nn.functional.one_hot(torch.tensor(token), VOCAB).double()
    token = torch.tensor(token)
    assert acceptance_probs(target, None, token) == acceptance_probs(target, one_hot, token)
    torch.testing.assert_close(residual_probs(target, None, token), residual_probs(target, one_hot, token))


@PROPERTY
@given(distributions, distributions, st.permutations(range(VOCAB)), st.integers(0, VOCAB - 1))
def test_renaming_the_tokens_renames_the_residual(target, draft, order, token):
    order = torch.tensor(order)
    renamed = order.argsort()[token]
    for stated, stated_renamed in ((draft, draft[order]), (None, None)):
        torch.testing.assert_close(
            residual_probs(target[order], stated_renamed, renamed),
            residual_probs(target, stated, torch.tensor(token))[order],
        )


def test_noise_of_zero_accepts_nothing_impossible():
    target = torch.tensor([[0.0, 1.0], [0.5, 0.5]])
    zeros = torch.zeros(2, dtype=torch.float64)
    for draft_probs in (None, torch.tensor([[0.5, 0.5]])):
        assert verify_chain(target, [0], draft_probs, zeros) == Block((0,), 0, (1,))
        batched = None if draft_probs is None else draft_probs.unsqueeze(0)
        result = verify(target.unsqueeze(0), torch.tensor([[0]]), batched, uniforms_BK1=zeros.unsqueeze(0))
        assert result.num_accepted_B.tolist() == [0] and result.tokens_BK1.tolist() == [[1, -1]]


def test_a_token_the_draft_could_not_have_drawn_is_rejected():
    target, draft = torch.tensor([0.5, 0.5]), torch.tensor([0.0, 1.0])
    assert float(acceptance_probs(target, draft, torch.tensor(0))) == 0.0


def test_a_draft_equal_to_the_policy_is_accepted_at_any_noise_and_its_empty_residual_stays_a_distribution():
    target = torch.tensor([0.2, 0.3, 0.5])
    assert torch.equal(residual_probs(target, target, torch.tensor(1)), target)
    rows = target.expand(1, 3, -1)
    noise = torch.full((1, 3), 1.0 - 2.0**-53, dtype=torch.float64)
    result = verify(rows, torch.tensor([[0, 1]]), rows[:, :2], uniforms_BK1=noise)
    assert result.num_accepted_B.tolist() == [2]


def test_placeholders_are_rejected_before_any_look_up_and_never_committed():
    target = torch.full((6, 4, 3), 1 / 3)
    drafts = torch.tensor([[-1, 1, 1], [1, -1, 1], [1, 1, -1], [-1, -1, -1], [1, 1, 1], [-1, -1, 1]])
    for draft_probs in (None, torch.full((6, 3, 3), 1 / 3)):
        uniforms = torch.zeros(6, 4, dtype=torch.float64)
        result = verify(target, drafts, draft_probs, uniforms_BK1=uniforms)
        assert result.num_accepted_B.tolist() == [0, 1, 2, 0, 3, 0]
        assert torch.equal((result.tokens_BK1 >= 0).sum(1), result.num_accepted_B + 1)


def test_rows_behind_the_last_draft_may_hold_anything():
    target = torch.full((1, 4, 3), torch.nan)
    target[0, :2] = torch.tensor([0.0, 0.0, 1.0])
    draft_probs = torch.full((1, 3, 3), torch.nan)
    draft_probs[0, 0] = torch.tensor([0.0, 0.0, 1.0])
    for told in (None, draft_probs):
        result = verify(target, torch.tensor([[2, -1, -1]]), told, generators=torch.Generator().manual_seed(0))
        assert result.tokens_BK1.tolist() == [[2, 2, -1, -1]]


def test_a_sequence_gets_the_same_tokens_alone_and_in_a_batch():
    generator = torch.Generator().manual_seed(5)
    target = torch.rand(4, 3, 8, generator=generator).softmax(-1)
    drafts = torch.randint(8, (4, 2), generator=generator)

    def generators():
        return [torch.Generator().manual_seed(seed) for seed in range(4)]

    together = verify(target, drafts, generators=generators())
    for row, own in enumerate(generators()):
        alone = verify(target[row : row + 1], drafts[row : row + 1], generators=[own])
        assert torch.equal(alone.tokens_BK1[0], together.tokens_BK1[row])


def test_a_batch_without_drafts_is_plain_decoding():
    target = torch.tensor([[[0.0, 1.0]], [[1.0, 0.0]]])
    result = verify(target, torch.empty(2, 0, dtype=torch.long), generators=torch.Generator().manual_seed(0))
    assert result.tokens_BK1.tolist() == [[1], [0]] and result.num_accepted_B.tolist() == [0, 0]


def test_blocks_end_their_drafts_at_the_first_placeholder():
    target = torch.zeros(3, 3, 4)
    target[..., 2] = 1.0
    drafts = torch.tensor([[2, 1], [2, -1], [-1, -1]])
    result = verify(target, drafts, generators=torch.Generator().manual_seed(0))
    assert to_blocks(drafts, result, live_batch=3) == [
        Block((2, 1), 1, (2, 2), 3),
        Block((2,), 1, (2, 2), 3),
        Block((), 0, (2,), 3),
    ]


def test_input_that_does_not_fit_is_refused():
    target, drafts, noise = torch.ones(2, 3, 4) / 4, torch.zeros(2, 2, dtype=torch.long), torch.zeros(2, 3)
    with pytest.raises(ValueError, match="one row per draft slot and one for the bonus"):
        verify(target[:, :2], drafts, uniforms_BK1=noise)
    with pytest.raises(ValueError, match="reduced vocabulary"):
        verify(target, drafts, torch.ones(2, 2, 3) / 3, uniforms_BK1=noise)
    with pytest.raises(ValueError, match="outside the vocabulary of 4"):
        verify(target, drafts + 4, uniforms_BK1=noise)
    with pytest.raises(ValueError, match="exactly one of"):
        verify(target, drafts)
