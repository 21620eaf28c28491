"""Training an EAGLE-3 head on the policy's own answers, and predicting what it will be worth in the engine.

Training-time test (Li et al., arXiv:2503.01840, section 3.2) over the alignment of `models.eagle3`: from every root the
head takes `depth` steps of its own, each supervised by the policy's distribution at that position.

    loss = sum over depth j, root t of 0.8^j * CE(teacher(t + 1 + j), head_j(t))  /  sum over the same of 0.8^j

taken over the pairs whose label x_{t+2+j} is a response token, all of them and no others; the denominator counts the
whole update, however it is split into micro-batches. The teacher is the policy's softmax at the sampling temperature
over the *draft* vocabulary alone, renormalised there: the best the head can do is then the policy's law given that the
token is one it can draft, whose most likely token is the best draft.

The policy is only read: its embedding and output rows are detached, its features are computed without a graph, and no
global random state is touched, so that its own updates are bit-equal with and without draft training.

Shapes: B answers, T positions, R roots, H hidden size, A auxiliary layers, V policy vocabulary, W draft vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from paceline.config.run import Eagle3Draft, TrainedDraft
from paceline.errors import ConfigError, DataError, ModelError
from paceline.models.eagle3 import (
    AuxCapture,
    ChainMemory,
    DraftHead,
    Eagle3Config,
    Eagle3Head,
    embed,
    policy_parts,
)
from paceline.spec.sampling import policy_log_probs
from paceline.types import Sampling

DEPTH_WEIGHT = 0.8
"""Each further depth counts this much less (arXiv:2503.01840)."""
UPDATE_TOKENS = 256
"""Padded positions of one optimiser update: a head learns more from many small updates than from few large ones."""
FORWARD_TOKENS = 8192
"""Padded positions of one forward pass of the policy."""
LOGITS_ELEMENTS = 1 << 22
"""Logits that exist at one time; what is larger goes in pieces and is computed again for backward."""
FEATURE_BYTES = 4 << 30
"""Features kept between epochs; more than this is computed again in each epoch."""
HELD_OUT_SHARE = 0.1
"""Fraction of the answers, the last ones, that only measure."""
WARMUP_SHARE = 0.05
ONLINE_WARMUP_UPDATES = 20
"""Fresh moments make the first steps of Adam as long as its largest ones."""
MAX_GRAD_NORM = 1.0
_KEY_VERSION = 1
"""Raised when training changes, so that cached heads of an older recipe are not taken for new ones."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One sampled answer. Example: `Answer(token_ids=(3, 9, 1, 5, 2), prompt_length=3)`; 5 and 2 are the response."""

    token_ids: tuple[int, ...]
    """[n] prompt and response."""
    prompt_length: int


@dataclass(frozen=True, slots=True)
class Features:
    """What the head learns from, of one answer: no graph, float32."""

    answer: Answer
    aux: torch.Tensor
    """[n, A * H] auxiliary hidden states."""
    final: torch.Tensor
    """[n, H] what the policy's output layer reads; the teacher's logits are one product away."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Features of several answers in rows, padded on the right. Positions reach `depth` past the longest row."""

    token_ids: torch.Tensor
    """[B, T + depth]"""
    is_label: torch.Tensor
    """[B, T + depth] True exactly where the token is a response token."""
    positions: torch.Tensor
    """[B, T] of each token in its own answer."""
    documents: torch.Tensor | None
    """[B, T + depth] number of the answer in its row, from 1, and 0 for padding; None when each answer has a row."""
    aux: torch.Tensor
    """[B, T, A * H]"""
    final: torch.Tensor
    """[B, T + depth, H]"""

    @property
    def num_roots(self) -> int:
        """R: roots 0..T-3 have a label at depth 0."""
        return self.aux.shape[1] - 2

    def at_depth(self, tensor: torch.Tensor, shift: int) -> torch.Tensor:
        """[B, R, ...] entries t + shift of a padded tensor, for every root t."""
        return tensor[:, shift : shift + self.num_roots]

    def supervised(self, depth: int) -> torch.Tensor:
        """[B, R] True where root t has a label at this depth: x_{t + 2 + depth} is a response token of its answer."""
        is_label = self.at_depth(self.is_label, 2 + depth)
        if self.documents is None:
            return is_label
        return is_label & (self.at_depth(self.documents, 2 + depth) == self.at_depth(self.documents, 0))

    def memory(self) -> ChainMemory:
        """A new memory in which no answer sees another."""
        return ChainMemory(None if self.documents is None else self.at_depth(self.documents, 0))


