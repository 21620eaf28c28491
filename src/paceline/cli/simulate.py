"""`paceline simulate`: projections of rollouts and steps, without an engine and without torch.

The options stand here, so that help needs nothing; what computes is imported when a command has been chosen.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.sim.scenario import Draft, Mode, Scenario
    from paceline.sim.step import Stages
    from paceline.sim.validate import Run

VERBS = {
    "rollout": "Seconds of a rollout without and with speculation, and what they depend on.",
    "step": "The five stages of a synchronous step.",
    "async": "The step of a run whose generation goes on beside training, some policy versions behind.",
    "sweep": "A grid: speedups over k, alpha, GPUs, lag and other inputs.",
    "recommend": "Draft method and k by live batch, break-even acceptance, k of a rollout, generation : training GPUs.",
    "validate": "Replay a run through a measured profile: predicted against measured rollout seconds.",
    "compare": "Several drafts on the same requests.",
}

RUN_FOLDER = "run folder whose lengths, acceptances and stages are taken"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The commands of `paceline simulate` and their options."""
    verbs = parser.add_subparsers(dest="simulate_verb", required=True, metavar="COMMAND")
    for name, text in VERBS.items():
        verb = verbs.add_parser(name, help=text, description=text, allow_abbrev=False)
        verb.add_argument("--json", action="store_true", help="print JSON instead of tables")
        verb.add_argument("--plots", default=None, metavar="FOLDER", help="write figures (PNG) there; needs matplotlib")
        if name == "validate":
            verb.add_argument("run", metavar="RUN", help="run folder of paceline train")
            verb.add_argument("--profile", required=True, metavar="FILE", help="what paceline calibrate wrote")
            continue
        _scenario_arguments(verb)
        if name != "rollout":
            _stage_arguments(verb)
        if name in ("async", "recommend"):
            _async_arguments(verb)
        if name == "sweep":
            # The lag is an axis of the grid here.
            _updates_argument(verb)
            verb.add_argument(
                "--over",
                action="append",
                metavar="NAME=V,V",
                help="an axis of the grid, repeatable: k, alpha, gpus, rollouts, mean_length, sigma, max_num_seqs, "
                "lag, model, hardware, layout (default: k=1,3,5,7 and alpha=1.5,2,3,4,5,6)",
            )
        if name in ("recommend", "compare"):
            verb.add_argument(
                "--drafts",
                default=None,
                metavar="LIST",
                help="drafts to choose from, METHOD@K:ALPHA by comma (default: --draft)",
            )
        if name == "rollout":
            verb.add_argument("--sensitivity", action="store_true", help="vary every input by 20 percent")
        if name != "sweep" and name != "recommend":
            verb.add_argument("--price", type=float, default=None, metavar="USD", help="dollars per GPU-hour")


def _scenario_arguments(verb: argparse.ArgumentParser) -> None:
    add = verb.add_argument_group("what is projected").add_argument
    add("--model", default=None, help="qwen3-8b, qwen3-235b-a22b, ... or a folder with config.json (default: qwen3-8b)")
    add("--hardware", default=None, help="gb200, b200, h200, h100 or a100 (default: gb200)")
    add("--gpus", type=int, default=32, help="GPUs that generate (default: %(default)s)")
    add(
        "--layout",
        default=None,
        help="of one engine: TP1, TP4, EP8, EP32xTP4, or fastest (default: the smallest that fits)",
    )
    add("--precision", choices=("bf16", "fp8"), default="bf16", help="of weights and KV cache (default: %(default)s)")
    add("--draft", default=None, metavar="METHOD@K:ALPHA", help="draft and acceptance length (default: eagle3@3:3.0)")
    add("--spread", type=float, default=0.0, help="standard deviation of the acceptance's logit between responses")
    add("--rollouts", type=int, default=1024, help="responses per step (default: %(default)s)")
    add("--group-size", type=int, default=1, help="responses per prompt (default: %(default)s)")
    add("--prompt-tokens", type=int, default=0, help="of every prompt (default: %(default)s)")
    add("--mean-length", type=float, default=2500.0, help="response tokens, lognormal (default: %(default)s)")
    add("--sigma", type=float, default=1.0, help="standard deviation of the log of the length (default: %(default)s)")
    add("--max-tokens", type=int, default=16384, help="response length limit (default: %(default)s)")
    add("--trace", default=None, metavar="FILE", help="JSON lines of lengths, instead of a lognormal")
    add("--max-num-seqs", type=int, default=None, help="sequences in flight on one engine (default: 1024)")
    add(
        "--profile",
        default=None,
        metavar="FILE",
        help="what paceline calibrate wrote: the costs of the calibrated mode",
    )
    add("--engines", type=int, default=None, help="number of engines (default: GPUs over those of the layout)")
    add("--run", default=None, metavar="FOLDER", help=RUN_FOLDER)
    add("--seed", type=int, default=0, help="of lengths and spread (default: %(default)s)")


