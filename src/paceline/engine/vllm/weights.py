"""Weights of a live vLLM model: what was published, and what the engine will really use.

On CPU vLLM packs linear weights when it loads and drops the originals, so a parameter of a live model may have size 0
and says nothing. What such a layer uses is measured: a few random vectors go through its own kernel, and the products
are compared with those of the published tensor. What vLLM leaves readable is compared by checksum, bit for bit.

**What the products can miss.** The entries of the vectors are whole numbers of magnitude 64 to 127 with random signs,
drawn anew for every publish, and a product is compared within the rounding of a float32 sum (`TOLERANCE`), in bfloat16
too: there the expected product is subtracted inside the kernel, before it rounds its result. In a row of length n and
root mean square r a change that adds up to less than about 1e-6 n r therefore passes: 1e-3 r at n = 1,000, and twice
that in bfloat16, where the last bit of a weight is 4e-3 to 8e-3 of its own size. Two columns that changed places pass
one vector with probability 1/128 at most, and all `NUM_PROBES` with 5e-7. A layer that was not packed again at all is
found without any product: its kernel is the object it was.

Names are those of the Hugging Face checkpoint on both sides; `packed_modules_mapping` of the vLLM model says which of
them vLLM fuses. Tensor parallel size 1.

Legend: I inputs of a layer, O outputs, P probes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from paceline.engine.publish import came_twice, checksum, digest_of, not_finite
from paceline.errors import PublishError

NUM_PROBES = 3
TOLERANCE = 8.0
"""Times the rounding that a float32 sum of n terms is expected to make, 2^-24 sqrt(n) times its size."""
_ROWS_ELEMENTS = 1 << 18
"""Weights converted to float64 at once, so that the copy stays in the cache."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Spec:
    """What a tensor of a checkpoint looks like."""

    shape: torch.Size
    dtype: torch.dtype | None
    """None: a floating-point one, which may come in the engine's dtype or as a float32 master."""


@dataclass(frozen=True, slots=True)
class Products:
    """[O, P] of a weight with the probes, and [O, 1] by how much a right kernel may deviate. float64."""

    values_OP: torch.Tensor
    allowed_O1: torch.Tensor


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What is remembered of a published tensor until the engine is looked at."""

    shape: torch.Size
    checksum: str | None
    """Of the values in the engine's dtype; None for a tensor that the engine does not leave readable."""
    products: Products | None
    """None for a tensor that it does."""


