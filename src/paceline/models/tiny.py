"""`tiny`: a deep, narrow Qwen3-style policy that is trained here in minutes and has something to gain from RL.

It answers sums of one-digit terms in two ways. A written-out chain is nearly always right; a direct guess is a
plausible number and nearly always wrong:

    5-4-2-8=    5-4=1;1-2=-1;-1-8=-9;Answer:-9
    5-4-2-8=    Answer:3

Supervision sets how often each is chosen (`chain_share`), and so where the mean reward starts. RL cannot teach digits
in minutes, but it can elicit the better of two ways that are both there. Short steps over few symbols are what such
a small model learns quickly; the number of steps spreads the lengths of the answers.

With `num_mtp_layers` it is a MiMo-style policy: Qwen2 of the same size, taught in the same steps, and an MTP layer that
learns beside it from its hidden states, detached: the trunk is bit-equal with and without what the layer learns.

The content hash of the cached folder covers this file (and that of the MTP layer): whatever changes the weights stands
there.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from paceline.config.run import TinyPolicy
from paceline.errors import ConfigError
from paceline.models import mtp
from paceline.models.cache import Progress, build_once, digest_of, no_progress
from paceline.models.eagle3 import AuxCapture, ChainMemory, embed
from paceline.models.mimo import MiMoForCausalLM, trunk_parameters

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
SYMBOLS = (PAD, EOS, UNKNOWN, *"0123456789+-=;:Answer")
"""The vocabulary: a token per character."""
MAX_POSITIONS = 256
MIN_TERMS, MAX_TERMS = 2, 9
HEAD_DIM = 32

# Rows of packed problems: no padding, and a step small enough that 750 of them fit into two minutes of two CPU cores.
ROWS, ROW_TOKENS = 16, 128
MUON_LR, ADAMW_LR = 0.05, 0.006
WARMUP_STEPS = 30
CHAINS_ONLY = 0.8
"""Fraction of the steps that see chains alone. Guesses are learned at once, so they come last and cost little."""
MTP_DEPTH, MTP_DEPTH_WEIGHT = 3, 0.8
"""Steps of its own that an MTP layer is trained on, and how much less each further one counts."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One sum. Example: `Problem("5-4-2=", "5-4=1;1-2=-1;Answer:-1", -1)`."""

    prompt: str
    response: str
    answer: int


@dataclass(frozen=True, slots=True)
class TinyReport:
    """What training reached, measured on fresh problems sampled at temperature 1 (fractions 0-1)."""

    right: float
    chains: float
    """Answers that write the chain out."""
    right_of_chains: float
    right_of_guesses: float
    mean_tokens: float
    """Response tokens, the end token included."""
    loss: float
    """Mean of the last 20 steps (nats per response token)."""
    mtp_loss: float | None
    """The same of the MTP layer (nats per response token and depth, weighted); None without one."""
    seconds: float
    """Wall clock of the training."""


def make_problem(rng: random.Random, chain_share: float) -> Problem:
    """A sum of 2 to 9 one-digit terms with a chain, or with the result of another such sum as the direct guess."""
    terms = [rng.randint(0, 9) for _ in range(rng.randint(MIN_TERMS, MAX_TERMS))]
    signs = [1, *(rng.choice((1, -1)) for _ in terms[1:])]
    answer = sum(sign * term for sign, term in zip(signs, terms, strict=True))
    prompt = str(terms[0]) + "".join(f"{_sign(s)}{t}" for s, t in zip(signs[1:], terms[1:], strict=True)) + "="
    if rng.random() >= chain_share:
        guess = rng.randint(0, 9) + sum(rng.choice((1, -1)) * rng.randint(0, 9) for _ in terms[1:])
        return Problem(prompt, f"Answer:{guess}", answer)
    steps, total = [], terms[0]
    for sign, term in zip(signs[1:], terms[1:], strict=True):
        steps.append(f"{total}{_sign(sign)}{term}={total + sign * term};")
        total += sign * term
    return Problem(prompt, "".join(steps) + f"Answer:{answer}", answer)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token per character; anything else is `<unk>`. No token is added in front of a prompt."""
    words = Tokenizer(models.WordLevel({symbol: i for i, symbol in enumerate(SYMBOLS)}, unk_token=UNKNOWN))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    words.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        padding_side="left",
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def make_model(config: TinyPolicy) -> PreTrainedModel:
    """The untrained policy, float32, initialised from torch's global generator."""
    shape: dict[str, Any] = {
        "vocab_size": len(SYMBOLS),
        "hidden_size": config.hidden_size,
        "intermediate_size": 2 * config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.hidden_size // HEAD_DIM,
        "num_key_value_heads": 1,
        "max_position_embeddings": MAX_POSITIONS,
        "bos_token_id": None,
        "eos_token_id": SYMBOLS.index(EOS),
        "pad_token_id": SYMBOLS.index(PAD),
    }
    if config.num_mtp_layers:
        shape["num_nextn_predict_layers"] = config.num_mtp_layers
        return MiMoForCausalLM(Qwen2Config(**shape, tie_word_embeddings=False))
    return Qwen3ForCausalLM(Qwen3Config(**shape, head_dim=HEAD_DIM, tie_word_embeddings=True))


