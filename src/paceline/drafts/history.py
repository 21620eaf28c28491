"""Drafts from earlier responses to the same prompt: what followed when the same tokens stood there before. No weights.

In RL a prompt is answered several times at once, and again in every epoch. A sharp policy repeats itself, and what it
said costs nothing to look up (as SuffixDecoding, arXiv:2411.04975, does for repeated requests).

Three rules decide what is proposed behind a text, all of them fixed by committed text alone:

- **Where**: at the places in earlier responses whose preceding tokens agree longest with the text's own end. What
  precedes a response is its prompt, so the first tokens of a response can be drafted, too. At least `min_match` tokens
  must agree; beyond `max_match` nobody looks.
- **What**: token by token the most frequent continuation among the newest `VOTERS` places, the newest on a tie. A place
  votes on as long as it agrees with what won.
- **How many**: no more than agreed, and no more than asked for.

The draft is deterministic (q is one-hot), so cutting it by the length of the match leaves the law of what is sampled as
it is. A response that is still in flight is never looked into. No torch: both engines share this module.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from paceline.drafts.base import Proposal
from paceline.errors import EngineError, PublishError

if TYPE_CHECKING:
    import torch

    from paceline.config.run import HistoryDraft

VOTERS = 16
"""Places that vote on a continuation: enough for a frequency, few enough for a step in Python."""
END = -1
"""Stands behind every text; no token has this id."""

Tokens = Sequence[int]
PromptKey = bytes


def prompt_key(prompt_ids: Tokens) -> PromptKey:
    """16 bytes that stand for a prompt, whatever its length."""
    return blake2b(array("i", prompt_ids).tobytes(), digest_size=16).digest()


class HistoryIndex:
    """Earlier responses by prompt, with a rolling window and a bound on memory.

    Responses come in on two ways. `add_step` keeps those of a whole training step for `window_steps` more steps, and
    never more than `max_tokens_kept` tokens: the oldest go first, whatever their prompt, and a response that is longer
    by itself is not kept at all. `finish` adds one that has just ended to the running `generate` call only, for the
    other samples of its prompt (of these, too, at most `max_tokens_kept` tokens); the next `start_call` forgets it.

    Example::

        index = HistoryIndex(window_steps=10, min_match=1, max_match=4, max_tokens_kept=1000)
        index.add_step(1, [((7, 8), (1, 2, 3, 4))])
        index.draft(prompt_key((7, 8)), [7, 8, 1, 2], limit=3) == [3, 4]
    """

    def __init__(self, *, window_steps: int, min_match: int, max_match: int, max_tokens_kept: int) -> None:
        self.window_steps = window_steps
        self.min_match = min_match
        self.max_match = max_match
        self.max_tokens_kept = max_tokens_kept
        self.fill = False
        """For measurements of what a step costs: a row without enough to draft repeats its last token instead, so that
        every row pays for the drafts asked for. Also a deterministic draft."""
        self._prompts: dict[PromptKey, _Prompt] = {}
        self._kept = _Bounded(max_tokens_kept)
        self._live = _Bounded(max_tokens_kept)
        self._open: Counter[PromptKey] = Counter()
        self._ready: set[PromptKey] = set()

    @classmethod
    def from_config(cls, draft: HistoryDraft) -> HistoryIndex:
        return cls(
            window_steps=draft.window_steps,
            min_match=draft.min_match,
            max_match=draft.max_match,
            max_tokens_kept=draft.max_tokens_kept,
        )

    @property
    def num_tokens(self) -> int:
        """Response tokens kept for later steps."""
        return self._kept.num_tokens

    @property
    def num_live_tokens(self) -> int:
        """Response tokens of the running call."""
        return self._live.num_tokens

    @property
    def can_draft(self) -> bool:
        """Whether any request of the running call that has not ended finds a response to draft from."""
        return self.fill or bool(self._ready)

    def start_call(self, prompts: Iterable[Tokens]) -> None:
        """A `generate` call begins, with a prompt per request. What only the last call had finished is forgotten."""
        for key in {text.key for text in self._live.clear()}:
            self._prompts[key].live.clear()
            self._prompts[key].places = None
            self._forget_if_empty(key)
        self._open = Counter(prompt_key(prompt) for prompt in prompts)
        self._ready = self._open.keys() & self._prompts.keys()

    def finish(self, prompt_ids: Tokens, response_ids: Tokens) -> None:
        """A request of the call has ended with this response. The other samples of its prompt may use it."""
        text = _Text(prompt_key(prompt_ids), 0, array("i", response_ids))
        self._open[text.key] -= 1
        if self._open[text.key] <= 0:
            self._ready.discard(text.key)
        if not self._live.fits(text):
            return
        if self._open[text.key] > 0:
            self._ready.add(text.key)
        prompt = self._prompt(text.key, prompt_ids)
        prompt.live.append(text.tokens)
        if prompt.places is not None:
            prompt.places.add(prompt.context, text.tokens)
        for old in self._live.add(text):
            self._prompts[old.key].live.popleft()
            self._prompts[old.key].places = None
            self._forget_if_empty(old.key)

    def add_step(self, step: int, responses: Iterable[tuple[Tokens, Tokens]]) -> None:
        """Keep the (prompt, response) pairs of training step `step`, and drop what has left the window."""
        for prompt_ids, response_ids in responses:
            text = _Text(prompt_key(prompt_ids), step, array("i", response_ids))
            if self._kept.fits(text):
                self._prompt(text.key, prompt_ids).kept.append(text.tokens)
                self._drop(self._kept.add(text))
        self._drop(self._kept.drop_until(step - self.window_steps))
        for prompt in self._prompts.values():
            # Made anew where a prompt comes back: few do in a step, and the texts alone are small.
            prompt.places = None

    def draft(self, key: PromptKey, text: Tokens, limit: int) -> list[int]:
        """Up to `limit` tokens to follow `text` (prompt and response so far, or its last `max_match` tokens)."""
        prompt = self._prompts.get(key)
        drafted = [] if prompt is None else self._look_up(prompt, text, limit)
        if self.fill:
            drafted += [text[-1]] * (limit - len(drafted))
        return drafted

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready: what is kept, oldest first. What belongs to a running call is not part of it."""
        return {
            "contexts": {text.key.hex(): self._prompts[text.key].context for text in self._kept.texts},
            "texts": [[text.key.hex(), text.step, text.tokens.tolist()] for text in self._kept.texts],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, whatever was kept before. Raises KeyError or ValueError for one that is none."""
        self._prompts, self._kept, self._live = {}, _Bounded(self.max_tokens_kept), _Bounded(self.max_tokens_kept)
        self._open, self._ready = Counter(), set()
        for name, step, tokens in state["texts"]:
            text = _Text(bytes.fromhex(name), step, array("i", tokens))
            if self._kept.fits(text):
                self._prompt(text.key, state["contexts"][name]).kept.append(text.tokens)
                self._drop(self._kept.add(text))

    # -- parts ----------------------------------------------------------------------------------------------------

    def _look_up(self, prompt: _Prompt, text: Tokens, limit: int) -> list[int]:
        if prompt.places is None:
            prompt.places = _Places(self.min_match, self.max_match)
            for tokens in prompt.texts():
                prompt.places.add(prompt.context, tokens)
        return prompt.places.continuation(text, limit)

    def _prompt(self, key: PromptKey, prompt_ids: Tokens) -> _Prompt:
        if key not in self._prompts:
            self._prompts[key] = _Prompt(list(prompt_ids[-self.max_match :]))
        return self._prompts[key]

    def _drop(self, texts: Iterable[_Text]) -> None:
        for text in texts:
            prompt = self._prompts[text.key]
            prompt.kept.popleft()
            prompt.places = None
            self._forget_if_empty(text.key)

    def _forget_if_empty(self, key: PromptKey) -> None:
        prompt = self._prompts.get(key)
        if prompt is not None and not prompt.kept and not prompt.live:
            del self._prompts[key]


class HistoryDrafter:
    """`HistoryIndex.draft` for every row of the reference engine. Deterministic: q is one-hot."""

    aux_layers: tuple[int, ...] = ()

    def __init__(self, index: HistoryIndex) -> None:
        self.index = index
        self._keys: list[PromptKey] = []

    def aim(self, prompts: Sequence[Tokens]) -> None:
        """The next `propose` is for rows of these prompts, in this order."""
        self._keys = [prompt_key(prompt) for prompt in prompts]

    def propose(
        self,
        token_ids: Sequence[Sequence[int]],
        num_draft_tokens: Sequence[int],
        hidden: Sequence[torch.Tensor] | None,
        generators: Sequence[torch.Generator],
    ) -> Proposal:
        """See `Drafter.propose`; `hidden` and `generators` are not looked at. Raises `EngineError` without `aim`."""
        if len(self._keys) != len(token_ids):
            raise EngineError(f"history drafts: {len(token_ids)} rows, and the prompts of {len(self._keys)} are known.")
        rows = zip(self._keys, token_ids, num_draft_tokens, strict=True)
        return Proposal([self.index.draft(key, ids[-self.index.max_match :], k) for key, ids, k in rows], None)

    def load(self, draft: Mapping[str, torch.Tensor]) -> None:
        """Always raises `PublishError`: there are no weights."""
        raise PublishError(
            f"A draft with {len(draft)} tensors was published, but draft.method = 'history' has no weights."
        )


@dataclass(frozen=True, slots=True)
class _Text:
    key: PromptKey
    step: int
    tokens: array[int]


class _Bounded:
    """Texts in the order in which they came, of at most so many tokens."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self.texts: deque[_Text] = deque()
        self.num_tokens = 0

    def fits(self, text: _Text) -> bool:
        """Whether it may be added at all; an empty one says nothing."""
        return 0 < len(text.tokens) <= self._max_tokens

    def add(self, text: _Text) -> list[_Text]:
        """Returns what had to go for it, oldest first."""
        self.texts.append(text)
        self.num_tokens += len(text.tokens)
        gone = []
        while self.num_tokens > self._max_tokens:
            gone.append(self._pop())
        return gone

    def drop_until(self, step: int) -> list[_Text]:
        """Drops and returns the texts of this step and earlier ones."""
        gone = []
        while self.texts and self.texts[0].step <= step:
            gone.append(self._pop())
        return gone

    def clear(self) -> list[_Text]:
        """Drops and returns all."""
        gone = list(self.texts)
        self.texts.clear()
        self.num_tokens = 0
        return gone

    def _pop(self) -> _Text:
        text = self.texts.popleft()
        self.num_tokens -= len(text.tokens)
        return text


@dataclass(slots=True)
class _Prompt:
    """The texts of one prompt."""

    context: list[int]
    """The prompt's last tokens, `max_match` at most."""
    kept: deque[array[int]] = field(default_factory=deque)
    live: deque[array[int]] = field(default_factory=deque)
    places: _Places | None = None
    """Finds places in `kept` and `live`; made when the prompt is first looked up."""

    def texts(self) -> Iterator[array[int]]:
        """Oldest first."""
        yield from self.kept
        yield from self.live


@dataclass(slots=True)
class _Node:
    """The places whose last so many tokens are the same."""

    places: list[int]
    """Oldest first. A place is the position of the token that is to be proposed."""
    longer: dict[int, _Node] | None = None
    """The same places by the token one further back; made when somebody looks."""


class _Places:
    """Finds the places that agree longest with the end of a text, in time proportional to `max_match`.

    A tree over what precedes each place, read backwards: the root by the last `min_match` tokens at once, every level
    below by one token more. A level exists only where a look-up came by, so adding a text costs little more than one
    dictionary entry per token.
    """

    def __init__(self, min_match: int, max_match: int) -> None:
        self._min_match = min_match
        self._max_match = max_match
        self._tokens: list[int] = [END]
        self._root: dict[tuple[int, ...], _Node] = {}

    def add(self, context: Tokens, response: Tokens) -> None:
        """Every token of the response is a place; `context` is what stood before it."""
        first = len(self._tokens)
        self._tokens.extend(context)
        begin = len(self._tokens)
        self._tokens.extend(response)
        tokens, size = self._tokens, self._min_match
        for place in range(max(begin, first + size), len(tokens)):
            end = tuple(tokens[place - size : place])
            node = self._root.get(end)
            if node is None:
                self._root[end] = _Node([place])
            else:
                self._insert(node, place)
        tokens.append(END)

    def continuation(self, text: Tokens, limit: int) -> list[int]:
        """See the rules of this module."""
        depth = self._min_match
        node = self._root.get(tuple(text[-depth:])) if len(text) >= depth else None
        if node is None:
            return []
        while depth < min(self._max_match, len(text)):
            longer = self._longer(node, depth).get(text[-depth - 1])
            if longer is None:
                break
            node, depth = longer, depth + 1
        return self._vote(node.places[: -VOTERS - 1 : -1], min(limit, depth))

    def _insert(self, node: _Node, place: int) -> None:
        depth = self._min_match
        node.places.append(place)
        while node.longer is not None:
            before = self._tokens[place - depth - 1]
            if before not in node.longer:
                node.longer[before] = _Node([place])
                return
            node = node.longer[before]
            node.places.append(place)
            depth += 1

    def _longer(self, node: _Node, depth: int) -> dict[int, _Node]:
        if node.longer is None:
            node.longer = {}
            for place in node.places:
                # END at most: the tokens up to here are those of one text, and END stands before it.
                before = self._tokens[place - depth - 1]
                if before in node.longer:
                    node.longer[before].places.append(place)
                else:
                    node.longer[before] = _Node([place])
        return node.longer

    def _vote(self, places: list[int], limit: int) -> list[int]:
        """`places` newest first, so that of equally frequent tokens the newest comes first and wins."""
        drafted: list[int] = []
        while len(drafted) < limit:
            if len(places) == 1:
                rest = self._tokens[places[0] + len(drafted) : places[0] + limit]
                return drafted + (rest[: rest.index(END)] if END in rest else rest)
            votes: dict[int, int] = {}
            for place in places:
                token = self._tokens[place + len(drafted)]
                votes[token] = votes.get(token, 0) + 1
            votes.pop(END, None)
            if not votes:
                break
            token = max(votes, key=votes.__getitem__)
            places = [place for place in places if self._tokens[place + len(drafted)] == token]
            drafted.append(token)
        return drafted
