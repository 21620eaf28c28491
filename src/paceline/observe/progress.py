"""What a person sees while a run goes on: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class RunProgress(Protocol):
    """Told about a run; knows nothing of it."""

    def status(self, text: str) -> None:
        """What happens now, when it takes a while (loading, training a draft, evaluating)."""
        ...

    def step(self, metrics: Mapping[str, object], num_steps: int) -> None:
        """A step is done; `metrics` is its line of metrics.jsonl."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was."""
        ...


class Silent:
    """Says nothing."""

    def status(self, text: str) -> None:
        pass

    def step(self, metrics: Mapping[str, object], num_steps: int) -> None:
        pass

    def close(self) -> None:
        pass


class ConsoleProgress:
    """A live bar with the newest status when `console` is a terminal; one line per event when it is not."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._bar: Progress | None = None
        if self._console.is_terminal:
            self._bar = Progress(
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.description}", markup=False),
                console=self._console,
            )
            self._task = self._bar.add_task("starting", total=None)
            self._bar.start()

    def status(self, text: str) -> None:
        if self._bar is None:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            self._bar.update(self._task, description=text)

    def step(self, metrics: Mapping[str, object], num_steps: int) -> None:
        line = step_line(metrics, num_steps)
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        if self._bar is not None:
            step = metrics["step"]
            if not isinstance(step, int):
                raise TypeError(f"step is {step!r}, not a number")
            self._bar.update(self._task, total=num_steps, completed=step, description="")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def step_line(metrics: Mapping[str, object], num_steps: int) -> str:
    """One line about one step, from its line of metrics.jsonl."""
    reward, stages, acceptance, certificate = (
        _section(metrics, name) for name in ("reward", "stage_s", "acceptance", "certificate")
    )
    parts = [f"step {metrics['step']}/{num_steps}", f"reward {_number(reward['mean'], '.3f')}"]
    if acceptance["alpha"] is not None:
        parts.append(f"acceptance length {_number(acceptance['alpha'], '.2f')}")
    parts.append(f"certificate z {_number(certificate['z'], '+.1f')}")
    drafting = ""
    if acceptance["alpha"] is not None and metrics["engine_s"] is not None:
        drafting = f", {_number(_section(metrics, 'engine_s')['draft'], '.2f')} s of it drafting"
    seconds, all_seconds = _number(stages["generate"], ".2f"), _number(stages["step"], ".2f")
    parts.append(f"generate {seconds} s of {all_seconds} s{drafting}")
    alarms = metrics["alarms"]
    if alarms:
        parts.append(f"ALARM {alarms}")
    return " | ".join(parts)


def _section(metrics: Mapping[str, object], name: str) -> Mapping[str, object]:
    section = metrics[name]
    if not isinstance(section, Mapping):
        raise TypeError(f"{name} is {section!r}, not an object")
    return section


def _number(value: object, form: str) -> str:
    return format(value, form) if isinstance(value, int | float) else "-"


def throttled(progress: RunProgress) -> Callable[[str, float], None]:
    """A (what, fraction) callback that says something at every tenth."""
    said: dict[str, int] = {}

    def report(what: str, done: float) -> None:
        key = what.partition(",")[0]
        if said.get(key, -1) < int(done * 10):
            said[key] = int(done * 10)
            progress.status(f"{what}: {done:.0%}")

    return report
