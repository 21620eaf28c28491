"""The roofline: formulas against hand-worked numbers, and the limits that the formulas must have."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest

from paceline.errors import ConfigError
from paceline.sim.comm import allgather_s, allreduce_s, alltoall_s
from paceline.sim.cost import BF16, FP8, Eagle3Drafter, MtpDrafter, NoModelDrafter, RooflineCost, join
from paceline.sim.efficiency import IDEAL, PERFECT
from paceline.sim.figures import Origin
from paceline.sim.hardware import HARDWARE, hardware
from paceline.sim.layout import DENSE_LAYOUTS, PUBLISHED_LAYOUTS, Layout, num_engines
from paceline.sim.models import MODELS, model, model_from_config
from paceline.sim.moe import busiest_tokens, expert_shares, experts_read, hit_probability

GB200 = hardware("gb200")
DENSE = model("qwen3-8b")
SPARSE = model("qwen3-235b-a22b")
GUESS = Origin("assumed", "test")


def cost_of(shape=DENSE, layout=DENSE_LAYOUTS[0], **options) -> RooflineCost:
    return RooflineCost(GB200, shape, layout, **options)


def test_joined_times_are_the_sum_at_one_and_the_larger_at_infinity():
    rng = np.random.default_rng(0)
    left, right = rng.exponential(1e-4, 50), rng.exponential(1e-4, 50)
    left[0] = right[1] = 0.0
    left[2] = right[2] = 0.0
    np.testing.assert_allclose(join(left, right, 1.0), left + right, rtol=1e-14)
    np.testing.assert_array_equal(join(left, right, math.inf), np.maximum(left, right))
    np.testing.assert_allclose(join(left, right, 2.0), np.hypot(left, right), rtol=1e-14)
    np.testing.assert_allclose(join(left, right, 3.0), np.cbrt(left**3 + right**3), rtol=1e-12)
    np.testing.assert_allclose(join(left, right, 500.0), np.maximum(left, right), rtol=2e-3)
    norms = [join(left, right, p) for p in (1.0, 1.5, 2.0, 4.0, math.inf)]
    assert all((larger >= smaller - 1e-18).all() for larger, smaller in itertools.pairwise(norms))


def test_one_token_touches_its_experts_and_many_touch_all():
    for skew in (0.0, 0.6, 1.0):
        for top in (1, 8):
            shares = expert_shares(128, top, skew)
            one = 128 * hit_probability(np.array(1.0), 128, top, skew)
            assert one == pytest.approx(shares.sum(), rel=1e-12)
            assert experts_read(np.array(1.0), 128, top, skew, ranks=1) == pytest.approx(one)
            assert experts_read(np.array(1e7), 128, top, skew, ranks=1) == pytest.approx(128)
            assert experts_read(np.array(1e7), 128, top, skew, ranks=8) == pytest.approx(16)
    # Without a limit on the most popular expert the shares sum to the choices of a token.
    assert expert_shares(128, 8, 0.6).sum() == pytest.approx(8)
    assert expert_shares(4, 4, 0.6).tolist() == [1.0] * 4


def test_experts_read_rise_with_tokens_and_fall_with_skew():
    tokens = np.array([1, 2, 4, 8, 16, 64, 256, 1024.0])
    read = experts_read(tokens, 128, 8, 0.6, ranks=8)
    assert (np.diff(read) >= 0).all() and (np.diff(read[:6]) > 0).all()
    assert read[0] <= 8 and read[-1] <= 16
    assert (experts_read(tokens[1:6], 128, 8, 1.2, 1) < experts_read(tokens[1:6], 128, 8, 0.0, 1)).all()


def test_experts_hit_equal_a_count_of_drawn_choices():
    """200,000 tokens drawn one expert at a time; the bound is six standard errors, false alarm below 1e-8."""
    shares = expert_shares(16, 1, 0.6)
    rng = np.random.default_rng(0)
    draws = rng.choice(16, p=shares / shares.sum(), size=(20_000, 10))
    distinct = np.array([len(set(row)) for row in draws])
    expected = 16 * hit_probability(np.array(10.0), 16, 1, 0.6)
    assert abs(distinct.mean() - expected) < 6 * distinct.std() / math.sqrt(len(distinct))
    uniform = 16 * hit_probability(np.array(10.0), 16, 1, 0.0)
    assert abs(distinct.mean() - uniform) > 6 * distinct.std() / math.sqrt(len(distinct))


def test_the_busiest_rank_has_the_mean_on_one_rank_and_more_on_many():
    tokens = np.array([1.0, 100.0])
    np.testing.assert_allclose(busiest_tokens(tokens, 8, 1), tokens * 8)
    assert (busiest_tokens(tokens, 8, 16) > tokens * 8 / 16).all()


def test_collectives_cost_nothing_on_one_gpu_and_the_ring_bound_on_many():
    size = np.array([1e6])
    assert allreduce_s(GB200, 1, size, 8e-6) == alltoall_s(GB200, 1, size, 8e-6) == allgather_s(GB200, 1, size, 1) == 0
    assert allreduce_s(GB200, 4, size, 8e-6)[0] == pytest.approx(8e-6 + 2 * 0.75 * 1e6 / 900e9)
    assert alltoall_s(GB200, 4, size, 0.0)[0] == pytest.approx(0.75 * 1e6 / 900e9)
    # An all-reduce is a reduce-scatter and an all-gather.
    assert 2 * allgather_s(GB200, 4, size, 0.0)[0] == pytest.approx(allreduce_s(GB200, 4, size, 0.0)[0])
    # Outside the link domain the network is what limits.
    assert allreduce_s(hardware("h200"), 16, size, 0.0)[0] == pytest.approx(2 * 15 / 16 * 1e6 / 50e9)


def test_parameters_and_kv_bytes_meet_the_published_model_sizes():
    expected = {
        "qwen3-8b": (8.19e9, 7.57e9, 147_456),
        "qwen3-30b-a3b": (30.5e9, 3.04e9, 98_304),
        "qwen3-235b-a22b": (235.1e9, 21.6e9, 192_512),
        "llama-3.1-8b": (8.03e9, 7.50e9, 131_072),
        "smollm2-135m": (0.134e9, 0.134e9, 23_040),
    }
    assert set(expected) == set(MODELS)
    for name, (total, active, kv) in expected.items():
        assert model(name).parameters == pytest.approx(total, rel=5e-3)
        assert model(name).active_parameters == pytest.approx(active, rel=5e-3)
        assert model(name).kv_bytes_per_token() == kv


def test_a_step_of_one_sequence_at_the_peak_reads_every_weight_once():
    """Bare roofline, one sequence, no cache: bytes of the weights that a token uses / bandwidth."""
    cost = cost_of(efficiency=PERFECT)
    seconds = float(cost.iteration_s(1.0, 0.0, 0.0))
    weights = DENSE.active_parameters * 2 / GB200.memory_bytes_per_s
    assert seconds == pytest.approx(weights, rel=0.01)
    assert float(cost.iteration_s(1.0, 1e6, 0.0)) - seconds == pytest.approx(1e6 * 147_456 / 8e12, rel=1e-9)


def test_a_large_prefill_at_the_peak_does_two_flop_per_parameter_and_token():
    cost = cost_of(efficiency=PERFECT, precision=FP8)
    layers = DENSE.active_parameters - DENSE.vocab_size * DENSE.hidden_size
    tokens = 1e6
    linear = float(cost.prefill_s(tokens, 0.0))
    # Norms and other small operators are moved bytes that nothing hides.
    norms = DENSE.num_layers * 14 * tokens * DENSE.hidden_size / GB200.memory_bytes_per_s
    assert linear - norms == pytest.approx(2 * layers * tokens / GB200.fp8_flops, rel=0.01)
    pairs = tokens**2 / 2
    attention = float(cost.prefill_s(tokens, pairs)) - linear
    assert attention == pytest.approx(4 * pairs * 36 * 32 * 128 / GB200.fp8_flops, rel=0.01)
    assert float(cost.prefill_s(0.0, 0.0)) == 0.0


@pytest.mark.parametrize("drafter", [Eagle3Drafter(), MtpDrafter(), NoModelDrafter()])
@pytest.mark.parametrize(
    ("shape", "layout"), [(DENSE, Layout(2, 2)), *((SPARSE, layout) for layout in PUBLISHED_LAYOUTS)]
)
def test_an_iteration_is_the_sum_of_its_parts_and_linear_in_the_cache(drafter, shape, layout):
    # Eight and more ranks per expert cut a block of scales: no FP8.
    precision = BF16 if layout.expert_tensor_parallel >= 8 else FP8
    cost = cost_of(shape, layout, drafter=drafter, precision=precision)
    live, k = np.array([1, 7, 64, 200]), np.array([0, 3, 5, 1])
    parts = cost.breakdown_s(live, live * 1000.0, k)
    np.testing.assert_allclose(sum(parts.values()), cost.iteration_s(live, live * 1000.0, k), rtol=1e-12)
    assert all((part >= 0).all() for part in parts.values())
    low, middle, high = (cost.iteration_s(live, live * context, k) for context in (0.0, 4000.0, 8000.0))
    np.testing.assert_allclose(middle, (low + high) / 2, rtol=1e-12)
    assert (high > low).all()


def test_a_draft_costs_nothing_at_k_zero_or_without_a_model():
    live = np.array([1.0, 32.0])
    for drafter in (Eagle3Drafter(), MtpDrafter(), NoModelDrafter()):
        assert (cost_of(drafter=drafter).breakdown_s(live, live * 500, 0)["draft"] == 0).all()
    assert (cost_of(drafter=NoModelDrafter()).breakdown_s(live, live * 500, 5)["draft"] == 0).all()
    eagle3 = cost_of(drafter=Eagle3Drafter())
    three, five = (eagle3.breakdown_s(live, live * 500, k)["draft"] for k in (3, 5))
    assert (five > three).all() and (three > 0).all()


def test_iterations_cost_more_with_every_draft_token():
    for shape, layout in ((DENSE, Layout(1, 1)), (SPARSE, Layout(32, 4, 32))):
        seconds = [cost_of(shape, layout).iteration_s(np.array([1.0, 64.0]), np.array([1e3, 2e5]), k) for k in range(9)]
        assert all((later > earlier).all() for earlier, later in itertools.pairwise(seconds))


def test_software_terms_enter_as_they_are_named():
    efficiency = IDEAL.replace(GUESS, host_s=1e-3, host_spec_s=2e-3, host_draft_s=3e-3, sampler_s=1e-6)
    software = cost_of(efficiency=efficiency).breakdown_s(np.array([10.0]), 0.0, np.array([4.0]))["software"]
    assert software[0] == pytest.approx(1e-3 + 2e-3 + 4 * 3e-3 + 1e-6 * 10 * 5)
    plain = cost_of(efficiency=efficiency).breakdown_s(np.array([10.0]), 0.0, np.array([0.0]))["software"]
    assert plain[0] == pytest.approx(1e-3 + 1e-6 * 10)
    ngram = cost_of(efficiency=efficiency, drafter=NoModelDrafter()).breakdown_s(10.0, 0.0, 4.0)["software"]
    assert ngram == pytest.approx(1e-3 + 2e-3 + 1e-6 * 10 * 5)
    assert (cost_of().breakdown_s(10.0, 0.0, 4.0)["software"]) == 0.0


def test_tiles_make_a_step_in_the_cost_between_three_and_five_drafts():
    """32 query heads on 8 KV heads, 16 rows a tile: 4 (k + 1) rows, one pass up to k = 3, two from k = 4 to 7."""
    cost = cost_of(efficiency=PERFECT.replace(GUESS, kv_reread=1.0, tile_rows=16))
    reads = [float(cost.breakdown_s(1.0, 1e6, k)["attention"]) for k in (0, 3, 4, 7, 8)]
    assert reads[1] == pytest.approx(reads[0], rel=1e-9)
    assert reads[2] == pytest.approx(2 * reads[0], rel=1e-9) == pytest.approx(reads[3], rel=1e-9)
    assert reads[4] == pytest.approx(3 * reads[0], rel=1e-9)


def test_attention_ranks_share_the_sequences():
    one, eight = cost_of(SPARSE, Layout(8, 8)), cost_of(SPARSE, Layout(8, 1, 8))
    # 4 KV heads on 8 ranks are stored twice; eight attention ranks store each sequence once.
    cached = 1e6
    assert one.breakdown_s(64.0, cached, 0)["attention"] > eight.breakdown_s(64.0, cached, 0)["attention"]
    lonely = eight.breakdown_s(1.0, cached, 0)["attention"]
    shared = eight.breakdown_s(8.0, cached, 0)["attention"]
    assert lonely > 6 * shared


def test_an_eagle3_draft_and_the_output_head_keep_sixteen_bits():
    """At the peak a step of one sequence reads each weight once, in the width that checkpoints store it."""
    for precision, width in ((BF16, 2), (FP8, 1)):
        cost = cost_of(precision=precision, efficiency=PERFECT)
        parts = cost.breakdown_s(1.0, 0.0, 1.0)
        layers = DENSE.active_parameters - DENSE.vocab_size * DENSE.hidden_size
        # Two positions share the read; activations add less than a tenth of a per cent.
        assert float(parts["linear"] + parts["experts"]) == pytest.approx(layers * width / 8e12, rel=0.01)
        assert float(parts["output"]) == pytest.approx(DENSE.vocab_size * DENSE.hidden_size * 2 / 8e12, rel=0.01)
        assert float(parts["draft"]) == pytest.approx(cost.draft_parameters() * 2 / 8e12, rel=0.01)


def test_attention_groups_gather_what_the_experts_return():
    """EP64xTP4 pays one all-gather per layer that EP64 does not; both send the same tokens."""
    wide, narrow = (cost_of(SPARSE, Layout(64, ranks, 64), precision=FP8) for ranks in (4, 1))
    live = 512.0
    extra = wide.breakdown_s(live, 0.0, 0)["communication"] - narrow.breakdown_s(live, 0.0, 0)["communication"]
    rows = live / 16 * SPARSE.hidden_size * 2
    per_layer = 2 * IDEAL.allreduce_s + (2 * 0.75 + 0.75) * rows / GB200.link_bytes_per_s
    assert float(extra) == pytest.approx(SPARSE.num_layers * per_layer, rel=1e-9)


def test_kv_capacity_is_the_memory_beside_the_weights():
    cost = cost_of(drafter=NoModelDrafter())
    room = 0.9 * 186e9 - DENSE.parameters * 2
    assert cost.kv_capacity_tokens() == int(room / 147_456)
    assert cost_of().kv_capacity_tokens() < cost.kv_capacity_tokens()
    # Four GPUs as one attention rank split every token's heads; as four ranks each holds tokens of its own.
    split, repeated = (
        cost_of(layout=layout, drafter=NoModelDrafter()).kv_capacity_tokens() for layout in (Layout(4, 4), Layout(4, 1))
    )
    assert split == int((0.9 * 186e9 - DENSE.parameters / 2) / (147_456 / 4))
    assert repeated == 4 * int(room / 147_456)
    with pytest.raises(ConfigError, match="does not fit on TP4 of h100"):
        RooflineCost(hardware("h100"), SPARSE, Layout(4, 4), BF16).kv_capacity_tokens()


def test_layouts_are_named_as_people_write_them_and_refuse_what_does_not_divide():
    assert [layout.name for layout in PUBLISHED_LAYOUTS] == [
        "TP4",
        "TP8",
        "TP16",
        "EP8",
        "EP32xTP4",
        "EP64",
        "EP64xTP4",
    ]
    assert Layout(1, 1).name == "TP1"
    assert num_engines(Layout(8, 8), 512) == 64
    with pytest.raises(ConfigError, match="do not divide into engines of 64"):
        num_engines(Layout(64, 1, 64), 32)
    with pytest.raises(ConfigError, match=r"layout\.tensor_parallel 3"):
        Layout(8, 3)
    with pytest.raises(ConfigError, match="experts"):
        cost_of(DENSE, Layout(8, 1, 8))
    with pytest.raises(ConfigError, match=r"192 columns of an expert .* multiple of the 128"):
        cost_of(SPARSE, Layout(8, 8), precision=FP8)
    with pytest.raises(ConfigError, match="heads"):
        RooflineCost(GB200, model("smollm2-135m"), Layout(8, 8))


def test_a_hugging_face_config_gives_the_shape_of_the_table(tmp_path):
    config = {
        "num_hidden_layers": 94,
        "hidden_size": 4096,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = model(tmp_path)
    assert found.parameters == SPARSE.parameters and found.active_parameters == SPARSE.active_parameters
    assert found.kv_bytes_per_token() == SPARSE.kv_bytes_per_token()
    # Without head_dim and with as many KV heads as heads.
    plain = {key: config[key] for key in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")}
    dense = model_from_config({**plain, "intermediate_size": 512}, "plain")
    assert (dense.head_size, dense.num_kv_heads, dense.num_experts) == (64, 64, 0)


@pytest.mark.parametrize(
    "extra",
    [
        {"kv_lora_rank": 512},
        {"layer_types": ["full_attention", "linear_attention"]},
        {"n_shared_experts": 1},
        {"num_experts": 8, "mlp_only_layers": [0]},
        {"sliding_window": 4096, "max_position_embeddings": 32768},
        {"sliding_window": 4096},
    ],
)
def test_an_architecture_that_is_not_modelled_is_refused(extra):
    config = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 99,
        **extra,
    }
    with pytest.raises(ConfigError, match="does not know"):
        model_from_config(config, "odd")


@pytest.mark.parametrize(
    "unused",
    [
        {"sliding_window": None},
        {"sliding_window": 4096, "use_sliding_window": False},
        {"sliding_window": 4096, "max_position_embeddings": 4096},
    ],
)
def test_a_window_that_no_sequence_leaves_is_none(unused):
    config = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    assert model_from_config({**config, "vocab_size": 99, **unused}, "plain").num_layers == 2


def test_a_config_that_is_no_json_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"no JSON.*give the config\.json"):
        model(tmp_path)


def test_unknown_names_are_refused_with_the_choices():
    with pytest.raises(ConfigError, match="gb200, b200, h200"):
        hardware("tpu")
    with pytest.raises(ConfigError, match="qwen3-8b"):
        model("no-such-model")
    with pytest.raises(ConfigError, match="integer 'num_hidden_layers'"):
        model_from_config({"num_attention_heads": 4, "hidden_size": 8, "intermediate_size": 9}, "broken")


def test_every_figure_of_a_projection_carries_a_mark_and_a_source():
    for gpu in HARDWARE.values():
        for item in RooflineCost(gpu, DENSE, Layout(1, 1)).assumptions():
            assert item.mark in ("measured", "fitted", "assumed", "published") and item.source
    names = {item.name for item in cost_of().assumptions()}
    assert {"efficiency.host_s", "efficiency.bandwidth_share", "hardware.gb200.memory_bytes_per_s", "layout"} <= names


def test_a_fitted_efficiency_says_so():
    fitted = IDEAL.replace(Origin("fitted", "8 points"), host_s=2e-3, norm=math.inf, tile_rows=16)
    marks = {item.name: item.mark for item in fitted.assumptions()}
    assert marks["efficiency.host_s"] == "fitted" and marks["efficiency.op_s"] == "published"
    with pytest.raises(ConfigError, match="efficiency has no hots_s"):
        IDEAL.replace(GUESS, hots_s=1.0)
    with pytest.raises(ConfigError, match=r"bandwidth_share is 1\.2"):
        IDEAL.replace(GUESS, bandwidth_share=1.2)
