"""Recipe files and command-line overrides to one validated `Recipe`, with errors that name the key and the remedy.

The overrides are merged into the file's tables before the one validation, instead of going through the command-line
source of pydantic-settings: that source cannot switch a union kind while the file holds keys of the old kind, answers
a mistyped option with the usage text and no nearest match, and reports values in pydantic's own wording.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from paceline.config.controls import refusal
from paceline.config.length import ChosenLength
from paceline.config.run import Recipe
from paceline.errors import ConfigError

ADAPTIVE = "adaptive"
"""The arm whose k is chosen before every step."""

Tables = dict[str, Any]
"""Section name -> key -> value, as TOML gives it."""


def load_recipe(path: Path | str, overrides: Sequence[str] = ()) -> Recipe:
    """Read a TOML recipe, lay `overrides` over it and validate the result.

    `overrides` are command-line words: `["--run.num_steps", "3", "--draft.method=ngram"]`. Switching a kind
    (`draft.method`, `policy.kind`, `engine.kind`) there keeps the file's keys that the new kind has too and drops the
    others; an override that the new kind does not have is an error. Raises `ConfigError`.
    """
    file_tables = _read_toml(Path(path))
    given = parse_overrides(overrides)
    return _validate(_merge(file_tables, given), source=str(path), given=given)


def load_arms(
    path: Path | str, overrides: Sequence[str], arms: Sequence[str], *, may_choose: bool = False
) -> dict[str, Recipe]:
    """The same recipe once per arm, an arm being a value of `draft.method`: `{"none": ..., "eagle3": ...}`.

    With `may_choose` there is the arm `adaptive`, too: the recipe's own method, with `draft.choose_k = "adaptive"`. All
    others then have a fixed k, and the keys of the choice (`draft.profile`, ...) apply to that arm alone.

    An override of a draft key applies to the arms that have it; one that no arm has is an error. A control without
    drafts (`certificate.control_share`) is of the arms that draft. Raises `ConfigError`.
    """
    if len(arms) < 2 or len(set(arms)) < len(arms):
        raise ConfigError(f"--arms names {', '.join(arms)}: a comparison needs two different arms, --arms none,eagle3")
    file_tables = _read_toml(Path(path))
    given = parse_overrides(overrides)
    if ("draft", "method") in given:
        raise ConfigError("--draft.method is what the arms of a comparison differ in: name them with --arms instead")
    draft_kinds = kinds("draft")
    chooses = may_choose and ADAPTIVE in arms
    methods = {arm: arm for arm in arms}
    if chooses:
        table = file_tables.get("draft")
        default = Recipe.model_fields["draft"].default.method
        methods[ADAPTIVE] = str(table.get("method", default)) if isinstance(table, dict) else default
    fields = {arm: set(draft_kinds[method].model_fields) for arm, method in methods.items() if method in draft_kinds}
    known = set().union(*fields.values())
    recipes: dict[str, Recipe] = {}
    for arm, method in methods.items():
        own = fields.get(arm, set())
        arm_given = {
            (section, key): value
            for (section, key), value in given.items()
            if section != "draft" or key in own or key not in known
        }
        arm_given["draft", "method"] = method
        if chooses and arm == ADAPTIVE:
            arm_given["draft", "choose_k"] = "adaptive"
        elif chooses:
            defaults = {("draft", key): field.default for key, field in ChosenLength.model_fields.items() if key in own}
            arm_given |= defaults
        tables = _merge(file_tables, arm_given)
        if method == "none" and isinstance(certificate := tables.get("certificate"), dict):
            certificate.pop("control_share", None)
        recipes[arm] = _validate(tables, source=str(path), given=arm_given)
    return recipes


def parse_overrides(words: Sequence[str], options: Sequence[str] = ()) -> dict[tuple[str, str], Any]:
    """Command-line words to (section, key) -> value. A value is a string, or a list when it starts with `[`.

    `options` are other options of the command, for the nearest match of a mistyped one. The schema converts strings to
    numbers. The last of two settings of one key holds. Raises `ConfigError`.
    """
    given: dict[tuple[str, str], Any] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, text = word.partition("=")
        if not name.startswith("--"):
            raise ConfigError(f"{word!r} on the command line belongs to no option: write --section.key value")
        section, dot, key = name[2:].partition(".")
        if not dot or not section or not key or "." in key:
            names = [*options, *(f"--{s}.{k}" for s in Recipe.model_fields for k in section_fields(s))]
            raise ConfigError(f"{name} is not an option{_nearest(name, names)} Overrides are --section.key value.")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"{name} has no value: write {name} VALUE")
            text = rest.pop(0)
        given[section, key] = _parse_value(name, text)
    return given


def kinds(section: str) -> dict[str, type[BaseModel]]:
    """Kind -> model of a union section; empty for a plain one."""
    return {} if _tag(section) is None else _models(section)


def section_fields(section: str) -> dict[str, list[tuple[str, FieldInfo]]]:
    """Key -> (kind, field) of each kind of the section that has it; the kind of a plain section is empty."""
    fields: dict[str, list[tuple[str, FieldInfo]]] = {}
    for kind, model in _models(section).items():
        for key, field in model.model_fields.items():
            fields.setdefault(key, []).append((kind, field))
    return fields


def _parse_value(name: str, text: str) -> object:
    if not text.startswith("["):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name} -> not a list | got {text!r}. Write it as in TOML: {name} '[2, 6, 9]'") from error


def _read_toml(path: Path) -> Tables:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"There is no recipe at {path}: {_near_files(path)}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The recipe {path} cannot be read: {error}. Name a TOML file") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}. Correct that line") from error


def _near_files(path: Path) -> str:
    if not path.parent.is_dir():
        return f"the folder {path.parent} does not exist"
    names = sorted(file.name for file in path.parent.glob("*.toml"))
    return f"{path.parent} holds {', '.join(names)}" if names else f"{path.parent} holds no TOML files"


def _merge(file_tables: Tables, given: Mapping[tuple[str, str], Any]) -> Tables:
    """A new tree: the file's tables, with kinds filled in from the defaults, under the overrides."""
    tables: Tables = {name: dict(table) if isinstance(table, dict) else table for name, table in file_tables.items()}
    for section in Recipe.model_fields:
        tag = _tag(section)
        table = tables.get(section, {})
        if tag is None or not isinstance(table, dict):
            continue
        default_kind = getattr(Recipe.model_fields[section].default, tag)
        old_kind = table.get(tag, default_kind)
        new_kind = given.get((section, tag), old_kind)
        if new_kind != old_kind and isinstance(new_kind, str) and new_kind in kinds(section):
            shared = kinds(section)[new_kind].model_fields
            table = {key: value for key, value in table.items() if key in shared}
        tables[section] = {**table, tag: new_kind}
    for (section, key), value in given.items():
        table = tables.setdefault(section, {})
        if isinstance(table, dict):
            table[key] = value
    return tables


