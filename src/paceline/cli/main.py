"""The `paceline` command: verbs, exit codes, and errors as one paragraph.

Exit codes: 0 done, 1 a defect of ours (with its traceback) or a certificate that is no pass, 2 something to correct,
130 stopped by Ctrl-C.
"""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import sys
import warnings
from collections.abc import Sequence

from paceline import __version__
from paceline.cli.simulate import add_arguments, option_names
from paceline.errors import ConfigError, PacelineError

OVERRIDES = "Any key of the recipe can be set here: --section.key value (for example --run.num_steps 3)."

LIBRARY_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    # Their bars would run through ours.
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    # Prompts are short: its threads would only compete for the cores.
    "TOKENIZERS_PARALLELISM": "false",
}
"""Read by libraries when they are first imported; what the user has set holds."""


def main(words: Sequence[str] | None = None) -> int:
    """Run one command; `words` default to the process's own. Returns the exit code."""
    words = list(sys.argv[1:] if words is None else words)
    others, overrides = split_overrides(words)
    options, unknown = build_parser().parse_known_args(others)
    _quieten_libraries()
    for name, value in LIBRARY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        if unknown:
            _refuse(unknown, options)
        return _dispatch(options, overrides)
    except PacelineError as error:
        return _say(str(error))
    except KeyboardInterrupt:
        return _stopped(options.verb, words)


def run() -> None:
    """Entry point of the console script."""
    sys.exit(main())


