"""The table of all normalizers by name, and `get`, which builds one.

BUILT_IN names the factory of every built-in normalizer; its module is imported on first use. Other packages add their
own with `@attnorm.register("name")` on a factory (or a Map, LogitRule or Selection class), or with an entry point in
the group "attnorm.normalizers", which needs no import.

`get` validates options against the signature of the factory, so that an error names a value of the wrong type. The
factory itself validates strings and classes.
"""

import difflib
import importlib
import inspect
import math
import reprlib
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from itertools import chain
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, overload

import torch

from attnorm.normalizers.contract import LogitRule, Map, Mechanism, Normalizer, Selection, outside_transforms
from attnorm.normalizers.declaration import Declaration, declaration_of
from attnorm.normalizers.softmax import Softmax
from attnorm.normalizers.spec import with_options

ENTRY_POINT_GROUP = "attnorm.normalizers"

# Words for ways to compute attention, which people pass as normalizers, and the engine of `attention` that does it.
ENGINE_WORDS = {
    "fused": "fused", "sdpa": "fused", "flash": "fused", "cudnn": "fused", "flash_attention": "fused",
    "flash_attention_2": "fused", "flash_attention_3": "fused", "triton": "triton",
    "blocked": "blocked", "eager": "blocked",
}  # fmt: skip

Factory = Callable[..., Any]
F = TypeVar("F", bound=Factory)


@dataclass(frozen=True)
class NormalizerEntry:
    """The factory of a normalizer (as module:name, or the function itself), and its paper."""

    target: str | Factory
    paper: str = ""
    url: str = ""

    def factory(self) -> Factory:
        if callable(self.target):
            return self.target
        module, _, attribute = self.target.partition(":")
        try:
            factory: Factory = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ImportError(
                f"the normalizer at {self.target!r} cannot be loaded: {str(error).rstrip('.')}. Repair or "
                "uninstall its package."
            ) from error
        return factory

    @property
    def address(self) -> str:
        """The definition of the factory as module:name."""
        if isinstance(self.target, str):
            return self.target
        return f"{getattr(self.target, '__module__', '')}:{getattr(self.target, '__qualname__', self.target)}"

    @property
    def declaration(self) -> Declaration:
        return declaration_of(self.factory())

    @property
    def summary(self) -> str:
        return (inspect.getdoc(self.factory()) or "").partition("\n")[0]

    @property
    def notes(self) -> str:
        return (inspect.getdoc(self.factory()) or "").partition("\n")[2].strip()


def _arxiv(number: str) -> str:
    return f"https://arxiv.org/abs/{number}"


