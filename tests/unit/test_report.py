"""The tables say what the numbers say, and nothing where there is no number."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from paceline.cli.main import main
from paceline.report.table import comparison, runs


def summary() -> dict:
    stages = {"data": 0.001, "prepare": 0.21, "generate": 4.5, "logprob": 0.7, "train": 1.2, "step": 6.6}
    certificate = {"z": -0.42, "excess_nats": -0.0021, "ks_p": 0.371, "log_m": -1.25, "tokens": 123456}
    certificate["smallest_visible_nats"] = 0.0205
    arm = {
        "steps": 20,
        "stage_s": stages,
        "stages_over_step": 0.998,
        "acceptance_length": None,
        "tokens": 123456,
        "alarms": 0,
        "certificate": certificate,
        "reward": {"before": 0.41, "after": 0.63, "std": 0.48, "n": 256},
    }
    ratio = {"median": 1.62, "low": 1.48, "high": 1.77, "pairs": 9, "in_flight": 16}
    return {
        "recipe": "recipes/demo.toml",
        "arms": {
            "none": arm,
            "eagle3": {
                **arm,
                "stage_s": {**stages, "generate": 2.5, "step": 4.6},
                "acceptance_length": 2.87,
                "certificate": {**certificate, "z": None, "ks_p": None, "excess_nats": None},
            },
        },
        "speedup": {
            "eagle3": {
                "rollout": ratio,
                "rollout_64": {**ratio, "median": 1.11, "low": None, "high": None, "in_flight": 64},
                "step": {**ratio, "median": 1.35, "low": 1.3, "high": 1.4},
            }
        },
        "reward_agreement": {"eagle3": {"difference": 0.09, "standard_error": 0.04, "within_noise": False}},
    }


def rows(renderable: object) -> dict[str, list[str]]:
    """First cell -> other cells of every table row."""
    console = Console(width=120)
    with console.capture() as capture:
        console.print(renderable)
    found: dict[str, list[str]] = {}
    for text in capture.get().splitlines():
        cells = [cell.strip() for cell in re.split("[│┃]", text)[1:-1]]
        if cells:
            found.setdefault(cells[0], cells[1:])
    return found


def test_each_stage_stands_beside_that_of_the_other_arm():
    table = rows(comparison(summary()))
    assert table["generate"] == ["4.50", "2.50"]
    assert table["data"] == ["0.001", "0.001"]
    assert table["step"] == ["6.60", "4.60"]
    assert table["stages / step, worst step"] == ["99.8 %", "99.8 %"]


def test_a_speedup_says_of_what_with_its_interval_and_how_many_were_in_flight():
    table = Console(width=120)
    with table.capture() as capture:
        table.print(comparison(summary()))
    text = capture.get()
    cells = [
        [cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in text.splitlines() if "in flight" in line
    ]
    assert cells == [
        ["eagle3", "rollout, 16 in flight", "1.62x", "1.48 - 1.77", "9"],
        ["eagle3", "rollout, 64 in flight", "1.11x", "-", "9"],
        ["eagle3", "step, 16 in flight", "1.35x", "1.30 - 1.40", "9"],
    ]


def test_what_could_not_be_computed_is_a_dash_and_never_a_zero():
    table = rows(comparison(summary()))
    assert table["acceptance length"] == ["-", "2.87"]
    assert table["z (about standard normal)"] == ["-0.42", "-"]
    assert table["smallest bias seen at 4 sigma"] == ["0.0205", "0.0205"]
    assert table["Kolmogorov-Smirnov p"] == ["0.371", "-"]
    assert table["certificate: tokens"] == ["123,456", "123,456"]


@pytest.mark.parametrize(("within", "verdict"), [(True, "within noise"), (False, "not within noise")])
def test_the_verdict_on_the_rewards_stands_with_its_standard_error(within, verdict):
    record = summary()
    record["reward_agreement"]["eagle3"]["within_noise"] = within
    table = rows(comparison(record))
    assert table["difference of after"] == ["", "+0.090"]
    assert table["two standard errors"] == ["", "0.080"]
    assert table["verdict"] == ["", verdict]


SPECULATION = {
    "per_request": {"pooled": 2.87, "mean": 2.61},
    "marginal": [0.9, 0.6, 0.37],
    "emitted": {"accepted": 0.65, "recovered": 0.2, "bonus": 0.1, "plain": 0.05},
    "mean_live_batch": 11.96,
    "k_chosen": {"0": 0.25, "3": 0.75},
    "engine_s": {"draft": 0.31, "verify": 1.6, "sample": 0.4, "other": None},
}


def test_how_the_tokens_came_about_stands_beside_the_other_arm_and_without_figures_nowhere():
    record = summary()
    assert "tokens: bonus" not in rows(comparison(record))
    record["arms"]["eagle3"]["speculation"] = SPECULATION
    table = rows(comparison(record))
    assert table["acceptance length, pooled"] == ["-", "2.87"]
    assert table["mean over requests"] == ["-", "2.61"]
    assert table["accepted at position 1, 2, ..."] == ["-", "90 % 60 % 37 %"]
    assert table["tokens: recovered"] == ["-", "20 %"]
    assert table["k, share of engine steps"] == ["-", "0: 25 %, 3: 75 %"]
    assert table["sequences per engine step, mean"] == ["-", "12.0"]
    assert table["seconds of generate: draft"] == ["-", "0.310"]
    assert table["seconds of generate: other"] == ["-", "-"]


def metrics_line(step: int, reward: float, accepted: int) -> dict:
    return {
        "step": step,
        "stage_s": {"data": 0.1, "prepare": 0.1, "generate": 1.0, "logprob": 0.1, "train": 0.1, "step": 1.4},
        "tokens": {"response": 10, "accepted": accepted},
        "verify_steps": 10,
        "reward": {"mean": reward},
        "certificate": {"z": 0.0},
        "alarms": ["acceptance: none"] if step == 2 else [],
    }


def test_runs_side_by_side_show_first_and_last_reward_and_all_alarms():
    lines = [metrics_line(1, 0.25, 10), metrics_line(2, 0.5, 20), metrics_line(3, 0.75, 0)]
    table = rows(runs({"a": lines, "b": lines[:1]}))
    assert table["training reward, first step"] == ["0.250", "0.250"]
    assert table["training reward, last step"] == ["0.750", "0.250"]
    assert table["acceptance length"] == ["2.00", "2.00"]
    assert table["alarms"] == ["1", "0"]
    assert table["steps"] == ["3", "1"]


def test_report_prints_a_comparison_and_runs_from_their_folders(tmp_path: Path, capsys):
    (tmp_path / "both").mkdir()
    (tmp_path / "both" / "summary.json").write_text(json.dumps(summary()))
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "metrics.jsonl").write_text(json.dumps(metrics_line(1, 0.25, 10)) + "\n")
    assert main(["report", str(tmp_path / "both"), str(tmp_path / "one")]) == 0
    printed = capsys.readouterr().out
    assert "1.62x" in printed
    assert "training reward, first step" in printed


def test_report_of_something_else_is_one_paragraph_and_exit_code_2(tmp_path: Path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "summary.json").write_text("{")
    (tmp_path / "young").mkdir()
    (tmp_path / "young" / "metrics.jsonl").write_text("")
    for name, words in [("empty", "is not a run folder"), ("broken", "is not JSON"), ("young", "no finished step yet")]:
        assert main(["report", str(tmp_path / name)]) == 2
        captured = capsys.readouterr()
        assert words in captured.err
        assert captured.out == ""
