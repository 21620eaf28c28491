"""`paceline certify` on SmolLM2: right engines pass at every setting, and faults planted in the live engine do not.

`python -m benchmarks.certify_runs ARM HEAD FILE` plants the faults in one engine and writes what was found; it is what
`engine_fault_bars` runs, once per arm, in the environment that vLLM needs.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.bars import Bar, run

RECIPE = "recipes/smollm2-chain-sum.toml"
"""Short answers, for the planted faults: a verdict after every few hundred tokens."""
LONG_RECIPE = "recipes/smollm2-gsm-symbolic.toml"
"""Long answers, for the right engines: most of a short one's cost is its prompt."""
ARMS = ("none", "ngram", "eagle3")
NUM_TOKENS = 20_000
FAULT_TOKENS = 5_000
WIDE = (
    *("--engine.threads", "1"),
    *("--engine.max_num_seqs", "64", "--sampling.max_tokens", "192", "--train.micro_batch_tokens", "8192"),
    *("--algorithm.prompts_per_step", "4", "--algorithm.group_size", "16"),
)
"""64 sequences at a time: most of a step's cost on a CPU does not depend on the batch. Large groups share prompts.

One thread: not a timing, and two settings can be measured side by side."""
NARROW = ("--engine.max_num_seqs", "32", "--algorithm.prompts_per_step", "8", "--sampling.temperature", "1.0")


def certify_bars(temperature: float, top_p: float) -> Iterable[Bar]:
    """The bar of one sampling setting; it holds when all arms pass (exit code 0)."""
    # One head for all settings: trained at the recipe's temperature. What it proposes changes no law.
    head = trained_head(LONG_RECIPE)
    with tempfile.TemporaryDirectory() as scratch:
        figures = Path(scratch) / "certify.json"
        finished = run(
            [
                *(sys.executable, "-m", "paceline.cli.main", "certify", LONG_RECIPE),
                *("--arms", ",".join(ARMS), "--tokens", str(NUM_TOKENS), "--json", str(figures)),
                *("--sampling.temperature", str(temperature), "--sampling.top_p", str(top_p)),
                *("--draft.path", str(head), *WIDE),
            ]
        )
        arms = json.loads(figures.read_text())["arms"] if figures.exists() else {}
    value = {
        arm: {
            "verdict": part["verdict"],
            **{
                name: part["certificate"][name]
                for name in ("tokens", "outside_kept", "z", "excess_nats", "ks_p", "log_m")
            },
            "acceptance_length": part["acceptance_length"],
        }
        for arm, part in arms.items()
    }
    spread = {
        arm: {
            **{name: part["certificate"][name] for name in ("excess_half_width", "smallest_visible_nats")},
            "findings": part["findings"],
            "seconds": round(part["seconds"], 1),
        }
        for arm, part in arms.items()
    }
    goal = f"none, ngram and eagle3 pass over {NUM_TOKENS:,} tokens each"
    yield Bar(f"certify_t{temperature}_top_p{top_p}", value, goal, finished.code == 0, spread)


def engine_fault_bars() -> Iterable[Bar]:
    """Plant every fault in the live engine of both arms; see `judge_faults`."""
    head = trained_head(RECIPE)
    found: dict[str, list[dict[str, Any]]] = {}
    for arm in ("eagle3", "ngram"):
        with tempfile.TemporaryDirectory() as scratch:
            figures = Path(scratch) / "faults.json"
            python = (sys.executable, "-m", "paceline.cli.process", sys.executable)
            run([*python, "-m", "benchmarks.certify_runs", arm, str(head), str(figures)])
            found[arm] = json.loads(figures.read_text()) if figures.exists() else []
    yield from judge_faults(found)


