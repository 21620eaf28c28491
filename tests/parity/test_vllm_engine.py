"""The real vLLM engine: equal to the reference engine, lossless with drafts, and its weights are those published."""

from __future__ import annotations

import copy
import dataclasses
import json
import math

import pytest
import torch

from paceline.config.run import Eagle3Draft, NgramDraft, NoDraft
from paceline.config.run import VllmEngine as VllmConfig
from paceline.engine.reference import ReferenceEngine
from paceline.engine.vllm import compat
from paceline.engine.vllm.engine import VllmEngine, checkpoint_tensors
from paceline.errors import ConfigError, EngineError, PublishError
from paceline.models.weights import policy_tensors
from paceline.spec.certificate import Certificate, CertificateReport, alarm, score_tokens
from paceline.spec.sampling import policy_log_probs
from paceline.testing.models import random_head, random_policy
from paceline.types import Completion, Prompt, Request, Sampling, Versions

EOS = 1
CACHED = 2 * 128 + 1
"""Tokens of a prompt that vLLM keeps keys and values of: its blocks have 128 tokens on CPU, the last token is always
computed, and with EAGLE-3 the last block that matches is, too."""
MAX_LEN, POSITIONS = CACHED + 40, 320
GREEDY = Sampling(temperature=0.0, max_tokens=40, stop_token_ids=(EOS,))
RANDOM = dataclasses.replace(GREEDY, temperature=1.0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    policy = random_policy(root / "policy", max_positions=POSITIONS)
    # A checkpoint that asks for nearly greedy sampling: nothing of it may reach a rollout.
    settings = {"do_sample": True, "temperature": 0.01, "top_k": 1, "eos_token_id": 5}
    (root / "policy" / "generation_config.json").write_text(json.dumps(settings))
    head = random_head(root / "head", policy)
    return root, policy, head


@pytest.fixture(scope="module")
def engines(folders):
    root, _, _ = folders
    config = VllmConfig(max_num_seqs=64, kv_cache_gib=0.25, threads=1, logprob_share=1.0)

    def build(draft, draft_folder=None):
        return VllmEngine(root / "policy", config, draft, draft_folder=draft_folder, max_model_len=MAX_LEN)

    engines = {
        "none": build(NoDraft()),
        "eagle3": build(Eagle3Draft(num_draft_tokens=3), root / "head"),
        "ngram": build(NgramDraft(num_draft_tokens=3, min_ngram=1, max_ngram=3)),
    }
    yield engines
    for engine in engines.values():
        engine.close()


ARMS = ("none", "eagle3", "ngram")


def requests(count: int, seed: int = 0) -> list[Request]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 20, (count,), generator=generator).tolist()
    prompts = [torch.randint(2, 16, (length,), generator=generator).tolist() for length in lengths]
    return [
        Request(Prompt(id=f"p{index}", token_ids=tuple(prompt)), sample=0, seed=10_000 * seed + index)
        for index, prompt in enumerate(prompts)
    ]


def logits_of(policy, asked: list[Request], completions: tuple[Completion, ...]) -> tuple[torch.Tensor, ...]:
    """[N, V] policy logits at every sampled token, [N] tokens, slots."""
    rows, tokens, slots = [], [], []
    with torch.no_grad():
        for request, completion in zip(asked, completions, strict=True):
            ids = torch.tensor([request.prompt.token_ids + completion.token_ids])
            start = len(request.prompt.token_ids) - 1
            rows.append(policy(ids).logits[0, start:-1])
            tokens.extend(completion.token_ids)
            slots.extend(completion.slots())
    return torch.cat(rows), torch.tensor(tokens), torch.tensor(slots)


