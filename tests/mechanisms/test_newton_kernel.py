"""All steps of Newton's inverse in one kernel, on a GPU or in Triton's interpreter, against the inverse in float64."""

import pytest
import torch
from torch import Tensor, nn

from attnorm.mechanisms import soft
from attnorm.mechanisms.soft import RIDGE, gaussian_logits, newton_inverse
from tests.attention.kernel_calls import DEVICE

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")


def kernel_matrices(size: int, spread: float) -> Tensor:
    points = spread * torch.randn(2, 3, size, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(size))
    return torch.exp(gaussian_logits(points, points, 8**-0.5)).to(DEVICE)


def residual(a: Tensor, inverse: Tensor) -> Tensor:
    unit = torch.eye(a.shape[-1], dtype=torch.float64, device=a.device)
    return ((a + RIDGE * unit) @ inverse.double() - unit).abs().max()


@pytest.fixture(autouse=True)
def _in_the_interpreter_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soft, "_runs_kernel", soft.fits_kernel)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes that reached the kernel."""
    shapes: list[torch.Size] = []
    launch = soft._newton_inverse_kernel
    monkeypatch.setattr(soft, "_newton_inverse_kernel", lambda a, steps: (shapes.append(a.shape), launch(a, steps))[1])
    return shapes


@pytest.mark.parametrize("spread", [0.0, 0.3, 1.5])
@pytest.mark.parametrize("size", [1, 16, 50, 64])
def test_it_is_as_good_as_the_direct_inverse(size: int, spread: float, launches: list[torch.Size]) -> None:
    a = kernel_matrices(size, spread)
    ours = residual(a, newton_inverse(a.float()))
    direct = residual(a, torch.linalg.inv(a.float() + RIDGE * torch.eye(size, device=DEVICE)))
    assert launches == [a.shape]
    assert ours <= 4 * direct + 1e-6


def test_its_gradient_is_that_of_the_inverse() -> None:
    a = kernel_matrices(20, 1.5)
    probe = torch.linspace(-1, 1, a.numel(), dtype=torch.float64, device=DEVICE).reshape(a.shape)
    single = a.float().requires_grad_()
    exact = a.clone().requires_grad_()
    (ours,) = torch.autograd.grad((newton_inverse(single).double() * probe).sum(), single)
    (direct,) = torch.autograd.grad(
        (torch.linalg.inv(exact + RIDGE * torch.eye(20, device=DEVICE)) * probe).sum(), exact
    )
    assert (ours.double() - direct).norm() <= 1e-4 * direct.norm()


@pytest.mark.parametrize(("size", "dtype"), [(65, torch.float32), (9, torch.float64)], ids=str)
def test_what_the_kernel_cannot_hold_is_left_to_torch(
    size: int, dtype: torch.dtype, launches: list[torch.Size]
) -> None:
    a = kernel_matrices(size, 1.5)
    assert residual(a, newton_inverse(a.to(dtype))) < 1e-3
    assert not launches


def test_a_matrix_that_is_not_finite_leaves_the_others_alone() -> None:
    a = kernel_matrices(9, 1.5).float()
    expected = newton_inverse(a)
    a[0, 1] = float("nan")
    found = newton_inverse(a)
    assert found[0, 1].isnan().all()
    assert found[0, 0].equal(expected[0, 0])
    assert found[1].equal(expected[1])


class Inverse(nn.Module):
    def forward(self, a: Tensor) -> Tensor:
        return newton_inverse(a)


def test_an_exported_graph_has_none_of_our_kernels(launches: list[torch.Size]) -> None:
    a = kernel_matrices(9, 1.5).float()
    program = torch.export.export(Inverse(), (a,))
    assert not launches
    torch.testing.assert_close(program.module()(a), newton_inverse(a), rtol=1e-4, atol=1e-3)