def _stage_arguments(verb: argparse.ArgumentParser) -> None:
    add = verb.add_argument_group("the other stages").add_argument
    add(
        "--stages",
        default=None,
        metavar="LIST",
        help="seconds, for example data=0.2,prepare=2,logprob=18,train=31 (default: from FLOP and bytes)",
    )
    add("--generation-share", type=float, default=None, help="share of generation in a step without speculation (0-1)")
    add("--transport", type=float, default=None, metavar="GB/S", help="rate at which weights reach the engines")


def _async_arguments(verb: argparse.ArgumentParser) -> None:
    add = verb.add_argument_group("generation beside training").add_argument
    add("--lag", type=int, default=1, help="policy versions that rollouts may be behind (default: %(default)s)")
    add("--training-gpus", type=int, default=None, help="GPUs that train (default: half as many as generate)")
    _updates_argument(verb)


def _updates_argument(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--updates",
        choices=("in_flight", "drained"),
        default="in_flight",
        help="new weights interrupt the engines, or wait until they are idle (default: %(default)s)",
    )


def option_names() -> list[str]:
    """All of them, for the nearest match of a mistyped one."""
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    verbs = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return sorted({name for verb in verbs.choices.values() for name in verb._option_string_actions if name[:2] == "--"})


def simulate(options: argparse.Namespace) -> int:
    """Project, print, draw. Returns 0. Raises `ConfigError`."""
    from paceline.sim.report import print_report

    report = _validate(options) if options.simulate_verb == "validate" else _project(options)
    drawn: list[Path] = []
    if options.plots is not None:
        from paceline.sim.plots import write_plots

        drawn = write_plots(report, Path(options.plots))
    if options.json:
        sys.stdout.write(json.dumps(report, allow_nan=False) + "\n")
        return 0
    print_report(report)
    for path in drawn:
        sys.stdout.write(f"{path}\n")
    return 0


def _validate(options: argparse.Namespace) -> dict[str, Any]:
    from paceline.sim.profile import ProfileCost, load_profile
    from paceline.sim.report import validate_report
    from paceline.sim.validate import check_profile, read_run, replay

    run, path = read_run(Path(options.run)), _existing("--profile", options.profile)
    profile = load_profile(path)
    check_profile(run, profile, path)
    cost = ProfileCost(profile)
    lines = [*cost.assumptions(), *run.lengths().assumptions()]
    acceptance = run.acceptance()
    return validate_report(run, replay(run, cost), [*lines, *([] if acceptance is None else acceptance.assumptions())])


def _project(options: argparse.Namespace) -> dict[str, Any]:
    from paceline.sim import report as reports

    run = _run(options)
    scenario = _scenario(options, run)
    modes = _modes(options)
    match options.simulate_verb:
        case "rollout":
            return reports.rollout_report(scenario, modes, options.price, options.sensitivity)
        case "step":
            return reports.step_report(scenario, modes, _stages(options, scenario, modes, run), options.price)
        case "async":
            training = _training_gpus(options)
            stages = _stages(options, scenario, modes, run, training)
            return reports.async_report(scenario, modes, stages, training, options.lag, options.updates, options.price)
        case "sweep":
            axes = _axes(options.over or ["k=1,3,5,7", "alpha=1.5,2,3,4,5,6"])
            stages = _stages_if_given(options, scenario, modes, run)
            share = options.generation_share if stages is None else None
            return reports.sweep_report(scenario, modes, axes, stages, share, options.updates)
        case "recommend":
            training = options.training_gpus
            stages = None if training is None else _stages(options, scenario, modes, run, training)
            return reports.recommend_report(
                scenario,
                modes,
                _drafts(options, scenario),
                stages=stages,
                training_gpus=training,
                lag=options.lag,
                updates=options.updates,
            )
        case "compare":
            stages = _stages_if_given(options, scenario, modes, run, or_share=True)
            return reports.compare_report(scenario, modes, _drafts(options, scenario), stages, options.price)
        case verb:
            raise AssertionError(f"the parser let an unknown command through: {verb}")


def _run(options: argparse.Namespace) -> Run | None:
    if options.run is None:
        return None
    from paceline.sim.validate import read_run

    if options.trace is not None:
        raise ConfigError("--trace and --run both give the lengths: leave one of them out")
    return read_run(Path(options.run))


def _modes(options: argparse.Namespace) -> Sequence[Mode]:
    """Both, unless a profile stands alone: then nothing says which machine an ideal engine would have."""
    if options.profile is not None and options.hardware is None and options.model is None:
        return ("calibrated",)
    return ("ideal", "calibrated")


