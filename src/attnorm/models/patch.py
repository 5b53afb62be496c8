"""Replace softmax in a model by another normalizer: `patch` until removed, `swap` within a with statement.

Steps of `patch`: find the attention modules to change (`_select_modules`), build a normalizer for each of them
(`_build_normalizer`), and attach it (models/patch_state.py). A normalizer is a submodule of its attention module, so
its parameters are parameters of the model. Layers and heads that are left out keep softmax.
"""

import copy
import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from attnorm.mechanisms.differential import DifferentialV2
from attnorm.mechanisms.forget import Forget
from attnorm.models.dispatch import Site, attention_sites, check_model, check_observable, is_paused
from attnorm.models.layer_normalizer import (
    SOFTMAX,
    USUAL_LENGTH,
    as_integer,
    build,
    check_fit,
    head_count,
    is_recipe,
    layer_groups,
    restrict_to_heads,
    trained_length,
    validate_heads,
)
from attnorm.models.observe import OTHER_SEQUENCE
from attnorm.models.patch_state import (
    attach,
    detach,
    device_of,
    is_patched,
    normalizer_of,
    patched_modules,
    temporarily_unpatched,
)
from attnorm.models.patched_attention import check_plain_logits, check_readable
from attnorm.models.recipe import Recipe
from attnorm.models.threads import exclusive
from attnorm.normalizers.contract import Mechanism, Normalizer
from attnorm.normalizers.declaration import LayerFacts
from attnorm.normalizers.registry import as_normalizer, entry_of
from attnorm.normalizers.spec import parse_spec, with_options

Replacement = str | Normalizer | Mechanism
LayerRecipe = Mapping[str, Replacement] | Mapping[int, Replacement] | os.PathLike[str]
Layers = int | Iterable[int] | Mapping[int, int | Sequence[int] | None]

CROSS_ATTENTION = re.compile(r"cross|encdec|encoder_attn", re.IGNORECASE)


