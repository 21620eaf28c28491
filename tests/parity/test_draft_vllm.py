"""Publishing to the live vLLM engine, and the alarm for drafts that went wrong in it.

Two engines for all of it: an untied policy in float32 with a head of a reduced vocabulary that has learned something,
and a tied policy in bfloat16 whose head starts from the policy's own rows, all of them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from paceline.config.run import Eagle3Draft
from paceline.config.run import VllmEngine as VllmConfig
from paceline.engine.reference import ReferenceEngine
from paceline.engine.vllm import compat, weights
from paceline.engine.vllm.engine import VllmEngine
from paceline.errors import EngineError, PublishError
from paceline.models.eagle3 import Eagle3Head
from paceline.models.weights import policy_tensors
from paceline.spec.certificate import Certificate, alarm, score_tokens
from paceline.spec.draft_alarm import ALARM_LOG_M, DraftEvidence, draft_alarm
from paceline.testing.draft_faults import FAULTS, load_unseen
from paceline.testing.models import random_head, random_policy
from paceline.train.draft import Answer, policy_features, train_eagle3
from paceline.train.draft_check import first_slot_evidence
from paceline.types import Prompt, Request, Sampling, Versions

torch.set_num_threads(1)

K, VOCAB, MAX_LEN, AUX = 3, 16, 48, (0, 1, 3)
RANDOM = Sampling(temperature=1.0, max_tokens=24)
GREEDY = dataclasses.replace(RANDOM, temperature=0.0)
EAGLE3 = Eagle3Draft(num_draft_tokens=K, aux_layers=AUX, vocab_size=11, epochs=12, depth=1, lr=3e-3)


@dataclass
class Live:
    """An engine, and what was published to it last."""

    engine: VllmEngine
    policy: PreTrainedModel
    head: Eagle3Head
    version: int = 0

    def state(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in policy_tensors(self.policy).items()}

    def restore(self) -> None:
        """Policy and draft as at the start, whatever a test has left behind."""
        self.engine.forget_versions()
        self.engine.publish(self.state(), Versions(0, 0))
        self.engine.publish_draft(self.head.export_state(), Versions(0, 0))


def requests(count: int, seed: int) -> list[Request]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 10, (count,), generator=generator).tolist()
    prompts = [torch.randint(2, VOCAB, (length,), generator=generator).tolist() for length in lengths]
    return [Request(Prompt(f"p{i}", tuple(ids)), 0, seed=1000 * seed + i) for i, ids in enumerate(prompts)]


def answers_of(asked, completions) -> list[Answer]:
    return [
        Answer((*request.prompt.token_ids, *completion.token_ids), len(request.prompt.token_ids))
        for request, completion in zip(asked, completions, strict=True)
    ]


def start(folder: Path, policy: PreTrainedModel, head: Eagle3Head, dtype: str) -> Live:
    config = VllmConfig(max_num_seqs=64, kv_cache_gib=0.125, threads=1, dtype=dtype)
    engine = VllmEngine(folder / "policy", config, EAGLE3, draft_folder=folder / "head", max_model_len=MAX_LEN)
    return Live(engine, policy, head)


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    folder = tmp_path_factory.mktemp("untied")
    policy = random_policy(folder / "policy", num_layers=4, hidden_size=64, vocab_size=VOCAB, spread=0.3)
    with torch.no_grad():
        # Less depends on the distant past, so that a head can learn some of it.
        for name, weight in policy.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_(0.3)
        policy.get_output_embeddings().weight.mul_(2)
    policy.save_pretrained(folder / "policy")
    asked = requests(80, seed=1)
    answers = answers_of(asked, ReferenceEngine(policy).generate(asked, RANDOM).completions)
    head, _ = train_eagle3(policy, answers, EAGLE3, RANDOM)
    head.export(folder / "head")
    live = start(folder, policy, head, "float32")
    yield live
    live.engine.close()


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tied")
    policy = random_policy(folder / "policy", num_layers=4, hidden_size=64, vocab_size=VOCAB, spread=0.3, tied=True)
    head = random_head(folder / "head", policy, aux_layers=AUX)
    live = start(folder, policy, head, "bfloat16")
    yield live
    live.engine.close()


@pytest.fixture(params=["tied", "untied"])
def live(request):
    live = request.getfixturevalue(request.param)
    yield live
    live.restore()


def moved(state: dict[str, torch.Tensor], by: float = 0.02, seed: int = 5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + by * torch.randn(tensor.shape, generator=generator) if tensor.is_floating_point() else tensor
        for name, tensor in state.items()
    }


def used(engine: VllmEngine, model, name: str) -> torch.Tensor:
    """[out, in] of a packed layer, read exactly: the identity through its own kernel."""
    module = model.get_submodule(name)
    with torch.inference_mode():
        identity = torch.eye(engine._runner.get_model().model.embed_tokens.weight.shape[1], dtype=module.weight.dtype)
        return module.quant_method.apply(module, identity, None).t()[:VOCAB]


# -- the alarm ------------------------------------------------------------------------------------------------------


def evidence_of(live: Live, asked, completions) -> DraftEvidence:
    features = policy_features(live.policy, answers_of(asked, completions), live.head.aux_layers)
    return first_slot_evidence(live.policy, live.head, features, completions, RANDOM)


def certificate_is_quiet(live: Live, asked, completions) -> bool:
    certificate = Certificate()
    for request, completion in zip(asked, completions, strict=True):
        ids = torch.tensor([request.prompt.token_ids + completion.token_ids])
        with torch.no_grad():
            logits = live.policy(ids).logits[0, len(request.prompt.token_ids) - 1 : -1]
        noise = torch.Generator().manual_seed(request.seed + 7)
        uniforms = torch.rand(len(logits), generator=noise, dtype=torch.float64)
        certificate.add(score_tokens(logits, ids[0, -len(logits) :], RANDOM, uniforms))
    report = certificate.report()
    assert report.tokens > 1500 and report.z is not None
    return not alarm(report) and abs(report.z) < 4.9


def test_a_right_draft_agrees_in_every_block_and_the_alarm_stays_silent(untied):
    """Five standard deviations for the acceptance: a false-alarm rate of 6e-7."""
    asked = requests(100, seed=2)
    completions = untied.engine.generate(asked, RANDOM).completions
    evidence = evidence_of(untied, asked, completions)
    report = evidence.report()
    assert evidence.num_blocks > 1000 and report["agreement"] > 0.995
    assert report["z"] is not None and abs(report["z"]) < 5
    assert report["acceptance"] is not None and report["acceptance"] > 0.15
    assert draft_alarm(evidence) is None
    assert certificate_is_quiet(untied, asked, completions)


@pytest.mark.parametrize("name", FAULTS)
def test_a_draft_that_went_wrong_in_the_engine_raises_the_alarm_and_changes_no_law(untied, name):
    fault = FAULTS[name]
    older = random_head(Path(untied.engine._runner.model_config.model).parent / "older", untied.policy,
                        aux_layers=AUX, draft_ids=untied.head.draft_ids, seed=3)  # fmt: skip
    asked = requests(80, seed=3)
    with fault.planted(untied.engine, untied.head.export_state(), older.export_state()):
        completions = untied.engine.generate(asked, RANDOM).completions
    evidence = DraftEvidence()
    for request, completion in zip(asked, completions, strict=True):
        evidence.merge(evidence_of(untied, [request], [completion]))
        if draft_alarm(evidence) is not None:
            break
    assert draft_alarm(evidence) is not None
    # A completion is looked at as a whole: it may end some blocks later.
    assert evidence.num_blocks <= fault.within_blocks + RANDOM.max_tokens
    # Acceptance alone shows it too, more slowly.
    assert evidence_of(untied, asked, completions).log_m_acceptance > ALARM_LOG_M
    assert certificate_is_quiet(untied, asked, completions)


def test_after_the_faults_the_engine_drafts_as_published(untied):
    asked = requests(40, seed=4)
    evidence = evidence_of(untied, asked, untied.engine.generate(asked, RANDOM).completions)
    assert evidence.report()["agreement"] > 0.99


def test_a_request_at_the_length_limit_does_not_spoil_the_drafts_of_the_others(untied):
    """vLLM drafts for nobody while k tokens do not fit behind the longest request, unless it is told of more room."""
    long = dataclasses.replace(RANDOM, max_tokens=MAX_LEN)
    asked = requests(24, seed=6)
    longest = Request(Prompt("long", tuple(2 + i % 14 for i in range(MAX_LEN - 12))), 0, seed=1)
    completions = untied.engine.generate([longest, *asked], long).completions
    assert len(completions[0].token_ids) == 12
    features = policy_features(untied.policy, answers_of([longest, *asked], completions), untied.head.aux_layers)
    evidence = first_slot_evidence(untied.policy, untied.head, features, completions, long)
    assert evidence.report()["agreement"] > 0.99


# -- versions, chunks, failures -------------------------------------------------------------------------------------


def chunks_of(state: dict[str, torch.Tensor], num_chunks: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Any split in any order; one more chunk is empty."""
    generator = torch.Generator().manual_seed(seed)
    names = [list(state)[i] for i in torch.randperm(len(state), generator=generator).tolist()]
    chunks = [{name: state[name] for name in names[start::num_chunks]} for start in range(num_chunks)]
    return [*chunks[:1], {}, *chunks[1:]]