def _scenario(options: argparse.Namespace, run: Run | None) -> Scenario:
    from paceline.sim.lengths import LognormalLengths, load_lengths
    from paceline.sim.project import fastest_layout, smallest_layout
    from paceline.sim.scenario import Draft, Scenario, find_method, parse_draft

    lengths = LognormalLengths(options.mean_length, options.sigma, options.max_tokens)
    if options.trace is not None:
        lengths = load_lengths(_existing("--trace", options.trace))
    draft = parse_draft(options.draft or "eagle3@3:3.0", options.spread)
    rollouts, group_size, prompt_tokens = options.rollouts, options.group_size, options.prompt_tokens
    max_num_seqs = options.max_num_seqs or 1024
    if run is not None:
        lengths = run.lengths()
        rollouts, group_size = len(run.steps[0].lengths), run.group_size
        prompt_tokens = round(run.settled[0].prompt_tokens)
        max_num_seqs = options.max_num_seqs or run.max_num_seqs
        acceptance = run.acceptance()
        if options.draft is None:
            draft = Draft() if acceptance is None else Draft(find_method(run.method), run.settled[0].k, acceptance)
    scenario = Scenario(
        model=options.model or "qwen3-8b",
        hardware=options.hardware or "gb200",
        gpus=options.gpus,
        precision=options.precision,
        draft=draft,
        rollouts=rollouts,
        group_size=group_size,
        prompt_tokens=prompt_tokens,
        lengths=lengths,
        max_num_seqs=max_num_seqs,
        profile=None if options.profile is None else _existing("--profile", options.profile),
        engines=options.engines,
        seed=options.seed,
    )
    if _modes(options) == ("calibrated",) and options.profile is not None:
        return scenario
    if options.layout in (None, "fastest"):
        choose = smallest_layout if options.layout is None else fastest_layout
        return scenario.replace(layout=choose(scenario))
    return scenario.replace(layout=options.layout)


def _drafts(options: argparse.Namespace, scenario: Scenario) -> list[Draft]:
    from paceline.sim.scenario import parse_draft

    if options.drafts is None:
        return [scenario.draft]
    return [parse_draft(text, options.spread) for text in options.drafts.split(",")]


def _training_gpus(options: argparse.Namespace) -> int:
    training = options.training_gpus
    if training is not None and training < 1:
        raise ConfigError(f"--training-gpus -> must be 1 or more | got {training}")
    return training or max(options.gpus // 2, 1)


def _stages(
    options: argparse.Namespace,
    scenario: Scenario,
    modes: Sequence[Mode],
    run: Run | None,
    training_gpus: int | None = None,
) -> Mapping[Mode, Stages]:
    """Given, of the run, from the share of generation, or modelled; for each mode."""
    given = _stages_if_given(options, scenario, modes, run, or_share=True)
    if given is not None:
        return given
    from paceline.sim.project import default_stages

    rate = None if options.transport is None else options.transport * 1e9
    gpus = training_gpus or scenario.gpus
    return {mode: default_stages(scenario, mode, gpus, rate) for mode in modes}


def _stages_if_given(
    options: argparse.Namespace,
    scenario: Scenario,
    modes: Sequence[Mode],
    run: Run | None,
    or_share: bool = False,
) -> Mapping[Mode, Stages] | None:
    from paceline.sim.figures import Origin
    from paceline.sim.project import baseline
    from paceline.sim.step import from_generation_share, given

    if options.stages is not None and options.generation_share is not None:
        raise ConfigError("--stages and --generation-share both give the other stages: leave one of them out")
    if options.stages is not None:
        seconds = _pairs("--stages", options.stages)
        unknown = sorted(set(seconds) - {"data", "prepare", "logprob", "train"})
        if unknown:
            raise ConfigError(
                f"--stages -> no such stage: {', '.join(unknown)}. There are data, prepare, logprob, train"
            )
        stages = given(Origin("assumed", "given on the command line"), **seconds)
        return dict.fromkeys(modes, stages)
    if options.generation_share is not None and or_share:
        share, origin = options.generation_share, Origin("assumed", "from the share of generation that was given")
        return {mode: from_generation_share(baseline(scenario, mode).makespan_s, share, origin) for mode in modes}
    if run is not None and options.generation_share is None:
        return dict.fromkeys(modes, run.stages())
    return None


def _pairs(name: str, text: str) -> dict[str, float]:
    try:
        return {key.strip(): float(value) for key, _, value in (part.partition("=") for part in text.split(","))}
    except ValueError as error:
        raise ConfigError(f"{name} -> must be NAME=SECONDS by comma | got {text!r}") from error


def _axes(texts: Sequence[str]) -> dict[str, list[object]]:
    axes: dict[str, list[object]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not values:
            raise ConfigError(f"--over -> must be NAME=VALUE,VALUE | got {text!r}. For example --over k=1,3,5")
        axes[name] = [_value(name, value.strip()) for value in values.split(",")]
    return axes


def _value(name: str, text: str) -> object:
    if name in ("model", "hardware", "layout"):
        return text
    kind = float if name in ("alpha", "mean_length", "sigma") else int
    try:
        return kind(text)
    except ValueError as error:
        raise ConfigError(f"--over {name} -> must be numbers | got {text!r}") from error


def _existing(option: str, name: str) -> Path:
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"{option} -> there is no file {path}")
    return path
