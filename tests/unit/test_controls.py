"""The table of sampling controls is what really happens: exact ones are accepted, refused ones are refused by name."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from paceline.config.controls import CONTROLS, Control, as_markdown, refusal
from paceline.config.load import load_recipe
from paceline.config.run import SamplingConfig
from paceline.errors import ConfigError
from paceline.types import Sampling

PAGE = Path(__file__).resolve().parents[2] / "docs" / "sampling.md"
ENGINES = {
    "reference": ("reference", "none"),
    "reference_drafts": ("reference", "ngram"),
    "vllm": ("vllm", "none"),
    "vllm_drafts": ("vllm", "ngram"),
}


def load(tmp_path: Path, column: str, key: str, value: str):
    kind, method = ENGINES[column]
    path = tmp_path / "recipe.toml"
    path.write_text(
        f"[engine]\nkind = '{kind}'\n[draft]\nmethod = '{method}'\n[sampling]\n{key} = {value}\n", encoding="utf-8"
    )
    return load_recipe(path)


@pytest.mark.parametrize("column", ENGINES)
@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.name)
def test_a_control_is_accepted_where_the_table_says_exact_and_refused_elsewhere(control: Control, column, tmp_path):
    verdict = dataclasses.asdict(control)[column]
    for key, value in control.settings.items():
        if verdict == "exact":
            assert float(dict(load(tmp_path, column, key, value).sampling)[key]) == float(value)
        else:
            with pytest.raises(ConfigError, match=rf"sampling\.{key}"):
                load(tmp_path, column, key, value)
    for key in control.refused_keys:
        with pytest.raises(ConfigError) as caught:
            load(tmp_path, column, key, "1")
        assert f"sampling.{key} -> refused: {control.name}: {control.reason}" in str(caught.value)


def test_a_refused_key_on_the_command_line_is_refused_there(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"command line: sampling\.min_tokens -> refused: min tokens: "):
        load_recipe(path, ["--sampling.min_tokens", "5"])


def test_every_control_is_either_a_key_or_refused_by_name():
    """What `Sampling` carries is in the table, and no name is both set and refused."""
    settable = {key for control in CONTROLS for key in control.settings}
    assert settable == set(SamplingConfig.model_fields)
    assert {field.name for field in dataclasses.fields(Sampling)} == settable | {"stop_token_ids"}
    refused = [key for control in CONTROLS for key in control.refused_keys]
    assert len(refused) == len(set(refused)) and not settable & set(refused)
    assert all(control.settings or control.refused_keys for control in CONTROLS)
    assert refusal("temperature") is None


def test_the_page_shows_the_table():
    begin, end = "<!-- controls -->\n", "\n<!-- end of controls -->"
    text = PAGE.read_text(encoding="utf-8")
    shown = text[text.index(begin) + len(begin) : text.index(end)]
    assert shown == as_markdown(), f"docs/sampling.md must hold, between its markers:\n{as_markdown()}"


@pytest.mark.parametrize("page", ["field-reports.md", "logprobs.md"])
def test_every_test_that_a_page_names_exists(page):
    text = (PAGE.parent / page).read_text(encoding="utf-8")
    sources = "\n".join(path.read_text(encoding="utf-8") for path in PAGE.parents[1].glob("tests/**/test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", text))
    assert named and not [name for name in named if f"def {name}(" not in sources]
