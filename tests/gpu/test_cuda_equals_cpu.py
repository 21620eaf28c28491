"""On a GPU the trainer, the head and the verify step compute what they compute on a CPU. One GPU, no vLLM.

The CPU is the slow twin: the other tests hold its results to their definitions. Products keep all bits of float32 (no
TF32), as on the CPU. Even a float64 policy is known to seven digits only, because its norms and its RoPE are float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from transformers import PreTrainedModel

from paceline.config.run import Algorithm, Train
from paceline.models.eagle3 import Eagle3Config, Eagle3Head, policy_parts
from paceline.spec.certificate import TokenScores, score_tokens
from paceline.spec.sampling import policy_probs
from paceline.spec.verify import NO_TOKEN, verify
from paceline.testing.runs import tiny_policy
from paceline.train.draft import (
    Answer,
    DraftTrainer,
    collate,
    policy_features,
    predicted_acceptance,
    summed_loss,
)
from paceline.train.logprobs import Sample
from paceline.train.policy import PolicyBatch, PolicyTrainer
from paceline.types import Sampling

pytestmark = pytest.mark.gpu

GPU = "cuda"
DEVICES = ("cpu", GPU)
VOCAB_SIZE, AUX_LAYERS, DEPTH = 20, (0, 1, 2), 3
LENGTHS = [(3, 7), (1, 4), (9, 2), (4, 12), (5, 5), (2, 30)]
"""(prompt, response) tokens."""
ADVANTAGES = [0.5, -1.0, 0.0, 2.0, -0.3, 1.1]


@pytest.fixture(autouse=True)
def _whole_products() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def policy_on(device: str, dtype: torch.dtype) -> PreTrainedModel:
    """The same weights on every device."""
    policy: PreTrainedModel = tiny_policy(vocab_size=VOCAB_SIZE, dtype=dtype)
    return policy.to(device)


def random_answers() -> list[Answer]:
    generator = torch.Generator().manual_seed(7)
    return [
        Answer(tuple(torch.randint(VOCAB_SIZE, (prompt + response,), generator=generator).tolist()), prompt)
        for prompt, response in LENGTHS
    ]


def random_samples() -> list[Sample]:
    return [Sample(a.token_ids[: a.prompt_length], a.token_ids[a.prompt_length :]) for a in random_answers()]


def fresh_head(policy: PreTrainedModel, draft_size: int) -> Eagle3Head:
    """Its noise is drawn on the CPU, so that it is the same on every device."""
    draft_ids = torch.arange(0, VOCAB_SIZE, VOCAB_SIZE // draft_size)[:draft_size]
    config = Eagle3Config.for_policy(policy.config, AUX_LAYERS, draft_size)
    return Eagle3Head.initialize(config, policy, draft_ids, torch.Generator().manual_seed(5)).to(policy.device)


def make_trainer(policy: PreTrainedModel, sampling: Sampling, dtype: str = "float32") -> PolicyTrainer:
    train = Train.model_validate({"lr": 1e-3, "dtype": dtype, "micro_batch_tokens": 40})
    return PolicyTrainer(policy, train, Algorithm(), sampling)


def scores(trainer: PolicyTrainer) -> list[torch.Tensor]:
    """Per sample [T], on the trainer's device."""
    found = {score.index: score.logprobs for score in trainer.score(random_samples())}
    return [found[index] for index in range(len(found))]


