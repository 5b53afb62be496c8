"""Replace operators of Triton's interpreter by single calls of numpy with the same results.

An operator of the interpreter casts, broadcasts and checks its operands anew at each call: 0.1 ms for 64 numbers, of
which numpy needs 2 µs. Here the first call on operands of these types and shapes asks Triton, which also says what type
results. Later calls leave casts and broadcasts to numpy, which does the same where all operands have one type.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

Plain = Callable[..., Any]  # an operator of the interpreter
Compute = Callable[..., Any]  # the same of arrays and numbers


def _divide_towards_0(a: Any, b: Any) -> Any:
    return (a - np.fmod(a, b)) // b


OPERATORS = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "truediv": np.divide,
    "floordiv": _divide_towards_0,
    "mod": np.fmod,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lt": np.less,
    "le": np.less_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
}
FUNCTIONS = {"abs": np.abs, "exp": np.exp, "exp2": np.exp2, "log": np.log, "log2": np.log2, "sqrt": np.sqrt}
# What a Python number becomes beside a tensor of this type; beside any other, Triton decides.
NUMBERS: dict[str, dict[type, Any]] = {
    "fp32": {int: np.float32, float: np.float32},
    "fp64": {int: np.float64, float: np.float64},
    "int32": {int: np.int32},
    "int64": {int: np.int64},
    "int1": {},
}
# Operators that are not direct for every kind of number.
SUITABLE = {
    "truediv": {"fp32", "fp64"}, "floordiv": {"int32", "int64"}, "mod": {"int32", "int64"}, "and": {"int1"},
    "or": {"int1"},
}  # fmt: skip
CASTS = {("int32", "int64"), ("int32", "fp32"), ("fp32", "fp64"), ("fp64", "fp32")}


def numpy_operators(interpreter: Any) -> dict[tuple[Any, str], Callable[[Plain], Plain]]:
    """By class or module and name, what makes an operator of the interpreter a direct one."""
    language, core = interpreter.tl, interpreter.tl.core
    direct = _Direct(core.tensor, core.constexpr, interpreter.TensorHandle)
    remembered = _Remembered(direct, (core.dtype, interpreter.InterpretedFunction), core.tuple)
    found: dict[tuple[Any, str], Callable[[Plain], Plain]] = {}
    for name, compute in OPERATORS.items():
        found[core.tensor, f"__{name}__"] = direct.operator(name, compute)
        found[core.tensor, f"__r{name}__"] = direct.operator(name, lambda a, b, compute=compute: compute(b, a))
    found[core.tensor, "__getitem__"] = direct.new_axes
    found[core.tensor, "to"] = direct.cast
    load, dot, reduce = remembered(_load(interpreter)), remembered(_dot), remembered(_reduce(language.standard))
    arange, full, reshape, trans = (remembered(one) for one in (_constant, _constant, _reshape, _trans))
    permute, store = remembered(_permute), direct.store(interpreter)
    elementwise = {name: remembered(_elementwise(function)) for name, function in FUNCTIONS.items()}
    for where in (language, core):
        found |= {(where, name): function for name, function in elementwise.items()}
        found |= {(where, "store"): store, (where, "split"): direct.split, (where, "cast"): direct.cast}
        found |= {(where, "expand_dims"): reshape, (where, "permute"): permute}
        found |= {(where, "load"): load, (where, "dot"): dot, (where, "reduce"): reduce, (where, "arange"): arange}
        found |= {(where, "full"): full, (where, "reshape"): reshape, (where, "trans"): trans}
        found[where, "where"] = direct.choice
        found[where, "maximum"] = direct.extreme(core, np.fmax, np.maximum)
        found[where, "minimum"] = direct.extreme(core, np.fmin, np.minimum)
    return found


def _single(number: float) -> np.float32:
    if np.isfinite(number) and abs(number) > np.finfo(np.float32).max:
        raise OverflowError(f"expected a float of 32 bits, got {number}")  # Triton takes 64 bits for it
    return np.float32(number)


def _advance(width: int, pointers: Any, offset: Any) -> Any:
    return pointers + width * offset.astype(np.uint64)


def _retreat(width: int, pointers: Any, offset: Any) -> Any:
    return pointers - width * offset.astype(np.uint64)


class _Direct:
    def __init__(self, tensor: Any, constexpr: Any, handle: Any) -> None:
        self.tensor, self.constexpr, self.handle = tensor, constexpr, handle

    def operator(self, name: str, compute: Compute) -> Callable[[Plain], Plain]:
        suitable = SUITABLE.get(name, {*NUMBERS} - {"int1"})
        chosen: dict[str, Compute] = dict.fromkeys(suitable, compute)
        if compute is np.add:
            chosen["pointer"] = _advance
        elif compute is np.subtract:
            chosen["pointer"] = _retreat
        return self._binary(chosen.get)

    def extreme(self, core: Any, of_floats: Compute, propagating: Compute) -> Callable[[Plain], Plain]:
        """`propagating`: NaN if one operand is."""
        usual = self._binary({"fp32": of_floats, "fp64": of_floats, "int32": propagating, "int64": propagating}.get)
        with_nan = self._binary({"fp32": propagating, "fp64": propagating}.get)

        def replace(plain: Plain) -> Plain:
            without = usual(plain)
            every = with_nan(lambda left, right: plain(left, right, propagate_nan=core.PropagateNan.ALL))

            def operate(left: Any, right: Any, propagate_nan: Any = core.PropagateNan.NONE) -> Any:
                return (every if propagate_nan == core.PropagateNan.ALL else without)(left, right)

            return operate

        return replace

    def _binary(self, choose: Callable[[str], Compute | None]) -> Callable[[Plain], Plain]:
        known: dict[Any, Any] = {}
        tensor, constexpr, like = self.tensor, self.constexpr, self._like

        def replace(plain: Plain) -> Plain:
            def operate(left: Any, right: Any) -> Any:
                if type(left) is constexpr:
                    left = left.value
                if type(right) is constexpr:
                    right = right.value
                key = (
                    id(left.type) if type(left) is tensor else type(left),
                    id(right.type) if type(right) is tensor else type(right),
                )
                found = known.get(key)
                if found is None:
                    result = plain(left, right)
                    known[key] = *self._plan(choose, left, right), result, left, right  # no other type gets their ids
                    return result
                compute, left_number, right_number, result, *_ = found
                if compute is None:
                    return plain(left, right)
                a = left.handle.data if left_number is None else left_number(left)
                b = right.handle.data if right_number is None else right_number(right)
                return like(result, compute(a, b))

            return operate

        return replace

    def choice(self, plain: Plain) -> Plain:
        """`where` of a boolean condition."""
        known: dict[Any, Any] = {}
        tensor, constexpr, like = self.tensor, self.constexpr, self._like
        numbers = {(float, "fp32"): _single, (int, "int32"): np.int32}

        def operate(condition: Any, left: Any, right: Any) -> Any:
            if type(condition) is constexpr:
                condition = condition.value
            if type(left) is constexpr:
                left = left.value
            if type(right) is constexpr:
                right = right.value
            key = (
                id(condition.type) if type(condition) is tensor else type(condition),
                id(left.type) if type(left) is tensor else type(left),
                id(right.type) if type(right) is tensor else type(right),
            )
            found = known.get(key)
            if found is None:
                result = plain(condition, left, right)
                tensors = type(condition) is tensor
                boolean = condition.dtype.name == "int1" if tensors else type(condition) is bool
                number = numbers.get((type(left), result.dtype.name)) if type(left) is type(right) else None
                if boolean and tensors and number is not None:
                    plan = np.where, number, number
                else:
                    plan = self._plan(lambda kind: np.where if boolean and kind in NUMBERS else None, left, right)
                known[key] = *plan, result, condition, left, right
                return result
            compute, left_number, right_number, result, *_ = found
            if compute is None:
                return plain(condition, left, right)
            a = left.handle.data if left_number is None else left_number(left)
            b = right.handle.data if right_number is None else right_number(right)
            return like(result, compute(condition.handle.data if type(condition) is tensor else condition, a, b))

        return operate

    def cast(self, plain: Plain) -> Plain:
        """`x.to(dtype)`."""
        known: dict[Any, Any] = {}
        tensor, constexpr, like = self.tensor, self.constexpr, self._like

        def operate(given: Any, dtype: Any, *options: Any, **named: Any) -> Any:
            if options or named or type(given) is not tensor:
                return plain(given, dtype, *options, **named)
            if type(dtype) is constexpr:
                dtype = dtype.value
            if given.dtype is dtype:
                return given
            key = id(given.type), id(dtype)
            found = known.get(key)
            if found is None:
                result = plain(given, dtype)
                same = (given.dtype.name, getattr(dtype, "name", "")) in CASTS
                known[key] = same, result, given, dtype
                return result
            same, result, *_ = found
            return like(result, given.handle.data.astype(result.handle.data.dtype)) if same else plain(given, dtype)

        return operate

    def new_axes(self, plain: Plain) -> Plain:
        """`x[:, None]`: what is asked for has the form that numpy knows."""
        known: dict[Any, Any] = {}
        like = self._like

        def operate(given: Any, slices: Any) -> Any:
            if type(slices) is not tuple:
                return plain(given, slices)
            key = id(given.type), *[None if one is None else type(one) for one in slices]
            found = known.get(key)
            if found is None:
                result = plain(given, slices)
                form = given.handle.data[slices].shape if given.type.is_block() else None
                known[key] = form == result.handle.data.shape, result, given
                return result
            same, result, _ = found
            return like(result, given.handle.data[slices]) if same else plain(given, slices)

        return operate

    def split(self, plain: Plain) -> Plain:
        """A block in two, along its last axis."""
        known: dict[Any, Any] = {}
        like = self._like

        def operate(given: Any) -> Any:
            found = known.get(id(given.type))
            if found is None:
                result = plain(given)
                known[id(given.type)] = len(given.shape) > 1, *result, given
                return result
            several, first, second, _ = found
            data = given.handle.data
            return (like(first, data[..., 0]), like(second, data[..., 1])) if several else plain(given)

        return operate

    def store(self, interpreter: Any) -> Callable[[Plain], Plain]:
        """A block into memory of its type, or of one that is a cast of numpy away."""
        tensor, write = self.tensor, interpreter._interpreter.store

        def replace(plain: Plain) -> Plain:
            known: dict[Any, Any] = {}

            def operate(pointer: Any, value: Any, mask: Any = None, **options: Any) -> Any:
                if options or type(value) is not tensor or not (mask is None or type(mask) is tensor):
                    return plain(pointer, value, mask, **options)
                key = id(pointer.type), id(value.type), None if mask is None else id(mask.type)
                found = known.get(key)
                if found is None:
                    result = plain(pointer, value, mask)
                    known[key] = self._stored(interpreter, pointer, value, mask), result, pointer, value, mask
                    return result
                (shape, dtype), result, *_ = found
                if shape is None:
                    return plain(pointer, value, mask)
                seen = np.True_ if mask is None else mask.handle.data
                given = (pointer.handle.data, value.handle.data.astype(dtype, copy=False), seen)
                write(*(one if one.shape == shape else np.broadcast_to(one, shape) for one in given))
                return result

            return operate

        return replace

    def _stored(self, interpreter: Any, pointer: Any, value: Any, mask: Any) -> tuple[Any, Any]:
        """Shape and dtype of what is written, None if Triton has to cast or to check it."""
        kind, wanted = value.dtype.name, getattr(pointer.dtype, "element_ty", None)
        usual = wanted is not None and (kind == wanted.name or (kind, wanted.name) in CASTS) and kind in NUMBERS
        blocks = pointer.type.is_block() and all(one is None or one.type.is_block() for one in (value, mask))
        if not (usual and blocks) or kind == "int1" or (mask is not None and mask.dtype.name != "int1"):
            return None, None
        return pointer.type.sizes, interpreter._get_np_dtype(wanted)

    def _plan(self, choose: Callable[[str], Compute | None], left: Any, right: Any) -> tuple[Any, Any, Any]:
        """The function of arrays, None if Triton has to compute it, and what makes each operand a number."""
        if type(left) is self.tensor and left.dtype.is_ptr():
            advance = choose("pointer")
            counted = type(right) is int or (type(right) is self.tensor and right.dtype.name in ("int32", "int64"))
            if advance is None or not counted:
                return None, None, None
            width = max(1, left.dtype.element_ty.primitive_bitwidth // 8)
            return functools.partial(advance, width), None, np.int64 if type(right) is int else None
        kinds = {one.dtype.name for one in (left, right) if type(one) is self.tensor}
        if kinds == {"int32", "int64"}:
            kinds = {"int64"}  # numpy casts these two as Triton does
        elif kinds == {"fp32", "fp64"}:
            kinds = {"fp64"}
        (kind,) = kinds if len(kinds) == 1 else ("several",)
        if kind not in NUMBERS:
            return None, None, None
        numbers = {self.tensor: None, **NUMBERS[kind]}
        if type(left) not in numbers or type(right) not in numbers:
            return None, None, None
        return choose(kind), numbers[type(left)], numbers[type(right)]

    def _like(self, result: Any, data: Any) -> Any:
        """A tensor of the same type and shape with other data."""
        handle = object.__new__(self.handle)  # a comparison has the type of what it compares on its handle: not here
        handle.data, handle.dtype, handle.attr = data, result.dtype, {}
        made = object.__new__(self.tensor)
        made.handle, made.type, made.dtype = handle, result.type, result.dtype
        made.shape, made.numel = result.shape, result.numel
        return made


class _Remembered:
    """Functions whose type of result follows from the types of tensors and the values of everything else.

    `prepare` receives the first result and its arguments. It returns a function of the arrays of all their tensors,
    or None, if Triton has to compute it.
    """

    def __init__(self, direct: _Direct, named: tuple[type, ...], shape: type) -> None:
        self.direct, self.named, self.shape = direct, named, shape

    def __call__(self, prepare: Callable[..., Compute | None]) -> Callable[[Plain], Plain]:
        known: dict[Any, Any] = {}
        tensor, like, key_of = self.direct.tensor, self.direct._like, self._key

        def replace(plain: Plain) -> Plain:
            def operate(*given: Any, **options: Any) -> Any:
                key = (*map(key_of, given), *options, *map(key_of, options.values()))
                if OTHER in key:
                    return plain(*given, **options)
                found = known.get(key)
                if found is None:
                    result = plain(*given, **options)
                    usual = type(result) is tensor and result.handle.data.size > 0
                    known[key] = prepare(result, *given, **options) if usual else None, result, given, options
                    return result
                compute, result, *_ = found
                if compute is None:
                    return plain(*given, **options)
                return like(result, compute(*[x.handle.data for x in (*given, *options.values()) if type(x) is tensor]))

            return operate

        return replace

    def _key(self, given: Any) -> Any:
        kind = type(given)
        if kind is self.direct.tensor:
            return id(given.type)
        if kind is self.direct.constexpr:
            given, kind = given.value, type(given.value)
        if given is None or kind in (int, bool, str):
            return kind, given
        if kind is float:
            return repr(given)  # -0.0 is another number than 0.0
        if kind in (list, tuple, self.shape):
            keys = tuple(map(self._key, given))
            return OTHER if OTHER in keys else keys
        return id(given) if isinstance(given, self.named) else OTHER


OTHER = object()  # what may change without a change of type


def _constant(result: Any, *given: Any, **options: Any) -> Compute | None:
    """A range, or a block filled with a number."""
    data = result.handle.data
    return None if any(hasattr(one, "handle") for one in (*given, *options.values())) else lambda: data


def _load(interpreter: Any) -> Callable[..., Compute | None]:
    def prepare(result: Any, pointer: Any, *masks: Any, **options: Any) -> Compute | None:
        named = dict(zip(("mask", "other"), masks, strict=False)) | options
        mask, other = named.get("mask"), getattr(named.get("other"), "value", named.get("other"))
        if result.dtype.name == "int1" or [*named] != ["mask", "other"][: len(named)]:
            return None
        if not (mask is None or hasattr(mask, "handle")):
            return None
        data = result.handle.data
        shape, dtype, kind = data.shape, data.dtype, result.dtype.name
        if hasattr(other, "handle"):
            usual, other = other.dtype.name == kind, 0
        else:
            usual, other = not other or kind in NUMBERS, other or 0
        if not usual:
            return None
        seen, instead, read = np.ones(shape, bool), np.full(shape, other, dtype), interpreter._interpreter.load

        def load(pointers: Any, *rest: Any) -> Any:
            given = [one if one.shape == shape else np.broadcast_to(one, shape) for one in (pointers, *rest)]
            return read(*given, *(seen, instead)[len(rest) :], dtype)

        return load

    return prepare


def _dot(result: Any, left: Any, right: Any, acc: Any = None, **options: Any) -> Compute | None:
    if left.dtype.name not in ("fp16", "fp32", "fp64") or len(left.shape) > 3:
        return None
    dtype = result.handle.data.dtype
    return lambda a, b, *sums: np.matmul(a, b, dtype=dtype) + (sums[0] if sums else dtype.type(0))


def _reshape(result: Any, *given: Any, **options: Any) -> Compute:
    shape = result.handle.data.shape
    return lambda data: data.reshape(shape)


def _trans(result: Any, given: Any, *dims: Any) -> Compute | None:
    return None if dims else lambda data: np.swapaxes(data, -1, -2)


def _permute(result: Any, given: Any, *dims: Any) -> Compute:
    order = [getattr(one, "value", one) for one in (dims if len(dims) > 1 else dims[0])]
    return lambda data: np.transpose(data, order)


def _elementwise(function: Compute) -> Callable[..., Compute | None]:
    return lambda result, given: function if given.dtype.name in ("fp32", "fp64") else None


def _reduce(standard: Any) -> Callable[..., Compute | None]:
    functions = [
        (standard._sum_combine, np.sum),
        (standard._elementwise_max, np.nanmax),
        (standard._elementwise_min, np.nanmin),
    ]

    def prepare(
        result: Any, given: Any, axis: Any, combine: Any, keep_dims: Any = False, **options: Any
    ) -> Compute | None:
        axis, keep_dims = getattr(axis, "value", axis), getattr(keep_dims, "value", keep_dims)
        for known, function in functions:
            if combine is known and not isinstance(given, tuple):
                data = result.handle.data
                shape, dtype = data.shape, data.dtype
                return lambda data: (
                    np.asarray(function(data, axis=axis, keepdims=keep_dims)).astype(dtype, copy=False).reshape(shape)
                )
        return None

    return prepare
