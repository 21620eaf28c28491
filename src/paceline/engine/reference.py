"""The reference engine: small, slow, exact, torch only. It is the executable definition of a rollout.

Requests are decoded together, up to `max_num_seqs` at a time; a free place is taken by the next request at once. One
engine step is: the drafter proposes, one policy pass scores the last token and the drafts, `spec.verify` decides.

B rows (requests in flight), K draft tokens, Q = K + 1 queries per row, L cache slots, n tokens of a row so far,
V vocabulary, A auxiliary layers, H hidden size.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from paceline.drafts.base import Drafter, Proposal
from paceline.drafts.history import HistoryDrafter
from paceline.drafts.mtp import MtpDrafter
from paceline.engine.base import EngineStep, Rollouts, check_draft_limit
from paceline.engine.clock import EngineClock
from paceline.engine.publish import PublishLog, PublishReport, Weights, checksum, digest_of, gather, kind
from paceline.errors import EngineError, PublishError
from paceline.models.eagle3 import AuxCapture
from paceline.models.weights import policy_tensors, publish_tensors
from paceline.spec.sampling import draw_uniforms, policy_log_probs
from paceline.spec.stats import engine_stats
from paceline.spec.verify import NO_TOKEN, to_blocks, verify
from paceline.types import Block, Completion, Request, Sampling, Versions


@dataclass(slots=True)
class _Row:
    """A request in flight. All but the last of `token_ids` have been through the policy."""

    index: int
    request: Request
    token_ids: list[int]
    generator: torch.Generator
    blocks: list[Block] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def response_ids(self) -> list[int]:
        return self.token_ids[len(self.request.prompt.token_ids) :]


class _RowCache(Cache):
    """Keys and values in one slot per (row, position), written where they belong.

    Nothing is cropped after a rejection: a query at position s sees the slots 0..s of its row, all of which hold tokens
    that were committed or stand in this very step, and a rejected token's slot is overwritten before any query reaches
    it. Rows of different length need no padding in the cache for the same reason.
    """

    def __init__(self, num_rows: int, num_slots: int) -> None:
        super().__init__(layers=[])
        self.shape = (num_rows, num_slots)
        self.keys: dict[int, torch.Tensor] = {}
        """Layer -> [rows, L, heads, head size]."""
        self.values: dict[int, torch.Tensor] = {}
        self.rows = slice(0, 0)
        self.slots_BQ = torch.empty(0, 0, dtype=torch.long)

    def aim(self, rows: slice, slots_BQ: torch.Tensor) -> None:
        """The next forward pass is of these rows and writes these slots."""
        self.rows = rows
        self.slots_BQ = slots_BQ
        self._length = int(slots_BQ.max()) + 1

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, heads, Q, size] of this pass -> [B, heads, length, size] of all slots up to the last one written."""
        seen = []
        for store, states in ((self.keys, key_states), (self.values, value_states)):
            if layer_idx not in store:
                store[layer_idx] = states.new_zeros(*self.shape, states.shape[1], states.shape[3])
            rows = store[layer_idx][self.rows]
            rows[torch.arange(rows.shape[0]).unsqueeze(1), self.slots_BQ] = states.transpose(1, 2)
            seen.append(rows[:, : self._length].transpose(1, 2))
        return seen[0], seen[1]

    def move(self, source: int, target: int) -> None:
        for store in (*self.keys.values(), *self.values.values()):
            store[target] = store[source]


