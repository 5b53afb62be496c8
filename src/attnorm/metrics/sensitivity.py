"""Sensitivity of the weights of a row to its logits: the Jacobian norm, finite differences, and the upper bound.

The norm is computed exactly for maps that declare the form of their Jacobian (`Map.jacobian`):

    threshold   softmax, entmax, kneemax   diagonal minus rank one
    quotient    F(z) / sum F(z)            diagonal plus rank two
    diagonal    sigmoid, relu, polynomial  each key alone

and for softpick, whose solver is its own (theory/rank_two_singular_values.py).

A scale rule multiplies the norm by its factor, an additive rule leaves it; after a selection, it is the norm of the map
over the kept keys. Other normalizers use power iteration on a few rows, which ends up to 0.5 % below the norm; their
other rows are NaN. The norm is that of the gradient used in
training: for hard attention it is the norm of softmax.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnorm.engines.execution import in_threads, runs_asynchronously, sent_to
from attnorm.metrics.call import AttentionCall, LogitBlock, logit_blocks
from attnorm.metrics.normalized import Choice, as_normalizer, resolve_normalizers, rows_block
from attnorm.metrics.sampling import Source, of_each_source, sources_of
from attnorm.normalizers.block import Block, RowsBlock
from attnorm.normalizers.contract import Map, Normalizer, ScaleRule, per_head
from attnorm.normalizers.softmax import Softmax
from attnorm.normalizers.softpick import Softpick
from attnorm.normalizers.topk import Hard
from attnorm.theory.gradient import power_iteration_norm
from attnorm.theory.rank_one_eigenvalues import rank_one_eigenvalue
from attnorm.theory.rank_two_singular_values import rank_two_singular_value, softpick_singular_value
from attnorm.theory.selection import at_least_float32

POWER_ROWS = 8  # rows per head for power iteration, including the last row
SMALL_STEP = 0.01  # steps below it are measured in float64
GPU_ELEMENTS = 2**26  # weights to compute at once on a GPU, over several temperatures and steps


def has_closed_form(normalizer: Normalizer) -> bool:
    """Whether the norm has a closed form, so that it is computed for every row."""
    if not normalizer.has_known_parts():
        return False
    map_ = _differentiable(normalizer.map)
    quotient_with_sink = map_.jacobian == "quotient" and normalizer.sink is not None
    structured = type(map_) is Softpick or (map_.jacobian is not None and not quotient_with_sink)
    return structured and all(isinstance(rule, ScaleRule) or rule.additive for rule in normalizer.rules)


def jacobian_norm(normalizer: Normalizer, block: RowsBlock, weights: Tensor) -> Tensor | None:
    """Return the norm of each row, (..., h, r); None if this normalizer has no closed form."""
    if not has_closed_form(normalizer):
        return None
    prepared = normalizer.prepare(block)
    map_ = _differentiable(normalizer.map)
    if isinstance(map_, Softpick):
        norm = _softpick(normalizer, map_, prepared)
    elif map_.jacobian == "threshold" and normalizer.sink is not None:
        every = normalizer.sink.all_weights(prepared, map_)  # 1 - sum w would be off by the rounding of the sum
        norm = rank_one_eigenvalue(map_.slopes(prepared, every[..., 1:]), map_.slopes(prepared, every[..., :1]))
    elif map_.jacobian == "threshold":
        weights = weights if map_ is normalizer.map else map_(prepared)
        norm = rank_one_eigenvalue(map_.slopes(prepared, weights))
    else:
        slopes = prepared.hide(map_.slopes(prepared, weights))
        norm = slopes.abs().amax(-1) if map_.jacobian == "diagonal" else rank_two_singular_value(weights, slopes)
    gain = _gain(normalizer, block)
    return norm if gain is None else norm * gain.squeeze(-1)


def _differentiable(map_: Map) -> Map:
    """Return the map whose gradient this one has in training."""
    return Softmax() if type(map_) is Hard else map_


def sampled_norm(normalizer: Normalizer, block: RowsBlock) -> Tensor:
    """Return the norm of rows (..., h, r) of any map by power iteration in float64; NaN if it has no gradient."""
    generator = torch.Generator(block.logits.device).manual_seed(0)
    with torch.inference_mode(False):  # tensors of inference mode have no gradient, copies of them have
        mask, states = (None if t is None else t.clone() for t in (block.mask, block.hidden_states))
        precise = replace(block, logits=block.logits.clone().double(), mask=mask, hidden_states=states)

        def row_map(logits: Tensor) -> Tensor:
            return normalizer.weights(precise.with_logits(precise.hide(logits))).to(logits.dtype)

        try:
            return power_iteration_norm(row_map, precise.logits, mask=mask, generator=generator)
        except (ValueError, RuntimeError):
            return block.logits.new_full(block.logits.shape[:-1], math.nan)


def _gain(normalizer: Normalizer, block: RowsBlock) -> Tensor | None:
    gain = None
    positions = None if block.given_positions is None else block.positions.query[..., None]
    for rule in normalizer.rules:
        if rule.additive:
            continue
        assert isinstance(rule, ScaleRule)
        factor = rule.factor(block.n, positions, block.hidden_states).abs()
        gain = factor if gain is None else gain * factor
    return gain


def _softpick(normalizer: Normalizer, map_: Softpick, prepared: Block) -> Tensor:
    log_floor = prepared.logits.new_full((1,), math.log(map_.eps))
    if normalizer.sink is not None:  # one more key in the denominator: e^max(s, 0) (1 - e^-|s|)
        sink = per_head(normalizer.sink.logit, prepared.logits).to(prepared.logits.dtype)
        size = torch.log(-torch.expm1(-sink.abs()))  # -inf at 0
        log_floor = torch.logaddexp(log_floor, sink.clamp(min=0) + size)
    return softpick_singular_value(prepared.logits, log_floor)


@torch.no_grad()
def measure_sensitivity(
    call: AttentionCall,
    normalizers: Sequence[Choice],
    rows: Tensor,
    temperatures: Sequence[float],
    epsilons: Sequence[float],
    generator: torch.Generator | Sequence[Source] | None = None,
) -> dict[str, dict[str, Tensor]]:
    """Return normalizer -> "jacobian_norm", "bound" and "gain_EPS", each (B, H, R, len(temperatures)).

    Logits are divided by T in addition to the model's own scale; learned sinks are not. gain_EPS is the change of the
    weights over eps, in one random direction per row, which is the same for every T, eps and normalizer. bound is K/T
    with K the Lipschitz constant of the normalizer at the row's n, NaN if K is unknown. The norm never exceeds it, and
    a gain never exceeds min{K/T, sqrt(2)/eps}; K holds without given positions (`LogitRule.gain`).

    generator: random generator, or what `directions_ahead` has drawn; one per layer if the call has the heads of
    several layers (`stack_calls` of call.py).
    """
    if not temperatures or min(temperatures) <= 0:
        raise ValueError(f"temperatures must be positive, got {tuple(temperatures)}")
    if any(not eps > 0 for eps in epsilons):
        raise ValueError(f"epsilons must be positive, got {tuple(epsilons)}")
    resolved = resolve_normalizers(call, normalizers)
    like = at_least_float32(call.query_BHQD)
    sources = sources_of(generator)
    names = ["jacobian_norm", "bound", *(f"gain_{eps:g}" for eps in epsilons)]
    shape = (len(names), *like.shape[:2], len(rows), len(temperatures))
    results = {normalizer.name: like.new_full(shape, torch.nan) for normalizer in resolved}
    copies = (1 + len(epsilons)) * (1 if runs_asynchronously(like) else 2)  # a CPU is faster with a few rows
    for block in logit_blocks(call, rows, all_heads=True, copies=copies):
        view = rows_block(call, block)
        sound = ((block.n > 0) & view.logits[0].sum(-1).isfinite()).unsqueeze(-1)
        directions = _directions(block, view, call.key_BGKD.shape[-2], sources)
        n = block.n_on_cpu()
        for measured in resolved:
            normalizer = as_normalizer(measured, call)
            constants = _lipschitz(normalizer, n).to(like.dtype).unsqueeze(-1)
            bound = sent_to(like.device, constants / torch.tensor(temperatures, dtype=like.dtype))
            few = range(max(0, len(rows) - POWER_ROWS - block.rows.start), block.rows.stop - block.rows.start)
            numbers = _numbers(normalizer, view, directions, temperatures, epsilons, few)
            numbers = torch.stack([numbers[0], bound.expand(numbers[0].shape).to(numbers), *numbers[1:]])
            results[measured.name][:, block.item, block.heads, block.rows] = torch.where(sound, numbers, torch.nan)
    return {name: dict(zip(names, numbers, strict=True)) for name, numbers in results.items()}


def _numbers(
    normalizer: Normalizer,
    view: RowsBlock,
    directions: Tensor,
    temperatures: Sequence[float],
    epsilons: Sequence[float],
    few: range,
) -> Tensor:
    """Return norm and gains of every row at every temperature, (1 + E, h, r, T).

    few: rows of the block for power iteration, if the map has no closed form.
    """
    logits = view.logits[0]
    T = _column(temperatures, logits)
    small, large = ([eps for eps in epsilons if (eps < SMALL_STEP) == is_small] for is_small in (True, False))
    # The difference of two weights loses digits, and division by a small step multiplies what is lost.
    precise = torch.float64 if small else logits.dtype
    near = _moved(logits.to(precise), (0.0, *small), directions[0])
    far = _moved(logits, large, directions[0])
    numbers = logits.new_empty(1 + len(epsilons), *logits.shape[:-1], len(temperatures))
    at_once = max(1, GPU_ELEMENTS // (near.numel() + far.numel())) if runs_asynchronously(logits) else 1

    def weights_at(moved: Tensor, T: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and weights, (T, steps, h, r, w)."""
        cooled = moved / T.to(moved.dtype).unsqueeze(1)
        return cooled, normalizer.weights(view.with_logits(cooled.flatten(0, 1))).unflatten(0, cooled.shape[:2])

    def gains(weights: Tensor, base: Tensor, steps: Sequence[float]) -> Tensor:
        change: Tensor = torch.linalg.vector_norm(weights - base, dim=-1)
        return (change / _column(steps, change).squeeze(-1)).to(logits.dtype)

    def measure(columns: range) -> None:
        for start in range(columns.start, columns.stop, at_once):
            batch = slice(start, min(start + at_once, columns.stop))
            cooled, weights = weights_at(near, T[batch])
            base = weights[:, :1].to(logits.dtype)
            norms = _norms(normalizer, view, cooled[:, 0].to(logits.dtype), base[:, 0], few) / T[batch].squeeze(-1)
            parts = [norms.unsqueeze(1), gains(weights[:, 1:], weights[:, :1], small)]
            if large:
                parts.append(gains(weights_at(far, T[batch])[1], base, large))
            numbers[..., batch] = torch.cat(parts, 1).movedim(0, -1)

    in_threads(measure, len(temperatures), logits.device)
    measured = (*small, *large)
    if measured == tuple(epsilons):
        return numbers
    return torch.stack([numbers[0], *(numbers[1 + measured.index(eps)] for eps in epsilons)])


