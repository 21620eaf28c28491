"""A verify step that touches only the rows it needs. Same law as vLLM's rejection sampler, less work.

vLLM 0.32 (`vllm.v1.sample.rejection_sampler`) takes every drafted position through the softmax, the filters and a
recovered token, and fills [B, V] with noise twice. But a sequence commits drafted tokens up to its first rejection, and
draws exactly once: there, or at its bonus slot. So the slots are walked in order, with the sequences that are still
alive, and what a row behind a rejection holds never matters. What happens at a slot is `spec.verify`, the one
definition. With a small vocabulary the calls cost more than the rows they save: there all slots are one stretch of the
walk. Both ways commit the same tokens, bit for bit.

Rows are drawn by inverse CDF from float64 uniforms: a sequence with n drafts uses n + 1 of them, n for the acceptances
and one for the draw, from its own generator if it has one. A step without drafts is the same walk with one slot. So a
seeded sequence does not depend on who shares its batch.

Plain torch operations, checked on CPU only; the walk waits for the device once per stretch.

Legend: B sequences, K most drafts of one, N logits rows (drafts + B), R sequences alive at a stretch of W slots, E of
them that end in it, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from paceline.spec.sampling import GREEDY_BELOW, LogitsError, sample_with
from paceline.spec.verify import NO_TOKEN, acceptance_probs, residual_probs


class SlotSampler(RejectionSampler):
    """In place of vLLM's `RejectionSampler`, for deterministic drafts (greedy EAGLE-3, n-gram, look-up).

    Left to vLLM: sampled drafts (`draft_probs`), synthetic acceptance, float64 Gumbel noise, min-p and other processors
    that run after temperature (vLLM applies them to the bonus token only), log-probs of another kind than
    `processed_logprobs`, and log-probs of chosen ids.
    """

    whole_up_to = 1 << 17
    """Logits of a step, at most, for all slots to be one stretch."""

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """One verify step.

        Args:
            metadata: drafted ids of all sequences, flattened; -1 where nothing was drafted.
            draft_probs: as for vLLM; None for deterministic drafts.
            logits: [N, V], left as they are.
            sampling_metadata: per sequence, as for vLLM.

        Returns:
            `sampled_token_ids` [B, K + 1] int32: accepted tokens, one recovered or bonus token, then -1. Log-probs, if
            asked for, have a row for each of the B * (K + 1) places; those behind the last token hold nothing.

        Raises:
            LogitsError: a row that is needed is no distribution (NaN, +inf, everything masked).
        """
        if draft_probs is not None or not self._covers(sampling_metadata):
            return super().forward(metadata, draft_probs, logits, sampling_metadata)
        device, counts = logits.device, metadata.num_draft_tokens
        if _has_processors(sampling_metadata):
            logits = self._processed(logits, metadata, sampling_metadata)
        counts_B = torch.tensor(counts, device=device)
        drafts_BK1 = torch.full((len(counts), metadata.max_spec_len + 1), NO_TOKEN, device=device)
        slots_K1 = torch.arange(drafts_BK1.shape[1], device=device)
        drafts_BK1[slots_K1 < counts_B.unsqueeze(1)] = metadata.draft_token_ids.long()
        uniforms_BK1 = draw_uniforms(counts, sampling_metadata.generators, device)
        final_uniforms_B = uniforms_BK1.gather(1, counts_B.unsqueeze(1)).squeeze(1)
        # Slots that a sequence does not have repeat its bonus row; nothing is drafted there.
        rows_BK1 = metadata.bonus_logits_indices.long().unsqueeze(1) - (counts_B.unsqueeze(1) - slots_K1).clamp_min(0)

        tokens_BK1 = torch.full_like(drafts_BK1, NO_TOKEN, dtype=torch.int32)
        logprobs = _Logprobs(self.sampler, tokens_BK1, sampling_metadata.max_num_logprobs)
        width = len(slots_K1) if logits.numel() <= self.whole_up_to else 1
        alive_R = torch.arange(len(counts), device=device)
        slot = 0
        # Ends by itself: the place behind a sequence's last draft holds no draft, so nothing is accepted there.
        while len(alive_R) > 0:
            stretch = slice(slot, slot + width)
            committed_RW, num_accepted_R, logits_RWV = _verify(
                logits[rows_BK1[alive_R, stretch]].float(),
                drafts_BK1[alive_R, stretch],
                uniforms_BK1[alive_R, stretch],
                final_uniforms_B[alive_R],
                alive_R,
                sampling_metadata,
            )
            tokens_BK1[alive_R, stretch] = committed_RW.int()
            logprobs.add(logits_RWV, committed_RW, alive_R, slot)
            alive_R = alive_R[num_accepted_R == width]
            slot += width
        return SamplerOutput(sampled_token_ids=tokens_BK1, logprobs_tensors=logprobs.tensors)

    def plain(self, logits: torch.Tensor, sampling_metadata: SamplingMetadata) -> SamplerOutput:
        """A step without any draft, [B, V] logits: the tokens that `forward` would draw, without its bookkeeping."""
        if not self._covers(sampling_metadata) or _has_processors(sampling_metadata):
            return self.sampler(logits=logits, sampling_metadata=sampling_metadata)
        logits_BV = constrain(logits.to(torch.float32, copy=True), slice(None), sampling_metadata)
        if sampling_metadata.all_greedy:
            tokens_B, is_finite_B = _most_likely(logits_BV)
            _check(is_finite_B)
        else:
            probs_BV = logits_BV.softmax(-1)
            _check(~probs_BV[:, 0].isnan())
            counts = [0] * logits.shape[0]
            tokens_B = sample_with(probs_BV, draw_uniforms(counts, sampling_metadata.generators, logits.device)[:, 0])
            if not sampling_metadata.all_random:
                is_greedy_B = sampling_metadata.temperature < GREEDY_BELOW
                likely_B, is_finite_B = _most_likely(logits_BV)
                _check(is_finite_B)
                tokens_B = torch.where(is_greedy_B, likely_B, tokens_B)
        num_logprobs, logprobs = sampling_metadata.max_num_logprobs, None
        if num_logprobs is not None:
            logprobs = self.sampler.gather_logprobs(self.sampler.compute_logprobs(logits_BV), num_logprobs, tokens_B)
        return SamplerOutput(sampled_token_ids=tokens_B.int().unsqueeze(1), logprobs_tensors=logprobs)

    def _covers(self, sampling_metadata: SamplingMetadata) -> bool:
        asks_logprobs = sampling_metadata.max_num_logprobs is not None
        return (
            not self.synthetic_mode
            and not self.use_fp64_gumbel
            and not sampling_metadata.logprob_token_ids
            and (not asks_logprobs or self.sampler.logprobs_mode == "processed_logprobs")
            and all(_is_idle(processor) for processor in sampling_metadata.logitsprocs.argmax_invariant)
        )

    def _processed(
        self, logits: torch.Tensor, metadata: SpecDecodeMetadata, sampling_metadata: SamplingMetadata
    ) -> torch.Tensor:
        """[N, V] float32 copy after penalties, bad words and the like, as vLLM applies them before temperature."""
        processed = logits.to(torch.float32, copy=True)
        bonus, drafted = metadata.bonus_logits_indices.long(), metadata.target_logits_indices.long()
        processed[bonus] = self.sampler.apply_logits_processors(processed[bonus], sampling_metadata, True)
        if len(drafted) > 0:
            processed[drafted] = self.apply_logits_processors(processed[drafted], sampling_metadata, metadata)
        return processed


def draw_uniforms(counts: list[int], generators: dict[int, torch.Generator], device: torch.device) -> torch.Tensor:
    """[B, K + 1] float64 in [0, 1). Row b: `counts[b]` for the acceptances, the next one for the draw; the rest unused.

    Rows without a generator of their own use the global one.
    """
    uniforms_BK1 = torch.zeros(len(counts), max(counts) + 1, dtype=torch.float64, device=device)
    if len(generators) < len(counts):
        uniforms_BK1.uniform_()
    for row, generator in generators.items():
        uniforms_BK1[row, : counts[row] + 1].uniform_(generator=generator)
    return uniforms_BK1


def constrain(
    logits_RV: torch.Tensor, rows_R: torch.Tensor | slice, sampling_metadata: SamplingMetadata
) -> torch.Tensor:
    """Temperature, then vLLM's own top-k and top-p, for the sequences `rows_R`. Changes `logits_RV` in place."""
    if sampling_metadata.all_greedy:
        return logits_RV
    scale_R = sampling_metadata.temperature[rows_R]
    if not sampling_metadata.all_random:
        scale_R = torch.where(scale_R < GREEDY_BELOW, 1.0, scale_R)
    if bool((scale_R != 1.0).any()):
        logits_RV.div_(scale_R.unsqueeze(1))
    top_k, top_p = sampling_metadata.top_k, sampling_metadata.top_p
    return apply_top_k_top_p(
        logits_RV,
        None if top_k is None else top_k[rows_R],
        None if top_p is None else top_p[rows_R],
    )


