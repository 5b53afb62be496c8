"""Runtime checks of annotations and tensor shapes (jaxtyping + beartype), put into modules while they are imported.

Only the tests use them. Under torch.compile a checked function steps aside: the compiler traces the plain one.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jaxtyping
import torch
from jaxtyping import jaxtyped

# How many calls of a function are checked in each test: later ones bring other values and rarely other shapes.
most_calls: float = 3
_calls: Counter[Callable[..., Any]] = Counter()

# int is accepted for float, as static type checkers do.
TYPECHECKER = "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"


def check_shapes_in(*modules: str) -> AbstractContextManager[None]:
    """Every module of these names that is imported from now on (or inside `with`) checks each call."""
    jaxtyping.jaxtyped = _checked  # the decorator that the import hook writes above functions and classes
    return jaxtyping.install_import_hook(modules, TYPECHECKER)


def start_counting() -> None:
    """To be called before each test."""
    _calls.clear()


def _checked(*, typechecker: Callable[..., Any]) -> Callable[[Any], Any]:
    def decorate(target: Any) -> Any:
        if not isinstance(target, type):
            # A function within a function would be decorated with every call of the outer one: a fifth of all checks.
            return target if "<locals>" in target.__qualname__ else _checked_unless_compiling(target, typechecker)
        if dataclasses.is_dataclass(target) and "__init__" in vars(target):
            target.__init__ = _checked_unless_compiling(target.__init__, typechecker)
        return target

    return decorate


def _checked_unless_compiling(plain: Callable[..., Any], typechecker: Callable[..., Any]) -> Callable[..., Any]:
    made: list[Callable[..., Any]] = []  # with the first checked call: to read all annotations takes a second

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        if jaxtyping.config.jaxtyping_disable or torch.compiler.is_compiling():
            return plain(*args, **kwargs)
        _calls[plain] += 1
        if _calls[plain] > most_calls:
            return plain(*args, **kwargs)
        if not made:
            made.append(jaxtyped(plain, typechecker=typechecker))
        return made[0](*args, **kwargs)

    return call
