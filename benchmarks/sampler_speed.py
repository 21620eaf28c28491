"""Time of the sampling call of a verify step on CPU: ours and vLLM's own (repaired) take turns in one process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from benchmarks.bars import Bar
from paceline.engine.vllm import compat
from paceline.engine.vllm.engine import prepare_environment

VOCAB, THREADS, REPEATS, WARM_UP = 49_152, 2, 20, 3
SHAPES = ((8, 3), (16, 5))
"""(batch, drafts of each sequence)."""


def sampler_bars() -> Iterable[Bar]:
    """Ratios of ours to vLLM's; the plain sampler is what vLLM uses in an engine without speculation."""
    prepare_environment()
    compat.apply()
    from vllm.platforms import current_platform
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.sample.sampler import Sampler

    from paceline.engine.vllm.sampler import SlotSampler

    # What a worker does when it starts.
    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()
    plain = Sampler("processed_logprobs")
    theirs, ours = RejectionSampler(plain), SlotSampler(plain)
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        for batch, drafts in SHAPES:
            step = _Step(batch, drafts)
            name = f"batch_{batch}_k_{drafts}"
            yield step.bar(f"sampler_{name}_over_vllm", ours, theirs, 0.5)
            yield step.bar(f"sampler_{name}_top_p_0.95_over_vllm", ours, theirs, 1.0, top_p=0.95)
            yield step.bar(f"sampler_{name}_logprobs_over_vllm", ours, theirs, None, num_logprobs=0)
            yield step.bar(f"sampler_{name}_greedy_over_vllm", ours, theirs, None, temperature=0.0)
        step = _Step(16, 0)
        yield step.bar("sampler_batch_16_no_drafts_over_vllm", ours, theirs, None)

        def without_metadata(metadata: Any, draft_probs: None, logits: torch.Tensor, sampling: Any) -> Any:
            return plain(logits, sampling)

        yield step.bar("sampler_batch_16_no_drafts_over_plain", ours, without_metadata, None)
    finally:
        torch.set_num_threads(threads)


class _Step:
    """Inputs of one verify step. A drafted token holds 20 % to 100 % of the mass, so about 60 % are accepted."""

    def __init__(self, batch: int, num_drafts: int) -> None:
        from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

        generator = torch.Generator().manual_seed(batch)
        num_rows = batch * (num_drafts + 1)
        self.logits = 2.5 * torch.randn(num_rows, VOCAB, generator=generator)
        favourites = torch.randint(VOCAB, (num_rows, 1), generator=generator)
        share = 0.2 + 0.8 * torch.rand(num_rows, 1, generator=generator)
        rest = self.logits.scatter(1, favourites, -torch.inf).logsumexp(1, keepdim=True)
        self.logits.scatter_(1, favourites, rest + torch.logit(share, eps=1e-6))
        rows = torch.arange(num_rows).reshape(batch, num_drafts + 1)
        self.batch, self.num_drafts = batch, num_drafts
        self.metadata = SpecDecodeMetadata(
            draft_token_ids=favourites.reshape(batch, -1)[:, :num_drafts].flatten().int(),
            num_draft_tokens=[num_drafts] * batch,
            cu_num_draft_tokens=(torch.arange(1, batch + 1) * num_drafts).int(),
            cu_num_sampled_tokens=(torch.arange(1, batch + 1) * (num_drafts + 1)).int(),
            target_logits_indices=rows[:, :num_drafts].flatten().int(),
            bonus_logits_indices=rows[:, -1].int(),
            logits_indices=rows.flatten().int(),
        )

    def bar(
        self,
        name: str,
        ours: Callable[..., Any],
        theirs: Callable[..., Any],
        goal: float | None,
        *,
        temperature: float = 1.0,
        top_p: float | None = None,
        num_logprobs: int | None = None,
    ) -> Bar:
        """The median ratio of neighbouring calls; it holds when three quarters of the pairs reach the goal."""
        sides = {}
        for side, call in (("ours", ours), ("theirs", theirs)):
            generators = {row: torch.Generator().manual_seed(row) for row in range(self.batch)}
            sides[side] = call, self._sampling(temperature, top_p, num_logprobs, generators)
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        accepted = 0
        with torch.inference_mode():
            for repeat in range(WARM_UP + REPEATS):
                # Who goes first takes turns, too.
                for side in list(sides) if repeat % 2 else list(sides)[::-1]:
                    call, sampling = sides[side]
                    began = time.perf_counter()
                    output = call(self.metadata, None, self.logits, sampling)
                    elapsed = time.perf_counter() - began
                    if repeat >= WARM_UP:
                        seconds[side].append(elapsed)
                        if side == "ours":
                            accepted += int((output.sampled_token_ids >= 0).sum()) - self.batch
        ratios = [mine / yours for mine, yours in zip(seconds["ours"], seconds["theirs"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        verdict = True if goal is None or high <= goal else False if low > goal else "undecided"
        spread = {
            "ratio_quartiles": [round(low, 3), round(high, 3)],
            **{
                f"{side}_ms": {"median": _ms(statistics.median(taken)), "min": _ms(min(taken)), "max": _ms(max(taken))}
                for side, taken in seconds.items()
            },
            "accepted_per_sequence": round(accepted / REPEATS / self.batch, 2),
            "repeats": REPEATS,
            "threads": THREADS,
        }
        return Bar(name, round(middle, 3), "reported" if goal is None else f"<= {goal}", verdict, spread)

    def _sampling(
        self,
        temperature: float,
        top_p: float | None,
        num_logprobs: int | None,
        generators: dict[int, torch.Generator],
    ) -> Any:
        from vllm.v1.sample.logits_processor import LogitsProcessors
        from vllm.v1.sample.metadata import SamplingMetadata

        greedy = temperature == 0.0
        nothing = torch.empty(0)
        return SamplingMetadata(
            temperature=None if greedy else torch.full((self.batch,), temperature),
            all_greedy=greedy,
            all_random=not greedy,
            top_p=None if top_p is None else torch.full((self.batch,), top_p),
            top_k=None,
            generators={} if greedy else generators,
            max_num_logprobs=num_logprobs,
            no_penalties=True,
            prompt_token_ids=None,
            frequency_penalties=nothing,
            presence_penalties=nothing,
            repetition_penalties=nothing,
            output_token_ids=[],
            allowed_token_ids_mask=None,
            bad_words_token_ids={},
            logitsprocs=LogitsProcessors(),
        )


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 2)
