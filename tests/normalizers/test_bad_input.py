"""Bad input is answered with the value, what was expected and what to do."""

import inspect
import math
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

Z = torch.randn(2, 3, 4, 5)
TRUE = torch.ones(4, 5, dtype=torch.bool)

INPUTS: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: attnorm.normalize(Z, "sofmax"), ValueError, "'sofmax'"),
    (
        lambda: attnorm.normalize(Z.long(), "softmax"),
        TypeError,
        "logits ... torch.int64",
    ),
    (lambda: attnorm.normalize(Z.bool(), "softmax"), TypeError, "logits ... torch.bool"),
    (lambda: attnorm.normalize(Z.tolist(), "softmax"), TypeError, "logits ... list"),
    (
        lambda: attnorm.normalize(torch.randn(5), "softmax"),
        ValueError,
        "shape (..., queries, keys), got (5,). For a single row",
    ),
    (lambda: attnorm.normalize(torch.randn(2, 0), "softmax"), ValueError, "logits of shape (2, 0) have no keys"),
    (
        lambda: attnorm.normalize(Z, "softmax", mask=TRUE.float()),
        TypeError,
        "mask",
    ),
    (lambda: attnorm.normalize(Z, "softmax", mask=TRUE.long()), TypeError, "got torch.int64"),
    (lambda: attnorm.normalize(Z, "softmax", mask=[True]), TypeError, "mask ... list"),
    (lambda: attnorm.normalize(Z, "softmax", mask=TRUE[:, :4]), ValueError, "mask of shape (4, 4) does not broadcast"),
    (
        lambda: attnorm.normalize(Z, "softmax", mask=TRUE[:3]),
        ValueError,
        "does not broadcast to logits of (2, 3, 4, 5)",
    ),
    (lambda: attnorm.normalize(Z[0], "softmax", mask=TRUE.expand(2, 3, 4, 5)), ValueError, "does not broadcast"),
    (lambda: attnorm.normalize(Z, "local", positions=torch.arange(3)), ValueError, "positions for 3 queries"),
    (
        lambda: attnorm.normalize(Z, "local", positions=torch.zeros(5, 4)),
        ValueError,
        "positions have shape (5, 4); expected",
    ),
    (
        lambda: attnorm.normalize(Z, "local", positions=Positions(torch.arange(4), torch.arange(6))),
        ValueError,
        "4 queries and 6 keys ... 4 queries and 5 keys",
    ),
    (lambda: attnorm.normalize(Z, "gaussian"), TypeError, "'gaussian' ... q, k, v"),
    (lambda: attnorm.normalize(Z, 3), TypeError, "got int"),
    (lambda: get("ssmax", heads=12)(Z), ValueError, "(12, 1, 1)"),
    (lambda: get("sink", heads=12)(Z), ValueError, "12 heads, got 3 heads ... heads=3"),
]

