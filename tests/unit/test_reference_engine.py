"""The reference engine: one law whatever the draft, the batch and the limits."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from scipy.stats import chi2

from paceline.drafts.base import Proposal
from paceline.drafts.history import HistoryDrafter, HistoryIndex
from paceline.drafts.ngram import NgramDrafter, lookup
from paceline.engine.reference import ReferenceEngine
from paceline.errors import EngineError, PublishError
from paceline.models.weights import policy_tensors
from paceline.spec.sampling import policy_log_probs, policy_probs, sample
from paceline.testing.runs import tiny_policy
from paceline.types import Prompt, Request, Sampling, Versions

torch.set_num_threads(1)


class PolicyDrafter:
    """Drafts with a policy of its own, greedily or by sampling; with the engine's policy it is an oracle."""

    def __init__(self, policy, sampling=None, aux_layers=()):
        self.policy = policy
        self.sampling = sampling
        self.aux_layers = aux_layers

    def propose(self, token_ids, num_draft_tokens, hidden, generators):
        for ids, states in zip(token_ids, hidden or (), strict=False):
            self.check_hidden(ids, states)
        drafts = [[] for _ in token_ids]
        probs = [[torch.zeros(0, self.policy.config.vocab_size)] for _ in token_ids]
        for depth in range(max(num_draft_tokens)):
            rows = [row for row, k in enumerate(num_draft_tokens) if depth < k]
            texts = [[*token_ids[row], *drafts[row]] for row in rows]
            # Right padding is behind everything that is read.
            padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(text) for text in texts], batch_first=True)
            logits = self.policy(padded).logits[torch.arange(len(rows)), [len(text) - 1 for text in texts]]
            if self.sampling is None:
                drawn = logits.argmax(-1)
            else:
                drawn = sample(policy_probs(logits, self.sampling), [generators[row] for row in rows])
            for place, row in enumerate(rows):
                drafts[row].append(int(drawn[place]))
                if self.sampling is not None:
                    probs[row].append(policy_probs(logits[place : place + 1], self.sampling))
        return Proposal(drafts, None if self.sampling is None else [torch.cat(parts) for parts in probs])

    def check_hidden(self, ids, hidden):
        """The states handed over are those of a fresh pass over the same text, after any rejections."""
        states = self.policy(torch.tensor([ids]), output_hidden_states=True).hidden_states
        expected = torch.cat([states[layer][0, :-1] for layer in self.aux_layers], -1)
        torch.testing.assert_close(hidden, expected, atol=1e-9, rtol=1e-9)

    def load(self, draft):
        raise PublishError("no weights")


def requests(num, length=lambda i: 3 + i % 5, vocab=20, first_seed=100):
    generator = torch.Generator().manual_seed(5)
    return [
        Request(
            Prompt(f"p{i}", tuple(torch.randint(2, vocab, (length(i),), generator=generator).tolist())),
            sample=0,
            seed=first_seed + i,
        )
        for i in range(num)
    ]


def drafters(policy):
    other = tiny_policy(seed=1)
    half = Sampling(temperature=1.5)
    return {
        "ngram": NgramDrafter(1, 3),
        "oracle": PolicyDrafter(policy),
        "oracle, sampled": PolicyDrafter(policy, Sampling()),
        "another policy": PolicyDrafter(other),
        "another policy, sampled": PolicyDrafter(other, half),
        "reads hidden states": PolicyDrafter(policy, half, aux_layers=(0, 1)),
    }


@pytest.fixture(scope="module")
def policy():
    return tiny_policy()


@pytest.mark.parametrize("name", drafters(None))
@pytest.mark.parametrize("k", [1, 4])
def test_greedy_tokens_are_the_same_with_every_draft(policy, name, k):
    sampling = Sampling(temperature=0, max_tokens=20, stop_token_ids=(1,))
    asked = requests(8)
    plain = ReferenceEngine(policy).generate(asked, sampling)
    drafter = drafters(policy)[name]
    with_draft = ReferenceEngine(policy, drafter, num_draft_tokens=k, max_num_seqs=3).generate(asked, sampling)
    assert [c.token_ids for c in with_draft.completions] == [c.token_ids for c in plain.completions]
    assert [c.finish_reason for c in with_draft.completions] == [c.finish_reason for c in plain.completions]
    if name == "oracle":
        assert with_draft.stats.accepted == with_draft.stats.drafted > 0


