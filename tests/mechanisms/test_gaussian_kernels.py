"""The Gaussian kernel as dot products of longer vectors, on the one-pass kernels: against its blocks in float64."""

import pytest
import torch
from torch import Tensor, nn

import attnorm
from attnorm.engines.inputs import validate_inputs
from attnorm.mechanisms import soft
from attnorm.mechanisms.soft import Gaussian, as_dot_products
from tests.attention.kernel_calls import DEVICE, GROUPS, PAST_THE_EDGES, SMALL, SQUARE, draw, exactly, mask_of

FLOAT32 = 5e-6


def run(tensors: tuple[Tensor, ...], mechanism: Gaussian, **options: object) -> list[Tensor]:
    output = attnorm.attention(*tensors, mechanism, **options)
    probe = torch.linspace(-1, 1, output.numel(), device=DEVICE, dtype=torch.float64).reshape(output.shape)
    return [output, *torch.autograd.grad((output.double() * probe).sum(), tensors)]


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """One entry for each call that reached the kernels."""
    calls: list[object] = []
    launch = soft.one_pass.one_pass
    monkeypatch.setattr(soft.one_pass, "one_pass", lambda *given: (calls.append(given), launch(*given))[1])
    return calls


@pytest.mark.parametrize("normalised", [False, True], ids=["summed", "normalised"])
@pytest.mark.parametrize(
    ("shape", "mask", "causal"),
    [(SQUARE, "rows", True), (GROUPS, "padding", False), (PAST_THE_EDGES, "heads", True), (SMALL, "none", False)],
    ids=str,
)
def test_outputs_and_gradients_equal_the_blocks(
    shape: tuple[int, ...], mask: str, causal: bool, normalised: bool, kernel_calls: list[object]
) -> None:
    tensors = draw(shape, spread=0.5)
    options = {"mask": mask_of(mask, shape), "causal": causal}
    found = run(tensors, Gaussian(normalised=normalised), **options)
    assert kernel_calls
    expected = run(exactly(tensors), Gaussian(normalised=normalised), **options)
    assert len(kernel_calls) == 1  # float64 stays in blocks
    for ours, exact in zip(found, expected, strict=True):
        assert (ours.double() - exact).norm() <= FLOAT32 * exact.norm()


def test_an_offset_of_all_points_costs_no_precision(kernel_calls: list[object]) -> None:
    """Steps of 1/64 survive the offset exactly, so that only the kernel can lose digits."""
    q, k, v = ((64 * t.detach()).round() / 64 for t in draw(SMALL, spread=0.5))
    expected = attnorm.attention(q.double(), k.double(), v.double(), "gaussian")
    found = attnorm.attention(q + 1000, k + 1000, v, "gaussian")
    assert kernel_calls
    assert (found - expected).abs().max() < FLOAT32 * expected.abs().max()


def test_hidden_keys_that_are_not_numbers_reach_nothing(kernel_calls: list[object]) -> None:
    q, k, v = (t.detach() for t in draw(SMALL))
    mask = torch.ones(20, dtype=torch.bool, device=DEVICE)
    mask[[0, 7, 19]] = False
    expected = run(tuple(t.requires_grad_() for t in (q, k, v)), Gaussian(), mask=mask)
    k, v = (torch.where(mask[:, None], t, float("nan")).detach().requires_grad_() for t in (k, v))
    found = run((q, k, v), Gaussian(), mask=mask)
    assert len(kernel_calls) == 2
    for ours, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("normalised", [False, True], ids=["summed", "normalised"])
def test_a_first_key_that_is_not_a_number_breaks_the_rows_that_see_it_and_no_others(
    normalised: bool, kernel_calls: list[object]
) -> None:
    q, k, v = (t.detach() for t in draw(SMALL))
    k[:, :, 0] = torch.nan
    mask = torch.ones(20, 20, dtype=torch.bool, device=DEVICE)
    mask[3:, 0] = False
    in_kernel = attnorm.attention(q, k, v, Gaussian(normalised=normalised), mask=mask)
    assert len(kernel_calls) == 1
    in_blocks = attnorm.attention(q.double(), k.double(), v.double(), Gaussian(normalised=normalised), mask=mask)
    for output in (in_kernel, in_blocks):
        assert output[:, :, :3].isnan().all()
        assert output[:, :, 3:].isfinite().all()


