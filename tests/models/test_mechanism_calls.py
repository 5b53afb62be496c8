"""What a patched attention module passes to a mechanism, and the calls that it refuses."""

from typing import Any

import pytest
import torch
from torch import Tensor

from attnorm.engines.inputs import Inputs
from attnorm.mechanisms.differential import SecondQueries
from attnorm.mechanisms.forget import KeyGates
from attnorm.models.patched_attention import _compute_weights, _run_mechanism, _to_common_dtype
from attnorm.normalizers import get


class Kept:
    """A mechanism that keeps its arguments."""

    name = "kept"
    reads_hidden_states = needs_every_query = False

    def __init__(self, **changes: Any) -> None:
        vars(self).update(changes)
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, *arguments: Any, **options: Any) -> Tensor:
        self.calls.append((arguments, options))
        return torch.zeros(1)

    attend = __call__


def inputs(mask: Tensor | None = None, queries: int = 3) -> Inputs:
    q, k = torch.randn(2, 4, queries, 5), torch.randn(2, 2, 3, 5)
    return Inputs(q, k, k + 1, mask, causal=True, scale=0.3)


@pytest.mark.parametrize(
    ("softcap", "bias", "named"),
    [
        (2.0, None, "softcap"),
        (2.0, torch.ones(1), "softcap"),
        (None, torch.tensor([0.0, 1.0]), "bias"),
        (None, torch.zeros(2), None),
        (None, None, None),
    ],
)
def test_a_mechanism_has_no_logits_to_cap_or_to_add_to(
    softcap: float | None, bias: Tensor | None, named: str | None
) -> None:
    mechanism = Kept()
    if named is None:
        _run_mechanism(mechanism, inputs(), softcap, bias, None)
        assert len(mechanism.calls) == 1
        return
    with pytest.raises(ValueError, match=f"'kept'.*{named}"):
        _run_mechanism(mechanism, inputs(), softcap, bias, None)


def test_a_mechanism_that_needs_every_earlier_query_is_refused_without_them() -> None:
    _run_mechanism(Kept(needs_every_query=True), inputs(), None, None, None)
    _run_mechanism(Kept(), inputs(queries=2), None, None, None)
    with pytest.raises(ValueError, match=r"'kept'.*2.*3"):
        _run_mechanism(Kept(needs_every_query=True), inputs(queries=2), None, None, None)


@pytest.mark.parametrize("kind", ["none", "padding in every row", "one row", "rows that differ"])
def test_equal_rows_of_a_mask_are_padding(kind: str) -> None:
    padding = torch.tensor([[True, True, False], [True, False, False]])[:, None, None]
    rows = {
        "none": None,
        "padding in every row": padding.expand(2, 1, 3, 3),
        "one row": padding,
        "rows that differ": torch.ones(3, 3, dtype=torch.bool).tril()[None, None],
    }
    mechanism, given = Kept(), inputs(rows[kind])
    _run_mechanism(mechanism, given, None, None, None)
    ((arguments, options),) = mechanism.calls
    assert all(one is other for one, other in zip(arguments, (given.q_BHQD, given.k_BGKD, given.v_BGKE), strict=True))
    mask = options.pop("mask")
    assert options == {"causal": True, "scale": 0.3}
    if kind == "none":
        assert mask is None
    elif kind == "rows that differ":
        assert torch.equal(mask, rows[kind])
    else:
        assert torch.equal(mask, padding)


def test_second_queries_follow_the_first_of_each_head() -> None:
    mechanism, given = Kept(), inputs()
    read = SecondQueries(given.q_BHQD + 10, torch.randn(2, 3, 20))
    _run_mechanism(mechanism, given, None, None, read)
    (((paired, *_), options),) = mechanism.calls
    assert paired.shape == (2, 8, 3, 5)
    assert torch.equal(paired[:, 0::2], given.q_BHQD)
    assert torch.equal(paired[:, 1::2], given.q_BHQD + 10)
    assert options["hidden_states"] is read.hidden_states


def test_gates_of_keys_that_nothing_sees_are_left_out() -> None:
    mechanism, gates = Kept(), torch.randn(2, 4, 7)
    _run_mechanism(mechanism, inputs(), None, None, KeyGates(gates))
    ((_, options),) = mechanism.calls
    assert torch.equal(options["log_gates"], gates[..., :3])


def test_weights_are_those_of_every_key_without_dropout() -> None:
    q, k = torch.randn(2, 4, 3, 5), torch.randn(2, 2, 3, 5)
    found = _compute_weights(
        Inputs(q, k, torch.randn(2, 2, 3, 7), None, causal=False, scale=0.3, dropout=0.9), get("softmax")
    )
    expected = (0.3 * q @ k.repeat_interleave(2, 1).mT).softmax(-1)
    torch.testing.assert_close(found, expected)


def test_all_states_take_the_dtype_of_the_values() -> None:
    """Rotary embeddings leave queries and keys in float32."""
    q, k, v = (torch.ones(2, dtype=dtype) for dtype in (torch.float32, torch.float32, torch.float16))
    assert [t.dtype for t in _to_common_dtype(q, k, v)] == [torch.float16] * 3
    assert [t.dtype for t in _to_common_dtype(v, v, q)] == [torch.float32] * 3
    with torch.autocast("cpu", torch.bfloat16):
        assert [t.dtype for t in _to_common_dtype(q, k, v)] == [torch.bfloat16] * 3