OPTIONS: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: get("softmax", temperature=-1.0), ValueError, "temperature ... -1.0"),
    (lambda: get("softmax", temperature=0.0), ValueError, "temperature ... 0.0"),
    (lambda: get("softmax", temperature=math.nan), ValueError, "temperature ... nan"),
    (lambda: get("softmax", temperature=math.inf), ValueError, "temperature ... inf"),
    (lambda: get("entmax", alpha=0.9), ValueError, "alpha ... 0.9"),
    (lambda: get("entmax", alpha=2.5), ValueError, "alpha"),
    (lambda: get("entmax", alpha=math.nan), ValueError, "alpha"),
    (
        lambda: get("entmax", alpha=2.0, learned=True),
        ValueError,
        "alpha ... 2.0",
    ),
    (lambda: get("entmax", alpha=1, learned=True), ValueError, "alpha ... 1. ... 1.5"),
    (lambda: get("entmax", heads=3), ValueError, "heads=3 ... learned=True"),
    (lambda: get("asentmax", alpha=3.0), ValueError, "alpha"),
    (lambda: get("asentmax", beta=0.0), ValueError, "beta ... 0.0"),
    (lambda: get("asentmax", gamma=2.0), ValueError, "gamma ... 2.0"),
    (
        lambda: get("kneemax", share=0.0),
        ValueError,
        "share ... 0.0",
    ),
    (lambda: get("kneemax", knee=0.0), ValueError, "knee ... 0.0"),
    (lambda: get("kneemax", knee=0.51), ValueError, "knee ... 0.51"),
    (lambda: get("kneemax", knee=math.nan), ValueError, "knee ... nan"),
    (lambda: get("kneemax", share=2.0, knee=0.1), ValueError, "share=2.0 ... knee=0.1"),
    (lambda: get("kneemax", share=30.0, knee=0.25), ValueError, "share=30.0 ... knee=0.25"),
    (lambda: get("laser", normalizer="kneemax+knee"), ValueError, "kneemax+knee"),
    (lambda: get("topk", k=0), ValueError, "k ... 0"),
    (lambda: get("topk", k=-3), ValueError, "k ... -3"),
    (
        lambda: get("topk", k="cubic"),
        ValueError,
        "'cubic'",
    ),
    (
        lambda: get("topk", k=2.5),
        TypeError,
        "k ... 2.5",
    ),
    (lambda: TopK(None), TypeError, "got None"),
    (lambda: get("local", window=0), ValueError, "window ... 0"),
    (lambda: Local(-1), ValueError, "window ... -1"),
    (lambda: get("relu", power=0.5), ValueError, "power ... 0.5"),
    (lambda: get("softpick", eps=0.0), ValueError, "eps ... 0.0"),
    (lambda: get("scale_invariant", tau=-1.0), ValueError, "tau ... -1.0"),
    (lambda: get("softcap", cap=0.0), ValueError, "cap ... 0.0"),
    (lambda: get("softcap", cap=math.inf), ValueError, "cap ... inf"),
    (lambda: get("ssa", beta=math.inf), ValueError, "beta ... inf"),
    (lambda: get("norm_softmax", temperature=0.0), ValueError, "temperature ... 0.0"),
    (lambda: get("threshold_relu", beta=-0.5), ValueError, "beta ... -0.5"),
    (lambda: get("threshold_relu", power=0.5), ValueError, "power ... 0.5"),
    (lambda: get("threshold_relu", width=0), ValueError, "width ... 0"),
    (lambda: get("odd_polynomial", power=2), ValueError, "power ... 2"),
    (lambda: get("log_scaled", rule="gpt5"), ValueError, "'gpt5'"),
    (lambda: get("log_scaled", train_length=1), ValueError, "train_length ... 1"),
    (lambda: get("log_scaled", rule="llama4", floor_scale=0), ValueError, "floor_scale ... 0"),
    (lambda: get("log_scaled", rule="yarn", extension=0.5), ValueError, "extension ... 0.5"),
    (lambda: get("ssmax", rho=1.0), ValueError, "rho ... 1.0"),
    (lambda: get("ssmax", rho=0.5, size=0.0), ValueError, "size ... 0.0"),
    (lambda: get("ssmax", s=0.5, rho=0.5), ValueError, "s=0.5 ... rho=0.5"),
    (lambda: neutral_s(1), ValueError, "train_length ... 1"),
    (lambda: get("kernel", function="tanh"), ValueError, "'tanh'"),
    (lambda: get("kernel", function=torch.exp), ValueError, "derivative"),
    (lambda: get("kernel", function="polynomial", power=3), ValueError, "power"),
    (lambda: polynomial(0), ValueError, "got 0"),
    (
        lambda: get("ssmax", s="x"),
        TypeError,
        "'ssmax' ... s ... 'x'",
    ),
    (lambda: get("ssmax", s=math.inf), ValueError, "s ... inf"),
    (lambda: get("softmax", temperature=None), TypeError, "temperature ... None"),
    (lambda: get("softmax", temperature=[1.0]), TypeError, "temperature ... [1.0]"),
    (lambda: get("softmax", temperature=True), TypeError, "temperature ... True"),
    (lambda: get("softmax", learned="yes"), TypeError, "learned ... 'yes'"),
    (lambda: get("ssmax", heads=2.5), TypeError, "heads ... 2.5"),
    (lambda: get("ssmax", heads=True), TypeError, "heads ... True"),
    (lambda: get("ssmax", train_length=math.nan), TypeError, "train_length ... nan"),
    (lambda: get("local", window="wide"), TypeError, "window ... 'wide'"),
    (lambda: get("kernel", function=3), TypeError, "function"),
    (
        lambda: get("kernel", function=torch.exp, derivative=2),
        TypeError,
        "derivative ... 2",
    ),
    (lambda: get("soft", landmarks="x"), TypeError, "landmarks ... 'x'"),
    (lambda: get("topk", k=True), TypeError, "k"),
    (lambda: get("adaptive_temperature", coefficients=3), TypeError, "coefficients"),
    (
        lambda: get("adaptive_temperature", coefficients="abc"),
        TypeError,
        "coefficients",
    ),
    (lambda: get(["softmax"]), ValueError, "['softmax']"),
    (
        lambda: attnorm.compose("softmax", scale=3),
        TypeError,
        "scale= ... 'ssmax'",
    ),
    (lambda: attnorm.compose("softmax", select=3), TypeError, "select= ... 'topk'"),
    (lambda: attnorm.compose(3), TypeError, "int ... (3) ... attnorm.get("),
]


@pytest.mark.parametrize(("call", "error", "message"), INPUTS, ids=range(len(INPUTS)))
def test_bad_logits_masks_and_positions(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        call()
    assert all(part in str(raised.value) for part in message.split(" ... ")), raised.value


@pytest.mark.parametrize(("call", "error", "message"), OPTIONS, ids=range(len(OPTIONS)))
def test_bad_options(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        call()
    assert all(part in str(raised.value) for part in message.split(" ... ")), raised.value


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
