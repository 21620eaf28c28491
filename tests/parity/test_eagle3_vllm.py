"""The head in the trainer against the head in the real vLLM, depth by depth, at T = 0 in fp32.

One of the heads is given to the engine in the layout of another trainer, as it is, and read by the trainer from there.

The engine runs in a process of its own: its OpenMP library must be loaded before Python starts. That process is this
file run as a script; it writes what the drafter was given and what it proposed, and the test compares.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from paceline.config.run import Eagle3Draft
from paceline.models.eagle3 import Eagle3Head
from paceline.testing.heads import write_speculators
from paceline.train.draft import Answer, policy_features, predicted_acceptance, train_eagle3
from paceline.types import Sampling

torch.set_num_threads(1)

NUM_DRAFT_TOKENS = 4
MAX_TOKENS = 24
VOCAB_SIZE = 64
GREEDY = Sampling(temperature=0.0)
PROMPTS = [[1, 2, 3, 4, 5, 9, 8], [7, 5, 3], [10, 20, 30, 40, 50, 60, 1, 2, 3, 4, 5], [33, 2]]


@dataclass(frozen=True)
class Case:
    """A policy, and a head trained for it: Qwen3 with tied embeddings and few KV heads, or Llama with none shared."""

    kind: str
    num_kv_heads: int
    draft_size: int | None
    write: Callable[[Eagle3Head, PreTrainedModel, Path], None]


def write_ours(head: Eagle3Head, policy: PreTrainedModel, folder: Path) -> None:
    head.export(folder)


CASES = {"qwen3": Case("qwen3", 2, 40, write_ours), "llama": Case("llama", 4, None, write_speculators)}


def make_policy(case: Case) -> PreTrainedModel:
    shape = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 96,
        "intermediate_size": 128,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": case.num_kv_heads,
        "head_dim": 32,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": "float32",
    }
    torch.manual_seed(0)
    if case.kind == "llama":
        policy = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=False))
    else:
        policy = Qwen3ForCausalLM(Qwen3Config(**shape, tie_word_embeddings=True))
    return policy.eval()


@torch.no_grad()
def greedy_answers(policy: PreTrainedModel) -> list[Answer]:
    answers = []
    for prompt in PROMPTS:
        token_ids = torch.tensor([prompt])
        for _ in range(MAX_TOKENS):
            token_ids = torch.cat([token_ids, policy(input_ids=token_ids).logits[:, -1].argmax(-1, keepdim=True)], 1)
        answers.append(Answer(tuple(token_ids[0].tolist()), len(prompt)))
    return answers


def run_engine(folder: Path, out: Path) -> None:
    """In the engine's process: generate greedily, and record every call of the drafter."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(folder / "policy"),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=128,
        max_num_seqs=len(PROMPTS),
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config={
            "method": "eagle3",
            "model": str(folder / "head"),
            "num_speculative_tokens": NUM_DRAFT_TOKENS,
        },
    )
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    drafter = runner.drafter
    calls: list[dict[str, object]] = []
    logits: list[torch.Tensor] = []
    compute_logits, propose = drafter.model.compute_logits, drafter.propose

    def recording_compute_logits(hidden: torch.Tensor) -> torch.Tensor:
        logits.append(compute_logits(hidden))
        return logits[-1]

    def recording_propose(*args: Any, **kwargs: Any) -> torch.Tensor:
        logits.clear()
        # The engine reuses its buffers, so that everything is copied here.
        last = kwargs["token_indices_to_sample"]
        if last is None:
            last = kwargs["common_attn_metadata"].query_start_loc[1:] - 1
        call = {
            # The engine appends "-" and noise to each id.
            "requests": [request.split("-")[0] for request in runner.input_batch.req_ids],
            "roots": kwargs["target_positions"][last.long()].clone(),
            "next_token_ids": kwargs["next_token_ids"].clone(),
        }
        drafted = propose(*args, **kwargs)
        calls.append({**call, "drafted": drafted.clone(), "logits": torch.stack(logits, dim=1).clone()})
        return drafted

    drafter.model.compute_logits, drafter.propose = recording_compute_logits, recording_propose
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS],
        SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False),
    )
    counters = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    torch.save(
        {
            "calls": calls,
            "requests": [output.request_id for output in outputs],
            "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
            "num_blocks": counters["vllm:spec_decode_num_drafts"],
            "num_accepted": counters["vllm:spec_decode_num_accepted_tokens"],
        },
        out,
    )