BUILT_IN: dict[str, NormalizerEntry] = {
    name: NormalizerEntry(f"attnorm.{target}", paper, url)
    for name, target, paper, url in [
        ("softmax", "normalizers.softmax:softmax", "Vaswani et al. 2017", _arxiv("1706.03762")),
        ("sparsemax", "normalizers.entmax:sparsemax", "Martins & Astudillo 2016", _arxiv("1602.02068")),
        ("entmax15", "normalizers.entmax:entmax15", "Peters et al. 2019", _arxiv("1905.05702")),
        ("entmax", "normalizers.entmax:entmax", "Correia et al. 2019", _arxiv("1909.00015")),
        ("ssmax", "normalizers.ssmax:ssmax", "Nakanishi 2025", _arxiv("2501.19399")),
        ("asentmax", "normalizers.asentmax:asentmax", "Vasylenko et al. 2025", _arxiv("2506.16640")),
        ("sa_softmax", "normalizers.sa_softmax:sa_softmax", "Zheng et al. 2025", _arxiv("2502.18277")),
        (
            "adaptive_temperature",
            "normalizers.adaptive_temperature:adaptive_temperature",
            "Velickovic et al. 2024",
            _arxiv("2410.01104"),
        ),
        ("sigmoid", "normalizers.sigmoid:sigmoid", "Ramapuram et al. 2024", _arxiv("2409.04431")),
        (
            "softmax1",
            "normalizers.sink:softmax1",
            "Miller 2023",
            "https://www.evanmiller.org/attention-is-off-by-one.html",
        ),
        ("sink", "normalizers.sink:sink", "gpt-oss 2025", _arxiv("2508.10925")),
        ("relu", "normalizers.relu:relu", "Wortsman et al. 2023", _arxiv("2309.08586")),
        ("softpick", "normalizers.softpick:softpick", "Zuhri et al. 2025", _arxiv("2504.20966")),
        ("stick_breaking", "normalizers.stick_breaking:stick_breaking", "Tan et al. 2024", _arxiv("2410.17980")),
        ("topk", "normalizers.topk:topk", "Gupta et al. 2021", _arxiv("2106.06899")),
        ("hard", "normalizers.topk:hard", "Bengio et al. 2013", _arxiv("1308.3432")),
        ("log_scaled", "normalizers.log_scaled:log_scaled", "Qwen, Llama 4, YaRN", _arxiv("2309.00071")),
        ("scale_invariant", "normalizers.scale_invariant:scale_invariant", "Anson et al. 2025", _arxiv("2505.17083")),
        ("kernel", "normalizers.kernel:kernel", "Mudarisov et al. 2025", _arxiv("2508.17821")),
        ("kneemax", "normalizers.kneemax:kneemax", "attnorm", "docs/theory/kneemax.md"),
        ("nearmax", "normalizers.alibi:nearmax", "attnorm", "docs/theory/kneemax.md"),
        ("local", "normalizers.local:local", "Beltagy et al. 2020", _arxiv("2004.05150")),
        ("softcap", "normalizers.softcap:softcap", "Gemma 2 2024", _arxiv("2408.00118")),
        ("ssa", "normalizers.ssmax:ssa", "Zhang et al. 2024", _arxiv("2411.12892")),
        (
            "norm_softmax",
            "normalizers.norm_softmax:norm_softmax",
            "Jiang et al. 2022",
            "https://openreview.net/forum?id=4g7nCbpjNwd",
        ),
        ("threshold_relu", "normalizers.relu:threshold_relu", "Huang et al. 2026", _arxiv("2601.12145")),
        (
            "odd_polynomial",
            "normalizers.odd_polynomial:odd_polynomial",
            "Saratchandran et al. 2024",
            _arxiv("2410.18613"),
        ),
        ("composed", "normalizers.composition:composed", "attnorm", "docs/normalizers.md"),
        ("tempered", "normalizers.composition:tempered", "Nair 2025", _arxiv("2510.23012")),
        ("alibi", "normalizers.alibi:alibi", "Press et al. 2022", _arxiv("2108.12409")),
        ("gaussian", "mechanisms.soft:Gaussian", "Lu et al. 2021", _arxiv("2110.11945")),
        ("soft", "mechanisms.soft:Soft", "Lu et al. 2022", _arxiv("2207.03341")),
        ("linear", "mechanisms.linear:Linear", "Katharopoulos et al. 2020", _arxiv("2006.16236")),
        ("selective", "mechanisms.selective:Selective", "Leviathan et al. 2024", _arxiv("2410.02703")),
        ("differential", "mechanisms.differential:Differential", "Ye et al. 2024", _arxiv("2410.05258")),
        (
            "differential_v2",
            "mechanisms.differential:DifferentialV2",
            "Ye et al. 2026",
            "https://github.com/microsoft/unilm/tree/master/Diff-Transformer/Diff-Transformer-V2",
        ),
        ("tda", "mechanisms.differential:ThresholdDifferential", "Huang et al. 2026", _arxiv("2601.12145")),
        ("laser", "mechanisms.laser:Laser", "Duvvuri & Dhillon 2024", _arxiv("2411.03493")),
        ("forget", "mechanisms.forget:Forget", "Lin et al. 2025", _arxiv("2503.02130")),
    ]
}

