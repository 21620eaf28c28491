"""The exact law of what a verify step commits, by enumeration over a small vocabulary.

A sampler is judged here by equality with the policy's own law, to rounding, and not by a chi-square: a fault of any
size shows. Everything is float64. Cost grows as V ** (K + 1): meant for V up to about 6 and K up to about 4.

A *context* is the tuple of response tokens so far. A `Conditional` maps a context to the distribution [V] of the next
token. A `Law` maps token sequences to probabilities; sequences of probability 0 are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from paceline.spec.verify import acceptance_probs, residual_probs

Context = tuple[int, ...]
Conditional = Callable[[Context], torch.Tensor]
Law = dict[tuple[int, ...], float]
ChainLaw = Callable[[torch.Tensor, tuple[int, ...], "torch.Tensor | None"], Law]


@dataclass(frozen=True, slots=True)
class Proposal:
    """One chain that the draft may propose. Example: `Proposal(0.25, (1, 0), draft_probs)` with draft_probs [2, V]."""

    probability: float
    """With which the draft proposes this chain."""
    draft_token_ids: tuple[int, ...]
    """[K] -1 where nothing is drafted."""
    draft_probs: torch.Tensor | None
    """[K, V] what the verifier is told about the draft; None says: deterministic."""


Proposer = Callable[[Context], Iterable[Proposal]]


def policy_law(target: Conditional, length: int, context: Context = ()) -> Law:
    """The law of the next `length` tokens when the policy decodes alone."""
    law: Law = {(): 1.0}
    for _ in range(length):
        law = {
            (*tokens, token): mass * p
            for tokens, mass in law.items()
            for token, p in enumerate(target(context + tokens).double().tolist())
            if p > 0
        }
    return law


def chain_law(target_probs: torch.Tensor, draft_token_ids: tuple[int, ...], draft_probs: torch.Tensor | None) -> Law:
    """The exact twin of `verify.verify_chain`: the law of the committed tokens, given the drafted ones.

    Args: target_probs [K+1, V], draft_token_ids [K], draft_probs [K, V] or None. Sequences of 1..K+1 tokens.
    """
    law: Law = {}
    reached = 1.0
    committed: tuple[int, ...] = ()
    for slot, token in enumerate(draft_token_ids):
        row = target_probs[slot].double()
        draft_row = None if draft_probs is None else draft_probs[slot].double()
        accept = float(acceptance_probs(row, draft_row, torch.tensor(token)))
        for recovered, p in enumerate(residual_probs(row, draft_row, torch.tensor(token)).tolist()):
            _add(law, (*committed, recovered), reached * (1.0 - accept) * p)
        reached *= accept
        if reached == 0.0:
            return law
        committed = (*committed, token)
    for bonus, p in enumerate(target_probs[len(draft_token_ids)].double().tolist()):
        _add(law, (*committed, bonus), reached * p)
    return law


def step_law(target: Conditional, proposer: Proposer, context: Context = (), chain: ChainLaw = chain_law) -> Law:
    """The law of what one verify step commits (1..K+1 tokens), averaged over the proposals.

    `chain` stands for the verifier; tests put a faulty one in its place.
    """
    law: Law = {}
    for proposal in proposer(context):
        drafts = proposal.draft_token_ids
        # Rows behind a placeholder have no context; they must not matter, so they repeat the last one that has.
        known = next((slot for slot, token in enumerate(drafts) if token < 0), len(drafts))
        rows = [target(context + drafts[: min(slot, known)]).double() for slot in range(len(drafts) + 1)]
        for tokens, p in chain(torch.stack(rows), drafts, proposal.draft_probs).items():
            _add(law, tokens, proposal.probability * p)
    return law


def completed_law(
    target: Conditional, proposer: Proposer, length: int, context: Context = (), chain: ChainLaw = chain_law
) -> Law:
    """The law of the next `length` tokens: one verify step, cut or completed autoregressively by the policy.

    Equal to `policy_law(target, length)` exactly when the verify step is lossless (for `length` >= K + 1).
    """
    law: Law = {}
    for tokens, mass in step_law(target, proposer, context, chain).items():
        missing = max(0, length - len(tokens))
        for rest, p in policy_law(target, missing, context + tokens).items():
            _add(law, (tokens + rest)[:length], mass * p)
    return law


def generation_law(
    target: Conditional, proposer: Proposer, length: int, context: Context = (), chain: ChainLaw = chain_law
) -> Law:
    """The law of the next `length` tokens when every one comes from verify steps, the last block cut at `length`."""
    law: Law = {}
    for tokens, mass in step_law(target, proposer, context, chain).items():
        if len(tokens) >= length:
            _add(law, tokens[:length], mass)
            continue
        for rest, p in generation_law(target, proposer, length - len(tokens), context + tokens, chain).items():
            _add(law, tokens + rest, mass * p)
    return law


def sampled_proposals(draft: Conditional, num_draft_tokens: int, stated: Conditional | None = None) -> Proposer:
    """All chains a sampling draft may propose. `stated` (default: the draft itself) is what the verifier is told."""

    def propose(context: Context) -> Iterable[Proposal]:
        for tokens, mass in policy_law(draft, num_draft_tokens, context).items():
            told = stated or draft
            rows = [told(context + tokens[:slot]).double() for slot in range(num_draft_tokens)]
            yield Proposal(mass, tokens, torch.stack(rows) if rows else None)

    return propose


def greedy_proposal(draft: Conditional, num_draft_tokens: int) -> Proposer:
    """The one chain of a draft that takes its most likely token at each slot."""

    def propose(context: Context) -> Iterable[Proposal]:
        tokens: tuple[int, ...] = ()
        for _ in range(num_draft_tokens):
            tokens = (*tokens, int(draft(context + tokens).argmax()))
        yield Proposal(1.0, tokens, None)

    return propose


def largest_difference(law: Law, other: Law) -> float:
    """Largest absolute difference of probability over all sequences of either law."""
    return max((abs(law.get(key, 0.0) - other.get(key, 0.0)) for key in law.keys() | other.keys()), default=0.0)


def _add(law: Law, tokens: tuple[int, ...], mass: float) -> None:
    if mass > 0.0:
        law[tokens] = law.get(tokens, 0.0) + mass
