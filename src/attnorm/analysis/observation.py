"""What observe() and measure() have seen: calls become tables at once, and an Analysis when all are there."""

import hashlib
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from attnorm.analysis.collect import Collector
from attnorm.analysis.manifest import SCHEMA, content_hash, now, part_key, versions
from attnorm.analysis.over_windows import together
from attnorm.analysis.result import Analysis
from attnorm.analysis.run_manifest import sampling_notes
from attnorm.analysis.settings import AnalysisSettings
from attnorm.analysis.store import Part
from attnorm.analysis.verdicts import Thresholds
from attnorm.metrics.call import AttentionCall
from attnorm.models.describe import add_weights
from attnorm.models.dispatch import UnsupportedModel
from attnorm.models.torch_calls import CallSite, CallSites
from attnorm.normalizers.contract import Normalizer


@dataclass(frozen=True)
class ObservedLayer:
    """One attention call site: the index that tables carry, and the module that makes the call."""

    kind: str
    layer: int
    path: str  # of the module, "" for a call outside of any module
    function: str  # torch's name of what was called
    heads: int
    kv_heads: int
    head_dim: int


class Observation:
    """What observe() has seen. `layers` lists the call sites, `analysis()` gives tables and verdicts."""

    def __init__(
        self,
        settings: AnalysisSettings,
        normalizers: Mapping[str, Normalizer | None],
        thresholds: Thresholds,
        name: str | None,
    ) -> None:
        self.name = name
        self.layers: list[ObservedLayer] = []
        self._settings, self._normalizers, self._thresholds = settings, normalizers, thresholds
        self._sites: CallSites | None = None
        self._parts: dict[int, _Part] = {}  # by pass
        self._models: list[nn.Module] = []
        self._about: tuple[str, str] = ("", "")  # dtype and device
        self.active = False

    @property
    def passes(self) -> int:
        """Passes over an input that made attention calls."""
        return len(self._parts)

    def __repr__(self) -> str:
        return f"<Observation: layers={len(self.layers)}, passes={self.passes}; see .layers and .analysis()>"

    def analysis(self) -> Analysis:
        """The Analysis of all passes: each is a text named "input", or "input 1", "input 2", ..."""
        if self.active:
            raise RuntimeError("expected a finished observation, got an active one. Leave the `with` block first.")
        if not self._parts:
            raise UnsupportedModel(
                "expected calls of scaled_dot_product_attention, nn.MultiheadAttention or flex_attention, got none. "
                "Code that multiplies queries and keys itself, fused kernels of other packages, scripted modules and "
                "other threads cannot be observed: give queries, keys and values to attnorm.measure() instead."
            )
        names = {number: "input" if self.passes == 1 else f"input {number}" for number in self._parts}
        measured = []
        for number, part in self._parts.items():
            name, length = names[number], part.collector.longest
            measured.append(Part("", {"text": name, "length": length}, part.collector.tables(name, length)))
        return Analysis.of(together(measured), self._manifest(names), self._thresholds)

    def saw(self, call: AttentionCall, site: CallSite | None) -> None:
        """Measure one call; site: where it comes from, where a model made it."""
        number = 1 if self._sites is None else self._sites.passes
        part = self._parts.get(number)
        if part is None:
            part = self._parts[number] = _Part(Collector(self._settings, self._normalizers, {}, _ignore))
            part.sha256 = content_hash(_input_tensors(self._sites, number, call))
        started = time.perf_counter()
        part.collector.tokens = _tokens(call)
        part.collector(call)
        part.seconds += time.perf_counter() - started
        part.tokens = max(part.tokens, call.query_BHQD.shape[0] * call.query_BHQD.shape[2])
        self._about = str(call.query_BHQD.dtype).removeprefix("torch."), call.query_BHQD.device.type
        if (call.kind, call.layer) not in {(known.kind, known.layer) for known in self.layers}:
            path, function = ("", "tensors") if site is None else (site.path, site.function)
            sizes = call.query_BHQD.shape[1], call.key_BGKD.shape[1], call.query_BHQD.shape[3]
            self.layers.append(ObservedLayer(call.kind, call.layer, path, function, *sizes))

    def begin(self, sites: CallSites) -> None:
        self._sites, self.active = sites, True

    def end(self) -> None:
        self.active = False
        if self._sites is not None:
            self._models = [self._sites.model] if self._sites.model is not None else self._sites.roots

    def _manifest(self, names: Mapping[int, str]) -> dict[str, Any]:
        model = self._model()
        texts = [_text(names[number], part) for number, part in self._parts.items()]
        lengths = [part.collector.longest for part in self._parts.values()]
        settings = {"lengths": sorted(set(lengths)), **self._settings.as_dict()}
        notes = [*_layer_notes(self.layers), *sampling_notes(self._settings, lengths)]
        if any(part.collector.repeats for part in self._parts.values()):
            notes.append("a layer attends more than once in a pass: heads of later calls are numbered on")
        return {
            "schema": SCHEMA,
            "finished": True,
            "created": now(),
            "model": model,
            "texts": texts,
            "parts": [
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
            ],
            "settings": settings,
            "versions": versions(),
            "notes": notes,
        }

    def _model(self) -> dict[str, Any]:
        """As models.describe has it for a transformers model, with the module of every layer."""
        classes = [type(getattr(model, "_orig_mod", model)).__name__ for model in self._models]
        digest = hashlib.sha256(repr((self.name, classes, self.layers)).encode())
        for model in self._models:
            add_weights(digest, model)
        dtype, device = self._about

        def same(values: Iterable[int]) -> int | None:
            found = set(values)
            return found.pop() if len(found) == 1 else None

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
    """One pass over an input."""

    collector: Collector
    sha256: str = ""
    tokens: int = 0
    seconds: float = 0.0


