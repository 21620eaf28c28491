"""Steps without drafts take the path of an engine without speculation.

With a speculative configuration vLLM 0.32 prepares, verifies and drafts in every step, also where nothing was drafted
and nothing will be. Here such a step sees no speculative configuration: the same forward pass, one row of logits per
sequence, one draw. The draw is that of a verify step without drafts (`SlotSampler.plain`), from the same noise, so that
a seeded sequence does not depend on which path a step took.

A draft that reads the policy's hidden states must still see them: `engine.vllm.deferred` keeps them for later.
"""

from __future__ import annotations

from typing import Any

from paceline.engine.vllm.deferred import DeferredDrafter
from paceline.engine.vllm.sampler import SlotSampler


class PlainSteps:
    """Wraps `execute_model` and `sample_tokens` of one vLLM model runner (`GPUModelRunner`, 0.32) that speculates."""

    def __init__(self, runner: Any, sampler: SlotSampler, deferred: DeferredDrafter | None) -> None:
        """`deferred` is None for a draft that reads no hidden states."""
        self._runner, self._deferred = runner, deferred
        self._config, self._sampler = runner.speculative_config, runner.sampler
        self._plain_sampler = sampler.plain
        self._execute, self._sample = runner.execute_model, runner.sample_tokens
        runner.execute_model, runner.sample_tokens = self._execute_model, self._sample_tokens
        self.num_steps = 0
        """Plain steps so far."""

    def _execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if self._is_plain(scheduler_output):
            self._runner.speculative_config, self._runner.sampler = None, self._plain_sampler
        output = self
        try:
            output = self._execute(scheduler_output, *args, **kwargs)
        finally:
            # None is what says that `sample_tokens` comes next.
            if output is not None:
                self._restore()
        return output

    def _sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        if self._runner.speculative_config is not None:
            return self._sample(*args, **kwargs)
        state = self._runner.execute_model_state
        try:
            output = self._sample(*args, **kwargs)
        finally:
            self._restore()
        self.num_steps += 1
        if self._deferred is not None:
            self._deferred.keep_plain(output.sampled_token_ids, state.hidden_states, state.aux_hidden_states)
        return output

    def _restore(self) -> None:
        self._runner.speculative_config, self._runner.sampler = self._config, self._sampler

    def _is_plain(self, scheduler_output: Any) -> bool:
        """One token of every request, none of them drafted or a prompt, and no drafts wanted afterwards."""
        num_requests = len(scheduler_output.num_scheduled_tokens)
        return (
            scheduler_output.num_spec_tokens_to_schedule == 0
            and not scheduler_output.scheduled_spec_decode_tokens
            and not scheduler_output.scheduled_new_reqs
            and scheduler_output.total_num_scheduled_tokens == num_requests > 0
            and (self._deferred is None or self._deferred.has_room(num_requests))
        )
