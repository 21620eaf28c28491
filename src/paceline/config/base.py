"""The frozen base of every section."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of a recipe. Unknown keys are errors; the docstring under a field is its help text."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True)

    def changed(self, *names: str) -> list[str]:
        """Those of the keys `names` that do not have their default.

        By value and not by what was set: the config.toml of a run lists defaults, too, and must load again.
        """
        return [name for name in names if getattr(self, name) != type(self).model_fields[name].default]
