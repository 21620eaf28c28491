"""`RolloutEngine` on the real vLLM, in this process."""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, assert_never

import torch
from safetensors import safe_open

from paceline.config.run import Draft, DraftModelDraft, Eagle3Draft, HistoryDraft, MtpDraft, NgramDraft, NoDraft
from paceline.config.run import VllmEngine as VllmEngineConfig
from paceline.drafts.history import HistoryIndex
from paceline.engine.base import Rollouts, check_draft_limit
from paceline.engine.publish import PublishLog, PublishReport, Weights
from paceline.engine.vllm import compat, history, mtp, weights
from paceline.engine.vllm.length import StepLengths
from paceline.engine.vllm.record import BlockRecorder
from paceline.errors import ConfigError, EngineError, ModelError, PublishError
from paceline.models.mimo import is_mimo, split_state
from paceline.models.mtp import MTP_PREFIX
from paceline.spec.stats import engine_stats
from paceline.types import Block, Completion, Request, Sampling, Versions

DRAFT_NAMES = {"draft_id_to_target_id": "d2t", "model.layers.0.": "midlayer.", "model.": ""}
"""vLLM's EAGLE-3 names -> the names a head is exported under."""
DRAFT_SHARED = ("model.embed_tokens",)
"""Modules of the draft's model that are the policy's own."""
INTEGERS = {"I64": torch.int64, "I32": torch.int32}
"""Types of a safetensors file that are not floating-point ones."""


