"""The form of a bar, and the command line that every topic has.

A topic is a table of measurements. Each yields one or more `Bar`s and is run alone with `--only NAME`. What is printed
is what was seen, whether the goal holds or not; a bar that could not be measured holds "undecided".
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.observe.provenance import machine

ROOT = Path(__file__).resolve().parent.parent
MAX_ATTEMPTS = 4
"""Calibrations before one is given up: each refuses a machine that is busy at the moment."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One measured figure beside its goal. Example: `Bar("acceptance_length", 2.9, ">= 2.2", True)`."""

    name: str
    value: object
    goal: str
    holds: bool | Literal["undecided"]
    spread: object = None
    """Interval, range or other context of the value; None for a count."""


Measurement = Callable[[], Iterable[Bar]]


@dataclass(frozen=True, slots=True)
class Finished:
    """A child process that ended."""

    code: int
    seconds: float
    peak_gib: float
    """Largest resident set of one process among all children so far."""
    output: str


def run(command: list[str], *, folder: Path = ROOT, environment: Mapping[str, str] | None = None) -> Finished:
    """Run a command to its end; stdout and stderr together are kept and passed on to our stderr."""
    began = time.perf_counter()
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        sys.stderr.write(line)
    code = process.wait()
    peak_gib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    return Finished(code, time.perf_counter() - began, peak_gib, "".join(lines))


def tests_pass(name: str, goal: str, nodes: list[str]) -> Iterable[Bar]:
    """A bar that is a law: it holds when the tests that state it pass. Needs pytest."""
    finished = run([sys.executable, "-m", "paceline.cli.process", sys.executable, "-m", "pytest", "-q", *nodes])
    summary = finished.output.strip().splitlines()[-1].strip("= ")
    yield Bar(name, summary, goal, finished.code == 0)


def main(measurements: Mapping[str, Measurement]) -> None:
    """Run all measurements, or those of `--only`, and print a JSON line per bar."""
    parser = argparse.ArgumentParser(description="Prints one JSON object per bar; run it on a quiet machine.")
    parser.add_argument("--only", action="append", choices=sorted(measurements), help="run this measurement alone")
    chosen = parser.parse_args().only or list(measurements)
    for name in chosen:
        began = time.perf_counter()
        for bar in measurements[name]():
            record = {
                "bar": bar.name,
                "value": bar.value,
                "goal": bar.goal,
                "holds": bar.holds,
                "spread": bar.spread,
                "seconds": round(time.perf_counter() - began, 1),
                "machine": machine(),
            }
            print(json.dumps(record), flush=True)