def test_any_split_into_chunks_is_the_same_publish(live):
    asked = requests(8, seed=7)
    policy, draft = moved(live.state()), moved(live.head.export_state())
    whole = live.engine.publish(policy, Versions(1)), live.engine.publish_draft(draft, Versions(1, 1))
    expected = live.engine.generate(asked, GREEDY).completions
    assert {completion.versions for completion in expected} == {Versions(1, 1)}
    for version, num_chunks in ((2, 1), (3, 2), (4, 5)):
        live.engine.forget_versions()
        # Something else in between, so that a publish which does nothing shows.
        live.engine.publish(live.state(), Versions(0))
        live.engine.forget_versions()
        report = live.engine.publish(iter(chunks_of(policy, num_chunks, seed=version)), Versions(version))
        again = live.engine.publish_draft(iter(chunks_of(draft, num_chunks, seed=version)), Versions(version, version))
        assert (report.digest, again.digest) == (whole[0].digest, whole[1].digest)
        assert report.checksums == whole[0].checksums
        got = live.engine.generate(asked, GREEDY).completions
        assert [c.token_ids for c in got] == [c.token_ids for c in expected]
        assert [c.blocks for c in got] == [c.blocks for c in expected]
        assert {completion.versions for completion in got} == {Versions(version, version)}