def train_tiny(config: TinyPolicy, folder: Path, progress: Progress = no_progress) -> TinyReport:
    """Train the policy and write it to `folder` as a Hugging Face folder, with `training.json` beside the weights.

    The same config, torch build and thread count give the same weights. Raises `ConfigError` for a width that the
    attention heads do not divide.
    """
    if config.hidden_size % HEAD_DIM:
        raise ConfigError(
            f"policy.hidden_size is {config.hidden_size}: the tiny policy has heads of {HEAD_DIM}. "
            f"Set policy.hidden_size to a multiple of {HEAD_DIM}, such as 64 or 96"
        )
    started = time.perf_counter()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = make_model(config)
        loss, mtp_loss = _fit(model, config, progress)
        seconds = time.perf_counter() - started
        report = _measure(model, config.seed, loss, mtp_loss, seconds)
    model.generation_config = GenerationConfig(
        eos_token_id=SYMBOLS.index(EOS), pad_token_id=SYMBOLS.index(PAD), bos_token_id=None
    )
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    (folder / "training.json").write_text(json.dumps(asdict(report), indent=1))
    return report


def cached_tiny(config: TinyPolicy, root: Path, progress: Progress = no_progress) -> Path:
    """The trained policy's folder below `root`, trained now unless an intact one is there.

    Raises `ConfigError` as `train_tiny` does and `ModelError` when the cache cannot be written.
    """
    content = {"recipe": Path(__file__).read_text(), "config": config.model_dump(mode="json")}
    if config.num_mtp_layers:
        content["layer"] = Path(mtp.__file__).read_text()

    def build(folder: Path) -> None:
        train_tiny(config, folder, progress)

    return build_once(root, f"tiny-{digest_of(content)[:16]}", build)


def _sign(sign: int) -> str:
    return "+" if sign > 0 else "-"


def _fit(model: PreTrainedModel, config: TinyPolicy, progress: Progress) -> tuple[float, float | None]:
    """Supervised training in place; mean losses of the last 20 steps: the policy's, and its MTP layer's or None."""
    # Muon for the matrices of the layers, AdamW for the rest: the budget is minutes, and Muon needs fewer steps.
    is_layer = {
        name: p.ndim == 2 and "embed_tokens" not in name and "lm_head" not in name
        for name, p in model.named_parameters()
    }
    layers = [p for name, p in model.named_parameters() if is_layer[name]]
    others = [p for name, p in model.named_parameters() if not is_layer[name]]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(layers, lr=MUON_LR, weight_decay=0.0, momentum=0.95),
        torch.optim.AdamW(others, lr=ADAMW_LR, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _lr_factor(step, config.train_steps))
        for optimizer in optimizers
    ]
    model.train()
    head = mtp.MtpHead(model) if config.num_mtp_layers else None
    trunk = list(trunk_parameters(model))
    batches = _batches(config)
    losses: list[float] = []
    mtp_losses: list[float] = []
    for step in range(config.train_steps):
        tokens, labels, positions = next(batches)
        with AuxCapture(model, (config.num_layers,)) as capture:
            logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
            hidden = capture.hidden()
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trunk, 1.0)
        if head is not None:
            mtp_loss = _mtp_loss(head, model, hidden, tokens, labels, positions)
            mtp_loss.backward()
            torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            mtp_losses.append(mtp_loss.item())
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        losses.append(loss.item())
        progress("training the tiny policy", (step + 1) / config.train_steps)
    model.eval()
    return _mean(losses[-20:]), _mean(mtp_losses[-20:]) if mtp_losses else None


