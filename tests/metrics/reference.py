"""Reference for all metrics: the same numbers from the whole matrix in float64, in a few lines each.

It is slow and meant for tests and short inputs: memory and time grow with Q x K, and the Jacobian norm is the largest
singular value of a K x K matrix for every row.
"""

import math

import torch
from torch import Tensor

from attnorm.metrics.call import AttentionCall
from attnorm.metrics.separability import NEAR_TIE, NEAR_WEIGHT
from attnorm.normalizers.block import Positions, RowsBlock
from attnorm.normalizers.contract import Normalizer, ScaleRule
from attnorm.normalizers.softmax import Softmax


def dense_visible(call: AttentionCall) -> Tensor:
    """Return which keys each query sees, (B, H, Q, K)."""
    batch, heads, queries, _ = call.query_BHQD.shape
    keys = call.key_BGKD.shape[-2]
    visible = torch.ones(queries, keys, dtype=torch.bool, device=call.query_BHQD.device)
    if call.causal and (call.mask is None or call.mask.dim() < 2 or call.mask.shape[-2] == 1 or queries == keys):
        visible = visible.tril(keys - queries)
    visible = visible if call.mask is None else visible & call.mask
    return visible.expand(batch, heads, queries, keys)


def dense_logits(call: AttentionCall) -> Tensor:
    """Return all logits, (B, H, Q, K) in float64."""
    key = call.key_BGKD.double().repeat_interleave(call.query_BHQD.shape[1] // call.key_BGKD.shape[1], 1)
    logits = call.query_BHQD.double() @ key.mT * call.scale
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    return logits if call.bias is None else logits + call.bias.double()


def dense_weights(call: AttentionCall, normalizer: Normalizer | None = None) -> Tensor:
    """Return all weights, (B, H, Q, K) in float64. normalizer None: softmax with the model's own sinks."""
    logits, visible = dense_logits(call), dense_visible(call)
    if normalizer is not None:
        return normalizer.weights(_dense_block(call))
    logits = torch.where(visible, logits, -torch.inf)
    if call.sinks_H is not None:
        sinks = call.sinks_H.double()[:, None, None].expand(*logits.shape[:-1], 1)
        return torch.nan_to_num(torch.softmax(torch.cat([logits, sinks], -1), -1)[..., :-1])
    return torch.where(visible.any(-1, keepdim=True), torch.softmax(logits, -1), 0.0)


def dense_exponents(call: AttentionCall, normalizer: Normalizer | None = None) -> Tensor | None:
    """Return the rescaled logits of a softmax, (B, H, Q, K) in float64; None for another map."""
    if normalizer is None:
        return dense_logits(call)
    scales = all(isinstance(rule, ScaleRule) for rule in normalizer.rules)
    if type(normalizer.map) is not Softmax or normalizer.selections or not scales:
        return None
    return normalizer.prepare(_dense_block(call)).logits.detach()


def _dense_block(call: AttentionCall) -> RowsBlock:
    logits, visible = dense_logits(call), dense_visible(call)
    queries, keys = logits.shape[-2:]
    states = call.inputs_BKC if queries == keys else None
    order = torch.arange(keys - queries, keys, device=logits.device)
    positions = call.positions
    if positions is not None:
        positions = Positions(positions.query[:, None], positions.key[:, None])
    return RowsBlock(torch.where(visible, logits, 0.0), visible, positions, states, queries=order)


def dense_statistics(
    call: AttentionCall, normalizer: Normalizer | None, rows: Tensor, top_n: tuple[int, ...]
) -> dict[str, Tensor]:
    """Return name -> (B, H, R) in float64: the numbers of `row_statistics`, NaN if undefined, and "n"."""
    logits, visible = dense_logits(call), dense_visible(call)
    weights, exponents = dense_weights(call, normalizer).detach(), dense_exponents(call, normalizer)
    sinks = _sink_logits(call, normalizer)
    shape = (*logits.shape[:2], len(rows))
    results = {"n": visible[..., rows.to(visible.device), :].sum(-1).double()}
    for item in range(shape[0]):
        for head in range(shape[1]):
            for index, row in enumerate(rows.tolist()):
                position = (item, head, row)
                numbers = row_statistics(
                    logits[position], weights[position], visible[position], top_n, rest_is_sink=sinks is not None
                )
                if numbers and exponents is not None:
                    z = exponents[position][visible[position]]
                    numbers |= row_limits(z) | {"logsumexp": row_logsumexp(z, None if sinks is None else sinks[head])}
                for name, value in numbers.items():
                    results.setdefault(name, torch.full(shape, torch.nan, dtype=torch.float64))
                    results[name][item, head, index] = value
    return results


def _sink_logits(call: AttentionCall, normalizer: Normalizer | None) -> Tensor | None:
    """Return the logit of each head's learned sink, (H,) in float64; None without a sink."""
    if normalizer is None:
        return None if call.sinks_H is None else call.sinks_H.double()
    if normalizer.sink is None:
        return None
    return normalizer.sink.logit.detach().double().expand(call.query_BHQD.shape[1])


def row_statistics(
    logits: Tensor, weights: Tensor, visible: Tensor, top_n: tuple[int, ...], *, rest_is_sink: bool = False
) -> dict[str, float]:
    """Return the statistics of one row of K keys, without limits and Jacobian norm; "top_mass_N" for the masses.

    rest_is_sink: whether 1 minus the sum of the weights is the weight of a learned sink.
    """
    z, w = logits[visible], weights[visible].abs()
    n = len(z)
    if n == 0 or not (bool(z.isfinite().all()) and bool(w.isfinite().all())):
        return {}
    d = float(z.max() - z.min())
    numbers = {"row_sum": float(weights[visible].sum()), "logit_spread": d}
    numbers |= {"max_logit": float(z.max()), "min_logit": float(z.min())}
    if n > 1:
        numbers["logit_spread_without_sink"] = float(z[1:].max() - z[1:].min())
    if float(w.sum()) > 0:
        numbers |= _concentration(w) | {"max_weight": float(w.max())}
        numbers["sink_mass"] = float(w[0] / w.sum())
        for N in top_n:
            numbers[f"top_mass_{N}"] = float(w.sort(descending=True).values[:N].sum() / w.sum())
    if float(w[1:].sum()) > 0:
        rest = _concentration(w[1:])
        rest.pop("entropy_nats")
        numbers |= {f"{name}_without_sink": value for name, value in rest.items()}
    if rest_is_sink:
        numbers["sink_mass"] = float(w[0] + 1 - w.sum())
    return numbers


def row_logsumexp(z: Tensor, sink: Tensor | None = None) -> float:
    """Return the log of what softmax divides by: the exponentials of n rescaled logits, and of its learned sink."""
    logits = z if sink is None else torch.cat([z, sink[None]])
    return float(logits.max() + (logits - logits.max()).exp().sum().log())


def row_limits(z: Tensor) -> dict[str, float]:
    """Return the limits of softmax for all rows of n logits with the same spread as these."""
    n, d = len(z), float(z.max() - z.min())
    ceiling = 1 / (1 + (n - 1) * math.exp(-d))
    limits = {"horizon": _horizon(d), "weight_ceiling": ceiling, "entropy_floor": _smallest_entropy(n, d)}
    if n > 1:
        limits["horizon_without_sink"] = _horizon(float(z[1:].max() - z[1:].min()))
    return limits


def _horizon(spread: float) -> float:
    return 1 + math.exp(spread) if spread < 709 else math.inf


def _smallest_entropy(n: int, spread: float) -> float:
    """Return the smallest entropy over rows with k keys at the top of the range and the others at its bottom."""
    if n == 1:
        return 0.0
    above = torch.arange(1, n, dtype=torch.float64)
    top = 1 / (above + (n - above) * math.exp(-spread))
    bottom = top * math.exp(-spread)
    return float((above * torch.special.entr(top) + (n - above) * torch.special.entr(bottom)).min())


def _concentration(w: Tensor) -> dict[str, float]:
    p = w / w.sum()
    n = len(p)
    entropy = float(torch.special.entr(p).sum())
    numbers = {"entropy_nats": entropy, "effective_keys": float(1 / p.square().sum()), "max_weight": float(p.max())}
    if n > 1:
        ordered = p.sort(descending=True).values
        numbers["entropy_ratio"] = entropy / math.log(n)
        numbers["effective_gap"] = float(torch.log(ordered[0]) - torch.log(ordered[1:].sum()) + math.log(n - 1))
    return numbers


def jacobian_norm(call: AttentionCall, normalizer: Normalizer | None, item: int, head: int, query: int) -> float:
    """Return the largest singular value of the Jacobian d weights / d logits of one row."""
    visible = dense_visible(call)
    logits = dense_logits(call)
    keys = visible[item, head, query]
    if not bool(keys.any()):
        return math.nan
    if normalizer is None:
        z = logits[item, head, query][keys]
        z = z if call.sinks_H is None else torch.cat([z, call.sinks_H.double()[head, None]])
        p = torch.softmax(z, -1)
        others = torch.stack([p[torch.arange(len(p)) != i].sum() for i in range(len(p))])
        J = -torch.outer(p, p)
        J = J.diagonal_scatter(p * others)[: int(keys.sum()), : int(keys.sum())]  # p - p^2 would cancel near 1
    else:
        order = torch.arange(logits.shape[-1] - logits.shape[-2], logits.shape[-1], device=logits.device)
        block = RowsBlock(torch.where(visible, logits, 0.0), visible, None, None, queries=order)

        def row(z: Tensor) -> Tensor:
            changed = block.logits.clone()
            changed[item, head, query] = z
            return normalizer.weights(block.with_logits(block.hide(changed)))[item, head, query]

        J = torch.autograd.functional.jacobian(row, block.logits[item, head, query].clone())[keys][:, keys]
    return float(torch.linalg.matrix_norm(J, 2))


def vector_numbers(weights: Tensor, vectors: Tensor, N: int) -> dict[str, float]:
    """Return distances and separability of one row of n > N visible keys, from weights (n,) and vectors (n, E)."""
    a, x = weights.double(), vectors.double()
    n = len(a)
    y = a[:, None] * x
    order = a.sort(descending=True, stable=True).indices
    inside, outside = order[:N], order[N:]
    s, A = y[inside].sum(0), a[inside].sum()
    distances = (y - s).norm(dim=-1)
    farthest = (x[outside][:, None] - x[inside][None]).norm(dim=-1).max()
    share = N / (n - 1)
    others = y.sum(0) - y
    mean = y - share * others  # of y_i - s, when a random set of N avoids i
    variance = torch.stack([_drawn_variance(y[torch.arange(n) != i], N) for i in range(n)])
    tight = a[outside].abs() * (x[outside] - s / A).norm(dim=-1) + (A - a[outside]).abs() * s.norm() / A.abs()
    printed = (1 - A) * farthest + x[inside].norm(dim=-1).max() * (A * (n - N) - (1 - A))
    misprinted = ((a + share)[:, None] * x - y.sum(0)).norm(dim=-1).sum()
    numbers = {
        "d_tilde": distances[outside].sum(),
        "relative_distance": distances[outside].sum() / ((n - N) * s.norm()),
        "fixed_printed": printed,
        "fixed_tight": tight.sum(),
        "random_printed": (n - N) / n * misprinted,
        "random_lower": (n - N) / n * mean.norm(dim=-1).sum(),
        "random_upper": (n - N) / n * (mean.square().sum(-1) + variance).sqrt().sum(),
        "separability": separability(a, x, order, N),
    }
    return {name: float(value) for name, value in numbers.items()}


def separability(a: Tensor, x: Tensor, order: Tensor, N: int, *, exchange: bool = True) -> Tensor:
    """N_s / N; near ties count in part, as metrics/separability.py defines (those of weights not in the null)."""

    def share(order: Tensor, weights: Tensor) -> Tensor:  # weights[k] belongs to key order[k]
        y, longest = weights[:, None] * x[order], x.norm(dim=-1).max()
        s = y[:N].sum(0)
        closeness = 2 * y @ s - y.square().sum(-1)
        size = weights.abs() * longest * (2 * s.norm() + weights.abs() * longest)
        behind = (closeness[:N] - closeness[N:].max()).clamp(max=0)
        return (1 + torch.where(behind == 0, 0.0, behind / (NEAR_TIE * size[:N]))).clamp(min=0).mean()

    weights = a[order]
    if not exchange:
        return share(order, weights)
    gap = (1 - weights[N] / weights[N - 1]).abs() if weights[N - 1] != 0 else torch.ones(())
    other = ((1 - gap / NEAR_WEIGHT) / 2).clamp(min=0)
    exchanged = torch.cat([order[: N - 1], order[[N, N - 1]], order[N + 1 :]])
    return (1 - other) * share(order, weights) + other * share(exchanged, weights)


def _drawn_variance(y: Tensor, N: int) -> Tensor:
    """Return the trace of the covariance of the sum of N of these vectors, drawn without replacement."""
    n = len(y)
    if n == 1:
        return torch.zeros((), dtype=y.dtype)
    return N * (n - N) / (n * (n - 1)) * (y - y.mean(0)).square().sum()
