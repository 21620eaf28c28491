"""Verification paths with one thing wrong each, and the tests that must notice.

The world is small enough to know everything about it: the policy and the draft are tables [V, V] that give the law of
the next token after the last one. A `Path` proposes K tokens, verifies them and cuts the response at its stop token;
the right one is `spec.verify.verify` and nothing else. Each planted fault replaces one part of it.

Six tests look at a path (`detect`):

- `exact`: the law of a response of K+1 tokens, integrated over all noise on a lattice on which the right path is exact.
  A deviation of probability, not a p-value.
- `chi_square`: the same law, by counting responses.
- `certificate`: the betting martingale over rollouts, as exp(-log M), or 0 for a token that the policy cannot produce.
- `ranks`: Kolmogorov-Smirnov and lag-1 correlation of the randomised ranks of the same tokens.
- `acceptance` and `recovered`: the two locators of `spec.certificate`, the second by the martingale and by the ranks.
- `boundary`: verdicts under noise of exactly 0 and of the largest number below 1, which leave no trace in a law; 0 when
  one is wrong, 1 when none is.

B rows, K draft tokens, V vocabulary, N = 2K + 1 columns of noise: K for the proposal, K for acceptance, one for the
recovered or bonus token.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Protocol

import torch
from scipy.special import ndtr
from scipy.stats import chi2

from paceline.spec.certificate import Certificate, CertificateReport, score_acceptance, score_tokens
from paceline.spec.exact import Law, largest_difference
from paceline.spec.sampling import draw_uniforms, log_probs, sample, sample_with
from paceline.spec.verify import NO_TOKEN, VerifyResult, acceptance_probs, residual_probs, verify
from paceline.types import Sampling

NUM_DRAFT_TOKENS = 2
P_LIMIT = 1e-6
"""A p-value below this flags a path: the false-alarm rate of every statistical test here."""
EXACT_LIMIT = 1e-12
"""A right path deviates by rounding only, a planted fault by more than `VISIBLE`."""
VISIBLE = 1e-3
CELLS = 12
"""Least common multiple of 1 to 4: with probabilities in quarters every threshold of a right path (p, p/q, the steps of
the CDF of a residual) is a multiple of 1/12, so the midpoints of the cells integrate it exactly."""

Rows = Callable[["World", torch.Tensor], torch.Tensor]
Noise = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Stated = Callable[["World"], torch.Tensor]


class Verify(Protocol):
    """`spec.verify.verify` with given noise."""

    def __call__(
        self,
        target_probs_BKV: torch.Tensor,
        draft_tokens_BK: torch.Tensor,
        draft_probs_BKV: torch.Tensor | None = None,
        *,
        uniforms_BK1: torch.Tensor,
    ) -> VerifyResult: ...


@dataclass(frozen=True, slots=True)
class World:
    """A policy and a draft for which the last token is all the context there is. Response starts after token 0."""

    target_VV: torch.Tensor
    """[V, V] row: last token; the policy's sampling distribution, all controls applied. float64."""
    draft_VV: torch.Tensor
    """[V, V] what a sampled draft is really drawn from, after its own temperature and filters."""
    stop: int
    """A response ends with this token."""

    def law(self, length: int, last: int = 0) -> Law:
        """The law of a response of at most `length` tokens that follows token `last`."""
        law: Law = {(): 1.0}
        for _ in range(length):
            longer: Law = {}
            for tokens, mass in law.items():
                if tokens and tokens[-1] == self.stop:
                    longer[tokens] = mass
                    continue
                for token, p in enumerate(self.target_VV[tokens[-1] if tokens else last].tolist()):
                    if p > 0:
                        longer[(*tokens, token)] = mass * p
            law = longer
        return law


def lattice_world() -> World:
    """Four tokens, all probabilities in quarters, zeros in policy and draft at different places."""
    target = torch.tensor([[1, 1, 2, 0], [0, 2, 1, 1], [1, 0, 1, 2], [2, 1, 0, 1]], dtype=torch.float64)
    draft = torch.tensor([[2, 1, 1, 0], [1, 1, 2, 0], [1, 1, 1, 1], [0, 2, 1, 1]], dtype=torch.float64)
    return World(target / 4, draft / 4, stop=3)


