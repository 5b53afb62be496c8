"""How far the weights move when the logits do, against temperature: the exact norm, finite differences, the bound."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnorm.engines.threads import in_threads
from attnorm.metrics.call import AttentionCall
from attnorm.metrics.jacobian import POWER_ROWS, jacobian_norm, sampled_norm
from attnorm.metrics.logits import logit_blocks
from attnorm.metrics.normalized import Choice, RowsBlock, as_normalizer, resolve_normalizers, rows_block
from attnorm.normalizers.block import Block
from attnorm.normalizers.contract import Normalizer
from attnorm.theory.selection import at_least_float32


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
    over eps, in one random direction per row, the same for every T, eps and normalizer. bound is K/T with K the
    Lipschitz constant of the normalizer at the row's n: the norm never exceeds it, and a gain never min{K/T,
    sqrt(2)/eps}. NaN where K is not known.
    """
    if not temperatures or min(temperatures) <= 0:
        raise ValueError(f"temperatures must be positive, got {tuple(temperatures)}")
    if any(not eps > 0 for eps in epsilons):
        raise ValueError(f"epsilons must be positive, got {tuple(epsilons)}")
    chosen = resolve_normalizers(call, normalizers)
    like = at_least_float32(call.query_BHQD)
    shape = (*like.shape[:2], len(rows), len(temperatures))
    names = ["jacobian_norm", "bound", *(f"gain_{eps:g}" for eps in epsilons)]
    results = {one.name: {name: like.new_full(shape, torch.nan) for name in names} for one in chosen}
    for block in logit_blocks(call, rows, all_heads=True):
        view = rows_block(call, block)
        index = (block.item, block.heads, block.rows)
        sound = ((block.n > 0) & view.logits[0].sum(-1).isfinite()).unsqueeze(-1)
        directions = _directions(view, call.key_BGKD.shape[-2], generator)
        for one in chosen:
            normalizer = as_normalizer(one, call)
            constants = _lipschitz(normalizer, block.n).to(like)
            numbers = _numbers(normalizer, view, directions, temperatures, epsilons)
            numbers["bound"] = constants.unsqueeze(-1) / torch.tensor(temperatures).to(constants)
            for name, value in numbers.items():
                results[one.name][name][index] = torch.where(sound, value, torch.nan)
    return results


def _numbers(
    normalizer: Normalizer,
    view: RowsBlock,
    directions: Tensor,
    temperatures: Sequence[float],
    epsilons: Sequence[float],
) -> dict[str, Tensor]:
    """The norm and the gains of every row at every temperature, (h, r, T)."""
    moved = {f"gain_{eps:g}": (eps, view.logits + eps * directions) for eps in epsilons}
    shape = (*view.logits.shape[1:-1], len(temperatures))
    found = {name: view.logits.new_empty(shape) for name in ("jacobian_norm", *moved)}

    def measure(columns: range) -> None:
        for column in columns:
            temperature = temperatures[column]
            cooled = view.with_logits(view.logits / temperature)
            weights = normalizer.weights(cooled)
            found["jacobian_norm"][..., column] = _norm(normalizer, cooled, weights) / temperature
            for name, (eps, logits) in moved.items():
                change = normalizer.weights(view.with_logits(logits / temperature)) - weights
                found[name][..., column] = torch.linalg.vector_norm(change[0], dim=-1) / eps

    in_threads(measure, len(temperatures), view.logits.device)
    return found


def _norm(normalizer: Normalizer, view: Block, weights: Tensor) -> Tensor:
    assert isinstance(view, RowsBlock)
    norm = jacobian_norm(normalizer, view, weights)
    if norm is None:
        norm = torch.full_like(weights[..., 0], torch.nan)
        few = torch.arange(max(0, norm.shape[-1] - POWER_ROWS), norm.shape[-1], device=norm.device)
        norm[..., few] = sampled_norm(normalizer, view.taking(few)).to(norm.dtype)
    return norm.expand(weights.shape[:-1])[0]


def _directions(view: RowsBlock, keys: int, generator: torch.Generator | None) -> Tensor:
    """A random direction for each row among its visible keys, of length 1; rows without any get zeros.

    Drawn row after row for all keys, so that the size of a block does not matter.
    """
    heads, rows, width = view.logits.shape[1:]
    device = view.logits.device if generator is None else generator.device
    draws = [torch.randn(heads, keys, generator=generator, dtype=torch.float32, device=device) for _ in range(rows)]
    here = torch.stack(draws, 1)[..., view.first_key : view.first_key + width].to(view.logits)
    noise = view.hide(pad(here, (0, width - here.shape[-1]))[None])
    length: Tensor = torch.linalg.vector_norm(noise, dim=-1, keepdim=True)
    return noise / torch.where(length > 0, length, 1.0)


def _lipschitz(normalizer: Normalizer, n: Tensor) -> Tensor:
    constants = {int(keys): normalizer.lipschitz(int(keys)) if keys > 0 else None for keys in n.unique().tolist()}
    values = [torch.nan if constants[keys] is None else constants[keys] for keys in n.flatten().tolist()]
    return torch.tensor(values, dtype=torch.float64).reshape(n.shape)
