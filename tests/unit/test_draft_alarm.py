"""The draft alarm: fair bets, a stated power, and sums that may be split in any way. And no torch."""

from __future__ import annotations

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


def test_the_two_bets_share_the_stated_alarm_rate():
    assert 2 * math.exp(-ALARM_LOG_M) == pytest.approx(1e-6)
    assert ALARM_LOG_M > 0 and len(DISAGREEMENT_BETS) == len(set(DISAGREEMENT_BETS))


def test_a_right_draft_stays_silent_however_often_one_looks():
    """40 runs of 2,000 looks each, at the edge of what is allowed. Expected false alarms: 4e-5 at most."""
    for seed in range(40):
        probability = 0.02 + 0.96 * (seed / 40)
        acceptance, limit = (1 - ALLOWED_LOSS) * probability, 2000
        if (1 - acceptance) ** DEAD_BLOCKS > 1e-12:  # drafts that are hardly ever right are the third rule's matter
            continue
        assert blocks_until_the_alarm(probability, acceptance, ALLOWED_SHARE, seed, limit) == limit


@pytest.mark.parametrize(
    ("probability", "acceptance", "disagreement", "within"),
    [(0.5, 0.5, 1.0, 6), (0.5, 0.0, 0.0, 32), (0.5, 0.25, 0.0, 400), (0.5, 0.4, 0.0, 2600), (0.5, 0.5, 0.2, 300)],
    ids=["another draft", "dead", "half as good", "a fifth worse", "another draft in one block of five"],
)
def test_a_wrong_draft_is_found_within_a_stated_number_of_blocks(probability, acceptance, disagreement, within):
    found = [blocks_until_the_alarm(probability, acceptance, disagreement, seed, 10_000) for seed in range(20)]
    assert max(found) <= within


def test_a_draft_that_dies_late_is_still_found():
    """Right at first, then dead for ever. After 20,000 right blocks it takes some hundred dead ones."""
    rng, evidence = random.Random(4), DraftEvidence()
    for _ in range(20_000):
        evidence.add(0.7, rng.random() < 0.7, True)
    assert draft_alarm(evidence) is None
    dead = 0
    while draft_alarm(evidence) is None:
        evidence.add(0.7, accepted=False, agreed=True)
        dead += 1
    assert dead <= DEAD_BLOCKS


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
    whole, merged = DraftEvidence(), DraftEvidence()
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
    assert json.dumps(merged.report()) and DraftEvidence().report()["acceptance"] is None


def test_sums_of_other_bets_are_refused():
    state = DraftEvidence().state_dict()
    with pytest.raises(ValueError, match="another version"):
        DraftEvidence().load_state_dict({**state, "allowed_loss": 0.1})


def test_the_module_runs_without_torch():
    code = f"import sys; import {module.__name__}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