def _moved(logits: Tensor, steps: Sequence[float], direction: Tensor) -> Tensor:
    """Return the logits (h, r, w), moved by each step in the direction: (steps, h, r, w)."""
    return torch.addcmul(logits, _column(steps, logits), direction.to(logits.dtype))


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    """Return the values with shape (values, 1, 1, 1)."""
    return sent_to(like.device, torch.tensor(values, dtype=like.dtype))[:, None, None, None]


def _norms(normalizer: Normalizer, view: RowsBlock, logits: Tensor, weights: Tensor, few: range) -> Tensor:
    """Return the norm of each row for logits and weights of several temperatures (T, h, r, w)."""
    cooled = view.with_logits(logits)
    assert isinstance(cooled, RowsBlock)
    norms = jacobian_norm(normalizer, cooled, weights)
    if norms is not None:
        return norms.expand(weights.shape[:-1])
    norms = torch.full_like(weights[..., 0], torch.nan)
    row_indices = torch.arange(few.start, few.stop, device=norms.device)
    for norm, row_logits in zip(norms, logits, strict=True):
        cooled = view.with_logits(row_logits[None])
        assert isinstance(cooled, RowsBlock)
        norm[..., row_indices] = sampled_norm(normalizer, cooled.select_rows(row_indices))[0].to(norm.dtype)
    return norms


