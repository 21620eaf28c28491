"""The parts of a run, built from its recipe."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, assert_never

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from paceline.config.run import (
    DraftModelDraft,
    Eagle3Draft,
    HistoryDraft,
    MtpDraft,
    NgramDraft,
    NoDraft,
    Recipe,
    ReferenceEngine,
    SamplingConfig,
    VllmEngine,
)
from paceline.data.prompts import check_fit, load_prompts, prompt_style
from paceline.data.source import PromptSource
from paceline.drafts.base import Drafter
from paceline.drafts.draft_model import DraftModelDrafter, load_draft_model
from paceline.drafts.eagle3 import Eagle3Drafter
from paceline.drafts.history import HistoryDrafter, HistoryIndex
from paceline.drafts.mtp import MtpDrafter
from paceline.drafts.ngram import NgramDrafter
from paceline.engine import reference
from paceline.engine.base import RolloutEngine
from paceline.engine.publish import weights_digest
from paceline.errors import CheckpointError, ModelError
from paceline.loop.draft_start import prepare_draft
from paceline.loop.seeds import draft_seed
from paceline.models.cache import cache_root
from paceline.models.eagle3 import Eagle3Head
from paceline.models.folder import load_policy, load_tokenizer, resolve_policy
from paceline.models.mtp import MtpHead
from paceline.models.weights import policy_tensors
from paceline.observe.progress import RunProgress, throttled
from paceline.rewards.base import Reward
from paceline.rewards.pool import RewardPool
from paceline.train.online import OnlineDraft, OnlineEagle3
from paceline.train.policy import PolicyTrainer
from paceline.types import Prompt, Sampling, Versions


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
    draft: OnlineDraft | None = None
    """The trainer's copy of a draft that may learn; None for a draft model, which is frozen, and without weights."""
    history: HistoryIndex | None = None
    """What `history` drafts are made from, read by the engine; None for another method."""
    frozen_config: PreTrainedConfig | None = None
    """config.json of a draft model, whose weights no publish changes; None: there is none."""
    digests: dict[str, str | None] = field(default_factory=lambda: {"policy": None, "draft": None})
    """Digest of the policy and of the draft that the engine holds, 16 hex digits each, since the first `publish`. That
    of a draft which the engine still has from its start is of the trainer's copy. None: a draft without weights of its
    own."""

    @property
    def draft_version(self) -> int:
        """The version that the engine's draft must have; -1: no weights."""
        if self.draft is None:
            return -1 if self.frozen_config is None else 0
        return self.draft.version

    def publish(self) -> None:
        """Bring the engine to the present weights: the policy always, the draft when the engine has another version."""
        versions = Versions(self.trainer.version, self.draft_version)
        self.digests["policy"] = self.engine.publish(self.trainer.weights(), versions).digest
        if self.draft is None:
            return
        is_old = self.engine.versions.draft != self.draft.version
        if is_old or self.digests["draft"] is None:
            weights = self.draft.weights()
            if weights is not None:
                self.digests["draft"] = (
                    self.engine.publish_draft(weights, versions).digest if is_old else weights_digest(weights)
                )

    def restore_draft(
        self, weights: Mapping[str, torch.Tensor] | None, state: Mapping[str, Any] | None, versions: Versions
    ) -> None:
        """Go on with the draft of a checkpoint, whatever the engine has loaded. Raises `CheckpointError`."""
        if (state is None) != (self.draft is None):
            raise CheckpointError(
                f"The checkpoint has {'no draft' if state is None else 'a draft'} and the recipe's draft.method needs "
                f"{'one' if state is None else 'none'}: resume with the recipe that the run was started with."
            )
        if self.draft is not None and state is not None:
            self.draft.load_weights(weights)
            self.draft.load_state_dict(state)
            if weights is not None:
                self.digests["draft"] = self.engine.publish_draft(weights, versions).digest

    def restore_history(self, state: Mapping[str, Any] | None) -> None:
        """Go on with the history of a checkpoint. Raises `CheckpointError`, KeyError or ValueError for none."""
        if (state is None) != (self.history is None):
            raise CheckpointError(
                f"The checkpoint has {'no history' if state is None else 'a history'} of responses and the recipe's "
                f"draft.method needs {'one' if state is None else 'none'}: resume with the recipe that the run was "
                "started with."
            )
        if self.history is not None and state is not None:
            self.history.load_state_dict(state)

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
    policy_folder = resolve_policy(recipe.policy, cache, throttled(progress))
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
        draft_folder = prepare_draft(recipe, policy_folder, prompts.train, sampling, cache, progress)
        loaded = _load_draft(recipe, draft_folder, policy, tokenizer, max_model_len)
        digests: dict[str, str | None] = {"policy": None, "draft": None}
        if isinstance(loaded, PreTrainedModel):
            digests["draft"] = weights_digest(policy_tensors(loaded))
        progress.status("Starting the engine")
        history = _build_history(recipe)
        engine = _build_engine(recipe, policy_folder.path, draft_folder, loaded, history, max_model_len)
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
        draft=_online_draft(recipe, loaded, policy, sampling),
        history=history,
        frozen_config=loaded.config if isinstance(loaded, PreTrainedModel) else None,
        digests=digests,
    )


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


