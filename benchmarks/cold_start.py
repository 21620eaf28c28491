"""SmolLM2 after a cold start: fine-tuned to write sums out before RL, as reasoning policies are before theirs.

As it comes, SmolLM2 at temperature 1 is unsure of most of its tokens, which bounds what any draft of most likely tokens
can gain (`paceline draft eval` prints that limit). This one knows the form of an answer, and still has the length tail
of the sums.
"""

from __future__ import annotations

import inspect
import random
import re
import sys
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from paceline.config.run import Recipe, SmolLM2Policy
from paceline.data.prompts import load_prompts, prompt_style
from paceline.models.cache import build_once, cache_root, digest_of
from paceline.models.folder import load_policy, load_tokenizer, resolve_policy
from paceline.train.logprobs import Sample, response_logits
from paceline.types import Prompt

BATCH_SIZE = 16
PEAK_LR = 1e-4
WARMUP_UPDATES = 5

_SUM = re.compile(r"\d+(?: [+-] \d+)+")


def cold_started(recipe: Recipe) -> Path:
    """Folder of SmolLM2 after one pass over worked answers to the training prompts of `recipe`; cached by content.

    The held-out prompts, on which speeds are measured, are none of those.
    """
    base, cache = resolve_policy(SmolLM2Policy()), cache_root()
    tokenizer = load_tokenizer(base.path)
    prompts = load_prompts(recipe.data, tokenizer, prompt_style(SmolLM2Policy(), tokenizer)).train
    samples = [_worked(prompt, tokenizer) for prompt in prompts]
    content = [inspect.getsource(sys.modules[__name__]), base.hash, [sample.response_ids for sample in samples]]

    def build(folder: Path) -> None:
        policy = load_policy(base.path)
        _fine_tune(policy, samples)
        policy.bfloat16().save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    return build_once(cache, f"smollm2-cold-start-{digest_of(content)[:16]}", build)


def worked_answer(question: str) -> str:
    """Example: `... 6 + 2 - 5 = ...` gives `6 + 2 = 8`, `8 - 5 = 3` and `Answer: 3`, a line each."""
    found = _SUM.search(question)
    assert found is not None, question
    first, *rest = found.group().split(" ")
    lines, total = [], int(first)
    for sign, term in zip(rest[::2], map(int, rest[1::2]), strict=True):
        result = total + term if sign == "+" else total - term
        lines.append(f"{total} {sign} {term} = {result}")
        total = result
    return "\n".join([*lines, f"Answer: {total}"])


def _worked(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> Sample:
    response_ids = tokenizer.encode(worked_answer(prompt.text), add_special_tokens=False)
    assert isinstance(tokenizer.eos_token_id, int)
    return Sample(prompt.token_ids, (*response_ids, tokenizer.eos_token_id))


def _fine_tune(policy: PreTrainedModel, samples: list[Sample]) -> None:
    """Cross-entropy of the response tokens, in place."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=PEAK_LR, weight_decay=0.0)
    order = random.Random(0).sample(samples, len(samples))
    batches = [order[start : start + BATCH_SIZE] for start in range(0, len(order), BATCH_SIZE)]
    for update, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LR * min((update + 1) / WARMUP_UPDATES, 1 - update / len(batches))
        rows = response_logits(policy, batch, torch.bfloat16)
        targets = [torch.tensor(sample.response_ids) for sample in batch]
        loss = torch.nn.functional.cross_entropy(torch.cat(rows), torch.cat(targets))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        print(f"cold start: update {update + 1} of {len(batches)}, loss {loss.item():.3f}", file=sys.stderr, flush=True)
