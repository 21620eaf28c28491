"""The main job: the demo from a fresh clone, and the laws it rests on."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.bars import ROOT, Bar, main, run, tests_pass


def demo() -> Iterable[Bar]:
    """`make env` and `make demo` in a fresh clone with an empty cache; the bars of its summary.json."""
    with tempfile.TemporaryDirectory() as scratch:
        clone = Path(scratch) / "paceline"
        run(["git", "clone", "-q", str(ROOT), str(clone)], folder=Path(scratch))
        environment = {"PACELINE_CACHE": str(Path(scratch) / "cache")}
        installed = run(["make", "env"], folder=clone, environment=environment)
        ran = run(["make", "demo"], folder=clone, environment=environment)
        yield Bar("demo_exit_code", ran.code, "0", ran.code == 0)
        total_s, demo_s = installed.seconds + ran.seconds, ran.seconds
        yield Bar("demo_with_environment_s", round(total_s), "<= 960", total_s <= 960)
        yield Bar("demo_s", round(demo_s), "<= 720", demo_s <= 720)
        yield Bar("demo_peak_gib", round(ran.peak_gib, 2), "< 7.45 (8 GB)", ran.peak_gib < 7.45)
        if ran.code == 0:
            folder = clone / "runs" / "demo"
            yield from demo_bars(json.loads((folder / "summary.json").read_text()))


def demo_bars(summary: dict[str, Any]) -> Iterable[Bar]:
    """What summary.json says of the demo."""
    speedup, arms = summary["speedup"]["eagle3"], summary["arms"]
    rollout = speedup["rollout"]
    holds = rollout["median"] >= 1.4 and rollout["low"] > 1.15
    yield Bar("rollout_speedup_16", round(rollout["median"], 3), ">= 1.4, lower end > 1.15", holds, interval(rollout))
    wide = speedup["rollout_64"]
    yield Bar("rollout_speedup_64", round(wide["median"], 3), "whatever is true", True, interval(wide))
    step = speedup["step"]
    yield Bar("step_speedup", round(step["median"], 3), "reported", True, interval(step))
    alpha = arms["eagle3"]["acceptance_length"]
    yield Bar("acceptance_length", round(alpha, 3), ">= 2.2", alpha >= 2.2)
    for name, arm in arms.items():
        share, certificate, reward = arm["stages_over_step"], arm["certificate"], arm["reward"]
        yield Bar(f"stages_over_step_{name}", round(share, 4), "0.99 to 1.01", abs(share - 1) <= 0.01)
        quiet = abs(certificate["z"]) < 4 and arm["alarms"] == 0 and certificate["tokens"] >= 5000
        yield Bar(
            f"certificate_{name}",
            {"z": round(certificate["z"], 2), "tokens": certificate["tokens"], "alarms": arm["alarms"]},
            "|z| < 4, no alarm, >= 5000 tokens",
            quiet,
            {"excess_nats": certificate["excess_nats"], "half_width": certificate["excess_half_width"]},
        )
        gain = reward["after"] - reward["before"]
        yield Bar(
            f"reward_gain_{name}",
            round(gain, 3),
            ">= 0.15",
            gain >= 0.15,
            {"before": reward["before"], "after": reward["after"], "n": reward["n"]},
        )
    agreement = summary["reward_agreement"]["eagle3"]
    yield Bar(
        "arms_end_alike",
        round(agreement["difference"], 3),
        "within two standard errors",
        agreement["within_noise"],
        {"standard_error": agreement["standard_error"]},
    )


def interval(ratio: dict[str, Any]) -> dict[str, Any]:
    """The 95 % interval of a speedup and the pairs behind it."""
    return {"low": ratio["low"], "high": ratio["high"], "pairs": ratio["pairs"], "in_flight": ratio["in_flight"]}


def smollm2() -> Iterable[Bar]:
    """Three steps of both arms of each SmolLM2 recipe, on the code of the demo."""
    for recipe in ("smollm2-chain-sum", "smollm2-gsm-symbolic"):
        with tempfile.TemporaryDirectory() as scratch:
            finished = run(
                [
                    *(sys.executable, "-m", "paceline.cli.main", "compare", f"recipes/{recipe}.toml"),
                    *("--arms", "none,eagle3", "--run.root", scratch, "--run.name", recipe),
                ]
            )
            steps, spread = {}, None
            if finished.code == 0:
                summary = json.loads((Path(scratch) / recipe / "summary.json").read_text())
                steps = {arm: figures["steps"] for arm, figures in summary["arms"].items()}
                spread = {
                    "acceptance_length": summary["arms"]["eagle3"]["acceptance_length"],
                    "rollout": summary["speedup"]["eagle3"]["rollout"],
                    "z": {arm: figures["certificate"]["z"] for arm, figures in summary["arms"].items()},
                }
            yield Bar(recipe, steps, "3 steps in both arms", steps == {"none": 3, "eagle3": 3}, spread)


def test_suite() -> Iterable[Bar]:
    """`make test`, the environment being there."""
    finished = run(["make", "test"])
    yield Bar("make_test_s", round(finished.seconds), "<= 900", finished.code == 0 and finished.seconds <= 900)


ENGINE_TESTS = "tests/parity/test_vllm_engine.py"

MEASUREMENTS = {
    "demo": demo,
    "planted_fault": lambda: tests_pass(
        "planted_fault_raises_the_alarm",
        "the alarm fires",
        [f"{ENGINE_TESTS}::test_a_temperature_of_another_row_raises_the_alarm"],
    ),
    "engine_fault": lambda: tests_pass(
        "expand_batch_to_tokens",
        "wrong as shipped, right after apply",
        [f"{ENGINE_TESTS}::test_expand_batch_to_tokens_is_wrong_as_shipped_and_right_after_apply"],
    ),
    "parity": lambda: tests_pass(
        "reference_equals_vllm",
        "equal tokens on 50 prompts at T = 0, log-probs within 1e-3, fp32",
        [
            f"{ENGINE_TESTS}::test_greedy_tokens_and_logprobs_equal_the_reference_engine",
            f"{ENGINE_TESTS}::test_engine_logprobs_are_those_of_the_policy_under_the_sampling_settings",
        ],
    ),
    "resume": lambda: tests_pass(
        "resume_after_kill", "bit-equal to a run that was never stopped", ["tests/loop/test_resume.py"]
    ),
    "bad_input": lambda: tests_pass(
        "bad_input",
        "one paragraph that names key and remedy, exit code 2, nothing half-written",
        ["tests/unit/test_cli.py", "-k", "refused or full_disk or one_paragraph"],
    ),
    "smollm2": smollm2,
    "test_suite": test_suite,
}

if __name__ == "__main__":
    main(MEASUREMENTS)