def judge_faults(found: Mapping[str, Sequence[dict[str, Any]]]) -> Iterable[Bar]:
    """One bar per planted fault, one per right engine, and one per fault that the engine cannot have.

    `found` holds the records of `plant_all` by arm. A fault has to show in the arm that exercises it: a draft that is
    rarely accepted to its end hardly draws bonus tokens, and look-ups are seldom recovered from.
    """
    from paceline.testing.engine_faults import FAULTS, IMPOSSIBLE

    for arm, records in found.items():
        right = next((record for record in records if record["fault"] is None), None)
        verdict = None if right is None else right["verdict"]
        yield Bar(f"no engine fault, {arm}", verdict, f"passes {FAULT_TOKENS:,} tokens", verdict == "pass", right)
    for name in FAULTS:
        by_arm = {arm: record for arm, records in found.items() for record in records if record["fault"] == name}
        caught = {
            arm: record["tokens"]
            for arm, record in by_arm.items()
            if record["verdict"] == "fail" and record["named"] and record["tokens"] < FAULT_TOKENS
        }
        goal = f"in one arm or more certify fails within {FAULT_TOKENS:,} tokens and names the place and no right one"
        yield Bar(f"engine fault: {name}", caught, goal, bool(caught), by_arm)
    for name, reason in IMPOSSIBLE.items():
        yield Bar(f"engine fault: {name}", "cannot exist with deterministic drafts", reason, True)


def trained_head(recipe_path: str) -> Path:
    """The recipe's EAGLE-3 head, from the cache when it is there."""
    from paceline.config.load import load_recipe
    from paceline.data.prompts import load_prompts, prompt_style
    from paceline.loop.draft_start import prepare_draft
    from paceline.loop.parts import make_sampling
    from paceline.models.cache import cache_root
    from paceline.models.folder import load_policy, load_tokenizer, resolve_policy
    from paceline.observe.progress import Silent

    recipe, cache = load_recipe(recipe_path, []), cache_root()
    policy_folder = resolve_policy(recipe.policy, cache)
    tokenizer = load_tokenizer(policy_folder.path)
    prompts = load_prompts(recipe.data, tokenizer, prompt_style(recipe.policy, tokenizer)).train
    sampling = make_sampling(recipe.sampling, load_policy(policy_folder.path), tokenizer)
    folder = prepare_draft(recipe, policy_folder, prompts, sampling, cache, Silent())
    assert folder is not None
    return folder


def plant_all(arm: str, head: Path) -> Iterable[dict[str, Any]]:
    """What `certify` says about one live engine: with every fault in turn, then right again.

    A fault is measured until it is named, or to the end of its tokens; tokens come in calls of some hundreds.
    """
    from paceline.config.load import load_arms
    from paceline.loop.certify import ArmCertificate, measure
    from paceline.loop.parts import build_parts
    from paceline.observe.progress import Silent
    from paceline.testing.engine_faults import FAULTS

    recipe = load_arms(RECIPE, [*NARROW, "--draft.path", str(head)], ["eagle3", "ngram"])[arm]
    parts = build_parts(recipe, Silent())

    def record(fault: str | None, judged: ArmCertificate, named: bool) -> dict[str, Any]:
        return {
            "fault": fault,
            "verdict": judged.verdict,
            "named": named,
            "tokens": judged.tokens,
            "z": judged.certificate.z,
            "log_m": judged.certificate.log_m,
            "acceptance_length": judged.acceptance_length,
            "findings": list(judged.findings),
            "seconds": round(judged.seconds, 1),
        }

    try:
        for name, fault in FAULTS.items():
            with fault.planted(parts) as faulty:
                for measured in measure(recipe, faulty):
                    judged = measured.judge()
                    named = fault.is_named_by(judged.findings, judged.num_draft_tokens)
                    if named or judged.tokens >= FAULT_TOKENS:
                        yield record(name, judged, named)
                        break
        right = next(measured for measured in measure(recipe, parts) if measured.tokens >= FAULT_TOKENS)
        yield record(None, right.judge(), False)
    finally:
        parts.close()


if __name__ == "__main__":
    records = []
    for found in plant_all(sys.argv[1], Path(sys.argv[2])):
        records.append(found)
        print(json.dumps(found), file=sys.stderr, flush=True)
    Path(sys.argv[3]).write_text(json.dumps(records))
