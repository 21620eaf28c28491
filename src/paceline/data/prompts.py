"""Reasoning-gym tasks as prompts.

The held-out prompts are drawn first and the training prompts from what follows them in the same stream, each question
once. So the held-out set does not depend on the number of training prompts, and the two never share a question.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, assert_never

from paceline.config.run import Data, FolderPolicy, Policy, SmolLM2Policy, TinyPolicy
from paceline.errors import ConfigError, DataError
from paceline.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Style = Literal["compact", "chat", "plain"]
"""How a question is written: `3+4-5=` for the tiny policy, through the chat template, or as it is."""

_DRAWS_PER_PROMPT = 16
"""Questions drawn per prompt wanted before the task counts as exhausted: it repeats itself too often."""

_INSTRUCTION = {
    "chain_sum": "Work it out step by step. End with a line `Answer:` followed by the number.",
    "gsm_symbolic": "Think step by step and end with the final number in \\boxed{}.",
}


@dataclass(frozen=True, slots=True)
class PromptSets:
    """Training and held-out prompts; no question is in both.

    Example: `PromptSets(train=(Prompt(id="train-0", ...),), held_out=(Prompt(id="eval-0", ...),))`.
    """

    train: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]


def prompt_style(policy: Policy, tokenizer: PreTrainedTokenizerBase) -> Style:
    """How questions are written for a policy."""
    match policy:
        case TinyPolicy():
            return "compact"
        case SmolLM2Policy():
            return "chat"
        case FolderPolicy():
            return "plain" if tokenizer.chat_template is None else "chat"
        case _:
            assert_never(policy)


def load_prompts(data: Data, tokenizer: PreTrainedTokenizerBase, style: Style) -> PromptSets:
    """The prompts of a recipe, the same ones every time.

    Raises `ConfigError` for a task that the style cannot write, `DataError` for a prompt longer than
    `data.max_prompt_tokens`, with symbols that the tokenizer does not have, or for more prompts than the task has.
    """
    if style == "compact" and data.task != "chain_sum":
        raise ConfigError(
            f'data.task is "{data.task}": the tiny policy reads sums alone. Set data.task = "chain_sum", or '
            'policy.kind = "smollm2"'
        )
    if style == "chat" and tokenizer.chat_template is None:
        raise ConfigError("the policy's tokenizer has no chat template: give policy.path a folder whose tokenizer has")
    questions = _questions(data)
    held_out = tuple(_take(questions, data, tokenizer, style, "eval", data.num_eval))
    train = tuple(_take(questions, data, tokenizer, style, "train", data.num_train))
    return PromptSets(train, held_out)


def check_fit(prompts: Sequence[Prompt], max_tokens: int, max_positions: int) -> None:
    """Raise `DataError` when there is no prompt, or one that leaves no room for `sampling.max_tokens` more tokens."""
    if not prompts:
        raise DataError("there are no prompts: set data.num_train and data.num_eval to 1 or more")
    longest = max(prompts, key=lambda prompt: len(prompt.token_ids))
    length = len(longest.token_ids)
    if length + max_tokens > max_positions:
        room = max_positions - length
        remedy = f"Set sampling.max_tokens to {room} or less" if room > 0 else "Choose shorter questions"
        raise DataError(
            f"prompt {longest.id} has {length} tokens and sampling.max_tokens is {max_tokens}, but the policy has "
            f"{max_positions} positions. {remedy}, or a policy with more positions"
        )


@dataclass(frozen=True, slots=True)
class _Question:
    text: str
    compact: str
    answer: str
    metadata: dict[str, object]


def _questions(data: Data) -> Iterator[_Question]:
    """Distinct questions of the task, in the order of its generator, until it repeats itself too often."""
    # Takes over a second to import.
    import reasoning_gym

    options: dict[str, int] = {"seed": data.seed, "size": 1000 + _DRAWS_PER_PROMPT * (data.num_train + data.num_eval)}
    if data.task == "chain_sum":
        options |= {"min_terms": data.min_terms, "max_terms": data.max_terms}
        options |= {"min_digits": data.num_digits, "max_digits": data.num_digits}
    entries = reasoning_gym.create_dataset(data.task, **options)
    seen: set[str] = set()
    for index in range(len(entries)):
        entry = entries[index]
        question = str(entry["question"])
        if question in seen:
            continue
        seen.add(question)
        compact = ""
        metadata: dict[str, object] = {"index": index}
        if data.task == "chain_sum":
            compact = str(entry["metadata"]["expression"]).replace(" ", "") + "="
            metadata["num_terms"] = entry["metadata"]["num_terms"]
        yield _Question(question, compact, str(entry["answer"]), metadata)


def _take(
    questions: Iterator[_Question], data: Data, tokenizer: PreTrainedTokenizerBase, style: Style, name: str, number: int
) -> Iterator[Prompt]:
    for index in range(number):
        question = next(questions, None)
        if question is None:
            raise DataError(
                f"data.task {data.task} has too few different questions for data.num_eval = {data.num_eval} and "
                f"data.num_train = {data.num_train}: it ran out at {name}-{index}. Lower them, or raise data.max_terms"
            )
        yield _prompt(question, data, tokenizer, style, f"{name}-{index}")


def _prompt(question: _Question, data: Data, tokenizer: PreTrainedTokenizerBase, style: Style, name: str) -> Prompt:
    if style == "compact":
        text = question.compact
        token_ids = tuple(tokenizer.encode(text, add_special_tokens=False))
    else:
        text = f"{question.text} {_INSTRUCTION[data.task]}"
        if style == "chat":
            message = {"role": "user", "content": text}
            text = str(tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False))
        # The template writes the special tokens itself; a plain text gets the tokenizer's own (a start token, if any).
        token_ids = tuple(tokenizer.encode(text, add_special_tokens=style == "plain"))
    if len(token_ids) > data.max_prompt_tokens:
        raise DataError(
            f"prompt {name} has {len(token_ids)} tokens and data.max_prompt_tokens is {data.max_prompt_tokens}: set it "
            f"to {len(token_ids)} or more, or choose shorter questions. The prompt begins {text[:60]!r}"
        )
    if tokenizer.unk_token_id is not None and style == "compact" and tokenizer.unk_token_id in token_ids:
        raise DataError(f"prompt {name} has symbols that the policy's tokenizer does not know: {text!r}")
    return Prompt(id=name, token_ids=token_ids, answer=question.answer, text=text, metadata=question.metadata)
