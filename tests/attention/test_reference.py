"""attention() equals its definition in float64, outputs and gradients, for every normalizer, shape and mask."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attnorm
from attnorm.engines import blocked as blocked_engine
from attnorm.engines import inputs as engine_inputs
from tests.attention import reference
from tests.attention.calls import CALLS, Call, assert_all_close, calling, learned, outputs_and_gradients
from tests.attention.reference import CASES, HEADS, TYPICAL, Case

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)


def in_halves(first: int) -> pytest.MarkDecorator:
    """Every second typical case from the first; the others at night."""
    often = TYPICAL[first::2]
    cases = [case if case in often else pytest.param(case, marks=pytest.mark.nightly) for case in CASES]
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.id)


def test_every_normalizer_has_a_definition_to_be_compared_with() -> None:
    rows = {name for name in attnorm.available() if isinstance(attnorm.get(name), attnorm.Normalizer)}
    assert rows <= {case.name for case in CASES}


def assert_equals_definition(case: Case, call: Call, **more: object) -> None:
    normalizer = case.make()
    tensors, parameters = call.tensors(), learned(normalizer)

    def definition(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        states = hidden if case.hidden_width else None
        return reference.attention(case, normalizer, q, k, v, **call.options, hidden_states=states)

    actual = outputs_and_gradients(calling(case, normalizer, call.options, **more), tensors, parameters)
    expected = outputs_and_gradients(definition, tensors, parameters)
    assert_all_close(actual, expected)


NAMES = list(CALLS)
# Each normalizer with a fifth of the calls, in turn; with all of them at night.
IN_TURN = [(case, name) for number, case in enumerate(CASES) for name in NAMES[number % 5 :: 5]]


@pytest.mark.parametrize(("case", "name"), IN_TURN, ids=lambda value: getattr(value, "id", value))
@pytest.mark.every_second("case")
def test_outputs_and_gradients_equal_the_definition(case: Case, name: str) -> None:
    assert_equals_definition(case, CALLS[name])


@pytest.mark.nightly
@every_case
@pytest.mark.parametrize("name", NAMES)
def test_every_normalizer_and_every_call(case: Case, name: str) -> None:
    assert_equals_definition(case, CALLS[name])


@in_halves(0)
def test_blocks_of_a_few_rows_equal_the_definition(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    name = ["padding, causal", "queries at the end"][CASES.index(case) % 2]
    call = CALLS[name]
    two_rows = call.batch * HEADS * call.keys * 2
    monkeypatch.setattr(blocked_engine, "BLOCK_ELEMENTS", two_rows)
    monkeypatch.setattr(engine_inputs, "MASK_ELEMENTS", 2 * call.keys)
    assert_equals_definition(case, call)


@in_halves(1)
def test_the_blocked_engine_equals_the_definition_where_it_is_not_the_first_choice(case: Case) -> None:
    assert_equals_definition(case, CALLS["padding, causal"], engine="blocked")


sizes = st.integers(1, 7)


@st.composite
def calls(draw: st.DrawFn) -> Call:
    batch, queries, keys = draw(st.integers(1, 3)), draw(sizes), draw(sizes)
    options: dict[str, object] = {"causal": draw(st.booleans())}
    if draw(st.booleans()):
        full = (batch, HEADS, queries, keys)
        shape = [draw(st.sampled_from([1, size])) for size in full][draw(st.integers(0, 3)) :]
        seed = draw(st.integers(0, 100))
        options["mask"] = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.7
    return Call(batch, draw(st.sampled_from([1, 2, 4])), queries, keys, draw(sizes), draw(sizes), options)


@settings(max_examples=30)
@given(case=st.sampled_from(CASES), call=calls(), rows=st.integers(1, 3))
def test_any_shape_and_mask_in_any_blocks(case: Case, call: Call, rows: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocked_engine, "BLOCK_ELEMENTS", call.batch * HEADS * call.keys * rows)
        patch.setattr(engine_inputs, "MASK_ELEMENTS", call.keys * rows)
        assert_equals_definition(case, call)
