"""Every sampling control that a person may ask for: exact with and without drafts, or refused before the run.

A control is exact when the rollouts follow the policy's distribution with the control applied at every position, and
the trainer re-scores them under that same distribution. What paceline's `Sampling` record does not carry cannot be
re-scored and is refused by name, whatever an engine could do with it.

Engines: `reference`, and `vllm` 0.32. The table in docs/sampling.md is `as_markdown()`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Verdict = Literal["exact", "refused"]


@dataclass(frozen=True, slots=True)
class Control:
    """One control. Example: `Control("top-k", "the policy's law includes it", settings={"top_k": "5"})`."""

    name: str
    reason: str
    """Why it is exact, or why it is refused and what to do instead."""
    settings: dict[str, str] = field(default_factory=dict)
    """[sampling] key -> a value in TOML that uses it; empty: not set in [sampling]."""
    refused_keys: tuple[str, ...] = ()
    """Names under which people know it, refused as [sampling] keys with `reason`."""
    reference: Verdict = "exact"
    reference_drafts: Verdict = "exact"
    """The reference engine with speculation."""
    vllm: Verdict = "exact"
    vllm_drafts: Verdict = "exact"
    """vLLM 0.32 with speculation."""


def _refused(name: str, keys: tuple[str, ...], reason: str) -> Control:
    return Control(name, reason, {}, keys, "refused", "refused", "refused", "refused")


_NOT_RESCORED = "the trainer scores tokens without it, so they would not be samples of the policy that is updated"

CONTROLS: tuple[Control, ...] = (
    Control("temperature", "one number for engine, certificate and trainer", {"temperature": "0.6"}),
    Control(
        "temperature 0",
        "greedy rollouts of a group are all alike and teach nothing; the engines themselves are exact at 0",
        {"temperature": "0.0"},
        reference="refused",
        reference_drafts="refused",
        vllm="refused",
        vllm_drafts="refused",
    ),
    Control("top-k", "applied at every verify position, and in the trainer", {"top_k": "5"}),
    Control("top-p", "applied at every verify position, and in the trainer", {"top_p": "0.9"}),
    Control(
        "min-p",
        "vLLM applies it to bonus tokens only (vllm-project/vllm#42744), so with drafts it is refused there",
        {"min_p": "0.1"},
        vllm_drafts="refused",
    ),
    Control("max tokens", "a block is cut at the limit; no draft token behind it counts", {"max_tokens": "7"}),
    Control(
        "stop tokens",
        "those of the policy's generation config and tokenizer; a block is cut at the first one. Set them in the "
        "policy folder's generation_config.json",
        refused_keys=("stop_token_ids", "eos_token_id", "ignore_eos"),
    ),
    Control(
        "per-request seeds",
        "derived from run.seed, step, prompt, sample and attempt, so that no two requests share noise. Set run.seed",
        refused_keys=("seed", "seeds"),
    ),
    _refused("repetition penalty", ("repetition_penalty",), f"{_NOT_RESCORED}. Leave it out"),
    _refused("presence penalty", ("presence_penalty",), f"{_NOT_RESCORED}. Leave it out"),
    _refused("frequency penalty", ("frequency_penalty",), f"{_NOT_RESCORED}. Leave it out"),
    _refused("min tokens", ("min_tokens",), f"{_NOT_RESCORED}. Leave it out"),
    _refused(
        "stop strings",
        ("stop", "stop_strings", "include_stop_str_in_output"),
        "rollouts are token ids: a string may end inside a token, and what is cut off would still be trained on. Use a "
        "stop token",
    ),
    _refused("bad words", ("bad_words", "bad_words_ids", "suppress_tokens"), f"{_NOT_RESCORED}. Leave it out"),
    _refused(
        "logit bias",
        ("logit_bias", "allowed_token_ids"),
        f"vLLM has no logit bias with speculation, and {_NOT_RESCORED}. Leave it out",
    ),
    _refused(
        "structured output",
        ("structured_outputs", "guided_decoding", "guided_json", "grammar"),
        f"{_NOT_RESCORED}. Leave it out, and let the reward judge the form",
    ),
    _refused(
        "several samples per request", ("n", "best_of"), "a group is one request per sample. Set algorithm.group_size"
    ),
)


def refusal(key: str) -> str | None:
    """Why [sampling] has no such key although it names a control; None when it names none."""
    return next((f"{control.name}: {control.reason}" for control in CONTROLS if key in control.refused_keys), None)


def as_markdown() -> str:
    """The table of docs/sampling.md, without a newline at its end."""
    lines = [
        "| control | `[sampling]` | reference | reference, drafts | vLLM 0.32 | vLLM 0.32, drafts | why |",
        "|---|---|---|---|---|---|---|",
    ]
    for control in CONTROLS:
        keys = ", ".join(f"`{key} = {value}`" for key, value in control.settings.items())
        names = ", ".join(f"not `{key}`" for key in control.refused_keys)
        verdicts = (control.reference, control.reference_drafts, control.vllm, control.vllm_drafts)
        cells = [control.name, keys or names, *verdicts, control.reason]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
