"""The policy's own MTP layer in the real vLLM: equal to the trainer's at each depth, lossless, and published whole.

One engine for all of it, k = 3, with a layer that has learned enough to be accepted and refused.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.config.run import Eagle3Draft, MtpDraft
from paceline.config.run import VllmEngine as VllmConfig
from paceline.drafts.mtp import MtpDrafter
from paceline.engine.reference import ReferenceEngine
from paceline.engine.vllm.engine import VllmEngine
from paceline.errors import ConfigError, ModelError, PublishError
from paceline.models.eagle3 import greedy_draft
from paceline.models.folder import load_policy
from paceline.models.mimo import split_state
from paceline.models.mtp import MTP_PREFIX, MtpHead
from paceline.models.weights import policy_tensors
from paceline.spec.certificate import Certificate, alarm, score_tokens
from paceline.testing.models import random_head, random_mtp_policy
from paceline.train.draft import Answer, DraftTrainer, collate, policy_features, predicted_acceptance
from paceline.types import Prompt, Request, Sampling, Versions

torch.set_num_threads(1)

EOS, VOCAB, K = 1, 24, 3
MAX_LEN = 64
GREEDY = Sampling(temperature=0.0, max_tokens=24, stop_token_ids=(EOS,))
RANDOM = dataclasses.replace(GREEDY, temperature=1.0)
CONFIG = VllmConfig(max_num_seqs=64, kv_cache_gib=0.25, threads=1)


def requests(count: int, seed: int) -> list[Request]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 12, (count,), generator=generator).tolist()
    prompts = [torch.randint(2, VOCAB, (length,), generator=generator).tolist() for length in lengths]
    return [Request(Prompt(f"p{i}", tuple(ids)), 0, seed=10_000 * seed + i) for i, ids in enumerate(prompts)]


def answers_of(asked, completions) -> list[Answer]:
    return [
        Answer((*request.prompt.token_ids, *completion.token_ids), len(request.prompt.token_ids))
        for request, completion in zip(asked, completions, strict=True)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A random policy whose layer has learned a little of what it samples."""
    folder = tmp_path_factory.mktemp("mtp") / "policy"
    policy = random_mtp_policy(folder, vocab_size=VOCAB, spread=0.25, max_positions=MAX_LEN)
    with torch.no_grad():
        # The next token depends mostly on the last one: that much a layer learns in a second.
        for name, weight in policy.model.layers.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_(0.02)
        policy.lm_head.weight.mul_(1.5)
    asked = requests(64, seed=1)
    answers = answers_of(asked, ReferenceEngine(policy).generate(asked, RANDOM).completions)
    head = MtpHead(policy)
    trainer = DraftTrainer(head, policy, depth=K, lr=5e-3, num_updates=40, temperature=1.0)
    batch = collate(policy_features(policy, answers, head.aux_layers), K)
    for _ in range(40):
        trainer.update([batch])
    policy.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def policy(folder):
    return load_policy(folder).eval()


@pytest.fixture(scope="module")
def engine(folder):
    engine = VllmEngine(folder, CONFIG, MtpDraft(num_draft_tokens=K), max_model_len=MAX_LEN)
    yield engine
    engine.close()


@pytest.fixture
def published(policy, engine):
    """The policy's tensors, given back to the engine afterwards."""
    state = {name: tensor.clone() for name, tensor in policy_tensors(policy).items()}
    yield state
    engine.forget_versions()
    engine.publish(state, Versions(policy=0))


def test_every_draft_and_every_draft_logit_equals_the_engines_at_each_depth(policy, engine, monkeypatch):
    drafter, input_batch = engine._runner.drafter, engine._runner.input_batch
    compute_logits, propose = drafter.model.compute_logits, drafter.propose
    calls: list[dict[str, Any]] = []
    logits: list[torch.Tensor] = []

    def recording_compute_logits(hidden, *args):
        logits.append(compute_logits(hidden, *args))
        return logits[-1]

    def recording_propose(*args, **kwargs):
        logits.clear()
        last = kwargs["token_indices_to_sample"]
        if last is None:
            last = kwargs["common_attn_metadata"].query_start_loc[1:] - 1
        call = {
            "requests": [int(name.partition(":")[2].partition("-")[0]) for name in input_batch.req_ids],
            "roots": kwargs["target_positions"][last.long()].clone(),
        }
        drafted = propose(*args, **kwargs)
        calls.append({**call, "drafted": drafted.clone(), "logits": torch.stack(logits, dim=1).clone()})
        return drafted

    monkeypatch.setattr(drafter.model, "compute_logits", recording_compute_logits)
    monkeypatch.setattr(drafter, "propose", recording_propose)
    # Prompts of one token, too: there the layer runs at position 0, where it sees no embedding.
    asked = requests(24, seed=2)
    assert min(len(request.prompt.token_ids) for request in asked) == 1
    answers = answers_of(asked, engine.generate(asked, RANDOM).completions)
    head = MtpHead(policy)
    states = [feature.aux for feature in policy_features(policy, answers, head.aux_layers)]
    compared = after_acceptance = 0
    last_root: dict[int, int] = {}
    for call in calls:
        for row, index in enumerate(call["requests"]):
            tokens, root = answers[index].token_ids, int(call["roots"][row])
            if root + 1 >= len(tokens):
                continue  # drafts behind the end of the response
            ids = torch.tensor(tokens[: root + 2])
            drafted, ours = greedy_draft(head, policy, states[index][: root + 1], ids, K)
            assert drafted.tolist() == call["drafted"][row].tolist()
            torch.testing.assert_close(call["logits"][row][:, :VOCAB], ours, rtol=0, atol=1e-3)
            compared += 1
            after_acceptance += root - last_root.get(index, root) > 1
            last_root[index] = root
    # A block after an accepted draft is where the engine must have rebuilt the layer's keys from the policy's states.
    assert compared > 120 and after_acceptance > 20


