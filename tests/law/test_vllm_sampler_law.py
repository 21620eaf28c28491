"""vLLM's verify step, its own (repaired) and the one that walks the slots: both commit what the policy alone would.

Thousands of requests of each case share one call, so every case stands in a mixed batch: temperatures, filters and
numbers of drafts of its neighbours must not touch it. Laws come from `spec.exact`.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from paceline.engine.vllm import compat
from paceline.engine.vllm.engine import prepare_environment
from paceline.spec.exact import Law, chain_law, largest_difference
from paceline.spec.sampling import LogitsError, log_probs
from paceline.testing.faults import P_LIMIT, chi_square_p

VOCAB, COPIES = 8, 6000
WALKS = ["slot by slot", "all slots at once"]


@dataclasses.dataclass(frozen=True)
class Case:
    drafts: tuple[int, ...]
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    logits_seed: int = 0

    def logits(self) -> torch.Tensor:
        """[K + 1, V], float32 and without ties."""
        generator = torch.Generator().manual_seed(self.logits_seed)
        return 1.5 * torch.randn(len(self.drafts) + 1, VOCAB, generator=generator)

    def law(self) -> Law:
        probs = log_probs(self.logits().double(), self.temperature, self.top_k, self.top_p).exp()
        return chain_law(probs, self.drafts, None)


def likely(seed: int, num_drafts: int = 3) -> tuple[int, ...]:
    return tuple(Case((0,) * num_drafts, logits_seed=seed).logits()[:num_drafts].argmax(-1).tolist())


def unlikely(seed: int) -> tuple[int, ...]:
    return tuple(Case((0,) * 3, logits_seed=seed).logits()[:3].argmin(-1).tolist())


CASES = {
    "most likely drafts": Case(likely(1), logits_seed=1),
    "least likely drafts": Case(unlikely(2), logits_seed=2),
    "the same draft at every slot": Case((5, 5, 5), logits_seed=3),
    "no drafts": Case((), logits_seed=4),
    "one draft": Case(likely(5, 1), logits_seed=5),
    "two drafts, warm": Case(likely(6, 2), temperature=1.7, logits_seed=6),
    "placeholder first": Case((-1, 2, 3), logits_seed=7),
    "placeholder in the middle": Case((likely(8)[0], -1, 3), logits_seed=8),
    "placeholder last": Case((*likely(9, 2), -1), logits_seed=9),
    "only placeholders": Case((-1, -1, -1), logits_seed=10),
    "cold": Case(likely(11), temperature=0.5, logits_seed=11),
    "greedy, right drafts": Case(likely(12), temperature=0.0, logits_seed=12),
    "greedy, wrong drafts": Case(unlikely(13), temperature=0.0, logits_seed=13),
    "greedy, no drafts": Case((), temperature=0.0, logits_seed=14),
    "top-k": Case(likely(15), top_k=3, logits_seed=15),
    "top-k, drafts outside it": Case(unlikely(16), top_k=3, logits_seed=16),
    "top-k of one": Case(likely(17), top_k=1, logits_seed=17),
    "top-p": Case(likely(18), top_p=0.7, logits_seed=18),
    "top-p, drafts outside it": Case(unlikely(19), top_p=0.7, logits_seed=19),
    "both filters, warm": Case((*likely(20, 2), unlikely(20)[2]), 1.7, 5, 0.8, logits_seed=20),
    "both filters, no drafts": Case((), 0.5, 4, 0.9, logits_seed=21),
}
BATCHES = {
    "all": list(CASES),
    "without filters": [name for name, case in CASES.items() if case.top_k == 0 and case.top_p == 1.0],
    "only random": [name for name, case in CASES.items() if case.temperature > 0],
    "only greedy": [name for name, case in CASES.items() if case.temperature == 0],
    "only top-k": [name for name, case in CASES.items() if case.top_p == 1.0],
    "no drafts at all": [name for name, case in CASES.items() if not case.drafts],
    "plain": ["most likely drafts", "least likely drafts"],
}


@pytest.fixture(scope="module")
def samplers():
    prepare_environment()
    compat.apply()
    from vllm.platforms import current_platform
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.sample.sampler import Sampler

    from paceline.engine.vllm.sampler import SlotSampler

    # What a worker does when it starts.
    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()
    plain = Sampler("processed_logprobs")
    walks = {name: SlotSampler(plain) for name in WALKS}
    walks["slot by slot"].whole_up_to, walks["all slots at once"].whole_up_to = 0, 1 << 60
    return {"vllm": RejectionSampler(plain), **walks}


@pytest.fixture(params=WALKS)
def walk(samplers, request):
    return samplers[request.param]


def spec_metadata(cases: list[Case]):
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    counts = torch.tensor([len(case.drafts) for case in cases])
    ends = (counts + 1).cumsum(0)
    is_bonus = torch.zeros(int(ends[-1]), dtype=torch.bool)
    is_bonus[ends - 1] = True
    return SpecDecodeMetadata(
        draft_token_ids=torch.tensor([token for case in cases for token in case.drafts], dtype=torch.int32),
        num_draft_tokens=counts.tolist(),
        cu_num_draft_tokens=counts.cumsum(0).int(),
        cu_num_sampled_tokens=ends.int(),
        target_logits_indices=(~is_bonus).nonzero().squeeze(1).int(),
        bonus_logits_indices=(ends - 1).int(),
        logits_indices=torch.arange(len(is_bonus), dtype=torch.int32),
    )


def sampling_metadata(cases: list[Case], generators=None, num_logprobs=None):
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    temperature = torch.tensor([case.temperature for case in cases])
    top_k = torch.tensor([case.top_k or VOCAB for case in cases], dtype=torch.int32)
    top_p = torch.tensor([case.top_p for case in cases])
    nothing = torch.empty(0)
    return SamplingMetadata(
        temperature=None if bool((temperature == 0).all()) else temperature,
        all_greedy=bool((temperature == 0).all()),
        all_random=bool((temperature > 0).all()),
        top_p=top_p if bool((top_p < 1).any()) else None,
        top_k=top_k if bool((top_k < VOCAB).any()) else None,
        generators=generators or {},
        max_num_logprobs=num_logprobs,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=nothing,
        presence_penalties=nothing,
        repetition_penalties=nothing,
        output_token_ids=[],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )


def repeated(names: list[str], copies: int) -> tuple[list[Case], torch.Tensor]:
    """Cases take turns, so neighbours differ. [sum of rows, V] logits."""
    cases = [CASES[name] for name in names]
    return cases * copies, torch.cat([case.logits() for case in cases]).repeat(copies, 1)


def observed(tokens: torch.Tensor) -> dict[tuple[int, ...], int]:
    """How often each block was committed."""
    places = (VOCAB + 1) ** torch.arange(tokens.shape[1])
    codes, counts = ((tokens.long() + 1) * places).sum(1).unique(return_counts=True)
    rows = (codes.unsqueeze(1) // places % (VOCAB + 1) - 1).tolist()
    return {
        tuple(row[: row.index(-1)] if -1 in row else row): count
        for row, count in zip(rows, counts.tolist(), strict=True)
    }


def tail(counts: dict[tuple[int, ...], int], law: Law) -> float:
    """p-value; for a law of one outcome, whether it is the only one."""
    return float(set(counts) == set(law)) if len(law) == 1 else chi_square_p(counts, law)


def tails(sampler, names: list[str], *, seed: int, copies: int = COPIES, change=lambda *inputs: inputs):
    """p-value of every case in one call. `change` (spec metadata, logits, sampling metadata) plants a fault."""
    cases, logits = repeated(names, copies)
    inputs = change(spec_metadata(cases), logits, sampling_metadata(cases))
    with torch.random.fork_rng(), torch.inference_mode():
        torch.manual_seed(seed)
        tokens = sampler(inputs[0], None, inputs[1], inputs[2]).sampled_token_ids
    assert tokens.dtype == torch.int32
    return {name: tail(observed(tokens[index :: len(names)]), CASES[name].law()) for index, name in enumerate(names)}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", ["vllm", *WALKS])
def test_committed_tokens_follow_the_policy_in_every_mixture(samplers, kind, batch):
    """Chi-square over whole blocks; a right sampler fails one of the cases with probability 1e-6."""
    names = [name for name in BATCHES[batch] if kind in WALKS or -1 not in CASES[name].drafts]
    found = tails(samplers[kind], names, seed=1)
    assert {name: p for name, p in found.items() if p < P_LIMIT / len(found)} == {}


def test_vllms_cpu_kernel_may_accept_a_placeholder_and_the_walk_does_not(samplers):
    """`rejection_random_sample_kernel_impl` (0.32.0) accepts a -1 now and then and goes on behind it."""
    names = ["placeholder first", "placeholder in the middle"]
    theirs, ours = (tails(samplers[kind], names, seed=5, copies=40_000) for kind in ("vllm", WALKS[0]))
    assert max(theirs.values()) < P_LIMIT < min(ours.values())


# ---- exact: thresholds of a law in sixths are multiples of 1/60, so the midpoints of 60 cells integrate it

CELLS = 60


@pytest.mark.parametrize("drafts", [(2, 1), (0, 0), (2, 0), (1, -1), (-1, 1), (-1, -1), (1,), ()])
def test_integrated_over_its_noise_the_law_is_the_enumerated_one(walk, monkeypatch, drafts):
    law = integrated_law(walk, monkeypatch, drafts)
    assert largest_difference(law, chain_law(sixths(len(drafts)), drafts, None)) < 1e-12


def test_noise_shared_between_acceptance_and_draw_is_caught(walk, monkeypatch):
    """The planted fault: the draw after a rejection reuses the number that rejected."""

    def share(noise):
        noise[:, 1:] = noise[:, :1]
        return noise

    law = integrated_law(walk, monkeypatch, (0, 1), share)
    assert largest_difference(law, chain_law(sixths(2), (0, 1), None)) > 1e-3


def sixths(num_drafts: int) -> torch.Tensor:
    rows = torch.tensor([[1, 2, 3], [0, 5, 1], [4, 1, 1]], dtype=torch.float64) / 6
    return rows[: num_drafts + 1]


def integrated_law(sampler, monkeypatch, drafts: tuple[int, ...], change=lambda noise: noise) -> Law:
    from paceline.engine.vllm import sampler as module

    midpoints = (torch.arange(CELLS, dtype=torch.float64) + 0.5) / CELLS
    noise = torch.cartesian_prod(*[midpoints] * (len(drafts) + 1)).reshape(-1, len(drafts) + 1)
    rows = len(noise)
    monkeypatch.setattr(module, "draw_uniforms", lambda counts, generators, device: change(noise.clone()))
    cases = [Case(drafts)] * rows
    logits = sixths(len(drafts)).log().float().repeat(rows, 1)
    tokens = sampler(spec_metadata(cases), None, logits, sampling_metadata(cases)).sampled_token_ids
    return {key: count / rows for key, count in observed(tokens).items()}


def test_noise_of_exactly_zero_accepts_nothing_that_the_policy_cannot_sample(walk, monkeypatch):
    from paceline.engine.vllm import sampler as module

    monkeypatch.setattr(module, "draw_uniforms", lambda counts, generators, device: torch.zeros(1, 4).double())
    case = dataclasses.replace(CASES["top-k, drafts outside it"], drafts=unlikely(16))
    tokens = walk(spec_metadata([case]), None, case.logits(), sampling_metadata([case])).sampled_token_ids
    assert tokens[0, 1:].tolist() == [-1, -1, -1]
    assert int(tokens[0, 0]) in case.logits()[0].topk(3).indices.tolist()


# ---- seeds


def one_call(sampler, names: list[str], seeds: dict[int, int], num_logprobs=None):
    cases = [CASES[name] for name in names]
    logits = torch.cat([case.logits() for case in cases])
    generators = {row: torch.Generator().manual_seed(seed) for row, seed in seeds.items()}
    return sampler(spec_metadata(cases), None, logits, sampling_metadata(cases, generators, num_logprobs))


def committed(output, row: int) -> list[int]:
    return [token for token in output.sampled_token_ids[row].tolist() if token >= 0]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.temperature > 0])
def test_a_seeded_request_does_not_depend_on_who_shares_its_batch(walk, name):
    others = list(CASES)
    for seed in range(20):
        alone = committed(one_call(walk, [name], {0: seed}), 0)
        assert committed(one_call(walk, [name], {0: seed}), 0) == alone
        crowd = [*others[seed:], name, *others[:seed]]
        seeds = {row: 1000 + row for row in range(0, len(crowd), 2)} | {len(others[seed:]): seed}
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            assert committed(one_call(walk, crowd, seeds), len(others[seed:])) == alone


def test_seeds_and_unseeded_requests_give_different_tokens(walk):
    names = ["placeholder first"] * 64
    seeded = one_call(walk, names, {row: row for row in range(64)}).sampled_token_ids
    assert len(set(seeded[:, 0].tolist())) > 4
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first, second = (one_call(walk, names, {0: 5}).sampled_token_ids for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[1:], second[1:])


def test_seeded_requests_follow_the_policy(walk):
    """2,000 seeds of one case, false-alarm rate 1e-6: seeds that are neighbours draw independently."""
    names = ["most likely drafts"] * 2000
    tokens = one_call(walk, names, {row: row for row in range(2000)}).sampled_token_ids
    assert tail(observed(tokens), CASES["most likely drafts"].law()) > P_LIMIT


# ---- what else the engine reads


@pytest.mark.parametrize("num_logprobs", [0, 3])
def test_logprobs_are_those_of_the_law_that_was_sampled_and_tokens_do_not_depend_on_the_walk(samplers, num_logprobs):
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    names = [name for name in CASES if name != "both filters, no drafts"] * 3
    outputs = {}
    for kind, sampler in samplers.items():
        with torch.random.fork_rng():
            torch.manual_seed(3)
            output = one_call(sampler, names, {}, num_logprobs)
        tokens, lists = RejectionSampler.parse_output(
            output.sampled_token_ids, VOCAB, logprobs_tensors=output.logprobs_tensors
        )
        outputs[kind] = tokens
        place = 0
        for name, row in zip(names, tokens, strict=True):
            case = CASES[name]
            # At temperature 0 vLLM reports the log-probs at temperature 1.
            expected = log_probs(case.logits(), case.temperature or 1.0, case.top_k, case.top_p)
            for slot, token in enumerate(row):
                assert lists.logprob_token_ids[place][0] == token
                assert lists.logprobs[place][0] == pytest.approx(float(expected[slot, token]), abs=1e-5)
                assert lists.sampled_token_ranks[place] == int((expected[slot] >= expected[slot, token]).sum())
                if num_logprobs:
                    largest = expected[slot].topk(num_logprobs).values
                    assert torch.allclose(torch.tensor(lists.logprobs[place][1:]), largest, atol=1e-5)
                place += 1
        assert place == len(lists.logprobs)
    greedy = [index for index, name in enumerate(names) if CASES[name].temperature == 0]
    slot_by_slot, at_once = (outputs[name] for name in WALKS)
    assert slot_by_slot == at_once
    assert [at_once[index] for index in greedy] == [outputs["vllm"][index] for index in greedy]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["most likely drafts", "greedy, right drafts", "top-k", "top-p", "no drafts"])
def test_a_row_that_is_no_distribution_is_refused(walk, bad, name):
    case = CASES[name]
    logits = case.logits()
    logits[0, 3] = bad
    with pytest.raises(LogitsError, match="no distribution"):
        walk(spec_metadata([case]), None, logits, sampling_metadata([case]))


@pytest.mark.parametrize("kind", ["vllm", *WALKS])
def test_penalties_bad_words_and_allowed_ids_hold_at_every_slot(samplers, kind):
    """Bad words and the frequency penalty count the drafted prefix; a right sampler fails with probability 1e-6."""
    case = CASES["most likely drafts"]
    copies, first = 20_000, case.drafts[0]
    cases = [case] * copies
    forbidden = torch.zeros(copies, VOCAB, dtype=torch.bool)
    forbidden[:, 6] = True
    banned = next(token for token in range(VOCAB) if token not in (6, *case.drafts))
    sampling = dataclasses.replace(
        sampling_metadata(cases),
        no_penalties=False,
        prompt_token_ids=torch.full((copies, 1), VOCAB),
        frequency_penalties=torch.full((copies,), 0.7),
        presence_penalties=torch.zeros(copies),
        repetition_penalties=torch.ones(copies),
        output_token_ids=[[first]] * copies,
        spec_token_ids=[list(case.drafts)] * copies,
        bad_words_token_ids={row: [[banned]] for row in range(copies)},
        allowed_token_ids_mask=forbidden,
    )
    with torch.random.fork_rng():
        torch.manual_seed(4)
        logits = case.logits().repeat(copies, 1)
        tokens = samplers[kind](spec_metadata(cases), None, logits, sampling).sampled_token_ids
    expected = case.logits()
    expected[:, [6, banned]] = -torch.inf
    for slot in range(4):
        for token in (first, *case.drafts[:slot]):
            expected[slot, token] -= 0.7
    assert tail(observed(tokens), chain_law(log_probs(expected).exp(), case.drafts, None)) > P_LIMIT


def test_sampled_drafts_are_left_to_vllm_and_follow_the_policy(walk):
    """With `draft_probs` equal to the policy everything is accepted, which a one-hot draft would not be."""
    case = dataclasses.replace(CASES["most likely drafts"], drafts=(0, 1, 2))
    probs = case.logits()[:3].softmax(-1)
    output = walk(spec_metadata([case]), probs, case.logits(), sampling_metadata([case]))
    assert output.sampled_token_ids[0, :3].tolist() == [0, 1, 2]


# ---- planted faults: each must be seen by the same chi-square


def temperature_of_another_row(metadata, logits, sampling):
    return metadata, logits, dataclasses.replace(sampling, temperature=sampling.temperature.roll(1))


def top_p_of_another_row(metadata, logits, sampling):
    return metadata, logits, dataclasses.replace(sampling, top_p=sampling.top_p.roll(1))


def bonus_from_the_row_before(metadata, logits, sampling):
    logits = logits.clone()
    bonus = metadata.bonus_logits_indices[torch.tensor(metadata.num_draft_tokens) > 0].long()
    logits[bonus] = logits[bonus - 1]
    return metadata, logits, sampling


def rows_off_by_one(metadata, logits, sampling):
    return metadata, logits.roll(1, 0), sampling


INPUT_FAULTS = {
    temperature_of_another_row: {"cold", "two drafts, warm", "both filters, warm"},
    top_p_of_another_row: {"top-p", "both filters, warm"},
    bonus_from_the_row_before: {"most likely drafts", "one draft", "cold"},
    rows_off_by_one: {"most likely drafts", "no drafts", "top-k"},
}


@pytest.mark.parametrize("kind", ["vllm", *WALKS])
@pytest.mark.parametrize("fault", INPUT_FAULTS, ids=lambda fault: fault.__name__)
def test_planted_fault_in_what_is_read_is_caught(samplers, kind, fault):
    found = tails(samplers[kind], BATCHES["all"], seed=2, change=fault)
    caught = {name for name, p in found.items() if p < P_LIMIT / len(found)}
    assert caught >= INPUT_FAULTS[fault]


def residual_missing(module, monkeypatch):
    monkeypatch.setattr(module, "residual_probs", lambda target, draft, tokens: target)


def everything_accepted(module, monkeypatch):
    monkeypatch.setattr(module, "acceptance_probs", lambda target, draft, tokens: (tokens >= 0).double())


def filters_forgotten(module, monkeypatch):
    monkeypatch.setattr(module, "apply_top_k_top_p", lambda logits, top_k, top_p: logits)


def noise_shared(module, monkeypatch):
    draw = module.draw_uniforms
    monkeypatch.setattr(module, "draw_uniforms", lambda *given: draw(*given)[:, :1].repeat(1, 4))


CODE_FAULTS = {
    residual_missing: {"most likely drafts", "cold", "placeholder last"},
    everything_accepted: {"most likely drafts", "least likely drafts", "top-p, drafts outside it"},
    filters_forgotten: {"top-k", "top-p", "both filters, warm"},
    noise_shared: {"most likely drafts", "two drafts, warm"},
}


@pytest.mark.parametrize("fault", CODE_FAULTS, ids=lambda fault: fault.__name__)
def test_planted_fault_in_the_walk_is_caught(walk, monkeypatch, fault):
    from paceline.engine.vllm import sampler as module

    fault(module, monkeypatch)
    found = tails(walk, BATCHES["all"], seed=3)
    assert {name for name, p in found.items() if p < P_LIMIT / len(found)} >= CODE_FAULTS[fault]
