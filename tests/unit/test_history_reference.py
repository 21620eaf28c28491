"""History drafts in the reference engine: only committed text is proposed, and what is sampled stays the policy's."""

from __future__ import annotations

import torch

from paceline.drafts.history import HistoryDrafter, HistoryIndex
from paceline.engine.reference import ReferenceEngine
from paceline.testing.runs import tiny_policy
from paceline.types import Prompt, Request, Sampling

torch.set_num_threads(1)

PROMPT = Prompt("p", (3, 4, 5))
SAMPLING = Sampling(max_tokens=24, stop_token_ids=(1,))
GREEDY = Sampling(temperature=0, max_tokens=24)


def engine_for(policy, max_num_seqs=16, k=3, index=None):
    index = index or HistoryIndex(window_steps=4, min_match=1, max_match=6, max_tokens_kept=10_000)
    engine = ReferenceEngine(policy, HistoryDrafter(index), num_draft_tokens=k, max_num_seqs=max_num_seqs)
    return engine, index


def samples(count, prompt=PROMPT, first_seed=50):
    return [Request(prompt, i, seed=first_seed + i) for i in range(count)]


def test_without_history_every_step_is_a_plain_step_and_tokens_are_those_without_speculation():
    policy = tiny_policy()
    asked = [*samples(1), *samples(1, Prompt("q", (3, 4)), 80), *samples(1, Prompt("r", (4,)), 90)]
    engine, index = engine_for(policy)
    index.add_step(1, [((9, 9, 9), (2, 3, 4))])
    got = engine.generate(asked, GREEDY)
    assert got.stats.drafted == got.stats.verify_steps == 0
    assert {step.num_asked for step in got.steps} == {0}
    plain = ReferenceEngine(policy).generate(asked, GREEDY)
    assert [c.token_ids for c in got.completions] == [c.token_ids for c in plain.completions]


def test_a_greedy_answer_that_was_kept_is_drafted_whole_and_stays_the_same():
    engine, index = engine_for(tiny_policy())
    first = engine.generate(samples(1), GREEDY)
    index.add_step(1, [(PROMPT.token_ids, first.completions[0].token_ids)])
    again = engine.generate(samples(1), GREEDY)
    assert again.completions[0].token_ids == first.completions[0].token_ids
    assert again.stats.drafted == again.stats.accepted == 18 and again.stats.engine_steps == 6


def test_samples_in_flight_draft_from_siblings_that_have_finished_and_from_nothing_else():
    """Every draft is that of an index which holds the finished siblings alone."""
    engine, index = engine_for(tiny_policy(), max_num_seqs=4)
    ended: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    found: list[tuple[int, list[int], list[int]]] = []
    finish, draft = index.finish, index.draft

    def finish_and_note(prompt, response):
        ended.append((prompt, response))
        finish(prompt, response)

    def draft_twice(key, text, limit):
        _, alone = engine_for(engine.model)
        alone.add_step(0, ended)
        found.append((len(ended), draft(key, text, limit), alone.draft(key, text, limit)))
        return found[-1][1]

    index.finish, index.draft = finish_and_note, draft_twice
    rollouts = engine.generate(samples(24), SAMPLING)
    assert sorted(ended) == sorted((PROMPT.token_ids, c.token_ids) for c in rollouts.completions)
    assert all(drafted == expected for _, drafted, expected in found)
    assert all(known > 0 for known, drafted, _ in found if drafted)
    assert rollouts.stats.drafted > 50 and rollouts.stats.accepted > 0
    # Nothing is left for the next call.
    assert engine.generate(samples(1), SAMPLING).stats.drafted == 0


def test_the_live_k_and_the_limit_cap_the_drafts():
    engine, index = engine_for(tiny_policy())
    index.add_step(1, [(PROMPT.token_ids, engine.generate(samples(1), GREEDY).completions[0].token_ids)])
    engine.choose_drafts(lambda live: 2)
    assert engine.generate(samples(1), GREEDY).stats.drafted_by_position[2:] in ((), (0,))
    engine.limit_drafts(1)
    capped = engine.generate(samples(1), GREEDY)
    assert capped.stats.drafted_by_position == (capped.stats.verify_steps,) and capped.stats.engine_steps == 12
    engine.limit_drafts(0)
    assert engine.generate(samples(1), GREEDY).stats.drafted == 0


def test_the_same_calls_give_the_same_tokens_and_drafts():
    outcomes = []
    for _ in range(2):
        engine, index = engine_for(tiny_policy(), max_num_seqs=3)
        for step in range(3):
            completions = engine.generate(samples(8, first_seed=100 * step), SAMPLING).completions
            index.add_step(step, [(PROMPT.token_ids, c.token_ids) for c in completions])
        outcomes.append([(c.token_ids, c.blocks) for c in completions])
    assert outcomes[0] == outcomes[1]
