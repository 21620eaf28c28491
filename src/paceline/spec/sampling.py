"""Logits -> probabilities: the only definition, shared by the reference engine, the trainer and the tests.

Shapes: N rows (any leading dimensions), V vocabulary.

The order is that of vLLM 0.32 (`v1/sample/sampler.py`, `v1/worker/gpu/sample/sampler.py`): temperature, then min-p,
then top-k, then top-p. Min-p and top-k commute, because both keep a set of most likely tokens and min-p compares
ratios; min-p and top-p do not: top-p measures its mass after renormalising over what min-p and top-k have kept.

Ties at the edge of a filter are kept whole, so that the law does not depend on how tokens are numbered. vLLM's torch
path (its CPU backend) does so for top-k; for top-p it cuts a tie wherever its unstable sort happens to put it, and its
Triton kernel keeps the lowest ids for both. So where logits tie exactly, vLLM may keep a subset of what is kept here,
never a token that is not. vLLM's rejection sampler leaves min-p out at verify positions: an engine that speculates
there must refuse `min_p > 0`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.errors import ConfigError, EngineError
from paceline.types import Sampling

GREEDY_BELOW = 1e-5
"""Temperatures below this mean greedy: dividing by them overflows float32 (vLLM draws the same line)."""


class LogitsError(EngineError, ValueError):
    """A row of logits that is no distribution: NaN, +inf, or everything masked."""


def log_probs(
    logits: torch.Tensor,
    temperature: float | torch.Tensor = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> torch.Tensor:
    """Log-probabilities [..., V] of the policy's sampling distribution.

    Args:
        logits: [..., V]. Computed in float32, or in float64 when given so; -inf masks a token.
        temperature: one number, or a tensor that broadcasts over the leading dimensions. Rows at 0 are one-hot on the
            most likely token (the lowest id among ties) and no filter applies to them.
        top_k: keep the k most likely tokens and all that tie with the k-th; 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose mass reaches `top_p`, and all that tie with the least
            likely of them.
        min_p: keep tokens with at least `min_p` times the probability of the most likely one.

    Returns:
        Normalised over the kept set; -inf outside. Differentiable in `logits`, which are never changed.

    Raises:
        LogitsError: a row has NaN, +inf or no finite entry; the message names the row.
        ConfigError: a parameter is out of range.
    """
    _check_parameters(temperature, top_k, top_p, min_p)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    _check_rows(logits)
    if not isinstance(temperature, torch.Tensor):
        if temperature < GREEDY_BELOW:
            return _greedy_log_probs(logits)
        return _filtered_log_probs(logits / temperature, top_k, top_p, min_p)
    temperature = temperature.to(logits).expand(logits.shape[:-1]).unsqueeze(-1)
    is_greedy = temperature < GREEDY_BELOW
    scaled = logits / torch.where(is_greedy, 1.0, temperature)
    return torch.where(is_greedy, _greedy_log_probs(logits), _filtered_log_probs(scaled, top_k, top_p, min_p))


def policy_log_probs(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """`log_probs` with the parameters of a `Sampling` record. [..., V] -> [..., V]."""
    return log_probs(logits, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)


def policy_probs(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The policy's sampling distribution [..., V], each row sums to one."""
    return policy_log_probs(logits, sampling).exp()


def draw_uniforms(
    generators: torch.Generator | Sequence[torch.Generator], num_rows: int, num_columns: int, device: str = "cpu"
) -> torch.Tensor:
    """Uniform noise [num_rows, num_columns] in [0, 1), float64.

    float64 because a float32 uniform has 24 bits: tokens with less than 6e-8 of the mass would be drawn never or too
    often. With one generator per row, a row's noise does not depend on who shares its batch.
    """
    if isinstance(generators, torch.Generator):
        shape = (num_rows, num_columns)
        return torch.rand(shape, generator=generators, dtype=torch.float64, device=generators.device).to(device)
    if len(generators) != num_rows:
        raise ValueError(f"{len(generators)} generators for {num_rows} rows: pass one per row, or a single one.")
    rows = [
        torch.rand(num_columns, generator=generator, dtype=torch.float64, device=generator.device)
        for generator in generators
    ]
    return torch.stack(rows).to(device) if rows else torch.empty(0, num_columns, dtype=torch.float64, device=device)


