"""Laws of projections, grids, recommendations and replays."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from paceline.drafts.length import LengthChooser
from paceline.drafts.profile import StepCosts
from paceline.errors import ConfigError
from paceline.sim import validate
from paceline.sim.acceptance import Acceptance
from paceline.sim.efficiency import IDEAL
from paceline.sim.figures import Origin
from paceline.sim.lengths import LognormalLengths
from paceline.sim.profile import ProfileCost, load_profile, regular_grid
from paceline.sim.project import baseline, default_stages, fastest_layout, project_step, smallest_layout, speculative
from paceline.sim.published import eight_b_measured_s, eight_b_seconds
from paceline.sim.recommend import best_by_batch, break_even, cells, compare, rollouts_by_k, splits
from paceline.sim.rollout import Engines, simulate_rollout
from paceline.sim.scenario import EIGHT_B_OVERHEAD, Scenario, parse_draft, parse_layout
from paceline.sim.step import given, step_speedup
from paceline.sim.sweep import sensitivities, sweep
from paceline.sim.validate import Run, check_profile, read_run, replay, replay_step
from paceline.sim.workload import Requests
from paceline.types import Block

SMALL = Scenario(rollouts=96, gpus=4, lengths=LognormalLengths(400, 0.7, 2000), max_num_seqs=64)
STAGES = given(Origin("assumed", "for a test"), prepare=0.1, logprob=0.5, train=1.0)


@pytest.mark.parametrize("mode", ["ideal", "calibrated"])
def test_a_rollout_is_the_faster_the_more_is_accepted(mode):
    seconds = [
        speculative(SMALL.replace(draft=parse_draft(f"eagle3@3:{alpha}")), mode).makespan_s for alpha in (1, 2, 3, 4)
    ]
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > 1.5 * seconds[-1]


def test_no_drafts_are_exactly_no_speculation():
    none = SMALL.replace(draft=parse_draft("none"))
    assert speculative(none, "ideal").makespan_s == baseline(SMALL, "ideal").makespan_s


def test_software_overhead_only_ever_costs():
    ideal = SMALL.replace(efficiency=IDEAL)
    assert baseline(ideal, "calibrated").makespan_s == baseline(ideal, "ideal").makespan_s
    assert baseline(SMALL, "calibrated").makespan_s > baseline(SMALL, "ideal").makespan_s


def test_the_step_gains_by_amdahl_from_its_rollout():
    pair = project_step(SMALL, "ideal", STAGES)
    assert pair.speedup == pytest.approx(step_speedup(pair.none.generation_share, pair.rollout.speedup))


def test_a_grid_is_each_of_its_points_alone_and_marks_what_cannot_be():
    points = sweep(SMALL, "ideal", {"gpus": [2, 4], "k": [1, 3], "alpha": [1.5, 3.0]}, generation_share=0.65)
    by_place = {tuple(point.at.values()): point for point in points}
    assert len(points) == 8
    assert by_place[2, 1, 3.0].rollout_speedup is None  # alpha above k + 1
    for gpus in (2, 4):
        alone = SMALL.replace(gpus=gpus, draft=parse_draft("eagle3@3:3.0"))
        expected = baseline(alone, "ideal").makespan_s / speculative(alone, "ideal").makespan_s
        assert by_place[gpus, 3, 3.0].rollout_speedup == pytest.approx(expected, rel=1e-12)
        assert by_place[gpus, 3, 3.0].step_speedup == pytest.approx(step_speedup(0.65, expected))


def test_a_grid_over_drafts_without_a_draft_is_refused():
    for axes in ({"k": [1, 3]}, {"alpha": [1.5]}):
        with pytest.raises(ConfigError, match="needs a draft: --draft"):
            sweep(SMALL.replace(draft=parse_draft("none")), "ideal", axes)


@pytest.mark.parametrize("axis", ["gpus", "layout", "hardware", "model"])
def test_a_grid_over_what_a_measured_engine_has_once_is_refused(axis):
    with pytest.raises(ConfigError, match=f"--over {axis} has no effect on the engine of --profile"):
        sweep(SMALL.replace(profile=Path("p.json")), "calibrated", {axis: [1]})


def test_a_draft_longer_than_usual_keeps_its_acceptance_length():
    draft = parse_draft("history@24:6.0")
    assert draft.acceptance is not None and float(draft.acceptance.tokens(24)) == pytest.approx(6.0)


@pytest.mark.parametrize("name", ["gpus", "rollouts", "max_num_seqs", "engines"])
def test_none_of_them_is_refused_and_not_replaced_by_a_default(name):
    with pytest.raises(ConfigError, match=f"{name} is 0: give 1 or more"):
        SMALL.replace(**{name: 0})


def test_a_grid_over_lag_is_the_synchronous_rollout_at_lag_0():
    (at_zero,) = sweep(SMALL, "ideal", {"lag": [0]})
    # Of the last of four batches, each of a seed of its own.
    last = SMALL.replace(seed=SMALL.seed + 3)
    assert at_zero.none_s == pytest.approx(baseline(last, "ideal").makespan_s, rel=1e-9)
    assert at_zero.spec_s == pytest.approx(speculative(last, "ideal").makespan_s, rel=1e-9)


def test_an_axis_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="cannot go over temperature"):
        sweep(SMALL, "ideal", {"temperature": [1.0]})


def test_sensitivities_point_the_right_way():
    found = {one.name: one for one in sensitivities(SMALL, "calibrated")}
    assert found["accepted per step"].low < found["accepted per step"].high
    assert found["host_draft_s"].low > found["host_draft_s"].high
    assert [one.swing for one in found.values()] == sorted((one.swing for one in found.values()), reverse=True)


def test_c_of_k_is_where_speculation_starts_to_pay():
    cost = SMALL.cost("calibrated")
    draft = SMALL.draft.acceptance
    assert draft is not None
    for cell in cells(cost, "eagle3", draft, [1, 64], [1, 3, 7], context=500.0):
        verify_s, plain_s = (float(cost.iteration_s(cell.live, 500.0 * cell.live, k)) for k in (cell.k, 0))
        assert cell.cost_ratio == pytest.approx(verify_s / plain_s)
        at_c = Acceptance.from_length(min(cell.cost_ratio, cell.k + 1.0), cell.k)
        (again,) = cells(cost, "eagle3", at_c, [cell.live], [cell.k], context=500.0)
        assert again.gain == pytest.approx(min(1.0, (cell.k + 1.0) / cell.cost_ratio))


def test_the_best_draft_at_a_batch_is_none_when_nothing_pays():
    cost = SMALL.cost("calibrated")
    poor = Acceptance.from_length(1.05, 1)
    assert best_by_batch(cells(cost, "eagle3", poor, [1, 8], [1], context=100.0)) == {1: None, 8: None}


def test_break_even_divides_faster_from_slower_rollouts():
    alpha = break_even(SMALL, "calibrated", 3)
    assert alpha is not None and 1.0 < alpha < 4.0
    plain_s = baseline(SMALL, "calibrated").makespan_s
    below, above = (
        speculative(SMALL.replace(draft=replace(SMALL.draft, acceptance=Acceptance.from_length(a, 3))), "calibrated")
        for a in (alpha - 0.15, alpha + 0.15)
    )
    assert above.makespan_s < plain_s < below.makespan_s


def test_k_by_live_batch_is_not_slower_than_the_best_fixed_k():
    choices = rollouts_by_k(SMALL, "ideal", (1, 3, 5, 7))
    assert choices[0].k == 0 and choices[0].speedup == 1.0
    by_batch = choices[-1]
    assert by_batch.k is None
    assert by_batch.rollout_s <= 1.02 * min(choice.rollout_s for choice in choices)


def test_drafts_are_compared_on_the_same_requests():
    found = compare(SMALL, "ideal", [parse_draft("eagle3@3:3.0"), parse_draft("ngram@3:3.0")])
    assert list(found) == ["none", "eagle3@3", "ngram@3"]
    # The same acceptance without a draft to run is faster.
    assert found["ngram@3"].rollout_s < found["eagle3@3"].rollout_s < found["none"].rollout_s


def test_more_generation_gpus_leave_fewer_to_train_and_the_best_split_is_between():
    stages = given(Origin("assumed", "for a test"), train=2.0)
    found = splits(SMALL.replace(rollouts=24), "calibrated", 12, stages, 4, lag=1, limit=4)
    assert [split.generation_gpus + split.training_gpus for split in found] == [12] * len(found)
    with pytest.raises(ConfigError, match="stages of 0 training GPUs"):
        splits(SMALL, "calibrated", 12, stages, 0, lag=1)
    assert found[-1].spec_s > min(split.spec_s for split in found)
    assert all(split.spec_s <= split.none_s + 1e-9 for split in found)


def test_the_layout_rule_takes_the_fastest_without_speculation_and_the_default_the_smallest_that_fits():
    scenario = SMALL.replace(gpus=8)
    seconds = {
        name: baseline(scenario.replace(layout=name), "ideal").makespan_s for name in ("TP1", "TP2", "TP4", "TP8")
    }
    assert fastest_layout(scenario) == min(seconds, key=lambda name: seconds[name])
    assert smallest_layout(scenario) == "TP1"
    # 470 GB of bf16 weights and their cache: four GPUs of 80 GB hold neither.
    large = scenario.replace(model="qwen3-235b-a22b", hardware="h100", gpus=16)
    assert smallest_layout(large) != "TP4"
    with pytest.raises(ConfigError, match="no layout fits"):
        smallest_layout(large.replace(gpus=4))


@pytest.mark.parametrize("name", ["TP1", "TP4", "EP8", "EP32xTP4", "EP64", "DP2xTP4"])
def test_a_layout_reads_back_from_its_name(name):
    assert parse_layout(name).name == name


@pytest.mark.parametrize("text", ["", "TP", "4", "EP8x", "TP4xEP8", "tp4"])
def test_a_layout_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match="write TP4"):
        parse_layout(text)


def test_a_draft_reads_back_its_acceptance_length():
    draft = parse_draft("eagle3@3:3.32")
    assert draft.acceptance is not None and float(draft.acceptance.tokens(3)) == pytest.approx(3.32)
    for text, message in (
        ("egale3@3:3.0", "Did you mean eagle3"),
        ("eagle3", "METHOD@K:ALPHA"),
        ("eagle3@3:4.5", "4.5"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_draft(text)


def profile(clock: str = "wall") -> dict[str, object]:
    """Contexts that differ from batch to batch, as a calibration finds them."""
    points = []
    for n in (1, 2, 4, 8, 16):
        for context in (40.0 + n, 70.0 + n):
            for k in range(4):
                seconds = 0.004 + 0.001 * k + 0.0004 * n * (k + 1) + 1e-6 * n * context
                points.append({"n": n, "k": k, "context": context, "seconds": seconds, "cpu_seconds": 2 * seconds})
    return {
        "points": points,
        "clock": clock,
        "threads": 1,
        "draft": {"method": "eagle3"},
        "parameters": {"position": 2e-4, "attended": 1e-7},
    }


def test_a_measured_cost_gives_its_own_points_back():
    cost = ProfileCost(profile())
    for point in profile()["points"]:  # type: ignore[union-attr]
        there = cost.iteration_s(
            np.array([point["n"]]), np.array([point["n"] * point["context"]]), np.array([point["k"]])
        )
        assert float(there[0]) == pytest.approx(point["seconds"], rel=0.02)
    at = (np.array([4]), np.array([200.0]), np.array([2]))
    assert float(ProfileCost(profile("cpu")).iteration_s(*at)[0]) == pytest.approx(2 * float(cost.iteration_s(*at)[0]))


@pytest.mark.parametrize("clock", ["wall", "cpu"])
def test_a_step_of_prompts_costs_what_it_was_measured_to(clock):
    times = 1 if clock == "wall" else 2
    prompts = [{"n": n, "tokens": 40.0, "seconds": s, "cpu_seconds": 2 * s} for n, s in ((8, 0.5), (1, 0.1))]
    cost = ProfileCost({**profile(clock), "prompts": prompts})
    # The prompts' step is charged as one of the same sequences without drafts, and what it took beyond that.
    for n, seconds in ((1, 0.1), (8, 0.5)):
        step_s = float(cost.iteration_s(n, 40.0 * n, 0)) + float(cost.prefill_s(40.0 * n, 0.0))
        assert step_s == pytest.approx(times * seconds)
    # In between and beyond in proportion, and no prompt costs nothing.
    one, eight, sixteen = cost.prefill_s([40.0, 320.0, 640.0], 0.0)
    assert cost.prefill_s(180.0, 0.0) == pytest.approx((one + eight) / 2)
    assert sixteen == pytest.approx(2 * eight)
    assert cost.prefill_s(0.0, 0.0) == 0
    assert {line.mark for line in cost.assumptions() if line.name == "cost.prefill_s"} == {"measured"}
    # Without such steps: at the fitted cost of a position, which is said.
    older = ProfileCost(profile(clock))
    assert older.prefill_s(100.0, 5000.0) == pytest.approx(100 * 2e-4 + 5000 * 1e-7)
    assert {line.mark for line in older.assumptions() if line.name == "cost.prefill_s"} == {"fitted"}


def test_every_n_and_k_of_a_profile_stands_at_the_same_contexts():
    grid = regular_grid(profile())
    assert {point["context"] for point in grid} == {41.0, 86.0}
    assert len(grid) == 5 * 4 * 2
    with pytest.raises(ConfigError, match="damaged point"):
        regular_grid({"points": [{"n": 1, "k": 0}]})


def test_a_profile_file_is_read_and_a_broken_one_refused(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profile()))
    assert ProfileCost(load_profile(path)).max_k == 3
    for text in ("not json", "{}", "[]"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="paceline calibrate"):
            load_profile(path)


def write_run(folder: Path, k: int, generate_s: list[float], lengths: list[int], **engine: object) -> Path:
    """A run folder with what a replay reads: one step per entry of `generate_s`."""
    folder.mkdir()
    method = "eagle3" if k else "none"
    settings = {"max_num_seqs": 8, "threads": 1, **engine}
    rows = "\n".join(f"{name} = {value}" for name, value in settings.items())
    (folder / "config.toml").write_text(
        f'[engine]\nkind = "vllm"\n{rows}\n[draft]\nmethod = "{method}"\n[algorithm]\ngroup_size = 4\n'
    )
    conditional = [0.8, 0.7, 0.6][:k]
    blocks = sum(length - 1 for length in lengths)
    with (folder / "metrics.jsonl").open("w") as file:
        for step, seconds in enumerate(generate_s, start=1):
            record = {
                "step": step,
                "lengths": lengths,
                "tokens": {"prompt": 12 * len(lengths)},
                "acceptance": {"conditional": conditional},
                "k_histogram": {"0": len(lengths), str(k): blocks} if k else {"0": blocks + len(lengths)},
                "engine_steps": 31,
                "stage_s": {"data": 0.01, "prepare": 0.02, "generate": seconds, "logprob": 0.3, "train": 0.4},
            }
            file.write(json.dumps(record) + "\n")
    return folder


@pytest.mark.parametrize("k", [0, 3])
def test_replaying_a_run_through_its_own_cost_gives_its_seconds(k, tmp_path):
    lengths = [int(length) for length in np.random.default_rng(k).integers(5, 60, 24)]
    cost = ProfileCost(profile())
    acceptance = Acceptance((0.8, 0.7, 0.6)) if k else None
    # 1 + ceil((T - 1) / g) engine steps for a response of T tokens, as the engine takes them.
    gain = float(acceptance.tokens(k)) if acceptance else 1.0
    steps = 1 + np.ceil((np.array(lengths) - 1) / gain - 1e-9)
    requests = Requests(steps * gain, np.full(24, 12), np.arange(24), np.zeros(24), np.zeros(24))
    truth = simulate_rollout(requests, cost, acceptance, k, Engines(1, 8, prefix_sharing=False)).makespan_s
    run = read_run(write_run(tmp_path / "run", k, [9.0, truth, truth], lengths))
    assert run.steps[0].k == k
    validation = replay(run, cost)
    assert abs(validation.error) < 0.01  # the first step, with its 9 s, does not count
    assert validation.checks[0].error < -0.5
    slower = ProfileCost({**profile(), "points": [{**p, "seconds": 1.5 * p["seconds"]} for p in profile()["points"]]})  # type: ignore[union-attr]
    assert replay(run, slower).error > 0.4


def change_lines(folder: Path, change: Callable[[int, dict], None]) -> Run:
    """The run once `change(index, record)` has been at every line of its metrics."""
    metrics = folder / "metrics.jsonl"
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    for index, record in enumerate(records):
        change(index, record)
    metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    return read_run(folder)


def write_adaptive_run(folder: Path, lengths: list[int], conditional: list[float], steps: int) -> Run:
    """A run that chose k before every engine step, of `steps` steps that all took a second."""
    write_run(folder, 3, [1.0] * steps, lengths)
    config = folder / "config.toml"
    chosen = 'method = "eagle3"\nchoose_k = "adaptive"\nnum_draft_tokens = 3\nprobe_share = 0.02'
    config.write_text(config.read_text().replace('method = "eagle3"', chosen))

    def change(_: int, record: dict) -> None:
        record["acceptance"]["conditional"] = conditional
        record["batch_by_step"] = [[1, 8, 0], [20, 8, 0], [11, 2, 3]]

    return change_lines(folder, change)


def costs_of(cost: ProfileCost) -> StepCosts:
    """The same costs as the rule of a run reads them."""
    return StepCosts([1, 2, 4, 8], [[float(cost.iteration_s(n, 60 * n, k)) for k in range(4)] for n in (1, 2, 4, 8)])


def test_a_replay_chooses_k_by_the_rule_of_the_run(tmp_path):
    lengths = [6] * 12 + [30, 60, 120, 240]
    cost = ProfileCost(profile())
    costs = costs_of(cost)
    # What is never accepted is drafted until the rule has seen it, and not from then on.
    run = write_adaptive_run(tmp_path / "poor", lengths, [0.02, 0.02, 0.02], steps=3)
    first, *later = replay(run, cost, costs).checks
    assert any(k > 0 for k in first.predicted_by_k)
    plain = replay_step(run.steps[0], cost, 8, 0, None).makespan_s
    for check in later:
        assert set(check.predicted_by_k) == {0}
        assert check.predicted_s == pytest.approx(plain)
    assert first.counted_by_k == {0: 21, 3: 11}
    # What is accepted is drafted, and where k differs between batches the choice beats every fixed k.
    run = write_adaptive_run(tmp_path / "good", lengths, [0.75, 0.7, 0.65], steps=3)
    chosen = replay(run, cost, costs).checks[-1]
    acceptance = Acceptance((0.75, 0.7, 0.65))
    fixed = {k: replay_step(run.steps[0], cost, 8, k, acceptance).makespan_s for k in range(4)}
    assert len(chosen.predicted_by_k) > 1
    assert chosen.predicted_s < min(fixed.values())
    with pytest.raises(ConfigError, match="its profile is needed"):
        replay(run, cost)
    with pytest.raises(ConfigError, match="measured up to 1"):
        replay(run, cost, StepCosts([1, 8], [[0.01, 0.02], [0.02, 0.04]]))


def test_the_rule_of_a_replayed_run_sees_the_blocks_that_such_a_run_has(tmp_path, monkeypatch):
    lengths, cost = [6] * 12 + [30, 60, 120, 240], ProfileCost(profile())
    seen: list[tuple[list[Block], list[int]]] = []

    class Watched(LengthChooser):
        def observe(self, blocks):
            blocks = list(blocks)
            seen.append((blocks, [0, *(self.usual(n) for n in range(1, 9))]))
            super().observe(blocks)

    monkeypatch.setattr(validate, "LengthChooser", Watched)
    accepted = [[0.8, 0.7, 0.6], [0.4, 0.3, 0.2], [], [0.05, 0.04, 0.03], [0.03, 0.02, 0.01]]
    run = write_adaptive_run(tmp_path / "run", lengths, [], steps=5)
    run = change_lines(run.path, lambda index, record: record["acceptance"].update(conditional=accepted[index]))
    checks = replay(run, cost, costs_of(cost)).checks
    # A step without drafts has the acceptance of the run: the mean of the others but the first.
    accepted[2] = [fmean(column) for column in zip(accepted[1], accepted[3], accepted[4], strict=True)]
    assert len(seen) == 5
    for step, check, conditional, (blocks, usual) in zip(run.steps, checks, accepted, seen, strict=True):
        rollout = replay_step(step, cost, 8, usual.__getitem__, Acceptance(tuple(conditional)))
        assert rollout.makespan_s == check.predicted_s
        by_batch = Counter(block.live_batch for block in blocks)
        probed_s = 0.0
        for n in range(1, 9):
            # As many blocks at each batch as iterations of so many sequences.
            assert by_batch[n] == n * rollout.segments.iterations[rollout.segments.live == n].sum()
            asked = Counter(block.num_asked for block in blocks if block.live_batch == n)
            assert set(asked) <= {usual[n], 3}
            if usual[n] < 3:
                longer_s = cost.iteration_s(n, 60 * n, 3) - cost.iteration_s(n, 60 * n, usual[n])
                probed_s += asked[3] / n * float(longer_s)
        # Probing costs its share at most, and one step for each bucket of the batch that had credit.
        assert probed_s <= 0.02 * 1.1 * rollout.makespan_s + 4 * float(cost.iteration_s(8, 480, 3))
        for position, share in enumerate(conditional):
            reached = [block for block in blocks if block.num_asked > position and block.num_accepted >= position]
            if len(reached) > 50:
                hits = sum(block.num_accepted > position for block in reached)
                # Counts are rounded for each batch and k.
                assert hits / len(reached) == pytest.approx(share, abs=20 / len(reached))
    # The last step drafts by probing alone, and that is seen.
    blocks, usual = seen[-1]
    assert usual == [0] * 9 and 0 < sum(block.num_asked == 3 for block in blocks) < 0.05 * len(blocks)


def test_a_position_that_a_run_never_drafted_is_taken_to_be_like_the_one_before(tmp_path):
    run = write_adaptive_run(tmp_path / "run", [100] * 8, [0.9], steps=2)
    cost = ProfileCost(profile())
    last = replay(run, cost, costs_of(cost)).checks[-1]
    assert set(last.predicted_by_k) == {3}
    assert last.predicted_s == replay_step(run.steps[0], cost, 8, 3, Acceptance((0.9, 0.9, 0.9))).makespan_s


def test_a_schedule_that_always_asks_for_k_is_replayed_as_k(tmp_path):
    run = read_run(write_run(tmp_path / "run", 3, [1.0], [5, 9, 33, 60] * 4))
    acceptance, cost = Acceptance((0.8, 0.7, 0.6)), ProfileCost(profile())
    fixed = replay_step(run.steps[0], cost, 8, 3, acceptance)
    assert replay_step(run.steps[0], cost, 8, lambda live: 3, acceptance).finish_s.tolist() == fixed.finish_s.tolist()


def test_a_run_of_look_ups_is_replayed_with_those_that_found_nothing(tmp_path):
    lengths = [40] * 16
    run = read_run(write_run(tmp_path / "run", 3, [1.0], lengths))
    found = change_lines(run.path, lambda _, record: record.update(k_histogram={"0": 16 + 312, "3": 312}))
    cost = ProfileCost(profile())
    (check,) = replay(found, cost).checks
    half = replay_step(run.steps[0], cost, 8, 3, Acceptance((0.4, 0.7, 0.6)))
    assert check.predicted_s == half.makespan_s


def test_a_look_up_that_was_not_asked_has_not_failed(tmp_path):
    # 8 + 160 blocks in steps without drafts, 22 in steps that asked for some: all but the first are asked for ones.
    run = write_adaptive_run(tmp_path / "run", [20] * 8 + [4] * 2, [0.5], steps=1)
    run = change_lines(run.path, lambda _, record: record.update(k_histogram={"0": 8 + 160 + 2 + 9, "3": 11}))
    # Two responses were admitted later, in steps that asked: 20 blocks were, and 11 found something.
    assert run.steps[0].drafted_share == pytest.approx(11 / 20)
    # Elsewhere as here: what is projected from the run accepts nothing where nothing was found.
    acceptance = run.acceptance()
    assert acceptance is not None and acceptance.conditional == pytest.approx((0.5 * 11 / 20,))


def test_a_run_gives_lengths_acceptance_and_stages_as_measured(tmp_path):
    def first(index: int, record: dict) -> None:
        # The first step pays for what is made once, and its draft may be another one.
        if index == 0:
            record["stage_s"] |= {"prepare": 9.0, "train": 9.0}
            record["acceptance"]["conditional"] = [0.1, 0.1, 0.1]

    folder = write_run(tmp_path / "run", 3, [1.0, 1.0], [5, 9, 13, 20])
    run = change_lines(folder, first)
    assert run.acceptance() == Acceptance((0.8, 0.7, 0.6))
    assert run.lengths().values == (5, 9, 13, 20) * 2
    assert run.stages().seconds() == {"data": 0.01, "prepare": 0.02, "logprob": 0.3, "train": 0.4}
    assert {line.mark for line in (*run.stages().assumptions(), *run.lengths().assumptions())} == {"measured"}


def test_a_profile_of_other_threads_or_drafts_is_refused(tmp_path):
    run = read_run(write_run(tmp_path / "run", 3, [1.0], [5, 9], threads=2))
    with pytest.raises(ConfigError, match="threads: 1 there, 2 in the run"):
        check_profile(run, profile(), Path("p.json"))
    other = {**profile(), "threads": 2, "draft": {"method": "ngram"}}
    with pytest.raises(ConfigError, match="ngram there, eagle3 in the run"):
        check_profile(run, other, Path("p.json"))


def test_what_is_no_run_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no metrics\.jsonl"):
        read_run(tmp_path)
    folder = write_run(tmp_path / "run", 0, [1.0], [5])
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match="cannot be replayed"):
        read_run(folder)


def test_a_measured_engine_has_no_modelled_stages():
    with pytest.raises(ConfigError, match="--stages or --run"):
        default_stages(SMALL.replace(profile=Path("p.json")), "calibrated", 4)


def test_the_stored_overhead_meets_the_published_seconds_that_it_was_fitted_to():
    points = [(run, k) for run in ("rl_zero", "rl_think") for k in (0, 3, 5, 7)]
    measured = np.array([eight_b_measured_s(*point) for point in points])
    assert np.abs(eight_b_seconds(EIGHT_B_OVERHEAD, points) / measured - 1).max() <= 0.10
    # Without it the best k is another one: 7 instead of 3.
    ideal = dict(zip(points, eight_b_seconds(IDEAL, points), strict=True))
    assert ideal["rl_zero", 7] < ideal["rl_zero", 3] and measured[3] > measured[1]


def test_the_gain_falls_with_the_batch_until_speculation_stops_paying():
    cost = SMALL.cost("ideal")
    acceptance = Acceptance.from_length(1.9, 3)
    gains = [cell.gain for cell in cells(cost, "eagle3", acceptance, [1, 8, 64, 256, 1024], [3], context=500.0)]
    assert gains == sorted(gains, reverse=True)
    assert gains[0] > 1.5 and gains[-1] < 1.0
    assert best_by_batch(cells(cost, "eagle3", acceptance, [1, 1024], [3], context=500.0))[1024] is None
