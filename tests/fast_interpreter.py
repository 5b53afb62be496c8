"""Triton's interpreter, made several times faster for the tests of kernels; its results stay the same.

Triton 3.9 prepares `triton.language` anew at every call of a device function (5 ms), and combines the elements of a
custom reduction one by one. Here the language is prepared once per launch, and a reduction combines whole slices.
"""

import functools
from typing import Any

import numpy as np

from attnorm.engines.triton_support import HAS_TRITON


@functools.cache
def speed_up_interpreter() -> None:
    """Only the first call changes anything, and only if this Triton has the parts that are replaced."""
    if not HAS_TRITON:
        return
    from triton.runtime import interpreter

    if hasattr(interpreter, "_LangPatchScope") and hasattr(interpreter.ReduceOps, "generic_reduce"):
        interpreter._patch_lang = _patching_once(interpreter)
        interpreter.ReduceOps.generic_reduce = _reduce_slices


def _patching_once(interpreter: Any) -> Any:
    patch, language = interpreter._patch_lang, interpreter.tl

    def patch_once(function: Any) -> Any:
        used = [module for module in (language, language.core) if _refers(function, module)]
        if used and not any(language.core.is_builtin(module.load) for module in used):
            return interpreter._LangPatchScope()  # already patched: nothing to restore either
        return patch(function)

    return patch_once


def _refers(function: Any, module: Any) -> bool:
    return any(value is module for value in function.__globals__.values())


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