class Probes:
    """The vectors of one publish."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._vectors: dict[tuple[int, torch.device], torch.Tensor] = {}

    def of(self, size: int, device: torch.device) -> torch.Tensor:
        """[I, P] float64 for inputs of `size`."""
        key = (size, device)
        if key not in self._vectors:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + size)
            drawn = torch.randint(64, 128, (size, NUM_PROBES), generator=generator)
            signs = 2 * torch.randint(0, 2, (size, NUM_PROBES), generator=generator) - 1
            self._vectors[key] = (drawn * signs).double().to(device)
        return self._vectors[key]

    def products(self, weight_OI: torch.Tensor) -> Products:
        """Of a weight, row by row in float64."""
        size = weight_OI.shape[1]
        probes_PI = self.of(size, weight_OI.device).t()
        values, norms = [], []
        for piece in weight_OI.split(max(1, _ROWS_ELEMENTS // size)):
            rows = piece.double()
            values.append((probes_PI @ rows.t()).t())
            norms.append(torch.linalg.vector_norm(rows, dim=1, keepdim=True))
        # A random walk of n steps: its size is that of a row's norm times a probe's entry.
        allowed_O1 = torch.cat(norms) * (127.0 * TOLERANCE * 2.0**-24 * size**0.5)
        return Products(torch.cat(values), allowed_O1)


class Published:
    """The tensors of one publish as they come: each is checked against its `Spec` and remembered by a `Fingerprint`."""

    def __init__(
        self,
        what: str,
        specs: Mapping[str, Spec],
        dtype: torch.dtype,
        probes: Probes,
        packed_names: frozenset[str] = frozenset(),
    ) -> None:
        """`dtype` is the engine's; `packed_names` are the tensors that it does not leave readable."""
        self.what = what
        self.probes = probes
        self.fingerprints: dict[str, Fingerprint] = {}
        self.checksums: dict[str, str] = {}
        self.num_bytes = 0
        self._specs = specs
        self._dtype = dtype
        self._packed_names = packed_names
        self._is_tied = HEAD not in specs and EMBEDDING in specs
        self._kinds: dict[str, str] = {}
        self._error: Exception | None = None

    def take(self, chunk: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor in the engine's dtype) of one chunk, each checked before it is handed on.

        A tied policy's lm_head may come beside its embedding; it is compared in the end and not handed on. Raises
        `PublishError` that names the first tensor that is unknown, comes twice, or is of a wrong shape or dtype, or
        holds NaN or infinity.
        """
        for name, tensor in chunk.items():
            is_alias = self._is_tied and name == HEAD
            spec = self._specs.get(EMBEDDING if is_alias else name)
            if spec is None:
                raise PublishError(
                    f"{self.what} publish: unknown tensor {name}. Send the checkpoint's tensors under their own names."
                )
            if name in self.checksums:
                raise came_twice(self.what, name)
            if tensor.shape != spec.shape:
                raise PublishError(
                    f"{self.what} publish: {name} has shape {tuple(tensor.shape)}, the engine holds "
                    f"{tuple(spec.shape)}."
                )
            allowed = (self._dtype, torch.float32) if spec.dtype is None else (spec.dtype,)
            if tensor.dtype not in allowed:
                raise PublishError(
                    f"{self.what} publish: {name} comes as {tensor.dtype}; the engine takes "
                    f"{' or '.join(str(dtype) for dtype in dict.fromkeys(allowed))}."
                )
            cast_tensor = tensor.detach() if spec.dtype is not None else tensor.detach().to(self._dtype)
            self.checksums[name] = checksum(tensor)
            self.num_bytes += tensor.numel() * tensor.element_size()
            self._kinds[name] = f"{tensor.dtype} {tuple(tensor.shape)}"
            if is_alias:
                continue
            fingerprint = self._fingerprint(name, tensor, cast_tensor)
            self.fingerprints[name] = fingerprint
            if self._is_tied and name == EMBEDDING:
                self.fingerprints[HEAD] = fingerprint
            yield name, cast_tensor

    def stream(self, chunks: Iterable[Mapping[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """`take` of every chunk. An error ends the stream, and `finish` raises it.

        vLLM's loader must reach its own end: left in the middle it keeps the half of a layer that had come, and counts
        it into the next load.
        """
        try:
            for chunk in chunks:
                yield from self.take(chunk)
        except Exception as error:  # noqa: BLE001 (a transport may fail in any way; finish() raises it again)
            self._error = error

    def finish(self) -> None:
        """After the last chunk: raises what went wrong on the way, or `PublishError` that names what is missing."""
        if self._error is not None:
            raise self._error
        missing = sorted(set(self._specs) - set(self.checksums))
        if missing:
            raise PublishError(f"{self.what} publish: missing tensors {missing[:5]} ({len(missing)} in all).")
        if self._is_tied and self.checksums.get(HEAD, self.checksums[EMBEDDING]) != self.checksums[EMBEDDING]:
            raise PublishError(f"{self.what} publish: {HEAD} differs from {EMBEDDING}, and the engine ties them.")

    def digest(self) -> str:
        return digest_of(self.checksums, self._kinds)

    def _fingerprint(self, name: str, tensor: torch.Tensor, cast_tensor: torch.Tensor) -> Fingerprint:
        is_tied_embedding = self._is_tied and name == EMBEDDING
        is_packed = name in self._packed_names or (is_tied_embedding and HEAD in self._packed_names)
        products = self.probes.products(cast_tensor) if is_packed else None
        # A sum over a row is finite only if the row is.
        seen = cast_tensor if products is None else products.values_OP
        if cast_tensor.is_floating_point() and not bool(torch.isfinite(seen).all()):
            raise not_finite(self.what, name)
        readable = None
        if not is_packed or is_tied_embedding:
            same = cast_tensor.dtype == tensor.dtype
            readable = self.checksums[name] if same else checksum(cast_tensor)
        return Fingerprint(tensor.shape, readable, products)


@dataclass(frozen=True, slots=True)
class _Part:
    """Where the engine keeps one tensor of a checkpoint."""

    name: str
    """In the engine's words, fused layers split."""
    module: Any
    leaf: str
    rows: slice
    is_packed: bool


def _parts(model: nn.Module, skip: tuple[str, ...], packed: Mapping[str, list[str]] | None) -> Iterator[list[_Part]]:
    """Of each module in turn. Embeddings come without vLLM's padding rows."""
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    packed = packed or cast("Mapping[str, list[str]]", model.packed_modules_mapping)
    for name, module in model.named_modules():
        if name in skip:
            continue
        is_packed = _kernel(module) is not None
        if isinstance(module, LinearBase):
            prefix, _, leaf = name.rpartition(".")
            names = packed.get(leaf, [leaf])
            sizes = [module.output_size] if len(names) == 1 else list(cast("Any", module).output_sizes)
            for kind in ("weight", "bias") if module.bias is not None else ("weight",):
                parts, start = [], 0
                for part, size in zip(names, sizes, strict=True):
                    full = f"{prefix}.{part}.{kind}" if prefix else f"{part}.{kind}"
                    parts.append(_Part(full, module, kind, slice(start, start + size), is_packed and kind == "weight"))
                    start += size
                yield parts
        elif isinstance(module, VocabParallelEmbedding):
            # Looking up reads the weight itself; only a head multiplies with the packed copy.
            is_packed = is_packed and isinstance(module, ParallelLMHead)
            yield [_Part(f"{name}.weight", module, "weight", slice(0, module.org_vocab_size), is_packed)]
        else:
            yield [
                _Part(f"{name}.{leaf}" if name else leaf, module, leaf, slice(None), False)
                for leaf, _ in module.named_parameters(recurse=False)
            ]


def _kernel(module: Any) -> Any:
    """What vLLM built on CPU from a packed weight (`dispatch_cpu_unquantized_gemm`, 0.32.0); None: it uses `weight`."""
    kernel = getattr(module, "cpu_linear", None)
    return None if kernel is nn.functional.linear else kernel


def packed_names(
    model: nn.Module,
    *,
    renames: Mapping[str, str] | None = None,
    skip: tuple[str, ...] = (),
    packed: Mapping[str, list[str]] | None = None,
) -> frozenset[str]:
    """Published names of the tensors that the live model does not leave readable."""
    return frozenset(
        _published_name(part.name, renames or {})
        for parts in _parts(model, skip, packed)
        for part in parts
        if part.is_packed
    )


Kernels = Mapping[str, "weakref.ref[Any]"]


def kernels(model: nn.Module) -> Kernels:
    """The packed kernels of a live model by module, to be compared after a publish. Keeps none of them alive."""
    return {
        name: weakref.ref(kernel) for name, module in model.named_modules() if (kernel := _kernel(module)) is not None
    }


def check_used(
    model: nn.Module,
    fingerprints: Mapping[str, Fingerprint],
    probes: Probes,
    what: str,
    *,
    renames: Mapping[str, str] | None = None,
    skip: tuple[str, ...] = (),
    packed: Mapping[str, list[str]] | None = None,
    before: Kernels | None = None,
) -> None:
    """Compare every tensor that the engine uses with the published one.

    Args:
        renames: engine prefix -> published prefix, longest first.
        skip: modules left out (a draft's embedding that belongs to the policy).
        packed: module -> what vLLM fuses in it, for a model that does not say so itself.
        before: `kernels` from before the publish; None: nothing was published, the engine has just started.

    Raises `PublishError` for the first tensor that the engine uses and nobody published, that was published and is not
    used, or that differs.
    """
    old = {id(kernel) for reference in (before or {}).values() if (kernel := reference()) is not None}
    unused = set(fingerprints)
    for parts in _parts(model, skip, packed):
        names = [_published_name(part.name, renames or {}) for part in parts]
        for part, name in zip(parts, names, strict=True):
            if name not in fingerprints:
                raise PublishError(
                    f"The engine uses {what} tensor {part.name} and the publish did not bring it ({name}): "
                    "it would keep older weights. Publish the whole state."
                )
        unused.difference_update(names)
        if parts and parts[0].is_packed:
            module = parts[0].module
            if id(_kernel(module)) in old:
                raise PublishError(
                    f"{what} tensor {names[0]} in the engine is not the published one: its layer still computes with "
                    "the weights of an earlier publish."
                )
            _check_packed(module, names, [fingerprints[name] for name in names], probes, what)
            continue
        for part, name in zip(parts, names, strict=True):
            used = getattr(part.module, part.leaf).detach()[part.rows]
            expected = fingerprints[name]
            if part.leaf == "bias" and used.dtype == torch.float32:
                # Packing a 16-bit weight for AMX tiles has widened the bias beside it; back again nothing is lost.
                used = used.to(part.module.weight.dtype)
            if used.shape != expected.shape or checksum(used) != expected.checksum:
                raise PublishError(f"{what} tensor {name} in the engine is not the published one.")
    if unused:
        names = sorted(unused)[:5]
        raise PublishError(f"The engine does not use these published {what} tensors: {', '.join(names)}.")


@torch.inference_mode()
def _check_packed(module: Any, names: list[str], fingerprints: list[Fingerprint], probes: Probes, what: str) -> None:
    """Send the probes through the layer's own kernel."""
    products = [fingerprint.products for fingerprint in fingerprints]
    assert all(part is not None for part in products)
    expected_OP = torch.cat([part.values_OP for part in products if part is not None])
    allowed_O1 = torch.cat([part.allowed_O1 for part in products if part is not None])
    size = fingerprints[0].shape[1]
    deviation_OP, rounding_OP = _deviation(module, probes.of(size, expected_OP.device), expected_OP)
    is_wrong_O = ~(deviation_OP.abs() <= allowed_O1 + rounding_OP).all(1)
    if not bool(is_wrong_O.any()):
        return
    row = int(is_wrong_O.nonzero()[0])
    for name, fingerprint in zip(names, fingerprints, strict=True):
        if row < fingerprint.shape[0]:
            raise PublishError(
                f"{what} tensor {name} in the engine is not the published one: row {row} differs, and "
                f"{int(is_wrong_O.sum())} of {len(is_wrong_O)} rows of its layer."
            )
        row -= fingerprint.shape[0]


def _deviation(module: Any, probes_IP: torch.Tensor, expected_OP: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[O, P] products of the layer's kernel minus `expected_OP`, and what rounding of its result can change in them.

    The layer's padding rows are left out.
    """
    num_outputs, dtype = len(expected_OP), module.weight.dtype
    if dtype == torch.float32:
        found_PO = module.quant_method.apply(module, probes_IP.t().float().contiguous(), None)
        return found_PO[:, :num_outputs].t().double() - expected_OP, torch.zeros_like(expected_OP)
    # The kernel adds up in float32 and rounds its result to few bits. With the expected product as a negative bias the
    # result is small, and so is what rounding takes from it.
    padding = getattr(module, "num_embeddings_padded", num_outputs) - num_outputs
    bias_OP = expected_OP.to(_bias_dtype(num_outputs + padding, len(probes_IP), dtype))
    columns = []
    for probe_I, bias_O in zip(probes_IP.t(), bias_OP.t(), strict=True):
        bias_O = nn.functional.pad(-bias_O, (0, padding))
        found_1O = module.quant_method.apply(module, probe_I.to(dtype)[None], bias_O)
        columns.append(found_1O[0, :num_outputs].double())
    left_OP = expected_OP - bias_OP.double()
    return torch.stack(columns, dim=1) - left_OP, left_OP.abs() * (2.0 * torch.finfo(dtype).eps)


def _bias_dtype(num_outputs: int, num_inputs: int, dtype: torch.dtype) -> torch.dtype:
    """What a packed layer's kernel reads a bias as: that for small weights in AMX tiles adds it up in float32."""
    from vllm.model_executor.layers.utils import check_cpu_sgl_kernel

    return torch.float32 if check_cpu_sgl_kernel(num_outputs, num_inputs, dtype) else dtype


def _published_name(name: str, renames: Mapping[str, str]) -> str:
    for old, new in renames.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name
