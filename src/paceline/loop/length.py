"""The choice of k of a run: its profile, checked against what the run really is, and the chooser on top of it."""

from __future__ import annotations

from typing import Any, assert_never

import torch

from paceline.config.run import Engine, NoDraft, Recipe, ReferenceEngine, VllmEngine
from paceline.drafts.length import LengthChooser
from paceline.drafts.profile import Setting, StepCosts, check_setting, read_profile
from paceline.errors import ConfigError
from paceline.loop.parts import Parts
from paceline.observe.progress import RunProgress
from paceline.observe.provenance import machine, package_versions

SHAPE = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
"""What of a policy's config.json decides how long a step takes."""
WITHOUT_EFFECT = {"max_num_seqs", "threads", "kv_cache_gib", "logprob_share"}
"""Keys of an engine that do not change the cost of a step with a given number of sequences, or are compared apart."""


def build_chooser(recipe: Recipe, parts: Parts, progress: RunProgress) -> LengthChooser | None:
    """The chooser of a run, already asked by its engine before every step; None with `draft.choose_k = "fixed"`.

    Raises `ConfigError` for a profile that cannot be read, was measured with something else, or does not reach
    `draft.num_draft_tokens`.
    """
    draft = recipe.draft
    if isinstance(draft, NoDraft) or draft.choose_k == "fixed" or draft.profile is None:
        return None
    profile = read_profile(draft.profile)
    for note in check_setting(profile, run_setting(recipe, parts), draft.profile):
        progress.status(f"Note: {note}")
    if profile.max_draft_tokens < draft.num_draft_tokens:
        raise ConfigError(
            f"draft.num_draft_tokens -> is {draft.num_draft_tokens}, and {draft.profile} was measured up to "
            f"{profile.max_draft_tokens}: lower it, or measure again with `paceline calibrate`"
        )
    chooser = LengthChooser(
        StepCosts.from_profile(profile), num_draft_tokens=draft.num_draft_tokens, probe_share=draft.probe_share
    )
    parts.engine.choose_drafts(chooser.choose)
    return chooser


def run_setting(recipe: Recipe, parts: Parts) -> Setting:
    """What the step times of this run depend on."""
    config: dict[str, Any] = parts.trainer.model.config.to_dict()
    weights = None if parts.draft is None else parts.draft.weights()
    draft = {"method": recipe.draft.method, "parameters": sum(tensor.numel() for tensor in (weights or {}).values())}
    if parts.frozen_config is not None:
        frozen = parts.frozen_config.to_dict()
        draft |= {key: frozen.get(key) for key in SHAPE}
    return Setting(
        machine=dict(machine()),
        versions=package_versions(),
        engine=recipe.engine.model_dump(mode="json", exclude=WITHOUT_EFFECT),
        policy={key: config.get(key) for key in SHAPE},
        draft=draft,
        threads=engine_threads(recipe.engine),
    )


def engine_threads(engine: Engine) -> int:
    """Threads that the engine computes with."""
    match engine:
        case ReferenceEngine():
            return torch.get_num_threads()
        case VllmEngine(threads=threads):
            return threads
        case _:
            assert_never(engine)
