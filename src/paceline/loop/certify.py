"""The certificate as a product: sample as training does, re-score every token, say whether it was lossless.

The verdict is given once, after a fixed number of tokens, so z may be read at 4.9 sigma (one false alarm in a million
per figure) beside the alarm that is valid at any time.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Literal

import torch

from paceline.config.run import Recipe
from paceline.loop.parts import Parts
from paceline.loop.scoring import score_rollouts
from paceline.loop.seeds import rank_noise_seed, request_seed
from paceline.spec.certificate import Certificate, CertificateReport, alarm
from paceline.spec.stats import AcceptanceStats, acceptance_stats
from paceline.train.logprobs import Sample
from paceline.types import Request, Versions

CERTIFY_STEP = -4
"""Stands for the step in the seeds of what is sampled here: never the noise of training, evaluation or measurements."""
Z_LIMIT = 4.9
"""Two-sided tail of 1e-6 of a standard normal."""
P_LIMIT = 1e-6
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

    def to_dict(self) -> dict[str, object]:
        """JSON-ready."""
        reports = {"certificate": self.certificate.to_dict(), "recovered": self.recovered.to_dict()}
        return {**asdict(self), "findings": list(self.findings), **reports}


def certify(
    recipe: Recipe, parts: Parts, num_tokens: int, on_tokens: Callable[[int], None] = lambda tokens: None
) -> ArmCertificate:
    """Sample groups on the training prompts until there are `num_tokens` tokens, and judge them.

    The trainer's weights are published first, as in a step of training. `on_tokens` hears how many tokens there are
    after every generate call. Raises `EngineError` or `PublishError` when the engine cannot be right.
    """
    engine, trainer, algorithm = parts.engine, parts.trainer, recipe.algorithm
    versions = Versions(trainer.version, parts.draft_version)
    engine.publish(trainer.weights(), versions)
    if parts.draft is not None:
        engine.publish_draft(parts.draft, versions)
    noise = torch.Generator().manual_seed(rank_noise_seed(recipe.run.seed, CERTIFY_STEP))
    certificate, recovered = Certificate(), Certificate()
    acceptance = AcceptanceStats()
    samples_of_prompt: Counter[str] = Counter()
    tokens = completions = 0
    began = time.perf_counter()
    while tokens < num_tokens:
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
        certificate.merge(scores.certificate)
        recovered.merge(scores.recovered)
        acceptance += acceptance_stats(block for completion in rollouts.completions for block in completion.blocks)
        tokens += sum(len(sample.response_ids) for sample in samples)
        completions += len(samples)
        on_tokens(tokens)
    report, recovered_report = certificate.report(), recovered.report()
    found = tuple(findings(report, recovered_report, recipe.certificate.delta_nats, engine.num_draft_tokens))
    return ArmCertificate(
        verdict="fail" if found else "pass" if report.evidence else "no evidence",
        findings=found,
        certificate=report,
        recovered=recovered_report,
        acceptance_length=acceptance.alpha,
        num_draft_tokens=engine.num_draft_tokens,
        completions=completions,
        seconds=time.perf_counter() - began,
    )


def findings(
    report: CertificateReport, recovered: CertificateReport, delta_nats: float, num_draft_tokens: int
) -> Iterator[str]:
    """Every figure beyond its limit, in words that name the place. Nothing: a pass, if there was evidence."""
    for where, part, share in (
        ("all tokens", report, OUTSIDE_SHARE),
        ("recovered tokens", recovered, RECOVERED_OUTSIDE_SHARE),
    ):
        if alarm(part, delta_nats, max_outside_share=share):
            excess = "unknown" if part.excess_nats is None else f"{part.excess_nats:+.4f}"
            yield (
                f"{where}: alarm, log M {part.log_m:.1f}, excess {excess} nats per token, {part.outside_kept} of "
                f"{part.tokens + part.outside_kept} impossible under the policy"
            )
        if beyond(part.z):
            yield f"{where}: z {part.z:+.1f}"
        if part.ks_p is not None and part.ks_p < P_LIMIT:
            yield f"{where}: the ranks are not uniform, Kolmogorov-Smirnov p {part.ks_p:.1e}"
        for slot, figures in part.by_slot.items():
            if beyond(figures.z):
                yield f"{where} at {slot_name(slot, num_draft_tokens)}: z {figures.z:+.1f}"
    for name, z in (
        ("neighbouring tokens of a sequence", report.lag1_z),
        ("tokens of different samples of a prompt", report.cross_z),
    ):
        if beyond(z):
            yield f"{name} are correlated: z {z:+.1f} (noise is shared or used again)"
    for slot, verdicts in report.acceptance_by_slot.items():
        if beyond(verdicts.z):
            share = "unknown" if verdicts.excess is None else f"{100 * verdicts.excess:+.2f} %"
            yield f"acceptance at {slot_name(slot, num_draft_tokens)}: z {verdicts.z:+.1f}, accepted - expected {share}"


def slot_name(slot: int, num_draft_tokens: int) -> str:
    """`slot 1`, `slot 3 (bonus)`, or `steps without a draft` for -1."""
    if slot < 0:
        return "steps without a draft"
    return f"slot {slot} (bonus)" if slot == num_draft_tokens else f"slot {slot}"


def beyond(z: float | None) -> bool:
    """Is a standard normal figure outside of what one in a million reaches? Nothing to compute it from: no."""
    return z is not None and abs(z) > Z_LIMIT
