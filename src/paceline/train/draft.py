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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from paceline.config.run import Eagle3Draft
from paceline.errors import ConfigError, DataError, ModelError
from paceline.models.eagle3 import AuxCapture, ChainMemory, Eagle3Config, Eagle3Head, embed, policy_parts
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
    """Features of several answers, padded on the right. Positions reach `depth` past the longest answer."""

    token_ids: torch.Tensor
    """[B, T + depth]"""
    is_label: torch.Tensor
    """[B, T + depth] True exactly where the token is a response token."""
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
class Acceptance:
    """Predicted acceptance of greedy drafts, as the engine would count it on the same rollouts."""

    alpha: float
    """1 + accepted draft tokens per verify step."""
    conditional: tuple[float, ...]
    """[K] acceptance at slot j given that all earlier slots were accepted."""
    marginal: tuple[float, ...]
    """[K] blocks that accept slot j, as a fraction of all blocks; alpha = 1 + their sum."""
    num_blocks: int


@dataclass(frozen=True, slots=True)
class DraftFigures:
    """What one training run came to."""

    loss: float
    """Mean over the last epoch."""
    acceptance: Acceptance
    """On the held-out answers, at the recipe's k."""
    coverage: float
    """Fraction of response tokens that are in the draft vocabulary."""
    num_updates: int
    num_answers: int
    num_held_out: int


def choose_draft_vocab(answers: Sequence[Answer], size: int, vocab_size: int) -> tuple[torch.Tensor, float]:
    """The `size` most frequent response tokens, rising ids [size], and the fraction of response tokens they cover.

    Ties, and what is left when fewer tokens occur, go to the lower ids. Raises `ConfigError` for an impossible size.
    """
    if not 1 <= size <= vocab_size:
        raise ConfigError(f"draft.vocab_size is {size}: it must be between 1 and the policy's {vocab_size} tokens.")
    labels = [token for answer in answers for token in answer.token_ids[answer.prompt_length :]]
    counts = torch.bincount(torch.tensor(labels, dtype=torch.long), minlength=vocab_size)
    chosen = counts.sort(descending=True, stable=True).indices[:size].sort().values
    return chosen, float(counts[chosen].sum() / max(1, len(labels)))


def content_key(config: Eagle3Draft, policy_hash: str, data_key: str, sampling: Sampling) -> str:
    """Hex key of the head that training would give: equal keys, equal heads (on one machine).

    Args:
        config: its training fields count; `num_draft_tokens` and `path` do not change what is trained.
        policy_hash: of the policy's weights and architecture.
        data_key: whatever decides which prompts the answers are sampled for.
        sampling: how the answers are sampled; its temperature is also the teacher's.
    """
    fields = {
        "version": _KEY_VERSION,
        "draft": config.model_dump(mode="json", exclude={"num_draft_tokens", "path"}),
        "policy": policy_hash,
        "data": data_key,
        "sampling": [getattr(sampling, name) for name in ("temperature", "top_k", "top_p", "min_p", "max_tokens")],
        "stop": list(sampling.stop_token_ids),
    }
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


@torch.no_grad()
def policy_features(policy: PreTrainedModel, answers: Sequence[Answer], aux_layers: Sequence[int]) -> list[Features]:
    """Features of each answer, in order. One forward pass of the policy's decoder; never [T, V] logits."""
    features: dict[int, Features] = {}
    with AuxCapture(policy, aux_layers) as capture:
        for indices in _by_length([len(answer.token_ids) for answer in answers], FORWARD_TOKENS):
            token_ids = _pad([answers[index].token_ids for index in indices], 0).to(policy.device)
            # Right padding stays out of earlier positions by causality alone: no mask is needed.
            final = policy_parts(policy).decoder(input_ids=token_ids, use_cache=False).last_hidden_state.float()
            aux = capture.hidden().float()
            for row, index in enumerate(indices):
                length = len(answers[index].token_ids)
                features[index] = Features(answers[index], aux[row, :length].clone(), final[row, :length].clone())
    return [features[index] for index in range(len(answers))]


def collate(features: Sequence[Features], depth: int) -> Batch:
    """Pad `features` into one batch for training at `depth`."""
    token_ids = _pad([feature.answer.token_ids for feature in features], depth).to(features[0].aux.device)
    positions = torch.arange(token_ids.shape[1], device=token_ids.device)
    starts = torch.tensor([feature.answer.prompt_length for feature in features], device=token_ids.device)
    ends = torch.tensor([len(feature.answer.token_ids) for feature in features], device=token_ids.device)
    final = torch.nn.utils.rnn.pad_sequence([feature.final for feature in features], batch_first=True)
    return Batch(
        token_ids=token_ids,
        is_label=(positions >= starts[:, None]) & (positions < ends[:, None]),
        aux=torch.nn.utils.rnn.pad_sequence([feature.aux for feature in features], batch_first=True),
        final=functional.pad(final, (0, 0, 0, depth)),
    )