def certificate_of(policy, asked, completions, sampling: Sampling) -> CertificateReport:
    logits, tokens, slots = logits_of(policy, asked, completions)
    uniforms = torch.rand(len(tokens), generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    certificate = Certificate()
    certificate.add(score_tokens(logits, tokens, sampling, uniforms), slots)
    return certificate.report()


def test_expand_batch_to_tokens_is_wrong_as_shipped_and_right_after_apply(engines):
    compat.apply()
    from vllm.v1.sample import rejection_sampler

    temperature, ends = torch.tensor([0.5, 0.0, 2.0]), torch.tensor([2, 2, 5], dtype=torch.int32)
    expected = torch.tensor([0.5, 0.5, 2.0, 2.0, 2.0])
    # As shipped the result is whatever memory held. Marked memory shows it: the kernel writes nothing there.
    marked = torch.full((5,), -7.0)
    rejection_sampler._expand(marked, temperature, ends, 0, 1)
    assert torch.equal(marked, torch.full((5,), -7.0))
    repaired = rejection_sampler.expand_batch_to_tokens
    assert torch.equal(repaired(temperature, ends, 5, replace_from=0, replace_to=1), expected)
    greedy = repaired(torch.tensor([0.0, 0.7]), torch.tensor([1, 3], dtype=torch.int32), 3, 0, 1)
    assert torch.equal(greedy, torch.tensor([1.0, 0.7, 0.7]))


def test_applying_the_repairs_twice_changes_nothing():
    from vllm.v1.sample import rejection_sampler

    compat.apply()
    installed = rejection_sampler.expand_batch_to_tokens
    assert compat.apply() == compat.apply()
    assert rejection_sampler.expand_batch_to_tokens is installed


@pytest.mark.parametrize("arm", ARMS)
def test_greedy_tokens_and_logprobs_equal_the_reference_engine(folders, engines, arm):
    _, policy, _ = folders
    asked = requests(50, seed=1)
    expected = ReferenceEngine(policy, max_model_len=MAX_LEN).generate(asked, dataclasses.replace(GREEDY))
    got = engines[arm].generate(asked, GREEDY)
    assert [c.token_ids for c in got.completions] == [c.token_ids for c in expected.completions]
    assert [c.finish_reason for c in got.completions] == [c.finish_reason for c in expected.completions]


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.3},
        {"temperature": 0.6},
        {"temperature": 1.0},
        {"temperature": 1.5},
        {"temperature": 1.0, "top_k": 5, "top_p": 0.8},
    ],
    ids=["T=0.3", "T=0.6", "T=1", "T=1.5", "top-k 5, top-p 0.8"],
)
def test_engine_logprobs_are_those_of_the_policy_under_the_sampling_settings(folders, engines, arm, settings):
    """So the ratio of an on-policy update starts at 1: the trainer scores with the same `policy_log_probs`."""
    _, policy, _ = folders
    asked = requests(12, seed=2)
    sampling = dataclasses.replace(RANDOM, **settings)
    completions = engines[arm].generate(asked, sampling).completions
    logits, tokens, _ = logits_of(policy, asked, completions)
    expected = policy_log_probs(logits, sampling).gather(1, tokens[:, None])[:, 0]
    got = torch.tensor([logprob for completion in completions for logprob in completion.logprobs or ()])
    assert len(got) == len(expected)
    assert (got - expected).abs().max() < 1e-3


@pytest.mark.parametrize("arm", ARMS)
def test_rollouts_follow_the_policy(folders, engines, arm):
    """|Z| < 4.9 has a false-alarm rate of 1e-6; the alarm one of 1e-6 as well. A fixed seed: repeatable."""
    _, policy, _ = folders
    asked = requests(400, seed=3)
    report = certificate_of(policy, asked, engines[arm].generate(asked, RANDOM).completions, RANDOM)
    assert report.tokens > 4000
    assert report.z is not None and abs(report.z) < 4.9
    assert not alarm(report)
    if arm != "none":
        assert {0, 1, 2} <= set(report.by_slot)


def test_an_engine_that_speculates_names_its_sampler_among_the_repairs(engines):
    assert {arm: "slot_sampler" in engine.repairs for arm, engine in engines.items()} == {
        "none": False,
        "eagle3": True,
        "ngram": True,
    }


def test_a_temperature_of_another_row_raises_the_alarm(folders, engines, monkeypatch):
    """The planted fault: every second row is verified at T = 0.5 while T = 1 was asked for."""
    from paceline.engine.vllm import sampler

    constrain = sampler.constrain

    def of_another_row(logits_RV, rows_R, sampling_metadata):
        wrong = sampling_metadata.temperature.clone()
        wrong[::2] = 0.5
        return constrain(logits_RV, rows_R, dataclasses.replace(sampling_metadata, temperature=wrong))

    monkeypatch.setattr(sampler, "constrain", of_another_row)
    _, policy, _ = folders
    asked = requests(400, seed=4)
    report = certificate_of(policy, asked, engines["eagle3"].generate(asked, RANDOM).completions, RANDOM)
    assert alarm(report)
    assert report.excess_nats is not None and report.excess_nats < 0


