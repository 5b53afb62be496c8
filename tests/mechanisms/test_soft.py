"""SOFT: the Gaussian kernel through landmarks, by a Newton inverse that is the inverse, also in its derivative."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

import attnorm
from attnorm.engines import blocked as blocked_engine
from attnorm.mechanisms import linear
from attnorm.mechanisms.soft import RIDGE, Soft, gaussian_logits, newton_inverse, segment_means, square_means
from tests.attention.calls import Call, assert_all_close, outputs_and_gradients
from tests.attention.reference import HEADS
from tests.mechanisms import reference

WIDE = Call(key_heads=2, queries=9, keys=12, width=8, value_width=3)


def apart(call: Call = WIDE) -> list[Tensor]:
    """q, k, v whose keys are far enough from each other for a well-conditioned kernel."""
    q, k, v, _ = call.tensors()
    return [2 * q, 2 * k, v]


def kernel_matrix(size: int = 9, spread: float = 1.5) -> Tensor:
    points = spread * torch.randn(3, size, 8, dtype=torch.float64)
    return torch.exp(gaussian_logits(points, points, 8**-0.5))


def ridge(a: Tensor) -> Tensor:
    return a + RIDGE * torch.eye(a.shape[-1], dtype=a.dtype)


def inverse_of(a: Tensor) -> Tensor:
    return torch.linalg.inv(ridge(a))


@pytest.mark.parametrize("spread", [0.0, 0.1, 0.3, 1.5])
def test_newton_equals_the_inverse_and_its_derivative(spread: float) -> None:
    """Also where landmarks crowd around their mean, as means of many tokens do."""
    a = kernel_matrix(49, spread)
    assert_all_close(outputs_and_gradients(newton_inverse, [a]), outputs_and_gradients(inverse_of, [a]), atol=1e-8)


@settings(max_examples=40)
@given(size=st.integers(1, 12), spread=st.floats(0.0, 4.0), copies=st.integers(1, 3))
def test_newton_takes_landmarks_that_coincide(size: int, spread: float, copies: int) -> None:
    points = (spread * torch.randn(size, 4, dtype=torch.float64)).repeat(copies, 1)
    a = torch.exp(gaussian_logits(points, points, 0.5))
    torch.testing.assert_close(newton_inverse(a), inverse_of(a), atol=1e-6, rtol=0)


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (1, None, 0), (None, 1, None), (None, None, 0)])
def test_vmap_equals_a_loop(in_dims: tuple[int | None, ...]) -> None:
    """With gradients; in the last case all items share the landmarks, whose inverse is not mapped."""
    several = [torch.stack([t, 1.1 * t, t.flip(-2)]) for t in apart()]
    given = [t[0] if dim is None else t.movedim(0, dim) for t, dim in zip(several, in_dims, strict=True)]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attnorm.attention(q, k, v, "soft:landmarks=4")

    def gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return torch.func.grad(lambda *tensors: attend(*tensors).square().sum(), argnums=(0, 1, 2))(q, k, v)

    items = [
        [t if dim is None else t.select(dim, item) for t, dim in zip(given, in_dims, strict=True)] for item in range(3)
    ]
    for function in (lambda *tensors: (attend(*tensors),), gradients):
        expected = [torch.stack(one) for one in zip(*(function(*item) for item in items), strict=True)]
        assert_all_close(torch.func.vmap(function, in_dims)(*given), expected, atol=1e-10)


@pytest.mark.parametrize("spread", [0.0, 0.05, 0.3, 1.5])
@pytest.mark.parametrize("count", [9, 49, 256])
def test_newton_in_single_precision_is_as_good_as_the_direct_inverse(count: int, spread: float) -> None:
    a = kernel_matrix(count, spread)
    ours, direct = (
        (ridge(a) @ inverse.double() - torch.eye(count, dtype=torch.float64)).abs().max()
        for inverse in (newton_inverse(a.float()), inverse_of(a.float()))
    )
    assert ours <= 4 * direct + 1e-6


@pytest.mark.parametrize("normalised", [False, True], ids=["soft", "soft++"])
def test_landmarks_in_pairs_give_finite_outputs(normalised: bool) -> None:
    x = torch.zeros(1, 1, 4, 8, requires_grad=True)
    moved = x + torch.tensor([0.0, 0.0, 100.0, 100.0])[:, None]
    output = attnorm.attention(moved, moved, moved, Soft(4, normalised=normalised))
    output.sum().backward()
    assert output.isfinite().all()
    assert x.grad is not None
    assert x.grad.isfinite().all()


MASKS: dict[str, Tensor] = {
    "every key": torch.ones(1, 1, 1, 12, dtype=torch.bool),
    "padding": torch.tensor([[False] * 4 + [True] * 8, [True] * 8 + [False] * 4])[:, None, None],
    "a mask per head": torch.stack([torch.arange(12).roll(h) < 8 for h in range(HEADS)])[None, :, None],
}


@pytest.mark.parametrize("normalised", [False, True], ids=["soft", "soft++"])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("count", [1, 4])
def test_outputs_and_gradients_equal_the_definition(normalised: bool, name: str, count: int) -> None:
    """12 keys, or 8 visible ones, in segments of equal size."""
    mask = MASKS[name].expand(2, HEADS, 1, 12)

    def definition(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (t.repeat_interleave(HEADS // t.shape[1], dim=1) for t in (k, v))
        visible = mask.transpose(-1, -2)
        kept = k[visible.expand_as(k)].reshape(2, HEADS, -1, 8)
        landmarks = kept.unflatten(2, (count, -1)).mean(3)
        return reference.soft(q, k, v, landmarks, visible, normalised)

    tensors = apart()
    soft = Soft(count, normalised=normalised)
    options = {} if name == "every key" else {"mask": MASKS[name]}
    assert_all_close(
        outputs_and_gradients(lambda q, k, v: attnorm.attention(q, k, v, soft, **options), tensors),
        outputs_and_gradients(definition, tensors),
        atol=1e-8,
    )


def test_landmarks_of_ones_own() -> None:
    chosen = torch.randn(1, HEADS, 5, 8, dtype=torch.float64).mul(2).expand(2, -1, -1, -1)
    tensors = apart()

    def definition(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (t.repeat_interleave(HEADS // t.shape[1], dim=1) for t in (k, v))
        return reference.soft(q, k, v, chosen, torch.ones(1), normalised=False)

    soft = Soft(lambda keys: chosen)
    assert_all_close(
        outputs_and_gradients(lambda q, k, v: attnorm.attention(q, k, v, soft), tensors),
        outputs_and_gradients(definition, tensors),
        atol=1e-8,
    )


@pytest.mark.parametrize("spread", [1.0, 2.0, 3.0])
def test_with_every_token_a_landmark_only_the_ridge_separates_soft_from_the_gaussian(spread: float) -> None:
    """(A + r)^-1 A differs from 1 by r / (eigenvalue + r): about 1 % where the tokens lie apart."""
    x = spread * torch.randn(1, 2, 20, 16, dtype=torch.float64)
    v = torch.randn(1, 2, 20, 3, dtype=torch.float64)
    exact, low_rank = (attnorm.attention(x, x, v, m) for m in ("gaussian", Soft(20)))
    assert (low_rank - exact).norm() / exact.norm() < 1.1 * RIDGE
    kernel = torch.exp(gaussian_logits(x, x, 16**-0.5))
    smoothed = kernel @ torch.linalg.solve(ridge(kernel), kernel @ v)
    torch.testing.assert_close(low_rank, smoothed, atol=1e-8, rtol=0)


@pytest.mark.parametrize("normalised", [False, True], ids=["soft", "soft++"])
@pytest.mark.parametrize("heads", [None, HEADS])
@pytest.mark.parametrize(("queries", "keys", "chunk"), [(12, 12, 5), (12, 12, 128), (3, 12, 2), (12, 9, 4)])
def test_learned_landmarks_are_causal_and_equal_the_masked_matrix(
    normalised: bool, heads: int | None, queries: int, keys: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "CHUNK", chunk)
    monkeypatch.setattr(linear, "_chunks_at_once", lambda q: 2)
    tensors = apart(Call(key_heads=2, queries=queries, keys=keys, width=8, value_width=3))
    soft = Soft(5, normalised=normalised, learned=8, heads=heads).double()
    assert soft.points is not None
    points = soft.points.detach().expand(HEADS, 5, 8)[None]
    visible = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)

    def definition(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (t.repeat_interleave(HEADS // t.shape[1], dim=1) for t in (k, v))
        identity = torch.eye(keys, dtype=torch.float64).expand(*k.shape[:-2], keys, keys)
        return (reference.soft(q, k, identity, points, torch.ones(1), normalised) * visible) @ v

    assert_all_close(
        outputs_and_gradients(lambda q, k, v: attnorm.attention(q, k, v, soft, causal=True), tensors),
        outputs_and_gradients(definition, tensors),
        atol=1e-8,
    )
    mask = torch.arange(keys)[None, None, None] > 0
    q, k, v = tensors
    hidden = attnorm.attention(q, k[..., 1:, :], v[..., 1:, :], soft, causal=True)
    torch.testing.assert_close(attnorm.attention(q, k, v, soft, causal=True, mask=mask), hidden, atol=1e-12, rtol=0)


@pytest.mark.parametrize("normalised", [False, True], ids=["soft", "soft++"])
@pytest.mark.parametrize("rows", [2, 9], ids=["blocks", "one block"])
def test_learned_landmarks_take_any_mask(normalised: bool, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models fold causality and padding into one mask per query."""
    q, k, v = apart(Call(key_heads=2, queries=9, keys=12, width=8, value_width=3))
    monkeypatch.setattr(blocked_engine, "BLOCK_ELEMENTS", rows * 12 * q.shape[0] * HEADS)
    mask = torch.rand(q.shape[0], 1, 9, 12, generator=torch.Generator().manual_seed(0)) > 0.4
    mask[0, 0, 3] = False
    soft = Soft(5, normalised=normalised, learned=8, heads=HEADS).double()
    points = soft.points
    assert points is not None

    def definition(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (t.repeat_interleave(HEADS // t.shape[1], dim=1) for t in (k, v))
        identity = torch.eye(12, dtype=torch.float64).expand(*k.shape[:-2], 12, 12)
        assert points is not None
        return (reference.soft(q, k, identity, points[None], torch.ones(1), normalised) * mask) @ v

    assert_all_close(
        outputs_and_gradients(lambda q, k, v: attnorm.attention(q, k, v, soft, mask=mask), [q, k, v], [points]),
        outputs_and_gradients(definition, [q, k, v], [points]),
        atol=1e-8,
    )


def test_landmarks_that_pool_all_tokens_show_later_tokens_even_below_a_causal_mask() -> None:
    """Proposition 1 of docs/theory/causal-soft.md: one landmark, and rows of the lower triangle alone."""
    x = torch.tensor([0.0, 1.0], dtype=torch.float64)[:, None].requires_grad_()
    landmark = x.mean(0, keepdim=True)
    kernel = torch.exp(gaussian_logits(x, landmark, 1.0))
    first = (kernel @ kernel.T)[0, 0] / (1 + RIDGE)  # row 1 sees token 1 alone
    (gradient,) = torch.autograd.grad(first, x)
    assert gradient[1].abs() > 0.1
    learned = Soft(1, learned=1).double()
    tokens = x.detach().requires_grad_()
    output = attnorm.attention(*(tokens[None, None],) * 3, learned, causal=True)[0, 0, 0]
    (gradient,) = torch.autograd.grad(output.sum() + 0 * tokens.sum(), tokens)
    assert gradient[1] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learned": 0}, "learned.*0"),
        ({"learned": 8, "stride": 2}, "learned=8"),
        ({"landmarks": lambda keys: keys, "learned": 8}, "learned=8"),
        ({"heads": 2}, "learned=.*heads=2"),
    ],
)
def test_learned_landmarks_are_not_computed(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Soft(**options)


def test_learned_landmarks_have_the_width_and_the_heads_of_the_layer() -> None:
    q, k, v = apart()
    wrong: list[tuple[dict[str, int], str]] = [
        ({"learned": 4}, "learned=4"),
        ({"learned": 8, "heads": HEADS + 1}, f"learned=8, heads={HEADS + 1}"),
    ]
    for options, shown in wrong:
        with pytest.raises(ValueError, match=rf"learned=8.*heads={HEADS}.*got {shown}\."):
            attnorm.attention(q, k, v, Soft(**options).double(), causal=True)


@pytest.mark.nightly
@pytest.mark.parametrize("causal", [False, True])
def test_a_compiled_vmap_over_learned_landmarks_works_without_their_gradient(
    causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(newton_inverse, "__defaults__", (2,))  # each step is traced
    several = [torch.stack([t, 1.1 * t]) for t in apart(Call(queries=9, keys=9, width=8))]
    soft = Soft(5, learned=8).double().requires_grad_(False)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return soft(q, k, v, causal=causal)

    expected = torch.stack([attend(*item) for item in zip(*several, strict=True)])
    compiled = torch.compile(torch.func.vmap(attend), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*several), expected)


def test_one_sequence_does_not_change_another() -> None:
    q, k, v = apart(Call(queries=12, keys=12, width=8))
    q, k = (t * torch.tensor([0.05, 1.0])[:, None, None, None] for t in (q, k))
    for normalised in (False, True):
        soft = Soft(6, normalised=normalised)
        together = attnorm.attention(q, k, v, soft)
        alone = torch.cat([attnorm.attention(q[b : b + 1], k[b : b + 1], v[b : b + 1], soft) for b in range(2)])
        torch.testing.assert_close(together, alone, atol=1e-12, rtol=0)


@pytest.mark.parametrize("normalised", [False, True], ids=["soft", "soft++"])
def test_hidden_keys_have_no_influence_and_empty_rows_are_zeros(normalised: bool) -> None:
    soft = Soft(3, normalised=normalised)
    mask = torch.zeros(2, 1, 1, 12, dtype=torch.bool)
    mask[0, ..., 3:] = True
    q, k, v = apart()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attnorm.attention(q, k, v, soft, mask=mask)

    expected = outputs_and_gradients(attend, [q, k, v])
    hidden = ~mask[:, 0, 0, :, None]
    k, v = (t.masked_fill(hidden[:, None], float("nan")) for t in (k, v))
    actual = outputs_and_gradients(attend, [q, k, v])
    assert_all_close(actual, expected, atol=1e-12)
    assert actual[0][1].eq(0).all()
    assert all(gradient.masked_select(hidden[:, None]).eq(0).all() for gradient in actual[2:])


def test_padding_equals_no_padding() -> None:
    q, k, v = apart()
    padded = [torch.cat([t[..., :5, :], t, t[..., :2, :]], dim=-2) for t in (k, v)]
    mask = torch.tensor([False] * 5 + [True] * 12 + [False] * 2)
    soft = Soft(5)
    torch.testing.assert_close(
        attnorm.attention(q, *padded, soft, mask=mask), attnorm.attention(q, k, v, soft), atol=1e-12, rtol=0
    )


@settings(max_examples=40)
@given(count=st.integers(1, 9), hidden=st.integers(0, 2**7 - 1))
def test_every_visible_key_belongs_to_one_segment_of_nearly_equal_size(count: int, hidden: int) -> None:
    visible = torch.tensor([hidden >> j & 1 == 0 for j in range(7)])
    keys = torch.eye(7, dtype=torch.float64)[None, None]
    means = segment_means(keys, visible[None, None, :, None], count)[0, 0]
    assert means.shape == (count, 7)
    assert means[:, ~visible].eq(0).all()
    n = int(visible.sum())
    if n >= count:
        sizes = (means > 0).sum(-1)
        assert int(sizes.sum()) == n
        assert sizes.max() - sizes.min() <= 1
    if n:
        torch.testing.assert_close(means.sum(-1), torch.ones(count, dtype=torch.float64))


@pytest.mark.parametrize(("side", "squares"), [(8, 7), (16, 7), (32, 7), (6, 3), (5, 5), (3, 1)])
def test_means_of_squares_are_those_of_torchs_pooling(side: int, squares: int) -> None:
    patches = torch.randn(2, 3, side**2, 4, dtype=torch.float64, requires_grad=True)
    grid = patches.transpose(-1, -2).unflatten(-1, (side, side)).flatten(0, 1)
    pooled = adaptive_avg_pool2d(grid, squares).flatten(-2).transpose(-1, -2).unflatten(0, (2, 3))
    found = square_means(patches, squares)
    probe = torch.randn_like(found)
    torch.testing.assert_close(found, pooled)
    torch.testing.assert_close(*(torch.autograd.grad(means, patches, probe) for means in (found, pooled)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("normalised", [False, True], ids=["soft", "soft++"])
def test_low_precision_inputs_lose_only_their_own_rounding(dtype: torch.dtype, normalised: bool) -> None:
    q, k, v = (t.to(dtype) for t in apart())
    soft = Soft(4, normalised=normalised)
    exact = attnorm.attention(q.double(), k.double(), v.double(), soft)
    with torch.autocast("cpu", torch.bfloat16):
        output = attnorm.attention(q, k, v, soft)
    assert output.dtype == dtype
    assert (output - exact).abs().max() <= 4 * torch.finfo(dtype).eps * max(1.0, exact.abs().max().item())


def test_an_empty_batch_gives_an_empty_output() -> None:
    q, k, v = apart(Call(batch=0))
    assert attnorm.attention(q, k, v, Soft(3, normalised=True)).shape == (0, HEADS, 5, 4)


@pytest.mark.parametrize("token", [0, 1])
def test_landmarks_of_a_grid_are_means_or_convolutions_of_squares(token: int) -> None:
    q, k, v = (torch.randn(2, 3, 16 + token, 5, dtype=torch.float64) for _ in range(3))
    soft = Soft(stride=2, convolution=5).double()
    assert soft.sampling is not None
    torch.nn.init.normal_(soft.sampling)
    squares = [
        sum(
            soft.sampling[:, :, i, j] @ k[b, h, token + 4 * (2 * row + i) + 2 * column + j]
            for i in (0, 1)
            for j in (0, 1)
        )
        for b in range(2)
        for h in range(3)
        for row in (0, 1)
        for column in (0, 1)
    ]
    expected = torch.cat([k[..., :token, :], torch.stack(squares).view(2, 3, 4, 5)], -2)  # type: ignore[arg-type]
    by_hand = attnorm.attention(q, k, v, Soft(lambda keys: expected))
    torch.testing.assert_close(attnorm.attention(q, k, v, soft), by_hand)
    means = k[..., token:, :].unflatten(-2, (2, 2, 2, 2)).mean((-2, -4)).flatten(-3, -2)
    by_hand = attnorm.attention(q, k, v, Soft(lambda keys: torch.cat([k[..., :token, :], means], -2)))
    torch.testing.assert_close(attnorm.attention(q, k, v, Soft(stride=2)), by_hand)


@pytest.mark.parametrize(
    ("options", "keys", "message"),
    [
        ({"stride": 0}, 16, "stride.*0"),
        ({"convolution": 5}, 16, "stride=.*convolution=5"),
        ({"stride": 3}, 16, "stride=3.*16 keys"),
        ({"stride": 2}, 18, "18 keys"),
        ({"stride": 2, "convolution": 4}, 16, "convolution=5.*4"),
    ],
)
def test_squares_that_do_not_fit(options: dict[str, int], keys: int, message: str) -> None:
    k = torch.randn(1, 1, keys, 5)
    with pytest.raises(ValueError, match=message):
        attnorm.attention(k, k, k, Soft(**options))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="stride=2"):
        attnorm.attention(k, k, k, Soft(stride=2), mask=torch.ones(1, 1, 1, keys, dtype=torch.bool))


@pytest.mark.parametrize(
    ("name", "options", "causal"),
    [
        pytest.param("soft", {"landmarks": 8}, False, marks=pytest.mark.nightly),
        pytest.param("soft", {"landmarks": 8, "normalised": True}, False, marks=pytest.mark.nightly),
        pytest.param("linear", {}, False, marks=pytest.mark.nightly),
        ("linear", {}, True),
    ],
)
def test_compiled_gradients_under_autocast_have_the_digits_of_eager_ones(
    name: str, options: dict[str, Any], causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.compile traces the backward pass with autocast on: products of it would be in bfloat16."""
    monkeypatch.setattr(newton_inverse, "__defaults__", (2,))  # each step is traced, which takes longer than all else
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, 2, 24, 8, generator=generator).requires_grad_() for _ in range(3)]
    mechanism = attnorm.get(name, **options)

    def attend(*tensors: Tensor) -> Tensor:
        return mechanism(*tensors, causal=causal)

    gradients = []
    for call in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager")):
        with torch.autocast("cpu", torch.bfloat16):
            output = call(*tensors)
        gradients.append(torch.autograd.grad(output.square().sum(), tensors))
    for eager, compiled in zip(*gradients, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-4 * eager.abs().max().item())
