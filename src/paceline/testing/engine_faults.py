"""Faults planted in the live vLLM engine, for `paceline certify` to find and to place.

Drafts of the engine are deterministic (n-gram, greedy EAGLE-3), so some of the faults of `testing.faults` cannot exist
in it; `IMPOSSIBLE` says why. The others change one thing each: the rows of logits that reach the sampler, a part of the
verify step, its noise, or the scheduler's cut at a stop token.

Legend: N logits rows (drafts + B), B sequences, K most drafts of one, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from paceline.engine.vllm import engine as engine_module
from paceline.engine.vllm.engine import VllmEngine
from paceline.loop.parts import Parts

Rows = Callable[[torch.Tensor, Any, Any], torch.Tensor]
"""(logits [N, V], metadata of the drafts, model runner) -> logits [N, V] that the sampler sees."""
Install = Callable[[VllmEngine], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class EngineFault:
    """One mistake, and what a failing certificate must say about it."""

    install: Install
    names: tuple[str, ...]
    """Each is the beginning of a finding; `{bonus}` stands for the number of the bonus slot."""
    spares: tuple[str, ...] = ()
    """No finding begins so: these places are right."""
    asks: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the sampling that the fault needs."""

    @contextmanager
    def planted(self, parts: Parts) -> Iterator[Parts]:
        """`parts` whose engine has the fault; the engine is right again afterwards."""
        trainer, sampling = parts.trainer, dataclasses.replace(parts.sampling, **self.asks)
        assert isinstance(parts.engine, VllmEngine)
        with _replaced(trainer, "sampling", lambda real: sampling), self.install(parts.engine):
            yield dataclasses.replace(parts, sampling=sampling)

    def is_named_by(self, findings: tuple[str, ...], num_draft_tokens: int) -> bool:
        """Do the findings name the place of the fault, and no place that is right?"""
        names, spares = ([text.format(bonus=num_draft_tokens) for text in texts] for texts in (self.names, self.spares))
        return all(any(finding.startswith(name) for finding in findings) for name in names) and not any(
            finding.startswith(tuple(spares)) for finding in findings
        )


# ---- what is replaced


@contextmanager
def _replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    real = getattr(owner, name)
    setattr(owner, name, make(real))
    try:
        yield
    finally:
        setattr(owner, name, real)


def _rows(change: Rows) -> Install:
    """The rejection sampler sees other logits. Steps without any draft do not pass through it."""

    def install(engine: VllmEngine) -> AbstractContextManager[None]:
        runner: Any = engine._runner

        def make(real: Callable[..., Any]) -> Callable[..., Any]:
            def forward(metadata: Any, draft_probs: Any, logits: torch.Tensor, sampling_metadata: Any) -> Any:
                return real(metadata, draft_probs, change(logits, metadata, runner), sampling_metadata)

            return forward

        return _replaced(runner.rejection_sampler, "forward", make)

    return install


def _part(name: str, make: Callable[[Any], Any]) -> Install:
    """A function that `engine.vllm.sampler` calls."""

    def install(engine: VllmEngine) -> AbstractContextManager[None]:
        from paceline.engine.vllm import sampler

        return _replaced(sampler, name, make)

    return install


