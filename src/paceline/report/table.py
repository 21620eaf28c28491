"""The tables a person reads, from the dictionaries of summary.json and metrics.jsonl. Nothing is measured here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from paceline.loop.compare import arm_summary
from paceline.loop.speculation import ENGINE_PARTS
from paceline.observe.stages import STAGES

Record = Mapping[str, Any]

ORIGINS = {"accepted": "accepted drafts", "recovered": "recovered", "bonus": "bonus", "plain": "no draft"}
"""Where an emitted token came from -> how a table says it."""


def print_tables(tables: Group, console: Console | None = None) -> None:
    """To the terminal; a file or a pipe gets 100 columns, so that a stored output does not depend on the window."""
    console = console or Console()
    if not console.is_terminal:
        console.width = 100
    console.print(tables)


def comparison(summary: Record) -> Group:
    """All tables of `paceline compare`."""
    arms = list(summary["arms"])
    return Group(
        _stage_table(summary["arms"]),
        _speedup_table(summary["speedup"], arms[0]),
        *_speculation_table(summary["arms"]),
        _outcome_table(summary),
    )


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
    return Group(_stage_table(arms), *_speculation_table(arms), table)


def certificates(summary: Record) -> Group:
    """All tables of `paceline certify`, then what speaks against each arm."""
    arms: Mapping[str, Record] = summary["arms"]
    sentences = [
        Text(f"{arm}: {finding}", style="red") for arm, figures in arms.items() for finding in figures["findings"]
    ]
    return Group(_certificate_table(arms), _slot_table(arms), *sentences)


def _certificate_table(arms: Mapping[str, Record]) -> Table:
    reports = [arm["certificate"] for arm in arms.values()]
    recovered = [arm["recovered"] for arm in arms.values()]
    table = _table("were the tokens drawn from the policy?", list(arms))
    table.add_row("verdict", *(arm["verdict"] for arm in arms.values()), style="bold")
    table.add_row("tokens", *(f"{part['tokens']:,}" for part in reports))
    table.add_row("acceptance length", *(_number(arm["acceptance_length"]) for arm in arms.values()))
    table.add_section()
    table.add_row("z (about standard normal)", *(_number(part["z"], 2, "+") for part in reports))
    table.add_row("excess, nats per token", *(_number(part["excess_nats"], 4, "+") for part in reports))
    table.add_row("  95 % interval, +-", *(_number(part["excess_half_width"], 4) for part in reports))
    table.add_row("  smallest bias seen at 4 sigma", *(_number(part["smallest_visible_nats"], 4) for part in reports))
    table.add_row("Kolmogorov-Smirnov p", *(_number(part["ks_p"], 3) for part in reports))
    table.add_row("log M (alarm at 13.8)", *(_number(part["log_m"], 1, "+") for part in reports))
    table.add_row("tokens outside the kept set", *(str(part["outside_kept"]) for part in reports))
    for name, key in (("neighbouring tokens", "lag1"), ("samples of a prompt", "cross")):
        table.add_row(f"correlation of {name}", *(_number(part[f"{key}_correlation"], 4, "+") for part in reports))
        table.add_row("  its z", *(_number(part[f"{key}_z"], 2, "+") for part in reports))
    table.add_section()
    table.add_row("recovered tokens", *(f"{part['tokens']:,}" for part in recovered))
    table.add_row("  z under the residual law", *(_number(part["z"], 2, "+") for part in recovered))
    table.add_row("  Kolmogorov-Smirnov p", *(_number(part["ks_p"], 3) for part in recovered))
    table.add_row("  impossible ones", *(str(part["outside_kept"]) for part in recovered))
    return table


def _slot_table(arms: Mapping[str, Record]) -> Table:
    table = Table(title=Text("by slot"), title_justify="left", title_style="bold")
    table.add_column("arm")
    table.add_column("slot")
    for name in ("tokens", "excess", "z", "drafts tested", "accepted - expected", "z", "recovered", "z"):
        table.add_column(name, justify="right")
    for arm, figures in arms.items():
        drafts, recovered = figures["certificate"]["acceptance_by_slot"], figures["recovered"]["by_slot"]
        for slot, part in figures["certificate"]["by_slot"].items():
            cells = [f"{part['tokens']:,}", _number(part["excess_nats"], 4, "+"), _number(part["z"], 2, "+")]
            if slot in drafts:
                excess = drafts[slot]["excess"]
                cells.append(f"{drafts[slot]['drafts']:,}")
                cells.append("-" if excess is None else f"{100 * excess:+.2f} %")
                cells.append(_number(drafts[slot]["z"], 2, "+"))
            if slot in recovered:
                cells += [f"{recovered[slot]['tokens']:,}", _number(recovered[slot]["z"], 2, "+")]
            name = "no draft" if slot == "-1" else slot
            table.add_row(arm, f"{name} (bonus)" if slot == str(figures["num_draft_tokens"]) else name, *cells)
    return table


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


def _speculation_table(arms: Mapping[str, Record]) -> list[Table]:
    """One table, or none where no arm has the figures: a run or a comparison of an older version."""
    known = {
        arm: _speculation_rows(figures["speculation"]) for arm, figures in arms.items() if figures.get("speculation")
    }
    if not known:
        return []
    table = _table("how the tokens came about", list(arms))
    for name in next(iter(known.values())):
        table.add_row(name, *(known[arm][name] if arm in known else "-" for arm in arms))
    return [table]


def _speculation_rows(part: Record) -> dict[str, str]:
    """Row -> cell of one arm."""
    return {
        "acceptance length, pooled": _number(part["per_request"]["pooled"]),
        "  mean over requests": _number(part["per_request"]["mean"]),
        "  accepted at position 1, 2, ...": " ".join(_percent(share) for share in part["marginal"]) or "-",
        **{f"tokens: {name}": _percent(part["emitted"][origin]) for origin, name in ORIGINS.items()},
        "sequences per engine step, mean": _number(part["mean_live_batch"], 1),
        "k, share of engine steps": ", ".join(f"{k}: {_percent(share)}" for k, share in part["k_chosen"].items()),
        # Of a step, median.
        **{f"seconds of generate: {name}": _seconds(part["engine_s"][name]) for name in ENGINE_PARTS},
    }


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


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if value < 1 else f"{value:.2f}"