def test_a_stream_that_breaks_off_leaves_the_engine_unusable_until_a_whole_publish(live):
    asked = requests(6, seed=8)
    before = live.engine.generate(asked, GREEDY).completions
    name = "model.layers.1.self_attn.v_proj.weight"

    def breaks():
        for place, chunk in enumerate(chunks_of(moved(live.state()), 4, seed=1)):
            if place == 3:
                raise ConnectionError("the sender is gone")
            yield chunk

    state = moved(live.state())
    faults = [
        (ConnectionError, "sender is gone", breaks()),
        (PublishError, rf"missing tensors \['{name}'\]", [{n: t for n, t in state.items() if n != name}]),
        (PublishError, f"{name} came twice", [state, {name: state[name]}]),
        (PublishError, f"{name} has shape", [{**state, name: state[name][1:]}]),
        (PublishError, f"{name} comes as torch.float64", [{**state, name: state[name].double()}]),
        (PublishError, f"{name} holds NaN", [{**state, name: state[name] * torch.nan}]),
        (PublishError, "unknown tensor stray", [{"stray": state[name]}, state]),
    ]
    for version, (error, message, stream) in enumerate(faults, 1):
        with pytest.raises(error, match=message):
            live.engine.publish(iter(stream), Versions(version))
        with pytest.raises(EngineError, match=f"publish of policy version {version} failed"):
            live.engine.generate(asked, GREEDY)
    live.engine.forget_versions()
    live.engine.publish(live.state(), Versions(10))
    after = live.engine.generate(asked, GREEDY).completions
    assert [c.token_ids for c in after] == [c.token_ids for c in before]
    assert [c.blocks for c in after] == [c.blocks for c in before]


def test_a_broken_draft_stream_makes_the_engine_unusable_too(untied):
    state = untied.head.export_state()
    with pytest.raises(PublishError, match="missing tensors"):
        untied.engine.publish_draft(iter([{"fc.weight": state["fc.weight"]}]), Versions(0, 5))
    with pytest.raises(EngineError, match="publish of draft version 5 failed"):
        untied.engine.generate(requests(1, seed=1), GREEDY)
    untied.restore()
    untied.engine.generate(requests(1, seed=1), GREEDY)


