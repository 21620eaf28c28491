"""How much of the peak is reached, and what software adds: the parameters that a calibration may fit.

Two modes. *Ideal*: `IDEAL`, kernels as efficient as published operator tables show, software without overhead.
*Calibrated*: the same with `host_s`, `host_draft_s` and their like fitted to measured seconds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from paceline.errors import ConfigError
from paceline.sim.figures import Assumption, Origin, assumptions


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares are fractions of the peak, 0 to 1. Example: `IDEAL.replace(Origin("assumed", "a guess"), host_s=2e-3)`."""

    bandwidth_share: float = 0.8
    """Of the memory bandwidth."""
    flops_share: float = 0.7
    """Of the peak FLOP per second."""
    op_s: float = 3e-6
    """Constant time of every operator on the device."""
    norm: float = 2.0
    """p of the p-norm that joins compute and memory time: 1 adds them, infinity takes the larger."""
    allreduce_s: float = 8e-6
    """Latency floor of one all-reduce."""
    alltoall_s: float = 12e-6
    """Latency floor of one all-to-all."""
    expert_skew: float = 0.6
    """Popularity of experts falls as rank ** -expert_skew; 0 is uniform."""
    kv_reread: float = 0.0
    """Share of the KV cache read again for every further attention pass of a verify step."""
    tile_rows: int = 0
    """Query rows that share one read of the KV cache; 0: each query position is a pass of its own."""
    sampler_s: float = 0.0
    """Per verified position."""
    host_s: float = 0.0
    """Per iteration."""
    host_spec_s: float = 0.0
    """Per iteration that verifies drafts."""
    host_draft_s: float = 0.0
    """Per forward of the draft."""
    mfu_train: float = 0.30
    """Model FLOP utilisation of the train stage."""
    mfu_logprob: float = 0.25
    """Model FLOP utilisation of the logprob stage."""
    prepare_s: float = 0.0
    """The prepare stage: weights published, caches reset."""
    origins: Mapping[str, Origin] = field(default_factory=lambda: dict(_DEFAULTS), repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("bandwidth_share", "flops_share", "mfu_train", "mfu_logprob"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"efficiency.{name} is {getattr(self, name)}: a share of the peak lies in (0, 1].")
        if self.norm < 1:
            raise ConfigError(
                f"efficiency.norm is {self.norm}: a p-norm needs p >= 1 (1 adds, infinity takes the larger)."
            )
        for name in _NAMES:
            if not getattr(self, name) >= 0:
                raise ConfigError(f"efficiency.{name} is {getattr(self, name)}: give a value that is not negative.")

    def replace(self, origin: Origin, **values: float) -> Efficiency:
        """A copy with other values, which all carry `origin`. Raises ConfigError for an unknown name."""
        unknown = sorted(set(values) - set(_NAMES))
        if unknown:
            raise ConfigError(f"efficiency has no {', '.join(unknown)}. It has {', '.join(_NAMES)}.")
        return dataclasses.replace(self, **values, origins={**self.origins, **dict.fromkeys(values, origin)})

    def assumptions(self) -> list[Assumption]:
        """One line per parameter."""
        return assumptions("efficiency", {name: getattr(self, name) for name in _NAMES}, self.origins)


_NAMES = [item.name for item in fields(Efficiency) if item.name != "origins"]

_SYSTEM_FILE = Origin("published", "system files of aiconfigurator-core 0.12")
_GEMM_TABLES = Origin("fitted", "by eye to the GB200 matrix products of aiconfigurator-core 0.12")
_LATENCY = Origin("assumed", "near the 10 us point to point of the same system files")
_NO_SOFTWARE = Origin("assumed", "ideal software: no overhead")
_UTILISATION = Origin("assumed", "typical of dense training")

_DEFAULTS: Mapping[str, Origin] = {
    "bandwidth_share": _SYSTEM_FILE,
    "op_s": _SYSTEM_FILE,
    "flops_share": _GEMM_TABLES,
    "norm": _GEMM_TABLES,
    "allreduce_s": _LATENCY,
    "alltoall_s": _LATENCY,
    "expert_skew": Origin("fitted", "24 expert operators of aiconfigurator-core 0.12, six values scanned"),
    **dict.fromkeys(
        ("kv_reread", "tile_rows", "sampler_s", "host_s", "host_spec_s", "host_draft_s", "prepare_s"), _NO_SOFTWARE
    ),
    "mfu_train": _UTILISATION,
    "mfu_logprob": _UTILISATION,
}

IDEAL = Efficiency()
"""Kernel efficiencies of published operator tables, software without overhead."""

PERFECT = IDEAL.replace(
    Origin("assumed", "roofline at its peak"), bandwidth_share=1.0, flops_share=1.0, op_s=0.0, norm=math.inf
)
"""The bare roofline. A bound, not a projection."""