def _load_draft(
    recipe: Recipe,
    folder: Path | None,
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    max_model_len: int,
) -> Eagle3Head | PreTrainedModel | None:
    """What lies in the draft's folder, checked against the policy: an EAGLE-3 head or a draft model."""
    match recipe.draft:
        case Eagle3Draft() if folder is not None:
            return Eagle3Head.load(folder, policy.config, max_model_len)
        case DraftModelDraft() if folder is not None:
            return load_draft_model(folder, policy.config, tokenizer, max_model_len)
        case _:
            return None


def _build_history(recipe: Recipe) -> HistoryIndex | None:
    match recipe.draft:
        case HistoryDraft() as draft if draft.num_draft_tokens > 0:
            return HistoryIndex.from_config(draft)
        case _:
            return None


def _build_engine(
    recipe: Recipe,
    policy_folder: Path,
    draft_folder: Path | None,
    loaded: Eagle3Head | PreTrainedModel | None,
    history: HistoryIndex | None,
    max_model_len: int,
) -> RolloutEngine:
    match recipe.engine:
        case ReferenceEngine() as config:
            policy = load_policy(policy_folder, _DTYPES[config.dtype])
            drafter, num_draft_tokens = _build_drafter(recipe, loaded, history, policy)
            has_weights = isinstance(drafter, Eagle3Drafter | MtpDrafter | DraftModelDrafter)
            return reference.ReferenceEngine(
                policy,
                drafter,
                num_draft_tokens=num_draft_tokens,
                max_num_seqs=config.max_num_seqs,
                max_model_len=max_model_len,
                versions=Versions(policy=0, draft=0 if has_weights else -1),
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
                history_index=history,
            )
        case _:
            assert_never(recipe.engine)


def _build_drafter(
    recipe: Recipe,
    loaded: Eagle3Head | PreTrainedModel | None,
    history: HistoryIndex | None,
    policy: PreTrainedModel,
) -> tuple[Drafter | None, int]:
    match recipe.draft:
        case NoDraft():
            return None, 0
        case NgramDraft() as draft:
            return NgramDrafter(draft.min_ngram, draft.max_ngram), draft.num_draft_tokens
        case HistoryDraft() as draft:
            return None if history is None else HistoryDrafter(history), draft.num_draft_tokens
        case Eagle3Draft() as draft:
            # A copy: the trainer goes on with the head, and the engine must keep what was published.
            head = copy.deepcopy(loaded)
            return Eagle3Drafter(head, policy) if isinstance(head, Eagle3Head) else None, draft.num_draft_tokens
        case MtpDraft() as draft:
            return None if draft.num_draft_tokens == 0 else MtpDrafter(policy), draft.num_draft_tokens
        case DraftModelDraft() as draft:
            # In the policy's type, as vLLM loads it.
            is_loaded = isinstance(loaded, PreTrainedModel)
            return DraftModelDrafter(loaded, policy.dtype) if is_loaded else None, draft.num_draft_tokens
        case _:
            assert_never(recipe.draft)


def _online_draft(
    recipe: Recipe, loaded: Eagle3Head | PreTrainedModel | None, policy: PreTrainedModel, sampling: Sampling
) -> OnlineDraft | None:
    """The trainer's copy of the draft; None for a frozen draft, for one without weights, and without speculation."""
    seed = draft_seed(recipe.run.seed)
    match recipe.draft:
        case Eagle3Draft() as draft if isinstance(loaded, Eagle3Head):
            return OnlineEagle3(
                loaded,
                policy,
                draft,
                depth=draft.depth,
                num_draft_tokens=draft.num_draft_tokens,
                sampling=sampling,
                seed=seed,
            )
        case MtpDraft() as draft if draft.num_draft_tokens > 0:
            return OnlineDraft(
                MtpHead(policy),
                policy,
                draft,
                depth=draft.depth,
                num_draft_tokens=draft.num_draft_tokens,
                sampling=sampling,
                seed=seed,
            )
        case _:
            return None


_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