def test_plain_greedy_decoding_is_a_loop_of_argmax_over_whole_sequences(policy):
    for request in requests(4):
        ids = list(request.prompt.token_ids)
        for _ in range(12):
            ids.append(int(policy(torch.tensor([ids])).logits[0, -1].argmax()))
        got = ReferenceEngine(policy).generate([request], Sampling(temperature=0, max_tokens=12)).completions[0]
        assert list(got.token_ids) == ids[len(request.prompt.token_ids) :]


@torch.no_grad()
def exact_law(policy, prompt, sampling, length):
    """Every response and its probability, by multiplying the policy's distributions."""
    law = {(): 1.0}
    for _ in range(length):
        extended = {}
        for tokens, prob in law.items():
            if tokens and tokens[-1] in sampling.stop_token_ids:
                extended[tokens] = prob
                continue
            probs = policy_probs(policy(torch.tensor([[*prompt, *tokens]])).logits[0, -1], sampling)
            extended |= {(*tokens, t): prob * float(p) for t, p in enumerate(probs) if p > 0}
        law = extended
    return law


def chi_square_p(counts, law):
    """p-value of the counts against the law; rare outcomes are pooled into one class of at least 5."""
    total = sum(counts.values())
    assert set(counts) <= set(law), "something was sampled that the policy cannot produce"
    common = {outcome: prob * total for outcome, prob in law.items() if prob * total >= 5}
    statistic = sum((counts[outcome] - expected) ** 2 / expected for outcome, expected in common.items())
    rest = total - sum(common.values())
    classes = len(common)
    if rest >= 5:
        statistic += (total - sum(counts[outcome] for outcome in common) - rest) ** 2 / rest
        classes += 1
    return chi2.sf(statistic, classes - 1)


@pytest.mark.parametrize(
    "name", ["none", "ngram", "history", "oracle", "oracle, sampled", "another policy", "another policy, sampled"]
)
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=3, stop_token_ids=(1,)),
        Sampling(temperature=0.7, top_k=5, top_p=0.9, max_tokens=3, stop_token_ids=(1,)),
    ],
    ids=["T=1", "T=0.7 filtered"],
)
def test_sampled_responses_follow_the_exact_law_of_the_policy(name, sampling):
    vocab = 6
    policy = tiny_policy(vocab_size=vocab)
    other = tiny_policy(vocab_size=vocab, seed=1)
    drafter = {
        "none": None,
        "ngram": NgramDrafter(1, 2),
        "history": HistoryDrafter(HistoryIndex(window_steps=1, min_match=1, max_match=4, max_tokens_kept=1000)),
        "oracle": PolicyDrafter(policy),
        "oracle, sampled": PolicyDrafter(policy, sampling),
        "another policy": PolicyDrafter(other),
        "another policy, sampled": PolicyDrafter(other, Sampling(temperature=1.3)),
    }[name]
    prompt = (3, 4, 5, 3)
    num = 1500
    asked = [Request(Prompt("p", prompt), i, seed=7000 + i) for i in range(num)]
    engine = ReferenceEngine(policy, drafter, num_draft_tokens=3, max_num_seqs=250)
    counts = Counter(c.token_ids for c in engine.generate(asked, sampling).completions)
    p_value = chi_square_p(counts, exact_law(policy, prompt, sampling, 3))
    # Seeds are fixed: the test is deterministic. A right sampler would fail one fresh set of seeds in ten thousand.
    assert p_value > 1e-4