def smooth_world(seed: int = 3, vocab_size: int = 6) -> World:
    """Random tables; min-p 0.1 leaves zeros in the policy's, and the draft is a noisy copy of it."""
    generator = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(vocab_size, vocab_size, generator=generator, dtype=torch.float64)
    noise = torch.randn(vocab_size, vocab_size, generator=generator, dtype=torch.float64)
    return World(log_probs(logits, min_p=0.1).exp(), log_probs(logits + noise, 0.8).exp(), stop=vocab_size - 1)


def right_rows(world: World, contexts_BK1: torch.Tensor) -> torch.Tensor:
    """[B, K+1, V] row j: the policy given the first j drafted tokens."""
    return world.target_VV[contexts_BK1]


def own_noise(proposal_BK: torch.Tensor, fresh_BK1: torch.Tensor) -> torch.Tensor:
    """The verifier draws noise of its own."""
    return fresh_BK1


def true_draft(world: World) -> torch.Tensor:
    """The verifier is told the distribution that drew the drafts."""
    return world.draft_VV


@dataclass(frozen=True, slots=True)
class Path:
    """One way from a context to committed tokens. The defaults are right, with sampled drafts."""

    verify: Verify = verify
    rows: Rows = right_rows
    stated: Stated | None = true_draft
    """[V, V] draft probabilities the verifier is told; None: it takes the drafts for deterministic."""
    noise: Noise = own_noise
    """([B, K] noise that drew the drafts, [B, K+1] fresh noise) -> [B, K+1] noise of the verifier."""
    is_greedy: bool = False
    """The draft proposes its most likely token instead of sampling."""
    drop_below: float = 0.0
    """A drafted token that the draft gives less than this, and all behind it, are not verified."""
    cuts_at_stop: bool = True


@dataclass(frozen=True, slots=True)
class Step:
    """One step of B rows."""

    contexts_BK1: torch.Tensor
    """Token before each slot, when all drafts before it are accepted."""
    drafts_BK: torch.Tensor
    num_accepted_B: torch.Tensor
    tokens_BK1: torch.Tensor
    """Committed, cut at the stop token; -1 behind."""


def take_step(path: Path, world: World, last_B: torch.Tensor, uniforms_BN: torch.Tensor) -> Step:
    """Propose, verify, cut. `uniforms_BN`: N = 2K + 1 columns in [0, 1)."""
    num_slots = uniforms_BN.shape[1] // 2
    proposal_BK, fresh_BK1 = uniforms_BN[:, :num_slots], uniforms_BN[:, num_slots:]
    contexts = [last_B]
    for slot in range(num_slots):
        rows_BV = world.draft_VV[contexts[-1]]
        contexts.append(rows_BV.argmax(-1) if path.is_greedy else sample_with(rows_BV, proposal_BK[:, slot]))
    contexts_BK1 = torch.stack(contexts, 1)
    drafted_BK1 = world.draft_VV[contexts_BK1[:, :-1]].gather(-1, contexts_BK1[:, 1:, None]).squeeze(-1)
    kept_BK = (drafted_BK1 >= path.drop_below).long().cumprod(1).bool()
    drafts_BK = torch.where(kept_BK, contexts_BK1[:, 1:], NO_TOKEN)
    result = path.verify(
        path.rows(world, contexts_BK1),
        drafts_BK,
        None if path.stated is None else path.stated(world)[contexts_BK1[:, :-1]],
        uniforms_BK1=path.noise(proposal_BK, fresh_BK1),
    )
    tokens_BK1 = result.tokens_BK1
    if path.cuts_at_stop:
        behind_BK1 = (tokens_BK1 == world.stop).long().cumsum(1) - (tokens_BK1 == world.stop).long() > 0
        tokens_BK1 = torch.where(behind_BK1, NO_TOKEN, tokens_BK1)
    return Step(contexts_BK1, drafts_BK, result.num_accepted_B, tokens_BK1)


# ---- the faults


