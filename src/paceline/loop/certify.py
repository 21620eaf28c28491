"""The certificate as a product: sample as training does, re-score every token, say whether it was lossless.

The verdict is given once, after a fixed number of tokens. It reads many figures, most of them apart for every slot,
because a fault that sits in one slot is lost among the tokens of the others; so each figure is judged at its share of
the whole (Bonferroni). They are sound at any number of tokens: betting martingales (a p-value of exp(-log M)),
Kolmogorov-Smirnov distances and binomial counts. Only z of the two correlations leans on sums of thousands of terms
being about normal; every other z is for reading.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Literal

import torch
from scipy.special import bdtrc

from paceline.config.run import Recipe
from paceline.loop.parts import Parts
from paceline.loop.scoring import score_rollouts, stops_passed
from paceline.loop.seeds import rank_noise_seed, request_seed
from paceline.spec.certificate import Certificate, CertificateReport, alarm
from paceline.spec.stats import AcceptanceStats, acceptance_stats
from paceline.train.logprobs import Sample
from paceline.types import Request

CERTIFY_STEP = -4
"""Stands for the step in the seeds of what is sampled here: never the noise of training, evaluation or measurements."""
FIGURES_RATE = 1e-6
"""False alarms of all figures of a verdict together. Beside them stand two alarms, of all and of the recovered tokens,
each with two ways to go off at 1e-6: a right sampler fails with probability of at most 5e-6."""
OUTSIDE_SHARE = 0.005
"""Fraction of tokens outside the trainer's kept set that rounding may explain."""
RECOVERED_OUTSIDE_SHARE = 0.02
"""The same of recovered tokens: they lie where the draft did not look, and so more often at the edge of the kept set.
Without a residual the share is the mean probability of a rejected draft, several times as much."""


@dataclass(frozen=True, slots=True)
class ArmCertificate:
    """The certificate of one arm and what it means."""

    verdict: Literal["pass", "fail", "no evidence"]
    findings: tuple[str, ...]
    """What speaks against it, one sentence each; empty for a pass."""
    certificate: CertificateReport
    """Every sampled token, by slot, with the acceptance locator."""
    recovered: CertificateReport
    """Recovered tokens alone, under the residual law."""
    acceptance_length: float | None
    num_draft_tokens: int
    completions: int
    seconds: float
    """Wall clock, sampling and scoring."""

    @property
    def tokens(self) -> int:
        """All sampled tokens, those outside the kept set included."""
        return self.certificate.tokens + self.certificate.outside_kept

    def to_dict(self) -> dict[str, object]:
        """JSON-ready."""
        reports = {"certificate": self.certificate.to_dict(), "recovered": self.recovered.to_dict()}
        return {**asdict(self), "findings": list(self.findings), **reports}


@dataclass(slots=True)
class Measurement:
    """The sums of one arm so far. Looking at them costs nothing until they are judged."""

    delta_nats: float
    num_draft_tokens: int
    certificate: Certificate = field(default_factory=Certificate)
    recovered: Certificate = field(default_factory=Certificate)
    acceptance: AcceptanceStats = field(default_factory=AcceptanceStats)
    passed: Counter[int] = field(default_factory=Counter)
    """Responses that go on behind a stop token, by its slot."""
    completions: int = 0
    seconds: float = 0.0

    @property
    def tokens(self) -> int:
        """All sampled tokens, those outside the kept set included."""
        return self.certificate.num_tokens

    def judge(self) -> ArmCertificate:
        """A verdict. It holds its false-alarm rate when one is read, after a number of tokens that was fixed before."""
        report, recovered = self.certificate.report(), self.recovered.report()
        found = (
            *findings_of_stops(self.passed, self.completions, self.num_draft_tokens),
            *findings(report, recovered, self.delta_nats, self.num_draft_tokens),
        )
        return ArmCertificate(
            verdict="fail" if found else "pass" if report.evidence else "no evidence",
            findings=found,
            certificate=report,
            recovered=recovered,
            acceptance_length=self.acceptance.alpha,
            num_draft_tokens=self.num_draft_tokens,
            completions=self.completions,
            seconds=self.seconds,
        )


def certify(
    recipe: Recipe, parts: Parts, num_tokens: int, on_tokens: Callable[[int], None] = lambda tokens: None
) -> ArmCertificate:
    """Sample groups on the training prompts until there are `num_tokens` tokens, and judge them.

    `on_tokens` hears how many tokens there are after every generate call. Raises as `measure`.
    """
    for measured in measure(recipe, parts):
        on_tokens(measured.tokens)
        if measured.tokens >= num_tokens:
            return measured.judge()
    raise AssertionError("measure never ends")


def measure(recipe: Recipe, parts: Parts) -> Iterator[Measurement]:
    """All tokens so far, after every generate call of the recipe's groups: one object that grows; never ends.

    The trainer's weights are published first, as in a step of training. Raises `EngineError` or `PublishError` when the
    engine cannot be right.
    """
    engine, trainer, algorithm = parts.engine, parts.trainer, recipe.algorithm
    parts.publish()
    noise = torch.Generator().manual_seed(rank_noise_seed(recipe.run.seed, CERTIFY_STEP))
    samples_of_prompt: Counter[str] = Counter()
    measured = Measurement(recipe.certificate.delta_nats, engine.num_draft_tokens)
    began = time.perf_counter()
    while True:
        requests = []
        for prompt in parts.prompts.next(algorithm.prompts_per_step):
            for sample in range(algorithm.group_size):
                # A prompt that comes again is sampled on, not again.
                number = samples_of_prompt[prompt.id]
                samples_of_prompt[prompt.id] += 1
                seed = request_seed(recipe.run.seed, CERTIFY_STEP, prompt.id, number, attempt=0)
                requests.append(Request(prompt, sample, seed))
        rollouts = engine.generate(requests, parts.sampling)
        samples = [
            Sample(request.prompt.token_ids, completion.token_ids)
            for request, completion in zip(requests, rollouts.completions, strict=True)
        ]
        scores = score_rollouts(trainer, samples, rollouts.completions, algorithm.group_size, noise, locate=True)
        measured.certificate.merge(scores.certificate)
        measured.recovered.merge(scores.recovered)
        measured.acceptance += acceptance_stats(
            block for completion in rollouts.completions for block in completion.blocks
        )
        measured.passed += stops_passed(rollouts.completions, parts.sampling)
        measured.completions += len(samples)
        measured.seconds = time.perf_counter() - began
        yield measured