class Patch:
    """The handle that `patch` returns: the normalizers that replace softmax in a model."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self._modules = modules
        self._attached = {path: normalizer_of(module) for path, module in modules.items()}

    @property
    def normalizers(self) -> dict[str, Normalizer | Mechanism]:
        """Path of the attention module -> its normalizer; empty after `remove`."""
        attached = {path: normalizer_of(module) for path, module in self._modules.items() if is_patched(module)}
        # A later patch may have attached another one.
        return {path: normalizer for path, normalizer in attached.items() if normalizer is self._attached[path]}

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of the normalizers, for a separate optimizer group."""
        for normalizer in self.normalizers.values():
            yield from normalizer.parameters()

    def remove(self) -> None:
        """Restore softmax; a second call changes nothing."""
        with exclusive(*self._modules.values()):
            self._detach()

    def _detach(self) -> None:
        detach([self._modules[path] for path in self.normalizers])

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run the model without the patch, within a with statement; the normalizers keep their parameters.

        >>> with handle.paused():
        ...     baseline = model(**batch).loss
        """
        with exclusive(*self._modules.values(), block="paused()"):
            modules = [self._modules[path] for path in self.normalizers]
            if not modules:
                raise RuntimeError(
                    "expected an active patch, got one that was removed. The model already runs without it."
                )
            if any(map(is_paused, modules)):
                raise RuntimeError(
                    "expected an active patch, got one that is paused already. Leave the first paused() before you "
                    "enter another."
                )
            with temporarily_unpatched(modules):
                yield

    def __repr__(self) -> str:
        normalizers = self.normalizers
        names = " and ".join(sorted({normalizer.name for normalizer in normalizers.values()}))
        modules = "attention module" if len(normalizers) == 1 else "attention modules"
        if normalizers:
            return f"Patch({names} in {len(normalizers)} {modules})"
        return "Patch(removed)" if self._modules else "Patch(softmax in every layer)"


P = ParamSpec("P")
T = TypeVar("T")


def _with_option_normalizer(function: Callable[P, T]) -> Callable[P, T]:
    """Allow the option `normalizer` of laser and forget, although the function has an argument of the same name.

    Python rejects patch(model, "laser", normalizer="entmax15"). This decorator turns it into
    patch(model, "laser:normalizer=entmax15").
    """

    @wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> T:
        if len(args) < 2 or "normalizer" not in options:
            return function(*args, **options)
        spec, option = args[1], options.pop("normalizer")
        if not isinstance(spec, str):
            raise TypeError(
                "expected the option normalizer= together with a name such as 'laser', got it with "
                f"{type(spec).__name__}. Remove normalizer=."
            )
        if not isinstance(option, str):
            raise TypeError(
                f"expected the option normalizer= as a name, got {option!r}. Pass an object instead: "
                f"{function.__name__}(model, attnorm.get({spec!r}, normalizer=...))."
            )
        part = option.replace(":", "+")  # its own options are joined by + within a specification
        return function(args[0], f"{spec}:normalizer={part}", *args[2:], **options)  # type: ignore[arg-type]

    return call


@_with_option_normalizer
def patch(
    model: nn.Module,
    normalizer: Replacement | LayerRecipe,
    *,
    layers: Layers | None = None,
    warm_start: bool = True,
    train_length: int | None = None,
    **options: Any,
) -> Patch:
    """Replace softmax in the model's attention until `.remove()` is called on the returned Patch.

    Args:
        normalizer: A name with options, as for attnorm.get; an object, of which every layer gets a copy; or a recipe,
            that is {layers: normalizer} or the path of a recipe file (.toml). Layers that a recipe leaves out, or for
            which it names "softmax", keep softmax.
        layers: Indices of the layers to change, or {layer: heads} to change some heads only; None stands for all heads
            (default: all layers).
        warm_start: Choose initial values that change the trained model least; options that you give override them
            (default: True).
        train_length: Length in tokens of the texts that the model was trained on (default: from its config).

    >>> handle = patch(model, "ssmax")
    >>> patch(model, "entmax", alpha=1.3)  # or "entmax:alpha=1.3"
    >>> patch(model, "entmax15", layers={10: [0, 3], 11: None})
    >>> patch(model, {"0-3": "softmax", "4-7": "entmax:alpha=1.3"})
    """
    check_observable(model)
    train_length = _validate_train_length(train_length)
    with exclusive(model):
        parts: dict[nn.Module, tuple[Normalizer | Mechanism, Recipe]] = {}
        paths: dict[str, nn.Module] = {}
        skipped = False
        replacements = list(_expand_replacements(model, normalizer, layers, options))
        for replacement, _, _ in replacements:
            if isinstance(replacement, str):
                entry_of(replacement)  # a wrong name comes first: removing an earlier patch would not help
        for replacement, replacement_options, modules in replacements:
            _reject_patched(modules)
            for module, (site, heads) in modules.items():
                path = _module_name(site, module)
                part, recipe = _build_normalizer(
                    replacement, replacement_options, module, path, heads, warm_start, train_length
                )
                is_cross_attention = _is_cross_attention(site, module)
                if not part.properties.permutation_equivariant and is_cross_attention:
                    skipped = True  # keys of another sequence have no position relative to the queries
                    continue
                if isinstance(part, Mechanism):
                    capped = getattr(module, "attn_logit_softcapping", None) is not None  # Gemma 2
                    biased = not is_cross_attention and hasattr(module, "relative_attention_num_buckets")  # T5
                    check_plain_logits(part, softcap=capped, bias=biased)
                parts[module], paths[site.path] = (part, recipe), module
        if skipped and not parts:
            raise ValueError(
                "expected a normalizer that does not depend on the order of the keys, since all chosen layers are "
                "cross-attention. Choose another normalizer, or other layers with layers=."
            )
        attach(model, parts)
        return Patch(paths)


SelectedModules = dict[nn.Module, tuple[Site, tuple[int, ...] | None]]


def _expand_replacements(
    model: nn.Module, normalizer: Any, layers: Layers | None, options: dict[str, Any]
) -> Iterator[tuple[Replacement, dict[str, Any], SelectedModules]]:
    """Yield each normalizer, its options, and the attention modules that get it; a recipe has several."""
    if not is_recipe(normalizer):
        if isinstance(normalizer, str):
            normalizer, options = with_options(normalizer, options)
        yield normalizer, options, _select_modules(model, layers)
        return
    if layers is not None or options:
        extra = "layers" if layers is not None else next(iter(options))
        raise TypeError(f"expected a recipe alone, which names layers and options itself, got {extra}= too. Remove it.")
    groups = layer_groups(normalizer)
    _select_modules(model, [layer for group in groups for layer in group])  # layers that keep softmax must exist too
    for group, replacement in groups.items():
        name, own_options = parse_spec(replacement) if isinstance(replacement, str) else (replacement, {})
        if (name, own_options) != (SOFTMAX, {}):
            yield name, own_options, _select_modules(model, group)


def check_replacement(spec: str) -> None:
    """Raise ValueError or TypeError for a specification that no trained model can use, before a model is loaded."""
    name, options = parse_spec(spec)
    part, _ = build(name, options, LayerFacts(heads=2, length=USUAL_LENGTH), warm=True)
    _check_architecture(part)


@_with_option_normalizer
@contextmanager
def swap(
    model: nn.Module,
    normalizer: Replacement | LayerRecipe,
    *,
    layers: Layers | None = None,
    warm_start: bool = True,
    train_length: int | None = None,
    **options: Any,
) -> Iterator[Patch]:
    """Patch the model within a with statement; softmax is restored afterwards, also after an exception.

    The model is patched for all threads. Meanwhile other threads cannot patch, analyze or evaluate it (RuntimeError).

    >>> with swap(model, "entmax15", layers=[3, 4]):
    ...     model.generate(...)
    """
    check_observable(model)
    with exclusive(model, block="swap()"):
        handle = patch(model, normalizer, layers=layers, warm_start=warm_start, train_length=train_length, **options)
        try:
            yield handle
        finally:
            handle._detach()  # not remove(): Python may close a dropped generator in another thread


def unpatch(model: nn.Module) -> None:
    """Restore softmax in all attention modules of the model."""
    with exclusive(check_model(model)):
        detach(patched_modules(model).values())


def _validate_train_length(train_length: Any) -> int | None:
    try:
        length = None if train_length is None else as_integer(train_length)
    except TypeError:
        length = 0
    if length is not None and length < 1:
        raise ValueError(f"train_length: expected a number of tokens, e.g. 1024, got {train_length!r}.")
    return length


def _select_modules(model: nn.Module, layers: Layers | None) -> SelectedModules:
    """Return the attention modules to patch, each with the heads to change (None: all)."""
    sites: dict[nn.Module, tuple[Site, int]] = {}  # module -> site and layer index
    counts: dict[str, int] = {}
    for module, site in attention_sites(model).items():
        order = counts.setdefault(site.stack, 0)
        counts[site.stack] += 1
        sites[module] = (site, order if site.layer_index is None else site.layer_index)
    if layers is None:
        return {module: (site, None) for module, (site, _) in sites.items()}
    heads_of = _heads_by_layer(layers)
    model_layers = sorted({layer for _, layer in sites.values()})
    unknown = [layer for layer in heads_of if layer not in model_layers]
    if unknown or not heads_of:
        problem = f"layer {unknown[0]!r}" if unknown else "none"
        raise ValueError(
            f"layers=: expected layers from {model_layers[0]} to {model_layers[-1]} of {type(model).__name__}, "
            f"got {problem}."
        )
    selected: SelectedModules = {}
    for module, (site, layer) in sites.items():
        if layer in heads_of:
            heads = heads_of[layer]
            if heads is not None:
                heads = validate_heads(heads, module, _module_name(site, module))
            selected[module] = (site, heads)
    return selected


def _heads_by_layer(layers: Any) -> dict[int, Any]:
    """Return layer -> heads for the argument `layers`; None stands for all heads."""
    try:
        if isinstance(layers, Mapping):
            return {as_integer(layer): heads for layer, heads in layers.items()}
        return dict.fromkeys(map(as_integer, layers if isinstance(layers, Iterable) else [layers]))
    except TypeError:
        raise TypeError(
            f"layers=: expected indices of layers, e.g. [10, 11], or {{layer: heads}}, got {layers!r}."
        ) from None


def _module_name(site: Site, module: nn.Module) -> str:
    """Return the path of an attention module for messages; its class if the module itself is the model."""
    return site.path or type(module).__name__


def _reject_patched(modules: Mapping[nn.Module, tuple[Site, object]]) -> None:
    for module, (site, _) in modules.items():
        if is_patched(module):
            raise ValueError(
                f"{_module_name(site, module)} already has {normalizer_of(module).name!r} instead of softmax. "
                "Remove that patch first (handle.remove()), or leave the layer out with layers=."
            )


@torch.inference_mode(mode=False)  # parameters created in inference mode would never get a gradient
def _build_normalizer(
    normalizer: Replacement,
    options: dict[str, Any],
    module: nn.Module,
    path: str,
    heads: tuple[int, ...] | None,
    warm_start: bool,
    train_length: int | None,
) -> tuple[Normalizer | Mechanism, Recipe]:
    """Return a normalizer for one attention module, on its device, and the recipe that saving needs."""
    if isinstance(normalizer, str):
        _check_head_option(options, head_count(module) if heads is None else len(heads))
        built, all_options = build(normalizer, options, _layer_facts(module, heads, train_length), warm=warm_start)
        recipe = Recipe(normalizer, all_options, heads)
    else:
        if options:
            raise TypeError(
                f"options ({', '.join(options)}): expected no options with a normalizer object, which has its own. "
                "Pass a name, or remove the options."
            )
        built, recipe = copy.deepcopy(as_normalizer(normalizer)), Recipe(None, heads=heads)
    part = restrict_to_heads(_check_supported(built, module, path), heads)
    check_fit(part, module, path)
    return part.to(device_of(module), torch.float32), recipe


def _check_head_option(options: Mapping[str, Any], count: int) -> None:
    heads = options.get("heads")
    if heads is not None and heads != count:
        raise ValueError(
            f"expected heads={count} or heads=None (one value for all), got heads={heads!r}. To replace "
            "some heads only, pass layers, e.g. layers={0: [0, 1]}."
        )


def _layer_facts(module: nn.Module, heads: tuple[int, ...] | None, train_length: int | None) -> LayerFacts:
    sinks = getattr(module, "sinks", None)
    if isinstance(sinks, torch.Tensor) and heads is not None:
        sinks = sinks[list(heads)]
    return LayerFacts(
        heads=head_count(module) if heads is None else len(heads),
        length=trained_length(module.config) if train_length is None else train_length,
        causal=bool(getattr(module, "is_causal", True)),
        window=getattr(module, "sliding_window", None),
        sinks_H=sinks if isinstance(sinks, torch.Tensor) else None,
    )


def _check_architecture(part: Normalizer | Mechanism) -> None:
    if isinstance(part, Mechanism) and part.another_architecture and not getattr(part, "second", None):
        raise ValueError(
            f"{part.name!r} {part.another_architecture}, another architecture than that of trained models. Build "
            "it with attnorm.attention and train it (differential_v2: attnorm lab train lm --normalizer "
            "differential_v2)"
        )


def _check_supported(part: Normalizer | Mechanism, module: nn.Module, path: str) -> Normalizer | Mechanism:
    """Return the normalizer; raise ValueError if this attention module cannot have it."""
    _check_architecture(part)
    if isinstance(part, Forget | DifferentialV2) and part.reads_hidden_states:
        check_readable(module, part, path)
    is_causal = getattr(module, "is_causal", True)
    if isinstance(part, Mechanism) and part.no_causal_form and is_causal:
        raise ValueError(f"{path} is causal, and {part.name!r} {part.no_causal_form}")
    if isinstance(part, Mechanism) and part.causal_only and not is_causal:
        raise ValueError(
            f"{part.name!r} has only a causal form, but {path} attends to keys after its queries. Choose another "
            "normalizer."
        )
    rules = part.modules() if isinstance(part, Normalizer) else ()
    if any(getattr(inner, "from_hidden", None) is not None for inner in rules):
        raise ValueError(
            f"{part.name!r} with width= needs the input of the layer, which transformers does not pass to "
            "attention. Leave width out, so that beta and gamma are learned per head."
        )
    return part


def _is_cross_attention(site: Site, module: nn.Module) -> bool:
    """Whether keys come from another sequence: by its name, or because its forward requires that sequence."""
    if getattr(module, "is_cross_attention", False) or CROSS_ATTENTION.search(site.path):
        return True
    parameters = inspect.signature(module.forward).parameters
    return any(name in parameters and parameters[name].default is inspect.Parameter.empty for name in OTHER_SEQUENCE)
