"""The draft's life: its starts, online training and its cost, what a frozen draft loses, how alpha is predicted."""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from benchmarks.bars import Bar, main, run, tests_pass

SEEDS = (0, 1, 2)
FEWER_ANSWERS = ("--draft.num_answers", "768")
"""The demo's draft learns from more, which would be most of the time of what trains many drafts."""
STARTS: Mapping[str, tuple[str, ...]] = {
    "demo": ("--run.num_steps", "10", "--data.num_eval", "64", *FEWER_ANSWERS),
    "smollm2-chain-sum": ("--run.num_steps", "6", "--draft.num_draft_tokens", "3"),
}
"""Recipe of each policy and what is shortened in it: three seeds, two starts, frozen and online."""
VARIANTS: Mapping[str, tuple[str, ...]] = {
    f"{data} / {online}": ("--draft.data", data, "--draft.online", online)
    # The runs of `off` train the heads that those of `always` find in the cache.
    for online in ("off", "always")
    for data in ("generic", "in_domain")
}
SIDE_BY_SIDE = 2
"""Runs at a time, one thread each. A speedup is a ratio within one run: both of its arms have the same neighbour."""
COSTS: Mapping[str, tuple[tuple[str, ...], float, float]] = {
    "demo": (("--run.num_steps", "4", "--algorithm.prompts_per_step", "48", "--draft.num_answers", "64"), 0.10, 0.04),
    "smollm2-gsm-symbolic": (
        (
            *("--algorithm.prompts_per_step", "6", "--algorithm.group_size", "8", "--sampling.max_tokens", "384"),
            *("--engine.max_num_seqs", "48", "--train.micro_batch_tokens", "4096"),
        ),
        0.08,
        0.02,
    ),
}
"""Recipe -> a step of at least 8,000 response tokens, and the shares that draft training and publishing may take."""
MIN_RESPONSE_TOKENS = 8_000
MOVING = ("--run.num_steps", "60", "--train.lr", "4e-4", *FEWER_ANSWERS)
"""The policy really moves: the demo's learning rate doubled, three times its steps."""


def starts(recipe: str) -> Iterable[Bar]:
    """The paper's table of initialisation and online adaptation (arXiv:2604.26779, table 3), at embedded scale."""
    runs = [(variant, seed) for variant in VARIANTS for seed in SEEDS]

    def measure(variant: str, seed: int) -> Any:
        words = (*STARTS[recipe], *VARIANTS[variant], "--draft.seed", str(seed), "--engine.threads", "1")
        return _figures("start", recipe, words, seed)

    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        figures = dict(zip(runs, pool.map(measure, *zip(*runs, strict=True)), strict=True))
    if None in figures.values():
        failed = [f"{variant}, seed {seed}" for (variant, seed), part in figures.items() if part is None]
        yield Bar(f"starts_{recipe}", None, "all runs end", False, {"failed": failed})
        return
    rows = {
        variant: {
            "alpha_last": [round(figures[variant, seed]["alpha_last"], 3) for seed in SEEDS],
            "alpha_first": [round(figures[variant, seed]["alpha_first"], 3) for seed in SEEDS],
            "rollout": [round(figures[variant, seed]["rollout"]["median"], 3) for seed in SEEDS],
            "alarms": [len(figures[variant, seed]["alarms"]) for seed in SEEDS],
        }
        for variant in VARIANTS
    }
    means = {variant: statistics.fmean(row["alpha_last"]) for variant, row in rows.items()}
    ordered = (
        means["in_domain / off"] > means["generic / off"]
        and means["in_domain / always"] > means["generic / always"]
        and means["generic / always"] > means["generic / off"]
    )
    value = {
        variant: {"alpha": round(means[variant], 3), "rollout": round(statistics.fmean(row["rollout"]), 3)}
        for variant, row in rows.items()
    }
    goal = "acceptance length: in-domain above generic, online above frozen for the generic start; k = 3"
    context = {"seeds": list(SEEDS), "runs_side_by_side": SIDE_BY_SIDE, "threads": 1}
    yield Bar(f"starts_{recipe}", value, goal, ordered, {**context, **rows})