@dataclass(frozen=True, slots=True)
class DraftUpdate:
    """One optimiser update of the head. `finite` False: nothing was changed."""

    loss: float
    """Nats per supervised (root, depth) pair, weighted as in the loss."""
    grad_norm: float
    """Before clipping."""
    num_pairs: int
    finite: bool


@dataclass(frozen=True, slots=True)
class MostLikely:
    """What drafts come to that are always the policy's most likely token: sums over blocks, which add up over answers.

    Past the end of an answer little is known. Behind a stop token nothing counts: nothing accepted there is kept, and
    no head learns what the policy would write there. An answer that was only cut would have gone on, so that its last
    block does too, with the rates of the blocks that are known: without this the last block of every answer would
    look rejected, and short answers would have a limit below what the engine counts.
    """

    num_blocks: int
    judged: tuple[int, ...]
    """[K] blocks whose slot j is judged by a distribution that is known."""
    accepted: tuple[float, ...]
    """[K] sum of the probabilities of the most likely tokens there."""
    cut: tuple[float, ...]
    """[K] expected number of blocks that go on to slot j as the first of which nothing is known."""

    @property
    def alpha(self) -> float:
        """1 + accepted draft tokens per verify step; NaN without a block."""
        if not self.num_blocks:
            return math.nan
        unknown = rate = 0.0
        total = sum(self.accepted)
        for judged, accepted, cut in zip(self.judged, self.accepted, self.cut, strict=True):
            # A slot that no answer reaches has the rate of the one before.
            rate = accepted / judged if judged else rate
            unknown = (unknown + cut) * rate
            total += unknown
        return 1 + total / self.num_blocks

    @classmethod
    def pooled(cls, parts: Sequence[MostLikely]) -> MostLikely:
        """As of all the answers at once. `parts` have the same K."""
        return cls(
            num_blocks=sum(part.num_blocks for part in parts),
            judged=tuple(sum(column) for column in zip(*(part.judged for part in parts), strict=True)),
            accepted=tuple(sum(column) for column in zip(*(part.accepted for part in parts), strict=True)),
            cut=tuple(sum(column) for column in zip(*(part.cut for part in parts), strict=True)),
        )


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Predicted acceptance of greedy drafts, as the engine would count it on the same rollouts."""

    alpha: float
    """1 + accepted draft tokens per verify step."""
    conditional: tuple[float, ...]
    """[K] acceptance at slot j given that all earlier slots were accepted."""
    marginal: tuple[float, ...]
    """[K] blocks that accept slot j, as a fraction of all blocks; alpha = 1 + their sum."""
    reached: tuple[float, ...]
    """[K] expected number of blocks that reach slot j: the trials of `conditional`."""
    num_blocks: int
    standard_error: float
    """Of `alpha`, from answer to answer (blocks of one answer are not independent); NaN of fewer than two answers."""
    num_answers: int
    """Those with a block."""
    most_likely: MostLikely
    """Sums behind `limit`."""

    @property
    def limit(self) -> float:
        """`alpha` on the same answers if every draft token were the policy's most likely one where it stands.

        It tells a head that is not trained enough (`alpha` far below) from a policy that is not sure (`limit` low). The
        most likely token is taken position by position, from the policy's whole vocabulary. That is no strict bound: a
        less likely token can begin a chain that is longer in the mean, and other drafts begin their blocks elsewhere.
        """
        return self.most_likely.alpha


@dataclass(frozen=True, slots=True)
class DraftFigures:
    """What one training run came to."""

    loss: float
    """Mean over the last epoch."""
    acceptance: Acceptance
    """On the held-out answers, at the recipe's k."""
    coverage: float
    """Fraction of the response tokens learned from that are in the draft vocabulary."""
    held_out_coverage: float
    """The same of the held-out answers."""
    num_updates: int
    num_answers: int
    num_held_out: int