def test_the_law_test_notices_draft_probabilities_that_are_not_those_of_the_draft():
    policy = tiny_policy(vocab_size=6)
    other = tiny_policy(vocab_size=6, seed=1)

    class Liar(PolicyDrafter):
        def propose(self, token_ids, num_draft_tokens, hidden, generators):
            truth = super().propose(token_ids, num_draft_tokens, hidden, generators)
            return Proposal(truth.token_ids, [torch.full_like(probs, 1 / 6) for probs in truth.probs or []])

    sampling = Sampling(max_tokens=4)
    asked = [Request(Prompt("p", (3, 4)), i, seed=i) for i in range(1500)]
    engine = ReferenceEngine(policy, Liar(other, Sampling()), num_draft_tokens=3, max_num_seqs=250)
    counts = Counter(c.token_ids[:2] for c in engine.generate(asked, sampling).completions)
    assert chi_square_p(counts, exact_law(policy, (3, 4), Sampling(), 2)) < 1e-6


@pytest.mark.parametrize("name", ["none", "ngram", "another policy, sampled"])
def test_what_a_request_gets_does_not_depend_on_its_batch(policy, name):
    drafter = None if name == "none" else drafters(policy)[name]
    sampling = Sampling(max_tokens=24, stop_token_ids=(1,))
    asked = requests(12)

    def run(batch, max_num_seqs):
        engine = ReferenceEngine(policy, drafter, num_draft_tokens=3, max_num_seqs=max_num_seqs)
        return {c.prompt_id: (c.token_ids, c.finish_reason) for c in engine.generate(batch, sampling).completions}

    together = run(asked, 12)
    assert run(asked, 5) == together
    assert run(asked[::-1], 3) == together
    assert {k: v for request in asked for k, v in run([request], 1).items()} == together


@pytest.mark.parametrize("name", ["none", "ngram", "another policy, sampled", "oracle"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.6, top_k=4, min_p=0.05), Sampling(top_p=0.8)])
def test_logprobs_are_those_of_a_fresh_pass_under_the_sampling_distribution(policy, name, sampling):
    drafter = None if name == "none" else drafters(policy)[name]
    sampling = Sampling(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, 15, (1,))
    asked = requests(6)
    engine = ReferenceEngine(policy, drafter, num_draft_tokens=3, max_num_seqs=4)
    for request, completion in zip(asked, engine.generate(asked, sampling).completions, strict=True):
        ids = torch.tensor([[*request.prompt.token_ids, *completion.token_ids]])
        rows = policy_log_probs(policy(ids).logits[0, len(request.prompt.token_ids) - 1 : -1], sampling)
        expected = rows.gather(1, torch.tensor(completion.token_ids)[:, None]).squeeze(1)
        assert completion.logprobs is not None
        torch.testing.assert_close(torch.tensor(completion.logprobs, dtype=torch.float64), expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", ["ngram", "another policy, sampled", "oracle"])
def test_blocks_say_what_was_committed_and_stats_count_them(policy, name):
    sampling = Sampling(max_tokens=19, stop_token_ids=(1, 4))
    engine = ReferenceEngine(policy, drafters(policy)[name], num_draft_tokens=3, max_num_seqs=4)
    rollouts = engine.generate(requests(10), sampling)
    for completion in rollouts.completions:
        tokens = [token for block in completion.blocks for token in block.token_ids]
        assert tuple(tokens[: len(completion.token_ids)]) == completion.token_ids
        assert len(tokens) - len(completion.blocks[-1].token_ids) < len(completion.token_ids)
        for block in completion.blocks:
            assert block.token_ids[: block.num_accepted] == block.draft_token_ids[: block.num_accepted]
            assert len(block.token_ids) == block.num_accepted + 1
            if name != "another policy, sampled" and block.num_accepted < len(block.draft_token_ids):
                assert block.token_ids[-1] != block.draft_token_ids[block.num_accepted]
            assert 1 <= block.live_batch <= 4
    blocks = [block for completion in rollouts.completions for block in completion.blocks]
    stats = rollouts.stats
    assert stats.bonus + stats.recovered == stats.verify_steps == sum(bool(b.draft_token_ids) for b in blocks)
    assert stats.accepted + stats.verify_steps + stats.plain == sum(len(b.token_ids) for b in blocks)
    assert stats.live_batch[0][1] == 4
    assert stats.live_batch[-1][1] == 0


@pytest.mark.parametrize("offset", range(8))
def test_a_stop_token_anywhere_in_a_block_ends_the_response_there(policy, offset):
    request = requests(1)[0]
    free = ReferenceEngine(policy).generate([request], Sampling(temperature=0, max_tokens=12)).completions[0]
    stop = free.token_ids[offset]
    first = free.token_ids.index(stop)
    engine = ReferenceEngine(policy, PolicyDrafter(policy), num_draft_tokens=4)
    cut = engine.generate([request], Sampling(temperature=0, max_tokens=12, stop_token_ids=(stop,))).completions[0]
    assert cut.token_ids == free.token_ids[: first + 1]
    assert cut.finish_reason == "stop"
    assert cut.logprobs is not None
    assert len(cut.logprobs) == first + 1


@pytest.mark.parametrize("prompt_length", range(26, 32))
def test_near_the_last_position_drafting_is_cut_and_every_token_still_comes(prompt_length):
    policy = tiny_policy(max_positions=32)
    request = requests(1, length=lambda i: prompt_length)[0]
    sampling = Sampling(temperature=0, max_tokens=64)
    plain = ReferenceEngine(policy).generate([request], sampling).completions[0]
    oracle = ReferenceEngine(policy, PolicyDrafter(policy), num_draft_tokens=5).generate([request], sampling)
    assert oracle.completions[0].token_ids == plain.token_ids
    assert len(plain.token_ids) == 32 - prompt_length
    assert plain.finish_reason == oracle.completions[0].finish_reason == "length"


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 6, 7])
def test_no_block_drafts_past_the_response_limit(policy, max_tokens):
    engine = ReferenceEngine(policy, PolicyDrafter(policy), num_draft_tokens=4)
    completion = engine.generate(requests(1), Sampling(temperature=0, max_tokens=max_tokens)).completions[0]
    # An oracle draft fits exactly, so nothing committed is thrown away.
    assert sum(len(block.token_ids) for block in completion.blocks) == len(completion.token_ids) == max_tokens