def test_greedy_output_is_the_same_for_every_k_and_equals_the_reference_engine(policy, engine):
    asked = requests(32, seed=3)
    expected = [c.token_ids for c in ReferenceEngine(policy).generate(asked, GREEDY).completions]
    reference = ReferenceEngine(policy, MtpDrafter(policy), num_draft_tokens=K).generate(asked, GREEDY)
    assert [c.token_ids for c in reference.completions] == expected and reference.stats.accepted > 0
    try:
        for k in (0, 1, 3):
            engine.limit_drafts(k)
            got = engine.generate(asked, GREEDY)
            assert [c.token_ids for c in got.completions] == expected
            assert max(len(block.draft_token_ids) for c in got.completions for block in c.blocks) == k
    finally:
        engine.limit_drafts(K)


def test_rollouts_follow_the_policy_and_acceptance_is_what_was_predicted(policy, engine):
    """|Z| < 4.9 has a false-alarm rate of 1e-6; the alarm one of 1e-6 as well. A fixed seed: repeatable."""
    asked = requests(600, seed=4)
    rollouts = engine.generate(asked, RANDOM)
    certificate = Certificate()
    uniforms = torch.Generator().manual_seed(99)
    with torch.no_grad():
        for answer, completion in zip(answers_of(asked, rollouts.completions), rollouts.completions, strict=True):
            logits = policy(torch.tensor([answer.token_ids])).logits[0, answer.prompt_length - 1 : -1]
            tokens, slots = torch.tensor(completion.token_ids), torch.tensor(completion.slots())
            noise = torch.rand(len(tokens), generator=uniforms, dtype=torch.float64)
            certificate.add(score_tokens(logits, tokens, RANDOM, noise), slots)
    report = certificate.report()
    assert report.tokens > 5000 and {0, 1, 2, 3} <= set(report.by_slot)
    assert report.z is not None and abs(report.z) < 4.9
    assert not alarm(report)

    stats = rollouts.stats
    predicted = predicted_acceptance(policy, MtpHead(policy), answers_of(asked, rollouts.completions), K, RANDOM)
    assert 1.2 < predicted.alpha < 3.5
    assert 1 + stats.accepted / stats.verify_steps == pytest.approx(predicted.alpha, rel=0.05)


def test_one_publish_carries_policy_and_layer_and_a_dead_layer_changes_no_token(policy, engine, published):
    asked = requests(32, seed=5)
    alive = engine.generate(asked, GREEDY)
    dead = {name: tensor * (not name.startswith(MTP_PREFIX)) for name, tensor in published.items()}
    engine.publish(dead, Versions(policy=1))
    silent = engine.generate(asked, GREEDY)
    assert [c.token_ids for c in silent.completions] == [c.token_ids for c in alive.completions]
    assert {token for c in silent.completions for block in c.blocks for token in block.draft_token_ids} == {0}
    engine.forget_versions()  # An older version's tensors again: not a continuation.
    engine.publish(published, Versions(policy=2))
    again = engine.generate(asked, GREEDY)
    assert again.stats.accepted_by_position == alive.stats.accepted_by_position
    assert again.completions[0].versions.policy == 2

    generator = torch.Generator().manual_seed(5)
    moved = {name: t + 0.03 * torch.randn(t.shape, generator=generator) for name, t in published.items()}
    engine.publish(moved, Versions(policy=3))
    trained = ReferenceEngine(policy)
    try:
        trained.publish(moved, Versions(policy=3))
        expected = [c.token_ids for c in trained.generate(asked, GREEDY).completions]
    finally:
        trained.forget_versions()
        trained.publish(published, Versions(policy=0))
    assert [c.token_ids for c in engine.generate(asked, GREEDY).completions] == expected
    assert expected != [c.token_ids for c in alive.completions]


