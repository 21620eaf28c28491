"""Seconds of one engine iteration from FLOP, bytes and messages: the roofline with efficiencies.

Symbols: n live sequences on one engine, C tokens in their KV caches together, k drafts per sequence, q = k + 1
positions verified per sequence. Everything broadcasts over arrays. For a fixed n and k the time is linear in C: both
terms of the attention operator are proportional to C, so their p-norm is too. The rollout engine relies on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from paceline.errors import ConfigError
from paceline.sim.comm import allgather_s, allreduce_s, alltoall_s
from paceline.sim.efficiency import IDEAL, Efficiency
from paceline.sim.figures import Assumption
from paceline.sim.hardware import Hardware
from paceline.sim.layout import Layout, check_fits_model, kv_capacity_tokens
from paceline.sim.models import ModelShape
from paceline.sim.moe import busiest_tokens, experts_read

Array = np.ndarray


class Cost(Protocol):
    """What an engine iteration takes. Anything with these three methods can drive the simulated engine."""

    def iteration_s(self, num_live: ArrayLike, cached_tokens: ArrayLike, k: ArrayLike) -> Array:
        """Seconds of one iteration of an engine with `num_live` >= 1 sequences, which hold `cached_tokens` together.

        `k` drafts per sequence; 0 is a plain decode step. The three broadcast.
        """
        ...

    def prefill_s(self, new_tokens: ArrayLike, attention_pairs: ArrayLike) -> Array:
        """Seconds to compute `new_tokens` of prompts (or of a preempted sequence), 0 for none.

        `attention_pairs` counts (query, key) pairs: about tokens ** 2 / 2 for a prompt from its start.
        """
        ...

    def assumptions(self) -> list[Assumption]:
        """Every figure that the seconds rest on."""
        ...


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes per element of weights and KV cache, and which matrix units are used. Activations have two bytes.

    Embedding, output head and an EAGLE-3 draft keep 16 bits, as published 8-bit checkpoints and drafts do.
    """

    name: str
    weight_bytes: float
    kv_bytes: float
    fp8_math: bool
    block: int = 1
    """Weights are scaled in square blocks of this size: the width of an expert on one GPU is a multiple of it."""

    def flops(self, hardware: Hardware) -> float:
        """Peak of the units that multiply."""
        return hardware.fp8_flops if self.fp8_math else hardware.bf16_flops


BF16 = Precision("bf16", 2.0, 2.0, fp8_math=False)
FP8 = Precision("fp8", 1.0, 1.0, fp8_math=True, block=128)
"""Weights, matrix products and KV cache in eight bits; blocks as in the published Qwen3 checkpoints."""

_ACTIVATION_BYTES = 2.0


@dataclass(frozen=True, slots=True)
class NoModelDrafter:
    """Drafts that need no forward: n-gram look-up, history. Their host time is `host_spec_s`."""


@dataclass(frozen=True, slots=True)
class Eagle3Drafter:
    """fc 3h -> h, one dense layer whose attention input is 2h wide, an output head over its own vocabulary."""

    vocab_size: int = 32000


@dataclass(frozen=True, slots=True)
class MtpDrafter:
    """fc 2h -> h, one layer shaped like the policy's, the policy's output head; one forward per draft token."""


Drafter = NoModelDrafter | Eagle3Drafter | MtpDrafter


