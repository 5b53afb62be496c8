"""observe() and measure(): the same Analysis for any PyTorch code, and for queries, keys and values in memory."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from attnorm.analysis.observation import Observation
from attnorm.analysis.result import Analysis
from attnorm.analysis.settings import Rows, named_normalizers, settings_of
from attnorm.analysis.verdicts import Thresholds
from attnorm.engines.inputs import validate_inputs
from attnorm.metrics.call import AttentionCall
from attnorm.models.hf_call import Visible, read_mask
from attnorm.models.torch_calls import watch_torch
from attnorm.models.torch_functions import kind_of
from attnorm.normalizers.contract import Normalizer

Normalizers = str | Normalizer | Iterable[str | Normalizer]
TOP_N = (1, 5, 10, 20, 100)
TEMPERATURES = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 10.0)


@contextmanager
def observe(
    model: nn.Module | None = None,
    *,
    name: str | None = None,
    top_n: Sequence[int] | int = TOP_N,
    rows: Rows = "all",
    normalizers: Normalizers = ("model",),
    vector_rows: int | None = None,
    metrics: str | Iterable[str] = "all",
    temperatures: Sequence[float] = TEMPERATURES,
    seed: int = 0,
    thresholds: Thresholds | None = None,
) -> Iterator[Observation]:
    """Measure every attention call that PyTorch code makes inside the `with` block; its results stay as they are.

    Seen are torch.nn.functional.scaled_dot_product_attention, nn.MultiheadAttention (its fast path and
    nn.TransformerEncoderLayer's included) and flex_attention, in the thread that entered the block. Compiled models run
    uncompiled inside. Each attention module is a layer; Observation.layers and the manifest name its module.

    model: names the modules where a model's blocks are called one by one; None for the modules that run.
    name: of the model in tables and reports (default: its class). All other options: as in analyze(), but all rows
    and all groups are measured by default.
    Raises RuntimeError where another observe() is active.

    >>> with attnorm.observe() as seen:
    ...     model(tokens)
    >>> print(seen.analysis().summary())
    """
    observation = _observation(
        name, thresholds, normalizers, top_n=top_n, rows=rows, vector_rows=vector_rows, metrics=metrics,
        temperatures=temperatures, seed=seed,
    )  # fmt: skip
    with watch_torch(observation.saw, model) as sites:
        observation.begin(sites)
        try:
            yield observation
        finally:
            observation.end()


def measure(
    q: Tensor | Sequence[Tensor],
    k: Tensor | Sequence[Tensor],
    v: Tensor | Sequence[Tensor],
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    name: str | None = None,
    top_n: Sequence[int] | int = TOP_N,
    rows: Rows = "all",
    normalizers: Normalizers = ("model",),
    vector_rows: int | None = None,
    metrics: str | Iterable[str] = "all",
    temperatures: Sequence[float] = TEMPERATURES,
    seed: int = 0,
    thresholds: Thresholds | None = None,
) -> Analysis:
    """The Analysis of attention with these queries (B, H, Lq, D), keys (B, Hkv, Lk, D) and values (B, Hkv, Lk, Dv).

    Lists of tensors are the layers of a model, numbered from 0. mask: boolean with True = may attend, or numbers that
    are added to the logits; broadcastable to (B, H, Lq, Lk). causal: aligned bottom-right, as in attnorm.attention.
    scale: default 1/sqrt(D). softcap: logits become softcap * tanh(logits / softcap). Other options: as in observe().

    >>> attnorm.measure(q, k, v, causal=True).summary()
    """
    observation = _observation(
        name, thresholds, normalizers, top_n=top_n, rows=rows, vector_rows=vector_rows, metrics=metrics,
        temperatures=temperatures, seed=seed,
    )  # fmt: skip
    layers = [[tensors] if isinstance(tensors, Tensor) else list(tensors) for tensors in (q, k, v)]
    if not layers[0] or len({len(tensors) for tensors in layers}) > 1:
        counts = ", ".join(f"{len(tensors)} {what}" for tensors, what in zip(layers, "qkv", strict=True))
        raise ValueError(
            f"expected as many q as k and v, at least one of each, got {counts}. Give one of each a layer."
        )
    counted: dict[str, int] = {}
    with torch.no_grad():
        for tensors in zip(*layers, strict=True):
            call = _tensor_call(*tensors, mask=mask, causal=causal, scale=scale, softcap=softcap)
            number = counted[call.kind] = counted.get(call.kind, -1) + 1
            observation.saw(replace(call, layer=number), None)
    return observation.analysis()


def _observation(
    name: str | None, thresholds: Thresholds | None, normalizers: Normalizers, **options: Any
) -> Observation:
    named = named_normalizers(normalizers)
    settings = settings_of(normalizers=named, vectors="values", **options)
    return Observation(settings, named, Thresholds() if thresholds is None else thresholds, name)


def _tensor_call(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, causal: bool, scale: float | None, softcap: float | None
) -> AttentionCall:
    added = mask if mask is not None and mask.is_floating_point() else None
    inputs = validate_inputs(
        q, k, v, mask=None if added is not None else mask, causal=causal, scale=scale, positions=None
    )
    queries, keys = inputs.queries, inputs.keys
    visible = Visible(causal=False)
    given = added if added is not None else inputs.mask
    if given is not None:
        given = given.reshape(*([1] * (4 - given.dim())), *given.shape)
        visible = read_mask("sdpa", given.expand(*given.shape[:-1], keys), queries, keys)
    if causal and visible.mask is not None and visible.mask.shape[-2] > 1:
        ordered = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
        visible = replace(visible, mask=visible.mask & ordered)
    elif causal:
        visible = replace(visible, causal=True)
    return AttentionCall(
        layer=0,
        kind="decoder" if causal else kind_of(visible, queries, keys, itself=queries == keys),
        query_BHQD=inputs.q_BHQD.detach(),
        key_BGKD=inputs.k_BGKD.detach(),
        value_BGKE=inputs.v_BGKE.detach(),
        scale=inputs.scale,
        causal=visible.causal,
        mask=visible.mask,
        softcap=softcap,
        bias=visible.bias,
    )
