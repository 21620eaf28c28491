"""What one accelerator can do at best. Rates are dense and per GPU; efficiencies live in `efficiency.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from paceline.errors import ConfigError
from paceline.sim.figures import Assumption, Origin, assumptions


@dataclass(frozen=True, slots=True)
class Hardware:
    """One GPU and its links. Example: `hardware("h200").memory_bytes_per_s` is `4.8e12`."""

    name: str
    bf16_flops: float
    """Peak FLOP per second with 16-bit weights."""
    fp8_flops: float
    """Peak FLOP per second with 8-bit weights."""
    memory_bytes_per_s: float
    memory_bytes: float
    link_bytes_per_s: float
    """One way per GPU inside the link domain."""
    link_domain: int
    """GPUs that reach one another over the fast links."""
    network_bytes_per_s: float
    """Per GPU, between link domains."""
    origins: Mapping[str, Origin] = field(default_factory=dict, repr=False, compare=False)

    def assumptions(self) -> list[Assumption]:
        """One line per rate."""
        names = [item.name for item in fields(self) if item.name not in ("name", "origins")]
        return assumptions(f"hardware.{self.name}", {name: getattr(self, name) for name in names}, self.origins)


_DATASHEET = Origin("published", "vendor datasheet, as in the system files of aiconfigurator-core 0.12")
_MLPERF = Origin("published", "system descriptions of MLCommons inference results v4.1 to v6.1")
_RANGE = Origin("assumed", "one value of a published range: memory 7.7-8.0 TB/s, network 50-100 GB/s")
_NETWORK = Origin("published", "400 Gbit/s per GPU (A100: 200 Gbit/s)")
_NO_FP8 = Origin("assumed", "no 8-bit matrix unit: set to the bf16 rate")


def _gpu(
    name: str,
    *,
    bf16: float,
    fp8: float,
    memory_tb_per_s: float,
    memory_gb: float,
    link_gb_per_s: float,
    domain: int,
    network_gb_per_s: float,
    **special: Origin,
) -> Hardware:
    origins = {
        "bf16_flops": _DATASHEET,
        "fp8_flops": _DATASHEET,
        "memory_bytes_per_s": _DATASHEET,
        "memory_bytes": _MLPERF,
        "link_bytes_per_s": _DATASHEET,
        "link_domain": _DATASHEET,
        "network_bytes_per_s": _NETWORK,
    }
    return Hardware(
        name,
        bf16_flops=bf16 * 1e12,
        fp8_flops=fp8 * 1e12,
        memory_bytes_per_s=memory_tb_per_s * 1e12,
        memory_bytes=memory_gb * 1e9,
        link_bytes_per_s=link_gb_per_s * 1e9,
        link_domain=domain,
        network_bytes_per_s=network_gb_per_s * 1e9,
        origins={**origins, **special},
    )


HARDWARE: Mapping[str, Hardware] = {
    gpu.name: gpu
    for gpu in (
        _gpu(
            "gb200",
            bf16=2500,
            fp8=5000,
            memory_tb_per_s=8.0,
            memory_gb=186,
            link_gb_per_s=900,
            domain=72,
            network_gb_per_s=50,
            network_bytes_per_s=_RANGE,
        ),
        _gpu(
            "b200",
            bf16=2250,
            fp8=4500,
            memory_tb_per_s=7.7,
            memory_gb=180,
            link_gb_per_s=900,
            domain=8,
            network_gb_per_s=50,
            memory_bytes_per_s=_RANGE,
            network_bytes_per_s=_RANGE,
        ),
        _gpu(
            "h200",
            bf16=989,
            fp8=1979,
            memory_tb_per_s=4.8,
            memory_gb=141,
            link_gb_per_s=450,
            domain=8,
            network_gb_per_s=50,
        ),
        _gpu(
            "h100",
            bf16=989,
            fp8=1979,
            memory_tb_per_s=3.35,
            memory_gb=80,
            link_gb_per_s=450,
            domain=8,
            network_gb_per_s=50,
        ),
        _gpu(
            "a100",
            bf16=312,
            fp8=312,
            memory_tb_per_s=2.039,
            memory_gb=80,
            link_gb_per_s=300,
            domain=8,
            network_gb_per_s=25,
            fp8_flops=_NO_FP8,
        ),
    )
}
"""The GPUs that are known by name. A CPU is not among them: its rates must be measured (`paceline calibrate`)."""


def hardware(name: str) -> Hardware:
    """The GPU of that name. Raises ConfigError for an unknown one."""
    try:
        return HARDWARE[name]
    except KeyError:
        raise ConfigError(
            f"hardware {name!r} is not in the table ({', '.join(HARDWARE)}). Pick one of them, or measure the machine "
            "with `paceline calibrate` and pass the profile."
        ) from None