@pytest.mark.parametrize("arm", ARMS)
def test_seeds_repeat_a_rollout_and_differ_between_samples(engines, arm):
    asked = requests(16, seed=5)
    first, again = (engines[arm].generate(asked, RANDOM).completions for _ in range(2))
    assert [c.token_ids for c in first] == [c.token_ids for c in again]
    same_prompt = [dataclasses.replace(asked[0], seed=seed) for seed in range(8)]
    longest = dataclasses.replace(RANDOM, stop_token_ids=())
    assert len({c.token_ids for c in engines[arm].generate(same_prompt, longest).completions}) == 8


@pytest.mark.parametrize("arm", ARMS)
def test_a_response_ends_with_the_first_stop_token_also_inside_a_block(engines, arm):
    stops = dataclasses.replace(RANDOM, stop_token_ids=(EOS, 4, 7))
    cut_inside = 0
    for completion in engines[arm].generate(requests(64, seed=6), stops).completions:
        assert not set(completion.token_ids[:-1]) & set(stops.stop_token_ids)
        assert completion.finish_reason == ("stop" if completion.token_ids[-1] in stops.stop_token_ids else "length")
        cut_inside += sum(len(block.token_ids) for block in completion.blocks) > len(completion.token_ids)
    assert arm == "none" or cut_inside > 0


@pytest.mark.parametrize("prompt_tokens", [MAX_LEN - 6, MAX_LEN - 3, MAX_LEN - 1])
def test_the_last_tokens_before_the_length_limit_are_produced(engines, prompt_tokens):
    prompt = Prompt(id="long", token_ids=tuple(2 + index % 14 for index in range(prompt_tokens)))
    sampling = dataclasses.replace(GREEDY, stop_token_ids=())
    answers = {arm: engines[arm].generate([Request(prompt, 0, 1)], sampling).completions[0].token_ids for arm in ARMS}
    assert len(answers["none"]) == MAX_LEN - prompt_tokens
    assert answers["eagle3"] == answers["ngram"] == answers["none"]


@pytest.mark.parametrize("arm", ARMS)
def test_a_publish_is_what_the_engine_then_uses_and_restoring_gives_the_first_logprobs_back(folders, engines, arm):
    _, policy, _ = folders
    engine, asked = engines[arm], requests(12, seed=7)
    before = engine.generate(asked, GREEDY)
    state = policy_tensors(policy)
    generator = torch.Generator().manual_seed(5)
    moved = {name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator) for name, tensor in state.items()}
    engine.publish(moved, Versions(policy=1))
    trained = ReferenceEngine(policy, max_model_len=MAX_LEN)
    kept = {name: tensor.clone() for name, tensor in state.items()}
    trained.publish(moved, Versions(policy=1))
    try:
        got, expected = engine.generate(asked, GREEDY), trained.generate(asked, GREEDY)
        assert [c.token_ids for c in got.completions] == [c.token_ids for c in expected.completions]
        assert all(c.versions.policy == 1 for c in got.completions)
        assert [c.token_ids for c in got.completions] != [c.token_ids for c in before.completions]
    finally:
        for changed in (trained, engine):
            changed.forget_versions()
            changed.publish(kept, Versions(policy=0))
    after = engine.generate(asked, GREEDY)
    assert [c.logprobs for c in after.completions] == [c.logprobs for c in before.completions]