def choose_draft_vocab(answers: Sequence[Answer], size: int, vocab_size: int) -> tuple[torch.Tensor, float]:
    """The `size` most frequent response tokens, rising ids [size], and the fraction of response tokens they cover.

    Ties, and what is left when fewer tokens occur, go to the lower ids. Raises `ConfigError` for an impossible size.
    """
    if not 1 <= size <= vocab_size:
        raise ConfigError(f"draft.vocab_size is {size}: it must be between 1 and the policy's {vocab_size} tokens.")
    labels = _labels(answers)
    counts = torch.bincount(torch.tensor(labels, dtype=torch.long), minlength=vocab_size)
    chosen = counts.sort(descending=True, stable=True).indices[:size].sort().values
    return chosen, float(counts[chosen].sum() / max(1, len(labels)))


def _labels(answers: Sequence[Answer]) -> list[int]:
    return [token for answer in answers for token in answer.token_ids[answer.prompt_length :]]


def _coverage(answers: Sequence[Answer], draft_ids: torch.Tensor) -> float:
    """Fraction of the response tokens that are among `draft_ids`."""
    labels = torch.tensor(_labels(answers), dtype=torch.long)
    return float(torch.isin(labels, draft_ids.cpu()).float().mean())


def content_key(
    config: Eagle3Draft, policy_hash: str, data_key: str, sampling: Sampling, start_key: str | None = None
) -> str:
    """Hex key of the head that training would give: equal keys, equal heads (on one machine).

    Args:
        config: its training fields count. `num_draft_tokens`, `path` and `online*` do not change what is trained before
            the run, and `start` and `generic_path` are names of what counts by its content below.
        policy_hash: of the policy's weights and architecture.
        data_key: whatever decides what is learned from: the prompts that answers are sampled for, or the texts.
        sampling: how the answers are sampled; its temperature is also the teacher's.
        start_key: of the weights that training begins from; None: random ones.
    """
    not_trained_on = {"num_draft_tokens", "path", "start", "generic_path", *TrainedDraft.model_fields}
    fields = {
        "version": _KEY_VERSION,
        "draft": config.model_dump(mode="json", exclude=not_trained_on),
        "policy": policy_hash,
        "data": data_key,
        "start": start_key,
        "sampling": [getattr(sampling, name) for name in ("temperature", "top_k", "top_p", "min_p", "max_tokens")],
        "stop": list(sampling.stop_token_ids),
    }
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


class FeatureReader:
    """Keeps the features of chosen answers out of forward passes that somebody else runs, which stay as they are.

    reader = FeatureReader(policy, (2, 6, 9), {0: first, 4: fifth})
    with reader.watch([3, 4]):
        policy(input_ids)  # row 0 is answer 3, row 1 answer 4, padded on the right
    features = reader.features()
    """

    def __init__(self, policy: PreTrainedModel, aux_layers: Sequence[int], answers: Mapping[int, Answer]) -> None:
        """`answers` maps the numbers that passes are announced with to the answers that are kept."""
        self.answers = answers
        self._policy = policy
        self._aux_layers = tuple(aux_layers)
        self._features: dict[int, Features] = {}

    @contextmanager
    def watch(self, indices: Sequence[int]) -> Generator[None, None, None]:
        """One forward pass of the policy over the answers `indices`, a row each, padding on the right."""
        rows = [(row, index) for row, index in enumerate(indices) if index in self.answers]
        if not rows:
            yield
            return
        finals: list[torch.Tensor] = []
        norm = policy_parts(self._policy).norm
        handle = norm.register_forward_hook(lambda module, args, output: finals.append(output.detach()))
        try:
            with AuxCapture(self._policy, self._aux_layers) as capture:
                yield
        finally:
            handle.remove()
        aux, (final,) = capture.hidden(), finals
        for row, index in rows:
            length = len(self.answers[index].token_ids)
            # Copies: a view would keep the states of the whole pass.
            self._features[index] = Features(
                self.answers[index],
                aux[row, :length].to(torch.float32, copy=True),
                final[row, :length].to(torch.float32, copy=True),
            )

    @torch.no_grad()
    def features(self) -> list[Features]:
        """Of all chosen answers, in rising order of their numbers. Those that no pass has run are run now."""
        missing = [index for index in sorted(self.answers) if index not in self._features]
        for places in _by_length([len(self.answers[index].token_ids) for index in missing], FORWARD_TOKENS):
            indices = [missing[place] for place in places]
            token_ids = _pad([self.answers[index].token_ids for index in indices], 0).to(self._policy.device)
            with self.watch(indices):
                # Right padding stays out of earlier positions by causality alone: no mask is needed.
                policy_parts(self._policy).decoder(input_ids=token_ids, use_cache=False)
        return [self._features[index] for index in sorted(self.answers)]


