"""The EAGLE-3 head: one decoder layer that reads the policy's hidden states and proposes the next tokens.

Li et al., arXiv:2503.01840; the architecture is the one that vLLM 0.32 serves (`models/llama_eagle3.py` there).

Alignment, defined here once. x_0, x_1, ... are the tokens of one sequence, h_t the policy's auxiliary hidden states at
position t, e(x) the policy's embedding. A *root* t is the last position whose hidden states the policy has computed.

    depth 0   input (fc(h_t), e(x_{t+1})), RoPE position t          predicts the policy's law of x_{t+2}
    depth j   input (o_{j-1}, e(x_{t+1+j})), RoPE position t + j    predicts the policy's law of x_{t+2+j}

o_j is the head's own output at depth j before its final norm. A query at depth j sees the depth-0 keys of positions
0..t and the keys of its own chain, depths 1..j.

Shapes: B sequences, T positions, H hidden size, A auxiliary layers, N attention heads, D head size, V policy
vocabulary, W draft vocabulary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen2Config
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding, apply_rotary_pos_emb

from paceline.errors import ModelError
from paceline.models.eagle3_formats import AUX_LAYERS, CONFIG_FILE, CONVENTION, WEIGHTS_FILE, read_draft_ids, read_head

MIN_HEADS, MIN_INTERMEDIATE_SIZE = 4, 256
"""A head does in one layer what the policy does in all of its own, for which two heads of a tiny policy are too few."""


def default_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """The auxiliary layers that EAGLE-3 heads use by convention: 2, L/2 and L-3, each meaning that layer's *input*.

    vLLM sorts and deduplicates the ids, so that a collapse would feed the head fewer hidden states than it was built
    for. Raises `ModelError` when the three are not strictly increasing.
    """
    layers = (2, num_layers // 2, num_layers - 3)
    if not layers[0] < layers[1] < layers[2]:
        middle = max(1, num_layers // 2)
        raise ModelError(
            f"draft.aux_layers: the default (2, L/2, L-3) is {layers} for a policy of {num_layers} layers, not "
            f"three different layers in rising order. Name three of 0..{num_layers} yourself, for example "
            f"draft.aux_layers = [0, {middle}, {max(2, num_layers)}]."
        )
    return layers


def check_aux_layers(aux_layers: Sequence[int], num_layers: int, key: str = "draft.aux_layers") -> tuple[int, ...]:
    """`aux_layers` as a tuple, or `ModelError` naming `key` unless they are strictly increasing within 0..num_layers.

    Layer i is the residual stream at the input of decoder layer i; `num_layers` is the last layer's output, before the
    final norm.
    """
    layers = tuple(aux_layers)
    increasing = all(low < high for low, high in pairwise(layers))
    if not layers or not increasing or layers[0] < 0 or layers[-1] > num_layers:
        raise ModelError(
            f"{key} is {list(layers)}: the ids must be different, in rising order, and lie within 0..{num_layers} for "
            f"this policy of {num_layers} layers (id i is the residual stream at the input of layer i)."
        )
    return layers


@dataclass(frozen=True, slots=True)
class PolicyParts:
    """The modules of a Hugging Face causal LM that a draft reads."""

    decoder: nn.Module
    """Token ids to the last hidden state, final norm applied."""
    layers: tuple[nn.Module, ...]
    norm: nn.Module
    """The final norm."""
    embedding: nn.Embedding
    output: nn.Linear
    """Last hidden state to logits."""


def policy_parts(policy: PreTrainedModel) -> PolicyParts:
    """Find them. Raises `ModelError` for an architecture that is not laid out like Qwen3 or Llama."""
    decoder = policy.get_decoder()
    parts = dict(decoder.named_children())
    layers, norm = parts.get("layers"), parts.get("norm")
    embedding, output = policy.get_input_embeddings(), policy.get_output_embeddings()
    if (
        not isinstance(layers, nn.ModuleList)
        or norm is None
        or not isinstance(embedding, nn.Embedding)
        or not isinstance(output, nn.Linear)
    ):
        raise ModelError(
            f"policy: {type(policy).__name__} is not laid out as embedding, layers, norm and output layer (as Qwen3 "
            "and Llama are); EAGLE-3 drafts cannot read it. Use another draft.method."
        )
    return PolicyParts(decoder, tuple(layers), norm, embedding, output)


class AuxCapture:
    """Records the residual stream at the input of chosen decoder layers while the policy runs.

    A context manager; it never keeps a graph, and the policy's own computation is untouched.

        with AuxCapture(policy, (2, 6, 9)) as capture:
            policy(input_ids)
        hidden = capture.hidden()  # [B, T, A * H]
    """

    def __init__(self, policy: PreTrainedModel, aux_layers: Sequence[int]) -> None:
        parts = policy_parts(policy)
        # The input of the final norm is the output of the last layer, which is what "layer L" means in vLLM.
        modules = (*parts.layers, parts.norm)
        self._aux_layers = check_aux_layers(aux_layers, len(parts.layers))
        self._modules = {layer: modules[layer] for layer in self._aux_layers}
        self._captured: dict[int, torch.Tensor] = {}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> AuxCapture:
        for layer, module in self._modules.items():
            self._handles.append(module.register_forward_pre_hook(self._hook(layer), with_kwargs=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook(self, layer: int) -> Any:
        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._captured[layer] = (args[0] if args else kwargs["hidden_states"]).detach()

        return record

    def hidden(self) -> torch.Tensor:
        """[B, T, A * H] of the last forward pass, in the order of the layers, then forgotten.

        Raises `ModelError` when the policy has not run, or did not run a layer.
        """
        missing = [layer for layer in self._aux_layers if layer not in self._captured]
        if missing:
            raise ModelError(
                f"draft.aux_layers: no hidden states were seen at layers {missing}; the policy did not run through "
                "them since the last capture."
            )
        hidden = torch.cat([self._captured[layer] for layer in self._aux_layers], dim=-1)
        self._captured.clear()
        return hidden


class Eagle3Config(BaseModel):
    """What config.json of a head says, flat and in vLLM's names. Unsupported variants are refused by their value.

    Keys that the head does not depend on (token ids, dtype, ...) are ignored.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)

    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int = Field(ge=1)
    head_dim: int = Field(ge=2)
    vocab_size: int = Field(ge=1)
    """V, the policy's."""
    draft_vocab_size: int = Field(ge=1)
    """W, at most V."""
    aux_layers: tuple[int, ...] = Field((), alias="eagle_aux_hidden_state_layer_ids")
    """Empty: the file names none, and vLLM takes `default_aux_layers`."""
    rms_norm_eps: float = Field(1e-6, gt=0)
    max_position_embeddings: int = Field(ge=1)
    rope_parameters: dict[str, Any]
    """As transformers writes them: `{"rope_type": "default", "rope_theta": 10000.0}`."""
    norm_before_residual: bool = False
    """True: the residual stream starts from the normed hidden state."""

    trained_depth: int | None = Field(None, ge=1)
    """Steps of its own that the head was trained on; None: not known. Drafting further works, with less accepted."""

    num_hidden_layers: Literal[1] = 1
    hidden_act: Literal["silu"] = "silu"
    attention_bias: Literal[False] = False
    mlp_bias: Literal[False] = False
    norm_before_fc: Literal[False] = False
    fc_norm: Literal[False] = False
    norm_output: Literal[False] = False
    use_aux_hidden_state: Literal[True] = True

    @model_validator(mode="after")
    def _across(self) -> Eagle3Config:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.num_attention_heads} query heads are not a multiple of {self.num_key_value_heads} KV heads"
            )
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(f"draft_vocab_size {self.draft_vocab_size} is above vocab_size {self.vocab_size}")
        return self

    @classmethod
    def for_policy(
        cls,
        policy: PreTrainedConfig,
        aux_layers: Sequence[int] | None = None,
        draft_vocab_size: int | None = None,
        trained_depth: int | None = None,
    ) -> Eagle3Config:
        """A head shaped like one layer of the policy, or wider for a very small one.

        Raises `ModelError` for auxiliary layers that cannot be.
        """
        num_layers = policy.num_hidden_layers
        if aux_layers is None:
            aux_layers = default_aux_layers(num_layers)
        return cls(
            hidden_size=policy.hidden_size,
            intermediate_size=max(policy.intermediate_size, MIN_INTERMEDIATE_SIZE),
            num_attention_heads=policy.num_attention_heads * math.ceil(MIN_HEADS / policy.num_attention_heads),
            num_key_value_heads=policy.num_key_value_heads,
            head_dim=getattr(policy, "head_dim", None) or policy.hidden_size // policy.num_attention_heads,
            vocab_size=policy.vocab_size,
            draft_vocab_size=policy.vocab_size if draft_vocab_size is None else draft_vocab_size,
            aux_layers=check_aux_layers(aux_layers, num_layers),
            rms_norm_eps=policy.rms_norm_eps,
            max_position_embeddings=policy.max_position_embeddings,
            rope_parameters=dict(policy.rope_parameters),
            trained_depth=trained_depth,
        )

    def to_json(self) -> str:
        """config.json as vLLM reads it for `method: eagle3`."""
        fields = self.model_dump(exclude={"aux_layers", "use_aux_hidden_state"})
        eagle = {AUX_LAYERS: list(self.aux_layers), CONVENTION: "input", "use_aux_hidden_state": True}
        return json.dumps(
            {
                "architectures": ["LlamaForCausalLMEagle3"],
                "model_type": "llama",
                "tie_word_embeddings": False,
                **fields,
                "eagle_config": eagle,
            },
            indent=2,
        )

    def llama(self) -> LlamaConfig:
        """The transformers config of the decoder layer's parts."""
        return LlamaConfig(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.max_position_embeddings,
            rope_parameters=dict(self.rope_parameters),
            rms_norm_eps=self.rms_norm_eps,
        )


