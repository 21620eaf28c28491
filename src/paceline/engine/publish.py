"""What every publish keeps to, whatever the engine: versions that rise, content that belongs to its version, chunks."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from paceline.errors import PublishError
from paceline.types import Versions

Weights: TypeAlias = Mapping[str, torch.Tensor] | Iterator[Mapping[str, torch.Tensor]]
"""All tensors by name: at once, or from an iterator of chunks that hold any of them in any order, each tensor once."""

HISTORY = 8
"""Versions whose checksums are kept, to know the content of an older one."""
_WORDS = 1 << 15
"""64-bit words of a tensor that are multiplied at once: a piece and its multipliers stay in the cache."""


@dataclass(frozen=True, slots=True)
class PublishReport:
    """What one publish brought. Example: `PublishReport(Versions(7, 6), 2, 4096, {...}, "9f86d081884c7d65", 0.02)`."""

    versions: Versions
    """What the engine holds now."""
    tensors: int
    bytes: int
    """Of the tensors as they were published."""
    checksums: Mapping[str, str]
    """Per tensor, 16 hex digits, of the values as they were published; the engine was found to use these."""
    digest: str
    """16 hex digits over names, types, shapes and checksums: equal digests, equal weights."""
    seconds: float
    """Wall clock, checks included."""


def checksum(tensor: torch.Tensor) -> str:
    """16 hex digits of a tensor's bytes, on whatever device it is.

    Each 64-bit word is multiplied by an odd number that belongs to its place, and the products are added, all modulo
    2^64: the order of the additions does not matter, one changed word always shows, and several cancel one another with
    a probability of about 2^-64. Not against an adversary.
    """
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if flat.numel() % 8:
        flat = torch.nn.functional.pad(flat, (0, -flat.numel() % 8))
    elif flat.storage_offset() % 8:
        flat = flat.clone()  # Words start at multiples of eight bytes.
    words = flat.view(torch.int64)
    multipliers = _multipliers(words.device)
    total = 0
    for number, piece in enumerate(words.split(_WORDS)):
        total += int((piece * multipliers[: piece.numel()]).sum()) * (2 * number + 1)
    return f"{total % 2**64:016x}"


_cached_multipliers: dict[torch.device, torch.Tensor] = {}


def _multipliers(device: torch.device) -> torch.Tensor:
    if device not in _cached_multipliers:
        generator = torch.Generator().manual_seed(1)
        drawn = torch.randint(-(2**62), 2**62, (_WORDS,), generator=generator)
        _cached_multipliers[device] = (2 * drawn + 1).to(device)
    return _cached_multipliers[device]


def kind(tensor: torch.Tensor) -> str:
    """Type and shape, as `digest_of` takes them."""
    return f"{tensor.dtype} {tuple(tensor.shape)}"


def weights_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """The `PublishReport.digest` that a publish of these tensors has."""
    return digest_of(
        {name: checksum(tensor) for name, tensor in tensors.items()},
        {name: kind(tensor) for name, tensor in tensors.items()},
    )


def digest_of(checksums: Mapping[str, str], tensors: Mapping[str, str]) -> str:
    """16 hex digits over all tensors; `tensors` gives type and shape of each as text."""
    lines = (f"{name} {tensors[name]} {checksums[name]}\n" for name in sorted(checksums))
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


class PublishLog:
    """The publishes of one kind to one engine, by version."""

    def __init__(self, what: str, version: int) -> None:
        """`what`: policy or draft. `version`: of what the engine holds from its start, whatever that is."""
        self._what = what
        self._version = version
        self._history: deque[tuple[int, Mapping[str, str]]] = deque(maxlen=HISTORY)

    def check_version(self, version: int) -> None:
        """Raises `PublishError` for a version below the last one."""
        if version < self._version:
            raise PublishError(
                f"{self._what} version {version} was published after version {self._version}: versions only rise. If "
                "these are the weights of another run, call forget_versions() first. Nothing was loaded."
            )

    def check_content(self, version: int, checksums: Mapping[str, str]) -> None:
        """Raises `PublishError` for a version that comes back with other tensors, or brings those of an older one."""
        if not self._history:
            return
        last_version, last = self._history[-1]
        for name in sorted(checksums):
            if checksums[name] == last.get(name):
                continue
            if version == last_version:
                raise PublishError(
                    f"{self._what} tensor {name} of version {version} differs from the one that was published as "
                    f"version {version} before: changed weights need a new version."
                )
            for older_version, older in self._history:
                if checksums[name] == older.get(name):
                    raise PublishError(
                        f"{self._what} tensor {name} of version {version} is that of version {older_version}, not of "
                        f"version {last_version} or later: an old chunk or a cached file was sent."
                    )

    def record(self, version: int, checksums: Mapping[str, str]) -> None:
        """The engine holds this now."""
        self._version = version
        if self._history and self._history[-1][0] == version:
            self._history.pop()
        self._history.append((version, dict(checksums)))

    def forget(self) -> None:
        """What comes next is not a continuation: any version may follow, with any content."""
        self._version = -1
        self._history.clear()


def came_twice(what: str, name: str) -> PublishError:
    """For a tensor that a stream holds two times: which of them is meant?"""
    return PublishError(f"{what} publish: {name} came twice. Send each tensor once.")


def not_finite(what: str, name: str) -> PublishError:
    """For a tensor that no engine can sample with."""
    return PublishError(
        f"{what} publish: {name} holds NaN or infinity. Training has diverged: lower train.lr, or "
        "draft.online_lr for a draft."
    )


def gather(what: str, weights: Weights) -> dict[str, torch.Tensor]:
    """All tensors of a stream. Raises `PublishError` for one that came twice or holds NaN or infinity."""
    tensors: dict[str, torch.Tensor] = {}
    for chunk in iter([weights]) if isinstance(weights, Mapping) else weights:
        for name, tensor in chunk.items():
            if name in tensors:
                raise came_twice(what, name)
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise not_finite(what, name)
            tensors[name] = tensor
    return tensors
