"""What must be set before a process starts: the preloaded OpenMP library, thread counts, vLLM's switches.

The command line re-executes itself once with this environment. `python -m paceline.cli.process COMMAND ...` runs any
other command in it (the tests use it).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import assert_never

from paceline.config.run import Engine, ReferenceEngine, VllmEngine

MARKER = "PACELINE_ENGINE_ENVIRONMENT"
"""Tells a process which engine's environment it was started in, so that it is started again at most once."""


def openmp_library(prefix: Path | None = None) -> Path | None:
    """`libiomp5.so` of the `intel-openmp` package under `prefix` (default: this Python's); None when not installed."""
    library = (prefix or Path(sys.prefix)) / "lib" / "libiomp5.so"
    return library if library.exists() else None


def engine_environment(engine: Engine) -> dict[str, str]:
    """Variables that `engine` needs to find when the process starts; empty when it needs none."""
    match engine:
        case ReferenceEngine():
            return {}
        case VllmEngine(threads=threads):
            environment = {
                "OMP_NUM_THREADS": str(threads),
                # Idle OpenMP threads sleep after 1 ms instead of spinning: engines and trainer share the cores.
                "KMP_BLOCKTIME": "1",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                # Threads pinned to cores stall tenfold when anything else runs on them.
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                # What matters of its warnings is checked by the engine itself.
                "VLLM_LOGGING_LEVEL": "ERROR",
                "VLLM_NO_USAGE_STATS": "1",
                "TORCH_CPP_LOG_LEVEL": "ERROR",
                "KMP_WARNINGS": "0",
            }
            library = openmp_library()
            if library is not None:
                # The documentation of vLLM asks for it on CPU; two OpenMP runtimes in one process would fight.
                environment["LD_PRELOAD"] = str(library)
            return environment
        case _:
            assert_never(engine)


def with_engine(engine: Engine, current: Mapping[str, str]) -> dict[str, str]:
    """`current` with the engine's variables on top (the recipe states them) and libraries that were preloaded kept."""
    ours = engine_environment(engine)
    libraries = [
        library for text in (ours.get("LD_PRELOAD", ""), current.get("LD_PRELOAD", "")) for library in text.split(":")
    ]
    environment = {**current, **ours, MARKER: _stamp(ours)}
    if any(libraries):
        environment["LD_PRELOAD"] = ":".join(dict.fromkeys(library for library in libraries if library))
    return environment


def ensure_engine_environment(engine: Engine) -> None:
    """Start this process anew in the engine's environment, unless it is there already. Returns only if it is."""
    ours = engine_environment(engine)
    if not ours or os.environ.get(MARKER) == _stamp(ours):
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], with_engine(engine, os.environ))


def run_command(words: list[str]) -> None:
    """Replace this process by `words`, in the environment of the default vLLM engine."""
    os.execvpe(words[0], words, with_engine(VllmEngine(), os.environ))


def _stamp(environment: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(environment.items()))


if __name__ == "__main__":
    run_command(sys.argv[1:])