def _validate(tables: Tables, source: str, given: Mapping[tuple[str, str], Any]) -> Recipe:
    try:
        return Recipe.model_validate(tables)
    except ValidationError as error:
        lines = [_explain(detail, tables, source, given) for detail in error.errors(include_url=False)]
        raise ConfigError("\n".join(lines)) from error


def _explain(detail: ErrorDetails, tables: Tables, source: str, given: Mapping[tuple[str, str], Any]) -> str:
    """One pydantic error as `where: section.key -> what is wrong | got X`, with the nearest match for unknown names."""
    loc = [str(part) for part in detail["loc"]]
    section = loc[0] if loc else ""
    tag = _tag(section)
    # pydantic puts the kind between section and key: draft.eagle3.depth.
    keys = loc[2:] if tag is not None and len(loc) > 1 and loc[1] in kinds(section) else loc[1:]
    if tag is not None and detail["type"] == "union_tag_invalid":
        keys = [tag]
    name = ".".join([section, *keys]) or "recipe"
    from_words = (section, keys[0]) in given if keys else section in {name for name, _ in given}
    where = "command line" if from_words else source

    match detail["type"]:
        case "extra_forbidden" if not keys:
            what = f"no such section{_nearest(section, list(Recipe.model_fields))}{_home_of(section)}"
            return f"{where}: {name} -> {what}"
        case "extra_forbidden" if section == "sampling" and (reason := refusal(keys[0])):
            return f"{where}: {name} -> refused: {reason}"
        case "extra_forbidden":
            own = _own_keys(section, tables)
            return f"{where}: {name} -> no such key{_nearest(keys[0], own) or _home_of(keys[0])}"
        case "union_tag_invalid" if tag is not None:
            value = str(detail["input"][tag])
            allowed = list(kinds(section))
            return f"{where}: {name} -> must be one of {', '.join(allowed)}{_nearest(value, allowed)} | got {value!r}"
        case "missing":
            return f"{where}: {name} -> must be set"
        case "model_type" | "model_attributes_type" | "dict_type":
            return f"{where}: {name} -> must be a table, [{name}] | got {detail['input']!r}"
        case "value_error":
            return f"{where}: {name} -> {detail['msg'].removeprefix('Value error, ')}".replace("recipe -> ", "")
        case _:
            what = detail["msg"].removeprefix("Input ").removeprefix("Value ")
            return f"{where}: {name} -> {what} | got {detail['input']!r}"


def _nearest(name: str, names: Sequence[str]) -> str:
    matches = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"; did you mean {matches[0]}?" if matches else ""


def _home_of(key: str) -> str:
    """Where a key that is unknown here does exist: in another section, or in another kind of this one."""
    homes = [
        f"[{section}] with {_tag(section)} = {kind!r}" if kind else f"[{section}]"
        for section in Recipe.model_fields
        for kind, model in _models(section).items()
        if key in model.model_fields
    ]
    return f"; {key} belongs to {' or '.join(homes)}" if homes else ""


def _own_keys(section: str, tables: Tables) -> list[str]:
    tag = _tag(section)
    return list(_models(section)["" if tag is None else tables[section][tag]].model_fields)


def _tag(section: str) -> str | None:
    """The key that chooses the kind of a union section (`method`, `kind`); None for a plain section."""
    field = Recipe.model_fields.get(section)
    return field.discriminator if field is not None and isinstance(field.discriminator, str) else None


def _models(section: str) -> dict[str, type[BaseModel]]:
    """Kind -> model; the kind of a plain section is empty."""
    annotation = Recipe.model_fields[section].annotation
    tag = _tag(section)
    if tag is not None:
        return {get_args(model.model_fields[tag].annotation)[0]: model for model in get_args(annotation)}
    assert isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return {"": annotation}