def split_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Take the `--section.key value` words out, wherever they stand: (other words, overrides)."""
    others: list[str] = []
    overrides: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not (word.startswith("--") and "." in word.partition("=")[0]):
            others.append(word)
            continue
        overrides.append(word)
        if "=" not in word and rest and not rest[0].startswith("--"):
            overrides.append(rest.pop(0))
    return others, overrides


def build_parser() -> argparse.ArgumentParser:
    """The verbs. Options of a verb that no recipe holds; everything else is an override."""
    parser = argparse.ArgumentParser(
        prog="paceline",
        description="Speculative decoding for RL rollouts that changes nothing about what is learned.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"paceline {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="COMMAND")

    def verb(name: str, help_text: str, epilog: str = OVERRIDES) -> argparse.ArgumentParser:
        return verbs.add_parser(name, help=help_text, description=help_text, epilog=epilog, allow_abbrev=False)

    train = verb("train", "Train the policy of a recipe.")
    train.add_argument("recipe", metavar="RECIPE.toml")
    train.add_argument("--resume", action="store_true", help="go on from the newest checkpoint of the run folder")

    compare = verb("compare", "Run a recipe in several arms that take turns, and compare speed and outcome.")
    compare.add_argument("recipe", metavar="RECIPE.toml")
    compare.add_argument(
        "--arms", default="none,eagle3", help="values of draft.method, and adaptive (default: %(default)s)"
    )
    compare.add_argument("--fresh", action="store_true", help="remove an earlier comparison of the same run.name first")
    compare.add_argument(
        "--pairs", type=int, default=3, help="rollout measurements per arm at start, middle and end (default: 3)"
    )
    compare.add_argument(
        "--in-flight", default=None, help="samples in flight of the rollout measurements (default: 16,64 if they fit)"
    )

    certify = verb(
        "certify", "Sample with a recipe and measure whether the tokens came from the policy. Exit code 1: no."
    )
    certify.add_argument("recipe", metavar="RECIPE.toml")
    certify.add_argument("--tokens", type=int, default=20_000, help="tokens sampled in each arm (default: %(default)s)")
    certify.add_argument("--arms", default=None, help="values of draft.method (default: that of the recipe)")
    certify.add_argument("--json", default=None, metavar="FILE", help="write all figures there as well")

    calibrate = verb("calibrate", "Measure what an engine step of a recipe costs, for the choice of k.")
    calibrate.add_argument("recipe", metavar="RECIPE.toml")
    calibrate.add_argument("--out", default=None, metavar="FILE", help="the profile (default: beside the run folder)")
    calibrate.add_argument(
        "--seconds", type=float, default=90, help="time for measuring, once the engine is up (default: %(default)s)"
    )
    calibrate.add_argument("--clock", default="wall", help="wall or cpu, the time k is chosen by (default: wall)")
    calibrate.add_argument("--json", action="store_true", help="print the profile on stdout instead of its tables")

    about = "Train the draft of a recipe, or measure it."
    draft = verbs.add_parser("draft", help=about, description=about)
    draft_verbs = draft.add_subparsers(dest="draft_verb", required=True, metavar="COMMAND")
    draft_train = draft_verbs.add_parser(
        "train", help="train or fetch from the cache", description="Train the draft of a recipe.", epilog=OVERRIDES
    )
    draft_train.add_argument("recipe", metavar="RECIPE.toml")
    about = "Predict what the draft is worth on held-out prompts, and count it in the engine."
    draft_eval = draft_verbs.add_parser("eval", help=about, description=about, epilog=OVERRIDES)
    draft_eval.add_argument("recipe", metavar="RECIPE.toml")
    draft_eval.add_argument("--answers", type=int, default=256, help="answers that are sampled (default: %(default)s)")
    draft_eval.add_argument("--json", action="store_true", help="print the figures on stdout instead of a table")

    report = verb("report", "Print the tables of finished or running runs.", epilog="")
    report.add_argument("runs", nargs="+", metavar="RUN", help="run folder, of train or of compare")

    doctor = verb("doctor", "Check this machine, and a recipe, without starting an engine.")
    doctor.add_argument("recipe", nargs="?", metavar="RECIPE.toml")

    about = "Project speedups at any scale: rollouts, steps, what to choose. Needs no engine."
    simulate = verbs.add_parser("simulate", help=about, description=about)
    add_arguments(simulate)

    keys = verb("keys", "List every key of a recipe with its default and what it means.", epilog="")
    keys.add_argument("section", nargs="?", help="one section only")
    return parser


def _dispatch(options: argparse.Namespace, overrides: list[str]) -> int:
    # Each verb is imported when it is chosen, so that help and errors come at once.
    match options.verb:
        case "train":
            from paceline.cli.train import train

            return train(options.recipe, overrides, resume=options.resume)
        case "compare":
            from paceline.cli.compare import compare

            return compare(
                options.recipe,
                overrides,
                arms=options.arms.split(","),
                fresh=options.fresh,
                num_pairs=options.pairs,
                in_flight=_integers("--in-flight", options.in_flight),
            )
        case "certify":
            from paceline.cli.certify import certify

            return certify(
                options.recipe,
                overrides,
                arms=None if options.arms is None else options.arms.split(","),
                num_tokens=options.tokens,
                json_path=options.json,
            )
        case "calibrate":
            from paceline.cli.calibrate import calibrate

            return calibrate(
                options.recipe,
                overrides,
                out=options.out,
                seconds=options.seconds,
                clock=options.clock,
                as_json=options.json,
            )
        case "draft":
            from paceline.cli.draft import eval_draft, train_draft

            if options.draft_verb == "train":
                return train_draft(options.recipe, overrides)
            return eval_draft(options.recipe, overrides, options.answers, options.json)
        case "report":
            from paceline.cli.report import report

            _no_overrides(overrides)
            return report(options.runs)
        case "doctor":
            from paceline.cli.doctor import doctor

            return doctor(options.recipe, overrides)
        case "simulate":
            from paceline.cli.simulate import simulate

            _no_overrides(overrides)
            return simulate(options)
        case "keys":
            from paceline.cli.keys import print_keys

            _no_overrides(overrides)
            return print_keys(options.section)
        case verb:
            raise AssertionError(f"the parser let an unknown verb through: {verb}")


def _quieten_libraries() -> None:
    """Two messages of the first import, with nothing in them to act on."""
    # Of reasoning-gym's dependency, wherever Python has to compile it; the "module" of such a warning is its path.
    warnings.filterwarnings("ignore", category=SyntaxWarning, module=r".*[/\\]cellpylib[/\\]")
    # Of torch, when vLLM registers its Triton kernels on a machine without Triton.
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)


def _refuse(unknown: list[str], options: argparse.Namespace) -> None:
    from paceline.config.load import parse_overrides

    own = {
        "train": ["--resume"],
        "compare": ["--arms", "--fresh", "--pairs", "--in-flight"],
        "certify": ["--tokens", "--arms", "--json"],
        "calibrate": ["--out", "--seconds", "--clock", "--json"],
        "draft": ["--answers", "--json"],
        "simulate": option_names(options.simulate_verb) if options.verb == "simulate" else [],
    }
    parse_overrides(unknown, own.get(options.verb, []))


def _no_overrides(overrides: list[str]) -> None:
    if overrides:
        raise ConfigError(f"{overrides[0]} sets a key of a recipe, and this command reads none: leave it out")


def _integers(name: str, text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{name} -> must be numbers | got {text!r}. For example {name} 16,64") from error


def _stopped(verb: str, words: list[str]) -> int:
    """Say how to go on after Ctrl-C. Returns the exit code of an interrupted process."""
    match verb:
        case "train":
            what, option = "Go on", "--resume"
        case "compare":
            what, option = "Start again", "--fresh"
        case _:
            _say("Stopped.")
            return 130
    again = words if option in words else [*words, option]
    _say(f"Stopped. {what} with: {shlex.join(['paceline', *again])}")
    return 130


def _say(message: str) -> int:
    """One paragraph on stderr. Returns the exit code of something to correct."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False)
    # A terminal gets wrapped lines; a file or a pipe gets each message whole.
    console.print(Text.assemble(("paceline: ", "bold red"), message), soft_wrap=not console.is_terminal)
    return 2


if __name__ == "__main__":
    run()
