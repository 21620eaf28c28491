"""Re-scoring what was sampled: log-probabilities for the update, sums for the certificate.

T response tokens of one completion, N tokens or drafts in all, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from paceline.errors import EngineError
from paceline.spec.certificate import Certificate, TokenScores, score_acceptance, score_tokens
from paceline.spec.sampling import policy_log_probs
from paceline.train.logprobs import Sample
from paceline.train.policy import ForwardReader, PolicyTrainer
from paceline.types import Completion, Sampling

_ROWS = 256
"""Positions whose whole distribution is in memory at once when drafts are looked up."""


@dataclass(frozen=True, slots=True)
class RolloutScores:
    """What the policy says about a set of completions."""

    logprobs: list[torch.Tensor]
    """Per completion [T]: log-probability of each token under the sampling distribution; -inf outside the kept set."""
    certificate: Certificate
    """Over every token; with `locate` also the verdicts on drafts."""
    recovered: Certificate
    """Recovered tokens under the residual law; empty without `locate`."""


@dataclass(frozen=True, slots=True)
class DraftVerdict:
    """A drafted token that was tested: every earlier draft of its block was accepted.

    Example, the second draft of the first block, rejected:
    `DraftVerdict(position=1, slot=1, token_id=6, accepted=False)`.
    """

    position: int
    """Of the response token that stands where it was drafted."""
    slot: int
    token_id: int
    accepted: bool


def draft_verdicts(completion: Completion) -> list[DraftVerdict]:
    """The tested drafts of a completion, in order.

    A block may run on behind a stop token or the length limit; drafts there have no position in the response and are
    left out, which looks at earlier tokens only. A placeholder (an id below 0) is no draft: nothing was tested.
    """
    found: list[DraftVerdict] = []
    start = 0
    for block in completion.blocks:
        for slot, token_id in enumerate(block.draft_token_ids[: block.num_accepted + 1]):
            if token_id >= 0 and start + slot < len(completion.token_ids):
                found.append(DraftVerdict(start + slot, slot, token_id, accepted=slot < block.num_accepted))
        start += len(block.token_ids)
    return found


def stops_passed(completions: Sequence[Completion], sampling: Sampling) -> Counter[int]:
    """Responses that go on behind a stop token, counted by the slot of the first one. Empty for a right engine.

    The tokens behind it may well follow the policy: the certificate does not see them.
    """
    stops, passed = set(sampling.stop_token_ids), Counter[int]()
    for completion in completions:
        inside = completion.token_ids[:-1]
        first = next((place for place, token in enumerate(inside) if token in stops), None)
        if first is not None:
            passed[completion.slots()[first]] += 1
    return passed


def check_ends(completions: Sequence[Completion], sampling: Sampling) -> None:
    """Raises `EngineError` when a response goes on behind a stop token."""
    passed = stops_passed(completions, sampling)
    if passed:
        raise EngineError(
            f"{passed.total()} of {len(completions)} responses go on behind a stop token, which stood at the slots "
            f"{sorted(passed)} of its block (-1: a step without a draft): the engine did not end them there, and their "
            'rewards would be those of other texts. Set draft.method = "none", or repair the engine.'
        )


def score_rollouts(
    trainer: PolicyTrainer,
    samples: Sequence[Sample],
    completions: Sequence[Completion],
    group_size: int,
    noise: torch.Generator,
    *,
    locate: bool = False,
    reader: ForwardReader | None = None,
) -> RolloutScores:
    """Score every sampled token with the trainer's policy.

    Args:
        samples: prompt and response of each completion.
        group_size: neighbouring completions that answer the same prompt.
        noise: breaks the ties of the ranks; never the generator that sampled.
        locate: also judge each tested draft and each recovered token, which costs a second look at their rows. Right
            for deterministic drafts only, which all of ours are: a block does not hold the probabilities of others.
        reader: watches the forward passes, under the numbers of `samples`.
    """
    logprobs: dict[int, torch.Tensor] = {}
    scores: dict[int, TokenScores] = {}
    certificate, recovered = Certificate(), Certificate()
    for scored in trainer.score(samples, reader):
        ids_T = torch.tensor(samples[scored.index].response_ids, device=scored.logits.device)
        uniforms_T = torch.rand(len(ids_T), generator=noise, dtype=torch.float64)
        scores[scored.index] = score_tokens(scored.logits, ids_T, trainer.sampling, uniforms_T, in_order=True)
        logprobs[scored.index] = scored.logprobs
        if locate:
            _locate(completions[scored.index], scored.logits, trainer.sampling, noise, certificate, recovered)
    order = range(len(samples))
    certificate.add(
        _concatenate([scores[index] for index in order]),
        torch.tensor([slot for completion in completions for slot in completion.slots()]),
        sequence_ids_N=torch.tensor([index for index in order for _ in samples[index].response_ids]),
        group_ids_N=torch.tensor([index // group_size for index in order for _ in samples[index].response_ids]),
    )
    return RolloutScores([logprobs[index] for index in order], certificate, recovered)


def _locate(
    completion: Completion,
    logits_TV: torch.Tensor,
    sampling: Sampling,
    noise: torch.Generator,
    certificate: Certificate,
    recovered: Certificate,
) -> None:
    tested = draft_verdicts(completion)
    if not tested:
        return
    device = logits_TV.device
    positions_N = torch.tensor([verdict.position for verdict in tested], device=device)
    slots_N = torch.tensor([verdict.slot for verdict in tested])
    draft_ids_N = torch.tensor([verdict.token_id for verdict in tested], device=device)
    accepted_N = torch.tensor([verdict.accepted for verdict in tested], device=device)
    target_probs_N = torch.cat(
        [
            policy_log_probs(logits_TV[rows], sampling).gather(1, ids.unsqueeze(1)).squeeze(1).exp()
            for rows, ids in zip(positions_N.split(_ROWS), draft_ids_N.split(_ROWS), strict=True)
        ]
    )
    certificate.add_acceptance(score_acceptance(target_probs_N, accepted_N), slots_N)
    rejected_N = ~accepted_N
    if bool(rejected_N.any()):
        rows = positions_N[rejected_N]
        ids_T = torch.tensor(completion.token_ids, device=device)
        uniforms = torch.rand(len(rows), generator=noise, dtype=torch.float64)
        excluded = draft_ids_N[rejected_N]
        scores = score_tokens(logits_TV[rows], ids_T[rows], sampling, uniforms, excluded_ids_N=excluded)
        recovered.add(scores, slots_N[rejected_N.cpu()])


def _concatenate(scores: Sequence[TokenScores]) -> TokenScores:
    return TokenScores(*(torch.cat([getattr(part, field.name) for part in scores]) for field in fields(TokenScores)))
