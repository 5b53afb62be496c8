"""Few queries by maps that search every row first, against the blocks in float64, on a GPU or in the interpreter."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import attnorm
from attnorm.engines import decoding
from attnorm.engines.execution import known_calls
from attnorm.engines.inputs import Inputs, validate_inputs
from attnorm.normalizers.contract import Normalizer
from tests.attention.kernel_calls import DEVICE, HALF, draw, mask_of

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")

MAPS: dict[str, dict[str, Any]] = {
    "entmax15": {},
    "sparsemax": {},
    "kneemax": {},
    "entmax": {"alpha": 1.3},
    "asentmax": {},
    "topk": {"k": 7},
    "sa_softmax": {},
    "stick_breaking": {},
    "adaptive_temperature": {},
    "norm_softmax": {},
    "topk by a rule": {"k": "sqrt"},
    "kneemax by length": {"share": 3.0},
    "stick_breaking of the rest": {"attend_current": False},
    "adaptive_temperature that never falls": {"monotone": True},
}
# batch, heads, key heads, queries, keys, width, width of the values; mask
CALLS = [
    ((1, 2, 1, 1, 520, 24, 40), "none"),
    ((1, 4, 1, 3, 300, 192, 256), "heads"),
    ((2, 1, 1, 5, 63, 16, 17), "padding"),
    ((1, 2, 2, 15, 100, 8, 16), "rows"),
    ((1, 2, 2, 1, 5000, 16, 16), "none"),  # more than a chunk
]
ONE, SOME = CALLS[0][0], CALLS[1][0]
SOME_OFTEN = [
    pytest.param(name, *call, marks=() if (number - other) % len(CALLS) == 0 else pytest.mark.nightly)
    for number, name in enumerate(MAPS)
    for other, call in enumerate(CALLS)
]
FLOAT32 = 2e-6


def often(*names: str) -> list[Any]:
    """All maps, the others at night."""
    return [name if name in names else pytest.param(name, marks=pytest.mark.nightly) for name in MAPS]


def make(name: str) -> Normalizer:
    normalizer = attnorm.get(name.split()[0], **MAPS[name]).to(DEVICE)
    assert isinstance(normalizer, Normalizer)
    return normalizer


def assert_as_exact_as_blocks(tensors: list[Tensor], normalizer: Normalizer, **options: Any) -> None:
    """The error is at most twice that of the blocks, and a few roundings."""
    options = {"causal": True, **options}
    with torch.no_grad():
        found = attnorm.attention(*tensors, normalizer, engine="triton", **options)
        naive = attnorm.attention(*tensors, normalizer, engine="blocked", **options)
        exact = attnorm.attention(*(t.double() for t in tensors), normalizer, engine="blocked", **options)
    assert found.dtype == tensors[0].dtype
    few = FLOAT32 if found.dtype == torch.float32 else 2 * torch.finfo(found.dtype).eps
    assert (found.double() - exact).norm() <= 2 * (naive.double() - exact).norm() + few * exact.norm()


def drawn(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, spread: float = 2.0) -> list[Tensor]:
    return [t.detach() for t in draw(shape, dtype, spread)]


@pytest.mark.parametrize(("name", "shape", "mask"), SOME_OFTEN)
def test_outputs(name: str, shape: tuple[int, ...], mask: str) -> None:
    assert_as_exact_as_blocks(drawn(shape), make(name), mask=mask_of(mask, shape))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", often("sa_softmax", "kneemax"))
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    assert_as_exact_as_blocks(drawn(ONE, dtype), make(name))


@pytest.mark.parametrize("name", often("sa_softmax"))
def test_one_key(name: str) -> None:
    assert_as_exact_as_blocks(drawn((1, 1, 1, 1, 1, 16, 16)), make(name))


@pytest.mark.parametrize("name", often("entmax15"))
def test_equal_logits(name: str) -> None:
    """Every key is listed, and has a small weight."""
    q, k, v = drawn((1, 1, 1, 1, 5000, 16, 16))
    assert_as_exact_as_blocks([0 * q, k, v], make(name))


@pytest.mark.parametrize("name", often("entmax", "topk"))
def test_large_logits(name: str) -> None:
    """Up to 1e4, from products without rounding errors."""
    q, k, v = drawn((1, 2, 1, 1, 300, 16, 16))
    assert_as_exact_as_blocks([1250 * q.sign(), k.round(), v], make(name))


def test_flat_rows_are_sharpened_as_much_as_any() -> None:
    """Their entropy of 6.25 lies beyond the last turning point of beta."""
    assert_as_exact_as_blocks(drawn(ONE, spread=0.1), make("adaptive_temperature that never falls"))


def test_the_rest_of_the_stick_is_lost_if_the_current_key_is_hidden() -> None:
    mask = torch.tensor([[True, True, True], [True, False, True], [True, True, True]], device=DEVICE)
    assert_as_exact_as_blocks(drawn((1, 1, 1, 3, 3, 16, 16)), make("stick_breaking of the rest"), mask=mask)


def test_float16_keeps_small_weights() -> None:
    """300 keys of weight 2e-7, between two numbers of float16 that differ by a third, beside one without a value."""
    q, k, v = (torch.zeros(1, 1, length, 16, dtype=torch.float16, device=DEVICE) for length in (1, 301, 301))
    q[..., 0], k[..., 0, 0], v[..., 1:, :] = 4, 15.5, 64
    assert_as_exact_as_blocks([q, k, v], attnorm.get("topk", k=301))


@pytest.mark.parametrize(
    "parts",
    [
        {"select": [("local", {"window": 130}), ("topk", {"k": 5})], "sink": "softmax1"},
        {"map": "entmax15", "select": [("local", {"window": 130})]},
        {"map": "sparsemax", "scale": [("softcap", {"cap": 3.0})]},
        {"map": "stick_breaking", "scale": [("alibi", {"heads": 4})]},
        {"scale": [("ssmax", {}), ("adaptive_temperature", {})], "select": [("topk", {"k": 9})]},
    ],
    ids=lambda parts: "-".join(str(part) for part in parts),
)
def test_compositions(parts: dict[str, Any]) -> None:
    made = {
        key: [attnorm.get(name, **options) for name, options in value] if isinstance(value, list) else value
        for key, value in parts.items()
    }
    assert_as_exact_as_blocks(drawn(SOME), attnorm.compose(**made).to(DEVICE))


def test_keys_tied_with_the_last_of_the_top_are_kept() -> None:
    q, k, v = drawn((1, 1, 1, 1, 300, 16, 16))
    k[..., 150:, :] = k[..., :150, :]
    assert_as_exact_as_blocks([q, k, v], attnorm.get("topk", k=3))


@pytest.mark.parametrize("name", ["entmax15", "topk", "sa_softmax", "stick_breaking"])
def test_a_row_that_sees_nothing_is_zero_and_a_nan_stays_one(name: str) -> None:
    tensors, normalizer = drawn((1, 1, 1, 3, 70, 16, 16)), make(name)
    mask = torch.ones(1, 1, 3, 70, dtype=torch.bool, device=DEVICE)
    mask[..., 1, :] = False
    mask[..., 60:] = False
    for t in tensors[1:]:
        t[..., 65, :] = torch.nan
    with torch.no_grad():
        output = attnorm.attention(*tensors, normalizer, mask=mask, engine="triton")
        assert output.isfinite().all()
        assert (output[..., 1, :] == 0).all()
        tensors[1][..., 30, :] = torch.nan
        output = attnorm.attention(*tensors, normalizer, mask=mask, engine="triton")
        assert output[..., [0, 2], :].isnan().all()


def test_tensors_in_the_layouts_of_models() -> None:
    q, k, v = drawn((2, 2, 2, 1, 90, 16, 16))
    heads_inside = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    columns_first = v.transpose(-1, -2).contiguous().transpose(-1, -2)
    normalizer = make("entmax15")
    with torch.no_grad():
        expected = attnorm.attention(q, k, v, normalizer, engine="triton")
        assert torch.equal(attnorm.attention(*heads_inside, normalizer, engine="triton"), expected)
        assert torch.equal(attnorm.attention(q, k, columns_first, normalizer, engine="triton"), expected)


@pytest.mark.parametrize(
    ("name", "options", "masked"),
    [
        ("asentmax", {"heads": 6}, "none"),  # the kernels read a number per head
        ("topk", {"k": "sqrt"}, "heads"),
        ("entmax", {"alpha": 1.3, "learned": True}, "heads"),
    ],
)
def test_logits_of_more_rows_than_fit_take_the_memory_of_a_few(
    name: str, options: dict[str, Any], masked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three sequences, three key heads, of which one is processed at a time: the same as all at once."""
    from attnorm.kernels import decoding as kernels

    shape = (3, 6, 3, 1, 40, 16, 16)
    tensors, mask, sizes = drawn(shape), mask_of(masked, shape), []
    normalizer, run = attnorm.get(name, **options).to(DEVICE), kernels.decode

    def decode(q: Tensor, k: Tensor, *others: Any, **named: Any) -> Tensor:
        sizes.append((*q.shape[:2], *k.shape[:2]))
        return run(q, k, *others, **named)

    monkeypatch.setattr(kernels, "decode", decode)
    with torch.no_grad():
        for number, parameter in enumerate(normalizer.parameters()):
            parameter += torch.linspace(0.1, 0.4 + number, max(1, parameter.numel())).to(DEVICE).view(parameter.shape)
        expected = attnorm.attention(*tensors, normalizer, mask=mask, causal=True, engine="triton")
        known_calls.forget()
        monkeypatch.setattr(decoding, "MAX_LOGIT_BYTES", decoding.LOGIT_BYTES * 2 * 40)
        found = attnorm.attention(*tensors, normalizer, mask=mask, causal=True, engine="triton")
    assert sizes == [(3, 6, 3, 3), *[(1, 2, 1, 1)] * 9]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_an_error_says_that_only_the_gradient_is_missing() -> None:
    q, k, v = drawn((1, 1, 1, 1, 40, 16, 16))
    with pytest.raises(ValueError, match="with gradients"):
        attnorm.attention(q.requires_grad_(), k, v, make("entmax15"), engine="triton")


