"""Checkpoints: everything a run needs to go on as if it had never stopped, all of it or nothing.

A checkpoint is a folder `step-00000012/`, written beside its final name, synced, and renamed when it is complete. Its
`manifest.json` holds the size and SHA-256 of every file, so that a missing or damaged part is named instead of used.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from paceline.data.source import SourceState
from paceline.errors import CheckpointError
from paceline.observe.files import explained, sync_folder, write_synced
from paceline.types import Versions

_MANIFEST = "manifest.json"
_UNFINISHED = ".unfinished-"


@dataclass(frozen=True)
class Checkpoint:
    """The whole state of a run after `step` steps. `certificate` is a JSON object."""

    step: int
    versions: Versions
    policy: Mapping[str, torch.Tensor]
    """float32 master weights under their Hugging Face names."""
    draft: Mapping[str, torch.Tensor] | None
    """The draft's weights under their exported names; None where it has none, or where they are among the policy's."""
    draft_state: Mapping[str, object] | None
    """`OnlineDraft.state_dict()`: optimiser, schedule, versions, peak, generator; None for a method without weights."""
    optimizer: Mapping[str, object]
    """`PolicyTrainer.state_dict()`: moments and step counts."""
    rng: torch.Tensor
    """torch's global generator (`torch.get_rng_state()`)."""
    data: SourceState
    """Position of the prompt source."""
    certificate: Mapping[str, object]
    """Sums of the certificate since the first step."""
    draft_evidence: Mapping[str, object] | None
    """Sums of what speaks for or against the engine's draft being the trainer's; None for a method without weights."""
    drafted_since_accepted: int
    """Drafted tokens since the last accepted one, for the alarm of a dead draft."""
    choice_of_k: Mapping[str, object] | None
    """`LengthChooser.state_dict()`; None for a fixed k."""
    metrics_bytes: int
    """Length of metrics.jsonl after this step: resuming cuts the file back to it."""
    history: Mapping[str, object] | None = None
    """`HistoryIndex.state_dict()`, a JSON object; None for other drafts."""