class Memory(Protocol):
    """Holds the keys and values that later queries may see."""

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Remember `key` and `value`, and attend. All [B, N, T, D], keys repeated per query head."""
        ...


class KeyValueCache:
    """The engine's view: keys in the order in which they were computed, queries see all up to themselves."""

    def __init__(self) -> None:
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        self._keys = key if self._keys is None else torch.cat([self._keys, key], dim=2)
        self._values = value if self._values is None else torch.cat([self._values, value], dim=2)
        num_queries, num_keys = query.shape[2], self._keys.shape[2]
        seen = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device).tril(num_keys - num_queries)
        return functional.scaled_dot_product_attention(query, self._keys, self._values, attn_mask=seen)


class ChainMemory:
    """The trainer's view: every position of a sequence is a root, and all chains advance together.

    The first call is depth 0, plain causal attention. In call j the query of root t sees the depth-0 keys 0..t and, of
    the calls 1..j, only the key at its own root: exactly what the engine's cache holds when it drafts from root t.
    Sequences are padded on the right, so that causality alone keeps padding out. With `documents` [B, T], numbers of
    the answers that share a row, a root sees the depth-0 keys of its own answer alone.
    """

    def __init__(self, documents: torch.Tensor | None = None) -> None:
        self._documents = documents
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        self._keys.append(key)
        self._values.append(value)
        num_roots = query.shape[2]
        unseen = torch.ones(num_roots, num_roots, dtype=torch.bool, device=query.device).triu(1)
        if self._documents is not None:
            unseen = (unseen | (self._documents.unsqueeze(2) != self._documents.unsqueeze(1))).unsqueeze(1)
        if len(self._keys) == 1:
            if self._documents is None:
                return functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            return functional.scaled_dot_product_attention(query, key, value, attn_mask=~unseen)
        query = query * query.shape[-1] ** -0.5
        prefix = (query @ self._keys[0].transpose(2, 3)).masked_fill(unseen, -torch.inf)
        chain_keys = torch.stack(self._keys[1:], dim=3)  # [B, N, T, j, D]
        chain_values = torch.stack(self._values[1:], dim=3)
        chain = (chain_keys @ query.unsqueeze(-1)).squeeze(-1)
        weights = torch.cat([prefix, chain], dim=-1).softmax(-1)
        to_prefix, to_chain = weights.split([num_roots, chain.shape[-1]], dim=-1)
        return to_prefix @ self._values[0] + (to_chain.unsqueeze(-2) @ chain_values).squeeze(-2)


