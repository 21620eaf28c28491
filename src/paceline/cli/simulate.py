"""`paceline simulate`: projections of rollouts and steps, without an engine and without torch.

The options stand here, so that help needs nothing; what computes is imported when a command has been chosen.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
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

DEFAULTS: Mapping[str, Any] = {
    "model": "qwen3-8b",
    "hardware": "gb200",
    "gpus": 32,
    "precision": "bf16",
    "draft": "eagle3@3:3.0",
    "spread": 0.0,
    "rollouts": 1024,
    "group_size": 1,
    "prompt_tokens": 0,
    "mean_length": 2500.0,
    "sigma": 1.0,
    "max_tokens": 16384,
    "seed": 0,
    "lag": 1,
    "updates": "in_flight",
}
"""Of the options that have one. The parser leaves out what was not given: what was, must take effect."""
DEFAULT_AXES = ("k=1,3,5,7", "alpha=1.5,2,3,4,5,6")
LENGTHS = ("mean_length", "sigma", "max_tokens")
STAGES = ("stages", "generation_share", "run")
"""What gives the other stages."""


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
            _stage_arguments(verb, modelled=name not in ("sweep", "compare"))
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
                f"lag, model, hardware, layout (default: {' and '.join(DEFAULT_AXES)})",
            )
        if name in ("recommend", "compare"):
            verb.add_argument(
                "--drafts",
                default=None,
                metavar="LIST",
                help="drafts to choose from, METHOD@K:ALPHA by comma (default: --draft)"
                + ("; what is of one draft alone is of --draft, or else of the first" if name == "recommend" else ""),
            )
        if name == "rollout":
            verb.add_argument("--sensitivity", action="store_true", help="vary every input by 20 percent")
        if name != "sweep" and name != "recommend":
            verb.add_argument("--price", type=float, default=None, metavar="USD", help="dollars per GPU-hour")


def _scenario_arguments(verb: argparse.ArgumentParser) -> None:
    add = verb.add_argument_group("what is projected").add_argument
    add("--model", help=_help("qwen3-8b, qwen3-235b-a22b, ... or a folder with config.json", "model"))
    add("--hardware", help=_help("gb200, b200, h200, h100 or a100", "hardware"))
    add("--gpus", type=int, help=_help("GPUs that generate", "gpus"))
    add(
        "--layout",
        default=None,
        help="of one engine: TP1, TP4, EP8, EP32xTP4, or fastest (default: the smallest that fits)",
    )
    add("--precision", choices=("bf16", "fp8"), help=_help("of weights and KV cache", "precision"))
    add("--draft", metavar="METHOD@K:ALPHA", help=_help("draft and acceptance length", "draft"))
    spread = "standard deviation of the acceptance's logit between responses"
    add("--spread", type=float, help=_help(spread, "spread"))
    add("--rollouts", type=int, help=_help("responses per step", "rollouts"))
    add("--group-size", type=int, help=_help("responses per prompt", "group_size"))
    add("--prompt-tokens", type=int, help=_help("of every prompt", "prompt_tokens"))
    add("--mean-length", type=float, help=_help("response tokens, lognormal", "mean_length"))
    add("--sigma", type=float, help=_help("standard deviation of the log of the length", "sigma"))
    add("--max-tokens", type=int, help=_help("response length limit", "max_tokens"))
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
    add("--seed", type=int, help=_help("of lengths and spread", "seed"))


def _help(text: str, name: str) -> str:
    return f"{text} (default: {DEFAULTS[name]})"


def _stage_arguments(verb: argparse.ArgumentParser, modelled: bool) -> None:
    """`modelled`: whether they come from FLOP and bytes where nothing gives them."""
    add = verb.add_argument_group("the other stages").add_argument
    add(
        "--stages",
        default=None,
        metavar="LIST",
        help="seconds, for example data=0.2,prepare=2,logprob=18,train=31"
        + (" (default: from FLOP and bytes)" if modelled else " (default: the rollout alone)"),
    )
    add("--generation-share", type=float, default=None, help="share of generation in a step without speculation (0-1)")
    if modelled:
        add("--transport", type=float, default=None, metavar="GB/S", help="rate at which weights reach the engines")


def _async_arguments(verb: argparse.ArgumentParser) -> None:
    add = verb.add_argument_group("generation beside training").add_argument
    add("--lag", type=int, help=_help("policy versions that rollouts may be behind", "lag"))
    add("--training-gpus", type=int, default=None, help="GPUs that train (default: half as many as generate)")
    _updates_argument(verb)


def _updates_argument(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--updates",
        choices=("in_flight", "drained"),
        help=_help("new weights interrupt the engines, or wait until they are idle", "updates"),
    )


def option_names(verb: str) -> list[str]:
    """Those of one command, for the nearest match of a mistyped one."""
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    verbs = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return sorted(name for name in verbs.choices[verb]._option_string_actions if name[:2] == "--")


def simulate(options: argparse.Namespace) -> int:
    """Project, print, draw. Returns 0. Raises `ConfigError`, also for an option without effect beside the others."""
    from paceline.sim.report import print_report

    given = {name for name, value in vars(options).items() if value is not None and value is not False}
    # With a profile alone nothing says which machine an ideal engine would have.
    alone = "profile" in given and not {"model", "hardware"} & given
    options.modes = ("calibrated",) if alone else ("ideal", "calibrated")
    for names, why in _without_effect(options, given):
        for name in names:
            if name in given:
                raise ConfigError(f"--{name.replace('_', '-')} has no effect here: {why}")
    if "drafts" in given and "draft" not in given:
        # What is of one draft alone is of the first to choose from: the k of a rollout, break-even, the split.
        options.draft = next((text for text in options.drafts.split(",") if text != "none"), "none")
    options.draft_given = bool({"draft", "drafts"} & given)
    for name, value in DEFAULTS.items():
        if getattr(options, name, None) is None:
            setattr(options, name, value)
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


def _without_effect(options: argparse.Namespace, given: set[str]) -> Iterator[tuple[Sequence[str], str]]:
    """Options that cannot take effect beside those that were given, and why."""
    verb = options.simulate_verb
    if verb == "validate":
        return
    if "run" in given:
        yield ("rollouts", "group_size", "prompt_tokens", "trace", *LENGTHS), "--run gives it. Leave one of them out"
    if "trace" in given:
        yield LENGTHS, "--trace gives the lengths. Leave one of them out"
    # A run brings its own draft, whose acceptance was measured without a spread.
    drafts = [None if "run" in given and "draft" not in given else options.draft or DEFAULTS["draft"]]
    if "drafts" in given:
        drafts += options.drafts.split(",")
        if verb == "compare":
            yield ("draft",), "--drafts names all that are compared"
            del drafts[0]
    if set(drafts) <= {None, "none"}:
        yield ("spread",), "no draft is named whose acceptance could differ. Name one with --draft METHOD@K:ALPHA"
    alone = options.modes == ("calibrated",)
    if alone:
        why = "with --profile and neither --model nor --hardware the measured engine is projected, not GPUs"
        yield ("gpus", "layout", "precision", "price", "training_gpus"), why
    if given & set(STAGES):
        yield ("transport",), "the other stages are given, and not made from bytes. Leave one of them out"
    if verb == "recommend":
        split = ("stages", "generation_share", "transport", "lag", "updates")
        if "training_gpus" in given:
            yield ("engines",), "the number of engines follows from the GPUs that a split leaves to generate"
        else:
            yield split, "it belongs to the split of GPUs, which is searched with --training-gpus"
    if verb == "sweep":
        axes = _axes(options.over or DEFAULT_AXES)
        yield tuple(axes), "--over goes over it. Leave one of them out"
        lags = axes.get("lag", [])
        if "lag" in axes:
            yield ("generation_share",), "with an axis lag the step comes from --stages or --run"
        if not any(lags):
            yield ("updates",), "it is for a lag of 1 or more: give --over lag=0,1,2"
        if "gpus" in axes:
            yield ("engines",), "the number of engines follows from the GPUs of --over"
        fixed = {"gpus", "layout", "model", "hardware"} & set(axes)
        if alone and fixed:
            raise ConfigError(f"--over {min(fixed)} has no effect here: --profile is of one engine. Leave it out")
    elif options.simulate_verb in ("async", "recommend") and options.lag == 0:
        yield ("updates",), "at lag 0 the engines are idle whenever new weights come"


def _validate(options: argparse.Namespace) -> dict[str, Any]:
    from paceline.drafts.profile import StepCosts, read_profile
    from paceline.sim.figures import Assumption
    from paceline.sim.profile import ProfileCost, load_profile
    from paceline.sim.report import validate_report
    from paceline.sim.validate import check_profile, read_run, replay

    run, path = read_run(Path(options.run)), _existing("--profile", options.profile)
    profile = load_profile(path)
    check_profile(run, profile, path)
    cost = ProfileCost(profile)
    lines = [*cost.assumptions(), *run.lengths().assumptions()]
    acceptance = run.acceptance()
    if acceptance is not None:
        lines += acceptance.assumptions()
    costs = StepCosts.from_profile(read_profile(path)) if run.adaptive else None
    if costs is not None:
        lines += [
            Assumption("k", "by the rule of the run", "measured", "the profile, and the acceptances of the run"),
            Assumption("probing steps", "not charged", "assumed", "draft.probe_share bounds what they cost"),
        ]
    return validate_report(run, replay(run, cost, costs), lines)


def _project(options: argparse.Namespace) -> dict[str, Any]:
    from paceline.sim import report as reports

    run = _run(options)
    scenario = _scenario(options, run)
    modes = options.modes
    match options.simulate_verb:
        case "rollout":
            if options.sensitivity and not scenario.draft.k:
                raise ConfigError("--sensitivity has no effect here: it varies what makes a speedup, and none drafts")
            return reports.rollout_report(scenario, modes, options.price, options.sensitivity)
        case "step":
            return reports.step_report(scenario, modes, _stages(options, scenario, modes, run), options.price)
        case "async":
            training = _training_gpus(options)
            stages = _stages(options, scenario, modes, run, training)
            return reports.async_report(scenario, modes, stages, training, options.lag, options.updates, options.price)
        case "sweep":
            axes = _axes(options.over or DEFAULT_AXES)
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

    return read_run(Path(options.run))


def _scenario(options: argparse.Namespace, run: Run | None) -> Scenario:
    from paceline.sim.lengths import LognormalLengths, load_lengths
    from paceline.sim.project import fastest_layout, smallest_layout
    from paceline.sim.scenario import Draft, Scenario, find_method, parse_draft

    lengths = LognormalLengths(options.mean_length, options.sigma, options.max_tokens)
    if options.trace is not None:
        lengths = load_lengths(_existing("--trace", options.trace))
    draft = parse_draft(options.draft, options.spread)
    rollouts, group_size, prompt_tokens = options.rollouts, options.group_size, options.prompt_tokens
    max_num_seqs = 1024 if options.max_num_seqs is None else options.max_num_seqs
    if run is not None:
        lengths = run.lengths()
        rollouts, group_size = len(run.steps[0].lengths), run.group_size
        prompt_tokens = round(run.settled[0].prompt_tokens)
        max_num_seqs = run.max_num_seqs if options.max_num_seqs is None else options.max_num_seqs
        acceptance = run.acceptance()
        if not options.draft_given:
            draft = Draft() if acceptance is None else Draft(find_method(run.method), run.settled[0].k, acceptance)
    scenario = Scenario(
        model=options.model,
        hardware=options.hardware,
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
    if options.modes == ("calibrated",):
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
    pairs: dict[str, float] = {}
    for part in text.split(","):
        key, _, value = (word.strip() for word in part.partition("="))
        if key in pairs:
            raise ConfigError(f"{name} -> {key} is given twice. Leave one of them out")
        try:
            pairs[key] = float(value)
        except ValueError as error:
            raise ConfigError(f"{name} -> must be NAME=SECONDS by comma | got {text!r}") from error
    return pairs


def _axes(texts: Sequence[str]) -> dict[str, list[object]]:
    axes: dict[str, list[object]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not values:
            raise ConfigError(f"--over -> must be NAME=VALUE,VALUE | got {text!r}. For example --over k=1,3,5")
        if name in axes:
            raise ConfigError(f"--over {name} is given twice. Give all values at once, --over {name}=VALUE,VALUE")
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
