"""Operators that are one call of numpy give what Triton's interpreter gives: values, types and shapes."""

import operator
from typing import Any

import numpy as np
import pytest

from attnorm.engines.execution import HAS_TRITON
from tests import fast_interpreter

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton, which runs on Linux alone")

KINDS = {"float32": np.float32, "float64": np.float64, "int32": np.int32, "int64": np.int64, "int1": np.bool_}
SHAPES = [(4, 1), (1, 8), None]  # None: a scalar


@pytest.fixture
def language() -> Any:
    """triton.language as it is within a launch, with and without direct operators."""
    from triton.runtime import interpreter

    fast_interpreter.speed_up_interpreter()
    if not fast_interpreter.DIRECT:
        pytest.skip("this version of Triton is left as it is")
    return interpreter


class Launch:
    def __init__(self, interpreter: Any, direct: bool) -> None:
        self.interpreter, self.direct = interpreter, direct

    def __enter__(self) -> Any:
        self.before = dict(fast_interpreter.DIRECT)
        if not self.direct:
            fast_interpreter.DIRECT.clear()
        self.scope = self.interpreter._LangPatchScope()
        language = self.interpreter.tl
        fast_interpreter.restore_language()
        for where in (language, language.tensor):
            self.interpreter._patch_builtin(where, self.interpreter.interpreter_builder, self.scope)
        self.interpreter._patch_reduce_scan(self.scope)
        return language

    def __exit__(self, *error: object) -> None:
        self.scope.restore()
        fast_interpreter.DIRECT.update(self.before)


def operands(interpreter: Any) -> list[Any]:
    language, generator = interpreter.tl, np.random.default_rng(0)
    found: list[Any] = [2, -3, 0.5, True, language.constexpr(2), language.constexpr(1.5)]
    for name, kind in KINDS.items():
        dtype = getattr(language, name)
        for shape in SHAPES:
            data = generator.integers(-2, 3, shape or (1,)).astype(kind)
            if np.issubdtype(kind, np.floating) and shape:
                data.flat[0] = np.nan
            type_ = language.block_type(dtype, list(shape)) if shape else dtype
            found.append(language.tensor(interpreter.TensorHandle(data, dtype), type_))
    pointer = language.pointer_type(language.float64)
    found.append(language.tensor(interpreter.TensorHandle(np.array([2**40], np.uint64), pointer), pointer))
    return found


def outcome(function: Any, *given: Any) -> Any:
    """Type, shape and bits of the second call, which is the direct one; or the kind of error."""
    try:
        function(*given)
        found = function(*given)
    except Exception as error:
        return type(error)
    if not hasattr(found, "handle"):
        return type(found)  # a constexpr has operators of its own
    data = found.handle.data.astype(bool) if found.dtype.name == "int1" else found.handle.data
    return found.type, [size.value for size in found.shape], found.numel.value, data.dtype, data.tolist()


def same(one: Any, other: Any) -> bool:
    return repr(one) == repr(other)  # NaN equals NaN


@pytest.mark.parametrize(
    "name", ["add", "sub", "mul", "truediv", "floordiv", "mod", "gt", "ge", "lt", "le", "eq", "ne", "and_", "or_"]
)
@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
def test_operators(language: Any, name: str) -> None:
    function = getattr(operator, name)
    _compare(language, lambda tl: function, 2)


@pytest.mark.parametrize("name", ["maximum", "minimum", "NaN stays"])
def test_extremes(language: Any, name: str) -> None:
    if name == "NaN stays":
        _compare(language, lambda tl: lambda a, b: tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL), 2)
    else:
        _compare(language, lambda tl: getattr(tl, name), 2)


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
def test_choices(language: Any) -> None:
    conditions = [one for one in operands(language) if type(one) is language.tl.tensor and one.dtype.name == "int1"]
    for condition in conditions:
        _compare(language, lambda tl, condition=condition: lambda a, b: tl.where(condition, a, b), 2)
        _compare(language, lambda tl, condition=condition: lambda a: tl.where(condition, 0.5, float("-inf")), 1)
        _compare(language, lambda tl, condition=condition: lambda a: tl.where(condition, 3, -1), 1)
    for chosen in (True, False, language.tl.constexpr(True)):
        _compare(language, lambda tl, chosen=chosen: lambda a, b: tl.where(chosen, a, b), 2)


