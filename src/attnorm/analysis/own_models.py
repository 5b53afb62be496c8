"""observe() and measure(): the Analysis of any PyTorch code, and of queries, keys and values in memory.

Every call is measured at once; `Observation.analysis()` combines all of them.
"""

import hashlib
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from attnorm.analysis.collect import Collector
from attnorm.analysis.manifest import content_hash, manifest_of, part_key, sampling_notes
from attnorm.analysis.result import Analysis
from attnorm.analysis.settings import (
    PROBED_GROUPS,
    TEMPERATURES,
    TOP_N,
    AnalysisSettings,
    Normalizers,
    Rows,
    description,
    named_normalizers,
    settings_of,
    start_notes,
    started_at_length,
)
from attnorm.analysis.tables import Part, merge_parts
from attnorm.analysis.verdicts import Thresholds
from attnorm.analysis.verdicts.thresholds import checked
from attnorm.engines.inputs import to_four_dimensions, validate_inputs
from attnorm.metrics.call import AttentionCall
from attnorm.models.describe import add_weights
from attnorm.models.dispatch import UnsupportedModel
from attnorm.models.hf_call import VisibleKeys, read_mask
from attnorm.models.torch_calls import CallSite, CallSites, watch_torch
from attnorm.models.torch_functions import kind_of
from attnorm.normalizers.contract import Normalizer

SHORTEST_RULE = 3  # keys; log n of fewer is 0 for too many rows to start a length rule there


@dataclass(frozen=True)
class ObservedLayer:
    """One place that calls attention: its index in the tables, and the module that makes the call."""

    kind: str
    layer: int
    path: str  # of the module; "" for a call outside of modules
    function: str  # name of the called torch function
    heads: int
    kv_heads: int
    head_dim: int


class Observation:
    """The recorded attention calls. `layers` lists where they come from; `analysis()` returns tables and verdicts."""

    def __init__(
        self,
        settings: AnalysisSettings,
        normalizers: Mapping[str, Normalizer | None],
        thresholds: Thresholds,
        name: str | None,
        given: Normalizers = (),
    ) -> None:
        """given: the normalizers as they were given; those given by name start at the keys of the first call."""
        self.name = name
        self._given, self._notes = given, list[str]()
        self.layers: list[ObservedLayer] = []
        self._settings, self._normalizers, self._thresholds = settings, normalizers, thresholds
        self._sites: CallSites | None = None
        self._parts: dict[int, _Part] = {}  # by pass
        self._models: list[nn.Module] = []
        self._about: tuple[str, str] = ("", "")  # dtype and device
        self.active = False

    @property
    def passes(self) -> int:
        """Number of forward passes with attention calls."""
        return len(self._parts)

    def __repr__(self) -> str:
        return f"<Observation: layers={len(self.layers)}, passes={self.passes}; see .layers and .analysis()>"

    def analysis(self) -> Analysis:
        """Return the Analysis of all passes; a pass is a text named "input", or "input 1", "input 2", ..."""
        if self.active:
            raise RuntimeError("expected a finished observation, got an active one. Leave the `with` block first.")
        if not self._parts:
            raise UnsupportedModel(
                "expected calls of scaled_dot_product_attention, nn.MultiheadAttention or flex_attention, got none. "
                "Code that multiplies queries and keys itself, fused kernels of other packages, scripted modules and "
                "other threads cannot be observed. Pass queries, keys and values to attnorm.measure() instead."
            )
        names = {number: "input" if self.passes == 1 else f"input {number}" for number in self._parts}
        measured = []
        for number, part in self._parts.items():
            name, length = names[number], part.collector.longest
            measured.append(Part("", {"text": name, "length": length}, part.collector.tables(name, length)))
        return Analysis.of(merge_parts(measured), self._manifest(names), self._thresholds)

    def record(self, call: AttentionCall, site: CallSite | None) -> None:
        """Measure one call. site: the module that made it; None for given tensors."""
        number = 1 if self._sites is None else self._sites.passes
        part = self._parts.get(number)
        if not self._parts:
            self._start_at(call.key_BGKD.shape[-2], causal=call.causal)
        if part is None:
            part = self._parts[number] = _Part(
                Collector(self._settings, self._normalizers, {}, lambda layers: None, together=False)
            )
            part.sha256 = content_hash(_input_tensors(self._sites, number, call))
        started = time.perf_counter()
        part.collector.tokens = _tokens(call)
        part.collector(call)
        part.seconds += time.perf_counter() - started
        part.tokens = max(part.tokens, call.query_BHQD.shape[0] * call.query_BHQD.shape[2])
        self._about = str(call.query_BHQD.dtype).removeprefix("torch."), call.query_BHQD.device.type
        if (call.kind, call.layer) not in {(layer.kind, layer.layer) for layer in self.layers}:
            path, function = ("", "tensors") if site is None else (site.path, site.function)
            sizes = call.query_BHQD.shape[1], call.key_BGKD.shape[1], call.query_BHQD.shape[3]
            self.layers.append(ObservedLayer(call.kind, call.layer, path, function, *sizes))

    def _start_at(self, length: int, *, causal: bool) -> None:
        length = max(length, SHORTEST_RULE)
        started = started_at_length(self._normalizers, self._given, length, causal=causal)
        self._notes = start_notes(self._normalizers, started, length)
        descriptions = {name: description(normalizer) for name, normalizer in started.items()}
        self._normalizers, self._settings = started, replace(self._settings, normalizers=descriptions)

    def begin(self, sites: CallSites) -> None:
        self._sites, self.active = sites, True

    def end(self) -> None:
        self.active = False
        if self._sites is not None:
            self._models = [self._sites.model] if self._sites.model is not None else self._sites.roots

    def _manifest(self, names: Mapping[int, str]) -> dict[str, Any]:
        model = self._model()
        texts = [
            {"name": names[number], "sha256": part.sha256, "size": f"{part.tokens} positions", "file": False}
            for number, part in self._parts.items()
        ]
        lengths = [part.collector.longest for part in self._parts.values()]
        settings = {"lengths": sorted(set(lengths)), **self._settings.as_dict()}
        notes = [*_layer_notes(self.layers), *sampling_notes(self._settings, lengths), *self._notes]
        if any(part.collector.repeats for part in self._parts.values()):
            notes.append("a layer attends more than once per pass: heads of later calls continue the numbers")
        parts = [
            {
                "key": part_key(model, text, length, settings),
                "text": text["name"],
                "length": length,
                "window": 0,
                "start": 0,
                "tokens": part.tokens,
                "seconds": round(part.seconds, 3),
            }
            for part, text, length in zip(self._parts.values(), texts, lengths, strict=True)
        ]
        return manifest_of(model, texts, parts, settings, notes, finished=True)

    def _model(self) -> dict[str, Any]:
        """Describe the model with the entries of models.load.describe, and the module of every layer."""
        classes = [type(getattr(model, "_orig_mod", model)).__name__ for model in self._models]
        digest = hashlib.sha256(repr((self.name, classes, self.layers)).encode())
        for model in self._models:
            add_weights(digest, model)
        dtype, device = self._about

        def same(values: Iterable[int]) -> int | None:
            distinct = set(values)
            return distinct.pop() if len(distinct) == 1 else None

        return {
            "name": self.name or " and ".join(classes) or "tensors",
            "revision": None,
            "class": " and ".join(classes) or None,
            "model_type": None,
            "parameters": sum(weight.numel() for model in self._models for weight in model.parameters()) or None,
            "dtype": dtype,
            "device": device,
            "layers": len(self.layers),
            "heads": same(layer.heads for layer in self.layers),
            "kv_heads": same(layer.kv_heads for layer in self.layers),
            "head_dim": same(layer.head_dim for layer in self.layers),
            "max_positions": None,
            "position_kind": None,
            "kernel": ", ".join(sorted({layer.function for layer in self.layers})),
            "fingerprint": digest.hexdigest(),
            "runs": "softmax",
            "runs_details": {},
            "modules": [
                {"kind": layer.kind, "layer": layer.layer, "path": layer.path, "function": layer.function}
                for layer in self.layers
            ],
            "source": None,
        }


