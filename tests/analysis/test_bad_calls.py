"""Calls that cannot be answered raise an error that names what is wrong."""

from collections.abc import Callable

import pytest

import attnorm
from attnorm.analysis.compare import compare
from attnorm.analysis.settings import named_normalizers
from attnorm.analysis.verdicts.thresholds import Thresholds
from tests.analysis.test_compare import made
from tests.analysis.test_plan import lengths_of
from tests.analysis.test_reads import CORE
from tests.analysis.test_settings import settings
from tests.analysis.tiny_models import ids
from tests.models.tiny import llama, tokens

BAD_CALLS: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: compare({"run": made()}), ValueError, "^run: .*--normalizers"),
    (lambda: compare({}), ValueError, "got none"),
    (lambda: lengths_of(ids(100), windows=0), ValueError, "windows: .*got 0"),
    (lambda: lengths_of(ids(100), budget=4), ValueError, "budget: .*8 tokens, got 4"),
    (lambda: lengths_of(ids(100), windows=5, lengths=(32,)), ValueError, "160 tokens for 5 windows of 32, got 100"),
    (lambda: lengths_of(ids(3), None), ValueError, "'text': .*8 tokens, got 3"),
    (lambda: lengths_of(ids(1), None), ValueError, "8 tokens, got 1"),
    (lambda: lengths_of(ids(64), (128,)), ValueError, "'text': .*128 tokens .*got 64"),
    (lambda: lengths_of(ids(512), (256,)), ValueError, "GPT2LMHeadModel: .*128 tokens, got 256"),
    (lambda: lengths_of(ids(64), (4,)), ValueError, "8 tokens, got 4"),
    (lambda: lengths_of(ids(64), ()), ValueError, r"lengths: .*got \(\)"),
    (lambda: lengths_of(ids(64), (True,)), ValueError, "lengths: "),
    (
        lambda: lengths_of("Well, Prince, so Genoa and Lucca are now just family estates of the Buonapartes."),
        ValueError,
        "expected a tokenizer, got none.*tokenizer=",
    ),
    (lambda: attnorm.analyze(llama(), tokens(1, 32), read_keys=-1, **CORE), ValueError, "read_keys.*: expected"),
    (lambda: attnorm.analyze(llama(), tokens(1, 32), read_keys=10**9, **CORE), ValueError, "read_keys.*: expected"),
    (lambda: attnorm.analyze(llama(), tokens(1, 32), read_keys=True, **CORE), ValueError, "read_keys.*: expected"),
    (lambda: attnorm.analyze(llama(), tokens(1, 32), read_rows=0, **CORE), ValueError, "read_rows.*: expected"),
    (lambda: attnorm.analyze(llama(), tokens(1, 32), read_rows=(), **CORE), ValueError, "read_rows.*: expected"),
    (lambda: attnorm.analyze(llama(), tokens(1, 32), read_rows="last", **CORE), ValueError, "read_rows.*: expected"),
    (lambda: attnorm.analyze(llama(), tokens(1, 32), read_rows=(1.5,), **CORE), ValueError, "read_rows.*: expected"),
    (
        lambda: attnorm.analyze(llama(), list(range(1, 49)), lengths=(32, 48), read_keys=4, read_rows=(-1, 48), **CORE),
        ValueError,
        r"--token-rows\).*-48 to 47.*got 48",
    ),
    (
        lambda: attnorm.analyze(llama(), list(range(1, 49)), lengths=(32, 48), read_keys=4, read_rows=(-49,), **CORE),
        ValueError,
        r"--token-rows\).*-48 to 47.*got -49",
    ),
    (lambda: named_normalizers("modl"), ValueError, "'modl'.*'model'"),
    (lambda: named_normalizers("x"), ValueError, "'x'.* model, "),
    (lambda: settings(metrics="sensitivty"), ValueError, "'sensitivty'.*'sensitivity'"),
    (lambda: settings(metrics=("core", "zebra")), ValueError, "'zebra'"),
    (lambda: settings(vectors="value"), ValueError, "'value'.*'values'"),
    (lambda: settings(rows=0), ValueError, "rows: .*got 0"),
    (lambda: settings(vector_rows=0), ValueError, "vector_rows: .*got 0"),
    (lambda: settings(top_n=()), ValueError, r"top_n: .*got \(\)"),
    (lambda: settings(top_n=(0, 5)), ValueError, "top_n: "),
    (lambda: settings(temperatures=(1.0, -1.0)), ValueError, "temperatures: "),
    (lambda: settings(temperatures=(float("nan"),)), ValueError, "temperatures: "),
    (lambda: settings(temperatures=()), ValueError, "temperatures: "),
    (lambda: settings(rows="first"), ValueError, "rows: expected"),
    (lambda: settings(rows=1.5), ValueError, "rows: expected"),
    (lambda: settings(rows=True), ValueError, "rows: expected"),
    (lambda: settings(seed="x"), ValueError, "seed: expected"),
    (lambda: settings(vector_rows=2.5), ValueError, "vector_rows: expected"),
    (lambda: named_normalizers(("model", "entmx15")), ValueError, "'entmx15'.*'entmax15'"),
    (lambda: named_normalizers(("linear",)), TypeError, "'linear'"),
    (
        lambda: Thresholds().changed(["dispersed_entropy"]),
        ValueError,
        "set as NAME=VALUE, e.g. dispersed_entropy=0.95; got 'dispersed_entropy'",
    ),
    (
        lambda: Thresholds().changed(["dispersed_entrop=1"]),
        ValueError,
        "unknown threshold 'dispersed_entrop'; did you mean 'dispersed_entropy'",
    ),
    (lambda: Thresholds().changed(["=1"]), ValueError, "unknown threshold ''; known are 'dispersed_entropy'"),
    (lambda: Thresholds().changed(["zebra=1"]), ValueError, "unknown threshold 'zebra'; known are"),
    (
        lambda: Thresholds().changed(["dispersed_entropy=high"]),
        ValueError,
        "dispersed_entropy takes a number between 0 and 1, got 'high'",
    ),
    (lambda: Thresholds().changed(["dispersed_entropy="]), ValueError, "dispersed_entropy.*got ''"),
    (
        lambda: Thresholds().changed(["dispersed_entropy=1.5"]),
        ValueError,
        "dispersed_entropy is a share, expected between 0 and 1, got 1.5",
    ),
    (lambda: Thresholds().changed(["dispersed_entropy=nan"]), ValueError, "expected between 0 and 1, got nan"),
    (
        lambda: Thresholds().changed(["saturation_top_n=2.5"]),
        ValueError,
        "saturation_top_n takes a whole number, got '2.5'",
    ),
    (
        lambda: Thresholds().changed(["saturation_top_n=0"]),
        ValueError,
        "saturation_top_n must be a whole number of at least 1, got 0",
    ),
    (lambda: Thresholds().changed(["sensitive_quantile=80"]), ValueError, "sensitive_quantile must be one of"),
    (lambda: Thresholds().changed(["near_floor=0.1", "near_floor=0.2"]), ValueError, "near_floor is set twice"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD_CALLS)
def test_a_bad_call_is_named(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
