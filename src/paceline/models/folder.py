"""The policy of a recipe as a checked Hugging Face folder, whichever kind it is."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, assert_never

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from paceline.config.run import FolderPolicy, Policy, SmolLM2Policy, TinyPolicy
from paceline.errors import ModelError
from paceline.models.cache import Progress, cache_root, digest_of, file_checksums, no_progress
from paceline.models.mimo import MiMoForCausalLM, is_mimo
from paceline.models.smollm2 import cached_smollm2
from paceline.models.tiny import cached_tiny

INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True, slots=True)
class PolicyFolder:
    """Where the policy lies and what it is.

    Example: `PolicyFolder(Path("~/.cache/paceline/tiny-3f2a"), "tiny", "tiny (12 layers x 64)", "9c1b...")`.
    """

    path: Path
    kind: Literal["tiny", "smollm2", "folder"]
    label: str
    """For people: in tables and reports."""
    hash: str
    """sha256 over config, weights and tokenizer: the same weights have the same hash wherever they lie."""


def resolve_policy(config: Policy, cache: Path | None = None, progress: Progress = no_progress) -> PolicyFolder:
    """The folder of the recipe's policy; an embedded one is built first when the cache does not have it.

    `cache` as in `cache_root`. Raises `ModelError` for a folder that cannot be used, `ConfigError` for a `tiny` that
    cannot be built.
    """
    root = cache_root(cache)
    match config:
        case TinyPolicy():
            path = cached_tiny(config, root, progress)
            heads = ", MTP" if config.num_mtp_layers else ""
            label = f"tiny ({config.num_layers} layers x {config.hidden_size}{heads})"
        case SmolLM2Policy():
            path = cached_smollm2(root, progress)
            label = "SmolLM2-135M-Instruct (dequantised from Q4_1)"
        case FolderPolicy():
            path, label = config.path.expanduser(), config.path.name
            check_folder(path)
        case _:
            assert_never(config)
    return PolicyFolder(path, config.kind, label, _content_hash(path))


def check_folder(folder: Path, key: str = "policy.path") -> None:
    """Raise `ModelError` that names `key` unless config, complete weights and a tokenizer are in `folder`."""
    if not folder.exists():
        raise ModelError(
            f"{key} is {folder}, which does not exist. Nothing is downloaded: give the path of a Hugging Face "
            'folder (config.json, *.safetensors, tokenizer.json), or choose policy.kind = "tiny", which needs none'
        )
    if not folder.is_dir():
        raise ModelError(f"{key} is {folder}, which is a file: give the folder that holds it")
    try:
        config = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        raise ModelError(
            f"{key} is {folder}, which has no config.json: give the folder that `save_pretrained` wrote"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{key}: {folder}/config.json cannot be read ({error}). Copy it again") from error
    if not isinstance(config, dict) or not config.get("architectures"):
        raise ModelError(
            f"{key}: {folder}/config.json names no architectures, so no engine can load it. Give the folder of a "
            "causal language model"
        )
    for path in _weight_files(folder, key):
        _check_safetensors(path, key)
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        raise ModelError(
            f"{key} is {folder}, which has no tokenizer ({', '.join(TOKENIZER_FILES)}). Copy the model's "
            "tokenizer files into it"
        )


def load_policy(folder: Path, dtype: torch.dtype = torch.float32, key: str = "policy.path") -> PreTrainedModel:
    """The policy for training, with its MTP layer if it has one: torch's own attention kernel, no dropout, no KV cache.

    Raises `ModelError` that names `key` when transformers cannot build it, and for a tensor that is missing (it would
    be random) or has no place in the model (it would be dropped, and missing from every publish).
    """
    try:
        kind: Any = MiMoForCausalLM if is_mimo(folder) else AutoModelForCausalLM
        policy, loaded = kind.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation="sdpa",
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except ModelError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(
            f"{key}: transformers cannot load {folder} ({error}). Check that its weights and config.json "
            "belong together"
        ) from error
    for name in sorted(loaded["missing_keys"]):
        raise ModelError(f"{key}: {folder} lacks the tensor {name} that its config.json asks for. Copy it again")
    for name in sorted(loaded["unexpected_keys"]):
        raise ModelError(
            f"{key}: {folder} has a tensor {name} that {type(policy).__name__} has no place for; it would be "
            "dropped. Correct architectures in its config.json, or save the model again with save_pretrained"
        )
    return policy


def load_tokenizer(folder: Path, key: str = "policy.path") -> PreTrainedTokenizerBase:
    """The policy's tokenizer. Raises `ModelError` that names `key` when transformers cannot build it."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"{key}: the tokenizer in {folder} cannot be loaded ({error}). Copy the model's tokenizer files into it"
        ) from error
    assert tokenizer is not None
    return tokenizer


def _weight_files(folder: Path, key: str) -> list[Path]:
    """The safetensors of the folder, those that its index names. Raises `ModelError` for none or a missing one."""
    index = folder / INDEX
    if not index.exists():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ModelError(
                f"{key} is {folder}, which has no *.safetensors. Weights in .bin are not read: load them with "
                "transformers and save them with save_pretrained"
            )
        return files
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise ModelError(f"{key}: {index} is damaged ({error!r}). Copy it again") from error
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise ModelError(f"{key} is {folder}, which lacks {missing[0]} of its {len(names)} weight files. Copy it")
    return [folder / name for name in names]


def _check_safetensors(path: Path, key: str) -> None:
    """Read the header, which says how long the file must be. Raises `ModelError` for a truncated or foreign file."""
    try:
        with safe_open(path, framework="pt") as file:
            if file.keys():
                return
            reason = "no tensors in it"
    except (SafetensorError, OSError) as error:
        reason = str(error)
    raise ModelError(f"{key}: {path} is damaged or incomplete ({reason}). Copy it again")


def _content_hash(folder: Path) -> str:
    wanted = ("config.json", "tokenizer_config.json", "special_tokens_map.json", *TOKENIZER_FILES)
    checksums = file_checksums(folder)
    return digest_of({n: s for n, s in checksums.items() if n in wanted or n.endswith(".safetensors")})