def verify_with(
    target_probs_BKV: torch.Tensor,
    draft_tokens_BK: torch.Tensor,
    draft_probs_BKV: torch.Tensor | None = None,
    *,
    uniforms_BK1: torch.Tensor,
    residual: Callable[..., torch.Tensor] = residual_probs,
    accepts: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.lt,
    draw: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = sample_with,
) -> VerifyResult:
    """`spec.verify.verify`, written slot by slot, with parts that a fault replaces: `residual` (arguments of
    `residual_probs`), `accepts` (noise, acceptance probability) and `draw` (probabilities, noise)."""
    num_rows, num_slots = draft_tokens_BK.shape
    alive_B = torch.ones(num_rows, dtype=torch.bool)
    num_accepted_B = torch.zeros(num_rows, dtype=torch.long)
    final_BV = target_probs_BKV[:, num_slots].clone()
    for slot in range(num_slots):
        row_BV, token_B = target_probs_BKV[:, slot], draft_tokens_BK[:, slot]
        draft_BV = None if draft_probs_BKV is None else draft_probs_BKV[:, slot]
        verdict_B = accepts(uniforms_BK1[:, slot], acceptance_probs(row_BV, draft_BV, token_B)) & (token_B >= 0)
        ends_B = alive_B & ~verdict_B
        final_BV = torch.where(ends_B[:, None], residual(row_BV, draft_BV, token_B), final_BV)
        alive_B = alive_B & verdict_B
        num_accepted_B += alive_B.long()
    tokens_BK1 = torch.nn.functional.pad(draft_tokens_BK, (0, 1), value=NO_TOKEN)
    tokens_BK1 = torch.where(torch.arange(num_slots + 1) < num_accepted_B[:, None], tokens_BK1, NO_TOKEN)
    tokens_BK1[torch.arange(num_rows), num_accepted_B] = draw(final_BV, uniforms_BK1[:, -1])
    return VerifyResult(num_accepted_B, tokens_BK1)


def _target_itself(target: torch.Tensor, draft: torch.Tensor | None, tokens: torch.Tensor) -> torch.Tensor:
    return target


def _draw_at_or_above(probs_NV: torch.Tensor, uniforms_N: torch.Tensor) -> torch.Tensor:
    """First token whose CDF reaches the noise: at noise 0 that is token 0, whatever its mass."""
    cdf_NV = probs_NV.cumsum(-1)
    level_N1 = uniforms_N[:, None] * cdf_NV[:, -1:]
    return torch.searchsorted(cdf_NV, level_N1).squeeze(-1).clamp(max=probs_NV.shape[-1] - 1)


def _off_by_one(world: World, contexts_BK1: torch.Tensor) -> torch.Tensor:
    return right_rows(world, contexts_BK1).roll(1, dims=1)


def _bonus_of_row_before(world: World, contexts_BK1: torch.Tensor) -> torch.Tensor:
    rows_BKV = right_rows(world, contexts_BK1)
    return torch.cat([rows_BKV[:, :-1], rows_BKV[:, -2:-1]], 1)


def _draft_slots_from(table: Callable[[World], torch.Tensor]) -> Rows:
    """The draft slots are verified against another table [V, V], the bonus slot against the right one."""

    def rows(world: World, contexts_BK1: torch.Tensor) -> torch.Tensor:
        rows_BKV = right_rows(world, contexts_BK1)
        return torch.cat([table(world)[contexts_BK1[:, :-1]], rows_BKV[:, -1:]], 1)

    return rows


def _without_min_p(world: World) -> torch.Tensor:
    """The policy before a min-p that cut tokens with a tenth of the mass in all."""
    is_cut_VV = world.target_VV == 0
    num_cut_V1 = is_cut_VV.sum(1, keepdim=True)
    spread_VV = torch.where(is_cut_VV, 0.1 / num_cut_V1.clamp_min(1), 0.9 * world.target_VV)
    return torch.where(num_cut_V1 > 0, spread_VV, world.target_VV)


def _without_penalty(world: World) -> torch.Tensor:
    """The policy before a repetition penalty that halved the odds of the last token."""
    weights_VV = world.target_VV * (1 + torch.eye(world.target_VV.shape[0], dtype=torch.float64))
    return weights_VV / weights_VV.sum(1, keepdim=True)


def _of_a_colder_row(world: World) -> torch.Tensor:
    return log_probs(world.target_VV.log(), 0.5).exp()


