"""The order in which a run sees its training prompts, resumable."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypedDict

from paceline.errors import CheckpointError, DataError
from paceline.types import Prompt


class SourceState(TypedDict):
    """Where a `PromptSource` stands; plain JSON."""

    seed: int
    num_prompts: int
    epoch: int
    position: int
    """Prompts of this epoch that were given out."""


class PromptSource:
    """Every prompt once per epoch, each epoch in an order of its own that follows from (seed, epoch) alone.

    Example: `PromptSource(prompts, seed=0).next(8)` is the first step's prompts. Raises `DataError` for no prompts.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        if not prompts:
            raise DataError("there are no training prompts: set data.num_train to 1 or more")
        self._prompts = tuple(prompts)
        self._seed = seed
        self._epoch = 0
        self._position = 0
        self._order = self._shuffled()

    def next(self, number: int) -> list[Prompt]:
        """The next `number` prompts; an epoch that ends is followed by the next one."""
        taken: list[Prompt] = []
        while len(taken) < number:
            if self._position == len(self._order):
                self._epoch += 1
                self._position = 0
                self._order = self._shuffled()
            more = self._order[self._position : self._position + number - len(taken)]
            taken.extend(self._prompts[i] for i in more)
            self._position += len(more)
        return taken

    def state_dict(self) -> SourceState:
        return SourceState(seed=self._seed, num_prompts=len(self._prompts), epoch=self._epoch, position=self._position)

    def load_state_dict(self, state: SourceState) -> None:
        """Continue where `state` was taken. Raises `CheckpointError` when seed or number of prompts differ."""
        if (state["seed"], state["num_prompts"]) != (self._seed, len(self._prompts)):
            raise CheckpointError(
                f"the checkpoint stands in {state['num_prompts']} prompts with seed {state['seed']}, this run has "
                f"{len(self._prompts)} with seed {self._seed}. Resume with the recipe of the run, or start a new one"
            )
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._shuffled()

    def _shuffled(self) -> list[int]:
        order = list(range(len(self._prompts)))
        random.Random(f"{self._seed}-{self._epoch}").shuffle(order)
        return order