class VllmEngine:
    """One live vLLM engine with its draft.

    `folder` holds the policy as Hugging Face writes it; `draft_folder` an exported head, or the model of `draft_model`.
    `max_model_len` (tokens) bounds prompt plus response. Raises `EngineError` for an unsupported vLLM, `ModelError` for
    folders without weights, and `PublishError` when vLLM did not load what lies in them.

    With `history` drafts the engine reads `history_index`, to which its owner adds what is to last beyond a call.
    """

    def __init__(
        self,
        folder: Path,
        config: VllmEngineConfig,
        draft: Draft,
        *,
        draft_folder: Path | None = None,
        max_model_len: int,
        seed: int = 0,
        versions: Versions | None = None,
        history_index: HistoryIndex | None = None,
    ) -> None:
        prepare_environment()
        self.repairs = compat.apply()
        from vllm import LLM

        self.num_draft_tokens = num_draft_tokens(draft)
        self._drafts_with_mtp = isinstance(draft, MtpDraft) and self.num_draft_tokens > 0
        self._is_frozen = isinstance(draft, DraftModelDraft)
        """The draft is a model of its own, which no publish changes."""
        self.versions = versions or Versions(policy=0, draft=0 if draft_folder or self._drafts_with_mtp else -1)
        self._max_model_len = max_model_len
        self._logprob_share = config.logprob_share
        self._specs = {"policy": checkpoint_specs(folder)}
        if self._drafts_with_mtp:
            mtp.check_folder(folder, {name: spec.shape for name, spec in self._specs["policy"].items()})
        elif draft_folder is not None and not self._is_frozen and is_mimo(folder):
            raise ConfigError(
                'draft.method is "eagle3" and the policy is a MiMo-style one, whose inner hidden states vLLM does not '
                'hand out. Set draft.method = "mtp", or engine.kind = "reference".'
            )
        if draft_folder is not None:
            self._specs["draft"] = checkpoint_specs(draft_folder)
        engine_len = _with_room_for_drafts(folder, max_model_len, self.num_draft_tokens)
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # vLLM looks at every attribute of every module, deprecated ones too.
            # vLLM seeds the global generators of the process it lives in; the fork gives them back as they were.
            self._llm = LLM(
                str(folder),
                skip_tokenizer_init=True,
                dtype=config.dtype,
                seed=seed,
                enforce_eager=True,
                max_model_len=engine_len,
                max_num_seqs=config.max_num_seqs,
                kv_cache_memory_bytes=int(config.kv_cache_gib * 2**30),
                # All prompts fit one step, so none is prefilled in pieces: vLLM rewinds the seeded generator of an
                # unfinished prefill with a call that CPU generators lack (GPUModelRunner._bookkeeping_sync, 0.32.0).
                max_num_batched_tokens=config.max_num_seqs * engine_len,
                speculative_config=speculative_config(draft, draft_folder),
                # Processors and the record must see real ids, not the placeholders of an asynchronous scheduler.
                async_scheduling=False,
                # Nothing of the checkpoint's generation_config may leak into the sampling parameters.
                generation_config="vllm",
                logprobs_mode="processed_logprobs",
                disable_log_stats=True,
                use_tqdm_on_load=False,
                trust_remote_code=False,
            )
        self._engine = self._llm.llm_engine
        self._runner = self._engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        self.repairs += compat.install_sampler(self._runner) + compat.install_plain_steps(self._runner)
        self._recorder = BlockRecorder(self._runner)
        self._lengths = StepLengths(self.num_draft_tokens)
        self.repairs += compat.install_draft_limit(self._runner, self._lengths.none_fit)
        self._engine.engine_core.engine_core.scheduler.dynamic_sd_lookup = self._lengths
        self.history: HistoryIndex | None = None
        if isinstance(draft, HistoryDraft) and self.num_draft_tokens > 0:
            self.history = history_index or HistoryIndex.from_config(draft)
            self._lengths.may_draft = lambda: self.history is not None and self.history.can_draft
            self._runner.drafter.attach(self._runner, self.history, self._lengths)
        self._calls = 0
        self._logs = {
            "policy": PublishLog("policy", self.versions.policy),
            "draft": PublishLog("draft", self.versions.draft),
        }
        self._num_publishes = 0
        self._unusable: dict[str, int] = {}
        self._frozen: weights.Published | None = None
        """What a draft model has to be after every publish."""
        self._check_loaded(folder, draft_folder)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Rollouts:
        """Sample one completion per request; at most `max_num_seqs` in flight. See `engine.base.RolloutEngine`.

        Raises `ConfigError` for a sampling setting that vLLM cannot combine with speculation, `EngineError` when tokens
        and record disagree.
        """
        check_sampling(sampling, self.num_draft_tokens)
        for what, version in self._unusable.items():
            raise EngineError(
                f"The publish of {what} version {version} failed, and the engine may hold half of it. Publish the "
                f"whole {what} again before generating."
            )
        self._calls += 1
        began = time.perf_counter()
        self._recorder.start()
        self._lengths.start()
        compat.forget_deferred(self._runner)
        if self.history is not None:
            self.history.start_call(request.prompt.token_ids for request in requests)
            self._runner.drafter.start()
        outputs: dict[int, Any] = {}
        try:
            for index, request in enumerate(requests):
                self._engine.add_request(
                    f"{self._calls}:{index}",
                    {"prompt_token_ids": list(request.prompt.token_ids)},
                    self._sampling_params(request, sampling),
                )
            while self._engine.has_unfinished_requests():
                for output in self._engine.step():
                    if output.finished:
                        index = int(output.request_id.split(":")[1])
                        outputs[index] = output.outputs[0]
                        if self.history is not None:
                            self.history.finish(requests[index].prompt.token_ids, output.outputs[0].token_ids)
        except BaseException:
            # A request that does not fit, or Ctrl-C: what is in the engine must not run in the next call.
            self._engine.abort_request([f"{self._calls}:{index}" for index in range(len(requests))])
            raise
        seconds = time.perf_counter() - began
        asked = self._lengths.asked()
        blocks = self._blocks_by_index(len(requests), asked)
        completions = tuple(
            self._completion(request, outputs[index], blocks[index]) for index, request in enumerate(requests)
        )
        stats = engine_stats(
            (block for completion in completions for block in completion.blocks),
            engine_steps=self._recorder.num_steps,
            live_batch=self._recorder.live_batch(began),
        )
        return Rollouts(completions, stats, seconds, self._recorder.steps(asked), self._recorder.seconds)

    def publish(self, policy: Weights, versions: Versions) -> PublishReport:
        """Load the policy into the live engine through vLLM's own reload, reset its caches, check every tensor.

        See `engine.base.RolloutEngine`. Tensors that come at once are all looked at before anything is loaded.
        """
        began = time.perf_counter()
        published = self._take_in("policy", policy, versions.policy)
        draft = versions.draft if self._drafts_with_mtp else self.versions.draft
        self.versions = Versions(policy=versions.policy, draft=draft)
        if self._frozen is not None:
            self._check("draft", self._frozen, before=None)
        return self._report(published, began)

    def publish_draft(self, draft: Weights, versions: Versions) -> PublishReport:
        """The same for the draft's weights; what it shares with the policy must not move."""
        if "draft" not in self._specs:
            raise PublishError("This engine has no draft with weights: it cannot take a draft publish.")
        if self._is_frozen:
            raise PublishError(
                'A draft was published, but with draft.method = "draft_model" the draft is frozen: it stays as it was '
                "read from its folder."
            )
        began = time.perf_counter()
        embedding = self._runner.get_model().model.embed_tokens
        before = embedding.weight.detach().clone()
        published = self._take_in("draft", draft, versions.draft)
        if not torch.equal(before, embedding.weight):
            self._unusable["policy"] = self.versions.policy
            raise PublishError("Publishing the draft changed the policy's embedding, which the two share in vLLM.")
        self.versions = Versions(policy=self.versions.policy, draft=versions.draft)
        return self._report(published, began)

    def forget_versions(self) -> None:
        """See `RolloutEngine.forget_versions`."""
        for log in self._logs.values():
            log.forget()

    def limit_drafts(self, num_draft_tokens: int) -> None:
        """See `RolloutEngine.limit_drafts`."""
        check_draft_limit(num_draft_tokens, self.num_draft_tokens)
        self._lengths.limit = num_draft_tokens

    def choose_drafts(self, choose: Callable[[int], int] | None) -> None:
        """See `RolloutEngine.choose_drafts`."""
        self._lengths.choose = choose

    def close(self) -> None:
        """Shut the engine core down and drop the references, so that its memory can be reused."""
        self._engine.engine_core.shutdown()
        del self._recorder, self._runner, self._engine, self._llm

    # -- parts ----------------------------------------------------------------------------------------------------

    def _sampling_params(self, request: Request, sampling: Sampling) -> Any:
        """Every field that shapes the distribution, in full; `ignore_eos` because stop tokens are ours to name."""
        from vllm import SamplingParams

        room = self._max_model_len - len(request.prompt.token_ids)
        if room < 1:
            raise EngineError(
                f"Prompt {request.prompt.id} has {len(request.prompt.token_ids)} tokens; prompt and response together "
                f"may have {self._max_model_len}. Shorten it, or start the engine with a larger max_model_len."
            )
        return SamplingParams(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            repetition_penalty=1.0,
            seed=request.seed,
            max_tokens=min(sampling.max_tokens, room),
            min_tokens=0,
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,
            logprobs=0 if self._wants_logprobs(request) else None,
            detokenize=False,
        )

    def _wants_logprobs(self, request: Request) -> bool:
        """A fixed share of the requests, chosen by a hash of the seed, so that a resumed run asks for the same."""
        return (request.seed * 2654435761 % 2**32) / 2**32 < self._logprob_share

    def _blocks_by_index(self, count: int, asked: Sequence[int]) -> list[list[Block]]:
        """vLLM appends a random suffix to our request ids (`InputProcessor.assign_request_id`, 0.32): strip it."""
        blocks: list[list[Block]] = [[] for _ in range(count)]
        for engine_id, recorded in self._recorder.blocks(asked).items():
            call, _, index = engine_id.rpartition("-")[0].partition(":")
            if int(call) != self._calls:
                raise EngineError(
                    f"vLLM sampled for request {engine_id} of an earlier generate call. Close this engine and start "
                    "another one."
                )
            blocks[int(index)] = recorded
        return blocks

    def _completion(self, request: Request, output: Any, blocks: list[Block]) -> Completion:
        token_ids = tuple(output.token_ids)
        recorded = [token for block in blocks for token in block.token_ids]
        if tuple(recorded[: len(token_ids)]) != token_ids or len(recorded) - len(blocks[-1].token_ids) >= len(
            token_ids
        ):
            raise EngineError(
                f"vLLM returned {len(token_ids)} tokens for prompt {request.prompt.id} that its sampling calls did not "
                f"commit: the block record does not fit this vLLM version. Install vLLM {compat.SUPPORTED[0]}."
            )
        logprobs = None
        if output.logprobs is not None:
            # Indexed by the sampled id: the first entry of the dict may be the most likely token instead.
            logprobs = tuple(entry[token].logprob for entry, token in zip(output.logprobs, token_ids, strict=True))
        return Completion(
            prompt_id=request.prompt.id,
            sample=request.sample,
            token_ids=token_ids,
            finish_reason=str(output.finish_reason),
            blocks=tuple(blocks),
            versions=self.versions,
            seed=request.seed,
            logprobs=logprobs,
        )

    def _reset_caches(self) -> None:
        """Keys and values of older weights must not be reused; the draft's live in the same blocks."""
        if not self._llm.reset_prefix_cache():
            raise PublishError(
                "vLLM did not reset its prefix cache after a publish: old keys and values would be reused. End the "
                "requests that are still in flight, and publish again."
            )

    def _take_in(self, what: str, tensors: Weights, version: int) -> weights.Published:
        """One publish from the first tensor to the last check. The engine is unusable unless it comes to its end."""
        log = self._logs[what]
        log.check_version(version)
        self._num_publishes += 1
        published = self._published(what)
        if isinstance(tensors, Mapping):
            try:
                ready = list(published.take(tensors))
                published.finish()
                log.check_content(version, published.checksums)
            except PublishError as error:
                raise PublishError(f"{error} Nothing was loaded.") from error
            stream = iter(ready)
        else:
            stream = published.stream(tensors)
        before = {name: weights.kernels(model) for name, model in self._models().items()}
        self._unusable[what] = version
        self._load(what, stream)
        published.finish()
        log.check_content(version, published.checksums)
        self._reset_caches()
        self._check(what, published, before)
        log.record(version, published.checksums)
        del self._unusable[what]
        return published

    def _published(self, what: str) -> weights.Published:
        return weights.Published(
            what,
            self._specs[what],
            self._runner.model_config.dtype,
            weights.Probes(self._num_publishes),
            self._packed_names(what),
        )

    def _report(self, published: weights.Published, began: float) -> PublishReport:
        return PublishReport(
            versions=self.versions,
            tensors=len(published.checksums),
            bytes=published.num_bytes,
            checksums=published.checksums,
            digest=published.digest(),
            seconds=time.perf_counter() - began,
        )

    def _models(self) -> dict[str, Any]:
        """The live vLLM models that hold published weights."""
        models = {"policy": self._runner.get_model()}
        if "draft" in self._specs or self._drafts_with_mtp:
            models["draft"] = self._runner.drafter.model
        return models

    def _packed_names(self, what: str) -> frozenset[str]:
        if what == "draft":
            return weights.packed_names(self._runner.drafter.model, **self._draft_naming())
        names = weights.packed_names(self._runner.get_model())
        return names | mtp.packed_names(self._runner) if self._drafts_with_mtp else names

    def _load(self, what: str, stream: Iterator[tuple[str, torch.Tensor]]) -> None:
        try:
            if what == "draft":
                compat.reload(self._runner, self._runner.drafter.model, stream)
                return
            head: dict[str, torch.Tensor] = {}
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": _set_aside_mtp(stream, head)})
            if weights.HEAD not in self._specs["policy"]:
                compat.retie_lm_head(self._runner.get_model())
            if self._drafts_with_mtp:
                mtp.publish(self._runner, head)
        except BaseException:
            for model in self._models().values():
                compat.end_reload(self._runner, model)
            raise

    def _check(self, what: str, published: weights.Published, before: Mapping[str, weights.Kernels] | None) -> None:
        """What the engine will use against what came. `before` is None when nothing was loaded but at its start."""
        old = before or {}
        fingerprints = published.fingerprints
        if what == "draft":
            self._check_shares()
            weights.check_used(
                self._runner.drafter.model, fingerprints, published.probes, what,
                before=old.get("draft"), **self._draft_naming(),
            )  # fmt: skip
            return
        trunk, head = split_state(fingerprints)
        weights.check_used(self._runner.get_model(), trunk, published.probes, what, before=old.get("policy"))
        if self._drafts_with_mtp:
            mtp.check(self._runner, head, published.probes, before=old.get("draft"))

    def _draft_naming(self) -> dict[str, Any]:
        """How vLLM's names of the draft's tensors become those of its folder; a draft model has the same."""
        return {} if self._is_frozen else {"renames": DRAFT_NAMES, "skip": DRAFT_SHARED}

    def _check_shares(self) -> None:
        """Draft and policy share the embedding, which follows the policy, and nothing else; a draft model nothing."""
        draft, policy = self._runner.drafter.model, self._runner.get_model()
        if self._is_frozen:
            # Modules without weights are shared: vLLM has one rotary table for all layers that are alike.
            if not {id(tensor) for tensor in draft.parameters()}.isdisjoint(map(id, policy.parameters())):
                raise PublishError(
                    "Draft model and policy share tensors in vLLM: a publish would change both. Install vLLM "
                    f"{compat.SUPPORTED[0]}."
                )
            return
        if draft.model.embed_tokens is not policy.model.embed_tokens:
            raise PublishError(
                "The draft has an embedding of its own in vLLM: it would not follow the policy's. Leave embed_tokens "
                "out of the draft's folder."
            )
        if draft.lm_head is policy.lm_head:
            raise PublishError(
                "The draft and the policy share one lm_head in vLLM: publishing one would change the other. Install "
                f"vLLM {compat.SUPPORTED[0]}."
            )

    def _check_loaded(self, folder: Path, draft_folder: Path | None) -> None:
        """What vLLM loaded is what lies on disk: a checkpoint misread at start is found before the first step."""
        for what, place in (("policy", folder), ("draft", draft_folder)):
            if place is None:
                continue
            published = self._published(what)
            for name, tensor in checkpoint_tensors(place).items():
                in_memory = tensor.to(self._runner.model_config.dtype) if tensor.is_floating_point() else tensor
                for _ in published.take({name: in_memory}):
                    pass
            published.finish()
            self._check(what, published, before=None)
            if what == "draft" and self._is_frozen:
                self._frozen = published