def test_versions_only_rise_and_keep_their_content(live):
    first, second = moved(live.state(), seed=1), moved(live.state(), seed=2)
    name = "model.layers.2.mlp.down_proj.weight"
    live.engine.publish(first, Versions(4))
    live.engine.publish(first, Versions(4))
    with pytest.raises(PublishError, match=rf"{name} of version 4 differs.*Nothing was loaded"):
        live.engine.publish({**first, name: second[name]}, Versions(4))
    with pytest.raises(PublishError, match="policy version 3 was published after version 4"):
        live.engine.publish(second, Versions(3))
    live.engine.publish(second, Versions(5))
    with pytest.raises(PublishError, match=rf"{name} of version 6 is that of version 4"):
        live.engine.publish({**moved(live.state(), seed=3), name: first[name]}, Versions(6))
    draft = live.head.export_state()
    live.engine.publish_draft(moved(draft), Versions(5, 2))
    with pytest.raises(PublishError, match="draft version 1 was published after version 2"):
        live.engine.publish_draft(draft, Versions(5, 1))
    with pytest.raises(PublishError, match=r"draft tensor .* of version 2 differs"):
        live.engine.publish_draft(draft, Versions(5, 2))
    # Refused before anything was loaded: the engine goes on.
    assert live.engine.generate(requests(2, seed=1), GREEDY).completions[0].versions == Versions(5, 2)


# -- aliases --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["policy first", "draft first"])
def test_publishing_policy_or_draft_never_changes_the_other(live, order):
    """The head starts from a copy of the policy's rows, and the two share the embedding in vLLM."""
    policy_model, draft_model = live.engine._runner.get_model(), live.engine._runner.drafter.model
    embedding = policy_model.model.embed_tokens
    assert draft_model.model.embed_tokens is embedding
    policy, draft = moved(live.state()), moved(live.head.export_state())
    dtype = live.engine._runner.model_config.dtype
    rows = policy.get("lm_head.weight", policy["model.embed_tokens.weight"]).to(dtype)

    def publish_policy() -> None:
        before = used(live.engine, draft_model, "lm_head").clone()
        live.engine.publish(policy, Versions(1))
        assert torch.equal(used(live.engine, draft_model, "lm_head"), before)
        assert torch.equal(used(live.engine, policy_model, "lm_head"), rows)
        assert torch.equal(draft_model.model.embed_tokens.weight[:VOCAB], policy["model.embed_tokens.weight"].to(dtype))

    def publish_draft() -> None:
        before = used(live.engine, policy_model, "lm_head").clone(), embedding.weight.clone()
        live.engine.publish_draft(draft, Versions(1, 1))
        assert torch.equal(used(live.engine, policy_model, "lm_head"), before[0])
        assert torch.equal(embedding.weight, before[1])
        found = used(live.engine, draft_model, "lm_head")
        assert torch.equal(found[: len(draft["lm_head.weight"])], draft["lm_head.weight"].to(dtype))

    steps = [publish_policy, publish_draft]
    for step in steps if order == "policy first" else steps[::-1]:
        step()


def test_a_tied_policys_lm_head_may_come_beside_its_embedding_in_any_chunk_and_must_equal_it(tied):
    state = moved(tied.state())
    head = {"lm_head.weight": state["model.embed_tokens.weight"]}
    tied.engine.publish(iter([head, state]), Versions(1))
    tied.engine.publish(iter([state, head]), Versions(1))
    with pytest.raises(PublishError, match=r"lm_head\.weight differs"):
        tied.engine.publish(iter([{"lm_head.weight": head["lm_head.weight"] + 1}, state]), Versions(2))
    tied.restore()


# -- what the checks see --------------------------------------------------------------------------------------------

LAYERS = ["model.layers.1.self_attn.qkv_proj", "model.layers.2.mlp.down_proj", "lm_head"]
CHANGES = {
    "the last bits of one weight": lambda weight: _one_step(weight),
    "two rows swapped": lambda weight: weight[[1, 0, *range(2, len(weight))]],
    "two columns swapped": lambda weight: weight[:, [1, 0, *range(2, weight.shape[1])]],
    "an older weight": lambda weight: _moved_weight(weight),
}


def _moved_weight(weight: torch.Tensor) -> torch.Tensor:
    return weight + (1e-2 * torch.randn(weight.shape, generator=torch.Generator())).to(weight.dtype)