def assert_near(found: torch.Tensor, expected: torch.Tensor, share: float, what: str) -> None:
    """Within `share` of the largest entry: small entries carry the rounding of the large ones."""
    off, largest = float((found.cpu() - expected.cpu()).abs().max()), float(expected.abs().max())
    assert off <= share * largest, f"{what}: off by {off:.2g}, largest {largest:.2g}"


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7, top_k=9), Sampling(top_p=0.9)])
def test_on_cuda_a_policy_scores_and_learns_as_on_the_cpu(sampling: Sampling) -> None:
    """Log-probabilities, the gradient of the first update, and the loss over four updates on one batch."""
    results = []
    for device in DEVICES:
        trainer = make_trainer(policy_on(device, torch.float64), sampling)
        batch = PolicyBatch(random_samples(), scores(trainer), ADVANTAGES)
        gradient = trainer.backward(batch)
        grads = {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}
        updates = [trainer.step(gradient), *(trainer.update(batch) for _ in range(3))]
        assert all(math.isfinite(update.grad_norm) for update in updates)
        assert all(bool(tensor.isfinite().all()) for tensor in trainer.weights().values())
        results.append((batch.old_logprobs, grads, updates))
    (logprobs, grads, updates), (gpu_logprobs, gpu_grads, gpu_updates) = results
    for expected, found in zip(logprobs, gpu_logprobs, strict=True):
        assert found.device.type == GPU
        torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=1e-4)
    assert grads.keys() == gpu_grads.keys()
    for name, expected in grads.items():
        assert_near(gpu_grads[name], expected, 1e-4, name)
    assert [u.skipped_tokens for u in gpu_updates] == [u.skipped_tokens for u in updates]
    assert [u.loss for u in gpu_updates] == pytest.approx([u.loss for u in updates], abs=1e-3)
    assert gpu_updates[-1].loss < gpu_updates[0].loss - 0.02


def test_in_bfloat16_cuda_scores_are_no_further_from_float32_than_those_of_the_cpu() -> None:
    """Autocast rounds in other places on a GPU, but not by more; and what it learns from them lowers the loss."""
    exact_N = torch.cat(scores(make_trainer(policy_on("cpu", torch.float32), Sampling())))
    off = {}
    for device in DEVICES:
        trainer = make_trainer(policy_on(device, torch.float32), Sampling(), "bfloat16")
        old = scores(trainer)
        off[device] = float((torch.cat(old).cpu() - exact_N).abs().mean())
        updates = [trainer.update(PolicyBatch(random_samples(), old, ADVANTAGES)) for _ in range(4)]
        assert updates[-1].loss < updates[0].loss - 0.02, device
    assert 0 < off[GPU] < 2 * off["cpu"]


@pytest.mark.parametrize("draft_size", [VOCAB_SIZE, 10])
def test_on_cuda_a_head_learns_and_drafts_as_on_the_cpu(draft_size: int) -> None:
    """Features, the gradient of one lesson, the loss over five updates, the acceptance length predicted at the end."""
    results = []
    for device in DEVICES:
        policy, answers = policy_on(device, torch.float32), random_answers()
        head, features = fresh_head(policy, draft_size), policy_features(policy, answers, AUX_LAYERS)
        summed_loss(head, policy, collate(features, DEPTH), DEPTH, temperature=1.0).backward()
        grads = {name: p.grad.clone() for name, p in head.named_parameters() if p.grad is not None}
        head.zero_grad()
        trainer = DraftTrainer(head, policy, DEPTH, lr=1e-3, num_updates=5, temperature=1.0)
        # Answers in rows of their own, and packed ones.
        batches = [collate(features[:3], DEPTH), collate(features[3:], DEPTH, row_tokens=64)]
        updates = [trainer.update(batches) for _ in range(5)]
        assert all(update.finite for update in updates)
        acceptance = predicted_acceptance(policy, head, answers, 2, Sampling())
        results.append((features, grads, updates, acceptance))
    (features, grads, updates, acceptance), (gpu_features, gpu_grads, gpu_updates, gpu_acceptance) = results
    for ours, theirs in zip(features, gpu_features, strict=True):
        assert theirs.aux.device.type == theirs.final.device.type == GPU
        assert_near(theirs.aux, ours.aux, 1e-4, "aux")
        assert_near(theirs.final, ours.final, 1e-4, "final")
    assert (
        grads.keys()
        == gpu_grads.keys()
        == dict(fresh_head(policy_on("cpu", torch.float32), 10).named_parameters()).keys()
    )
    for name, expected in grads.items():
        assert_near(gpu_grads[name], expected, 1e-3, name)
    assert [u.num_pairs for u in gpu_updates] == [u.num_pairs for u in updates]
    assert [u.loss for u in gpu_updates] == pytest.approx([u.loss for u in updates], rel=1e-3)
    assert gpu_updates[-1].loss < gpu_updates[0].loss
    assert gpu_acceptance.alpha == pytest.approx(acceptance.alpha, rel=0.02)


