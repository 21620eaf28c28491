"""What a draft is worth on held-out prompts: predicted by the trainer's copy, and counted by the engine.

Both look at the same rollouts, those of the engine itself. A prediction that misses the count says that engine and
trainer do not run the same draft: other weights, another alignment, another vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

import torch

from paceline.config.run import Recipe
from paceline.errors import ConfigError
from paceline.loop.parts import Parts
from paceline.loop.seeds import request_seed
from paceline.spec.stats import acceptance_stats
from paceline.train.draft import Answer, MostLikely, predicted_acceptance
from paceline.types import Completion, Request

DRAFT_EVAL_STEP = -6
"""Stands for the step in the seeds of what is sampled here: never the noise of training, evaluation or measurements."""
NUM_GROUPS = 20
"""Of prompts, for the standard errors: blocks of one rollout are not independent, nor are rollouts of one prompt."""
AGREEMENT = 0.05
"""Predicted and measured acceptance length are to agree within this fraction."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Acceptance and its standard errors; None where nothing was drafted, or one group of prompts is all there is."""

    alpha: float | None
    """1 + accepted draft tokens per verify step."""
    alpha_se: float | None
    marginal: tuple[float | None, ...]
    """[k] share of all verify steps that accept position j."""
    marginal_se: tuple[float | None, ...]
    conditional: tuple[float | None, ...]
    """[k] the same of those that accepted all earlier positions."""
    conditional_se: tuple[float | None, ...]
    verify_steps: int


