"""Bad input is answered with the value, what was expected and what to do."""

import inspect
import math
import re
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch

import attnorm
from attnorm.normalizers import Positions, get
from attnorm.normalizers.kernel import polynomial
from attnorm.normalizers.local import Local
from attnorm.normalizers.registry import BUILT_IN
from attnorm.normalizers.ssmax import neutral_s
from attnorm.normalizers.topk import TopK

pytestmark = pytest.mark.as_installed

Z = torch.randn(2, 3, 4, 5)
TRUE = torch.ones(4, 5, dtype=torch.bool)

INPUTS: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: attnorm.normalize(Z, "sofmax"), ValueError, "unknown normalizer 'sofmax'; did you mean 'softmax'"),
    (
        lambda: attnorm.normalize(Z.long(), "softmax"),
        TypeError,
        "logits must be floating point, got torch.int64; convert",
    ),
    (lambda: attnorm.normalize(Z.bool(), "softmax"), TypeError, "logits must be floating point, got torch.bool"),
    (lambda: attnorm.normalize(Z.tolist(), "softmax"), TypeError, "logits must be a torch.Tensor, got list"),
    (
        lambda: attnorm.normalize(torch.randn(5), "softmax"),
        ValueError,
        "shape (..., queries, keys), got (5,); for a single row",
    ),
    (lambda: attnorm.normalize(torch.randn(2, 0), "softmax"), ValueError, "logits of shape (2, 0) have no keys"),
    (
        lambda: attnorm.normalize(Z, "softmax", mask=TRUE.float()),
        TypeError,
        "mask must be boolean with True = may attend",
    ),
    (lambda: attnorm.normalize(Z, "softmax", mask=TRUE.long()), TypeError, "got torch.int64"),
    (lambda: attnorm.normalize(Z, "softmax", mask=[True]), TypeError, "mask must be a boolean torch.Tensor, got list"),
    (lambda: attnorm.normalize(Z, "softmax", mask=TRUE[:, :4]), ValueError, "mask of shape (4, 4) does not broadcast"),
    (
        lambda: attnorm.normalize(Z, "softmax", mask=TRUE[:3]),
        ValueError,
        "does not broadcast to logits of (2, 3, 4, 5)",
    ),
    (lambda: attnorm.normalize(Z[0], "softmax", mask=TRUE.expand(2, 3, 4, 5)), ValueError, "does not broadcast"),
    (lambda: attnorm.normalize(Z, "local", positions=torch.arange(3)), ValueError, "positions are for 3 queries"),
    (
        lambda: attnorm.normalize(Z, "local", positions=torch.zeros(5, 4)),
        ValueError,
        "positions have shape (5, 4); expected",
    ),
    (
        lambda: attnorm.normalize(Z, "local", positions=Positions(torch.arange(4), torch.arange(6))),
        ValueError,
        "positions are for 4 queries and 6 keys, but the logits have 4 queries and 5 keys",
    ),
    (lambda: attnorm.normalize(Z, "gaussian"), TypeError, "'gaussian' needs q, k, v, not a row of logits"),
    (lambda: attnorm.normalize(Z, 3), TypeError, "got int"),
    (lambda: get("ssmax", heads=12)(Z), ValueError, "(12, 1, 1)"),
    (lambda: get("sink", heads=12)(Z), ValueError, "parameters for 12 heads, but the logits have shape (2, 3, 4, 5)"),
]