class DraftHead(Protocol):
    """What drafting, training and prediction ask of a head: this module's, or a policy's own (`models.mtp`)."""

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Layers whose input residual stream `project` takes."""
        ...

    @property
    def draft_ids(self) -> torch.Tensor:
        """[W] the policy's id of each draft id."""
        ...

    def __call__(
        self, hidden: torch.Tensor, embeds: torch.Tensor, positions: torch.Tensor, memory: Memory
    ) -> torch.Tensor:
        """One depth; see `Eagle3Head.forward`."""
        ...

    def project(self, aux: torch.Tensor) -> torch.Tensor:
        """[B, T, A * H] auxiliary hidden states -> [B, T, H], the `hidden` of depth 0."""
        ...

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """[..., H] outputs of a depth -> [..., W]."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """What training the head may change."""
        ...


class DraftAttention(nn.Module):
    """Attention of Llama and Qwen2 over what a memory holds. `config` names the heads; `bias`: of query, key, value."""

    def __init__(self, config: LlamaConfig | Qwen2Config, input_size: int, head_dim: int, *, bias: bool) -> None:
        super().__init__()
        num_kv_heads = config.num_key_value_heads
        assert num_kv_heads is not None
        self._head_dim = head_dim
        self._group = config.num_attention_heads // num_kv_heads
        query_size, key_size = config.num_attention_heads * head_dim, num_kv_heads * head_dim
        self.q_proj = nn.Linear(input_size, query_size, bias=bias)
        self.k_proj = nn.Linear(input_size, key_size, bias=bias)
        self.v_proj = nn.Linear(input_size, key_size, bias=bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)

    def forward(
        self, inputs: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], memory: Memory
    ) -> torch.Tensor:
        query = self.q_proj(inputs).unflatten(-1, (-1, self._head_dim)).transpose(1, 2)
        key = self.k_proj(inputs).unflatten(-1, (-1, self._head_dim)).transpose(1, 2)
        value = self.v_proj(inputs).unflatten(-1, (-1, self._head_dim)).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *rotation)
        key = key.repeat_interleave(self._group, dim=1)
        value = value.repeat_interleave(self._group, dim=1)
        return self.o_proj(memory.attend(query, key, value).transpose(1, 2).flatten(2))


class _Layer(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self._norm_before_residual = config.norm_before_residual
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        # Of the concatenated [norm(e), norm(h)].
        self.self_attn = DraftAttention(config.llama(), 2 * config.hidden_size, config.head_dim, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = LlamaMLP(config.llama())

    def forward(
        self,
        hidden: torch.Tensor,
        embeds: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        memory: Memory,
    ) -> torch.Tensor:
        normed = self.hidden_norm(hidden)
        residual = normed if self._norm_before_residual else hidden
        attended = self.self_attn(torch.cat([self.input_layernorm(embeds), normed], dim=-1), rotation, memory)
        residual = residual + attended
        return residual + self.mlp(self.post_attention_layernorm(residual))


class Eagle3Head(nn.Module):
    """The head. Embeddings belong to the policy: they are passed in, never stored and never trained here."""

    draft_ids: torch.Tensor
    """[W] the policy's id of each draft id; a buffer, so that it moves and publishes with the weights."""

    def __init__(self, config: Eagle3Config, draft_ids: torch.Tensor | None = None) -> None:
        """`draft_ids` [W] is needed for a reduced vocabulary. Raises `ModelError` when they are not distinct ids."""
        super().__init__()
        self.config = config
        if draft_ids is None:
            if config.draft_vocab_size != config.vocab_size:
                raise ModelError(
                    f"draft.vocab_size: the head drafts {config.draft_vocab_size} of {config.vocab_size} tokens and "
                    "has no table that says which (d2t); its ids would be read as the policy's first ids."
                )
            draft_ids = torch.arange(config.vocab_size)
        _check_draft_ids(draft_ids, config)
        self.fc = nn.Linear(len(config.aux_layers) * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = _Layer(config)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("draft_ids", draft_ids.long().clone())
        self._rotary = LlamaRotaryEmbedding(config.llama())

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self.config.aux_layers

    @classmethod
    def initialize(
        cls, config: Eagle3Config, policy: PreTrainedModel, draft_ids: torch.Tensor | None, generator: torch.Generator
    ) -> Eagle3Head:
        """A fresh head in float32: the policy's rows as `lm_head`, its final norm, and noise from `generator`.

        The residual stream starts at half of its usual size, which lets the layer's branches count from the first
        update on. The global random state is left as it was.
        """
        with torch.random.fork_rng(devices=[]):
            head = cls(config, draft_ids)
        for module in head.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5, generator=generator)
        parts = policy_parts(policy)
        with torch.no_grad():
            head.fc.weight.mul_(0.5)
            head.lm_head.weight.copy_(parts.output.weight[head.draft_ids.to(parts.output.weight.device)])
            head.norm.load_state_dict(parts.norm.state_dict())
        return head

    def forward(
        self, hidden: torch.Tensor, embeds: torch.Tensor, positions: torch.Tensor, memory: Memory
    ) -> torch.Tensor:
        """One depth: the output before the final norm, [B, T, H], which is also the next depth's `hidden`.

        Args:
            hidden: [B, T, H], `project(aux)` at depth 0, then the previous output.
            embeds: [B, T, H], the policy's embedding of the token that follows each position.
            positions: [T] or [B, T], RoPE positions.
            memory: what the queries see; it remembers this depth's keys.
        """
        rotation = self._rotary(hidden, positions.expand(hidden.shape[:2]))
        return self.midlayer(hidden, embeds, rotation, memory)

    def project(self, aux: torch.Tensor) -> torch.Tensor:
        """[B, T, A * H] auxiliary hidden states -> [B, T, H]. Depth 0 only."""
        return self.fc(aux)

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """[..., H] outputs of `forward` -> [..., W] logits over the draft vocabulary."""
        return self.lm_head(self.norm(outputs))

    def draft(
        self, policy: PreTrainedModel, aux: torch.Tensor, token_ids: torch.Tensor, num_draft_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `greedy_draft`."""
        return greedy_draft(self, policy, aux, token_ids, num_draft_tokens)

    def export_state(self) -> dict[str, torch.Tensor]:
        """Copies of all tensors under the names that vLLM's loader takes: the weights, and `d2t` if W < V.

        d2t[i] is the offset from draft id i to the policy's id. A full vocabulary has no table in vLLM.
        """
        state = {name: tensor.detach().clone() for name, tensor in self.named_parameters()}
        if self.config.draft_vocab_size < self.config.vocab_size:
            state["d2t"] = self.draft_ids - torch.arange(self.config.draft_vocab_size, device=self.draft_ids.device)
        return state

    def export(self, folder: Path) -> None:
        """Write config.json and model.safetensors, which `load` and vLLM's `method: eagle3` read."""
        folder.mkdir(parents=True, exist_ok=True)
        state = {name: tensor.cpu().contiguous() for name, tensor in self.export_state().items()}
        if "d2t" in state:
            # vLLM ignores t2d; the other tools that read this layout ask for it.
            drafted = torch.zeros(self.config.vocab_size, dtype=torch.bool)
            drafted[self.draft_ids.cpu()] = True
            state["t2d"] = drafted
        save_file(state, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        (folder / CONFIG_FILE).write_text(self.config.to_json() + "\n")

    @classmethod
    def load(
        cls,
        folder: Path,
        policy: PreTrainedConfig,
        num_positions: int,
        *,
        key: str = "draft.path",
        embedding: torch.Tensor | None = None,
    ) -> Eagle3Head:
        """Read a head in any layout of `models.eagle3_formats` and check it against the policy; float32, on the CPU.

        Args:
            folder: holds config.json and the weights.
            policy: the config of the policy that it is to draft for.
            num_positions: prompt and response limit together; a shorter RoPE range is refused, because an engine
                that gathers past its table drafts nonsense without a word.
            key: of the recipe, for messages.
            embedding: [V, H] the policy's input embedding. A copy that the head brings along must equal it, and is then
                left out; None: a copy is refused.

        Raises:
            ModelError: names `key` and what is missing, extra, of another shape, or does not fit.
        """
        stored = read_head(folder, policy.num_hidden_layers, key)
        config = _checked_config(stored.config, folder, policy, key)
        if config.max_position_embeddings < num_positions:
            raise ModelError(
                f"{key}: the head in {folder} has RoPE positions up to {config.max_position_embeddings} "
                f"(max_position_embeddings), but prompt and response may reach {num_positions} tokens. Lower "
                "sampling.max_tokens or data.max_prompt_tokens, use a head trained for longer sequences, or, if this "
                "one was, raise the number in its config.json."
            )
        draft_ids = read_draft_ids(
            stored.d2t, stored.t2d, config.draft_vocab_size, config.vocab_size, f"{key}: the head in {folder}"
        )
        with torch.random.fork_rng(devices=[]):
            head = cls(config, draft_ids)
        _check_embedding(stored.embedding, embedding, folder, key)
        _check_tensors(head, stored.tensors, folder, key)
        head.load_state_dict(dict(stored.tensors), strict=False)
        return head


def _checked_config(stored: Mapping[str, Any], folder: Path, policy: PreTrainedConfig, key: str) -> Eagle3Config:
    path = folder / CONFIG_FILE
    try:
        config = Eagle3Config.model_validate(stored)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the file"
        raise ModelError(
            f"{key}: {path}: {place}: {first['msg']}. It is not an EAGLE-3 head of one Llama layer that paceline can "
            "run."
        ) from error
    for name in ("hidden_size", "vocab_size"):
        ours, theirs = getattr(config, name), getattr(policy, name)
        if ours != theirs:
            raise ModelError(
                f"{key}: the head in {folder} has {name} {ours}, the policy has {theirs}. Use a head that was "
                f"trained for this policy, or leave {key} out to train one."
            )
    aux_layers = config.aux_layers or default_aux_layers(policy.num_hidden_layers)
    check_aux_layers(aux_layers, policy.num_hidden_layers, key=f"{key}: aux layers in {path}")
    return config.model_copy(update={"aux_layers": aux_layers})


def _check_embedding(stored: torch.Tensor | None, embedding: torch.Tensor | None, folder: Path, key: str) -> None:
    if stored is None:
        return
    if embedding is None or stored.shape != embedding.shape or not torch.equal(stored, embedding.detach().to(stored)):
        raise ModelError(
            f"{key}: {folder} has an embedding of its own (embed_tokens.weight) that is not known to be the policy's, "
            "which is what paceline drafts with. Use a head that was trained with the policy's embedding."
        )


def _check_tensors(head: Eagle3Head, tensors: Mapping[str, torch.Tensor], folder: Path, key: str) -> None:
    expected = {name: tuple(parameter.shape) for name, parameter in head.named_parameters()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in [*expected, *found]:
        if name not in found:
            raise ModelError(f"{key}: {folder} lacks the tensor {name}. Export the head again.")
        if name not in expected:
            raise ModelError(
                f"{key}: {folder} has an extra tensor {name} that this head has no place for; it is of "
                "another architecture, or holds parts of the policy."
            )
        if found[name] != expected[name]:
            remedy = ""
            if name == "fc.weight":
                remedy = f" It names {len(head.aux_layers)} aux layers, each {head.config.hidden_size} wide."
            raise ModelError(
                f"{key}: {name} in {folder} has shape {list(found[name])}, its config.json asks for "
                f"{list(expected[name])}.{remedy}"
            )
        if not bool(tensors[name].isfinite().all()):
            raise ModelError(f"{key}: {name} in {folder} holds values that are not finite.")


def _check_draft_ids(draft_ids: torch.Tensor, config: Eagle3Config) -> None:
    size, vocabulary = config.draft_vocab_size, config.vocab_size
    if draft_ids.shape != (size,):
        raise ModelError(
            f"draft vocabulary table: {list(draft_ids.shape)} ids for a draft vocabulary of {size} tokens."
        )
    if int(draft_ids.min()) < 0 or int(draft_ids.max()) >= vocabulary:
        raise ModelError(
            f"draft vocabulary table: ids run from {int(draft_ids.min())} to {int(draft_ids.max())}, outside of the "
            f"policy's vocabulary 0..{vocabulary - 1}."
        )
    num_distinct = draft_ids.unique().numel()
    if num_distinct != size:
        raise ModelError(
            f"draft vocabulary table: {size} draft tokens map to {num_distinct} different tokens; each must be "
            "distinct (a table of zeros, or one that was never saved?)."
        )
    if size == vocabulary and not torch.equal(draft_ids.cpu(), torch.arange(vocabulary)):
        raise ModelError(
            "draft vocabulary table: a full vocabulary must keep the policy's order; vLLM has no table for it."
        )


@torch.no_grad()
def greedy_draft(
    head: DraftHead, policy: PreTrainedModel, aux: torch.Tensor, token_ids: torch.Tensor, num_draft_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy draft of one sequence, step by step with a key-value cache, as an engine does it.

    Args:
        head: proposes.
        policy: its embedding is read.
        aux: [n - 1, A * H], the policy's auxiliary hidden states of positions 0..n-2.
        token_ids: [n] long, prompt and response so far; the last one has not been through the policy.
        num_draft_tokens: K.

    Returns:
        The drafted ids [K] (policy ids) and their logits [K, W].
    """
    if num_draft_tokens == 0 or len(aux) == 0:  # before the second token there is no root to draft from
        return token_ids.new_empty(0), aux.new_empty(0, len(head.draft_ids))
    cache = KeyValueCache()
    last = token_ids.shape[0] - 2
    positions = torch.arange(last + 1, device=aux.device)
    outputs = head(head.project(aux[None]), embed(policy, token_ids[None, 1:]), positions, cache)[:, -1:]
    ids, logits = [], []
    for depth in range(num_draft_tokens):
        if depth > 0:
            outputs = head(outputs, embed(policy, ids[-1][None, None]), positions[-1:] + depth, cache)
        logits.append(head.logits(outputs)[0, 0])
        ids.append(head.draft_ids[logits[-1].argmax()])
    return torch.stack(ids), torch.stack(logits)


def embed(policy: PreTrainedModel, token_ids: torch.Tensor) -> torch.Tensor:
    """[...] ids -> [..., H] embeddings of the policy, detached: a draft's loss must not move them."""
    return functional.embedding(token_ids, policy_parts(policy).embedding.weight.detach())
