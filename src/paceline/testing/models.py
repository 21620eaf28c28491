"""Small random policies and heads on disk, for tests of engines."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen3Config, Qwen3ForCausalLM

from paceline.models.eagle3 import Eagle3Config, Eagle3Head
from paceline.models.mimo import MiMoForCausalLM
from paceline.spec.sampling import policy_probs
from paceline.types import Sampling


def random_policy(
    folder: Path,
    *,
    num_layers: int = 8,
    hidden_size: int = 64,
    vocab_size: int = 16,
    num_kv_heads: int = 1,
    spread: float = 0.5,
    tied: bool = False,
    max_positions: int = 256,
    seed: int = 0,
) -> PreTrainedModel:
    """Write a random Qwen3-style policy to `folder` and return it in float32.

    `spread` is the standard deviation of the weights; larger is sharper. Token 1 is the end of a response. The global
    random state is left as it was.
    """
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=2 * num_kv_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=32,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=spread,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy = Qwen3ForCausalLM(config)
    policy.save_pretrained(folder)
    return policy.eval()


def random_mtp_policy(
    folder: Path,
    *,
    num_layers: int = 4,
    hidden_size: int = 64,
    vocab_size: int = 16,
    spread: float = 0.3,
    max_positions: int = 256,
    seed: int = 0,
) -> MiMoForCausalLM:
    """Write a random MiMo-style policy with its MTP layer to `folder`; otherwise as `random_policy`.

    Biases are random too, which fresh ones are not, so that a tensor that goes astray shows.
    """
    own: dict[str, Any] = {"num_nextn_predict_layers": 1}
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=1,
        max_position_embeddings=max_positions,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=spread,
        **own,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy = MiMoForCausalLM(config)
        with torch.no_grad():
            for name, parameter in policy.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(std=spread)
                elif "norm" in name:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
    policy.save_pretrained(folder)
    return policy.eval()


def random_head(
    folder: Path,
    policy: PreTrainedModel,
    *,
    aux_layers: tuple[int, ...] | None = None,
    draft_ids: torch.Tensor | None = None,
    seed: int = 0,
) -> Eagle3Head:
    """Export an untrained EAGLE-3 head for `policy` to `folder`; its `lm_head` starts from the policy's rows."""
    size = None if draft_ids is None else len(draft_ids)
    config = Eagle3Config.for_policy(policy.config, aux_layers, size)
    head = Eagle3Head.initialize(config, policy, draft_ids, torch.Generator().manual_seed(seed))
    head.export(folder)
    return head


def against(policy: PreTrainedModel) -> PreTrainedModel:
    """A copy whose logits are those of `policy` with the other sign: a draft of it is what the policy says least."""
    opposite = copy.deepcopy(policy)
    output = opposite.get_output_embeddings()
    assert isinstance(output, torch.nn.Linear)
    with torch.no_grad():
        # A parameter of its own, also where it was tied to the embedding.
        output.weight = torch.nn.Parameter(-output.weight)
    opposite.config.tie_word_embeddings = False
    return opposite


@torch.no_grad()
def exact_law(policy: PreTrainedModel, prompt: tuple[int, ...], sampling: Sampling) -> dict[tuple[int, ...], float]:
    """Every response and its probability, from the policy's logits on whole sequences: no engine, no cache."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(sampling.max_tokens):
        open_ends = [tokens for tokens in law if not tokens or tokens[-1] not in sampling.stop_token_ids]
        logits = policy(torch.tensor([[*prompt, *tokens] for tokens in open_ends])).logits[:, -1]
        longer = {tokens: mass for tokens, mass in law.items() if tokens and tokens[-1] in sampling.stop_token_ids}
        for tokens, probs in zip(open_ends, policy_probs(logits.double(), sampling).tolist(), strict=True):
            longer |= {(*tokens, token): law[tokens] * p for token, p in enumerate(probs) if p > 0}
        law = longer
    return law
