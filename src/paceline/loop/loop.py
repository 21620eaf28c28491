"""The training loop. `TrainingRun.run_step` is the method, from top to bottom; the rest is bookkeeping around it.

    prompts -> [publish] -> rollouts -> rewards ┐
                                └-> re-scoring -┴-> advantages -> update -> metrics -> checkpoint

Rewards are scored in worker processes while the policy re-scores the same tokens. The certificate is computed over
every sampled token, before any group is dropped. `max_lag` is 0: every completion was sampled by the weights that it
updates, and `_check_versions` reads that off the completions, for the draft too.
"""

from __future__ import annotations

import math
import signal
import statistics
import threading
from collections import Counter
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

from paceline.algo.advantage import group_advantages
from paceline.config.run import Recipe
from paceline.drafts.length import LengthChooser
from paceline.engine.base import RolloutEngine, Rollouts
from paceline.errors import CheckpointError, EngineError, LosslessError
from paceline.loop.folder import RunFolder
from paceline.loop.length import build_chooser
from paceline.loop.parts import Parts, build_parts
from paceline.loop.scoring import check_ends, score_rollouts
from paceline.loop.seeds import EVALUATION_STEP, rank_noise_seed, request_seed
from paceline.loop.speculation import speculation_metrics
from paceline.observe.progress import RunProgress, Silent
from paceline.observe.stages import StageClock
from paceline.spec.certificate import Certificate, CertificateReport, alarm
from paceline.spec.draft_alarm import DraftEvidence, draft_alarm
from paceline.spec.stats import engine_stats
from paceline.train.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from paceline.train.draft import FeatureReader
from paceline.train.draft_check import first_slot_evidence
from paceline.train.logprobs import LogprobGap, Sample, logprob_gap
from paceline.train.online import DRAFT_STEP_KEYS, DraftStep, OnlineDraft
from paceline.train.policy import PolicyBatch, PolicyUpdate
from paceline.types import Completion, Prompt, Request, RolloutGroup, Versions

DRAFTS_WITHOUT_ACCEPTANCE = 200
"""Drafted tokens in a row of which none was accepted, after which a look-up counts as dead. Losslessness hides a dead
draft: the text stays right and only the speed is lost."""
FROZEN_PROBE_EVERY = 4
"""Steps from one probe of a frozen draft to the next. The alarm needs the probe, and nothing else does: no choice hangs
on what a draft that does not learn is predicted to be worth. Damage shows within a few blocks of one probe."""