def policy_features(policy: PreTrainedModel, answers: Sequence[Answer], aux_layers: Sequence[int]) -> list[Features]:
    """Features of each answer, in order. One forward pass of the policy's decoder; never [T, V] logits."""
    return FeatureReader(policy, aux_layers, dict(enumerate(answers))).features()


def fill_rows(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Indices in the given order, as many to a row as fit into `row_tokens`; one longer than that has its own row."""
    rows: list[list[int]] = []
    room = 0
    for index, length in enumerate(lengths):
        if not rows or length > room:
            rows.append([])
            room = row_tokens
        rows[-1].append(index)
        room -= length
    return rows


def collate(features: Sequence[Features], depth: int, row_tokens: int | None = None) -> Batch:
    """Put `features` into one batch for training at `depth`.

    Each answer has a row of its own; with `row_tokens` answers stand one behind the other in rows of that many
    positions, which saves padding. Loss and gradients are the same: positions begin anew with each answer, and neither
    attention nor labels reach into another one.
    """
    lengths = [len(feature.answer.token_ids) for feature in features]
    places = [[index] for index in range(len(features))] if row_tokens is None else fill_rows(lengths, row_tokens)
    rows = [[features[index] for index in row] for row in places]
    answers = [[feature.answer for feature in row] for row in rows]
    device = features[0].aux.device

    def padded(values: Callable[[int, Answer], Iterable[int]], num_more: int) -> torch.Tensor:
        listed = [
            [value for number, answer in enumerate(row, start=1) for value in values(number, answer)] for row in answers
        ]
        return _pad(listed, num_more).to(device)

    def states(name: Literal["aux", "final"]) -> torch.Tensor:
        joined = [torch.cat([getattr(feature, name) for feature in row]) for row in rows]
        return torch.nn.utils.rnn.pad_sequence(joined, batch_first=True)

    return Batch(
        token_ids=padded(lambda number, answer: answer.token_ids, depth),
        is_label=padded(
            lambda number, answer: (place >= answer.prompt_length for place in range(len(answer.token_ids))), depth
        ).bool(),
        positions=padded(lambda number, answer: range(len(answer.token_ids)), 0),
        documents=None
        if row_tokens is None
        else padded(lambda number, answer: [number] * len(answer.token_ids), depth),
        aux=states("aux"),
        final=functional.pad(states("final"), (0, 0, 0, depth)),
    )


def count_pairs(batches: Sequence[Batch], depth: int) -> list[int]:
    """[depth] supervised roots at each depth. Ranks that share an update add their counts up (one all-reduce)."""
    return [sum(int(batch.supervised(j).sum()) for batch in batches) for j in range(depth)]


def pair_weight(counts: Sequence[int]) -> float:
    """What the summed loss of an update is divided by: its pairs, weighed as in the loss."""
    return sum(DEPTH_WEIGHT**j * count for j, count in enumerate(counts))


def summed_loss(head: DraftHead, policy: PreTrainedModel, batch: Batch, depth: int, temperature: float) -> torch.Tensor:
    """Sum over depth j and supervised roots of 0.8^j * cross-entropy, in nats; to be divided by a global `pair_weight`.

    Differentiable in the head alone.
    """
    memory = batch.memory()
    positions = batch.at_depth(batch.positions, 0)
    hidden = head.project(batch.at_depth(batch.aux, 0))
    teacher_rows = policy_parts(policy).output.weight.detach()
    if len(head.draft_ids) < len(teacher_rows):
        teacher_rows = teacher_rows[head.draft_ids]
    teacher_rows = teacher_rows.float()
    total = hidden.new_zeros(())
    for j in range(depth):
        hidden = head(hidden, embed(policy, batch.at_depth(batch.token_ids, 1 + j)).float(), positions + j, memory)
        supervised = batch.supervised(j)
        outputs = hidden[supervised]
        final = batch.at_depth(batch.final, 1 + j)[supervised]
        num_rows = max(1, LOGITS_ELEMENTS // len(head.draft_ids))
        for piece, piece_final in zip(outputs.split(num_rows), final.split(num_rows), strict=True):
            loss = checkpoint(
                _cross_entropy, head, piece, piece_final, teacher_rows, temperature,
                use_reentrant=False, preserve_rng_state=False,
            )  # fmt: skip
            total = total + DEPTH_WEIGHT**j * loss
    return total


def _cross_entropy(
    head: DraftHead, outputs: torch.Tensor, final: torch.Tensor, teacher_rows: torch.Tensor, temperature: float
) -> torch.Tensor:
    teacher = (functional.linear(final, teacher_rows) / temperature).softmax(-1)
    return functional.cross_entropy(head.logits(outputs), teacher, reduction="sum")


class DraftTrainer:
    """The head's own optimiser, schedule and clip. It reads the policy and never changes it."""

    def __init__(
        self,
        head: DraftHead,
        policy: PreTrainedModel,
        depth: int,
        lr: float,
        num_updates: int | None,
        temperature: float,
    ) -> None:
        """`num_updates` spans the schedule: linear warm-up, then a cosine from `lr` to a tenth of it.

        None, for training without an end: `ONLINE_WARMUP_UPDATES`, then `lr`.
        """
        self.head = head
        self.depth = depth
        self._policy = policy
        self._temperature = temperature
        self._optimizer = torch.optim.AdamW(head.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
        num_warmup = ONLINE_WARMUP_UPDATES if num_updates is None else max(1, round(WARMUP_SHARE * num_updates))

        def schedule(update: int) -> float:
            if update < num_warmup:
                return (update + 1) / num_warmup
            if num_updates is None:
                return 1.0
            progress = min(1.0, (update - num_warmup) / max(1, num_updates - num_warmup))
            return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))

        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, schedule)

    def update(self, batches: Sequence[Batch]) -> DraftUpdate:
        """One optimiser update from micro-batches, which are weighed by one count over all of them.

        A loss or gradient that is not finite leaves head, optimiser and schedule as they are, and is reported.
        """
        counts = count_pairs(batches, self.depth)
        denominator = pair_weight(counts)
        loss = 0.0
        for batch in batches:
            part = summed_loss(self.head, self._policy, batch, self.depth, self._temperature) / denominator
            part.backward()
            loss += part.item()
        grad_norm = torch.nn.utils.clip_grad_norm_(self.head.parameters(), MAX_GRAD_NORM).item()
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        if finite:
            self._optimizer.step()
            self._schedule.step()
        self._optimizer.zero_grad()
        return DraftUpdate(loss, grad_norm, sum(counts), finite)

    def state_dict(self) -> dict[str, Any]:
        """Moments, step counts and the place in the schedule; the head's weights are apart."""
        return {"optimizer": self._optimizer.state_dict(), "schedule": self._schedule.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])


