"""The protocol of everything that proposes tokens to the reference engine.

B rows, n tokens of a row so far (prompt and response), K draft tokens asked for, V vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafted tokens. Example, two rows: `Proposal(token_ids=[[5, 6, 7], []], probs=None)`."""

    token_ids: list[list[int]]
    """[B] lists of 0..K ids; a row may get fewer than asked for."""
    probs: list[torch.Tensor] | None
    """[B] tensors [len(token_ids[i]), V] that the ids were *sampled* from; None: the ids are deterministic (q one-hot).

    The law of what is sampled is exact only if this is the distribution that really produced the ids.
    """


class Drafter(Protocol):
    """Proposes what may come next. What it proposes changes the speed, never the law, of what is sampled."""

    aux_layers: tuple[int, ...]
    """Policy layers whose *input* residual stream `propose` wants; empty: none."""

    def propose(
        self,
        token_ids: Sequence[Sequence[int]],
        num_draft_tokens: Sequence[int],
        hidden: Sequence[torch.Tensor] | None,
        generators: Sequence[torch.Generator],
    ) -> Proposal:
        """Propose up to `num_draft_tokens[i]` tokens to follow `token_ids[i]` (n ids).

        `hidden[i]` [n - 1, len(aux_layers) * H]: the policy's states at positions 0..n-2 (the last token has not been
        through the policy yet); None without `aux_layers`. `generators[i]` belongs to row i alone, so that what a row
        gets does not depend on its neighbours.
        """
        ...

    def load(self, draft: Mapping[str, torch.Tensor]) -> None:
        """Replace the draft's weights by published ones and check every copy.

        Raises `PublishError` that names what does not fit; for a method without weights that is all of it.
        """
        ...
