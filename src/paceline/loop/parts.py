"""The parts of a run, built from its recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from paceline.config.run import (
    Eagle3Draft,
    FolderPolicy,
    NgramDraft,
    NoDraft,
    Policy,
    Recipe,
    ReferenceEngine,
    SamplingConfig,
    SmolLM2Policy,
    TinyPolicy,
    VllmEngine,
)
from paceline.data.prompts import Style, check_fit, load_prompts
from paceline.data.source import PromptSource
from paceline.drafts.base import Drafter
from paceline.drafts.eagle3 import Eagle3Drafter
from paceline.drafts.ngram import NgramDrafter
from paceline.engine import reference
from paceline.engine.base import RolloutEngine
from paceline.errors import CheckpointError, ModelError
from paceline.loop.seeds import request_seed
from paceline.models.cache import build_once, cache_root, digest_of
from paceline.models.eagle3 import Eagle3Config, Eagle3Head
from paceline.models.folder import PolicyFolder, load_policy, load_tokenizer, resolve_policy
from paceline.observe.progress import RunProgress
from paceline.rewards.base import Reward
from paceline.rewards.pool import RewardPool
from paceline.train.draft import Answer, content_key, train_eagle3
from paceline.train.policy import PolicyTrainer
from paceline.types import Prompt, Request, Sampling, Versions

ANSWERS_STEP = -3
"""Stands for the step in the seeds of the answers that a draft is trained on."""


@dataclass
class Parts:
    """What a run is made of. Tests and comparisons may put their own together."""

    engine: RolloutEngine
    trainer: PolicyTrainer
    prompts: PromptSource
    held_out: Sequence[Prompt]
    """Never trained on; one sample of each makes an evaluation."""
    rewards: Reward
    decode: Callable[[Sequence[int]], str]
    """Response tokens -> the text that is scored."""
    sampling: Sampling
    draft: Mapping[str, torch.Tensor] | None = None
    """The draft's weights under their exported names; None for a method without weights."""

    @property
    def draft_version(self) -> int:
        """0: the weights the run started with (drafts are frozen); -1: no weights."""
        return -1 if self.draft is None else 0

    def restore_draft(self, draft: Mapping[str, torch.Tensor] | None, versions: Versions) -> None:
        """Go on with the draft of a checkpoint, whatever the engine has loaded. Raises `CheckpointError`."""
        if (draft is None) != (self.draft is None):
            raise CheckpointError(
                f"The checkpoint has {'no draft' if draft is None else 'a draft'} and the recipe's draft.method needs "
                f"{'one' if draft is None else 'none'}: resume with the recipe that the run was started with."
            )
        if draft is not None:
            self.draft = draft
            self.engine.publish_draft(draft, versions)

    def close(self) -> None:
        """End the reward workers and the engine."""
        self.rewards.close()
        self.engine.close()


def build_parts(recipe: Recipe, progress: RunProgress) -> Parts:
    """All parts of a run. What is cheap to check comes before what takes long.

    Raises `ConfigError`, `DataError`, `ModelError` or `EngineError` with the key that has to change.
    """
    cache = cache_root()
    progress.status("Preparing the policy")
    policy_folder = resolve_policy(recipe.policy, cache, _throttled(progress))
    tokenizer = load_tokenizer(policy_folder.path)
    prompts = load_prompts(recipe.data, tokenizer, prompt_style(recipe.policy, tokenizer))
    policy = load_policy(policy_folder.path)
    sampling = make_sampling(recipe.sampling, policy, tokenizer)
    everything = [*prompts.train, *prompts.held_out]
    check_fit(everything, sampling.max_tokens, policy.config.max_position_embeddings)
    max_model_len = max(len(prompt.token_ids) for prompt in everything) + sampling.max_tokens
    # The workers import their libraries while the engine loads.
    rewards = RewardPool(recipe.data.task, recipe.rewards)
    try:
        draft_folder = prepare_draft(recipe, policy_folder, cache, progress)
        head = None if draft_folder is None else Eagle3Head.load(draft_folder, policy.config, max_model_len)
        progress.status("Starting the engine")
        engine = _build_engine(recipe, policy_folder.path, draft_folder, head, max_model_len)
    except BaseException:
        rewards.close()
        raise
    return Parts(
        engine=engine,
        trainer=PolicyTrainer(policy, recipe.train, recipe.algorithm, sampling),
        prompts=PromptSource(prompts.train, recipe.run.seed),
        held_out=prompts.held_out,
        rewards=rewards,
        decode=lambda token_ids: str(tokenizer.decode(list(token_ids), skip_special_tokens=True)),
        sampling=sampling,
        draft=None if head is None else head.export_state(),
    )


def prompt_style(policy: Policy, tokenizer: PreTrainedTokenizerBase) -> Style:
    """How questions are written for a policy."""
    match policy:
        case TinyPolicy():
            return "compact"
        case SmolLM2Policy():
            return "chat"
        case FolderPolicy():
            return "plain" if tokenizer.chat_template is None else "chat"
        case _:
            assert_never(policy)