OPTIONS: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: get("softmax", temperature=-1.0), ValueError, "temperature must be a positive number, got -1.0"),
    (lambda: get("softmax", temperature=0.0), ValueError, "temperature must be a positive number, got 0.0"),
    (lambda: get("softmax", temperature=math.nan), ValueError, "temperature must be a positive number, got nan"),
    (lambda: get("softmax", temperature=math.inf), ValueError, "temperature must be a positive number, got inf"),
    (lambda: get("entmax", alpha=0.9), ValueError, "alpha must lie in [1, 2] (1 = softmax, 2 = sparsemax), got 0.9"),
    (lambda: get("entmax", alpha=2.5), ValueError, "alpha must lie in [1, 2]"),
    (lambda: get("entmax", alpha=math.nan), ValueError, "alpha must lie in [1, 2]"),
    (
        lambda: get("entmax", alpha=2.0, learned=True),
        ValueError,
        "a learned alpha starts strictly between 1 and 2, got 2.0",
    ),
    (lambda: get("entmax", heads=3), ValueError, "heads=3 needs learned=True"),
    (lambda: get("asentmax", alpha=3.0), ValueError, "alpha must lie in [1, 2]"),
    (lambda: get("asentmax", beta=0.0), ValueError, "beta must be positive, got 0.0"),
    (lambda: get("asentmax", gamma=2.0), ValueError, "gamma must lie strictly between -2 and 2, got 2.0"),
    (
        lambda: get("kneemax", share=0.0),
        ValueError,
        "share must be positive (the knee in uniform weights 1/n), got 0.0",
    ),
    (lambda: get("kneemax", knee=0.0), ValueError, "knee must lie in (0, 0.5], got 0.0"),
    (lambda: get("kneemax", knee=0.51), ValueError, "knee must lie in (0, 0.5], got 0.51"),
    (lambda: get("kneemax", knee=math.nan), ValueError, "knee must lie in (0, 0.5], got nan"),
    (lambda: get("kneemax", share=2.0, knee=0.25), ValueError, "share=2.0 puts the knee at share/n"),
    (lambda: get("topk", k=0), ValueError, "k must be at least 1, got 0"),
    (lambda: get("topk", k=-3), ValueError, "k must be at least 1, got -3"),
    (
        lambda: get("topk", k="cubic"),
        ValueError,
        "unknown rule 'cubic' for k; expected a number, a function of n, or one of",
    ),
    (
        lambda: get("topk", k=2.5),
        TypeError,
        "k must be a whole number, a function of n, or one of ['log', 'sqrt'], got 2.5",
    ),
    (lambda: TopK(None), TypeError, "got None"),
    (lambda: get("local", window=0), ValueError, "window must be at least 1, got 0"),
    (lambda: Local(-1), ValueError, "window must be at least 1, got -1"),
    (lambda: get("relu", power=0.5), ValueError, "power must be at least 1, got 0.5"),
    (lambda: get("softpick", eps=0.0), ValueError, "eps must be positive, got 0.0"),
    (lambda: get("scale_invariant", tau=-1.0), ValueError, "tau must be positive, got -1.0"),
    (lambda: get("log_scaled", rule="gpt5"), ValueError, "unknown rule 'gpt5'; expected one of qwen, llama4, yarn"),
    (lambda: get("log_scaled", train_length=1), ValueError, "train_length must be at least 2, got 1"),
    (lambda: get("log_scaled", rule="llama4", floor_scale=0), ValueError, "floor_scale must be at least 1, got 0"),
    (lambda: get("log_scaled", rule="yarn", extension=0.5), ValueError, "must be at least 1, got 0.5"),
    (lambda: neutral_s(1), ValueError, "train_length must be at least 2, got 1"),
    (lambda: get("kernel", function="tanh"), ValueError, "unknown function 'tanh'; expected one of exp, softplus"),
    (lambda: get("kernel", function=torch.exp), ValueError, "a function of your own needs its derivative"),
    (lambda: get("kernel", function="polynomial", power=3), ValueError, "power must be an even number from 2 up"),
    (lambda: polynomial(0), ValueError, "got 0"),
    (
        lambda: get("ssmax", s="x"),
        TypeError,
        "normalizer 'ssmax': s must be a number or None, got 'x'; leave it out for None",
    ),
    (lambda: get("ssmax", s=math.inf), ValueError, "s must be a finite number, got inf; 1 / log n"),
    (lambda: get("softmax", temperature=None), TypeError, "temperature must be a number, got None; leave it out for 1"),
    (lambda: get("softmax", temperature=[1.0]), TypeError, "temperature must be a number, got [1.0]"),
    (lambda: get("softmax", temperature=True), TypeError, "temperature must be a number, got True"),
    (lambda: get("softmax", learned="yes"), TypeError, "learned must be True or False, got 'yes'; leave it out for"),
    (lambda: get("ssmax", heads=2.5), TypeError, "heads must be a whole number or None, got 2.5"),
    (lambda: get("ssmax", heads=True), TypeError, "heads must be a whole number or None, got True"),
    (lambda: get("ssmax", train_length=math.nan), TypeError, "train_length must be a whole number, got nan"),
    (lambda: get("local", window="wide"), TypeError, "window must be a whole number, got 'wide'; leave it out for"),
    (lambda: get("kernel", function=3), TypeError, "function must be one of exp, softplus, elu+1, polynomial, or a"),
    (
        lambda: get("kernel", function=torch.exp, derivative=2),
        TypeError,
        "derivative must be a function or None, got 2",
    ),
    (lambda: get("soft", landmarks="x"), TypeError, "landmarks must be a whole number or a function, got 'x'"),
    (lambda: get("topk", k=True), TypeError, "k must be a whole number, a function of n, or one of"),
    (lambda: get("adaptive_temperature", coefficients=3), TypeError, "coefficients must be several numbers"),
    (
        lambda: get("adaptive_temperature", coefficients="abc"),
        TypeError,
        "must be several numbers, highest power first",
    ),
    (lambda: get(["softmax"]), ValueError, "unknown normalizer ['softmax']; did you mean"),
    (
        lambda: attnorm.compose("softmax", scale=3),
        TypeError,
        "scale= takes a name, e.g. 'ssmax', an object, or several",
    ),
    (lambda: attnorm.compose("softmax", select=3), TypeError, "select= takes a name, e.g. 'topk'"),
    (lambda: attnorm.compose(3), TypeError, "got int (3); attnorm.get('ssmax') makes one by name"),
]


