"""k anew for every step of the real vLLM: what was asked for is what is verified, and tokens stay the policy's."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random

import pytest
import torch

from paceline.config.run import Eagle3Draft, MtpDraft
from paceline.config.run import VllmEngine as VllmConfig
from paceline.engine.vllm import deferred as deferred_module
from paceline.engine.vllm.engine import VllmEngine
from paceline.models.mtp import MtpHead
from paceline.spec.certificate import Certificate, score_tokens
from paceline.testing.models import random_head, random_mtp_policy, random_policy
from paceline.testing.speculation import broken_laws
from paceline.train.draft import Answer, policy_features
from paceline.train.draft_check import first_slot_evidence
from paceline.types import Prompt, Request, Sampling

MAX_LEN, LONGEST = 96, 3
GREEDY = Sampling(temperature=0.0, max_tokens=40, stop_token_ids=(1,))
RANDOM = dataclasses.replace(GREEDY, temperature=1.0)


@pytest.fixture(scope="module")
def policy_and_engine(tmp_path_factory):
    root = tmp_path_factory.mktemp("lengths")
    policy = random_policy(root / "policy")
    random_head(root / "head", policy)
    config = VllmConfig(max_num_seqs=32, kv_cache_gib=0.25, threads=1)
    draft = Eagle3Draft(num_draft_tokens=LONGEST)
    engine = VllmEngine(root / "policy", config, draft, draft_folder=root / "head", max_model_len=MAX_LEN)
    yield policy, engine
    engine.close()


@pytest.fixture
def engine(policy_and_engine):
    engine = policy_and_engine[1]
    yield engine
    engine.choose_drafts(None)
    engine.limit_drafts(LONGEST)


def requests(count: int, seed: int = 0) -> list[Request]:
    rng = random.Random(seed)
    prompts = [tuple(rng.randrange(2, 16) for _ in range(rng.randrange(3, 20))) for _ in range(count)]
    return [Request(Prompt(f"p{i}", ids), 0, 1000 * seed + i) for i, ids in enumerate(prompts)]


def any_length(seed: int):
    rng = random.Random(seed)
    return lambda live: rng.randrange(LONGEST + 1)


def test_greedy_tokens_are_the_same_for_every_schedule_of_k(engine):
    fixed = engine.generate(requests(24), GREEDY)
    for choose in (any_length(1), any_length(2), lambda live: LONGEST if live < 12 else 0):
        engine.choose_drafts(choose)
        drawn = engine.generate(requests(24), GREEDY)
        assert [c.token_ids for c in drawn.completions] == [c.token_ids for c in fixed.completions]
        assert sum(step.num_asked < LONGEST for step in drawn.steps) > 5


def test_tokens_at_temperature_1_with_a_random_k_are_those_of_the_policy(policy_and_engine, engine):
    policy, _ = policy_and_engine
    certificate = Certificate()
    engine.choose_drafts(any_length(3))
    for seed in range(4):
        asked = requests(32, seed=20 + seed)
        completions = engine.generate(asked, RANDOM).completions
        for request, completion in zip(asked, completions, strict=True):
            ids = torch.tensor([request.prompt.token_ids + completion.token_ids])
            with torch.no_grad():
                logits = policy(ids).logits[0, len(request.prompt.token_ids) - 1 : -1]
            tokens, slots = torch.tensor(completion.token_ids), torch.tensor(completion.slots())
            uniforms = torch.rand(len(tokens), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            certificate.add(score_tokens(logits, tokens, RANDOM, uniforms), slots)
    report = certificate.report()
    assert report.tokens > 1000 and abs(report.z) < 4.9 and report.log_m < 13.8
    assert set(report.by_slot) == {-1, 0, 1, 2, 3}


def test_what_was_asked_for_is_what_the_next_step_verifies(engine):
    asked: list[tuple[int, int]] = []
    rng = random.Random(4)

    def choose(live):
        asked.append((live, rng.randrange(LONGEST + 1)))
        return asked[-1][1]

    engine.choose_drafts(choose)
    rollouts = engine.generate(requests(16, seed=5), RANDOM)
    steps = rollouts.steps
    assert len(steps) == rollouts.stats.engine_steps == len(asked)
    assert [step.num_asked for step in steps] == [0, *(k for _, k in asked[:-1])]
    # Asked with the batch of this very step; its rows get the drafts that the next step verifies.
    assert [step.live for step in steps] == [live for live, _ in asked]
    for completion in rollouts.completions:
        first, *others = completion.blocks
        assert first.num_asked == 0 == len(first.draft_token_ids)
        short = [block for block in others if len(block.draft_token_ids) != block.num_asked]
        # Near the response limit a row has no room for all of them.
        assert all(block in others[-LONGEST:] for block in short)
        assert [steps[i].num_asked for i in range(1, len(others) + 1)] == [block.num_asked for block in others]


def test_a_limit_bounds_what_is_chosen_and_no_drafts_asks_nobody(engine):
    engine.choose_drafts(lambda live: LONGEST)
    engine.limit_drafts(1)
    assert {step.num_asked for step in engine.generate(requests(4), RANDOM).steps} == {0, 1}
    engine.limit_drafts(0)
    engine.choose_drafts(lambda live: pytest.fail("asked while no drafts are allowed"))
    assert {step.num_asked for step in engine.generate(requests(4), RANDOM).steps} == {0}


@pytest.mark.parametrize("k", ["fixed", "anew in every step", "none"])
def test_the_account_of_a_call_keeps_the_conservation_laws(engine, k):
    """48 requests for 32 places."""
    engine.choose_drafts(any_length(13) if k == "anew in every step" else None)
    engine.limit_drafts(0 if k == "none" else LONGEST)
    for sampling in (GREEDY, RANDOM):
        assert broken_laws(engine.generate(requests(48, seed=14), sampling)) == []


def test_times_of_the_steps_add_up_to_the_call(engine):
    rollouts = engine.generate(requests(16, seed=6), RANDOM)
    assert all(step.seconds > 0 and step.cpu_seconds >= 0 for step in rollouts.steps)
    # What is missing is the end of the last step: handing out its tokens.
    assert 0.5 * rollouts.seconds < sum(step.seconds for step in rollouts.steps) <= rollouts.seconds


# -- steps without drafts do not run the drafter ---------------------------------------------------------------------


def off_then_on(off: int, on: int = 1000):
    """k = 0 for `off` steps, then all for `on` steps, and again."""
    steps = itertools.cycle([0] * off + [LONGEST] * on)
    return lambda live: next(steps)


@contextlib.contextmanager
def as_shipped(engine):
    """vLLM verifies and drafts in every step."""
    runner = engine._runner
    ours = {name: getattr(runner, name) for name in ("propose_draft_token_ids", "execute_model", "sample_tokens")}
    runner.propose_draft_token_ids = runner.deferred_drafter._propose
    runner.execute_model, runner.sample_tokens = runner.plain_steps._execute, runner.plain_steps._sample
    yield
    for name, function in ours.items():
        setattr(runner, name, function)


@pytest.mark.parametrize(("off", "on"), [(9, 1000), (3, 2), (1, 1)])
def test_drafts_after_steps_without_are_those_of_a_drafter_that_read_every_step(engine, off, on):
    """64 requests for 32 places: prompts come in while others decode, and rows move in the batch."""
    asked = requests(64, seed=7)
    engine.choose_drafts(off_then_on(off, on))
    deferred = engine.generate(asked, GREEDY)
    with as_shipped(engine):
        engine.choose_drafts(off_then_on(off, on))
        shipped = engine.generate(asked, GREEDY)
    assert deferred.stats.accepted > 30
    assert [c.blocks for c in deferred.completions] == [c.blocks for c in shipped.completions]


def test_a_draft_that_missed_some_steps_is_noticed_by_the_same_comparison(engine, monkeypatch):
    """The planted fault: what was kept is thrown away, and the drafter's keys and values have holes."""
    asked = requests(32, seed=7)
    deferred = engine._runner.deferred_drafter
    monkeypatch.setattr(deferred, "_read_kept", lambda *_: deferred.forget())
    engine.choose_drafts(off_then_on(9))
    holes = engine.generate(asked, GREEDY)
    monkeypatch.undo()
    with as_shipped(engine):
        engine.choose_drafts(off_then_on(9))
        shipped = engine.generate(asked, GREEDY)
    assert [c.blocks for c in holes.completions] != [c.blocks for c in shipped.completions]
    assert [c.token_ids for c in holes.completions] == [c.token_ids for c in shipped.completions]


