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
        for where in (language, language.tensor):
            self.interpreter._patch_builtin(where, self.interpreter.interpreter_builder, self.scope)
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


def test_new_axes_and_casts(language: Any) -> None:
    _compare(language, lambda tl: lambda a: a[:, None], 1)
    _compare(language, lambda tl: lambda a: a[None, :], 1)
    for name in ("float32", "float64", "int32", "int64", "int1"):
        _compare(language, lambda tl, name=name: lambda a: a.to(getattr(tl, name)), 1)


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
