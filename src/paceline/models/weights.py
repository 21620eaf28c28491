"""Names and tensors of a policy, the same for the trainer that sends them and the engine that receives them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from paceline.errors import PublishError


def policy_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor that makes up `model`, by its Hugging Face name, each once; views, not copies.

    A tied tensor goes under its first name only (`model.embed_tokens.weight`, never `lm_head.weight` beside it), as in
    a saved checkpoint: two names for one tensor are how a copy goes stale.
    """
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    names_of_parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, buffer in model.state_dict().items():
        if name not in names_of_parameters:
            tensors[name] = buffer
    return tensors


def publish_tensors(live: Mapping[str, torch.Tensor], published: Mapping[str, torch.Tensor], what: str) -> None:
    """Copy `published` into the tensors of `live` and check every copy.

    A published tensor has the live one's dtype, or is a float32 master of it. Raises `PublishError` that names the
    first tensor that is missing, extra, or of another shape or dtype (nothing is changed then), or whose copy differs.
    """
    for name in sorted(live.keys() | published.keys()):
        if name not in published:
            raise PublishError(
                f"The published {what} lacks the tensor {name}: publish all of them, under their own names."
            )
        if name not in live:
            raise PublishError(f"The published {what} has a tensor {name} that the engine does not know.")
        source, target = published[name], live[name]
        if source.shape != target.shape:
            raise PublishError(
                f"The published {what} has {name} of shape {tuple(source.shape)}, the engine {tuple(target.shape)}."
            )
        if (
            source.dtype not in (target.dtype, torch.float32)
            or source.is_floating_point() != target.is_floating_point()
        ):
            raise PublishError(
                f"The published {what} has {name} as {source.dtype}; the engine takes {target.dtype}, or float32."
            )
    with torch.no_grad():
        for name, target in live.items():
            target.copy_(published[name])
    for name, target in live.items():
        if not torch.equal(target, published[name].to(target)):
            raise PublishError(f"After publishing the {what}, {name} in the engine differs from what was sent (NaN?).")
