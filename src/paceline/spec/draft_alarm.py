"""Does the engine draft with the weights that the trainer holds? Judged by the first slot of every block. No torch.

Lossless verification hides a stale or damaged draft: the text stays right and only the speed is lost. The trainer can
tell, because it has what the draft was made from. At slot 0 of a block nothing is left to chance but the verdict:

- The trainer's copy of the draft, run on the same prefix, says which id must stand there. Another id is a
  *disagreement*. Rounding alone makes few of them (near-ties of the draft's logits are not counted at all).
- The policy says with which probability p that id is accepted. If the engine drafts it, the verdict is a coin of
  probability p, given everything before the block.

Both are bets that are fair or unfavourable while the draft is right, so that two sums are the logs of non-negative
supermartingales of mean at most 1, and by Ville's inequality each ever reaches 1 / rate with probability at most its
rate, however often one looks (as in `spec.certificate`, for which the second would be a locator):

    disagreement   mean over b > 0 of exp(sum(b d - log(1 - s + s e^b))),  d = 1[disagreement], s = ALLOWED_SHARE
    acceptance     mean over b < 0 of exp(sum(b a - log(1 - c p (1 - e^b)))),  a = 1[accepted], c = 1 - ALLOWED_LOSS

Both hold for every draft that disagrees with probability at most s per block, and is accepted with at least c p.

A draft may die late, and a bet that has lost for long would take as long to win it back. So a new stake of 1 joins
every bet at every step of training (`DraftEvidence.after`; a Shiryaev-Roberts sum, as in the e-detectors of
arXiv:2203.03532): the mean of M is then at most the number of stakes, and the probability that a right draft has ever
raised the alarm at most that number times the rate (Doob's inequality). What the blocks of a step can show by
themselves is seen in that step, whatever came before.

Their power, where acceptance 0.5 is predicted (measured; median and largest of 100 seeds). Found after so many blocks:
a draft that always disagrees 6, one that disagrees in a fifth of them 126 (243); one that is never accepted 32, one
accepted at 0.25 167 (360), at 0.4 1,595 (2,560).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ALARM_RATE = 1e-6
"""Chance per step of training that a right draft raises the alarm by either bet, half of it for each."""
ALARM_LOG_M = math.log(2.0 / ALARM_RATE)
ALLOWED_SHARE = 0.05
"""Fraction of blocks in which the engine may draft another id than the trainer's copy: the two round differently."""
ALLOWED_LOSS = 0.05
"""Fraction by which acceptance may stay below what is predicted, for the same reason."""
DEAD_BLOCKS = 300
"""Blocks in a row without an accepted first draft, after which a draft is called dead whatever was predicted. A draft
that is right one time in ten gets there with probability 2e-14 after each acceptance."""
ACCEPTANCE_BETS = (-0.02, -0.05, -0.1, -0.2, -0.5, -1.0, -2.0)
"""Small ones see small losses over many blocks, large ones see a dead draft within a few."""
DISAGREEMENT_BETS = (0.2, 0.5, 1.0, 2.0, 4.0)


