"""`tiny`: a deep, narrow Qwen3-style policy that is trained here in minutes and has something to gain from RL.

It answers sums of one-digit terms in two ways. A written-out chain is nearly always right; a direct guess is a
plausible number and nearly always wrong:

    5-4-2-8=    5-4=1;1-2=-1;-1-8=-9;Answer:-9
    5-4-2-8=    Answer:3

Supervision sets how often each is chosen (`chain_share`), and so where the mean reward starts. RL cannot teach digits
in minutes, but it can elicit the better of two ways that are both there. Short steps over few symbols are what such
a small model learns quickly; the number of steps spreads the lengths of the answers.

The content hash of the cached folder covers this file: whatever changes the weights stands here.
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
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from paceline.config.run import TinyPolicy
from paceline.errors import ConfigError
from paceline.models.cache import Progress, build_once, digest_of, no_progress

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


def make_model(config: TinyPolicy) -> Qwen3ForCausalLM:
    """The untrained policy, float32, initialised from torch's global generator."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(SYMBOLS),
            hidden_size=config.hidden_size,
            intermediate_size=2 * config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.hidden_size // HEAD_DIM,
            num_key_value_heads=1,
            head_dim=HEAD_DIM,
            tie_word_embeddings=True,
            max_position_embeddings=MAX_POSITIONS,
            bos_token_id=None,
            eos_token_id=SYMBOLS.index(EOS),
            pad_token_id=SYMBOLS.index(PAD),
        )
    )


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
        loss = _fit(model, config, progress)
        seconds = time.perf_counter() - started
        report = _measure(model, config.seed, loss, seconds)
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

    def build(folder: Path) -> None:
        train_tiny(config, folder, progress)

    return build_once(root, f"tiny-{digest_of(content)[:16]}", build)


def _sign(sign: int) -> str:
    return "+" if sign > 0 else "-"


def _fit(model: Qwen3ForCausalLM, config: TinyPolicy, progress: Progress) -> float:
    """Supervised training in place; the mean loss of the last 20 steps (nats per response token)."""
    # Muon for the matrices of the layers, AdamW for the rest: the budget is minutes, and Muon needs fewer steps.
    layers = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed_tokens" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed_tokens" in name]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(layers, lr=MUON_LR, weight_decay=0.0, momentum=0.95),
        torch.optim.AdamW(others, lr=ADAMW_LR, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _lr_factor(step, config.train_steps))
        for optimizer in optimizers
    ]
    model.train()
    batches = _batches(config)
    losses: list[float] = []
    for step in range(config.train_steps):
        tokens, labels, positions = next(batches)
        logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        losses.append(loss.item())
        progress("training the tiny policy", (step + 1) / config.train_steps)
    model.eval()
    last = losses[-20:]
    return sum(last) / len(last)


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


def _measure(model: Qwen3ForCausalLM, seed: int, loss: float, seconds: float, num_problems: int = 256) -> TinyReport:
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
        seconds=seconds,
    )