@dataclass
class _Part:
    """One forward pass."""

    collector: Collector
    sha256: str = ""
    tokens: int = 0
    seconds: float = 0.0


def _tokens(call: AttentionCall) -> dict[str, Tensor]:
    """Return which queries are not padding: a key that no query of its sequence may see is padding."""
    mask = call.mask
    if mask is None or call.kind == "cross" or call.query_BHQD.shape[-2] != call.key_BGKD.shape[-2]:
        return {}
    tokens_BQ = to_four_dimensions(mask).any(-2).any(1).expand(call.query_BHQD.shape[0], -1)
    return {} if bool(tokens_BQ.all()) else {call.kind: tokens_BQ}


def _input_tensors(sites: CallSites | None, number: int, call: AttentionCall) -> dict[str, Tensor]:
    """Return the tensors that identify an input: the model's arguments, or else the first queries."""
    arguments = () if sites is None else sites.inputs.get(number, ())
    tensors = {str(index): value for index, value in enumerate(arguments) if isinstance(value, Tensor)}
    plain = {name: value for name, value in tensors.items() if type(value) is Tensor and not value.is_nested}
    return plain or {"queries": call.query_BHQD}


def _layer_notes(layers: Sequence[ObservedLayer]) -> list[str]:
    """Name the module of each layer, in one sentence for layers whose module paths differ in a number only."""
    stacks: dict[tuple[str, str, str], list[int]] = {}
    for layer in layers:
        if layer.path:
            stack = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", layer.path)
            stacks.setdefault((layer.kind, stack, layer.function), []).append(layer.layer)
    return [
        f"{kind} layer{'s' * (len(indices) > 1)} {_layer_ranges(indices)}: {path} ({function})"
        for (kind, path, function), indices in stacks.items()
    ]


def _layer_ranges(layers: list[int]) -> str:
    if len(layers) > 2 and layers == list(range(layers[0], layers[-1] + 1)):
        return f"{layers[0]} to {layers[-1]}"
    return ", ".join(map(str, layers))


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
        counts = ", ".join(f"{len(tensors)} {letter}" for tensors, letter in zip(layers, "qkv", strict=True))
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
        raise ValueError(
            f"metrics: {probed[0]!r} needs a language model that attnorm can run. Use attnorm.analyze(model) for it."
        )
    return Observation(settings, named, checked(thresholds), name, normalizers)


def _tensor_call(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, causal: bool, scale: float | None, softcap: float | None
) -> AttentionCall:
    """Check q, k, v and the mask, and return them as an AttentionCall; numbers in a mask become a bias."""
    added = mask if mask is not None and mask.is_floating_point() else None
    inputs = validate_inputs(
        q, k, v, mask=None if added is not None else mask, causal=causal, scale=scale, positions=None
    )
    queries, keys = inputs.queries, inputs.keys
    visible = VisibleKeys(causal=False)
    mask_or_bias = added if added is not None else inputs.mask
    if mask_or_bias is not None:
        mask_or_bias = to_four_dimensions(mask_or_bias)
        visible = read_mask("sdpa", mask_or_bias.expand(*mask_or_bias.shape[:-1], keys), queries, keys)
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
