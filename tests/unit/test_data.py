"""Laws of the prompts: who may see which question, in what order, and what is refused."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from paceline.config.run import Data
from paceline.data.prompts import PromptSets, check_fit, load_prompts
from paceline.data.source import PromptSource
from paceline.errors import CheckpointError, ConfigError, DataError
from paceline.types import Prompt

START = 1
"""The tokenizer's own start token, written in front of a plain text."""


def characters(unknown: str = "", chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """A token per character: id 0 for `unknown` ones."""
    known = ["<unk>", "<s>", *(chr(code) for code in range(10, 256) if chr(code) not in unknown)]
    words = Tokenizer(models.WordLevel({symbol: i for i, symbol in enumerate(known)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), behavior="isolated")
    words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", START)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", bos_token="<s>")
    tokenizer.chat_template = chat_template
    return tokenizer


CHAT = "<user>{{ messages[0]['content'] }}{% if add_generation_prompt %}<assistant>{% endif %}"


def sums(num_train: int = 60, num_eval: int = 20, seed: int = 17, max_terms: int = 9) -> PromptSets:
    data = Data(num_train=num_train, num_eval=num_eval, seed=seed, max_terms=max_terms)
    return load_prompts(data, characters(), "compact")


def texts(prompts: tuple[Prompt, ...]) -> list[str]:
    return [prompt.text for prompt in prompts]


def test_no_question_is_both_trained_on_and_held_out_nor_asked_twice() -> None:
    # Two terms leave 200 sums in all, so that repeats are certain in the task's own stream.
    sets = sums(num_train=100, num_eval=40, max_terms=2)
    assert len(set(texts(sets.train) + texts(sets.held_out))) == 140


def test_held_out_questions_do_not_depend_on_the_number_of_training_prompts() -> None:
    assert sums(num_train=10).held_out == sums(num_train=60).held_out


def test_the_same_seed_gives_the_same_prompts_and_another_one_others() -> None:
    assert sums() == sums()
    assert texts(sums(seed=1).train) != texts(sums(seed=2).train)


def test_answers_are_the_values_of_the_expressions() -> None:
    for prompt in sums().train:
        assert re.fullmatch(r"\d([+-]\d)+=", prompt.text)
        assert sum(int(term) for term in re.findall(r"[+-]?\d", prompt.text)) == int(prompt.answer)


def test_a_chat_prompt_holds_the_question_the_instruction_and_the_start_of_the_answer() -> None:
    data = Data(task="gsm_symbolic", num_train=3, num_eval=2, max_prompt_tokens=2000)
    for prompt in load_prompts(data, characters(chat_template=CHAT), "chat").train:
        assert prompt.text.startswith("<user>") and prompt.text.endswith("\\boxed{}.<assistant>")
        # The template has written the special tokens; the tokenizer must not write them again.
        assert START not in prompt.token_ids


def test_a_plain_prompt_begins_with_the_tokenizers_own_start() -> None:
    data = Data(num_train=2, num_eval=1, max_prompt_tokens=2000)
    assert load_prompts(data, characters(), "plain").train[0].token_ids[0] == START


def test_a_prompt_over_the_limit_is_named_with_key_and_remedy() -> None:
    data = Data(num_train=50, num_eval=1, min_terms=2, max_terms=9, max_prompt_tokens=10)
    with pytest.raises(
        DataError, match=r"prompt (train|eval)-\d+ has 1\d tokens and data.max_prompt_tokens is 10: set"
    ):
        load_prompts(data, characters(), "compact")


def test_a_task_with_too_few_questions_says_which_keys_to_lower() -> None:
    with pytest.raises(DataError, match=r"data.num_train = 500.*Lower them"):
        sums(num_train=500, num_eval=5, max_terms=2)


def test_symbols_the_tokenizer_does_not_know_are_refused() -> None:
    with pytest.raises(DataError, match="does not know"):
        load_prompts(Data(num_train=5, num_eval=5), characters(unknown="+"), "compact")


def test_the_tiny_policy_is_not_given_word_problems() -> None:
    with pytest.raises(ConfigError, match=r"data.task.*chain_sum"):
        load_prompts(Data(task="gsm_symbolic", num_train=1, num_eval=1), characters(), "compact")


def test_chat_needs_a_template() -> None:
    with pytest.raises(ConfigError, match="chat template"):
        load_prompts(Data(num_train=1, num_eval=1), characters(), "chat")


def test_prompt_and_response_must_fit_the_policys_positions() -> None:
    prompts = [Prompt(id="train-0", token_ids=(1, 2)), Prompt(id="train-1", token_ids=(1, 2, 3))]
    check_fit(prompts, max_tokens=61, max_positions=64)
    with pytest.raises(DataError, match=r"train-1 has 3 tokens.*sampling.max_tokens to 61 or less"):
        check_fit(prompts, max_tokens=62, max_positions=64)


def test_an_empty_set_of_prompts_is_refused() -> None:
    with pytest.raises(DataError, match="no prompts"):
        check_fit([], max_tokens=1, max_positions=64)
    with pytest.raises(DataError, match="no training prompts"):
        PromptSource([], seed=0)


def ten() -> list[Prompt]:
    return [Prompt(id=str(i), token_ids=(i,)) for i in range(10)]


@settings(max_examples=50, deadline=None)
@given(before=st.lists(st.integers(0, 25), max_size=6), after=st.lists(st.integers(0, 25), max_size=6))
def test_a_resumed_source_goes_on_as_an_uninterrupted_one(before: list[int], after: list[int]) -> None:
    whole, stopped, resumed = (PromptSource(ten(), seed=3) for _ in range(3))
    for number in before:
        assert whole.next(number) == stopped.next(number)
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    for number in after:
        assert whole.next(number) == resumed.next(number)


def test_every_epoch_has_every_prompt_once_in_an_order_of_its_own() -> None:
    source = PromptSource(ten(), seed=3)
    first, second = source.next(10), source.next(10)
    assert {p.id for p in first} == {p.id for p in second} == {str(i) for i in range(10)}
    assert first != second


def test_the_order_depends_on_the_seed_and_not_on_the_sizes_asked_for() -> None:
    whole, pieces = PromptSource(ten(), seed=3), PromptSource(ten(), seed=3)
    assert whole.next(25) == [p for number in (7, 7, 7, 4) for p in pieces.next(number)]
    assert PromptSource(ten(), seed=4).next(10) != PromptSource(ten(), seed=3).next(10)


def test_the_state_of_another_set_of_prompts_is_refused() -> None:
    state = PromptSource(ten(), seed=3).state_dict()
    for other in (PromptSource(ten(), seed=4), PromptSource(ten()[:9], seed=3)):
        with pytest.raises(CheckpointError, match="this run has"):
            other.load_state_dict(state)
