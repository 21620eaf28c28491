"""Projections as dictionaries (`--json`), and as the tables that a person reads.

A projected figure carries the weakest mark of its inputs: assumed < fitted < published < measured. So most are
"assumed"; `rests_on` counts the inputs of each mark, and `assumptions` lists all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from paceline.sim.asynchronous import AsyncRun, Updates, closed_form
from paceline.sim.figures import Assumption
from paceline.sim.project import project_async, project_rollout, project_step, step_assumptions
from paceline.sim.recommend import (
    BATCHES,
    LENGTHS,
    best_by_batch,
    break_even,
    cells,
    compare,
    rollouts_by_k,
    splits,
)
from paceline.sim.rollout import Rollout
from paceline.sim.scenario import Draft, Mode, Scenario, counts_by_mark, weakest
from paceline.sim.step import Stages
from paceline.sim.sweep import Point, sensitivities, sweep
from paceline.sim.validate import Run, Validation

Record = dict[str, Any]
StagesOf = Mapping[Mode, Stages]

_CONTEXT = "tokens of a sequence in the tables by batch: its prompt and half of a mean response"

CURVE_POINTS = 200
"""Points of a live-batch curve that are kept."""


# -- what was projected ------------------------------------------------------------------------------------------------


def rollout_report(scenario: Scenario, modes: Sequence[Mode], price: float | None, sensitivity: bool = False) -> Record:
    """`paceline simulate rollout`: seconds, tokens and live batch with and without speculation.

    `sensitivity` adds the rollout speedup with every input 20 % lower and higher.
    """

    def of_mode(mode: Mode) -> Record:
        pair = project_rollout(scenario, mode)
        gpus = _gpus(scenario, mode)
        return {
            "arms": {"none": _rollout(pair.none), scenario.draft.name: _rollout(pair.spec)},
            "rollout_speedup": pair.speedup,
            "money": _money({"none": pair.none.makespan_s, scenario.draft.name: pair.spec.makespan_s}, gpus, price),
            "sensitivity": [asdict(one) for one in sensitivities(scenario, mode)]
            if sensitivity and scenario.draft.k
            else [],
            **_marks(scenario.assumptions(mode)),
        }

    return _report("rollout", scenario, {mode: of_mode(mode) for mode in modes})


def step_report(scenario: Scenario, modes: Sequence[Mode], stages: StagesOf, price: float | None) -> Record:
    """`paceline simulate step`: the five stages of a synchronous step."""

    def of_mode(mode: Mode) -> Record:
        pair = project_step(scenario, mode, stages[mode])
        lines = step_assumptions(scenario, mode, stages[mode])
        mark = weakest(scenario.assumptions(mode))
        arms = {"none": pair.none, scenario.draft.name: pair.spec}
        return {
            "arms": {
                name: {"stage_s": times.seconds(), "generation_share": times.generation_share}
                for name, times in arms.items()
            },
            "stage_marks": pair.none.marks(mark),  # pyrefly: ignore[bad-argument-type]
            "rollout_speedup": pair.rollout.speedup,
            "step_speedup": pair.speedup,
            "ceiling": pair.none.step_s / stages[mode].total_s if stages[mode].total_s else None,
            "money": _money({name: times.step_s for name, times in arms.items()}, _gpus(scenario, mode), price),
            **_marks(lines),
        }

    return _report("step", scenario, {mode: of_mode(mode) for mode in modes})


def async_report(
    scenario: Scenario,
    modes: Sequence[Mode],
    stages: StagesOf,
    training_gpus: int,
    lag: int,
    updates: Updates,
    price: float | None,
) -> Record:
    """`paceline simulate async`: the period of a run whose generation goes on beside training."""

    def of_mode(mode: Mode) -> Record:
        pair = project_async(scenario, mode, stages[mode], lag, updates)
        alone = project_rollout(scenario, mode)
        arms = {"none": pair.none, scenario.draft.name: pair.spec}
        rollouts = {"none": alone.none.makespan_s, scenario.draft.name: alone.spec.makespan_s}
        lines = [*step_assumptions(scenario, mode, stages[mode]), *_beside_training(lag, updates)]
        gpus = None if scenario.measured(mode) else scenario.gpus + training_gpus
        return {
            "arms": {name: _async(run, rollouts[name], stages[mode]) for name, run in arms.items()},
            "step_speedup": pair.speedup,
            "ceiling": pair.none.period_s / stages[mode].total_s if stages[mode].total_s else None,
            "money": _money({name: run.period_s for name, run in arms.items()}, gpus, price),
            **_marks(lines),
        }

    modes_of = {mode: of_mode(mode) for mode in modes}
    return _report("async", scenario, modes_of, lag=lag, updates=updates, training_gpus=training_gpus)


def sweep_report(
    scenario: Scenario,
    modes: Sequence[Mode],
    axes: Mapping[str, Sequence[object]],
    stages: StagesOf | None,
    generation_share: float | None,
    updates: Updates,
) -> Record:
    """`paceline simulate sweep`: a grid."""
    named = {name: list(values) for name, values in axes.items()}

    def of_mode(mode: Mode) -> Record:
        given = None if stages is None else stages[mode]
        points = sweep(scenario, mode, axes, stages=given, generation_share=generation_share, updates=updates)
        lines = scenario.assumptions(mode)
        if given is not None or "lag" in axes:
            lines += (given or Stages()).assumptions()
        if "lag" in axes:
            lines += _beside_training(named["lag"], updates)
        if generation_share is not None:
            lines.append(Assumption("generation_share", generation_share, "assumed", "of a step without speculation"))
        lines.append(Assumption("axes", named, "assumed", "the grid: they replace the values of the same inputs here"))
        return {"points": [_point(point) for point in points], **_marks(lines)}

    return _report("sweep", scenario, {mode: of_mode(mode) for mode in modes}, axes=named)


def recommend_report(
    scenario: Scenario,
    modes: Sequence[Mode],
    drafts: Sequence[Draft],
    *,
    ks: Sequence[int] = LENGTHS,
    live: Sequence[int] = BATCHES,
    stages: StagesOf | None = None,
    training_gpus: int | None = None,
    lag: int = 1,
    updates: Updates = "in_flight",
) -> Record:
    """`paceline simulate recommend`: method and k by live batch, k of a rollout, break-even, and the split of GPUs.

    The split is searched where `training_gpus` is given: the GPUs that `stages` are seconds of.
    """

    def of_mode(mode: Mode) -> Record:
        requests = scenario.requests()
        context = float(np.mean(requests.lengths)) / 2 + float(np.mean(requests.prompts))
        cost = scenario.cost(mode)
        limit = int(getattr(cost, "max_live", max(live)))
        most = int(getattr(cost, "max_k", max(ks)))
        tried, batches = [k for k in ks if k <= most], [n for n in live if n <= limit]
        table = []
        for draft in drafts:
            if draft.acceptance is not None:
                own = scenario.replace(draft=draft)
                known = [k for k in tried if k <= draft.acceptance.max_k]
                table += cells(own.cost(mode), draft.method, draft.acceptance, batches, known, context=context)
        best = best_by_batch(table)
        own_ks = [k for k in tried if scenario.draft.acceptance and k <= scenario.draft.acceptance.max_k]
        choices = rollouts_by_k(scenario, mode, own_ks) if own_ks else []
        fastest = max(choices, key=lambda choice: choice.speedup) if choices else None
        lines = [*_with_drafts(scenario, drafts, mode), Assumption("context", context, "assumed", _CONTEXT)]
        record: Record = {
            "context": context,
            "cells": [{**asdict(cell), "gain": cell.gain} for cell in table],
            "best": {str(n): None if cell is None else [cell.method, cell.k, cell.gain] for n, cell in best.items()},
            "rollouts": [asdict(choice) for choice in choices],
            "fastest": None if fastest is None else asdict(fastest),
            "break_even": {str(k): break_even(scenario, mode, k) for k in own_ks},
        }
        if stages is not None and training_gpus is not None and not scenario.measured(mode):
            total = scenario.gpus + training_gpus
            found = splits(scenario, mode, total, stages[mode], training_gpus, lag, updates)
            record["splits"] = [asdict(split) for split in found]
            record["split"] = {
                "none": asdict(min(found, key=lambda split: split.none_s)),
                "spec": asdict(min(found, key=lambda split: split.spec_s)),
            }
            lines += [*stages[mode].assumptions(), *_beside_training(lag, updates)]
            lines.append(
                Assumption("training_gpus", training_gpus, "assumed", "of these stages; others scale perfectly")
            )
        return {**record, **_marks(lines)}

    names = [draft.name for draft in drafts]
    return _report("recommend", scenario, {mode: of_mode(mode) for mode in modes}, drafts=names, lag=lag)


def compare_report(
    scenario: Scenario, modes: Sequence[Mode], drafts: Sequence[Draft], stages: StagesOf | None, price: float | None
) -> Record:
    """`paceline simulate compare`: several drafts on the same requests."""

    def of_mode(mode: Mode) -> Record:
        arms: Record = {}
        choices = compare(scenario, mode, drafts)
        rest = None if stages is None else stages[mode].total_s
        step_of = {name: choice.rollout_s + (rest or 0.0) for name, choice in choices.items()}
        for name, choice in choices.items():
            arms[name] = {"rollout_s": choice.rollout_s, "rollout_speedup": choice.speedup}
            if rest is not None:
                arms[name] |= {"step_s": step_of[name], "step_speedup": step_of["none"] / step_of[name]}
        compared = [draft for draft in drafts if draft.method != "none"]
        lines = _with_drafts(scenario.replace(draft=(compared or [Draft()])[0]), compared, mode)
        lines += [] if stages is None else stages[mode].assumptions()
        return {"arms": arms, "money": _money(step_of, _gpus(scenario, mode), price), **_marks(lines)}

    return _report("compare", scenario, {mode: of_mode(mode) for mode in modes})


def validate_report(run: Run, validation: Validation, lines: Sequence[Assumption]) -> Record:
    """`paceline simulate validate`: predicted against measured seconds, step by step."""
    checks = [
        {
            "step": one.step,
            "predicted_s": one.predicted_s,
            "measured_s": one.measured_s,
            "error": one.error,
            "predicted_engine_steps": one.predicted_steps,
            "counted_engine_steps": one.counted_steps,
            "predicted_steps_by_k": {str(k): steps for k, steps in one.predicted_by_k.items()},
            "counted_steps_by_k": {str(k): steps for k, steps in sorted(one.counted_by_k.items())},
        }
        for one in validation.checks
    ]
    return {
        "verb": "validate",
        "run": str(run.path),
        "steps": checks,
        "error": validation.error,
        "first_step_counts": validation.first_counts,
        "marks": {"predicted_s": weakest(lines), "measured_s": "measured"},
        **_marks(lines),
    }


def _with_drafts(scenario: Scenario, drafts: Sequence[Draft], mode: Mode) -> list[Assumption]:
    """Of the scenario, and of the scenario with each of the drafts: what they share stands once in the output."""
    return [line for one in (scenario.draft, *drafts) for line in scenario.replace(draft=one).assumptions(mode)]


def _beside_training(lag: object, updates: Updates) -> list[Assumption]:
    return [
        Assumption("lag", lag, "assumed", "policy versions"),
        Assumption("updates", updates, "assumed", "what engines do when new weights come"),
        Assumption("kv cache after new weights", "kept", "assumed", "keys and values are not computed again"),
    ]


def _report(verb: str, scenario: Scenario, modes: Mapping[Mode, Record], **more: object) -> Record:
    return {"verb": verb, "scenario": scenario.to_dict(), **more, "modes": dict(modes)}


def _marks(lines: Sequence[Assumption]) -> Record:
    unique = list({(line.name, str(line.value)): line for line in lines}.values())
    return {
        "mark": weakest(unique),
        "rests_on": dict(counts_by_mark(unique)),
        "assumptions": [{**asdict(line), "value": _plain(line.value)} for line in unique],
    }


def _plain(value: object) -> object:
    """JSON has no infinity, and numpy's numbers are none of its own."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(part) for part in value]
    return value