@pytest.mark.parametrize("normalised", [False, True], ids=["summed", "normalised"])
def test_squares_beyond_the_range_of_float16(normalised: bool) -> None:
    q, k, v = (t.detach() for t in draw(SMALL, torch.float16, spread=0.5))
    q, k = q + 200, k + 200  # of width 16: the squares are about 640,000, the largest number of float16 is 65,504
    expected = attnorm.attention(q.double(), k.double(), v.double(), Gaussian(normalised=normalised))
    found = attnorm.attention(q, k, v, Gaussian(normalised=normalised))
    assert (found - expected).abs().max() < 2e-3 * expected.abs().max()


def test_a_negative_scale_gives_the_same_in_float32_as_in_float64() -> None:
    q, k, v = (t.detach() for t in draw(SMALL, spread=0.5))
    expected = attnorm.attention(q.double(), k.double(), v.double(), "gaussian", scale=-0.1)
    found = attnorm.attention(q, k, v, "gaussian", scale=-0.1)
    assert (found - expected).abs().max() < FLOAT32 * expected.abs().max()


@pytest.mark.parametrize("offset", [0.0, 10.0])
def test_three_columns_of_bfloat16_have_the_digits_of_float32(offset: float) -> None:
    """The interpreter knows no bfloat16; its products, which are exact in float32, are computed here by torch."""
    q, k, v = (t.detach() + offset for t in draw(SMALL, torch.bfloat16, spread=0.5))
    inputs = validate_inputs(q, k, v, mask=None, causal=False, scale=None, positions=None)
    wide = as_dot_products(inputs)
    assert wide.q_BHQD.shape[-1] == wide.k_BGKD.shape[-1] == 32
    found = wide.q_BHQD.double() @ wide.k_BGKD.double().mT
    exact = -0.5 * torch.cdist(q.double(), k.double()).square()
    largest_square = max(t.double().square().sum(-1).max() for t in (q, k))
    assert (found - exact).abs().max() <= 2**-23 * largest_square


def test_keys_too_wide_for_the_kernels_stay_in_blocks(kernel_calls: list[object]) -> None:
    wide = tuple(t.detach() for t in draw((1, 1, 1, 20, 20, 256, 16)))  # with the squares 512 columns
    expected = attnorm.attention(*(t.double() for t in wide), "gaussian")
    found = attnorm.attention(*wide, "gaussian")
    assert not kernel_calls
    assert (found - expected).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_second_derivatives_need_float64(dtype: torch.dtype) -> None:
    q, k, v = draw((1, 1, 1, 20, 20, 4, 4), dtype)
    (gradient,) = torch.autograd.grad(attnorm.attention(q, k, v, "gaussian").square().sum(), q, create_graph=True)
    if dtype == torch.float32:
        with pytest.raises(RuntimeError, match="float64"):
            torch.autograd.grad(gradient.square().sum(), q)
    else:
        assert torch.autograd.grad(gradient.square().sum(), q)[0].isfinite().all()


class Attention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attnorm.attention(q, k, v, "gaussian")


def test_an_exported_graph_has_none_of_our_kernels_and_takes_other_lengths() -> None:
    traced, longer = (tuple(t.detach() for t in draw((1, 2, 2, n, n, 8, 8))) for n in (20, 40))
    length = {2: torch.export.Dim("length", min=3, max=4096)}
    program = torch.export.export(Attention(), traced, dynamic_shapes=(length,) * 3)
    assert not [node for node in program.graph.nodes if "attnorm" in str(node.target)]
    torch.testing.assert_close(program.module()(*longer), Attention()(*longer), rtol=1e-4, atol=1e-4)


def test_a_compiled_graph_is_whole_with_gradients() -> None:
    tensors, gaussian = draw((1, 2, 2, 20, 20, 8, 8), spread=0.5), Gaussian()

    def attend(*given: Tensor) -> Tensor:
        return attnorm.attention(*given, gaussian, causal=True)

    outputs = attend(*tensors), torch.compile(attend, fullgraph=True, backend="aot_eager")(*tensors)
    gradients = (torch.autograd.grad(output.square().sum(), tensors) for output in outputs)
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*gradients)
