"""First-slot evidence against the reference engine: right drafts agree everywhere, wrong ones are found."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from paceline.config.run import Eagle3Draft
from paceline.drafts.eagle3 import Eagle3Drafter
from paceline.drafts.mtp import MtpDrafter
from paceline.engine.reference import ReferenceEngine
from paceline.models.eagle3 import greedy_draft
from paceline.models.mtp import MtpHead
from paceline.spec.draft_alarm import draft_alarm
from paceline.spec.sampling import policy_log_probs
from paceline.testing.models import random_head, random_mtp_policy, random_policy
from paceline.train.draft import Answer, policy_features, train_eagle3
from paceline.train.draft_check import first_slot_evidence
from paceline.types import Prompt, Request, Sampling

torch.set_num_threads(1)

K, VOCAB = 2, 16
DRAFT_IDS = torch.tensor([0, 1, 3, 4, 6, 7, 9, 10, 12, 13, 15])
SAMPLING = Sampling(temperature=0.8, top_p=0.95, max_tokens=24, stop_token_ids=(1,))


def requests(count: int, seed: int) -> list[Request]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 8, (count,), generator=generator).tolist()
    prompts = [torch.randint(2, VOCAB, (length,), generator=generator).tolist() for length in lengths]
    return [Request(Prompt(f"p{i}", tuple(ids)), 0, seed=1000 * seed + i) for i, ids in enumerate(prompts)]


def answers_of(asked, completions) -> list[Answer]:
    return [
        Answer((*request.prompt.token_ids, *completion.token_ids), len(request.prompt.token_ids))
        for request, completion in zip(asked, completions, strict=True)
    ]


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return random_policy(tmp_path_factory.mktemp("policy"), num_layers=3, hidden_size=32, vocab_size=VOCAB, spread=0.35)


@pytest.fixture(scope="module")
def head(policy, tmp_path_factory):
    asked = requests(60, seed=1)
    sampled = ReferenceEngine(policy).generate(asked, SAMPLING).completions
    config = Eagle3Draft(aux_layers=(0, 1, 3), vocab_size=11, epochs=6, depth=1, lr=3e-3)
    return train_eagle3(policy, answers_of(asked, sampled), config, SAMPLING)[0]


def rollouts(policy, head, count=40, seed=2):
    """(requests, completions) of an engine that drafts with `head`; prompts of one token have no root for a draft."""
    asked = [request for request in requests(count, seed) if len(request.prompt.token_ids) > 1]
    engine = ReferenceEngine(policy, Eagle3Drafter(head, policy), num_draft_tokens=K)
    return asked, engine.generate(asked, SAMPLING).completions


def evidence_of(policy, head, asked, completions):
    features = policy_features(policy, answers_of(asked, completions), head.aux_layers)
    return first_slot_evidence(policy, head, features, completions, SAMPLING)


def test_every_first_draft_is_the_one_that_the_head_gives_step_by_step(policy, head):
    asked, completions = rollouts(policy, head)
    features = policy_features(policy, answers_of(asked, completions), head.aux_layers)
    num_blocks, accepted, predicted = 0, 0, 0.0
    for feature, completion in zip(features, completions, strict=True):
        tokens = torch.tensor(feature.answer.token_ids)
        position = feature.answer.prompt_length
        with torch.no_grad():
            log_probs = policy_log_probs(policy(tokens[None]).logits[0], SAMPLING)
        for block in completion.blocks:
            if block.draft_token_ids:
                drafted, _ = greedy_draft(head, policy, feature.aux[: position - 1], tokens[:position], 1)
                assert drafted.tolist() == [block.draft_token_ids[0]]
                num_blocks += 1
                accepted += block.num_accepted > 0
                predicted += float(log_probs[position - 1, drafted[0]].exp())
            position += len(block.token_ids)
    evidence = first_slot_evidence(policy, head, features, completions, SAMPLING)
    assert (evidence.num_blocks, evidence.accepted, evidence.agreed) == (num_blocks, accepted, num_blocks)
    assert evidence.predicted == pytest.approx(predicted, rel=1e-5)
    assert num_blocks > 100 and 0.2 < accepted / num_blocks < 0.95


def test_what_is_predicted_is_what_an_engine_with_the_same_draft_measures(policy, head):
    """Five standard deviations: a false-alarm rate of 6e-7. And the alarm stays silent."""
    evidence = evidence_of(policy, head, *rollouts(policy, head, count=150, seed=3))
    z = evidence.report()["z"]
    assert z is not None and abs(z) < 5
    assert evidence.agreed == evidence.num_blocks > 500
    assert draft_alarm(evidence) is None


def test_the_sums_do_not_depend_on_which_completions_are_looked_at_together(policy, head):
    asked, completions = rollouts(policy, head, count=12)
    whole = evidence_of(policy, head, asked, completions)
    merged = evidence_of(policy, head, asked[:5], completions[:5])
    merged.merge(evidence_of(policy, head, asked[5:], completions[5:]))
    assert (merged.num_blocks, merged.accepted, merged.agreed) == (whole.num_blocks, whole.accepted, whole.agreed)
    assert merged.log_means == pytest.approx(whole.log_means, rel=1e-4)


def test_another_draft_in_the_engine_raises_the_alarm_by_both_bets(policy, head, tmp_path):
    other = random_head(tmp_path, policy, aux_layers=(0, 1, 3), draft_ids=DRAFT_IDS, seed=9)
    evidence = evidence_of(policy, head, *rollouts(policy, other))
    reason = draft_alarm(evidence)
    assert reason is not None and "is not the one" in reason and "were accepted where" in reason


def test_a_placeholder_and_a_block_without_a_draft_are_passed_over(policy, head):
    asked, completions = rollouts(policy, head, count=8)
    blocks = [len(completion.blocks) for completion in completions]
    changed = [
        dataclasses.replace(
            completion,
            blocks=tuple(
                dataclasses.replace(block, draft_token_ids=(-1, -1)[: len(block.draft_token_ids)])
                for block in completion.blocks
            ),
        )
        for completion in completions
    ]
    assert evidence_of(policy, head, asked, completions).num_blocks <= sum(blocks)
    assert evidence_of(policy, head, asked, changed).num_blocks == 0


def test_features_of_another_response_are_refused(policy, head):
    asked, completions = rollouts(policy, head, count=8)
    features = policy_features(policy, answers_of(asked, completions), head.aux_layers)
    with pytest.raises(ValueError, match="another response"):
        first_slot_evidence(policy, head, features, completions[::-1], SAMPLING)


def test_the_policys_own_mtp_layer_is_checked_the_same_way(tmp_path):
    policy = random_mtp_policy(tmp_path, num_layers=2, hidden_size=32)
    asked = [request for request in requests(40, seed=5) if len(request.prompt.token_ids) > 1]
    engine = ReferenceEngine(policy, MtpDrafter(policy), num_draft_tokens=K)
    completions = engine.generate(asked, SAMPLING).completions
    evidence = evidence_of(policy, MtpHead(policy), asked, completions)
    assert evidence.agreed == evidence.num_blocks > 100
    assert draft_alarm(evidence) is None
