"""EAGLE-3 heads written as other trainers write them, after their code as of August 2026. For tests of the reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from paceline.models.eagle3 import Eagle3Head, policy_parts


def write_specforge(head: Eagle3Head, policy: PreTrainedModel, folder: Path, *, pickled: bool = False) -> None:
    """As `specforge.export.to_hf` does: flat, RoPE in the older form, the policy's embedding and both tables along.

    SpecForge numbers the *output* of a layer. It names no layers when they are its default; other numbers come with
    paceline's key that says so, which a person has to add.
    """
    config = head.config
    stored: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "tie_word_embeddings": False,
        "draft_vocab_size": config.draft_vocab_size,
        "rope_theta": config.rope_parameters["rope_theta"],
        "rope_scaling": None,
        **_layer(head),
    }
    if config.norm_before_residual:
        stored["norm_before_residual"] = True
    num_layers = policy.config.num_hidden_layers
    if config.aux_layers != (2, num_layers // 2, num_layers - 3):
        stored["eagle_config"] = {
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in config.aux_layers],
            "aux_layer_convention": "output",
        }
    tensors = {name: tensor.detach().clone() for name, tensor in head.named_parameters()}
    _write(folder, stored, {**tensors, **_tables(head), **_embedding(policy)}, pickled)


def write_speculators(head: Eagle3Head, policy: PreTrainedModel, folder: Path) -> None:
    """As `save_pretrained` of speculators' Eagle3DraftModel does: the layer's config nested, `layers.0.` in names.

    Its aux layers are numbers of vLLM's capture, which means inputs.
    """
    config = head.config
    layer = {"model_type": "llama", "rope_parameters": dict(config.rope_parameters), **_layer(head)}
    stored: dict[str, Any] = {
        "architectures": ["Eagle3DraftModel"],
        "draft_vocab_size": config.draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(config.aux_layers),
        "fc_norm": False,
        "norm_before_fc": False,
        "norm_before_residual": config.norm_before_residual,
        "norm_output": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"architectures": [type(policy).__name__], "name_or_path": "policy"},
        },
        "speculators_model_type": "eagle3",
        "target_hidden_size": None,
        "transformer_layer_config": layer,
    }
    tensors = {
        name.replace("midlayer.", "layers.0."): tensor.detach().clone() for name, tensor in head.named_parameters()
    }
    tables = _tables(head) if config.draft_vocab_size < config.vocab_size else {}
    _write(folder, stored, {**tensors, **tables, **_embedding(policy)}, pickled=False)


def _layer(head: Eagle3Head) -> dict[str, Any]:
    names = (
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
        "rms_norm_eps", "max_position_embeddings", "num_hidden_layers", "hidden_act", "attention_bias", "mlp_bias",
    )  # fmt: skip
    return {name: getattr(head.config, name) for name in names}


def _tables(head: Eagle3Head) -> dict[str, torch.Tensor]:
    drafted = torch.zeros(head.config.vocab_size, dtype=torch.bool)
    drafted[head.draft_ids] = True
    return {"d2t": head.draft_ids - torch.arange(len(head.draft_ids)), "t2d": drafted}


def _embedding(policy: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {"embed_tokens.weight": policy_parts(policy).embedding.weight.detach().clone()}


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], pickled: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
