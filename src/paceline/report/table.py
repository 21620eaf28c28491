"""The tables a person reads, from the dictionaries of summary.json and metrics.jsonl. Nothing is measured here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from paceline.loop.compare import arm_summary
from paceline.observe.stages import STAGES

Record = Mapping[str, Any]


def print_tables(tables: Group, console: Console | None = None) -> None:
    """To the terminal; a file or a pipe gets 100 columns, so that a stored output does not depend on the window."""
    console = console or Console()
    if not console.is_terminal:
        console.width = 100
    console.print(tables)


def comparison(summary: Record) -> Group:
    """All tables of `paceline compare`."""
    arms = list(summary["arms"])
    return Group(_stage_table(summary["arms"]), _speedup_table(summary["speedup"], arms[0]), _outcome_table(summary))


def runs(records: Mapping[str, Sequence[Record]]) -> Group:
    """Runs of `paceline train` side by side: name -> lines of metrics.jsonl, at least one each."""
    arms = {name: arm_summary(lines) for name, lines in records.items()}
    table = _table("what was sampled and learned", list(arms))
    table.add_row("steps", *(str(arm["steps"]) for arm in arms.values()))
    table.add_row("acceptance length", *(_number(arm["acceptance_length"]) for arm in arms.values()))
    last = {name: lines[-1] for name, lines in records.items()}
    first = {name: lines[0] for name, lines in records.items()}
    table.add_row("training reward, first step", *(_number(line["reward"]["mean"], 3) for line in first.values()))
    table.add_row("training reward, last step", *(_number(line["reward"]["mean"], 3) for line in last.values()))
    table.add_row("alarms", *(str(arm["alarms"]) for arm in arms.values()))
    return Group(_stage_table(arms), table)


def _stage_table(arms: Mapping[str, Record]) -> Table:
    table = _table("seconds per step (median)", list(arms))
    for stage in STAGES:
        table.add_row(stage, *(_seconds(arm["stage_s"][stage]) for arm in arms.values()))
    table.add_section()
    table.add_row("step", *(_seconds(arm["stage_s"]["step"]) for arm in arms.values()), style="bold")
    table.add_row(
        "stages / step, worst step", *(f"{100 * arm['stages_over_step']:.1f} %" for arm in arms.values()), style="dim"
    )
    return table


def _speedup_table(speedup: Record, baseline: str) -> Table:
    table = Table(title=Text(f"speedup over {baseline}"), title_justify="left", title_style="bold")
    table.add_column("arm")
    table.add_column("of")
    for name in ("median", "95 % interval", "pairs"):
        table.add_column(name, justify="right")
    for arm, parts in speedup.items():
        for name, ratio in parts.items():
            kind = "step" if name == "step" else "rollout"
            table.add_row(
                arm,
                f"{kind}, {ratio['in_flight']} in flight",
                f"{ratio['median']:.2f}x",
                "-" if ratio["low"] is None else f"{ratio['low']:.2f} - {ratio['high']:.2f}",
                str(ratio["pairs"]),
            )
    return table


def _outcome_table(summary: Record) -> Table:
    arms: Mapping[str, Record] = summary["arms"]
    certificates = [arm["certificate"] for arm in arms.values()]
    rewards = [arm["reward"] for arm in arms.values()]
    table = _table("what was sampled and learned", list(arms))
    table.add_row("acceptance length", *(_number(arm["acceptance_length"]) for arm in arms.values()))
    table.add_section()
    table.add_row("certificate: tokens", *(f"{part['tokens']:,}" for part in certificates))
    table.add_row("  z (about standard normal)", *(_number(part["z"], 2, "+") for part in certificates))
    table.add_row("  excess, nats per token", *(_number(part["excess_nats"], 4, "+") for part in certificates))
    table.add_row(
        "  smallest bias seen at 4 sigma", *(_number(part["smallest_visible_nats"], 4) for part in certificates)
    )
    table.add_row("  Kolmogorov-Smirnov p", *(_number(part["ks_p"], 3) for part in certificates))
    table.add_row("  log M (alarm at 13.8)", *(_number(part["log_m"], 1, "+") for part in certificates))
    table.add_row("  alarms", *(str(arm["alarms"]) for arm in arms.values()))
    table.add_section()
    table.add_row("reward on held-out prompts, before", *(_number(part["before"], 3) for part in rewards))
    table.add_row("  after", *(_number(part["after"], 3) for part in rewards), style="bold")
    for arm, agreement in summary["reward_agreement"].items():
        difference = f"{agreement['difference']:+.3f}"
        noise = f"{2 * agreement['standard_error']:.3f}"
        verdict = "within noise" if agreement["within_noise"] else "not within noise"
        for label, cell in (("difference of after", difference), ("two standard errors", noise), ("verdict", verdict)):
            table.add_row(f"  {label}", *(cell if name == arm else "" for name in arms))
    return table


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=Text(title), title_justify="left", title_style="bold")
    table.add_column("")
    for column in columns:
        table.add_column(Text(column), justify="right")
    return table


def _number(value: float | None, digits: int = 2, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.{digits}f}"


def _seconds(value: float) -> str:
    return f"{value:.3f}" if value < 1 else f"{value:.2f}"