def _gpus(scenario: Scenario, mode: Mode) -> int | None:
    """None for a measured engine, whose machine has no price by the GPU."""
    return None if scenario.measured(mode) else scenario.gpus


def _money(seconds: Mapping[str, float], gpus: int | None, price: float | None) -> Record | None:
    """GPU-hours and dollars per step and per thousand of them."""
    if gpus is None:
        return None
    money: Record = {"gpus": gpus, "price_per_gpu_hour": price, "arms": {}}
    first = next(iter(seconds.values()))
    for name, value in seconds.items():
        hours = value * gpus / 3600
        money["arms"][name] = {
            "gpu_hours": hours,
            "gpu_hours_saved_per_1000": (first - value) * gpus / 3.6,
            "dollars": None if price is None else hours * price,
            "dollars_per_1000": None if price is None else 1000 * hours * price,
            "dollars_saved_per_1000": None if price is None else (first - value) * gpus / 3.6 * price,
        }
    return money


def _rollout(rollout: Rollout) -> Record:
    return {
        "rollout_s": rollout.makespan_s,
        "median_finish_s": float(np.median(rollout.finish_s)),
        "tokens": float(rollout.tokens),
        "tokens_per_s": float(rollout.tokens) / rollout.makespan_s,
        "tokens_per_iteration": float(rollout.mean_tokens_per_iteration),
        "prefill_share": float(np.sum(rollout.prefill_s) / np.sum(rollout.engine_finish_s)),
        "preemptions": int(rollout.preemptions),
        "finished": _finished(rollout.finish_s),
        "live": _thinned(*rollout.active()),
    }


