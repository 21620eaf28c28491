"""A draft model in the real vLLM: its drafts are the reference's, and no publish of the policy moves its weights.

One engine for all of it, k = 3. The draft has other sizes than the policy (width, heads, depth, tied embeddings), and
has learned enough of what the policy samples to be accepted and refused.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from paceline.config.run import DraftModelDraft
from paceline.config.run import VllmEngine as VllmConfig
from paceline.drafts.draft_model import DraftModelDrafter
from paceline.engine.reference import ReferenceEngine
from paceline.engine.vllm import weights
from paceline.engine.vllm.engine import VllmEngine
from paceline.errors import PublishError
from paceline.models.folder import load_policy
from paceline.models.weights import policy_tensors
from paceline.spec.certificate import Certificate, alarm, score_tokens
from paceline.testing.models import random_policy
from paceline.types import Prompt, Request, Sampling, Versions

torch.set_num_threads(1)

EOS, VOCAB, K = 1, 24, 3
MAX_LEN = 64
GREEDY = Sampling(temperature=0.0, max_tokens=24, stop_token_ids=(EOS,))
RANDOM = dataclasses.replace(GREEDY, temperature=1.0)
CONFIG = VllmConfig(max_num_seqs=16, kv_cache_gib=0.25, threads=1)


def requests(count: int, seed: int, longest: int = 12) -> list[Request]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    prompts = [torch.randint(2, VOCAB, (length,), generator=generator).tolist() for length in lengths]
    return [Request(Prompt(f"p{i}", tuple(ids)), 0, seed=10_000 * seed + i) for i, ids in enumerate(prompts)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """Policy and draft. What comes next depends mostly on the last token: that much a draft learns in a second."""
    root = tmp_path_factory.mktemp("draft_model")
    policy = random_policy(root / "policy", num_layers=4, vocab_size=VOCAB, spread=0.3, max_positions=MAX_LEN)
    with torch.no_grad():
        for name, weight in policy.model.layers.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_(0.05)
        policy.lm_head.weight.mul_(1.5)
    policy.save_pretrained(root / "policy")
    draft = random_policy(
        root / "draft", num_layers=2, hidden_size=32, vocab_size=VOCAB, num_kv_heads=2, spread=0.1, tied=True,
        max_positions=MAX_LEN, seed=1,
    )  # fmt: skip
    asked = requests(64, seed=1)
    answers = ReferenceEngine(policy).generate(asked, RANDOM).completions
    texts = [torch.tensor([*r.prompt.token_ids, *c.token_ids]) for r, c in zip(asked, answers, strict=True)]
    tokens, labels = (pad_sequence(texts, batch_first=True, padding_value=value) for value in (0, -100))
    optimizer = torch.optim.AdamW(draft.parameters(), lr=1e-2)
    for _ in range(40):
        logits = draft(tokens).logits
        functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    draft.save_pretrained(root / "draft")
    return root / "policy", root / "draft"


@pytest.fixture(scope="module")
def policy(folders):
    return load_policy(folders[0]).eval()


@pytest.fixture(scope="module")
def draft(folders):
    return load_policy(folders[1]).eval()


@pytest.fixture(scope="module")
def live(folders):
    policy_folder, draft_folder = folders
    model = DraftModelDraft(num_draft_tokens=K)
    engine = VllmEngine(policy_folder, CONFIG, model, draft_folder=draft_folder, max_model_len=MAX_LEN)
    yield engine
    engine.close()


@pytest.fixture
def engine(live):
    yield live
    live.choose_drafts(None)
    live.limit_drafts(K)


@pytest.fixture
def published(policy, engine):
    """The policy's tensors, given back to the engine afterwards."""
    state = {name: tensor.clone() for name, tensor in policy_tensors(policy).items()}
    yield state
    engine.forget_versions()
    engine.publish(state, Versions(policy=0))


