"""Reading EAGLE-3 heads as other trainers write them, into the one form that vLLM 0.32 serves.

Two layouts, told apart by the keys of config.json:

- EAGLE's own, which SpecForge and paceline write too: flat, the decoder layer is called `midlayer.`. paceline's files
  also say what the numbers of the aux layers mean.
- speculators: the decoder layer's config is nested in `transformer_layer_config`, the layer is called `layers.0.`.

Where two programs read one field differently, the file is refused and the field named: a head that is read wrongly
drafts nonsense without a word, and the samples stay right, so that nothing else would tell.

Shapes: W draft vocabulary, V policy vocabulary, H hidden size.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from paceline.errors import ModelError

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
PICKLED_WEIGHTS_FILE = "pytorch_model.bin"

AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
CONVENTION = "aux_layer_convention"
"""paceline's own key beside the aux layers: `input` or `output` of the numbered layer. Other readers pass it over."""

_LAYER_PREFIXES = ("midlayer.", "layers.0.")
_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
_EMBEDDING = "embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class StoredHead:
    """A head as a folder holds it, under the names that vLLM's loader takes; number types as stored."""

    config: Mapping[str, Any]
    """Flat. `eagle_aux_hidden_state_layer_ids` counts layer *inputs*; absent: the file names none."""
    tensors: Mapping[str, torch.Tensor]
    """The weights, without the ones below."""
    d2t: torch.Tensor | None
    """[W], as stored."""
    t2d: torch.Tensor | None
    """[V], as stored."""
    embedding: torch.Tensor | None
    """[V, H] a copy of the policy's input embedding, which some trainers store."""


def is_ours(folder: Path) -> bool:
    """Whether the head was written by paceline, so that vLLM reads it as it is meant; other layouts are rewritten."""
    try:
        config = json.loads((folder / CONFIG_FILE).read_text())
        return config["eagle_config"][CONVENTION] == "input" and (folder / WEIGHTS_FILE).is_file()
    except (OSError, ValueError, LookupError, TypeError):
        return False


def read_head(folder: Path, num_layers: int, key: str) -> StoredHead:
    """Read `folder` and bring it into one form; shapes are not checked yet.

    Args:
        folder: holds config.json and model.safetensors or pytorch_model.bin.
        num_layers: decoder layers of the policy, for what an aux layer's number can mean.
        key: of the recipe, for messages.

    Raises `ModelError` that names `key`, the file and the field.
    """
    config = _read_config(folder, num_layers, key)
    tensors = _read_tensors(folder, key)
    tables = {name: tensors.pop(name, None) for name in ("d2t", "t2d", _EMBEDDING)}
    return StoredHead(config, tensors, tables["d2t"], tables["t2d"], tables[_EMBEDDING])


def read_draft_ids(
    d2t: torch.Tensor | None, t2d: torch.Tensor | None, draft_vocab_size: int, vocab_size: int, where: str
) -> torch.Tensor | None:
    """The policy's id of each draft id, rising, [W]; None for a full vocabulary.

    d2t is written as offsets (policy id minus draft id) by every trainer read here, and as the policy's ids themselves
    by some; the mask t2d tells the two apart. Without it a table that could be either is refused. So is one that no
    trainer writes: permuted, repeating, all zero (as it is before it is filled), or naming other tokens than t2d.

    `where` begins every message. Raises `ModelError`.
    """
    _check_table("d2t", d2t, draft_vocab_size, where)
    _check_table("t2d", t2d, vocab_size, where)
    if draft_vocab_size == vocab_size:
        # SpecForge always stores both tables; for a full vocabulary they say nothing, if they are what they should be.
        if (d2t is not None and bool(d2t.any())) or (t2d is not None and not bool(t2d.all())):
            raise ModelError(
                f"{where}: d2t or t2d maps tokens, but draft_vocab_size is the whole vocabulary, which keeps the "
                "policy's order. Remove both tables, or correct draft_vocab_size."
            )
        return None
    if d2t is None:
        raise ModelError(
            f"{where}: there is no table d2t that says which {draft_vocab_size} of the {vocab_size} tokens are "
            "drafted; every draft would be another token. Export the head with its d2t."
        )
    counted = torch.arange(draft_vocab_size)
    d2t = d2t.long()
    if t2d is not None:
        named = t2d.nonzero().flatten()
        for draft_ids in (d2t + counted, d2t):
            if torch.equal(draft_ids, named):
                return draft_ids
        raise ModelError(
            f"{where}: t2d and d2t name different tokens, or the same in another order ({len(named)} tokens in t2d, "
            f"{draft_vocab_size} in d2t). Export the head again."
        )
    if not bool(d2t.any()):
        raise ModelError(
            f"{where}: d2t is all zero and there is no t2d to confirm it: it is what a table holds before it is "
            "filled. Export the head with its tables."
        )
    offsets, absolute = (_is_rising(draft_ids, vocab_size) for draft_ids in (d2t + counted, d2t))
    if offsets and absolute:
        raise ModelError(
            f"{where}: d2t can be read as offsets and as token ids, and there is no t2d to tell. Export the head with "
            "its t2d."
        )
    if not (offsets or absolute):
        raise ModelError(
            f"{where}: d2t maps draft ids neither as offsets nor as token ids to rising, different ids within "
            f"0..{vocab_size - 1} (permuted, repeating or outside). Export the head again."
        )
    return d2t + counted if offsets else d2t


