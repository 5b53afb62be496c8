"""The public functions `attention` and `normalize`, and the choice of the engine that computes an attention call.

`attention` validates q, k, v and the mask into one `Inputs` record and resolves the normalizer. `attend` runs the
cheapest engine with the exact result (`choose_engine`), or the engine that the caller names:

    fused     torch's scaled_dot_product_attention; softmax whose logits are rescaled     engines/fused.py
    triton    our one-pass and stick-breaking Triton kernels, and for few queries those   engines/one_pass.py,
              of every map, on a GPU                                                      engines/stick_breaking.py,
                                                                                          engines/decoding.py
    sparse    our Triton kernels for threshold maps such as entmax, on a GPU              engines/sparse.py
    blocked   plain PyTorch in blocks of queries; every normalizer, on any device         engines/blocked.py
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal, get_args, overload

import torch
from torch import Tensor

from attnorm.engines import fused
from attnorm.engines.blocked import attend_with_weights, blocked, in_one_block
from attnorm.engines.execution import known_calls, may_be_known
from attnorm.engines.inputs import (
    Inputs,
    Refused,
    checked_flag,
    in_dtype,
    is_number,
    needs_gradient,
    under_transform,
    unknown_options_message,
    validate_inputs,
    without_autocast,
)
from attnorm.normalizers.block import Positions, is_exporting
from attnorm.normalizers.contract import Mechanism, Normalizer
from attnorm.normalizers.registry import resolve_for_call
from attnorm.text import did_you_mean

if TYPE_CHECKING:
    from attnorm.metrics.attention_statistics import AttentionStatistics

Engine = Literal["auto", "fused", "triton", "sparse", "blocked"]
ENGINES: tuple[str, ...] = get_args(Engine)
Computation = Callable[[Inputs, Normalizer], Tensor]

# Size limit of the matrix of weights that return_weights=True builds.
MAX_WEIGHT_BYTES = 2**30


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    normalizer: str | Normalizer | Mechanism = "softmax",
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    positions: Tensor | Positions | None = None,
    hidden_states: Tensor | None = None,
    dropout_p: float = 0.0,
    return_weights: Literal[False] = False,
    return_statistics: Literal[False] = False,
    engine: Engine = "auto",
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    normalizer: str | Normalizer | Mechanism = "softmax",
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    positions: Tensor | Positions | None = None,
    hidden_states: Tensor | None = None,
    dropout_p: float = 0.0,
    return_weights: Literal[True],
    return_statistics: Literal[False] = False,
    engine: Engine = "auto",
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    normalizer: str | Normalizer | Mechanism = "softmax",
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    positions: Tensor | Positions | None = None,
    hidden_states: Tensor | None = None,
    dropout_p: float = 0.0,
    return_weights: Literal[False] = False,
    return_statistics: Literal[True],
    engine: Engine = "auto",
) -> "tuple[Tensor, AttentionStatistics]": ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    normalizer: str | Normalizer | Mechanism = "softmax",
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    positions: Tensor | Positions | None = None,
    hidden_states: Tensor | None = None,
    dropout_p: float = 0.0,
    return_weights: bool = False,
    return_statistics: bool = False,
    engine: Engine = "auto",
    **unknown: Refused,
) -> "Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AttentionStatistics]":
    """Compute attention with any normalizer: output (B, H, Q, E) for q (B, H, Q, D), k (B, G, K, D), v (B, G, K, E).

    With fewer key heads G than query heads H, groups of query heads share a key head. A query that sees no key gets
    zeros.

    Args:
        normalizer: A name, a specification such as "entmax:alpha=1.3", or an object. One that is given by name is built
            for this call: its parameters have their initial values and no gradient.
        mask: Boolean, True = may attend, broadcastable to (B, H, Q, K).
        causal: Hide later keys. Aligned bottom-right: the last query sees all keys.
        scale: Factor of the logits (default: 1/sqrt(D)).
        positions: Positions of the tokens, as for a Normalizer.
        hidden_states: Layer inputs of the queries, as for a Normalizer.
        dropout_p: Probability to drop each weight; the others are divided by 1 - dropout_p, as in torch (default: 0).
            It applies whenever it is above 0: pass 0 in evaluation.
        return_weights: Also return the weights (B, H, Q, K) after dropout, in at least float32, of at most 1 GiB.
        return_statistics: Also return the statistics of every row, as attnorm.attention_statistics does, without
            gradient. On CUDA one kernel computes both for sigmoid, relu and softpick. It also does for softmax without
            gradients, and with gradients in half precision without mask and rescaling. For entmax two kernels share the
            thresholds.
        engine: Engine that computes the call; "auto" chooses one.

    >>> attention(q, k, v, "entmax15", causal=True)
    >>> output, statistics = attention(q, k, v, causal=True, return_statistics=True)
    >>> attention(q, k, v, attnorm.get("ssmax", heads=12), mask=padding[:, None, None, :], causal=True)
    """
    if unknown:
        raise TypeError(unknown_options_message("attention", unknown))
    causal = checked_flag("causal", causal)
    return_weights = checked_flag("return_weights", return_weights)
    return_statistics = checked_flag("return_statistics", return_statistics)
    chosen = resolve_for_call(normalizer, q)
    if engine not in ENGINES:
        raise ValueError(f"unknown engine {engine!r}; {did_you_mean(engine, ENGINES)}")
    if not (is_number(dropout_p) and 0 <= dropout_p < 1):
        raise ValueError(f"expected dropout_p of at least 0 and below 1, got {dropout_p!r}. Pass 0 for no dropout.")
    if isinstance(chosen, Mechanism):
        if engine != "auto":
            raise ValueError(
                f"{chosen.name!r} is a mechanism with its own engine: expected engine='auto', got {engine!r}. Leave "
                "engine out."
            )
        if dropout_p or return_weights or return_statistics:
            raise ValueError(
                "expected a row normalizer for dropout_p, return_weights and return_statistics, got the mechanism "
                f"{chosen.name!r}. Leave them out."
            )
        states = {"hidden_states": hidden_states} if chosen.reads_hidden_states else {}
        output: Tensor = chosen(q, k, v, mask=mask, causal=causal, scale=scale, positions=positions, **states)
        return output
    inputs = validate_inputs(
        q, k, v, mask=mask, causal=causal, scale=scale, positions=positions, hidden_states=hidden_states
    )
    if dropout_p:
        inputs = replace(inputs, dropout=float(dropout_p))
    if return_statistics:
        if return_weights:
            raise ValueError("expected return_weights or return_statistics, got both. Call attention() twice.")
        output, statistics = _attend_with_statistics(inputs, chosen, engine)
        return output.to(q.dtype).reshape(*q.shape[:-1], v.shape[-1]), statistics.reshaped(q.shape[:-1])
    if return_weights:
        _check_weights(inputs, engine)
        output, weights = attend_with_weights(inputs, chosen)
        return output.reshape(*q.shape[:-1], v.shape[-1]), weights.reshape(*q.shape[:-1], k.shape[-2])
    output = in_dtype(attend(inputs, chosen, engine), q.dtype)
    return output if q.dim() == 4 else output.reshape(*q.shape[:-1], v.shape[-1])


def _attend_with_statistics(
    inputs: Inputs, normalizer: Normalizer, engine: Engine
) -> "tuple[Tensor, AttentionStatistics]":
    """Return the output and the statistics of its rows.

    Without dropout both come from kernels that share work on a GPU, if the normalizer has any, or from the same blocks,
    if attention and statistics of a map other than softmax run in blocks. Otherwise the rows are computed twice: also
    with a gradient in one block, whose weights torch keeps for the backward pass, which then costs less.
    """
    from attnorm.metrics import fused_rows
    from attnorm.metrics.attention_statistics import (  # takes time to import
        output_and_statistics,
        output_and_statistics_by_kernel,
        statistics_of,
    )
    from attnorm.metrics.fused_maps import kernel_form
    from attnorm.metrics.normalized import MeasuredNormalizer

    softmax = MeasuredNormalizer(normalizer.name, normalizer).scaled_softmax
    has_kernel = (softmax or kernel_form(normalizer) is not None) and fused_rows.measures(inputs)
    trains = needs_gradient(inputs, normalizer)
    if has_kernel and engine == "auto" and fused_rows.output_applies(inputs):
        by_sdpa = softmax and fused.gradients_apply(inputs, normalizer)
        # Where softmax runs on SDPA but needs another q or a mask, its backward pass is faster than ours by more than
        # the pass that would be saved.
        if (softmax and (by_sdpa or not trains)) or choose_engine(inputs, normalizer) in ("triton", "sparse"):
            return output_and_statistics_by_kernel(inputs, normalizer, by_sdpa=by_sdpa)
    in_blocks = not (has_kernel or softmax)
    if in_blocks and not inputs.dropout and not torch.compiler.is_compiling() and not under_transform():
        chosen = choose_engine(inputs, normalizer) if engine == "auto" else engine
        if chosen == "blocked" and not (trains and in_one_block(inputs)):
            return output_and_statistics(inputs, normalizer, trains=trains)
    return attend(inputs, normalizer, engine), statistics_of(inputs, normalizer)


def _check_weights(inputs: Inputs, engine: Engine) -> None:
    if engine not in ("auto", "blocked"):
        raise ValueError(
            f"expected engine='auto' or 'blocked' with return_weights=True, got {engine!r}, which builds no weights. "
            "Leave engine out."
        )
    size = math.prod(inputs.weights_shape) * (8 if inputs.q_BHQD.dtype == torch.float64 else 4)
    if size > MAX_WEIGHT_BYTES:
        raise ValueError(
            f"expected weights of at most {MAX_WEIGHT_BYTES:,} bytes with return_weights=True, got {size:,} bytes for "
            f"shape {tuple(inputs.weights_shape)}. Pass fewer queries at a time, or leave return_weights out."
        )


def attend(inputs: Inputs, normalizer: Normalizer, engine: Engine = "auto") -> Tensor:
    """Return the output (B, H, Q, E) of validated inputs from the cheapest engine, or from the given one."""
    if not may_be_known(inputs, engine):
        return _attend(inputs, normalizer, engine)
    return known_calls.attend(inputs, normalizer, engine, partial(_attend, inputs, normalizer, engine))


def _attend(inputs: Inputs, normalizer: Normalizer, engine: Engine) -> Tensor:
    with without_autocast(inputs.q_BHQD.device):
        return _run_engine(inputs, normalizer, engine)


def _run_engine(inputs: Inputs, normalizer: Normalizer, engine: Engine) -> Tensor:
    if inputs.q_BHQD.numel() == 0:
        return blocked(inputs, normalizer)  # some fused kernels divide by the number of rows
    compute = _choose(inputs, normalizer)[1] if engine == "auto" else _computation(engine, inputs, normalizer)
    if compute is None:
        with torch.no_grad():
            runs_without = _computation(engine, inputs, normalizer) is not None
        reason = f"{_WHY_ENGINE_DOES_NOT_APPLY[engine]}{' with gradients' if runs_without else ''}"
        raise ValueError(f"{normalizer.name!r} {reason} here. Use engine='auto' or 'blocked'.")
    return compute(inputs, normalizer)


_WHY_ENGINE_DOES_NOT_APPLY = {
    "fused": "is not a rescaled softmax",
    "triton": "has no one-pass kernel",
    "sparse": "has no kernel for threshold maps",
}


def choose_engine(inputs: Inputs, normalizer: Normalizer) -> Engine:
    """Return the cheapest engine whose error is within that of the formula in the same dtype.

    On a CPU this is SDPA if it applies, else blocks. On a GPU the order is: SDPA if it takes q unchanged or rounding q
    is worth it, our Triton kernels, SDPA with a changed q, blocks.
    """
    return _choose(inputs, normalizer)[0]


def _choose(inputs: Inputs, normalizer: Normalizer) -> tuple[Engine, Computation]:
    """Return that engine and its function."""
    if not normalizer.has_known_parts():
        return "blocked", blocked
    on_sdpa = fused.applies(inputs, normalizer)
    keeps_q = on_sdpa and not fused.rounds_q(inputs, normalizer)
    if not inputs.q_BHQD.is_cuda or is_exporting():  # an exported graph cannot contain our kernels
        return ("fused", fused.fused) if keeps_q else ("blocked", blocked)
    if on_sdpa and normalizer.sink is None and (keeps_q or fused.is_worth_rounding(inputs, normalizer)):
        return "fused", fused.fused
    # Our kernel comes before SDPA: a sink is one more key for SDPA, which in decoding copies the cache (2.4 ms, our
    # kernel takes 0.4 ms).
    order: tuple[Engine, ...] = ("triton", "fused", "sparse") if keeps_q else ("triton", "sparse")
    for engine in order:
        if (compute := _computation(engine, inputs, normalizer)) is not None:
            return engine, compute
    return "blocked", blocked


def _computation(engine: Engine, inputs: Inputs, normalizer: Normalizer) -> Computation | None:
    """Return the function by which an engine computes this call; None if it does not apply."""
    if not normalizer.has_known_parts():
        return blocked if engine == "blocked" else None
    if engine == "fused":
        return fused.fused if fused.applies(inputs, normalizer) else None
    if engine == "triton":
        from attnorm.engines import decoding, one_pass, stick_breaking  # loads Triton if it is installed

        if (form := one_pass.lower_for_call(inputs, normalizer)) is not None:
            return partial(one_pass.one_pass, form=form)
        if (found := decoding.plan_call(inputs, normalizer)) is not None:
            return partial(decoding.decode, found=found)
        return stick_breaking.stick_breaking if stick_breaking.applies(inputs, normalizer) else None
    if engine == "sparse":
        from attnorm.engines import sparse

        return sparse.sparse if sparse.applies(inputs, normalizer) else None
    return blocked


def normalize(
    logits: Tensor,
    normalizer: str | Normalizer = "softmax",
    mask: Tensor | None = None,
    *,
    positions: Tensor | Positions | None = None,
    hidden_states: Tensor | None = None,
) -> Tensor:
    """Compute the weights of logits (..., Q, K) under a normalizer; mask: boolean, True = may attend.

    >>> normalize(logits, "ssmax", mask=mask)
    """
    chosen = resolve_for_call(normalizer, logits)
    if isinstance(chosen, Mechanism):
        raise TypeError(
            f"{chosen.name!r} needs q, k and v instead of rows of logits. Call attnorm.attention(q, k, v, "
            f"{chosen.name!r})."
        )
    weights: Tensor = chosen(logits, mask, positions=positions, hidden_states=hidden_states)
    return weights