def test_a_prompt_of_one_token_and_one_that_fills_the_positions():
    policy = tiny_policy(max_positions=16)
    engine = ReferenceEngine(policy)
    one = Request(Prompt("one", (3,)), 0, 1)
    full = Request(Prompt("full", tuple([3] * 16)), 0, 1)
    assert len(engine.generate([one], Sampling(max_tokens=3)).completions[0].token_ids) == 3
    with pytest.raises(EngineError, match="full has 16 tokens"):
        engine.generate([full], Sampling(max_tokens=3))


def test_no_speculation_with_k_zero_is_plain_decoding(policy):
    sampling = Sampling(max_tokens=10)
    plain = ReferenceEngine(policy).generate(requests(3), sampling)
    zero = ReferenceEngine(policy, NgramDrafter(1, 3), num_draft_tokens=0).generate(requests(3), sampling)
    assert [c.token_ids for c in zero.completions] == [c.token_ids for c in plain.completions]
    assert zero.stats.verify_steps == 0


@pytest.mark.parametrize("tied", [False, True])
def test_after_a_publish_the_engine_is_the_published_policy(tied):
    old, new = tiny_policy(tied=tied), tiny_policy(tied=tied, seed=3)
    engine = ReferenceEngine(copy.deepcopy(old), NgramDrafter(1, 3), num_draft_tokens=2)
    sampling = Sampling(max_tokens=10)
    before = engine.generate(requests(4), sampling)
    engine.publish(policy_tensors(new), Versions(policy=5))
    after = engine.generate(requests(4), sampling)
    cold = ReferenceEngine(new, NgramDrafter(1, 3), num_draft_tokens=2).generate(requests(4), sampling)
    assert [(c.token_ids, c.logprobs) for c in after.completions] == [
        (c.token_ids, c.logprobs) for c in cold.completions
    ]
    assert [c.token_ids for c in after.completions] != [c.token_ids for c in before.completions]
    assert {c.versions.policy for c in after.completions} == {5}
    engine.publish(policy_tensors(old), Versions(policy=6))
    again = engine.generate(requests(4), sampling)
    assert [c.logprobs for c in again.completions] == [c.logprobs for c in before.completions]