def _async(run: AsyncRun, rollout_s: float, stages: Stages) -> Record:
    period, exposed = closed_form(rollout_s, stages, run.lag)
    return {
        "step_s": run.period_s,
        "exposed_generate_s": run.exposed_generate_s,
        "closed_form": {"step_s": period, "exposed_generate_s": exposed},
        "mean_age": run.mean_age,
        "batches": {
            "first_s": run.first_s.tolist(),
            "done_s": run.done_s.tolist(),
            "begun_s": run.begun_s.tolist(),
            "learned_s": run.learned_s.tolist(),
            "ready_s": run.ready_s.tolist(),
            "age": run.age.tolist(),
        },
        "live": _thinned(*run.live),
    }


def _thinned(time_s: np.ndarray, live: np.ndarray) -> list[list[float]]:
    """At most `CURVE_POINTS` of a step function, evenly in time, its end included."""
    if len(time_s) > CURVE_POINTS:
        moments = np.linspace(time_s[0], time_s[-1], CURVE_POINTS)
        live = live[np.searchsorted(time_s, moments, side="right") - 1]
        time_s = moments
    return [[round(float(t), 6), float(n)] for t, n in zip(time_s, live, strict=True)]


def _finished(finish_s: np.ndarray) -> list[list[float]]:
    """(seconds, share of the responses that have ended): every second percent."""
    shares = np.linspace(0, 1, 51)
    return [[float(t), float(s)] for t, s in zip(np.quantile(finish_s, shares), shares, strict=True)]


