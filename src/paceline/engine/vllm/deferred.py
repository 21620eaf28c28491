"""Steps without drafts that do not run the drafter, and drafts that miss nothing of them.

vLLM 0.32 runs the drafter in every step, also where k = 0 was asked for, so that its keys and values follow the
policy's. What it would have read is kept here instead, and read in one pass of many tokens when drafts are wanted
again, or when a prompt comes in: prompts are always read at once, because other requests may share their blocks.

What a drafter of the EAGLE kind reads at position t is the policy's hidden state there and token t + 1. Nothing of it
depends on the drafts, so late is as good as at once. Only for requests that have ended by then nothing is read: a
later prompt that repeats such a response and finds its blocks in the prefix cache is drafted for with holes, which
costs acceptance and never changes the law of what is sampled.

Legend: B rows of the batch, W = most tokens sampled by a row in the step, N tokens of the step, T tokens kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class _Kept:
    """What the drafter would have read in one step, by token."""

    request_ids: list[str]
    """[T]"""
    positions: list[int]
    """[T]"""
    token_ids: list[int]
    """[T] the token behind each position."""
    states: list[torch.Tensor]
    """[T, ...] the policy's hidden states, one tensor per layer that is read."""


class DeferredDrafter:
    """Wraps `propose_draft_token_ids` of one vLLM model runner (`GPUModelRunner`, 0.32) whose draft is EAGLE-like."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._propose = runner.propose_draft_token_ids
        runner.propose_draft_token_ids = self._propose_or_keep
        self.forget()

    def forget(self) -> None:
        """Drop what is kept: the requests it belongs to have ended."""
        self._kept: list[_Kept] = []
        """One per step."""
        self._num_kept = 0

    def _propose_or_keep(
        self,
        scheduler_output: Any,
        sampled_token_ids: Any,
        sampling_metadata: Any,
        hidden_states: torch.Tensor,
        sample_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        spec_decode_metadata: Any,
        common_attn_metadata: Any,
        slot_mappings: Any,
    ) -> Any:
        num_rows, num_tokens = common_attn_metadata.num_reqs, common_attn_metadata.num_actual_tokens
        # A row that reads its prompt has more tokens than drafts and one.
        reads_prompts = num_tokens != sum(spec_decode_metadata.num_draft_tokens) + num_rows
        if scheduler_output.num_spec_tokens_to_schedule == 0 and not reads_prompts and self.has_room(num_tokens):
            self._keep_verified(sampled_token_ids, num_tokens, hidden_states, aux_hidden_states, common_attn_metadata)
            return torch.empty(num_rows, 0, dtype=torch.int64, device=sampled_token_ids.device)
        if self._kept:
            self._read_kept(common_attn_metadata, sampling_metadata)
        return self._propose(
            scheduler_output,
            sampled_token_ids,
            sampling_metadata,
            hidden_states,
            sample_hidden_states,
            aux_hidden_states,
            spec_decode_metadata,
            common_attn_metadata,
            slot_mappings,
        )

    def has_room(self, num_tokens: int) -> bool:
        """Whether so many more tokens can be kept: what is kept must fit one pass of the drafter."""
        return self._num_kept + num_tokens <= self._runner.drafter.max_num_tokens

    def keep_plain(
        self, tokens_B1: list[list[int]], hidden_states: torch.Tensor, aux_hidden_states: list[torch.Tensor] | None
    ) -> None:
        """Keep a step of one query per row: the token each row committed, and the policy's states before it."""
        batch, num_rows = self._runner.input_batch, len(tokens_B1)
        # A step pays for some references; tensors are made of them when they are read.
        self._keep(
            batch.req_ids[:num_rows],
            batch.num_computed_tokens_cpu[:num_rows].tolist(),
            [tokens[0] for tokens in tokens_B1],
            self._states(num_rows, hidden_states, aux_hidden_states),
        )

    def _keep_verified(
        self,
        sampled_BW: torch.Tensor,
        num_tokens: int,
        hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        common_attn_metadata: Any,
    ) -> None:
        """The same of a step that verified drafts: each row's committed tokens with the states before them."""
        committed_BW = sampled_BW >= 0
        slots_W = torch.arange(sampled_BW.shape[1], device=sampled_BW.device)
        index_T = (common_attn_metadata.query_start_loc[: len(sampled_BW), None] + slots_W)[committed_BW]
        request_ids = self._runner.input_batch.req_ids
        self._keep(
            [request_ids[row] for row in committed_BW.nonzero()[:, 0].tolist()],
            self._runner._get_positions(num_tokens)[index_T].tolist(),
            sampled_BW[committed_BW].tolist(),
            [states[index_T] for states in self._states(num_tokens, hidden_states, aux_hidden_states)],
        )

    def _keep(
        self, request_ids: list[str], positions: list[int], token_ids: list[int], states: list[torch.Tensor]
    ) -> None:
        self._kept.append(_Kept(request_ids, positions, token_ids, states))
        self._num_kept += len(token_ids)

    def _states(
        self, num_tokens: int, hidden_states: torch.Tensor, aux_hidden_states: list[torch.Tensor] | None
    ) -> list[torch.Tensor]:
        """Parts [N, ...] of what the drafter reads of the policy, as `propose_draft_token_ids` puts it together."""
        if aux_hidden_states is not None:
            return [states[:num_tokens] for states in aux_hidden_states]
        other = getattr(self._runner.get_model(), "get_mtp_target_hidden_states", lambda: None)()
        # The policy's own tensor is new in every step; the other one is a buffer.
        return [hidden_states[:num_tokens] if other is None else other[:num_tokens].clone()]

    def _read_kept(self, common_attn_metadata: Any, sampling_metadata: Any) -> None:
        """One pass of the drafter over everything kept of the requests that still run."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        drafter, block_table = self._runner.drafter, common_attn_metadata.block_table_tensor
        device, kept = block_table.device, self._kept
        self.forget()
        request_ids = self._runner.input_batch.req_ids[: common_attn_metadata.num_reqs]
        row_of = {request_id: row for row, request_id in enumerate(request_ids)}
        # -1 for a request that has ended.
        rows_T = torch.tensor([row_of.get(request_id, -1) for step in kept for request_id in step.request_ids])
        rows_T = rows_T.to(device)
        positions_T = torch.tensor([position for step in kept for position in step.positions], device=device)
        tokens_T = torch.tensor([token for step in kept for token in step.token_ids], dtype=torch.int32, device=device)
        states_TH = torch.cat([torch.cat(step.states, -1) for step in kept])
        # By row; within one the order of the steps is that of the positions.
        order = rows_T.argsort(stable=True)
        order = order[rows_T[order] >= 0]
        if len(order) == 0:
            return
        rows_T, positions_T, tokens_T, states_TH = rows_T[order], positions_T[order], tokens_T[order], states_TH[order]
        rows, counts = rows_T.unique_consecutive(return_counts=True)
        ends = counts.cumsum(0)
        starts = torch.nn.functional.pad(ends, (1, 0)).int()
        size = drafter.block_size
        blocks_T = block_table[rows_T, positions_T // size].long()
        seq_lens = (positions_T[ends - 1] + 1).int()
        metadata = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts.cpu(),
            seq_lens=seq_lens,
            seq_lens_cpu_upper_bound=seq_lens.cpu(),
            num_reqs=len(rows),
            num_actual_tokens=len(rows_T),
            max_query_len=int(counts.max()),
            max_seq_len=int(seq_lens.max()),
            block_table_tensor=block_table[rows],
            slot_mapping=blocks_T * size + positions_T % size,
            causal=True,
        )
        # `propose` moves the tokens of a row one to the front and puts the last one behind them.
        drafter.propose(
            num_speculative_tokens=0,
            target_token_ids=tokens_T.roll(1),
            target_positions=positions_T,
            target_hidden_states=states_TH,
            next_token_ids=tokens_T[ends - 1],
            token_indices_to_sample=None,
            common_attn_metadata=metadata,
            sampling_metadata=sampling_metadata,
        )