def sample_with(probs_NV: torch.Tensor, uniforms_N: torch.Tensor) -> torch.Tensor:
    """Token ids [N] by inverse CDF from given noise [N] in [0, 1). Rows need not be normalised.

    A token of zero mass is never drawn, whatever the noise. Raises ValueError for a row without mass.
    """
    cdf_NV = probs_NV.double().cumsum(-1)
    mass_N1 = cdf_NV[:, -1:].contiguous()
    if not bool((mass_N1 > 0).all()):
        row = int((~(mass_N1 > 0)).flatten().nonzero()[0])
        raise ValueError(f"row {row} of the probabilities has no mass (or NaN): nothing can be drawn from it.")
    below_mass_N1 = torch.nextafter(mass_N1, torch.zeros_like(mass_N1))
    # Noise of exactly 1 breaks the contract, but an id outside the vocabulary would crash far from here.
    level_N1 = torch.minimum(uniforms_N.double().unsqueeze(-1) * mass_N1, below_mass_N1)
    return torch.searchsorted(cdf_NV, level_N1, right=True).squeeze(-1)


def sample(probs_NV: torch.Tensor, generators: torch.Generator | Sequence[torch.Generator]) -> torch.Tensor:
    """Token ids [N], one per row of `probs_NV`, from explicit generators (one in all, or one per row)."""
    uniforms_N1 = draw_uniforms(generators, probs_NV.shape[0], 1, device=str(probs_NV.device))
    return sample_with(probs_NV, uniforms_N1.squeeze(-1))


def _greedy_log_probs(logits: torch.Tensor) -> torch.Tensor:
    one_hot = torch.full_like(logits, -torch.inf)
    return one_hot.scatter(-1, logits.argmax(-1, keepdim=True), 0.0)


def _filtered_log_probs(scaled_logits: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Filters, then the one normalisation. `scaled_logits` are those after temperature."""
    kept = scaled_logits
    if min_p > 0.0:
        probs = kept.softmax(-1)
        kept = kept.masked_fill(probs < min_p * probs.amax(-1, keepdim=True), -torch.inf)
    if 0 < top_k < kept.shape[-1]:
        kth = kept.topk(top_k, dim=-1).values[..., -1:]
        kept = kept.masked_fill(kept < kth, -torch.inf)
    if top_p < 1.0:
        ascending = kept.sort(dim=-1).values
        # "Mass up to and including me is at most 1 - top_p" says that those above me already reach top_p.
        cut = ascending.softmax(-1).cumsum(-1) <= 1.0 - top_p
        cut[..., -1] = False
        edge = ascending.masked_fill(cut, torch.inf).amin(-1, keepdim=True)
        kept = kept.masked_fill(kept < edge, -torch.inf)
    return kept.log_softmax(-1)


def _check_rows(logits: torch.Tensor) -> None:
    """One reduction finds all three: NaN spreads, +inf and "all masked" give an infinite maximum."""
    bad = ~logits.detach().amax(-1).isfinite()
    if bool(bad.any()):
        row = tuple(bad.nonzero()[0].tolist())
        name = row[0] if len(row) == 1 else row
        raise LogitsError(
            f"row {name} of logits {tuple(logits.shape)} is no distribution (NaN, +inf, or all masked); "
            f"{int(bad.sum())} such rows in all. Check the weights that produced them before sampling."
        )


def _check_parameters(temperature: float | torch.Tensor, top_k: int, top_p: float, min_p: float) -> None:
    coldest = float(temperature.min()) if isinstance(temperature, torch.Tensor) and temperature.numel() else temperature
    if not isinstance(coldest, torch.Tensor) and not coldest >= 0:
        raise ConfigError(f"temperature is {coldest}: it must be 0 (greedy) or positive.")
    if top_k < 0:
        raise ConfigError(f"top_k is {top_k}: use 0 to keep all tokens, or a positive number.")
    if not 0 < top_p <= 1:
        raise ConfigError(f"top_p is {top_p}: it is a fraction of the mass, above 0 and at most 1.")
    if not 0 <= min_p <= 1:
        raise ConfigError(f"min_p is {min_p}: it is a fraction between 0 and 1.")
