"""Generic texts for a draft that begins on other data than the policy's own answers.

Conversations, from a JSONL file or made here from packages that are installed anyway. Every assistant turn becomes a
text of its own, with all that precedes it as its prompt: so the answers, and nothing else, are learned from.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from paceline.data.prompts import Style
from paceline.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FAMILIES = (
    "aiw",
    "base_conversion",
    "basic_arithmetic",
    "caesar_cipher",
    "chain_sum",
    "count_primes",
    "family_relationships",
    "fraction_simplification",
    "gcd",
    "knights_knaves",
    "lcm",
    "leg_counting",
    "letter_counting",
    "number_sequence",
    "number_sorting",
    "prime_factorization",
    "products",
    "propositional_logic",
    "sentence_reordering",
    "simple_equations",
    "simple_geometry",
    "spell_backward",
    "syllogism",
    "word_sorting",
    "zebra_puzzles",
)
"""reasoning-gym tasks that say their question and answer in words; the recipe's own is left out."""
TOPIC_CHARACTERS = 1200
"""A topic of Python's manual is cut to this many."""


class Message(BaseModel):
    """One turn."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    role: Literal["system", "user", "assistant"]
    content: str


class Conversation(BaseModel):
    """One line of the file. Example: `{"messages": [{"role": "user", "content": "2+2?"}, ...]}`."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    messages: tuple[Message, ...] = Field(min_length=1)


@dataclass(frozen=True, slots=True)
class Text:
    """One assistant turn after its prompt. Example: `Text(token_ids=(3, 9, 1, 5, 2), prompt_length=3)`."""

    token_ids: tuple[int, ...]
    prompt_length: int


@dataclass(frozen=True, slots=True)
class Encoding:
    """How conversations become tokens; the same as for the policy's prompts and answers."""

    tokenizer: PreTrainedTokenizerBase
    style: Style
    stop_token_ids: Sequence[int]
    """An answer ends with the first of these, which is learned too."""
    max_length: int
    """Longer texts are cut there, tokens."""


def load_texts(path: Path | None, number: int, encoding: Encoding, task: str, seed: int) -> list[Text]:
    """The first `number` texts of the JSONL file `path`, or of the set made here; fewer when there are no more.

    Args:
        path: a conversation per line; None makes conversations: sums and sequences for the `compact` style, otherwise
            questions of other reasoning-gym tasks than `task` and topics of Python's manual. Equal seeds, equal texts.
        number: of texts, 1 or more.
        encoding: of the policy that is to be drafted for.
        task: of the recipe.
        seed: of what is made here.

    Raises `DataError` that names the file, the line and what is wrong there: not JSON, not a conversation, a character
    that the tokenizer does not know, a prompt that leaves no room for an answer.
    """
    if path is not None:
        conversations = _read(path)
    elif encoding.style == "compact":
        conversations = _numbered(_made_of_numbers(seed))
    else:
        conversations = _numbered(_made_of_words(number, task, seed))
    texts = (text for where, messages in conversations for text in _texts(messages, encoding, where))
    found = list(islice(texts, number))
    if not found:
        raise DataError(f"draft.generic_path: {path} has no assistant turn: there is nothing to learn from.")
    return found


def _numbered(conversations: Iterable[Sequence[Message]]) -> Iterator[tuple[str, Sequence[Message]]]:
    return ((f"generic text {number}", messages) for number, messages in enumerate(conversations, start=1))