@dataclass(frozen=True, slots=True)
class DraftEvaluation:
    """What `paceline draft eval` prints."""

    method: str
    num_draft_tokens: int
    answers: int
    tokens: int
    """Response tokens sampled."""
    coverage: float
    """Share of them that is in the draft's vocabulary."""
    predicted: Rates
    limit: float | None
    """Predicted acceptance length if every draft token were the policy's most likely one; None: nothing was drafted."""
    measured: Rates
    ratio: float | None
    """Predicted / measured acceptance length."""
    ratio_se: float | None
    agrees: bool | None
    """Whether the ratio is within `AGREEMENT` of 1."""
    seconds: float
    """Wall clock: sampling and prediction."""

    def to_dict(self) -> dict[str, object]:
        """JSON-ready."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Tally:
    """Counts over one group of prompts; expected ones where they are predicted."""

    blocks: float
    reached: tuple[float, ...]
    accepted: tuple[float, ...]


def evaluate_draft(
    recipe: Recipe, parts: Parts, num_answers: int, status: Callable[[str], None] = lambda text: None
) -> DraftEvaluation:
    """Sample `num_answers` answers to held-out prompts with the recipe's engine, and compare prediction and count.

    Always at the full k, whatever would choose it in a run. Raises `ConfigError` for a draft without weights or k = 0,
    and `EngineError` or `PublishError` when the engine cannot be right.
    """
    if parts.draft is None:
        raise ConfigError(
            f'draft.method is "{recipe.draft.method}" and no draft with weights is in use: there is nothing to '
            'predict. Set draft.method = "eagle3" and draft.num_draft_tokens to 1 or more'
        )
    head, engine, num_draft_tokens = parts.draft.head, parts.engine, parts.engine.num_draft_tokens
    parts.publish()
    engine.choose_drafts(None)
    engine.limit_drafts(num_draft_tokens)
    began = time.perf_counter()
    grouped = _requests(recipe, parts, num_answers)
    requests = [request for group in grouped for request in group]
    status(f"Sampling {len(requests)} answers to held-out prompts")
    completions = iter(engine.generate(requests, parts.sampling).completions)
    pairs = [[(request, next(completions)) for request in group] for group in grouped]
    status("Predicting what the draft is worth on them")
    predicted, most_likely, measured = [], [], []
    for group in pairs:
        answers = [Answer((*r.prompt.token_ids, *c.token_ids), len(r.prompt.token_ids)) for r, c in group]
        acceptance = predicted_acceptance(parts.trainer.model, head, answers, num_draft_tokens, parts.sampling)
        accepted = tuple(
            share * acceptance.num_blocks if acceptance.num_blocks else 0.0 for share in acceptance.marginal
        )
        predicted.append(_Tally(acceptance.num_blocks, acceptance.reached, accepted))
        most_likely.append(acceptance.most_likely)
        measured.append(_count((completion for _, completion in group), num_draft_tokens))
    tokens = [token for group in pairs for _, completion in group for token in completion.token_ids]
    ratio, ratio_se = _ratio(predicted, measured)
    pooled = MostLikely.pooled(most_likely)
    return DraftEvaluation(
        method=recipe.draft.method,
        num_draft_tokens=num_draft_tokens,
        answers=len(requests),
        tokens=len(tokens),
        coverage=float(torch.isin(torch.tensor(tokens), head.draft_ids.cpu()).float().mean()),
        predicted=_rates(predicted, num_draft_tokens),
        limit=pooled.alpha if pooled.num_blocks else None,
        measured=_rates(measured, num_draft_tokens),
        ratio=ratio,
        ratio_se=ratio_se,
        agrees=None if ratio is None else abs(ratio - 1) <= AGREEMENT,
        seconds=time.perf_counter() - began,
    )


def _requests(recipe: Recipe, parts: Parts, num_answers: int) -> list[list[Request]]:
    """`num_answers` requests over the held-out prompts, spread evenly, in `NUM_GROUPS` groups of whole prompts."""
    prompts = parts.held_out[:num_answers]
    per_prompt = [num_answers // len(prompts) + (place < num_answers % len(prompts)) for place in range(len(prompts))]
    num_groups = min(NUM_GROUPS, len(prompts))
    groups: list[list[Request]] = [[] for _ in range(num_groups)]
    for place, (prompt, number) in enumerate(zip(prompts, per_prompt, strict=True)):
        for sample in range(number):
            seed = request_seed(recipe.run.seed, DRAFT_EVAL_STEP, prompt.id, sample, attempt=0)
            groups[place * num_groups // len(prompts)].append(Request(prompt, sample, seed))
    return groups


def _count(completions: Iterable[Completion], num_draft_tokens: int) -> _Tally:
    stats = acceptance_stats(block for completion in completions for block in completion.blocks)
    padding = (0.0,) * (num_draft_tokens - len(stats.reached_by_position))
    return _Tally(stats.verify_steps, (*stats.reached_by_position, *padding), (*stats.accepted_by_position, *padding))


def _rates(groups: Sequence[_Tally], num_draft_tokens: int) -> Rates:
    blocks = [group.blocks for group in groups]
    marginal = [_share([group.accepted[j] for group in groups], blocks) for j in range(num_draft_tokens)]
    conditional = [
        _share([group.accepted[j] for group in groups], [group.reached[j] for group in groups])
        for j in range(num_draft_tokens)
    ]
    tokens, alpha_se = _share([group.blocks + sum(group.accepted) for group in groups], blocks)
    return Rates(
        alpha=tokens,
        alpha_se=alpha_se,
        marginal=tuple(share for share, _ in marginal),
        marginal_se=tuple(error for _, error in marginal),
        conditional=tuple(share for share, _ in conditional),
        conditional_se=tuple(error for _, error in conditional),
        verify_steps=round(sum(blocks)),
    )


def _share(counts: Sequence[float], trials: Sequence[float]) -> tuple[float | None, float | None]:
    """sum(counts) / sum(trials) and its standard error over the groups, by linearisation (Cochran, ratio estimator)."""
    total = sum(trials)
    if not total:
        return None, None
    share = sum(counts) / total
    return share, _error([(count - share * trial) / total for count, trial in zip(counts, trials, strict=True)])


def _ratio(predicted: Sequence[_Tally], measured: Sequence[_Tally]) -> tuple[float | None, float | None]:
    """Of the acceptance lengths; both come from the same groups, so that what they share cancels in the error."""
    lengths: list[float] = []
    moves: list[list[float]] = []
    for groups in (predicted, measured):
        total = sum(group.blocks for group in groups)
        if not total:
            return None, None
        length = sum(group.blocks + sum(group.accepted) for group in groups) / total
        lengths.append(length)
        moves.append([(group.blocks * (1 - length) + sum(group.accepted)) / total for group in groups])
    ratio = lengths[0] / lengths[1]
    return ratio, _error([(up - ratio * down) / lengths[1] for up, down in zip(*moves, strict=True)])


def _error(moves: Sequence[float]) -> float | None:
    """Standard error of a figure from how far each group moves it."""
    number = len(moves)
    return math.sqrt(number / (number - 1) * sum(move**2 for move in moves)) if number > 1 else None
