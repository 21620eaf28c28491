"""A verify step that touches only the rows it needs. Same law as vLLM's rejection sampler, less work.

vLLM 0.32 (`vllm.v1.sample.rejection_sampler`) takes every drafted position through the softmax, the filters and a
recovered token, and fills [B, V] with noise twice. But a sequence commits drafted tokens up to its first rejection, and
draws exactly once: there, or at its bonus slot. So the slots are walked in order, with the sequences that are still
alive, and a row behind a rejection is never looked at. What happens at a slot is `spec.verify`, the one definition.

Rows are drawn by inverse CDF from float64 uniforms: a sequence with n drafts uses n + 1 of them, n for the acceptances
and one for the draw, from its own generator if it has one. A step without drafts is the same walk with one slot. So a
seeded sequence does not depend on who shares its batch.

Plain torch operations, checked on CPU only; the walk waits for the device once per slot.

Legend: B sequences, K most drafts of one, N logits rows (drafts + B), R sequences alive at a slot, V vocabulary.
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
        first_row_B = metadata.bonus_logits_indices.long() - counts_B

        tokens_BK1 = torch.full_like(drafts_BK1, NO_TOKEN, dtype=torch.int32)
        logprobs = _Logprobs(self.sampler, tokens_BK1, sampling_metadata.max_num_logprobs)
        alive_R = torch.arange(len(counts), device=device)
        slot = 0
        # Ends by itself: the place behind a sequence's last draft holds no draft, so nothing is accepted there.
        while len(alive_R) > 0:
            logits_RV = constrain(logits[first_row_B[alive_R] + slot].float(), alive_R, sampling_metadata)
            drafts_R = drafts_BK1[alive_R, slot]
            if sampling_metadata.all_greedy:
                committed_R, accepted_R = _greedy(logits_RV, drafts_R)
            else:
                committed_R, accepted_R = _sampled(
                    logits_RV, drafts_R, uniforms_BK1[alive_R, slot], final_uniforms_B[alive_R]
                )
                if not sampling_metadata.all_random:
                    is_greedy_R = sampling_metadata.temperature[alive_R] < GREEDY_BELOW
                    greedy_R, equal_R = _greedy(logits_RV, drafts_R)
                    committed_R = torch.where(is_greedy_R, greedy_R, committed_R)
                    accepted_R = torch.where(is_greedy_R, equal_R, accepted_R)
            tokens_BK1[alive_R, slot] = committed_R.int()
            logprobs.add(logits_RV, committed_R, alive_R, slot)
            alive_R = alive_R[accepted_R]
            slot += 1
        return SamplerOutput(sampled_token_ids=tokens_BK1, logprobs_tensors=logprobs.tensors)

    def plain(self, logits: torch.Tensor, sampling_metadata: SamplingMetadata) -> SamplerOutput:
        """A step without any draft, [B, V] logits: the tokens that `forward` would draw, without its bookkeeping."""
        if not self._covers(sampling_metadata) or _has_processors(sampling_metadata):
            return self.sampler(logits=logits, sampling_metadata=sampling_metadata)
        logits_BV = constrain(logits.to(torch.float32, copy=True), slice(None), sampling_metadata)
        if sampling_metadata.all_greedy:
            tokens_B = _most_likely(logits_BV)
        else:
            probs_BV = logits_BV.softmax(-1)
            _check(~probs_BV[:, 0].isnan())
            counts = [0] * logits.shape[0]
            tokens_B = sample_with(probs_BV, draw_uniforms(counts, sampling_metadata.generators, logits.device)[:, 0])
            if not sampling_metadata.all_random:
                is_greedy_B = sampling_metadata.temperature < GREEDY_BELOW
                tokens_B = torch.where(is_greedy_B, _most_likely(logits_BV), tokens_B)
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


def _sampled(
    logits_RV: torch.Tensor, drafts_R: torch.Tensor, uniforms_R: torch.Tensor, final_uniforms_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """([R] committed ids, [R] whether they are the drafted ones). The draw happens only where the draft is rejected."""
    probs_RV = logits_RV.softmax(-1)
    _check(~probs_RV[:, 0].isnan())  # One bad logit makes the whole row NaN.
    accepted_R = uniforms_R < acceptance_probs(probs_RV, None, drafts_R)
    rejected_R = ~accepted_R
    committed_R = drafts_R.clone()
    rest = residual_probs(probs_RV[rejected_R], None, drafts_R[rejected_R])
    committed_R[rejected_R] = sample_with(rest, final_uniforms_R[rejected_R])
    return committed_R, accepted_R


def _greedy(logits_RV: torch.Tensor, drafts_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_sampled`, at temperature 0."""
    committed_R = _most_likely(logits_RV)
    return committed_R, committed_R == drafts_R


def _most_likely(logits_RV: torch.Tensor) -> torch.Tensor:
    """[R]"""
    tokens_R = Sampler.greedy_sample(logits_RV)  # That of a NaN, if there is one.
    _check(logits_RV.gather(1, tokens_R.unsqueeze(1)).isfinite())
    return tokens_R


def _check(good_R: torch.Tensor) -> None:
    if not bool(good_R.all()):
        raise LogitsError(
            f"{int((~good_R).sum())} of {len(good_R)} logits rows are no distribution (NaN, +inf, or all masked): "
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

    def add(self, logits_RV: torch.Tensor, committed_R: torch.Tensor, rows_R: torch.Tensor, slot: int) -> None:
        if self.tensors is None:
            return
        found = self._sampler.gather_logprobs(self._sampler.compute_logprobs(logits_RV), self._num, committed_R)
        places_R = rows_R * self._num_slots + slot
        self.tensors.logprob_token_ids[places_R] = found.logprob_token_ids
        self.tensors.logprobs[places_R] = found.logprobs
        self.tensors.selected_token_ranks[places_R] = found.selected_token_ranks


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
