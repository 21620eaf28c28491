"""The certificate: were the sampled tokens drawn from the policy's distribution? Measured on every token of a run.

The `logprob` stage has the policy's distribution p_t at each sampled token x_t. With s = -log p_t(x_t), H the entropy
of p_t and V the variance of -log p_t under p_t (nats, nats, nats squared):

- If x_t was drawn from p_t, s - H is a martingale difference of variance V, whatever p_t depends on in the past. So
  z = sum(s - H) / sqrt(sum V) is about standard normal, and excess = sum(s - H) / tokens is about 0 nats per token.
- u = mass of the strictly more likely tokens + U * mass of the tie class of x_t is uniform and independent of the past.
  Kolmogorov-Smirnov sees faults that keep the mean of s; correlations of u see shared or reused noise. The same with
  the tokens in the order of their ids is the noise itself for a sampler that inverts the CDF: used twice, it shows.
- E[exp(lambda s)] = sum_x p(x)^(1 - lambda) is known, so for every lambda exp(sum(lambda s - log of it)) is a
  non-negative martingale of mean 1: a bet. So is the product of 1 - w + w q(x_t) / p_t(x_t) for any law q that is known
  before the draw: a bet on an alternative, the best there is against it. Two are named: tokens drawn from the row of
  logits before their own, and recovered tokens drawn with the noise that had rejected the draft. M is the mean of the
  bets, half of the stake over all tokens and half over the slots, each by itself, so that a fault of one slot is not
  diluted by the others. By Ville's inequality M ever reaches 1e6 with probability at most 1e-6 under the null, however
  often one looks. The alarm reads M; z is for reading.

Rules for the caller. Add every sampled token before any group is dropped: the stop token included, text after it not.
Use the sampling's own temperature and filters. Split only by what is known before the token is drawn (the slot in the
block); split by accepted against recovered, by length or by reward, a right sampler looks broken, because accepted
tokens follow min(target, draft) and recovered ones max(target - draft, 0). Two locators are valid where blocks are
known: `score_acceptance`, and `score_tokens(excluded_ids=...)` for the recovered tokens of a deterministic draft.

Shapes: N tokens, V vocabulary, L = len(LAMBDAS), R = len(ALTERNATIVE_SHARES).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

import numpy as np
import torch
from scipy.special import bdtrc, kolmogorov

from paceline.spec.sampling import policy_log_probs
from paceline.types import Sampling

_LAMBDA_UNIT = float(np.float32(0.01))
LAMBDAS = tuple(sign * multiple * _LAMBDA_UNIT for sign in (1, -1) for multiple in (1, 2, 5, 10, 20, 40))
"""+-{0.01, 0.02, 0.05, 0.1, 0.2, 0.4}: small ones see small biases over many tokens, large ones see large biases within
a few. The unit is a float32, the number that `score_tokens` really uses: its rounding points the same way at every
token and would drive M up within 1e8 of them."""
ALTERNATIVE_SHARES = (0.1, 0.5, 0.9)
"""w: the share of tokens that a bet on an alternative takes to follow it. Below 1: no single token ends a bet."""
SLOT_STAKES = 32
"""The slots share half of the stake in equal parts, as if there were so many: then M needs no knowledge of k."""
_LOG_PROB_FLOOR = -87.0
"""e**-87 is the smallest normal float32: less likely tokens add nothing to any sum, but their log may be -inf."""
Number = TypeVar("Number", int, float)
ALARM_RATE = 1e-6
ALARM_LOG_M = -math.log(ALARM_RATE)
DEFAULT_DELTA_NATS = 0.01
MIN_VARIANCE = 16.0
"""Below this sum of variances there is no evidence and no z: one token of probability e**-8 would move z by two."""
RANK_BINS = 1024
"""Ranks are kept as a histogram, so that certificates merge and go into checkpoints. The Kolmogorov-Smirnov distance at
the bin edges is at most the true one: the p-value errs on the cautious side."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """What the certificate needs of N tokens. float64, on the device of the logits."""

    surprisal_N: torch.Tensor
    """-log p of the sampled token, nats."""
    entropy_N: torch.Tensor
    """Nats."""
    variance_N: torch.Tensor
    """Variance of -log p under p, nats squared."""
    rank_N: torch.Tensor
    """Randomised rank in [0, 1], uniform when the token was drawn from p; small means likely."""
    log_mgf_NL: torch.Tensor
    """log sum_x p(x)^(1 - lambda), over the kept set."""
    id_rank_N: torch.Tensor
    """As `rank_N`, with the tokens in the order of their ids: the noise of a sampler that inverts the CDF."""
    alternative_N: torch.Tensor
    """log-likelihood of the token under the named alternative, less that under p; -inf where it is excluded, 0 without
    an alternative. For tokens in order that is the row before their own; for recovered ones, noise used again."""
    inside_N: torch.Tensor
    """bool: the token lies in the kept set. Where it does not, all other fields are 0."""


@dataclass(frozen=True, slots=True)
class AcceptanceScores:
    """What the acceptance locator needs of N tested drafted tokens. float64."""

    deviation_N: torch.Tensor
    """1[accepted] - acceptance probability."""
    variance_N: torch.Tensor
    """b (1 - b), b the acceptance probability."""


@dataclass(frozen=True, slots=True)
class SlotReport:
    """The certificate of one slot. Slot -1: steps without a draft; 0..K-1 draft slots; K bonus."""

    z: float | None
    excess_nats: float | None
    excess_half_width: float | None
    tokens: int
    log_m: float
    """log of the mean of the bets on this slot's tokens alone, those on the alternative among them."""
    alternative_log_m: float
    """log of the mean of the bets on the alternative: large when the tokens follow it."""
    ks_p: float | None
    ks_ids_p: float | None
    outside_kept: int