def _one_step(weight: torch.Tensor) -> torch.Tensor:
    """bfloat16: one unit in the last place of one entry of usual size; float32: 2e-4 of it."""
    changed = weight.clone()
    row, column = divmod(int((weight.float().abs() - weight.float().std()).abs().argmin()), weight.shape[1])
    changed[row, column] *= 1 + (2**-8 if weight.dtype == torch.bfloat16 else 2e-4)
    return changed


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_packed_layer_that_computes_with_other_weights_is_named(live, layer, change, monkeypatch):
    """The planted fault: after vLLM's reload one layer is packed again from a changed copy of the right weight."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    module = live.engine._runner.get_model().get_submodule(layer)
    load = live.engine._load

    def damages(what, stream):
        load(what, stream)
        size = live.engine._runner.get_model().config.hidden_size if layer != LAYERS[1] else module.input_size
        right = module.quant_method.apply(module, torch.eye(size, dtype=module.weight.dtype), None).t().contiguous()
        kept = module.weight
        module.weight = torch.nn.Parameter(CHANGES[change](right), requires_grad=False)
        dispatch_cpu_unquantized_gemm(module, remove_weight=False)
        module.weight = kept

    monkeypatch.setattr(live.engine, "_load", damages)
    with pytest.raises(PublishError, match=r"in the engine is not the published one: row") as caught:
        live.engine.publish(live.state(), Versions(1))
    assert layer.rpartition(".")[2] in str(caught.value) or "qkv" in layer
    monkeypatch.undo()


def test_a_layer_that_was_not_packed_again_is_named_even_when_its_products_are_right(live, monkeypatch):
    """An update may be too small for any product: the stale kernel is found because it is the object it was."""
    module = live.engine._runner.get_model().model.layers[1].mlp.down_proj
    load, kept = live.engine._load, module.cpu_linear

    def keeps_one(what, stream):
        load(what, stream)
        module.cpu_linear = kept

    monkeypatch.setattr(live.engine, "_load", keeps_one)
    with pytest.raises(PublishError, match=r"layers\.1\.mlp\.down_proj\.weight .* earlier publish"):
        live.engine.publish(live.state(), Versions(1))
    monkeypatch.undo()


def test_a_readable_tensor_is_compared_bit_by_bit(live, monkeypatch):
    load = live.engine._load
    norm = live.engine._runner.get_model().model.layers[0].input_layernorm

    def damages(what, stream):
        load(what, stream)
        norm.weight.data[3] *= 1 + 2.0**-7

    monkeypatch.setattr(live.engine, "_load", damages)
    with pytest.raises(PublishError, match=r"layers\.0\.input_layernorm\.weight in the engine"):
        live.engine.publish(live.state(), Versions(1))
    monkeypatch.undo()


def test_a_loader_that_fails_in_the_middle_does_not_spoil_the_next_publish(live, monkeypatch):
    """vLLM keeps half-loaded layers and would count them into the next load; `compat.end_reload` clears them."""
    asked = requests(6, seed=9)
    before = live.engine.generate(asked, GREEDY).completions
    take = weights.Published.stream

    def explodes(self, chunks):
        for number, item in enumerate(take(self, chunks)):
            if number == 3:  # Two of the three tensors of a fused layer have come.
                raise MemoryError("inside vLLM's loader")
            yield item

    monkeypatch.setattr(weights.Published, "stream", explodes)
    with pytest.raises(MemoryError):
        live.engine.publish(iter([moved(live.state())]), Versions(1))
    monkeypatch.undo()
    with pytest.raises(EngineError, match="publish of policy version 1 failed"):
        live.engine.generate(asked, GREEDY)
    live.engine.publish(live.state(), Versions(2))
    after = live.engine.generate(asked, GREEDY).completions
    assert [c.token_ids for c in after] == [c.token_ids for c in before]


def test_a_draft_that_went_wrong_behind_the_checks_is_put_right_by_its_next_publish(untied):
    asked = requests(12, seed=10)
    alive = untied.engine.generate(asked, GREEDY)
    load_unseen(untied.engine, {name: t * 0 for name, t in untied.head.export_state().items()})
    dead = untied.engine.generate(asked, GREEDY)
    untied.restore()
    again = untied.engine.generate(asked, GREEDY)
    assert [c.token_ids for c in dead.completions] == [c.token_ids for c in alive.completions]
    assert dead.stats.accepted < alive.stats.accepted
    assert [c.blocks for c in again.completions] == [c.blocks for c in alive.completions]


def test_a_second_reload_helper_is_not_needed_for_a_healthy_model(untied):
    """`end_reload` on a model that is not being reloaded changes nothing."""
    asked = requests(4, seed=11)
    before = untied.engine.generate(asked, GREEDY).completions
    compat.end_reload(untied.engine._runner, untied.engine._runner.get_model())
    assert [c.token_ids for c in untied.engine.generate(asked, GREEDY).completions] == [c.token_ids for c in before]