def train_eagle3(
    policy: PreTrainedModel,
    answers: Sequence[Answer],
    config: Eagle3Draft,
    sampling: Sampling,
    progress: Callable[[int, int, float], None] | None = None,
    *,
    start: Eagle3Head | None = None,
    held_out: Sequence[Answer] | None = None,
) -> tuple[Eagle3Head, DraftFigures]:
    """Train a head on the policy's answers, or on other texts.

    Reproducible from `config.seed`; no global random state is used.

    Args:
        policy: a Hugging Face causal LM in eval mode; only read.
        answers: sampled from this policy with `sampling`. Without `held_out` the last tenth is held out, so put answers
            to one prompt next to each other.
        config: depth, epochs, learning rate, auxiliary layers, vocabulary.
        sampling: its temperature is the teacher's; all of it decides the predicted acceptance.
        progress: called after each update with (updates done, updates in all, loss in nats).
        start: a head that is trained on in place, with its shape and draft vocabulary; None: a fresh one.
        held_out: answers of this policy that the head is judged by; `answers` may then be any texts.

    Raises:
        DataError: no answer is long enough to learn from.
        ConfigError: the temperature is 0, or draft.vocab_size is impossible.
        ModelError: unfit auxiliary layers, a policy whose logits are not its output rows times its last state, or a
            loss that is not finite.
    """
    if sampling.temperature <= 0:
        raise ConfigError(
            "sampling.temperature is 0: the draft's teacher needs a temperature above 0, for example 1.0."
        )
    answers = [answer for answer in answers if len(answer.token_ids) >= max(3, answer.prompt_length + 2)]
    train = answers
    if held_out is None:
        num_held_out = max(1, round(HELD_OUT_SHARE * len(answers)))
        train, held_out = answers[:-num_held_out], answers[-num_held_out:]
    if not train:
        raise DataError(
            f"{len(answers)} answers have two response tokens or more: a draft needs at least 2 such answers. Raise "
            "draft.num_answers or sampling.max_tokens."
        )
    vocab_size = policy.config.vocab_size
    generator = torch.Generator().manual_seed(config.seed)
    if start is None:
        draft_ids, _ = choose_draft_vocab(train, config.vocab_size or vocab_size, vocab_size)
        head_config = Eagle3Config.for_policy(
            policy.config, config.aux_layers, draft_vocab_size=len(draft_ids), trained_depth=config.depth
        )
        head = Eagle3Head.initialize(head_config, policy, draft_ids, generator).to(policy.device)
    else:
        head = start.to(policy.device)
        head.config = head.config.model_copy(update={"trained_depth": config.depth})
    _check_logits(policy, train[0])

    lengths = [len(answer.token_ids) for answer in train]
    num_updates = config.epochs * sum(1 for _ in _by_length(lengths, UPDATE_TOKENS))
    trainer = DraftTrainer(head, policy, config.depth, config.lr, num_updates, sampling.temperature)
    feature_bytes = 4 * sum(lengths) * (len(head.aux_layers) + 1) * head.config.hidden_size
    cached = policy_features(policy, train, head.aux_layers) if feature_bytes <= FEATURE_BYTES else None
    num_done, losses = 0, []
    for _ in range(config.epochs):
        losses = []
        for indices in _by_length(lengths, UPDATE_TOKENS, generator):
            if cached is not None:
                features = [cached[index] for index in indices]
            else:
                features = policy_features(policy, [train[index] for index in indices], head.aux_layers)
            update = trainer.update([collate(features, config.depth)])
            if not update.finite:
                raise ModelError(
                    f"draft: the loss is {update.loss} (gradient norm {update.grad_norm}) after {num_done} updates; "
                    f"the head was left as it was. Lower draft.lr (now {config.lr}), or check the policy's weights."
                )
            num_done += 1
            losses.append(update.loss)
            if progress is not None:
                progress(num_done, num_updates, update.loss)
    acceptance = predicted_acceptance(policy, head, held_out, config.num_draft_tokens or config.depth, sampling)
    figures = DraftFigures(
        loss=sum(losses) / len(losses),
        acceptance=acceptance,
        coverage=_coverage(train, head.draft_ids),
        held_out_coverage=_coverage(held_out, head.draft_ids),
        num_updates=num_done,
        num_answers=len(train),
        num_held_out=len(held_out),
    )
    return head, figures


