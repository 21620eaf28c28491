"""Drafts of the policy's own MTP layer for the reference engine."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from paceline.drafts.eagle3 import HeadDrafter
from paceline.errors import PublishError
from paceline.models.mtp import MtpHead


class MtpDrafter(HeadDrafter[MtpHead]):
    """Reads the policy's weights, its MTP layer among them, as they are at each call."""

    def __init__(self, policy: PreTrainedModel) -> None:
        """Raises `ModelError` for a policy without an MTP layer."""
        super().__init__(MtpHead(policy), policy)

    def load(self, draft: Mapping[str, torch.Tensor]) -> None:
        """Always raises `PublishError`: the layer is published with the policy that it belongs to."""
        raise PublishError(
            f'A draft with {len(draft)} tensors was published, but with draft.method = "mtp" the draft is part of the '
            "policy: publish the policy's tensors, which bring it."
        )