def _verify(
    logits_RWV: torch.Tensor,
    drafts_RW: torch.Tensor,
    uniforms_RW: torch.Tensor,
    final_uniforms_R: torch.Tensor,
    rows_R: torch.Tensor,
    sampling_metadata: SamplingMetadata,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A stretch of the slots of the sequences `rows_R`.

    Returns [R, W] committed ids, NO_TOKEN behind the last; [R] how many of them were drafted (all of them: the sequence
    is still alive, otherwise the last is its draw); [R, W, V] the logits that were decided by. Raises `LogitsError` for
    a row that is no distribution, unless it lies behind a rejection.
    """
    width, vocab_size = logits_RWV.shape[1:]
    rows_N = rows_R if width == 1 else rows_R.repeat_interleave(width)
    logits_RWV = constrain(logits_RWV.view(-1, vocab_size), rows_N, sampling_metadata).view(logits_RWV.shape)
    probs_RWV, likely_RW, is_greedy_R = None, None, None
    if sampling_metadata.all_greedy:
        likely_RW, good_RW = _most_likely(logits_RWV)
        accepted_RW = likely_RW == drafts_RW
    else:
        probs_RWV = logits_RWV.softmax(-1)
        good_RW = ~probs_RWV[..., 0].isnan()  # One bad logit makes the whole row NaN.
        accepted_RW = uniforms_RW < acceptance_probs(probs_RWV, None, drafts_RW)
        if not sampling_metadata.all_random:
            is_greedy_R = sampling_metadata.temperature[rows_R] < GREEDY_BELOW
            likely_RW, is_finite_RW = _most_likely(logits_RWV)
            accepted_RW = torch.where(is_greedy_R.unsqueeze(1), likely_RW == drafts_RW, accepted_RW)
            good_RW &= is_finite_RW
    num_accepted_R = accepted_RW.cumprod(1).sum(1)
    slots_W = torch.arange(width, device=rows_R.device)
    is_behind_RW = slots_W > num_accepted_R.unsqueeze(1)
    _check(good_RW | is_behind_RW)
    committed_RW = torch.where(slots_W < num_accepted_R.unsqueeze(1), drafts_RW, NO_TOKEN)
    ends_E = (num_accepted_R < width).nonzero().squeeze(1)
    at_E = ends_E, num_accepted_R[ends_E]
    if probs_RWV is None:
        assert likely_RW is not None
        committed_RW[at_E] = likely_RW[at_E]
        return committed_RW, num_accepted_R, logits_RWV
    drawn_E = sample_with(residual_probs(probs_RWV[at_E], None, drafts_RW[at_E]), final_uniforms_R[ends_E])
    if likely_RW is not None and is_greedy_R is not None:
        drawn_E = torch.where(is_greedy_R[ends_E], likely_RW[at_E], drawn_E)
    committed_RW[at_E] = drawn_E
    return committed_RW, num_accepted_R, logits_RWV


def _most_likely(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., V] -> ([...] ids, [...] whether the row is a distribution)."""
    flat = logits.view(-1, logits.shape[-1])
    tokens = Sampler.greedy_sample(flat).view(logits.shape[:-1])  # That of a NaN, if there is one.
    return tokens, logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).isfinite()