def test_what_is_kept_for_later_stays_within_its_bytes_and_the_drafts_are_the_same(engine, monkeypatch):
    """32 rows of 768 bytes: the bound of 100 kB leaves four steps, of nine without drafts."""
    bound, seen, drafter = 100_000, [], engine._runner.deferred_drafter
    keep = drafter._keep

    def keeps(*args):
        keep(*args)
        held = sum(states.untyped_storage().nbytes() for step in drafter._kept for states in step.states)
        seen.append((held, drafter.num_bytes))

    monkeypatch.setattr(drafter, "_keep", keeps)
    asked = requests(64, seed=7)
    blocks = {}
    for size in (deferred_module.KEPT_BYTES, bound):
        seen.clear()
        monkeypatch.setattr(deferred_module, "KEPT_BYTES", size)
        engine.choose_drafts(off_then_on(9, 3))
        blocks[size] = [completion.blocks for completion in engine.generate(asked, GREEDY).completions]
        assert all(held == counted for held, counted in seen)
        assert (max(held for held, _ in seen) > bound) == (size > bound)
    assert len(seen) > 10 and len({str(found) for found in blocks.values()}) == 1


def test_nothing_is_kept_of_a_call_in_the_next_and_little_of_a_request_that_has_ended(engine, monkeypatch):
    drafter, shares = engine._runner.deferred_drafter, []
    keep = drafter._keep

    def keeps(*args):
        keep(*args)
        ended = [step.request_ids.count(name) for step in drafter._kept for name in drafter._tokens if name not in live]
        shares.append((sum(ended), drafter._tokens.total()))

    live = engine._runner.requests
    monkeypatch.setattr(drafter, "_keep", keeps)
    engine.limit_drafts(0)
    engine.generate(requests(32, seed=13), RANDOM)
    assert any(ended for ended, _ in shares) and all(2 * ended <= kept for ended, kept in shares)
    assert drafter._kept and drafter.num_bytes > 0
    # With drafts in every step nothing is kept, so that nothing is to be read but what was left behind.
    monkeypatch.setattr(drafter, "_read_kept", lambda *_: pytest.fail("kept from the call before"))
    engine.limit_drafts(LONGEST)
    engine.generate(requests(4, seed=13), RANDOM)


