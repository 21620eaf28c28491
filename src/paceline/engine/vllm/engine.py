"""`RolloutEngine` on the real vLLM, in this process."""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, assert_never

import torch
from safetensors import safe_open

from paceline.config.run import Draft, Eagle3Draft, NgramDraft, NoDraft
from paceline.config.run import VllmEngine as VllmEngineConfig
from paceline.engine.base import Rollouts, check_draft_limit
from paceline.engine.vllm import compat, weights
from paceline.engine.vllm.record import BlockRecorder
from paceline.errors import ConfigError, EngineError, ModelError, PublishError
from paceline.spec.stats import engine_stats
from paceline.types import Block, Completion, Request, Sampling, Versions

DRAFT_NAMES = {"draft_id_to_target_id": "d2t", "model.layers.0.": "midlayer.", "model.": ""}
"""vLLM's EAGLE-3 names -> the names a head is exported under."""


class VllmEngine:
    """One live vLLM engine with its draft.

    `folder` holds the policy as Hugging Face writes it; `draft_folder` an exported head, for `eagle3` only.
    `max_model_len` (tokens) bounds prompt plus response. Raises `EngineError` for an unsupported vLLM, `ModelError` for
    folders without weights, and `PublishError` when vLLM did not load what lies in them.
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
    ) -> None:
        prepare_environment()
        self.repairs = compat.apply()
        from vllm import LLM

        self.num_draft_tokens = num_draft_tokens(draft)
        self.versions = versions or Versions(policy=0, draft=0 if draft_folder else -1)
        self._max_num_seqs = config.max_num_seqs
        self._max_model_len = max_model_len
        self._logprob_share = config.logprob_share
        self._shapes = checkpoint_shapes(folder)
        self._draft_shapes = checkpoint_shapes(draft_folder) if draft_folder is not None else None
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # vLLM looks at every attribute of every module, deprecated ones too.
            # vLLM seeds the global generators of the process it lives in; the fork gives them back as they were.
            self._llm = LLM(
                str(folder),
                skip_tokenizer_init=True,
                dtype=config.dtype,
                seed=seed,
                enforce_eager=True,
                max_model_len=max_model_len,
                max_num_seqs=config.max_num_seqs,
                kv_cache_memory_bytes=int(config.kv_cache_gib * 2**30),
                # All prompts fit one step, so none is prefilled in pieces: vLLM rewinds the seeded generator of an
                # unfinished prefill with a call that CPU generators lack (GPUModelRunner._bookkeeping_sync, 0.32.0).
                max_num_batched_tokens=config.max_num_seqs * max_model_len,
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
        self.repairs += compat.install_sampler(self._runner)
        self._recorder = BlockRecorder(self._runner)
        self._calls = 0
        self._check_loaded(folder, draft_folder)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Rollouts:
        """Sample one completion per request; at most `max_num_seqs` in flight. See `engine.base.RolloutEngine`.

        Raises `ConfigError` for a sampling setting that vLLM cannot combine with speculation, `EngineError` when tokens
        and record disagree.
        """
        check_sampling(sampling, self.num_draft_tokens)
        self._calls += 1
        began = time.perf_counter()
        self._recorder.start()
        outputs: dict[int, Any] = {}
        for index, request in enumerate(requests):
            self._engine.add_request(
                f"{self._calls}:{index}",
                {"prompt_token_ids": list(request.prompt.token_ids)},
                self._sampling_params(request, sampling),
            )
        try:
            while self._engine.has_unfinished_requests():
                for output in self._engine.step():
                    if output.finished:
                        outputs[int(output.request_id.split(":")[1])] = output.outputs[0]
        except BaseException:
            # Ctrl-C in the middle of a call: the engine stays usable for the next one.
            self._engine.abort_request([f"{self._calls}:{index}" for index in range(len(requests))])
            raise
        seconds = time.perf_counter() - began
        blocks = self._blocks_by_index(len(requests))
        completions = tuple(
            self._completion(request, outputs[index], blocks[index]) for index, request in enumerate(requests)
        )
        stats = engine_stats(
            (block for completion in completions for block in completion.blocks),
            engine_steps=self._recorder.num_steps,
            live_batch=self._recorder.live_batch(began),
        )
        return Rollouts(completions=completions, stats=stats, seconds=seconds)

    def publish(self, policy: Mapping[str, torch.Tensor], versions: Versions) -> None:
        """Load the policy into the live engine through vLLM's own reload, reset its caches, check every tensor."""
        state = self._untie(policy)
        weights.check_complete(state, self._shapes, "policy")
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(state.items())})
        if "lm_head.weight" not in state:
            compat.retie_lm_head(self._runner.get_model())
        self._reset_caches()
        self._check_policy(state)
        self.versions = Versions(policy=versions.policy, draft=self.versions.draft)

    def publish_draft(self, draft: Mapping[str, torch.Tensor], versions: Versions) -> None:
        """Load the draft into the live engine; check that it arrived and that the policy's embedding did not move."""
        if self._draft_shapes is None:
            raise PublishError("This engine has no draft with weights: it cannot take a draft publish.")
        weights.check_complete(draft, self._draft_shapes, "draft")
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload.inplace import reload_weights

        model = self._runner.drafter.model
        before = model.model.embed_tokens.weight.detach().clone()
        with set_current_vllm_config(self._runner.vllm_config):
            reload_weights(
                self._runner.vllm_config,
                model,
                weights_iterator=iter(draft.items()),
                weights_path=None,
                is_checkpoint_format=True,
            )
        if not torch.equal(before, self._runner.get_model().model.embed_tokens.weight):
            raise PublishError("Publishing the draft changed the policy's embedding, which the two share in vLLM.")
        self._reset_caches()
        self._check_draft(draft)
        self.versions = Versions(policy=self.versions.policy, draft=versions.draft)

    def limit_drafts(self, num_draft_tokens: int) -> None:
        """See `RolloutEngine.limit_drafts`. vLLM's own table of k by batch size (dynamic speculation, 0.32) holds it.

        Where k more tokens would not fit `max_model_len`, vLLM drafts k times token 0 whatever the table says
        (`GPUModelRunner.sample_tokens`): rejected or accepted by the same rule, so the law is the same there too.
        """
        check_draft_limit(num_draft_tokens, self.num_draft_tokens)
        table = [num_draft_tokens] * (self._max_num_seqs + 1) if num_draft_tokens < self.num_draft_tokens else None
        self._engine.engine_core.engine_core.scheduler.dynamic_sd_lookup = table

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
                f"may have {self._max_model_len}. Lower data.max_prompt_tokens or raise sampling.max_tokens."
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

    def _blocks_by_index(self, count: int) -> list[list[Block]]:
        """vLLM appends a random suffix to our request ids (`InputProcessor.assign_request_id`, 0.32): strip it."""
        blocks: list[list[Block]] = [[] for _ in range(count)]
        for engine_id, recorded in self._recorder.blocks().items():
            call, _, index = engine_id.rpartition("-")[0].partition(":")
            if int(call) != self._calls:
                raise EngineError(f"vLLM sampled for request {engine_id} of an earlier generate call.")
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
                "commit: the block record does not fit this vLLM version."
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
                "vLLM did not reset its prefix cache after a publish: old keys and values would be reused."
            )

    def _untie(self, policy: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A tied policy's state may list lm_head apart; it must then be the embedding, and is sent once."""
        state = dict(policy)
        if "lm_head.weight" in state and "lm_head.weight" not in self._shapes:
            if not torch.equal(state["lm_head.weight"], state["model.embed_tokens.weight"]):
                raise PublishError(
                    "policy publish: lm_head.weight differs from model.embed_tokens.weight, and the engine ties them."
                )
            del state["lm_head.weight"]
        return state

    def _check_policy(self, state: Mapping[str, torch.Tensor]) -> None:
        expected = dict(state)
        if "lm_head.weight" not in expected:
            # Tied, but packed apart by vLLM: what the head uses must follow the embedding.
            expected["lm_head.weight"] = expected["model.embed_tokens.weight"]
        weights.check_equal(self._runner.get_model(), expected, "policy")

    def _check_draft(self, state: Mapping[str, torch.Tensor]) -> None:
        model = self._runner.drafter.model
        if model.model.embed_tokens is not self._runner.get_model().model.embed_tokens:
            raise PublishError("The draft has an embedding of its own in vLLM: it would not follow the policy's.")
        if model.lm_head is self._runner.get_model().lm_head:
            raise PublishError(
                "The draft and the policy share one lm_head in vLLM: publishing one would change the other."
            )
        weights.check_equal(model, state, "draft", renames=DRAFT_NAMES, skip=("model.embed_tokens",))

    def _check_loaded(self, folder: Path, draft_folder: Path | None) -> None:
        """What vLLM loaded is what lies on disk: a checkpoint misread at start is found before the first step."""
        self._check_policy(checkpoint_tensors(folder))
        if draft_folder is not None:
            self._check_draft(checkpoint_tensors(draft_folder))


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
        case Eagle3Draft() | NgramDraft():
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


def checkpoint_shapes(folder: Path) -> dict[str, torch.Size]:
    """Names and shapes of the tensors in a folder's safetensors files. Raises `ModelError` when there are none."""
    return {name: torch.Size(handle.get_slice(name).get_shape()) for name, handle in _tensors(folder)}


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