def findings_of_stops(passed: Counter[int], completions: int, num_draft_tokens: int) -> Iterator[str]:
    """One is enough: what follows a stop token is drawn from the policy all right, and no statistic would see it."""
    for slot, count in sorted(passed.items()):
        yield (
            f"stop token not cut at {slot_name(slot, num_draft_tokens)}: {count} of {completions} responses go on "
            "behind it"
        )


def findings(
    report: CertificateReport, recovered: CertificateReport, delta_nats: float, num_draft_tokens: int
) -> Iterator[str]:
    """Every figure beyond its limit, in words that name the place. Nothing: a pass, if there was evidence."""
    parts = (
        ("all tokens", "drawn from the row of logits before their own", report, OUTSIDE_SHARE),
        ("recovered tokens", "drawn with the noise that rejected the draft", recovered, RECOVERED_OUTSIDE_SHARE),
    )
    for where, _, part, share in parts:
        if alarm(part, delta_nats, max_outside_share=share):
            excess = "unknown" if part.excess_nats is None else f"{part.excess_nats:+.4f}"
            yield (
                f"{where}: alarm, log M {part.log_m:.1f}, excess {excess} nats per token, {part.outside_kept} of "
                f"{part.tokens + part.outside_kept} impossible under the policy"
            )
    figures = [figure for part in parts for figure in _figures(*part, num_draft_tokens)]
    limit = FIGURES_RATE / max(len(figures), 1)
    yield from (sentence for sentence, p_value in figures if p_value < limit)


def _figures(
    where: str, alternative: str, report: CertificateReport, outside_share: float, num_draft_tokens: int
) -> Iterator[tuple[str, float]]:
    """(sentence, p-value) of every figure that there is evidence for."""
    z = "unknown" if report.z is None else f"{report.z:+.1f}"
    yield f"{where}: z {z}, log M {report.log_m:.1f}", _p_of_bets(report.log_m)
    for z_of_pairs, name in (
        (report.lag1_z, "neighbouring tokens of a sequence are correlated (noise is used again): z"),
        (report.cross_z, "tokens of different samples of a prompt are correlated (noise is shared): z"),
    ):
        if z_of_pairs is not None:
            yield f"{name} {z_of_pairs:+.1f}", math.erfc(abs(z_of_pairs) / math.sqrt(2.0))
    yield from _rank_figures(where, report.ks_p, report.ks_ids_p)
    for slot, tokens in report.by_slot.items():
        place = f"{where} at {slot_name(slot, num_draft_tokens)}"
        z = "unknown" if tokens.z is None else f"{tokens.z:+.1f}"
        yield f"{place}: z {z}, log M {tokens.log_m:.1f}", _p_of_bets(tokens.log_m)
        yield (
            f"{place}: {alternative}, log M of that bet {tokens.alternative_log_m:.1f}",
            _p_of_bets(tokens.alternative_log_m),
        )
        yield from _rank_figures(place, tokens.ks_p, tokens.ks_ids_p)
        everything = tokens.tokens + tokens.outside_kept
        if tokens.outside_kept:
            yield (
                f"{place}: {tokens.outside_kept} of {everything} impossible under the policy",
                float(bdtrc(tokens.outside_kept - 1, everything, outside_share)),
            )
    for slot, drafts in report.acceptance_by_slot.items():
        z = "unknown" if drafts.z is None else f"{drafts.z:+.1f}"
        excess = "unknown" if drafts.excess is None else f"{100 * drafts.excess:+.2f} %"
        place = f"acceptance at {slot_name(slot, num_draft_tokens)}"
        yield f"{place}: z {z}, accepted - expected {excess}, log M {drafts.log_m:.1f}", _p_of_bets(drafts.log_m)


def _rank_figures(where: str, by_probability: float | None, by_id: float | None) -> Iterator[tuple[str, float]]:
    if by_probability is not None:
        yield (
            f"{where}: the ranks are not uniform, Kolmogorov-Smirnov p {by_probability:.1e}",
            by_probability,
        )
    if by_id is not None:
        yield f"{where}: the noise is not uniform, Kolmogorov-Smirnov p {by_id:.1e} in the order of ids", by_id


def _p_of_bets(log_m: float) -> float:
    """Markov's bound, which is Ville's at one look."""
    # A bet that lost has a log M of minus thousands, whose exponential would overflow.
    return math.exp(min(0.0, -log_m))


def slot_name(slot: int, num_draft_tokens: int) -> str:
    """`slot 1`, `slot 3 (bonus)`, or `steps without a draft` for -1."""
    if slot < 0:
        return "steps without a draft"
    return f"slot {slot} (bonus)" if slot == num_draft_tokens else f"slot {slot}"