class TrainingRun:
    """One run, step by step. `train` is the plain way to use it; a comparison holds two and lets them take turns.

    Example::

        with TrainingRun(recipe) as run:
            while not run.finished:
                metrics = run.run_step()
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        folder: Path | None = None,
        resume: bool = False,
        parts: Parts | None = None,
        progress: RunProgress | None = None,
    ) -> None:
        """Build the parts (or take `parts`), open the run folder (default `recipe.run.folder`), resume if asked to.

        Raises `ConfigError` for a folder that holds another run, or this one without `resume`, and `CheckpointError`
        for a checkpoint that cannot be trusted; before the parts are built, so that nothing expensive has started.
        """
        self.recipe = recipe
        self.progress = progress or Silent()
        self._folder = RunFolder(folder or recipe.run.folder, recipe, resume=resume)
        newest = self._folder.newest_checkpoint()
        checkpoint = None if newest is None else read_checkpoint(newest)
        self.step = 0
        self._certificate = Certificate()
        self._control = Certificate()
        self._evidence = DraftEvidence()
        self._fallen_back = False
        self._drafted_since_accepted = 0
        self._chooser: LengthChooser | None = None
        self.parts = parts or build_parts(recipe, self.progress)
        self.engine: RolloutEngine = self.parts.engine
        try:
            self._chooser = build_chooser(recipe, self.parts, self.progress)
            self._folder.open()
            if checkpoint is not None:
                self._restore(checkpoint)
            elif resume:
                self._folder.start_over()
                self.progress.status(f"No checkpoint in {self._folder.path}: starting from step 0")
        except BaseException:
            self.close()
            raise

    # -- the step ---------------------------------------------------------------------------------------------------

    def run_step(self) -> dict[str, Any]:
        """One optimisation step. Returns its line of metrics.jsonl.

        Raises `LosslessError` when the certificate's alarm fires and `certificate.on_alarm` is `stop`; metrics and a
        checkpoint of the step are then on disk.
        """
        parts = self.parts
        clock = StageClock(self._folder.trace, self.step + 1)
        with clock.stage("data"):
            prompts = parts.prompts.next(self.recipe.algorithm.prompts_per_step)
            requests = self._requests(prompts, self.step)
        with clock.stage("prepare"):
            self.publish()
        with clock.stage("generate"):
            rollouts = self._generate(requests)
            self._check_versions(rollouts)
            check_ends(rollouts.completions, parts.sampling)
            if self._chooser is not None:
                self._chooser.observe(block for completion in rollouts.completions for block in completion.blocks)
            pending = self._submit(requests, rollouts)
        with clock.stage("logprob"):
            samples = [
                Sample(request.prompt.token_ids, completion.token_ids)
                for request, completion in zip(requests, rollouts.completions, strict=True)
            ]
            probe = self._probe(samples)
            logprobs, certificate, control = self._score(samples, rollouts.completions, probe)
            self._judge_draft(probe, rollouts.completions)
        with clock.stage("generate"):
            # Only what is still unfinished after the re-scoring is waited for here.
            groups = _groups(prompts, rollouts.completions, [reward.result() for reward in pending])
        with clock.stage("train"):
            update, draft_step, predicted_alpha = self._train(samples, logprobs, groups, probe)
        self.step += 1
        if parts.history is not None:
            texts = zip(samples, rollouts.completions, strict=True)
            parts.history.add_step(self.step, [(sample.prompt_ids, answer.token_ids) for sample, answer in texts])

        self._certificate.merge(certificate)
        self._control.merge(control)
        report = self._certificate.report()
        accepted, drafted = rollouts.stats.accepted, rollouts.stats.drafted
        self._drafted_since_accepted = 0 if accepted else self._drafted_since_accepted + drafted
        alarms = self._alarms(report, draft_step)
        alarmed = self._is_alarm(report)
        may_fall_back = self.engine.num_draft_tokens > 0 and not self._fallen_back
        falls_back = alarmed and self.recipe.certificate.on_alarm == "fall_back" and may_fall_back
        must_stop = alarmed and self.recipe.certificate.on_alarm != "warn" and not falls_back
        if falls_back:
            alarms.append("fall-back: speculation is off from the next step on, and the certificate starts anew")
        gap = logprob_gap([completion.logprobs for completion in rollouts.completions], logprobs)
        draft = self._draft_metrics(draft_step, predicted_alpha)
        metrics = self._metrics(clock.seconds(), requests, rollouts, groups, update, gap, draft, report, alarms)
        self._folder.metrics.append(metrics)
        self.progress.step(metrics, self.recipe.run.num_steps)
        if falls_back:
            self._fall_back()
        if self.finished or must_stop or self.step % self.recipe.run.checkpoint_every == 0:
            self.save()
        if must_stop:
            raise LosslessError(
                f"The certificate's alarm fired in step {self.step}: {alarms[0]}. The sampled tokens were not drawn "
                f"from the policy's distribution. {self._folder.path} holds the metrics and a checkpoint. "
                + (
                    "It fired without drafts: the engine itself does not sample from the policy."
                    if self.engine.num_draft_tokens == 0 or self._fallen_back
                    else 'Run with draft.method = "none", or set certificate.on_alarm = "warn" or "fall_back".'
                )
            )
        return metrics

    def evaluate(self) -> float:
        """Mean reward on the held-out prompts, one sample each, drawn as in training with the same noise every time.

        Failed scores are left out of the mean (and counted in evaluations.jsonl); NaN when all failed.
        """
        parts = self.parts
        self.publish()
        seed = self.recipe.run.seed
        requests = [Request(p, 0, request_seed(seed, EVALUATION_STEP, p.id, 0, 0)) for p in parts.held_out]
        if self._chooser is not None:
            # A run that is resumed may leave this evaluation out: it must not move the choice of k.
            parts.engine.choose_drafts(self._chooser.usual)
        rollouts = parts.engine.generate(requests, parts.sampling)
        if self._chooser is not None:
            parts.engine.choose_drafts(self._chooser.choose)
        reward = _reward_summary([reward.result() for reward in self._submit(requests, rollouts)])
        self._folder.record_evaluation(self.step, reward)
        return float("nan") if reward["mean"] is None else reward["mean"]

    # -- state ------------------------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        return self.step >= self.recipe.run.num_steps

    @property
    def evaluation_due(self) -> bool:
        """Before the first step, after the last, and every `run.eval_every` steps; once each, also after a resume."""
        every = self.recipe.run.eval_every
        on_schedule = self.step == 0 or self.finished or (every > 0 and self.step % every == 0)
        return on_schedule and self._folder.last_evaluated_step() != self.step

    def policy_state(self) -> dict[str, torch.Tensor]:
        """A copy of the policy's master weights, by Hugging Face name."""
        return {name: tensor.clone() for name, tensor in self.parts.trainer.weights().items()}

    def draft_state(self) -> dict[str, torch.Tensor] | None:
        """A copy of the draft's weights under their exported names; None for a method without weights of its own."""
        return None if self.parts.draft is None else self.parts.draft.weights()

    def publish(self) -> None:
        """Bring the engine to the present weights of policy and draft; every step begins with it."""
        self.parts.publish()

    def save(self) -> Path:
        """Write a checkpoint of the present state and remove those beyond `run.keep_checkpoints`."""
        parts, draft = self.parts, self.parts.draft
        checkpoint = Checkpoint(
            step=self.step,
            versions=Versions(parts.trainer.version, parts.draft_version),
            policy=parts.trainer.weights(),
            draft=None if draft is None else draft.weights(),
            draft_state=None if draft is None else draft.state_dict(),
            optimizer=parts.trainer.state_dict(),
            rng=torch.get_rng_state(),
            data=parts.prompts.state_dict(),
            certificate={
                "run": self._certificate.state_dict(),
                "control": self._control.state_dict(),
                "fallen_back": self._fallen_back,
            },
            draft_evidence=None if draft is None else self._evidence.state_dict(),
            drafted_since_accepted=self._drafted_since_accepted,
            choice_of_k=None if self._chooser is None else self._chooser.state_dict(),
            metrics_bytes=self._folder.metrics.size_bytes,
            history=None if parts.history is None else parts.history.state_dict(),
        )
        with self._folder.trace.span("checkpoint", step=self.step):
            return write_checkpoint(self._folder.checkpoints, checkpoint, self.recipe.run.keep_checkpoints)

    def close(self) -> None:
        """Stop the engine and the reward workers. What is on disk stays."""
        self.parts.close()
        self.progress.close()

    def __enter__(self) -> TrainingRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # -- parts of a step --------------------------------------------------------------------------------------------

    def _requests(self, prompts: Sequence[Prompt], step: int) -> list[Request]:
        """[prompts x group_size], the samples of one prompt next to each other."""
        size, requests = self.recipe.algorithm.group_size, []
        groups_of_prompt: Counter[str] = Counter()
        for prompt in prompts:
            # Where one epoch ends and the next begins a prompt may come twice: its samples are numbered on.
            first = size * groups_of_prompt[prompt.id]
            groups_of_prompt[prompt.id] += 1
            for sample in range(size):
                seed = request_seed(self.recipe.run.seed, step, prompt.id, first + sample, attempt=0)
                requests.append(Request(prompt, sample, seed))
        return requests

    def _submit(self, requests: Sequence[Request], rollouts: Rollouts) -> list[Future[float | None]]:
        """Start scoring; one future per request, None for a score that failed."""
        return [
            self.parts.rewards.submit(self.parts.decode(completion.token_ids), request.prompt)
            for request, completion in zip(requests, rollouts.completions, strict=True)
        ]

    def _check_versions(self, rollouts: Rollouts) -> None:
        trainer, draft_version = self.parts.trainer, self.parts.draft_version
        for completion in rollouts.completions:
            lag = trainer.version - completion.versions.policy
            if not 0 <= lag <= self.recipe.algorithm.max_lag:
                raise EngineError(
                    f"A completion of prompt {completion.prompt_id} was sampled by policy version "
                    f"{completion.versions.policy} while version {trainer.version} is trained: lag {lag}, "
                    f"allowed 0 to {self.recipe.algorithm.max_lag} (algorithm.max_lag). The engine kept old weights: "
                    "go on from the newest checkpoint with --resume."
                )
            if completion.versions.draft != draft_version:
                raise EngineError(
                    f"A completion of prompt {completion.prompt_id} was drafted by draft version "
                    f"{completion.versions.draft}, and the trainer has published version {draft_version} (-1: none). "
                    "The engine kept an old draft: go on from the newest checkpoint with --resume."
                )

    @property
    def _draft(self) -> OnlineDraft | None:
        """The draft while the engine drafts with it."""
        return None if self._fallen_back else self.parts.draft

    def _first_control(self, samples: Sequence[Sample] | Sequence[Request]) -> int:
        """Where the samples of the control begin: behind all others."""
        return len(samples) - self._control_groups * self.recipe.algorithm.group_size

    @property
    def _control_groups(self) -> int:
        """The last groups of a step, sampled without drafts; never all of them."""
        share, groups = self.recipe.certificate.control_share, self.recipe.algorithm.prompts_per_step
        if share == 0 or self._fallen_back or self.engine.num_draft_tokens == 0:
            return 0
        return min(max(1, round(share * groups)), groups - 1)

    def _generate(self, requests: Sequence[Request]) -> Rollouts:
        """One call of the engine; with a control another one, without drafts, for its groups."""
        engine, sampling = self.engine, self.parts.sampling
        first = self._first_control(requests)
        rollouts = engine.generate(requests[:first], sampling)
        if first == len(requests):
            return rollouts
        engine.limit_drafts(0)
        try:
            control = engine.generate(requests[first:], sampling)
        finally:
            engine.limit_drafts(engine.num_draft_tokens)
        return _one_after_the_other(rollouts, control)

    def _score(
        self, samples: Sequence[Sample], completions: Sequence[Completion], probe: FeatureReader | None
    ) -> tuple[list[torch.Tensor], Certificate, Certificate]:
        """Log-probabilities of every sampled token by the policy, and the certificates of this step: run, control."""
        trainer, size = self.parts.trainer, self.recipe.algorithm.group_size
        noise = torch.Generator().manual_seed(rank_noise_seed(self.recipe.run.seed, self.step))
        first = self._first_control(samples)
        scores = score_rollouts(trainer, samples[:first], completions[:first], size, noise, reader=probe)
        if first == len(samples):
            return scores.logprobs, scores.certificate, Certificate()
        control = score_rollouts(trainer, samples[first:], completions[first:], size, noise)
        return [*scores.logprobs, *control.logprobs], scores.certificate, control.certificate

    def _probe(self, samples: Sequence[Sample]) -> FeatureReader | None:
        """A reader of the few rollouts on which the draft is judged; a frozen one has none in most steps."""
        draft = self._draft
        if draft is None or (draft.config.online == "off" and self.step % FROZEN_PROBE_EVERY):
            return None
        return draft.probe(samples[: self._first_control(samples)])

    def _judge_draft(self, probe: FeatureReader | None, completions: Sequence[Completion]) -> None:
        """Compare what the engine drafted on the probe with what the trainer's copy drafts there."""
        if self._draft is None or probe is None:
            return
        self._evidence = self._evidence.after()
        parts = self.parts
        self._evidence.merge(
            first_slot_evidence(
                parts.trainer.model,
                self._draft.head,
                probe.features(),
                [completions[index] for index in sorted(probe.answers)],
                parts.sampling,
            )
        )

    def _train(
        self,
        samples: Sequence[Sample],
        logprobs: Sequence[torch.Tensor],
        groups: Sequence[RolloutGroup],
        probe: FeatureReader | None,
    ) -> tuple[PolicyUpdate, DraftStep | None, float | None]:
        """The updates of policy and draft, and the acceptance length predicted on the probe for the draft before it."""
        trainer, draft = self.parts.trainer, self._draft
        advantages = [a for g in groups for a in group_advantages(g.rewards, self.recipe.algorithm.advantage)]
        batch = PolicyBatch(samples, logprobs, advantages)
        if draft is None:
            return trainer.update(batch), None, None
        predicted_alpha = math.nan if probe is None else draft.predict(probe).alpha
        lesson = draft.lesson(samples, advantages, trainer.version)
        gradient = trainer.backward(batch, lesson)
        # Before the policy's step: what was read and the output layer that it is read with belong to the same weights.
        draft_step = draft.learn(lesson, trainer.version)
        update = trainer.step(gradient)
        return update, draft_step, predicted_alpha if math.isfinite(predicted_alpha) else None

    def _control_report(self) -> CertificateReport | None:
        """Of all that was sampled as a control; after a fall-back that is what the rest of the run is compared with."""
        return self._control.report() if self._control.num_tokens else None

    def _is_alarm(self, report: CertificateReport) -> bool:
        return alarm(report, self.recipe.certificate.delta_nats, control=self._control_report())

    def _fall_back(self) -> None:
        self.engine.limit_drafts(0)
        self._fallen_back = True
        # What was sampled with drafts would keep the alarm up for ever. The control had none: it stays.
        self._certificate = Certificate()
        self._drafted_since_accepted = 0

    def _alarms(self, report: CertificateReport, draft_step: DraftStep | None) -> list[str]:
        alarms = []
        if self._is_alarm(report):
            excess = "unknown" if report.excess_nats is None else f"{report.excess_nats:+.4f}"
            alarms.append(
                f"certificate: log M {report.log_m:.1f}, excess {excess} nats per token over {report.tokens} tokens, "
                f"{report.outside_kept} tokens outside the policy's kept set"
            )
        if draft_step is not None:
            alarms += draft_step.alarms
            found = draft_alarm(self._evidence)
            if found is not None:
                alarms.append(found)
        elif self._drafted_since_accepted >= DRAFTS_WITHOUT_ACCEPTANCE:
            alarms.append(
                f"acceptance: none of the last {self._drafted_since_accepted} drafted tokens was accepted; what is "
                "drafted has nothing to do with what this policy says"
            )
        return alarms

    def _draft_metrics(self, step: DraftStep | None, predicted_alpha: float | None) -> dict[str, Any]:
        """`predicted_alpha` is to be read beside the step's measured alpha; both log M of `check` are of the run."""
        if step is None:
            return dict.fromkeys([*DRAFT_STEP_KEYS, "predicted_alpha", "check"])
        return {**step.metrics(), "predicted_alpha": predicted_alpha, "check": self._evidence.report()}

    def _metrics(
        self,
        stage_s: dict[str, float],
        requests: Sequence[Request],
        rollouts: Rollouts,
        groups: Sequence[RolloutGroup],
        update: PolicyUpdate,
        gap: LogprobGap | None,
        draft: dict[str, Any],
        report: CertificateReport,
        alarms: Sequence[str],
    ) -> dict[str, Any]:
        """The line of metrics.jsonl. `certificate` is that of the run so far; all else is of this step."""
        stats, control = rollouts.stats, self._control_report()
        lengths = [len(completion.token_ids) for completion in rollouts.completions]
        versions = rollouts.completions[0].versions
        return {
            "step": self.step,
            "versions": {"policy": versions.policy, "draft": versions.draft},
            "digests": dict(self.parts.digests),
            "stage_s": stage_s,
            "tokens": {
                "prompt": sum(len(request.prompt.token_ids) for request in requests),
                "response": sum(lengths),
                "drafted": stats.drafted,
                "accepted": stats.accepted,
                "bonus": stats.bonus,
                "recovered": stats.recovered,
            },
            **speculation_metrics(rollouts),
            "choice_of_k": None if self._chooser is None else [choice.to_dict() for choice in self._chooser.explain()],
            "lengths": lengths,
            "reward": _reward_summary([reward for group in groups for reward in group.rewards]),
            "policy": asdict(update),
            "engine_logprobs": None if gap is None else asdict(gap),
            "certificate": {**report.to_dict(), "control": None if control is None else control.to_dict()},
            "draft": draft,
            "alarms": list(alarms),
        }

    def _restore(self, checkpoint: Checkpoint) -> None:
        parts = self.parts
        parts.trainer.load(checkpoint.policy, checkpoint.optimizer, checkpoint.versions.policy)
        parts.restore_draft(checkpoint.draft, checkpoint.draft_state, checkpoint.versions)
        parts.prompts.load_state_dict(checkpoint.data)
        try:
            sums: dict[str, Any] = dict(checkpoint.certificate)
            self._certificate.load_state_dict(sums["run"])
            self._control.load_state_dict(sums["control"])
            self._fallen_back = sums["fallen_back"]
            if checkpoint.draft_evidence is not None:
                self._evidence.load_state_dict(checkpoint.draft_evidence)
            parts.restore_history(checkpoint.history)
            if self._chooser is not None and checkpoint.choice_of_k is not None:
                self._chooser.load_state_dict(checkpoint.choice_of_k)
        except (KeyError, ValueError) as error:
            raise CheckpointError(f"The checkpoint of step {checkpoint.step} cannot be used: {error}") from error
        if self._fallen_back:
            self.engine.limit_drafts(0)
        self._drafted_since_accepted = checkpoint.drafted_since_accepted
        torch.set_rng_state(checkpoint.rng)
        self.step = checkpoint.step
        # Last: a checkpoint that cannot be used costs no line.
        self._folder.metrics.cut(checkpoint.metrics_bytes)
        self._folder.forget_evaluations_after(checkpoint.step)
        self.progress.status(f"Resumed after step {self.step}")