@dataclass(frozen=True, slots=True)
class _Slot:
    """A draft token that the engine would judge. `position` may lie past the end of the answer."""

    block: int
    slot: int
    position: int
    draft_id: int


@torch.no_grad()
def predicted_acceptance(
    policy: PreTrainedModel,
    head: DraftHead,
    answers: Sequence[Answer],
    num_draft_tokens: int,
    sampling: Sampling,
    features: Sequence[Features] | None = None,
) -> Acceptance:
    """Acceptance length that the engine should measure on rollouts like these.

    `answers` must have been sampled from this policy with `sampling`. Each is walked block by block. With a greedy
    draft d, accepting with probability p(d) and otherwise sampling p without d is the same as sampling x from p and
    accepting when x = d, so a recorded rollout decides the acceptances, and with them the roots, just as the engine's
    noise would. Each visited slot then counts with its p(d) and not with its outcome: the same mean, less noise. Drafts
    past the end of an answer are judged too, as an engine judges them before it cuts, weighed by their chance of being
    reached. `limit` comes from the same distributions and costs no forward pass.

    `features` of the answers, where they are known already, save one of two forward passes. Returns NaN where nothing
    was drafted.
    """
    if features is None:
        features = policy_features(policy, answers, head.aux_layers)
    chains: dict[int, torch.Tensor] = {}
    for indices in _by_length([len(answer.token_ids) for answer in answers], FORWARD_TOKENS):
        drafted = _greedy_chains(policy, head, collate([features[index] for index in indices], 0), num_draft_tokens)
        chains.update(dict(zip(indices, drafted, strict=True)))
    walks = [_walk(answer, chains[index].tolist()) for index, answer in enumerate(answers)]
    extended = [_extend(answer, walk) for answer, walk in zip(answers, walks, strict=True)]
    judged = policy_features(policy, extended, head.aux_layers)

    visits, accepted = [0.0] * num_draft_tokens, [0.0] * num_draft_tokens
    by_answer: list[tuple[int, float]] = []
    """(blocks, accepted drafts)"""
    most_likely: list[MostLikely] = []
    for answer, walk, feature in zip(answers, walks, judged, strict=True):
        laws = _judge(policy, feature, walk, sampling)
        most_likely.append(_most_likely(answer, laws, num_draft_tokens, sampling))
        reached, before = 1.0, sum(accepted)
        for slot in walk:
            prob = laws.drafted[slot.position - laws.start]
            if slot.position <= len(answer.token_ids):
                reached = 1.0
            visits[slot.slot] += reached
            accepted[slot.slot] += reached * prob
            if slot.position >= len(answer.token_ids):
                reached *= prob
        if walk:
            by_answer.append((walk[-1].block + 1, sum(accepted) - before))
    num_blocks = sum(blocks for blocks, _ in by_answer)
    return Acceptance(
        alpha=1 + sum(accepted) / num_blocks if num_blocks else math.nan,
        conditional=tuple(
            number / visited if visited else math.nan for number, visited in zip(accepted, visits, strict=True)
        ),
        marginal=tuple(number / num_blocks if num_blocks else math.nan for number in accepted),
        reached=tuple(visits),
        num_blocks=num_blocks,
        standard_error=_standard_error_of_ratio(by_answer),
        num_answers=len(by_answer),
        most_likely=MostLikely.pooled(most_likely),
    )


