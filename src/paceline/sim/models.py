"""The shape of a policy: what decides its FLOP and bytes. From a Hugging Face config or from a small table."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.sim.figures import Assumption, Origin


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder with grouped-query attention and a gated MLP or a mixture of experts in every layer."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    ffn_size: int
    """Width of the dense MLP; with experts it is only the width of a draft layer made after the model."""
    vocab_size: int
    num_experts: int = 0
    """0: dense."""
    experts_per_token: int = 0
    expert_ffn_size: int = 0
    tied_embeddings: bool = False
    origin: Origin = field(default=Origin("published", "Hugging Face config"), repr=False, compare=False)

    @property
    def attention_parameters(self) -> int:
        """Of one layer: query, key, value and output projections."""
        heads = 2 * self.num_heads + 2 * self.num_kv_heads
        return self.hidden_size * heads * self.head_size

    @property
    def mlp_parameters(self) -> int:
        """Of one layer: gate, up and down; with experts all of them and the router."""
        if self.num_experts:
            return self.num_experts * (3 * self.hidden_size * self.expert_ffn_size + self.hidden_size)
        return 3 * self.hidden_size * self.ffn_size

    @property
    def parameters(self) -> int:
        """All of them, norms left out."""
        embeddings = (1 if self.tied_embeddings else 2) * self.vocab_size * self.hidden_size
        return self.num_layers * (self.attention_parameters + self.mlp_parameters) + embeddings

    @property
    def active_parameters(self) -> int:
        """Used per token: the output head counts, the embedding (a look-up) does not."""
        mlp = self.mlp_parameters
        if self.num_experts:
            mlp = self.experts_per_token * 3 * self.hidden_size * self.expert_ffn_size
            mlp += self.num_experts * self.hidden_size
        return self.num_layers * (self.attention_parameters + mlp) + self.vocab_size * self.hidden_size

    def kv_bytes_per_token(self, bytes_per_element: float = 2.0) -> float:
        """Keys and values of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * bytes_per_element

    def assumptions(self) -> list[Assumption]:
        """One line: the shape."""
        values = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in ("name", "origin")}
        return [Assumption(f"model.{self.name}", values, self.origin.mark, self.origin.source)]


MODELS: Mapping[str, ModelShape] = {
    shape.name: shape
    for shape in (
        ModelShape("qwen3-8b", 36, 4096, 32, 8, ffn_size=12288, head_size=128, vocab_size=151936),
        ModelShape(
            "qwen3-30b-a3b",
            48,
            2048,
            32,
            4,
            ffn_size=6144,
            num_experts=128,
            experts_per_token=8,
            expert_ffn_size=768,
            head_size=128,
            vocab_size=151936,
        ),
        ModelShape(
            "qwen3-235b-a22b",
            94,
            4096,
            64,
            4,
            ffn_size=12288,
            num_experts=128,
            experts_per_token=8,
            expert_ffn_size=1536,
            head_size=128,
            vocab_size=151936,
        ),
        ModelShape("llama-3.1-8b", 32, 4096, 32, 8, 128, 14336, 128256),
        ModelShape("smollm2-135m", 30, 576, 9, 3, 64, 1536, 49152, tied_embeddings=True),
    )
}
"""Shapes that are known by name."""


def model(name: str | Path) -> ModelShape:
    """A shape of the table, or the one of a `config.json` (or of the folder that holds it). Raises ConfigError."""
    if str(name) in MODELS:
        return MODELS[str(name)]
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(
            f"model {str(name)!r} is neither in the table ({', '.join(MODELS)}) nor a folder with a config.json. "
            "Give one of them."
        )
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON ({error}): give the config.json of a decoder model.") from error
    return model_from_config(config, path.resolve().parent.name)


def model_from_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """The shape of a Hugging Face config. Raises ConfigError for an architecture whose cost is not modelled."""
    config = config.get("text_config", config)
    _refuse_unmodelled(config, name)
    heads = _integer(config, "num_attention_heads", name)
    hidden = _integer(config, "hidden_size", name)
    experts = next((int(config[key]) for key in ("num_experts", "num_local_experts") if config.get(key)), 0)
    ffn = _integer(config, "intermediate_size", name)
    return ModelShape(
        name,
        num_layers=_integer(config, "num_hidden_layers", name),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_size=int(config.get("head_dim") or hidden // heads),
        ffn_size=ffn,
        vocab_size=_integer(config, "vocab_size", name),
        num_experts=experts,
        experts_per_token=_integer(config, "num_experts_per_tok", name) if experts else 0,
        expert_ffn_size=int(config.get("moe_intermediate_size") or ffn) if experts else 0,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
    )


def _integer(config: Mapping[str, Any], key: str, name: str) -> int:
    if not isinstance(config.get(key), int):
        raise ConfigError(f"the config of {name} has no integer {key!r}: give the config.json of a decoder model.")
    return int(config[key])


def _has_window(config: Mapping[str, Any]) -> bool:
    """Whether a sliding window is shorter than the longest sequence. Many configs name one that they do not use."""
    window = config.get("sliding_window")
    longest = config.get("max_position_embeddings", math.inf)
    return bool(window) and config.get("use_sliding_window", True) and window < longest


def _refuse_unmodelled(config: Mapping[str, Any], name: str) -> None:
    """A wrong cost that looks right is worse than none."""
    found = None
    if config.get("kv_lora_rank"):
        found = "multi-head latent attention (kv_lora_rank)"
    elif any(kind != "full_attention" for kind in config.get("layer_types") or ()):
        found = "layers without full attention (layer_types)"
    elif _has_window(config):
        found = "windowed attention (sliding_window)"
    elif config.get("n_shared_experts") or config.get("shared_expert_intermediate_size"):
        found = "shared experts"
    elif config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1 or config.get("n_routed_experts"):
        found = "a mix of dense and expert layers"
    if found:
        raise ConfigError(
            f"the config of {name} has {found}, which the cost model does not know. Use a measured profile "
            "(`paceline calibrate`) in place of the roofline."
        )
