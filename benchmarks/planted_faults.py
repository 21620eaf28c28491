"""Planted faults x tests, as a table: `python -m benchmarks.planted_faults`.

`exact` is the largest deviation of probability of the enumerated law; the other columns are p-values (or the bound that
the betting martingale gives). A star marks what flags the path.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from benchmarks.bars import Bar
from paceline.testing.faults import FAULTS, P_LIMIT, RIGHT, TESTS, VISIBLE, detect

CAUGHT = f"caught: the exact law deviates by more than {VISIBLE}, or a p-value below {P_LIMIT}"
SILENT = f"flagged by no test: the exact law deviates by less than {VISIBLE}, and no p-value below {P_LIMIT}"


def fault_bars() -> Iterable[Bar]:
    """One bar per right path and per planted fault: the tests that flag it, and all figures as the spread."""
    for name, path in RIGHT.items():
        findings = detect(path)
        flagged_by = findings.caught_by()
        yield Bar(f"right path: {name}", flagged_by, SILENT, not flagged_by, asdict(findings))
    for name, path in FAULTS.items():
        findings = detect(path)
        caught_by = findings.caught_by()
        yield Bar(f"planted fault: {name}", caught_by, CAUGHT, bool(caught_by), asdict(findings))


def print_table() -> None:
    """The same as a table for people."""
    print(f"{'':<62}" + "".join(f"{test:>12}" for test in TESTS))
    for kind, paths in (("right path", RIGHT), ("planted fault", FAULTS)):
        for name, path in paths.items():
            findings = detect(path)
            marked = findings.caught_by()
            cells = [f"{value:.1e}{'*' if test in marked else ' '}" for test, value in asdict(findings).items()]
            print(f"{kind + ': ' + name:<62}" + "".join(f"{cell:>12}" for cell in cells), flush=True)


if __name__ == "__main__":
    print_table()
