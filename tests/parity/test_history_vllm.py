"""History drafts in the real vLLM: greedy tokens are the policy's, and only finished responses are drafted from."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from paceline.config.run import HistoryDraft, NgramDraft
from paceline.config.run import VllmEngine as VllmConfig
from paceline.drafts.history import HistoryIndex
from paceline.engine.reference import ReferenceEngine
from paceline.engine.vllm.engine import VllmEngine
from paceline.models.weights import policy_tensors
from paceline.testing.models import random_policy
from paceline.types import Prompt, Request, Sampling, Versions

MAX_LEN, LONGEST = 96, 3
GREEDY = Sampling(temperature=0.0, max_tokens=40, stop_token_ids=(1,))
RANDOM = Sampling(temperature=1.0, max_tokens=40, stop_token_ids=(1,))
DRAFT = HistoryDraft(num_draft_tokens=LONGEST, min_match=1, max_match=8, window_steps=4)


@pytest.fixture(scope="module")
def policy_and_engine(tmp_path_factory):
    root = tmp_path_factory.mktemp("history")
    policy = random_policy(root / "policy")
    config = VllmConfig(max_num_seqs=8, kv_cache_gib=0.25, threads=1)
    engine = VllmEngine(root / "policy", config, DRAFT, max_model_len=MAX_LEN)
    yield policy, engine
    engine.close()


@pytest.fixture
def policy(policy_and_engine):
    return policy_and_engine[0]


@pytest.fixture
def engine(policy_and_engine):
    """With an empty history."""
    engine = policy_and_engine[1]
    engine.history.load_state_dict(HistoryIndex.from_config(DRAFT).state_dict())
    yield engine
    engine.choose_drafts(None)
    engine.limit_drafts(LONGEST)


def requests(count, seed=0, first_seed=0):
    rng = random.Random(seed)
    prompts = [tuple(rng.randrange(2, 16) for _ in range(rng.randrange(3, 20))) for _ in range(count)]
    return [Request(Prompt(f"p{i}", ids), 0, first_seed + 1000 * seed + i) for i, ids in enumerate(prompts)]


def remember(engine, step, asked, rollouts):
    pairs = zip(asked, rollouts.completions, strict=True)
    engine.history.add_step(step, [(request.prompt.token_ids, c.token_ids) for request, c in pairs])


def tokens(rollouts):
    return [c.token_ids for c in rollouts.completions]


def test_greedy_tokens_are_those_without_speculation_before_and_after_the_history_fills(policy, engine):
    asked = requests(12, seed=1)
    expected = tokens(ReferenceEngine(policy, max_model_len=MAX_LEN).generate(asked, GREEDY))
    first = engine.generate(asked, GREEDY)
    remember(engine, 1, asked, first)
    again = engine.generate(asked, GREEDY)
    assert tokens(first) == tokens(again) == expected
    assert first.stats.drafted == 0
    # The policy repeats itself, so the copy is right; what is rejected runs beyond the response limit.
    assert again.stats.accepted > 0.7 * again.stats.drafted > 100
    assert again.stats.engine_steps < 0.6 * first.stats.engine_steps


def test_without_history_all_steps_but_those_that_read_prompts_are_plain(engine):
    before = engine._runner.plain_steps.num_steps
    rollouts = engine.generate(requests(8, seed=2), RANDOM)
    assert rollouts.stats.drafted == 0 and {step.num_asked for step in rollouts.steps} == {0}
    assert engine._runner.plain_steps.num_steps - before == rollouts.stats.engine_steps - 1 > 5


@pytest.fixture(scope="module")
def ngram_engine(policy_and_engine, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ngram")
    policy_and_engine[0].save_pretrained(folder)
    config = VllmConfig(max_num_seqs=8, kv_cache_gib=0.25, threads=1)
    engine = VllmEngine(folder, config, NgramDraft(num_draft_tokens=LONGEST), max_model_len=MAX_LEN)
    yield engine
    engine.close()


@pytest.mark.parametrize("method", ["history", "ngram"])
def test_every_step_in_which_no_look_up_matched_is_plain_and_blocks_are_those_of_verify_steps(
    method, engine, ngram_engine, monkeypatch
):
    asked = requests(2, seed=8)
    if method == "history":
        # A short text per prompt: much of what is said has nothing to be drafted from.
        engine.history.add_step(1, [(request.prompt.token_ids, (5, 9, 11, 8, 0, 6)) for request in asked])
    else:
        engine = ngram_engine
    plain_steps = engine._runner.plain_steps
    before = plain_steps.num_steps
    rollouts = engine.generate(asked, RANDOM)
    # Both requests are there from the first step on: their n-th blocks belong to one step.
    steps = list(itertools.zip_longest(*(c.blocks for c in rollouts.completions)))
    without = [not any(block is not None and block.draft_token_ids for block in step) for step in steps]
    wanted = [step.num_asked > 0 for step in rollouts.steps]
    assert plain_steps.num_steps - before == sum(without[1:])
    assert sum(none and asked for none, asked in zip(without, wanted, strict=True)) > 5
    assert rollouts.stats.drafted > 5
    monkeypatch.setattr(plain_steps, "_is_plain", lambda _: False)
    assert [c.blocks for c in engine.generate(asked, RANDOM).completions] == [c.blocks for c in rollouts.completions]


def test_samples_draft_from_siblings_that_finished_in_the_same_call_and_never_from_those_in_flight(engine):
    """Sixteen equal greedy requests in eight places: the first eight have nobody to draft from, the others do."""
    asked = [Request(requests(1, seed=3)[0].prompt, sample, sample) for sample in range(16)]
    to_the_limit = Sampling(temperature=0.0, max_tokens=40)
    rollouts = engine.generate(asked, to_the_limit)
    drafted = [sum(len(block.draft_token_ids) for block in c.blocks) for c in rollouts.completions]
    assert drafted[:8] == [0] * 8 and min(drafted[8:]) > 10
    assert len(set(tokens(rollouts))) == 1
    # Nothing of it is left in the next call.
    assert engine.generate(asked[:8], to_the_limit).stats.drafted == 0


def test_what_is_drafted_stood_in_a_response_to_the_same_prompt(engine):
    asked = requests(8, seed=4)
    kept = engine.generate(asked, RANDOM)
    remember(engine, 1, asked, kept)
    again = engine.generate(requests(8, seed=4, first_seed=500), RANDOM)
    assert again.stats.drafted > 20
    for request, old, new in zip(asked, kept.completions, again.completions, strict=True):
        text = [*request.prompt.token_ids, *new.token_ids]
        done = len(request.prompt.token_ids)
        for block in new.blocks:
            if block.draft_token_ids:
                ids = list(block.draft_token_ids)
                assert any(ids == list(old.token_ids[at : at + len(ids)]) for at in range(len(old.token_ids)))
                alone = HistoryIndex.from_config(DRAFT)
                alone.add_step(1, [(request.prompt.token_ids, old.token_ids)])
                (key,) = alone._prompts
                assert alone.draft(key, text[:done], block.num_asked)[: len(ids)] == ids
            done += len(block.token_ids)


def test_the_live_k_caps_the_drafts_and_0_drafts_nothing(engine):
    asked = requests(8, seed=5)
    remember(engine, 1, asked, engine.generate(asked, GREEDY))
    rng = random.Random(6)
    engine.choose_drafts(lambda live: rng.randrange(LONGEST + 1))
    rollouts = engine.generate(asked, GREEDY)
    blocks = [block for c in rollouts.completions for block in c.blocks]
    assert all(len(block.draft_token_ids) <= block.num_asked for block in blocks)
    assert {len(block.draft_token_ids) for block in blocks} == {0, 1, 2, 3}
    engine.choose_drafts(None)
    engine.limit_drafts(1)
    assert len(engine.generate(asked, GREEDY).stats.drafted_by_position) == 1
    engine.limit_drafts(0)
    assert engine.generate(asked, GREEDY).stats.drafted == 0


def test_after_a_publish_old_responses_are_drafted_and_the_new_policy_decides(policy, engine):
    asked = requests(8, seed=7)
    first = engine.generate(asked, GREEDY)
    remember(engine, 1, asked, first)
    state = policy_tensors(policy)
    kept = {name: tensor.clone() for name, tensor in state.items()}
    generator = torch.Generator().manual_seed(5)
    moved = {name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator) for name, tensor in state.items()}
    engine.publish(moved, Versions(policy=1))
    trained = ReferenceEngine(policy, max_model_len=MAX_LEN)
    trained.publish(moved, Versions(policy=1))
    try:
        got = engine.generate(asked, GREEDY)
        assert got.stats.drafted > got.stats.accepted
        assert tokens(got) == tokens(trained.generate(asked, GREEDY)) != tokens(first)
    finally:
        trained.publish(kept, Versions(policy=2))
        engine.publish(kept, Versions(policy=2))
    assert tokens(engine.generate(asked, GREEDY)) == tokens(first)