def test_a_publish_that_does_not_fit_names_the_tensor_and_changes_nothing():
    engine = ReferenceEngine(tiny_policy(dtype=torch.float32))
    good = {name: tensor + 1 for name, tensor in policy_tensors(tiny_policy(dtype=torch.float32)).items()}
    name = "model.layers.1.self_attn.q_proj.weight"
    bad = {
        "lacks the tensor " + name: {n: t for n, t in good.items() if n != name},
        "has a tensor extra.weight": {**good, "extra.weight": torch.zeros(1)},
        name + " of shape": {**good, name: good[name][1:]},
        name + " as torch.float16": {**good, name: good[name].half()},
    }
    before = {n: t.clone() for n, t in policy_tensors(engine.model).items()}
    for message, published in bad.items():
        with pytest.raises(PublishError, match=message):
            engine.publish(published, Versions(policy=1))
        assert all(torch.equal(t, before[n]) for n, t in policy_tensors(engine.model).items())
        assert engine.versions == Versions(policy=0)
    with pytest.raises(PublishError, match=name + " holds NaN"):
        engine.publish({**good, name: torch.full_like(good[name], torch.nan)}, Versions(policy=1))
    assert all(torch.equal(t, before[n]) for n, t in policy_tensors(engine.model).items())


def test_weights_published_from_a_float32_master_are_rounded_to_the_engine_dtype():
    master = tiny_policy(dtype=torch.float32, seed=2)
    engine = ReferenceEngine(tiny_policy(dtype=torch.bfloat16))
    engine.publish(policy_tensors(master), Versions(policy=1))
    for name, tensor in policy_tensors(engine.model).items():
        assert torch.equal(tensor, policy_tensors(master)[name].bfloat16())


def test_a_draft_without_weights_cannot_be_published(policy):
    for engine in (ReferenceEngine(policy), ReferenceEngine(policy, NgramDrafter(1, 2), num_draft_tokens=2)):
        with pytest.raises(PublishError):
            engine.publish_draft({"fc.weight": torch.zeros(1)}, Versions(policy=0, draft=1))


def test_a_drafter_that_proposes_more_than_was_asked_for_is_refused(policy):
    class Greedy(NgramDrafter):
        def propose(self, token_ids, num_draft_tokens, hidden, generators):
            return Proposal([[3] * (k + 1) for k in num_draft_tokens], None)

    with pytest.raises(EngineError, match="proposed 3 tokens"):
        ReferenceEngine(policy, Greedy(1, 2), num_draft_tokens=2).generate(requests(1), Sampling(max_tokens=9))


def test_weights_that_give_no_distribution_are_an_error_and_not_a_token():
    policy = tiny_policy()
    with torch.no_grad():
        policy.lm_head.weight[0] = torch.nan
    with pytest.raises(EngineError, match="no distribution"):
        ReferenceEngine(policy).generate(requests(2), Sampling(max_tokens=3))


def test_lookup_takes_the_longest_match_and_of_equal_ones_the_earliest():
    assert lookup([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], 2, 1, 3) == [9, 2]
    assert lookup([7, 2, 5, 7, 2, 6, 7, 2], 1, 1, 2) == [5]
    assert lookup([7, 2, 5, 1, 2], 3, 2, 4) == []
    assert lookup([7, 2, 5, 1, 2], 3, 1, 4) == [5, 1, 2]
    assert lookup([4], 3, 1, 4) == []
    assert lookup([4, 4], 3, 1, 4) == [4]
