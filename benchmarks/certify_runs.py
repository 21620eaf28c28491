"""`paceline certify` on SmolLM2: every arm, two temperatures, with and without top-p."""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from benchmarks.bars import Bar, run

RECIPE = "recipes/smollm2-chain-sum.toml"
ARMS = ("none", "ngram", "eagle3")
NUM_TOKENS = 20_000


def certify_bars() -> Iterable[Bar]:
    """One bar per sampling setting; it holds when all arms pass (exit code 0)."""
    for temperature, top_p in itertools.product((0.6, 1.0), (1.0, 0.9)):
        with tempfile.TemporaryDirectory() as scratch:
            figures = Path(scratch) / "certify.json"
            finished = run(
                [
                    *(sys.executable, "-m", "paceline.cli.main", "certify", RECIPE),
                    *("--arms", ",".join(ARMS), "--tokens", str(NUM_TOKENS), "--json", str(figures)),
                    *("--sampling.temperature", str(temperature), "--sampling.top_p", str(top_p)),
                ]
            )
            arms = json.loads(figures.read_text())["arms"] if figures.exists() else {}
        value = {
            arm: {
                "verdict": part["verdict"],
                **{name: part["certificate"][name] for name in ("tokens", "z", "excess_nats", "ks_p", "log_m")},
                "acceptance_length": part["acceptance_length"],
            }
            for arm, part in arms.items()
        }
        spread = {
            arm: {
                **{name: part["certificate"][name] for name in ("excess_half_width", "smallest_visible_nats")},
                "findings": part["findings"],
            }
            for arm, part in arms.items()
        }
        name = f"certify_t{temperature}_top_p{top_p}"
        goal = f"none, ngram and eagle3 pass over {NUM_TOKENS:,} tokens each"
        yield Bar(name, value, goal, finished.code == 0, spread)