def _point(point: Point) -> Record:
    return {
        "at": dict(point.at),
        "none_s": point.none_s,
        "spec_s": point.spec_s,
        "rollout_speedup": point.rollout_speedup,
        "step_speedup": point.step_speedup,
    }


# -- what a person reads -----------------------------------------------------------------------------------------------


def print_report(report: Record, console: Console | None = None) -> None:
    """To the terminal; a file or a pipe gets 110 columns, so that a stored output does not depend on the window."""
    console = console or Console()
    if not console.is_terminal:
        console.width = 110
    console.print(tables(report))


def tables(report: Record) -> Group:
    """All tables of a report."""
    body: dict[str, Any] = {
        "rollout": _rollout_tables,
        "step": _step_tables,
        "async": _async_tables,
        "sweep": _sweep_tables,
        "recommend": _recommend_tables,
        "validate": _validate_tables,
        "compare": _compare_tables,
    }
    parts: list[RenderableType] = [*body[report["verb"]](report)]
    modes = report.get("modes") or {"calibrated": report}
    return Group(*parts, _assumption_table(modes), _marks_line(modes))


def _rollout_tables(report: Record) -> list[RenderableType]:
    table, columns = _arm_table("rollout", report)
    _row(table, "seconds", columns, "rollout_s", 2, bold=True)
    _row(table, "half of the responses ended after", columns, "median_finish_s", 2)
    _row(table, "tokens per second", columns, "tokens_per_s", 0)
    _row(table, "tokens per live sequence and iteration", columns, "tokens_per_iteration", 3)
    _row(table, "share of prefill", columns, "prefill_share", 3)
    _row(table, "preempted sequences", columns, "preemptions", 0)
    return [
        table,
        _speedups(report, "rollout_speedup"),
        *_money_tables(report, "rollout"),
        *_sensitivity_tables(report),
    ]


