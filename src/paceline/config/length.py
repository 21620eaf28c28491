"""How k is chosen: keys that every draft method has."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from paceline.config.base import Section


class ChosenLength(Section):
    """A draft whose k may be chosen before every engine step."""

    choose_k: Literal["fixed", "adaptive"] = "fixed"
    """`fixed`: always num_draft_tokens. `adaptive`: 0 to num_draft_tokens, by the running sequences and acceptances."""
    profile: Path | None = None
    """Step times of this engine, from `paceline calibrate`; `adaptive` needs them."""
    probe_share: float = Field(0.01, ge=0, le=0.2)
    """`adaptive`: share of the generation time that steps with a longer k may cost, to see what it would yield."""

    @model_validator(mode="after")
    def _chooses(self) -> ChosenLength:
        if self.choose_k == "adaptive" and self.profile is None:
            raise ValueError(
                'choose_k = "adaptive" needs draft.profile: make one with `paceline calibrate RECIPE`, or set '
                'choose_k = "fixed"'
            )
        unused = self.changed("profile", "probe_share")
        if self.choose_k == "fixed" and unused:
            raise ValueError(
                f'{" and ".join(unused)} without effect while choose_k = "fixed": set choose_k = "adaptive"'
            )
        return self
