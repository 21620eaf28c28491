"""The policy update: scores what was sampled, then one clipped policy-gradient step.

T response tokens of a sample, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from paceline.algo.loss import PolicyLoss, clipped_policy_loss
from paceline.config.run import Algorithm, Train
from paceline.errors import CheckpointError, ModelError
from paceline.models.mimo import trunk_parameters
from paceline.models.weights import policy_tensors
from paceline.spec.sampling import policy_log_probs
from paceline.train.logprobs import Sample, plan_micro_batches, response_logits
from paceline.types import Sampling


@dataclass(frozen=True, slots=True)
class Scored:
    """What the policy says about one sample."""

    index: int
    """Position in the samples that were handed in; they come in the order of their length."""
    logits: torch.Tensor
    """[T, V] raw logits, before temperature and filters."""
    logprobs: torch.Tensor
    """[T] log-probability of each response token under the sampling distribution; -inf outside the kept set."""


@dataclass(frozen=True, slots=True)
class PolicyBatch:
    """What one update learns from. Example: one sample of two tokens, `advantages=[0.5]`."""

    samples: Sequence[Sample]
    old_logprobs: Sequence[torch.Tensor]
    """Per sample [T]: under the policy that sampled, from `PolicyTrainer.score`."""
    advantages: Sequence[float]
    """One per sample."""


@dataclass(frozen=True, slots=True)
class PolicyUpdate:
    """What one update did."""

    loss: float
    grad_norm: float
    """Global norm before clipping."""
    clipped_fraction: float
    """Tokens whose ratio clip was active / tokens."""
    skipped_tokens: int
    """Tokens outside the trainer's kept set (engine and trainer round differently): no ratio, no gradient."""


@dataclass(frozen=True, slots=True)
class PolicyGradient:
    """What `backward` has left in the parameters."""

    loss: float
    clipped_fraction: float
    skipped_tokens: int
    is_zero: bool
    """No sample had an advantage: nothing was run."""


class ForwardReader(Protocol):
    """Reads hidden states while the policy runs (`train.draft.FeatureReader`). The pass itself stays as it is."""

    def watch(self, indices: Sequence[int]) -> AbstractContextManager[None]:
        """Surrounds one forward pass over the samples `indices`: a row each, padded on the right."""
        ...