def _step_tables(report: Record) -> list[RenderableType]:
    table, columns = _arm_table("seconds of a step", report, marks=True)
    first = next(iter(report["modes"].values()))
    for stage in ("data", "prepare", "generate", "logprob", "train", "step"):
        cells_of = [_number(arm["stage_s"][stage]) for _, arm in columns]
        table.add_row(stage, *cells_of, first["stage_marks"][stage], style="bold" if stage == "step" else None)
    table.add_row("generation share", *(f"{100 * arm['generation_share']:.0f} %" for _, arm in columns), "")
    return [
        table,
        _speedups(report, "rollout_speedup", "step_speedup", "ceiling"),
        *_money_tables(report, "step"),
    ]


def _async_tables(report: Record) -> list[RenderableType]:
    title = f"asynchronous step, lag {report['lag']}, {report['updates'].replace('_', ' ')}"
    table, columns = _arm_table(title, report)
    _row(table, "seconds per step", columns, "step_s", 2, bold=True)
    _row(table, "exposed generation, s", columns, "exposed_generate_s", 2)
    table.add_row("closed form, seconds per step", *(_number(arm["closed_form"]["step_s"]) for _, arm in columns))
    _row(table, "mean age of a batch, versions", columns, "mean_age", 2)
    return [table, _speedups(report, "step_speedup", "ceiling"), *_money_tables(report, "step")]


def _sweep_tables(report: Record) -> list[RenderableType]:
    axes: Mapping[str, Sequence[object]] = report["axes"]
    found: list[RenderableType] = []
    for mode, record in report["modes"].items():
        for figure in ("rollout_speedup", "step_speedup"):
            if any(point[figure] is not None for point in record["points"]):
                title = f"{figure.replace('_', ' ')}, {mode} ({record['mark']})"
                found.append(_grid(title, axes, record["points"], figure))
    return found


def _grid(title: str, axes: Mapping[str, Sequence[object]], points: Sequence[Record], figure: str) -> Table:
    """The last axis across, all others down."""
    *down, across = axes
    table = _table(title)
    for name in down:
        table.add_column(name, justify="right")
    for value in axes[across]:
        table.add_column(f"{across} {value}", justify="right")
    width = len(axes[across])
    for start in range(0, len(points), width):
        row = points[start : start + width]
        table.add_row(*(str(row[0]["at"][name]) for name in down), *(_times(point[figure]) for point in row))
    return table


def _recommend_tables(report: Record) -> list[RenderableType]:
    found: list[RenderableType] = []
    for mode, record in report["modes"].items():
        table = Table(
            title=Text(f"what to draft by live batch, {mode} ({record['mark']})"),
            title_justify="left",
            title_style="bold",
        )
        for name in ("sequences on an engine", "draft", "k", "gain over no speculation"):
            table.add_column(name, justify="right")
        for live, best in record["best"].items():
            table.add_row(live, *(("none", "0", "1.00x") if best is None else (best[0], str(best[1]), _times(best[2]))))
        found += [table, _break_even_table(mode, record)]
        if record["rollouts"]:
            found.append(_choices_table(mode, record, report["scenario"]["draft"].partition("@")[0]))
        if "splits" in record:
            found.append(_split_table(mode, record, report["lag"]))
    return found


def _break_even_table(mode: str, record: Record) -> Table:
    """c(k) by live batch: the acceptance length that a verify step must have."""
    title = f"break-even acceptance length, {mode} ({record['mark']})"
    table = _table(title)
    ks = sorted({cell["k"] for cell in record["cells"]})
    for name in ("draft", "sequences"):
        table.add_column(name, justify="right")
    for k in ks:
        table.add_column(f"k = {k}", justify="right")
    rows: dict[tuple[str, int], dict[int, Record]] = {}
    for cell in record["cells"]:
        rows.setdefault((cell["method"], cell["live"]), {})[cell["k"]] = cell
    for (method, live), row in rows.items():
        texts = []
        for k in ks:
            cell = row.get(k)
            if cell is None:
                texts.append("-")
                continue
            texts.append(f"{cell['cost_ratio']:.2f}{'' if cell['gain'] > 1 else ' !'}")
        table.add_row(method, str(live), *texts)
    if record["break_even"]:
        table.add_section()
        whole = [_number(record["break_even"].get(str(k))) for k in ks]
        table.add_row("rollout", "all", *whole)
    table.caption = Text("! the draft is accepted less than that", justify="left")
    return table