def _check_table(name: str, table: torch.Tensor | None, size: int, where: str) -> None:
    if table is None:
        return
    if table.shape != (size,) or table.is_floating_point():
        raise ModelError(
            f"{where}: {name} is {table.dtype} {list(table.shape)}; it must be {size} whole numbers, one per "
            f"{'draft' if name == 'd2t' else 'policy'} token."
        )
    if name == "t2d" and table.dtype != torch.bool and not bool(((table == 0) | (table == 1)).all()):
        raise ModelError(f"{where}: t2d is not a mask of the drafted tokens (it holds more than 0 and 1).")


def _is_rising(draft_ids: torch.Tensor, vocab_size: int) -> bool:
    return int(draft_ids[0]) >= 0 and int(draft_ids[-1]) < vocab_size and bool((draft_ids.diff() > 0).all())


def _read_config(folder: Path, num_layers: int, key: str) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ModelError(f"{key}: {folder} has no {CONFIG_FILE}. Give the folder of an exported EAGLE-3 head.")
    try:
        stored = json.loads(path.read_text())
    except ValueError as error:
        raise ModelError(f"{key}: {path} is not JSON ({error}).") from error
    if not isinstance(stored, dict):
        raise ModelError(f"{key}: {path} is not a JSON object.")
    if {"speculators_model_type", "speculators_config", "transformer_layer_config"} & stored.keys():
        config = _from_speculators(stored, f"{key}: {path}")
    else:
        config = _from_flat(stored, num_layers, f"{key}: {path}")
    _check_support(config, f"{key}: {path}")
    return _with_defaults(config, f"{key}: {path}")


def _from_speculators(stored: dict[str, Any], where: str) -> dict[str, Any]:
    """The nested layout, flat. Its aux layers are captured by vLLM, and so count inputs, as ours do."""
    kind = stored.get("speculators_model_type")
    if kind != "eagle3":
        raise ModelError(f'{where}: speculators_model_type is {kind!r}; only "eagle3" heads can be used.')
    layer = stored.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise ModelError(f"{where}: transformer_layer_config is missing; it describes the decoder layer.")
    if layer.get("model_type") != "llama":
        raise ModelError(
            f"{where}: transformer_layer_config.model_type is {layer.get('model_type')!r}: only a Llama layer can be "
            "used (a Qwen3 layer norms its queries and keys)."
        )
    if "norm_before_residual" not in stored:
        raise ModelError(
            f"{where}: norm_before_residual is missing, which speculators reads as false and vLLM as true. Write down "
            "which one the head was trained with."
        )
    # Architectures name a class of speculators; vLLM passes them over.
    outer = {name: value for name, value in stored.items() if name != "transformer_layer_config" and value is not None}
    return {name: value for name, value in {**layer, **outer}.items() if name != "architectures"}


