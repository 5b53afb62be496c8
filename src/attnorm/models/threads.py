"""Decide what happens when several threads of one process use one model, or load models.

    plain calls of a model     never wait. Hooks and recorders of other threads ignore them (`only_in_this_thread`).
    analyze, evaluate, patch   wait until no other thread analyzes, evaluates or changes the model (`exclusive`).
    swap, paused               are seen by every thread that runs the model, as model.half() is. Meanwhile other threads
                               may not measure or change it. They raise an error instead of waiting, because the end of
                               such a block may depend on them.
    loading                    waits until no other thread analyzes, evaluates or patches, and they wait for it:
                               transformers changes torch for the whole process while it loads, such as the default
                               dtype. Blocks of `observe` and monitors hold nothing: do not load beside them.

Compiled code cannot be observed. While a thread observes a compiled model, all threads run it uncompiled.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from threading import Condition, RLock, get_ident
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, eq=False)
class _Hold:
    """What one thread measures or changes."""

    modules: frozenset[nn.Module]
    block: str  # the caller's with statement; "" for work of attnorm, which ends by itself
    alone: bool  # whether no other thread may measure anything
    thread: int

    def excludes(self, other: "_Hold") -> bool:
        if self.thread == other.thread:
            return False
        measuring = not self.block and not other.block
        return bool(self.modules & other.modules) or (measuring and (self.alone or other.alone))


_changed = Condition()
_holds: list[_Hold] = []


@contextmanager
def exclusive(*models: nn.Module, block: str = "", alone: bool = False) -> Iterator[None]:
    """Within the with statement, let other threads that call this for a part of these models wait.

    block: name of a with statement that runs the caller's code; others raise an error. alone: let all others wait, of
    other models too.

    Raises:
        RuntimeError: Another thread runs a block with a part of these models.
    """
    thread = get_ident()
    with _changed:
        inside_work = any(held.thread == thread and not held.block for held in _holds)
        modules = frozenset(module for model in models for module in model.modules())
        own = _Hold(modules, "" if inside_work else block, alone, thread)
        while others := [held for held in _holds if held.excludes(own)]:
            if blocks := [held.block for held in others if held.block]:
                raise RuntimeError(
                    f"expected a model that no other thread changes, got {type(models[0]).__name__} inside {blocks[0]} "
                    "of another thread. Leave that block first, or give each thread a copy (copy.deepcopy(model))."
                )
            _changed.wait()
        _holds.append(own)
    try:
        yield
    finally:
        with _changed:
            _holds.remove(own)
            _changed.notify_all()


def only_in_this_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward hook that does nothing when another thread runs the module."""
    thread = get_ident()

    @wraps(hook)
    def call(*args: Any, **kwargs: Any) -> Any:
        return hook(*args, **kwargs) if get_ident() == thread else None

    return call


_uncompiled = RLock()
_stances: list[Any] = []  # one entry for each active block; the first restores the stance of before


@contextmanager
def uncompiled_meanwhile() -> Iterator[None]:
    """Within the with statement, run compiled models uncompiled, in all threads: torch has one stance for all."""
    with _uncompiled:
        _stances.append(None if _stances else torch.compiler.set_stance("force_eager"))
    try:
        yield
    finally:
        with _uncompiled:
            if len(_stances) > 1:
                _stances.pop()
            else:
                _stances.pop().__exit__(None, None, None)
