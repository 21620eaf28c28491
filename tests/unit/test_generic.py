"""Generic texts: only the answers are learned from, the same seed makes the same, and a bad line is named."""

from __future__ import annotations

import json
import re
from itertools import islice
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from paceline.data import generic
from paceline.data.generic import Encoding, Text, load_texts
from paceline.errors import DataError
from paceline.models.tiny import EOS, SYMBOLS, make_tokenizer

STOP = SYMBOLS.index(EOS)
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}={{ m.content }};{% else %}+{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}={% endif %}"
)
"""In the alphabet of the tiny policy: a turn of the user after `+`, an answer between `=` and `;`."""


def compact(max_length: int = 256) -> Encoding:
    return Encoding(make_tokenizer(), "compact", (STOP,), max_length)


def chat(template: str = TEMPLATE) -> Encoding:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    return Encoding(tokenizer, "chat", (SYMBOLS.index(";"),), 256)


def plain() -> Encoding:
    alphabet = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokens = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    return Encoding(PreTrainedTokenizerFast(tokenizer_object=tokens), "plain", (0,), 10_000)


def write(folder: Path, *lines: object) -> Path:
    path = folder / "texts.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    return path


def conversation(*contents: str) -> dict[str, object]:
    """Turns of user and assistant, one after the other."""
    roles = ("user", "assistant") * len(contents)
    return {"messages": [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]}


def parts(text: Text, encoding: Encoding) -> tuple[str, str]:
    prompt, response = text.token_ids[: text.prompt_length], text.token_ids[text.prompt_length :]
    return encoding.tokenizer.decode(prompt), encoding.tokenizer.decode(response)


def load(
    path: Path | None, encoding: Encoding, number: int = 100, task: str = "chain_sum", seed: int = 0
) -> list[Text]:
    return load_texts(path, number, encoding, task, seed)


def test_every_assistant_turn_is_learned_from_and_no_other_turn(tmp_path: Path) -> None:
    path = write(tmp_path, conversation("12", "3", "45", "67"), b"", conversation("8", "9"))
    encoding = chat()
    assert [parts(text, encoding) for text in load(path, encoding)] == [
        ("+12=", "3;"),
        ("+12=3;+45=", "67;"),
        ("+8=", "9;"),
    ]
    encoding = compact()
    texts = load(path, encoding)
    assert [parts(text, encoding) for text in texts] == [("12", "3" + EOS), ("12345", "67" + EOS), ("8", "9" + EOS)]
    encoding = plain()
    assert [parts(text, encoding)[0] for text in load(path, encoding)] == ["12\n", "12\n3\n45\n", "8\n"]


def test_an_answer_ends_with_its_stop_token_and_a_long_one_at_the_limit(tmp_path: Path) -> None:
    path = write(tmp_path, conversation("1", "2;3;4"), conversation("5", "67890"))
    encoding = chat()
    assert [parts(text, encoding)[1] for text in load(path, encoding)] == ["2;", "67890;"]
    assert [len(text.token_ids) for text in load(path, compact(max_length=4))] == [4, 4]
    assert len(load(path, encoding, number=1)) == 1


GOOD = conversation("1+1=", "2")
BAD_LINES = {
    "not JSON": (b"{", "line 2: the line: Invalid JSON"),
    "no messages": ({"text": "1"}, "line 2: messages: Field required"),
    "no turns": ({"messages": []}, "line 2: messages: .* at least 1"),
    "role": ({"messages": [{"role": "robot", "content": "1"}]}, r"line 2: messages\.0\.role: .*'assistant'"),
    "content": ({"messages": [{"role": "user", "content": 1}]}, r"line 2: messages\.0\.content: .*string"),
    "not UTF-8": (b'{"messages": "\xff"}', "line 2: not UTF-8 .* at byte 14"),
    "character": (conversation("1+1=", "It is 2"), "line 2: .* does not know 'I' .character 1 of 'It is 2'"),
    "later character": (conversation("12 3", "2"), "line 2: .* does not know ' ' .character 3 of '12 3'"),
    "prompt": (conversation("1" * 255, "2"), "line 2: the prompt of turn 2 has 255 tokens, .* 256 positions"),
}


@pytest.mark.parametrize("fault", BAD_LINES)
def test_a_line_that_cannot_be_used_is_named_with_what_is_wrong(fault: str, tmp_path: Path) -> None:
    line, message = BAD_LINES[fault]
    path = write(tmp_path, GOOD, line, GOOD)
    with pytest.raises(DataError, match=message) as caught:
        load(path, compact())
    assert str(caught.value).startswith(f"draft.generic_path: {path} line 2")
    assert "\n" not in str(caught.value)


def test_a_file_that_teaches_nothing_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", write(tmp_path, conversation("1+1="))):
        with pytest.raises(DataError, match=r"draft\.generic_path"):
            load(path, compact())


def test_a_template_that_rewrites_the_past_or_refuses_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, conversation("1", "2"))
    rewrites = "{{ messages | length }}" + TEMPLATE
    refuses = "{{ raise_exception('no') }}"
    for template, message in ((rewrites, "line 1: .*differently"), (refuses, "line 1: .*template refuses")):
        with pytest.raises(DataError, match=message):
            load(path, chat(template))


def test_what_is_made_for_the_tiny_policy_is_in_its_alphabet_and_in_no_form_of_its_own() -> None:
    encoding = compact()
    texts = load(None, encoding, 300)
    assert len(texts) == 300
    unknown = encoding.tokenizer.unk_token_id
    assert not any(unknown in text.token_ids for text in texts)
    for text in texts:
        prompt, response = parts(text, encoding)
        assert not re.fullmatch(r"\d([+-]\d)+=", prompt), "a prompt of the policy's own task"
        assert "Answer" not in response, "an answer of the policy's own form"
        assert response.endswith(EOS)
    assert len({parts(text, encoding)[1] for text in texts}) > 150


@pytest.mark.parametrize("make", [compact, plain], ids=["numbers", "words"])
def test_the_same_seed_makes_the_same_texts_and_another_seed_others(make) -> None:
    first, again, other = (load(None, make(), 12, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert len({text.token_ids for text in first} & {text.token_ids for text in other}) < 3


def test_the_recipes_own_task_is_not_among_the_generic_questions() -> None:
    asked = {
        task: [messages[0].content for messages in islice(generic._made_of_words(25, task, seed=3), 60)]
        for task in ("chain_sum", "gsm_symbolic")
    }
    sums = {task: sum("State the final answer" in question for question in found) for task, found in asked.items()}
    assert sums["gsm_symbolic"] > 0, "chain_sum is asked in other words: the test shows nothing"
    assert sums["chain_sum"] == 0
