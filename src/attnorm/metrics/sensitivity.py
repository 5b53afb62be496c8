"""How far the weights move when the logits do, against temperature: the exact norm, finite differences, the bound."""

from collections.abc import Sequence

import torch
from torch import Tensor

from attnorm.metrics.call import AttentionCall
from attnorm.metrics.jacobian import jacobian_norm, sampled_norm
from attnorm.metrics.logits import logit_blocks
from attnorm.metrics.normalized import Choice, RowsBlock, as_normalizer, measured, rows_block
from attnorm.normalizers.contract import Normalizer
from attnorm.theory.gradient import finite_difference_gain
from attnorm.theory.selection import at_least_float32

# Rows whose norm takes power iteration, of each block.
POWER_ROWS = 8


@torch.no_grad()
def measure_sensitivity(
    call: AttentionCall,
    normalizers: Sequence[Choice],
    rows: Tensor,
    temperatures: Sequence[float],
    epsilons: Sequence[float],
    generator: torch.Generator | None = None,
) -> dict[str, dict[str, Tensor]]:
    """By normalizer: "jacobian_norm", "bound" and "gain_EPS", each (B, H, R, len(temperatures)).

    Logits are divided by T on top of the model's own scale; learned sinks are not. gain_EPS is how far the weights move
    over eps, in one random direction. bound is K/T with K the Lipschitz constant of the normalizer at the row's n: the
    norm never exceeds it, and a gain never min{K/T, sqrt(2)/eps}. NaN where K is not known.
    """
    if not temperatures or min(temperatures) <= 0:
        raise ValueError(f"temperatures must be positive, got {tuple(temperatures)}")
    if any(not eps > 0 for eps in epsilons):
        raise ValueError(f"epsilons must be positive, got {tuple(epsilons)}")
    chosen = measured(call, normalizers)
    like = at_least_float32(call.query_BHQD)
    shape = (*like.shape[:2], len(rows), len(temperatures))
    names = ["jacobian_norm", "bound", *(f"gain_{eps:g}" for eps in epsilons)]
    results = {one.name: {name: like.new_full(shape, torch.nan) for name in names} for one in chosen}
    for block in logit_blocks(call, rows.to(like.device), all_heads=True):
        view = rows_block(call, block)
        place = (block.item, block.heads, block.rows)
        sound = (block.n > 0) & view.logits[0].isfinite().all(-1)
        for one in chosen:
            normalizer = as_normalizer(one, call)
            constants = _lipschitz(normalizer, block.n).to(like)
            for column, temperature in enumerate(temperatures):
                numbers = {"jacobian_norm": _norm(normalizer, view, temperature), "bound": constants / temperature}
                for eps in epsilons:
                    numbers[f"gain_{eps:g}"] = _gain(normalizer, view, temperature, eps, generator)
                for name, value in numbers.items():
                    results[one.name][name][(*place, column)] = torch.where(sound, value, torch.nan)
    return results


def _norm(normalizer: Normalizer, view: RowsBlock, temperature: float) -> Tensor:
    cooled = view.with_logits(view.logits / temperature)
    assert isinstance(cooled, RowsBlock)
    weights = normalizer.weights(cooled)
    norm = jacobian_norm(normalizer, cooled, weights)
    if norm is None:
        norm = torch.full_like(weights[..., 0], torch.nan)
        few = torch.arange(max(0, norm.shape[-1] - POWER_ROWS), norm.shape[-1], device=norm.device)
        norm[..., few] = sampled_norm(normalizer, cooled.taking(few)).to(norm.dtype)
    return norm.expand(weights.shape[:-1])[0] / temperature


def _gain(
    normalizer: Normalizer, view: RowsBlock, temperature: float, epsilon: float, generator: torch.Generator | None
) -> Tensor:
    gain = finite_difference_gain(
        lambda logits: normalizer.weights(view.with_logits(view.hide(logits))),
        view.logits,
        epsilon,
        temperature=temperature,
        directions=_directions(view, generator),
    )
    return gain[0, 0]


def _directions(view: RowsBlock, generator: torch.Generator | None) -> Tensor:
    """One random direction per row among its visible keys; rows without any get one that changes nothing."""
    device = view.logits.device if generator is None else generator.device
    noise = torch.randn((1, *view.logits.shape), generator=generator, dtype=torch.float32, device=device)
    noise = view.hide(noise.to(view.logits))
    noise[..., 0] = torch.where(noise.abs().sum(-1) == 0, 1.0, noise[..., 0])
    return noise


def _lipschitz(normalizer: Normalizer, n: Tensor) -> Tensor:
    constants = {int(keys): normalizer.lipschitz(int(keys)) if keys > 0 else None for keys in n.unique().tolist()}
    values = [torch.nan if constants[keys] is None else constants[keys] for keys in n.flatten().tolist()]
    return torch.tensor(values, dtype=torch.float64).reshape(n.shape)