def train(recipe: Recipe, resume: bool = False, progress: RunProgress | None = None) -> Path:
    """A whole run, from the first evaluation to the last. Returns its folder.

    Ctrl-C ends the step that is running, writes a checkpoint and raises `KeyboardInterrupt`; a second one stops at
    once, and the run goes on from its last checkpoint.
    """
    with TrainingRun(recipe, resume=resume, progress=progress) as run, _interruptible(run.progress) as interrupted:
        while True:
            if interrupted.is_set():
                run.save()
                raise KeyboardInterrupt
            if run.evaluation_due:
                run.progress.status("Evaluating on held-out prompts")
                run.progress.status(f"Held-out reward after step {run.step}: {run.evaluate():.3f}")
            if run.finished:
                return run.recipe.run.folder
            run.run_step()


@contextmanager
def _interruptible(progress: RunProgress) -> Generator[threading.Event, None, None]:
    """The first SIGINT sets the event and restores what the second would have done. No effect off the main thread."""
    interrupted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield interrupted
        return
    before = signal.getsignal(signal.SIGINT)

    def handle(number: int, frame: FrameType | None) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, before)
        progress.status("Stopping after this step; press Ctrl-C again to stop at once")

    signal.signal(signal.SIGINT, handle)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


def _one_after_the_other(first: Rollouts, second: Rollouts) -> Rollouts:
    """Two calls as one; the second began when the first had ended."""
    completions = (*first.completions, *second.completions)
    later = [(first.seconds + seconds, live) for seconds, live in second.stats.live_batch]
    stats = engine_stats(
        (block for completion in completions for block in completion.blocks),
        engine_steps=first.stats.engine_steps + second.stats.engine_steps,
        live_batch=[*first.stats.live_batch, *later],
    )
    engine_s = None if first.engine_s is None or second.engine_s is None else first.engine_s + second.engine_s
    return Rollouts(completions, stats, first.seconds + second.seconds, (*first.steps, *second.steps), engine_s)


def _groups(
    prompts: Sequence[Prompt], completions: Sequence[Completion], rewards: Sequence[float | None]
) -> list[RolloutGroup]:
    size = len(completions) // len(prompts)
    return [
        RolloutGroup(prompt, tuple(completions[i * size : (i + 1) * size]), tuple(rewards[i * size : (i + 1) * size]))
        for i, prompt in enumerate(prompts)
    ]


def _reward_summary(rewards: Sequence[float | None]) -> dict[str, Any]:
    """Mean and standard deviation (divisor n) of what was scored; None when nothing was."""
    scored = [reward for reward in rewards if reward is not None]
    return {
        "mean": statistics.fmean(scored) if scored else None,
        "std": statistics.pstdev(scored) if scored else None,
        "n": len(rewards),
        "failed": len(rewards) - len(scored),
    }
