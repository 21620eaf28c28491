"""Collectives: a latency floor and the bytes that leave one GPU over its slowest link."""

from __future__ import annotations

import numpy as np

from paceline.sim.hardware import Hardware


def link_bytes_per_s(hardware: Hardware, group: int) -> float:
    """One way per GPU: the fast links while the group stays inside one domain, else the network."""
    return hardware.link_bytes_per_s if group <= hardware.link_domain else hardware.network_bytes_per_s


def allreduce_s(hardware: Hardware, group: int, num_bytes: np.ndarray, floor_s: float) -> np.ndarray:
    """Ring all-reduce of `num_bytes` per GPU over `group` GPUs: floor + 2 (G-1)/G bytes / bandwidth; 0 for one GPU."""
    if group == 1:
        return np.zeros_like(num_bytes, dtype=float)
    return floor_s + 2 * (group - 1) / group * num_bytes / link_bytes_per_s(hardware, group)


def alltoall_s(hardware: Hardware, group: int, num_bytes: np.ndarray, floor_s: float) -> np.ndarray:
    """All-to-all in which each GPU holds `num_bytes`: floor + (G-1)/G bytes / bandwidth; 0 for one GPU."""
    if group == 1:
        return np.zeros_like(num_bytes, dtype=float)
    return floor_s + (group - 1) / group * num_bytes / link_bytes_per_s(hardware, group)


def allgather_s(hardware: Hardware, group: int, num_bytes: np.ndarray, floor_s: float) -> np.ndarray:
    """Ring all-gather to `num_bytes` on each of `group` GPUs: floor + (G-1)/G bytes / bandwidth; 0 for one GPU."""
    if group == 1:
        return np.zeros_like(num_bytes, dtype=float)
    return floor_s + (group - 1) / group * num_bytes / link_bytes_per_s(hardware, group)