def _raw_draft(world: World) -> torch.Tensor:
    """The draft proposes at temperature 0.5; this is its distribution at 1."""
    return log_probs(world.draft_VV.log(), 2.0).exp()


def _recovery_reuses_proposal(proposal_BK: torch.Tensor, fresh_BK1: torch.Tensor) -> torch.Tensor:
    return torch.cat([fresh_BK1[:, :-1], proposal_BK[:, :1]], 1)


def _same_stream_again(proposal_BK: torch.Tensor, fresh_BK1: torch.Tensor) -> torch.Tensor:
    """Proposal and verifier each seed a generator with the request's seed: the first K numbers are the same."""
    return torch.cat([proposal_BK, fresh_BK1[:, -1:]], 1)


RIGHT: Mapping[str, Path] = {
    "sampled drafts": Path(),
    "greedy drafts": Path(stated=None, is_greedy=True),
    "sampled drafts verified as deterministic ones": Path(stated=None),
    "greedy drafts cut where the draft is unsure": Path(stated=None, is_greedy=True, drop_below=0.45),
}
"""Paths without a fault. The third is exact because, given the drafted token, any token may be tested as a one-hot
draft; the fourth because a deterministic draft token reveals nothing that was not known before."""

FAULTS: Mapping[str, Path] = {
    "residual missing": Path(functools.partial(verify_with, residual=_target_itself)),
    "residual missing, greedy drafts": Path(
        functools.partial(verify_with, residual=_target_itself), stated=None, is_greedy=True
    ),
    "q raw, proposal tempered": Path(stated=_raw_draft),
    "greedy proposal stated as sampled": Path(is_greedy=True),
    "draft vocabulary not renormalised": Path(stated=lambda world: 0.75 * world.draft_VV),
    "bonus from the row before": Path(rows=_bonus_of_row_before),
    "rows off by one": Path(rows=_off_by_one),
    "temperature of another row": Path(rows=_draft_slots_from(_of_a_colder_row)),
    "min_p on the bonus only": Path(rows=_draft_slots_from(_without_min_p)),
    "penalty on the bonus only": Path(rows=_draft_slots_from(_without_penalty)),
    "recovery reuses the noise of the proposal": Path(noise=_recovery_reuses_proposal),
    "request seed used for proposal and acceptance": Path(noise=_same_stream_again),
    "unlikely sampled drafts dropped": Path(drop_below=0.3),
    "stop token not cut inside a block": Path(cuts_at_stop=False),
    "noise 0 accepts a token without mass": Path(functools.partial(verify_with, accepts=torch.le)),
    "noise 0 draws a token without mass": Path(functools.partial(verify_with, draw=_draw_at_or_above)),
}
"""Planted faults. Each is one mistake that an implementation has been seen to make, or could."""


# ---- the tests


@dataclass(frozen=True, slots=True)
class Findings:
    """What the tests say about one path: `exact` is a deviation of probability, the others are p-values."""

    exact: float
    chi_square: float
    certificate: float
    ranks: float
    acceptance: float
    recovered: float
    boundary: float

    def caught_by(self) -> list[str]:
        """Names of the tests that flag the path."""
        p_values = asdict(self)
        deviates = p_values.pop("exact") > VISIBLE
        return ["exact"] * deviates + [name for name, p in p_values.items() if p < P_LIMIT]


TESTS = tuple(field.name for field in fields(Findings))


def detect(path: Path, seed: int = 1) -> Findings:
    """Put `path` through all tests; the statistical ones draw from generators seeded with `seed`."""
    rollout = _roll_out(path, smooth_world(), seed)
    return Findings(
        exact=exact_deviation(path),
        chi_square=_response_p(path, smooth_world(), seed),
        certificate=rollout.certificate,
        ranks=rollout.ranks,
        acceptance=rollout.acceptance,
        recovered=rollout.recovered,
        boundary=1.0 if keeps_boundaries(path.verify) else 0.0,
    )