def _check(good: torch.Tensor) -> None:
    if not bool(good.all()):
        raise LogitsError(
            f"{int((~good).sum())} of {good.numel()} logits rows are no distribution (NaN, +inf, or all masked): "
            "nothing was sampled. Check the weights of the last publish."
        )


class _Logprobs:
    """vLLM's log-prob tensors, filled slot by slot; nothing when `num_logprobs` is None."""

    def __init__(self, sampler: Any, tokens_BK1: torch.Tensor, num_logprobs: int | None) -> None:
        self._sampler, self._num, self._num_slots = sampler, num_logprobs, tokens_BK1.shape[1]
        self.tensors: LogprobsTensors | None = None
        if num_logprobs is not None:
            ids = tokens_BK1.new_zeros(tokens_BK1.numel(), num_logprobs + 1)
            ranks = torch.zeros(tokens_BK1.numel(), dtype=torch.int64, device=ids.device)
            self.tensors = LogprobsTensors(ids, torch.zeros_like(ids, dtype=torch.float32), ranks)

    def add(self, logits_RWV: torch.Tensor, committed_RW: torch.Tensor, rows_R: torch.Tensor, slot: int) -> None:
        if self.tensors is None:
            return
        rows_N, slots_N = (committed_RW >= 0).nonzero(as_tuple=True)
        logits_NV, committed_N = logits_RWV[rows_N, slots_N], committed_RW[rows_N, slots_N]
        found = self._sampler.gather_logprobs(self._sampler.compute_logprobs(logits_NV), self._num, committed_N)
        places_N = rows_R[rows_N] * self._num_slots + slot + slots_N
        self.tensors.logprob_token_ids[places_N] = found.logprob_token_ids
        self.tensors.logprobs[places_N] = found.logprobs
        self.tensors.selected_token_ranks[places_N] = found.selected_token_ranks


def _has_processors(sampling_metadata: SamplingMetadata) -> bool:
    """Whether anything changes the logits before temperature."""
    holder = sampling_metadata.thinking_budget_state_holder
    return (
        not sampling_metadata.no_penalties
        or bool(sampling_metadata.bad_words_token_ids)
        or sampling_metadata.allowed_token_ids_mask is not None
        or (holder is not None and holder.has_tracked_requests())
        or not all(_is_idle(processor) for processor in sampling_metadata.logitsprocs.non_argmax_invariant)
    )


def _is_idle(processor: Any) -> bool:
    """vLLM's own processors are always in the list and do nothing until a request asks; others may do anything."""
    match processor:
        case MinPLogitsProcessor():
            return processor.min_p_count == 0
        case MinTokensLogitsProcessor():
            return not processor.min_toks
        case LogitBiasLogitsProcessor():
            return not processor.biases
    return False