@pytest.fixture(scope="module", params=CASES)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple:
    """(policy, head, what the engine recorded)"""
    folder = tmp_path_factory.mktemp(request.param)
    case = CASES[request.param]
    policy = make_policy(case)
    policy.save_pretrained(folder / "policy")
    config = Eagle3Draft(vocab_size=case.draft_size, epochs=60, depth=4, lr=5e-3)
    head, _ = train_eagle3(policy, greedy_answers(policy) * 4, config, Sampling(temperature=0.5))
    case.write(head, policy, folder / "head")
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "LD_PRELOAD": str(Path(sys.prefix) / "lib" / "libiomp5.so"),
    }
    out = folder / "record.pt"
    done = subprocess.run(
        [sys.executable, __file__, str(folder), str(out)], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    loaded = Eagle3Head.load(folder / "head", policy.config, 128, embedding=policy.get_input_embeddings().weight)
    return policy, loaded, torch.load(out)


def test_every_draft_and_every_draft_logit_equals_the_engines_at_each_depth(run: tuple) -> None:
    policy, head, record = run
    sequences = {
        request: prompt + token_ids
        for request, prompt, token_ids in zip(record["requests"], PROMPTS, record["token_ids"], strict=True)
    }
    aux = {
        request: policy_features(policy, [Answer(tuple(tokens), 1)], head.config.aux_layers)[0].aux
        for request, tokens in sequences.items()
    }
    compared = after_acceptance = 0
    last_root: dict[str, int] = {}
    for call in record["calls"]:
        for row, request in enumerate(call["requests"]):
            tokens, root = sequences[request], int(call["roots"][row])
            if root + 1 >= len(tokens):
                continue  # the drafts after the last verify step, which runs past the length limit
            assert tokens[root + 1] == int(call["next_token_ids"][row])
            drafted, logits = head.draft(
                policy, aux[request][: root + 1], torch.tensor(tokens[: root + 2]), NUM_DRAFT_TOKENS
            )
            assert drafted.tolist() == call["drafted"][row].tolist()
            torch.testing.assert_close(call["logits"][row][:, head.draft_ids], logits, rtol=0, atol=1e-3)
            outside = torch.ones(VOCAB_SIZE, dtype=torch.bool)
            outside[head.draft_ids] = False
            assert bool((call["logits"][row][:, outside] == -torch.inf).all())
            compared += 1
            after_acceptance += root - last_root.get(request, root) > 1
            last_root[request] = root
    # A block after an accepted draft is where the engine must have rebuilt the draft's keys from the policy's states.
    assert compared >= 12
    assert after_acceptance >= 6


def test_prediction_on_the_engines_own_rollouts_is_what_the_engine_counted(run: tuple) -> None:
    policy, head, record = run
    answers = [
        Answer((*prompt, *token_ids), len(prompt))
        for prompt, token_ids in zip(PROMPTS, record["token_ids"], strict=True)
    ]
    predicted = predicted_acceptance(policy, head, answers, NUM_DRAFT_TOKENS, GREEDY)
    assert predicted.num_blocks == record["num_blocks"]
    assert predicted.alpha == pytest.approx(1 + record["num_accepted"] / record["num_blocks"])
    assert predicted.alpha > 2


if __name__ == "__main__":
    run_engine(Path(sys.argv[1]), Path(sys.argv[2]))
