"""A policy with its own MTP layer: what it computes, that no tensor of it is lost, and that the trunk never moves."""

from __future__ import annotations

import copy
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

from paceline.cli.doctor import _check_draft, checks
from paceline.config.run import Algorithm, FolderPolicy, MtpDraft, Recipe, TinyPolicy, Train
from paceline.drafts.mtp import MtpDrafter
from paceline.engine.reference import ReferenceEngine
from paceline.errors import ModelError, PublishError
from paceline.models import tiny
from paceline.models.eagle3 import ChainMemory, KeyValueCache, embed, greedy_draft
from paceline.models.folder import load_policy, load_tokenizer, resolve_policy
from paceline.models.mimo import MiMoForCausalLM, split_state
from paceline.models.mtp import MTP_PREFIX, MtpHead
from paceline.models.weights import policy_tensors
from paceline.spec.sampling import policy_probs
from paceline.testing.faults import P_LIMIT, chi_square_p
from paceline.testing.models import random_mtp_policy, random_policy
from paceline.train.draft import Answer, DraftTrainer, collate, policy_features, predicted_acceptance
from paceline.train.logprobs import Sample
from paceline.train.policy import PolicyBatch, PolicyTrainer
from paceline.types import Prompt, Request, Sampling, Versions

torch.set_num_threads(1)

