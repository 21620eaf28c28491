"""Losslessness: faults planted on our paths and in the live engine, the certificate on a real model, sampler speed."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable
from functools import partial

from benchmarks.bars import Bar, main, run
from benchmarks.certify_runs import certify_bars, engine_fault_bars
from benchmarks.planted_faults import fault_bars
from benchmarks.sampler_speed import sampler_bars


def law_tests() -> Iterable[Bar]:
    """`tests/law`, all of it."""
    finished = run([sys.executable, "-m", "paceline.cli.process", sys.executable, "-m", "pytest", "-q", "tests/law"])
    summary = finished.output.strip().splitlines()[-1].strip("= ")
    yield Bar(
        "law_tests_s", round(finished.seconds), "< 180", finished.code == 0 and finished.seconds < 180, spread=summary
    )


MEASUREMENTS = {
    "laws": law_tests,
    "faults": fault_bars,
    "engine_faults": engine_fault_bars,
    "sampler": sampler_bars,
    **{
        f"certify_t{temperature}_top_p{top_p}": partial(certify_bars, temperature, top_p)
        for temperature, top_p in itertools.product((0.6, 1.0), (1.0, 0.9))
    },
}

if __name__ == "__main__":
    main(MEASUREMENTS)