@dataclass(slots=True)
class DraftEvidence:
    """Sums over the first slots of blocks that had a draft, of one step, and what the bets stood at before it.

    Example::

        evidence = evidence.after()
        evidence.merge(first_slot_evidence(...))
        reason = draft_alarm(evidence)
    """

    num_blocks: int = 0
    accepted: int = 0
    """Blocks whose first draft was accepted."""
    agreed: int = 0
    """Blocks in which the engine drafted what the trainer's copy drafts, near-ties included."""
    predicted: float = 0.0
    """Sum of p, the policy's probability of the id that the trainer's copy drafts."""
    variance: float = 0.0
    """Sum of p (1 - p)."""
    unaccepted_run: int = 0
    """Blocks since the last acceptance, in the order in which they were added."""
    log_means: list[float] = field(default_factory=lambda: [0.0] * len(ACCEPTANCE_BETS))
    """Per bet b: sum of log(1 - c p (1 - e^b))."""
    acceptance_stakes: list[float] = field(default_factory=lambda: [0.0] * len(ACCEPTANCE_BETS))
    """Per bet: log of what it stood at as the step began."""
    disagreement_stakes: list[float] = field(default_factory=lambda: [0.0] * len(DISAGREEMENT_BETS))

    def add(self, probability: float, accepted: bool, agreed: bool) -> None:
        """Add one block. `probability`: p, a fraction. All that is known before its verdict may select a block."""
        self.num_blocks += 1
        self.accepted += accepted
        self.agreed += agreed
        self.predicted += probability
        self.variance += probability * (1.0 - probability)
        self.unaccepted_run = 0 if accepted else self.unaccepted_run + 1
        for place, bet in enumerate(ACCEPTANCE_BETS):
            self.log_means[place] += math.log1p((1.0 - ALLOWED_LOSS) * probability * math.expm1(bet))

    def merge(self, later: DraftEvidence) -> None:
        """Add the sums of other blocks of the step. The bets go on from what ours stood at."""
        self.num_blocks += later.num_blocks
        self.accepted += later.accepted
        self.agreed += later.agreed
        self.predicted += later.predicted
        self.variance += later.variance
        self.unaccepted_run = later.unaccepted_run + (0 if later.accepted else self.unaccepted_run)
        self.log_means = [mine + theirs for mine, theirs in zip(self.log_means, later.log_means, strict=True)]

    def after(self) -> DraftEvidence:
        """Of the next step, without a block so far: every bet goes on, and a new stake joins it."""
        return DraftEvidence(
            unaccepted_run=self.unaccepted_run,
            acceptance_stakes=[_log_sum_exp([0.0, capital]) for capital in self._acceptance_capital()],
            disagreement_stakes=[_log_sum_exp([0.0, capital]) for capital in self._disagreement_capital()],
        )

    @property
    def log_m_acceptance(self) -> float:
        """log of the mean of the acceptance bets; 0 at the start, `ALARM_LOG_M` is the alarm."""
        return _log_sum_exp(self._acceptance_capital()) - math.log(len(ACCEPTANCE_BETS))

    @property
    def log_m_disagreement(self) -> float:
        """log of the mean of the disagreement bets."""
        return _log_sum_exp(self._disagreement_capital()) - math.log(len(DISAGREEMENT_BETS))

    def _acceptance_capital(self) -> list[float]:
        """Per bet: log of what it stands at."""
        bets = zip(self.acceptance_stakes, ACCEPTANCE_BETS, self.log_means, strict=True)
        return [stake + bet * self.accepted - log_mean for stake, bet, log_mean in bets]

    def _disagreement_capital(self) -> list[float]:
        disagreed = self.num_blocks - self.agreed
        return [
            stake + bet * disagreed - self.num_blocks * math.log1p(ALLOWED_SHARE * math.expm1(bet))
            for stake, bet in zip(self.disagreement_stakes, DISAGREEMENT_BETS, strict=True)
        ]

    def report(self) -> dict[str, float | int | None]:
        """What a line of metrics needs; shares are fractions, None without a block."""
        shares = (self.accepted, self.predicted, self.agreed)
        measured, predicted, agreement = (total / self.num_blocks if self.num_blocks else None for total in shares)
        return {
            "blocks": self.num_blocks,
            "acceptance": measured,
            "predicted_acceptance": predicted,
            "agreement": agreement,
            "z": (self.accepted - self.predicted) / math.sqrt(self.variance) if self.variance >= 1.0 else None,
            "log_m_acceptance": self.log_m_acceptance,
            "log_m_disagreement": self.log_m_disagreement,
        }

    def state_dict(self) -> dict[str, object]:
        """JSON-serialisable; floats survive a round trip bit for bit."""
        return {
            "bets": [*ACCEPTANCE_BETS, *DISAGREEMENT_BETS],
            "allowed": [ALLOWED_LOSS, ALLOWED_SHARE],
            "num_blocks": self.num_blocks,
            "accepted": self.accepted,
            "agreed": self.agreed,
            "predicted": self.predicted,
            "variance": self.variance,
            "unaccepted_run": self.unaccepted_run,
            "log_means": list(self.log_means),
            "acceptance_stakes": list(self.acceptance_stakes),
            "disagreement_stakes": list(self.disagreement_stakes),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace all sums by those of a `state_dict`. Raises ValueError when its bets are not ours."""
        ours = self.state_dict()
        if any(state.get(name) != ours[name] for name in ("bets", "allowed")):
            raise ValueError("sums of draft evidence of another version (other bets or allowances): start anew.")
        self.num_blocks = int(state["num_blocks"])
        self.accepted = int(state["accepted"])
        self.agreed = int(state["agreed"])
        self.predicted = float(state["predicted"])
        self.variance = float(state["variance"])
        self.unaccepted_run = int(state["unaccepted_run"])
        for name in ("log_means", "acceptance_stakes", "disagreement_stakes"):
            setattr(self, name, [float(value) for value in state[name]])


def draft_alarm(evidence: DraftEvidence) -> str | None:
    """Why the engine's draft cannot be the trainer's, in one sentence; None while nothing speaks against it.

    A draft that is right raises it with probability at most `ALARM_RATE` per step. After a wrong one was repaired the
    bets lose again, and the alarm goes down by itself; new evidence is quicker.
    """
    reasons = []
    if evidence.log_m_disagreement >= ALARM_LOG_M:
        different = evidence.num_blocks - evidence.agreed
        reasons.append(
            f"the engine's first draft is not the one of the trainer's copy in {different} of {evidence.num_blocks} "
            f"blocks (log M {evidence.log_m_disagreement:.1f})"
        )
    if evidence.log_m_acceptance >= ALARM_LOG_M:
        reasons.append(
            f"{evidence.accepted} of {evidence.num_blocks} first drafts were accepted where {evidence.predicted:.1f} "
            f"are predicted (log M {evidence.log_m_acceptance:.1f})"
        )
    if evidence.unaccepted_run >= DEAD_BLOCKS:
        reasons.append(f"none of the last {evidence.unaccepted_run} first drafts was accepted")
    if not reasons:
        return None
    return (
        f"draft: {'; '.join(reasons)}. The draft in the engine is stale, damaged, or of another policy; "
        "the text is right all the same, and only speed is lost."
    )


def _log_sum_exp(values: list[float]) -> float:
    largest = max(values)
    return largest + math.log(sum(math.exp(value - largest) for value in values))
