"""A whole run on a tiny random policy: no file outside of its run folder, no worker process, a few steps a second."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from paceline.config.run import Eagle3Draft, HistoryDraft, NgramDraft, Recipe
from paceline.data.source import PromptSource
from paceline.drafts.base import Drafter
from paceline.drafts.eagle3 import Eagle3Drafter
from paceline.drafts.history import HistoryDrafter, HistoryIndex
from paceline.drafts.ngram import NgramDrafter
from paceline.engine.base import RolloutEngine
from paceline.engine.reference import ReferenceEngine
from paceline.loop.parts import Parts
from paceline.models.eagle3 import Eagle3Config, Eagle3Head
from paceline.train.online import OnlineEagle3
from paceline.train.policy import PolicyTrainer
from paceline.types import Prompt, Sampling, Versions

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


def tiny_recipe(root: Path, draft: str = "ngram", /, **sections: Mapping[str, Any]) -> Recipe:
    """Six steps of three groups of four; `sections` are laid over it, key by key."""
    keys: dict[str, dict[str, Any]] = {
        "ngram": {"min_ngram": 1},
        "history": {"min_match": 1},
        "eagle3": {"aux_layers": [0, 1, 2]},
    }
    tables: dict[str, dict[str, Any]] = {
        "run": {"root": str(root), "num_steps": 6, "checkpoint_every": 2, "seed": 11},
        "engine": {"kind": "reference", "max_num_seqs": 16},
        "draft": {"method": draft, **keys.get(draft, {})},
        "algorithm": {"group_size": 4, "prompts_per_step": 3},
        "train": {"lr": 3e-3, "micro_batch_tokens": 200},
        "sampling": {"max_tokens": 12},
    }
    for name, table in sections.items():
        tables[name] = {**tables.get(name, {}), **table}
    return Recipe.model_validate(tables)


def tiny_head(policy: PreTrainedModel, draft: Eagle3Draft) -> Eagle3Head:
    """An untrained EAGLE-3 head for `policy`, the same each time."""
    config = Eagle3Config.for_policy(policy.config, draft.aux_layers, trained_depth=draft.depth)
    return Eagle3Head.initialize(config, policy, None, torch.Generator().manual_seed(0))


def tiny_parts(
    recipe: Recipe,
    engine: RolloutEngine | None = None,
    drafter: Drafter | None = None,
    unscorable_length: int | None = None,
    policy: PreTrainedModel | None = None,
) -> Parts:
    """Real parts, small; `engine`, `drafter` and `policy` replace the recipe's."""
    policy = policy or tiny_policy(dtype=torch.float32)
    sampling = Sampling(
        temperature=recipe.sampling.temperature,
        max_tokens=recipe.sampling.max_tokens,
        stop_token_ids=(STOP_TOKEN,),
    )
    rollout_policy, online = copy.deepcopy(policy), None
    if isinstance(recipe.draft, Eagle3Draft):
        head = tiny_head(policy, recipe.draft)
        drafter = drafter or Eagle3Drafter(copy.deepcopy(head), rollout_policy)
        online = OnlineEagle3(
            head,
            policy,
            recipe.draft,
            depth=recipe.draft.depth,
            num_draft_tokens=recipe.draft.num_draft_tokens,
            sampling=sampling,
            seed=recipe.run.seed,
        )
    elif drafter is None and isinstance(recipe.draft, NgramDraft):
        drafter = NgramDrafter(recipe.draft.min_ngram, recipe.draft.max_ngram)
    elif drafter is None and isinstance(recipe.draft, HistoryDraft):
        drafter = HistoryDrafter(HistoryIndex.from_config(recipe.draft))
    if engine is None:
        engine = ReferenceEngine(
            rollout_policy,
            drafter,
            num_draft_tokens=3,
            max_num_seqs=recipe.engine.max_num_seqs,
            versions=Versions(policy=0, draft=-1 if online is None else 0),
        )
    return Parts(
        engine=engine,
        trainer=PolicyTrainer(policy, recipe.train, recipe.algorithm, sampling),
        # Fewer than a run uses: the third step begins a new epoch.
        prompts=PromptSource([Prompt(f"train-{i}", (2 + i % 9, 3 + i % 5, 4 + i % 7)) for i in range(7)], seed=5),
        held_out=[Prompt(f"eval-{i}", (2 + i % 8, 5, 3 + i % 4)) for i in range(24)],
        rewards=ShareOfGoodTokens(unscorable_length),
        decode=lambda ids: " ".join(map(str, ids)),
        sampling=sampling,
        draft=online,
        history=drafter.index if isinstance(drafter, HistoryDrafter) else None,
    )


def without_seconds(record: Mapping[str, Any]) -> dict[str, Any]:
    """A line of metrics.jsonl without what a clock decides."""
    kept = {key: value for key, value in record.items() if key not in ("stage_s", "engine_s")}
    kept["live_batch"] = [change[1] for change in record["live_batch"]]
    return kept
