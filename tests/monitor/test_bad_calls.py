"""Calls that cannot be answered raise an error that names what is wrong."""

import math
from collections.abc import Callable

import pytest

from attnorm.monitor.alerts import AlertThresholds
from attnorm.monitor.monitor import AttentionMonitor
from attnorm.monitor.qk_clip import QKClip

BAD_CALLS: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: AlertThresholds(heads=1.5), ValueError, "threshold heads"),
    (lambda: AlertThresholds(heads=0.0), ValueError, "threshold heads"),
    (lambda: AlertThresholds(exploding_logit=math.nan), ValueError, "threshold exploding_logit"),
    (lambda: AlertThresholds(dispersed_entropy="x"), ValueError, "threshold dispersed_entropy"),
    (lambda: AlertThresholds(separability=None), ValueError, "threshold separability"),
    (lambda: AlertThresholds(logit_growth=True), ValueError, "threshold logit_growth"),
    (lambda: AttentionMonitor(per_head=[]), ValueError, "per_head"),
    (lambda: AttentionMonitor(per_head=[(1,)]), ValueError, "per_head"),
    (lambda: AttentionMonitor(per_head=[(1, -2)]), ValueError, "per_head"),
    (lambda: AttentionMonitor(per_head=[("a", "b")]), ValueError, "per_head"),
    (lambda: AttentionMonitor(per_head=3), ValueError, "per_head"),
    (lambda: AttentionMonitor(per_head=[(True, 1)]), ValueError, "per_head"),
    (lambda: AttentionMonitor(per_head=[("x", 1, 1.5)]), ValueError, "per_head"),
    (lambda: AttentionMonitor(rows=0), ValueError, "rows"),
    (lambda: AttentionMonitor(top_n=1.5), ValueError, "top_n"),
    (lambda: AttentionMonitor(every=-1), ValueError, "every"),
    (lambda: AttentionMonitor(rows=True), ValueError, "rows"),
    (lambda: QKClip(tau=0.0), ValueError, "tau.*0.0"),
    (lambda: QKClip(tau=math.inf), ValueError, "tau.*inf"),
    (lambda: QKClip(on_alert=True), ValueError, "on_alert"),
    (lambda: QKClip(monitor=3), TypeError, "monitor.*3"),
    (lambda: AttentionMonitor().setup, AttributeError, r"monitor\.lightning\(\)"),
    (lambda: QKClip().setup, AttributeError, r"clip\.lightning\(\)"),
    (lambda: AttentionMonitor().on_exception, AttributeError, r"monitor\.lightning\(\)"),
    (lambda: QKClip().on_exception, AttributeError, r"clip\.lightning\(\)"),
    (lambda: AttentionMonitor(thresholds={"heads": 0.2}), TypeError, r"\{'heads': 0\.2\}.*AlertThresholds\("),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD_CALLS)
def test_a_bad_call_is_named(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