@pytest.mark.nightly
def test_a_compiled_call_is_one_graph() -> None:
    tensors, normalizer = drawn((1, 2, 2, 1, 70, 16, 16)), attnorm.get("entmax15")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attnorm.attention(q, k, v, normalizer, causal=True, engine="triton")

    with torch.no_grad():
        compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(*tensors), attend(*tensors))


def test_the_operator_is_described_to_the_compiler() -> None:
    q, k, v = drawn((1, 2, 1, 2, 70, 16, 24))
    options = ("none", None, True, None, 0.25, 0.0, 0.0, "top", [], [], 3)
    utilities = ("test_schema", "test_faketensor")
    operator = torch.ops.attnorm.decode_from_logits.default
    torch.library.opcheck(operator, (q, k, v, *[None] * 9, *options), test_utils=utilities)


def test_what_is_searched() -> None:
    def call(shape: tuple[int, ...] = ONE, positions: Tensor | None = None) -> Inputs:
        return validate_inputs(*drawn(shape), mask=None, causal=True, scale=None, positions=positions)

    def applies(inputs: Inputs, normalizer: Any) -> bool:
        return decoding.applies(inputs, normalizer)

    one = attnorm.get("asentmax")
    assert not applies(call(), one), "its parameters need gradients"
    with torch.no_grad():
        assert applies(call(), one)
        assert not applies(call(), attnorm.get("softmax")), "one pass is enough"
        assert applies(call((1, 8, 1, 15, 100, 8, 8)), one)
        assert not applies(call((1, 9, 1, 15, 100, 8, 8)), one), "too many rows for a tile"
        assert not applies(call((1, 1, 1, 16, 100, 8, 8)), one), "enough queries for a tile of their own"
        assert not applies(replace(call(), dropout=0.1), one)
        assert not applies(replace(call(), bias=torch.zeros(1, 1, 1, 520, device=DEVICE)), one)
        positions = torch.tensor([600], device=DEVICE)
        assert applies(call(positions=positions), make("stick_breaking"))
        assert not applies(call(positions=positions), make("stick_breaking of the rest")), "another current key"
        window = attnorm.get("local", window=30)
        assert not applies(call(), attnorm.compose(scale="adaptive_temperature", select=window)), "entropy of all keys"
        assert not applies(call(), attnorm.compose(map=attnorm.get("kneemax", share=2.0), select=window)), "counts keys"
