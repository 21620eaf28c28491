"""How a draft with weights begins: read from a folder, or trained before the run and cached by content.

A trained head's folder also holds `training.json`: what it learned from and what came of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, assert_never

from pydantic import BaseModel, ConfigDict
from transformers import PreTrainedModel

from paceline.config.run import (
    DraftModelDraft,
    Eagle3Draft,
    HistoryDraft,
    MtpDraft,
    NgramDraft,
    NoDraft,
    Recipe,
    TinyPolicy,
)
from paceline.data.generic import Encoding, load_texts
from paceline.data.prompts import prompt_style
from paceline.engine.reference import ReferenceEngine
from paceline.errors import ConfigError
from paceline.loop.seeds import request_seed
from paceline.models.cache import build_once, digest_of, file_checksums
from paceline.models.eagle3 import Eagle3Config, Eagle3Head, policy_parts
from paceline.models.eagle3_formats import is_ours
from paceline.models.folder import PolicyFolder, load_policy, load_tokenizer, resolve_policy
from paceline.observe.progress import RunProgress, throttled
from paceline.train.draft import HELD_OUT_SHARE, Answer, DraftFigures, content_key, train_eagle3
from paceline.types import Prompt, Request, Sampling

ANSWERS_STEP = -3
"""Stands for the step in the seeds of the answers that a draft is trained on."""
TRAINING_FILE = "training.json"
_REWRITE_VERSION = 1
"""Raised when heads of other layouts are read differently, so that earlier readings are not taken for new ones."""


class TrainingReport(BaseModel):
    """What `training.json` says: losses in nats, shares as fractions 0-1. Measured, unless it says predicted."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    data: Literal["in_domain", "generic"]
    start: Literal["random", "checkpoint"]
    loss: float
    """Per supervised (position, depth) pair, mean over the last epoch."""
    predicted_alpha: float
    """Acceptance length on answers of the policy that were not learned from, at `num_draft_tokens`; predicted."""
    predicted_conditional: tuple[float, ...]
    """[k]"""
    num_draft_tokens: int
    vocab_size: int
    """Of the draft."""
    coverage: float
    """Share of the learned response tokens that the draft vocabulary has."""
    policy_coverage: float
    """The same of the policy's own answers that were not learned from."""
    num_answers: int
    """Learned from."""
    num_held_out: int
    num_updates: int
    predicted_limit: float | None = None
    """`predicted_alpha` if every draft token were the policy's most likely one; None: trained before this was kept."""

    def sentences(self) -> list[str]:
        """For people."""
        what = "texts" if self.data == "generic" else "answers of the policy"
        limit = self.predicted_limit
        of_what = "" if limit is None else f"; {limit:.2f} if every draft were the policy's own most likely token"
        return [
            f"Draft trained on {self.num_answers} {what}, from {self.start} weights: loss {self.loss:.3f} nats",
            f"Draft vocabulary: {self.vocab_size} tokens, {self.coverage:.1%} of the response tokens learned from and "
            f"{self.policy_coverage:.1%} of those in the policy's held-out answers",
            f"Predicted acceptance length {self.predicted_alpha:.2f} at k = {self.num_draft_tokens}, on "
            f"{self.num_held_out} held-out answers{of_what}",
        ]


def read_report(folder: Path) -> TrainingReport | None:
    """The report beside a head; None for a head that was not trained here."""
    path = folder / TRAINING_FILE
    return TrainingReport.model_validate_json(path.read_text()) if path.is_file() else None


def prepare_draft(
    recipe: Recipe,
    policy_folder: PolicyFolder,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    cache: Path,
    progress: RunProgress,
) -> Path | None:
    """The folder of the draft's weights as vLLM loads them; None when there is nothing to load.

    A draft model is used as it is. A smaller tiny, where the recipe asks for one, is trained unless the cache has it.

    A head that `draft.path` names is used as it is; one in another trainer's layout is rewritten first, into the cache.
    Without `draft.path` an EAGLE-3 head is trained now unless the cache has it, on answers that the policy samples on
    `prompts`, as it will in the run, or on generic texts; from random weights, or from those of `draft.start`. Its
    cache key covers everything that decides the weights: policy, data, sampling, training, and what it starts from.

    Raises `ModelError`, `DataError` or `ConfigError` with the key that has to change.
    """
    match recipe.draft:
        case NoDraft() | NgramDraft() | HistoryDraft() | MtpDraft():
            return None
        case Eagle3Draft() | DraftModelDraft() as draft if draft.num_draft_tokens == 0:
            return None
        case DraftModelDraft(path=Path() as folder):
            return folder.expanduser()
        case DraftModelDraft() as draft:
            assert isinstance(recipe.policy, TinyPolicy)  # Recipe sees to it.
            progress.status("Preparing the draft model")
            return resolve_policy(smaller_tiny(recipe.policy, draft), cache, throttled(progress)).path
        case Eagle3Draft() as draft if draft.path is not None:
            return _as_served(draft.path, policy_folder, _longest(prompts, sampling), cache, progress)
        case Eagle3Draft() as draft:
            return _trained_head(recipe, draft, policy_folder, prompts, sampling, cache, progress)
        case _:
            assert_never(recipe.draft)


def smaller_tiny(policy: TinyPolicy, draft: DraftModelDraft) -> TinyPolicy:
    """The draft model of a tiny policy: of another shape, and taught the same answers with the same noise."""
    shape = {"num_layers": draft.num_layers, "hidden_size": draft.hidden_size, "num_mtp_layers": 0}
    return policy.model_copy(update=shape)


def _longest(prompts: Sequence[Prompt], sampling: Sampling) -> int:
    """Positions that a draft must reach."""
    return max(len(prompt.token_ids) for prompt in prompts) + sampling.max_tokens