VOCAB, EOS = 8, 1
SMALL = TinyPolicy(num_layers=4, hidden_size=32, train_steps=3, num_mtp_layers=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("mtp") / "policy"
    random_mtp_policy(folder, vocab_size=VOCAB)
    return folder


@pytest.fixture
def policy(folder):
    return load_policy(folder).eval()


def rewritten(folder: Path, to: Path, change) -> Path:
    to.mkdir()
    (to / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


def requests(count: int, prompt=(2, 3, 4)) -> list[Request]:
    return [Request(Prompt("p", tuple(prompt)), i, seed=700 + i) for i in range(count)]


def rollouts(policy, count: int = 24, **settings) -> list[Answer]:
    sampling = Sampling(max_tokens=12, stop_token_ids=(EOS,), **settings)
    asked = [Request(Prompt(f"p{i}", (2 + i % 6, 3, 4 + i % 3)), 0, seed=i) for i in range(count)]
    completions = ReferenceEngine(policy).generate(asked, sampling).completions
    return [Answer((*r.prompt.token_ids, *c.token_ids), 3) for r, c in zip(asked, completions, strict=True)]


@torch.no_grad()
def test_the_layer_is_a_qwen2_layer_between_its_projection_and_its_own_norm(policy):
    """Depth 0 against transformers' own decoder layer, written out; the embedding is zero at position 0 alone."""
    layer, trunk = policy.model.mtp_layers[0], policy.model
    tokens = torch.tensor([[5, 2, 7, 3, 4, 6]])
    states = policy(tokens, output_hidden_states=True)
    head = MtpHead(policy)
    (feature,) = policy_features(policy, [Answer(tuple(tokens[0].tolist()), 1)], head.aux_layers)
    hidden = feature.aux[None]
    # What is read is the state before the final norm: transformers hands out the state after it.
    torch.testing.assert_close(trunk.norm(hidden), states.hidden_states[-1])

    twin = Qwen2DecoderLayer(policy.config, 0)
    own = {name: tensor for name, tensor in layer.state_dict().items() if name in twin.state_dict()}
    twin.load_state_dict(own)
    embeds = trunk.embed_tokens(tokens[:, 1:]).clone()
    embeds[:, 0] = 0
    inputs = layer.input_proj(torch.cat([layer.hidden_layernorm(hidden[:, :-1]), layer.token_layernorm(embeds)], -1))
    positions = torch.arange(5)[None]
    unseen = torch.full((5, 5), -torch.inf).triu(1)[None, None]
    out = twin(inputs, unseen, position_embeddings=trunk.rotary_emb(inputs, positions))
    expected = policy.lm_head(layer.final_layernorm(out[0] if isinstance(out, tuple) else out))
    outputs = head(hidden[:, :-1], embed(policy, tokens[:, 1:]), positions[0], ChainMemory())
    torch.testing.assert_close(head.logits(outputs), expected)


@torch.no_grad()
def test_the_trunk_is_the_plain_qwen2_and_never_runs_the_layer(folder, policy, tmp_path):
    plain = rewritten(folder, tmp_path / "plain", lambda tensors: [tensors.pop(n) for n in split_state(tensors)[1]])
    config = json.loads((plain / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen2ForCausalLM"]}))
    tokens = torch.arange(2, 8)[None]
    assert type(load_policy(plain)) is Qwen2ForCausalLM
    assert torch.equal(policy(tokens).logits, load_policy(plain)(tokens).logits)


def test_a_folder_gives_back_every_tensor_and_the_config_that_vllm_reads(folder, policy, tmp_path):
    assert isinstance(policy, MiMoForCausalLM)
    policy.save_pretrained(tmp_path / "again")
    first, again = load_file(folder / "model.safetensors"), load_file(tmp_path / "again" / "model.safetensors")
    assert first.keys() == again.keys() and all(torch.equal(first[name], again[name]) for name in first)
    assert len(split_state(first)[1]) == 16
    assert policy_tensors(policy).keys() == first.keys()
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config["architectures"] == ["MiMoForCausalLM"] and config["model_type"] == "qwen2"
    assert config["num_nextn_predict_layers"] == 1 and not config["tie_word_embeddings"]


def test_a_missing_or_foreign_tensor_of_the_layer_is_named_when_the_policy_is_loaded(folder, tmp_path):
    for index, name in enumerate(split_state(load_file(folder / "model.safetensors"))[1]):
        lacking = rewritten(folder, tmp_path / str(index), lambda tensors, name=name: tensors.pop(name))
        with pytest.raises(ModelError, match=f"lacks the tensor {name}"):
            load_policy(lacking)
    second = f"{MTP_PREFIX}1.input_proj.weight"
    more = rewritten(folder, tmp_path / "more", lambda tensors: tensors.update({second: torch.zeros(2, 2)}))
    with pytest.raises(ModelError, match=f"has a tensor {second}"):
        load_policy(more)
    config = json.loads((folder / "config.json").read_text())
    dropped = rewritten(folder, tmp_path / "dropped", lambda tensors: None)
    (dropped / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen2ForCausalLM"]}))
    with pytest.raises(ModelError, match=r"has a tensor model\.mtp_layers\.0\..*would be\s+dropped"):
        load_policy(dropped)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers = 2"), ({"tie_word_embeddings": True}, "lm_head")],
)
def test_a_config_that_is_not_served_is_refused(folder, tmp_path, change, message):
    other = rewritten(folder, tmp_path / "other", lambda tensors: None)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ModelError, match=message):
        load_policy(other)


def test_mtp_drafts_of_a_policy_without_a_layer_are_refused(tmp_path):
    with pytest.raises(ModelError, match="no MTP layer"):
        MtpHead(random_policy(tmp_path / "plain", num_layers=2))
    for policy in ({"kind": "tiny"}, {"kind": "smollm2"}):
        with pytest.raises(ValueError, match=r"num_mtp_layers = 1"):
            Recipe.model_validate({"policy": policy, "draft": {"method": "mtp"}})
    assert Recipe(policy=FolderPolicy(path=tmp_path), draft=MtpDraft()).draft == MtpDraft()


def test_a_publish_to_the_reference_engine_brings_the_layer_or_names_what_is_missing(policy):
    engine = ReferenceEngine(copy.deepcopy(policy), num_draft_tokens=3)
    engine.drafter = MtpDrafter(engine.model)
    state = {name: tensor.clone() for name, tensor in policy_tensors(policy).items()}
    name = f"{MTP_PREFIX}0.final_layernorm.weight"
    with pytest.raises(PublishError, match=name):
        engine.publish({key: tensor for key, tensor in state.items() if key != name}, Versions(policy=1))
    engine.publish({**state, name: state[name] + 1}, Versions(policy=1))
    assert torch.equal(engine.drafter.head.layer.final_layernorm.weight, state[name] + 1)
    with pytest.raises(PublishError, match="part of the policy"):
        engine.publish_draft({name: state[name]}, Versions(policy=1, draft=1))


@torch.no_grad()
def exact_law(policy, prompt, sampling) -> dict[tuple[int, ...], float]:
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(sampling.max_tokens):
        open_ends = [tokens for tokens in law if not tokens or tokens[-1] != EOS]
        logits = policy(torch.tensor([[*prompt, *tokens] for tokens in open_ends])).logits[:, -1]
        longer = {tokens: mass for tokens, mass in law.items() if tokens and tokens[-1] == EOS}
        for tokens, probs in zip(open_ends, policy_probs(logits.double(), sampling).tolist(), strict=True):
            longer |= {(*tokens, token): law[tokens] * p for token, p in enumerate(probs) if p > 0}
        law = longer
    return law


def test_responses_of_the_reference_engine_follow_the_exact_law_with_mtp_drafts(policy):
    sampling = Sampling(max_tokens=4, stop_token_ids=(EOS,))
    engine = ReferenceEngine(policy, MtpDrafter(policy), num_draft_tokens=3, max_num_seqs=256)
    got = engine.generate(requests(600), sampling)
    assert chi_square_p(Counter(c.token_ids for c in got.completions), exact_law(policy, (2, 3, 4), sampling)) > P_LIMIT
    assert got.stats.accepted > 50 and got.stats.recovered > 50


def test_prediction_is_what_the_reference_engine_measures(policy):
    answers = rollouts(policy, 120)
    sampling = Sampling(max_tokens=12, stop_token_ids=(EOS,))
    engine = ReferenceEngine(policy, MtpDrafter(policy), num_draft_tokens=3)
    asked = [Request(Prompt(str(i), a.token_ids[:3]), 0, seed=5000 + i) for i, a in enumerate(answers)]
    stats = engine.generate(asked, sampling).stats
    predicted = predicted_acceptance(policy, MtpHead(policy), answers, 3, sampling)
    assert 1 + stats.accepted / stats.verify_steps == pytest.approx(predicted.alpha, rel=0.1)
    assert predicted.alpha < predicted.limit


def test_chains_of_all_roots_at_once_are_the_drafts_of_each_root_alone(policy):
    from paceline.train.draft import _greedy_chains

    head = MtpHead(policy)
    (answer,) = rollouts(policy, 1)
    features = policy_features(policy, [answer], head.aux_layers)
    chains = _greedy_chains(policy, head, collate(features, 0), 4)[0]
    for root in range(chains.shape[0]):
        ids = torch.tensor(answer.token_ids[: root + 2])
        assert greedy_draft(head, policy, features[0].aux[: root + 1], ids, 4)[0].tolist() == chains[root].tolist()


def make_trainer(policy, **settings) -> PolicyTrainer:
    return PolicyTrainer(policy, Train(lr=1e-2, **settings), Algorithm(), Sampling(stop_token_ids=(EOS,)))


def test_policy_updates_are_bit_equal_with_and_without_head_training_and_never_touch_the_layer(folder):
    """Weight decay would move every tensor that the policy's optimiser holds."""
    outcomes = []
    for trains_head in (False, True):
        policy = load_policy(folder).eval()
        trainer = make_trainer(policy, weight_decay=0.1)
        held = trainer.state_dict()["param_groups"][0]["params"]
        assert len(held) == len(split_state(policy_tensors(policy))[0])
        answers = rollouts(policy, 8)
        samples = [Sample(a.token_ids[:3], a.token_ids[3:]) for a in answers]
        head = MtpHead(policy)
        learner = DraftTrainer(head, policy, depth=3, lr=1e-2, num_updates=4, temperature=1.0)
        norms = []
        for _ in range(2):
            before = split_state({n: t.clone() for n, t in policy_tensors(policy).items()})[1]
            if trains_head:
                batch = collate(policy_features(policy, answers, head.aux_layers), 3)
                assert learner.update([batch]).finite
                trained = split_state(policy_tensors(policy))[1]
                assert not any(torch.equal(before[name], trained[name]) for name in before)
                before = {name: tensor.clone() for name, tensor in trained.items()}
            old = {scored.index: scored.logprobs for scored in trainer.score(samples)}
            advantages = [1.0 if i % 2 else -1.0 for i in range(len(samples))]
            update = trainer.update(PolicyBatch(samples, [old[i] for i in range(len(samples))], advantages))
            norms.append(update.grad_norm)
            after = split_state(policy_tensors(policy))[1]
            assert all(torch.equal(before[name], after[name]) for name in before)
        outcomes.append((norms, {n: t.clone() for n, t in split_state(policy_tensors(policy))[0].items()}))
    (plain_norms, plain), (norms, trunk) = outcomes
    assert plain_norms == norms
    assert plain.keys() == trunk.keys() and all(torch.equal(plain[name], trunk[name]) for name in plain)


def test_acceptance_rises_while_the_layer_learns(policy):
    answers, head = rollouts(policy, 64), MtpHead(policy)
    sampling = Sampling(max_tokens=12, stop_token_ids=(EOS,))
    before = predicted_acceptance(policy, head, answers, 3, sampling).alpha
    learner = DraftTrainer(head, policy, depth=3, lr=5e-3, num_updates=40, temperature=1.0)
    batch = collate(policy_features(policy, answers, head.aux_layers), 3)
    for _ in range(40):
        learner.update([batch])
    assert predicted_acceptance(policy, head, answers, 3, sampling).alpha > before + 0.2


def test_the_tiny_trunk_is_bit_equal_with_and_without_what_its_layer_learns(tmp_path, monkeypatch):
    def no_lesson(head, model, hidden, *batch):
        return sum(p.sum() for p in head.parameters()) * 0.0

    tiny.train_tiny(SMALL, tmp_path / "learns")
    monkeypatch.setattr(tiny, "_mtp_loss", no_lesson)
    tiny.train_tiny(SMALL, tmp_path / "idle")
    (trunk, layer), (other_trunk, idle) = (
        split_state(load_file(tmp_path / name / "model.safetensors")) for name in ("learns", "idle")
    )
    assert all(torch.equal(trunk[name], other_trunk[name]) for name in trunk)
    assert not any(torch.equal(layer[name], idle[name]) for name in layer if "bias" not in name)


def test_the_tiny_layer_learns_from_each_packed_problem_as_if_it_stood_alone():
    """The loss of two packed rows, against one problem and one root at a time with the engine's kind of cache."""
    torch.manual_seed(0)
    model = tiny.make_model(SMALL).eval()
    head = MtpHead(model)
    with torch.no_grad():
        # As initialised the layer hardly looks at anything, and would not notice the problem before its own.
        for parameter in [*head.parameters(), model.lm_head.weight]:
            parameter.normal_()
    tokens, labels, positions = (tensor[:2] for tensor in next(tiny._batches(SMALL)))
    hidden = torch.randn(*tokens.shape, 32)
    total = weight = 0.0
    with torch.no_grad():
        for row in range(2):
            starts = positions[row].eq(0).nonzero().flatten().tolist()
            for start, end in pairwise([*starts, tokens.shape[1]]):
                ids, wanted = tokens[row, start:end], labels[row, start:end]
                embeds, length = embed(model, ids[None]), end - start
                for root in range(length - 2):
                    outputs, memory = hidden[row, start : start + root + 1][None], KeyValueCache()
                    for depth in range(min(tiny.MTP_DEPTH, length - root - 2)):
                        # Depth 0 runs over all positions up to the root, a further depth over the root's chain alone.
                        first = 0 if depth == 0 else root + depth
                        at = torch.arange(first, root + depth + 1)
                        outputs = head(outputs, embeds[:, at + 1], at, memory)[:, -1:]
                        label = int(wanted[root + depth + 2])
                        if label != -100:
                            total -= tiny.MTP_DEPTH_WEIGHT**depth * float(
                                head.logits(outputs)[0, 0].log_softmax(-1)[label]
                            )
                            weight += tiny.MTP_DEPTH_WEIGHT**depth
    assert float(tiny._mtp_loss(head, model, hidden, tokens, labels, positions)) == pytest.approx(
        total / weight, rel=1e-4
    )


def test_the_doctor_says_that_the_policys_own_layer_drafts_or_what_to_set_instead(tmp_path):
    sections = {"run": {"root": str(tmp_path)}, "engine": {"kind": "reference"}, "draft": {"method": "mtp"}}
    data = {"num_train": 4, "num_eval": 2}
    recipe = Recipe.model_validate({**sections, "data": data, "policy": SMALL.model_dump()})
    (says,) = (check for check in checks(recipe) if check.name == "draft")
    assert says.state == "ok" and says.says.startswith("mtp, the policy's own layer")

    plain = tiny.make_model(SMALL.model_copy(update={"num_mtp_layers": 0}))
    tokenizer = load_tokenizer(resolve_policy(recipe.policy).path)
    with pytest.raises(ModelError, match=r"policy\.num_mtp_layers = 1"):
        _check_draft(recipe, plain, tokenizer, num_positions=64)