class ReferenceEngine:
    """Satisfies `RolloutEngine`. Speculates with any `Drafter`; without one it is plain decoding.

    Results do not depend on who shares the batch, up to the rounding of matrix products: each request draws from its
    own generator, seeded by `Request.seed`, the same number of uniforms in every step.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        drafter: Drafter | None = None,
        *,
        num_draft_tokens: int = 0,
        max_num_seqs: int = 64,
        max_model_len: int | None = None,
        versions: Versions | None = None,
    ) -> None:
        """`model` belongs to the engine from now on (`publish` writes into it); its dtype is that of the engine.

        `max_model_len` (tokens, default: the model's positions) bounds prompt and response together. Raises
        `EngineError` for a model with sliding-window attention, which the cache does not implement.
        """
        config = model.config.to_dict()
        limit = config["max_position_embeddings"]
        self.max_model_len = limit if max_model_len is None else min(max_model_len, limit)
        window = config.get("sliding_window")
        if window is not None and window < self.max_model_len:
            raise EngineError(
                f"The policy attends within a sliding window of {window} tokens; the reference engine has full "
                f"attention only. Use engine.kind = 'vllm', or keep prompt and response within {window} tokens."
            )
        self.model = model.eval()
        self.drafter = drafter
        self.num_draft_tokens = num_draft_tokens if drafter is not None else 0
        self._draft_limit = self.num_draft_tokens
        self._choose_drafts: Callable[[int], int] | None = None
        self._clock = EngineClock()
        self._history = drafter.index if isinstance(drafter, HistoryDrafter) else None
        self.max_num_seqs = max_num_seqs
        self.versions = versions or Versions(policy=0)
        self._logs = {
            "policy": PublishLog("policy", self.versions.policy),
            "draft": PublishLog("draft", self.versions.draft),
        }

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Rollouts:
        """See `RolloutEngine.generate`. The log-probability of every token is reported.

        Raises `EngineError` for an empty prompt, or one that leaves no room for a token.
        """
        start = time.perf_counter()
        self._clock.start()
        self._check(requests)
        if self._history is not None:
            self._history.start_call(request.prompt.token_ids for request in requests)
        waiting = deque(enumerate(requests))
        num_rows = min(self.max_num_seqs, len(requests))
        longest = max((len(request.prompt.token_ids) for request in requests), default=0)
        num_slots = min(longest + sampling.max_tokens, self.max_model_len) + self.num_draft_tokens + 1
        cache = _RowCache(num_rows, num_slots)
        aux_states = self._new_aux_states(num_rows, num_slots)
        rows: list[_Row] = []
        done: dict[int, Completion] = {}
        live_batch: list[tuple[float, int]] = []
        steps: list[EngineStep] = []
        ended_s, ended_cpu_s = start, time.process_time()
        while waiting or rows:
            admitted = [
                _Row(index, request, list(request.prompt.token_ids), torch.Generator().manual_seed(request.seed))
                for index, request in (waiting.popleft() for _ in range(min(len(waiting), num_rows - len(rows))))
            ]
            self._prefill(cache, aux_states, len(rows), admitted)
            rows += admitted
            if not live_batch or live_batch[-1][1] != len(rows):
                live_batch.append((time.perf_counter() - start, len(rows)))
            num_asked = self._num_asked(len(rows))
            self._step(cache, aux_states, rows, sampling, num_asked)
            began_s, began_cpu_s, ended_s, ended_cpu_s = ended_s, ended_cpu_s, time.perf_counter(), time.process_time()
            steps.append(EngineStep(ended_s - began_s, ended_cpu_s - began_cpu_s, len(rows), num_asked))
            for place in reversed(range(len(rows))):
                completion = self._finished(rows[place], sampling)
                if completion is None:
                    continue
                done[rows[place].index] = completion
                if self._history is not None:
                    self._history.finish(rows[place].request.prompt.token_ids, completion.token_ids)
                # The last row fills the gap, so that rows in flight stay one slice of the cache.
                last = len(rows) - 1
                if place < last:
                    cache.move(last, place)
                    if aux_states is not None:
                        aux_states[place] = aux_states[last]
                    rows[place] = rows[last]
                rows.pop()
        live_batch.append((time.perf_counter() - start, 0))
        completions = tuple(done[index] for index in range(len(requests)))
        blocks = [block for completion in completions for block in completion.blocks]
        stats = engine_stats(blocks, len(steps), live_batch)
        return Rollouts(completions, stats, time.perf_counter() - start, tuple(steps), self._clock.seconds)

    def publish(self, policy: Weights, versions: Versions) -> PublishReport:
        """See `RolloutEngine.publish`. Chunks are gathered first: nothing is changed unless all tensors fit."""

        def load(tensors: Mapping[str, torch.Tensor]) -> None:
            publish_tensors(policy_tensors(self.model), tensors, "policy")

        # A policy's own layer came with it.
        draft = versions.draft if isinstance(self.drafter, MtpDrafter) else self.versions.draft
        return self._take_in("policy", policy, versions.policy, load, Versions(policy=versions.policy, draft=draft))

    def publish_draft(self, draft: Weights, versions: Versions) -> PublishReport:
        """See `RolloutEngine.publish_draft`."""
        if self.drafter is None:
            raise PublishError("A draft was published to an engine without a draft: choose draft.method.")
        held = Versions(policy=self.versions.policy, draft=versions.draft)
        return self._take_in("draft", draft, versions.draft, self.drafter.load, held)

    def forget_versions(self) -> None:
        """See `RolloutEngine.forget_versions`."""
        for log in self._logs.values():
            log.forget()

    def limit_drafts(self, num_draft_tokens: int) -> None:
        """See `RolloutEngine.limit_drafts`."""
        check_draft_limit(num_draft_tokens, self.num_draft_tokens)
        self._draft_limit = num_draft_tokens

    def choose_drafts(self, choose: Callable[[int], int] | None) -> None:
        """See `RolloutEngine.choose_drafts`."""
        self._choose_drafts = choose

    def close(self) -> None:
        """Nothing to give back but memory, which goes with the object."""

    def _take_in(
        self,
        what: str,
        weights: Weights,
        version: int,
        load: Callable[[Mapping[str, torch.Tensor]], None],
        held: Versions,
    ) -> PublishReport:
        began = time.perf_counter()
        log = self._logs[what]
        log.check_version(version)
        tensors = gather(what, weights)
        checksums = {name: checksum(tensor) for name, tensor in tensors.items()}
        log.check_content(version, checksums)
        load(tensors)
        log.record(version, checksums)
        self.versions = held
        return PublishReport(
            versions=held,
            tensors=len(tensors),
            bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()),
            checksums=checksums,
            digest=digest_of(checksums, {name: kind(tensor) for name, tensor in tensors.items()}),
            seconds=time.perf_counter() - began,
        )

    def _check(self, requests: Sequence[Request]) -> None:
        for request in requests:
            length = len(request.prompt.token_ids)
            if not 0 < length < self.max_model_len:
                raise EngineError(
                    f"Prompt {request.prompt.id} has {length} tokens; it needs at least 1 and must leave room for a "
                    f"response within the policy's {self.max_model_len} positions. Shorten it, or leave it out."
                )

    def _new_aux_states(self, num_rows: int, num_slots: int) -> torch.Tensor | None:
        if self.drafter is None or not self.drafter.aux_layers:
            return None
        size = len(self.drafter.aux_layers) * self.model.config.hidden_size
        return torch.zeros(num_rows, num_slots, size, dtype=self.model.dtype, device=self.model.device)

    def _prefill(self, cache: _RowCache, aux_states: torch.Tensor | None, first: int, admitted: Sequence[_Row]) -> None:
        """All prompt tokens but the last, which is the first query of the row's first step."""
        width = max((len(row.token_ids) for row in admitted), default=0) - 1
        if width < 1:
            return
        ids_BQ = torch.zeros(len(admitted), width, dtype=torch.long)
        for place, row in enumerate(admitted):
            ids = row.token_ids[:-1]
            ids_BQ[place, : len(ids)] = torch.tensor(ids, dtype=torch.long)
        slots_BQ = torch.arange(width).expand(len(admitted), width)
        with self._clock.part("verify"):
            self._forward(cache, aux_states, slice(first, first + len(admitted)), ids_BQ, slots_BQ, logits_to_keep=1)

    def _num_asked(self, live: int) -> int:
        """k of the next step."""
        if self._history is not None and not self._history.can_draft:
            return 0
        if self._choose_drafts is None or self._draft_limit == 0:
            return self._draft_limit
        return min(self._draft_limit, self._choose_drafts(live))

    def _step(
        self,
        cache: _RowCache,
        aux_states: torch.Tensor | None,
        rows: Sequence[_Row],
        sampling: Sampling,
        num_asked: int,
    ) -> None:
        """One verify step of all rows: every row gets a block and its tokens, cut at the first stop token."""
        # One token of the room is for the recovered or bonus token, which every step commits.
        asked = [min(num_asked, self._room(row, sampling) - 1) for row in rows]
        with self._clock.part("draft"):
            proposal = self._propose(aux_states, rows, asked)
        width = max(len(ids) for ids in proposal.token_ids)
        drafts_BK = torch.full((len(rows), width), NO_TOKEN)
        for place, ids in enumerate(proposal.token_ids):
            drafts_BK[place, : len(ids)] = torch.tensor(ids, dtype=torch.long)
        last_B1 = torch.tensor([[row.token_ids[-1]] for row in rows])
        first_slot_B1 = torch.tensor([[len(row.token_ids) - 1] for row in rows])
        # A row with fewer drafts runs some meaningless queries behind its own; nothing ever reads what they write.
        queries_BQ = torch.cat([last_B1, drafts_BK.clamp_min(0)], 1)
        slots_BQ = first_slot_B1 + torch.arange(width + 1)
        with self._clock.part("verify"):
            logits_BQV = self._forward(cache, aux_states, slice(0, len(rows)), queries_BQ, slots_BQ).cpu()
        with self._clock.part("sample"):
            self._sample(logits_BQV, proposal, drafts_BK, rows, sampling, asked)

    def _sample(
        self,
        logits_BQV: torch.Tensor,
        proposal: Proposal,
        drafts_BK: torch.Tensor,
        rows: Sequence[_Row],
        sampling: Sampling,
        asked: Sequence[int],
    ) -> None:
        """Every row gets a block and its tokens."""
        width = drafts_BK.shape[1]
        log_probs_BQV = policy_log_probs(logits_BQV, sampling)
        # Always the noise of a full block: what a row draws must not depend on the drafts of its neighbours.
        uniforms = draw_uniforms([row.generator for row in rows], len(rows), self.num_draft_tokens + 1)
        result = verify(
            log_probs_BQV.exp(),
            drafts_BK,
            _padded_probs(proposal, width),
            uniforms_BK1=torch.cat([uniforms[:, :width], uniforms[:, -1:]], 1),
        )
        for place, block in enumerate(to_blocks(drafts_BK, result, live_batch=len(rows))):
            row = rows[place]
            row.blocks.append(replace(block, num_asked=asked[place]))
            for slot, token in enumerate(block.token_ids):
                row.token_ids.append(token)
                row.logprobs.append(float(log_probs_BQV[place, slot, token]))
                if token in sampling.stop_token_ids:
                    break

    def _propose(self, aux_states: torch.Tensor | None, rows: Sequence[_Row], asked: Sequence[int]) -> Proposal:
        if self.drafter is None or not any(asked):
            return Proposal([[] for _ in rows], None)
        hidden = None
        if aux_states is not None:
            hidden = [aux_states[place, : len(row.token_ids) - 1] for place, row in enumerate(rows)]
        if isinstance(self.drafter, HistoryDrafter):
            self.drafter.aim([row.request.prompt.token_ids for row in rows])
        proposal = self.drafter.propose([row.token_ids for row in rows], asked, hidden, [row.generator for row in rows])
        for row, ids, limit in zip(rows, proposal.token_ids, asked, strict=True):
            if len(ids) > limit:
                raise EngineError(
                    f"The drafter proposed {len(ids)} tokens for prompt {row.request.prompt.id} where {limit} were "
                    "asked for. Its propose has to cut them."
                )
        return proposal

    def _room(self, row: _Row, sampling: Sampling) -> int:
        """Tokens that may still be committed: up to the response limit and to the last position."""
        return min(sampling.max_tokens - len(row.response_ids), self.max_model_len - len(row.token_ids))

    def _finished(self, row: _Row, sampling: Sampling) -> Completion | None:
        stopped = row.token_ids[-1] in sampling.stop_token_ids
        if not stopped and self._room(row, sampling) > 0:
            return None
        return Completion(
            prompt_id=row.request.prompt.id,
            sample=row.request.sample,
            token_ids=tuple(row.response_ids),
            finish_reason="stop" if stopped else "length",
            blocks=tuple(row.blocks),
            versions=self.versions,
            seed=row.request.seed,
            logprobs=tuple(row.logprobs),
        )

    def _forward(
        self,
        cache: _RowCache,
        aux_states: torch.Tensor | None,
        rows: slice,
        ids_BQ: torch.Tensor,
        slots_BQ: torch.Tensor,
        logits_to_keep: int = 0,
    ) -> torch.Tensor:
        """[B, Q, V] logits; keys, values and auxiliary states go to their slots."""
        device = self.model.device
        slots_BQ = slots_BQ.to(device)
        cache.aim(rows, slots_BQ)
        seen_BQL = torch.arange(int(slots_BQ.max()) + 1, device=device) <= slots_BQ.unsqueeze(-1)
        mask_B1QL = torch.zeros(seen_BQL.shape, dtype=self.model.dtype, device=device)
        mask_B1QL = mask_B1QL.masked_fill(~seen_BQL, -torch.inf).unsqueeze(1)
        arguments = {
            "input_ids": ids_BQ.to(device),
            "attention_mask": mask_B1QL,
            "position_ids": slots_BQ.clamp(max=self.max_model_len - 1),
            "past_key_values": cache,
            "use_cache": True,
            "logits_to_keep": logits_to_keep,
        }
        if self.drafter is None or aux_states is None:
            return self.model(**arguments).logits
        with AuxCapture(self.model, self.drafter.aux_layers) as capture:
            logits_BQV = self.model(**arguments).logits
            hidden_BQ = capture.hidden()
        view = aux_states[rows]
        view[torch.arange(view.shape[0], device=device).unsqueeze(1), slots_BQ] = hidden_BQ
        return logits_BQV


def _padded_probs(proposal: Proposal, width: int) -> torch.Tensor | None:
    """[B, K, V] of sampled drafts; rows behind a row's own drafts are never read."""
    if proposal.probs is None:
        return None
    vocab_size = proposal.probs[0].shape[-1]
    padded = torch.zeros(len(proposal.probs), width, vocab_size, dtype=torch.float64)
    for place, probs in enumerate(proposal.probs):
        padded[place, : probs.shape[0]] = probs
    return padded
