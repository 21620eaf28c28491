"""Checkpoints: whole or not there, and every damaged part is named."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from dataclasses import replace

import pytest
import torch

from paceline.data.source import SourceState
from paceline.errors import CheckpointError
from paceline.observe import files
from paceline.train import checkpoint as module
from paceline.train.checkpoint import Checkpoint, list_checkpoints, read_checkpoint, write_checkpoint
from paceline.types import Versions


def make(step=3, draft=True):
    generator = torch.Generator().manual_seed(step)
    policy = {"a.weight": torch.randn(4, 3, generator=generator), "b": torch.randn(5, generator=generator)}
    parameter = torch.nn.Parameter(torch.randn(3, generator=generator))
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    parameter.grad = torch.ones(3)
    optimizer.step()
    return Checkpoint(
        step=step,
        versions=Versions(step, 0 if draft else -1),
        policy=policy,
        draft={"d2t": torch.arange(4), "fc.weight": torch.randn(2, 2, generator=generator)} if draft else None,
        draft_state={"version": 2, "peak": 1.5, "generator": generator.get_state()} if draft else None,
        optimizer=optimizer.state_dict(),
        rng=generator.get_state(),
        data=SourceState(seed=0, num_prompts=9, epoch=1, position=7),
        certificate={"sums": [0.1 + 0.2, 1e-300]},
        draft_evidence={"log_means": [0.1 + 0.2]} if draft else None,
        drafted_since_accepted=4,
        choice_of_k={"k": [3, 0], "reached": [[16.0, 0.1 + 0.2]]},
        metrics_bytes=1234,
    )


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b) and a.dtype == b.dtype
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.parametrize("draft", [True, False])
def test_what_is_read_is_bit_for_bit_what_was_written(tmp_path, draft):
    written = make(draft=draft)
    read = read_checkpoint(write_checkpoint(tmp_path, written, keep=1))
    assert all(same(getattr(written, name), getattr(read, name)) for name in Checkpoint.__dataclass_fields__)


@pytest.mark.parametrize(
    "name", ["policy.safetensors", "draft.safetensors", "draft.pt", "trainer.pt", "state.json", "manifest.json"]
)
@pytest.mark.parametrize("damage", ["removed", "shortened", "one bit"])
def test_a_missing_or_damaged_part_is_named(tmp_path, name, damage):
    path = write_checkpoint(tmp_path, make(), keep=1)
    content = (path / name).read_bytes()
    if damage == "removed":
        (path / name).unlink()
    elif damage == "shortened":
        (path / name).write_bytes(content[:-20])
    elif name == "manifest.json":
        (path / name).write_bytes(content.replace(b"policy.safetensors", b"policy.safetensorz"))
    else:
        (path / name).write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
    with pytest.raises(CheckpointError, match=name.replace("manifest.json", "manifest.json|policy.safetensorz")):
        read_checkpoint(path)


@pytest.mark.parametrize("name", ["draft.safetensors", "draft.pt", "trainer.pt", "policy.safetensors"])
def test_a_part_that_was_taken_out_of_the_manifest_too_is_missed(tmp_path, name):
    path = write_checkpoint(tmp_path, make(), keep=1)
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest[name]
    (path / "manifest.json").write_text(json.dumps(manifest))
    (path / name).unlink()
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        read_checkpoint(path)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("trainer.pt", "optimizer"),
        ("trainer.pt", "rng"),
        *(("state.json", key) for key in ("step", "versions", "parts", "data", "certificate", "draft_evidence")),
    ],
)
def test_an_entry_that_a_part_lacks_is_named(tmp_path, name, key):
    path = write_checkpoint(tmp_path, make(), keep=1)
    if name == "trainer.pt":
        entries = torch.load(path / name, weights_only=True)
        del entries[key]
        torch.save(entries, path / name)
    else:
        entries = json.loads((path / name).read_text())
        del entries[key]
        (path / name).write_text(json.dumps(entries))
    content = (path / name).read_bytes()
    manifest = json.loads((path / "manifest.json").read_text())
    manifest[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=f"{name}.* lacks {key}"):
        read_checkpoint(path)


def test_only_the_newest_are_kept_and_only_after_the_new_one_is_complete(tmp_path):
    for step in (1, 2, 10, 11):
        write_checkpoint(tmp_path, make(step), keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000010", "step-00000011"]


def test_a_checkpoint_that_is_there_is_not_touched(tmp_path):
    path = write_checkpoint(tmp_path, make(1), keep=1)
    before = {part.name: (part.stat().st_mtime_ns, part.stat().st_ino) for part in path.iterdir()}
    assert write_checkpoint(tmp_path, make(1), keep=1) == path
    assert {part.name: (part.stat().st_mtime_ns, part.stat().st_ino) for part in path.iterdir()} == before


@pytest.mark.parametrize("nth", range(1, 8))
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_at_any_write_leaves_the_old_checkpoint_and_nothing_else(tmp_path, monkeypatch, nth, number):
    write_checkpoint(tmp_path, make(1), keep=1)
    calls = []

    def fsync(handle):
        calls.append(handle)
        if len(calls) == nth:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files.os, "fsync", fsync)
    with pytest.raises(CheckpointError, match="space" if number == errno.ENOSPC else "Cannot write") as error:
        write_checkpoint(tmp_path, make(2), keep=1)
    assert "\n" not in str(error.value)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert read_checkpoint(tmp_path / "step-00000001").step == 1
    write_checkpoint(tmp_path, make(2), keep=1)
    assert read_checkpoint(tmp_path / "step-00000002").step == 2


class Killed(BaseException):
    """Stands for a kill: no handler of ours may run any clean-up that a real kill would not."""


@pytest.mark.parametrize("nth", range(1, 40))
def test_stopped_at_any_system_call_the_newest_complete_checkpoint_is_old_or_new(tmp_path, monkeypatch, nth):
    """Each prefix of the calls that change the disk is a state that a crash may leave."""
    write_checkpoint(tmp_path, make(1), keep=1)
    calls = []

    def counted(real):
        def call(*args, **kwargs):
            if len(calls) >= nth - 1:
                calls.append(real)
                raise Killed
            calls.append(real)
            return real(*args, **kwargs)

        return call

    monkeypatch.setattr(module, "write_synced", counted(module.write_synced))
    monkeypatch.setattr(type(tmp_path), "mkdir", counted(type(tmp_path).mkdir))
    monkeypatch.setattr(type(tmp_path), "rename", counted(type(tmp_path).rename))
    # What shutil.rmtree does, call by call: a removal may be cut in the middle.
    monkeypatch.setattr(os, "unlink", counted(os.unlink))
    monkeypatch.setattr(os, "rmdir", counted(os.rmdir))
    completed = True
    try:
        write_checkpoint(tmp_path, make(2), keep=1)
    except Killed:
        completed = False
    monkeypatch.undo()
    steps = [read_checkpoint(path).step for path in list_checkpoints(tmp_path)]
    assert steps in ([1], [2], [1, 2])
    if completed:
        assert steps == [2]
    # The next checkpoint sweeps up whatever was left.
    write_checkpoint(tmp_path, make(3), keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def test_a_file_size_limit_of_the_system_is_a_full_disk(tmp_path):
    resource = pytest.importorskip("resource")
    import signal

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
    try:
        with pytest.raises(CheckpointError, match="No space left"):
            write_checkpoint(tmp_path, make(1), keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert list(tmp_path.iterdir()) == []


def test_tensors_that_are_views_of_one_another_are_written_as_what_they_show(tmp_path):
    base = torch.arange(6.0).reshape(2, 3)
    path = write_checkpoint(tmp_path, replace(make(), policy={"w": base.T}), keep=1)
    assert torch.equal(read_checkpoint(path).policy["w"], base.T)