# For type checkers, which cannot read the table: the names of row normalizers, and of mechanisms.
RowName = Literal[
    "softmax", "sparsemax", "entmax15", "entmax", "ssmax", "asentmax", "sa_softmax", "adaptive_temperature", "sigmoid",
    "softmax1", "sink", "relu", "softpick", "stick_breaking", "topk", "hard", "log_scaled", "scale_invariant", "kernel",
    "kneemax", "nearmax", "local", "softcap", "ssa", "norm_softmax", "threshold_relu", "odd_polynomial", "alibi",
    "tempered", "composed",
]  # fmt: skip
MechanismName = Literal[
    "gaussian", "soft", "linear", "selective", "differential", "differential_v2", "tda", "laser", "forget",
]  # fmt: skip

_registered: dict[str, NormalizerEntry] = {}


def register(name: str, *, paper: str = "", url: str = "") -> Callable[[F], F]:
    """Decorate a factory, or a Map, LogitRule, Selection or Mechanism class, to make it available as `name`."""
    if not isinstance(name, str):  # @register without a name would silently replace its class by a decorator
        raise TypeError(f"register: expected a name, got {name!r}. Write @attnorm.register('my_normalizer').")

    def add(factory: F) -> F:
        if not name.isidentifier():
            raise ValueError(f"a normalizer's name must be a Python identifier, got {name!r}")
        if name in BUILT_IN:
            raise ValueError(f"{name!r} is a built-in normalizer. Choose another name, e.g. 'my_{name}'.")
        entry, existing = NormalizerEntry(factory, paper, url), _registered.get(name)
        if existing is not None and existing.target is not factory and not _is_same_definition(existing, entry):
            raise ValueError(f"{name!r} is already registered by {existing.target!r}. Choose another name.")
        _registered[name] = entry
        return factory

    return add


def _is_same_definition(existing: NormalizerEntry, entry: NormalizerEntry) -> bool:
    """Whether the same code was run again: a notebook cell, or a reloaded module."""
    return existing.address == entry.address and "<lambda>" not in entry.address


def entries() -> dict[str, NormalizerEntry]:
    """Return all known normalizers: built in, registered, and found through entry points."""
    all_entries = {**BUILT_IN, **_registered}
    for point in _entry_points(tuple(sys.path)):
        if point.name in all_entries and all_entries[point.name].address != point.value:
            raise ValueError(
                f"the entry point {point.name!r} = {point.value!r} has the name of another normalizer. Uninstall "
                "that package, or ask its authors to rename the entry point."
            )
        all_entries.setdefault(point.name, NormalizerEntry(point.value))
    return all_entries


@cache  # a search takes milliseconds, longer than a small attention call; repeated if sys.path changes
def _entry_points(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=ENTRY_POINT_GROUP))


def available() -> list[str]:
    """Return the names of all normalizers, built in and registered."""
    return list(entries())


def entry_of(name: str, others: Iterable[str] = ()) -> NormalizerEntry:
    """Return the entry of a normalizer. others: further names that the caller knows, for the message.

    Raises:
        ValueError: No normalizer has this name. The message has close names, or how to pass an engine.
    """
    registered = entries()
    if isinstance(name, str) and name in registered:
        return registered[name]
    known = [*others, *registered]
    close = difflib.get_close_matches(str(name), known, n=3, cutoff=0.7)
    if str(name) in ENGINE_WORDS:
        hint = (
            f"{name!r} is an engine. Leave it out, and the fastest engine is chosen, or pass it to attnorm.attention: "
            f"attention(q, k, v, 'softmax', engine={ENGINE_WORDS[name]!r})"
        )
    elif close:
        hint = f"did you mean {' or '.join(map(repr, close))}?"
    else:
        hint = f"known are {', '.join(sorted(known))}"
    raise ValueError(f"unknown normalizer {name!r}; {hint}")


@overload
def get(name: RowName, **options: Any) -> Normalizer: ...
@overload
def get(name: MechanismName, **options: Any) -> Mechanism: ...
@overload
def get(name: str, **options: Any) -> Normalizer | Mechanism: ...
def get(name: str, **options: Any) -> Normalizer | Mechanism:
    """Build a normalizer by name: get("entmax", alpha=1.3), get("entmax:alpha=1.3") or get("ssmax", heads=12).

    Code under torch.compile builds it once, while it is traced.
    """
    if torch.compiler.is_compiling():
        built: Normalizer | Mechanism = getattr(
            _compiled_normalizers, _build_for_compiled_code(name, True, None, **options)
        )
        return built
    return _build(name, options)


