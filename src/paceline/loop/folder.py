"""The run folder: what it may be opened for, and the files in it.

config.toml           the resolved recipe             checkpoints/step-00000005/
versions.json         packages, machine, commit       trace.json
metrics.jsonl         one object per step             evaluations.jsonl
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.config.run import Recipe
from paceline.errors import CheckpointError, ConfigError
from paceline.observe.files import explained, write_whole
from paceline.observe.metrics import JsonLines
from paceline.observe.provenance import write_config, write_versions
from paceline.observe.trace import Trace
from paceline.train.checkpoint import list_checkpoints

_MAY_CHANGE = {
    "run.name",
    "run.root",
    "run.num_steps",
    "run.checkpoint_every",
    "run.keep_checkpoints",
    "run.eval_every",
}
"""Keys that a resumed run may set anew: nothing that is computed in a step depends on them."""


class RunFolder:
    """Refuses a folder that is not this run's when it is made; writes nothing before `open`."""

    def __init__(self, path: Path, recipe: Recipe, *, resume: bool) -> None:
        """Raises `ConfigError` for an existing run without `resume`, or one with another recipe."""
        self.path = path
        self._recipe = recipe
        self.checkpoints = path / "checkpoints"
        self.metrics = JsonLines(path / "metrics.jsonl")
        self._evaluations = JsonLines(path / "evaluations.jsonl")
        self._trace: Trace | None = None
        if path.exists() and not path.is_dir():
            raise ConfigError(f"{path} is a file, not a run folder: choose another run.name or run.root.")
        if path.exists() and any(path.iterdir()):
            if not resume:
                raise ConfigError(
                    f"The run folder {path} is not empty: choose another run.name, or continue that run with --resume."
                )
            self._check_recipe()

    @property
    def trace(self) -> Trace:
        if self._trace is None:
            self._trace = Trace(self.path / "trace.json")
        return self._trace

    def newest_checkpoint(self) -> Path | None:
        checkpoints = list_checkpoints(self.checkpoints)
        return checkpoints[-1] if checkpoints else None

    def open(self) -> None:
        """Make the folder and write what explains the run. Raises `CheckpointError` on a full disk."""
        with explained(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        write_config(self.path, self._recipe)
        if not (self.path / "versions.json").exists():
            write_versions(self.path)

    def start_over(self) -> None:
        """Forget what a run without a checkpoint has left."""
        self.metrics.cut(0)
        self.forget_evaluations_after(-1)

    def record_evaluation(self, step: int, reward: Mapping[str, Any]) -> None:
        """Add a line to evaluations.jsonl: `{"step": 5, "reward": {"mean", "std", "n", "failed"}}`."""
        self._evaluations.append({"step": step, "reward": dict(reward)})

    def last_evaluated_step(self) -> int | None:
        records = self._evaluations.records()
        return None if not records else int(str(records[-1]["step"]))

    def forget_evaluations_after(self, step: int) -> None:
        """Drop the evaluations of steps that a resumed run is going to do again, and half-written lines."""
        kept = [record for record in self._evaluations.records() if int(str(record["step"])) <= step]
        write_whole(self._evaluations.path, b"".join(json.dumps(record).encode() + b"\n" for record in kept))

    def _check_recipe(self) -> None:
        config = self.path / "config.toml"
        if not config.exists():
            if self.newest_checkpoint() is None:
                return  # The run was stopped before it had written anything.
            raise CheckpointError(
                f"{config} is missing, so it is not known which recipe these checkpoints belong to. Put it back, or "
                "start a new run under another run.name."
            )
        try:
            recorded = _flat(tomllib.loads(config.read_text()))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{config} is damaged ({error}): start a new run under another run.name.") from error
        given = _flat(self._recipe.model_dump(mode="json", exclude_none=True))
        differing = sorted(
            key
            for key in recorded.keys() | given.keys()
            if recorded.get(key) != given.get(key) and key not in _MAY_CHANGE
        )
        if differing:
            changes = ", ".join(f"{key} (was {recorded.get(key)!r}, is {given.get(key)!r})" for key in differing)
            raise ConfigError(
                f"The recipe differs from the one that {self.path} was started with: {changes}. Resume with the old "
                "values, or start a new run under another run.name."
            )


def _flat(tables: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{section}.{key}": value for section, table in tables.items() for key, value in table.items()}
