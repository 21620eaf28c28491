"""Figures of a report (`sim.report`), as PNG files. matplotlib is imported here and nowhere else in `sim`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import ConfigError

Record = Mapping[str, Any]

STAGE_COLORS = {
    "data": "tab:gray",
    "prepare": "tab:purple",
    "generate": "tab:blue",
    "logprob": "tab:orange",
    "train": "tab:green",
}


def write_plots(report: Record, folder: Path) -> list[Path]:
    """Draw everything that `report` holds into `folder`. Returns the files.

    Raises `ConfigError` when matplotlib is not installed or the folder cannot be made.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ConfigError("--plots needs matplotlib: install it with `pip install paceline[plots]`") from error
    matplotlib.use("Agg")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--plots -> the folder {folder} cannot be made: {error}") from error
    drawn: list[Path] = []
    for name, draw in _FIGURES[report["verb"]].items():
        figure = draw(report)
        if figure is not None:
            path = folder / f"{report['verb']}-{name}.png"
            # Without the version and date that it would note, the same report gives the same bytes.
            figure.savefig(path, dpi=120, bbox_inches="tight", metadata={"Software": None})
            drawn.append(path)
    return drawn


def _axes(rows: int = 1, columns: int = 1, width: float = 7.0, height: float = 4.0) -> tuple[Any, list[Any]]:
    """A figure outside of pyplot, which would keep it alive, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, list(np.ravel(figure.subplots(rows, columns, squeeze=False)))


def live_batch(report: Record) -> Any:
    """Live sequences against time, and the share of responses that have ended."""
    modes = report["modes"]
    figure, axes = _axes(1, len(modes))
    for axis, (mode, record) in zip(axes, modes.items(), strict=True):
        share = axis.twinx()
        for number, (arm, figures) in enumerate(record["arms"].items()):
            time_s, live = zip(*figures["live"], strict=True)
            axis.step(time_s, live, where="post", color=f"C{number}", label=arm)
            ended_s, shares = zip(*figures["finished"], strict=True)
            share.plot(ended_s, shares, color=f"C{number}", linestyle=":", linewidth=1)
        axis.set(title=f"{mode} ({record['mark']})", xlabel="s", ylabel="live sequences, all engines")
        share.set(ylabel="share of responses ended (dotted)", ylim=(0, 1.02))
        axis.legend()
    return figure


def tornado(report: Record) -> Any:
    """Rollout speedup with every input 20 % lower and higher."""
    modes = {mode: record for mode, record in report["modes"].items() if record["sensitivity"]}
    if not modes:
        return None
    figure, axes = _axes(1, len(modes))
    for axis, (mode, record) in zip(axes, modes.items(), strict=True):
        middle = record["rollout_speedup"]
        for row, one in enumerate(reversed(record["sensitivity"])):
            axis.barh(row, one["low"] - middle, left=middle, color="tab:blue", height=0.6)
            axis.barh(row, one["high"] - middle, left=middle, color="tab:red", height=0.6)
        names = [one["name"] for one in reversed(record["sensitivity"])]
        axis.set_yticks(range(len(names)), names)
        axis.axvline(middle, color="black", linewidth=1)
        axis.set(title=f"{mode} ({record['mark']}): 20 % lower blue, higher red", xlabel="rollout speedup")
    return figure


def step_timeline(report: Record) -> Any:
    """The stages of a synchronous step, one arm below the other."""
    modes = report["modes"]
    figure, axes = _axes(1, len(modes), height=2.6)
    for axis, (mode, record) in zip(axes, modes.items(), strict=True):
        arms = list(record["arms"].items())
        for row, (_, figures) in enumerate(arms):
            start = 0.0
            for stage, color in STAGE_COLORS.items():
                seconds = figures["stage_s"][stage]
                axis.barh(row, seconds, left=start, color=color, label=stage if row == 0 else None)
                start += seconds
        axis.set_yticks(range(len(arms)), [arm for arm, _ in arms])
        axis.invert_yaxis()
        axis.set(title=f"{mode} ({record['mark']})", xlabel="s")
        axis.legend(ncols=5, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.25))
    return figure


def async_timeline(report: Record) -> Any:
    """What is generated and learned when, the wait for rollouts, and the age of each batch."""
    modes = report["modes"]
    arms = [(mode, record, arm) for mode, record in modes.items() for arm in record["arms"]]
    figure, axes = _axes(len(arms), 1, width=10, height=2.4)
    for axis, (mode, record, arm) in zip(axes, arms, strict=True):
        batches = record["arms"][arm]["batches"]
        free = 0.0
        for number, (first, done, begun, learned, ready, age) in enumerate(zip(*batches.values(), strict=True)):
            # Batches under way together lie beside one another.
            lane = number % (report["lag"] + 1)
            axis.barh(lane, done - first, left=first, color=STAGE_COLORS["generate"], height=0.8, edgecolor="white")
            axis.text(first, lane, f" {number} (age {age})", va="center", fontsize="small", color="white")
            learner = report["lag"] + 1
            axis.barh(learner, begun - free, left=free, color="tab:red", alpha=0.5, height=0.8)
            axis.barh(learner, learned - begun, left=begun, color=STAGE_COLORS["train"], height=0.8)
            axis.barh(learner, ready - learned, left=learned, color=STAGE_COLORS["prepare"], height=0.8)
            free = ready
        names = [*(["generate"] + [""] * report["lag"]), "learn"]
        axis.set_yticks(range(len(names)), names)
        axis.invert_yaxis()
        axis.set(title=f"{mode} ({record['mark']}), {arm}: learner waits red, prepare purple", xlabel="s")
    return figure


def heat_maps(report: Record) -> Any:
    """Speedups over the last two axes of a sweep; other axes at their first value."""
    axes_of: Mapping[str, Sequence[object]] = report["axes"]
    if len(axes_of) < 2:
        return _curve(report)
    *others, down, across = axes_of
    maps = [
        (mode, record, name)
        for mode, record in report["modes"].items()
        for name in ("rollout_speedup", "step_speedup")
        if any(point[name] is not None for point in record["points"])
    ]
    if not maps:
        return None
    figure, axes = _axes(1, len(maps), width=1.5 + 0.8 * len(axes_of[across]), height=1.2 + 0.6 * len(axes_of[down]))
    for axis, (mode, record, name) in zip(axes, maps, strict=True):
        points = [p for p in record["points"] if all(p["at"][other] == axes_of[other][0] for other in others)]
        shape = (len(axes_of[down]), len(axes_of[across]))
        values = np.array([np.nan if p[name] is None else p[name] for p in points]).reshape(shape)
        axis.imshow(values, aspect="auto", cmap="viridis")
        for (row, column), value in np.ndenumerate(values):
            if np.isfinite(value):
                axis.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize="small", color="white")
        axis.set_xticks(range(shape[1]), [str(value) for value in axes_of[across]])
        axis.set_yticks(range(shape[0]), [str(value) for value in axes_of[down]])
        title = f"{name.replace('_', ' ')}, {mode} ({record['mark']})"
        axis.set(title=title, xlabel=across, ylabel=down)
    return figure


def _curve(report: Record) -> Any:
    (name, values), *_ = report["axes"].items()
    figure, (axis,) = _axes()
    for mode, record in report["modes"].items():
        speedups = [point["rollout_speedup"] for point in record["points"]]
        axis.plot([str(value) for value in values], speedups, marker="o", label=f"{mode} ({record['mark']})")
    axis.axhline(1.0, color="black", linewidth=0.5)
    axis.set(xlabel=name, ylabel="rollout speedup")
    axis.legend()
    return figure


def lengths_by_batch(report: Record) -> Any:
    """Gain of every k at every batch, a map per draft, with the best marked."""
    maps = [
        (mode, record, method)
        for mode, record in report["modes"].items()
        for method in dict.fromkeys(cell["method"] for cell in record["cells"])
    ]
    if not maps:
        return None
    figure, axes = _axes(1, len(maps), width=5.5, height=4.2)
    for axis, (mode, record, method) in zip(axes, maps, strict=True):
        own = [cell for cell in record["cells"] if cell["method"] == method]
        ks = sorted({cell["k"] for cell in own})
        live = sorted({cell["live"] for cell in own})
        gain = {(cell["live"], cell["k"]): cell["gain"] for cell in own}
        values = np.array([[gain.get((n, k), np.nan) for k in ks] for n in live])
        axis.imshow(values, aspect="auto", cmap="RdYlGn", vmin=0.5, vmax=max(1.5, float(np.nanmax(values))))
        for row, n in enumerate(live):
            best = record["best"][str(n)]
            for column, k in enumerate(ks):
                chosen = best is not None and best[0] == method and best[1] == k
                weight = "bold" if chosen else "normal"
                text = f"{values[row, column]:.2f}"
                axis.text(column, row, text, ha="center", va="center", fontsize="small", fontweight=weight)
        axis.set_xticks(range(len(ks)), [str(k) for k in ks])
        axis.set_yticks(range(len(live)), [str(n) for n in live])
        axis.set(title=f"{method}, {mode} ({record['mark']})", xlabel="k", ylabel="live sequences on an engine")
    return figure


def split_curve(report: Record) -> Any:
    """Seconds of an asynchronous step against the number of GPUs that generate."""
    modes = {mode: record for mode, record in report["modes"].items() if "splits" in record}
    if not modes:
        return None
    figure, axes = _axes(1, len(modes))
    for axis, (mode, record) in zip(axes, modes.items(), strict=True):
        gpus = [split["generation_gpus"] for split in record["splits"]]
        for key, label in (("none_s", "no speculation"), ("spec_s", "speculation")):
            axis.plot(gpus, [split[key] for split in record["splits"]], marker="o", label=label)
        axis.set(title=f"{mode} ({record['mark']})", xlabel="GPUs that generate", ylabel="s per step", ylim=(0, None))
        axis.legend()
    return figure


def predicted_and_measured(report: Record) -> Any:
    """Rollout seconds of each step of a run."""
    figure, (axis,) = _axes()
    steps = [check["step"] for check in report["steps"]]
    axis.plot(steps, [check["measured_s"] for check in report["steps"]], marker="o", label="measured")
    label = f"predicted ({report['marks']['predicted_s']})"
    axis.plot(steps, [check["predicted_s"] for check in report["steps"]], marker="x", label=label)
    axis.set(xlabel="step", ylabel="rollout s", ylim=(0, None))
    axis.legend()
    return figure


def drafts(report: Record) -> Any:
    """Rollout speedup of each draft."""
    modes = report["modes"]
    figure, axes = _axes(1, len(modes))
    for axis, (mode, record) in zip(axes, modes.items(), strict=True):
        arms = record["arms"]
        axis.bar(list(arms), [figures["rollout_speedup"] for figures in arms.values()])
        axis.axhline(1.0, color="black", linewidth=0.5)
        axis.set(title=f"{mode} ({record['mark']})", ylabel="rollout speedup")
    return figure


_FIGURES: Mapping[str, Mapping[str, Callable[[Record], Any]]] = {
    "rollout": {"live": live_batch, "sensitivity": tornado},
    "step": {"timeline": step_timeline},
    "async": {"timeline": async_timeline},
    "sweep": {"map": heat_maps},
    "recommend": {"k": lengths_by_batch, "split": split_curve},
    "validate": {"steps": predicted_and_measured},
    "compare": {"drafts": drafts},
}
