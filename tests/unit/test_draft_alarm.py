"""The draft alarm: fair bets, a stated power, and sums that may be split in any way. And no torch."""

from __future__ import annotations

import itertools
import json
import math
import random
import subprocess
import sys

import pytest

from paceline.spec import draft_alarm as module
from paceline.spec.draft_alarm import (
    ACCEPTANCE_BETS,
    ALARM_LOG_M,
    ALLOWED_LOSS,
    ALLOWED_SHARE,
    DEAD_BLOCKS,
    DISAGREEMENT_BETS,
    DraftEvidence,
    draft_alarm,
)

SHARES = [0.0, 1e-6, 0.01, 0.05, 0.3, 0.5, 0.9, 1.0]


def blocks_until_the_alarm(probability: float, acceptance: float, disagreement: float, seed: int, limit: int) -> int:
    rng, evidence = random.Random(seed), DraftEvidence()
    while draft_alarm(evidence) is None and evidence.num_blocks < limit:
        evidence.add(probability, rng.random() < acceptance, rng.random() >= disagreement)
    return evidence.num_blocks


@pytest.mark.parametrize("probability", SHARES)
def test_the_acceptance_bets_are_never_favourable_while_acceptance_is_within_the_allowance(probability):
    """One step of the supermartingale, exactly: so Ville's inequality holds, and 1e-6 for any number of looks."""
    evidence = DraftEvidence()
    evidence.add(probability, accepted=True, agreed=True)
    for true in (probability, (1 - ALLOWED_LOSS) * probability, (1 + probability) / 2):
        for bet, log_mean in zip(ACCEPTANCE_BETS, evidence.log_means, strict=True):
            expected = (true * math.exp(bet) + 1 - true) / math.exp(log_mean)
            assert expected <= 1 + 1e-12
    # Just below the allowance some bet wins: the test is not idle.
    if probability >= 0.3:
        low = 0.8 * probability
        means = zip(ACCEPTANCE_BETS, evidence.log_means, strict=True)
        assert max((low * math.exp(bet) + 1 - low) / math.exp(log_mean) for bet, log_mean in means) > 1


def test_the_disagreement_bets_are_never_favourable_within_the_allowed_share():
    def start(agreed):
        evidence = DraftEvidence()
        evidence.add(0.5, accepted=True, agreed=agreed)
        return math.exp(evidence.log_m_disagreement)

    for share in (0.0, ALLOWED_SHARE / 2, ALLOWED_SHARE):
        assert share * start(False) + (1 - share) * start(True) <= 1 + 1e-12
    assert 2 * ALLOWED_SHARE * start(False) + (1 - 2 * ALLOWED_SHARE) * start(True) > 1


def test_a_step_adds_one_stake_to_the_bets_and_no_more():
    """Every path of six steps of one block, at the edge of what is allowed: the mean of M is the number of stakes.

    So it is at most T after T steps, and Doob's inequality gives T times the rate.
    """
    probability, steps = 0.4, 6
    accept, disagree = (1 - ALLOWED_LOSS) * probability, ALLOWED_SHARE
    means = [0.0, 0.0]
    for path in itertools.product((True, False), repeat=steps):
        evidence = DraftEvidence()
        for number, lucky in enumerate(path):
            evidence = evidence if number == 0 else evidence.after()
            evidence.add(probability, accepted=lucky, agreed=lucky)
        for place, (share, log_m) in enumerate(
            ((accept, evidence.log_m_acceptance), (1 - disagree, evidence.log_m_disagreement))
        ):
            chance = math.prod(share if lucky else 1 - share for lucky in path)
            means[place] += chance * math.exp(log_m)
    assert means == pytest.approx([steps, steps], rel=1e-9)


@pytest.mark.parametrize(
    ("blocks", "acceptance", "agreement", "steps"),
    [
        (300, 0.0, 1.0, 1),
        (40, 0.0, 1.0, 1),
        (300, 0.5, 0.0, 1),
        (8, 0.5, 0.0, 1),
        (300, 0.25, 1.0, 2),
        (20, 0.0, 1.0, 2),
    ],
    ids=[
        "dead",
        "dead, small steps",
        "another one",
        "another one, tiny steps",
        "half as good",
        "dead, 20 blocks a step",
    ],
)
@pytest.mark.parametrize("right_steps", [0, 1, 40])
def test_a_draft_that_goes_wrong_is_found_in_the_first_step_that_can_show_it(
    blocks, acceptance, agreement, steps, right_steps
):
    """Whatever came before. Acceptance 0.5 is predicted: 32 dead blocks, or 6 of another draft, are enough."""
    for seed in range(5):
        rng, evidence = random.Random(seed), DraftEvidence()
        for step in range(right_steps + steps):
            evidence = evidence.after()
            wrong = step >= right_steps
            assert not (wrong and step == right_steps) or draft_alarm(evidence) is None
            for _ in range(blocks):
                accepted = rng.random() < (acceptance if wrong else 0.5)
                evidence.add(0.5, accepted, not wrong or rng.random() < agreement)
        assert draft_alarm(evidence) is not None