def exact_deviation(path: Path) -> float:
    """Largest deviation of the law of a response of K+1 tokens, on the lattice. 0 to rounding for a right path."""
    world, length = lattice_world(), NUM_DRAFT_TOKENS + 1
    midpoints = (torch.arange(CELLS, dtype=torch.float64) + 0.5) / CELLS
    uniforms_BN = torch.cartesian_prod(*[midpoints] * (2 * NUM_DRAFT_TOKENS + 1))
    step = take_step(path, world, torch.zeros(len(uniforms_BN), dtype=torch.long), uniforms_BN)
    law: Law = {}
    for tokens, count in _count(step.tokens_BK1).items():
        missing = 0 if tokens[-1] == world.stop else length - len(tokens)
        for rest, p in world.law(missing, tokens[-1]).items():
            law[tokens + rest] = law.get(tokens + rest, 0.0) + p * count / len(uniforms_BN)
    return largest_difference(law, world.law(length))


def chi_square_p(counts: Mapping[tuple[int, ...], int], law: Law) -> float:
    """p-value of counted outcomes against their law. Rare outcomes are pooled until 5 are expected.

    0 when something was counted that the law excludes.
    """
    total = sum(counts.values())
    if any(outcome not in law for outcome in counts):
        return 0.0
    common = {outcome: p * total for outcome, p in law.items() if p * total >= 5}
    observed = [counts.get(outcome, 0) for outcome in common]
    expected = list(common.values())
    rest = total - sum(expected)
    if rest >= 5:
        observed.append(total - sum(observed))
        expected.append(rest)
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    return float(chi2.sf(statistic, len(expected) - 1))


def keeps_boundaries(verify: Verify) -> bool:
    """Verdicts of one step with one draft under noise at the edge of [0, 1)."""
    below_1 = math.nextafter(1.0, 0.0)
    no_mass, last_no_mass = [0.0, 0.5, 0.5], [0.5, 0.5, 0.0]
    quarters = [0.25, 0.25, 0.5]
    cases = (
        # target row, bonus row, draft row, drafted token, noise of acceptance, of the last draw -> committed tokens
        (no_mass, quarters, [1.0, 0.0, 0.0], 0, 0.0, 0.0, (1,)),
        (quarters, no_mass, quarters, 2, below_1, 0.0, (2, 1)),
        (quarters, last_no_mass, quarters, 2, 0.0, below_1, (2, 1)),
        (no_mass, quarters, [0.0, 1.0, 0.0], 1, below_1, below_1, (2,)),
    )
    for target, bonus, draft, drafted, accept_noise, last_noise, expected in cases:
        result = verify(
            torch.tensor([[target, bonus]], dtype=torch.float64),
            torch.tensor([[drafted]]),
            torch.tensor([[draft]], dtype=torch.float64),
            uniforms_BK1=torch.tensor([[accept_noise, last_noise]], dtype=torch.float64),
        )
        if tuple(token for token in result.tokens_BK1[0].tolist() if token != NO_TOKEN) != expected:
            return False
    return True


def _response_p(path: Path, world: World, seed: int, num_responses: int = 60_000) -> float:
    """Chi-square of responses of K+1 tokens: one step, then the policy alone."""
    length = NUM_DRAFT_TOKENS + 1
    generator = torch.Generator().manual_seed(seed)
    uniforms = draw_uniforms(generator, num_responses, 2 * NUM_DRAFT_TOKENS + 1)
    tokens = take_step(path, world, torch.zeros(num_responses, dtype=torch.long), uniforms).tokens_BK1.clone()
    for place in range(1, length):
        before = tokens[:, place - 1]
        missing = (tokens[:, place] == NO_TOKEN) & (before != NO_TOKEN) & (before != world.stop)
        drawn = sample(world.target_VV[before.clamp_min(0)], generator)
        tokens[:, place] = torch.where(missing, drawn, tokens[:, place])
    return chi_square_p(_count(tokens), world.law(length))


def _count(tokens_BK1: torch.Tensor) -> Counter[tuple[int, ...]]:
    """How often each row occurs, without its -1."""
    # Rows as numbers: unique() on whole rows takes ten times as long.
    base, width = int(tokens_BK1.max()) + 2, tokens_BK1.shape[1]
    powers = torch.tensor([base ** (width - 1 - place) for place in range(width)])
    codes, counts = (tokens_BK1 + 1).matmul(powers).unique(return_counts=True)
    rows = codes.unsqueeze(1).div(powers, rounding_mode="floor").remainder(base) - 1
    return Counter(
        {
            tuple(token for token in row if token != NO_TOKEN): count
            for row, count in zip(rows.tolist(), counts.tolist(), strict=True)
        }
    )