def test_a_step_without_drafts_neither_verifies_nor_drafts_and_as_shipped_it_does_both(engine, monkeypatch):
    runs, verified = [], []
    runner = engine._runner
    forward, verify = runner.drafter.propose, runner.rejection_sampler.forward
    monkeypatch.setattr(runner.drafter, "propose", lambda *args, **kwargs: runs.append(1) or forward(*args, **kwargs))
    monkeypatch.setattr(runner.rejection_sampler, "forward", lambda *args: verified.append(1) or verify(*args))
    engine.limit_drafts(0)
    steps = engine.generate(requests(16, seed=8), GREEDY).stats.engine_steps
    assert (len(runs), len(verified)) == (1, 1) and steps > 30  # The prompts, read at once.
    with as_shipped(engine):
        engine.generate(requests(16, seed=8), GREEDY)
    assert (len(runs), len(verified)) == (1 + steps, 1 + steps)


def test_with_a_seed_both_paths_of_a_step_without_drafts_draw_the_same_tokens(engine):
    asked = requests(32, seed=9)
    filtered = dataclasses.replace(RANDOM, temperature=1.3, top_k=7, top_p=0.9)
    engine.limit_drafts(0)
    for sampling in (RANDOM, filtered):
        plain = engine.generate(asked, sampling)
        with as_shipped(engine):
            verified = engine.generate(asked, sampling)
        assert [c.token_ids for c in plain.completions] == [c.token_ids for c in verified.completions]
        assert [c.blocks for c in plain.completions] == [c.blocks for c in verified.completions]
    assert {c.token_ids for c in engine.generate(requests(32, seed=10), RANDOM).completions} != {
        c.token_ids for c in plain.completions
    }


