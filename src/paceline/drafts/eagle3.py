"""Drafts of a head with weights for the reference engine: exact, slow, everything computed again in each call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

import torch
from transformers import PreTrainedModel

from paceline.drafts.base import Proposal
from paceline.errors import EngineError
from paceline.models.eagle3 import DraftHead, Eagle3Head, greedy_draft
from paceline.models.weights import publish_tensors

Head = TypeVar("Head", bound=DraftHead)


class HeadDrafter(Generic[Head]):
    """Greedy drafts of a head: q is one-hot. Reads the policy's embedding as it is at each call."""

    def __init__(self, head: Head, policy: PreTrainedModel) -> None:
        self.head = head
        self.aux_layers: tuple[int, ...] = head.aux_layers
        self._policy = policy

    def propose(
        self,
        token_ids: Sequence[Sequence[int]],
        num_draft_tokens: Sequence[int],
        hidden: Sequence[torch.Tensor] | None,
        generators: Sequence[torch.Generator],
    ) -> Proposal:
        """See `Drafter.propose`; `generators` are not drawn from. Raises `EngineError` without hidden states."""
        if hidden is None:
            raise EngineError(f"the draft needs the policy's states at layers {list(self.aux_layers)}: got none.")
        dtype = next(self.head.parameters()).dtype
        drafted = []
        for ids, k, states in zip(token_ids, num_draft_tokens, hidden, strict=True):
            row = torch.tensor(list(ids), dtype=torch.long, device=states.device)
            drafted.append(greedy_draft(self.head, self._policy, states.to(dtype), row, k)[0].tolist())
        return Proposal(drafted, None)


class Eagle3Drafter(HeadDrafter[Eagle3Head]):
    """Of an `Eagle3Head`, which is published apart from the policy."""

    def load(self, draft: Mapping[str, torch.Tensor]) -> None:
        """See `Drafter.load`; the names are those of `Eagle3Head.export_state`."""
        live = {name: parameter.detach() for name, parameter in self.head.named_parameters()}
        positions = torch.arange(self.head.config.draft_vocab_size, device=self.head.draft_ids.device)
        if self.head.config.draft_vocab_size < self.head.config.vocab_size:
            live["d2t"] = self.head.draft_ids - positions
        publish_tensors(live, draft, "draft")
        if "d2t" in live:
            self.head.draft_ids.copy_(live["d2t"] + positions)
