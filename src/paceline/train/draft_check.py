"""What the trainer's copy of the draft would have proposed at the first slot of every block of some rollouts.

The engine drafts the first token of a block from a *root*, the last position that the policy had computed, and from the
token behind it (`models.eagle3` and `models.mtp` define the alignment). `Completion.blocks` tells where every block
began, so that one pass of the head over the features of a whole completion gives its first draft at all of them.
`spec.draft_alarm` judges what comes out.

Shapes: B completions, T positions, R roots, N blocks, H hidden size, V policy vocabulary, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from paceline.models.eagle3 import DraftHead, embed, policy_parts
from paceline.spec.draft_alarm import DraftEvidence
from paceline.spec.sampling import policy_log_probs
from paceline.train.draft import LOGITS_ELEMENTS, Answer, Features, collate
from paceline.types import Completion, Sampling

NEAR_TIE = 0.25
"""Logits this close count as one: an engine in bfloat16 may take the other. The trainer's copy works in float32."""


@dataclass(frozen=True, slots=True)
class _FirstSlot:
    """Slot 0 of one block. `root` + 2 is the position of the token that stands there."""

    row: int
    root: int
    token_id: int
    """What the engine drafted."""
    accepted: bool


@torch.no_grad()
def first_slot_evidence(
    policy: PreTrainedModel,
    head: DraftHead,
    features: Sequence[Features],
    completions: Sequence[Completion],
    sampling: Sampling,
) -> DraftEvidence:
    """Compare the first slot of every block with the trainer's copy of the draft. Nothing is kept for backward.

    Args:
        policy: the weights that sampled; its embedding and output rows are read.
        head: the trainer's copy of the draft, at the version that the engine drafted with.
        features: of prompt and response of each completion, from `train.draft.policy_features` or a `FeatureReader`
            that watched another forward pass of the same weights. A few completions of a step are enough; choose them
            before they are sampled, for example by their place among the requests.
        completions: [B] in the same order. Blocks without a draft are passed over.
        sampling: as the tokens were sampled; it decides the predicted acceptance.

    Raises ValueError when features and completion are not of the same response.
    """
    evidence = DraftEvidence()
    slots = [
        slot
        for row, (feature, completion) in enumerate(zip(features, completions, strict=True))
        for slot in _first_slots(row, feature.answer, completion)
    ]
    if not slots:
        return evidence
    batch = collate(features, 0)
    device = batch.aux.device
    rows_N = torch.tensor([slot.row for slot in slots], device=device)
    roots_N = torch.tensor([slot.root for slot in slots], device=device)
    engine_ids_N = torch.tensor([slot.token_id for slot in slots], device=device)
    outputs_BRH = head(
        head.project(batch.at_depth(batch.aux, 0)),
        embed(policy, batch.at_depth(batch.token_ids, 1)).float(),
        batch.at_depth(batch.positions, 0),
        batch.memory(),
    )
    outputs_NH = outputs_BRH[rows_N, roots_N]
    final_NH = batch.final[rows_N, roots_N + 1]

    output = policy_parts(policy).output
    vocab_size = output.weight.shape[0]
    draft_ids_W = head.draft_ids.to(device)
    index_V = torch.full((vocab_size,), -1, device=device)
    index_V[draft_ids_W] = torch.arange(len(draft_ids_W), device=device)
    num_rows = max(1, LOGITS_ELEMENTS // vocab_size)
    probs: list[float] = []
    agreed: list[bool] = []
    for outputs, final, engine_ids in zip(
        outputs_NH.split(num_rows), final_NH.split(num_rows), engine_ids_N.split(num_rows), strict=True
    ):
        logits_NW = head.logits(outputs)
        best_N, choice_N = logits_NW.max(-1)
        # What the trainer's copy cannot draft at all is never a near-tie.
        known_N = engine_ids < vocab_size
        index_N = torch.where(known_N, index_V[engine_ids.clamp_max(vocab_size - 1)], -1)
        theirs_N = logits_NW.gather(1, index_N.clamp_min(0).unsqueeze(1)).squeeze(1)
        agreed += ((index_N >= 0) & (theirs_N >= best_N - NEAR_TIE)).tolist()
        log_probs_NV = policy_log_probs(output(final.to(output.weight.dtype)), sampling)
        ours_N1 = draft_ids_W[choice_N].unsqueeze(1)
        probs += log_probs_NV.gather(1, ours_N1).squeeze(1).exp().clamp(0.0, 1.0).tolist()
    for slot, probability, agrees in zip(slots, probs, agreed, strict=True):
        evidence.add(probability, slot.accepted, agrees)
    return evidence


def _first_slots(row: int, answer: Answer, completion: Completion) -> Iterator[_FirstSlot]:
    """Slot 0 of each block with a draft. All that selects one is known before its verdict."""
    if answer.token_ids[answer.prompt_length :] != completion.token_ids:
        raise ValueError(
            f"features of another response than that of sample {completion.sample} of prompt {completion.prompt_id}"
        )
    position = answer.prompt_length
    for block in completion.blocks:
        # A prompt of one token has no root in front of it. A placeholder (an id below 0) is no draft.
        if block.draft_token_ids and block.draft_token_ids[0] >= 0 and position >= 2:
            yield _FirstSlot(row, position - 2, block.draft_token_ids[0], accepted=block.num_accepted > 0)
        position += len(block.token_ids)
