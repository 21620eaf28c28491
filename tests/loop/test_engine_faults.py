"""Faults planted in the live vLLM engine are found by `paceline certify` within 5,000 tokens, and placed rightly."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from paceline.config.load import load_recipe
from paceline.loop.certify import measure
from paceline.loop.parts import build_parts
from paceline.models.tiny import make_tokenizer
from paceline.observe.progress import Silent
from paceline.testing import engine_faults
from paceline.testing.models import random_policy

torch.set_num_threads(1)

RECIPE = """
[policy]
kind = "folder"
path = "{policy}"
[data]
max_terms = 3
num_train = 64
num_eval = 4
max_prompt_tokens = 256
[sampling]
max_tokens = 24
[engine]
max_num_seqs = 64
kv_cache_gib = 0.25
threads = 1
[draft]
method = "ngram"
num_draft_tokens = 2
min_ngram = 1
[algorithm]
group_size = 4
prompts_per_step = 16
"""
MOST_TOKENS = 5000


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """(recipe, parts) of one engine for all tests."""
    root = tmp_path_factory.mktemp("faults")
    tokenizer = make_tokenizer()
    random_policy(
        root / "policy", num_layers=2, hidden_size=32, vocab_size=len(tokenizer), spread=0.7, max_positions=512
    )
    tokenizer.save_pretrained(root / "policy")
    (root / "recipe.toml").write_text(RECIPE.format(policy=root / "policy"))
    recipe = load_recipe(root / "recipe.toml", [])
    parts = build_parts(recipe, Silent())
    yield recipe, parts
    parts.close()


@pytest.mark.parametrize("name", engine_faults.FAULTS)
def test_a_fault_of_the_live_engine_fails_within_5000_tokens_and_its_place_is_named(live, name):
    recipe, parts = live
    fault = engine_faults.FAULTS[name]
    if name == "stop token not cut inside a block":
        # A look-up drafts what stands in the prompt, for this tokenizer mostly the id of unknown letters. The policy
        # accepts it at times when it is hot.
        fault = dataclasses.replace(fault, asks={"stop_token_ids": (2,), "temperature": 2.0})
    with fault.planted(parts) as faulty:
        for measured in measure(recipe, faulty):
            judged = measured.judge()
            if fault.is_named_by(judged.findings, judged.num_draft_tokens) or judged.tokens > MOST_TOKENS:
                break
    assert judged.verdict == "fail" and judged.tokens < MOST_TOKENS
    assert fault.is_named_by(judged.findings, judged.num_draft_tokens), judged.findings


def test_the_engine_passes_when_the_faults_are_gone(live):
    """Runs after them: nothing of a planted fault stays behind."""
    recipe, parts = live
    judged = next(measured for measured in measure(recipe, parts) if measured.tokens > MOST_TOKENS).judge()
    assert judged.verdict == "pass", judged.findings
    assert judged.recovered.tokens > 500 and judged.certificate.by_slot[2].tokens > 100
    assert parts.trainer.sampling == parts.sampling


def test_a_fault_counts_as_named_only_by_its_place_and_by_no_other():
    fault = engine_faults.FAULTS["bonus from the row of another sequence"]
    here, there = "all tokens at slot 2 (bonus): z +9.0", "acceptance at slot 1: z +7.0"
    assert fault.is_named_by(("all tokens: z +8.0", here), 2)
    assert not fault.is_named_by((here, there), 2) and not fault.is_named_by(("all tokens: z +8.0",), 2)
    assert not fault.is_named_by((here,), 3)
