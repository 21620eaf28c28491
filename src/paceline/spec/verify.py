"""One verify step: keep the drafted tokens that the policy would have sampled, and say so in three lines.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", arXiv:2211.17192, algorithm 1:
accept a drafted token with probability min(1, target / draft); at the first rejection draw from
norm(max(0, target - draft)) and stop; after K acceptances draw one more token from the target.

Shapes: B sequences, K draft slots, V vocabulary. `target_probs` has K+1 rows: row j is the policy's sampling
distribution given the first j drafted tokens. A drafted id of -1 means "nothing was drafted here": it is rejected
before anything is looked up, and the slot is drawn from the policy itself. So a sequence with fewer drafts is padded
with -1, and its bonus token is the draw at its first -1. Rows behind that slot change nothing and may hold anything.

Exact only when, given the context, each drafted token was drawn from the `draft_probs` handed in (after the draft's own
temperature and filters), the uniforms are independent of the noise that drew the drafts, and -1 does not depend on the
value of a sampled draft token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.spec.sampling import draw_uniforms, sample_with
from paceline.types import Block

NO_TOKEN = -1
"""Placeholder in `draft_tokens` (nothing drafted) and in `VerifyResult.tokens_BK1` (nothing committed)."""


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """What a verify step committed. Example, K = 2: `num_accepted_B = [1]`, `tokens_BK1 = [[5, 8, -1]]`."""

    num_accepted_B: torch.Tensor
    """[B] accepted drafted tokens, 0..K."""
    tokens_BK1: torch.Tensor
    """[B, K+1] `num_accepted` accepted tokens, one recovered or bonus token, then -1."""


def acceptance_probs(
    target_probs: torch.Tensor, draft_probs: torch.Tensor | None, draft_tokens: torch.Tensor
) -> torch.Tensor:
    """Probability [...] of accepting each drafted token: min(1, target / draft), 0 for a placeholder.

    Args:
        target_probs: [..., V].
        draft_probs: [..., V], or None for a deterministic draft (one-hot on the drafted token).
        draft_tokens: [...] ids, -1 for a placeholder.

    A drafted token to which the draft itself gives no mass cannot have been drawn from it and is rejected, as in vLLM.
    """
    index = draft_tokens.clamp_min(0).unsqueeze(-1)
    target = target_probs.gather(-1, index).squeeze(-1)
    if draft_probs is None:
        ratio = target
    else:
        draft = draft_probs.gather(-1, index).squeeze(-1)
        ratio = torch.where(draft > 0, target / torch.where(draft > 0, draft, 1.0), 0.0)
    return torch.where(draft_tokens >= 0, ratio.clamp(max=1.0), 0.0)


def residual_probs(
    target_probs: torch.Tensor, draft_probs: torch.Tensor | None, draft_tokens: torch.Tensor
) -> torch.Tensor:
    """Distribution [..., V] of the token at a slot whose draft was rejected: norm(max(0, target - draft)).

    For a deterministic draft that is the target without the drafted token, renormalised; for a placeholder it is the
    target. When target and draft agree nothing is left over, but then nothing can be rejected: the target is returned
    so that the row stays a distribution. Arguments as in `acceptance_probs`.
    """
    drafted = (draft_tokens >= 0).unsqueeze(-1)
    if draft_probs is None:
        rest = target_probs.scatter(-1, draft_tokens.clamp_min(0).unsqueeze(-1), 0.0)
    else:
        rest = (target_probs - draft_probs).clamp_min(0.0)
    mass = rest.sum(-1, keepdim=True)
    return torch.where(drafted & (mass > 0), rest / torch.where(mass > 0, mass, 1.0), target_probs)


def verify_chain(
    target_probs: torch.Tensor,
    draft_token_ids: Sequence[int],
    draft_probs: torch.Tensor | None,
    uniforms: torch.Tensor | Sequence[float],
) -> Block:
    """One sequence, one step, in plain words: the twin that `verify` is compared with.

    Args:
        target_probs: [K+1, V].
        draft_token_ids: [K].
        draft_probs: [K, V], or None for a deterministic draft.
        uniforms: [K+1] in [0, 1): the first K decide on acceptance, the last one draws the recovered or bonus token
            (a step draws exactly one).

    Returns:
        The block. Its drafts end before the first placeholder: nothing behind it stood in this step.
    """
    stood = _before_placeholder(draft_token_ids)
    committed: list[int] = []
    for slot, token in enumerate(stood):
        row, draft_row = target_probs[slot], None if draft_probs is None else draft_probs[slot]
        accept = float(acceptance_probs(row, draft_row, torch.tensor(token)))
        # Strictly below: noise of exactly 0 must not accept a token of probability 0.
        if not float(uniforms[slot]) < accept:
            final_probs = residual_probs(row, draft_row, torch.tensor(token))
            break
        committed.append(token)
    else:
        final_probs = target_probs[len(stood)]
    last = int(sample_with(final_probs.unsqueeze(0), torch.tensor([float(uniforms[-1])], dtype=torch.float64)))
    return Block(draft_token_ids=stood, num_accepted=len(committed), token_ids=(*committed, last))


def verify(
    target_probs_BKV: torch.Tensor,
    draft_tokens_BK: torch.Tensor,
    draft_probs_BKV: torch.Tensor | None = None,
    *,
    uniforms_BK1: torch.Tensor | None = None,
    generators: torch.Generator | Sequence[torch.Generator] | None = None,
) -> VerifyResult:
    """One verify step for a batch.

    Args:
        target_probs_BKV: [B, K+1, V].
        draft_tokens_BK: [B, K] int64, -1 where nothing was drafted (rows may differ in their number of drafts).
        draft_probs_BKV: [B, K, V], or None when every draft is deterministic.
        uniforms_BK1: [B, K+1] in [0, 1), used as in `verify_chain`; or
        generators: one in all or one per sequence, never the ones that drew the drafts from the same state.

    Raises:
        ValueError: shapes that do not fit, an id outside the vocabulary, neither or both kinds of noise.
    """
    num_rows, num_slots = draft_tokens_BK.shape
    _check_shapes(target_probs_BKV, draft_tokens_BK, draft_probs_BKV)
    if (uniforms_BK1 is None) == (generators is None):
        raise ValueError("verify needs exactly one of uniforms_BK1 and generators.")
    if generators is not None:
        uniforms_BK1 = draw_uniforms(generators, num_rows, num_slots + 1, device=str(target_probs_BKV.device))

    assert uniforms_BK1 is not None
    accept_BK = uniforms_BK1[:, :num_slots] < acceptance_probs(
        target_probs_BKV[:, :num_slots], draft_probs_BKV, draft_tokens_BK
    )
    num_accepted_B = accept_BK.long().cumprod(1).sum(1)

    # The slot after the accepted ones: rejected, placeholder, or bonus. A bonus slot is one where nothing was drafted.
    drafts_BK1 = torch.nn.functional.pad(draft_tokens_BK, (0, 1), value=NO_TOKEN)
    rows_B = torch.arange(num_rows, device=draft_tokens_BK.device)
    draft_probs_BV = None
    if draft_probs_BKV is not None and num_slots > 0:
        draft_probs_BV = draft_probs_BKV[rows_B, num_accepted_B.clamp(max=num_slots - 1)]
    final_probs_BV = residual_probs(
        target_probs_BKV[rows_B, num_accepted_B], draft_probs_BV, drafts_BK1[rows_B, num_accepted_B]
    )
    final_B = sample_with(final_probs_BV, uniforms_BK1[:, -1])

    slots_K1 = torch.arange(num_slots + 1, device=draft_tokens_BK.device)
    tokens_BK1 = torch.where(slots_K1 < num_accepted_B.unsqueeze(1), drafts_BK1, NO_TOKEN)
    tokens_BK1[rows_B, num_accepted_B] = final_B.to(tokens_BK1.dtype)
    return VerifyResult(num_accepted_B, tokens_BK1)


def to_blocks(draft_tokens_BK: torch.Tensor, result: VerifyResult, live_batch: int = 0) -> list[Block]:
    """[B] the step as records, one per sequence; a sequence without drafts gives a plain decode block."""
    rows = zip(draft_tokens_BK.tolist(), result.num_accepted_B.tolist(), result.tokens_BK1.tolist(), strict=True)
    return [
        Block(_before_placeholder(drafts), accepted, tuple(tokens[: accepted + 1]), live_batch)
        for drafts, accepted, tokens in rows
    ]


def _before_placeholder(draft_token_ids: Sequence[int]) -> tuple[int, ...]:
    ids = tuple(int(token) for token in draft_token_ids)
    return next((ids[:slot] for slot, token in enumerate(ids) if token < 0), ids)


def _check_shapes(
    target_probs_BKV: torch.Tensor, draft_tokens_BK: torch.Tensor, draft_probs_BKV: torch.Tensor | None
) -> None:
    num_rows, num_slots = draft_tokens_BK.shape
    vocab_size = target_probs_BKV.shape[-1]
    if target_probs_BKV.shape != (num_rows, num_slots + 1, vocab_size):
        raise ValueError(
            f"target_probs {tuple(target_probs_BKV.shape)} does not fit draft_tokens {(num_rows, num_slots)}: "
            f"it needs one row per draft slot and one for the bonus token, {(num_rows, num_slots + 1, vocab_size)}."
        )
    if draft_probs_BKV is not None and draft_probs_BKV.shape != (num_rows, num_slots, vocab_size):
        raise ValueError(
            f"draft_probs {tuple(draft_probs_BKV.shape)} must be {(num_rows, num_slots, vocab_size)}; "
            "a draft with a reduced vocabulary is mapped to the full one first."
        )
    if draft_tokens_BK.numel() and int(draft_tokens_BK.max()) >= vocab_size:
        raise ValueError(f"drafted id {int(draft_tokens_BK.max())} is outside the vocabulary of {vocab_size}.")
