"""What is reported about speculation adds up: over requests, origins, engine steps and the steps of a run."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine.base import EngineSeconds, EngineStep, Rollouts
from paceline.loop.speculation import batch_by_step, speculation_metrics, speculation_summary
from paceline.spec.stats import emitted_by_origin, engine_stats
from paceline.types import Block, Completion, Versions

PROPERTY = settings(max_examples=40, deadline=None, derandomize=True)


def block(num_drafts: int, num_accepted: int) -> Block:
    return Block(tuple(range(num_drafts)), num_accepted, tuple(range(num_accepted + 1)))


def completion(blocks: list[Block], cut: int = 0) -> Completion:
    """Its last `cut` tokens were committed behind the end of the response."""
    tokens = tuple(token for each in blocks for token in each.token_ids)
    return Completion("p", 0, tokens[: len(tokens) - cut], "length", tuple(blocks), Versions(0), 0)


def rollouts(completions: list[Completion], steps=(), seconds=1.0, engine_s=None) -> Rollouts:
    blocks = [each for answer in completions for each in answer.blocks]
    return Rollouts(tuple(completions), engine_stats(blocks, len(steps)), seconds, tuple(steps), engine_s)


blocks_strategy = st.lists(
    st.integers(0, 4).flatmap(lambda drafts: st.builds(block, st.just(drafts), st.integers(0, drafts))),
    min_size=1,
    max_size=5,
)
completions_strategy = st.lists(
    blocks_strategy.flatmap(
        lambda blocks: st.builds(completion, st.just(blocks), st.integers(0, len(blocks[-1].token_ids) - 1))
    ),
    min_size=1,
    max_size=3,
)


def test_the_mean_weighs_each_request_once_and_the_pooled_length_each_verify_step():
    long, short = completion([block(3, 3)] * 9), completion([block(3, 0)])
    without = completion([block(0, 0)] * 50)
    found = speculation_metrics(rollouts([long, short, without]))["acceptance"]["per_request"]
    assert found["pooled"] == 1 + 27 / 10
    assert found["mean"] == (4 + 1) / 2
    assert (found["verify_steps"], found["accepted"]) == ([9, 1, 0], [27, 0, 0])
    none = speculation_metrics(rollouts([without]))["acceptance"]["per_request"]
    assert none["pooled"] is None and none["mean"] is None


@PROPERTY
@given(completions_strategy)
def test_origins_sum_to_the_tokens_of_the_responses_wherever_these_were_cut(completions):
    assert sum(emitted_by_origin(completions).values()) == sum(len(answer.token_ids) for answer in completions)


@pytest.mark.parametrize(
    ("cut", "origins"),
    [(0, (2, 1, 0, 1)), (1, (2, 0, 0, 1)), (2, (1, 0, 0, 1))],
)
def test_what_was_cut_off_was_not_emitted(cut, origins):
    counts = emitted_by_origin([completion([block(0, 0), block(3, 2)], cut)])
    assert tuple(counts[name] for name in ("accepted", "recovered", "bonus", "plain")) == origins
    bonus = emitted_by_origin([completion([block(2, 2)])])
    assert (bonus["accepted"], bonus["bonus"], bonus["recovered"]) == (2, 1, 0)


@PROPERTY
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2))))
def test_the_series_of_the_batch_says_every_engine_step_and_never_the_same_twice(steps):
    series = batch_by_step([EngineStep(0.1, 0.1, live, k) for live, k in steps])
    assert [(live, k) for count, live, k in series for _ in range(count)] == steps
    assert all(one[1:] != other[1:] for one, other in itertools.pairwise(series))


@PROPERTY
@given(completions_strategy, completions_strategy)
def test_the_summary_of_a_run_is_that_of_all_its_responses_at_once(first, second):
    steps = [EngineStep(0.1, 0.1, 4, 3), EngineStep(0.1, 0.1, 2, 3)], [EngineStep(0.1, 0.1, 1, 0)]
    lines = [speculation_metrics(rollouts(*call)) for call in zip((first, second), steps, strict=True)]
    both = speculation_metrics(rollouts([*first, *second], [*steps[0], *steps[1]]))
    summary = speculation_summary(lines)
    for name in ("pooled", "mean"):
        assert summary["per_request"][name] == pytest.approx(both["acceptance"]["per_request"][name])
    assert summary["marginal"] == pytest.approx(both["acceptance"]["marginal"])
    tokens = sum(both["emitted"].values())
    assert summary["emitted"] == {origin: count / tokens for origin, count in both["emitted"].items()}
    assert summary["mean_live_batch"] == pytest.approx(7 / 3)
    assert summary["k_chosen"] == {"0": pytest.approx(1 / 3), "3": pytest.approx(2 / 3)}


def test_seconds_of_the_parts_and_of_the_rest_are_those_of_the_call_and_a_run_has_their_median():
    lines = [
        speculation_metrics(rollouts([completion([block(1, 1)])], seconds=seconds, engine_s=EngineSeconds(*parts)))
        for seconds, parts in ((1.0, (0.1, 0.5, 0.2)), (2.0, (0.2, 0.6, 0.4)), (9.0, (5.0, 2.0, 1.0)))
    ]
    assert [sum(line["engine_s"].values()) for line in lines] == pytest.approx([1.0, 2.0, 9.0])
    summary = speculation_summary(lines)["engine_s"]
    assert summary == pytest.approx({"draft": 0.2, "verify": 0.6, "sample": 0.4, "other": 0.8})
    silent = speculation_metrics(rollouts([completion([block(1, 1)])]))
    assert silent["engine_s"] is None
    assert set(speculation_summary([silent])["engine_s"].values()) == {None}


def test_lines_of_an_older_version_have_no_summary():
    assert speculation_summary([{"step": 1}]) is None


def test_reading_a_run_loads_no_torch():
    code = "import sys, paceline.loop.speculation; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