@pytest.mark.parametrize("k", ["always 3", "3 and 0 in turn"])
@torch.no_grad()
def test_every_draft_and_every_draft_logit_equals_the_references_at_each_depth(draft, engine, monkeypatch, k):
    """The second time the drafter reads what it missed in the steps without drafts, late and at once."""
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
        if drafted.shape[1] == K:
            calls.append({**call, "drafted": drafted.clone(), "logits": torch.stack(logits, dim=1).clone()})
        return drafted

    monkeypatch.setattr(drafter.model, "compute_logits", recording_compute_logits)
    monkeypatch.setattr(drafter, "propose", recording_propose)
    if k != "always 3":
        lengths = itertools.cycle([K, K, 0, 0, 0])
        engine.choose_drafts(lambda live: next(lengths))
    # More requests than places, prompts of one token among them: rows move, and prompts come while others decode.
    asked = requests(32, seed=2)
    assert min(len(request.prompt.token_ids) for request in asked) == 1
    completions = engine.generate(asked, RANDOM).completions
    texts = [[*r.prompt.token_ids, *c.token_ids] for r, c in zip(asked, completions, strict=True)]
    ours = DraftModelDrafter(draft)
    compared = after_acceptance = 0
    last_root: dict[int, int] = {}
    for call in calls:
        for row, index in enumerate(call["requests"]):
            text, root = texts[index], int(call["roots"][row])
            if root + 1 >= len(text):
                continue  # drafts behind the end of the response
            read = text[: root + 2]
            drafted = ours.propose([read], [K], None, []).token_ids[0]
            assert drafted == call["drafted"][row].tolist()
            expected = draft(torch.tensor([read + drafted[:-1]])).logits[0, root + 1 :]
            torch.testing.assert_close(call["logits"][row][:, :VOCAB], expected, rtol=0, atol=1e-3)
            compared += 1
            after_acceptance += root - last_root.get(index, root) > 1
            last_root[index] = root
    assert compared > 120 and after_acceptance > 20


def test_greedy_output_is_the_same_for_every_k_and_equals_the_reference_engine(policy, draft, engine):
    asked = requests(40, seed=3)
    expected = [c.token_ids for c in ReferenceEngine(policy).generate(asked, GREEDY).completions]
    reference = ReferenceEngine(policy, DraftModelDrafter(draft), num_draft_tokens=K).generate(asked, GREEDY)
    assert [c.token_ids for c in reference.completions] == expected and reference.stats.accepted > 50
    for k in (0, 1, 3):
        engine.limit_drafts(k)
        got = engine.generate(asked, GREEDY)
        assert [c.token_ids for c in got.completions] == expected
        assert max(len(block.draft_token_ids) for c in got.completions for block in c.blocks) == k


def test_a_step_without_drafts_runs_neither_the_draft_model_nor_the_verifier(engine, monkeypatch):
    runner = engine._runner
    propose, verify = runner.drafter.propose, runner.rejection_sampler.forward
    runs: list[str] = []
    monkeypatch.setattr(runner.drafter, "propose", lambda *a, **k: runs.append("draft") or propose(*a, **k))
    monkeypatch.setattr(runner.rejection_sampler, "forward", lambda *a: runs.append("verify") or verify(*a))
    engine.limit_drafts(0)
    steps = engine.generate(requests(16, seed=6), GREEDY).stats.engine_steps
    assert steps > 15 and runs == ["verify", "draft"]  # The prompts, read at once.


def test_rollouts_follow_the_policy_and_acceptance_is_what_the_policy_gives_the_drafted_tokens(policy, engine):
    """|Z| < 4.9 has a false-alarm rate of 1e-6; the alarm one of 1e-6 as well. A fixed seed: repeatable."""
    asked = requests(300, seed=4)
    rollouts = engine.generate(asked, RANDOM)
    certificate = Certificate()
    uniforms = torch.Generator().manual_seed(99)
    given: list[float] = []
    """The policy's probability of every token that was drafted for a first slot."""
    for request, completion in zip(asked, rollouts.completions, strict=True):
        ids = torch.tensor([[*request.prompt.token_ids, *completion.token_ids]])
        with torch.no_grad():
            logits = policy(ids).logits[0, len(request.prompt.token_ids) - 1 : -1]
        tokens, slots = torch.tensor(completion.token_ids), torch.tensor(completion.slots())
        noise = torch.rand(len(tokens), generator=uniforms, dtype=torch.float64)
        certificate.add(score_tokens(logits, tokens, RANDOM, noise), slots)
        place = 0
        for block in completion.blocks:
            given += [float(logits[place].softmax(-1)[token]) for token in block.draft_token_ids[:1]]
            place += len(block.token_ids)
    report = certificate.report()
    assert report.tokens > 2000 and {0, 1, 2, 3} <= set(report.by_slot)
    assert report.z is not None and abs(report.z) < 4.9
    assert not alarm(report)
    accepted, drafted = rollouts.stats.accepted_by_position[0], rollouts.stats.drafted_by_position[0]
    assert len(given) == drafted and 0.1 < accepted / drafted < 0.9
    assert abs(accepted - sum(given)) < 4.9 * sum(p * (1 - p) for p in given) ** 0.5
    assert {completion.versions for completion in rollouts.completions} == {Versions(policy=0, draft=0)}


