"""Rollout seconds of one policy: no speculation, fixed k, and the k chosen by live batch; all in turns.

Run by `benchmarks.never_slower` in a process of its own:

    python -m benchmarks.speed_runs recipes/demo.toml --sizes 1x4,2x2,4 --arms none,adaptive,k0,k3 --seconds 60 \
        --profile PROFILE --out FILE --draft.num_draft_tokens 7
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.bars import MAX_ATTEMPTS
from paceline.cli.process import ensure_engine_environment
from paceline.config.load import load_recipe
from paceline.config.run import Recipe
from paceline.drafts.profile import CalibrationProfile, read_profile
from paceline.errors import EngineError

LEARNING_CALLS = 2
"""Calls per size with which the chooser sees acceptances before anything is measured; a run has them in every step."""
MIN_PAIRS = 6
"""Measurements of every arm, however long they take: fewer have no useful interval."""
SPEED_SEED = 1234


def measure(
    recipe: Recipe,
    plain: Recipe,
    waves: Mapping[int, int],
    arms: Sequence[str],
    *,
    max_tokens: int | None,
    max_pairs: int,
    budget_s: float,
    calibrate_s: float,
    profile_path: Path,
) -> dict[str, Any]:
    """Per size (requests that start together): arm -> seconds per token and median seconds of a step with half of the
    batch or more, of each repeat, and what was generated.

    Arms: `none` and `none_again` (an engine without speculation, twice: the A/A), `k0` ... (the speculative engine at a
    fixed k) and `adaptive`. Each repeat takes all sizes and of each size all arms once, on the same prompts and seeds,
    in an order that rotates and turns round. A measurement is `waves[size]` calls of `size` requests, cut at
    `max_tokens` (None: as the recipe says). There are `MIN_PAIRS` repeats, and more while they fit `budget_s`.

    Step costs come from `profile_path`; where there is none they are measured and written there.
    """
    from paceline.drafts.length import LengthChooser
    from paceline.drafts.profile import StepCosts
    from paceline.loop.parts import build_parts
    from paceline.loop.seeds import request_seed
    from paceline.observe.progress import Silent
    from paceline.types import Request

    speculating, none = build_parts(recipe, Silent()), build_parts(plain, Silent())
    engine = speculating.engine
    chooser: LengthChooser | None = None
    if "adaptive" in arms:
        # As `loop.length.build_chooser` makes that of a run.
        costs = StepCosts.from_profile(_profile(recipe, speculating, profile_path, calibrate_s))
        chooser = LengthChooser(costs, num_draft_tokens=engine.num_draft_tokens)
    # An engine that took a publish is compared with one that did, too.
    speculating.publish()
    none.publish()
    prompts, sampling = speculating.held_out, speculating.sampling
    if max_tokens is not None:
        sampling = replace(sampling, max_tokens=max_tokens)

    def requests(size: int, repeat: int, wave: int) -> list[Request]:
        chosen = [prompts[(wave * size + place) % len(prompts)] for place in range(size)]
        return [
            Request(p, place, request_seed(SPEED_SEED + wave, -2, p.id, place, repeat))
            for place, p in enumerate(chosen)
        ]

    def generate(arm: str, size: int, repeat: int) -> dict[str, Any]:
        seconds, lengths, asked = 0.0, [], Counter[int]()
        steps: list[float] = []
        adapts = chooser if arm == "adaptive" else None
        for wave in range(waves[size]):
            batch = requests(size, repeat, wave)
            if arm.startswith("none"):
                rollouts = none.engine.generate(batch, sampling)
            else:
                engine.choose_drafts(adapts.choose if adapts else None)
                engine.limit_drafts(engine.num_draft_tokens if adapts else int(arm[1:]))
                rollouts = engine.generate(batch, sampling)
            blocks = [block for completion in rollouts.completions for block in completion.blocks]
            if adapts:
                adapts.observe(blocks)
            seconds += rollouts.seconds
            lengths += [len(completion.token_ids) for completion in rollouts.completions]
            asked.update(block.num_asked for block in blocks)
            # Prompts, and what the draft reads of them, are in the first two.
            steps += [step.seconds for step in rollouts.steps[2:] if 2 * step.live >= size]
        step_s = statistics.median(steps) if steps else None
        return {"per_token": seconds / sum(lengths), "step_s": step_s, "lengths": lengths, "asked": asked}

    for size in waves:
        generate("none", size, -1)
        for call in range(LEARNING_CALLS if chooser else 0):
            generate("adaptive", size, -1 - call)
    figures: dict[int, dict[str, list[dict[str, Any]]]] = {size: {arm: [] for arm in arms} for size in waves}
    began, repeat = time.perf_counter(), 0
    while repeat < max_pairs and (repeat < MIN_PAIRS or _fits_another(time.perf_counter() - began, repeat, budget_s)):
        for size in waves:
            for arm in _order(arms, repeat):
                figures[size][arm].append(generate(arm, size, repeat))
        repeat += 1
        print(f"repeat {repeat}, {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    results = {
        "sizes": {str(size): _summary(by_arm) for size, by_arm in figures.items()},
        "choices": [str(choice) for choice in chooser.explain()] if chooser else [],
        "measured_s": time.perf_counter() - began,
    }
    speculating.close()
    none.close()
    return results


def ten_to_ninety(lengths: Sequence[int]) -> list[int]:
    """The lengths that a tenth of all is below, and above."""
    ordered = sorted(lengths)
    return [ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]]


def _profile(recipe: Recipe, parts: Any, path: Path, calibrate_s: float) -> CalibrationProfile:
    """Whoever names a file says that it was measured with this recipe on this machine."""
    from paceline.loop.calibrate import calibrate

    if path.exists():
        return read_profile(path)
    attempts_left = MAX_ATTEMPTS
    while True:
        try:
            profile = calibrate(recipe, parts, budget_s=calibrate_s)
            break
        except EngineError:
            attempts_left -= 1
            if not attempts_left:
                raise
    profile.write(path)
    return profile


def _fits_another(spent_s: float, repeats: int, budget_s: float) -> bool:
    return spent_s * (repeats + 1) / repeats <= budget_s


def _order(arms: Sequence[str], repeat: int) -> list[str]:
    """Every arm is first once; neighbours stay neighbours, and who of them is first swaps."""
    turn = repeat % len(arms)
    order = [*arms[turn:], *arms[:turn]]
    return order if repeat % 2 == 0 else order[::-1]


def _summary(by_arm: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    per_token = {arm: [part["per_token"] for part in parts] for arm, parts in by_arm.items()}
    said = {arm: f"{1e3 * statistics.median(seconds):.2f} ms" for arm, seconds in per_token.items()}
    print(said, file=sys.stderr, flush=True)
    asked = sum((part["asked"] for part in by_arm.get("adaptive", ())), Counter[int]())
    return {
        "per_token": per_token,
        "step_s": {arm: [part["step_s"] for part in parts] for arm, parts in by_arm.items()},
        "length_10_90": ten_to_ninety([length for part in by_arm["none"] for length in part["lengths"]]),
        # Share of the blocks that each k was asked for, probing included.
        "adaptive_k": {k: round(asked[k] / asked.total(), 3) for k in sorted(asked)},
    }


def main() -> None:
    """The command line; figures go to --out as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe")
    parser.add_argument("--sizes", type=_waves, required=True, help="requests that start together x calls of them")
    parser.add_argument("--arms", type=lambda text: text.split(","), required=True, help="none, adaptive and others")
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--max-pairs", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--calibrate-s", type=float, default=90.0)
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments, overrides = parser.parse_known_args()
    recipe = load_recipe(arguments.recipe, overrides)
    ensure_engine_environment(recipe.engine)
    shared = [word for pair in _pairs(overrides) if not pair[0].startswith("--draft.") for word in pair]
    plain = load_recipe(arguments.recipe, [*shared, "--draft.method", "none"])
    figures = measure(
        recipe,
        plain,
        arguments.sizes,
        arguments.arms,
        max_tokens=arguments.max_tokens,
        max_pairs=arguments.max_pairs,
        budget_s=arguments.seconds,
        calibrate_s=arguments.calibrate_s,
        profile_path=arguments.profile,
    )
    arguments.out.write_text(json.dumps(figures))


def _waves(text: str) -> dict[int, int]:
    """`1x4,16` -> {1: 4, 16: 1}"""
    parts = [word.partition("x") for word in text.split(",")]
    return {int(size): int(waves or 1) for size, _, waves in parts}


def _pairs(words: Sequence[str]) -> list[tuple[str, str]]:
    return list(zip(words[::2], words[1::2], strict=True))


if __name__ == "__main__":
    main()
