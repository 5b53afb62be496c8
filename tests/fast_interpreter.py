"""Triton's interpreter, made several times faster for the tests of kernels; its results stay the same.

Triton 3.9 prepares `triton.language` anew at every launch and every call of a device function (5 ms), combines the
elements of a custom reduction one by one, looks for overflow at each integer operation although it reports none unless
it debugs, and makes the type of each result anew. Here the language is prepared once, a reduction combines whole
slices, types are made once, and most operators are one call of numpy (numpy_operators.py).
"""

import functools
from typing import Any

import numpy as np

from attnorm.engines.execution import HAS_TRITON
from tests.numpy_operators import numpy_operators

DIRECT: dict[tuple[Any, str], Any] = {}
_prepared: list[Any] = []  # what restores triton.language


@functools.cache
def speed_up_interpreter() -> None:
    """Only the first call changes anything, and only if this Triton has the parts that are replaced."""
    if not HAS_TRITON:
        return
    import triton
    from triton.runtime import interpreter

    if hasattr(interpreter, "_LangPatchScope") and hasattr(interpreter.ReduceOps, "generic_reduce"):
        interpreter._patch_lang = _patching_once(interpreter)
        interpreter.ReduceOps.generic_reduce = _reduce_slices
        interpreter._patch_attr = _patch_attribute
        interpreter._patch_reduce_scan = _patching_reductions(interpreter)
        interpreter._patch_lang_tensor = _patching_tensors(interpreter)
    if triton.__version__.startswith("3.9."):
        _remember_types(interpreter)
        DIRECT.update(numpy_operators(interpreter))


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
                _prepared.append(patch(function))
                break
        return nothing  # to restore after a launch

    return patch_once


def restore_language() -> None:
    """Make triton.language what it is outside of a launch."""
    while _prepared:
        _prepared.pop().restore()


def _patch_attribute(where: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """interpreter._patch_attr without a copy of the keyword arguments and without the wrapper of a builtin."""
    from triton.runtime.interpreter import interpreter_semantic

    function = getattr(member, "__wrapped__", member)

    def interpreted(*arguments: Any, **options: Any) -> Any:
        options["_semantic"] = interpreter_semantic
        return function(*arguments, **options)

    direct = DIRECT.get((where, name))
    scope.set_attr(where, name, interpreted if direct is None else direct(interpreted))


def _patching_reductions(interpreter: Any) -> Any:
    patch, language = interpreter._patch_reduce_scan, interpreter.tl

    def patch_reductions(scope: Any) -> None:
        patch(scope)
        for where in (language, language.core):
            if direct := DIRECT.get((where, "reduce")):
                scope.set_attr(where, "reduce", direct(where.reduce))

    return patch_reductions


def _patching_tensors(interpreter: Any) -> Any:
    patch = interpreter._patch_lang_tensor

    def patch_tensors(tensor: Any, scope: Any) -> None:
        """Triton 3.6 converts arrays of one element to int, which numpy 2.5 rejects."""
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patch_tensors


def _remember_types(interpreter: Any) -> None:
    core, semantic = interpreter.tl.core, type(interpreter.interpreter_semantic)
    block_type, tensor, dtype = core.block_type, core.tensor, core.dtype
    make_block, same_dtype, broadcast = block_type.__init__, dtype.__eq__, semantic.broadcast_impl_value
    numpy_dtype, check_overflow = interpreter._get_np_dtype, semantic.binary_op_sanitize_overflow_impl
    known_blocks: dict[Any, Any] = {}
    known_shapes: dict[Any, Any] = {(): (core.tuple([]), core.constexpr(1))}
    known_numpy: dict[str, Any] = {}

    def new_block(cls: Any, element_ty: Any, shape: Any) -> Any:
        sizes = tuple(size.value if isinstance(size, core.constexpr) else size for size in shape)
        kind = (element_ty.name, getattr(element_ty, "address_space", None), sizes)
        found = known_blocks.get(kind)
        if found is None:
            found = object.__new__(cls)
            make_block(found, element_ty, list(sizes))
            found.sizes = sizes
            known_blocks[kind] = found
        return found

    def fill_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        sizes = type.sizes if type.is_block() else ()
        found = known_shapes.get(sizes)
        if found is None:
            found = core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(type.numel)
            known_shapes[sizes] = found
        self.shape, self.numel = found

    def equal(self: Any, other: Any) -> bool:
        return self is other or same_dtype(self, other)

    def remembered_numpy(type: Any) -> Any:
        found = known_numpy.get(type.name)
        if found is None:
            found = known_numpy[type.name] = numpy_dtype(type)
        return found

    def broadcast_unless_alike(self: Any, lhs: Any, rhs: Any) -> Any:
        blocks = lhs.type.is_block() and rhs.type.is_block()
        return (lhs, rhs) if blocks and lhs.type.sizes == rhs.type.sizes else broadcast(self, lhs, rhs)

    def check_if_reported(self: Any, lhs: Any, rhs: Any, operation: Any) -> None:
        if self.builder.options.debug:
            check_overflow(self, lhs, rhs, operation)

    block_type.__new__, block_type.__init__ = staticmethod(new_block), lambda self, element_ty, shape: None
    tensor.__init__, dtype.__eq__ = fill_tensor, equal
    interpreter._get_np_dtype = remembered_numpy
    interpreter.tl.str_to_ty = functools.cache(interpreter.tl.str_to_ty)  # of an argument of a launch
    semantic.broadcast_impl_value, semantic.binary_op_sanitize_overflow_impl = broadcast_unless_alike, check_if_reported


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
