"""Rollout seconds of one policy: no speculation, every fixed k, and the k chosen by live batch; all in turns.

Run by `benchmarks.never_slower` in a process of its own:

    python -m benchmarks.speed_runs recipes/demo.toml --sizes 1,2,4 --repeats 8 --out FILE --draft.num_draft_tokens 7
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.cli.process import ensure_engine_environment
from paceline.config.load import load_recipe
from paceline.config.run import Recipe

KS = (0, 1, 2, 3, 5, 7)
LEARNING_CALLS = 2
"""Calls per size with which the chooser sees acceptances before anything is measured."""
SPEED_SEED = 1234


def measure(
    recipe: Recipe, plain: Recipe, sizes: Sequence[int], waves: int, repeats: int, calibrate_s: float
) -> dict[str, Any]:
    """Per size (requests that start together): arm -> seconds per token of each repeat, and what was generated.

    Arms: `none` and `none_again` (an engine without speculation, twice: the A/A), `k0` ... (the speculative engine at a
    fixed k) and `adaptive`. Each repeat takes all arms once, in an order that rotates, on the same prompts and seeds;
    a measurement is `waves` calls of `size` requests.
    """
    from paceline.drafts.length import LengthChooser
    from paceline.drafts.profile import StepCosts
    from paceline.loop.calibrate import calibrate
    from paceline.loop.parts import build_parts
    from paceline.loop.seeds import request_seed
    from paceline.observe.progress import Silent
    from paceline.types import Request

    speculating, none = build_parts(recipe, Silent()), build_parts(plain, Silent())
    engine = speculating.engine
    profile = calibrate(recipe, speculating, budget_s=calibrate_s)
    # As `calibrate` did with the other one: an engine that took a publish is compared with one that did, too.
    none.publish()
    chooser = LengthChooser(StepCosts.from_profile(profile), num_draft_tokens=engine.num_draft_tokens)
    prompts, sampling = speculating.held_out, speculating.sampling

    def requests(size: int, repeat: int, wave: int) -> list[Request]:
        chosen = [prompts[(wave * size + place) % len(prompts)] for place in range(size)]
        return [
            Request(p, place, request_seed(SPEED_SEED + wave, -2, p.id, place, repeat))
            for place, p in enumerate(chosen)
        ]

    def generate(arm: str, size: int, repeat: int) -> dict[str, Any]:
        seconds, lengths, ks = 0.0, [], []
        for wave in range(waves):
            batch = requests(size, repeat, wave)
            if arm.startswith("none"):
                rollouts = none.engine.generate(batch, sampling)
            else:
                engine.choose_drafts(chooser.choose if arm == "adaptive" else None)
                engine.limit_drafts(engine.num_draft_tokens if arm == "adaptive" else int(arm[1:]))
                rollouts = engine.generate(batch, sampling)
            blocks = [block for completion in rollouts.completions for block in completion.blocks]
            if arm == "adaptive":
                chooser.observe(blocks)
            seconds += rollouts.seconds
            lengths += [len(completion.token_ids) for completion in rollouts.completions]
            ks += [len(block.draft_token_ids) for block in blocks]
        return {"per_token": seconds / sum(lengths), "lengths": lengths, "mean_k": statistics.fmean(ks)}

    arms = ["none", *(f"k{k}" for k in KS if k <= engine.num_draft_tokens), "adaptive", "none_again"]
    results: dict[str, Any] = {"sizes": {}, "calibration": json.loads(profile.model_dump_json())}
    for size in sizes:
        for call in range(LEARNING_CALLS):
            for arm in ("none", "adaptive"):
                generate(arm, size, -1 - call)
        figures: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
        for repeat in range(repeats):
            turn = repeat % len(arms)
            for arm in [*arms[turn:], *arms[:turn]]:
                figures[arm].append(generate(arm, size, repeat))
        lengths = sorted(length for part in figures["none"] for length in part["lengths"])
        results["sizes"][str(size)] = {
            "per_token": {arm: [part["per_token"] for part in parts] for arm, parts in figures.items()},
            "mean_k": {arm: statistics.fmean(part["mean_k"] for part in parts) for arm, parts in figures.items()},
            "length_10_90": [lengths[len(lengths) // 10], lengths[-1 - len(lengths) // 10]],
        }
        medians = {arm: statistics.median(parts) for arm, parts in results["sizes"][str(size)]["per_token"].items()}
        print(size, {arm: f"{1e3 * seconds:.2f} ms" for arm, seconds in medians.items()}, file=sys.stderr, flush=True)
    results["choices"] = [str(choice) for choice in chooser.explain()]
    speculating.close()
    none.close()
    return results


def main() -> None:
    """The command line; figures go to --out as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe")
    parser.add_argument("--sizes", type=lambda text: [int(word) for word in text.split(",")], required=True)
    parser.add_argument("--waves", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--calibrate-s", type=float, default=90.0)
    parser.add_argument("--out", type=Path, required=True)
    arguments, overrides = parser.parse_known_args()
    recipe = load_recipe(arguments.recipe, overrides)
    ensure_engine_environment(recipe.engine)
    shared = [word for pair in _pairs(overrides) if not pair[0].startswith("--draft.") for word in pair]
    plain = load_recipe(arguments.recipe, [*shared, "--draft.method", "none"])
    figures = measure(recipe, plain, arguments.sizes, arguments.waves, arguments.repeats, arguments.calibrate_s)
    arguments.out.write_text(json.dumps(figures))


def _pairs(words: Sequence[str]) -> list[tuple[str, str]]:
    return list(zip(words[::2], words[1::2], strict=True))


if __name__ == "__main__":
    main()