def num_pairs(batch: Batch, depth: int) -> list[int]:
    """[depth] supervised roots at each depth."""
    return [int(batch.at_depth(batch.is_label, 2 + j).sum()) for j in range(depth)]


def summed_loss(
    head: Eagle3Head, policy: PreTrainedModel, batch: Batch, depth: int, temperature: float
) -> torch.Tensor:
    """Sum over depth j and supervised roots of 0.8^j * cross-entropy, in nats; to be divided by a global count.

    Differentiable in the head alone.
    """
    memory = ChainMemory()
    positions = torch.arange(batch.num_roots, device=batch.aux.device)
    hidden = head.project(batch.at_depth(batch.aux, 0))
    teacher_rows = policy_parts(policy).output.weight.detach()[head.draft_ids].float()
    total = hidden.new_zeros(())
    for j in range(depth):
        hidden = head(hidden, embed(policy, batch.at_depth(batch.token_ids, 1 + j)), positions + j, memory)
        supervised = batch.at_depth(batch.is_label, 2 + j)
        outputs = hidden[supervised]
        final = batch.at_depth(batch.final, 1 + j)[supervised]
        num_rows = max(1, LOGITS_ELEMENTS // head.config.draft_vocab_size)
        for piece, piece_final in zip(outputs.split(num_rows), final.split(num_rows), strict=True):
            loss = checkpoint(
                _cross_entropy, head, piece, piece_final, teacher_rows, temperature,
                use_reentrant=False, preserve_rng_state=False,
            )  # fmt: skip
            total = total + DEPTH_WEIGHT**j * loss
    return total


def _cross_entropy(
    head: Eagle3Head, outputs: torch.Tensor, final: torch.Tensor, teacher_rows: torch.Tensor, temperature: float
) -> torch.Tensor:
    teacher = (functional.linear(final, teacher_rows) / temperature).softmax(-1)
    return functional.cross_entropy(head.logits(outputs), teacher, reduction="sum")


class DraftTrainer:
    """The head's own optimiser, schedule and clip. It reads the policy and never changes it."""

    def __init__(
        self, head: Eagle3Head, policy: PreTrainedModel, depth: int, lr: float, num_updates: int, temperature: float
    ) -> None:
        """`num_updates` spans the schedule: linear warm-up, then a cosine from `lr` to a tenth of it."""
        self.head = head
        self._policy = policy
        self._depth = depth
        self._temperature = temperature
        self._optimizer = torch.optim.AdamW(head.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
        num_warmup = max(1, round(WARMUP_SHARE * num_updates))

        def schedule(update: int) -> float:
            if update < num_warmup:
                return (update + 1) / num_warmup
            progress = min(1.0, (update - num_warmup) / max(1, num_updates - num_warmup))
            return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))

        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, schedule)

    def update(self, batches: Sequence[Batch]) -> DraftUpdate:
        """One optimiser update from micro-batches, which are weighed by one count over all of them.

        A loss or gradient that is not finite leaves head, optimiser and schedule as they are, and is reported.
        """
        counts = [num_pairs(batch, self._depth) for batch in batches]
        denominator = sum(DEPTH_WEIGHT**j * count for row in counts for j, count in enumerate(row))
        loss = 0.0
        for batch in batches:
            part = summed_loss(self.head, self._policy, batch, self._depth, self._temperature) / denominator
            part.backward()
            loss += part.item()
        grad_norm = torch.nn.utils.clip_grad_norm_(self.head.parameters(), MAX_GRAD_NORM).item()
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        if finite:
            self._optimizer.step()
            self._schedule.step()
        self._optimizer.zero_grad()
        return DraftUpdate(loss, grad_norm, sum(map(sum, counts)), finite)