@pytest.mark.parametrize("arm", ARMS)
def test_after_a_publish_no_key_or_value_of_older_weights_is_used(folders, engines, arm, monkeypatch):
    """The same prompts again, long enough to be kept. The planted fault, a reset that does nothing, shows in the
    log-probs: were nothing kept, the test would show nothing."""
    _, policy, _ = folders
    engine = engines[arm]
    generator = torch.Generator().manual_seed(12)
    prompts = [torch.randint(2, 16, (CACHED,), generator=generator).tolist() for _ in range(4)]
    asked = [Request(Prompt(f"long{i}", tuple(ids)), 0, seed=i) for i, ids in enumerate(prompts)]
    short = dataclasses.replace(RANDOM, max_tokens=8)
    kept = {name: tensor.clone() for name, tensor in policy_tensors(policy).items()}
    moved = {name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator) for name, tensor in kept.items()}
    trained = ReferenceEngine(copy.deepcopy(policy))
    trained.publish(moved, Versions(policy=1))

    def largest_gap() -> float:
        completions = engine.generate(asked, short).completions
        logits, tokens, _ = logits_of(trained.model, asked, completions)
        expected = policy_log_probs(logits, short).gather(1, tokens[:, None])[:, 0]
        got = torch.tensor([logprob for completion in completions for logprob in completion.logprobs or ()])
        return float((got - expected).abs().max())

    try:
        engine.generate(asked, short)
        engine.publish(moved, Versions(policy=1))
        assert largest_gap() < 1e-3
        engine.forget_versions()
        engine.publish(kept, Versions(policy=2))
        engine.generate(asked, short)
        with monkeypatch.context() as patch:
            patch.setattr(engine._llm, "reset_prefix_cache", lambda: True)
            engine.publish(moved, Versions(policy=3))
        assert largest_gap() > 0.1
    finally:
        engine.forget_versions()
        engine.publish(kept, Versions(policy=0))


def check_publishing_again_helps(engine, state):
    """Version 1 failed: nothing is sampled until a publish succeeds. The engine is left as it was before."""
    with pytest.raises(EngineError, match="publish of policy version 1 failed"):
        engine.generate(requests(1), GREEDY)
    engine.publish(state, Versions(policy=1))
    engine.generate(requests(1), GREEDY)
    engine.forget_versions()
    engine.publish(state, Versions(policy=0))


def test_a_publish_while_a_request_holds_keys_and_values_is_an_error_until_it_has_ended(folders, engines):
    from vllm import SamplingParams

    _, policy, _ = folders
    engine, state = engines["none"], {name: tensor.clone() for name, tensor in policy_tensors(policy).items()}
    params = SamplingParams(max_tokens=9, ignore_eos=True, detokenize=False)
    engine._engine.add_request("held", {"prompt_token_ids": [2, 3, 4]}, params)
    engine._engine.step()
    try:
        with pytest.raises(PublishError, match=r"did not reset its prefix cache .* publish again"):
            engine.publish(state, Versions(policy=1))
    finally:
        engine._engine.abort_request(["held"])
    check_publishing_again_helps(engine, state)


def test_a_publish_that_is_not_the_whole_policy_is_refused_and_nothing_is_loaded(folders, engines):
    _, policy, _ = folders
    engine, asked = engines["eagle3"], requests(4, seed=8)
    before = engine.generate(asked, GREEDY)
    state = policy_tensors(policy)
    name = "model.layers.3.mlp.up_proj.weight"
    bad = {
        f"missing.*{name}": {key: tensor + 1 for key, tensor in state.items() if key != name},
        "unknown.*stray": {**state, "stray": state[name]},
        f"{name} has shape": {**state, name: state[name][:-1]},
        f"{name} holds NaN": {**state, name: state[name] * math.nan},
    }
    for message, tensors in bad.items():
        with pytest.raises(PublishError, match=message):
            engine.publish(tensors, Versions(policy=9))
    after = engine.generate(asked, GREEDY)
    assert [c.logprobs for c in after.completions] == [c.logprobs for c in before.completions]