def _from_flat(stored: dict[str, Any], num_layers: int, where: str) -> dict[str, Any]:
    """The flat layouts, with `eagle_config` merged in and the aux layers counted as inputs."""
    nested = stored.get("eagle_config") or {}
    for name in nested.keys() & stored.keys():
        if nested[name] != stored[name]:
            raise ModelError(f"{where}: {name} is {stored[name]!r} and in eagle_config {nested[name]!r}. Keep one.")
    config = {**stored, **nested}
    if config.get("model_type", "llama") != "llama":
        raise ModelError(f'{where}: model_type is {config["model_type"]!r}: only a "llama" layer can be used.')
    layers, convention = config.get(AUX_LAYERS), config.get(CONVENTION)
    if not layers:
        return {name: value for name, value in config.items() if name != AUX_LAYERS}
    match convention:
        case "input":
            return config
        case "output":
            return {**config, AUX_LAYERS: [layer + 1 for layer in layers]}
        case None if list(layers) == [2, num_layers // 2, num_layers - 3]:
            return config
        case None:
            raise ModelError(
                f"{where}: {AUX_LAYERS} is {layers}, which vLLM takes as the inputs of these layers, and SpecForge and "
                f'SGLang as their outputs. Add "{CONVENTION}": "input" or "output" beside it, as the head was trained.'
            )
        case _:
            raise ModelError(f'{where}: {CONVENTION} is {convention!r}; it must be "input" or "output".')


def _check_support(config: Mapping[str, Any], where: str) -> None:
    """Refuse, by name, what changes the head's arithmetic and is not in `Eagle3Config`."""
    architectures = config.get("architectures") or [_ARCHITECTURES[0]]
    layers = config.get(AUX_LAYERS)
    refused = {
        "architectures": architectures[0] not in _ARCHITECTURES,
        "logit_scale": config.get("logit_scale", 1.0) != 1.0,
        "layer_types": "sliding_attention" in (config.get("layer_types") or []),
        "target_hidden_size": config.get("target_hidden_size") not in (None, config.get("hidden_size")),
        "quantization_config": config.get("quantization_config") is not None,
        "parallel_drafting": bool(config.get("parallel_drafting")),
        "num_aux_hidden_states": layers is not None and config.get("num_aux_hidden_states") not in (None, len(layers)),
    }
    for name, is_refused in refused.items():
        if is_refused:
            raise ModelError(
                f"{where}: {name} is {config[name]!r}: paceline runs heads of one Llama layer as EAGLE-3 published "
                "them, and this changes what the head computes."
            )


def _with_defaults(config: dict[str, Any], where: str) -> dict[str, Any]:
    """What published heads leave out, and RoPE in the newer form."""
    for name, default_name in (("draft_vocab_size", "vocab_size"), ("num_key_value_heads", "num_attention_heads")):
        if config.get(name) is None and default_name in config:
            config[name] = config[default_name]
    if config.get("head_dim") is None and {"hidden_size", "num_attention_heads"} <= config.keys():
        config["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    rope, theta = config.get("rope_parameters"), config.get("rope_theta")
    if rope is None:
        scaling = dict(config.get("rope_scaling") or {})
        kind = scaling.pop("type", None) or "default"
        config["rope_parameters"] = {"rope_theta": 10000.0 if theta is None else theta, "rope_type": kind, **scaling}
    elif theta is not None and rope.get("rope_theta", theta) != theta:
        raise ModelError(f"{where}: rope_theta is {theta} and in rope_parameters {rope['rope_theta']}. Keep one.")
    return config


def _read_tensors(folder: Path, key: str) -> dict[str, torch.Tensor]:
    path = folder / WEIGHTS_FILE
    if path.is_file():
        try:
            stored: Any = load_file(path)
        except SafetensorError as error:
            raise ModelError(f"{key}: {path} cannot be read ({error}). Export the head again.") from error
    else:
        path = folder / PICKLED_WEIGHTS_FILE
        if not path.is_file():
            raise ModelError(
                f"{key}: {folder} has no {WEIGHTS_FILE} and no {PICKLED_WEIGHTS_FILE}. Give the folder of an exported "
                "EAGLE-3 head."
            )
        try:
            stored = torch.load(path, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
            reason = str(error).splitlines()[0]
            raise ModelError(
                f"{key}: {path} holds more than tensors, or is damaged ({reason}). A pickle can run any program when "
                f"it is read, so only plain tensors are. Save the head as {WEIGHTS_FILE}."
            ) from error
        if not isinstance(stored, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in stored.values()):
            raise ModelError(f"{key}: {path} is not a table of names and tensors. Save the head as {WEIGHTS_FILE}.")
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in stored.items():
        ours = name
        for prefix in _LAYER_PREFIXES:
            if name.startswith(prefix):
                ours = _LAYER_PREFIXES[0] + name.removeprefix(prefix)
        if ours in tensors:
            raise ModelError(f"{key}: {path} holds {name} twice, as midlayer and as layers.0. Keep one.")
        if "qkv_proj" in name:
            raise ModelError(
                f"{key}: {path} holds the fused {name}, whose rows may stand one after the other or interleaved by KV "
                "head. Save q_proj, k_proj and v_proj apart."
            )
        tensors[ours] = tensor
    return tensors
