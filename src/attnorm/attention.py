"""attention(q, k, v, normalizer=...): any normalizer or mechanism, with the cheapest exact engine for it."""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, get_args, overload

import torch
from torch import Tensor

from attnorm.engines import fused
from attnorm.engines.blocked import blocked, with_weights
from attnorm.engines.inputs import Inputs, validate_inputs, without_autocast
from attnorm.normalizers.block import Positions, is_exporting
from attnorm.normalizers.contract import Mechanism, Normalizer
from attnorm.normalizers.registry import resolve_for_call

if TYPE_CHECKING:
    from typing import Never as Refused

    from attnorm.metrics.attention_statistics import AttentionStatistics
else:
    Refused = Any  # the shape checks of the tests take no Never

Engine = Literal["auto", "fused", "triton", "sparse", "flex", "blocked"]

# The largest matrix of weights that return_weights=True builds.
MAX_WEIGHT_BYTES = 2**30

# The options of torch's scaled_dot_product_attention, and what replaces them here.
SDPA_OPTIONS = {
    "attn_mask": "mask=, boolean with True = may attend; an additive one is attn_mask > torch.finfo(dtype).min / 2",
    "is_causal": "causal=True, aligned bottom-right: the last query sees every key, where torch aligns top-left",
    "enable_gqa": "nothing: leave it out, fewer key heads than query heads are shared by groups anyway",
}


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
    """Attention output (B, H, Q, E) for q (B, H, Q, D), k (B, G, K, D), v (B, G, K, E).

    mask: boolean, True = may attend, broadcastable to (B, H, Q, K). causal: aligned bottom-right, so that one query
    sees all keys. scale: 1/sqrt(D) unless given. positions, hidden_states: as for a normalizer. Fewer key heads than
    query heads are shared by groups. A query that sees no key gets zeros.

    dropout_p: probability of dropping each weight; the others are divided by 1 - dropout_p, as in torch (default: 0).
    Applies whenever it is above 0: pass 0 in evaluation. return_weights: also return the weights (B, H, Q, K) that
    made the output, after dropout, in float32 at least; for matrices of at most 1 GiB. return_statistics: also return
    the numbers of every row that attnorm.attention_statistics has, without gradient.

    >>> attention(q, k, v, "entmax15", causal=True)
    >>> output, statistics = attention(q, k, v, causal=True, return_statistics=True)
    >>> attention(q, k, v, attnorm.get("ssmax", heads=12), mask=padding[:, None, None, :], causal=True)
    """
    if unknown:
        raise TypeError(_unknown_options(unknown))
    chosen = resolve_for_call(normalizer)
    if engine not in get_args(Engine):
        raise ValueError(f"unknown engine {engine!r}; expected one of {', '.join(get_args(Engine))}")
    if not 0 <= dropout_p < 1:
        raise ValueError(f"expected dropout_p of at least 0 and below 1, got {dropout_p!r}. Pass 0 for no dropout.")
    if isinstance(chosen, Mechanism):
        if engine != "auto":
            raise ValueError(f"{chosen.name!r} brings its own engine, got engine={engine!r}; use engine='auto'")
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
    inputs = replace(inputs, dropout=float(dropout_p))
    if return_statistics:
        if return_weights:
            raise ValueError("expected return_weights or return_statistics, got both. Call attention() twice.")
        output, statistics = _with_statistics(inputs, chosen, engine)
        return output.to(q.dtype).reshape(*q.shape[:-1], v.shape[-1]), statistics.reshaped(q.shape[:-1])
    if return_weights:
        _check_weights(inputs, engine)
        output, weights = with_weights(inputs, chosen)
        return output.reshape(*q.shape[:-1], v.shape[-1]), weights.reshape(*q.shape[:-1], k.shape[-2])
    return attend(inputs, chosen, engine).to(q.dtype).reshape(*q.shape[:-1], v.shape[-1])


def _with_statistics(inputs: Inputs, normalizer: Normalizer, engine: Engine) -> "tuple[Tensor, AttentionStatistics]":
    """Both from the same weights where attention runs in blocks and nothing is learned or dropped."""
    from attnorm.metrics.attention_statistics import output_and_statistics, statistics_of  # only if they are wanted
    from attnorm.metrics.normalized import MeasuredNormalizer

    in_blocks = engine == "blocked" or (engine == "auto" and choose_engine(inputs, normalizer) == "blocked")
    softmax = MeasuredNormalizer(normalizer.name, normalizer).scaled_softmax
    if in_blocks and not softmax and not inputs.dropout and not learns(inputs, normalizer):
        return output_and_statistics(inputs, normalizer)
    return attend(inputs, normalizer, engine), statistics_of(inputs, normalizer)