def test_new_axes_and_casts(language: Any) -> None:
    _compare(language, lambda tl: lambda a: a[:, None], 1)
    _compare(language, lambda tl: lambda a: a[None, :], 1)
    for name in ("float32", "float64", "int32", "int64", "int1"):
        _compare(language, lambda tl, name=name: lambda a: a.to(getattr(tl, name)), 1)
        _compare(language, lambda tl, name=name: lambda a: tl.cast(a, getattr(tl, name)), 1)


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
@pytest.mark.parametrize("name", ["abs", "exp", "exp2", "log", "log2", "sqrt", "expand_dims"])
def test_functions(language: Any, name: str) -> None:
    further = (0,) if name == "expand_dims" else ()
    _compare(language, lambda tl: lambda a: getattr(tl, name)(a, *further), 1)


def test_stores(language: Any) -> None:
    tl = language.tl

    def block(data: Any, dtype: Any) -> Any:
        return tl.tensor(language.TensorHandle(data, dtype), tl.block_type(dtype, list(data.shape)))

    mask = block(np.arange(8).reshape(2, 4) % 3 > 0, tl.int1)
    row = block(np.array([[True, False, True, True]]), tl.int1)
    for name, kind in KINDS.items():
        for target, memory in (("float32", np.float32), (name, kind), ("int64", np.int64)):
            written: list[Any] = []
            for direct in (False, True):
                stored = np.zeros(8, memory)
                type_ = tl.pointer_type(getattr(tl, target))
                at = block(stored.ctypes.data + stored.itemsize * np.arange(8, dtype=np.uint64).reshape(2, 4), type_)
                with Launch(language, direct) as launched:
                    for number, options in enumerate(({}, {"mask": mask}, {"mask": row}, {"eviction_policy": ""})):
                        for shape in ((2, 4), (2, 1)):
                            for _ in range(2):  # the second one is direct
                                data = 1.5 * np.arange(1, 1 + np.prod(shape)).reshape(shape) + number
                                launched.store(at, block(data.astype(kind), getattr(tl, name)), **options)
                            written.append(stored.copy())
                            stored[:] = 0
            half = len(written) // 2
            assert np.array_equal(written[:half], written[half:]), (name, target)
            assert np.any(written)


