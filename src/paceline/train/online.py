"""Keeping a draft with weights close to a policy that moves.

In a step of RL the draft learns from some of the rollouts that the policy learns from, out of the same forward pass:

    probe    a few rollouts, read while they are re-scored; `predict` says what the draft is worth on them
    lesson   rollouts chosen for training, read while the policy's loss runs over them
    learn    the draft's own updates, between the policy's backward pass and its step

`learn` comes before the policy's step because the teacher is the policy's output layer on the states that were read:
afterwards the two would belong to different weights. The policy is only read. Nothing here draws from a global
generator, and the draft's gradients, clip and optimiser are its own, so that the policy's update is bit-equal with and
without it.

The policy does not run samples of advantage 0, so the draft does not learn from them either, unless no sample of the
step was run: then those chosen get a forward pass of their own. Nothing larger than the chosen samples' features is
kept: their tokens times (A + 1) H numbers, A auxiliary layers of hidden size H.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from transformers import PreTrainedModel

from paceline.config.run import TrainedDraft
from paceline.drafts.eagle3 import Eagle3Drafter
from paceline.errors import CheckpointError
from paceline.models.eagle3 import DraftHead, Eagle3Head
from paceline.train.draft import (
    UPDATE_TOKENS,
    Acceptance,
    Answer,
    DraftTrainer,
    FeatureReader,
    Features,
    collate,
    fill_rows,
    predicted_acceptance,
)
from paceline.train.level import AcceptanceLevel
from paceline.train.logprobs import Sample
from paceline.types import Sampling

PROBE_SAMPLES = 8
"""Rollouts of a step on which the draft is judged before it learns from any, at most,"""
PROBE_TOKENS = 1024
"""and as many as surely have no more prompt and response tokens than this, but never fewer than two."""
MIN_TOKENS = 3
"""A shorter sequence has no position that a draft could propose."""


@dataclass(frozen=True, slots=True)
class DraftStep:
    """What one step has done to the draft."""

    loss: float | None
    """Mean over the updates, nats per supervised (root, depth) pair; None when there was none."""
    grad_norm: float | None
    """Mean over the updates, before clipping."""
    updates: int
    skipped_updates: int
    """Updates whose loss or gradient was not finite: they changed nothing."""
    param_delta_norm: float
    """Global norm of the change of all parameters."""
    lag: int
    """Policy versions between the weights that sampled and those that the draft had last learned from."""
    alarms: tuple[str, ...]

    def metrics(self) -> dict[str, float | int | None]:
        """What goes into metrics.jsonl; the alarms have a place of their own there."""
        return {name: getattr(self, name) for name in DRAFT_STEP_KEYS}


DRAFT_STEP_KEYS = tuple(field.name for field in fields(DraftStep) if field.name != "alarms")
"""Of `DraftStep.metrics`."""


class OnlineDraft:
    """A draft whose weights are part of the policy's tensors and travel with its publish, as those of an MTP layer do.

    `OnlineEagle3` is the one with weights of its own.
    """

    version: int
    """Steps that changed the draft: the version that the engine must hold. 0: as the run began."""

    def __init__(
        self,
        head: DraftHead,
        policy: PreTrainedModel,
        config: TrainedDraft,
        *,
        depth: int,
        num_draft_tokens: int,
        sampling: Sampling,
        seed: int,
    ) -> None:
        """`seed` chooses what is learned from. Training goes at least as deep as the engine drafts."""
        self.head = head
        self.config = config
        self.version = 0
        self._policy = policy
        self._sampling = sampling
        self._num_draft_tokens = num_draft_tokens
        depth = max(depth, num_draft_tokens)
        self._trainer = DraftTrainer(head, policy, depth, config.online_lr, None, sampling.temperature)
        self._generator = torch.Generator().manual_seed(seed)
        self._trained_at = 0
        self._level = AcceptanceLevel()

    def weights(self) -> dict[str, torch.Tensor] | None:
        """Copies under their exported names, to be published and saved; None: they are among the policy's tensors."""
        return None

    def load_weights(self, weights: Mapping[str, torch.Tensor] | None) -> None:
        """Take what `weights` gave. Raises `CheckpointError` when it belongs to another draft."""
        if weights is not None:
            raise CheckpointError(
                f"The checkpoint has a draft of its own with {len(weights)} tensors, and the recipe's draft is part of "
                "the policy: resume with the recipe that the run was started with."
            )

    def probe(self, samples: Sequence[Sample]) -> FeatureReader:
        """A reader of a fixed few of `samples`. What was sampled has no say in the choice."""
        longest = max(len(sample.prompt_ids) for sample in samples) + self._sampling.max_tokens
        size = min(PROBE_SAMPLES, max(2, PROBE_TOKENS // longest))
        stride = max(1, len(samples) // size)
        chosen = [i for i in range(0, len(samples), stride)[:size] if len(samples[i].prompt_ids) >= MIN_TOKENS - 1]
        return self._reader(samples, chosen)

    def predict(self, probe: FeatureReader) -> Acceptance:
        """What an engine with these weights should have measured on the probe, and a note of it for `below_peak`."""
        features = probe.features()
        acceptance = predicted_acceptance(
            self._policy,
            self.head,
            [feature.answer for feature in features],
            self._num_draft_tokens,
            self._sampling,
            features,
        )
        self._level.add(acceptance.alpha, acceptance.standard_error, acceptance.num_answers)
        return acceptance

    def lesson(
        self, samples: Sequence[Sample], advantages: Sequence[float], policy_version: int
    ) -> FeatureReader | None:
        """A reader of what is to be learned from in this step; None: the draft stays as it is."""
        usable = [i for i, sample in enumerate(samples) if len(sample) >= MIN_TOKENS and sample.response_ids]
        if not usable or not self._is_due(policy_version):
            return None
        run = [i for i in usable if advantages[i] != 0] or usable
        chosen: list[int] = []
        tokens = 0
        for place in torch.randperm(len(run), generator=self._generator).tolist():
            tokens += len(samples[run[place]])
            if chosen and tokens > self.config.online_tokens:
                break
            chosen.append(run[place])
        return self._reader(samples, chosen)

    def learn(self, lesson: FeatureReader | None, policy_version: int) -> DraftStep:
        """Train on what `lesson` has read.

        A loss or gradient that is not finite skips that update alone. It is reported as an alarm and raises nothing:
        the policy's step must go on.
        """
        lag = policy_version - self._trained_at
        losses: list[float] = []
        grad_norms: list[float] = []
        skipped, delta_norm = 0, 0.0
        alarms: list[str] = []
        if lesson is not None:
            before = [parameter.detach().clone() for parameter in self.head.parameters()]
            for features in self._updates(lesson.features()):
                update = self._trainer.update([collate(features, self._trainer.depth, UPDATE_TOKENS)])
                if update.finite:
                    losses.append(update.loss)
                    grad_norms.append(update.grad_norm)
                else:
                    skipped += 1
            if losses:
                delta_norm = self._change_since(before)
            if skipped:
                alarms.append(
                    f"draft: the loss or its gradient was not finite in {skipped} of {skipped + len(grad_norms)} "
                    "updates, which changed nothing; the policy's update went on"
                )
        if losses:
            self.version += 1
            self._trained_at = policy_version
            self._level.trained()
        elif self._is_due(policy_version) and lag > self.config.online_max_lag:
            alarms.append(
                f"draft: it last learned {lag} policy versions ago, more than draft.online_max_lag "
                f"({self.config.online_max_lag})"
            )
        return DraftStep(
            loss=sum(losses) / len(losses) if losses else None,
            grad_norm=sum(grad_norms) / len(grad_norms) if grad_norms else None,
            updates=len(losses),
            skipped_updates=skipped,
            param_delta_norm=delta_norm,
            lag=lag,
            alarms=tuple(alarms),
        )

    def state_dict(self) -> dict[str, Any]:
        """All but the weights: optimiser, schedule, versions, the level and its best, the generator."""
        return {
            **self._trainer.state_dict(),
            "version": self.version,
            "trained_at": self._trained_at,
            "level": self._level.state_dict(),
            "generator": self._generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`. Raises `CheckpointError` that names what it lacks."""
        missing = sorted(self.state_dict().keys() - state.keys())
        if missing:
            raise CheckpointError(
                f"The checkpoint's draft state lacks {', '.join(missing)}: it cannot be trusted. Resume from an older "
                "checkpoint, or start a new run under another run.name."
            )
        self._trainer.load_state_dict(state)
        self.version = state["version"]
        self._trained_at = state["trained_at"]
        self._level.load_state_dict(state["level"])
        self._generator.set_state(state["generator"])

    def _is_due(self, policy_version: int) -> bool:
        if self.config.online == "off" or (policy_version + 1) % self.config.online_every:
            return False
        return self.config.online == "always" or self._level.is_below_best

    def _reader(self, samples: Sequence[Sample], indices: Sequence[int]) -> FeatureReader:
        answers = {
            i: Answer((*samples[i].prompt_ids, *samples[i].response_ids), len(samples[i].prompt_ids)) for i in indices
        }
        return FeatureReader(self._policy, self.head.aux_layers, answers)

    def _updates(self, features: Sequence[Features]) -> list[list[Features]]:
        """The features in random order, as many to an update as a head learns well from."""
        order = torch.randperm(len(features), generator=self._generator).tolist()
        shuffled = [features[place] for place in order]
        rows = fill_rows([len(feature.answer.token_ids) for feature in shuffled], UPDATE_TOKENS)
        return [[shuffled[place] for place in row] for row in rows]

    @torch.no_grad()
    def _change_since(self, before: Sequence[torch.Tensor]) -> float:
        pairs = zip(self.head.parameters(), before, strict=True)
        return math.sqrt(sum(float((now - then).double().square().sum()) for now, then in pairs))


class OnlineEagle3(OnlineDraft):
    """An EAGLE-3 head: published and saved apart from the policy."""

    def __init__(
        self,
        head: Eagle3Head,
        policy: PreTrainedModel,
        config: TrainedDraft,
        *,
        depth: int,
        num_draft_tokens: int,
        sampling: Sampling,
        seed: int,
    ) -> None:
        super().__init__(
            head, policy, config, depth=depth, num_draft_tokens=num_draft_tokens, sampling=sampling, seed=seed
        )
        self._own = head

    def weights(self) -> dict[str, torch.Tensor]:
        return self._own.export_state()

    def load_weights(self, weights: Mapping[str, torch.Tensor] | None) -> None:
        own = self._own.export_state()
        given = weights or {}
        for name in sorted(own.keys() | given.keys()):
            if name not in given or name not in own or own[name].shape != given[name].shape:
                raise CheckpointError(
                    f"The checkpoint does not fit the draft at {name}: it was written by a run with another draft. "
                    "Resume with the recipe of that run, or start a new run under another run.name."
                )
        Eagle3Drafter(self._own, self._policy).load(given)