def train_eagle3(
    policy: PreTrainedModel,
    answers: Sequence[Answer],
    config: Eagle3Draft,
    sampling: Sampling,
    progress: Callable[[int, int, float], None] | None = None,
) -> tuple[Eagle3Head, DraftFigures]:
    """Train a head on the policy's answers. Reproducible from `config.seed`; no global random state is used.

    Args:
        policy: a Hugging Face causal LM in eval mode; only read.
        answers: sampled from this policy with `sampling`. The last tenth is held out, so put answers to one prompt
            next to each other.
        config: depth, epochs, learning rate, auxiliary layers, vocabulary.
        sampling: its temperature is the teacher's; all of it decides the predicted acceptance.
        progress: called after each update with (updates done, updates in all, loss in nats).

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
    num_held_out = max(1, round(HELD_OUT_SHARE * len(answers)))
    train, held_out = answers[:-num_held_out], answers[-num_held_out:]
    if not train:
        raise DataError(
            f"{len(answers)} answers have two response tokens or more: a draft needs at least 2 such answers. Raise "
            "draft.num_answers or sampling.max_tokens."
        )
    vocab_size = policy.config.vocab_size
    draft_ids, coverage = choose_draft_vocab(train, config.vocab_size or vocab_size, vocab_size)
    head_config = Eagle3Config.for_policy(
        policy.config, config.aux_layers, draft_vocab_size=len(draft_ids), trained_depth=config.depth
    )
    generator = torch.Generator().manual_seed(config.seed)
    head = Eagle3Head.initialize(head_config, policy, draft_ids, generator).to(policy.device)
    _check_logits(policy, train[0])

    lengths = [len(answer.token_ids) for answer in train]
    num_updates = config.epochs * sum(1 for _ in _by_length(lengths, UPDATE_TOKENS))
    trainer = DraftTrainer(head, policy, config.depth, config.lr, num_updates, sampling.temperature)
    feature_bytes = 4 * sum(lengths) * (len(head_config.aux_layers) + 1) * head_config.hidden_size
    cached = policy_features(policy, train, head_config.aux_layers) if feature_bytes <= FEATURE_BYTES else None
    num_done, losses = 0, []
    for _ in range(config.epochs):
        losses = []
        for indices in _by_length(lengths, UPDATE_TOKENS, generator):
            if cached is not None:
                features = [cached[index] for index in indices]
            else:
                features = policy_features(policy, [train[index] for index in indices], head_config.aux_layers)
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
        coverage=coverage,
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
    policy: PreTrainedModel, head: Eagle3Head, answers: Sequence[Answer], num_draft_tokens: int, sampling: Sampling
) -> Acceptance:
    """Acceptance length that the engine should measure on rollouts like these.

    `answers` must have been sampled from this policy with `sampling`. Each is walked block by block. With a greedy
    draft d, accepting with probability p(d) and otherwise sampling p without d is the same as sampling x from p and
    accepting when x = d, so a recorded rollout decides the acceptances, and with them the roots, just as the engine's
    noise would. Each visited slot then counts with its p(d) and not with its outcome: the same mean, less noise. Drafts
    past the end of an answer are judged too, as an engine judges them before it cuts, weighed by their chance of being
    reached.

    Returns NaN where nothing was drafted.
    """
    features = policy_features(policy, answers, head.config.aux_layers)
    chains: dict[int, torch.Tensor] = {}
    for indices in _by_length([len(answer.token_ids) for answer in answers], FORWARD_TOKENS):
        drafted = _greedy_chains(policy, head, collate([features[index] for index in indices], 0), num_draft_tokens)
        chains.update(dict(zip(indices, drafted, strict=True)))
    walks = [_walk(answer, chains[index].tolist()) for index, answer in enumerate(answers)]
    extended = [_extend(answer, walk) for answer, walk in zip(answers, walks, strict=True)]
    judged = policy_features(policy, extended, head.config.aux_layers)

    visits, accepted = [0.0] * num_draft_tokens, [0.0] * num_draft_tokens
    num_blocks = 0
    for answer, walk, feature in zip(answers, walks, judged, strict=True):
        probs = _probs_of_drafts(policy, feature, walk, sampling)
        reached = 1.0
        for slot, prob in zip(walk, probs, strict=True):
            num_blocks += slot.slot == 0
            if slot.position <= len(answer.token_ids):
                reached = 1.0
            visits[slot.slot] += reached
            accepted[slot.slot] += reached * prob
            if slot.position >= len(answer.token_ids):
                reached *= prob
    return Acceptance(
        alpha=1 + sum(accepted) / num_blocks if num_blocks else math.nan,
        conditional=tuple(
            number / visited if visited else math.nan for number, visited in zip(accepted, visits, strict=True)
        ),
        marginal=tuple(number / num_blocks if num_blocks else math.nan for number in accepted),
        num_blocks=num_blocks,
    )


def _greedy_chains(policy: PreTrainedModel, head: Eagle3Head, batch: Batch, num_draft_tokens: int) -> torch.Tensor:
    """[B, R, K] what the head would draft, greedily, from every root."""
    memory = ChainMemory()
    positions = torch.arange(batch.num_roots, device=batch.aux.device)
    hidden = head.project(batch.at_depth(batch.aux, 0))
    token_ids = batch.at_depth(batch.token_ids, 1)
    num_rows = max(1, LOGITS_ELEMENTS // head.config.draft_vocab_size)
    drafted = []
    for j in range(num_draft_tokens):
        hidden = head(hidden, embed(policy, token_ids), positions + j, memory)
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


def _probs_of_drafts(
    policy: PreTrainedModel, feature: Features, walk: Sequence[_Slot], sampling: Sampling
) -> list[float]:
    """The policy's probability of each judged draft token."""
    output = policy_parts(policy).output
    positions = torch.tensor([slot.position - 1 for slot in walk], dtype=torch.long)
    draft_ids = torch.tensor([slot.draft_id for slot in walk], dtype=torch.long)
    num_rows = max(1, LOGITS_ELEMENTS // output.weight.shape[0])
    probs: list[float] = []
    for rows, ids in zip(positions.split(num_rows), draft_ids.split(num_rows), strict=True):
        logits = output(feature.final[rows].to(output.weight.dtype))
        picked = policy_log_probs(logits, sampling).gather(-1, ids[:, None].to(logits.device))
        probs.extend(picked.exp().flatten().tolist())
    return probs


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