def costs(recipe: str) -> Iterable[Bar]:
    """Draft training in every step and the publish of policy and draft with all checks, as shares of the step."""
    overrides, train_share, publish_share = COSTS[recipe]
    figures = _figures("costs", recipe, overrides, seed=0)
    if figures is None:
        yield Bar(f"cost_{recipe}", None, "runs", False)
        return
    # The first step pays for what is made once.
    steps, tokens, extra = figures["stage_s"][1:], figures["response_tokens"][1:], figures["draft_s"][1:]
    shares = [seconds / step["step"] for seconds, step in zip(extra, steps, strict=True)]
    context = {
        "response_tokens": tokens,
        "step_s": [round(step["step"], 2) for step in steps],
    }
    enough = min(tokens) >= MIN_RESPONSE_TOKENS
    yield Bar(
        f"online_training_share_{recipe}",
        round(statistics.median(shares), 4),
        f"<= {train_share} of a step of at least {MIN_RESPONSE_TOKENS:,} response tokens",
        enough and statistics.median(shares) <= train_share,
        {"milliseconds": [round(1000 * seconds) for seconds in extra], **context},
    )
    published = [step["prepare"] / step["step"] for step in steps]
    yield Bar(
        f"publish_share_{recipe}",
        round(statistics.median(published), 4),
        f"<= {publish_share} of a step of at least {MIN_RESPONSE_TOKENS:,} response tokens, all checks on",
        enough and statistics.median(published) <= publish_share,
        {"milliseconds": [round(1000 * step["prepare"]) for step in steps], **context},
    )


def curves() -> Iterable[Bar]:
    """A frozen and an online draft beside a policy that moves: acceptance length by step."""
    figures = _figures("curves", "demo", MOVING, seed=0)
    if figures is None:
        yield Bar("frozen_against_online", None, "60 steps in both arms", False)
        return
    ends = {
        name: {
            "first_10": round(statistics.fmean(part["alpha"][:10]), 3),
            "last_10": round(statistics.fmean(part["alpha"][-10:]), 3),
            "reward_first_5": round(statistics.fmean(part["reward"][:5]), 3),
            "reward_last_5": round(statistics.fmean(part["reward"][-5:]), 3),
            "certificate_z": part["certificate_z"],
            "alarms": part["alarms"],
        }
        for name, part in figures.items()
    }
    gained = ends["always"]["last_10"] - ends["off"]["last_10"]
    noise = math.hypot(*(statistics.stdev(part["alpha"][-10:]) / math.sqrt(10) for part in figures.values()))
    holds: bool | Literal["undecided"] = "undecided" if abs(gained) <= 2 * noise else gained > 0
    spread = {name: [round(alpha, 3) for alpha in part["alpha"]] for name, part in figures.items()}
    yield Bar(
        "frozen_against_online",
        ends,
        "the online draft ends above the frozen one, by two standard errors",
        holds,
        spread,
    )


def prediction(name: str, recipe: str, overrides: Sequence[str]) -> Iterable[Bar]:
    """`paceline draft eval`: predicted against engine-measured acceptance length on held-out prompts."""
    command = [sys.executable, "-m", "paceline.cli.main", "draft", "eval", f"recipes/{recipe}.toml", "--json"]
    finished = run([*command, *overrides])
    figures = _printed(finished.output) if finished.code == 0 else None
    value = None if figures is None else figures["ratio"]
    holds = value is not None and abs(value - 1) <= 0.05
    yield Bar(f"predicted_over_measured_{name}", value, "within 5 %", holds, figures)


def _printed(output: str) -> Any:
    """The object that `--json` wrote, from between what the command said on stderr."""
    start = f"\n{output}".rindex("\n{\n")
    return json.JSONDecoder().raw_decode(output, start)[0]


def _figures(what: str, recipe: str, overrides: Sequence[str], seed: int) -> Any:
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "figures.json"
        command = [sys.executable, "-m", "benchmarks.draft_runs", what, f"recipes/{recipe}.toml"]
        finished = run([*command, "--seed", str(seed), "--out", str(out), *overrides])
        return json.loads(out.read_text()) if finished.code == 0 else None


DRAFT_TESTS = "tests/parity/test_draft_vllm.py"

MEASUREMENTS = {
    "prediction_tiny": lambda: prediction("eagle3_tiny", "demo", FEWER_ANSWERS),
    "prediction_smollm2": lambda: prediction("eagle3_smollm2", "smollm2-chain-sum", ()),
    "prediction_mtp": lambda: prediction("mtp_tiny", "tiny-mtp", ()),
    "cost_tiny": lambda: costs("demo"),
    "cost_smollm2": lambda: costs("smollm2-gsm-symbolic"),
    "curves": curves,
    "starts_tiny": lambda: starts("demo"),
    "starts_smollm2": lambda: starts("smollm2-chain-sum"),
    "faults": lambda: tests_pass(
        "planted_draft_faults",
        "each raises its alarm, the certificate stays quiet",
        [
            f"{DRAFT_TESTS}::test_a_draft_that_went_wrong_in_the_engine_raises_the_alarm_and_changes_no_law",
            f"{DRAFT_TESTS}::test_a_right_draft_agrees_in_every_block_and_the_alarm_stays_silent",
        ],
    ),
}

if __name__ == "__main__":
    main(MEASUREMENTS)