def _tokens(call: AttentionCall) -> dict[str, Tensor]:
    """Which queries are no padding: a key of a sequence that no query of it may see is padding, and so is its query."""
    mask = call.mask
    if mask is None or call.kind == "cross" or call.query_BHQD.shape[-2] != call.key_BGKD.shape[-2]:
        return {}
    mask = mask.reshape(*([1] * (4 - mask.dim())), *mask.shape)
    tokens_BQ = mask.any(-2).any(1).expand(call.query_BHQD.shape[0], -1)
    return {} if bool(tokens_BQ.all()) else {call.kind: tokens_BQ}


def _input_tensors(sites: CallSites | None, number: int, call: AttentionCall) -> dict[str, Tensor]:
    """What identifies an input: tensors that the model was called with, or the first queries."""
    given = () if sites is None else sites.inputs.get(number, ())
    found = {str(place): value for place, value in enumerate(given) if isinstance(value, Tensor)}
    plain = {name: value for name, value in found.items() if type(value) is Tensor and not value.is_nested}
    return plain or {"queries": call.query_BHQD}


def _text(name: str, part: _Part) -> dict[str, Any]:
    return {"name": name, "sha256": part.sha256, "size": f"{part.tokens} positions", "file": False}


def _layer_notes(layers: Sequence[ObservedLayer]) -> list[str]:
    """Which module each layer is: one sentence for layers whose modules differ in a number only."""
    stacks: dict[tuple[str, str, str], list[int]] = {}
    for layer in layers:
        if layer.path:
            stack = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", layer.path)
            stacks.setdefault((layer.kind, stack, layer.function), []).append(layer.layer)
    return [
        f"{kind} layer{'s' * (len(found) > 1)} {_numbers(found)}: {path} ({function})"
        for (kind, path, function), found in stacks.items()
    ]


def _numbers(layers: list[int]) -> str:
    if len(layers) > 2 and layers == list(range(layers[0], layers[-1] + 1)):
        return f"{layers[0]} to {layers[-1]}"
    return ", ".join(map(str, layers))


def _ignore(layers: int) -> None:
    pass
