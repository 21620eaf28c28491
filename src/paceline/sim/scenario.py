"""What is projected, in one record: policy, machine, draft and workload. Requests, costs and engines are made from it.

Every projection is made in two modes. *Ideal*: kernels at published efficiencies, software without overhead: what is
possible. *Calibrated*: with costs measured on an engine (`profile`), or else with the software overhead that explains
the published runs of an 8B policy: what to expect from an engine like that one.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Literal, get_args

from paceline.errors import ConfigError
from paceline.sim import hardware as hardware_table
from paceline.sim import models as model_table
from paceline.sim.acceptance import Acceptance
from paceline.sim.cost import BF16, FP8, Cost, Drafter, Eagle3Drafter, MtpDrafter, NoModelDrafter, RooflineCost
from paceline.sim.efficiency import IDEAL, Efficiency
from paceline.sim.figures import Assumption, Origin
from paceline.sim.layout import Layout, num_engines
from paceline.sim.lengths import Lengths, LognormalLengths
from paceline.sim.profile import ProfileCost, load_profile
from paceline.sim.rollout import Engines
from paceline.sim.workload import Requests, make_requests

Mode = Literal["ideal", "calibrated"]
MODES: tuple[Mode, ...] = get_args(Mode)
Method = Literal["none", "eagle3", "mtp", "ngram", "history"]
METHODS: tuple[Method, ...] = get_args(Method)

EIGHT_B_OVERHEAD = IDEAL.replace(
    Origin("fitted", "8 rollout times of Qwen3-8B on 32 GB200 (arXiv:2604.26779, tables 1 and 4), workload assumed"),
    host_s=2.18e-3,
    host_draft_s=1.91e-3,
    kv_reread=5.26,
    tile_rows=16,
)
"""Software overhead of one engine version, as far as published seconds show it; `benchmarks.simulator` fits it anew."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A way of drafting and how well it is accepted. Example: `parse_draft("eagle3@3:3.32")`."""

    method: Method = "none"
    k: int = 0
    """Draft tokens per verify step; 0 for `none` only."""
    acceptance: Acceptance | None = None
    """None for `none`."""

    @property
    def name(self) -> str:
        """eagle3@3, or none."""
        return self.method if self.method == "none" else f"{self.method}@{self.k}"

    def assumptions(self) -> list[Assumption]:
        """The method, and the acceptance with its source."""
        lines = [Assumption("draft", self.name, "assumed", "chosen")]
        if self.acceptance is None:
            return lines
        shown = dataclasses.replace(self.acceptance, conditional=self.acceptance.conditional[: self.k])
        return [*lines, *shown.assumptions()]


def parse_draft(text: str, spread: float = 0.0) -> Draft:
    """`METHOD@K:ALPHA`, alpha being the acceptance length at that k: `eagle3@3:3.32`. `none` stands alone.

    Raises ConfigError for anything else.
    """
    if text == "none":
        return Draft()
    match = re.fullmatch(r"([a-z0-9_]+)@(\d+):([0-9.]+)", text)
    if match is None:
        raise ConfigError(f"{text!r} is no draft: write METHOD@K:ALPHA, for example eagle3@3:3.32, or none")
    method, k = find_method(match[1]), int(match[2])
    if method == "none" or k == 0:
        raise ConfigError(f"{text!r}: without drafts there is no k and no acceptance length: write none")
    first = Acceptance.from_length(float(match[3]), k).conditional[0]
    positions = max(k, 16)  # Not k alone: other k are asked about, too.
    origin = Origin("assumed", f"acceptance length {match[3]} at k = {k}, the same acceptance at every position")
    return Draft(method, k, Acceptance.geometric(first, num_positions=positions, spread=spread, origin=origin))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One point of a projection. Vary it with `replace`.

    Example::

        Scenario(model="qwen3-8b", hardware="gb200", gpus=32, draft=parse_draft("eagle3@3:3.32"))
    """

    model: str = "qwen3-8b"
    """A name of `sim.models.MODELS`, or a folder with a config.json."""
    hardware: str = "gb200"
    gpus: int = 32
    """GPUs that generate."""
    layout: str = "TP1"
    """TP4, EP8, EP32xTP4 or DP2xTP4."""
    precision: Literal["bf16", "fp8"] = "bf16"
    draft: Draft = field(default_factory=lambda: parse_draft("eagle3@3:3.0"))
    rollouts: int = 1024
    """Responses of one step."""
    group_size: int = 1
    """Responses to one prompt; they share its prefill."""
    prompt_tokens: int = 0
    lengths: Lengths = field(default_factory=lambda: LognormalLengths(2500.0, 1.0, 16384))
    max_num_seqs: int = 1024
    """Sequences in flight on one engine."""
    efficiency: Efficiency = EIGHT_B_OVERHEAD
    """Of the calibrated mode, where no profile was measured."""
    profile: Path | None = None
    """What `paceline calibrate` wrote. In the calibrated mode it takes the place of model, hardware and layout."""
    engines: int | None = None
    """With a profile: engines like the measured one. Else derived from `gpus` and `layout`."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("gpus", "rollouts", "max_num_seqs", "engines"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}: give 1 or more")

    def replace(self, **changes: object) -> Scenario:
        """A copy with other values."""
        return dataclasses.replace(self, **changes)  # pyrefly: ignore[bad-argument-type]

    def cost(self, mode: Mode) -> Cost:
        """Seconds of an engine iteration in that mode. Raises ConfigError for names and layouts that do not fit."""
        if self.measured(mode):
            assert self.profile is not None
            return _measured(self.profile)
        return self.roofline(IDEAL if mode == "ideal" else self.efficiency)

    def roofline(self, efficiency: Efficiency) -> RooflineCost:
        """The modelled cost, whatever the mode."""
        return RooflineCost(
            find_hardware(self.hardware),
            find_model(self.model),
            parse_layout(self.layout),
            {"bf16": BF16, "fp8": FP8}[self.precision],
            drafter(self.draft.method),
            efficiency,
        )

    def measured(self, mode: Mode) -> bool:
        """Whether the costs of this mode come from a profile."""
        return mode == "calibrated" and self.profile is not None

    def engines_of(self, mode: Mode) -> Engines:
        """The engines that share the rollouts."""
        if self.measured(mode):
            # As in a replay: on a CPU vLLM shares whole blocks of 128 tokens, and most prompts are shorter.
            return Engines(1 if self.engines is None else self.engines, self.max_num_seqs, prefix_sharing=False)
        roofline = self.roofline(IDEAL)
        count = num_engines(roofline.layout, self.gpus) if self.engines is None else self.engines
        return Engines(count, self.max_num_seqs, kv_capacity_tokens=roofline.kv_capacity_tokens())

    def requests(self, rollouts: int | None = None, seed: int | None = None) -> Requests:
        """The responses of one step; the same for every mode and draft."""
        return make_requests(
            rollouts or self.rollouts,
            self.lengths,
            group_size=self.group_size,
            prompt_tokens=self.prompt_tokens,
            acceptance=self.draft.acceptance,
            seed=self.seed if seed is None else seed,
        )

    def assumptions(self, mode: Mode) -> list[Assumption]:
        """Everything that a projection in this mode rests on."""
        return [
            *self.cost(mode).assumptions(),
            *self.draft.assumptions(),
            *self.lengths.assumptions(),
            Assumption("rollouts", self.rollouts, "assumed", "responses per step"),
            Assumption("group_size", self.group_size, "assumed", "responses per prompt"),
            Assumption("prompt_tokens", self.prompt_tokens, "assumed", "of every prompt"),
            Assumption("seed", self.seed, "assumed", "of lengths and spread"),
            *self.engines_of(mode).assumptions(),
        ]

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "model": self.model,
            "hardware": self.hardware,
            "gpus": self.gpus,
            "layout": self.layout,
            "precision": self.precision,
            "draft": self.draft.name,
            "conditional_acceptance": None
            if self.draft.acceptance is None
            else list(self.draft.acceptance.conditional[: self.draft.k]),
            "rollouts": self.rollouts,
            "group_size": self.group_size,
            "prompt_tokens": self.prompt_tokens,
            "lengths": repr(self.lengths),
            "max_num_seqs": self.max_num_seqs,
            "profile": None if self.profile is None else str(self.profile),
            "seed": self.seed,
        }


