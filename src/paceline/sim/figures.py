"""Where a figure comes from. Every number that enters a projection carries one of four marks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Mark = Literal["measured", "fitted", "assumed", "published"]
"""measured: timed or counted. fitted: chosen so that a model meets data. assumed: chosen without data. published: taken
from a datasheet, a model config or a paper and not checked."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Mark and source of a figure. Example: `Origin("published", "datasheet, dense, per GPU")`."""

    mark: Mark
    source: str


@dataclass(frozen=True, slots=True)
class Assumption:
    """One input of a projection, ready to be printed. Example: `Assumption("host_s", 0.002, "fitted", "8 points")`."""

    name: str
    value: object
    mark: Mark
    source: str


def assumptions(owner: str, values: Mapping[str, object], origins: Mapping[str, Origin]) -> list[Assumption]:
    """One line per value, named `owner.name`. Raises KeyError for a value without an origin: none may be unmarked."""
    return [
        Assumption(f"{owner}.{name}", value, origins[name].mark, origins[name].source) for name, value in values.items()
    ]
