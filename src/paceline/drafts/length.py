"""How many tokens to draft: k*(n) = argmax of alpha(k) / tau(n, k), k = 0 included. No torch: the simulator runs it.

tau is what a step costs (`drafts.profile`), alpha what it yields: from the acceptances of the run itself, kept per
bucket of the live batch, because the long responses that run alone at the end are a biased sample of all.

**The rule of exactness.** k may depend on anything that is fixed before the draft tokens of the block are drawn: the
live batch, acceptances of earlier blocks, a count of steps. It never looks at the value or the probability of a sampled
draft token of the block itself; cutting unlikely ones would change the law of what is sampled. Nothing here could: a
choice is made from `live` alone. No clock is read either, so the same run draws the same tokens again.

Legend: B buckets of the live batch, K largest k, so K + 1 choices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from paceline.drafts.profile import StepCosts
from paceline.types import Block


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen for one bucket of the live batch, and why."""

    first: int
    last: int
    """Running sequences of the bucket, both ends included."""
    k: int
    """Draft tokens of a step, probing apart."""
    best: int
    """What alpha(k) / tau(n, k) favours now; differs from k while its gain is below the margin."""
    alpha: tuple[float, ...]
    """[K + 1] tokens that a step is expected to commit per sequence."""
    seconds: tuple[float, ...]
    """[K + 1] cost of a step, from the profile."""
    gain: tuple[float, ...]
    """[K + 1] expected speed relative to k = 0."""
    trials: float
    """Blocks behind the acceptance of the first draft token, old ones faded."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)

    def __str__(self) -> str:
        favoured = "" if self.best == self.k else f", k = {self.best} is better by less than the margin"
        return (
            f"{self.first}-{self.last} running: k = {self.k}, {self.gain[self.k]:.2f} times the speed of k = 0 "
            f"(alpha {self.alpha[self.k]:.2f}, step {1e3 * self.seconds[self.k]:.1f} ms, {self.trials:.0f} "
            f"blocks){favoured}"
        )


def bucket_of(live: int) -> int:
    """1, 2, 3-4, 5-8, 9-16, ... running sequences are bucket 0, 1, 2, 3, 4, ..."""
    return (live - 1).bit_length()


def alphas(conditional: Sequence[float] | np.ndarray) -> np.ndarray:
    """[K + 1] tokens per step for k = 0..K: 1, 1 + c0, 1 + c0 + c0 c1, ... (`spec.stats.expected_tokens`)."""
    return 1.0 + np.concatenate([[0.0], np.cumsum(np.cumprod(np.asarray(conditional, dtype=float)))])


class LengthChooser:
    """k for the next engine step. `choose(n)` before every step, `observe(blocks)` after every generate call.

    A k is left only for one that is better by `margin`, or because no drafts at all are better. Where k is below K,
    what longer drafts would yield is not seen: probing steps draft K tokens, as many as cost `probe_share` of the
    generation time at most. Evidence fades with a half-life of `half_life` calls. Positions that a bucket knows little
    about lean on all buckets together, and at the very start on `prior_acceptance`, which is assumed.

    Example::

        chooser = LengthChooser(StepCosts([1, 64], [[0.004, 0.005], [0.010, 0.019]]))
        chooser.choose(64)
    """

    def __init__(
        self,
        costs: StepCosts,
        *,
        num_draft_tokens: int | None = None,
        margin: float = 0.03,
        probe_share: float = 0.01,
        half_life: float = 8.0,
        prior_acceptance: float = 0.7,
    ) -> None:
        """`num_draft_tokens` (default: all that were measured) is K. Fractions except `half_life`.

        Raises ValueError for a K whose cost was not measured.
        """
        self.num_draft_tokens = costs.num_draft_tokens if num_draft_tokens is None else num_draft_tokens
        if not 0 <= self.num_draft_tokens <= costs.num_draft_tokens:
            raise ValueError(
                f"LengthChooser: k up to {self.num_draft_tokens}, but costs were measured up to "
                f"{costs.num_draft_tokens} only."
            )
        self.margin = margin
        self.probe_share = probe_share
        self._fade = 0.5 ** (1.0 / half_life)
        self._prior = prior_acceptance
        self._bounds = [(1, 1), *((2**b // 2 + 1, 2**b) for b in range(1, bucket_of(costs.live[-1]) + 1))]
        self._seconds_BK1 = np.stack(
            [costs.at(math.sqrt(first * last))[: self.num_draft_tokens + 1] for first, last in self._bounds]
        )
        shape = (len(self._bounds), self.num_draft_tokens)
        self._reached_BK, self._accepted_BK = np.zeros(shape), np.zeros(shape)
        self._probe_credit_B = np.zeros(len(self._bounds))
        self._k_B = self._rates().argmax(1)

    def choose(self, live: int) -> int:
        """Draft tokens of the next engine step, for `live` running sequences. Counts the step: every so many probe."""
        bucket, k = self._bucket(live), self.usual(live)
        if k < self.num_draft_tokens:
            self._probe_credit_B[bucket] += self._probes_per_step(bucket)
            if self._probe_credit_B[bucket] >= 1.0:
                self._probe_credit_B[bucket] -= 1.0
                return self.num_draft_tokens
        return k

    def usual(self, live: int) -> int:
        """The same without probing and without counting: for an evaluation, which must not move a run."""
        return int(self._k_B[self._bucket(live)])

    def observe(self, blocks: Iterable[Block]) -> None:
        """Let old evidence fade, add the blocks of one generate call, and choose anew for every bucket.

        A row that was asked for more drafts than it had (a look-up without a match) counts as not accepted there.
        """
        # What has faded to a few blocks stays until newer ones outweigh it: it still says more than an assumption.
        faded_BK = np.minimum(self._reached_BK, np.maximum(self._fade * self._reached_BK, LEAST_BLOCKS))
        self._accepted_BK *= faded_BK / np.maximum(self._reached_BK, 1e-9)
        self._reached_BK = faded_BK
        for block in blocks:
            asked = min(max(block.num_asked, len(block.draft_token_ids)), self.num_draft_tokens)
            if asked == 0:
                continue
            bucket = self._bucket(block.live_batch)
            self._reached_BK[bucket, : min(asked, block.num_accepted + 1)] += 1.0
            self._accepted_BK[bucket, : min(asked, block.num_accepted)] += 1.0
        rates_BK1 = self._rates()
        rows = np.arange(len(self._bounds))
        best_B, now_B = rates_BK1.argmax(1), rates_BK1[rows, self._k_B]
        leaves_B = (rates_BK1[rows, best_B] > (1.0 + self.margin) * now_B) | (rates_BK1[:, 0] > now_B)
        self._k_B = np.where(leaves_B, best_B, self._k_B)

    def explain(self) -> list[Choice]:
        """One record per bucket of the live batch."""
        alpha_BK1 = self._alphas()
        rates_BK1 = alpha_BK1 / self._seconds_BK1
        return [
            Choice(
                first=first,
                last=last,
                k=int(self._k_B[bucket]),
                best=int(rates_BK1[bucket].argmax()),
                alpha=tuple(alpha_BK1[bucket].tolist()),
                seconds=tuple(self._seconds_BK1[bucket].tolist()),
                gain=tuple((rates_BK1[bucket] / rates_BK1[bucket, 0]).tolist()),
                trials=float(self._reached_BK[bucket, 0]) if self.num_draft_tokens else 0.0,
            )
            for bucket, (first, last) in enumerate(self._bounds)
        ]

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready state, for a checkpoint."""
        return {
            "reached": self._reached_BK.tolist(),
            "accepted": self._accepted_BK.tolist(),
            "probe_credit": self._probe_credit_B.tolist(),
            "k": self._k_B.tolist(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state. Raises ValueError for one of another profile or another K."""
        reached, accepted = np.asarray(state["reached"], dtype=float), np.asarray(state["accepted"], dtype=float)
        credit, k = np.asarray(state["probe_credit"], dtype=float), np.asarray(state["k"], dtype=int)
        shape = self._reached_BK.shape
        if reached.shape != shape or accepted.shape != shape or k.shape != shape[:1] or credit.shape != shape[:1]:
            raise ValueError(
                f"The choice of k was saved for {len(k)} buckets and another draft.profile or draft.num_draft_tokens; "
                f"this run has {shape[0]} buckets and k up to {shape[1]}."
            )
        self._reached_BK, self._accepted_BK, self._probe_credit_B, self._k_B = reached, accepted, credit, k

    def _bucket(self, live: int) -> int:
        return min(bucket_of(live), len(self._bounds) - 1)

    def _probes_per_step(self, bucket: int) -> float:
        """So many that what they take longer is `probe_share` of the time; never more than that share of the steps."""
        usual = self._seconds_BK1[bucket, self._k_B[bucket]]
        longer = self._seconds_BK1[bucket, self.num_draft_tokens] - usual
        return self.probe_share if longer <= usual else self.probe_share * float(usual / longer)

    def _rates(self) -> np.ndarray:
        """[B, K + 1] tokens per second and sequence."""
        return self._alphas() / self._seconds_BK1

    def _alphas(self) -> np.ndarray:
        """[B, K + 1]"""
        pooled_K = np.empty(self.num_draft_tokens)
        before = self._prior
        for position in range(self.num_draft_tokens):
            # A position that was never reached is taken to be like the one before it.
            reached, accepted = self._reached_BK[:, position].sum(), self._accepted_BK[:, position].sum()
            before = pooled_K[position] = (accepted + PRIOR_BLOCKS * before) / (reached + PRIOR_BLOCKS)
        conditional_BK = (self._accepted_BK + PRIOR_BLOCKS * pooled_K) / (self._reached_BK + PRIOR_BLOCKS)
        return np.stack([alphas(row) for row in conditional_BK])


PRIOR_BLOCKS = 16.0
"""Weight of what is known elsewhere, in blocks: a bucket with many more of its own speaks for itself."""
LEAST_BLOCKS = 32.0
"""Evidence does not fade below this many blocks."""
