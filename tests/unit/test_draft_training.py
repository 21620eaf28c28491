"""Draft training: what is supervised, how it is weighed, what it must not touch, and what it predicts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from paceline.config.run import Eagle3Draft
from paceline.errors import ConfigError, DataError, ModelError
from paceline.models.eagle3 import Eagle3Config, Eagle3Head, KeyValueCache, embed, policy_parts
from paceline.testing.runs import tiny_policy
from paceline.train import draft as training
from paceline.train.draft import (
    Answer,
    DraftTrainer,
    MostLikely,
    choose_draft_vocab,
    collate,
    content_key,
    count_pairs,
    fill_rows,
    pair_weight,
    policy_features,
    predicted_acceptance,
    summed_loss,
    train_eagle3,
)
from paceline.types import Sampling

torch.set_num_threads(1)

VOCAB_SIZE = 32
AUX_LAYERS = (0, 1, 3)
GREEDY = Sampling(temperature=0.0)


def make_policy(tied: bool = True, seed: int = 3) -> PreTrainedModel:
    shape = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if tied:
            return Qwen3ForCausalLM(Qwen3Config(**shape, tie_word_embeddings=True)).eval()
        return LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=False)).eval()


def make_learnable_policy() -> PreTrainedModel:
    """The next token depends mostly on the last one, so that a head can learn it in a second."""
    policy = make_policy(tied=False)
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_(0.05)
        policy_parts(policy).output.weight.mul_(3)
    return policy


def make_head(policy: PreTrainedModel, draft_size: int = VOCAB_SIZE) -> Eagle3Head:
    generator = torch.Generator().manual_seed(5)
    draft_ids = torch.randperm(VOCAB_SIZE, generator=generator)[:draft_size].sort().values
    config = Eagle3Config.for_policy(policy.config, AUX_LAYERS, draft_size)
    return Eagle3Head.initialize(config, policy, draft_ids, generator)


def random_answers(shapes: Sequence[tuple[int, int]]) -> list[Answer]:
    """One answer per (prompt length, response length)."""
    generator = torch.Generator().manual_seed(7)
    return [
        Answer(tuple(torch.randint(VOCAB_SIZE, (prompt + response,), generator=generator).tolist()), prompt)
        for prompt, response in shapes
    ]


@torch.no_grad()
def sampled_answers(
    policy: PreTrainedModel, num_answers: int, num_tokens: int, temperature: float, seed: int = 0
) -> list[Answer]:
    """Answers of `num_tokens` tokens from the policy itself, to random prompts of three tokens."""
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.randint(VOCAB_SIZE, (num_answers, 3), generator=generator)
    for _ in range(num_tokens):
        logits = policy(input_ids=token_ids).logits[:, -1]
        if temperature == 0:
            drawn = logits.argmax(-1, keepdim=True)
        else:
            drawn = (logits / temperature).softmax(-1).multinomial(1, generator=generator)
        token_ids = torch.cat([token_ids, drawn], dim=1)
    return [Answer(tuple(row), 3) for row in token_ids.tolist()]


def gradients(head: Eagle3Head) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in head.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_root_is_supervised_exactly_when_its_label_is_a_response_token(depth: int) -> None:
    policy = make_policy()
    head = make_head(policy)
    answers = random_answers([(4, 1), (4, 6), (2, 3), (7, 2), (1, 5)])
    batch = collate(policy_features(policy, answers, AUX_LAYERS), depth)
    outputs: list[torch.Tensor] = []

    def keep(module: torch.nn.Module, args: object, output: torch.Tensor) -> None:
        output.retain_grad()
        outputs.append(output)

    head.register_forward_hook(keep)
    summed_loss(head, policy, batch, depth, temperature=1.0).backward()
    # Only the deepest output has no further depth that reaches back into it.
    grad = outputs[-1].grad
    assert grad is not None
    for row, answer in enumerate(answers):
        for root in range(batch.num_roots):
            label = root + 2 + depth - 1
            supervised = answer.prompt_length <= label < len(answer.token_ids)
            assert bool(grad[row, root].abs().sum() > 0) == supervised, (answer, root)


@pytest.mark.parametrize("tied", [True, False])
def test_the_loss_is_the_one_computed_root_by_root_with_a_cache(tied: bool) -> None:
    policy = make_policy(tied)
    head = make_head(policy, draft_size=10)
    answers = random_answers([(3, 5), (4, 2), (2, 7)])
    depth, temperature = 3, 0.7
    features = policy_features(policy, answers, AUX_LAYERS)
    expected = torch.zeros(())
    with torch.no_grad():
        ours = summed_loss(head, policy, collate(features, depth), depth, temperature)
        for answer, feature in zip(answers, features, strict=True):
            tokens = torch.tensor([answer.token_ids])
            laws = (policy(input_ids=tokens).logits[0, :, head.draft_ids] / temperature).softmax(-1)
            for root in range(len(answer.token_ids) - 2):
                cache, step, positions = KeyValueCache(), head.project(feature.aux[None, : root + 1]), root + 1
                fed, positions = tokens[:, 1 : root + 2], torch.arange(root + 1)
                for j in range(depth):
                    label = root + 2 + j
                    if label >= len(answer.token_ids):
                        break
                    step = head(step, embed(policy, fed), positions, cache)[:, -1:]
                    if label >= answer.prompt_length:
                        log_draft = head.logits(step)[0, 0].log_softmax(-1)
                        expected -= 0.8**j * (laws[label - 1] * log_draft).sum()
                    fed, positions = tokens[:, label : label + 1], positions[-1:] + 1
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_parts", [2, 4])
def test_the_gradient_does_not_depend_on_the_split_into_micro_batches(num_parts: int) -> None:
    policy = make_policy()
    answers = random_answers([(3, 9), (4, 1), (2, 2), (6, 4), (3, 3), (5, 5), (2, 1), (4, 8)])
    features = policy_features(policy, answers, AUX_LAYERS)
    states = []
    for parts in (1, num_parts):
        head = make_head(policy)
        trainer = DraftTrainer(head, policy, depth=3, lr=1e-3, num_updates=10, temperature=1.0)
        size = len(features) // parts
        batches = [collate(features[start : start + size], 3) for start in range(0, len(features), size)]
        update = trainer.update(batches)
        states.append((update, head.export_state()))
    (whole, whole_state), (split, split_state) = states
    assert split.loss == pytest.approx(whole.loss, rel=1e-5)
    assert split.grad_norm == pytest.approx(whole.grad_norm, rel=1e-4)
    assert split.num_pairs == whole.num_pairs
    for name in whole_state:
        torch.testing.assert_close(split_state[name], whole_state[name], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("row_tokens", [1, 16, 23, 1000])
@pytest.mark.parametrize("draft_size", [VOCAB_SIZE, 10])
@pytest.mark.parametrize("tied", [True, False])
def test_packed_answers_give_the_loss_and_the_gradients_of_rows_of_their_own(
    tied: bool, draft_size: int, row_tokens: int
) -> None:
    policy = make_policy(tied)
    # Short prompts behind long chains: a label, a key or a position of a neighbour would be in reach.
    answers = random_answers([(3, 5), (1, 2), (4, 2), (1, 6), (2, 7), (1, 2)])
    features, depth = policy_features(policy, answers, AUX_LAYERS), 4
    results = []
    for batch in (collate(features, depth), collate(features, depth, row_tokens)):
        head = make_head(policy, draft_size)
        loss = summed_loss(head, policy, batch, depth, 0.7)
        loss.backward()
        results.append((loss.item(), count_pairs([batch], depth), gradients(head)))
    (loss, counts, grads), (packed_loss, packed_counts, packed_grads) = results
    assert packed_counts == counts
    assert packed_loss == pytest.approx(loss, rel=1e-5)
    for name, grad in grads.items():
        torch.testing.assert_close(packed_grads[name], grad, rtol=1e-4, atol=1e-4)


def test_rows_are_filled_in_order_and_positions_begin_anew_with_each_answer() -> None:
    assert fill_rows([5, 3, 9, 30, 1, 1, 8], 10) == [[0, 1], [2], [3], [4, 5, 6]]
    features = policy_features(make_policy(), random_answers([(2, 3), (2, 1), (3, 3)]), AUX_LAYERS)
    batch = collate(features, 1, row_tokens=8)
    # RoPE alone would not show it: it sees distances. A head that treats position 0 apart does.
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 2, 3, 4, 5, 0, 0]]
    assert batch.documents is not None
    assert batch.documents.tolist() == [[1, 1, 1, 1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1, 0, 0, 0]]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_that_add_up_their_counts_have_the_gradient_of_one_rank(num_ranks: int) -> None:
    policy = make_policy()
    answers = random_answers([(3, 9), (4, 1), (2, 2), (6, 4), (3, 3), (5, 5), (2, 1), (4, 8)])
    features, depth = policy_features(policy, answers, AUX_LAYERS), 3
    whole = collate(features, depth)
    head = make_head(policy)
    (summed_loss(head, policy, whole, depth, 1.0) / pair_weight(count_pairs([whole], depth))).backward()
    shares = [collate(features[rank::num_ranks], depth) for rank in range(num_ranks)]
    # The all-reduce: [depth] numbers per rank, and then the gradients.
    counts = torch.tensor([count_pairs([share], depth) for share in shares]).sum(0).tolist()
    total = {name: torch.zeros_like(parameter) for name, parameter in head.named_parameters()}
    for share in shares:
        rank_head = make_head(policy)
        (summed_loss(rank_head, policy, share, depth, 1.0) / pair_weight(counts)).backward()
        for name, grad in gradients(rank_head).items():
            total[name] += grad
    for name, grad in gradients(head).items():
        torch.testing.assert_close(total[name], grad, rtol=1e-4, atol=1e-6)


def test_what_backward_keeps_does_not_grow_with_tokens_times_vocabulary() -> None:
    def kept_bytes(vocab_size: int, num_tokens: int) -> int:
        """Bytes of all tensors that the graph of one loss holds on to, each storage once."""
        policy = tiny_policy(vocab_size=vocab_size, dtype=torch.float32)
        config = Eagle3Config.for_policy(policy.config, (0, 1, 2))
        head = Eagle3Head.initialize(config, policy, None, torch.Generator().manual_seed(0))
        answer = Answer(tuple(i % 20 for i in range(num_tokens)), 2)
        batch = collate(policy_features(policy, [answer], (0, 1, 2)), 2)
        storages: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = summed_loss(head, policy, batch, 2, 1.0)
        assert loss.requires_grad
        return sum(storages.values())

    growth = {size: kept_bytes(size, 100) - kept_bytes(size, 50) for size in (20, 2000)}
    # 50 rows of 2,000 float32 numbers at each of two depths would be 800 kB.
    assert abs(growth[2000] - growth[20]) < 50_000


def test_the_loss_in_pieces_is_the_loss_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make_policy()
    batch = collate(policy_features(policy, random_answers([(3, 9), (4, 6)]), AUX_LAYERS), 2)
    results = []
    for elements in (training.LOGITS_ELEMENTS, 3 * VOCAB_SIZE):
        monkeypatch.setattr(training, "LOGITS_ELEMENTS", elements)
        head = make_head(policy)
        loss = summed_loss(head, policy, batch, 2, 1.0)
        loss.backward()
        results.append((loss.item(), gradients(head)))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    for name, grad in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_the_policy_gets_no_gradient_and_the_global_random_stream_is_left_alone(tied: bool) -> None:
    policy = make_policy(tied)
    answers = sampled_answers(policy, 12, 8, 1.0)
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    torch.manual_seed(123)
    stream = torch.get_rng_state()
    config = Eagle3Draft(aux_layers=(0, 1, 3), vocab_size=16, epochs=1, depth=2)
    head, _ = train_eagle3(policy, answers, config, Sampling())
    summed_loss(head, policy, collate(policy_features(policy, answers, AUX_LAYERS), 2), 2, 1.0).backward()
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(parameter.grad is None for parameter in policy.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.state_dict().items())
    assert set(gradients(head)) == {name for name, _ in head.named_parameters()}
    assert all(grad.abs().sum() > 0 for grad in gradients(head).values())


def test_training_repeats_exactly_and_follows_its_seed() -> None:
    policy = make_policy()
    answers = sampled_answers(policy, 20, 8, 1.0)
    config = Eagle3Draft(aux_layers=(0, 1, 3), epochs=2, depth=2)
    first, _ = train_eagle3(policy, answers, config, Sampling())
    torch.manual_seed(99)
    again, _ = train_eagle3(policy, answers, config, Sampling())
    other, _ = train_eagle3(policy, answers, config.model_copy(update={"seed": 1}), Sampling())
    assert all(torch.equal(tensor, again.export_state()[name]) for name, tensor in first.export_state().items())
    assert not torch.equal(first.fc.weight, other.fc.weight)


def test_features_computed_anew_in_each_epoch_train_the_same_head(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make_policy()
    answers = sampled_answers(policy, 20, 8, 1.0)
    config = Eagle3Draft(aux_layers=(0, 1, 3), epochs=2, depth=2)
    kept, _ = train_eagle3(policy, answers, config, Sampling())
    monkeypatch.setattr(training, "FEATURE_BYTES", 0)
    anew, _ = train_eagle3(policy, answers, config, Sampling())
    for name, tensor in kept.export_state().items():
        torch.testing.assert_close(anew.export_state()[name], tensor, rtol=1e-3, atol=1e-4)


def test_a_loss_that_is_not_finite_changes_neither_head_nor_optimiser() -> None:
    policy = make_policy()
    features = policy_features(policy, random_answers([(3, 6), (3, 6)]), AUX_LAYERS)
    head = make_head(policy)
    trainer = DraftTrainer(head, policy, depth=2, lr=1e-3, num_updates=10, temperature=1.0)
    trainer.update([collate(features, 2)])
    state = head.export_state()
    bad = collate(features, 2)
    bad.final[0, 4] = torch.nan
    update = trainer.update([bad])
    assert not update.finite
    assert all(torch.equal(tensor, head.export_state()[name]) for name, tensor in state.items())

    twin = make_head(policy)
    twin_trainer = DraftTrainer(twin, policy, depth=2, lr=1e-3, num_updates=10, temperature=1.0)
    for _ in range(2):
        twin_trainer.update([collate(features, 2)])
    trainer.update([collate(features, 2)])
    assert all(torch.equal(tensor, head.export_state()[name]) for name, tensor in twin.export_state().items())


def test_offline_training_stops_at_a_loss_that_is_not_finite_and_names_the_key() -> None:
    policy = make_policy()
    answers = sampled_answers(policy, 12, 8, 1.0)
    config = Eagle3Draft(aux_layers=(0, 1, 3), epochs=8, depth=2, lr=1e30)
    with pytest.raises(ModelError, match=r"draft\.lr"):
        train_eagle3(policy, answers, config, Sampling())
    with torch.no_grad():
        policy_parts(policy).norm.get_parameter("weight").fill_(torch.nan)
    with pytest.raises(ModelError, match="loss is nan"):
        train_eagle3(policy, answers, config, Sampling())


def test_a_policy_that_changes_its_logits_after_the_output_layer_is_refused() -> None:
    policy = make_policy()
    answers = sampled_answers(policy, 12, 8, 1.0)

    class Capped(Qwen3ForCausalLM):
        def forward(self, *args: object, **kwargs: object) -> object:
            output = super().forward(*args, **kwargs)
            output.logits = output.logits.tanh()
            return output

    policy.__class__ = Capped
    with pytest.raises(ModelError, match="Capped"):
        train_eagle3(policy, answers, Eagle3Draft(aux_layers=(0, 1, 3), epochs=1), Sampling())


def test_answers_too_short_to_learn_from_are_refused() -> None:
    policy = make_policy()
    with pytest.raises(DataError, match="2 such answers"):
        train_eagle3(policy, random_answers([(3, 1)] * 9 + [(3, 4)]), Eagle3Draft(aux_layers=(0, 1, 3)), Sampling())
    with pytest.raises(ConfigError, match="temperature"):
        train_eagle3(policy, random_answers([(3, 4)] * 9), Eagle3Draft(aux_layers=(0, 1, 3)), GREEDY)


def test_a_head_that_has_learned_an_answer_by_heart_is_predicted_to_draft_all_of_it() -> None:
    policy = make_learnable_policy()
    answers = sampled_answers(policy, 1, 24, 0.0) * 10
    k = 3
    config = Eagle3Draft(aux_layers=(0, 1, 3), epochs=80, depth=4, num_draft_tokens=k, lr=5e-3)
    head, _ = train_eagle3(policy, answers, config, Sampling(temperature=0.5))
    # Without its last k tokens: there the drafts past the end, which are judged too, are tokens it has seen.
    seen = Answer(answers[0].token_ids[:-k], 3)
    assert predicted_acceptance(policy, make_head(policy), [seen], k, GREEDY).alpha < 2.5
    assert predicted_acceptance(policy, head, [seen], k, GREEDY).alpha == k + 1


@torch.no_grad()
def engine_walk(policy: PreTrainedModel, head: Eagle3Head, answer: Answer, k: int) -> tuple[int, list[int]]:
    """Blocks and accepted drafts per slot of greedy speculative decoding, token by token, up to the answer's length."""
    tokens = list(answer.token_ids[: answer.prompt_length + 1])
    blocks, accepted = 0, [0] * k
    while len(tokens) < len(answer.token_ids):
        aux = policy_features(policy, [Answer(tuple(tokens), 1)], AUX_LAYERS)[0].aux[:-1]
        drafted, _ = head.draft(policy, aux, torch.tensor(tokens), k)
        blocks += 1
        for slot in range(k + 1):
            tokens.append(int(policy(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
            if slot == k or tokens[-1] != int(drafted[slot]):
                break
            accepted[slot] += 1
    return blocks, accepted


@pytest.mark.parametrize("k", [1, 3, 6])
def test_prediction_at_temperature_zero_is_what_an_engine_counts(k: int) -> None:
    policy = make_learnable_policy()
    answers = sampled_answers(policy, 24, 15, 0.0)
    config = Eagle3Draft(aux_layers=(0, 1, 3), epochs=30, depth=3, lr=5e-3)
    head, _ = train_eagle3(policy, answers, config, Sampling(temperature=0.5))
    held_out = sampled_answers(policy, 8, 15, 0.0, seed=1)
    predicted = predicted_acceptance(policy, head, held_out, k, GREEDY)
    counted = [engine_walk(policy, head, answer, k) for answer in held_out]
    blocks = sum(number for number, _ in counted)
    accepted = [sum(row[slot] for _, row in counted) for slot in range(k)]
    assert predicted.num_blocks == blocks
    assert predicted.marginal == pytest.approx([number / blocks for number in accepted])
    assert 1.2 < predicted.alpha == pytest.approx(1 + sum(accepted) / blocks)
    # A policy that is sure of every token, also past the ends of answers that were only cut.
    assert predicted.limit == pytest.approx(k + 1)


@pytest.mark.parametrize("num_recorded", [1, 2])
def test_drafts_past_the_end_count_with_the_chance_of_reaching_them(num_recorded: int) -> None:
    policy, sampling, k = make_policy(), Sampling(temperature=2.0), 4
    head = make_head(policy)
    start = [7, 26, 17, 14]
    aux = policy_features(policy, [Answer(tuple(start), 3)], AUX_LAYERS)[0].aux[:3]
    drafted, _ = head.draft(policy, aux, torch.tensor(start), k)
    assert len(set(drafted.tolist())) == k, "equal drafts would hide a shift"
    tokens = start + drafted.tolist()
    with torch.no_grad():
        laws = (policy(input_ids=torch.tensor([tokens])).logits[0] / sampling.temperature).softmax(-1)
    probs = [float(laws[position - 1, tokens[position]]) for position in range(4, 4 + k)]
    # The recorded drafts were accepted for certain; from there on each needs all before it, past the end, to be.
    expected = []
    for slot, prob in enumerate(probs):
        reached = torch.tensor(probs[num_recorded:slot]).prod() if slot > num_recorded else 1.0
        expected.append(float(reached * prob))
    ended = Answer(tuple(tokens[: 4 + num_recorded]), 3)
    predicted = predicted_acceptance(policy, head, [ended], k, sampling)
    assert predicted.num_blocks == 1
    assert predicted.marginal == pytest.approx(expected, rel=1e-4)
    assert predicted.conditional == pytest.approx(probs, rel=1e-4)


def test_predicted_acceptance_at_a_temperature_agrees_with_the_outcomes_of_the_rollouts() -> None:
    policy = make_learnable_policy()
    sampling = Sampling(temperature=1.0)
    answers = sampled_answers(policy, 120, 12, 1.0)
    config = Eagle3Draft(aux_layers=(0, 1, 3), epochs=20, depth=3, num_draft_tokens=2, lr=5e-3)
    head, _ = train_eagle3(policy, answers, config, sampling)
    fresh = sampled_answers(policy, 70, 12, 1.0, seed=2)
    # Rollouts of another temperature are not from the law that judges them: the test must see that.
    wrong = sampled_answers(policy, 70, 12, 4.0, seed=2)
    scores = []
    for rollouts in (fresh, wrong):
        predicted = predicted_acceptance(policy, head, rollouts, 2, sampling)
        assert predicted.alpha < predicted.limit
        outcomes = [outcome_rate(policy, head, answer) for answer in rollouts]
        accepted, blocks = (sum(column) for column in zip(*outcomes, strict=True))
        rate = predicted.conditional[0]
        scores.append((accepted - rate * blocks) / (blocks * rate * (1 - rate)) ** 0.5)
    assert abs(scores[0]) < 4
    assert abs(scores[1]) > 6


def outcome_rate(policy: PreTrainedModel, head: Eagle3Head, answer: Answer) -> tuple[int, int]:
    """(accepted at slot 0, blocks) when a draft is accepted exactly if it is the recorded token; k = 2."""
    feature = policy_features(policy, [answer], AUX_LAYERS)[0]
    root, accepted, blocks = answer.prompt_length - 1, 0, 0
    while root + 2 < len(answer.token_ids):
        tokens = torch.tensor(answer.token_ids[: root + 2])
        drafted, _ = head.draft(policy, feature.aux[: root + 1], tokens, 2)
        recorded = answer.token_ids[root + 2 : root + 4]
        matches = [int(draft) == token for draft, token in zip(drafted, recorded, strict=False)]
        num_accepted = matches.index(False) if False in matches else len(matches)
        accepted, blocks, root = accepted + matches[0], blocks + 1, root + num_accepted + 1
    return accepted, blocks


def test_the_standard_error_of_a_prediction_is_its_spread_over_other_rollouts() -> None:
    """40 sets of 6 answers, of which some are longer: the ratio of the two variances scatters by a quarter."""
    policy, sampling = make_learnable_policy(), Sampling(temperature=1.0)
    head = make_head(policy)
    answers = [
        Answer(answer.token_ids[: 9 + 11 * (place % 3)], 3)
        for place, answer in enumerate(sampled_answers(policy, 240, 28, 1.0, seed=4))
    ]
    sets = [predicted_acceptance(policy, head, answers[6 * i : 6 * i + 6], 2, sampling) for i in range(40)]
    spread = statistics.variance([predicted.alpha for predicted in sets])
    stated = statistics.fmean([predicted.standard_error**2 for predicted in sets])
    assert 0.5 < spread / stated < 2
    assert {predicted.num_answers for predicted in sets} == {6}
    alone = predicted_acceptance(policy, head, answers[:1], 2, sampling)
    assert math.isnan(alone.standard_error) and alone.num_answers == 1


def test_acceptance_rises_while_the_head_trains() -> None:
    policy = make_learnable_policy()
    answers = sampled_answers(policy, 80, 12, 0.5)
    alphas = []
    for epochs in (1, 12):
        config = Eagle3Draft(aux_layers=(0, 1, 3), epochs=epochs, depth=3, lr=5e-3)
        _, figures = train_eagle3(policy, answers, config, Sampling(temperature=0.5))
        alphas.append(figures.acceptance.alpha)
        assert figures.acceptance.alpha < figures.acceptance.limit
    assert alphas[1] > alphas[0] + 0.2


class PolicyItself:
    """A draft head that is the policy itself, where that one reads nothing but the last token."""

    aux_layers = AUX_LAYERS
    draft_ids = torch.arange(VOCAB_SIZE)

    def __init__(self, policy: PreTrainedModel) -> None:
        self._parts = policy_parts(policy)

    def project(self, aux: torch.Tensor) -> torch.Tensor:
        return aux

    def __call__(self, hidden: torch.Tensor, embeds: torch.Tensor, positions: torch.Tensor, memory: object):
        return self._parts.norm(embeds)

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        return self._parts.output(outputs)

    def parameters(self):
        return iter(())


@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_limit_is_the_acceptance_length_of_a_draft_that_is_the_policys_most_likely_token(k: int) -> None:
    policy, sampling = make_policy(tied=False), Sampling()
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
        policy_parts(policy).output.weight.mul_(2)
        best = policy(input_ids=torch.arange(VOCAB_SIZE)[:, None]).logits[:, 0].argmax(-1).tolist()
    answers = sampled_answers(policy, 300, 9, 1.0)
    # No block leads past an answer whose last token would not have been drafted.
    inside = []
    for answer in answers:
        tokens = answer.token_ids
        surprises = [place for place in range(5, len(tokens)) if tokens[place] != best[tokens[place - 1]]]
        inside += [Answer(tokens[: surprises[-1] + 1], 3)] if surprises else []
    predicted = predicted_acceptance(policy, PolicyItself(policy), inside, k, sampling)
    assert 1.3 < predicted.alpha == pytest.approx(predicted.limit, rel=1e-5)
    # Past the end of a cut answer, the policy is taken to be as sure as before it.
    predicted = predicted_acceptance(policy, PolicyItself(policy), answers, k, sampling)
    assert 1.3 < predicted.alpha == pytest.approx(predicted.limit, rel=0.01)


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("stop", [True, False])
def test_the_limit_counts_the_largest_probability_where_such_a_draft_is_judged(
    k: int, stop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted by hand. Of a single draft token per block the mean; of more, nothing behind a stop token."""
    policy = make_policy()
    drawn = sampled_answers(policy, 6, 12, 0.5) + sampled_answers(policy, 6, 12, 0.0)
    answers = [Answer(answer.token_ids[: 15 - place], 3) for place, answer in enumerate(drawn)]
    stops = tuple({answer.token_ids[-1] for answer in answers})
    sampling = Sampling(temperature=0.5, stop_token_ids=stops if stop else ())
    blocks, judged, cut = 0, [], []
    for answer in answers:
        tokens = answer.token_ids
        with torch.no_grad():
            laws = (policy(input_ids=torch.tensor([tokens])).logits[0] / sampling.temperature).softmax(-1)
        place = answer.prompt_length + 1
        while place < len(tokens):
            blocks += 1
            for _ in range(k):
                if place == len(tokens):
                    cut.append(answer)
                    break
                probability, token_id = laws[place - 1].max(-1)
                judged.append(float(probability))
                place += 1
                if int(token_id) != tokens[place - 1]:
                    break
            else:
                place += 1
    monkeypatch.setattr(training, "LOGITS_ELEMENTS", 3 * VOCAB_SIZE)
    limits = [predicted_acceptance(policy, head, answers, k, sampling).limit for head in heads_of(policy)]
    expected = 1 + sum(judged) / blocks
    assert bool(cut) == (k > 1)
    if stop or k == 1:
        assert limits == pytest.approx([expected] * len(limits), rel=1e-4)
    else:
        assert limits[0] == pytest.approx(limits[1]) and limits[0] > expected + 0.01


def heads_of(policy: PreTrainedModel) -> list[Eagle3Head]:
    """One of them lacks most tokens. The limit is the policy's: equal for all."""
    return [make_head(policy), make_head(policy, 6)]


def test_the_limit_of_some_answers_and_others_is_that_of_all_at_once() -> None:
    policy, sampling = make_learnable_policy(), Sampling()
    head = make_head(policy)
    answers = sampled_answers(policy, 9, 14, 1.0) + sampled_answers(policy, 5, 3, 1.0, seed=1)
    parts = [predicted_acceptance(policy, head, part, 6, sampling) for part in (answers[:4], answers[4:9], answers[9:])]
    pooled = MostLikely.pooled([part.most_likely for part in parts])
    assert pooled.alpha == pytest.approx(predicted_acceptance(policy, head, answers, 6, sampling).limit, rel=1e-5)
    assert abs(statistics.fmean(part.limit for part in parts) - pooled.alpha) > 0.01
    assert math.isnan(predicted_acceptance(policy, head, [Answer((3, 4, 5), 2)], 6, sampling).limit)


def test_draft_vocabulary_is_the_most_frequent_response_tokens_and_says_what_it_covers() -> None:
    answers = [Answer((1, 1, 1, 7, 9, 9, 4), 3), Answer((2, 9, 7, 30), 1)]
    ids, coverage = choose_draft_vocab(answers, 2, VOCAB_SIZE)
    assert ids.tolist() == [7, 9]
    assert coverage == pytest.approx(5 / 7)
    everything, coverage = choose_draft_vocab(answers, VOCAB_SIZE, VOCAB_SIZE)
    assert everything.tolist() == list(range(VOCAB_SIZE))
    assert coverage == 1
    padded, _ = choose_draft_vocab(answers, 6, VOCAB_SIZE)
    assert padded.tolist() == [0, 1, 4, 7, 9, 30]
    with pytest.raises(ConfigError, match=r"draft\.vocab_size"):
        choose_draft_vocab(answers, VOCAB_SIZE + 1, VOCAB_SIZE)


def test_the_cache_key_changes_with_everything_that_changes_the_head_and_with_nothing_else() -> None:
    config, sampling = Eagle3Draft(), Sampling()

    def key(start_key: str | None = None, **changes: object) -> str:
        return content_key(config.model_copy(update=changes), "policy", "data", sampling, start_key)

    changed = {
        key(epochs=3),
        key(aux_layers=(0, 1, 2)),
        key(seed=3),
        key(data="generic"),
        key("weights of the start"),
        key("other weights of the start"),
        content_key(config, "policy2", "data", sampling),
        content_key(config, "policy", "data2", sampling),
        content_key(config, "policy", "data", Sampling(temperature=0.5)),
        content_key(config, "policy", "data", Sampling(stop_token_ids=(3,))),
    }
    assert len(changed | {key()}) == 11
    # k, and all that acts during RL, and names of files whose content counts apart.
    unchanged = {
        key(num_draft_tokens=7),
        key(online="below_peak"),
        key(online_every=3),
        key(online_lr=1.0),
        key(online_tokens=9),
        key(online_max_lag=99),
        key(start=Path("a")),
        key(generic_path=Path("b")),
    }
    assert unchanged == {key()}
