"""`paceline report`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.observe.metrics import JsonLines
from paceline.report.table import comparison, print_tables, runs


def report(names: Sequence[str]) -> int:
    """Print the comparison of each compare folder, and all training runs side by side. Raises `ConfigError`."""
    summaries: list[dict[str, Any]] = []
    training: dict[str, list[dict[str, Any]]] = {}
    for name in names:
        folder = Path(name)
        if (folder / "summary.json").is_file():
            summaries.append(_read_summary(folder / "summary.json"))
        else:
            training[name] = _read_metrics(folder)
    for summary in summaries:
        print_tables(comparison(summary))
    if training:
        print_tables(runs(training))
    return 0


def _read_summary(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON ({error}): run the comparison again with --fresh") from error


def _read_metrics(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise ConfigError(
            f"{folder} is not a run folder: it has neither summary.json nor metrics.jsonl. Name the folder that a run "
            "wrote, run.root / run.name"
        )
    records = JsonLines(path).records()
    if not records:
        raise ConfigError(f"{path} has no finished step yet: wait for the first one")
    return records