def test_after_an_error_in_a_plain_step_the_engine_speculates_as_before(engine, monkeypatch):
    runner = engine._runner
    engine.limit_drafts(0)
    before = engine.generate(requests(4, seed=11), RANDOM)

    forward = runner._model_forward

    def broken(*args, **kwargs):
        if runner.speculative_config is None:
            raise RuntimeError("planted")
        return forward(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "_model_forward", broken)
        with pytest.raises(RuntimeError, match="planted"):
            engine.generate(requests(4, seed=11), RANDOM)
    assert runner.speculative_config is not None and runner.sampler is runner.plain_steps._sampler
    after = engine.generate(requests(4, seed=11), RANDOM)
    assert [c.token_ids for c in after.completions] == [c.token_ids for c in before.completions]


@pytest.fixture(scope="module")
def mtp_policy_and_engine(tmp_path_factory):
    """The policy has no positions beyond the longest sequence."""
    folder = tmp_path_factory.mktemp("mtp") / "policy"
    policy = random_mtp_policy(folder, vocab_size=16, spread=0.25, max_positions=MAX_LEN)
    config = VllmConfig(max_num_seqs=16, kv_cache_gib=0.25, threads=1)
    engine = VllmEngine(folder, config, MtpDraft(num_draft_tokens=2), max_model_len=MAX_LEN)
    yield policy, engine
    engine.close()


@pytest.fixture
def mtp_engine(mtp_policy_and_engine):
    engine = mtp_policy_and_engine[1]
    yield engine
    engine.choose_drafts(None)


def test_an_mtp_layer_misses_nothing_of_steps_without_drafts(mtp_engine, monkeypatch):
    """The other kind of draft that reads hidden states: the policy's own layer, fed with its last ones."""
    asked, deferred_drafter = requests(24, seed=12), mtp_engine._runner.deferred_drafter

    def blocks():
        mtp_engine.choose_drafts(off_then_on(9, 4))
        return [completion.blocks for completion in mtp_engine.generate(asked, GREEDY).completions]

    deferred = blocks()
    with as_shipped(mtp_engine):
        shipped = blocks()
    monkeypatch.setattr(deferred_drafter, "_read_kept", lambda *_: deferred_drafter.forget())
    assert deferred == shipped != blocks()


def test_near_the_length_limit_nothing_is_drafted_and_the_drafts_afterwards_are_the_right_ones(
    mtp_policy_and_engine, mtp_engine, monkeypatch
):
    """Prompts of three lengths: two times the longest sequences reach the limit while others go on."""
    policy, _ = mtp_policy_and_engine
    rng = random.Random(14)
    prompts = [tuple(rng.randrange(2, 16) for _ in range(length)) for length in (80,) * 4 + (50,) * 4 + (5,) * 6]
    asked = [Request(Prompt(f"p{i}", ids), 0, i) for i, ids in enumerate(prompts)]
    to_the_end = dataclasses.replace(RANDOM, max_tokens=MAX_LEN, stop_token_ids=())

    def evidence(completions):
        answers = [
            Answer((*ids, *completion.token_ids), len(ids))
            for ids, completion in zip(prompts, completions, strict=True)
        ]
        head = MtpHead(policy)
        features = policy_features(policy, answers, head.aux_layers)
        return first_slot_evidence(policy, head, features, completions, to_the_end)

    completions = mtp_engine.generate(asked, to_the_end).completions
    assert {len(ids) + len(c.token_ids) for ids, c in zip(prompts, completions, strict=True)} == {MAX_LEN}
    found = evidence(completions)
    assert found.agreed == found.num_blocks > 200
    for completion in completions[8:]:
        asked_for = [block.num_asked for block in completion.blocks[1:]]
        assert 2 in asked_for[asked_for.index(0) :]
        assert all(len(block.draft_token_ids) <= block.num_asked for block in completion.blocks)

    # As shipped: zeros for everybody, and holes behind them.
    runner = mtp_engine._runner
    monkeypatch.delattr(runner, "_input_fits_in_drafter")
    shipped = evidence(mtp_engine.generate(asked, to_the_end).completions)
    assert shipped.agreed < shipped.num_blocks
