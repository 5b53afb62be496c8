"""Runtime checks of annotations and tensor shapes (jaxtyping + beartype), put into modules while they are imported.

Only the tests use them. Under torch.compile a checked function steps aside: the compiler traces the plain one.
"""

import dataclasses
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jaxtyping
import torch
from jaxtyping import jaxtyped

# int is accepted for float, as static type checkers do.
TYPECHECKER = "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"


def check_shapes_in(*modules: str) -> AbstractContextManager[None]:
    """Every module of these names that is imported from now on (or inside `with`) checks each call."""
    jaxtyping.jaxtyped = _checked  # the decorator that the import hook writes above functions and classes
    return jaxtyping.install_import_hook(modules, TYPECHECKER)


def _checked(*, typechecker: Callable[..., Any]) -> Callable[[Any], Any]:
    def decorate(target: Any) -> Any:
        if _is_flex_function(target):
            return target
        if not isinstance(target, type):
            return _checked_unless_compiling(target, typechecker)
        if dataclasses.is_dataclass(target) and "__init__" in vars(target):
            target.__init__ = _checked_unless_compiling(target.__init__, typechecker)
        return target

    return decorate


def _is_flex_function(target: Any) -> bool:
    """A score or mask function: FlexAttention counts the arguments in its code, and a wrapper has none."""
    return target.__module__ == "attnorm.engines.flex" and "<locals>" in target.__qualname__


def _checked_unless_compiling(plain: Callable[..., Any], typechecker: Callable[..., Any]) -> Callable[..., Any]:
    checked = jaxtyped(plain, typechecker=typechecker)

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        return plain(*args, **kwargs) if torch.compiler.is_compiling() else checked(*args, **kwargs)

    return call