def directions_ahead(call: AttentionCall, rows: Tensor, generator: torch.Generator) -> list[Tensor]:
    """Draw the random directions that measure_sensitivity needs for a layer, one array per item of the batch."""
    batch, heads = call.query_BHQD.shape[:2]
    return [_drawn(heads, len(rows), call.key_BGKD.shape[-2], generator, generator.device) for _ in range(batch)]


def _drawn(heads: int, rows: int, keys: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
    """Draw normal numbers (heads, rows, keys), row by row for all keys, so that the block size has no effect."""
    numbers = torch.empty(rows, heads, keys, device=device)
    for row in numbers:
        torch.randn(row.shape, generator=generator, out=row)
    return numbers.transpose(0, 1)


def _directions(block: LogitBlock, view: RowsBlock, keys: int, sources: Sequence[Source]) -> Tensor:
    """Return a random unit direction over the visible keys of each row; zeros for rows without any."""
    heads, rows, width = view.logits.shape[1:]

    def draw(source: Source) -> Tensor:
        if isinstance(source, list):
            numbers = source[block.item][:, block.rows]
        else:
            device = view.logits.device if source is None else source.device
            numbers = _drawn(heads // len(sources), rows, keys, source, device)
        return numbers[..., view.first_key : view.first_key + width]

    visible_part = sent_to(view.logits.device, torch.cat(of_each_source(draw, sources))).to(view.logits)
    noise = view.hide(pad(visible_part, (0, width - visible_part.shape[-1]))[None])
    length: Tensor = torch.linalg.vector_norm(noise, dim=-1, keepdim=True)
    return noise / torch.where(length > 0, length, 1.0)


def _lipschitz(normalizer: Normalizer, n: Tensor) -> Tensor:
    constants = {int(keys): normalizer.lipschitz(int(keys)) if keys > 0 else None for keys in n.unique().tolist()}
    values = [torch.nan if constants[keys] is None else constants[keys] for keys in n.flatten().tolist()]
    return torch.tensor(values, dtype=torch.float64).reshape(n.shape)
