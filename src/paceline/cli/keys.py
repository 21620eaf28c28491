"""`paceline keys`: every key of a recipe, from the schema itself."""

from __future__ import annotations

import difflib

from pydantic.fields import FieldInfo
from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.config.load import section_fields
from paceline.config.run import Recipe
from paceline.errors import ConfigError


def print_keys(section: str | None) -> int:
    """Print one section, or all. Raises `ConfigError` for a section that does not exist."""
    sections = list(Recipe.model_fields)
    if section is not None and section not in sections:
        matches = difflib.get_close_matches(section, sections, n=1)
        hint = f"did you mean {matches[0]}?" if matches else f"there are {', '.join(sections)}"
        raise ConfigError(f"A recipe has no section {section!r}; {hint}")
    console = Console()
    for name in sections if section is None else [section]:
        table = Table("key", "default", "meaning", title=Text(f"[{name}]"), title_justify="left", expand=True)
        for key, fields in section_fields(name).items():
            kinds = [kind for kind, _ in fields if kind]
            only = "" if not kinds or len(kinds) == len(fields) > 2 else f"({', '.join(kinds)}) "
            default = " / ".join(dict.fromkeys(_default(field) for _, field in fields))
            meaning = next((field.description for _, field in fields if field.description), "")
            table.add_row(key, Text(default), Text(only + meaning))
        console.print(table)
    return 0


def _default(field: FieldInfo) -> str:
    return "must be set" if field.is_required() else str(field.default)