def make_sampling(config: SamplingConfig, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Sampling:
    """The recipe's sampling, with the policy's stop tokens: those of its generation config and the tokenizer's own.

    Raises `ModelError` for a policy without any: its responses would never end.
    """
    generation_eos = policy.generation_config.eos_token_id if policy.generation_config is not None else None
    listed = generation_eos if isinstance(generation_eos, list) else [generation_eos]
    stops = {token for token in (*listed, tokenizer.eos_token_id) if token is not None}
    if not stops:
        raise ModelError(
            "policy: neither generation_config.json nor the tokenizer of the policy names an end token (eos_token_id): "
            "its responses would never end. Name one in generation_config.json."
        )
    return Sampling(
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        max_tokens=config.max_tokens,
        stop_token_ids=tuple(sorted(stops)),
    )


def prepare_draft(recipe: Recipe, policy_folder: PolicyFolder, cache: Path, progress: RunProgress) -> Path | None:
    """The folder of the draft's weights, trained now unless the cache has it; None when there is nothing to load.

    An EAGLE-3 head without `draft.path` is trained on answers that the policy samples on the training prompts, as it
    will in the run. Its cache key covers everything that decides the weights: policy, prompts, sampling and training.
    """
    match recipe.draft:
        case NoDraft() | NgramDraft():
            return None
        case Eagle3Draft() as draft if draft.num_draft_tokens == 0:
            return None
        case Eagle3Draft() as draft if draft.path is not None:
            return draft.path
        case Eagle3Draft() as draft:
            return _trained_head(recipe, draft, policy_folder, cache, progress)
        case _:
            assert_never(recipe.draft)


def _trained_head(
    recipe: Recipe, draft: Eagle3Draft, policy_folder: PolicyFolder, cache: Path, progress: RunProgress
) -> Path:
    tokenizer = load_tokenizer(policy_folder.path)
    policy = load_policy(policy_folder.path)
    # Layers and vocabulary that cannot be are found here, not after the answers have been sampled.
    Eagle3Config.for_policy(policy.config, draft.aux_layers, draft.vocab_size)
    sampling = make_sampling(recipe.sampling, policy, tokenizer)
    prompts = load_prompts(recipe.data, tokenizer, prompt_style(recipe.policy, tokenizer))
    requests = _answer_requests(prompts.train, draft)
    data_key = digest_of([request.prompt.token_ids for request in requests])

    def build(folder: Path) -> None:
        progress.status(f"Sampling {len(requests)} answers for the draft to learn from")
        sampler = reference.ReferenceEngine(policy, max_num_seqs=recipe.engine.max_num_seqs)
        completions = sampler.generate(requests, sampling).completions
        answers = [
            Answer((*request.prompt.token_ids, *completion.token_ids), len(request.prompt.token_ids))
            for request, completion in zip(requests, completions, strict=True)
        ]
        report = _throttled(progress)
        head, figures = train_eagle3(
            policy, answers, draft, sampling, lambda done, total, loss: report(f"draft, loss {loss:.3f}", done / total)
        )
        head.export(folder)
        progress.status(
            f"Draft trained: predicted acceptance length {figures.acceptance.alpha:.2f} at k = {draft.num_draft_tokens}"
        )

    return build_once(cache, f"eagle3-{content_key(draft, policy_folder.hash, data_key, sampling)}", build)


def _answer_requests(prompts: Sequence[Prompt], draft: Eagle3Draft) -> list[Request]:
    """`draft.num_answers` requests; answers to one prompt next to each other, so that the last ones can be held out."""
    per_prompt = -(-draft.num_answers // len(prompts))
    pairs = [(prompt, sample) for prompt in prompts for sample in range(per_prompt)][: draft.num_answers]
    return [Request(p, sample, request_seed(draft.seed, ANSWERS_STEP, p.id, sample, 0)) for p, sample in pairs]


def _build_engine(
    recipe: Recipe, policy_folder: Path, draft_folder: Path | None, head: Eagle3Head | None, max_model_len: int
) -> RolloutEngine:
    match recipe.engine:
        case ReferenceEngine() as config:
            policy = load_policy(policy_folder, _DTYPES[config.dtype])
            drafter, num_draft_tokens = _build_drafter(recipe, head, policy)
            return reference.ReferenceEngine(
                policy,
                drafter,
                num_draft_tokens=num_draft_tokens,
                max_num_seqs=config.max_num_seqs,
                max_model_len=max_model_len,
                versions=Versions(policy=0, draft=-1 if head is None else 0),
            )
        case VllmEngine() as config:
            from paceline.engine.vllm import engine as vllm

            return vllm.VllmEngine(
                policy_folder,
                config,
                recipe.draft,
                draft_folder=draft_folder,
                max_model_len=max_model_len,
                seed=recipe.run.seed,
            )
        case _:
            assert_never(recipe.engine)


def _build_drafter(recipe: Recipe, head: Eagle3Head | None, policy: PreTrainedModel) -> tuple[Drafter | None, int]:
    match recipe.draft:
        case NoDraft():
            return None, 0
        case NgramDraft() as draft:
            return NgramDrafter(draft.min_ngram, draft.max_ngram), draft.num_draft_tokens
        case Eagle3Draft() as draft:
            return None if head is None else Eagle3Drafter(head, policy), draft.num_draft_tokens
        case _:
            assert_never(recipe.draft)


_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def _throttled(progress: RunProgress) -> Callable[[str, float], None]:
    """A (what, fraction) callback that says something at every tenth."""
    said: dict[str, int] = {}

    def report(what: str, done: float) -> None:
        key = what.partition(",")[0]
        if said.get(key, -1) < int(done * 10):
            said[key] = int(done * 10)
            progress.status(f"{what}: {done:.0%}")

    return report