def _drafted(metadata: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """([S] first row, [S] number of drafts) of the S sequences that have drafts."""
    counts_B = torch.tensor(metadata.num_draft_tokens)
    bonus_B = metadata.bonus_logits_indices.long()
    drafted_B = counts_B > 0
    return (bonus_B - counts_B)[drafted_B], counts_B[drafted_B]


# ---- the faults


def _bonus_of_row_before(logits: torch.Tensor, metadata: Any, runner: Any) -> torch.Tensor:
    first_S, counts_S = _drafted(metadata)
    changed = logits.clone()
    changed[first_S + counts_S] = logits[first_S + counts_S - 1]
    return changed


def _bonus_of_another_sequence(logits: torch.Tensor, metadata: Any, runner: Any) -> torch.Tensor:
    first_S, counts_S = _drafted(metadata)
    changed = logits.clone()
    changed[first_S + counts_S] = logits[(first_S + counts_S).roll(1)]
    return changed


def _rows_off_by_one(logits: torch.Tensor, metadata: Any, runner: Any) -> torch.Tensor:
    """Slot j is verified against the row of slot j - 1, slot 0 against that of the bonus."""
    changed = logits.clone()
    for first, count in zip(*(part.tolist() for part in _drafted(metadata)), strict=True):
        changed[first : first + count + 1] = logits[first : first + count + 1].roll(1, 0)
    return changed


def _temperature_of_another_row(logits: torch.Tensor, metadata: Any, runner: Any) -> torch.Tensor:
    """At the drafted positions every second sequence has the temperature of a neighbour that asked for half of it."""
    changed = logits.clone()
    for place, (first, count) in enumerate(zip(*(part.tolist() for part in _drafted(metadata)), strict=True)):
        if place % 2 == 0:
            changed[first : first + count] *= 2.0
    return changed


def _penalty_on_the_bonus(logits: torch.Tensor, metadata: Any, runner: Any) -> torch.Tensor:
    """A repetition penalty of 1.3 that nobody asked for: a checkpoint's default, on the bonus rows."""
    changed, batch = logits.clone(), runner.input_batch
    for row, bonus in enumerate(metadata.bonus_logits_indices.tolist()):
        if metadata.num_draft_tokens[row]:
            seen = torch.from_numpy(batch.token_ids_cpu[row, : batch.num_tokens_no_spec[row]]).long().unique()
            values = logits[bonus, seen]
            changed[bonus, seen] = torch.where(values > 0, values / 1.3, values * 1.3)
    return changed


@contextmanager
def _min_p_on_the_bonus(engine: VllmEngine) -> Iterator[None]:
    """min_p = 0.1 at temperature 1, left out at the drafted positions as in vllm-project/vllm#42744.

    vLLM 0.32 refuses such a request, and would ignore min_p everywhere: it is not told, and our own check is lifted.
    """

    def kept(logits: torch.Tensor) -> torch.Tensor:
        return logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(0.1), -torch.inf)

    def bonus(logits: torch.Tensor, metadata: Any, runner: Any) -> torch.Tensor:
        changed, rows_B = logits.clone(), metadata.bonus_logits_indices.long()
        changed[rows_B] = kept(logits[rows_B])
        return changed

    def plain(real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda logits, sampling_metadata: real(kept(logits), sampling_metadata)

    def untold(real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda request, sampling: real(request, dataclasses.replace(sampling, min_p=0.0))

    sampler = cast(Any, engine)._runner.sampler
    with (
        _replaced(engine_module, "check_sampling", lambda real: lambda sampling, num_draft_tokens: None),
        _replaced(engine, "_sampling_params", untold),
        _replaced(sampler, "forward", plain),
        _rows(bonus)(engine),
    ):
        yield


def _without_residual(real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda target_probs, draft_probs, draft_tokens: target_probs


def _stated_below_one(real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A greedy draft has q = 1 on its token; the verifier is told 0.7 and accepts min(1, p / 0.7)."""
    return lambda target_probs, draft_probs, draft_tokens: (real(target_probs, None, draft_tokens) / 0.7).clamp(max=1.0)


def _last_noise_is_the_first(own: bool) -> Callable[[Any], Any]:
    """The draw at the end of a block uses the number that decided on its first draft."""

    def make(real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def draw(counts: list[int], generators: dict[int, torch.Generator], device: torch.device) -> torch.Tensor:
            uniforms_BK1 = real(counts, generators if own else {}, device)
            rows_B = torch.arange(len(counts))
            uniforms_BK1[rows_B, torch.tensor(counts)] = uniforms_BK1[:, 0].clone()
            return uniforms_BK1

        return draw

    return make


def _one_noise_for_the_batch(real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def draw(counts: list[int], generators: dict[int, torch.Generator], device: torch.device) -> torch.Tensor:
        uniforms_BK1 = real(counts, generators, device)
        longest = max(range(len(counts)), key=counts.__getitem__)
        return uniforms_BK1[longest].expand_as(uniforms_BK1).clone()

    return draw


def _stop_at_the_end_of_a_block(engine: VllmEngine) -> AbstractContextManager[None]:
    """Only the last token of a block is compared with the stop tokens; the length is still kept."""
    scheduler: Any = engine._engine.engine_core.engine_core.scheduler

    def make(real: Callable[..., Any]) -> Callable[..., Any]:
        def update(request: Any, new_token_ids: list[int], is_stale: bool = False) -> tuple[list[int], bool]:
            params, stops = request.sampling_params, request.sampling_params.stop_token_ids
            params.stop_token_ids = []
            try:
                kept, stopped = real(request, new_token_ids[:-1])
            finally:
                params.stop_token_ids = stops
            if not stopped:
                last, stopped = real(request, new_token_ids[-1:])
                kept = [*kept, *last]
            new_token_ids[:] = kept
            return new_token_ids, stopped

        return update

    return _replaced(scheduler, "_update_request_with_output", make)


_BONUS = "all tokens at slot {bonus} (bonus)"
_ROW_BEFORE = ": drawn from the row of logits before"
_REUSED = "recovered tokens at slot 0: drawn with the noise that rejected"
_VERDICTS = "acceptance at slot"

FAULTS: Mapping[str, EngineFault] = {
    "residual missing": EngineFault(
        _part("residual_probs", _without_residual), ("recovered tokens at slot 0",), (_VERDICTS,)
    ),
    "greedy draft stated as sampled": EngineFault(
        _part("acceptance_probs", _stated_below_one), ("acceptance at slot 0",), ("recovered", _BONUS)
    ),
    "bonus from the row before": EngineFault(
        _rows(_bonus_of_row_before), (_BONUS + _ROW_BEFORE,), ("recovered", _VERDICTS)
    ),
    "bonus from the row of another sequence": EngineFault(
        _rows(_bonus_of_another_sequence), (_BONUS,), ("recovered", _VERDICTS)
    ),
    "rows off by one": EngineFault(
        _rows(_rows_off_by_one),
        ("all tokens at slot 0", "all tokens at slot 1" + _ROW_BEFORE),
        ("all tokens at steps without a draft",),
    ),
    "temperature of another row": EngineFault(_rows(_temperature_of_another_row), ("all tokens at slot 0",), (_BONUS,)),
    "penalty on the bonus only": EngineFault(_rows(_penalty_on_the_bonus), (_BONUS,), ("recovered", _VERDICTS)),
    "min_p on the bonus only": EngineFault(
        _min_p_on_the_bonus,
        ("all tokens at slot 0", "acceptance at slot 0"),
        (_BONUS, "all tokens at steps without a draft"),
        asks={"min_p": 0.1},
    ),
    "recovery reuses the noise of acceptance": EngineFault(
        _part("draw_uniforms", _last_noise_is_the_first(own=False)), (_REUSED,), (_VERDICTS,)
    ),
    "recovery reuses the noise of acceptance, per-request seeds": EngineFault(
        _part("draw_uniforms", _last_noise_is_the_first(own=True)), (_REUSED,), (_VERDICTS,)
    ),
    "one noise for the whole batch": EngineFault(
        _part("draw_uniforms", _one_noise_for_the_batch), ("tokens of different samples of a prompt",)
    ),
    "stop token not cut inside a block": EngineFault(
        _stop_at_the_end_of_a_block, ("stop token not cut at slot 0",), ("all tokens", "recovered", _VERDICTS)
    ),
}

IMPOSSIBLE: Mapping[str, str] = {
    "q raw while the proposal is tempered": "a greedy or looked-up draft has no temperature: its q is 1 on its token. "
    'What a wrong q does is planted as "greedy draft stated as sampled".',
    "draft vocabulary renormalised wrongly": "the q of a greedy draft is 1 on its token however its vocabulary is "
    "normalised. A wrong map of the vocabulary proposes other tokens, which costs acceptance and not the law.",
    "noise shared between the proposal and the recovery": "a deterministic proposal uses no noise. The verifier's own "
    "two uses of noise are planted instead: acceptance and recovery.",
    "sampled drafts dropped for being unlikely": "a deterministic draft reveals nothing that was not known before the "
    "draw, so cutting it keeps the law.",
}
"""Faults of sampled drafts, with the reason why this engine cannot have them. `testing.faults` has all of them."""