def test_a_publish_without_a_tensor_of_the_layer_is_refused_and_names_it(engine, published):
    for name in (name for name in published if name.startswith(MTP_PREFIX)):
        with pytest.raises(PublishError, match=rf"missing tensors \['{name}'\]"):
            engine.publish({key: tensor for key, tensor in published.items() if key != name}, Versions(policy=9))


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("input_proj", "input_proj.weight"),
        ("mtp_block.self_attn.qkv_proj", "self_attn.q_proj"),
        ("mtp_block.mlp.down_proj", "mlp.down_proj.weight"),
        ("final_layernorm", "final_layernorm.weight"),
    ],
)
def test_a_tensor_of_the_layer_that_did_not_arrive_is_named(engine, published, monkeypatch, module, name):
    """The planted fault: one module of the live layer keeps what it had."""
    from paceline.engine.vllm import mtp

    live = next(iter(engine._runner.drafter.model.model.mtp_layers.values())).get_submodule(module)
    attributes = dict(vars(live))
    parameters = {key: parameter.data.clone() for key, parameter in live.named_parameters()}
    publish = mtp.publish

    def loses_one(runner, head):
        publish(runner, head)
        if "cpu_linear" in attributes:
            live.cpu_linear = attributes["cpu_linear"]
        for key, parameter in live.named_parameters():
            if parameter.numel():
                parameter.data.copy_(parameters[key])

    monkeypatch.setattr(mtp, "publish", loses_one)
    moved = {key: tensor + 0.01 for key, tensor in published.items()}
    with pytest.raises(PublishError, match=f"mtp_layers.0.{name}"):
        engine.publish(moved, Versions(policy=1))
    monkeypatch.undo()


def copy_of(folder: Path, to: Path, change) -> Path:
    """The folder with `change` applied to its tensors."""
    to.mkdir()
    (to / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


def test_a_checkpoint_without_a_tensor_of_its_layer_does_not_start_and_names_it(folder, tmp_path):
    name = f"{MTP_PREFIX}0.self_attn.k_proj.bias"
    lacking = copy_of(folder, tmp_path / "lacking", lambda tensors: tensors.pop(name))
    with pytest.raises(ModelError, match=rf"lacks the tensor {name}"):
        VllmEngine(lacking, CONFIG, MtpDraft(num_draft_tokens=K), max_model_len=MAX_LEN)
    second = f"{MTP_PREFIX}1.input_proj.weight"
    more = copy_of(folder, tmp_path / "more", lambda tensors: tensors.update({second: torch.zeros(2, 2)}))
    with pytest.raises(ModelError, match=rf"has a tensor {second}"):
        VllmEngine(more, CONFIG, MtpDraft(num_draft_tokens=K), max_model_len=MAX_LEN)


def test_a_policy_without_a_layer_cannot_draft_with_it(folder, tmp_path):
    plain = copy_of(folder, tmp_path / "plain", lambda tensors: [tensors.pop(n) for n in split_state(tensors)[1]])
    config = json.loads((plain / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen2ForCausalLM"]}))
    with pytest.raises(ModelError, match="no MTP layer"):
        VllmEngine(plain, CONFIG, MtpDraft(num_draft_tokens=K), max_model_len=MAX_LEN)


def test_an_external_head_on_such_a_policy_is_refused_before_the_engine_starts(folder, policy, tmp_path):
    random_head(tmp_path / "head", policy, aux_layers=(1, 2, 3))
    with pytest.raises(ConfigError, match=r"eagle3.*hand out"):
        VllmEngine(folder, CONFIG, Eagle3Draft(), draft_folder=tmp_path / "head", max_model_len=MAX_LEN)


def test_weights_and_biases_published_to_a_bfloat16_engine_are_those_that_it_uses(folder, published, monkeypatch):
    """Where the CPU has AMX tiles vLLM widens the bias beside a packed weight: neither refused nor missed there."""
    low = VllmEngine(
        folder, CONFIG.model_copy(update={"dtype": "bfloat16"}), MtpDraft(num_draft_tokens=K), max_model_len=MAX_LEN
    )
    try:
        moved = {name: tensor + 0.01 for name, tensor in published.items()}
        low.publish(moved, Versions(policy=1))
        low.publish(published, Versions(policy=2))
        load = low._load

        def damages(what, stream):
            load(what, stream)
            low._runner.get_model().model.layers[1].self_attn.qkv_proj.bias.data[3] += 0.25

        monkeypatch.setattr(low, "_load", damages)
        with pytest.raises(PublishError, match=r"layers\.1\.self_attn\.q_proj\.bias in the engine"):
            low.publish({name: tensor - 0.01 for name, tensor in published.items()}, Versions(policy=3))
    finally:
        low.close()