def _as_served(path: Path, policy_folder: PolicyFolder, num_positions: int, cache: Path, progress: RunProgress) -> Path:
    if is_ours(path):
        return path
    policy = load_policy(policy_folder.path)
    head = _load_head(path, policy, num_positions, "draft.path")

    def build(folder: Path) -> None:
        progress.status(f"Rewriting the draft in {path} for the engine")
        head.export(folder)

    return build_once(cache, f"eagle3-{digest_of([_REWRITE_VERSION, file_checksums(path)])[:16]}", build)


def _load_head(path: Path, policy: PreTrainedModel, num_positions: int, key: str) -> Eagle3Head:
    embedding = policy_parts(policy).embedding.weight
    return Eagle3Head.load(path, policy.config, num_positions, key=key, embedding=embedding)


def _trained_head(
    recipe: Recipe,
    draft: Eagle3Draft,
    policy_folder: PolicyFolder,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    cache: Path,
    progress: RunProgress,
) -> Path:
    policy = load_policy(policy_folder.path)
    start = start_key = None
    if draft.start is not None:
        start = _load_head(draft.start, policy, _longest(prompts, sampling), "draft.start")
        start_key = digest_of(file_checksums(draft.start))
        _check_start(start, draft)
    else:
        # Layers and vocabulary that cannot be are found here, not after the answers have been sampled.
        Eagle3Config.for_policy(policy.config, draft.aux_layers, draft.vocab_size)
    texts: list[Answer] = []
    if draft.data == "generic":
        texts = _generic_texts(recipe, draft, policy, policy_folder, sampling)
        # They are not sampled from the policy, so that only answers of its own can tell what the head is worth.
        requests = _answer_requests(prompts, draft, max(1, round(HELD_OUT_SHARE * draft.num_answers)))
        data_key = digest_of([[text.token_ids, text.prompt_length] for text in texts])
    else:
        requests = _answer_requests(prompts, draft, draft.num_answers)
        data_key = digest_of([request.prompt.token_ids for request in requests])

    def build(folder: Path) -> None:
        progress.status(
            f"Sampling {len(requests)} answers for the draft to {'be judged by' if texts else 'learn from'}"
        )
        sampler = ReferenceEngine(policy, max_num_seqs=recipe.engine.max_num_seqs)
        completions = sampler.generate(requests, sampling).completions
        sampled = [
            Answer((*request.prompt.token_ids, *completion.token_ids), len(request.prompt.token_ids))
            for request, completion in zip(requests, completions, strict=True)
        ]
        said = throttled(progress)
        head, figures = train_eagle3(
            policy,
            texts or sampled,
            draft,
            sampling,
            lambda done, total, loss: said(f"draft, loss {loss:.3f}", done / total),
            start=start,
            held_out=sampled if texts else None,
        )
        head.export(folder)
        (folder / TRAINING_FILE).write_text(_report(draft, head, figures).model_dump_json(indent=1) + "\n")

    key = content_key(draft, policy_folder.hash, data_key, sampling, start_key)
    return build_once(cache, f"eagle3-{key}", build)


def _check_start(start: Eagle3Head, draft: Eagle3Draft) -> None:
    """Shape and vocabulary are those of the head; raise `ConfigError` when the recipe asks for others."""
    if draft.aux_layers is not None and draft.aux_layers != start.config.aux_layers:
        raise ConfigError(
            f"draft.aux_layers is {list(draft.aux_layers)}, and the head in draft.start reads "
            f"{list(start.config.aux_layers)}: leave draft.aux_layers out, or draft.start"
        )
    if draft.vocab_size is not None and draft.vocab_size != start.config.draft_vocab_size:
        raise ConfigError(
            f"draft.vocab_size is {draft.vocab_size}, and the head in draft.start drafts "
            f"{start.config.draft_vocab_size} tokens, which it keeps: leave draft.vocab_size out, or draft.start"
        )


def _generic_texts(
    recipe: Recipe, draft: Eagle3Draft, policy: PreTrainedModel, policy_folder: PolicyFolder, sampling: Sampling
) -> list[Answer]:
    tokenizer = load_tokenizer(policy_folder.path)
    encoding = Encoding(
        tokenizer,
        prompt_style(recipe.policy, tokenizer),
        sampling.stop_token_ids,
        policy.config.max_position_embeddings,
    )
    texts = load_texts(draft.generic_path, draft.num_answers, encoding, recipe.data.task, draft.seed)
    return [Answer(text.token_ids, text.prompt_length) for text in texts]


def _answer_requests(prompts: Sequence[Prompt], draft: Eagle3Draft, number: int) -> list[Request]:
    """`number` requests; answers to one prompt next to each other, so that the last ones can be held out."""
    per_prompt = -(-number // len(prompts))
    pairs = [(prompt, sample) for prompt in prompts for sample in range(per_prompt)][:number]
    return [Request(p, sample, request_seed(draft.seed, ANSWERS_STEP, p.id, sample, 0)) for p, sample in pairs]


def _report(draft: Eagle3Draft, head: Eagle3Head, figures: DraftFigures) -> TrainingReport:
    return TrainingReport(
        data=draft.data,
        start="random" if draft.start is None else "checkpoint",
        loss=figures.loss,
        predicted_alpha=figures.acceptance.alpha,
        predicted_conditional=figures.acceptance.conditional,
        num_draft_tokens=len(figures.acceptance.conditional),
        vocab_size=head.config.draft_vocab_size,
        coverage=figures.coverage,
        policy_coverage=figures.held_out_coverage,
        num_answers=figures.num_answers,
        num_held_out=figures.num_held_out,
        num_updates=figures.num_updates,
        predicted_limit=figures.acceptance.limit,
    )
