"""How far the weights move when the logits do, against temperature: the exact norm, finite differences, the bound."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnorm.engines.device_sync import runs_asynchronously, sent_to
from attnorm.engines.threads import each_in_a_thread, in_threads
from attnorm.metrics.call import AttentionCall
from attnorm.metrics.jacobian import POWER_ROWS, jacobian_norm, sampled_norm
from attnorm.metrics.logits import LogitBlock, logit_blocks
from attnorm.metrics.normalized import Choice, RowsBlock, as_normalizer, resolve_normalizers, rows_block
from attnorm.metrics.sampling import Source, sources_of
from attnorm.normalizers.contract import Normalizer
from attnorm.theory.selection import at_least_float32

GPU_ELEMENTS = 2**25  # weights that are computed at once on a GPU, for several temperatures and steps


@torch.no_grad()
def measure_sensitivity(
    call: AttentionCall,
    normalizers: Sequence[Choice],
    rows: Tensor,
    temperatures: Sequence[float],
    epsilons: Sequence[float],
    generator: torch.Generator | Sequence[Source] | None = None,
) -> dict[str, dict[str, Tensor]]:
    """By normalizer: "jacobian_norm", "bound" and "gain_EPS", each (B, H, R, len(temperatures)).

    Logits are divided by T on top of the model's own scale; learned sinks are not. gain_EPS is how far the weights move
    over eps, in one random direction per row, the same for every T, eps and normalizer. bound is K/T with K the
    Lipschitz constant of the normalizer at the row's n: the norm never exceeds it, and a gain never min{K/T,
    sqrt(2)/eps}. NaN where K is not known.

    generator: several for a call that has the heads of so many layers, equally many each (stacked_calls). What
    `directions_ahead` has drawn may stand for a generator.
    """
    if not temperatures or min(temperatures) <= 0:
        raise ValueError(f"temperatures must be positive, got {tuple(temperatures)}")
    if any(not eps > 0 for eps in epsilons):
        raise ValueError(f"epsilons must be positive, got {tuple(epsilons)}")
    chosen = resolve_normalizers(call, normalizers)
    like = at_least_float32(call.query_BHQD)
    sources = sources_of(generator)
    names = ["jacobian_norm", "bound", *(f"gain_{eps:g}" for eps in epsilons)]
    shape = (len(names), *like.shape[:2], len(rows), len(temperatures))
    results = {one.name: like.new_full(shape, torch.nan) for one in chosen}
    copies = (1 + len(epsilons)) * (1 if runs_asynchronously(like) else 2)  # a CPU is faster with a few rows
    for block in logit_blocks(call, rows, all_heads=True, copies=copies):
        view = rows_block(call, block)
        sound = ((block.n > 0) & view.logits[0].sum(-1).isfinite()).unsqueeze(-1)
        directions = _directions(block, view, call.key_BGKD.shape[-2], sources)
        n = block.n_on_cpu()
        for one in chosen:
            normalizer = as_normalizer(one, call)
            constants = _lipschitz(normalizer, n).to(like.dtype).unsqueeze(-1)
            bound = sent_to(like.device, constants / torch.tensor(temperatures, dtype=like.dtype))
            few = range(max(0, len(rows) - POWER_ROWS - block.rows.start), block.rows.stop - block.rows.start)
            numbers = _numbers(normalizer, view, directions, temperatures, epsilons, few)
            numbers = torch.stack([numbers[0], bound.expand(numbers[0].shape).to(numbers), *numbers[1:]])
            results[one.name][:, block.item, block.heads, block.rows] = torch.where(sound, numbers, torch.nan)
    return {name: dict(zip(names, numbers, strict=True)) for name, numbers in results.items()}


def _numbers(
    normalizer: Normalizer,
    view: RowsBlock,
    directions: Tensor,
    temperatures: Sequence[float],
    epsilons: Sequence[float],
    few: range,
) -> Tensor:
    """The norm and the gains of every row at every temperature, (1 + E, h, r, T).

    few: the rows of the block whose norm is found by power iteration where the map has no closed form.
    """
    logits = view.logits[0]
    steps, T = (_column(values, logits) for values in ((0.0, *epsilons), temperatures))
    moved = torch.addcmul(logits, steps, directions[0])  # (1 + E, h, r, w)
    found = logits.new_empty(len(steps), *logits.shape[:-1], len(temperatures))
    at_once = max(1, GPU_ELEMENTS // moved.numel()) if runs_asynchronously(logits) else 1

    def measure(columns: range) -> None:
        for start in range(columns.start, columns.stop, at_once):
            some = slice(start, min(start + at_once, columns.stop))
            cooled = moved / T[some].unsqueeze(1)  # (T, 1 + E, h, r, w)
            weights = normalizer.weights(view.with_logits(cooled.flatten(0, 1))).unflatten(0, cooled.shape[:2])
            norms = _norms(normalizer, view, cooled[:, 0], weights[:, 0], few) / T[some].squeeze(-1)
            change: Tensor = torch.linalg.vector_norm(weights[:, 1:] - weights[:, :1], dim=-1)
            gains = change / steps[1:].squeeze(-1)
            found[..., some] = torch.cat([norms.unsqueeze(1), gains], 1).movedim(0, -1)

    in_threads(measure, len(temperatures), logits.device)
    return found


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    """(values, 1, 1, 1)"""
    return sent_to(like.device, torch.tensor(values, dtype=like.dtype))[:, None, None, None]


def _norms(normalizer: Normalizer, view: RowsBlock, logits: Tensor, weights: Tensor, few: range) -> Tensor:
    """The norm of each row for logits and weights of several temperatures (T, h, r, w)."""
    cooled = view.with_logits(logits)
    assert isinstance(cooled, RowsBlock)
    norms = jacobian_norm(normalizer, cooled, weights)
    if norms is not None:
        return norms.expand(weights.shape[:-1])
    norms = torch.full_like(weights[..., 0], torch.nan)
    which = torch.arange(few.start, few.stop, device=norms.device)
    for norm, one in zip(norms, logits, strict=True):
        cooled = view.with_logits(one[None])
        assert isinstance(cooled, RowsBlock)
        norm[..., which] = sampled_norm(normalizer, cooled.taking(which))[0].to(norm.dtype)
    return norms


def directions_ahead(call: AttentionCall, rows: Tensor, generator: torch.Generator) -> list[Tensor]:
    """What measure_sensitivity draws for a layer; one array for each item of the batch."""
    batch, heads = call.query_BHQD.shape[:2]
    return [_drawn(heads, len(rows), call.key_BGKD.shape[-2], generator, generator.device) for _ in range(batch)]


def _drawn(heads: int, rows: int, keys: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
    """Normal numbers (heads, rows, keys), row after row for all keys, so that the size of a block does not matter."""
    numbers = torch.empty(rows, heads, keys, device=device)
    for row in numbers:
        torch.randn(row.shape, generator=generator, out=row)
    return numbers.transpose(0, 1)


def _directions(block: LogitBlock, view: RowsBlock, keys: int, sources: Sequence[Source]) -> Tensor:
    """A random direction for each row among its visible keys, of length 1; rows without any get zeros."""
    heads, rows, width = view.logits.shape[1:]

    def draw(source: Source) -> Tensor:
        if isinstance(source, list):
            numbers = source[block.item][:, block.rows]
        else:
            device = view.logits.device if source is None else source.device
            numbers = _drawn(heads // len(sources), rows, keys, source, device)
        return numbers[..., view.first_key : view.first_key + width]

    here = sent_to(view.logits.device, torch.cat(each_in_a_thread(draw, sources))).to(view.logits)
    noise = view.hide(pad(here, (0, width - here.shape[-1]))[None])
    length: Tensor = torch.linalg.vector_norm(noise, dim=-1, keepdim=True)
    return noise / torch.where(length > 0, length, 1.0)


def _lipschitz(normalizer: Normalizer, n: Tensor) -> Tensor:
    constants = {int(keys): normalizer.lipschitz(int(keys)) if keys > 0 else None for keys in n.unique().tolist()}
    values = [torch.nan if constants[keys] is None else constants[keys] for keys in n.flatten().tolist()]
    return torch.tensor(values, dtype=torch.float64).reshape(n.shape)
