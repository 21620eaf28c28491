"""Drafts of a small language model with the policy's tokenizer. It is frozen: a run never changes its weights.

Greedy: the drafts are the tokens that the model finds most likely, one after the other, so that q is one-hot
(Leviathan et al., arXiv:2211.17192, with a deterministic approximation model). vLLM 0.32 drafts the same way
(`v1/spec_decode/draft_model.py` there, `draft_sample_method = "greedy"`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from paceline.drafts.base import Proposal
from paceline.errors import ModelError, PublishError
from paceline.models.folder import check_folder, load_policy, load_tokenizer
from paceline.models.mimo import is_mimo

KEY = "draft.path"


class DraftModelDrafter:
    """Greedy drafts of `model`: q is one-hot. Reads tokens only, none of the policy's states."""

    aux_layers: tuple[int, ...] = ()

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype | None = None) -> None:
        """`model` belongs to the drafter; `dtype` is what it is turned into, None: as it is."""
        self.model = model.eval()
        if dtype is not None:
            torch.nn.Module.to(model, dtype)

    def propose(
        self,
        token_ids: Sequence[Sequence[int]],
        num_draft_tokens: Sequence[int],
        hidden: Sequence[torch.Tensor] | None,
        generators: Sequence[torch.Generator],
    ) -> Proposal:
        """See `Drafter.propose`; `hidden` and `generators` are not looked at."""
        drafts: list[list[int]] = [[] for _ in token_ids]
        for depth in range(max(num_draft_tokens, default=0)):
            rows = [row for row, k in enumerate(num_draft_tokens) if depth < k]
            texts = [torch.tensor([*token_ids[row], *drafts[row]]) for row in rows]
            last = torch.tensor([len(text) - 1 for text in texts])
            # What is padded on the right lies behind everything that is read.
            padded = pad_sequence(texts, batch_first=True).to(self.model.device)
            logits = self.model(input_ids=padded, use_cache=False).logits[torch.arange(len(rows)), last]
            for row, token in zip(rows, logits.argmax(-1).tolist(), strict=True):
                drafts[row].append(token)
        return Proposal(drafts, None)

    def load(self, draft: Mapping[str, torch.Tensor]) -> None:
        """Always raises `PublishError`: the model is frozen."""
        raise PublishError(
            f'A draft with {len(draft)} tensors was published, but with draft.method = "draft_model" the draft is '
            "frozen: it stays as it was read from its folder."
        )


def load_draft_model(
    folder: Path,
    policy_config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    num_positions: int,
    dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """The draft model, checked against the policy. `num_positions`: longest prompt and response together, tokens.

    Raises `ModelError` that names `draft.path` for a folder that cannot be read, or a model that cannot draft for this
    policy: another vocabulary (the first token that differs is named), too few positions, attention within a sliding
    window, an MTP layer of its own.
    """
    check_folder(folder, KEY)
    if is_mimo(folder):
        raise ModelError(
            f"{KEY} is {folder}, a model with an MTP layer, which nothing would draft with. Give a model without one."
        )
    _check_tokenizer(folder, tokenizer)
    model = load_policy(folder, dtype, KEY)
    _check_sizes(folder, model.config.to_dict(), policy_config.to_dict()["vocab_size"], num_positions)
    return model


def _check_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Token by token: the engine hands over ids, which must mean the same to both."""
    policy = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
    draft = {token_id: token for token, token_id in load_tokenizer(folder, KEY).get_vocab().items()}
    for token_id in sorted(policy.keys() | draft.keys()):
        if policy.get(token_id) != draft.get(token_id):
            here, there = (repr(side[token_id]) if token_id in side else "no token" for side in (policy, draft))
            raise ModelError(
                f"{KEY} is {folder}, whose tokenizer is not the policy's: token {token_id} is {here} in the policy's "
                f"({len(policy)} tokens) and {there} in the draft's ({len(draft)} tokens). Ids must mean the same to "
                "both: give a smaller model of the policy's family, or another draft.method."
            )


def _check_sizes(folder: Path, found: Mapping[str, Any], policy_vocab_size: int, num_positions: int) -> None:
    """`found`: config.json of the draft model."""
    if found["vocab_size"] != policy_vocab_size:
        raise ModelError(
            f"{KEY} is {folder}, which computes logits of {found['vocab_size']} tokens, and the policy of "
            f"{policy_vocab_size}; vLLM asks for the same number, also where the rows beyond the tokenizer's are never "
            "used. Load the draft model, call resize_token_embeddings with the policy's number, and save it again."
        )
    if found["max_position_embeddings"] < num_positions:
        raise ModelError(
            f"{KEY} is {folder}, which has {found['max_position_embeddings']} positions, and prompt and response may "
            f"have {num_positions} together. Lower sampling.max_tokens, or give a model with more positions."
        )
    window = found.get("sliding_window")
    if window is not None and window < num_positions:
        raise ModelError(
            f"{KEY} is {folder}, which attends within a sliding window of {window} tokens, and prompt and response may "
            f"have {num_positions} together: its keys would lie in the engine apart from the policy's. Give a model "
            "with full attention."
        )
