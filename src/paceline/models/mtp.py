"""The multi-token-prediction (MTP) layer of a MiMo-style policy, and that layer as a draft head.

The layer is part of the policy's own checkpoint (Xiaomi, arXiv:2505.07608; DeepSeek-V3, arXiv:2412.19437, section 2.2).
What it computes is what vLLM 0.32 serves (`models/mimo_mtp.py` there).

Alignment. x_0, x_1, ... are the tokens of one sequence, h_t the policy's residual stream after its last layer, *before*
the final norm, e(x) the policy's embedding. A *root* t is the last position that the policy has computed.

    depth 0   input (h_t, e(x_{t+1})), RoPE position t              predicts the policy's law of x_{t+2}
    depth j   input (o_{j-1}, e(x_{t+1+j})), RoPE position t + j    predicts the policy's law of x_{t+2+j}

o_j is the layer's output at depth j *after* its own final norm; the policy's output layer reads it as it is. The
embedding at RoPE position 0 is taken as zero. What a query sees is as in `models.eagle3`. There is one layer, which
drafts all depths: vLLM 0.32 runs no second one for this architecture.

Shapes: B sequences, T positions, H hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel, Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP, Qwen2RMSNorm

from paceline.errors import ModelError
from paceline.models.eagle3 import DraftAttention, Memory, policy_parts

MTP_PREFIX = "model.mtp_layers."
"""What the layer's tensors are called in the checkpoint, in front of its number."""


class MtpLayer(nn.Module):
    """The layer, its parameters named as in the checkpoint: `model.mtp_layers.0.<name>`."""

    def __init__(self, config: Qwen2Config) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.token_layernorm = Qwen2RMSNorm(size, eps=eps)
        self.hidden_layernorm = Qwen2RMSNorm(size, eps=eps)
        self.input_proj = nn.Linear(2 * size, size, bias=False)
        self.input_layernorm = Qwen2RMSNorm(size, eps=eps)
        self.self_attn = DraftAttention(config, size, size // config.num_attention_heads, bias=True)
        self.post_attention_layernorm = Qwen2RMSNorm(size, eps=eps)
        self.mlp = Qwen2MLP(config)
        self.final_layernorm = Qwen2RMSNorm(size, eps=eps)

    def forward(
        self,
        hidden: torch.Tensor,
        embeds: torch.Tensor,
        positions: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        memory: Memory,
    ) -> torch.Tensor:
        """[B, T, H] twice, [T] or [B, T] -> [B, T, H], the final norm applied."""
        embeds = embeds.masked_fill((positions == 0).unsqueeze(-1), 0.0)
        inputs = torch.cat([self.hidden_layernorm(hidden), self.token_layernorm(embeds)], dim=-1)
        residual = self.input_proj(inputs)
        residual = residual + self.self_attn(self.input_layernorm(residual), rotation, memory)
        residual = residual + self.mlp(self.post_attention_layernorm(residual))
        return self.final_layernorm(residual)


class MtpHead(nn.Module):
    """A policy's own MTP layer as a `models.eagle3.DraftHead`. Its parameters *are* the policy's: nothing is copied.

    Embedding, rotary table and output layer are the policy's too, read at every call and never trained through here.
    """

    def __init__(self, policy: PreTrainedModel) -> None:
        """Raises `ModelError` for a policy without such a layer."""
        super().__init__()
        layers = dict(policy.get_decoder().named_children()).get("mtp_layers")
        if not isinstance(layers, nn.ModuleList) or not isinstance(layers[0], MtpLayer):
            raise ModelError(
                f'draft.method is "mtp", and the policy ({type(policy).__name__}) has no MTP layer to draft with. Use '
                "policy.num_mtp_layers = 1 with the tiny policy, a folder whose config.json says "
                'architectures = ["MiMoForCausalLM"], or another draft.method.'
            )
        self.layer = layers[0]
        self.aux_layers: tuple[int, ...] = (policy.config.num_hidden_layers,)
        # In a tuple: as a submodule the whole policy would count as the head's parameters.
        self._policy = (policy,)

    @property
    def draft_ids(self) -> torch.Tensor:
        """[V] every token of the policy can be drafted."""
        policy = self._policy[0]
        return torch.arange(policy.config.vocab_size, device=policy.device)

    def forward(
        self, hidden: torch.Tensor, embeds: torch.Tensor, positions: torch.Tensor, memory: Memory
    ) -> torch.Tensor:
        """One depth: [B, T, H], which is also the next depth's `hidden`. Arguments as in `Eagle3Head.forward`."""
        positions = positions.expand(hidden.shape[:2])
        rotation = self._policy[0].get_submodule("model.rotary_emb")(hidden, positions)
        return self.layer(hidden, embeds, positions, rotation, memory)

    def project(self, aux: torch.Tensor) -> torch.Tensor:
        """[B, T, H] unchanged: the layer's own projection comes at every depth."""
        return aux

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """[..., H] outputs of `forward` -> [..., V], through the policy's output layer."""
        return functional.linear(outputs, policy_parts(self._policy[0]).output.weight.detach())
