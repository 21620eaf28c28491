"""A whole run on a tiny random policy: no file outside of its run folder, no worker process, a few steps a second."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from paceline.config.run import NgramDraft, Recipe
from paceline.data.source import PromptSource
from paceline.drafts.base import Drafter
from paceline.drafts.ngram import NgramDrafter
from paceline.engine.base import RolloutEngine
from paceline.engine.reference import ReferenceEngine
from paceline.loop.parts import Parts
from paceline.train.policy import PolicyTrainer
from paceline.types import Prompt, Sampling

GOOD_TOKEN = 7
STOP_TOKEN = 1


def tiny_policy(
    num_layers: int = 2,
    vocab_size: int = 20,
    max_positions: int = 128,
    tied: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Qwen3ForCausalLM:
    """A Qwen3 of width 32 with random weights; the global random state is left as it was."""
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tied,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                # As initialised all tokens are about equally likely, and a draft is never right.
                spread = 1.0 if "embed" in name or "lm_head" in name else 0.4
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread / parameter.shape[1] ** 0.25)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model.eval()


class ShareOfGoodTokens:
    """Reward: share of tokens that are `GOOD_TOKEN`. A response of `unscorable_length` tokens fails."""

    def __init__(self, unscorable_length: int | None = None) -> None:
        self._unscorable_length = unscorable_length
        self.closed = False

    def submit(self, text: str, prompt: Prompt) -> Future[float | None]:
        words = text.split()
        future: Future[float | None] = Future()
        failed = len(words) == self._unscorable_length
        future.set_result(None if failed else words.count(str(GOOD_TOKEN)) / len(words))
        return future

    def score(self, responses: Sequence[tuple[str, Prompt]]) -> list[float | None]:
        return [self.submit(text, prompt).result() for text, prompt in responses]

    def close(self) -> None:
        self.closed = True


def tiny_recipe(root: Path, draft: str = "ngram", **sections: Mapping[str, Any]) -> Recipe:
    """Six steps of three groups of four; `sections` are laid over it, key by key."""
    tables: dict[str, dict[str, Any]] = {
        "run": {"root": str(root), "num_steps": 6, "checkpoint_every": 2, "seed": 11},
        "engine": {"kind": "reference", "max_num_seqs": 16},
        "draft": {"method": "none"} if draft == "none" else {"method": draft, "min_ngram": 1},
        "algorithm": {"group_size": 4, "prompts_per_step": 3},
        "train": {"lr": 3e-3, "micro_batch_tokens": 200},
        "sampling": {"max_tokens": 12},
    }
    for name, table in sections.items():
        tables[name] = {**tables.get(name, {}), **table}
    return Recipe.model_validate(tables)


def tiny_parts(
    recipe: Recipe,
    engine: RolloutEngine | None = None,
    drafter: Drafter | None = None,
    unscorable_length: int | None = None,
) -> Parts:
    """Real parts, small; `engine` and `drafter` replace the recipe's."""
    policy = tiny_policy(dtype=torch.float32)
    sampling = Sampling(
        temperature=recipe.sampling.temperature,
        max_tokens=recipe.sampling.max_tokens,
        stop_token_ids=(STOP_TOKEN,),
    )
    if drafter is None and isinstance(recipe.draft, NgramDraft):
        drafter = NgramDrafter(recipe.draft.min_ngram, recipe.draft.max_ngram)
    if engine is None:
        max_num_seqs = recipe.engine.max_num_seqs
        engine = ReferenceEngine(copy.deepcopy(policy), drafter, num_draft_tokens=3, max_num_seqs=max_num_seqs)
    return Parts(
        engine=engine,
        trainer=PolicyTrainer(policy, recipe.train, recipe.algorithm, sampling),
        # Fewer than a run uses: the third step begins a new epoch.
        prompts=PromptSource([Prompt(f"train-{i}", (2 + i % 9, 3 + i % 5, 4 + i % 7)) for i in range(7)], seed=5),
        held_out=[Prompt(f"eval-{i}", (2 + i % 8, 5, 3 + i % 4)) for i in range(24)],
        rewards=ShareOfGoodTokens(unscorable_length),
        decode=lambda ids: " ".join(map(str, ids)),
        sampling=sampling,
    )


def without_seconds(record: Mapping[str, Any]) -> dict[str, Any]:
    """A line of metrics.jsonl without what a clock decides."""
    kept = {key: value for key, value in record.items() if key != "stage_s"}
    kept["live_batch"] = [change[1] for change in record["live_batch"]]
    return kept
