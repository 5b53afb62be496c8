"""Calls that cannot be answered raise an error that names what is wrong."""

import math
from collections.abc import Callable

import pytest
import torch

from attnorm.normalizers import compose, get, mixture, register
from attnorm.normalizers.check import check_normalizer
from attnorm.normalizers.contract import per_head
from attnorm.normalizers.declaration import LayerFacts
from attnorm.normalizers.spec import parse_spec
from tests.normalizers.test_registry import Flat

BAD_CALLS: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: get("adaptive_temperature", coefficients=()), ValueError, "coefficients"),
    (lambda: get("adaptive_temperature", coefficients=(1.0, math.nan)), ValueError, "coefficients"),
    (lambda: get("adaptive_temperature", coefficients=(math.inf,)), ValueError, "coefficients"),
    (lambda: check_normalizer("softmax", exceptions={"row_sum": "typo"}), ValueError, "'row_sum'.*'row_sums'"),
    (lambda: check_normalizer("gaussian"), TypeError, "'gaussian'"),
    (lambda: compose(map="ssmax"), ValueError, r"'ssmax'.*compose\(scale='ssmax'\)"),
    (lambda: compose(map="topk"), ValueError, r"'topk'.*compose\(select='topk'\)"),
    (lambda: compose(map="softmax1"), ValueError, r"'softmax1'.*compose\(sink='softmax1'\)"),
    (lambda: compose(scale="sparsemax"), ValueError, r"'sparsemax'.*compose\(map='sparsemax'\)"),
    (lambda: compose(scale="topk"), ValueError, "'topk'.*scale rule"),
    (lambda: compose(scale="asentmax"), ValueError, "'asentmax'.*scale rule"),
    (lambda: compose(select="ssmax"), ValueError, "'ssmax'.*selection"),
    (lambda: compose(select="softmax"), ValueError, "'softmax'.*Selection"),
    (lambda: compose(sink="softmax"), ValueError, "'softmax'.*Sink"),
    (lambda: compose(sink="sigmoid"), ValueError, "'sigmoid'.*sink"),
    (lambda: mixture("softmax", "sparsemax", share=0.0), ValueError, "share.*0.0"),
    (lambda: mixture("softmax", "sparsemax", share=1.0), ValueError, "share.*1.0"),
    (lambda: mixture("softmax", "sparsemax", share=-0.1), ValueError, "share.*-0.1"),
    (lambda: mixture("softmax", "sparsemax", share=2.0), ValueError, "share.*2.0"),
    (lambda: get("softmax")(torch.zeros(2, 3, 5), torch.zeros(3, 5)), TypeError, "float32.*finfo"),
    (
        lambda: get("softmax")(torch.zeros(2, 3, 5), torch.zeros(3, 5, dtype=torch.int64)),
        TypeError,
        r"int64.*\.bool\(\)",
    ),
    (
        lambda: per_head(torch.ones(3), torch.zeros(2, 4, 5)),
        ValueError,
        r"\(\.\.\., 3, queries, keys\).*for 3 heads.*got 2 heads.*heads=2",
    ),
    (lambda: compose("softmax", sink="ssmax"), ValueError, r"'ssmax'.*compose\(scale='ssmax'\)"),
    (lambda: register(Flat), TypeError, r"@attnorm\.register\("),
    (lambda: get("sofmax"), ValueError, "'sofmax'.*'softmax'"),
    (lambda: get("entmax_15"), ValueError, "'entmax15'"),
    (lambda: get("stickbreaking"), ValueError, "'stick_breaking'"),
    (lambda: get("xyz"), ValueError, "'xyz'.*adaptive_temperature, "),
    (lambda: get(15), ValueError, "15"),
    (lambda: get("entmax", alfa=1.3), TypeError, "'entmax'.*'alfa'.*alpha, learned, heads"),
    (lambda: get("softpick", heads=2), TypeError, "'softpick'.*eps"),
    (lambda: get("asentmax", delta=float("nan")), ValueError, "'asentmax'.*delta.*nan"),
    (lambda: get("sigmoid", bias=float("nan")), ValueError, "'sigmoid'.*bias.*nan"),
    (lambda: get("kernel", offset=float("nan")), ValueError, "'kernel'.*offset.*nan"),
    (lambda: LayerFacts(1, 2).mean_log_n(), ValueError, "got 2"),
    (lambda: parse_spec(f"topk:{'k'}"), ValueError, "key=value"),
    (lambda: parse_spec(f"topk:{'k='}"), ValueError, "key=value"),
    (lambda: parse_spec(f"topk:{'=4'}"), ValueError, "key=value"),
    (lambda: parse_spec(f"topk:{''}"), ValueError, "key=value"),
    (lambda: parse_spec(f"topk:{'heads=3'}"), ValueError, "Remove 'heads=3'"),
    (lambda: parse_spec("topk:k=4:k=5"), ValueError, "'k=5'"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD_CALLS)
def test_a_bad_call_is_named(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
