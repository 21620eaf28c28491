"""MiMo-style policies: a Qwen2 trunk and one MTP layer in the same checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from paceline.errors import ModelError
from paceline.models.mtp import MTP_PREFIX, MtpLayer

T = TypeVar("T")

ARCHITECTURE = "MiMoForCausalLM"
"""What config.json says for vLLM to serve the layer; `save_pretrained` writes the name of the class below."""


class MiMoForCausalLM(Qwen2ForCausalLM):
    """Qwen2 in every respect, with `model.mtp_layers` beside its layers: loaded, saved and published with the policy.

    Its forward pass does not run the MTP layer; `models.mtp.MtpHead` does.
    """

    def __init__(self, config: Qwen2Config) -> None:
        """Raises `ModelError` unless the config asks for one MTP layer and an output layer of its own."""
        num_layers = getattr(config, "num_nextn_predict_layers", 0)
        if num_layers != 1:
            raise ModelError(
                f"policy: config.json has num_nextn_predict_layers = {num_layers}. One MTP layer is supported, which "
                "drafts all depths: vLLM runs no second one for this architecture. Use a checkpoint with one."
            )
        if config.tie_word_embeddings:
            raise ModelError(
                f"policy: {ARCHITECTURE} with tie_word_embeddings = true is not supported. Save the policy with an "
                "lm_head of its own and tie_word_embeddings = false."
            )
        super().__init__(config)
        self.model.mtp_layers = nn.ModuleList([MtpLayer(config)])
        self.post_init()


def is_mimo(folder: Path) -> bool:
    """Whether config.json in `folder` names this architecture."""
    return json.loads((folder / "config.json").read_text()).get("architectures") == [ARCHITECTURE]


def trunk_parameters(policy: nn.Module) -> Iterator[nn.Parameter]:
    """All parameters but those of MTP layers: what the policy's own optimiser may touch."""
    return (parameter for name, parameter in policy.named_parameters() if not name.startswith(MTP_PREFIX))


def split_state(state: Mapping[str, T]) -> tuple[dict[str, T], dict[str, T]]:
    """(trunk, MTP layers) of a mapping by tensor names, which stay as they are."""
    head = {name: value for name, value in state.items() if name.startswith(MTP_PREFIX)}
    return {name: value for name, value in state.items() if name not in head}, head
