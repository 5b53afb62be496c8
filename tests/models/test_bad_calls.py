"""Calls that cannot be answered raise an error that names what is wrong."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import attnorm
from attnorm.engines.inputs import Inputs
from attnorm.models.dispatch import UnsupportedModel, check_observable
from attnorm.models.inputs import Text, prepared, texts_from
from attnorm.models.layer_normalizer import as_integer, parse_layers, validate_heads
from attnorm.models.load import CannotLoad, load
from attnorm.models.patch import patch, unpatch
from attnorm.models.patched_attention import _run_mechanism
from tests.models.families import tiny
from tests.models.test_layer_normalizer import Holder
from tests.models.tiny import llama

READS_STATES = SimpleNamespace(name="kept", reads_hidden_states=True, needs_every_query=False)
CALL = Inputs(*torch.zeros(3, 1, 2, 3, 4), None, causal=True, scale=1.0)

BAD_CALLS: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: check_observable(nn.Linear(2, 2)), UnsupportedModel, "Linear"),
    (lambda: validate_heads(-1, Holder(num_heads=4), "layer"), ValueError, "layer: expected heads from 0 to 3"),
    (lambda: validate_heads(4, Holder(num_heads=4), "layer"), ValueError, "layer: expected heads from 0 to 3"),
    (lambda: validate_heads([], Holder(num_heads=4), "layer"), ValueError, "layer: expected heads from 0 to 3"),
    (lambda: validate_heads([0, 4], Holder(num_heads=4), "layer"), ValueError, "layer: expected heads from 0 to 3"),
    (lambda: validate_heads(True, Holder(num_heads=4), "layer"), ValueError, "layer: expected heads from 0 to 3"),
    (lambda: validate_heads(1.5, Holder(num_heads=4), "layer"), ValueError, "layer: expected heads from 0 to 3"),
    (lambda: validate_heads("ab", Holder(num_heads=4), "layer"), ValueError, "layer: expected heads from 0 to 3"),
    (lambda: validate_heads([None], Holder(num_heads=4), "layer"), ValueError, "layer: expected heads from 0 to 3"),
    (lambda: validate_heads([1, 1], Holder(num_heads=4), "layer"), ValueError, r"once.*\[1, 1\]"),
    (lambda: as_integer(True), TypeError, "True"),
    (lambda: texts_from({"book": {"part 1": "a", "part 2": "b"}}), ValueError, "'book'.*input_ids.*'part 1', 'part 2'"),
    (lambda: texts_from(""), ValueError, "empty"),
    (lambda: texts_from("  \n"), ValueError, "empty"),
    (lambda: texts_from([]), ValueError, "at least one input"),
    (lambda: texts_from({}), ValueError, "at least one input"),
    (lambda: texts_from(["a", ""]), ValueError, "'text 2' is empty"),
    (lambda: texts_from({"war": ""}), ValueError, "'war' is empty"),
    (lambda: texts_from(torch.zeros(0, dtype=torch.long)), ValueError, "expected token ids, got none"),
    (lambda: texts_from(torch.zeros(1, 2, 3, dtype=torch.long)), ValueError, "shape"),
    (lambda: texts_from(torch.zeros(3)), ValueError, "integer dtype"),
    (lambda: texts_from(torch.ones(3, dtype=torch.bool)), ValueError, "integer dtype"),
    (lambda: texts_from(7), ValueError, "int"),
    (lambda: texts_from(None), ValueError, "NoneType"),
    (lambda: texts_from(b"bytes"), ValueError, "bytes"),
    (lambda: texts_from([1.5, 2]), ValueError, "float"),
    (lambda: prepared(Text("t", "hello"), load(tiny("llama")), None), ValueError, "tokenizer.*ids"),
    (lambda: parse_layers("3-2"), ValueError, r"'3\-2'"),
    (lambda: parse_layers("-1"), ValueError, r"'\-1'"),
    (lambda: parse_layers("10000"), ValueError, "'10000'"),
    (lambda: parse_layers("9999-10000"), ValueError, r"'9999\-10000'"),
    (lambda: parse_layers("a"), ValueError, "'a'"),
    (lambda: parse_layers(""), ValueError, "''"),
    (lambda: parse_layers(True), ValueError, "True"),
    (lambda: parse_layers(1.5), ValueError, r"1\.5"),
    (lambda: parse_layers("1,1"), ValueError, "'1,1'"),
    (lambda: parse_layers("0-2,2"), ValueError, r"'0\-2,2'"),
    (lambda: load("bundled", device="tpu"), CannotLoad, "'tpu'.*'cpu'"),
    (lambda: load("bundled", device="cuda:99"), CannotLoad, "'cuda:99'.*'cpu'"),
    (lambda: load("bundled", device="meta:x"), CannotLoad, "'meta:x'.*'cpu'"),
    (lambda: load(3), ValueError, "got 3"),
    (lambda: load("/no/such/folder"), CannotLoad, "'/no/such/folder'"),
    (lambda: load("./nothing"), CannotLoad, r"'\./nothing'"),
    (lambda: load("~/nothing-here"), CannotLoad, r"'\~/nothing\-here'"),
    (lambda: load("a/b/c"), CannotLoad, "'a/b/c'"),
    (lambda: load(""), CannotLoad, "''"),
    (lambda: load("  "), CannotLoad, r"'\ \ '"),
    (lambda: _run_mechanism(READS_STATES, CALL, None, None, None), ValueError, "'kept'"),
    (lambda: unpatch("gpt2"), TypeError, r"from_pretrained\('gpt2'\)"),
    (lambda: unpatch(None), TypeError, "None"),
    (lambda: patch(llama(), 3), TypeError, r"int \(3\).*attnorm\.get"),
    (lambda: patch(llama(), "ssmax", s="x"), TypeError, "'ssmax': s .*'x'"),
    (lambda: patch(llama(), attnorm.get("entmax15"), alpha=1.3), TypeError, "alpha"),
    (lambda: patch("gpt2", "ssmax"), TypeError, r"from_pretrained\('gpt2'\)"),
    (lambda: patch(3, "ssmax"), TypeError, "got 3"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD_CALLS)
def test_a_bad_call_is_named(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