def test_loads(language: Any) -> None:
    tl, memory = language.tl, np.arange(1, 33)
    for name, kind in KINDS.items():
        stored = memory.astype(kind)
        type_ = tl.pointer_type(getattr(tl, name))
        at = stored.ctypes.data + stored.itemsize * np.arange(8, dtype=np.uint64)
        block = tl.tensor(language.TensorHandle(at, type_), tl.block_type(type_, [8]))
        mask = tl.tensor(language.TensorHandle(np.arange(8) % 3 > 0, tl.int1), tl.block_type(tl.int1, [8]))
        one = tl.tensor(language.TensorHandle(np.array([True]), tl.int1), tl.int1)
        two = tl.tensor(language.TensorHandle(at[2:3], type_), type_)
        handle = language.TensorHandle(memory[8:16].astype(kind), getattr(tl, name))
        others = tl.tensor(handle, tl.block_type(getattr(tl, name), [8]))
        for call in (
            lambda tl, block=block: tl.load(block),
            lambda tl, two=two: tl.load(two),
            lambda tl, block=block, mask=mask: tl.load(block, mask),
            lambda tl, block=block, mask=mask: tl.load(block, mask=mask, other=7),
            lambda tl, block=block, mask=mask: tl.load(block, mask=mask, other=-0.5),
            lambda tl, block=block, mask=mask, others=others: tl.load(block, mask=mask, other=others),
            lambda tl, block=block, mask=mask, others=others: tl.load(block, other=others, mask=mask),
            lambda tl, two=two, one=one: tl.load(two, one, other=0),
            lambda tl, block=block, one=one: tl.load(block, one, other=tl.constexpr(3)),
        ):
            _compare_calls(language, call)


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
def test_products_reductions_and_forms(language: Any) -> None:
    tl, generator = language.tl, np.random.default_rng(0)
    for name in ("float16", "float32", "float64", "int32", "int64"):
        dtype = getattr(tl, name)

        def made(*shape: int, dtype: Any = dtype, name: str = name) -> Any:
            data = (8 * generator.standard_normal(shape)).astype(name)
            return tl.tensor(language.TensorHandle(data, dtype), tl.block_type(dtype, list(shape)))

        left, right = made(16, 32), made(32, 16)
        if "float" in name:
            left.handle.data[0, 0] = np.nan
            wide = "float64" if name == "float64" else "float32"
            sums = made(16, 16, dtype=getattr(tl, wide), name=wide)
            for options in ({}, {"acc": sums}, {"acc": sums, "input_precision": "ieee"}):
                _compare_calls(language, lambda tl, options=options, a=left, b=right: tl.dot(a, b, **options))
        for axis in (0, 1, -1, None, tl.constexpr(1)):
            for keep in (False, True):
                for combine in (tl.standard._sum_combine, tl.standard._elementwise_max, tl.standard._elementwise_min):
                    _compare_calls(
                        language,
                        lambda tl, a=left, axis=axis, combine=combine, keep=keep: tl.reduce(a, axis, combine, keep),
                    )
        _compare_calls(language, lambda tl, a=left: tl.trans(a))
        _compare_calls(language, lambda tl, a=left: tl.trans(a, 1, 0))
        _compare_calls(language, lambda tl, a=left: tl.reshape(a, [64, 8]))
        _compare_calls(language, lambda tl, a=left: tl.reshape(a, 4, 8, 16))
        cube, pair = made(4, 2, 2), made(2)
        for order in ((2, 0, 1), (0, tl.constexpr(2), 1)):
            _compare_calls(language, lambda tl, a=cube, order=order: tl.permute(a, order))
            _compare_calls(language, lambda tl, a=cube, order=order: tl.permute(a, *order))
        for half in (0, 1):
            _compare_calls(language, lambda tl, a=cube, half=half: tl.split(a)[half])
            _compare_calls(language, lambda tl, a=pair, half=half: tl.split(a)[half])
        _compare_calls(language, lambda tl, a=left, dtype=dtype: tl.full(a.shape, 2, dtype))
        for value in (0.0, -0.0, 1, 1.0, True, tl.constexpr(2)):
            _compare_calls(language, lambda tl, value=value, dtype=dtype: tl.full([4, 8], value, dtype))
    _compare_calls(language, lambda tl: tl.arange(0, 16))
    _compare_calls(language, lambda tl: tl.arange(tl.constexpr(16), 32))


def _compare_calls(interpreter: Any, call: Any) -> None:
    found = []
    for direct in (False, True):
        with Launch(interpreter, direct) as language:
            found.append(outcome(call, language))
    assert same(*found), found


def _compare(interpreter: Any, make: Any, count: int) -> None:
    tensor = interpreter.tl.tensor
    given = operands(interpreter)
    cases = [(a,) for a in given] if count == 1 else [(a, b) for a in given for b in given]
    cases = [case for case in cases if any(type(one) is tensor for one in case)]
    found: dict[bool, list[Any]] = {}
    for direct in (False, True):
        with Launch(interpreter, direct) as language:
            function = make(language)
            found[direct] = [outcome(function, *case) for case in cases]
    wrong = [(case, a, b) for case, a, b in zip(cases, found[False], found[True], strict=True) if not same(a, b)]
    assert not wrong, wrong[:3]
    assert sum(isinstance(one, tuple) for one in found[True]) > 3