@pytest.mark.parametrize(("call", "error", "message"), INPUTS, ids=range(len(INPUTS)))
def test_bad_logits_masks_and_positions(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        call()


@pytest.mark.parametrize(("call", "error", "message"), OPTIONS, ids=range(len(OPTIONS)))
def test_bad_options(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        call()


EVERY_OPTION = [
    (name, option) for name in BUILT_IN for option in inspect.signature(BUILT_IN[name].factory()).parameters
]


@pytest.mark.parametrize(("name", "option"), EVERY_OPTION)
def test_a_value_of_no_kind_is_named_with_its_option(name: str, option: str) -> None:
    """No option of any normalizer can be a bare object; none of them answers with an error of Python or torch."""

    class Nothing:
        def __repr__(self) -> str:
            return "Nothing()"

    with pytest.raises((TypeError, ValueError), match=rf"{option}.*Nothing\(\)"):
        get(name, **{option: Nothing()})


def test_numbers_of_other_libraries_are_numbers() -> None:
    expected = get("ssmax", s=0.5, heads=2).state_dict()
    for s, heads in ((np.float32(0.5), np.int64(2)), (torch.tensor(0.5), 2), (Fraction(1, 2), 2)):
        found = get("ssmax", s=s, heads=heads).state_dict()
        assert all(torch.equal(found[key], value) for key, value in expected.items())


def test_the_advice_for_additive_masks_works() -> None:
    """The error says how to turn an additive mask into a boolean one; both usual fillings come out right."""
    for low in (torch.finfo(torch.float32).min, -math.inf):
        additive = torch.where(TRUE.tril(), 0.0, low)
        mask = additive > torch.finfo(additive.dtype).min / 2
        assert torch.equal(mask, TRUE.tril())
