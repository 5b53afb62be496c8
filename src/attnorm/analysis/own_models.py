"""observe() and measure(): the Analysis of any PyTorch code, and of queries, keys and values in memory."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from attnorm.analysis.observation import Observation
from attnorm.analysis.result import Analysis
from attnorm.analysis.settings import (
    PROBED_GROUPS,
    TEMPERATURES,
    TOP_N,
    Normalizers,
    Rows,
    named_normalizers,
    settings_of,
)
from attnorm.analysis.verdicts import Thresholds
from attnorm.engines.inputs import validate_inputs
from attnorm.metrics.call import AttentionCall
from attnorm.models.hf_call import Visible, read_mask
from attnorm.models.torch_calls import watch_torch
from attnorm.models.torch_functions import kind_of


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
    """Measure every attention call that PyTorch code makes inside the `with` block, without changing its results.

    Observed calls: torch.nn.functional.scaled_dot_product_attention, nn.MultiheadAttention (with its fast path and
    that of nn.TransformerEncoderLayer) and flex_attention, in the thread that entered the block. Compiled models run
    uncompiled inside. Each attention module is a layer; Observation.layers and the manifest name its module.

    Args:
        model: Names the modules if the blocks of a model are called one by one (default: the modules that run).
        name: Name of the model in tables and reports (default: its class).
        Other options: as in analyze(), but all rows and all groups are measured by default.

    Raises:
        RuntimeError: Another observe() is active.

    >>> with attnorm.observe() as seen:
    ...     model(tokens)
    >>> print(seen.analysis().summary())
    """
    observation = _observation(
        name, thresholds, normalizers, top_n=top_n, rows=rows, vector_rows=vector_rows, metrics=metrics,
        temperatures=temperatures, seed=seed,
    )  # fmt: skip
    with watch_torch(observation.record, model) as sites:
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
    """Measure attention with given queries (B, H, Lq, D), keys (B, Hkv, Lk, D) and values (B, Hkv, Lk, Dv).

    Args:
        q, k, v: Tensors, or lists of tensors, one per layer; layers are numbered from 0.
        mask: Boolean with True = may attend, or numbers that are added to the logits; broadcastable to (B, H, Lq, Lk).
        causal: Aligned bottom-right, as in attnorm.attention.
        scale: Factor of the logits (default: 1/sqrt(D)).
        softcap: Replace logits by softcap * tanh(logits / softcap).
        Other options: as in observe().

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
            f"expected the same number of q, k and v, at least one each, got {counts}. Give one of each per layer."
        )
    layer_counts: dict[str, int] = {}
    with torch.no_grad():
        for tensors in zip(*layers, strict=True):
            call = _tensor_call(*tensors, mask=mask, causal=causal, scale=scale, softcap=softcap)
            index = layer_counts.get(call.kind, 0)
            layer_counts[call.kind] = index + 1
            observation.record(replace(call, layer=index), None)
    return observation.analysis()


def _observation(
    name: str | None, thresholds: Thresholds | None, normalizers: Normalizers, **options: Any
) -> Observation:
    named = named_normalizers(normalizers)
    settings = settings_of(normalizers=named, vectors="values", **options)
    if probed := [group for group in settings.metrics if group in PROBED_GROUPS]:
        raise ValueError(f"metrics: {probed[0]!r} runs a language model itself. Use attnorm.analyze(model) for it.")
    return Observation(settings, named, thresholds or Thresholds(), name)


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
