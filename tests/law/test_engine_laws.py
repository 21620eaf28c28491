"""The whole engine: responses follow the exact law that the policy's own logits give, whatever drafts.

Chi-square over all responses to one prompt. A right engine fails one test with probability 1e-6 (seeds are fixed, so a
passing test stays one). tests/unit/test_reference_engine.py does the same for the reference engine.
"""

from __future__ import annotations

from collections import Counter

import pytest

from paceline.config.run import DraftModelDraft, Eagle3Draft, HistoryDraft, MtpDraft, NgramDraft, NoDraft
from paceline.config.run import VllmEngine as VllmConfig
from paceline.engine.vllm.engine import VllmEngine
from paceline.testing.faults import P_LIMIT, chi_square_p
from paceline.testing.models import against, exact_law, random_head, random_mtp_policy, random_policy
from paceline.types import Prompt, Request, Sampling

VOCAB, EOS = 8, 1
NUM_REQUESTS = 1500
# Look-up finds the last token earlier in the prompt, so there are n-gram drafts from the second step on.
PROMPT = (2, 3, 4, 5, 6, 7, 2, 3, 4, 6, 5, 2, 7, 3)
DRAFT_MODELS = {
    "draft_model": "another",
    "draft_model, the policy itself": "policy",
    "draft_model, against it": "against",
}
"""Arm -> folder. The last two are the ends: right, and wrong, as often as a greedy draft can be."""
ARMS = ("none", "eagle3", "ngram", "mtp", "history", *DRAFT_MODELS)
SAMPLINGS = {
    "T=1": Sampling(temperature=1.0, max_tokens=4, stop_token_ids=(EOS,)),
    "T=0.7": Sampling(temperature=0.7, max_tokens=4, stop_token_ids=(EOS,)),
    "T=1, top-k 6, top-p 0.9": Sampling(temperature=1.0, top_k=6, top_p=0.9, max_tokens=4, stop_token_ids=(EOS,)),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    policy = random_policy(root / "policy", num_layers=4, vocab_size=VOCAB, spread=0.3, seed=3)
    random_head(root / "head", policy, aux_layers=(1, 2, 3))
    random_policy(root / "another", num_layers=2, hidden_size=32, vocab_size=VOCAB, num_kv_heads=2, spread=0.3, seed=4)
    against(policy).save_pretrained(root / "against")
    own_layer = random_mtp_policy(root / "mtp", vocab_size=VOCAB, seed=3)
    return root, {arm: own_layer if arm == "mtp" else policy for arm in ARMS}


@pytest.fixture(scope="module")
def engines(folders):
    root, _ = folders
    config = VllmConfig(max_num_seqs=256, kv_cache_gib=0.25, threads=1)

    def build(draft, head=None, policy="policy"):
        return VllmEngine(root / policy, config, draft, draft_folder=head, max_model_len=32)

    engines = {
        "none": build(NoDraft()),
        "eagle3": build(Eagle3Draft(num_draft_tokens=3), root / "head"),
        "ngram": build(NgramDraft(num_draft_tokens=3, min_ngram=1, max_ngram=3)),
        "mtp": build(MtpDraft(num_draft_tokens=3), policy="mtp"),
        "history": build(HistoryDraft(num_draft_tokens=3, min_match=1)),
        **{arm: build(DraftModelDraft(num_draft_tokens=3), root / name) for arm, name in DRAFT_MODELS.items()},
    }
    # From an earlier step; the samples that finish first come to it in every call.
    engines["history"].history.add_step(1, [(PROMPT, response) for response in ((5, 2, 3, 4), (2, 5, 5, 7), (6, 1))])
    yield engines
    for engine in engines.values():
        engine.close()


def sampled(engine: VllmEngine, sampling: Sampling, first_seed: int):
    asked = [Request(Prompt("p", PROMPT), index, seed=first_seed + index) for index in range(NUM_REQUESTS)]
    rollouts = engine.generate(asked, sampling)
    return Counter(completion.token_ids for completion in rollouts.completions), rollouts.stats


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("name", SAMPLINGS)
def test_responses_of_vllm_follow_the_exact_law_of_the_policy(folders, engines, arm, name):
    counts, stats = sampled(engines[arm], SAMPLINGS[name], first_seed=50_000)
    assert chi_square_p(counts, exact_law(folders[1][arm], PROMPT, SAMPLINGS[name])) > P_LIMIT
    # The drafts were there, and were judged both ways.
    if arm != "none":
        assert (stats.accepted > 100 or arm == "draft_model, against it") and stats.recovered > 100
    if arm in ("draft_model, the policy itself", "draft_model, against it"):
        first = stats.accepted_by_position[0] / stats.drafted_by_position[0]
        assert first > 0.25 if arm == "draft_model, the policy itself" else first < 0.08


def drafts_at_half_the_temperature(metadata, logits):
    logits[metadata.target_logits_indices] *= 2


def drafts_on_the_row_behind(metadata, logits):
    logits[metadata.target_logits_indices] = logits[metadata.target_logits_indices + 1]


def bonus_on_the_row_before(metadata, logits):
    logits[metadata.bonus_logits_indices] = logits[(metadata.bonus_logits_indices - 1).clamp_min(0)]


@pytest.mark.parametrize(
    ("arm", "fault"),
    [
        ("eagle3", drafts_at_half_the_temperature),
        ("ngram", drafts_on_the_row_behind),
        ("ngram", bonus_on_the_row_before),
        ("mtp", drafts_at_half_the_temperature),
        ("history", drafts_on_the_row_behind),
        ("draft_model", drafts_at_half_the_temperature),
    ],
)
def test_a_fault_planted_in_the_verifier_of_vllm_is_noticed(folders, engines, arm, fault, monkeypatch):
    sampler = engines[arm]._runner.rejection_sampler
    verify = sampler.forward

    def faulty(metadata, draft_probs, logits, sampling_metadata):
        logits = logits.clone()
        fault(metadata, logits)
        return verify(metadata, draft_probs, logits, sampling_metadata)

    monkeypatch.setattr(sampler, "forward", faulty)
    counts, _ = sampled(engines[arm], SAMPLINGS["T=1"], first_seed=50_000)
    assert chi_square_p(counts, exact_law(folders[1][arm], PROMPT, SAMPLINGS["T=1"])) < P_LIMIT