@dataclass(frozen=True, slots=True)
class _Rollout:
    certificate: float
    ranks: float
    acceptance: float
    recovered: float


def _roll_out(path: Path, world: World, seed: int, num_sequences: int = 500, num_steps: int = 30) -> _Rollout:
    """Sequences of many steps; after a stop token a sequence starts again."""
    generator = torch.Generator().manual_seed(seed)
    last_B = torch.zeros(num_sequences, dtype=torch.long)
    steps: list[Step] = []
    for _ in range(num_steps):
        step = take_step(path, world, last_B, draw_uniforms(generator, num_sequences, 2 * NUM_DRAFT_TOKENS + 1))
        steps.append(step)
        ends_B = (step.tokens_BK1 != NO_TOKEN).sum(1, keepdim=True) - 1
        last_B = step.tokens_BK1.gather(1, ends_B).squeeze(1)
        last_B = torch.where(last_B == world.stop, 0, last_B)
    contexts = torch.stack([step.contexts_BK1 for step in steps], 1)
    tokens = torch.stack([step.tokens_BK1 for step in steps], 1)
    drafts = torch.nn.functional.pad(torch.stack([step.drafts_BK for step in steps], 1), (0, 1), value=NO_TOKEN)
    num_accepted = torch.stack([step.num_accepted_B for step in steps], 1).unsqueeze(2)
    slots = torch.arange(NUM_DRAFT_TOKENS + 1).expand_as(tokens)
    sequences = torch.arange(num_sequences)[:, None, None].expand_as(tokens)

    committed = tokens != NO_TOKEN
    certificate = Certificate()
    log_target = world.target_VV.log()
    uniforms = draw_uniforms(generator, int(committed.sum()), 1).squeeze(1)
    scores = score_tokens(log_target[contexts[committed]], tokens[committed], Sampling(), uniforms)
    certificate.add(scores, slots[committed], sequence_ids_N=sequences[committed])

    # A draft is tested when all before it were accepted. A deterministic one is judged as such.
    tested = (drafts != NO_TOKEN) & (slots <= num_accepted)
    drafted = drafts[tested]
    target_NV = world.target_VV[contexts[tested]]
    draft_NV = None if path.is_greedy or path.stated is None else world.draft_VV[contexts[tested]]
    accepted = (slots < num_accepted)[tested]
    picked = drafted.unsqueeze(1)
    draft_N = None if draft_NV is None else draft_NV.gather(1, picked).squeeze(1)
    acceptance = score_acceptance(target_NV.gather(1, picked).squeeze(1), accepted, draft_N)
    certificate.add_acceptance(acceptance, slots[tested])
    report = certificate.report()

    # A response cut by its stop token hides the recovered one: those blocks are left out, as they are in a run.
    seen = ~accepted & (tokens[tested] != NO_TOKEN)
    recovered = Certificate()
    residual_NV = residual_probs(target_NV, draft_NV, drafted)[seen]
    uniforms = draw_uniforms(generator, len(residual_NV), 1).squeeze(1)
    recovered.add(score_tokens(residual_NV.log(), tokens[tested][seen], Sampling(), uniforms))
    slot_p = [_two_sided_p(slot.z) for slot in report.acceptance_by_slot.values()]
    return _Rollout(
        certificate=_betting_p(report),
        ranks=_smallest_of(_rank_p(report), _two_sided_p(report.lag1_z)),
        acceptance=_smallest_of(*slot_p),
        recovered=_smallest_of(_betting_p(recovered.report()), _rank_p(recovered.report())),
    )


def _betting_p(report: CertificateReport) -> float:
    return 0.0 if report.outside_kept else min(1.0, math.exp(-report.log_m))


def _rank_p(report: CertificateReport) -> float:
    return 1.0 if report.ks_p is None else report.ks_p


def _smallest_of(*p_values: float) -> float:
    """One p-value for several tests (Bonferroni)."""
    return min(1.0, len(p_values) * min(p_values))


def _two_sided_p(z: float | None) -> float:
    return 1.0 if z is None else float(2.0 * ndtr(-abs(z)))
