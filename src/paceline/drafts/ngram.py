"""Prompt look-up: proposes what followed the last n-gram when it occurred before. No weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from paceline.drafts.base import Proposal
from paceline.errors import PublishError


def lookup(token_ids: Sequence[int], num_draft_tokens: int, min_ngram: int, max_ngram: int) -> list[int]:
    """Up to `num_draft_tokens` ids that followed an earlier occurrence of the text's own last n-gram.

    The longest n-gram in `min_ngram`..`max_ngram` that occurred before wins, and of its occurrences the earliest, which
    has the most text after it. Prompt look-up decoding (github.com/apoorvumang/prompt-lookup-decoding) with the
    tie rule of vLLM's `ngram` method. Example: `lookup([1, 2, 3, 1, 2], 2, 1, 2) == [3, 1]`.
    """
    ids = list(token_ids)
    for size in range(min(max_ngram, len(ids) - 1), min_ngram - 1, -1):
        tail = ids[-size:]
        for start in range(len(ids) - size):
            if ids[start : start + size] == tail:
                return ids[start + size : start + size + num_draft_tokens]
    return []


class NgramDrafter:
    """`lookup` for every row. Deterministic: q is one-hot."""

    aux_layers: tuple[int, ...] = ()

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self.min_ngram = min_ngram
        self.max_ngram = max_ngram

    def propose(
        self,
        token_ids: Sequence[Sequence[int]],
        num_draft_tokens: Sequence[int],
        hidden: Sequence[torch.Tensor] | None,
        generators: Sequence[torch.Generator],
    ) -> Proposal:
        """See `Drafter.propose`; `hidden` and `generators` are not looked at."""
        rows = zip(token_ids, num_draft_tokens, strict=True)
        return Proposal([lookup(ids, k, self.min_ngram, self.max_ngram) for ids, k in rows], None)

    def load(self, draft: Mapping[str, torch.Tensor]) -> None:
        """Always raises `PublishError`: there are no weights."""
        raise PublishError(
            f"A draft with {len(draft)} tensors was published, but draft.method = 'ngram' has no weights."
        )
