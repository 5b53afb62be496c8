"""Validate the options of a normalizer against the signature of its factory: numbers, switches and functions.

This is done for all normalizers, built in or registered, so that a value of the wrong type is named before any
arithmetic. The factory itself validates strings and classes.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import torch

Factory = Callable[..., Any]


def check_options(name: str, factory: Factory, options: Mapping[str, Any]) -> None:
    """Raise TypeError for an option that the factory does not have, or whose value has the wrong type."""
    signature = inspect.signature(factory)
    try:
        signature.bind(**options)
    except TypeError as error:
        accepted = ", ".join(signature.parameters) or "no options"
        raise TypeError(f"normalizer {name!r}: {error}; it accepts {accepted}") from None
    for option, value in options.items():
        parameter = signature.parameters.get(option)
        kinds = [] if parameter is None else _kinds(parameter.annotation)
        if parameter is None or not all(kind in _WORDS for kind in kinds) or any(_fits(value, k) for k in kinds):
            continue
        default = "" if parameter.default is parameter.empty else f"; leave it out for {parameter.default!r}"
        expected = " or ".join(_WORDS[kind] for kind in kinds)
        raise TypeError(f"normalizer {name!r}: {option} must be {expected}, got {value!r}{default}")


def refuse_nan(name: str, options: Mapping[str, Any]) -> None:
    """Raise ValueError for NaN. Call it after the factory, whose own error may name the valid range."""
    for option, value in options.items():
        if isinstance(value, float) and math.isnan(value):
            raise ValueError(f"normalizer {name!r}: {option} must be a number, got nan")


_WORDS: dict[Any, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    Callable: "a function",
    NoneType: "None",
}


def _kinds(annotation: Any) -> list[Any]:
    """float | None -> [float, NoneType]"""
    if get_origin(annotation) in (Union, UnionType):
        return [kind for part in get_args(annotation) for kind in _kinds(part)]
    if get_origin(annotation) is get_origin(Callable[..., Any]):
        return [Callable]
    return [NoneType if annotation is None else annotation]


def _fits(value: Any, kind: Any) -> bool:
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    if kind is Callable:
        return callable(value)
    if kind is NoneType:
        return value is None
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    return isinstance(value, Integral if kind is int else Real)