def _choices_table(mode: str, record: Record, method: str) -> Table:
    title = f"k for the whole rollout with {method}, {mode} ({record['mark']})"
    table = _table(title)
    for name in ("k", "rollout s", "rollout speedup"):
        table.add_column(name, justify="right")
    for choice in record["rollouts"]:
        name = "by live batch" if choice["k"] is None else str(choice["k"])
        fastest = choice == record["fastest"]
        row = (name, _number(choice["rollout_s"]), _times(choice["speedup"]))
        table.add_row(*row, style="bold" if fastest else None)
    return table


def _split_table(mode: str, record: Record, lag: int) -> Table:
    title = f"generation : training GPUs, lag {lag}, {mode} ({record['mark']})"
    table = _table(title)
    for name in ("generation", "training", "step s, none", "step s, speculation", "exposed generation s"):
        table.add_column(name, justify="right")
    for split in record["splits"]:
        best = split == record["split"]["spec"]
        table.add_row(
            str(split["generation_gpus"]),
            str(split["training_gpus"]),
            _number(split["none_s"]),
            _number(split["spec_s"]),
            _number(split["exposed_generate_s"]),
            style="bold" if best else None,
        )
    return table


def _validate_tables(report: Record) -> list[RenderableType]:
    table = _table(f"rollouts of {report['run']}")
    table.add_column("step", justify="right")
    table.add_column(f"predicted s ({report['marks']['predicted_s']})", justify="right")
    table.add_column("measured s", justify="right")
    for name in ("error", "engine steps", "counted", "by k", "counted by k"):
        table.add_column(name, justify="right")
    for number, check in enumerate(report["steps"]):
        left_out = number == 0 and not report["first_step_counts"]
        table.add_row(
            str(check["step"]),
            f"{check['predicted_s']:.3f}",
            f"{check['measured_s']:.3f}",
            f"{100 * check['error']:+.1f} %",
            f"{check['predicted_engine_steps']:.0f}",
            str(check["counted_engine_steps"]),
            _steps_by_k(check["predicted_steps_by_k"]),
            _steps_by_k(check["counted_steps_by_k"]),
            style="dim" if left_out else None,
        )
    table.add_section()
    table.add_row("all", "", "", f"{100 * report['error']:+.1f} %", style="bold")
    if not report["first_step_counts"]:
        table.caption = Text(
            "the first step also pays for what is made once, and is left out of the sum", justify="left"
        )
    return [table]


def _steps_by_k(steps: Mapping[str, float]) -> str:
    """Engine steps at each k: 0: 12, 3: 20."""
    return ", ".join(f"{k}: {number:.0f}" for k, number in steps.items())


def _compare_tables(report: Record) -> list[RenderableType]:
    table, columns = _arm_table("drafts on the same requests", report)
    _row(table, "rollout s", columns, "rollout_s", 2)
    table.add_row("rollout speedup", *(_times(arm["rollout_speedup"]) for _, arm in columns), style="bold")
    if "step_s" in columns[0][1]:
        _row(table, "step s", columns, "step_s", 2)
        table.add_row("step speedup", *(_times(arm["step_speedup"]) for _, arm in columns), style="bold")
    what = "step" if "step_s" in columns[0][1] else "rollout"
    return [table, *_money_tables(report, what)]


def _table(title: str) -> Table:
    """As wide as its title."""
    return Table(title=Text(title), title_justify="left", title_style="bold", min_width=min(len(title), 100))


def _arm_table(title: str, report: Record, marks: bool = False) -> tuple[Table, list[tuple[str, Record]]]:
    """A column per mode and arm, and their records."""
    table = _table(title)
    table.add_column("")
    columns = []
    for mode, record in report["modes"].items():
        for arm, figures in record["arms"].items():
            table.add_column(Text(f"{mode}\n{arm}"), justify="right")
            columns.append((mode, figures))
    if marks:
        table.add_column("mark")
    return table, columns


