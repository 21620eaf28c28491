"""How one engine is spread over GPUs, and what fits on it."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import ConfigError
from paceline.sim.figures import Assumption
from paceline.sim.hardware import Hardware
from paceline.sim.models import ModelShape


@dataclass(frozen=True, slots=True)
class Layout:
    """One engine. Attention is split over `tensor_parallel` ranks and repeated `attention_ranks` times, each repetition
    with its own sequences. Experts are split over `expert_parallel` ranks, and each expert over the rest of the engine.
    Example: `Layout(32, 4, 32)`, EP32xTP4: 8 attention ranks of 4 GPUs, 4 of 128 experts on each GPU.
    """

    engine_gpus: int
    tensor_parallel: int
    expert_parallel: int = 1

    def __post_init__(self) -> None:
        for name in ("tensor_parallel", "expert_parallel"):
            size = getattr(self, name)
            if size < 1 or self.engine_gpus % size:
                raise ConfigError(
                    f"layout.{name} {size} does not divide layout.engine_gpus {self.engine_gpus}: choose a divisor."
                )

    @property
    def attention_ranks(self) -> int:
        """Attention data parallelism."""
        return self.engine_gpus // self.tensor_parallel

    @property
    def expert_tensor_parallel(self) -> int:
        """GPUs that share one expert."""
        return self.engine_gpus // self.expert_parallel

    @property
    def name(self) -> str:
        """TP4, EP8, EP32xTP4, or DP2xTP4 for repeated attention without expert parallelism."""
        parts = []
        if self.expert_parallel > 1:
            parts.append(f"EP{self.expert_parallel}")
        elif self.attention_ranks > 1:
            parts.append(f"DP{self.attention_ranks}")
        if self.tensor_parallel > 1 or not parts:
            parts.append(f"TP{self.tensor_parallel}")
        return "x".join(parts)

    def assumptions(self) -> list[Assumption]:
        """One line: the layout."""
        return [Assumption("layout", self.name, "assumed", f"engines of {self.engine_gpus} GPUs")]


def check_fits_model(layout: Layout, model: ModelShape) -> None:
    """Raises ConfigError when the model cannot be split that way."""
    if model.num_heads % layout.tensor_parallel:
        raise ConfigError(
            f"layout.tensor_parallel {layout.tensor_parallel} does not divide the {model.num_heads} heads of "
            f"{model.name}: choose a divisor."
        )
    if layout.expert_parallel > 1 and (not model.num_experts or model.num_experts % layout.expert_parallel):
        raise ConfigError(
            f"layout.expert_parallel {layout.expert_parallel} does not divide the {model.num_experts} experts of "
            f"{model.name}: use 1 for a dense model, else a divisor."
        )


def num_engines(layout: Layout, gpus: int) -> int:
    """Engines on `gpus` GPUs. Raises ConfigError when GPUs would be left over."""
    if gpus < layout.engine_gpus or gpus % layout.engine_gpus:
        raise ConfigError(
            f"{gpus} GPUs do not divide into engines of {layout.engine_gpus} ({layout.name}): choose a multiple of it."
        )
    return gpus // layout.engine_gpus


def weight_bytes_per_gpu(model: ModelShape, layout: Layout, bytes_per_weight: float) -> float:
    """Policy weights on one GPU: experts are split over the engine, all else over `tensor_parallel`.

    Embedding and output head have two bytes per weight, whatever the layers have.
    """
    vocabulary = 2.0 * (1 if model.tied_embeddings else 2) * model.vocab_size * model.hidden_size
    attention = bytes_per_weight * model.num_layers * model.attention_parameters
    mlp = bytes_per_weight * model.num_layers * model.mlp_parameters
    return (vocabulary + attention) / layout.tensor_parallel + mlp / (
        layout.engine_gpus if model.num_experts else layout.tensor_parallel
    )


def kv_capacity_tokens(
    hardware: Hardware,
    model: ModelShape,
    layout: Layout,
    *,
    bytes_per_weight: float,
    bytes_per_kv: float,
    draft_bytes: float = 0.0,
    draft_layers: int = 0,
    memory_share: float = 0.9,
) -> int:
    """Tokens whose keys and values one engine can hold, all attention ranks together.

    `draft_bytes` are weights of the draft on each GPU, `draft_layers` its layers with a KV cache. A rank holds at least
    one KV head, so more tensor parallelism than KV heads stores copies. Raises ConfigError when the weights do not fit.
    """
    check_fits_model(layout, model)
    room = hardware.memory_bytes * memory_share - weight_bytes_per_gpu(model, layout, bytes_per_weight) - draft_bytes
    if room <= 0:
        raise ConfigError(
            f"{model.name} does not fit on {layout.name} of {hardware.name}: its weights need more than "
            f"{memory_share:.0%} of {hardware.memory_bytes / 1e9:.0f} GB per GPU. Use more GPUs per engine or smaller "
            "weights."
        )
    heads = max(model.num_kv_heads / layout.tensor_parallel, 1)
    per_token = 2 * heads * model.head_size * (model.num_layers + draft_layers) * bytes_per_kv
    return int(room / per_token) * layout.attention_ranks


PUBLISHED_LAYOUTS = (
    Layout(4, 4),
    Layout(8, 8),
    Layout(16, 16),
    Layout(8, 1, 8),
    Layout(32, 4, 32),
    Layout(64, 1, 64),
    Layout(64, 4, 64),
)
"""TP4, TP8, TP16, EP8, EP32xTP4, EP64, EP64xTP4: what is tried for Qwen3-235B-A22B, fixed before any comparison."""

DENSE_LAYOUTS = (Layout(1, 1), Layout(2, 2), Layout(4, 4), Layout(8, 8))
"""TP1 to TP8: what is tried for a dense model, fixed before any comparison."""