def _set_aside_mtp(
    stream: Iterator[tuple[str, torch.Tensor]], head: dict[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The policy's stream without its MTP layer, which goes to `head`: vLLM holds that in another model."""
    for name, tensor in stream:
        if name.startswith(MTP_PREFIX):
            head[name] = tensor
        else:
            yield name, tensor


def _with_room_for_drafts(folder: Path, max_model_len: int, num_draft_tokens: int) -> int:
    """The length vLLM is told, in tokens, where the policy has positions for more than a sequence may use.

    Nobody gets drafts in a step in which k more tokens behind the longest running sequence, its drafts included, exceed
    this length (`compat.install_draft_limit`).
    """
    positions = json.loads((folder / "config.json").read_text()).get("max_position_embeddings", max_model_len)
    return max(max_model_len, min(max_model_len + 2 * num_draft_tokens, positions))


def prepare_environment() -> None:
    """What vLLM reads from the environment, set before it is imported. Safe to call again."""
    # It would override the recipe's engine.kv_cache_gib, in whole GiB and for every engine of the process.
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # Pinned threads stall many times over when anything else runs on their core, and reward workers do.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def num_draft_tokens(draft: Draft) -> int:
    """k of a draft configuration; 0 without speculation."""
    match draft:
        case NoDraft():
            return 0
        case Eagle3Draft() | NgramDraft() | HistoryDraft() | MtpDraft() | DraftModelDraft():
            return draft.num_draft_tokens
        case _:
            assert_never(draft)


def speculative_config(draft: Draft, draft_folder: Path | None) -> dict[str, Any] | None:
    """vLLM's speculative configuration; None (an engine without speculation) for k = 0."""
    if num_draft_tokens(draft) == 0:
        return None
    match draft:
        case NoDraft():
            return None
        case Eagle3Draft():
            if draft_folder is None:
                raise ModelError('draft.method = "eagle3" needs a trained head. Set draft.path or train one.')
            return {
                "method": "eagle3",
                "model": str(draft_folder),
                "num_speculative_tokens": draft.num_draft_tokens,
            }
        case NgramDraft():
            return {
                "method": "ngram",
                "num_speculative_tokens": draft.num_draft_tokens,
                "prompt_lookup_min": draft.min_ngram,
                "prompt_lookup_max": draft.max_ngram,
            }
        case HistoryDraft():
            return {
                "method": "custom_class",
                "model": history.CLASS_PATH,
                "num_speculative_tokens": draft.num_draft_tokens,
            }
        case MtpDraft():
            return {"method": "mtp", "num_speculative_tokens": draft.num_draft_tokens}
        case DraftModelDraft():
            if draft_folder is None:
                raise ModelError('draft.method = "draft_model" needs the folder of the draft model. Set draft.path.')
            return {
                "method": "draft_model",
                "model": str(draft_folder),
                "num_speculative_tokens": draft.num_draft_tokens,
                # One-hot q; sampled drafts of vLLM do not draw from the generators of the requests.
                "draft_sample_method": "greedy",
            }
        case _:
            assert_never(draft)


def check_sampling(sampling: Sampling, num_draft_tokens: int) -> None:
    """Raises `ConfigError` for what vLLM 0.32 applies to the bonus token only (vllm-project/vllm#42744)."""
    if sampling.min_p > 0 and num_draft_tokens > 0:
        raise ConfigError(
            f"sampling.min_p is {sampling.min_p} and draft.num_draft_tokens is {num_draft_tokens}: vLLM applies min_p "
            "to bonus tokens only, so the rollouts would not follow the policy. Set sampling.min_p = 0 or "
            'draft.method = "none".'
        )


def checkpoint_specs(folder: Path) -> dict[str, weights.Spec]:
    """What the tensors in a folder's safetensors files look like. Raises `ModelError` when there are none."""
    specs = {}
    for name, handle in _tensors(folder):
        stored = handle.get_slice(name)
        specs[name] = weights.Spec(torch.Size(stored.get_shape()), INTEGERS.get(stored.get_dtype()))
    return specs


def checkpoint_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors themselves. t2d, the mask that exporters write beside d2t, is not used by vLLM and left out."""
    return {name: handle.get_tensor(name) for name, handle in _tensors(folder)}


def _tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder} holds no .safetensors file: it is not a model folder.")
    index = folder / "model.safetensors.index.json"
    if index.exists():
        named = set(json.loads(index.read_text())["weight_map"].values())
        files = [file for file in files if file.name in named]
    for file in files:
        with safe_open(file, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118 (not a dict: safetensors handles are not iterable)
                if name != "t2d":
                    yield name, handle