@pytest.mark.parametrize(
    ("module", "published"),
    [
        ("model.layers.5.mlp.gate_up_proj", "model.layers.5.mlp.gate_proj.weight"),
        ("model.layers.2.self_attn.qkv_proj", "model.layers.2.self_attn.q_proj.weight"),
        ("lm_head", "lm_head.weight"),
        ("model.layers.0.input_layernorm", "model.layers.0.input_layernorm.weight"),
    ],
)
def test_a_tensor_that_did_not_arrive_is_named(folders, engines, monkeypatch, module, published):
    """The planted fault: one layer of the live model keeps what it had."""
    _, policy, _ = folders
    engine = engines["none"]
    state = {name: tensor.clone() for name, tensor in policy_tensors(policy).items()}
    stale = engine._runner.get_model().get_submodule(module)
    load = engine._llm.collective_rpc
    kept = dict(vars(stale)), {name: parameter.data.clone() for name, parameter in stale.named_parameters()}

    def loses_one(*args, **kwargs):
        load(*args, **kwargs)
        attributes, parameters = kept
        if "cpu_linear" in attributes:
            stale.cpu_linear = attributes["cpu_linear"]
        else:
            for name, parameter in stale.named_parameters():
                parameter.data.copy_(parameters[name])

    monkeypatch.setattr(engine._llm, "collective_rpc", loses_one)
    moved = {name: tensor + 0.01 for name, tensor in state.items()}
    with pytest.raises(PublishError, match=published):
        engine.publish(moved, Versions(policy=1))
    monkeypatch.undo()
    check_publishing_again_helps(engine, state)


def test_a_dead_draft_changes_no_token_of_the_rollouts_and_a_publish_revives_it(folders, engines):
    root, _, _ = folders
    engine, asked = engines["eagle3"], requests(48, seed=9)
    alive = engine.generate(asked, GREEDY)
    state = checkpoint_tensors(root / "head")
    engine.publish_draft({name: torch.zeros_like(tensor) for name, tensor in state.items()}, Versions(0, draft=1))
    dead = engine.generate(asked, GREEDY)
    engine.forget_versions()  # The first draft again is not a continuation of the dead one.
    engine.publish_draft(state, Versions(0, draft=2))
    restored = engine.generate(asked, GREEDY)
    assert [c.token_ids for c in dead.completions] == [c.token_ids for c in alive.completions]
    assert restored.stats.accepted_by_position == alive.stats.accepted_by_position
    assert {token for c in dead.completions for block in c.blocks for token in block.draft_token_ids} == {0}
    assert dead.stats.accepted_by_position != alive.stats.accepted_by_position
    assert restored.completions[0].versions.draft == 2


def test_a_draft_publish_with_a_wrong_tensor_is_refused(folders, engines):
    root, _, _ = folders
    state = checkpoint_tensors(root / "head")
    with pytest.raises(PublishError, match=r"missing tensors \['fc.weight'\]"):
        engines["eagle3"].publish_draft({k: v for k, v in state.items() if k != "fc.weight"}, Versions(0, 3))
    with pytest.raises(PublishError, match="no draft with weights"):
        engines["ngram"].publish_draft(state, Versions(0, 1))


def test_min_p_with_drafts_is_refused_before_anything_is_sampled(engines):
    with pytest.raises(ConfigError, match=r"sampling\.min_p"):
        engines["ngram"].generate(requests(1), dataclasses.replace(RANDOM, min_p=0.1))
    engines["none"].generate(requests(1), dataclasses.replace(RANDOM, min_p=0.1))


def test_tied_embeddings_follow_a_publish(tmp_path):
    """vLLM packs the head of a tied policy apart from the embedding: it must move with it."""
    policy = random_policy(tmp_path / "tied", num_layers=4, tied=True, max_positions=POSITIONS)
    config = VllmConfig(max_num_seqs=8, kv_cache_gib=0.125, threads=1)
    engine = VllmEngine(tmp_path / "tied", config, NoDraft(), max_model_len=MAX_LEN)
    state = policy_tensors(policy)
    moved = {name: tensor * 1.01 + 0.01 for name, tensor in state.items()}
    engine.publish(moved, Versions(policy=1))
    reference = ReferenceEngine(policy, max_model_len=MAX_LEN)
    reference.publish(moved, Versions(policy=1))
    asked = requests(8, seed=10)
    assert [c.token_ids for c in engine.generate(asked, GREEDY).completions] == [
        c.token_ids for c in reference.generate(asked, GREEDY).completions
    ]
    with pytest.raises(PublishError, match=r"lm_head\.weight differs"):
        engine.publish({**moved, "lm_head.weight": moved["model.embed_tokens.weight"] + 1}, Versions(policy=2))
    engine.close()