def test_up_to_the_last_position_tokens_are_those_of_the_reference_engine(policy, engine):
    """Draft and policy have just the positions that prompt and response may use."""
    prompts = [request.prompt.token_ids for request in requests(8, seed=8)]
    asked = [Request(Prompt(f"p{i}", ids * (5 if i < 4 else 1)), 0, i) for i, ids in enumerate(prompts)]
    to_the_end = dataclasses.replace(GREEDY, max_tokens=MAX_LEN, stop_token_ids=())
    got = engine.generate(asked, to_the_end).completions
    expected = ReferenceEngine(policy).generate(asked, to_the_end).completions
    assert [c.token_ids for c in got] == [c.token_ids for c in expected]
    for request, completion in zip(asked, got, strict=True):
        place = len(request.prompt.token_ids)
        assert place + len(completion.token_ids) == MAX_LEN
        for block in completion.blocks:
            assert place + len(block.draft_token_ids) <= MAX_LEN
            place += len(block.token_ids)


def draft_in(engine) -> dict[str, torch.Tensor]:
    """What the live draft holds, and what its packed layers answer."""
    model, held = engine._runner.drafter.model, {}
    for name, module in model.named_modules():
        if weights._kernel(module) is not None:
            ones = torch.ones(1, module.input_size if hasattr(module, "input_size") else module.embedding_dim)
            held[f"{name} answers"] = module.quant_method.apply(module, ones, None).clone()
    return held | {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


def test_a_publish_of_the_policy_never_touches_the_draft_model(policy, engine, published):
    before, kernels = draft_in(engine), weights.kernels(engine._runner.drafter.model)
    assert len(kernels) > 8 and sum(name.endswith("answers") for name in before) == len(kernels)
    generator = torch.Generator().manual_seed(5)
    moved = {name: t + 0.03 * torch.randn(t.shape, generator=generator) for name, t in published.items()}
    report = engine.publish(moved, Versions(policy=3))
    assert report.versions == Versions(policy=3, draft=0)
    after, kernels_after = draft_in(engine), weights.kernels(engine._runner.drafter.model)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert all(kernel() is kernels_after[name]() for name, kernel in kernels.items())
    # And the policy did move.
    asked = requests(16, seed=7)
    trained = ReferenceEngine(policy)
    try:
        trained.publish(moved, Versions(policy=3))
        expected = [c.token_ids for c in trained.generate(asked, GREEDY).completions]
    finally:
        trained.forget_versions()
        trained.publish(published, Versions(policy=0))
    got = engine.generate(asked, GREEDY).completions
    assert [c.token_ids for c in got] == expected
    assert got[0].versions == Versions(policy=3, draft=0)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj", "model.norm", "model.embed_tokens"])
def test_a_draft_model_that_moved_behind_the_checks_is_named_by_the_next_publish(engine, published, name):
    """The planted fault: one module of the live draft computes with other weights."""
    module = engine._runner.drafter.model.get_submodule(name)
    kernel, parameter = getattr(module, "cpu_linear", None), module.weight.data.clone()
    is_packed = weights._kernel(module) is not None and name != "model.embed_tokens"
    try:
        if is_packed:
            module.cpu_linear = lambda x, weight, bias: 1.01 * kernel(x, weight, bias)
        else:
            module.weight.data.flatten()[0] += 0.01
        with pytest.raises(PublishError, match=f"draft tensor {name}.weight in the engine is not the published one"):
            engine.publish(published, Versions(policy=1))
    finally:
        module.weight.data.copy_(parameter)
        if is_packed:
            module.cpu_linear = kernel
    engine.publish(published, Versions(policy=1))


def test_a_publish_of_the_policy_that_fails_halfway_leaves_the_draft_model_whole(engine, published):
    before = draft_in(engine)
    names = sorted(published)

    def breaks_off():
        yield {name: published[name] + 0.1 for name in names[: len(names) // 2]}
        raise OSError("planted")

    with pytest.raises(OSError, match="planted"):
        engine.publish(breaks_off(), Versions(policy=1))
    engine.publish({name: tensor + 0.01 for name, tensor in published.items()}, Versions(policy=2))
    after = draft_in(engine)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_draft_publish_is_refused_because_the_model_is_frozen(draft, engine):
    with pytest.raises(PublishError, match="frozen"):
        engine.publish_draft(policy_tensors(draft), Versions(policy=0, draft=1))
