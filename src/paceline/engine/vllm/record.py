"""Which token stood where: blocks recorded around the engine's own sampling call.

vLLM returns tokens only. Its sampling call has more: the drafted ids (`SpecDecodeMetadata.draft_token_ids`, flattened
over the batch), and the committed prefix of every row. `BlockRecorder` wraps that one call of a model runner, keeps
references while the engine runs, and builds `types.Block` lists afterwards: a step pays for one list append. It also
reads the clock around that call, the policy's pass and the drafter: `EngineSeconds` says what the times mean.

Legend: B rows of the batch, K most draft tokens of a row.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.engine.base import EngineSeconds, EngineStep
from paceline.engine.clock import EngineClock
from paceline.engine.vllm.compat import SUPPORTED
from paceline.errors import EngineError
from paceline.types import Block

PLACEHOLDER = -1
"""What vLLM writes behind the last committed token of a row."""


@dataclass(frozen=True, slots=True)
class _Step:
    seconds: float
    cpu_seconds: float
    request_ids: list[str]
    """[B] the engine's ids, aligned with the rows."""
    discarded: list[bool]
    """[B] rows of an unfinished prefill: sampled, then thrown away by the engine."""
    draft_token_ids: torch.Tensor | None
    """[sum of counts] drafted ids; None in a step of the plain sampler."""
    num_draft_tokens: list[int] | None
    """[B]"""
    sampled_token_ids: torch.Tensor
    """[B, K + 1], PLACEHOLDER behind the last committed token."""


class BlockRecorder:
    """Wraps `_sample(logits, spec_decode_metadata)` of one vLLM model runner (`GPUModelRunner`, 0.32).

    And its `execute_model` and `propose_draft_token_ids`, for the clock alone: make it behind all that replaces them.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._steps: list[_Step] = []
        self._began = time.perf_counter(), time.process_time()
        self._clock = EngineClock()
        self._sample = self._clock.timed("sample", runner._sample)
        runner._sample = self._record
        runner.execute_model = self._clock.timed("verify", runner.execute_model)
        runner.propose_draft_token_ids = self._clock.timed("draft", runner.propose_draft_token_ids)

    def _record(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> Any:
        output = self._sample(logits, spec_decode_metadata)
        num_rows = output.sampled_token_ids.shape[0]
        drafted = spec_decode_metadata is not None
        self._steps.append(
            _Step(
                seconds=time.perf_counter(),
                cpu_seconds=time.process_time(),
                request_ids=self._runner.input_batch.req_ids[:num_rows],
                discarded=self._runner.discard_request_mask.np[:num_rows].tolist(),
                draft_token_ids=spec_decode_metadata.draft_token_ids if drafted else None,
                num_draft_tokens=list(spec_decode_metadata.num_draft_tokens) if drafted else None,
                sampled_token_ids=output.sampled_token_ids,
            )
        )
        return output

    def start(self) -> None:
        """Forget everything recorded so far."""
        self._steps.clear()
        self._clock.start()
        self._began = time.perf_counter(), time.process_time()

    @property
    def num_steps(self) -> int:
        """Engine steps that sampled since `start`."""
        return len(self._steps)

    @property
    def seconds(self) -> EngineSeconds:
        """Since `start`: in `propose_draft_token_ids`, in `execute_model` and in `_sample`."""
        return self._clock.seconds

    def live_batch(self, since_s: float) -> tuple[tuple[float, int], ...]:
        """(seconds since `since_s`, a `perf_counter` reading; rows that committed tokens) at each change."""
        changes: list[tuple[float, int]] = []
        for step in self._steps:
            live = step.discarded.count(False)
            if not changes or changes[-1][1] != live:
                changes.append((round(step.seconds - since_s, 6), live))
        return tuple(changes)

    def steps(self, asked: Sequence[int]) -> tuple[EngineStep, ...]:
        """Every step since `start`, from one sampling call to the next. `asked`: k of the drafts each of them verified.

        Raises `EngineError` when steps and `asked` are not equally many.
        """
        self._check_asked(asked)
        clocks = [self._began, *((step.seconds, step.cpu_seconds) for step in self._steps)]
        return tuple(
            EngineStep(ended - began, ended_cpu - began_cpu, step.discarded.count(False), num_asked)
            for (began, began_cpu), (ended, ended_cpu), step, num_asked in zip(
                clocks[:-1], clocks[1:], self._steps, asked, strict=True
            )
        )

    def blocks(self, asked: Sequence[int]) -> dict[str, list[Block]]:
        """Blocks of every request by the engine's request id, in the order of the steps. `asked` as for `steps`.

        Raises `EngineError` when the committed tokens do not start with the accepted draft tokens: rows and requests
        would then be misaligned, and every figure derived from the record wrong.
        """
        self._check_asked(asked)
        blocks: dict[str, list[Block]] = {}
        for step, num_asked in zip(self._steps, asked, strict=True):
            live = step.discarded.count(False)
            rows = step.sampled_token_ids.tolist()
            drafted = step.draft_token_ids.tolist() if step.draft_token_ids is not None else []
            counts = step.num_draft_tokens or [0] * len(rows)
            offset = 0
            for request_id, discarded, row, count in zip(step.request_ids, step.discarded, rows, counts, strict=True):
                draft = tuple(drafted[offset : offset + count])
                offset += count
                if discarded:
                    continue
                tokens = tuple(token for token in row if token != PLACEHOLDER)
                accepted = len(tokens) - 1
                if accepted < 0 or tokens[:accepted] != draft[:accepted]:
                    raise EngineError(
                        f"vLLM committed {tokens} to request {request_id} where {draft} was drafted: that must be "
                        "accepted draft tokens and one more. The block record does not fit this vLLM version. Install "
                        f"vLLM {SUPPORTED[0]}."
                    )
                # Nothing can be drafted for the first step of a request, in which its prompt is read.
                asked_here = num_asked if request_id in blocks else 0
                block = Block(draft, accepted, tokens, live_batch=live, num_asked=asked_here)
                blocks.setdefault(request_id, []).append(block)
        return blocks

    def _check_asked(self, asked: Sequence[int]) -> None:
        if len(asked) != len(self._steps):
            raise EngineError(
                f"vLLM scheduled {len(asked)} steps and sampled in {len(self._steps)}: its record of steps does not "
                f"fit this vLLM version. Install vLLM {SUPPORTED[0]}."
            )