@dataclass(frozen=True, slots=True)
class AcceptanceSlotReport:
    """The acceptance locator of one slot; `excess` is accepted - expected, per tested draft (a fraction)."""

    z: float | None
    excess: float | None
    drafts: int
    log_m: float
    """log of a betting martingale on the verdicts: a p-value of at most exp(-log_m), also for few drafts."""


@dataclass(frozen=True, slots=True)
class CertificateReport:
    """The certificate in numbers. A field is None where there is nothing to compute it from."""

    tokens: int
    """Tokens inside the kept set; all sums run over these."""
    evidence: bool
    """False when the tokens could not have shown a fault (greedy, or very sharp). Never read that as a pass."""
    z: float | None
    """About standard normal when the tokens were drawn from the policy; None without evidence."""
    excess_nats: float | None
    """Pooled mean of s - H, nats per token. Positive: flatter than the policy. Negative: sharper."""
    excess_half_width: float | None
    """Half width of the 95 % interval of `excess_nats`."""
    smallest_visible_nats: float | None
    """Smallest bias that this many tokens would have shown at four sigma, nats per token."""
    log_m: float
    """log of the martingale M, over all tokens and over each slot; 0 at the start, `ALARM_LOG_M` is the alarm."""
    alternative_log_m: float
    """log of the mean of the bets on the alternative, over all tokens."""
    ks_p: float | None
    """p-value of the Kolmogorov-Smirnov test of the ranks against uniform."""
    ks_distance: float | None
    ks_ids_p: float | None
    """The same of the ranks in the order of the ids."""
    lag1_correlation: float | None
    """Of the ranks of neighbouring tokens within a sequence; None when sequence ids were not given."""
    lag1_z: float | None
    cross_correlation: float | None
    """Of the ranks at the same position of samples of one group; None when group ids were not given."""
    cross_z: float | None
    outside_kept: int
    """Tokens outside the kept set, impossible under exact equality."""
    outside_share: float | None
    """Fraction of all tokens."""
    by_slot: dict[int, SlotReport]
    acceptance_by_slot: dict[int, AcceptanceSlotReport]

    def to_dict(self) -> dict[str, object]:
        """JSON-ready: plain numbers, None and nested dicts, slots as strings."""
        record = asdict(self)
        for name in ("by_slot", "acceptance_by_slot"):
            record[name] = {str(slot): values for slot, values in record[name].items()}
        return record


