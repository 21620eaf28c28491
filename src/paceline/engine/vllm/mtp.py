"""The policy's own MTP layer in a live vLLM engine: loaded from the policy's folder, published with the policy.

vLLM keeps the layer in a model of its own (`MiMoMTP`), the drafter's, which shares embedding and output layer with the
policy's; its own loader of the policy leaves the layer's tensors out. So one publish goes to both.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config

from paceline.engine.vllm import weights
from paceline.errors import ModelError, PublishError
from paceline.models.mimo import ARCHITECTURE, is_mimo
from paceline.models.mtp import MTP_PREFIX, MtpLayer

SHARED = ("model.embed_tokens", "lm_head")
"""Modules of the drafter's model that are the policy's own."""


def check_folder(folder: Path, shapes: Mapping[str, torch.Size]) -> None:
    """Before vLLM starts: every tensor of the layer is in the checkpoint, and no other. `shapes` are those on disk.

    Raises `ModelError` that names the tensor. Without this a checkpoint that lost its layer is served with drafts from
    uninitialised memory (vllm-project/vllm#35548).
    """
    if not is_mimo(folder):
        raise ModelError(
            f'draft.method is "mtp" and {folder}/config.json does not name {ARCHITECTURE}: it has no MTP layer. '
            "Use policy.num_mtp_layers = 1 with the tiny policy, such a folder, or another draft.method."
        )
    config = Qwen2Config.from_pretrained(folder)
    with torch.device("meta"):
        layer = MtpLayer(config)
    expected = {f"{MTP_PREFIX}0.{name}": tensor.shape for name, tensor in layer.state_dict().items()}
    found = {name: shape for name, shape in shapes.items() if name.startswith(MTP_PREFIX)}
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            raise ModelError(f"policy.path: {folder} lacks the tensor {name} of its MTP layer. Save the policy again.")
        if name not in expected:
            raise ModelError(
                f"policy.path: {folder} has a tensor {name} that the engine has no place for: one MTP layer is served. "
                "Save the policy with one."
            )
        if found[name] != expected[name]:
            raise ModelError(
                f"policy.path: {name} in {folder} has shape {list(found[name])}, config.json asks for "
                f"{list(expected[name])}."
            )


def publish(runner: Any, head: Mapping[str, torch.Tensor]) -> None:
    """Load the layer's tensors into the live drafter; what it shares with the policy is not touched."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload.inplace import reload_weights

    with set_current_vllm_config(runner.vllm_config):
        reload_weights(
            runner.vllm_config,
            runner.drafter.model,
            weights_iterator=iter(head.items()),
            weights_path=None,
            is_checkpoint_format=True,
        )


def check(
    runner: Any,
    head: Mapping[str, weights.Fingerprint],
    probes: weights.Probes,
    before: weights.Kernels | None = None,
) -> None:
    """The drafter uses exactly these tensors, and the policy's embedding and output layer. See `weights.check_used`.

    Raises `PublishError` that names the first tensor that differs, is missing, or is not used.
    """
    drafter, policy = runner.drafter.model, runner.get_model()
    if drafter.model.embed_tokens is not policy.model.embed_tokens or drafter.lm_head is not policy.lm_head:
        raise PublishError(
            "The MTP layer has an embedding or an output layer of its own in vLLM: it would not follow the policy's."
        )
    weights.check_used(drafter, head, probes, "policy", before=before, **_naming(policy))


def packed_names(runner: Any) -> frozenset[str]:
    """See `weights.packed_names`."""
    return weights.packed_names(runner.drafter.model, **_naming(runner.get_model()))


def _naming(policy: Any) -> dict[str, Any]:
    """vLLM numbers the layer on from the trunk's, and wraps its transformer block."""
    live = f"{MTP_PREFIX}{policy.config.num_hidden_layers}."
    renames = {f"{live}mtp_block.": f"{MTP_PREFIX}0.", live: f"{MTP_PREFIX}0."}
    return {"renames": renames, "skip": SHARED, "packed": policy.packed_modules_mapping}