def _row(
    table: Table, label: str, columns: Sequence[tuple[str, Record]], key: str, digits: int, bold: bool = False
) -> None:
    texts = [f"{figures[key]:,.{digits}f}" for _, figures in columns]
    table.add_row(label, *texts, style="bold" if bold else None)


def _speedups(report: Record, *names: str) -> Table:
    table = _table("speedup by speculation")
    table.add_column("of")
    modes: Mapping[str, Record] = report["modes"]
    for mode, record in modes.items():
        table.add_column(f"{mode} ({record['mark']})", justify="right")
    words = {"ceiling": "step, were generation free", "rollout_speedup": "rollout", "step_speedup": "step"}
    for name in names:
        table.add_row(words[name], *(_times(record[name]) for record in modes.values()))
    return table


def _money_tables(report: Record, what: str) -> list[RenderableType]:
    found: list[RenderableType] = []
    for mode, record in report["modes"].items():
        money = record["money"]
        if money is None:
            continue
        price = money["price_per_gpu_hour"]
        at = "" if price is None else f", {price:g} $ per GPU-hour (assumed)"
        title = f"cost, {mode} ({record['mark']}): {money['gpus']} GPUs{at}"
        table = _table(title)
        names = ["", f"GPU-hours per {what}", "saved per 1,000"]
        names += [] if price is None else [f"$ per {what}", "$ per 1,000", "$ saved per 1,000"]
        for name in names:
            table.add_column(name, justify="right")
        for arm, figures in money["arms"].items():
            row = [f"{figures['gpu_hours']:.3f}", f"{figures['gpu_hours_saved_per_1000']:,.0f}"]
            if price is not None:
                row += [
                    f"{figures['dollars']:,.2f}",
                    f"{figures['dollars_per_1000']:,.0f}",
                    f"{figures['dollars_saved_per_1000']:,.0f}",
                ]
            table.add_row(arm, *row)
        found.append(table)
    return found


def _sensitivity_tables(report: Record) -> list[RenderableType]:
    found: list[RenderableType] = []
    for mode, record in report["modes"].items():
        if record["sensitivity"]:
            title = f"rollout speedup with an input 20 % lower and higher, {mode} ({record['mark']})"
            table = _table(title)
            for name in ("input", "lower", "higher"):
                table.add_column(name, justify="left" if name == "input" else "right")
            for one in record["sensitivity"]:
                table.add_row(one["name"], _times(one["low"]), _times(one["high"]))
            found.append(table)
    return found


def _assumption_table(modes: Mapping[str, Record]) -> Table:
    """Inputs by mark and source; one that is the same in all modes stands once."""
    table = _table("what this rests on")
    table.add_column("mark", no_wrap=True)
    table.add_column("inputs", overflow="fold", ratio=5)
    table.add_column("source", overflow="fold", ratio=4)
    of_modes: dict[tuple[str, str, str, str], list[str]] = {}
    for mode, record in modes.items():
        for line in record["assumptions"]:
            key = (line["mark"], line["source"], line["name"], _value(line["value"]))
            of_modes.setdefault(key, []).append(mode)
    rows: dict[tuple[str, str, str], list[str]] = {}
    for (mark, source, name, value), of in of_modes.items():
        where = "" if len(of) == len(modes) else f" ({', '.join(of)})"
        rows.setdefault((mark, source, where), []).append(f"{name} {value}")
    order = ("measured", "published", "fitted", "assumed")
    for (mark, source, where), inputs in sorted(rows.items(), key=lambda row: order.index(row[0][0])):
        table.add_row(mark, Text("; ".join(inputs)), Text(source + where))
    return table


def _marks_line(modes: Mapping[str, Record]) -> Text:
    parts = []
    for mode, record in modes.items():
        counts = ", ".join(f"{count} {mark}" for mark, count in sorted(record["rests_on"].items()))
        parts.append(f"{mode}: {counts}")
    return Text(
        "A projected figure carries the weakest mark of its inputs (assumed < fitted < published < measured). Inputs: "
        + "; ".join(parts)
        + ".",
        style="dim",
    )


def _value(value: object) -> str:
    match value:
        case float():
            return f"{value:.6g}"
        case dict():
            return ", ".join(f"{name} {part}" for name, part in value.items() if part)
        case list():
            return ", ".join(_value(part) for part in value)
        case _:
            return str(value)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if abs(value) < 1 else f"{value:,.2f}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"
