"""Forward passes over finished responses: micro-batches, and the logits of response tokens alone.

B samples of a micro-batch, L their longest length, P prompt tokens, T response tokens of one sample, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class LogprobGap:
    """How far the engine's log-probs are from the trainer's, over the tokens whose engine log-probs are known.

    Example: `LogprobGap(tokens=512, mean_abs=2e-6, max_abs=4e-5, k3_kl=1e-11)`.
    """

    tokens: int
    mean_abs: float
    """Mean of |engine - trainer|, nats."""
    max_abs: float
    k3_kl: float
    """KL(engine || trainer) per token by the k3 estimate, mean of r - 1 - log r with r = p_trainer / p_engine, nats."""


def logprob_gap(engine: Sequence[Sequence[float] | None], trainer: Sequence[torch.Tensor]) -> LogprobGap | None:
    """Compare per completion: `engine` log-probs (None where the engine was not asked) with `trainer` ones, each [T].

    Tokens outside the trainer's kept set have no finite log-prob there and are left out; the certificate counts them.
    None when nothing can be compared.
    """
    pairs = [
        (torch.tensor(asked, dtype=torch.float64), scored.double().cpu())
        for asked, scored in zip(engine, trainer, strict=True)
        if asked is not None
    ]
    if not pairs:
        return None
    engine_N, trainer_N = (torch.cat(side) for side in zip(*pairs, strict=True))
    finite_N = torch.isfinite(engine_N) & torch.isfinite(trainer_N)
    log_ratio_N = (trainer_N - engine_N)[finite_N]
    if not log_ratio_N.numel():
        return None
    return LogprobGap(
        tokens=log_ratio_N.numel(),
        mean_abs=float(log_ratio_N.abs().mean()),
        max_abs=float(log_ratio_N.abs().max()),
        k3_kl=float((torch.expm1(log_ratio_N) - log_ratio_N).mean()),
    )


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt and the response to it. Example: `Sample(prompt_ids=(3, 9), response_ids=(5, 2))`."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


def plan_micro_batches(samples: Sequence[Sample], max_tokens: int) -> list[list[int]]:
    """Indices of `samples` in micro-batches of similar length, each at most `max_tokens` padded tokens.

    A sample longer than that has a micro-batch of its own. Depends on the lengths alone, so that two passes over the
    same samples run the same micro-batches and round alike.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(samples)), key=lambda i: -len(samples[i])):
        # Longest first: the first sample of a micro-batch sets its width.
        if batches and (len(batches[-1]) + 1) * len(samples[batches[-1][0]]) <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def response_logits(model: PreTrainedModel, samples: Sequence[Sample], dtype: torch.dtype) -> list[torch.Tensor]:
    """[B] tensors [T, V]: row t holds the logits from which response token t was drawn. float32 (float64 models: that).

    Padding is on the right, where causal attention cannot see it, and positions are those of the tokens: neither a mask
    nor a shift of positions can be forgotten. With `dtype` bfloat16 the pass runs under autocast.
    """
    device = model.device
    width = max(len(sample) for sample in samples)
    input_ids_BL = torch.zeros(len(samples), width, dtype=torch.long, device=device)
    for row, sample in enumerate(samples):
        ids = (*sample.prompt_ids, *sample.response_ids)
        input_ids_BL[row, : len(ids)] = torch.tensor(ids, device=device)
    positions_BL = torch.arange(width, device=device).expand(len(samples), width)
    # The logits before the first response token of the shortest prompt are never needed.
    first = min(len(sample.prompt_ids) for sample in samples) - 1
    with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
        logits_BLV = model(
            input_ids=input_ids_BL, position_ids=positions_BL, use_cache=False, logits_to_keep=width - first
        ).logits
    rows = []
    for row, sample in enumerate(samples):
        start = len(sample.prompt_ids) - 1 - first
        logits_TV = logits_BLV[row, start : start + len(sample.response_ids)]
        rows.append(logits_TV if logits_TV.dtype == torch.float64 else logits_TV.float())
    return rows