@torch.no_grad()
def score_tokens(
    logits_NV: torch.Tensor,
    token_ids_N: torch.Tensor,
    sampling: Sampling,
    uniforms_N: torch.Tensor,
    *,
    excluded_ids_N: torch.Tensor | None = None,
    in_order: bool = False,
    chunk_elements: int | None = None,
) -> TokenScores:
    """Score sampled tokens against the policy's logits.

    Args:
        logits_NV: [N, V] raw logits at each sampled token, any float type.
        token_ids_N: [N].
        sampling: as the tokens were sampled; temperature and filters are applied here.
        uniforms_N: [N] in [0, 1), fresh noise that breaks the ties of the ranks. It must not be the sampler's.
        excluded_ids_N: [N] drafted id that a deterministic draft proposed and the verifier rejected: the tokens are
            then recovered ones and are judged under the residual law, the policy without that id, renormalised. They
            belong in a certificate of their own.
        in_order: the rows are neighbouring positions of one sequence: each token but the first is also judged under the
            row before its own. Not together with `excluded_ids_N`, whose alternative is another: that a draw by inverse
            CDF used the number u >= p(draft) by which the draft was rejected.
        chunk_elements: logits processed at once; nothing of size N x V beyond the input is kept.

    Raises:
        LogitsError: a row of logits is no distribution.
    """
    num_tokens, vocab_size = logits_NV.shape
    if chunk_elements is None:  # A chunk of a few rows stays in a CPU's cache; an accelerator wants big launches.
        chunk_elements = 2**18 if logits_NV.device.type == "cpu" else 2**24
    size = max(1, chunk_elements // vocab_size)
    chunks = []
    before_1V = None
    for start in range(0, num_tokens, size):
        chunk, last_1V = _score_chunk(
            logits_NV[start : start + size],
            token_ids_N[start : start + size],
            sampling,
            uniforms_N[start : start + size],
            None if excluded_ids_N is None else excluded_ids_N[start : start + size],
            in_order,
            before_1V,
        )
        chunks.append(chunk)
        before_1V = last_1V if in_order else None
    if not chunks:
        nothing = torch.zeros(0, dtype=torch.float64, device=logits_NV.device)
        mgf = nothing.reshape(0, len(LAMBDAS))
        return TokenScores(nothing, nothing, nothing, nothing, mgf, nothing, nothing, nothing.bool())
    return TokenScores(*(torch.cat(parts) for parts in zip(*chunks, strict=True)))


def score_acceptance(
    target_probs_N: torch.Tensor, accepted_N: torch.Tensor, draft_probs_N: torch.Tensor | None = None
) -> AcceptanceScores:
    """Score the verdicts on N drafted tokens that were tested (every earlier slot of their block was accepted).

    Args:
        target_probs_N: [N] policy's probability of the drafted token, after temperature and filters.
        accepted_N: [N] bool.
        draft_probs_N: [N] the draft's probability of it; None for a deterministic draft.

    Given the drafted token the verdict is a coin of probability b = min(1, target / draft), so the deviations are
    martingale differences of variance b (1 - b), also when split by slot.
    """
    accept_N = target_probs_N.double()
    if draft_probs_N is not None:
        accept_N = accept_N / draft_probs_N.double()
    accept_N = accept_N.clamp(0.0, 1.0)
    return AcceptanceScores(accepted_N.double() - accept_N, accept_N * (1.0 - accept_N))


class Certificate:
    """Sums over tokens. Keep one per step for `ks_p` and the log, and one per run for M; `merge` adds them.

    Example:
        step = Certificate()
        step.add(score_tokens(logits, token_ids, sampling, uniforms), slots)
        run.merge(step)
        if alarm(run.report()): ...
    """

    def __init__(self) -> None:
        self._all = _Tokens()
        self._by_slot: dict[int, _Tokens] = {}
        self._acceptance: dict[int, _Moments] = {}
        self._lag1 = _Products()
        self._cross = _Products()

    def add(
        self,
        scores: TokenScores,
        slots_N: torch.Tensor | None = None,
        *,
        sequence_ids_N: torch.Tensor | None = None,
        group_ids_N: torch.Tensor | None = None,
    ) -> None:
        """Add N scored tokens.

        Args:
            scores: of the tokens, in the order of their sequences.
            slots_N: [N] from `Completion.slots()`: -1 without a draft, 0..K-1 draft slots, K bonus.
            sequence_ids_N: [N] which sequence a token belongs to. The tokens of one sequence must be neighbours, in
                order, and from its first token on: positions are counted here. Enables the lag-1 correlation.
            group_ids_N: [N] which prompt; needs `sequence_ids_N`. Enables the cross-sample correlation, over the
                sequences of a group that are added in one call.
        """
        scores = TokenScores(*(getattr(scores, part.name).cpu() for part in fields(scores)))
        inside_N, rank_N = scores.inside_N, scores.rank_N
        self._all.add(scores, torch.ones_like(inside_N))
        if slots_N is not None:
            for slot, chosen_N in _by_value(torch.as_tensor(slots_N).cpu()):
                self._by_slot.setdefault(slot, _Tokens()).add(scores, chosen_N)

        if sequence_ids_N is None:
            if group_ids_N is not None:
                raise ValueError("group_ids_N needs sequence_ids_N: positions are counted within sequences.")
            return
        # Mean 0 and variance 1 under the null, so a sum of n products of independent ones has variance n.
        standard_N = torch.where(inside_N, (rank_N - 0.5) * math.sqrt(12.0), 0.0)
        sequence_N = torch.as_tensor(sequence_ids_N).cpu()
        neighbours = (sequence_N[1:] == sequence_N[:-1]) & inside_N[1:] & inside_N[:-1]
        products = (standard_N[1:] * standard_N[:-1])[neighbours]
        self._lag1.add(int(neighbours.sum()), float(products.sum()))
        if group_ids_N is not None:
            self._cross.add(*_cross_products(standard_N, inside_N, sequence_N, torch.as_tensor(group_ids_N).cpu()))

    def add_acceptance(self, scores: AcceptanceScores, slots_N: torch.Tensor) -> None:
        """Add the verdicts on N tested drafts; `slots_N` [N] is the slot of each."""
        deviation_N, variance_N = scores.deviation_N.cpu(), scores.variance_N.cpu()
        for slot, chosen_N in _by_value(torch.as_tensor(slots_N).cpu()):
            self._acceptance.setdefault(slot, _Moments()).add(deviation_N[chosen_N], variance_N[chosen_N])

    @property
    def num_tokens(self) -> int:
        """All tokens so far, those outside the kept set included."""
        return self._all.moments.count + self._all.outside

    def merge(self, other: Certificate) -> None:
        """Add the sums of another certificate (another step, rank or process) to this one."""
        self._all.merge(other._all)
        for slot, tokens in other._by_slot.items():
            self._by_slot.setdefault(slot, _Tokens()).merge(tokens)
        for slot, moments in other._acceptance.items():
            self._acceptance.setdefault(slot, _Moments()).merge(moments)
        self._lag1.add(other._lag1.count, other._lag1.total)
        self._cross.add(other._cross.count, other._cross.total)

    def report(self) -> CertificateReport:
        """Everything so far, in numbers. Looking changes nothing."""
        tokens, sums = self._all, self._all.moments
        everything = sums.count + tokens.outside
        evidence = sums.variance >= MIN_VARIANCE
        ks_distance, ks_p = _kolmogorov_smirnov(tokens.rank_counts)
        return CertificateReport(
            tokens=sums.count,
            evidence=evidence,
            z=sums.z(),
            excess_nats=sums.mean(),
            excess_half_width=sums.half_width(),
            smallest_visible_nats=4.0 * math.sqrt(sums.variance) / sums.count if evidence else None,
            log_m=self._log_m(),
            alternative_log_m=tokens.alternative_log_m(),
            ks_p=ks_p,
            ks_distance=ks_distance,
            ks_ids_p=_kolmogorov_smirnov(tokens.id_rank_counts)[1],
            lag1_correlation=self._lag1.mean(),
            lag1_z=self._lag1.z(),
            cross_correlation=self._cross.mean(),
            cross_z=self._cross.z(),
            outside_kept=tokens.outside,
            outside_share=tokens.outside / everything if everything else None,
            by_slot={slot: part.report() for slot, part in sorted(self._by_slot.items())},
            acceptance_by_slot={
                slot: AcceptanceSlotReport(moments.z(), moments.mean(), moments.count, _log_m_of_coins(moments))
                for slot, moments in sorted(self._acceptance.items())
            },
        )

    def _log_m(self) -> float:
        """Half of the stake on all tokens together, half on the slots in equal parts; what is not staked stays 1."""
        unused = max(SLOT_STAKES - len(self._by_slot), 0)
        slots = _log_mean_exp([*(part.log_m() for part in self._by_slot.values()), *[0.0] * unused])
        return _log_mean_exp([self._all.log_m(), slots])

    def state_dict(self) -> dict[str, object]:
        """JSON-serialisable; floats survive a round trip bit for bit."""
        return {
            "lambdas": list(LAMBDAS),
            "alternative_shares": list(ALTERNATIVE_SHARES),
            "rank_bins": RANK_BINS,
            "all": asdict(self._all),
            "by_slot": {str(slot): asdict(tokens) for slot, tokens in self._by_slot.items()},
            "acceptance": {str(slot): asdict(moments) for slot, moments in self._acceptance.items()},
            "lag1": asdict(self._lag1),
            "cross": asdict(self._cross),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace all sums by those of a `state_dict`. Raises ValueError when its bets or bins are not ours."""
        bets = (tuple(state.get("lambdas", ())), tuple(state.get("alternative_shares", ())), state.get("rank_bins"))
        if bets != (LAMBDAS, ALTERNATIVE_SHARES, RANK_BINS):
            raise ValueError("certificate sums of another version (bets or rank bins differ): start a new one.")
        self._all = _Tokens.of(state["all"])
        self._by_slot = {int(slot): _Tokens.of(values) for slot, values in state["by_slot"].items()}
        self._acceptance = {int(slot): _Moments(**values) for slot, values in state["acceptance"].items()}
        self._lag1 = _Products(**state["lag1"])
        self._cross = _Products(**state["cross"])


def alarm(
    report: CertificateReport,
    delta: float = DEFAULT_DELTA_NATS,
    *,
    control: CertificateReport | None = None,
    max_outside_share: float = 0.005,
) -> bool:
    """Do the tokens contradict the policy, by more than engine and trainer may differ?

    True when M has reached 1e6 and the 95 % interval of the excess, of all tokens or of a slot whose own M is there as
    well, lies outside +-`delta` nats per token: at most one false alarm in a million runs, over all slots and looks. Or
    when so many tokens lie outside the kept set, which the other sums cannot see, that a true share of
    `max_outside_share` would give as many with probability below 1e-6.

    Args:
        report: of everything sampled so far in the run (M is only valid on all of it).
        delta: margin for rounding, because engine and trainer are never bit-equal. 0 disables the margin: M alone
            decides, for engines that share the trainer's arithmetic.
        control: report of tokens that the same engine sampled without drafts. Its excess is what the engine's
            arithmetic does by itself, and the interval is then that of the difference.
        max_outside_share: fraction; 0 makes the first such token an alarm.
    """
    if report.outside_kept:
        everything = report.tokens + report.outside_kept
        if bdtrc(report.outside_kept - 1, everything, max_outside_share) < ALARM_RATE:
            return True
    if report.log_m < ALARM_LOG_M:
        return False
    if delta == 0.0 and control is None:
        return True
    slots = [slot for slot in report.by_slot.values() if slot.log_m >= ALARM_LOG_M]
    return any(_beyond_margin(part, delta, control) for part in (report, *slots))


def _beyond_margin(part: CertificateReport | SlotReport, delta: float, control: CertificateReport | None) -> bool:
    excess, half_width = part.excess_nats, part.excess_half_width
    if excess is None or half_width is None:
        return False
    if control is not None and control.excess_nats is not None and control.excess_half_width is not None:
        excess -= control.excess_nats
        half_width = math.hypot(half_width, control.excess_half_width)
    return abs(excess) - half_width > delta


def _score_chunk(
    logits_NV: torch.Tensor,
    token_ids_N: torch.Tensor,
    sampling: Sampling,
    uniforms_N: torch.Tensor,
    excluded_ids_N: torch.Tensor | None,
    in_order: bool,
    before_1V: torch.Tensor | None,
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """The fields of `TokenScores` for a few rows, and the last row's log-probabilities [1, V] for the next chunk.

    Sums in float32 (float64 for float64 logits).
    """
    log_probs_NV = policy_log_probs(logits_NV, sampling)
    rejected_prob_N = None
    if excluded_ids_N is not None:
        rejected_prob_N = log_probs_NV.gather(-1, excluded_ids_N.unsqueeze(-1)).squeeze(-1).double().exp()
        # A policy certain of the excluded id leaves a row of NaN: no token can be recovered there, all are outside.
        log_probs_NV = log_probs_NV.scatter(-1, excluded_ids_N.unsqueeze(-1), -torch.inf).log_softmax(-1)
        log_probs_NV = log_probs_NV.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    token_N1 = log_probs_NV.gather(-1, token_ids_N.unsqueeze(-1))
    inside_N = (token_N1 > -torch.inf).squeeze(-1)
    alternative_N = torch.zeros_like(token_N1[:, 0])
    if in_order:
        alternative_N[1:] = (log_probs_NV[:-1].gather(-1, token_ids_N[1:, None]) - token_N1[1:]).squeeze(-1)
        if before_1V is not None:
            alternative_N[:1] = before_1V[0, token_ids_N[:1]] - token_N1[0]
    last_1V = log_probs_NV[-1:]

    # Rounding leaves a mass of 1 +- 1e-6, the same way at every token of a step: every mean is divided by it.
    log_probs_NV = log_probs_NV.clamp_min(_LOG_PROB_FLOOR)
    probs_NV = log_probs_NV.exp()
    mass_N = probs_NV.sum(-1)
    entropy_N = -torch.linalg.vecdot(probs_NV, log_probs_NV) / mass_N
    # Centred: the difference of two large numbers would drown the variance of a sharp distribution.
    centred_NV = log_probs_NV + entropy_N.unsqueeze(-1)
    variance_N = torch.linalg.vecdot(probs_NV * centred_NV, centred_NV) / mass_N
    log_mgf_NL = _log_mgf(log_probs_NV, probs_NV, mass_N)
    # sign is 1 on strictly more likely tokens, 0 on the tie class, -1 on the rest.
    sign_NV = (log_probs_NV - token_N1).sign_()
    balance_N = torch.linalg.vecdot(sign_NV, probs_NV).double() / mass_N
    untied_N = torch.linalg.vecdot(sign_NV.square_(), probs_NV).double() / mass_N
    above_N, tied_N = (untied_N + balance_N) / 2.0, 1.0 - untied_N
    rank_N = (above_N + uniforms_N.to(above_N) * tied_N).clamp(0.0, 1.0)

    token_prob_N = token_N1.clamp_min(_LOG_PROB_FLOOR).squeeze(-1).exp().double() / mass_N
    earlier_NV = torch.arange(probs_NV.shape[-1], device=probs_NV.device) < token_ids_N.unsqueeze(-1)
    earlier_N = (probs_NV * earlier_NV).sum(-1).double() / mass_N
    id_rank_N = (earlier_N + uniforms_N.to(earlier_N) * token_prob_N).clamp(0.0, 1.0)

    if rejected_prob_N is not None:
        alternative_N = torch.where(id_rank_N >= rejected_prob_N, -torch.log1p(-rejected_prob_N), -torch.inf)
    columns = [-token_N1.squeeze(-1), entropy_N, variance_N, rank_N, log_mgf_NL, id_rank_N, alternative_N]
    kept = [torch.where(inside_N if part.ndim == 1 else inside_N[:, None], part.double(), 0.0) for part in columns]
    return (*kept, inside_N), last_1V


def _log_mgf(log_probs_NV: torch.Tensor, probs_NV: torch.Tensor, mass_N: torch.Tensor) -> torch.Tensor:
    """[N, L] log E[p ** -lambda], in the order of `LAMBDAS`: products of one exponential instead of twelve of them."""
    grow_NV = (-_LAMBDA_UNIT * log_probs_NV).exp_()
    columns = []
    for power_NV in (grow_NV, grow_NV.reciprocal()):
        power2_NV = power_NV * power_NV
        power5_NV = power2_NV * power2_NV * power_NV
        power10_NV = power5_NV * power5_NV
        power20_NV = power10_NV * power10_NV
        for raised_NV in (power_NV, power2_NV, power5_NV, power10_NV, power20_NV, power20_NV * power20_NV):
            columns.append(torch.linalg.vecdot(probs_NV, raised_NV) / mass_N)
    return torch.stack(columns, dim=-1).log()


@dataclass(slots=True)
class _Moments:
    """Sums of deviations and of their variances under the null."""

    count: int = 0
    deviation: float = 0.0
    variance: float = 0.0
    square: float = 0.0

    def add(self, deviation_N: torch.Tensor, variance_N: torch.Tensor) -> None:
        self.count += deviation_N.numel()
        self.deviation += float(deviation_N.sum())
        self.variance += float(variance_N.sum())
        self.square += float(deviation_N.square().sum())

    def merge(self, other: _Moments) -> None:
        self.count += other.count
        self.deviation += other.deviation
        self.variance += other.variance
        self.square += other.square

    def mean(self) -> float | None:
        return self.deviation / self.count if self.count else None

    def z(self) -> float | None:
        return self.deviation / math.sqrt(self.variance) if self.variance >= MIN_VARIANCE else None

    def half_width(self) -> float | None:
        """95 %. When the tokens are not the policy's, their own spread may exceed the one the policy predicts."""
        return 1.96 * math.sqrt(max(self.variance, self.square)) / self.count if self.count else None


@dataclass(slots=True)
class _Tokens:
    """All that is summed over the tokens of one place: a slot, or everywhere."""

    moments: _Moments = field(default_factory=_Moments)
    outside: int = 0
    log_bets: list[float] = field(default_factory=lambda: [0.0] * (len(LAMBDAS) + len(ALTERNATIVE_SHARES)))
    """[L + R] log of each bet's martingale."""
    rank_counts: list[int] = field(default_factory=lambda: [0] * RANK_BINS)
    id_rank_counts: list[int] = field(default_factory=lambda: [0] * RANK_BINS)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> _Tokens:
        fields_of_state: dict[str, Any] = {**state, "moments": _Moments(**state["moments"])}
        return cls(**fields_of_state)

    def add(self, scores: TokenScores, chosen_N: torch.Tensor) -> None:
        """Scores on the CPU, of which `chosen_N` [N] belong here."""
        self.outside += int((chosen_N & ~scores.inside_N).sum())
        inside_N = chosen_N & scores.inside_N
        surprisal_N = scores.surprisal_N[inside_N]
        self.moments.add(surprisal_N - scores.entropy_N[inside_N], scores.variance_N[inside_N])
        lambdas_L = torch.tensor(LAMBDAS, dtype=torch.float64)
        shares_R = torch.tensor(ALTERNATIVE_SHARES, dtype=torch.float64)
        alternative_N1 = scores.alternative_N[inside_N].unsqueeze(1)
        gains = torch.cat(
            [
                lambdas_L * surprisal_N.sum() - scores.log_mgf_NL[inside_N].sum(0),
                torch.logaddexp((1.0 - shares_R).log(), shares_R.log() + alternative_N1).sum(0),
            ]
        )
        self.log_bets = _added(self.log_bets, gains.tolist())
        self.rank_counts = _added(self.rank_counts, _histogram(scores.rank_N[inside_N]))
        self.id_rank_counts = _added(self.id_rank_counts, _histogram(scores.id_rank_N[inside_N]))

    def merge(self, other: _Tokens) -> None:
        self.moments.merge(other.moments)
        self.outside += other.outside
        self.log_bets = _added(self.log_bets, other.log_bets)
        self.rank_counts = _added(self.rank_counts, other.rank_counts)
        self.id_rank_counts = _added(self.id_rank_counts, other.id_rank_counts)

    def log_m(self) -> float:
        return _log_mean_exp(self.log_bets)

    def alternative_log_m(self) -> float:
        return _log_mean_exp(self.log_bets[len(LAMBDAS) :])

    def report(self) -> SlotReport:
        return SlotReport(
            z=self.moments.z(),
            excess_nats=self.moments.mean(),
            excess_half_width=self.moments.half_width(),
            tokens=self.moments.count,
            log_m=self.log_m(),
            alternative_log_m=self.alternative_log_m(),
            ks_p=_kolmogorov_smirnov(self.rank_counts)[1],
            ks_ids_p=_kolmogorov_smirnov(self.id_rank_counts)[1],
            outside_kept=self.outside,
        )


@dataclass(slots=True)
class _Products:
    """A sum of products of standardised ranks; mean 0 and variance 1 each under the null, uncorrelated."""

    count: int = 0
    total: float = 0.0

    def add(self, count: int, total: float) -> None:
        self.count += count
        self.total += total

    def mean(self) -> float | None:
        return self.total / self.count if self.count else None

    def z(self) -> float | None:
        return self.total / math.sqrt(self.count) if self.count else None


def _cross_products(
    standard_N: torch.Tensor, inside_N: torch.Tensor, sequence_N: torch.Tensor, group_N: torch.Tensor
) -> tuple[int, float]:
    """(number, sum) of the products over pairs of sequences of a group at equal positions."""
    if not standard_N.numel():
        return 0, 0.0
    starts_N = torch.ones_like(inside_N)
    starts_N[1:] = sequence_N[1:] != sequence_N[:-1]
    index_N = torch.arange(len(starts_N))
    position_N = index_N - torch.where(starts_N, index_N, 0).cummax(0).values
    group_index_N = group_N.unique(return_inverse=True)[1]
    cell_N = (group_index_N * (position_N.max() + 1) + position_N)[inside_N].unique(return_inverse=True)[1]
    value_N = standard_N[inside_N]
    num_cells = int(cell_N.max()) + 1 if cell_N.numel() else 0
    cells = torch.zeros(3, num_cells, dtype=torch.float64)
    for row, values in enumerate((torch.ones_like(value_N), value_N, value_N.square())):
        cells[row].index_add_(0, cell_N, values)
    # Sum over pairs i < j of x_i x_j = ((sum x)^2 - sum x^2) / 2.
    pairs = cells[0] * (cells[0] - 1.0) / 2.0
    return round(float(pairs.sum())), float((cells[1].square() - cells[2]).sum() / 2.0)


def _kolmogorov_smirnov(counts: list[int]) -> tuple[float | None, float | None]:
    """(distance at the bin edges, p-value); Stephens' correction makes the asymptotic law good from a few tokens on."""
    total = sum(counts)
    if not total:
        return None, None
    cumulative = torch.tensor(counts, dtype=torch.float64).cumsum(0) / total
    edges = torch.arange(1, len(counts) + 1, dtype=torch.float64) / len(counts)
    distance = float((cumulative - edges).abs().max())
    root = math.sqrt(total)
    return distance, float(kolmogorov((root + 0.12 + 0.11 / root) * distance))


def _histogram(ranks_N: torch.Tensor) -> list[int]:
    return torch.bincount((ranks_N * RANK_BINS).long().clamp(0, RANK_BINS - 1), minlength=RANK_BINS).tolist()


def _added(left: list[Number], right: list[Number]) -> list[Number]:
    return [a + b for a, b in zip(left, right, strict=True)]


def _log_m_of_coins(moments: _Moments) -> float:
    """log of a betting martingale on verdicts minus their probabilities, which lie in [-1, 1].

    For such differences of variance v, E[exp(c d)] <= exp((e^|c| - 1 - |c|) v) (Freedman 1975, lemma 1.3).
    """
    bets = []
    for size in (0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6):
        cost = (math.expm1(size) - size) * moments.variance
        bets += [size * moments.deviation - cost, -size * moments.deviation - cost]
    return _log_mean_exp(bets)


def _log_mean_exp(values: list[float]) -> float:
    largest = max(values)
    return largest + math.log(sum(math.exp(value - largest) for value in values) / len(values))


def _by_value(values_N: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    for value in values_N.unique().tolist():
        yield int(value), values_N == value
