"""Weights of a live vLLM model: load new ones, and read back what the engine will really use.

On CPU vLLM packs linear weights when it loads and drops the originals, so a parameter of a live model may have size 0
and says nothing. What a layer uses is therefore read by sending the identity through it: row i of the result is column
i of the weight, each entry one product with 1 and sums with 0, so it is exact.

Names are those of the Hugging Face checkpoint on both sides; `packed_modules_mapping` of the vLLM model says which of
them vLLM fuses. Tensor parallel size 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn

from paceline.errors import PublishError


def effective_weights(model: nn.Module, skip: tuple[str, ...] = ()) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of all that `model` uses, by checkpoint name; fused layers are split again.

    Biases and norms are read as they are; embeddings come without vLLM's padding rows. Modules named in `skip` are left
    out (a draft's embedding that belongs to the policy).
    """
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    packed = cast("Mapping[str, list[str]]", model.packed_modules_mapping)
    for name, module in model.named_modules():
        if name in skip:
            continue
        if isinstance(module, LinearBase):
            prefix, _, leaf = name.rpartition(".")
            parts = packed.get(leaf, [leaf])
            tensors = {"weight": _used_weight(module, module.input_size)}
            if module.bias is not None:
                tensors["bias"] = module.bias.detach()
            for kind, tensor in tensors.items():
                for part, piece in zip(parts, torch.split(tensor, _part_sizes(module, len(parts))), strict=True):
                    yield f"{prefix}.{part}.{kind}" if prefix else f"{part}.{kind}", piece
        elif isinstance(module, ParallelLMHead):
            yield f"{name}.weight", _used_weight(module, module.embedding_dim)[: module.org_vocab_size]
        elif isinstance(module, VocabParallelEmbedding):
            yield f"{name}.weight", module.weight.detach()[: module.org_vocab_size]
        else:
            for leaf, parameter in module.named_parameters(recurse=False):
                yield (f"{name}.{leaf}" if name else leaf), parameter.detach()


@torch.inference_mode()
def _used_weight(module: Any, input_size: int) -> torch.Tensor:
    """[out, in] weight that the layer's own kernel uses."""
    identity = torch.eye(input_size, dtype=module.weight.dtype, device=module.weight.device)
    return module.quant_method.apply(module, identity, None).t()


def _part_sizes(module: Any, num_parts: int) -> list[int]:
    """Rows of each fused part."""
    if num_parts == 1:
        return [module.output_size]
    return list(module.output_sizes)


def check_equal(
    model: nn.Module,
    published: Mapping[str, torch.Tensor],
    what: str,
    *,
    renames: Mapping[str, str] | None = None,
    skip: tuple[str, ...] = (),
) -> int:
    """Compare every tensor the engine uses with the published one, bit for bit in the engine's dtype.

    `renames`: engine prefix -> published prefix, longest first. Returns the number of tensors compared. Raises
    `PublishError` for the first tensor that the engine uses and nobody published, that was published and is not used,
    or that differs.
    """
    unused = set(published)
    compared = 0
    for engine_name, used in effective_weights(model, skip):
        name = engine_name
        for old, new in (renames or {}).items():
            if name.startswith(old):
                name = new + name.removeprefix(old)
                break
        if name not in published:
            raise PublishError(
                f"The engine uses {what} tensor {engine_name} and the publish did not bring it ({name}): "
                "it would keep older weights. Publish the whole state."
            )
        unused.discard(name)
        expected = published[name].detach().to(device=used.device, dtype=used.dtype)
        if expected.shape != used.shape or not torch.equal(expected, used):
            raise PublishError(
                f"{what} tensor {name} in the engine is not the published one{_difference(expected, used)}."
            )
        compared += 1
    if unused:
        names = ", ".join(sorted(unused)[:5])
        raise PublishError(f"The engine does not use these published {what} tensors: {names}.")
    return compared


def _difference(expected: torch.Tensor, used: torch.Tensor) -> str:
    if expected.shape != used.shape:
        return f" (shape {tuple(used.shape)}, published {tuple(expected.shape)})"
    return f" (largest difference {(expected.double() - used.double()).abs().max().item():.3g})"


def check_complete(published: Mapping[str, torch.Tensor], shapes: Mapping[str, torch.Size], what: str) -> None:
    """Before a live model is touched: exactly the known names and shapes, all values finite. Raises `PublishError`."""
    missing = sorted(set(shapes) - set(published))
    extra = sorted(set(published) - set(shapes))
    if missing or extra:
        raise PublishError(
            f"{what} publish: missing tensors {missing[:5]}, unknown tensors {extra[:5]} "
            f"({len(missing)} missing, {len(extra)} unknown). Nothing was loaded."
        )
    for name, tensor in published.items():
        if tensor.shape != shapes[name]:
            raise PublishError(
                f"{what} publish: {name} has shape {tuple(tensor.shape)}, the engine holds {tuple(shapes[name])}. "
                "Nothing was loaded."
            )
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise PublishError(f"{what} publish: {name} holds NaN or infinity. Nothing was loaded.")