def learns(inputs: Inputs, normalizer: Normalizer) -> bool:
    """Whether the output needs a gradient."""
    return torch.is_grad_enabled() and (inputs.needs_grad or any(p.requires_grad for p in normalizer.parameters()))


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


def _unknown_options(unknown: Iterable[str]) -> str:
    instead = "; ".join(f"for {name}= write {SDPA_OPTIONS[name]}" for name in unknown if name in SDPA_OPTIONS)
    names = ", ".join(f"{name}=" for name in unknown)
    return f"attention() does not take {names}; {instead or 'help(attnorm.attention) lists what it takes'}"


def attend(inputs: Inputs, normalizer: Normalizer, engine: Engine = "auto") -> Tensor:
    """Output (B, H, Q, E) of validated inputs, on the cheapest engine or the given one."""
    with without_autocast(inputs.q_BHQD.device):
        return _attend(inputs, normalizer, engine)


def _attend(inputs: Inputs, normalizer: Normalizer, engine: Engine) -> Tensor:
    if inputs.q_BHQD.numel() == 0:
        return blocked(inputs, normalizer)  # some fused kernels divide by the number of rows
    if engine == "auto":
        engine = choose_engine(inputs, normalizer)
    elif not _applies(engine, inputs, normalizer):
        raise ValueError(f"{normalizer.name!r} {_MISSING[engine]} here; use engine='auto' or 'blocked'")
    if engine == "fused":
        return fused.fused(inputs, normalizer)
    if engine == "triton":
        from attnorm.engines import one_pass, stick_breaking

        if stick_breaking.applies(inputs, normalizer):
            return stick_breaking.stick_breaking(inputs, normalizer)
        return one_pass.one_pass(inputs, normalizer)
    if engine == "sparse":
        from attnorm.engines import sparse

        return sparse.sparse(inputs, normalizer)
    if engine == "flex":
        from attnorm.engines import flex

        return flex.flex(inputs, normalizer)
    return blocked(inputs, normalizer)


_MISSING = {
    "fused": "is not a rescaled softmax",
    "triton": "has no one-pass kernel",
    "sparse": "has no kernel of our own",
    "flex": "has no FlexAttention form",
}


def choose_engine(inputs: Inputs, normalizer: Normalizer) -> Engine:
    """The cheapest engine with the exact result: SDPA, and on a GPU our kernels, then FlexAttention, then blocks."""
    on_sdpa = fused.applies(inputs, normalizer) and not fused.rounds_q(inputs, normalizer)
    if not inputs.q_BHQD.is_cuda or is_exporting():  # an exported graph holds no kernel of ours
        return "fused" if on_sdpa else "blocked"
    if fused.is_plain(inputs, normalizer):
        return "fused"
    # A sink costs SDPA one more key, and in decoding a copy of the cache: 2.4 ms where our kernel takes 0.4.
    order: tuple[Engine, ...] = ("triton", "fused", "sparse", "flex") if on_sdpa else ("triton", "sparse", "flex")
    return next((engine for engine in order if _applies(engine, inputs, normalizer)), "blocked")


def _applies(engine: Engine, inputs: Inputs, normalizer: Normalizer) -> bool:
    if engine == "fused":
        return fused.applies(inputs, normalizer)
    if engine == "triton":
        from attnorm.engines import one_pass, stick_breaking  # load Triton where there is one

        return one_pass.applies(inputs, normalizer) or stick_breaking.applies(inputs, normalizer)
    if engine == "sparse":
        from attnorm.engines import sparse

        return sparse.applies(inputs, normalizer)
    if engine == "flex":
        from attnorm.engines import flex  # loads torch's compiler

        return flex.applies(inputs, normalizer)
    return True


def normalize(
    logits: Tensor,
    normalizer: str | Normalizer = "softmax",
    mask: Tensor | None = None,
    *,
    positions: Tensor | Positions | None = None,
    hidden_states: Tensor | None = None,
) -> Tensor:
    """Weights of logits (..., Q, K) under a normalizer; mask boolean, True = may attend.

    >>> normalize(logits, "ssmax", mask=mask)
    """
    chosen = resolve_for_call(normalizer)
    if isinstance(chosen, Mechanism):
        raise TypeError(
            f"{chosen.name!r} needs q, k, v, not a row of logits: call attnorm.attention(q, k, v, {chosen.name!r})"
        )
    weights: Tensor = chosen(logits, mask, positions=positions, hidden_states=hidden_states)
    return weights
