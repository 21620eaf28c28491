"""`drafts.history` inside vLLM, through its own-proposer method (`custom_class`).

vLLM 0.32 makes the proposer from a class path and hands it rows of token ids; which request a row is and how many
drafts are wanted it does not say. Both are known around it: `input_batch` of the runner has the requests in the order
of the rows, and `StepLengths` what its scheduler has just asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.drafts.history import HistoryIndex, PromptKey, prompt_key
from paceline.engine.vllm.length import StepLengths

CLASS_PATH = f"{__name__}.HistoryProposer"
"""What vLLM's `speculative_config["model"]` must be."""


class HistoryProposer:
    """Made by vLLM; proposes nothing until `attach` has told it where to look."""

    def __init__(self, vllm_config: Any) -> None:
        self._max_model_len: int = vllm_config.model_config.max_model_len
        self._runner: Any = None
        self._keys: dict[str, PromptKey] = {}

    def load_model(self, *args: Any) -> None:
        """vLLM's CPU runner calls it; there are no weights."""

    def attach(self, runner: Any, index: HistoryIndex, lengths: StepLengths) -> None:
        """`runner` is the model runner (`GPUModelRunner`) that this proposer belongs to."""
        self._runner, self._index, self._lengths = runner, index, lengths

    def start(self) -> None:
        """Forget the requests of the call before: their ids do not come back."""
        self._keys.clear()

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """[B] drafts for the next step.

        Args:
            sampled_token_ids: [B] what this step committed; nothing for a row whose prompt is not read to its end.
            num_tokens_no_spec: [B or more] tokens of each row, those included.
            token_ids_cpu: [B or more, max_model_len] the tokens themselves.
            slot_mappings: not looked at.
        """
        limit = 0 if self._runner is None else self._lengths.current
        if limit == 0 or not self._index.can_draft:
            return [[] for _ in sampled_token_ids]
        drafts = []
        for row, committed in enumerate(sampled_token_ids):
            end = int(num_tokens_no_spec[row])
            if not committed or end >= self._max_model_len:
                drafts.append([])
                continue
            text = token_ids_cpu[row, max(0, end - self._index.max_match) : end].tolist()
            drafts.append(self._index.draft(self._key(row, token_ids_cpu), text, limit))
        return drafts

    def _key(self, row: int, token_ids_cpu: np.ndarray) -> PromptKey:
        """Once per request: a prompt may be long."""
        batch = self._runner.input_batch
        request_id = batch.req_ids[row]
        if request_id not in self._keys:
            self._keys[request_id] = prompt_key(token_ids_cpu[row, : batch.num_prompt_tokens[row]].tolist())
        return self._keys[request_id]