@dataclass(frozen=True, slots=True)
class RooflineCost:
    """The cost of a model on a layout of some hardware. Implements `Cost`.

    Example: `RooflineCost(hardware("gb200"), model("qwen3-8b"), Layout(1, 1)).iteration_s(32, 32 * 4000, 3)`.
    """

    hardware: Hardware
    model: ModelShape
    layout: Layout
    precision: Precision = BF16
    drafter: Drafter = Eagle3Drafter()
    efficiency: Efficiency = IDEAL

    def __post_init__(self) -> None:
        check_fits_model(self.layout, self.model)
        part = self.model.expert_ffn_size / self.layout.expert_tensor_parallel
        if part % self.precision.block:
            raise ConfigError(
                f"{self.layout.name} leaves {part:g} columns of an expert of {self.model.name} on each GPU, not a "
                f"multiple of the {self.precision.block} that {self.precision.name} scales together (so says vLLM). "
                "Use fewer GPUs per expert."
            )

    def iteration_s(self, num_live: ArrayLike, cached_tokens: ArrayLike, k: ArrayLike) -> Array:
        """See `Cost.iteration_s`."""
        return _total(self.breakdown_s(num_live, cached_tokens, k))

    def breakdown_s(self, num_live: ArrayLike, cached_tokens: ArrayLike, k: ArrayLike) -> dict[str, Array]:
        """Seconds by part: attention, linear, experts, communication, norms, output, draft, software."""
        num_live, cached_tokens, k = np.broadcast_arrays(
            np.asarray(num_live, dtype=float), np.asarray(cached_tokens, dtype=float), np.asarray(k, dtype=float)
        )
        # The busiest attention rank decides.
        rows = np.ceil(num_live / self.layout.attention_ranks)
        cached = cached_tokens * rows / num_live
        queries = k + 1.0
        layers = self.model.num_layers
        parts = {
            "attention": layers * self._attention_s(queries, cached),
            "linear": layers * self._linears_s(rows * queries, self.model.hidden_size),
            **self._mlp_s(num_live * queries, rows * queries, layers),
            "norms": layers * self._norms_s(rows * queries),
            "output": self._in_16_bits()._output_s(rows * queries, self.model.vocab_size),
        }
        parts["communication"] = parts["communication"] + layers * self._reduce_s(rows * queries)
        parts["draft"] = self._draft_s(num_live, rows, cached, k)
        parts["software"] = self._software_s(num_live, k)
        return parts

    def prefill_s(self, new_tokens: ArrayLike, attention_pairs: ArrayLike) -> Array:
        """See `Cost.prefill_s`. The draft's own pass over the prompt and the output head are left out."""
        new_tokens, pairs = np.broadcast_arrays(np.asarray(new_tokens, float), np.asarray(attention_pairs, float))
        tokens = np.maximum(new_tokens, 1.0)
        rows = np.ceil(tokens / self.layout.attention_ranks)
        shape, ranks = self.model, self.layout.tensor_parallel
        layers = shape.num_layers
        flop = 4 * (shape.num_heads / ranks) * shape.head_size * pairs * rows / tokens
        mlp = self._mlp_s(tokens, rows, layers)
        per_layer = (
            self._op_s(flop, 2 * rows * self._kv_row_bytes())
            + self._linears_s(rows, shape.hidden_size)
            + self._norms_s(rows)
            + self._reduce_s(rows)
        )
        seconds = layers * per_layer + _total(mlp) + self.efficiency.host_s
        return np.where(new_tokens > 0, seconds, 0.0)

    def kv_capacity_tokens(self, memory_share: float = 0.9) -> int:
        """Tokens that the KV cache of one engine holds beside policy and draft. Raises ConfigError for no room."""
        return kv_capacity_tokens(
            self.hardware,
            self.model,
            self.layout,
            bytes_per_weight=self.precision.weight_bytes,
            bytes_per_kv=self.precision.kv_bytes,
            draft_bytes=self._draft_bytes() / self.layout.tensor_parallel,
            draft_layers=0 if isinstance(self.drafter, NoModelDrafter) else 1,
            memory_share=memory_share,
        )

    def draft_parameters(self) -> int:
        """Weights of the draft; 0 without a model. The output head of an MTP draft is the policy's."""
        shape = self.model
        match self.drafter:
            case NoModelDrafter():
                return 0
            case Eagle3Drafter(vocab_size):
                wide = shape.hidden_size * (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_size
                dense = shape.attention_parameters + wide + 3 * shape.hidden_size * shape.ffn_size
                return dense + 3 * shape.hidden_size**2 + vocab_size * shape.hidden_size
            case MtpDrafter():
                return shape.attention_parameters + shape.mlp_parameters + 2 * shape.hidden_size**2

    def assumptions(self) -> list[Assumption]:
        """Hardware, model, layout, precision, draft, efficiencies."""
        return [
            *self.hardware.assumptions(),
            *self.model.assumptions(),
            *self.layout.assumptions(),
            Assumption("precision", self.precision.name, "assumed", "weights, matrix products and KV cache"),
            Assumption("drafter", repr(self.drafter), "assumed", "shape of the draft"),
            *self.efficiency.assumptions(),
        ]

    def _draft_bytes(self) -> float:
        in_16_bits = isinstance(self.drafter, Eagle3Drafter)
        return self.draft_parameters() * (self._in_16_bits() if in_16_bits else self).precision.weight_bytes

    def _in_16_bits(self) -> RooflineCost:
        """The same for the parts that are not quantised."""
        precision = Precision("bf16", 2.0, self.precision.kv_bytes, fp8_math=False)
        return replace(self, precision=precision)

    def _op_s(self, flop: Array, num_bytes: Array) -> Array:
        """t_op + (compute ** p + memory ** p) ** (1 / p)."""
        efficiency = self.efficiency
        compute = flop / (self.precision.flops(self.hardware) * efficiency.flops_share)
        memory = num_bytes / (self.hardware.memory_bytes_per_s * efficiency.bandwidth_share)
        return efficiency.op_s + join(compute, memory, efficiency.norm)

    def _stream_s(self, num_bytes: Array) -> Array:
        """Bytes that are only moved."""
        return num_bytes / (self.hardware.memory_bytes_per_s * self.efficiency.bandwidth_share)

    def _linear_s(self, rows: Array, inputs: float, outputs: float) -> Array:
        flop = 2 * rows * inputs * outputs
        num_bytes = self.precision.weight_bytes * inputs * outputs + _ACTIVATION_BYTES * rows * (inputs + outputs)
        return self._op_s(flop, num_bytes)

    def _linears_s(self, rows: Array, attention_input: float) -> Array:
        """Query-key-value and output projections of one layer."""
        shape, ranks = self.model, self.layout.tensor_parallel
        kv_heads = max(shape.num_kv_heads / ranks, 1)
        qkv = (shape.num_heads / ranks + 2 * kv_heads) * shape.head_size
        out = shape.num_heads / ranks * shape.head_size
        return self._linear_s(rows, attention_input, qkv) + self._linear_s(rows, out, shape.hidden_size)

    def _kv_row_bytes(self) -> float:
        """Keys (or values) of one token in one layer on one GPU."""
        shape = self.model
        return max(shape.num_kv_heads / self.layout.tensor_parallel, 1) * shape.head_size * self.precision.kv_bytes

    def _attention_s(self, queries: Array, cached: Array) -> Array:
        """One layer. Passes over the KV cache beyond the first cost `kv_reread` of a pass each."""
        shape, tile = self.model, self.efficiency.tile_rows
        passes = np.ceil(queries * shape.num_heads / (shape.num_kv_heads * tile)) if tile else queries
        flop = 4 * (shape.num_heads / self.layout.tensor_parallel) * shape.head_size * queries * cached
        reads = 1.0 + self.efficiency.kv_reread * (passes - 1.0)
        return self._op_s(flop, 2 * cached * self._kv_row_bytes() * reads)

    def _norms_s(self, rows: Array) -> Array:
        """Norms, rotary embedding and activation of one layer: three small operators, fourteen bytes per element."""
        return 3 * self.efficiency.op_s + self._stream_s(14 * rows * self.model.hidden_size)

    def _output_s(self, rows: Array, vocab_size: int) -> Array:
        """Output head, and four-byte logits written and read."""
        part = vocab_size / self.layout.tensor_parallel
        return self._linear_s(rows, self.model.hidden_size, part) + self._stream_s(8 * rows * part)

    def _reduce_s(self, rows: Array) -> Array:
        num_bytes = rows * self.model.hidden_size * _ACTIVATION_BYTES
        return allreduce_s(self.hardware, self.layout.tensor_parallel, num_bytes, self.efficiency.allreduce_s)

    def _dense_mlp_s(self, rows: Array) -> Array:
        part = self.model.ffn_size / self.layout.tensor_parallel
        hidden = self.model.hidden_size
        return self._linear_s(rows, hidden, 2 * part) + self._linear_s(rows, part, hidden)

    def _mlp_s(self, tokens: Array, rows: Array, layers: int) -> dict[str, Array]:
        """MLP of `layers` layers by part. `tokens` on the engine, `rows` on the busiest attention rank."""
        shape, layout, efficiency = self.model, self.layout, self.efficiency
        hidden = shape.hidden_size
        if not shape.num_experts:
            return {
                "experts": layers * self._dense_mlp_s(rows),
                "communication": layers * self._reduce_s(rows),
            }
        ranks = layout.expert_parallel
        read = experts_read(tokens, shape.num_experts, shape.experts_per_token, efficiency.expert_skew, ranks)
        busy = busiest_tokens(tokens, shape.experts_per_token, ranks)
        part = shape.expert_ffn_size / layout.expert_tensor_parallel
        weights = self.precision.weight_bytes
        gate_up = self._op_s(
            2 * busy * hidden * 2 * part,
            weights * read * hidden * 2 * part + _ACTIVATION_BYTES * busy * (hidden + 2 * part),
        )
        down = self._op_s(
            2 * busy * part * hidden, weights * read * part * hidden + _ACTIVATION_BYTES * busy * (part + hidden)
        )
        experts = self._linear_s(rows, hidden, shape.num_experts) + gate_up + down
        # Tokens travel to their experts with the width of the weights and come back as activations.
        sent = tokens / layout.engine_gpus * shape.experts_per_token * hidden
        communication = alltoall_s(self.hardware, ranks, sent * weights, efficiency.alltoall_s)
        communication = communication + alltoall_s(
            self.hardware, ranks, sent * _ACTIVATION_BYTES, efficiency.alltoall_s
        )
        communication = communication + allreduce_s(
            self.hardware,
            layout.expert_tensor_parallel,
            tokens / ranks * hidden * _ACTIVATION_BYTES,
            efficiency.allreduce_s,
        )
        if ranks > 1 and layout.attention_ranks > 1:
            # Each rank of a tensor-parallel group sends its share of the rows to the experts; what comes back is
            # gathered (`sequence_parallel_chunk` in vLLM).
            communication = communication + allgather_s(
                self.hardware, layout.tensor_parallel, rows * hidden * _ACTIVATION_BYTES, efficiency.allreduce_s
            )
        return {"experts": layers * experts, "communication": layers * communication}

    def _draft_s(self, num_live: Array, rows: Array, cached: Array, k: Array) -> Array:
        """k forwards of the draft. The first also takes in the tokens that the last verify step committed."""
        match self.drafter:
            case NoModelDrafter():
                return np.zeros_like(k)
            case Eagle3Drafter(vocab_size):
                draft = self._in_16_bits()
                entry = draft._linear_s(rows, 3 * self.model.hidden_size, self.model.hidden_size)
                first = draft._eagle3_forward_s(2 * rows, cached, vocab_size)
                later = draft._eagle3_forward_s(rows, cached, vocab_size)
            case MtpDrafter():
                entry = np.zeros_like(k)
                first = self._mtp_forward_s(2 * num_live, 2 * rows, cached)
                later = self._mtp_forward_s(num_live, rows, cached)
        return np.where(k > 0, first + entry + (k - 1.0) * later, 0.0)

    def _eagle3_forward_s(self, rows: Array, cached: Array, vocab_size: int) -> Array:
        """One dense layer whose attention input is two hidden states wide, and the head over the draft's vocabulary."""
        layer = self._linears_s(rows, 2 * self.model.hidden_size) + self._dense_mlp_s(rows) + self._reduce_s(rows)
        return self._around_mlp_s(rows, cached) + layer + self._output_s(rows, vocab_size)

    def _mtp_forward_s(self, tokens: Array, rows: Array, cached: Array) -> Array:
        """Embedding and hidden state joined, one layer of the policy's shape, the policy's head."""
        hidden = self.model.hidden_size
        layer = self._linear_s(rows, 2 * hidden, hidden) + self._linears_s(rows, hidden)
        layer = layer + _total(self._mlp_s(tokens, rows, 1))
        head = self._in_16_bits()._output_s(rows, self.model.vocab_size)
        return self._around_mlp_s(rows, cached) + layer + head

    def _around_mlp_s(self, rows: Array, cached: Array) -> Array:
        """Attention of one query per sequence, norms, and the all-reduce after the attention."""
        return self._attention_s(np.ones_like(rows), cached) + self._norms_s(rows) + self._reduce_s(rows)

    def _software_s(self, num_live: Array, k: Array) -> Array:
        efficiency = self.efficiency
        forwards = 0.0 if isinstance(self.drafter, NoModelDrafter) else k
        speculation = np.where(k > 0, efficiency.host_spec_s + efficiency.host_draft_s * forwards, 0.0)
        return efficiency.host_s + speculation + efficiency.sampler_s * num_live * (k + 1.0)


def _total(parts: Mapping[str, Array]) -> Array:
    return np.sum(list(parts.values()), axis=0)


def join(compute: Array, memory: Array, norm: float) -> Array:
    """p-norm of two times: their sum at p = 1, the larger at infinity."""
    if np.isinf(norm):
        return np.maximum(compute, memory)
    if norm == 1:
        return compute + memory
    # Scaled by the larger, so that a large p neither overflows nor vanishes.
    larger = np.maximum(compute, memory)
    smaller = np.minimum(compute, memory)
    ratio = np.divide(smaller, larger, out=np.zeros_like(larger, dtype=float), where=larger > 0)
    return larger * (1.0 + ratio**norm) ** (1.0 / norm)