def test_an_alarm_goes_down_after_the_draft_was_repaired():
    rng, evidence = random.Random(8), DraftEvidence()
    for _ in range(100):
        evidence.add(0.5, accepted=False, agreed=False)
    steps = 0
    while draft_alarm(evidence) is not None:
        evidence, steps = evidence.after(), steps + 1
        for _ in range(100):
            evidence.add(0.5, rng.random() < 0.5, True)
    assert steps < 100


def test_the_two_bets_share_the_stated_alarm_rate():
    assert 2 * math.exp(-ALARM_LOG_M) == pytest.approx(1e-6)
    assert ALARM_LOG_M > 0 and len(DISAGREEMENT_BETS) == len(set(DISAGREEMENT_BETS))


def test_a_right_draft_stays_silent_however_often_one_looks():
    """40 runs of 2,000 looks each, in steps of 50, at the edge of what is allowed. False alarms: 2e-3 at most."""
    for seed in range(40):
        probability = 0.02 + 0.96 * (seed / 40)
        acceptance, limit = (1 - ALLOWED_LOSS) * probability, 2000
        if (1 - acceptance) ** DEAD_BLOCKS > 1e-12:  # drafts that are hardly ever right are the third rule's matter
            continue
        rng, evidence = random.Random(seed), DraftEvidence()
        for block in range(limit):
            if block % 50 == 0:
                evidence = evidence.after()
            evidence.add(probability, rng.random() < acceptance, rng.random() >= ALLOWED_SHARE)
            assert draft_alarm(evidence) is None


@pytest.mark.parametrize(
    ("probability", "acceptance", "disagreement", "within"),
    [(0.5, 0.5, 1.0, 6), (0.5, 0.0, 0.0, 32), (0.5, 0.25, 0.0, 400), (0.5, 0.4, 0.0, 2600), (0.5, 0.5, 0.2, 300)],
    ids=["another draft", "dead", "half as good", "a fifth worse", "another draft in one block of five"],
)
def test_a_wrong_draft_is_found_within_a_stated_number_of_blocks(probability, acceptance, disagreement, within):
    found = [blocks_until_the_alarm(probability, acceptance, disagreement, seed, 10_000) for seed in range(20)]
    assert max(found) <= within


def test_a_draft_of_which_nothing_is_ever_accepted_is_dead_even_where_nothing_is_predicted():
    """Trainer and engine hold the same worthless draft: no disagreement, no loss against the prediction."""
    evidence = DraftEvidence()
    for _ in range(DEAD_BLOCKS - 1):
        evidence.add(1e-4, accepted=False, agreed=True)
    assert draft_alarm(evidence) is None
    evidence.add(1e-4, accepted=False, agreed=True)
    assert f"none of the last {DEAD_BLOCKS} first drafts was accepted" in str(draft_alarm(evidence))
    evidence.add(1e-4, accepted=True, agreed=True)
    assert draft_alarm(evidence) is None


def test_sums_do_not_depend_on_how_blocks_are_split_and_survive_a_checkpoint():
    rng = random.Random(1)
    blocks = [(rng.random(), rng.random() < 0.3, rng.random() < 0.9) for _ in range(200)]
    before = DraftEvidence()
    before.add(0.4, accepted=False, agreed=False)
    whole, merged = before.after(), before.after()
    for block in blocks:
        whole.add(*block)
    for first, last in ((0, 1), (1, 120), (120, 120), (120, 200)):
        part = DraftEvidence()
        for block in blocks[first:last]:
            part.add(*block)
        merged.merge(part)
    restored = DraftEvidence()
    restored.load_state_dict(json.loads(json.dumps(merged.state_dict())))
    assert restored == merged
    assert (whole.num_blocks, whole.accepted, whole.agreed, whole.unaccepted_run) == (
        merged.num_blocks, merged.accepted, merged.agreed, merged.unaccepted_run,
    )  # fmt: skip
    assert merged.log_means == pytest.approx(whole.log_means, rel=1e-12)
    assert merged.log_m_acceptance == pytest.approx(whole.log_m_acceptance)
    assert merged.log_m_disagreement == pytest.approx(whole.log_m_disagreement)
    assert json.dumps(merged.report()) and DraftEvidence().report()["acceptance"] is None


def test_sums_of_other_bets_are_refused():
    state = DraftEvidence().state_dict()
    with pytest.raises(ValueError, match="another version"):
        DraftEvidence().load_state_dict({**state, "allowed": [0.1, 0.05]})


def test_the_module_runs_without_torch():
    code = f"import sys; import {module.__name__}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