def drafter(method: Method) -> Drafter:
    """The cost of drafting that way."""
    match method:
        case "eagle3":
            return Eagle3Drafter()
        case "mtp":
            return MtpDrafter()
        case "none" | "ngram" | "history":
            return NoModelDrafter()


def parse_layout(text: str) -> Layout:
    """Inverse of `Layout.name`. Raises ConfigError for anything else."""
    match = re.fullmatch(r"(?:(EP|DP)(\d+))?x?(?:TP(\d+))?", text)
    if match is None or not text or text.endswith("x"):
        raise ConfigError(f"layout {text!r}: write TP4, EP8, EP32xTP4 or DP2xTP4")
    repeated, tensor = int(match[2] or 1), int(match[3] or 1)
    if match[1] == "EP":
        # Experts lie on as many GPUs as the name says; attention is repeated over them.
        return Layout(max(repeated, tensor), tensor, repeated)
    return Layout(repeated * tensor, tensor)


def find_method(name: str) -> Method:
    """Raises ConfigError with the nearest name for a method whose cost is not known."""
    for known in METHODS:
        if name == known:
            return known
    raise _with_nearest(ConfigError(f"draft method {name!r} is not one of {', '.join(METHODS)}."), name, METHODS)


def find_model(name: str) -> model_table.ModelShape:
    """As `sim.models.model`, in any case of letters. Raises ConfigError with the nearest name."""
    known = name.lower() if name.lower() in model_table.MODELS else name
    try:
        return model_table.model(known)
    except ConfigError as error:
        raise _with_nearest(error, name, model_table.MODELS) from error


def find_hardware(name: str) -> hardware_table.Hardware:
    """As `sim.hardware.hardware`, in any case of letters. Raises ConfigError with the nearest name."""
    try:
        return hardware_table.hardware(name.lower())
    except ConfigError as error:
        raise _with_nearest(error, name, hardware_table.HARDWARE) from error


def _with_nearest(error: ConfigError, name: str, names: Iterable[str]) -> ConfigError:
    nearest = difflib.get_close_matches(name.lower(), list(names), n=1, cutoff=0.4)
    return ConfigError(f"{error} Did you mean {nearest[0]}?") if nearest else error


@lru_cache(maxsize=8)
def _measured(path: Path) -> ProfileCost:
    return ProfileCost(load_profile(path))


def weakest(lines: Iterable[Assumption]) -> str:
    """The mark of a projected figure: that of its weakest input, assumed < fitted < published < measured."""
    marks = {line.mark for line in lines}
    return next(mark for mark in ("assumed", "fitted", "published", "measured") if mark in marks)


def counts_by_mark(lines: Iterable[Assumption]) -> Mapping[str, int]:
    """Inputs of each mark."""
    counts: dict[str, int] = {}
    for line in lines:
        counts[line.mark] = counts.get(line.mark, 0) + 1
    return counts
