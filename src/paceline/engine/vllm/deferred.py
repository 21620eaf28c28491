"""Steps without drafts that do not run the drafter, and drafts that miss nothing of them.

vLLM 0.32 runs the drafter in every step, also where k = 0 was asked for, so that its keys and values follow the
policy's. What it would have read is kept here instead, and read in one pass of many tokens when drafts are wanted
again, or when a prompt comes in: prompts are always read at once, because other requests may share their blocks.

What a drafter of the EAGLE kind reads at position t is the policy's hidden state there and token t + 1; a draft model
reads token t alone. Nothing of it depends on the drafts, so late is as good as at once. Only for requests that have
ended by then nothing is read: a later prompt that repeats such a response and finds its blocks in the prefix cache is
drafted for with holes, which costs acceptance and never changes the law of what is sampled.

What is kept never takes more than `KEPT_BYTES`, nor more tokens than one pass of the drafter reads: the step that would
exceed either reads it, and itself. At most half of it belongs to requests that have ended; a generate call begins with
nothing.

Legend: B rows of the batch, W = most tokens sampled by a row in the step, N tokens of the step, T tokens kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

KEPT_BYTES = 256 << 20
"""Hidden states kept at one time, at most: those of 10,922 tokens of a policy with H = 4096 and three layers that are
read, in bfloat16."""


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
    """[T, ...] the policy's hidden states, one tensor per layer that is read; none for a draft model."""

    @property
    def num_bytes(self) -> int:
        """What the states hold on to: a view keeps all of its tensor."""
        return sum(states.untyped_storage().nbytes() for states in self.states)

    def of(self, request_ids: Collection[str]) -> _Kept:
        """The part that belongs to some requests."""
        places = [place for place, request_id in enumerate(self.request_ids) if request_id in request_ids]
        return _Kept(
            [self.request_ids[place] for place in places],
            [self.positions[place] for place in places],
            [self.token_ids[place] for place in places],
            [states[places] for states in self.states],
        )


class DeferredDrafter:
    """Wraps `propose_draft_token_ids` of one vLLM model runner (`GPUModelRunner`, 0.32).

    Its draft is EAGLE-like, or a draft model.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._reads_states = bool(runner.drafter.pass_hidden_states_to_model)
        # A draft model reads the token behind the last one kept, too: one place more per row.
        self._room = runner.drafter.max_num_tokens - (0 if self._reads_states else runner.drafter.max_batch_size)
        self._propose = runner.propose_draft_token_ids
        runner.propose_draft_token_ids = self._propose_or_keep
        self._token_bytes = 0
        """Of the states of one token, once some have been seen."""
        self.forget()

    def forget(self) -> None:
        """Drop what is kept: it has been read, or the requests it belongs to have ended."""
        self._kept: list[_Kept] = []
        """One per step."""
        self._tokens: Counter[str] = Counter()
        """By request."""
        self.num_bytes = 0
        """Of all states that are kept."""

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
        """Whether so many more tokens can be kept."""
        return (
            self._tokens.total() + num_tokens <= self._room
            and self.num_bytes + num_tokens * self._token_bytes <= KEPT_BYTES
        )

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
        self._drop_ended()
        step = _Kept(request_ids, positions, token_ids, states)
        self._kept.append(step)
        self._tokens.update(request_ids)
        self.num_bytes += step.num_bytes
        self._token_bytes = step.num_bytes // len(token_ids)

    def _drop_ended(self) -> None:
        """Once half of what is kept is of requests that have ended: then a token is copied once, on average."""
        running = self._runner.requests
        num_ended = sum(count for request_id, count in self._tokens.items() if request_id not in running)
        if 2 * num_ended <= self._tokens.total():
            return
        kept = [step.of(running) for step in self._kept]
        self.forget()
        self._kept = [step for step in kept if step.token_ids]
        self._tokens.update(request_id for step in self._kept for request_id in step.request_ids)
        self.num_bytes = sum(step.num_bytes for step in self._kept)

    def _states(
        self, num_tokens: int, hidden_states: torch.Tensor, aux_hidden_states: list[torch.Tensor] | None
    ) -> list[torch.Tensor]:
        """Parts [N, ...] of what the drafter reads of the policy, as `propose_draft_token_ids` puts it together."""
        if not self._reads_states:
            return []
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
        # By row; within one the order of the steps is that of the positions.
        order = rows_T.argsort(stable=True)
        order = order[rows_T[order] >= 0]
        if len(order) == 0:
            return
        rows_T, positions_T, tokens_T = rows_T[order], positions_T[order], tokens_T[order]
        if self._reads_states:
            states_TH = torch.cat([torch.cat(step.states, -1) for step in kept])[order]
            # `propose` moves the tokens of a row one to the front and puts the last one behind them.
            read_T = tokens_T.roll(1)
        else:
            # It leaves them where they are and puts one more behind them; the first is read a second time.
            states_TH = None
            read_T = self._runner.input_batch.token_ids_cpu_tensor[rows_T.cpu(), positions_T.cpu()].to(device)
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
        drafter.propose(
            num_speculative_tokens=0,
            target_token_ids=read_T,
            target_positions=positions_T,
            target_hidden_states=states_TH,
            next_token_ids=tokens_T[ends - 1],
            token_indices_to_sample=None,
            common_attn_metadata=metadata,
            sampling_metadata=sampling_metadata,
        )