def _mtp_loss(
    head: mtp.MtpHead,
    model: PreTrainedModel,
    hidden: torch.Tensor,
    tokens: torch.Tensor,
    labels: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Cross-entropy of the layer at each depth, nats per supervised (root, depth) pair, weighted by depth.

    `hidden` [ROWS, ROW_TOKENS, H] carries no graph. No problem of a packed row sees or predicts another.
    """
    width, margin = tokens.shape[1], (0, MTP_DEPTH + 1)
    problems = positions.eq(0).cumsum(1)
    token_ids, targets = functional.pad(tokens, margin), functional.pad(labels, margin, value=-100)
    owners = functional.pad(problems, margin)
    outputs, memory = hidden, ChainMemory(problems)
    total, weight = hidden.new_zeros(()), 0.0
    for depth in range(MTP_DEPTH):
        next_ids = token_ids[:, 1 + depth : 1 + depth + width]
        outputs = head(outputs, embed(model, next_ids), positions + depth, memory)
        label = slice(2 + depth, 2 + depth + width)
        kept = (targets[:, label] != -100) & (owners[:, label] == problems)
        loss = functional.cross_entropy(head.logits(outputs[kept]), targets[:, label][kept], reduction="sum")
        total = total + MTP_DEPTH_WEIGHT**depth * loss
        weight += MTP_DEPTH_WEIGHT**depth * int(kept.sum())
    return total / weight


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _lr_factor(step: int, num_steps: int) -> float:
    """Linear warm-up, flat, then linear to 2 % over the second half."""
    return min(1.0, (step + 1) / WARMUP_STEPS) * max(0.02, min(1.0, (num_steps - step) / (0.5 * num_steps)))


def _batches(config: TinyPolicy) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Tokens, labels (-100 on prompts and padding) and positions, each [ROWS, ROW_TOKENS].

    Positions start at 0 in each problem; transformers keeps problems of one row apart by that.
    """
    rng = random.Random(config.seed)
    ids = {symbol: i for i, symbol in enumerate(SYMBOLS)}
    step = 0
    while True:
        share = 1.0 if step < CHAINS_ONLY * config.train_steps else config.chain_share
        tokens = torch.full((ROWS, ROW_TOKENS), ids[PAD])
        labels = torch.full((ROWS, ROW_TOKENS), -100)
        positions = torch.zeros((ROWS, ROW_TOKENS), dtype=torch.long)
        for row in range(ROWS):
            start = 0
            while True:
                problem = make_problem(rng, share)
                sequence = torch.tensor([*(ids[c] for c in problem.prompt + problem.response), ids[EOS]])
                end = start + len(sequence)
                if end > ROW_TOKENS:
                    positions[row, start:] = torch.arange(ROW_TOKENS - start)
                    break
                tokens[row, start:end] = sequence
                labels[row, start + len(problem.prompt) : end] = sequence[len(problem.prompt) :]
                positions[row, start:end] = torch.arange(len(sequence))
                start = end
        yield tokens, labels, positions
        step += 1


def _measure(
    model: PreTrainedModel, seed: int, loss: float, mtp_loss: float | None, seconds: float, num_problems: int = 256
) -> TinyReport:
    """Sample one answer to each of fresh problems at temperature 1 and count."""
    rng = random.Random(f"{seed}-measure")
    problems = [make_problem(rng, chain_share=1.0) for _ in range(num_problems)]
    tokenizer = make_tokenizer()
    batch = tokenizer([problem.prompt for problem in problems], return_tensors="pt", padding=True)
    with torch.no_grad():
        output = cast(Any, model).generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            generation_config=GenerationConfig(
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=96,
                eos_token_id=SYMBOLS.index(EOS),
                pad_token_id=SYMBOLS.index(PAD),
            ),
        )
    responses = output[:, batch["input_ids"].shape[1] :]
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    right = [t.rpartition("Answer:")[2] == str(p.answer) for t, p in zip(texts, problems, strict=True)]
    chains = [not text.startswith("Answer:") for text in texts]
    of_chains = [r for r, c in zip(right, chains, strict=True) if c]
    of_guesses = [r for r, c in zip(right, chains, strict=True) if not c]
    return TinyReport(
        right=sum(right) / num_problems,
        chains=sum(chains) / num_problems,
        right_of_chains=sum(of_chains) / max(1, len(of_chains)),
        right_of_guesses=sum(of_guesses) / max(1, len(of_guesses)),
        mean_tokens=float((responses != SYMBOLS.index(PAD)).sum()) / num_problems,
        loss=loss,
        mtp_loss=mtp_loss,
        seconds=seconds,
    )