def _read(path: Path) -> Iterator[tuple[str, Sequence[Message]]]:
    """(what to call the line, its messages); empty lines are passed over."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise DataError(f"draft.generic_path: {path} cannot be read ({error.strerror}).") from error
    for number, line in enumerate(lines, start=1):
        where = f"draft.generic_path: {path} line {number}"
        if not line.strip():
            continue
        try:
            yield where, Conversation.model_validate_json(line.decode("utf-8")).messages
        except UnicodeDecodeError as error:
            raise DataError(f"{where}: not UTF-8 ({error.reason} at byte {error.start}).") from error
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"]) or "the line"
            raise DataError(
                f'{where}: {place}: {first["msg"]}. Each line is {{"messages": [{{"role": "user", "content": "..."}}, '
                '{"role": "assistant", "content": "..."}]}.'
            ) from error


def _texts(messages: Sequence[Message], encoding: Encoding, where: str) -> Iterator[Text]:
    for message in messages:
        _check_known(message.content, encoding.tokenizer, where)
    for turn, message in enumerate(messages):
        if message.role == "assistant":
            prompt, response = _encode(messages[:turn], message, encoding, where)
            ends = [place for place, token in enumerate(response, start=1) if token in encoding.stop_token_ids]
            if len(prompt) + 2 > encoding.max_length:
                raise DataError(
                    f"{where}: the prompt of turn {turn + 1} has {len(prompt)} tokens, and the policy has "
                    f"{encoding.max_length} positions. Shorten or remove it."
                )
            whole = (*prompt, *(response[: ends[0]] if ends else response))
            yield Text(whole[: encoding.max_length], len(prompt))


def _check_known(content: str, tokenizer: PreTrainedTokenizerBase, where: str) -> None:
    unknown = tokenizer.unk_token_id
    if unknown is None or unknown not in tokenizer.encode(content, add_special_tokens=False):
        return
    for place, character in enumerate(content, start=1):
        if unknown in tokenizer.encode(character, add_special_tokens=False):
            raise DataError(
                f"{where}: the policy's tokenizer does not know {character!r} (character {place} of {content[:40]!r}). "
                "Use texts that this policy can write."
            )


def _encode(before: Sequence[Message], answer: Message, encoding: Encoding, where: str) -> tuple[list[int], list[int]]:
    """(prompt, response) ids, the response with its end token."""
    tokenizer = encoding.tokenizer
    if encoding.style == "chat":
        prompt_text, response_text = _through_template(before, answer, tokenizer, where)
        # The template writes the special tokens itself.
        return (
            tokenizer.encode(prompt_text, add_special_tokens=False),
            tokenizer.encode(response_text, add_special_tokens=False),
        )
    between = "" if encoding.style == "compact" else "\n"
    prompt_text = "".join(message.content + between for message in before)
    prompt = tokenizer.encode(prompt_text, add_special_tokens=encoding.style == "plain")
    response = tokenizer.encode(answer.content, add_special_tokens=False)
    return prompt, [*response, encoding.stop_token_ids[0]]


def _through_template(
    before: Sequence[Message], answer: Message, tokenizer: PreTrainedTokenizerBase, where: str
) -> tuple[str, str]:
    from jinja2 import TemplateError

    history = [message.model_dump() for message in before]
    try:
        prompt = str(tokenizer.apply_chat_template(history, add_generation_prompt=True, tokenize=False))
        whole = str(tokenizer.apply_chat_template([*history, answer.model_dump()], tokenize=False))
    except TemplateError as error:
        raise DataError(f"{where}: the policy's chat template refuses these messages ({error}).") from error
    if not whole.startswith(prompt):
        raise DataError(
            f"{where}: the policy's chat template writes the turns before an answer differently once it is there, so "
            "that the answer cannot be told apart. Use conversations of one question and one answer."
        )
    return prompt, whole.removeprefix(prompt)


def _turns(question: str, answer: str) -> tuple[Message, Message]:
    return Message(role="user", content=question), Message(role="assistant", content=answer)


def _made_of_numbers(seed: int) -> Iterator[Sequence[Message]]:
    """Arithmetic in the tiny policy's alphabet, in none of the two forms in which that policy answers."""
    rng = random.Random(f"generic-{seed}")
    while True:
        first, step = rng.randint(0, 40), rng.randint(-9, 9)
        terms = [first + step * place for place in range(9)]
        yield _turns("".join(f"{term};" for term in terms[:3]), ";".join(str(term) for term in terms[3:]))
        left, right = rng.randint(10, 99), rng.randint(10, 99)
        tens, ones = left // 10 * 10 + right // 10 * 10, left % 10 + right % 10
        yield _turns(f"{left}+{right}:", f"{tens}+{ones}={left + right}")
        total = rng.randint(3, 20)
        parts = [f"{total - part}+{part}" for part in range(1, min(total, 6))]
        yield _turns(f"{total}=", "=".join(parts))


def _made_of_words(number: int, task: str, seed: int) -> Iterator[Sequence[Message]]:
    # Takes over a second to import.
    from pydoc_data.topics import topics

    import reasoning_gym

    rng = random.Random(f"generic-{seed}")
    families = [name for name in FAMILIES if name != task]
    size = -(-number // len(families))
    datasets = [reasoning_gym.create_dataset(name, seed=seed, size=size) for name in families]
    names = sorted(topics)
    rng.shuffle(names)
    for row in range(size):
        for dataset in datasets:
            entry = dataset[row]
            yield _turns(str(entry["question"]), f"The answer is {entry['answer']}.")
            if names:
                name = names.pop()
                yield _turns(f"What does Python's manual say about {name}?", topics[name][:TOPIC_CHARACTERS].strip())
