"""Drafts from earlier responses: what is found, what is kept, and what must never be looked at."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from paceline.config.run import HistoryDraft
from paceline.drafts.history import VOTERS, HistoryDrafter, HistoryIndex, prompt_key
from paceline.errors import EngineError, PublishError

PROMPT = (5, 6, 7)
tokens = st.lists(st.integers(0, 2), min_size=1, max_size=14)
prompts = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple)


def made(window_steps=10, min_match=1, max_match=4, max_tokens_kept=1000):
    return HistoryIndex(
        window_steps=window_steps, min_match=min_match, max_match=max_match, max_tokens_kept=max_tokens_kept
    )


def draft(index, prompt, response, limit=8):
    return index.draft(prompt_key(prompt), [*prompt, *response], limit)


def by_search(prompt, responses, text, limit, min_match, max_match):
    """The rules of `drafts.history`, read off one text after the other."""
    places = []
    for age, response in enumerate(responses):
        whole = [*prompt[-max_match:], *response]
        for place in range(len(whole) - len(response), len(whole)):
            agree = 0
            while agree < min(max_match, place, len(text)) and whole[place - 1 - agree] == text[len(text) - 1 - agree]:
                agree += 1
            places.append((agree, age, place, whole))
    longest = max((agree for agree, *_ in places), default=0)
    if longest < min_match:
        return []
    voters = sorted((age, place, whole) for agree, age, place, whole in places if agree == longest)[-VOTERS:]
    drafted = []
    while len(drafted) < min(limit, longest):
        votes = Counter()
        newest = {}
        for order, (_, place, whole) in enumerate(voters):
            if place + len(drafted) < len(whole):
                votes[whole[place + len(drafted)]] += 1
                newest[whole[place + len(drafted)]] = order
        if not votes:
            break
        token = max(votes, key=lambda t: (votes[t], newest[t]))
        voters = [v for v in voters if v[2][v[1] + len(drafted) :][:1] == [token]]
        drafted.append(token)
    return drafted


@given(
    prompts,
    st.lists(tokens, max_size=8),
    st.lists(st.tuples(st.booleans(), tokens), min_size=1, max_size=6),
    st.integers(1, 3),
    st.integers(0, 4),
    st.integers(1, 9),
)
@settings(max_examples=300, deadline=None)
def test_what_is_drafted_is_what_a_search_through_all_texts_finds(prompt, kept, events, least, more, limit):
    """Look-ups and responses that end come in any order: the tree behind the look-up grows while it is used."""
    index = made(min_match=least, max_match=least + more)
    index.add_step(1, [(prompt, response) for response in kept])
    index.add_step(1, [((9, 9), [0, 1, 2] * 4)])  # of another prompt
    index.start_call([prompt])
    known = list(kept)
    for ends, response in events:
        found = draft(index, prompt, response, limit)
        assert found == by_search(prompt, known, [*prompt, *response], limit, least, least + more)
        if ends:
            index.finish(prompt, response)
            known.append(response)


def test_the_end_of_the_prompt_counts_so_the_first_tokens_are_drafted():
    index = made()
    index.add_step(1, [(PROMPT, (1, 2, 3, 4))])
    assert draft(index, PROMPT, (), limit=3) == [1, 2, 3]


def test_the_longest_match_wins_then_the_most_frequent_then_the_newest():
    index = made()
    index.add_step(1, [(PROMPT, (1, 2, 8)), (PROMPT, (4, 2, 9)), (PROMPT, (4, 2, 9)), (PROMPT, (0, 2, 3))])
    assert draft(index, PROMPT, (1, 2))[:1] == [8]
    assert draft(index, PROMPT, (9, 2))[:1] == [9]
    index.add_step(2, [(PROMPT, (0, 2, 3))])
    assert draft(index, PROMPT, (9, 2))[:1] == [3]


def test_a_longer_match_drafts_more_and_never_more_than_was_asked_for():
    index = made(max_match=6)
    index.add_step(1, [(PROMPT, range(20, 32))])
    assert [len(draft(index, (), range(23 - n, 23))) for n in (1, 2, 4, 6, 8)] == [0] * 5  # of another prompt
    drafts = [draft(index, PROMPT, (0, *range(26 - n, 26))) for n in (1, 2, 4, 6)]
    assert drafts == [[26], [26, 27], [26, 27, 28, 29], [26, 27, 28, 29, 30, 31]]
    assert draft(index, PROMPT, range(20, 26), limit=2) == [26, 27]
    assert draft(index, PROMPT, range(20, 26), limit=0) == []


def test_only_the_same_prompt_is_looked_up():
    index = made()
    index.add_step(1, [(PROMPT, (1, 2, 3, 4))])
    for other in ((5, 6), (5, 6, 7, 8), (4, 5, 6, 7), (5, 6, 8)):
        assert draft(index, other, (1, 2)) == []
    assert draft(index, PROMPT, (1, 2)) == [3, 4]


def test_nothing_is_drafted_from_a_response_that_is_still_in_flight():
    index = made()
    index.start_call([PROMPT])
    assert not index.can_draft
    for length in range(1, 9):
        assert draft(index, PROMPT, ((1, 2, 3, 4) * 2)[:length]) == []


def test_a_sibling_that_has_finished_is_used_in_the_same_call_and_in_no_other():
    index = made()
    index.start_call([PROMPT] * 3)
    assert draft(index, PROMPT, (1, 2)) == [] and not index.can_draft
    index.finish(PROMPT, (1, 2, 3, 4))
    assert draft(index, PROMPT, (1, 2)) == [3, 4] and index.can_draft
    index.finish(PROMPT, (1, 2, 5))
    assert draft(index, PROMPT, (1, 2)) == [5] and index.can_draft
    index.finish(PROMPT, (1,))
    assert not index.can_draft  # nobody is left to draft for
    index.start_call([PROMPT])
    assert draft(index, PROMPT, (1, 2)) == [] and not index.can_draft and index.num_live_tokens == 0


def test_a_call_for_prompts_without_history_cannot_draft():
    index = made()
    index.add_step(1, [(PROMPT, (1, 2, 3))])
    index.start_call([(1, 2), (3,)])
    assert not index.can_draft
    index.finish((1, 2), (3, 4))
    assert not index.can_draft
    index.start_call([(1, 2), PROMPT])
    assert index.can_draft
    index.finish(PROMPT, (3, 4))
    assert not index.can_draft


def test_a_response_is_used_for_as_many_steps_as_the_window_has():
    index = made(window_steps=3)
    index.add_step(1, [(PROMPT, (1, 2, 3))])
    used = []
    for step in (2, 3, 4, 5):
        used.append(draft(index, PROMPT, (1, 2)))  # in step `step`
        index.add_step(step, [])
    assert used == [[3], [3], [3], []]


steps = st.lists(st.lists(st.tuples(prompts, tokens), max_size=5), max_size=12)


@given(steps, st.integers(1, 30), st.integers(1, 5))
@settings(max_examples=150, deadline=None)
def test_no_stream_of_responses_breaks_the_bound_and_the_oldest_go_first(stream, bound, window):
    index = made(max_tokens_kept=bound, window_steps=window)
    expected = []
    for step, responses in enumerate(stream, start=1):
        index.start_call([prompt for prompt, _ in responses])
        for prompt, response in responses:
            draft(index, prompt, response)
            index.finish(prompt, response)
            assert index.num_live_tokens <= bound
        index.add_step(step, responses)
        expected += [(step, response) for _, response in responses if len(response) <= bound]
        while sum(len(response) for _, response in expected) > bound:
            expected.pop(0)
        expected = [(s, response) for s, response in expected if s > step - window]
        texts = [(s, response) for _, s, response in index.state_dict()["texts"]]
        assert texts == expected
        assert index.num_tokens == sum(len(response) for _, response in expected) <= bound
        # Nothing else grows either: a prompt without a response is forgotten.
        assert len(index._prompts) <= len({prompt for group in stream[:step] for prompt, _ in group})
    index.start_call([])
    assert len(index._prompts) == len(index.state_dict()["contexts"]) <= len(expected)


@given(steps, st.integers(5, 40), prompts, tokens)
@settings(max_examples=80, deadline=None)
def test_a_restored_index_drafts_keeps_and_drops_as_the_one_that_was_saved(stream, bound, prompt, response):
    index = made(max_tokens_kept=bound, window_steps=3)
    for step, responses in enumerate(stream, start=1):
        index.start_call([prompt])
        index.finish(prompt, response)  # of an evaluation, say: not part of the state
        index.add_step(step, responses)
    restored = made(max_tokens_kept=bound, window_steps=3)
    restored.add_step(1, [(prompt, (2, 2, 2))])
    restored.load_state_dict(json.loads(json.dumps(index.state_dict())))
    for step in range(len(stream) + 1, len(stream) + 4):
        for one in (index, restored):
            one.start_call([prompt])
        assert restored.can_draft == index.can_draft
        assert draft(restored, prompt, response) == draft(index, prompt, response)
        assert json.dumps(restored.state_dict()) == json.dumps(index.state_dict())
        for one in (index, restored):
            one.add_step(step, [(prompt, response)])


def test_a_filled_row_pays_for_all_drafts_that_were_asked_for():
    index = made()
    index.fill = True
    index.start_call([PROMPT])
    assert index.can_draft and draft(index, PROMPT, (3,), limit=4) == [3, 3, 3, 3]
    index.add_step(1, [(PROMPT, (1, 2))])
    assert draft(index, PROMPT, (), limit=4) == [1, 2, 7, 7]


def test_the_drafter_wants_the_prompt_of_every_row_and_takes_no_weights():
    drafter = HistoryDrafter(made())
    drafter.index.add_step(1, [(PROMPT, (1, 2, 3))])
    with pytest.raises(EngineError, match="prompts"):
        drafter.propose([[*PROMPT, 1]], [2], None, [])
    drafter.aim([(5,), PROMPT])
    assert drafter.propose([[5, 6, 7, 1], [*PROMPT, 1]], [2, 1], None, []).token_ids == [[], [2]]
    with pytest.raises(PublishError, match="no weights"):
        drafter.load({})


@pytest.mark.parametrize(
    ("keys", "remedy"),
    [
        ({"min_match": 5, "max_match": 4}, r"raise draft\.max_match"),
        ({"num_draft_tokens": 5, "max_match": 4}, r"no more tokens are drafted than agree: raise draft\.max_match"),
        ({"choose_k": "adaptive"}, r"draft\.profile"),
    ],
)
def test_settings_that_cannot_take_effect_are_refused(keys, remedy):
    with pytest.raises(ValidationError, match=remedy):
        HistoryDraft(**keys)


def test_the_index_needs_no_torch():
    code = "import sys, paceline.drafts.history; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
