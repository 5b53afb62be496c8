"""Triton's interpreter, made faster for the tests of kernels; its results stay the same.

Triton 3.9 prepares `triton.language` anew at every launch and every call of a device function (5 ms), and combines the
elements of a custom reduction one by one. Here the language is prepared once, and a reduction combines whole slices.
"""

import functools
from typing import Any

import numpy as np

from attnorm.engines.execution import HAS_TRITON


@functools.cache
def speed_up_interpreter() -> None:
    """Only the first call changes anything, and only if this Triton has the parts that are replaced."""
    if not HAS_TRITON:
        return
    from triton.runtime import interpreter

    if hasattr(interpreter, "_LangPatchScope") and hasattr(interpreter.ReduceOps, "generic_reduce"):
        interpreter._patch_lang = _patching_once(interpreter)
        interpreter.ReduceOps.generic_reduce = _reduce_slices
        interpreter._patch_attr = _patch_attribute
        interpreter._patch_lang_tensor = _patching_tensors(interpreter)


def _patching_once(interpreter: Any) -> Any:
    patch, language = interpreter._patch_lang, interpreter.tl
    nothing = interpreter._LangPatchScope()
    unpatched = {module: module.load for module in (language, language.core)}
    known: dict[Any, list[Any]] = {}

    def patch_once(function: Any) -> Any:
        used = known.get(function)
        if used is None:
            globals_ = [*function.__globals__.values()]
            used = known[function] = [module for module in unpatched if any(value is module for value in globals_)]
        for module in used:
            if module.load is unpatched[module]:
                patch(function)
                break
        return nothing  # to restore after a launch

    return patch_once


def _patch_attribute(where: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """interpreter._patch_attr without a copy of the keyword arguments and without the wrapper of a builtin."""
    from triton.runtime.interpreter import interpreter_semantic

    function = getattr(member, "__wrapped__", member)

    def interpreted(*arguments: Any, **options: Any) -> Any:
        options["_semantic"] = interpreter_semantic
        return function(*arguments, **options)

    scope.set_attr(where, name, interpreted)


def _patching_tensors(interpreter: Any) -> Any:
    patch = interpreter._patch_lang_tensor

    def patch_tensors(tensor: Any, scope: Any) -> None:
        """Triton 3.6 converts arrays of one element to int, which numpy 2.5 rejects."""
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patch_tensors


def _reduce_slices(self: Any, input: tuple[Any, ...]) -> list[Any]:
    """ReduceOps.generic_reduce with one call of the combining function per slice along the axis."""
    given, axis = self.unravel(input, self.axis)
    slices = [np.moveaxis(one.handle.data, axis, 0) for one in given]
    found = [np.array(some[0]) for some in slices]
    for index in range(1, len(slices[0])):
        left = (self.to_tensor(data, one.dtype) for data, one in zip(found, given, strict=True))
        right = (self.to_tensor(some[index], one.dtype) for some, one in zip(slices, given, strict=True))
        combined = self.combine_fn.fn(*left, *right)
        for data, new in zip(found, combined if isinstance(combined, tuple) else (combined,), strict=True):
            data[...] = new.handle.data.reshape(data.shape) if hasattr(new, "handle") else new
    kept = len(input[0].shape) if self.axis is None else 1
    if self.keep_dims:
        found = [np.expand_dims(data, tuple(range(kept)) if self.axis is None else axis) for data in found]
    return [self.to_tensor(data, one.dtype) for data, one in zip(found, given, strict=True)]