def test_the_teacher_of_a_bfloat16_policy_on_cuda_is_the_policy_and_its_lesson_is_finite() -> None:
    """The policy's own logits are one product away from the states that were read; it gets no gradient."""
    policy = policy_on(GPU, torch.bfloat16)
    answers, output = random_answers(), policy_parts(policy).output
    features = policy_features(policy, answers, AUX_LAYERS)
    for feature in features:
        with torch.no_grad():
            logits = policy(input_ids=torch.tensor([feature.answer.token_ids], device=GPU)).logits[0].float()
            found = output(feature.final.to(output.weight.dtype)).float()
        # The states come from a pass over other rows, and may have been rounded the other way.
        assert_near(found, logits, 0.03, "logits")
    head = fresh_head(policy, VOCAB_SIZE)
    summed_loss(head, policy, collate(features, DEPTH), DEPTH, temperature=1.0).backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in head.parameters())
    assert all(p.grad is None for p in policy.parameters())


@pytest.mark.parametrize("is_deterministic", [True, False])
@pytest.mark.parametrize("sampling", [Sampling(temperature=1.3), Sampling(top_k=5), Sampling(top_p=0.8, min_p=0.02)])
def test_a_verify_step_on_cuda_commits_what_the_cpu_commits_from_the_same_noise(
    is_deterministic: bool, sampling: Sampling
) -> None:
    """4,000 blocks with placeholders among the drafts; the law of those on the CPU is enumerated in tests/law."""
    num_rows, num_slots = 4000, 3
    generator = torch.Generator().manual_seed(11)
    noise = torch.randn(2, num_rows, num_slots + 1, VOCAB_SIZE, generator=generator, dtype=torch.float64)
    logits, draft_probs = 1.5 * noise[0], (1.5 * noise[0] + noise[1])[:, :num_slots].softmax(-1)
    drafts = draft_probs.flatten(0, 1).multinomial(1, generator=generator).view(num_rows, num_slots)
    drafts[torch.rand(num_rows, num_slots, generator=generator) < 0.1] = NO_TOKEN
    uniforms = torch.rand(num_rows, num_slots + 1, generator=generator, dtype=torch.float64)
    ours, theirs = (
        verify(
            policy_probs(logits.to(device), sampling),
            drafts.to(device),
            None if is_deterministic else draft_probs.to(device),
            uniforms_BK1=uniforms.to(device),
        )
        for device in DEVICES
    )
    assert theirs.tokens_BK1.device.type == GPU
    assert set(ours.num_accepted_B.tolist()) == {0, 1, 2, 3}
    assert torch.equal(theirs.num_accepted_B.cpu(), ours.num_accepted_B)
    assert torch.equal(theirs.tokens_BK1.cpu(), ours.tokens_BK1)


def test_the_certificate_scores_tokens_on_cuda_as_on_the_cpu() -> None:
    """Ids and logits on the GPU, the noise of the ranks from the CPU, as the loop hands them in."""
    num_tokens, generator = 3000, torch.Generator().manual_seed(3)
    logits = 2.0 * torch.randn(num_tokens, VOCAB_SIZE, generator=generator, dtype=torch.float64)
    sampling = Sampling(temperature=0.8, top_k=12)
    token_ids = policy_probs(logits, sampling).multinomial(1, generator=generator).squeeze(1)
    uniforms = torch.rand(num_tokens, generator=generator, dtype=torch.float64)
    excluded = torch.randint(VOCAB_SIZE, (num_tokens,), generator=generator)
    excluded = torch.where(excluded == token_ids, (excluded + 1) % VOCAB_SIZE, excluded)

    def scored(device: str, is_recovered: bool) -> TokenScores:
        placed = logits.to(device), token_ids.to(device), sampling, uniforms
        return score_tokens(
            *placed, excluded_ids_N=excluded.to(device) if is_recovered else None, in_order=not is_recovered
        )

    for is_recovered in (False, True):
        ours, theirs = (scored(device, is_recovered) for device in DEVICES)
        for name in TokenScores.__slots__:
            torch.testing.assert_close(getattr(theirs, name).cpu(), getattr(ours, name), rtol=1e-9, atol=1e-9)
