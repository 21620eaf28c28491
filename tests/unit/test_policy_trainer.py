"""The policy trainer: one law of log-probabilities, and a loss that knows nothing of micro-batches."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from paceline.config.run import Algorithm, Train
from paceline.engine.reference import ReferenceEngine
from paceline.errors import CheckpointError, ModelError
from paceline.models.weights import policy_tensors
from paceline.testing.runs import tiny_policy
from paceline.train.logprobs import Sample, plan_micro_batches, response_logits
from paceline.train.policy import PolicyBatch, PolicyTrainer
from paceline.types import Prompt, Request, Sampling, Versions

torch.set_num_threads(1)

LENGTHS = [(3, 7), (1, 1), (9, 2), (4, 12), (5, 5), (2, 30)]
"""(prompt, response) tokens."""


def samples(lengths=LENGTHS, vocab=20):
    generator = torch.Generator().manual_seed(3)
    return [
        Sample(
            tuple(torch.randint(0, vocab, (p,), generator=generator).tolist()),
            tuple(torch.randint(0, vocab, (t,), generator=generator).tolist()),
        )
        for p, t in lengths
    ]


def trainer(policy=None, sampling=None, **train):
    config = Train.model_validate({"lr": 1e-3, **train})
    return PolicyTrainer(policy or tiny_policy(), config, Algorithm(), sampling or Sampling())


def row_by_row(policy, sample, sampling):
    """[T] log-probabilities by the definition: no batch, no padding, one softmax per token."""
    ids = [*sample.prompt_ids, *sample.response_ids]
    logprobs = []
    for position in range(len(sample.prompt_ids), len(ids)):
        logits = policy(torch.tensor([ids[:position]])).logits[0, -1]
        logprobs.append(torch.log_softmax(logits / sampling.temperature, -1)[ids[position]])
    return torch.stack(logprobs)


def scored(policy_trainer, batch):
    return {s.index: s for s in policy_trainer.score(batch)}


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.5])
@pytest.mark.parametrize("micro_batch_tokens", [1, 40, 10_000])
def test_scores_in_padded_batches_equal_scores_token_by_token(temperature, micro_batch_tokens):
    sampling = Sampling(temperature=temperature)
    ours = trainer(sampling=sampling, micro_batch_tokens=micro_batch_tokens)
    batch = samples()
    result = scored(ours, batch)
    assert sorted(result) == list(range(len(batch)))
    with torch.no_grad():
        for index, sample in enumerate(batch):
            torch.testing.assert_close(
                result[index].logprobs, row_by_row(ours.model, sample, sampling), atol=1e-10, rtol=0
            )


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.7), Sampling(top_k=5, top_p=0.9), Sampling(min_p=0.1)])
def test_trainer_and_engine_give_the_same_logprobs_so_that_the_ratio_starts_at_one(sampling):
    policy = tiny_policy()
    prompts = [Prompt(f"p{i}", sample.prompt_ids) for i, sample in enumerate(samples())]
    sampling = Sampling(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, max_tokens=9)
    rollouts = ReferenceEngine(policy).generate([Request(p, 0, seed=i) for i, p in enumerate(prompts)], sampling)
    batch = [Sample(p.token_ids, c.token_ids) for p, c in zip(prompts, rollouts.completions, strict=True)]
    for index, score in scored(trainer(policy, sampling), batch).items():
        expected = torch.tensor(rollouts.completions[index].logprobs, dtype=torch.float64)
        torch.testing.assert_close(score.logprobs, expected, atol=1e-9, rtol=0)


def test_micro_batches_hold_every_sample_once_within_the_limit():
    for limit in (1, 12, 40, 64, 1000):
        batch = samples()
        plan = plan_micro_batches(batch, limit)
        assert sorted(i for part in plan for i in part) == list(range(len(batch)))
        for part in plan:
            assert len(part) == 1 or len(part) * max(len(batch[i]) for i in part) <= limit


def gradients(policy, batch, advantages, **train):
    ours = trainer(copy.deepcopy(policy), lr=0.0, **train)
    with torch.no_grad():
        # Off-policy, so that ratios differ and some are clipped.
        noise = torch.Generator().manual_seed(1)
        old = [
            scored(ours, batch)[i].logprobs + 0.3 * torch.randn(len(s.response_ids), generator=noise)
            for i, s in enumerate(batch)
        ]
    update = ours.update(PolicyBatch(batch, old, advantages))
    return update, {name: p.grad for name, p in ours.model.named_parameters() if p.grad is not None}


ADVANTAGES = [0.5, -1.0, 0.0, 2.0, -0.3, 1.1]


def test_loss_and_gradient_do_not_depend_on_the_micro_batches():
    policy, batch = tiny_policy(), samples()
    whole, whole_grads = gradients(policy, batch, ADVANTAGES, micro_batch_tokens=10_000, max_grad_norm=1e9)
    for limit in (1, 40, 64):
        parts, grads = gradients(policy, batch, ADVANTAGES, micro_batch_tokens=limit, max_grad_norm=1e9)
        assert parts.loss == pytest.approx(whole.loss, abs=1e-12)
        assert parts.grad_norm == pytest.approx(whole.grad_norm, abs=1e-10)
        assert parts.clipped_fraction == whole.clipped_fraction > 0
        for name, grad in grads.items():
            torch.testing.assert_close(grad, whole_grads[name], atol=1e-11, rtol=0)


def test_on_policy_gradient_is_the_plain_policy_gradient_over_all_tokens():
    policy, batch = tiny_policy(), samples()
    ours = trainer(copy.deepcopy(policy), lr=0.0, max_grad_norm=1e9)
    result = scored(ours, batch)
    update = ours.update(PolicyBatch(batch, [result[i].logprobs for i in range(len(batch))], ADVANTAGES))
    num_tokens = sum(t for _, t in LENGTHS)
    terms = [a * row_by_row(policy, s, Sampling()).sum() for a, s in zip(ADVANTAGES, batch, strict=True)]
    (-torch.stack(terms).sum() / num_tokens).backward()
    for parameter, ours_parameter in zip(policy.parameters(), ours.model.parameters(), strict=True):
        # Qwen3 normalises in float32, whatever the weights are.
        torch.testing.assert_close(ours_parameter.grad, parameter.grad, atol=1e-6, rtol=0)
    # With every ratio at one the objective is the mean advantage over tokens.
    expected = -sum(a * t for a, (_, t) in zip(ADVANTAGES, LENGTHS, strict=True)) / num_tokens
    assert update.loss == pytest.approx(expected, abs=1e-12)
    assert update.clipped_fraction == 0


def test_an_update_raises_the_probability_of_what_was_better_than_its_group():
    ours = trainer(lr=1e-3)
    batch = samples([(3, 6), (3, 6)])
    before = scored(ours, batch)
    ours.update(PolicyBatch(batch, [before[i].logprobs for i in range(2)], [1.0, -1.0]))
    after = scored(ours, batch)
    assert after[0].logprobs.sum() > before[0].logprobs.sum()
    assert after[1].logprobs.sum() < before[1].logprobs.sum()
    assert ours.version == 1


def test_without_any_contrast_weights_and_moments_stay_bit_equal():
    ours = trainer(weight_decay=0.1)
    batch = samples()
    before = {name: tensor.clone() for name, tensor in ours.weights().items()}
    update = ours.update(PolicyBatch(batch, [torch.zeros(t) for _, t in LENGTHS], [0.0] * len(batch)))
    assert all(torch.equal(tensor, before[name]) for name, tensor in ours.weights().items())
    assert ours.state_dict()["state"] == {}
    assert (update.loss, update.grad_norm, ours.version) == (0.0, 0.0, 1)


def test_learning_rate_zero_leaves_the_policy_as_it_is():
    ours = trainer(lr=0.0)
    batch = samples()
    before = {name: tensor.clone() for name, tensor in ours.weights().items()}
    result = scored(ours, batch)
    assert ours.update(PolicyBatch(batch, [result[i].logprobs for i in range(len(batch))], ADVANTAGES)).grad_norm > 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in ours.weights().items())


def test_the_gradient_is_clipped_by_its_global_norm():
    policy, batch = tiny_policy(), samples()
    free, free_grads = gradients(policy, batch, ADVANTAGES, max_grad_norm=1e9)
    limit = free.grad_norm / 10
    clipped, grads = gradients(policy, batch, ADVANTAGES, max_grad_norm=limit)
    assert clipped.grad_norm == pytest.approx(free.grad_norm)
    assert math.sqrt(sum(float(g.square().sum()) for g in grads.values())) == pytest.approx(limit, rel=1e-5)
    name = "lm_head.weight"
    torch.testing.assert_close(grads[name], free_grads[name] / 10, rtol=1e-5, atol=0)


def test_tokens_outside_the_kept_set_have_no_gradient_and_are_counted():
    sampling = Sampling(top_k=3)
    ours = trainer(sampling=sampling, lr=0.0)
    batch = samples()
    result = scored(ours, batch)
    outside = sum(int(torch.isinf(s.logprobs).sum()) for s in result.values())
    assert outside > 0
    update = ours.update(PolicyBatch(batch, [result[i].logprobs for i in range(len(batch))], [1.0] * len(batch)))
    assert update.skipped_tokens == outside
    assert math.isfinite(update.loss)
    assert math.isfinite(update.grad_norm)


def test_a_gradient_that_is_not_finite_is_an_error_and_changes_nothing():
    ours = trainer()
    batch = samples()
    before = {name: tensor.clone() for name, tensor in ours.weights().items()}
    with pytest.raises(ModelError, match="gradient norm"):
        ours.update(PolicyBatch(batch, [torch.zeros(t) for _, t in LENGTHS], [1e308] * len(batch)))
    assert all(torch.equal(tensor, before[name]) for name, tensor in ours.weights().items())
    assert ours.version == 0


def test_two_updates_equal_one_update_a_reload_and_another():
    batch = samples()

    def step(ours):
        result = scored(ours, batch)
        ours.update(PolicyBatch(batch, [result[i].logprobs for i in range(len(batch))], ADVANTAGES))

    straight = trainer()
    step(straight)
    step(straight)
    first = trainer()
    step(first)
    weights = {name: tensor.clone() for name, tensor in first.weights().items()}
    second = trainer(tiny_policy(seed=9))
    second.load(weights, copy.deepcopy(first.state_dict()), version=1)
    step(second)
    assert second.version == straight.version
    assert all(torch.equal(tensor, straight.weights()[name]) for name, tensor in second.weights().items())
    without_moments = trainer(tiny_policy(seed=9))
    without_moments.load(weights, trainer().state_dict(), version=1)
    step(without_moments)
    assert any(not torch.equal(t, straight.weights()[name]) for name, t in without_moments.weights().items())


def test_weights_of_another_policy_are_refused():
    ours = trainer()
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        ours.load(policy_tensors(tiny_policy(tied=True)), ours.state_dict(), version=1)


@pytest.mark.parametrize("tied", [False, True])
def test_trainer_and_engine_agree_on_the_names_of_the_weights(tied):
    ours = trainer(tiny_policy(tied=tied))
    ReferenceEngine(tiny_policy(tied=tied, seed=4)).publish(ours.weights(), Versions(policy=1))
    assert ("lm_head.weight" in ours.weights()) is not tied


def test_bfloat16_is_a_forward_precision_only():
    ours = trainer(tiny_policy(dtype=torch.float32), dtype="bfloat16")
    batch = samples()
    low = response_logits(ours.model, batch, torch.bfloat16)
    full = response_logits(ours.model, batch, torch.float32)
    assert any(not torch.equal(a, b) for a, b in zip(low, full, strict=True))
    assert all(row.dtype == torch.float32 for row in low)
    ours.update(PolicyBatch(batch, [torch.full((t,), -3.0) for _, t in LENGTHS], ADVANTAGES))
    assert all(tensor.dtype == torch.float32 for tensor in ours.weights().values())
