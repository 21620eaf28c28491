"""`paceline simulate`: light, deterministic, valid JSON with marks, and errors that name the remedy."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest

from paceline.cli.main import main

MARKS = {"measured", "fitted", "assumed", "published"}
SMALL = ["--rollouts", "64", "--gpus", "4", "--mean-length", "300", "--max-tokens", "1000", "--seed", "3"]
TINY = ["--rollouts", "16", "--gpus", "4", "--mean-length", "60", "--max-tokens", "200"]
COMMANDS = {
    "rollout": [*TINY, "--price", "3", "--sensitivity"],
    "step": [*SMALL, "--price", "3"],
    "async": [*TINY, "--training-gpus", "2", "--stages", "prepare=0.1,train=0.5"],
    "sweep": [*SMALL, "--over", "k=1,3", "--over", "alpha=1.5,3", "--generation-share", "0.65"],
    "recommend": [*TINY, "--training-gpus", "2", "--drafts", "eagle3@3:3.0,ngram@3:2.0"],
    "compare": [*SMALL, "--drafts", "eagle3@3:3.0,mtp@1:1.8,ngram@3:2.0", "--price", "3"],
}


def no_constants(name: str) -> float:
    raise AssertionError(f"{name} is no JSON")


@pytest.mark.parametrize("verb", COMMANDS)
def test_json_is_valid_and_every_figure_can_be_traced_to_marks(verb, capsys):
    assert main(["simulate", verb, *COMMANDS[verb], "--json"]) == 0
    out = capsys.readouterr().out
    report = json.loads(out, parse_constant=no_constants)
    assert list(report["modes"]) == ["ideal", "calibrated"]
    for record in report["modes"].values():
        assert record["mark"] in MARKS
        assert sum(record["rests_on"].values()) == len(record["assumptions"])
        assert {line["mark"] for line in record["assumptions"]} <= MARKS
        assert all(line["source"] for line in record["assumptions"])
    # The overhead that tells the modes apart is marked for what it is.
    fitted = {line["name"] for line in report["modes"]["calibrated"]["assumptions"] if line["mark"] == "fitted"}
    assert "efficiency.host_draft_s" in fitted


def assumed(report: dict) -> dict[str, list[object]]:
    """Name -> values of the assumptions of the ideal mode."""
    found: dict[str, list[object]] = {}
    for line in report["modes"]["ideal"]["assumptions"]:
        found.setdefault(line["name"], []).append(line["value"])
    return found


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("rollout", {"seed": [0], "engines": [4], "prefix_sharing": [True], "draft": ["eagle3@3"]}),
        ("sweep --over k=1 --generation-share 0.65", {"generation_share": [0.65], "axes": [{"k": [1]}]}),
        ("sweep --over lag=0,1", {"lag": [[0, 1]], "updates": ["in_flight"], "stage.train_s": [0.0]}),
        ("sweep --over k=1 --stages train=3", {"stage.train_s": [3.0]}),
        ("recommend --drafts ngram@2:1.5", {"draft": ["ngram@2"], "context": [31.0]}),
        ("recommend --draft mtp@1:1.8 --drafts ngram@2:1.5", {"draft": ["mtp@1", "ngram@2"]}),
        (
            "recommend --training-gpus 2 --stages train=3 --lag 2",
            {"stage.train_s": [3.0], "lag": [2], "updates": ["in_flight"], "training_gpus": [2]},
        ),
        ("compare --drafts ngram@2:1.5,mtp@1:1.8", {"draft": ["ngram@2", "mtp@1"]}),
        ("compare --drafts none --stages train=3", {"draft": ["none"], "stage.train_s": [3.0]}),
    ],
)
def test_everything_that_a_projection_rests_on_is_listed_and_nothing_else(words, expected, capsys):
    verb, *rest = words.split()
    assert main(["simulate", verb, *TINY, "--sigma", "0", "--prompt-tokens", "1", *rest, "--json"]) == 0
    found = assumed(json.loads(capsys.readouterr().out))
    assert {name: found.get(name) for name in expected} == expected
    assert len(found["kv_capacity_tokens"]) == len(found["drafter"])


def test_the_same_seed_gives_the_same_bytes_and_another_one_does_not(capsys):
    outputs = []
    for seed in ("3", "3", "4"):
        assert main(["simulate", "async", *TINY, "--stages", "train=0.1", "--seed", seed, "--json"]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != outputs[2]


@pytest.mark.parametrize("verb", COMMANDS)
def test_tables_name_the_assumptions_and_figures_are_drawn(verb, tmp_path, capsys):
    assert main(["simulate", verb, *COMMANDS[verb], "--plots", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "what this rests on" in out and "published" in out and "assumed" in out
    drawn = sorted(tmp_path.glob("*.png"))
    assert drawn and all(path.stat().st_size > 5000 for path in drawn)
    assert all(str(path) in out for path in drawn)


def test_speedups_of_the_json_are_ratios_of_its_seconds(capsys):
    assert main(["simulate", "step", *COMMANDS["step"], "--json"]) == 0
    for record in json.loads(capsys.readouterr().out)["modes"].values():
        none, spec = (arm["stage_s"] for arm in record["arms"].values())
        assert record["rollout_speedup"] == pytest.approx(none["generate"] / spec["generate"])
        assert record["step_speedup"] == pytest.approx(none["step"] / spec["step"])
        assert none["step"] == pytest.approx(
            math.fsum(none[s] for s in ("data", "prepare", "generate", "logprob", "train"))
        )
        hours = [arm["gpu_hours"] for arm in record["money"]["arms"].values()]
        assert hours[0] == pytest.approx(4 * none["step"] / 3600)
        assert record["money"]["arms"]["none"]["dollars"] == pytest.approx(3 * hours[0])


def test_simulating_loads_no_torch_and_help_loads_nothing_heavy():
    code = (
        "import sys\nfrom paceline.cli.main import main\n"
        f"main(['simulate', 'rollout', *{SMALL!r}, '--json'])\n"
        "print({'torch', 'transformers', 'vllm', 'ray', 'matplotlib'} & set(sys.modules))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.stdout.splitlines()[-1] == "set()", result.stderr
    code = (
        "import sys\nfrom paceline.cli.main import main\n"
        "try: main(['simulate', 'sweep', '--help'])\nexcept SystemExit: pass\n"
        "print({'torch', 'numpy', 'scipy', 'pydantic', 'matplotlib', 'rich'} & set(sys.modules))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.stdout.splitlines()[-1] == "set()", result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rollout", "--hardware", "gb20"], "Did you mean gb200?"),
        (["rollout", "--model", "qwen3-8"], "Did you mean qwen3-8b?"),
        (["rollout", "--draft", "eagle@3:2"], "Did you mean eagle3?"),
        (["rollout", "--hardwear", "h100"], "--hardwear is not an option; did you mean --hardware?"),
        (["rollout", "--draft", "eagle3@3:4.2"], "acceptance length 4.2"),
        (["rollout", "--gpus", "3", "--layout", "TP2"], "3 GPUs do not divide into engines of 2"),
        (["rollout", "--trace", "none.jsonl"], "--trace -> there is no file none.jsonl"),
        (["rollout", "--run", "none"], "none is not a run folder"),
        (["rollout", "--profile", "none.json"], "--profile -> there is no file none.json"),
        (["step", "--stages", "train=soon"], "--stages -> must be NAME=SECONDS"),
        (["step", "--stages", "tarin=3"], "no such stage: tarin"),
        (["step", "--stages", "train=1,data=1,train=2"], "--stages -> train is given twice"),
        (["step", "--stages", "train=3", "--generation-share", "0.6"], "leave one of them out"),
        (["sweep", "--over", "k"], "--over -> must be NAME=VALUE,VALUE"),
        (["sweep", "--over", "temperature=1"], "cannot go over temperature"),
        (["sweep", "--over", "max-num-seqs=8", "--over", "max_num_seqs=16"], "--over max_num_seqs is given twice"),
        (["async", "--lag", "-1"], "lag of -1"),
        (["rollout", "--group-size", "0"], "paceline: 1024 requests in groups of 0: choose"),
        (["rollout", "--prompt-tokens", "-4"], "paceline: prompts of -4 tokens: give 0"),
        (["rollout", "--engines", "0"], "paceline: engines is 0: give 1 or more"),
        (["rollout", "--max-num-seqs", "0"], "paceline: max_num_seqs is 0: give 1 or more"),
        (["step", "--transport", "0"], "0 GB/s never arrive"),
        (["recommend", "--training-gpus", "0"], "stages of 0 training GPUs"),
        (["sweep", "--draft", "none"], "needs a draft: --draft METHOD@K:ALPHA"),
        (["rollout", "--run.seed", "3"], "this command reads none"),
    ],
)
def test_what_cannot_work_is_one_paragraph_and_exit_code_2(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["simulate", *words]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == "" and "Traceback" not in captured.err


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ("compare --draft ngram@3:2.0 --drafts eagle3@3:3.0", "--draft"),
        ("compare --drafts none --spread 0.3", "--spread"),
        ("rollout --draft none --spread 0.3", "--spread"),
        ("rollout --draft none --sensitivity", "--sensitivity"),
        ("rollout --run RUN --rollouts 64", "--rollouts"),
        ("rollout --run RUN --group-size 2", "--group-size"),
        ("rollout --run RUN --prompt-tokens 9", "--prompt-tokens"),
        ("rollout --run RUN --trace lengths.jsonl", "--trace"),
        ("rollout --run RUN --spread 0.3", "--spread"),
        ("rollout --run RUN --sigma 1.0", "--sigma"),
        ("rollout --trace lengths.jsonl --sigma 1.0", "--sigma"),
        ("rollout --trace lengths.jsonl --mean-length 2500", "--mean-length"),
        ("rollout --trace lengths.jsonl --max-tokens 9", "--max-tokens"),
        ("rollout --profile p.json --gpus 32", "--gpus"),
        ("rollout --profile p.json --layout TP1", "--layout"),
        ("rollout --profile p.json --precision bf16", "--precision"),
        ("rollout --profile p.json --price 3", "--price"),
        ("async --profile p.json --training-gpus 2 --stages train=1", "--training-gpus"),
        ("step --stages train=1 --transport 5", "--transport"),
        ("step --generation-share 0.6 --transport 5", "--transport"),
        ("step --run RUN --transport 5", "--transport"),
        ("async --lag 0 --updates drained", "--updates"),
        ("recommend --stages train=1", "--stages"),
        ("recommend --generation-share 0.6", "--generation-share"),
        ("recommend --transport 5", "--transport"),
        ("recommend --lag 1", "--lag"),
        ("recommend --updates drained", "--updates"),
        ("recommend --training-gpus 4 --engines 2", "--engines"),
        ("sweep --updates drained", "--updates"),
        ("sweep --over lag=0 --updates drained", "--updates"),
        ("sweep --over lag=0,1 --generation-share 0.6", "--generation-share"),
        ("sweep --over gpus=8,16 --gpus 8", "--gpus"),
        ("sweep --over gpus=8,16 --engines 2", "--engines"),
        ("sweep --over mean_length=100,200 --mean-length 2500", "--mean-length"),
        ("sweep --over gpus=8,16 --profile p.json", "--over gpus"),
        ("sweep --over layout=TP1,TP2 --profile p.json", "--over layout"),
        ("sweep --over hardware=h100,h200 --profile p.json", "--over hardware"),
        ("sweep --over model=qwen3-8b --profile p.json", "--over model"),
    ],
)
def test_an_option_that_cannot_take_effect_is_refused_also_at_its_default_value(words, option, capsys):
    # Refused from the options alone: none of the files is looked for.
    assert main(["simulate", *words.split()]) == 2
    captured = capsys.readouterr()
    assert f"{option} has no effect here: " in captured.err
    assert captured.out == "" and "Traceback" not in captured.err


def test_what_is_recommended_for_one_draft_is_for_the_first_to_choose_from(capsys):
    words = ["simulate", "recommend", *TINY, "--training-gpus", "2", "--stages", "train=0.1", "--json"]
    found = []
    for choice in ("--draft=mtp@1:1.8", "--drafts=mtp@1:1.8,eagle3@3:3.0", "--drafts=none,mtp@1:1.8", "--spread=0"):
        assert main([*words, choice]) == 0
        modes = json.loads(capsys.readouterr().out)["modes"].values()
        found.append([[mode[key] for key in ("rollouts", "break_even", "splits")] for mode in modes])
    assert found[0] == found[1] == found[2] != found[3]


@pytest.mark.parametrize("verb", ["sweep", "compare"])
def test_an_option_of_another_command_is_not_offered_as_the_remedy(verb, capsys):
    assert main(["simulate", verb, "--transport", "5"]) == 2
    message = capsys.readouterr().err
    assert "--transport is not an option" in message and "mean --transport?" not in message


def test_names_are_known_in_any_case(capsys):
    assert main(["simulate", "rollout", *SMALL, "--model", "Qwen3-8B", "--hardware", "GB200", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["modes"]["ideal"]["arms"]
    assert main(["simulate", "rollout", *SMALL, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["modes"]["ideal"]["arms"] == first
