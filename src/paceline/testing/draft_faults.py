"""Faults of the draft in the live vLLM engine, planted behind the back of its publish checks.

None of them changes a token's law, so the certificate must stay quiet; each must raise the draft alarm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from paceline.engine.vllm import compat
from paceline.engine.vllm.engine import VllmEngine

State = Mapping[str, torch.Tensor]
"""A head's tensors under their exported names."""


@dataclass(frozen=True, slots=True)
class DraftFault:
    """`change` makes the engine's tensors from the published ones and those of an older version."""

    change: Callable[[State, State], State]
    within_blocks: int
    """Blocks in which the alarm must have been raised."""
    shifts_aux_layers: bool = False

    @contextmanager
    def planted(self, engine: VllmEngine, published: State, older: State) -> Iterator[None]:
        """The engine drafts with the fault inside, and as published afterwards."""
        model: Any = engine._runner.get_model()
        layers = model.model.aux_hidden_state_layers
        load_unseen(engine, self.change(published, older))
        if self.shifts_aux_layers:
            model.set_aux_hidden_state_layers(tuple(layer + 1 for layer in layers))
        try:
            yield
        finally:
            model.set_aux_hidden_state_layers(layers)
            load_unseen(engine, published)


def load_unseen(engine: VllmEngine, state: State) -> None:
    """Into the engine's draft, without a check and without a version."""
    compat.reload(engine._runner, engine._runner.drafter.model, iter(state.items()))
    engine._llm.reset_prefix_cache()


def _zeroed(published: State, older: State) -> State:
    """What a sleep that discards all weights and a refit of the policy alone leave behind, the table included."""
    return {name: torch.zeros_like(tensor) for name, tensor in published.items()}


def _heads_permuted(published: State, older: State) -> State:
    """The query heads rotated by one, the output projection not: a layout that trainer and engine read differently."""
    query = published["midlayer.self_attn.q_proj.weight"]
    halves = query.unflatten(0, (2, -1))
    return {**published, "midlayer.self_attn.q_proj.weight": halves.roll(1, 0).flatten(0, 1)}


def _table_lost(published: State, older: State) -> State:
    """Draft ids taken for the policy's."""
    return {**published, "d2t": torch.zeros_like(published["d2t"])}


FAULTS: Mapping[str, DraftFault] = {
    "zeroed": DraftFault(_zeroed, 20),
    "an older version": DraftFault(lambda published, older: older, 60),
    "attention heads permuted": DraftFault(_heads_permuted, 100),
    "aux layers shifted by one": DraftFault(lambda published, older: published, 60, shifts_aux_layers=True),
    "draft ids taken for the policy's": DraftFault(_table_lost, 30),
}