def _build(name: str, options: dict[str, Any], trainable: bool = True) -> Normalizer | Mechanism:
    if isinstance(name, str) and ":" in name:
        name, options = with_options(name, options)
    factory = entry_of(name).factory()
    if options:
        options = plain_options(factory, options)
    check_options(name, factory, options)
    normalizer = as_normalizer(factory(**options), name)
    reject_nan(name, options)
    if not trainable and name in BUILT_IN:  # a factory of somebody else may return an object that they train
        normalizer.requires_grad_(False)
    return normalizer


def as_normalizer(made: Any, name: str | None = None) -> Normalizer | Mechanism:
    """Return a normalizer from the result of a factory: a single rule or selection is combined with softmax."""
    if isinstance(made, Map):
        made = Normalizer(made)
    elif isinstance(made, LogitRule):
        made = Normalizer(Softmax(), scale=[made])
    elif isinstance(made, Selection):
        made = Normalizer(Softmax(), select=[made])
    elif not isinstance(made, Normalizer | Mechanism):
        raise TypeError(
            f"expected a Normalizer, Mechanism, Map, LogitRule or Selection, got {type(made).__name__} "
            f"({reprlib.repr(made)}). attnorm.get('ssmax') builds one by name, and attnorm.available() lists the "
            "names."
        )
    if name is not None and made.name == "custom":
        made.name = name
    assert isinstance(made, Normalizer | Mechanism)
    return made


def resolve(normalizer: str | Normalizer | Mechanism) -> Normalizer | Mechanism:
    """Build the normalizer if it is given by name; return an object unchanged."""
    return get(normalizer) if isinstance(normalizer, str) else as_normalizer(normalizer)


def resolve_for_call(normalizer: str | Normalizer | Mechanism, tensor: torch.Tensor) -> Normalizer | Mechanism:
    """Resolve a normalizer for a single call.

    A normalizer given by name is built for this call alone, on the device of the tensor; the parameters of a
    built-in one need no gradient. A built-in one without tensors is built once and reused. An object that a registered
    factory keeps is not moved: it may be in training.

    Raises:
        ValueError: A registered factory made tensors on another device.
    """
    if not isinstance(normalizer, str):
        return as_normalizer(normalizer)
    if torch.compiler.is_compiling():
        attribute = _build_for_compiled_code(normalizer, False, tensor.device)
        built: Normalizer | Mechanism = getattr(_compiled_normalizers, attribute)
        return built
    cached = _stateless_normalizers.get(normalizer)
    if cached is not None:
        return cached
    built = _build_for_call(normalizer, tensor.device if isinstance(tensor, torch.Tensor) else None)
    if normalizer in BUILT_IN and not any(True for _ in chain(built.parameters(), built.buffers())):
        _stateless_normalizers[normalizer] = built
    return built


def _build_for_call(name: str, device: torch.device | None) -> Normalizer | Mechanism:
    with outside_transforms(), nullcontext() if device is None else device:
        built = _build(name, {}, trainable=False)
    if device is None or name in BUILT_IN:
        return built
    elsewhere = [tensor for tensor in chain(built.parameters(), built.buffers()) if tensor.device != device]
    if elsewhere:
        raise ValueError(
            f"expected the tensors of {name!r} on {device}, as q or the logits, got {elsewhere[0].device}. Leave out "
            f"device= in its factory, or pass an object: attnorm.get({name!r}).to({str(device)!r})"
        )
    return built


_stateless_normalizers: dict[str, Normalizer | Mechanism] = {}


def is_shared(normalizer: Normalizer | Mechanism) -> bool:
    """Whether calls by name reuse this object, which has no tensors that a device would have to hold."""
    return _stateless_normalizers.get(normalizer.name) is normalizer


class _CompiledNormalizers:
    """Holds the normalizers of compiled code as attributes, which torch.compile can guard by name.

    An attribute name is the specification with its options in hexadecimal: a guard needs a Python identifier.
    """


_compiled_normalizers = _CompiledNormalizers()


