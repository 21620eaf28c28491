"""Drafts of the policy's own MTP layer for the reference engine: exact, slow, everything computed in each call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from transformers import PreTrainedModel

from paceline.drafts.base import Proposal
from paceline.errors import EngineError, PublishError
from paceline.models.eagle3 import greedy_draft
from paceline.models.mtp import MtpHead


class MtpDrafter:
    """Greedy drafts: q is one-hot. Reads the policy's weights, its MTP layer among them, as they are at each call."""

    def __init__(self, policy: PreTrainedModel) -> None:
        """Raises `ModelError` for a policy without an MTP layer."""
        self.head = MtpHead(policy)
        self.aux_layers: tuple[int, ...] = self.head.aux_layers
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
            raise EngineError(f"mtp drafts need the policy's states at layer {self.aux_layers[0]}: got none.")
        drafted = []
        for ids, k, states in zip(token_ids, num_draft_tokens, hidden, strict=True):
            row = torch.tensor(list(ids), dtype=torch.long, device=states.device)
            drafted.append(greedy_draft(self.head, self._policy, states, row, k)[0].tolist())
        return Proposal(drafted, None)

    def load(self, draft: Mapping[str, torch.Tensor]) -> None:
        """Always raises `PublishError`: the layer is published with the policy that it belongs to."""
        raise PublishError(
            f'A draft with {len(draft)} tensors was published, but with draft.method = "mtp" the draft is part of the '
            "policy: publish the policy's tensors, which bring it."
        )
