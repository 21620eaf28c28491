"""Steps without drafts take the path of an engine without speculation.

With a speculative configuration vLLM 0.32 prepares, verifies and drafts in every step, also where nothing was drafted
and nothing will be. Here such a step sees no speculative configuration: the same forward pass, one row of logits per
sequence, one draw. The draw is that of a verify step without drafts (`SlotSampler.plain`), from the same noise, so that
a seeded sequence does not depend on which path a step took.

A draft that reads the policy's hidden states must still see them: `engine.vllm.deferred` keeps them for later. A
look-up reads committed tokens only, and only after the step. So with look-ups every step without drafts is plain, also
where drafts are wanted behind it: what finds nothing costs no more than to look.
"""

from __future__ import annotations

from typing import Any

from paceline.engine.vllm.deferred import DeferredDrafter
from paceline.engine.vllm.sampler import SlotSampler

LOOK_UPS = ("ngram", "custom_class")
"""vLLM's names of the methods whose proposer reads committed tokens only; the second is `drafts.history`."""


class PlainSteps:
    """Wraps `execute_model` and `sample_tokens` of one vLLM model runner (`GPUModelRunner`, 0.32) that speculates."""

    def __init__(self, runner: Any, sampler: SlotSampler, deferred: DeferredDrafter | None) -> None:
        """`deferred` is None for a draft that reads no hidden states."""
        self._runner, self._deferred = runner, deferred
        self._config, self._sampler = runner.speculative_config, runner.sampler
        self._plain_sampler = sampler.plain
        self._looks_up = self._config.method in LOOK_UPS
        self._execute, self._sample = runner.execute_model, runner.sample_tokens
        runner.execute_model, runner.sample_tokens = self._execute_model, self._sample_tokens
        self.num_steps = 0
        """Plain steps so far."""

    def _execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if self._is_plain(scheduler_output):
            self._runner.speculative_config, self._runner.sampler = None, self._plain_sampler
        try:
            output = self._execute(scheduler_output, *args, **kwargs)
        except BaseException:
            self._restore()
            raise
        if output is not None:  # None says that `sample_tokens` comes next.
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
        elif state.scheduler_output.num_spec_tokens_to_schedule > 0:
            self._look_up(state.scheduler_output, output.sampled_token_ids)
        return output

    def _look_up(self, scheduler_output: Any, tokens_B1: list[list[int]]) -> None:
        """Drafts for the next step, as vLLM's `sample_tokens` makes and hands them over behind a verify step."""
        runner = self._runner
        # No states and no attention metadata: a look-up is handed them, too, and looks at neither.
        runner._draft_token_ids = runner.propose_draft_token_ids(scheduler_output, tokens_B1, *[None] * 7)
        runner._copy_draft_token_ids_to_cpu(scheduler_output)

    def _restore(self) -> None:
        self._runner.speculative_config, self._runner.sampler = self._config, self._sampler

    def _is_plain(self, scheduler_output: Any) -> bool:
        """One token of every request, none of them drafted or a prompt, and no draft wanted that reads the step."""
        num_requests = len(scheduler_output.num_scheduled_tokens)
        return (
            (self._looks_up or scheduler_output.num_spec_tokens_to_schedule == 0)
            and not scheduler_output.scheduled_spec_decode_tokens
            and not scheduler_output.scheduled_new_reqs
            and scheduler_output.total_num_scheduled_tokens == num_requests > 0
            and (self._deferred is None or self._deferred.has_room(num_requests))
        )