def _build_for_compiled_code(name: str, trainable: bool, device: torch.device | None, /, **options: Any) -> str:
    """Build the normalizer of that name, which may have options; return the attribute that holds it."""
    attribute = f"normalizer_{repr((name, trainable, device, *sorted(options.items()))).encode().hex()}"
    with outside_transforms():
        built = _build(name, options) if trainable else _build_for_call(name, device)
        if name.partition(":")[0] in BUILT_IN and not trainable:
            _turn_parameters_into_buffers(built)
    setattr(_compiled_normalizers, attribute, built)
    return attribute


def _turn_parameters_into_buffers(normalizer: Normalizer | Mechanism) -> None:
    """torch.export(strict=True) takes buffers of objects outside the exported module, but no parameters."""
    for module in normalizer.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            delattr(module, name)
            module.register_buffer(name, parameter.detach())


# The effect of torch.compiler.assume_constant_result, without importing the compiler: the search for entry points
# cannot be traced, so it runs at trace time.
_build_for_compiled_code._dynamo_marked_constant = True  # type: ignore[attr-defined]


def check_options(name: str, factory: Factory, options: Mapping[str, Any]) -> None:
    """Raise TypeError for an option that the factory does not have, or whose value has the wrong type."""
    signature = inspect.signature(factory)
    try:
        signature.bind(**options)
    except TypeError as error:
        accepted = ", ".join(signature.parameters) or "no options"
        raise TypeError(f"normalizer {name!r}: {str(error).rstrip('.')}. It accepts {accepted}.") from None
    for option, value in options.items():
        parameter = signature.parameters.get(option)
        types = [] if parameter is None else _accepted_types(parameter.annotation)
        if parameter is None or not all(kind in _TYPE_WORDS for kind in types):
            continue
        if any(_has_type(value, kind) for kind in types):
            continue
        default = "" if parameter.default is parameter.empty else f"; leave it out for {parameter.default!r}"
        expected = " or ".join(_TYPE_WORDS[kind] for kind in types)
        raise TypeError(f"normalizer {name!r}: {option} must be {expected}, got {value!r}{default}")


def plain_options(factory: Factory, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with NumPy's numbers, and tensors of one element for numbers, as numbers of Python.

    These are what JSON can hold when a model is saved.
    """
    parameters = inspect.signature(factory).parameters
    plain = dict(options)
    for option, value in options.items():
        if isinstance(value, torch.Tensor):
            types = _accepted_types(parameters[option].annotation) if option in parameters else [torch.Tensor]
            is_number = value.numel() == 1 and all(kind in _TYPE_WORDS for kind in types)
        else:
            is_number = getattr(value, "shape", None) == ()  # of NumPy
        if is_number and getattr(value, "requires_grad", False) and torch.is_grad_enabled():
            raise ValueError(
                f"expected a number for {option}, got a tensor that requires a gradient, which it would not get. "
                f"Pass {option}={value.item():g} as the start value: a normalizer learns its own parameters "
                "only."
            )
        if is_number:
            plain[option] = value.item()
    return plain


def reject_nan(name: str, options: Mapping[str, Any]) -> None:
    """Raise ValueError for NaN. Call it after the factory, whose own error may name the valid range."""
    for option, value in options.items():
        if isinstance(value, float) and math.isnan(value):
            raise ValueError(f"normalizer {name!r}: {option} must be a number, got nan")


_TYPE_WORDS: dict[Any, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    Callable: "a function",
    NoneType: "None",
}


def _accepted_types(annotation: Any) -> list[Any]:
    """Return the types of an annotation, e.g. [float, NoneType] for float | None."""
    if get_origin(annotation) in (Union, UnionType):
        return [kind for part in get_args(annotation) for kind in _accepted_types(part)]
    if get_origin(annotation) is get_origin(Callable[..., Any]):
        return [Callable]
    return [NoneType if annotation is None else annotation]


def _has_type(value: Any, kind: Any) -> bool:
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    if kind is Callable:
        return callable(value)
    if kind is NoneType:
        return value is None
    return isinstance(value, Integral if kind is int else Real)