def write_checkpoint(folder: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Write `checkpoint` below `folder` and then remove all but the newest `keep`. Returns its path.

    A checkpoint of the same step is left as it is: a run's state follows from the step, and replacing a folder cannot
    be done in one go. Raises `CheckpointError` when it cannot be written (full disk); older checkpoints are then as
    they were.
    """
    final = folder / f"step-{checkpoint.step:08d}"
    unfinished = folder / f"{_UNFINISHED}{final.name}"
    with explained(final):
        folder.mkdir(parents=True, exist_ok=True)
        _remove_unfinished(folder)
        if final.exists():
            return final
        try:
            unfinished.mkdir()
            manifest = {}
            for name, content in _files(checkpoint).items():
                write_synced(unfinished / name, content)
                manifest[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            write_synced(unfinished / _MANIFEST, json.dumps(manifest, indent=1).encode())
            sync_folder(unfinished)
            unfinished.rename(final)
            sync_folder(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        for old in list_checkpoints(folder)[:-keep]:
            _remove(old)
    return final


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(folder.glob("step-" + "[0-9]" * 8))


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint and check every byte of it.

    Raises `CheckpointError` that names the part that is missing, damaged, or not of this format.
    """
    manifest_path = path / _MANIFEST
    if not manifest_path.is_file():
        raise CheckpointError(_damage(manifest_path, "is missing"))
    try:
        manifest = json.loads(manifest_path.read_bytes())
        names = {name: (part["bytes"], part["sha256"]) for name, part in manifest.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(_damage(manifest_path, "is damaged")) from error
    for required in ("policy.safetensors", "state.json", "trainer.pt"):
        if required not in names:
            raise CheckpointError(_damage(manifest_path, f"does not list {required}"))
    files: dict[str, bytes] = {}
    for name, (size_bytes, sha256) in names.items():
        if not (path / name).is_file():
            raise CheckpointError(_damage(path / name, "is missing"))
        content = (path / name).read_bytes()
        if len(content) != size_bytes or hashlib.sha256(content).hexdigest() != sha256:
            raise CheckpointError(_damage(path / name, "is damaged (its checksum differs)"))
        files[name] = content
    return _parse(path, files)


def _files(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Serialised in memory first: a full disk is then always a plain `OSError` of ours to handle."""
    files = {
        "policy.safetensors": _tensors(checkpoint.policy),
        "trainer.pt": _pickled({"optimizer": checkpoint.optimizer, "rng": checkpoint.rng}),
    }
    if checkpoint.draft is not None:
        files["draft.safetensors"] = _tensors(checkpoint.draft)
    if checkpoint.draft_state is not None:
        files["draft.pt"] = _pickled(checkpoint.draft_state)
    if checkpoint.history is not None:
        files["history.json"] = json.dumps(checkpoint.history).encode()
    state = {
        "step": checkpoint.step,
        "versions": {"policy": checkpoint.versions.policy, "draft": checkpoint.versions.draft},
        # A part that was taken out of the folder and of the manifest is missed all the same.
        "parts": sorted(files),
        "data": checkpoint.data,
        "certificate": checkpoint.certificate,
        "draft_evidence": checkpoint.draft_evidence,
        "drafted_since_accepted": checkpoint.drafted_since_accepted,
        "choice_of_k": checkpoint.choice_of_k,
        "metrics_bytes": checkpoint.metrics_bytes,
    }
    return {**files, "state.json": json.dumps(state).encode()}


def _parse(path: Path, files: Mapping[str, bytes]) -> Checkpoint:
    state = json.loads(files["state.json"])
    trainer = _unpickled(files["trainer.pt"])
    for name in ("optimizer", "rng"):
        if name not in trainer:
            raise CheckpointError(_damage(path / "trainer.pt", f"lacks {name}"))
    draft, draft_state, history = (files.get(name) for name in ("draft.safetensors", "draft.pt", "history.json"))
    try:
        for name in state["parts"]:
            if name not in files:
                raise CheckpointError(_damage(path / name, "is missing"))
        return Checkpoint(
            step=state["step"],
            versions=Versions(state["versions"]["policy"], state["versions"]["draft"]),
            policy=safetensors.torch.load(files["policy.safetensors"]),
            draft=None if draft is None else safetensors.torch.load(draft),
            draft_state=None if draft_state is None else _unpickled(draft_state),
            optimizer=trainer["optimizer"],
            rng=trainer["rng"],
            data=state["data"],
            certificate=state["certificate"],
            draft_evidence=state["draft_evidence"],
            drafted_since_accepted=state["drafted_since_accepted"],
            choice_of_k=state["choice_of_k"],
            metrics_bytes=state["metrics_bytes"],
            history=None if history is None else json.loads(history),
        )
    except KeyError as error:
        raise CheckpointError(_damage(path / "state.json", f"lacks {error.args[0]}")) from error


def _tensors(tensors: Mapping[str, torch.Tensor]) -> bytes:
    return safetensors.torch.save({name: tensor.contiguous() for name, tensor in tensors.items()})


def _pickled(state: Mapping[str, object]) -> bytes:
    content = io.BytesIO()
    torch.save(dict(state), content)
    return content.getvalue()


def _unpickled(content: bytes) -> dict[str, Any]:
    return torch.load(io.BytesIO(content), weights_only=True)


def _remove(checkpoint: Path) -> None:
    """Rename first: a crash halfway through the removal must not leave half a checkpoint under a complete name."""
    doomed = checkpoint.with_name(f"{_UNFINISHED}{checkpoint.name}")
    checkpoint.rename(doomed)
    shutil.rmtree(doomed)


def _remove_unfinished(folder: Path) -> None:
    for leftover in folder.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(leftover)


def _damage(path: Path, what: str) -> str:
    return (
        f"{path} {what}: this checkpoint cannot be trusted. Remove the folder {path.parent} to resume from the one "
        "before it, or start a new run under another run.name."
    )
