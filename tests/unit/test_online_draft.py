"""A draft that learns beside the policy: what it learns from, what it must not touch, when it learns, what is kept."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from pydantic import ValidationError

from paceline.config.run import Algorithm, Eagle3Draft, Train
from paceline.errors import CheckpointError
from paceline.models.eagle3 import policy_parts
from paceline.testing.runs import tiny_head, tiny_policy
from paceline.train import online as module
from paceline.train.draft import Acceptance, Answer, MostLikely, policy_features
from paceline.train.logprobs import Sample
from paceline.train.online import OnlineDraft, OnlineEagle3
from paceline.train.policy import PolicyBatch, PolicyTrainer
from paceline.types import Sampling

torch.set_num_threads(1)

LENGTHS = [(3, 7), (2, 1), (9, 2), (4, 12), (5, 5), (2, 30), (1, 1), (3, 9)]
"""(prompt, response) tokens."""
ADVANTAGES = [0.5, -1.0, 0.0, 2.0, -0.3, 1.1, 0.7, 0.0]


def samples():
    generator = torch.Generator().manual_seed(3)
    return [
        Sample(
            tuple(torch.randint(0, 20, (p,), generator=generator).tolist()),
            tuple(torch.randint(0, 20, (t,), generator=generator).tolist()),
        )
        for p, t in LENGTHS
    ]


def make(policy, sampling=None, **draft):
    config = Eagle3Draft.model_validate({"aux_layers": (0, 1, 2), **draft})
    sampling = sampling or Sampling()
    return OnlineEagle3(
        tiny_head(policy, config), policy, config, depth=3, num_draft_tokens=3, sampling=sampling, seed=5
    )


def make_trainer(policy, **train):
    config = Train.model_validate({"lr": 1e-3, "micro_batch_tokens": 64, **train})
    return PolicyTrainer(policy, config, Algorithm(), Sampling())


def batch_of(trainer, advantages=ADVANTAGES):
    scored = {score.index: score.logprobs for score in trainer.score(samples())}
    return PolicyBatch(samples(), [scored[i] for i in range(len(scored))], advantages)


def step(trainer, draft, advantages=ADVANTAGES):
    """One step of the loop, without rollouts."""
    batch = batch_of(trainer, advantages)
    lesson = draft.lesson(batch.samples, advantages, trainer.version)
    gradient = trainer.backward(batch, lesson)
    draft_step = draft.learn(lesson, trainer.version)
    return trainer.step(gradient), draft_step


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tied", [True, False])
def test_the_policy_update_is_bit_equal_with_and_without_draft_training(tied, dtype):
    alone = make_trainer(tiny_policy(tied=tied, dtype=dtype))
    beside = make_trainer(tiny_policy(tied=tied, dtype=dtype))
    draft = make(beside.model)
    torch.manual_seed(77)
    stream = torch.get_rng_state()
    for _ in range(3):
        expected = alone.update(batch_of(alone))
        update, draft_step = step(beside, draft)
        assert draft_step.updates > 0 and draft_step.param_delta_norm > 0
        assert update == expected
        assert same(beside.weights(), alone.weights())
        assert same(beside.state_dict(), alone.state_dict())
    assert torch.equal(torch.get_rng_state(), stream)


def test_the_states_of_the_loss_pass_are_those_of_a_pass_of_its_own_and_give_the_policys_logits():
    trainer = make_trainer(tiny_policy(dtype=torch.float32))
    draft = make(trainer.model)
    batch = batch_of(trainer)
    lesson = draft.lesson(batch.samples, ADVANTAGES, 0)
    calls = []
    handle = policy_parts(trainer.model).decoder.register_forward_hook(lambda *_: calls.append(1))
    trainer.backward(batch, lesson)
    num_passes = len(calls)
    read = lesson.features()
    assert len(calls) == num_passes, "features of samples that the loss ran over took a second pass"
    handle.remove()
    assert {len(feature.answer.token_ids) for feature in read} == {10, 3, 16, 32}
    own = policy_features(trainer.model, [feature.answer for feature in read], (0, 1, 2))
    for ours, theirs in zip(read, own, strict=True):
        torch.testing.assert_close(ours.aux, theirs.aux, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours.final, theirs.final, rtol=1e-4, atol=1e-5)
        assert not ours.aux.requires_grad and not ours.final.requires_grad
        with torch.no_grad():
            logits = trainer.model(input_ids=torch.tensor([ours.answer.token_ids])).logits[0]
            again = policy_parts(trainer.model).output(ours.final)
        torch.testing.assert_close(again, logits, rtol=1e-4, atol=1e-4)


def test_only_samples_with_an_advantage_are_learned_from_unless_there_is_none():
    trainer = make_trainer(tiny_policy(dtype=torch.float32))
    draft = make(trainer.model)
    assert sorted(draft.lesson(samples(), ADVANTAGES, 0).answers) == [0, 1, 3, 4, 5]
    nothing = [0.0] * len(LENGTHS)
    assert sorted(draft.lesson(samples(), nothing, 0).answers) == [0, 1, 2, 3, 4, 5, 7]
    before = {name: tensor.clone() for name, tensor in trainer.weights().items()}
    update, draft_step = step(trainer, draft, nothing)
    assert draft_step.updates > 0
    assert update.grad_norm == 0.0
    assert same(trainer.weights(), before)
    # A prompt and a response of one token each: nothing could have been drafted.
    short = [Sample((3,), (4,))]
    assert draft.lesson(short, [1.0], 0) is None
    assert math.isnan(draft.predict(draft.probe(short)).alpha)


@pytest.mark.parametrize("tokens", [1, 20, 45, 10_000])
def test_no_more_tokens_are_learned_from_in_a_step_than_the_recipe_allows(tokens):
    draft = make(tiny_policy(dtype=torch.float32), online_tokens=tokens)
    seen = set()
    for _ in range(40):
        chosen = draft.lesson(samples(), ADVANTAGES, 0).answers
        lengths = [len(answer.token_ids) for answer in chosen.values()]
        assert sum(lengths) <= tokens or len(lengths) == 1
        seen |= chosen.keys()
    # Every sample has its turn.
    assert seen == {0, 1, 3, 4, 5}


def predicting(monkeypatch, alphas, standard_error=0.0):
    figures = {"num_blocks": 1, "standard_error": standard_error, "num_answers": 8}
    nothing = MostLikely(0, (), (), ())
    remaining = iter([Acceptance(alpha, (), (), (), **figures, most_likely=nothing) for alpha in alphas])
    monkeypatch.setattr(module, "predicted_acceptance", lambda *args: next(remaining))


@pytest.mark.parametrize(
    ("settings", "learned"),
    [
        ({"online": "off"}, []),
        ({"online": "always"}, [1, 2, 3, 4, 5, 6, 7, 8]),
        ({"online": "always", "online_every": 3}, [3, 6]),
        ({"online": "below_peak"}, [3, 4, 5, 7, 8]),
        ({"online": "below_peak", "online_every": 2}, [4, 8]),
    ],
)
def test_the_draft_learns_in_exactly_the_steps_that_its_budget_names(monkeypatch, settings, learned):
    # No noise. Level: means of up to four, then a quarter of the newest: 2, 2.5, 2.33, 2.25, 2.19, 2.64, 2.48, 2.61
    predicting(monkeypatch, [2.0, 3.0, 2.0, 2.0, 2.0, 4.0, 2.0, 3.0])
    trainer = make_trainer(tiny_policy(dtype=torch.float32))
    draft = make(trainer.model, **settings)
    steps, state = [], draft.weights()
    for number in range(1, 9):
        draft.predict(draft.probe(samples()))
        _, draft_step = step(trainer, draft)
        changed = not same(draft.weights(), state)
        assert changed == (draft_step.updates > 0) == (draft_step.param_delta_norm > 0)
        if changed:
            steps.append(number)
        state = draft.weights()
        assert draft.version == len(steps)
    assert steps == learned


@pytest.mark.parametrize(("standard_error", "learns"), [(0.2, False), (0.01, True)])
def test_below_peak_waits_until_the_noise_of_the_probe_does_not_explain_the_loss(monkeypatch, standard_error, learns):
    predicting(monkeypatch, [2.0, 2.0, 1.7], standard_error)
    trainer = make_trainer(tiny_policy(dtype=torch.float32))
    draft = make(trainer.model, online="below_peak")
    for _ in range(3):
        draft.predict(draft.probe(samples()))
    assert (step(trainer, draft)[1].updates > 0) == learns


def test_the_lag_counts_policy_versions_since_the_draft_last_learned():
    trainer = make_trainer(tiny_policy(dtype=torch.float32))
    draft = make(trainer.model, online_every=3)
    assert [step(trainer, draft)[1].lag for _ in range(8)] == [0, 1, 2, 1, 2, 3, 1, 2]


def test_a_draft_loss_that_is_not_finite_leaves_the_draft_and_never_the_policy_behind():
    alone, beside = (make_trainer(tiny_policy(dtype=torch.float32)) for _ in range(2))
    draft = make(beside.model, online_max_lag=1)
    alone.update(batch_of(alone))
    step(beside, draft)
    assert draft.version == 1
    with torch.no_grad():
        draft.head.lm_head.weight[0, 0] = math.nan
    before, moments = draft.weights(), draft.state_dict()["optimizer"]
    for number in (1, 2, 3):
        expected = alone.update(batch_of(alone))
        update, draft_step = step(beside, draft)
        assert update == expected
        assert same(beside.weights(), alone.weights())
        assert draft_step.updates == 0 and draft_step.skipped_updates > 0
        assert draft_step.loss is None and draft_step.param_delta_norm == 0.0
        kinds = ["not finite" in draft_step.alarms[0], *("last learned" in text for text in draft_step.alarms[1:])]
        assert kinds == [True] * (1 if number == 1 else 2)
    after = draft.weights()
    assert all(torch.equal(tensor.nan_to_num(7.0), after[name].nan_to_num(7.0)) for name, tensor in before.items())
    assert same(draft.state_dict()["optimizer"], moments)
    assert draft.version == 1


def test_two_steps_equal_one_step_a_reload_and_another():
    def reloaded(policy, draft):
        other = make(policy)
        with torch.no_grad():
            for parameter in other.head.parameters():
                parameter.add_(1.0)
        other.load_weights(draft.weights())
        other.load_state_dict(copy.deepcopy(draft.state_dict()))
        return other

    straight_trainer, trainer = (make_trainer(tiny_policy(dtype=torch.float32)) for _ in range(2))
    straight, draft = make(straight_trainer.model), make(trainer.model)
    for drafts in ((straight, straight_trainer), (draft, trainer)):
        drafts[0].predict(drafts[0].probe(samples()))
        step(drafts[1], drafts[0])
    draft = reloaded(trainer.model, draft)
    for drafts in ((straight, straight_trainer), (draft, trainer)):
        drafts[0].predict(drafts[0].probe(samples()))
        step(drafts[1], drafts[0])
    assert same(draft.weights(), straight.weights())
    assert same(draft.state_dict(), straight.state_dict())


@pytest.mark.parametrize("part", ["optimizer", "schedule", "version", "trained_at", "level", "generator"])
def test_a_part_that_a_checkpoint_lacks_is_named(part):
    draft = make(tiny_policy(dtype=torch.float32))
    state = draft.state_dict()
    del state[part]
    with pytest.raises(CheckpointError, match=f"lacks {part}"):
        draft.load_state_dict(state)


def test_weights_of_another_draft_are_refused_and_nothing_is_loaded():
    policy = tiny_policy(dtype=torch.float32)
    draft, before = make(policy), make(policy).weights()
    for given in (
        {name: tensor for name, tensor in before.items() if name != "fc.weight"},
        {**before, "extra": torch.zeros(1)},
        {**before, "fc.weight": torch.zeros(2, 2)},
        None,
    ):
        with pytest.raises(CheckpointError, match=r"fc\.weight|extra"):
            draft.load_weights(given)
    assert same(draft.weights(), before)
    config = Eagle3Draft(aux_layers=(0, 1, 2))
    native = OnlineDraft(
        tiny_head(policy, config), policy, config, depth=1, num_draft_tokens=1, sampling=Sampling(), seed=0
    )
    native.load_weights(None)
    with pytest.raises(CheckpointError, match="part of the policy"):
        native.load_weights(before)


def test_the_probe_is_a_few_samples_chosen_before_they_are_seen():
    draft = make(tiny_policy(dtype=torch.float32))
    one = [Sample((1, 2), (3,) * (1 + i % 5)) for i in range(128)]
    other = [Sample((1, 2), (3,) * (1 + i % 7)) for i in range(128)]
    assert list(draft.probe(one).answers) == list(draft.probe(other).answers) == list(range(0, 128, 16))
    assert draft.probe(one).answers[16] == Answer((1, 2, 3, 3), 2)
    # Long prompts cost more: fewer of them.
    long = [Sample((1,) * 300, (3,)) for _ in range(128)]
    assert list(draft.probe(long).answers) == [0, 64]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"online": "off", "online_lr": 1e-3}, "online_lr without effect"),
        ({"online": "off", "online_every": 2, "online_tokens": 5}, "online_every and online_tokens without effect"),
        ({"online_every": 30}, "Raise online_max_lag"),
    ],
)
def test_settings_of_online_training_that_cannot_take_effect_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        Eagle3Draft.model_validate(settings)


def test_a_frozen_draft_reads_back_from_all_of_its_defaults():
    draft = Eagle3Draft(online="off")
    assert Eagle3Draft.model_validate(draft.model_dump(mode="json")) == draft