def _standard_error_of_ratio(pairs: Sequence[tuple[int, float]]) -> float:
    """Of sum(y) / sum(x) over independent pairs (x, y), by linearisation; NaN of fewer than two."""
    if len(pairs) < 2:
        return math.nan
    total = sum(x for x, _ in pairs)
    ratio = sum(y for _, y in pairs) / total
    return math.sqrt(len(pairs) / (len(pairs) - 1) * sum((y - ratio * x) ** 2 for x, y in pairs)) / total


def _greedy_chains(policy: PreTrainedModel, head: DraftHead, batch: Batch, num_draft_tokens: int) -> torch.Tensor:
    """[B, R, K] what the head would draft, greedily, from every root."""
    memory = batch.memory()
    positions = batch.at_depth(batch.positions, 0)
    hidden = head.project(batch.at_depth(batch.aux, 0))
    token_ids = batch.at_depth(batch.token_ids, 1)
    num_rows = max(1, LOGITS_ELEMENTS // len(head.draft_ids))
    drafted = []
    for j in range(num_draft_tokens):
        hidden = head(hidden, embed(policy, token_ids).float(), positions + j, memory)
        best = torch.cat([head.logits(rows).argmax(-1) for rows in hidden.flatten(0, 1).split(num_rows)])
        token_ids = head.draft_ids[best].view(hidden.shape[:2])
        drafted.append(token_ids)
    return torch.stack(drafted, dim=-1)


def _walk(answer: Answer, chains: Sequence[Sequence[int]]) -> list[_Slot]:
    """The slots that are judged on this answer, in order; `chains[t]` is what is drafted from root t."""
    slots = []
    end = len(answer.token_ids)
    root, block = answer.prompt_length - 1, 0
    while root + 2 < end:
        position = root + 2
        for slot, draft_id in enumerate(chains[root]):
            slots.append(_Slot(block, slot, position, draft_id))
            if position < end and answer.token_ids[position] != draft_id:
                break
            position += 1
        root, block = position - 1, block + 1
    return slots


def _extend(answer: Answer, walk: Sequence[_Slot]) -> Answer:
    """The answer and, after its end, the drafts that the engine would judge there."""
    past_end = [slot.draft_id for slot in walk if slot.position >= len(answer.token_ids)]
    return Answer((*answer.token_ids, *past_end), answer.prompt_length)


@dataclass(frozen=True, slots=True)
class _Laws:
    """The policy's distributions at positions `start`, `start` + 1, ... of an answer and of drafts past its end."""

    start: int
    best_ids: list[int]
    """The most likely token of its whole vocabulary."""
    best: list[float]
    """Its probability."""
    drafted: list[float]
    """That of the draft token that is judged there; without meaning where none is."""


def _judge(policy: PreTrainedModel, feature: Features, walk: Sequence[_Slot], sampling: Sampling) -> _Laws:
    """Of every position that a draft can stand at."""
    output = policy_parts(policy).output
    start = feature.answer.prompt_length + 1
    final = feature.final[start - 1 :]
    draft_ids = torch.zeros(len(final), dtype=torch.long)
    for slot in walk:
        draft_ids[slot.position - start] = slot.draft_id
    num_rows = max(1, LOGITS_ELEMENTS // output.weight.shape[0])
    laws = _Laws(start, [], [], [])
    for rows, ids in zip(final.split(num_rows), draft_ids.split(num_rows), strict=True):
        logprobs = policy_log_probs(output(rows.to(output.weight.dtype)), sampling)
        best = logprobs.max(-1)
        laws.best_ids.extend(best.indices.tolist())
        laws.best.extend(best.values.exp().tolist())
        laws.drafted.extend(logprobs.gather(-1, ids[:, None].to(logprobs.device)).exp().flatten().tolist())
    return laws


def _most_likely(answer: Answer, laws: _Laws, num_draft_tokens: int, sampling: Sampling) -> MostLikely:
    """Walk the answer as with a head's drafts. Of what comes after its last token, one distribution is known."""
    end = len(answer.token_ids)
    stopped = answer.token_ids[-1] in sampling.stop_token_ids
    known = laws.best_ids[: end - laws.start + (0 if stopped else 1)]
    # The first root is that of the first position.
    chains = [[]] * (answer.prompt_length - 1) + [known[i : i + num_draft_tokens] for i in range(len(known))]
    walk = _walk(answer, chains)
    judged, accepted, cut = [0] * num_draft_tokens, [0.0] * num_draft_tokens, [0.0] * num_draft_tokens
    for slot in walk:
        prob = laws.best[slot.position - laws.start]
        judged[slot.slot] += 1
        accepted[slot.slot] += prob
        if slot.position == end and slot.slot + 1 < num_draft_tokens:
            cut[slot.slot + 1] += prob
    return MostLikely(walk[-1].block + 1 if walk else 0, tuple(judged), tuple(accepted), tuple(cut))


@torch.no_grad()
def _check_logits(policy: PreTrainedModel, answer: Answer) -> None:
    """The teacher is computed from the last state; refuse policies that scale or cap their logits after that."""
    token_ids = torch.tensor([answer.token_ids], device=policy.device)
    logits = policy(input_ids=token_ids, use_cache=False).logits.float()
    final = policy_parts(policy).decoder(input_ids=token_ids, use_cache=False).last_hidden_state
    ours = policy_parts(policy).output(final).float()
    if not torch.allclose(ours, logits, rtol=1e-2, atol=1e-2, equal_nan=True):
        raise ModelError(
            f"policy: {type(policy).__name__} changes its logits after the output layer; draft training supports "
            "policies whose logits are the output layer of the last hidden state, such as Qwen3 and Llama."
        )


def _by_length(
    lengths: Sequence[int], num_tokens: int, generator: torch.Generator | None = None
) -> Iterator[list[int]]:
    """Indices in batches of similar length, at most `num_tokens` padded positions (or one answer) each.

    With a generator, answers of equal length and the order of the batches are shuffled; their number never changes.
    """
    order = list(range(len(lengths)))
    if generator is not None:
        order = torch.randperm(len(order), generator=generator).tolist()
    order.sort(key=lambda index: lengths[index])
    batches: list[list[int]] = [[]]
    for index in order:
        if batches[-1] and (len(batches[-1]) + 1) * lengths[index] > num_tokens:
            batches.append([])
        batches[-1].append(index)
    if generator is not None:
        batches = [batches[place] for place in torch.randperm(len(batches), generator=generator).tolist()]
    yield from (batch for batch in batches if batch)


def _pad(rows: Sequence[Sequence[int]], num_more: int) -> torch.Tensor:
    """[B, longest + num_more] ids, zeros on the right."""
    width = max(len(row) for row in rows) + num_more
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=torch.long)