class PolicyTrainer:
    """Owns the master weights (float32; float64 in tests) and their AdamW.

    The model stays in evaluation mode: with dropout the ratio of an on-policy update would not start at 1. Temperature
    and filters are those of `sampling`, through `spec.sampling`, so that trainer and engine mean the same distribution.
    """

    def __init__(self, model: PreTrainedModel, train: Train, algorithm: Algorithm, sampling: Sampling) -> None:
        self.model = model.eval()
        self.config = train
        self.algorithm = algorithm
        self.sampling = sampling
        self.version = 0
        """Updates so far; the version under which the weights are published."""
        self._dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[train.dtype]
        self._parameters = [parameter for parameter in trunk_parameters(model) if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(self._parameters, lr=train.lr, weight_decay=train.weight_decay)

    def score(self, samples: Sequence[Sample], reader: ForwardReader | None = None) -> Iterator[Scored]:
        """Re-score every sampled token, one micro-batch of logits in memory at a time."""
        for indices in plan_micro_batches(samples, self.config.micro_batch_tokens):
            with torch.no_grad(), _watched(reader, indices):
                rows = response_logits(self.model, [samples[i] for i in indices], self._dtype)
            for index, logits_TV in zip(indices, rows, strict=True):
                with torch.no_grad():
                    logprobs_T = self._token_logprobs(logits_TV, samples[index])
                yield Scored(index, logits_TV, logprobs_T)

    def update(self, batch: PolicyBatch) -> PolicyUpdate:
        """`backward` and `step`."""
        return self.step(self.backward(batch))

    def backward(self, batch: PolicyBatch, reader: ForwardReader | None = None) -> PolicyGradient:
        """Gradient of the token-level clipped loss over all tokens of `batch`, left in the parameters for `step`.

        Samples with advantage 0 have no gradient and are not run, but their tokens count in the mean. `reader` watches
        the forward passes under the numbers of the samples in `batch`. In between, the weights are still those of the
        passes, which is what a draft learns from.
        """
        num_tokens = sum(len(sample.response_ids) for sample in batch.samples)
        chosen = [i for i, advantage in enumerate(batch.advantages) if advantage != 0]
        self._optimizer.zero_grad(set_to_none=True)
        loss, num_clipped, skipped_tokens = 0.0, 0, 0
        for places in plan_micro_batches([batch.samples[i] for i in chosen], self.config.micro_batch_tokens):
            part, skipped = self._part([chosen[place] for place in places], batch, num_tokens, reader)
            part.loss.backward()
            loss += float(part.loss.detach())
            num_clipped += part.num_clipped
            skipped_tokens += skipped
        return PolicyGradient(loss, num_clipped / max(num_tokens, 1), skipped_tokens, is_zero=not chosen)

    def step(self, gradient: PolicyGradient) -> PolicyUpdate:
        """One optimizer step with the gradient that `backward` has just left.

        Without any sample to learn from, weights and optimizer stay as they are. Raises `ModelError` when the gradient
        is not finite; the weights are then unchanged.
        """
        grad_norm = 0.0 if gradient.is_zero else self._step()
        self.version += 1
        return PolicyUpdate(gradient.loss, grad_norm, gradient.clipped_fraction, gradient.skipped_tokens)

    def weights(self) -> dict[str, torch.Tensor]:
        """Master weights by Hugging Face name: views that change with the next update."""
        return policy_tensors(self.model)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's moments, step counts and settings (the weights are in `weights`)."""
        return self._optimizer.state_dict()

    def load(self, weights: Mapping[str, torch.Tensor], optimizer: Mapping[str, Any], version: int) -> None:
        """Continue from a checkpoint. Raises `CheckpointError` when it belongs to another model."""
        own = self.weights()
        for name in sorted(own.keys() | weights.keys()):
            if name not in weights or name not in own or own[name].shape != weights[name].shape:
                raise CheckpointError(
                    f"The checkpoint does not fit the policy at {name}: it was written by a run with another policy. "
                    "Resume with the recipe of that run, or start a new run under another run.name."
                )
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(weights[name])
        self._optimizer.load_state_dict(dict(optimizer))
        self.version = version

    def _part(
        self, indices: Sequence[int], batch: PolicyBatch, num_tokens: int, reader: ForwardReader | None
    ) -> tuple[PolicyLoss, int]:
        """The loss of one micro-batch, and its tokens without a ratio."""
        samples = [batch.samples[i] for i in indices]
        with _watched(reader, indices):
            rows = response_logits(self.model, samples, self._dtype)
        logprobs_N = torch.cat([self._token_logprobs(row, sample) for row, sample in zip(rows, samples, strict=True)])
        old_logprobs_N = torch.cat([batch.old_logprobs[i] for i in indices]).to(logprobs_N)
        advantages_N = torch.cat(
            [logprobs_N.new_full((len(batch.samples[i].response_ids),), batch.advantages[i]) for i in indices]
        )
        # A token outside the kept set has log-probability -inf on one side: no ratio exists.
        usable_N = logprobs_N.isfinite() & old_logprobs_N.isfinite()
        part = clipped_policy_loss(
            torch.where(usable_N, logprobs_N, 0.0),
            torch.where(usable_N, old_logprobs_N, 0.0),
            torch.where(usable_N, advantages_N, 0.0),
            clip_low=self.algorithm.clip_low,
            clip_high=self.algorithm.clip_high,
            num_tokens=num_tokens,
        )
        return part, int((~usable_N).sum())

    def _token_logprobs(self, logits_TV: torch.Tensor, sample: Sample) -> torch.Tensor:
        ids_T1 = torch.tensor(sample.response_ids, device=logits_TV.device).unsqueeze(1)
        return policy_log_probs(logits_TV, self.sampling).gather(1, ids_T1).squeeze(1)

    def _step(self) -> float:
        grad_norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self.config.max_grad_norm))
        if not grad_norm < float("inf"):
            self._optimizer.zero_grad(set_to_none=True)
            raise ModelError(
                f"The policy's gradient norm is {grad_norm} in update {self.version + 1}: the weights were left as "
                "they are. Lower train.lr or train.max_grad_norm and resume from the last checkpoint."
            )
        self._optimizer.step()
        return grad_norm


def _watched(reader: ForwardReader | None, indices: Sequence[int]) -> AbstractContextManager[None]:
    return nullcontext() if reader is None else reader.watch(indices)
